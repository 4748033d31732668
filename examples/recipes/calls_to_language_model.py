"""Call a language model whose provider limits both requests and tokens, and never get a 429.

The provider counts a request in both limits at once, so wait for both at once: `evaluate_all`
charges all or nothing. The trap is to wait for one limiter and then for another. A call then takes
its place in the first long before it is sent, and the requests that queue up meanwhile reach the
provider together.

Tokens are reserved at the most that the call may use and settled when its usage is known. A call
that would wait for longer than WAIT_S_MAX raises LimitExceeded, and is not sent.
"""

from __future__ import annotations

import asyncio

from ratekeeper import AsyncLimiter, Limiter, LimitExceeded, Request
from ratekeeper.testing import ManualClock

PROVIDER = """
version: 1
rules:
  - {id: requests, match: {attributes: {unit: requests}}, by: api_key, limits: 60/minute capacity 5}
  - {id: tokens, match: {attributes: {unit: tokens}}, by: api_key, limits: 9000/minute}
"""
WAIT_S_MAX = 120.0
REQUESTS = Request(api_key="sk_1", attributes={"unit": "requests"})
TOKENS = Request(api_key="sk_1", attributes={"unit": "tokens"})

clock = ManualClock()  # so that this program does not take minutes; leave it out in real code
# In production with store="redis://…", for all machines. While Redis is away, "local" limits by the
# counts of this machine; the default would send without any limit.
limiter = AsyncLimiter.from_rules(PROVIDER, clock=clock, on_failure="local")


async def call(prompt: str, tokens_max: int) -> int:
    """Send a prompt as soon as both limits have room. Return the tokens that it has used."""
    left = WAIT_S_MAX
    while True:
        results = await limiter.evaluate_all([(REQUESTS, 1), (TOKENS, tokens_max)])
        slowest = max((result.decision for result in results), key=lambda each: each.retry_after)
        if slowest.retry_after == 0:
            break
        left -= slowest.retry_after
        if left < 0:
            raise LimitExceeded(slowest)
        await limiter.clock.sleep_async(slowest.retry_after)
    used = tokens_max  # of a call that fails: the provider may have counted all of it
    try:
        used = await provider(prompt, tokens_max)
    finally:
        await limiter.settle(TOKENS, tokens_max, used, results[1].decision)
    return used


# The provider counts for itself. It answers 429 to a request that is over a limit.
counts = Limiter.from_rules(PROVIDER, clock=clock)
refused: list[str] = []


async def provider(prompt: str, tokens_max: int) -> int:
    results = counts.evaluate_all([(REQUESTS, 1), (TOKENS, tokens_max)])
    refused.extend(result.decision.rule for result in results if not result.decision)
    used = len(prompt)
    counts.settle(TOKENS, tokens_max, used, results[1].decision)
    return used


async def main() -> None:
    used = await asyncio.gather(*(call("tell me a story", tokens_max=2000) for _ in range(40)))
    seconds = clock.now_ns() / 1e9
    print(f"{len(used)} calls, {sum(used)} tokens in {seconds:.0f} s, {len(refused)} refused")
    assert refused == []
    assert seconds >= 35  # five at once, and then one every second

    # The trap: five calls take their place in one limit, and then wait a minute for the other.
    requests = Limiter("60/minute capacity 5", clock=clock)
    clock.advance(60)
    sent = [requests.check("sk_1") for _ in range(5)]
    clock.advance(60)
    sent += [requests.check("sk_1") for _ in range(5)]
    answers = [counts.check(REQUESTS) for decision in sent if decision]
    print(f"one limit after the other: {len(answers)} calls at once, 5 are allowed")
    assert (len(answers), sum(map(bool, answers))) == (10, 5)


if __name__ == "__main__":
    asyncio.run(main())
