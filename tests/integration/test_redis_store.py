"""Threads, tasks, event loops and forked processes share one store; `close` ends it."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from ratekeeper import AsyncLimiter, Limit, Limiter
from ratekeeper.core.errors import StoreUnavailable
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.redis.store import RedisStore
from tests.integration.redis_wires import (
    COUNTED,
    LATE_SECONDS_MAX,
    SECONDS_MAX,
    YEAR,
    Load,
    both_wires,
    charged_at_most,
    client,
    counted,
    errors_of,
    key_of,
    outcome,
    timed,
)
from tests.integration.tcp_proxy import Proxy
from tests.redis_servers import Single, running, until


@pytest.fixture(scope="module")
def server() -> Iterator[Single]:
    """Start a server that also listens on a Unix socket."""
    with Single(lines=["unixsocket redis.sock"]) as started:
        yield started


def _store(uri: str, **options: object) -> RedisStore:
    return cast("RedisStore", open_store(uri, deadline_ms=5_000, **options))


def _clients(server: Single) -> int:
    """Return the number of connections to the server, without the administrator's."""
    return len(server.admin.client_list()) - 1


@both_wires
def test_databases_and_prefixes_keep_apart(server: Single, key: str, wire: str) -> None:
    """Each database and each prefix counts a key separately, over TCP and over a Unix socket."""
    base = server.uri.removesuffix("/0")
    socket_uri = f"redis+unix://{server.folder}/redis.sock"
    for places in ((f"{base}/0", f"{socket_uri}?db=0"), (f"{base}/3", f"{socket_uri}?db=3")):
        for prefix in ("rk", "other"):
            with (
                client(wire, places[0], Limit(2, per=YEAR), prefix=prefix) as by_port,
                client(wire, places[1], Limit(2, per=YEAR), prefix=prefix) as by_socket,
            ):
                assert by_port.check(key).remaining == 1
                assert by_socket.check(key).remaining == 0
                assert not by_port.check(key).allowed
    for db in (0, 3):
        with server.client(db=db) as raw:
            for prefix in ("rk", "other"):
                assert raw.hlen(key_of(key, prefix)) > 0


@pytest.mark.parametrize("kind", ["single", "password", "tls"])
@both_wires
def test_a_client_reconnects_to_every_kind_of_server(kind: str, key: str, wire: str) -> None:
    """After the server cuts its connections, a client logs in again, with a password or TLS too."""
    running_server = cast("Single", running(kind))
    running_server.flush()
    with client(wire, running_server.uri) as api:
        assert not errors_of(api.together([key] * 10))
        running_server.admin.client_kill_filter(_type="normal", skipme=True)
        until(api.works, "the client is connected again", SECONDS_MAX)
        assert not errors_of(api.together([key] * 10))
        assert COUNTED.limit - api.peek(key).remaining == 20


async def test_threads_and_tasks_share_a_store(server: Single, key: str) -> None:
    """A Limiter and an AsyncLimiter on one store are admitted exactly one quota together."""
    store = _store(server.uri)
    limit = Limit(500, per=YEAR)
    limiter = Limiter(limit, store=store, on_failure="raise")
    async_limiter = AsyncLimiter(limit, store=store, on_failure="raise")

    def from_threads() -> int:
        with ThreadPoolExecutor(8) as pool:
            return sum(map(bool, pool.map(lambda _: limiter.check(key), range(400))))

    threads = asyncio.get_running_loop().run_in_executor(None, from_threads)
    tasks = await asyncio.gather(*(async_limiter.check(key) for _ in range(400)))
    assert sum(map(bool, tasks)) + await threads == 500
    await store.aclose()


async def test_a_cancelled_check_shifts_no_answers(server: Single, key: str) -> None:
    """Checks cancelled before or after they are sent leave the others with their own answers."""
    with Proxy(server.port) as proxy:
        proxy.accept_seconds = 0.05
        store = _store(proxy.uri)
        limiter = AsyncLimiter(COUNTED, store=store, on_failure="raise")
        for _ in range(3):  # the first round waits for the connection
            checks = {
                number: asyncio.ensure_future(limiter.check(f"{key} {number}", number))
                for number in range(1, 41)
            }
            await asyncio.sleep(0)
            cancelled = [checks.pop(number) for number in range(1, 41, 2)]
            for check in cancelled:
                check.cancel()
            await asyncio.gather(*checks.values())
            for check in cancelled:
                with pytest.raises(asyncio.CancelledError):
                    await check
        for number, check in checks.items():
            assert check.result().remaining == COUNTED.limit - 3 * number
        await store.aclose()


def test_event_loops_may_follow_one_another(server: Single, key: str) -> None:
    """Several asyncio.run calls on one store get correct answers and leave no connection open."""
    store = _store(server.uri)
    limiter = AsyncLimiter(COUNTED, store=store, on_failure="raise")
    before = _clients(server)

    async def some_checks() -> int:
        decisions = await asyncio.gather(*(limiter.check(key) for _ in range(10)))
        return min(decision.remaining for decision in decisions)

    async def last_checks() -> int:
        remaining = await some_checks()
        await store.aclose()
        return remaining

    for number in range(1, 6):
        assert asyncio.run(some_checks()) == COUNTED.limit - 10 * number
    gc.collect()
    until(
        lambda: _clients(server) <= before + 1,
        "the connections of old loops are closed",
        SECONDS_MAX,
    )
    assert asyncio.run(last_checks()) == COUNTED.limit - 60
    gc.collect()
    until(lambda: _clients(server) == before, "all connections are closed", SECONDS_MAX)


