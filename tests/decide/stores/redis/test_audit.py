"""Reading buckets outside the scripts: valid states are counted, others are reported."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.decide.stores.redis.audit import PIECE_BYTES, Bucket, read_bucket
from ratekeeper.decide.stores.redis.codec import encode_sequence

BASE_US = 1_763_000_000_000_000
ENDS_S = 1_763_000_060
HEAD = BASE_US.to_bytes(7) + ENDS_S.to_bytes(4)
FIELD = b"12345678"
# A bucket (an even id), and a counter (an odd one).
BUCKET, COUNTER = (4, 0, 3_000_000), (5, 0, 12, 30)


def packed(*numbers: int) -> bytes:
    """Return numbers as a state holds them: msgpack without the head of the array."""
    return encode_sequence(numbers)


def state(*numbers: int) -> bytes:
    return HEAD + packed(*numbers)


def only_wrong(found: Bucket) -> str:
    (wrong,) = found.unreadable
    return wrong.why


def cut(raw: bytes, name: bytes = FIELD) -> dict[bytes, bytes]:
    """Return the fields of a value: the rule's, and its pieces."""
    pieces = [raw[start : start + PIECE_BYTES] for start in range(0, len(raw), PIECE_BYTES)]
    names = [name, *(b"\x02%d:%b" % (number, name) for number in range(1, len(pieces)))]
    return dict(zip(names, pieces, strict=True))


def test_states_are_counted_by_their_limits() -> None:
    """A state has two or three numbers, according to its id; all fields count."""
    found = read_bucket({FIELD: state(*BUCKET, *COUNTER), b"other123": state(*BUCKET)})
    assert found == Bucket(3, ENDS_S * 1e6, ())


@pytest.mark.parametrize("mark", [-5, -5 - 2**33, -5 - 2 * 2**33])
def test_granted_and_leased_units_are_part_of_their_limit(mark: int) -> None:
    """They are no state of their own, and the bucket is needed until they end."""
    ends_us = BASE_US + 3_600_000_000
    number = b"\xd3" + mark.to_bytes(8, signed=True)
    found = read_bucket({FIELD: state(*COUNTER) + number + packed(0, 7, ends_us)})
    assert found == Bucket(1, ends_us, ())


def test_doubles_are_numbers() -> None:
    """Lua writes a fraction as a double."""
    raw = HEAD + packed(4) + b"\xcb\x3f\xe0\x00\x00\x00\x00\x00\x00" + packed(7)
    assert read_bucket({FIELD: raw}).states == 1


@pytest.mark.parametrize("limits", range(1, 60, 7))
def test_pieces_of_a_long_value_are_joined(limits: int) -> None:
    """A value has 64 bytes at most, and continues in other fields."""
    numbers = [each for number in range(limits) for each in (4 * number + 4, 0, 1_000_000)]
    assert read_bucket(cut(state(*numbers))) == Bucket(limits, ENDS_S * 1e6, ())


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "it ends too early"),
        (HEAD, "it ends too early"),
        (state(*BUCKET)[:-1], "it ends too early"),
        (HEAD + packed(5, 0, 12), "it ends too early"),
        (HEAD + packed(0, 0, 1), "the number of a limit is invalid"),
        (HEAD + b"\xcb\x3f\xe0" + b"\x00" * 6 + packed(0, 1), "the number of a limit is invalid"),
        (HEAD + b"\x81\xa1v\x02", "something in it is no number"),
        (HEAD + packed(4, 0) + b"\xcb\x7f\xf8" + b"\x00" * 6, "something in it is no number"),
        (b"\x10" + HEAD[1:] + packed(*BUCKET), "another version has written it"),
    ],
)
def test_other_values_are_unreadable(raw: bytes, why: str) -> None:
    """The field is reported with its reason, and the others are read."""
    found = read_bucket({FIELD: raw, b"other123": state(*BUCKET)})
    assert (only_wrong(found), found.states) == (why, 1)
    assert found.unreadable[0][:2] == (FIELD, raw)
    assert found.unreadable[0].fields == (FIELD,)


def test_an_unreadable_field_takes_its_pieces_along() -> None:
    """They mean nothing without it."""
    fields = {FIELD: b"garbage", b"\x021:" + FIELD: b"x"}
    assert read_bucket(fields).unreadable[0].fields == tuple(fields)


def test_pieces_without_a_state_are_reported() -> None:
    """Of a rule whose own field is gone or short, or with no owner in the name."""
    alone = b"\x021:" + FIELD
    found = read_bucket({alone: b"x"})
    assert (found.unreadable[0].field, found.unreadable[0].value) == (FIELD, None)
    assert "without the rule's own field" in only_wrong(found)
    assert only_wrong(read_bucket({FIELD: state(*BUCKET), alone: b"x"})).startswith("pieces that")
    assert read_bucket({b"a longer name": b"x"}).unreadable[0].fields == (b"a longer name",)


@given(st.dictionaries(st.binary(max_size=12), st.binary(max_size=80), max_size=5))
def test_any_fields_are_read_or_reported(fields: dict[bytes, bytes]) -> None:
    """No contents raise an error, and each field that was not read is in one report."""
    found = read_bucket(fields)
    reported = [name for wrong in found.unreadable for name in wrong.fields]
    assert len(reported) == len(set(reported))
    assert set(reported) <= set(fields)
