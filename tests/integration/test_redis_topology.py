"""A topology finds its servers: real slots, promotions, silent servers, logins and TLS."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, cast

import pytest
import redis

from ratekeeper.core.errors import ConfigError, RatekeeperError, StoreTimeout, StoreUnavailable
from ratekeeper.decide.stores.redis import topology as module
from ratekeeper.decide.stores.redis.config import Address, parse
from ratekeeper.decide.stores.redis.topology import SLOTS, Topology, slot_of
from tests.redis_servers import Cluster, Sentinels, Server, Single, Tls, User, running, until
from tests.redis_servers.ports import HOST, free_port

CLUSTER_LINES = ("cluster-enabled yes",)
# Room for a busy machine; nothing takes more than two seconds on an idle one.
SECONDS_MAX = 20.0


def _topology(uri: str, **options: object) -> closing[Topology]:
    return closing(Topology(parse(uri, **options)))


def _failure(uri: str, **options: object) -> RatekeeperError:
    """Return the error of a first refresh."""
    with _topology(uri, **options) as topology, pytest.raises(RatekeeperError) as caught:
        topology.refresh()
    return caught.value


def _refreshed(topology: Topology) -> Topology:
    topology.refresh()
    return topology


def _cluster_uri(*servers: Server) -> str:
    return "redis+cluster://" + ",".join(f"{HOST}:{server.port}" for server in servers)


def _address(server: Server) -> Address:
    return Address(*server.address)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each refresh call the servers, without a minimum interval."""
    monkeypatch.setattr(module, "REFRESH_INTERVAL_NS_MIN", 0)


@pytest.fixture
def alone() -> Iterator[Single]:
    """Start a cluster of one node, which has every slot."""
    with Single(lines=CLUSTER_LINES) as server:
        _give_slots(server)
        yield server


def _give_slots(server: Server, last: int = SLOTS - 1) -> None:
    server.admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, last)


@pytest.fixture
def cluster() -> Cluster:
    """Return the shared cluster, for tests that kill no server."""
    return cast("Cluster", running("cluster"))


@pytest.fixture(scope="module")
def sentinels() -> Iterator[Sentinels]:
    """Start Sentinels that are slow to declare a server dead, for tests that kill no server."""
    with Sentinels(down_after_ms=10_000) as servers:
        yield servers


@pytest.fixture(scope="module")
def mortal_cluster() -> Iterator[Cluster]:
    """Start a cluster that replaces a dead node after a second. A test revives what it kills."""
    with Cluster() as servers:
        yield servers


def test_slot_of_agrees_with_the_server(cluster: Cluster) -> None:
    """`slot_of` and CLUSTER KEYSLOT agree on random keys, with braces anywhere."""
    seeded = random.Random(4)
    keys = [
        b"",
        b"{}",
        b"{}a",
        b"{}{a}",
        b"{a}b",
        b"a{b}c{d}",
        b"{a",
        b"a}",
        b"}{",
        b"{{a}}",
        b"{a}{",
    ]
    keys += [bytes(seeded.choices(b"{}ab\0\xff:", k=seeded.randint(0, 12))) for _ in range(3_000)]
    pipeline: Any = cluster.nodes[0].admin.pipeline(transaction=False)
    for key in keys:
        pipeline.execute_command("CLUSTER", "KEYSLOT", key)
    assert [slot_of(key) for key in keys] == pipeline.execute()


