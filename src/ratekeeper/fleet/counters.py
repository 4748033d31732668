"""Counters that answer most checks in the node.

A check first looks into the node's table (`AllowanceGate.spend`), without a generator: this path is
as fast as a check in memory. If the table has no answer, the authority decides:

- `leased`: the same call asks for a lease. Only one check of a subject asks for a lease at a time;
  the others are ordinary checks.
- `eventual`: the node first reports its pending charges of this subject, so that the authority
  counts them. Then the authority decides. Its answer says how much of the limit is used, and the
  node may admit a part of the rest before it reports again. An unknown subject gets a first budget
  without a call (`Node.presume_cool`).

A failure can only lose units: a lease that arrives too late is given back, and a lease whose
caller was cancelled is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import suppress

from ratekeeper.core.errors import StoreError
from ratekeeper.core.model import Decision, Limits, decision_with
from ratekeeper.core.steps import Ask, Call, Steps, Undo, asking
from ratekeeper.decide.allowances import (
    ALLOWANCE_UNITS_MAX,
    AllowanceKind,
    Replaced,
    UnitClaim,
)
from ratekeeper.decide.leasing import (
    NO_LEASE,
    Authority,
    GiveBack,
    LateCharge,
    Lease,
    LeaseCheck,
    LeasedAnswer,
    LeaseTerms,
    lifetime_ns,
)
from ratekeeper.decide.store import Answer, Counter, FastCheck
from ratekeeper.fleet.node import Node


class NodeCounter:
    """One rule's limits, decided by the node where it can, and else by the authority."""

    __slots__ = (
        "_capacity",
        "_lifetime_ns",
        "_spend",
        "allowance",
        "counter",
        "kind",
        "known",
        "limits",
        "node",
    )

    def __init__(
        self, node: Node, limits: Limits, rule: str, kind: AllowanceKind, counter: Counter
    ) -> None:
        """`counter` has the same limits at the authority."""
        self.limits = limits
        self.node = node
        self.counter = counter
        self.kind = kind
        self._lifetime_ns = lifetime_ns(limits, node.fleet.lease_ns)
        self.known = node.known(limits, rule, kind, self._lifetime_ns, counter)
        self.allowance = self.known.allowance
        self._spend = self.allowance.spend
        self._capacity = min(limit.capacity for limit in limits)

    def spent(self, subject: str, cost: int) -> Decision | None:
        """Return the decision of the node; None if the authority has to decide."""
        if cost > self._capacity:
            return None  # the authority raises CapacityError
        try:
            decision = self._spend(subject, cost)
            if decision is not None or self.kind == "leased":
                return decision
            is_cool = self.node.presume_cool(self.known, subject, cost)
        except StoreError:
            return None  # the table is lost
        return self._spend(subject, cost) if is_cool else None

    def check(self, subject: str, cost: int) -> Decision | Ask:
        """Spend `cost` units of the node's allowance, or ask the authority."""
        if self.kind == "eventual" or cost > self._capacity:
            decision = self.spent(subject, cost)
        else:  # the same, without a call
            try:
                decision = self._spend(subject, cost)
            except StoreError:
                decision = None
        return asking(self.asking, subject, cost) if decision is None else decision

    def fast_check(self, fallback: Callable[..., Decision]) -> FastCheck | None:
        """Return the table's compiled check, or None."""
        found = self.allowance.fast_check(fallback)
        if found is not None:
            self.known.fast_checks.append(found)
        return found

    def peek(self, subject: str, cost: int) -> Ask:
        """Return the authority's answer with the units that remain on this node."""
        return asking(self.peeking, subject, cost)

    def refund(self, subject: str, units: int, charged_ns: int | None) -> Ask:
        """Return units to the allowance, or to the authority."""
        return asking(self.refunding, subject, units, charged_ns)

    def owe(self, subject: str, units: int) -> Ask:
        """Charge in full at the authority; this node asks it at the next check."""
        return asking(self.owing, subject, units)

    def owed(self, subject: str) -> int | Ask:
        """Return what the authority's limits owe."""
        return self.counter.owed(subject)

    def grant(self, subject: str, units: int, ttl_ns: int | None) -> Ask:
        """Grant at the authority."""
        return asking(self.granting, subject, units, ttl_ns)

    def reset(self, subject: str) -> Ask:
        """Reset at the authority."""
        return asking(self.resetting, subject)

    # ── Checks ─────────────────────────────────────────────────────────────────────────────────

    def terms(self, subject: str) -> LeaseTerms:
        """Return the lease to ask for: no units if this process is already asking for one."""
        wanted = 0
        if self.kind == "leased" and (self.allowance.number, subject) not in self.node.leasing:
            with suppress(StoreError):
                wanted = min(self.allowance.demand(subject), ALLOWANCE_UNITS_MAX)
        return LeaseTerms(wanted, max(self.node.live_nodes(), 1), self._lifetime_ns)

    def asking(self, subject: str, cost: int) -> Steps[Decision]:
        """Let the authority decide a check; keep its answer in the table."""
        authority = self.node.authority
        if self.kind == "eventual" and (yield from reporting(authority, [(self, subject)])):
            admitted = self.spent(subject, cost)  # the answer to the report renews the budget
            if admitted is not None:
                return admitted
        self.known.asked += bool(cost)
        terms = self.terms(subject)
        asked_ns = self.node.now_ns()
        if terms.wanted or self.kind == "eventual":  # the answer also says how long a denial lasts
            check = LeaseCheck(self.counter, subject, cost, terms)
            [answer] = yield from leasing(authority, [(self, check)])
            if isinstance(answer, StoreError):
                raise answer
            decision, found = answer
        else:
            decision, found = (yield Call(self.counter.check, subject, cost)), NO_LEASE
        self.keep(subject, cost, (decision, found), asked_ns)
        if decision.allowed or self.kind == "eventual":
            return decision
        return (yield from self._asking_again(subject, cost, decision))

    def _asking_again(self, subject: str, cost: int, denial: Decision) -> Steps[Decision]:
        """Give the rest of a lease back if the authority can allow the check with it."""
        held = self.held(subject)
        if held <= 0 or denial.remaining + held < cost:
            return denial
        replaced = self.stop(subject)
        if replaced is None:
            return denial
        back = GiveBack(self.counter, subject, replaced.units, replaced.ends_store_ns)
        # Give the units back also if the caller is cancelled: they are no longer in the table, and
        # a give-back is not repeated.
        [answer] = yield Undo(self.node.authority.report, [back])
        if isinstance(answer, StoreError):
            self.node.counters.failed += 1
            self.node.counters.lost_units += replaced.units
            return denial
        self.node.counters.returned_units += replaced.units
        asked_ns = self.node.now_ns()
        decision: Decision = yield Call(self.counter.check, subject, cost)
        self.keep(subject, cost, (decision, NO_LEASE), asked_ns)
        return decision

    def keep(self, subject: str, cost: int, answer: tuple[Decision, Lease], asked_ns: int) -> None:
        """Keep an answer of the authority. See `Node.keep`."""
        self.node.keep(self.known, subject, cost, answer, asked_ns)

    # ── The other verbs ────────────────────────────────────────────────────────────────────────

    def held(self, subject: str) -> int:
        """Return the units that remain here and not at the authority. See `AllowanceGate.held`."""
        try:
            return self.allowance.held(subject)
        except StoreError:
            return 0

    def claim(self, subject: str) -> UnitClaim | None:
        """Take the pending charges of a subject, to report them."""
        try:
            return self.allowance.claim(subject)
        except StoreError:
            return None

    def stop(self, subject: str) -> Replaced | None:
        """End the allowance of a subject; return the units of a lease that are left.

        The authority decides the next check.
        """
        try:
            found = self.allowance.stop(subject)
        except StoreError:
            return None
        if self.kind == "eventual":
            self.node.keep_warm(self.known, subject)
        return found

    def peeking(self, subject: str, cost: int) -> Steps[Decision]:
        """Return the authority's answer with the units that remain on this node."""
        decision: Decision = yield Call(self.counter.peek, subject, cost)
        held = self.held(subject)
        if not held:
            return decision
        remaining = min(max(decision.remaining + held, 0), decision.limit)
        if decision.allowed or cost > held:
            return decision_with(decision, remaining=remaining)
        return decision_with(decision, allowed=True, remaining=remaining, retry_after_ns=0)

    def refunding(self, subject: str, units: int, charged_ns: int | None) -> Steps[None]:
        """Return units to the live allowance that they came from, or to the authority."""
        if charged_ns is not None and self._unspent(subject, units, charged_ns):
            return
        yield Call(self.counter.refund, subject, units, charged_ns)
        if self.held(subject) <= 0:  # a denial that is known here may have ended
            # Another thread may have put a lease into the table meanwhile.
            self.node.give_back(self.counter, subject, self.stop(subject))

    def undoing(self, subject: str, units: int, charged_ns: int) -> Steps[None]:
        """Return units that the node has just spent, also if the caller is cancelled."""
        if not self._unspent(subject, units, charged_ns):
            yield Undo(self.counter.refund, subject, units, charged_ns)

    def _unspent(self, subject: str, units: int, charged_ns: int) -> bool:
        try:
            return self.allowance.unspend(subject, units, charged_ns)
        except StoreError:
            return False

    def owing(self, subject: str, units: int) -> Steps[int]:
        """Charge in full at the authority, after the pending charges of this node.

        The units that this node still has for the subject are given back, and so lower the debt.
        Other nodes spend theirs for as long as a lease or a budget lasts.
        """
        yield from reporting(self.node.authority, [(self, subject)])
        self.node.give_back(self.counter, subject, self.stop(subject))
        forgiven: int = yield Call(self.counter.owe, subject, units)
        return forgiven

    def granting(self, subject: str, units: int, ttl_ns: int | None) -> Steps[None]:
        """Grant at the authority; this node asks it at the next check."""
        self.node.give_back(self.counter, subject, self.stop(subject))
        yield Call(self.counter.grant, subject, units, ttl_ns)

    def resetting(self, subject: str) -> Steps[None]:
        """Reset at the authority, where leased units stay used; this node gives its own back."""
        self.node.give_back(self.counter, subject, self.stop(subject))
        yield Call(self.counter.reset, subject)


