"""Limit a gRPC service in Python with an interceptor.

A denied call gets RESOURCE_EXHAUSTED and `grpc-retry-pushback-ms` in its trailing metadata. Every
gRPC client with a retry policy reads it and tries again after that time, without any code.

Two traps: a synchronous server calls interceptors in the one thread that accepts all calls. A check
on Redis there would hold up every client, so the interceptor wraps the handler, and the check runs
in the handler's thread. And a key that the client made up must not get a quota of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_network
from typing import Any
from urllib.parse import unquote

import grpc

from ratekeeper import Limiter

CUSTOMERS = {"sk_1": "ann", "sk_2": "bob"}
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def address_of(peer: str) -> str:
    """Return the host of ipv4:192.0.2.1:4711, the /64 of ipv6:[2001:db8::1]:4711, or "unix"."""
    host = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]").partition("%")[0]
    # A client has all 2^64 addresses of its IPv6 network.
    return str(ip_network((host, 64), strict=False)) if ":" in host else host or "unix"


class RateLimitInterceptor(grpc.ServerInterceptor):
    """Charges each call to the customer with this API key, else to the address of the client."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = continuation(details)
        if handler is None:
            return None  # the method is unknown
        kind = next(kind for kind in KINDS if getattr(handler, kind))
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        limited = self.limited(getattr(handler, kind), details.method)
        return make(limited, handler.request_deserializer, handler.response_serializer)

    def limited(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        def serve(request: Any, context: grpc.ServicerContext) -> Any:
            key: Any = dict(context.invocation_metadata()).get("x-api-key")
            client = CUSTOMERS.get(key) or address_of(context.peer())
            decision = self.limiter.check((client, method))
            if not decision:
                wait_ms = -(-decision.retry_after_ns // 1_000_000)  # rounded up
                context.set_trailing_metadata((("grpc-retry-pushback-ms", str(wait_ms)),))
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"try again in {wait_ms} ms")
            return behaviour(request, context)

        return serve


# Service and client: messages are plain bytes here. Generated code works the same way.
def greet(request: bytes, _context: grpc.ServicerContext) -> bytes:
    return b"hello " + request


GREETER: dict[str, Any] = {"Greet": grpc.unary_unary_rpc_method_handler(greet)}
POLICY = {"maxAttempts": 5, "initialBackoff": "1s", "maxBackoff": "1s", "backoffMultiplier": 1}
POLICY["retryableStatusCodes"] = ["RESOURCE_EXHAUSTED"]
PATIENT = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": POLICY}]})


def main() -> None:
    interceptor = RateLimitInterceptor(Limiter("10/second capacity 2"))
    server = grpc.server(ThreadPoolExecutor(4), interceptors=[interceptor])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Greeter", GREETER),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()

    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_unary("/Greeter/Greet")
        keys = [f"sk_invented_{number}" for number in range(20)]
        calls = [call.future(b"eve", metadata=[("x-api-key", key)]) for key in keys]
        denied = [call for call in calls if call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED]
        wait_ms = dict(denied[0].trailing_metadata())["grpc-retry-pushback-ms"]
        assert address_of("ipv6:%5B2001:db8::1%5D:4711") == "2001:db8::/64"
        print(f"{len(denied)} of 20 calls with invented keys are denied, for {wait_ms} ms")

    with grpc.insecure_channel(address, options=[("grpc.service_config", PATIENT)]) as channel:
        call = channel.unary_unary("/Greeter/Greet")
        answers = [call(b"bob", metadata=[("x-api-key", "sk_2")]) for _ in range(6)]
    print(f"{len(answers)} of 6 calls of a client with a retry policy pass")
    assert answers == [b"hello bob"] * 6
    server.stop(grace=5).wait()


if __name__ == "__main__":
    main()
