"""The frozen values: Limit, Request, Decision."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import ConfigError, Decision, Limit, Request
from ratekeeper.core.model import (
    DECISION_FIELDS,
    LOG_UNITS_MAX,
    UNIT_ALGORITHMS,
    UNITS_MAX,
    AlgorithmName,
    check_name,
    decision_with,
)

DAY = 86_400

# ------------------------------------------------------------------------------------ Limit


@pytest.mark.parametrize(
    ("per", "window_ns", "plain"),
    [
        (60, 60_000_000_000, 60),
        (60.0, 60_000_000_000, 60),
        (0.001, 1_000_000, 0.001),
        (1.5, 1_500_000_000, 1.5),
        (0.1 + 0.2, 300_000_000, 0.3),  # a float is rounded to the nearest nanosecond
        (366 * DAY, 31_622_400_000_000_000, 366 * DAY),
        (timedelta(hours=1), 3_600_000_000_000, 3600),
        (timedelta(milliseconds=1), 1_000_000, 0.001),
        (timedelta(days=100, microseconds=1), 8_640_000_000_001_000, 8640000.000001),
    ],
)
def test_windows(per: Any, window_ns: int, plain: float) -> None:
    """It is given in seconds or as a timedelta, stored in nanoseconds and shown in seconds."""
    limit = Limit(1, per=per)
    assert (limit.window_ns, limit.per, limit.window) == (window_ns, plain, float(plain))
    assert type(limit.per) is type(plain)


@pytest.mark.parametrize(
    ("per", "problem"),
    [
        (0, "not between 1 ms and 366 days"),
        (0.0009, "not between"),
        (5e-324, "not between"),
        (366 * DAY + 1, "not between"),
        (1e18, "not between"),
        (1e300, "not between"),
        (10**100, "not between"),
        (math.inf, "not between"),
        (timedelta(0), "not between"),
        (timedelta.max, "not between"),
        (timedelta(microseconds=999), "not between"),
        (0.0010001, "not a whole number of microseconds"),
        (1 / 3, "not a whole number of microseconds"),
        (math.nan, "not a length of time"),
        (-math.inf, "not a length of time"),
        (-1, "not a length of time"),
        (timedelta(days=-1), "not a length of time"),
        (timedelta.min, "not a length of time"),
        (True, "not a length of time"),
        (False, "not a length of time"),
        (None, "not a length of time"),
        ("60", "not a length of time"),
        (b"60", "not a length of time"),
        (60j, "not a length of time"),
        (Fraction(60), "not a length of time"),
        ([60], "not a length of time"),
    ],
    ids=repr,
)
def test_invalid_windows(per: Any, problem: str) -> None:
    """The error shows the value and two correct ones."""
    with pytest.raises(ConfigError) as caught:
        Limit(1, per=per)
    assert problem in str(caught.value)
    assert "for example per=60 (seconds) or per=timedelta(hours=1)" in str(caught.value)


@pytest.mark.parametrize("per", [8_500_000.000003, 16_777_217.000001])
def test_a_long_window_in_microseconds_as_a_float(per: float) -> None:
    """A timedelta and its total_seconds give the same window."""
    assert Limit(1, per=per) == Limit(1, per=timedelta(seconds=per))


@pytest.mark.parametrize("units", [0, -1, UNITS_MAX + 1, 10**100, 1.0, "5", None, True, b"5", [5]])
def test_invalid_numbers_of_units(units: Any) -> None:
    """A limit is a whole number from 1 to a billion, and True is not 1."""
    with pytest.raises(ConfigError, match="is not a whole number from 1 to 1,000,000,000"):
        Limit(units, per=60)


@pytest.mark.parametrize("field", ["burst", "capacity"])
@pytest.mark.parametrize("units", [-1, UNITS_MAX + 1, 1.0, "5", None, True])
def test_invalid_bursts_and_capacities(field: str, units: Any) -> None:
    """They are whole numbers from 0 to a billion."""
    with pytest.raises(ConfigError, match=f"{field}=.* is not a whole number from 0"):
        Limit(5, per=60, **{field: units})


def test_the_logs_limit_is_lower() -> None:
    """An entry has 8 bytes: a million are allowed, one more is not."""
    assert Limit(LOG_UNITS_MAX, per=60, algorithm="sliding_window_log").limit == 1_000_000
    with pytest.raises(ConfigError, match="from 1 to 1,000,000;"):
        Limit(LOG_UNITS_MAX + 1, per=60, algorithm="sliding_window_log")


@pytest.mark.parametrize(
    ("limit", "capacity"),
    [
        (Limit(10, per=1), 10),
        (Limit(10, per=1, burst=5), 15),
        (Limit(10, per=1, capacity=3), 3),
        (Limit(10, per=1, capacity=100), 100),
        (Limit(10, per=1, burst=5, capacity=15), 15),
        (Limit(10, per=1, algorithm="leaky_bucket", burst=5), 15),
        (Limit(10, per=1, algorithm="fixed_window"), 10),
        (Limit(UNITS_MAX, per=1), UNITS_MAX),
    ],
)
def test_capacity(limit: Limit, capacity: int) -> None:
    """It is limit + burst, or the given capacity."""
    assert limit.capacity == capacity


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"burst": 5, "capacity": 14}, "give burst=5 or capacity=14, not both"),
        ({"burst": UNITS_MAX}, "capacity (limit + burst)=1000000010"),
        ({"burst": 1, "algorithm": "fixed_window"}, "fixed_window has no burst or capacity"),
        ({"capacity": 10, "algorithm": "sliding_window_log"}, "has no burst or capacity"),
        ({"capacity": 10, "algorithm": "sliding_window_counter"}, "has no burst or capacity"),
        ({"algorithm": "gcra"}, "algorithm='gcra' is not known; choose one of token_bucket,"),
        ({"algorithm": None}, "algorithm=None is not known"),
        ({"algorithm": []}, "algorithm=[] is not known"),
        ({"name": 5}, "name=5 is not printable text of at most 128 characters"),
        ({"name": "x" * 129}, "is not printable text"),
        ({"name": "a\nb"}, "is not printable text"),
        ({"name": "\ud800"}, "is not printable text"),
    ],
    ids=repr,
)
def test_arguments_that_contradict_each_other(fields: dict[str, Any], problem: str) -> None:
    """The error gives the reason."""
    with pytest.raises(ConfigError) as caught:
        Limit(10, per=60, **fields)
    assert problem in str(caught.value)
    str(caught.value).encode()


def test_an_empty_bucket_is_full_within_a_century() -> None:
    """Every time must fit 64 bits: 100 windows of 366 days are allowed, 101 are not."""
    assert Limit(1, per=366 * DAY, capacity=100).capacity == 100
    with pytest.raises(ConfigError, match="more than a century to refill at 1 per 31622400 s"):
        Limit(1, per=366 * DAY, capacity=101)


@pytest.mark.parametrize(
    ("limit", "identity"),
    [
        (Limit(5, per=60), "token_bucket/60000000="),
        (Limit(9, per=60, burst=3), "token_bucket/60000000="),
        (Limit(5, per=61), "token_bucket/61000000="),
        (Limit(5, per=60, name="n"), "token_bucket=n"),
        (Limit(5, per=61, name="n"), "token_bucket=n"),
        (Limit(5, per=60, algorithm="leaky_bucket", name="n"), "leaky_bucket=n"),
        (Limit(5, per=60, algorithm="sliding_window_log", name="n"), "sliding_window_log=n"),
        (Limit(5, per=60, algorithm="fixed_window", name="n"), "fixed_window/60000000=n"),
        (
            Limit(5, per=0.001, algorithm="sliding_window_counter", name="n"),
            "sliding_window_counter/1000=n",
        ),
    ],
)
def test_identity_leaves_out_the_numbers_that_may_change(limit: Limit, identity: str) -> None:
    """The identity has the window only for algorithms that count per window."""
    assert limit.identity == identity


@pytest.mark.parametrize(
    ("limit", "shown", "text"),
    [
        (Limit(5, per=60), "Limit(5, per=60)", "5/minute"),
        (Limit(5, per=0.5, burst=2), "Limit(5, per=0.5, capacity=7)", "5/500ms burst 2"),
        (
            Limit(5, per=60, refill_every=12),
            "Limit(5, per=60, refill_every=12)",
            "5/minute refill 12s",
        ),
        (
            Limit(5, per=60, algorithm="sliding_window_log"),
            "Limit(5, per=60, algorithm='sliding_window_log')",
            "5 in any minute",
        ),
        (
            Limit(5, per=1, algorithm="fixed_window", name="login"),
            "Limit(5, per=1, algorithm='fixed_window', name='login')",
            "5/second fixed_window",
        ),
    ],
)
def test_a_limit_prints_as_code_and_as_text(limit: Limit, shown: str, text: str) -> None:
    """The code creates the same limit again."""
    assert (repr(limit), str(limit)) == (shown, text)
    again = eval(repr(limit), {"Limit": Limit})
    assert (again.identity, again.capacity) == (limit.identity, limit.capacity)


def test_the_same_limit_written_two_ways_is_equal() -> None:
    """Burst 5 on 10 is capacity 15: equal, with the same hash."""
    one, other = Limit(10, per=1, burst=5), Limit(10, per=1, capacity=15)
    assert one == other
    assert hash(one) == hash(other)
    assert (one.burst, other.burst) == (5, 5)
    assert Limit(10, per=1, capacity=3).burst == 0


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_limits_are_values(algorithm: AlgorithmName) -> None:
    """It is compared by content, hashable, frozen, and equal after pickling."""
    limit = Limit(5, per=60, algorithm=algorithm, name="n")
    assert limit == Limit(5, per=timedelta(minutes=1), algorithm=algorithm, name="n")
    assert hash(limit) == hash(copy.copy(limit))
    again = pickle.loads(pickle.dumps(limit))
    assert again == limit
    assert again.window_ns == limit.window_ns
    with pytest.raises(dataclasses.FrozenInstanceError):
        limit.limit = 6  # type: ignore[misc]  # this is the tested case


@given(
    st.integers(1, UNITS_MAX),
    st.integers(1_000, 366 * DAY * 10**6).map(lambda us: timedelta(microseconds=us)),
)
def test_the_refill_is_exact_and_in_lowest_terms(units: int, per: timedelta) -> None:
    """micros_numerator / ns_denominator is limit / window, without a common factor."""
    limit = Limit(units, per=per)
    refill = Fraction(units * 10**6, limit.window_ns)
    assert (limit.micros_numerator, limit.ns_denominator) == (refill.numerator, refill.denominator)


@pytest.mark.parametrize(
    ("arguments", "every", "step_ns"),
    [
        ({}, 0, 1),
        ({"refill_every": 0}, 0, 1),
        ({"refill_every": timedelta(0)}, 0, 1),
        ({"refill_every": 1}, 1, 10**9),
        ({"refill_every": 0.25}, 0.25, 250_000_000),
        ({"refill_every": timedelta(milliseconds=1)}, 0.001, 1_000_000),
        ({"refill_every": 60}, 60, 60 * 10**9),
        ({"refill_every": 90, "burst": 50}, 90, 90 * 10**9),
    ],
)
def test_a_bucket_is_refilled_in_steps(
    arguments: dict[str, Any], every: float, step_ns: int
) -> None:
    """Continuously by default; at most as many units at once as the bucket holds."""
    limit = Limit(100, per=60, **arguments)
    assert (limit.refill_every, limit.refill_step_ns) == (every, step_ns)
    assert eval(repr(limit), {"Limit": Limit}) == limit


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"refill_every": -1}, "refill_every=-1 is not a length of time"),
        ({"refill_every": "1s"}, "refill_every='1s' is not a length of time"),
        ({"refill_every": True}, "refill_every=True is not a length of time"),
        ({"refill_every": 0.0009}, "refill_every=0.0009 is not between 1 ms and 366 days"),
        ({"refill_every": 0.0015001}, "is not a whole number of microseconds"),
        ({"refill_every": 61}, "adds more units at once than the capacity of 100; .* at most 60"),
        ({"refill_every": 1, "capacity": 1}, "than the capacity of 1; at 100 per 60 s .* 0.6"),
        *(
            ({"refill_every": 1, "algorithm": name}, "refill_every=1 is for token_bucket only")
            for name in UNIT_ALGORITHMS
            if name != "token_bucket"
        ),
    ],
)
def test_an_invalid_refill_step_is_rejected(arguments: dict[str, Any], words: str) -> None:
    """The error has the value, and a right one where it depends on the other numbers."""
    with pytest.raises(ConfigError, match=words):
        Limit(100, per=60, **arguments)


@pytest.mark.parametrize("name", ["", "login", "a b/c", "naïve 日本", "x" * 128])
def test_valid_names(name: str) -> None:
    """It is printable text of up to 128 characters."""
    check_name("name", name)
    assert Limit(1, per=1, name=name).name == name


# ------------------------------------------------------------------------------------ Request


def test_all_fields_of_a_request_are_optional() -> None:
    """Requests do not share their attributes."""
    request = Request()
    assert {
        getattr(request, field.name)
        for field in dataclasses.fields(Request)
        if field.name != "attributes"
    } == {None}
    assert request.attributes == {}
    assert request.attributes is not Request().attributes


def test_a_request_is_frozen() -> None:
    """No field can be changed."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Request(user="42").user = "root"  # type: ignore[misc]  # this is the tested case


