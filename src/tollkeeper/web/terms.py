"""On what terms requests pass: what a user says to any of the web integrations, checked at once.

All integrations take the same names, so that who knows one knows all. What is wrong is told where
it is written, when the application starts, and not at the first request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypedDict

from tollkeeper.core.clock import Clock, clock_of
from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.model import CheckResult, check_name, units_of
from tollkeeper.core.rates import LimitsArgument, limits_of
from tollkeeper.decide.failure import FailurePolicy, check_policy
from tollkeeper.decide.local_fallback import LocalFallback, local_fallback_of
from tollkeeper.decide.store import Store
from tollkeeper.limiter import AsyncLimiter, Limiter
from tollkeeper.limiter.arguments import kind_of, name_of
from tollkeeper.rules.document.reading import Rules
from tollkeeper.web.answers import Style
from tollkeeper.web.calls import Call
from tollkeeper.web.identity import Identity, Source

KeySource = Source | Sequence[Source] | Callable[[Call], Any]
"""Where the key comes from. A function alone may return any Key, a Request, or None."""


class Options(TypedDict, total=False):
    """What every integration takes beside its limits; `Terms` says what each is."""

    rules: Rules | None
    limiter: Limiter | AsyncLimiter | None
    store: str | Store
    identify: Identity | Mapping[str, Source | Sequence[Source]] | None
    trusted_proxies: Sequence[str]
    key: KeySource | None
    per_route: bool
    cost: int | Callable[[Call], Any]
    skip: Callable[[Call], Any] | None
    on_limit: Callable[[Call, CheckResult], Any] | None
    count: Callable[[int], Any] | None
    style: Style
    name: str
    on_failure: FailurePolicy
    local_fallback: LocalFallback | None
    clock: Clock | None


class RouteOptions(TypedDict, total=False):
    """What a route may say of its own; `Terms` says what each is."""

    key: KeySource | None
    cost: int | Callable[[Call], Any]
    skip: Callable[[Call], Any] | None
    on_limit: Callable[[Call, CheckResult], Any] | None
    count: Callable[[int], Any] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """On what terms a request may pass.

    One of these three says the limits:

    `limits`    as of `Limiter`: a rate string, a Limit, or several.
    `rules`     as of `Limiter.from_rules`; each request is asked about as `identify` describes it.
    `limiter`   one of your own, which you close.

    And how it is done:

    `store`, `name`, `on_failure`, `local_fallback` and `clock` as of `Limiter`, for a limiter
    that is made here.
    `identify`         an Identity, or its fields: {"user": "session:user_id", …}.
    `trusted_proxies`  whose forwarded addresses are believed, as of Identity.
    `key`              whom `limits` count: the first source that finds something; by default the
                       address. Or a function of the call that returns a key or a Request, and
                       None for the address.
    `per_route`        count each route by itself.
    `cost`             units, or a function of the call.
    `skip`             a function of the call: true for those that are let through uncounted.
    `on_limit`         a function of the call and the ruling that returns the framework's response
                       to a denied request, or None for the one it has by default.
    `count`            a function of the response's status: only where it is true does the request
                       count. Every request is charged on the way in and given back afterwards, so
                       that no number of guesses at once passes a limit.
    `style`            which headers answers have.
    """

    limits: LimitsArgument | None = None
    rules: Rules | None = None
    limiter: Limiter | AsyncLimiter | None = None
    store: str | Store = "memory://"
    identify: Identity | Mapping[str, Source | Sequence[Source]] | None = None
    trusted_proxies: Sequence[str] = ()
    key: KeySource | None = None
    per_route: bool = False
    cost: int | Callable[[Call], Any] = 1
    skip: Callable[[Call], Any] | None = None
    on_limit: Callable[[Call, CheckResult], Any] | None = None
    count: Callable[[int], Any] | None = None
    style: Style = field(default_factory=Style)
    name: str = ""
    on_failure: FailurePolicy = "open"
    local_fallback: LocalFallback | None = None
    clock: Clock | None = None

    def __post_init__(self) -> None:
        said = [name for name in ("limits", "rules", "limiter") if getattr(self, name) is not None]
        if len(said) > 1:
            raise ConfigError(
                f"{' and '.join(said)} both say what the limits are; give one of them"
            )
        check_name("name", self.name)
        check_policy(self.on_failure)
        local_fallback_of(self.local_fallback)
        clock_of(self.clock)
        for name in ("skip", "on_limit", "count"):
            hook = getattr(self, name)
            if hook is not None and not callable(hook):
                raise ConfigError(f"{name}={show(hook)} is not a function; {_HOOKS[name]}")
        if not callable(self.cost):
            units_of(self.cost, "cost")
        if not isinstance(self.style, Style):
            raise ConfigError(
                f"style={show(self.style)} is not a Style; for example Style(draft=7)"
            )
        if self.limits is not None:
            self._check_limits(self.limits)
        self._check_what_goes_together()

    def _check_limits(self, limits: LimitsArgument) -> None:
        least = min(limits_of(limits), key=lambda limit: limit.capacity)
        if not callable(self.cost) and self.cost > least.capacity:
            raise ConfigError(
                f"cost={self.cost} never fits into {least!r}: every request would be refused; "
                f"a cost of at most {least.capacity} does, or a larger burst"
            )

    def _check_what_goes_together(self) -> None:
        if isinstance(self.identify, Identity) and self.trusted_proxies:
            raise ConfigError("give trusted_proxies to the Identity that you pass as identify")
        if self.limits is None and (self.name or self.per_route):
            raise ConfigError("name and per_route are for limits; rules have ids and count by `by`")
        if self.rules is not None and self.key is not None and not callable(self.key):
            raise ConfigError(
                f"key={show(self.key)} is for limits; with rules, each rule's `by` says whom it "
                f'counts, and identify={{"api_key": "header:X-API-Key"}} finds them'
            )
        if self.limiter is not None and not self._leaves_to_limiter():
            raise ConfigError(
                "the limiter that you pass has a store, an on_failure, a local_fallback and a "
                "clock already; give them to it"
            )

    def _leaves_to_limiter(self) -> bool:
        said = (self.store, self.on_failure, self.local_fallback, self.clock)
        return said == ("memory://", "open", None, None)

    @property
    def says_limits(self) -> bool:
        """Whether there is anything to be limited by."""
        return not (self.limits is None and self.rules is None and self.limiter is None)

    def demand(self, where: str) -> Self:
        """Itself; raises ConfigError where nothing says the limits."""
        if not self.says_limits:
            raise ConfigError(
                f'{where} needs limits="100/minute", rules="limits.yaml" or a limiter of your own'
            )
        return self


_HOOKS: Final = {
    "skip": "for example skip=lambda call: call.path == '/healthz'",
    "on_limit": "for example on_limit=lambda call, ruling: Response(status_code=429)",
    "count": "for example count=lambda status: status in (401, 403)",
}


HOOKS: Final = ("key", "cost", "skip", "on_limit", "count")


def application(app: Any) -> Any:
    """The application itself. Raises ConfigError for what cannot be one."""
    if callable(app):
        return app
    raise ConfigError(f"{show(app)} is not an application; write RateLimit(app, limits=…)")


def plain(terms: Terms) -> Terms:
    """The terms themselves. Raises ConfigError for a hook that is async: nobody would await it.

    What an async function returns is true, so a `skip` of that kind would let everybody through.
    """
    for name in HOOKS:
        hook = getattr(terms, name)
        if callable(hook) and kind_of(hook) != "plain":
            raise ConfigError(
                f"{name}={name_of(hook)} is async, and here it is called in a thread, where "
                f"nothing is awaited; write a plain function"
            )
    return terms
