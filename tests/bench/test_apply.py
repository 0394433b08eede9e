"""From measuring to pulling a lever, on a tiny real model; and the commands around it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tests.cost.answers.test_prompt_lookup import case, edits, verdict
from tests.measured import measured
from twostroke import LLM
from twostroke.bench import inprocess, known_answers, ledger, levers, plots
from twostroke.bench.apply import Applied, apply, pull
from twostroke.bench.calibrate import calibrate
from twostroke.bench.record import save
from twostroke.bench.workload import Load, make_load
from twostroke.cli.main import app
from twostroke.cost.simulation.deployment import config_of
from twostroke.cost.simulation.trace import Arrival, Contents, fresh_tokens
from twostroke.cost.units import times
from twostroke.engine.settings import change
from twostroke.errors import ConfigError
from twostroke.record import replace
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.describe import checkpoint_bytes


def open_tiny(folder, **settings):
    return LLM(folder, threads=1, **({"max_model_len": 400} | settings))


def calibrated(folder):
    return calibrate(open_tiny(folder), "tiny", checkpoint_bytes(open_checkpoint(folder)), seconds=3.0)


@pytest.fixture(scope="module")
def calibration(llama_folder):
    return calibrated(llama_folder)


@measured
def test_calibration_fits_its_own_steps(llama_folder):
    calibration = calibrated(llama_folder)
    assert calibration.steps > 50 and calibration.rates.source == "step log"
    assert calibration.rates.host_link > 1e7  # bytes/s: a copy in memory was measured
    assert calibration.errors["median"] < 0.5  # a tiny model on a shared machine: noise is most of a step


@pytest.mark.slow
@pytest.mark.alone
def test_the_best_lever_is_pulled_and_measured(llama_folder, calibration):
    """One request at a time by construction: the remedy is known. Other programs on the machine may make a measurement
    that the replay does not agree with; then nothing is pulled, and the load is run again. No drafts: to plan them
    takes as long as a step of this model, which no simulation knows."""
    contents = Contents()
    load = Load("queue", [Arrival(0.002 * i, (contents.own(30),), 40) for i in range(24)])
    given = {"max_requests": 1, "speculate": "off"}
    llm = open_tiny(llama_folder, **given)
    size = checkpoint_bytes(open_checkpoint(llama_folder))
    reopen = lambda settings: open_tiny(llama_folder, **(given | settings))  # noqa: E731
    tries = (apply(llm, reopen, load, "tiny", calibration, size) for _ in range(4))
    found = next(one for one in tries if isinstance(one, Applied))
    assert found.effect.lever.name == "batch-cap" and not found.live
    assert found.prediction.measured < found.prediction.before or found.prediction.metric == "throughput"
    assert found.prediction.predicted > 0


def test_prompt_lookup_is_pulled_on_the_running_engine(llama_folder):
    best = verdict(case(edits)).best
    assert best.lever.name == "prompt-lookup"
    llm = open_tiny(llama_folder, speculate="off")
    scheduler = llm.engine.core.scheduler
    assert scheduler.drafter is None
    assert pull(llm, lambda settings: pytest.fail("no new engine is needed"), best) is llm
    assert llm.settings.speculate == "auto" and scheduler.drafter is not None


def test_live_settings_change_between_steps(llama_folder):
    llm = open_tiny(llama_folder, batching="static", prefix_cache=False)
    scheduler = llm.engine.core.scheduler
    then = change(scheduler, llm.settings, {"batching": "continuous", "prefix_cache": True, "max_batch_tokens": 64})
    assert not scheduler.limits.static and scheduler.limits.max_batch_tokens == 64
    assert then.batching == "continuous" and scheduler.tables.pool.keep_cached
    for bad in ({"kv_dtype": "int8"}, {"max_requests": 1000}, {"policy": "sometimes"}, {"max_batch_tokens": 8}):
        with pytest.raises(ConfigError):
            change(scheduler, then, bad)
    assert scheduler.limits.max_batch_tokens == 64


def test_the_attention_kernel_is_measured_by_itself(llama_folder):
    found = levers.attention_kernel(lambda settings: open_tiny(llama_folder, **settings))
    assert found.trouble or (found.effect["ttft"] > 0 and found.effect["tpot"] > 0)
    drawn = plots.effects("levers <here>", [(found.name, found.effect), ("memory", {"kv_bytes_per_token": 0.25})])
    assert drawn.count("<svg") == 1 and "&lt;here&gt;" in drawn and "KV memory 4.00×" in drawn


def tiny_round(folder):
    return levers.Round(lambda settings: open_tiny(folder, **settings), 1, True, stored=10**9)


def test_every_lever_has_a_row_as_soon_as_it_is_measured(llama_folder):
    """The computed and simulated ones here; the others are measured by the command."""
    made = levers.measures(tiny_round(llama_folder))
    assert len(made) == len(levers.EXPERIMENTS) + 7
    with_draft_model = levers.measures(replace(tiny_round(llama_folder), drafts=True))
    assert with_draft_model.keys() - made.keys() == {"draft model, open questions"}
    for name in ("grouped queries", "blocks of tokens", "separate pools"):
        row = made[name]()
        assert row.trouble is None and row.effect, name
    assert made["sliding windows"]().trouble == "this model has no windows"
    assert made["blocks of tokens"]().effect["kv_bytes"] < 0.6
    for one in levers.EXPERIMENTS:
        for quick in (True, False):
            assert one.load(quick).arrivals
        assert len(one.load(True).arrivals) <= len(one.load(False).arrivals)
    for quick in (True, False):
        fresh = sorted(fresh_tokens(levers.documents(quick).arrivals))
        assert fresh[len(fresh) // 2] < 50, "the median request finds its document in the cache"


@measured
def test_a_known_answer_costs_a_lookup(llama_folder):
    how = tiny_round(llama_folder)
    row = levers.answer_cache(how)
    assert row.trouble is None and row.effect["throughput"] > 1 and row.effect["ttft"] > 0
    load = known_answers.asked_again(True)
    run = known_answers.run_cached(how.open_llm({}), load)
    at_once = [len(set(record.pieces)) == 1 for record in run.records]
    assert at_once == [False] * 3 + [True] * 6 and all(len(record.pieces) == 32 for record in run.records)


def test_what_a_lever_saves_in_memory_is_told(llama_folder):
    """Bytes of the weights too: as the file has them, or as they are held."""
    load = Load("one", [Arrival(0.0, (Contents().own(8),), 3)], 1)
    brief = levers.Experiment(
        "int8", "decode", {"kv_dtype": "float16"}, {"quantize": "int8", "kv_dtype": "int8"}, lambda quick: load, ""
    )
    row = levers.measure_experiment(brief, tiny_round(llama_folder))
    assert row.trouble is None and row.off["weight_bytes"] == 10**9 and 0 < row.on["weight_bytes"] < 10**9
    assert row.memory.startswith("KV ×0.") and ", weights ×" in row.memory
    assert "weights' memory" in plots.effects("levers", [(row.name, row.effect)])
    assert levers.Row("same", "both", "").memory == "–" and times(0.0042) == "×0.0042"
    for one in levers.EXPERIMENTS:
        if one.name.startswith("weights"):
            assert one.off["kv_dtype"] == one.on["kv_dtype"], "one lever at a time"


def test_settings_of_a_run_can_be_replayed(llama_folder):
    for settings in ({}, {"chunked_prefill": False}, {"policy": "prefill-first"}, {"kv_dtype": "int8"}):
        llm = open_tiny(llama_folder, **settings)
        config = config_of(inprocess.settings_document(llm))
        assert config.kv_blocks == llm.settings.kv_blocks and config.policy == llm.settings.policy


def test_the_ledger_keeps_pairs(tmp_path):
    entry = ledger.Prediction("2026-01-01T00:00:00+00:00", "cpu", "m", "rag", "prefix-cache", "ttft", 2.0, 0.9, 1.0)
    ledger.append(tmp_path / "a" / "ledger.jsonl", entry)
    with (tmp_path / "a" / "ledger.jsonl").open("a") as file:
        file.write("broken\n")
    ledger.append(tmp_path / "a" / "ledger.jsonl", replace(entry, lever="replica"))
    found = ledger.read(tmp_path / "a" / "ledger.jsonl")
    assert [one.lever for one in found] == ["prefix-cache", "replica"]
    assert found[0].error == pytest.approx(-0.1)
    assert ledger.read(tmp_path / "none") == []


# ---- commands --------------------------------------------------------------------------------------------------------


def command(*arguments, code=0):
    """What a command prints, in one line: where a terminal breaks it depends on the figures in it."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return " ".join(result.output.split())


