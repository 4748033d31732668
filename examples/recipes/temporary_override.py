"""Raise the limits of one customer for a week, with a reason, and have it end by itself.

An override has an end (`until`), so no operator has to remove it. It has a reason and an author,
which `explain` shows. Of several overrides, that of a user goes before that of an API key, a tenant
and an address.

For units that are used up once, such as an import that failed half way, use `grant` instead.

The trap is to edit the number of the rule: every customer gets it, and it is still there next year.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from ratekeeper import Limiter, Request
from ratekeeper.testing import ManualClock

MONDAY = datetime(2026, 3, 2, 9, tzinfo=UTC)
RULES = {
    "version": 1,
    "rules": [{"id": "api", "by": ["tenant"], "limits": ["100/hour"]}],
}
LAUNCH = {
    "id": "acme-launch",
    "for": {"tenant": "acme"},
    "multiply": 5,
    "until": (MONDAY + timedelta(days=7)).isoformat(),
    "reason": "launch week, ticket 4711",
    "author": "ann@shop.example",
}


def passed(limiter: Limiter, tenant: str) -> int:
    return sum(bool(limiter.check(Request(tenant=tenant))) for _ in range(600))


def main() -> None:
    clock = ManualClock(MONDAY.timestamp())
    limiter = Limiter.from_rules(RULES, clock=clock)
    acme = Request(tenant="acme")
    assert passed(limiter, "acme") == 100

    # With rules in a database, on all nodes within a second:
    #   ratekeeper override create tenant:acme --multiply 5 --for 7d --reason 'launch week'
    limiter.use({**RULES, "overrides": [LAUNCH]})
    # What acme has spent this hour stays spent: it has 400 of 500 left.
    launched, others = passed(limiter, "acme"), passed(limiter, "initech")
    print(f"acme gets {launched} more, and the others {others} as before")
    assert (launched, others) == (400, 100)

    rule = limiter.explain(acme).rules[0]
    assert rule.override is not None
    print(f"why: {rule.source}, until {rule.override.until:%d %B}: {rule.override.reason}")
    assert rule.source == "override tenant:acme"

    # The override ends by itself.
    clock.advance(timedelta(days=7).total_seconds())
    assert passed(limiter, "acme") == 100
    print("a week later: 100 again,", limiter.explain(acme).rules[0].source)

    # The import of initech failed, so it gets 50 units back for today, once.
    assert passed(limiter, "initech") == 100
    limiter.grant(Request(tenant="initech"), 50, ttl=86400)
    assert passed(limiter, "initech") == 50
    clock.advance(3600)
    assert passed(limiter, "initech") == 100, "an hour later it has its hourly units, and no more"


if __name__ == "__main__":
    main()
