"""Failure policies: the answer to a check when the store cannot decide.

    open    allow without counting: serving matters more than limiting
    closed  deny: serving without a limit is worse than not serving
    local   go on with this machine's counts alone
    raise   raise the StoreError to the caller

Every answer is marked degraded, so that callers can tell it from a decision of the store.

The policy of a rule answers for that rule only. A store may fail for some rules of a request: one
shard of a cluster is down, or a full table has no room for a new key. The store decides and charges
the other rules as always, and the request passes if they and the policies allow it. `closed` and
`raise` end the request, so then nothing is charged.

`wait` and `reserve` limit what an application does itself, for example calls to another service.
No limit at all would be the wrong answer there: with `open` they go on with this machine's counts,
as with `local`.

A rule with `on_failure: local` is limited by counts of this machine. The limits are those of
the whole fleet, so each of `nodes` machines has its share of them, and all machines together admit
no more than the rule allows. The workers of one machine count together if `store` is a file that
they share; with `memory://`, each process has the whole share of the machine.

In a fleet, the machines know their number and report to one another the units that they have
admitted (`SharedCounts`). Then a machine may admit more than its share of a subject that the others
do not see, up to CEILING_SHARES times its share. If that fails, it has the share of one of the last
known number of machines. The units that it has admitted are charged to the store when the store is
back.

Two more limits apply only while the store is unavailable. The `ceiling` limits all requests that a
machine admits, whatever their rule. The `emergency` limits apply to each address in a long outage,
against clients that wait for an outage to exploit it.

The clock of an outage follows the store, not the traffic. A remote store knows since when its calls
have failed without a success (`BreakerState.failing_s`), however few they are. For any other
failure (a full table), an outage is over when no check has failed for OUTAGE_GAP_NS. Each process
has its own clock, so a worker that had no requests applies the emergency limits later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, Literal, NamedTuple, Protocol, get_args

from ratekeeper.core.clock import NS_PER_SECOND, Clock, duration_ns
from ratekeeper.core.errors import CapacityError, ConfigError, StoreError, show
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import Decision, Limit, Limits, decision_with
from ratekeeper.core.rates import LimitsArgument, limits_of, scaled
from ratekeeper.core.seldom_log import SeldomLog
from ratekeeper.core.subjects import Key, subject_of
from ratekeeper.decide.combine import combine_decisions
from ratekeeper.decide.store import LocalCounter, LocalStore, StoreMonitor
from ratekeeper.decide.stores import open_local_store

FailurePolicy = Literal["open", "closed", "local", "raise"]
"""The answer when the store cannot decide.

