"""HTTP clients that keep limits and wait as long as servers request: transports for httpx.

`RetryTransport` follows what servers say. `LimitTransport` does that too, and keeps limits that are
known in advance: see "Limits before sending" below.

A client that repeats a denied request at once makes things worse, and many clients that wait for
the same second return as one wave. These transports do three things about it.

They *wait as long as the response requests*, and then a random time more: never less than
requested, and never all clients together. If a response asks for nothing, only the random time
grows with every attempt.

They *pace themselves*. A response that says "nothing left for 5 s" delays the next requests to that
origin, before they are denied.

They *keep a budget*. Retries are a share of the traffic, and a few more: when most requests fail,
most failures are returned, and an origin in trouble gets a tenth more load rather than five times
as much.

A request is repeated only if it was denied (429: it had no effect) or is safe to repeat (503 and an
idempotent method), and if its body can be sent twice. In all other cases, and once a request has
waited or tried enough, the caller gets the response as it is.

**Limits before sending.** `LimitTransport` spends the units of a request before it sends it, on a
store that processes or machines share. It waits for room, up to a bound, and raises `LimitTimeout`
if the wait would be longer: the request is not sent then, and nothing is spent. Every attempt is
charged, also a retry. If a server says "nothing left for 20 s", the transports that share the store
wait that long, too (`_HoldBack`).

**Exact arrivals.** The other side counts when requests *arrive*. Two requests that leave a second
apart arrive closer together if the first is delayed on its way. A request arrives between its
sending and its response. By default, a limit therefore counts it from its sending until one window
after its response (`_ExactSlots`). With `exact=False`, a limit counts requests as they leave.

**Reading responses.** Servers express a wait in four ways. `Retry-After` is the standard, in
seconds or as a date. The IETF draft's `RateLimit` says what remains and when there is more; its
revisions differ (10 has `"orders";r=0;t=5`, 7 has `limit=100, remaining=0, reset=5`, 6 has a header
for each). The oldest, `X-RateLimit-Reset`, is a Unix time on some servers and seconds from now on
others. `retry_advice_of` reads anything without an error, and never returns less than the requested
wait: fractions round up, and a number that is too long to read is longer than any wait.
"""

from __future__ import annotations

import random as system_random
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple, Protocol, TypedDict, TypeVar, Unpack, cast

from ratekeeper.core import switches
from ratekeeper.core.clock import NS_PER_SECOND, Clock, clock_of, duration_ns, seconds_from_ns
from ratekeeper.core.errors import ConfigError, LimitExceeded, StoreError, show
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import Decision, Limit, Request, decision_with, units_of
from ratekeeper.core.rates import LimitsArgument, check_cost_fits, limits_of
from ratekeeper.core.steps import Call, Steps, Undo, run, run_async
from ratekeeper.core.subjects import Key, subject_of
from ratekeeper.decide.failure import FailurePolicy, LocalFallback
from ratekeeper.decide.store import Counter, Store
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
    "Budget",
    "LimitSettings",
    "LimitTimeout",
    "LimitTransport",
    "RetryAdvice",
    "RetrySettings",
    "RetryTransport",
    "retry_advice_of",
]

T = TypeVar("T")
Methods = Literal["any", "idempotent"]
Pace = Literal["origin", "path", "off"]

# A denied request had no effect, so any method may be repeated. A 503 may have had an effect.
STATUSES: Final[Mapping[int, Methods]] = {429: "any", 503: "idempotent"}
IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})

ATTEMPTS_MAX: Final = 100
WAIT_NS_MAX: Final = 366 * 86_400 * NS_PER_SECOND
# Origins (or paths) that are remembered; the least recently used are dropped.
ORIGINS_MAX: Final = 1_000
# The random time: up to this much after the first attempt, doubled after each further one.
SPREAD_NS_FIRST: Final = NS_PER_SECOND // 2
SPREAD_NS_MAX: Final = 30 * NS_PER_SECOND
# Its range is at least this part of a long wait: one second would not spread those clients.
SPREAD_DIVISOR: Final = 4
# A body up to this size is read before it is dropped, so that the connection can be reused.
DRAIN_BYTES_MAX: Final = 65_536

_MICROS = 1_000_000

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


@dataclass(frozen=True, slots=True)
class Budget:
    """The number of retries that each origin may get.

    `share`       retries for every first attempt: 0.1 is one for ten requests.
    `per_second`  additional retries a second, for clients that send little.
    `reserve`     the most retries that can be saved up; a new origin starts with them.
    """

    share: float = 0.1
    per_second: float = 0.5
    reserve: int = 10

    def __post_init__(self) -> None:
        for name, high in (("share", 100), ("per_second", 1_000_000), ("reserve", 1_000_000)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name}={show(value)} is not a number; for example {name}=1")
            if not 0 <= value <= high:
                raise ConfigError(f"{name}={show(value)} is not between 0 and {high:,}")


class _Origin:
    """The state of one origin: when the next request may go, and the retries that are left."""

    __slots__ = ("filled_ns", "free_ns", "micros")

    def __init__(self, micros: int, now_ns: int) -> None:
        self.free_ns = 0
        self.micros = micros
        self.filled_ns = now_ns


