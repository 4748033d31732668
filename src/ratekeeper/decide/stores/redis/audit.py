"""Audit the keys in Redis: read every key of ours on every primary, and report defects.

Scripts write a hash and its expiry in one step, so there should be no defects. But servers are
restored from old backups, other programs write under the same prefix, and versions change. A key
without an expiry stays forever, and a key that no script can read fails every check of its subject.

**Reading.** `audit` walks the keys with SCAN and reads LOOK_KEYS at a time, with a pause in
between. It requests type, expiry and fields in two or three round trips for the whole batch, each
of which keeps a server busy for less than a millisecond. So a check waits at most that long. A key
that was changed, moved or dropped meanwhile is not a defect. Before a key is reported as
unreadable, it is read a second time. `read_subject` decodes a hash without trusting its contents: a
field that this version did not write is reported, with the fields that belong to it, and never
raises an error.

**Replicas.** `compare_replicas` compares a sample of keys with each replica, field by field. A
replica lags behind its primary, so a difference is at first only suspicious. A suspicious key is
read again in an order that leaves no doubt: the key on the primary; the primary's replication
offset; the key on the replica, once it has reached that offset; and the key on the primary again.
If both reads of the primary agree and the replica differs, the two have drifted. A key that changed
in between proves nothing and is counted as unsettled.

**Repairing** is a separate step. Each repair is a script that looks again, and changes nothing if
the key is no longer as it was found. Repairs only touch keys named `<prefix>:{…}`.
"""

from __future__ import annotations

import random
import re
import struct
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from redis.exceptions import NoPermissionError, ResponseError

from ratekeeper.decide.stores.redis.codec import (
    FIELD_BYTES,
    TIME_BYTES,
    is_bucket,
    is_log_id,
    is_logs,
    is_regional_state,
    regional_type,
)
from ratekeeper.decide.stores.redis.config import Address
from ratekeeper.decide.stores.redis.topology import (
    REDIS_PY_ERRORS,
    Topology,
    pipelined,
    store_error,
    store_errors,
)

PAGE_KEYS: Final = 500
LOOK_KEYS: Final = 100
PAUSE_SECONDS: Final = 0.002
# Of a hash with more fields, only the names and the rules' own fields are read.
FIELDS_READ_MAX: Final = 128
FIELDS_NAMED_MAX: Final = 20_000
DEFECTS_MAX: Final = 10_000
SAMPLE_MAX: Final = 200
# Keys seen so far, by their hashes: SCAN may return a key twice.
SEEN_MAX: Final = 2_000_000
TTL_SLACK_MS: Final = 3_600_000
EXPIRY_MS_MIN: Final = 60_000
# For the state of a global limit that has none: its windows are not known here.
REGIONAL_EXPIRY_MS: Final = 86_400_000

_PERMISSIONS: Final = (
    "; an audit needs +scan +type +pttl +hlen +hgetall +hkeys +hmget +time +info, "
    "and repairs need +eval +pexpire +hget +hdel +del"
)

DefectKind = Literal["no expiry", "long expiry", "wrong type", "unreadable", "not ours"]

# Set an expiry on a key that has none.
_EXPIRE: Final = b"""
if redis.call('PTTL', KEYS[1]) ~= -1 then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""
# Remove fields if the rule's own field is unchanged; ARGV[2] is '1' if that field exists.
_REMOVE_FIELDS: Final = b"""
local now = redis.call('HGET', KEYS[1], ARGV[1])
if (ARGV[2] == '1') ~= (now ~= false) or (now and now ~= ARGV[3]) then return 0 end
local removed = 0
for i = 4, #ARGV do removed = removed + redis.call('HDEL', KEYS[1], ARGV[i]) end
return removed
"""
_REMOVE_KEY: Final = b"""
if redis.call('TYPE', KEYS[1]).ok ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


# ── A bucket, or the logs of a subject
# ────────────────────────────────────────────────────────────────────────────────

PIECE_BYTES: Final = 64
CHUNK_TIMES_MAX: Final = 512
# A rule has a handful of limits; another program wrote anything longer than this.
NUMBERS_MAX: Final = 4_096
# Enough for a log of a million times in chunks of 512.
CHUNKS_MAX: Final = 4_096
_FIRST: Final = 2  # the first limit's place, after base and ttl
_CHUNK_MARK, _PIECE_MARK = 1, 2
_END_BYTES: Final = 4

