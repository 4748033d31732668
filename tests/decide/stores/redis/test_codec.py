"""Limits as bytes, and replies as decisions.

`tests/parity` shows that the scripts and the reference agree on every trace.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.errors import CapacityError, ConfigError, StoreUnavailable
from ratekeeper.core.model import UNIT_ALGORITHMS, UNITS_MAX, WINDOW_NS_MAX, Limit
from ratekeeper.core.rates import parse_limits
from ratekeeper.decide.stores.redis import codec
from ratekeeper.decide.stores.redis.codec import (
    BUCKETS,
    FIELD_BYTES,
    BucketPlaces,
    ReplyDecoder,
    bucket_name,
    encode_limits,
    encode_sequence,
    id_of,
    is_bucket,
    is_log,
)
from tests.redis_servers import Single, running

YEAR = 366 * 86_400
NUMBERS_A_LIMIT = 9


def unpacked(packed: bytes) -> list[Any]:
    """Decode msgpack of numbers and short texts, one after the other."""
    place, values = 0, []
    sizes = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
    while place < len(packed):
        mark, place = packed[place], place + 1
        if mark < 0x80:
            values.append(mark)
            continue
        if 0xA0 <= mark < 0xC0:
            size = mark & 0x1F
            values.append(packed[place : place + size])
        else:
            size = sizes[mark]
            values.append(int.from_bytes(packed[place : place + size]))
        place += size
    return values


def limit_of(algorithm: str, units: int = 100, per: float = 60) -> Limit:
    return Limit(units, per=per, algorithm=algorithm)  # type: ignore[arg-type]  # of the names


@pytest.mark.parametrize(
    ("limit", "numbers"),
    [
        # kind, capacity, millionths of a unit over microseconds, window, time to fill, refill step,
        # and the debt
        (Limit(100, per=60), (1, 100, 5, 3, 60_000_000, 60_000_000, 1, 1_000)),
        (
            Limit(100, per=60, refill_every=1.5, debt=7),
            (1, 100, 5, 3, 60_000_000, 60_000_000, 1_500_000, 7),
        ),
        (Limit(10, per=1, burst=5), (1, 15, 10, 1, 1_000_000, 1_500_000, 1, 6_000)),
        (Limit(3, per=7, algorithm="leaky_bucket"), (1, 3, 3, 7, 7_000_000, 7_000_000, 1, 257)),
        (Limit(7, per=60, algorithm="fixed_window"), (2, 7, 7, 60, 60_000_000, 60_000_000, 1, 70)),
        (limit_of("sliding_window_counter", 7), (3, 7, 7, 60, 60_000_000, 60_000_000, 1, 70)),
        (limit_of("sliding_window_log", 9), (4, 9, 3, 20, 60_000_000, 0, 1, 90)),
    ],
)
def test_each_limit_is_encoded_as_nine_numbers(limit: Limit, numbers: tuple[int, ...]) -> None:
    """The numbers are the limit's kind, its id and its arithmetic."""
    kind, *rest = numbers
    assert unpacked(encode_limits([limit])) == [kind, id_of(limit), *rest]


def test_several_limits_are_encoded_in_their_order() -> None:
    """Each has nine numbers."""
    limits = [
        limit_of(algorithm, per=per)
        for algorithm, per in product(UNIT_ALGORITHMS, (1, 60, 3_600, 86_400))
    ]
    values = unpacked(encode_limits(limits))
    assert values[1::NUMBERS_A_LIMIT] == [id_of(limit) for limit in limits]
    assert len(values) == NUMBERS_A_LIMIT * 20


def test_the_server_reads_the_same_numbers() -> None:
    """Redis' own msgpack decodes numbers of every length that occurs."""
    server = cast("Single", running("single"))
    edges = [edge + step for edge in (0x80, 1 << 8, 1 << 16, 1 << 32, 1 << 53) for step in (-1, 0)]
    numbers = [0, 1, *(edge for edge in edges if edge <= 1 << 53)]
    script = """
        local found = {cmsgpack.unpack(ARGV[1])}
        for i, value in ipairs(found) do found[i] = string.format('%.0f', value) end
        return found
    """
    found = server.admin.eval(script, 0, encode_sequence(numbers))
    assert [int(text) for text in found] == numbers == unpacked(encode_sequence(numbers))


