"""Audit the keys in Redis: read every key of ours on every primary, and report defects.

Scripts write a state and its expiry in one step, so there should be no defects. But servers are
restored from old backups, other programs write under the same prefix, and versions change. A key
without an expiry stays forever, and a key that no script can read fails every check of its subject.

**Reading.** `audit` walks the keys with SCAN and reads LOOK_KEYS at a time, with a pause in
between. It requests type, expiry and fields in two or three round trips for the whole batch, each
of which keeps a server busy for less than a millisecond. So a check waits at most that long. A key
that was changed, moved or dropped meanwhile is not a defect. Before a bucket is reported as
unreadable, it is read a second time. `read_bucket` does not trust the contents: a field that this
version did not write is reported, with the fields that belong to it, and never raises an error. The
times in a log are not read.

**Replicas.** `compare_replicas` compares a sample of keys with each replica. A replica lags behind
its primary, so a difference is at first only suspicious. A suspicious key is read again in an order
that leaves no doubt: the key on the primary; the primary's replication offset; the key on the
replica, once it has reached that offset; and the key on the primary again. If both reads of the
primary agree and the replica differs, the two have drifted. A key that changed in between proves
nothing and is counted as unsettled.

**Repairing** is a separate step. Each repair is a script that looks again, and changes nothing if
the key is no longer as it was found. Repairs only touch keys named `<prefix>:{…}`.
"""

from __future__ import annotations

import random
import re
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from redis.exceptions import NoPermissionError, ResponseError

