"""Small vocabularies, trained here, each as a folder and as a GGUF header."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.text.samples import corpus
from twostroke.text.gguf_vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from twostroke.text.pretokenize import pre_tokenizer

CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_byte_level(folder: Path, pre: str) -> Path:
    """A byte-level BPE cut the way `pre` says, saved as transformers would."""
    cut = pre_tokenizer(pre)
    engine = Tokenizer(models.BPE(ignore_merges=cut.ignore_merges))
    engine.pre_tokenizer = cut.build()
    if (normalizer := cut.normalizer()) is not None:
        engine.normalizer = normalizer
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        special_tokens=list(CONTROLS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    engine.train_from_iterator(corpus(), trainer)
    engine.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    engine.save(str(folder / "tokenizer.json"))
    config = {"bos_token": CONTROLS[1], "eos_token": CONTROLS[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_level_header(folder: Path, pre: str) -> dict[str, Any]:
    """The same vocabulary as a GGUF's metadata."""
    model = json.loads((folder / "tokenizer.json").read_text())
    ids = dict(model["model"]["vocab"]) | {token["content"]: token["id"] for token in model["added_tokens"]}
    kinds = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in model["added_tokens"]}
    merges = [" ".join(m) if isinstance(m, list) else m for m in model["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(ids, key=ids.__getitem__),
        "tokenizer.ggml.token_type": np.array([kinds.get(i, NORMAL) for i in range(len(ids))], np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": ids[CONTROLS[1]],
        "tokenizer.ggml.eos_token_id": ids[CONTROLS[2]],
        "tokenizer.chat_template": TEMPLATE,
    }


def train_sentencepiece(*, space: bool = True) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE model, with byte fallback as Llama 2, Mistral, Phi-3 and Gemma have it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in corpus() for line in text.split("\n") if line and "\x00" not in line),
        model_writer=model,
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=space,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        character_coverage=0.98,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_header(model: sentencepiece.SentencePieceProcessor, *, space: bool = True) -> dict[str, Any]:
    """The model as a GGUF's metadata."""

    def kind(number: int) -> int:
        if model.is_control(number):
            return CONTROL
        if model.is_unknown(number):
            return UNKNOWN
        return BYTE if model.is_byte(number) else NORMAL

    numbers = range(model.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in numbers],
        "tokenizer.ggml.scores": np.array([model.get_score(i) for i in numbers], np.float32),
        "tokenizer.ggml.token_type": np.array([kind(i) for i in numbers], np.int32),
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": space,
    }


def write_gguf(path: Path, header: dict[str, Any]) -> Path:
    """A one-layer model around a vocabulary: the least that llama.cpp opens."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(header["tokenizer.ggml.tokens"]))
    for key, value in header.items():
        write_value(writer, key, value)
    square = np.zeros((32, 32), np.float32)
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    writer.add_tensor("token_embd.weight", np.zeros((len(header["tokenizer.ggml.tokens"]), 32), np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    for name in names:
        writer.add_tensor(f"blk.0.{name}.weight", square)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value if isinstance(value, list) else value.tolist())
