"""One request to the service, as its handlers see it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final, NamedTuple

from tollkeeper.edge.service.replies import Refusal, Reply, problem_reply, refused_reply
from tollkeeper.edge.service.tokens import Need, Refused, Token, confined
from tollkeeper.model import Request

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


async def read_body(receive: Receive, length: bytes | None, bytes_max: int) -> bytes:
    """The body, if it has no more than so many bytes. Raises Refusal (413), ClientGone."""
    declared = int(length) if length is not None and length.isdigit() and len(length) < 19 else -1
    message = await receive()
    body: bytes = message.get("body", b"")
    # A server may say `more_body` because it has not looked whether the end comes next.
    if len(body) == declared and declared <= bytes_max:
        return body
    size = len(body)
    chunks = [body]
    while message.get("more_body"):
        message = await receive()
        chunk = message.get("body", b"")
        size += len(chunk)
        if size <= bytes_max and declared <= bytes_max:
            chunks.append(chunk)
        elif max(size, declared) > _DROPPED_BYTES_MAX:
            break
    if message["type"] == "http.disconnect":
        raise ClientGone
    if max(size, declared) > bytes_max:
        raise Refusal(
            problem_reply(413, "BODY_TOO_LARGE", f"a body has at most {bytes_max:,} bytes here")
        )
    return b"".join(chunks)
