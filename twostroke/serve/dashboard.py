"""The dashboard's files, held in memory. They say nothing about the server except which kind of key it asks for, so
they are served without one."""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from twostroke.serve.service import Service
from twostroke.serve.transport.errors import not_found
from twostroke.serve.transport.http import Exchange

KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
HEADERS = {
    # No inline script or style, nothing from other hosts, no frames: text from a model cannot run as code.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


class File(NamedTuple):
    data: bytes
    kind: str
    tag: str  # the ETag


def make_file(name: str, data: bytes) -> File:
    return File(data, KINDS[name.rpartition(".")[2]], f'"{blake2b(data, digest_size=12).hexdigest()}"')


def read_files(folder: Traversable, prefix: str = "") -> dict[str, File]:
    found: dict[str, File] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= read_files(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in KINDS:
            found[prefix + entry.name] = make_file(entry.name, entry.read_bytes())
    return found


FILES = read_files(files("twostroke.serve") / "static")
PAGE = FILES.pop("index.html")
PAGES = {
    kind: make_file("index.html", PAGE.data.replace(b'data-key="none"', f'data-key="{kind}"'.encode(), 1))
    for kind in ("none", "user", "admin")
}


async def page(service: Service, exchange: Exchange) -> None:
    keys = service.keys
    kind = "admin" if keys.has_admin else "user" if keys.required else "none"  # the best key that there is to ask for
    await send(exchange, PAGES[kind])


async def static(service: Service, exchange: Exchange) -> None:
    found = FILES.get(exchange.path.removeprefix("/static/"))
    if found is None:
        raise not_found(exchange.path)
    await send(exchange, found)


async def send(exchange: Exchange, file: File) -> None:
    headers = {**HEADERS, "etag": file.tag}
    if exchange.headers.get(b"if-none-match", b"").decode("latin-1") == file.tag:
        await exchange.respond(304, b"", headers, kind=file.kind)
        return
    await exchange.respond(200, file.data, headers, kind=file.kind)