from ratekeeper.decide.stores.redis.codec import (
    FIELD_BYTES,
    TIME_BYTES,
    is_bucket,
    is_log,
    is_regional_state,
    is_slots,
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
# Of a bucket with more fields, only type and expiry are read.
FIELDS_READ_MAX: Final = 2_000
DEFECTS_MAX: Final = 10_000
SAMPLE_MAX: Final = 200
# Keys seen so far, by their hashes: SCAN may return a key twice.
SEEN_MAX: Final = 2_000_000
EXPIRY_MS_MIN: Final = 60_000
# For the state of a global limit that has none: its windows are not known here.
REGIONAL_EXPIRY_MS: Final = 86_400_000
# The type of the key of a log.
_LOG_TYPE: Final = b"string"
# And of that of requests in flight.
_SLOTS_TYPE: Final = b"zset"

_PERMISSIONS: Final = (
    "; an audit needs +scan +type +pttl +hlen +hgetall +getrange +time +info, "
    "and repairs need +eval +pexpire +hget +hdel +del"
)

DefectKind = Literal["no expiry", "wrong type", "unreadable", "not ours"]

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


# ── A bucket ───────────────────────────────────────────────────────────────────────────────────

PIECE_BYTES: Final = 64
_END_BYTES: Final = 4
_TIME_US_MAX: Final = 2**52  # the bits above are the version of the layout
_HOLD: Final = 2**33
_PIECE_NAME: Final = re.compile(rb"\x02([1-9][0-9]{0,5}):(.+)", re.DOTALL)


class Unreadable(NamedTuple):
    """A field that no script of this version can read, or that belongs to no state."""

    field: bytes
    """The rule's field. A repair first verifies that it has not changed."""
    value: bytes | None
    """Its value; None if the field does not exist."""
    why: str
    fields: tuple[bytes, ...]
    """The fields to remove: the field itself and its parts."""


class Bucket(NamedTuple):
    """The contents of a bucket."""

    states: int
    """Number of states. Grants and leased units count as part of their limit's state."""
    needed_until_us: float
    unreadable: tuple[Unreadable, ...]


def read_bucket(values: Mapping[bytes, bytes]) -> Bucket:
    """Return the contents of a bucket from its fields."""
    wrong: list[Unreadable] = []
    states, ends_us = 0, 0.0
    # A field that continues another is longer than a rule's field.
    pieces: dict[bytes, list[bytes]] = {}
    for name in values:
        if len(name) > FIELD_BYTES:
            found = _PIECE_NAME.fullmatch(name)
            pieces.setdefault(name if found is None else found[2], []).append(name)
    for name, raw in values.items():
        if len(name) > FIELD_BYTES:
            continue
        mine, used = pieces.pop(name, []), 0
        whole = raw
        while len(whole) == (used + 1) * PIECE_BYTES:
            piece = values.get(b"\x02%d:%b" % (used + 1, name))
            if piece is None:
                break
            whole, used = whole + piece, used + 1
        try:
            count, end_us = _states(whole)
        except ValueError as error:
            wrong.append(Unreadable(name, raw, str(error), (name, *mine)))
            continue
        states, ends_us = states + count, max(ends_us, end_us)
        read = {b"\x02%d:%b" % (number, name) for number in range(1, used + 1)}
        if left := tuple(each for each in mine if each not in read):
            wrong.append(Unreadable(name, raw, "pieces that belong to no state", left))
    for owner, ownerless in pieces.items():
        why = "parts of a rule's states, without the rule's own field"
        wrong.append(Unreadable(owner, values.get(owner), why, tuple(ownerless)))
    return Bucket(states, ends_us, tuple(wrong))


def _states(raw: bytes) -> tuple[int, float]:
    """Return the number of a rule's states, and until when they are needed. Raises ValueError."""
    place = TIME_BYTES + _END_BYTES
    if len(raw) <= place:
        raise ValueError("it ends too early")
    if int.from_bytes(raw[:TIME_BYTES]) >= _TIME_US_MAX:
        raise ValueError("another version has written it")
    ends_us = int.from_bytes(raw[TIME_BYTES:place]) * 1e6
    limits = set()
    while place < len(raw):
        number, place = _number(raw, place)
        if not float(number).is_integer() or number == 0:
            raise ValueError("the number of a limit is invalid")
        limits.add(abs(number) % _HOLD)
        has_end = number < 0  # units that are granted or leased, and their end
        for _ in range(3 if has_end or number % 2 else 2):
            last, place = _number(raw, place)
        if has_end:
            ends_us = max(ends_us, last)
    return len(limits), ends_us


# The numbers of msgpack, as far as Redis writes them here.
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
    try:
        (number,) = struct.unpack_from(_SIZES[mark], raw, place + 1)
    except struct.error:
        raise ValueError("it ends too early") from None
    if number != number or abs(number) == float("inf"):  # noqa: PLR0124 - that is how NaN is known
        raise ValueError("something in it is no number")
    return number, place + 1 + struct.calcsize(_SIZES[mark])


# ── All keys of a primary ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class KeyDefect:
    """A defect of one key, or of some of its fields."""

    kind: DefectKind
    node: str
    key: bytes
    why: str
    type: bytes = b"hash"
    needed_ms: int = 0
    """For a key without expiry: how long its states need it; 0 if unknown."""
    unreadable: Unreadable | None = None


@dataclass(slots=True)
class AuditedServer:
    """The keys of one primary."""

    address: Address
    keys: int = 0
    states: int = 0
    memory_bytes: int = 0
    complete: bool = True
    """True if the audit read every key."""
    keys_in_all: int | None = None
    """Keys of any prefix in its database."""
    counts: Counter[DefectKind] = field(default_factory=Counter)
    defects: list[KeyDefect] = field(default_factory=list)
    """The first DEFECTS_MAX; `counts` counts all."""
    sample: list[bytes] = field(default_factory=list)
    """A uniform random sample of the keys."""


def audit(
    topology: Topology,
    prefix: str,
    keys_max: int = 0,
    pause_seconds: float = PAUSE_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> list[AuditedServer]:
    """Read every key of ours on every primary, or at most `keys_max` of them if it is not 0.

    Raises StoreUnavailable or StoreTimeout if a primary does not answer or denies permission.
    """
    # The primaries may have changed since the last refresh.
    topology.primaries()
    topology.refresh()

    def pause() -> None:
        sleep(pause_seconds)

    return [
        _ServerAudit(topology, each, prefix, keys_max, pause).run() for each in topology.primaries()
    ]


class _ServerAudit:
    """The audit of one primary."""

    def __init__(
        self,
        topology: Topology,
        address: Address,
        prefix: str,
        keys_max: int,
        pause: Callable[[], None],
    ) -> None:
        self._client: Any = topology.client(address)
        self._found = AuditedServer(address)
        self._node = str(address)
        self._pattern = f"{prefix}:{{*"
        self._keys_max = keys_max
        self._pause = pause
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
            how = ("MATCH", self._pattern, "COUNT", PAGE_KEYS)
            cursor, found = self._client.execute_command("SCAN", cursor, *how)
            page = self._unseen(found)
            if self._keys_max:
                room = self._keys_max - self._found.keys
                if len(page) > room or (len(page) == room and cursor):
                    self._found.complete = False
                    page, cursor = page[:room], 0
            for start in range(0, max(len(page), 1), LOOK_KEYS):
                yield page[start : start + LOOK_KEYS]
                self._pause()

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
        """Read types and expiries first, then the buckets."""
        if not page:
            return
        words = ("TYPE", "PTTL", "HLEN", "MEMORY USAGE")
        commands = [(word, key) for key in page for word in words]
        replies = pipelined(self._client, [("TIME",), *commands])
        now_us = _time_us(replies[0])
        buckets: dict[bytes, int] = {}
        small: list[bytes] = []
        for place, key in enumerate(page):
            kind, ttl_ms, fields, weight = replies[1 + 4 * place : 5 + 4 * place]
            _raise_forbidden(kind, ttl_ms)
            if not isinstance(kind, bytes) or not isinstance(ttl_ms, int) or kind == b"none":
                continue  # the key has expired, or moved to another node
            self._count(key, weight)
            wanted = _type_of(key)
            if not wanted:
                why = "its name does not have the form of our keys"
                self._note(KeyDefect("not ours", self._node, key, why))
            elif kind != wanted:
                why = f"it is a {kind.decode(errors='replace')}"
                self._note(KeyDefect("wrong type", self._node, key, why, type=kind))
            elif not is_bucket(key):
                self._judge_other(key, ttl_ms)
            else:
                buckets[key] = ttl_ms
                if isinstance(fields, int) and fields <= FIELDS_READ_MAX:
                    small.append(key)
        read = dict.fromkeys(buckets, Bucket(0, 0.0, ())) | self._read(small)
        # Read them again: a key may have changed between two round trips.
        read |= self._read([key for key in read if read[key].unreadable])
        for key, ttl_ms in buckets.items():
            self._judge_bucket(key, ttl_ms, read[key], now_us)

    def _read(self, keys: Iterable[bytes]) -> dict[bytes, Bucket]:
        commands = [("HGETALL", key) for key in keys]
        replies = pipelined(self._client, commands)
        _raise_forbidden(*replies)
        return {
            key: read_bucket(values if isinstance(values, dict) else {})
            for (_, key), values in zip(commands, replies, strict=True)
        }

    def _judge_bucket(self, key: bytes, ttl_ms: int, read: Bucket, now_us: int) -> None:
        self._found.states += read.states
        for wrong in read.unreadable:
            why = f"field {wrong.field!r}: {wrong.why}"
            self._note(KeyDefect("unreadable", self._node, key, why, unreadable=wrong))
        needed_ms = round((read.needed_until_us - now_us) / 1_000) if read.states else 0
        if ttl_ms == -1:
            self._never_expires(key, max(needed_ms, EXPIRY_MS_MIN) if read.states else 0)

    def _judge_other(self, key: bytes, ttl_ms: int) -> None:
        """Look at logs, or at a key of global limits. A check reports what it cannot read."""
        is_state = is_regional_state(key)
        if is_state or is_log(key):
            self._found.states += 1
            if ttl_ms == -1:
                self._never_expires(key, REGIONAL_EXPIRY_MS if is_state else 0)

    def _never_expires(self, key: bytes, needed_ms: int) -> None:
        why = "it never expires"
        self._note(KeyDefect("no expiry", self._node, key, why, needed_ms=needed_ms))

    def _count(self, key: bytes, weight: object) -> None:
        found = self._found
        found.keys += 1
        found.memory_bytes += weight if isinstance(weight, int) else 0
        # Reservoir sampling: the place of the nth key is taken with probability SAMPLE_MAX / n.
        if len(found.sample) < SAMPLE_MAX:
            found.sample.append(key)
        elif (place := self._random.randrange(found.keys)) < SAMPLE_MAX:
            found.sample[place] = key

    def _note(self, defect: KeyDefect) -> None:
        self._found.counts[defect.kind] += 1
        if len(self._found.defects) < DEFECTS_MAX:
            self._found.defects.append(defect)


def _type_of(key: bytes) -> bytes:
    """Return the type that a key of ours has; empty if it is another program's."""
    if is_bucket(key):
        return b"hash"
    if is_slots(key):
        return _SLOTS_TYPE
    return _LOG_TYPE if is_log(key) else regional_type(key) or b""


# ── Replicas ───────────────────────────────────────────────────────────────────────────────────

KEYS_PER_TRIP: Final = 100
# Keys that the replica itself returns: a key that only the replica has is drift too.
OWN_KEYS_MAX: Final = 50
CATCH_UP_SECONDS_MAX: Final = 2.0
_CATCH_UP_PAUSE_SECONDS: Final = 0.02
REPLICAS_MAX: Final = 32
# Replicas receive the absolute expiry time: the remaining time differs by their clocks.
EXPIRY_MS_APART_MAX: Final = 5_000
# Of a string, such as a long log, this much is compared.
_STRING_BYTES_MAX: Final = 4_096


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


class _Copy(NamedTuple):
    """One server's copy of a key."""

    contents: Any
    ttl_ms: int

    def differs(self, other: _Copy) -> str:
        """Describe the difference; empty if there is none."""
        if (self.ttl_ms == -2) != (other.ttl_ms == -2):
            return (
                "it does not exist" if other.ttl_ms == -2 else "it exists, but not on the primary"
            )
        if self.contents != other.contents:
            return "its contents differ"
        if (self.ttl_ms == -1) != (other.ttl_ms == -1):
            return "only one of the two has an expiry"
        apart_ms = abs(self.ttl_ms - other.ttl_ms)
        if apart_ms > EXPIRY_MS_APART_MAX:
            return f"the expiries differ by {apart_ms / 1_000:,.0f} s"
        return ""


def compare_replicas(
    topology: Topology, primary: Address, keys: Sequence[bytes], prefix: str
) -> list[ReplicaComparison]:
    """Compare keys of a primary with each of its replicas. Raises StoreError for the primary."""
    client: Any = topology.client(primary)
    with store_errors(primary, _PERMISSIONS):
        info = client.execute_command("INFO", "replication")
    replicas = [info[name] for name in info if re.fullmatch(r"slave\d+", name)]
    found = [Address(str(each["ip"]), int(each["port"])) for each in replicas if each.get("port")]
    return [_Pair(topology, primary, each, prefix).compared(keys) for each in found[:REPLICAS_MAX]]


class _Pair:
    """A primary and one of its replicas."""

    def __init__(self, topology: Topology, primary: Address, replica: Address, prefix: str) -> None:
        self._address = replica
        self._primary: Any = topology.client(primary)
        self._replica: Any = topology.client(replica)
        self._pattern = f"{prefix}:{{*"
        self._found = ReplicaComparison(str(primary), str(replica))

    def compared(self, keys: Sequence[bytes]) -> ReplicaComparison:
        try:
            how = ("MATCH", self._pattern, "COUNT", OWN_KEYS_MAX)
            _, own = self._replica.execute_command("SCAN", 0, *how)
            wanted = list(dict.fromkeys((*keys, *own[:OWN_KEYS_MAX])))
            before = self._copies(self._primary, wanted)
            there = self._copies(self._replica, wanted)
            self._found.compared = len(wanted)
            suspected = [key for key in wanted if before[key].differs(there[key])]
            if suspected:
                self._settle(suspected)
        except REDIS_PY_ERRORS as error:
            self._found.error = str(store_error(self._address, error, _PERMISSIONS))
        return self._found

    def _settle(self, keys: Sequence[bytes]) -> None:
        before = self._copies(self._primary, keys)
        self._found.behind = not self._caught_up()
        there = self._copies(self._replica, keys)
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
            time.sleep(_CATCH_UP_PAUSE_SECONDS)

    def _copies(self, client: Any, keys: Sequence[bytes]) -> Mapping[bytes, _Copy]:
        found: dict[bytes, _Copy] = {}
        for start in range(0, len(keys), KEYS_PER_TRIP):
            some = keys[start : start + KEYS_PER_TRIP]
            commands: list[tuple[Any, ...]] = [("READONLY",)]
            for key in some:
                commands += [("HGETALL", key), ("GETRANGE", key, 0, _STRING_BYTES_MAX)]
                commands.append(("PTTL", key))
            # A replica in a cluster redirects reads to its primary unless it gets READONLY first.
            # Elsewhere READONLY fails or changes nothing.
            replies = pipelined(client, commands)[1:]
            for place, key in enumerate(some):
                *contents, ttl_ms = replies[3 * place : 3 * place + 3]
                # One of the two commands fails, with the same error on both servers.
                same = [str(each) if isinstance(each, Exception) else each for each in contents]
                found[key] = _Copy(same, ttl_ms if isinstance(ttl_ms, int) else -2)
        return found


# ── Repairs ────────────────────────────────────────────────────────────────────────────────────


def set_expiry(topology: Topology, address: Address, key: bytes, ttl_ms: int) -> bool:
    """Set an expiry on a key without one; return False if it has one by now or is gone."""
    return _repair(topology, address, _EXPIRE, key, ttl_ms)


def remove(topology: Topology, address: Address, defect: KeyDefect) -> bool:
    """Remove an unreadable key or field; return False if it is no longer as it was found."""
    if defect.kind == "wrong type":
        return _repair(topology, address, _REMOVE_KEY, defect.key, defect.type)
    if (wrong := defect.unreadable) is None:
        return False
    value = (b"0", b"") if wrong.value is None else (b"1", wrong.value)
    return _repair(
        topology, address, _REMOVE_FIELDS, defect.key, wrong.field, *value, *wrong.fields
    )


def _repair(topology: Topology, address: Address, script: bytes, key: bytes, *words: Any) -> bool:
    with store_errors(address, _PERMISSIONS):
        client: Any = topology.client(address)
        return bool(client.execute_command("EVAL", script, 1, key, *words))


def _raise_forbidden(*replies: object) -> None:
    for reply in replies:
        if isinstance(reply, NoPermissionError):
            raise reply


def _time_us(reply: Any) -> int:
    if isinstance(reply, ResponseError):
        raise reply
    seconds, microseconds = reply
    return int(seconds) * 1_000_000 + int(microseconds)
