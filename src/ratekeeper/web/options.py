"""The options of every web integration, checked when the application starts.

All integrations take the same names. A wrong option raises ConfigError where it is written, not at
the first request.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from http import HTTPMethod
from pathlib import Path
from socket import gethostname
from typing import Any, Final, Self, TypedDict
from uuid import getnode

from ratekeeper.core.clock import Clock, clock_of
from ratekeeper.core.costs import REQUESTS, Costs, checked_cost
from ratekeeper.core.errors import ConfigError, InvalidOption, show
from ratekeeper.core.model import Consistency, check_consistency, check_name
from ratekeeper.core.rates import LimitsArgument, check_cost_fits
from ratekeeper.decide.failure import FailurePolicy, LocalFallback, check_policy, local_fallback_of
from ratekeeper.decide.regional import AcrossRegions
from ratekeeper.decide.store import Store
from ratekeeper.fleet.settings import Fleet, fleet_of
from ratekeeper.limiter import AsyncLimiter, Limiter
from ratekeeper.limiter.arguments import check_names, kind_of, name_of
from ratekeeper.limiter.setup import node_store_of
from ratekeeper.regions.settings import SCOPES, Regions, Scope, across_of, regions_of
from ratekeeper.rules.compiled import check_units
from ratekeeper.rules.document.model import Rules
from ratekeeper.web.answers import Denial, Style
from ratekeeper.web.identity import Identity, IdentitySource, KeySource
from ratekeeper.web.requests import WebRequest

# The forms in which web integrations take limits: those of Limiter, or a function that returns one.
LimitsSource = LimitsArgument | Callable[..., LimitsArgument | Awaitable[Any] | None]

# The options that may be functions of the application: their arguments, and an example.
HOOKS: Final = {
    "limits": (("request",), "limits=lambda request: '100/minute'"),
    "key": (("request",), "key=lambda request: request.header('X-API-Key')"),
    "cost": (("request",), "cost=lambda request: 2"),
    "skip": (("request",), "skip=lambda request: request.path == '/healthz'"),
    "on_limit": (
        ("request", "denial"),
        "on_limit=lambda request, denial: Response(status_code=429)",
    ),
    "on_unavailable": (
        ("request", "denial"),
        "on_unavailable=lambda request, denial: Response('sorry', 503)",
    ),
    "count": (("status",), "count=lambda status: status in (401, 403)"),
}
# Those of them that are functions and nothing else.
_FUNCTIONS: Final = ("skip", "on_limit", "on_unavailable", "count")
# The options that a rule has itself.
_OF_RULES: Final = {
    "key": "each rule's `by` says what it counts, and "
    'identify={"api_key": "header:X-API-Key"} reads it',
    "consistency": "each rule has its own: {id: users, consistency: leased, …}",
    "scope": "each rule has its own: {id: users, scope: global, …}",
    "name": "a rule is named by its id",
    "per_route": "each rule's `by` says what it counts",
}
# The options that a limiter has itself.
_OF_LIMITERS: Final = (
    *("store", "name", "per_route", "on_failure", "local_fallback", "consistency"),
    *("fleet", "regions", "scope", "clock"),
)
METHODS: Final = tuple(method.value for method in HTTPMethod)


class RouteArguments(TypedDict, total=False):
    """The keyword arguments of a route's own limits; see `EnforcerOptions`.

    All other options apply to the whole application, and a route rejects them.
    """

    key: KeySource | None
    cost: int | Costs | Callable[[WebRequest], Any]
    methods: Collection[str] | None
    skip: Callable[..., Any] | None
    on_limit: Callable[[WebRequest, Denial], Any] | None
    on_unavailable: Callable[[WebRequest, Denial], Any] | None
    count: Callable[[int], Any] | None
    on_failure: FailurePolicy | None
    consistency: Consistency | None
    scope: Scope | None
    across_regions: AcrossRegions | None


class OptionArguments(RouteArguments, total=False):
    """The keyword arguments of an integration, besides `limits`; see `EnforcerOptions`.

    They include those of a route.
    """

    rules: Rules | None
    limiter: Limiter | AsyncLimiter | None
    store: str | Store
    identify: Identity | Mapping[str, IdentitySource | Sequence[IdentitySource]] | None
    trusted_proxies: Sequence[str]
    per_route: bool
    style: Style
    name: str
    local_fallback: LocalFallback | None
    fleet: Fleet | None
    regions: Regions | None
    clock: Clock | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnforcerOptions:
    """The limits of requests, and how they are enforced.

    At most one of these three defines the limits:

    `limits`    as for `Limiter`: a rate string, a Limit, or several; or a function of the request
                that returns one of these, or None for no limit.
    `rules`     as for `Limiter.from_rules`; `identify` describes each request to the rules.
    `limiter`   your own limiter, which you close yourself.

    The others are optional:

    `store`, `name`, `local_fallback`, `fleet`, `regions` and `clock`  as for `Limiter`.
    `on_failure`       as for `Limiter`: by default "open"; on a route, that of the application.
    `consistency`      as for `Limiter`: by default "strict"; on a route, that of the application.
    `scope`, `across_regions`  as for `Limiter`: by default "region"; on a route, those of the
                       application, unless it has a scope of its own.
    `identify`         an Identity, or its fields: {"user": "session:user_id", …}.
    `trusted_proxies`  the proxies whose forwarded addresses are believed, as for Identity.
    `key`              the subject that `limits` count: the first source that finds a value; by
                       default the address. Or a function of the request that returns a key, a
                       Request, or None for the address.
    `per_route`        count each route separately.
    `cost`             units; with rules also costs by unit, {"requests": 1, "tokens": 500}; or a
                       function of the request that returns one of them.
    `skip`             a function of the request: if it returns true, the request is not counted.
    `methods`          the HTTP methods that the limits count; by default all. GET includes HEAD.
    `on_limit`         a function of the request and the Denial that returns the framework's
                       response to a request over its limit, or None for the default 429.
    `on_unavailable`   the same for a request that `on_failure="closed"` denied: the default is 503.
    `count`            a function of the response's status: the request counts only if it returns
                       true. Every request is charged before it is served and refunded afterwards,
                       so that concurrent attempts cannot exceed the limit.
    `style`            the headers that responses have.

    Functions of the request may also have no parameter.
    """

    limits: LimitsSource | None = None
    rules: Rules | None = None
    limiter: Limiter | AsyncLimiter | None = None
    store: str | Store = "memory://"
    identify: Identity | Mapping[str, IdentitySource | Sequence[IdentitySource]] | None = None
    trusted_proxies: Sequence[str] = ()
    key: KeySource | None = None
    per_route: bool = False
    cost: int | Costs | Callable[[WebRequest], Any] = 1
    methods: Collection[str] | None = None
    skip: Callable[..., Any] | None = None
    on_limit: Callable[[WebRequest, Denial], Any] | None = None
    on_unavailable: Callable[[WebRequest, Denial], Any] | None = None
    count: Callable[[int], Any] | None = None
    style: Style = field(default_factory=Style)
    name: str = ""
    on_failure: FailurePolicy | None = None
    local_fallback: LocalFallback | None = None
    consistency: Consistency | None = None
    fleet: Fleet | None = None
    regions: Regions | None = None
    scope: Scope | None = None
    across_regions: AcrossRegions | None = None
    clock: Clock | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("limits", "rules", "limiter") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both define the limits; give one of them")
        check_name("name", self.name)
        if self.on_failure is not None:
            check_policy(self.on_failure)
        local_fallback_of(self.local_fallback)
        if self.consistency is not None:
            check_consistency(self.consistency)
        fleet_of(self.fleet)
        regions_of(self.regions)
        if isinstance(self.scope, str) and self.scope not in SCOPES:
            raise ConfigError(
                f"scope={show(self.scope)} is not known; choose one of {', '.join(SCOPES)}. "
                f"To share one count between routes, give their limits the same name"
            )
        across_of(self.scope or "region", self.across_regions, self.consistency or "strict")
        clock_of(self.clock)
        for name in _FUNCTIONS:
            hook = getattr(self, name)
            if hook is not None and not callable(hook):
                raise ConfigError(
                    f"{name}={show(hook)} is not a function; for example {HOOKS[name][1]}"
                )
        self._normalise()
        for name in HOOKS:
            _check_parameters(name, getattr(self, name))
        if not callable(self.cost):
            checked_cost(self.cost, "cost")
        if not isinstance(self.style, Style):
            raise ConfigError(
                f"style={show(self.style)} is not a Style; for example Style(draft=7)"
            )
        if self.limits is not None and isinstance(self.cost, Mapping):
            check_units(self.cost, (REQUESTS,))
        elif self.limits is not None and isinstance(self.cost, int) and not callable(self.limits):
            check_cost_fits(self.cost, self.limits)
        self._check_combination()

    def _normalise(self) -> None:
        """Keep one form of each option that may be written in several; checks their types."""
        if not isinstance(self.per_route, bool):
            raise ConfigError(f"per_route={show(self.per_route)} is not True or False")
        changed: dict[str, Any] = {
            "methods": None if self.methods is None else methods_of(self.methods),
        }
        if isinstance(self.limits, type):
            raise ConfigError(
                f"limits={show(self.limits)} is a class; give a rate such as "
                f'"100/minute", a Limit, or a function that returns one'
            )
        for name in ("limits", "key", "cost", "skip"):
            hook = getattr(self, name)
            if callable(hook):
                changed[name] = with_request(hook)
        for name, value in changed.items():
            object.__setattr__(self, name, value)  # the class is frozen

    def _check_combination(self) -> None:
        if isinstance(self.identify, Identity) and self.trusted_proxies:
            raise ConfigError("give trusted_proxies to the Identity that you pass as identify")
        for name, reason in _OF_RULES.items():
            if self.rules is not None and self._has(name) and not callable(getattr(self, name)):
                raise ConfigError(
                    f"{name}={show(getattr(self, name))} applies to limits only; with rules, "
                    f"{reason}"
                )
        given = [name for name in _OF_LIMITERS if self._has(name)]
        if self.limiter is not None and given:
            raise ConfigError(
                f"the limiter that you pass has its own {' and '.join(given)}; set it there"
            )
        given = [name for name in ("name", "per_route") if self._has(name)]
        if not self.has_limits and given:
            raise ConfigError(
                f"give {' and '.join(given)} only together with limits; for example "
                f'limits="100/minute"'
            )

    def _has(self, name: str) -> bool:
        return bool(getattr(self, name) != _DEFAULTS[name])

    @property
    def has_limits(self) -> bool:
        """True if `limits`, `rules` or `limiter` is given."""
        return not (self.limits is None and self.rules is None and self.limiter is None)

    def require_limits(self, where: str) -> Self:
        """Return the options. Raises ConfigError if they define no limits."""
        if not self.has_limits:
            raise ConfigError(
                f'{where} needs limits="100/minute", rules="limits.yaml" or limiter=your limiter'
            )
        return self

    def require_plain_hooks(self) -> Self:
        """Return the options. Raises ConfigError for an async hook, which no thread can await.

        The coroutine that an async function returns is true, so that an async `skip` would let
        every request through.
        """
        for name in HOOKS:
            hook = getattr(self, name)
            if callable(hook) and kind_of(hook) != "plain":
                raise ConfigError(
                    f"{name}={name_of(hook)} is async, but it is called in a thread, where it "
                    f"cannot be awaited; write a plain function"
                )
        return self


# What an option is if it is not given.
_DEFAULTS: Final = {each.name: each.default for each in fields(EnforcerOptions)}


def _check_parameters(name: str, function: object) -> None:
    """Raise ConfigError for a function that fails with the arguments of its option."""
    if not callable(function):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C
        return
    arguments, example = HOOKS[name]
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{name}={name_of(function)} is called with ({', '.join(arguments)}), but its "
            f"parameters are {signature}: {error}; for example {example}"
        ) from None


def methods_of(methods: object) -> frozenset[str]:
    """Return HTTP methods in upper case. GET includes HEAD.

    Frameworks serve a HEAD by the code of the GET: without HEAD, a client could do the work of a
    GET as often as it likes.

    >>> sorted(methods_of(["get", "POST"]))
    ['GET', 'HEAD', 'POST']
    """
    given = [methods] if isinstance(methods, str) else methods
    if not isinstance(given, list | tuple | set | frozenset) or not given:
        raise ConfigError(
            f'methods={show(methods)} is not a list of HTTP methods; for example methods=["POST"]'
        )
    unknown = [each for each in given if not isinstance(each, str) or each.upper() not in METHODS]
    if unknown:
        raise ConfigError(
            f"methods={show(methods)}: {show(unknown[0])} is not an HTTP method; "
            f"the methods are {', '.join(METHODS)}"
        )
    found = {each.upper() for each in given}
    return frozenset(found | {"HEAD"} if "GET" in found else found)


def with_request(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the request; one without parameters is called without it.

    A function whose signature is unknown gets the request.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return function
    if any(each.kind not in {each.KEYWORD_ONLY, each.VAR_KEYWORD} for each in parameters):
        return function
    return _WithoutRequest(function)


class _WithoutRequest:
    """A function of the request that calls a function without parameters."""

    def __init__(self, func: Callable[[], Any]) -> None:
        self.func = func  # as of a partial, so that `kind_of` and `name_of` see it

    def __call__(self, _: WebRequest, /) -> Any:
        return self.func()


def opened_store(options: EnforcerOptions, clock: Clock) -> tuple[Store, bool]:
    """Return the store that options name, and True if the caller has to close it.

    A store that several machines share is that of a node: enforcers that get it share its leases
    and its region.
    """
    return node_store_of(options.store, fleet_of(options.fleet), options.regions, clock)


# Linux makes a random id at each boot. It does not leave the machine.
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def default_node(environ: Mapping[str, str] = os.environ) -> str:
    """Return the node that answers name by default; `Style` says why it is a digest."""
    return environ.get("RATEKEEPER_NODE_ID", "") or node_digest()


def node_digest() -> str:
    """Return a name of this machine for clients: the same in all of its processes until it boots.

    It is a digest of the host name. The key is an id that clients do not know, so that they cannot
    find the host name by trying likely ones.
    """
    try:
        key = _BOOT_ID.read_bytes().strip()
    except OSError:  # another system: the address of a network card
        key = getnode().to_bytes(6, "big")
    return blake2b(gethostname().encode(), digest_size=4, key=key[:64]).hexdigest()


# The options of a whole application.
OPTION_NAMES: Final = ("limits", *OptionArguments.__annotations__)
ROUTE_NAMES: Final = (*RouteArguments.__annotations__, "name")


def options_of(where: str, given: Mapping[str, Any]) -> EnforcerOptions:
    """Return the options of a whole application, which are given at `where`."""
    check_names(where, given, OPTION_NAMES)
    return EnforcerOptions(**given)


def route_options_of(
    function: str, application: str, limits: LimitsSource, given: Mapping[str, Any]
) -> EnforcerOptions:
    """Return the options of a route's own limits.

    Raises ConfigError for an option that has no effect on a route. The error names the public
    `function` that was called, and where the `application` has the option: "RateLimit(app, {}=…)".
    """
    if limits is None:
        raise ConfigError(f'{function} needs limits: a rate such as "5/minute", or a Limit')
    own = ROUTE_NAMES
    for name in given:
        if name in OptionArguments.__annotations__ and name not in own:
            applies = (
                "it counts its route in any case"
                if name == "per_route"
                else "that applies to the whole application"
            )
            raise InvalidOption(
                f"{function} does not take {name}: {applies}; give it to "
                f"{application.format(name)}. The options of a route are {', '.join(own)}"
            )
    check_names(function, given, own)
    return EnforcerOptions(limits=limits, **given)


def checked_application(app: Any) -> Any:
    """Return the application. Raises ConfigError for an object that cannot be called."""
    if callable(app):
        return app
    raise ConfigError(f"{show(app)} is not an application; write RateLimit(app, limits=…)")
