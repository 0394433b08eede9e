"""What the server does not allow by its description: in a file of its own, so that it runs beside test_fuzz.py."""

from __future__ import annotations

import pytest

from tests.serve.server import Server
from tests.serve.test_fuzz import MANY, fuzzed, send_what_is_described  # noqa: F401

pytestmark = pytest.mark.slow


def test_much_of_what_is_not_allowed(fuzzed: Server) -> None:  # noqa: F811
    send_what_is_described(fuzzed, "not allowed", MANY)
