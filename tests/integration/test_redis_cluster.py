"""A Redis Cluster whose slots move and whose nodes die, under load from threads and asyncio.

While slots move, no caller gets an error and exactly the limit is admitted. When a primary dies,
checks fail until a replica has taken over, and are exact again within seconds, without a restart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count

import pytest

from ratekeeper import Decision, Limit
from ratekeeper.core.errors import StoreError, StoreUnavailable
from ratekeeper.decide.stores.redis.topology import SLOTS, slot_of
from tests.integration.redis_wires import (
    COUNTED,
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
    key_of,
    outcome,
    recovers_in_time,
)
from tests.integration.tcp_proxy import Proxy
from tests.redis_servers import Cluster, Server, Single, until
from tests.redis_servers.ports import HOST

# Two clients have four calls in flight each; some more may be on the way to the replica.
LOST_UNITS_MAX = 100


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Return the cluster of all tests here; a test that kills a node restarts it."""
    with Cluster() as started:
        yield started


@pytest.fixture(scope="module")
def lone_node() -> Iterator[Single]:
    """Return a cluster of one node, which has every slot."""
    with Single(lines=["cluster-enabled yes"]) as started:
        started.admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
        yield started


def slot(subject: str) -> int:
    """Return the slot of a subject."""
    return slot_of(key_of(subject).encode())


def beside(*subjects: str) -> str:
    """Return another subject in the slot of the first, but in none of their buckets."""
    number, taken = slot(subjects[0]), {key_of(each) for each in subjects}
    tried = (f"{subjects[0]} {each}" for each in count())
    return next(each for each in tried if slot(each) == number and key_of(each) not in taken)


def other_primary(cluster: Cluster, number: int) -> Server:
    """Return a primary that does not have this slot."""
    return next(node for node in cluster.primaries() if node is not cluster.node_of(number))


def redirections(cluster: Cluster) -> dict[str, int]:
    """Return how often the nodes have answered MOVED and ASK."""
    found = {"MOVED": 0, "ASK": 0}
    for node in cluster.nodes:
        for name, facts in node.admin.info("errorstats").items():
            word = name.removeprefix("errorstat_")
            if word in found:
                found[word] += facts["count"]
    return found


@both_wires
def test_the_first_checks_wait_until_the_nodes_are_found(
    cluster: Cluster, key: str, wire: str
) -> None:
    """The node of the URI answers later than a call may take: none passes uncounted."""
    with Proxy(cluster.nodes[0].port) as proxy:
        proxy.accept_seconds = 1.5
        uri = f"redis+cluster://{HOST}:{proxy.port}"
        options = {"deadline_ms": 1_000, "connect_ms": 20_000}
        with client(wire, uri, Limit(10, per=YEAR), on_failure="open", **options) as api:
            outcomes = api.together([key] * 40)
    assert not any(isinstance(each, Decision) and each.degraded for each in outcomes)
    assert admitted(outcomes) == 10


@both_wires
def test_a_call_follows_a_slot_that_has_moved(cluster: Cluster, key: str, wire: str) -> None:
    """MOVED: the slot map was stale. No error, and the next call goes to the new node."""
    with client(wire, cluster.uri) as api:
        assert api.check(key, 5).remaining == COUNTED.limit - 5
        for _ in range(3):
            cluster.move_slot(slot(key), other_primary(cluster, slot(key)).port)
            before = redirections(cluster)
            remaining = api.check(key).remaining
            assert redirections(cluster)["MOVED"] == before["MOVED"] + 1
            assert api.check(key).remaining == remaining - 1
            assert redirections(cluster)["MOVED"] == before["MOVED"] + 1
        assert remaining == COUNTED.limit - 5 - 5


