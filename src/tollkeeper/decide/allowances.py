"""What a node may admit without asking the authority: the reference for the kernel.

A node keeps one *allowance* for each rule and subject that it decides itself: a number of units,
and until when it may spend them. The units are a lease, which the authority has charged already, or
a budget, which it has not: then the units that were spent are *pending* until they are reported.

All processes of a node spend from the same table, `memory://` or a `shared://` file. The table does
no I/O. A check that finds units is one call of `AllowanceGate.spend`. Whatever the authority has to
be told is *claimed* from the table by one process, reported, and then confirmed. A claim that was
not confirmed within CLAIM_NS, because its process was killed, can be claimed again. So units may be
reported twice, but they are always reported.

A subject that the authority has denied is denied here until the denial ends, in every process of
the node. A denial may also come from another node, by gossip.

Times are the table's own, in nanoseconds, unless their name says `store`: those are of the
authority. The clocks of a node and of its authority are never compared. The difference that was
seen with the last answer only dates the decisions of the node.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, Literal, NamedTuple, Protocol

from tollkeeper.core.clock import NS_PER_SECOND, Clock
from tollkeeper.core.model import Decision, Limit
from tollkeeper.decide.leasing import Lease
from tollkeeper.decide.store import FastCheck

# `leased`: the authority has charged the units. `eventual`: they are reported after they are spent.
AllowanceKind = Literal["leased", "eventual"]

CLAIM_NS: Final = 5 * NS_PER_SECOND
# A longer subject is decided by the authority.
SUBJECT_BYTES_MAX: Final = 128
# A denial is repeated for at most this long: a grant or a reset elsewhere may end it sooner.
DENIED_NS_MAX: Final = NS_PER_SECOND
# An allowance without units, pending charges and denial is dropped after this time.
IDLE_NS: Final = 10 * NS_PER_SECOND


class Claim(NamedTuple):
    """Units that one process reports to the authority."""

    gate: int
    """The number of the rule's limits: `AllowanceGate.number`."""
    kind: AllowanceKind
    subject: str
    units: int
    """Units of a lease that were not spent, or units of a budget that were."""
    ends_store_ns: int
    """Of a lease, as in `Lease.ends_ns`; 0 for a budget."""
    age_ns: int
    """How long ago the units of a budget were spent: the middle of the first and the last."""
    token: int
    """Identifies the claim when it is confirmed."""


class Replaced(NamedTuple):
    """What was left of a lease that a newer one replaced: to be given back now."""

    units: int
    ends_store_ns: int


class AllowanceStats(NamedTuple):
    """The statistics of a node's table. All processes see the same."""

    held: int
    """Allowances in the table, also those that have ended and wait to be reused."""
    held_max: int
    leased_units: int
    """Units of leases that are not spent."""
    pending_units: int
    """Units of budgets that are spent and not reported, including those that are being reported."""
    refused: int
    """Times a new allowance found no room. The authority decides such a subject."""


class AllowanceGate(Protocol):
    """One rule's limits in a node's table."""

    @property
    def number(self) -> int:
        """Identifies rule, limits and kind in the table; the same in all processes."""
        ...

    def spend(self, subject: str, cost: int, /) -> Decision | None:
        """Return a decision of the node; None if the authority has to decide.

        It is a denial if one is known that covers the cost, and no lease does.
        """
        ...

    def unspend(self, subject: str, units: int, charged_store_ns: int, /) -> bool:
        """Put units back that were spent from the allowance that is here now.

        False if it was another one: then the authority has to be told. `charged_store_ns` is that
        of the decision.
        """
        ...

    def demand(self, subject: str, /) -> int:
        """Return the units to ask for: the demand of this node in one lifetime, as seen lately."""
        ...

    def held(self, subject: str, /) -> int:
        """Return the units that remain on this node and not at the authority.

        Those of a lease that are left; or, negative, the pending units, which the authority still
        counts as remaining.
        """
        ...

    def put(self, subject: str, lease: Lease, decision: Decision, cost: int, /) -> Replaced | None:
        """Keep the answer of the authority to a check of `cost`: an allowance, or a denial.

        `lease` has the units to spend and their time; for a budget, `ends_ns` is 0. Return what is
        left of a lease that this one replaces. Pending units stay pending, and a budget has so many
        units less: it is counted from the authority's last answer.
        """
        ...

    def deny(self, subject: str, cost: int, lasts_ns: int, /) -> None:
        """Deny checks of at least this cost for a time, as another node has learned."""
        ...

    def stop(self, subject: str, /) -> Replaced | None:
        """End the allowance of a subject: its limit is nearly reached, or its quota was changed.

        Also end a denial. Return what is left of a lease, which the caller gives back. Pending
        units stay pending.
        """
        ...

    def fast_check(self, fallback: Callable[..., Decision], /) -> FastCheck | None:
        """Return a compiled check, or None if the table has none.

        It calls `fallback` with the same arguments for anything that it cannot decide.
        """
        ...

    def counted(self) -> tuple[int, int]:
        """Return how many checks this process has answered here: allowed and denied."""
        ...


