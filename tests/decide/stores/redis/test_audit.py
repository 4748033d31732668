"""Reading states outside the scripts: valid states are read, others are reported."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.decide.stores.redis.audit import (
    PIECE_BYTES,
    StoredState,
    StoredSubject,
    is_part,
    read_subject,
)
from ratekeeper.decide.stores.redis.codec import encode_numbers

BASE_US = 1_763_000_000_000_000
# A bucket (an even id), a counter and a log (odd ones), and units granted (a negative one).
BUCKET = (BASE_US, 60_000, 4, 0, 3_000_000)
COUNTER = (BASE_US, 60_000, 5, 0, 12, 30)


def packed(*numbers: int) -> bytes:
    return encode_numbers(numbers)


def log_of(kept: int, start: int = 0, per_chunk: int = 9) -> tuple[int, ...]:
    return (BASE_US, 60_000, 11, 0, start, kept * 1_024 + per_chunk)


def only_wrong(found: StoredSubject) -> str:
    (wrong,) = found.unreadable
    return wrong.why


def test_states_are_read_with_their_numbers() -> None:
    """A state has two or three numbers, according to its id."""
    found = read_subject({b"orders": packed(*BUCKET, *COUNTER[2:])})
    rule = found.rules[b"orders"]
    assert (rule.base_us, rule.ttl_ms) == (BASE_US, 60_000)
    assert rule.states == (StoredState(4, 0, 3_000_000, 0), StoredState(5, 0, 12, 30))
    assert (found.states, found.unreadable) == (2, ())
    assert rule.needed_until_us == BASE_US + 60_000_000


def test_doubles_and_negative_numbers_are_numbers() -> None:
    """Lua writes a fraction as a double, and a grant has a negative id."""
    raw = (
        b"\x96\xcb\x43\x15\x50\xf7\xdc\xa7\x00\x00" + b"\xcd\x03\xe8" + b"\xfc\x00\x05\xcd\x07\xd0"
    )
    rule = read_subject({b"a": raw}).rules[b"a"]
    assert rule.base_us == 1.5e15
    assert rule.states == (StoredState(-4, 0, 5, 2_000),)
    assert rule.states[0].has_end


def test_granted_units_are_part_of_their_limit() -> None:
    """A limit and its grant are one state, and the hash is needed until the grant ends."""
    # -5 as a fixed number of msgpack.
    raw = b"\x99" + b"".join(packed(each)[3:] for each in BUCKET) + b"\xfc\x00\x02"
    ends = BASE_US + 3_600_000_000
    found = read_subject({b"a": raw + packed(ends)[3:]})
    assert found.states == 1
    assert found.rules[b"a"].needed_until_us == ends


def test_leased_units_are_part_of_their_limit() -> None:
    """A limit and its holds are one state, and the hash is needed until the last hold ends."""
    ends = BASE_US + 3_000_000
    holds = b"".join(
        b"\xd3"
        + (-BUCKET[2] - group * 2**33).to_bytes(8, signed=True)
        + b"\x00\x02"
        + packed(end)[3:]
        for group, end in ((1, ends - 1_000_000), (2, ends))
    )
    raw = b"\x9d" + b"".join(packed(each)[3:] for each in BUCKET) + holds
    found = read_subject({b"a": raw})
    assert found.unreadable == ()
    assert found.states == 1
    assert found.rules[b"a"].needed_until_us == max(ends, BASE_US + BUCKET[1] * 1_000)


def test_long_states_continue_in_pieces() -> None:
    """The pieces are not counted as states of their own."""
    limits = [number for place in range(12) for number in (100 + 2 * place, 0, 123_456)]
    raw = packed(BASE_US, 60_000, *limits)
    pieces = [raw[start : start + PIECE_BYTES] for start in range(0, len(raw), PIECE_BYTES)]
    names = [b"orders", *(b"\x02%d:orders" % number for number in range(1, len(pieces)))]
    values = dict(zip(names, pieces, strict=True))
    assert len(values) > 1
    assert (read_subject(values).states, read_subject(values).unreadable) == (12, ())
    missing = {name: value for name, value in values.items() if name != names[-1]}
    found = read_subject(missing)
    assert (only_wrong(found), found.rules) == ("it ends too early", {})
    assert set(found.unreadable[0].fields) == set(missing)


@pytest.mark.parametrize("kept", [1, 9, 10, 25])
@pytest.mark.parametrize("start", [0, 5, 9])
def test_a_log_needs_all_its_chunks(kept: int, start: int) -> None:
    """No script can decide on a log that lacks a chunk."""
    chunks = range(start // 9, (start + kept - 1) // 9 + 1)
    values = {b"\x0111.%d:a" % number: b"1234567" * 9 for number in chunks}
    values[b"a"] = packed(*log_of(kept, start))
    assert read_subject(values).unreadable == ()
    if len(chunks) > 1:
        del values[b"\x0111.%d:a" % chunks[0]]
        found = read_subject(values)
        assert only_wrong(found) == "a part of a log's times is missing"
        assert set(found.unreadable[0].fields) == set(values)


def test_a_log_without_chunks_is_reported() -> None:
    """A window counter with the same numbers has no chunks and is valid."""
    state = {b"a": packed(*log_of(2))}
    assert only_wrong(read_subject(state)) == "a part of a log's times is missing"
    assert read_subject({b"a": packed(*COUNTER)}).unreadable == ()


def test_a_chunk_that_is_cut_off_is_reported() -> None:
    """A time has seven bytes."""
    values = {b"a": packed(*log_of(2)), b"\x0111.0:a": b"1234567123"}
    assert only_wrong(read_subject(values)) == "a log's times are cut off"


def test_the_names_show_whether_a_log_is_complete() -> None:
    """The audit checks a log by its field names, without reading megabytes of times."""
    state = {b"a": packed(*log_of(18))}
    assert read_subject(state, {b"a", b"\x0111.0:a", b"\x0111.1:a"}).unreadable == ()
    assert (
        only_wrong(read_subject(state, {b"a", b"\x0111.1:a"}))
        == "a part of a log's times is missing"
    )


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "it is empty"),
        (b"hello", "it is not an array"),
        (b"\x81\xa1a\x01", "it is not an array"),
        (b"\x93\x01\x02\xa1a", "something in it is no number"),
        (b"\x95\x01\x02", "it ends too early"),
        (b"\x92\x01\x02", "it contains no state"),
        (b"\x95\x01\x02\x00\x00\x00", "the number of a limit is invalid"),
        (b"\x94\x01\x02\x04\x00", "it ends in the middle of a state"),
        (b"\x95\x01\x02\x05\x00\x01", "it ends in the middle of a state"),
        (b"\x95\xff\x02\x04\x00\x01", "its time is before 1970"),
        (b"\x95\x01\x02\x04\x00\x01\x00", "bytes follow the states"),
        (b"\xdd\xff\xff\xff\xff\x01", "it has 4,294,967,295 numbers"),
        (b"\x91\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00", "something in it is no number"),
    ],
)
def test_an_invalid_field_is_reported(raw: bytes, why: str) -> None:
    """The report has the reason, the value, and the fields to remove."""
    found = read_subject({b"orders": raw, b"other": packed(*BUCKET)})
    assert only_wrong(found) == why
    (wrong,) = found.unreadable
    assert (wrong.field, wrong.value, wrong.fields) == (b"orders", raw, (b"orders",))
    assert set(found.rules) == {b"other"}


def test_parts_without_their_rule_are_reported() -> None:
    """Only the expiry of the key would remove them."""
    found = read_subject({b"\x021:gone": b"1", b"\x0111.0:gone": b"1234567", b"\x02strange": b""})
    assert {wrong.field: wrong.value for wrong in found.unreadable} == {
        b"gone": None,
        b"\x02strange": b"",
    }
    left = read_subject({b"a": packed(*BUCKET), b"\x021:a": b"left"})
    assert only_wrong(left) == "pieces that belong to no state"
    assert left.unreadable[0].fields == (b"\x021:a",)
    assert set(left.rules) == {b"a"}


@given(st.dictionaries(st.binary(max_size=20), st.binary(max_size=200), max_size=6))
def test_any_hash_is_read_or_reported(values: dict[bytes, bytes]) -> None:
    """Every field is read or reported, and none raises an error."""
    found = read_subject(values)
    unreadable = {name for wrong in found.unreadable for name in wrong.fields}
    assert {name for name in values if not is_part(name)} <= unreadable | set(found.rules)


@given(st.binary(max_size=100))
def test_any_value_is_read_or_reported(raw: bytes) -> None:
    """Any bytes are read or reported, such as the values of a future version."""
    for start in (b"", b"\x95", b"\xdc\x00\x05"):
        found = read_subject({b"a": start + raw})
        assert len(found.rules) + len(found.unreadable) == 1


# ── Buckets
# ─────────────────────────────────────────────────────────────────────────────────────────

NAME = bytes(range(1, 9))  # begins like a chunk of a log, which only a hash of logs has


def bucket_value(*numbers: int, ends_s: int = 1_763_000_060) -> bytes:
    parts = [BASE_US.to_bytes(7), ends_s.to_bytes(4), *(packed(each)[3:] for each in numbers)]
    return b"".join(parts)


def test_states_of_a_bucket_are_read() -> None:
    """The value has no length; the second when the states end takes the place of the ttl."""
    found = read_subject({NAME: bucket_value(*BUCKET[2:], *COUNTER[2:])}, in_bucket=True)
    rule = found.rules[NAME]
    assert rule.states == (StoredState(4, 0, 3_000_000, 0), StoredState(5, 0, 12, 30))
    assert rule.needed_until_us == pytest.approx(1_763_000_060_000_000)
    assert (found.states, found.unreadable) == (2, ())


def test_long_states_of_a_bucket_continue_in_pieces() -> None:
    """A piece without its state is reported."""
    numbers = [number for place in range(12) for number in (100 + 2 * place, 0, 123_456)]
    raw = bucket_value(*numbers)
    pieces = {NAME: raw[:PIECE_BYTES], b"\x021:" + NAME: raw[PIECE_BYTES:]}
    assert len(raw) < 2 * PIECE_BYTES
    assert read_subject(pieces, in_bucket=True).states == 12
    lost = read_subject({b"\x021:" + NAME: b"x"}, in_bucket=True)
    assert only_wrong(lost) == "parts of a rule's states, without the rule's own field"


@pytest.mark.parametrize("raw", [b"", b"garbage", bucket_value(), bucket_value(4, 0), b"\xc1" * 30])
def test_a_damaged_state_of_a_bucket_is_reported(raw: bytes) -> None:
    """The other states of the bucket are read."""
    values = {NAME: raw, b"12345678": bucket_value(*BUCKET[2:])}
    found = read_subject(values, in_bucket=True)
    assert [each.field for each in found.unreadable] == [NAME]
    assert found.states == 1


@given(st.dictionaries(st.binary(max_size=12), st.binary(max_size=80), max_size=6))
def test_no_content_of_a_bucket_raises_an_error(values: dict[bytes, bytes]) -> None:
    """Whatever another program wrote."""
    read_subject(values, in_bucket=True)