def test_bench_in_process_and_its_files(llama_folder, tmp_path):
    places = ("--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    shown = command(
        "bench", "-m", llama_folder, "-w", "rag", "-n", 5, "--rate", "20,40", "--scale", 20, "-s", "threads=1",
        "-s", "max_model_len=256", "--ttft", 1, "--tpot", 0.1, *places,
    )  # fmt: skip
    assert "TTFT" in shown and "goodput" in shown
    assert len(json.loads((tmp_path / "r.json").read_text())["runs"]) == 2
    assert "<svg" in (tmp_path / "r.html").read_text()
    assert "TPOT p50" in command("bench", "compare", tmp_path / "r.json", tmp_path / "r.json")


def test_plan_needs_no_model_file():
    shown = command("plan", "llama-3-8b", "--hardware", "h200", "-w", "rag", "--ttft", 0.5, "--tpot", 0.03, "-n", 60,
                    "--precision", "bfloat16")  # fmt: skip
    assert "131,072 bytes" in shown and "workers" in shown
    for part in ("80% of 4,800 GB/s", "memory holds the K and V", "requests/s within the targets", "of load", "hits"):
        assert part in shown, part
    assert "busy" not in shown
    shown = command("plan", "llama-3-70b", "--hardware", "a100", "--tpot", 0.001, "-n", 60, code=1)
    assert "a100, bfloat16: left out, its weights take 141 GB of 80" in shown, "a line for each precision"
    assert "a100, int8: left out" in shown and "NVIDIA A100 SXM 80 GB has no products in fp8" in shown
    assert "a100, int4: left out, a request alone misses the targets" in shown


