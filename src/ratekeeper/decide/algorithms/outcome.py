"""The result of an algorithm for one limit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple


class Outcome(NamedTuple):
    """The result for one limit. Times are nanoseconds from the caller's `now_ns`.

    `remaining` is the number of units left, after this request if it was allowed.
    `retry_after_ns` is 0 if the request was allowed. Otherwise the same cost is denied until that
    time and allowed at it, if no units are spent meanwhile. `reset_after_ns` is the time until the
    whole limit is available again. `delay_ns` is the time to hold the request (leaky bucket only).

    `charged_ns` is the one absolute time: when the units were charged, as the state has it. It is
    `now_ns`, or the time of the state's last change if that is later. It is None if nothing was
    charged. A refund of these units needs it.
    """

    allowed: bool
    remaining: int
    retry_after_ns: int
    reset_after_ns: int
    delay_ns: int
    charged_ns: int | None = None


_Fields = tuple[bool, int, int, int, int, int | None]
# Takes two thirds of the time of Outcome(...), whose constructor is written in Python.
outcome_of: Final[Callable[[_Fields], Outcome]] = partial(tuple.__new__, Outcome)
