"""Extra quota for one customer: granted, used once the limit is spent, and expired in time."""

from __future__ import annotations

import sys

from ratekeeper import Limiter
from ratekeeper.testing import ManualClock

clock = ManualClock()  # so that this example does not take an hour; omit it in real code
limiter = Limiter("10/minute", clock=clock)


def admitted(key: str, requests: int) -> int:
    return sum(bool(limiter.check(key)) for _ in range(requests))


limiter.grant("customer:7", 25, ttl=3600)
print("remaining:", limiter.peek("customer:7").remaining)

got = [admitted("customer:7", 100)]  # its 10 and the 25
clock.advance(60)
got.append(admitted("customer:7", 100))  # its 10

limiter.grant("customer:7", 25, ttl=3600)
clock.advance(3600)
got.append(admitted("customer:7", 100))  # its 10: the second grant ran out unused

got.append(admitted("customer:8", 100))  # a grant is for one customer alone
print("admitted:", got)
sys.exit(0 if got == [35, 10, 10, 10] else "expected [35, 10, 10, 10]")
