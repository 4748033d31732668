"""A steady load, and everything that it was answered.

One document has a rule for each failure policy and each algorithm, so that one load shows them all.
Tasks ask an AsyncLimiter and threads a Limiter with a store of its own; both count the same keys,
as two nodes do. Whoever is answered waits a little and asks again, whatever the answer was.

Beside them a task does nothing but wake up every few milliseconds. By how much it is late is what
this machine adds to every waiting.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import NamedTuple

from tests.faults.checker import Admitted, excess
from tollkeeper import AsyncLimiter, Decision, Limit, Limiter, Request
from tollkeeper.core.model import ALGORITHM_NAMES, BUCKETS
from tollkeeper.decide.failure import LocalFallback

POLICIES = ("open", "closed", "local")
LIMIT, PER_S = 20, 1
# Spent within a second and not whole again before the end: what was forgotten would show.
LONG, LONG_LIMIT, LONG_PER_S = "long", 40, 3600
CASES = (*ALGORITHM_NAMES, LONG)
# A task and a thread ask for each key so often: two and a half times the limit.
GAP_S = 0.04
NODES = 2
DEADLINE_S = 0.05
# What a paused machine may add to any waiting; how much it did is printed.
SLACK_S = 1.0
RECOVERED_S_MAX = 30.0
# So long without a degraded answer is recovered.
CALM_S = 0.6
_LAG_STEP_S = 0.005

# The two clocks of this machine, at one moment: times are of the one that nobody can set. A node
# whose wall clock is wrong is told the right one's.
EPOCH_VARIABLE = "FAULTS_EPOCH_NS"
EPOCH_NS = int(os.environ.get(EPOCH_VARIABLE) or time.time_ns() - time.monotonic_ns())


def now_ns() -> int:
    """The wall clock as it was when this process started, carried on."""
    return time.monotonic_ns() + EPOCH_NS


def limit_of(case: str, limit: int = LIMIT) -> Limit:
    """What each rule allows: so much by each algorithm, or little for long."""
    if case == LONG:
        return Limit(LONG_LIMIT, per=LONG_PER_S)
    return Limit(limit, per=PER_S, algorithm=case)  # type: ignore[arg-type]  # one of the five


class Key(NamedTuple):
    """A rule, and who is counted by it."""

    policy: str
    case: str
    user: str = "ann"

    @property
    def request(self) -> Request:
        return Request(user=self.user, endpoint=f"/{self.policy}/{self.case}")


KEYS = tuple(Key(policy, case) for policy in POLICIES for case in CASES)


def document(limit: int = LIMIT, *, holds: int | None = None) -> dict[str, object]:
    """The rules, as the file of a document has them.

    `holds`  what a bucket holds, whatever the limit is: one that is made smaller is empty and owes
             nothing, so rules that go up and down would give more than the higher limit.
    """
    return {
        "version": 1,
        "rules": [
            {
                "id": f"{policy}-{case}",
                "match": {"endpoint": f"/{policy}/{case}"},
                "by": ["user"],
                "limits": [_written(limit_of(case, limit), holds)],
                "on_failure": policy,
            }
            for policy in POLICIES
            for case in CASES
        ],
    }


def _written(limit: Limit, holds: int | None) -> dict[str, object]:
    written = {"limit": limit.limit, "per": f"{limit.per}s", "algorithm": limit.algorithm}
    if holds is not None and limit.algorithm in BUCKETS and limit.per == PER_S:
        written["capacity"] = holds
    return written


RULES_TEXT = json.dumps(document(), indent=1)


class Noted(NamedTuple):
    """One answer."""

    key: Key
    sent_ns: int
    told_ns: int
    allowed: bool
    degraded: bool
    source: str = ""
    units: int = 1

    @property
    def admitted(self) -> Admitted:
        return Admitted(self.sent_ns, self.told_ns, self.units)


@dataclass(slots=True)
class Record:
    """All answers, and how late this machine was."""

    noted: list[Noted] = field(default_factory=list)
    lag_ns: int = 0
    lost: int = 0
    """Requests that had no answer at all: a connection that was cut."""

    def note(self, key: Key, sent_ns: int, decision: Decision, source: str) -> None:
        """Write one down."""
        self.put(key, sent_ns, decision.allowed, decision.degraded, source)

    def put(self, key: Key, sent_ns: int, allowed: bool, degraded: bool, source: str) -> None:
        """The same, of an answer that came another way."""
        self.noted.append(Noted(key, sent_ns, now_ns(), allowed, degraded, source))

    def of(self, key: Key) -> list[Noted]:
        """Of one key."""
        return [each for each in self.noted if each.key == key]

    def keys(self, policy: str) -> list[Key]:
        """The keys under a policy."""
        return sorted({each.key for each in self.noted if each.key.policy == policy})

    def last_degraded_ns(self) -> int:
        """When the last degraded answer came; 0 if there was none."""
        return max((each.told_ns for each in self.noted if each.degraded), default=0)

    def slowest_ns(self) -> int:
        """The longest that anybody waited."""
        return max((each.told_ns - each.sent_ns for each in self.noted), default=0)


async def ask_in_tasks(
    limiter: AsyncLimiter, record: Record, keys: Iterable[Key], source: str
) -> None:
    """A task for each key, until cancelled."""

    async def ask(key: Key) -> None:
        while True:
            sent_ns = now_ns()
            ruling = await limiter.evaluate(key.request)
            record.note(key, sent_ns, ruling.decision, source)
            await asyncio.sleep(GAP_S)

    async with asyncio.TaskGroup() as group:
        for key in keys:
            group.create_task(ask(key))


class Askers:
    """Threads that ask in turn for some keys each."""

    def __init__(
        self, limiter: Limiter, record: Record, keys: Sequence[Key], threads: int = 3
    ) -> None:
        self._limiter = limiter
        self._record = record
        self._stopped = Event()
        self.failures: list[BaseException] = []
        parts = [keys[number::threads] for number in range(threads)]
        self._threads = [Thread(target=self._ask, args=(part,)) for part in parts if part]
        for thread in self._threads:
            thread.start()

    def _ask(self, keys: Sequence[Key]) -> None:
        try:
            while not self._stopped.is_set():
                for key in keys:
                    sent_ns = now_ns()
                    ruling = self._limiter.evaluate(key.request)
                    self._record.note(key, sent_ns, ruling.decision, "threads")
                    self._stopped.wait(GAP_S / len(keys))
        except BaseException as error:
            self.failures.append(error)

    def stop(self) -> None:
        """End them; what went wrong in one of them is raised."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        if self.failures:
            raise self.failures[0]


