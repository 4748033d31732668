"""Which reports a region's leader sends to which region, and which totals all have accepted.

`Sync` is pure: it does no I/O and reads no clock. The leader (`exchange.py`), the property tests
and the simulator drive it:

    reports = await own.due(DUE_MAX, token)
    for region, batch in sync.sending(reports, now_ns).items():
        try:
            answers = await others[region].learn(name, batch.epoch, batch.reports)
        except StoreError:
            sync.failed(region, batch)
        else:
            sync.answered(region, batch, answers, now_ns)
    await own.accept(sync.epoch, sync.accepted(), token)

Losing this state is harmless. The own store has the totals, and a total that was not accepted is
due again after REPEAT_NS. So all tables here are bounded and drop entries: a report that found no
room in a queue, or whose subject was dropped, is sent again.

A total of an *exact* limit is accepted when all other regions of the epoch have accepted it, and
one of an *eventual* limit when all live ones have. If a region is not live, the store reports the
subject again from time to time until that region has learnt it too (`Accepted.everywhere`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ratekeeper.core.histogram import Histogram
from ratekeeper.core.model import MICROS_PER_UNIT
from ratekeeper.decide.region_monitor import PeerCounts
from ratekeeper.decide.regional import (
    MISSED_NS,
    Accepted,
    AcrossRegions,
    Learnt,
    Report,
    SubjectKey,
)

# Reports in one call of another region's store, and such calls at a time.
BATCH_MAX: Final = 500
BATCHES_MAX: Final = 8
# Subjects that wait for one region.
WAITING_MAX: Final = 20_000
# Subjects whose last total some other region has not accepted.
SUBJECTS_MAX: Final = 50_000
# The store reports a total that a region has missed every MISSED_NS. A total that it has not
# reported for this time no longer counts.
GONE_NS: Final = 2 * MISSED_NS


class Batch(NamedTuple):
    """Reports for one call of another region's store."""

    epoch: int
    reports: list[Report]
    since_ns: int
    """Since when the oldest of them waits."""


class Excess(NamedTuple):
    """A subject that another region's report has brought above its limit."""

    key: SubjectKey
    units: int


# Admitted units, and the returned units of each limit.
_Totals = tuple[int, tuple[int, ...]]


@dataclass(slots=True)
class _Reported:
    """The last total of one subject, and the totals that other regions have accepted."""

    generation: int
    across: AcrossRegions
    total: int
    returned: tuple[int, ...]
    accepted: dict[str, _Totals] = field(default_factory=dict)
    done: _Totals | None = None
    """The total and the returned units that were last passed to `accept`."""
    again: bool = False
    """The store reports this total again, so `accept` has not reached it, or a region missed it."""
    unaccepted: int = 0


