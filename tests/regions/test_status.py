"""The note in which a leader tells operators its status."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ConfigError
from ratekeeper.decide.region_monitor import LinkStatus, RegionStatus
from ratekeeper.decide.regional import REGIONS_MAX
from ratekeeper.regions.exchange import PROBLEM_CHARS_MAX
from ratekeeper.regions.status import parse_status, status_text

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


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"noted_ns": 1, "links": 3}', "1" * 20_000, '{"noted_ns": 1e999}']
)
def test_a_text_that_is_no_status(text: str) -> None:
    """It raises a ConfigError, and nothing else."""
    with pytest.raises(ConfigError):
        parse_status("eu", text, 0, is_self=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [("state", "confused"), ("lag_s", "soon"), ("heard_s", []), ("peer", None)],
)
def test_a_link_of_another_kind_is_no_status(field: str, value: object) -> None:
    """Another release, or another program, may have written it; the admin API must not fail."""
    fields = json.loads(status_text(STATUS, 0))
    del fields["links"][0][field]
    if value is not None:
        fields["links"][0][field] = value
    with pytest.raises(ConfigError):
        parse_status("eu", json.dumps(fields), 0, is_self=False)


def test_the_status_of_most_regions_fits_into_a_note() -> None:
    """Each link may have a long problem."""
    link = LinkStatus("r" * 32, "refused", "x" * PROBLEM_CHARS_MAX, 1.5, 2.5, -3.5)
    status = replace(STATUS, problem=link.problem, links=(link,) * REGIONS_MAX)
    text = status_text(status, 0)
    assert len(parse_status("eu", text, 0, is_self=True).links) == REGIONS_MAX