async def watch_lag(record: Record) -> None:
    """Note by how much this loop is late."""
    while True:
        began_ns = time.monotonic_ns()
        await asyncio.sleep(_LAG_STEP_S)
        late_ns = time.monotonic_ns() - began_ns - int(_LAG_STEP_S * 1e9)
        record.lag_ns = max(record.lag_ns, late_ns)


@asynccontextmanager
async def steady_load(
    uri: str, rules: str = RULES_TEXT, keys: Sequence[Key] = KEYS
) -> AsyncIterator[Record]:
    """Tasks and threads that ask for as long as the block lasts."""
    record = Record()
    local_fallback = LocalFallback(nodes=NODES)
    awaited = AsyncLimiter.from_rules(rules, store=uri, local_fallback=local_fallback)
    threaded = Limiter.from_rules(rules, store=uri, local_fallback=local_fallback)
    try:
        async with running_load(record, awaited, threaded, keys):
            yield record
    finally:
        await awaited.close()
        await asyncio.to_thread(threaded.close)


@asynccontextmanager
async def running_load(
    record: Record, awaited: AsyncLimiter, threaded: Limiter, keys: Sequence[Key] = KEYS
) -> AsyncIterator[None]:
    """The same on limiters that are there, which stay open."""
    tasks = [
        asyncio.create_task(ask_in_tasks(awaited, record, keys, "tasks")),
        asyncio.create_task(watch_lag(record)),
    ]
    askers = Askers(threaded, record, keys)
    try:
        yield
        for task in tasks:
            assert not task.done(), task.exception()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(askers.stop)


async def until_calm(record: Record, seconds_max: float = RECOVERED_S_MAX) -> None:
    """Wait until every key is admitted again by the store, and nobody was degraded for a while."""
    ends_ns = now_ns() + int(seconds_max * 1e9)
    # Of the limits that are whole again soon: the others may have nothing left.
    keys = {each.key for each in record.noted if each.key.case != LONG}
    while now_ns() < ends_ns:
        since_ns = now_ns() - int(CALM_S * 1e9)
        recent = [each for each in record.noted[-5_000:] if each.told_ns > since_ns]
        exact = {each.key for each in recent if each.allowed and not each.degraded}
        if exact >= keys and not any(each.degraded for each in recent):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"not exact again after {seconds_max:g} s")


async def later(seconds: float, work: Callable[[], object] | None = None) -> None:
    """Let the load go on for so long, and then do something that blocks beside it."""
    await asyncio.sleep(seconds)
    if work is not None:
        await asyncio.to_thread(work)


def exact_excess(record: Record, key: Key, limit: Limit | None = None) -> int:
    """By how much what the store admitted for a key is over its limit."""
    noted = [each.admitted for each in record.of(key) if each.allowed and not each.degraded]
    return excess(limit or limit_of(key.case), noted)
