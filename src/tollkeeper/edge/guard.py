"""What every web integration shares: which limiter, who is asking, and what follows the response.

    call → skip? → key, cost → judge → (leaky bucket: wait) → the application → settle

`Terms` is what a user says, in one constructor for all integrations, and checked at once. A guard
opens the terms' store and limiter, and closes what it opened. `enter` charges a call and returns
its Charge; `leave` applies what the application made of it. Both guards are the same, `Guard` for
threads and `AsyncGuard` awaited, whose hooks may be async too. A hook that raises is the
application's error and goes to the application.

A guard has no thread, lock or task of its own, and keeps nothing of a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from typing import Any, ClassVar, Final, Self, TypedDict, cast

from tollkeeper.arguments import Limits, Rules, clock_of, limits_of, units_of
from tollkeeper.clock import Clock, seconds_from_ns
from tollkeeper.decide.failure import FailurePolicy, check_policy
from tollkeeper.decide.store import Store
from tollkeeper.decide.stores import open_store
from tollkeeper.edge.answers import (
    Answer,
    Style,
    bad_request_of,
    capacity_refusal_of,
    refusal_of,
)
from tollkeeper.edge.calls import Call, digest_of
from tollkeeper.edge.charges import PASSED, Charge
from tollkeeper.edge.claims import Claim
from tollkeeper.edge.identity import NOBODY, Identity, Source
from tollkeeper.errors import CapacityError, ConfigError, TollkeeperError, show
from tollkeeper.identify import Key
from tollkeeper.limiter import Limiter
from tollkeeper.limiter_async import AsyncLimiter
from tollkeeper.match.paths import normalised
from tollkeeper.model import Request, check_name
from tollkeeper.ruling import Ruling

LOG: Final = logging.getLogger("tollkeeper.edge")

# Guards that one made for the routes of an application: more than any application has.
BESIDE_MAX: Final = 10_000
# A longer path is hashed, so that it is a key like any other.
ROUTE_LENGTH_MAX: Final = 200

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
    on_limit: Callable[[Call, Ruling], Any] | None
    count: Callable[[int], bool] | None
    style: Style
    name: str
    on_failure: FailurePolicy
    clock: Clock | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """On what terms a request may pass.

    One of these three says the limits:

    `limits`    as of `Limiter`: a rate string, a Limit, or several.
    `rules`     as of `Limiter.from_rules`; each request is asked about as `identify` describes it.
    `limiter`   one of your own, which you close.

    And how it is done:

    `store`, `name`, `on_failure` and `clock` as of `Limiter`, for a limiter that is made here.
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

    limits: Limits | None = None
    rules: Rules | None = None
    limiter: Limiter | AsyncLimiter | None = None
    store: str | Store = "memory://"
    identify: Identity | Mapping[str, Source | Sequence[Source]] | None = None
    trusted_proxies: Sequence[str] = ()
    key: KeySource | None = None
    per_route: bool = False
    cost: int | Callable[[Call], Any] = 1
    skip: Callable[[Call], Any] | None = None
    on_limit: Callable[[Call, Ruling], Any] | None = None
    count: Callable[[int], bool] | None = None
    style: Style = field(default_factory=Style)
    name: str = ""
    on_failure: FailurePolicy = "open"
    clock: Clock | None = None

    def __post_init__(self) -> None:
        said = [name for name in ("limits", "rules", "limiter") if getattr(self, name) is not None]
        if len(said) > 1:
            raise ConfigError(
                f"{' and '.join(said)} both say what the limits are; give one of them"
            )
        check_name("name", self.name)
        check_policy(self.on_failure)
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
            limits_of(self.limits)
        self._check_what_goes_together()

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
        if self.limiter is not None and (self.store != "memory://" or self.on_failure != "open"):
            raise ConfigError("the limiter that you pass has a store and an on_failure already")

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


