"""HTTP clients that wait as they are asked: transports for httpx.

A client that sends a denied request again at once makes things worse, and many clients that wait
for the same second come back as one wave. These transports do three things about it.

They *wait as the answer asks* (`advice.py` reads it), and then a random time more: never less than
was asked, and never all clients together. Where an answer asks for nothing, the random time alone
grows with every attempt.

They *pace themselves*. An answer that says "nothing left for 5 s" holds back what is sent to that
origin next, before it is denied.

They *keep a budget*. Retries are a share of the traffic, and some more: when most requests fail,
most failures are returned, and an origin in trouble gets a tenth more load rather than five times
as much.

What is sent again was either denied (429: nothing was done) or may be done twice (503 and a method
that allows it), and has a body that can be sent twice. Everything else, and whoever has waited or
tried enough, gets the answer as it is.
"""

from __future__ import annotations

import random as system_random
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal, TypedDict, Unpack

from tollkeeper.core.clock import NS_PER_SECOND, Clock, clock_of, duration_ns, seconds_from_ns
from tollkeeper.core.errors import ConfigError, show
from tollkeeper.web.advice import advice_of

try:
    import httpx
except ImportError as error:
    raise ConfigError(
        f"tollkeeper.httpx needs httpx ({error}); install it with: pip install 'tollkeeper[client]'"
    ) from error

Methods = Literal["any", "idempotent"]
Pace = Literal["origin", "path", "off"]

# A denied request did nothing, so any method may try again; a 503 may have come half way.
STATUSES: Final[Mapping[int, Methods]] = {429: "any", 503: "idempotent"}
IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})

ATTEMPTS_MAX: Final = 100
WAIT_NS_MAX: Final = 366 * 86_400 * NS_PER_SECOND
# How many origins (or paths) are kept in mind; those not used for longest are forgotten.
PLACES_MAX: Final = 1_000
# The random time: up to so much after the first attempt, twice as much after each further one.
SPREAD_NS_FIRST: Final = NS_PER_SECOND // 2
SPREAD_NS_MAX: Final = 30 * NS_PER_SECOND
# And at least this part of a long wait, for those whom one second would not keep apart.
SPREAD_DIVISOR: Final = 4
# A refusal's body up to this size is read, so that its connection can be used again.
DRAIN_BYTES_MAX: Final = 65_536

_MICROS = 1_000_000


@dataclass(frozen=True, slots=True)
class Budget:
    """How many requests may be sent again, for each origin.

    `share`       retries for every first attempt: 0.1 is one for ten requests.
    `per_second`  and so many a second in any case, for who sends little.
    `reserve`     the most that add up; there at the start.
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


class _Place:
    """What is known of one origin: from when it may be sent to, and the retries it has left."""

    __slots__ = ("filled_ns", "free_ns", "micros")

    def __init__(self, micros: int, now_ns: int) -> None:
        self.free_ns = 0
        self.micros = micros
        self.filled_ns = now_ns


class _Places:
    """Every origin that was sent to lately. For any number of threads."""

    def __init__(self, budget: Budget, pace: Pace) -> None:
        self._share_micros = round(budget.share * _MICROS)
        self._micros_a_second = round(budget.per_second * _MICROS)
        self._reserve_micros = round(budget.reserve * _MICROS)
        self._pace = pace
        self._known: OrderedDict[Hashable, _Place] = OrderedDict()
        self._lock = threading.Lock()

    def keys_of(self, url: httpx.URL) -> tuple[Hashable, Hashable]:
        """What has the budget, and what is held back."""
        origin = (url.scheme, url.host, url.port)
        return origin, (*origin, url.path) if self._pace == "path" else origin

    def begin(self, key: Hashable, now_ns: int) -> None:
        """A first attempt: its share goes into the budget."""
        with self._lock:
            self._fill(self._place(key, now_ns), now_ns, self._share_micros)

    def free_ns(self, key: Hashable) -> int:
        """From when this may be sent to; 0 where nothing is known."""
        place = self._known.get(key)
        return 0 if place is None or self._pace == "off" else place.free_ns

    def hold_back(self, key: Hashable, until_ns: int, now_ns: int) -> None:
        """From when this may be sent to, as the newest answer says: also that it may at once."""
        with self._lock:
            self._place(key, now_ns).free_ns = until_ns

    def spend(self, key: Hashable, now_ns: int) -> bool:
        """Take one retry out of the budget, if there is one."""
        with self._lock:
            place = self._place(key, now_ns)
            self._fill(place, now_ns, 0)
            if place.micros < _MICROS:
                return False
            place.micros -= _MICROS
            return True

    def _place(self, key: Hashable, now_ns: int) -> _Place:
        place = self._known.get(key)
        if place is None:
            place = self._known[key] = _Place(self._reserve_micros, now_ns)
            if len(self._known) > PLACES_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return place

    def _fill(self, place: _Place, now_ns: int, share_micros: int) -> None:
        # Rounded down: what is lost is less than a millionth of a retry each time.
        earned = (now_ns - place.filled_ns) * self._micros_a_second // NS_PER_SECOND
        if earned > 0:
            place.filled_ns = now_ns
        micros = place.micros + max(earned, 0) + share_micros
        place.micros = min(micros, self._reserve_micros)


class Settings(TypedDict, total=False):
    """How often, and for how long, a request may be held up."""

    attempts_max: int
    """How often one request is sent in all, by default 5; 1 is never again."""
    wait_max: float | timedelta
    """Seconds, or a timedelta, that one request waits in all; by default 60."""
    statuses: Mapping[int, Methods]
    """Which answers lead to another attempt, and with which methods; by default STATUSES."""
    budget: Budget
    """How many retries there are for each origin."""
    pace: Pace
    """What an answer with nothing left holds back: all that goes to its "origin" (the default), or
    to the same "path" of it; or nothing: "off"."""
    clock: Clock | None
    """Where time comes from; by default the system."""
    random: Callable[[], float]
    """Returns a number from 0 up to 1; by default Python's."""


