"""What both vocabulary readers produce: the one shape `Tokenizer` is built from.

A tokenizer.json folder and a GGUF header say the same things in different words. Each reader translates into this
record once, so everything above it has no "if gguf".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import tokenizers

from twostroke.errors import ModelError

# End tokens that a checkpoint's own metadata often forgets to list. They count only where the vocabulary has them
# as special tokens, so a model whose text merely contains "<|end|>" is not cut short.
END_NAMES = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")


@dataclass(frozen=True)
class Vocabulary:
    """Everything a checkpoint says about its text, in ids and bytes."""

    engine: tokenizers.Tokenizer  # encodes; decoding is ours, see pieces.py
    size: int
    piece: Callable[[int], bytes]  # the bytes of one token, for 0 <= id < size
    special_ids: frozenset[int]
    eos_ids: frozenset[int]
    bos_id: int | None
    prefix: tuple[int, ...] = ()  # what add_special puts before the text
    suffix: tuple[int, ...] = ()  # and after it
    leading_space: bool = False  # SentencePiece's dummy space: encoding adds one, decoding takes it away
    template: str | None = None
    names: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token, … as chat templates know them


def end_ids(listed: Iterable[int], specials: dict[str, int]) -> frozenset[int]:
    """The ids that end a text: those the checkpoint lists, and well-known ones among its special tokens."""
    known = {specials[name] for name in END_NAMES if name in specials}
    if "<|return|>" in specials and "<|call|>" in specials:  # there "<|end|>" closes one message, not the answer
        known.discard(specials.get("<|end|>", -1))
    return frozenset(listed) | known


@contextmanager
def refusing(what: str, fix: str) -> Iterator[None]:
    """Turn any failure of the tokenizers library, its panics included, into a ModelError that says what to do."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        # A panic inside the library arrives as a BaseException of a class that cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{what}: {error}; {fix}") from error
