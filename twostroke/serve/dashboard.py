"""The dashboard's files, from memory. They tell nothing of the server but whether it wants a key, so they need none."""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from twostroke.serve.errors import not_found
from twostroke.serve.http import Call
from twostroke.serve.service import Service

KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
HEADERS = {
    # No inline script or style, nothing from elsewhere, no frame around it: text of a model cannot become code here.
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
    tag: str


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
LOCKED = make_file("index.html", PAGE.data.replace(b'data-key="none"', b'data-key="required"', 1))


async def page(service: Service, call: Call) -> None:
    await send(call, LOCKED if service.keys.required else PAGE)


async def static(service: Service, call: Call) -> None:
    found = FILES.get(call.path.removeprefix("/static/"))
    if found is None:
        raise not_found(call.path)
    await send(call, found)


async def send(call: Call, file: File) -> None:
    headers = {**HEADERS, "etag": file.tag}
    if call.headers.get(b"if-none-match", b"").decode("latin-1") == file.tag:
        await call.respond(304, b"", headers, kind=file.kind)
        return
    await call.respond(200, file.data, headers, kind=file.kind)
