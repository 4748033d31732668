"""Global limits on Redis: the parts that need no server."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ratekeeper.core.errors import ConfigError
from ratekeeper.core.model import (
    BUCKETS,
    UNIT_ALGORITHMS,
    AlgorithmName,
    Limits,
    decision_fields,
)
from ratekeeper.decide.regional import AcrossRegions, Shares, decision_of
from ratekeeper.decide.stores.redis import regional
from ratekeeper.decide.stores.redis.codec import refill_per_us
from ratekeeper.decide.stores.redis.scripts import (
    REGIONAL_ACCEPT,
    REGIONAL_CHANGE,
    REGIONAL_CHECK,
    REGIONAL_LEARN,
    REGIONAL_REPORT,
    REGIONAL_USAGE,
)
from tests.promises.strategies import limit_of

LIMITS: Limits = (
    limit_of("token_bucket", 7, 5_000_001, 20, refill_us=1_300_000),
    limit_of("leaky_bucket", 90, 60_000_000),
    limit_of("fixed_window", 20, 7_000_000),
    limit_of("sliding_window_counter", 999_999_937, 9_000_001),
    limit_of("sliding_window_log", 25, 1_000),
)


def numbers_of(limits: Limits) -> tuple[int, ...]:
    """Return the gate of exact limits, as a script unpacks it."""
    found = [-1, 0, max(limit.window_ns for limit in limits) // 1_000]
    for kind, limit in enumerate(limits, start=1):
        step_us = max(limit.refill_step_ns // 1_000, 1)
        found += [
            kind,
            limit.capacity,
            *refill_per_us(limit),
            limit.window_ns // 1_000,
            step_us,
        ]
    return tuple(found)


def test_a_report_has_the_limits_that_its_region_counts() -> None:
    """The limits of a report are those of the gate in the state, without their names."""
    assert regional.decode_gate(numbers_of(LIMITS)) == (LIMITS, "exact")


def test_two_modes_have_different_gates() -> None:
    """A rule that becomes exact is counted as an exact one from the next check on."""
    gates = {regional.encode_gate(LIMITS, across) for across in ("exact", "eventual")}
    assert len(gates) == 2


def test_a_share_that_the_scripts_cannot_multiply_is_refused() -> None:
    """The scripts multiply the denominators of two shares, and stay below 2**53."""
    share = Fraction(1, regional.SHARE_PARTS_MAX + 1)
    with pytest.raises(ConfigError, match="1,000,000; for example 1/5"):
        regional._encode_shares(Shares(1, share, share, 0, ()), 1)


@pytest.mark.parametrize(
    "script",
    [
        REGIONAL_ACCEPT,
        REGIONAL_CHANGE,
        REGIONAL_CHECK,
        REGIONAL_LEARN,
        REGIONAL_REPORT,
        REGIONAL_USAGE,
    ],
)
def test_a_client_that_is_not_logged_in_may_send_the_script(script: regional.LuaScript) -> None:
    """Redis closes the connection of such a client after an argument of more than 16 KiB."""
    assert len(script.text) < 16_384


MICROS = 1_000_000
levels = st.integers(0, 40 * MICROS)


@given(
    algorithm=st.sampled_from([each for each in UNIT_ALGORITHMS if each != "sliding_window_log"]),
    across=st.sampled_from(["exact", "eventual"]),
    share=st.sampled_from([(1, 1), (1, 5), (200, 1_000), (1, 1_000), (999, 1_000)]),
    now_us=st.integers(1_800_000_000 * MICROS, 1_800_000_020 * MICROS),
    found=st.tuples(levels, levels, levels, levels),
    cost=st.integers(1, 30),
    refill_us=st.sampled_from([0, 700_000]),
)
def test_a_charged_request_is_decided_as_by_the_reference(
    algorithm: AlgorithmName,
    across: AcrossRegions,
    share: tuple[int, int],
    now_us: int,
    found: tuple[int, int, int, int],
    cost: int,
    refill_us: int,
) -> None:
    """The shorter way has every field of `decision_of`, whatever the levels are."""
    is_bucket = algorithm in BUCKETS
    step_us = refill_us if algorithm == "token_bucket" else 0
    limit = limit_of(algorithm, 25, 7_000_001, 40 * is_bucket, refill_us=step_us)
    known, own, known_before, own_before = found
    own += cost * MICROS
    if algorithm == "fixed_window":
        known_before = own_before = 0
    numbers = [now_us // 7_000_001, known, own, known_before, own_before]
    if is_bucket:
        numbers = [now_us, known, own]
    decided = regional.charged_decision(limit, across, *share, now_us, numbers, cost, "rule")
    assert decided is not None
    expected = decision_of(
        (limit,),
        [regional._ledger_of(limit, numbers)],
        across,
        Fraction(*share),
        now_us * 1_000,
        cost,
        "rule",
        charged=True,
        granted=0,
        step_ns=1_000,
    )
    assert decision_fields(decided) == decision_fields(expected)


@given(
    algorithm=st.sampled_from(sorted(BUCKETS)),
    across=st.sampled_from(["exact", "eventual"]),
    share=st.sampled_from([(1, 1), (1, 5), (200, 1_000), (1, 1_000), (999, 1_000)]),
    now_us=st.integers(1_800_000_000 * MICROS, 1_800_000_020 * MICROS),
    ago_us=st.integers(0, 30 * MICROS),
    found=st.tuples(levels, levels),
    cost=st.integers(1, 50),
)
def test_a_denial_by_a_bucket_is_that_of_the_reference(
    algorithm: AlgorithmName,
    across: AcrossRegions,
    share: tuple[int, int],
    now_us: int,
    ago_us: int,
    found: tuple[int, int],
    cost: int,
) -> None:
    """The shorter way has every field of `decision_of`, or leaves the request to it."""
    limit = limit_of(algorithm, 25, 7_000_001, 40)
    numbers = [now_us - ago_us, *found]
    whole = Fraction(*share)
    expected = decision_of(
        (limit,),
        [regional._ledger_of(limit, numbers)],
        across,
        whole,
        now_us * 1_000,
        cost,
        "rule",
        charged=False,
        granted=0,
        step_ns=1_000,
    )
    assume(not expected.allowed)
    decided = regional.denied_by_bucket(limit, across, *share, now_us, numbers, cost, "rule")
    never = cost > 40 * (whole if across == "exact" else 1)
    assert (decided is None) == never
    if decided is not None:
        assert decision_fields(decided) == decision_fields(expected)


@given(
    algorithm=st.sampled_from(["fixed_window", "sliding_window_counter"]),
    across=st.sampled_from(["exact", "eventual"]),
    share=st.sampled_from([(1, 1), (1, 5), (200, 1_000), (1, 1_000), (999, 1_000)]),
    now_us=st.integers(1_800_000_000 * MICROS, 1_800_000_020 * MICROS),
    found=st.tuples(levels, levels, levels, levels),
    cost=st.integers(1, 30),
)
def test_a_denial_by_a_window_is_that_of_the_reference(
    algorithm: AlgorithmName,
    across: AcrossRegions,
    share: tuple[int, int],
    now_us: int,
    found: tuple[int, int, int, int],
    cost: int,
) -> None:
    """The shorter way has every field of `decision_of`, or leaves the request to it."""
    limit = limit_of(algorithm, 25, 7_000_001)
    before = found[2:] if algorithm == "sliding_window_counter" else (0, 0)
    numbers = [now_us // 7_000_001, *found[:2], *before]
    whole = Fraction(*share)
    expected = decision_of(
        (limit,),
        [regional._ledger_of(limit, numbers)],
        across,
        whole,
        now_us * 1_000,
        cost,
        "rule",
        charged=False,
        granted=0,
        step_ns=1_000,
    )
    assume(not expected.allowed)
    decided = regional.denied_by_window(limit, across, *share, now_us, numbers, cost, "rule")
    never = cost > 25 * (whole if across == "exact" else 1)
    assert (decided is None) == never
    if decided is not None:
        assert decision_fields(decided) == decision_fields(expected)


def test_a_ledger_that_is_not_of_now_is_left_to_the_reference() -> None:
    """After the clock was set back, and for a bucket between two steps."""
    bucket, window = limit_of("token_bucket", 9, MICROS), limit_of("fixed_window", 9, MICROS)
    ahead = (5 * MICROS, 0, MICROS)
    assert regional.charged_decision(bucket, "exact", 1, 5, MICROS, ahead, 1, "r") is None
    ahead_window = (5, 0, MICROS, 0, 0)
    assert regional.charged_decision(window, "exact", 1, 5, MICROS, ahead_window, 1, "r") is None
    log = limit_of("sliding_window_log", 9, MICROS)
    assert regional.charged_decision(log, "exact", 1, 5, MICROS, (MICROS, 0, 1), 1, "r") is None
