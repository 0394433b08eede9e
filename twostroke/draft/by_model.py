"""When the draft model writes guesses, and how many. Torch-free; run/drafting.py runs the model.

The draft model takes one pass for each position, and a pass serves all streams. So the count is chosen for the whole
step first, and a stream takes at most that many. Before it can write, the draft model must have read the request's
text. It reads prompts along with the target. While it does not draft it reads nothing, so that it costs nothing: the
text that it has missed is read when its drafts would have saved more time meanwhile than reading it takes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twostroke.draft.rates import StepTimes

READY = 32  # tokens that it may have missed and still write in the same step
CAUGHT_UP = 2  # tokens that it has missed at most when it has caught up
TRIAL_EVERY = 16  # prompts: one of so many is read although drafts did not pay
TRIALS = 8  # steps with drafts of such a request


class DraftLength(NamedTuple):
    """How many tokens the draft model writes for each stream of a step."""

    length: int
    seconds: float = 0.0  # of the draft model
    saved: float = 0.0  # seconds, against writing the same tokens without it


class ModelDrafts:
    """share: the time of a pass as a share of the target's step, until one is measured."""

    def __init__(self, share: float):
        self.share = share
        self.times = StepTimes()  # of one pass
        self.chosen = DraftLength(0)  # for the step that is being planned
        self.declined = 0  # prompts that were not read

    def pass_seconds(self, rows: int, target: float) -> float:
        """target: seconds of the target's step with one row for each stream."""
        seconds, assumed = self.times.predict_more(rows), self.share * target
        if seconds is None:
            return assumed
        return min(seconds, assumed) if self.times.is_below(rows) else seconds

    def draft_seconds(self, streams: int, counts: np.ndarray, missed: int, target: float) -> np.ndarray:
        """Seconds of writing so many tokens for each stream, after reading `missed` tokens in all."""
        return self.pass_seconds(missed, target) + (counts - 1) * self.pass_seconds(streams, target)

    def choose(
        self, streams: int, rate: float, alone: float, steps: np.ndarray, *, gain: float, longest: float
    ) -> DraftLength:
        """The count for a step in which all streams draft alike. rate: share of right guesses; alone and steps: seconds
        of the target's step without guesses, and with 1, 2, … for each stream; gain: least predicted gain; longest:
        seconds that the step may take."""
        counts = np.arange(1, len(steps) + 1)
        tokens = 1 + np.cumsum(rate**counts)
        drafting = self.draft_seconds(streams, counts, 2 * streams, alone)
        seconds = steps + drafting
        speeds = np.where(seconds <= longest, streams * tokens / seconds, 0.0)
        best = int(speeds.argmax())
        if speeds[best] <= gain * streams / alone:
            return DraftLength(0)
        return DraftLength(best + 1, float(drafting[best]), float(alone * tokens[best] - seconds[best]))

    def is_trial(self) -> bool:
        """A prompt is not worth reading. Once in a while it is read nevertheless, to learn whether that is still so."""
        self.declined += 1
        return self.declined % TRIAL_EVERY == 0