@both_wires
def test_calls_follow_a_slot_while_it_moves(cluster: Cluster, key: str, wire: str) -> None:
    """ASK: a key that has moved, one that has not, and a new one are each charged once."""
    moved, waiting = key, beside(key)
    new = beside(moved, waiting)
    number = slot(key)
    assert len({key_of(each) for each in (moved, waiting, new)}) == 3
    target = other_primary(cluster, number).port
    with client(wire, cluster.uri) as api:
        assert api.check(moved, 10).remaining == COUNTED.limit - 10
        cluster.begin_move(number, target)
        assert cluster.move_keys(number, target) == 1
        before = redirections(cluster)["ASK"]
        assert api.check(moved).remaining == COUNTED.limit - 11
        assert api.check(new).remaining == COUNTED.limit - 1
        assert redirections(cluster)["ASK"] >= before + 2
        for verb in ("refund", "grant"):
            api.start(moved, 1, verb=verb).result()
        assert api.peek(moved).remaining == COUNTED.limit - 9
        api.start(new, verb="reset").result()
        cluster.end_move(number, target)
        assert api.check(moved).remaining == COUNTED.limit - 10
        assert api.check(new).remaining == COUNTED.limit - 1
        # One key stays on the old node until the end.
        assert api.check(waiting).remaining == COUNTED.limit - 1
        back = other_primary(cluster, number).port
        cluster.begin_move(number, back)
        before = redirections(cluster)["ASK"]
        assert api.check(waiting).remaining == COUNTED.limit - 2
        assert redirections(cluster)["ASK"] == before
        cluster.move_keys(number, back)
        cluster.end_move(number, back)
        assert api.check(waiting).remaining == COUNTED.limit - 3


@pytest.mark.parametrize("more", [[], [Limit(5_000, per=YEAR, algorithm="sliding_window_log")]])
def test_slots_that_move_under_load_lose_and_duplicate_nothing(
    cluster: Cluster, key: str, more: list[Limit]
) -> None:
    """Back and forth, with calls from threads and tasks: no error, and exactly the limit.

    With a log beside the limit, each subject has two keys in the slot.
    """
    limits = [Limit(4_000, per=YEAR, algorithm="fixed_window"), *more]
    keys = [key, beside(key)]
    before = redirections(cluster)
    moves = 0
    with clients_of_both(cluster.uri, limits, deadline_ms=10_000) as clients, ExitStack() as stack:
        loads = [
            stack.enter_context(Load(api, each, workers=4)) for api in clients for each in keys
        ]
        until(lambda: all(len(load.outcomes) > 20 for load in loads), "there is load", SECONDS_MAX)
        while any(errors := [len(load.outcomes) < 2_500 for load in loads]) and moves < 400:
            cluster.move_slot(slot(key), other_primary(cluster, slot(key)).port)
            moves += 1
        assert not any(errors), f"only {[len(load.outcomes) for load in loads]} calls"
    after = redirections(cluster)
    print(f"{moves} moves, MOVED and ASK before {before} and after {after}")
    assert moves >= 5
    assert after["MOVED"] > before["MOVED"]
    assert not [error for load in loads for error in errors_of(load.outcomes)]
    for first, second in ((0, 2), (1, 3)):
        assert admitted(loads[first].outcomes) + admitted(loads[second].outcomes) == 4_000


@both_wires
def test_several_subjects_on_several_nodes_are_charged_together(
    cluster: Cluster, key: str, wire: str
) -> None:
    """While the slot of one moves: all subjects of a request are charged, or none."""
    by_slot = {slot(each): each for each in (f"{key} {number}" for number in range(9))}
    user, tenant, address = [*by_slot.values()][:3]
    with client(wire, cluster.uri, Limit(60, per=YEAR)) as api:
        assert api.check(tenant, 20).allowed
        ended = threading.Event()

        def move() -> None:
            while not ended.is_set():
                cluster.move_slot(slot(tenant), other_primary(cluster, slot(tenant)).port)

        moving = threading.Thread(target=move)
        moving.start()
        try:
            found = [api.start_all([user, tenant, address]).result() for _ in range(60)]
        finally:
            ended.set()
            moving.join()
        assert [all(decisions) for decisions in found] == [True] * 40 + [False] * 20
        assert [api.peek(each).remaining for each in (user, tenant, address)] == [20, 0, 20]