class Allowances(Protocol):
    """A node's table."""

    def gate(
        self, limits: Sequence[Limit], rule: str, kind: AllowanceKind, lifetime_ns: int
    ) -> AllowanceGate:
        """Prepare a rule's limits. `lifetime_ns` is the time over which demand is measured."""
        ...

    def claim(self, count: int, flush_ns: int, *, ending: bool = False) -> list[Claim]:
        """Take what is to be reported: up to `count` claims.

        Unspent units of leases that have ended, and pending units whose first is older than
        `flush_ns`. With `ending`, all of both: the node stops.
        """
        ...

    def confirm(self, claims: Sequence[Claim]) -> None:
        """Forget claims that were reported."""
        ...

    def stats(self) -> AllowanceStats:
        """Return the statistics of the table."""
        ...

    def close(self) -> None:
        """Close the table. Every later call raises StoreUnavailable."""
        ...


class _Record:
    """One allowance."""

    __slots__ = (
        "charged_store_ns",
        "claimed_at_ns",
        "claimed_ends_store_ns",
        "claimed_units",
        "cost",
        "denied_cost",
        "denied_until_ns",
        "elsewhere",
        "ends_store_ns",
        "first_ns",
        "last_ns",
        "left",
        "offset_ns",
        "pending",
        "place",
        "seen",
        "seen_before",
        "seen_since_ns",
        "until_ns",
        "used_ns",
        "whole_ns",
    )

    def __init__(self, now_ns: int) -> None:
        self.left = 0
        self.until_ns = 0
        self.ends_store_ns = 0
        self.charged_store_ns = 0
        self.pending = 0
        self.first_ns = self.last_ns = 0  # of the pending units
        self.claimed_units = 0
        self.claimed_ends_store_ns = 0
        self.claimed_at_ns = 0
        self.denied_cost = 0
        self.denied_until_ns = 0
        # The last answer of the authority: the tightest limit, its units beside the allowance, when
        # the quota is whole, and the authority's clock minus this one.
        self.place = 0
        self.elsewhere = 0
        self.whole_ns = 0
        self.offset_ns = 0
        # The demand: units asked for in this interval without the last cost, and before it.
        self.seen = self.seen_before = self.cost = 0
        self.seen_since_ns = now_ns
        self.used_ns = now_ns

    def note_demand(self, cost: int, now_ns: int, lifetime_ns: int) -> None:
        """Count a check, whoever decides it."""
        elapsed_ns = now_ns - self.seen_since_ns
        if elapsed_ns >= lifetime_ns:
            self.seen_before = self.seen + self.cost if elapsed_ns < 2 * lifetime_ns else 0
            self.seen, self.cost, self.seen_since_ns = 0, 0, now_ns
        self.seen += self.cost
        self.cost = cost
        self.used_ns = now_ns

    def is_idle(self, now_ns: int) -> bool:
        """Return True if nothing is lost when the record is dropped."""
        return (
            not self.left
            and not self.pending
            and not self.claimed_units
            and now_ns >= self.denied_until_ns
            and now_ns >= self.used_ns + IDLE_NS
        )


