"""The arguments of a limiter, validated and normalised. Errors show a correct example.

An unknown option is most often a slip of the pen, or the name that another library has for an
option of ours. The error names the public function that was called, and the option to use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, Final, Literal, ParamSpec, TypeVar

from ratekeeper.core.errors import ConfigError, InvalidOption, show
from ratekeeper.core.model import Request
from ratekeeper.core.subjects import Key

KeySource = Key | Callable[..., Key | Request] | None
"""The key of a decorated function: a key, or a function of its arguments that returns one."""
CostSource = int | Callable[..., int]
"""The cost of a decorated function: units, or a function of its arguments that returns them."""


P = ParamSpec("P")
R = TypeVar("R")

_ALGORITHM: Final = 'an algorithm in the rate: "5 in any minute" or "5/minute fixed_window"'
_LOCAL: Final = 'on_failure="local"'
_PREFIX: Final = 'a prefix in the URI of the store: store="redis://localhost?prefix=shop"'
_RATE: Final = 'a rate string as limits: "100/minute"'
# What other libraries call the options that limiters and web integrations have.
FOREIGN_NAMES: Final = {
    "algorithm": _ALGORITHM,
    "burst": 'a burst in the rate: "100/minute burst 20"',
    "in_memory_fallback": _LOCAL,
    "in_memory_fallback_enabled": _LOCAL,
    "key_prefix": _PREFIX,
    "quota": _RATE,
    "rate": _RATE,
    "storage_options": 'options in the URI of the store: store="redis://localhost?…"',
    "strategy": _ALGORITHM,
    "swallow_errors": 'on_failure="open"',
    "using": _ALGORITHM,
}
# The same for a limiter.
_FOREIGN: Final = {
    **FOREIGN_NAMES,
    "app": "RateLimit(app, …) of ratekeeper.flask, .fastapi, .asgi or .wsgi",
    "default_limits": _RATE,
    "key": 'the key as an argument of check: limiter.check("user:42")',
    "key_func": 'the key as an argument of check: limiter.check("user:42")',
    "prefix": _PREFIX,
    "rules": 'from_rules("limits.yaml")',
    "storage": 'store="redis://localhost"',
    "storage_uri": 'store="redis://localhost"',
    "timeout": 'limiter.wait("user:42", timeout=5)',
}


def check_names(
    where: str, given: Iterable[object], known: Sequence[str], foreign: Mapping[str, str]
) -> None:
    """Raise InvalidOption for names that are not options of the function `where`.

    `foreign` has names of other libraries, and for each what to use here.
    """
    unknown = [str(name) for name in given if name not in known]
    if unknown:
        shown = ", ".join(f"{name}{_advice(name, known, foreign)}" for name in unknown)
        raise InvalidOption(f"{where} has no option {shown}; the options are {', '.join(known)}")


def _advice(name: str, known: Sequence[str], foreign: Mapping[str, str]) -> str:
    if name in foreign:
        return f" (use {foreign[name]})"
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def explains(
    where: str, example: str, foreign: Mapping[str, str] = _FOREIGN
) -> Callable[[Callable[P, R]], Callable[P, R]]:
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
                    check_names(name, kwargs, [*by_position, *known], foreign)
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


def cost_of(cost: CostSource, args: Any, kwargs: Any) -> int:
    """Return the cost of a call of a decorated function."""
    return cost(*args, **kwargs) if callable(cost) else cost
