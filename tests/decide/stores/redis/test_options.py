"""What the options of a Redis URI may be: those for when it fails, and for hot keys.

The others are in `test_config.py`, with the URI around them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tollkeeper.core.errors import ConfigError
from tollkeeper.decide.stores.redis.config import parse


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("denied_cache_ns", 10**9),
        ("coalesce", True),
        ("breaker", True),
        ("breaker_window_ns", 10 * 10**9),
        ("breaker_failures", 5),
        ("breaker_share", 0.5),
        ("breaker_open_ns", 10**9),
        ("breaker_open_max_ns", 15 * 10**9),
        ("breaker_probes", 2),
    ],
)
def test_what_nobody_said_is_this(field: str, value: object) -> None:
    """The defaults that the documents name."""
    assert getattr(parse("redis://localhost"), field) == value


@pytest.mark.parametrize(
    ("option", "given", "field", "value"),
    [
        ("denied_cache_ms", "0", "denied_cache_ns", 0),
        ("denied_cache_ms", 0, "denied_cache_ns", 0),
        ("denied_cache_ms", "1.5", "denied_cache_ns", 1_500_000),
        ("denied_cache_ms", 1.5, "denied_cache_ns", 1_500_000),
        ("coalesce", "off", "coalesce", False),
        ("coalesce", "TRUE", "coalesce", True),
        ("coalesce", False, "coalesce", False),
        ("breaker", "false", "breaker", False),
        ("breaker", "on", "breaker", True),
        ("breaker_window_ms", "500", "breaker_window_ns", 500_000_000),
        ("breaker_failures", "9", "breaker_failures", 9),
        ("breaker_failures", 7, "breaker_failures", 7),
        ("breaker_share", "0.25", "breaker_share", 0.25),
        ("breaker_share", 1, "breaker_share", 1.0),
        ("breaker_open_ms", "2.5", "breaker_open_ns", 2_500_000),
        ("breaker_open_max_ms", 60_000, "breaker_open_max_ns", 60 * 10**9),
        ("breaker_probes", "1", "breaker_probes", 1),
    ],
)
def test_an_option_is_read_from_text_and_as_an_argument(
    option: str, given: Any, field: str, value: object
) -> None:
    """Text is as in the URI; an argument may be of the option's own type."""
    assert getattr(parse("redis://localhost", **{option: given}), field) == value
    if isinstance(given, str):
        assert getattr(parse(f"redis://localhost?{option}={given}"), field) == value


@pytest.mark.parametrize(
    ("option", "given", "problem"),
    [
        ("denied_cache_ms", "-1", "denied_cache_ms='-1' is not a number of milliseconds"),
        ("denied_cache_ms", False, "denied_cache_ms=False is not"),
        ("coalesce", "maybe", "coalesce='maybe' is neither on nor off; for example"),
        ("coalesce", 1, "coalesce=1 is neither on nor off"),
        ("breaker", "a=b", "breaker=(not shown) is neither"),
        ("breaker_failures", "0", "breaker_failures='0' is not a whole number from 1 to"),
        ("breaker_failures", 10**7, "is not a whole number from 1 to 1,000,000"),
        ("breaker_failures", True, "breaker_failures=True is not"),
        ("breaker_probes", "1.5", "breaker_probes='1.5' is not a whole number"),
        ("breaker_share", "0", "breaker_share='0' is not a share above 0, up to 1"),
        ("breaker_share", "1.1", "breaker_share='1.1' is not a share"),
        ("breaker_share", float("nan"), "breaker_share=nan is not a share"),
        ("breaker_share", True, "breaker_share=True is not a share"),
        ("breaker_window_ms", "0", "breaker_window_ms='0' is not a number of milliseconds"),
        ("breaker_open_ms", "16000", "breaker_open_ms is more than breaker_open_max_ms"),
        ("breaker_open_max_ms", 999, "breaker_open_ms is more than breaker_open_max_ms"),
    ],
)
def test_a_wrong_one_says_what_would_be_right(option: str, given: Any, problem: str) -> None:
    """The message names the option, and an example."""
    with pytest.raises(ConfigError) as caught:
        parse("redis://localhost", **{option: given})
    assert problem in str(caught.value)
