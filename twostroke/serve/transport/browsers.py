"""Which host names this server answers to, and which web pages may call it.

A web page can make its visitor's browser send requests to a server on the visitor's own machine, where no key may be
needed. Two headers that a page cannot forge show it: `Origin` names the page's site, and `Host` is the name under which
the browser found this server, also when an attacker's DNS made that name point here.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping

from twostroke.errors import ConfigError
from twostroke.serve.transport.auth import PROBES
from twostroke.serve.transport.errors import ApiError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
ANY = "*"
HOST = re.compile(r"[A-Za-z0-9._:-]+|\*")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+|null|\*")
PREFLIGHT_SECONDS = 600  # for which a browser need not ask again


class Browsers:
    """The names and sites that are let in. bind: the address that the server listens on."""

    def __init__(self, bind: str = "127.0.0.1", hosts: Iterable[str] = (), origins: Iterable[str] = ()):
        self._hosts = {*LOOPBACK, bind.lower(), *(host.lower() for host in hosts)}
        self._any_address = is_wildcard(bind)  # this machine's addresses: no DNS name that an attacker controls
        if self._any_address:
            self._hosts.add(socket.gethostname().lower())
        self._origins = frozenset(origins)

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> dict[str, str]:
        """The headers that let a page read the answer. Raises a 421 or 403. Probes are answered under any name."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        allowed = self._origins and (origin in self._origins or ANY in self._origins)
        if path not in PROBES:
            self._check_host(headers)
            if origin and not allowed and origin.partition("://")[2] != headers.get(b"host", b"").decode("latin-1"):
                raise ApiError(
                    403,
                    f"The web site {origin[:200]} may not use this server: start it with --allow-origin {origin[:200]}",
                    param="origin", code="origin_not_allowed", reason="origin",
                )  # fmt: skip
        if not (origin and allowed):
            return {}
        shown = "retry-after, server-timing, x-request-id, x-twostroke-ignored"
        return {"access-control-allow-origin": origin, "access-control-expose-headers": shown, "vary": "origin"}

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        name = host_name(headers.get(b"host", b"").decode("latin-1"))
        if name in self._hosts or ANY in self._hosts or (self._any_address and is_address(name)):
            return
        raise ApiError(
            421,
            f"This server does not answer to the name {name[:200]!r}: start it with --allowed-host {name[:200]}, or "
            "use its address.",
            param="host", code="host_not_allowed", reason="host",
        )  # fmt: skip


def is_preflight(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser asks what a page may send."""
    return method == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers


def preflight_headers(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """The headers for a page that is let in: every method and header that it asks for. Keys are checked with the
    request itself."""
    lines = {
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": headers.get(b"access-control-request-headers", b"").decode("latin-1"),
        "access-control-max-age": str(PREFLIGHT_SECONDS),
    }
    if b"access-control-request-private-network" in headers:
        lines["access-control-allow-private-network"] = "true"
    return lines


def host_name(host: str) -> str:
    """A Host header without its port and without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        return False


def is_wildcard(bind: str) -> bool:
    return is_address(bind) and ipaddress.ip_address(bind).is_unspecified


def checked_names(hosts: Iterable[str], origins: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The values of --allowed-host and --allow-origin."""
    found = tuple(hosts), tuple(origins)
    for host in found[0]:
        if not HOST.fullmatch(host) or (":" in host and not is_address(host)):
            raise ConfigError(f"--allowed-host {host}: give a name without http:// and port, or * for every name.")
    for origin in found[1]:
        if not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--allow-origin {origin}: give a site such as https://chat.example, or * for every site."
            )
    return found
