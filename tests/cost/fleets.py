"""Small simulated fleets for the tests."""

from __future__ import annotations

import random

from twostroke.config import make_config, resolve
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.model.rates import Rates
from twostroke.cost.model.roofline import Roofline, model_cost
from twostroke.cost.simulation.fleet import Fleet, Pools
from twostroke.cost.simulation.trace import Arrival, Contents, PromptPart
from twostroke.hardware import Hardware

CPU = Rates(20e9, 200e9, 15e9, 80e9, 0.0015, 3e-5, source="made up")


def parts(arch=None, rates=CPU, memory=4 * 10**9, **settings):
    arch = arch or known_arch("smollm2-135m")
    model = model_cost(arch, "int8")
    settings = {"max_model_len": 4096, "seed": 0} | settings
    resolved = resolve(make_config(**settings), arch, Hardware("cpu", 2, memory), model.bytes)
    return Roofline(model, resolved.layout, rates), resolved


def fleet(pools=None, rates=CPU, arch=None, depth=1, jitter=None, fast=True, **settings):
    roofline, resolved = parts(arch, rates, **settings)
    return Fleet(roofline, resolved, pools or Pools(), depth, jitter, fast)


def poisson(rng, count, rate, prompt, output, shared=0, contents=None):
    contents = contents or Contents()
    at, rows = 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        own = contents.own(rng.randint(*prompt))
        head = (PromptPart(rng.randrange(3), shared),) if shared else ()
        rows.append(Arrival(at, (*head, own), rng.randint(*output)))
    return rows


def requests(seed=0, **kwargs):
    return poisson(random.Random(seed), **kwargs)