_PIECE_NAME: Final = re.compile(rb"\x02([1-9][0-9]{0,5}):(.+)", re.DOTALL)
_CHUNK_NAME: Final = re.compile(rb"\x01([0-9]{1,11})\.([0-9]{1,16}):(.+)", re.DOTALL)


_HOLD: Final = 2**33


class StoredState(NamedTuple):
    """The numbers of one limit. A negative id marks units granted on top of it, or leased of it."""

    id: int
    lag_us: float
    a: float
    b: float

    @property
    def has_end(self) -> bool:
        """True for a grant or a hold: `a` is the units, `b` their end in microseconds."""
        return self.id < 0

    @property
    def limit_id(self) -> int:
        """The id of the limit. See state.lua for those of its grant and its holds."""
        return abs(self.id) % _HOLD


@dataclass(frozen=True, slots=True)
class StoredRule:
    """One rule's states of one subject."""

    base_us: float
    ttl_ms: float
    states: tuple[StoredState, ...]

    @property
    def needed_until_us(self) -> float:
        """The time in microseconds until which the hash must exist for these states."""
        ends = [state.b for state in self.states if state.has_end]
        return max([self.base_us + self.ttl_ms * 1_000, *ends])


@dataclass(frozen=True, slots=True)
class UnreadableField:
    """A field that no script of this version can read, or that belongs to no state."""

    field: bytes
    """The rule's field. A repair first verifies that it has not changed."""
    value: bytes | None
    """Its value; None if the field does not exist."""
    why: str
    fields: tuple[bytes, ...]
    """The fields to remove: the field itself and its parts."""


@dataclass(frozen=True, slots=True)
class StoredSubject:
    """The contents of one hash, by rule's field."""

    rules: Mapping[bytes, StoredRule] = field(default_factory=dict)
    unreadable: tuple[UnreadableField, ...] = ()

    @property
    def states(self) -> int:
        """Number of states. A grant counts as part of its limit's state."""
        return sum(len({state.limit_id for state in held.states}) for held in self.rules.values())


def is_part(name: bytes, *, in_bucket: bool = False) -> bool:
    """Return True for a field that belongs to another: a chunk of a log, or a piece."""
    return len(name) > FIELD_BYTES if in_bucket else name[:1] in {b"\x01", b"\x02"}


def read_subject(
    values: Mapping[bytes, bytes],
    names: Container[bytes] | None = None,
    *,
    in_bucket: bool = False,
) -> StoredSubject:
    """Return the contents of a bucket, or of a subject's hash of logs.

    `names` has the names of all its fields if `values` omits chunks of logs.
    """
    rules: dict[bytes, StoredRule] = {}
    wrong: list[UnreadableField] = []
    parts: dict[bytes, list[bytes]] = {}
    for name in values:
        if is_part(name, in_bucket=in_bucket):
            parts.setdefault(_owner(name), []).append(name)
    present = values if names is None else names
    for name, raw in values.items():
        if is_part(name, in_bucket=in_bucket):
            continue
        mine = parts.pop(name, [])
        try:
            held, used = _read_rule(name, raw, values, in_bucket=in_bucket)
            if not in_bucket:
                used |= _check_log_chunks(name, held, values, present)
        except ValueError as error:
            wrong.append(UnreadableField(name, raw, str(error), (name, *mine)))
            continue
        rules[name] = held
        # A script may leave an empty chunk until it drops the next one.
        if left := tuple(each for each in mine if each not in used and each[0] == _PIECE_MARK):
            wrong.append(UnreadableField(name, raw, "pieces that belong to no state", left))
    for owner, ownerless in parts.items():
        # A part whose name does not tell its owner is reported under its own name.
        why = "parts of a rule's states, without the rule's own field"
        wrong.append(UnreadableField(owner, values.get(owner), why, tuple(ownerless)))
    return StoredSubject(rules, tuple(wrong))


def _owner(name: bytes) -> bytes:
    found = (_CHUNK_NAME if name[0] == _CHUNK_MARK else _PIECE_NAME).fullmatch(name)
    return name if found is None else found[found.re.groups]


def _read_rule(
    name: bytes, raw: bytes, values: Mapping[bytes, bytes], *, in_bucket: bool
) -> tuple[StoredRule, set[bytes]]:
    """Return a rule's states and the names of their pieces. Raises ValueError."""
    used: set[bytes] = set()
    while len(raw) == (len(used) + 1) * PIECE_BYTES:
        piece = b"\x02%d:%b" % (len(used) + 1, name)
        if piece not in values:
            break
        raw += values[piece]
        used.add(piece)
    return _stored_rule(list((_bucket_numbers if in_bucket else _numbers)(raw))), used


