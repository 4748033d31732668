"""What a limit owes: units that were charged although it had no room for them.

A cost that is known only afterwards is charged in full, and may exceed the room. The excess is the
limit's *debt*. Time pays it back at the rate of the limit, before it returns any other unit, and
until then nothing is admitted.

Debt is a number beside the units used, and not a part of them: these are at most the capacity,
also of a limit that was lowered since. A debt stays. In a bucket it counts micro-units, and
otherwise units.

- A bucket is refilled from below zero: its level is the units used plus the debt.
- At the edge of a window, the debt is charged to the next one, up to its limit; what is left, to
  the one after it.
- In a log, a unit of debt takes the place of each entry that leaves the window, and enters the log
  at that time.

So all algorithms admit later what they would have admitted had the units been charged as soon as
there was room for them, and before those of any other request.

The bound, `Limit.debt_max`, keeps one charge from locking a client out for long. What exceeds it is
*forgiven*. It is that of the limit which reads the debt: a limit lowered from 1,000 a second to 1 a
minute does not inherit the debt of a year.
"""

from __future__ import annotations

from ratekeeper.core.model import Limit


def carried(limit: Limit, count: int, debt: int, windows: int) -> tuple[int, int]:
    """Return the count of a window and the debt beyond it, so many windows later.

    Room that a raised limit or a refund has made takes debt at once.
    """
    charged = min(debt, max(limit.limit - count, 0))
    count, debt = count + charged, debt - charged
    if windows:
        debt = max(debt - (windows - 1) * limit.limit, 0)
        count = min(debt, limit.limit)
        debt -= count
    return count, debt


def windows_until_room(limit: Limit, debt: int, cost: int) -> int:
    """Return after how many edges a full window that owes `debt` has room for the cost."""
    return max(-(-(debt + cost) // limit.limit), 1)
