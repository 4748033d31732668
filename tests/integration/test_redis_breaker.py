"""The circuit breaker: opened by real failures, closed by probes, cheap while it is open."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from statistics import median
from typing import cast

import pytest

from ratekeeper import Limit, Limiter
from ratekeeper.core.clock import SystemClock
from ratekeeper.core.errors import StoreError, StoreTimeout, StoreUnavailable
from ratekeeper.decide.store import BreakerState
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.decide.stores.redis import breakers
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.store import RedisStore
from ratekeeper.decide.stores.redis.topology import slot_of
from tests.answering import answer, awaited
from tests.integration.redis_wires import (
    COUNTED,
    SECONDS_MAX,
    Client,
    admitted,
    both_wires,
    client,
    clients_of_both,
    counted,
    errors_of,
    key_of,
    outcome,
)
from tests.integration.tcp_proxy import Proxy
from tests.redis_servers import Cluster, Server, Single, until

# Short, so that a test need not wait a second for each probe.
QUICK = {"breaker_open_ms": 100, "breaker_open_max_ms": 200}


@pytest.fixture
def server() -> Iterator[Single]:
    """Return a server that a test may kill."""
    with Single() as started:
        yield started


def only(store: RedisStore) -> BreakerState:
    """Return the state of the only server's breaker."""
    (state,) = store.breakers()
    return state


def is_open(api: Client) -> bool:
    """Make a failing check; return True once the breaker is open."""
    outcome(api.start("anyone"))
    return only(api.store).state != "closed"


def calls_of(server: Server, *names: str) -> int:
    """Return how many calls of these commands the server has received."""
    stats = server.admin.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in names)


@both_wires
def test_a_dead_server_opens_the_breaker_and_its_return_closes_it(
    server: Single, key: str, wire: str
) -> None:
    """Calls fail at once with the reason; then checks are exact again, without a restart."""
    with client(wire, server.uri, **QUICK) as api:
        assert api.check(key).allowed
        assert only(api.store).state == "closed"
        server.kill()
        until(lambda: is_open(api), "the breaker is open", SECONDS_MAX)
        error = outcome(api.start(key))
        assert isinstance(error, StoreUnavailable)
        for words in (str(server.port), "breaker is open", "refused"):
            assert words in str(error)
        state = only(api.store)
        assert state.opened_times == 1
        assert state.failures >= 5
        assert state.next_probe_s is not None
        assert 0 <= state.next_probe_s < 1
        server.start()
        until(api.works, "a check reaches it again", SECONDS_MAX)
        assert only(api.store).state == "closed"
        assert only(api.store).next_probe_s is None
        assert [each.opened_times for each in api.store.health().breakers] == [1]
        assert [api.check(key).remaining for _ in range(2)] == [
            COUNTED.limit - 1,
            COUNTED.limit - 2,
        ]


def test_a_global_rule_fails_at_once_while_the_breaker_is_open(server: Single) -> None:
    """A check of limits that regions share waits for no server that is known to be silent."""
    options = "deadline_ms=40&breaker_open_ms=60000&breaker_open_max_ms=60000"
    store = RedisStore(parse(f"{server.uri}?{options}"))
    limits = (Limit(10, per=60),)
    counter = store.regional.global_counter(limits, "api", "exact")

    def text() -> str:
        try:
            return str(answer(counter.check("ann", 1)))
        except StoreError as error:
            return str(error)

    with closing(store):
        server.pause()
        until(lambda: "breaker is open" in text(), "the breaker is open", SECONDS_MAX)
        with pytest.raises(StoreUnavailable, match="breaker is open"):
            asyncio.run(awaited(counter.check("ann", 1)))
        server.resume()


@both_wires
def test_a_silent_server_opens_the_breaker(server: Single, key: str, wire: str) -> None:
    """SIGSTOP: after a few deadlines no call waits, and none is sent."""
    with client(wire, server.uri, deadline_ms=40, **QUICK) as api:
        until(api.works, "it is connected", SECONDS_MAX)
        server.pause()
        assert isinstance(outcome(api.start(key)), StoreTimeout)
        until(lambda: is_open(api), "the breaker is open", SECONDS_MAX)
        assert "breaker is open" in str(outcome(api.start(key)))
        server.resume()
        until(api.works, "it answers again", SECONDS_MAX)
        # Calls sent before it opened may have been counted; none after.
        assert counted(server.uri, key) <= 10