def test_equal_requests_have_equal_hashes() -> None:
    """A request can be in a set or the key of a cache."""
    assert hash(Request(user="42")) == hash(Request(user="42"))


# ------------------------------------------------------------------------------------ Decision

LIMIT = Limit(10, per=1)
FULL = Decision(
    allowed=False,
    policy=LIMIT,
    remaining=3,
    retry_after_ns=100_000_000,
    reset_after_ns=700_000_000,
    delay_ns=250_000_000,
    rule="orders",
    degraded=True,
)


def test_a_decision_has_seconds_and_nanoseconds() -> None:
    """Names with the suffix `_ns` are nanoseconds; without it, seconds."""
    assert (FULL.retry_after_ns, FULL.reset_after_ns, FULL.delay_ns) == (
        100_000_000,
        700_000_000,
        250_000_000,
    )
    assert (FULL.retry_after, FULL.reset_after, FULL.delay) == (0.1, 0.7, 0.25)
    assert (FULL.limit, FULL.remaining, FULL.rule, FULL.degraded) == (10, 3, "orders", True)


def test_a_decision_is_true_when_allowed() -> None:
    """`if limiter.check(key)` means allowed."""
    assert not FULL
    assert decision_with(FULL, allowed=True)


def test_limit_is_the_capacity() -> None:
    """`limit` is the maximum of `remaining`, including the burst."""
    assert Decision(True, Limit(10, per=1, burst=5), 14).limit == 15


