"""The system's own Chromium, driven by Playwright; the server is the one a user starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.serve.server import Server

PATIENT = 600_000  # ms: only to end a test that hangs, however slow and busy the machine


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """Closed before other modules run: until then its event loop is the thread's, and no other can be started."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install '.[test]'")
    path = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no chromium on this system: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's own rule for root
        running = playwright.chromium.launch(executable_path=path, args=arguments, timeout=PATIENT)
        yield running
        running.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_llama(tmp_path_factory.mktemp("dashboard"), max_position_embeddings=4096)


@pytest.fixture(scope="session")
def locked(folder: Path) -> Iterator[Server]:
    running = Server(folder, "-s", f"kv_offload={1 << 24}").wait()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The default model, without a key."""
    running = Server(Path("smollm2-135m"), keys=(), threads=2).wait(600)
    yield running
    running.stop()


class Watched:
    """A page of its own with everything that it complained about."""

    def __init__(self, browser, **context):
        self.context = browser.new_context(**context)
        self.context.set_default_timeout(PATIENT)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _note(self, said: Any) -> None:
        """Errors and warnings. On a busy machine the server rightly says by a 503 of /health that it is slow."""
        slow = "503" in said.text and said.location.get("url", "").endswith("/health")
        if said.type in ("error", "warning") and not slow:
            self.complaints.append(said.text)

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def watched(browser) -> Iterator[object]:
    pages: list[Watched] = []

    def make(**context) -> Watched:
        pages.append(Watched(browser, **context))
        return pages[-1]

    yield make
    for page in pages:
        page.close()
