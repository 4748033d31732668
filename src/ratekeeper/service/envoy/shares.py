"""Rate shares: the rate of one limit, divided among the Envoys that ask for it.

An Envoy that has a share decides alone, with a token bucket. The shares of one rule and subject are
a *table*. It is one value in the store (`Cells`), so all workers and nodes see the same one, and a
restart forgets nothing. Nothing here does I/O or reads a clock; `reporting` yields its calls.

**The bound.** In every interval of length T, all Envoys together admit at most rate × T + burst, as
one token bucket does. Two inequalities ensure that, and every change keeps them:

- Σ reserved rates <= rate. The rate *reserved* for an Envoy is the most that it may be using. A
  lower share is *assigned* first, and reserved when the Envoy has certainly applied it: when a
  report arrives SETTLED_NS after the assignment was sent. The share of a lost stream stays reserved
  until it has expired. A share only grows into room that no other reservation has.
- credit + Σ reserved bursts <= burst. Envoy fills a new bucket, and it keeps the fill *ratio* when
  the size changes, so each increase of a size may create tokens. They are paid from the *credit*,
  which only the unreserved part of the rate refills. A smaller bucket pays nothing back: its tokens
  may have been spent.

So the tokens of all Envoys and the credit together refill at most at the rate, and are never more
than the burst. Without the credit, a client that alternates between two Envoys could spend the
whole burst again after each report.

**Assumptions.** A message on a live stream is applied within DELIVERY_NS of being sent. It is
sent within SEND_NS_MAX of the read of the table, or not at all. The store's clock is not set
forward, and the store does not lose its last writes.

**Writers.** The worker that has the stream of an Envoy changes only the entry of that Envoy, at
each report. It relies on its own list of sent assignments (`Holding`) and not on the table: a table
that was written may belong to a message that was never sent.

**An Envoy that returns** after its stream was lost is a new holder, and its old entry may still
reserve most of the rate. If the names of both are equal, the new holder takes the old entry over:
its Envoy then has one assignment, not two. This has two exceptions to the bound. If the Envoy was
restarted, its bucket is full once more. If another Envoy of the same name connects for the first
time meanwhile, both have that share until the old one expires. Names that several entries of a
table have are not taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import StoreUnavailable
from ratekeeper.core.model import Limit
from ratekeeper.core.steps import Call, Steps
from ratekeeper.decide.store import Cells

# The time to live of every assignment. Envoy reports every 5 s, and each report renews it.
TTL_S: Final = 10
SEND_NS_MAX: Final = NS_PER_SECOND
DELIVERY_NS: Final = NS_PER_SECOND
SETTLED_NS: Final = DELIVERY_NS
_TTL_NS: Final = TTL_S * NS_PER_SECOND
RESERVED_NS: Final = _TTL_NS + SEND_NS_MAX + DELIVERY_NS
# An entry that is so old may belong to a lost stream. Envoy returns at the next report, after 5 s.
ORPHANED_NS: Final = 4 * NS_PER_SECOND
HOLDERS_MAX: Final = 128
HOLDER_BYTES: Final = 8
# A fill interval has at least so many tokens, so that shares can be small parts of the rate.
FILL_TOKENS: Final = 100
# Fields of Envoy's token bucket are unsigned numbers of 32 bits.
TOKENS_MAX: Final = 2**32 - 1
# If there are fewer tokens than holders, they take turns of this length.
TURN_NS: Final = 60 * NS_PER_SECOND
# Demand is measured over at least this time.
DEMAND_NS_MIN: Final = NS_PER_SECOND
RETRY_S: Final = 1
ATTEMPTS_MAX: Final = 20
_SENT_MAX: Final = 8
_VERSION: Final = 1
_UNKNOWN_HOLDER: Final = bytes(HOLDER_BYTES)


class UnreadableTable(Exception):
    """A value in the store is not a table of this version."""

    def __init__(self, why: str, *, is_newer: bool = False) -> None:
        """`is_newer`: a later version of Ratekeeper wrote it, which may still use it."""
        super().__init__(why)
        self.is_newer = is_newer


class TableFull(Exception):
    """The table has HOLDERS_MAX holders already."""


class Pool(NamedTuple):
    """A limit as Envoys share it."""

    rate: int
    """Tokens in each fill interval."""
    burst: int
    """The most tokens that all buckets have together."""
    fill_s: int
    """The fill interval. Envoy ignores a change of it, so all shares of a table have the same."""


class Share(NamedTuple):
    """A part of a pool: the token bucket of one Envoy."""

    rate: int
    """`tokens_per_fill`."""
    burst: int
    """`max_tokens`."""


NOTHING: Final = Share(0, 0)


def pool_of(limit: Limit) -> Pool:
    """Return a limit as Envoys share it: a token bucket, also if it counts in windows.

    The fill interval is the smallest number of seconds that has FILL_TOKENS tokens, but at most the
    window, rounded up to a second. Rates are rounded down.

    >>> pool_of(Limit(20, per=1, burst=30))
    Pool(rate=20, burst=50, fill_s=1)
    >>> pool_of(Limit(100, per=3600))
    Pool(rate=100, burst=100, fill_s=3600)
    """
    seconds_max = -(-limit.window_ns // NS_PER_SECOND)
    enough_s = -(-FILL_TOKENS * limit.window_ns // (limit.limit * NS_PER_SECOND))
    fill_s = max(1, min(enough_s, seconds_max))
    rate = limit.limit * fill_s * NS_PER_SECOND // limit.window_ns
    return Pool(min(rate, TOKENS_MAX), min(limit.capacity, TOKENS_MAX), fill_s)


class ShareEntry(NamedTuple):
    """One holder in a table."""

    holder: bytes
    """Identifies a bucket of a stream; random."""
    name: bytes
    """A hash of the Envoy's name; empty if the entry cannot be taken over."""
    assigned: Share
    """The share that was assigned last."""
    reserved: Share
    """The most that the Envoy may be using."""
    demand: int
    """Requests in a fill interval; -1 if it is not known yet."""
    expires_ns: int
    """The store's time at which its assignment has certainly expired."""
    is_lost: bool
    """True if its stream has ended."""


