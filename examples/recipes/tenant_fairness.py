"""Share the capacity of a service fairly, so that no tenant can crowd out the others.

Three rules decide together: what the service can do in all, what one tenant may have of it, and
what one user of a tenant may have. A request that its tenant's limit denies costs nothing in the
total, so a flood from one tenant leaves the rest to the others. The tenant's limit is above its
equal share: a tenant that is alone may use more than that.

An attacker registers many trial tenants, and each has a limit. So all trials together have one too.

The trap is a limit on the total alone, or one that is checked first: the requests that a flood
sends in vain then use up what the others need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ratekeeper import Limiter, Request
from ratekeeper.testing import ManualClock

RULES = """
version: 1
rules:
  - {id: users, by: [tenant, user], limits: 20/second capacity 5}
  - {id: tenants, by: tenant, limits: 30/second capacity 10}
  - {id: trials, match: {tier: trial}, by: tier, limits: 20/second capacity 5}
  - {id: total, by: [], limits: 100/second capacity 20}
"""
QUIET = ["acme", "initech", "hooli", "globex"]
SECONDS = 5


def simulate(allows: Callable[[Request], bool], clock: ManualClock) -> Counter[str]:
    """Return the requests a second that pass: two floods of 2,000 and four tenants with 10 each."""
    flood = [Request(tenant="flood", user=f"user{n}") for n in range(20)]
    trials = [Request(tenant=f"trial{n}", user="eve", tier="trial") for n in range(20)]
    passed: Counter[str] = Counter()
    for tick in range(SECONDS * 100):
        requests = flood + trials
        if tick % 10 == 9:
            requests = requests + [Request(tenant=tenant, user="ann") for tenant in QUIET]
        for request in requests:
            passed[request.tier or request.tenant or ""] += allows(request)
        clock.advance(0.01)
    return Counter({name: round(count / SECONDS) for name, count in passed.items()})


def main() -> None:
    clock = ManualClock()
    limiter = Limiter.from_rules(RULES, clock=clock)
    fair = simulate(lambda request: bool(limiter.check(request)), clock)
    print("all rules:       ", dict(fair))
    assert all(fair[tenant] == 10 for tenant in QUIET), "the quiet tenants get all they ask for"
    assert fair["flood"] <= 32
    assert fair["trial"] <= 21, "twenty trial tenants are no better off than one"

    # The trap: the total first, and then the tenant, with two limiters in a row.
    total = Limiter("100/second capacity 20", clock=clock)
    tenants = Limiter("30/second capacity 10", by=["tenant"], clock=clock)
    naive = simulate(
        lambda request: bool(total.check("all")) and bool(tenants.check(request)), clock
    )
    print("the total first: ", dict(naive))
    assert all(naive[tenant] <= 3 for tenant in QUIET)


if __name__ == "__main__":
    main()
