"""A runner without a model: it samples a function of the tokens, can be slow, and fails on command."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest

from twostroke.kv.addresses import BlockHasher
from twostroke.kv.blocks import BlockPool
from twostroke.kv.layout import KVGroup, KVLayout
from twostroke.kv.offload import HostPool
from twostroke.kv.tables import KVTables
from twostroke.model.entry import KVEntry, KVPart
from twostroke.ops.interface import BLOCK
from twostroke.record import replace
from twostroke.sampling import SamplingParams
from twostroke.schedule.pace import Pace
from twostroke.schedule.policy import POLICIES
from twostroke.schedule.scheduler import Limits, Scheduler
from twostroke.schedule.together import Together
from twostroke.types import UNWRITTEN, FinishReason, Plan, Request, RequestState, Result, Status, Work, WorkKind

SPOILT = (-1,)  # tokens that no request has


def make_scheduler(blocks, windows=(None,), max_batch_tokens=512, max_requests=64, chunked=True, static=False,
                   policy="fcfs", prefix_cache=True, max_length=4096, max_gap=1e9, host_slots=0,
                   key_share=1.0, entry_tokens=(), draft_groups=0, together=None):  # fmt: skip
    """A KV group for each window; entry_tokens: tokens that share an entry in each group (1 where not given).
    draft_groups: groups of a draft model beside them."""
    entry = KVEntry((KVPart("keys", 1, 64, "int8"),))
    entries = [replace(entry, window=w, tokens=t) for w, t in zip_longest(windows, entry_tokens, fillvalue=1)]
    groups = [KVGroup(one, (i,)) for i, one in enumerate(entries)]
    groups += [KVGroup(entry, (len(groups) + i,), draft=True) for i in range(draft_groups)]
    layout = KVLayout(tuple(groups), 16 * 64)
    pool = BlockPool(blocks, prefix_cache, HostPool(host_slots) if host_slots else None)
    tables = KVTables(layout, pool, BlockHasher("fake", b"key"), max_requests, max_length)
    limits = Limits(max_batch_tokens, max_requests, chunked, static, key_share)
    return Scheduler(tables, limits, POLICIES[policy], Pace(lambda start, count: float(count), max_gap), together)


class RandomDrafter:
    """Proposes anything, and often nothing."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def propose(self, request: RequestState, most: int) -> list[int]:
        assert request.in_flight == 1 and most > 0  # its newest token's row, and no unknown token
        return [self.rng.randint(0, 3) for _ in range(self.rng.choice([0, 0, 1, 2, 5, 20]))]

    def waits(self) -> bool:
        return self.rng.random() < 0.5

    def begin(self, streams: Sequence[RequestState]) -> bool:
        return self.rng.random() < 0.9

    def learn(self, plan: Plan, result: Result, seconds: float, elapsed: float) -> None:
        pass

    def forget(self, request: RequestState) -> None:
        pass


class RandomModelDrafter(RandomDrafter):
    """The same, and often the draft model is to write."""

    def reads(self, request: RequestState) -> bool:
        return self.rng.random() < 0.7

    def catches_up(self, request: RequestState) -> bool:
        return self.rng.random() < 0.2

    def propose(self, request: RequestState, most: int) -> list[int]:
        if self.rng.random() < 0.3:
            return super().propose(request, most)
        return [UNWRITTEN] * self.rng.choice([0, 1, 2, 5, 20])


