"""A store's awaited calls behind the protocol for threads, so that one suite tests both.

Every call runs in the event loop of one background thread, whichever thread makes it. Calls of many
threads meet in that loop and share its connections.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import cache
from typing import TypeVar, cast

from ratekeeper.core.model import Consistency, Decision, Limit
from ratekeeper.decide.allowances import Allowances
from ratekeeper.decide.fleet_monitor import FleetMonitor
from ratekeeper.decide.leasing import Authority
from ratekeeper.decide.region_monitor import RegionMonitor
from ratekeeper.decide.regional import AcrossRegions, RegionalCounts
from ratekeeper.decide.store import (
    Answer,
    AsyncGate,
    AsyncStore,
    Cells,
    Channel,
    GateCheck,
    Store,
    StoreMonitor,
    StoreStats,
)

T = TypeVar("T")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the loop. The first call starts it; it ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="event loop", daemon=True).start()
    return loop


def _awaited(coroutine: Coroutine[object, object, T]) -> T:
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


class AwaitedGate:
    """The gate protocol for threads over an AsyncGate."""

    def __init__(self, gate: AsyncGate) -> None:
        self._gate = gate
        self.limits = gate.limits

    def check(self, subject: str, cost: int) -> Decision:
        return _awaited(self._gate.check(subject, cost))

    def peek(self, subject: str, cost: int) -> Decision:
        return _awaited(self._gate.peek(subject, cost))

    def refund(self, subject: str, units: int, charged_ns: int | None) -> None:
        _awaited(self._gate.refund(subject, units, charged_ns))

    def grant(self, subject: str, units: int, ttl_ns: int | None) -> None:
        _awaited(self._gate.grant(subject, units, ttl_ns))

    def reset(self, subject: str) -> None:
        _awaited(self._gate.reset(subject))

    def fast_check(self, fallback: Callable[..., Decision]) -> None:
        return None


class AwaitedStore:
    """The store protocol for threads over the awaited calls of a store."""

    as_async: AsyncStore | None = None
    monitor: StoreMonitor | None = None
    channel: Channel | None = None
    fleet: FleetMonitor | None = None
    allowances: Allowances | None = None
    authority: Authority | None = None
    cells: Cells | None = None
    regional: RegionalCounts | None = None
    regions: RegionMonitor | None = None
    is_private = False
    is_sharded = False

    def __init__(self, store: Store) -> None:
        assert store.as_async is not None
        self._store = store
        self._async = store.as_async

    def gate(
        self,
        limits: Sequence[Limit],
        rule: str,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
    ) -> AwaitedGate:
        return AwaitedGate(self._async.async_gate(limits, rule, consistency, across))

    def check_together(
        self, checks: Sequence[GateCheck], optional: Collection[int] = ()
    ) -> list[Answer]:
        awaited = [(cast("AwaitedGate", gate)._gate, *rest) for gate, *rest in checks]
        return _awaited(self._async.check_together_async(awaited, optional))

    def mark(self, subject: str, name: int, lasts_ns: int) -> bool:
        return _awaited(self._async.mark_async(subject, name, lasts_ns))

    def sweep(self) -> int:
        return self._store.sweep()

    def stats(self) -> StoreStats:
        return self._store.stats()

    def close(self) -> None:
        _awaited(self._async.aclose())
