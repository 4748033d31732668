"""Regions with real Redis servers, one of them a Cluster, whose links and leaders fail.

The history checker looks at every answer of all regions: no exact limit is over in any interval. In
the end all regions agree on the units that were admitted: none is lost, and none is applied twice.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from fractions import Fraction
from functools import partial
from itertools import permutations

import pytest

from ratekeeper import AsyncLimiter, Limit
from ratekeeper.core.model import BUCKETS, UNIT_ALGORITHMS
from ratekeeper.decide.region_monitor import RegionMonitor, RegionStatus
from ratekeeper.decide.regional import RegionalCounts
from ratekeeper.decide.store import Store
from ratekeeper.decide.stores import open_store
from ratekeeper.regions.status import STATUS_NOTE
from tests.faults.load import GAP_S, SLACK_S, Key, Record, exact_excess, now_ns, watch_lag
from tests.faults.nodes import NodeProcess
from tests.integration.tcp_proxy import Proxy
from tests.redis_servers.single import Single
from tests.redis_servers.waiting import NotInTime
from tests.region_links import DEADLINE_MS, NAMES, RegionServers

EU, US, AP = NAMES[:3]
# Limits that refill, one that does not in the time of a test, and one that is never reached.
SHORT, LONG, TOTAL = 30, "long", "total"
EXACT = tuple(Key("exact", case) for case in (*UNIT_ALGORITHMS, LONG, TOTAL))
EVENTUAL = tuple(Key("eventual", case) for case in (LONG, TOTAL))
CASES = tuple((key.policy, key.case) for key in (*EXACT, *EVENTUAL))
# The time that a busy machine may need for anything that is not itself a promise.
DONE_S_MAX = 60.0
TAKEOVER_S_MAX = 5.0


def limit_of(case: str) -> Limit:
    """Return the limit of a rule."""
    if case == LONG:
        return Limit(40, per=3_600)
    if case == TOTAL:
        return Limit(5_000, per=3_600, algorithm="sliding_window_log")
    return Limit(SHORT, per=2, algorithm=case)  # type: ignore[arg-type]  # one of the five


def _rule(policy: str, case: str) -> dict[str, object]:
    limit = limit_of(case)
    written = {"limit": limit.limit, "per": f"{limit.per}s", "algorithm": limit.algorithm}
    if limit.algorithm in BUCKETS:
        written["capacity"] = limit.capacity
    return {
        "id": f"{policy}-{case}",
        "match": {"endpoint": f"/{policy}/{case}"},
        "by": ["user"],
        "limits": [written],
        "on_failure": "closed",
        "scope": "global",
        "across_regions": policy,
    }


RULES = json.dumps({"version": 1, "rules": [_rule(*case) for case in CASES]})


async def until(
    condition: Callable[[], object], what: str, seconds_max: float = DONE_S_MAX
) -> float:
    """Wait for a condition, which may be awaitable; return how long it took."""
    began_s = time.monotonic()
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return time.monotonic() - began_s
        if time.monotonic() - began_s > seconds_max:
            raise NotInTime(f"waited {seconds_max:g} s for this: {what}")
        await asyncio.sleep(0.02)


class Running:
    """A node in each region, in this process."""

    def __init__(self, servers: RegionServers) -> None:
        self.servers = servers
        self.record = Record()
        self.nodes: dict[str, AsyncLimiter] = {}

    def open(self, region: str) -> None:
        """Start a node."""
        settings = self.servers.settings(region)
        self.nodes[region] = AsyncLimiter.from_rules(RULES, regions=settings)

    async def close(self) -> None:
        """Close all nodes."""
        for node in self.nodes.values():
            await node.close()

    def monitor(self, region: str) -> RegionMonitor:
        """Return the operator's view of a region."""
        found = self.nodes[region].regions
        assert found is not None
        return found

    def counts(self) -> list[RegionalCounts]:
        """Return the counts of all regions."""
        return [counts_of(node.store) for node in self.nodes.values()]

    def status(self, region: str) -> RegionStatus:
        """Return the status of a region, whose only node leads it."""
        return self.monitor(region).here() or RegionStatus(region, is_self=True)

    async def until_synced(self) -> None:
        """Wait until all regions exchange totals."""

        def works(region: str) -> bool:
            status = self.status(region)
            is_up = [each.state == "up" for each in status.links]
            return bool(status.share and is_up) and all(is_up)

        for region in self.nodes:
            await until(partial(works, region), f"{region} exchanges totals")

    @asynccontextmanager
    async def load(self, keys: Sequence[Key]) -> AsyncIterator[None]:
        """Check the keys in every region for the length of the block."""
        ended = asyncio.Event()

        async def ask(region: str, key: Key) -> None:
            while not ended.is_set():
                sent_ns = now_ns()
                result = await self.nodes[region].evaluate(key.request)
                self.record.note(key, sent_ns, result.decision, region)
                await asyncio.sleep(GAP_S)

        async with asyncio.TaskGroup() as group:
            for region in self.nodes:
                for key in keys:
                    group.create_task(ask(region, key))
            try:
                yield
            finally:
                ended.set()  # not cancelled: every charge is recorded

    def admitted(self, key: Key, region: str = "") -> int:
        """Return how many checks of a key were admitted, in one region or in all."""
        noted = self.record.of(key)
        return sum(each.allowed and region in ("", each.source) for each in noted)

    def verify(self, what: str, keys: Sequence[Key]) -> None:
        """No exact limit was over in any interval."""
        for key in keys:
            over = exact_excess(self.record, key, limit_of(key.case))
            print(f"{what}, {key.policy} {key.case}: {self.admitted(key)} admitted, over by {over}")
            assert self.admitted(key)
            if key.policy == "exact":
                assert over == 0


