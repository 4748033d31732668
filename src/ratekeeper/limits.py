"""Storages for `limits`, and so for Flask-Limiter and slowapi.

    storage_uri="ratekeeper+shared:///run/app.limits"

The schemes are those of `open_store` with `ratekeeper+` in front, and `async+ratekeeper+` for
`limits.aio`. Importing this module registers them; `limits` knows no storage that is not imported.

The strategies of `limits` decide by calls of a storage. Each call that acquires is one atomic
decision of a store, so a limit holds exactly over all threads, processes and machines of the store:

`fixed-window`            A token bucket of a billion units that is refilled whole, one window after
                          its first unit was taken: a counter that starts at the first hit. As in
                          all storages of `limits`, a denied hit is counted too.
`moving-window`           The sliding window log: exact, up to 1,000,000 units in a window.
`sliding-window-counter`  The sliding window counter in thousandths of a unit. `limits` rounds the
                          weighted count down, Ratekeeper up. With thousandths, both admit the same
                          requests, but for the last thousandth of a unit, where this is stricter.

`limits` reads a counter by its key alone, without the window. The keys of its strategies end with
the limit (`…/10/1/minute`), which names the window. For any other key, the first hit of a window
also stores the window's length, which takes a second state and a second call.

Differences to the storages of `limits` are listed in docs/limits-storage.md.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from difflib import get_close_matches
from functools import lru_cache, wraps
from hashlib import blake2b
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from urllib.parse import parse_qs

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ConfigError, StoreError, show
from ratekeeper.core.model import (
    LOG_UNITS_MAX,
    UNITS_MAX,
    WINDOW_NS_MAX,
    AlgorithmName,
    Limit,
    units_of,
)
from ratekeeper.core.steps import Call, Steps, run, run_async
from ratekeeper.core.subjects import KEY_LENGTH_MAX, SEPARATOR
from ratekeeper.decide.store import Counter, Store
from ratekeeper.decide.stores import SCHEMES as STORE_SCHEMES
from ratekeeper.decide.stores import open_store

try:
    from limits.aio.storage import MovingWindowSupport as AsyncMovingWindowSupport
    from limits.aio.storage import SlidingWindowCounterSupport as AsyncSlidingWindowCounterSupport
    from limits.aio.storage import Storage as AsyncStorage
    from limits.errors import ConfigurationError
    from limits.limits import GRANULARITIES
    from limits.storage import MovingWindowSupport, SlidingWindowCounterSupport, Storage
    from limits.storage.base import TimestampedSlidingWindow
except ImportError as error:
    raise ConfigError(
        f"ratekeeper.limits needs limits 5 ({error}); install it with: "
        f"pip install 'ratekeeper[limits]'"
    ) from error

__all__ = ["AsyncRatekeeperStorage", "RatekeeperStorage", "open_storage"]

P = ParamSpec("P")
T = TypeVar("T")

PREFIX: Final = "ratekeeper+"
ASYNC_PREFIX: Final = "async+"
SCHEMES: Final = tuple(f"{PREFIX}{scheme}" for scheme in STORE_SCHEMES)
ASYNC_SCHEMES: Final = tuple(f"{ASYNC_PREFIX}{scheme}" for scheme in SCHEMES)

EXAMPLE: Final = "ratekeeper+shared:///run/app.limits"

# The default of `limits`. On Redis it begins every key, so that `reset` removes no others.
KEY_PREFIX_DEFAULT: Final = "LIMITS"
# The result of `incr` if the counter is full and the hit was not counted: it is above every limit.
NOT_COUNTED: Final = 2**63 - 1
# Parts of a unit that a sliding window counts. Limits above LARGE would not fit: they count in
# whole units, which is stricter by less than one of a million.
PARTS: Final = 1_000
LARGE: Final = UNITS_MAX // PARTS
# Prepared counters; one for each limit and window that is in use.
COUNTERS_MAX: Final = 1_024
# Another process may change a log between two looks. After this many, a look is good enough.
LOOKS_MAX: Final = 3
WINDOW_SECONDS_MAX: Final = WINDOW_NS_MAX // NS_PER_SECOND

# A timeout is an error response here, because a storage of `limits` has no failure policy. So a
# call waits longer for Redis than a Limiter does, and through the set-up of a connection.
DEADLINE_MS_DEFAULT: Final = 1_000

# The options of a storage that no store has.
_OWN: Final = ("key_prefix", "wrap_exceptions")
# How similar an unknown option is to the one that was meant; `prefix` is an option of its own.
_SIMILAR: Final = 0.8


def open_storage(uri: str, /, **options: Any) -> RatekeeperStorage | AsyncRatekeeperStorage:
    """Open the storage that a URI names, as `limits.storage.storage_from_string` does.

    >>> storage = open_storage("ratekeeper+memory://")
    >>> storage.incr("job", 60), storage.incr("job", 60)
    (1, 2)

    Raises `limits.errors.ConfigurationError`, which names the next step.
    """
    scheme = uri.partition("://")[0].lower()
    if "uri" in options:
        raise ConfigurationError("storage_options has a uri; give it as storage_uri only")
    if scheme in SCHEMES:
        return RatekeeperStorage(uri, **options)
    if scheme in ASYNC_SCHEMES:
        return AsyncRatekeeperStorage(uri, **options)
    close = get_close_matches(scheme, (*SCHEMES, *ASYNC_SCHEMES), n=1, cutoff=0.0)[0]
    problem = f"{_shown(scheme)} is not a scheme" if "://" in uri else 'there is no "://"'
    raise ConfigurationError(
        f"storage_uri: {problem}; the closest is {close}://, and a complete "
        f'example is "{EXAMPLE}"; there are {", ".join(f"{each}://" for each in SCHEMES)}, '
        f"and each with {ASYNC_PREFIX} in front for limits.aio"
    )


def _shown(scheme: str) -> str:
    """Return a scheme for a message; not if it may contain a part of a password."""
    return show(scheme) if scheme.replace("+", "_").isidentifier() else "…"


def _unix_time(from_now_ns: int) -> float:
    """Return a time by the clock that callers of `limits` compare it with."""
    return time.time() + from_now_ns / NS_PER_SECOND


def _subject_of(key: str) -> str:
    """Return the subject of a key of `limits`, which may be any text.

    A key that no subject can be is replaced by a digest. It begins with a separator, which is in no
    other subject, so no two keys share a subject.
    """
    if 0 < len(key) <= KEY_LENGTH_MAX and key.isascii() and SEPARATOR not in key:
        return key
    digest = blake2b(key.encode(errors="surrogatepass"), digest_size=20)
    return SEPARATOR + digest.hexdigest()


def _window_in(key: str) -> int | None:
    """Return the seconds of the window that a key of a strategy ends with.

    >>> _window_in("LIMITER/10.0.0.1/10/2/minute"), _window_in("job")
    (120, None)
    """
    parts = key.rsplit("/", 2)
    return _window_of(parts[1], parts[2]) if len(parts) == 3 else None


@lru_cache(COUNTERS_MAX)
def _window_of(multiples: str, name: str) -> int | None:
    item = GRANULARITIES.get(name)
    if item is None or len(multiples) > 9 or not multiples.isascii() or not multiples.isdigit():
        return None
    seconds = item.GRANULARITY.seconds * int(multiples)
    return seconds if 1 <= seconds <= WINDOW_SECONDS_MAX else None


class _Counters:
    """The counters of one store, each prepared once."""

    def __init__(self, store: Store, rule: str) -> None:
        self._rule = rule
        self._open = store.counter
        self.counter = lru_cache(COUNTERS_MAX)(self._counter)
        self.window = lru_cache(COUNTERS_MAX)(self._window)
        self.moving = lru_cache(COUNTERS_MAX)(self._moving)
        self.sliding = lru_cache(COUNTERS_MAX)(self._sliding)

    # A named bucket or log has an identity without a window, so that it can be cleared without it.

    def _counter(self, seconds: float) -> Counter:
        """Return the counter that counts hits in a window from the first hit on."""
        return self._prepared("fixed", UNITS_MAX, seconds, "token_bucket", refill_every=seconds)

    def _window(self, seconds: float) -> Counter:
        """Return the counter whose used units are the seconds of a counter's window."""
        return self._prepared("window", UNITS_MAX, seconds, "token_bucket", refill_every=seconds)

    def _moving(self, limit: int, seconds: float) -> Counter:
        if limit > LOG_UNITS_MAX:
            raise ConfigurationError(
                f"a moving window of {limit:,} is above {LOG_UNITS_MAX:,}: it keeps the time of "
                f"each unit; use the strategy sliding-window-counter for this limit"
            )
        return self._prepared("moving", limit, seconds, "sliding_window_log")

    def _sliding(self, parts: int, limit: int, seconds: float) -> Counter:
        return self._prepared(f"sliding/{parts}", limit, seconds, "sliding_window_counter")

    def _prepared(
        self,
        name: str,
        limit: int,
        seconds: float,
        algorithm: AlgorithmName,
        refill_every: float = 0,
    ) -> Counter:
        if seconds > WINDOW_SECONDS_MAX:
            raise ConfigurationError(
                f"a window of {seconds / 86_400:g} days is longer than "
                f"{WINDOW_SECONDS_MAX // 86_400} days; use a shorter one"
            )
        try:
            made = Limit(limit, seconds, algorithm, name=name, refill_every=refill_every)
            return self._open([made], f"{self._rule}:{name}")
        except ConfigError as error:
            raise ConfigurationError(str(error)) from error