class _Origins:
    """The origins of recent requests. Safe for any number of threads."""

    def __init__(self, budget: Budget, pace: Pace) -> None:
        self._share_micros = round(budget.share * _MICROS)
        self._micros_a_second = round(budget.per_second * _MICROS)
        self._reserve_micros = round(budget.reserve * _MICROS)
        self._pace = pace
        self._known: OrderedDict[Hashable, _Origin] = OrderedDict()
        self._lock = fork_safe(threading.Lock())
        switches.forgetting(self)

    def forget_all(self) -> None:
        """Forget all origins."""
        with self._lock:
            self._known.clear()

    def keys_of(self, url: httpx.URL) -> tuple[Hashable, Hashable]:
        """Return the key of the budget and the key of the pace."""
        origin = (url.scheme, url.host, url.port)
        return origin, (*origin, url.path) if self._pace == "path" else origin

    def begin(self, key: Hashable, now_ns: int) -> None:
        """Add the share of a first attempt to the budget."""
        with self._lock:
            self._fill(self._find(key, now_ns), now_ns, self._share_micros)

    def free_ns(self, key: Hashable) -> int:
        """Return the time from which a request may be sent; 0 if nothing is known."""
        origin = self._known.get(key)
        return 0 if origin is None or self._pace == "off" else origin.free_ns

    def hold_back(self, key: Hashable, until_ns: int, now_ns: int) -> None:
        """Set the time from which a request may be sent. The newest response counts."""
        with self._lock:
            self._find(key, now_ns).free_ns = until_ns

    def spend(self, key: Hashable, now_ns: int) -> bool:
        """Take one retry from the budget; return False if there is none."""
        with self._lock:
            origin = self._find(key, now_ns)
            self._fill(origin, now_ns, 0)
            if origin.micros < _MICROS:
                return False
            origin.micros -= _MICROS
            return True

    def _find(self, key: Hashable, now_ns: int) -> _Origin:
        origin = self._known.get(key)
        if origin is None:
            origin = self._known[key] = _Origin(self._reserve_micros, now_ns)
            if len(self._known) > ORIGINS_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return origin

    def _fill(self, origin: _Origin, now_ns: int, share_micros: int) -> None:
        # Rounded down: less than a millionth of a retry is lost each time.
        earned = (now_ns - origin.filled_ns) * self._micros_a_second // NS_PER_SECOND
        if earned > 0:
            origin.filled_ns = now_ns
        micros = origin.micros + max(earned, 0) + share_micros
        origin.micros = min(micros, self._reserve_micros)


class RetrySettings(TypedDict, total=False):
    """How often a request is sent, and how long it may wait."""

    attempts_max: int
    """The number of attempts of one request, by default 5; with 1 nothing is repeated."""
    wait_max: float | timedelta
    """The total wait of one request, in seconds or as a timedelta; by default 60."""
    statuses: Mapping[int, Methods]
    """The statuses that lead to another attempt, and the methods; by default STATUSES."""
    budget: Budget
    """The retries of each origin."""
    pace: Pace
    """The requests that wait after a response with nothing left: those to its "origin" (default),
    those to the same "path" of it, or none: "off"."""
    clock: Clock | None
    """The clock; by default the system clock."""
    random: Callable[[], float]
    """A function that returns a number from 0 up to 1; by default `random.random`."""


def _require_known(transport: str, settings: Mapping[str, object], known: type) -> None:
    """Raise InvalidOption for a setting that the transport does not have, in its name."""
    check_names(f"{transport}(…)", settings, ["transport", *known.__annotations__])


