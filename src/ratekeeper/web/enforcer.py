"""The part that all web integrations share: charge a request, then settle its cost.

    request → skip? → limits, key, cost → evaluate → (leaky bucket: wait) → application → settle

An enforcer opens the store and the limiter that its options name, and closes them.
`enter` charges a request and returns the Charge. `leave` applies what the application made of it.
`Enforcer` is for threads. `AsyncEnforcer` has the same methods, awaited, and its hooks may be
async. Both run the same steps (`core/steps.py`). An error that a hook raises goes to the
application.

`memory://` and `shared://` answer without I/O, so an AsyncEnforcer calls them directly; `enter_now`
does that without a coroutine. It awaits a remote store.

**Limits from a function.** The limits of an enforcer may be a function of the request. Each result
has an enforcer of its own, with the same name and store. A limit's count does not depend on its
numbers, so a client whose limits change keeps its consumption.

An enforcer has no thread or task, and keeps nothing of a request.

**Charges.** A request is charged before it is served, so that concurrent requests never exceed a
limit. Its real cost may be known only afterwards: the tokens that a model wrote, or that a login
succeeded and was not a guess. The application reports it on the request's charge, with a plain call
from sync or async code; the last report counts. A charge keeps the units that are charged beside
the units that are wanted, so applying it twice changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final, Self

from ratekeeper.core import switches
from ratekeeper.core.clock import Clock, clock_of, seconds_from_ns
from ratekeeper.core.errors import CapacityError, ConfigError, RatekeeperError, show
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import UNLIMITED, CheckResult, Decision, Limits, Request, units_of
from ratekeeper.core.rates import LimitsArgument, limits_of
from ratekeeper.core.steps import Call, Steps, Undo, is_awaitable, run, run_async
from ratekeeper.core.subjects import Key
from ratekeeper.decide.failure import local_fallback_of
from ratekeeper.decide.store import Store
from ratekeeper.limiter import AsyncLimiter, Limiter
from ratekeeper.limiter.arguments import name_of
from ratekeeper.limiter.denials import denials
from ratekeeper.metrics.counters import ANY_ENDPOINT, ENDPOINT_LENGTH_MAX, endpoint_label
from ratekeeper.web.answers import (
    Denial,
    HttpAnswer,
    PreparedHeaders,
    capacity_answer,
    invalid_request_answer,
)
from ratekeeper.web.identity import Identity, RequestKeys
from ratekeeper.web.options import EnforcerOptions, default_node, opened_store
from ratekeeper.web.overrides import RouteOverrides
from ratekeeper.web.requests import WebRequest

__all__ = ["LOG", "PASSED", "AsyncEnforcer", "Charge", "Enforcer", "UncheckableRequest"]

LOG: Final = logging.getLogger("ratekeeper.web")

# Enforcers for single routes that one enforcer keeps: more than any application has.
ROUTES_MAX: Final = 10_000
# Different results of a function that returns limits, whose enforcers are kept.
RESULTS_MAX: Final = 1_000

# The result of a request that no limit was checked for: it is skipped, or there are no limits.
PASSED: Final = CheckResult(Decision(True, UNLIMITED, UNLIMITED.capacity), kind="unlimited")


class Charge:
    """The units that one enforcer charged a request.

    >>> charge = Charge()
    >>> charge.decision.allowed
    True
    >>> charge.settle(37)
    """

    __slots__ = ("_charged", "_result", "_wanted", "decision", "enforcer", "is_settled", "key")

    def __init__(
        self,
        decision: Decision = PASSED.decision,
        key: Key | Request = "",
        units: int = 0,
        enforcer: EnforcerCore | None = None,
        result: CheckResult | None = None,
        is_settled: bool = True,
    ) -> None:
        """`decision` spent `units` of the key's quota, if it allowed the request.

        `is_settled` is False if the outcome of the request decides what it costs.
        """
        self.decision = decision
        """The decision on the request."""
        self.key = key
        self._charged = self._wanted = units
        self.enforcer: Any = enforcer  # an Enforcer or an AsyncEnforcer; None if there is none
        self._result = result
        self.is_settled = is_settled
        """False while a cost or an outcome has not been applied yet."""

    @property
    def result(self) -> CheckResult:
        """The decision with the rules that applied."""
        if self._result is None:
            passed = self.enforcer is None or self.decision is PASSED.decision
            self._result = PASSED if passed else self.enforcer.result_of(self.decision)
        return self._result

    def settle(self, units: int) -> None:
        """Make the request cost this many units in all. The last call counts.

        Units beyond the charged ones are charged to each limit as far as it has room, because the
        request was served. Raises InvalidCost.
        """
        self._wanted = units_of(units, "units")
        self.is_settled = False

    def refund(self) -> None:
        """Make the request cost nothing."""
        self._wanted = 0
        self.is_settled = False

    @property
    def is_counted(self) -> bool:
        """True if limits were checked: the request was neither exempt nor without limits."""
        return self.decision is not PASSED.decision

    @property
    def units(self) -> int:
        """The units that are charged now."""
        return self._charged

    def take(self, counts: bool = True) -> tuple[int, int] | None:
        """Return the charged and the wanted units if they differ, and mark them as applied.

        `counts` is False for a request whose outcome costs nothing.
        """
        self.is_settled = True
        wanted = self._wanted if counts else 0
        decision, result = self.decision, self._result
        # A denied decision spent nothing, and neither did a failure policy: nothing to settle.
        decided = not decision.degraded or decision.charged_ns is not None
        charged = decision.allowed and decided and decision is not PASSED.decision
        if not charged or wanted == self._charged or (result and result.kind != "limited"):
            return None
        due = self._charged, wanted
        self._charged = wanted
        return due

    def __repr__(self) -> str:
        return f"<Charge of {self._wanted} units: {self.decision!r}>"


class UncheckableRequest(RatekeeperError):
    """A request that cannot be checked. `answer` explains it to the client."""

    def __init__(self, error: CapacityError | ConfigError, look: Charge | None = None) -> None:
        self.error = error
        self.look = look
        """A charge of nothing, with the state of the limits for the headers of the answer."""
        self.answer: HttpAnswer = (
            capacity_answer(error)
            if isinstance(error, CapacityError)
            else invalid_request_answer(error)
        )
        super().__init__(str(error))

    def __reduce__(self) -> tuple[type[UncheckableRequest], tuple[CapacityError | ConfigError]]:
        return type(self), (self.error,)


class EnforcerCore:
    """Everything that both enforcers share: opening, closing, and the steps of a request."""

    _limiter_type: ClassVar[type[Limiter | AsyncLimiter]]
    # True if the limiter's methods must be awaited.
    awaits = False

    def __init__(self, options: EnforcerOptions, limits: Limits | None = None) -> None:
        """`limits` are a result of the function that the options have as `limits`."""
        self.options = options
        given_limits = options.limits if limits is None else limits
        self._limits_hook = given_limits if callable(given_limits) else None
        self._limits: LimitsArgument | None = None if callable(given_limits) else given_limits
        self._skip = options.skip or options.exempt_when
        # True if the request decides whether it is limited, or by which limits.
        self._selects = (self._skip, options.methods, self._limits_hook) != (None, None, None)
        style = options.style
        self.style = style if style.node is not None else replace(style, node=default_node())
        self.identity = (
            options.identify
            if isinstance(options.identify, Identity)
            else Identity(options.identify or {}, trusted_proxies=options.trusted_proxies)
        )
        self._address_of = self.identity.address_of
        self.has_limits = options.has_limits
        self.counts_outcomes = options.count is not None
        """True if the status of a response decides whether its request counts."""
        self._cost = options.cost if callable(options.cost) else None
        self.units = 1 if callable(options.cost) else options.cost
        self._lock = fork_safe(threading.Lock())  # held while reopening
        given = options.limiter
        self._has_rules = options.rules is not None if given is None else given.has_rules
        self._keys = RequestKeys(
            self.identity, options.key, per_route=options.per_route, has_rules=self._has_rules
        )
        # The names of routes that a warning about their key was logged for.
        self._warned: set[str] = set()
        self._is_open = False
        self._open()

    # ── Opening and closing ────────────────────────────────────────────────────────────────────

    def _reopen(self) -> None:
        with self._lock:
            if not self._is_open:
                self._open()

    def _open(self) -> None:
        """Open the store and the limiter: at the start, and when used after `close`."""
        options = self.options
        # Enforcers of single routes, and for each the objects that its key refers to by id.
        self._routes: dict[object, tuple[Self, object]] = {}
        # The templates of the routes that this enforcer is for; empty for a whole application.
        self._templates: dict[str, None] = {}
        self._endpoint = ANY_ENDPOINT
        # The enforcers of the results of `limits`, if that is a function.
        self._by_result: dict[object, Self] = {}
        self._limiter: Any = options.limiter
        self._owns_store = False
        if options.limiter is not None:
            self._check_limiter(options.limiter)
            self.clock: Clock = options.limiter.clock
            self._on_failure = options.limiter.on_failure
            self._local_fallback = options.limiter.local_fallback
            self.store: Store = options.limiter.store
        else:
            self.clock = clock_of(options.clock)
            self._on_failure = options.on_failure or "open"
            self._local_fallback = local_fallback_of(options.local_fallback)
            self.store, self._owns_store = opened_store(options, self.clock)
        self.now_ns = self.clock.now_ns
        try:
            if self._limiter is None:
                self._limiter = self._make_limiter()
            self._bind()
        except BaseException:
            if self._owns_store:
                self.store.close()
            raise
        self._is_open = True

    def _limiter_for_store(self) -> type[Limiter | AsyncLimiter]:
        return Limiter

    def _bind(self) -> None:
        """Prepare what a subclass needs of the limiter."""

    def _make_limiter(self) -> Limiter | AsyncLimiter | None:
        options = self.options
        kind = self._limiter_for_store()
        arguments: dict[str, Any] = {
            "store": self.store,
            "clock": options.clock,
            "on_failure": self._on_failure,
            "local_fallback": self._local_fallback,
        }
        if self._limits is not None:
            return kind(
                self._limits,
                name=options.name,
                consistency=options.consistency or "strict",
                scope=options.scope or "region",
                across_regions=options.across_regions,
                **arguments,
            )
        if options.rules is not None:
            return kind.from_rules(options.rules, **arguments)
        return None

    def _check_limiter(self, limiter: object) -> None:
        if not isinstance(limiter, self._limiter_type):
            raise ConfigError(
                f"limiter={show(limiter)} is not a {self._limiter_type.__name__}; this integration "
                f"needs one, so that it neither blocks an event loop nor depends on one"
            )

    def _close_limiter(self, limiter: Any) -> Any:
        return limiter.close()

    def _close_store(self, store: Store) -> Any:
        return store.close()

    def close_steps(self) -> Steps[None]:
        """Close what this enforcer opened."""
        # A request that arrives meanwhile opens others, so only the present ones are closed.
        limiter, store = self._limiter, self.store
        routes = {id(enforcer): enforcer for enforcer, _ in self._routes.values()}
        routes |= {id(enforcer): enforcer for enforcer in [*self._by_result.values()]}
        self._routes.clear()
        self._by_result.clear()
        for enforcer in routes.values():
            yield from enforcer.close_steps()
        if self._is_open and self.options.limiter is None:
            self._is_open = False
            if limiter is not None:
                yield Call(self._close_limiter, limiter)
            if self._owns_store:
                yield Call(self._close_store, store)

    # ── Routes ─────────────────────────────────────────────────────────────────────────────────

    def route_enforcer(self, options: EnforcerOptions, name: str, route: str | None = None) -> Self:
        """Return an enforcer of other limits, such as a route's, on the same store.

        Options that it leaves open are those of this enforcer: key, skip, answers, on_failure. The
        same options and name return the same enforcer. Closing this enforcer closes it. Metrics
        name the templates of all routes that it was returned for.
        """
        if not self._is_open:
            self._reopen()
        found = self.known_route((options, name))
        if found is None:
            if options.key is None and self._keys.invented:
                self._warn_about_key(name)
            found = type(self)(self._inherited(options, name))
            self.remember_route((options, name), found)
        if route is not None and route not in found._templates:  # noqa: SLF001 - its own class
            found._note_route(route)  # noqa: SLF001 - the same
        return found

    def _warn_about_key(self, name: str) -> None:
        """Log once for a route that its limits inherit a key that clients can invent.

        With such a key, a client that guesses passwords has a new count for each guess.
        """
        if name in self._warned or len(self._warned) >= ROUTES_MAX:
            return
        self._warned.add(name)
        LOG.warning(
            "the limit of %s counts by the key of the application, which reads %s: a client that "
            'sends another value with each request is not limited. Write key="address" at this '
            "limit; or, if the application rejects unknown values before it, repeat the key there",
            name,
            " and ".join(self._keys.invented),
        )

    def _note_route(self, route: str) -> None:
        if len(self._endpoint) < ENDPOINT_LENGTH_MAX:
            self._templates[route] = None
            self._endpoint = endpoint_label(self._templates)
            results: list[EnforcerCore] = [*self._by_result.values()]
            for enforcer in (self, *results):
                if enforcer._limiter is not None:  # noqa: SLF001 - its own class
                    enforcer._limiter.endpoint = self._endpoint  # noqa: SLF001 - the same

    def known_route(self, key: object) -> Self | None:
        """Return the enforcer that `remember_route` kept under this key."""
        found = self._routes.get(key)
        return None if found is None else found[0]

    def remember_route(self, key: object, enforcer: Self, alive: object = None) -> None:
        """Keep a route's enforcer under a key; `alive` keeps objects that the key names by id."""
        if len(self._routes) >= ROUTES_MAX:
            self._routes.clear()
        self._routes[key] = enforcer, alive

    def _inherited(self, options: EnforcerOptions, name: str) -> EnforcerOptions:
        own = self.options
        exempting = options if options.skip or options.exempt_when else own
        # A route that is global is strict, also in an application whose limits are leased.
        usual = "strict" if options.scope == "global" else own.consistency
        return replace(
            options,
            store=self.store,
            name=name,
            identify=self.identity,
            trusted_proxies=(),
            key=own.key if options.key is None and not self._has_rules else options.key,
            skip=exempting.skip,
            exempt_when=exempting.exempt_when,
            on_limit=options.on_limit or own.on_limit,
            on_unavailable=options.on_unavailable or own.on_unavailable,
            style=self.style,
            on_failure=options.on_failure or self._on_failure,
            local_fallback=self._local_fallback,
            consistency=options.consistency or usual,
            scope=options.scope or own.scope,
            across_regions=options.across_regions if options.scope else own.across_regions,
            clock=self.clock,
        )

    # ── Limits from a function ─────────────────────────────────────────────────────────────────

    def _enforcer_for(self, found: Any) -> Self:
        """Return the enforcer of a result of the function that `limits` is.

        Raises ConfigError for a result that is not limits. It goes to the application: the client
        has not caused it, and the request must not pass.
        """
        key = tuple(found) if isinstance(found, list) else found
        try:
            known = self._by_result.get(key)
        except TypeError:  # not hashable, so not limits
            known = None
        if known is not None:
            return known
        hook = self._limits_hook
        assert hook is not None, "only it has results"  # noqa: S101 - ours
        try:
            known = self._enforcer_of(limits_of(found))
        except ConfigError as error:
            raise ConfigError(
                f"the function {name_of(hook)} returned {show(found)} as limits; return a rate "
                f'such as "100/minute", a Limit, a list of them, or None for no limit: {error}'
            ) from error
        if len(self._by_result) >= RESULTS_MAX:
            self._by_result.clear()  # not closed: requests in progress settle with them
        self._by_result[key] = known
        return known

    def _enforcer_of(self, limits: Limits) -> Self:
        inherited = self._inherited(self.options, self.options.name)
        # This enforcer has called `skip` and compared the method.
        options = replace(
            inherited, skip=None, exempt_when=None, methods=None, fleet=None, regions=None
        )
        found = type(self)(options, limits)
        for other in [*self._by_result.values()]:  # a copy: other threads may add to it
            # In an outage too, a client whose limits change keeps its consumption.
            found._limiter.share_local_counts(other._limiter)  # noqa: SLF001 - its own class
            break
        found._limiter.endpoint = self._endpoint  # noqa: SLF001 - the same
        return found

    # ── A request ──────────────────────────────────────────────────────────────────────────────

    def _sleep(self, seconds: float) -> Any:
        return self.clock.sleep(seconds)

    def enter_steps(self, request: WebRequest) -> Steps[Charge]:
        """Charge a request, and wait as long as a leaky bucket demands.

        Raises UncheckableRequest for an invalid key or cost, and for a cost that can never fit.
        """
        if not self._is_open:
            self._reopen()
        request.address_of = self._address_of  # for hooks
        if self._selects:
            chosen = yield from self._chosen_steps(request)
            if chosen is not self:
                if chosen is None:
                    return Charge(PASSED.decision, "", 0, self, PASSED)
                return (yield from chosen.enter_steps(request))
        if self._limiter is None:
            return Charge(enforcer=self)
        keys = self._keys
        # `_value` only for an awaitable: its generator takes longer than most hooks.
        if keys.hook is None:
            key = keys.of(request)
        else:
            found = keys.hook(request)
            if is_awaitable(found):
                found = yield from _value("key", found)
            key = keys.of_hook(found, request)
        units = self.units
        if self._cost is not None:
            units = self._cost(request)
            if is_awaitable(units):
                units = yield from _value("cost", units)
        # Without rules, a result is made of the decision if it is needed: `Charge.result`.
        decide = self._limiter.evaluate if self._has_rules else self._limiter.check
        try:
            found = (yield Call(decide, key, units)) if self.awaits else decide(key, units)
        except (CapacityError, ConfigError) as error:
            raise UncheckableRequest(error, (yield from self._look_steps(key))) from error
        decision, result = (found.decision, found) if self._has_rules else (found, None)
        charge = Charge(decision, key, units, self, result, not self.counts_outcomes)
        if decision.delay_ns:
            yield from self.delay_steps(charge)
        return charge

    def _look_steps(self, key: Key | Request) -> Steps[Charge | None]:
        """Return a charge of nothing; None if the store cannot say what remains."""
        look = partial(self._limiter.evaluate, key, 0, spend=False)
        try:
            result = (yield Call(look)) if self.awaits else look()
        except RatekeeperError:
            return None
        decision = result.decision
        return Charge(decision, key, 0, self, result) if decision.allowed else None

    def _chosen_steps(self, request: WebRequest) -> Steps[Self | None]:
        """Return the enforcer whose limits apply to a request; None if the request is exempt."""
        options, hook = self.options, self._limits_hook
        # In upper case: some frameworks serve a "post" by the code of a POST.
        if options.methods is not None and request.method.upper() not in options.methods:
            return None
        if self._skip is not None:
            skips = self._skip(request)
            if is_awaitable(skips):
                skips = yield from _value("skip" if options.skip else "exempt_when", skips)
            if skips:
                return None
        if hook is None:
            return self
        limits = hook(request)
        if is_awaitable(limits):
            limits = yield from _value("limits", limits)
        return None if limits is None else self._enforcer_for(limits)

    def delay_steps(self, charge: Charge) -> Steps[None]:
        """Wait as long as a leaky bucket demands."""
        try:
            yield Call(self._sleep, seconds_from_ns(charge.decision.delay_ns))
        except BaseException:
            charge.refund()  # a request that leaves the queue returns its place
            yield from self.leave_steps(charge)
            raise

    def leave_steps(self, charge: Charge, status: int | None = None) -> Steps[None]:
        """Apply the final cost of a request, unless it is already applied.

        `status` is that of the response, 500 for a handler that raised, None if there is no
        outcome. If the store fails, the error is logged and the request keeps its charge.
        """
        counts: Any = True
        if self.options.count is not None and status is not None:
            counts = self.options.count(status)
            if is_awaitable(counts):
                counts = yield from _value("count", counts)
        due = charge.take(bool(counts))
        if due is None:
            return
        try:
            if self.awaits:
                # Not lost if the task is cancelled, as when the client closes the connection.
                yield Undo(self._limiter.settle, charge.key, *due, charge.decision)
            else:
                self._limiter.settle(charge.key, *due, charge.decision)
        except RatekeeperError as error:
            # Without the key, which may be a secret.
            LOG.warning("the final cost of a request could not be settled: %s", error)

    def response_steps(self, request: WebRequest, result: CheckResult) -> Steps[Any]:
        """Return the response to a denied request: that of a hook, or the Denial.

        `on_limit` answers a 429 and `on_unavailable` a 503, so that a response written for one does
        not change the status of the other. A 403 has no hook.
        """
        request.address_of = self._address_of
        denial = Denial(result, self.now_ns(), self.style)
        name = {429: "on_limit", 503: "on_unavailable"}.get(denial.status, "")
        hook = getattr(self.options, name, None)
        response = None if hook is None else (yield from _value(name, hook(request, denial)))
        return denial if response is None else response

    def log_denial(self, charge: Charge) -> None:
        """Log the denial of a request by this enforcer's limits."""
        if self._has_rules:
            denials.note(charge.result, charge.key)
        else:
            self._limiter.log_denial(charge.key, charge.decision)

    def result_of(self, decision: Decision) -> CheckResult:
        """Return a decision of the limiter's `check` as `evaluate` returns it."""
        result: CheckResult = self._limiter.result_of(decision)
        return result