def name_of(node: str) -> bytes:
    """Return the name of an Envoy in a table; empty without a name."""
    return blake2b(node.encode(), digest_size=HOLDER_BYTES).digest() if node else b""


# ── Tables ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Table:
    """The shares of one rule and subject."""

    pool: Pool
    credit_nanos: int
    """Billionths of a token that are left to pay for larger buckets."""
    at_ns: int
    """The store's time of the last change."""
    entries: tuple[ShareEntry, ...] = ()

    def at(self, pool: Pool, now_ns: int) -> Table:
        """Return the table at a later time, and with the limit that the rule has now.

        The unreserved rate has refilled the credit, and expired entries are gone. If the clock was
        set back, nothing is refilled, and no entry lasts longer than a new one.
        """
        latest_ns = now_ns + RESERVED_NS
        entries = tuple(
            [each._replace(expires_ns=min(each.expires_ns, latest_ns)) for each in self.entries]
        )
        table = replace(self, at_ns=min(self.at_ns, now_ns), entries=entries)
        ends = sorted({each.expires_ns for each in entries if each.expires_ns <= now_ns})
        for end_ns in (*ends, now_ns):
            table = _refilled(table, max(end_ns, table.at_ns))
        return table if pool == table.pool else _with_pool(table, pool)

    @property
    def reserved(self) -> Share:
        """The sum of the shares that all entries reserve."""
        return _sum(each.reserved for each in self.entries)

    @property
    def lasts_ns(self) -> int:
        """For how long it must be kept: until it would not differ from a new one."""
        refill_ns = self.pool.burst * self.pool.fill_s * NS_PER_SECOND // max(self.pool.rate, 1)
        return RESERVED_NS + refill_ns + NS_PER_SECOND

    def encoded(self) -> bytes:
        """Return the value of the cell: a version and a msgpack array."""
        rows = [
            (each.holder, each.name, *each.assigned, *each.reserved, *each[4:])
            for each in self.entries
        ]
        return bytes((_VERSION,)) + _ENCODER.encode(
            (*self.pool, self.credit_nanos, self.at_ns, rows)
        )


