"""Faults of the network, each with its outcome, for threads and asyncio.

A relay stands between the store and a real server. A check that got its answer was charged once. Of
the checks that failed, only those whose error says so may have been charged, once.
"""

from __future__ import annotations

import asyncio
import http.server
import signal
import socket
import time
from collections.abc import Callable, Iterator
from itertools import count, cycle
from typing import Any, cast

import pytest
import uvloop

from ratekeeper import AsyncLimiter, Decision, Limit, Limiter
from ratekeeper.core.errors import StoreError, StoreTimeout, StoreUnavailable
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.redis import connections
from ratekeeper.decide.stores.redis.store import RedisStore
from tests.http_thread import serving
from tests.integration.redis_wires import (
    COUNTED,
    LATE_SECONDS_MAX,
    SECONDS_MAX,
    YEAR,
    Client,
    Load,
    Outcome,
    admitted,
    both_wires,
    charged_at_most,
    client,
    counted,
    errors_of,
    outcome,
    timed,
)
from tests.integration.tcp_proxy import Mode, Proxy
from tests.redis_servers import Single, Tls, running, until
from tests.redis_servers.ports import HOST


@pytest.fixture(scope="module")
def server() -> Iterator[Single]:
    """Return the server that the tests of this file share."""
    with Single() as started:
        yield started


@both_wires
@pytest.mark.parametrize("mode", ["hold", "swallow"])
def test_a_silent_connection_is_replaced(server: Single, key: str, wire: str, mode: Mode) -> None:
    """It is not closed. Calls time out, and then a new connection takes its place, under load."""
    with Proxy(server.port) as proxy, client(wire, proxy.uri, deadline_ms=60) as api:
        with Load(api, key, workers=8) as load:
            until(lambda: len(load.outcomes) > 50, "there is some load", SECONDS_MAX)
            proxy.mode = mode
            until(
                lambda: any(isinstance(each, StoreTimeout) for each in errors_of(load.outcomes)),
                "calls time out",
                SECONDS_MAX,
            )
            proxy.mode = "pass"
            before = len(load.outcomes)
            until(
                lambda: admitted(load.outcomes[before:]) > 50,
                "a new connection is in use",
                SECONDS_MAX,
            )
        charged = counted(server.uri, key)
        assert admitted(load.outcomes) <= charged <= charged_at_most(load.outcomes)
        assert mode == "hold" or charged > admitted(load.outcomes)


@both_wires
@pytest.mark.parametrize("mode", ["hold", "swallow", "cut"])
def test_each_failed_call_says_whether_it_may_have_been_charged(
    server: Single, key: str, wire: str, mode: Mode
) -> None:
    """One call at a time, each ends by its deadline; when the network works again, none fails."""
    with Proxy(server.port) as proxy, client(wire, proxy.uri, deadline_ms=200) as api:
        outcomes = [outcome(api.start(key)) for _ in range(3)]
        proxy.mode = mode
        for _ in range(5):
            seconds, found = timed(lambda: outcome(api.start(key)))
            assert seconds < 0.2 + LATE_SECONDS_MAX
            assert isinstance(found, StoreTimeout | StoreUnavailable)
            outcomes.append(found)
        assert admitted(outcomes) <= counted(server.uri, key) <= charged_at_most(outcomes)
        proxy.mode = "pass"
        until(api.works, "a new connection is in use", SECONDS_MAX)
        until(
            lambda: not errors_of([outcome(api.start(key)) for _ in range(20)]),
            "twenty calls in a row are answered",
            SECONDS_MAX,
        )


@both_wires
def test_a_late_connection_does_not_hide_that_a_call_was_sent(
    server: Single, key: str, wire: str
) -> None:
    """Connecting takes longer than the deadline, and no reply comes: it may have been counted."""
    with Proxy(server.port, "swallow") as proxy:
        proxy.accept_seconds = 0.6
        with client(wire, proxy.uri, deadline_ms=300, connect_ms=20_000) as api:
            error = outcome(api.start(key))
            assert isinstance(error, StoreTimeout)
            assert "may have been counted" in str(error)
    assert counted(server.uri, key) == 1


