"""A folder with random weights, as a checkpoint is published: config, tokenizer, safetensors.

Every id is a word of its own, so that every token of an answer is an event with text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "max_position_embeddings": 131_072,
    },
    "cache": {  # much to cache for what it computes
        "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 16, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 2048, "max_position_embeddings": 131_072,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048, "max_position_embeddings": 131_072,
    },
}  # fmt: skip
END = "<|end_of_text|>"
PART = 4  # layers in a file


def write_folder(folder: Path, shape: str, device: str) -> Path:
    sizes = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 0, **sizes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, sizes["vocab_size"])
    generator = torch.Generator(device).manual_seed(0)
    names: dict[str, str] = {}
    for number, part in enumerate(parts(sizes)):
        tensors = {name: random_tensor(size, generator) for name, size in part.items()}
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file)
        names |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def random_tensor(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A matrix that keeps activations near 1, or a norm's weights."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    matrix = torch.empty(size, dtype=torch.bfloat16, device=generator.device)
    return matrix.normal_(std=size[-1] ** -0.5, generator=generator).cpu()


def parts(sizes: dict[str, int]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of each file."""
    hidden, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    heads, kv_heads, vocab = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["vocab_size"]
    yield {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    yield {"lm_head.weight": (vocab, hidden)}
    layer = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (heads * dim, hidden),
        "self_attn.k_proj": (kv_heads * dim, hidden), "self_attn.v_proj": (kv_heads * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    count = sizes["num_hidden_layers"]
    for first in range(0, count, PART):
        numbers = range(first, min(first + PART, count))
        yield {f"model.layers.{n}.{name}.weight": size for n in numbers for name, size in layer.items()}


def write_tokenizer(folder: Path, vocab: int) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [END, *letters, *(f"Ġw{number}" for number in range(vocab - 1 - len(letters)))]
    engine = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    engine.add_special_tokens([END])
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