def _stored_rule(numbers: list[float]) -> StoredRule:
    if len(numbers) <= _FIRST:
        raise ValueError("it contains no state")
    states: list[StoredState] = []
    place = _FIRST
    while place < len(numbers):
        if not numbers[place].is_integer() or numbers[place] == 0:
            raise ValueError("the number of a limit is invalid")
        number = int(numbers[place])
        width = 4 if number < 0 or number % 2 else 3
        found = numbers[place + 1 : place + width]
        if len(found) != width - 1:
            raise ValueError("it ends in the middle of a state")
        states.append(StoredState(number, *found, *([0.0] if width == 3 else [])))
        place += width
    if numbers[0] < 0:
        raise ValueError("its time is before 1970")
    return StoredRule(numbers[0], numbers[1], tuple(states))


def _check_log_chunks(
    name: bytes,
    held: StoredRule,
    values: Mapping[bytes, bytes],
    present: Container[bytes],
) -> set[bytes]:
    """Return the chunks of the logs. Raises ValueError if one is missing or cut off."""
    used: set[bytes] = set()
    for state in held.states:
        per_chunk = int(state.b) % 1_024
        kept = int(state.b) // 1_024
        if state.has_end or not is_log_id(state.id) or not 0 < per_chunk <= CHUNK_TIMES_MAX:
            continue
        first, last = int(state.a) // per_chunk, (int(state.a) + kept - 1) // per_chunk
        if not 0 <= last - first < CHUNKS_MAX or not kept:
            continue
        chunks = [b"\x01%d.%d:%b" % (state.id, number, name) for number in range(first, last + 1)]
        if not all(chunk in present for chunk in chunks):
            raise ValueError("a part of a log's times is missing")
        for chunk in chunks:
            if len(values.get(chunk, b"")) % TIME_BYTES:
                raise ValueError("a log's times are cut off")
        used.update(chunks)
    return used


# Msgpack, as far as Redis writes it here: one array of numbers.

_SIZES: Final[Mapping[int, str]] = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_HEADS: Final = {0xDC: ">H", 0xDD: ">I"}


def _numbers(raw: bytes) -> Iterator[float]:
    """Yield the numbers of a msgpack array. Raises ValueError."""
    if not raw:
        raise ValueError("it is empty")
    count, place = _length(raw)
    if count > NUMBERS_MAX:
        raise ValueError(f"it has {count:,} numbers")
    for _ in range(count):
        number, place = _number(raw, place)
        yield float(number)
    if place != len(raw):
        raise ValueError("bytes follow the states")


def _bucket_numbers(raw: bytes) -> Iterator[float]:
    """Yield the numbers of a state in a bucket. Raises ValueError."""
    place = TIME_BYTES + _END_BYTES
    if len(raw) < place:
        raise ValueError("it ends too early")
    base_us = int.from_bytes(raw[:TIME_BYTES])
    yield float(base_us)
    yield int.from_bytes(raw[TIME_BYTES:place]) * 1_000 - base_us / 1_000
    while place < len(raw):
        number, place = _number(raw, place)
        yield float(number)


def _length(raw: bytes) -> tuple[int, int]:
    mark = raw[0]
    if mark & 0xF0 == 0x90:
        return mark & 0x0F, 1
    if mark not in _HEADS:
        raise ValueError("it is not an array")
    count, place = _unpacked(_HEADS[mark], raw, 1)
    return int(count), place


def _number(raw: bytes, place: int) -> tuple[float, int]:
    if place >= len(raw):
        raise ValueError("it ends too early")
    mark = raw[place]
    if mark < 0x80:
        return mark, place + 1
    if mark >= 0xE0:
        return mark - 256, place + 1
    if mark not in _SIZES:
        raise ValueError("something in it is no number")
    return _unpacked(_SIZES[mark], raw, place + 1)


def _unpacked(form: str, raw: bytes, place: int) -> tuple[float, int]:
    try:
        (number,) = struct.unpack_from(form, raw, place)
    except struct.error:
        raise ValueError("it ends too early") from None
    if number != number or abs(number) == float("inf"):  # noqa: PLR0124 - that is how NaN is known
        raise ValueError("something in it is no number")
    return number, place + struct.calcsize(form)


