"""HTTP clients that keep limits and wait as long as servers request: transports for httpx.

A client that repeats a denied request at once makes things worse, and many clients that wait for
the same second return as one wave. `RetryTransport` does three things about it.

It *waits as long as the response requests*, and then a random time more: never less than requested,
and never all clients together. If a response asks for nothing, only the random time grows with
every attempt.

It *paces itself*. A response that says "nothing left for 5 s" delays the next requests to that
origin, before they are denied (`_Pauses`).

It *keeps a budget*. Retries are a share of the traffic, and a few more: when most requests fail,
most failures are returned, and an origin in trouble gets a tenth more load rather than five times
as much (`_Budgets`).

A request is repeated only if it was denied (429: it had no effect) or is safe to repeat (503 and an
idempotent method), and if its body can be sent twice. In all other cases, and once a request has
waited or tried enough, the caller gets the response as it is.

`LimitTransport` does all of this, and spends units before each attempt on a store that processes or
machines share. A limit is kept as the other side counts it, when requests *arrive*
(`_ArrivalSlots`). A Limiter that the caller passes counts requests as they leave (`_Units`). A
request waits for room up to a bound, and then raises `LimitTimeout`: it is not sent, and nothing is
spent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypedDict, Unpack, cast

from ratekeeper.core import switches
from ratekeeper.core.chance import RANDOM
from ratekeeper.core.clock import NS_PER_SECOND, Clock, clock_of, duration_ns, seconds_from_ns
from ratekeeper.core.errors import ConfigError, LimitExceeded, StoreError, show
from ratekeeper.core.model import Decision, Limit, Request, decision_with
from ratekeeper.core.rates import LimitsArgument, limits_of
from ratekeeper.core.steps import Call, Steps, Undo, run, run_async
from ratekeeper.core.subjects import Key, subject_of
from ratekeeper.decide.algorithms.in_flight import has_slots
from ratekeeper.decide.store import Counter, Store
from ratekeeper.decide.stores import open_fallback_store
from ratekeeper.limiter.arguments import check_names, explains
from ratekeeper.limiter.async_limiter import AsyncLimiter
from ratekeeper.limiter.limiter import Limiter

try:
    import httpx
except ImportError as error:
    raise ConfigError(
        f"ratekeeper.httpx needs httpx ({error}); install it with: pip install 'ratekeeper[client]'"
    ) from error

__all__ = [
    "AsyncLimitTransport",
    "AsyncRetryTransport",
    "LimitSettings",
    "LimitTimeout",
    "LimitTransport",
    "RetryAdvice",
    "RetrySettings",
    "RetryTransport",
    "retry_advice_of",
]

AnyLimiter = Limiter | AsyncLimiter
KeyOfRequest = Callable[[httpx.Request], Key | Request]
CostOfRequest = Callable[[httpx.Request], int]

# A denied request had no effect, so any method may be repeated. A 503 may have had an effect.
DENIED: Final = 429
UNAVAILABLE: Final = 503
IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})

ATTEMPTS_MAX: Final = 100
WAIT_NS_MAX: Final = 366 * 86_400 * NS_PER_SECOND
# Origins whose budgets and pauses fit into the memory of a transport.
ORIGINS_MAX: Final = 10_000
# Each first attempt earns this part of a retry.
SHARE_DIVISOR: Final = 10
# The random time: up to this much after the first attempt, doubled after each further one.
SPREAD_NS_FIRST: Final = NS_PER_SECOND // 2
SPREAD_NS_MAX: Final = 30 * NS_PER_SECOND
# Its range is at least this part of a long wait: one second would not spread those clients.
SPREAD_DIVISOR: Final = 4
# A body up to this size is read before it is dropped, so that the connection can be reused.
DRAIN_BYTES_MAX: Final = 65_536

# Slots of a limit. A search for a free one looks at all of them.
SLOTS_MAX: Final = 100
ARRIVES_WITHIN_NS_MAX: Final = 3_600 * NS_PER_SECOND
_SLOT_UNITS: Final = 1_000_000

_NS_PER_MS: Final = 1_000_000
# The longest pause of an origin, whatever a response says: some servers send times that are wrong
# by a factor of a thousand. After it, one request asks again.
PAUSE_NS_MAX: Final = 3_600 * NS_PER_SECOND
_PAUSE_MS_MAX: Final = PAUSE_NS_MAX // _NS_PER_MS
# Attempts to extend a pause while other processes extend it, too.
_PAUSE_TRIES_MAX: Final = 3


# ── Settings ───────────────────────────────────────────────────────────────────────────────────


class RetrySettings(TypedDict, total=False):
    """How often a request is sent, and how long it may wait."""

    attempts_max: int
    """The number of attempts of one request, by default 5; with 1 nothing is repeated."""
    wait_max: float | timedelta
    """No attempt is made later than so many seconds after the first; a number or a timedelta, by
    default 60."""
    budget: LimitsArgument
    """The retries of each origin, on top of a tenth of its requests; by default
    "30/minute capacity 10"."""
    pace: bool
    """Whether other requests wait after a response with nothing left; by default True."""
    clock: Clock | None
    """The clock; by default the system clock."""
    random: Callable[[], float]
    """A function that returns a number from 0 up to 1; by default of a separate generator."""


class LimitSettings(RetrySettings, total=False):
    """What is counted, where, and what happens without room. And all of `RetrySettings`."""

    key: Key | KeyOfRequest
    """What requests are counted by: by default their origin (scheme, host and port), or a key for
    all requests, or a function of the request."""
    cost: CostOfRequest
    """A function that returns the units of a request, for a limiter; by default each costs 1."""
    store: str | Store
    """Where the limit is counted; by default "memory://". "shared:///run/app.limits" for all
    processes of a machine, "redis://host" for all machines."""
    name: str
    """Keeps the counts apart from those of other limiters on the store; by default "outgoing"."""
    on_failure: Literal["closed", "raise"]
    """The answer while the store is unavailable. "closed" (default): no request is sent, up to
    `wait_max`. "raise": the StoreError."""
    arrives_within: float | timedelta
    """The limit assumes that a request without a response arrives within so many seconds after its
    sending, or never. By default 10."""


# Settings of the limit. A transport that is given a limiter does not take them.
_OF_LIMIT: Final = ("store", "name", "on_failure", "arrives_within", "clock")


class LimitTimeout(LimitExceeded, httpx.TimeoutException):
    """An attempt found no room within `wait_max`. It was not sent, and nothing was spent.

    `retry_after` is in seconds, and `decision` has the details: it is `degraded` if the store was
    unavailable. httpx callers catch it as `httpx.TimeoutException`, or as one of its bases
    `httpx.TransportError` and `httpx.RequestError`.
    """

    def __init__(self, decision: Decision, request: httpx.Request, reason: str) -> None:
        self.decision = decision
        self.reason = reason
        self.was_sent = False
        """True if an earlier attempt of the request was sent."""
        httpx.TimeoutException.__init__(
            self,
            f"{request.method} {_origin_of(request)} was not sent: {reason}; retry after "
            f"{decision.retry_after:.3f} s, or allow a longer wait with wait_max",
            request=request,
        )

    @property
    def retry_after(self) -> float:
        """Seconds after which the same request can be tried again."""
        return self.decision.retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"was_sent": self.was_sent}
        return type(self), (self.decision, self.request, self.reason), state


def _origin_of(request: httpx.Request) -> str:
    """Return scheme, host and port, without a port that is the scheme's default."""
    return f"{request.url.scheme}://{request.url.netloc.decode('ascii')}"


