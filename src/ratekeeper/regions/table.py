"""The table of shares, and how it changes without a moment over the limit.

A table has a version and the share of each region; shares add up to 1. The first one comes from
the settings. `ratekeeper regions set` writes a table with a higher version into the stores of all
regions that it can reach. Each leader adopts the table with the highest epoch that it finds in the
notes:

1. Its share falls to the smaller of the current one and the one of the table, at once.
2. It *announces* the epoch, in the notes of its store. Leaders pass on what others have announced.
3. When all other regions of the table have announced the same epoch, its share rises to the one of
   the table. `Shares.before` and `changed_ns` say so: a rise gives no units at once.

So shares never add up to more than 1, in whatever order leaders hear of a table, and if they crash
in between. A region that is not in the table gets no share. The others cannot wait for it to
announce the table, because it may be gone for good. Before its share is given to others, it must be
shut down, or its leader must have read the table.

A process that starts waits until the leader of its region has read the notes of the others
(`RegionSync.wait`). So a region that was removed while it was away does not use its old share when
it returns. A store that has lost its shares but not its notes goes on with the shares in the note,
unless there is another table. Subjects that it has lost start as if the limit was used up.

A region whose store is empty has no share to start with, and gets one like a region that is added.
Only the very first start is different. The leader writes its note without shares, then reads the
notes of the others again, and takes its share if each has the same table or no note. Of two regions
that start at once, at least one reads the note of the other. If their settings have different
shares, it starts like a region that is added. If another region cannot be reached then, the store
may as well have lost its data: the region takes its share, and all subjects start as if the limit
was used up.

Each leader also notes the id of its own store, and of each store that it reaches under the name of
another region. So the leaders detect a region whose nodes use another store than the others expect,
and a store that has lost its data.

`Membership` is pure. The leader of a region (`exchange.py`) and the simulator drive it once a
second: `hear` the notes of each other region, `plan`, `set_shares`, `note`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from fractions import Fraction
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.decide.regional import LAYOUT, REGIONS_MAX, Shares
from ratekeeper.regions.settings import REGION_NAME, SHARE_PARTS_MAX, share_of

# The names of the notes: the leader's note of its region, and the table that an operator has set.
REGION_NOTE: Final = "region"
TABLE_NOTE: Final = "table"
NOTE_CHARS_MAX: Final = 16_384
# `Shares.before` is the lowest share in this time: longer than the window of a month.
BEFORE_NS: Final = 32 * 86_400 * NS_PER_SECOND
# An epoch is a version and a digest. It fits into the numbers of a Redis script: below 2**53.
VERSION_MAX: Final = 2**20
# The errors of fields that are missing or invalid.
NOTE_ERRORS: Final = (
    *(KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError),
)
_SHARE: Final = re.compile(r"\d{1,9}(/\d{1,9}|\.\d{1,9})?", re.ASCII)
_DIGEST_BITS: Final = 32
EPOCH_MAX: Final = (VERSION_MAX + 1 << _DIGEST_BITS) - 1


class ShareTable(NamedTuple):
    """Which regions share the limits, and the share of each."""

    version: int
    shares: tuple[tuple[str, Fraction], ...]
    """Sorted by region."""

    @property
    def epoch(self) -> int:
        """The version and a digest: different tables of one version are different epochs."""
        text = json.dumps([[region, str(share)] for region, share in self.shares])
        digest = blake2b(text.encode(), digest_size=_DIGEST_BITS // 8).digest()
        return self.version << _DIGEST_BITS | int.from_bytes(digest)

    @property
    def regions(self) -> tuple[str, ...]:
        """The names of the regions that have a share."""
        return tuple(region for region, _ in self.shares)

    def share(self, region: str) -> Fraction:
        """Return the share of a region; 0 if it is not in the table."""
        return dict(self.shares).get(region, Fraction(0))

    def text(self) -> str:
        """Return the table as a note."""
        return json.dumps(self.fields())

    def fields(self) -> dict[str, Any]:
        """Return the fields of the note."""
        return {
            "version": self.version,
            "shares": {region: str(share) for region, share in self.shares},
        }


def share_table(version: int, shares: Mapping[str, float | Fraction]) -> ShareTable:
    """Return a table. Raises ConfigError for wrong names, or shares that do not add up to 1.

    >>> share_table(1, {"us": 0.6, "eu": 0.4}).share("eu")
    Fraction(2, 5)
    """
    if not 1 <= len(shares) <= REGIONS_MAX:
        raise ConfigError(f"the table has {len(shares)} regions; 1 to {REGIONS_MAX} are possible")
    for region in shares:
        if REGION_NAME.fullmatch(region) is None:
            raise ConfigError(
                f"{show(region)} is not the name of a region, such as eu or us-east-1"
            )
    found = {region: share_of(region, share) for region, share in sorted(shares.items())}
    total = sum(found.values())
    if total != 1:
        raise ConfigError(
            f"the shares {', '.join(f'{name}={share}' for name, share in found.items())} add up to "
            f"{total}, and not to 1"
        )
    if not 1 <= version <= VERSION_MAX:
        raise ConfigError(f"the version of a table is 1 to {VERSION_MAX}, and not {version}")
    return ShareTable(version, tuple(found.items()))


def shares_with(
    shares: Mapping[str, Fraction], region: str, share: Fraction | None
) -> dict[str, Fraction]:
    """Return the shares after a region is added: the others fall in proportion.

    Without a share, the region gets as much as a region has on average. Raises ConfigError if it
    is there already.

    >>> shares_with({"eu": Fraction(1, 2), "us": Fraction(1, 2)}, "ap", Fraction(1, 5))["eu"]
    Fraction(2, 5)
    """
    if region in shares:
        raise ConfigError(
            f"the region {region} has the share {shares[region]} already; "
            f"`ratekeeper regions set` changes the shares"
        )
    found = Fraction(1, len(shares) + 1) if share is None else share_of(region, share)
    if found == 1:
        raise ConfigError(f"the share of {region} is 1, which leaves nothing for other regions")
    return _fitted({name: each * (1 - found) for name, each in shares.items()} | {region: found})


def shares_without(shares: Mapping[str, Fraction], region: str) -> dict[str, Fraction]:
    """Return the shares after a region is removed: the others rise in proportion.

    Raises ConfigError if the region is not there, or is the only one.

    >>> shares_without({"eu": Fraction(2, 5), "us": Fraction(2, 5), "ap": Fraction(1, 5)}, "ap")
    {'eu': Fraction(1, 2), 'us': Fraction(1, 2)}
    """
    if region not in shares:
        raise ConfigError(
            f"{show(region)} has no share; the regions with a share are {', '.join(sorted(shares))}"
        )
    if len(shares) == 1:
        raise ConfigError(f"{region} is the only region with a share; it cannot be removed")
    left = 1 - shares[region]
    return _fitted({name: each / left for name, each in shares.items() if name != region})


def _fitted(shares: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """Return shares whose denominators are allowed, with the same sum of 1."""
    if all(each.denominator <= SHARE_PARTS_MAX for each in shares.values()):
        return dict(shares)
    parts = {name: max(int(each * SHARE_PARTS_MAX), 1) for name, each in shares.items()}
    largest = max(parts, key=lambda name: parts[name])
    parts[largest] += SHARE_PARTS_MAX - sum(parts.values())
    return {name: Fraction(each, SHARE_PARTS_MAX) for name, each in parts.items()}


class RegionNote(NamedTuple):
    """The note that the leader of a region writes to its store."""

    region: str
    layout: int
    store: str
    """The id of the store: random, written when the region starts with an empty store."""
    table: ShareTable
    announced: Mapping[str, int]
    """The epoch that each region has announced last, this one included."""
    met: Mapping[str, str]
    """The id of the store that the leader found under the name of each other region."""
    shares: Shares | None
    """The shares that were set last: the region continues with them if the store has lost its
    own."""
    starts: bool = False
    """True: this is the first start of the region, and it has not taken its share yet."""
    differed: bool = False
    """True: regions had different tables, so one may have used a share that another has now."""

    def text(self) -> str:
        """Return the note."""
        shares = None
        if self.shares is not None:
            epoch, share, before, changed_ns, _ = self.shares
            shares = [epoch, str(share), str(before), changed_ns]
        fields = {**self._asdict(), "table": self.table.fields(), "shares": shares}
        return json.dumps(fields)


def parse_table(text: str) -> ShareTable:
    """Return the table of a note. Raises ConfigError if the text is not a table."""
    return _table_of(note_fields(text))


def parse_region(text: str) -> RegionNote:
    """Return the note of a leader. Raises ConfigError if it is invalid."""
    fields = note_fields(text)
    try:
        note = RegionNote(
            str(fields["region"]),
            int(fields["layout"]),
            str(fields["store"]),
            _table_of(fields["table"]),
            _announced_of(fields["announced"]),
            {str(name): str(store) for name, store in fields["met"].items()},
            _shares_of(fields["shares"]),
            fields.get("starts") is True,
            fields.get("differed") is True,
        )
    except NOTE_ERRORS as error:
        raise ConfigError(f"the note of a region cannot be read: {show(text)}: {error}") from None
    return note


def _announced_of(fields: Any) -> dict[str, int]:
    """Return the epochs that regions have announced, without impossible ones.

    Leaders keep the highest epoch and pass it on: a wrong one would stay for good.
    """
    found = {str(name): int(epoch) for name, epoch in fields.items()}
    return {name: epoch for name, epoch in found.items() if 0 <= epoch <= EPOCH_MAX}


def _shares_of(fields: Any) -> Shares | None:
    if fields is None:
        return None
    epoch, share, before, changed_ns = fields
    found = Shares(int(epoch), parse_share(share), parse_share(before), int(changed_ns), ())
    if not 0 <= found.before <= found.share <= 1:
        raise ValueError(f"{show(fields)} are not the shares of a region")
    return found


def _table_of(fields: Any) -> ShareTable:
    try:
        shares = {str(name): parse_share(share) for name, share in fields["shares"].items()}
        return share_table(int(fields["version"]), shares)
    except NOTE_ERRORS as error:
        raise ConfigError(f"this is not a table of shares: {show(fields)}: {error}") from None


def parse_share(text: object) -> Fraction:
    """Return a share in a note, such as 2/5. Raises ValueError.

    A fraction of any other text could have a billion digits: 1e999999999.
    """
    if _SHARE.fullmatch(str(text)) is None:
        raise ValueError(f"{show(text)} is not a share, such as 2/5")
    return Fraction(str(text))


def note_fields(text: str) -> Any:
    """Return the JSON of a note. Raises ConfigError if it is not JSON, or too long."""
    if len(text) > NOTE_CHARS_MAX:
        raise ConfigError(f"a note has {len(text):,} characters; {NOTE_CHARS_MAX:,} are the most")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"a note cannot be read: {show(text)}: {error}") from None


def next_shares(
    region: str,
    table: ShareTable,
    shares: Shares | None,
    announced: Mapping[str, int],
    now_ns: int,
    live: tuple[str, ...],
    *,
    first: bool = False,
) -> Shares:
    """Return the shares that a region uses next: down at once, up when all others have announced.

    `shares` are the shares in use, None if the store has none. `first` is the very first start of
    the region, whose share no other region has ever had.
    """
    target = table.share(region)
    if shares is None:
        if first:
            return Shares(table.epoch, target, target, now_ns, live)
        shares = Shares(0, Fraction(0), Fraction(0), now_ns, live)
    share = min(shares.share, target)
    is_recent = now_ns - shares.changed_ns <= BEFORE_NS
    before = min(shares.before, share) if is_recent else share
    others = [each for each in table.regions if each != region]
    # Wait for the same epoch, not a later one: a region that has skipped this table may have a
    # higher share.
    if share < target and all(announced.get(each) == table.epoch for each in others):
        return Shares(table.epoch, target, before, now_ns, live)
    return Shares(table.epoch, share, before, shares.changed_ns, live)


class Heard(NamedTuple):
    """The result of reading the notes of another region's store."""

    usable: bool
    """True if totals can be exchanged."""
    problem: str
    """What is wrong and what to do; empty if nothing is."""


