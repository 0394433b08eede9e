"""The engine's few settings, and `resolve`, which turns what was left open into values with reasons. Torch-free.

If the engine can compute a value, nobody has to set it. Every resolved value carries the sentence that explains it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, cast

from twostroke.errors import ConfigError
from twostroke.hardware import Hardware
from twostroke.kv.layout import KVLayout, make_layout
from twostroke.model.arch import Arch
from twostroke.ops.interface import BLOCK, KV_BITS, KVFormat
from twostroke.sampling import is_number, is_whole
from twostroke.schedule.policy import POLICIES

DTYPES = ("float32", "float16", "bfloat16")
QUANTIZATIONS = ("int8", "int4", "fp8")
DEFAULT_GAP = {"cpu": 0.25, "cuda": 0.05}  # seconds
DEFAULT_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
DEFAULT_REQUESTS = {"cpu": 32, "cuda": 256}
EXACT_COST = "exact=True would cost 5 % of a stream's speed, and of a prompt's time 7 % (2,048 tokens) to 46 % (32,768)"
KV_SHARE = {"cpu": 0.25, "cuda": 0.9}  # of the memory that is free once the weights are loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What a user may set. None means: derived."""

    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    quantize: str | None = None
    kv_dtype: str | None = None
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    max_requests: int | None = None
    kv_memory: int | None = None  # bytes
    kv_blocks: int | None = None  # of the whole pool
    kv_offload: int = 0  # bytes of the host's memory for evicted blocks
    prefix_cache: bool = True
    chunked_prefill: bool = True
    batching: str = "continuous"
    policy: str = "fcfs"
    max_gap: float | None = None  # seconds a running stream may wait for its next token
    exact: bool | None = None  # the same output whatever else is served; a CPU always gives it
    seed: int | None = None

    def __post_init__(self) -> None:
        one_of(self, "device", ("cpu", "cuda"), optional=True)
        one_of(self, "dtype", DTYPES, optional=True)
        one_of(self, "quantize", QUANTIZATIONS, optional=True)
        one_of(self, "kv_dtype", tuple(KV_BITS), optional=True)
        one_of(self, "batching", ("continuous", "static"))
        one_of(self, "policy", tuple(POLICIES))
        for name in ("threads", "max_model_len", "max_batch_tokens", "max_requests", "kv_memory", "kv_blocks"):
            value = getattr(self, name)
            if value is not None and (not is_whole(value) or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}.")
        if not is_whole(self.kv_offload) or self.kv_offload < 0:
            raise ConfigError(f"kv_offload must be a number of bytes, 0 or more, got {self.kv_offload!r}.")
        for name in ("prefix_cache", "chunked_prefill"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.exact is not None and not isinstance(self.exact, bool):
            raise ConfigError(f"exact must be True or False, got {self.exact!r}.")
        if self.seed is not None and (not is_whole(self.seed) or not 0 <= self.seed < 2**64):
            raise ConfigError(f"seed must be a whole number from 0 to 2**64 - 1, got {self.seed!r}.")
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.kv_memory is not None and self.kv_blocks is not None:
            raise ConfigError("kv_memory and kv_blocks both size the KV cache: give one of them.")
        if self.dtype is not None and self.quantize is not None:
            raise ConfigError("dtype and quantize both choose the precision of the weights: give one of them.")
        if self.kv_offload and not self.prefix_cache:
            raise ConfigError("kv_offload keeps what the prefix cache evicts: it needs prefix_cache. Drop one of them.")
        if self.max_gap is None:
            return
        if not is_number(self.max_gap) or self.max_gap <= 0:
            raise ConfigError(f"max_gap must be a number of seconds above 0, got {self.max_gap!r}.")
        if not self.chunked_prefill:
            raise ConfigError(
                "max_gap needs chunked_prefill: a prompt in one step cannot be kept short. Drop one of them."
            )
        if POLICIES[self.policy].prompts_first:
            raise ConfigError(
                f"max_gap cannot hold under policy {self.policy!r}, which lets streams wait. Drop one of them."
            )


def make_config(**settings: Any) -> Config:
    """A Config from keywords; an unknown one is an error that names the nearest known one."""
    known = [item.name for item in fields(Config)]
    for name in settings:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known settings: {', '.join(known)}."
            raise ConfigError(f"unknown setting {name!r}. {hint}")
    return Config(**settings)


def one_of(config: Config, name: str, choices: tuple[str, ...], optional: bool = False) -> None:
    value = getattr(config, name)
    if (value is None and optional) or value in choices:
        return
    raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Every setting with its value, and for those that were derived the reason."""

    device: str
    dtype: str | None  # None: each tensor as the file holds it, as far as the backend can
    threads: int
    quantize: str | None
    kv_dtype: KVFormat
    max_model_len: int
    max_batch_tokens: int
    max_requests: int
    kv_blocks: int
    kv_offload: int
    prefix_cache: bool
    chunked_prefill: bool
    batching: str
    policy: str
    max_gap: float
    exact: bool
    seed: int
    layout: KVLayout
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def host_slots(self) -> int:
        """Evicted blocks that the host keeps."""
        return self.kv_offload // self.layout.block_bytes


def resolve(config: Config, arch: Arch, hardware: Hardware, weight_bytes: int) -> Resolved:
    """Pure: the same inputs give the same values, but for a seed that nobody gave."""
    reasons: dict[str, str] = {}

    def derive(name: str, value: Any, reason: str) -> Any:
        given = getattr(config, name)
        if given is not None:
            return given
        reasons[name] = reason
        return value

    device = hardware.device
    check_quantize(config.quantize, device)
    threads = derive("threads", hardware.cores, f"{hardware.cores} cores may be used by this process")
    kv_dtype = _kv_dtype(config, device, reasons)
    if kv_dtype == "int4":
        _check_four_bits(arch, device)
    layout = make_layout(arch, kv_dtype)
    batch = derive("max_batch_tokens", DEFAULT_BATCH_TOKENS[device], f"enough rows to keep a {device} busy in one step")
    requests = derive("max_requests", DEFAULT_REQUESTS[device], f"streams that a {device} serves well at once")
    if requests > batch:
        requests = batch
        reasons["max_requests"] = f"every stream needs a token of the step's {batch} (max_batch_tokens)"
    length, blocks = _size_cache(config, arch, hardware, layout, batch, requests, weight_bytes, reasons)
    gap = derive("max_gap", DEFAULT_GAP[device], f"a pause a reader hardly notices on a {device}")
    return Resolved(
        device=device,
        dtype=config.dtype,
        threads=threads,
        quantize=config.quantize,
        kv_dtype=kv_dtype,
        max_model_len=length,
        max_batch_tokens=batch,
        max_requests=requests,
        kv_blocks=blocks,
        kv_offload=_offload(config, device, layout, reasons),
        prefix_cache=config.prefix_cache,
        chunked_prefill=config.chunked_prefill,
        batching=config.batching,
        policy=config.policy,
        max_gap=gap,
        exact=_exact(config, device, reasons),
        layout=layout,
        reasons=reasons,
        seed=derive("seed", secrets.randbits(63), "drawn at start; pass it to repeat a run"),
    )


def check_quantize(quantize: str | None, device: str) -> None:
    known = {"cpu": ("int8", "int4"), "cuda": ("fp8", "int8", "int4")}[device]
    if quantize is not None and quantize not in known:
        raise ConfigError(f"quantize={quantize!r} is not served on a {device}: use {' or '.join(known)} there.")


def _exact(config: Config, device: str, reasons: dict[str, str]) -> bool:
    if device == "cpu":
        reasons["exact"] = "a CPU's kernels add in one order for any batch, chunk and cache: it costs nothing"
        return True
    if config.exact and config.quantize is not None:
        raise ConfigError(
            f"exact=True serves float weights on a {device}: a product with {config.quantize} weights depends on how "
            "many rows are computed at once. Drop quantize or exact."
        )
    if config.exact is None:
        reasons["exact"] = EXACT_COST
    return bool(config.exact)


def _check_four_bits(arch: Arch, device: str) -> None:
    least = min(part.width for mixer, _ in arch.mixers for part in mixer.entry("int8").parts if part.format == "int8")
    if device == "cuda" and least < 32:  # 8 bytes of a head: exact attention over them goes wrong
        raise ConfigError(f"kv_dtype='int4' on a GPU needs heads of at least 32, not {least}: use int8.")


def _kv_dtype(config: Config, device: str, reasons: dict[str, str]) -> KVFormat:
    if config.kv_dtype == "fp8" and device != "cuda":
        raise ConfigError(f"kv_dtype='fp8' needs a GPU; on a {device} int8 takes the same room and keeps more.")
    if config.kv_dtype in ("int8", "int4", "fp8") and device == "cuda" and config.dtype == "float32":
        raise ConfigError(
            f"kv_dtype={config.kv_dtype!r} on a GPU goes with dtype='bfloat16' only: its attention kernels are "
            "wrong in float32. Leave one of the two out."
        )
    if config.kv_dtype is not None:
        return cast(KVFormat, config.kv_dtype)  # Config has checked it
    if config.dtype is not None:
        reasons["kv_dtype"] = f"the same as dtype={config.dtype}"
        return cast(KVFormat, config.dtype)
    if device == "cuda":
        reasons["kv_dtype"] = "the type a GPU computes in"
        return "bfloat16"
    reasons["kv_dtype"] = "half the bytes of float32, without a visible change of the output"
    return "float16"


def _offload(config: Config, device: str, layout: KVLayout, reasons: dict[str, str]) -> int:
    """Whole blocks of what was given."""
    slots = config.kv_offload // layout.block_bytes
    if not config.kv_offload:
        reasons["kv_offload"] = "evicted blocks are forgotten unless the host's memory is given to them"
    elif not slots:
        raise ConfigError(
            f"kv_offload ({config.kv_offload:,}) holds no block of {layout.block_bytes:,} bytes: raise it."
        )
    else:
        same = ": the memory that kv_memory takes as well, which needs no copies" if device == "cpu" else ""
        reasons["kv_offload"] = f"{slots:,} evicted blocks of {layout.block_bytes:,} bytes{same}"
    return slots * layout.block_bytes


def _size_cache(
    config: Config,
    arch: Arch,
    hardware: Hardware,
    layout: KVLayout,
    batch: int,
    requests: int,
    weight_bytes: int,
    reasons: dict[str, str],
) -> tuple[int, int]:
    """Length a request may reach, and blocks of the pool: what memory gives, never more than can be used."""
    length = config.max_model_len or arch.max_positions
    if length > arch.max_positions:
        raise ConfigError(
            f"max_model_len ({length}) is above the {arch.max_positions} positions this model was made for: lower it."
        )
    step = batch if config.chunked_prefill else length
    usable = requests * layout.blocks_for(length, step)
    blocks = config.kv_blocks
    if blocks is None:
        memory = config.kv_memory
        if memory is None:
            taken = weight_bytes + (config.kv_offload if hardware.device == "cpu" else 0)  # a GPU has memory of its own
            memory = int(KV_SHARE[hardware.device] * max(0, hardware.free_memory - taken))
            memory = max(0, memory - requests * layout.state_bytes)
            share = f"{KV_SHARE[hardware.device]:.0%} of the memory left beside the weights"
        else:
            share = "kv_memory"
        blocks = min(memory // layout.block_bytes, usable)
        why = f"max_requests × max_model_len can use no more than {usable}" if blocks == usable else share
        reasons["kv_blocks"] = (
            f"{blocks * layout.block_bytes / 1e6:,.0f} MB in blocks of {layout.block_bytes:,} bytes: {why}"
        )
    fits = longest_that_fits(layout, blocks, length, batch, config.chunked_prefill)
    if fits < 2:
        less = ", or lower kv_offload" if config.kv_offload and hardware.device == "cpu" else ""
        raise ConfigError(
            f"the KV cache of {blocks} blocks holds no request at all: raise kv_blocks or kv_memory{less}."
        )
    if config.max_model_len is None:
        if fits < length:
            reasons["max_model_len"] = f"the longest request that {blocks} KV blocks of {BLOCK} tokens hold"
        else:
            reasons["max_model_len"] = "the positions this model was made for"
    return min(length, fits), blocks


def longest_that_fits(layout: KVLayout, blocks: int, length: int, batch: int, chunked: bool) -> int:
    """The longest request that can run alone in the pool."""
    low, high = 0, length + 1  # low fits, high does not (or is past what is wanted)
    while high - low > 1:
        middle = (low + high) // 2
        if layout.blocks_for(middle, min(batch, middle) if chunked else middle) <= blocks:
            low = middle
        else:
            high = middle
    return low
