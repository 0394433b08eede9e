"""The engine's settings in one table, and `resolve`, which derives those that were not given. Torch-free.

The fields of `Config` are the table: type, default, and the rest of a `Setting` in their metadata. Checks of values,
the command line's `-s`, the list of settings that change while the engine runs, the admin routes and docs/settings.md
are made from it. Every derived value comes with a sentence that explains it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

from twostroke.errors import ConfigError
from twostroke.hardware import Hardware
from twostroke.kv.layout import KVLayout, make_layout
from twostroke.model.arch import Arch
from twostroke.ops.interface import BLOCK, KV_BITS, KVFormat
from twostroke.sampling import is_number, is_whole
from twostroke.schedule.policy import POLICIES

DTYPES = ("float32", "float16", "bfloat16")
QUANTIZATIONS_OF = {"cpu": ("int8", "int4"), "cuda": ("fp8", "int8", "int4")}
QUANTIZATIONS = ("int8", "int4", "fp8")
DEFAULT_GAP = {"cpu": 0.25, "cuda": 0.05}  # seconds
DEFAULT_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
DEFAULT_REQUESTS = {"cpu": 32, "cuda": 256}
EXACT_COST = "exact=True would cost 5 % of a stream's speed, and of a prompt's time 7 % (2,048 tokens) to 46 % (32,768)"
EXACT_COST_NARROW = "what exact=True costs with weights of few bits was not measured"
KV_SHARE = {"cpu": 0.25, "cuda": 0.9}  # of the memory that is free once the weights are loaded
COPIES_SHARE = 0.15  # of a GPU's memory beside the weights: the most that copies in floats of narrow weights take


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the table."""

    name: str
    kind: type  # bool, int, float or str
    default: Any  # None: derived
    help: str
    derived: str = ""  # how, where the default is None
    choices: tuple[str, ...] = ()
    least: int = 1  # of a whole number
    most: int | None = None
    live: bool = False  # whether a running engine takes it
    stroke: str = ""  # that it is meant for: "prefill", "decode" or "both"; empty: none in particular
    unsimulated: str = ""  # why the cost model ignores it; empty: it does not

    @property
    def values(self) -> str:
        """The allowed values in words, as the end of "must be"."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.kind is bool:
            return "True or False"
        if self.kind is float:
            return "a number above 0" + ("" if self.most is None else f" and at most {self.most}")
        if self.kind is str:
            return "a name or a path"
        if self.most is None:
            return f"a whole number of at least {self.least}"
        return f"a whole number from {self.least} to {self.most}"

    def allows(self, value: Any) -> bool:
        if value is None:
            return self.default is None
        if self.choices:
            return value in self.choices
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind is float:
            return is_number(value) and value > 0 and (self.most is None or value <= self.most)
        if self.kind is str:
            return isinstance(value, str) and bool(value)
        return is_whole(value) and self.least <= value and (self.most is None or value <= self.most)

    def parse(self, text: str) -> Any:
        """A value as it is typed on a command line."""
        if self.kind is bool:
            if text.lower() not in ("true", "false"):
                raise ConfigError(f"{self.name} must be true or false, got {text!r}.")
            return text.lower() == "true"
        try:
            return self.kind(text)
        except ValueError:
            wanted = "a whole number, as digits" if self.kind is int else "a number"
            raise ConfigError(f"{self.name} must be {wanted}, got {text!r}.") from None


def setting(default: Any, help: str, **more: Any) -> Any:  # noqa: A002  the word for it
    return field(default=default, metadata={"help": help, **more})


def by_device(values: dict[str, Any]) -> str:
    return f"{values['cpu']} on a CPU, {values['cuda']} on a GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What a user may set. None: derived."""

    device: str | None = setting(
        None, "where the model runs", choices=("cpu", "cuda"), derived="a GPU if there is one",
        unsimulated="--hardware chooses the simulated machine",
    )  # fmt: skip
    dtype: str | None = setting(
        None, "type of the weights", choices=DTYPES, derived="as in the file", stroke="decode"
    )  # fmt: skip
    threads: int | None = setting(
        None, "processor threads", most=1024, derived="the cores that this process may use",
        unsimulated="predictions use the machine as it was calibrated; `twostroke plan MODEL --calibrate` takes it",
    )  # fmt: skip
    parallel: int = setting(
        1, "processes that share the work of each layer (tensor parallelism), each with `threads` or a GPU", most=64,
        unsimulated="`twostroke plan --gpus N` predicts N devices that share one model",
    )  # fmt: skip
    quantize: str | None = setting(
        None, "convert the weights as they are loaded", choices=QUANTIZATIONS, derived="off", stroke="decode"
    )
    kv_dtype: str | None = setting(
        None, "type of K and V in the cache", choices=tuple(KV_BITS), stroke="decode",
        derived="dtype if it is given, else the device's usual type",
    )  # fmt: skip
    max_model_len: int | None = setting(
        None, "longest request in tokens: prompt and answer", derived="what the model and the KV cache allow"
    )
    max_batch_tokens: int | None = setting(
        None, "most tokens that one step computes", live=True, stroke="prefill", derived=by_device(DEFAULT_BATCH_TOKENS)
    )
    max_requests: int | None = setting(
        None, "most requests that run at once", live=True, stroke="decode",
        derived=by_device(DEFAULT_REQUESTS) + "; a server on one GPU measures how many, 64 to 1,024",
    )  # fmt: skip
    kv_memory: int | None = setting(
        None, "bytes of the KV cache", stroke="decode", derived="a share of the memory that the weights leave"
    )
    kv_blocks: int | None = setting(
        None, f"size of the KV cache in blocks of {BLOCK} tokens", stroke="decode", derived="from kv_memory"
    )
    kv_offload: int = setting(
        0, "bytes of the host's memory for blocks that the prefix cache evicts", least=0, stroke="prefill"
    )
    prefix_cache: bool = setting(
        True, "keep K and V of prompts for requests that begin with the same text", live=True, stroke="prefill"
    )
    chunked_prefill: bool = setting(
        True, "read long prompts in chunks, so that streams continue meanwhile", live=True, stroke="both"
    )
    batching: str = setting(
        "continuous", "requests join the running batch at any step, or wait until it is empty", live=True,
        stroke="decode", choices=("continuous", "static"),
    )  # fmt: skip
    policy: str = setting("fcfs", "the order of waiting requests", choices=tuple(POLICIES), live=True, stroke="prefill")
    key_share: float = setting(
        0.75, "largest share that one API key may use of what other keys leave free; 1 is no limit", most=1,
        unsimulated="the simulator knows no keys",
    )  # fmt: skip
    max_gap: float | None = setting(
        None, "longest pause of a stream while prompts are read, in seconds", live=True, stroke="both",
        derived=by_device(DEFAULT_GAP),
    )  # fmt: skip
    speculate: str = setting(
        "auto", "verify several guessed tokens in one step: lookup guesses from the text so far, draft with "
        "draft_model, auto uses what is expected to be fastest", live=True, stroke="decode",
        choices=("auto", "lookup", "draft", "off"),
        unsimulated="the gain depends on the text, which the cost model does not see",
    )  # fmt: skip
    draft_model: str | None = setting(
        None, "a small model with the same vocabulary that guesses the next tokens: name, path or hub id",
        derived="none", stroke="decode", unsimulated="the gain depends on the text, which the cost model does not see",
    )  # fmt: skip
    exact: bool | None = setting(
        None, "the output does not depend on other requests", derived="always on a CPU, off on a GPU",
        unsimulated="the cost model does not include its cost",
    )  # fmt: skip
    seed: int | None = setting(
        None, "makes sampling repeatable", least=0, most=2**64 - 1, derived="random",
        unsimulated="times do not depend on it",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name, row in SETTINGS.items():
            if not row.allows(getattr(self, name)):
                raise ConfigError(f"{name} must be {row.values}, got {getattr(self, name)!r}.")
        if self.kv_memory is not None and self.kv_blocks is not None:
            raise ConfigError("kv_memory and kv_blocks both size the KV cache: give one of them.")
        if self.dtype is not None and self.quantize is not None:
            raise ConfigError("dtype and quantize both choose the precision of the weights: give one of them.")
        if self.speculate == "draft" and self.draft_model is None:
            raise ConfigError(
                "speculate='draft' needs a draft model: give draft_model a small model with the same vocabulary."
            )
        if self.kv_offload and not self.prefix_cache:
            raise ConfigError("kv_offload keeps what the prefix cache evicts: it needs prefix_cache. Leave out one.")
        if self.max_gap is not None and not self.chunked_prefill:
            raise ConfigError(
                "max_gap needs chunked_prefill: a prompt in one step may take longer. Leave out one of the two."
            )
        if self.max_gap is not None and POLICIES[self.policy].prompts_first:
            raise ConfigError(
                f"max_gap cannot hold under policy {self.policy!r}, which lets streams wait. Leave out one of the two."
            )


def _table() -> dict[str, Setting]:
    types = get_type_hints(Config)
    kinds = {name: (get_args(found) or (found,))[0] for name, found in types.items()}
    return {
        item.name: Setting(name=item.name, kind=kinds[item.name], default=item.default, **item.metadata)
        for item in fields(Config)
    }


SETTINGS = _table()


def find_setting(name: str) -> Setting:
    """ConfigError with the nearest known name."""
    if name in SETTINGS:
        return SETTINGS[name]
    near = get_close_matches(name, SETTINGS, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known settings: {', '.join(SETTINGS)}."
    raise ConfigError(f"unknown setting {name!r}. {hint}")


def make_config(**settings: Any) -> Config:
    """A Config from keywords; an unknown one is an error that names the nearest known one."""
    for name, value in settings.items():
        find_setting(name)
        settings[name] = str(value) if isinstance(value, Path) else value
    return Config(**settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Config):
    """Every setting with its value, and the reasons of those that were derived. Here are the settings that always have
    a value; the others are as in `Config` (dtype None: each tensor as the file holds it, as far as the backend can)."""

    device: str
    threads: int
    kv_dtype: KVFormat
    max_model_len: int
    max_batch_tokens: int
    max_requests: int
    kv_blocks: int
    max_gap: float
    exact: bool
    seed: int
    layout: KVLayout
    reasons: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """The values are derived from a `Config` that was checked."""

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of a block as other engines get it: the parts of all ranks."""
        return self.parallel * self.layout.block_bytes

    @property
    def host_slots(self) -> int:
        """Evicted blocks that the host keeps."""
        return self.kv_offload // self.layout.block_bytes


def resolve(config: Config, arch: Arch, hardware: Hardware, weight_bytes: int, draft: Arch | None = None) -> Resolved:
    """Pure: the same inputs give the same values, except for a seed that is drawn. draft: of the draft model, whose
    weights are among weight_bytes."""
    reasons: dict[str, str] = {}

    def derive(name: str, value: Any, reason: str) -> Any:
        given = getattr(config, name)
        if given is not None:
            return given
        reasons[name] = reason
        return value

    device = hardware.device
    check_quantize(config.quantize, device)
    threads = derive("threads", max(1, hardware.cores // config.parallel), f"{hardware.cores} cores may be used")
    models = [arch] if draft is None else [arch, draft]
    kv_dtype = _kv_dtype(config, models, device, reasons)
    layout = make_layout(arch, kv_dtype, draft)
    batch = derive("max_batch_tokens", DEFAULT_BATCH_TOKENS[device], f"enough rows to keep a {device} busy in one step")
    requests = derive("max_requests", DEFAULT_REQUESTS[device], f"streams that a {device} serves well at once")
    if requests > batch:
        requests = batch
        reasons["max_requests"] = f"every stream needs a token of the step's {batch} (max_batch_tokens)"
    length, blocks = _size_cache(config, arch, hardware, layout, batch, requests, weight_bytes, reasons)
    gap = derive("max_gap", DEFAULT_GAP[device], "a pause that a reader hardly notices")
    derived = {
        "device": device,
        "threads": threads,
        "kv_dtype": kv_dtype,
        "max_model_len": length,
        "max_batch_tokens": batch,
        "max_requests": requests,
        "kv_blocks": blocks,
        "kv_offload": _offload(config, device, layout, reasons),
        "max_gap": gap,
        "exact": _exact(config, device, reasons),
        "seed": derive("seed", secrets.randbits(63), "drawn at start; pass it to repeat a run"),
    }
    return Resolved(**asdict(config) | derived, layout=layout, reasons=reasons)


def check_quantize(quantize: str | None, device: str) -> None:
    known = QUANTIZATIONS_OF[device]
    if quantize is not None and quantize not in known:
        raise ConfigError(f"quantize={quantize!r} is not served on a {device}: use {' or '.join(known)} there.")


def _exact(config: Config, device: str, reasons: dict[str, str]) -> bool:
    if device == "cpu":
        reasons["exact"] = "a CPU's kernels add in one order for any batch, chunk and cache: it costs nothing"
        return True
    if config.exact is None:
        reasons["exact"] = EXACT_COST if config.quantize is None else EXACT_COST_NARROW
    return bool(config.exact)


def _kv_dtype(config: Config, models: Sequence[Arch], device: str, reasons: dict[str, str]) -> KVFormat:
    """models: the target and perhaps the draft model, which share the cache."""

    def stored(kv_dtype: str) -> bool:
        return all(mixer.stores(kv_dtype) for arch in models for mixer, _ in arch.mixers)

    kinds = {mixer.kind for arch in models for mixer, _ in arch.mixers}
    if config.kv_dtype is not None and not stored(config.kv_dtype):
        kind = "compressed" if "compressed" in kinds else "latent"
        narrow = "int8, " if kind == "latent" else ""
        raise ConfigError(
            f"kv_dtype={config.kv_dtype!r} is not served for {kind} attention, whose entries are small already: use "
            f"{narrow}float16, bfloat16 or float32."
        )
    groups = all(getattr(mixer, "whole_groups", True) for arch in models for mixer, _ in arch.mixers)
    if config.kv_dtype == "int8" and device == "cuda" and not groups:
        raise ConfigError(
            "kv_dtype='int8' on a GPU is for latents of whole groups of 64 numbers with up to 64 rotated ones, which "
            "these are not: use bfloat16 or float32."
        )
    if config.kv_dtype == "fp8" and device != "cuda":
        raise ConfigError(f"kv_dtype='fp8' needs a GPU; on a {device} int8 takes the same room and keeps more.")
    if config.kv_dtype == "int4" and device == "cuda":
        raise ConfigError(
            "kv_dtype='int4' is not served on a GPU: with one scale for each head of a token it raises the perplexity "
            "of the default model by more than a third. Use int8 or fp8."
        )
    if config.kv_dtype in ("int8", "fp8") and device == "cuda" and config.dtype == "float32":
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
    if not stored("int8"):
        reasons["kv_dtype"] = "compressed attention keeps its entries as floats"
        return "float16"
    if "latent" in kinds:
        reasons["kv_dtype"] = "int8 takes half the bytes, but was not measured with a published model that has latents"
        return "float16"
    reasons["kv_dtype"] = (
        "half the bytes of float16, and a CPU multiplies bytes faster; perplexity stays within its noise"
    )
    return "int8"


def _offload(config: Config, device: str, layout: KVLayout, reasons: dict[str, str]) -> int:
    """kv_offload rounded down to whole blocks."""
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
            share = f"{KV_SHARE[hardware.device]:.0%} of the memory that the weights leave"
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
