"""Processes send messages to each other through real Redis servers of every kind."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from ratekeeper import StoreTimeout, StoreUnavailable, open_store
from ratekeeper.control.follow import announce
from ratekeeper.decide.stores.redis import pubsub
from ratekeeper.decide.stores.redis.pubsub import RedisSubscription
from ratekeeper.decide.stores.redis.store import RedisStore
from ratekeeper.fleet.transport import GossipTransport
from tests.redis_servers import KINDS, Cluster, Sentinels, Single, User, running, until

SECONDS_MAX = 20.0
WAIT_S = 0.05

Open = Callable[..., RedisStore]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Return a function that opens a store; all are closed at the end of the test."""
    stores: list[RedisStore] = []

    def open_one(uri: str, **options: object) -> RedisStore:
        store = open_store(uri, connect_ms=2_000, **options)
        assert isinstance(store, RedisStore)
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        store.close()


def await_message(subscription: RedisSubscription) -> None:
    until(lambda: subscription.wait(WAIT_S), "a message arrives", SECONDS_MAX)


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_reaches_all_subscribers(kind: str, opened: Open) -> None:
    """One store's message reaches each subscriber once, on every kind of server."""
    uri = running(kind).uri
    subscriptions = [opened(uri).subscribe("rules") for _ in range(3)]
    assert announce(opened(uri), 7) is True
    for subscription in subscriptions:
        await_message(subscription)
        assert not subscription.wait(WAIT_S)
        subscription.close()


def test_stores_with_other_prefixes_get_no_message(opened: Open) -> None:
    """Two prefixes on one server are two channels."""
    uri = running("single").uri
    ours, theirs = (opened(uri, prefix=prefix).subscribe("rules") for prefix in ("us", "them"))
    opened(uri, prefix="us").publish("rules", "7")
    await_message(ours)
    assert not theirs.wait(WAIT_S)


def test_a_dead_server_is_an_error(opened: Open) -> None:
    """`wait`, `publish` and `subscribe` raise; a new subscription works after the restart."""
    with Single() as server:
        store = opened(server.uri)
        subscription = store.subscribe("rules")
        server.kill()
        with pytest.raises(StoreUnavailable):
            until(lambda: subscription.wait(WAIT_S), "the subscription fails", SECONDS_MAX)
        with pytest.raises(StoreUnavailable):
            store.publish("rules", "7")
        with pytest.raises(StoreUnavailable):
            store.subscribe("rules")
        server.start()
        again = store.subscribe("rules")
        store.publish("rules", "8")
        await_message(again)


