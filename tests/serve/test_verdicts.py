"""When a verdict is made, how old it is, and whether it is still about the load that runs."""

from __future__ import annotations

import asyncio
import json

import pytest

from twostroke.serve import verdicts
from twostroke.serve.verdicts import Verdicts


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Verdicts without a process: what they were made from."""
    asked: list[bytes] = []

    async def ask(documents: bytes) -> dict[str, str]:
        asked.append(documents)
        return {"sentence": json.loads(documents)}

    monkeypatch.setattr(verdicts, "ask", ask)
    return asked


async def documents() -> bytes:
    return b'"one"'


def test_a_verdict_knows_its_age_and_what_it_was_made_from(answered: list[bytes]) -> None:
    async def scene() -> None:
        now = 100.0
        made = Verdicts(lambda: now)
        made.refresh(3, "load a", documents)
        assert not made.working and made.document(3, "load a")["verdict"] is None, "three answers are too few"
        made.refresh(4, "load a", documents)
        assert made.document(4, "load a")["working"] and not made.document(4, "load a")["outdated"]
        assert made.task is not None
        await made.task
        now = 130.0
        same, other = made.document(9, "load a"), made.document(9, "load b")
        assert same["age_s"] == 30.0 and not same["outdated"] and not same["working"]
        assert other["outdated"], "requests came since, or a setting changed"
        made.refresh(9, "load b", documents)
        assert made.task is not None
        await made.task
        assert not made.document(9, "load b")["outdated"] and len(answered) == 2

    asyncio.run(scene())
