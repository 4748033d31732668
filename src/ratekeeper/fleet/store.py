"""FleetStore: a store that answers checks in the node where the rules allow it.

It wraps the store that is the authority. Strict rules use the counters of that store directly,
without extra cost. The other rules use the counters of `counters.py`.

`check_together` decides rules of different consistency: all pass or none is charged. It first
spends the units that the node has, then asks the authority for the rest in one call. If the
authority denies, the node's units are put back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from ratekeeper.core.clock import Clock
from ratekeeper.core.errors import ConfigError, StoreError
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import Consistency, Decision, Limit
from ratekeeper.core.steps import Ask, Call, Steps, Together, asking
from ratekeeper.decide.combine import uncharged
from ratekeeper.decide.failure import SharedCounts
from ratekeeper.decide.fleet_monitor import FleetMonitor
from ratekeeper.decide.leasing import (
    NO_LEASE,
    Authority,
    LeaseCheck,
    LeasedAnswer,
    LeaseTerms,
    lifetime_ns,
)
from ratekeeper.decide.regional import AcrossRegions, GlobalCounter
from ratekeeper.decide.store import (
    Answer,
    Channel,
    Charge,
    Counter,
    LocalStore,
    SharedStore,
    Store,
    StoreWrapper,
    require_strict_across,
    shared_store,
    stamp_of,
)
from ratekeeper.decide.stores import open_local_store
from ratekeeper.fleet.agent import NodeAgent
from ratekeeper.fleet.counters import NodeCounter, leasing, reporting
from ratekeeper.fleet.node import Node
from ratekeeper.fleet.outage import NodeTotals
from ratekeeper.fleet.reports import ReportThread
from ratekeeper.fleet.settings import Fleet

_STRICT: Final = LeaseTerms(0, 1, 0)

# Position, counter of the node, decision of the node.
_Spent = tuple[int, NodeCounter, Decision]


class FleetStore(StoreWrapper):
    """The store of a node: limiters can share it.

    The table of the node is opened for the first counter that is not strict, or at once if the node
    gossips. `owns_store` is True if closing this store also closes the one that it wraps.
    """

    def __init__(
        self,
        store: SharedStore,
        fleet: Fleet,
        clock: Clock,
        *,
        owns_store: bool = True,
        region: str = "",
        registry: Channel | None = None,
    ) -> None:
        """Wrap the store; `registry` is where the nodes of the fleet register, if they do."""
        self.fleet_settings = fleet
        self._region = region
        self._registry = registry
        super().__init__(store)
        self._clock = clock
        self._owns_store = owns_store
        self._lock = fork_safe(threading.Lock())
        self._node: Node | None = None
        self._table_store: LocalStore | None = None
        self._thread: ReportThread | None = None
        self._agent: NodeAgent | None = None
        self._totals: NodeTotals | None = None
        if fleet.gossip is not None:
            self.open_node()

    @property
    def node(self) -> Node | None:
        """The state that the counters share; None until a limit that is not strict is prepared."""
        return self._node

    @property
    def shared_counts(self) -> SharedCounts | None:
        """The counts of all nodes, for limits whose authority is away; None without gossip."""
        return self._totals

    def open_node(self) -> Node:
        """Open the table of the node, unless it is open. Raises ConfigError, StoreUnavailable."""
        if self._node is not None:
            return self._node
        with self._lock:
            if self._node is None:
                self._table_store = open_local_store(self.fleet_settings.store, self._clock)
                table = self._table_store.allowances
                node = Node(self.fleet_settings, self._clock, table, self._store.authority)
                node.make_counter = self._store.counter
                self._agent = self._started_agent(node)
                self._thread = ReportThread(node)
                self._node = node  # last: it is read without the lock
            return self._node

    def _started_agent(self, node: Node) -> NodeAgent:
        """Connect the node with the others. Raises ConfigError, and closes the table then."""
        agent = NodeAgent(node, region=self._region, registry=self._registry)
        if node.fleet.gossip is not None:
            totals = NodeTotals(
                agent, node.now_ns, node.fleet.nodes, node.note_admitted, self._table_store
            )
            agent.on_lead, agent.on_turn, agent.on_question = (
                totals.lead,
                totals.publish,
                totals.answer,
            )
            agent.on_changes, agent.on_payloads = totals.on_changes, totals.on_payloads
            self._totals = totals
        try:
            agent.start()
        except ConfigError:
            assert self._table_store is not None, "open_node has opened it"  # noqa: S101 - ours
            self._table_store.close()
            raise
        node.hints, node.live_nodes = agent, agent.sharing_nodes
        node.hears_hints = agent.hears_hints
        return agent

    # ── The wrapped store ──────────────────────────────────────────────────────────────────────

    @property
    def wrapped(self) -> SharedStore:
        """The authority, or the store of a region that wraps it."""
        return self._store

    @property
    def fleet(self) -> FleetMonitor | None:
        """The counters and the nodes; None until a limit that is not strict is prepared."""
        return self._agent

    # ── Counters ───────────────────────────────────────────────────────────────────────────────

    def counter(
        self,
        limits: Sequence[Limit],
        rule: str,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
    ) -> Counter:
        """Prepare a rule's limits."""
        require_strict_across(consistency, across)
        counter = self._store.counter(limits, rule, across=across)
        if consistency == "strict" or not lifetime_ns(limits, self.fleet_settings.lease_ns):
            return counter
        return NodeCounter(self.open_node(), tuple(limits), rule, consistency, counter)

    # ── Several subjects ───────────────────────────────────────────────────────────────────────

    def check_together(
        self, checks: Sequence[Charge], optional: Container[int] = ()
    ) -> list[Answer] | Ask:
        """Check several subjects; all pass or none is charged."""
        for counter, _, _ in checks:
            if isinstance(counter, NodeCounter):
                return self._check_with_node(checks, optional)
        return self._store.check_together(checks, optional)

    def _check_with_node(
        self, checks: Sequence[Charge], optional: Container[int]
    ) -> list[Answer] | Ask:
        spent = _spent(checks)
        if all(spent):  # without a generator: the node has answered all of them
            return spent  # type: ignore[return-value]  # all are decisions
        calls = JointCalls(self._store.check_together, self.open_node().authority)
        return asking(deciding, calls, checks, optional, spent)

    # ── Shutdown ───────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Give all leases back, flush all charges, and close the table and an owned store."""
        self._close_node()
        if self._owns_store:
            self._store.close()

    async def aclose(self) -> None:
        """See `close`."""
        await asyncio.to_thread(self._close_node)
        if self._owns_store:
            await self._store.aclose()

    def _close_node(self) -> None:
        if self._thread is not None:
            self._thread.close()
        if self._agent is not None:
            self._agent.close()
        if self._table_store is not None:
            self._table_store.close()


