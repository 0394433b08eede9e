"""A server's own documents become a deployment, arrivals and what was served; a fault in them is named."""

from __future__ import annotations

import random

import pytest

from tests.cost.cases import static
from twostroke.cluster.group import workers_to_read
from twostroke.cost.answers import verdict as module
from twostroke.cost.answers.diagnose import diagnose
from twostroke.cost.answers.levers import LEVERS, Scenario
from twostroke.cost.answers.verdict import verdict
from twostroke.cost.model.fit import predicted
from twostroke.cost.model.roofline import Roofline
from twostroke.cost.simulation.clustered import joined_steps
from twostroke.cost.simulation.fleet import Pools
from twostroke.cost.simulation.recording import read_recording, read_step, token_times
from twostroke.errors import InputError
from twostroke.model.document import arch_document


def admin_documents(case):
    """The admin routes' documents of a server that is `case`, measured on its real machine."""
    deployment, outcome = case.deployment, case.measure()
    settings = deployment.settings
    names = ("device", "threads", "kv_dtype", "max_model_len", "max_batch_tokens", "max_requests", "kv_blocks",
             "prefix_cache", "chunked_prefill", "batching", "policy", "max_gap", "quantize")  # fmt: skip
    arrivals = [
        {"request": number, "time": 1e9 + one.arrival, "prompt_tokens": one.prompt, "cached_tokens": one.cached,
         "output_tokens": one.output, "queue_s": one.scheduled - one.arrival, "ttft_s": one.ttft, "tpot_s": one.tpot,
         "decode_s": one.end - one.first, "preemptions": 0, "priority": 0,
         "parts": [list(part) for part in arrival.parts]}
        for number, (arrival, one) in enumerate(zip(case.arrivals, outcome.served, strict=True))
    ]  # fmt: skip
    return {
        "settings": {
            "model": "m", "weight_bytes": deployment.model.bytes, "arch": arch_document(deployment.arch),
            "layout": {"block_bytes": settings.layout.block_bytes},
            "settings": {name: {"value": getattr(settings, name)} for name in names},
        },
        "arrivals": {"arrivals": arrivals},
        "steps": {"steps": steps_of(deployment.roofline(settings))},
    }  # fmt: skip


def steps_of(line: Roofline, count: int = 120):
    rng, steps = random.Random(0), []
    for number in range(count):
        streams = [(request, rng.randrange(20, 800)) for request in range(rng.randint(1, 12))]
        prompt = rng.randrange(30, 120) if number % 4 == 0 else 0
        lanes = [{"request": request, "stage": "decode", "start": at, "tokens": 1} for request, at in streams]
        lanes += [{"request": 99, "stage": "prefill", "start": 0, "tokens": prompt}] if prompt else []
        seconds = line.step([(0, prompt)] if prompt else [], [at + 1 for _, at in streams], len(lanes))
        steps.append(
            {"number": number, "time": float(number), "seconds": seconds, "sampled": len(lanes), "lanes": lanes}
        )
    return steps


@pytest.fixture(scope="module")
def documents():
    return admin_documents(static())


def test_rates_come_from_the_steps(documents):
    recording = read_recording(documents["settings"], documents["arrivals"], documents["steps"])
    line = recording.deployment.roofline()
    for document in documents["steps"]["steps"][::7]:
        assert predicted(read_step(document), line) == pytest.approx(document["seconds"], rel=0.1)
    assert recording.arrivals[0].at == 0.0 and len(recording.served) == len(recording.arrivals)
    assert recording.deployment.settings.batching == "static"


def test_the_fault_is_named(documents):
    found = verdict({**documents, "steps": [documents["steps"]], "workers": None})
    assert found["levers"][0]["name"] == "continuous-batching" and found["phase"] == "prefill"
    assert found["levers"][0]["settings"] == {"batching": "continuous"} and found["levers"][0]["live"]
    assert "because a batch admits no request" in found["sentence"] and len(found["evidence"]) == 6


def test_a_deployment_is_diagnosed_with_its_workers(documents, monkeypatch):
    """The steps of all workers are one log, and the room of all is divided among those that write."""
    steps = documents["steps"]["steps"]
    reads = [step for step in steps if any(lane["stage"] == "prefill" for lane in step["lanes"])]
    writes = [step for step in steps if step not in reads]
    rows = [{"name": name, "role": name[:-2], "healthy": True} for name in ("prefill-0", "decode-0", "decode-1")]
    rows.append({"name": "decode-2", "role": "decode", "healthy": False})
    transfers = {"done": 3, "bandwidth": 1e9, "latency": 0.1}
    workers = {"workers": rows, "transfers": transfers, "route": "cost", "ttft": 2.0}
    assert workers_to_read(workers) == ["prefill-0", "decode-0", "decode-1"]
    many = [{"name": f"{role}-{n}", "role": role, "healthy": True} for role in ("prefill", "decode") for n in range(9)]
    assert len(workers_to_read({"workers": many})) == 8
    assert joined_steps([{"steps": reads}, {"steps": writes}])["steps"] == steps
    seen = []

    def heard(deployment, *rest):
        seen.append(deployment)
        return diagnose(deployment, *rest)

    monkeypatch.setattr(module, "diagnose", heard)
    room = documents["settings"]["settings"]["max_requests"]["value"]
    verdict({**documents, "steps": [{"steps": reads}, {"steps": writes}], "workers": workers})
    assert seen[0].pools == Pools(2, 1, 1e9, 0.1, "cost", 2.0) and seen[0].config.max_requests == room // 2


@pytest.mark.parametrize(("machine", "said"), [
    ("NVIDIA H200", None), ("NVIDIA GeForce RTX 4090", None), ("NVIDIA A100-SXM4-80GB", "no products in fp8"),
    ("Quadro M4000", "not in the table"), (None, "this server (measured) is not in the table"),
])  # fmt: skip
def test_a_card_is_known_by_its_own_name(documents, machine, said):
    """Weights in 16 bits on a card: whether fp8 is a lever depends on which card it is."""
    settings = {**documents["settings"], "machine": machine}
    settings["settings"] = {**settings["settings"], "device": {"value": "cuda"}, "quantize": {"value": None}}
    recording = read_recording(settings, documents["arrivals"], documents["steps"])
    case = Scenario(recording.deployment, recording.arrivals)
    after = {one.name: one for one in LEVERS}["weights-fp8"].pull(case)
    if said is not None:
        assert isinstance(after, str) and said in after
    else:
        assert isinstance(after, Scenario) and after.deployment.config.quantize == "fp8"
        assert after.deployment.rates.compute == pytest.approx(case.deployment.rates.compute, rel=0.01)


def test_token_times_start_at_the_end_of_the_prompt():
    def step(time, stage, start, tokens):
        lane = {"request": 5, "stage": stage, "start": start, "tokens": tokens}
        return {"time": time, "seconds": 0.5, "lanes": [lane]}

    steps = [step(0, "prefill", 0, 16), step(1, "prefill", 16, 1), step(2, "decode", 17, 1), step(3, "decode", 18, 1)]
    assert token_times(steps) == {5: [1.5, 2.5, 3.5]}


def test_another_shape_is_an_error(documents):
    with pytest.raises(InputError, match="known form"):
        read_recording({"settings": {}}, documents["arrivals"], documents["steps"])
