"""For users' own tests: a clock that moves when told to, and a switch that turns limiting off.

Both reach limiters that were made at import time. The pytest plugin offers them as the fixtures
`tollkeeper_clock` and `tollkeeper_off`; it is installed with the package, nothing to set up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from tollkeeper.core import switches
from tollkeeper.core.clock import Clock, ManualClock

__all__ = ["ManualClock", "limiting_off", "use_clock"]

ClockType = TypeVar("ClockType", bound=Clock)


@contextmanager
def use_clock(clock: ClockType) -> Iterator[ClockType]:
    """Inside the block, every limiter made without `clock=` reads this clock.

    >>> from tollkeeper import Limiter
    >>> limiter = Limiter("1/minute")
    >>> with use_clock(ManualClock()) as clock:
    ...     first, second = limiter.check("me"), limiter.check("me")
    ...     clock.advance(second.retry_after)
    ...     third = limiter.check("me")
    >>> [bool(decision) for decision in (first, second, third)]
    [True, False, True]
    """
    before = switches.clock
    switches.set_clock(clock)
    try:
        yield clock
    finally:
        switches.set_clock(before)


@contextmanager
def limiting_off() -> Iterator[None]:
    """Inside the block, every check is allowed and nothing is counted.

    >>> from tollkeeper import Limiter
    >>> limiter = Limiter("1/minute")
    >>> with limiting_off():
    ...     all(limiter.check("me") for _ in range(1000))
    True
    """
    before = switches.limiting_off
    switches.set_limiting_off(True)
    try:
        yield
    finally:
        switches.set_limiting_off(before)