@both_wires
def test_a_server_that_hangs_after_a_blip_opens_the_breaker(
    server: Single, key: str, wire: str
) -> None:
    """Few checks wait for it, however many it answered between the two."""
    options = {"breaker_open_ms": 60_000, "breaker_open_max_ms": 60_000}
    with client(wire, server.uri, deadline_ms=200, **options) as api:
        until(api.works, "it is connected", SECONDS_MAX)
        server.pause()
        assert isinstance(outcome(api.start(key)), StoreTimeout)
        server.resume()
        until(api.works, "it answers again", SECONDS_MAX)
        assert admitted([outcome(api.start(key)) for _ in range(1_000)]) > 900
        server.pause()
        errors = [outcome(api.start(key))]
        while "breaker is open" not in str(errors[-1]):
            errors.append(outcome(api.start(key)))
        server.resume()
        # The others are refused at once, because connecting has just failed.
        waited = [
            each for each in errors if "no answer in" in str(each) or "no connection" in str(each)
        ]
        assert 3 <= len(waited) <= 15


@both_wires
def test_requests_do_not_serve_as_probes(server: Single, key: str, wire: str) -> None:
    """Calls made while it is open never reach the server, even if it works again."""
    options = {"breaker_open_ms": 60_000, "breaker_open_max_ms": 60_000}
    with client(wire, server.uri, deadline_ms=40, **options) as api:
        until(api.works, "it is connected", SECONDS_MAX)
        server.pause()
        until(lambda: is_open(api), "the breaker is open", SECONDS_MAX)
        server.resume()
        before = calls_of(server, "evalsha", "eval")
        assert all(isinstance(outcome(api.start(key)), StoreUnavailable) for _ in range(50))
        assert calls_of(server, "evalsha", "eval") == before


def test_probes_write_nothing(server: Single, key: str) -> None:
    """A PING and the script on a separate key, which is not created."""
    with Proxy(server.port) as proxy, client("threads", proxy.uri, deadline_ms=50, **QUICK) as api:
        until(api.works, "it is connected", SECONDS_MAX)
        proxy.mode = "hold"
        until(lambda: is_open(api), "the breaker is open", SECONDS_MAX)
        server.admin.config_resetstat()
        server.admin.script_flush()
        proxy.mode = "pass"
        until(lambda: only(api.store).state == "closed", "probes close it", SECONDS_MAX)
        assert calls_of(server, "ping") >= 2
        # The handshake has loaded the script again: the first check finds it.
        until(api.works, "checks are answered", SECONDS_MAX)
        assert calls_of(server, "eval") == 0
        assert server.admin.keys("*probe*") == []


def test_threads_and_event_loops_share_the_breaker(server: Single, key: str) -> None:
    """If one opened it, the other makes no call."""
    with client("threads", server.uri, **QUICK) as api:
        server.kill()
        until(lambda: is_open(api), "the breaker is open", SECONDS_MAX)
        limiter = Limiter(COUNTED, store=api.store, on_failure="raise")
        with pytest.raises(StoreUnavailable, match="breaker is open"):
            limiter.check(key)


@both_wires
def test_one_moment_of_failures_does_not_open_the_breaker(
    server: Single, key: str, wire: str
) -> None:
    """Forty calls that time out together, at the start or later, are one moment.

    The deadline is long compared with the time in which a busy machine starts forty calls.
    """
    with Proxy(server.port) as proxy:
        proxy.accept_seconds = 3.0
        options = {"deadline_ms": 1_500, "connect_ms": 1_500, "coalesce": False}
        with client(wire, proxy.uri, **options) as api:
            slow = api.together([key] * 40)
            assert len(errors_of(slow)) == 40
            proxy.accept_seconds = 0.0
            until(api.works, "it is connected", SECONDS_MAX)
            assert only(api.store).opened_times == 0
            server.pause()
            late = api.together([key] * 40)
            server.resume()
            assert any(isinstance(each, StoreTimeout) for each in late)
            until(api.works, "it answers", SECONDS_MAX)
            assert only(api.store).opened_times == 0


@both_wires
def test_refusals_do_not_open_the_breaker(server: Single, key: str, wire: str) -> None:
    """A server without memory refuses every check, but it answers."""
    server.admin.config_set("maxmemory", 1)
    with client(wire, server.uri) as api:
        errors = [outcome(api.start(key)) for _ in range(30)]
        assert all("maxmemory" in str(error) for error in errors)
        assert only(api.store).state == "closed"
        assert only(api.store).failures == 0