def test_event_loops_may_run_side_by_side(server: Single, key: str) -> None:
    """Four threads, each with an event loop, are admitted exactly one limit from one store."""
    store = _store(server.uri)
    limiter = AsyncLimiter(Limit(300, per=YEAR), store=store, on_failure="raise")

    async def checks() -> int:
        decisions = await asyncio.gather(*(limiter.check(key) for _ in range(200)))
        return sum(map(bool, decisions))

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(lambda _: asyncio.run(checks()), range(4))) == 300
    store.close()


_FORKING = """
import asyncio, os, sys
from ratekeeper import AsyncLimiter, Limit, Limiter, open_store

uri, key, wire = sys.argv[1:]
store = open_store(uri, deadline_ms=5_000)
limit = Limit(1_000_000, per=366 * 86_400, algorithm="fixed_window")
limiter = Limiter(limit, store=store, on_failure="raise")
async_limiter = AsyncLimiter(limit, store=store, on_failure="raise")

async def tasks(key, times):
    for _ in range(times):
        decisions = await asyncio.gather(*(async_limiter.check(key) for _ in range(5)))
    return decisions[-1]

def work(key, times):
    if wire == "asyncio":
        return asyncio.run(tasks(key, times))
    for _ in range(5 * times):
        decision = limiter.check(key)
    return decision

work(key, 1)
children = []
for number in range(3):
    child = os.fork()
    if not child:
        own = work(f"{key} {number}", 50)  # on its own key, another process's answer would show
        work(key, 50)
        os._exit(0 if own.remaining == limit.limit - 250 else 1)
    children.append(child)
own = work(f"{key} parent", 50)
work(key, 50)
assert own.remaining == limit.limit - 250
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
"""


@both_wires
def test_a_forked_process_opens_its_own_connections(server: Single, key: str, wire: str) -> None:
    """Parent and children keep using one store, and each process reads only its own answers."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", _FORKING, server.uri, key, wire],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert counted(server.uri, key) == 5 + 4 * 250


@both_wires
def test_closing_ends_the_calls_in_flight(server: Single, key: str, wire: str) -> None:
    """Each call ends soon, with a decision or a StoreError. Later calls raise "closed"."""
    for _ in range(5):
        with client(wire, server.uri) as api:
            with Load(api, key, workers=30) as load:
                until(lambda load=load: len(load.outcomes) > 50, "there is load", SECONDS_MAX)
                api.store.close()
                until(
                    lambda load=load: len(errors_of(load.outcomes)) > 100,
                    "all calls in flight have ended",
                    SECONDS_MAX,
                )
            assert all(isinstance(each, StoreUnavailable) for each in errors_of(load.outcomes))
            assert "the store is closed; open another one" in str(outcome(api.start(key)))


@both_wires
def test_closing_while_calls_wait_for_a_connection(key: str, wire: str) -> None:
    """`close` waits for no call. Tasks fail at once; a thread fails by its deadline."""
    with Single() as server:
        server.pause()
        with client(wire, server.uri, deadline_ms=2_000, connect_ms=2_000) as api:
            calls = [api.start(key) for _ in range(40)]
            assert timed(api.store.close)[0] < 1.9
            seconds, outcomes = timed(lambda: [outcome(call) for call in calls])
            assert seconds < 2 + LATE_SECONDS_MAX
            assert len(errors_of(outcomes)) == 40
            assert not charged_at_most(outcomes)
        server.kill()


_ENDING = """
import sys, threading
from ratekeeper import Limiter, StoreUnavailable

limiter = Limiter("5/minute", store=sys.argv[1], on_failure="raise")

def last_call():
    threading.main_thread().join()
    try:
        limiter.check(sys.argv[2])  # connecting needs a new thread, which Python no longer starts
    except StoreUnavailable:
        print("handled")

threading.Thread(target=last_call).start()
if sys.argv[3] == "connected":
    assert Limiter("5/minute", store=sys.argv[1]).check(sys.argv[2]).remaining == 4
"""


@pytest.mark.parametrize("state", ["connected", "not connected"])
def test_an_open_store_does_not_keep_the_process_alive(
    server: Single, key: str, state: str
) -> None:
    """A process with an open store ends, and a call during its end raises StoreUnavailable."""
    patient = f"{server.uri}?deadline_ms=10000&connect_ms=10000"  # for a busy machine
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _ENDING, patient, key, state],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


def test_a_closed_store_leaves_nothing_behind(server: Single, key: str) -> None:
    """After `close`, the store's connections and threads are gone."""
    before, threads = _clients(server), threading.active_count()
    for _ in range(30):
        with client("threads", server.uri) as api:
            api.check(key)
        with client("asyncio", server.uri) as api:
            api.check(key)
    until(lambda: _clients(server) == before, "all connections have closed", SECONDS_MAX)
    until(lambda: threading.active_count() <= threads, "threads have ended", SECONDS_MAX)