class _Retries:
    """What both transports decide by; they only send and sleep."""

    def __init__(
        self,
        *,
        attempts_max: int = 5,
        wait_max: float | timedelta = 60.0,
        statuses: Mapping[int, Methods] = STATUSES,
        budget: Budget = Budget(),  # noqa: B008 - frozen, so one for all is one for each
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
        self.attempts_max = attempts_max
        self.wait_ns_max = duration_ns("wait_max", wait_max, WAIT_NS_MAX, "wait_max=60")
        self.statuses = _checked(statuses)
        self.places = _Places(budget, pace)
        self.clock = clock_of(clock)
        self.random = random

    def spread_ns(self, asked_ns: int, attempt: int) -> int:
        """A random time on top of what was asked: anything from 0 up to the spread."""
        growing = min(SPREAD_NS_FIRST << (attempt - 1), SPREAD_NS_MAX)
        return int(self.random() * max(growing, asked_ns // SPREAD_DIVISOR))


def _checked(statuses: Mapping[int, Methods]) -> dict[int, Methods]:
    found = dict(statuses)
    for status, methods in found.items():
        if not isinstance(status, int) or methods not in ("any", "idempotent"):
            raise ConfigError(
                f'statuses={show(statuses)} does not say "any" or "idempotent" for each status; '
                f'for example statuses={{429: "any", 503: "idempotent"}}'
            )
    return found


class _Course:
    """One request on its way: how often it was sent, and how long it has waited."""

    __slots__ = ("_attempt", "_held", "_left_ns", "_may_repeat", "_origin", "_retries")

    def __init__(self, retries: _Retries, request: httpx.Request) -> None:
        self._retries = retries
        self._attempt = 0
        self._left_ns = retries.wait_ns_max
        self._origin, self._held = retries.places.keys_of(request.url)
        # Asked before it is sent: a stream that has been sent is gone.
        repeatable = isinstance(request.stream, httpx.ByteStream)
        idempotent = request.method.upper() in IDEMPOTENT
        self._may_repeat = {
            status: repeatable and (idempotent or methods == "any")
            for status, methods in retries.statuses.items()
        }
        retries.places.begin(self._origin, retries.clock.now_ns())

    def before_ns(self) -> int:
        """How long to wait before the next attempt; called once for each."""
        self._attempt += 1
        asked_ns = self._retries.places.free_ns(self._held) - self._retries.clock.now_ns()
        if asked_ns <= 0:
            return 0
        # Too long to wait: the origin itself says so better than we could.
        return self._waited(asked_ns) or 0

    def after_ns(self, response: httpx.Response) -> int | None:
        """How long to wait before it is sent again; None: this is the answer."""
        retries, now_ns = self._retries, self._retries.clock.now_ns()
        advice = advice_of(response.headers, now_ns)
        again = self._may_repeat.get(response.status_code)
        hold_ns = advice.spent_ns
        if again is not None and advice.wait_ns is not None:
            hold_ns = max(advice.spent_ns or 0, advice.wait_ns)
        if hold_ns is not None:
            retries.places.hold_back(self._held, now_ns + hold_ns, now_ns)
        if not again or self._attempt >= retries.attempts_max:
            return None
        asked_ns = advice.wait_ns or 0
        if asked_ns > self._left_ns or not retries.places.spend(self._origin, now_ns):
            return None
        return self._waited(asked_ns)

    def _waited(self, asked_ns: int) -> int | None:
        """The wait with its random part, taken from what this request may wait in all."""
        if asked_ns > self._left_ns:
            return None
        spread_ns = self._retries.spread_ns(asked_ns, self._attempt)
        wait_ns = min(asked_ns + spread_ns, self._left_ns)
        self._left_ns -= wait_ns
        return wait_ns


class RetryTransport(httpx.BaseTransport):
    """An httpx transport that waits as the answers ask.

    >>> client = httpx.Client(transport=RetryTransport(wait_max=30))
    >>> client.close()

    `transport` is what sends; by default httpx's own. The rest is described by `Settings`.
    """

    def __init__(
        self, transport: httpx.BaseTransport | None = None, **settings: Unpack[Settings]
    ) -> None:
        self._retries = _Retries(**settings)
        self._transport = httpx.HTTPTransport() if transport is None else transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and send it again as long as that is asked for and allowed."""
        course = _Course(self._retries, request)
        while True:
            self._sleep(course.before_ns())
            response = self._transport.handle_request(request)
            wait_ns = course.after_ns(response)
            if wait_ns is None:
                return response
            _drain(response)
            self._sleep(wait_ns)

    def _sleep(self, wait_ns: int) -> None:
        if wait_ns:
            self._retries.clock.sleep(seconds_from_ns(wait_ns))

    def close(self) -> None:
        """Close the transport that sends."""
        self._transport.close()


class AsyncRetryTransport(httpx.AsyncBaseTransport):
    """The same for httpx.AsyncClient, on asyncio. Waiting leaves the event loop free."""

    def __init__(
        self, transport: httpx.AsyncBaseTransport | None = None, **settings: Unpack[Settings]
    ) -> None:
        self._retries = _Retries(**settings)
        self._transport = httpx.AsyncHTTPTransport() if transport is None else transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and send it again as long as that is asked for and allowed."""
        course = _Course(self._retries, request)
        while True:
            await self._sleep(course.before_ns())
            response = await self._transport.handle_async_request(request)
            wait_ns = course.after_ns(response)
            if wait_ns is None:
                return response
            await _drain_async(response)
            await self._sleep(wait_ns)

    async def _sleep(self, wait_ns: int) -> None:
        if wait_ns:
            await self._retries.clock.sleep_async(seconds_from_ns(wait_ns))

    async def aclose(self) -> None:
        """Close the transport that sends."""
        await self._transport.aclose()


def _drain(response: httpx.Response) -> None:
    """Close an answer that nobody will see. A short body is read first: see DRAIN_BYTES_MAX."""
    if response.is_closed:
        return
    # A connection that fails now has failed for the next attempt too, which will tell.
    try:
        with suppress(httpx.TransportError):
            size = 0
            for chunk in response.iter_raw():
                size += len(chunk)
                if size > DRAIN_BYTES_MAX:
                    break
    finally:
        response.close()


async def _drain_async(response: httpx.Response) -> None:
    if response.is_closed:
        return
    try:
        with suppress(httpx.TransportError):
            size = 0
            async for chunk in response.aiter_raw():
                size += len(chunk)
                if size > DRAIN_BYTES_MAX:
                    break
    finally:
        await response.aclose()
