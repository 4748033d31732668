"""Faults of a Redis server, each with its outcome, on real servers.

Threads and asyncio meet every fault. A check that got an answer was charged exactly once; one that
failed was charged at most once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import redis

from ratekeeper import Decision, Limit
from ratekeeper.core.errors import StoreTimeout, StoreUnavailable
from tests.integration.redis_wires import (
    COUNTED,
    LATE_SECONDS_MAX,
    SECONDS_MAX,
    YEAR,
    Load,
    admitted,
    both_wires,
    client,
    configured,
    counted,
    errors_of,
    outcome,
    timed,
)
from tests.integration.tcp_proxy import Proxy
from tests.redis_servers import Single, until
from tests.redis_servers.ports import HOST


@pytest.fixture(scope="module")
def server() -> Iterator[Single]:
    """Return the server that the tests of this file share."""
    with Single(lines=["enable-debug-command yes"]) as started:
        yield started


@contextmanager
def repeated(work: Callable[[], object]) -> Iterator[None]:
    """Repeat a function in the background, for the length of the block."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@both_wires
def test_flushed_scripts_cause_no_errors(server: Single, key: str, wire: str) -> None:
    """Flushed hundreds of times under load: no error, and each check is charged once."""
    flushing = server.client()
    limits = [COUNTED, Limit(600, per=YEAR, algorithm="sliding_window_log")]
    with client(wire, server.uri, limits) as api, repeated(flushing.script_flush):
        outcomes = [one for _ in range(10) for one in api.together([key] * 100)]
        assert not errors_of(outcomes)
        assert admitted(outcomes) == 600
        api.start(key, 5, verb="refund").result()
        api.start(key, 5, verb="grant").result()
        api.start(key, verb="reset").result()
        assert api.check(key, 600).allowed
    flushing.close()


@both_wires
def test_flushed_keys_start_with_a_full_quota(server: Single, key: str, wire: str) -> None:
    """FLUSHALL is an operator's right: no error, and the quota is full.

    At once, because no denial is cached here; otherwise within a second (`test_redis_denials.py`).
    """
    with client(wire, server.uri, Limit(2, per=YEAR), denied_cache_ms=0) as api:
        assert [api.check(key).allowed for _ in range(3)] == [True, True, False]
        server.flush()
        assert [api.check(key).allowed for _ in range(3)] == [True, True, False]


@both_wires
def test_a_restart_fails_only_the_calls_in_flight(key: str, wire: str) -> None:
    """The same limiter goes on, and with the AOF on it keeps the counts."""
    with Single(aof=True) as server, client(wire, server.uri, deadline_ms=1_000) as api:
        with Load(api, key, workers=8) as load:
            until(lambda: len(load.outcomes) > 100, "there is some load", SECONDS_MAX)
            server.kill()
            server.start()
            before = len(load.outcomes)
            until(
                lambda: admitted(load.outcomes[before:]) > 100,
                "the same limiter checks again",
                SECONDS_MAX,
            )
        errors = errors_of(load.outcomes)
        assert errors
        assert all(isinstance(error, StoreUnavailable | StoreTimeout) for error in errors)
        done = admitted(load.outcomes)
        assert done <= counted(server.uri, key) <= done + len(errors)


@both_wires
def test_calls_to_a_dead_server_fail_at_once(key: str, wire: str) -> None:
    """Not after their deadline; the failure policy answers until the server is back."""
    with (
        Single() as server,
        client(wire, server.uri) as api,
        client(wire, server.uri, on_failure="open") as open_api,
        client(wire, server.uri, on_failure="closed") as closed_api,
    ):
        clients = (api, open_api, closed_api)
        assert all(each.check(key).allowed for each in clients)
        server.kill()
        assert isinstance(outcome(api.start(key)), StoreUnavailable)
        opened, closed = open_api.check(key), closed_api.check(key)
        assert (opened.allowed, opened.degraded) == (True, True)
        assert (closed.allowed, closed.degraded) == (False, True)
        # Their deadline is five seconds each.
        assert timed(lambda: [outcome(api.start(key)) for _ in range(300)])[0] < 10
        assert timed(lambda: api.together([key] * 150))[0] < 4.5
        error = outcome(api.start(key))
        assert isinstance(error, StoreUnavailable)
        assert f"{HOST}:{server.port}" in str(error)
        assert "refused" in str(error)
        server.start()
        for each in clients:
            until(each.works, "a check reaches it again", SECONDS_MAX)
        assert [api.check(key).remaining for _ in range(2)] == [999_999, 999_998]


