"""The arguments of limiters: each type is validated in one place."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from ratekeeper import AsyncLimiter, ConfigError, InvalidCost, Limit, Limiter, Request
from ratekeeper.core.clock import SystemClock, clock_of
from ratekeeper.core.model import units_of
from ratekeeper.core.rates import limits_of
from ratekeeper.limiter.arguments import cost_of, key_of, kind_of, name_of
from ratekeeper.testing import ManualClock

# ------------------------------------------------------------------------------------ clocks


def test_the_default_clock_is_the_system_clock() -> None:
    """None means real time; any other clock is used unchanged."""
    clock = ManualClock()
    assert clock_of(clock) is clock
    assert type(clock_of(None)) is SystemClock


@pytest.mark.parametrize("clock", [5, "now", object(), 0, False])
def test_an_invalid_clock_is_rejected(clock: Any) -> None:
    """The error is raised when the limiter is created, not at its first check."""
    with pytest.raises(ConfigError, match=r"has no now_ns\(\); for example clock=.*ManualClock"):
        clock_of(clock)


# ------------------------------------------------------------------------------------ limits

FIVE, SIX = Limit(5, per=1), Limit(6, per=60)


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ("5/s", (FIVE,)),
        (FIVE, (FIVE,)),
        ("5/s; 6/m", (FIVE, SIX)),
        (["5/s", SIX], (FIVE, SIX)),
        (("5/s; 6/m",), (FIVE, SIX)),
    ],
    ids=repr,
)
def test_limits(limits: Any, found: tuple[Limit, ...]) -> None:
    """Limits are a rate string, a Limit, or a list or tuple of these, in order."""
    assert limits_of(limits) == found


@pytest.mark.parametrize(
    "limits", [None, 5, b"5/s", {"5/s"}, {"5/s": 1}, iter(["5/s"]), object()], ids=range(7)
)
def test_invalid_limits_are_rejected(limits: Any) -> None:
    """Sets are rejected because they have no order, iterators because they can be read only
    once."""
    with pytest.raises(ConfigError, match=r"^limits=.* is not a rate, a Limit, or a list of them"):
        limits_of(limits)


@pytest.mark.parametrize(
    "limits",
    [["5/s", "6/s"], "5/s; 6/s", [FIVE, FIVE], [Limit(5, 1, name="n"), Limit(6, 2, name="n")]],
)
def test_limits_that_would_share_one_count_are_rejected(limits: Any) -> None:
    """They would be charged once and refunded twice. The error suggests names."""
    with pytest.raises(ConfigError, match="would share one count; give each its own name"):
        limits_of(limits)


@pytest.mark.parametrize("count", [0, 17])
def test_there_are_1_to_16_limits(count: int) -> None:
    """An empty list limits nothing, and hundreds of limits would make a check slow."""
    assert len(limits_of([f"1/{n}s" for n in range(1, 17)])) == 16
    with pytest.raises(ConfigError, match=f"a limiter has 1 to 16 limits, not {count}"):
        limits_of([f"1/{n}s" for n in range(1, count + 1)])


# ------------------------------------------------------------------------------------ units


class Seven:
    """A whole number that is not an int, like those of numpy."""

    def __index__(self) -> int:
        return 7


@pytest.mark.parametrize(("units", "whole"), [(0, 0), (1, 1), (10**30, 10**30), (Seven(), 7)])
def test_units(units: Any, whole: int) -> None:
    """Any whole number from 0 is accepted and returned as an int."""
    assert units_of(units, "cost") == whole
    assert type(units_of(units, "cost")) is int


@pytest.mark.parametrize("units", [-1, 1.0, "1", None, True, False, 1j, [1]], ids=repr)
def test_invalid_units_are_rejected(units: Any) -> None:
    """The error names the argument."""
    with pytest.raises(InvalidCost, match=r"^units=.* is not a whole number.*example units=1$"):
        units_of(units, "units")


# ------------------------------------------------------------------------------------ functions


def _function(*args: Any) -> None: ...


async def _async_function(*args: Any) -> None: ...


async def _async_generator() -> AsyncIterator[int]:
    yield 1


class Called:
    """A callable object."""

    def __call__(self) -> None: ...


class Awaited:
    """A callable object that returns a coroutine."""

    async def __call__(self) -> None: ...

    async def method(self) -> None: ...


class Generated:
    """A callable object that returns an async generator."""

    async def __call__(self) -> AsyncIterator[int]:
        yield 1


@functools.wraps(_async_function)
def _wrapper(*args: Any) -> Any:
    return _async_function(*args)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (_function, "plain"),
        (len, "plain"),
        (Called, "plain"),
        (Called(), "plain"),
        (functools.partial(_function, 1), "plain"),
        (functools.partial(Called()), "plain"),
        (_async_function, "coroutine"),
        (_async_generator, "async generator"),
        (Awaited(), "coroutine"),
        (Awaited().method, "coroutine"),
        (functools.partial(_async_function, 1), "coroutine"),
        (functools.partial(Awaited()), "coroutine"),
        (functools.partial(functools.partial(_async_function, 1), 2), "coroutine"),
        (_wrapper, "coroutine"),
        (Generated(), "async generator"),
    ],
    ids=range(15),
)
def test_the_kind_of_a_function(function: Callable[..., object], kind: str) -> None:
    """Callable objects, partials and wrappers have the kind of the function that they call."""
    assert kind_of(function) == kind


def test_an_async_function_that_wraps_a_plain_one_is_async() -> None:
    """Defect: a plain endpoint with two limits of `limited` returned a coroutine to Starlette."""

    def plain() -> None: ...

    @functools.wraps(plain)
    async def wrapper() -> None: ...

    assert kind_of(wrapper) == "coroutine"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (_function, f"{__name__}._function"),
        (functools.partial(_function, 1), f"{__name__}._function"),
        (Called(), f"{__name__}.Called"),
        (functools.partial(Called()), f"{__name__}.Called"),
        (Awaited().method, f"{__name__}.Awaited.method"),
        (len, "builtins.len"),
    ],
    ids=range(6),
)
def test_the_name_of_a_function(function: Callable[..., object], name: str) -> None:
    """Module and name are the default key of a decorated function."""
    assert name_of(function) == name
    assert key_of(None, function, (), {}) == name


def test_key_and_cost_of_a_call() -> None:
    """A value applies to every call; a function is called with the arguments of the call."""
    assert key_of(("a", "b"), _function, ("x",), {}) == ("a", "b")
    assert key_of(lambda user, size: f"{user}:{size}", _function, ("x",), {"size": 2}) == "x:2"
    assert key_of(lambda user: Request(user=user), _function, ("x",), {}) == Request(user="x")
    assert cost_of(3, ("x",), {}) == 3
    assert cost_of(lambda user, size: size, ("x",), {"size": 2}) == 2


# ------------------------------------------------------------------------------------ options

RULES = '{"version": 1, "rules": [{"id": "all", "limits": ["1/s"]}]}'


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("1/s",), {"stroe": "memory://"}, "{}(…) has no option stroe (did you mean store?); the"),
        ((), {"bogus": 1, "ruels": 2}, "{}(…) has no option bogus, ruels; the options are limits"),
        ((), {}, "{}(…): missing a required argument: 'limits'; for example {}("),
        (("1/s", "redis://"), {}, "{}(…): too many positional arguments; for example {}("),
    ],
)
def test_wrong_options_of_a_limiter_name_it(
    kind: Any, arguments: Any, options: Any, said: str
) -> None:
    """The error names the class that was called, and what to use; it is a TypeError as well."""
    for error in (ConfigError, TypeError):
        with pytest.raises(error) as caught:
            kind(*arguments, **options)
        assert said.replace("{}", kind.__name__) in str(caught.value)
        assert "Setup" not in str(caught.value)


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_wrong_options_of_rules_name_from_rules(kind: Any) -> None:
    """Its errors name the class and the method."""
    with pytest.raises(ConfigError) as caught:
        kind.from_rules(RULES, stroe="memory://")
    said = f"{kind.__name__}.from_rules(…) has no option stroe (did you mean store?); the options"
    assert str(caught.value).startswith(said)
    with pytest.raises(ConfigError, match=r"from_rules\(…\): missing a required argument: 'rules'"):
        kind.from_rules()


def test_a_subclass_may_have_options_of_its_own() -> None:
    """Its own constructor takes them; an unknown one names the subclass."""

    class Tenants(Limiter):
        def __init__(self, limits: str, tenant: str, **options: Any) -> None:
            super().__init__(limits, name=tenant, **options)

    assert Tenants("1/s", tenant="acme").name == "acme"
    with pytest.raises(
        ConfigError, match=r"^Tenants\(…\) has no option stor \(did you mean store\?\)"
    ):
        Tenants("1/s", "acme", stor="memory://")
