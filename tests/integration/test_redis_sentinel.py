"""Clients find the primary under three Sentinels, and follow each promotion.

The tests kill, pause or switch the primary under load of both wires (threads and asyncio).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
import redis

from ratekeeper import Decision, Limit
from ratekeeper.core.errors import StoreUnavailable
from tests.integration.redis_wires import (
    COUNTED,
    LATE_SECONDS_MAX,
    SECONDS_MAX,
    YEAR,
    Load,
    admitted,
    await_copying,
    both_wires,
    client,
    clients_of_both,
    counted,
    errors_of,
    fail_over,
    outcome,
    recovers_in_time,
    timed,
)
from tests.integration.tcp_proxy import Proxy
from tests.redis_servers import Sentinels, Server, until
from tests.redis_servers.ports import HOST

# Two clients have four calls in flight each. Some more writes may not have reached the replica yet.
LOST_UNITS_MAX = 100


@pytest.fixture(scope="module")
def servers() -> Iterator[Sentinels]:
    """Start one set of servers for all tests here. A test that kills a server revives it."""
    with Sentinels() as started:
        yield started


def primary_of(servers: Sentinels) -> Server:
    """Return the primary that the Sentinels name."""
    return next(one for one in servers.servers if one.address == servers.primary)


def connections_of(server: Server) -> int:
    """Return the number of connections whose last command was a check."""
    return sum(each["cmd"] in {"evalsha", "eval"} for each in server.admin.client_list())


def calls_of(server: Server) -> int:
    """Return the number of checks that a server has received since it started."""
    stats = server.admin.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))


@both_wires
def test_the_primary_is_found(servers: Sentinels, key: str, wire: str) -> None:
    """Any Sentinel names the primary, and checks go there directly. Each database counts alone."""
    primary = primary_of(servers)
    before = calls_of(primary)
    with client(wire, servers.uri, coalesce=False) as api:
        assert not errors_of(api.together([key] * 50))
        assert api.peek(key).remaining == COUNTED.limit - 50
    assert calls_of(primary) >= before + 51
    with client(wire, servers.uri, db=3) as api:
        assert api.peek(key).remaining == COUNTED.limit


@both_wires
def test_the_first_checks_wait_until_the_primary_is_found(
    servers: Sentinels, key: str, wire: str
) -> None:
    """The Sentinel names it later than a call may take: none passes uncounted."""
    with Proxy(servers.sentinels[0].port) as proxy:
        proxy.accept_seconds = 1.5
        uri = f"redis+sentinel://{HOST}:{proxy.port}/main/0"
        options = {"deadline_ms": 1_000, "connect_ms": 20_000}
        with client(wire, uri, Limit(10, per=YEAR), on_failure="open", **options) as api:
            outcomes = api.together([key] * 40)
    assert not any(isinstance(each, Decision) and each.degraded for each in outcomes)
    assert admitted(outcomes) == 10


@both_wires
def test_an_unknown_service_fails_by_name(servers: Sentinels, key: str, wire: str) -> None:
    """Every call fails at once, with an error that repeats the wrong name from the URI."""
    uri = servers.uri.replace("/main/", "/mine/")
    with client(wire, uri) as api:
        for _ in range(3):
            seconds, error = timed(lambda: outcome(api.start(key)))
            assert isinstance(error, StoreUnavailable)
            assert "monitors no primary called 'mine'" in str(error)
            assert seconds < LATE_SECONDS_MAX


def test_only_new_clients_need_a_sentinel(servers: Sentinels, key: str) -> None:
    """One live Sentinel is enough for a new client. Without one, only the new clients fail."""
    with clients_of_both(servers.uri) as clients:
        for api in clients:
            assert api.check(key).allowed
        for sentinel in servers.sentinels[:2]:
            sentinel.kill()
        with clients_of_both(servers.uri) as newcomers:
            for api in (*clients, *newcomers):
                assert api.check(key).allowed
        servers.sentinels[2].kill()
        with clients_of_both(servers.uri) as newcomers:
            for api in newcomers:
                error = outcome(api.start(key))
                assert isinstance(error, StoreUnavailable)
                assert "no server could name the primary" in str(error)
            for api in clients:
                assert api.check(key).allowed
            servers.revive()
            for api in newcomers:
                until(api.works, "the Sentinels are back", SECONDS_MAX)
    assert counted(servers.uri, key) == 8


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_checks_are_exact_again_after_a_promotion(servers: Sentinels, key: str, how: str) -> None:
    """Under load, both wires recover soon. The old primary gets no checks after its return."""
    recovers_in_time(lambda key: seconds_of_promotion(servers, key, how), key)


def seconds_of_promotion(servers: Sentinels, key: str, how: str) -> float:
    """Return the time in which both wires recovered, after the other claims were checked."""
    old = primary_of(servers)

    def die() -> None:
        await_copying(old, [one for one in servers.servers if one is not old])
        getattr(old, how)()

    failover = fail_over(servers.uri, key, die, servers.wait_promoted)
    print(f"{how}: {failover}")
    assert failover.charged_units <= failover.charged_units_max
    assert failover.lost_units <= LOST_UNITS_MAX
    with clients_of_both(servers.uri, Limit(300, per=YEAR, name="after")) as clients:
        for api in clients:
            assert api.check(f"{key} early").allowed
        servers.revive()
        assert primary_of(servers) is not old
        before = calls_of(old)
        outcomes = [each for api in clients for each in api.together([key] * 200)]
        assert not errors_of(outcomes)
        assert admitted(outcomes) == 300
        assert calls_of(old) == before
    assert counted(servers.uri, key) == failover.charged_units
    return max(failover.right_seconds.values())


def test_an_operators_switch_is_followed(servers: Sentinels, key: str) -> None:
    """SENTINEL FAILOVER under load: both wires leave the old primary long before its demotion.

    With Sentinel's defaults, the old primary accepts writes beside the new one for eight seconds.
    Its demotion loses those writes. So clients must find the new primary by themselves.
    """
    recovers_in_time(lambda key: seconds_of_switch(servers, key), key)


def seconds_of_switch(servers: Sentinels, key: str) -> float:
    """Return the time in which both wires left the old primary; check the other claims."""
    old = primary_of(servers)
    _set_publish_period(servers, 10_000)  # the demotion follows after four periods

    def switched() -> bool:
        with suppress(redis.ResponseError):  # a failover already runs, or the replica is not ready
            servers.sentinels[0].admin.execute_command("SENTINEL", "FAILOVER", servers.service)
        return servers.primary != old.address

    with clients_of_both(servers.uri) as clients, ExitStack() as stack:
        loads = [stack.enter_context(Load(api, key)) for api in clients]
        until(lambda: all(len(load.outcomes) > 200 for load in loads), "there is load", SECONDS_MAX)
        until(switched, "Sentinel has switched the primary", SECONDS_MAX)
        switched_at = time.monotonic()

        def left() -> bool:
            calls, before = calls_of(old), [len(load.outcomes) for load in loads]
            until(
                lambda: all(map(lambda load, n: len(load.outcomes) > n + 100, loads, before)),
                "there is more load",
                SECONDS_MAX,
            )
            return calls_of(old) == calls

        until(left, "both wires have left the old primary", SECONDS_MAX)
        seconds = time.monotonic() - switched_at
        assert old.admin.info("replication")["role"] == "master"
        # The threads keep no connection. The asyncio connection had calls in flight and may stay.
        until(lambda: connections_of(old) <= 1, "the clients close its connections", SECONDS_MAX)
        charged = counted(servers.uri, key)
    outcomes = [each for load in loads for each in load.outcomes]
    print(f"switch: followed in {seconds:.2f} s; {len(errors_of(outcomes))} calls failed; ")
    print(f"{max(admitted(outcomes) - charged, 0)} of {admitted(outcomes)} units lost")
    _set_publish_period(servers, 100)
    until(
        lambda: old.admin.info("replication")["role"] == "slave",
        "Sentinel demotes the old primary",
        SECONDS_MAX,
    )
    servers.revive()
    assert len(errors_of(outcomes)) <= 8  # the calls in flight, if Sentinel cuts connections
    return seconds


def _set_publish_period(servers: Sentinels, period_ms: int) -> None:
    """Set how often the Sentinels exchange their state; `revive` restores the default."""
    for sentinel in servers.sentinels:
        sentinel.admin.execute_command("SENTINEL", "DEBUG", "PUBLISH-PERIOD", period_ms)


def test_a_primary_that_only_restarts_is_used_again(servers: Sentinels, key: str) -> None:
    """A primary that restarts before the Sentinels notice is used again, with empty memory."""
    primary = primary_of(servers)
    with clients_of_both(servers.uri) as clients:
        for api in clients:
            assert api.check(key).allowed
        primary.kill()
        primary.start()
        for api in clients:
            until(api.works, "the client uses the primary again", SECONDS_MAX)
            assert api.check(key).allowed
    servers.revive()
