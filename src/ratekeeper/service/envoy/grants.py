"""Finite grants: units of a rule's limits that an Envoy spends without asking.

The service charges the units of a grant first, as any other check, and sends them then. The Envoy
gets a bucket with that many tokens and no refill. So all Envoys together never admit more than was
charged, whatever happens afterwards: a lost stream, a restart or a second node change nothing.

A grant *replaces* the one before: DENY_ALL and the new bucket are one message, so tokens that were
left are gone. Their units are refunded when none of them can be spent any more. Envoy acknowledges
nothing, so this is inferred:

- A grant is *settled* when REPORTS reports have arrived since the next one was sent. One is not
  enough: an Envoy that was stopped for a while sends a report before it reads the new grant.
- The requests that were reported as allowed count as spent from the oldest grants, in order. So
  they cover at least what was spent from the settled ones. The rest of these is refunded.
- If reports are missing, their counts are lost. Then all units that were granted before count as
  spent, and later reports do not count for them. All units also count as spent when the stream
  ends, or a window of a counter.

**Time.** A unit is admitted up to LIFETIME_NS after it was charged. A refund may be of a unit that
was charged with the grant before. So in an interval of length T a bucket admits at most
capacity + rate × (T + 2 × LIFETIME_NS), and never more units than were charged. Grants of window
counters end before the window does: in each window the limit holds exactly.

Nothing here does I/O or reads a clock. Times are those of the worker's monotonic clock, unless a
comment says that they are the store's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.model import UNITS_MAX, Limit
from ratekeeper.core.steps import Call, Steps
from ratekeeper.rules.document.checks import WINDOW_COUNTERS
from ratekeeper.service.envoy.shares import DELIVERY_NS, DEMAND_NS_MIN, SEND_NS_MAX

TTL_S: Final = 12
# From the charge to the last request: a grant is sent within SEND_NS_MAX of the charge.
LIFETIME_NS: Final = TTL_S * NS_PER_SECOND + SEND_NS_MAX + DELIVERY_NS
# A grant is replaced this long before it expires.
REPLACED_NS: Final = 2 * NS_PER_SECOND
# Reports after which a replaced grant is settled. Those that come sooner count as one.
REPORTS: Final = 2
REPORT_NS_MIN: Final = 2 * NS_PER_SECOND
# Envoy reports every 5 s. After a longer time, a report was lost.
REPORT_NS_MAX: Final = 8 * NS_PER_SECOND
# A grant is for the demand of this time: until the next report, and a quarter more.
HORIZON_NS: Final = 25 * NS_PER_SECOND // 4
# For one bucket: more than can be sent in the time of a grant.
GRANTS_MAX: Final = 32
RETRY_NS: Final = NS_PER_SECOND


class Grant(NamedTuple):
    """Units that were charged, to send to an Envoy."""

    units: int
    """0: send DENY_ALL, or that the bucket is abandoned."""
    ttl_s: int
    charged_ns: int | None
    """The store's time of the charge; see Decision.charged_ns."""
    window: tuple[int, ...] = ()
    """The windows of counters that the units were charged in."""


class Refund(NamedTuple):
    """Units of a grant that cannot be spent any more."""

    units: int
    charged_ns: int | None


NO_UNITS: Final = Grant(0, TTL_S, None)


