"""A node's reports to the authority: unspent units of leases, and late charges.

Late charges are pending charges of `eventual` limits, and units that were admitted while the
authority was away (`outage.py`).

`Reports.flushing` is one batch, as steps: claim from the table, report, confirm. It only reads the
node's clock, so that a simulator can drive it with virtual time. `ReportThread` calls it in every
process that has put an allowance into the table.

Units of a lease are reported at most once, and late charges at least once: if an answer is lost,
the authority may count too much, but never too little. A late charge that failed is claimed again
after CLAIM_NS, by any process.

**Shutdown.** A process that closes its store gives back every lease in the table and flushes all
pending charges, also if other processes share the table. They ask for a new lease at their next
check, which costs one round trip for each subject. So no process has to know whether it is the last
one of the node.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import StoreError, StoreUnavailable
from ratekeeper.core.forks import after_fork, fork_safe
from ratekeeper.core.model import Limits
from ratekeeper.core.steps import Call, Steps, run
from ratekeeper.decide.allowances import FORGET_NS, UnitClaim
from ratekeeper.decide.leasing import GiveBack, LateCharge, Report
from ratekeeper.decide.store import Answer, Counter
from ratekeeper.fleet.node import KnownGate, Node
from ratekeeper.fleet.outage import OutageCharge
from ratekeeper.fleet.settings import Fleet

# Reports in one batch.
BATCH_MAX: Final = 1_000
# Batches in one round of the thread; the rest waits for the next round.
BATCHES_MAX: Final = 100
# The thread looks into the table twice in the time after which charges are due, but not more often
# than this.
ROUND_NS_MIN: Final = NS_PER_SECOND // 100
ROUND_NS_MAX: Final = NS_PER_SECOND // 10
# While the authority is away, the charges of the outage are tried again after this time.
OUTAGE_RETRY_NS: Final = NS_PER_SECOND
# Closing a store waits this long for the authority.
CLOSE_S_MAX: Final = 2.0
# If this many batches fail in a row, no server answers.
CLOSE_BATCHES_MIN: Final = 3
# After a defect, the thread waits this long.
DEFECT_S: Final = 1.0

log = logging.getLogger("ratekeeper")


# Reports, each with its origin: a claim and its limits, or a charge of an outage.
_Batch = list[tuple[Report, tuple[KnownGate, UnitClaim] | OutageCharge | None]]


class Reports:
    """The batches of one process."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._outage_ns = 0
        self._left: set[tuple[int, str]] = set()
        """Limits and subjects whose charges could not be reported at shutdown."""

    def flushing(self, report: Callable[..., Any], *, ending: bool = False) -> Steps[int]:
        """Report one batch; return how many claims it took. `report` is the authority's call.

        With `ending`, the process stops, and this reports everything in the table, each charge
        once. Raises StoreUnavailable if the table is closed.
        """
        node = self._node
        batch: _Batch = [(each, None) for each in node.taken_back(BATCH_MAX)]
        batch += self._outage_charges(BATCH_MAX - len(batch))
        count = max(BATCH_MAX - len(batch), 0)
        unknown = 0
        for claim in self._claims(count, ending=ending):
            known = node.gates.get(claim.gate)
            if known is None:
                unknown += 1
                self._note_unknown(claim, ending=ending)
            else:
                batch.append((_report_of(known, claim), (known, claim)))
        if not batch:
            return unknown
        sent_ns = node.now_ns()
        try:
            answers: Sequence[Answer] = yield Call(report, [each for each, _ in batch])
        except StoreError as error:
            answers = [error] * len(batch)
        except Exception as error:  # a defect, which the thread logs
            self._settle(batch, [StoreUnavailable(str(error))] * len(batch), sent_ns)
            raise
        node.counters.flush_seconds.note(max(node.now_ns() - sent_ns, 0))
        self._settle(batch, answers, sent_ns)
        if ending:
            for (_, owed), answer in zip(batch, answers, strict=True):
                if isinstance(answer, StoreError) and owed and not isinstance(owed, OutageCharge):
                    self._left.add((owed[1].gate, owed[1].subject))
        return len(batch) + unknown

    def _claims(self, count: int, *, ending: bool) -> list[UnitClaim]:
        """Take up to `count` claims. With `ending`, leave out claims that have failed before."""
        if not ending:
            return self._node.claims(count, ending=False)
        claims = self._node.claims(count + len(self._left), ending=True)
        return [each for each in claims if (each.gate, each.subject) not in self._left]

    def _note_unknown(self, claim: UnitClaim, *, ending: bool) -> None:
        """Leave a charge whose limits are not known here to another process of the node.

        That process may have another version of the rules. A charge that no process reports for a
        long time is lost. So is the rest of a lease: it is no longer in the table.
        """
        node = self._node
        if ending:
            self._left.add((claim.gate, claim.subject))
        if claim.kind == "leased" or claim.age_ns >= FORGET_NS:
            node.counters.lost_units += claim.units
            node.table.confirm([claim])

    def _outage_charges(self, count: int) -> _Batch:
        """Return the charges of an outage, unless the authority is still away."""
        node = self._node
        now_ns = node.now_ns()
        if now_ns < self._outage_ns or count <= 0 or node.make_counter is None:
            return []
        counters: dict[tuple[Limits, str], Counter] = {}
        batch: _Batch = []
        for charge in node.outage.take(count):
            key = charge.limits, charge.rule
            counter = counters.get(key)
            if counter is None:
                counter = counters[key] = node.make_counter(*key)
            age_ns = max(now_ns - charge.at_ns, 0)
            batch.append((LateCharge(counter, charge.subject, charge.units, age_ns), charge))
        return batch

    def _settle(
        self,
        batch: _Batch,
        answers: Sequence[Answer],
        sent_ns: int,
    ) -> None:
        """Confirm the charges, keep the authority's answers to them, and count the rest."""
        node, counters = self._node, self._node.counters
        for (report, owed), answer in zip(batch, answers, strict=True):
            if isinstance(owed, OutageCharge):
                self._settle_outage(owed, answer, sent_ns)
            elif isinstance(report, LateCharge):
                assert owed is not None, "it was claimed"  # noqa: S101 - ours
                node.keep_charged(*owed, answer, sent_ns)
            # A give-back is not repeated: the authority may have counted it, and would admit too
            # much.
            elif isinstance(answer, StoreError):
                counters.failed += 1
                counters.lost_units += report.units
            else:
                counters.reports += 1
                counters.returned_units += report.units

    def _settle_outage(self, charge: OutageCharge, answer: Answer, sent_ns: int) -> None:
        """Count a charge of an outage, or keep it for another attempt."""
        counters = self._node.counters
        if isinstance(answer, StoreError):
            counters.failed += 1
            self._node.outage.put_back([charge])
            self._outage_ns = sent_ns + OUTAGE_RETRY_NS
        else:
            counters.reports += 1
            counters.charged_units += charge.units


