"""The decisions of this node's workers in the last 15 minutes, in steps of two seconds.

The admin API shows it, so an operator sees charts without Prometheus.

**One worker counts.** Each worker writes its counters to a file once a second (`health.py`). Every
STEP_SECONDS, one worker adds the files up and appends the difference since the last step to a file
in the folder of this run, as one line of JSON. That worker holds a lock, which the kernel releases
when the worker ends; then another worker takes the lock at its next step. It continues from the
sums of the last step, which are in a file too, so no count is lost. The sums are written before the
line: a worker that is killed in between loses one step, and none is counted twice.

**Bounds.** A step names the RULES_MAX busiest rules and has the others together. The file is
rewritten when it has twice as many lines as fit 15 minutes. A worker spends at most STEP_SHARE_MAX
of its time on this: with many busy rules and workers, the steps become longer.

**Faults.** A damaged line is skipped. Sums that are lower than before count as no change. The
length of a step is measured on the clock that counts from boot. If the wall clock is set, the times
of all steps are shifted by as much, so that they stay in order and none is in the future.

**State.** A step also has what the overview of the console says about the present: workers that
ended, records that were dropped, breakers, clocks, and how full the store is.

Without a folder there is one worker, and the steps are in its memory.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from heapq import nlargest
from pathlib import Path
from typing import IO, Annotated, Final

import msgspec
from msgspec import Meta

from ratekeeper.core.clock import NS_PER_SECOND, boot_ns
from ratekeeper.core.histogram import LENGTH
from ratekeeper.metrics.counters import JOIN, OTHERS, MetricsSnapshot
from ratekeeper.metrics.operations import DEFAULTS

HISTORY_SECONDS: Final = 900.0
STEP_SECONDS: Final = 2.0
RULES_MAX: Final = 20
# The share of a worker's time that counting may take.
STEP_SHARE_MAX: Final = 0.005
# The busiest rules are named. A decision that is this old has half the weight of a new one.
HALF_LIFE_SECONDS: Final = 300.0
# The wall clock was set if it differs by more than this from the clock that counts from boot.
CLOCK_STEP_SECONDS: Final = 1.0
# The clock of a server of the store is wrong if it differs from ours by more than this.
CLOCK_OFFSET_SECONDS: Final = DEFAULTS["clock_offset"]
# A line has at most some 3 kB, and 3 kB more with the clocks of 64 servers.
FILE_BYTES_MAX: Final = 8 * 1024 * 1024
# A worker that read the file longer ago reads it from the beginning: it may have been rewritten
# twice, and then it may have its first inode again.
REREAD_SECONDS: Final = 60.0
_STEPS: Final = "activity.steps"
_SUMS: Final = "activity.sums"
_LOCK: Final = "activity.lock"

log = logging.getLogger("ratekeeper.service")

_Count = Annotated[int, Meta(ge=0)]
Row = tuple[_Count, _Count, _Count, _Count]
"""Decisions of a rule: allowed, denied, would-be denials (shadow mode), and those of them that the
store did not make."""
_NOTHING: Final[Row] = (0, 0, 0, 0)
_COLUMNS: Final = {"allowed": 0, "denied": 1, "shadow_denied": 2}
_DEGRADED: Final = 3
# The sources of decisions that the store did not make.
_POLICIES: Final = frozenset({"local", "policy"})


class Sums(msgspec.Struct):
    """The sums of the counters of all workers, since the service started."""

    at_s: float
    """Unix time."""
    boot_s: float
    """The same moment on the clock that counts from boot."""
    checks: dict[str, int]
    """By outcome; each check counts once."""
    degraded: int
    rules: dict[str, Row]
    taken: list[int]
    """The data of a histogram: how long checks took."""
    dropped: int = 0
    """Records."""
    ended: int = 0
    """Workers."""


class Step(msgspec.Struct, omit_defaults=True):
    """The counts of all workers in one step."""

    at_s: float
    """The Unix time of its end."""
    seconds: Annotated[float, Meta(gt=0)]
    checks: dict[str, _Count] = {}
    """By outcome; those that are 0 are left out."""
    degraded: _Count = 0
    """Checks that the store did not decide alone."""
    rules: dict[str, Row] = {}
    taken: list[_Count] = []
    """The data of a histogram; empty if no check ended."""
    workers: _Count = 1
    """Workers that are alive."""
    breakers: dict[str, int] = {}
    """Breakers that are not closed, by server: 1 half-open, 2 open; the worst of all workers."""
    dropped: _Count = 0
    """Records that did not fit."""
    ended: _Count = 0
    """Workers that ended, and were replaced."""
    clocks: dict[str, float] = {}
    """By server: its clock minus ours in seconds, if it is more than CLOCK_OFFSET_SECONDS."""
    states_share: float = 0.0
    """Share of the states that fit the store; 0 if it has no limit."""
    logs_share: float = 0.0
    """Share of the memory for logs in use; 0 if there is no separate one."""


_decode_sums: Final = msgspec.json.Decoder(Sums).decode
_decode_step: Final = msgspec.json.Decoder(Step).decode
_encode: Final = msgspec.json.Encoder().encode


# ── Counts ─────────────────────────────────────────────────────────────────────────────────────


def sums_of(counted: MetricsSnapshot, at_s: float, boot_s: float) -> Sums:
    """Return the sums that a history needs of the counters of all workers."""
    values = counted.values
    rules: dict[str, list[int]] = {}
    for labels, count in values.get("rule_decisions", {}).items():
        rule, _, _, outcome, source = labels.split(JOIN)
        row = rules.get(rule)
        if row is None:
            row = rules[rule] = [0, 0, 0, 0]
        if outcome in _COLUMNS:
            row[_COLUMNS[outcome]] += int(count)
        if source in _POLICIES:
            row[_DEGRADED] += int(count)
    return Sums(
        at_s,
        boot_s,
        checks={outcome: int(count) for outcome, count in values.get("checks", {}).items()},
        degraded=int(values.get("degraded_checks", {}).get("", 0)),
        rules={rule: _row(row) for rule, row in rules.items()},
        taken=counted.histograms.get("decision_seconds", {}).get("", [0] * LENGTH),
        dropped=int(_gauge(counted, "records_dropped")),
        ended=max(int(_gauge(counted, "worker_starts") - _gauge(counted, "workers")), 0),
    )


def _gauge(counted: MetricsSnapshot, family: str) -> float:
    return counted.values.get(family, {}).get("", 0)


def _share(counted: MetricsSnapshot, family: str) -> float:
    most = _gauge(counted, f"{family}_max")
    return round(_gauge(counted, family) / most, 3) if most else 0.0


def step_between(before: Sums, after: Sums, named: Callable[[Mapping[str, Row]], set[str]]) -> Step:
    """Return the step from one reading of the sums to the next. No count is negative.

    `named` returns the rules that get a name, from the counts of each rule.
    """
    rules = {
        rule: _row(map(_increase, row, before.rules.get(rule, _NOTHING)))
        for rule, row in after.rules.items()
        if row != before.rules.get(rule)
    }
    checks = {
        outcome: more
        for outcome, count in after.checks.items()
        if (more := _increase(count, before.checks.get(outcome, 0)))
    }
    taken = list(map(_increase, after.taken, before.taken))
    return Step(
        at_s=after.at_s,
        seconds=round(after.boot_s - before.boot_s, 3),
        checks=checks,
        degraded=_increase(after.degraded, before.degraded),
        rules=folded(rules, named(rules)),
        taken=taken if any(taken[:-1]) else [],
        dropped=_increase(after.dropped, before.dropped),
        ended=_increase(after.ended, before.ended),
    )


def _note_state(step: Step, counted: MetricsSnapshot) -> None:
    """Add the present state of the workers and the store."""
    values = counted.values
    step.workers = int(values.get("workers", {}).get("", 1))
    step.breakers = {
        server: int(state) for server, state in values.get("breaker_state", {}).items() if state
    }
    step.clocks = {
        server: round(offset, 3)
        for server, offset in values.get("clock_offset_seconds", {}).items()
        if abs(offset) > CLOCK_OFFSET_SECONDS
    }
    step.states_share = _share(counted, "store_states")
    step.logs_share = _share(counted, "store_log_bytes")


def folded(rules: Mapping[str, Row], named: Iterable[str]) -> dict[str, Row]:
    """Return the rows of the named rules, and those of all others as one."""
    kept = {rule: rules[rule] for rule in named if rule in rules and rule != OTHERS}
    others = [row for rule, row in rules.items() if rule not in kept]
    if others:
        kept[OTHERS] = _row(map(sum, zip(*others, strict=True)))
    return kept


def _row(counts: Iterable[int]) -> Row:
    allowed, denied, shadow_denied, degraded = counts
    return allowed, denied, shadow_denied, degraded


def _increase(after: int, before: int) -> int:
    return max(after - before, 0)


class BusyRules:
    """Ranks rules by their decisions; older ones have less weight."""

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self._weights: dict[str, float] = {}
        for step in steps:
            self.add(step.rules, step.seconds)

    def add(self, rules: Mapping[str, Row], seconds: float) -> None:
        """Add the decisions of a step."""
        kept = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        weights = {rule: each * kept for rule, each in self._weights.items() if each > 0.01}
        for rule, row in rules.items():
            weights[rule] = weights.get(rule, 0.0) + sum(row[:_DEGRADED])
        self._weights = weights

    def names(self) -> set[str]:
        """Return the RULES_MAX busiest rules."""
        return set(nlargest(RULES_MAX, self._weights, key=self._weights.__getitem__))


# ── The files ──────────────────────────────────────────────────────────────────────────────────


class StepFile:
    """The last steps as lines of JSON, in a file that one worker writes and all workers read.

    A worker reads only the lines that it has not read yet.
    """

    def __init__(self, path: Path | None, boot_s: Callable[[], float]) -> None:
        """`path` None: the steps are kept in memory."""
        self._path = path
        # One more than fits: a difference over the whole time begins with it.
        self._kept_s = HISTORY_SECONDS + STEP_SECONDS
        self._kept_max = int(HISTORY_SECONDS / STEP_SECONDS) + 1
        self._boot_s = boot_s
        self._known: list[Step] = []
        self._inode = 0
        self._position = 0
        self._read_s = boot_s()

    def lines(self) -> list[Step]:
        """Return the steps of the last 15 minutes, oldest first."""
        if self._path is not None:
            with suppress(OSError):  # no file: there was no line yet
                self._read(self._path)
        if not self._known:
            return []
        begin_s = self._known[-1].at_s - self._kept_s
        return [step for step in self._known[-self._kept_max :] if step.at_s > begin_s]

    def append(self, step: Step) -> None:
        """Add a step. Raises OSError."""
        if self._path is None:
            self._known = [*self._known[1 - self._kept_max :], step]
            return
        # The line break before it ends a line that a killed worker has not completed.
        with self._path.open("ab", buffering=0) as file:
            file.write(b"\n" + _encode(step) + b"\n")
        kept = self.lines()
        if not kept or kept[-1].at_s != step.at_s:
            # A damaged line has a later time. No line after it would be read.
            kept = [*(each for each in self._known if each.at_s < step.at_s), step]
        elif len(self._known) <= 2 * self._kept_max and self._position <= FILE_BYTES_MAX // 2:
            return
        replace_file(self._path, _text(kept))

    def shift(self, seconds: float) -> None:
        """Add to the times of all steps. Raises OSError."""
        for step in (kept := self.lines()):
            step.at_s = round(step.at_s + seconds, 3)
        if self._path is not None:
            replace_file(self._path, _text(kept))

    def _read(self, path: Path) -> None:
        now_s = self._boot_s()
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if (
                status.st_ino != self._inode
                or status.st_size < self._position
                or now_s - self._read_s > REREAD_SECONDS
            ):
                self._known, self._position, self._inode = [], 0, status.st_ino
            self._read_s = now_s
            self._position = max(self._position, status.st_size - FILE_BYTES_MAX)
            file.seek(self._position)
            text = file.read(FILE_BYTES_MAX)
        whole = text.rfind(b"\n") + 1
        self._position += whole
        for each in text[:whole].splitlines():
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                step = _decode_step(each)
                if not self._known or step.at_s > self._known[-1].at_s:
                    self._known.append(step)


def _text(steps: Iterable[Step]) -> bytes:
    return b"".join(_encode(step) + b"\n" for step in steps)


def replace_file(path: Path, text: bytes) -> None:
    """Write a file; a reader finds all of the old text or all of the new one.

    No fsync: after a crash of the machine the service counts from zero.
    """
    temporary = path.with_suffix(".new")
    temporary.write_bytes(text)
    temporary.replace(path)


# ── The worker that counts ─────────────────────────────────────────────────────────────────────


class ActivityHistory:
    """The steps of this node; this worker adds them while it holds the lock."""

    def __init__(
        self,
        folder: Path | None,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        since_boot_ns: Callable[[], int] = boot_ns,
    ) -> None:
        """`folder` is that of the run; None: there is one worker."""
        self.totals: Callable[[], MetricsSnapshot] = MetricsSnapshot
        """Returns the sums of the counters of all workers, which may be a second old."""
        self._folder = folder
        self._now_ns = now_ns
        self._since_boot_ns = since_boot_ns
        self._lock: IO[bytes] | None = None
        self._before: Sums | None = None
        self._busy = BusyRules()
        self._steps = StepFile(folder / _STEPS if folder else None, self.boot_s)
        self._failing = False

    def steps(self) -> Sequence[Step]:
        """Return the steps of the last 15 minutes, oldest first."""
        return self._steps.lines()

    async def keep_counting(self) -> None:
        """Add a step every STEP_SECONDS while this worker holds the lock, until cancelled."""
        try:
            while True:
                # Processor time: on a busy machine, waiting for a processor makes no step longer.
                before_s = time.thread_time()
                self.advance()
                taken_s = time.thread_time() - before_s
                await asyncio.sleep(max(STEP_SECONDS, taken_s / STEP_SHARE_MAX))
        finally:
            self.close()

    def close(self) -> None:
        """Release the lock, so that another worker takes it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def advance(self) -> None:
        """Add a step if this worker holds the lock or can take it. A full disk is only logged."""
        try:
            if self._holds_lock():
                self._count()
        except OSError as error:
            if not self._failing:  # logged once, and not at every step
                log.warning("activity: the history cannot be written: %s", error.strerror)
            self._failing = True
        except Exception:
            if not self._failing:
                log.exception("activity: a defect; this step is lost")
            self._failing = True
        else:
            self._failing = False

    def _holds_lock(self) -> bool:
        if self._folder is None or self._lock is not None:
            return True
        lock = (self._folder / _LOCK).open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return False
        self._lock = lock
        self._busy = BusyRules(self.steps())
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            self._before = _decode_sums((self._folder / _SUMS).read_bytes())
        return True

    def _count(self) -> None:
        counted = self.totals()
        now = sums_of(counted, round(self.unix_s(), 3), self.boot_s())
        before, self._before = self._before, now
        if self._folder is not None:
            replace_file(self._folder / _SUMS, _encode(now))
        if before is None or now.boot_s <= before.boot_s:
            return
        set_by_s = now.at_s - before.at_s - (now.boot_s - before.boot_s)
        if abs(set_by_s) > CLOCK_STEP_SECONDS:
            self._steps.shift(set_by_s)
        step = step_between(
            before, now, lambda rules: self._named(rules, now.boot_s - before.boot_s)
        )
        _note_state(step, counted)
        self._steps.append(step)

    def _named(self, rules: Mapping[str, Row], seconds: float) -> set[str]:
        self._busy.add(rules, seconds)
        return self._busy.names()

    def unix_s(self) -> float:
        """Return the Unix time."""
        return self._now_ns() / NS_PER_SECOND

    def boot_s(self) -> float:
        """Return the time on the clock that counts from boot."""
        return self._since_boot_ns() / NS_PER_SECOND
