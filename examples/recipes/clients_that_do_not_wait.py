"""Slow down clients that ignore Retry-After, and notify the operators.

A rule with `penalty` gives a client that goes on after denials a cool-down, in which all its
requests are denied. Each further one is twice as long, and after some of them the client is blocked
for a while. The cool-downs are in the store, so they hold on every node.

Nothing happens to a client that waits, however often it is denied. The trap is a ban after the
first denials: it hits the client with a burst, and every client after an outage.

A penalty is for the subject of the rule. Count by something that an attacker cannot choose: with
`by: user` and a name that the client sends, it could have another user blocked.
"""

from __future__ import annotations

import logging

from ratekeeper import Limiter, Request
from ratekeeper.testing import ManualClock

logging.getLogger("ratekeeper").setLevel(logging.ERROR)  # each penalty is a line of the log
clock = ManualClock()
limiter = Limiter.from_rules(
    """
version: 1
rules:
  - id: api
    by: api_key
    limits: 5/second
    penalty: {after: 20, within: 10s, cooldown: 10s, cooldown_max: 1m, block_after: 4, block: 1h}
""",
    clock=clock,
)
alerts: list[str] = []
limiter.on_penalty(
    lambda penalty: alerts.append(
        f"{penalty.subject} is {'blocked' if penalty.blocked else 'held'} for {penalty.seconds} s"
    )
)


def main() -> None:
    patient = Request(api_key="sk_patient")
    admitted = denied = 0
    while clock.now_ns() < 60e9:
        decision = limiter.check(patient)
        admitted, denied = admitted + decision.allowed, denied + (not decision)
        clock.advance(decision.retry_after)
    print(f"a client that waits: {admitted} requests in a minute, {denied} denials, no penalty")
    assert admitted >= 300
    assert alerts == []

    hasty = Request(api_key="sk_hasty")
    admitted = 0
    for _ in range(6000):  # a hundred requests a second for a minute
        admitted += limiter.check(hasty).allowed
        clock.advance(0.01)
    print(f"a client that does not: {admitted} requests in a minute")
    print(*alerts, sep="\n")
    assert admitted < 60
    assert alerts[0] == "api_key:sk_hasty is held for 10 s"
    assert alerts[-1] == "api_key:sk_hasty is blocked for 3600 s"

    # The answer to the client says so, and `reset` forgives on every node.
    decision = limiter.check(hasty)
    assert decision.penalty == "block"
    assert limiter.check(patient), "others are not affected"
    limiter.reset(hasty)
    assert limiter.check(hasty)


if __name__ == "__main__":
    main()
