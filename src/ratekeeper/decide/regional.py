"""Limits that several regions share: each has its own store, and no request waits for another.

A rule with `scope: global` is counted in the store of each region. There, a subject has the two
levels of `ledgers.py` for each limit: the units that the region *knows*, and its *own* units that
not all other regions have accepted. A check is one call on one key of the region's own store.

Between the stores, each region's sync carries *reports*. A report has the totals of one subject:
the units that its region has admitted so far, and those of them that were returned. Totals only
grow, so a report that is lost, repeated, late or out of order does no harm.

    due      the sync reads the reports of subjects that were touched, from its own store
    learn    it gives them to the store of another region, which adds what it did not know yet to
             `known`, and says for each whether it *accepts* the total
    accept   it tells its own store which totals all others have accepted; these own units move to
             `known`

**exact** (`across_regions: exact`): never over, in any partition (ADR 17). A region has a fixed
share w of the limit, Σ w = 1. It admits a request if w × known + own + cost <= w × C, and accepts a
total only while w × known + own <= w × C holds, with that total in `known`.

**eventual**: the share follows the demand: the units that clients have asked for lately, here and,
as far as reports say, in the other regions. A region that is cut off is left out after a while,
so it goes on alone with the whole limit. When reports arrive again, a bucket may owe more than its
capacity. The region reports that excess, and works it off.

A report also says how much of its total still counts in its region (`Report.counts`): of a long
partition, only that is learnt. All own units that will ever move to `known` are among them, so
whatever a region moves, all others have learnt.

Units that a region returns are a total of their own, for each limit. Another region gives them back
only as far as they certainly are in its `known` still (`_Seen.left`): time may have drained them,
and then the same amount is another region's.

Window counters of all regions begin at the same times, by the clocks of their stores. A report of a
later window is not learnt before its window has begun here. One of an earlier window is learnt into
that window, and not accepted. So clocks that differ make a limit slower, and never exceed it.

A share that rises gives no units at once. The region adds C × (1 − before / after) to `known`, as
if the units that it takes over had just been spent: they may have been, by a region that is gone.
Eventual limits have no fixed share, and add nothing.

`MemoryRegional` is the reference: the scripts on Redis agree with it, call for call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import blake2b
from typing import Final, Literal, NamedTuple, Protocol, cast

from ratekeeper.core.clock import NS_PER_SECOND, Clock
from ratekeeper.core.errors import CapacityError, StoreUnavailable
from ratekeeper.core.model import BUCKETS, MICROS_PER_UNIT, Decision, Limit, Limits
from ratekeeper.core.steps import Ask, Call, Steps, asking
from ratekeeper.decide.combine import combine
from ratekeeper.decide.ledgers import Ledger, Ratio, exact_room, ledger_of, outcome, room_at
from ratekeeper.decide.store import Counter

AcrossRegions = Literal["exact", "eventual"]
"""How regions share a global limit.

`exact`     each region has a fixed share, and the limit is never exceeded.
`eventual`  the share of a region follows its demand. A region that is cut off goes on alone, and
            may exceed the limit.
"""

# The version of the states in a region's store. The leader of one region writes into the stores of
# the others, so regions with different ones exchange nothing.
LAYOUT: Final = 2
REGIONS_MAX: Final = 16
# A total that was not accepted is reported again after this time.
REPEAT_NS: Final = NS_PER_SECOND
# A total that was accepted without a region that cannot be reached is reported again after this
# time, until that region has learnt it too.
MISSED_NS: Final = 10 * NS_PER_SECOND
# Demand is counted in slots of this time: the current one, and the fading one before. What a region
# has said of its demand fades in the same time.
DEMAND_NS: Final = 2 * NS_PER_SECOND
WHOLE: Final = Fraction(1)
# The shares of eventual limits are parts of this.
_PARTS: Final = 1_000
# A region's counts begin anew when its store has lost them. If its clock was set back as well, they
# seem to be older than those before. After this time without a report they are taken for new ones.
_SILENT_NS: Final = 10 * NS_PER_SECOND
# A request that only the share of an eventual limit denies can pass when the other regions have
# accepted what this one has admitted: about a round of the sync and two trips later.
ROUND_NS: Final = NS_PER_SECOND // 2
# An eventual limit may be over by this much without a partition: a part of it, or some units.
_USUAL_PART: Final = 100
_USUAL_UNITS: Final = 5
# The keys of a region are divided into so many groups, each of which is in one slot of a Cluster.
GROUPS: Final = 64


NO_SHARE: Final = (
    "this region has no share of global limits: its regions are not set up yet, or it was removed; "
    "`ratekeeper regions` shows its state"
)


class Shares(NamedTuple):
    """The regions and the share that a region's store uses."""

    epoch: int
    """Which set of regions and shares this is. Regions accept totals of the same epoch only."""
    share: Fraction
    """Of this region, for exact limits; 0 denies."""
    before: Fraction
    """The lowest share that was in use within the longest window before `changed_ns`.

    0 if the store has lost its counts then: its subjects start as if the limit was used up.
    """
    changed_ns: int
    """When the share rose from `before`."""
    live: tuple[str, ...]
    """The other regions that eventual limits count on: those that this one can reach."""


