"""A model behind the ASGI application, without a socket: its engine, its service, and what belongs to them."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from twostroke.cluster.pools import Pools
from twostroke.config import Resolved
from twostroke.kv.layout import BLOCK
from twostroke.metrics.registry import Metrics
from twostroke.remote.async_engine import AsyncEngine
from twostroke.remote.client import EngineClient
from twostroke.remote.messages import Ready
from twostroke.serve.answer_setup import AnswerMetrics, open_cache, open_recorder
from twostroke.serve.answering import Answering
from twostroke.serve.app import App
from twostroke.serve.main_base import Options, Say
from twostroke.serve.pool_metrics import PoolMetrics
from twostroke.serve.service import Service
from twostroke.serve.transport.auth import Keys
from twostroke.serve.transport.browsers import Browsers


class Serving:
    """Made by `open_serving`. The application answers from then on; requests are refused until `load` has returned."""

    def __init__(self, options: Options, say: Say, engine: AsyncEngine, metrics: Metrics, client: EngineClient | None):
        self.options = options
        self.say = say
        self.engine = engine
        self.metrics = metrics
        self.client = client
        keys = Keys(options.keys, options.admin_keys)
        self.service = Service(engine, options.name, keys, metrics, options.closed_objects)
        self.service.opening = options.answers.tier != "off" or options.answers.record
        browsers = Browsers(options.host, options.allowed_hosts, options.allowed_origins)
        self.app = App(self.service, browsers=browsers)

    async def load(self) -> Ready:
        ready = await self.engine.start(grammars=True)
        await self._open_answers()
        self.metrics.configured(cache_labels(ready.settings))
        if isinstance(self.client, Pools):
            PoolMetrics(self.client, self.options.name, self.metrics.registry)
        gc.collect()
        gc.freeze()  # these objects stay: later collections need not visit them
        return ready

    async def _open_answers(self) -> None:
        options, service = self.options.answers, self.service
        if options.tier != "off":
            cache = await asyncio.to_thread(open_cache, options)
            service.answers = Answering(cache, service)
            AnswerMetrics(cache, service.name, service.metrics.registry)
            where = "redis" if options.url else options.file
            self.say(f"  answer cache: {options.tier}, {where}, at most {options.error:.2%} wrong")
        if options.record:
            service.topics = await asyncio.to_thread(open_recorder, options)
            self.say("  questions are recorded in memory for diagnose")
        service.opening = False

    async def close(self, seconds: float) -> None:
        """Open streams end with an error event; the engine may take so many seconds."""
        if self.service.answers is not None:
            await asyncio.to_thread(self.service.answers.cache.close)
        if self.service.topics is not None:
            await asyncio.to_thread(self.service.topics.topics.close)
        await self.engine.stop(seconds)


async def open_serving(options: Options, say: Say) -> Serving:
    metrics = Metrics(options.name)
    client = options.client() if options.client is not None else None
    engine = await asyncio.to_thread(
        AsyncEngine, options.path, options.settings, max_queue=options.max_queue, observer=metrics,
        patience=options.patience, client=client,
    )  # fmt: skip
    return Serving(options, say, engine, metrics, client)


def cache_labels(settings: Resolved) -> dict[str, Any]:
    """The labels of the cache's metric, under vLLM's names."""
    return {
        "block_size": BLOCK, "num_gpu_blocks": settings.kv_blocks, "cache_dtype": settings.kv_dtype,
        "enable_prefix_caching": settings.prefix_cache,
    }  # fmt: skip
