"""The best route among some workers, and the workers that come into question. Torch-free.

In a small deployment all do. In a large one it is those that have the most of the prompt (holdings.py), and of those
that write and of those that do not the ones that cost the least for a prompt of about this length (ranks.py). The work
of a decision is then the same for a hundred workers and for ten thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from twostroke.cluster.holdings import Holdings
from twostroke.cluster.ranks import Ranks
from twostroke.cluster.standing import Worker
from twostroke.ops.interface import BLOCK

FEW = 12  # workers that are all compared
WRITERS = 3  # that cost the least
HELPERS = 2  # that compute prompts alone, and cost the least
HOLDERS = 3  # that have the most of a prompt
LENGTHS = (64, 1024, 16384)  # of prompts for which workers are ordered, a factor of 16 apart

# A prompt at one worker: seconds until it is computed and those that the streams there wait meanwhile, together; the
# number of the worker; seconds until it is computed; leading blocks that the worker has; tokens that it computes.
Prompt = tuple[float, int, float, int, int, Worker]
Choice = tuple[float, Prompt, Prompt]  # cost; where the prompt is computed; where the answer is written


class Shortlist:
    """Workers that come into question."""

    def __init__(self) -> None:
        self._writers = [Ranks(tokens) for tokens in LENGTHS]
        self._helpers = [Ranks(tokens) for tokens in LENGTHS]

    def changed(self, worker: Worker) -> None:
        for ranks in self._writers if worker.writes else self._helpers:
            ranks.changed.add(worker)

    def drop(self, worker: Worker) -> None:
        """It is gone, or has another role."""
        for ranks in (*self._writers, *self._helpers):
            ranks.drop(worker)

    def of(self, tokens: int, names: Sequence[bytes], holdings: Holdings) -> Iterable[Worker]:
        length = min(len(LENGTHS) - 1, max(0, (tokens.bit_length() - 5) // 4))
        found = self._writers[length].least(WRITERS)
        if names:
            found += self._helpers[length].least(HELPERS)
            found += holdings.most(names, HOLDERS)
        return dict.fromkeys(found)


def best(
    workers: Iterable[Worker],
    length: int,
    names: Sequence[bytes],
    latency: float,
    block_seconds: float,
    apart: bool,
    but: Worker | None,
) -> Choice | None:
    """latency, block_seconds: of a transfer. apart: prompts with a full block are computed by workers that do nothing
    else, or by others than the writer where there are none. but: a worker that is not asked."""
    prompts: list[Prompt] = []
    helpers: list[Prompt] = []
    first, blocks, guess = names[0] if names else b"", len(names), 0
    for worker in workers:
        if not worker.open or worker is but:
            continue
        cached, tokens = 0, length
        if first in worker.held:
            guess = cached = worker.cached(names, guess)
            tokens = max(1, length - cached * BLOCK)
        own = tokens * worker.token
        done = worker.wait + own
        prompt = (done + worker.streams * own, worker.number, done, cached, tokens, worker)
        if worker.writes:
            prompts.append(prompt)
        if first and worker.helps:
            helpers.append(prompt)
    if apart:
        helpers = [one for one in helpers if not one[-1].writes] or helpers
    helpers.sort()
    alone = not (apart and helpers)
    lost = min([one[0] - one[2] for one in helpers], default=inf)  # the least that streams wait for a helper
    chosen, least = None, inf
    for prompt in prompts:
        cost, _, done, cached, _, writer = prompt
        step, place = writer.step, writer.place
        if alone:
            whole = cost + step if done >= place else place + cost - done + step
            if whole < least:
                chosen, least = (whole, prompt, prompt), whole
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
                chosen, least = (whole, helper, prompt), whole
            if place == step:
                break  # nor do they where the writer has a place
    return chosen
