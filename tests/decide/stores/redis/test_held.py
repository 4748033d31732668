"""A subject's hash read outside of the scripts: what is well is read, and what is not is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper.decide.stores.redis.encode import encode_numbers
from tollkeeper.decide.stores.redis.held import PIECE_BYTES, Read, State, is_part, read

BASE_US = 1_763_000_000_000_000
# A bucket (an even id), a counter and a log (odd ones), and units granted (a negative one).
BUCKET = (BASE_US, 60_000, 4, 0, 3_000_000)
COUNTER = (BASE_US, 60_000, 7, 0, 12, 30)


def packed(*numbers: int) -> bytes:
    return encode_numbers(numbers)


def log_of(kept: int, start: int = 0, per_chunk: int = 9) -> tuple[int, ...]:
    return (BASE_US, 60_000, 9, 0, start, kept * 1_024 + per_chunk)


def only_wrong(found: Read) -> str:
    (wrong,) = found.unreadable
    return wrong.why


def test_states_are_read_as_they_were_written() -> None:
    """With their numbers; those that have two are told apart from those that have three."""
    found = read({b"orders": packed(*BUCKET, *COUNTER[2:])})
    held = found.rules[b"orders"]
    assert (held.base_us, held.ttl_ms) == (BASE_US, 60_000)
    assert held.states == (State(4, 0, 3_000_000, 0), State(7, 0, 12, 30))
    assert (found.states, found.unreadable) == (2, ())
    assert held.needed_until_us == BASE_US + 60_000_000


def test_doubles_and_negative_numbers_are_numbers() -> None:
    """Lua writes what is not whole as a double, and a grant has a negative id."""
    raw = (
        b"\x96\xcb\x43\x15\x50\xf7\xdc\xa7\x00\x00" + b"\xcd\x03\xe8" + b"\xfc\x00\x05\xcd\x07\xd0"
    )
    held = read({b"a": raw}).rules[b"a"]
    assert held.base_us == 1.5e15
    assert held.states == (State(-4, 0, 5, 2_000),)
    assert held.states[0].is_grant


def test_units_granted_are_part_of_their_limit() -> None:
    """One state, not two; and the hash is needed until they end."""
    # -5 as a fixed number of msgpack.
    raw = b"\x99" + b"".join(packed(each)[3:] for each in BUCKET) + b"\xfc\x00\x02"
    ends = BASE_US + 3_600_000_000
    found = read({b"a": raw + packed(ends)[3:]})
    assert found.states == 1
    assert found.rules[b"a"].needed_until_us == ends


def test_long_states_go_on_in_further_pieces() -> None:
    """Which are counted once, as what they are."""
    limits = [number for place in range(12) for number in (100 + 2 * place, 0, 123_456)]
    raw = packed(BASE_US, 60_000, *limits)
    pieces = [raw[start : start + PIECE_BYTES] for start in range(0, len(raw), PIECE_BYTES)]
    names = [b"orders", *(b"\x02%d:orders" % number for number in range(1, len(pieces)))]
    values = dict(zip(names, pieces, strict=True))
    assert len(values) > 1
    assert (read(values).states, read(values).unreadable) == (12, ())
    missing = {name: value for name, value in values.items() if name != names[-1]}
    found = read(missing)
    assert (only_wrong(found), found.rules) == ("it ends too early", {})
    assert set(found.unreadable[0].fields) == set(missing)


@pytest.mark.parametrize("kept", [1, 9, 10, 25])
@pytest.mark.parametrize("start", [0, 5, 9])
def test_a_log_has_all_its_chunks(kept: int, start: int) -> None:
    """And one that lacks a part of them cannot be decided on."""
    chunks = range(start // 9, (start + kept - 1) // 9 + 1)
    values = {b"\x019.%d:a" % number: b"1234567" * 9 for number in chunks}
    values[b"a"] = packed(*log_of(kept, start))
    assert read(values).unreadable == ()
    if len(chunks) > 1:
        del values[b"\x019.%d:a" % chunks[0]]
        found = read(values)
        assert only_wrong(found) == "a part of a log's times is missing"
        assert set(found.unreadable[0].fields) == set(values)


def test_a_log_without_any_chunk_is_told_where_it_is_known_to_be_one() -> None:
    """A counter of the same numbers has none, and is well."""
    state = {b"a": packed(*log_of(2))}
    assert read(state).unreadable == ()
    assert only_wrong(read(state, logs={9})) == "a part of a log's times is missing"
    assert read({b"a": packed(*COUNTER)}, logs={9}).unreadable == ()


def test_a_chunk_that_is_cut_off_is_told() -> None:
    """A time has seven bytes."""
    values = {b"a": packed(*log_of(2)), b"\x019.0:a": b"1234567123"}
    assert only_wrong(read(values)) == "a log's times are cut off"


def test_names_alone_say_whether_a_log_is_whole() -> None:
    """So that megabytes of times need not be read."""
    state = {b"a": packed(*log_of(18))}
    assert read(state, {b"a", b"\x019.0:a", b"\x019.1:a"}).unreadable == ()
    assert only_wrong(read(state, {b"a", b"\x019.1:a"})) == "a part of a log's times is missing"


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "it is empty"),
        (b"hello", "it is no array"),
        (b"\x81\xa1a\x01", "it is no array"),
        (b"\x93\x01\x02\xa1a", "something in it is no number"),
        (b"\x95\x01\x02", "it ends too early"),
        (b"\x92\x01\x02", "it holds no state"),
        (b"\x95\x01\x02\x00\x00\x00", "a limit's number is none"),
        (b"\x94\x01\x02\x04\x00", "it ends in the middle of a state"),
        (b"\x95\x01\x02\x05\x00\x01", "it ends in the middle of a state"),
        (b"\x95\xff\x02\x04\x00\x01", "its time is before 1970"),
        (b"\x95\x01\x02\x04\x00\x01\x00", "something follows the states"),
        (b"\xdd\xff\xff\xff\xff\x01", "it has 4,294,967,295 numbers"),
        (b"\x91\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00", "something in it is no number"),
    ],
)
def test_what_is_no_state_is_told(raw: bytes, why: str) -> None:
    """With the reason, its value, and what would have to go."""
    found = read({b"orders": raw, b"other": packed(*BUCKET)})
    assert only_wrong(found) == why
    (wrong,) = found.unreadable
    assert (wrong.field, wrong.value, wrong.fields) == (b"orders", raw, (b"orders",))
    assert set(found.rules) == {b"other"}


def test_parts_without_their_rule_are_told() -> None:
    """Nothing would ever remove them but the expiry."""
    found = read({b"\x021:gone": b"1", b"\x019.0:gone": b"1234567", b"\x02strange": b""})
    assert {wrong.field: wrong.value for wrong in found.unreadable} == {
        b"gone": None,
        b"\x02strange": b"",
    }
    left = read({b"a": packed(*BUCKET), b"\x021:a": b"left"})
    assert only_wrong(left) == "pieces that belong to no state"
    assert left.unreadable[0].fields == (b"\x021:a",)
    assert set(left.rules) == {b"a"}


@given(st.dictionaries(st.binary(max_size=20), st.binary(max_size=200), max_size=6))
def test_nothing_is_too_strange(values: dict[bytes, bytes]) -> None:
    """Every field is read, or told of, and never raises."""
    found = read(values)
    told = {name for wrong in found.unreadable for name in wrong.fields}
    assert {name for name in values if not is_part(name)} <= told | set(found.rules)


@given(st.binary(max_size=100))
def test_any_bytes_in_a_field_are_read_or_told_of(raw: bytes) -> None:
    """Whatever a version of tomorrow writes."""
    for start in (b"", b"\x95", b"\xdc\x00\x05"):
        found = read({b"a": start + raw})
        assert len(found.rules) + len(found.unreadable) == 1
