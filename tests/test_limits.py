"""The storages for `limits`: the answers of all strategies, exactness, keys, options and errors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Any, Self

import flask_limiter
import httpx
import limits
import limits.aio.strategies
import pytest
import slowapi
import slowapi.errors
import slowapi.util
from flask import Flask
from hypothesis import given
from hypothesis import strategies as st
from limits import parse
from limits.errors import ConfigurationError, StorageError
from limits.storage import storage_from_string
from limits.strategies import STRATEGIES
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ratekeeper import InvalidCost, StoreError, StoreUnavailable
from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.decide import kernel
from ratekeeper.decide.stores import SCHEMES as STORE_SCHEMES
from ratekeeper.limits import (
    ASYNC_SCHEMES,
    NOT_COUNTED,
    SCHEMES,
    AsyncRatekeeperStorage,
    RatekeeperStorage,
    _subject_of,
    open_storage,
)
from ratekeeper.testing import ManualClock, use_clock
from tests.redis_servers import Single, running

NOW_S = 1_800_000_000  # begins a window of a minute and of an hour
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
# A busy machine may stall a test for longer than the deadline of production.
PATIENCE = {"deadline_ms": 10_000, "connect_ms": 10_000}


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    """The clock of every storage of the test."""
    with use_clock(ManualClock(start=NOW_S)) as clock:
        yield clock


Opener = Callable[..., Any]


@pytest.fixture(
    params=["python", "memory", "shared", pytest.param("redis", marks=pytest.mark.server)]
)
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty store of each kind, without `ratekeeper+`."""
    if request.param == "python":
        monkeypatch.setattr(kernel, "BUILT", False)
    if request.param == "shared":
        return f"shared://{tmp_path}/api.limits"
    if request.param == "redis":
        running("single").flush()
        return running("single").uri
    return "memory://"


@pytest.fixture(params=["threads", "asyncio"])
def opened(request: pytest.FixtureRequest, uri: str) -> Iterator[Storage]:
    """A storage of each kind, driven by threads and by asyncio."""
    with asyncio.Runner() as runner:
        storage = Storage(uri, runner if request.param == "asyncio" else None)
        yield storage
        storage.close()


