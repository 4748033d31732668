"""A store in memory that cannot decide some of the rules, as a cluster with a dead shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ratekeeper import Decision, Limit, StoreUnavailable
from ratekeeper.core.model import Consistency
from ratekeeper.decide.regional import AcrossRegions
from ratekeeper.decide.stores.memory import MemoryCounter, PythonMemoryStore
from tests.shared_memory import SharedMemory


class PartlyFailing(PythonMemoryStore):
    """Raises StoreUnavailable for checks and peeks of the rules in `failing`.

    A name with a control character fails alone: that of a rule's cool-downs.
    """

    failing: frozenset[str] = frozenset()

    def counter(
        self,
        limits: Sequence[Limit],
        rule: str,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
    ) -> Any:
        return _PartlyFailingCounter(self, super().counter(limits, rule, consistency, across), rule)


class PartlyFailingShared(PartlyFailing, SharedMemory):
    """One that several nodes share."""


class _PartlyFailingCounter:
    def __init__(self, store: PartlyFailing, counter: MemoryCounter, rule: str) -> None:
        self._store = store
        self._counter = counter
        self._names = {rule, rule.partition("\x1f")[0]}
        self.limits, self.tables = counter.limits, counter.tables
        self.refund, self.grant, self.reset = counter.refund, counter.grant, counter.reset
        self.lease, self.report = counter.lease, counter.report

    def fast_check(self, fallback: Any) -> None:
        return None

    def _require_working(self) -> None:
        if not self._names.isdisjoint(self._store.failing):
            raise StoreUnavailable(f"the shard of {sorted(self._names)} is down")

    def decide(self, *arguments: Any) -> Any:
        self._require_working()
        return self._counter.decide(*arguments)

    def check(self, subject: str, cost: int) -> Decision:
        self._require_working()
        return self._counter.check(subject, cost)

    def peek(self, subject: str, cost: int) -> Decision:
        self._require_working()
        return self._counter.peek(subject, cost)

    def owe(self, subject: str, units: int) -> int:
        self._require_working()
        return self._counter.owe(subject, units)
