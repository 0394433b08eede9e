"""Several workers as one engine to look at: their settings, health and changes. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from twostroke.cluster.member import Member
from twostroke.cluster.mixed import without_promise
from twostroke.cluster.router import Role
from twostroke.config import Resolved
from twostroke.errors import ConfigError
from twostroke.metrics.steplog import Step
from twostroke.record import replace
from twostroke.remote.client import EngineError, EngineListener
from twostroke.remote.messages import Ready

NAMED_BY = (
    "kv_dtype",
    "dtype",
    "quantize",
    "exact",
    "device",
    "draft_model",
    "parallel",
)  # what names of blocks depend on
MAY_DIFFER = ("dtype", "quantize", "exact", "device")  # of these, in pools that are told so (mixed.py)
MOST_READ = 8  # workers whose steps are read


class Group:
    """The part of `Pools` that does not move requests."""

    members: dict[str, Member]  # by name
    listener: EngineListener
    ready: Ready | None

    @property
    def _shown(self) -> Member:
        """The worker whose settings and steps stand for all: one that writes answers, and is up if any is."""
        writers = [member for member in self.members.values() if member.role is not Role.PREFILL]
        return next((member for member in writers if member.up), (writers or list(self.members.values()))[0])

    def _joined(self) -> Ready:
        ready = self._shown.worker.ready
        assert ready is not None, "it was ready at the start"
        return msgspec.structs.replace(ready, settings=self._joined_settings())

    def _joined_settings(self) -> Resolved:
        """The settings of one worker that writes, with the room of all that do. Requests must fit every worker."""
        known = [(member, member.worker.ready.settings) for member in self.members.values() if member.worker.ready]
        up = [pair for pair in known if pair[0].up] or known
        writing = [settings for member, settings in up if member.role is not Role.PREFILL]
        writing = writing or [settings for _, settings in up]
        return replace(
            without_promise(writing[0], self._mixed),
            max_model_len=min(settings.max_model_len for _, settings in known),
            max_requests=sum(settings.max_requests for settings in writing),
            kv_blocks=sum(settings.kv_blocks for settings in writing),
        )

    def on_settings(self, member: Member, settings: Resolved) -> None:
        if self.ready is not None and member is self._shown:
            self.listener.on_settings(replace(without_promise(settings, self._mixed), **self._sums()))

    @property
    def _mixed(self) -> tuple[str, ...]:
        ready = self._shown.worker.ready
        return () if ready is None else ready.mixed

    def _sums(self) -> dict[str, Any]:
        joined = self._joined_settings()
        return {name: getattr(joined, name) for name in ("max_model_len", "max_requests", "kv_blocks")}

    def _tell_settings(self) -> None:
        """Fewer or more requests are admitted with fewer or more workers."""
        if self.ready is not None and any(member.up for member in self.members.values()):
            self.listener.on_settings(replace(self._joined_settings(), **self._shown.worker.changed))

    # ---- questions -------------------------------------------------------------------------------------------------

    @property
    def changed(self) -> dict[str, Any]:
        return self._shown.worker.changed

    async def change(self, wanted: dict[str, Any]) -> None:
        """For all workers, or for none."""
        if "max_requests" in wanted:
            raise ConfigError(
                "max_requests: this deployment shows the sum over its workers, and each has its own: start it again "
                "with --set, --prefill-set or --decode-set max_requests=N."
            )
        done: list[tuple[Member, dict[str, Any]]] = []
        try:
            for member in self.members.values():
                before = current(member, wanted)
                await member.worker.change(wanted)
                done.append((member, before))
        except (ConfigError, EngineError):
            for member, before in done:
                await member.worker.change(before)
            raise

    def change_role(self, name: str, role: Role) -> None:
        """From the next request on; what the worker has it ends. All workers have the same model, so any can take any
        role; each keeps its settings."""
        member = self.named(name)
        others = [one.role for one in self.members.values() if one is not member]
        if all(one is Role.PREFILL for one in (role, *others)):
            raise ConfigError(f"role: {name} is the last worker that writes answers: give another one that role first.")
        member.role = role
        self._tell_settings()

    async def steps(self, since: int, limit: int) -> tuple[Step, ...]:
        """The steps of one worker that writes answers."""
        return await self._shown.worker.steps(since, limit)

    def named(self, name: str | None) -> Member:
        """A worker; without a name, the one that stands for all. ConfigError: there is none of this name."""
        if name is not None and name not in self.members:
            raise ConfigError(f"worker: there is no {name}; the workers are {', '.join(self.members)}.")
        return self._shown if name is None else self.members[name]

    @property
    def healthy(self) -> bool:
        """One worker is enough to serve."""
        return self.ready is not None and any(member.usable for member in self.members.values())

    def trouble(self) -> str | None:
        if self.healthy:
            return None
        said = {name: member.worker.trouble() for name, member in self.members.items()}
        return "; ".join(f"{name}: {why}" for name, why in said.items() if why) or "no worker is ready"


def current(member: Member, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The present values of these settings."""
    ready = member.worker.ready
    values = {name: getattr(ready.settings, name, None) for name in wanted} if ready is not None else {}
    return values | {name: value for name, value in member.worker.changed.items() if name in wanted}


def check_names(ready: Mapping[str, Ready]) -> None:
    """ConfigError: the workers would not find each other's blocks."""
    (one, first), *others = ready.items()
    for other, second in others:
        if first.names == second.names:
            continue
        named_by = [name for name in NAMED_BY if not (first.mixed and name in MAY_DIFFER)]
        pairs = [(name, getattr(first.settings, name), getattr(second.settings, name)) for name in named_by]
        differing = [f"{name} is {mine} for {one} and {its} for {other}" for name, mine, its in pairs if mine != its]
        why = "; ".join(differing) or unlike(one, first, other, second)
        raise ConfigError(f"the workers do not give equal names to equal KV blocks: {why}. Start them alike.")


def unlike(one: str, first: Ready, other: str, second: Ready) -> str:
    mine, its, kv_dtype = first.settings.device, second.settings.device, first.settings.kv_dtype
    if first.mixed and mine != its:
        return f"{one} on {mine} and {other} on {its} keep {kv_dtype} in different ways: give all kv_dtype=bfloat16"
    return f"{one} and {other} have other weights or another block key"


def workers_to_read(workers: Mapping[str, Any]) -> list[str]:
    """Names of workers whose steps together show how fast prompts and answers are: some of each role. workers: what the
    route /twostroke/workers gives."""
    up = [one for one in workers["workers"] if one["healthy"]]
    prefill = [one["name"] for one in up if one["role"] == "prefill"]
    others = [one["name"] for one in up if one["role"] != "prefill"]
    return prefill[: MOST_READ // 2] + others[: MOST_READ - min(len(prefill), MOST_READ // 2)]
