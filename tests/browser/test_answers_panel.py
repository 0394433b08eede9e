"""The dashboard's panel of the answer cache: what was shared is shown, and a person can say that it was wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.test_dashboard import WIDE, expect, picture
from tests.serve.server import Server, wait_until
from tests.serve.test_answers import settle, stored
from tests.serve.test_semantic_answers import CODE, ask, believe
from twostroke.weights.catalog import DEFAULT, fetch

pytestmark = pytest.mark.system


def test_a_shared_answer_is_shown_and_called_wrong(tmp_path: Path, watched):
    fetch("all-minilm-l6-v2")
    file = tmp_path / "answers.sqlite"
    believe(file)
    arguments = ("--answer-cache", "semantic", "--answer-cache-file", str(file), "--answer-cache-error", "0.05")
    running = Server(Path(DEFAULT), *arguments, code=CODE, keys=(), threads=2).wait(600)
    try:
        with running.client() as client:
            before = stored(client)
            ask(client, "What is the capital of France?")
            settle(client, before)
            assert ask(client, "what is capital of france")["answer_cache"]["hit"] == "semantic"
            seen = watched(viewport=WIDE)
            seen.page.goto(running.url + "/")
            expect(seen.page, "#answers-list").to_contain_text("semantic hits1")
            expect(seen.page, "#answers-list").to_contain_text("tokens saved")
            expect(seen.page, "#answers-list").to_contain_text("(95 %)")
            expect(seen.page, "#answers-table tbody tr:first-child").to_contain_text("shared")
            picture(seen.page, "answers.png")
            seen.page.get_by_role("button", name="this was wrong").first.click()

            def learnt() -> bool:
                return client.get("/twostroke/answers").json()["kinds"]["small words"]["wrong"] == 1

            wait_until(learnt, "the button taught nothing")
            assert ask(client, "what is capital of france")["answer_cache"]["hit"] is None
            assert seen.complaints == []
    finally:
        running.stop()
