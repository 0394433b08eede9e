"""The best route among some workers, and the workers that come into question. Torch-free.

In a small deployment all do. In a large one it is those that have the most of the prompt (holdings.py), and of those
that write and of those that do not the ones that cost the least for a prompt of about this length (ranks.py). The work
of a decision is then the same for a hundred workers and for ten thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from twostroke.cluster.holdings import Holdings
from twostroke.cluster.ranks import CostRanks
from twostroke.cluster.standing import BlockName, RoutedWorker, kept_of
from twostroke.ops.interface import BLOCK

FEW = 12  # workers that are all compared
WRITERS = 3  # that cost the least
HELPERS = 2  # that compute prompts alone, and cost the least
HOLDERS = 3  # that have the most of a prompt
CHUNK = 512  # tokens of a step at most, after which a worker that computes prompts gives blocks away
LENGTHS = (64, 1024, 16384)  # of prompts for which workers are ordered, a factor of 16 apart

# A prompt at one worker: seconds until it is computed and those that the streams there wait meanwhile, together; the
# number of the worker; seconds until it is computed; leading blocks that the worker has; tokens that it computes;
# blocks that it fetches before.
PromptCost = tuple[float, int, float, int, int, int, RoutedWorker]
# Cost; where the prompt is computed; where the answer is written; the worker that has the most of the prompt.
RouteChoice = tuple[float, PromptCost, PromptCost, RoutedWorker | None]
Times = tuple[float, float]  # latency of a transfer; seconds for each block


class Ask(NamedTuple):
    """A request as the router sees it."""

    tokens: int  # of its prompt
    names: Sequence[BlockName] = ()  # of the prompt's full blocks, in order
    due: float = inf  # seconds within which its first token should be out


class Shortlist:
    """Workers that come into question."""

    def __init__(self) -> None:
        self._writers = [CostRanks(tokens) for tokens in LENGTHS]
        self._helpers = [CostRanks(tokens) for tokens in LENGTHS]

    def changed(self, worker: RoutedWorker) -> None:
        for ranks in self._writers if worker.writes else self._helpers:
            ranks.changed[worker] = None

    def drop(self, worker: RoutedWorker) -> None:
        """It is gone, or has another role."""
        for ranks in (*self._writers, *self._helpers):
            ranks.drop(worker)

    def of(self, tokens: int, names: Sequence[BlockName], holdings: Holdings) -> Iterable[RoutedWorker]:
        length = min(len(LENGTHS) - 1, max(0, (tokens.bit_length() - 5) // 4))
        found = self._writers[length].least(WRITERS)
        if names:
            found += self._helpers[length].least(HELPERS)
            found += holdings.most(names, HOLDERS)
        return dict.fromkeys(found)


def best(
    workers: Iterable[RoutedWorker],
    length: int,
    names: Sequence[BlockName],
    times: Times,
    prefix_times: Times | None,
    apart: bool,
    but: RoutedWorker | None,
    others: bool = True,
) -> RouteChoice | None:
    """The choice with the least cost. times: of a transfer to the writer. prefix_times: of what is fetched before a
    prompt is computed; None: nothing is. apart: prompts with a full block are computed by workers that do nothing else,
    or by others than the writer where there are none. but: a worker that is not asked. others: what other answers wait
    counts too."""
    prompts: list[PromptCost] = []
    helpers: list[PromptCost] = []
    blocks, (latency, block_seconds) = len(names), times
    asked = [worker for worker in workers if worker.open and worker is not but]
    found, richest, most = holdings_of(asked, names)
    left, coming = max(1, length - most * BLOCK), 0.0
    if richest is not None and prefix_times is not None:
        coming = min(richest.wait, CHUNK * richest.token) + prefix_times[0]
    for worker, cached in zip(asked, found, strict=True):
        tokens, fetched, wait, token = length - cached * BLOCK, 0, worker.wait, worker.token
        own = token * tokens if tokens > 1 else token
        done = wait + own
        if cached < most and prefix_times is not None:
            there = coming + (most - cached) * prefix_times[1]
            sooner = (wait if wait > there else there) + left * token
            if sooner < done:
                tokens, fetched, own, done = left, most - cached, left * token, sooner
        cost = done + worker.streams * own if others else done
        prompt = (cost, worker.number, done, cached, tokens if tokens > 1 else 1, fetched, worker)
        if worker.writes:
            prompts.append(prompt)
        if blocks and worker.helps:
            helpers.append(prompt)
    if apart:
        helpers = [one for one in helpers if not one[-1].writes] or helpers
    helpers.sort()
    alone = not (apart and helpers)
    lost = min([one[0] - one[2] for one in helpers], default=inf)  # the least that streams wait for a helper
    chosen, least = None, inf
    for prompt in prompts:
        cost, _, done, cached, _, _, writer = prompt
        step, place = writer.step, writer.place
        if alone:
            whole = cost + step if done >= place else place + cost - done + step
            if whole < least:
                chosen, least = (whole, prompt, prompt, richest), whole
        place += step
        if place + lost >= least:
            continue  # no helper can make it sooner
        after = step if cached == blocks else latency + (blocks - cached) * block_seconds + step
        for helper in helpers:
            cost = helper[0]
            if cost + after >= least:
                break  # the helpers after it cost more still
            if helper is prompt:
                continue
            ready = helper[2] + after
            whole = (ready if ready > place else place) + cost - helper[2]
            if whole < least:
                chosen, least = (whole, helper, prompt, richest), whole
            if place == step:
                break  # nor do they where the writer has a place
    return chosen


def first_token(choice: RouteChoice) -> float:
    """Seconds until it is out. A worker that also writes the answer needs a place for it before."""
    _, prompt, decode, _ = choice
    return max(prompt[2], prompt[-1].place) if prompt is decode else prompt[2]


def holdings_of(
    workers: Sequence[RoutedWorker], names: Sequence[BlockName]
) -> tuple[list[int], RoutedWorker | None, int]:
    """Leading blocks of a prompt that each worker has; the worker that has the most, and how many."""
    first, kept, guess = names[0] if names else b"", kept_of(names), 0
    found, richest, most = [0] * len(workers), None, 0
    for place, worker in enumerate(workers):
        if first in worker.held:
            guess = found[place] = worker.cached(names, kept, guess)
            if guess > most:
                richest, most = worker, guess
    return found, richest, most
