"""Processes send messages to each other through real Redis servers of every kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.redis_servers import KINDS, Cluster, Sentinels, Single, User, running, until
from tollkeeper import StoreTimeout, StoreUnavailable, open_store
from tollkeeper.control.follow import announce
from tollkeeper.decide.stores.redis import pubsub
from tollkeeper.decide.stores.redis.pubsub import RedisSubscription
from tollkeeper.decide.stores.redis.store import RedisStore

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
