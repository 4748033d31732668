"""Stores on the C kernel: memory of this process, or a file that many processes map.

They make the same decisions as the pure Python store; `tests/parity/` compares them.

A file can be truncated, removed, replaced or overwritten while it is in use. The kernel notices it,
and the call raises StoreUnavailable (`kernel/loss.c`). The store then opens the path again, so that
the next call counts in the file that all other processes use.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

from ratekeeper.core import switches
from ratekeeper.core.clock import EPOCH_OFFSET_NS, Clock, SystemClock
from ratekeeper.core.errors import ConfigError, StoreUnavailable
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import Consistency, Decision, Limit
from ratekeeper.decide.algorithms.in_flight import has_slots
from ratekeeper.decide.allowances import (
    AllowanceKind,
    AllowanceStats,
    Replaced,
    UnitClaim,
    gate_number,
    lease_time_ns,
    place_of,
)
from ratekeeper.decide.kernel import _kernel
from ratekeeper.decide.leasing import Lease
from ratekeeper.decide.regional import AcrossRegions
from ratekeeper.decide.store import (
    CheckedRule,
    CompiledCounts,
    FastCheck,
    StoreStats,
    require_regional,
    require_strict,
)

log = logging.getLogger("ratekeeper")

REOPEN_SECONDS: Final = 1.0
# Of one compiled check; RULES_MAX in kernel/requests_module.c.
REQUEST_RULES_MAX: Final = 8
# The latest time that the kernel accepts, in 2096. Only a bucket that takes decades to fill is not
# full by then.
_AFTER_ALL_NS: Final = 4_000_000_000_000_000_000


class _FileRecovery:
    """Opens a lost file again, at most once a second.

    The table holds a reference to this object, which therefore does not refer to the table.
    """

    def __init__(self) -> None:
        self._next_at_s = 0.0
        self.lost_s = 0.0
        """The Unix time of the last loss; 0.0 if there was none."""

    def __call__(self, table: _kernel.Table | _kernel.Allowances, loss: str) -> None:
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


def _stats_of(counted: Mapping[str, int], lost_s: float | None) -> StoreStats:
    return StoreStats(
        states=counted["states"],
        states_max=counted["states_max"],
        bytes=counted["bytes"],
        expired=counted["expired"],
        refused=counted["refused"],
        crowded=counted["crowded"],
        log_bytes=counted["log_bytes_used"],
        log_bytes_max=counted["log_bytes_max"],
        lost_s=lost_s,
    )


def examine_file(path: Path, states_max: int, log_bytes: int, mode: int) -> tuple[StoreStats, str]:
    """Return the statistics of a file and its damage, which is usually empty; only read it.

    Raises StoreUnavailable or ConfigError if it cannot be a store.
    """
    counted, damage = _kernel.examine(path, states_max, log_bytes, mode)
    return _stats_of(counted, None), damage


class KernelStore:
    """Quotas in one piece of memory: of this process, or of the file at `path`.

    `states_max` makes room for at least so many states; 0 uses the size of an existing file, or a
    million. `log_bytes` is the room for sliding window logs: 8 bytes an entry, in blocks of 64 and
    up; 0 takes 64 bytes a state. `mode` is the file's: 0o600, or 0o660 or 0o666 if other users
    share it. `allowances_max` makes room for so many allowances; 0 uses the size of an existing
    file, or 100,000.
    """

    def __init__(
        self,
        clock: Clock,
        states_max: int = 0,
        *,
        path: Path | None = None,
        log_bytes: int = 0,
        mode: int = 0o600,
        allowances_max: int = 0,
    ) -> None:
        self.is_private = path is None
        self.is_local = True
        self.allowances = KernelAllowances(clock, path, allowances_max, mode)
        self._recovery = _FileRecovery()
        self._table = _kernel.Table(
            path,
            capacity=states_max,
            log_bytes=log_bytes,
            mode=mode,
            epoch_offset_ns=EPOCH_OFFSET_NS,
            on_loss=self._recovery,
            now=clock.now_ns,
            is_real=type(clock) is SystemClock,
        )
        # Without a Python function in between: this runs for every request of several rules.
        self.check_together = self._table.check_all
        _warn_of(self._table.notice)

    def counter(
        self,
        limits: Sequence[Limit],
        rule: str,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
    ) -> _kernel.Counter:
        require_strict(consistency)
        require_regional(across)
        return _kernel.Counter(self._table, tuple(limits), rule)

    def request_check(
        self,
        rules: Sequence[CheckedRule],
        counts: dict[str, CompiledCounts],
        owner: object,
        sample: Callable[[tuple[str, ...]], object],
    ) -> _kernel.RequestCheck | None:
        if len(rules) > REQUEST_RULES_MAX or any(has_slots(rule[0].limits) for rule in rules):
            return None

        def counted(rule: str) -> _kernel.Counted:
            # Only this method writes them.
            return cast("_kernel.Counted", counts.setdefault(rule, _kernel.Counted()))

        own = cast(
            "Sequence[tuple[_kernel.Counter, str, int, str]]", rules
        )  # counters of this store
        parts = tuple(
            [(counter, field, units, counted(rule)) for counter, field, units, rule in own]
        )
        return _kernel.RequestCheck(self._table, parts, counted(""), owner, sample)

    def mark(self, subject: str, name: int, lasts_ns: int) -> bool:
        return self._table.mark(subject, name, None, lasts_ns)

    def sweep(self) -> int:
        return self._table.sweep(None)

    def forget_all(self) -> int:
        self.sweep()  # so that only states that still counted are counted
        return self._table.sweep(_AFTER_ALL_NS)

    def stats(self) -> StoreStats:
        return _stats_of(self._table.stats(), None if self.is_private else self._recovery.lost_s)

    def close(self) -> None:
        self._table.close()
        self.allowances.close()

    async def aclose(self) -> None:
        self.close()


class KernelAllowances:
    """A node's table of allowances on a KernelStore, in memory or in a file beside the store's.

    It is a file of its own, `PATH.allowances`, made on first use: a store that leases nothing needs
    no space for it, and processes of an older version keep using the other file.
    """

    def __init__(self, clock: Clock, path: Path | None, held_max: int, mode: int) -> None:
        self._clock = clock
        self.is_real = type(clock) is SystemClock
        self._path = path and path.with_name(f"{path.name}.allowances")
        self._held_max = held_max
        self._mode = mode
        self._lock = fork_safe(threading.Lock())
        self._opened: _kernel.Allowances | None = None
        self._closed = False

    def table(self) -> _kernel.Allowances:
        """Return the table; open it first if necessary."""
        if self._opened is not None:
            return self._opened
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store is closed; open another one")
            if self._opened is None:
                opened = _kernel.Allowances(
                    self._path,
                    capacity=self._held_max,
                    mode=self._mode,
                    epoch_offset_ns=EPOCH_OFFSET_NS,
                    on_loss=_FileRecovery(),
                )
                _warn_of(opened.notice)
                self._opened = opened
            return self._opened

    def gate(
        self, limits: Sequence[Limit], rule: str, kind: AllowanceKind, lifetime_ns: int
    ) -> KernelAllowanceGate:
        return KernelAllowanceGate(self, tuple(limits), rule, kind, lifetime_ns)

    def now_ns(self) -> int | None:
        """Return the time for the kernel; None if it reads the real time itself."""
        return None if self.is_real and switches.clock is None else self._clock.now_ns()

    def claim(self, count: int, flush_ns: int, *, ending: bool = False) -> list[UnitClaim]:
        claims = self.table().claim(count, flush_ns, ending, self.now_ns())
        return [UnitClaim(*claim) for claim in claims]

    def confirm(self, claims: Sequence[UnitClaim]) -> None:
        table = self.table()
        for claim in claims:
            if claim.kind == "eventual":
                table.confirm(claim.gate, claim.subject, claim.token)

    def stats(self) -> AllowanceStats:
        return AllowanceStats(*self.table().stats())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._opened is not None:
                self._opened.close()


class KernelAllowanceGate:
    """One rule's limits in a KernelAllowances."""

    __slots__ = ("_arguments", "_gate", "_limits", "_table", "number")

    def __init__(
        self,
        table: KernelAllowances,
        limits: tuple[Limit, ...],
        rule: str,
        kind: AllowanceKind,
        lifetime_ns: int,
    ) -> None:
        self._table = table
        self._limits = limits
        self.number = gate_number(limits, rule, kind)
        capacity = min(limit.capacity for limit in limits)
        self._arguments = (self.number, limits, rule, kind == "leased", lifetime_ns, capacity)
        self._gate = _kernel.AllowanceGate(table.table(), *self._arguments)

    def fast_check(self, fallback: Callable[..., Decision]) -> FastCheck | None:
        """Return a check in C; None if the time comes from another clock."""
        if not self._table.is_real:
            return None
        return _kernel.AllowanceGate(self._table.table(), *self._arguments, fallback)

    def spend(self, subject: str, cost: int) -> Decision | None:
        return self._gate.spend(subject, cost, self._table.now_ns())

    def unspend(self, subject: str, units: int, charged_store_ns: int) -> bool:
        return self._gate.unspend(subject, units, charged_store_ns, self._table.now_ns())

    def demand(self, subject: str) -> int:
        return self._gate.look(subject, self._table.now_ns())[0]

    def held(self, subject: str) -> int:
        return self._gate.look(subject, self._table.now_ns())[1]

    def put(self, subject: str, lease: Lease, decision: Decision, cost: int) -> Replaced | None:
        allowed = decision.allowed
        denied_ns = lease.denied_ns if allowed else decision.retry_after_ns
        replaced = self._gate.put(
            subject,
            cost,
            (lease.units, lease.ends_ns, lease.lasts_ns, denied_ns),
            (
                allowed,
                place_of(self._limits, decision),
                decision.remaining,
                decision.reset_after_ns,
                decision.decided_ns,
                lease_time_ns(decision),
            ),
            self._table.now_ns(),
        )
        return replaced and Replaced(*replaced)

    def deny(self, subject: str, cost: int, lasts_ns: int) -> None:
        self._gate.deny(subject, cost, lasts_ns, self._table.now_ns())

    def stop(self, subject: str) -> Replaced | None:
        replaced = self._gate.stop(subject)
        return replaced and Replaced(*replaced)

    def claim(self, subject: str) -> UnitClaim | None:
        claim = self._gate.claim(subject, self._table.now_ns())
        return claim and UnitClaim(*claim)

    def counted(self) -> tuple[int, int]:
        return self._gate.counted()
