"""llama.cpp's own server tests, those that ask for nothing but OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.test_heavy import SCRIPTS, settings
from tests.serve.server import Server

FILES = ("test_compat_anthropic.py", "test_compat_oai_responses.py")
OTHER = {  # what they ask of llama.cpp alone
    "test_compat_anthropic.py::test_anthropic_messages_basic",  # no timings: here every answer has them
    "test_compat_anthropic.py::test_anthropic_empty_messages",  # takes a conversation without a message
    "test_compat_anthropic.py::test_anthropic_tool_result_with_image",  # images
    "test_compat_anthropic.py::test_anthropic_vision_format_accepted",
    "test_compat_anthropic.py::test_anthropic_vision_base64_with_multimodal_model",
    "test_compat_anthropic.py::test_anthropic_thinking_history_in_count_tokens",  # a template of its own
    "test_compat_anthropic.py::test_anthropic_thinking_history_in_template",
    "test_compat_anthropic.py::test_anthropic_thinking_with_reasoning_model[False]",  # a model from the hub
    "test_compat_anthropic.py::test_anthropic_thinking_with_reasoning_model[True]",
    "test_compat_oai_responses.py::test_responses_with_openai_library",  # words of its own model
    "test_compat_oai_responses.py::test_responses_stream_with_llama_telemetry",  # fields of its own
}
pytestmark = pytest.mark.clients


@pytest.fixture
def open_server() -> Server:
    running = Server("qwen2.5-coder-0.5b", keys=(), threads=2).wait()
    yield running
    assert running.stop() == 0


def test_llama_cpp(open_server: Server, tmp_path: Path) -> None:
    """TWOSTROKE_LLAMA_TESTS: the folder tools/server/tests of llama.cpp's sources."""
    given = os.environ.get("TWOSTROKE_LLAMA_TESTS")
    if not given:
        pytest.skip("TWOSTROKE_LLAMA_TESTS is not set: the folder tools/server/tests of llama.cpp's sources")
    source = Path(given)
    shutil.copy(source / "utils.py", tmp_path / "utils.py")
    shutil.copy(SCRIPTS / "llama_cpp_conftest.py", tmp_path / "conftest.py")
    for name in FILES:
        shutil.copy(source / "unit" / name, tmp_path / name)
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    env = settings(open_server, PYTHONPATH=str(tmp_path))
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=580, check=False)
    failed = set(re.findall(r"^FAILED (?:\S*/)?(\S+)", done.stdout, re.MULTILINE))
    print(done.stdout[-8000:])
    assert failed <= OTHER, failed - OTHER
