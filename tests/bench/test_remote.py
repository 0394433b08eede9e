"""A running server is diagnosed through its routes, a lever is pulled on it, and it is measured again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.bench.test_apply import command
from tests.serve.server import KEY, Server
from twostroke.bench import ledger
from twostroke.bench.apply import Applied
from twostroke.bench.client import Target, measure
from twostroke.bench.remote import Admin, apply_live, diagnose_recorded
from twostroke.bench.workload import Load, renewed
from twostroke.cost.simulation.served import Targets
from twostroke.cost.simulation.trace import Arrival, Contents, PromptPart
from twostroke.errors import InputError


@pytest.fixture(scope="module")
def hobbled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """So few tokens in a step that every prompt takes many of them: the remedy is known."""
    folder = tiny.tiny_llama(tmp_path_factory.mktemp("hobbled"), max_position_embeddings=1024)
    running = Server(folder, "-s", "max_requests=4", "-s", "max_batch_tokens=4").wait()
    yield running
    assert running.stop() == 0


def long_prompts() -> Load:
    contents = Contents()
    return Load("long prompts", [Arrival(0.15 * number, (contents.own(300),), 4) for number in range(12)])


@pytest.mark.slow
@pytest.mark.alone
def test_a_lever_is_pulled_on_a_running_server(hobbled: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = Target(hobbled.url, key=KEY)
    admin = Admin(target)
    assert admin.known
    with pytest.raises(InputError, match="answered nothing yet"):
        diagnose_recorded(admin, Targets())
    tries = (apply_live(admin, target, long_prompts(), measure, Targets()) for _ in range(4))  # it may be disturbed
    found = next(one for one in tries if isinstance(one, Applied))
    assert found.live and found.effect.lever.name == "token-budget"
    now = admin.get("/twostroke/settings")["settings"]["max_batch_tokens"]
    assert now["value"] > 4 and now["reason"] == "changed while running"
    assert found.prediction.metric == "ttft" and found.prediction.measured < found.prediction.before
    assert 0 < found.prediction.predicted < found.prediction.before
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path))
    shown = command("diagnose", "--url", hobbled.url, "--api-key", KEY)
    assert "tokens written" in shown and ("do not help" in shown or "levers" in shown)
    assert ledger.read(tmp_path / "ledger.jsonl") == []


def test_what_a_server_refuses_is_said(hobbled: Server):
    admin = Admin(Target(hobbled.url, key=KEY))
    with pytest.raises(InputError, match="max_requests"):
        admin.change({"max_requests": 1000})
    with pytest.raises(InputError, match="--api-key"):
        _ = Admin(Target(hobbled.url, key="wrong-key-here")).known
    with pytest.raises(InputError, match="cannot be reached"):
        _ = Admin(Target("http://127.0.0.1:9")).known
    assert admin.totals()["vllm:num_requests_running"] == 0.0


def test_a_load_in_other_words_shares_what_it_shared():
    load = Load(
        "x",
        [
            Arrival(0.0, (PromptPart(1, 30), PromptPart(2, 5)), 4),
            Arrival(1.0, (PromptPart(1, 30), PromptPart(3, 5)), 4),
        ],
    )
    other = renewed(load)
    first, second = (arrival.parts for arrival in other.arrivals)
    assert first[0] == second[0] and first[1] != second[1] and first[0].content != 1
    assert [arrival.prompt for arrival in other.arrivals] == [35, 35]
