"""RedisStore: quotas that every machine shares."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Self, cast

from tollkeeper.core import switches
from tollkeeper.core.clock import Clock, SystemClock
from tollkeeper.core.errors import StoreUnavailable
from tollkeeper.core.model import Decision, Limit
from tollkeeper.decide.breaker import BreakerState
from tollkeeper.decide.busiest import Busiest
from tollkeeper.decide.store import AsyncGateCheck, GateCheck, StoreStats
from tollkeeper.decide.stores.redis.breakers import Listener
from tollkeeper.decide.stores.redis.config import RedisConfig
from tollkeeper.decide.stores.redis.denied import Denied
from tollkeeper.decide.stores.redis.drive import Servers, Tasks, Threads
from tollkeeper.decide.stores.redis.gates import AsyncRedisGate, Commands, RedisGate, Together
from tollkeeper.decide.stores.redis.health import RedisHealth, census, health
from tollkeeper.decide.stores.redis.pubsub import Subscription, publish


class RedisStore:
    """Quotas in Redis or Valkey: one server, Sentinel or Cluster, for threads and asyncio alike.

    Nothing is connected until the first call. Decisions are made by the server's clock; a `clock`
    that is not the system's is for tests, and is sent along.
    """

    is_private = False

    @property
    def as_async(self) -> Self:
        """The awaited calls."""
        return self

    @property
    def monitor(self) -> Self:
        """The counters and circuit breakers."""
        return self

    @property
    def channel(self) -> Self:
        """The messages between processes."""
        return self

    def __init__(self, config: RedisConfig, clock: Clock | None = None) -> None:
        self.config = config
        self._clock = clock or SystemClock()
        self._checks = Busiest()
        self._denied = Denied(config.denied_cache_ns)
        self._closed = False
        self._lock = threading.Lock()
        self._servers = Servers(config)
        self._threads = Threads(self._servers)
        # By loop; a loop that is gone takes its connections along.
        self._tasks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Tasks] = (
            weakref.WeakKeyDictionary()
        )
        _stores.add(self)

    def gate(self, limits: Sequence[Limit], rule: str) -> RedisGate:
        """Prepare a rule's limits for threads."""
        self._require_open()
        return RedisGate(self._commands(limits, rule), self._threads, self._denied, self._note)

    def async_gate(self, limits: Sequence[Limit], rule: str) -> AsyncRedisGate:
        """Prepare a rule's limits for asyncio."""
        self._require_open()
        commands = self._commands(limits, rule)
        return AsyncRedisGate(commands, self._servers, self._tasks_here, self._denied, self._note)

    def check_together(self, checks: Sequence[GateCheck]) -> list[Decision]:
        """Check several subjects in one trip; if one denies, a second trip gives back to the rest.

        A trip that fails may leave the others charged, never twice; see `docs/redis.md`.
        """
        asked = cast("Sequence[tuple[RedisGate, str, int]]", checks)  # gates of this store
        if not asked:
            return []
        together = Together(asked, self._denied)
        known = together.known()
        if known is not None:
            return known
        self._require_closed(asked)
        answers = self._threads.run_all(together.calls())
        decided, wrong = together.decisions(answers)
        if wrong is not None or not all(decided):
            wrong = together.told(wrong, self._threads.run_all(together.undo(answers)))
        together.keep(answers, decided, wrong)
        if wrong is not None:
            raise wrong
        return decided

    async def check_together_async(self, checks: Sequence[AsyncGateCheck]) -> list[Decision]:
        """`check_together`, awaited. Whoever is cancelled meanwhile has spent nothing."""
        asked = cast("Sequence[tuple[AsyncRedisGate, str, int]]", checks)  # gates of this store
        if not asked:
            return []
        together = Together(asked, self._denied)
        known = together.known()
        if known is not None:
            return known
        self._require_closed(asked)
        # Shielded: what has been sent is charged, whether its caller stays or not. Who is denied
        # by one limit could else spend all of another's, by leaving before it is given back.
        trips = asyncio.ensure_future(self._trips(together))
        try:
            return await asyncio.shield(trips)
        except asyncio.CancelledError:
            together.unwanted = True
            raise

    async def _trips(self, together: Together) -> list[Decision]:
        if together.unwanted:  # before anything was sent
            return []
        tasks = self._tasks_here()
        answers = await tasks.run_all(together.calls())
        decided, wrong = together.decisions(answers)
        if wrong is not None or not all(decided) or together.unwanted:
            wrong = together.told(wrong, await tasks.run_all(together.undo(answers)))
        together.keep(answers, decided, wrong)
        if wrong is not None:
            raise wrong
        return decided

    def _require_closed(self, asked: Sequence[tuple[RedisGate | AsyncRedisGate, str, int]]) -> None:
        """Raise StoreUnavailable if a breaker is open of a server that one of them would ask.

        Before anything is sent: the servers that are well would be charged, and paid back.
        """
        if self._servers.breakers.any_open:
            for gate, subject, _ in asked:
                self._servers.require_closed(gate.commands, subject)

    def _commands(self, limits: Sequence[Limit], rule: str) -> Commands:
        return Commands(tuple(limits), rule, self.config.prefix, self._now_ns)

    def _now_ns(self) -> int | None:
        """None: the server's time, which is alike for all."""
        if type(self._clock) is SystemClock and switches.clock is None:
            return None
        return self._clock.now_ns()

    def _tasks_here(self) -> Tasks:
        loop = asyncio.get_running_loop()
        with self._lock:
            tasks = self._tasks.get(loop)
            if tasks is None:
                # A loop that was closed without a word is kept by its own connections.
                for gone in [each for each in self._tasks if each.is_closed()]:
                    del self._tasks[gone]
                tasks = self._tasks[loop] = Tasks(self._servers, loop, self._denied)
            return tasks

    def _note(self, subject: str) -> None:
        with self._lock:
            self._checks.note(subject)

    def _require_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed; open another one")

    def sweep(self) -> int:
        """Redis drops what has expired by itself; nothing is left to do."""
        self._require_open()
        return 0

    def stats(self) -> StoreStats:
        """What the servers hold under this store's prefix: exact while that is little.

        With more than a thousand subjects the states, and with more than ten thousand keys the
        subjects too, are estimated. Blocks for a few round trips, at most `connect_ms` each; from
        asyncio, call it with `asyncio.to_thread`. Raises StoreUnavailable or StoreTimeout.
        """
        self._require_open()
        found = census(self._servers.topology, self.config.prefix)
        return StoreStats(
            states=found.states,
            states_max=0,
            bytes=found.bytes,
            expired=found.expired_keys,
            refused=self._servers.refused,
        )

    def health(self) -> RedisHealth:
        """How every server is, what is wrong, and what would mend it.

        Blocks for about thirty round trips, to all servers at once; from asyncio, call it with
        `asyncio.to_thread`. Raises StoreUnavailable if no server at all answers.
        """
        self._require_open()
        found = health(self._servers.topology, self.config)
        return replace(found, breakers=tuple(self.breakers()))

    def counters(self) -> dict[str, int]:
        """What this process has counted since the store was opened; costs nothing to ask.

        `denied_cache_hits`  denials that were answered without a trip
        `coalesced_checks`   checks that waited to go with others, in event loops that there are
        """
        coalesced = sum(tasks.flights.coalesced for tasks in list(self._tasks.values()))
        return {"denied_cache_hits": self._denied.hits, "coalesced_checks": coalesced}

    def denied_by_rule(self) -> dict[str, int]:
        """The same denials by their rules; those of several rules at once are under each."""
        return dict(self._denied.by_rule)

    def breakers(self) -> list[BreakerState]:
        """How the breaker of each server is that was asked so far; costs nothing to ask."""
        return [breaker.state() for breaker in self._servers.breakers.all()]

    def on_breaker(self, listener: Listener) -> None:
        """Call `listener` with the state after each change: open, half_open, closed.

        It is called in the thread that saw the change, which may be that of a check or an event
        loop's: it must not block. What it raises is ignored. The last sixteen listeners count.
        """
        self._servers.breakers.listen(listener)

    def busiest(self, count: int) -> list[tuple[str, int]]:
        """As this process sees them."""
        self._require_open()
        with self._lock:
            return self._checks.top(count)

    def publish(self, topic: str, text: str) -> None:
        """Tell every process that is subscribed to the topic now, on channel `<prefix>:<topic>`.

        Blocks for a round trip; from asyncio, call it with `asyncio.to_thread`. Raises StoreError.
        """
        self._require_open()
        publish(self._servers.topology, self.config, f"{self.config.prefix}:{topic}", text)

    def subscribe(self, topic: str) -> Subscription:
        """Listen for what `publish` tells, from now on; for one thread. Raises StoreError."""
        self._require_open()
        return Subscription(self._servers.topology, self.config, f"{self.config.prefix}:{topic}")

    def close(self) -> None:
        """Close what threads use, and tell the event loops to close theirs."""
        self._closed = True
        self._denied.forget()
        self._servers.close()
        self._threads.close()
        for loop, tasks in list(self._tasks.items()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(tasks.close_soon)

    async def aclose(self) -> None:
        """`close`, and wait until this loop's connections are closed."""
        tasks = self._tasks.pop(asyncio.get_running_loop(), None)
        self.close()
        if tasks is not None:
            await tasks.close()

    def forked(self) -> None:
        """In a child process: the connections are the parent's, and its threads are not here."""
        self._lock = threading.Lock()
        self._denied.forget()
        self._servers.forked()
        self._threads.forked()
        self._tasks.clear()


_stores: weakref.WeakSet[RedisStore] = weakref.WeakSet()


def _forked() -> None:
    for store in list(_stores):
        store.forked()


# A server that loads the application once and then forks its workers would have them all talk
# through one socket, and read each other's answers.
os.register_at_fork(after_in_child=_forked)