# ── Origins: budgets and pauses ────────────────────────────────────────────────────────────────


class _Budgets:
    """The retries that each origin has left, in tenths. First attempts add a tenth."""

    def __init__(self, store: Store, budget: LimitsArgument) -> None:
        limits = [
            Limit(each.limit * SHARE_DIVISOR, per=each.per, capacity=each.capacity * SHARE_DIVISOR)
            for each in limits_of(budget)
        ]
        self._counter = store.counter(limits, "retries")

    def earn(self, origin: str) -> None:
        """Add the share of a first attempt."""
        self._counter.refund(origin, 1, None)

    def spend(self, origin: str) -> bool:
        """Take one retry; return False if there is none, or no room to count it."""
        try:
            return cast("Decision", self._counter.check(origin, SHARE_DIVISOR)).allowed
        except StoreError:
            return False


class _Pauses:
    """The time for which a server wants no more requests, on a store that transports may share.

    It is a bucket that refills by one unit a millisecond: while it is not full, no request is sent.
    For a pause of t ms, a transport makes t units missing. Several do that at once, for the
    responses to several requests, and together they must not make it longer than the longest. So
    each charges the bucket as one of *capacity* t, which the store rejects if more than t units
    would be missing: then another transport was first, and this one looks again.
    """

    def __init__(self, store: Store, name: str) -> None:
        def prepared(capacity_ms: int) -> Counter:
            # The name makes counters of different capacities share their counts.
            return store.counter((Limit(1_000, per=1, capacity=capacity_ms, name="held"),), name)

        self._counter = lru_cache(64)(prepared)
        self._full = prepared(_PAUSE_MS_MAX)

    def left_ns(self, subject: str) -> Steps[int]:
        """Return for how long no request is to be sent; 0 if the store fails."""
        if switches.limiting_off:
            return 0
        try:
            decision: Decision = yield Call(self._full.peek, subject, _PAUSE_MS_MAX)
        except StoreError:
            return 0
        return decision.retry_after_ns

    def extend(self, subject: str, wait_ns: int) -> Steps[None]:
        """Send no requests for at least `wait_ns` from now."""
        wanted_ms = min(-(-wait_ns // _NS_PER_MS), _PAUSE_MS_MAX)
        for _ in range(_PAUSE_TRIES_MAX):
            missing_ms = -(-(yield from self.left_ns(subject)) // _NS_PER_MS)
            if missing_ms >= wanted_ms or switches.limiting_off:
                return
            # One more if some are missing: their number was rounded up.
            capacity_ms = min(wanted_ms + bool(missing_ms), _PAUSE_MS_MAX)
            try:
                counter = self._counter(capacity_ms)
                decision: Decision = yield Call(counter.check, subject, capacity_ms - missing_ms)
            except StoreError:
                return
            if decision.allowed:
                return


# ── Sending, and sending again ─────────────────────────────────────────────────────────────────


class _Outgoing:
    """One request: its attempts so far, until when it may wait, and by what it is counted."""

    __slots__ = ("attempt", "cost", "key", "origin", "repeatable", "request", "subject", "until_ns")

    def __init__(
        self, request: httpx.Request, until_ns: int, key: Key | Request, cost: int
    ) -> None:
        self.request = request
        self.until_ns = until_ns
        self.attempt = 0
        self.key, self.cost = key, cost
        self.origin = _origin_of(request)
        # The subject of its pauses.
        by_origin = isinstance(key, Request) or key == self.origin
        self.subject = self.origin if by_origin else subject_of(cast("Key", key))
        # Determined before sending: a stream can be read only once.
        self.repeatable = isinstance(request.stream, httpx.ByteStream)


class _Sender:
    """Sends the requests of a transport, in threads or on asyncio, and repeats them."""

    def __init__(
        self,
        transport: object,
        units: _Units | None = None,
        *,
        is_async: bool,
        attempts_max: int = 5,
        wait_max: float | timedelta = 60.0,
        budget: LimitsArgument = "30/minute capacity 10",
        pace: bool = True,
        clock: Clock | None = None,
        random: Callable[[], float] = RANDOM.random,
        key: KeyOfRequest = _origin_of,
        cost: CostOfRequest = lambda _: 1,
    ) -> None:
        """Without `units`, no limit is kept."""
        if type(attempts_max) is not int or not 1 <= attempts_max <= ATTEMPTS_MAX:
            raise ConfigError(
                f"attempts_max={show(attempts_max)} is not a whole number from 1 to {ATTEMPTS_MAX}"
            )
        if not isinstance(pace, bool):
            raise ConfigError(f"pace={show(pace)} is not True or False")
        for name, value in (("random", random), ("cost", cost)):
            if not callable(value):
                raise ConfigError(f"{name}={show(value)} is not a function")
        self._wait_ns_max = duration_ns("wait_max", wait_max, WAIT_NS_MAX, "wait_max=60")
        self._clock = clock_of(clock)
        self._attempts_max, self._random = attempts_max, random
        self._transport: Any = _checked_transport(transport, is_async=is_async)
        self._key, self._cost = key, cost
        self.units, self._is_async = units, is_async
        self._sleep: Callable[[float], Any] = (
            self._clock.sleep_async if is_async else self._clock.sleep
        )
        own = open_fallback_store("memory://", self._clock, capacity=2 * ORIGINS_MAX)
        self._budgets = _Budgets(own, budget)
        # In this process, which holds if the store fails, and on the store that transports share.
        self._pauses = [_Pauses(own, "held")] if pace else []
        if pace and units is not None:
            name = units.limiter.name
            self._pauses.append(_Pauses(units.limiter.store, f"{name}.held" if name else "held"))

    def steps(self, request: httpx.Request) -> Steps[httpx.Response]:
        """Send a request, and repeat it as long as that is allowed."""
        until_ns = self._clock.now_ns() + self._wait_ns_max
        outgoing = _Outgoing(request, until_ns, self._key(request), self._cost(request))
        self._budgets.earn(outgoing.origin)
        while True:
            outgoing.attempt += 1
            try:
                response, wait = yield from self._attempt(outgoing)
            except LimitTimeout as error:
                error.was_sent = error.was_sent or outgoing.attempt > 1
                raise
            if wait is None:
                return response
            yield from self._drop(response)
            if wait:
                yield Call(self._sleep, wait)

    def close(self) -> Steps[None]:
        """Close the inner transport, and the limiter if the transport made it."""
        yield Call(self._transport.aclose if self._is_async else self._transport.close)
        if isinstance(self.units, _ArrivalSlots):
            yield Call(self.units.limiter.close)

    def _attempt(self, outgoing: _Outgoing) -> Steps[tuple[httpx.Response, float | None]]:
        """Return a response, and the seconds until the next attempt; None if it is the last."""
        taken = yield from self._admitted(outgoing)
        inner = self._transport
        send = inner.handle_async_request if self._is_async else inner.handle_request
        try:
            response: httpx.Response = yield Call(send, outgoing.request)
        except LimitTimeout as error:  # of an inner transport
            if not error.was_sent:
                yield from _give_back(taken)
            raise
        try:
            if taken is not None:
                yield from taken.answered()
            return response, (yield from self._after(outgoing, response))
        except BaseException:  # cancelled: nothing else closes the response
            yield from self._close_response(response)
            raise

    def _admitted(self, outgoing: _Outgoing) -> Steps[_Taken | None]:
        """Spend the units of a request as soon as the limit has room and no server objects."""
        while True:
            taken = None if self.units is None else (yield from self._taken(outgoing, self.units))
            held_ns = yield from self._held_ns(outgoing, taken)
            is_too_long = held_ns > self._left_ns(outgoing)
            # Without a limit, a pause that is too long is not made: the server's own response
            # explains it better.
            if not held_ns or (taken is None and is_too_long):
                return taken
            yield from _give_back(taken)
            if is_too_long:
                limit = cast("_Taken", taken).decision.policy
                decision = Decision(False, limit, 0, held_ns, held_ns)
                raise LimitTimeout(decision, outgoing.request, "the server asked for a pause")
            yield Call(self._sleep, self._spread(outgoing, held_ns))

    def _taken(self, outgoing: _Outgoing, units: _Units) -> Steps[_Taken]:
        """Spend the units of a request. Raises LimitTimeout if they do not fit in time."""
        while True:
            left_ns = self._left_ns(outgoing)
            taken = yield from units.take(outgoing, left_ns)
            decision = taken.decision
            if decision.allowed:
                return taken
            if decision.retry_after_ns > self._left_ns(outgoing):
                away = "the store cannot decide, and on_failure denies"
                reason = away if decision.degraded else "the limit has no room"
                raise LimitTimeout(decision, outgoing.request, reason)
            yield Call(self._sleep, seconds_from_ns(decision.retry_after_ns))

    def _held_ns(self, outgoing: _Outgoing, taken: _Taken | None) -> Steps[int]:
        """Return how long a server wants no request; refund the units if that is interrupted."""
        held_ns = 0
        try:
            for pauses in self._pauses:
                held_ns = max(held_ns, (yield from pauses.left_ns(outgoing.subject)))
        except BaseException:
            yield from _give_back(taken)
            raise
        return held_ns

    def _after(self, outgoing: _Outgoing, response: httpx.Response) -> Steps[float | None]:
        """Note what a response says; return the wait before another attempt, None for none."""
        wait_ns, pause_ns = retry_advice_of(response.headers, self._clock.now_ns())
        status = response.status_code
        if status in (DENIED, UNAVAILABLE):
            pause_ns = max(pause_ns, wait_ns)
        if pause_ns:
            for pauses in self._pauses:
                yield from pauses.extend(outgoing.subject, pause_ns)
        had_no_effect = status == DENIED
        is_safe = status == UNAVAILABLE and outgoing.request.method.upper() in IDEMPOTENT
        if (
            not (outgoing.repeatable and (had_no_effect or is_safe))
            or outgoing.attempt >= self._attempts_max
            or wait_ns > self._left_ns(outgoing)
            or not self._budgets.spend(outgoing.origin)
        ):
            return None
        return self._spread(outgoing, wait_ns)

    def _left_ns(self, outgoing: _Outgoing) -> int:
        """Return how much longer the request may wait."""
        return max(outgoing.until_ns - self._clock.now_ns(), 0)

    def _spread(self, outgoing: _Outgoing, wanted_ns: int) -> float:
        """Return a wait with its random part, in seconds."""
        growing = min(SPREAD_NS_FIRST << (outgoing.attempt - 1), SPREAD_NS_MAX)
        spread_ns = int(self._random() * max(growing, wanted_ns // SPREAD_DIVISOR))
        return seconds_from_ns(min(wanted_ns + spread_ns, self._left_ns(outgoing)))

    def _drop(self, response: httpx.Response) -> Steps[None]:
        """Close a response that is not returned. A short body is read first."""
        if response.is_closed:
            return
        chunks: Any = response.aiter_raw() if self._is_async else response.iter_raw()
        # If the connection fails now, the next attempt reports it.
        try:
            with suppress(httpx.TransportError):
                size = 0
                while size <= DRAIN_BYTES_MAX:
                    chunk = yield Call(anext if self._is_async else next, chunks, None)
                    if chunk is None:
                        break
                    size += len(chunk)
        finally:
            yield from self._close_response(response)

    def _close_response(self, response: httpx.Response) -> Steps[None]:
        yield Undo(response.aclose if self._is_async else response.close)


def _checked_transport(given: object, *, is_async: bool) -> object:
    """Return the transport that sends requests. Raises ConfigError if it is of the other kind."""
    kind = httpx.AsyncBaseTransport if is_async else httpx.BaseTransport
    default = httpx.AsyncHTTPTransport if is_async else httpx.HTTPTransport
    if given is None:
        return default()
    if not isinstance(given, kind):
        raise ConfigError(
            f"transport={show(given)} is not an httpx.{kind.__name__}; "
            f"for example transport=httpx.{default.__name__}()"
        )
    return given


# ── Limits before sending ──────────────────────────────────────────────────────────────────────


class _Taken(NamedTuple):
    """The units that a request has spent, or the denial."""

    units: _Units
    decision: Decision
    key: Key | Request
    cost: int
    began_ns: int = 0

    def give_back(self, cost: int) -> Steps[None]:
        """Refund some of the units. If the store fails, they stay spent."""
        if cost > 0 and self.decision.charged_ns is not None:
            with suppress(StoreError):
                yield Undo(self.units.limiter.refund, self.key, cost, self.decision)

    def answered(self) -> Steps[None]:
        """Refund the units that are not in use after the response."""
        yield from self.give_back(self.units.unused(self.began_ns))


def _give_back(taken: _Taken | None) -> Steps[None]:
    """Refund the units of a request that is not sent."""
    if taken is not None:
        yield from taken.give_back(taken.cost)


class _Units:
    """Units of the caller's limiter, which counts requests as they leave."""

    def __init__(self, limiter: AnyLimiter) -> None:
        self.limiter = limiter

    def take(self, outgoing: _Outgoing, left_ns: int) -> Steps[_Taken]:
        """Spend the units of a request. Returns a denial if it would wait longer than `left_ns`."""
        key, cost = outgoing.key, outgoing.cost
        decision: Decision = yield Call(self.limiter.wait, key, cost, seconds_from_ns(left_ns))
        return _Taken(self, decision, key, cost)

    def unused(self, began_ns: int) -> int:  # noqa: ARG002 - of a slot
        """Return the units to refund when the response arrives: a request stays counted."""
        return 0


class _ArrivalSlots(_Units):
    """A limit as the other side counts it: n slots, of which each is used by one request at a time.

    The other side sees a request at some time between its sending and its response. A slot is taken
    before the request is sent, and free again one window after the response has arrived. So two
    requests of one slot *arrive* at least a window apart, and any window has at most n arrivals. It
    does not matter how long requests take on their way, or which process uses which slot.

    A slot is a bucket of _SLOT_UNITS, refilled in `window + arrives_within`. A request needs all
    units of it. The response gives a part of them back: as many as make the bucket full one window
    after the response. The time in between is measured from before the charge, so that it is never
    too short. If there is no response within `arrives_within`, nothing is given back: then the
    limit holds if a request that was sent arrives within `arrives_within` or never.

    A waiting request looks at all slots and sleeps until the first may be free, but at most for a
    window: a slot whose response arrives now is free then.
    """

    def __init__(
        self, limits: Any, kind: Callable[..., AnyLimiter], settings: Mapping[str, Any]
    ) -> None:
        self._limit = limit = _countable(limits)
        within = settings.get("arrives_within", 10.0)
        example = "arrives_within=10 (seconds)"
        self._within_ns = duration_ns("arrives_within", within, ARRIVES_WITHIN_NS_MAX, example)
        # A limit's time is in whole microseconds.
        whole = timedelta(microseconds=-(-(limit.window_ns + self._within_ns) // 1_000))
        policy = settings.get("on_failure", "closed")
        if policy not in ("closed", "raise"):
            raise ConfigError(
                f'on_failure={show(policy)} is not "closed" or "raise": without the store, '
                f"processes cannot keep a limit together; for other policies, {_BY_LIMITER}"
            )
        store, name = settings.get("store", "memory://"), settings.get("name", "outgoing")
        slots = Limit(_SLOT_UNITS, per=whole)
        limiter = kind(
            slots, store=store, name=name, on_failure=policy, clock=settings.get("clock")
        )
        super().__init__(limiter)
        self._whole_ns = slots.window_ns
        self._clock = limiter.clock
        self._next = 0

    def take(self, outgoing: _Outgoing, left_ns: int) -> Steps[_Taken]:
        """Take a free slot, or return a denial until one may be free."""
        key = outgoing.key
        if isinstance(key, Request):
            raise ConfigError(f"a limit counts by a text, not by {show(key)}; return one from key=")
        taken = yield from self._search(key if isinstance(key, tuple) else (key,))
        if taken.decision.allowed:
            return taken
        wait_ns = min(taken.decision.retry_after_ns, self._limit.window_ns)
        decision = decision_with(
            taken.decision, policy=self._limit, remaining=0, retry_after_ns=wait_ns
        )
        if wait_ns > left_ns:
            self.limiter.log_denial(key, decision)
        return taken._replace(decision=decision)

    def _search(self, parts: tuple[str, ...]) -> Steps[_Taken]:
        """Take the first free slot; if there is none, return the denial that ends first."""
        denied = []
        start, count = self._next, self._limit.limit
        for number in range(start, start + count):
            slot = (*parts, str(number % count))
            began_ns = self._clock.now_ns()
            decision: Decision = yield Call(self.limiter.check, slot, _SLOT_UNITS)
            taken = _Taken(self, decision, slot, _SLOT_UNITS, began_ns)
            if decision.allowed:
                self._next = (number + 1) % count
                return taken
            denied.append(taken)
            if decision.degraded:  # the store is away: it has no other answer for other slots
                break
        return min(denied, key=lambda each: each.decision.retry_after_ns)

    def unused(self, began_ns: int) -> int:
        """Return the units that make a slot free one window from now."""
        # Rounded down, and a microsecond less: stores round times to microseconds.
        elapsed_ns = self._clock.now_ns() - began_ns + 1_000
        return (self._within_ns - elapsed_ns) * _SLOT_UNITS // self._whole_ns - 1


_BY_LIMITER: Final = (
    "pass a limiter, which counts requests as they leave, for example "
    'LimitTransport(Limiter("1000/day"))'
)


def _countable(limits: Any) -> Limit:
    """Return the limit. Raises ConfigError if slots cannot count it."""
    found = limits_of(limits)
    limit = found[0]
    plain = Limit(limit.limit, per=timedelta(microseconds=limit.window_ns // 1_000))
    has_burst = limit.capacity != limit.limit or limit.refill_step_ns != plain.refill_step_ns
    is_window = limit.algorithm in ("token_bucket", "sliding_window_log")
    if len(found) > 1 or has_burst or not is_window or not 1 <= limit.limit <= SLOTS_MAX:
        raise ConfigError(
            f"limits={show(list(found))} is not one limit of 1 to {SLOTS_MAX} requests in any "
            f'window, such as "10/second"; for others, {_BY_LIMITER}. To keep both kinds: '
            f'LimitTransport(Limiter("1000/day"), '
            f'transport=LimitTransport("10/second", attempts_max=1))'
        )
    return limit


def _limited(limits: Any, transport: object, settings: LimitSettings, *, is_async: bool) -> _Sender:
    """Return the sender of a transport that keeps a limit, or the limits of a limiter."""
    kind: Any = AsyncLimiter if is_async else Limiter
    given: dict[str, Any] = dict(settings)
    of_limit: dict[str, Any] = {name: given.pop(name) for name in _OF_LIMIT if name in given}
    if not isinstance(limits, Limiter | AsyncLimiter):
        if "cost" in given:
            raise ConfigError(f"a limit counts requests; for a cost, {_BY_LIMITER}")
        units: _Units = _ArrivalSlots(limits, kind, of_limit)
    elif not isinstance(limits, kind):
        raise ConfigError(
            f"{show(limits)} does not fit this transport: LimitTransport takes a Limiter, and "
            f"AsyncLimitTransport an AsyncLimiter"
        )
    elif of_limit:
        raise ConfigError(
            f"{' and '.join(of_limit)} does not work with a limiter, which has its own store and "
            f"policy, and counts requests as they leave; leave it out"
        )
    else:
        units = _Units(limits)
    if has_slots(units.limiter.limits):
        raise ConfigError(
            "a transport does not know when a response has been read, so it cannot limit requests "
            'in flight; write limiter.reserve(key) around the call, with "20 at once for 60s"'
        )
    given["key"] = _key_function(given.get("key"), units.limiter)
    return _Sender(transport, units, is_async=is_async, clock=units.limiter.clock, **given)


def _key_function(key: Key | KeyOfRequest | None, limiter: AnyLimiter) -> KeyOfRequest:
    if key is None:
        return _request_of if limiter.has_rules else _origin_of
    if callable(key):
        return key
    subject_of(key)  # raises InvalidKey
    return lambda _: key


def _request_of(request: httpx.Request) -> Request:
    """Return the request as rules match it. They can count it by the attribute `origin`."""
    attributes = {"origin": _origin_of(request)}
    return Request(endpoint=request.url.path, method=request.method, attributes=attributes)


# ── The transports ─────────────────────────────────────────────────────────────────────────────


class RetryTransport(httpx.BaseTransport):
    """An httpx transport that waits as long as responses request.

    >>> client = httpx.Client(transport=RetryTransport(wait_max=30))
    >>> client.close()

    `transport` sends the requests; by default httpx's own. See `RetrySettings` for the rest.
    """

    def __init__(
        self, transport: httpx.BaseTransport | None = None, **settings: Unpack[RetrySettings]
    ) -> None:
        _check_settings(self, settings, RetrySettings)
        self._sender = _Sender(transport, is_async=False, **settings)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and repeat it as long as that is allowed."""
        return run(self._sender.steps(request))

    def close(self) -> None:
        """Close the inner transport, and the limiter if this transport made it."""
        run(self._sender.close())


class AsyncRetryTransport(httpx.AsyncBaseTransport):
    """An httpx transport for `httpx.AsyncClient` that waits as long as responses request.

    It has the settings of `RetryTransport`. A wait does not block the event loop.
    """

    def __init__(
        self, transport: httpx.AsyncBaseTransport | None = None, **settings: Unpack[RetrySettings]
    ) -> None:
        _check_settings(self, settings, RetrySettings)
        self._sender = _Sender(transport, is_async=True, **settings)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and repeat it as long as that is allowed."""
        return await run_async(self._sender.steps(request))

    async def aclose(self) -> None:
        """Close the inner transport, and the limiter if this transport made it."""
        await run_async(self._sender.close())


class LimitTransport(RetryTransport):
    """An httpx transport that keeps limits before it sends, and waits as responses request.

    >>> transport = LimitTransport("10/second", store="memory://", wait_max=30)
    >>> client = httpx.Client(transport=transport)
    >>> client.close()

    `limits` is one limit as the other side counts it, of up to 100 requests: no more arrive in any
    window, also if several processes share the store and the network is slow. Or it is a Limiter,
    which counts requests as they leave: for several limits, bursts, higher limits, costs and rules.
    `transport` sends the requests; by default httpx's own. See `LimitSettings` for the rest.

    Raises LimitTimeout if a request would wait for longer than `wait_max`, CapacityError for a cost
    that never fits, and with `on_failure="raise"` StoreError. Each attempt costs one check on the
    store (a limit without room checks each of its slots), one refund for a limit, and one peek
    unless `pace` is False.
    """

    @explains("{}(…)", '{}("10/second", transport=httpx.HTTPTransport())')
    def __init__(
        self,
        limits: str | Limit | Limiter,
        *,
        transport: httpx.BaseTransport | None = None,
        **settings: Unpack[LimitSettings],
    ) -> None:
        _check_settings(self, settings, LimitSettings)
        self._sender = _limited(limits, transport, settings, is_async=False)

    @property
    def limiter(self) -> Limiter:
        """The limiter that counts, for example to share its store."""
        return cast("Limiter", cast("_Units", self._sender.units).limiter)


class AsyncLimitTransport(AsyncRetryTransport):
    """LimitTransport for httpx.AsyncClient, on asyncio. A wait does not block the event loop.

    A request that is cancelled while it waits spends nothing. `limits` may be an AsyncLimiter.
    """

    @explains("{}(…)", '{}("10/second", store="redis://localhost")')
    def __init__(
        self,
        limits: str | Limit | AsyncLimiter,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        **settings: Unpack[LimitSettings],
    ) -> None:
        _check_settings(self, settings, LimitSettings)
        self._sender = _limited(limits, transport, settings, is_async=True)

    @property
    def limiter(self) -> AsyncLimiter:
        """The limiter that counts, for example to share its store."""
        return cast("AsyncLimiter", cast("_Units", self._sender.units).limiter)


def _check_settings(transport: object, settings: Mapping[str, object], known: type) -> None:
    """Raise InvalidOption for a setting that the transport does not have, in its name."""
    check_names(f"{type(transport).__name__}(…)", settings, ["transport", *known.__annotations__])


# ── Reading responses ──────────────────────────────────────────────────────────────────────────
#
# Servers express a wait in four ways. `Retry-After` is the standard, in seconds or as a date. The
# IETF draft's `RateLimit` says what remains and when there is more; its revisions differ (10 has
# `"orders";r=0;t=5`, 7 has `limit=100, remaining=0, reset=5`, 6 has a header for each). The oldest,
# `X-RateLimit-Reset`, is a Unix time on some servers and seconds from now on others.

# The longest wait that is read from a response: some thirty thousand years.
ADVICE_NS_MAX: Final = 10**12 * NS_PER_SECOND
# Longer headers are cut: the useful part comes first.
HEADER_LENGTH_MAX: Final = 4_096
DATE_LENGTH_MAX: Final = 64
# A reset of at least this value is a Unix time (2001), not a duration.
UNIX_TIME_S_MIN: Final = 10**9

_SECONDS_DIGITS_MAX = 12
_SECONDS = re.compile(r"[ \t]*(\d+)(?:\.(\d*))?[ \t]*", re.ASCII)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
# Draft 10 has parameters for each policy, draft 7 has one dictionary.
_PARAMETER = re.compile(r";[ \t]*([rt])[ \t]*=[ \t]*([\d.]+)", re.ASCII)
_MEMBER = re.compile(r"(?:^|,)[ \t]*(remaining|reset)[ \t]*=[ \t]*([\d.]+)", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class RetryAdvice(NamedTuple):
    """The waiting times that one response asks for, 0 where it asks for none."""

    wait_ns: int
    """The wait before the same request may be sent again."""
    spent_ns: int
    """The wait until a used-up quota has room again."""


def retry_advice_of(headers: Mapping[str, str], now_ns: int) -> RetryAdvice:
    """Return the waits that a response received at `now_ns` (Unix time) asks for.

    Names of `headers` are in lower case, or found in any case as in `httpx.Headers`. Any text is
    read without an error, and no wait is shorter than requested: fractions round up, and a number
    that is too long to read is longer than any wait.
    """
    quotas = _quotas(headers, now_ns)
    spent = [reset_ns for is_spent, reset_ns in quotas if is_spent]
    wait_ns = _retry_after_ns(headers, now_ns)
    if wait_ns is None:
        # If no quota is used up, the denied request costs more than one unit.
        wait_ns = max(spent or [reset_ns for _, reset_ns in quotas], default=0)
    return RetryAdvice(wait_ns, max(spent, default=0))


def _retry_after_ns(headers: Mapping[str, str], now_ns: int) -> int | None:
    text = _header(headers, "retry-after")
    seconds = [_seconds_ns(part) for part in text.split(",")]
    numbers = [each for each in seconds if each is not None]
    if len(numbers) == len(seconds):
        return max(numbers)
    moment_ns = _date_ns(text)
    if moment_ns is None:
        return None
    # Relative to the server's own date: a client whose clock is ahead would retry too soon.
    answered_ns = _date_ns(_header(headers, "date"))
    return max(moment_ns - (now_ns if answered_ns is None else answered_ns), 0)


def _quotas(headers: Mapping[str, str], now_ns: int) -> list[tuple[bool, int]]:
    """Return whether each quota is used up, and when it has room again.

    They are of the newest kind of header that the response has.
    """
    text = _QUOTED.sub('""', _header(headers, "ratelimit"))
    # Draft 10 has parameters for each policy, draft 7 has one dictionary.
    single: dict[str, str] = dict(_MEMBER.findall(text))
    found = [single] if single else [dict(_PARAMETER.findall(part)) for part in text.split(",")]
    pairs = [
        (each.get("remaining") or each.get("r", ""), each.get("reset") or each.get("t", ""))
        for each in found
        if each
    ]
    for prefix in ("ratelimit", "x-ratelimit"):
        if not any(map(any, pairs)):
            pairs = [(_header(headers, f"{prefix}-remaining"), _header(headers, f"{prefix}-reset"))]
    return [
        (_seconds_ns(remaining) == 0, reset_ns)
        for remaining, reset in pairs
        if (reset_ns := _reset_ns(reset, now_ns)) is not None
    ]


def _header(headers: Mapping[str, str], name: str) -> str:
    return headers.get(name, "")[:HEADER_LENGTH_MAX]


def _reset_ns(text: str, now_ns: int) -> int | None:
    """Return a reset as a duration; it may be sent as a Unix time or as a duration."""
    reset_ns = _seconds_ns(text)
    if reset_ns is None or reset_ns < UNIX_TIME_S_MIN * NS_PER_SECOND:
        return reset_ns
    return max(reset_ns - now_ns, 0)


def _seconds_ns(text: str) -> int | None:
    """Return seconds as nanoseconds, rounded up; None for text that is not a number."""
    match = _SECONDS.fullmatch(text)
    if match is None:
        return None
    whole = match[1].lstrip("0")
    if len(whole) > _SECONDS_DIGITS_MAX:
        return ADVICE_NS_MAX
    fraction = match[2] or ""
    rest = 1 if fraction[9:].strip("0") else 0
    return int(whole or "0") * NS_PER_SECOND + int(fraction[:9].ljust(9, "0")) + rest


def _date_ns(text: str) -> int | None:
    """Return an HTTP date as Unix time in nanoseconds; None for text that is not a date."""
    if not 0 < len(text) <= DATE_LENGTH_MAX:
        return None
    try:
        moment = parsedate_to_datetime(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)  # HTTP dates are in UTC
        return (moment - _EPOCH) // timedelta(seconds=1) * NS_PER_SECOND
    except (ValueError, TypeError, IndexError, OverflowError):
        return None  # the parser raises any of these for invalid dates
