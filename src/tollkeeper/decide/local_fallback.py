"""What limits while the store is away: counts of this machine alone, at a share of the limits.

A rule with `on_failure: local` goes on being limited, by counts that are kept here. The limits are
those of the whole fleet, so each of `nodes` machines has its part of them, and all of them together
no more than the rule allows. The workers of one machine count together if `store` is a file that
they share; in `memory://`, each process has the machine's whole share.

Two more limits can be set for bad days. The `ceiling` is for all that a machine lets pass while the
store is away, whichever rule it is under. The `emergency` limits are for each address, once the
store has been away for long: whoever waits for an outage to use it meets them.

An outage is over when no check has failed for OUTAGE_GAP_NS.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, NamedTuple

from tollkeeper.core.clock import NS_PER_SECOND, Clock, duration_ns
from tollkeeper.core.errors import CapacityError, ConfigError, StoreError, show
from tollkeeper.core.model import Decision, Limit, Limits, decision_with
from tollkeeper.core.rates import LimitsArgument, limits_of, scaled
from tollkeeper.core.subjects import Key, subject_of
from tollkeeper.decide.failure import decision_on_failure
from tollkeeper.decide.store import Gate, Store
from tollkeeper.decide.stores import open_store

NODES_MAX: Final = 100_000
OUTAGE_GAP_NS: Final = 5 * NS_PER_SECOND
TELL_NS: Final = 60 * NS_PER_SECOND
# Shares that are kept prepared: more than a document's limits come to, whatever the load is.
_GATES_MAX: Final = 4_096
_AFTER_NS_MAX: Final = 86_400 * NS_PER_SECOND

# What these limits are called in decisions, and what all are counted as.
CEILING: Final = "ceiling"
EMERGENCY: Final = "emergency"
_EVERYONE: Final = "*"
_MEMORY: Final = "memory://"


_log = logging.getLogger("tollkeeper.decide.local_fallback")


@dataclass(frozen=True, slots=True)
class LocalFallback:
    """How to limit while the store is away.

    >>> LocalFallback(nodes=20, ceiling="5000/second", emergency="60/minute").nodes
    20

    `nodes`            how many machines share the limits: each has 1/nodes of them.
    `store`            where this machine counts: `memory://` for each process by itself, or
                       `shared:///run/api.local_fallback` for all of its processes together.
    `ceiling`          the most that this machine lets pass, over all rules; by default no bound.
    `emergency`        limits for each address once an outage is old; by default none.
    `emergency_after`  how many seconds old.
    """

    nodes: int = 1
    store: str = _MEMORY
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
    """What a caller handed in; by default, one node whose processes count by themselves."""
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


class LocalLimits:
    """The counts of this machine, opened when they are first needed."""

    def __init__(self, local_fallback: LocalFallback, clock: Clock) -> None:
        self._standby = local_fallback
        self._clock = clock
        self._store: Store | None = None
        self._gates: dict[tuple[Limits, str], Gate] = {}
        self._lock = threading.Lock()
        if local_fallback.store != _MEMORY:
            self._opened()  # now, so that a file which cannot be used is known before it is needed
        self._since_ns = self._failed_ns = -OUTAGE_GAP_NS - 1
        self._tell_ns = 0

    def note_failure(self, error: Exception) -> None:
        """A check has failed; so the store is away, or still is. Told in the log, once a minute."""
        now_ns = self._clock.now_ns()
        if now_ns - self._failed_ns > OUTAGE_GAP_NS:
            self._since_ns = now_ns
            self._tell_ns = now_ns
        self._failed_ns = now_ns
        if now_ns >= self._tell_ns:
            self._tell_ns = now_ns + TELL_NS
            away_s = (now_ns - self._since_ns) // NS_PER_SECOND
            _log.warning(
                "the store cannot decide, for %d s now, and on_failure answers: %s", away_s, error
            )

    def away_ns(self) -> int:
        """For how long the store has been away; 0 when it is not."""
        now_ns = self._clock.now_ns()
        return 0 if now_ns - self._failed_ns > OUTAGE_GAP_NS else max(now_ns - self._since_ns, 0)

    def decide(
        self, asked: Sequence[LocalCheck], address: str | None, *, spend: bool
    ) -> list[Decision]:
        """What this machine answers: the rules' parts, and the limits for bad days that deny.

        All pass or none is charged, as ever. Empty where nothing has a say. All are degraded.
        """
        if not (asked or self._standby.ceiling_limits or self._standby.emergency_limits):
            return []
        store = self._opened()
        gates: list[tuple[Any, str, int]] = [
            (self._gate(store, each.limits, each.rule), each.subject, each.units) for each in asked
        ]
        bad_days = self._bad_days(store, address)
        try:
            found = _decided(store, [*gates, *bad_days], spend=spend)
        except (StoreError, CapacityError) as error:
            # No room for another count, or a share too small for this cost: not now.
            limits = asked[0].limits if asked else bad_days[0][0].limits
            return [_not_now(error, limits[0], asked[0].rule if asked else CEILING)]
        # A ceiling that lets pass has nothing to tell a client.
        kept = [each for place, each in enumerate(found) if place < len(gates) or not each.allowed]
        return [decision_with(each, degraded=True) for each in kept]

    def _bad_days(self, store: Store, address: str | None) -> list[tuple[Any, str, int]]:
        """These count requests, whatever each of them costs."""
        local_fallback = self._standby
        gates: list[tuple[Any, str, int]] = []
        if local_fallback.ceiling_limits:
            gates.append((store.gate(local_fallback.ceiling_limits, CEILING), _EVERYONE, 1))
        old = self.away_ns() >= local_fallback.emergency_after_ns
        if local_fallback.emergency_limits and old:
            key: Key = ("ip", address) if address else "ip"
            gates.append(
                (store.gate(local_fallback.emergency_limits, EMERGENCY), subject_of(key), 1)
            )
        return gates

    def _gate(self, store: Store, limits: Limits, rule: str) -> Gate:
        """This machine's share of the limits, on its counts."""
        gate = self._gates.get((limits, rule))
        if gate is None:
            nodes = self._standby.nodes
            share = limits if nodes == 1 else scaled(limits, Fraction(1, nodes))
            if len(self._gates) >= _GATES_MAX:
                self._gates.clear()
            gate = self._gates[limits, rule] = store.gate(share, rule)
        return gate

    def _opened(self) -> Store:
        store = self._store
        if store is not None:
            return store
        with self._lock:
            if self._store is None:
                self._store = open_store(self._standby.store, self._clock)
            return self._store

    def close(self) -> None:
        """Close the counts, if they were needed."""
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None
                self._gates.clear()


def _decided(store: Store, asked: Sequence[tuple[Any, str, int]], *, spend: bool) -> list[Decision]:
    if not asked:
        return []
    if spend:
        return store.check_together(asked)
    return [gate.peek(subject, units) for gate, subject, units in asked]


def _not_now(error: Exception, limit: Limit, rule: str) -> Decision:
    known = error if isinstance(error, StoreError) else StoreError(str(error))
    return decision_on_failure(known, "closed", limit, rule)
