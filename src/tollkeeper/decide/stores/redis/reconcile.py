"""Looking over all that is kept in Redis: every key of ours, on every primary, and what is wrong.

Nothing should ever be wrong: scripts write a hash and its expiry in one step. But servers are
restored from old backups, other programs write under the same prefix, versions come and go; and a
key without an expiry stays for good, and one that no script can read fails every check of its
subject. So now and then somebody looks.

The keys are walked with SCAN and looked at LOOK_KEYS at a time, with a pause in between. Each is
asked for its type, its expiry and its fields, in two or three trips for all of them, which keep a
server busy for less than a millisecond: so long a check may have to wait for one of them. A key
that was changed, moved or dropped meanwhile is no defect, and what cannot be read is read a second
time before it is called so.

Mending is a second thing, and only for those who ask. Each step is a script that looks again and
changes nothing where the key is no longer as it was found. Only keys `<prefix>:{…}` are touched.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import redis
from redis.exceptions import NoPermissionError, ResponseError

from tollkeeper.core.errors import StoreError, StoreTimeout, StoreUnavailable
from tollkeeper.decide.stores.redis import held
from tollkeeper.decide.stores.redis.config import Address
from tollkeeper.decide.stores.redis.topology import Topology

PAGE_KEYS: Final = 500
LOOK_KEYS: Final = 100
PAUSE_SECONDS: Final = 0.002
# A hash with more fields is read by its names, and only the rules' own fields of it.
FIELDS_READ_MAX: Final = 128
FIELDS_NAMED_MAX: Final = 20_000
DEFECTS_MAX: Final = 10_000
SAMPLE_MAX: Final = 200
# Who has most, of so many that are counted at a time; when there are more, the least are dropped.
HOLDERS_MAX: Final = 20_000
HOLDERS_KEPT: Final = 5_000
# Keys seen, by their hashes: SCAN may tell a key twice.
SEEN_MAX: Final = 2_000_000
TTL_SLACK_MS: Final = 3_600_000
EXPIRY_MS_MIN: Final = 60_000

VENDOR_ERRORS: Final = (redis.RedisError, OSError, UnicodeError)
_REPEATED: Final = ", with args beginning with"
_SEPARATOR: Final = b"\x1f"
_PART: Final = b"~"

Kind = Literal["no expiry", "long expiry", "wrong type", "unreadable", "not ours"]

# Set an expiry where there is none.
_EXPIRE: Final = b"""
if redis.call('PTTL', KEYS[1]) ~= -1 then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""
# Remove fields, if the rule's own field is as it was; '0' or '1' before its value: is it there?
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


@dataclass(frozen=True, slots=True)
class Defect:
    """One key, or a part of it, that is not as it should be."""

    kind: Kind
    node: str
    key: bytes
    why: str
    type: str = "hash"
    needed_ms: int = 0
    """Of a key without expiry: how long its own states want it to live; 0: they do not say."""
    unreadable: held.Unreadable | None = None


@dataclass(slots=True)
class Walked:
    """What one primary holds."""

    address: Address
    keys: int = 0
    states: int = 0
    memory_bytes: int = 0
    weighed: int = 0
    """Keys that the server told the size of."""
    complete: bool = True
    """Was every key looked at?"""
    keys_in_all: int | None = None
    """In its database, of whatever prefix."""
    counts: Counter[Kind] = field(default_factory=Counter)
    defects: list[Defect] = field(default_factory=list)
    """The first DEFECTS_MAX; `counts` has all."""
    rules: Counter[bytes] = field(default_factory=Counter)
    """States by the rule's field."""
    holders: Counter[bytes] = field(default_factory=Counter)
    """States by whom they are of, a part of a subject such as `tenant:acme`."""
    sample: list[bytes] = field(default_factory=list)
    """Some of the keys, each as likely as any other."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How to walk."""

    keys_max: int = 0
    """On each primary; 0: all."""
    pause_seconds: float = PAUSE_SECONDS
    ttl_ms_max: int | None = None
    """What no limit in force could need; None: nobody knows the limits."""
    logs: frozenset[int] = frozenset()
    """The limits' numbers that are known to be logs."""
    sleep: Callable[[float], None] = time.sleep


def walk(topology: Topology, prefix: str, pace: Pace) -> list[Walked]:
    """Look at every key of ours on every primary.

    Raises StoreUnavailable or StoreTimeout if one does not answer, or may not be asked.
    """
    # Who is a primary may have changed since somebody last asked.
    topology.primaries()
    topology.refresh()
    return [_Walk(topology, each, prefix, pace).walked() for each in topology.primaries()]