class _StorageCalls:
    """The methods of a storage, written once for threads and asyncio (`core/steps.py`)."""

    def __init__(self, uri: str | None, options: Mapping[str, Any], *, awaited: bool) -> None:
        scheme, _, rest = (uri or "").partition("://")
        store_scheme = scheme.lower().removeprefix(ASYNC_PREFIX).removeprefix(PREFIX)
        if store_scheme == scheme.lower():
            raise ConfigurationError(
                f"storage_uri: {_shown(scheme)} does not begin with {PREFIX}; for example "
                f'"{EXAMPLE}"'
            )
        self._awaited = awaited
        try:
            prefix, given = _store_options(store_scheme, rest, options)
            self.store = open_store(f"{store_scheme}://{rest}", **given)
        except (ConfigError, StoreError) as error:  # a file that cannot be opened, for example
            raise ConfigurationError(
                f'{error} (with {PREFIX} in front as storage_uri, for example "{EXAMPLE}")'
            ) from error
        self._counters = _Counters(self.store, prefix)

    def incr(self, key: str, expiry: int, amount: int = 1) -> Steps[int]:
        """Count a hit in the window that the first hit started; return the count with it."""
        amount = units_of(amount, "amount")
        if amount > UNITS_MAX:
            return NOT_COUNTED
        subject = _subject_of(key)
        decision = yield Call(self._counters.counter(expiry).check, subject, amount)
        if not decision.allowed:
            return NOT_COUNTED
        count: int = UNITS_MAX - decision.remaining
        if count == amount and _window_in(key) is None:
            # The first hit of a window, and its key does not name the window.
            window = self._counters.window(expiry)
            yield Call(window.reset, subject)
            yield Call(window.check, subject, math.ceil(expiry))
        return count

    def get(self, key: str) -> Steps[int]:
        """Return the count of a key; 0 once its window has ended."""
        return (yield from self._look(key))[0]

    def get_expiry(self, key: str) -> Steps[float]:
        """Return the Unix time at which the window of a key ends; now if none has started."""
        return _unix_time((yield from self._look(key))[1])

    def _look(self, key: str) -> Steps[tuple[int, int]]:
        """Return a counter's value, and the nanoseconds until its window ends."""
        subject = _subject_of(key)
        seconds = _window_in(key)
        if seconds is None:
            # The longest window reads the units of any shorter one.
            stored = yield Call(self._counters.window(WINDOW_SECONDS_MAX).peek, subject, 0)
            seconds = UNITS_MAX - stored.remaining
            if not seconds:
                return 0, 0
        seen = yield Call(self._counters.counter(seconds).peek, subject, 0)
        return UNITS_MAX - seen.remaining, seen.reset_after_ns

    def clear(self, key: str) -> Steps[None]:
        """Forget the hits of a key, of the fixed window and of the moving window."""
        subject = _subject_of(key)
        counters = [self._counters.counter(1), self._counters.moving(1, 1)]
        if _window_in(key) is None:
            counters.append(self._counters.window(1))
        for counter in counters:
            yield Call(counter.reset, subject)

    def check(self) -> Steps[bool]:
        """Return True if the store answers."""
        try:
            yield Call(self._counters.counter(1).peek, "", 0)
        except StoreError:
            return False
        return True

    def reset(self) -> Steps[int]:
        """Forget all counts of the store, on Redis all under the prefix; return how many."""
        forget = self.store.forget_all
        blocks = self._awaited and not self.store.is_local
        forgotten: int = yield Call(asyncio.to_thread, forget) if blocks else Call(forget)
        return forgotten

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> Steps[bool]:
        """Acquire `amount` units if at most `limit` are in the moving window with them."""
        amount = units_of(amount, "amount")
        if amount > limit or not amount:
            return amount <= limit
        decision = yield Call(self._counters.moving(limit, expiry).check, _subject_of(key), amount)
        return bool(decision.allowed)

    def get_moving_window(self, key: str, limit: int, expiry: int) -> Steps[tuple[float, int]]:
        """Return when the oldest unit of the window was acquired, and the number of units.

        The wait until one unit more than the remaining ones fits is the time until the oldest one
        leaves the window.
        """
        if limit < 1:
            return time.time(), 0
        counter, subject = self._counters.moving(limit, expiry), _subject_of(key)
        cost, start_ns = 1, 0
        for _ in range(LOOKS_MAX):
            seen = yield Call(counter.peek, subject, cost)
            if seen.remaining == limit:
                return time.time(), 0
            start_ns = seen.retry_after_ns or seen.reset_after_ns
            if cost == seen.remaining + 1:
                break
            cost = seen.remaining + 1
        return _unix_time(start_ns) - expiry, limit - seen.remaining

    def acquire_sliding_window_entry(
        self, key: str, limit: int, expiry: int, amount: int = 1
    ) -> Steps[bool]:
        """Acquire `amount` units if the weighted count of two windows, rounded down, leaves room.

        In parts of a unit, a count that is rounded down to n is below (n + 1) × parts.
        """
        amount = units_of(amount, "amount")
        if amount > limit or not amount:
            return amount <= limit
        parts = PARTS if limit < LARGE else 1
        counter = self._counters.sliding(parts, limit * parts + parts - 1, expiry)
        decision = yield Call(counter.check, _subject_of(key), amount * parts)
        return bool(decision.allowed)

    def get_sliding_window(self, key: str, expiry: int) -> Steps[tuple[int, float, int, float]]:
        """Return numbers from which the strategy derives the remaining units and the reset time.

        A store answers with the weighted count, not with the counts of both windows. So the current
        window has the whole units of it. The previous window has one unit, which leaves when the
        next unit becomes free: a part of a unit is left of it, and the strategy rounds that down.
        """
        subject, parts, used = _subject_of(key), PARTS, 0
        for parts in (PARTS, 1):
            counter = self._counters.sliding(parts, UNITS_MAX, expiry)
            seen = yield Call(counter.peek, subject, 0)
            used = UNITS_MAX - seen.remaining
            if used:
                break
        window_ns = counter.limits[0].window_ns
        left_ns = window_ns - seen.decided_ns % window_ns
        current_seconds = left_ns / NS_PER_SECOND + expiry
        if not used:
            return 0, 0.0, 0, current_seconds
        whole, free_ns = used // parts, seen.reset_after_ns
        if whole:
            # The cost that fits once less than `whole` units are used.
            later = yield Call(counter.peek, subject, UNITS_MAX - whole * parts + 1)
            free_ns = later.retry_after_ns
        return 1, min(free_ns, left_ns, window_ns - 1_000) / NS_PER_SECOND, whole, current_seconds

    def clear_sliding_window(self, key: str, expiry: int) -> Steps[None]:
        """Forget the units of a key in the sliding window."""
        for parts in (PARTS, 1):
            counter = self._counters.sliding(parts, UNITS_MAX, expiry)
            yield Call(counter.reset, _subject_of(key))


