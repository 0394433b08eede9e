"""Which requests are the same, as keyed hashes. Every part has its length before it, so two lists of parts
are not equal because they are joined."""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable
from dataclasses import fields
from hashlib import blake2b, sha256
from typing import Any

import numpy as np

from twostroke.sampling import SamplingParams

UNRELATED = frozenset({"priority", "deadline", "speculate", "retry", "given"})  # they change when an answer comes
KeyPart = str | bytes | None


def digest(secret: bytes, parts: Iterable[KeyPart], person: bytes) -> bytes:
    made = blake2b(key=secret, digest_size=24, person=person)
    for part in parts:
        data = b"" if part is None else part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        made.update(b"%d %d:" % (part is None, len(data)))
        made.update(data)
    return made.digest()


def params_text(params: SamplingParams) -> str:
    """Every sampling parameter that can change an answer."""
    values = {one.name: getattr(params, one.name) for one in fields(params) if one.name not in UNRELATED}
    return json.dumps(values, sort_keys=True, default=repr)


def exact_key(
    secret: bytes, salt: bytes, model: str, tokens: Iterable[int], params: SamplingParams, visible: frozenset[int]
) -> bytes:
    """The key of a request whose answer is determined: tenant, model, prompt tokens, sampling, and which tokens are
    shown."""
    prompt = np.fromiter(tokens, "<u4").tobytes()
    shown = ",".join(map(str, sorted(visible)))
    return digest(secret, (salt, model, prompt, params_text(params), shown), b"exact")


def context_key(secret: bytes, salt: bytes, model: str, before: Any, params: SamplingParams) -> bytes:
    """The key of everything but the last question. before: the other messages, tools, form and template arguments, as
    JSON."""
    return digest(
        secret, (salt, model, json.dumps(before, sort_keys=True, default=repr), params_text(params)), b"context"
    )


def wording_key(secret: bytes, context: bytes, wording: str) -> bytes:
    """The key of questions in one context that may differ in small words and synonyms only."""
    return digest(secret, (context, wording), b"wording")[:16]


def tenant_key(secret: bytes, salt: bytes) -> bytes:
    return digest(secret, (salt,), b"tenant")[:8]


def seal(secret: bytes, data: bytes) -> bytes:
    return hmac.new(secret, data, sha256).digest()