def _value(hook: str, value: Any) -> Steps[Any]:
    """Return the value of a hook, awaited if the hook is async.

    Raises TypeError for an awaitable in a thread. It is true: with such a `skip`, every request
    would silently pass unlimited.
    """
    if is_awaitable(value):  # hardly ever, so only then is it a step
        value = yield Call(lambda: value)
        if is_awaitable(value):
            raise TypeError(
                f"{hook} returned {show(value)}, which a thread cannot await; return a plain value"
            )
    return value


class Enforcer(EnforcerCore):
    """Enforces limits in threads."""

    _limiter_type = Limiter

    def __init__(self, options: EnforcerOptions, limits: Limits | None = None) -> None:
        super().__init__(options.require_plain_hooks(), limits)

    def enter(self, request: WebRequest) -> Charge:
        """Charge a request. See `enter_steps`."""
        return run(self.enter_steps(request))

    def leave(self, charge: Charge, status: int | None = None) -> None:
        """Apply the final cost of a request. See `leave_steps`."""
        run(self.leave_steps(charge, status))

    def response(self, request: WebRequest, result: CheckResult) -> Any:
        """Return the response to a denied request. See `response_steps`."""
        return run(self.response_steps(request, result))

    def close(self) -> None:
        """Close what this enforcer opened. Using it again opens it again."""
        run(self.close_steps())