class FakeEngine:
    """Drives a scheduler as the engine's core does, and checks the design's invariants after every step."""

    def __init__(self, scheduler: Scheduler, depth: int = 1, rng: random.Random | None = None):
        self.scheduler = scheduler
        self.depth = depth
        self.rng = rng or random.Random(0)
        self.now = 0.0
        self.requests: list[RequestState] = []
        self.in_flight: deque[Plan] = deque()
        self.ends: dict[int, int] = {}
        self.told: dict[int, list[int]] = {}  # the tokens in the events of each request
        self.poisonous: Callable[[Work], bool] = lambda work: False
        self.failure_rate = 0.0
        self.stop_rate = 0.0
        self.capacity = 4096
        self.drafted = 0  # tokens that the draft model found computed
        self.keys = self.rng.choice([(0,), (1, 1, 1, 2, 3)])  # of random requests
        self.snapshots: deque[list] = deque()  # block tables as each plan saw them
        self.content: dict[int, tuple[int, ...]] = {}  # block -> the tokens from the start up to its end, as written
        self.on_host: dict[int, tuple[int, ...]] = {}  # slot -> the same

    @classmethod
    def random(
        cls, rng: random.Random, depth: int, windows: tuple, entry_tokens: tuple = (), draft_groups: int = 0
    ) -> FakeEngine:
        blocks = rng.randint(12, 60) * (len(windows) + draft_groups)
        budget = rng.choice([16, 32, 64, 256])
        requests = rng.randint(1, min(16, budget))
        scheduler = make_scheduler(
            blocks, windows, budget, requests, chunked=rng.random() < 0.8, static=rng.random() < 0.2,
            policy=rng.choice(list(POLICIES)), prefix_cache=rng.random() < 0.7, max_gap=rng.choice([1e9, 20.0]),
            host_slots=rng.choice([0, 1, 7, 40, 1000]), key_share=rng.choice([1.0, 0.75, 0.01]),
            entry_tokens=entry_tokens, draft_groups=draft_groups,
            together=Together(rng.choice([0.0, 5.0, 40.0, 1e9]), rng.choice([0.5, 10.0, 1e9]), rng.choice([1, 2, 8])),
        )  # fmt: skip
        if draft_groups:
            scheduler.drafter = RandomModelDrafter(rng)
        elif rng.random() < 0.5:
            scheduler.drafter = RandomDrafter(rng)
        engine = cls(scheduler, depth, rng)
        engine.failure_rate = rng.choice([0.0, 0.01])
        engine.stop_rate = 0.01
        layout = scheduler.tables.layout
        engine.capacity = max(n for n in range(1, 400) if layout.blocks_for(n, n) <= blocks)
        return engine

    def add(self, tokens: list[int], max_tokens: int, priority: int = 0, key: int = 0) -> RequestState:
        params = SamplingParams(max_tokens=max_tokens, priority=priority)
        limit = min(len(tokens) + max_tokens, self.capacity)
        asked = Request(len(self.requests), tuple(tokens), params, 0, self.now, limit, frozenset({-7}), key=key)
        request = RequestState(asked)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        plan = self.scheduler.plan(self.now)
        self._check_plan(plan)
        if plan.works:
            self.in_flight.append(plan)
        else:
            self.snapshots.pop()
        if self.in_flight and (len(self.in_flight) >= self.depth or not plan.works):
            self._collect()
        self.scheduler.check()

    def _collect(self) -> None:
        plan = self.in_flight.popleft()
        seconds = 1.0 + 0.01 * sum(work.count for work in plan.works)
        self.now += seconds
        if any(map(self.poisonous, plan.works)) or self.rng.random() < self.failure_rate:
            failed = [plan, *self.in_flight]
            for one, tables in zip(failed, self.snapshots, strict=True):
                self._spoil(one, tables)
            events = self.scheduler.fail(failed, "boom", self.now)
            self.in_flight.clear()
            self.snapshots.clear()
        else:
            self._move(plan)
            plan = self._write_drafts(plan)
            self._run(plan, self.snapshots.popleft())
            result = Result(tuple(self._sample(work) for work in plan.works))
            events = self.scheduler.commit(plan, result, self.now, seconds)
        for event in events:
            self._count(event)

    def _sample(self, work: Work) -> tuple[int, ...]:
        if not work.samples:
            return ()
        accepted = work.draft[: self.rng.randint(0, len(work.draft))]
        return (*accepted, -7 if self.rng.random() < self.stop_rate else self.rng.randint(0, 3))

    def _count(self, event) -> None:
        assert event.request_id not in self.ends, "an event after the last one"
        self.told.setdefault(event.request_id, []).extend(event.token_ids)
        if event.finish_reason is not None:
            self.ends[event.request_id] = self.ends.get(event.request_id, 0) + 1

    def _check_plan(self, plan: Plan) -> None:
        scheduler = self.scheduler
        total = sum(work.count for work in plan.works)
        if scheduler.limits.chunked:
            assert total <= scheduler.limits.max_batch_tokens
        assert len({work.request.id for work in plan.works}) == len(plan.works)
        if not plan.works and not self.in_flight:
            assert not scheduler.running and not scheduler.waiting, "an empty plan while a request could run"
        for request, start, count, kind, draft in plan.works:
            assert count == 1 + len(draft) or kind is WorkKind.READ
            assert request.status is Status.RUNNING and count > 0
            assert start + count == request.start <= max(len(request.tokens) + len(draft), start + 1)
            self._check_blocks(request, start, count)
        held = self.scheduler.tables.held
        self.snapshots.append([[list(blocks) for blocks in held[work.request.row]] for work in plan.works])

    def _move(self, plan: Plan) -> None:
        for block, (slot, _), away in plan.moves:
            if away:
                self.on_host[slot] = self.content.get(block, SPOILT)  # a draft model's may never have been filled
            else:
                self.content[block] = self.on_host[slot]

    def _run(self, plan: Plan, tables: list) -> None:
        """What the model would do to the blocks: all writes come before all reads, as in every layer."""
        for work, groups in zip(plan.works, tables, strict=True):
            for blocks, columns in zip(groups, self._columns(work), strict=True):
                held = [self.scheduler.tables.pool.references[blocks[column]] for column in columns]
                assert all(held), "a block was given away under a running step"
        for work, groups in zip(plan.works, tables, strict=True):
            self._write(work, groups)
        for work, groups in zip(plan.works, tables, strict=True):
            self._read(work, groups)

    def _write_drafts(self, plan: Plan) -> Plan:
        """What the draft model does: it reads blocks that were filled for exactly these tokens, and fills others."""
        tables, texts = self.scheduler.tables, {}
        for request, start, count, writes in plan.drafts:
            assert request.drafted == start and start + count <= len(request.tokens)
            assert not writes or start + count == len(request.tokens)
            texts[request.id] = tuple(self.rng.randint(0, 3) for _ in range(writes))
            tokens = [*request.tokens[: start + count], *texts[request.id][:-1]]
            for group in tables.drafting:
                blocks = tables.held[request.row][group]
                for column in range(start // BLOCK, -(-len(tokens) // BLOCK)):
                    self.content[blocks[column]] = tuple(tokens[: (column + 1) * BLOCK])
        for draft in plan.drafts:  # all writes come before all reads
            for group in tables.drafting:
                blocks = tables.held[draft.request.row][group]
                for column in range(draft.start // BLOCK):
                    known = tuple(draft.request.tokens[: (column + 1) * BLOCK])
                    assert self.content[blocks[column]] == known, "foreign content for the draft model"
            self.drafted += draft.start
        works = [w._replace(draft=texts[w.request.id]) if w.draft[:1] == (UNWRITTEN,) else w for w in plan.works]
        return plan._replace(works=tuple(works))

    def _spoil(self, plan: Plan, tables: list) -> None:
        """A step that failed may have left anything in whatever it was to write."""
        for request, start, count, _ in plan.drafts:
            for group in self.scheduler.tables.drafting:
                for column in range(start // BLOCK, -(-(start + count) // BLOCK)):
                    self.content[self.scheduler.tables.held[request.row][group][column]] = SPOILT
        for block, (slot, _), away in plan.moves:
            if away:
                self.on_host[slot] = SPOILT
            else:
                self.content[block] = SPOILT
        for work, groups in zip(plan.works, tables, strict=True):
            for blocks, columns in zip(groups, self._columns(work), strict=True):
                for column in columns:
                    self.content[blocks[column]] = SPOILT

    def _columns(self, work: Work) -> list[range]:
        """The columns of each group that a work writes; none of a draft model's."""
        last, tables = work.start + work.count - 1, self.scheduler.tables
        found = [range(work.start // span, last // span + 1) for span in tables.spans]
        return [range(0) if group in tables.drafting else columns for group, columns in enumerate(found)]

    def _write(self, work: Work, groups: list) -> None:
        """Leave in each block the whole history of its tokens."""
        request, start, count, _, draft = work
        tokens = [*request.tokens, *draft]
        for blocks, columns, span in zip(groups, self._columns(work), self.scheduler.tables.spans, strict=True):
            for column in columns:
                end = min(start + count, (column + 1) * span, len(tokens))
                self.content[blocks[column]] = tuple(tokens[:end])

    def _read(self, work: Work, groups: list) -> None:
        """Whatever the newest token sees was written for exactly these tokens."""
        request, start = work.request, work.start
        tables = self.scheduler.tables
        for group, (window, span, blocks) in enumerate(zip(tables.windows, tables.spans, groups, strict=True)):
            first = 0 if window is None else max(0, start - window + 1)
            for column in range(first // span, start // span if group not in tables.drafting else 0):
                assert self.content[blocks[column]] == tuple(request.tokens[: (column + 1) * span]), "foreign content"

    def _check_blocks(self, request: RequestState, start: int, count: int) -> None:
        """Everything the step reads or writes lies in blocks that the request holds."""
        tables = self.scheduler.tables
        for window, span, blocks in zip(tables.windows, tables.spans, tables.held[request.row], strict=True):
            first = 0 if window is None else max(0, start - window + 1)
            for column in range(first // span, (start + count - 1) // span + 1):
                assert blocks[column] >= 0, "a visible block was released"
                assert tables.pool.references[blocks[column]] > 0

    def random_step(self) -> None:
        rng = self.rng
        if len(self.scheduler.waiting) < 20 and rng.random() < 0.3:
            for _ in range(rng.randint(1, 4)):
                length = rng.randint(1, min(150, self.capacity - 1))
                shared = rng.choice([0, 0, 16, 40, 100])
                tokens = [9] * min(shared, length) + [rng.randint(0, 5) for _ in range(max(0, length - shared))]
                self.add(tokens, rng.randint(1, 40), rng.choice([0, 0, 1]), rng.choice(self.keys))
        if self.requests and rng.random() < 0.05:
            event = self.scheduler.abort(rng.choice(self.requests[-30:]), self.now)
            if event is not None:
                assert event.finish_reason is FinishReason.ABORT
                self._count(event)
        self.step()

    def finish_all(self, limit: int = 100_000) -> None:
        for _ in range(limit):
            if self.scheduler.idle and not self.in_flight:
                break
            self.step()
        assert self.scheduler.idle, "the scheduler makes no progress"
        assert all(self.ends.get(request.id) == 1 for request in self.requests), "not exactly one terminal event"
        for request in self.requests:
            assert self.told[request.id] == request.tokens[request.prompt_length :], "events lack a token"
            times = request.timeline.token_times
            assert times == sorted(times) and len(times) == request.output_length
        pool = self.scheduler.tables.pool
        assert pool.available == pool.total