# ── All keys of a primary
# ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class KeyDefect:
    """A defect of one key, or of some of its fields."""

    kind: DefectKind
    node: str
    key: bytes
    why: str
    type: str = "hash"
    needed_ms: int = 0
    """For a key without expiry: how long its states need it; 0 if unknown."""
    unreadable: UnreadableField | None = None


@dataclass(slots=True)
class AuditedServer:
    """The keys of one primary."""

    address: Address
    keys: int = 0
    states: int = 0
    memory_bytes: int = 0
    weighed: int = 0
    """Keys whose size the server returned."""
    complete: bool = True
    """True if the audit read every key."""
    keys_in_all: int | None = None
    """Keys of any prefix in its database."""
    counts: Counter[DefectKind] = field(default_factory=Counter)
    defects: list[KeyDefect] = field(default_factory=list)
    """The first DEFECTS_MAX; `counts` counts all."""
    sample: list[bytes] = field(default_factory=list)
    """A uniform random sample of the keys."""


@dataclass(frozen=True, slots=True)
class AuditPace:
    """How fast the audit reads, and the known limits."""

    keys_max: int = 0
    """Number of keys to read on each primary; 0: all."""
    pause_seconds: float = PAUSE_SECONDS
    ttl_ms_max: int | None = None
    """The longest expiry that a current limit needs; None if the limits are unknown."""
    sleep: Callable[[float], None] = time.sleep


def audit(topology: Topology, prefix: str, pace: AuditPace) -> list[AuditedServer]:
    """Read every key of ours on every primary.

    Raises StoreUnavailable or StoreTimeout if a primary does not answer or denies permission.
    """
    # The primaries may have changed since the last refresh.
    topology.primaries()
    topology.refresh()
    return [_ServerAudit(topology, each, prefix, pace).run() for each in topology.primaries()]


