"""Find out why a customer below its limit is rejected.

"We send 20 requests a minute, our plan has 100, and we get 429." The reply names the limit that
denied (`violated-policies`, `RateLimit-Policy`). `explain` shows all rules for such a request and
the units that each has left. It spends nothing. The usual reasons, in the order of this program:

- another limit of the same rule: 100 a minute, and also 5 a second
- another rule, which counts something else: the address, which a whole office shares
- the cost: an export counts as 25 requests, which never fit the 5 a second
- a penalty: the client did not wait after a denial, and is in a cool-down
- another rule than expected applies, or another tier: a misspelt key has the limits of strangers

With the service: `ratekeeper rules explain`, `ratekeeper quota`, and for the requests of yesterday
`ratekeeper records`, by the customer or by the X-Request-Id of the reply.
"""

from __future__ import annotations

import logging

from ratekeeper import Decision, Limiter, Request
from ratekeeper.testing import ManualClock

logging.getLogger("ratekeeper").setLevel(logging.ERROR)  # the penalty here is intended
clock = ManualClock()
limiter = Limiter.from_rules(
    """
version: 1
tiers: {default: 10/minute, business: 100/minute; 5/second}
assign: {"api_key:sk_acme": business}
rules:
  - id: keys
    by: api_key
    cost: {/export: 25, "*": 1}
    penalty: {after: 5, cooldown: 1m}
  - {id: addresses, by: ip, limits: 40/minute}
""",
    clock=clock,
)


def why_rejected(request: Request, cost: int = 1) -> str:
    """Return one line for each rule that applies, the one that denies first."""
    explanation = limiter.explain(request, cost)
    if explanation.listed:
        return f"{explanation.listed} list"
    lines = []
    for rule in explanation.applying:
        if rule.decision is None:  # the cost never fits, or the store cannot decide
            lines.append(f"rule {rule.id} fails: {rule.error}")
            continue
        decision, units = rule.decision, f"{rule.units} unit{'s' * (rule.units != 1)}"
        state = decision.penalty or ("allows" if decision else "denies")
        lines.append(
            f"rule {rule.id} {state} {units} of {rule.subject}: {decision.remaining} left of "
            f"{decision.policy}, {rule.source}, retry in {decision.retry_after:.1f} s"
        )
    return "\n  ".join(sorted(lines, key=lambda line: " allows " in line))


def send(times: int, request: Request) -> Decision:
    return [limiter.check(request) for _ in range(times)][-1]


def main() -> None:
    acme = Request(api_key="sk_acme", ip="192.0.2.1", endpoint="/orders")
    assert not send(6, acme)  # six at once: five a second is the limit
    found = why_rejected(acme)
    print("a burst:\n ", found)
    assert "0 left of 5/second" in found

    clock.advance(60)
    for number in range(8):  # colleagues behind the same address, each far below its limit
        send(5, Request(api_key=f"sk_colleague_{number}", ip="192.0.2.1", endpoint="/orders"))
    found = why_rejected(acme)
    print("the address is shared:\n ", found)
    assert found.startswith("rule addresses denies")
    assert "rule keys allows" in found

    found = why_rejected(Request(api_key="sk_acme", ip="192.0.2.9", endpoint="/export"))
    print("the cost:\n ", found)  # over HTTP a 422 and no 429, because waiting does not help
    assert "a cost of 25 can never fit 5/second" in found

    hasty = Request(api_key="sk_hasty", ip="192.0.2.7", endpoint="/orders")
    send(17, hasty)
    found = why_rejected(hasty)
    print("a penalty:\n ", found)
    assert "cooldown" in found

    found = why_rejected(Request(api_key="sk_acme ", ip="192.0.2.8", endpoint="/orders"))
    print("a misspelt key:\n ", found)
    assert "10 left of 10/minute" in found
    assert "tier default" in found


if __name__ == "__main__":
    main()
