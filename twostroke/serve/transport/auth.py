"""API keys: user keys and admin keys. Every path needs a key except those listed here, and the paths of `ADMIN` need an
admin key. The check is done before the route is looked up."""

from __future__ import annotations

import hmac
import ipaddress
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
ADMIN = "/twostroke/"  # settings, steps, arrivals, diagnosis: they show or change what concerns all keys
SHORT_KEY = 8  # characters; shorter keys can be guessed
MAX_KEY = 512
HOW = "start the server with --admin-key KEY (or TWOSTROKE_ADMIN_KEY, or --admin-key-file)"


class Caller(NamedTuple):
    """The sender of a request: a name for the log, and a salt that keeps its cached prompts apart from other keys'."""

    name: str
    salt: bytes
    admin: bool = False
    number: int = 0  # of its key, from 1; 0 where there are fewer than two keys: no other key to be fair to


ANONYMOUS = Caller("anonymous", b"")
LOCAL = Caller("anonymous", b"", admin=True)  # from this machine, on a server without keys


class Keys:
    """The keys of this server. An admin key is also a user key. With no key at all every request is accepted, and
    requests from this machine are the admin's."""

    def __init__(self, keys: Iterable[str], admin_keys: Iterable[str] = ()):
        self._secret = secrets.token_bytes(32)
        admins = dict.fromkeys(admin_keys)
        known = [*(key for key in dict.fromkeys(keys) if key not in admins), *admins]
        self._known = [
            (self._digest(key.encode()), caller(key, key in admins, number if len(known) > 1 else 0))
            for number, key in enumerate(known, 1)
        ]
        self.has_admin = bool(admins)

    def _digest(self, key: bytes) -> bytes:
        return blake2b(key, key=self._secret).digest()

    @property
    def required(self) -> bool:
        return bool(self._known)

    def identify(self, headers: Mapping[bytes, bytes], peer: str = "") -> Caller | None:
        """The caller that these headers belong to; None without a valid key. peer: the address they came from."""
        if not self._known:
            return LOCAL if is_loopback(peer) else ANONYMOUS
        offered = self._digest(offered_key(headers))
        found = None
        for digest, known in self._known:  # always compares with every key, so that the time taken reveals nothing
            if hmac.compare_digest(digest, offered):
                found = known
        return found

    def check(self, path: str, headers: Mapping[bytes, bytes], peer: str = "") -> Caller:
        if path in OPEN_PATHS or path.startswith(STATIC):
            return ANONYMOUS
        found = self.identify(headers, peer)
        if found is None:
            message = "A valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            raise ApiError(401, message, code="invalid_api_key", reason="unauthorized")
        if path.startswith(ADMIN):
            self.require_admin(found, path[:200])
        return found

    def require_admin(self, found: Caller, what: str, param: str | None = None) -> None:
        """403 for a caller that is not the admin. what: the path, or the field with its value."""
        if found.admin:
            return
        if self.has_admin:
            message, code = f"{what}: needs an admin key; the key that was sent is a user key.", "admin_key_needed"
        elif self.required:
            message, code = f"{what}: needs an admin key, and this server has none: {HOW}.", "no_admin_key"
        else:
            message = f"{what}: a server without keys takes this from its own machine only: {HOW}."
            code = "no_admin_key"
        raise ApiError(403, message, param=param, code=code, reason="forbidden")


def offered_key(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()[:MAX_KEY]
    return headers.get(b"x-api-key", b"").strip()[:MAX_KEY]


def caller(key: str, admin: bool = False, number: int = 0) -> Caller:
    """The name and the salt are hashes of the key: they do not reveal it."""
    name = blake2b(key.encode(), digest_size=4, person=b"name").hexdigest()
    salt = blake2b(key.encode(), digest_size=16, person=b"salt").digest()
    return Caller(f"{'admin ' if admin else ''}key {name}", salt, admin, number)


def is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def read_keys(key: str | None, file: Path | None, option: str = "--api-key-file") -> list[str]:
    """The keys of the command line: one given directly, and those of a file, one on each line (# starts a comment)."""
    keys = [] if key is None else [key]
    if file is not None:
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{option} {file}: cannot be read: {error}.") from None
        keys += [text for line in lines if (text := line.partition("#")[0].strip())]
        if not keys:
            raise ConfigError(f"{option} {file}: holds no key; write one on each line.")
    for key in keys:
        if not 1 <= len(key) <= MAX_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"an API key must have 1 to {MAX_KEY} printable ASCII characters and no space.")
    return keys
