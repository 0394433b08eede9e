"""Loads, records, reports: on a fake server whose delays are known, and in process on a tiny model."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from statistics import mean

import numpy as np
import pytest

from tests.cost.fleets import parts
from tests.measured import measured
from twostroke.bench import html, inprocess, report
from twostroke.bench.client import Target, measure
from twostroke.bench.compare import changes
from twostroke.bench.prompts import text, token_ids
from twostroke.bench.record import RequestRecord, Run, fitted, load_runs, save
from twostroke.bench.workload import TRACES, WORKLOADS, make_load, shipped_trace, times, trace_load
from twostroke.cost.model.roofline import Roofline
from twostroke.cost.simulation.served import Targets
from twostroke.cost.simulation.trace import Arrival, PromptPart
from twostroke.errors import InputError
from twostroke.record import replace

# ---- loads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_what_they_say(name):
    load = make_load(name, count=60, per_second=5.0, seed=3)
    assert load.arrivals == make_load(name, count=60, per_second=5.0, seed=3).arrivals
    assert len(load.arrivals) == 60 and load.arrivals[0].at == 0
    assert all(row.prompt > 0 and row.output > 0 for row in load.arrivals)
    seen, shared, whole = set(), 0, 0
    for row in load.arrivals:
        shared += sum(part.length for part in row.parts if part.content in seen)
        whole += row.prompt
        seen |= {part.content for part in row.parts}
    assert (shared / whole > 0.6) == (name in ("rag", "chat", "agent"))


def test_arrivals_have_the_rate_they_were_asked_for():
    rng = random.Random(0)
    for kind in ("poisson", "burst", "constant"):
        moments = times(kind, 4000, 10.0, rng)
        assert moments == sorted(moments) and moments[-1] == pytest.approx(400, rel=0.1)
    gaps = np.diff(times("burst", 4000, 10.0, rng))
    assert np.mean(gaps == 0) > 0.8
    with pytest.raises(InputError, match="poisson"):
        times("sometimes", 3, 1.0, rng)
    with pytest.raises(InputError, match="rag"):
        make_load("poetry")


@pytest.mark.parametrize("name", TRACES)
def test_traces_ship_with_the_package(name):
    rows = shipped_trace(name)
    assert len(rows) >= 600
    cut = trace_load(name, 50, per_second=2.0, longest=512)
    assert all(row.prompt + row.output <= 512 for row in cut.arrivals)
    assert cut.arrivals[-1].at == pytest.approx(24.5, rel=0.01) or name == "mooncake"


def test_prompts_share_what_their_parts_share():
    one = Arrival(0.0, (PromptPart(5, 40), PromptPart(6, 10)), 1)
    other = Arrival(0.0, (PromptPart(5, 40), PromptPart(7, 10)), 1)
    assert text(one).split()[:40] == text(other).split()[:40]
    assert text(one) != text(other)
    ids = token_ids(one, 5000)
    assert len(ids) == 50 and ids[:40] == token_ids(other, 5000)[:40] and max(ids) < 4500
    assert sum(part.length for part in fitted(one.parts, 77)) == 77


# ---- the client ------------------------------------------------------------------------------------------------------


class FakeServer:
    """Speaks just enough of the API, with known delays: TTFT 50 ms, 10 ms a token."""

    def __init__(self, timings=True, status=200):
        self.timings, self.status, self.bodies = timings, status, []
        self.ready = threading.Event()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True).start()
        assert self.ready.wait(60), "the fake server did not start"

    def _run(self):
        asyncio.set_event_loop(self.loop)
        server = self.loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.ready.set()
        self.loop.run_forever()

    async def _serve(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            await self._answer(writer, b'{"data": [{"id": "fake"}]}', 200)
            return
        length = int(re.search(rb"content-length: (\d+)", head.lower())[1])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        if self.status != 200:
            await self._answer(writer, b'{"error": "busy"}', self.status)
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        await asyncio.sleep(0.05)
        for _ in range(body["max_tokens"]):
            writer.write(b'data: {"choices": [{"text": " a"}]}\n\n')
            await writer.drain()
            await asyncio.sleep(0.01)
        last = {
            "choices": [],
            "usage": {
                "prompt_tokens": 33,
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": 16},
            },
        }
        if self.timings:
            last["timings"] = {"ttft_s": 0.045, "queue_s": 0.02, "preemptions": 0}
        writer.write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode())
        await writer.drain()
        writer.close()

    @staticmethod
    async def _answer(writer, body, status):
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()


def tiny_load(**changes):
    return make_load("batch", **({"count": 8, "per_second": 20.0, "scale": 10.0, "kind": "constant"} | changes))


@measured
def test_the_client_sees_what_the_server_does():
    server = FakeServer()
    run = measure(Target(server.url + "/v1"), tiny_load())
    assert len(run.records) == 8 and not any(record.error for record in run.records)
    summary = run.summary()
    assert 0.04 < summary.ttft.p50 < 5 and summary.tpot.p50 > 0.0095
    for record in run.records:
        assert (record.prompt, record.cached, record.output) == (33, 16, len(record.pieces))
        assert record.outside == pytest.approx(record.ttft - 0.045)
        served = record.served()
        assert served.scheduled == pytest.approx(record.sent + 0.02)
    assert run.model == "fake" and server.bodies[0]["model"] == "fake"
    assert summary.hit_rate == pytest.approx(16 / 33)


def test_a_closed_loop_keeps_so_many_under_way():
    server = FakeServer()
    run = measure(Target(server.url, model="fake"), tiny_load(kind="closed", concurrency=2))
    moments = sorted([(record.sent, 1) for record in run.records] + [(record.end, -1) for record in run.records])
    assert max(np.cumsum([step for _, step in moments])) <= 2


def test_failures_are_counted_not_hidden():
    run = measure(Target(FakeServer(status=503).url, model="fake"), tiny_load())
    assert all(record.error.startswith("503") for record in run.records)
    assert "8 of 8 requests failed" in report.check(run)[0]
    with pytest.raises(InputError, match="cannot be reached"):
        measure(Target("http://127.0.0.1:9"), tiny_load())


# ---- results ---------------------------------------------------------------------------------------------------------


def made_up(count=40, ttft=0.1, tpot=0.02, seed=0):
    rng = random.Random(seed)
    run = Run("made up", "nowhere", 2.0, None, [])
    for number in range(count):
        at = number / 2
        first = at + ttft * rng.uniform(0.8, 1.2)
        pieces = [first + i * tpot * rng.uniform(0.95, 1.05) for i in range(20)]
        run.records.append(RequestRecord(at, at, sorted(pieces), max(pieces), 50, 0, 20, parts=[[number, 50]]))
    return run


def test_results_survive_their_file(tmp_path):
    run = made_up()
    save([run], tmp_path / "r.json", "twostroke bench")
    assert load_runs(tmp_path / "r.json") == [run]
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match="not a result"):
        load_runs(tmp_path / "bad.json")


def test_compare_tells_change_from_chance():
    same = {change.name: change.verdict for change in changes(made_up(), made_up(seed=1))}
    assert set(same.values()) == {"no clear change"}
    slower = {change.name: change for change in changes(made_up(), made_up(ttft=0.2, seed=1))}
    assert slower["TTFT p50"].verdict == "worse" and slower["TTFT p50"].low < 2.0 < slower["TTFT p50"].high
    assert slower["TPOT p50"].verdict == "no clear change"
    assert {c.name: c for c in changes(made_up(tpot=0.04), made_up())}["TPOT p50"].verdict == "better"


def test_impossible_figures_are_flagged():
    run = made_up()
    assert report.check(run) == []
    run.records[0].cached = 60
    run.records[1].timings = {"ttft_s": 5.0}
    run.records[2].pieces = [run.records[2].pieces[0]] * 20
    run.records[3].sent += 1.0
    flags = " ".join(report.check(run))
    assert "more prompt tokens cached" in flags and "two clocks" in flags
    assert "buffered" in flags and "client sent 1 request more" in flags


def test_what_a_measured_machine_cannot_do_is_flagged():
    run, (line, _) = made_up(), parts()
    assert report.check(run, line) == [], "135 MB at 20 GB/s take 7 ms"
    fast = replace(line.rates, bandwidth=line.rates.bandwidth / 100, compute=line.rates.compute / 1000)
    flags = " ".join(report.check(run, Roofline(line.model, line.layout, fast)))
    assert "reading the weights alone takes" in flags and "their products alone take" in flags


def test_the_page_shows_the_network_apart():
    run = made_up()
    assert "network and client" not in html.page([run], "bench")
    for record in run.records:
        record.timings = {"ttft_s": record.ttft - 0.004}
    assert "<td>of which network and client</td><td>4.0 ms</td>" in html.page([run], "bench")


def test_the_page_stands_alone():
    runs = [made_up(), made_up(ttft=0.3)]
    runs[0].flags = ["<script>alert(1)</script>"]
    page = html.page(runs, "twostroke bench --url <x>", Targets(0.5, 0.05))
    assert page.count("<svg") == 3 + 2 * 4 and "goodput against rate" in page
    assert "<script" not in page and "http" not in page.replace("https://", "")
    assert "nan" not in page.lower().replace("finance", "")
    assert 'class="prefill"' in page and 'class="decode"' in page


def test_in_process_on_a_tiny_model(llama_folder):
    from twostroke import LLM

    llm = LLM(llama_folder, threads=1, max_model_len=256)
    run = inprocess.measure(llm, make_load("rag", count=6, per_second=50.0, scale=16.0), "tiny")
    assert [record.output for record in run.records] == [len(record.pieces) for record in run.records]
    assert all(record.error is None for record in run.records)
    assert run.summary().hit_rate > 0 and run.settings["max_model_len"] == 256
    assert mean(record.ttft for record in run.records) > 0
    assert all(record.outside == pytest.approx(0, abs=1e-6) for record in run.records)
    log = llm.engine.core.steplog
    assert sum(step.tokens for step in log) == llm.stats()["computed_tokens"]
    assert all(step.seconds > 0 for step in log)


@measured
def test_a_server_that_tells_nothing_is_probed():
    from twostroke.bench.black_box import probe

    shape = probe(Target(FakeServer(timings=False).url))
    assert 0.009 < shape.alone < 0.1
    assert 0.04 < shape.fixed < 0.5 and shape.per_token == 0, "this one counts every prompt as 33 tokens"
    assert any("no prefix cache" in line for line in shape.sentences)
