"""Other engines on the same weights, for side-by-side measurements and for tests of equality.

python -m benchmarks.peers FOLDER [MODEL.gguf]     # a llama's dequantized weights as a transformers folder
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

from twostroke.ops.formats import dequantize
from twostroke.text.gguf_vocabulary import read_gguf
from twostroke.weights.catalog import DEFAULT, fetch
from twostroke.weights.checkpoint import open_checkpoint

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def transformers_llama(path: Path) -> transformers.LlamaForCausalLM:
    """transformers' Llama holding a GGUF file's dequantized float32 weights, under its own names and row order."""
    checkpoint = open_checkpoint(path)
    keys = checkpoint.config
    heads, kv_heads = int(keys["llama.attention.head_count"]), int(keys["llama.attention.head_count_kv"])
    config = transformers.LlamaConfig(
        vocab_size=checkpoint.tensors["token_embd.weight"].shape[0],
        hidden_size=int(keys["llama.embedding_length"]),
        intermediate_size=int(keys["llama.feed_forward_length"]),
        num_hidden_layers=int(keys["llama.block_count"]),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=int(keys["llama.context_length"]),
        rms_norm_eps=float(keys["llama.attention.layer_norm_rms_epsilon"]),
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": float(keys["llama.rope.freq_base"])},
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    state = {}
    for name, stored in checkpoint.tensors.items():
        stem = name.removesuffix(".weight")
        value = torch.from_numpy(dequantize(stored))
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            if part in ("attn_q", "attn_k"):  # GGUF holds the halves of each head interleaved
                count = heads if part == "attn_q" else kv_heads
                value = value.view(count, -1, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
            stem = f"model.layers.{layer}.{LAYER_NAMES[part]}"
        else:
            stem = TOP_NAMES[stem]
        state[f"{stem}.weight"] = value
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are computed, not loaded
    return model.eval()


def export(path: Path, folder: Path) -> None:
    """A folder that other engines' converters read: weights, configuration and tokenizer."""
    transformers_llama(path).save_pretrained(folder)
    vocabulary = read_gguf(open_checkpoint(path).config)
    vocabulary.encoder.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": vocabulary.names["eos_token"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    export(Path(sys.argv[2]) if len(sys.argv) > 2 else fetch(DEFAULT), Path(sys.argv[1]))
