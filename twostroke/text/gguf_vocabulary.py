"""Reads the vocabulary in a GGUF header.

Two kinds cover the supported families. Byte-level BPE ("gpt2") lists its merges. SentencePiece ("llama") has a score
for each token: each step joins the two neighbours whose union has the best score. That equals BPE with merges sorted by
the score of their result, so it is translated to BPE and one encoder serves both kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers

from twostroke.errors import ModelError
from twostroke.text import token_bytes
from twostroke.text.pretokenize import PreTokenizer, pre_tokenizer
from twostroke.text.vocabulary import Vocabulary, end_ids, errors_as_model_error

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_FIX = "the file is damaged or was converted wrongly: fetch it again or convert it with a current converter"
_NO_ID = 0xFFFFFFFF  # written by some converters for "no such token"
_MAX_PIECE = 256
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
          "pad_token": "padding_token_id"}  # fmt: skip


class _Header:
    """Reads and checks the tokenizer.ggml.* keys. Every error names its key."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.kind = self.text("model", required=True)
        self.tokens = self.strings("tokens")
        self.types = self.numbers("token_type", default=NORMAL)
        self.other = {i: kind for i, kind in enumerate(self.types) if kind != NORMAL}  # types of the few other tokens

    def value(self, key: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def text(self, key: str, *, required: bool = False) -> str:
        value = self.value(key)
        if value is None and not required:
            return ""
        if not isinstance(value, str):
            raise _bad(key, f"must be a string, got {type(value).__name__}")
        return value

    def strings(self, key: str) -> list[str]:
        value = self.value(key)
        if value is None:
            raise _bad(key, "is missing")
        if isinstance(value, str) or not hasattr(value, "__len__") or len(value) == 0:
            raise _bad(key, "must be a list of strings that is not empty")
        found = list(value)
        if set(map(type, found)) != {str}:
            wrong = next(i for i, item in enumerate(found) if type(item) is not str)
            raise _bad(key, f"entry {wrong} is a {type(found[wrong]).__name__}, not a string")
        return found

    def numbers(self, key: str, *, default: float | None) -> list[float]:
        value = self.value(key)
        if value is None and default is not None:
            return [default] * len(self.tokens)
        found = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(found, (list, tuple)) or len(found) != len(self.tokens):
            size = len(found) if isinstance(found, (list, tuple)) else "none"
            raise _bad(key, f"must have one number per token ({len(self.tokens)}), has {size}")
        if not set(map(type, found)) <= {int, float} or not math.isfinite(sum(found)):
            raise _bad(key, "holds something that is not a finite number")
        return list(found)

    def token_id(self, key: str, default: int | None = None) -> int | None:
        value = self.value(key)
        if value is None or value == _NO_ID:
            return default if default is None or default < len(self.tokens) else None
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise _bad(key, f"must be a token id, got {value!r}")
        if not 0 <= int(value) < len(self.tokens):
            raise _bad(key, f"{int(value)} lies outside the vocabulary of {len(self.tokens)} tokens")
        return int(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key)
        return default if value is None else bool(value)


def _bad(key: str, reason: str) -> ModelError:
    return ModelError(f"tokenizer.ggml.{key}: {reason}; {_FIX}")


def read_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a GGUF header. Values may be Python scalars, lists, or numpy arrays."""
    header = _Header(metadata)
    ids = _index(header.tokens)
    if header.kind == "gpt2":
        pre = pre_tokenizer(header.text("pre") or "default")
        defaults, add_bos, space = {}, pre.add_bos, False
        encoder = _byte_level_encoder(header, ids, pre)
    elif header.kind == "llama":
        space = header.flag("add_space_prefix", True)
        defaults, add_bos = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}, True
        encoder = _sentencepiece_encoder(header, ids, space)
    else:
        raise _unsupported(header.kind)
    return _vocabulary(header, encoder, defaults, add_bos, space)


def _unsupported(kind: str) -> ModelError:
    return ModelError(
        f"tokenizer.ggml.model: {kind!r} is not a vocabulary this engine reads (it reads 'gpt2', byte-level BPE, and "
        "'llama', SentencePiece); use a model of a supported family, or its safetensors folder with a tokenizer.json"
    )


def _index(tokens: list[str]) -> dict[str, int]:
    """The id of each text. Rows without a text pad the embedding and are left out."""
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) == len(tokens) and "" not in ids:
        return ids
    ids = {}
    for number, text in enumerate(tokens):
        if text and ids.setdefault(text, number) != number:
            raise _bad("tokens", f"{text!r} is both token {ids[text]} and token {number}")
    if not ids:
        raise _bad("tokens", "every token is empty")
    return ids


def _vocabulary(
    header: _Header, encoder: Tokenizer, defaults: dict[str, int], add_bos: bool, space: bool
) -> Vocabulary:
    named = {name: header.token_id(key, defaults.get(key)) for name, key in _NAMED.items()}
    bos, eos = named["bos_token"], named["eos_token"]
    special = {i for i, kind in header.other.items() if kind in (CONTROL, UNKNOWN)}
    special |= {i for i in (bos, eos) if i is not None}
    ends = [i for i in (header.token_id(key, defaults.get(key)) for key in _ENDS) if i is not None]
    with errors_as_model_error("tokenizer.ggml.tokens cannot be used", _FIX):
        _add_tokens(encoder, header, special)
    return Vocabulary(
        encoder=encoder,
        size=len(header.tokens),
        token_bytes=_token_bytes(header, frozenset(special)),
        special_ids=frozenset(special),
        eos_ids=end_ids(ends, {header.tokens[i]: i for i in special}),
        bos_id=bos,
        prefix=_around(header, "add_bos_token", bos, add_bos),
        suffix=_around(header, "add_eos_token", eos, False),
        leading_space=space,
        template=_template(header.metadata),
        names={name: header.tokens[i] for name, i in named.items() if i is not None},
    )


def _around(header: _Header, key: str, token: int | None, default: bool) -> tuple[int, ...]:
    wanted = header.flag(key, default)
    if wanted and token is None and header.value(key) is not None:
        raise _bad(key, "is true but the header names no such token")
    return (token,) if wanted and token is not None else ()


def _template(metadata: Mapping[str, Any]) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"tokenizer.chat_template: must be a string, got {type(template).__name__}; {_FIX}")
    return template


def _add_tokens(encoder: Tokenizer, header: _Header, special: set[int]) -> None:
    """Make special and user-defined tokens known to the encoder, which splits the text at them first."""
    strip = header.kind == "llama" and header.metadata.get("general.architecture") == "phi3"
    unstripped = {"<unk>", "<s>", "<|endoftext|>"}  # Phi-3's other special tokens take the space after them

    def added(text: str, is_special: bool) -> AddedToken:
        return AddedToken(text, special=is_special, normalized=False, rstrip=strip and text not in unstripped)

    user = [i for i, kind in header.other.items() if kind == USER_DEFINED and i not in special]
    encoder.add_special_tokens([added(header.tokens[i], True) for i in sorted(special) if header.tokens[i]])
    encoder.add_tokens([added(header.tokens[i], False) for i in user if header.tokens[i]])


def _token_bytes(header: _Header, special: frozenset[int]) -> Callable[[int], bytes]:
    """The bytes of each token by its id. A row marked unused pads the embedding and has no text."""
    tokens, types = header.tokens, header.types
    plain = token_bytes.byte_level if header.kind == "gpt2" else token_bytes.sentencepiece

    def to_bytes(number: int) -> bytes:
        text, kind = tokens[number], types[number]
        if number in special or kind == USER_DEFINED:
            return token_bytes.verbatim(text)
        if kind == UNUSED:
            return b""
        as_byte = token_bytes.byte_token(text) if kind == BYTE else None
        return plain(text) if as_byte is None else as_byte

    return to_bytes


def _byte_level_encoder(header: _Header, ids: dict[str, int], pre: PreTokenizer) -> Tokenizer:
    merges = _split_merges(header.strings("merges"))
    with errors_as_model_error("tokenizer.ggml.merges do not fit tokenizer.ggml.tokens", _FIX):
        encoder = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pre.ignore_merges))
        encoder.pre_tokenizer = pre.build()
        if (normalizer := pre.normalizer()) is not None:
            encoder.normalizer = normalizer
    return encoder


def _split_merges(merges: list[str]) -> list[tuple[str, str]]:
    """The two tokens of each merge. All at once: this is a twentieth of a start."""
    parts = " ".join(merges).split(" ")
    if set(map(str.count, merges, repeat(" "))) != {1} or "" in parts:
        wrong = next(i for i, merge in enumerate(merges) if merge.count(" ") != 1 or "" in merge.split(" "))
        raise _bad("merges", f"entry {wrong} is {merges[wrong]!r}, not two tokens with a space between them")
    return list(zip(parts[::2], parts[1::2], strict=True))


def _sentencepiece_encoder(header: _Header, ids: dict[str, int], space: bool) -> Tokenizer:
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", token_bytes.SPACE_MARK)]
    if space:
        steps.insert(0, normalizers.Prepend(token_bytes.SPACE_MARK))
    unknown = header.token_id("unknown_token_id", 0)
    fallback = all(f"<0x{byte:02X}>" in ids for byte in range(256))
    unk = header.tokens[unknown] if unknown is not None and header.tokens[unknown] else None
    with errors_as_model_error("tokenizer.ggml.tokens cannot be used", _FIX):
        model = models.BPE(
            vocab=ids, merges=_score_merges(header), unk_token=unk, fuse_unk=True, byte_fallback=fallback
        )
        encoder = Tokenizer(model)
        encoder.normalizer = normalizers.Sequence(steps)
    return encoder


def _score_merges(header: _Header) -> list[tuple[str, str]]:
    """Every way to split a token into two others; the token with the best score comes first.

    Only ordinary tokens take part, so text never merges into a control token. One comprehension, because a vocabulary
    of 262,144 tokens has two million splits.
    """
    scores = header.numbers("scores", default=None)
    ordinary = [i for i, kind in enumerate(header.types) if kind == NORMAL and header.tokens[i]]
    ordinary.sort(key=scores.__getitem__, reverse=True)
    texts = [header.tokens[i] for i in ordinary]
    known = frozenset(texts)
    if (longest := max(map(len, texts), default=0)) > _MAX_PIECE:  # the number of splits grows with its square
        raise _bad("tokens", f"one has {longest} characters, more than the {_MAX_PIECE} any SentencePiece model has")
    return [
        (left, right)
        for text in texts
        for cut in range(1, len(text))
        if (left := text[:cut]) in known and (right := text[cut:]) in known
    ]
