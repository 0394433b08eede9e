"""GGUF files of mixtures of experts with random codes in Q4_0. Written once, reused after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from benchmarks.cpu_random import TYPES, add_vocabulary, random_matrix

KIND = "q4_0"


class RandomFile:
    """Tensors go to a temporary file as they are made: one layer's experts are in memory at a time."""

    def __init__(self, path: Path, arch: str, hidden: int, layers: int, heads: int, vocab: int):
        self.rng = np.random.default_rng(0)
        self.writer = gguf.GGUFWriter(str(path), arch, use_temp_file=True)
        self.hidden, self.vocab = hidden, vocab
        self.writer.add_context_length(8192)
        self.writer.add_embedding_length(hidden)
        self.writer.add_block_count(layers)
        self.writer.add_head_count(heads)
        self.writer.add_layer_norm_rms_eps(1e-5)
        self.writer.add_rope_freq_base(10_000.0)
        self.writer.add_vocab_size(vocab)
        add_vocabulary(self.writer, vocab)

    def matrix(self, name: str, rows: int, columns: int, count: int = 1) -> None:
        data = random_matrix(KIND, count * rows, columns, self.rng)
        self.writer.add_tensor(
            f"{name}.weight", data if count == 1 else data.reshape(count, rows, -1), raw_dtype=TYPES[KIND]
        )

    def norm(self, name: str, width: int | None = None) -> None:
        self.writer.add_tensor(f"{name}.weight", np.ones(width or self.hidden, np.float32))

    def router(self, name: str, experts: int) -> None:
        data = self.rng.standard_normal((experts, self.hidden)) * self.hidden**-0.5
        self.writer.add_tensor(f"{name}.weight", data.astype(np.float32))

    def feed(self, stem: str, width: int, kind: str = "", count: int = 1) -> None:
        """Gate, up and down. kind: the end of their names; count: of experts."""
        for name in ("gate", "up"):
            self.matrix(f"{stem}ffn_{name}{kind}", width, self.hidden, count)
        self.matrix(f"{stem}ffn_down{kind}", self.hidden, width, count)

    def ends(self) -> None:
        """Embedding, last norm and head."""
        self.matrix("token_embd", self.vocab, self.hidden)
        self.matrix("output", self.vocab, self.hidden)
        self.norm("output_norm")

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def olmoe(path: Path) -> RandomFile:
    """OLMoE-1B-7B: 16 layers, 64 experts of which a token uses 8; 3.9 GB."""
    hidden, width, experts, layers, heads = 2048, 1024, 64, 16, 16
    file = RandomFile(path, "olmoe", hidden, layers, heads, 50_304)
    file.writer.add_feed_forward_length(width)
    file.writer.add_head_count_kv(heads)
    file.writer.add_expert_count(experts)
    file.writer.add_expert_used_count(8)
    file.ends()
    for layer in range(layers):
        stem = f"blk.{layer}."
        for norm in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            file.norm(stem + norm)
        for projection in ("attn_q", "attn_k", "attn_v", "attn_output"):
            file.matrix(stem + projection, hidden, hidden)
        file.router(f"{stem}ffn_gate_inp", experts)
        file.feed(stem, width, "_exps", experts)
    return file


def deepseek_v2_lite(path: Path) -> RandomFile:
    """DeepSeek-V2-Lite cut to 8 layers, the first of them dense: latent attention, 64 experts of which a token uses 6,
    and two that all tokens use; 2.4 GB. llama.cpp knows a direct q by the number of layers only, so q has a low rank
    here, as in DeepSeek-V2."""
    hidden, width, dense, experts, layers, heads = 2048, 1408, 10_944, 64, 8, 16
    latent, rotated, plain, value, query = 512, 64, 128, 128, 1536
    file = RandomFile(path, "deepseek2", hidden, layers, heads, 102_400)
    writer = file.writer
    writer.add_feed_forward_length(dense)
    writer.add_head_count_kv(1)
    writer.add_leading_dense_block_count(1)
    writer.add_q_lora_rank(query)
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotated)
    writer.add_value_length(latent)
    writer.add_key_length_mla(plain + rotated)
    writer.add_value_length_mla(value)
    writer.add_rope_dimension_count(rotated)
    writer.add_expert_feed_forward_length(width)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(6)
    writer.add_expert_shared_count(2)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    file.ends()
    for layer in range(layers):
        stem = f"blk.{layer}."
        file.norm(f"{stem}attn_norm")
        file.norm(f"{stem}ffn_norm")
        file.norm(f"{stem}attn_kv_a_norm", latent)
        file.norm(f"{stem}attn_q_a_norm", query)
        file.matrix(f"{stem}attn_q_a", query, hidden)
        file.matrix(f"{stem}attn_q_b", heads * (plain + rotated), query)
        file.matrix(f"{stem}attn_kv_a_mqa", latent + rotated, hidden)
        file.matrix(f"{stem}attn_k_b", latent, plain, heads)
        file.matrix(f"{stem}attn_v_b", value, latent, heads)
        file.matrix(f"{stem}attn_output", hidden, heads * value)
        if layer == 0:
            file.feed(stem, dense)
            continue
        file.router(f"{stem}ffn_gate_inp", experts)
        file.feed(stem, width, "_exps", experts)
        file.feed(stem, 2 * width, "_shexp")
    return file


def written(folder: Path, make: Callable[[Path], RandomFile]) -> Path:
    path = folder / f"{make.__name__}-random-{KIND}.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        make(partial).close()
        partial.rename(path)
    return path
