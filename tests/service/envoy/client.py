"""The gRPC server in this process, and a client that calls it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from ratekeeper import AsyncLimiter
from ratekeeper.decide.failure import FailurePolicy
from ratekeeper.metrics.counters import Counters
from ratekeeper.service.envoy.protocol.messages import SERVICE, RateLimitRequest, RateLimitResponse
from ratekeeper.service.envoy.server import METHOD, EnvoyServer, start
from ratekeeper.service.grpc.calls import Bounds, TlsFiles
from ratekeeper.service.grpc.server import IMPLEMENTATION, Implementation
from ratekeeper.service.http.context import WorkerSettings
from ratekeeper.service.http.envoys import EnvoyDirectory
from ratekeeper.service.http.tokens import Tokens
from ratekeeper.web.answers import Style

ADDRESS = "127.0.0.1:0"

Ask = Callable[..., Awaitable[RateLimitResponse]]


@dataclass
class FakeContext:
    """As much of a worker as the server needs."""

    limiter: AsyncLimiter
    tokens: Tokens | None = None
    settings: WorkerSettings = field(default_factory=lambda: WorkerSettings(Style()))
    counters: Counters = field(default_factory=Counters)
    recorder: Any = None
    node_id: str = "host-1"
    node_header: str = "test-1"
    envoys: EnvoyDirectory = field(init=False)

    def __post_init__(self) -> None:
        self.envoys = EnvoyDirectory(self.limiter)


@dataclass
class Serving:
    """A running server and its limiter."""

    limiter: AsyncLimiter
    handle: EnvoyServer
    context: FakeContext

    @property
    def target(self) -> str:
        """The address for clients."""
        return f"127.0.0.1:{self.handle.port}"


@asynccontextmanager
async def serving(
    rules: Any,
    *,
    tokens: Tokens | None = None,
    tls: TlsFiles | None = None,
    on_failure: FailurePolicy = "open",
    bounds: Bounds | None = None,
    on: Implementation = IMPLEMENTATION,
    address: str = ADDRESS,
    **options: Any,
) -> AsyncIterator[Serving]:
    """Run a server with these rules; `options` are the limiter's."""
    async with AsyncLimiter.from_rules(rules, on_failure=on_failure, **options) as limiter:
        context = FakeContext(limiter, tokens)
        handle = await start(context, address, tls, on_failure=on_failure, bounds=bounds, on=on)
        try:
            yield Serving(limiter, handle, context)
        finally:
            await handle.stop(0)


@asynccontextmanager
async def grpc_client(target: str, **metadata: str) -> AsyncIterator[Ask]:
    """Yield a function that calls the server; `metadata` is sent with each call."""
    async with grpc.aio.insecure_channel(target) as channel:
        yield caller_on(channel, **metadata)


def caller_on(channel: Any, **metadata: str) -> Ask:
    """Return a function that calls the server over a channel."""
    call = channel.unary_unary(
        f"/{SERVICE}/{METHOD}",
        request_serializer=RateLimitRequest.SerializeToString,
        response_deserializer=RateLimitResponse.FromString,
    )

    async def ask(
        *descriptors: dict[str, Any], timeout: float = 10, **fields: Any
    ) -> RateLimitResponse:
        values: dict[str, Any] = {"domain": "shop", **fields}
        message = RateLimitRequest(descriptors=descriptors, **values)
        found: RateLimitResponse = await call(
            message, timeout=timeout, metadata=list(metadata.items())
        )
        return found

    return ask


def entries(*pairs: tuple[str, str], **others: Any) -> dict[str, Any]:
    """Return a descriptor of keys and values."""
    return {"entries": [{"key": key, "value": value} for key, value in pairs], **others}


def codes(response: RateLimitResponse) -> list[str]:
    """Return the names of the codes: of the request, and of each descriptor."""
    names = {RateLimitResponse.OK: "OK", RateLimitResponse.OVER_LIMIT: "OVER_LIMIT"}
    return [names[response.overall_code], *(names[each.code] for each in response.statuses)]


def headers(response: RateLimitResponse) -> dict[str, str]:
    """Return the headers for the client."""
    return {each.key: each.value for each in response.response_headers_to_add}
