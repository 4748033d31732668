"""The processors of the server and its callers, which are pinned because they decide the numbers.

With many tasks, client and server are both busy. The scheduler puts them on one processor or on two
by chance, and for seconds. With 256 tasks, ratekeeper then makes 58,000 or 106,000 checks/s, and
`limits` 13,000 or 17,500: ratios of 4.4 and 6. With one caller it is the other way round: one of
the two always waits, and waking another processor takes longer (88 µs against 36). Therefore, both
placements are measured and printed, the same for every engine.

    apart      the server on one processor, all callers on another, like a remote server
    together   everything on one processor, like a machine without a spare processor
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tests.redis_servers import Single


@dataclass(frozen=True, slots=True)
class Placement:
    """The processors of server and callers. Empty sets leave the choice to the scheduler."""

    name: str
    text: str
    server: frozenset[int] = frozenset()
    callers: frozenset[int] = frozenset()


FREE: Final = Placement("unpinned", "server and callers on any processor")


def placements() -> Sequence[Placement]:
    """Return the placements that are possible on this machine."""
    if not hasattr(os, "sched_setaffinity"):
        return (FREE,)
    first, *others = sorted(os.sched_getaffinity(0))
    one = frozenset({first})
    together = Placement("together", "server and callers on one processor", one, one)
    if not others:
        return (together,)
    other = frozenset({others[0]})
    return Placement("apart", "server and callers on a processor each", one, other), together


@contextmanager
def placed(placement: Placement, server: Single) -> Iterator[None]:
    """Pin server and callers during the block; restore the affinity of this process afterwards."""
    if not placement.server or server.pid is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(server.pid, placement.server)
    os.sched_setaffinity(0, placement.callers)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
