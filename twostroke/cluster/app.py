"""A deployment as a Ray Serve application: `serve run twostroke.cluster.app:app model=smollm2-135m prefill=1 decode=1`.

    client ─▶ Serve's proxy ─▶ a replica: the server's application and the router ══▶ workers

The arguments are the options of `twostroke cluster`. This is an entry point, as the commands are: it may import what
lies above this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
import typer
from ray import serve

from twostroke.cli.cluster import cluster_options
from twostroke.cli.server_options import say
from twostroke.errors import ConfigError
from twostroke.serve.serving import Serving, open_serving
from twostroke.serve.transport.http import AsgiMessage, Receive, Send

SERVES = ("host", "port")  # what Serve's proxy listens on
MOST_REQUESTS = (
    10_000  # at once: who is admitted is decided by the application, which answers 429 and says when to retry
)
TRUE, FALSE = ("true", "1"), ("false", "0")


def app(arguments: dict[str, Any]) -> serve.Application:
    """What `serve run` and `serve deploy` build. Lists may be given as one text with commas."""
    typed = command_line(arguments)
    deployment = serve.deployment(
        name="twostroke", num_replicas=1, max_ongoing_requests=MOST_REQUESTS, ray_actor_options={"num_cpus": 0}
    )
    return deployment(serve.ingress(front)(Replica)).bind(typed)


def command() -> Any:
    commands = typer.Typer(rich_markup_mode=None, add_completion=False)
    commands.command()(cluster_options)
    return typer.main.get_command(commands)


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """The command line as it would be typed. ConfigError: these are no options of the command."""
    known = {option.name: option for option in command().params if option.name not in SERVES}
    known |= {flag.lstrip("-").replace("-", "_"): option for option in known.values() for flag in option.opts}
    typed: list[str] = []
    for name, value in arguments.items():
        if name not in known:
            raise ConfigError(f"{name}: no such argument; they are the options of `twostroke cluster`, without --host "
                              "and --port: those are Serve's.")  # fmt: skip
        typed += typed_option(known[name], name, value)
    try:
        command().make_context("twostroke cluster", list(typed))
    except typer.BadParameter as error:
        raise ConfigError(error.format_message()) from None
    return typed


def typed_option(option: Any, name: str, value: Any) -> list[str]:
    if option.param_type_name == "argument":
        return [str(value)]
    flag = option.opts[0]
    if getattr(option, "is_flag", False):
        if str(value).lower() not in (*TRUE, *FALSE):
            raise ConfigError(f"{name}: {value!r} is neither true nor false.")
        return [flag] if str(value).lower() in TRUE else []
    if option.multiple:
        values = value.split(",") if isinstance(value, str) else value
        return [part for one in values for part in (flag, str(one))]
    return [flag, str(value)]


class Replica:
    """The process that has the router. The Ray of its workers is the one that it runs on."""

    here: Serving

    async def __init__(self, typed: list[str]):  # type: ignore[misc]  # Serve awaits it
        if "--address" not in typed:
            typed = [*typed, "--address", ray.get_runtime_context().gcs_address]
        options = command().main(typed, standalone_mode=False)
        serving = Replica.here = await open_serving(options, say)
        try:
            await serving.load()
        except BaseException:
            await serving.close(0.0)
            raise


def front() -> Front:
    """Serve calls it in the replica, after `Replica` was made."""
    return Front(Replica.here)


class Front:
    """An ASGI application with a life: it ends the deployment with the replica."""

    def __init__(self, serving: Serving):
        self.serving = serving

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self.serving.app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self.serving.close(1.0)
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "lifespan.startup.complete"})