class _Post:
    """What both guards are, but for what is awaited."""

    _made_of: ClassVar[type[Limiter | AsyncLimiter]]

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.style = terms.style
        self.identity = (
            terms.identify
            if isinstance(terms.identify, Identity)
            else Identity(terms.identify or {}, trusted_proxies=terms.trusted_proxies)
        )
        self._opened = False
        self._open()
        key = terms.key
        self._by_request = key is None and self._has_rules()
        self._key_hook = key if callable(key) and not isinstance(key, Claim) else None
        # Checked and compiled once; a text is one source, and the address is what all have.
        self._sources = self.identity.compiled(
            "address" if key is None or self._key_hook is not None else cast("Source", key)
        )
        self._per_route = terms.per_route
        self._cost = terms.cost if callable(terms.cost) else None
        self._units = 1 if callable(terms.cost) else terms.cost

    def _open(self) -> None:
        """Open what the terms name: at the start, and again if used after it was closed."""
        terms = self.terms
        self._beside: dict[tuple[Terms, str], Self] = {}
        self._limiter: Any = terms.limiter
        self._owns_store = terms.limiter is None and isinstance(terms.store, str)
        if terms.limiter is not None:
            self._check_limiter(terms.limiter)
            self.clock: Clock = terms.limiter._clock  # noqa: SLF001 - answers and waits by its time
            self.store: Store = terms.limiter.store
            self._opened = True
            return
        self.clock = clock_of(terms.clock)
        self.store = (
            open_store(terms.store, self.clock) if isinstance(terms.store, str) else terms.store
        )
        try:
            self._limiter = self._make()
        except BaseException:
            if self._owns_store:
                self.store.close()
            raise
        self._opened = True

    def _make(self) -> Limiter | AsyncLimiter | None:
        terms = self.terms
        on_store: dict[str, Any] = {
            "store": self.store,
            "clock": terms.clock,
            "on_failure": terms.on_failure,
        }
        if terms.limits is not None:
            return self._made_of(terms.limits, name=terms.name, **on_store)
        if terms.rules is not None:
            return self._made_of.from_rules(terms.rules, **on_store)
        return None

    def _check_limiter(self, limiter: object) -> None:
        if not isinstance(limiter, self._made_of):
            raise ConfigError(
                f"limiter={show(limiter)} is not {_article(self._made_of.__name__)}, which is what "
                f"this integration asks: it must neither block an event loop nor need one"
            )

    def _has_rules(self) -> bool:
        if self.terms.limiter is None:
            return self.terms.rules is not None
        try:
            self.terms.limiter.counts()
        except ConfigError:
            return False
        return True

    def beside(self, terms: Terms, name: str) -> Self:
        """A guard of other limits under `name`, such as a route's, on the same store.

        What `terms` leave open is as it is here: whom to count, whom to skip, how to answer. The
        same terms and name give the same guard, and closing this one closes it.
        """
        if not self._opened:
            self._open()
        found = self._beside.get((terms, name))
        if found is None:
            if len(self._beside) >= BESIDE_MAX:
                self._beside.clear()
            found = self._beside[terms, name] = type(self)(self._completed(terms, name))
        return found

    def _completed(self, terms: Terms, name: str) -> Terms:
        own = self.terms
        return replace(
            terms,
            store=self.store,
            name=name,
            identify=self.identity,
            trusted_proxies=(),
            key=own.key if terms.key is None and not self._has_rules() else terms.key,
            skip=terms.skip or own.skip,
            on_limit=terms.on_limit or own.on_limit,
            style=own.style,
            on_failure=own.on_failure,
            clock=self.clock,
        )

    def _key_of(self, call: Call) -> Key | Request:
        """Who is counted, where no hook says it."""
        if self._by_request:
            return self.identity.request_of(call)
        key = NOBODY
        for label, read in self._sources:
            value = read(call)
            if value is not None:
                key = (label, value)
                break
        return (*key, _route_of(call)) if self._per_route else key

    def _key_from(self, found: Any, call: Call) -> Key | Request:
        """Who is counted, of what the application's own hook found."""
        if found is None:
            return self.identity.request_of(call) if self._has_rules() else self._key_of(call)
        if not self._per_route or isinstance(found, Request):
            return cast("Key", found)
        parts = found if isinstance(found, tuple) else (found,)
        return (*parts, _route_of(call))

    def _counts(self, status: int | None) -> bool:
        count = self.terms.count
        return count is None or status is None or bool(count(status))

    def refusal(self, ruling: Ruling) -> Answer:
        """The answer to a denied request, where no hook has another."""
        return refusal_of(ruling, self.clock.now_ns(), self.style)


class Refused(TollkeeperError):
    """A request that no limiter can be asked about; `answer` tells the client why."""

    def __init__(self, error: CapacityError | ConfigError) -> None:
        self.error = error
        self.answer: Answer = (
            capacity_refusal_of(error)
            if isinstance(error, CapacityError)
            else bad_request_of(error)
        )
        super().__init__(str(error))

    def __reduce__(self) -> tuple[type[Refused], tuple[CapacityError | ConfigError]]:
        return type(self), (self.error,)


def _route_of(call: Call) -> str:
    """The route's template, or the path; short enough for a key, whatever a client sends."""
    route = call.route or normalised(call.path)
    if 0 < len(route) <= ROUTE_LENGTH_MAX and route.isascii() and route.isprintable():
        return route
    return digest_of(route)


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "AEIOU" else f"a {noun}"


