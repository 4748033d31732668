"""Simulated regions that share limits, with the real leaders and share changes, from one seed.

Each region has a store, the reference `MemoryRegional`, and nodes. The nodes run the code of
`regions/exchange.py` as it is: election, links, sync and share changes. Only the edges are
simulated: an event loop whose time is virtual, and a network between the nodes and the stores.

A call travels to the store, is carried out when it arrives, and its answer travels back. It is
carried out also if its caller has given up meanwhile. A lost packet is sent again after a while, as
TCP does; a cut drops calls or answers, by direction. A node that is suspended sends its pending
calls when it continues: these are late calls of a leader that was replaced.

`problems` checks:

- An exact limit is never over (`NeverOver`). Also the shares in use add up to at most 1.
- A subject below its limit is not denied, if there are no faults and no window is shorter than a
  minute.
- Without faults, an eventual limit is over by at most 1 %, or one request of each region. With
  windows of less than a minute, the units that it refills in two trips are allowed, too.
- Without faults, a client that waits for `retry_after` of an exact limit is admitted then.
- After a leader was killed or suspended, another one works within 5 s.
- In the end, each store has learnt the totals of all others.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from random import Random
from typing import Any, Final, Literal, TypeVar

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import CapacityError, StoreError, StoreUnavailable
from ratekeeper.core.model import BUCKETS, UNIT_ALGORITHMS, Decision, Limit, Limits
from ratekeeper.decide.regional import (
    Accepted,
    AcrossRegions,
    Learnt,
    MemoryRegional,
    RegionalUsage,
    Report,
    Shares,
    SubjectKey,
    rule_number,
)
from ratekeeper.decide.store import Counter
from ratekeeper.regions import exchange
from ratekeeper.regions.table import TABLE_NOTE, share_table, shares_with, shares_without
from tests.simulator.checkers import CentralLimiter, NeverOver, percentile
from tests.simulator.network import START_NS, seeded

T = TypeVar("T")

Where = Literal["all", "one", "moving", "patient"]
Partition = Literal["none", "pairs", "one-way", "alone", "all"]
PARTITIONS: Final[tuple[Partition, ...]] = ("none", "pairs", "one-way", "alone", "all")

# A call inside a region takes about this long, one way.
LOCAL_S: Final = 0.0005
RETRANSMIT_S: Final = 0.2
# The regions get their shares in this time; traffic starts after it.
START_S: Final = 5.0
# The time after the traffic and the faults in which the last totals arrive.
DRAIN_S: Final = 15.0
TAKEOVER_S_MAX: Final = 5.0
EVENTUAL_OVER_MAX: Final = 0.01
# How long a partition and the pause after it last; "long" ones last as long as the traffic.
CUT_S: Final = (2.0, 15.0)
# The most time until a region that was removed is back.
REMOVED_S: Final = 25.0
MOVE_S: Final = 15.0
FULL_RATE_S: Final = 2.0
STEADY_WINDOW_NS: Final = 60 * NS_PER_SECOND
_RULE: Final = "simulated"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one subject."""

    subject: str
    times: float
    """The rate of the requests of all regions together, as a multiple of the limit's rate."""
    where: Where = "all"
    """Where the requests arrive: in all regions, in the first one, or in another one every 15 s. Or
    a patient client: it asks as fast as it can in the first region, and waits for `retry_after`
    when it is denied."""
    cost: int = 1


USUAL_LOADS: Final = (
    Load("below", 0.8, "all"),
    Load("moves", 0.8, "moving"),
    Load("double", 2, "all"),
    Load("tenfold", 10, "all"),
    Load("one", 3, "one"),
    Load("patient", 1, "patient"),
)