def test_a_thread_asks_all_nodes_of_a_request_at_the_same_time(cluster: Cluster, key: str) -> None:
    """The node that is charged first is silent: the other one has its look all the same."""
    silent = cluster.node_of(slot(key))
    beyond = (f"{key} {number}" for number in count())
    other = next(each for each in beyond if cluster.node_of(slot(each)) is not silent)
    asked = cluster.node_of(slot(other)).admin

    def calls() -> int:
        return int(asked.info("commandstats")["cmdstat_evalsha"]["calls"])

    with client("threads", cluster.uri, deadline_ms=500) as api:
        until(
            lambda: not errors_of([outcome(api.start_all([key, other]))]),
            "both answer",
            SECONDS_MAX,
        )
        before = calls()
        silent.pause()
        error = api.start_all([key, other]).exception()
        silent.resume()
        assert isinstance(error, StoreError)
        assert calls() == before + 1


@both_wires
def test_a_request_that_fails_for_one_subject_charges_no_other(
    cluster: Cluster, key: str, wire: str
) -> None:
    """One node is silent: the request fails, and the other subjects are refunded."""
    silent = cluster.node_of(slot(key))
    others = [f"{key} {number}" for number in range(20)]
    others = [each for each in others if cluster.node_of(slot(each)) is not silent]
    # The deadline is shorter than the time after which the cluster replaces a silent node.
    with client(wire, cluster.uri, deadline_ms=500) as api, client(wire, cluster.uri) as patient:

        def all_answer() -> bool:
            calls = [api.start(each, verb="peek") for each in (key, *others)]
            return not errors_of([outcome(call) for call in calls])

        for each in (key, *others):
            patient.check(each)
        until(all_answer, "it is connected to every node", SECONDS_MAX)
        silent.pause()
        calls = [api.start_all([*others, key]), api.start_all([key, *others])]
        errors = [call.exception() for call in calls]
        silent.resume()
        until(all_answer, "it answers again", SECONDS_MAX)
        assert all(isinstance(error, StoreError) for error in errors)
        assert {patient.peek(each).remaining for each in others} == {COUNTED.limit - 1}
        assert COUNTED.limit - 3 <= patient.peek(key).remaining <= COUNTED.limit - 1


@both_wires
def test_subjects_with_braces_have_separate_counts(cluster: Cluster, key: str, wire: str) -> None:
    """Each is on the node that the cluster names; none causes a redirection."""
    shapes = ("{}", "{", "}", "{a}", "}{", "{{a}}", "a{b}c", "a}b{c", "%", "%}", "{a", "a}", "}}")
    subjects = [f"{shape}{key}" for shape in shapes] + [f"{key}{shape}" for shape in shapes]
    with client(wire, cluster.uri) as api:
        api.check(key)
        before = redirections(cluster)
        for number, subject in enumerate(subjects, start=1):
            assert api.check(subject, number).remaining == COUNTED.limit - number
        for number, subject in enumerate(subjects, start=1):
            assert api.peek(subject).remaining == COUNTED.limit - number
        assert redirections(cluster) == before


@both_wires
def test_calls_wait_for_a_cluster_that_is_down(lone_node: Single, key: str, wire: str) -> None:
    """CLUSTERDOWN: retried until the deadline, and counted only when it succeeds."""
    uri = f"redis+cluster://{HOST}:{lone_node.port}"
    other = (slot(key) + 1) % SLOTS
    with client(wire, uri, deadline_ms=300) as api, client(wire, uri) as patient:
        until(api.works, "it is up", SECONDS_MAX)
        until(patient.works, "it is up", SECONDS_MAX)
        # If one slot has no node, the whole cluster is down.
        lone_node.admin.execute_command("CLUSTER", "DELSLOTS", other)

        def refused() -> StoreUnavailable | None:
            # On a busy machine, the short deadline may pass before the first answer.
            error = outcome(api.start(key))
            return error if isinstance(error, StoreUnavailable) else None

        error = until(refused, "a call fails because the cluster is down", SECONDS_MAX)
        call = patient.start(key)
        assert "CLUSTERDOWN" in str(error)
        assert "not counted" in str(error)
        lone_node.admin.execute_command("CLUSTER", "ADDSLOTS", other)
        assert isinstance(outcome(call), Decision)
        until(api.works, "it is up again", SECONDS_MAX)
        assert COUNTED.limit - patient.peek(key).remaining == 1


