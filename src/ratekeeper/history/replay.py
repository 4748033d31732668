"""Replays recorded decisions under the rules in force and under a draft of them.

Both documents get the same requests at the same times, each on an empty store in memory, with the
assignments, overrides and lists that stand beside the document. The differences are those between
the two replays. The share of recorded decisions that the replay of the rules in force repeats shows
how far to trust them.

**Samples.** All denials are recorded, and a share of the allowed requests: 1 % by default. If the
share is below 1, a recorded allowed request stands for 1 / share requests. The replay makes that
many, spread evenly until the next recorded request of the same client; the last ones at the pace of
those before. The sum is right on average. The replay cannot know when these requests came, nor any
client of which no request was recorded. So all its numbers are estimates.

**Bounds.** Each request of the replay is a step of `Replay.steps`, so that a caller can pause
between steps, and stop. The report then covers the requests so far, the same for both documents.
Nothing here reads a clock or waits.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from heapq import heappop, heappush, nsmallest
from itertools import chain
from typing import Final, NamedTuple

from ratekeeper.core.clock import ManualClock
from ratekeeper.core.errors import CapacityError, RatekeeperError
from ratekeeper.core.model import Limits, Request
from ratekeeper.decide.failure import FailurePolicy, LocalFallback, LocalLimits
from ratekeeper.decide.stores import open_store
from ratekeeper.history.events import (
    LISTED,
    SubjectMode,
    caller_of,
    rule_of,
    subject_of,
)
from ratekeeper.history.reading import RecordedRequest, RequestFields
from ratekeeper.history.recorded import (
    ENTRIES_DIGESTED_MAX,
    RecordedRequests,
    entry_values,
    hidden_fields,
    is_replayable,
    named_values,
    replayed_document,
    unreadable,
)
from ratekeeper.limiter.path import CheckPath
from ratekeeper.metrics.tally import Counts
from ratekeeper.rules.document.model import Document, Rule
from ratekeeper.rules.engine import RuleEngine
from ratekeeper.rules.entry_table import EntryTable

RULES_MAX: Final = 100
SUBJECTS_MAX: Final = 50
ENDPOINTS_MAX: Final = 20
EXAMPLES_MAX: Final = 20
# The subject of a rule that counts all requests together.
_EVERYONE: Final = "*"
_NS_PER_US: Final = 1_000
_FOREVER_NS: Final = 2**63


class ReplayOutcome(NamedTuple):
    """The decision on a request in one of the replays."""

    denied: bool
    rule: str
    """The rule or list that decided."""
    subject: str
    """The subject that the rule counts; the client if the rule counts no subject."""
    shadows: tuple[str, ...]
    """The rules in shadow mode that would have denied the request."""
    retry_after_ns: int = 0


class Change(NamedTuple):
    """Denials of a rule, a subject, an endpoint, or of all, in both replays."""

    before: int = 0
    after: int = 0
    newly_denied: int = 0
    newly_allowed: int = 0
    shadow_before: int = 0
    """Of a rule: requests that it would have denied if it were not in shadow mode."""
    shadow_after: int = 0

    @property
    def size(self) -> int:
        """How much differs, to order changes by."""
        moved = self.newly_denied + self.newly_allowed
        shadows = abs(self.shadow_after - self.shadow_before)
        return max(abs(self.after - self.before), moved) + shadows


# The fields of a Change, as a plain tuple; see RequestFields.
_Counts = tuple[int, int, int, int, int, int]
_NOTHING: Final[_Counts] = (0, 0, 0, 0, 0, 0)
_BOTH: Final[_Counts] = (1, 1, 0, 0, 0, 0)
_DENIED: Final[_Counts] = (0, 1, 1, 0, 0, 0)
_ALLOWED: Final[_Counts] = (1, 0, 0, 1, 0, 0)
# Both deny it, by another rule or for another subject: it moves from one to the other.
_GONE: Final[_Counts] = (1, 0, 0, 0, 0, 0)
_COME: Final[_Counts] = (0, 1, 0, 0, 0, 0)
_SHADOW_BEFORE: Final[_Counts] = (0, 0, 0, 0, 1, 0)
_SHADOW_AFTER: Final[_Counts] = (0, 0, 0, 0, 0, 1)


class _Changes:
    """Changes by a name."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def add(self, name: str, more: _Counts) -> None:
        a, b, c, d, e, f = self._counts.get(name, _NOTHING)
        self._counts[name] = (
            a + more[0],
            b + more[1],
            c + more[2],
            d + more[3],
            e + more[4],
            f + more[5],
        )

    def get(self, name: str) -> Change:
        return Change._make(self._counts.get(name, _NOTHING))

    def largest(self, count: int) -> list[tuple[str, Change]]:
        """Return the largest changes; those that deny the most first among equals."""
        found = ((name, Change._make(each)) for name, each in self._counts.items())

        def order(item: tuple[str, Change]) -> tuple[int, int, int, str]:
            name, change = item
            return -change.size, -change.after, -change.before, name

        return nsmallest(count, found, key=order)


