"""The commands `cache list`, `stats`, `forget` and `clear`: the answer cache of a running server."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from twostroke.errors import ConfigError, InputError

cache_app = typer.Typer(no_args_is_help=True, help="The answer cache of a running server.", rich_markup_mode=None)
Url = Annotated[str, typer.Option(help="Where the server listens.")]
AdminKey = Annotated[str | None, typer.Option(envvar="TWOSTROKE_ADMIN_KEY", help="An admin key of the server.")]
DEFAULT_URL = "http://127.0.0.1:8000"


def ask(url: str, key: str | None, method: str, path: str, **more: Any) -> dict[str, Any]:
    import httpx

    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(method, url.rstrip("/") + path, headers=headers, timeout=60.0, **more)
        document: dict[str, Any] = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"--url {url}: no answer ({type(error).__name__}); is the server running there?") from None
    if answer.status_code != 200:
        raise InputError(str(document.get("error", {}).get("message", f"the server answered {answer.status_code}.")))
    return document


@cache_app.command("list")
def list_answers(
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, the latest first.")] = 20,
) -> None:
    """The latest stored answers: id, age, tokens, tenant, question."""
    found = ask(url, admin_key, "GET", "/twostroke/answers", params={"limit": limit})
    now = time.time()
    for one in found["answers"]:
        age, tiers = f"{now - one['created']:.0f} s", "+".join(one["tiers"])
        typer.echo(
            f"{one['id']}  {age:>9}  {one['output_tokens']:>5} tokens  {tiers:14}  {one['tenant']}  {one['question']}"
        )


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@cache_app.command()
def stats(url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Hits, misses, savings, and the estimated error. The error is shown with its bound."""
    found = ask(url, admin_key, "GET", "/twostroke/answers", params={"limit": 0})
    error = found.pop("error")
    for name in ("answers", "borderline", "kinds"):
        found.pop(name)
    for name, value in found.items():
        typer.echo(f"{name:16} {shown(value)}")
    threshold = "nothing is shared yet" if error["threshold"] is None else f"from similarity {error['threshold']:.2f}"
    typer.echo(
        f"{'error':16} {error['rate']:.2%}, at most {error['upper']:.2%} with 95 % confidence, "
        f"of {error['pairs']} pairs; {threshold}"
    )


@cache_app.command()
def forget(
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    question: Annotated[str | None, typer.Option(help="A part of the question.")] = None,
    older_than: Annotated[float | None, typer.Option(min=0, help="Age in seconds.")] = None,
    tenant: Annotated[str | None, typer.Option(help="A tenant, as `cache list` shows it.")] = None,
) -> None:
    """Forget answers by question, age or tenant."""
    given = {"question": question, "older_than": older_than, "tenant": tenant}
    body = {name: value for name, value in given.items() if value is not None}
    if not body:
        raise ConfigError("give --question, --older-than or --tenant; `cache clear` forgets everything.")
    typer.echo(f"forgotten: {ask(url, admin_key, 'POST', '/twostroke/answers/forget', json=body)['forgotten']}")


@cache_app.command()
def clear(url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Forget everything."""
    body = {"all": True}
    typer.echo(f"forgotten: {ask(url, admin_key, 'POST', '/twostroke/answers/forget', json=body)['forgotten']}")
