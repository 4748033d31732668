"""Outgoing calls with real servers, stores and processes: limits as the other side sees them."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from ratekeeper import AsyncLimiter, Limiter
from ratekeeper.httpx import AsyncLimitTransport, LimitTransport
from tests.http_thread import serving
from tests.integration.outgoing_worker import LIMIT, WINDOW_NS
from tests.integration.tcp_proxy import Proxy
from tests.redis_servers import Single, running

PROCESSES, THREADS, REQUESTS = 3, 4, 2
DELAY_SECONDS_MAX = 0.3
# The limit of the calls during an outage, and a stop for a loop that nothing paces.
RATE, CAPACITY = 20, 5
LIMITS = f"{RATE}/second capacity {CAPACITY}"
CALLS_MAX = 500
# A busy machine must not lead a check past its deadline.
PATIENT = "?deadline_ms=10000&connect_ms=10000"


class Recorder(ThreadingHTTPServer):
    """A partner's server: it records when requests arrive."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.arrived_ns: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Recorder

    def do_GET(self) -> None:
        self.server.arrived_ns.append(time.monotonic_ns())
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def partner() -> Iterator[Recorder]:
    """Run a server on loopback for one test."""
    with serving(Recorder()) as server:
        yield server


@pytest.fixture(params=["shared", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URI of a store that processes share."""
    if request.param == "shared":
        return f"shared://{tmp_path}/partner.limits?capacity=1000"
    server = running("single")
    server.flush()
    return server.uri + PATIENT


def test_processes_keep_a_limit_through_a_slow_network(partner: Recorder, store: str) -> None:
    """No second has more than ten arrivals, although each request takes up to 0.3 s longer."""
    delays = random.Random(7)
    with Proxy(partner.server_port) as proxy:
        proxy.up_seconds = lambda: delays.random() * DELAY_SECONDS_MAX
        url = f"http://127.0.0.1:{proxy.port}/"
        program = [sys.executable, "-m", "tests.integration.outgoing_worker", url, store]
        program += [str(THREADS), str(REQUESTS)]
        workers = [
            subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(PROCESSES)
        ]
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        # All of them first: `communicate` waits for the end of one.
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        ends = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * PROCESSES, ends
    times = sorted(partner.arrived_ns)
    assert len(times) == PROCESSES * THREADS * REQUESTS
    # The request that is ten places after another arrives a window later.
    apart = [after - before for before, after in zip(times, times[LIMIT:], strict=False)]
    assert min(apart) >= WINDOW_NS


@contextmanager
def _waits(store: str, url: str) -> Iterator[Callable[[], bool]]:
    """Yield a call that waits by `Limiter.wait`, and returns True if the store decided."""
    with Limiter(LIMITS, store=store) as limiter, httpx.Client() as client:

        def call() -> bool:
            decision = limiter.wait("partner")
            client.get(url)
            return not decision.degraded

        yield call


@contextmanager
def _waits_async(store: str, url: str) -> Iterator[Callable[[], bool]]:
    with asyncio.Runner() as runner, httpx.Client() as client:
        limiter = AsyncLimiter(LIMITS, store=store)

        def call() -> bool:
            decision = runner.run(limiter.wait("partner"))
            client.get(url)
            return not decision.degraded

        yield call
        runner.run(limiter.close())


@contextmanager
def _transport(store: str, url: str) -> Iterator[Callable[[], bool]]:
    with (
        Limiter(LIMITS, store=store) as limiter,
        httpx.Client(transport=LimitTransport(limiter)) as client,
    ):

        def call() -> bool:
            client.get(url)
            return not limiter.peek("any").degraded

        yield call


@pytest.mark.parametrize("calling", [_waits, _waits_async, _transport])
def test_calls_stay_paced_when_redis_dies(
    partner: Recorder,
    calling: Callable[[str, str], AbstractContextManager[Callable[[], bool]]],
) -> None:
    """The partner sees the pace of one machine, and not a loop that runs as fast as it can."""
    with Single() as redis, calling(redis.uri + PATIENT, partner.url) as call:
        began = time.monotonic()
        decided = [call() for _ in range(2 * CAPACITY)]
        redis.kill()
        end = time.monotonic() + 1
        while time.monotonic() < end and len(decided) < CALLS_MAX:
            decided.append(call())
        elapsed = time.monotonic() - began
    assert decided[0]
    assert not decided[-1]
    # The machine's own counts start with a full bucket when Redis dies.
    assert len(partner.arrived_ns) == len(decided) <= 2 * CAPACITY + RATE * elapsed


def _denying(request: httpx.Request) -> httpx.Response:
    return httpx.Response(429, headers={"Retry-After": "0.4"})


def _allowing(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200)


def test_transports_share_on_a_store_what_a_server_says(store: str) -> None:
    """A transport of another process waits as long as the server said to the first one."""
    denied = LimitTransport(
        "10/second", store=store, attempts_max=1, transport=httpx.MockTransport(_denying)
    )
    other = LimitTransport("10/second", store=store, transport=httpx.MockTransport(_allowing))
    with httpx.Client(transport=denied) as first, httpx.Client(transport=other) as second:
        assert second.get("http://partner.test").status_code == 200
        began = time.monotonic()
        assert first.get("http://partner.test").status_code == 429
        assert second.get("http://partner.test").status_code == 200
        assert time.monotonic() - began >= 0.4


async def test_async_transports_share_on_a_store_what_a_server_says(store: str) -> None:
    """Four requests are in flight and denied at the same time: they make one pause for all."""
    in_flight = asyncio.Barrier(4)

    async def deny(request: httpx.Request) -> httpx.Response:
        await in_flight.wait()
        return _denying(request)

    denied = AsyncLimitTransport(
        "10/second", store=store, attempts_max=1, transport=httpx.MockTransport(deny)
    )
    other = AsyncLimitTransport("10/second", store=store, transport=httpx.MockTransport(_allowing))
    async with (
        httpx.AsyncClient(transport=denied) as first,
        httpx.AsyncClient(transport=other) as second,
    ):
        began = time.monotonic()
        answers = await asyncio.gather(*(first.get("http://partner.test") for _ in range(4)))
        assert [answer.status_code for answer in answers] == [429] * 4
        assert (await second.get("http://partner.test")).status_code == 200
        assert time.monotonic() - began >= 0.4


def test_a_slot_of_another_process_is_free_a_window_after_its_response(store: str) -> None:
    """A waiting transport looks again after a window, and finds the slot that was given back."""
    settings = {"store": store, "arrives_within": 30}
    served = httpx.MockTransport(_allowing)
    one = LimitTransport("1/200ms", transport=served, **settings)  # type: ignore[arg-type]  # a dict
    two = LimitTransport("1/200ms", transport=served, **settings)  # type: ignore[arg-type]  # a dict
    with httpx.Client(transport=one) as first, httpx.Client(transport=two) as second:
        began = time.monotonic()
        first.get("http://partner.test")
        second.get("http://partner.test")
        assert 0.2 <= time.monotonic() - began < 10