def test_plan_with_lengths_and_drafts():
    shown = command("plan", "llama-3.1-8b", "--prompt", 400, "--output", 50, "--precision", "bfloat16",
                    "--draft", "llama-3.2-1b", "--acceptance", 0.8)  # fmt: skip
    assert "requests of 400 + 50 tokens" in shown and "TPOT with drafts of llama-3.2-1b, 80%" in shown
    for arguments, word in (
        (("--prompt", 400), "--prompt needs --output too"),
        (("--prompt", 400, "--output", 5, "-w", "rag"), "--workload has no effect with --prompt"),
        (("--acceptance", 0.5), "--acceptance is for --draft"),
    ):
        result = CliRunner().invoke(app, ["plan", "llama-3.1-8b", *map(str, arguments)])
        assert result.exit_code != 0 and word in str(result.exception), word


def test_diagnose_a_trace():
    shown = command("diagnose", "--trace", "azure-code", "-m", "llama-3.1-8b", "--hardware", "l4", "-n", 20,
                    "-s", "max_model_len=16384")  # fmt: skip
    assert "do not help" in shown and "MFU" in shown


@measured  # a replay that is far from what was measured recommends nothing
def test_diagnose_a_result(llama_folder, tmp_path, monkeypatch, calibration):
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path))
    calibration.save(tmp_path / "calibration" / f"{llama_folder.name}.json")
    llm = open_tiny(llama_folder)
    run = inprocess.measure(llm, make_load("chat", count=8, per_second=50.0, scale=8.0), str(llama_folder))
    save([run], tmp_path / "r.json", "test")
    shown = command("diagnose", "--result", tmp_path / "r.json")
    assert "levers" in shown or "No lever helps" in shown
    assert "batching is continuous already" in shown
    typed = command("diagnose", "--result", tmp_path / "r.json", "-s", "batching=static")
    assert "batching is continuous already" not in typed, "what is typed comes before what the result says"
    assert "empty" in command("diagnose", "--ledger")
