"""The statistics behind the server's overhead, and that the engine which takes turns tells the truth."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import bare_steps, server_overhead
from benchmarks.server_overhead import Round, fold, interval, judged
from tests.serve.server import Server


def test_the_interval_is_wilcoxons() -> None:
    low, middle, high = interval([3.0, 1.0, 2.0, 5.0, 4.0, 6.0])
    assert (low, middle, high) == (1.0, 3.5, 6.0)  # six signs: all alike in one of 32 cases, nothing can be left out
    low, middle, high = interval([float(n) for n in range(1, 11)])
    assert (low, middle, high) == (3.0, 5.5, 8.0)  # of ten ranks a sum of at most 8 has a chance of 2.4 %


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(400):
        low, middle, high = interval([rng.gauss(0.03, 0.02) for _ in range(15)])
        assert low <= middle <= high
        held += low <= 0.03 <= high
    assert 0.92 <= held / 400 <= 0.99


def test_a_drift_that_both_kinds_share_is_no_overhead() -> None:
    turns = [{"served": [1.03 * (1 + 0.1 * n)] * 2, "bare": [1 + 0.1 * n] * 2} for n in range(10)]
    assert fold(turns, 0.0).share == pytest.approx(1 - 1 / 1.03)


@pytest.mark.parametrize(
    ("share", "seen", "within"), [(0.03, 1.0, True), (0.08, 1.0, False), (0.05, 1.0, None), (0.03, 0.01, None)]
)
def test_verdicts(share: float, seen: float, within: bool | None) -> None:
    """Also of a measurement that does not see what a server wastes: it must not pass."""
    rng = random.Random(2)
    rounds = [Round(0.02, 0.02 * (1 - share - rng.uniform(-0.01, 0.01)), 0.001) for _ in range(15)]
    found = judged(rounds, [Round(0.02 + seen / 1000, one.bare, 0.001) for one in rounds])
    assert found["within"] is within
    assert found["control_seen_ms"] == pytest.approx(seen)
    low, high = found["overhead_interval"]
    assert low <= found["overhead_share"] <= high


def ask(server: Server) -> list[str]:
    body: dict[str, object] = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    body |= {"n": 2, "speculate": False}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
    return [choice["text"] for choice in answer["choices"]]


def test_turns_do_not_change_the_answers(
    server: Server, long_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = tmp_path / "turns"
    turns.write_text("")
    monkeypatch.setenv(bare_steps.TURNS, f"{turns}:2")
    measured = Server(long_folder, code=server_overhead.ENGINE).wait()
    assert ask(measured) == ask(server)
    assert measured.stop() == 0
    found = [json.loads(line) for line in turns.read_text().splitlines()]
    assert len(found) >= 10
    assert all(len(turn[kind]) == 2 and min(turn[kind]) > 0 for turn in found for kind in ("served", "bare"))
