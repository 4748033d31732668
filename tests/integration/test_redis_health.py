"""What an operator sees of real servers: states counted, nodes asked, faults found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

import pytest

from tests.redis_servers import Server, Single, running, until
from tollkeeper import Limit, Limiter
from tollkeeper.decide.stores import open_store
from tollkeeper.decide.stores.redis import health as health_module
from tollkeeper.decide.stores.redis.health import census
from tollkeeper.decide.stores.redis.store import RedisStore
from tollkeeper.decide.stores.redis.topology import Topology
from tollkeeper.errors import StoreUnavailable

SETTLED_SECONDS_MAX = 20.0
LONG_NAME = "a rule whose name is longer than a field"


@pytest.fixture
def single() -> Single:
    server = running("single")
    server.flush()
    return cast("Single", server)


@contextmanager
def opened(uri: str, **options: object) -> Iterator[RedisStore]:
    with closing(cast("RedisStore", open_store(uri, None, **options))) as store:
        yield store


def log_limit(limit: int) -> Limit:
    return Limit(limit, per=3_600, algorithm="sliding_window_log")


def admin_pipeline(server: Server) -> Any:
    return server.admin.pipeline(transaction=False)


def scans_seen(server: Server) -> int:
    return int(server.admin.info("commandstats").get("cmdstat_scan", {"calls": 0})["calls"])


def test_states_are_the_limits_that_subjects_are_counted_under(single: Single) -> None:
    """One for each limit of each rule that a subject has spent under; resetting takes them away."""
    with opened(single.uri) as store:
        assert store.stats().states == 0
        one = Limiter("5/minute; 100/hour", store=store)
        other = Limiter("7/minute", store=store, name=LONG_NAME)
        one.check("a")
        assert store.stats().states == 2
        one.check("a")
        other.check("a")
        other.check("b")
        assert store.stats().states == 4
        one.reset("a")
        assert store.stats().states == 2
        other.reset("a")
        other.reset("b")
        assert store.stats().states == 0


def test_what_is_granted_is_no_second_state(single: Single) -> None:
    """A grant counts as its limit's state, with or without one that is spent under."""
    with opened(single.uri) as store:
        limiter = Limiter("5/minute; 100/hour", store=store)
        limiter.grant("a", 10)
        assert store.stats().states == 2
        limiter.check("a", 5)
        assert store.stats().states == 2


@pytest.mark.parametrize("name", ["", "log", LONG_NAME])
@pytest.mark.parametrize("limit", [5, 3_000, 100_000])
def test_the_chunks_of_a_log_are_no_states(single: Single, name: str, limit: int) -> None:
    """A log of many chunks is one state, whatever its rule is called."""
    with opened(single.uri) as store:
        limiter = Limiter([log_limit(limit)], store=store, name=name)
        limiter.check("a", limit)
        assert store.stats().states == 1


def test_a_rule_of_many_limits_is_counted_whole(single: Single) -> None:
    """States that go on in a second field and a third are all counted, of every algorithm."""
    with opened(single.uri) as store:
        limits = [
            Limit(1_000 + number, per=60 + number, algorithm=algorithm)
            for number in range(5)
            for algorithm in ("token_bucket", "sliding_window_counter", "fixed_window")
        ]
        Limiter(limits, store=store).check("a", 3)
        assert store.stats().states == 15


def test_digests_of_rule_names_are_rules(single: Single) -> None:
    """Whatever bytes a digest has: a hundred rules with long names are a hundred states."""
    with opened(single.uri) as store:
        for number in range(100):
            Limiter("5/minute", store=store, name=f"{LONG_NAME} {number}").check("a")
        assert store.stats().states == 100


def test_other_prefixes_and_other_keys_are_not_counted(single: Single) -> None:
    """Two stores on one server count apart, also where one prefix begins with the other."""
    single.admin.set("tk:not-ours", "value")
    single.admin.set("tkx:{a}", "value")
    with opened(single.uri) as store, opened(single.uri, prefix="tkx2") as other:
        Limiter("5/minute", store=store).check("a")
        for subject in "abc":
            Limiter("5/minute", store=other).check(subject)
        assert (store.stats().states, other.stats().states) == (1, 3)


