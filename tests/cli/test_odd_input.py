"""What people type by mistake into bench, plan and diagnose: a sentence that names the option and the way out."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from twostroke.bench.workload import make_load, renewed, trace_load
from twostroke.cli.main import app
from twostroke.errors import TwostrokeError

WRONG = {
    "bench --url nonsense": "http://127.0.0.1:8000",
    "bench --url http:// -n 1": "http://127.0.0.1:8000",
    "bench --url http://127.0.0.1:99999 -n 1": "http://127.0.0.1:8000",
    "diagnose --url http://[::1 -n 1": "http://127.0.0.1:8000",
    "bench --url http://127.0.0.1:9 -n 1": "cannot be reached",
    "bench --url http://127.0.0.1:9 -s exact=true": "start the server with that setting",
    "bench --chat": "give --url",
    "bench --trace azure-conv -w rag": "has no effect with --trace",
    "bench --arrivals closed --rate 3": "--concurrency decides",
    "bench --concurrency 3": "--arrivals closed",
    "bench --longest 99": "--trace",
    "bench --json {folder}/none/result.json": "a folder that exists",
    "bench --html {folder}": "a folder that exists",
    "bench --ttft=-1": "above 0",
    "bench --scale 1e-9": "0.01 or more",
    "bench --trace {folder}/bad.csv": "ContextTokens",
    "bench --trace {folder}/bad.jsonl": "input_length",
    "bench compare {folder}/empty.json {folder}/empty.json": "not a result of",
    "diagnose --result {folder}/list.json": "not a result of",
    "plan llama-3.1-8b --rate nan": "above 0",
    "plan llama-3.1-8b --rate 0": "above 0",
    "plan llama-3.1-8b --hardware a100 --precision fp8": "bfloat16 or int8 or int4",
    "plan llama-3.1-8b --gpus 1000": "32 heads",
    "plan llama-3.1-8b --hardware m4-max --gpus 2": "only on GPUs",
    "plan llama-3.1-8b -s max_model_len=10": "--scale",
    "plan {folder}/config.json": "not JSON",
    "plan llama-3.1-8b --rate inf": "1e-06 to 1e+09 requests a second",
    "plan llama-3.1-8b --rate 1e300": "1e-06 to 1e+09 requests a second",
    "bench --rate 1,1e400": "--rate 1,1e400: each must be above 0: 1e-06 to 1e+09",
    "plan llama-3.1-8b --ttft inf": "a number above 0",
    "plan llama-3-70b --hardware h200 --precision bfloat16": "weights take 141.1 GB; 1 × h200 has 141 GB",
    "plan llama-3.1-8b --hardware l4 --precision float32": "use more devices or a narrower precision",
    "plan llama-3.1-8b --trace nosuch": "--trace nosuch: no such file: give its path, or one of azure-code",
    "plan llama-3.1-8b --trace azure-conv -w rag": "has no effect with --trace",
    "plan llama-3.1-8b --search --hardware l4": "--hardware has no effect with --search",
    "plan llama-3.1-8b --search --calibrate": "--calibrate has no effect with --search",
    "plan llama-3.1-8b --hardware this": "run `twostroke plan llama-3.1-8b --calibrate`, or name a device: a100",
    "diagnose --trace azure-conv": "--hardware this: llama-3.1-8b was never measured on this machine",
    "diagnose --trace azure-conv --hardware h200 --rate 3": "--rate has no effect with --trace",
    "diagnose --result {folder}/none.json": "give a result of",
    "diagnose --result {folder}/empty.json --url http://127.0.0.1:9": "--result has no effect with --url",
    "diagnose --result {folder}/empty.json --apply": "--apply needs something that runs",
    "diagnose --result {folder}/empty.json -w rag": "--workload has no effect with --result",
    "diagnose --trace azure-conv --hardware h200 -s threads=2": "--set threads has no effect here",
    "plan llama-3.1-8b -s seed=1": "--set seed has no effect here: times do not depend on it",
    "diagnose --ledger --apply": "--apply has no effect with --ledger",
    "diagnose --url http://127.0.0.1:9": "is the server up",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("odd")
    for name, text in {
        "bad.csv": "a,b\n1,2\n", "bad.jsonl": '{"timestamp": 1}\n', "empty.json": "{}", "list.json": "[]",
        "config.json": "{half",
    }.items():  # fmt: skip
        (made / name).write_text(text)
    return made


def said(*arguments: str) -> str:
    """All that a person sees, one space between words, without the frames of boxes."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code != 0
    known = result.exception is None or isinstance(result.exception, TwostrokeError | SystemExit)
    assert known, f"a traceback: {result.exception!r}"
    words = f"{result.output} {result.exception}".replace("│", " ").split()
    return " ".join(words)


@pytest.mark.parametrize("typed", WRONG)
def test_a_mistake_is_answered_with_the_way_out(typed, folder, monkeypatch):
    monkeypatch.setenv("TWOSTROKE_HOME", str(folder))  # where nothing was ever measured
    text = said(*(part.format(folder=folder) for part in typed.split()))
    assert WRONG[typed] in text


def test_a_server_of_another_kind_is_named_as_such():
    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        for command in ("bench", "diagnose"):
            text = said(command, "--url", url, "-n", "1")
            assert "no OpenAI-compatible server" in text and "mozilla" not in text
    finally:
        server.shutdown()
        server.server_close()


def test_results_of_other_rates_are_not_compared(folder):
    whole = {"kind": "twostroke bench", "version": 1, "command": "", "runs": []}
    one = {"load": "chat", "target": "", "rate": 1.0, "closed": None, "records": [], "summary": None}
    for name, runs in (("one", [one]), ("two", [one, one])):
        (folder / f"{name}.json").write_text(json.dumps({**whole, "runs": runs}))
    assert "the same rates" in said("bench", "compare", str(folder / "one.json"), str(folder / "two.json"))


def test_a_recording_of_one_moment_is_given_a_rate(tmp_path):
    path = tmp_path / "burst.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    path.write_text(f"{json.dumps(row)}\n" * 4)
    load = trace_load(str(path), 4, per_second=2.0)
    assert [arrival.at for arrival in load.arrivals] == [0.0, 0.5, 1.0, 1.5]


def test_no_rate_of_a_sweep_finds_what_another_has_asked():
    """Each is in words of its own, or the second would be read from the cache that the first filled."""
    loads = [renewed(make_load("rag", count=12), number) for number in range(3)]
    said = [{part.content for row in load.arrivals for part in row.parts} for load in loads]
    assert not said[0] & said[1] and not said[1] & said[2] and not said[0] & said[2]
    assert loads[0] == make_load("rag", count=12)
