"""Defects of the protocol between regions, each of which the simulator must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ratekeeper.core.model import Limit
from ratekeeper.decide import regional
from ratekeeper.decide.ledgers import BucketLedger, Ledger, Ratio, ledger_of
from ratekeeper.decide.regional import Learnt, MemoryRegional, Report, Shares
from ratekeeper.regions import exchange, table

Plant = Callable[[pytest.MonkeyPatch], None]


class DrainsOwnAtOnce(BucketLedger):
    """Time drains `own` also while `known` is not empty."""

    def _at(self, now_ns: int, share: Ratio) -> tuple[int, int, int]:
        known, own, last_ns = super()._at(now_ns, share)
        passed_ns = last_ns - self._last_ns if known else 0
        micros = passed_ns * self.limit.micros_numerator // self.limit.ns_denominator
        return known, max(own - int(micros * share), 0), last_ns


class KeepsOwnInKnown(BucketLedger):
    """All units together drain at the rate, and `own` drains at the share as well."""

    def _at(self, now_ns: int, share: Ratio) -> tuple[int, int, int]:
        elapsed_ns = max(now_ns - self._last_ns, 0)
        drained = elapsed_ns * self.limit.micros_numerator // self.limit.ns_denominator
        own = max(self._own - int(drained * share), 0)
        everything = max(self._known + self._own - drained, 0)
        return max(everything - own, 0), own, now_ns


class MovesTwice(BucketLedger):
    """Own units that are accepted are added to `known` twice."""

    def move(self, now_ns: int, share: Ratio, last: int) -> None:
        """Move own units to `known`."""
        before = self.levels(now_ns, share)[1]
        super().move(now_ns, share, last)
        self._known += before - self._own


class PromisesTooSoon(BucketLedger):
    """The time until a request fits is half of what it is."""

    def wait_ns(self, now_ns: int, share: Ratio, most: int, load: int) -> int:
        """Return the half."""
        return super().wait_ns(now_ns, share, most, load) // 2


def bucket(kind: type[BucketLedger]) -> Plant:
    """Use another kind of bucket."""

    def made(limit: Limit) -> Ledger:
        found = ledger_of(limit)
        return kind(limit) if isinstance(found, BucketLedger) else found

    return lambda patch: patch.setattr(regional, "ledger_of", made)


def accepts_everything(patch: pytest.MonkeyPatch) -> None:
    """A region accepts also what it has no room for."""
    learn = MemoryRegional._learn

    def learnt(self: MemoryRegional, region: str, epoch: int, report: Report) -> Learnt:
        return learn(self, region, epoch, report)._replace(accepted=True)

    patch.setattr(MemoryRegional, "_learn", learnt)


def rises_without_addition(patch: pytest.MonkeyPatch) -> None:
    """A share that rises gives units at once."""
    set_shares = MemoryRegional.set_shares

    async def set_(self: MemoryRegional, shares: Shares, token: int) -> bool:
        for subject in self._subjects.values():
            subject.share, subject.epoch = shares.share, shares.epoch
        return await set_shares(self, shares._replace(before=shares.share), token)

    patch.setattr(MemoryRegional, "set_shares", set_)


def rises_at_once(patch: pytest.MonkeyPatch) -> None:
    """A share rises before the others have lowered theirs."""
    next_shares = table.next_shares

    def rising(region: str, wanted: table.ShareTable, *args: Any, **kwargs: Any) -> Shares:
        found = next_shares(region, wanted, *args, **kwargs)
        return found._replace(share=wanted.share(region))

    patch.setattr(table, "next_shares", rising)


def reports_once(patch: pytest.MonkeyPatch) -> None:
    """A total is not reported again."""
    due = MemoryRegional.due

    async def once(self: MemoryRegional, most: int, token: int) -> list[Report]:
        found = await due(self, most, token)
        for report in found:
            self._due.pop(report.key, None)
        return found

    patch.setattr(MemoryRegional, "due", once)


def leads_for_long(patch: pytest.MonkeyPatch) -> None:
    """A dead leader keeps the lead for 12 s."""
    patch.setattr(exchange, "LASTS_S", 12.0)


def ignores_demand(patch: pytest.MonkeyPatch) -> None:
    """Each region takes the whole of an eventual limit for its own."""
    patch.setattr(MemoryRegional, "_share_of", staticmethod(lambda *_: regional.WHOLE))
