"""Enforce a new limit for 1 % of the users first, and then for all of them.

`rollout: 10` applies a rule to a tenth of its subjects, and the next rule to the others. A subject
that is included stays included while the percentage grows, on every node and after every restart.

The trap is a random number for each request: then every user meets the new limit now and then, and
support cannot say which users are affected.
"""

from __future__ import annotations

import random

from ratekeeper import Limiter, Request
from ratekeeper.testing import ManualClock

RULES = """
version: 1
rules:
  - {id: new, by: user, limits: 20/minute, rollout: PERCENT}
  - {id: old, by: user, limits: 100/minute}
"""
USERS = [f"user{number}" for number in range(2000)]


def included(limiter: Limiter) -> set[str]:
    return {user for user in USERS if limiter.peek(Request(user=user)).rule == "new"}


def main() -> None:
    limiter = Limiter.from_rules(RULES.replace("PERCENT", "1"), clock=ManualClock())
    before: set[str] = set()
    for percent in (1, 10, 50, 100):
        limiter.use(RULES.replace("PERCENT", str(percent)))
        now = included(limiter)
        print(f"rollout {percent:3} %: {len(now)} of {len(USERS)} users")
        assert before <= now, "no user is taken out again"
        assert abs(len(now) / len(USERS) - percent / 100) < 0.04
        before = now

    # Another process includes the same users.
    limiter.use(RULES.replace("PERCENT", "10"))
    other = Limiter.from_rules(RULES.replace("PERCENT", "10"))
    assert included(other) == included(limiter)
    # To look up one user:
    why = limiter.explain(Request(user=max(set(USERS) - included(limiter)))).rules[0].why
    print("a user who is not included:", why)

    # The trap: a random number for each request. Every user is denied now and then.
    clock = ManualClock()
    old, new = Limiter("100/minute", clock=clock), Limiter("2/minute", clock=clock)
    chance = random.Random(1)
    denied = {
        user
        for user in USERS
        for _ in range(50)
        if not (new if chance.random() < 0.1 else old).check(user)
    }
    print(f"by chance for each request: {len(denied)} of {len(USERS)} users meet the new limit")
    assert len(denied) > len(USERS) / 2


if __name__ == "__main__":
    main()
