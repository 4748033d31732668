"""The arguments of a limiter, validated and normalised. Errors show a correct example.

An unknown option is most often a slip of the pen. The error names the public function that was
called, and the closest option.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

from ratekeeper.core.costs import Cost, Costs
from ratekeeper.core.errors import ConfigError, InvalidOption, show
from ratekeeper.core.model import Request
from ratekeeper.core.subjects import Key

KeySource = Key | Callable[..., Key | Request] | None
"""The key of a decorated function: a key, or a function of its arguments that returns one."""
CostSource = int | Callable[..., int]
"""The cost of a decorated function: units, or a function of its arguments that returns them."""
CostsSource = Costs | Callable[..., Costs]
"""The same as costs by unit."""


P = ParamSpec("P")
R = TypeVar("R")


def check_names(where: str, given: Iterable[object], known: Sequence[str]) -> None:
    """Raise InvalidOption for names that are not options of the function `where`."""
    unknown = [str(name) for name in given if name not in known]
    if unknown:
        shown = ", ".join(f"{name}{_advice(name, known)}" for name in unknown)
        raise InvalidOption(f"{where} has no option {shown}; the options are {', '.join(known)}")


def _advice(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def explains(where: str, example: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a public function: wrong arguments raise InvalidOption, which names it.

    Python's own error names the class that defines a method, which may be one of ours. `example`
    is a correct call. In both texts, "{}" is replaced by the class of the object.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        kinds = [each.kind for each in signature.parameters.values()]
        known = [
            each.name for each in signature.parameters.values() if each.kind is each.KEYWORD_ONLY
        ]
        by_position = [
            each.name
            for each in signature.parameters.values()
            if each.kind is each.POSITIONAL_OR_KEYWORD and each.name not in ("self", "cls")
        ]

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                owner = args[0] if args else None
                kind = owner if isinstance(owner, type) else type(owner)
                name = where.format(kind.__name__)
                if inspect.Parameter.VAR_KEYWORD not in kinds:
                    check_names(name, kwargs, [*by_position, *known])
                call = example.format(kind.__name__)
                raise InvalidOption(f"{name}: {error}; for example {call}") from None
            return function(*args, **kwargs)

        return checked

    return decorate


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
    function = getattr(function, "func", function)
    inner = inspect.unwrap(function)
    # The function itself comes first: an async one may wrap a plain one.
    for called in (function, inner, getattr(type(inner), "__call__", None)):  # noqa: B004 - no test
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


def cost_of(cost: CostSource | CostsSource, args: Any, kwargs: Any) -> Cost:
    """Return the cost of a call of a decorated function."""
    return cost(*args, **kwargs) if callable(cost) else cost