@dataclass(frozen=True, slots=True)
class RegionsPlan:
    """What to simulate."""

    limits: Limits
    across: AcrossRegions = "exact"
    regions: int = 5
    nodes: int = 20
    """In each region."""
    seconds: float = 60.0
    seed: int = 0
    loads: tuple[Load, ...] = USUAL_LOADS
    latency_ms: tuple[float, float] = (100, 300)
    """The least and the most time of a round trip between two regions."""
    loss: float = 0.0
    partition: Partition = "none"
    is_long: bool = False
    """One partition as long as the traffic, instead of several short ones."""
    kills: int = 0
    """How many times a leader is killed; another node starts 10 s later."""
    stops: int = 0
    """How many times a leader is stopped for a few seconds."""
    changes: int = 0
    """How many times an operator changes the shares."""
    removals: int = 0
    """How many times a region is cut off, then lost and removed; it is added again later."""

    @property
    def is_calm(self) -> bool:
        """True if the plan has no faults."""
        faults = self.kills or self.stops or self.changes or self.removals or self.loss
        return self.partition == "none" and not faults


class _VirtualSelector(selectors.DefaultSelector):
    """A selector that does not wait: it advances the virtual time instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation has no event to wait for")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which starts at 0."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual.now_s


def result_of(call: Coroutine[Any, Any, T]) -> T:
    """Return the result of a call that never waits."""
    try:
        call.send(None)
    except StopIteration as stopped:
        return stopped.value  # type: ignore[no-any-return]  # the type of a coroutine's result
    raise AssertionError("a call of the reference store waits")


class _VirtualClock:
    """The clock of all stores."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop

    def now_ns(self) -> int:
        """Return the time in whole microseconds, like that of a store."""
        return START_NS + round(self._loop.time() * 1_000_000) * 1_000

    def sleep(self, seconds: float) -> None:
        """Raise: a store never waits."""
        raise NotImplementedError("simulated stores never wait")

    async def sleep_async(self, seconds: float) -> None:
        """Raise: a store never waits."""
        raise NotImplementedError("simulated stores never wait")


class _Store(MemoryRegional):
    """The store of one region, which reports its calls to the simulation."""

    def __init__(self, name: str, run: SimulatedRegions) -> None:
        super().__init__(run.clock)
        self._name = name
        self._run = run

    async def learn(self, region: str, epoch: int, reports: Sequence[Report]) -> list[Learnt]:
        """See RegionalCounts."""
        answers = await super().learn(region, epoch, reports)
        for report in reports:
            self._run.known.learnt(region, self._name, report)
        self._run.excess_units += sum(answer.excess for answer in answers)
        return answers

    async def due(self, most: int, token: int) -> list[Report]:
        """See RegionalCounts."""
        if token == self._leader[1]:
            self._run.works(self._name, self._leader[0])
        return await super().due(most, token)

    async def set_shares(self, shares: Shares, token: int) -> bool:
        """See RegionalCounts."""
        is_set = await super().set_shares(shares, token)
        self._run.shares_set()
        return is_set

    @property
    def leader(self) -> str:
        """The name of the node that leads, or led last."""
        return self._leader[0]

    @property
    def share(self) -> Fraction:
        """The share in use."""
        return Fraction(0) if self._shares is None else self._shares.share

    def total(self, limits: Limits, subject: str) -> int:
        """Return the units of a subject that the region has admitted so far."""
        return self._subjects[SubjectKey(rule_number(limits, _RULE), subject)].total

    def totals(self, of: str = "") -> dict[str, int]:
        """Return the total of each subject: of this region, or as learnt of another one."""
        found = {}
        for key, subject in self._subjects.items():
            seen = subject.seen.get(of)
            found[key.subject] = subject.total if not of else 0 if seen is None else seen.total
        return found


