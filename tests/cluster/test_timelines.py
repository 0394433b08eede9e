"""The timeline of a request that two workers had, the list of transfers, and the metrics of both."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.cluster.fakes import FakeTransport, Fault
from tests.cluster.pairs import GREEDY, Pair, moved, run_pair
from tests.cluster.test_pair import PROMPT
from tests.measured import measured
from tests.waiting import until
from twostroke.cluster.flight import Flight
from twostroke.metrics.timeline import Facts, Timeline
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.loop import EngineLoop
from twostroke.sampling import SamplingParams
from twostroke.serve.pool_metrics import PoolMetrics
from twostroke.types import Event, Request

LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
STEP = EngineLoop._step


async def timeline_of(engine: AsyncEngine, prompt: list[int], params: SamplingParams = GREEDY) -> Timeline:
    stream = engine.submit([prompt], params)
    async for _ in stream:
        pass
    return stream.answers[0].sample.timeline


@measured
def test_the_way_of_the_blocks_is_told_from_the_wait_for_a_place(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode engine has one place. The second request waits there while the first one is written."""

    def slow(self: EngineLoop) -> list[Event]:
        time.sleep(0.02 if self.settings.max_requests == 1 else 0.0)
        return STEP(self)

    monkeypatch.setattr(EngineLoop, "_step", slow)
    prompts = [PROMPT, PROMPT[::-1]]

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        first, second = await asyncio.gather(*(timeline_of(engine, prompt, LONG) for prompt in prompts))
        await moved(pair)
        late, early = (first, second) if first.decode_queue > second.decode_queue else (second, first)
        assert 0.1 < early.transfer < 0.3 and 0.1 < late.transfer < 0.3, "the network needs 0.1 s"
        assert late.decode_queue > 0.5 > early.decode_queue > 0
        for one in (early, late):
            assert one.transfer + one.decode_queue < one.decode
            gap = one.token_times[1] - one.token_times[0]
            assert one.transfer + one.decode_queue <= gap
        kept = {one.request: one.timeline for one in engine.ended.latest()}
        assert sorted(one.transfer for one in kept.values()) == sorted([early.transfer, late.transfer])
        assert max(one.decode_queue for one in kept.values()) == late.decode_queue
        link = pair.link.link
        assert link.latency < 0.3, "the wait for a place is not the network's"

    network = FakeTransport(lambda: Fault(delay=0.1))
    one = {"max_requests": 1, "speculate": "off"}
    run_pair(llama_folder, scenario, lambda: network, decode=one, transfer_seconds=60.0)


def test_both_halves_of_a_move_are_counted_in_any_order() -> None:
    """The first event of the worker that writes may come before the transfer has been closed."""
    for blocks_first in (True, False):
        flight = Flight(Request(1, (1, 2, 3), GREEDY, limit=9), 1)
        flight.latest = Facts(1.0, 2.0, 0, 1, 0, 0, 0, 0)
        flight.settle()
        flight.moving = 10.0
        for know_blocks in (blocks_first, not blocks_first):
            if know_blocks:
                flight.count_move(sent_in=0.25)
            else:
                flight.count_move(runs=11.0)
        assert flight.before is not None
        assert (flight.before.transfer, flight.before.decode_queue) == (0.25, 0.75)


def test_metrics_tell_of_workers_and_transfers(llama_folder: Path) -> None:
    """While blocks are on their way, after they have come, and where they did not."""
    network = FakeTransport()

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        registry = CollectorRegistry()
        PoolMetrics(pair, "tiny", registry)

        def value(name: str, worker: str | None = None, **more: str) -> float:
            own = {} if worker is None else {"worker": worker, "role": worker}
            found = registry.get_sample_value(f"twostroke:{name}", {"model_name": "tiny", **own, **more})
            assert found is not None, f"{name} is not there"
            return found

        network.gate.clear()
        running = asyncio.ensure_future(timeline_of(engine, PROMPT))
        await until(lambda: network.fetched, "nothing was fetched")
        assert value("transfers_in_flight") == value("worker_leases", "prefill") == 1
        assert value("worker_streams", "decode") == value("worker_up", "decode") == 1
        assert value("worker_streams", "prefill") == value("worker_queued_tokens", "prefill") == 0
        network.gate.set()
        timeline = await running
        await moved(pair)
        assert value("transfers_in_flight") == 0 and value("transfers_done_total") == 1
        size, seconds = value("transfer_bytes_total"), value("transfer_seconds_total")
        assert size == pair.counts.bytes > 0 and timeline.transfer > 0
        # An answer can end before its transfer has been closed: all of the time since its prompt is then its move.
        assert timeline.transfer <= seconds or timeline.decode_queue == 0
        assert size == value("worker_sent_bytes_total", "prefill") == value("worker_received_bytes_total", "decode")
        assert size == value("transfer_size_bytes_sum") and value("transfer_time_seconds_count") == 1
        assert seconds == value("worker_received_seconds_total", "decode") == value("transfer_time_seconds_sum")
        network.fault = lambda: Fault(corrupt=True)
        await timeline_of(engine, PROMPT[:50][::-1])
        await moved(pair)
        assert value("transfers_failed_total", reason="damaged or missing") == 1 and value("transfers_done_total") == 1
        pair.prefill.up = False
        assert value("worker_up", "prefill") == 0 and value("worker_losses_total", "prefill") == 0
        pair.prefill.up = True

    run_pair(llama_folder, scenario, lambda: network)


def test_each_transfer_is_told(llama_folder: Path) -> None:
    chunks = {"max_batch_tokens": 32}
    many = [[*PROMPT, number] for number in (5, 9)]

    async def scenario(engine: AsyncEngine, pair: Pair) -> None:
        heard = []
        pair.journal.hear = heard.append
        for prompt in many:
            await timeline_of(engine, prompt)
            await moved(pair)
        assert heard == list(pair.journal.last)
        assert {one.kind for one in heard} == {"early", "request"}
        assert {(one.source, one.to) for one in heard} == {("prefill", "decode")}
        assert len({one.request for one in heard}) == 2
        assert sum(one.moved.bytes for one in heard) == pair.counts.bytes == pair.journal.sent["prefill"]
        assert pair.journal.received["decode"] == pair.counts.bytes and not pair.journal.received["prefill"]
        assert pair.journal.seconds["decode"] > 0
        network.fault = lambda: Fault(corrupt=True)
        await timeline_of(engine, PROMPT[:50][::-1])
        await moved(pair)
        assert heard[-1].moved.failed == "damaged or missing" and heard[-1].moved.seconds > 0

    network = FakeTransport()
    run_pair(llama_folder, scenario, lambda: network, prefill=chunks)