`open`    allow the request, without counting it.
`closed`  deny it.
`local`   limit it by the counts of this machine; see `LocalFallback`.
`raise`   raise the `StoreError`.
"""
FAILURE_POLICIES: Final[tuple[FailurePolicy, ...]] = get_args(FailurePolicy)
# The policies that may let a request pass. With the others, one failed check ends the request.
OPTIONAL_POLICIES: Final[frozenset[FailurePolicy]] = frozenset({"open", "local"})

# The end of an outage is unknown. One second keeps clients from retrying in a tight loop.
RETRY_AFTER_NS: Final = NS_PER_SECOND
NODES_MAX: Final = 100_000
# The most that one node admits of a subject, in shares, however little the others report.
CEILING_SHARES: Final = 2
OUTAGE_GAP_NS: Final = 5 * NS_PER_SECOND
LOG_EVERY_S: Final = 60.0
# Counters that are kept prepared: more than a document has limits, at any load.
_COUNTERS_MAX: Final = 4_096
_AFTER_NS_MAX: Final = 86_400 * NS_PER_SECOND

# The names of these limits in decisions, and the subject of the ceiling.
CEILING: Final = "ceiling"
EMERGENCY: Final = "emergency"
_EVERYONE: Final = "*"
_MEMORY: Final = "memory://"

# A check of this machine: its counter, the subject and the units.
LocalCharge = tuple[LocalCounter, str, int]

_log = logging.getLogger("ratekeeper.decide.failure")
_outages = SeldomLog(_log, logging.WARNING, LOG_EVERY_S)


def check_policy(policy: str) -> None:
    """Raise ConfigError for an unknown failure policy."""
    if not isinstance(policy, str) or policy not in FAILURE_POLICIES:
        raise ConfigError(
            f"on_failure={show(policy)} is not known; choose one of {', '.join(FAILURE_POLICIES)}"
        )


def undecided(limit: Limit, rule: str, *, allowed: bool = False) -> Decision:
    """Return the degraded decision on a rule that could not be counted."""
    return Decision(
        allowed=allowed,
        policy=limit,
        remaining=0,
        retry_after_ns=0 if allowed else RETRY_AFTER_NS,
        reset_after_ns=RETRY_AFTER_NS,
        rule=rule,
        degraded=True,
    )


@dataclass(frozen=True, slots=True)
class LocalFallback:
    """How to limit while the store is unavailable.

    >>> LocalFallback(nodes=20, ceiling="5000/second", emergency="60/minute").nodes
    20

    `nodes`            how many machines share the limits: each has 1/nodes of them.
    `store`            where this machine counts: `memory://` for each process by itself, or
                       `shared:///run/api.local_fallback` for all of its processes together.
    `ceiling`          the most that this machine admits, over all rules; by default no bound.
    `emergency`        limits for each address in a long outage; by default none.
    `emergency_after`  seconds after which an outage is long.
    """

    nodes: int = 1
    store: str = "memory://"
    ceiling: LimitsArgument | None = None
    emergency: LimitsArgument | None = None
    emergency_after: float = 60.0
    ceiling_limits: Limits = field(init=False, default=(), compare=False)
    emergency_limits: Limits = field(init=False, default=(), compare=False)
    emergency_after_ns: int = field(init=False, default=0, compare=False)

    def __post_init__(self) -> None:
        nodes = self.nodes
        if not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes <= NODES_MAX:
            raise ConfigError(
                f"nodes={show(nodes)} is not a whole number from 1 to {NODES_MAX:,}; "
                f"for example LocalFallback(nodes=20) where twenty machines share the limits"
            )
        if not isinstance(self.store, str) or not self.store.startswith((_MEMORY, "shared://")):
            raise ConfigError(
                f"store={show(self.store)} is not on this machine; "
                f'for example LocalFallback(store="shared:///run/api.local_fallback") or "memory://"'
            )
        after_ns = duration_ns(
            "emergency_after", self.emergency_after, _AFTER_NS_MAX, "emergency_after=60 (seconds)"
        )
        object.__setattr__(self, "emergency_after_ns", after_ns)
        if self.ceiling is not None:
            object.__setattr__(self, "ceiling_limits", limits_of(self.ceiling))
        if self.emergency is not None:
            object.__setattr__(self, "emergency_limits", limits_of(self.emergency))


def local_fallback_of(local_fallback: object) -> LocalFallback:
    """Return the argument of a limiter; by default one node whose processes count separately."""
    if local_fallback is None:
        return LocalFallback()
    if isinstance(local_fallback, LocalFallback):
        return local_fallback
    raise ConfigError(
        f"local_fallback={show(local_fallback)} is not a LocalFallback; "
        f"for example local_fallback=LocalFallback(nodes=20)"
    )


class LocalCheck(NamedTuple):
    """One rule's part in a request that the store could not decide."""

    limits: Limits
    rule: str
    subject: str
    units: int
    part: tuple[Limits, str] | None = None
    """Of a rule that is split: the limits and the subject of the part that the store counts."""


class FailedCheck(NamedTuple):
    """One check of a request that the store could not decide, with its failure policy."""

    error: StoreError
    policy: FailurePolicy
    check: LocalCheck

    def decision(self) -> Decision:
        """Return the answer of the policies `open` and `closed`."""
        check = self.check
        return undecided(check.limits[0], check.rule, allowed=self.policy == "open")


class SharedCounts(Protocol):
    """The counts of all nodes of a fleet, for limits whose authority is away."""

    @property
    def store(self) -> LocalStore | None:
        """Where all processes of this node count together; None if there is no such store."""
        ...

    def nodes(self) -> int:
        """Return how many nodes share the limits: the live ones, as far as they are known."""
        ...

    def decide(self, checks: Sequence[LocalCheck], *, spend: bool) -> list[Decision] | None:
        """Return a decision for each check, all allowed and charged or none charged.

        None if the counts cannot answer: then nothing was charged. Blocks for some milliseconds at
        most.
        """
        ...

    def note_admitted(self, checks: Sequence[LocalCheck]) -> None:
        """Note units that this process has admitted: the authority is charged when it is back."""
        ...


