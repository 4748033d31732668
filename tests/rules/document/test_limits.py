"""Limits as documents write them: short or in full, and each mistake in its place."""

from __future__ import annotations

import pytest

from tollkeeper.core.model import Limit
from tollkeeper.rules.document.limits import limits_at, seconds_at
from tollkeeper.rules.document.places import Place
from tollkeeper.rules.document.reading import Problems, tree_of_yaml


def at(text: str) -> tuple[Place, Problems]:
    problems = Problems("t")
    node = tree_of_yaml(text, problems)
    assert node is not None
    return Place(node, problems), problems


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("10/second", [Limit(10, per=1)]),
        ("10/second; 1000/hour burst 200", [Limit(10, per=1), Limit(1000, per=3600, burst=200)]),
        ("[10/second, 1000/hour]", [Limit(10, per=1), Limit(1000, per=3600)]),
        ("[10/second; 100/minute, 1000/hour]", [Limit(10, 1), Limit(100, 60), Limit(1000, 3600)]),
        ("{limit: 5, per: 60}", [Limit(5, per=60)]),
        ("{limit: 5, per: 0.5}", [Limit(5, per=0.5)]),
        ("{limit: 5, per: 1m}", [Limit(5, per=60)]),
        ("{limit: 5, per: 90 s}", [Limit(5, per=90)]),
        ("{limit: 5, per: 1.5h}", [Limit(5, per=5400)]),
        ("{limit: 5, per: minute}", [Limit(5, per=60)]),
        ("{limit: 5, per: 1m, burst: 3}", [Limit(5, per=60, burst=3)]),
        ("{limit: 5, per: 1m, capacity: 3}", [Limit(5, per=60, capacity=3)]),
        ("{limit: 5, per: 1m, name: logins}", [Limit(5, per=60, name="logins")]),
        (
            "[{limit: 5, per: 1m, algorithm: sliding_window_log}, 9/minute]",
            [Limit(5, per=60, algorithm="sliding_window_log"), Limit(9, per=60)],
        ),
        (
            "[5/minute, {limit: 9, per: 1m, name: b}]",
            [Limit(5, per=60), Limit(9, per=60, name="b")],
        ),
    ],
)
def test_limits(text: str, limits: list[Limit]) -> None:
    """As a rate, several rates, in full, or a list of either."""
    place, problems = at(text)
    assert limits_at(place) == tuple(limits)
    assert not problems.found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "10/fortnight",
            (
                't:1:1: "10/fortnight" is not a rate: expected a unit: ms, second, minute, hour, '
                'day, week, month or year at character 4; for example "10/second"'
            ),
        ),
        ("[1/s, 0/s]", 't:1:7: [1]: "0/s" is not a rate: limit=0 is not a whole number from 1 to'),
        ("100", 't:1:1: 100 is not a rate; for example "10/second"'),
        ("[[1/s]]", 't:1:2: [0]: a list is not a rate; for example "10/second"'),
        ("[~]", 't:1:2: [0]: ~ is not a rate; for example "10/second"'),
        ("[]", "t:1:1: 1 to 16 limits are wanted here, not 0; for example ["),
        ("~", "t:1:1: a value is missing; a list is wanted here, for example ["),
        (
            "[" + ", ".join(f"1/{n}s" for n in range(1, 18)) + "]",
            "t:1:1: 1 to 16 limits are wanted",
        ),
        (
            "[5/s, 10/s]",
            (
                "t:1:7: [1]: 5 per 1 s (token_bucket) and 10 per 1 s (token_bucket) would share "
                "one count; drop one, or name them, for example {limit: 10, per: 1, name: second}"
            ),
        ),
        ("5/s; 10/s", "t:1:1: 5 per 1 s (token_bucket) and 10 per 1 s (token_bucket) would share"),
        ("{limit: 5}", 't:1:1: "per" is missing; for example per: 1m'),
        ("{per: 5}", 't:1:1: "limit" is missing; for example limit: 10'),
        (
            "{limit: 5, per: 1m, bust: 3}",
            't:1:21: "bust" is not a name that is known here; did you',
        ),
        ("{limit: 0, per: 1m}", "t:1:9: limit: 0 is not a whole number from 1 to 1,000,000,000; "),
        (
            "{limit: 5.5, per: 1m}",
            "t:1:9: limit: 5.5 is not a whole number from 1 to 1,000,000,000",
        ),
        (
            '{limit: "5", per: 1m}',
            't:1:9: limit: "5" is not a whole number from 1 to 1,000,000,000',
        ),
        (
            "{limit: 5, per: 1x}",
            't:1:17: per: "1x" is not a length of time; for example 60 (seconds)',
        ),
        ('{limit: 5, per: "60"}', 't:1:17: per: "60" is not a length of time; for example 60 (sec'),
        ("{limit: 5, per: 1m; 5/s}", 't:1:17: per: "1m; 5/s" is not a length of time; for example'),
        (
            "{limit: 5, per: -1}",
            "t:1:17: per: -1 is not a length of time; for example 60 (seconds)",
        ),
        ("{limit: 5, per: 0}", "t:1:17: per: per=0 is not between 1 ms and 366 days; for example"),
        ("{limit: 5, per: 400d}", 't:1:17: per: "400d" is not a length of time; for example 60 (s'),
        ("{limit: 5, per: 1m, algorithm: log}", 't:1:32: algorithm: "log" is not known here; '),
        ("{limit: 5, per: 1m, burst: -1}", "t:1:28: burst: -1 is not a whole number from 0 to 1,"),
        ("{limit: 5, per: 1m, name: 7}", "t:1:27: name: 7 is read as a number, and text is wanted"),
        (
            "{limit: 5, per: 1m, capacity: 3, burst: 9}",
            "t:1:1: give burst=9 or capacity=3, not both",
        ),
        (
            "{limit: 5, per: 1m, algorithm: fixed_window, burst: 9}",
            "t:1:1: fixed_window has no burst or capacity: it counts in a window; raise limit",
        ),
        (
            "{limit: 2_000_000, per: 1m, algorithm: sliding_window_log}",
            "t:1:9: limit: limit=2000000 is not a whole number from 1 to 1,000,000",
        ),
        (
            "{limit: 1, per: 366d, capacity: 1000}",
            "t:1:33: capacity: capacity=1000 would take more than a century to refill",
        ),
    ],
)
def test_mistakes(text: str, problem: str) -> None:
    """One problem for one mistake: where, what, and what would be right."""
    place, problems = at(text)
    limits_at(place)
    assert [str(found)[: len(problem)] for found in problems.found] == [problem]


def test_every_mistake_in_a_limit_is_told() -> None:
    """Not only the first."""
    place, problems = at("{limit: 0, per: x1, algorithm: a, burst: b, capacity: 0, name: 1}")
    assert limits_at(place) == ()
    assert [found.where for found in problems.found] == [
        "limit",
        "per",
        "algorithm",
        "burst",
        "capacity",
        "name",
    ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60", 60),
        ("0", 0),
        ("1.5", 1.5),
        ("1m", 60),
        ("500ms", 0.5),
        ('"1_000 s"', 1000),
        ("2 H", 7200),
    ],
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    """Numbers are seconds; text names its unit."""
    place, problems = at(text)
    assert seconds_at(place) == seconds
    assert not problems.found
