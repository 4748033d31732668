"""A rule's limits as the scripts read them: bytes that go along with every call."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from tollkeeper.core.errors import ConfigError
from tollkeeper.core.model import MICROS_PER_UNIT, AlgorithmName, Limit

NS_PER_US: Final = 1_000
# A rule's name is its field, so that an operator can read a hash; a longer one goes by its digest.
FIELD_BYTES_MAX: Final = 12
_DIGEST_MARK: Final = b"\x03"  # no name begins so: names are printable
TIME_BYTES: Final = 7

# As in state.lua. A leaky bucket admits what a token bucket does.
BUCKET, FIXED, COUNTER, LOG = 1, 2, 3, 4
KINDS: Final[dict[AlgorithmName, int]] = {
    "token_bucket": BUCKET,
    "leaky_bucket": BUCKET,
    "fixed_window": FIXED,
    "sliding_window_counter": COUNTER,
    "sliding_window_log": LOG,
}
NUMBERS_OF_KIND: Final = {BUCKET: 2, FIXED: 2, COUNTER: 3, LOG: 3}

# Times in one chunk of a log. Nine are 63 bytes, which keeps a small hash in its compact form; a
# long log is in longer chunks, so that a million times are not a hundred thousand fields.
_CHUNKS: Final = ((9, 9), (4_096, 64), (1_000_000, 512))


def field_of(rule: str) -> bytes:
    """The rule's field in a subject's hash."""
    name = rule.encode()
    if len(name) <= FIELD_BYTES_MAX:
        return name
    return _DIGEST_MARK + blake2b(name, digest_size=FIELD_BYTES_MAX - 1).digest()


def id_of(limit: Limit) -> int:
    """The limit's number among those of its rule, below 2**32; odd where a state has a second part.

    That is up to the algorithm, which is part of a limit's identity.
    """
    digest = blake2b(limit.identity.encode(), digest_size=4).digest()
    number = int.from_bytes(digest) % (2**31 - 1) + 1
    return 2 * number + (KINDS[limit.algorithm] in {COUNTER, LOG})


def encode_gate(limits: Sequence[Limit], rule: str) -> bytes:
    """The first argument of every script: the rule's field, and seven numbers a limit."""
    by_id: dict[int, Limit] = {}
    values: list[int] = []
    for limit in limits:
        number = id_of(limit)
        other = by_id.setdefault(number, limit)
        if other is not limit:  # about once in 200 million rules of four limits
            raise ConfigError(f"{other!r} and {limit!r} cannot be told apart; name one of them")
        values += [
            KINDS[limit.algorithm],
            number,
            limit.capacity,
            *_refill_per_us(limit),
            limit.window_ns // NS_PER_US,
            _last_number(limit),
        ]
    return b"".join((_array_head(1 + len(values)), _text(field_of(rule)), *map(_number, values)))


def encode_numbers(values: Sequence[int]) -> bytes:
    """Several numbers as one argument of a script."""
    return b"".join((_array_head(len(values)), *map(_number, values)))


def _refill_per_us(limit: Limit) -> tuple[int, int]:
    """The refill in lowest terms, as millionths of a unit over microseconds."""
    numerator, denominator = limit.micros_numerator, limit.ns_denominator
    for factor in (5, 5, 5, 2, 2, 2):
        if denominator % factor == 0:
            denominator //= factor
        else:
            numerator *= factor
    return numerator, denominator


def _last_number(limit: Limit) -> int:
    """For a bucket, in how many microseconds it fills from empty; for a log, times in a chunk."""
    if limit.algorithm == "sliding_window_log":
        return next(per_chunk for limit_max, per_chunk in _CHUNKS if limit.limit <= limit_max)
    numerator, denominator = _refill_per_us(limit)
    return -(-limit.capacity * MICROS_PER_UNIT * denominator // numerator)


def _array_head(length: int) -> bytes:
    return b"\xdc" + length.to_bytes(2)


def _text(value: bytes) -> bytes:
    return bytes((0xA0 | len(value),)) + value


def _number(value: int) -> bytes:
    """Msgpack of a number from 0 to 2**64 - 1, in the shortest form."""
    if value < 0x80:
        return bytes((value,))
    for mark, size in ((b"\xcc", 1), (b"\xcd", 2), (b"\xce", 4)):
        if value < 1 << 8 * size:
            return mark + value.to_bytes(size)
    return b"\xcf" + value.to_bytes(8)