def counts_of(store: Store) -> RegionalCounts:
    """Return the counts of a region's store."""
    assert store.regional is not None
    return store.regional


async def used(counts: RegionalCounts, key: Key) -> tuple[int, int]:
    """Return the units that a region knows, and those of them that others have not accepted."""
    rule = f"{key.policy}-{key.case}"
    found = await counts.usage((limit_of(key.case),), rule, f"user:{key.user}")
    return found.used[0], found.unaccepted[0]


async def until_agreed(counts: Sequence[RegionalCounts], key: Key, least: int, most: int) -> None:
    """Wait until all regions know the same units, which all have accepted."""
    found: list[tuple[int, int]] = []

    async def agree() -> bool:
        found[:] = [await used(each, key) for each in counts]
        return len(set(found)) == 1 and found[0][1] == 0 and found[0][0] >= least

    try:
        await until(agree, "the regions agree")
    except NotInTime:
        pytest.fail(f"{key}: {found} of the regions, and {least} to {most} units were admitted")
    assert found[0][0] <= most


@pytest.fixture(scope="module")
def servers() -> Iterator[RegionServers]:
    """Start three regions; one of them has a Cluster."""
    with RegionServers((EU, US, AP), cluster=AP) as found:
        found.delay(EU, US, 0.02)
        found.delay(EU, AP, 0.05)
        found.delay(US, AP, 0.04)
        yield found


@pytest.fixture(scope="module")
def regions(servers: RegionServers) -> Iterator[Running]:
    """Start a node in each region, once for all tests: it takes seconds until they exchange."""
    found = Running(servers)
    with ThreadPoolExecutor() as pool:  # the first one waits for the others
        list(pool.map(found.open, servers.names))
    yield found
    asyncio.run(found.close())


@pytest.fixture
async def running(regions: Running) -> AsyncIterator[Running]:
    """Return the nodes, when all regions exchange totals."""
    await regions.until_synced()
    yield regions
    regions.servers.heal()


# From which region nothing gets to which other one.
PARTITIONS = {
    "one region alone": ((EU, US), (US, EU), (EU, AP), (AP, EU)),
    "all alone": tuple(permutations((EU, US, AP), 2)),
    "one way": ((EU, US),),
    "a circle": ((US, AP), (AP, EU)),
}


async def test_partitions(running: Running) -> None:
    """In every partition no exact limit is over; afterwards all regions know all units."""
    for what, cuts in PARTITIONS.items():
        keys = [key._replace(user=what) for key in (*EXACT, EVENTUAL[1])]
        async with running.load(keys):
            await asyncio.sleep(0.2)
            for cut in cuts:
                running.servers.cut(*cut)
            await asyncio.sleep(1.0)
            running.servers.heal()
            await asyncio.sleep(0.2)
        running.verify(what, keys)
        for key in keys:
            if key.case == TOTAL:
                admitted = running.admitted(key)
                await until_agreed(running.counts(), key, admitted, admitted)


async def test_eventual_limits_go_on_alone_and_merge(running: Running) -> None:
    """A region that is cut off goes on with the whole limit; the excess is found afterwards."""
    key, limit = EVENTUAL[0], limit_of(LONG).limit
    running.servers.part((EU,), (US, AP))

    await until(
        lambda: all(each.state == "down" for each in running.status(EU).links),
        "the region knows that it is alone",
    )
    async with running.load([key]):
        await until(lambda: running.admitted(key, EU) == limit, "the whole limit, alone")
        await until(
            lambda: running.admitted(key) >= 2 * limit, "the whole limit again, in the others"
        )
        running.servers.heal()

        async def merged() -> bool:
            return min([(await used(each, key))[0] for each in running.counts()]) >= 2 * limit

        await until(merged, "all regions know all units")
    admitted = running.admitted(key)
    await until_agreed(running.counts(), key, admitted, admitted)

    await until(
        lambda: sum(running.status(each).excess_units for each in running.nodes),
        "the excess is reported",
    )


