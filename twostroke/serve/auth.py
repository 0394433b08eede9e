"""Who calls. Denies by default, before a route is looked up; every key is compared in full, in constant time."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from twostroke.errors import ConfigError
from twostroke.serve.errors import ApiError

OPEN_PATHS = frozenset({"/", "/health/live", "/health/ready"})
STATIC = "/static/"  # files that tell nothing of this server
MIN_KEY = 8  # characters; shorter ones can be guessed
MAX_KEY = 512


class Caller(NamedTuple):
    """`name` for the log, `salt` for the prefix cache: keys never share cached prompts."""

    name: str
    salt: bytes


class Keys:
    """The API keys that open this server; none at all leaves it open."""

    def __init__(self, keys: Iterable[str]):
        self._secret = secrets.token_bytes(32)
        self._known = [(self._digest(key.encode()), caller(key)) for key in keys]

    def _digest(self, key: bytes) -> bytes:
        return blake2b(key, key=self._secret).digest()

    @property
    def required(self) -> bool:
        return bool(self._known)

    def identify(self, headers: Mapping[bytes, bytes]) -> Caller | None:
        """Who sent these headers, or None."""
        if not self._known:
            return Caller("anybody", b"")
        offered = self._digest(offered_key(headers))
        found = None
        for digest, who in self._known:  # all of them, always: time tells nothing
            if hmac.compare_digest(digest, offered):
                found = who
        return found

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> Caller:
        if path in OPEN_PATHS or path.startswith(STATIC):
            return Caller("anybody", b"")
        who = self.identify(headers)
        if who is None:
            message = "A valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            raise ApiError(401, message, code="invalid_api_key", reason="unauthorized")
        return who


def offered_key(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()[:MAX_KEY]
    return headers.get(b"x-api-key", b"").strip()[:MAX_KEY]


def caller(key: str) -> Caller:
    """A name that does not give the key away, and a salt that only this key leads to."""
    name = blake2b(key.encode(), digest_size=4, person=b"name").hexdigest()
    return Caller(f"key {name}", blake2b(key.encode(), digest_size=16, person=b"salt").digest())


def read_keys(key: str | None, file: Path | None) -> list[str]:
    """Keys of the command line: one given directly, or a file with one on each line (# starts a comment)."""
    keys = [] if key is None else [key]
    if file is not None:
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {file}: cannot be read: {error}.") from None
        keys += [text for line in lines if (text := line.partition("#")[0].strip())]
        if not keys:
            raise ConfigError(f"--api-key-file {file}: holds no key; write one on each line.")
    for one in keys:
        if not MIN_KEY <= len(one) <= MAX_KEY or not one.isascii() or not one.isprintable() or " " in one:
            raise ConfigError(f"an API key must have {MIN_KEY} to {MAX_KEY} printable ASCII characters and no space.")
    return keys