@both_wires
def test_a_reply_may_arrive_byte_by_byte(server: Single, key: str, wire: str) -> None:
    """Within the deadline; a single byte does not extend the deadline."""
    with Proxy(server.port) as proxy, client(wire, proxy.uri, deadline_ms=2_000) as api:
        assert api.check(key).remaining == COUNTED.limit - 1
        proxy.mode = "drip"
        assert api.check(key).remaining == COUNTED.limit - 2
        proxy.drip_seconds = 0.08
        seconds, error = timed(lambda: outcome(api.start(key)))
        assert isinstance(error, StoreTimeout)
        assert seconds < 2 + 2  # all of them would take five seconds
        proxy.mode = "pass"
        until(api.works, "a new connection is in use", SECONDS_MAX)
        assert api.check(key).remaining == COUNTED.limit - 4


LISTS = (b"*0\r\n", b"*1\r\n:5\r\n", b"*3\r\n:5\r\n$1\r\na\r\n:1\r\n", b"*1\r\n$-1\r\n")
GARBAGE = (
    *LISTS,
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\x00\xff\x00",
    b"+OK\r\n",
    b":1\r\n",
    b"$-1\r\n",
    b"$1000000000\r\nabc",
    b"-\r\n",
    b"-MOVED\r\n",
    b"-ASK 5 \r\n",
    b"+OK\r\n+OK\r\n+OK\r\n",
)


@both_wires
@pytest.mark.parametrize("garbage", LISTS)
def test_invalid_replies_for_several_subjects_are_an_error(
    server: Single, key: str, wire: str, garbage: bytes
) -> None:
    """A reply that the script cannot give says nothing about units to give back."""
    with (
        Proxy(server.port) as proxy,
        client(wire, proxy.uri, deadline_ms=1_500, connect_ms=5_000) as api,
    ):
        subjects = [key, f"{key} too"]
        assert all(api.start_all(subjects).result())
        proxy.answer = 2 * garbage
        proxy.mode = "once"
        assert isinstance(api.start_all(subjects).exception(SECONDS_MAX), StoreError)
        until(lambda: not errors_of([outcome(api.start(key))]), "calls are answered", SECONDS_MAX)


@both_wires
@pytest.mark.parametrize("garbage", GARBAGE)
def test_an_invalid_reply_is_a_store_error(
    server: Single, key: str, wire: str, garbage: bytes
) -> None:
    """The next call works, on a new connection or the same."""
    with (
        Proxy(server.port) as proxy,
        client(wire, proxy.uri, deadline_ms=1_500, connect_ms=5_000) as api,
    ):
        assert api.check(key).allowed
        proxy.answer = garbage
        proxy.mode = "once"
        assert isinstance(outcome(api.start(key)), StoreError)
        until(api.works, "a new connection is in use", SECONDS_MAX)
        assert api.check(key).remaining == COUNTED.limit - 2


@both_wires
@pytest.mark.parametrize("head", [b"*2000000000\r\n", b"*1\r\n*2000000000\r\n", b"%1000000000\r\n"])
def test_a_reply_that_announces_too_many_elements_is_rejected_at_once(
    server: Single, key: str, wire: str, head: bytes
) -> None:
    """The call does not wait for them until its deadline, and no memory is allocated for them."""
    with Proxy(server.port) as proxy, client(wire, proxy.uri, deadline_ms=60_000) as api:
        assert api.check(key).allowed
        proxy.answer = head
        proxy.mode = "once"
        seconds, error = timed(lambda: outcome(api.start(key)))
        assert isinstance(error, StoreUnavailable)
        assert "an array of more than 99,999 elements" in str(error)
        assert seconds < 10
        assert api.check(key).remaining == COUNTED.limit - 2  # the rejected call never arrived


@both_wires
@pytest.mark.parametrize("refusal", ["TRYAGAIN x", "CLUSTERDOWN x", "LOADING x", "BUSY x"])
def test_a_temporary_refusal_is_retried(server: Single, key: str, wire: str, refusal: str) -> None:
    """Also refusals that a single server never sends; the call is sent again once."""
    with Proxy(server.port) as proxy, client(wire, proxy.uri) as api:
        assert api.check(key).allowed
        proxy.answer = f"-{refusal}\r\n".encode()
        proxy.mode = "once"
        assert api.check(key).remaining == COUNTED.limit - 2


