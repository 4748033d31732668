"""Limit uploads by their size, and believe no size that a client claims.

A unit is a KiB. Each upload is charged before its body is read: by its Content-Length, or by the
largest size if it has none (chunked). Then the real bytes are counted as they arrive: a body that
grows beyond the charge is cut off with 413, and one that is smaller is settled to its size. Bytes
that were received are charged, also if the client goes away: it has used the line.

The trap is to charge by Content-Length alone. A chunked upload has none, so it costs nothing, and
Content-Length is text that a client writes: "-1", "1e9" or nothing of the kind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import httpx
from fastapi import FastAPI, HTTPException, Request

from ratekeeper.fastapi import Charge, RateLimit, WebRequest
from ratekeeper.testing import ManualClock

KIB = 1024
UPLOAD_MAX = 400  # KiB
app = FastAPI()
limit = RateLimit(app, clock=ManualClock())  # store="redis://…" in production


def kib(size: int) -> int:
    return max(1, -(-size // KIB))  # rounded up: an empty file costs a unit


def claimed(request: WebRequest) -> int:
    """Return the units of Content-Length, and those of the largest upload without a valid one."""
    text = request.header("Content-Length") or ""
    is_number = text.isascii() and text.isdigit() and len(text) < 16
    return min(kib(int(text)), UPLOAD_MAX) if is_number else UPLOAD_MAX


per_user = limit("1000/hour", key="header:X-User", cost=claimed)  # from a verified session


@app.post("/files")
async def upload(request: Request, charge: Annotated[Charge, per_user]) -> int:
    charged, size = charge.units, 0
    assert isinstance(charged, int)  # `claimed` returns a number, not costs by unit
    async for piece in request.stream():
        size += len(piece)
        if kib(size) > charged:
            charge.settle(charged)  # all of it. The rest of the body is not read.
            raise HTTPException(413, f"more than the {charged} KiB that were announced or allowed")
        charge.settle(kib(size))  # write the piece to its place here
    return size


async def chunked(size: int) -> AsyncIterator[bytes]:
    """Without a Content-Length, httpx sends chunks."""
    for start in range(0, size, 64 * KIB):
        yield bytes(min(64 * KIB, size - start))


async def main() -> None:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://files.test") as client:

        async def send(user: str, content: bytes | AsyncIterator[bytes], **more: str) -> int:
            headers = {"X-User": user, **{key.replace("_", "-"): more[key] for key in more}}
            answer = await client.post("/files", content=content, headers=headers)
            return answer.status_code

        codes = [await send("ann", bytes(300 * KIB)) for _ in range(4)]
        print(f"ann sends 4 files of 300 KiB: {codes}")
        assert codes == [200, 200, 200, 429]
        assert await send("ann", bytes(90 * KIB)) == 200, "a smaller file still fits"

        # Chunked: 400 KiB are reserved, and 1 KiB is charged. So a hundred small files pass.
        codes = [await send("bob", chunked(KIB)) for _ in range(100)]
        assert codes == [200] * 100
        # Large ones are charged whole, and one that is too large is cut off, and charged.
        codes = [await send("eve", chunked(size * KIB)) for size in (300, 5000, 300, 300)]
        print(f"eve sends chunks of 300, 5,000 and 300 KiB: {codes}")
        assert codes == [200, 413, 429, 429]

        # A body is cut off at the size in its header. An invalid size counts as the largest.
        assert await send("mallory", bytes(200 * KIB), Content_Length="1000") == 413
        assert await send("mallory", bytes(KIB), Content_Length="-1") == 200
        assert await send("mallory", bytes(KIB), Content_Length="9" * 30) == 200


if __name__ == "__main__":
    asyncio.run(main())