def _report_of(known: KnownGate, claim: UnitClaim) -> Report:
    if claim.kind == "leased":
        return GiveBack(known.counter, claim.subject, claim.units, claim.ends_store_ns)
    return LateCharge(known.counter, claim.subject, claim.units, claim.age_ns)


def round_ns(fleet: Fleet) -> int:
    """Return how often a process looks for reports that are due."""
    return min(max(fleet.flush_ns // 2, ROUND_NS_MIN), ROUND_NS_MAX)


class ReportThread:
    """The reporting thread of this process. It ends at `close`, or when the node is collected."""

    def __init__(self, node: Node) -> None:
        self._node = weakref.ref(node)
        self._reports = Reports(node)
        self._round_s = round_ns(node.fleet) / NS_PER_SECOND
        self._stopped = threading.Event()
        self._woken = threading.Event()
        self._lock = fork_safe(threading.Lock())
        self._thread: threading.Thread | None = None
        node.on_work = self.start
        node.on_urgent = self._wake
        after_fork(self.forked)
        _threads.add(self)

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._runs():
            return
        with self._lock:
            if not self._runs() and not self._stopped.is_set():
                self._thread = threading.Thread(
                    target=_report,
                    args=(weakref.ref(self), self._stopped, self._woken, self._round_s),
                    name="ratekeeper-reports",
                    daemon=True,
                )
                self._thread.start()

    def _runs(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _wake(self) -> None:
        self._woken.set()
        self.start()

    def round(self) -> None:
        """Report the pending charges and give-backs that are due."""
        with suppress(StoreError):
            for _ in range(BATCHES_MAX):
                if self._flush() < BATCH_MAX:
                    return

    def close(self) -> None:
        """Give back all leases and flush all charges, for at most CLOSE_S_MAX.

        Ends sooner if no server answers. Before that, a round of the thread has the same time.
        """
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._woken.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S_MAX)
        node = self._node()
        if node is None:
            return
        until_s = time.monotonic() + CLOSE_S_MAX
        try:
            answered = node.counters.reports
            for batch in count(1):
                if time.monotonic() >= until_s or not self._flush(ending=True):
                    return
                if batch >= CLOSE_BATCHES_MIN and node.counters.reports == answered:
                    return  # the authority is away
        except StoreError:
            return  # the table is lost
        except Exception:
            log.exception("reports: a defect; the store is closed all the same")

    def _flush(self, *, ending: bool = False) -> int:
        node = self._node()
        if node is None:
            return 0
        return run(self._reports.flushing(node.authority.report, ending=ending))

    def forked(self) -> None:
        """In a forked child: the thread does not exist here. The next report starts one."""
        self._thread = None
        if not self._stopped.is_set():
            self._stopped = threading.Event()
            self._woken = threading.Event()


def _report(
    thread: weakref.ref[ReportThread],
    stopped: threading.Event,
    woken: threading.Event,
    round_s: float,
) -> None:
    """Report in rounds. Between rounds, the thread has no reference to the node."""
    while True:
        woken.wait(round_s)
        woken.clear()
        found = thread()
        if found is None or stopped.is_set():
            return
        try:
            found.round()
        except Exception:
            log.exception("reports: a defect; the thread goes on")
            del found
            stopped.wait(DEFECT_S)
        else:
            del found


_threads: weakref.WeakSet[ReportThread] = weakref.WeakSet()


def _close_all() -> None:
    for thread in list(_threads):
        thread.close()


# A program that ends without closing its limiters returns its units all the same.
atexit.register(_close_all)
