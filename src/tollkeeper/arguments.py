"""What callers hand to a limiter, checked and in one form. Errors say what would be right."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from tollkeeper.clock import Clock, SystemClock
from tollkeeper.errors import ConfigError, InvalidCost, show
from tollkeeper.identify import Key
from tollkeeper.match.rules import Document
from tollkeeper.model import Limit, Request
from tollkeeper.rates import LIMITS_MAX, parse_limits

Rules = str | PathLike[str] | Mapping[str, Any] | Document
Limits = str | Limit | Sequence[str | Limit]
KeySource = Key | Callable[..., Key | Request] | None
CostSource = int | Callable[..., int]


def clock_of(clock: Clock | None) -> Clock:
    """The clock to go by; what has no `now_ns` is refused."""
    if clock is None:
        return SystemClock()
    if not callable(getattr(clock, "now_ns", None)):
        raise ConfigError(
            f"clock={show(clock)} has no now_ns(); "
            f"for example clock=tollkeeper.testing.ManualClock()"
        )
    return clock


def limits_of(limits: Limits) -> tuple[Limit, ...]:
    """The limits that a rate string, a Limit, or several of either stand for."""
    given = [limits] if isinstance(limits, str | Limit) else limits
    if not isinstance(given, list | tuple):
        raise ConfigError(
            f"limits={show(limits)} is not a rate, a Limit, or a list of them; "
            f'for example Limiter("10/second; 1000/hour")'
        )
    found: list[Limit] = []
    for item in given:
        found.extend((item,) if isinstance(item, Limit) else parse_limits(item))
    if not 1 <= len(found) <= LIMITS_MAX:
        raise ConfigError(
            f"a limiter has 1 to {LIMITS_MAX} limits, not {len(found)}; "
            f'for example Limiter("10/second; 1000/hour")'
        )
    by_identity: dict[str, Limit] = {}
    for limit in found:
        other = by_identity.get(limit.identity)
        by_identity[limit.identity] = limit
        if other is not None:
            raise ConfigError(
                f"{other!r} and {limit!r} would share one count: give each a name of its own, "
                f"for example {Limit(limit.limit, limit.per, name='second')!r}, or drop one"
            )
    return tuple(found)


def is_document_text(rules: str) -> bool:
    """Whether it is a document itself, and no path or URL of one: several lines, or JSON.

    >>> is_document_text('{"version": 1}'), is_document_text("limits.yaml")
    (True, False)
    """
    return "\n" in rules or rules.lstrip().startswith("{")


def document_of(rules: Rules) -> Document:
    """The document that a path, a text or a mapping stands for."""
    if isinstance(rules, Document):
        return rules
    # Imported here: reading a document needs a library that limits alone do without.
    from tollkeeper.match.document import from_data, read, read_file  # noqa: PLC0415 - see above

    if isinstance(rules, Mapping):
        return from_data(rules)
    if isinstance(rules, str) and is_document_text(rules):
        return read(rules)
    if isinstance(rules, str | PathLike):
        return read_file(Path(rules))
    raise ConfigError(
        f"rules={show(rules)} is not a document, its path or its text; "
        f'for example Limiter.from_rules("limits.yaml")'
    )


def request_of(key: object) -> Request:
    """The request that rules are asked about; a key has nothing for them to match."""
    if isinstance(key, Request):
        return key
    raise ConfigError(
        f"a limiter with rules checks a Request, not {show(key)}; "
        f'for example limiter.check(Request(api_key="sk_1", endpoint="/v1/orders"))'
    )


def units_of(units: int, what: str) -> int:
    """A cost or a number of units: whole, and from 0 up."""
    if type(units) is int and units >= 0:
        return units
    try:
        whole = operator.index(units)
    except TypeError:
        whole = -1
    if isinstance(units, bool) or whole < 0:
        raise InvalidCost(
            f"{what}={show(units)} is not a whole number from 0 up; for example {what}=1"
        )
    return whole


def kind_of(function: Callable[..., object]) -> Literal["plain", "coroutine", "async generator"]:
    """What calling it gives. Callable objects and partials count as what they call."""
    function = inspect.unwrap(getattr(function, "func", function))
    for called in (function, getattr(type(function), "__call__", None)):  # noqa: B004 - no test
        if inspect.iscoroutinefunction(called):
            return "coroutine"
        if inspect.isasyncgenfunction(called):
            return "async generator"
    return "plain"


def name_of(function: Callable[..., object]) -> str:
    """Its full name; a callable object or a partial goes by that of what it calls."""
    function = getattr(function, "func", function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def key_of(
    key: KeySource, function: Callable[..., object], args: Any, kwargs: Any
) -> Key | Request:
    """The key that a decorated function's call is counted under."""
    if key is None:
        return name_of(function)
    return key(*args, **kwargs) if callable(key) else key


def cost_of(cost: CostSource, args: Any, kwargs: Any) -> int:
    """What a decorated function's call costs."""
    return cost(*args, **kwargs) if callable(cost) else cost
