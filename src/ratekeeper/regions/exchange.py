"""The leader of a region: it carries reports between the stores of the regions.

Every process with global limits has a RegionSync: a thread with an event loop of its own. No
request waits for it. All of these processes are candidates. One has the lead, which lasts three
seconds and which it renews every second: if it dies, stops or cannot reach the region's store,
another process leads in less than five seconds. A leader that steps down is replaced at once.

The leader does three things at a time:

    work      every 50 ms: read the reports that are due, send them to each other region, and write
              the totals that all regions have accepted to its own store
    greet     once a second for each link: read the notes and the clock of the other region's store
    manage    once a second: set the shares (`table.py`), and write the status for operators

A slow or dead link does not delay the others: each link has its own batches and deadlines.

The next leader needs no state of this one. A report that was not accepted is due again after a
second, and all calls can be repeated. A leader that was suspended and resumes finds that its lead
has expired, and the store rejects its fencing token.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import chain, repeat
from time import thread_time
from typing import Final, TypeVar

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ChangeRefused, ConfigError, StoreError, StoreTimeout
from ratekeeper.core.forks import after_fork, fork_safe
from ratekeeper.decide.region_monitor import LinkState, LinkStatus, PeerCounts, RegionStatus
from ratekeeper.decide.regional import RegionalCounts, Report, Shares
from ratekeeper.regions.status import STATUS_NOTE, parse_status, status_text
from ratekeeper.regions.sync import Batch, Sync
from ratekeeper.regions.table import (
    REGION_NOTE,
    TABLE_NOTE,
    Membership,
    ShareTable,
    newest_table,
    share_table,
)

T = TypeVar("T")

# How often a candidate asks for the lead, give or take a fifth, and how long the lead lasts.
LEAD_S: Final = 1.0
LASTS_S: Final = 3.0
# How often the leader reads the reports that are due, and how many at a time.
TICK_S: Final = 0.05
DUE_MAX: Final = 2_000
# After a round, the leader pauses for the processor time that the round took, up to this time.
BUSY_S_MAX: Final = 0.5
# How often the leader reads the notes of another region, and of its own.
GREET_S: Final = 1.0
# A process that has just started, and may not check yet, repeats its calls more often for a time.
START_S: Final = 0.1
START_FOR_S: Final = 5.0
# A link that has not answered for this time is down. Eventual limits go on without that region.
LIVE_S: Final = 3.0
# Deadlines of calls: to the own store, and to that of another region.
OWN_S: Final = 1.0
LINK_S: Final = 2.0
# The shares are written again after this time, in case a part of the store has lost them.
SHARES_S: Final = 10.0
# Clocks that differ by more are reported.
CLOCK_NS_MAX: Final = NS_PER_SECOND
# Problems of a link that change, such as how far clocks differ, are logged once in this time.
LOG_S: Final = 60.0
# A process that starts waits this long for the leader of its region.
WAIT_S_MAX: Final = 1.0
# After an error of the own store, or a defect, the leader waits this long.
ERROR_S: Final = 0.5
# A process that must not lead, because its settings are wrong, tries again after this time.
REFUSED_S: Final = 10.0
# Closing waits this long for the thread, and this part of it for the store to release the lead.
CLOSE_S_MAX: Final = 2.0
STEP_DOWN_S: Final = 0.5
# The status of 16 regions fits into a note.
PROBLEM_CHARS_MAX: Final = 400
RULES_MAX: Final = 10_000
LISTENERS_MAX: Final = 16

log = logging.getLogger("ratekeeper.regions")

OnExcess = Callable[[str, str, str, int], None]


async def in_time(call: Awaitable[T], seconds: float) -> T:
    """Await a call of a store. Raises StoreTimeout after the deadline, or another StoreError."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError:
        raise StoreTimeout(f"no answer within {seconds:g} s") from None


def process_name() -> str:
    """Return a unique name for a process that operators understand."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


class Link:
    """The link to one other region, as the leader knows it."""

    def __init__(self, peer: str, store: RegionalCounts) -> None:
        self.peer = peer
        self.store = store
        self.heard_s: float | None = None
        """When the region answered last."""
        self.usable = False
        self.refused = False
        self.problem = ""
        self.clock_ns: int | None = None
        """The clock of the region's store minus that of this process."""
        self.apart: frozenset[str] = frozenset()
        """The regions with which that region's leader exchanges no totals, according to its
        status."""

    def state(self, now_s: float) -> LinkState:
        """Return whether totals are exchanged."""
        if self.heard_s is None or now_s - self.heard_s > LIVE_S:
            return "down"
        return "refused" if self.refused else "up"


