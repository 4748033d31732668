"""RedisStore: counts in Redis, shared by every machine."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Container, Sequence
from dataclasses import replace
from typing import Self, cast

from ratekeeper.core.clock import Clock, SystemClock
from ratekeeper.core.errors import StoreError, StoreUnavailable
from ratekeeper.core.forks import after_fork, fork_safe
from ratekeeper.core.model import Consistency, Limit
from ratekeeper.core.steps import Ask, run, run_async
from ratekeeper.decide.leasing import (
    NO_LEASE,
    LateCharge,
    LeaseCheck,
    LeasedAnswer,
    Report,
)
from ratekeeper.decide.regional import AcrossRegions
from ratekeeper.decide.store import (
    MARKS_MAX,
    REGISTERED_MAX,
    Answer,
    BreakerState,
    Charge,
    ServerStatus,
    StoreStats,
    require_regional,
    require_strict,
)
from ratekeeper.decide.stores.redis.breakers import BreakerListener
from ratekeeper.decide.stores.redis.cells import RedisCells
from ratekeeper.decide.stores.redis.codec import NS_PER_US
from ratekeeper.decide.stores.redis.config import RedisConfig
from ratekeeper.decide.stores.redis.counters import (
    JointCheck,
    RedisCounter,
    reporting,
)
from ratekeeper.decide.stores.redis.denial_cache import DenialCache
from ratekeeper.decide.stores.redis.driver import AsyncioDriver, RedisServers, ThreadDriver
from ratekeeper.decide.stores.redis.health import (
    RedisHealth,
    count_states,
    forget_states,
    health,
    server_status,
)
from ratekeeper.decide.stores.redis.pubsub import (
    RedisSubscription,
    count_names,
    publish,
    register,
    registry_key,
    unregister,
)
from ratekeeper.decide.stores.redis.regional import RedisRegional
from ratekeeper.decide.stores.redis.scripts import MARKS, ReportAttempt, RuleScripts, ScriptCall


class RedisStore:
    """Counts in Redis or Valkey: one server, Sentinel or Cluster; for threads and asyncio.

    It connects at the first call. The server's clock decides. A `clock` that is not the system's is
    for tests, and its time is sent along.
    """

    is_private = False
    is_local = False

    @property
    def monitor(self) -> Self:
        """The counters and circuit breakers."""
        return self

    @property
    def channel(self) -> Self:
        """The messages between processes."""
        return self

    @property
    def authority(self) -> Self:
        """Leases and late charges."""
        return self

    @property
    def cells(self) -> RedisCells:
        """Values that nodes change by compare-and-set."""
        return self._cells

    @property
    def regional(self) -> RedisRegional:
        """The counts of one region, of limits that regions share."""
        return self._regional

    def __init__(self, config: RedisConfig, clock: Clock | None = None) -> None:
        self.config = config
        self._clock = clock or SystemClock()
        self._cache = DenialCache(config.denied_cache_ns)
        self._closed = False
        self._lock = fork_safe(threading.Lock())
        self._servers = RedisServers(config)
        self._threads = ThreadDriver(self._servers)
        # The driver of each event loop. A loop that is garbage-collected takes its driver along.
        self._drivers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncioDriver] = (
            weakref.WeakKeyDictionary()
        )
        self._regional = RedisRegional(config, self._clock, self._threads, self._driver_of_loop)
        self._cells = RedisCells(config, self._clock, self._driver_of_loop)
        # The workers of a server that loads the application before it forks would share one
        # socket, and read each other's replies.
        after_fork(self.forked)

    def counter(
        self,
        limits: Sequence[Limit],
        rule: str,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
    ) -> RedisCounter:
        """Prepare a rule's limits."""
        require_strict(consistency)
        require_regional(across)
        self._require_open()
        scripts = RuleScripts(tuple(limits), rule, self.config, self._clock)
        return RedisCounter(scripts, self._threads, self._driver_of_loop, self._cache)

    def check_together(
        self, checks: Sequence[Charge], optional: Container[int] = ()
    ) -> list[Answer] | Ask:
        """Check several subjects; all pass or none is charged.

        One round trip, in one atomic step. In a cluster two round trips; see JointCheck. If a round
        trip fails, a subject may stay charged, never twice; see `docs/redis.md`. A caller on
        asyncio that is cancelled has spent nothing.
        """
        if not checks:
            return []
        joint = self._joint_check(checks, optional)
        answers = joint.decided_locally(self._servers)
        return Ask(self._decide, self._shielded, joint) if answers is None else answers

    def lease(
        self, checks: Sequence[LeaseCheck], optional: Container[int] = ()
    ) -> list[LeasedAnswer] | Ask:
        """Check several subjects, all or none, and lease units with those that are charged.

        Round trips and errors are those of `check_together`.
        """
        if not checks:
            return []
        joint = self._leased_check(checks, optional)
        answers = joint.decided_locally(self._servers)
        if answers is None:
            return Ask(self._lease, self._lease_async, joint)
        return _with_leases(answers, joint)

    def report(self, reports: Sequence[Report]) -> list[Answer] | Ask:
        """Give units back and charge late: one batch of calls for each server."""
        if not reports:
            return []
        attempts = [_attempt_of(each) for each in reports]
        return Ask(self._report, self._report_async, attempts)

    def _decide(self, joint: JointCheck) -> list[Answer]:
        return run(joint.deciding(self._threads))

    def _lease(self, joint: JointCheck) -> list[LeasedAnswer]:
        return _with_leases(self._decide(joint), joint)

    async def _lease_async(self, joint: JointCheck) -> list[LeasedAnswer]:
        return _with_leases(await self._shielded(joint), joint)

    def _report(self, attempts: Sequence[ReportAttempt]) -> list[Answer]:
        return run(reporting(self._threads, self._cache, attempts))

    def _report_async(self, attempts: Sequence[ReportAttempt]) -> Awaitable[list[Answer]]:
        return run_async(reporting(self._driver_of_loop(), self._cache, attempts))

    def _leased_check(self, checks: Sequence[LeaseCheck], optional: Container[int]) -> JointCheck:
        parts = [
            (cast("RedisCounter", check.counter).scripts, check.subject, check.cost)
            for check in checks
        ]
        # Two checks of one counter: the lease of the first could deny the second.
        once = len({(scripts.encoded, subject) for scripts, subject, _ in parts}) == len(parts)
        terms = [check.terms for check in checks] if once else []
        return JointCheck(parts, self._cache, optional, terms)

    async def _shielded(self, joint: JointCheck) -> list[Answer]:
        """Decide checks that go on if the caller is cancelled, because they must be undone then.

        A call that was sent is charged even if its caller is cancelled.
        """
        driver = self._driver_of_loop()
        deciding = asyncio.ensure_future(run_async(joint.deciding(driver)))
        try:
            return await asyncio.shield(deciding)
        except asyncio.CancelledError:
            joint.cancelled = True
            if deciding.done() and not deciding.cancelled() and deciding.exception() is None:
                await run_async(joint.undoing_late(driver))
            raise

    def _joint_check(self, checks: Sequence[Charge], optional: Container[int]) -> JointCheck:
        own = cast("Sequence[tuple[RedisCounter, str, int]]", checks)  # counters of this store
        parts = [(counter.scripts, subject, cost) for counter, subject, cost in own]
        return JointCheck(parts, self._cache, optional)

    def _driver_of_loop(self) -> AsyncioDriver:
        loop = asyncio.get_running_loop()
        with self._lock:
            driver = self._drivers.get(loop)
            if driver is None:
                # The connections of a closed loop keep it alive, so drop it here.
                for closed in [each for each in self._drivers if each.is_closed()]:
                    del self._drivers[closed]
                driver = self._drivers[loop] = AsyncioDriver(self._servers, loop, self._cache)
            return driver

    def _require_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed; open another one")

    def sweep(self) -> int:
        """Return 0: Redis drops expired keys itself."""
        self._require_open()
        return 0

    def forget_all(self) -> int:
        """Forget all counts under this store's prefix. See Store.forget_all.

        Blocks for a round trip for each thousand keys, and two more; from asyncio, call it with
        `asyncio.to_thread`. Raises StoreUnavailable or StoreTimeout.
        """
        self._require_open()
        forgotten = forget_states(self._servers.topology, self.config.prefix)
        for subject in list(self._cache.subjects):
            self._cache.drop_subject(subject)
        return forgotten

    def stats(self) -> StoreStats:
        """Count the states under this store's prefix; exact while there are few.

        With more than a thousand keys the number of states is an estimate, and with more than ten
        thousand the number of keys too. Blocks for a few round trips, at most
        `connect_ms` each; from asyncio, call it with `asyncio.to_thread`. Raises StoreUnavailable
        or StoreTimeout.
        """
        self._require_open()
        found = count_states(self._servers.topology, self.config.prefix)
        return StoreStats(
            states=found.states,
            states_max=0,
            bytes=found.bytes,
            expired=found.expired_keys,
            refused=self._servers.refused,
        )

    def health(self) -> RedisHealth:
        """Return the health of every server, the problems, and their remedies.

        Blocks for about thirty round trips, to all servers at once; from asyncio, call it with
        `asyncio.to_thread`. Raises StoreUnavailable if no server at all answers.
        """
        self._require_open()
        found = health(self._servers.topology, self.config)
        return replace(found, breakers=tuple(self.breakers()))

    def counters(self) -> dict[str, int]:
        """Return the counters of this process since the store was opened. No round trip.

        `denied_cache_hits`  denials that the denial cache answered
        `coalesced_checks`   checks that waited for a batch, in the current event loops
        """
        drivers = list(self._drivers.values())
        coalesced = sum(driver.coalescer.coalesced for driver in drivers)
        return {"denied_cache_hits": self._cache.hits, "coalesced_checks": coalesced}

    def denied_by_rule(self) -> dict[str, int]:
        """Return the cache hits by rule; a denial by several rules counts for each of them."""
        return dict(self._cache.by_rule)

    def breakers(self) -> list[BreakerState]:
        """Return the breaker of each server that was called so far. No round trip."""
        return [breaker.state() for breaker in self._servers.breakers.all()]

    def latencies(self) -> dict[str, list[int]]:
        """Return how long calls to each server took in this process. No round trip.

        From sending a call to its reply, without the wait for a connection; a call that timed out
        counts with its deadline. Calls that the denial cache answers are not counted.
        """
        return {str(each.address): each.seconds.data() for each in self._servers.breakers.all()}

    def server_status(self) -> list[ServerStatus]:
        """Return the clock, the evictions and the age of the keys of each primary that answers.

        Blocks for about five round trips, to all servers at once; from asyncio, call it with
        `asyncio.to_thread`. Raises StoreUnavailable if no server can name the others.
        """
        self._require_open()
        return server_status(self._servers.topology, self.config.prefix)

    def on_breaker(self, listener: BreakerListener) -> None:
        """Call `listener` with the state after each change: open, half_open, closed.

        It runs in the thread that saw the change, which may be a check's or an event loop's, so it
        must not block. Its exceptions are ignored. Only the last sixteen listeners are kept.
        """
        self._servers.breakers.listen(listener)

    def mark(self, subject: str, name: int, lasts_ns: int) -> Ask:
        """See Store.mark. One round trip. Raises StoreError."""
        call = self._mark_call(subject, name, lasts_ns)
        return Ask(self._mark, self._mark_async, call)

    def _mark(self, call: ScriptCall) -> bool:
        return bool(run(self._threads.running(call)))

    async def _mark_async(self, call: ScriptCall) -> bool:
        return bool(await run_async(self._driver_of_loop().running(call)))

    def _mark_call(self, subject: str, name: int, lasts_ns: int) -> ScriptCall:
        self._require_open()
        key = f"{self.config.prefix}:settled:{{{subject}}}".encode()
        return ScriptCall(MARKS, key, (name.to_bytes(8), lasts_ns // 1_000_000, MARKS_MAX))

    def publish(self, topic: str, text: str) -> None:
        """Send a message to all current subscribers of a topic, on channel `<prefix>:<topic>`.

        Blocks for a round trip; from asyncio, call it with `asyncio.to_thread`. Raises StoreError.
        """
        self._require_open()
        publish(self._servers.topology, self.config, f"{self.config.prefix}:{topic}", text)

    def subscribe(self, topic: str) -> RedisSubscription:
        """Subscribe to a topic, for one thread. Raises StoreError."""
        self._require_open()
        channel = f"{self.config.prefix}:{topic}"
        return RedisSubscription(self._servers.topology, self.config, channel)

    def register(
        self, topic: str, name: str, text: str, lasts_ns: int, at_most: int = REGISTERED_MAX
    ) -> list[str]:
        """Keep a text for a time, in `<prefix>:<topic>:{names}`; return those of all names.

        If they are more than `at_most`, return those of as many, chosen at random.
        Blocks for three round trips; from asyncio, call it with `asyncio.to_thread`. Raises
        StoreError.
        """
        self._require_open()
        key = registry_key(self.config.prefix, topic)
        return register(self._servers.topology, self.config, key, name, text, lasts_ns, at_most)

    def count_names(self, topic: str, name: str, lasts_ns: int) -> int:
        """Keep a name for a time, in `<prefix>:<topic>:{names}`; return how many there are.

        With a time of 0, forget it. Blocks for two round trips; from asyncio, call it with
        `asyncio.to_thread`. Raises StoreError.
        """
        self._require_open()
        key = registry_key(self.config.prefix, topic)
        return count_names(self._servers.topology, self.config, key, name, lasts_ns)

    def unregister(self, topic: str, name: str) -> None:
        """Forget the text of a name. Blocks for a round trip. Raises StoreError."""
        self._require_open()
        key = registry_key(self.config.prefix, topic)
        unregister(self._servers.topology, self.config, key, name)

    def close(self) -> None:
        """Close the connections of threads now, and those of event loops in their loops."""
        self._closed = True
        self._cache.reset()
        self._servers.close()
        self._threads.close()
        for loop, driver in list(self._drivers.items()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(driver.close_soon)

    async def aclose(self) -> None:
        """Close the store, and wait until this loop's connections are closed."""
        driver = self._drivers.pop(asyncio.get_running_loop(), None)
        self.close()
        if driver is not None:
            await driver.close()

    def forked(self) -> None:
        """In a forked child: drop the parent's connections."""
        self._cache.reset()
        self._servers.forked()
        self._threads.forked()
        self._drivers.clear()


def _attempt_of(report: Report) -> ReportAttempt:
    is_late = isinstance(report, LateCharge)
    time_ns = report.age_ns if isinstance(report, LateCharge) else report.ends_ns
    scripts = cast("RedisCounter", report.counter).scripts
    return ReportAttempt(scripts, report.subject, report.units, is_late, time_ns // NS_PER_US)


def _with_leases(answers: list[Answer], joint: JointCheck) -> list[LeasedAnswer]:
    return [
        answer if isinstance(answer, StoreError) else (answer, joint.leases.get(at, NO_LEASE))
        for at, answer in enumerate(answers)
    ]