class AsyncEnforcer(EnforcerCore):
    """Enforces limits in an event loop: the methods of Enforcer, awaited. Hooks may be async."""

    _limiter_type = AsyncLimiter
    # True if `enter_now` suffices: no hooks, and a store that answers at once.
    is_quick: bool
    # The cached keys by peer, if the peer alone decides (`AsgiCharges.charge_by_peer`).
    keys_by_peer: dict[str, str] | None
    # The headers of one limit, made with the first result; `prepares` is False for others.
    prepared: PreparedHeaders | None
    prepares: bool
    check: Callable[..., Decision]
    # The routes whose limits replace `limits`; None if there are none.
    overrides: RouteOverrides | None = None

    def expect_overrides(self) -> RouteOverrides:
        """Return the routes whose limits replace those of this enforcer.

        From now on the route of a request matters, so its peer alone no longer decides.
        """
        if self.overrides is None:
            self.overrides = RouteOverrides()
            self.keys_by_peer = None
        return self.overrides

    def _limiter_for_store(self) -> type[Limiter | AsyncLimiter]:
        return Limiter if self.store.is_local else AsyncLimiter

    def _bind(self) -> None:
        self.awaits = isinstance(self._limiter, AsyncLimiter)
        self.prepared = None
        self.keys_by_peer = None
        self.is_quick = (
            not self.awaits
            and self._limiter is not None
            and not self._selects
            and (self._keys.hook, self._cost) == (None, None)
        )
        self.prepares = self._limiter is not None and not self._has_rules
        if self.is_quick and self._limits is not None:
            limits = self._limiter.limits
            never_delays = all(limit.algorithm != "leaky_bucket" for limit in limits)
            if never_delays and self.units <= min(limit.capacity for limit in limits):
                self.check = self._limiter.check
                self.keys_by_peer = self._keys.by_peer if self.overrides is None else None

    def _sleep(self, seconds: float) -> Any:
        return self.clock.sleep_async(seconds)

    def _close_limiter(self, limiter: Any) -> Any:
        # Closing a limiter that follows rules waits for its thread.
        if self.options.rules is not None and not self.awaits:
            return asyncio.to_thread(limiter.close)
        return limiter.close()

    def _close_store(self, store: Store) -> Any:
        return store.aclose()

    def enter_now(self, request: WebRequest) -> Charge:
        """Charge a request by an enforcer that `is_quick`. The caller waits as `delay_ns` says."""
        key, units = self._keys.of(request), self.units
        try:
            if self._has_rules:
                result = self._limiter.evaluate(key, units)
                decision = result.decision
            else:
                result, decision = None, self._limiter.check(key, units)
        except (CapacityError, ConfigError) as error:
            raise UncheckableRequest(error, run(self._look_steps(key))) from error
        return Charge(decision, key, units, self, result, not self.counts_outcomes)

    def prepared_for(self, charge: Charge) -> PreparedHeaders | None:
        """Return the prepared headers of an allowed request; None if they do not apply to it."""
        decision = charge.decision
        if decision.degraded or decision is PASSED.decision or switches.limiting_off:
            return None
        if self.prepared is None and not decision.granted:
            self.prepared = PreparedHeaders.of(charge.result, self.now_ns(), self.style)
            self.prepares = self.prepared is not None
        return self.prepared

    def enter(self, request: WebRequest) -> Coroutine[Any, Any, Charge]:
        """Charge a request. See `enter_steps`. Not async itself: one coroutine less."""
        return run_async(self.enter_steps(request))

    def leave(self, charge: Charge, status: int | None = None) -> Coroutine[Any, Any, None]:
        """Apply the final cost of a request. See `leave_steps`."""
        return run_async(self.leave_steps(charge, status))

    async def response(self, request: WebRequest, result: CheckResult) -> Any:
        """Return the response to a denied request. See `response_steps`."""
        return await run_async(self.response_steps(request, result))

    async def close(self) -> None:
        """Close what this enforcer opened. Using it again opens it again."""
        if self.options.limiter is None:
            self.is_quick = False  # `enter` opens it again
            self.keys_by_peer = None
        await run_async(self.close_steps())
