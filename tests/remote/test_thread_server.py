"""The server's own tests over an engine on a thread: the server needs nothing that only a child process has.

Requests of every API with the official clients, raw HTTP with every refusal, forms and tools, and the operator's routes
run as in tests/serve; only the server that they ask differs. Left out: tests of a process that is killed or stopped,
of floods, and of random requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.serve.conftest import tooled_folder
from tests.serve.server import Server, children, command_line
from tests.serve.test_admin import (  # noqa: F401
    complete,
    test_arrivals_can_be_replayed,
    test_every_setting_has_a_reason,
    test_only_with_a_key,
    test_steps_account_for_every_token,
    test_what_cannot_change_is_refused_by_name,
)
from tests.serve.test_clients import *  # noqa: F403
from tests.serve.test_fields import *  # noqa: F403
from tests.serve.test_forms import (  # noqa: F401
    test_a_form_in_a_stream,
    test_a_named_call_in_other_apis,
    test_a_regex_that_explodes_harms_nobody,
    test_a_required_call,
    test_forms_that_cannot_be,
    test_json_object_regex_and_grammar,
    test_json_schema,
    test_what_was_thought_and_called_may_be_sent_back,
)
from tests.serve.test_http import *  # noqa: F403
from tests.serve.test_trust import (  # noqa: F401
    test_a_user_name_is_no_identity,
    test_an_id_opens_nothing,
    test_no_address_is_fetched,
    test_nobody_chooses_an_id,
)

pytestmark = pytest.mark.slow
THREAD = (
    "import twostroke.remote.async_engine as a\n"
    "from twostroke.remote.thread import ThreadEngine\n"
    "a.ProcessEngine = lambda path, settings, patience: ThreadEngine(path, settings)\n"
    "import twostroke.serve.transport.lingering_close as g; g.LINGER_SECONDS = 60.0\n"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tiny.tiny_llama(tmp_path_factory.mktemp("thread"), max_position_embeddings=8192)
    running = Server(folder, "--max-queue", "64", code=THREAD).wait()
    yield running
    running.assert_no_blocks_held()
    assert running.stop() == 0


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tiny.tiny_llama(tmp_path_factory.mktemp("admin"), max_position_embeddings=8192)
    options = ("-s", "max_requests=8", "-s", "max_model_len=2048", "--max-queue", "9")
    running = Server(folder, *options, code=THREAD).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tooled_folder(tmp_path_factory), "-s", "max_model_len=800", code=THREAD).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture
def client(server: Server) -> Iterator[object]:
    with server.client() as client:
        yield client


def test_no_child_process_runs_an_engine(server: Server) -> None:
    assert server.health()["status"] == "ok"
    assert not any(b"remote.child_main" in command_line(pid) for pid in children(server.process.pid))


def test_live_settings_change(admin: Server) -> None:
    with admin.client() as client:
        right = complete(client, "Once upon a time there was", 30)["choices"]
        changes = {"max_requests": 3, "max_batch_tokens": 64, "policy": "shortest", "prefix_cache": False}
        settings = client.post("/twostroke/settings", json=changes).raise_for_status().json()["settings"]
        assert {name: settings[name]["value"] for name in changes} == changes
        assert complete(client, "Once upon a time there was", 30)["choices"] == right
        last = client.get("/twostroke/steps").json()["last"]
        complete(client, "word " * 100)
        steps = client.get("/twostroke/steps", params={"since": last}).json()["steps"]
        assert max(step["prefill_tokens"] for step in steps) == 64
