"""Stores on the C kernel: memory of this process, or a file that many processes map.

They make the same decisions as the pure Python store; `tests/parity/` compares them.

A file can be truncated, removed, replaced or overwritten while it is in use. The kernel notices it,
and the call raises StoreUnavailable (`kernel/loss.c`). The store then opens the path again, so that
the next call counts in the file that all other processes use.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Final

from tollkeeper.core import switches
from tollkeeper.core.clock import EPOCH_OFFSET_NS, Clock, SystemClock
from tollkeeper.core.errors import ConfigError, StoreUnavailable
from tollkeeper.core.model import Decision, Limit
from tollkeeper.decide.allowances import PythonAllowances
from tollkeeper.decide.combine import check_in_turn
from tollkeeper.decide.fleet_monitor import FleetMonitor
from tollkeeper.decide.kernel import _kernel
from tollkeeper.decide.store import (
    Answer,
    AsyncStore,
    Channel,
    FastCheck,
    GateCheck,
    StoreMonitor,
    StoreStats,
)

log = logging.getLogger("tollkeeper")

REOPEN_SECONDS: Final = 1.0


class _FileRecovery:
    """Opens a lost file again, at most once a second.

    The table holds a reference to this object, which therefore does not refer to the table.
    """

    def __init__(self) -> None:
        self._next_at_s = 0.0
        self.lost_s = 0.0
        """The Unix time of the last loss; 0.0 if there was none."""

    def __call__(self, table: _kernel.Table, loss: str) -> None:
        """Raise StoreUnavailable if the file cannot be opened."""
        now_s = time.monotonic()
        if now_s < self._next_at_s:
            return
        self._next_at_s = now_s + REOPEN_SECONDS
        try:
            notice = table.reopen()
        except (StoreUnavailable, ConfigError) as error:
            raise StoreUnavailable(f"{loss}, and cannot be opened again: {error}") from error
        self.lost_s = time.time()
        log.error("%s; it was opened again, and the quotas in the lost file are forgotten", loss)
        _warn_of(notice)


def _warn_of(notice: str) -> None:
    if notice:
        log.error("%s", notice)


class KernelStore:
    """Quotas in one piece of memory: of this process, or of the file at `path`.

    `states_max` makes room for at least so many states; 0 uses the size of an existing file, or a
    million. `log_bytes` is the room for sliding window logs: 8 bytes an entry, in blocks of 64 and
    up; 0 takes 64 bytes a state. `mode` is the file's: 0o600, or 0o660 or 0o666 if other users
    share it.
    """

    def __init__(
        self,
        clock: Clock,
        states_max: int = 0,
        *,
        path: Path | None = None,
        log_bytes: int = 0,
        mode: int = 0o600,
    ) -> None:
        self._clock = clock
        self._is_real = type(clock) is SystemClock
        self.is_private = path is None
        self.is_sharded = False
        self.as_async: AsyncStore | None = None
        self.monitor: StoreMonitor | None = None
        self.channel: Channel | None = None
        self.fleet: FleetMonitor | None = None
        self.allowances = PythonAllowances(clock) if path is None else None
        self._recovery = _FileRecovery()
        self._table = _kernel.Table(
            path,
            capacity=states_max,
            log_bytes=log_bytes,
            mode=mode,
            epoch_offset_ns=EPOCH_OFFSET_NS,
            on_loss=self._recovery,
        )
        _warn_of(self._table.notice)

    def gate(self, limits: Sequence[Limit], rule: str) -> KernelGate:
        return KernelGate(self, self._table, tuple(limits), rule)

    def check_together(
        self, checks: Sequence[GateCheck], optional: Container[int] = ()
    ) -> list[Answer]:
        return check_in_turn(checks, optional)

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
            log_bytes=counted["log_bytes_used"],
            log_bytes_max=counted["log_bytes_max"],
            lost_s=None if self.is_private else self._recovery.lost_s,
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

    def fast_check(self, fallback: Callable[..., Decision]) -> FastCheck | None:
        """Return a check in C; None if the time comes from another clock."""
        if not self._store._is_real:  # noqa: SLF001 - its own store
            return None
        return _kernel.Gate(self._table, self.limits, self._rule, fallback)

    def check(self, subject: str, cost: int) -> Decision:
        return self._gate.decide(subject, cost, self._store.now_ns(), True)

    def peek(self, subject: str, cost: int) -> Decision:
        return self._gate.decide(subject, cost, self._store.now_ns(), False)

    def refund(self, subject: str, units: int, charged_ns: int | None) -> None:
        self._gate.refund(subject, units, charged_ns, self._store.now_ns())

    def grant(self, subject: str, units: int, ttl_ns: int | None) -> None:
        self._gate.grant(subject, units, -1 if ttl_ns is None else ttl_ns, self._store.now_ns())

    def reset(self, subject: str) -> None:
        self._gate.reset(subject)
