"""A store's verbs for asyncio behind the verbs for threads, so that one suite tries both.

Every call runs in the event loop of one thread in the background, whoever makes it. Calls of many
threads meet there, and leave together.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from functools import cache
from typing import TypeVar

from tollkeeper.core.model import Decision, Limit
from tollkeeper.decide.store import AsyncGate, StoreStats
from tollkeeper.decide.stores.redis.store import RedisStore

T = TypeVar("T")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The loop, started when first asked for; it ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="event loop", daemon=True).start()
    return loop


def _awaited(coroutine: Coroutine[object, object, T]) -> T:
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


class AwaitedGate:
    """A gate for threads over one for asyncio."""

    def __init__(self, gate: AsyncGate) -> None:
        self._gate = gate
        self.limits = gate.limits

    def check(self, subject: str, cost: int) -> Decision:
        return _awaited(self._gate.check(subject, cost))

    def peek(self, subject: str, cost: int) -> Decision:
        return _awaited(self._gate.peek(subject, cost))

    def refund(self, subject: str, units: int) -> None:
        _awaited(self._gate.refund(subject, units))

    def grant(self, subject: str, units: int, ttl_ns: int | None) -> None:
        _awaited(self._gate.grant(subject, units, ttl_ns))

    def reset(self, subject: str) -> None:
        _awaited(self._gate.reset(subject))


class AwaitedStore:
    """A store for threads over the half of a RedisStore that is for asyncio."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    def gate(self, limits: Sequence[Limit], rule: str) -> AwaitedGate:
        return AwaitedGate(self._store.async_gate(limits, rule))

    def sweep(self) -> int:
        return self._store.sweep()

    def stats(self) -> StoreStats:
        return self._store.stats()

    def busiest(self, count: int) -> list[tuple[str, int]]:
        return self._store.busiest(count)

    def close(self) -> None:
        _awaited(self._store.aclose())
