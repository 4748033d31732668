"""The in-process store in pure Python: the reference for the kernel.

Each limit of a rule has a table from subject to entry (state, expires_ns, credit). From expires_ns
on, an entry means the same as no entry, and may be dropped at any time. These bounds hold without a
background thread:

- A heap beside each table orders the entries by expiry. It has an item for each entry, whose time
  may be too early: an item that comes up before its entry has expired is put back. Each new entry
  removes up to two items, so expired entries go faster than new ones come. Items of entries that
  were reset stay behind; when they outnumber the entries, the heap is rebuilt.
- A full store first drops all expired entries. If there are none, it rejects the new key with
  StoreFull. It never evicts: otherwise a client that fills the store with throw-away keys could
  evict its own limited key.
- One lock protects everything. No code under it blocks or calls other modules' hooks.

Several checks of one request are first decided, each after the units of those before it. Then all
are charged, or none. The kernel's `rk_check_all` does the same.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, cast

from ratekeeper.core.clock import Clock
from ratekeeper.core.errors import CapacityError, StoreError, StoreFull, StoreUnavailable
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import IN_FLIGHT, Consistency, Decision, Limit, decision_with
from ratekeeper.decide import credit as credits_
from ratekeeper.decide.algorithms import ALGORITHMS, Algorithm, Outcome, State
from ratekeeper.decide.algorithms.in_flight import NO_STAMP, InFlight
from ratekeeper.decide.allowances import ALLOWANCES_MAX_DEFAULT, PythonAllowances
from ratekeeper.decide.combine import combine
from ratekeeper.decide.credit import Credit
from ratekeeper.decide.leasing import (
    LATE_KEPT_NS,
    NO_LEASE,
    Authority,
    GiveBack,
    LateCharge,
    Lease,
    LeaseCheck,
    LeasedAnswer,
    Report,
    may_be_given_back,
    size_of,
)
from ratekeeper.decide.regional import AcrossRegions
from ratekeeper.decide.store import (
    MARKS_MAX,
    Answer,
    Charge,
    StoreStats,
    require_regional,
    require_strict,
)

STATES_MAX_DEFAULT: Final = 1_000_000
# Two items off for each one on: the heap's backlog of expired entries shrinks with every insert.
_RECLAIM_PER_INSERT: Final = 2
# Rebuilding the heap pays off from here on; fewer left-over items do not matter.
_LEFT_OVER_ITEMS_MIN: Final = 64
# Names of settlements, of all subjects.
_MARKS_MAX: Final = 200_000

Entry = tuple[State, int, Credit | None]
_ABSENT: Final[Entry] = (None, 0, None)
# What earlier checks of the same call will write: the entry of a table and a subject.
_Pending = dict[tuple["_Table", str], Entry]
_NOTHING: Final[_Pending] = {}
# A decision, and the entries to write.
_Trial = tuple[Decision, list[Entry]]


class _Table:
    """One limit's states by subject, and the order in which they may expire."""

    __slots__ = ("entries", "expiries")

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.expiries: list[tuple[int, str]] = []

    def insert(self, subject: str, entry: Entry) -> None:
        """Add an entry whose expiry the heap does not know yet."""
        self.entries[subject] = entry
        if len(self.expiries) < 2 * len(self.entries) + _LEFT_OVER_ITEMS_MIN:
            heappush(self.expiries, (entry[1], subject))
        else:
            self.expiries = [(entry[1], subject) for subject, entry in self.entries.items()]
            heapify(self.expiries)

    def reclaim(self, now_ns: int, count: int) -> int:
        """Drop up to `count` expired entries; return how many were dropped."""
        entries, expiries = self.entries, self.expiries
        dropped = 0
        while count and expiries and expiries[0][0] <= now_ns:
            count -= 1
            _, subject = heappop(expiries)
            entry = entries.get(subject)
            if entry is None:
                continue  # reset, or refunded to nothing
            if entry[1] <= now_ns:
                del entries[subject]
                dropped += 1
            else:
                heappush(expiries, (entry[1], subject))
        return dropped


