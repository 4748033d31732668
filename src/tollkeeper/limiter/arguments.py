"""The arguments of a limiter, validated and normalised. Errors show a correct example."""

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
    """Return the request that rules match. Raises ConfigError for a plain key."""
    if isinstance(key, Request):
        return key
    raise ConfigError(
        f"a limiter with rules checks a Request, not {show(key)}; "
        f'for example limiter.check(Request(api_key="sk_1", endpoint="/v1/orders"))'
    )


def kind_of(function: Callable[..., object]) -> Literal["plain", "coroutine", "async generator"]:
    """Return the kind of a function, partial or callable object, by the result of a call."""
    function = inspect.unwrap(getattr(function, "func", function))
    for called in (function, getattr(type(function), "__call__", None)):  # noqa: B004 - no test
        if inspect.iscoroutinefunction(called):
            return "coroutine"
        if inspect.isasyncgenfunction(called):
            return "async generator"
    return "plain"


def name_of(function: Callable[..., object]) -> str:
    """Return the full name of a function, of a partial's function or of an object's class."""
    function = getattr(function, "func", function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def key_of(
    key: KeySource, function: Callable[..., object], args: Any, kwargs: Any
) -> Key | Request:
    """Return the key that a call of a decorated function is counted under."""
    if key is None:
        return name_of(function)
    return key(*args, **kwargs) if callable(key) else key


def cost_of(cost: CostSource, args: Any, kwargs: Any) -> int:
    """Return the cost of a call of a decorated function."""
    return cost(*args, **kwargs) if callable(cost) else cost
