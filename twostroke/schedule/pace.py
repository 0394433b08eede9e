"""How much prompt a step may carry so that no running stream waits longer than `max_gap`. Torch-free.

A mixed step costs what its streams cost plus what its prompt tokens cost. Both are learnt from measured steps: the
streams' own step in seconds, for each doubling of their number; the prompts' in seconds per FLOP, because a token
deep in a long context costs more. Each estimate is a moving mean with a moving deviation, as TCP estimates its
round-trip time, and plans use mean + 2 deviations: a noisy machine makes the chunks smaller instead of the gaps longer.
A value below half the mean starts the estimate anew: the values before it included a cost that does not recur (a kernel
was compiled, a step was captured), and with small chunks the mean would fall slowly.

The cost of prompts is a difference: where streams take most of a step, an error in the streams' time makes prompts look
free, and the next chunk would be many times too long. Three rules prevent that. The predicted time of streams never
falls when streams are added. A step in which streams take most of the time never starts the estimate anew. A step in
which prompts take less than a tenth of the time teaches nothing about prompts.

A prompt whose log probabilities are wanted costs more: every row of it goes through the head, and its probabilities are
made and sorted. That does not grow with the context, so it has a price per row, in seconds, learnt from what such a
step takes beyond its streams and its FLOPs. Until it is measured, the chunks are the smallest ones.
"""

from __future__ import annotations

from collections.abc import Callable

from twostroke.ops.interface import BLOCK
from twostroke.types import Plan, WorkKind

READ = WorkKind.READ
MARGIN = 0.85  # of max_gap that a step may be planned to take; the rest is for what happens between steps
SMOOTHING = 0.2
LEAST_SHARE = 0.1  # of a step: prompts that take less teach nothing about prompts
# The smallest chunk, in tokens: a prompt always advances, even where this chunk takes longer than max_gap. On a GPU a
# mixed step has a fixed cost that a hundred tokens hardly raise, so smaller chunks would be all fixed cost. Twice as
# many tokens take nearly all of a default max_gap at the end of a prompt of 64k tokens.
MIN_CHUNK = {"cpu": BLOCK, "cuda": 8 * BLOCK}


class Estimate:
    """Moving mean and mean deviation of a positive quantity."""

    def __init__(self) -> None:
        self.mean: float | None = None
        self.deviation = 0.0

    def add(self, value: float, certain: bool = True) -> None:
        """certain: it may start the estimate anew."""
        if self.mean is None or (certain and value < self.mean / 2):
            self.mean, self.deviation = value, value / 4
            return
        self.deviation += SMOOTHING * (abs(value - self.mean) - self.deviation)
        self.mean += SMOOTHING * (value - self.mean)

    @property
    def careful(self) -> float:
        return 0.0 if self.mean is None else self.mean + 2 * self.deviation


class Pace:
    def __init__(self, flops: Callable[[int, int], float], max_gap: float, min_chunk: int = BLOCK):
        self.flops = flops  # (start, count) -> FLOPs of that part of a prompt
        self.max_gap = max_gap
        self.min_chunk = min_chunk  # whole blocks
        self.stream_steps: dict[int, Estimate] = {}  # seconds of a step without prompts, by doublings of its streams
        self.prompt_rate = Estimate()  # seconds per prompt FLOP
        self.row_price = Estimate()  # seconds of a prompt's row whose log probabilities are wanted, beyond its FLOPs

    def anew(self, max_gap: float | None = None) -> Pace:
        """The same limits (but for another gap, where one is given), and nothing learnt yet."""
        return Pace(self.flops, self.max_gap if max_gap is None else max_gap, self.min_chunk)

    def observe(self, plan: Plan, seconds: float) -> None:
        prompt, streams, scored = 0.0, 0, 0
        for request, start, count, kind, _ in plan.works:
            if kind is READ:
                prompt += self.flops(start, count)
                scored += count * request.scores_prompt
            else:
                streams += count
        self.learn(prompt, streams, seconds, scored)

    def learn(self, prompt: float, streams: int, seconds: float, scored: int = 0) -> None:
        """Learn from a step with so many FLOPs of prompts and so many streams; scored: rows with their log
        probabilities."""
        if not prompt:
            size = streams.bit_length()
            if size not in self.stream_steps:
                self.stream_steps[size] = Estimate()
            self.stream_steps[size].add(seconds)
            return
        own, least = seconds, LEAST_SHARE * seconds
        if streams:
            own -= self.least_of(streams)
            if own < least:
                # Streams alone cannot take as long as with prompts beside them.
                self.stream_step(streams).add((1 - LEAST_SHARE) * seconds)
                if (self.row_price if scored else self.prompt_rate).mean is not None:
                    return
        certain = own > seconds / 2
        if scored:
            rows = own - (self.prompt_rate.mean or 0.0) * prompt
            self.row_price.add(max(rows, least) / scored, certain)
        else:
            self.prompt_rate.add(max(own, least) / prompt, certain)

    def stream_step(self, streams: int) -> Estimate:
        """The estimate for steps with about so many streams: that of the nearest number that was measured."""
        size = streams.bit_length()
        nearest = min(self.stream_steps, key=lambda known: abs(known - size), default=None)
        return Estimate() if nearest is None else self.stream_steps[nearest]

    def least_of(self, streams: int) -> float:
        """The shortest step that was measured with so many streams or more, in seconds."""
        size = streams.bit_length()
        known = [estimate.mean or 0.0 for of, estimate in self.stream_steps.items() if of >= size]
        return min(known) if known else self.stream_step(streams).mean or 0.0

    def allowance(self, gentle: bool, streams: int) -> float:
        """Seconds of prompt work that a step with so many running streams may carry."""
        alone = self.stream_step(streams)
        target = MARGIN * self.max_gap
        if gentle and alone.mean is not None:
            target = min(target, 2 * alone.mean)
        return max(0.0, target - alone.careful)

    def seconds(self, start: int, count: int, scored: bool = False) -> float:
        """Seconds of so many tokens of a prompt; scored: with their log probabilities."""
        known = self.prompt_rate.careful * self.flops(start, count)
        return known + self.row_price.careful * count if scored else known

    def affordable(self, start: int, want: int, allowance: float, scored: bool = False) -> int:
        """The longest chunk, ending on a block border, that fits the allowance."""
        if scored and self.row_price.mean is None:
            want = min(want, self.min_chunk - start % BLOCK)
        if want <= self.min_chunk or self.seconds(start, want, scored) <= allowance:
            return want
        low, high = self.min_chunk // BLOCK, -(-want // BLOCK)  # in blocks: low always granted, high known not to fit
        while high - low > 1:
            middle = (low + high) // 2
            if self.seconds(start, middle * BLOCK, scored) <= allowance:
                low = middle
            else:
                high = middle
        return low * BLOCK - start % BLOCK
