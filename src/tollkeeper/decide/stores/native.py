"""Stores on the C kernel: memory of this process, or a file that many processes map.

They make the same decisions as the pure Python store; `tests/parity/` compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tollkeeper.core import switches
from tollkeeper.core.clock import EPOCH_OFFSET_NS, Clock, SystemClock
from tollkeeper.core.model import Decision, Limit
from tollkeeper.decide.combine import check_in_turn
from tollkeeper.decide.kernel import _kernel
from tollkeeper.decide.store import AsyncStore, Channel, GateCheck, StoreMonitor, StoreStats


class KernelStore:
    """Quotas in one piece of memory: of this process, or of the file at `path`.

    `states_max` makes room for at least so many states; 0 uses the size of an existing file, or a
    million. `log_bytes` is the room for sliding window logs: 8 bytes an entry, in blocks of 64 and
    up; 0 takes 64 bytes a state.
    """

    def __init__(
        self, clock: Clock, states_max: int = 0, *, path: Path | None = None, log_bytes: int = 0
    ) -> None:
        self._clock = clock
        self._is_real = type(clock) is SystemClock
        self.is_private = path is None
        self.as_async: AsyncStore | None = None
        self.monitor: StoreMonitor | None = None
        self.channel: Channel | None = None
        self._table = _kernel.Table(
            path, capacity=states_max, log_bytes=log_bytes, epoch_offset_ns=EPOCH_OFFSET_NS
        )

    def gate(self, limits: Sequence[Limit], rule: str) -> KernelGate:
        return KernelGate(self, self._table, tuple(limits), rule)

    def check_together(self, checks: Sequence[GateCheck]) -> list[Decision]:
        return check_in_turn(checks)

    def sweep(self) -> int:
        return self._table.sweep(self.now_ns())

    def stats(self) -> StoreStats:
        counted = self._table.stats()
        return StoreStats(
            states=counted["states"],
            states_max=counted["states_max"],
            bytes=counted["bytes"],
            expired=counted["expired"],
            refused=counted["refused"],
        )

    def busiest(self, count: int) -> list[tuple[str, int]]:
        return self._table.busiest(count)

    def close(self) -> None:
        self._table.close()

    def now_ns(self) -> int | None:
        """Return the time of a decision for the kernel; None if it reads the real time itself."""
        if self._is_real and switches.clock is None:  # as `keeps_time`, which would be a call more
            return None
        return self._clock.now_ns()

    @property
    def keeps_time(self) -> bool:
        """True if the kernel reads the real time itself, the same in all processes."""
        return self._is_real and switches.clock is None


class KernelGate:
    """One rule's limits on a KernelStore."""

    __slots__ = ("_gate", "_rule", "_store", "_table", "limits")

    def __init__(
        self, store: KernelStore, table: _kernel.Table, limits: tuple[Limit, ...], rule: str
    ) -> None:
        self.limits = limits
        self._store = store
        self._table = table
        self._rule = rule
        self._gate = _kernel.Gate(table, limits, rule)

    def fast_check(self, fallback: Callable[..., Decision]) -> Callable[..., Decision] | None:
        """Return a `check(key, cost=1)` in C; None if the time comes from another clock."""
        if not self._store._is_real:  # noqa: SLF001 - its own store
            return None
        return _kernel.Gate(self._table, self.limits, self._rule, fallback).check

    def check(self, subject: str, cost: int) -> Decision:
        return self._gate.decide(subject, cost, self._store.now_ns(), True)

    def peek(self, subject: str, cost: int) -> Decision:
        return self._gate.decide(subject, cost, self._store.now_ns(), False)

    def refund(self, subject: str, units: int) -> None:
        self._gate.refund(subject, units, self._store.now_ns())

    def grant(self, subject: str, units: int, ttl_ns: int | None) -> None:
        self._gate.grant(subject, units, -1 if ttl_ns is None else ttl_ns, self._store.now_ns())

    def reset(self, subject: str) -> None:
        self._gate.reset(subject)
