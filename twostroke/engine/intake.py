"""From what a caller asks to `Request`s: everything is checked here, before the engine allocates anything."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from twostroke.config import Resolved
from twostroke.errors import InputError
from twostroke.grammar.check import GrammarChecker
from twostroke.grammar.compile import GrammarCompiler
from twostroke.sampling import SamplingParams, is_whole, mix
from twostroke.text.encode import LongTextError
from twostroke.text.tokenizer import Tokenizer, from_folder, from_gguf
from twostroke.types import Request
from twostroke.weights.checkpoint import Checkpoint

Prompt = str | Sequence[int]
COUNTER_BITS = 24  # of an id: 16 million requests before a new prefix is drawn
PREFIX_BITS = 29


class RequestIds:
    """Ids that no other front end gives out: a random prefix and a counter, in the 53 bits up to which JSON numbers are
    exact. The samples of one prompt get ids in a row."""

    def __init__(self, prefix: int | None = None):
        """prefix: None draws one; 0 where no other front end can reach the engine."""
        self.prefix = secrets.randbits(PREFIX_BITS) if prefix is None else prefix
        self.count = 0

    def take(self, count: int) -> int:
        """The first of so many ids in a row."""
        if self.count + count > 1 << COUNTER_BITS:
            self.prefix, self.count = secrets.randbits(PREFIX_BITS), 0
        first = self.prefix << COUNTER_BITS | self.count
        self.count += count
        return first


class Intake:
    """`grammars` decides whether a grammar can be used: a GrammarCompiler where the model runs in this process, else a
    GrammarChecker (the default). `ids`: where several front ends may share an engine, ids of its own. `defaults`: how
    the model samples where the caller says nothing about it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: Resolved,
        vocab: int,
        grammars: GrammarCompiler | GrammarChecker | None = None,
        ids: RequestIds | None = None,
        defaults: Mapping[str, float] | None = None,
    ):
        self.tokenizer = tokenizer
        self.settings = settings
        self.vocab = vocab
        self.grammars = grammars or GrammarChecker(tokenizer, vocab)
        self.ids = ids or RequestIds(0)
        self.defaults = dict(defaults or {})
        self.requests_made = 0

    def tokenize(self, prompt: Prompt, *, add_special: bool = True) -> list[int]:
        if isinstance(prompt, str):
            try:
                tokens = self.tokenizer.encode(prompt, add_special=add_special, limit=self.settings.max_model_len)
            except LongTextError as error:
                raise self._too_long(error.count) from None
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes) and all(is_whole(t) for t in prompt):
            tokens = [int(token) for token in prompt]
        else:
            raise InputError(f"a prompt must be a string or a list of token ids, got {type(prompt).__name__}.")
        self._check(tokens)
        return tokens

    def _check(self, tokens: list[int]) -> None:
        if not tokens:
            raise InputError("the prompt is empty: give at least one token.")
        for token in tokens:
            if not 0 <= token < self.vocab:
                raise InputError(f"token id {token} is outside the vocabulary (0 to {self.vocab - 1}).")
        if len(tokens) >= self.settings.max_model_len:
            raise self._too_long(len(tokens))

    def _too_long(self, count: int) -> InputError:
        limit, why = self.settings.max_model_len, self.settings.reasons.get("max_model_len", "max_model_len")
        return InputError(f"the prompt has {count} tokens, but prompt and answer must fit {limit} ({why}): shorten it.")

    def prepare(self, params: SamplingParams) -> None:
        """Check what depends on the model. A new grammar may take seconds: call this before taking a lock."""
        params.check_vocabulary(self.vocab)
        if params.grammar is not None:
            if not self._stop_ids(params):
                raise InputError("grammar: this model has no end token to finish with; give stop_token_ids.")
            self.grammars.prepare(params.grammar)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        if params.ignore_eos and params.grammar is None:  # a grammar's text ends when nothing can follow
            return frozenset(params.stop_token_ids)
        return frozenset(params.stop_token_ids) | {token for token in self.tokenizer.eos_ids if token < self.vocab}

    def requests(self, tokens: list[int], params: SamplingParams, arrival: float, salt: bytes = b"") -> list[Request]:
        """The n samples of one prompt, each a request of its own."""
        self.prepare(params)
        return self.make(tokens, params, arrival, salt)

    def make(
        self, tokens: list[int], params: SamplingParams, arrival: float, salt: bytes = b"", key: int = 0
    ) -> list[Request]:
        """The same for params that were prepared before. It is fast."""
        limit = self.settings.max_model_len
        if len(tokens) >= limit:  # the engine has no room for more
            raise self._too_long(len(tokens))
        params = params.with_defaults(self.defaults)
        stop_ids = self._stop_ids(params)
        if params.max_tokens is not None:
            limit = min(limit, len(tokens) + params.max_tokens)
        first = self.ids.take(params.n)
        if not self.settings.prefix_cache:
            salt += b"request %d" % first  # the samples of one call still share their prompt
        seed = params.seed if params.seed is not None else mix(self.settings.seed ^ mix(self.requests_made))
        self.requests_made += params.n
        return Request(first, tuple(tokens), params, seed, arrival, limit, stop_ids, salt, key=key).siblings(params.n)


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.kind == "gguf":
        return from_gguf(checkpoint.config)
    return from_folder(checkpoint.path)
