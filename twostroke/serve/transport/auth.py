"""API keys. Every path needs one except those listed here. The check is done before the route is looked up."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from twostroke.errors import ConfigError
from twostroke.serve.transport.errors import ApiError

PROBES = frozenset({"/health/live", "/health/ready"})
OPEN_PATHS = PROBES | {"/"}
STATIC = "/static/"  # the dashboard's files, which hold nothing about this server
MIN_KEY = 8  # characters; shorter keys can be guessed
MAX_KEY = 512


class Caller(NamedTuple):
    """The sender of a request: a name for the log, and a salt that keeps its cached prompts apart from other keys'."""

    name: str
    salt: bytes


ANONYMOUS = Caller("anonymous", b"")


class Keys:
    """The API keys of this server. With none, every request is accepted."""

    def __init__(self, keys: Iterable[str]):
        self._secret = secrets.token_bytes(32)
        self._known = [(self._digest(key.encode()), caller(key)) for key in keys]

    def _digest(self, key: bytes) -> bytes:
        return blake2b(key, key=self._secret).digest()

    @property
    def required(self) -> bool:
        return bool(self._known)

    def identify(self, headers: Mapping[bytes, bytes]) -> Caller | None:
        """The caller that these headers belong to; None without a valid key."""
        if not self._known:
            return ANONYMOUS
        offered = self._digest(offered_key(headers))
        found = None
        for digest, known in self._known:  # always compares with every key, so that the time taken reveals nothing
            if hmac.compare_digest(digest, offered):
                found = known
        return found

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> Caller:
        if path in OPEN_PATHS or path.startswith(STATIC):
            return ANONYMOUS
        found = self.identify(headers)
        if found is None:
            message = "A valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            raise ApiError(401, message, code="invalid_api_key", reason="unauthorized")
        return found


def offered_key(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()[:MAX_KEY]
    return headers.get(b"x-api-key", b"").strip()[:MAX_KEY]


def caller(key: str) -> Caller:
    """The name and the salt are hashes of the key: they do not reveal it."""
    name = blake2b(key.encode(), digest_size=4, person=b"name").hexdigest()
    return Caller(f"key {name}", blake2b(key.encode(), digest_size=16, person=b"salt").digest())


def read_keys(key: str | None, file: Path | None) -> list[str]:
    """The keys of the command line: one given directly, and those of a file, one on each line (# starts a comment)."""
    keys = [] if key is None else [key]
    if file is not None:
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {file}: cannot be read: {error}.") from None
        keys += [text for line in lines if (text := line.partition("#")[0].strip())]
        if not keys:
            raise ConfigError(f"--api-key-file {file}: holds no key; write one on each line.")
    for key in keys:
        if not MIN_KEY <= len(key) <= MAX_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"an API key must have {MIN_KEY} to {MAX_KEY} printable ASCII characters and no space.")
    return keys