class _QuietHandler(http.server.BaseHTTPRequestHandler):
    """Supports no HTTP method, and logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


@both_wires
def test_another_service_on_that_port_is_an_error(key: str, wire: str) -> None:
    """An HTTP server: no hang, and the error says that it is not Redis."""
    with (
        serving(http.server.HTTPServer((HOST, 0), _QuietHandler)) as web,
        client(wire, f"redis://{HOST}:{web.server_port}", deadline_ms=2_000) as api,
    ):
        seconds, error = timed(lambda: outcome(api.start(key)))
        assert isinstance(error, StoreUnavailable)
        assert "not a reply of Redis" in str(error)
        assert seconds < 1 + LATE_SECONDS_MAX


@both_wires
def test_tls_to_a_plain_server_is_an_error(server: Single, key: str, wire: str) -> None:
    """And the other way round: an error soon, and no hang."""
    encrypted = cast("Tls", running("tls"))
    for uri in (
        f"rediss://{HOST}:{server.port}?tls_verify=none",
        f"redis://{HOST}:{encrypted.port}",
    ):
        with client(wire, uri, deadline_ms=3_000, connect_ms=500) as api:
            seconds, error = timed(lambda api=api: outcome(api.start(key)))
            assert isinstance(error, StoreUnavailable)
            assert not charged_at_most([error])
            assert seconds < 1 + LATE_SECONDS_MAX


@both_wires
def test_tls_keeps_the_deadline(key: str, wire: str) -> None:
    """A stopped server behind TLS: the call ends by its deadline and is charged at most once."""
    with Tls() as encrypted, client(wire, encrypted.uri, deadline_ms=1_500) as api:
        assert api.check(key).allowed
        encrypted.pause()
        seconds, error = timed(lambda: outcome(api.start(key)))
        encrypted.resume()
        assert isinstance(error, StoreTimeout)
        assert seconds < 1.5 + LATE_SECONDS_MAX
        until(api.works, "it answers again", SECONDS_MAX)
        assert api.check(key).remaining in (COUNTED.limit - 2, COUNTED.limit - 3)


@both_wires
@pytest.mark.parametrize("backlog", [0, 100])
def test_a_call_to_a_silent_host_keeps_its_deadline(key: str, wire: str, backlog: int) -> None:
    """The host accepts connections and says nothing, or does not even accept them."""
    with socket.create_server((HOST, 0), backlog=backlog) as silent:
        waiting = []
        if not backlog:
            for _ in range(3):  # fills the queue: later ones get no answer to their first packet
                waiting.append(socket.socket())
                waiting[-1].setblocking(False)
                waiting[-1].connect_ex(silent.getsockname())
        uri = f"redis://{HOST}:{silent.getsockname()[1]}"
        with client(wire, uri, deadline_ms=100, connect_ms=300) as api:
            for _ in range(4):
                seconds, outcomes = timed(lambda: api.together([key] * 50))
                assert seconds < 0.1 + LATE_SECONDS_MAX
                assert all(isinstance(each, StoreUnavailable) for each in outcomes)
                assert not charged_at_most(outcomes)
        for each in waiting:
            each.close()


@both_wires
def test_a_host_that_was_silent_is_used_soon_after(key: str, wire: str) -> None:
    """However many calls failed meanwhile: no queue of old attempts delays the new one."""
    with Single() as server, client(wire, server.uri, deadline_ms=50, connect_ms=400) as api:
        server.pause()
        with Load(api, key, workers=100) as load:
            until(lambda: len(load.outcomes) > 2_000, "many calls fail", SECONDS_MAX)
        server.resume()
        seconds, _ = timed(lambda: until(api.works, "it is in use", SECONDS_MAX))
        assert seconds < 8  # a queue of 2,000 would take longer
        assert not charged_at_most(load.outcomes)


@both_wires
def test_a_name_that_does_not_resolve_is_an_error(key: str, wire: str) -> None:
    """A mistake in the URI, or an unavailable name server."""
    with client(wire, "redis://no-such-host.invalid") as api:
        error = outcome(api.start(key))
        assert isinstance(error, StoreUnavailable)
        assert "no-such-host.invalid" in str(error)


@both_wires
def test_an_idle_connection_that_the_server_closed_is_replaced(key: str, wire: str) -> None:
    """`timeout 1`, or an operator's CLIENT KILL: the next call works."""
    with Single() as server, client(wire, server.uri) as api:

        def clients() -> int:
            return len(server.admin.client_list())

        assert not errors_of(api.together([key] * 20))
        assert clients() > 1
        server.admin.config_set("timeout", 1)
        until(lambda: clients() == 1, "the server has closed what idled", SECONDS_MAX)
        server.admin.config_set("timeout", 0)
        assert not errors_of(api.together([key] * 20))
        assert not errors_of([outcome(api.start(key)) for _ in range(5)])


