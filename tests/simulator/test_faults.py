"""The faults of a simulation at random."""

from __future__ import annotations

from tests.simulator.faults import Faults, random_faults
from tests.simulator.network import seeded


def test_random_faults_repeat_with_their_seed() -> None:
    """The same seed gives the same faults; over many seeds, each kind occurs."""
    assert random_faults(seeded(5)) == random_faults(seeded(5))
    found: set[str] = set()
    for seed in range(50):
        found |= random_faults(seeded(seed)).given()
    assert found == Faults.__dataclass_fields__.keys()
