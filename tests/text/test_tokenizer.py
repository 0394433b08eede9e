"""Text to tokens and back, from folders and from GGUF headers, with the same results as other libraries."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text import vocabularies
from tests.text.samples import TEXTS, mixtures
from twostroke.errors import InputError, ModelError
from twostroke.text.tokenizer import Tokenizer, from_folder, from_gguf

PLAIN = [*TEXTS, *mixtures(100)]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=60))
def test_round_trip_of_anything(byte_level: Tokenizer, spaced: Tokenizer, text: str) -> None:
    for tokenizer in (byte_level, spaced):
        assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "gpt-4o", "tekken"])
def test_folder_and_gguf_agree(tmp_path: Path, pre: str) -> None:
    folder = vocabularies.train_byte_level(tmp_path, pre)
    header = vocabularies.byte_level_header(folder, pre) | {"tokenizer.ggml.add_bos_token": False}
    one, other = from_folder(folder), from_gguf(header)
    for text in [*PLAIN, "<|im_start|>user\nHi<|im_end|>", "a<tool_call>b"]:
        ids = one.encode(text)
        assert ids == other.encode(text)
        assert one.decode(ids, skip_special=False) == other.decode(ids, skip_special=False)
        assert one.encode(text, parse_special=False) == other.encode(text, parse_special=False)
    assert (one.vocab_size, one.eos_ids, one.bos_id) == (other.vocab_size, other.eos_ids, other.bos_id)
    assert one.special_ids == other.special_ids
    assert [one.token_bytes(i) for i in range(one.vocab_size)] == [other.token_bytes(i) for i in range(one.vocab_size)]
    assert one.chat is not None
    assert other.chat is not None
    assert one.chat.source == other.chat.source


def test_same_as_transformers(byte_level_folder: Path, byte_level: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(byte_level_folder)
    for text in [*PLAIN, "<|im_start|>user\nHi<|im_end|>\n<tool_call>"]:
        ids = theirs(text)["input_ids"]
        assert byte_level.encode(text) == ids
        for skip in (True, False):
            decoded = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert byte_level.decode(ids, skip_special=skip) == decoded


def test_same_as_transformers_for_sentencepiece(tmp_path: Path, spaced: Tokenizer) -> None:
    """A folder in the shape of Llama 2's: a BPE with byte fallback, and a decoder that strips one space."""
    from tokenizers import decoders, processors
    from transformers import PreTrainedTokenizerFast

    engine = spaced._vocabulary.encoder
    engine.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    engine.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    ours, theirs = from_folder(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.leading_space
    for text in [*PLAIN, "<s>user</s> text", " two  spaces "]:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids == spaced.encode(text)
        decoded = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids) == decoded == spaced.decode(ids)


def test_special_tokens_are_parsed_only_when_asked(tokenizer: Tokenizer) -> None:
    special = next(iter(sorted(tokenizer.special_ids)))
    text = f"x{tokenizer.token_text(special)}y"
    assert special in tokenizer.encode(text, add_special=False)
    plain = tokenizer.encode(text, add_special=False, parse_special=False)
    assert not tokenizer.special_ids & set(plain)
    assert tokenizer.decode(plain) == text


def test_decoding_skips_special_tokens_but_not_user_defined_ones(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>a<tool_call>b<|im_end|>")
    assert byte_level.decode(ids) == "a<tool_call>b"
    assert byte_level.decode(ids, skip_special=False) == "<|im_start|>a<tool_call>b<|im_end|>"


def test_begin_token_follows_the_flags(spaced: Tokenizer, byte_level_folder: Path) -> None:
    assert spaced.encode("") == [spaced.bos_id]
    assert spaced.encode("", add_special=False) == []
    header = vocabularies.byte_level_header(byte_level_folder, "smollm")
    bos, eos = header["tokenizer.ggml.bos_token_id"], header["tokenizer.ggml.eos_token_id"]
    both = from_gguf(header | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})
    assert (both.encode("")) == [bos, eos]
    assert from_gguf(header).encode("") == []
    assert from_gguf(header | {"tokenizer.ggml.pre": "llama-bpe"}).encode("") == [bos]