class _Queue:
    """The reports that wait for one region, the batches in flight to it, and what it has missed."""

    __slots__ = ("in_flight", "missed", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[SubjectKey, tuple[int, Report]] = {}
        self.in_flight: list[Batch] = []
        self.missed: dict[SubjectKey, tuple[int, int]] = {}
        """Subjects with a total that could not be sent: since when, and when it was last due."""

    def add(self, report: Report, now_ns: int) -> None:
        """Keep the newest report of a subject, in the place of the one that waits."""
        found = self.waiting.get(report.key)
        if found is not None:
            self.waiting[report.key] = found[0], report
        elif len(self.waiting) < WAITING_MAX:
            self.waiting[report.key] = now_ns, report

    def take(self, epoch: int) -> Batch | None:
        """Take a batch; None if too many are in flight or no report waits."""
        if not self.waiting or len(self.in_flight) >= BATCHES_MAX:
            return None
        keys = [key for key, _ in zip(self.waiting, range(BATCH_MAX), strict=False)]
        taken = [self.waiting.pop(key) for key in keys]
        batch = Batch(epoch, [report for _, report in taken], min(at_ns for at_ns, _ in taken))
        self.in_flight.append(batch)
        return batch

    def miss(self, key: SubjectKey, since_ns: int, due_ns: int) -> None:
        """Note that the region lacks a total that was due."""
        found = self.missed.get(key)
        if found is not None:
            self.missed[key] = found[0], due_ns
        elif len(self.missed) < WAITING_MAX:
            self.missed[key] = since_ns, due_ns

    def stop(self) -> None:
        """Send nothing more: the region cannot be reached."""
        for key, (at_ns, _) in self.waiting.items():
            self.miss(key, at_ns, at_ns)
        self.waiting.clear()

    def finish(self, batch: Batch, *, answered: bool) -> None:
        """Note that a batch is no longer in flight."""
        self.in_flight = [each for each in self.in_flight if each is not batch]
        for report in batch.reports:
            if answered:
                self.missed.pop(report.key, None)
            else:
                self.miss(report.key, batch.since_ns, batch.since_ns)

    def since_ns(self, now_ns: int) -> int | None:
        """Return since when the region lacks the oldest total; None if it has all."""
        times = [batch.since_ns for batch in self.in_flight]
        for at_ns, _ in self.waiting.values():  # they are in order
            times.append(at_ns)
            break
        while self.missed:  # they are nearly in order
            key, (since_ns, due_ns) = next(iter(self.missed.items()))
            if now_ns - due_ns <= GONE_NS:
                times.append(since_ns)
                break
            del self.missed[key]
        return min(times, default=None)


@dataclass(slots=True)
class _Exchanged:
    """The counts of the exchange with one region."""

    accepted: int = 0
    pending: int = 0
    failed: int = 0
    excess_units: int = 0
    seconds: Histogram = field(default_factory=Histogram)


class Sync:
    """The exchange of one region's leader. Pure and bounded."""

    def __init__(self) -> None:
        self.epoch = 0
        self.unaccepted_units = 0
        """About how many units of the subjects known here are not accepted by all regions."""
        self.holds_exact = False
        """True while exact totals are not sent, because not all regions reach each other."""
        self._others: frozenset[str] = frozenset()
        self._live: frozenset[str] = frozenset()
        self._usable: frozenset[str] = frozenset()
        self._subjects: dict[SubjectKey, _Reported] = {}
        self._queues: dict[str, _Queue] = {}
        self._accepted: list[Accepted] = []
        self._counted: dict[str, _Exchanged] = {}

    def use(
        self,
        others: Iterable[str],
        live: Collection[str],
        epoch: int,
        usable: Collection[str] | None = None,
        *,
        is_whole: bool = True,
    ) -> None:
        """Set the other regions of an epoch, and those of them that are live.

        Reports go to the `usable` regions, by default all live ones. `is_whole` is False if two of
        the other regions do not reach each other. Acceptances of another epoch do not count.
        """
        others = frozenset(others)
        if (others, epoch) != (self._others, self.epoch):
            self._others, self.epoch = others, epoch
            self._subjects.clear()
            self._queues.clear()
            self._accepted.clear()
            self.unaccepted_units = 0
        self._live = others & frozenset(live)
        self._usable = self._live if usable is None else others & frozenset(usable)
        self.holds_exact = not is_whole or self._usable != others
        for region in self._queues.keys() - self._usable:
            self._queues[region].stop()

    def sending(self, reports: Iterable[Report], now_ns: int) -> dict[str, Batch]:
        """Return a batch for each region that can take one now, also without new reports.

        The caller must pass each batch to `answered` or `failed`.
        """
        others = sorted(self._others)  # a simulation must be repeatable
        for report in reports:
            subject = self._noted(report)
            # A total of an exact limit is of use only if all regions accept it. If one cannot be
            # reached, the others would count these units as well, and deliver less than their
            # shares: with four of five regions joined, 0.6 of them. A region that reaches all
            # others also holds its totals back while two others do not reach each other: these two
            # cannot report theirs, so it would take the whole rate, and leave nothing for them.
            is_held = report.across == "exact" and self.holds_exact
            for region in others:
                if _is_known(subject, region, report):
                    continue
                if is_held or region not in self._usable:
                    self._queue(region).miss(report.key, now_ns, now_ns)
                else:
                    self._queue(region).add(report, now_ns)
            self._settle(report.key, subject)
        usable = (region for region in others if region in self._usable)
        taken = {region: self._queue(region).take(self.epoch) for region in usable}
        return {region: batch for region, batch in taken.items() if batch is not None}

    def answered(
        self, region: str, batch: Batch, answers: Sequence[Learnt], now_ns: int
    ) -> list[Excess]:
        """Note the answers to a batch, in order; return the subjects above their limit."""
        self._queue(region).finish(batch, answered=True)
        counted = self._counted.setdefault(region, _Exchanged())
        counted.seconds.note(max(now_ns - batch.since_ns, 0), len(batch.reports))
        excesses = []
        for report, answer in zip(batch.reports, answers, strict=True):
            if answer.excess:
                counted.excess_units += answer.excess
                excesses.append(Excess(report.key, answer.excess))
            if not answer.accepted:
                counted.pending += 1
                continue
            counted.accepted += 1
            subject = self._subjects.get(report.key)
            # An answer to a total of another epoch, or of counts that were reset meanwhile.
            if batch.epoch != self.epoch or subject is None:
                continue
            if subject.generation == report.generation:
                total, returned = subject.accepted.get(region, (0, ()))
                subject.accepted[region] = (
                    max(total, report.total),
                    max(returned, report.returned),
                )
                self._settle(report.key, subject)
        return excesses

    def failed(self, region: str, batch: Batch) -> None:
        """Note that a batch got no answer. The other region may or may not have counted it."""
        self._queue(region).finish(batch, answered=False)
        self._counted.setdefault(region, _Exchanged()).failed += len(batch.reports)

    def accepted(self) -> list[Accepted]:
        """Return the totals that were accepted since the last call, for the store's `accept`."""
        found, self._accepted = self._accepted, []
        return found

    # ── For operators ──────────────────────────────────────────────────────────────────────────

    def waits_since_ns(self, region: str, now_ns: int) -> int | None:
        """Return since when a region lacks the oldest total; None if it has all.

        Also while no report is sent, because the region cannot be reached.
        """
        queue = self._queues.get(region)
        return None if queue is None else queue.since_ns(now_ns)

    def in_flight(self, region: str) -> int:
        """Return the number of batches in flight to a region."""
        queue = self._queues.get(region)
        return 0 if queue is None else len(queue.in_flight)

    def counts(self, region: str) -> PeerCounts:
        """Return the counts of the exchange with a region, without the bytes."""
        found = self._counted.get(region, _Exchanged())
        return PeerCounts(
            accepted=found.accepted,
            pending=found.pending,
            failed=found.failed,
            excess_units=found.excess_units,
            seconds=found.seconds.data(),
        )

    # ── Subjects ───────────────────────────────────────────────────────────────────────────────

    def _queue(self, region: str) -> _Queue:
        found = self._queues.get(region)
        if found is None:
            found = self._queues[region] = _Queue()
        return found

    def _noted(self, report: Report) -> _Reported:
        """Return the state of a report's subject, updated with the new total."""
        subject = self._subjects.get(report.key)
        if subject is None or (subject.generation, subject.across) != (
            report.generation,
            report.across,
        ):
            self._forget(report.key)
            if len(self._subjects) >= SUBJECTS_MAX:
                self._forget(next(iter(self._subjects)))
            subject = _Reported(report.generation, report.across, 0, ())
            self._subjects[report.key] = subject
        subject.total, subject.returned = report.total, report.returned
        subject.again = subject.done == (report.total, report.returned)
        units = min(-(-max(report.counts) // MICROS_PER_UNIT), report.total)
        self.unaccepted_units += units - subject.unaccepted
        subject.unaccepted = units
        return subject

    def _forget(self, key: SubjectKey) -> None:
        subject = self._subjects.pop(key, None)
        if subject is not None:
            self.unaccepted_units -= subject.unaccepted

    def _settle(self, key: SubjectKey, subject: _Reported) -> None:
        """Accept the total that all required regions have accepted."""
        needed = self._others if subject.across == "exact" else self._live
        done = _least(subject, needed)
        if done is None or (done == subject.done and not subject.again):
            return
        if subject.done is not None and (done[0] < subject.done[0] or done[1] < subject.done[1]):
            return  # a region that was away is back, and has not learnt the totals of the others
        subject.done, subject.again = done, False
        last = (subject.total, subject.returned)
        everywhere = _least(subject, self._others) == last
        self._accepted.append(Accepted(key, subject.generation, *done, everywhere))
        if done != last:
            return
        if everywhere:
            self._forget(key)
        else:
            self.unaccepted_units -= subject.unaccepted
            subject.unaccepted = 0


def _least(subject: _Reported, regions: Collection[str]) -> _Totals | None:
    """Return the total and the returned units that all of these regions have accepted."""
    if any(region not in subject.accepted for region in regions):
        return None
    found = [subject.accepted[region] for region in regions]
    found.append((subject.total, subject.returned))
    return min(total for total, _ in found), min(returned for _, returned in found)


def _is_known(subject: _Reported, region: str, report: Report) -> bool:
    """Return True if a region has already accepted all units of a report."""
    has_demand = report.across == "eventual" and report.demand
    return not has_demand and subject.accepted.get(region) == (report.total, report.returned)
