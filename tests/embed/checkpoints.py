"""Tiny random embedders in the shape of real ones, saved by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
import transformers

from tests import tiny

WORDS = "the a an of to in is are how do i my what when who can cat dog sat on mat red blue reset password paris city"
TEXTS = [
    "How do I reset my password?",
    "the cat sat on the mat",
    "Paris",
    "what is a city when a dog is in the city of Paris and the mat is red and the cat is blue " * 3,
    "zzz qqq",
    "can I?",
]


def save_wordpiece(folder: Path) -> int:
    """A WordPiece tokenizer as BERT's. Returns the size of its vocabulary."""
    letters = [chr(code) for code in range(33, 127)]
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split(), *letters, *(f"##{c}" for c in letters)]
    vocab = {name: number for number, name in enumerate(dict.fromkeys(names))}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )  # fmt: skip
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    made.save(str(folder / "tokenizer.json"))
    return len(vocab)


def bert_config(vocab: int, **changes: object) -> transformers.BertConfig:
    settings = {
        "vocab_size": vocab, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3,
        "intermediate_size": 160, "max_position_embeddings": 128, "initializer_range": 0.1,
    }  # fmt: skip
    return transformers.BertConfig(**(settings | changes))


def save_modules(folder: Path, pooling: str, normalize: bool = True) -> None:
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    names = ("pooling_mode_mean_tokens", "pooling_mode_cls_token", "pooling_mode_lasttoken")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({name: name == pooling for name in names}))


def tiny_bert(folder: Path, pooling: str = "pooling_mode_mean_tokens", **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = bert_config(save_wordpiece(folder), **changes)
    transformers.BertModel(config).save_pretrained(folder, safe_serialization=True)
    save_modules(folder, pooling)
    return folder


def tiny_cross_encoder(folder: Path, labels: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    config = bert_config(save_wordpiece(folder), num_labels=labels)
    transformers.BertForSequenceClassification(config).save_pretrained(folder, safe_serialization=True)
    return folder


def tiny_decoder(folder: Path) -> Path:
    """As Qwen3-Embedding: no head, an end token after each text, the last token pooled."""
    torch.manual_seed(2)
    config = transformers.Qwen3Config(
        vocab_size=tiny.VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=True,
        initializer_range=0.1,
    )  # fmt: skip
    tiny.save(transformers.Qwen3Model(config), folder)
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = made.token_to_id("<|endoftext|>")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    made.save(str(folder / "tokenizer.json"))
    save_modules(folder, "pooling_mode_lasttoken")
    return folder