class SubjectKey(NamedTuple):
    """Which counts: one rule's of one subject. The same in all regions."""

    rule: str
    """See `rule_number`."""
    subject: str

    @property
    def group(self) -> int:
        """The group of its keys, 0 to GROUPS − 1."""
        return int.from_bytes(blake2b(self.group_text.encode(), digest_size=2).digest()) % GROUPS

    @property
    def group_text(self) -> str:
        """The text whose hash is the group. The subject is at its end."""
        return f"{self.rule}\x1f{self.subject}"


class Report(NamedTuple):
    """A region's report of one subject."""

    key: SubjectKey
    limits: Limits
    across: AcrossRegions
    generation: int
    """When the region began to count, in microseconds: a total of a later one is a new total."""
    total: int
    """Units that the region has admitted so far."""
    returned: tuple[int, ...]
    """Of each limit: micro-units of the total that were returned so far.

    Not whole units: time has returned a part of the last one, however soon a refund comes.
    """
    counts: tuple[int, ...]
    """Of each limit: micro-units. Of the total, only the newest so many still count there."""
    demand: int
    """Units that clients have lately asked for in that region."""
    part: int
    """Units that the region has admitted in the last window. For people."""
    at_ns: int
    """The time of the report, by the clock of the region's store."""


class Learnt(NamedTuple):
    """The answer of another region's store to a report."""

    accepted: bool
    excess: int
    """Units by which the report has brought the subject above an eventual limit.

    1 % of the limit, or 5 units, do not count: regions that are busy at the same time are over by
    so much for a moment, without any partition.
    """


class Accepted(NamedTuple):
    """A total that all other regions have accepted, or for an eventual limit all live ones."""

    key: SubjectKey
    generation: int
    total: int
    returned: tuple[int, ...]
    everywhere: bool = True
    """False: a region that is not live has not learnt it. It is due again in MISSED_NS."""


class RegionPart(NamedTuple):
    """One region's part in the usage of a subject, as a store knows it."""

    region: str
    """Empty for the region of the store."""
    part: int
    """Units that the region admitted in the last window, according to its last report."""
    age_ns: int
    """The age of that report; 0 for the region of the store."""


class RegionalUsage(NamedTuple):
    """The usage of a subject, as a region's store knows it now."""

    used: tuple[int, ...]
    """Of each limit: the units that count, of all regions."""
    unaccepted: tuple[int, ...]
    """Of each limit: the units of this region that not all other regions have accepted."""
    parts: tuple[RegionPart, ...]