class Plan(NamedTuple):
    """The next actions of a leader: set the shares, then write the note."""

    shares: Shares | None
    """None: the region waits, or must not work."""
    note: str
    problem: str
    """What is wrong and what to do; empty if nothing is."""
    leads: bool = True
    """False: this process must not lead here, and gives up the lead."""


class Membership:
    """The leader's knowledge of the table and of the other regions. Does no I/O."""

    def __init__(
        self,
        region: str,
        first: ShareTable,
        peers: Collection[str],
        new_id: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        """`first` is the table of the settings; `peers` are the other regions that have a store."""
        self._region = region
        self._first = first
        self._noted: ShareTable | None = None
        self._peers = frozenset(peers)
        self._untried = set(peers)
        self._unheard = set(peers)
        self._begins = False
        self._round = 0
        self._asked: dict[str, int] = {}
        self._differs = ""
        self._new_id = new_id
        self._announced: dict[str, int] = {}
        self._met: dict[str, str] = {}
        self._met_us: dict[str, str] = {}
        self._store = ""

    @property
    def table(self) -> ShareTable:
        """The table in use: that of the settings until a store has another one."""
        return self._noted or self._first

    def asks(self, peer: str) -> None:
        """Note that the leader begins to read the notes of another region's store."""
        self._asked[peer] = self._round

    def hear(self, peer: str, notes: Mapping[str, str]) -> Heard:
        """Handle the notes of another region's store."""
        if peer in self._untried:  # a region that did not answer at first may have been cut off
            self._unheard.discard(peer)
        self._tried(peer)
        text = notes.get(REGION_NOTE)
        if text is None:
            return Heard(False, f"the region {peer} has not started yet: it has no leader so far")
        try:
            note = parse_region(text)
        except ConfigError as error:
            self._differs = peer
            return Heard(False, str(error))
        if note.differed or note.table.epoch != self.table.epoch:
            self._differs = peer
        if note.region != peer:
            return Heard(
                False,
                f"the store that is set up for {peer} is that of the region {show(note.region)}; "
                f"correct the table of regions",
            )
        if note.layout != LAYOUT:
            return Heard(
                False,
                f"the region {peer} has version {note.layout} of the states, and this one has "
                f"{LAYOUT}; use the same release in all regions",
            )
        self._adopt(notes, note)
        self._announced = _highest(self._announced, note.announced)
        self._met[peer] = note.store
        met = note.met.get(self._region)
        if met is None:
            self._met_us.pop(peer, None)
        else:
            self._met_us[peer] = met
        return self._compared(peer, note)

    def _compared(self, peer: str, note: RegionNote) -> Heard:
        met = self._met_us.get(peer)
        if met is not None and self._store and met != self._store:
            return Heard(
                False,
                f"{peer} knows another store of the region {self._region}: two sets of nodes with "
                f"this name use different stores, or the store was replaced and {peer} cannot "
                f"reach the new one; compare the tables of regions",
            )
        if self._region not in self.table.regions or peer not in self.table.regions:
            gone = peer if self._region in self.table.regions else self._region
            return Heard(
                peer in self.table.regions,
                f"the region {gone} has no share; `ratekeeper regions add {gone}` gives it one",
            )
        if note.table.epoch != self.table.epoch:
            return Heard(True, f"{peer} has not adopted the table of version {self.table.version}")
        return Heard(True, "")

    @property
    def has_asked_all(self) -> bool:
        """True if each other region has answered, or could not be reached."""
        return not self._untried and not self._begins

    def missed(self, peer: str) -> None:
        """Note that another region's store could not be read."""
        if peer in self._untried:
            self._unheard.add(peer)
        self._tried(peer)

    def _tried(self, peer: str) -> None:
        # An answer to a call that began before the own note was written does not count.
        if self._asked.get(peer, self._round) == self._round:
            self._untried.discard(peer)

    def plan(
        self,
        notes: Mapping[str, str],
        shares: Shares | None,
        now_ns: int,
        live: Collection[str],
    ) -> Plan:
        """Return the next actions, from the notes and shares of the own store and the notes heard.

        `now_ns` is the time of the own store.
        """
        own, problem = self._own_note(notes)
        if problem:
            return Plan(None, "", problem, leads=False)
        self._adopt(notes, own)
        self._announced = _highest(self._announced, {} if own is None else own.announced)
        self._store = "" if own is None else own.store
        if own is not None and own.differed:
            self._differs = self._differs or "another region"
        table = self.table
        if shares is None:
            self._ask_again(own)
            problem = self._cannot_start()
            if problem:
                # The others read the id of this store, and confirm that it is the store they reach.
                note = "" if self._untried else self._note(self._announced, own and own.shares)
                return Plan(None, note, problem)
            # Another table may have been in use meanwhile, and may have given this share to others.
            if own is not None and own.shares is not None and own.shares.epoch == table.epoch:
                # The counts may be lost with the shares: a part of a cluster was replaced.
                shares = own.shares._replace(before=Fraction(0), changed_ns=now_ns)
        announced = {**self._announced, self._region: table.epoch}
        is_first = shares is None and self._is_first(own)
        if is_first and own is None and self._unheard != self._peers:
            self._begins = True
            note = self._note(announced, None, starts=True)
            return Plan(None, note, "starts for the first time: asks the other regions again")
        chosen = tuple(sorted(each for each in live if each in table.regions))
        found = next_shares(
            self._region, table, shares, self._announced, now_ns, chosen, first=is_first
        )
        if is_first and self._unheard:
            # This store may have lost its data: the region that would know it cannot be reached.
            found = found._replace(before=Fraction(0))
        return Plan(found, self._note(announced, found), self._warning(found))

    def _is_first(self, own: RegionNote | None) -> bool:
        """Return True if no region has another table, or knows another store of this region."""
        is_new = own is None or own.starts
        is_same = self.table.version == 1 and not self._differs
        return is_new and is_same and all(met == self._store for met in self._met_us.values())

    def _ask_again(self, own: RegionNote | None) -> None:
        """When the note of a first start is written, ask regions again that have answered."""
        if self._begins and own is not None:
            self._round += 1
            self._untried = set(self._peers - self._unheard)
        self._begins = False

    def _note(
        self, announced: Mapping[str, int], shares: Shares | None, *, starts: bool = False
    ) -> str:
        self._store = self._store or self._new_id()
        met = dict(self._met)
        return RegionNote(
            *(self._region, LAYOUT, self._store, self.table, announced, met, shares, starts),
            differed=bool(self._differs),
        ).text()

    def _own_note(self, notes: Mapping[str, str]) -> tuple[RegionNote | None, str]:
        """Return the note in the own store, and why this region must not work with it."""
        try:
            own = parse_region(notes[REGION_NOTE]) if REGION_NOTE in notes else None
        except ConfigError:
            own = None  # it is written again
        if own is not None and own.region != self._region:
            return None, (
                f"this node is in the region {self._region}, and its store is that of the region "
                f"{show(own.region)}; correct the region or the table of regions"
            )
        if own is not None and own.layout > LAYOUT:
            return None, f"the store has version {own.layout} of the states; use a later release"
        return own, ""

    def _cannot_start(self) -> str:
        """Return why a region without shares must wait."""
        if self._untried:
            return f"waits for the answer of {', '.join(sorted(self._untried))}"
        if self._met_us and self._store not in self._met_us.values():
            return (
                f"the other regions know another store of the region {self._region}. If it was "
                f"replaced or has lost its data, the region starts when another region has found "
                f"it; otherwise correct the table of regions"
            )
        return ""

    def _warning(self, shares: Shares) -> str:
        if self._region not in self.table.regions:
            return f"this region has no share; `ratekeeper regions add {self._region}` gives it one"
        if self.table.version == 1 and self.table != self._first:
            return (
                "the settings have other shares than another region's; the same are in use "
                f"everywhere now, this region's is {self.table.share(self._region)}"
            )
        if self._differs and not shares.share and self.table.version == 1:
            return (
                f"the settings of {self._differs} have other shares than those of this region, "
                f"which takes its share when all regions have the same; correct the settings"
            )
        return ""

    def _adopt(self, notes: Mapping[str, str], note: RegionNote | None) -> None:
        """Use the table with the highest epoch."""
        found = _newest([self._noted, note and note.table, _wanted(notes)])
        self._noted = found or self._noted


def newest_table(notes: Mapping[str, str]) -> ShareTable | None:
    """Return the table with the highest epoch in the notes of a store; None if there is none."""
    table = None
    with suppress(ConfigError):
        table = parse_region(notes[REGION_NOTE]).table if REGION_NOTE in notes else None
    return _newest([table, _wanted(notes)])


def _wanted(notes: Mapping[str, str]) -> ShareTable | None:
    """Return the table that a command has written."""
    with suppress(ConfigError):  # a command of another release may have written it
        return parse_table(notes[TABLE_NOTE]) if TABLE_NOTE in notes else None
    return None


def _newest(tables: Iterable[ShareTable | None]) -> ShareTable | None:
    found = [table for table in tables if table is not None]
    return max(found, key=lambda table: table.epoch, default=None)


def _highest(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return the highest epoch of each region, for as many regions as can be in use."""
    found = {name: max(one.get(name, 0), other.get(name, 0)) for name in {*one, *other}}
    return dict(sorted(found.items(), key=lambda each: -each[1])[: 2 * REGIONS_MAX])
