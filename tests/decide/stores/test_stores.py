"""Stores by URI."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ratekeeper.core.errors import ConfigError
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.memory import STATES_MAX_DEFAULT
from ratekeeper.testing import ManualClock

CLOCK = ManualClock()


@pytest.mark.parametrize(
    ("uri", "states_max"),
    [
        ("memory://", STATES_MAX_DEFAULT),
        ("memory:///", STATES_MAX_DEFAULT),
        ("MEMORY://", STATES_MAX_DEFAULT),
        ("memory://?capacity=1", 1),
        ("memory://?capacity=50000", 50_000),
        ("memory://?capacity=50_000", 50_000),
        ("memory://?capacity=000000000007", 7),
        ("memory:///?capacity=7", 7),
    ],
)
def test_a_valid_uri_opens_a_store(uri: str, states_max: int) -> None:
    """Each opens a store with room for at least this many states."""
    store = open_store(uri, CLOCK)
    assert states_max <= store.stats().states_max <= 2 * states_max + 1_000
    store.close()


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("", "no known scheme; there are memory://"),
        ("memory", "no known scheme"),
        ("memory:", "no known scheme"),
        ("//", "no known scheme"),
        ("memcached://localhost", "no known scheme"),
        ("memory://localhost", "has no address"),
        ("memory://localhost:6379/0", "has no address"),
        ("memory:///var/limits", "has no address"),
        ("memory://?size=5", "no option size; the options are capacity, log_bytes, allowances"),
        ("memory://?capacity=5&log_byte=5", "no option log_byte; did you mean log_bytes?"),
        ("memory://?mode=600", "no option mode"),
        ("memory://?capacity=5&capacity=6", "gives capacity twice"),
        ("memory://?capacity=", "capacity='' is not a whole number from 1 to 1,000,000,000"),
        ("memory://?capacity=0", "capacity='0' is not a whole number"),
        ("memory://?capacity=-1", "capacity='-1' is not a whole number"),
        ("memory://?capacity=1.5", "capacity='1.5' is not a whole number"),
        ("memory://?capacity=1e6", "capacity='1e6' is not a whole number"),
        ("memory://?capacity=1000000001", "capacity='1000000001' is not a whole number"),
        ("memory://?capacity=_", "capacity='_' is not a whole number"),
        ("memory://?capacity=many", "capacity='many' is not a whole number"),
        # Digits in Unicode, and rejected: many readers of a configuration could not read them.
        ("memory://?capacity=\u0665", "is not a whole number"),
        ("memory://?capacity=\u00b2", "is not a whole number"),
        ("memory://?capacity=" + "9" * 5_000, "is not a whole number"),
    ],
)
def test_an_invalid_uri_is_rejected(uri: str, problem: str) -> None:
    """Each raises a ConfigError with the URI or its scheme, and the valid choices."""
    with pytest.raises(ConfigError) as caught:
        open_store(uri, CLOCK)
    scheme = uri.partition("://")[0]
    shown = uri if uri.startswith("memory://") else scheme
    expected = f"store={shown!r}" if scheme.isidentifier() else "store=…"
    assert str(caught.value).startswith(expected)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "uri", ["redis:app:hunter2@host", "app:hunter2@host", "redsi://app:hunter2@host", "hunter2@"]
)
def test_the_error_does_not_repeat_an_unreadable_uri(uri: str) -> None:
    """It may contain a password anywhere."""
    with pytest.raises(ConfigError) as caught:
        open_store(uri, CLOCK)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("uri", [None, 5, b"memory://", ["memory://"], object()])
def test_a_uri_must_be_text(uri: Any) -> None:
    """Other types are rejected."""
    with pytest.raises(ConfigError, match="is not a URI or a store"):
        open_store(uri, CLOCK)


@pytest.mark.parametrize("digits", ["000000000001" + "0" * 12, "000000000001" + "0" * 4_300])
def test_leading_zeros_do_not_bypass_the_maximum(digits: str) -> None:
    """A capacity is at most a billion in any spelling."""
    with pytest.raises(ConfigError, match="is not a whole number"):
        open_store(f"memory://?capacity={digits}", CLOCK)


@given(st.text() | st.builds("memory://{}".format, st.text()))
@example("memory://[")
@example("memory://\u2100")
@example("memory://?capacity=000000000001" + "0" * 4_300)
def test_any_text_opens_or_is_a_config_error(uri: str) -> None:
    """Any text gives a store or a ConfigError."""
    with suppress(ConfigError):
        open_store(uri, CLOCK).close()