@both_wires
def test_a_storm_of_reconnects_charges_at_most_once(server: Single, key: str, wire: str) -> None:
    """More callers than idle connections, all cut off again and again."""
    kept = connections.IDLE_MAX if wire == "threads" else 1
    with client(wire, server.uri) as api:
        with Load(api, key, workers=90) as load:
            for _ in range(8):
                before = len(load.outcomes)
                server.admin.client_kill_filter(_type="normal", skipme=True)
                until(
                    lambda before=before: admitted(load.outcomes[before:]) > 90,
                    "calls are answered",
                    SECONDS_MAX,
                )
        until(lambda: len(server.admin.client_list()) - 1 <= kept, "no more are kept", SECONDS_MAX)
        assert errors_of(load.outcomes)
        charged = counted(server.uri, key)
        assert admitted(load.outcomes) <= charged <= charged_at_most(load.outcomes)


@both_wires
def test_a_deadline_shorter_than_the_answer_charges_at_most_once(
    server: Single, key: str, wire: str
) -> None:
    """Every third piece of a request is late: some callers get an answer, some an error."""
    delays = cycle([0.0, 0.0, 0.02])
    with Proxy(server.port) as proxy, client(wire, proxy.uri, deadline_ms=5) as api:
        proxy.up_seconds = lambda: next(delays)
        outcomes = [each for _ in range(10) for each in api.together([key] * 100)]
    charged = counted(server.uri, key)
    assert errors_of(outcomes)
    assert admitted(outcomes) <= charged <= charged_at_most(outcomes)


def test_signals_do_not_extend_a_deadline(key: str) -> None:
    """A profiler's timer interrupts every wait of the main thread."""
    ticks = count()

    def tick(*_: object) -> None:
        if (
            next(ticks) * 0.02 > 2 * LATE_SECONDS_MAX
        ):  # a wait that started again at each signal would never end
            signal.setitimer(signal.ITIMER_REAL, 0)

    with Single() as server:
        store = open_store(server.uri, deadline_ms=200)
        limiter = Limiter(COUNTED, store=store, on_failure="raise")
        limiter.check(key)
        before = signal.signal(signal.SIGALRM, tick)
        server.pause()
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        started = time.monotonic()
        try:
            with pytest.raises(StoreTimeout, match="no answer in 200 ms"):
                limiter.check(key)
        finally:
            seconds = time.monotonic() - started
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            server.resume()
        assert seconds < 0.2 + LATE_SECONDS_MAX
        store.close()


@both_wires
def test_a_connection_that_is_made_too_late_charges_nothing(
    server: Single, key: str, wire: str
) -> None:
    """The callers got an error that says "not sent", so nothing is sent afterwards."""
    with Proxy(server.port) as proxy:
        proxy.accept_seconds = 1.0
        with client(wire, proxy.uri, deadline_ms=200, connect_ms=300) as api:
            outcomes = api.together([key] * 100)
            assert len(errors_of(outcomes)) == 100
            proxy.accept_seconds = 0.0
            until(api.works, "it is connected", SECONDS_MAX)
        assert charged_at_most(outcomes) == counted(server.uri, key) == 0


