"""Traffic: the file, its errors, and the requests that it makes."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ConfigError
from ratekeeper.lab.network import START_NS, EventLoop, seeded
from ratekeeper.lab.traffic import (
    USUAL_MIX,
    Traffic,
    TrafficGroup,
    parse_traffic,
    read_traffic,
)


def _requests(traffic: Traffic, seconds: int, seed: int = 1) -> list[tuple[float, str, int]]:
    loop = EventLoop()
    random = seeded(seed)
    found: list[tuple[float, str, int]] = []

    def arrived(subject: str, cost: int) -> None:
        found.append(((loop.now - START_NS) / NS_PER_SECOND, subject, cost))

    for group in traffic:
        group.start(loop, random, arrived)
    loop.run_until(START_NS + seconds * NS_PER_SECOND)
    return found


def test_a_group_makes_its_requests() -> None:
    """The users of a group make their number of requests, and the same seed makes the same."""
    found = _requests(USUAL_MIX, 10)
    by_group = {name: sum(name in each[1] for each in found) for name in ("light", "heavy", "abus")}
    assert 1_900 < by_group["light"] < 2_270
    assert 5_700 < by_group["heavy"] < 6_300
    assert 8_000 < by_group["abus"] < 8_700
    assert found == _requests(USUAL_MIX, 10) != _requests(USUAL_MIX, 10, seed=2)


def test_a_group_has_its_time_its_cost_and_its_bursts() -> None:
    """A burst arrives at one instant; no request comes before `from` or after `until`."""
    (group,) = parse_traffic(
        "group,users,per_minute,cost,burst,from,until\nnightly, 2, 600, 10, 5, 20, 30\n"
    )
    assert group == TrafficGroup("nightly", 2, 600.0, 10, 5, 20.0, 30.0)
    found = _requests((group,), 60)
    assert 20 <= found[0][0] < found[-1][0] <= 30
    assert {each[1:] for each in found} == {("nightly:0", 10), ("nightly:1", 10)}
    assert len(found) == 5 * len({each[0] for each in found})


def test_a_recording_is_played_in_order_of_time() -> None:
    """Each line of a recording is one request; the lines need not be sorted."""
    traffic = parse_traffic("time,subject,cost\n1.5,user:2,3\n\n# a comment\n0.25,user:1\n")
    assert _requests(traffic, 60) == [(0.25, "user:1", 1), (1.5, "user:2", 3)]


def test_optional_columns_may_be_left_out() -> None:
    """A file of three columns is complete."""
    assert parse_traffic("group,users,per_minute\nlight,250,50") == (
        TrafficGroup("light", 250, 50.0, 1, 1, 0.0, inf),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no traffic; the first line is group,users,per_minute"),
        ("group,users,per_minute", "no line follows the heading"),
        ("users,group\n1,2", "f.csv:1: the columns are users,group; they must be group,users"),
        ("group,users,per_minute\nx,0,1", "f.csv:2: users='0' is not a whole number from 1 to"),
        ("group,users,per_minute\nx,1" + 9 * "0" + ",1", "users='1000000000' is not a whole"),
        ("group,users,per_minute\nx,5,-1", "per_minute='-1' is not a number above 0"),
        ("group,users,per_minute\nx,5,nan", "per_minute='nan' is not a number above 0"),
        ("group,users,per_minute\nx,5", "per_minute='' is not a number above 0"),
        ("group,users,per_minute\n,5,1", "group='' is missing: a name, for example light"),
        ("group,users,per_minute\nx,5,1,1", "f.csv:2: 4 values for the 3 columns"),
        ("group,users,per_minute\nx,5,1\nx,5,1", "f.csv:3: group='x' is given twice"),
        ("group,users,per_minute,from,until\nx,5,1,9,3", "until='3' is not a number of seconds af"),
        ("time,subject,cost\n-1,a,1", "time='-1' is not seconds from the beginning"),
        ("time,subject,cost\n1,,1", "subject='' is missing: a subject, for example user:42"),
        ('time,subject\n1,"a', "f.csv:2: not a line of CSV"),
    ],
)
def test_a_wrong_file_is_rejected_with_the_line_and_what_is_right(text: str, message: str) -> None:
    """An error names the file, the line, the value and a valid one."""
    with pytest.raises(ConfigError) as caught:
        parse_traffic(text, "f.csv")
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A missing file, and one that is not text, are errors with the path."""
    path = tmp_path / "traffic.csv"
    with pytest.raises(ConfigError, match=r"the traffic cannot be read: .*No such"):
        read_traffic(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"traffic\.csv: the traffic cannot be read"):
        read_traffic(path)
    path.write_text("time,subject\n1,a\n", encoding="utf-8-sig")
    assert len(_requests(read_traffic(path), 60)) == 1
