"""The compiled library as ctypes sees it: where it lies, its functions, the structures it shares (kernels.h)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from struct import Struct
from typing import ClassVar

NAME = "libtwostroke.so"
ABI = 15  # ts_version: raised whenever a signature or a shared structure changes


class AttendLayer(ctypes.Structure):
    _fields_: ClassVar = [
        ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32), ("window", c_int32),
        ("value_dim", c_int32), ("scale", c_float), ("softcap", c_float), ("rope_half", c_int32),
        ("kv_format", c_int32),
        ("cos", c_void_p), ("sin", c_void_p), ("query_norm", c_void_p), ("key_norm", c_void_p),
        ("key_center", c_void_p), ("sinks", c_void_p),
        ("query_eps", c_float), ("key_eps", c_float),
        ("keys", c_void_p), ("values", c_void_p),
        ("key_block_stride", c_int64), ("key_head_stride", c_int64),
        ("value_block_stride", c_int64), ("value_head_stride", c_int64),
        ("key_scales", c_void_p), ("value_scales", c_void_p),
        ("key_scale_block_stride", c_int64), ("key_scale_head_stride", c_int64),
        ("value_scale_block_stride", c_int64), ("value_scale_head_stride", c_int64),
    ]  # fmt: skip


class AttendBatch(ctypes.Structure):
    _fields_: ClassVar = [
        ("rows", c_int32), ("requests", c_int32), ("positions", c_void_p), ("slots", c_void_p),
        ("tables", c_void_p), ("table_stride", c_int64), ("starts", c_void_p), ("contexts", c_void_p),
    ]  # fmt: skip


class LatentCall(ctypes.Structure):
    _fields_: ClassVar = [
        ("attention", c_void_p), ("key_up", c_void_p), ("value_up", c_void_p), ("plain_dim", c_int32),
        ("unused", c_int32),
    ]  # fmt: skip


class NormRef(ctypes.Structure):
    _fields_: ClassVar = [("weight", c_void_p), ("eps", c_float), ("unused", c_int32)]


class ExpertsCall(ctypes.Structure):
    _fields_: ClassVar = [
        ("router", c_void_p), ("correction", c_void_p), ("gate_up", c_void_p), ("down", c_void_p), ("norm", NormRef),
        ("experts", c_int32), ("chosen", c_int32), ("scores", c_int32), ("normalised", c_int32),
        ("groups", c_int32), ("kept_groups", c_int32), ("group_best", c_int32), ("gate", c_int32),
        ("factor", c_float), ("vocab", c_int32), ("table", c_void_p),
    ]  # fmt: skip


class EntriesCall(ctypes.Structure):
    _fields_: ClassVar = [
        ("heads", c_int32), ("dim", c_int32), ("scale", c_float), ("format", c_int32), ("sinks", c_void_p),
    ]  # fmt: skip


class LayerCall(ctypes.Structure):
    _fields_: ClassVar = [
        ("qkv", c_void_p), ("output", c_void_p), ("gate_up", c_void_p), ("down", c_void_p), ("attention", c_void_p),
        ("experts", c_void_p),
        ("attention_norm", NormRef), ("feed_norm", NormRef), ("attention_out", NormRef), ("feed_out", NormRef),
        ("queries", NormRef), ("keys", NormRef),
        ("group", c_int32), ("gate", c_int32),
    ]  # fmt: skip


class DecodeGroup(ctypes.Structure):
    _fields_: ClassVar = [
        ("tables", c_void_p), ("stride", c_int64), ("requests", c_int32), ("columns", c_int32), ("span", c_int32),
        ("unused", c_int32),
    ]  # fmt: skip


class DecodeCall(ctypes.Structure):
    _fields_: ClassVar = [
        ("layers", c_void_p), ("table", c_void_p), ("head", c_void_p), ("groups", c_void_p), ("norm", NormRef),
        ("layer_count", c_int32), ("group_count", c_int32), ("hidden", c_int32), ("scale", c_float),
    ]  # fmt: skip


class EncodeLayer(ctypes.Structure):
    _fields_: ClassVar = [
        ("qkv", c_void_p), ("output", c_void_p), ("up", c_void_p), ("down", c_void_p),
        ("attention_norm", c_void_p), ("attention_shift", c_void_p), ("feed_norm", c_void_p), ("feed_shift", c_void_p),
    ]  # fmt: skip


# Of the router: packed and unpacked as a whole, which takes less time than a structure's fields one by one.
WORKER_REPORT = Struct("=iiqqqdddq")
WORKER_STANDING = Struct("=ddqqqq")
ROUTER_ASK = Struct("=iiqddddd")
ROUTER_ANSWER = Struct("=iii4xdddqqq")

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "ts_version": (c_int, []),
    "ts_isa": (c_char_p, [c_int]),
    "ts_new": (c_void_p, [c_int, c_char_p]),
    "ts_free": (None, [c_void_p]),
    "ts_name": (c_char_p, [c_void_p]),
    "ts_pack": (c_void_p, [c_void_p, c_int, POINTER(c_int32), POINTER(c_int32), POINTER(c_void_p), c_int, c_void_p]),
    "ts_weight_order": (None, [c_void_p, c_void_p]),
    "ts_weight_free": (None, [c_void_p]),
    "ts_weight_bytes": (c_int64, [c_void_p]),
    "ts_embed": (c_int, [c_void_p, c_void_p, c_void_p, c_int, c_float, c_void_p]),
    "ts_norm": (c_int, [c_void_p, c_void_p, c_int64, c_int, c_int, c_void_p, c_float, c_void_p]),
    "ts_linear": (
        c_int,
        [c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int, c_void_p, c_float, c_void_p, c_int64, c_int],
    ),
    "ts_attend": (c_int, [c_void_p] * 5),
    "ts_attend_latent": (c_int, [*[c_void_p] * 4, c_int64, c_void_p, c_int64, c_void_p]),
    "ts_experts": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_void_p]),
    "ts_attend_entries": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p]),
    "ts_entry_scores": (c_int, [c_void_p, c_void_p, c_void_p, c_int, c_int, c_void_p, c_int, c_void_p]),
    "ts_layers": (
        c_int,
        [c_void_p, c_void_p, c_int, POINTER(c_void_p), c_void_p, c_int, c_int, c_void_p, c_int, c_void_p],
    ),
    "ts_decode": (c_int, [c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_void_p]),
    "ts_quantize": (None, [c_void_p, c_int64, c_void_p, c_int, c_void_p]),
    "ts_encode_pack": (c_void_p, [c_void_p, c_void_p, c_int, c_int, c_void_p, c_int]),
    "ts_encode_weight_free": (None, [c_void_p]),
    "ts_layer_norm": (c_int, [c_void_p, c_void_p, c_int, c_int, c_void_p, c_void_p, c_float]),
    "ts_encode": (
        c_int,
        [c_void_p, c_void_p, c_int, c_int, c_int, c_float, c_void_p, c_int, c_void_p, c_int],
    ),
    "ts_argmax": (c_int, [c_void_p, c_void_p, c_int64, c_int, c_int64, c_void_p]),
    "ts_ranks_bytes": (c_int64, [c_int, c_int64]),
    "ts_ranks_give": (None, [c_void_p, c_int, c_int64, c_int, c_uint32, c_void_p, c_int64]),
    "ts_ranks_take": (c_int, [c_void_p, c_int, c_int64, c_uint32, c_void_p, c_int64, c_int64]),
}

# Functions of some microseconds. They keep the interpreter's lock: so one thread is in them at a time.
_SHORT: dict[str, tuple[object, list[object]]] = {
    "ts_router_new": (c_void_p, []),
    "ts_router_free": (None, [c_void_p]),
    "ts_router_update": (c_int, [c_void_p, c_int32, c_char_p]),
    "ts_router_pause": (c_int, [c_void_p, c_int32]),
    "ts_router_lost": (c_int, [c_void_p, c_int32]),
    "ts_router_stored": (c_int, [c_void_p, c_int32, c_char_p, c_int64]),
    "ts_router_cached": (c_int64, [c_void_p, c_int32, c_char_p, c_int64]),
    "ts_router_standing": (None, [c_void_p, c_int32, c_void_p]),
    "ts_router_choose": (c_int, [c_void_p, c_char_p, c_int64, c_char_p, c_void_p]),
}


class LibraryMissing(ImportError):  # noqa: N818
    """The native library was not built: no compiler at install time, or a checkout that was never built."""


def library_path() -> Path | None:
    """Beside this file, or, when the sources are run from a checkout, where `pip install` put the built package."""
    beside = Path(__file__).resolve().parent / NAME
    if beside.exists():
        return beside
    for installed in distributions(name="twostroke"):
        path = Path(str(installed.locate_file(f"twostroke/ops/cpu/{NAME}")))
        if path.exists():
            return path
    return None


@cache
def load_library() -> ctypes.CDLL:
    path = library_path()
    if path is None:
        raise LibraryMissing("the native CPU library is not built; run: python -m twostroke.ops.cpu.build")
    lib = ctypes.CDLL(str(path))
    if lib.ts_version() != ABI:
        raise LibraryMissing(f"{path} was built from other sources; run: python -m twostroke.ops.cpu.build")
    _declare(lib, _SIGNATURES)
    return lib


@cache
def load_short() -> ctypes.PyDLL:
    """The same library, for the functions in _SHORT."""
    whole = load_library()
    lib = ctypes.PyDLL(whole._name, handle=whole._handle)
    _declare(lib, _SHORT)
    return lib


def _declare(lib: ctypes.CDLL, signatures: dict[str, tuple[object, list[object]]]) -> None:
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments


def available() -> bool:
    try:
        load_library()
    except (LibraryMissing, OSError):
        return False
    return True
