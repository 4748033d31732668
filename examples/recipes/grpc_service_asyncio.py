"""Limit a gRPC service on asyncio with an interceptor.

The server awaits its interceptors, so the check can be made here, before the handler runs. A
denied call gets one handler for all four kinds of methods: it answers RESOURCE_EXHAUSTED without
reading the request, with `grpc-retry-pushback-ms` for clients that have a retry policy.

A call of an unknown method is not counted: a client can invent methods, and each would fill a place
in the store. The server answers UNIMPLEMENTED.

The trap is a `Limiter` in place of the `AsyncLimiter`: on Redis it would block the event loop, and
with it all other calls, for the time of each check.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from ratekeeper import AsyncLimiter, Decision

CUSTOMERS = {"sk_1": "ann", "sk_2": "bob"}


class RateLimitInterceptor(aio.ServerInterceptor):
    """Charges each call to the customer with this API key; all other clients share a quota."""

    def __init__(self, limiter: AsyncLimiter) -> None:
        self.limiter = limiter

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None  # the method is unknown
        key: Any = dict(details.invocation_metadata).get("x-api-key")
        decision = await self.limiter.check((CUSTOMERS.get(key, "anonymous"), details.method))
        return handler if decision else denial(decision)


def denial(decision: Decision) -> Any:
    async def deny(_requests: Any, context: Any) -> None:
        wait_ms = -(-decision.retry_after_ns // 1_000_000)  # rounded up
        context.set_trailing_metadata((("grpc-retry-pushback-ms", str(wait_ms)),))
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"try again in {wait_ms} ms")

    return grpc.stream_stream_rpc_method_handler(deny)


async def greet(request: bytes, _context: Any) -> bytes:
    return b"hello " + request


async def count(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
    for number in (b"1", b"2", b"3"):
        yield number


HANDLERS: dict[str, Any] = {
    "Greet": grpc.unary_unary_rpc_method_handler(greet),
    "Count": grpc.unary_stream_rpc_method_handler(count),
}


async def main() -> None:
    limiter = AsyncLimiter("2/hour")
    server = aio.server(interceptors=[RateLimitInterceptor(limiter)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Greeter", HANDLERS),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    metadata = [("x-api-key", "sk_1")]
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        greeting: Any = channel.unary_unary("/Greeter/Greet")
        counting: Any = channel.unary_stream("/Greeter/Count")
        for _ in range(2):
            assert await greeting(b"ann", metadata=metadata) == b"hello ann"
            assert [number async for number in counting(b"", metadata=metadata)][-1] == b"3"
        for call in (greeting(b"ann", metadata=metadata), counting(b"", metadata=metadata)):
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            pushback = dict(await call.trailing_metadata())["grpc-retry-pushback-ms"]
            print(f"{await call.details()} ({pushback})")
            assert 1_790_000 < int(pushback) <= 1_800_000  # the next of two an hour
        assert await greeting(b"bob", metadata=[("x-api-key", "sk_2")]) == b"hello bob"
        invented: Any = channel.unary_unary("/Greeter/Invented")
        assert await invented(b"").code() is grpc.StatusCode.UNIMPLEMENTED
        assert (await limiter.peek(("anonymous", "/Greeter/Invented"))).remaining == 2
    await server.stop(grace=5)


if __name__ == "__main__":
    asyncio.run(main())