@pytest.mark.parametrize(("flags", "around"), [({"add_bos_token": True}, (1, 0)), ({"add_eos_token": True}, (0, 1))])
def test_explicit_flags_of_a_folder_win(
    tmp_path: Path, byte_level_folder: Path, flags: dict[str, bool], around: tuple[int, int]
) -> None:
    config = json.loads((byte_level_folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer.json").write_bytes((byte_level_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | flags))
    tokenizer = from_folder(tmp_path)
    assert tokenizer.encode("") == [1] * around[0] + [2] * around[1]


def test_every_listed_end_token_counts(tmp_path: Path, byte_level_folder: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_level_folder / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text('{"eos_token_id": 5, "text_config": {"eos_token_id": 6}}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_start|>"}}')
    assert from_folder(tmp_path).eos_ids == {0, 1, 2, 5, 6, 7, 8}  # 0 and 2 by their well-known names


def test_chat_template_files(tmp_path: Path, byte_level_folder: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_level_folder / "tokenizer.json").read_bytes())
    assert from_folder(tmp_path).chat is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert from_folder(tmp_path).chat.source == "D"  # type: ignore[union-attr]
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert from_folder(tmp_path).chat.source == "J"  # type: ignore[union-attr]
    (tmp_path / "chat_template.jinja").write_text("F")
    assert from_folder(tmp_path).chat.source == "F"  # type: ignore[union-attr]


def test_token_bytes_and_text(byte_level: Tokenizer, spaced: Tokenizer) -> None:
    euro = byte_level.encode("€", parse_special=False)
    assert b"".join(byte_level.token_bytes(i) for i in euro) == "€".encode()
    assert byte_level.token_bytes(byte_level.vocab_size + 10) == b""  # the embedding's padding
    assert byte_level.decode([byte_level.vocab_size + 10, *euro]) == "€"
    byte = spaced.token_id("<0xE2>")
    assert byte is not None
    assert spaced.token_bytes(byte) == b"\xe2"
    assert spaced.token_text(byte) == "\ufffd"
    with pytest.raises(InputError, match="negative"):
        byte_level.token_bytes(-1)


def test_leading_space_is_real_when_text_continues(spaced: Tokenizer) -> None:
    ids = spaced.encode("the time", add_special=False)
    assert spaced.decode(ids) == "the time"
    assert spaced.decode(ids, at_start=False) == " the time"


@pytest.mark.parametrize("prompt", [None, 5, b"bytes", ["list"]])
def test_prompts_that_are_not_text(byte_level: Tokenizer, prompt: object) -> None:
    with pytest.raises(InputError, match="prompt"):
        byte_level.encode(prompt)  # type: ignore[arg-type]


def test_half_a_surrogate_pair_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InputError, match="surrogate"):
        byte_level.encode("ab\ud800c")


def test_threads_share_a_tokenizer(byte_level_folder: Path) -> None:
    tokenizer = from_folder(byte_level_folder)
    text = "<|im_end|> once upon a time"
    expected = {flag: tokenizer.encode(text, parse_special=flag) for flag in (True, False)}
    wrong: list[object] = []

    def work(flag: bool) -> None:
        wrong.extend(1 for _ in range(200) if tokenizer.encode(text, parse_special=flag) != expected[flag])

    threads = [threading.Thread(target=work, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_tokenizer_json(
    tmp_path_factory: pytest.TempPathFactory, byte_level_folder: Path, data: st.DataObject
) -> None:
    """Bytes flipped or cut: either a ModelError, or a tokenizer that works (the change met text inside a string)."""
    good = bytearray((byte_level_folder / "tokenizer.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "tokenizer.json").write_bytes(good[: data.draw(st.sampled_from([len(good), len(good) // 2]))])
    with suppress(ModelError):
        from_folder(folder).decode(from_folder(folder).encode("Once upon 12\n"))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", "\xff"),
        ("special_tokens_map.json", "[" * 100_000),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'),
        ("tokenizer.json", ""),
    ],
)
def test_damaged_folder_files(tmp_path: Path, byte_level_folder: Path, file: str, text: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_level_folder / "tokenizer.json").read_bytes())
    (tmp_path / file).write_text(text, encoding="latin-1")
    with pytest.raises(ModelError):
        from_folder(tmp_path)


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json.*save_pretrained"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"tokenizer\.model"):
        from_folder(tmp_path)
