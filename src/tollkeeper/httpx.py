"""HTTP clients that wait as long as servers request: transports for httpx.

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
from typing import Any, Final, Literal, NamedTuple, Protocol, TypedDict, Unpack

from tollkeeper.core.clock import NS_PER_SECOND, Clock, clock_of, duration_ns, seconds_from_ns
from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.steps import Call, Steps, run, run_async

try:
    import httpx
except ImportError as error:
    raise ConfigError(
        f"tollkeeper.httpx needs httpx ({error}); install it with: pip install 'tollkeeper[client]'"
    ) from error

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
        self._lock = threading.Lock()

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


class _Retries:
    """The settings and the state of a transport, and the steps of its requests."""

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
        self.statuses = _checked_statuses(statuses)
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
        retried = _RetriedRequest(self, request)
        while True:
            before_ns = retried.before_ns()
            if before_ns:
                yield Call(sleep, seconds_from_ns(before_ns))
            response: httpx.Response = yield Call(send, request)
            wait_ns = retried.after_ns(response)
            if wait_ns is None:
                return response
            yield Call(drain, response)
            if wait_ns:
                yield Call(sleep, seconds_from_ns(wait_ns))

    def spread_ns(self, wanted_ns: int, attempt: int) -> int:
        """Return the random time that is added to a requested wait."""
        growing = min(SPREAD_NS_FIRST << (attempt - 1), SPREAD_NS_MAX)
        return int(self.random() * max(growing, wanted_ns // SPREAD_DIVISOR))


def _checked_statuses(statuses: Mapping[int, Methods]) -> dict[int, Methods]:
    found = dict(statuses)
    for status, methods in found.items():
        if not isinstance(status, int) or methods not in ("any", "idempotent"):
            raise ConfigError(
                f'statuses={show(statuses)} needs "any" or "idempotent" for each status; '
                f'for example statuses={{429: "any", 503: "idempotent"}}'
            )
    return found


class _RetriedRequest:
    """One request: its attempts so far, and the wait that is left."""

    __slots__ = ("_attempt", "_held", "_left_ns", "_may_repeat", "_origin", "_retries")

    def __init__(self, retries: _Retries, request: httpx.Request) -> None:
        self._retries = retries
        self._attempt = 0
        self._left_ns = retries.wait_ns_max
        self._origin, self._held = retries.origins.keys_of(request.url)
        # Determined before sending: a stream can be read only once.
        repeatable = isinstance(request.stream, httpx.ByteStream)
        idempotent = request.method.upper() in IDEMPOTENT
        self._may_repeat = {
            status: repeatable and (idempotent or methods == "any")
            for status, methods in retries.statuses.items()
        }
        retries.origins.begin(self._origin, retries.clock.now_ns())

    def before_ns(self) -> int:
        """Return the wait before the next attempt. Call it once for each attempt."""
        self._attempt += 1
        wanted_ns = self._retries.origins.free_ns(self._held) - self._retries.clock.now_ns()
        if wanted_ns <= 0:
            return 0
        # A wait that is too long is not made: the origin's own response explains it better.
        return self._waited(wanted_ns) or 0

    def after_ns(self, response: httpx.Response) -> int | None:
        """Return the wait before the request is repeated; None to return this response."""
        retries, now_ns = self._retries, self._retries.clock.now_ns()
        advice = retry_advice_of(response.headers, now_ns)
        again = self._may_repeat.get(response.status_code)
        hold_ns = advice.spent_ns
        if again is not None and advice.wait_ns is not None:
            hold_ns = max(advice.spent_ns or 0, advice.wait_ns)
        if hold_ns is not None:
            retries.origins.hold_back(self._held, now_ns + hold_ns, now_ns)
        if not again or self._attempt >= retries.attempts_max:
            return None
        wanted_ns = advice.wait_ns or 0
        if wanted_ns > self._left_ns or not retries.origins.spend(self._origin, now_ns):
            return None
        return self._waited(wanted_ns)

    def _waited(self, wanted_ns: int) -> int | None:
        """Return a wait with its random part, and subtract it from the wait that is left."""
        if wanted_ns > self._left_ns:
            return None
        spread_ns = self._retries.spread_ns(wanted_ns, self._attempt)
        wait_ns = min(wanted_ns + spread_ns, self._left_ns)
        self._left_ns -= wait_ns
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
        self._retries = _Retries(**settings)
        self._transport = httpx.HTTPTransport() if transport is None else transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and repeat it as long as that is allowed."""
        send, sleep = self._transport.handle_request, self._retries.clock.sleep
        return run(self._retries.steps(request, send, sleep, _drain))

    def close(self) -> None:
        """Close the inner transport."""
        self._transport.close()


class AsyncRetryTransport(httpx.AsyncBaseTransport):
    """The same for httpx.AsyncClient, on asyncio. A wait does not block the event loop."""

    def __init__(
        self, transport: httpx.AsyncBaseTransport | None = None, **settings: Unpack[RetrySettings]
    ) -> None:
        self._retries = _Retries(**settings)
        self._transport = httpx.AsyncHTTPTransport() if transport is None else transport

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