class RegionalCounts(Protocol):
    """A region's store: `store.regional`, None for a store that has none.

    Calls of a sync are awaited. They raise StoreError, and then may or may not have been made.
    Those with a `token` do nothing and return nothing if a later leader has one.
    """

    def global_counter(self, limits: Limits, rule: str, across: AcrossRegions) -> Counter:
        """Prepare a rule's limits. A check raises StoreUnavailable without shares."""
        ...

    async def shares(self) -> Shares | None:
        """Return the shares in use; None if none were set."""
        ...

    async def set_shares(self, shares: Shares, token: int) -> bool:
        """Use other shares from now on. Returns False if a part of the store has a later token."""
        ...

    async def lead(self, name: str, lasts_ns: int) -> tuple[str, int]:
        """Take or renew the lead, if it is free; return the leader's name and fencing token."""
        ...

    async def step_down(self, name: str) -> None:
        """Give up the lead, if `name` has it."""
        ...

    async def due(self, most: int, token: int) -> list[Report]:
        """Return reports that are due, the longest due first. They are due again in REPEAT_NS."""
        ...

    async def learn(self, region: str, epoch: int, reports: Sequence[Report]) -> list[Learnt]:
        """Learn the reports of another region. The answers are in order.

        A call without reports asks every server of the store, so that the next reports wait for no
        connection.
        """
        ...

    async def accept(self, epoch: int, accepted: Sequence[Accepted], token: int) -> None:
        """Note the totals that all other regions have accepted in this epoch.

        A subject all of whose units are accepted is not due any more, if it is `everywhere`.
        """
        ...

    async def usage(self, limits: Limits, rule: str, subject: str) -> RegionalUsage:
        """Return the usage of a subject as the store knows it. Changes nothing."""
        ...

    async def backlog(self) -> int:
        """Return the number of subjects with totals that are not accepted."""
        ...

    async def note(self, name: str, text: str) -> None:
        """Keep a short text under a name, for other regions and operators to read."""
        ...

    async def notes(self) -> dict[str, str]:
        """Return all texts that are kept."""
        ...

    async def now_ns(self) -> int:
        """Return the time of the store's clock."""
        ...

    def traffic(self) -> tuple[int, int]:
        """Return the bytes that the calls of a sync have sent and received so far. No I/O."""
        ...


# Attempts to charge a settled cost, each with the room that the one before found.
_OWE_ATTEMPTS_MAX: Final = 8


class GlobalCounter:
    """The counter of a global rule: what a region's store prepares.

    A request of several rules is decided differently if one of its counters is of this kind.
    """

    __slots__ = ()

    def owe(self, subject: str, units: int) -> Ask:
        """Charge units as far as the share of this region has room; return those that have none.

        A global limit owes nothing yet: debt would have to be exchanged between the regions.
        """
        return asking(self._owing, subject, units)

    def owed(self, subject: str) -> int:  # noqa: ARG002 - as of every counter
        """Return 0: a global limit owes nothing."""
        return 0

    def _owing(self, subject: str, units: int) -> Steps[int]:
        counter = cast("Counter", self)
        for _ in range(_OWE_ATTEMPTS_MAX):
            # Another request may spend in between: then there is less room, and soon none.
            room: Decision = yield Call(counter.peek, subject, 0)
            fits = min(units, room.remaining)
            if not fits or (yield Call(counter.check, subject, fits)).allowed:
                return units - fits
        return units


def rule_number(limits: Sequence[Limit], rule: str) -> str:
    """Return the text that identifies the limits of a rule in all regions.

    Other numbers of the same limits keep it, so no count restarts when a limit is raised.

    >>> rule_number([Limit(10, per=60)], "api") == rule_number([Limit(20, per=60)], "api")
    True
    """
    kinds = [f"{each.name or each.algorithm}\x1e{each.window_ns}" for each in limits]
    text = "\x1f".join([rule, *kinds])
    return blake2b(text.encode(), digest_size=8).hexdigest()


