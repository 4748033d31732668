"""The part that all web integrations share: charge a request, then settle its cost.

    request → skip? → limits, key, cost → check → (leaky bucket: wait) → application → settle

`Enforcer.charge` is the one way into a check. It returns the Charge, or an Ask if a hook or the
store has to be waited for (`core/steps.py`): a thread waits for an Ask, and an event loop awaits
it. `leaving` applies what the application made of the charge. An error that a hook raises goes to
the application.

An enforcer opens the store that its options name, and the limiters on it, and closes them. It has
no thread or task, and keeps nothing of a request. Threads and the event loop may use one enforcer:
its limiters count in one store (`Limiters`).

**Limits from a function.** The limits of an enforcer may be a function of the request. Each result
has limiters of its own, with the same name and store. A limit's count does not depend on its
numbers, so a client whose limits change keeps its consumption.

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
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, Final, Self

from ratekeeper.core.clock import Clock, clock_of, seconds_from_ns
from ratekeeper.core.costs import Cost, Costs, checked_cost, merged_cost, used_costs
from ratekeeper.core.errors import CapacityError, ConfigError, RatekeeperError, show
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import UNLIMITED, CheckResult, Decision, Request, units_of
from ratekeeper.core.rates import LimitsArgument, limits_of
from ratekeeper.core.steps import Ask, Call, Steps, Undo, asking, is_awaitable, run, run_async
from ratekeeper.core.subjects import Key
from ratekeeper.decide.failure import local_fallback_of
from ratekeeper.decide.store import Store
from ratekeeper.limiter import AsyncLimiter, Limiter
from ratekeeper.limiter.arguments import name_of
from ratekeeper.limiter.denials import denials
from ratekeeper.limiter.renewal import Renewal
from ratekeeper.metrics.counters import ANY_ENDPOINT, ENDPOINT_LENGTH_MAX, endpoint_label
from ratekeeper.rules.compiled import check_units
from ratekeeper.web.answers import Denial, HttpAnswer, capacity_answer, invalid_request_answer
from ratekeeper.web.identity import Identity, RequestKeys
from ratekeeper.web.options import EnforcerOptions, default_node, opened_store
from ratekeeper.web.requests import WebRequest

__all__ = ["LOG", "PASSED", "Charge", "Enforcer", "UncheckableRequest"]

LOG: Final = logging.getLogger("ratekeeper.web")

# Enforcers for single routes that one enforcer keeps: more than any application has.
ROUTES_MAX: Final = 10_000
# Different results of a function that returns limits, whose limiters are kept.
RESULTS_MAX: Final = 1_000

# The result of a request that no limit was checked for: it is skipped, or there are no limits.
PASSED: Final = CheckResult(Decision(True, UNLIMITED, UNLIMITED.capacity), kind="unlimited")


class Charge:
    """The units that one enforcer charged a request.

    >>> charge = Charge()
    >>> charge.decision.allowed
    True
    >>> charge.settle(37)

    With rules that have a `unit`: `charge.settle(costs={"tokens": 37})`.
    """

    __slots__ = (
        *("_charged", "_result", "_wanted"),
        *("decision", "enforcer", "is_settled", "key", "limiters", "renewal"),
    )

    def __init__(
        self,
        decision: Decision = PASSED.decision,
        key: Key | Request = "",
        units: Cost = 0,
        enforcer: Enforcer | None = None,
        limiters: Limiters | None = None,
        result: CheckResult | None = None,
        is_settled: bool = True,
    ) -> None:
        """`decision` spent `units` of the key's quota in `limiters`, if it allowed the request.

        `is_settled` is False if the outcome of the request decides what it costs.
        """
        self.decision = decision
        """The decision on the request."""
        self.key = key
        self._charged: Cost = units
        self._wanted: Cost = units
        self.enforcer = enforcer
        self.limiters = limiters
        self._result = result
        self.is_settled = is_settled
        """False while a cost or an outcome has not been applied yet, or a slot is not freed."""
        self.renewal: Renewal | None = None
        """That of the slots of limits of requests in flight; None if the request has none."""

    @property
    def result(self) -> CheckResult:
        """The decision with the rules that applied."""
        if self._result is None:
            limiters = self.limiters
            self._result = PASSED if limiters is None else limiters.any.result_of(self.decision)
        return self._result

    def settle(self, units: int = 0, *, costs: Costs | None = None) -> None:
        """Make the request cost this many units in all. The last call counts.

        `costs` are costs by unit instead; a unit that is not named stays as it was charged. After
        a charge by unit, `units` are of the one unit that it has besides requests.

        Units beyond the charged ones are charged in full, because the request was served: a limit
        without room for them owes them. Raises InvalidCost, also for a unit that no limit counts.
        """
        if costs is not None:
            known = self.limiters.any.units if self.limiters is not None else tuple(costs)
            check_units(checked_cost(costs, "costs"), known)
            self._wanted = dict(costs)
        elif isinstance(self._charged, int):
            self._wanted = units_of(units, "units")
        else:
            example = "charge.settle(costs={…})"
            self._wanted = used_costs(self._charged, units, None, example)
        self.is_settled = False

    def keep_slots(self, renewed: Callable[[Any, Decision], Renewal | None]) -> None:
        """Keep the slots of the request until it ends."""
        if self.limiters is not None:
            self.renewal = renewed(self.limiters.any._renew, self.decision)  # noqa: SLF001 - ours
            self.is_settled = self.is_settled and self.renewal is None

    def refund(self) -> None:
        """Make the request cost nothing."""
        self._wanted = 0
        self.is_settled = False

    @property
    def units(self) -> Cost:
        """The units that are charged now: a number, or costs by unit."""
        return self._charged

    def take(self, counts: bool = True) -> tuple[Cost, Cost] | None:
        """Return the charged and the wanted cost if they differ, and mark them as applied.

        `counts` is False for a request whose outcome costs nothing.
        """
        self.is_settled = True
        wanted = merged_cost(self._charged, self._wanted if counts else 0)
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


AnyLimiter = Limiter | AsyncLimiter


class Limiters:
    """One set of limits on the enforcer's store: a Limiter for threads, and one for event loops.

    Each is made when it is first needed. Both count in the same place, so a charge that one of them
    made can be settled by the other. A store in the memory of this machine answers at once: then
    the Limiter serves both.
    """

    __slots__ = ("_given", "_lock", "_made", "_make", "applied", "at_once")

    def __init__(
        self,
        make: Callable[[type[AnyLimiter]], AnyLimiter],
        at_once: bool,
        given: AnyLimiter | None = None,
    ) -> None:
        """`given` is a limiter of the application, which closes it."""
        self._make = make
        self._given = given
        self._made: dict[type, Any] = {} if given is None else {type(given): given}
        self._lock = fork_safe(threading.Lock())
        self.at_once = at_once and not isinstance(given, AsyncLimiter)
        """True if the answers need no waiting."""
        self.applied = () if given is None else given.applied
        """The limits as results list them; empty for rules, and while no limiter is made."""

    def of(self, kind: type[AnyLimiter]) -> Any:
        """Return the limiter of this kind."""
        return self._made.get(kind) or self._given or self._made_once(kind)

    def _made_once(self, kind: type[AnyLimiter]) -> AnyLimiter:
        with self._lock:  # two of one kind would count apart while the store is unavailable
            if kind not in self._made:
                self._made[kind] = self._make(kind)
                self.applied = self._made[kind].applied
            made: AnyLimiter = self._made[kind]
            return made

    @property
    def any(self) -> Any:
        """A limiter, for what needs no store."""
        return next(iter(self._made.values()), None) or self.of(Limiter)

    def made(self) -> list[AnyLimiter]:
        """Return the limiters that were made so far."""
        return [*self._made.values()]

    def ask(self, verb: Callable[[Any], Any]) -> Any:
        """Return the answer of a verb, which takes the limiter; or an Ask."""
        if self.at_once:
            return verb(self.of(Limiter))
        return Ask(lambda: verb(self.of(Limiter)), lambda: verb(self.of(AsyncLimiter)))

    def closing(self) -> Steps[None]:
        """Close the limiters that were made here."""
        for each in self.made() if self._given is None else ():
            # Closing a limiter that follows rules waits for its thread.
            close: Any = each._close  # noqa: SLF001 - neither closes the store, so neither awaits
            yield Call(Ask, close, partial(asyncio.to_thread, close))


class Enforcer:
    """Enforces the limits that its options define."""

    def __init__(self, options: EnforcerOptions, kind: type[AnyLimiter] | None = None) -> None:
        """`kind` is Limiter for threads, AsyncLimiter for an event loop, None for both."""
        self.options = options if kind is not Limiter else options.require_plain_hooks()
        self._kind = kind
        self._limits_hook = options.limits if callable(options.limits) else None
        # True if the request decides whether it is limited, or by which limits.
        self._selects = (options.skip, options.methods, self._limits_hook) != (None, None, None)
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
        self.units: Cost = 1 if callable(options.cost) else options.cost
        self._lock = fork_safe(threading.Lock())  # held while reopening
        given = options.limiter
        if given is not None and kind is not None and not isinstance(given, kind):
            raise ConfigError(
                f"limiter={show(given)} is not a {kind.__name__}; this integration needs one, so "
                f"that it neither blocks an event loop nor depends on one"
            )
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
        """Open the store: at the start, and when used after `close`."""
        options = self.options
        # The enforcers of single routes, by options and name.
        self._routes: dict[tuple[EnforcerOptions, str], Self] = {}
        # The same by the place of a route, each with the objects that the place has by id. A place
        # may have a path that a client chose, so these are dropped apart from the enforcers.
        self._places: dict[object, tuple[Self, object]] = {}
        # The templates of the routes that this enforcer is for; empty for a whole application.
        self._templates: dict[str, None] = {}
        self._endpoint = ANY_ENDPOINT
        # The limiters of each result of `limits`, if that is a function; others have the key None.
        self._limiters: dict[object, Limiters] = {}
        given = options.limiter
        self._owns_store = False
        if given is not None:
            self.clock: Clock = given.clock
            self._on_failure = given.on_failure
            self._local_fallback = given.local_fallback
            self.store: Store = given.store
        else:
            self.clock = clock_of(options.clock)
            self._on_failure = options.on_failure or "open"
            self._local_fallback = local_fallback_of(options.local_fallback)
            self.store, self._owns_store = opened_store(options, self.clock)
        self.now_ns = self.clock.now_ns
        try:
            self._bind()
        except BaseException:
            if self._owns_store:
                self.store.close()
            raise
        self._is_open = True

    def _bind(self) -> None:
        """Make what depends on the store."""
        self._fixed: Limiters | None = None
        limits = self.options.limits
        if self.has_limits and not callable(limits):
            self._fixed = self._limiters[None] = self._limiters_of(limits)
        if self._kind is not None:
            self.prepare(self._kind)
        # Charges a key, where that needs nothing else: no hook, and a store that answers at once.
        self.charge_key: Callable[[Any], Any] | None = None
        # The cached keys by peer, if the peer alone decides (`AsgiCharges.charge_peer`).
        self.by_peer: dict[str, str] = {}
        hooks = (self._selects, self._keys.hook, self._cost)
        if self._fixed is None or not self._fixed.at_once or hooks != (False, None, None):
            return
        self.charge_key = self._charge_at_once(self._fixed)
        known, limiter = self._keys.by_peer, self._fixed.of(Limiter)
        units = self.units
        fits = isinstance(units, int) and all(units <= each.capacity for each in limiter.limits)
        delays = any(limit.algorithm == "leaky_bucket" for limit in limiter.limits)
        if known is not None and fits and not delays:
            self.by_peer = known

    def prepare(self, kind: type[AnyLimiter]) -> None:
        """Make the limiter that requests will need, so that a wrong option is found now."""
        if self._fixed is not None:
            self._fixed.of(Limiter if self._fixed.at_once else kind)

    def _limiters_of(self, limits: LimitsArgument | None) -> Limiters:
        options = self.options
        return Limiters(partial(self._limiter, limits), self.store.is_local, options.limiter)

    def _limiter(self, limits: LimitsArgument | None, kind: type[AnyLimiter]) -> AnyLimiter:
        options = self.options
        arguments: dict[str, Any] = {
            "store": self.store,
            "clock": options.clock,
            "on_failure": self._on_failure,
            "local_fallback": self._local_fallback,
        }
        if options.rules is not None:
            return kind.from_rules(options.rules, **arguments)
        assert limits is not None, "an enforcer without limits makes no limiter"  # noqa: S101 - ours
        limiter = kind(
            limits,
            name=options.name,
            consistency=options.consistency or "strict",
            scope=options.scope or "region",
            across_regions=options.across_regions,
            **arguments,
        )
        for other in self._made():
            # In an outage too, a client whose limits change keeps its consumption.
            limiter.share_local_counts(other)
            break
        limiter.endpoint = self._endpoint
        return limiter

    def _made(self) -> list[AnyLimiter]:
        # A copy: other threads may add to it.
        return [limiter for each in [*self._limiters.values()] for limiter in each.made()]

    def closing(self) -> Steps[None]:
        """Close what this enforcer opened. Using it again opens it again."""
        # A request that arrives meanwhile opens others, so only the present ones are closed.
        limiters, store = [*self._limiters.values()], self.store
        routes = [*self._routes.values()]
        self._routes.clear()
        self._places.clear()
        for enforcer in routes:
            yield from enforcer.closing()
        if not self._is_open or self.options.limiter is not None:
            return
        self._is_open = False
        self.charge_key = None  # `charge` opens it again
        self.by_peer = {}
        for each in limiters:
            yield from each.closing()
        if self._owns_store:
            yield Call(Ask, store.close, store.aclose)

    def close(self) -> None:
        """Close what this enforcer opened, in a thread."""
        run(self.closing())

    async def aclose(self) -> None:
        """Close what this enforcer opened, in an event loop."""
        await run_async(self.closing())

    # ── Routes ─────────────────────────────────────────────────────────────────────────────────

    def route_enforcer(self, options: EnforcerOptions, name: str, route: str | None = None) -> Self:
        """Return an enforcer of other limits, such as a route's, on the same store.

        Options that it leaves open are those of this enforcer: key, answers, on_failure. Not
        `skip`: requests that are left to a route's own limit must not pass that limit, too.

        The same options and name return the same enforcer. Closing this enforcer closes it. Metrics
        name the templates of all routes that it was returned for.
        """
        if not self._is_open:
            self._reopen()
        found = self._routes.get((options, name))
        if found is None:
            if options.key is None and self._keys.invented:
                self._warn_about_key(name)
            found = type(self)(self._inherited(options, name), self._kind)
            _keep(self._routes, (options, name), found)
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
            for limiter in self._made():
                limiter.endpoint = self._endpoint

    def known_route(self, place: object) -> Self | None:
        """Return the enforcer that `remember_route` kept for this place."""
        found = self._places.get(place)
        return None if found is None else found[0]

    def remember_route(self, place: object, enforcer: Self, alive: object) -> None:
        """Keep a route's enforcer for a place; `alive` keeps objects that the place has by id."""
        _keep(self._places, place, (enforcer, alive))

    def _inherited(self, options: EnforcerOptions, name: str) -> EnforcerOptions:
        own = self.options
        # A route that is global is strict, also in an application whose limits are leased.
        usual = "strict" if options.scope == "global" else own.consistency
        return replace(
            options,
            store=self.store,
            name=name,
            identify=self.identity,
            key=own.key if options.key is None and not self._has_rules else options.key,
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

    # ── A request ──────────────────────────────────────────────────────────────────────────────

    def charge(self, request: WebRequest) -> Any:
        """Charge a request: return its Charge, or an Ask if something has to be waited for.

        Raises UncheckableRequest for an invalid key or cost, and for a cost that can never fit.
        """
        if self.charge_key is None:
            # Without limits there is nothing to ask for: only routes have them.
            return asking(self._charging, request) if self.has_limits else Charge(enforcer=self)
        try:
            charge = self.charge_key(self._keys.of(request))
        except (CapacityError, ConfigError):
            return asking(self._charging, request)  # the steps explain it
        return asking(self._delaying, charge) if charge.decision.delay_ns else charge

    def _charge_at_once(self, limiters: Limiters) -> Callable[[Any], Charge]:
        """Return a closure, because it reads no attribute of this object: half the time."""
        units, limiter = self.units, limiters.of(Limiter)
        check, evaluate = limiter.check, limiter.evaluate
        is_settled = not self.counts_outcomes

        def charge(key: Any) -> Charge:
            return Charge(check(key, units), key, units, self, limiters, None, is_settled)

        def charge_by_rules(key: Any) -> Charge:
            result = evaluate(key, units)
            return Charge(result.decision, key, units, self, limiters, result, is_settled)

        return charge_by_rules if self._has_rules else charge

    def _charging(self, request: WebRequest) -> Steps[Charge]:
        """Charge a request, and wait as long as a leaky bucket demands."""
        if not self._is_open:
            self._reopen()
        request.address_of = self._address_of  # for hooks
        limiters = self._fixed
        if self._selects:
            limiters = yield from self._selecting(request)
        if limiters is None:
            return Charge(PASSED.decision, "", 0, self)
        keys = self._keys
        if keys.hook is None:
            key = keys.of(request)
        else:
            key = keys.of_hook((yield from _value("key", keys.hook(request))), request)
        units = self.units
        if self._cost is not None:
            units = yield from _value("cost", self._cost(request))
        try:
            verb = methodcaller("evaluate" if self._has_rules else "check", key, units)
            found = yield Call(limiters.ask, verb)
        except (CapacityError, ConfigError) as error:
            look = yield from self._looking(limiters, key)
            raise UncheckableRequest(error, look) from error
        # Without rules, a result is made of the decision if it is needed: `Charge.result`.
        decision, result = (found.decision, found) if self._has_rules else (found, None)
        charge = Charge(decision, key, units, self, limiters, result, not self.counts_outcomes)
        return (yield from self._delaying(charge)) if charge.decision.delay_ns else charge

    def _looking(self, limiters: Limiters, key: Key | Request) -> Steps[Charge | None]:
        """Return a charge of nothing; None if the store cannot say what remains."""
        try:
            result = yield Call(limiters.ask, lambda each: each.evaluate(key, 0, spend=False))
        except RatekeeperError:
            return None
        decision = result.decision
        return Charge(decision, key, 0, self, limiters, result) if decision.allowed else None

    def _selecting(self, request: WebRequest) -> Steps[Limiters | None]:
        """Return the limiters that apply to a request; None if it is not limited."""
        options, hook = self.options, self._limits_hook
        # In upper case: some frameworks serve a "post" by the code of a POST.
        if options.methods is not None and request.method.upper() not in options.methods:
            return None
        if options.skip is not None and (yield from _value("skip", options.skip(request))):
            return None
        if hook is None:
            return self._fixed
        limits = yield from _value("limits", hook(request))
        return None if limits is None else self._limiters_for(limits, hook)

    def _limiters_for(self, found: Any, hook: Callable[..., object]) -> Limiters:
        """Return the limiters of a result of the function that `limits` is.

        Raises ConfigError for a result that is not limits. It goes to the application: the client
        has not caused it, and the request must not pass.
        """
        key = tuple(found) if isinstance(found, list) else found
        try:
            known = self._limiters.get(key)
        except TypeError:  # not hashable, so not limits
            known = None
        if known is not None:
            return known
        try:
            limits = limits_of(found)
        except ConfigError as error:
            raise ConfigError(
                f"the function {name_of(hook)} returned {show(found)} as limits; return a rate "
                f'such as "100/minute", a Limit, a list of them, or None for no limit: {error}'
            ) from error
        made = self._limiters_of(limits)
        if len(self._limiters) >= RESULTS_MAX:
            self._limiters.clear()  # not closed: requests in progress settle with them
        self._limiters[key] = made
        return made

    def _sleep(self, seconds: float) -> Ask:
        return Ask(self.clock.sleep, self.clock.sleep_async, seconds)

    def _delaying(self, charge: Charge) -> Steps[Charge]:
        """Wait as long as a leaky bucket demands."""
        try:
            yield Call(self._sleep, seconds_from_ns(charge.decision.delay_ns))
        except BaseException:
            charge.refund()  # a request that leaves the queue returns its place
            yield from self.leaving(charge)
            raise
        return charge

    def leaving(
        self, charge: Charge, status: int | None = None, *, ended: bool = True
    ) -> Steps[None]:
        """Apply the final cost of a request, unless it is already applied; free its slots.

        Without `ended`, more of the response follows, and the request keeps its slots. `status` is
        that of the response, 500 for a handler that raised, None if there is no outcome. If the
        store fails, the error is logged and the request keeps its charge.
        """
        counts: Any = True
        if self.options.count is not None and status is not None:
            counts = yield from _value("count", self.options.count(status))
        due = charge.take(bool(counts))
        if charge.renewal is not None:
            yield from self._freeing(charge, ended=ended)
        if due is None or charge.limiters is None:
            return
        try:
            # An Undo is not lost if the task is cancelled, as when the client disconnects.
            settle = partial(_settle, charge, *due)
            yield Undo(charge.limiters.ask, settle)
        except RatekeeperError as error:
            # Without the key, which may be a secret.
            LOG.warning("the final cost of a request could not be settled: %s", error)

    def _freeing(self, charge: Charge, *, ended: bool) -> Steps[None]:
        """Free the slots of a request that has ended."""
        renewal, limiters = charge.renewal, charge.limiters
        assert renewal is not None, "the request has slots"  # noqa: S101 - ours
        assert limiters is not None, "they are a limiter's"  # noqa: S101 - ours
        if not ended:
            charge.is_settled = False
            return
        renewal.stop()
        charge.renewal = None
        try:
            yield Undo(limiters.ask, methodcaller("release", charge.decision))
        except RatekeeperError as error:  # they end by themselves
            LOG.warning("the slot of a request could not be freed: %s", error)

    def answering(self, request: WebRequest, result: CheckResult) -> Steps[Any]:
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
        elif charge.limiters is not None:
            charge.limiters.any.log_denial(charge.key, charge.decision)


def _keep(routes: dict[Any, Any], key: object, value: object) -> None:
    if len(routes) >= ROUTES_MAX:
        routes.clear()
    routes[key] = value


def _settle(charge: Charge, charged: Cost, wanted: Cost, limiter: Any) -> Any:
    return limiter.settle(charge.key, charged, wanted, charge.decision)


def _value(hook: str, value: Any) -> Steps[Any]:
    """Return the value of a hook, awaited if the hook is async.

    Raises TypeError for an awaitable in a thread. It is true: with such a `skip`, every request
    would silently pass unlimited.
    """
    if type(value) is Ask or is_awaitable(value):  # hardly ever, so only then is it a step
        value = yield Call(lambda: value)
        if is_awaitable(value):
            raise TypeError(
                f"{hook} returned {show(value)}, which a thread cannot await; return a plain value"
            )
    return value