class _Marks:
    """The names of each subject's last settlements, and when all of them are forgotten."""

    def __init__(self) -> None:
        # The subject whose names expire first is the first one: all last for the same time.
        self._by_subject: dict[str, tuple[int, deque[int]]] = {}
        self._count = 0

    def add(self, subject: str, name: int, now_ns: int, lasts_ns: int) -> bool:
        """Remember a name; return True if it was not known. Raises StoreFull."""
        self._drop_expired(now_ns)
        _, names = self._by_subject.get(subject, _NO_MARKS)
        if name in names:
            return False
        if self._count >= _MARKS_MAX:
            raise StoreFull(f"{_MARKS_MAX:,} names of settlements are remembered already")
        self._count += len(names) < MARKS_MAX
        if not names:
            names = deque[int](maxlen=MARKS_MAX)
        names.append(name)
        self._by_subject.pop(subject, None)
        self._by_subject[subject] = (now_ns + lasts_ns, names)
        return True

    def forget(self, subject: str, name: int) -> None:
        """Forget a name; its place stays taken."""
        _, names = self._by_subject.get(subject, _NO_MARKS)
        if name in names:
            names[names.index(name)] = 0

    def clear(self) -> None:
        """Forget all names."""
        self._by_subject.clear()
        self._count = 0

    def _drop_expired(self, now_ns: int) -> None:
        while self._by_subject:
            subject, (until_ns, names) = next(iter(self._by_subject.items()))
            if now_ns < until_ns:
                return
            del self._by_subject[subject]
            self._count -= len(names)


_NO_MARKS: Final = (0, deque[int](maxlen=0))