class _ServerAudit:
    """The audit of one primary."""

    def __init__(self, topology: Topology, address: Address, prefix: str, pace: AuditPace) -> None:
        self._client: Any = topology.client(address)
        self._found = AuditedServer(address)
        self._head = prefix.encode() + b":{"
        self._pace = pace
        self._seen: set[int] = set()
        self._random = random.Random()  # noqa: S311 - it chooses samples, not secrets

    def run(self) -> AuditedServer:
        with store_errors(self._found.address, _PERMISSIONS):
            size = pipelined(self._client, [("DBSIZE",)])[0]
            self._found.keys_in_all = size if isinstance(size, int) else None
            for page in self._pages():
                self._inspect(page)
        return self._found

    def _pages(self) -> Iterator[list[bytes]]:
        """Yield keys in batches of LOOK_KEYS, with a pause after each batch and each SCAN."""
        cursor, first = 0, True
        while first or cursor:
            first = False
            how = ("MATCH", self._head + b"*", "COUNT", PAGE_KEYS)
            cursor, found = self._client.execute_command("SCAN", cursor, *how)
            page = self._unseen(found)
            if self._pace.keys_max:
                room = self._pace.keys_max - self._found.keys
                if len(page) > room or (len(page) == room and cursor):
                    self._found.complete = False
                    page, cursor = page[:room], 0
            for start in range(0, max(len(page), 1), LOOK_KEYS):
                yield page[start : start + LOOK_KEYS]
                self._pace.sleep(self._pace.pause_seconds)

    def _unseen(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys that were not seen before."""
        page = []
        for key in dict.fromkeys(keys):
            if (number := hash(key)) not in self._seen:
                if len(self._seen) < SEEN_MAX:
                    self._seen.add(number)
                page.append(key)
        return page

    def _inspect(self, page: Sequence[bytes]) -> None:
        """Read types and expiries first, then the fields."""
        if not page:
            return
        words = ("TYPE", "PTTL", "HLEN", "MEMORY USAGE")
        commands = [(word, key) for key in page for word in words]
        replies = pipelined(self._client, [("TIME",), *commands])
        now_us = _time_us(replies[0])
        hashes: list[tuple[bytes, int]] = []
        sizes: dict[bytes, int] = {}
        for place, key in enumerate(page):
            kind, ttl_ms, fields, weight = replies[1 + 4 * place : 5 + 4 * place]
            _raise_forbidden(kind, ttl_ms)
            if not isinstance(kind, bytes) or not isinstance(ttl_ms, int) or kind == b"none":
                continue  # the key has expired, or moved to another node
            self._count(key, weight)
            if (wanted := regional_type(key)) is not None:
                self._judge_regional(key, kind, wanted, ttl_ms)
            elif not is_bucket(key) and not is_logs(key):
                self._note(
                    KeyDefect(
                        "not ours", self._node, key, "its name does not have the form of our keys"
                    )
                )
            elif kind != b"hash":
                text = kind.decode(errors="replace")
                self._note(KeyDefect("wrong type", self._node, key, f"it is a {text}", type=text))
            elif isinstance(fields, int):
                hashes.append((key, ttl_ms))
                sizes[key] = fields
        reads = self._read_all([key for key, _ in hashes], sizes)
        for key, ttl_ms in hashes:
            self._judge(key, ttl_ms, reads[key], now_us)

    def _judge_regional(self, key: bytes, kind: bytes, wanted: bytes, ttl_ms: int) -> None:
        """Look at a key of global limits. Its value is not read: a check reports what it cannot."""
        if not wanted:
            why = "its name does not have the form of our keys"
            self._note(KeyDefect("not ours", self._node, key, why))
        elif kind != wanted:
            text = kind.decode(errors="replace")
            self._note(KeyDefect("wrong type", self._node, key, f"it is a {text}", type=text))
        elif is_regional_state(key):
            self._found.states += 1
            if ttl_ms == -1:
                lasts_ms = max(self._pace.ttl_ms_max or 0, REGIONAL_EXPIRY_MS)
                why = "it never expires"
                self._note(KeyDefect("no expiry", self._node, key, why, needed_ms=round(lasts_ms)))

    @property
    def _node(self) -> str:
        return str(self._found.address)

    def _count(self, key: bytes, weight: object) -> None:
        found = self._found
        found.keys += 1
        if isinstance(weight, int):
            found.memory_bytes += weight
            found.weighed += 1
        # Reservoir sampling: the place of the nth key is taken with probability SAMPLE_MAX / n.
        if len(found.sample) < SAMPLE_MAX:
            found.sample.append(key)
        elif (place := self._random.randrange(found.keys)) < SAMPLE_MAX:
            found.sample[place] = key

    def _note(self, defect: KeyDefect) -> None:
        self._found.counts[defect.kind] += 1
        if len(self._found.defects) < DEFECTS_MAX:
            self._found.defects.append(defect)

    # The contents of hashes.

    def _read_all(
        self, keys: Sequence[bytes], sizes: dict[bytes, int]
    ) -> dict[bytes, StoredSubject]:
        found = self._read(keys, sizes)
        # Read them again: a key may have changed between two round trips.
        doubtful = [key for key in keys if found[key].unreadable]
        return found | self._read(doubtful, sizes)

    def _read(self, keys: Sequence[bytes], sizes: dict[bytes, int]) -> dict[bytes, StoredSubject]:
        found: dict[bytes, StoredSubject] = dict.fromkeys(keys, StoredSubject())
        small = [key for key in keys if sizes[key] <= FIELDS_READ_MAX]
        large = [key for key in keys if FIELDS_READ_MAX < sizes[key] <= FIELDS_NAMED_MAX]
        for key, values in zip(
            small, pipelined(self._client, [("HGETALL", key) for key in small]), strict=True
        ):
            _raise_forbidden(values)
            if isinstance(values, dict):
                found[key] = read_subject(values, in_bucket=is_bucket(key))
        for key in large:
            found[key] = self._read_large(key)
        return found

    def _read_large(self, key: bytes) -> StoredSubject:
        """Read a hash without the chunks of its logs, which may be megabytes."""
        in_bucket = is_bucket(key)
        try:
            names = self._client.execute_command("HKEYS", key)
            wanted = [name for name in names if in_bucket or name[:1] != b"\x01"]
            values = self._client.execute_command("HMGET", key, *wanted) if wanted else []
        except ResponseError as error:
            _raise_forbidden(error)
            return StoredSubject()  # the key has moved to another node, or is not a hash
        pairs = zip(wanted, values, strict=True)
        known = {name: value for name, value in pairs if value is not None}
        return read_subject(known, set(names), in_bucket=in_bucket)

    def _judge(self, key: bytes, ttl_ms: int, read: StoredSubject, now_us: int) -> None:
        self._found.states += read.states
        for wrong in read.unreadable:
            why = f"field {wrong.field!r}: {wrong.why}"
            self._note(KeyDefect("unreadable", self._node, key, why, unreadable=wrong))
        ends_us = [each.needed_until_us for each in read.rules.values()]
        needed_ms = round((max(ends_us) - now_us) / 1_000) if ends_us else 0
        if ttl_ms == -1:
            wants = max(needed_ms, EXPIRY_MS_MIN) if ends_us else 0
            self._note(KeyDefect("no expiry", self._node, key, "it never expires", needed_ms=wants))
            return
        most_ms = self._pace.ttl_ms_max
        if most_ms is None:
            return
        if ttl_ms > max(2 * most_ms, _longest_grant_ms(read, now_us)) + TTL_SLACK_MS:
            needed_s = most_ms / 1_000
            why = f"it expires in {ttl_ms / 1_000:,.0f} s; no limit needs more than {needed_s:,.0f}"
            self._note(KeyDefect("long expiry", self._node, key, why))


def _longest_grant_ms(read: StoredSubject, now_us: int) -> float:
    """Return how long the longest grant may keep a key. An operator chose it, not a limit."""
    ends = (s.b for each in read.rules.values() for s in each.states if s.has_end)
    # Scripts set an expiry an eighth later than necessary.
    return 1.25 * (max(ends, default=0.0) - now_us) / 1_000


# ── Replicas
# ────────────────────────────────────────────────────────────────────────────────────────

KEYS_PER_TRIP: Final = 100
# Keys that the replica itself returns: a key that only the replica has is drift too.
OWN_KEYS_MAX: Final = 50
CATCH_UP_SECONDS_MAX: Final = 2.0
_CATCH_UP_PAUSE_SECONDS: Final = 0.02
REPLICAS_MAX: Final = 32
# Replicas receive the absolute expiry time: the remaining time differs by their clocks.
EXPIRY_MS_APART_MAX: Final = 5_000

_REPLICA: Final = re.compile(r"slave\d+")


@dataclass(slots=True)
class ReplicaComparison:
    """The comparison of one replica with its primary."""

    primary: str
    replica: str
    compared: int = 0
    drifted: list[tuple[bytes, str]] = field(default_factory=list)
    """The keys that differ, each with a description."""
    unsettled: int = 0
    """Keys that differed at first and changed before the second read."""
    behind: bool = False
    """True if it did not reach the primary's offset in CATCH_UP_SECONDS_MAX."""
    error: str = ""
    """Why it could not be compared; empty if it could."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """One server's copy of a key."""

    fields: Any
    ttl_ms: int

    def differs(self, other: _Copy) -> str:
        """Describe the difference; empty if there is none."""
        if (self.ttl_ms == -2) != (other.ttl_ms == -2):
            return (
                "it does not exist" if other.ttl_ms == -2 else "it exists, but not on the primary"
            )
        if self.fields != other.fields:
            return "its fields differ"
        if (self.ttl_ms == -1) != (other.ttl_ms == -1):
            return "only one of the two has an expiry"
        apart_ms = abs(self.ttl_ms - other.ttl_ms)
        if apart_ms > EXPIRY_MS_APART_MAX:
            return f"the expiries differ by {apart_ms / 1_000:,.0f} s"
        return ""


def compare_replicas(
    topology: Topology,
    primary: Address,
    keys: Sequence[bytes],
    prefix: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> list[ReplicaComparison]:
    """Compare keys of a primary with each of its replicas. Raises StoreError for the primary."""
    with store_errors(primary, _PERMISSIONS):
        found = _replicas(topology.client(primary))
    return [_Pair(topology, primary, each, prefix, sleep).compared(keys) for each in found]


def _replicas(client: Any) -> list[Address]:
    info = client.execute_command("INFO", "replication")
    replicas = [info[name] for name in info if _REPLICA.fullmatch(name)]
    found = [Address(str(each["ip"]), int(each["port"])) for each in replicas if each.get("port")]
    return found[:REPLICAS_MAX]


class _Pair:
    """A primary and one of its replicas."""

    def __init__(
        self,
        topology: Topology,
        primary: Address,
        replica: Address,
        prefix: str,
        sleep: Callable[[float], None],
    ) -> None:
        self._address = replica
        self._primary: Any = topology.client(primary)
        self._replica: Any = topology.client(replica)
        self._pattern = prefix.encode() + b":{*"
        self._sleep = sleep
        self._found = ReplicaComparison(str(primary), str(replica))

    def compared(self, keys: Sequence[bytes]) -> ReplicaComparison:
        try:
            wanted = list(dict.fromkeys((*keys, *self._own_keys())))
            before = self._copies(self._primary, wanted)
            there = self._copies(self._replica, wanted, of_replica=True)
            self._found.compared = len(wanted)
            suspected = [key for key in wanted if before[key].differs(there[key])]
            if suspected:
                self._settle(suspected)
        except REDIS_PY_ERRORS as error:
            self._found.error = str(store_error(self._address, error, _PERMISSIONS))
        return self._found

    def _own_keys(self) -> list[bytes]:
        how = ("MATCH", self._pattern, "COUNT", OWN_KEYS_MAX)
        _, found = self._replica.execute_command("SCAN", 0, *how)
        return list(found)[:OWN_KEYS_MAX]

    def _settle(self, keys: Sequence[bytes]) -> None:
        before = self._copies(self._primary, keys)
        self._found.behind = not self._caught_up()
        there = self._copies(self._replica, keys, of_replica=True)
        after = self._copies(self._primary, keys)
        for key in keys:
            how = before[key].differs(there[key])
            if before[key].differs(after[key]):
                self._found.unsettled += 1
            elif how:
                self._found.drifted.append((key, how))

    def _caught_up(self) -> bool:
        """Wait until the replica reaches the primary's current offset; return whether it did."""
        wanted = self._primary.execute_command("INFO", "replication").get("master_repl_offset", 0)
        until_s = time.monotonic() + CATCH_UP_SECONDS_MAX
        while True:
            info = self._replica.execute_command("INFO", "replication")
            if info.get("slave_repl_offset", -1) >= wanted:
                return True
            if time.monotonic() >= until_s:
                return False
            self._sleep(_CATCH_UP_PAUSE_SECONDS)

    def _copies(
        self, client: Any, keys: Sequence[bytes], *, of_replica: bool = False
    ) -> Mapping[bytes, _Copy]:
        found: dict[bytes, _Copy] = {}
        for start in range(0, len(keys), KEYS_PER_TRIP):
            some = keys[start : start + KEYS_PER_TRIP]
            # A replica in a cluster redirects reads to its primary unless it gets READONLY first.
            # Outside a cluster READONLY fails, which does no harm.
            first = [("READONLY",)] if of_replica else []
            replies = pipelined(
                client, [*first, *((word, key) for key in some for word in ("HGETALL", "PTTL"))]
            )[len(first) :]
            for place, key in enumerate(some):
                fields, ttl_ms = replies[2 * place : 2 * place + 2]
                # For a key that is not a hash, both servers return an error: compare its text.
                same = fields if isinstance(fields, dict) else str(fields)
                found[key] = _Copy(same, ttl_ms if isinstance(ttl_ms, int) else -2)
        return found


# ── Repairs
# ─────────────────────────────────────────────────────────────────────────────────────────


def set_expiry(topology: Topology, address: Address, key: bytes, ttl_ms: int) -> bool:
    """Set an expiry on a key without one; return False if it has one by now or is gone."""
    return _repair(topology, address, _EXPIRE, key, ttl_ms)


def remove(topology: Topology, address: Address, defect: KeyDefect) -> bool:
    """Remove an unreadable key or field; return False if it is no longer as it was found."""
    if defect.kind == "wrong type":
        return _repair(topology, address, _REMOVE_KEY, defect.key, defect.type.encode())
    wrong = defect.unreadable
    if defect.kind != "unreadable" or wrong is None:
        return False
    value = (b"0", b"") if wrong.value is None else (b"1", wrong.value)
    return _repair(
        topology, address, _REMOVE_FIELDS, defect.key, wrong.field, *value, *wrong.fields
    )


def _repair(topology: Topology, address: Address, script: bytes, key: bytes, *words: Any) -> bool:
    with store_errors(address, _PERMISSIONS):
        client: Any = topology.client(address)
        return bool(client.execute_command("EVAL", script, 1, key, *words))


# ── Commands
# ────────────────────────────────────────────────────────────────────────────────────────


def _raise_forbidden(*replies: object) -> None:
    for reply in replies:
        if isinstance(reply, NoPermissionError):
            raise reply


def _time_us(reply: Any) -> int:
    if isinstance(reply, ResponseError):
        raise reply
    seconds, microseconds = reply
    return int(seconds) * 1_000_000 + int(microseconds)