async def test_a_region_is_removed_and_added_again(running: Running) -> None:
    """The others get its share; it returns; no exact limit is over at any moment."""
    keys = [key._replace(user="moved") for key in EXACT]
    third, half = Fraction(1, 3), Fraction(1, 2)

    def have(regions: Sequence[str], share: Fraction) -> bool:
        found = [running.status(each) for each in regions]
        return all((each.share, each.target) == (share, None) for each in found)

    async with running.load(keys):
        await asyncio.sleep(0.5)
    running.servers.part((EU, US), (AP,))
    await running.nodes.pop(AP).close()
    async with running.load(keys):
        unreached = await running.monitor(EU).change_shares({EU: half, US: half})
        assert list(unreached) == [AP]
        await until(lambda: have((EU, US), half), "the others have its share")
    async with running.load(keys):
        await asyncio.sleep(0.5)
        running.servers.heal()
        running.open(AP)
        await running.monitor(EU).change_shares({EU: third, US: third, AP: third})
        await until(lambda: have((EU, US, AP), third), "it has its share again")
    async with running.load(keys):
        await asyncio.sleep(0.5)
    running.verify("removed and added", keys)
    assert running.admitted(keys[0], AP)


# ── Leaders ────────────────────────────────────────────────────────────────────────────────────


class Nodes:
    """Three nodes in eu, each with its own way to the Redis of eu. One in us, in this process.

    Of the three, one is killed, and one may still find out that its way is whole again.
    """

    def __init__(self, stack: ExitStack, servers: RegionServers, keys: Sequence[Key]) -> None:
        self.us = Running(servers)
        self.us.open(US)
        self.record = self.us.record
        self.ways: dict[int, Proxy] = {}
        self.here: dict[int, NodeProcess] = {}
        self.took_s: list[float] = []
        """How long it took each time until another process worked."""
        self._key = keys[0]
        own = servers.servers[EU]
        assert isinstance(own, Single)
        for number in range(3):
            way = stack.enter_context(Proxy(own.port))
            stores = {**servers.settings(EU).stores, EU: f"{way.uri}?deadline_ms={DEADLINE_MS}"}
            settings = {"region": EU, "stores": stores}
            name = f"{EU} {number}"
            started = NodeProcess(name, "memory://", keys, rules=RULES, regions=settings)
            node = stack.enter_context(started)
            self.here[node.pid], self.ways[node.pid] = node, way
        for node in self.here.values():
            node.ready()
        opened = {each: open_store(servers.uri(each)) for each in servers.names}
        for store in opened.values():
            stack.callback(store.close)
        self.counts = {name: counts_of(store) for name, store in opened.items()}

    async def leader(self) -> int:
        """Return the process that leads eu; 0 for none."""
        note = (await self.counts[EU].notes()).get(STATUS_NOTE, "{}")
        return int(json.loads(note).get("leader", "-0-").split("-")[-2])

    async def until_another_works(self, before: int) -> None:
        """Wait until another process leads, and the other region learns of new units."""

        async def known() -> int:
            return (await used(self.counts[US], self._key))[0]

        async def leads() -> bool:
            return await self.leader() not in (0, before)

        took_s = await until(leads, "another process leads")
        units = await known()

        async def works() -> bool:
            return await known() > units

        self.took_s.append(took_s + await until(works, "its units are known"))

    def finish(self, killed: int, stopped: int) -> None:
        """End all nodes, and record their answers."""
        self.here.pop(killed).add_to(self.record)
        for pid, node in self.here.items():
            late_ns = self.record.lag_ns
            node.finish(self.record)
            if pid == stopped:  # it was late on purpose
                self.record.lag_ns = late_ns


async def test_leaders_are_stopped_cut_off_and_killed() -> None:
    """Another process works within five seconds; nothing is lost or applied twice."""
    keys = [Key("exact", TOTAL), Key("eventual", TOTAL), Key("exact", LONG)]
    with RegionServers((EU, US)) as servers, ExitStack() as stack:
        nodes = Nodes(stack, servers, keys)
        watching = asyncio.create_task(watch_lag(nodes.record))
        async with nodes.us.load(keys):
            await until(nodes.leader, "a process leads")
            stopped = await nodes.leader()
            nodes.here[stopped].signal(signal.SIGSTOP)
            await nodes.until_another_works(stopped)
            nodes.here[stopped].signal(signal.SIGCONT)
            cut_off = await nodes.leader()
            nodes.ways[cut_off].mode = "hold"
            await nodes.until_another_works(cut_off)
            nodes.ways[cut_off].mode = "pass"
            killed = await nodes.leader()
            nodes.here[killed].signal(signal.SIGKILL)
            await nodes.until_another_works(killed)
            await asyncio.to_thread(nodes.finish, killed, stopped)
        watching.cancel()
        # Another leader carries the last units.
        nodes.us.open(EU)
        for key in keys[:2]:
            noted = nodes.record.of(key)
            admitted = sum(each.allowed and not each.degraded for each in noted)
            # The store may have admitted more: the last check of a node that was killed or ended.
            await until_agreed(list(nodes.counts.values()), key, admitted, admitted + 3)
        await nodes.us.close()
        assert exact_excess(nodes.record, keys[2], limit_of(LONG)) == 0
        late_s = nodes.record.lag_ns / 1e9  # the most that a busy machine adds to a step
        print(f"others worked after {nodes.took_s}, with steps that were up to {late_s:.2f} s late")
        assert max(nodes.took_s) < TAKEOVER_S_MAX + SLACK_S + 3 * late_s