class PythonMemoryStore:
    """Quotas of this process, for up to `states_max` states and `allowances_max` allowances."""

    def __init__(
        self,
        clock: Clock,
        states_max: int = STATES_MAX_DEFAULT,
        allowances_max: int = ALLOWANCES_MAX_DEFAULT,
    ) -> None:
        self._clock = clock
        self.is_private = True
        self.is_local = True
        self.allowances = PythonAllowances(clock, allowances_max)
        self._states_max = states_max
        self._states = 0
        self._expired = 0
        self._refused = 0
        self._closed = False
        self._marks = _Marks()
        self._tables: dict[tuple[str, str], _Table] = {}
        # Reentrant: `lease` holds it while it calls `check_together`.
        self._lock = fork_safe(threading.RLock())

    def counter(
        self,
        limits: Sequence[Limit],
        rule: str,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
    ) -> MemoryCounter:
        require_strict(consistency)
        require_regional(across)
        with self._lock:
            self.require_open()
            tables = [self._tables.setdefault((rule, limit.identity), _Table()) for limit in limits]
        return MemoryCounter(self, self._clock, tuple(limits), tables, rule, self._lock)

    def check_together(
        self, checks: Sequence[Charge], optional: Container[int] = (), /
    ) -> list[Answer]:
        now_ns = self._clock.now_ns()
        errors: dict[int, StoreError] = {}
        with self._lock:
            while True:
                trials = self._decide_all(checks, errors, now_ns)
                if any(at not in optional for at in errors):
                    break
                if not all(decision for decision, _ in trials.values()):
                    break
                failed = self._charge_all(checks, trials, now_ns)
                if failed is None:
                    return [errors.get(at) or trials[at][0] for at in range(len(checks))]
                errors |= failed
            for at, (decision, entries) in trials.items():  # what remains is what there is now
                counter, subject, _ = checks[at]
                if decision.allowed:
                    trials[at] = (
                        cast("MemoryCounter", counter).decide(subject, 0, now_ns)[0],
                        entries,
                    )
            return [errors.get(at) or trials[at][0] for at in range(len(checks))]

    def _decide_all(
        self, checks: Sequence[Charge], errors: dict[int, StoreError], now_ns: int
    ) -> dict[int, _Trial]:
        """Decide the checks without an error, each after the units of those before it."""
        trials: dict[int, _Trial] = {}
        pending: _Pending = {}
        for at, (counter, subject, cost) in enumerate(checks):
            if at in errors:
                continue
            ours = cast("MemoryCounter", counter)
            try:
                trials[at] = decision, entries = ours.decide(subject, cost, now_ns, pending)
            except StoreError as error:
                errors[at] = error
                continue
            if cost and decision.allowed:
                for table, entry in zip(ours.tables, entries, strict=True):
                    pending[table, subject] = entry
        return trials

    def _charge_all(
        self, checks: Sequence[Charge], trials: Mapping[int, _Trial], now_ns: int
    ) -> dict[int, StoreError] | None:
        """Write all entries; if one finds no room, write none, and return its error."""
        before: list[tuple[_Table, str, Entry | None]] = []
        for at, (_, entries) in trials.items():
            counter, subject, cost = checks[at]
            tables = cast("MemoryCounter", counter).tables
            if not cost:
                continue
            try:
                self.reserve(tables, subject, now_ns)
            except StoreFull as error:
                self._restore(before)
                return {at: error}
            for table, entry in zip(tables, entries, strict=True):
                before.append((table, subject, table.entries.get(subject)))
                self.write(table, subject, entry)
        return None

    def _restore(self, before: Sequence[tuple[_Table, str, Entry | None]]) -> None:
        for table, subject, entry in reversed(before):
            if entry is None:
                self.drop(table, subject)
            else:
                self.write(table, subject, entry)

    def request_check(self, *_: object) -> None:
        """Return None: pure Python has no compiled check."""

    def mark(self, subject: str, name: int, lasts_ns: int) -> bool:
        now_ns = self._clock.now_ns()
        with self._lock:
            self.require_open()
            if lasts_ns:
                return self._marks.add(subject, name, now_ns, lasts_ns)
            self._marks.forget(subject, name)
            return False

    def sweep(self) -> int:
        now_ns = self._clock.now_ns()
        with self._lock:
            self.require_open()
            return self._reclaim_all(now_ns)

    def forget_all(self) -> int:
        self.sweep()  # so that only states that still counted are counted
        with self._lock:
            forgotten, self._states = self._states, 0
            self._marks.clear()
            for table in self._tables.values():
                table.entries.clear()
                table.expiries.clear()
            return forgotten

    def stats(self) -> StoreStats:
        with self._lock:
            self.require_open()
            size = sum(
                sys.getsizeof(table.entries) + sys.getsizeof(table.expiries)
                for table in self._tables.values()
            )
            return StoreStats(
                states=self._states,
                states_max=self._states_max,
                bytes=size + self._states * _ENTRY_BYTES,
                expired=self._expired,
                refused=self._refused,
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for table in self._tables.values():
                table.entries.clear()
                table.expiries.clear()
            self._states = 0
        self.allowances.close()

    async def aclose(self) -> None:
        self.close()

    # Below: called by counters, with the lock held.

    def require_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed; open another one")

    def reserve(self, tables: Sequence[_Table], subject: str, now_ns: int) -> None:
        """Make room for an entry of `subject` in each of the tables. Raises StoreFull."""
        wanted = 0
        for table in tables:
            if subject not in table.entries:
                wanted += 1
                dropped = table.reclaim(now_ns, _RECLAIM_PER_INSERT)
                self._expired += dropped
                self._states -= dropped
        if self._states + wanted <= self._states_max:
            return
        self._reclaim_all(now_ns)
        # Counted again: expired entries of this subject may have been dropped.
        wanted = sum(subject not in table.entries for table in tables)
        if self._states + wanted > self._states_max:
            self._refused += 1
            raise StoreFull(
                f"all {self._states_max:,} states are of keys that are still limited; "
                f'make room with store="memory://?capacity={2 * self._states_max}"'
            )

    def write(self, table: _Table, subject: str, entry: Entry) -> None:
        """Write an entry that `reserve` made room for."""
        before = table.entries.get(subject)
        if before is None:
            self._states += 1
            table.insert(subject, entry)
        elif entry[1] < before[1]:  # after a changed limit or a refund: it expires sooner
            table.insert(subject, entry)
        else:
            table.entries[subject] = entry

    def drop(self, table: _Table, subject: str) -> None:
        """Forget a subject; its item in the heap is dropped when it comes up."""
        if table.entries.pop(subject, None) is not None:
            self._states -= 1

    def _reclaim_all(self, now_ns: int) -> int:
        dropped = sum(table.reclaim(now_ns, len(table.expiries)) for table in self._tables.values())
        self._expired += dropped
        self._states -= dropped
        return dropped


# An entry's tuple, a bucket's state, its expiry and its heap item, with their integers.
_ENTRY_BYTES: Final = sum(
    sys.getsizeof(part) for part in ((None, 0, None), (0, 0), (0, ""), 1 << 60, 1 << 60, 1 << 60)
)


class MemoryCounter:
    """One rule's limits in a PythonMemoryStore."""

    __slots__ = ("_clock", "_lock", "_parts", "_rule", "_store", "limits", "stamp", "tables")

    def __init__(
        self,
        store: PythonMemoryStore,
        clock: Clock,
        limits: tuple[Limit, ...],
        tables: list[_Table],
        rule: str,
        lock: threading.RLock,
        stamp: int = NO_STAMP,
    ) -> None:
        self.limits = limits
        self.stamp = stamp
        self._store = store
        self._clock = clock
        self.tables = tables
        self._rule = rule
        self._lock = lock
        self._parts = tuple(
            (
                limit,
                InFlight(stamp) if limit.algorithm == IN_FLIGHT else ALGORITHMS[limit.algorithm],
                table,
            )
            for limit, table in zip(limits, tables, strict=True)
        )

    def stamped(self, stamp: int) -> MemoryCounter:
        return type(self)(
            self._store, self._clock, self.limits, self.tables, self._rule, self._lock, stamp
        )

    def check(self, subject: str, cost: int) -> Decision:
        now_ns = self._clock.now_ns()
        if len(self._parts) == 1:
            return self._check_one(subject, cost, now_ns)
        with self._lock:
            decision, entries = self.decide(subject, cost, now_ns)
            if cost and decision.allowed:
                self._store.reserve(self.tables, subject, now_ns)
                for table, entry in zip(self.tables, entries, strict=True):
                    self._store.write(table, subject, entry)
        return decision

    def _check_one(self, subject: str, cost: int, now_ns: int) -> Decision:
        """Check a gate with one limit, the usual case, in half the time."""
        limit, algorithm, table = self._parts[0]
        with self._lock:
            self._store.require_open()
            entry = table.entries.get(subject)
            state, _, credit = entry or _ABSENT
            if credit is None:
                after, outcome = algorithm.decide(state, limit, now_ns, cost)
            else:
                after, credit, outcome = credits_.decide(
                    algorithm, state, credit, limit, now_ns, cost
                )
            allowed, remaining, retry_ns, reset_ns, delay_ns, charged_ns = outcome
            if allowed and cost:
                if entry is None:
                    self._store.reserve(self.tables, subject, now_ns)
                expires_ns = now_ns + reset_ns
                if credit is not None and credit[1] > expires_ns:
                    expires_ns = credit[1]
                if entry is None or expires_ns < entry[1]:
                    self._store.write(table, subject, (after, expires_ns, credit))
                else:
                    table.entries[subject] = (after, expires_ns, credit)
        return Decision(
            allowed,
            limit,
            remaining,
            retry_ns,
            reset_ns,
            delay_ns,
            self._rule,
            False,
            charged_ns,
            now_ns,
            credit[0] if credit else 0,
        )

    def fast_check(self, fallback: Callable[..., Decision]) -> None:
        """Return None: pure Python has no compiled check."""

    def peek(self, subject: str, cost: int) -> Decision:
        now_ns = self._clock.now_ns()
        with self._lock:
            decision, _ = self.decide(subject, cost, now_ns)
            return self.decide(subject, 0, now_ns)[0] if decision.allowed else decision

    def decide(self, subject: str, cost: int, now_ns: int, pending: _Pending = _NOTHING) -> _Trial:
        """Return the decision of a check, and the entries to write. The store's lock is held."""
        self._store.require_open()
        outcomes: list[Outcome] = []
        entries: list[Entry] = []
        for limit, algorithm, table in self._parts:
            state, _, credit = _entry(table, subject, pending)
            after, left, outcome = credits_.decide(algorithm, state, credit, limit, now_ns, cost)
            expires_ns = now_ns + outcome.reset_after_ns
            if left is not None and left[1] > expires_ns:
                expires_ns = left[1]
            entries.append((after, expires_ns, left))
            outcomes.append(outcome)
        granted = [credit[0] if credit else 0 for _, _, credit in entries]
        decision = combine(self.limits, outcomes, self._rule, now_ns, granted)
        if not decision.allowed and len(entries) > 1:
            decision = self._together(subject, cost, now_ns, decision, pending)
        return decision, entries

    def _together(
        self, subject: str, cost: int, now_ns: int, decision: Decision, pending: _Pending
    ) -> Decision:
        """Return the denial with the time at which all limits would pass together."""
        held = [
            (algorithm, *_entry(table, subject, pending)[::2], limit)
            for limit, algorithm, table in self._parts
            if limit.algorithm != IN_FLIGHT
        ]
        if all(credit is None for _, _, credit, _ in held):
            return decision
        wait_ns = credits_.wait_together(held, now_ns, cost, decision.retry_after_ns)
        return decision_with(decision, retry_after_ns=wait_ns)

    def refund(self, subject: str, units: int, charged_ns: int | None) -> None:
        now_ns = self._clock.now_ns()
        with self._lock:
            self._store.require_open()
            for limit, algorithm, table in self._parts:
                entry = table.entries.get(subject)
                if entry is None:
                    continue
                state, _, credit = entry
                state = algorithm.refund(state, limit, now_ns, units, charged_ns)
                self._write(table, subject, (limit, algorithm, state, credit), now_ns)

    def owe(self, subject: str, units: int) -> int:
        now_ns = self._clock.now_ns()
        forgiven = 0
        with self._lock:
            self._store.require_open()
            if units == 0:
                return 0
            self._store.reserve(self.tables, subject, now_ns)
            for limit, algorithm, table in self._parts:
                if limit.algorithm == IN_FLIGHT:
                    continue
                state, _, credit = table.entries.get(subject, _ABSENT)
                after, left, beyond = credits_.owe(algorithm, state, credit, limit, now_ns, units)
                forgiven = max(forgiven, beyond)
                self._write(table, subject, (limit, algorithm, after, left), now_ns)
        return forgiven

    def owed(self, subject: str) -> int:
        now_ns = self._clock.now_ns()
        with self._lock:
            self._store.require_open()
            return max(
                algorithm.debt_of(table.entries.get(subject, _ABSENT)[0], limit, now_ns)
                for limit, algorithm, table in self._parts
            )

    def grant(self, subject: str, units: int, ttl_ns: int | None) -> None:
        now_ns = self._clock.now_ns()
        with self._lock:
            self._store.require_open()
            if units == 0:
                return
            self._store.reserve(self.tables, subject, now_ns)
            for limit, _, table in self._parts:
                if limit.algorithm == IN_FLIGHT:
                    continue
                state, expires_ns, credit = table.entries.get(subject, (None, 0, None))
                until_ns = now_ns + (limit.window_ns if ttl_ns is None else ttl_ns)
                credit = credits_.granted(credit, units, now_ns, until_ns)
                self._store.write(table, subject, (state, max(expires_ns, credit[1]), credit))

    def reset(self, subject: str) -> None:
        now_ns = self._clock.now_ns()
        with self._lock:
            self._store.require_open()
            for limit, algorithm, table in self._parts:
                state = table.entries.get(subject, _ABSENT)[0]
                after = algorithm.reset(state, limit, now_ns)
                self._write(table, subject, (limit, algorithm, after, None), now_ns)

    def lease(self, check: LeaseCheck, decision: Decision) -> Lease:
        """Lease units with a check that was just charged. The store's lock is held."""
        if not check.cost:
            return NO_LEASE
        subject, now_ns = check.subject, decision.decided_ns
        entries = [table.entries.get(subject, _ABSENT) for table in self.tables]
        parts = [
            (limit, algorithm, entry[0])
            for (limit, algorithm, _), entry in zip(self._parts, entries, strict=True)
        ]
        units, ends_ns = size_of(parts, now_ns, check.terms)
        if units:
            for (limit, algorithm, table), (state, _, credit) in zip(
                self._parts, entries, strict=True
            ):
                after = algorithm.lease(state, limit, now_ns, units, ends_ns)
                self._write(table, subject, (limit, algorithm, after, credit), now_ns)
        denied_ns = 0 if units >= check.cost else self._denied_ns(subject, check.cost, now_ns)
        return Lease(units, ends_ns if units else 0, ends_ns - now_ns, denied_ns)

    def _denied_ns(self, subject: str, cost: int, now_ns: int) -> int:
        try:
            return self.decide(subject, cost, now_ns)[0].retry_after_ns
        except CapacityError:  # it used granted units; no wait would help
            return 0

    def report(self, report: Report) -> Decision:
        """Give units back, or charge late. The store's lock is held."""
        self._store.require_open()
        subject, units, now_ns = report.subject, report.units, self._clock.now_ns()
        if isinstance(report, LateCharge):
            self._store.reserve(self.tables, subject, now_ns)
        elif not may_be_given_back(report.ends_ns, now_ns):
            units = 0
        if units:
            for limit, algorithm, table in self._parts:
                state, _, credit = table.entries.get(subject, _ABSENT)
                if isinstance(report, GiveBack):
                    kept_ns = 0
                    after = algorithm.give_back(state, limit, now_ns, units, report.ends_ns)
                else:
                    kept_ns = LATE_KEPT_NS
                    charged_ns = max(now_ns - report.age_ns, 0)
                    after = algorithm.charge(state, limit, now_ns, units, charged_ns)
                self._write(table, subject, (limit, algorithm, after, credit), now_ns, kept_ns)
        return self.peek(subject, 0)

    def _write(
        self,
        table: _Table,
        subject: str,
        part: tuple[Limit, Algorithm, State, Credit | None],
        now_ns: int,
        kept_ns: int = 0,
    ) -> None:
        """Write a state that was not made by a check; drop it if nothing is left.

        It is kept for `kept_ns` at least.
        """
        limit, algorithm, state, credit = part
        if state is None and credit is None:
            self._store.drop(table, subject)
            return
        _, look = algorithm.decide(state, limit, now_ns, 0)
        lasts_ns = max(look.reset_after_ns, kept_ns)
        expires_ns = max(now_ns + lasts_ns, credit[1] if credit else 0)
        self._store.write(table, subject, (state, expires_ns, credit))


def _entry(table: _Table, subject: str, pending: _Pending) -> Entry:
    known = pending.get((table, subject)) if pending else None
    return known or table.entries.get(subject, _ABSENT)


class MemoryAuthority(PythonMemoryStore):
    """The reference of an authority: what leases and late charges mean (decide/leasing.py).

    Tests compare the Redis store with it, and `rules explain` uses it for rules of any consistency.
    It has no servers and no messages, so it is a SharedStore only for nodes of its own process.
    """

    def __init__(self, clock: Clock, states_max: int = STATES_MAX_DEFAULT) -> None:
        super().__init__(clock, states_max)
        self.is_private = False
        self.is_local = False
        self.authority: Authority = self

    def lease(
        self, checks: Sequence[LeaseCheck], optional: Container[int] = ()
    ) -> list[LeasedAnswer]:
        # They are counters of this store.
        counters = [cast("MemoryCounter", check.counter) for check in checks]
        with self._lock:
            answers = self.check_together(
                [
                    (counter, check.subject, check.cost)
                    for counter, check in zip(counters, checks, strict=True)
                ],
                optional,
            )
            # A failed check counts as true: the others are charged only if it is optional.
            charged = all(answers) and not any(
                isinstance(answer, StoreError) and at not in optional
                for at, answer in enumerate(answers)
            )
            return [
                answer
                if isinstance(answer, StoreError)
                else (answer, counter.lease(check, answer) if charged else NO_LEASE)
                for counter, check, answer in zip(counters, checks, answers, strict=True)
            ]

    def report(self, reports: Sequence[Report]) -> list[Answer]:
        answers: list[Answer] = []
        with self._lock:
            for each in reports:
                try:
                    answers.append(cast("MemoryCounter", each.counter).report(each))
                except StoreError as error:
                    answers.append(error)
        return answers