def _store_options(
    scheme: str, rest: str, options: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return the name that counts are kept under, and the options of the store."""
    given = dict(options)
    prefix = given.pop("key_prefix", KEY_PREFIX_DEFAULT)
    if not isinstance(prefix, str) or not prefix.isprintable() or not 0 < len(prefix) <= 32:
        raise ConfigError(
            f"key_prefix={show(prefix)} is not printable text of 1 to 32 characters; "
            f'for example key_prefix="shop"'
        )
    in_uri = parse_qs(rest.partition("?")[2], keep_blank_values=True)
    _check_own_options(given, in_uri)
    if not scheme.startswith(("redis", "valkey")):
        return prefix, given
    if "deadline_ms" not in in_uri:
        given.setdefault("deadline_ms", DEADLINE_MS_DEFAULT)
    if "prefix" in in_uri or "prefix" in given:
        return prefix, given  # applications that share this prefix still count separately
    return "limits", {**given, "prefix": prefix}


def _check_own_options(given: Mapping[str, Any], in_uri: Mapping[str, Any]) -> None:
    """Raise ConfigError for a misspelt option of a storage, or one in the URI.

    The store rejects all other unknown options, and lists its own.
    """
    for name in given:
        close = get_close_matches(name, _OWN, n=1, cutoff=_SIMILAR)
        if close and close[0] != name:
            raise ConfigError(f"storage_options has no {name}; did you mean {close[0]}?")
    for name in _OWN:
        if name in in_uri:
            raise ConfigError(f"{name} belongs in storage_options, and not in the URI")


def _blocking(
    steps: Callable[Concatenate[_StorageCalls, P], Steps[T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return a method of a storage that runs the steps in the calling thread."""

    @wraps(steps)
    def method(self: Any, /, *args: P.args, **options: P.kwargs) -> T:
        return run(steps(self._calls, *args, **options))

    return method


def _awaited(
    steps: Callable[Concatenate[_StorageCalls, P], Steps[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a method of a storage that runs the steps in the event loop."""

    @wraps(steps)
    async def method(self: Any, /, *args: P.args, **options: P.kwargs) -> T:
        return await run_async(steps(self._calls, *args, **options))

    return method


class RatekeeperStorage(
    Storage, MovingWindowSupport, SlidingWindowCounterSupport, TimestampedSlidingWindow
):
    """A storage of `limits` that counts in a Ratekeeper store.

    `uri` is one of `SCHEMES`; `options` are those of `open_store`, and `key_prefix` (default
    "LIMITS"). Errors of the store are StoreErrors, or with `wrap_exceptions` StorageErrors of
    `limits`.
    """

    STORAGE_SCHEME = list(SCHEMES)  # noqa: RUF012 - `limits` declares it so

    def __init__(
        self, uri: str | None = None, wrap_exceptions: bool = False, **options: Any
    ) -> None:
        super().__init__(uri, wrap_exceptions=wrap_exceptions)
        self._calls = _StorageCalls(uri, options, awaited=False)

    @property
    def store(self) -> Store:
        """The store, for its statistics, and to close it; a storage of `limits` has no close."""
        return self._calls.store

    @property
    def base_exceptions(self) -> type[Exception]:
        """The errors of the store."""
        return StoreError

    incr = _blocking(_StorageCalls.incr)
    get = _blocking(_StorageCalls.get)
    get_expiry = _blocking(_StorageCalls.get_expiry)
    clear = _blocking(_StorageCalls.clear)
    check = _blocking(_StorageCalls.check)
    reset = _blocking(_StorageCalls.reset)
    acquire_entry = _blocking(_StorageCalls.acquire_entry)
    get_moving_window = _blocking(_StorageCalls.get_moving_window)
    acquire_sliding_window_entry = _blocking(_StorageCalls.acquire_sliding_window_entry)
    get_sliding_window = _blocking(_StorageCalls.get_sliding_window)
    clear_sliding_window = _blocking(_StorageCalls.clear_sliding_window)


class AsyncRatekeeperStorage(
    AsyncStorage,
    AsyncMovingWindowSupport,
    AsyncSlidingWindowCounterSupport,
    TimestampedSlidingWindow,
):
    """RatekeeperStorage for `limits.aio`. Calls to Redis are awaited; others return at once."""

    STORAGE_SCHEME = list(ASYNC_SCHEMES)  # noqa: RUF012 - see above

    def __init__(
        self, uri: str | None = None, wrap_exceptions: bool = False, **options: Any
    ) -> None:
        super().__init__(uri, wrap_exceptions=wrap_exceptions)
        self._calls = _StorageCalls(uri, options, awaited=True)

    @property
    def store(self) -> Store:
        """See RatekeeperStorage.store."""
        return self._calls.store

    @property
    def base_exceptions(self) -> type[Exception]:
        """The errors of the store."""
        return StoreError

    incr = _awaited(_StorageCalls.incr)
    get = _awaited(_StorageCalls.get)
    get_expiry = _awaited(_StorageCalls.get_expiry)
    clear = _awaited(_StorageCalls.clear)
    check = _awaited(_StorageCalls.check)
    reset = _awaited(_StorageCalls.reset)
    acquire_entry = _awaited(_StorageCalls.acquire_entry)
    get_moving_window = _awaited(_StorageCalls.get_moving_window)
    acquire_sliding_window_entry = _awaited(_StorageCalls.acquire_sliding_window_entry)
    get_sliding_window = _awaited(_StorageCalls.get_sliding_window)
    clear_sliding_window = _awaited(_StorageCalls.clear_sliding_window)
