"""A primary of a Redis Cluster is killed under load."""

from __future__ import annotations

from tests.faults.load import LONG, POLICIES, Key, Record, later, now_ns, steady_load, until_calm
from tests.faults.reporting import verify
from tests.redis_servers import Cluster
from tests.redis_servers.server import Server
from tollkeeper.decide.stores.redis.topology import slot_of

USERS = tuple(f"user {number}" for number in range(6))
CASES = ("sliding_window_log", LONG)
KEYS = tuple(Key(policy, case, user) for policy in POLICIES for case in CASES for user in USERS)
# Redis replicates after it answers, so the last charges may be lost with the primary.
LOST_MAX = 20


def kept_by(server: Server, users: tuple[str, ...]) -> list[str]:
    """Return the users whose keys a primary has."""
    names = [str(each) for each in server.admin.keys("tk:*")]
    return [user for user in users if any(user in each for each in names)]


def degraded_share(record: Record, users: list[str], from_ns: int, to_ns: int) -> float:
    """Return the degraded share of some users' answers in an interval."""
    noted = [
        each.degraded
        for each in record.noted
        if each.key.user in users and from_ns < each.sent_ns and each.answered_ns < to_ns
    ]
    return sum(noted) / max(len(noted), 1)


async def test_a_primary_is_killed() -> None:
    """The replica takes over and decisions are exact again; the other shards are not affected."""
    with Cluster(full_coverage=False) as cluster:
        async with steady_load(cluster.uri, keys=KEYS) as record:
            await later(0.6)
            by_node = {node: kept_by(node, USERS) for node in cluster.primaries()}
            victim = max(by_node, key=lambda node: len(by_node[node]))
            slot = slot_of(str(victim.admin.keys("tk:*")[0]).encode())
            killed_ns = now_ns()
            await later(0, lambda: cluster.kill_primary(slot))
            await later(0, lambda: cluster.wait_promoted(slot))
            healed_ns = now_ns()
            await until_calm(record)
        lossy = {key for key in KEYS if key.user in by_node[victim]}
        found = verify(
            record,
            f"Cluster primary killed, promoted after {(healed_ns - killed_ns) / 1e9:.1f} s",
            healed_ns,
            lossy=lossy,
            why_lossy="not yet copied to the replica when the primary died",
        )
        assert found["closed"].over <= LOST_MAX
        others = [user for user in USERS if user not in by_node[victim]]
        assert others
        share = degraded_share(record, others, killed_ns, healed_ns)
        own = degraded_share(record, by_node[victim], killed_ns, healed_ns)
        print(f"degraded until it was promoted: {own:.0%} on its shard, {share:.1%} on the others")
        assert share < 0.2 < own
