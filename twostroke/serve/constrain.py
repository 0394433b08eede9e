"""From the fields that bind an answer's form to what the engine does about it."""

from __future__ import annotations

from twostroke.serve.errors import bad_request
from twostroke.serve.protocol.constraints import Constraints, PlainText


def refuse_unwired(request: Constraints) -> None:
    """Until an option works it is refused: it would be worse to ignore it."""
    asked = {
        "response_format": request.response_format is not None and not isinstance(request.response_format, PlainText),
        "tools": bool(request.tools),
        "tool_choice": request.tool_choice not in (None, "none", "auto"),
        "regex": request.regex is not None,
        "grammar": request.grammar is not None,
    }
    for name, wanted in asked.items():
        if wanted:
            raise bad_request(f"{name}: is not supported by this server.", name, "unsupported_field")
