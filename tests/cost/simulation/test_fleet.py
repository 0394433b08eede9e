"""The simulator runs the production scheduler: its shortcuts change nothing, and its time is the roofline's."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from tests.cost.fleets import CPU, fleet, parts, requests
from tests.schedule.fakes import make_scheduler
from twostroke.cost.model.devices import find_device
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.model.rates import HOST_LINK, datasheet_rates
from twostroke.cost.model.roofline import Roofline
from twostroke.cost.simulation.fleet import Fleet, Pools, deliver
from twostroke.cost.simulation.trace import Arrival, Contents, PromptPart, faster, read_trace, shared_first, shorter
from twostroke.cost.simulation.worker import SimulatedWorker
from twostroke.errors import InputError
from twostroke.ops.interface import BLOCK
from twostroke.record import replace
from twostroke.sampling import SamplingParams
from twostroke.schedule.scheduler import Scheduler
from twostroke.types import Request, RequestState

CASES = {
    "quiet": ({}, {"rate": 0.5}),
    "busy": ({}, {"rate": 20.0}),
    "crowded": ({"max_requests": 64, "max_batch_tokens": 96, "max_gap": 0.05}, {"rate": 200.0}),
    "shortest first": ({"max_requests": 32, "policy": "shortest"}, {"rate": 50.0}),
    "prompts first": ({"max_requests": 32, "policy": "prefill-first"}, {"rate": 50.0}),
    "preempting": ({"kv_blocks": 60, "max_requests": 16}, {"rate": 20.0}),
    "static": ({"batching": "static", "max_requests": 8}, {"rate": 10.0}),
    "whole prompts": ({"chunked_prefill": False}, {"rate": 10.0}),
    "no prefix cache": ({"prefix_cache": False}, {"rate": 5.0}),
    "evicting": ({"kv_blocks": 120, "max_requests": 4}, {"rate": 2.0}),
    "offloading": ({"kv_blocks": 120, "max_requests": 4, "kv_offload": 1 << 26}, {"rate": 2.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_many_steps_at_once_are_the_same_as_one_by_one(name):
    settings, load = CASES[name]
    rows = requests(count=60, prompt=(5, 400), output=(1, 120), shared=64, **load)
    fast, slow = fleet(**settings), fleet(fast=False, **settings)
    for one, other in zip(fast.run(rows), slow.run(rows), strict=True):
        assert one.first == pytest.approx(other.first, rel=1e-9)
        assert one.end == pytest.approx(other.end, rel=1e-9)
        assert (one.cached, one.output, one.preemptions) == (other.cached, other.output, other.preemptions)
        assert one.gaps == pytest.approx(other.gaps, rel=1e-4, abs=1e-7)
    assert fast.workers[0].scheduler.counters == slow.workers[0].scheduler.counters
    fast.workers[0].scheduler.check()
    assert fast.workers[0].busy_seconds == pytest.approx(slow.workers[0].busy_seconds)
    assert name != "preempting" or fast.workers[0].scheduler.counters.preemptions > 0
    assert name != "offloading" or fast.workers[0].scheduler.tables.pool.host.offloaded > 0


def test_many_steps_at_once_after_prompts_that_left_the_cache_cold():
    rates = replace(CPU, cold_seconds=0.002)
    rows = requests(count=60, rate=5.0, prompt=(5, 400), output=(1, 120), shared=64)
    fast, slow = (fleet(rates=rates, fast=fast).run(rows) for fast in (True, False))
    assert [one.end for one in fast] == pytest.approx([one.end for one in slow], rel=1e-9)
    one = Arrival(0.0, (PromptPart(1, 200),), 50)
    warm, cold = (fleet(rates=some).run([one])[0] for some in (CPU, rates))
    assert cold.ttft == pytest.approx(warm.ttft), "prompts themselves are no slower"
    longer = cold.gaps - warm.gaps
    assert longer[0] == pytest.approx(0.002, rel=1e-2) and longer[20] < 0.2 * longer[0]


def test_many_steps_at_once_with_windows():
    arch = known_arch("smollm2-135m")
    windowed = arch.with_mixers(window=100).layers
    layers = tuple(windowed[i] if i % 3 else layer for i, layer in enumerate(arch.layers))
    arch = replace(arch, layers=layers)
    rows = requests(count=30, rate=5.0, prompt=(5, 300), output=(1, 200))
    fast, slow = (fleet(arch=arch, fast=fast).run(rows) for fast in (True, False))
    assert [one.end for one in fast] == pytest.approx([one.end for one in slow], rel=1e-9)


def test_time_is_what_the_roofline_says():
    roofline, settings = parts()
    served = fleet().run([Arrival(0.0, (PromptPart(1, 200),), 50)])[0]
    assert served.ttft == pytest.approx(roofline.prefill_seconds(200))
    steps = [roofline.step([], [200 + written], 1) for written in range(1, 50)]
    assert served.end - served.first == pytest.approx(sum(steps))
    assert served.tpot == pytest.approx(np.mean(served.gaps), rel=1e-5)
    assert settings.max_batch_tokens > 200


@pytest.mark.parametrize("pools", [Pools(), Pools(2, prefill=1)])
def test_streams_cost_little_beside_prompts(monkeypatch, pools):
    """Under load most of what is planned are streams that only write: nothing is done for each of them in each step."""
    rows = requests(count=100, rate=40.0, prompt=(100, 300), output=(60, 120))
    work, commit = [], Scheduler._commit_one
    monkeypatch.setattr(Scheduler, "_commit_one", lambda self, *parts: work.append(1) or commit(self, *parts))
    ends, done = [], []
    for fast in (True, False):
        work.clear()
        ends.append([one.end for one in fleet(pools, fast=fast, max_requests=64).run(rows)])
        done.append(len(work))
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)
    assert done[0] < 0.35 * done[1]


def test_copies_to_the_host_and_back_take_their_time():
    """Requests one after another, so that both do the same: what differs is what the copies take."""
    rows = [Arrival(100.0 * at, (PromptPart(at % 5, 400),), 10) for at in range(20)]
    settings = {"kv_blocks": 60, "max_model_len": 600, "kv_offload": 1 << 28}
    fleets = [fleet(rates=replace(CPU, host_link=link), **settings) for link in (1e12, 1e9)]
    quick, slow = ([one.end for one in each.run(rows)] for each in fleets)
    assert slow[0] == quick[0] and all(one > other for one, other in zip(slow[5:], quick[5:], strict=True))
    (fast, late), layout = (each.workers[0] for each in fleets), fleets[0].settings.layout
    hosts = [worker.scheduler.tables.pool.host for worker in (fast, late)]
    moved = [host.offloaded + host.restored for host in hosts]
    assert moved[0] == moved[1] and hosts[0].restored > 100
    taken = moved[0] * layout.block_bytes * (1 / 1e9 - 1 / 1e12)
    assert late.busy_seconds - fast.busy_seconds == pytest.approx(taken, rel=1e-6)


def test_what_a_copy_costs_where_nobody_measured_it():
    """Over its link on a card; on a CPU within the memory, which reads and writes."""
    line, settings = parts()
    card = Roofline(line.model, settings.layout, datasheet_rates(find_device("h200"), "int8"))
    block = settings.layout.block_bytes
    assert line.copies(3) == pytest.approx(3 * block / (CPU.bandwidth / 2)) and line.copies(0) == 0
    assert card.copies(3) == pytest.approx(3 * block / HOST_LINK)


def test_a_worker_is_asked_no_more_often_than_something_happens(monkeypatch):
    """Many that come while a step runs ask for its end once, not once each: else a crowd costs its square."""
    asked, happened = [], []
    look, advance = Fleet._advance, SimulatedWorker.advance
    monkeypatch.setattr(Fleet, "_advance", lambda self, index: asked.append(index) or look(self, index))
    monkeypatch.setattr(SimulatedWorker, "advance", lambda self: happened.append(1) or advance(self))
    rows = requests(count=300, rate=1e5, prompt=(5, 100), output=(5, 40))
    for pools in (Pools(2), Pools(2, prefill=1)):
        assert all(one.output for one in fleet(pools).run(rows))
    assert len(asked) < 1.5 * len(happened) + len(rows)


def test_everyone_is_served_once_in_order_of_arrival():
    rows = requests(count=200, rate=50.0, prompt=(1, 800), output=(1, 60))
    for pools in (Pools(4), Pools(3, prefill=2), Pools(4, router="round-robin"), Pools(4, router="prefix")):
        served = fleet(pools).run(rows)
        assert [one.arrival for one in served] == [row.at for row in rows]
        assert [one.output for one in served] == [row.output for row in rows]
        assert all(one.arrival <= one.scheduled <= one.first <= one.end for one in served)
        assert all(len(one.gaps) == one.output - 1 and (one.gaps >= 0).all() for one in served)


def test_more_workers_queue_less():
    rows = requests(count=150, rate=30.0, prompt=(200, 600), output=(20, 60))
    means = [np.mean([one.ttft for one in fleet(Pools(count)).run(rows)]) for count in (1, 2, 8)]
    assert means[0] > 2 * means[1] > 2 * means[2]


def test_a_prefix_is_found_again_and_the_router_can_keep_it_at_home():
    rows = requests(count=120, rate=4.0, prompt=(20, 60), output=(5, 10), shared=512)
    hits = {
        router: sum(one.cached for one in fleet(Pools(6, router=router)).run(rows))
        for router in ("round-robin", "prefix")
    }
    assert hits["prefix"] > hits["round-robin"] > 0
    assert sum(one.cached for one in fleet(prefix_cache=False).run(rows)) == 0


def test_split_pools_keep_streams_even_and_pay_for_the_journey():
    rows = requests(count=80, rate=12.0, prompt=(600, 1200), output=(40, 80))
    together = fleet(Pools(2)).run(rows)
    apart = fleet(Pools(1, prefill=1)).run(rows)
    far = fleet(Pools(1, prefill=1, link=20e6)).run(rows)
    gap = {
        name: np.percentile(np.concatenate([one.gaps[1:] for one in run]), 99)
        for name, run in (("together", together), ("apart", apart))
    }
    assert gap["apart"] < gap["together"]
    first_gap = [np.median([one.gaps[0] for one in run]) for run in (apart, far)]
    assert first_gap[1] > first_gap[0] + 0.3, "22 MB over 20 MB/s"


def test_a_plan_ahead_hides_nothing_and_changes_little():
    rows = requests(count=40, rate=4.0, prompt=(20, 200), output=(5, 60))
    one, two = (fleet(depth=depth).run(rows) for depth in (1, 2))
    assert np.mean([r.end for r in two]) == pytest.approx(np.mean([r.end for r in one]), rel=0.05)
    assert [r.output for r in two] == [r.output for r in one]


def test_too_long_a_prompt_is_refused_not_lost():
    served = fleet(max_model_len=256).run(
        [Arrival(0.0, (PromptPart(1, 300),), 5), Arrival(0.1, (PromptPart(2, 200),), 500)]
    )
    assert served[0].refused and not served[1].refused
    assert served[1].output == 56


def test_jitter_makes_a_noisy_machine():
    rng = random.Random(1)
    rows = requests(count=20, rate=1.0, prompt=(20, 200), output=(20, 60))
    noisy = fleet(jitter=lambda seconds, _: seconds * rng.uniform(0.5, 2.0)).run(rows)
    assert np.std(np.concatenate([one.gaps for one in noisy])) > np.std(
        np.concatenate([one.gaps for one in fleet(rates=CPU).run(rows)])
    )


def test_traces_are_read(tmp_path):
    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:46.6805900,374,44\n"
    )
    rows = read_trace(azure)
    assert [(row.prompt, row.output) for row in rows] == [(374, 44), (396, 109)]
    assert rows[0].at == 0 and rows[1].at == pytest.approx(4.314579)
    assert not set(rows[0].tokens()) & set(rows[1].tokens())
    mooncake = tmp_path / "m.jsonl"
    lines = [(0, 700, [0, 1]), (1500, 600, [0, 2])]
    mooncake.write_text(
        "\n".join(
            json.dumps({"timestamp": at, "input_length": n, "output_length": 5, "hash_ids": ids})
            for at, n, ids in lines
        )
    )
    first, second = read_trace(mooncake)
    assert first.tokens()[:512] == second.tokens()[:512] and first.tokens()[512] != second.tokens()[512]
    assert (len(first.tokens()), second.at) == (700, 1.5)
    assert faster([first, second], 3)[1].at == 0.5
    assert shorter([first], 10)[0].prompt == 70
    for text in ("", "a,b\n1,2\n"):
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(InputError):
            read_trace(tmp_path / "bad.csv")


def test_shared_parts_first():
    contents = Contents()
    rows = [Arrival(i, (contents.own(8), PromptPart(3, 500), contents.own(20)), 5) for i in range(3)]
    assert [part.length for part in shared_first(rows)[0].parts] == [500, 8, 20]


def test_blocks_are_delivered_to_groups_of_any_span():
    """A decode worker finds what was delivered, also where a group's blocks hold 64 tokens."""
    tables = make_scheduler(blocks=40, windows=(None, None), entry_tokens=(1, 64)).tables
    sent = RequestState(Request(0, tuple(range(150)), SamplingParams()))
    taken = deliver(tables, sent, 149 // BLOCK)
    assert len(taken) == 9 + 2 and tables.pool.available == 40
    hit = tables.match(RequestState(Request(1, tuple(range(150)), SamplingParams())))
    assert hit.columns * BLOCK == 128 and [len(blocks) for blocks in hit.blocks] == [8, 2]
