"""What every web integration shares: which limiter, who is asking, and what follows the response.

    call → skip? → key, cost → evaluate → (leaky bucket: wait) → the application → settle

A guard opens the store and limiter that its `Terms` name, and closes what it opened. `enter`
charges a call and returns its Charge; `leave` applies what the application made of it. Both guards
are the same, `Guard` for threads and `AsyncGuard` awaited, whose hooks may be async too. A hook
that raises is the application's error and goes to the application.

Nobody waits for a store that answers at once (`memory://`, `shared://`), so an AsyncGuard asks it
as a Guard does; `enter_now` does so without a coroutine. A store that is a trip away is awaited.

A guard has no thread or task of its own, and keeps nothing of a request.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from inspect import isawaitable
from typing import Any, ClassVar, Final, Self

from tollkeeper.core.clock import Clock, clock_of, seconds_from_ns
from tollkeeper.core.errors import CapacityError, ConfigError, TollkeeperError, show
from tollkeeper.core.model import CheckResult, Decision
from tollkeeper.decide.store import Store
from tollkeeper.decide.stores import open_store
from tollkeeper.limiter import AsyncLimiter, Limiter
from tollkeeper.web.answers import Answer, bad_request_of, capacity_refusal_of, refusal_of
from tollkeeper.web.calls import Call
from tollkeeper.web.charges import PASSED, Charge
from tollkeeper.web.identity import Identity
from tollkeeper.web.keys import Keys
from tollkeeper.web.prepared import Prepared, prepared
from tollkeeper.web.terms import KeySource, Options, Terms, plain

__all__ = ["LOG", "AsyncGuard", "Guard", "KeySource", "Options", "Refused", "Terms"]

LOG: Final = logging.getLogger("tollkeeper.web")

# Guards that one made for the routes of an application: more than any application has.
BESIDE_MAX: Final = 10_000


class _Post:
    """What both guards are, but for what is awaited."""

    _takes: ClassVar[type[Limiter | AsyncLimiter]]

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.style = terms.style
        self.identity = (
            terms.identify
            if isinstance(terms.identify, Identity)
            else Identity(terms.identify or {}, trusted_proxies=terms.trusted_proxies)
        )
        # Whether an outcome has a say in what a request costs.
        self.counts_some = terms.count is not None
        self._cost = terms.cost if callable(terms.cost) else None
        self.units = 1 if callable(terms.cost) else terms.cost
        self._lock = threading.Lock()  # of opening again, which is seldom done
        self._keys = Keys(terms, self.identity, self._has_rules())
        self._key_of = self._keys.of
        self._opened = False
        self._open()

    def _reopen(self) -> None:
        with self._lock:
            if not self._opened:
                self._open()

    def _open(self) -> None:
        """Open what the terms name: at the start, and again if used after it was closed."""
        terms = self.terms
        self._beside: dict[tuple[Terms, str], Self] = {}
        # For integrations: those guards again, by whatever they find them by; BESIDE_MAX at most.
        self.remembered: dict[object, tuple[Self, object]] = {}
        self._limiter: Any = terms.limiter
        self._owns_store = terms.limiter is None and isinstance(terms.store, str)
        if terms.limiter is not None:
            self._check_limiter(terms.limiter)
            self.clock: Clock = terms.limiter.clock
            self._on_failure = terms.limiter.on_failure
            self.store: Store = terms.limiter.store
            self._bind()
            self._opened = True
            self.now_ns = self.clock.now_ns
            return
        self.clock = clock_of(terms.clock)
        self.now_ns = self.clock.now_ns
        self._on_failure = terms.on_failure
        self.store = (
            open_store(terms.store, self.clock) if isinstance(terms.store, str) else terms.store
        )
        try:
            self._limiter = self._make(self._kind())
            self._bind()
        except BaseException:
            if self._owns_store:
                self.store.close()
            raise
        self._opened = True

    def _kind(self) -> type[Limiter | AsyncLimiter]:
        """Which limiter suits the store."""
        return Limiter

    def _bind(self) -> None:
        """For a guard to prepare what it needs of the limiter."""

    def _make(self, kind: type[Limiter | AsyncLimiter]) -> Limiter | AsyncLimiter | None:
        terms = self.terms
        on_store: dict[str, Any] = {
            "store": self.store,
            "clock": terms.clock,
            "on_failure": terms.on_failure,
            "local_fallback": terms.local_fallback,
        }
        if terms.limits is not None:
            return kind(terms.limits, name=terms.name, **on_store)
        if terms.rules is not None:
            return kind.from_rules(terms.rules, **on_store)
        return None

    def _check_limiter(self, limiter: object) -> None:
        if not isinstance(limiter, self._takes):
            raise ConfigError(
                f"limiter={show(limiter)} is not {_article(self._takes.__name__)}, which is what "
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
            self._reopen()
        found = self._beside.get((terms, name))
        if found is None:
            if len(self._beside) >= BESIDE_MAX:
                self._beside.clear()
            found = self._beside[terms, name] = type(self)(self._completed(terms, name))
        return found

    def remember(self, by: object, guard: Self, alive: object = None) -> Self:
        """Keep a guard that is beside this one, by `by`, and with it what has to stay `alive`."""
        if len(self.remembered) >= BESIDE_MAX:
            self.remembered.clear()
        self.remembered[by] = guard, alive
        return guard

    def _leave_alone(self) -> list[Self]:
        """The guards beside this one, which it knows no more: their store is about to be closed."""
        guards = list(self._beside.values())
        self._beside.clear()
        self.remembered.clear()
        return guards

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
            on_failure=self._on_failure,
            local_fallback=own.local_fallback,
            clock=self.clock,
        )

    def _counts(self, status: int | None) -> Any:
        """What the hook says of an outcome; true where there is no hook, or no outcome."""
        count = self.terms.count
        return count is None or status is None or count(status)

    def refusal(self, ruling: CheckResult) -> Answer:
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


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "AEIOU" else f"a {noun}"


def _not_settled(error: TollkeeperError) -> None:
    # Without the key, which may be a secret. The store keeps what was charged on the way in.
    LOG.warning("what a request cost could not be settled: %s", error)


class Guard(_Post):
    """Terms in force, for threads."""

    _takes = Limiter

    def __init__(self, terms: Terms) -> None:
        super().__init__(plain(terms))

    def enter(self, call: Call) -> Charge:
        """Charge a call, and hold it for as long as a leaky bucket asks.

        Raises Refused for a key or a cost that is none, and a cost that can never fit.
        """
        if not self._opened:
            self._reopen()
        skip = self.terms.skip
        if self._limiter is None or (skip is not None and _said("skip", skip(call))):
            return Charge(PASSED)
        hook = self._keys.hook
        key = self._key_of(call) if hook is None else self._keys.of_hook(hook(call), call)
        units = self.units if self._cost is None else self._cost(call)
        try:
            ruling = self._limiter.evaluate(key, units)
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
        due = charge.take(_said("count", self._counts(status)))
        if due is None:
            return
        try:
            self._limiter.settle(charge.key, *due)
        except TollkeeperError as error:
            _not_settled(error)

    def response(self, call: Call, ruling: CheckResult) -> Any:
        """What the application's own hook answers to a denied request; None for the default."""
        hook = self.terms.on_limit
        return None if hook is None else hook(call, ruling)

    def close(self) -> None:
        """Close what this guard opened. Using it again opens it again."""
        # Those that are open now: a request that comes meanwhile opens others.
        limiter, store = self._limiter, self.store
        for guard in self._leave_alone():
            guard.close()
        if self._opened and self.terms.limiter is None:
            self._opened = False
            if limiter is not None:
                limiter.close()
            if self._owns_store:
                store.close()


