"""Requests of several subjects on Redis: one atomic step on one server, an order in a cluster."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from ratekeeper import AsyncLimiter, Limit, Limiter, Request
from ratekeeper.core.errors import StoreError, StoreUnavailable
from ratekeeper.core.steps import Ask
from ratekeeper.decide.store import Answer
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.redis.store import RedisStore
from ratekeeper.decide.stores.redis.topology import slot_of
from tests.answering import AnsweringCounter, answer, awaited, in_thread
from tests.integration.redis_wires import SECONDS_MAX, YEAR, both_wires, key_of
from tests.redis_servers import Cluster, Sentinels, running, until

KINDS = pytest.mark.parametrize("kind", ["single", "sentinel", "cluster"])
USER = Limit(1, per=YEAR, algorithm="fixed_window")
TENANT = Limit(40, per=YEAR, algorithm="fixed_window")

# A limit, the rule that has it, and the subject to check.
Checks = list[tuple[Limit, str, str]]


def store_of(uri: str) -> RedisStore:
    return cast("RedisStore", open_store(uri, deadline_ms=10_000, denied_cache_ms=0))


def check(store: RedisStore, wire: str, checks: Checks, *optional: int) -> list[Answer]:
    """Check several subjects together, from a thread or on asyncio."""
    counters = [(store.counter([limit], rule), subject, 1) for limit, rule, subject in checks]
    together = store.check_together(counters, optional)
    link = in_thread if wire == "threads" else on_new_loop
    return cast("list[Answer]", answer(together, link))


def on_new_loop(ask: Ask) -> Any:
    """Carry an Ask in an event loop of its own."""
    return asyncio.run(awaited(ask))


def passes(answers: list[Answer]) -> bool:
    return all(not isinstance(each, StoreError) and each.allowed for each in answers)


def nodes_of(servers: Any) -> list[Any]:
    """Return the servers that keep data."""
    if isinstance(servers, Cluster):
        return list(servers.nodes)
    return servers.servers if isinstance(servers, Sentinels) else [servers]


def writes(servers: Any) -> int:
    """Return how many writes all servers have made so far, without those of replication."""
    total = 0
    for node in nodes_of(servers):
        if node.admin.info("replication")["role"] == "master":
            stats = node.admin.info("commandstats")
            total += sum(
                stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("hset", "hdel")
            )
    return total


@both_wires
@KINDS
@pytest.mark.parametrize("order", ["user first", "tenant first"])
def test_a_request_that_its_own_limit_denies_writes_nothing(
    kind: str, wire: str, order: str, key: str
) -> None:
    """No charge and no refund: the tenant's other users never see one, on any kind of server."""
    servers = running(kind)
    store = store_of(servers.uri)
    checks = [(USER, "user", f"{key} mallory"), (TENANT, "tenant", f"{key} acme {order}")]
    if order == "tenant first":
        checks.reverse()
    assert passes(check(store, wire, checks))
    before = writes(servers)
    for _ in range(20):
        assert not passes(check(store, wire, checks))
    assert writes(servers) == before
    tenant = AnsweringCounter(store.counter([TENANT], "tenant")).peek(f"{key} acme {order}", 0)
    assert tenant.remaining == TENANT.limit - 1
    store.close()


@KINDS
async def test_denied_requests_of_one_user_deny_no_other_user(kind: str, key: str) -> None:
    """Forty requests fit into the tenant's limit, and all pass amid a user's denied requests."""
    store = store_of(running(kind).uri)
    user = store.counter([USER], "user")
    tenant = store.counter([TENANT], "tenant")
    acme, mallory = f"{key} acme", f"{key} mallory"
    await awaited(user.check(mallory, 1))

    async def ask(name: str) -> bool:
        return passes(await awaited(store.check_together([(user, name, 1), (tenant, acme, 1)])))

    names = [f"{key} {number}" for number in range(TENANT.limit)]
    mixed = [name for each in names for name in (mallory, each, mallory, mallory)]
    found = await asyncio.gather(*map(ask, mixed))
    allowed = [name for name, passed in zip(mixed, found, strict=True) if passed]
    assert sorted(allowed) == sorted(names)
    await store.aclose()


