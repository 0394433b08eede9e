"""What the runners make of a plan, for tests that have a request and no plan."""

from __future__ import annotations

from twostroke.types import Choice, RequestState


def next_choice(request: RequestState) -> Choice:
    """The token after all that are known."""
    return Choice(request, len(request.tokens), request.tokens)
