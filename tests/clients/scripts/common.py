"""What every client script needs: where the server is, and a report of what was run. Standard library only."""

from __future__ import annotations

import importlib.metadata
import json
import os

URL = os.environ["TWOSTROKE_URL"]
V1 = URL + "/v1"
KEY = os.environ["TWOSTROKE_KEY"]
MODEL = os.environ["TWOSTROKE_MODEL"]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city now.", "parameters": CITY},
}
QUESTION = "What is the weather in Paris? Use the tool."
_ran: list[str] = []


def ran(what: str, good: object) -> None:
    """One thing was tried. It ends the script if it is not good."""
    assert good, f"{what}: {good!r}"
    _ran.append(what)


def report(package: str) -> None:
    """The last line of a script: the client's version and what was run."""
    print(json.dumps({"version": importlib.metadata.version(package), "ran": _ran}))
