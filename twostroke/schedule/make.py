"""The production scheduler for given settings. Torch-free: the engine and the simulator build the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.kv.addresses import BlockHasher
from twostroke.kv.blocks import BlockPool
from twostroke.kv.offload import HostPool
from twostroke.kv.tables import KVTables
from twostroke.model.arch import Arch
from twostroke.schedule.pace import MIN_CHUNK, Pace
from twostroke.schedule.policy import POLICIES
from twostroke.schedule.scheduler import Limits, Scheduler
from twostroke.schedule.together import LONGEST, Together

if TYPE_CHECKING:  # settings stand above scheduling
    from twostroke.config import Resolved


def make_scheduler(arch: Arch, settings: Resolved, identity: str, key: bytes | None = None) -> Scheduler:
    """identity and key: of the names of KV blocks (kv/addresses.py)."""
    host = HostPool(settings.host_slots) if settings.host_slots else None
    pool = BlockPool(settings.kv_blocks, keep_cached=settings.prefix_cache, host=host)
    tables = KVTables(settings.layout, pool, BlockHasher(identity, key), settings.max_requests, settings.max_model_len)
    limits = Limits(
        settings.max_batch_tokens,
        settings.max_requests,
        settings.chunked_prefill,
        settings.batching == "static",
        settings.key_share,
    )

    def flops(start: int, count: int) -> float:
        return float(arch.linear_flops(count, 1) + arch.attention_flops(start, count))

    pace = Pace(flops, settings.max_gap, MIN_CHUNK[settings.device])
    return Scheduler(tables, limits, POLICIES[settings.policy], pace, Together(LONGEST[settings.device]))
