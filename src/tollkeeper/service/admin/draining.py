"""A body that nobody wants is read to its end, and dropped, before its request is refused.

Many clients write all of a body before they read a word. If the answer comes first and the
connection is closed, they are told of a broken pipe and never see why. So what is left of a body is
taken in and forgotten, if it ends soon. What says that it is much longer is not waited for, and
neither is a client that asked whether to send it at all (`Expect: 100-continue`). Strangers get
this courtesy too, so it has a bound: where many do not end, the next are answered at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

DROPPED_BYTES_MAX: Final = 8 * 2**20
DROPPING_SECONDS_MAX: Final = 5.0
# Of the requests that a worker answers at a time (`BACKPRESSURE`), so many may wait for this.
DROPPING_MAX: Final = 64


class Draining:
    """An application, whose answers wait for the end of what was sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._dropping = 0

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
            if message["type"] == "http.response.start" and not ended:
                await self._drop(rest)
            await send(message)

        async def rest() -> None:
            dropped = 0
            while not ended and dropped <= DROPPED_BYTES_MAX:
                dropped += len((await received()).get("body", b""))

        await self._app(scope, received, send_at_the_end)

    async def _drop(self, rest: Callable[[], Awaitable[None]]) -> None:
        if self._dropping >= DROPPING_MAX:
            return
        self._dropping += 1
        try:
            async with asyncio.timeout(DROPPING_SECONDS_MAX):
                await rest()
        except TimeoutError:
            return
        finally:
            self._dropping -= 1


def _is_worth_it(scope: Scope) -> bool:
    """Has it a body that is not too long, and that is on its way already?"""
    headers = dict(scope["headers"])
    if b"expect" in headers:
        return False
    length: bytes = headers.get(b"content-length", b"")
    if length:
        return len(length) < 19 and length.isdigit() and 0 < int(length) <= DROPPED_BYTES_MAX
    return b"transfer-encoding" in headers