@both_wires
def test_without_the_breaker_each_call_is_tried(server: Single, key: str, wire: str) -> None:
    """`breaker=off`."""
    with client(wire, server.uri, deadline_ms=30, breaker=False) as api:
        until(api.works, "it is connected", SECONDS_MAX)
        server.pause()
        for _ in range(8):
            assert "breaker" not in str(outcome(api.start(key)))
        server.resume()
        assert only(api.store).opened_times == 0


def test_listeners_receive_every_change(server: Single, key: str) -> None:
    """Open, half open, closed; a listener that fails does no harm."""
    changes: list[BreakerState] = []

    def fail(state: BreakerState) -> None:
        raise RuntimeError(state.address)

    with client("threads", server.uri, **QUICK) as api:
        api.store.on_breaker(fail)
        api.store.on_breaker(changes.append)
        server.kill()
        until(lambda: is_open(api), "the breaker is open", SECONDS_MAX)
        server.start()
        until(api.works, "it is closed", SECONDS_MAX)
    assert [state.state for state in changes] == ["open", "half_open", "closed"]
    assert {state.address for state in changes} == {f"127.0.0.1:{server.port}"}


def test_a_dead_shard_opens_only_its_own_breaker() -> None:
    """Without a replica its keys fail at once, and all others work."""
    with Cluster(full_coverage=False) as cluster:
        keys = [f"key {number}" for number in range(30)]
        owners = {key: cluster.node_of(slot_of(key_of(key).encode())).port for key in keys}
        dead = cluster.node_of(slot_of(key_of(keys[0]).encode()))
        for node in cluster.nodes:
            if node.admin.info("replication").get("master_port") == dead.port:
                node.kill()
        with clients_of_both(cluster.uri, deadline_ms=5_000, **QUICK) as clients:
            for api in clients:
                for key in keys:
                    assert api.check(key).allowed
            dead.kill()
            for api in clients:
                until(
                    lambda api=api: "breaker is open" in str(outcome(api.start(keys[0]))),
                    "the breaker of the dead one is open",
                    SECONDS_MAX,
                )
                for key, port in owners.items():
                    if port != dead.port:
                        assert api.check(key).allowed
                states = {state.address: state.state for state in api.store.breakers()}
                assert states.pop(f"127.0.0.1:{dead.port}") != "closed"
                assert set(states.values()) == {"closed"}
                # A request for its keys and others is not sent, because it would have to be undone.
                other = next(key for key, port in owners.items() if port != dead.port)
                well = cluster.node_of(slot_of(key_of(other).encode()))
                before = calls_of(well, "evalsha", "eval")
                for _ in range(20):
                    call = api.start_all([other, keys[0]])
                    assert "breaker is open" in str(call.exception(SECONDS_MAX))
                assert calls_of(well, "evalsha", "eval") == before


@both_wires
def test_a_call_that_the_breaker_refuses_was_not_counted(
    server: Single, key: str, wire: str
) -> None:
    """The calls that opened it may have been counted; those that it refuses were not sent."""
    options = {"breaker_open_ms": 60_000, "breaker_open_max_ms": 60_000}
    with client(wire, server.uri, deadline_ms=1_000, **options) as api:
        until(lambda: not errors_of(api.together([key] * 40)), "many are connected", SECONDS_MAX)
        server.pause()
        until(lambda: api.together([key] * 9) and is_open(api), "the breaker is open", SECONDS_MAX)
        refused = outcome(api.start(key))
        server.resume()
        assert "breaker is open" in str(refused)
        assert "counted" not in str(refused)


@both_wires
def test_a_silent_shard_does_not_block_connections_to_others(wire: str) -> None:
    """Forty callers wait for a connection to it, and as many need new ones to another."""
    with Cluster(full_coverage=False) as cluster:
        silent, well = cluster.primaries()[:2]
        keys = [f"key {number}" for number in range(100)]
        owners = {key: cluster.node_of(slot_of(key_of(key).encode())).port for key in keys}
        lost = next(key for key, port in owners.items() if port == silent.port)
        kept = next(key for key, port in owners.items() if port == well.port)
        with client(wire, cluster.uri, deadline_ms=3_000, connect_ms=60_000) as api:
            api.store.stats()  # it knows where everything is
            silent.pause()
            waiting = [api.start(lost) for _ in range(40)]
            found = [outcome(api.start(kept)) for _ in range(3)]
            found += api.together([kept] * 40)
            silent.resume()
            assert [each for each in found if isinstance(each, StoreError)] == []
            for each in waiting:
                outcome(each)


