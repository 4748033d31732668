"""Faults of a simulated fleet: which kinds, how many, and when.

Rates (`loss`, `duplication`) hold for the whole run. Events (`crashes`, `partitions`) happen at
random times between a tenth and nine tenths of the run, and last for a random part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random
from typing import Final


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of one run; by default none."""

    loss: float = 0.0
    """The share of datagrams that are lost. A lost call to the authority is repeated by TCP."""
    duplication: float = 0.0
    """The share of datagrams that arrive twice."""
    delay_ms: float = 0.0
    """The mean additional delay of messages in milliseconds, so that they overtake one another."""
    partitions: int = 0
    """How often a random part of the nodes is cut off from the rest."""
    one_way: int = 0
    """How often a random part of the nodes can only receive from the rest, or only send to it."""
    crashes: int = 0
    """How often a node is killed, with its table. It starts again after a while."""
    stops: int = 0
    """How often a node is shut down in order, and starts again."""
    clock_steps: int = 0
    """How often a node's wall clock steps by up to 60 s either way. The next process sees it."""
    drift_ppm: int = 0
    """The most by which the clocks of nodes run too fast or too slow, in parts per million."""
    failovers: int = 0
    """How often the authority fails over and forgets its last writes."""
    outages: int = 0
    """How often the authority is unreachable for a while."""
    scale_from: int = 0
    """How many nodes the fleet has at first; the others start during the first half. 0: all."""

    def given(self) -> set[str]:
        """Return the names of the faults that are not at their default."""
        return {each.name for each in fields(self) if getattr(self, each.name) != each.default}


ALL_FAULTS: Final = Faults(
    loss=0.05,
    duplication=0.02,
    delay_ms=2.0,
    partitions=1,
    one_way=1,
    crashes=3,
    stops=2,
    clock_steps=3,
    drift_ppm=200,
    failovers=1,
    outages=1,
)


def random_faults(random: Random) -> Faults:
    """Return a random mix of faults, as a trial of the fleet has them."""

    def some(most: int) -> int:
        return random.randint(1, most) if random.random() < 0.35 else 0

    def share(most: float) -> float:
        return round(random.uniform(0.0, most), 3) if random.random() < 0.5 else 0.0

    return Faults(
        loss=share(0.4),
        duplication=share(0.2),
        delay_ms=share(20.0),
        partitions=some(2),
        one_way=some(2),
        crashes=some(3),
        stops=some(3),
        clock_steps=some(4),
        drift_ppm=random.choice((0, 50, 200)),
        failovers=some(2),
        outages=some(2),
        scale_from=some(3),
    )