def _with_pool(table: Table, pool: Pool) -> Table:
    """Return the table for a changed limit. Reservations stay what they are."""
    from_s, to_s = table.pool.fill_s, pool.fill_s
    entries = table.entries
    if from_s != to_s:
        entries = tuple(
            each._replace(
                name=b"",  # its Envoy must get a new bucket
                assigned=in_fill(each.assigned, from_s, to_s),
                reserved=in_fill(each.reserved, from_s, to_s),
                demand=-(-each.demand * to_s // from_s) if each.demand > 0 else each.demand,
            )
            for each in entries
        )
    return _capped(replace(table, pool=pool, entries=entries))


def _refilled(table: Table, until_ns: int) -> Table:
    """Return the table with the credit of this time, without the entries that end then."""
    free = max(table.pool.rate - table.reserved.rate, 0)
    credit = table.credit_nanos + free * (until_ns - table.at_ns) // table.pool.fill_s
    refilled = _capped(replace(table, credit_nanos=credit, at_ns=until_ns))
    entries = tuple([each for each in table.entries if each.expires_ns > until_ns])
    return replace(refilled, entries=entries)


def _capped(table: Table) -> Table:
    room = max(table.pool.burst - table.reserved.burst, 0) * NS_PER_SECOND
    return replace(table, credit_nanos=min(table.credit_nanos, room))


def new_table(pool: Pool, now_ns: int) -> Table:
    """Return a table without holders."""
    return Table(pool, pool.burst * NS_PER_SECOND, now_ns)


def unknown_table(pool: Pool, now_ns: int) -> Table:
    """Return a table for shares that are not known: nothing is free until they have expired."""
    everything = Share(pool.rate, pool.burst)
    entry = ShareEntry(
        _UNKNOWN_HOLDER, b"", everything, everything, 0, now_ns + RESERVED_NS, is_lost=True
    )
    return Table(pool, 0, now_ns, (entry,))


_Row = tuple[bytes, bytes, int, int, int, int, int, int, bool]
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(tuple[int, int, int, int, int, list[_Row]])


def decode(value: bytes) -> Table:
    """Return the table in a cell. Raises UnreadableTable."""
    if value[:1] != bytes((_VERSION,)):
        newer = bool(value) and value[0] > _VERSION
        raise UnreadableTable(
            f"its version is {value[0] if value else 'missing'}, and this program knows {_VERSION}",
            is_newer=newer,
        )
    try:
        rate, burst, fill_s, credit, at_ns, rows = _DECODER.decode(value[1:])
    except msgspec.MsgspecError as error:
        raise UnreadableTable(f"it is damaged: {error}") from error
    entries = tuple(
        ShareEntry(row[0], row[1], Share(*row[2:4]), Share(*row[4:6]), *row[6:]) for row in rows
    )
    sizes = (rate, burst, fill_s - 1, credit, at_ns, *(min(row[2:6]) for row in rows))
    if (
        min(sizes) < 0
        or len(rows) > HOLDERS_MAX + 1
        or len({each.holder for each in entries}) != len(entries)
        or any(_highest((each.assigned, each.reserved)) != each.reserved for each in entries)
    ):
        raise UnreadableTable("it is damaged: its numbers contradict each other")
    return Table(Pool(rate, burst, fill_s), credit, at_ns, entries)


def in_fill(share: Share, from_s: int, to_s: int) -> Share:
    """Return a share for another fill interval, rounded up."""
    return Share(-(-share.rate * to_s // from_s), share.burst)


def _sum(shares: Any) -> Share:
    rate = burst = 0
    for each in shares:
        rate += each.rate
        burst += each.burst
    return Share(rate, burst)


def _highest(shares: Sequence[Share]) -> Share:
    return Share(
        max((each.rate for each in shares), default=0),
        max((each.burst for each in shares), default=0),
    )


# ── Dividing ───────────────────────────────────────────────────────────────────────────────────


def divide(rate: int, wants: Sequence[int], places: int, turn: int) -> tuple[list[int], int]:
    """Divide a rate by demand; return the parts, and the rest that is beyond all demand.

    Every holder gets the rate that it wants, but at most a fair part: the level at which the whole
    rate is used (water-filling). At most `places` holders get a part. If there are more, they take
    turns.

    >>> divide(100, [10, 80, 80], 3, 0)
    ([10, 45, 45], 0)
    >>> divide(100, [10, 20], 2, 0)
    ([10, 20], 70)
    >>> divide(1, [5, 5], 1, 3)
    ([0, 1], 0)
    """
    count = len(wants)
    places = min(places, rate, count)
    chosen = sorted({(turn + each) % count for each in range(places)}, key=lambda at: wants[at])
    parts = [0] * count
    left = rate if places > 0 else 0
    for done, at in enumerate(chosen):
        parts[at] = min(wants[at], left // (places - done))
        left -= parts[at]
    return parts, left


def wanted(demand: int, fair: int) -> int:
    """Return the rate that a holder gets if there is enough: a quarter more than its demand.

    A holder whose demand is not known yet gets half of a fair part.
    """
    return max(fair // 2, 1) if demand < 0 else demand + demand // 4 + 1


def targets(table: Table, now_ns: int) -> dict[bytes, int]:
    """Return the rate that each live holder shall have when all others have theirs.

    All workers compute the same targets from the same table, and their sum is at most the rate.
    """
    pool = table.pool
    live = sorted(each for each in table.entries if not each.is_lost)
    if not live:
        return {}
    lost = _sum(each.reserved for each in table.entries if each.is_lost)
    rate = max(pool.rate - lost.rate, 0)
    fair = rate // len(live)
    wants = [wanted(each.demand, fair) for each in live]
    parts, rest = divide(rate, wants, max(pool.burst - lost.burst, 0), now_ns // TURN_NS)
    missing = (pool.burst - table.reserved.burst) * NS_PER_SECOND - table.credit_nanos
    if missing > pool.burst * NS_PER_SECOND // 8:
        rest //= 2  # the other half refills the credit
    given = sum(want for want, part in zip(wants, parts, strict=True) if part)
    return {
        each.holder: part + rest * want // given if part else 0
        for each, want, part in zip(live, wants, parts, strict=True)
    }


# ── Transitions ────────────────────────────────────────────────────────────────────────────────


class ShareClaim(NamedTuple):
    """One holder as its worker knows it."""

    holder: bytes
    name: bytes
    may_have: Share
    """The most that the Envoy may be using now."""
    keeps: int
    """The size of the bucket that it keeps with its tokens; 0 if it would get a new, full one."""
    demand: int
    """Requests in a fill interval; -1 if it is not known yet."""
    is_first: bool = False
    """True if nothing was sent to this holder yet."""
    is_applied: bool = False
    """True if the Envoy certainly has a bucket with the fill interval. Only then may another stream
    of it take the entry over: Envoy would ignore another fill interval."""


class Reported(NamedTuple):
    """The effect of a report on a table."""

    table: Table
    share: Share
    is_new: bool
    """True if the Envoy must get a new bucket."""
    is_short: bool
    """True if the share is below its target, or nothing."""
    taken_over: Share
    """The share that the Envoy may be using already, from an old entry that it took over."""


def report(table: Table, pool: Pool, claim: ShareClaim, now_ns: int) -> Reported:
    """Renew a holder and compute its share. Raises TableFull."""
    table = table.at(pool, now_ns)
    taken_over = NOTHING
    if all(each.holder != claim.holder for each in table.entries):
        if claim.is_first:
            table, claim, taken_over = _take_over(table, claim, now_ns)
        else:
            table = _known_again(table, claim)
        if len(table.entries) >= HOLDERS_MAX:
            raise TableFull(f"a rule has at most {HOLDERS_MAX} Envoys for one subject")
    others = tuple([each for each in table.entries if each.holder != claim.holder])
    ends_ns = now_ns + RESERVED_NS
    name = claim.name if claim.is_applied or taken_over != NOTHING else b""
    entry = ShareEntry(
        claim.holder, name, NOTHING, claim.may_have, claim.demand, ends_ns, is_lost=False
    )
    table = _capped(replace(table, entries=(*others, entry)))
    target = targets(table, now_ns)[claim.holder]
    room = pool.rate - _sum(each.reserved for each in others).rate
    share, keeps = _share_in(table, min(target, max(room, 0)), claim.keeps)
    paid = max(share.burst - keeps, 0) * NS_PER_SECOND
    entry = entry._replace(assigned=share, reserved=_highest((claim.may_have, share)))
    entries = (*others, entry)
    table = replace(table, credit_nanos=table.credit_nanos - paid, entries=entries)
    is_new = not keeps and taken_over == NOTHING
    is_short = share == NOTHING or share.rate < target
    return Reported(table, share, is_new, is_short, taken_over)


def _share_in(table: Table, rate: int, keeps: int) -> tuple[Share, int]:
    """Return a share of up to this rate, and the size of the bucket that is kept: all or 0.

    A larger bucket keeps the fill ratio, so the bucket of a busy Envoy gets nothing for the credit
    that is paid. If the credit is enough for one of twice the size, the Envoy gets a new one.
    """
    pool = table.pool
    full = max(pool.burst * rate // pool.rate, 1) if rate else 0
    credit = table.credit_nanos // NS_PER_SECOND
    if min(full, credit) >= 2 * keeps:
        keeps = 0
    burst = min(full, keeps + credit)
    if burst < full:
        # A bucket of less than a tenth of a second cannot use its rate. The rest of the rate
        # refills the credit, for a larger bucket a little later.
        rate = min(rate, 10 * burst * pool.fill_s)
    return (Share(rate, burst) if burst else NOTHING), keeps


def _take_over(table: Table, claim: ShareClaim, now_ns: int) -> tuple[Table, ShareClaim, Share]:
    """Replace the old entry of an Envoy that has returned, if there is one."""
    named = [each for each in table.entries if each.name == claim.name != b""]
    if len(named) != 1:  # there is none, or the name is not that of one Envoy
        return table, claim, NOTHING
    old, left_ns = named[0], named[0].expires_ns - now_ns
    if not old.is_lost and left_ns > RESERVED_NS - ORPHANED_NS:
        return table, claim, NOTHING
    # An assignment that may expire before the next one arrives leaves no bucket to keep.
    keeps = old.assigned.burst if left_ns > 2 * (SEND_NS_MAX + DELIVERY_NS) else 0
    may_have = _highest((claim.may_have, old.reserved))
    rest = tuple([each for each in table.entries if each is not old])
    claim = claim._replace(may_have=may_have, keeps=keeps)
    return replace(table, entries=rest), claim, may_have


def _known_again(table: Table, claim: ShareClaim) -> Table:
    """Return a table that was unknown without the part of a holder that is known again."""
    entries = tuple(
        each._replace(
            assigned=NOTHING,
            reserved=Share(
                max(each.reserved.rate - claim.may_have.rate, 0),
                max(each.reserved.burst - claim.may_have.burst, 0),
            ),
        )
        if each.holder == _UNKNOWN_HOLDER
        else each
        for each in table.entries
    )
    return replace(table, entries=entries)


def to_change(table: Table, now_ns: int) -> frozenset[bytes]:
    """Return the holders whose rates should change by an eighth or more at once.

    That is a rate that can rise, or one that must fall so that another can rise.
    """
    free = max(table.pool.rate - table.reserved.rate, 0)
    goals = targets(table, now_ns)
    has_credit = table.credit_nanos >= NS_PER_SECOND
    missing = {
        each.holder: (goals[each.holder] - each.assigned.rate, has_credit or each.assigned.burst)
        for each in table.entries
        if each.holder in goals
    }
    is_needed = sum(rate for rate, _ in missing.values() if rate > 0) > free
    return frozenset(
        holder
        for holder, (rate, can_rise) in missing.items()
        if (can_rise and 8 * min(rate, free) > goals[holder])
        or (is_needed and -8 * rate > goals[holder] - rate)
    )


def lose(table: Table, claim: ShareClaim, now_ns: int) -> Table:
    """Mark the entry of a holder whose stream has ended, or that has abandoned the bucket.

    The share that it may have stays reserved until it expires. Without a name in the claim, no
    other holder takes it over.
    """
    table = table.at(table.pool, now_ns)
    entries = tuple(
        each._replace(
            name=claim.name if claim.is_applied else b"",
            reserved=_highest((claim.may_have, each.assigned)),
            demand=0,
            is_lost=True,
        )
        if each.holder == claim.holder
        else each
        for each in table.entries
    )
    return replace(table, entries=entries)


# ── The assignments of a worker ────────────────────────────────────────────────────────────────


class _SentShare(NamedTuple):
    share: Share
    fill_s: int
    sent_ns: int | None
    """None while it is being sent."""


class Assignment(NamedTuple):
    """A share to send to an Envoy."""

    share: Share
    """With a rate of 0, send DENY_ALL."""
    fill_s: int
    is_new: bool
    """True if the Envoy must get a new bucket: send DENY_ALL before the token bucket."""
    send_by_ns: int
    """The worker's time after which it must not be sent any more; then report again."""
    is_short: bool = False
    """True if it should be higher: other shares must shrink first. Try again in RETRY_S."""
    others: frozenset[bytes] = frozenset()
    """Other holders whose shares should change at once. After a report, call `reporting` for those
    of this worker, and ignore this field of their assignments."""


class Holding:
    """The assignments that one worker has sent for one bucket of one stream.

    Times are those of the worker's monotonic clock. A stream that ends, or a bucket that is
    abandoned, ends its holding. A bucket that returns has another holding with another holder.
    """

    __slots__ = (
        *("_applied_s", "_before", "_measured", "_requests", "_sent", "_since_ns"),
        *("holder", "name"),
    )

    def __init__(self, holder: bytes, name: bytes) -> None:
        """`holder` is random and has HOLDER_BYTES bytes; `name` is from `name_of`."""
        self.holder = holder
        self.name = name
        self._sent: list[_SentShare] = []
        self._before: _SentShare | None = None
        self._applied_s: int | None = None
        """The fill interval that the Envoy's bucket certainly has."""
        self._since_ns: int | None = None
        self._requests = 0
        self._measured: tuple[int, int] | None = None
        """The requests of the last reports, and the time that they cover."""

    def reported(self, requests: int, now_ns: int) -> None:
        """Note a report of the Envoy: requests since its last one, allowed and denied."""
        if self._since_ns is None:  # the time that its first report covers is not known
            self._since_ns = now_ns
        else:
            self._requests += requests
            passed_ns = now_ns - self._since_ns
            if passed_ns >= DEMAND_NS_MIN:
                self._measured = self._requests, passed_ns
                self._requests, self._since_ns = 0, now_ns
        settled = [
            place
            for place, each in enumerate(self._sent)
            if each.sent_ns is not None and each.sent_ns + SETTLED_NS <= now_ns
        ]
        if settled:
            del self._sent[: settled[-1]]
            self._before = None
            self._applied_s = self._sent[0].fill_s

    def sending(self, assignment: Assignment) -> None:
        """Note an assignment before it is sent."""
        self._sent.append(_SentShare(assignment.share, assignment.fill_s, None))
        if len(self._sent) > _SENT_MAX:
            first, second = self._sent[:2]
            before = in_fill(first.share, first.fill_s, second.fill_s)
            self._sent[:2] = [second._replace(share=_highest((before, second.share)))]

    def sent(self, now_ns: int) -> None:
        """Note that all assignments have been sent."""
        self._sent = [
            each if each.sent_ns is not None else each._replace(sent_ns=now_ns)
            for each in self._sent
        ]

    def had_before(self, share: Share, fill_s: int) -> None:
        """Note the share that the Envoy may be using from before this stream."""
        self._before = _SentShare(share, fill_s, None)
        self._applied_s = fill_s

    def claim(self, pool: Pool, now_ns: int) -> ShareClaim:
        """Return the holder's claim, from the assignments that this worker has sent."""
        usable = [
            each
            for each in self._sent
            if each.sent_ns is None or now_ns < each.sent_ns + _TTL_NS + DELIVERY_NS
        ]
        if self._before is not None:
            usable.append(self._before)
        may_have = _highest([in_fill(each.share, each.fill_s, pool.fill_s) for each in usable])
        keeps = self._sent[-1].share.burst if self.keeps_bucket(pool, now_ns) else 0
        intervals = {self._applied_s, *(each.fill_s for each in self._sent)}
        return ShareClaim(
            self.holder,
            self.name,
            may_have,
            keeps,
            self._demand_in(pool.fill_s),
            is_first=not self._sent,
            is_applied=intervals == {pool.fill_s},
        )

    def _demand_in(self, fill_s: int) -> int:
        """Return the requests in a fill interval; -1 if they are not known yet."""
        if self._measured is None:
            return -1
        requests, passed_ns = self._measured
        return min(requests * fill_s * NS_PER_SECOND // passed_ns, TOKENS_MAX)

    def keeps_bucket(self, pool: Pool, now_ns: int) -> bool:
        """Return True if the Envoy's bucket lives until the next assignment arrives."""
        if not self._sent:
            return False
        last = self._sent[-1]
        if last.fill_s != pool.fill_s or not last.share.burst:
            return False
        arrives_ns = now_ns + SEND_NS_MAX + DELIVERY_NS
        return last.sent_ns is not None and arrives_ns < last.sent_ns + _TTL_NS


# ── With a store ───────────────────────────────────────────────────────────────────────────────


def reporting(
    cells: Cells, cell: str, pool: Pool, holding: Holding, now_ns: Callable[[], int]
) -> Steps[Assignment]:
    """Renew a holder in the store and return the assignment to send: run with `run_async`.

    Call `holding.reported` before, if the reason is a report; `holding.sending` and
    `holding.sent` before and after sending. Two round trips. `now_ns` is the worker's monotonic
    clock. Raises StoreError, TableFull, and UnreadableTable if a newer version wrote the table.
    """
    for _ in range(ATTEMPTS_MAX):
        started_ns = now_ns()
        value, store_ns = yield Call(cells.read, cell)
        claim = holding.claim(pool, started_ns)
        found = report(_table_of(value, pool, claim, store_ns), pool, claim, store_ns)
        table = found.table
        if found.taken_over != NOTHING:
            # Before the write: if its answer is lost, the entry may be replaced all the same.
            holding.had_before(found.taken_over, pool.fill_s)
        if (yield Call(cells.write, cell, value, table.encoded(), table.lasts_ns)):
            return Assignment(
                found.share,
                pool.fill_s,
                is_new=found.is_new,
                send_by_ns=started_ns + SEND_NS_MAX,
                is_short=found.is_short,
                others=to_change(table, store_ns) - {holding.holder},
            )
    raise StoreUnavailable(f"the cell {cell!r} was changed by others {ATTEMPTS_MAX} times in a row")


def losing(
    cells: Cells,
    cell: str,
    pool: Pool,
    holding: Holding,
    now_ns: Callable[[], int],
    *,
    abandoned: bool = False,
) -> Steps[None]:
    """Mark a holder whose stream has ended, or whose bucket was abandoned. Raises StoreError.

    If it is not called, the entry expires all the same, but an Envoy that returns waits longer.
    """
    for _ in range(ATTEMPTS_MAX):
        value, store_ns = yield Call(cells.read, cell)
        if value is None:
            return
        claim = holding.claim(pool, now_ns())
        try:
            table = lose(decode(value), claim._replace(name=b"") if abandoned else claim, store_ns)
        except UnreadableTable:
            return
        if (yield Call(cells.write, cell, value, table.encoded(), table.lasts_ns)):
            return
    raise StoreUnavailable(f"the cell {cell!r} was changed by others {ATTEMPTS_MAX} times in a row")


def _table_of(value: bytes | None, pool: Pool, claim: ShareClaim, now_ns: int) -> Table:
    """Return the table in a cell. Raises UnreadableTable for one of a newer version."""
    if value is None:
        # If this worker has assigned shares, the store has lost the table.
        lost = claim.may_have != NOTHING
        return unknown_table(pool, now_ns) if lost else new_table(pool, now_ns)
    try:
        return decode(value)
    except UnreadableTable as error:
        if error.is_newer:
            raise
        return unknown_table(pool, now_ns)