class _Walk:
    """A walk over one primary's keys."""

    def __init__(self, topology: Topology, address: Address, prefix: str, pace: Pace) -> None:
        self._client: Any = topology.client(address)
        self._found = Walked(address)
        self._head = prefix.encode() + b":{"
        self._pace = pace
        self._seen: set[int] = set()
        self._random = random.Random()  # noqa: S311 - it chooses samples, not secrets

    def walked(self) -> Walked:
        with telling_errors(self._found.address):
            size = asked(self._client, [("DBSIZE",)])[0]
            self._found.keys_in_all = size if isinstance(size, int) else None
            for page in self._pages():
                self._look(page)
        return self._found

    def _pages(self) -> Iterator[list[bytes]]:
        """Keys to be looked at together, with a rest after each lot, and after each step."""
        cursor, first = 0, True
        while first or cursor:
            first = False
            how = ("MATCH", self._head + b"*", "COUNT", PAGE_KEYS)
            cursor, found = self._client.execute_command("SCAN", cursor, *how)
            page = self._new(found)
            if self._pace.keys_max:
                room = self._pace.keys_max - self._found.keys
                if len(page) > room or (len(page) == room and cursor):
                    self._found.complete = False
                    page, cursor = page[:room], 0
            for start in range(0, max(len(page), 1), LOOK_KEYS):
                yield page[start : start + LOOK_KEYS]
                self._pace.sleep(self._pace.pause_seconds)

    def _new(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those that were not there before."""
        page = []
        for key in dict.fromkeys(keys):
            if (number := hash(key)) not in self._seen:
                if len(self._seen) < SEEN_MAX:
                    self._seen.add(number)
                page.append(key)
        return page

    def _look(self, page: Sequence[bytes]) -> None:
        """Types and expiries first, then the fields."""
        if not page:
            return
        words = ("TYPE", "PTTL", "HLEN", "MEMORY USAGE")
        commands = [(word, key) for key in page for word in words]
        replies = asked(self._client, [("TIME",), *commands])
        now_us = _time_us(replies[0])
        hashes: list[tuple[bytes, int]] = []
        sizes: dict[bytes, int] = {}
        for place, key in enumerate(page):
            kind, ttl_ms, fields, weight = replies[1 + 4 * place : 5 + 4 * place]
            _refuse_forbidden(kind, ttl_ms)
            if not isinstance(kind, bytes) or not isinstance(ttl_ms, int) or kind == b"none":
                continue  # it has expired, or another node has it now
            self._count(key, weight)
            if not key.endswith(b"}"):
                self._note(Defect("not ours", self._node, key, "its name is not one of ours"))
            elif kind != b"hash":
                text = kind.decode(errors="replace")
                self._note(Defect("wrong type", self._node, key, f"it is a {text}", type=text))
            elif isinstance(fields, int):
                hashes.append((key, ttl_ms))
                sizes[key] = fields
        reads = self._read_all([key for key, _ in hashes], sizes)
        for key, ttl_ms in hashes:
            self._judge(key, ttl_ms, reads[key], now_us)

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

    def _note(self, defect: Defect) -> None:
        self._found.counts[defect.kind] += 1
        if len(self._found.defects) < DEFECTS_MAX:
            self._found.defects.append(defect)

    # ── What is in a hash ──────────────────────────────────────────────────────────────────────

    def _read_all(self, keys: Sequence[bytes], sizes: dict[bytes, int]) -> dict[bytes, held.Read]:
        found = self._read(keys, sizes)
        # Once more, as it may have been changed between two trips.
        doubtful = [key for key in keys if found[key].unreadable]
        return found | self._read(doubtful, sizes)

    def _read(self, keys: Sequence[bytes], sizes: dict[bytes, int]) -> dict[bytes, held.Read]:
        found: dict[bytes, held.Read] = dict.fromkeys(keys, held.Read())
        small = [key for key in keys if sizes[key] <= FIELDS_READ_MAX]
        large = [key for key in keys if FIELDS_READ_MAX < sizes[key] <= FIELDS_NAMED_MAX]
        for key, values in zip(
            small, asked(self._client, [("HGETALL", key) for key in small]), strict=True
        ):
            _refuse_forbidden(values)
            if isinstance(values, dict):
                found[key] = held.read(values, logs=self._pace.logs)
        for key in large:
            found[key] = self._read_large(key)
        return found

    def _read_large(self, key: bytes) -> held.Read:
        """Without the chunks of its logs, which may be megabytes."""
        try:
            names = self._client.execute_command("HKEYS", key)
            wanted = [name for name in names if name[:1] != b"\x01"]
            values = self._client.execute_command("HMGET", key, *wanted) if wanted else []
        except ResponseError as error:
            _refuse_forbidden(error)
            return held.Read()  # another node has it now, or it is something else
        pairs = zip(wanted, values, strict=True)
        known = {name: value for name, value in pairs if value is not None}
        return held.read(known, set(names), self._pace.logs)

    def _judge(self, key: bytes, ttl_ms: int, read: held.Read, now_us: int) -> None:
        self._found.states += read.states
        for name, each in read.rules.items():
            self._found.rules[name] += len({abs(state.id) for state in each.states})
        self._hold(key, read.states)
        for wrong in read.unreadable:
            why = f"field {wrong.field!r}: {wrong.why}"
            self._note(Defect("unreadable", self._node, key, why, unreadable=wrong))
        ends_us = [each.needed_until_us for each in read.rules.values()]
        needed_ms = round((max(ends_us) - now_us) / 1_000) if ends_us else 0
        if ttl_ms == -1:
            wants = max(needed_ms, EXPIRY_MS_MIN) if ends_us else 0
            self._note(Defect("no expiry", self._node, key, "it never expires", needed_ms=wants))
            return
        most_ms = self._pace.ttl_ms_max
        if most_ms is None:
            return
        if ttl_ms > max(2 * most_ms, _granted_ms(read, now_us)) + TTL_SLACK_MS:
            needed_s = most_ms / 1_000
            why = f"it expires in {ttl_ms / 1_000:,.0f} s; no limit needs more than {needed_s:,.0f}"
            self._note(Defect("long expiry", self._node, key, why))

    def _hold(self, key: bytes, states: int) -> None:
        """Count for whom: each part of a subject that is counted by several things."""
        holders = self._found.holders
        for part in key[len(self._head) : -1].split(_SEPARATOR):
            if not part.startswith(_PART):
                holders[part] += states
        if len(holders) > HOLDERS_MAX:
            self._found.holders = Counter(dict(holders.most_common(HOLDERS_KEPT)))


def _granted_ms(read: held.Read, now_us: int) -> float:
    """How long a key may live for its longest grant: somebody chose that, and no limit tells it."""
    ends = (s.b for each in read.rules.values() for s in each.states if s.is_grant)
    # Scripts move an expiry an eighth further than it must be, as it is when they do.
    return 1.25 * (max(ends, default=0.0) - now_us) / 1_000


# ── Mending ────────────────────────────────────────────────────────────────────────────────────


def set_expiry(topology: Topology, address: Address, key: bytes, ttl_ms: int) -> bool:
    """Let a key expire that never would; False if it has an expiry by now, or is gone."""
    return _mend(topology, address, _EXPIRE, key, ttl_ms)


def remove(topology: Topology, address: Address, defect: Defect) -> bool:
    """Remove what cannot be read; False if it is no longer as it was found."""
    if defect.kind == "wrong type":
        return _mend(topology, address, _REMOVE_KEY, defect.key, defect.type.encode())
    wrong = defect.unreadable
    if defect.kind != "unreadable" or wrong is None:
        return False
    value = (b"0", b"") if wrong.value is None else (b"1", wrong.value)
    return _mend(topology, address, _REMOVE_FIELDS, defect.key, wrong.field, *value, *wrong.fields)


def _mend(topology: Topology, address: Address, script: bytes, key: bytes, *words: Any) -> bool:
    with telling_errors(address):
        client: Any = topology.client(address)
        return bool(client.execute_command("EVAL", script, 1, key, *words))


# ── Asking ─────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def telling_errors(address: Address) -> Iterator[None]:
    """Vendors' errors as ours, with the server's address and no secret."""
    try:
        yield
    except VENDOR_ERRORS as error:
        raise error_of(address, error) from None


def error_of(address: Address, error: Exception) -> StoreError:
    """What a server did, as an error of ours."""
    if isinstance(error, redis.TimeoutError | TimeoutError):
        return StoreTimeout(f"{address}: no answer in time")
    below = error.__context__
    said = (below.strerror if isinstance(below, OSError) else None) or str(error)
    text = said.partition(_REPEATED)[0].strip() or type(error).__name__
    if isinstance(error, NoPermissionError):
        text += (
            "; to look, the user needs +scan +type +pttl +hlen +hgetall +hkeys +hmget +time +info, "
            "and to mend +eval +pexpire +hget +hdel +del"
        )
    return StoreUnavailable(f"{address}: {text}")


def asked(client: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The replies, in one trip; some may be ResponseErrors."""
    if not commands:
        return []
    pipeline: Any = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    replies: list[Any] = pipeline.execute(raise_on_error=False)
    return replies


def _refuse_forbidden(*replies: object) -> None:
    for reply in replies:
        if isinstance(reply, NoPermissionError):
            raise reply


def _time_us(reply: Any) -> int:
    if isinstance(reply, ResponseError):
        raise reply
    seconds, microseconds = reply
    return int(seconds) * 1_000_000 + int(microseconds)
