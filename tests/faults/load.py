"""A steady load of checks, with a record of every answer.

One document has a rule for each failure policy and each algorithm, so one load covers them all.
Tasks use an AsyncLimiter and threads a Limiter with another store; both count the same keys, like
two nodes. After each answer, a task or thread waits a little and checks again.

One more task only wakes up every few milliseconds. Its delay is the time that this machine adds to
every wait.
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

from ratekeeper import AsyncLimiter, Decision, Limit, Limiter, Request
from ratekeeper.core.model import BUCKETS, UNIT_ALGORITHMS
from ratekeeper.decide.failure import LocalFallback
from tests.faults.checker import Admitted, excess

POLICIES = ("open", "closed", "local")
LIMIT, PER_S = 20, 1
# Spent within a second, and not whole again before the end of the test: lost counts would show.
LONG, LONG_LIMIT, LONG_PER_S = "long", 40, 3600
CASES = (*UNIT_ALGORITHMS, LONG)
# A task and a thread check each key at this interval: two and a half times the limit.
GAP_S = 0.04
NODES = 2
DEADLINE_S = 0.05
# The time that a busy machine may add to any wait; the tests print the real number.
SLACK_S = 1.0
RECOVERED_S_MAX = 30.0
# The load has recovered after this time without a degraded answer.
CALM_S = 0.6
_LAG_STEP_S = 0.005

# The wall clock minus the monotonic clock at one moment. Times here come from the monotonic clock,
# which cannot be set. A node with a wrong wall clock gets the right difference from its parent.
EPOCH_VARIABLE = "FAULTS_EPOCH_NS"
EPOCH_NS = int(os.environ.get(EPOCH_VARIABLE) or time.time_ns() - time.monotonic_ns())


def now_ns() -> int:
    """Return the wall time at the start of this process plus the monotonic time since then."""
    return time.monotonic_ns() + EPOCH_NS


def limit_of(case: str, limit: int = LIMIT) -> Limit:
    """Return a rule's limit: `limit` by one algorithm, or a few units for a long time."""
    if case == LONG:
        return Limit(LONG_LIMIT, per=LONG_PER_S)
    return Limit(limit, per=PER_S, algorithm=case)  # type: ignore[arg-type]  # one of the five


class Key(NamedTuple):
    """A rule, and the user that it counts."""

    policy: str
    case: str
    user: str = "ann"

    @property
    def request(self) -> Request:
        return Request(user=self.user, endpoint=f"/{self.policy}/{self.case}")


KEYS = tuple(Key(policy, case) for policy in POLICIES for case in CASES)


def document(limit: int = LIMIT, *, holds: int | None = None) -> dict[str, object]:
    """Return the rule document.

    `holds`  the capacity of every bucket, for any limit. A bucket that shrinks is empty but not in
             debt, so rules that go up and down would otherwise admit more than the higher limit.
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
    """One recorded answer."""

    key: Key
    sent_ns: int
    answered_ns: int
    allowed: bool
    degraded: bool
    source: str = ""
    units: int = 1

    @property
    def admitted(self) -> Admitted:
        return Admitted(self.sent_ns, self.answered_ns, self.units)


@dataclass(slots=True)
class Record:
    """All answers, and how late this machine was."""

    noted: list[Noted] = field(default_factory=list)
    lag_ns: int = 0
    lost: int = 0
    """Requests without an answer, because their connection was cut."""

    def note(self, key: Key, sent_ns: int, decision: Decision, source: str) -> None:
        """Record one decision."""
        self.put(key, sent_ns, decision.allowed, decision.degraded, source)

    def put(self, key: Key, sent_ns: int, allowed: bool, degraded: bool, source: str) -> None:
        """Record one answer that did not come as a Decision."""
        self.noted.append(Noted(key, sent_ns, now_ns(), allowed, degraded, source))

    def of(self, key: Key) -> list[Noted]:
        """Return the answers of one key."""
        return [each for each in self.noted if each.key == key]

    def keys(self, policy: str) -> list[Key]:
        """Return the keys under a policy."""
        return sorted({each.key for each in self.noted if each.key.policy == policy})

    def last_degraded_ns(self) -> int:
        """Return the time of the last degraded answer, or 0."""
        return max((each.answered_ns for each in self.noted if each.degraded), default=0)

    def slowest_ns(self) -> int:
        """Return the longest time that an answer took."""
        return max((each.answered_ns - each.sent_ns for each in self.noted), default=0)


async def ask_in_tasks(
    limiter: AsyncLimiter, record: Record, keys: Iterable[Key], source: str
) -> None:
    """Check each key in a task, until cancelled."""

    async def ask(key: Key) -> None:
        while True:
            sent_ns = now_ns()
            result = await limiter.evaluate(key.request)
            record.note(key, sent_ns, result.decision, source)
            await asyncio.sleep(GAP_S)

    async with asyncio.TaskGroup() as group:
        for key in keys:
            group.create_task(ask(key))


class Askers:
    """Threads that each check some of the keys in turn."""

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
                    result = self._limiter.evaluate(key.request)
                    self._record.note(key, sent_ns, result.decision, "threads")
                    self._stopped.wait(GAP_S / len(keys))
        except BaseException as error:
            self.failures.append(error)

    def stop(self) -> None:
        """End the threads; raise the first error of any thread."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        if self.failures:
            raise self.failures[0]


async def watch_lag(record: Record) -> None:
    """Record the longest delay of this event loop."""
    while True:
        began_ns = time.monotonic_ns()
        await asyncio.sleep(_LAG_STEP_S)
        late_ns = time.monotonic_ns() - began_ns - int(_LAG_STEP_S * 1e9)
        record.lag_ns = max(record.lag_ns, late_ns)


@asynccontextmanager
async def steady_load(
    uri: str, rules: str = RULES_TEXT, keys: Sequence[Key] = KEYS, nodes: int = NODES
) -> AsyncIterator[Record]:
    """Send checks from tasks and threads for the length of the block."""
    record = Record()
    local_fallback = LocalFallback(nodes=nodes)
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
    """Send the same load through the caller's limiters, which stay open."""
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
    """Wait until the store admits every key again and no recent answer was degraded."""
    ends_ns = now_ns() + int(seconds_max * 1e9)
    # The long limits do not count: they may have no units left.
    keys = {each.key for each in record.noted if each.key.case != LONG}
    while now_ns() < ends_ns:
        since_ns = now_ns() - int(CALM_S * 1e9)
        recent = [each for each in record.noted[-5_000:] if each.answered_ns > since_ns]
        exact = {each.key for each in recent if each.allowed and not each.degraded}
        if exact >= keys and not any(each.degraded for each in recent):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"not exact again after {seconds_max:g} s")


async def later(seconds: float, work: Callable[[], object] | None = None) -> None:
    """Let the load run for some seconds, then call a blocking function in a thread."""
    await asyncio.sleep(seconds)
    if work is not None:
        await asyncio.to_thread(work)


def exact_excess(record: Record, key: Key, limit: Limit | None = None) -> int:
    """Return by how many units the store's own admissions of a key exceed its limit."""
    noted = [each.admitted for each in record.of(key) if each.allowed and not each.degraded]
    return excess(limit or limit_of(key.case), noted)
