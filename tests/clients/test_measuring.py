"""Programs that measure servers: their times are those of the server's own `timings`, and lm-eval scores with it."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import tokenizers

from tests.clients import environments
from tests.clients.test_heavy import interpreter, run, settings
from tests.serve.server import KEY, Server
from twostroke.engine.intake import open_tokenizer
from twostroke.weights.catalog import DEFAULT, fetch
from twostroke.weights.checkpoint import open_checkpoint

REQUESTS, PROMPT, OUTPUT = 20, 256, 64
AGREE = 0.05
pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's tokenizer as transformers reads it: these programs make prompts of a given length."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = open_tokenizer(open_checkpoint(fetch(DEFAULT)))
    encoder = tokenizers.Tokenizer.from_str(tokenizer._vocabulary.encoder.to_str())
    encoder.decoder = tokenizers.decoders.ByteLevel()  # this engine decodes bytes itself
    encoder.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "model_max_length": 8192}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class Observed:
    """What the server itself measured of the requests between two moments."""

    def __init__(self, server: Server):
        self.client: httpx.Client = server.client()
        self.before = {one["request"] for one in self._all()}

    def _all(self) -> list[dict]:
        return self.client.get("/twostroke/arrivals?limit=1024").json()["arrivals"]

    def mean(self, name: str, last: int) -> float:
        """Of the last requests: programs send others first, to warm up."""
        new = [one for one in self._all() if one["request"] not in self.before and one["output_tokens"] > 1][-last:]
        return sum(one[name] for one in new) / len(new)


def agree(what: str, theirs: float, ours: float) -> None:
    print(f"{what}: {1000 * theirs:.2f} ms, the server's own {1000 * ours:.2f} ms ({theirs / ours - 1:+.1%})")
    assert abs(theirs / ours - 1) < AGREE, what


def program(environment: str, name: str) -> Path:
    interpreter(environment)
    found = environments.program(environment, name)
    assert found is not None
    return found


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(route: str, chat_server: Server, tokenizer_folder: Path, tmp_path: Path) -> None:
    guidellm = program("guidellm", "guidellm")
    observed, report = Observed(chat_server), tmp_path / "report.json"
    where = f"target={chat_server.url},api_key={KEY},model={chat_server.model}"
    backend = f"kind=openai_http,{where},request_format={route}"
    command = [
        guidellm, "run", "--disable-console", "--backend", backend, "--profile", "kind=synchronous",
        "--constraint", f"kind=max_requests,count={REQUESTS}", "--tokenizer", f"kind=hf_auto,model={tokenizer_folder}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    run(command, settings(chat_server), cwd=tmp_path)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert totals["successful"] == REQUESTS and not totals["errored"], totals
    agree("TTFT", metrics["time_to_first_token_ms"]["successful"]["mean"] / 1000, observed.mean("ttft_s", REQUESTS))
    agree("ITL", metrics["inter_token_latency_ms"]["successful"]["mean"] / 1000, observed.mean("tpot_s", REQUESTS))


def test_aiperf(chat_server: Server, tokenizer_folder: Path, tmp_path: Path) -> None:
    aiperf = program("aiperf", "aiperf")
    observed = Observed(chat_server)
    command = [
        aiperf, "profile", "--model", chat_server.model, "--url", chat_server.url, "--endpoint-type", "chat",
        "--api-key", KEY, "--streaming", "--tokenizer", str(tokenizer_folder), "--isl", str(PROMPT), "--osl",
        str(OUTPUT), "--concurrency", "1", "--request-count", str(REQUESTS), "--warmup-request-count", "2",
        "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(tmp_path), "--ui-type", "none",
        "--no-gpu-telemetry", "--no-server-metrics",
    ]  # fmt: skip
    env = settings(chat_server)
    del env["HF_HUB_OFFLINE"]  # with it, a folder is taken for a name of the hub
    run(command, env, cwd=tmp_path)
    report = json.loads(next(tmp_path.rglob("profile_export_aiperf.json")).read_text())
    assert report["request_count"]["avg"] == REQUESTS and not report.get("error_request_count", {}).get("avg")
    agree("TTFT", report["time_to_first_token"]["avg"] / 1000, observed.mean("ttft_s", REQUESTS))
    agree("ITL", report["inter_token_latency"]["avg"] / 1000, observed.mean("tpot_s", REQUESTS))


TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: OUTPUT
doc_to_text: "The capital of {{country}} is"
METRIC
"""
CHOICES = 'doc_to_choice: ["Paris", "Rome", "Tokyo"]\ndoc_to_target: label\nmetric_list: [{metric: acc}]'
WRITTEN = (
    'doc_to_target: "{{answer}}"\ngeneration_kwargs: {until: ["."], max_gen_toks: 8}\n'
    "metric_list: [{metric: exact_match}]"
)


@pytest.mark.parametrize(
    ("model", "route", "output", "metric"),
    [
        ("local-completions", "completions", "multiple_choice", CHOICES),
        ("local-completions", "completions", "generate_until", WRITTEN),
        ("local-chat-completions", "chat/completions", "generate_until", WRITTEN),
    ],
)
def test_lm_eval(
    model: str, route: str, output: str, metric: str, chat_server: Server, tokenizer_folder: Path, tmp_path: Path
) -> None:
    lm_eval = program("lmeval", "lm_eval")
    data = tmp_path / "capitals.jsonl"
    known = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo"}
    rows = [{"country": name, "answer": city, "label": n} for n, (name, city) in enumerate(known.items())]
    data.write_text("\n".join(map(json.dumps, rows)))
    text = TASK.replace("FILE", str(data)).replace("OUTPUT", output).replace("METRIC", metric)
    (tmp_path / "capitals.yaml").write_text(text)
    arguments = (
        f"model={chat_server.model},base_url={chat_server.url}/v1/{route},num_concurrent=2,max_retries=1,"
        f"tokenizer={tokenizer_folder},tokenizer_backend=huggingface,tokenized_requests=False"
    )
    command = [lm_eval, "run", "--model", model, "--model_args", arguments, "--tasks", "capitals", "--include_path",
               tmp_path, "--log_samples", "--output_path", tmp_path / "out"]  # fmt: skip
    if "chat" in model:
        command.append("--apply_chat_template")
    run(command, settings(chat_server), cwd=tmp_path)
    results = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())["results"]["capitals"]
    print(results)
    if output == "multiple_choice":
        assert results["acc,none"] == 1.0  # even a small model knows these, so the scores are in the right order
