"""The gRPC server in this process, and a client for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from tollkeeper import AsyncLimiter
from tollkeeper.decide.failure import FailurePolicy
from tollkeeper.service.envoy.protocol.messages import SERVICE, RateLimitRequest, RateLimitResponse
from tollkeeper.service.envoy.server import METHOD, Handle, Tls, start
from tollkeeper.service.http.tokens import Tokens
from tollkeeper.web.answers import Style

ADDRESS = "127.0.0.1:0"

Ask = Callable[..., Awaitable[RateLimitResponse]]


@dataclass
class Settings:
    """What the server reads of a worker's settings."""

    style: Style = field(default_factory=Style)


@dataclass
class Node:
    """A worker as the server sees it."""

    limiter: AsyncLimiter
    tokens: Tokens | None = None
    settings: Settings = field(default_factory=Settings)


@dataclass
class Serving:
    """A server that runs, and its limiter."""

    limiter: AsyncLimiter
    handle: Handle

    @property
    def target(self) -> str:
        """Where clients find it."""
        return f"127.0.0.1:{self.handle.port}"


@asynccontextmanager
async def serving(
    rules: Any,
    *,
    tokens: Tokens | None = None,
    tls: Tls | None = None,
    on_failure: FailurePolicy = "open",
    **options: Any,
) -> AsyncIterator[Serving]:
    """A server with these rules for the length of a block; `options` are the limiter's."""
    async with AsyncLimiter.from_rules(rules, on_failure=on_failure, **options) as limiter:
        handle = await start(Node(limiter, tokens), ADDRESS, tls, on_failure=on_failure)
        try:
            yield Serving(limiter, handle)
        finally:
            await handle.stop(0)


@asynccontextmanager
async def asking(target: str, **metadata: str) -> AsyncIterator[Ask]:
    """A function that asks the server; `metadata` goes with each call."""
    async with grpc.aio.insecure_channel(target) as channel:
        yield ask_on(channel, **metadata)


def ask_on(channel: Any, **metadata: str) -> Ask:
    """A function that asks over a channel."""
    call = channel.unary_unary(
        f"/{SERVICE}/{METHOD}",
        request_serializer=RateLimitRequest.SerializeToString,
        response_deserializer=RateLimitResponse.FromString,
    )

    async def ask(
        *descriptors: dict[str, Any], timeout: float = 10, **fields: Any
    ) -> RateLimitResponse:
        asked: dict[str, Any] = {"domain": "shop", **fields}
        message = RateLimitRequest(descriptors=descriptors, **asked)
        found: RateLimitResponse = await call(
            message, timeout=timeout, metadata=list(metadata.items())
        )
        return found

    return ask


def entries(*pairs: tuple[str, str], **others: Any) -> dict[str, Any]:
    """A descriptor of keys and values."""
    return {"entries": [{"key": key, "value": value} for key, value in pairs], **others}


def codes(response: RateLimitResponse) -> list[str]:
    """The codes of the whole and of each descriptor, in words."""
    names = {RateLimitResponse.OK: "OK", RateLimitResponse.OVER_LIMIT: "OVER_LIMIT"}
    return [names[response.overall_code], *(names[each.code] for each in response.statuses)]


def headers(response: RateLimitResponse) -> dict[str, str]:
    """The headers that the client is sent."""
    return {each.key: each.value for each in response.response_headers_to_add}
