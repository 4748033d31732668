"""The files of the console and of /docs: scripts, style sheets and images for browsers.

    files = console_files()             # all files in service/console/static
    files.url("console.js")             # "/console/static/8d0c…/console.js"
    await files(scope, receive, send)   # answers GET and HEAD of every path below files.prefix

`HttpService` calls it for every path below `/console/static/`, so an application only needs `url`.
A file needs no token: it contains nothing that is not in the public source.

**Caching.** The first part of a URL is the version: a hash over all files. So a browser may keep a
file for ever, and a script may import its neighbour as `./vendor/uplot.js`: the version of the URL
that it was loaded from applies. With another version in the URL (a page of another release, during
an upgrade of several nodes) the file of this release is sent, and the browser must revalidate it.

**Bounds.** Only files that were in the folder at the start are served, from memory: a path is a key
of a dict, never a path of the file system. A file is compressed at its first use, once, in a
thread. All files and their compressed forms are 4 MB.
"""

from __future__ import annotations

import asyncio
import gzip
import re
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

from ratekeeper.service.http.context import (
    RawHeader,
    Scope,
    Send,
    ServiceReply,
    no_method_detail,
    no_path_detail,
    problem_reply,
)
from ratekeeper.service.http.incoming import Receive

FOLDER: Final = Path(__file__).parents[1] / "console" / "static"
PREFIX: Final = "/console/static"
# A file of another type is not served.
TYPES: Final = {
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
REVALIDATED: Final = (b"cache-control", b"no-cache")
_FOR_EVER: Final = (b"cache-control", b"public, max-age=31536000, immutable")
_HEADERS: Final = [
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # An image that is opened as a page runs nothing.
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
]
_GZIP: Final = re.compile(rb"(?:gzip|\*)\s*(?:;\s*q\s*=\s*(?P<q>[0-9.]+)\s*)?", re.IGNORECASE)


@cache
def console_files() -> StaticFiles:
    """Return the files of the console and of /docs. The first call reads them."""
    return StaticFiles(FOLDER, PREFIX)


class StaticFiles:
    """An ASGI application that serves the files of one folder."""

    def __init__(self, folder: Path, prefix: str) -> None:
        """Read every file in the folder and below it that has one of the known types."""
        self.prefix = prefix
        self._files = {
            path.relative_to(folder).as_posix(): StaticFile(
                path.read_bytes(), [*_HEADERS, (b"content-type", TYPES[path.suffix])]
            )
            for path in sorted(folder.rglob("*"))
            if path.suffix in TYPES and path.is_file()
        }
        listed = "".join(f"{file.digest} {name}\n" for name, file in self._files.items())
        self._version = sha256(listed.encode()).hexdigest()[:16]

    def url(self, name: str) -> str:
        """Return the URL of a file. Raises KeyError if there is no such file."""
        if name not in self._files:
            raise KeyError(name)
        return f"{self.prefix}/{self._version}/{name}"

    async def __call__(self, scope: Scope, _: Receive, send: Send) -> None:
        """Answer one request."""
        reply = await self.reply(scope["method"], scope["path"], dict(scope["headers"]))
        await send_reply(reply, scope, send)

    async def reply(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> ServiceReply:
        """Return the reply to one request."""
        version, _, name = path.removeprefix(f"{self.prefix}/").partition("/")
        file = self._files.get(name)
        if file is None:
            return problem_reply(404, "NOT_FOUND", no_path_detail(path))
        if method not in ("GET", "HEAD"):
            detail = no_method_detail(method, "GET, HEAD")
            return problem_reply(405, "METHOD_NOT_ALLOWED", detail, [(b"allow", b"GET, HEAD")])
        return await file.reply(headers, _FOR_EVER if version == self._version else REVALIDATED)


class StaticFile:
    """A file in memory, or an answer that never changes."""

    def __init__(self, body: bytes, headers: Iterable[RawHeader]) -> None:
        """`headers`: those of every reply with this body."""
        self.digest = sha256(body).hexdigest()
        self._body = body
        # Weak: the compressed form has other bytes and the same meaning.
        self._etag = f'W/"{self.digest[:32]}"'.encode()
        self._headers = [*headers, (b"etag", self._etag), (b"vary", b"accept-encoding")]
        self._compressed = b""
        self._compressing = threading.Lock()

    async def reply(self, headers: Mapping[bytes, bytes], caching: RawHeader) -> ServiceReply:
        """Return the reply to a request with these headers."""
        sent = [*self._headers, caching]
        if _matches(headers.get(b"if-none-match", b""), self._etag):
            return ServiceReply(304, sent)
        if not accepts_gzip(headers.get(b"accept-encoding", b"")):
            return ServiceReply(200, sent, self._body)
        # In a thread: the largest file takes 0.1 s, and checks must not wait for it.
        body = self._compressed or await asyncio.to_thread(self._compress)
        return ServiceReply(200, [*sent, (b"content-encoding", b"gzip")], body)

    def _compress(self) -> bytes:
        with self._compressing:
            if not self._compressed:
                self._compressed = gzip.compress(self._body, mtime=0)
            return self._compressed


async def send_reply(reply: ServiceReply, scope: Scope, send: Send) -> None:
    """Send a reply, without its body if the request is HEAD."""
    length = (b"content-length", b"%d" % len(reply.body))
    headers = reply.headers if reply.status == 304 else [*reply.headers, length]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    body = b"" if scope["method"] == "HEAD" else reply.body
    await send({"type": "http.response.body", "body": body})


def accepts_gzip(accept_encoding: bytes) -> bool:
    """Return True if the value of Accept-Encoding permits gzip.

    >>> accepts_gzip(b"br, gzip;q=0.5"), accepts_gzip(b"*")
    (True, True)
    >>> accepts_gzip(b""), accepts_gzip(b"br"), accepts_gzip(b"gzip; q=0.0, br")
    (False, False, False)
    """
    for part in accept_encoding.split(b","):
        found = _GZIP.fullmatch(part.strip())
        if found is not None:
            return found["q"] is None or bool(found["q"].strip(b"0."))
    return False


def _matches(if_none_match: bytes, etag: bytes) -> bool:
    """Return True if the client has this content (RFC 9110, weak comparison)."""
    known = {part.strip().removeprefix(b"W/") for part in if_none_match.split(b",")}
    return b"*" in known or etag.removeprefix(b"W/") in known
