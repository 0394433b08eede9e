"""Reads the vocabulary of a checkpoint folder: tokenizer.json and the small files beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from twostroke.errors import ModelError
from twostroke.text import token_bytes
from twostroke.text.vocabulary import Vocabulary, end_ids, errors_as_model_error

_FIX = "fetch the folder again, or save the tokenizer once more with transformers' save_pretrained"
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_folder(path: Path) -> Vocabulary:
    """Read tokenizer.json, tokenizer_config.json, special_tokens_map.json, (generation_)config.json, the template."""
    encoder = _encoder(path)
    config = _json(path / "tokenizer_config.json")
    names = _names(_json(path / "special_tokens_map.json")) | _names(config)
    added = encoder.get_added_tokens_decoder()
    named = {name: number for name, text in names.items() if (number := encoder.token_to_id(text)) is not None}
    special = {number for number, token in added.items() if token.special} | set(named.values())
    size = max((*encoder.get_vocab(with_added_tokens=True).values(), -1)) + 1
    texts = {text: number for number in special if (text := encoder.id_to_token(number)) is not None}
    prefix, suffix = _around(encoder, config, named)
    to_bytes, leading_space = _token_bytes(encoder, frozenset(special), frozenset(added))
    return Vocabulary(
        encoder=encoder,
        size=size,
        token_bytes=to_bytes,
        special_ids=frozenset(special),
        eos_ids=end_ids(_listed_ends(path, named, size), texts),
        bos_id=named.get("bos_token"),
        prefix=prefix,
        suffix=suffix,
        leading_space=leading_space,
        template=_template(path, config),
        names=names,
    )


def _encoder(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        have = " (it has a tokenizer.model, which is not read)" if (path / "tokenizer.model").exists() else ""
        raise ModelError(f"tokenizer.json: {path} has none{have}; {_FIX}")
    with errors_as_model_error(f"{file} cannot be read", _FIX):
        encoder = Tokenizer.from_file(str(file))
        encoder.no_truncation()
        encoder.no_padding()
    return encoder


def _json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file. Any other JSON value is an error."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}; {_FIX}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: must hold a JSON object, holds a {type(value).__name__}; {_FIX}")
    return value


def _names(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, …: each is a string, or an object with "content"."""
    found = {name: config.get(name) for name in _NAMES}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _listed_ends(path: Path, named: dict[str, int], size: int) -> list[int]:
    """The end ids from all four places that may name them."""
    config = _json(path / "config.json")
    inner = config.get("text_config")
    places = [_json(path / "generation_config.json"), config, inner if isinstance(inner, dict) else {}]
    listed = [named["eos_token"]] if "eos_token" in named else []
    for place in places:
        value = place.get("eos_token_id")
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
                listed.append(number)
    return listed


def _around(
    encoder: Tokenizer, config: dict[str, Any], named: dict[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens before and after a text. An explicit flag wins over the post-processor, as in transformers."""
    if "add_bos_token" in config or "add_eos_token" in config:
        sides = [
            (named[name],) if config.get(f"add_{name}") and name in named else () for name in ("bos_token", "eos_token")
        ]
        return sides[0], sides[1]
    with errors_as_model_error("tokenizer.json cannot encode", _FIX):
        bare = encoder.encode("a", add_special_tokens=False).ids
        full = encoder.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    raise ModelError(f"tokenizer.json: its post-processor does more than add tokens before and after the text; {_FIX}")


def _token_bytes(
    encoder: Tokenizer, special: frozenset[int], added: frozenset[int]
) -> tuple[Callable[[int], bytes], bool]:
    """The bytes of each token by its id, and whether decoding drops a leading space. Both follow from the file's
    decoder."""
    steps = _decoder_steps(encoder)
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        plain, leading_space = token_bytes.byte_level, False
    elif kinds & {"Metaspace", "ByteFallback", "Replace"}:
        plain, leading_space = token_bytes.sentencepiece, any(map(_strips_space, steps))
    else:
        raise ModelError(
            f"tokenizer.json: decoder {sorted(map(str, kinds)) or 'none'} is not one this engine reads (byte-level BPE "
            "and SentencePiece are); use a model of a supported family"
        )
    fallback = "ByteFallback" in kinds

    def to_bytes(number: int) -> bytes:
        text = encoder.id_to_token(number)
        if text is None:
            return b""
        if number in special or (number in added and plain is token_bytes.byte_level):
            return token_bytes.verbatim(text)
        as_byte = token_bytes.byte_token(text) if fallback else None
        return plain(text) if as_byte is None else as_byte

    return to_bytes, leading_space


def _decoder_steps(encoder: Tokenizer) -> list[dict[str, Any]]:
    decoder = encoder.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state.get("decoders", [state])
    return steps


def _strips_space(step: dict[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        return step.get("prepend_scheme", "always") != "never"
    return step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) > 0


def _template(path: Path, config: dict[str, Any]) -> str | None:
    """The chat template: from its own file, else from the configuration, which may list several by name."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {error}; {_FIX}") from error
    found = _json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(found, list):
        found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
    return found if isinstance(found, str) else None
