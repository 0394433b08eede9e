"""Tokens that a grammar leaves no choice about, as drafts: the keys of a JSON schema, the frame of a tool call."""

from __future__ import annotations

from twostroke.grammar.masks import GrammarRows
from twostroke.text.tokenizer import Tokenizer
from twostroke.types import RequestState

BYTES = 128  # the part of a forced text that is tokenized: more than one draft can take


class ForcedTokens:
    """The forced bytes of an answer, as the tokenizer would cut them. The model may choose another cut: then the draft
    is wrong, and its own choice stands. The last token is left out, since it may reach into what follows."""

    def __init__(self, rows: GrammarRows, tokenizer: Tokenizer):
        self.rows = rows
        self.tokenizer = tokenizer

    def __call__(self, request: RequestState) -> list[int]:
        forced = self.rows.forced_bytes(request)[:BYTES]
        if len(forced) < 2:
            return []
        text = forced.decode("utf-8", "ignore")
        return self.tokenizer.encode(text, add_special=False, parse_special=False)[:-1]
