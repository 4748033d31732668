"""A decorated function: two messages per minute from each sender; longer ones cost more."""

from __future__ import annotations

import sys

from ratekeeper import Limiter, LimitExceeded
from ratekeeper.testing import ManualClock

clock = ManualClock()  # so that this example does not take a minute; omit it in real code
limiter = Limiter("2/minute", clock=clock)


@limiter.limit(key=lambda sender, _: sender, cost=lambda _, text: 1 + len(text) // 100)
def send(sender: str, text: str) -> str:
    return f"{sender}: {text}"


print(send("ann", "hello"))
print(send("bob", "hello"))
print(send("ann", "hello again"))
try:
    send("ann", "and again")
except LimitExceeded as denied:
    wait = denied.decision.retry_after
else:
    sys.exit("the third message within a minute went through")

print(f"ann has to wait {wait:g} s")
clock.advance(wait)
print(send("ann", "and again"))
