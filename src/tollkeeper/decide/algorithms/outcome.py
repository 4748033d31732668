"""What an algorithm answers for one limit."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """One limit's answer. Times are nanoseconds from the `now` the caller gave.

    `remaining` is what is left after this request if it was allowed, and what is left now if not.
    `retry_after_ns` is 0 when allowed; otherwise the same cost is denied at every instant before
    it and allowed at it, if nobody spends meanwhile. `reset_after_ns` is when the limit is as good
    as untouched. `delay_ns` is how long to hold the request (leaky bucket; 0 elsewhere).
    """

    allowed: bool
    remaining: int
    retry_after_ns: int
    reset_after_ns: int
    delay_ns: int