@given(
    units=st.integers(1, UNITS_MAX),
    window_us=st.integers(1_000, WINDOW_NS_MAX // 1_000),
    algorithm=st.sampled_from(["token_bucket", "fixed_window", "sliding_window_counter"]),
)
def test_numbers_are_exact_and_fit_the_scripts(units: int, window_us: int, algorithm: str) -> None:
    """The refill is exact, in lowest terms, and small enough for doubles."""
    limit = limit_of(algorithm, units, window_us / 1_000_000)
    window_us = limit.window_ns // 1_000
    values = unpacked(encode_limits([limit]))
    _, _, capacity, numerator, denominator, window, full_us, step_us, debt = values
    assert step_us == 1
    assert (capacity, window, debt) == (limit.capacity, window_us, limit.debt_max)
    rate = Fraction(numerator, denominator)
    assert rate == Fraction(units * 1_000_000, window_us)
    assert (rate.numerator, rate.denominator) == (numerator, denominator)
    assert numerator < 2**50
    assert denominator < 2**45
    # Up: a bucket is not full a moment before it is.
    assert full_us == -(-capacity * 1_000_000 * denominator // numerator)
    assert full_us < 2**53


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_a_limit_keeps_its_id_when_its_amount_changes(algorithm: str) -> None:
    """The state is stored under the id, so a raised limit keeps its consumption."""
    assert id_of(limit_of(algorithm, 100)) == id_of(limit_of(algorithm, 5_000))
    assert id_of(limit_of(algorithm)) != id_of(limit_of(algorithm, per=61))
    kind = {"sliding_window_counter": 1, "sliding_window_log": 3}.get(algorithm, 0)
    for number in (id_of(limit_of(algorithm, per=per)) for per in range(1, 500)):
        assert number % 4 == kind
        assert 2 <= number < 2**32


def test_limits_with_the_same_identity_are_rejected() -> None:
    """A name makes them different."""
    with pytest.raises(ConfigError, match="cannot be distinguished; name one of them"):
        encode_limits([Limit(5, per=60), Limit(9, per=60)])
    encode_limits([Limit(5, per=60), Limit(9, per=60, name="second")])


def test_limits_whose_ids_collide_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would share a state, so making the limiter raises an error."""
    monkeypatch.setattr(codec, "id_of", lambda limit: 2)
    with pytest.raises(ConfigError, match="cannot be distinguished"):
        encode_limits([Limit(5, per=60), Limit(5, per=61)])


# One limit, and decoder as check.lua gives them: the time, then the last time and the amount.
NOW_US = 1_700_000_000_000_000
MINUTE = Limit(10, per=60)


def test_a_fresh_key_has_its_whole_quota() -> None:
    """-1 for the last time means that there is no state."""
    decision = ReplyDecoder((MINUTE,), "rule").check([NOW_US, -1, 0], 3)
    assert (decision.allowed, decision.remaining, decision.rule) == (True, 7, "rule")
    assert decision.reset_after_ns == 18_000_000_000


def test_a_denial_has_a_retry_time() -> None:
    """A negative time is a denial; waits are whole microseconds, rounded up."""
    third = Limit(3, per=1)
    decoder = ReplyDecoder((third,), "")
    decision = decoder.check([~NOW_US, NOW_US, 3_000_000], 1)
    assert not decision.allowed
    assert decision.retry_after_ns == 333_334_000
    early = decoder.check([~NOW_US, NOW_US, 3_000_000], 1, early_ns=999)
    assert early.retry_after_ns == 333_333_001


def test_a_peek_returns_the_units_that_remain_now() -> None:
    """If the check would be allowed, its cost is not subtracted."""
    decoder = ReplyDecoder((MINUTE,), "")
    assert decoder.peek([NOW_US, NOW_US, 4_000_000], 3).remaining == 6
    assert not decoder.peek([~NOW_US, NOW_US, 9_000_000], 3).allowed


def test_a_cost_that_can_never_fit_is_an_error() -> None:
    """Each algorithm raises the error, alone and among other limits."""
    for algorithm in UNIT_ALGORITHMS:
        wide = algorithm in {"sliding_window_counter", "sliding_window_log"}
        state = [-1, 0, 0] if wide else [-1, 0]
        limit = limit_of(algorithm, 10)
        with pytest.raises(CapacityError, match="11 can never fit"):
            ReplyDecoder((limit,), "").check([~NOW_US, *state], 11)
        with pytest.raises(CapacityError, match="11 can never fit"):
            ReplyDecoder((Limit(50, per=60), limit), "").check([~NOW_US, -1, 0, *state], 11)


def test_a_reply_that_contradicts_the_reference_is_a_defect() -> None:
    """The script allowed a check that the reference denies, or the other way round."""
    decoder = ReplyDecoder((MINUTE,), "")
    for reply in ([NOW_US, NOW_US, 10_000_000], [~NOW_US, -1, 0]):
        with pytest.raises(StoreUnavailable, match="this is a defect of Ratekeeper"):
            decoder.check(reply, 1)


def test_a_log_is_decided_from_its_summary() -> None:
    """The summary has the last time, the entries' number, and the entry that must expire first."""
    decoder = ReplyDecoder((limit_of("sliding_window_log", 3),), "")
    assert decoder.check([NOW_US, NOW_US - 5, 2, 0], 1).remaining == 0
    denied = decoder.check([~NOW_US, NOW_US - 5, 3, NOW_US - 9], 1)
    assert denied.retry_after_ns == (60_000_000 - 9) * 1_000
    assert denied.reset_after_ns == (60_000_000 - 5) * 1_000


def test_spent_units_are_split_into_own_and_granted_ones() -> None:
    """Own units come first, with the time of the charge; the rest came from the grant."""
    ends_us = NOW_US + 1_000_000
    decoder = ReplyDecoder((MINUTE,), "")
    assert decoder.spent([NOW_US, NOW_US, 8_000_000], 2) == [2, NOW_US, 0, 0]
    assert decoder.spent([NOW_US, NOW_US, 8_000_000, 50, ends_us], 5) == [2, NOW_US, 3, ends_us]
    assert decoder.spent([NOW_US, NOW_US, 8_000_000, 50, NOW_US], 2) == [2, NOW_US, 0, 0]
    assert decoder.spent([NOW_US, NOW_US + 7, 8_000_000], 2) == [2, NOW_US + 7, 0, 0]


@pytest.mark.parametrize(
    "reply",
    [[], [None], [5], [5, None, None], ["x", 1, 2], [5, 1], [5, *range(11)]],
)
@pytest.mark.parametrize("rates", ["5/second", "5/second; 10/minute"])
def test_a_reply_that_no_script_gives_is_a_store_error(reply: list[Any], rates: str) -> None:
    """A list of the wrong shape raises StoreUnavailable and nothing else."""
    decoder = ReplyDecoder(parse_limits(rates), "")
    for read in (decoder.check, decoder.peek):
        with pytest.raises(StoreUnavailable):
            read(reply, 1)


# States of two limits at some time before now; None for a limit without a state.
_ALGORITHMS_PLAIN = [name for name in UNIT_ALGORITHMS if name != "sliding_window_log"]
_AGES_US = st.integers(0, 20_000_000)


@st.composite
def plain_answers(draw: st.DrawFn) -> tuple[ReplyDecoder, list[int]]:
    """Draw one or two limits without a log, and a reply that allowed a check."""
    names = draw(st.lists(st.sampled_from(_ALGORITHMS_PLAIN), min_size=1, max_size=2))
    limits = tuple(
        Limit(draw(st.integers(5, 40)), per=10, algorithm=cast("Any", name), name=f"n{index}")
        for index, name in enumerate(names)
    )
    reply = [NOW_US]
    for limit in limits:
        wide = limit.algorithm == "sliding_window_counter"
        if draw(st.booleans()):
            reply += [-1, 0, 0][: 3 if wide else 2]
            continue
        used = draw(st.integers(0, limit.limit))
        reply.append(NOW_US - draw(_AGES_US))
        if wide:
            reply.append(draw(st.integers(0, limit.limit - used)))
        reply.append(used * (1 if limit.algorithm == "fixed_window" or wide else 1_000_000))
    return ReplyDecoder(limits, "rule"), reply


@given(plain_answers(), st.integers(1, 3), st.integers(2, 50))
def test_requests_in_a_row_are_decided_as_single_checks(
    found: tuple[ReplyDecoder, list[int]], cost: int, requests: int
) -> None:
    """Each of them spends what the next one finds; those without room have the same denial."""
    decoder, reply = found
    room = decoder.peek(reply, 0).remaining
    admitted = min(room // cost, requests)
    now_us = reply[0] if admitted else ~reply[0]
    decisions = decoder.checks_in_turn([now_us, *reply[1:], admitted], cost, requests)
    assert decisions[0] == decoder.check([now_us, *reply[1:]], cost)
    left = [room - cost * min(number + 1, admitted) for number in range(requests)]
    assert [each.remaining for each in decisions] == left
    assert [each.allowed for each in decisions] == [True] * admitted + [False] * (
        requests - admitted
    )
    with pytest.raises(StoreUnavailable, match="this is a defect"):
        decoder.checks_in_turn([reply[0], *reply[1:], room // cost + 1], cost, room // cost + 1)


def test_requests_in_a_row_use_a_grant_after_the_limit() -> None:
    """Own units come first; the remaining units count both."""
    decoder = ReplyDecoder((MINUTE,), "")
    reply = [NOW_US, NOW_US, 8_000_000, 5, NOW_US + 1_000_000, 3]
    decisions = decoder.checks_in_turn(reply, 2, 4)
    assert [each.remaining for each in decisions] == [5, 3, 1, 1]


# ── Places in buckets ──────────────────────────────────────────────────────────────────────────


def places(rule: str = "r", hash_key: str = "", prefix: str = "rk") -> BucketPlaces:
    return BucketPlaces((limit_of("token_bucket"),), rule, prefix, hash_key)


def field_in(gate: bytes) -> bytes:
    return cast("bytes", unpacked(gate)[0])


def test_a_place_never_changes() -> None:
    """Nodes of all versions find the same states."""
    limit = limit_of("token_bucket")
    (key,), gate = places("orders").of("user:42")
    assert (key, field_in(gate).hex()) == (b"rk:{%yBO}", "c2d38a14c49a05a6")
    assert unpacked(gate)[1:] == unpacked(encode_limits((limit,)))
    log = limit_of("sliding_window_log")
    both = BucketPlaces((log, limit), "orders", "rk", "").of("user:42")
    assert both[0] == (b"rk:{%yBO}", b"rk:{%yBO}log:wtOKFMSaBaYitxNX")
    assert BucketPlaces((log,), "orders", "rk", "").of("user:42")[0] == both[0][1:]


@given(st.text(max_size=60), st.text(max_size=20), st.text(max_size=16))
def test_rules_of_a_subject_share_its_bucket(subject: str, rule: str, hash_key: str) -> None:
    """So they are in one slot of a cluster. Their fields differ."""
    one, other = (places(name, hash_key).of(subject) for name in (rule, f"{rule} 2"))
    assert one[0] == other[0]
    assert is_bucket(one[0][0])
    assert field_in(one[1]) != field_in(other[1])
    assert len(field_in(one[1])) == FIELD_BYTES


def test_the_rules_of_a_store_hash_a_subject_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bucket is cached, for as many subjects as the cache has room for."""
    named: list[int] = []
    monkeypatch.setattr(codec, "bucket_name", lambda number: named.append(number) or b"AAA")
    rules = [places(rule, prefix="hashed once") for rule in ("a", "b")]
    for subject in ("user:1", "user:2", "user:1"):
        assert len({rule.of(subject)[1] for rule in rules}) == 2
    assert len(named) == 2
    for number in range(10, 10 + codec._CACHED_SUBJECTS):
        rules[0].of(f"user:{number}")
    rules[0].of("user:1")
    assert len(named) == 3 + codec._CACHED_SUBJECTS


def test_subjects_spread_over_all_buckets() -> None:
    """With another hash key, the same subjects are elsewhere."""
    subjects = [f"user:{number}" for number in range(2_000)]
    one, other = ({places(hash_key=key).of(each)[0][0] for each in subjects} for key in ("", "key"))
    assert len(one) > 1_980
    assert len(one & other) < 100
    assert len({bucket_name(number) for number in range(BUCKETS)}) == BUCKETS


def test_each_log_has_a_key_of_its_own() -> None:
    """It depends on the subject, the rule and the limit; no bucket has such a key."""
    limits = [limit_of("sliding_window_log", per=per) for per in (1, 60)]
    keys = [
        key
        for rule in ("r", "s")
        for subject in ("user:1", "user:2", "{%AAA}")
        for key in BucketPlaces(limits, rule, "rk", "").of(subject)[0]
    ]
    assert len(set(keys)) == 12
    assert all(is_log(key) and not is_bucket(key) for key in keys)
