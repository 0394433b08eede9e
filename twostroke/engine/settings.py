"""Settings that a running engine takes: the scheduler uses them from its next plan on. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twostroke.config import SETTINGS, Config, Resolved, longest_that_fits
from twostroke.draft.speculate import make_drafter
from twostroke.errors import ConfigError
from twostroke.record import replace
from twostroke.schedule.policy import POLICIES

if TYPE_CHECKING:
    from twostroke.schedule.scheduler import Scheduler

LIVE = tuple(name for name, setting in SETTINGS.items() if setting.live)


def change(scheduler: Scheduler, settings: Resolved, wanted: Mapping[str, Any]) -> Resolved:
    """Use `wanted` from the next plan on; returns all settings as they are then. ConfigError: nothing was changed."""
    for name in wanted:
        if name not in LIVE:
            raise ConfigError(f"{name} cannot change while the engine runs: start it again. Live: {', '.join(LIVE)}.")
    given = {name: value for name, value in wanted.items() if value is not None}
    check_combination(settings, given)
    rows = len(scheduler.tables.held)
    if given.get("max_requests", 0) > rows:
        fix = f"start again with max_requests={given['max_requests']}"
        raise ConfigError(f"max_requests was {rows} at the start, the most it can have: {fix}.")
    then = replace(settings, **given)
    if then.max_requests > then.max_batch_tokens:
        raise ConfigError("max_batch_tokens must not be below max_requests: every stream needs a token of the step.")
    length, chunked = then.max_model_len, then.chunked_prefill
    if longest_that_fits(then.layout, then.kv_blocks, length, then.max_batch_tokens, chunked) < length:
        raise ConfigError(
            f"{'max_batch_tokens' if chunked else 'chunked_prefill'}: with steps of that size the {then.kv_blocks} KV "
            f"blocks cannot hold a request of {length} tokens: start the engine again."
        )
    scheduler.limits = replace(
        scheduler.limits,
        max_batch_tokens=then.max_batch_tokens,
        max_requests=then.max_requests,
        chunked=then.chunked_prefill,
        static=then.batching == "static",
    )
    if then.speculate != settings.speculate:
        scheduler.drafter = make_drafter(
            then.speculate, then.device, scheduler.forced, scheduler.draft_share, scheduler.longest_step
        )
    scheduler.policy = POLICIES[then.policy]
    scheduler.waiting.sort(key=scheduler.policy.key)
    scheduler.pace.max_gap = then.max_gap
    scheduler.tables.pool.keep_cached = then.prefix_cache
    if not then.prefix_cache:
        scheduler.tables.pool.clear()
    return then


def check_combination(settings: Resolved, given: Mapping[str, Any]) -> None:
    """Each value and their combination, as at a start. A max_gap that is given must be one that can hold."""
    given = dict(given) | {"draft_model": settings.draft_model}
    Config(**given)
    if not given.get("prefix_cache", True) and settings.kv_offload:
        raise ConfigError(
            "prefix_cache: kv_offload, set at the start, keeps what it evicts: start without one of them."
        )
    if "max_gap" in given:
        now: dict[str, Any] = {"chunked_prefill": settings.chunked_prefill, "policy": settings.policy}
        Config(**(now | given))
