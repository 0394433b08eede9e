"""A scheduling policy is a sort key: which request gets the next tokens of the budget. Torch-free.

policy           which request goes first                         good for
fcfs             the one that arrived first                       fairness; the default
priority         the lowest `priority`                            paid tiers, foreground before background
deadline         the one whose first token is due soonest         TTFT targets that differ
shortest         the one with the fewest tokens left to prefill   mean TTFT
longest-prefix   the one with most of its prompt in the cache     shared prefixes under memory pressure
prefill-first    prompts before running streams                   TTFT above all; streams may stall
decode-first     streams; prompts may at most double their step   TPOT above all

Among requests that are equal to a policy, API keys take turns (keys.py); then the order of arrival decides.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from twostroke.types import RequestState

SortKey = tuple[float, ...]


class Policy(NamedTuple):
    name: str
    key: Callable[[RequestState], SortKey]
    by_cached_prefix: bool = False  # the key changes with the cache: longest cached prefix before everything else
    prompts_first: bool = False  # streams get only what the prompts leave of the budget
    gentle: bool = False  # a prompt may at most double the step of the running streams


def _arrival(request: RequestState) -> SortKey:
    return (request.turn, request.timeline.arrival, request.id)


def _priority(request: RequestState) -> SortKey:
    return (request.params.priority, *_arrival(request))


def _deadline(request: RequestState) -> SortKey:
    due = request.params.deadline
    return (inf if due is None else request.timeline.arrival + due, *_arrival(request))


def _shortest(request: RequestState) -> SortKey:
    return (len(request.tokens) - request.computed, *_arrival(request))


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("fcfs", _arrival),
        Policy("priority", _priority),
        Policy("deadline", _deadline),
        Policy("shortest", _shortest),
        Policy("longest-prefix", _arrival, by_cached_prefix=True),
        Policy("prefill-first", _arrival, prompts_first=True),
        Policy("decode-first", _arrival, gentle=True),
    )
}
