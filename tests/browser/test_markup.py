"""Markup in what a model writes, in its name and in errors is text on the dashboard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.test_dashboard import WIDE, expect, wait_for_answer
from tests.serve.server import Server

pytestmark = pytest.mark.system
IMAGE = "<img src=x onerror=alert(1)>"
SCRIPT = "<script>alert(1)<.script>"  # a file name has no slash


@pytest.fixture(scope="module")
def strange(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model whose name is markup."""
    place = tmp_path_factory.mktemp("names") / f"{IMAGE}{SCRIPT}"
    shutil.copytree(folder, place)
    running = Server(place, keys=()).wait()
    yield running
    running.stop()


@pytest.fixture
def alerts(watched) -> Iterator[tuple]:
    seen = watched(viewport=WIDE)
    found: list[str] = []
    seen.page.on("dialog", lambda dialog: (found.append(dialog.message), dialog.dismiss()))
    yield seen, found
    assert found == [], "a script of another's ran"
    assert seen.page.locator("img[src=x]").count() == 0 and seen.page.locator("body script[src='']").count() == 0
    assert [line for line in seen.complaints if "Content Security Policy" in line] == []


def answered_with(page, **fields: object) -> None:
    """The page's own requests, with these fields more."""

    def change(route) -> None:
        route.continue_(post_data=json.dumps({**json.loads(route.request.post_data), **fields}))

    page.route("**/v1/chat/completions", change)


def test_what_a_model_writes_and_its_name(strange: Server, alerts: tuple) -> None:
    page = alerts[0].page
    page.goto(strange.url + "/")
    expect(page, "#status").to_contain_text("running")
    expect(page, "body").to_contain_text(IMAGE)
    answered_with(
        page, regex=r"<img src=x onerror=alert\(1\)><script>alert\(2\)</script><a href=javascript:alert\(3\)>"
    )
    page.fill("#max-tokens", "200")
    page.fill("#question", f"{IMAGE}<script>alert(4)</script>")
    page.click("#send")
    wait_for_answer(page)
    expect(page, ".answer .message").to_contain_text("<script>alert(2)</script><a href=javascript:alert(3)>")
    assert page.locator("#talk img, #talk script, #talk a").count() == 0


def test_errors_that_repeat_what_was_sent(strange: Server, alerts: tuple) -> None:
    page = alerts[0].page
    page.goto(strange.url + "/")
    expect(page, "#status").to_contain_text("running")
    answered_with(page, **{IMAGE: 1})
    page.fill("#question", "Hello")
    page.click("#send")
    expect(page, ".answer.failed .message").to_contain_text(IMAGE)