def test_every_slot_has_its_primary(cluster: Cluster) -> None:
    """Three of six addresses are enough to find all; the first refresh makes the first call."""
    with _topology(cluster.uri) as topology:
        assert topology.slots[0] is None
        topology.refresh()
        for slot in (0, 1, SLOTS // 3, SLOTS // 2, SLOTS - 1):
            assert topology.slots[slot] == _address(cluster.node_of(slot))
        assert topology.slots[SLOTS - 1] != topology.slots[0]
        assert set(topology.primaries()) == set(map(_address, cluster.primaries()))


def test_primaries_and_nodes_refresh_by_themselves(
    cluster: Cluster, sentinels: Sentinels, eager: None
) -> None:
    """`primaries` and `nodes` need no refresh before them; `nodes` includes the replicas."""
    with _topology(cluster.uri) as topology:
        assert len(topology.primaries()) == 3
    with _topology(sentinels.uri) as topology:
        assert topology.nodes()[0] == Address(*sentinels.primary)
        assert set(topology.nodes()) == set(map(_address, sentinels.servers))
    with _topology(sentinels.uri) as topology:
        assert topology.primaries() == [Address(*sentinels.primary)]


def test_replicas_of_a_cluster_are_known(mortal_cluster: Cluster, eager: None) -> None:
    """`nodes` lists replicas once they have copied data. The cluster does not list them before."""
    mortal_cluster.flush()
    everyone = set(map(_address, mortal_cluster.nodes))
    with _topology(mortal_cluster.uri) as topology:
        until(
            lambda: set(_refreshed(topology).nodes()) == everyone,
            "all six nodes are known",
            SECONDS_MAX,
            topology.nodes,
        )


def test_moved_takes_effect_at_once(cluster: Cluster) -> None:
    """`moved` changes that slot only; a later refresh corrects a wrong address."""
    with _topology(cluster.uri) as topology:
        topology.refresh()
        before, stranger = topology.slots[7], Address("stranger", 1)
        topology.moved(7, stranger)
        assert topology.slots[7] == stranger
        assert topology.slots[6] == topology.slots[8] == before
        assert stranger in topology.nodes()
        until(
            lambda: _refreshed(topology).slots[7] == before,
            "a refresh corrects slot 7",
            SECONDS_MAX,
        )
        assert stranger not in topology.nodes()


def test_a_moved_slot_is_found(cluster: Cluster, eager: None) -> None:
    """The next refresh finds a slot's new node and leaves the neighbouring slots unchanged."""
    source, target = cluster.node_of(9), cluster.node_of(SLOTS - 1)
    with _topology(cluster.uri) as topology:
        cluster.move_slot(9, target.port)
        try:
            topology.refresh()
            assert topology.slots[9] == _address(target)
            assert topology.slots[8] == topology.slots[10] == _address(source)
        finally:
            cluster.move_slot(9, source.port)


def test_a_killed_primary_of_a_cluster_is_replaced(mortal_cluster: Cluster, eager: None) -> None:
    """A refresh finds the new primary after its promotion."""
    with _topology(mortal_cluster.uri) as topology:
        topology.refresh()
        old = Address(*mortal_cluster.kill_primary(3))
        try:
            promotion = mortal_cluster.wait_promoted(3)
            until(
                lambda: _refreshed(topology).slots[3] != old,
                "a refresh finds the new primary",
                SECONDS_MAX,
            )
            assert topology.slots[3] == Address(*promotion.address)
        finally:
            mortal_cluster.revive()


def test_a_silent_node_costs_its_timeout_once(mortal_cluster: Cluster, eager: None) -> None:
    """Later refreshes call a silent node last, and stop at the first good answer before it."""
    with _topology(mortal_cluster.uri, connect_ms=700) as topology:
        topology.refresh()
        mortal_cluster.node_of(3).pause()
        try:
            started = time.monotonic()
            for _ in range(100):
                topology.refresh()
            assert time.monotonic() - started < 30  # one timeout for each refresh would be 70
        finally:
            mortal_cluster.revive()


def test_a_killed_primary_under_sentinels_is_replaced(eager: None) -> None:
    """A refresh finds the new primary once a Sentinel names it, and keeps the old one before."""
    with Sentinels() as servers, _topology(servers.uri) as topology:
        topology.refresh()
        old = Address(*servers.kill_primary())
        with pytest.raises(StoreUnavailable, match=f"{old}, named by Sentinel .*refused"):
            topology.refresh()
        assert topology.slots[0] == old
        promotion = servers.wait_promoted()

        def replaced() -> bool:
            try:
                topology.refresh()
            except StoreUnavailable:
                return False
            return topology.slots[0] == Address(*promotion.address)

        until(replaced, "a Sentinel names the new primary", SECONDS_MAX)
        assert topology.slots[SLOTS - 1] == topology.slots[0]


def test_a_sentinel_that_names_a_replica_is_rejected(sentinels: Sentinels) -> None:
    """The topology verifies the server's role, and then uses a Sentinel that names a primary."""
    (replica,) = (one for one in sentinels.servers if one.address != sentinels.primary)
    lines = (f"bind {HOST}", "port {port}", f"sentinel monitor main {HOST} {replica.port} 2")
    with Server("redis-sentinel", lines) as mistaken:
        error = _failure(f"redis+sentinel://{HOST}:{mistaken.port}/main")
        assert f"{_address(replica)}, named by Sentinel" in str(error)
        assert "it is not a primary" in str(error)
        for _ in range(5):
            both = sentinels.uri.replace("://", f"://{HOST}:{mistaken.port},")
            with _topology(both) as topology:
                topology.refresh()
                assert topology.slots[0] == Address(*sentinels.primary)


def test_an_unknown_service_is_named(sentinels: Sentinels) -> None:
    """The error repeats a service name from the URI that no Sentinel knows."""
    error = _failure(sentinels.uri.replace("/main/0", "/mine"))
    assert isinstance(error, StoreUnavailable)
    assert "monitors no primary called 'mine'" in str(error)


def test_a_silent_primary_costs_its_timeout_once(sentinels: Sentinels) -> None:
    """The refresh waits for a silent primary once, though three Sentinels name it."""
    (primary,) = (one for one in sentinels.servers if one.address == sentinels.primary)
    primary.pause()
    started = time.monotonic()
    try:
        error = _failure(sentinels.uri, connect_ms=2_000)
    finally:
        primary.resume()
    assert time.monotonic() - started < 5.9
    assert isinstance(error, StoreTimeout)
    assert str(error).count(f"{_address(primary)}, named by Sentinel") == 3


def _at_once(topology: Topology, meanwhile: Callable[[], None]) -> list[BaseException | None]:
    """Refresh in eight threads, call `meanwhile` while all wait, and return each thread's error."""

    def waiting() -> int:
        return sum(_is_inside(frame) for frame in sys._current_frames().values())

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(topology.refresh) for _ in range(8)]
        until(lambda: waiting() == 8, "all threads wait", SECONDS_MAX, waiting)
        meanwhile()
        return [future.exception() for future in futures]