def reporting(authority: Authority, checks: Sequence[tuple[NodeCounter, str]]) -> Steps[bool]:
    """Report the pending charges of these subjects now; return True if there were any."""
    claimed = [
        (counter, claim)
        for counter, subject in checks
        if counter.kind == "eventual" and (claim := counter.claim(subject)) is not None
    ]
    if not claimed:
        return False
    node = claimed[0][0].node
    sent_ns = node.now_ns()
    charges = [
        LateCharge(counter.counter, each.subject, each.units, each.age_ns)
        for counter, each in claimed
    ]
    answers: list[Answer] = yield Call(authority.report, charges)
    for (counter, claim), answer in zip(claimed, answers, strict=True):
        node.keep_charged(counter.known, claim, answer, sent_ns)
    return True


def leasing(
    authority: Authority,
    checks: Sequence[tuple[NodeCounter | None, LeaseCheck]],
    optional: Container[int] = (),
) -> Steps[list[LeasedAnswer]]:
    """Ask the authority for checks and leases; no other check asks for the same lease meanwhile."""
    asking = [
        (counter.node.leasing, (counter.allowance.number, check.subject))
        for counter, check in checks
        if counter is not None and check.terms.wanted
    ]
    for subjects, key in asking:
        subjects.add(key)
    try:
        answers: list[LeasedAnswer] = yield Call(
            authority.lease, [check for _, check in checks], optional
        )
    finally:
        for subjects, key in asking:
            subjects.discard(key)
    return answers
