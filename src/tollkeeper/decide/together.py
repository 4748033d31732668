"""Several subjects of one request, decided in memory: all pass, or none is charged.

`check_in_turn` looks at every subject first and charges only if all of them have room. Another
thread may spend in between. Then the units that were already charged are refunded.

A store on another machine decides all subjects in one round trip instead (`RedisStore`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tollkeeper.core.model import Decision
from tollkeeper.decide.store import GateCheck


def check_in_turn(checks: Sequence[GateCheck]) -> list[Decision]:
    """Check each (gate, subject, cost) on gates that answer at once; return their decisions.

    If any check is denied, nothing is spent by any. Raises CapacityError and StoreError; nothing
    is spent then either.
    """
    looks = [gate.peek(subject, cost) for gate, subject, cost in checks]
    if not all(looks):
        return looks
    checked: list[Decision] = []
    try:
        for gate, subject, cost in checks:
            decision = gate.check(subject, cost)
            checked.append(decision)
            if not decision.allowed:
                break
    finally:
        if checks and (len(checked) < len(checks) or not checked[-1].allowed):
            for (gate, subject, cost), decision in zip(checks, checked, strict=False):
                if decision.allowed:
                    gate.refund(subject, cost)
    return checked + looks[len(checked) :]