class LocalLimits:
    """The counts of this machine, opened when they are first needed."""

    def __init__(self, fallback: LocalFallback, clock: Clock) -> None:
        self._fallback = fallback
        self._clock = clock
        self.monitor: StoreMonitor | None = None
        """That of the store in whose place these limits decide, if it has one."""
        self.fleet: SharedCounts | None = None
        """The counts of the fleet, if this machine is a node of one that gossips."""
        self._store: LocalStore | None = None
        self._owns_store = True
        self._counters: dict[tuple[Limits, str, Fraction], LocalCounter] = {}
        self._lock = fork_safe(threading.Lock())
        if fallback.store != _MEMORY:
            self._opened()  # now, so that an unusable file is an error at startup
        self._since_ns = self._failed_ns = -OUTAGE_GAP_NS - 1

    def note_failure(self, error: Exception) -> None:
        """Note that a check failed, so the store is unavailable.

        Each kind of error is logged once a minute, however many limiters this process has.
        """
        now_ns = self._clock.now_ns()
        if now_ns - self._failed_ns > OUTAGE_GAP_NS:
            self._since_ns = now_ns
        self._failed_ns = now_ns
        kind = type(error).__name__
        if _outages.is_due(kind):
            _outages.note(
                "the store has been unable to decide for %d s, and on_failure answers: %s",
                self.outage_ns() // NS_PER_SECOND,
                error,
                key=kind,
            )

    def outage_ns(self) -> int:
        """Return how long this process knows that the store is unavailable; 0 if it is not."""
        now_ns = self._clock.now_ns()
        noted_ns = 0
        if now_ns - self._failed_ns <= OUTAGE_GAP_NS:
            noted_ns = max(now_ns - self._since_ns, 0)
        breakers = self.monitor.breakers() if self.monitor is not None else ()
        failing_s = max((breaker.failing_s for breaker in breakers), default=0.0)
        return max(noted_ns, int(failing_s * NS_PER_SECOND))

    def answer(
        self,
        failed: Sequence[FailedCheck],
        decided: Sequence[Decision],
        address: str | None,
        *,
        spend: bool,
    ) -> Decision:
        """Return the degraded decision on a request with failed checks, or raise their error.

        `decided` are the store's decisions on its other checks, which all let it pass.
        """
        for each in failed:
            if each.policy == "raise":
                raise each.error
        answers = [each.decision() for each in failed if each.policy == "closed"]
        if not answers:
            local_checks = [each.check for each in failed if each.policy == "local"]
            answers = self.decide(local_checks, address, spend=spend)
        if not answers and not decided:
            answers = [each.decision() for each in failed]
        decision = decision_with(combine_decisions([*decided, *answers]), degraded=True)
        decision.uncounted = tuple([each.check for each in failed if each.policy == "open"])
        return decision

    def decide(
        self, checks: Sequence[LocalCheck], address: str | None, *, spend: bool
    ) -> list[Decision]:
        """Return a degraded decision for each check, and denials of ceiling and emergency limits.

        All pass or none is charged. Empty if no limit applies.
        """
        fallback = self._fallback
        if not (checks or fallback.ceiling_limits or fallback.emergency_limits):
            return []
        return self._decided(checks, self._outage_charges(self._opened(), address), spend=spend)

    def count(self, uncounted: Sequence[LocalCheck]) -> list[Decision]:
        """Charge checks that were allowed without counting, at this machine's share of the limits.

        The ceiling and the emergency limits have counted the request already.
        """
        return self._decided(uncounted, [], spend=True)

    def _decided(
        self, checks: Sequence[LocalCheck], outage_charges: Sequence[LocalCharge], *, spend: bool
    ) -> list[Decision]:
        fleet = self.fleet
        if fleet is None or not checks:
            share = Fraction(1, self._fallback.nodes)
            _, found = self._charge(checks, share, outage_charges, spend=spend)
            return _reported(found, len(checks))
        nodes = fleet.nodes()
        ceiling = min(Fraction(CEILING_SHARES, nodes), Fraction(1))
        charges, found = self._charge(checks, ceiling, outage_charges, spend=spend)
        shared = fleet.decide(checks, spend=spend) if all(found) else []
        if spend and all(found) and not (shared and all(shared)):
            _refund(charges, found)
        if shared is None:
            _, found = self._charge(checks, Fraction(1, nodes), outage_charges, spend=spend)
        elif shared:
            found = [combine_decisions(pair) for pair in zip(found, shared, strict=False)]
        decisions = _reported(found, len(checks))
        if spend and all(decisions):
            fleet.note_admitted(checks)
        return decisions

    def _charge(
        self,
        checks: Sequence[LocalCheck],
        share: Fraction,
        outage_charges: Sequence[LocalCharge],
        *,
        spend: bool,
    ) -> tuple[list[LocalCharge], list[Decision]]:
        """Charge this machine's own counts, with a share of the limits; return the decisions."""
        charges = [*self._charges(checks, share), *outage_charges]
        try:
            return charges, _decide(self._opened(), charges, spend=spend)
        except (StoreError, CapacityError):
            # The local store is full, or the share is too small for this cost: deny.
            if checks:
                return [], [undecided(checks[0].limits[0], checks[0].rule)]
            return [], [undecided(charges[0][0].limits[0], CEILING)]

    def _charges(self, checks: Sequence[LocalCheck], share: Fraction) -> list[LocalCharge]:
        store = self._opened()
        return [
            (self._counter(store, check.limits, check.rule, share), check.subject, check.units)
            for check in checks
        ]

    def _outage_charges(self, store: LocalStore, address: str | None) -> list[LocalCharge]:
        """Return the ceiling and emergency checks. They count requests, whatever their cost."""
        fallback = self._fallback
        charges: list[LocalCharge] = []
        if fallback.ceiling_limits:
            charges.append((store.counter(fallback.ceiling_limits, CEILING), _EVERYONE, 1))
        if fallback.emergency_limits and self.outage_ns() >= fallback.emergency_after_ns:
            key: Key = ("ip", address) if address else "ip"
            charges.append(
                (store.counter(fallback.emergency_limits, EMERGENCY), subject_of(key), 1)
            )
        return charges

    def _counter(
        self, store: LocalStore, limits: Limits, rule: str, share: Fraction
    ) -> LocalCounter:
        """Return a share of the limits, as a counter of this machine.

        Counters of different shares have the same counts.
        """
        counter = self._counters.get((limits, rule, share))
        if counter is None:
            if len(self._counters) >= _COUNTERS_MAX:
                self._counters.clear()
            scaled_limits = limits if share == 1 else scaled(limits, share)
            counter = self._counters[limits, rule, share] = store.counter(scaled_limits, rule)
        return counter

    def _opened(self) -> LocalStore:
        store = self._store
        if store is not None:
            return store
        with self._lock:
            if self._store is None:
                # The processes of a node of a fleet count together, unless configured otherwise.
                if self.fleet is not None and self._fallback.store == _MEMORY:
                    self._store = self.fleet.store
                self._owns_store = self._store is None
                if self._store is None:
                    self._store = open_local_store(self._fallback.store, self._clock)
            return self._store

    def close(self) -> None:
        """Close the local store, if it was opened."""
        with self._lock:
            if self._store is not None:
                if self._owns_store:
                    self._store.close()
                self._store = None
                self._counters.clear()


def _decide(store: LocalStore, charges: Sequence[LocalCharge], *, spend: bool) -> list[Decision]:
    if not charges:
        return []
    if spend:
        decisions: list[Decision] = []
        for answer in store.check_together(charges):
            if isinstance(answer, StoreError):
                raise answer
            decisions.append(answer)
        return decisions
    return [counter.peek(subject, units) for counter, subject, units in charges]


def _reported(decisions: Sequence[Decision], count: int) -> list[Decision]:
    """Return the decisions to report: a client is not interested in a ceiling that admits it."""
    return [
        _degraded(decision)
        for position, decision in enumerate(decisions)
        if position < count or not decision.allowed
    ]


def _degraded(decision: Decision) -> Decision:
    # The time of a charge is that of the local store: a refund in the other one has none.
    return decision_with(decision, degraded=True, charged_ns=None)


def _refund(charges: Sequence[LocalCharge], decisions: Sequence[Decision]) -> None:
    """Undo charges of this machine's own counts."""
    for (counter, subject, units), decision in zip(charges, decisions, strict=True):
        if decision.charged_ns is not None:
            with suppress(StoreError):
                counter.refund(subject, units, decision.charged_ns)