class PythonAllowances:
    """A node's table in the memory of this process."""

    def __init__(self, clock: Clock, held_max: int = 100_000) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self.records: dict[tuple[int, str], _Record] = {}
        self._kinds: dict[int, AllowanceKind] = {}
        self._held_max = held_max
        self._refused = 0
        self._tokens = 0

    def gate(
        self, limits: Sequence[Limit], rule: str, kind: AllowanceKind, lifetime_ns: int
    ) -> PythonAllowanceGate:
        """Prepare a rule's limits."""
        gate = PythonAllowanceGate(self, tuple(limits), rule, kind, lifetime_ns)
        self._kinds[gate.number] = kind
        return gate

    def record_for(self, number: int, subject: str, now_ns: int) -> _Record | None:
        """Return the record of a subject, a new one if necessary; None if there is no room."""
        found = self.records.get((number, subject))
        if found is not None:
            return found
        if len(self.records) >= self._held_max:
            idle = [key for key, record in self.records.items() if record.is_idle(now_ns)]
            for key in idle:
                del self.records[key]
        if len(self.records) >= self._held_max or len(subject.encode()) > SUBJECT_BYTES_MAX:
            self._refused += 1
            return None
        found = self.records[number, subject] = _Record(now_ns)
        return found

    def claim(self, count: int, flush_ns: int, *, ending: bool = False) -> list[Claim]:
        """Take what is to be reported."""
        now_ns = self.clock.now_ns()
        claims: list[Claim] = []
        with self.lock:
            for (number, subject), record in self.records.items():
                if len(claims) >= count:
                    break
                if record.claimed_units and now_ns < record.claimed_at_ns + CLAIM_NS:
                    continue
                kind = self._kinds[number]
                if kind == "leased":
                    claim = self._claimed_lease(number, subject, record, now_ns, ending=ending)
                else:
                    due_ns = 0 if ending else flush_ns
                    claim = self._claimed_pending(number, subject, record, now_ns, due_ns)
                if claim is not None:
                    claims.append(claim)
        return claims

    def _claimed_lease(
        self, number: int, subject: str, record: _Record, now_ns: int, *, ending: bool
    ) -> Claim | None:
        if not record.claimed_units:
            if not record.left or (now_ns < record.until_ns and not ending):
                return None
            record.claimed_units, record.claimed_ends_store_ns = record.left, record.ends_store_ns
            record.left = 0
        ends_store_ns = record.claimed_ends_store_ns
        token = self._token(record, now_ns)
        return Claim(number, "leased", subject, record.claimed_units, ends_store_ns, 0, token)

    def _claimed_pending(
        self, number: int, subject: str, record: _Record, now_ns: int, flush_ns: int
    ) -> Claim | None:
        pending = record.pending + record.claimed_units  # the latter were not confirmed in time
        if not pending or (now_ns < record.first_ns + flush_ns and not record.claimed_units):
            return None
        age_ns = max(now_ns - (record.first_ns + record.last_ns) // 2, 0)
        record.claimed_units, record.pending = pending, 0
        token = self._token(record, now_ns)
        return Claim(number, "eventual", subject, pending, 0, age_ns, token)

    def _token(self, record: _Record, now_ns: int) -> int:
        self._tokens += 1
        record.claimed_at_ns = now_ns
        return self._tokens

    def confirm(self, claims: Sequence[Claim]) -> None:
        """Forget claims that were reported."""
        with self.lock:
            for claim in claims:
                record = self.records.get((claim.gate, claim.subject))
                if record is not None:
                    record.claimed_units = 0
                    # What is pending now was spent after the claim.
                    record.first_ns = max(record.first_ns, record.claimed_at_ns)

    def stats(self) -> AllowanceStats:
        """Return the statistics of the table."""
        now_ns = self.clock.now_ns()
        with self.lock:
            leased = pending = 0
            for (number, _), record in self.records.items():
                if self._kinds[number] == "leased":
                    leased += record.left if now_ns < record.until_ns else 0
                else:
                    pending += record.pending + record.claimed_units
            return AllowanceStats(len(self.records), self._held_max, leased, pending, self._refused)

    def close(self) -> None:
        """Forget everything."""
        with self.lock:
            self.records.clear()


class PythonAllowanceGate:
    """One rule's limits in a PythonAllowances."""

    def __init__(
        self,
        table: PythonAllowances,
        limits: tuple[Limit, ...],
        rule: str,
        kind: AllowanceKind,
        lifetime_ns: int,
    ) -> None:
        self._table = table
        self._limits = limits
        self._rule = rule
        self._kind = kind
        self._lifetime_ns = lifetime_ns
        self._allowed = self._denied = 0
        text = "\x1f".join([kind, rule, *(f"{each.name}\x1e{each}" for each in limits)])
        self.number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest())

    def spend(self, subject: str, cost: int) -> Decision | None:
        """Return a decision of the node; None if the authority has to decide."""
        table = self._table
        now_ns = table.clock.now_ns()
        with table.lock:
            record = table.records.get((self.number, subject))
            if record is None:
                return None
            record.note_demand(cost, now_ns, self._lifetime_ns)
            has_units = now_ns < record.until_ns and cost <= record.left
            is_denied = now_ns < record.denied_until_ns and cost >= record.denied_cost
            # The authority has charged the units of a lease: a denial does not take them away.
            if is_denied and not (has_units and self._kind == "leased"):
                self._denied += 1
                return self._decision(record, now_ns, record.denied_until_ns - now_ns)
            if not has_units:
                return None
            record.left -= cost
            if self._kind == "eventual" and cost:
                if not record.pending and not record.claimed_units:
                    record.first_ns = now_ns
                record.pending += cost
                record.last_ns = now_ns
            self._allowed += 1
            return self._decision(record, now_ns, 0, charged=bool(cost))

    def _decision(
        self, record: _Record, now_ns: int, retry_after_ns: int, *, charged: bool = False
    ) -> Decision:
        decided_ns = now_ns + record.offset_ns
        charged_ns = record.charged_store_ns if self._kind == "leased" else decided_ns
        return Decision(
            allowed=not retry_after_ns,
            policy=self._limits[record.place],
            remaining=0 if retry_after_ns else record.elsewhere + record.left,
            retry_after_ns=retry_after_ns,
            reset_after_ns=max(record.whole_ns - now_ns, retry_after_ns),
            rule=self._rule,
            charged_ns=charged_ns if charged else None,
            decided_ns=decided_ns,
        )

    def unspend(self, subject: str, units: int, charged_store_ns: int) -> bool:
        """Put units back that were spent from the allowance that is here now."""
        table = self._table
        now_ns = table.clock.now_ns()
        with table.lock:
            record = table.records.get((self.number, subject))
            if record is None:
                return False
            if self._kind == "leased":
                # A lease that is not here any more was given back, without these units.
                if charged_store_ns != record.charged_store_ns or now_ns >= record.until_ns:
                    return False
            else:
                if units > record.pending or charged_store_ns < record.first_ns + record.offset_ns:
                    return False
                record.pending -= units
            record.left += units
            return True

    def demand(self, subject: str) -> int:
        """Return the units to ask for."""
        table = self._table
        with table.lock:
            record = table.records.get((self.number, subject))
            return 0 if record is None else max(record.seen, record.seen_before)

    def held(self, subject: str) -> int:
        """Return the units that remain on this node and not at the authority."""
        table = self._table
        now_ns = table.clock.now_ns()
        with table.lock:
            record = table.records.get((self.number, subject))
            if record is None:
                return 0
            if self._kind == "eventual":
                return -record.pending - record.claimed_units
            return record.left if now_ns < record.until_ns else 0

    def put(self, subject: str, lease: Lease, decision: Decision, cost: int) -> Replaced | None:
        """Keep the answer of the authority to a check of `cost`."""
        table = self._table
        now_ns = table.clock.now_ns()
        with table.lock:
            is_new = (self.number, subject) not in table.records
            record = table.record_for(self.number, subject, now_ns)
            if record is None:
                return _left_of(self._kind, lease.units, lease.ends_ns)
            if is_new:
                record.cost = cost
            record.place = next(
                (at for at, limit in enumerate(self._limits) if limit == decision.policy), 0
            )
            record.whole_ns = now_ns + decision.reset_after_ns
            record.offset_ns = decision.decided_ns - now_ns
            denied_ns = lease.denied_ns if decision.allowed else decision.retry_after_ns
            if denied_ns:
                record.denied_until_ns = now_ns + min(denied_ns, DENIED_NS_MAX)
                record.denied_cost = cost
            elif cost >= record.denied_cost:
                record.denied_until_ns = 0
            replaced = None
            if not decision.allowed and self._kind == "leased":
                return None
            beside = lease.units
            if self._kind == "eventual":
                # The authority does not know of the pending units yet: they are spent already.
                pending = record.pending + record.claimed_units
                record.left = max(lease.units - pending, 0)
                record.until_ns = now_ns + lease.lasts_ns
                beside = record.left + pending
            elif lease.units:
                replaced = _left_of(self._kind, record.left, record.ends_store_ns)
                record.left, record.until_ns = lease.units, now_ns + lease.lasts_ns
                record.ends_store_ns = lease.ends_ns
                # Not that of the check itself: its refund adds no units to the lease, because time
                # may have returned them.
                record.charged_store_ns = (decision.charged_ns or decision.decided_ns) - 1
            record.elsewhere = max(decision.remaining - beside, 0)
            return replaced

    def deny(self, subject: str, cost: int, lasts_ns: int) -> None:
        """Deny checks of at least this cost for a time."""
        table = self._table
        now_ns = table.clock.now_ns()
        with table.lock:
            record = table.record_for(self.number, subject, now_ns)
            if record is not None:
                record.denied_until_ns = now_ns + min(lasts_ns, DENIED_NS_MAX)
                record.denied_cost = cost

    def stop(self, subject: str) -> Replaced | None:
        """End the allowance of a subject."""
        table = self._table
        with table.lock:
            record = table.records.get((self.number, subject))
            if record is None:
                return None
            left, record.left, record.denied_until_ns = record.left, 0, 0
            return _left_of(self._kind, left, record.ends_store_ns)

    def fast_check(self, fallback: Callable[..., Decision]) -> None:
        """Return None: there is no compiled check."""

    def counted(self) -> tuple[int, int]:
        """Return how many checks were answered here: allowed and denied."""
        return self._allowed, self._denied


def _left_of(kind: AllowanceKind, units: int, ends_store_ns: int) -> Replaced | None:
    return Replaced(units, ends_store_ns) if kind == "leased" and units else None
