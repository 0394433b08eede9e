"""What a server tells of drafts: timings, metrics, steps and the counts from which lookup's gain is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.draft.paying import PAYING_SERVER
from tests.serve.server import Server
from twostroke.cost.simulation.recording import read_counts, read_recording

LETTER_E = "71"  # a token of the tiny models
EEE = {"prompt": "Once", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "logit_bias": {LETTER_E: 100}}
METRICS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
PER_PLACE = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
PAGES = ("settings", "arrivals", "steps")


@pytest.fixture(scope="module")
def drafting(long_folder: Path) -> Iterator[httpx.Client]:
    """A server that drafts wherever there is a match. It has answered one request: the first one is always replayed,
    others where replays take a small share of the time."""
    running = Server(long_folder, "-s", "max_model_len=2048", code=PAYING_SERVER).wait()
    with running.client() as client:
        ask(client)
        yield client
    assert running.stop() == 0


def ask(client: httpx.Client, **more: object) -> dict:
    return client.post("/v1/completions", json=EEE | more).raise_for_status().json()


def counted(client: httpx.Client) -> dict[str, float]:
    rows = [line.split() for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    values = {name.partition("{")[0]: float(value) for name, value in rows}
    return {short: values[name] for short, name in METRICS.items()}


def accepted_at(client: httpx.Client) -> list[float]:
    """By the place in the draft."""
    lines = client.get("/metrics").text.splitlines()
    rows = [line.split() for line in lines if line.startswith(f"{PER_PLACE}{{")]
    assert [f'position="{place}"' in name for place, (name, _) in enumerate(rows)] == [True] * len(rows)
    return [float(value) for _, value in rows]


def lanes_since(client: httpx.Client, last: int) -> list[dict]:
    steps = client.get("/twostroke/steps", params={"since": last}).json()["steps"]
    return [lane for step in steps for lane in step["lanes"] if lane["stage"] == "decode"]


def test_timings_metrics_and_lanes_agree_on_what_was_drafted(drafting: httpx.Client) -> None:
    before, last = counted(drafting), drafting.get("/twostroke/steps").json()["last"]
    timings = ask(drafting)["timings"]
    drafted, accepted = timings["drafted_tokens"], timings["accepted_tokens"]
    assert drafted >= accepted > 30
    assert timings["tokens_per_step"] == pytest.approx(59 / (59 - accepted))
    after = counted(drafting)
    lanes = lanes_since(drafting, last)
    verified = [lane for lane in lanes if lane["tokens"] > 1]  # the dashboard draws these as verified
    assert {name: after[name] - before[name] for name in METRICS} == {
        "drafts": len(verified), "drafted": drafted, "accepted": accepted,
    }  # fmt: skip
    assert sum(lane["tokens"] - 1 for lane in verified) == drafted
    places = accepted_at(drafting)
    assert sum(places) == after["accepted"] and places == sorted(places, reverse=True) and len(places) > 1
    assert len(lanes) == 59 - accepted
    starts = [lane["start"] for lane in lanes]
    assert starts == sorted(set(starts)) and starts[-1] - starts[0] <= 58


def test_a_request_that_wants_no_drafts_gets_none(drafting: httpx.Client) -> None:
    before, last = counted(drafting), drafting.get("/twostroke/steps").json()["last"]
    plain = ask(drafting, speculate=False)
    assert plain["timings"]["drafted_tokens"] == plain["timings"]["accepted_tokens"] == 0
    assert plain["timings"]["tokens_per_step"] == 1.0 and counted(drafting) == before
    assert [lane["tokens"] for lane in lanes_since(drafting, last)] == [1] * 59
    drafted = ask(drafting)
    assert drafted["timings"]["accepted_tokens"] > 30
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"] == "e" * 60


def test_what_lookup_would_have_guessed_reaches_the_diagnosis(drafting: httpx.Client) -> None:
    """All guesses were right in the answers that were replayed."""
    documents = {name: drafting.get(f"/twostroke/{name}").json() for name in PAGES}
    counts = read_counts(documents["arrivals"]["lookup"])
    assert counts.steps >= sum(counts.covered) > 0 and sum(counts.right) == sum(counts.tried) > 3 * counts.steps
    quality = read_recording(**documents).deployment.lookup
    assert quality is not None and quality.right > 0.9 and quality.covered > 0.5


def test_drafts_end_and_begin_while_the_server_runs(drafting: httpx.Client) -> None:
    """As a diagnosis pulls prompt lookup on a running server."""
    right = ask(drafting)
    for speculate, drafts in (("off", False), ("lookup", True), ("auto", True)):
        asked = drafting.post("/twostroke/settings", json={"speculate": speculate})
        setting = asked.raise_for_status().json()["settings"]["speculate"]
        assert setting == {"value": speculate, "reason": "changed while running", "live": True}
        found = ask(drafting)
        assert found["choices"] == right["choices"]
        assert (found["timings"]["accepted_tokens"] > 30) is drafts is (found["timings"]["drafted_tokens"] > 0)
