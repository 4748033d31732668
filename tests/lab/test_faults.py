"""The faults of a simulation, as arguments and at random."""

from __future__ import annotations

import pytest

from ratekeeper.core.errors import ConfigError
from ratekeeper.lab.faults import ALL_FAULTS, Faults, parse_faults, random_faults
from ratekeeper.lab.network import seeded


def test_faults_are_given_by_name() -> None:
    """Arguments may be repeated and joined by commas; `all` keeps what was given."""
    assert parse_faults([]) == Faults()
    assert parse_faults(["loss=0.05,crashes=3", "scale_from=20"]) == Faults(
        loss=0.05, crashes=3, scale_from=20
    )
    assert parse_faults(["all"]) == ALL_FAULTS
    assert parse_faults(["crashes=9,all"]).crashes == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("los=0.1", "--faults 'los=0.1' is not a fault; for example --faults loss=0.05,crashes=3"),
        ("loss", "'loss' is not a fault"),
        ("loss=1", "loss='1' is not a share; try loss=0.05"),
        ("loss=nan", "loss='nan' is not a share"),
        ("crashes=1.5", "crashes='1.5' is not a number from 0 to 1,000; try crashes=3"),
        ("crashes=many", "crashes='many' is not a number"),
        ("delay_ms=inf", "delay_ms='inf' is not a number"),
    ],
)
def test_a_wrong_fault_is_rejected_with_what_is_right(text: str, message: str) -> None:
    """An error names the argument and a valid one."""
    with pytest.raises(ConfigError) as caught:
        parse_faults([text])
    assert message in str(caught.value)


def test_random_faults_repeat_with_their_seed() -> None:
    """The same seed gives the same faults; over many seeds, each kind occurs."""
    assert random_faults(seeded(5)) == random_faults(seeded(5))
    found: set[str] = set()
    for seed in range(50):
        found |= random_faults(seeded(seed)).given().keys()
    assert found == Faults.__dataclass_fields__.keys()
