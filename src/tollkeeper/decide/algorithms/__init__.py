"""The five algorithms as pure functions: the specification every engine agrees with.

Each module has the same two functions, on integer time and with no clock, I/O or lock:

    decide(state, limit, now_ns, cost) → (state, outcome)
    refund(state, limit, now_ns, units) → state

`state` is None for a key never seen, and for one that has become indistinguishable from it. A
denied request, and a cost of 0, return the state they were given. Cost 0 is always allowed and
spends nothing, so it reads a quota. A cost above the limit's capacity raises CapacityError: no
wait would help.

Time never rewinds: each state holds the last time it was written, and an earlier `now_ns` is
taken as that time. What is answered still counts from the `now_ns` given, so a caller whose
clock is behind waits the longer.

Every division says which way it rounds. The rule: what is spent rounds up and what is free
rounds down, so rounding never admits; times to wait round up, so waiting always suffices.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from tollkeeper.core.model import AlgorithmName, Limit
from tollkeeper.decide.algorithms import (
    fixed_window,
    leaky_bucket,
    sliding_window_counter,
    sliding_window_log,
    token_bucket,
)
from tollkeeper.decide.algorithms.outcome import Outcome

__all__ = ["ALGORITHMS", "Algorithm", "Outcome", "State"]

# Each algorithm knows its own state; to everyone else it is opaque.
State = Any


class Algorithm(Protocol):
    """What every module of this package offers."""

    def decide(
        self, state: State, limit: Limit, now_ns: int, cost: int, /
    ) -> tuple[State, Outcome]: ...

    def refund(self, state: State, limit: Limit, now_ns: int, units: int, /) -> State: ...


ALGORITHMS: Final[dict[AlgorithmName, Algorithm]] = {
    "token_bucket": token_bucket,
    "leaky_bucket": leaky_bucket,
    "sliding_window_log": sliding_window_log,
    "sliding_window_counter": sliding_window_counter,
    "fixed_window": fixed_window,
}