class _Retries:
    """The settings and the state of a transport, and the steps of its requests."""

    # The longest time for which a response holds other requests back.
    hold_ns_max = ADVICE_NS_MAX

    def __init__(
        self,
        *,
        attempts_max: int = 5,
        wait_max: float | timedelta = 60.0,
        statuses: Mapping[int, Methods] = STATUSES,
        budget: Budget = Budget(),  # frozen, so one for all is one for each
        pace: Pace = "origin",
        clock: Clock | None = None,
        random: Callable[[], float] = system_random.random,
    ) -> None:
        if isinstance(attempts_max, bool) or not isinstance(attempts_max, int):
            raise ConfigError(f"attempts_max={show(attempts_max)} is not a whole number; try 5")
        if not 1 <= attempts_max <= ATTEMPTS_MAX:
            raise ConfigError(f"attempts_max={attempts_max} is not between 1 and {ATTEMPTS_MAX}")
        if pace not in ("origin", "path", "off"):
            raise ConfigError(f'pace={show(pace)} is not known; choose "origin", "path" or "off"')
        if not isinstance(budget, Budget):
            raise ConfigError(f"budget={show(budget)} is not a Budget; try Budget(reserve=10)")
        if not callable(random):
            raise ConfigError(f"random={show(random)} is not a function; try random.random")
        self.attempts_max = attempts_max
        self.wait_ns_max = duration_ns("wait_max", wait_max, WAIT_NS_MAX, "wait_max=60")
        self.statuses = _checked_statuses(statuses)
        self.pace = pace
        self.origins = _Origins(budget, pace)
        self.clock = clock_of(clock)
        self.random = random

    def steps(
        self,
        request: httpx.Request,
        send: Callable[[httpx.Request], Any],
        sleep: Callable[[float], Any],
        drain: Callable[[httpx.Response], Any],
    ) -> Steps[httpx.Response]:
        """Send a request, and repeat it as long as that is allowed."""
        retried = self._begin(request)
        while True:
            try:
                response, wait_ns = yield from self._attempt(retried, send, sleep)
            except LimitTimeout as error:
                error.was_sent = error.was_sent or retried.attempt > 1
                raise
            if wait_ns is None:
                return response
            yield Call(drain, response)
            if wait_ns:
                yield Call(sleep, seconds_from_ns(wait_ns))

    def _begin(self, request: httpx.Request) -> _RetriedRequest:
        return _RetriedRequest(self, request, *self.origins.keys_of(request.url))

    def _attempt(
        self,
        retried: _RetriedRequest,
        send: Callable[[httpx.Request], Any],
        sleep: Callable[[float], Any],
    ) -> Steps[tuple[httpx.Response, int | None]]:
        """Return a response, and the wait before the next attempt; None if it is the last."""
        # A wait that is too long is not made: the origin's own response explains it better.
        before_ns = retried.before_ns()
        if before_ns:
            yield Call(sleep, seconds_from_ns(before_ns))
        response: httpx.Response = yield Call(send, retried.request)
        return response, retried.after_ns(response)

    def spread_ns(self, wanted_ns: int, attempt: int) -> int:
        """Return the random time that is added to a requested wait."""
        growing = min(SPREAD_NS_FIRST << (attempt - 1), SPREAD_NS_MAX)
        return int(self.random() * max(growing, wanted_ns // SPREAD_DIVISOR))


def _checked_statuses(statuses: Mapping[int, Methods]) -> dict[int, Methods]:
    is_right = isinstance(statuses, Mapping) and all(
        isinstance(status, int) and methods in ("any", "idempotent")
        for status, methods in statuses.items()
    )
    if not is_right:
        raise ConfigError(
            f'statuses={show(statuses)} needs "any" or "idempotent" for each status; '
            f'for example statuses={{429: "any", 503: "idempotent"}}'
        )
    return dict(statuses)


def _checked_transport(given: Any, kind: type[T], default: Callable[[], T]) -> T:
    """Return the transport that sends requests. Raises ConfigError if it is of the other kind."""
    if given is None:
        return default()
    if not isinstance(given, kind):
        raise ConfigError(
            f"transport={show(given)} is not an httpx.{kind.__name__}; "
            f"for example transport=httpx.{default.__name__}()"
        )
    return given


class _RetriedRequest:
    """One request: its attempts so far, and the wait that is left."""

    __slots__ = (
        "_held",
        "_may_repeat",
        "_origin",
        "_retries",
        "attempt",
        "hold_ns",
        "left_ns",
        "request",
    )

    def __init__(
        self, retries: _Retries, request: httpx.Request, origin: Hashable, held: Hashable
    ) -> None:
        """`origin` is the key of the budget, and `held` that of the pace."""
        self._retries = retries
        self.attempt = 0
        self._origin, self._held = origin, held
        self.request = request
        self.left_ns = retries.wait_ns_max
        # What the last response said: nothing is left for so long; None if it did not say.
        self.hold_ns: int | None = None
        # Determined before sending: a stream can be read only once.
        repeatable = isinstance(request.stream, httpx.ByteStream)
        idempotent = request.method.upper() in IDEMPOTENT
        self._may_repeat = {
            status: repeatable and (idempotent or methods == "any")
            for status, methods in retries.statuses.items()
        }
        retries.origins.begin(self._origin, retries.clock.now_ns())

    def before_ns(self) -> int | None:
        """Return the wait before the next attempt; None if it would be too long.

        Call it once for each attempt.
        """
        self.attempt += 1
        wanted_ns = self.held_ns()
        return self._waited(wanted_ns) if wanted_ns > 0 else 0

    def held_ns(self) -> int:
        """Return for how long the origin's responses want no request; below 0 if that is over."""
        return self._retries.origins.free_ns(self._held) - self._retries.clock.now_ns()

    def after_ns(self, response: httpx.Response) -> int | None:
        """Return the wait before the request is repeated; None to return this response."""
        retries, now_ns = self._retries, self._retries.clock.now_ns()
        advice = retry_advice_of(response.headers, now_ns)
        again = self._may_repeat.get(response.status_code)
        hold_ns = advice.spent_ns
        if again is not None and advice.wait_ns is not None:
            hold_ns = max(advice.spent_ns or 0, advice.wait_ns)
        if hold_ns is not None:
            hold_ns = min(hold_ns, retries.hold_ns_max)
            retries.origins.hold_back(self._held, now_ns + hold_ns, now_ns)
        self.hold_ns = hold_ns
        if not again or self.attempt >= retries.attempts_max:
            return None
        wanted_ns = advice.wait_ns or 0
        if wanted_ns > self.left_ns or not retries.origins.spend(self._origin, now_ns):
            return None
        return self._waited(wanted_ns)

    def _waited(self, wanted_ns: int) -> int | None:
        """Return a wait with its random part, and subtract it from the wait that is left."""
        if wanted_ns > self.left_ns:
            return None
        spread_ns = self._retries.spread_ns(wanted_ns, self.attempt)
        wait_ns = min(wanted_ns + spread_ns, self.left_ns)
        self.left_ns -= wait_ns
        return wait_ns


class RetryTransport(httpx.BaseTransport):
    """An httpx transport that waits as long as responses request.

    >>> client = httpx.Client(transport=RetryTransport(wait_max=30))
    >>> client.close()

    `transport` sends the requests; by default httpx's own. See `RetrySettings` for the rest.
    """

    def __init__(
        self, transport: httpx.BaseTransport | None = None, **settings: Unpack[RetrySettings]
    ) -> None:
        _require_known("RetryTransport", settings, RetrySettings)
        self._retries = _Retries(**settings)
        self._transport = _checked_transport(transport, httpx.BaseTransport, httpx.HTTPTransport)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and repeat it as long as that is allowed."""
        send, sleep = self._transport.handle_request, self._retries.clock.sleep
        return run(self._retries.steps(request, send, sleep, _drain))

    def close(self) -> None:
        """Close the inner transport."""
        self._transport.close()


class AsyncRetryTransport(httpx.AsyncBaseTransport):
    """An httpx transport for `httpx.AsyncClient` that waits as long as responses request.

    It has the settings of `RetryTransport`. A wait does not block the event loop.
    """

    def __init__(
        self, transport: httpx.AsyncBaseTransport | None = None, **settings: Unpack[RetrySettings]
    ) -> None:
        _require_known("AsyncRetryTransport", settings, RetrySettings)
        self._retries = _Retries(**settings)
        self._transport = _checked_transport(
            transport, httpx.AsyncBaseTransport, httpx.AsyncHTTPTransport
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and repeat it as long as that is allowed."""
        send, sleep = self._transport.handle_async_request, self._retries.clock.sleep_async
        return await run_async(self._retries.steps(request, send, sleep, _drain_async))

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self._transport.aclose()


def _drain(response: httpx.Response) -> None:
    if not response.is_closed:
        run(_drain_steps(partial(next, response.iter_raw(), None), response.close))


async def _drain_async(response: httpx.Response) -> None:
    if not response.is_closed:
        await run_async(_drain_steps(partial(anext, response.aiter_raw(), None), response.aclose))


def _drain_steps(read: Callable[[], Any], close: Callable[[], Any]) -> Steps[None]:
    """Close a response that is not returned. A short body is read first: see DRAIN_BYTES_MAX."""
    # If the connection fails now, the next attempt reports it.
    try:
        with suppress(httpx.TransportError):
            size = 0
            while size <= DRAIN_BYTES_MAX:
                chunk: bytes | None = yield Call(read)
                if chunk is None:
                    break
                size += len(chunk)
    finally:
        yield Call(close)


# ── Limits before sending ──────────────────────────────────────────────────────────────────────


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
            f"{request.method} {_origin_of(request.url)} was not sent: {reason}; retry after "
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


AnyLimiter = Limiter | AsyncLimiter
KeyOfRequest = Callable[[httpx.Request], Key | Request]
CostOfRequest = Callable[[httpx.Request], int]

# The longest time for which requests are held back, whatever a response says: some servers send
# times that are wrong by a factor of a thousand. After it, one request asks again.
HOLD_NS_MAX: Final = 3_600 * NS_PER_SECOND
# Gates for different lengths of time that are kept prepared.
_HOLD_COUNTERS_MAX: Final = 64
# Attempts to extend a hold while other processes extend it, too.
_HOLD_TRIES_MAX: Final = 3
_NS_PER_MS: Final = 1_000_000
_HOLD_MS_MAX: Final = HOLD_NS_MAX // _NS_PER_MS

# Slots of an exact limit. A search for a free one looks at all of them.
SLOTS_MAX: Final = 100
ARRIVES_WITHIN_NS_MAX: Final = 3_600 * NS_PER_SECOND
_SLOT_UNITS: Final = 1_000_000

# Settings of a limiter, which a transport that is given one does not take.
_OF_LIMITER: Final = ("store", "name", "on_failure", "local_fallback", "clock")

_INEXACT: Final = "write exact=False to count requests as they leave, not as they arrive"
_LIMIT_REACHED: Final = "the limit has no room"
_STORE_AWAY: Final = "the store cannot decide, and on_failure denies"
_SERVER_WAITS: Final = "the server asked for a pause"


class LimitSettings(RetrySettings, total=False):
    """What is counted, where, and what happens without room. And all of `RetrySettings`."""

    store: str | Store
    """Where counts are kept; by default "memory://". "shared:///run/app.limits" for all processes
    of a machine, "redis://host" for all machines."""
    name: str
    """Keeps the counts apart from those of other limiters on the store; by default "outgoing"."""
    key: Key | KeyOfRequest | None
    """What requests are counted by: by default their origin (scheme, host and port), or a key for
    all requests, or a function of the request."""
    cost: int | CostOfRequest
    """The units of a request, or a function of the request; by default 1."""
    on_failure: FailurePolicy | None
    """The answer while the store is unavailable. "closed" (default): no request is sent, up to
    `wait_max`. "raise": the StoreError. With `exact=False` also "local" (then the default): the
    counts of this machine. "open" is the same as "local", as for `Limiter.wait`."""
    local_fallback: LocalFallback | None
    """How "local" limits: the number of machines, and the store of this machine's processes."""
    exact: bool
    """Count requests as the other side does, when they arrive: at most n arrive in any window. True
    by default, for one limit of up to 100 requests. With False, a limit counts requests as they
    leave: for several limits, bursts, higher limits, and a `cost`."""
    arrives_within: float | timedelta
    """An exact limit assumes that a request without a response arrives within so many seconds after
    its sending, or never. By default 10."""


class _Taken(NamedTuple):
    """The units that a request has spent, or the denial."""

    decision: Decision
    key: Key | Request
    cost: int
    began_ns: int = 0


class _Units:
    """Units of a limiter, which `wait` spends. They stay spent once the request is sent."""

    def __init__(self, limiter: AnyLimiter) -> None:
        self.limiter = limiter

    def take(
        self,
        key: Key | Request,
        cost: int,
        left_ns: int,
        sleep: Callable[[float], Any],  # noqa: ARG002 - the limiter sleeps by its own clock
    ) -> Steps[_Taken]:
        """Spend units, and wait for them up to `left_ns`."""
        decision: Decision = yield Call(self.limiter.wait, key, cost, seconds_from_ns(left_ns))
        return _Taken(decision, key, cost)

    def give_back(self, taken: _Taken) -> Steps[None]:
        """Refund the units of a request that is not sent. If the store fails, they stay spent."""
        if taken.decision.charged_ns is not None:
            with suppress(StoreError):
                yield Undo(self.limiter.refund, taken.key, taken.cost, taken.decision)


class _ExactSlots(_Units):
    """An exact limit: n slots, of which each is used by one request until a window after it.

    The other side sees a request at some time between its sending and its response. A slot is taken
    before the request is sent, and free again one window after the response has arrived. So two
    requests of one slot *arrive* at least a window apart, and any window has at most one arrival of
    each slot: at most n in all. It does not matter how long requests take on their way, or which
    process uses which slot.

    A slot is a bucket of _SLOT_UNITS, refilled in `window + arrives_within`. A request needs all
    units of it. The response gives a part of them back: as many as make the bucket full one window
    after the response. The time in between is measured from before the charge, so that it is never
    too short. If there is no response within `arrives_within` (an error, a process that is killed,
    or a slow server), nothing is given back, and the slot is free again after `window +
    arrives_within`: then the limit holds if a request that was sent arrives within `arrives_within`
    or never.

    A waiting request looks at all slots and sleeps until the first may be free. A slot that is in
    use is free one window from now at the earliest, so no sleep is longer than a window.
    """

    def __init__(self, limiter: AnyLimiter, clock: Clock, limit: Limit, within_ns: int) -> None:
        super().__init__(limiter)
        self._clock = clock
        self._limit = limit
        self._within_ns = within_ns
        self._next = 0

    def take(
        self,
        key: Key | Request,
        cost: int,  # noqa: ARG002 - 1 for an exact limit
        left_ns: int,
        sleep: Callable[[float], Any],
    ) -> Steps[_Taken]:
        """Take a free slot, and wait for one up to `left_ns`."""
        if isinstance(key, Request):
            raise ConfigError(
                f"an exact limit counts by a text, not by {show(key)}; return a text from `key`"
            )
        parts = key if isinstance(key, tuple) else (key,)
        deadline_ns = self._clock.now_ns() + left_ns
        while True:
            denied = yield from self._search(parts)
            if denied.decision.allowed:
                return denied
            wait_ns = min(denied.decision.retry_after_ns, self._limit.window_ns)
            if self._clock.now_ns() + wait_ns > deadline_ns:
                decision = decision_with(
                    denied.decision, policy=self._limit, remaining=0, retry_after_ns=wait_ns
                )
                self.limiter.log_denial(key, decision)
                return denied._replace(decision=decision)
            yield Call(sleep, seconds_from_ns(wait_ns))

    def _search(self, parts: tuple[str, ...]) -> Steps[_Taken]:
        """Take the first free slot; if there is none, return the denial that ends first."""
        first: _Taken | None = None
        count = self._limit.limit
        start = self._next
        for number in range(start, start + count):
            slot = (*parts, str(number % count))
            began_ns = self._clock.now_ns()
            decision: Decision = yield Call(self.limiter.check, slot, _SLOT_UNITS)
            taken = _Taken(decision, slot, _SLOT_UNITS, began_ns)
            if decision.allowed:
                self._next = (number + 1) % count
                return taken
            if first is None or decision.retry_after_ns < first.decision.retry_after_ns:
                first = taken
            if decision.degraded:  # the store is away: it has no other answer for other slots
                break
        return cast("_Taken", first)

    def answered(self, taken: _Taken) -> Steps[None]:
        """Make the slot free one window from now. If the store fails, it is free later."""
        elapsed_ns = self._clock.now_ns() - taken.began_ns
        whole_ns = self._limit.window_ns + self._within_ns
        # Rounded down, and one unit less: stores round times to microseconds.
        units = (self._within_ns - elapsed_ns) * _SLOT_UNITS // whole_ns - 1
        if units > 0 and taken.decision.charged_ns is not None:
            with suppress(StoreError):
                yield Undo(self.limiter.refund, taken.key, units, taken.decision)


class _HoldBack:
    """The time for which a server wants no more requests, on the store that transports share.

    It is a bucket that refills by one unit a millisecond: while it is not full, no request is sent.
    To hold requests back for t ms, a transport makes t units missing. Several do that at once, for
    the responses to several requests, and together they must not make it longer than the longest.
    So each charges the bucket as one of *capacity* t, which the store rejects if more than t units
    would be missing: then another transport was first, and this one looks again.
    """

    def __init__(self, limiter: AnyLimiter) -> None:
        store = limiter.store
        self._make_counter = store.counter
        self._name = f"{limiter.name}.held" if limiter.name else "held"
        self._counters: dict[int, Counter] = {}
        self._full = self._counter(_HOLD_MS_MAX)

    def _counter(self, capacity_ms: int) -> Counter:
        counter = self._counters.get(capacity_ms)
        if counter is None:
            if len(self._counters) >= _HOLD_COUNTERS_MAX:
                self._counters.clear()
            # The name makes counters of different capacities share their counts.
            limit = Limit(1_000, per=1, capacity=capacity_ms, name="held")
            counter = self._counters[capacity_ms] = self._make_counter((limit,), self._name)
        return counter

    def denial(self, subject: str) -> Steps[Decision | None]:
        """Return a denial that says how long requests are held back; None if they are not."""
        if switches.limiting_off:
            return None
        try:
            decision: Decision = yield Call(self._full.peek, subject, _HOLD_MS_MAX)
        except StoreError:
            return None
        return None if decision.allowed else decision

    def extend(self, subject: str, wait_ns: int) -> Steps[None]:
        """Hold requests back for at least `wait_ns` from now."""
        wanted_ms = min(-(-wait_ns // _NS_PER_MS), _HOLD_MS_MAX)
        for _ in range(_HOLD_TRIES_MAX):
            denied = yield from self.denial(subject)
            missing_ms = 0 if denied is None else -(-denied.retry_after_ns // _NS_PER_MS)
            if missing_ms >= wanted_ms or switches.limiting_off:
                return
            # One more if some are missing: their number was rounded up.
            capacity_ms = min(wanted_ms + bool(missing_ms), _HOLD_MS_MAX)
            try:
                counter = self._counter(capacity_ms)
                decision: Decision = yield Call(counter.check, subject, capacity_ms - missing_ms)
            except StoreError:
                return  # the pace of this process remains
            if decision.allowed:
                return


class _OutgoingRequest(_RetriedRequest):
    """One request: what it is counted by, and the subject for which a server holds it back."""

    __slots__ = ("cost", "key", "subject")

    def __init__(self, limits: _LimitedRetries, request: httpx.Request) -> None:
        self.key = limits.key_of(request)
        self.cost = limits.cost_of(request)
        origin = _origin_of(request.url)
        by = origin if isinstance(self.key, Request) else self.key
        if limits.pace == "path":
            # A digest, because a path may be longer than a key.
            path = blake2b(request.url.raw_path.partition(b"?")[0], digest_size=16).hexdigest()
            by = (*(by if isinstance(by, tuple) else (by,)), path)
        self.subject = subject_of(by)
        super().__init__(limits, request, origin, self.subject)


class _LimitedRetries(_Retries):
    """The settings and the state of a limiting transport, and the steps of its requests."""

    hold_ns_max = HOLD_NS_MAX

    def __init__(
        self, limits: LimitsArgument | AnyLimiter, kind: type[AnyLimiter], settings: LimitSettings
    ) -> None:
        found = {name: settings[name] for name in RetrySettings.__annotations__ if name in settings}  # type: ignore[literal-required]  # the names are its own
        self.key_of = _key_function(settings.get("key"))
        self.cost_of = _cost_function(settings.get("cost", 1))
        super().__init__(**found)
        self.limiter, self.owns_limiter, self._units = _prepared(limits, kind, settings, self.clock)
        if self.limiter.has_rules and settings.get("key") is None:
            self.key_of = _request_of
        self.clock = self.limiter.clock
        self._hold_back = _HoldBack(self.limiter)

    def _begin(self, request: httpx.Request) -> _OutgoingRequest:
        return _OutgoingRequest(self, request)

    def _attempt(
        self,
        retried: _RetriedRequest,
        send: Callable[[httpx.Request], Any],
        sleep: Callable[[float], Any],
    ) -> Steps[tuple[httpx.Response, int | None]]:
        limited = cast("_OutgoingRequest", retried)
        before_ns = limited.before_ns()
        if before_ns is None:
            raise self._too_long(limited, limited.held_ns())
        if before_ns:
            yield Call(sleep, seconds_from_ns(before_ns))
        taken = yield from self._admitted(limited, sleep)
        try:
            response: httpx.Response = yield Call(send, limited.request)
        except LimitTimeout as error:  # of an inner transport
            if not error.was_sent:
                yield from self._units.give_back(taken)
            raise
        try:
            return response, (yield from self._received(limited, taken, response))
        except BaseException:  # cancelled: nothing else closes the response
            is_async = isinstance(self.limiter, AsyncLimiter)
            yield Undo(response.aclose if is_async else response.close)
            raise

    def _received(
        self, limited: _OutgoingRequest, taken: _Taken, response: httpx.Response
    ) -> Steps[int | None]:
        """Note on the store what a response means; return the wait before the next attempt."""
        if isinstance(self._units, _ExactSlots):
            yield from self._units.answered(taken)
        wait_ns = limited.after_ns(response)
        if limited.hold_ns and self.pace != "off":
            # The transports that share the store learn how long the server wants no request.
            yield from self._hold_back.extend(limited.subject, limited.hold_ns)
        return wait_ns

    def _admitted(self, limited: _OutgoingRequest, sleep: Callable[[float], Any]) -> Steps[_Taken]:
        """Spend the units of a request as soon as the limits have room and no server objects."""
        while True:
            began_ns = self.clock.now_ns()
            taken = yield from self._units.take(limited.key, limited.cost, limited.left_ns, sleep)
            limited.left_ns = max(limited.left_ns - (self.clock.now_ns() - began_ns), 0)
            decision = taken.decision
            if not decision.allowed:
                reason = _STORE_AWAY if decision.degraded else _LIMIT_REACHED
                raise LimitTimeout(decision, limited.request, reason)
            held_ns = yield from self._held_ns(limited, taken)
            if not held_ns:
                return taken
            yield from self._units.give_back(taken)
            if held_ns > limited.left_ns:
                raise self._too_long(limited, held_ns)
            limited.left_ns -= held_ns
            yield Call(sleep, seconds_from_ns(held_ns))

    def _held_ns(self, limited: _OutgoingRequest, taken: _Taken) -> Steps[int]:
        """Return how long a server wants no request; refund the units if that is interrupted."""
        if self.pace == "off":
            return 0
        try:
            denied = yield from self._hold_back.denial(limited.subject)
        except BaseException:
            yield from self._units.give_back(taken)
            raise
        return 0 if denied is None else denied.retry_after_ns

    def _too_long(self, limited: _OutgoingRequest, held_ns: int) -> LimitTimeout:
        decision = Decision(
            False, self.limiter.limits[0], 0, held_ns, held_ns, rule=self.limiter.name
        )
        return LimitTimeout(decision, limited.request, _SERVER_WAITS)


def _prepared(
    limits: LimitsArgument | AnyLimiter,
    kind: type[AnyLimiter],
    settings: LimitSettings,
    clock: Clock,
) -> tuple[AnyLimiter, bool, _Units]:
    """Return the limiter of a transport, whether the transport closes it, and its units."""
    if isinstance(limits, Limiter | AsyncLimiter):
        if not isinstance(limits, kind):
            raise ConfigError(
                f"{show(limits)} does not fit this transport: LimitTransport takes a Limiter, and "
                f"AsyncLimitTransport an AsyncLimiter"
            )
        for name in _OF_LIMITER:
            if name in settings:
                raise ConfigError(
                    f"{name}={show(settings[name])} is a setting of the limiter; "
                    f"pass it to {kind.__name__}(…), or pass limits instead of a limiter"
                )
        if "exact" in settings or "arrives_within" in settings:
            raise ConfigError(
                "exact and arrives_within do not work with a limiter, which counts requests as "
                "they leave; leave them out, or pass limits instead of a limiter"
            )
        return limits, False, _Units(limits)
    exact, on_failure = settings.get("exact", True), settings.get("on_failure")
    if not isinstance(exact, bool):
        raise ConfigError(f"exact={show(exact)} is not True or False")
    found = limits_of(limits)
    if isinstance(cost := settings.get("cost", 1), int):
        check_cost_fits(cost, limits)
    make: Callable[..., AnyLimiter] = partial(
        kind,
        store=settings.get("store", "memory://"),
        name=settings.get("name", "outgoing"),
        local_fallback=settings.get("local_fallback"),
        clock=clock,
    )
    if not exact:
        if "arrives_within" in settings:
            raise ConfigError(
                "arrives_within does not work with exact=False; leave one of them out"
            )
        limiter = make(found, on_failure=on_failure or "local")
        return limiter, True, _Units(limiter)
    limit = _exact_limit(found, settings)
    within_ns = _arrives_within_ns(settings.get("arrives_within", 10.0))
    whole = timedelta(microseconds=(limit.window_ns + within_ns) // 1_000)
    limiter = make(Limit(_SLOT_UNITS, per=whole), on_failure=on_failure or "closed")
    return limiter, True, _ExactSlots(limiter, clock, limit, within_ns)


def _exact_limit(limits: tuple[Limit, ...], settings: LimitSettings) -> Limit:
    """Return the limit. Raises ConfigError if arrivals cannot be counted exactly by it."""
    cost, on_failure = settings.get("cost", 1), settings.get("on_failure")
    if on_failure in ("open", "local") or settings.get("local_fallback") is not None:
        is_policy = on_failure in ("open", "local")
        given = f"on_failure={show(on_failure)}" if is_policy else "local_fallback"
        raise ConfigError(
            f"{given} needs exact=False: without the store, processes cannot keep an exact limit "
            f'together; write on_failure="closed" or "raise", or {_INEXACT}'
        )
    if callable(cost) or cost != 1:
        raise ConfigError(
            f"cost={show(cost)} needs exact=False: an exact limit counts requests; leave it out, "
            f"or {_INEXACT}"
        )
    limit = limits[0]
    plain = Limit(limit.limit, per=timedelta(microseconds=limit.window_ns // 1_000))
    has_burst = limit.capacity != limit.limit or limit.refill_step_ns != plain.refill_step_ns
    is_window = limit.algorithm in ("token_bucket", "sliding_window_log")
    if len(limits) > 1 or has_burst or not is_window or not 1 <= limit.limit <= SLOTS_MAX:
        raise ConfigError(
            f"limits={show(list(limits))} needs exact=False: an exact limit is one of 1 to "
            f'{SLOTS_MAX} requests in any window, such as "10/second"; {_INEXACT}. To keep both '
            f'kinds: LimitTransport("1000/day", exact=False, '
            f'transport=LimitTransport("10/second", attempts_max=1))'
        )
    return limit


def _arrives_within_ns(value: object) -> int:
    example = "arrives_within=10 (seconds)"
    found_ns = duration_ns("arrives_within", value, ARRIVES_WITHIN_NS_MAX + 1, example)
    if not _NS_PER_MS <= found_ns <= ARRIVES_WITHIN_NS_MAX:
        raise ConfigError(
            f"arrives_within={show(value)} is not between 1 ms and an hour; for example {example}"
        )
    return found_ns // _NS_PER_MS * _NS_PER_MS


def _key_function(key: Key | KeyOfRequest | None) -> KeyOfRequest:
    if key is None:
        return _origin_of_request
    if callable(key):
        return key
    subject_of(key)  # raises InvalidKey
    return lambda _: key


def _cost_function(cost: int | CostOfRequest) -> CostOfRequest:
    if callable(cost):
        return cost
    units = units_of(cost, "cost")
    return lambda _: units


def _origin_of(url: httpx.URL) -> str:
    """Return scheme, host and port, without a port that is the scheme's default."""
    return f"{url.scheme}://{url.netloc.decode('ascii')}"


def _origin_of_request(request: httpx.Request) -> str:
    return _origin_of(request.url)


def _request_of(request: httpx.Request) -> Request:
    """Return the request as rules match it. They can count it by the attribute `origin`."""
    attributes = {"origin": _origin_of(request.url)}
    return Request(endpoint=request.url.path, method=request.method, attributes=attributes)


class LimitTransport(httpx.BaseTransport):
    """An httpx transport that keeps limits before it sends, and waits as responses request.

    >>> transport = LimitTransport("10/second", store="memory://", wait_max=30)
    >>> client = httpx.Client(transport=transport)
    >>> client.close()

    `limits` is the limit as the other side counts it: no more requests arrive in any window, also
    if several processes share the store and the network is slow. With `exact=False` it is a rate
    string, a Limit or several, which count requests as they leave. A Limiter, also one from rules,
    counts them as they leave, too. `transport` sends the requests; by default httpx's own. See
    `LimitSettings` for the rest.

    Raises LimitTimeout if a request would wait for longer than `wait_max`, CapacityError for a cost
    that never fits, and with `on_failure="raise"` StoreError. Each attempt costs one check on the
    store (an exact limit without room checks each of its slots) and one refund, and one peek unless
    `pace` is "off".
    """

    @explains("LimitTransport(…)", 'LimitTransport("10/second", transport=httpx.HTTPTransport())')
    def __init__(
        self,
        limits: LimitsArgument | Limiter,
        *,
        transport: httpx.BaseTransport | None = None,
        **settings: Unpack[LimitSettings],
    ) -> None:
        _require_known("LimitTransport", settings, LimitSettings)
        inner = _checked_transport(transport, httpx.BaseTransport, httpx.HTTPTransport)
        self._limits, self._transport = _LimitedRetries(limits, Limiter, settings), inner

    @property
    def limiter(self) -> Limiter:
        """The limiter that counts, for example to share its store."""
        return cast("Limiter", self._limits.limiter)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request when the limits have room, and repeat it as long as that is allowed."""
        send, sleep = self._transport.handle_request, self._limits.clock.sleep
        return run(self._limits.steps(request, send, sleep, _drain))

    def close(self) -> None:
        """Close the inner transport, and the limiter if this transport made it."""
        self._transport.close()
        if self._limits.owns_limiter:
            self.limiter.close()


class AsyncLimitTransport(httpx.AsyncBaseTransport):
    """LimitTransport for httpx.AsyncClient, on asyncio. A wait does not block the event loop.

    A request that is cancelled while it waits spends nothing. `limits` may be an AsyncLimiter.
    """

    @explains(
        "AsyncLimitTransport(…)", 'AsyncLimitTransport("10/second", store="redis://localhost")'
    )
    def __init__(
        self,
        limits: LimitsArgument | AsyncLimiter,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        **settings: Unpack[LimitSettings],
    ) -> None:
        _require_known("AsyncLimitTransport", settings, LimitSettings)
        inner = _checked_transport(transport, httpx.AsyncBaseTransport, httpx.AsyncHTTPTransport)
        self._limits, self._transport = _LimitedRetries(limits, AsyncLimiter, settings), inner

    @property
    def limiter(self) -> AsyncLimiter:
        """The limiter that counts, for example to share its store."""
        return cast("AsyncLimiter", self._limits.limiter)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request when the limits have room, and repeat it as long as that is allowed."""
        send, sleep = self._transport.handle_async_request, self._limits.clock.sleep_async
        return await run_async(self._limits.steps(request, send, sleep, _drain_async))

    async def aclose(self) -> None:
        """Close the inner transport, and the limiter if this transport made it."""
        await self._transport.aclose()
        if self._limits.owns_limiter:
            await self.limiter.close()


# ── Reading responses ──────────────────────────────────────────────────────────────────────────


class ResponseHeaders(Protocol):
    """Headers by name, in any case; lines of one name are joined by commas."""

    def get(self, key: str, /) -> str | None:
        """Return the header's text, or None."""
        ...


class RetryAdvice(NamedTuple):
    """The waiting times that one response asks for."""

    wait_ns: int | None
    """The wait before the same request may be sent again; None if the response does not say."""
    spent_ns: int | None
    """The wait until a used-up quota has room again; 0 if some of it is left, None if the response
    does not say."""


class _Quota(NamedTuple):
    """The state of one quota, as far as the response reports it."""

    spent: bool | None
    reset_ns: int | None


def retry_advice_of(headers: ResponseHeaders, now_ns: int) -> RetryAdvice:
    """Return the waits that a response received at `now_ns` (Unix time) asks for."""
    quotas = list(_quotas(headers, now_ns))
    spent = [quota.reset_ns for quota in quotas if quota.spent and quota.reset_ns is not None]
    wait_ns = _retry_after_ns(headers, now_ns)
    if wait_ns is None:
        # If no quota is used up, the denied request costs more than one unit.
        known = spent or [quota.reset_ns for quota in quotas if quota.reset_ns is not None]
        wait_ns = max(known, default=None)
    return RetryAdvice(wait_ns, max(spent, default=None if _is_unknown(quotas) else 0))


def _is_unknown(quotas: list[_Quota]) -> bool:
    """Return True if no quota is reported, or one may be used up for an unknown time."""
    return not quotas or any(quota.spent is not False for quota in quotas)


def _retry_after_ns(headers: ResponseHeaders, now_ns: int) -> int | None:
    text = _header(headers, "retry-after")
    if text is None:
        return None
    seconds = [_seconds_ns(part) for part in text.split(",")]
    numbers = [each for each in seconds if each is not None]
    if len(numbers) == len(seconds):
        return max(numbers)
    moment_ns = _date_ns(text)
    if moment_ns is None:
        return None
    # Relative to the server's own date: a client whose clock is ahead would retry too soon.
    answered_ns = _date_ns(_header(headers, "date") or "")
    return max(moment_ns - (now_ns if answered_ns is None else answered_ns), 0)


def _quotas(headers: ResponseHeaders, now_ns: int) -> Iterator[_Quota]:
    """Yield the quotas of a response, from the newest kind of header that it has."""
    text = _header(headers, "ratelimit")
    if text is not None and (found := _structured(_QUOTED.sub('""', text))):
        yield from found
        return
    for prefix in ("ratelimit", "x-ratelimit"):
        remaining = _header(headers, f"{prefix}-remaining")
        reset = _header(headers, f"{prefix}-reset")
        if remaining is not None or reset is not None:
            yield _Quota(_is_zero(remaining), _reset_ns(reset or "", now_ns))
            return


def _structured(text: str) -> list[_Quota]:
    """Return the quotas of a `RateLimit` header whose quoted names were removed."""
    single = dict(_MEMBER.findall(text))
    if single:
        return [_Quota(_is_zero(single.get("remaining")), _seconds_ns(single.get("reset", "")))]
    found = []
    for member in text.split(","):
        parameters = dict(_PARAMETER.findall(member))
        if parameters:
            reset_ns = _seconds_ns(parameters.get("t", ""))
            found.append(_Quota(_is_zero(parameters.get("r")), reset_ns))
    return found


def _header(headers: ResponseHeaders, name: str) -> str | None:
    text = headers.get(name)
    return None if text is None else text[:HEADER_LENGTH_MAX]


def _is_zero(text: str | None) -> bool | None:
    number = None if text is None else _seconds_ns(text)
    return None if number is None else number == 0


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
