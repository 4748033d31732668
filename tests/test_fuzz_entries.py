"""Public functions with arbitrary arguments: a result or one of our errors, and nothing else."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ratekeeper import (
    AsyncLimiter,
    ConfigError,
    Decision,
    InvalidCost,
    InvalidKey,
    Limit,
    Limiter,
    LimitExceeded,
    RatekeeperError,
    Request,
    parse_limits,
)
from ratekeeper.core.clock import Clock, SystemClock
from ratekeeper.testing import ManualClock

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 3),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=20),
    st.sampled_from(["\ud800", "\x1f", "5/s", "user", "memory://", "x" * 600]),
    st.binary(max_size=20),
    st.decimals(),
    st.fractions(),
    st.timedeltas(),
    st.builds(object),
)
ANYTHING = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.lists(inner, max_size=3).map(iter),
    ),
    max_leaves=5,
)
# Python refuses to print an int of more than 4,300 digits, and an error message is printing.
HUGE: Any = 10**5_000


def _limiter(clock: Clock | None = None) -> Limiter:
    return Limiter("3/m; 5/h", clock=clock or ManualClock(), by=["user", "region"])


# ------------------------------------------------------------------------------------ verbs


@given(ANYTHING, ANYTHING)
def test_check_and_peek(key: Any, cost: Any) -> None:
    """Any key and any cost: a decision, InvalidKey, InvalidCost or CapacityError."""
    # On the system clock an engine may take a short cut, so both clocks are asked.
    for limiter in (_limiter(), _limiter(SystemClock()), Limiter("3/m")):
        for verb in (limiter.peek, limiter.check):
            with suppress(RatekeeperError):
                assert isinstance(verb(key, cost), Decision)


@given(ANYTHING)
def test_a_wrong_key_is_always_an_invalid_key(key: Any) -> None:
    """Anything that is not text, a tuple or a Request raises InvalidKey."""
    if not isinstance(key, str | tuple):
        with pytest.raises(InvalidKey):
            _limiter().check(key)
        with pytest.raises(InvalidKey):
            Limiter("3/m").check(key)


@given(ANYTHING)
def test_a_wrong_cost_is_always_an_invalid_cost(cost: Any) -> None:
    """Anything that is not a whole number from 0 up raises InvalidCost."""
    if not isinstance(cost, dict) and (type(cost) is not int or cost < 0):
        with pytest.raises(InvalidCost):
            _limiter().check("k", cost)
        with pytest.raises(InvalidCost):
            Limiter("3/m").check("k", cost)


@given(ANYTHING)
def test_wrong_costs_are_always_an_invalid_cost(units: Any) -> None:
    """The numbers of costs by unit are whole, and from 0 up."""
    if type(units) is not int or units < 0:
        with pytest.raises(InvalidCost):
            _limiter().check("k", costs={"requests": units})


@given(ANYTHING, ANYTHING)
def test_refund_and_reset(key: Any, cost: Any) -> None:
    """None, or one of our errors."""
    limiter = _limiter()
    with suppress(RatekeeperError):
        limiter.refund(key, cost)
    with suppress(RatekeeperError):
        limiter.reset(key)


@given(ANYTHING, ANYTHING)
def test_grant_units(key: Any, units: Any) -> None:
    """Any key and any units."""
    with suppress(RatekeeperError):
        _limiter().grant(key, units)


@given(ANYTHING)
@example(math.nan)
@example(math.inf)
@example(1e300)
@example("")
@example(object())
@example(timedelta(hours=1))
def test_grant_ttl(ttl: Any) -> None:
    """Any ttl: granted, or a ConfigError."""
    with suppress(ConfigError):
        _limiter().grant("k", 1, ttl)


@given(ANYTHING)
@example("5")
@example(object())
@example(timedelta(seconds=5))
def test_wait_timeout(timeout: Any) -> None:
    """Any timeout: a decision, or a ConfigError; the same when awaited."""
    with suppress(ConfigError):
        assert isinstance(_limiter().wait("k", timeout=timeout), Decision)
    with suppress(ConfigError):
        asyncio.run(AsyncLimiter("3/m", clock=ManualClock()).wait("k", timeout=timeout))


@given(ANYTHING)
@example("5")
@example(object())
def test_reserve_wait(wait: Any) -> None:
    """Any `wait`: the block runs, or it is a ConfigError."""
    with suppress(ConfigError, LimitExceeded), _limiter().reserve("k", wait=wait) as reservation:
        assert reservation.decision.allowed


@given(ANYTHING, ANYTHING)
def test_a_requests_values(user: Any, region: Any) -> None:
    """Any value of an attribute: counted, or InvalidKey."""
    with suppress(InvalidKey):
        assert _limiter().check(Request(user=user, attributes={"region": region}))


@given(ANYTHING)
@example(None)
@example([])
def test_a_requests_attributes(attributes: Any) -> None:
    """Any attributes: counted, or one of our errors."""
    with suppress(RatekeeperError):
        _limiter().check(Request(attributes=attributes))


# ------------------------------------------------------------------------------------ making one


@given(ANYTHING, ANYTHING, ANYTHING, ANYTHING)
def test_limit_arguments(limit: Any, per: Any, burst: Any, capacity: Any) -> None:
    """Any numbers: a Limit or a ConfigError."""
    with suppress(ConfigError):
        Limit(limit, per=per)
    with suppress(ConfigError):
        Limit(5, per=60, burst=burst, capacity=capacity)


@given(ANYTHING, ANYTHING)
def test_limit_words(algorithm: Any, name: Any) -> None:
    """Any algorithm and name: a Limit or a ConfigError."""
    with suppress(ConfigError):
        Limit(5, per=60, algorithm=algorithm)
    with suppress(ConfigError):
        Limit(5, per=60, name=name)


@given(ANYTHING, ANYTHING)
def test_parse_limits(text: Any, algorithm: Any) -> None:
    """Any argument: limits or a ConfigError."""
    with suppress(ConfigError):
        parse_limits(text)
    with suppress(ConfigError):
        parse_limits("5/s", algorithm=algorithm)


@given(ANYTHING)
@example(None)
@example(5)
def test_limiter_limits(limits: Any) -> None:
    """Any limits: a Limiter or a ConfigError."""
    with suppress(ConfigError):
        Limiter(limits)


@given(ANYTHING)
@example(None)
@example(5)
@example(object())
def test_limiter_store(store: Any) -> None:
    """Any store: a Limiter or a ConfigError."""
    with suppress(ConfigError):
        Limiter("5/s", store=store)


@given(ANYTHING)
@example(5)
@example(object())
def test_limiter_clock(clock: Any) -> None:
    """Any clock: one that can be read, or a ConfigError."""
    with suppress(ConfigError):
        Limiter("5/s", clock=clock).check("k")


@given(ANYTHING)
@example(5)
@example([[]])
@example(iter(["user"]))
def test_limiter_by(by: Any) -> None:
    """Any `by`: a Limiter or a ConfigError."""
    with suppress(ConfigError):
        Limiter("5/s", by=by)


@given(ANYTHING, ANYTHING)
def test_limiter_words(name: Any, on_failure: Any) -> None:
    """Any name and failure policy: a Limiter or a ConfigError."""
    with suppress(ConfigError):
        Limiter("5/s", name=name)
    with suppress(ConfigError):
        Limiter("5/s", on_failure=on_failure)


@given(ANYTHING)
@example(math.nan)
@example(math.inf)
@example(1e300)
@example(HUGE)
def test_manual_clock_seconds(seconds: Any) -> None:
    """Any seconds: a clock at a whole number of nanoseconds, or a ConfigError."""
    with suppress(ConfigError):
        assert isinstance(ManualClock(seconds).now_ns(), int)
    clock = ManualClock()
    with suppress(ConfigError):
        clock.advance(seconds)
    assert isinstance(clock.now_ns(), int)


# ------------------------------------------------------------------------------------ huge ints


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: _limiter().check("k", HUGE), id="cost"),
        pytest.param(lambda: _limiter().check("k", -HUGE), id="negative cost"),
        pytest.param(lambda: _limiter().refund("k", -HUGE), id="refund"),
        pytest.param(lambda: _limiter().check(("a", HUGE)), id="key"),
        pytest.param(lambda: _limiter().check(Request(user=HUGE)), id="request"),
        pytest.param(lambda: _limiter().grant("k", 1, ttl=HUGE), id="ttl"),
        pytest.param(lambda: _limiter().wait("k", timeout=-HUGE), id="timeout"),
        pytest.param(lambda: Limit(HUGE, per=60), id="limit"),
        pytest.param(lambda: Limit(5, per=HUGE), id="per"),
        pytest.param(lambda: Limit(5, per=60, burst=HUGE), id="burst"),
        pytest.param(lambda: Limit(5, per=60, capacity=-HUGE), id="capacity"),
        pytest.param(lambda: Limit(5, per=60, name=HUGE), id="name"),
        pytest.param(lambda: Limit(5, per=60, algorithm=HUGE), id="algorithm"),
        pytest.param(lambda: Limiter([HUGE]), id="limits"),
        pytest.param(lambda: Limiter("5/s", by=[HUGE]), id="by"),
        pytest.param(lambda: Limiter("5/s", on_failure=HUGE), id="on_failure"),
    ],
)
def test_a_huge_number_is_rejected_like_any_other(call: Any) -> None:
    """A number of 5,001 digits raises one of our errors, not one of Python's."""
    with pytest.raises(RatekeeperError):
        call()
