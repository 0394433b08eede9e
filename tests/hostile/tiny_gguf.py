"""A tiny Llama with random weights as a GGUF file, its matrices in any of the formats that are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from tests import tiny
from tests.text.vocabularies import byte_level_header, write_value
from twostroke.ops.formats import FORMATS

HIDDEN, FEED, LAYERS, HEADS, KV_HEADS = 256, 256, 2, 4, 2
SCALE_AT = {"Q6_K": 208}  # the byte of a block where its scale is; 0 in the others
WITH_MINIMUM = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
Change = Callable[[str, np.ndarray], None]  # (name of a tensor, its bytes)


def keep(name: str, data: np.ndarray) -> None:
    """Changes nothing."""


def set_scale(data: np.ndarray, kind: str, block: int, value: float) -> None:
    """Of one block of a quantized tensor, or one value of a plain one."""
    size, at = FORMATS[kind].bytes, SCALE_AT.get(kind, 0)
    if kind == "BF16":
        raw = np.array([value], np.float32).view(np.uint8)[2:]
    elif kind == "MXFP4":
        raw = np.array([255], np.uint8)  # the one scale of its powers of two that is no number
    else:
        raw = np.array([value], np.float32 if kind == "F32" else np.float16).view(np.uint8)
    data.reshape(-1)[block * size + at :][: len(raw)] = raw


def random_matrix(rng: np.random.Generator, rows: int, columns: int, kind: str) -> np.ndarray:
    """(rows, bytes of a row)"""
    values = rng.normal(0, 0.06, (rows, columns)).astype(np.float32)
    if kind == "F32":
        return values.view(np.uint8)
    if kind == "F16":
        return values.astype(np.float16).view(np.uint8)
    if kind == "BF16":
        return np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
    size = FORMATS[kind].bytes
    blocks = rng.integers(0, 256, (rows * columns // FORMATS[kind].block, size), np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 127 - 7
        return blocks.reshape(rows, -1)
    at = SCALE_AT.get(kind, 0)
    most = {"Q8_0": 100.0, "Q4_K": 15.0 * 32, "Q5_K": 31.0 * 32, "Q6_K": 32.0 * 64}.get(kind, 16.0)
    blocks[:, at : at + 2] = np.array([0.1 / most], np.float16).view(np.uint8)
    if kind in WITH_MINIMUM:
        blocks[:, 2:4] = np.array([0.05 / (32 if kind.endswith("K") else -1)], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write(path: Path, kind: str, change: Change = keep) -> Path:
    """kind: of the matrices. change: is given every tensor before it is written."""
    tiny.save_tokenizer(path.parent)
    header = byte_level_header_of(path.parent)
    vocab = len(header["tokenizer.ggml.tokens"])
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    for key, value in header.items():
        write_value(writer, key, value)
    for name, rows, columns in matrices(vocab):
        data = random_matrix(rng, rows, columns, kind)
        change(name, data)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    for name in norms():
        weight = np.ones(HIDDEN, np.float32)
        change(name, weight.view(np.uint8))
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_header_of(folder: Path) -> dict:
    header = byte_level_header(folder, "default")
    return header | {"tokenizer.chat_template": tiny.TEMPLATE}


def matrices(vocab: int) -> list[tuple[str, int, int]]:
    narrow = HIDDEN // HEADS * KV_HEADS
    found = [("token_embd.weight", vocab, HIDDEN)]
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN), ("attn_k", narrow, HIDDEN), ("attn_v", narrow, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN), ("ffn_gate", FEED, HIDDEN), ("ffn_up", FEED, HIDDEN),
            ("ffn_down", HIDDEN, FEED),
        ):  # fmt: skip
            found.append((f"blk.{layer}.{name}.weight", rows, columns))
    return found


def norms() -> list[str]:
    of_layers = [f"blk.{layer}.{name}.weight" for layer in range(LAYERS) for name in ("attn_norm", "ffn_norm")]
    return [*of_layers, "output_norm.weight"]
