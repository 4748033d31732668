"""The units that a node may admit without asking the authority: the reference for the kernel.

A node keeps one *allowance* for each rule and subject that it decides itself: a number of units,
and until when it may spend them. The units are a lease, which the authority has charged already, or
a budget, which it has not: then the units that were spent are *pending* until they are reported.

All processes of a node spend from the same table, `memory://` or a `shared://` file. The table does
no I/O. A check that finds units is one call of `AllowanceGate.spend`. One process *claims* from the
table the units that the authority has to know of, reports them, and confirms the claims.

A process may be killed between two of these steps. Then the authority may count too much, but never
too little:

- Pending units that were claimed and not confirmed within CLAIM_NS are claimed again. So they may
  be reported twice, but they are always reported.
- Units of a lease are claimed once. The authority may have received them from a process that did
  not live to confirm the claim. If it received them twice, it would admit more than the limit.

A subject that the authority has denied is denied here until the denial ends, in every process of
the node. A denial may also come from another node, by gossip. A node with a lease spends it first:
the authority has charged these units before it denied others.

Times are the table's own, in nanoseconds, unless their name says `store`: those are of the
authority. The clocks of a node and of its authority are never compared. The difference that was
seen with the last answer only dates the decisions of the node.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, Literal, NamedTuple, Protocol

from ratekeeper.core.clock import NS_PER_SECOND, Clock
from ratekeeper.core.errors import StoreUnavailable
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import Decision, Limit
from ratekeeper.decide.algorithms.holds import LEASE_NS_MAX
from ratekeeper.decide.leasing import Lease
from ratekeeper.decide.store import FastCheck

# `leased`: the authority has charged the units. `eventual`: they are reported after they are spent.
AllowanceKind = Literal["leased", "eventual"]

CLAIM_NS: Final = 5 * NS_PER_SECOND
# The units that one allowance holds at most, with those that are pending or claimed. A longer lease
# or a larger budget is cut. Three numbers of 21 bits are one word, which a process writes at once.
ALLOWANCE_UNITS_MAX: Final = (1 << 21) - 1
ALLOWANCES_MAX_DEFAULT: Final = 100_000
# A longer subject is decided by the authority.
SUBJECT_BYTES_MAX: Final = 128
# A denial is repeated for at most this long: a grant or a reset elsewhere may end it sooner.
DENIED_NS_MAX: Final = NS_PER_SECOND
# A budget lasts at most this long, two flushes of the longest setting; a lease LEASE_NS_MAX.
BUDGET_NS_MAX: Final = 20 * NS_PER_SECOND
# An allowance without units, pending charges and denial may be dropped after this time.
IDLE_NS: Final = 10 * NS_PER_SECOND
# After this time, one may be dropped although it has units to claim: no process has a gate for
# them any more, because the rules were changed.
FORGET_NS: Final = 600 * NS_PER_SECOND
# A full table is searched for idle allowances at most this often.
_SEARCH_EVERY_NS: Final = NS_PER_SECOND // 10


class UnitClaim(NamedTuple):
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
    """Identifies the claim of pending units when it is confirmed; 0 for a lease."""


class Replaced(NamedTuple):
    """The unspent units of a lease that a newer one replaced: to be given back now."""

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
    """How often a new allowance found no room. The authority decides such a subject."""


class AllowanceGate(Protocol):
    """One rule's limits in a node's table."""

    @property
    def number(self) -> int:
        """Identifies rule, limits and kind in the table; the same in all processes."""
        ...

    def spend(self, subject: str, cost: int, /) -> Decision | None:
        """Return a decision of the node; None if the authority has to decide.

        It is a denial if one is known that covers the cost, and no lease has the units. The
        authority decides a cost above the capacity of a limit: it raises an error, or has a grant.
        """
        ...

    def unspend(self, subject: str, units: int, charged_store_ns: int, /) -> bool:
        """Put units back that were spent from the allowance that is here now.

        Return False if they were spent from another one: then the caller refunds them at the
        authority. `charged_store_ns` is the `charged_ns` of the decision.
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
        left of a lease that this one replaces, or the lease itself if the table has no room for it.
        A denial leaves a lease as it was, because its units are charged, and replaces a budget.
        Pending units stay pending, and a budget is smaller by them: the authority did not know of
        them when it answered. So confirm a claim before the answer to its report is put here.
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

    def claim(self, subject: str, /) -> UnitClaim | None:
        """Take the pending units of a subject, due or not, to report them now.

        None if there are none, or if another claim of them is being reported. Confirm it as any
        other.
        """
        ...

    def fast_check(self, fallback: Callable[..., Decision], /) -> FastCheck | None:
        """Return a compiled check, or None if the table has none.

        It calls `fallback` with the same arguments for anything that it cannot decide.
        """
        ...

    def counted(self) -> tuple[int, int]:
        """Return how many calls of `spend` were answered in this process: allowed and denied."""
        ...


