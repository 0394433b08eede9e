"""Tiny random checkpoints in the shape of real ones, saved by transformers, with a small byte-level tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
import transformers

from twostroke.text.formats import HARMONY

VOCAB = 320
TEXT = ["Once upon a time there was a little engine that could.", "The quick brown fox jumps over the lazy dog. 0123"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 10, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save(model: torch.nn.Module, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, safe_serialization=True)
    save_tokenizer(folder)
    return folder


def tiny_llama(folder: Path, **changes: object) -> Path:
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "initializer_range": 0.15,
    }
    config = transformers.LlamaConfig(**(settings | changes))
    return save(transformers.LlamaForCausalLM(config), folder)


def tiny_draft(folder: Path, target: Path, layers: int = 1) -> Path:
    """The first layers of a checkpoint as a model of their own. It often agrees with the target where the layers after
    them add little: see `quiet_end`."""
    config = transformers.AutoConfig.from_pretrained(target)
    config.num_hidden_layers = layers
    for one_each in ("layer_types", "no_rope_layers"):
        if getattr(config, one_each, None):
            setattr(config, one_each, getattr(config, one_each)[:layers])
    model = transformers.AutoModelForCausalLM.from_config(config)
    weights = transformers.AutoModelForCausalLM.from_pretrained(target).state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return save(model, folder)


def quiet_end(folder: Path, source: Path, share: float = 0.2) -> Path:
    """A checkpoint whose last layer adds only a share of what it added."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    layer = model.model.layers[-1]
    with torch.no_grad():
        mixture = hasattr(layer.mlp, "experts")
        down = layer.mlp.experts.down_proj if mixture else layer.mlp.down_proj.weight
        for part in (layer.self_attn.o_proj.weight, down):
            part.mul_(share)
        if hasattr(layer, "post_feedforward_layernorm"):  # Gemma: a norm follows, whose weight counts from -1
            for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
                norm.weight.copy_((1 + norm.weight) * share - 1)
    return save(model, folder)


def tiny_gemma(folder: Path, sliding: int = 2) -> Path:
    """Alternating windows: the first layers see 40 tokens, the last one everything."""
    torch.manual_seed(1)
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=sliding + 1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        sliding_window=40,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention"] * sliding + ["full_attention"],
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.15,
    )
    return save(transformers.Gemma3ForCausalLM(config), folder)


def tiny_deepseek(folder: Path) -> Path:
    """Latent attention in both layers, YaRN, a dense feed and then experts in groups."""
    torch.manual_seed(2)
    config = transformers.DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 128,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        bos_token_id=0,
        eos_token_id=2,
        initializer_range=0.15,
    )  # fmt: skip
    return save(transformers.DeepseekV3ForCausalLM(config), folder)


def tiny_deepseek_v4(folder: Path, hidden: int = 48) -> Path:
    """Compressed attention of every kind, residual streams, experts chosen by token in the first layer."""
    torch.manual_seed(4)
    config = transformers.DeepseekV4Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=16,
        sliding_window=24,
        index_n_heads=8,
        index_head_dim=16,
        index_topk=6,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        qk_rope_head_dim=8,
        num_hash_layers=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=2,
        initializer_range=0.15,
    )
    model = transformers.DeepseekV4ForCausalLM(config)
    table = model.model.layers[0].mlp.gate.tid2eid
    table.copy_((torch.arange(VOCAB)[:, None] * 3 + torch.arange(3)) % 8)
    return save(model, folder)


def tiny_mixture(folder: Path, **changes: object) -> Path:
    """Experts in both layers, of which a token uses three of seven."""
    torch.manual_seed(4)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "moe_intermediate_size": 32,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "initializer_range": 0.15,
    }
    return save(transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**(settings | changes))), folder)


EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 3}
LATENT = {
    "num_key_value_heads": 6, "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1, **EXPERTS,
}  # fmt: skip
WINDOWED = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
# name -> (class of transformers, what differs from a small model with two layers)
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 40}),
    "olmoe": ("Olmoe", {"num_experts": 7, **EXPERTS}),
    "v2": ("DeepseekV2", {**LATENT, "q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 4,
                          "topk_group": 2}),
    "v2 lite": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "mistral": ("Mistral", {"sliding_window": 40}),
    "qwen2": ("Qwen2", WINDOWED),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "phi3": ("Phi3", {"sliding_window": 40}),
}  # fmt: skip


def tiny_family(folder: Path, name: str, **more: object) -> Path:
    kind, changes = FAMILIES[name]
    torch.manual_seed(6)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.15,
    }
    config = getattr(transformers, f"{kind}Config")(**(settings | changes | more))
    return save(getattr(transformers, f"{kind}ForCausalLM")(config), folder)


def tiny_gpt_oss(folder: Path, hidden_size: int = 48, intermediate_size: int = 32) -> Path:
    """Sinks, a window of 40 tokens on the first layer, biases, experts in both layers."""
    torch.manual_seed(5)
    config = transformers.GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_local_experts=6,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=40,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 128,
            "truncate": False,
        },
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.15,
    )  # fmt: skip
    return save(transformers.GptOssForCausalLM(config), folder)


def tiny_marked(folder: Path, marks: Sequence[str], template: str) -> Path:
    """A vocabulary with these marks as special tokens, and a template that writes them."""
    folder = tiny_llama(folder, vocab_size=VOCAB + 16)
    data = json.loads((folder / "tokenizer.json").read_text())
    number = max(token["id"] for token in data["added_tokens"])
    known = max(max(data["model"]["vocab"].values()), number) + 1
    data["added_tokens"] += [
        {"id": known + index, "content": mark, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False} for index, mark in enumerate(marks)
    ]  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(data))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return folder


def tiny_harmony(folder: Path) -> Path:
    """With Harmony's marks."""
    template = "{{ tools }}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    return tiny_marked(folder, HARMONY.marks, template + "<|start|>assistant{# <|channel|> #}")