@both_wires
def test_the_first_checks_wait_for_the_connection(server: Single, key: str, wire: str) -> None:
    """It takes longer than a call may: none is let pass uncounted, and the limit is exact."""
    with Proxy(server.port) as proxy:
        proxy.accept_seconds = 1.5
        options = {"deadline_ms": 1_000, "connect_ms": 20_000}
        limits = Limit(10, per=YEAR)
        with client(wire, proxy.uri, limits, on_failure="open", **options) as api:
            outcomes = api.together([key] * 40)
    assert not any(isinstance(each, Decision) and each.degraded for each in outcomes)
    assert admitted(outcomes) == 10


@both_wires
def test_a_server_that_is_silent_from_the_start_delays_only_the_first_checks(
    key: str, wire: str
) -> None:
    """They wait for the connection. No later check does, and soon the breaker opens."""
    with socket.create_server((HOST, 0), backlog=100) as silent:
        uri = f"redis://{HOST}:{silent.getsockname()[1]}"
        with client(wire, uri, deadline_ms=50, connect_ms=3_000) as api:
            first, outcomes = timed(lambda: api.together([key] * 20))
            assert len(errors_of(outcomes)) == 20
            assert first > 2.9
            later, errors = timed(lambda: _errors_until_the_breaker_opens(api, key))
            assert not charged_at_most([*outcomes, *errors])
            # None of several waited for the connection, or they would take seconds each.
            assert len(errors) >= 3
            assert later < 3.0 * len(errors)


def _errors_until_the_breaker_opens(api: Client, key: str) -> list[StoreError]:
    errors: list[StoreError] = []
    while not errors or "breaker is open" not in str(errors[-1]):
        found = outcome(api.start(key))
        assert isinstance(found, StoreError)
        errors.append(found)
        assert len(errors) < 100_000  # calls that are refused at once do not count as failures
    return errors