def _not_settled(error: TollkeeperError) -> None:
    # Without the key, which may be a secret. The store keeps what was charged on the way in.
    LOG.warning("what a request cost could not be settled: %s", error)


class Guard(_Post):
    """Terms in force, for threads."""

    _made_of = Limiter

    def enter(self, call: Call) -> Charge:
        """Charge a call, and hold it for as long as a leaky bucket asks.

        Raises Refused for a key or a cost that is none, and a cost that can never fit.
        """
        if not self._opened:
            self._open()
        skip = self.terms.skip
        if self._limiter is None or (skip is not None and skip(call)):
            return Charge(PASSED)
        hook = self._key_hook
        key = self._key_of(call) if hook is None else self._key_from(hook(call), call)
        units = self._units if self._cost is None else self._cost(call)
        try:
            ruling = self._limiter.judge(key, units)
        except (CapacityError, ConfigError) as error:
            raise Refused(error) from error
        charge = Charge(ruling, key, units)
        if ruling.decision.delay_ns:
            self._hold(charge)
        return charge

    def _hold(self, charge: Charge) -> None:
        try:
            self.clock.sleep(seconds_from_ns(charge.decision.delay_ns))
        except BaseException:
            charge.refund()  # whoever leaves the queue gives the place back
            self.leave(charge)
            raise

    def leave(self, charge: Charge, status: int | None = None) -> None:
        """Apply what the request turned out to cost; nothing where it already is.

        `status` is the response's, 500 for a handler that raised, None for no outcome at all. A
        store that fails is logged, and the request keeps what it was charged on the way in.
        """
        due = charge.take(self._counts(status))
        if due is None:
            return
        try:
            self._limiter.settle(charge.key, *due)
        except TollkeeperError as error:
            _not_settled(error)

    def response(self, call: Call, ruling: Ruling) -> Any:
        """What the application's own hook answers to a denied request; None for the default."""
        hook = self.terms.on_limit
        return None if hook is None else hook(call, ruling)

    def close(self) -> None:
        """Close what this guard opened. Using it again opens it again."""
        for guard in self._beside.values():
            guard.close()
        if self._opened and self.terms.limiter is None:
            self._opened = False
            if self._limiter is not None:
                self._limiter.close()
            if self._owns_store:
                self.store.close()


class AsyncGuard(_Post):
    """Terms in force, for asyncio: the verbs of Guard, awaited; its hooks may be async."""

    _made_of = AsyncLimiter

    async def enter(self, call: Call) -> Charge:
        """Charge a call, and hold it for as long as a leaky bucket asks. See Guard.enter."""
        if not self._opened:
            self._open()
        skip = self.terms.skip
        if self._limiter is None or (skip is not None and await _found(skip(call))):
            return Charge(PASSED)
        hook = self._key_hook
        key = self._key_of(call) if hook is None else self._key_from(await _found(hook(call)), call)
        units = self._units if self._cost is None else await _found(self._cost(call))
        try:
            ruling = await self._limiter.judge(key, units)
        except (CapacityError, ConfigError) as error:
            raise Refused(error) from error
        charge = Charge(ruling, key, units)
        if ruling.decision.delay_ns:
            await self._hold(charge)
        return charge

    async def _hold(self, charge: Charge) -> None:
        try:
            await self.clock.sleep_async(seconds_from_ns(charge.decision.delay_ns))
        except BaseException:
            charge.refund()  # whoever leaves the queue gives the place back
            await self.leave(charge)
            raise

    async def leave(self, charge: Charge, status: int | None = None) -> None:
        """Apply what the request turned out to cost. See Guard.leave."""
        due = charge.take(self._counts(status))
        if due is None:
            return
        try:
            await self._limiter.settle(charge.key, *due)
        except TollkeeperError as error:
            _not_settled(error)

    async def response(self, call: Call, ruling: Ruling) -> Any:
        """What the application's own hook answers to a denied request; None for the default."""
        hook = self.terms.on_limit
        return None if hook is None else await _found(hook(call, ruling))

    async def close(self) -> None:
        """Close what this guard opened. Using it again opens it again."""
        for guard in self._beside.values():
            await guard.close()
        if self._opened and self.terms.limiter is None:
            self._opened = False
            if self._limiter is not None:
                await self._limiter.close()
            if self._owns_store:
                closing = getattr(self.store, "aclose", None)
                await closing() if closing is not None else self.store.close()


async def _found(value: Any) -> Any:
    """What a hook returned, whether it is async or not."""
    return await value if isawaitable(value) else value
