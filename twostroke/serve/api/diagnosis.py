"""/twostroke/diagnosis: the last verdict on this server, made from its own record of requests and steps.

The route does not wait: it answers with the last verdict, and starts another one when there is something new.
"""

from __future__ import annotations

import asyncio
import json

from twostroke.cluster.group import workers_to_read
from twostroke.hardware import free_memory
from twostroke.serve.api import admin, workers
from twostroke.serve.service import Service
from twostroke.serve.transport.http import Exchange

STEPS = 1024  # steps and requests that a verdict is made from


async def handle(service: Service, exchange: Exchange) -> None:
    ended = service.ended_requests()
    answered = sum(one.output_tokens > 0 for one in ended)
    newest = ended[-1].request if ended else None
    basis = (newest, tuple(service.changed_settings.items()), service.restarts)
    if not service.draining:
        service.verdicts.refresh(answered, basis, lambda: documents(service))
    await exchange.respond(200, service.verdicts.document(answered, basis))


async def documents(service: Service) -> bytes:
    """What the verdict is made from."""
    settings = admin.settings_document(service)
    kv_bytes = settings["layout"]["block_bytes"] * settings["settings"]["kv_blocks"]["value"]
    on_cpu = settings["settings"]["device"]["value"] == "cpu"
    alone = on_cpu and not service.workers  # the memory of workers is on other machines, or shared
    memory = free_memory() + settings["weight_bytes"] + kv_bytes if alone else None
    deployed = workers.document(workers.pools_of(service), service.wall) if service.workers else None
    names = [None] if deployed is None else workers_to_read(deployed)
    steps = [await admin.steps_document(service, 0, STEPS, name) for name in names]
    arrivals = admin.arrivals_document(service, STEPS)
    facts = {"settings": settings, "memory": memory, "workers": deployed}

    def made() -> bytes:
        return json.dumps({**facts, "steps": [one() for one in steps], "arrivals": arrivals()}).encode()

    return await asyncio.to_thread(made)
