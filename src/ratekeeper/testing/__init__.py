"""For the tests of applications: a manual clock, fresh counts, and a switch that turns limits off.

All of them also affect limiters that were created at import time. The pytest plugin offers them as
the fixtures `ratekeeper_clock`, `ratekeeper_fresh` and `ratekeeper_off`. It comes with the package
and needs no setup.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from ratekeeper.core import switches
from ratekeeper.core.clock import Clock, ManualClock

__all__ = ["ManualClock", "forget_counts", "limiting_off", "use_clock"]

ClockType = TypeVar("ClockType", bound=Clock)


@contextmanager
def use_clock(clock: ClockType) -> Iterator[ClockType]:
    """Make every limiter that was created without `clock=` use this clock inside the block.

    >>> from ratekeeper import Limiter
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
    """Allow every check inside the block, and count nothing.

    >>> from ratekeeper import Limiter
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


def forget_counts() -> None:
    """Forget the counts of every `memory://` store of this process, so that a test starts fresh.

    The pauses that servers have asked the httpx transports for are forgotten, too. Counts of
    `shared://` and Redis stay, because other processes use them.

    >>> from ratekeeper import Limiter
    >>> limiter = Limiter("1/minute")
    >>> limiter.check("me").allowed, limiter.check("me").allowed
    (True, False)
    >>> forget_counts()
    >>> limiter.check("me").allowed
    True
    """
    switches.forget_counts()