class Allowances(Protocol):
    """A node's table."""

    def gate(
        self, limits: Sequence[Limit], rule: str, kind: AllowanceKind, lifetime_ns: int
    ) -> AllowanceGate:
        """Prepare a rule's limits. `lifetime_ns` is the time over which demand is measured."""
        ...

    def claim(self, count: int, flush_ns: int, *, ending: bool = False) -> list[UnitClaim]:
        """Take up to `count` claims to report.

        Unspent units of leases that have ended, and pending units whose first is older than
        `flush_ns`. With `ending`, all of both, and claims that were not confirmed: the node stops.
        Only those of gates that were prepared on this object, so that the caller can report them.
        """
        ...

    def confirm(self, claims: Sequence[UnitClaim]) -> None:
        """Forget claims that were reported."""
        ...

    def stats(self) -> AllowanceStats:
        """Return the statistics of the table."""
        ...

    def close(self) -> None:
        """Close the table. Every later call raises StoreUnavailable."""
        ...


class _Allowance:
    """One allowance."""

    __slots__ = (
        "charged_store_ns",
        "claimed",
        "claimed_at_ns",
        "claimed_spent_ns",
        "cost",
        "denied_cost",
        "denied_until_ns",
        "elsewhere",
        "ends_store_ns",
        "first_ns",
        "last_ns",
        "leased",
        "left",
        "offset_ns",
        "pending",
        "place",
        "seen",
        "seen_before",
        "seen_since_ns",
        "units",
        "until_ns",
        "whole_ns",
    )

    def __init__(self, now_ns: int, *, leased: bool) -> None:
        self.leased = leased
        # The units of a lease when it was put here, its two times of the authority, and the end.
        self.units = self.ends_store_ns = self.charged_store_ns = self.until_ns = 0
        # Units to spend; spent and not claimed; claimed and not confirmed. The last two are 0 for
        # a lease.
        self.left = self.pending = self.claimed = 0
        # When the pending units were spent, when the claimed ones were, and when they were claimed.
        self.first_ns = self.last_ns = self.claimed_spent_ns = self.claimed_at_ns = 0
        self.denied_cost = self.denied_until_ns = 0
        # The last answer of the authority: the tightest limit, its units beside the allowance, when
        # the quota is whole, and the authority's clock minus this one.
        self.place = self.elsewhere = self.whole_ns = self.offset_ns = 0
        # The demand: units asked for in this interval without the last cost, and before it.
        self.seen = self.seen_before = self.cost = 0
        self.seen_since_ns = now_ns

    def note_demand(self, cost: int, now_ns: int, lifetime_ns: int) -> None:
        """Count a check, also one that the authority decides."""
        seen = min(self.seen + self.cost, ALLOWANCE_UNITS_MAX)
        elapsed_ns = now_ns - self.seen_since_ns
        if elapsed_ns >= lifetime_ns:
            self.seen_before = seen if elapsed_ns < 2 * lifetime_ns else 0
            seen, self.seen_since_ns = 0, now_ns
        self.seen = seen
        self.cost = min(cost, ALLOWANCE_UNITS_MAX)

    def deny(self, cost: int, until_ns: int) -> None:
        """Deny a cost until a time, unless a denial is known that covers it."""
        if self.denied_cost > cost or self.denied_until_ns < until_ns:
            self.denied_cost, self.denied_until_ns = cost, until_ns
        if not self.leased:
            self.left = 0
        self.elsewhere = min(self.elsewhere, max(cost - 1, 0))

    def is_denied(self, cost: int, now_ns: int) -> bool:
        """Return True if a denial is known that covers the cost."""
        denied_ns = self.denied_until_ns - now_ns
        # A longer one is an error: of the file after a power cut, or of a clock that a test set.
        return 0 < denied_ns <= DENIED_NS_MAX and cost >= self.denied_cost

    def is_live(self, cost: int, now_ns: int) -> bool:
        """Return True if the units may be spent now."""
        lasts_ns = self.until_ns - now_ns
        # A longer time is an error, as in `is_denied`: the units may have ended long ago. But a
        # budget without units may last longer, and is asked for 0.
        if self.leased or cost:
            return 0 < lasts_ns <= (LEASE_NS_MAX if self.leased else BUDGET_NS_MAX)
        return lasts_ns > 0

    def claim_pending(
        self, number: int, subject: str, now_ns: int, *, ending: bool = False
    ) -> UnitClaim | None:
        """Claim the units of a budget; None if there are none, or if they are being reported.

        With `ending`, also those: their report may have failed.
        """
        if self.claimed:
            if now_ns < self.claimed_at_ns + CLAIM_NS and not ending:
                return None
        elif self.pending:
            self.claimed_spent_ns = self.first_ns + (self.last_ns - self.first_ns) // 2
            self.claimed, self.pending = self.pending, 0
        else:
            return None
        # Also the claim's token, so no two claims of a record have the same.
        self.claimed_at_ns = max(now_ns, self.claimed_at_ns + 1)
        age_ns = max(now_ns - self.claimed_spent_ns, 0)
        return UnitClaim(number, "eventual", subject, self.claimed, 0, age_ns, self.claimed_at_ns)

    def is_idle(self, now_ns: int) -> bool:
        """Return True if the record may be dropped."""
        # A budget without units marks a warm subject, which must not be forgotten.
        is_live = (self.left or not self.leased) and self.is_live(0, now_ns)
        if is_live or now_ns < self.denied_until_ns:
            return False
        if self.left if self.leased else self.pending or self.claimed:
            return now_ns >= max(self.seen_since_ns, self.claimed_at_ns) + FORGET_NS
        return now_ns >= self.seen_since_ns + IDLE_NS