class Storage:
    """A storage and its strategies, for threads or in an event loop, with the same calls."""

    def __init__(self, uri: str, runner: asyncio.Runner | None, **options: object) -> None:
        self._runner = runner
        scheme = "ratekeeper+" if runner is None else "async+ratekeeper+"
        if "redis" in uri:
            options = {**PATIENCE, **options}
        self.storage = storage_from_string(f"{scheme}{uri}", **options)

    def __getattr__(self, name: str) -> Any:
        return self._plain(getattr(self.storage, name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store, and its connections in the event loop."""
        store = self.storage.store
        if self._runner is not None:
            self._runner.run(store.aclose())
        store.close()

    def strategy(self, name: str) -> Any:
        """Return a strategy whose methods return results."""
        if self._runner is None:
            return STRATEGIES[name](self.storage)
        made = limits.aio.strategies.STRATEGIES[name](self.storage)
        verbs = ("hit", "test", "get_window_stats", "clear")
        return type(
            "Awaited", (), {verb: staticmethod(self._plain(getattr(made, verb))) for verb in verbs}
        )

    def _plain(self, method: Callable[..., Any]) -> Callable[..., Any]:
        if self._runner is None:
            return method

        def call(*args: Any, **options: Any) -> Any:
            assert self._runner is not None
            return self._runner.run(_awaited(method(*args, **options)))

        return call


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


# ------------------------------------------------------------------------------------- strategies

# (strategy, the seconds after which hits of 5/minute come, the answers, the remaining units and
# the seconds until the reset after the last hit). The clock begins 30 s into a minute.
TABLE = [
    # The window starts at the first hit; denied hits count.
    ("fixed-window", [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0], 0, 60),
    ("fixed-window", [0, 10, 59, 59, 59, 59, 60, 60], [1, 1, 1, 1, 1, 0, 1, 1], 3, 60),
    # At most five in any minute.
    ("moving-window", [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0], 0, 60),
    ("moving-window", [0, 10, 20, 30, 40, 50, 60, 60], [1, 1, 1, 1, 1, 0, 1, 0], 0, 10),
    # Windows begin with the minute; 3 hits of the last minute count 1.5 at its middle.
    ("sliding-window-counter", [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0], 0, 30),
    ("sliding-window-counter", [0, 0, 0, 60, 60, 60, 60, 60], [1, 1, 1, 1, 1, 1, 1, 0], 0, 10),
]


@pytest.mark.parametrize(("strategy", "times", "answers", "remaining", "reset_s"), TABLE)
def test_a_strategy(
    opened: Storage,
    clock: ManualClock,
    strategy: str,
    times: list[int],
    answers: list[int],
    remaining: int,
    reset_s: int,
) -> None:
    """Hits, tests, remaining units and reset times agree, for threads and asyncio."""
    clock.advance(30)
    limiter, item = opened.strategy(strategy), parse("5/minute")
    passed_s = 0
    for time_s, answer in zip(times, answers, strict=True):
        clock.advance(time_s - passed_s)
        passed_s = time_s
        assert limiter.test(item, "ann") == bool(answer)
        assert limiter.hit(item, "ann") == bool(answer)
    before_s = time.time()
    stats = limiter.get_window_stats(item, "ann")
    assert stats.remaining == remaining
    # A sliding window waits for the last thousandth of a unit, too.
    assert before_s + reset_s - 0.001 <= stats.reset_time <= time.time() + reset_s + 0.03
    limiter.clear(item, "ann")
    assert limiter.get_window_stats(item, "ann").remaining == 5
    assert limiter.hit(item, "ann", cost=5)


@every_strategy
def test_after_the_reset_time_a_hit_passes(
    opened: Storage, clock: ManualClock, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the wait is not longer than necessary: a hundredth of the window earlier it is denied."""
    # A busy machine may stop the test between two readings of the wall clock.
    monkeypatch.setattr(time, "time", lambda: float(NOW_S))
    clock.advance(17.123456)
    limiter, item = opened.strategy(strategy), parse("3/minute")
    assert [limiter.hit(item) for _ in range(4)] == [True, True, True, False]
    wait_s = limiter.get_window_stats(item).reset_time - time.time()
    clock.advance(wait_s - 0.6)
    assert not limiter.test(item)
    clock.advance(0.6 + 0.03)
    assert limiter.hit(item)


@every_strategy
def test_costs(opened: Storage, clock: ManualClock, strategy: str) -> None:
    """A cost above the limit never passes, a cost of 0 always does; negative ones are an error."""
    limiter, item = opened.strategy(strategy), parse("10/minute")
    assert not limiter.hit(item, "huge", cost=11)
    assert not limiter.hit(item, "most", cost=2_000_000_000)
    assert limiter.hit(item, "ann", cost=7)
    assert not limiter.test(item, "ann", cost=4)
    assert limiter.hit(item, "ann", cost=0)
    assert limiter.hit(item, "ann", cost=3)
    with pytest.raises(InvalidCost, match=r"amount=-1 is not a whole number from 0 up"):
        limiter.hit(item, "ann", cost=-1)


def test_a_denied_hit_of_a_fixed_window_counts_as_in_limits(
    opened: Storage, clock: ManualClock
) -> None:
    """As in all storages of `limits`; the window still ends one minute after its start."""
    limiter, item = opened.strategy("fixed-window"), parse("10/minute")
    assert not limiter.hit(item, cost=11)
    clock.advance(59)
    assert not limiter.hit(item)
    assert opened.get(item.key_for()) == 12
    clock.advance(1)
    assert opened.get(item.key_for()) == 0
    assert limiter.hit(item, cost=10)


@every_strategy
def test_windows_of_many_lengths(opened: Storage, clock: ManualClock, strategy: str) -> None:
    """From a second to a year, which is 360 days for `limits`."""
    limiter = opened.strategy(strategy)
    for rate in ("2/second", "2/5 second", "2/hour", "2/day", "2/month", "2/year"):
        item = parse(rate)
        assert [limiter.hit(item, "ann") for _ in range(3)] == [True, True, False], rate
    clock.advance(2 * 360 * 86_400)
    assert limiter.hit(parse("2/year"), "ann", cost=2)


def test_a_limit_above_a_million_in_a_sliding_window(opened: Storage, clock: ManualClock) -> None:
    """It counts in whole units, and is cleared as any other."""
    limiter, item = opened.strategy("sliding-window-counter"), parse("3000000/minute")
    assert limiter.hit(item, cost=2_999_999)
    assert [limiter.hit(item), limiter.hit(item)] == [True, False]
    assert limiter.get_window_stats(item).remaining == 0
    limiter.clear(item)
    assert limiter.get_window_stats(item).remaining == 3_000_000


# ------------------------------------------------------------------------------------- properties

HITS = st.lists(st.tuples(st.integers(0, 45_000), st.integers(1, 3)), max_size=40)


@given(hits=HITS, limit=st.integers(1, 6))
def test_the_fixed_window_counts_from_the_first_hit(
    hits: list[tuple[int, int]], limit: int
) -> None:
    """`incr` returns the units of all hits in the window, and `get` the same, at any time."""
    with use_clock(ManualClock(start=NOW_S)) as clock:
        storage = open_storage("ratekeeper+memory://?capacity=100")
        now_ms, start_ms, count = 0, -60_000, 0
        for wait_ms, amount in hits:
            clock.advance_ns(wait_ms * 1_000_000)
            now_ms += wait_ms
            if now_ms >= start_ms + 60_000:
                start_ms, count = now_ms, 0
            assert storage.get("ann") == count
            count += amount
            assert storage.incr("ann", 60, amount) == storage.get("ann") == count


@given(hits=HITS, limit=st.integers(1, 6))
def test_the_moving_window_is_exact(hits: list[tuple[int, int]], limit: int) -> None:
    """A hit passes if and only if at most `limit` units are in the last minute with it."""
    with use_clock(ManualClock(start=NOW_S)) as clock:
        storage = open_storage("ratekeeper+memory://?capacity=100&log_bytes=65536")
        now_ms, units = 0, []
        for wait_ms, amount in hits:
            clock.advance_ns(wait_ms * 1_000_000)
            now_ms += wait_ms
            units = [each_ms for each_ms in units if each_ms > now_ms - 60_000]
            passes = len(units) + amount <= limit
            assert storage.acquire_entry("ann", limit, 60, amount) == passes
            units += [now_ms] * amount * passes
            start_s, count = storage.get_moving_window("ann", limit, 60)
            assert count == len(units)
            if units:
                assert start_s == pytest.approx(time.time() - (now_ms - units[0]) / 1_000, abs=1)


@given(hits=HITS, limit=st.integers(1, 6))
def test_the_sliding_window_follows_the_formula_of_limits(
    hits: list[tuple[int, int]], limit: int
) -> None:
    """Never looser; stricter only if less than a thousandth of a unit is missing.

    The numbers for the strategy have the same weighted count.
    """
    with use_clock(ManualClock(start=NOW_S)) as clock:
        storage = open_storage("ratekeeper+memory://?capacity=100")
        now_ms, counts = 0, {}
        for wait_ms, amount in hits:
            clock.advance_ns(wait_ms * 1_000_000)
            now_ms += wait_ms
            window, elapsed_ms = divmod(now_ms, 60_000)
            weighted = counts.get(window - 1, 0) * Fraction(60_000 - elapsed_ms, 60_000)
            weighted += counts.get(window, 0)
            passes = storage.acquire_sliding_window_entry("ann", limit, 60, amount)
            if passes:
                assert floor(weighted) + amount <= limit
                counts[window] = counts.get(window, 0) + amount
                weighted += amount
            else:
                assert floor(weighted + Fraction(1, 1_000)) + amount > limit
            previous, previous_s, current, current_s = storage.get_sliding_window("ann", 60)
            assert floor(weighted) <= floor(previous * previous_s / 60 + current)
            assert floor(previous * previous_s / 60 + current) <= floor(
                weighted + Fraction(1, 1_000)
            )
            assert current_s == pytest.approx(120 - elapsed_ms / 1_000)


@given(st.lists(st.text(max_size=30), min_size=2, max_size=2, unique=True), st.booleans())
def test_no_two_keys_share_a_count(keys: list[str], long: bool) -> None:
    """Keys may be any text: empty, long, with separators, with halves of surrogate pairs."""
    first, second = (key + "x" * 600 * long for key in keys)
    storage = open_storage("ratekeeper+memory://?capacity=100")
    assert (storage.incr(first, 60), storage.incr(second, 60)) == (1, 1)
    assert (storage.incr(first, 60), storage.get(first), storage.get(second)) == (2, 2, 1)
    storage.clear(first)
    assert (storage.get(first), storage.get(second)) == (0, 1)


def test_a_digest_cannot_be_sent_as_a_key() -> None:
    """A client that names itself as the digest of another key gets its own count."""
    digest = _subject_of("ä")
    assert digest != "ä"
    assert _subject_of(digest) != digest


# ------------------------------------------------------------------------------------- counters


@pytest.mark.parametrize("key", ["job", "", "a/b", "LIMITER/ann/5/1/minute", "x/5/0/minute"])
def test_a_counter_is_read_by_its_key_alone(
    opened: Storage, clock: ManualClock, uri: str, key: str
) -> None:
    """By another process, too: the window is in the key or in the store."""
    assert opened.get(key) == 0
    assert opened.get_expiry(key) == pytest.approx(time.time(), abs=1)
    assert (opened.incr(key, 60), opened.incr(key, 60, 10)) == (1, 11)
    clock.advance(20)
    with Storage(uri, None) if uri != "memory://" else nullcontext(opened) as other:
        assert other.get(key) == 11
        assert other.get_expiry(key) == pytest.approx(time.time() + 40, abs=1)
        clock.advance(40)
        assert other.get(key) == 0
        assert opened.incr(key, 60) == other.get(key) == 1
        opened.clear(key)
        assert other.get(key) == 0


class TickingClock(ManualClock):
    """A clock that moves on with each reading."""

    __slots__ = ("tick_ns",)

    def now_ns(self) -> int:
        self.advance_ns(self.tick_ns)
        return super().now_ns()


def test_a_stored_window_is_replaced_by_the_next_one(uri: str) -> None:
    """It is written a moment after its counter, and may not have ended when the next one starts."""
    clock = TickingClock(start=NOW_S)
    clock.tick_ns = 1_000_000
    with use_clock(clock), Storage(uri, None) as storage:
        storage.incr("job", 60)
        clock.tick_ns = 1_000
        clock.advance_ns(NOW_S * NS_PER_SECOND + 60_001_000_000 - clock.now_ns())
        assert storage.incr("job", 60) == 1
        assert storage.get_expiry("job") == pytest.approx(time.time() + 60, abs=1)
        clock.advance(60)
        assert storage.get("job") == 0


def test_a_full_counter_is_above_every_limit(opened: Storage, clock: ManualClock) -> None:
    """A billion hits fit into a window; the next one is not counted, and passes no limit."""
    assert opened.incr("ann", 60, 1_000_000_000) == 1_000_000_000
    assert opened.incr("ann", 60) == NOT_COUNTED
    assert opened.incr("ann", 60, 1_000_000_001) == NOT_COUNTED
    item = parse("5000000000/minute")
    limiter = opened.strategy("fixed-window")
    assert [limiter.hit(item, cost=1_000_000_000), limiter.hit(item)] == [True, False]


def test_reset_forgets_all_counts(opened: Storage, clock: ManualClock) -> None:
    """Of all strategies; it returns how many there were."""
    item = parse("1/minute")
    for strategy in STRATEGIES:
        limiter = opened.strategy(strategy)
        assert [limiter.hit(item), limiter.hit(item)] == [True, False]
    assert opened.reset() == 3
    assert all(opened.strategy(strategy).hit(item) for strategy in STRATEGIES)


@pytest.mark.parametrize(
    "uri", ["shared", pytest.param("redis", marks=pytest.mark.server)], indirect=True
)
def test_key_prefixes_separate_counts(uri: str, clock: ManualClock, tmp_path: Path) -> None:
    """On Redis, `reset` forgets only those of its own prefix."""
    item, options = parse("5/minute"), ({"key_prefix": "shop"}, {"key_prefix": "blog"})
    with Storage(uri, None, **options[0]) as shop, Storage(uri, None, **options[1]) as blog:
        key = item.key_for("ann")
        assert (shop.incr(key, 60), shop.incr(key, 60), blog.incr(key, 60)) == (1, 2, 1)
        if uri.startswith("redis"):
            assert (shop.reset(), shop.get(key), blog.get(key)) == (1, 0, 1)


@pytest.mark.server
@pytest.mark.parametrize("uri", ["redis"], indirect=True)
def test_key_prefixes_separate_counts_with_a_prefix_in_the_uri(
    uri: str, clock: ManualClock
) -> None:
    """Applications that share a prefix of Redis do not use up each other's limits."""
    common = f"{uri}{'&' if '?' in uri else '?'}prefix=common"
    key = parse("5/minute").key_for("ann")
    with (
        Storage(common, None, key_prefix="shop") as shop,
        Storage(common, None, key_prefix="blog") as blog,
    ):
        assert (shop.incr(key, 60), shop.incr(key, 60), blog.incr(key, 60)) == (1, 2, 1)


# ------------------------------------------------------------------------------------- exactness


@every_strategy
def test_threads_share_a_limit_exactly(uri: str, clock: ManualClock, strategy: str) -> None:
    """Of 400 hits by 8 threads, exactly 100 pass."""
    item = parse("100/minute")
    with Storage(uri, None) as storage, ThreadPoolExecutor(8) as pool:
        limiter = storage.strategy(strategy)
        assert sum(pool.map(lambda _: limiter.hit(item, "ann"), range(400))) == 100


@every_strategy
def test_tasks_share_a_limit_exactly(uri: str, clock: ManualClock, strategy: str) -> None:
    """Of 200 concurrent hits in an event loop, exactly 50 pass."""

    async def hits() -> int:
        options = PATIENCE if "redis" in uri else {}
        storage = storage_from_string(f"async+ratekeeper+{uri}", **options)
        limiter = limits.aio.strategies.STRATEGIES[strategy](storage)
        item = parse("50/minute")
        passed = sum(await asyncio.gather(*(limiter.hit(item, "ann") for _ in range(200))))
        await storage.store.aclose()
        return passed

    assert asyncio.run(hits()) == 50


_WORKER = """
import sys
import ratekeeper.limits
from limits import parse
from limits.storage import storage_from_string
from limits.strategies import STRATEGIES

uri, item = sys.argv[1], parse("100/300 day")
for name, strategy in STRATEGIES.items():
    limiter = strategy(storage_from_string(uri))
    print(name, sum(limiter.hit(item, name) for _ in range(80)))
"""


@pytest.mark.parametrize(("scheme", "admitted"), [("ratekeeper+shared", 100), ("memory", 240)])
def test_processes_share_a_limit_exactly(scheme: str, admitted: int, tmp_path: Path) -> None:
    """Three processes that hit 80 times each pass 100 times; each in its own memory, 240 times."""
    uri = f"{scheme}://" if scheme == "memory" else f"{scheme}://{tmp_path}/file"
    command = [sys.executable, "-c", _WORKER, uri]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    counts = dict.fromkeys(STRATEGIES, 0)
    for process in processes:
        output, _ = process.communicate(timeout=60)
        for line in output.splitlines():
            counts[line.split()[0]] += int(line.split()[1])
    assert counts == dict.fromkeys(STRATEGIES, admitted)


# ------------------------------------------------------------------------------------- frameworks


def test_flask_limiter(tmp_path: Path) -> None:
    """Its decorators, headers and `reset` work with one changed line."""
    app = Flask(__name__)
    limiter = flask_limiter.Limiter(
        flask_limiter.util.get_remote_address,
        app=app,
        default_limits=["3/minute"],
        storage_uri=f"ratekeeper+shared://{tmp_path}/app.limits",
        storage_options={"capacity": 1_000},
        strategy="moving-window",
        headers_enabled=True,
    )

    @app.get("/")
    def index() -> str:
        return "hello"

    @app.get("/slow")
    @limiter.limit("1/hour")
    def slow() -> str:
        return "slow"

    client = app.test_client()
    answers = [client.get("/") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["X-RateLimit-Remaining"] for answer in answers] == ["2", "1", "0", "0"]
    assert 58 <= int(answers[-1].headers["Retry-After"]) <= 60
    assert [client.get("/slow").status_code for _ in range(2)] == [200, 429]
    limiter.reset()
    assert client.get("/slow").status_code == 200


@every_strategy
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize(
    ("options", "statuses"),
    [
        ({}, [500, 500, 500]),
        ({"swallow_errors": True}, [200, 200, 200]),
        ({"in_memory_fallback_enabled": True}, [200, 200, 429]),
        ({"in_memory_fallback": ["1/minute"]}, [200, 429, 429]),
    ],
)
def test_flask_limiter_falls_back(
    strategy: str, options: dict[str, Any], statuses: list[int], wrap: bool
) -> None:
    """While the store is unavailable, the options of Flask-Limiter work as with any storage."""
    app = Flask(__name__)
    flask_limiter.Limiter(
        lambda: "ann",
        app=app,
        default_limits=["2/minute"],
        storage_uri="ratekeeper+redis://127.0.0.1:1",
        storage_options={"wrap_exceptions": wrap},
        strategy=strategy,
        headers_enabled=True,
        **options,
    )
    app.add_url_rule("/", view_func=lambda: "hello")
    client = app.test_client()
    assert [client.get("/").status_code for _ in statuses] == statuses


async def test_slowapi(tmp_path: Path) -> None:
    """Its decorator works with one changed line."""
    uri = f"ratekeeper+shared://{tmp_path}/app.limits"
    limiter = slowapi.Limiter(slowapi.util.get_remote_address, storage_uri=uri)

    @limiter.limit("2/minute")
    async def index(request: Request) -> Response:
        return PlainTextResponse("hello")

    app = Starlette(routes=[Route("/", index)])
    app.state.limiter = limiter
    app.add_exception_handler(
        slowapi.errors.RateLimitExceeded,
        slowapi._rate_limit_exceeded_handler,
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        assert [(await client.get("/")).status_code for _ in range(3)] == [200, 200, 429]


# ------------------------------------------------------------------------------------- errors


def test_every_scheme_of_our_stores_is_registered() -> None:
    """With `ratekeeper+`, and with `async+ratekeeper+`."""
    assert set(SCHEMES) == {f"ratekeeper+{scheme}" for scheme in STORE_SCHEMES}
    assert set(ASYNC_SCHEMES) == {f"async+{scheme}" for scheme in SCHEMES}
    for schemes, kind in ((SCHEMES, RatekeeperStorage), (ASYNC_SCHEMES, AsyncRatekeeperStorage)):
        assert all(limits._storage_scheme.SCHEMES[scheme] is kind for scheme in schemes)


def test_the_import_registers_the_storages() -> None:
    """Without it, `limits` raises the error that docs/limits-storage.md explains."""
    program = (
        "from limits.storage import storage_from_string\n"
        "from limits.errors import ConfigurationError\n"
        "try: storage_from_string('ratekeeper+memory://')\n"
        "except ConfigurationError as error: print(error)\n"
        "import ratekeeper.limits\n"
        "print(storage_from_string('ratekeeper+memory://').incr('ann', 60))\n"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said == "unknown storage scheme : ratekeeper+memory://\n1\n"


@pytest.mark.parametrize(
    ("uri", "options", "says"),
    [
        (
            "ratekeeper+shard:///run/x",
            {},
            r"'ratekeeper\+shard' is not a scheme; the closest is rat.*\+shared://",
        ),
        ("ratekeeper://", {}, "'ratekeeper' is not a scheme; the closest is ratekeeper"),
        (
            "async+ratekeeper+rediss+clutser://h",
            {},
            r"closest is async\+ratekeeper\+rediss\+cluster",
        ),
        (
            "ratekeeper+shared://",
            {},
            r'no absolute path; with three slashes.*"shared:///run/api.limits"',
        ),
        ("ratekeeper+shared://run/app.limits", {}, r"no absolute path; with three slashes"),
        (
            "Ratekeeper+Shared://",
            {"capacity": 1},
            r"no absolute path.*\(with ratekeeper\+ in front as storage_uri, for example \"rate",
        ),
        ("ratekeeper+memory://here", {}, r"memory:// is this process and has no address"),
        (
            "ratekeeper+memory://",
            {"colour": "red"},
            r"no option colour; the options are capacity, log_bytes",
        ),
        (
            "ratekeeper+redis://h",
            {"socket_timeout": 1},
            r"no option socket_timeout; the options are .*deadline_ms, connect_ms",
        ),
        (
            "ratekeeper+memory://",
            {"key_prefx": "shop"},
            r"^storage_options has no key_prefx; did you mean key_prefix\?",
        ),
        (
            "ratekeeper+memory://?key_prefix=shop",
            {},
            r"^key_prefix belongs in storage_options, and not in the URI",
        ),
        (
            "ratekeeper+memory://",
            {"key_prefix": ""},
            r"key_prefix='' is not printable text of 1 to 32",
        ),
        ("ratekeeper+redis://h", {"key_prefix": "a{b"}, r"prefix"),
        ("ratekeeper+redis://:s3cret@h:x", {}, r"^(?!.*s3cret)"),
        ("ratekeeper+s3cret pass://h", {}, r"^(?!.*s3cret)"),
        ("ratekeeper+shared:///nowhere/x", {}, r"No such file or directory; create its folder"),
        ("ratekeeper+memory://", {"uri": "memory://"}, r"give it as storage_uri only"),
        (
            "ratekeeper+shared:/run/x",
            {},
            r'there is no "://"; the closest is ratekeeper\+shared://',
        ),
    ],
)
def test_a_mistake_in_a_uri_is_explained(uri: str, options: dict[str, Any], says: str) -> None:
    """With the error that callers of `limits` know, the place and the next step."""
    with pytest.raises(ConfigurationError, match=says):
        open_storage(uri, **options)


def test_other_uris_of_limits_are_not_touched() -> None:
    """`limits` opens its own storages and rejects unknown ones as before."""
    assert type(storage_from_string("memory://")) is limits.storage.MemoryStorage
    with pytest.raises(ConfigurationError, match=r"^unknown storage scheme : blah://$"):
        storage_from_string("blah://")


def test_a_storage_needs_a_uri_of_its_own() -> None:
    """A class that is used without its URI names one."""
    with pytest.raises(
        ConfigurationError, match=r"… does not begin with ratekeeper\+; for example"
    ):
        RatekeeperStorage()
    with pytest.raises(ConfigurationError, match=r"'redis' does not begin with ratekeeper\+"):
        RatekeeperStorage("redis://:s3cret@host")


def test_a_limit_that_a_store_cannot_keep_is_explained() -> None:
    """Too many units in a moving window, and a window of more than a year."""
    storage = open_storage("ratekeeper+memory://")
    with pytest.raises(
        ConfigurationError, match=r"moving window of 2,000,000 is above 1,000,000.*sliding"
    ):
        storage.acquire_entry("ann", 2_000_000, 60)
    with pytest.raises(ConfigurationError, match=r"a window of 720 days is longer than 366 days"):
        storage.incr("ann", 2 * 360 * 86_400)
    assert storage.get("LIMITER/ann/1/999999999/year") == 0


def test_the_prefix_and_the_deadline_on_redis() -> None:
    """Both have other defaults than a Limiter's; a URI's own are kept."""
    assert (
        open_storage("ratekeeper+redis://localhost", key_prefix="shop").store.config.prefix
        == "shop"
    )
    own = open_storage("ratekeeper+redis://localhost?prefix=rk&deadline_ms=20").store.config
    assert (own.prefix, own.deadline_ns) == ("rk", 20_000_000)
    default = open_storage("ratekeeper+redis://localhost").store.config
    # A timeout is an error response, so a call waits longer than one of a Limiter.
    assert (default.prefix, default.deadline_ns) == ("LIMITS", 1_000_000_000)


@pytest.mark.parametrize("wrap", [False, True])
def test_an_error_of_the_store_is_raised_or_wrapped(wrap: bool) -> None:
    """As `wrap_exceptions` says; `check` returns False. Flask-Limiter falls back by both."""
    storage = open_storage("ratekeeper+redis://127.0.0.1:1", wrap_exceptions=wrap)
    expected = StorageError if wrap else StoreUnavailable
    for call in (
        lambda: storage.incr("ann", 60),
        lambda: storage.acquire_entry("ann", 1, 60),
        lambda: storage.get_sliding_window("ann", 60),
        storage.reset,
    ):
        with pytest.raises(expected) as caught:
            call()
        if wrap:
            assert isinstance(caught.value.storage_error, StoreError)
    assert storage.check() is False
    assert asyncio.run(open_storage("async+ratekeeper+redis://127.0.0.1:1").check()) is False


def test_check_follows_the_server() -> None:
    """It is True again when the server is back: Flask-Limiter leaves its fallback by it."""
    with Single() as server:
        storage = open_storage(f"ratekeeper+{server.uri}?breaker=off", **PATIENCE)
        assert storage.check()
        server.kill()
        assert not storage.check()
        server.start()
        assert storage.check()
        storage.store.close()


def test_the_number_of_prepared_counters_is_bounded() -> None:
    """A caller that uses a new limit for each hit does not fill the memory."""
    storage = open_storage("ratekeeper+memory://")
    for limit in range(1, 1_100):
        assert storage.acquire_entry("ann", limit, 3_600, 0)
        assert storage.acquire_entry(str(limit), limit, 3_600)
    assert storage._calls._counters.moving.cache_info().currsize == 1_024
