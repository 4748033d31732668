"""On which processors the server and its callers run. Left to itself, that decides the numbers.

With many tasks the client and the server are both busy. Whether the system has them on one
processor or on two is chance, lasts for seconds, and makes tollkeeper 58,000 or 106,000 checks/s
with 256 tasks, and `limits` 13,000 or 17,500: ratios of 4.4 and 6. With one caller it is the other
way round: one of the two always waits, and waking the other processor takes longer (88 µs against
36). So neither is chosen here: both are measured, the same for every engine, and both are printed.

    apart      the server on one processor, all callers on another: as with a server elsewhere
    together   everything on one processor: as on a machine that has no other to spare
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
    """Where the two run; no processors: wherever the system puts them."""

    name: str
    told: str
    server: frozenset[int] = frozenset()
    callers: frozenset[int] = frozenset()


FREE: Final = Placement("unpinned", "server and callers wherever the system puts them")


def placements() -> Sequence[Placement]:
    """Those that this machine can do."""
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
    """Have them there, and put this process back afterwards."""
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
