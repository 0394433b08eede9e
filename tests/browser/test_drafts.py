"""Verified drafts on the dashboard: in the lanes, and under the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.test_dashboard import TIPS, WIDE, expect, wait_for_answer
from tests.draft.paying import PAYING_SERVER
from tests.serve.server import Server

pytestmark = pytest.mark.system
ALWAYS_E = {"logit_bias": {"71": 100}, "temperature": 0, "ignore_eos": True}  # an answer that repeats itself


@pytest.fixture(scope="module")
def drafting(folder: Path) -> Iterator[Server]:
    running = Server(folder, keys=(), code=PAYING_SERVER).wait()
    yield running
    running.stop()


def repeat_one_letter(route) -> None:
    route.continue_(post_data=json.dumps({**json.loads(route.request.post_data), **ALWAYS_E}))


def test_verified_drafts_can_be_seen(drafting: Server, watched) -> None:
    seen = watched(viewport=WIDE)
    page = seen.page
    page.goto(drafting.url + "/")
    expect(page, "#status").to_contain_text("running")
    page.route("**/v1/chat/completions", repeat_one_letter)
    page.fill("#max-tokens", "120")
    page.fill("#question", "e")
    page.press("#question", "Enter")
    wait_for_answer(page)
    expect(page, ".answer .caption").to_contain_text("drafted ones right, ")
    page.wait_for_timeout(1500)  # the lanes are drawn again
    tips = page.evaluate(TIPS)
    assert any(" steps that verified " in tip and " drafted tokens in " in tip for tip in tips), tips
    assert seen.complaints == []