def test_a_silent_server_is_noticed(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent server ends the subscription with an error; an idle one does not."""
    monkeypatch.setattr(pubsub, "IDLE_S_MAX", 0.2)
    with Single() as server:
        store = opened(server.uri)
        subscription = store.subscribe("rules")
        idle_until = time.monotonic() + 1.5
        while time.monotonic() < idle_until:
            assert not subscription.wait(WAIT_S)
        server.pause()
        with pytest.raises(StoreTimeout, match="does not answer"):
            until(lambda: subscription.wait(WAIT_S), "the silence is noticed", SECONDS_MAX)
        with pytest.raises(StoreTimeout):
            store.subscribe("rules")
        server.resume()


def test_a_forbidden_channel_is_an_error(opened: Open) -> None:
    """A user without the right to the channel gets Redis' reason, without the password."""
    users = [User("app", "s3cret", "~* resetchannels +@all")]
    with Single(password="root", users=users) as server:
        store = opened(server.uri)
        for call in (lambda: store.subscribe("rules"), lambda: store.publish("rules", "7")):
            with pytest.raises(StoreUnavailable, match=r"(?i)no permissions.*channel") as caught:
                call()
            assert "s3cret" not in str(caught.value)


def test_a_promoted_replica_carries_messages(opened: Open) -> None:
    """After a failover, a new subscription gets messages through the new primary."""
    with Sentinels() as servers:
        store = opened(servers.uri)
        subscription = store.subscribe("rules")
        servers.kill_primary()
        servers.wait_promoted()
        with pytest.raises((StoreUnavailable, StoreTimeout)):
            until(lambda: subscription.wait(WAIT_S), "the subscription fails", SECONDS_MAX)
        again = until(lambda: _subscribed(store), "the store subscribes again", SECONDS_MAX)
        store.publish("rules", "7")
        await_message(again)


def test_a_cluster_that_has_lost_a_node_carries_messages(opened: Open) -> None:
    """Messages arrive through the nodes that are left."""
    with Cluster() as cluster:
        store = opened(cluster.uri)
        store.publish("rules", "1")
        cluster.kill_primary(0)
        cluster.wait_promoted(0)
        again = until(lambda: _subscribed(store), "the store subscribes again", SECONDS_MAX)
        for _ in range(10):
            store.publish("rules", "7")
            await_message(again)


def _subscribed(store: RedisStore) -> RedisSubscription | None:
    try:
        return store.subscribe("rules")
    except (StoreUnavailable, StoreTimeout):
        return None


def test_a_closed_store_raises(opened: Open) -> None:
    """`subscribe` and `publish` of a closed store raise StoreUnavailable."""
    store = opened(running("single").uri)
    store.close()
    for call in (lambda: store.subscribe("rules"), lambda: store.publish("rules", "7")):
        with pytest.raises(StoreUnavailable, match="closed"):
            call()


@pytest.mark.parametrize("kind", KINDS)
def test_processes_register_with_an_expiry(kind: str, opened: Open) -> None:
    """All see each other's texts, on every kind of server; one that does not renew its is gone."""
    uri = running(kind).uri
    one, other = opened(uri, prefix="names"), opened(uri, prefix="names")
    hour_ns = 3_600 * 10**9
    assert one.register("gossip", "a", "10.0.0.1:7946", hour_ns) == ["10.0.0.1:7946"]
    assert set(other.register("gossip", "b", "é", hour_ns)) == {"é", "10.0.0.1:7946"}
    for number in range(10):
        # They end at once, and their short life does not end the list.
        assert {"é", "10.0.0.1:7946"} < set(one.register("gossip", f"c{number}", "short", 10**6))
    until(
        lambda: sorted(one.register("gossip", "a", "new", hour_ns)) == ["new", "é"],
        "the texts of c expire",
        SECONDS_MAX,
    )
    assert opened(uri, prefix="others").register("gossip", "a", "x", hour_ns) == ["x"]
    one.unregister("gossip", "a")
    other.unregister("gossip", "missing")
    assert other.register("gossip", "b", "y", 10**9) == ["y"]


@pytest.mark.parametrize("kind", KINDS)
def test_processes_count_each_other(kind: str, opened: Open) -> None:
    """On every kind of server. One that does not renew its name, or leaves, is not counted."""
    uri = running(kind).uri
    one, other = opened(uri, prefix="counted"), opened(uri, prefix="counted")
    hour_ns = 3_600 * 10**9
    assert [one.count_names("live", "a", hour_ns) for _ in range(2)] == [1, 1]
    assert other.count_names("live", "b", hour_ns) == 2
    assert one.count_names("live", "short", 10**7) == 3
    until(lambda: one.count_names("live", "a", hour_ns) == 2, "the name expires", SECONDS_MAX)
    assert opened(uri, prefix="uncounted").count_names("live", "a", hour_ns) == 1
    assert one.count_names("live", "a", 0) == 1
    assert other.count_names("live", "b", 0) == 0


def test_a_count_reads_no_names(opened: Open) -> None:
    """With ten thousand names, a count receives as few bytes as with one."""
    uri = running("single").uri
    store = opened(uri, prefix="many")
    with redis.Redis.from_url(uri) as client:
        key = pubsub.registry_key("many", "live")
        client.zadd(key, {f"{number:016x}": 10**15 for number in range(10_000)})
        before = client.info("stats")["total_net_output_bytes"]
        assert store.count_names("live", "a", 10**9) == 10_001
        assert client.info("stats")["total_net_output_bytes"] - before < 20_000


def test_a_name_is_not_deleted_while_its_process_may_renew_it(opened: Open) -> None:
    """It stays for another lifetime; after that it is removed."""
    uri = running("single").uri
    store = opened(uri, prefix="late")
    # The list lives as long as its longest text: on a busy machine, it would end before the check.
    store.register("gossip", "a", "y", 3_600 * 10**9)
    store.register("gossip", "late", "x", 10**6)
    until(
        lambda: store.register("gossip", "a", "y", 3_600 * 10**9) == ["y"],
        "the text expires",
        SECONDS_MAX,
    )
    with redis.Redis.from_url(uri) as client:
        assert client.hexists(pubsub.registry_key("late", "gossip"), "late")
        store.register("gossip", "a", "y", 10**6)
        assert not client.hexists(pubsub.registry_key("late", "gossip"), "late")


def test_registering_needs_no_more_permissions_than_the_documented_ones(opened: Open) -> None:
    """The user of docs/redis.md may register, and a user without a command is told which."""
    page = (Path(__file__).parents[2] / "docs/redis.md").read_text(encoding="utf-8")
    rules = re.search(r"ACL SETUSER ratekeeper on >secret (~[^`]+)`", page)
    assert rules is not None
    users = [User("app", "s3cret", rules[1])]
    with Single(password="root", users=users) as server:
        assert opened(server.uri).register("gossip", "a", "x", 10**9) == ["x"]
        assert opened(server.uri).count_names("live", "a", 10**9) == 1
    users = [User("app", "s3cret", "~rk:* +@all -hkeys")]
    with (
        Single(password="root", users=users) as server,
        pytest.raises(StoreUnavailable, match=r"the user needs \+time \+hkeys") as caught,
    ):
        opened(server.uri).register("gossip", "a", "x", 10**9)
    assert "s3cret" not in str(caught.value)


def test_nodes_find_each_other_through_redis(opened: Open) -> None:
    """Two nodes of a fleet on one Redis need no list of peers."""
    uri = running("single").uri
    nodes = [
        GossipTransport("127.0.0.1:0", registry=opened(uri, prefix="fleet").channel)
        for _ in range(2)
    ]
    try:
        for node in nodes:
            node.start()
        until(
            lambda: all(node.live_nodes() == 2 for node in nodes),
            "they know each other",
            SECONDS_MAX,
        )
    finally:
        for node in nodes:
            node.stop()


def test_a_registry_survives_a_failover(opened: Open) -> None:
    """After the slot's primary was killed, a process registers with the promoted replica."""
    with Cluster() as cluster:
        store = opened(cluster.uri)
        store.register("gossip", "a", "x", 10**9)
        cluster.kill_primary(1)  # it has slots 5,461 to 10,922, and the list is in 6,659
        cluster.wait_promoted(1)
        until(lambda: _registered(store), "the store registers again", SECONDS_MAX)


def _registered(store: RedisStore) -> list[str] | None:
    try:
        return store.register("gossip", "a", "x", 10**9)
    except (StoreUnavailable, StoreTimeout):
        return None
