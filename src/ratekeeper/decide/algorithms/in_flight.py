"""Requests in flight: at most `limit` at the same time, each for at most the window.

A request takes a *slot*, and frees it when it ends. The client names the slot by a *stamp*, a
random number. So both steps may be repeated: taking a slot that the stamp has already is a renewal,
and freeing it twice frees no other request's. A client that does not know whether it got a slot,
because the reply was lost, frees it by the stamp. The slot of a client that died ends by itself,
one window after it was taken or renewed.

A request takes one slot, whatever its cost. A cost of 0, or no stamp, takes none.

The state is (taken_ns, slots): the time at which the last slot was taken, and the end of each slot
by its stamp. A time before taken_ns counts as that one. A slot whose end has come is free; it stays
in the state until another one is taken.

When the next request ends is not known. In a steady stream, as many requests end as begin, so the
time until one ends is about the time since one began. `retry_after_ns` is that guess, at least
RETRY_MIN_NS, and at most the time until the first slot ends by itself. If it was too early, the
next guess is about twice as long: so a client that waits alone asks a few times, and waits at most
about twice as long as it has to.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final, NamedTuple, NoReturn

from ratekeeper.core.errors import ConfigError
from ratekeeper.core.model import IN_FLIGHT, Limit
from ratekeeper.decide.algorithms.outcome import Outcome

State = tuple[int, dict[int, int]] | None

RETRY_MIN_NS: Final = 10_000_000
STAMP_MAX: Final = 2**53 - 1
"""Lua is exact up to here."""
NO_STAMP: Final = 0


def new_stamp() -> int:
    """Return a stamp: two of a million requests agree with a probability of one in 9,000."""
    return secrets.randbelow(STAMP_MAX) + 1


def has_slots(limits: Sequence[Limit]) -> bool:
    """Return True if one of the limits counts requests in flight."""
    return any(limit.algorithm == IN_FLIGHT for limit in limits)


class Slots(NamedTuple):
    """What a decision needs to know of a state. Times count from the epoch."""

    taken_ns: int
    """When the last slot was taken."""
    used: int
    """Slots that have not ended."""
    first_ns: int = 0
    """When the first of these ends; 0 if there is none."""
    last_ns: int = 0
    """When the last of these ends; 0 if there is none."""
    own_ns: int = 0
    """When the slot of the stamp ends; 0 if it has none."""


def outcome_of_slots(slots: Slots, limit: Limit, now_ns: int, cost: int, stamp: int) -> Outcome:
    """Return the outcome of a check."""
    at_ns = max(now_ns, slots.taken_ns)
    room = max(limit.limit - slots.used, 0)
    reset_ns = slots.last_ns - now_ns if slots.used else 0
    if cost == 0:
        return Outcome(True, room, 0, reset_ns, 0)
    if not room and not slots.own_ns:
        guess_ns = at_ns + max(at_ns - slots.taken_ns, RETRY_MIN_NS)
        return Outcome(False, 0, min(guess_ns, slots.first_ns) - now_ns, reset_ns, 0)
    if stamp == NO_STAMP:
        return Outcome(True, max(room - 1, 0), 0, reset_ns, 0)
    reset_ns = max(slots.last_ns, at_ns + limit.window_ns) - now_ns
    return Outcome(True, room if slots.own_ns else room - 1, 0, reset_ns, 0, at_ns)


class InFlight:
    """The algorithm for one request: with its stamp."""

    __slots__ = ("stamp",)

    def __init__(self, stamp: int = NO_STAMP) -> None:
        self.stamp = stamp

    def decide(self, state: State, limit: Limit, now_ns: int, cost: int) -> tuple[State, Outcome]:
        """Take a slot for the stamp if one is free, or renew the one that it has."""
        taken_ns, slots = state or (now_ns, {})
        at_ns = max(now_ns, taken_ns)
        live = {stamp: ends_ns for stamp, ends_ns in slots.items() if ends_ns > at_ns}
        own_ns = live.get(self.stamp, 0)
        found = Slots(taken_ns, len(live), 0, 0, own_ns)
        if live:
            found = Slots(taken_ns, len(live), min(live.values()), max(live.values()), own_ns)
        outcome = outcome_of_slots(found, limit, now_ns, cost, self.stamp)
        if outcome.charged_ns is None:
            return state, outcome
        ends_ns = at_ns + limit.window_ns
        if own_ns:
            return (taken_ns, slots | {self.stamp: max(own_ns, ends_ns)}), outcome
        return (at_ns, live | {self.stamp: ends_ns}), outcome

    def refund(
        self,
        state: State,
        limit: Limit,  # noqa: ARG002 - every algorithm has the same signature
        now_ns: int,
        units: int,  # noqa: ARG002 - likewise
        charged_ns: int | None,  # noqa: ARG002 - likewise
    ) -> State:
        """Free the slot of the stamp, if it has one."""
        if state is None:
            return state
        taken_ns, slots = state
        left = {stamp: ends_ns for stamp, ends_ns in slots.items() if stamp != self.stamp}
        in_use = any(ends_ns > max(now_ns, taken_ns) for ends_ns in left.values())
        return (taken_ns, left) if in_use else None

    def owe(self, state: State, limit: Limit, now_ns: int, units: int) -> tuple[State, int]:  # noqa: ARG002 - likewise
        """Return the state: a cost that is known late takes no slot."""
        return state, 0

    def debt_of(self, state: State, limit: Limit, now_ns: int) -> int:  # noqa: ARG002 - likewise
        """Return 0."""
        return 0

    def reset(self, state: State, limit: Limit, now_ns: int) -> State:  # noqa: ARG002 - likewise
        """Forget all slots."""
        return None

    def _refuse(self, *_: object) -> NoReturn:
        raise ConfigError(NEEDS_STRICT)

    lease_until = lease = give_back = charge = _refuse


NEEDS_STRICT: Final = (
    'a limit of requests in flight, such as "20 at once for 60s", is decided by the store on every '
    "check, because a node cannot return a slot that another one has leased; write consistency: "
    "strict and scope: region"
)