@pytest.mark.parametrize(
    "loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
@pytest.mark.parametrize("coalesce", [True, False])
def test_a_busy_event_loop_is_no_failure_of_the_server(
    server: Single, key: str, loop: Callable[[], asyncio.AbstractEventLoop], coalesce: bool
) -> None:
    """The replies have arrived when the event loop is free again, after the deadline."""

    async def checked() -> list[Outcome]:
        store = open_store(server.uri, deadline_ms=500, coalesce=coalesce)
        limiter = AsyncLimiter(COUNTED, store=store, on_failure="raise")
        await limiter.check(key)
        calls = [asyncio.ensure_future(limiter.check(key)) for _ in range(100)]
        await asyncio.sleep(0)  # they are sent
        until(lambda: counted(server.uri, key) > 1, "the server has charged some", SECONDS_MAX)
        time.sleep(0.6)  # noqa: ASYNC251 - it holds up the event loop
        found: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        await store.aclose()
        return found

    with asyncio.Runner(loop_factory=loop) as runner:
        assert admitted(runner.run(checked())) == 100


async def test_a_process_that_did_not_run_waits_on_for_as_long(server: Single, key: str) -> None:
    """The server, which shares its processor, could not run either, and answers after it."""
    store = open_store(server.uri, deadline_ms=2_000)
    limiter = AsyncLimiter(COUNTED, store=store, on_failure="raise")
    await limiter.check(key)
    server.pause()
    calls = [asyncio.ensure_future(limiter.check(key)) for _ in range(100)]
    await asyncio.sleep(0)  # they are sent
    time.sleep(4)  # noqa: ASYNC251 - it holds up the event loop
    server.resume()
    found: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    await store.aclose()
    assert admitted(found) == 100


def test_a_thread_that_was_held_up_is_no_failure_of_the_server(server: Single, key: str) -> None:
    """A signal handler takes longer than the deadline, and the reply has arrived meanwhile."""
    store = open_store(server.uri, deadline_ms=2_000)
    limiter = Limiter(COUNTED, store=store, on_failure="raise")
    limiter.check(key)
    handled = []

    def hold_up(*_: object) -> None:
        server.resume()
        until(lambda: counted(server.uri, key) == 2, "the server has answered", SECONDS_MAX)
        time.sleep(2.1)
        handled.append(True)

    before = signal.signal(signal.SIGALRM, hold_up)
    server.pause()
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        assert limiter.check(key).remaining == COUNTED.limit - 2
    finally:
        signal.signal(signal.SIGALRM, before)
        server.resume()
        store.close()
    assert handled


async def _paced(limiter: AsyncLimiter, key: str, seconds: float) -> list[Outcome]:
    """Start checks at intervals, whether those before have ended or not."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + seconds
    started = []
    while loop.time() < ends:
        started.append(asyncio.ensure_future(limiter.check(key)))
        await asyncio.sleep(0.002)
    found: list[Any] = await asyncio.gather(*started, return_exceptions=True)
    return found


async def test_a_silent_connection_is_replaced_although_calls_keep_coming(
    server: Single, key: str
) -> None:
    """There is always a call that is not overdue yet, but the connection brings no reply.

    Without a breaker, which would stop the calls.
    """
    with Proxy(server.port) as proxy:
        store = open_store(proxy.uri, deadline_ms=500, breaker=False)
        limiter = AsyncLimiter(COUNTED, store=store, on_failure="raise")
        await limiter.check(key)
        proxy.mode = "hold"
        await _paced(limiter, key, 1.0)
        proxy.mode = "pass"
        outcomes = await _paced(limiter, key, 2.0)
        assert admitted(outcomes[-50:])
        await store.aclose()


async def test_a_stopped_server_does_not_block_the_event_loop(key: str) -> None:
    """Thousands of failing calls cost no more than as many successful ones."""
    with Single() as server:
        store = open_store(server.uri, deadline_ms=300)
        limiter = AsyncLimiter(COUNTED, store=store, on_failure="open")
        await limiter.check(key)
        server.pause()
        loop = asyncio.get_running_loop()
        started, calls = loop.time(), []
        while loop.time() < started + 1:
            calls.append(asyncio.ensure_future(limiter.check(key)))
            await asyncio.sleep(0)
        await asyncio.gather(*calls)
        assert len(calls) > 300
        assert loop.time() - started < 1.3 + 2 * LATE_SECONDS_MAX
        server.resume()
        await store.aclose()


async def test_the_number_of_calls_in_flight_is_bounded(
    server: Single, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond PENDING_MAX a call fails at once and is not sent, before and after connecting."""
    monkeypatch.setattr(connections, "PENDING_MAX", 10)
    with Proxy(server.port, "swallow") as proxy:
        store = open_store(proxy.uri, deadline_ms=500, connect_ms=20_000, coalesce=False)
        limiter = AsyncLimiter(COUNTED, store=store, on_failure="raise")
        for sent in (10, 0):  # of the second thirty, none: the first are still owed their answers
            calls = [limiter.check(key) for _ in range(30)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert sum("10 calls " in str(each) for each in outcomes) == 30 - sent
            assert sum(isinstance(each, StoreTimeout) for each in outcomes) == sent
        await store.aclose()
    assert counted(server.uri, key) == 10


async def test_closing_does_not_wait_for_a_server_that_reads_nothing(key: str) -> None:
    """Unsent bytes are dropped; the error of each call says that the store was closed."""
    with socket.create_server((HOST, 0)) as silent:
        # The other end answers the handshake and then reads nothing more.
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        port = silent.getsockname()[1]
        store = cast("RedisStore", open_store(f"redis://{HOST}:{port}", deadline_ms=60_000))
        limiter = AsyncLimiter(COUNTED, store=store, on_failure="raise")
        calls = [asyncio.ensure_future(limiter.check(f"{key} {'x' * 480}")) for _ in range(6_000)]
        taken, _ = await asyncio.to_thread(silent.accept)
        greeting = connections.handshake_payload(connections.handshake_commands(store.config))
        while greeting:
            greeting = greeting[len(await asyncio.to_thread(taken.recv, len(greeting))) :]
        taken.sendall(b"+OK\r\n")

        def arrived() -> bool:
            return b"EVALSHA" in taken.recv(65_536, socket.MSG_PEEK)

        await asyncio.to_thread(until, arrived, "calls were sent", SECONDS_MAX)
        started = time.monotonic()
        await store.aclose()
        assert time.monotonic() - started < LATE_SECONDS_MAX
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in outcomes} == {StoreUnavailable}
        assert "the store was closed" in str(outcomes[0])
        taken.close()