def _is_inside(frame: Any) -> bool:
    while frame is not None and frame.f_code.co_name not in ("_result_of", "_ask_servers"):
        frame = frame.f_back
    return frame is not None


def _connections(server: Server) -> int:
    return int(server.admin.info("stats")["total_connections_received"])


def test_a_refresh_is_shared(alone: Single, eager: None) -> None:
    """Eight concurrent refreshes share one connection and its result."""
    before = _connections(alone)
    with _topology(_cluster_uri(alone), connect_ms=60_000) as topology:
        alone.pause()
        assert _at_once(topology, alone.resume) == [None] * 8
        assert topology.slots[0] == _address(alone)
    assert _connections(alone) - before == 1


def test_a_failed_refresh_is_shared_too(alone: Single, eager: None) -> None:
    """Each thread raises its own copy of one error; the next refresh calls the server again."""
    with _topology(_cluster_uri(alone), connect_ms=60_000) as topology:
        alone.pause()
        errors = _at_once(topology, alone.kill)
        assert all(isinstance(error, StoreUnavailable) for error in errors)
        assert len({id(error) for error in errors}) == 8
        assert len({str(error) for error in errors}) == 1
        alone.start()
        topology.refresh()
        assert topology.slots[0] == _address(alone)


def test_a_recent_refresh_is_not_repeated(alone: Single, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh calls a server only after the minimum interval has passed."""
    monkeypatch.setattr(module, "REFRESH_INTERVAL_NS_MIN", 10**15)
    before = _connections(alone)
    with _topology(_cluster_uri(alone)) as topology:
        for _ in range(5):
            topology.refresh()
        assert _connections(alone) - before == 1
        monkeypatch.setattr(module, "REFRESH_INTERVAL_NS_MIN", 0)
        topology.refresh()
        assert _connections(alone) - before == 2


def test_a_single_server_needs_no_call() -> None:
    """The URI holds its address, so a refresh does not connect and cannot fail."""
    with _topology(f"redis://{HOST}:1/5") as topology:
        topology.refresh()
        assert topology.slots[0] == topology.slots[SLOTS - 1] == Address(HOST, 1)
        assert topology.primaries() == topology.nodes() == [Address(HOST, 1)]


def test_the_error_gives_a_reason_for_each_server() -> None:
    """The error covers a refused connection, a single server, a silent server and an unknown host.

    Its cause is the driver's error.
    """
    dead = free_port()
    with Single() as plain, Single(lines=CLUSTER_LINES) as slow:
        slow.pause()
        uri = f"{_cluster_uri(plain, slow)},{HOST}:{dead},no-such-host.invalid"
        error = _failure(uri, connect_ms=200)
        message = str(error)
        assert isinstance(error, StoreUnavailable)
        assert message.startswith(f"{parse(uri).shown()}: no server could name the cluster's slots")
        assert f"{_address(plain)}: it is a single server, not a cluster; write redis://" in message
        assert f"{_address(slow)}: no answer in time" in message
        assert f"{HOST}:{dead}: Connection refused" in message
        assert "no-such-host.invalid:6379: " in message
        assert isinstance(error.__cause__, redis.RedisError)


def test_only_silent_servers_are_a_timeout(monkeypatch: pytest.MonkeyPatch, eager: None) -> None:
    """The refresh raises StoreTimeout, within the time limit of one refresh for all servers."""
    monkeypatch.setattr(module, "REFRESH_NS_MAX", 700_000_000)
    with Single(lines=CLUSTER_LINES) as one, Single(lines=CLUSTER_LINES) as two:
        one.pause()
        two.pause()
        for connect_ms in (500, 60_000):
            started = time.monotonic()
            error = _failure(_cluster_uri(one, two), connect_ms=connect_ms)
            assert isinstance(error, StoreTimeout)
            assert str(error).count(": no answer in time") == 2
            assert 0.6 < time.monotonic() - started < 5


@pytest.mark.parametrize("login", [":wr0ng", "ratekeeper:wr0ng", "stranger:wr0ng", None])
def test_a_rejected_login_names_the_options_to_check(login: str | None) -> None:
    """The error for a wrong or missing login names the options and never holds the password."""
    user = User("ratekeeper", "right")
    with Single(password="root", users=[user], lines=CLUSTER_LINES) as server:
        uri = _cluster_uri(server).replace("://", f"://{login}@" if login else "://")
        error = _failure(uri)
        assert isinstance(error, StoreUnavailable)
        assert "check username and password" in str(error)
        assert "wr0ng" not in str(error) + str(error.__cause__)
        _give_slots(server)
        with _topology(uri, username="ratekeeper", password="right") as topology:
            topology.refresh()


def test_a_sentinels_rejected_login_names_its_options(sentinels: Sentinels) -> None:
    """Sentinels have separate logins, and the error names the options for them."""
    lines = (f"bind {HOST}", "port {port}", "requirepass s3cret")
    monitor = f"sentinel monitor main {sentinels.primary[0]} {sentinels.primary[1]} 2"
    with Server("redis-sentinel", (*lines, monitor), {"password": "s3cret"}) as locked:
        uri = f"redis+sentinel://{HOST}:{locked.port}/main"
        for options in ({}, {"sentinel_password": "wr0ng"}):
            error = _failure(uri, **options)
            assert "check sentinel_username and sentinel_password" in str(error)
            assert "wr0ng" not in str(error)
        with _topology(uri, sentinel_password="s3cret") as topology:
            topology.refresh()
            assert topology.slots[0] == Address(*sentinels.primary)


@pytest.mark.parametrize("password", ["hunter2", "h" * 300])
def test_a_server_that_repeats_the_password_is_not_quoted(password: str) -> None:
    """A server without AUTH repeats the password in its error; our message and traceback do not."""
    with Single(lines=(*CLUSTER_LINES, 'rename-command AUTH ""')) as server:
        with pytest.raises(redis.ResponseError, match="h"):  # the server does repeat it
            server.client(password=password, protocol=2).ping()
        error = _failure(_cluster_uri(server), password=password)
        assert "unknown command 'AUTH'" in str(error)
        assert password[:7] not in str(error)
        assert error.__cause__ is None


@pytest.mark.parametrize("kind", ["ip", "unknown-endpoint", "hostname"])
def test_a_node_without_a_host_gets_the_address_of_the_call(kind: str) -> None:
    """A node reports an empty host until it has met another node; null and ? mean the same."""
    lines = (*CLUSTER_LINES, f"cluster-preferred-endpoint-type {kind}")
    with Single(lines=lines) as server:
        _give_slots(server)
        ((_, _, (host, *_)),) = server.admin.execute_command("CLUSTER", "SLOTS")
        assert host == {"ip": "", "unknown-endpoint": None, "hostname": "?"}[kind]
        with _topology(_cluster_uri(server)) as topology:
            topology.refresh()
            assert topology.primaries() == [_address(server)]


def test_the_answer_that_covers_most_slots_wins(cluster: Cluster, eager: None) -> None:
    """A complete cluster wins over a node with no slots and a node with half of them."""
    with Single(lines=CLUSTER_LINES) as empty, Single(lines=CLUSTER_LINES) as half:
        _give_slots(half, SLOTS // 2)
        for _ in range(8):
            with _topology(_cluster_uri(empty, half, cluster.nodes[0])) as topology:
                topology.refresh()
                assert topology.slots[0] == _address(cluster.node_of(0))
        with _topology(_cluster_uri(empty, half)) as topology:
            topology.refresh()
            assert topology.slots[SLOTS // 2] == _address(half)
            assert topology.slots[SLOTS // 2 + 1] is None
        assert "no slots and knows no node with slots" in str(_failure(_cluster_uri(empty)))


def test_a_user_needs_only_cluster_slots() -> None:
    """If the user may not read the cluster's state, the topology assumes that it is healthy."""
    user = User("app", "pw", "~* +cluster|slots")
    with Single(password="root", users=[user], lines=CLUSTER_LINES) as server:
        _give_slots(server)
        with _topology(_cluster_uri(server), username="app", password="pw") as topology:
            topology.refresh()
            assert topology.slots[0] == _address(server)


def test_refreshes_and_clients_use_tls() -> None:
    """Both verify the authority and the certificate's name, and send the client's certificate."""
    lines = (*CLUSTER_LINES, "tls-cluster yes")
    with Tls(client_certificates=True, lines=lines) as server:
        _give_slots(server)
        uri = server.uri.replace("rediss://", "rediss+cluster://")
        for options in ({}, {"tls_server_name": "localhost"}, {"tls_verify": "none"}):
            with _topology(uri, **options) as topology:
                topology.refresh()
                assert topology.primaries() == [_address(server)]
                assert topology.client(_address(server)).ping()
        wrong_name = _failure(uri, tls_server_name="other.example")
        assert "not valid for 'other.example'" in str(wrong_name)
        # No authority of the system has signed it.
        bare = f"rediss+cluster://{HOST}:{server.port}"
        assert "certificate verify failed" in str(_failure(bare))
        no_file = _failure(bare, tls_ca="gone.pem")
        assert isinstance(no_file, ConfigError)
        assert "gone.pem" in str(no_file)


@pytest.mark.parametrize("kind", ["single", "password", "tls"])
def test_a_client_is_logged_in(kind: str) -> None:
    """`client` returns one logged-in client per server, which replies in bytes, until `close`."""
    with _topology(running(kind).uri) as topology:
        (address,) = topology.nodes()
        client = topology.client(address)
        assert client.echo("here") == b"here"
        assert topology.client(address) is client
        topology.close()
        with pytest.raises(StoreUnavailable, match="has been closed; open it again"):
            topology.client(address)


def test_a_client_is_in_the_database_of_the_uri() -> None:
    """A client selects the URI's database over TCP and over a Unix socket."""
    with Single(lines=["unixsocket redis.sock", "databases 4"]) as server:
        socket_uri = f"redis+unix://{server.folder}/redis.sock?db=3"
        for uri in (server.uri.replace("/0", "/3"), socket_uri):
            with _topology(uri) as topology:
                client = topology.client(topology.nodes()[0])
                assert client.client_info()["db"] == 3


def test_the_client_of_a_removed_server_is_dropped(cluster: Cluster) -> None:
    """A refresh drops the clients of servers that have left, so they cannot pile up over years."""
    gone = Address(HOST, 1)
    with _topology(cluster.uri) as topology:
        before = topology.client(gone)
        topology.refresh()
        assert topology.client(gone) is not before
