"""Keep a gRPC client within the limits of the service that it calls, with an interceptor.

The interceptor waits for its turn before it sends a call, so the service has nothing to deny. It
waits no longer than the call's own timeout: a call that could not be sent in time fails at once
with LimitExceeded, and is not sent in vain. The timeout itself starts when the call is sent.

The trap is a client that only repeats denied calls: each of them costs the service a request, and
all clients together keep it busy with denials.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from ratekeeper import Limiter, LimitExceeded


class PacingInterceptor(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Waits before each call until the limits of the service have room."""

    def __init__(self, limiter: Limiter, wait_max: float = 60) -> None:
        self.limiter = limiter
        self.wait_max = wait_max

    def pace(self, continuation: Any, details: grpc.ClientCallDetails, request: Any) -> Any:
        wait = self.wait_max if details.timeout is None else min(details.timeout, self.wait_max)
        decision = self.limiter.wait(details.method, timeout=wait)
        if not decision:
            raise LimitExceeded(decision)
        return continuation(details, request)

    intercept_unary_unary: Any = pace
    intercept_unary_stream: Any = pace


class Service:
    """A service that allows 50 calls a second, and counts how many it denies."""

    def __init__(self) -> None:
        self.limiter = Limiter("50/second capacity 10")
        self.denied = 0
        greet: dict[str, Any] = {"Greet": grpc.unary_unary_rpc_method_handler(self.greet)}
        self.server = grpc.server(ThreadPoolExecutor(4))
        handler = grpc.method_handlers_generic_handler("Greeter", greet)
        self.server.add_generic_rpc_handlers((handler,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def greet(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        if not self.limiter.check("everyone"):
            self.denied += 1
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls")
        return b"hello " + request


def main() -> None:
    service = Service()
    # Below the service's limit, because calls that were sent apart may arrive together.
    # store="shared://…" for all processes, "redis://…" for all machines.
    pacing = PacingInterceptor(Limiter("40/second capacity 2"))
    with grpc.insecure_channel(service.address) as plain:
        greet: Any = grpc.intercept_channel(plain, pacing).unary_unary("/Greeter/Greet")
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(greet, [b"ann"] * 12))
        print(f"{len(answers)} calls, {service.denied} denied")
        assert service.denied == 0

        hourly = PacingInterceptor(Limiter("1/hour"))
        greet = grpc.intercept_channel(plain, hourly).unary_unary("/Greeter/Greet")
        greet(b"bob", timeout=30)
        try:
            greet(b"bob", timeout=30)
        except LimitExceeded as denied:
            print(f"a call with a timeout of 30 s fails at once: {denied}")

        naive: Any = plain.unary_unary("/Greeter/Greet")
        calls = [naive.future(b"ann") for _ in range(100)]
        failures = [call for call in calls if call.exception()]
        print(f"without the interceptor: {len(failures)} of 100 calls denied")
        assert failures
    service.server.stop(grace=5).wait()


if __name__ == "__main__":
    main()
