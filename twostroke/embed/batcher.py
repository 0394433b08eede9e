"""One thread that computes for all callers: texts that wait together become one batch, and API keys take turns.

The rows do not depend on the batch, so how callers' texts are mixed changes times only.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from twostroke.embed.embedder import Embedder
from twostroke.embed.texts import Tokens

STEP_TOKENS = 1024  # of one batch: a caller with one short text waits for no longer batch than this
STEP_TEXTS = 64
MAX_WAITING = 1 << 20  # tokens of all callers; more are refused


class FullError(Exception):
    """Too many texts wait."""


class ComputedVectors(NamedTuple):
    rows: np.ndarray  # one for each text
    queue: float  # seconds until its first text was computed
    compute: float  # from there to the last


class EmbeddingJob:
    def __init__(self, texts: Sequence[Tokens], arrival: float):
        self.texts = texts
        self.arrival = arrival
        self.began = 0.0
        self.taken = 0
        self.rows: list[np.ndarray] = []
        self.future: Future[ComputedVectors] = Future()


class Batcher:
    def __init__(self, embedder: Embedder):
        self.embedder = embedder
        self.clock = time.monotonic
        self.steps = 0
        self.tokens = 0  # computed so far
        self.waiting = 0  # tokens
        self._jobs: dict[int, deque[EmbeddingJob]] = {}  # by key, in the order of their turns
        self._condition = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="embed", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, texts: Sequence[Tokens], key: int = 0) -> Future[ComputedVectors]:
        """FullError when too much waits. Cancelling the future drops what has not been computed."""
        job = EmbeddingJob(texts, self.clock())
        count = sum(len(text.ids) for text in texts)
        with self._condition:
            if self._stopped or (self.waiting and self.waiting + count > MAX_WAITING):
                raise FullError
            if not texts:
                job.future.set_result(ComputedVectors(np.empty((0, self.embedder.width), np.float32), 0.0, 0.0))
                return job.future
            self.waiting += count
            self._jobs.setdefault(key, deque()).append(job)
            self._condition.notify()
        return job.future

    def stop(self) -> None:
        with self._condition:
            self._stopped = True
            for jobs in self._jobs.values():
                for job in jobs:
                    job.future.cancel()
            self._condition.notify()
        self._thread.join(5.0)

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._jobs and not self._stopped:
                    self._condition.wait()
                if self._stopped:
                    return
                step = self._next_step()
            if step:
                self._run(step)

    def _next_step(self) -> list[tuple[EmbeddingJob, Tokens]]:
        """Texts of the keys in turn, up to the size of a batch."""
        step: list[tuple[EmbeddingJob, Tokens]] = []
        tokens = 0
        while self._jobs and len(step) < STEP_TEXTS:
            key = next(iter(self._jobs))
            jobs = self._jobs.pop(key)
            job = jobs[0]
            if job.future.cancelled():
                self.waiting -= sum(len(text.ids) for text in job.texts[job.taken :])
                jobs.popleft()
            else:
                text = job.texts[job.taken]
                if step and tokens + len(text.ids) > STEP_TOKENS:
                    self._jobs = {key: jobs, **self._jobs}
                    break
                step.append((job, text))
                tokens += len(text.ids)
                self.waiting -= len(text.ids)
                job.taken += 1
                if job.taken == len(job.texts):
                    jobs.popleft()
            if jobs:
                self._jobs[key] = jobs  # behind the other keys
        return step

    def _run(self, step: list[tuple[EmbeddingJob, Tokens]]) -> None:
        began = self.clock()
        try:
            rows = self.embedder.run([text for _, text in step])
        except BaseException as error:
            for job, _ in step:
                if not job.future.done():
                    job.future.set_exception(error)
            return
        self.steps += 1
        self.tokens += sum(len(text.ids) for _, text in step)
        for (job, _), row in zip(step, rows, strict=True):
            job.began = job.began or began
            job.rows.append(row)
            if len(job.rows) == len(job.texts) and not job.future.done():
                ended = self.clock()
                job.future.set_result(ComputedVectors(np.stack(job.rows), job.began - job.arrival, ended - job.began))
