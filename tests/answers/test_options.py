"""Options that do not go together are refused before anything is fetched."""

from __future__ import annotations

import pytest

from twostroke.errors import ConfigError
from twostroke.serve.answer_setup import AnswerOptions


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (AnswerOptions("off", url="redis://x"), "needs --answer-cache"),
        (AnswerOptions("exact", error=1.5), "is no share"),
        (AnswerOptions("exact", allow=("tools",)), "needs --answer-cache semantic"),
        (AnswerOptions("semantic", allow=("tools", "images")), "'images' is not known; use tools"),
        (AnswerOptions("semantic", allow=("n",)), "one answer is stored"),
    ],
)
def test_refused(options: AnswerOptions, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        options.check()


def test_what_is_allowed() -> None:
    AnswerOptions("semantic", allow=("tools", "temperature", "personal", "referring", "changing")).check()
