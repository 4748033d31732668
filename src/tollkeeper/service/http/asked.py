"""One request to the service, as its handlers see it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final, NamedTuple

from tollkeeper.core.model import Request
from tollkeeper.service.http.replies import Refusal, Reply, problem_reply, refused_reply
from tollkeeper.service.http.tokens import Need, Refused, Token, confined

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# A body that is too large is still read, and dropped, if it ends soon: a client that is cut off
# while it writes does not read the answer.
_DROPPED_BYTES_MAX: Final = 8 * 1024 * 1024


class Asked(NamedTuple):
    """Who asks, and what for. Of headers that are given twice, the last."""

    scope: Scope
    headers: Mapping[bytes, bytes]
    body: bytes
    token: Token


class Endpoint(NamedTuple):
    """What answers at a path: how, for whom, and how much it reads."""

    handle: Callable[[Asked], Awaitable[Reply]]
    need: Need | None = None
    """What a token has to be for; None: nobody asks."""
    body_bytes_max: int = 0
    """0: it has none, and what is sent is not read."""


class ClientGone(Exception):
    """The client has closed the connection; there is nobody to answer."""


def in_scope(token: Token, request: Request) -> Request:
    """The request, confined to the token's scope. Raises Refusal."""
    found = confined(token, request)
    if isinstance(found, Refused):
        raise Refusal(refused_reply(found))
    return found


async def rest_of_body(
    receive: Receive, message: Message, headers: Mapping[bytes, bytes], bytes_max: int
) -> bytes:
    """The whole body, from its first message on. Raises Refusal (413), ClientGone."""
    length = headers.get(b"content-length", b"")
    declared = int(length) if length.isdigit() and len(length) < 19 else -1
    chunks: list[bytes] = [message.get("body", b"")]
    size = len(chunks[0])
    while message.get("more_body") and max(size, declared) <= _DROPPED_BYTES_MAX:
        message = await receive()
        chunk = message.get("body", b"")
        size += len(chunk)
        if max(size, declared) <= bytes_max:
            chunks.append(chunk)
    if message["type"] == "http.disconnect":
        raise ClientGone
    if max(size, declared) > bytes_max:
        raise Refusal(
            problem_reply(413, "BODY_TOO_LARGE", f"a body has at most {bytes_max:,} bytes here")
        )
    return b"".join(chunks)
