"""RedisStore: counts in Redis, shared by every machine."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Self, cast

from ratekeeper.core.clock import Clock, SystemClock
from ratekeeper.core.errors import StoreError, StoreUnavailable
from ratekeeper.core.forks import after_fork
from ratekeeper.core.model import Consistency, Limit
from ratekeeper.core.steps import Ask, Call, Steps, asking
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
    Leases,
    RedisCounter,
    check_together,
    reporting,
)
from ratekeeper.decide.stores.redis.denial_cache import DenialCache
from ratekeeper.decide.stores.redis.driver import Links, RedisDriver, RedisServers
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
        self._closed = False
        self._servers = RedisServers(config)
        self._links = links = Links(self._servers, DenialCache(config.denied_cache_ns))
        self._regional = RedisRegional(config, self._clock, links)
        self._cells = RedisCells(config, self._clock, links)
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
        return RedisCounter(scripts, self._links)

    def check_together(
        self, checks: Sequence[Charge], optional: Container[int] = ()
    ) -> list[Answer] | Ask:
        """Check several subjects; all pass or none is charged.

        One round trip, in one atomic step. In a cluster, the decider takes two; see counters.py. If
        a round trip fails, a subject may stay charged, never twice; see `docs/redis.md`. A caller
        on asyncio that is cancelled has spent nothing.
        """
        return check_together(self._links, checks, optional) if checks else []

    def lease(
        self, checks: Sequence[LeaseCheck], optional: Container[int] = ()
    ) -> list[LeasedAnswer] | Ask:
        """Check several subjects, all or none, and lease units with those that are charged.

        Round trips and errors are those of `check_together`.
        """
        return asking(self._leasing, checks, optional) if checks else []

    def _leasing(
        self, checks: Sequence[LeaseCheck], optional: Container[int]
    ) -> Steps[list[LeasedAnswer]]:
        leases: Leases = {}
        terms = {(_scripts_of(each).encoded, each.subject): each.terms for each in checks}
        charges = [each[:3] for each in checks]
        # Two checks of one counter: the lease of the first could deny the second.
        how = (terms, leases) if len(terms) == len(checks) else ()
        answers: list[Answer] = yield Call(check_together, self._links, charges, optional, *how)
        return [
            answer
            if isinstance(answer, StoreError)
            else (answer, leases.get((_scripts_of(each).encoded, each.subject), NO_LEASE))
            for each, answer in zip(checks, answers, strict=True)
        ]

    def report(self, reports: Sequence[Report]) -> list[Answer] | Ask:
        """Give units back and charge late: one batch of calls for each server."""
        if not reports:
            return []
        return self._links.ask(reporting, [_attempt_of(each) for each in reports])

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
        self._links.cache.clear()
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
        `coalesced_checks`   checks that shared a call with others, in the current event loops
        """
        links = self._links
        return {"denied_cache_hits": links.cache.hits, "coalesced_checks": links.coalesced}

    def denied_by_rule(self) -> dict[str, int]:
        """Return the cache hits by rule; a denial by several rules counts for each of them."""
        return dict(self._links.cache.by_rule)

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
        self._require_open()
        key = f"{self.config.prefix}:settled:{{{subject}}}".encode()
        call = ScriptCall(MARKS, key, (name.to_bytes(8), lasts_ns // 1_000_000, MARKS_MAX))
        return self._links.ask(_marking, call)

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
        self._links.close()

    async def aclose(self) -> None:
        """Close the store, and wait until this loop's connections are closed."""
        self._closed = True
        await self._links.aclose()

    def forked(self) -> None:
        """In a forked child: drop the parent's connections."""
        self._links.forked()


def _marking(driver: RedisDriver, call: ScriptCall) -> Steps[bool]:
    return bool((yield from driver.running(call)))


def _scripts_of(check: LeaseCheck | Report) -> RuleScripts:
    return cast("RedisCounter", check.counter).scripts


def _attempt_of(report: Report) -> ReportAttempt:
    is_late = isinstance(report, LateCharge)
    time_ns = report.age_ns if isinstance(report, LateCharge) else report.ends_ns
    return ReportAttempt(
        _scripts_of(report), report.subject, report.units, is_late, time_ns // NS_PER_US
    )
