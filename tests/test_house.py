"""The house keeps its shape: style, types, imports that only point down, rooms that a reader can hold."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    "mypy": ["mypy"],
    "import-linter": ["lint-imports"],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "mypy" else name for name in COMMANDS]
)
def test_tool(name):
    tool, *arguments = COMMANDS[name]
    done = subprocess.run(
        [Path(sys.executable).parent / tool, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


VAGUE = re.compile(r"\b(nobody|somebody|whoever|anybody|no one)\b", re.IGNORECASE)
TEXT = {".py", ".md", ".h", ".cpp", ".js", ".css", ".html"}


def test_words_name_what_acts():
    """Comments, docs and messages say which thing or person acts: a request, a caller, another kernel."""
    inside = [path for folder in ("twostroke", "tests", "docs", "benchmarks") for path in (ROOT / folder).rglob("*")]
    read = [path for path in (ROOT / "README.md", *inside) if path.suffix in TEXT and path.parent.name != "vendor"]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in read
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if VAGUE.search(line)
    ]
    assert len(read) > 300 and not found, "\n".join(found)


def test_files_that_are_named_exist():
    """Docs, docstrings and comments name files by their path or its end."""
    files = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "twostroke").rglob("*.py")]
    known = {str(path.relative_to(ROOT)) for top in ("twostroke", "tests", "docs", "benchmarks")
             for path in (ROOT / top).rglob("*.*")} | {"README.md", "setup.py"}  # fmt: skip
    ends = {"/".join(name.split("/")[first:]) for name in known for first in range(name.count("/") + 1)}
    path_of = re.compile(r"(?<![\w./-])(?:\w+/)*\w+\.(?:py|md)\b")
    named = [(path, name) for path in files for name in path_of.findall(path.read_text())]
    assert len(named) > 200
    assert not [f"{path.relative_to(ROOT)}: {name}" for path, name in named if name not in ends]


def test_every_file_is_on_a_map():
    """A folder's docstring names its files, the one above it those of a folder that has no map of its own."""
    package = ROOT / "twostroke"
    missing = []
    for folder in sorted({path.parent for path in package.rglob("*.py")} - {package}):
        page = "".join((place / "__init__.py").read_text() for place in (folder, folder.parent))
        missing += [str(path.relative_to(ROOT)) for path in folder.glob("*.py")
                    if path.stem != "__init__" and not re.search(rf"\b{path.stem}\b", page)]  # fmt: skip
    house = (ROOT / "docs/life-of-a-request.md").read_text().split("## Where things are")[1]
    tops = [path.name for path in package.iterdir() if not path.name.startswith("_")]
    missing += [name for name in tops if f"`{name}" not in house]
    assert len(tops) > 20 and not missing


# Names that two classes have: a thing and its simulation, an API's own noun, messages between other processes, kernels.
NAMED_TWICE = {
    "Connection", "Deployment", "Found", "LookUp", "Message", "Pools", "Route", "Tool",
}  # fmt: skip


def test_a_class_name_stands_for_one_thing():
    names = Counter(
        name
        for path in (ROOT / "twostroke").rglob("*.py")
        for name in re.findall(r"^(?:class )?([A-Z][a-z]\w*)(?:[(:]| = )", path.read_text(), re.MULTILINE)
    )
    assert {name for name, count in names.items() if count > 1} <= NAMED_TWICE


def test_the_reading_path_is_an_afternoon():
    """The README names files from `LLM.generate` to a token: they exist, and have about 4,000 lines together."""
    section = (ROOT / "README.md").read_text().split("## Read it in an afternoon")[1].split("Then by interest")[0]
    names = [name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall("`(.+?)`", row)]
    lines = [(ROOT / "twostroke" / name).read_text().count("\n") for name in names]
    assert len(names) > 20 and 3_500 < sum(lines) < 4_300, sum(lines)


def test_files_stay_readable():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / "twostroke").rglob("*.py")
        if (lines := path.read_text().count("\n")) > 450
    }
    assert not long, "files that no longer hold one idea"