@both_wires
def test_calls_to_a_stopped_server_time_out_and_nothing_is_charged_twice(
    key: str, wire: str
) -> None:
    """SIGSTOP: each call ends by its deadline. After SIGCONT every reply belongs to its key."""
    keys = [f"{key} {number}" for number in range(40)]
    with Single() as server, client(wire, server.uri, deadline_ms=1_000) as api:
        for number, each in enumerate(keys):
            api.check(each, 100 * (number + 1))
        server.pause()
        seconds, (error,) = timed(lambda: api.together(keys[:1]))
        assert 0.99 < seconds < 1 + LATE_SECONDS_MAX
        assert isinstance(error, StoreTimeout)
        assert "no answer in 1000 ms; the call may have been counted once" in str(error)
        for _ in range(3):
            seconds, outcomes = timed(lambda: api.together(keys))
            assert seconds < 1 + LATE_SECONDS_MAX
            assert len(errors_of(outcomes)) == len(keys)
        server.resume()
        until(api.works, "it answers again", SECONDS_MAX)
        for number, each in enumerate(keys):
            spent = COUNTED.limit - api.peek(each).remaining
            assert 100 * (number + 1) <= spent <= 100 * (number + 1) + 4
            # A late reply to another call would contain another key's remaining units.
            assert api.check(each, 7).remaining == COUNTED.limit - spent - 7


@both_wires
def test_a_server_that_stops_and_continues_charges_at_most_once(key: str, wire: str) -> None:
    """Stopped for longer and shorter than the deadline, many times: answered ≤ charged ≤ called."""
    with Single() as server, client(wire, server.uri, deadline_ms=60) as api:
        with Load(api, key, workers=8) as load:
            for number in range(12):
                before = len(load.outcomes)
                server.pause()
                until(
                    lambda before=before, extra=8 * (number % 3): (
                        len(load.outcomes) >= before + extra
                    ),
                    "calls fail",
                    SECONDS_MAX,
                )
                server.resume()
                until(
                    lambda before=before: admitted(load.outcomes[before:]) > 10,
                    "calls are answered",
                    SECONDS_MAX,
                )
        done = admitted(load.outcomes)
        assert done <= counted(server.uri, key) <= len(load.outcomes)
        remaining = [each.remaining for each in load.outcomes if isinstance(each, Decision)]
        assert len(set(remaining)) == len(remaining)  # two calls with one answer would share it


@both_wires
def test_calls_wait_for_a_server_that_loads_its_file(server: Single, key: str, wire: str) -> None:
    """As long as the deadline and the attempts last; a refused call was not counted."""
    server.admin.execute_command("DEBUG", "POPULATE", 200, "filler", 1_100)
    reloading = server.client()
    # It serves clients after each kilobyte, so at each key.
    looking = {"rdbcompression": "no", "loading_process_events_interval_bytes": 1_024}

    def reload() -> None:
        reloading.execute_command("DEBUG", "RELOAD")

    def is_loading() -> bool:
        try:
            server.admin.ping()
        except redis.BusyLoadingError:
            return True
        return False

    with client(wire, server.uri) as api:
        assert api.check(key).allowed
        with configured(server, key_load_delay=500, **looking):  # microseconds each
            short = threading.Thread(target=reload)
            short.start()
            until(is_loading, "it is loading", SECONDS_MAX)
            assert api.check(key).remaining == COUNTED.limit - 2
            short.join()
        with configured(server, key_load_delay=20_000, **looking):
            long = threading.Thread(target=reload)
            long.start()
            until(is_loading, "it is loading", SECONDS_MAX)
            error = outcome(api.start(key))
            with client(wire, server.uri) as newcomer:
                refused = outcome(newcomer.start(key))
            server.admin.config_set("key-load-delay", 0)
            long.join()
        for each in (error, refused):
            assert isinstance(each, StoreUnavailable)
            assert "LOADING" in str(each)
        assert api.check(key).remaining == COUNTED.limit - 3
    reloading.close()


@both_wires
def test_calls_wait_for_another_clients_long_script(server: Single, key: str, wire: str) -> None:
    """BUSY: retried until it ends; if it does not end, an error that says so, and no charge."""
    endless = "while true do end"
    other = server.client()

    def spin() -> None:
        with pytest.raises(redis.ResponseError, match="killed"):
            other.eval(endless, 0)

    def is_busy() -> bool:
        try:
            server.admin.ping()
        except redis.ResponseError as error:
            return "BUSY" in str(error)
        return False

    with (
        Proxy(server.port) as proxy,
        client(wire, proxy.uri) as api,
        configured(server, busy_reply_threshold=1),
    ):
        assert api.check(key).allowed
        for ends_in_time in (True, False):
            script = threading.Thread(target=spin)
            script.start()
            until(is_busy, "the script is found to take long", SECONDS_MAX)
            call = api.start(key)
            if ends_in_time:
                until(lambda: "BUSY" in proxy.refusals, "it was refused once", SECONDS_MAX)
            else:
                error = outcome(call)
                assert isinstance(error, StoreUnavailable)
                assert "BUSY" in str(error)
            server.admin.script_kill()
            script.join()
            if ends_in_time:
                assert isinstance(outcome(call), Decision)
    assert counted(server.uri, key) == 2
    other.close()