class AsyncGuard(_Post):
    """Terms in force, for asyncio: the verbs of Guard, awaited; its hooks may be async."""

    _takes = AsyncLimiter
    # Whether the store is a trip away.
    awaits: bool
    # Whether `enter_now` is enough: no hook, nothing to await, no leaky bucket.
    is_quick: bool
    # Keys by peer, for who decides without even a call (`passage.started_now`); else None.
    peers: dict[str, str] | None

    def _kind(self) -> type[Limiter | AsyncLimiter]:
        return Limiter if self.store.as_async is None else AsyncLimiter

    def _bind(self) -> None:
        terms = self.terms
        self.awaits = isinstance(self._limiter, AsyncLimiter)
        self.prepared: Prepared | None = None
        self.is_quick = (
            not self.awaits
            and terms.limits is not None
            and all(limit.algorithm != "leaky_bucket" for limit in self._limiter.limits)
            and (terms.skip, self._keys.hook, self._cost) == (None, None, None)
        )
        self.peers = None
        if self.is_quick:
            self.check = self._limiter.check
            if self.units <= min(limit.capacity for limit in self._limiter.limits):
                self.peers = self._keys.by_peer

    def enter_now(self, call: Call) -> Charge:
        """Charge a call without waiting for anything; for a guard that `is_quick`."""
        key = self._key_of(call)
        try:
            ruling = self._limiter.evaluate(key, self.units)
        except (CapacityError, ConfigError) as error:
            raise Refused(error) from error
        if self.prepared is None:
            self.prepared = prepared(ruling, self.now_ns(), self.style)
        return Charge(ruling, key, self.units)

    def ruling_of(self, decision: Decision) -> CheckResult:
        """What `evaluate` makes of a decision that `check` returned."""
        ruling: CheckResult = self._limiter._ruling(decision)  # noqa: SLF001 - it would decide again
        return ruling

    async def enter(self, call: Call) -> Charge:
        """Charge a call, and hold it for as long as a leaky bucket asks. See Guard.enter."""
        if not self._opened:
            self._reopen()
        skip = self.terms.skip
        if self._limiter is None or (skip is not None and await _found(skip(call))):
            return Charge(PASSED)
        hook = self._keys.hook
        if hook is None:
            key = self._key_of(call)
        else:
            key = self._keys.of_hook(await _found(hook(call)), call)
        units = self.units if self._cost is None else await _found(self._cost(call))
        try:
            ruling = self._limiter.evaluate(key, units)
            if self.awaits:
                ruling = await ruling
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
        due = charge.take(bool(await _found(self._counts(status))))
        if due is None:
            return
        if not self.awaits:
            await self._settle(charge, *due)
            return
        # Shielded: who hangs up at the end of a response may be cancelled here, between two trips.
        settling = asyncio.ensure_future(self._settle(charge, *due))
        _settling.add(settling)
        settling.add_done_callback(_settling.discard)
        await asyncio.shield(settling)

    async def _settle(self, charge: Charge, charged: int, wanted: int) -> None:
        try:
            settled = self._limiter.settle(charge.key, charged, wanted)
            if self.awaits:
                await settled
        except TollkeeperError as error:
            _not_settled(error)

    async def response(self, call: Call, ruling: CheckResult) -> Any:
        """What the application's own hook answers to a denied request; None for the default."""
        hook = self.terms.on_limit
        return None if hook is None else await _found(hook(call, ruling))

    async def close(self) -> None:
        """Close what this guard opened. Using it again opens it again."""
        # Those that are open now: a request that comes meanwhile opens others.
        limiter, store = self._limiter, self.store
        for guard in self._leave_alone():
            await guard.close()
        if self._opened and self.terms.limiter is None:
            self._opened = self.is_quick = False
            self.peers = None
            if self.awaits:
                await limiter.close()
            elif limiter is not None:
                # A thread that follows rules is waited for.
                closing = asyncio.to_thread if self.terms.rules is not None else _called
                await closing(limiter.close)
            if self._owns_store:
                awaited = store.as_async
                await (_called(store.close) if awaited is None else awaited.aclose())


def _said(hook: str, value: Any) -> bool:
    """Yes or no, of a hook that is not awaited."""
    if isawaitable(value):
        # It would be true: nobody would be limited, and nobody would notice.
        raise TypeError(
            f"{hook} returned {show(value)}, which nothing awaits in a thread; return True or False"
        )
    return bool(value)


_settling: Final[set[asyncio.Future[None]]] = set()  # until each is done: the loop keeps none


async def _called(function: Callable[[], None]) -> None:
    function()


async def _found(value: Any) -> Any:
    """What a hook returned, whether it is async or not."""
    return await value if isawaitable(value) else value