def grant_of(limits: Sequence[Limit], units: int, charged_ns: int) -> Grant | None:
    """Return a grant of units that were charged then, by the store's clock.

    It ends before the current window of each counter. None: a window is almost over. Then refund
    the units, and wait for the next window (`GrantLedger.denied`).
    """
    windows = [limit.window_ns for limit in limits if limit.algorithm in WINDOW_COUNTERS]
    left_ns = [each - charged_ns % each - SEND_NS_MAX - DELIVERY_NS for each in windows]
    ttl_s = min([TTL_S, *(each // NS_PER_SECOND for each in left_ns)])
    window = tuple([charged_ns // each for each in windows])
    return Grant(units, ttl_s, charged_ns, window) if ttl_s >= 1 else None


def size_of(wanted: int | None, room: int, envoys: int) -> int:
    """Return how many units to charge: at most room / (2 × Envoys), but at least 1 if there is one.

    A quarter of that part if the demand is not known, and a sixteenth of it if the demand is low:
    until the next report it may rise. Unspent units are refunded.

    >>> [size_of(wanted=90, room=room, envoys=2) for room in (1000, 80, 3, 0)]
    [90, 20, 1, 0]
    >>> size_of(None, room=1000, envoys=2), size_of(1, room=1000, envoys=2)
    (62, 15)
    """
    part = room // (2 * max(envoys, 1))
    units = part // 4 if wanted is None else max(min(wanted, part), part // 16)
    return min(max(units, 1), max(room, 0))


def charging(
    room: Callable[[], Any], charge: Callable[[int], Any], wanted: int | None, envoys: int
) -> Steps[tuple[int, Any]]:
    """Charge as much of `wanted` as fits; return the units, and the result of `charge`.

    `room` returns the units that the limits have left, and `charge` None for a denial: another
    client was faster. 0 units if there is no room.
    """
    units = size_of(wanted, (yield Call(room)), envoys)
    while units > 0:
        charged = yield Call(charge, units)
        if charged is not None:
            return units, charged
        units //= 2
    return 0, None


class _SentGrant:
    __slots__ = ("allowed", "grant", "is_lost", "reported_ns", "reports", "sent_ns")

    def __init__(self, grant: Grant) -> None:
        self.grant = grant
        self.allowed = 0
        """Requests that were reported as allowed since."""
        self.sent_ns: int | None = None
        self.reports = 0
        """Reports since the next grant was sent."""
        self.reported_ns = 0
        self.is_lost = False
        """True if all of its units count as spent."""


class GrantLedger:
    """The grants of one bucket of one stream.

    At each report: `reported`, and give its refunds back. Then, and every second, if `is_due`:
    charge units (`charging` with `wanted`, `grant_of`), `sending`, send, `sent`. If there is no
    room, `denied`, and if it returns True, send NO_UNITS in the same way.
    """

    def __init__(self, now_ns: int) -> None:
        """Begin with the first report of the bucket. Its counts are of an unknown time."""
        self._grants: list[_SentGrant] = []
        self._spent = 0
        """Requests that were allowed, and are not counted for a settled grant yet."""
        self._reported_ns = self._since_ns = now_ns
        self._requests = 0
        self._per_second: int | None = None
        self._retry_ns = now_ns
        self._window: tuple[int, ...] = ()

    @property
    def current(self) -> Grant | None:
        """The grant that was sent last."""
        return self._grants[-1].grant if self._grants else None

    @property
    def outstanding(self) -> int:
        """The units that are granted, and neither spent nor refunded: at most so many are lost."""
        granted = sum(each.grant.units for each in self._grants if not each.is_lost)
        return max(granted - self._spent, 0)

    # ── Reports ────────────────────────────────────────────────────────────────────────────────

    def reported(self, allowed: int, denied: int, now_ns: int) -> list[Refund]:
        """Note a report; return the units to give back.

        Every report of the stream counts, also one that does not list the bucket.
        """
        if now_ns - self._reported_ns > REPORT_NS_MAX:
            self._lose()
        self._reported_ns = now_ns
        if self._grants:
            self._spent += allowed
            self._grants[-1].allowed += allowed
        self._note_demand(allowed + denied, now_ns)
        for old, new in pairwise(self._grants):
            if new.sent_ns is None or now_ns < new.sent_ns + DELIVERY_NS:
                break
            if not old.reports or now_ns - old.reported_ns >= REPORT_NS_MIN:
                old.reports, old.reported_ns = old.reports + 1, now_ns
        refunds = []
        while self._grants and self._grants[0].reports >= REPORTS:
            settled = self._grants.pop(0)
            if not settled.is_lost:
                refunds.append(self._left(settled.grant))
        return [each for each in refunds if each.units]

    def _left(self, grant: Grant) -> Refund:
        """Return the units of a settled grant that were certainly not spent."""
        spent = min(self._spent, grant.units)
        self._spent -= spent
        return Refund(grant.units - spent, grant.charged_ns)

    def _lose(self) -> None:
        """Count all granted units as spent."""
        for each in self._grants:
            each.is_lost = True

    def _note_demand(self, requests: int, now_ns: int) -> None:
        self._requests += requests
        passed_ns = now_ns - self._since_ns
        if passed_ns >= DEMAND_NS_MIN:
            per_second = self._requests * NS_PER_SECOND // passed_ns
            self._per_second = min(per_second, UNITS_MAX)
            self._requests, self._since_ns = 0, now_ns

    # ── Grants ─────────────────────────────────────────────────────────────────────────────────

    @property
    def wanted(self) -> int | None:
        """The units that the next grant should have; None if the demand is not known yet."""
        if self._per_second is None:
            return None
        return min(self._per_second * HORIZON_NS // NS_PER_SECOND + 1, UNITS_MAX)

    def is_due(self, now_ns: int) -> bool:
        """Return True if the Envoy should get another grant."""
        if now_ns < self._retry_ns:
            return False
        last = self._grants[-1] if self._grants else None
        if last is None or last.sent_ns is None or not last.grant.units:
            return True
        age_ns = now_ns - last.sent_ns
        units = last.grant.units
        if self._expires(last, now_ns) or 2 * last.allowed > units:
            return True
        # It is probably used up, although no report says so yet.
        return age_ns >= RETRY_NS and (self._per_second or 0) * age_ns >= units * NS_PER_SECOND

    @staticmethod
    def _expires(last: _SentGrant, now_ns: int) -> bool:
        """Return True if a grant has expired, or will soon."""
        ends_ns = last.grant.ttl_s * NS_PER_SECOND - REPLACED_NS
        return last.sent_ns is None or now_ns - last.sent_ns >= ends_ns

    def denied(self, now_ns: int) -> bool:
        """Note that there is no room; return True if NO_UNITS must be sent to the Envoy."""
        self._retry_ns = now_ns + RETRY_NS
        return not self._grants or self._expires(self._grants[-1], now_ns)

    def sending(self, grant: Grant) -> None:
        """Note a grant before it is sent."""
        if grant.units and grant.window != self._window:
            self._lose()
            self._window = grant.window
        self._grants.append(_SentGrant(grant))
        # Those that are forgotten count as spent.
        del self._grants[:-GRANTS_MAX]

    def sent(self, now_ns: int) -> None:
        """Note that it has been sent."""
        for each in self._grants:
            if each.sent_ns is None:
                each.sent_ns = now_ns