class Term:
    """The work of a leader while it has the lead. `run` ends when it is cancelled."""

    def __init__(self, exchange: Exchange, token: int) -> None:
        self.token = token
        self.problem = ""
        self.latest: RegionStatus | None = None
        """The status of the last second, for other threads."""
        self.shares: Shares | None = None
        self.backlog = 0
        self.own_clock_ns = 0
        self._exchange = exchange
        self._own = exchange.own
        self._sync = exchange.sync
        self.membership = Membership(exchange.region, exchange.first, exchange.others)
        self.links = {peer: Link(peer, store) for peer, store in exchange.others.items()}
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._answered = asyncio.Event()
        self._sending: set[asyncio.Task[None]] = set()
        self._used_s = exchange.processor_s()
        self._set_at_s: float | None = None
        self._logged: dict[str, tuple[str, str, float]] = {}
        self._defect = ""

    async def run(self) -> None:
        """Lead until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for link in self.links.values():
                    greet = partial(self._greet, link)
                    works = partial(self._works, link)
                    group.create_task(self._forever(greet, GREET_S, works))
                settled = self._exchange.settled
                group.create_task(self._forever(self._manage, GREET_S, settled.is_set))
                await self._ready.wait()
                group.create_task(self._forever(self._work, TICK_S))
                group.create_task(self._forever(self._accept, 0.0))
        finally:
            for task in self._sending:
                task.cancel()

    async def _forever(
        self,
        step: Callable[[], Awaitable[None]],
        every_s: float,
        has_started: Callable[[], bool] = lambda: True,
    ) -> None:
        """Repeat a step while this process has the lead; more often while it starts."""
        while True:
            started_s = self._loop.time()
            wait_s = every_s if has_started() else min(every_s, self._exchange.start_s())
            if not self._exchange.is_leader:  # the lead was renewed late, or this term ends
                wait_s = ERROR_S
            else:
                try:
                    await step()
                except StoreError as error:
                    self.problem = str(error)
                    wait_s = max(wait_s, ERROR_S)
                except Exception as error:
                    # The other steps go on: an invalid note of one region must not stop the others.
                    if self._defect != repr(error):
                        self._defect = repr(error)
                        log.exception("regions: a defect; the leader tries again")
                    self.problem = f"a defect ({type(error).__name__}); the log has more"
                    wait_s = max(wait_s, ERROR_S)
            await asyncio.sleep(max(wait_s - (self._loop.time() - started_s), 0.0))

    # ── Links ──────────────────────────────────────────────────────────────────────────────────

    def _works(self, link: Link) -> bool:
        """Return True if totals can be exchanged, as far as the leader knows."""
        return link.usable and self._ready.is_set()

    async def _greet(self, link: Link) -> None:
        """Read the notes of another region's store."""
        self.membership.asks(link.peer)
        try:
            notes = await in_time(link.store.notes(), LINK_S)
            asked_ns = self._now_ns()
            clock_ns = await in_time(link.store.now_ns(), LINK_S)
        except StoreError as error:
            self.membership.missed(link.peer)
            link.problem = str(error)
        else:
            link.clock_ns = clock_ns - (asked_ns + self._now_ns()) // 2
            heard = self.membership.hear(link.peer, notes)
            link.apart = _apart(link.peer, notes, clock_ns)
            link.heard_s = self._loop.time()
            link.usable, link.refused = heard.usable, not heard.usable
            link.problem = heard.problem or self._clock_problem(link)
        self._log_link(link)
        if self.shares is not None:
            self._use(self.shares)
        if self._works(link):
            # Connects to the servers of a Cluster that have not received a report yet.
            ready = link.store.learn(self._exchange.region, self._sync.epoch, ())
            with suppress(StoreError):
                await in_time(ready, GREET_S)

    def _clock_problem(self, link: Link) -> str:
        offset_ns = self.clock_offset_ns(link)
        if offset_ns is None or abs(offset_ns) <= CLOCK_NS_MAX:
            return ""
        return (
            f"the clock of {link.peer} differs from that of this region by "
            f"{offset_ns / NS_PER_SECOND:+.1f} s; synchronize them"
        )

    def clock_offset_ns(self, link: Link) -> int | None:
        """Return the clock of the other region's store minus that of this region's store."""
        if link.clock_ns is None or not self.own_clock_ns:
            return None
        return link.clock_ns - self.own_clock_ns

    def _log_link(self, link: Link) -> None:
        """Log each change of a link's state, and a new problem in the same state once a minute."""
        now_s = self._loop.time()
        state = link.state(now_s)
        logged, problem, logged_s = self._logged.get(link.peer, ("up", "", now_s))
        is_new = (state, bool(link.problem)) != (logged, bool(problem))
        if is_new or (link.problem != problem and now_s - logged_s > LOG_S):
            self._logged[link.peer] = (state, link.problem, now_s)
            level = logging.WARNING if link.problem else logging.INFO
            log.log(level, "regions: link to %s: %s: %s", link.peer, state, link.problem or "works")

    def live(self) -> tuple[str, ...]:
        """Return the regions that answer."""
        now_s = self._loop.time()
        return tuple(peer for peer, link in self.links.items() if link.state(now_s) == "up")

    def usable(self) -> tuple[str, ...]:
        """Return the regions to which reports are sent: they answer, and their notes are valid."""
        return tuple(peer for peer in self.live() if self.links[peer].usable)

    # ── Shares and notes ───────────────────────────────────────────────────────────────────────

    async def _manage(self) -> None:
        """Set the shares, announce them, and write the status."""
        own, now_s = self._own, self._loop.time()
        notes = await in_time(own.notes(), OWN_S)
        shares = await in_time(own.shares(), OWN_S)
        asked_ns = self._now_ns()
        now_ns = await in_time(own.now_ns(), OWN_S)
        self.own_clock_ns = now_ns - (asked_ns + self._now_ns()) // 2
        if self.shares is None and shares is not None:
            self._trust(shares.live)
        plan = self.membership.plan(notes, shares, now_ns, self.live())
        self.problem = plan.problem
        if not plan.leads:
            await self._exchange.refuse(plan.problem)
            return
        if plan.shares is not None:
            is_old = self._set_at_s is None or now_s - self._set_at_s > SHARES_S
            if plan.shares != shares or is_old:
                if not await in_time(own.set_shares(plan.shares, self.token), OWN_S):
                    self._exchange.lost()
                    return
                self._set_at_s = now_s
            self._use(plan.shares)
            self._ready.set()
        if plan.note and plan.note != notes.get(REGION_NOTE):
            await in_time(own.note(REGION_NOTE, plan.note), OWN_S)
        if not self.membership.has_asked_all:
            return
        self.backlog = await in_time(own.backlog(), OWN_S)
        self.latest = self.status()
        await in_time(own.note(STATUS_NOTE, status_text(self.latest, now_ns)), OWN_S)
        if plan.shares is not None:
            self._exchange.settled.set()

    def _trust(self, live: Iterable[str]) -> None:
        """Treat the regions as live that the previous leader noted as live.

        Otherwise eventual limits would go on without the other regions until these have answered.
        """
        for peer in live:
            link = self.links.get(peer)
            if link is not None and link.heard_s is None:
                link.heard_s = self._loop.time()

    def _use(self, shares: Shares) -> None:
        self.shares = shares
        others = [each for each in self.membership.table.regions if each != self._exchange.region]
        if self.membership.table.epoch == shares.epoch:
            apart = frozenset[str]().union(*(self.links[each].apart for each in self.usable()))
            is_whole = apart.isdisjoint(self.membership.table.regions)
            self._sync.use(others, self.live(), shares.epoch, self.usable(), is_whole=is_whole)

    def status(self) -> RegionStatus:
        """Return the status of this region for operators."""
        exchange, shares = self._exchange, self.shares
        target = self.membership.table.share(exchange.region)
        share = Fraction(0) if shares is None else shares.share
        excess = [self._sync.counts(peer).excess_units for peer in self.links]
        unknown = [
            LinkStatus(region, "down", f"the settings of {exchange.region} have no store of it")
            for region in self.membership.table.regions
            if region != exchange.region and region not in self.links
        ]
        return RegionStatus(
            exchange.region,
            is_self=True,
            leader=exchange.name,
            age_s=0.0,
            problem=self.problem[:PROBLEM_CHARS_MAX],
            epoch=0 if shares is None else shares.epoch,
            share=share,
            target=None if share == target else target,
            backlog=self.backlog,
            unaccepted_units=self._sync.unaccepted_units,
            excess_units=max(excess, default=0),
            links=(*map(self._link_status, self.links.values()), *unknown),
        )

    def _link_status(self, link: Link) -> LinkStatus:
        now_s = self._loop.time()
        offset_ns = self.clock_offset_ns(link)
        now_ns = self._now_ns()
        since_ns = self._sync.waits_since_ns(link.peer, now_ns)
        is_removed = link.peer not in self.membership.table.regions
        return LinkStatus(
            link.peer,
            "removed" if is_removed else link.state(now_s),
            link.problem[:PROBLEM_CHARS_MAX],
            0.0 if since_ns is None else max(now_ns - since_ns, 0) / NS_PER_SECOND,
            None if link.heard_s is None else now_s - link.heard_s,
            None if offset_ns is None else offset_ns / NS_PER_SECOND,
        )

    # ── Reports ────────────────────────────────────────────────────────────────────────────────

    async def _work(self) -> None:
        """Send the reports that are due. Leave half of the processor to the requests."""
        self._send(await in_time(self._own.due(DUE_MAX, self.token), OWN_S))
        used_s = self._exchange.processor_s()
        spent_s, self._used_s = used_s - self._used_s, used_s
        await asyncio.sleep(min(spent_s, BUSY_S_MAX))

    def _send(self, reports: Sequence[Report] = ()) -> None:
        """Send as many batches as may be in flight."""
        for more in chain([reports], repeat(())):
            batches = self._sync.sending(more, self._now_ns())
            if not batches:
                break
            for peer, batch in batches.items():
                task = self._loop.create_task(self._learn(self.links[peer], batch))
                self._sending.add(task)
                task.add_done_callback(partial(self._sent, peer, batch))
        self._answered.set()  # a region without others accepts at once

    def _sent(self, peer: str, batch: Batch, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if task.cancelled():  # maybe before it began
            self._sync.failed(peer, batch)

    async def _learn(self, link: Link, batch: Batch) -> None:
        """Send reports to another region."""
        answers = None
        call = link.store.learn(self._exchange.region, batch.epoch, batch.reports)
        try:
            answers = await in_time(call, LINK_S)
        except StoreError as error:
            link.problem = str(error)
        except Exception:
            log.exception("regions: a defect; %s gets these reports again", link.peer)
        if answers is None:
            self._sync.failed(link.peer, batch)
            return
        link.heard_s = self._loop.time()
        for excess in self._sync.answered(link.peer, batch, answers, self._now_ns()):
            self._exchange.tell_excess(link.peer, excess.key.rule, excess.key.subject, excess.units)
        self._answered.set()
        self._send()

    async def _accept(self) -> None:
        """Write the totals that all regions have accepted to the own store."""
        await self._answered.wait()
        self._answered.clear()
        accepted = self._sync.accepted()
        if accepted:
            await in_time(self._own.accept(self._sync.epoch, accepted, self.token), OWN_S)

    def _now_ns(self) -> int:
        return round(self._loop.time() * NS_PER_SECOND)


def _apart(region: str, notes: Mapping[str, str], now_ns: int) -> frozenset[str]:
    """Return the regions with which the leader of a region exchanges no totals.

    The result is empty if the leader has written no status for some seconds: a region without a
    leader sends no reports, but its store accepts those of others.
    """
    with suppress(ConfigError):
        status = parse_status(region, notes.get(STATUS_NOTE), now_ns, is_self=False)
        if status.leader:
            return frozenset(link.peer for link in status.links if link.state != "up")
    return frozenset()


class Exchange:
    """A candidate for the lead of its region, in one event loop."""

    def __init__(
        self,
        region: str,
        first: ShareTable,
        stores: Mapping[str, RegionalCounts],
        name: str,
        chance: random.Random | None = None,
        processor_s: Callable[[], float] = thread_time,
    ) -> None:
        """`first` is the table of the settings. `stores` has the store of every region.

        `chance` spreads the candidates, and `processor_s` returns the processor time that this
        thread has used. A simulation passes its own, to be repeatable.
        """
        self.region = region
        self.first = first
        self.own = stores[region]
        self.others = {peer: store for peer, store in sorted(stores.items()) if peer != region}
        self.name = name
        self.processor_s = processor_s
        self.sync = Sync()
        self.term: Term | None = None
        self.settled = threading.Event()
        """Set when the leader has asked the other regions, or the own store does not answer."""
        self.listeners: list[OnExcess] = []
        self.rule_names: dict[str, str] = {}
        self._leads_until_s = 0.0
        self._asking = False
        self._asks_at_s = 0.0
        self._began_s = 0.0
        self._refused = ""
        self._working: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._random = chance or random.Random()  # noqa: S311 - to spread the candidates

    @property
    def is_leader(self) -> bool:
        """True while the lead lasts."""
        return self._loop is not None and self._loop.time() < self._leads_until_s

    async def run(self) -> None:
        """Ask for the lead until cancelled; then step down."""
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        try:
            while True:
                if self._loop.time() >= self._asks_at_s:
                    await self._ask()
                if not self.is_leader:
                    await self._end_term()
                every_s = LEAD_S if self.settled.is_set() or self.is_leader else self.start_s()
                await asyncio.sleep(every_s * self._random.uniform(0.8, 1.2))
        finally:
            may_lead = self.is_leader or self._asking
            await self._end_term()
            if may_lead:
                with suppress(StoreError):
                    await in_time(self.own.step_down(self.name), STEP_DOWN_S)

    async def _ask(self) -> None:
        """Take or renew the lead."""
        assert self._loop is not None, "run has set it"  # noqa: S101 - ours
        asked_s = self._loop.time()
        lasts_ns = round(LASTS_S * NS_PER_SECOND)
        self._asking = True  # until the store answers: a cancelled call may take the lead
        try:
            leader, token = await in_time(self.own.lead(self.name, lasts_ns), OWN_S)
            if leader != self.name and not self.settled.is_set():
                await self._follow(leader)
        except StoreError as error:
            self.settled.set()
            if self.term is not None:
                self.term.problem = str(error)
        except Exception:
            self.settled.set()
            log.exception("regions: a defect; this process asks for the lead again")
        else:
            self._asking = False
            self._leads_until_s = asked_s + LASTS_S if leader == self.name else 0.0
            if self.is_leader and (self.term is None or self.term.token != token):
                await self._end_term()
                self._begin_term(token)

    async def _follow(self, leader: str) -> None:
        """Find out whether the leader has asked the other regions: then its status is written."""
        notes = await in_time(self.own.notes(), OWN_S)
        with suppress(ConfigError):
            if parse_status(self.region, notes.get(STATUS_NOTE), 0, is_self=True).leader == leader:
                self.settled.set()

    def start_s(self) -> float:
        """Return how often to repeat a call: more often while this process may not check yet."""
        assert self._loop is not None, "run has set it"  # noqa: S101 - ours
        return START_S if self._loop.time() - self._began_s < START_FOR_S else LEAD_S

    def _begin_term(self, token: int) -> None:
        assert self._loop is not None, "run has set it"  # noqa: S101 - ours
        log.info("regions: %s leads the region %s", self.name, self.region)
        self.term = Term(self, token)
        self._working = self._loop.create_task(self._lead(self.term))

    async def _lead(self, term: Term) -> None:
        try:
            await term.run()
        except Exception:
            log.exception("regions: a defect; the leader begins again")
            await asyncio.sleep(ERROR_S)
            self.term = None  # the next renewal begins a new term

    async def _end_term(self) -> None:
        working, self._working, self.term = self._working, None, None
        if working is not None:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def refuse(self, problem: str) -> None:
        """Leave the lead to other processes for a time: this process must not lead this region."""
        assert self._loop is not None, "run has set it"  # noqa: S101 - ours
        if problem != self._refused:
            log.error("regions: this process must not lead: %s", problem)
        self._refused = problem
        self._asks_at_s = self._loop.time() + REFUSED_S
        self.lost()
        await in_time(self.own.step_down(self.name), STEP_DOWN_S)

    def lost(self) -> None:
        """Note that another process has the lead."""
        self._leads_until_s = 0.0

    def tell_excess(self, peer: str, number: str, subject: str, units: int) -> None:
        """Report a subject above its limit to the listeners."""
        for listener in self.listeners:
            try:
                listener(self.rule_names.get(number, number), subject, peer, units)
            except Exception:
                log.exception("regions: a listener failed")


class RegionSync:
    """One process's part in the sync of its region. Implements `RegionMonitor`."""

    def __init__(
        self,
        region: str,
        first: ShareTable,
        stores: Mapping[str, RegionalCounts],
        name: str = "",
    ) -> None:
        """`first` is the table of the settings. `stores` has the store of every region.

        The caller opens the stores, and closes them after `close`. `name` is that of this process,
        for operators; by default the host name, the process id and a random part.
        """
        self._name = name
        self._stores = dict(stores)
        self._exchange = Exchange(region, first, stores, name or process_name())
        self._thread: _SyncThread | None = None
        self._lock = fork_safe(threading.Lock())
        self._is_closed = False
        after_fork(self.forked)

    @property
    def region(self) -> str:
        """The region of this process."""
        return self._exchange.region

    @property
    def names(self) -> Sequence[str]:
        """All regions that are set up, this one included."""
        return tuple(sorted(self._stores))

    @property
    def is_leader(self) -> bool:
        """True if this process leads its region."""
        return self._exchange.is_leader

    def name_rule(self, number: str, rule: str) -> None:
        """Store the name of a rule, for `on_excess`. `rule_number` returns its number."""
        names = self._exchange.rule_names
        names.pop(number, None)
        names[number] = rule
        if len(names) > RULES_MAX:
            del names[next(iter(names))]

    # ── Life ───────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the thread, unless it runs. Does no I/O in the calling thread."""
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = _SyncThread(self._exchange)
                # Closes the thread also at interpreter exit, and when this object is
                # garbage-collected.
                weakref.finalize(self, self._thread.close)

    def wait(self, seconds: float = WAIT_S_MAX) -> bool:
        """Wait until the leader of the region has read the table of shares from the other regions.

        Before that, a region that starts for the first time has no share, and a region that was
        removed may still use a share that others have now. Returns False after `seconds`. Returns
        at once if the region's store does not answer.
        """
        return self._exchange.settled.wait(seconds)

    def close(self) -> None:
        """Step down and end the thread. Takes at most CLOSE_S_MAX."""
        with self._lock:
            thread, self._thread, self._is_closed = self._thread, None, True
        if thread is not None:
            thread.close()

    def forked(self) -> None:
        """In a forked child: begin anew. The parent keeps its thread, its loop and the lead."""
        thread, self._thread = self._thread, None
        old = self._exchange
        self._exchange = Exchange(old.region, old.first, self._stores, self._name or process_name())
        self._exchange.listeners, self._exchange.rule_names = old.listeners, old.rule_names
        if thread is not None:
            thread.abandon()
            self.start()

    # ── For operators ──────────────────────────────────────────────────────────────────────────

    def here(self) -> RegionStatus | None:
        """Return the status of this region if this process is its leader, else None. No I/O."""
        term = self._exchange.term
        return term.latest if term is not None and self._exchange.is_leader else None

    def counts(self) -> Mapping[str, PeerCounts]:
        """Return the counts of this process's exchange with each other region. No I/O."""
        found = {}
        for peer, store in self._exchange.others.items():
            sent, received = store.traffic()
            counts = self._exchange.sync.counts(peer)
            found[peer] = replace(counts, sent_bytes=sent, received_bytes=received)
        return found

    async def own_status(self) -> RegionStatus:
        """Return the status of this region. See RegionMonitor."""
        return await self._status_of(self.region)

    async def status(self) -> Sequence[RegionStatus]:
        """Return the status of all regions, this one first. See RegionMonitor."""
        names = [self.region, *self._exchange.others]
        return await asyncio.gather(*map(self._status_of, names))

    async def _status_of(self, region: str) -> RegionStatus:
        store, is_self = self._stores[region], region == self.region
        try:
            notes = await in_time(store.notes(), LINK_S / 2)
            now_ns = await in_time(store.now_ns(), LINK_S / 2)
            return parse_status(region, notes.get(STATUS_NOTE), now_ns, is_self=is_self)
        except (StoreError, ConfigError) as error:
            return RegionStatus(region, is_self=is_self, problem=str(error))

    async def table(self) -> Mapping[str, Fraction]:
        """Return the newest table of shares in this region's store. Raises StoreError."""
        found = newest_table(await in_time(self._exchange.own.notes(), LINK_S))
        return dict((found or self._exchange.first).shares)

    async def change_shares(self, shares: Mapping[str, Fraction]) -> Mapping[str, str]:
        """Write a new table of shares to every region that can be reached. See RegionMonitor."""
        unknown = sorted(shares.keys() - self._stores.keys())
        if unknown:
            raise ConfigError(
                f"the region {unknown[0]!r} has no store in the settings, which have "
                f"{', '.join(self.names)}; first add it to the settings of all regions"
            )
        share_table(1, shares)  # raises before anything is read
        found, failed = await self._tables({})
        wanted = share_table(max([1, *(table.version for table in found)]) + 1, shares)
        text = wanted.text()
        await in_time(self._exchange.own.note(TABLE_NOTE, text), LINK_S)
        written = await self._for_others(lambda store: store.note(TABLE_NOTE, text), failed)
        found, _ = await self._tables(failed)
        newest = max(found, key=lambda table: table.epoch, default=wanted)
        if newest != wanted:
            raise ChangeRefused(
                f"another change of the shares was made at the same time: "
                f"{', '.join(f'{region}={share}' for region, share in newest.shares)} (version "
                f"{newest.version}); it is in use instead of this one. Look at the shares, and "
                f"repeat the change if it is still right"
            )
        return {peer: str(each) for peer, each in written.items() if each is not None}

    async def _tables(
        self, failed: Mapping[str, StoreError]
    ) -> tuple[list[ShareTable], dict[str, StoreError]]:
        """Return the newest table in each store that answers, and the errors of the others.

        The own store must answer.
        """
        own = await in_time(self._exchange.own.notes(), LINK_S)
        read = await self._for_others(lambda store: store.notes(), failed)
        errors = {peer: each for peer, each in read.items() if isinstance(each, StoreError)}
        found = [newest_table(each) for each in [own, *read.values()] if isinstance(each, dict)]
        return [table for table in found if table is not None], errors

    async def _for_others(
        self, call: Callable[[RegionalCounts], Awaitable[T]], failed: Mapping[str, StoreError]
    ) -> dict[str, T | StoreError]:
        """Call the stores of all other regions at once, except regions that have failed before."""

        async def called(peer: str) -> T | StoreError:
            if peer in failed:  # an operator waits for one deadline, not for one per call
                return failed[peer]
            try:
                return await in_time(call(self._stores[peer]), LINK_S)
            except StoreError as error:
                return error

        others = tuple(self._exchange.others)
        return dict(zip(others, await asyncio.gather(*map(called, others)), strict=True))

    def on_excess(self, listener: OnExcess) -> None:
        """Call `listener` with rule, subject, other region and units of each excess."""
        del self._exchange.listeners[: -LISTENERS_MAX + 1]
        self._exchange.listeners.append(listener)


class _SyncThread:
    """The thread of an Exchange, with its event loop."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._stop: Callable[[], object] | None = None
        self._stopping = False
        self._lock = fork_safe(threading.Lock())
        self._thread = threading.Thread(target=self._run, name="ratekeeper-regions", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception:
            log.exception("regions: a defect; this process no longer takes part in the exchange")

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        running = loop.create_task(self._exchange.run())
        with self._lock:
            self._stop = partial(loop.call_soon_threadsafe, running.cancel)
            if self._stopping:
                running.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await running
        finally:
            with self._lock:
                self._stop = None

    def close(self) -> None:
        """Stop, and wait until the lead is given up; at most CLOSE_S_MAX."""
        with self._lock:
            self._stopping = True
            if self._stop is not None:
                self._stop()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S_MAX)

    def abandon(self) -> None:
        """In a forked child: leave the parent's event loop as it is.

        Closing it here would take the parent's sockets out of the poll that both share.
        """
        self._stop = None
        _abandoned.append(self._exchange)


# The loops of parent processes: they are kept, because collecting a loop would close its sockets.
_abandoned: Final[list[Exchange]] = []
