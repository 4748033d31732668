"""The state that the counters of a node share: its table, the authority, and the other nodes.

A node answers checks from its table of allowances (`decide/allowances.py`). Counters ask the
authority if the table has no answer (`counters.py`), and one thread reports pending charges and
unspent leases to it (`reports.py`). Other nodes are known through two small interfaces:
`live_nodes` counts them, and `Hints` announces at once that a subject is denied or nearly at its
limit. The defaults are for a node without others; gossip replaces them.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from ratekeeper.core.clock import NS_PER_SECOND, Clock
from ratekeeper.core.errors import StoreError
from ratekeeper.core.forks import after_fork, fork_safe
from ratekeeper.core.model import Decision, Limit, Limits, decision_with
from ratekeeper.decide.allowances import (
    DENIED_NS_MAX,
    AllowanceGate,
    AllowanceKind,
    Allowances,
    Replaced,
    UnitClaim,
)
from ratekeeper.decide.failure import LocalCheck
from ratekeeper.decide.fleet_monitor import NodeAnswers, ReportCounts
from ratekeeper.decide.leasing import NO_LEASE, Authority, GiveBack, Lease
from ratekeeper.decide.store import Answer, Counter, FastCheck
from ratekeeper.fleet.gossip import Hint
from ratekeeper.fleet.outage import OutageCharges
from ratekeeper.fleet.settings import Fleet

# Limits of replaced rules that stay known by number although no gate has them: the table may still
# have their units.
GATES_MAX: Final = 8_192
# Give-backs that wait for the thread. Units beyond that stay charged until their lease ends.
REPLACED_MAX: Final = 10_000
# Subjects that other nodes found warm. The charges of further subjects are reported when they are
# due.
WARMED_MAX: Final = 10_000
# If a subject stays warm for longer than this, subjects of its limits are not presumed to be cool:
# the node would have to remember warm subjects for that long, and they would fill its table.
WARM_NS_MAX: Final = 120 * NS_PER_SECOND
# The time to put an answer into the table, once its validity is computed.
PUT_NS: Final = NS_PER_SECOND // 1_000
# A subject that stays warm is announced again after this time.
HINT_AGAIN_NS: Final = NS_PER_SECOND
# A shorter denial ends before other nodes can use it.
HINT_DENIED_NS_MIN: Final = NS_PER_SECOND // 100
_HINTED_MAX: Final = 10_000
# Cached answers of other rules, for requests that this node denies.
_LOOKS_MAX: Final = 1_000
# Rounds in which a forked process empties its copy of a private table: 1,000 allowances each.
_FORGET_ROUNDS_MAX: Final = 10_000
_FORGET_COUNT: Final = 1_000


class Hints(Protocol):
    """Announces to other nodes what the authority has answered. Must not block."""

    def warm(self, gate: int, subject: str, /) -> None:
        """Announce that a subject is nearly at its limit. `gate` is `AllowanceGate.number`."""
        ...

    def denied(self, gate: int, subject: str, cost: int, lasts_ns: int, /) -> None:
        """Announce that checks of at least this cost are denied for a time."""
        ...


class NoHints:
    """No other node is known."""

    def warm(self, gate: int, subject: str) -> None:
        """Do nothing."""

    def denied(self, gate: int, subject: str, cost: int, lasts_ns: int) -> None:
        """Do nothing."""


class KnownGate:
    """One rule's limits: in the table, and at the authority."""

    __slots__ = (
        "__weakref__",
        "_gone",
        "allowance",
        "asked",
        "counter",
        "fast_checks",
        "kind",
        "looks",
        "rule",
        "warm_ns",
    )

    def __init__(
        self,
        allowance: AllowanceGate,
        counter: Counter,
        rule: str,
        kind: AllowanceKind,
        gone: dict[tuple[str, AllowanceKind], NodeAnswers],
    ) -> None:
        """`gone` keeps the counts when these limits are garbage-collected."""
        self._gone = gone
        self.allowance = allowance
        self.counter = counter
        self.rule = rule
        self.kind = kind
        cool_ns = 2 * max(
            max(limit.window_ns, limit.window_ns * limit.capacity // limit.limit)
            for limit in counter.limits
        )
        self.warm_ns = cool_ns if cool_ns <= WARM_NS_MAX else 0
        """The time after which even a limit that was used up is no longer warm. A sliding window
        counter takes the longest, one and a half windows. 0 if that is longer than WARM_NS_MAX."""
        self.fast_checks: list[FastCheck] = []
        """Compiled checks of this process, which count separately."""
        self.asked = 0
        """How many checks the authority was asked to decide."""
        self.looks = 0
        """How often this process looked at an allowance without a check."""

    def answers(self) -> NodeAnswers:
        """Return how checks were answered in this process."""
        pairs = [self.allowance.counted(), *[each.counted() for each in self.fast_checks]]
        allowed, denied = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        return NodeAnswers(allowed - self.looks, denied, self.asked)

    def __del__(self) -> None:
        """Keep the counts: they must not fall when rules are replaced."""
        key, gone = (self.rule, self.kind), self._gone
        gone[key] = gone.get(key, NodeAnswers()) + self.answers()
        if len(gone) > GATES_MAX:
            del gone[next(iter(gone))]


class Node:
    """One process's view of its node."""

    def __init__(self, fleet: Fleet, clock: Clock, table: Allowances, authority: Authority) -> None:
        self.fleet = fleet
        self.make_counter: Callable[[Limits, str], Counter] | None = None
        """Prepares the limits of a rule at the authority, for charges of an outage."""
        self.now_ns = clock.now_ns
        self.table = table
        self.authority = authority
        self.live_nodes: Callable[[], int] = lambda: fleet.nodes
        """Returns how many nodes share the limits, this one included."""
        self.hints: Hints = NoHints()
        self.hears_hints: Callable[[], bool] = lambda: False
        """Returns True if other nodes are known: they send this one hints about warm subjects."""
        self.counters = ReportCounts()
        self.gates: weakref.WeakValueDictionary[int, KnownGate] = weakref.WeakValueDictionary()
        """The limits by number: those of all gates of this process, and the last GATES_MAX that had
        one."""
        self._recent: OrderedDict[int, KnownGate] = OrderedDict()
        self._gone: dict[tuple[str, AllowanceKind], NodeAnswers] = {}
        self.leasing: set[tuple[int, str]] = set()
        """Subjects for which this process is asking for a lease."""
        self.replaced: deque[GiveBack] = deque()
        """Units of leases that were replaced, to be given back."""
        self.warmed: deque[tuple[KnownGate, str]] = deque()
        """Subjects whose pending charges are reported before they are due."""
        self.outage = OutageCharges()
        """Units that were admitted while the authority was away, to be charged."""
        self.on_work: Callable[[], None] = _nothing
        """Called when the table has something to report later."""
        self.on_urgent: Callable[[], None] = _nothing
        """Called when there is something to report at once."""
        self._hinted: dict[tuple[int, str], int] = {}
        self._looked: dict[tuple[object, str, int], tuple[Decision, int]] = {}
        # By rule: the last limits in use, and since when all their warm subjects are known.
        self._in_use: dict[str, tuple[int, int]] = {}
        self._offset_ns: int | None = None  # the authority's clock minus this one
        self._lock = fork_safe(threading.Lock())
        after_fork(self.forked)

    def known(
        self, limits: Limits, rule: str, kind: AllowanceKind, lifetime_ns: int, counter: Counter
    ) -> KnownGate:
        """Return the limits of a rule in the table; the same for each version of the rules."""
        allowance = self.table.gate(limits, rule, kind, lifetime_ns)
        with self._lock:
            found = self.gates.get(allowance.number)
            if found is None:
                found = KnownGate(allowance, counter, rule, kind, self._gone)
                self.gates[allowance.number] = found
            self._recent[allowance.number] = found
            self._recent.move_to_end(allowance.number)
            if len(self._recent) > GATES_MAX:
                self._recent.popitem(last=False)
            return found

    def give_back(self, counter: Counter, subject: str, replaced: Replaced | None) -> None:
        """Give units back soon, without blocking the caller."""
        if replaced is None:
            return
        if len(self.replaced) >= REPLACED_MAX:
            self.counters.lost_units += replaced.units
            return
        self.replaced.append(GiveBack(counter, subject, replaced.units, replaced.ends_store_ns))
        self.on_work()

    def note_admitted(self, checks: Sequence[LocalCheck]) -> None:
        """Note units that were admitted while the authority was away."""
        self.counters.lost_units += self.outage.note(checks, self.now_ns())
        self.on_work()

    def taken_back(self, count: int) -> list[GiveBack]:
        """Take up to `count` give-backs, to report them."""
        with self._lock:
            return [self.replaced.popleft() for _ in range(min(len(self.replaced), count))]

    def claims(self, count: int, *, ending: bool) -> list[UnitClaim]:
        """Take up to `count` claims from the table, those of warm subjects first."""
        with self._lock:
            warmed = [self.warmed.popleft() for _ in range(min(len(self.warmed), count))]
        claims = [known.allowance.claim(subject) for known, subject in warmed]
        found = [claim for claim in claims if claim is not None]
        left = count - len(found)
        return found + (self.table.claim(left, self.fleet.flush_ns, ending=ending) if left else [])

    # ── Answers of the authority ───────────────────────────────────────────────────────────────

    def keep(
        self,
        known: KnownGate,
        subject: str,
        cost: int,
        answer: tuple[Decision, Lease],
        asked_ns: int,
    ) -> None:
        """Keep an answer of the authority in the table, and announce it to other nodes.

        `asked_ns` is when the authority was asked. The time since then is subtracted from a lease,
        also if this thread or event loop was busy after the reply arrived. So is PUT_NS, for the
        call of the table, which counts the rest from its own clock: if this process was suspended
        during that call, the lease ends at once.
        """
        decision, lease = answer
        number = known.allowance.number
        self._offset_ns = decision.decided_ns - self.now_ns()
        self._knows_warm(known)
        if known.kind == "eventual":
            is_warm = self.is_warm(decision)
            lasts_ns = max(known.warm_ns if is_warm else 0, 2 * self.fleet.flush_ns)
            lease = Lease(self.budget_of(decision), 0, lasts_ns, lease.denied_ns)
            if is_warm:
                self.tell_warm(number, subject)
        now_ns = self.now_ns()
        lease = lease._replace(lasts_ns=lease.lasts_ns - (now_ns - asked_ns) - PUT_NS)
        self._put(known, subject, cost, (decision, lease))
        if lease.units and self.now_ns() - now_ns > PUT_NS:
            with suppress(StoreError):  # the table is lost
                self.give_back(known.counter, subject, known.allowance.stop(subject))
        denied_ns = lease.denied_ns if decision.allowed else decision.retry_after_ns
        self.tell_denied(number, subject, cost, denied_ns)

    def keep_charged(
        self, known: KnownGate, claim: UnitClaim, answer: Answer, sent_ns: int
    ) -> None:
        """Confirm a late charge that was reported, and keep the new budget that the answer gives.

        A charge that failed is claimed again later.
        """
        counters = self.counters
        if isinstance(answer, StoreError):
            counters.failed += 1
            return
        counters.reports += 1
        counters.charged_units += claim.units
        with suppress(StoreError):  # the table is lost
            self.table.confirm([claim])
            self._note_divergence(known, claim.subject, answer)
        self.keep(known, claim.subject, 0, (answer, NO_LEASE), sent_ns)

    def _note_divergence(self, known: KnownGate, subject: str, decision: Decision) -> None:
        """Compare the node's own count of the remaining units with the authority's answer."""
        expected = known.allowance.spend(subject, 0)
        if expected is not None and expected.allowed:
            known.looks += 1
            difference = expected.remaining - (decision.remaining + known.allowance.held(subject))
            self.counters.divergence_units += abs(difference)

    def _put(
        self, known: KnownGate, subject: str, cost: int, answer: tuple[Decision, Lease]
    ) -> None:
        """Put an answer into the table. Give units back that the table cannot take."""
        decision, lease = answer
        unspent = None
        if known.kind == "leased" and lease.units:
            unspent = Replaced(lease.units, lease.ends_ns)
        if lease.units and lease.lasts_ns <= 0:  # it arrived too late
            self.give_back(known.counter, subject, unspent)
            lease, unspent = lease._replace(units=0), None
        try:
            replaced = known.allowance.put(subject, lease, decision, cost)
        except StoreError:  # the table is lost
            replaced = unspent
        self.give_back(known.counter, subject, replaced)
        if lease.units:
            self.on_work()

    def keep_look(self, check: tuple[object, str, int], look: Decision) -> None:
        """Cache the answer to a check of another rule, for requests that this node denies."""
        if len(self._looked) >= _LOOKS_MAX:
            self._looked.clear()
        self._looked[check] = look, self.now_ns()

    def look_of(self, check: tuple[object, str, int]) -> Decision | None:
        """Return the cached answer to a check, as of now; None if it is older than a second.

        So a client that this node denies costs the authority one call a second for its other rules.
        """
        look, looked_ns = self._looked.get(check, (None, 0))
        age_ns = self.now_ns() - looked_ns
        if look is None or not 0 <= age_ns < DENIED_NS_MAX:
            return None
        if not look.allowed and age_ns >= look.retry_after_ns:
            return None
        return decision_with(
            look,
            retry_after_ns=max(look.retry_after_ns - age_ns, 0),
            reset_after_ns=max(look.reset_after_ns - age_ns, 0),
            decided_ns=look.decided_ns + age_ns,
        )

    # ── Hints ──────────────────────────────────────────────────────────────────────────────────

    def tell_denied(self, gate: int, subject: str, cost: int, lasts_ns: int) -> None:
        """Announce a denial to other nodes, if it lasts long enough to be of use."""
        if cost and lasts_ns >= HINT_DENIED_NS_MIN:
            self.hints.denied(gate, subject, cost, min(lasts_ns, DENIED_NS_MAX))

    def tell_warm(self, gate: int, subject: str) -> None:
        """Announce to other nodes that a subject is nearly at its limit; at most once a second."""
        if self.now_ns() >= self._hinted.get((gate, subject), 0):
            self._note_hint(gate, subject)
            self.hints.warm(gate, subject)

    def _note_hint(self, gate: int, subject: str) -> None:
        """Note that all nodes know that a subject is warm; it is not announced for a second."""
        if len(self._hinted) >= _HINTED_MAX:
            self._hinted.clear()
        self._hinted[gate, subject] = self.now_ns() + HINT_AGAIN_NS

    def heard(self, hint: Hint) -> None:
        """Apply a hint of another node."""
        if hint.kind == "warm":
            self.heard_warm(hint.gate, hint.subject)
        else:
            self.heard_denied(hint.gate, hint.subject, hint.cost, hint.lasts_ns)

    def heard_warm(self, gate: int, subject: str) -> None:
        """End the budget of a subject that another node found warm; report its charges at once."""
        known = self.gates.get(gate)
        if known is not None and known.kind == "eventual":
            if known.warm_ns:
                self.keep_warm(known, subject)  # a denial that is known here goes on
            else:
                known.allowance.stop(subject)
            self._note_hint(gate, subject)
            if len(self.warmed) < WARMED_MAX and known.allowance.held(subject):
                self.warmed.append((known, subject))
                self.on_urgent()

    def heard_denied(self, gate: int, subject: str, cost: int, lasts_ns: int) -> None:
        """Deny a subject that another node has announced as denied."""
        known = self.gates.get(gate)
        if known is not None and cost > 0 and lasts_ns > 0:
            if known.kind == "eventual":
                self.keep_warm(known, subject)
            known.allowance.deny(subject, cost, min(lasts_ns, DENIED_NS_MAX))

    # ── Budgets ────────────────────────────────────────────────────────────────────────────────

    def is_warm(self, decision: Decision) -> bool:
        """Return True if the authority decides every check of the subject.

        The answer describes the tightest limit, the one with the fewest units remaining. Only its
        share counts, although a larger limit may be used to a larger share. A part of the units
        that remain in the tightest limit is at most the same part of those in each other limit, so
        a budget fits all of them.
        """
        room = decision.remaining - decision.granted
        return not decision.allowed or room <= (1 - self.fleet.warm) * decision.policy.capacity

    def budget_of(self, decision: Decision) -> int:
        """Return the units that this node may admit before it reports them."""
        if self.is_warm(decision):
            return 0
        return (decision.remaining - decision.granted) // (4 * max(self.live_nodes(), 1))

    def presume_cool(self, known: KnownGate, subject: str, cost: int) -> bool:
        """Give a subject a first budget without asking the authority; return False if it gets none.

        A light user of a large fleet reaches each node too rarely for a budget to last until the
        next request. So a subject counts as cool unless this node knows that it is warm: from an
        answer of the authority, or from a hint of another node. All nodes together admit at most a
        quarter of the limit in this way before the answers to their reports arrive. A node that
        knows no other node presumes nothing.
        """
        if not self._knows_warm(known) or self._offset_ns is None or not self.hears_hints():
            return False
        if known.allowance.spend(subject, 0) is not None:  # it is warm, or its budget is too small
            known.looks += 1
            return False
        limit = min(known.counter.limits, key=_capacity)
        whole = self._presumed(limit, limit.capacity)
        units = self.budget_of(whole)
        if units < cost:
            return False
        self._put(known, subject, 0, (whole, Lease(units, 0, 2 * self.fleet.flush_ns)))
        return True

    def _knows_warm(self, known: KnownGate) -> bool:
        """Note that limits are in use; return True if this node knows which subjects are warm.

        Warm subjects are kept under the number of the limits. A load step, a rule change or an
        override gives the rule another number, while the authority continues its counts. So these
        limits alone must have decided the rule for as long as a subject can be warm, or they must
        be the first that this process uses for it.
        """
        number, now_ns = known.allowance.number, self.now_ns()
        used, known_ns = self._in_use.get(known.rule, (number, now_ns))
        if used != number:
            known_ns = now_ns + WARM_NS_MAX
        elif known.rule not in self._in_use and len(self._in_use) >= GATES_MAX:
            return False
        self._in_use[known.rule] = (number, known_ns)
        return known.warm_ns > 0 and now_ns >= known_ns

    def keep_warm(self, known: KnownGate, subject: str) -> None:
        """Let the authority decide the next check of a subject. Its answer ends this state.

        If subjects of these limits are presumed to be cool, the state lasts for as long as the
        subject can be warm: otherwise a client that has used up its limit would get a budget after
        each pause.
        """
        warm = self._presumed(min(known.counter.limits, key=_capacity), 0)
        self._put(known, subject, 0, (warm, Lease(0, 0, known.warm_ns)))

    def _presumed(self, limit: Limit, remaining: int) -> Decision:
        """Return a presumed answer of the authority, with the time of its clock."""
        decided_ns = self.now_ns() + (self._offset_ns or 0)
        return Decision(True, limit, remaining, decided_ns=decided_ns)

    # ── Statistics ─────────────────────────────────────────────────────────────────────────────

    def answers(self) -> dict[tuple[str, AllowanceKind], NodeAnswers]:
        """Return how checks were answered in this process, by rule and kind."""
        with self._lock:
            known = list(self.gates.values())
        found = dict(self._gone)
        for each in known:
            key = each.rule, each.kind
            found[key] = found.get(key, NodeAnswers()) + each.answers()
        return found

    # ── Life ───────────────────────────────────────────────────────────────────────────────────

    def forked(self) -> None:
        """In a forked child: forget the allowances of the parent. Its threads do not exist here.

        The child has a copy of a private table. The parent spends its leases and reports its
        pending charges. Both may spend the rest of a budget.
        """
        self.leasing.clear()
        self.replaced.clear()
        self.warmed.clear()
        self.outage.clear()
        self._hinted.clear()
        if self.fleet.store.startswith("memory://"):
            self._forget_allowances()

    def _forget_allowances(self) -> None:
        try:
            for _ in range(_FORGET_ROUNDS_MAX):
                claims = self.table.claim(_FORGET_COUNT, 0, ending=True)
                if not claims:
                    return
                self.table.confirm(claims)
        except StoreError:
            return  # the table is closed


def _capacity(limit: Limit) -> int:
    return limit.capacity


def _nothing() -> None:
    """Do nothing."""
