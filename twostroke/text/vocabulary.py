"""The record that both vocabulary readers make and that `Tokenizer` is built from.

A tokenizer.json folder and a GGUF header hold the same facts in different forms. Each reader translates them into this
record, so the code above it does not depend on the file format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import tokenizers

from twostroke.errors import ModelError
from twostroke.record import Record

# End tokens that the metadata of checkpoints often omits. They count only where the vocabulary has them as special
# tokens, so a model that writes "<|end|>" as plain text is not cut short.
END_NAMES = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")


class Vocabulary(Record):
    """What a checkpoint says about its text, in ids and bytes."""

    encoder: tokenizers.Tokenizer  # encodes only; token_bytes.py says how decoding is done
    size: int
    token_bytes: Callable[[int], bytes]  # the bytes of one token, for 0 <= id < size
    special_ids: frozenset[int]
    eos_ids: frozenset[int]
    bos_id: int | None
    prefix: tuple[int, ...] = ()  # what add_special puts before the text
    suffix: tuple[int, ...] = ()  # what it puts after the text
    leading_space: bool = False  # SentencePiece's: encoding adds one space, decoding removes it
    template: str | None = None
    names: dict[str, str] = {}  # noqa: RUF012  # bos_token, eos_token, … for chat templates


def end_ids(listed: Iterable[int], specials: dict[str, int]) -> frozenset[int]:
    """The ids that end a text: those the checkpoint lists, and well-known ones among its special tokens."""
    known = {specials[name] for name in END_NAMES if name in specials}
    if "<|return|>" in specials and "<|call|>" in specials:  # in these "<|end|>" closes a message, not the answer
        known.discard(specials.get("<|end|>", -1))
        known |= {specials["<|return|>"], specials["<|call|>"]}
    return frozenset(listed) | known


@contextmanager
def errors_as_model_error(what: str, fix: str) -> Iterator[None]:
    """Turn every failure of the tokenizers library, panics included, into a ModelError that says what to do."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        # A panic in the library is a BaseException of a class that cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{what}: {error}; {fix}") from error
