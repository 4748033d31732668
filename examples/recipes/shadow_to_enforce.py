"""Measure which clients a stricter limit would deny, and then enforce it.

A rule in shadow mode is decided and counted like any other, and changes no answer. When its figures
look right, `mode: enforce` puts it into force with the counts that it has. `replaces` names the
rule whose place it takes.

The trap is to estimate the new limit from averages. Below, all three customers send 30 requests a
minute, but one of them sends its 30 in one second, which an average does not show.
"""

from __future__ import annotations

from collections import Counter

from ratekeeper import Limiter, Request
from ratekeeper.testing import ManualClock

RULES = """
version: 1
rules:
  - {id: stricter, by: tenant, limits: 60/minute capacity 10, mode: MODE, replaces: api}
  - {id: api, by: tenant, limits: 1000/minute}
"""
MINUTES = 5
clock = ManualClock()  # leave it out in real code
limiter = Limiter.from_rules(RULES.replace("MODE", "shadow"), clock=clock)


def traffic() -> tuple[Counter[str], Counter[str]]:
    """Return how many requests of each tenant were denied, and how many would be."""
    denied: Counter[str] = Counter()
    would_be_denied: Counter[str] = Counter()
    for second in range(60 * MINUTES):
        senders = ["steady", "also-steady"] * (second % 2)
        senders += ["bursts"] * (30 if second % 60 == 0 else 0)
        for tenant in senders:
            result = limiter.evaluate(Request(tenant=tenant))
            denied[tenant] += not result.decision
            would_be_denied[tenant] += "stricter" in result.shadow_denied
        clock.advance(1)
    return denied, would_be_denied


def main() -> None:
    # Measure. `counts` has the sum. With the service, the console shows it by customer, and
    # `ratekeeper rules preview` replays recorded requests without any rule in shadow mode.
    denied, would_be = traffic()
    print("shadow:", dict(+would_be))
    assert not +denied
    assert +would_be == {"bursts": 20 * MINUTES}
    assert limiter.counts()["stricter"].shadow_denied == 20 * MINUTES

    # This customer needs its burst, and not a higher rate. Correct the limit and measure again.
    better = RULES.replace("capacity 10", "capacity 30")
    limiter.use(better.replace("MODE", "shadow"))
    clock.advance(60)
    denied, would_be = traffic()
    print("shadow, with a larger burst:", dict(+would_be))
    assert not +denied
    assert not +would_be

    # Enforce. In a database: ratekeeper rules promote stricter
    limiter.use(better.replace("MODE", "enforce"))
    denied, _ = traffic()
    print("enforced:", dict(+denied))
    assert not +denied
    flood = [limiter.check(Request(tenant="flood")) for _ in range(1000)]
    assert sum(map(bool, flood)) == 30
    assert {decision.rule for decision in flood} == {"stricter"}


if __name__ == "__main__":
    main()
