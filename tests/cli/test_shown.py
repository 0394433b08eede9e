"""What is shown and kept of a measurement: a server's words as they are, the command without its key."""

from __future__ import annotations

import sys

import pytest
from rich.console import Console

from tests.draft.paying import make_drafts_cheap
from twostroke import LLM, SamplingParams
from twostroke.bench.levers import Row
from twostroke.bench.record import IN_PROCESS, RequestRecord, Run
from twostroke.cli import bench
from twostroke.cli.generate import timeline_document
from twostroke.cli.terminal import phase_table
from twostroke.cost.simulation.served import Targets

WORDS = "1 of 2 requests failed: 503 no such token [/INST]"


def a_run() -> Run:
    records = [
        RequestRecord(0.0, 0.0, [0.1, 0.2, 0.3], 0.3, prompt=9, output=3),
        RequestRecord(0.0, 0.0, error="503 [/INST]"),
    ]
    return Run("chat", "http://127.0.0.1:1", 1.0, None, records, model="name[/x]", flags=[WORDS])


def test_a_servers_words_are_no_markup(capsys: pytest.CaptureFixture[str], tmp_path):
    bench.show([a_run()], Targets(), tmp_path / "one.json", None)
    shown = " ".join(capsys.readouterr().out.split())
    assert "[/INST]" in shown and "[/x]" in shown
    bench.compare(tmp_path / "one.json", tmp_path / "one.json")
    assert "[/x]" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--api-key", "secret"], ["--api-key=secret"]])
def test_no_result_holds_the_key(words, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["twostroke", "bench", "--url", "http://127.0.0.1:1", *words, "-n", "2"])
    kept = tmp_path / "run.json", tmp_path / "run.html"
    bench.show([a_run()], Targets(), *kept)
    for file in kept:
        text = file.read_text()
        assert "secret" not in text and "twostroke bench --url" in text and "-n 2" in text


def test_a_run_in_process_has_no_network(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "console", Console(highlight=False, width=160))
    run = a_run()
    run.records[0].timings = {"ttft_s": 0.096}
    for target, times in (("http://127.0.0.1:1", 1), (IN_PROCESS, 0)):
        run.target = target
        bench.show([run], Targets(), None, None)
        assert capsys.readouterr().out.count("of which network and client") == times


@pytest.mark.parametrize("width", [80, 160])
def test_every_lever_can_be_read(width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "console", Console(highlight=False, width=width))
    numbers = {"ttft": 1.0, "tpot": 1.0, "gap": 1.0, "throughput": 1.0, "kv_bytes_per_token": 2.0, "weight_bytes": 9.0}
    names = ("separate pools (simulated, 8B on two H200)", "evicted K and V kept on the host")
    bench.show_levers("levers", [Row(name, "prefill", "many words " * 6, numbers, numbers) for name in names])
    shown = capsys.readouterr().out
    assert "…" not in shown and shown.count("many") == 12
    if width == 80:
        assert all(f"{name}: many words" in shown for name in names)


def test_stats_show_what_was_drafted(llama_folder, capsys: pytest.CaptureFixture[str]):
    llm = LLM(llama_folder, seed=1, threads=1, max_model_len=192)
    make_drafts_cheap(llm.engine.core.scheduler.drafter)
    always_e = {71: 100.0}  # a letter of the tiny models: the answer repeats itself
    for speculate in (True, False):
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logit_bias=always_e, speculate=speculate)
        timeline = llm.generate(["Once"], params)[0].timeline
        Console(width=200).print(phase_table(timeline))
        shown, document = capsys.readouterr().out, timeline_document(timeline)
        drafted, accepted = document["drafted_tokens"], document["accepted_tokens"]
        each = document["tokens_per_step"]
        assert (drafted >= accepted > 20) if speculate else (drafted == accepted == 0)
        assert each == pytest.approx(39 / (39 - accepted))
        note = f"{accepted} of {drafted} drafted tokens right, {each:.2f} tokens a step"
        assert (note in shown) == speculate and ("drafted" in shown) == speculate