class Example(NamedTuple):
    """A recorded request whose decision differs."""

    request: RecordedRequest
    before: ReplayOutcome
    after: ReplayOutcome


class LeftOut(NamedTuple):
    """A rule that cannot be replayed from the records."""

    rule: str
    why: str
    decisions: int
    """Recorded decisions that the rule took part in."""


class ReplayReport(NamedTuple):
    """The results of the replays."""

    decisions: int
    """Recorded decisions that were replayed."""
    requests: int
    """Requests that they stand for."""
    recorded_denied: int
    agreed: int
    """Recorded decisions that have the same outcome in the replay of the rules in force."""
    first_us: int
    last_us: int
    total: Change
    rules: list[tuple[str, Change]]
    subjects: list[tuple[str, Change]]
    endpoints: list[tuple[str, Change]]
    examples: list[Example]
    left_out: list[LeftOut]
    notes: list[str]


def sampled_weight(row: RecordedRequest, share: float) -> float:
    """Return the number of requests that a recorded decision stands for.

    Denials, and requests that a rule in shadow mode would have denied, are always recorded.
    """
    is_sampled = row.outcome == "allowed" and row.shadow_denied == "[]"
    return 1.0 / share if is_sampled and 0 < share < 1 else 1.0


class Replay:
    """Recorded decisions under the rules in force (*before*) and under a draft (*after*)."""

    def __init__(
        self,
        rows: Sequence[RequestFields],
        in_force: Document,
        draft: Document,
        *,
        entries: EntryTable | None = None,
        share: float = 1.0,
        subjects: SubjectMode = "plain",
        on_failure: FailurePolicy = "open",
    ) -> None:
        """Prepare a replay.

        `rows`       the recorded decisions, the oldest first.
        `entries`    the assignments, overrides and list entries beside both documents.
        `share`      the share of the allowed requests that was recorded.
        `subjects`   how subjects were recorded.
        `on_failure` the failure policy of rules that have none.
        """
        self._rows = rows
        self._documents = in_force, draft
        self._entries = entries or EntryTable()
        self._share = share
        self._mode: SubjectMode = subjects
        self._on_failure: FailurePolicy = on_failure
        self._requests = RecordedRequests(subjects)
        self._hidden: frozenset[str] = frozenset()
        self._entries_learnt = 0
        self._left_out: dict[str, str] = {}
        self._left_out_decisions: dict[str, int] = {}
        self._decisions = self._denied = self._agreed = self._made = 0
        self._last_us = 0
        self._total = _Changes()
        self._rules = _Changes()
        self._subjects = _Changes()
        self._endpoints = _Changes()
        self._examples: dict[tuple[str, str, bool], Example] = {}

    # ── The steps ────────────────────────────────────────────────────────────────────────────

    def steps(self) -> Generator[None]:
        """Replay; each step takes microseconds."""
        yield from self._learn()
        self._leave_out()
        clock = ManualClock()
        before, after = (
            _Side(replayed_document(each, self._left_out), clock, self._entries, self._on_failure)
            for each in self._documents
        )
        schedule = _Schedule()
        try:
            yield from self._prepare(schedule)
            for at_ns, place, is_recorded in schedule.in_order():
                clock.advance_ns(max(at_ns - clock.now_ns(), 0))
                row = RecordedRequest._make(self._rows[place])
                request = self._requests.request_of(row)
                found = before.outcome(request, row.cost), after.outcome(request, row.cost)
                self._note(row, *found, is_recorded=is_recorded)
                yield
        finally:
            before.close()
            after.close()

    def _learn(self) -> Iterator[None]:
        """Learn the values of digests, and which rules took part in the decisions."""
        hidden = hidden_fields(self._mode)
        for document in self._documents:
            for value in named_values(document, hidden):
                self._requests.learn_value(value)
                yield
        for values in entry_values(self._entries, hidden):
            for value in values:
                self._requests.learn_value(value)
                yield
            self._entries_learnt += len(values)
            yield
        ids = frozenset(rule.id for rule in self._documents[0].rules)
        replayable: list[RequestFields] = []
        taken_part = self._left_out_decisions
        for fields in self._rows:
            row = RecordedRequest._make(fields)
            applied = json.loads(row.rules)
            if is_replayable(row, applied, ids):
                replayable.append(fields)
                self._requests.learn_row(row)
                for rule in applied:
                    taken_part[rule] = taken_part.get(rule, 0) + 1
            yield
        self._rows = replayable

    def _leave_out(self) -> None:
        hidden = self._hidden = self._requests.hidden()
        for document in self._documents:
            for rule in document.rules:
                why = unreadable(rule, self._mode, hidden)
                if why and rule.mode != "off":
                    self._left_out[rule.id] = why

    def _prepare(self, schedule: _Schedule) -> Iterator[None]:
        """Add the times of the decisions, and of the copies that each stands for."""
        gaps_ns: list[int] = []
        yield from self._measure_gaps(gaps_ns)
        owed = 0.0
        for fields, gap_ns in zip(self._rows, reversed(gaps_ns), strict=True):
            row = RecordedRequest._make(fields)
            owed += sampled_weight(row, self._share)
            copies = int(owed)
            owed -= copies
            schedule.add(row.at_us * _NS_PER_US, copies, gap_ns // max(copies, 1))
            yield

    def _measure_gaps(self, gaps_ns: list[int]) -> Iterator[None]:
        """Add the time over which the copies of each row are spread, the newest row first.

        It lasts until the next sampled row of the client. For the last one it is as long as for
        the one before; for the only one, as long as the whole period.
        """
        period_us = self._rows[-1][0] - self._rows[0][0] if self._rows else 0
        # Of each client: the time of the next row, and the place of a row without a next one.
        following: dict[tuple[str, ...], int] = {}
        last: dict[tuple[str, ...], int] = {}
        for fields in reversed(self._rows):
            row = RecordedRequest._make(fields)
            gap_us = 0
            if sampled_weight(row, self._share) > 1:
                client = (row.user_id, row.tenant, row.api_key, row.ip)
                if client not in following:
                    gap_us, last[client] = period_us, len(gaps_ns)
                else:
                    gap_us = following[client] - row.at_us
                    if client in last:
                        gaps_ns[last.pop(client)] = gap_us * _NS_PER_US
                following[client] = row.at_us
            gaps_ns.append(gap_us * _NS_PER_US)
            yield

    def _note(
        self,
        row: RecordedRequest,
        before: ReplayOutcome | None,
        after: ReplayOutcome | None,
        *,
        is_recorded: bool,
    ) -> None:
        """Count a request; None: its fields cannot be counted, which the service rejects."""
        if before is None or after is None:
            return
        self._made += 1
        if is_recorded:
            was_denied = row.outcome == "denied"
            self._decisions += 1
            self._denied += was_denied
            self._agreed += was_denied == before.denied
            self._last_us = row.at_us
        for rule in before.shadows:
            self._rules.add(rule, _SHADOW_BEFORE)
        for rule in after.shadows:
            self._rules.add(rule, _SHADOW_AFTER)
        if before.denied or after.denied:
            self._note_denial(row, before, after)
            if is_recorded and before.denied != after.denied:
                self._note_example(row, before, after)

    def _note_denial(
        self, row: RecordedRequest, before: ReplayOutcome, after: ReplayOutcome
    ) -> None:
        change = _BOTH if before.denied and after.denied else _DENIED if after.denied else _ALLOWED
        self._total.add("", change)
        self._endpoints.add(row.endpoint, change)
        for table, old, new in (
            (self._rules, before.rule, after.rule),
            (self._subjects, before.subject, after.subject),
        ):
            if change is _BOTH and old != new:
                table.add(old, _GONE)
                table.add(new, _COME)
            else:
                table.add(old if before.denied else new, change)

    def _note_example(
        self, row: RecordedRequest, before: ReplayOutcome, after: ReplayOutcome
    ) -> None:
        if len(self._examples) < EXAMPLES_MAX:
            denial = before if before.denied else after
            key = (denial.rule, denial.subject, before.denied)
            self._examples.setdefault(key, Example(row, before, after))

    # ── The report ───────────────────────────────────────────────────────────────────────────

    def report(self) -> ReplayReport:
        """Return the results of the steps so far."""
        first_us = self._rows[0][0] if self._rows else 0
        return ReplayReport(
            self._decisions,
            self._made,
            self._denied,
            self._agreed,
            first_us,
            max(self._last_us, first_us),
            self._total.get(""),
            self._rules.largest(RULES_MAX),
            self._subjects.largest(SUBJECTS_MAX),
            self._endpoints.largest(ENDPOINTS_MAX),
            list(self._examples.values()),
            [
                LeftOut(rule, why, self._left_out_decisions.get(rule, 0))
                for rule, why in self._left_out.items()
            ],
            list(self._notes(first_us)),
        )

    def _notes(self, first_us: int) -> Iterator[str]:
        """Yield the facts that the replay cannot know, in sentences."""
        if self._share <= 0:
            yield (
                "No allowed request is recorded (--sample 0), so the replay has only the denied "
                "ones. Record a share of the allowed requests, for example --sample 0.1."
            )
        elif self._share < 1:
            yield (
                f"An estimate: of the allowed requests, {_percent(self._share)} are recorded. Each "
                f"stands for {1 / self._share:,.4g} requests, spread evenly until the client's "
                f"next recorded request; the replay cannot know their real times, nor clients "
                f"without a recorded request. With --sample 1 every request is recorded."
            )
        active = [
            rule
            for document in self._documents
            for rule in document.rules
            if rule.mode != "off" and rule.id not in self._left_out
        ]
        covered_ns = (self._last_us - first_us) * _NS_PER_US
        tiers = [one.limits for document in self._documents for one in document.tiers.values()]
        long = [rule for rule in active if _longest_ns(rule, tiers) > covered_ns]
        if long and self._rows:
            yield (
                f"Both replays begin with unused limits. The period is shorter than a window of "
                f"{_ids(long)}, so the real counts of these rules are higher."
            )
        if scaled := [rule for rule in active if rule.scale]:
            yield f"Loads are not recorded: {_ids(scaled)} are replayed with their base limits."
        if tiered := [rule for rule in active if rule.tiers or rule.match.tier or not rule.limits]:
            yield (
                f"The tier that a caller names with a request is not recorded; {_ids(tiered)} are "
                f"replayed with the assigned tiers."
            )
        lists = [document.allow or document.deny for document in self._documents]
        if self._hidden and (any(lists) or self._entries.lists):
            yield (
                f"The records have digests of {', '.join(sorted(self._hidden))}: list entries that "
                f"are patterns or networks do not apply to them in the replay."
            )
        if self._entries_learnt >= ENTRIES_DIGESTED_MAX:
            yield (
                f"There are more than {ENTRIES_DIGESTED_MAX:,} assignments, overrides and list "
                f"entries of fields that are recorded as digests; the others do not apply here."
            )
        partial = [rule for rule in active if rule.rollout < 100 and self._counts_digests(rule)]
        if partial:
            yield (
                f"The rollout of {_ids(partial)} reaches about as many clients in the replay, but "
                f"other ones, because these clients are recorded as digests."
            )

    def _counts_digests(self, rule: Rule) -> bool:
        return not self._hidden.isdisjoint(rule.by)


class _Side:
    """One document on an empty store, at the time of the recorded decisions."""

    def __init__(
        self, document: Document, clock: ManualClock, entries: EntryTable, policy: FailurePolicy
    ) -> None:
        self._store = open_store("memory://", clock=clock)
        counts = Counts()
        self._engine = RuleEngine(self._store, document, clock, counts, entries=entries)
        self._engine.penalties.is_logged = False
        local = LocalLimits(LocalFallback(), clock)
        self._path = CheckPath(self._store, policy, local, counts, self._engine.penalties)

    def outcome(self, request: Request, cost: int) -> ReplayOutcome | None:
        """Decide a request; None if it cannot be counted."""
        try:
            plan = self._engine.compiled_rules.plan(request, cost)
            result = self._path.result(plan, *self._path.decide(plan, request))
        except CapacityError:
            return self._never_fits(request, cost)
        except RatekeeperError:
            return None
        decision = result.decision
        if decision.allowed:
            return ReplayOutcome(False, "", "", result.shadow_denied)
        subject = subject_of(result)
        if subject in {"", _EVERYONE}:
            subject = caller_of(request) or subject
        return ReplayOutcome(
            True, rule_of(result), subject, result.shadow_denied, decision.retry_after_ns
        )

    def _never_fits(self, request: Request, cost: int) -> ReplayOutcome:
        """Return the denial of a cost above the capacity of a limit, which the service rejects."""
        plan = self._engine.compiled_rules.plan(request, cost)
        for check in plan.enforced:
            if check.units > min(limit.capacity for limit in check.prepared.limits):
                return ReplayOutcome(True, check.rule.id, check.subject, ())
        return ReplayOutcome(True, LISTED["unlimited"], caller_of(request), ())

    def close(self) -> None:
        self._store.close()


class _Schedule:
    """The times of the recorded decisions and their copies, in lists of numbers."""

    def __init__(self) -> None:
        self._at_ns: list[int] = []
        self._copies: list[int] = []
        self._step_ns: list[int] = []

    def add(self, at_ns: int, copies: int, step_ns: int) -> None:
        """Add the next decision; `copies` is the number of its requests, also of itself."""
        self._at_ns.append(at_ns)
        self._copies.append(copies)
        self._step_ns.append(step_ns)

    def in_order(self) -> Iterator[tuple[int, int, bool]]:
        """Yield the time of each request, the place of its decision, and False for a copy."""
        # The next copy of each decision that has more: its time, the place, and its number.
        waiting: list[tuple[int, int, int]] = []
        for place, at_ns in enumerate(self._at_ns):
            yield from self._until(at_ns, waiting)
            yield at_ns, place, True
            if self._copies[place] > 1:
                heappush(waiting, (at_ns + self._step_ns[place], place, 1))
        yield from self._until(_FOREVER_NS, waiting)

    def _until(
        self, now_ns: int, waiting: list[tuple[int, int, int]]
    ) -> Iterator[tuple[int, int, bool]]:
        while waiting and waiting[0][0] <= now_ns:
            at_ns, place, number = heappop(waiting)
            yield at_ns, place, False
            if number + 1 < self._copies[place]:
                heappush(waiting, (at_ns + self._step_ns[place], place, number + 1))


def _longest_ns(rule: Rule, tiers: Sequence[Limits]) -> int:
    ones = chain(rule.tiers.values(), rule.keys.values())
    sets = [rule.limits, *(one.limits for one in ones)]
    if not rule.limits:
        sets += tiers
    return max((limit.window_ns for limits in sets for limit in limits), default=0)


def _ids(rules: Sequence[Rule]) -> str:
    """Return the ids of rules for a sentence, a few of them."""
    ids = list(dict.fromkeys(rule.id for rule in rules))
    shown = ", ".join(ids[:5])
    return f"{shown} and {len(ids) - 5} more" if len(ids) > 5 else shown


def _percent(share: float) -> str:
    """Return a share as a percentage.

    >>> _percent(0.01), _percent(0.125)
    ('1 %', '12.5 %')
    """
    return f"{share * 100:g} %"