@pytest.mark.parametrize("field", DECISION_FIELDS)
def test_each_field_takes_part_in_equality(field: str) -> None:
    """Two decisions that differ in one field are not equal; a copy is equal."""
    others = (True, Limit(11, per=1), 4, 1, 1, 1, "login", False, 1, 1, 1, "block")
    other = dict(zip(DECISION_FIELDS, others, strict=True))[field]
    assert decision_with(FULL, **{field: other}) != FULL
    assert decision_with(FULL) == FULL
    assert hash(decision_with(FULL)) == hash(FULL)
    assert FULL != "a decision"


@pytest.mark.parametrize("field", [*DECISION_FIELDS, "limit", "retry_after", "new"])
def test_a_decision_is_read_only(field: str) -> None:
    """No field can be set or added."""
    with pytest.raises(AttributeError):
        setattr(FULL, field, 1)


def test_a_decision_survives_pickling() -> None:
    """All fields are kept."""
    assert pickle.loads(pickle.dumps(FULL)) == FULL
    assert copy.deepcopy(FULL) == FULL


@pytest.mark.parametrize(
    ("decision", "shown"),
    [
        (Decision(True, LIMIT, 9), "<Decision allowed remaining=9/10 reset_after=0>"),
        (
            FULL,
            (
                "<Decision denied remaining=3/10 retry_after=0.1 reset_after=0.7 delay=0.25 "
                "rule='orders' degraded>"
            ),
        ),
    ],
)
def test_a_decision_prints_as_one_line(decision: Decision, shown: str) -> None:
    """The line is readable."""
    assert repr(decision) == shown


def test_the_docstrings_example_is_true() -> None:
    """With 10/second, it explains the 4th of 4 requests at one instant, and the 11th."""
    from ratekeeper import Limiter  # noqa: PLC0415 - only this test needs a limiter
    from ratekeeper.testing import ManualClock  # noqa: PLC0415 - same

    limiter = Limiter("10/second", clock=ManualClock())
    decisions = [limiter.check("k") for _ in range(11)]
    assert decisions[3] == Decision(True, LIMIT, 6, 0, 400_000_000, charged_ns=0)
    assert decisions[10] == Decision(False, LIMIT, 0, 100_000_000, 1_000_000_000)
