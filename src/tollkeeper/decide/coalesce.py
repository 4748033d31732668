"""Checks of one key that wait for one another, sent as one.

While a check of a key is under way, others of the same key and cost wait; when it is back, they go
out together, as one check of so many times the cost. If that is allowed, each would have been, one
after another at that instant, and what each is answered can be worked out from the states before.
If it is denied, nothing was spent, and the states tell how many would have fit. So those go as one,
and the rest are denied. A hot key costs the store a few calls in a round trip, not one a request.

The first never waits. Nobody waits for more than the call before: what has come together by then,
or is as much as may go together, leaves. Between two calls others may spend; whoever loses such a
race asks alone, so nobody is ever answered from a guess.

`rounds` is what to do after each answer, without any I/O.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Final, NamedTuple

TOGETHER_MAX: Final = 256
# Where fewer fit a limit, waiting for one another saves little.
TOGETHER_MIN: Final = 8


@dataclass(frozen=True, slots=True)
class Ask:
    """Check so many of those that are left as one."""

    count: int


@dataclass(frozen=True, slots=True)
class DenyRest:
    """All that are left are denied, as the last answer tells."""


@dataclass(frozen=True, slots=True)
class Alone:
    """All that are left ask for themselves."""


Step = Ask | DenyRest | Alone


class Reply(NamedTuple):
    """What came of an Ask. Allowed, all of them are."""

    allowed: bool
    fits: int
    """How many fit: instead of those that were denied, or after those that were allowed."""
    tells: bool
    """Does the answer tell what one more would be answered, if none fits?"""
    gone: int = 0
    """So many of those that waited do no longer; what was allowed is the others'."""


def together_max(capacity: int, cost: int) -> int:
    """How many checks of a cost may go as one: what every limit can hold. 0: not worth it.

    `capacity` is that of the limit that holds least.
    """
    most = capacity // cost if cost else 0
    return min(most, TOGETHER_MAX) if most >= TOGETHER_MIN else 0


def rounds(waiting: int) -> Generator[Step, Reply | None, None]:
    """What to do for so many that wait, one step after another; an Ask is answered with a Reply.

    At most three calls, and then one more for each that asks alone.
    """
    count, lost, looked = waiting, False, False
    while True:
        reply = yield Ask(count)
        if reply is None:
            raise TypeError("an Ask is answered with a Reply")
        waiting -= reply.gone + (count if reply.allowed else 0)
        if waiting <= 0:
            return
        if not reply.fits and reply.tells:
            yield DenyRest()
            return
        if (lost and reply.fits) or looked:
            # Others were faster, or quota came in: enough of guessing.
            yield Alone()
            return
        lost, looked = True, not reply.fits
        count = min(reply.fits, waiting) or 1
