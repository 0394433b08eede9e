"""The command line as a person meets it: real processes, real pipes, a real Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twostroke.cli.main import main

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "twostroke", *arguments]


def run(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), input=stdin, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False
    )


@pytest.fixture
def mistake(capsys, monkeypatch):
    """What a mistake is answered with. In this process: the way to it is the same, and nothing need be imported."""

    def answered(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["twostroke", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        return capsys.readouterr().err

    return answered


HELP_ALONE = """
import sys
from twostroke.cli.main import main
sys.argv = ["twostroke", "--help"]
try:
    main()
except SystemExit as end:
    assert end.code == 0, end
print("imported:", *sorted(name for name in sys.modules if name.count(".") < 2))
"""


def test_help_is_there_at_once():
    """What a command needs is imported when it is run: none of it belongs to a list of commands."""
    done = subprocess.run([sys.executable, "-c", HELP_ALONE], cwd=ROOT, capture_output=True, text=True, check=True)
    shown, imported = done.stdout.split("imported:")
    assert "diagnose" in shown
    heavy = {"torch", "numpy", "transformers", "tokenizers", "jinja2", "matplotlib", "pydantic", "twostroke.engine"}
    assert not heavy & set(imported.split())


def test_generate_prints_text_and_where_the_time_went(llama_folder):
    done = run("generate", str(llama_folder), "Once upon a time", "--max-tokens", "8", "--seed", "1", "--stats")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    for word in ("queue", "prefill", "decode", "TTFT", "TPOT", "tokens/s"):
        assert word in done.stderr


@pytest.mark.parametrize("words", [(), ("serve",), ("cluster",), ("bench",), ("bench", "levers"), ("cache",)])
def test_help_is_whole_at_80_columns(words, capsys, monkeypatch):
    """No name and no summary is cut."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["twostroke", *words, "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    lines = capsys.readouterr().out.splitlines()
    assert not end.value.code and lines[0].startswith("Usage: ")
    assert all(len(line) <= 80 and "…" not in line for line in lines)
    assert not any("..." in line for line in lines[1:])
    assert words != ("serve",) or any("--answer-cache-file <path>" in line for line in lines)


@pytest.mark.parametrize("words", [(), ("serve",), ("bench", "levers")])
def test_help_has_a_short_form(words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["twostroke", *words, "-h"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code and capsys.readouterr().out.startswith("Usage: ")


def test_generate_json_is_one_document(llama_folder):
    done = run(
        "generate", str(llama_folder), "-", "--max-tokens", "5", "--seed", "1", "--json", stdin="Once upon a time"
    )
    document = json.loads(done.stdout)
    sample = document["samples"][0]
    assert document["text"].startswith(sample["text"][:1]) and len(document["text"]) > 0
    assert len(sample["token_ids"]) <= 5
    assert set(sample) == {"text", "token_ids", "finish_reason", "logprobs", "error", "timeline"}
    timeline = sample["timeline"]
    assert timeline["e2e"] == pytest.approx(timeline["queue"] + timeline["prefill"] + timeline["decode"])


def test_models_lists_sizes_and_licences():
    done = run("models")
    assert "smollm2-135m" in done.stdout and "98 MB" in done.stdout and "Apache-2.0" in done.stdout
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("Kept in")), "at 80 columns nothing is broken"
    assert lines[0].split()[0] == "smollm2-135m", "a name can be cut out with any tool"


def test_the_version_is_told():
    done = run("--version")
    assert done.returncode == 0 and done.stdout.split()[0] == "twostroke" and done.stdout.split()[1][0].isdigit()


def test_settings_are_read_as_what_they_are(llama_folder, mistake):
    base = ("generate", str(llama_folder), "Once", "--max-tokens", "2")
    settings = ("-s", "kv_dtype=int8", "-s", "prefix-cache=false", "-s", "max_gap=0.1", "-s", "max_requests=2")
    assert run(*base, *settings).returncode == 0
    for wrong, word in (("kv_dtyp=int8", "kv_dtype"), ("threads=many", "threads"), ("threads", "NAME=VALUE")):
        assert word in mistake(*base, "-s", wrong)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("generate", "no-such-model", "x"), "smollm2-135m"),
        (("chat", "Hi", "--temperature", "-1"), "temperature"),
    ],
)
def test_errors_are_one_sentence(arguments, word, mistake):
    said = mistake(*arguments)
    assert word in said and "Traceback" not in said


def test_an_error_of_a_real_process_is_one_sentence():
    done = run("chat", "Hi", "--model", "/nowhere/model.gguf")
    assert done.returncode == 2
    assert "/nowhere/model.gguf" in done.stderr and "Traceback" not in done.stderr


def test_chat_answers_one_question(llama_folder):
    done = run("chat", "Hi there", "--model", str(llama_folder), "--max-tokens", "8", "--seed", "1", "--stats")
    assert done.returncode == 0 and done.stdout.strip() and "decode" in done.stderr


def test_interactive_chat_keeps_history_and_knows_its_commands(llama_folder):
    lines = ["/help", "/stats", "Hello", "/stats", "/reset", "/nonsense", "Again", "/exit"]
    done = run("chat", "--model", str(llama_folder), "--max-tokens", "6", "--seed", "1", stdin="\n".join(lines) + "\n")
    assert done.returncode == 0, done.stderr
    for word in ("/reset", "no answer yet", "where the time went", "forgotten", "unknown command /nonsense"):
        assert word in done.stderr
    assert "> " not in done.stdout and "Type a message" not in done.stderr, "nothing is typed: lines come from a pipe"


def test_a_conversation_that_outgrows_the_context_forgets_its_oldest_turn(llama_folder):
    lines = ["word " * 25] * 4 + ["/exit"]
    options = ("--max-tokens", "4", "-s", "max_model_len=256")
    done = run("chat", "--model", str(llama_folder), *options, stdin="\n".join(lines) + "\n")
    assert done.returncode == 0, done.stderr
    assert "oldest turn is forgotten" in done.stderr


def test_ctrl_c_stops_one_answer_and_not_the_program(default_model):
    process = subprocess.Popen(
        command("chat", "--max-tokens", "4000", "--seed", "1", "-s", "threads=1"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # the parent process may ignore it
    )  # fmt: skip
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write(b"Tell me a very long story about a dragon.\n")
    process.stdin.flush()
    seen = b""
    while len(seen) < 40:
        part = os.read(process.stdout.fileno(), 64)
        assert part, "it ended before it was stopped"
        seen += part
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    _, errors = process.communicate(b"/stats\n/exit\n", timeout=600)
    assert process.returncode == 0
    assert b"stopped" in errors and b"output_tokens" in errors


def test_an_empty_question_is_said_to_be_empty():
    done = run("chat", " ")
    assert done.returncode == 2 and "the question is empty" in done.stderr
    assert not done.stderr.startswith("\n"), "no bars without a terminal"
