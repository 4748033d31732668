"""A body that nobody wants is read to its end, and dropped, before its request is refused.

Many clients write all of a body before they read a word. If the answer comes first and the
connection is closed, they are told of a broken pipe and never see why. So what is left of a body is
taken in and forgotten, if it ends soon. What says that it is much longer is not waited for, and
neither is a client that asked whether to send it at all (`Expect: 100-continue`).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

DROPPED_BYTES_MAX: Final = 8 * 2**20
DROPPING_SECONDS_MAX: Final = 5.0


class Draining:
    """An application, whose answers wait for the end of what was sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or not _is_worth_it(scope):
            await self._app(scope, receive, send)
            return
        ended = False

        async def received() -> Message:
            nonlocal ended
            message = await receive()
            ended = not message.get("more_body", False)
            return message

        async def send_at_the_end(message: Message) -> None:
            if message["type"] == "http.response.start":
                dropped = 0
                with suppress(TimeoutError):
                    async with asyncio.timeout(DROPPING_SECONDS_MAX):
                        while not ended and dropped <= DROPPED_BYTES_MAX:
                            dropped += len((await received()).get("body", b""))
            await send(message)

        await self._app(scope, received, send_at_the_end)


def _is_worth_it(scope: Scope) -> bool:
    """Has it a body that is not too long, and that is on its way already?"""
    headers = dict(scope["headers"])
    if b"expect" in headers:
        return False
    length: bytes = headers.get(b"content-length", b"")
    if length:
        return len(length) < 19 and length.isdigit() and 0 < int(length) <= DROPPED_BYTES_MAX
    return b"transfer-encoding" in headers
