"""The bound of each algorithm, recomputed from the times and costs of the admissions.

The computation uses whole numbers and fractions, and imports nothing from the algorithms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import ceil

from ratekeeper import Limit
from ratekeeper.decide.store import LocalCounter
from tests.clocks import SteppedClock
from tests.promises.strategies import Step, check, move

# Time and cost. A time that went back counts as the time of the previous admission.
Admission = tuple[int, int]
# Time, units, and whether they are of an admission or settled later.
Charged = tuple[int, int, bool]


def admissions(
    counter: LocalCounter, clock: SteppedClock, trace: Sequence[Step]
) -> list[Admission]:
    """Return the admissions of a trace."""
    admitted: list[Admission] = []
    for gap_ns, cost in trace:
        move(clock, gap_ns)
        decision = check(counter, cost)
        if decision != "never" and decision.allowed and cost:
            at_ns = max(clock.now_ns(), admitted[-1][0]) if admitted else clock.now_ns()
            admitted.append((at_ns, cost))
    return admitted


def assert_never_over(limit: Limit, admitted: Sequence[Admission]) -> None:
    """Check the bound of the algorithm in every interval."""
    if limit.algorithm in ("token_bucket", "leaky_bucket"):
        _assert_bucket(limit, admitted)
    elif limit.algorithm == "sliding_window_log":
        _assert_log(limit, admitted)
    else:
        _assert_aligned(limit, admitted)
        if limit.algorithm == "sliding_window_counter":
            _assert_counter(limit, admitted)


def _assert_bucket(limit: Limit, admitted: Sequence[Admission]) -> None:
    """From any admission to any later one: at most capacity + rate × time, in started steps."""
    for first, (start_ns, _) in enumerate(admitted):
        units = 0
        for end_ns, cost in admitted[first:]:
            units += cost
            # Both sides are multiplied by the window, so that all numbers are whole.
            over = (units - limit.capacity) * limit.window_ns
            steps = -((end_ns - start_ns) // -limit.refill_step_ns)
            assert over <= limit.limit * steps * limit.refill_step_ns


def _assert_log(limit: Limit, admitted: Sequence[Admission]) -> None:
    """In the window that ends with any admission: at most the limit."""
    for end_ns, _ in admitted:
        inside = (cost for at_ns, cost in admitted if end_ns - limit.window_ns < at_ns <= end_ns)
        assert sum(inside) <= limit.limit


def _assert_aligned(limit: Limit, admitted: Sequence[Admission]) -> None:
    """In every window aligned to the epoch: at most the limit."""
    windows: Counter[int] = Counter()
    for at_ns, cost in admitted:
        windows[at_ns // limit.window_ns] += cost
    assert all(units <= limit.limit for units in windows.values())


def _assert_counter(limit: Limit, admitted: Sequence[Admission]) -> None:
    """At each admission: ceil(previous × (window − elapsed) / window) + current <= limit."""
    windows: Counter[int] = Counter()
    for at_ns, cost in admitted:
        number, elapsed_ns = divmod(at_ns, limit.window_ns)
        windows[number] += cost
        left = Fraction(limit.window_ns - elapsed_ns, limit.window_ns)
        assert ceil(windows[number - 1] * left) + windows[number] <= limit.limit


def assert_paid(limit: Limit, charged: Sequence[Charged]) -> None:
    """Check the bound of the algorithm in every interval that ends with an admission."""
    window_ns = limit.window_ns
    for last, (end_ns, _, admits) in enumerate(charged):
        before = [each[:2] for each in charged[: last + 1] if admits]
        if limit.algorithm in ("token_bucket", "leaky_bucket"):
            units = 0
            for start_ns, cost in reversed(before):
                units += cost
                steps = -((end_ns - start_ns) // -limit.refill_step_ns)
                over = (units - limit.capacity) * window_ns
                assert over <= limit.limit * steps * limit.refill_step_ns
        elif limit.algorithm == "sliding_window_log":
            assert sum(cost for at_ns, cost in before if at_ns > end_ns - window_ns) <= limit.limit
        else:
            number, elapsed_ns = divmod(end_ns, window_ns)
            windows = [
                sum(cost for at_ns, cost in before if at_ns // window_ns == number - ago)
                for ago in (0, 1)
            ]
            fades = limit.algorithm == "sliding_window_counter"
            left = Fraction(window_ns - elapsed_ns, window_ns) if fades else 0
            assert windows[0] + ceil(windows[1] * left) <= limit.limit