def _primary_port(node: Server) -> int | None:
    """Return the port of a replica's primary; None for a primary."""
    port: int | None = node.admin.info("replication").get("master_port")
    return port


def test_a_dead_replica_causes_no_errors(cluster: Cluster, key: str) -> None:
    """Killed under load: no call fails."""
    primary_port = cluster.node_of(slot(key)).port
    with clients_of_both(cluster.uri) as clients, ExitStack() as stack:
        loads = [stack.enter_context(Load(api, key)) for api in clients]
        until(lambda: all(len(load.outcomes) > 20 for load in loads), "there is load", SECONDS_MAX)
        next(node for node in cluster.nodes if _primary_port(node) == primary_port).kill()
        before = [len(load.outcomes) for load in loads]
        until(
            lambda: all(
                len(load.outcomes) > 300 + n for load, n in zip(loads, before, strict=True)
            ),
            "there is more load",
            SECONDS_MAX,
        )
    cluster.revive()
    outcomes = [each for load in loads for each in load.outcomes]
    assert not errors_of(outcomes)
    assert counted(cluster.uri, key) == len(outcomes)


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_dead_primary_is_replaced_and_checks_are_exact_again(
    cluster: Cluster, key: str, how: str
) -> None:
    """Killed or silent under load: threads and asyncio work again soon after the promotion."""
    recovers_in_time(lambda key: seconds_of_promotion(cluster, key, how), key)


def seconds_of_promotion(cluster: Cluster, key: str, how: str) -> float:
    """Return the time in which both wires recovered, after the other claims were checked."""
    number = slot(key)
    node = cluster.node_of(number)

    def die() -> None:
        await_copying(node, [each for each in cluster.nodes if _primary_port(each) == node.port])
        getattr(node, how)()

    found = fail_over(cluster.uri, key, die, lambda: cluster.wait_promoted(number))
    print(f"{how}: {found}")
    assert found.charged_units <= found.charged_units_max
    assert found.lost_units <= LOST_UNITS_MAX
    cluster.revive()
    # The old primary is back, and the counts of the new one are used.
    assert counted(cluster.uri, key) == found.charged_units
    with clients_of_both(cluster.uri, Limit(300, per=YEAR, name="after")) as clients:
        outcomes = [each for api in clients for each in api.together([key] * 200)]
        assert not errors_of(outcomes)
        assert admitted(outcomes) == 300
    return max(found.right_seconds.values())


def test_calls_to_a_dead_cluster_fail_at_once(key: str) -> None:
    """All nodes are dead: each error lists every attempt; errors do not pile up."""
    with Cluster() as lone, clients_of_both(lone.uri, deadline_ms=2_000) as clients:
        for api in clients:
            assert api.check(key).allowed
        for node in lone.nodes:
            node.kill()
        for api in clients:
            started = time.monotonic()
            found = [outcome(api.start(key)) for _ in range(200)]
            assert time.monotonic() - started < 40  # a deadline each would be 400
            assert len(errors_of(found)) == 200
            assert "Connection refused" in str(found[-1])
            assert _depth(found[-1]) < 30


def _depth(error: object) -> int:
    """Return the length of a traceback."""
    assert isinstance(error, StoreError)
    traceback, frames = error.__traceback__, 0
    while traceback is not None:
        traceback, frames = traceback.tb_next, frames + 1
    return frames
