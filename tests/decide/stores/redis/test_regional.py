"""Global limits on Redis: the parts that need no server."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.promises.strategies import limit_of
from tollkeeper.core.errors import ConfigError
from tollkeeper.core.model import Limits
from tollkeeper.decide.regional import Shares
from tollkeeper.decide.stores.redis import regional
from tollkeeper.decide.stores.redis.codec import refill_per_us
from tollkeeper.decide.stores.redis.scripts import (
    REGIONAL_ACCEPT,
    REGIONAL_CHANGE,
    REGIONAL_CHECK,
    REGIONAL_LEARN,
    REGIONAL_REPORT,
    REGIONAL_USAGE,
)

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
