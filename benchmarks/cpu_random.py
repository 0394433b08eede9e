"""A GGUF file with random codes: speed does not depend on values, so no download is needed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, VOCAB = 2048, 8192, 16, 32, 8, 128_256
TYPES = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q8_0": gguf.GGMLQuantizationType.Q8_0}
BLOCK_BYTES = {"q4_0": 18, "q8_0": 34}
SPREAD = {"q4_0": 4.6, "q8_0": 73.0}  # deviation of a uniform code


def random_matrix(kind: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """(rows, bytes): each group of 32 one float16 scale and random codes, values of deviation columns ** -0.5."""
    data = rng.integers(0, 256, (rows, columns // 32, BLOCK_BYTES[kind]), np.uint8)
    if kind == "q8_0":
        data[..., 2:][data[..., 2:] == 128] = 127  # -128 is no code of the format
    scale = np.float16(columns**-0.5 / SPREAD[kind])
    data[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return data.reshape(rows, -1)


def write_random(path: Path, kind: str) -> Path:
    """A 1B-class llama with a tied head, all matrices of one type; written once, reused after."""
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(str(partial), "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    add_vocabulary(writer, VOCAB)

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", random_matrix(kind, rows, columns, rng), raw_dtype=TYPES[kind])

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))

    matrix("token_embd", VOCAB, HIDDEN)
    norm("output_norm")
    narrow = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        stem = f"blk.{layer}."
        norm(f"{stem}attn_norm")
        matrix(f"{stem}attn_q", HIDDEN, HIDDEN)
        matrix(f"{stem}attn_k", narrow, HIDDEN)
        matrix(f"{stem}attn_v", narrow, HIDDEN)
        matrix(f"{stem}attn_output", HIDDEN, HIDDEN)
        norm(f"{stem}ffn_norm")
        matrix(f"{stem}ffn_gate", FFN, HIDDEN)
        matrix(f"{stem}ffn_up", FFN, HIDDEN)
        matrix(f"{stem}ffn_down", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path


def add_vocabulary(writer: gguf.GGUFWriter, count: int) -> None:
    """Byte-level tokens and fillers: enough for both engines to open the file; only token ids are sent."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, "ab", *(f"filler{i}" for i in range(count - len(letters) - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * count)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(count - 1)
    writer.add_bos_token_id(count - 2)