class _Remote:
    """The store of a region, as one node reaches it. Implements `RegionalCounts`."""

    def __init__(self, run: SimulatedRegions, node: _Node, target: str) -> None:
        self._run = run
        self._node = node
        self._target = target
        self._store = run.stores[target]

    async def _call(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        run, node = self._run, self._node
        answer: asyncio.Future[T] = run.loop.create_future()

        def arrive() -> None:
            try:
                back(partial(answer.set_result, result_of(call())))
            except StoreError as error:
                back(partial(answer.set_exception, error))

        def back(put: Callable[[], None]) -> None:
            def give() -> None:
                if not answer.done():
                    put()

            run.travel(self._target, node.region, lambda: node.when_running(give))

        node.when_running(lambda: run.travel(node.region, self._target, arrive))
        return await answer

    def global_counter(self, limits: Limits, rule: str, across: AcrossRegions) -> Counter:
        """Return the counter of the store itself."""
        return self._store.global_counter(limits, rule, across)

    async def shares(self) -> Shares | None:
        """See RegionalCounts."""
        return await self._call(self._store.shares)

    async def set_shares(self, shares: Shares, token: int) -> bool:
        """See RegionalCounts."""
        return await self._call(lambda: self._store.set_shares(shares, token))

    async def lead(self, name: str, lasts_ns: int) -> tuple[str, int]:
        """See RegionalCounts."""
        return await self._call(lambda: self._store.lead(name, lasts_ns))

    async def step_down(self, name: str) -> None:
        """See RegionalCounts."""
        await self._call(lambda: self._store.step_down(name))

    async def due(self, most: int, token: int) -> list[Report]:
        """See RegionalCounts."""
        return await self._call(lambda: self._store.due(most, token))

    async def learn(self, region: str, epoch: int, reports: Sequence[Report]) -> list[Learnt]:
        """See RegionalCounts."""
        return await self._call(lambda: self._store.learn(region, epoch, reports))

    async def accept(self, epoch: int, accepted: Sequence[Accepted], token: int) -> None:
        """See RegionalCounts."""
        await self._call(lambda: self._store.accept(epoch, accepted, token))

    async def usage(self, limits: Limits, rule: str, subject: str) -> RegionalUsage:
        """See RegionalCounts."""
        return await self._call(lambda: self._store.usage(limits, rule, subject))

    async def backlog(self) -> int:
        """See RegionalCounts."""
        return await self._call(self._store.backlog)

    async def note(self, name: str, text: str) -> None:
        """See RegionalCounts."""
        await self._call(lambda: self._store.note(name, text))

    async def notes(self) -> dict[str, str]:
        """See RegionalCounts."""
        return await self._call(self._store.notes)

    async def now_ns(self) -> int:
        """See RegionalCounts."""
        return await self._call(self._store.now_ns)

    def traffic(self) -> tuple[int, int]:
        """Return nothing: no bytes are sent."""
        return 0, 0


class _Node:
    """One candidate for the lead of its region."""

    def __init__(self, run: SimulatedRegions, region: str, name: str) -> None:
        self.region = region
        self.name = name
        self.is_dead = False
        self._held: list[Callable[[], None]] | None = None
        stores = {peer: _Remote(run, self, peer) for peer in run.stores}
        random = seeded(run.random.random())
        self._exchange = exchange.Exchange(region, run.table, stores, name, random, lambda: 0.0)
        self._task = run.loop.create_task(self._exchange.run())

    @property
    def is_running(self) -> bool:
        """False if the node is dead or stopped."""
        return not self.is_dead and self._held is None

    def when_running(self, event: Callable[[], None]) -> None:
        """Call `event`: now, later if the node is suspended, or never if it is dead."""
        if self._held is not None:
            self._held.append(event)
        elif not self.is_dead:
            event()

    def kill(self) -> None:
        """Kill the node in the middle of its work."""
        self.is_dead, self._held = True, None
        self._task.cancel()

    def stop(self) -> None:
        """Suspend the node; its calls and their answers wait."""
        self._held = self._held or []

    def resume(self) -> None:
        """Resume a node that was suspended."""
        held, self._held = self._held or [], None
        for event in held:
            self.when_running(event)


class KnownTimes:
    """Measures how long it takes until other regions know of an admission."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.seconds: list[float] = []
        """For each admission and each other region."""
        self._now_s = now_s
        self._waiting: dict[tuple[str, str, str], deque[tuple[int, float]]] = {}

    def admitted(self, region: str, others: Sequence[str], subject: str, total: int) -> None:
        """Note an admission that brought the region to a total."""
        for other in others:
            waiting = self._waiting.setdefault((region, other, subject), deque())
            waiting.append((total, self._now_s()))

    def learnt(self, region: str, other: str, report: Report) -> None:
        """Note that the store of `other` has got a report."""
        waiting = self._waiting.get((region, other, report.key.subject))
        while waiting and waiting[0][0] <= report.total:
            self.seconds.append(self._now_s() - waiting.popleft()[1])


@dataclass(slots=True)
class SubjectCounts:
    """The requests of one subject, and how many were admitted."""

    asked: int = 0
    admitted: int = 0
    denied_late: int = 0
    """Denials later than 2 s after the subject moved to another region."""
    broken_waits: int = 0
    """Denials after the client had waited for `retry_after`."""
    by_region: dict[str, int] = field(default_factory=dict)


class SimulatedRegions:
    """A run of a plan."""

    def __init__(self, plan: RegionsPlan) -> None:
        self.plan = plan
        self.random: Random = seeded(plan.seed)
        self.loop = VirtualTimeLoop()
        self.clock = _VirtualClock(self.loop)
        self.names = tuple(f"r{number + 1}" for number in range(plan.regions))
        shares = {name: Fraction(1, plan.regions) for name in self.names}
        self.table = share_table(1, shares)
        self.stores = {name: _Store(name, self) for name in self.names}
        self.known = KnownTimes(self.loop.time)
        self.never_over = NeverOver(plan.limits)
        self.central = CentralLimiter(plan.limits)
        self.subjects = {load.subject: SubjectCounts() for load in plan.loads}
        self.takeovers_s: list[float] = []
        self.excess_units = 0
        self._most_shares = Fraction(0)
        self._lost_lead: dict[str, tuple[str, float]] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._isolated: set[str] = set()
        self._lost: set[str] = set()
        self._late: list[str] = []
        low, high = (milliseconds / 2_000 for milliseconds in plan.latency_ms)
        self._latency_s = {
            frozenset((one, other)): self.random.uniform(low, high)
            for one in self.names
            for other in self.names
        }
        self._links = {
            (one, other): seeded(self.random.random()) for one in self.names for other in self.names
        }
        self._nodes: dict[str, _Node] = {}
        self._ends_s = START_S + plan.seconds

    def run(self) -> None:
        """Run the plan."""
        log = logging.getLogger(exchange.__name__.rpartition(".")[0])
        level = log.level
        log.setLevel(logging.CRITICAL + 1)  # a simulation causes faults on purpose
        try:
            self.loop.run_until_complete(self._run())
        finally:
            self._end()
            log.setLevel(level)

    async def _run(self) -> None:
        for number in range(self.plan.nodes):
            for region in self.names:
                self._start_node(region, f"{region}-{number + 1}")
        await asyncio.sleep(START_S)
        for load in self.plan.loads:
            self._requests(load)
        self._faults()
        await asyncio.sleep(self.plan.seconds + DRAIN_S)

    def _end(self) -> None:
        """Cancel the nodes, and close the loop."""
        for node in self._nodes.values():
            node.kill()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.close()

    def _start_node(self, region: str, name: str) -> None:
        self._nodes[name] = _Node(self, region, name)

    # ── Network ────────────────────────────────────────────────────────────────────────────────

    def travel(self, source: str, target: str, event: Callable[[], None]) -> None:
        """Call `event` at the other end of a link, unless the link is cut."""
        is_cut = source in self._isolated or target in self._isolated
        if source != target and (is_cut or (source, target) in self._cuts):
            return
        random = self._links[source, target]
        seconds = LOCAL_S if source == target else self._latency_s[frozenset((source, target))]
        seconds *= random.uniform(1, 1.1)
        while source != target and random.random() < self.plan.loss:
            seconds += RETRANSMIT_S
        self.loop.call_later(seconds, event)

    # ── Traffic ────────────────────────────────────────────────────────────────────────────────

    def _requests(self, load: Load) -> None:
        """Send the requests of a load until the traffic ends."""
        rate = min(limit.limit / limit.window for limit in self.plan.limits)
        random = seeded(self.random.random())
        per_second = rate * load.times / load.cost
        moves = self._moves(load)

        def ask() -> None:
            if self.loop.time() >= self._ends_s:
                return
            region, since_s = moves(random)
            decision = self._check(region, load)
            if not decision and self.loop.time() - since_s > FULL_RATE_S:
                self.subjects[load.subject].denied_late += 1
            self.loop.call_later(random.expovariate(per_second), ask)

        if load.where == "patient":
            self.loop.call_later(1.0, self._patient, load, False)
        elif per_second:
            self.loop.call_later(random.expovariate(per_second), ask)

    def _moves(self, load: Load) -> Callable[[Random], tuple[str, float]]:
        """Return a function that chooses the region of a request, and says since when."""

        def chosen(random: Random) -> tuple[str, float]:
            if load.where == "all":
                return random.choice(self.names), 0.0
            since_s = START_S
            if load.where == "moving":
                since_s += (self.loop.time() - START_S) // MOVE_S * MOVE_S
            place = round((since_s - START_S) / MOVE_S)
            return self.names[place % len(self.names)], since_s

        return chosen

    def _patient(self, load: Load, waited: bool) -> None:
        """Send a request; after a denial, send another after `retry_after`."""
        if self.loop.time() >= self._ends_s:
            return
        decision = self._check(self.names[0], load)
        if decision or decision is None:
            self.loop.call_later(0.001 if decision else 1.0, self._patient, load, False)
            return
        self.subjects[load.subject].broken_waits += waited
        wait_s = decision.retry_after_ns / NS_PER_SECOND + 2e-6  # a store has whole microseconds
        self.loop.call_later(wait_s, self._patient, load, True)

    def _check(self, region: str, load: Load) -> Decision | None:
        """Check in a region. Returns None if the region is lost or has no share now."""
        if region in self._lost:
            return None
        counts, store = self.subjects[load.subject], self.stores[region]
        now_ns = self.clock.now_ns()
        counter = store.global_counter(self.plan.limits, _RULE, self.plan.across)
        self.central.arrived(load.subject, load.cost, now_ns)
        counts.asked += 1
        try:
            decision = counter.check(load.subject, load.cost)
        except (StoreUnavailable, CapacityError):
            return None
        if decision:
            counts.admitted += 1
            counts.by_region[region] = counts.by_region.get(region, 0) + load.cost
            self.never_over.admitted(load.subject, load.cost, now_ns, region)
            others = [each for each in self.names if each != region]
            total = store.total(self.plan.limits, load.subject)
            self.known.admitted(region, others, load.subject, total)
        return decision

    # ── Faults ─────────────────────────────────────────────────────────────────────────────────

    def _faults(self) -> None:
        plan, random = self.plan, self.random
        if plan.partition != "none" and plan.is_long:
            self._cut()
            self.loop.call_at(self._ends_s, self._heal)
        elif plan.partition != "none":
            self.loop.call_later(random.uniform(*CUT_S) / 2, self._cut_and_heal)
        for what, count in ((self._kill, plan.kills), (self._stop, plan.stops)):
            for _ in range(count):
                self.loop.call_later(random.uniform(0, plan.seconds), what)
        for _ in range(plan.changes):
            self.loop.call_later(random.uniform(0, plan.seconds), self._change)
        for _ in range(plan.removals):
            self.loop.create_task(self._lose(random.uniform(0, max(plan.seconds - REMOVED_S, 0))))

    def _cut_and_heal(self) -> None:
        if self.loop.time() < self._ends_s:
            self._cut()
            seconds = min(self.random.uniform(*CUT_S), self._ends_s - self.loop.time())
            self.loop.call_later(seconds, self._heal)
            self.loop.call_later(seconds + self.random.uniform(*CUT_S), self._cut_and_heal)

    def _cut(self) -> None:
        """Cut links between regions."""
        random, names = self.random, self.names
        pairs = [(one, other) for one in names for other in names if one < other]
        if self.plan.partition == "alone":
            alone = random.choice(names)
            pairs = [pair for pair in pairs if alone in pair]
        elif self.plan.partition != "all":
            pairs = [pair for pair in pairs if random.random() < 0.4]
        for one, other in pairs:
            directions = [(one, other), (other, one)]
            if self.plan.partition == "one-way":
                directions = [random.choice(directions)]
            self._cuts.update(directions)

    def _heal(self) -> None:
        self._cuts.clear()

    def _leader(self) -> _Node | None:
        """Return the leader of a random region."""
        region = self.random.choice(self.names)
        node = self._nodes.get(self.stores[region].leader)
        if node is None or not node.is_running or region in self._lost_lead:
            return None
        running = sum(each.is_running for each in self._nodes.values() if each.region == region)
        if running < 2:  # a region needs a node that can take over
            return None
        self._lost_lead[region] = (node.name, self.loop.time())
        return node

    def _kill(self) -> None:
        node = self._leader()
        if node is not None:
            node.kill()
            self.loop.call_later(10.0, self._start_node, node.region, f"{node.name}+")

    def _stop(self) -> None:
        node = self._leader()
        if node is not None:
            node.stop()
            self.loop.call_later(self.random.uniform(5, 12), node.resume)

    def works(self, region: str, leader: str) -> None:
        """Note that a leader has read the reports that are due."""
        name, since_s = self._lost_lead.get(region, ("", 0.0))
        if name and name != leader:
            self.takeovers_s.append(self.loop.time() - since_s)
            del self._lost_lead[region]

    def _change(self) -> None:
        """Change the shares, like an operator who can reach one region."""
        weights = {name: self.random.randint(1, 4) for name, _ in self.table.shares}
        total = sum(weights.values())
        shares = {name: Fraction(weight, total) for name, weight in weights.items()}
        self._write_table(shares, [self.random.choice(list(shares))])

    def _write_table(self, shares: Mapping[str, Fraction], regions: Iterable[str]) -> None:
        self.table = share_table(self.table.version + 1, shares)
        for region in regions:
            result_of(self.stores[region].note(TABLE_NOTE, self.table.text()))

    async def _lose(self, after_s: float) -> None:
        """Cut a region off, lose it, remove it, and add it again when it is back."""
        await asyncio.sleep(after_s)
        region = self.random.choice(self.names)
        if self._isolated or self._lost or len(self.names) == 1:
            return
        self._isolated.add(region)
        await asyncio.sleep(self.random.uniform(0, 5))  # the region goes on alone
        self._lost.add(region)
        await asyncio.sleep(self.random.uniform(0, 2))
        left = shares_without(dict(self.table.shares), region)
        self._write_table(left, left)
        await asyncio.sleep(10)
        self._isolated.discard(region)
        await asyncio.sleep(3)
        self._write_table(shares_with(dict(self.table.shares), region, None), self.names)
        await asyncio.sleep(5)
        self._lost.discard(region)

    def shares_set(self) -> None:
        """Note the sum of the shares in use."""
        found = [store.share for name, store in self.stores.items() if name not in self._lost]
        total = sum(found, Fraction(0))
        self._most_shares = max(self._most_shares, total)

    # ── Results ────────────────────────────────────────────────────────────────────────────────

    def problems(self) -> list[str]:
        """Return the broken promises."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        plan = self.plan
        if plan.across == "exact":
            yield from self.never_over.violations
        if self._most_shares > 1:
            yield f"the shares in use added up to {self._most_shares}"
        for seconds in self.takeovers_s:
            if seconds > TAKEOVER_S_MAX:
                yield f"a region had no leader for {seconds:.1f} s"
        for region in self._lost_lead:
            yield f"no node has taken the lead of {region}"
        for region, store in self.stores.items():
            # When a region is added again, the units that it missed are counted as spent in its
            # share.
            for other in () if plan.removals else self.names:
                if other != region and (missing := self._missing(store, other)):
                    yield f"{region} has not learnt the total of {missing} in {other}"
        if plan.is_calm:
            yield from self._calm_problems()

    def _missing(self, store: _Store, other: str) -> str:
        """Return a subject of which a store does not know all units of another region."""
        learnt = store.totals(other)
        totals = self.stores[other].totals()
        found = (name for name, total in totals.items() if total and learnt.get(name) != total)
        return next(found, "")

    def _calm_problems(self) -> Iterator[str]:
        """Yield the promises that were broken without faults."""
        plan = self.plan
        steady = all(limit.window_ns >= STEADY_WINDOW_NS for limit in plan.limits)
        for load in plan.loads:
            counts = self.subjects[load.subject]
            denied = counts.asked - counts.admitted
            if steady and load.times < 0.9 and load.where != "patient" and denied:
                yield f"{load.subject} is below its limit, and {denied} requests were denied"
            over = self.never_over.over.get(load.subject, 0)
            capacity = min(limit.capacity for limit in plan.limits)
            allowed = max(EVENTUAL_OVER_MAX * capacity, plan.regions * load.cost)
            if not steady:  # the units that refill in two trips are a large part of a short limit
                trips_s = 2 * plan.latency_ms[1] / 1_000
                allowed += max(limit.limit / limit.window for limit in plan.limits) * trips_s
            if plan.across == "eventual" and over > allowed:
                yield f"{load.subject} was {over} units over an eventual limit of {capacity}"
            if plan.across == "exact" and counts.broken_waits:
                times = counts.broken_waits
                yield f"{load.subject} waited for retry_after, and was denied {times} times"

    def shortfall(self, subject: str) -> float:
        """Return the part of a subject's requests that only a perfect limiter would admit."""
        best = self.central.admitted.get(subject, 0)
        return max(best - self.subjects[subject].admitted, 0) / best if best else 0.0

    def delivered(self, subject: str) -> float:
        """Return the part of its share of the rate that a region has delivered, the least of all.

        The subject must always ask for more than the limit. A bucket's initial capacity is left
        out.
        """
        parts = []
        for limit in self.plan.limits:
            units = limit.limit * self.plan.seconds / limit.window / len(self.names)
            once = limit.capacity / len(self.names) if limit.algorithm in BUCKETS else 0
            by_region = self.subjects[subject].by_region
            parts += [max(by_region.get(name, 0) - once, 0) / units for name in self.names]
        return min(parts)

    def known_s(self, share: float) -> float:
        """Return the time within which other regions knew of this share of the admissions."""
        return percentile(self.known.seconds, share)


def rows_of_regions(run: SimulatedRegions) -> list[tuple[str, str]]:
    """Return the results as rows for people."""
    capacity = min(limit.capacity for limit in run.plan.limits)
    rows = []
    for subject, counts in run.subjects.items():
        over = run.never_over.over.get(subject, 0)
        text = (
            f"{counts.admitted:,} of {counts.asked:,} admitted, "
            f"{100 * run.shortfall(subject):.2f} % fewer than one store, "
            f"{over} units ({100 * over / capacity:.2f} %) over"
        )
        rows.append((subject, text))
    rows.append(("known in other regions", _milliseconds(run)))
    if run.takeovers_s:
        rows.append(("another leader works after", f"{max(run.takeovers_s):.1f} s at most"))
    rows.append(("excess, all regions together", f"{run.excess_units:,} units"))
    return rows


def _milliseconds(run: SimulatedRegions) -> str:
    return f"{1_000 * run.known_s(0.5):.0f} ms (50 %), {1_000 * run.known_s(0.99):.0f} ms (99 %)"


def run_random_regions(seed: int) -> list[str]:
    """Run the regions of a seed; return their problems."""
    run = SimulatedRegions(random_regions(seed))
    run.run()
    return run.problems()


def random_regions(seed: int) -> RegionsPlan:
    """Return the regions of a seed: small ones, with random faults and short limits."""
    random = seeded(seed)
    limit = Limit(
        random.choice((20, 100, 500)),
        per=random.choice((2, 5, 20, 60)),
        algorithm=random.choice(UNIT_ALGORITHMS),
    )
    is_faulty = random.random() < 0.8
    # At most some hundred requests a second, so that a trial takes a second.
    most = 300 * limit.window / limit.limit
    return RegionsPlan(
        (limit,),
        random.choice(("exact", "exact", "exact", "eventual")),
        regions=random.randint(2, 5),
        nodes=3,
        seconds=random.randint(8, 30),
        seed=seed,
        loads=(
            Load("some", random.choice((0.3, 0.8)), random.choice(("all", "moving"))),
            Load("many", min(random.choice((2, 10)), most), random.choice(("all", "one"))),
        ),
        loss=random.choice((0.0, 0.05, 0.3)) if is_faulty else 0.0,
        partition=random.choice(PARTITIONS) if is_faulty else "none",
        is_long=random.random() < 0.2,
        kills=random.randint(0, 2) if is_faulty else 0,
        stops=random.randint(0, 2) if is_faulty else 0,
        changes=random.choice((0, 1, 3)) if is_faulty else 0,
        removals=random.choice((0, 0, 1)) if is_faulty else 0,
    )