@both_wires
@pytest.mark.parametrize("kind", ["single", "cluster"])
def test_a_check_that_fails_does_not_keep_others_from_being_charged(
    kind: str, wire: str, key: str
) -> None:
    """One subject's key is not a hash. The other is charged, unless the request needs both."""
    servers: Any = running(kind)
    store = store_of(servers.uri)
    broken, well = f"{key} broken", f"{key} well"
    node = servers.node_of(slot_of(key_of(broken).encode())) if kind == "cluster" else servers
    node.admin.set(key_of(broken), "text")
    checks = [(TENANT, "tenant", broken), (TENANT, "tenant", well)]

    def left() -> int:
        return AnsweringCounter(store.counter([TENANT], "tenant")).peek(well, 0).remaining

    failed, decided = check(store, wire, checks, 0, 1)
    assert isinstance(failed, StoreUnavailable)
    assert "WRONGTYPE" in str(failed)
    assert passes([decided])
    assert left() == TENANT.limit - 1
    for optional in ((), (1,)):
        failed, decided = check(store, wire, checks, *optional)
        assert isinstance(failed, StoreUnavailable)
        assert passes([decided])
        assert left() == TENANT.limit - 1
    node.admin.delete(key_of(broken))
    store.close()


@both_wires
@KINDS
def test_one_subject_may_occur_several_times(kind: str, wire: str, key: str) -> None:
    """Each occurrence counts; the last one that does not fit denies all of them."""
    store = store_of(running(kind).uri)
    three = Limit(3, per=YEAR, algorithm="sliding_window_log")
    twice = [(three, "rule", key), (TENANT, "tenant", f"{key} acme"), (three, "rule", key)]
    assert passes(check(store, wire, twice))
    assert not passes(check(store, wire, twice))
    counter = AnsweringCounter(store.counter([three], "rule"))
    assert counter.peek(key, 0).remaining == 1
    assert (
        AnsweringCounter(store.counter([TENANT], "tenant")).peek(f"{key} acme", 0).remaining
        == TENANT.limit - 1
    )
    assert counter.check(key, 1).allowed
    assert not counter.check(key, 1).allowed
    store.close()


RULES = """
version: 1
rules:
  - {id: user, by: user, limits: 1000/hour}
  - {id: tenant, by: tenant, limits: 5/hour}
"""


async def test_a_dead_shard_does_not_switch_off_rules_of_other_shards() -> None:
    """The users of a dead shard are limited by their tenant on another shard, exactly."""
    with Cluster(full_coverage=False) as cluster:
        well, dead = cluster.primaries()[:2]
        owners = {
            name: cluster.node_of(slot_of(key_of(name).encode())).port
            for number in range(200)
            for name in (f"user:{number}", f"tenant:{number}")
        }
        users = [name[5:] for name, port in owners.items() if port == dead.port and name[0] == "u"]
        tenants = [
            name[7:] for name, port in owners.items() if port == well.port and name[0] == "t"
        ]
        # A busy machine may stall for longer than the deadline of production, and then the shard
        # that is well would not decide either.
        uri = f"{cluster.uri}?deadline_ms=10000"
        with Limiter.from_rules(RULES, store=uri) as limiter:
            awaited = AsyncLimiter.from_rules(RULES, store=uri)
            for node in cluster.nodes:
                if node.admin.info("replication").get("master_port") == dead.port:
                    node.kill()
            warm = Request(user=users[0], tenant=tenants[0])
            until(lambda: not limiter.check(warm).degraded, "the store decides", SECONDS_MAX)
            dead.kill()
            until(lambda: limiter.check(warm).degraded, "the shard is down", SECONDS_MAX)
            found = []
            for user in users[:9]:
                found.append(limiter.check(Request(user=user, tenant=tenants[1])))
                found.append(await awaited.check(Request(user=user, tenant=tenants[2])))
        for of_one in (found[::2], found[1::2]):
            assert [each.allowed for each in of_one] == [True] * 5 + [False] * 4
            # What the tenant's rule denies is exact.
            assert [each.degraded for each in of_one] == [True] * 5 + [False] * 4
        await awaited.close()


@both_wires
def test_one_key_that_fails_in_a_call_of_several_leaves_the_others_charged(
    wire: str, key: str
) -> None:
    """A limiter without rules: the failure policy answers for the key that failed only."""
    server: Any = running("single")
    broken, well = f"{key} broken", f"{key} well"
    server.admin.set(key_of(broken), "text")
    how: Any = {"store": store_of(server.uri), "name": "several"}
    limits = Limit(3, per=YEAR, algorithm="fixed_window")
    checks = [(broken, 1), (well, 1)]
    if wire == "threads":
        found = Limiter(limits, **how).evaluate_all(checks)
    else:
        found = asyncio.run(AsyncLimiter(limits, **how).evaluate_all(checks))
    decisions = [each.decision for each in found]
    assert [(each.allowed, each.degraded) for each in decisions] == [(True, True), (True, False)]
    closed = Limiter(limits, on_failure="closed", **how)
    denied = [each.decision for each in closed.evaluate_all(checks)]
    assert [(each.allowed, each.degraded) for each in denied] == [(False, True), (True, False)]
    assert closed.peek(well).remaining == 2
    server.admin.delete(key_of(broken))
    how["store"].close()
