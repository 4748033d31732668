"""Rows that read as a specification: a time, a cost and the expected outcome.

The time of the charge is not in the rows; it is checked for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ratekeeper.core.clock import ns_from_seconds
from ratekeeper.core.errors import CapacityError
from ratekeeper.core.model import Limit
from ratekeeper.decide.algorithms import ALGORITHMS, Outcome


class Row(NamedTuple):
    """One request. Times are seconds; `outcome` is None if the cost never fits."""

    at: float
    cost: int
    outcome: Outcome | None


def yes(at: float, cost: int, *, left: int, reset: float, delay: float = 0) -> Row:
    """Allowed, with `remaining` units, and whole after `reset` seconds."""
    outcome = Outcome(True, left, 0, ns_from_seconds(reset), ns_from_seconds(delay))
    return Row(at, cost, outcome)


def no(at: float, cost: int, *, left: int, reset: float, retry: float) -> Row:
    """Denied, with the time after which the same cost passes."""
    outcome = Outcome(False, left, ns_from_seconds(retry), ns_from_seconds(reset), 0)
    return Row(at, cost, outcome)


def never(at: float, cost: int) -> Row:
    """An error: the cost exceeds the capacity."""
    return Row(at, cost, None)


def play(limit: Limit, rows: Iterable[Row], state: Any = None) -> Any:
    """Decide each row in turn, compare the whole table, and return the last state."""
    rows = list(rows)
    answered = []
    for row in rows:
        state, outcome = _ask(limit, row, state)
        answered.append(Row(row.at, row.cost, outcome))
    assert answered == rows
    return state


def _ask(limit: Limit, row: Row, state: Any) -> tuple[Any, Outcome | None]:
    decide = ALGORITHMS[limit.algorithm].decide
    try:
        after, outcome = decide(state, limit, ns_from_seconds(row.at), row.cost)
    except CapacityError:
        return state, None
    if not outcome.allowed or row.cost == 0:
        assert after is state, "a denied request, or a cost of 0, wrote something"
        assert outcome.charged_ns is None
    else:
        assert outcome.charged_ns is not None
        # The state of a bucket has the time of its last step, which may be earlier.
        assert 0 <= outcome.charged_ns - _last_ns(after) < limit.refill_step_ns
    return after, outcome._replace(charged_ns=None)


def _last_ns(state: Any) -> int:
    """Return the time of a state's last change."""
    first = state[0]
    return first if isinstance(first, int) else first[state[2] - 1]
