"""Keep a partner's limit of five requests in any window, as the partner counts them.

The partner counts requests when they arrive. A limiter decides when they leave, and the network
delays some of them more than others. The trap is a limit on sending, even a log of all requests:
those that left in two windows arrive in one.

The transport counts a request until a window after its response, because it arrives at some time
before that. `store="shared://…"` or `"redis://…"` keeps the limit for all processes or machines.
"""

from __future__ import annotations

import asyncio

import httpx

from ratekeeper import AsyncLimiter
from ratekeeper.httpx import AsyncLimitTransport

LIMIT, WINDOW = 5, 0.2  # five requests in any 200 ms
REQUESTS = 15


class Partner:
    """A server behind a network that delays the first requests, and records the arrivals."""

    def __init__(self) -> None:
        self.sent = 0
        self.arrivals: list[float] = []

    async def serve(self, _: httpx.Request) -> httpx.Response:
        self.sent += 1
        await asyncio.sleep(0.15 if self.sent <= LIMIT else 0)
        self.arrivals.append(asyncio.get_running_loop().time())
        return httpx.Response(200)

    def most_in_a_window(self) -> int:
        return max(
            sum(start <= at < start + WINDOW for at in self.arrivals) for start in self.arrivals
        )


async def call_partner(limits: str | AsyncLimiter) -> Partner:
    partner = Partner()
    network = httpx.MockTransport(partner.serve)
    transport = AsyncLimitTransport(limits, transport=network)
    async with httpx.AsyncClient(transport=transport) as client:
        calls = [client.get("http://partner.test/orders") for _ in range(REQUESTS)]
        answers = await asyncio.gather(*calls)
    assert [answer.status_code for answer in answers] == [200] * REQUESTS
    return partner


async def main() -> None:
    partner = await call_partner("5/200ms")
    print(f"a limit on arrivals: at most {partner.most_in_a_window()} requests arrive in 200 ms")
    assert partner.most_in_a_window() <= LIMIT

    # The trap: five leave at once, five more 200 ms later, and the network brings them together.
    partner = await call_partner(AsyncLimiter("5 in any 200ms"))
    print(f"a limit on sending: {partner.most_in_a_window()} requests arrive in 200 ms")
    assert partner.most_in_a_window() > LIMIT


if __name__ == "__main__":
    asyncio.run(main())
