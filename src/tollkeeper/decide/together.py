"""One request, several subjects: a user, the tenant, the address. All pass, or none is charged.

A store that is a trip away (it has `check_together`) asks for all of them in one go and, where one
denies, gives back to the others. One in this machine's memory looks first, and charges only if all
have room; should another thread get in between, it gives back too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from tollkeeper.core.model import Decision
from tollkeeper.decide.store import AsyncGate, Gate, Store

Asked = Sequence[tuple[Gate, str, int]]
AskedAsync = Sequence[tuple[AsyncGate, str, int]]


class StoreAway(Protocol):
    """What a store offers that decides several subjects in one trip."""

    def check_together(self, asked: Asked, /) -> list[Decision]: ...

    async def check_together_async(self, asked: AskedAsync, /) -> list[Decision]: ...


def check_together(store: Store | StoreAway, asked: Asked) -> list[Decision]:
    """Check (gate, subject, cost) each, on gates of `store`: one decision for each, in order.

    If any denies, nothing is spent by any. Raises CapacityError and StoreError, likewise.
    """
    away = getattr(store, "check_together", None)
    if away is not None:
        decisions: list[Decision] = away(asked)
        return decisions
    looks = [gate.peek(subject, cost) for gate, subject, cost in asked]
    if not all(looks):
        return looks
    checked: list[Decision] = []
    try:
        for gate, subject, cost in asked:
            decision = gate.check(subject, cost)
            checked.append(decision)
            if not decision.allowed:
                break
    finally:
        if len(checked) < len(asked) or not checked[-1].allowed:
            for (gate, subject, cost), decision in zip(asked, checked, strict=False):
                if decision.allowed:
                    gate.refund(subject, cost)
    return checked + looks[len(checked) :]


async def check_together_async(
    store: Store | StoreAway, asked: AskedAsync | Asked
) -> list[Decision]:
    """`check_together`, awaited: on gates of `store.async_gate`, where it has that."""
    away = getattr(store, "check_together_async", None)
    if away is None:
        return check_together(store, cast("Asked", asked))
    decisions: list[Decision] = await away(asked)
    return decisions
