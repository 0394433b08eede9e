"""The semantic tier over HTTP with real models: shared only with evidence, never across entities; what is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve.server import KEY, Server, wait_until
from tests.serve.test_answers import SLOW_DEADLINE, settle, stored
from twostroke.answers.bound import ErrorBound, JudgedPair
from twostroke.answers.evidence import SharedEvidence
from twostroke.answers.guard import KINDS
from twostroke.answers.store import FileStore
from twostroke.bench.client import Target
from twostroke.bench.remote import Admin, diagnose_recorded
from twostroke.cost.simulation.served import Targets
from twostroke.serve.answer_setup import KEY_VARIABLE, digest
from twostroke.weights.catalog import DEFAULT, fetch

pytestmark = pytest.mark.slow
SECRET = "the key of these tests"
CODE = SLOW_DEADLINE.replace("deadline=60.0", "deadline=60.0, shadow=0.0") + (
    f"import os; os.environ['{KEY_VARIABLE}'] = '{SECRET}'\n"
)


def believe(file: Path) -> None:
    """Evidence of every kind, as an earlier run would have left it."""
    store = FileStore(file, 100)
    evidence = SharedEvidence(ErrorBound(0.05), store, digest(SECRET.encode()))
    for kind in KINDS:
        for number in range(200):
            evidence.add(JudgedPair(str(number), kind, 0.8 + number / 1000, True))
    store.close()


@pytest.fixture(scope="module")
def semantic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    for name in (DEFAULT, "all-minilm-l6-v2"):
        fetch(name)
    file = tmp_path_factory.mktemp("semantic") / "answers.sqlite"
    believe(file)
    arguments = ("--answer-cache", "semantic", "--answer-cache-file", str(file), "--answer-cache-error", "0.05")
    allowed = ("--answer-cache-allow", "tools, personal", "--record-questions")
    running = Server(DEFAULT, *arguments, *allowed, code=CODE, threads=2).wait()
    yield running
    assert running.stop() == 0


def ask(client: httpx.Client, question: str, **more: object) -> dict:
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 48, "stop": [" "], **more}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert "answer_cache" in answer, answer
    return answer


def test_another_wording_is_shared_and_another_entity_is_not(semantic: Server) -> None:
    with semantic.client() as client:
        before = stored(client)
        first = ask(client, "What is the capital of France?")
        assert first["answer_cache"]["hit"] is None
        settle(client, before)
        shared = ask(client, "what is capital of france")
        found = shared["answer_cache"]
        assert found["hit"] == "semantic" and 0.8 < found["similarity"] <= 1.001 and found["saved_s"] > 0
        assert shared["choices"] == first["choices"] and shared["timings"]["prefill_s"] == 0
        for other in ("What is the capital of Spain?", "What is not the capital of France?"):
            assert ask(client, other)["answer_cache"]["hit"] is None, other
        assert ask(client, "what is capital of france", temperature=0.9)["answer_cache"]["hit"] is None
        system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "what is capital of france"}]
        assert ask(client, "", messages=system)["answer_cache"]["hit"] is None  # another context
        assert client.post(f"/twostroke/answers/{found['id']}/wrong").json() == {"forgotten": 1}
        again = client.get("/twostroke/answers").json()
        assert again["kinds"]["small words"]["wrong"] == 1 and again["error"]["pairs"] >= 450


def test_what_the_operator_allows(semantic: Server) -> None:
    with semantic.client() as client:
        before = stored(client)
        ask(client, "How do I water my garden?")
        settle(client, before)
        assert ask(client, "How can I water my garden?")["answer_cache"]["hit"] == "semantic"
        before = stored(client)
        ask(client, "Which tools were made today?")
        settle(client, before)  # by the exact tier
        assert ask(client, "What tools were made today?")["answer_cache"]["hit"] is None


def test_recorded_questions_are_numbers(semantic: Server) -> None:
    with semantic.client() as client:
        bypass = {"cache": {"answer": False}}
        for number in range(3):
            ask(client, "How do I boil an egg?", **bypass)
            ask(client, "How can I boil eggs?", **bypass)
            ask(client, f"Where are the {number + 2} rivers?", **bypass)

        def topics() -> list[int]:
            rows = client.get("/twostroke/arrivals").json()["arrivals"]
            return [row["topic"] for row in rows if row["topic"] is not None][-9:]

        wait_until(lambda: len(topics()) == 9, "questions were not recorded")
        found = topics()
        assert len({found[0], found[1], found[3], found[4]}) == 1 and len(set(found[2::3])) == 3
    diagnosis = diagnose_recorded(Admin(Target(semantic.url, key=KEY)), Targets())
    tried = [effect.lever.name for effect in diagnosis.effects] + [one.lever.name for one in diagnosis.rejected]
    assert "semantic-cache" in tried
    reasons = {one.lever.name: one.reason for one in diagnosis.rejected}
    assert "--record-questions" not in reasons.get("semantic-cache", "")
