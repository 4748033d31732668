"""A subject's hash, read outside of the scripts: its states, and what of it no script could read.

`lua/state.lua` says how a hash is laid out. This is for whoever looks over what is kept: it needs
no server and no library, and believes nothing. A field that is not as this version writes it is
told of, with the fields that belong to it, and never raises: it may be of another version, or of
another program.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tollkeeper.decide.stores.redis.encode import TIME_BYTES

PIECE_BYTES: Final = 64
CHUNK_TIMES_MAX: Final = 512
# A rule has a handful of limits; what is longer than this was written by somebody else.
NUMBERS_MAX: Final = 4_096
# A log of a million times in chunks of 512, and some.
CHUNKS_MAX: Final = 4_096
_FIRST: Final = 2  # the first limit's place: behind base and ttl
_CHUNK_MARK, _PIECE_MARK = 1, 2

_PIECE_NAME: Final = re.compile(rb"\x02([1-9][0-9]{0,5}):(.+)", re.DOTALL)
_CHUNK_NAME: Final = re.compile(rb"\x01([0-9]{1,11})\.([0-9]{1,16}):(.+)", re.DOTALL)


class State(NamedTuple):
    """One limit's numbers; a negative id is what was granted on top of the limit."""

    id: int
    lag_us: float
    a: float
    b: float

    @property
    def is_grant(self) -> bool:
        """Then `a` is the units left, and `b` the time they end, in microseconds."""
        return self.id < 0


@dataclass(frozen=True, slots=True)
class Held:
    """A rule's states of one subject."""

    base_us: float
    ttl_ms: float
    states: tuple[State, ...]

    @property
    def needed_until_us(self) -> float:
        """Until when the hash has to be there for them."""
        ends = [state.b for state in self.states if state.is_grant]
        return max([self.base_us + self.ttl_ms * 1_000, *ends])


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A field that no script of this version could read, or that belongs to nothing."""

    field: bytes
    """The rule's field: whoever mends it makes sure that it has not changed."""
    value: bytes | None
    """What is in it; None: it is not there."""
    why: str
    fields: tuple[bytes, ...]
    """What to remove, to be rid of it: itself, and what goes with it."""


@dataclass(frozen=True, slots=True)
class Read:
    """What a hash holds, by rule's field."""

    rules: Mapping[bytes, Held] = field(default_factory=dict)
    unreadable: tuple[Unreadable, ...] = ()

    @property
    def states(self) -> int:
        """How many; what is granted on top of a limit is part of the limit's."""
        return sum(len({abs(state.id) for state in held.states}) for held in self.rules.values())


def is_part(name: bytes) -> bool:
    """Is this the name of a field that goes with another: a chunk of a log, or a further piece?"""
    return name[:1] in {b"\x01", b"\x02"}


def read(
    values: Mapping[bytes, bytes],
    names: Container[bytes] | None = None,
    logs: Container[int] = frozenset(),
) -> Read:
    """What is in a hash.

    `names` are those of all its fields, where `values` leaves out chunks of logs. `logs` are the
    limits' numbers (`encode.id_of`) that are known to be logs.
    """
    rules: dict[bytes, Held] = {}
    wrong: list[Unreadable] = []
    parts: dict[bytes, list[bytes]] = {}
    for name in values:
        if is_part(name):
            parts.setdefault(_owner(name), []).append(name)
    present = values if names is None else names
    for name, raw in values.items():
        if is_part(name):
            continue
        mine = parts.pop(name, [])
        try:
            held, used = _rule(name, raw, values)
            used |= _check_logs(name, held, values, present, logs)
        except ValueError as error:
            wrong.append(Unreadable(name, raw, str(error), (name, *mine)))
            continue
        rules[name] = held
        # A chunk that holds nothing any more may stay until the next one is dropped.
        if left := tuple(each for each in mine if each not in used and each[0] == _PIECE_MARK):
            wrong.append(Unreadable(name, raw, "pieces that belong to no state", left))
    for owner, ownerless in parts.items():
        # One whose name says not whose it is stands for itself.
        why = "parts of a rule's states, without the rule's own field"
        wrong.append(Unreadable(owner, values.get(owner), why, tuple(ownerless)))
    return Read(rules, tuple(wrong))


def _owner(name: bytes) -> bytes:
    found = (_CHUNK_NAME if name[0] == _CHUNK_MARK else _PIECE_NAME).fullmatch(name)
    return name if found is None else found[found.re.groups]


def _rule(name: bytes, raw: bytes, values: Mapping[bytes, bytes]) -> tuple[Held, set[bytes]]:
    """A rule's states, and the pieces that they are in. Raises ValueError."""
    used: set[bytes] = set()
    while len(raw) == (len(used) + 1) * PIECE_BYTES:
        piece = b"\x02%d:%b" % (len(used) + 1, name)
        if piece not in values:
            break
        raw += values[piece]
        used.add(piece)
    return _held(list(_numbers(raw))), used


def _held(numbers: list[float]) -> Held:
    if len(numbers) <= _FIRST:
        raise ValueError("it holds no state")
    states: list[State] = []
    place = _FIRST
    while place < len(numbers):
        if not numbers[place].is_integer() or numbers[place] == 0:
            raise ValueError("a limit's number is none")
        number = int(numbers[place])
        width = 4 if number < 0 or number % 2 else 3
        found = numbers[place + 1 : place + width]
        if len(found) != width - 1:
            raise ValueError("it ends in the middle of a state")
        states.append(State(number, *found, *([0.0] if width == 3 else [])))
        place += width
    if numbers[0] < 0:
        raise ValueError("its time is before 1970")
    return Held(numbers[0], numbers[1], tuple(states))


def _check_logs(
    name: bytes,
    held: Held,
    values: Mapping[bytes, bytes],
    present: Container[bytes],
    logs: Container[int],
) -> set[bytes]:
    """Every chunk that a log needs is there, and whole. Raises ValueError."""
    used: set[bytes] = set()
    for state in held.states:
        # Which algorithm a limit has is not in its state. A counter's is odd as well, and has no
        # chunk at all; so a log is what has one, or what the rules say is one.
        per_chunk = int(state.b) % 1_024
        kept = int(state.b) // 1_024
        if state.is_grant or not state.id % 2 or not 0 < per_chunk <= CHUNK_TIMES_MAX:
            continue
        first, last = int(state.a) // per_chunk, (int(state.a) + kept - 1) // per_chunk
        if not 0 <= last - first < CHUNKS_MAX or not kept:
            continue
        chunks = [b"\x01%d.%d:%b" % (state.id, number, name) for number in range(first, last + 1)]
        there = [chunk in present for chunk in chunks]
        if not any(there) and state.id not in logs:
            continue
        if not all(there):
            raise ValueError("a part of a log's times is missing")
        for chunk in chunks:
            if len(values.get(chunk, b"")) % TIME_BYTES:
                raise ValueError("a log's times are cut off")
        used.update(chunks)
    return used


# ── Msgpack, as far as Redis writes it here: one array of numbers ──────────────────────────────

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
    """The numbers of an array, all of it. Raises ValueError."""
    if not raw:
        raise ValueError("it is empty")
    count, place = _length(raw)
    if count > NUMBERS_MAX:
        raise ValueError(f"it has {count:,} numbers")
    for _ in range(count):
        number, place = _number(raw, place)
        yield float(number)
    if place != len(raw):
        raise ValueError("something follows the states")


def _length(raw: bytes) -> tuple[int, int]:
    mark = raw[0]
    if mark & 0xF0 == 0x90:
        return mark & 0x0F, 1
    if mark not in _HEADS:
        raise ValueError("it is no array")
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
