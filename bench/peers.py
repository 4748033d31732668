"""The peers: `limits` and `throttled-py`, on their in-process stores.

The compared work is a check with a full result: allowed, remaining and reset. `limits` needs two
calls for it, `hit()` and `get_window_stats()`. throttled-py needs one, and computes the numbers
when `.state` is read. Each peer is also measured with its minimum, `hit()` alone or `limit()` with
the state unread. These rows are labelled. Ratekeeper returns the full result in every row.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final

import throttled
from limits import RateLimitItemPerSecond, strategies
from limits.storage import MemoryStorage

from bench.engines import Engine, Rate, Session
from ratekeeper.core.model import AlgorithmName

_LIMITS_STRATEGIES: Final[dict[AlgorithmName, type[strategies.RateLimiter]]] = {
    "sliding_window_log": strategies.MovingWindowRateLimiter,
    "sliding_window_counter": strategies.SlidingWindowCounterRateLimiter,
    "fixed_window": strategies.FixedWindowRateLimiter,
}
_THROTTLED_TYPES: Final[dict[AlgorithmName, str]] = {
    "token_bucket": throttled.RateLimiterType.TOKEN_BUCKET.value,
    "leaky_bucket": throttled.RateLimiterType.LEAKING_BUCKET.value,
    "sliding_window_counter": throttled.RateLimiterType.SLIDING_WINDOW.value,
    "fixed_window": throttled.RateLimiterType.FIXED_WINDOW.value,
}
_GCRA: Final[dict[AlgorithmName, str]] = {"token_bucket": throttled.RateLimiterType.GCRA.value}


def _open_limits(rate: Rate, *, full_answer: bool) -> Session:
    storage = MemoryStorage()
    limiter = _LIMITS_STRATEGIES[rate.algorithm](storage)
    item = RateLimitItemPerSecond(rate.limit, rate.per_seconds)
    hit, window_stats = limiter.hit, limiter.get_window_stats

    def check(key: str) -> tuple[bool, Any]:
        return hit(item, key), window_stats(item, key)

    def rest() -> None:
        # A hit starts a timer thread that removes expired keys. It runs during the batches of
        # this engine, as in any process, but must not slow the next engine.
        storage.timer.join()

    if full_answer:
        return Session(check, allowed=lambda answer: answer[0], rest=rest)
    return Session(partial(hit, item), allowed=bool, rest=rest)


def _open_throttled(rate: Rate, *, types: dict[AlgorithmName, str], full_answer: bool) -> Session:
    limiter = throttled.Throttled(
        using=types[rate.algorithm],
        # Its burst is ratekeeper's capacity.
        quota=throttled.per_duration(
            timedelta(seconds=rate.per_seconds), rate.limit, burst=rate.limit
        ),
        # By default, it keeps 1,024 entries and evicts the least recently used. Its windows need
        # two entries per key.
        store=throttled.MemoryStore(options={"MAX_SIZE": 2 * rate.keys_max}),
    )
    limit = limiter.limit

    def check(key: str) -> throttled.RateLimitResult:
        result = limit(key)
        _ = result.state
        return result

    return Session(check if full_answer else limit, allowed=lambda answer: not answer.limited)


def _pair(
    name: str, least: str, opener: Callable[..., Session], algorithms: dict[AlgorithmName, Any]
) -> tuple[Engine, Engine]:
    """Return a peer with its full result and with its minimum."""
    names = tuple(algorithms)
    return (
        Engine(name, partial(opener, full_answer=True), names, keys_most=1_000_000),
        Engine(f"{name} {least}", partial(opener, full_answer=False), names, full_answer=False),
    )


PEERS: Final = (
    *_pair("limits", "(hit() alone)", _open_limits, _LIMITS_STRATEGIES),
    *_pair(
        "throttled-py",
        "(state unread)",
        partial(_open_throttled, types=_THROTTLED_TYPES),
        _THROTTLED_TYPES,
    ),
    *_pair("throttled-py gcra", "(state unread)", partial(_open_throttled, types=_GCRA), _GCRA),
)
