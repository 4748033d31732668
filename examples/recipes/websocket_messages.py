"""Limit the connections and the messages of WebSockets.

A connection counts once, when it opens: the limit of the route, by user. Each message counts for
the user, too, whichever connection it comes over. A message over the limit is answered with the
time to wait, and a client that does not stop is closed with code 1008.

The trap is a limit for each connection: a client that opens ten has ten times the messages.

Ratekeeper limits how often something happens, and not how many connections are open at once: for
that, count them in the application, and close those that send nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, WebSocket

from ratekeeper import AsyncLimiter
from ratekeeper.fastapi import RateLimit, WebRequest
from ratekeeper.testing import ManualClock

TOKENS = {"t-ann": "ann", "t-bob": "bob"}
STRIKES_MAX = 3
clock = ManualClock()  # leave it out in real code
app = FastAPI()
limit = RateLimit(app, clock=clock)  # store="shared://…" or "redis://…" in production
messages = AsyncLimiter("5/second", name="messages", clock=clock)  # the same store


def by_user(request: WebRequest) -> tuple[str, str] | None:
    user = TOKENS.get(request.header("X-Token") or "")
    return ("user", user) if user else None  # None: an invented token counts by address


@app.websocket("/chat", dependencies=[limit("10/minute", key=by_user)])
async def chat(websocket: WebSocket) -> None:
    user = TOKENS.get(websocket.headers.get("X-Token", ""))
    if user is None:
        await websocket.close(1008)  # not accepted
        return
    await websocket.accept()
    strikes = 0
    async for text in websocket.iter_text():
        decision = await messages.check(("user", user))
        if decision:
            strikes = 0  # only a client that goes on without a pause is closed
            await websocket.send_text(f"you said {text}")
            continue
        strikes += 1
        if strikes > STRIKES_MAX:
            await websocket.close(1008, f"try again in {decision.retry_after:.1f} s")
            return
        await websocket.send_text(f"too many messages, wait {decision.retry_after:.1f} s")


async def connect(token: str, *texts: str) -> list[Any]:
    """Send messages over a new connection. Return the replies, and the code that closes it."""
    events: list[dict[str, Any]] = [{"type": "websocket.receive", "text": text} for text in texts]
    client = iter([{"type": "websocket.connect"}, *events])
    replies: list[Any] = []

    async def receive() -> dict[str, Any]:
        return next(client, {"type": "websocket.disconnect", "code": 1000})

    async def send(event: Mapping[str, Any]) -> None:
        found = event.get("text"), event.get("code"), event.get("status")
        replies.extend(each for each in found if each is not None)

    scope: dict[str, Any] = {"type": "websocket", "path": "/chat", "query_string": b""}
    scope |= {"headers": [(b"x-token", token.encode())], "client": ("192.0.2.1", 4711)}
    await app({**scope, "extensions": {"websocket.http.response": {}}}, receive, send)
    return replies


async def main() -> None:
    replies = await connect("t-ann", *["hello"] * 20)
    print(*replies[4:], sep="\n")
    assert replies[:5] == ["you said hello"] * 5
    assert len(replies) == 5 + STRIKES_MAX + 1
    assert replies[-1] == 1008

    # Another connection does not help, and other users are not affected.
    assert await connect("t-ann", "hello") == ["too many messages, wait 0.2 s"]
    assert await connect("t-bob", "hello") == ["you said hello"]
    clock.advance(1)
    assert await connect("t-ann", "hello") == ["you said hello"]

    # Connections: bob has opened one, and opens nine more. The next are answered 429.
    opened = [await connect("t-bob") for _ in range(12)]
    print(f"bob opens 12 more connections: {opened.count([])} succeed")
    assert opened == [[]] * 9 + [[429]] * 3
    invented = [await connect(f"t-{number}") for number in range(20)]
    assert invented == [[1008]] * 10 + [[429]] * 10


if __name__ == "__main__":
    asyncio.run(main())