class _Slots:
    """Units in the current slot of time, and in the one before, which fades."""

    __slots__ = ("before", "current", "number")

    def __init__(self) -> None:
        self.number = self.current = self.before = 0

    def add(self, now_ns: int, slot_ns: int, units: int) -> None:
        number = max(now_ns // slot_ns, self.number)
        if number > self.number:
            self.before = self.current if number == self.number + 1 else 0
            self.number, self.current = number, 0
        self.current += units

    def sum(self, now_ns: int, slot_ns: int) -> int:
        """Return the units of the last slot of time, rounded up."""
        number = max(now_ns // slot_ns, self.number)
        if number > self.number + 1:
            return 0
        left_ns = min((number + 1) * slot_ns - now_ns, slot_ns)
        if number > self.number:
            return -(-self.current * left_ns // slot_ns)
        return self.current - (-self.before * left_ns // slot_ns)


@dataclass(slots=True)
class _Seen:
    """The last report of another region."""

    returned: tuple[int, ...]
    left: tuple[int, ...]
    """Of each limit: micro-units of that region which counted in `known` at `at_ns`, at least."""
    generation: int = 0
    total: int = 0
    at_ns: int = 0
    demand: int = 0
    part: int = 0

    def left_now(self, limits: Sequence[Limit], now_ns: int) -> tuple[int, ...]:
        """Return the micro-units that certainly count in `known` still, of each limit."""
        return tuple(
            micros and _certainly_left(limit, micros, now_ns, self.at_ns)
            for limit, micros in zip(limits, self.left, strict=True)
        )


@dataclass(slots=True)
class _Counts:
    """One rule's counts of one subject in one region."""

    limits: Limits
    across: AcrossRegions
    generation: int
    ledgers: list[Ledger]
    share: Fraction
    returned: tuple[int, ...]
    accepted_returned: tuple[int, ...]
    epoch: int = -1
    """That of `share`."""
    total: int = 0
    accepted: int = 0
    demand: _Slots = field(default_factory=_Slots)
    part: _Slots = field(default_factory=_Slots)
    seen: dict[str, _Seen] = field(default_factory=dict)
    granted: int = 0
    grant_ends_ns: int = 0

    @property
    def window_ns(self) -> int:
        return max(limit.window_ns for limit in self.limits)

    def use(self, limits: Limits, across: AcrossRegions) -> None:
        """Use the limits and the mode of this region's rule, which may have changed."""
        self.across = across
        if limits == self.limits:
            return
        ledgers = [ledger_of(limit) for limit in limits]
        for ledger, before in zip(ledgers, self.ledgers, strict=True):
            if type(ledger) is type(before):  # counts of another algorithm mean nothing
                ledger.numbers = before.numbers
        self.limits, self.ledgers = limits, ledgers


class MemoryRegional:
    """The reference: a region's counts in memory. Not for several threads at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._subjects: dict[SubjectKey, _Counts] = {}
        self._due: dict[SubjectKey, int] = {}
        self._shares: Shares | None = None
        self._leader = ("", 0)
        self._leads_until_ns = 0
        self._notes: dict[str, str] = {}

    # ── Checks ─────────────────────────────────────────────────────────────────────────────────

    def global_counter(
        self, limits: Limits, rule: str, across: AcrossRegions
    ) -> MemoryRegionalCounter:
        """See RegionalCounts."""
        return MemoryRegionalCounter(self, limits, rule, across)

    def check(
        self,
        key: SubjectKey,
        limits: Limits,
        across: AcrossRegions,
        rule: str,
        cost: int,
        *,
        spend: bool,
    ) -> Decision:
        """Decide a request; charge it if it is admitted and `spend` is True."""
        now_ns = self._clock.now_ns()
        shares = self._used_shares()
        subject = self._opened(key, limits, across, now_ns, keep=False)
        subject.use(limits, across)
        granted = subject.granted if now_ns < subject.grant_ends_ns else 0
        require_room(limits, shares.share if across == "exact" else WHOLE, cost - granted)
        if spend and cost and across == "eventual":
            subject.demand.add(now_ns, DEMAND_NS, cost)
        share = self._share_of(subject, shares, now_ns)
        need = max(cost - granted, 0)
        room = min(
            room_of(each.limit, across, share, *each.levels(now_ns, share), need)
            for each in subject.ledgers
        )
        short = max(cost - max(room, 0), 0)
        allowed = short <= granted
        charged = spend and allowed and cost > 0
        if charged:
            granted -= short
            subject.granted = granted
            # Units of a grant are not charged: `cost - short` are.
            self._admit(subject, share, now_ns, cost - short)
        if spend and cost and (allowed or across == "eventual"):
            self._subjects[key] = subject
            self._due[key] = min(self._due.get(key, now_ns), now_ns)
        return decision_of(
            limits,
            subject.ledgers,
            across,
            share,
            now_ns,
            cost,
            rule,
            charged=charged,
            granted=granted,
        )

    def _admit(self, subject: _Counts, share: Fraction, now_ns: int, units: int) -> None:
        for ledger in subject.ledgers:
            ledger.add(now_ns, share, 0, units * MICROS_PER_UNIT)
        subject.total += units
        subject.part.add(now_ns, subject.window_ns, units)

    def refund(self, key: SubjectKey, units: int, charged_ns: int | None) -> None:
        """Return units of this region, as far as time has not returned them already."""
        subject = self._subjects.get(key)
        if subject is None or self._shares is None:
            return
        now_ns = self._clock.now_ns()
        _raise_share(subject, self._shares)
        share = self._share_of(subject, self._shares, now_ns)
        returned = []
        for ledger, before in zip(subject.ledgers, subject.returned, strict=True):
            back = max(min(units * MICROS_PER_UNIT, subject.total * MICROS_PER_UNIT - before), 0)
            if charged_ns is not None:
                back = micros_left(ledger.limit, back, now_ns, charged_ns)
            _, own = ledger.levels(now_ns, share)
            first = min(own, back)
            ledger.give_back(now_ns, share, back - first, first, charged_ns)
            returned.append(before + back)
        if tuple(returned) != subject.returned:
            subject.returned = tuple(returned)
            self._due[key] = min(self._due.get(key, now_ns), now_ns)

    def grant(
        self, key: SubjectKey, limits: Limits, across: AcrossRegions, units: int, ttl_ns: int | None
    ) -> None:
        """Add units in this region on top of every limit."""
        now_ns = self._clock.now_ns()
        subject = self._opened(key, limits, across, now_ns, keep=True)
        subject.use(limits, across)
        left = subject.granted if now_ns < subject.grant_ends_ns else 0
        ends_ns = now_ns + (subject.window_ns if ttl_ns is None else ttl_ns)
        subject.granted, subject.grant_ends_ns = left + units, max(ends_ns, subject.grant_ends_ns)

    def reset(self, key: SubjectKey) -> None:
        """Forget what counts in this region. Totals stay: they only grow."""
        subject = self._subjects.get(key)
        if subject is not None and self._shares is not None:
            _raise_share(subject, self._shares)
            subject.ledgers = [ledger_of(limit) for limit in subject.limits]
            subject.granted, subject.part = 0, _Slots()

    # ── Calls of a sync ────────────────────────────────────────────────────────────────────────

    async def shares(self) -> Shares | None:
        """See RegionalCounts."""
        return self._shares

    async def set_shares(self, shares: Shares, token: int) -> bool:
        """See RegionalCounts."""
        if token < self._leader[1]:
            return False
        self._shares = shares
        return True

    async def lead(self, name: str, lasts_ns: int) -> tuple[str, int]:
        """See RegionalCounts."""
        now_ns = self._clock.now_ns()
        leader, token = self._leader
        left_ns = self._leads_until_ns - now_ns
        if name != leader and not 0 < left_ns <= lasts_ns:  # more: the clock was set back
            leader, token = self._leader = (name, token + 1)
        if name == leader:
            self._leads_until_ns = now_ns + lasts_ns
        return leader, token

    async def step_down(self, name: str) -> None:
        """See RegionalCounts."""
        if self._leader[0] == name:
            self._leads_until_ns = 0
            self._leader = ("", self._leader[1])

    async def due(self, most: int, token: int) -> list[Report]:
        """See RegionalCounts."""
        if token < self._leader[1] or self._shares is None:
            return []
        now_ns = self._clock.now_ns()
        # Nothing is noted for so late a time, unless the clock was set back since.
        ready = sorted(
            (at_ns, key)
            for key, at_ns in self._due.items()
            if not now_ns < at_ns <= now_ns + MISSED_NS
        )
        reports = []
        for _, key in ready[:most]:
            subject = self._subjects[key]
            _raise_share(subject, self._shares)
            share = self._share_of(subject, self._shares, now_ns)
            reports.append(_report_of(key, subject, share, now_ns))
            self._due[key] = now_ns + REPEAT_NS
        return reports

    async def learn(self, region: str, epoch: int, reports: Sequence[Report]) -> list[Learnt]:
        """See RegionalCounts."""
        return [self._learn(region, epoch, report) for report in reports]

    def _learn(self, region: str, epoch: int, report: Report) -> Learnt:
        now_ns = self._clock.now_ns()
        shares = self._used_shares()
        subject = self._opened(report.key, report.limits, report.across, now_ns, keep=True)
        exact = subject.across == "exact"
        share = self._share_of(subject, shares, now_ns)
        if len(report.counts) != len(subject.limits):
            return Learnt(False, 0)  # it is not of this rule: two rules have one number
        nothing = (0,) * len(subject.limits)
        seen = subject.seen.setdefault(region, _Seen(nothing, nothing))
        if report.generation < seen.generation and 0 <= now_ns - seen.at_ns <= _SILENT_NS:
            return Learnt(False, 0)
        behind = [ledger.behind(now_ns, report.at_ns) for ledger in subject.ledgers]
        if exact and min(behind) < 0:
            return Learnt(False, 0)  # its window has not begun here
        if report.generation != seen.generation:
            subject.seen[region] = seen = _Seen(nothing, nothing, report.generation)
        excess = _learn_units(subject.ledgers, seen, report, share, now_ns)
        if report.total >= seen.total:  # it is not a late one
            seen.demand, seen.part = report.demand, report.part
        seen.total = max(report.total, seen.total)
        seen.returned = max(report.returned, seen.returned)
        seen.at_ns = now_ns
        if not exact:
            return Learnt(True, excess)
        fits = all(exact_room(ledger, now_ns, share) >= 0 for ledger in subject.ledgers)
        return Learnt(fits and epoch == shares.epoch and not any(behind), 0)

    async def accept(self, epoch: int, accepted: Sequence[Accepted], token: int) -> None:
        """See RegionalCounts."""
        now_ns = self._clock.now_ns()
        if self._shares is None or token < self._leader[1] or epoch != self._shares.epoch:
            return
        for each in accepted:
            subject = self._subjects.get(each.key)
            if subject is None or subject.generation != each.generation:
                continue
            _raise_share(subject, self._shares)
            share = self._share_of(subject, self._shares, now_ns)
            total = min(each.total, subject.total)  # less, if the store has lost the last ones
            if total > subject.accepted:
                subject.accepted = total
                for ledger in subject.ledgers:
                    ledger.move(now_ns, share, (subject.total - total) * MICROS_PER_UNIT)
            subject.accepted_returned = max(subject.accepted_returned, each.returned)
            if not _is_accepted(subject):
                continue
            if each.everywhere:
                self._due.pop(each.key, None)
            else:
                self._due[each.key] = now_ns + MISSED_NS

    async def usage(self, limits: Limits, rule: str, subject: str) -> RegionalUsage:
        """See RegionalCounts."""
        now_ns = self._clock.now_ns()
        key = SubjectKey(rule_number(limits, rule), subject)
        found = self._opened(key, limits, "eventual", now_ns, keep=False)
        share = self._share_of(found, self._used_shares(), now_ns)
        levels = [ledger.levels(now_ns, share) for ledger in found.ledgers]
        parts = [RegionPart("", found.part.sum(now_ns, found.window_ns), 0)]
        parts += [
            RegionPart(region, seen.part, max(now_ns - seen.at_ns, 0))
            for region, seen in found.seen.items()
        ]
        return RegionalUsage(
            tuple(-(-(known + own) // MICROS_PER_UNIT) for known, own in levels),
            tuple(-(-own // MICROS_PER_UNIT) for _, own in levels),
            tuple(parts),
        )

    async def backlog(self) -> int:
        """See RegionalCounts."""
        return len(self._due)

    async def note(self, name: str, text: str) -> None:
        """See RegionalCounts."""
        self._notes[name] = text

    async def notes(self) -> dict[str, str]:
        """See RegionalCounts."""
        return dict(self._notes)

    async def now_ns(self) -> int:
        """See RegionalCounts."""
        return self._clock.now_ns()

    def traffic(self) -> tuple[int, int]:
        """Return nothing: no bytes are sent."""
        return 0, 0

    # ── States ─────────────────────────────────────────────────────────────────────────────────

    def _used_shares(self) -> Shares:
        if self._shares is None or not self._shares.share:
            raise StoreUnavailable(NO_SHARE)
        return self._shares

    def _opened(
        self, key: SubjectKey, limits: Limits, across: AcrossRegions, now_ns: int, *, keep: bool
    ) -> _Counts:
        """Return the counts of a subject, with what a share that rose adds to them."""
        shares = self._used_shares()
        subject = self._subjects.get(key)
        if subject is None:
            ledgers = [ledger_of(limit) for limit in limits]
            nothing = (0,) * len(limits)
            subject = _Counts(
                limits, across, now_ns // 1_000, ledgers, shares.before, nothing, nothing
            )
            if keep:
                self._subjects[key] = subject
        _raise_share(subject, shares)
        return subject

    @staticmethod
    def _share_of(subject: _Counts, shares: Shares, now_ns: int) -> Fraction:
        """Return the share to use now."""
        if subject.across == "exact":
            return shares.share
        others = 0
        for region in shares.live:
            seen = subject.seen.get(region)
            if seen is not None and now_ns >= seen.at_ns:  # otherwise the clock was set back
                left_ns = max(DEMAND_NS - (now_ns - seen.at_ns), 0)
                others += -(-seen.demand * left_ns // DEMAND_NS)
        own = subject.demand.sum(now_ns, DEMAND_NS)
        if not others:
            return WHOLE
        return Fraction(max(-(-own * _PARTS // (own + others)), 1), _PARTS)


def _raise_share(subject: _Counts, shares: Shares) -> None:
    """Use the share of now, and add what a share that rose adds.

    Every call does this before it looks at the levels: until the share rose, they drained at the
    lower one.
    """
    before = subject.share
    if subject.epoch != shares.epoch:  # its share may have been lower in between
        before = min(before, shares.before)
    if before < shares.share and subject.across == "exact":
        rise = 1 - before / shares.share
        for ledger in subject.ledgers:
            micros = ledger.limit.capacity * MICROS_PER_UNIT
            taken = -(-micros * rise.numerator // rise.denominator)
            ledger.add(shares.changed_ns, before, taken, 0)
    subject.share, subject.epoch = shares.share, shares.epoch


def _learn_units(
    ledgers: Sequence[Ledger], seen: _Seen, report: Report, share: Fraction, now_ns: int
) -> int:
    """Add the units of a report to `known`, without those returned; return the excess in units.

    A unit that does not count any more is not added. It may be one of those that were returned, so
    as many less are given back.
    """
    new = max(report.total - seen.total, 0) * MICROS_PER_UNIT
    limits = [ledger.limit for ledger in ledgers]
    left = list(seen.left_now(limits, now_ns))
    excess = 0
    for place, ledger in enumerate(ledgers):
        before = _excess(ledger, now_ns, share)
        added = min(new, report.counts[place])
        returned = max(report.returned[place] - seen.returned[place], 0)
        back = min(max(returned - (new - added), 0), left[place])
        ledger.give_back(now_ns, share, back, 0)
        ledger.learn(now_ns, share, added, report.at_ns)
        is_late = ledger.behind(now_ns, report.at_ns) > 0
        left[place] += (0 if is_late else added) - back
        excess = max(excess, _excess(ledger, now_ns, share) - before)
    seen.left = tuple(left)
    return -(-excess // MICROS_PER_UNIT)


def room_of(
    limit: Limit, across: AcrossRegions, share: Ratio, known: int, own: int, cost: int
) -> int:
    """Return the units that one limit has room for at these levels; negative if it is above.

    A region with nothing but accepted units may admit one request of an eventual limit, whatever
    its share is: a share is often too small for a single request of many units.
    """
    # If no other region asks, rounding down loses nothing.
    if across == "exact" or share.numerator == share.denominator:
        return room_at(limit, share, known, own)
    left = limit.capacity * MICROS_PER_UNIT - known
    # Rounds up to a whole unit: otherwise a small limit would be lost between the regions.
    part = -(-left * share.numerator // (share.denominator * MICROS_PER_UNIT))
    if not own and cost * MICROS_PER_UNIT <= left:
        return max(part, cost)
    return (part * MICROS_PER_UNIT - own) // MICROS_PER_UNIT


def decision_of(
    limits: Limits,
    ledgers: Sequence[Ledger],
    across: AcrossRegions,
    share: Ratio,
    now_ns: int,
    cost: int,
    rule: str,
    *,
    charged: bool,
    granted: int,
    step_ns: int = 1,
) -> Decision:
    """Return the decision by the levels after the check. `granted` units are left on top.

    Waits are rounded up to whole steps of the store's clock.
    """
    outcomes = []
    cost = max(cost - granted, 0)
    # Own units of an eventual limit are accepted soon, and then drain at the whole rate.
    drains: Ratio = share if across == "exact" else 1
    for ledger in ledgers:
        known, own = ledger.levels(now_ns, share)
        room = room_of(ledger.limit, across, share, known, own, cost)
        if drains is not share:
            known, own = ledger.levels(now_ns, drains)
        now_load = drains.numerator * known + drains.denominator * own
        allowed, remaining, retry_ns, reset_ns, delay_ns, charged_ns = outcome(
            ledger, now_ns, drains, now_load, cost, room, charged=charged
        )
        if across == "eventual" and retry_ns == 1:
            retry_ns = ROUND_NS
        retry_ns, reset_ns = retry_ns // -step_ns * -step_ns, reset_ns // -step_ns * -step_ns
        left = remaining + granted
        if len(ledgers) == 1:  # the usual case: nothing is to be combined
            fields = (allowed, limits[0], left, retry_ns, reset_ns, delay_ns, rule, False)
            return Decision(*fields, charged_ns, now_ns, granted)
        outcomes.append((allowed, left, retry_ns, reset_ns, delay_ns, charged_ns))
    return combine(limits, outcomes, rule, now_ns, [granted] * len(limits) if granted else ())


def require_room(limits: Sequence[Limit], share: Ratio, cost: int) -> None:
    """Raise CapacityError for a cost that never fits this region's share of an exact limit."""
    parts, whole = share.numerator, share.denominator
    for limit in limits:
        if cost * whole > parts * limit.capacity:
            fits = None if parts == whole else limit.capacity * parts // whole
            raise CapacityError(cost, limit, fits)


def micros_left(limit: Limit, micros: int, now_ns: int, charged_ns: int) -> int:
    """Return how many of the micro-units that were charged then time has not returned yet."""
    if limit.algorithm == "sliding_window_log":
        return micros if now_ns - charged_ns < limit.window_ns else 0
    return _certainly_left(limit, micros, now_ns, charged_ns)


def _certainly_left(limit: Limit, micros: int, now_ns: int, since_ns: int) -> int:
    """Return how many of the micro-units that counted at `since_ns` certainly count now."""
    if limit.algorithm not in BUCKETS:
        return micros if since_ns // limit.window_ns == now_ns // limit.window_ns else 0
    elapsed_ns = max(now_ns - since_ns, 0)
    steps_ns = -(-elapsed_ns // limit.refill_step_ns) * limit.refill_step_ns
    drained = -(-steps_ns * limit.micros_numerator // limit.ns_denominator)
    return max(micros - drained, 0)


def _is_accepted(subject: _Counts) -> bool:
    return (subject.total, subject.returned) == (subject.accepted, subject.accepted_returned)


def _report_of(key: SubjectKey, subject: _Counts, share: Fraction, now_ns: int) -> Report:
    counts = []
    others = [seen.left_now(subject.limits, now_ns) for seen in subject.seen.values()]
    for place, ledger in enumerate(subject.ledgers):
        known, own = ledger.levels(now_ns, share)
        if subject.across == "eventual":
            own += max(known - sum(left[place] for left in others), 0)
        counts.append(own)
    return Report(
        key,
        subject.limits,
        subject.across,
        subject.generation,
        subject.total,
        subject.returned,
        tuple(counts),
        subject.demand.sum(now_ns, DEMAND_NS),
        subject.part.sum(now_ns, subject.window_ns),
        now_ns,
    )


def _excess(ledger: Ledger, now_ns: int, share: Fraction) -> int:
    capacity = ledger.limit.capacity
    usual = (capacity + max(capacity // _USUAL_PART, _USUAL_UNITS)) * MICROS_PER_UNIT
    return max(sum(ledger.levels(now_ns, share)) - usual, 0)


class MemoryRegionalCounter(GlobalCounter):
    """A global rule's limits in memory."""

    def __init__(
        self, counts: MemoryRegional, limits: Limits, rule: str, across: AcrossRegions
    ) -> None:
        self.limits = limits
        self._counts = counts
        self._rule = rule
        self._number = rule_number(limits, rule)
        self._across: AcrossRegions = across

    def check(self, subject: str, cost: int) -> Decision:
        """See Counter.check."""
        return self._check(subject, cost, spend=True)

    def peek(self, subject: str, cost: int) -> Decision:
        """See Counter.peek."""
        return self._check(subject, cost, spend=False)

    def _check(self, subject: str, cost: int, *, spend: bool) -> Decision:
        key = SubjectKey(self._number, subject)
        return self._counts.check(key, self.limits, self._across, self._rule, cost, spend=spend)

    def refund(self, subject: str, units: int, charged_ns: int | None) -> None:
        """See Counter.refund."""
        self._counts.refund(SubjectKey(self._number, subject), units, charged_ns)

    def grant(self, subject: str, units: int, ttl_ns: int | None) -> None:
        """See Counter.grant. The units are for this region."""
        key = SubjectKey(self._number, subject)
        self._counts.grant(key, self.limits, self._across, units, ttl_ns)

    def reset(self, subject: str) -> None:
        """See Counter.reset. It forgets the counts of this region."""
        self._counts.reset(SubjectKey(self._number, subject))

    def fast_check(self, fallback: Callable[..., Decision]) -> None:
        """Return None: there is no compiled check."""
