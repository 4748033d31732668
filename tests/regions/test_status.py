"""The note in which a leader tells operators its status."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.errors import ConfigError
from tollkeeper.decide.region_monitor import LinkStatus, RegionStatus
from tollkeeper.regions.status import parse_status, status_text

STATUS = RegionStatus(
    "eu",
    is_self=True,
    leader="node-1",
    age_s=0.0,
    epoch=7,
    share=Fraction(1, 3),
    target=Fraction(1, 2),
    links=(LinkStatus("us", "up", lag_s=0.1, heard_s=0.5, clock_offset_s=-0.2),),
)


def test_a_status_is_read_as_it_was_written() -> None:
    """Its age is that of the note."""
    text = status_text(STATUS, 5 * NS_PER_SECOND)
    assert parse_status("eu", text, 5 * NS_PER_SECOND, is_self=True) == STATUS
    later = parse_status("eu", text, 7 * NS_PER_SECOND, is_self=False)
    assert (later.age_s, later.is_self, later.leader) == (2.0, False, "node-1")


def test_a_silent_leader_is_none() -> None:
    """Nothing was noted for longer than a change of leaders takes."""
    found = parse_status("eu", status_text(STATUS, 0), 9 * NS_PER_SECOND, is_self=False)
    assert (found.leader, found.problem) == ("", "no process has led the region for 9 s")
    assert parse_status("eu", None, 0, is_self=False).problem


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"noted_ns": 1, "links": 3}', "1" * 20_000])
def test_a_text_that_is_no_status(text: str) -> None:
    """It raises a ConfigError, and nothing else."""
    with pytest.raises(ConfigError):
        parse_status("eu", text, 0, is_self=False)
