"""Checkers: they compare the admissions of a fleet with the promises of its limits.

Each checker receives every admission, at the true time. An admission by the authority counts when
the authority charged it, also if its answer was lost. An admission by a node counts when the node
decided it. So admissions come in order of time.

`NeverOver` computes the bound of each algorithm exactly, in integers:

- Token bucket and leaky bucket: the level of a bucket that drains at the limit's rate is at most
  the capacity. This is the same as: in every interval of T, at most capacity + rate × T.
- Sliding window log: the units of the last window are at most the limit, at every admission.
- Fixed window: the units of each aligned window are at most the limit.
- Sliding window counter: the units of the current window and the fading share of the previous one
  are at most the limit, at every admission.

A bucket with steps (`refill_every`) may be one step ahead of a continuous one.

**An authority that forgets.** After a failover that lost the last writes, no limiter can keep the
bound: the units that were charged in that time, leases included, may be admitted once more. So the
limit of a subject counts as larger by the units that the authority charged to it and forgot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.model import MICROS_PER_UNIT, Limit
from ratekeeper.decide.algorithms import ALGORITHMS, State
from tests.simulator.network import EventLoop

VIOLATIONS_MAX: Final = 20
# A denial that is announced again within this time is the same one.
DENIAL_NS: Final = NS_PER_SECOND


class _Bound(Protocol):
    """The admitted units of one subject under one limit."""

    def add(self, now_ns: int, units: int) -> int:
        """Count an admission; return how many units it is over the bound, rounded up."""
        ...


class _BucketBound:
    __slots__ = ("_capacity", "_last_ns", "_level", "_limit")

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        # Micro-units × ns_denominator, so that the drain in any time is an integer.
        self._capacity = limit.capacity * MICROS_PER_UNIT * limit.ns_denominator
        if limit.refill_every:
            self._capacity += limit.refill_step_ns * limit.micros_numerator
        self._last_ns = self._level = 0

    def add(self, now_ns: int, units: int) -> int:
        limit = self._limit
        drained = (now_ns - self._last_ns) * limit.micros_numerator
        self._last_ns = now_ns
        unit = MICROS_PER_UNIT * limit.ns_denominator
        self._level = max(self._level - drained, 0) + units * unit
        return max(-((self._capacity - self._level) // unit), 0)


class _LogBound:
    __slots__ = ("_count", "_entries", "_limit")

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._entries: deque[tuple[int, int]] = deque()
        self._count = 0

    def add(self, now_ns: int, units: int) -> int:
        entries = self._entries
        entries.append((now_ns, units))
        self._count += units
        while entries[0][0] <= now_ns - self._limit.window_ns:
            self._count -= entries.popleft()[1]
        return max(self._count - self._limit.limit, 0)


class _WindowBound:
    """The bound of a fixed window, and of a sliding window counter, whose previous window fades."""

    __slots__ = ("_count", "_fades", "_limit", "_previous", "_window")

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._fades = limit.algorithm == "sliding_window_counter"
        self._window = self._count = self._previous = 0

    def add(self, now_ns: int, units: int) -> int:
        window_ns = self._limit.window_ns
        window, elapsed_ns = divmod(now_ns, window_ns)
        if window != self._window:
            self._previous = self._count if window == self._window + 1 else 0
            self._window, self._count = window, 0
        self._count += units
        faded = 0
        if self._fades:
            faded = -(-self._previous * (window_ns - elapsed_ns) // window_ns)
        return max(self._count + faded - self._limit.limit, 0)


def _bound(limit: Limit) -> _Bound:
    if limit.algorithm == "sliding_window_log":
        return _LogBound(limit)
    if limit.algorithm in ("fixed_window", "sliding_window_counter"):
        return _WindowBound(limit)
    return _BucketBound(limit)


@dataclass(slots=True)
class NeverOver:
    """Counts every admission, and finds admissions that exceed a limit."""

    limits: tuple[Limit, ...]
    violations: list[str] = field(default_factory=list)
    """The first admissions over a limit, as text."""
    over: dict[str, int] = field(default_factory=dict)
    """The units by which a subject was over at the worst moment."""
    _bounds: dict[str, list[_Bound]] = field(default_factory=dict)
    _forgotten: dict[str, int] = field(default_factory=dict)

    def admitted(self, subject: str, units: int, now_ns: int, decided_by: str) -> None:
        """Count an admission."""
        bounds = self._bounds.get(subject)
        if bounds is None:
            bounds = self._bounds[subject] = [_bound(limit) for limit in self.limits]
        for limit, bound in zip(self.limits, bounds, strict=True):
            excess = bound.add(now_ns, units)
            if excess:
                excess -= self._forgotten.get(subject, 0)
            if excess > 0:
                self.over[subject] = max(self.over.get(subject, 0), excess)
                if len(self.violations) < VIOLATIONS_MAX:
                    self.violations.append(
                        f"{subject}: {excess} units over {limit}, at "
                        f"{now_ns / NS_PER_SECOND:.6f}, admitted by {decided_by}"
                    )

    def forget(self, subject: str, units: int) -> None:
        """Note units that the authority charged and forgot."""
        self._forgotten[subject] = self._forgotten.get(subject, 0) + units

    def overshoot(self) -> float:
        """Return by how much the worst subject was over, as a share of the smallest limit."""
        return max(self.over.values(), default=0) / min(limit.capacity for limit in self.limits)


@dataclass(slots=True)
class CentralLimiter:
    """A perfect limiter: it sees every request at once, and decides it at once."""

    limits: tuple[Limit, ...]
    admitted: dict[str, int] = field(default_factory=dict)
    """The admitted requests of each subject."""
    _states: dict[str, list[State]] = field(default_factory=dict)

    def arrived(self, subject: str, units: int, now_ns: int) -> bool:
        """Decide a request; all limits or none are charged."""
        states = self._states.get(subject)
        if states is None:
            states = self._states[subject] = [None] * len(self.limits)
        after = []
        for limit, state in zip(self.limits, states, strict=True):
            state_after, outcome = ALGORITHMS[limit.algorithm].decide(state, limit, now_ns, units)
            if not outcome.allowed:
                return False
            after.append(state_after)
        self._states[subject] = after
        self.admitted[subject] = self.admitted.get(subject, 0) + 1
        return True

    def shortfall(self, admitted: dict[str, int]) -> int:
        """Return how many more requests this limiter admits than `admitted`, over all subjects."""
        return sum(
            max(count - admitted.get(subject, 0), 0) for subject, count in self.admitted.items()
        )


@dataclass(slots=True)
class DenialTimes:
    """Measures how long other nodes take to hear that a subject is denied."""

    loop: EventLoop
    heard_ns: list[int] = field(default_factory=list)
    """The times, for each denial that a node announced and each node that received it."""
    _told: dict[str, tuple[int, set[int]]] = field(default_factory=dict)

    def told(self, subject: str, node: int) -> None:
        """Note that a node announces a denial; within a second, it is the same one."""
        since_ns, nodes = self._told.get(subject, (0, set()))
        if self.loop.now - since_ns > DENIAL_NS:
            self._told[subject] = self.loop.now, {node}
        else:
            nodes.add(node)

    def heard(self, subject: str, node: int) -> None:
        """Note that a node has received a denial. Only the first time counts."""
        since_ns, nodes = self._told.get(subject, (0, {node}))
        if node not in nodes:
            nodes.add(node)
            self.heard_ns.append(self.loop.now - since_ns)


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed; 0.0 if there are none.

    >>> percentile([3, 1, 2, 4], 0.5), percentile([], 0.99)
    (2, 0.0)
    """
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[max(-int(-share * len(ordered) // 1) - 1, 0)]