def _spent(checks: Sequence[tuple[Any, str, int]]) -> list[Decision | None]:
    """Spend the node's units for each check; None where the authority has to decide."""
    return [
        counter.spent(subject, cost) if isinstance(counter, NodeCounter) else None
        for counter, subject, cost in checks
    ]


def fleet_store_of(
    store: Store, fleet: Fleet, clock: Clock, *, owned: bool, region: str = ""
) -> Store:
    """Return the store of a limiter: a FleetStore if several machines can share the counts.

    `owned` is True if the limiter has opened the store. A store that belongs to another limiter
    keeps that limiter's fleet.
    """
    if isinstance(store, FleetStore):
        if fleet not in (Fleet(), store.fleet_settings):
            raise ConfigError(
                "this store belongs to a limiter with other Fleet settings; "
                "omit fleet, or pass the URI of the store"
            )
        return store
    shared = shared_store(store)
    if shared is None:
        if fleet.gossip is not None:
            raise ConfigError(
                f"gossip={fleet.gossip!r} is for nodes that share a store, and no other machine "
                f'shares this one; for example store="redis://localhost", or leave gossip out'
            )
        return store
    registry = shared.channel
    return FleetStore(shared, fleet, clock, owns_store=owned, region=region, registry=registry)


def shared_counts_of(store: Store) -> SharedCounts | None:
    """Return the counts of all nodes, if the store is that of a node that gossips."""
    return store.shared_counts if isinstance(store, FleetStore) else None


class JointCalls(NamedTuple):
    """The calls that a check of several subjects makes."""

    check_together: Callable[..., Any]
    authority: Authority