def test_probes_start_although_threads_could_not_be_started(
    server: Single, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an outage threads pile up: the prober cannot start at first."""
    monkeypatch.setattr(breakers, "OVERDUE_NS", 0)
    failures = iter([True] * 3)
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name == "ratekeeper-redis-probe" and next(failures, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    with client("threads", server.uri, **QUICK) as api:
        server.kill()
        until(lambda: is_open(api), "the breaker is open", SECONDS_MAX)
        server.start()
        until(api.works, "it is closed", SECONDS_MAX)
        assert next(failures, None) is None


def test_a_forked_child_starts_with_closed_breakers(server: Single, key: str) -> None:
    """The child learns about failures itself."""
    store = cast("RedisStore", open_store(server.uri, deadline_ms=5_000, **QUICK))
    limiter = Limiter(COUNTED, store=store, on_failure="raise")
    server.kill()

    def fails() -> bool:
        with pytest.raises(StoreUnavailable):
            limiter.check(key)
        return only(store).state != "closed"

    until(fails, "the breaker is open", SECONDS_MAX)
    server.start()
    child = os.fork()
    if child == 0:
        try:
            right = not store.breakers() and limiter.check(key).allowed
        except BaseException:  # the exit code tells the parent
            right = False
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.close()


def test_a_closed_store_stops_probing(server: Single, key: str) -> None:
    """Its thread ends."""
    with client("threads", server.uri, **QUICK) as api:
        server.kill()
        until(lambda: is_open(api), "the breaker is open", SECONDS_MAX)
        prober = api.store._servers._prober
        assert prober._running
    until(lambda: not prober._running, "the thread has ended", SECONDS_MAX)


def _each_us(work: Callable[[], object], times: int = 2_000) -> float:
    """Return the microseconds per call, the median of a few rounds."""
    rounds = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(times):
            work()
        rounds.append((time.perf_counter() - started) / times * 1e6)
    return median(rounds)


def test_an_open_breaker_costs_about_what_a_local_check_costs(server: Single, key: str) -> None:
    """It prints the time of a degraded answer, and of checks without a server."""
    options = {"breaker_open_ms": 60_000, "breaker_open_max_ms": 60_000}
    limits = Limit(1_000_000, per=1)
    with client("threads", server.uri, limits, on_failure="open", **options) as api:
        server.kill()
        until(lambda: is_open(api), "the breaker is open", SECONDS_MAX)
        degraded = Limiter(limits, store=api.store, on_failure="open")
        local = Limiter(limits, store="memory://")
        plain = Limiter(limits, store=PythonMemoryStore(SystemClock(), 10))
        assert degraded.check(key).degraded
        costs = {
            "breaker open": _each_us(lambda: degraded.check(key)),
            "memory:// in C": _each_us(lambda: local.check(key)),
            "memory:// in Python": _each_us(lambda: plain.check(key)),
        }
        print("; ".join(f"{name} {us:.2f} µs" for name, us in costs.items()))
        # Without it, a call to a silent server takes its deadline: here 5,000,000.
        assert costs["breaker open"] < 1_000


@both_wires
def test_limits_hold_through_an_outage(key: str, wire: str) -> None:
    """The server admits exactly the limit, whatever the breaker did in between."""
    limits = Limit(50, per=86_400)
    with Single(aof=True) as durable, client(wire, durable.uri, limits, **QUICK) as api:
        assert all(api.check(key).allowed for _ in range(20))
        durable.kill()
        until(lambda: is_open(api), "the breaker is open", SECONDS_MAX)
        durable.start()
        until(api.works, "it is back", SECONDS_MAX)
        assert sum(api.check(key).allowed for _ in range(60)) == 30


def test_threads_and_asyncio_both_recover(server: Single, key: str) -> None:
    """At the same time, each with its own store."""
    with clients_of_both(server.uri, **QUICK) as clients:
        server.kill()
        for api in clients:
            until(lambda api=api: is_open(api), "the breaker is open", SECONDS_MAX)
        server.start()
        for api in clients:
            until(api.works, "it is back", SECONDS_MAX)
