from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import tiny
from tests.serve.server import Server

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }} Call with <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A client that is refused may be as slow to read why as the machine makes it, and a verdict as slow to be reached.
PATIENT_SERVER = (
    "import twostroke.serve.transport.lingering_close as g, twostroke.serve.verdicts as v; "
    "g.LINGER_SECONDS = 60.0; v.PATIENCE = 600.0"
)


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Room for answers that take a while."""
    return tiny.tiny_llama(tmp_path_factory.mktemp("long"), max_position_embeddings=8192)


@pytest.fixture(scope="session")
def server(long_folder: Path) -> Iterator[Server]:
    """One server for all tests that leave it as they found it."""
    running = Server(long_folder, "--max-queue", "64", code=PATIENT_SERVER).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def tooled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template knows tools as Qwen's does."""
    folder = tiny.tiny_llama(tmp_path_factory.mktemp("tooled"), max_position_embeddings=2048)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With a short context: no answer takes long."""
    running = Server(tooled_folder(tmp_path_factory), "-s", "max_model_len=800").wait()
    yield running
    assert running.stop() == 0
