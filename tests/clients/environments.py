"""The clients that have a virtual environment of their own, and how to make it.

python -m tests.clients.environments FOLDER             makes all of them, one after the other
TWOSTROKE_CLIENTS=FOLDER python -m pytest -m clients     runs the clients against a real server
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

PYTHON = {  # folder: packages of one environment
    "agents": ("openai-agents", "instructor", "anthropic"),
    "aiperf": ("aiperf",),
    "dspy": ("dspy", "litellm", "mcp"),
    "guidellm": ("guidellm",),
    "langchain": ("langchain-openai", "langchain-anthropic"),
    "llamaindex": ("llama-index-llms-openai-like", "llama-index-core"),
    "lmeval": ("lm-eval[api]", "transformers"),
    "pydantic-ai": ("pydantic-ai-slim[openai,anthropic]", "anthropic<2"),  # newer ones break this client
    "smolagents": ("smolagents[openai]",),
}
NODE = ("openai", "ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod")


def folder() -> Path | None:
    """Where the environments are; None: they were not made."""
    given = os.environ.get("TWOSTROKE_CLIENTS")
    return Path(given) if given else None


def program(environment: str, name: str = "python") -> Path | None:
    """A program of an environment; None if it is not there."""
    found = folder()
    path = None if found is None else found / environment / "bin" / name
    return path if path is not None and path.exists() else None


def make(where: Path) -> None:
    for name, packages in PYTHON.items():
        venv.create(where / name, with_pip=True)
        subprocess.run([where / name / "bin" / "pip", "install", "--quiet", *packages], check=True)
    (where / "js").mkdir(exist_ok=True)
    (where / "js" / "package.json").write_text('{"private": true}\n')
    subprocess.run(["npm", "install", *NODE], cwd=where / "js", check=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