class PythonAllowances:
    """A node's table in the memory of this process."""

    def __init__(self, clock: Clock, held_max: int = ALLOWANCES_MAX_DEFAULT) -> None:
        self.clock = clock
        self.lock = fork_safe(threading.Lock())
        self.records: dict[tuple[int, str], _Allowance] = {}
        self._held_max = held_max
        self._refused = 0
        self._search_at_ns = 0
        self._closed = False

    def gate(
        self, limits: Sequence[Limit], rule: str, kind: AllowanceKind, lifetime_ns: int
    ) -> PythonAllowanceGate:
        """Prepare a rule's limits."""
        return PythonAllowanceGate(self, tuple(limits), rule, kind, lifetime_ns)

    def require_open(self) -> None:
        """Raise StoreUnavailable if the table was closed. Call with the lock held."""
        if self._closed:
            raise StoreUnavailable("the store is closed; open another one")

    def find(self, number: int, subject: str) -> _Allowance | None:
        """Return the record of a subject, or None. Call with the lock held."""
        self.require_open()
        return self.records.get((number, subject))

    def find_or_add(
        self, number: int, subject: str, now_ns: int, *, leased: bool
    ) -> _Allowance | None:
        """Return the record of a subject, a new one if necessary; None if there is no room."""
        found = self.find(number, subject)
        if found is not None:
            return found
        if not self._has_room(now_ns) or len(subject.encode()) > SUBJECT_BYTES_MAX:
            self._refused += 1
            return None
        found = self.records[number, subject] = _Allowance(now_ns, leased=leased)
        return found

    def _has_room(self, now_ns: int) -> bool:
        if len(self.records) >= self._held_max and now_ns >= self._search_at_ns:
            for key in [key for key, record in self.records.items() if record.is_idle(now_ns)]:
                del self.records[key]
            # Clients that send ever new subjects must not make every check search the table.
            self._search_at_ns = now_ns + _SEARCH_EVERY_NS
        return len(self.records) < self._held_max

    def claim(self, count: int, flush_ns: int, *, ending: bool = False) -> list[UnitClaim]:
        """Take what is to be reported."""
        now_ns = self.clock.now_ns()
        claims: list[UnitClaim] = []
        with self.lock:
            self.require_open()
            for (number, subject), record in self.records.items():
                if len(claims) >= count:
                    break
                if record.leased:
                    if record.left and (ending or now_ns >= record.until_ns):
                        ends_ns = record.ends_store_ns
                        claims.append(
                            UnitClaim(number, "leased", subject, record.left, ends_ns, 0, 0)
                        )
                        record.left = 0
                elif ending or record.claimed or now_ns >= record.first_ns + flush_ns:
                    claim = record.claim_pending(number, subject, now_ns, ending=ending)
                    if claim is not None:
                        claims.append(claim)
        return claims

    def confirm(self, claims: Sequence[UnitClaim]) -> None:
        """Forget claims that were reported."""
        with self.lock:
            self.require_open()
            for claim in claims:
                record = self.records.get((claim.gate, claim.subject))
                # A claim that was claimed again has another token: the second report counts.
                if record is not None and record.claimed_at_ns == claim.token:
                    record.claimed = 0

    def stats(self) -> AllowanceStats:
        """Return the statistics of the table."""
        with self.lock:
            self.require_open()
            records = self.records.values()
            leased = sum(record.left for record in records if record.leased)
            pending = sum(record.pending + record.claimed for record in records)
            return AllowanceStats(len(self.records), self._held_max, leased, pending, self._refused)

    def close(self) -> None:
        """Forget everything. Every later call raises StoreUnavailable."""
        with self.lock:
            self._closed = True
            self.records.clear()


