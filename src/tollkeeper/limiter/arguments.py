"""What callers hand to a limiter, checked and in one form. Errors say what would be right."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.model import Request
from tollkeeper.core.subjects import Key

KeySource = Key | Callable[..., Key | Request] | None
CostSource = int | Callable[..., int]


def request_of(key: object) -> Request:
    """The request that rules are asked about; a key has nothing for them to match."""
    if isinstance(key, Request):
        return key
    raise ConfigError(
        f"a limiter with rules checks a Request, not {show(key)}; "
        f'for example limiter.check(Request(api_key="sk_1", endpoint="/v1/orders"))'
    )


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