def test_stats_say_bytes_and_expired_keys_and_no_bound(single: Single) -> None:
    """Bytes are what the server says; a Redis has no room of its own, so it is never full."""
    with opened(single.uri) as store:
        before = store.stats()
        limiter = Limiter("5/second", store=store)
        for number in range(20):
            limiter.check(f"user:{number}")
        stats = store.stats()
        assert stats.states == 20
        assert 20 * 50 < stats.bytes < 20 * 500
        assert (stats.states_max, stats.fullness, stats.refused) == (0, 0.0, 0)
        until(
            lambda: store.stats().expired >= before.expired + 20,
            "all have expired",
            SETTLED_SECONDS_MAX,
        )
        assert store.stats().states == 0


def test_a_small_count_takes_two_round_trips_on_one_connection(single: Single) -> None:
    """Whoever asks all the time does not notice, and nor does the server."""
    with opened(single.uri) as store:
        Limiter("5/minute", store=store).check("a")
        store.stats()
        sent: list[int] = []
        client: Any = store._servers.topology.client(store.config.addresses[0])
        plain = client.connection_pool.get_connection
        client.connection_pool.get_connection = lambda: sent.append(1) or plain()
        before = single.admin.info("stats")["total_connections_received"]
        assert store.stats().states == 1
        assert len(sent) == 2
        assert single.admin.info("stats")["total_connections_received"] == before


def test_a_thousand_subjects_are_counted_exactly_and_more_estimated(single: Single) -> None:
    """Above a sample's size, states are the sample's mean times the subjects."""
    topology = Topology(open_config(single.uri))
    with closing(topology), opened(single.uri) as store:
        two = Limiter("5/minute; 100/hour", store=store)
        for number in range(health_module.SUBJECTS_COUNTED_MAX):
            two.check(f"user:{number}")
        counted = census(topology, "tk")
        assert (counted.subjects, counted.states, counted.exact) == (1_000, 2_000, True)
        for number in range(500):
            two.check(f"more:{number}")
        counted = census(topology, "tk")
        assert (counted.subjects, counted.states, counted.exact) == (1_500, 3_000, False)


def test_a_large_database_is_estimated_from_a_part(single: Single) -> None:
    """Of 40,000 keys, a quarter ours, at most some 10,000 are looked at; the estimate is near."""
    pipeline = admin_pipeline(single)
    for number in range(30_000):
        pipeline.set(f"other:{number}", 1)
    pipeline.execute()
    with opened(single.uri) as store, closing(Topology(store.config)) as topology:
        Limiter("5/minute; 100/hour", store=store).check("a")
        hash_of_a = single.admin.execute_command("DUMP", "tk:{a}", NEVER_DECODE=True)
        for number in range(10_000):
            pipeline.restore(f"tk:{{user:{number}}}", 3_600_000, hash_of_a)
        pipeline.execute()
        before = scans_seen(single)
        counted = census(topology, "tk")
        assert not counted.exact
        assert counted.subjects == pytest.approx(10_000, rel=0.15)
        assert counted.states == pytest.approx(20_000, rel=0.15)
        assert scans_seen(single) - before == 10
    single.flush()


def test_foreign_values_under_our_prefix_are_passed_over(single: Single) -> None:
    """Somebody's string where a hash should be makes the count inexact, not impossible."""
    with opened(single.uri) as store, closing(Topology(store.config)) as topology:
        Limiter("5/minute", store=store).check("a")
        single.admin.set("tk:{b}", "no hash")
        counted = census(topology, "tk")
        assert (counted.subjects, counted.exact) == (2, False)
        single.admin.delete("tk:{a}")
        with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
            census(topology, "tk")
    single.flush()


def open_config(uri: str) -> Any:
    with opened(uri) as store:
        return store.config