def deciding(
    calls: JointCalls,
    checks: Sequence[tuple[Any, str, int]],
    optional: Container[int],
    decided: Sequence[Decision | None],
) -> Steps[list[Answer]]:
    """Decide checks of any consistency: all pass, or none is charged.

    `decided` has the decisions of the node. The authority decides the others.
    """
    rest = [at for at, decision in enumerate(decided) if decision is None]
    spent = [(at, checks[at][0], each) for at, each in enumerate(decided) if each is not None]
    answers: dict[int, Answer] = {}
    try:
        denier = next((counter for _, counter, decision in spent if not decision), None)
        if denier is not None:
            answers = yield from _looking(denier.node, checks, rest)
            passes = False
        else:
            answers = yield from _asking(calls, checks, rest, optional)
            passes = all(
                at in optional if isinstance(answer, StoreError) else answer.allowed
                for at, answer in answers.items()
            )
    except BaseException:
        yield from _putting_back(checks, spent)
        raise
    if not passes:
        yield from _putting_back(checks, spent)
    for at, _, decision in spent:
        answers[at] = decision if passes else uncharged(decision, checks[at][2])
    return [answers[at] for at in range(len(checks))]


def _asking(
    calls: JointCalls,
    checks: Sequence[tuple[Any, str, int]],
    rest: Sequence[int],
    optional: Container[int],
) -> Steps[dict[int, Answer]]:
    """Let the authority decide the checks at these positions; keep its answers in the table."""
    if not rest:
        return {}
    asked_of = [(counter, subject) for counter, subject, _ in (checks[at] for at in rest)]
    own = [(counter, subject) for counter, subject in asked_of if isinstance(counter, NodeCounter)]
    with suppress(StoreError):  # then the checks fail too
        yield from reporting(calls.authority, own)
    asked: list[tuple[NodeCounter | None, LeaseCheck]] = []
    for at in rest:
        counter, subject, cost = checks[at]
        if isinstance(counter, NodeCounter):
            counter.known.asked += bool(cost)
            terms = counter.terms(subject)
            asked.append((counter, LeaseCheck(counter.counter, subject, cost, terms)))
        else:
            asked.append((None, LeaseCheck(counter, subject, cost, _STRICT)))
    may_fail = [place for place, at in enumerate(rest) if at in optional]
    clock = next((counter.node.now_ns for counter, _ in asked if counter is not None), None)
    asked_ns = 0 if clock is None else clock()
    # A request with a global rule, or with a limit of requests in flight, asks the authority in any
    # case, and takes no lease.
    takes_none = any(
        isinstance(check.counter, GlobalCounter) or stamp_of(check.counter) for _, check in asked
    )
    if not takes_none and any(check.terms.wanted for _, check in asked):
        found: list[LeasedAnswer] = yield from leasing(calls.authority, asked, may_fail)
    else:
        plain = [check[:3] for _, check in asked]
        looked: list[Answer] = yield Call(calls.check_together, plain, may_fail)
        found = [each if isinstance(each, StoreError) else (each, NO_LEASE) for each in looked]
    passes = all(
        place in may_fail if isinstance(each, StoreError) else each[0].allowed
        for place, each in enumerate(found)
    )
    answers: dict[int, Answer] = {}
    for at, (counter, check), each in zip(rest, asked, found, strict=True):
        answers[at] = each if isinstance(each, StoreError) else each[0]
        # The request is denied, so a check that would pass was not charged.
        if counter is not None and not isinstance(each, StoreError) and passes | (not each[0]):
            counter.keep(check.subject, check.cost, each, asked_ns)
    return answers


def _looking(
    node: Node, checks: Sequence[tuple[Any, str, int]], rest: Sequence[int]
) -> Steps[dict[int, Answer]]:
    """Return the answers to the checks at these positions, without a charge: the request is denied.

    The caller shows these answers, and waits for the longest of them. None of them can let the
    request pass, so the node caches them for a second, like the denial itself.
    """
    answers: dict[int, Answer] = {}
    for at in rest:
        known = node.look_of(tuple(checks[at]))
        if known is not None:
            answers[at] = known
    asked = [at for at in rest if at not in answers]
    calls = [Call(checks[at][0].peek, *checks[at][1:]) for at in asked]
    looked: list[Any] = (yield Together(calls)) if calls else []
    for at, each in zip(asked, looked, strict=True):
        answers[at] = each
        if not isinstance(each, BaseException):
            node.keep_look(tuple(checks[at]), each)
        elif not isinstance(each, StoreError):
            raise each
    return answers


def _putting_back(checks: Sequence[tuple[Any, str, int]], spent: Sequence[_Spent]) -> Steps[None]:
    """Put back the units that the node has spent for a request that is denied."""
    for at, counter, decision in spent:
        if decision.charged_ns is not None:
            _, subject, cost = checks[at]
            with suppress(StoreError):
                yield from counter.undoing(subject, cost, decision.charged_ns)
