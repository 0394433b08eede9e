"""The real default model in float32 writes what transformers writes on the same weights."""

from __future__ import annotations

import torch
import transformers

from twostroke import LLM, SamplingParams
from twostroke.ops.formats import dequantize
from twostroke.weights.checkpoint import open_checkpoint

PROMPTS = [
    "Once upon a time", "The capital of France is", "def fibonacci(n):", "Water boils at", "In 1969, humans",
    "The three primary colours are", "Photosynthesis is the process by which", "A haiku about autumn:", "1, 1, 2, 3, 5, 8,",
    "To bake bread you need", "The opposite of hot is", "Dear Sir or Madam,", "import numpy as np\n", "Q: What is 12 times 12?\nA:",
    "The mitochondria is", "Shakespeare wrote", "My favourite season is", "El gato negro", "Breaking news:",
    "The meaning of life, according to",
]  # fmt: skip
NEW_TOKENS = 128


def peer(path) -> transformers.LlamaForCausalLM:
    """transformers' Llama holding the file's dequantized weights, under its own names and row order."""
    checkpoint = open_checkpoint(path)
    keys = checkpoint.config
    heads, kv_heads = int(keys["llama.attention.head_count"]), int(keys["llama.attention.head_count_kv"])
    config = transformers.LlamaConfig(
        vocab_size=checkpoint.tensors["token_embd.weight"].shape[0], hidden_size=int(keys["llama.embedding_length"]),
        intermediate_size=int(keys["llama.feed_forward_length"]), num_hidden_layers=int(keys["llama.block_count"]),
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=int(keys["llama.context_length"]),
        rms_norm_eps=float(keys["llama.attention.layer_norm_rms_epsilon"]), tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": float(keys["llama.rope.freq_base"])},
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    parts = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    state = {}
    for name, stored in checkpoint.tensors.items():
        value = torch.from_numpy(dequantize(stored))
        stem = name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            if part in ("attn_q", "attn_k"):  # GGUF holds the halves of each head interleaved
                count = heads if part == "attn_q" else kv_heads
                value = value.view(count, -1, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
            stem = f"model.layers.{layer}.{parts[part]}"
        else:
            stem = names[stem]
        state[f"{stem}.weight"] = value
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are computed, not loaded
    return model.eval()


@torch.inference_mode()
def disagreements(model: transformers.LlamaForCausalLM, prompt: list[int], answer: list[int]) -> list[tuple[int, float]]:
    """Positions where transformers' likeliest token after (prompt, answer so far) is not ours, with the distance of its
    two best logits. None of them means: its greedy answer is ours, by induction over the tokens."""
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2).values
    wrong = (logits.argmax(-1) != torch.tensor(answer)).nonzero().flatten().tolist()
    return [(index, float(best[index, 0] - best[index, 1])) for index in wrong]


def test_greedy_tokens_equal_transformers(default_model):
    llm = LLM(default_model, dtype="float32")
    ours = llm.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True))
    assert all(len(out.token_ids) == NEW_TOKENS for out in ours)
    model = peer(default_model)
    ties = 0
    for out in ours:
        wrong = disagreements(model, out.prompt_token_ids, out.token_ids)
        if wrong:
            first, distance = wrong[0]  # what follows has another history
            assert distance < 1e-3, f"differs at token {first} of {llm.tokenizer.decode(out.prompt_token_ids)!r}"
            ties += 1
    assert ties <= 1


def test_the_chat_names_paris(default_model):
    out = LLM(default_model).chat(
        [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(max_tokens=32, temperature=0)
    )
    assert "Paris" in out.text
    assert out.finish_reason == "stop"