def gate_number(limits: Sequence[Limit], rule: str, kind: AllowanceKind) -> int:
    """Return the number of a rule's limits: 64 bits, the same in all processes and versions."""
    text = "\x1f".join([kind, rule, *(f"{each.name}\x1e{each}" for each in limits)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


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
        self._leased = kind == "leased"
        self._lifetime_ns = lifetime_ns
        self._capacity = min(limit.capacity for limit in limits)
        self._allowed = self._denied = 0
        self.number = gate_number(limits, rule, kind)

    def spend(self, subject: str, cost: int) -> Decision | None:
        """Return a decision of the node; None if the authority has to decide."""
        table = self._table
        now_ns = table.clock.now_ns()
        with table.lock:
            record = table.find(self.number, subject)
            if record is None or cost > self._capacity:
                return None
            record.note_demand(cost, now_ns, self._lifetime_ns)
            is_denied = record.is_denied(cost, now_ns)
            has_units = cost <= record.left and record.is_live(cost, now_ns)
            if has_units and (record.leased or not is_denied):
                record.left -= cost
                if not record.leased and cost:
                    if not record.pending:
                        record.first_ns = now_ns
                    record.pending += cost
                    record.last_ns = now_ns
                self._allowed += 1
                return self._decision(record, now_ns, 0, charged=bool(cost))
            if is_denied:
                self._denied += 1
                return self._decision(record, now_ns, record.denied_until_ns - now_ns)
            return None

    def _decision(
        self, record: _Allowance, now_ns: int, retry_after_ns: int, *, charged: bool = False
    ) -> Decision:
        decided_ns = now_ns + record.offset_ns
        charged_ns = record.charged_store_ns if record.leased else decided_ns
        return Decision(
            allowed=not retry_after_ns,
            policy=self._limits[record.place],
            remaining=record.elsewhere + record.left,
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
            record = table.find(self.number, subject)
            if record is None:
                return False
            if record.leased:
                is_here = charged_store_ns == record.charged_store_ns
                is_here = is_here and record.is_live(units, now_ns)
                if not is_here or record.left + units > record.units:
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
            record = table.find(self.number, subject)
            return 0 if record is None else max(record.seen, record.seen_before)

    def held(self, subject: str) -> int:
        """Return the units that remain on this node and not at the authority."""
        table = self._table
        now_ns = table.clock.now_ns()
        with table.lock:
            record = table.find(self.number, subject)
            if record is None:
                return 0
            if not record.leased:
                return -record.pending - record.claimed
            return record.left if record.is_live(1, now_ns) else 0

    def put(self, subject: str, lease: Lease, decision: Decision, cost: int) -> Replaced | None:
        """Keep the answer of the authority to a check of `cost`."""
        table = self._table
        now_ns = table.clock.now_ns()
        with table.lock:
            record = table.find_or_add(self.number, subject, now_ns, leased=self._leased)
            if record is None:
                has_lease = self._leased and lease.units
                return Replaced(lease.units, lease.ends_ns) if has_lease else None
            if not (record.seen or record.seen_before or record.cost):
                record.cost = min(cost, ALLOWANCE_UNITS_MAX)
            record.place = place_of(self._limits, decision)
            record.whole_ns = now_ns + decision.reset_after_ns
            record.offset_ns = decision.decided_ns - now_ns
            record.elsewhere = decision.remaining
            replaced = None
            if decision.allowed or not record.leased:
                replaced = self._put_units(record, lease, lease_time_ns(decision), now_ns)
            if decision.allowed and cost >= record.denied_cost:
                record.denied_until_ns = 0
            denied_ns = lease.denied_ns if decision.allowed else decision.retry_after_ns
            if denied_ns > 0:
                record.deny(cost, now_ns + min(denied_ns, DENIED_NS_MAX))
            return replaced

    def _put_units(
        self, record: _Allowance, lease: Lease, charged_ns: int, now_ns: int
    ) -> Replaced | None:
        """Replace the units of the record by those of the answer."""
        units = min(lease.units, ALLOWANCE_UNITS_MAX)
        if not record.leased:
            unreported = record.pending + record.claimed
            record.left = max(units - unreported, 0)
            record.elsewhere = max(record.elsewhere - record.left - unreported, 0)
            longest_ns = BUDGET_NS_MAX if units else lease.lasts_ns
            record.until_ns = now_ns + min(lease.lasts_ns, longest_ns)
            return None
        if not units:
            return None
        replaced = Replaced(record.left, record.ends_store_ns) if record.left else None
        record.units = record.left = units
        record.elsewhere = max(record.elsewhere - units, 0)
        record.until_ns = now_ns + min(lease.lasts_ns, LEASE_NS_MAX)
        record.ends_store_ns, record.charged_store_ns = lease.ends_ns, charged_ns
        return replaced

    def deny(self, subject: str, cost: int, lasts_ns: int) -> None:
        """Deny checks of at least this cost for a time."""
        table = self._table
        now_ns = table.clock.now_ns()
        with table.lock:
            record = table.find_or_add(self.number, subject, now_ns, leased=self._leased)
            if record is not None and lasts_ns > 0:
                record.deny(cost, now_ns + min(lasts_ns, DENIED_NS_MAX))

    def stop(self, subject: str) -> Replaced | None:
        """End the allowance of a subject."""
        table = self._table
        with table.lock:
            record = table.find(self.number, subject)
            if record is None:
                return None
            left, record.left, record.denied_until_ns = record.left, 0, 0
            record.until_ns = 0  # units that are put back later go to the authority
            return Replaced(left, record.ends_store_ns) if record.leased and left else None

    def claim(self, subject: str) -> UnitClaim | None:
        """Take the pending units of a subject."""
        table = self._table
        now_ns = table.clock.now_ns()
        with table.lock:
            record = table.find(self.number, subject)
            if record is None or record.leased:
                return None
            return record.claim_pending(self.number, subject, now_ns)

    def fast_check(self, fallback: Callable[..., Decision]) -> None:
        """Return None: there is no compiled check."""

    def counted(self) -> tuple[int, int]:
        """Return how many calls of `spend` were answered: allowed and denied."""
        return self._allowed, self._denied


def place_of(limits: Sequence[Limit], decision: Decision) -> int:
    """Return the position of the limit that a decision is about; 0 if it is none of them."""
    return next((at for at, limit in enumerate(limits) if limit == decision.policy), 0)


def lease_time_ns(decision: Decision) -> int:
    """Return the `charged_ns` of units that are spent from the lease that came with a decision.

    It is not that of the check itself: the refund of the check adds no units to the lease, because
    time may have returned them.
    """
    return (decision.charged_ns or decision.decided_ns) - 1
