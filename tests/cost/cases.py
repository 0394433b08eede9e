"""Ten deployments with one thing wrong each, or a workload that asks for one lever. The label is in the construction.

What is measured comes from a machine that is not the one the diagnosis believes in: every rate is off by up to a fifth,
and every step is noisy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.cost.fleets import CPU, poisson
from twostroke.config import make_config
from twostroke.cost.model.devices import Device, find_device
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.simulation.deployment import Deployment
from twostroke.cost.simulation.fleet import Pools
from twostroke.cost.simulation.trace import Arrival, Contents, PromptPart
from twostroke.record import replace

BOX = Device("this", "a small machine", "cpu", 4 * 10**9, 20e9, {"float32": 200e9, "bfloat16": 200e9})


@dataclass(frozen=True)
class Labelled:
    deployment: Deployment
    arrivals: list[Arrival]
    phase: str
    levers: tuple[str, ...]  # any of these is the right answer
    metric: str

    def measure(self, deployment=None, arrivals=None, seed=0):
        """What really happens, on the machine as it really is."""
        rng = random.Random(seed)
        deployment = deployment or self.deployment
        rates = deployment.roofline().rates
        real = replace(
            rates,
            bandwidth=1.15 * rates.bandwidth,
            compute=0.85 * rates.compute,
            kv_bandwidth=0.9 * rates.kv_bandwidth,
            attention_compute=1.2 * rates.attention_compute,
            step_seconds=1.2 * rates.step_seconds,
        )
        noisy = replace(deployment, rates=real)
        return noisy.run(arrivals or self.arrivals, jitter=lambda seconds, _: seconds * rng.uniform(0.9, 1.15))


def on_box(precision="int8", **settings):
    settings = {"max_model_len": 4096, "seed": 0} | settings
    return Deployment(known_arch("smollm2-135m"), BOX, make_config(**settings), precision, rates=CPU)


def on_gpu(workers=1, **settings):
    settings = {"max_model_len": 16384, "seed": 0} | settings
    return Deployment(known_arch("llama-3.1-8b"), find_device("h200"), make_config(**settings), pools=Pools(workers))


def rag():
    rows = poisson(random.Random(1), 40, 0.25, (60, 120), (10, 30), shared=1600)
    return Labelled(on_box(prefix_cache=False), rows, "prefill", ("prefix-cache",), "ttft")


def code():
    rows = poisson(random.Random(2), 40, 1.0, (1200, 1400), (8, 20))
    return Labelled(on_box(), rows, "prefill", ("replica",), "ttft")


def chat():
    rows = poisson(random.Random(3), 40, 0.25, (30, 90), (150, 300))
    return Labelled(on_box("bfloat16"), rows, "decode", ("weights-int4",), "tpot")


def batch():
    """Long answers, all asked for at once; the weights are small already, so what is left is K and V."""
    contents, rng = Contents(), random.Random(4)
    rows = [Arrival(0.0, (contents.own(rng.randint(100, 300)),), rng.randint(1000, 2000)) for _ in range(20)]
    config = make_config(max_model_len=4096, seed=0)
    small = replace(find_device("l4"), memory=73 * 10**8)
    deployment = Deployment(known_arch("llama-3.1-8b"), small, config, "int4")
    return Labelled(deployment, rows, "decode", ("kv-int4", "kv-int8"), "throughput")


def tiny_budget():
    rows = poisson(random.Random(5), 25, 1.0, (1500, 4000), (10, 20))
    return Labelled(on_gpu(max_batch_tokens=32), rows, "prefill", ("token-budget",), "ttft")


def timestamp():
    rng, contents, at, rows = random.Random(6), Contents(), 0.0, []
    for _ in range(40):
        at += rng.expovariate(0.25)
        rows.append(Arrival(at, (contents.own(16), PromptPart(1, 1600), contents.own(rng.randint(60, 120))), 20))
    return Labelled(on_box(), rows, "prefill", ("stable-prefix",), "ttft")


def small_kv():
    rows = poisson(random.Random(7), 30, 1.2, (40, 80), (200, 400))
    return Labelled(on_box("int4", kv_blocks=70, max_model_len=1024), rows, "decode", ("kv-memory",), "tpot")


def huge_prompt():
    contents = Contents()
    rows = [Arrival(0.1 * i, (contents.own(40),), 300) for i in range(8)]
    rows.append(Arrival(1.5, (contents.own(3500),), 5))
    return Labelled(on_box(chunked_prefill=False), rows, "decode", ("chunked-prefill",), "stall")


def static():
    rows = poisson(random.Random(9), 60, 1.0, (30, 80), (10, 250))
    return Labelled(on_box(batching="static", max_requests=16), rows, "prefill", ("continuous-batching",), "ttft")


def cap_of_one():
    rows = poisson(random.Random(10), 40, 1.0, (30, 80), (50, 150))
    return Labelled(on_box(max_requests=1), rows, "prefill", ("batch-cap",), "ttft")


CASES = (rag, code, chat, batch, tiny_budget, timestamp, small_kv, huge_prompt, static, cap_of_one)
