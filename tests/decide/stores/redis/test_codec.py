"""Limits as the scripts read them, and the scripts' answers as decisions.

That both sides agree on every trace is shown in `tests/parity`; here are the bytes themselves.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.redis_servers import Single, running
from tollkeeper.core.errors import CapacityError, ConfigError, StoreUnavailable
from tollkeeper.core.model import ALGORITHM_NAMES, UNITS_MAX, WINDOW_NS_MAX, Limit
from tollkeeper.core.rates import parse_limits
from tollkeeper.decide.stores.redis import encode
from tollkeeper.decide.stores.redis.codec import Answers
from tollkeeper.decide.stores.redis.encode import (
    FIELD_BYTES_MAX,
    encode_gate,
    encode_numbers,
    field_of,
    id_of,
)

YEAR = 366 * 86_400
NUMBERS_A_LIMIT = 7


def unpacked(packed: bytes) -> list[Any]:
    """Msgpack of one array of numbers and short texts, read by its specification."""
    assert packed[0] == 0xDC
    length, place, values = int.from_bytes(packed[1:3]), 3, []
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
    assert len(values) == length
    return values


def limit_of(algorithm: str, units: int = 100, per: float = 60) -> Limit:
    return Limit(units, per=per, algorithm=algorithm)  # type: ignore[arg-type]  # of the names


@pytest.mark.parametrize(
    ("limit", "numbers"),
    [
        # kind, capacity, millionths of a unit over microseconds, window, time to fill
        (Limit(100, per=60), (1, 100, 5, 3, 60_000_000, 60_000_000)),
        (Limit(10, per=1, burst=5), (1, 15, 10, 1, 1_000_000, 1_500_000)),
        (Limit(3, per=7, algorithm="leaky_bucket"), (1, 3, 3, 7, 7_000_000, 7_000_000)),
        (Limit(7, per=60, algorithm="fixed_window"), (2, 7, 7, 60, 60_000_000, 60_000_000)),
        (limit_of("sliding_window_counter", 7), (3, 7, 7, 60, 60_000_000, 60_000_000)),
        # … and for a log, times in a chunk
        (limit_of("sliding_window_log", 9), (4, 9, 3, 20, 60_000_000, 9)),
        (limit_of("sliding_window_log", 10), (4, 10, 1, 6, 60_000_000, 64)),
        (limit_of("sliding_window_log", 4_096), (4, 4_096, 1024, 15, 60_000_000, 64)),
        (limit_of("sliding_window_log", 4_097), (4, 4_097, 4097, 60, 60_000_000, 512)),
    ],
)
def test_a_gate_is_seven_numbers_a_limit(limit: Limit, numbers: tuple[int, ...]) -> None:
    """Its kind, its identity and what its arithmetic needs, after the rule's field."""
    kind, *rest = numbers
    assert unpacked(encode_gate([limit], "orders")) == [b"orders", kind, id_of(limit), *rest]


def test_several_limits_stand_in_their_order() -> None:
    """One gate has them all, however different, up to more than msgpack's short arrays hold."""
    limits = [
        limit_of(algorithm, per=per)
        for algorithm, per in product(ALGORITHM_NAMES, (1, 60, 3_600, 86_400))
    ]
    values = unpacked(encode_gate(limits, ""))
    assert values[0] == b""
    assert values[2::NUMBERS_A_LIMIT] == [id_of(limit) for limit in limits]
    assert len(values) == 1 + NUMBERS_A_LIMIT * 20


def test_the_server_reads_the_same_numbers() -> None:
    """Redis' own msgpack, at every length of a number that a gate can have."""
    server = cast("Single", running("single"))
    edges = [edge + step for edge in (0x80, 1 << 8, 1 << 16, 1 << 32, 1 << 53) for step in (-1, 0)]
    numbers = [0, 1, *(edge for edge in edges if edge <= 1 << 53)]
    script = """
        local found = cmsgpack.unpack(ARGV[1])
        for i, value in ipairs(found) do found[i] = string.format('%.0f', value) end
        return found
    """
    found = server.admin.eval(script, 0, encode_numbers(numbers))
    assert [int(text) for text in found] == numbers == unpacked(encode_numbers(numbers))


@given(
    units=st.integers(1, UNITS_MAX),
    window_us=st.integers(1_000, WINDOW_NS_MAX // 1_000),
    algorithm=st.sampled_from(["token_bucket", "fixed_window", "sliding_window_counter"]),
)
def test_numbers_are_exact_and_fit_the_scripts(units: int, window_us: int, algorithm: str) -> None:
    """The refill is the limit's own, in lowest terms, and small enough for doubles."""
    limit = limit_of(algorithm, units, window_us / 1_000_000)
    window_us = limit.window_ns // 1_000
    values = unpacked(encode_gate([limit], "rule"))
    _, _, _, capacity, numerator, denominator, window, full_us = values
    assert (capacity, window) == (limit.capacity, window_us)
    rate = Fraction(numerator, denominator)
    assert rate == Fraction(units * 1_000_000, window_us)
    assert (rate.numerator, rate.denominator) == (numerator, denominator)
    assert numerator < 2**50
    assert denominator < 2**45
    # Up: a bucket is not full a moment before it is.
    assert full_us == -(-capacity * 1_000_000 * denominator // numerator)
    assert full_us < 2**53


@pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
def test_a_limit_keeps_its_number_when_its_amount_changes(algorithm: str) -> None:
    """Consumption is kept under the identity: a raised limit finds what was spent."""
    assert id_of(limit_of(algorithm, 100)) == id_of(limit_of(algorithm, 5_000))
    assert id_of(limit_of(algorithm)) != id_of(limit_of(algorithm, per=61))
    wide = algorithm in {"sliding_window_counter", "sliding_window_log"}
    for number in (id_of(limit_of(algorithm, per=per)) for per in range(1, 500)):
        assert number % 2 == wide
        assert 2 <= number < 2**32


def test_limits_that_cannot_be_told_apart_are_refused() -> None:
    """Two of one identity; a name tells them apart."""
    with pytest.raises(ConfigError, match="cannot be told apart; name one of them"):
        encode_gate([Limit(5, per=60), Limit(9, per=60)], "rule")
    encode_gate([Limit(5, per=60), Limit(9, per=60, name="second")], "rule")


def test_two_that_share_a_number_by_chance_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would count as one: better an error when the limiter is made."""
    monkeypatch.setattr(encode, "id_of", lambda limit: 2)
    with pytest.raises(ConfigError, match="cannot be told apart"):
        encode_gate([Limit(5, per=60), Limit(5, per=61)], "rule")


@pytest.mark.parametrize("rule", ["", "a", "orders", "é" * 6, "x" * 12, "限制" * 2])
def test_a_short_rule_is_its_own_field(rule: str) -> None:
    """So that an operator can read a hash: up to 12 bytes of UTF-8."""
    assert field_of(rule) == rule.encode()


@pytest.mark.parametrize("rule", ["x" * 13, "é" * 7, "限制" * 3, "x" * 128, "é" * 128])
def test_a_long_rule_is_its_digest(rule: str) -> None:
    """Twelve bytes that no name can be: the first is not printable. Any difference tells."""
    field = field_of(rule)
    assert len(field) == FIELD_BYTES_MAX
    assert not field[:1].decode().isprintable()
    assert field == field_of(rule)
    assert field != field_of(rule[:-1] + "y")
    assert field != field_of(rule + "x")


# One limit, and answers as check.lua gives them: the time, then the last time and the amount.
NOW_US = 1_700_000_000_000_000
MINUTE = Limit(10, per=60)


def test_a_fresh_key_has_its_whole_quota() -> None:
    """-1 for the last time means that there is no state."""
    decision = Answers((MINUTE,), "rule").check([NOW_US, -1, 0], 3)
    assert (decision.allowed, decision.remaining, decision.rule) == (True, 7, "rule")
    assert decision.reset_after_ns == 18_000_000_000


def test_a_denial_says_when_to_come_back() -> None:
    """A negative time is a denial; waits are whole microseconds, rounded up."""
    third = Limit(3, per=1)
    answers = Answers((third,), "")
    decision = answers.check([~NOW_US, NOW_US, 3_000_000], 1)
    assert not decision.allowed
    assert decision.retry_after_ns == 333_334_000
    early = answers.check([~NOW_US, NOW_US, 3_000_000], 1, early_ns=999)
    assert early.retry_after_ns == 333_333_001


def test_a_peek_tells_what_remains_now() -> None:
    """Where a check would pass, nothing of it is taken off."""
    answers = Answers((MINUTE,), "")
    assert answers.peek([NOW_US, NOW_US, 4_000_000], 3).remaining == 6
    assert not answers.peek([~NOW_US, NOW_US, 9_000_000], 3).allowed


def test_a_cost_that_can_never_fit_is_an_error() -> None:
    """For each algorithm, alone and among others."""
    for algorithm in ALGORITHM_NAMES:
        wide = algorithm in {"sliding_window_counter", "sliding_window_log"}
        state = [-1, 0, 0] if wide else [-1, 0]
        limit = limit_of(algorithm, 10)
        with pytest.raises(CapacityError, match="11 can never fit"):
            Answers((limit,), "").check([~NOW_US, *state], 11)
        with pytest.raises(CapacityError, match="11 can never fit"):
            Answers((Limit(50, per=60), limit), "").check([~NOW_US, -1, 0, *state], 11)


def test_a_server_that_disagrees_is_a_defect_and_says_so() -> None:
    """It charged what we would deny, or the other way round: nobody goes on silently."""
    answers = Answers((MINUTE,), "")
    for answer in ([NOW_US, NOW_US, 10_000_000], [~NOW_US, -1, 0]):
        with pytest.raises(StoreUnavailable, match="this is a defect of Tollkeeper"):
            answers.check(answer, 1)


def test_a_log_is_decided_from_its_summary() -> None:
    """Its last time, how many live, and the one that must leave first."""
    answers = Answers((limit_of("sliding_window_log", 3),), "")
    assert answers.check([NOW_US, NOW_US - 5, 2, 0], 1).remaining == 0
    denied = answers.check([~NOW_US, NOW_US - 5, 3, NOW_US - 9], 1)
    assert denied.retry_after_ns == (60_000_000 - 9) * 1_000
    assert denied.reset_after_ns == (60_000_000 - 5) * 1_000


def test_what_was_spent_is_told_apart_from_what_was_granted() -> None:
    """Own units first; what they did not cover came from the grant, which ends at its time."""
    ends_us = NOW_US + 1_000_000
    answers = Answers((MINUTE,), "")
    assert answers.spent([NOW_US, NOW_US, 8_000_000], 2) == [2, 0, 0]
    assert answers.spent([NOW_US, NOW_US, 8_000_000, 50, ends_us], 5) == [2, 3, ends_us]
    assert answers.spent([NOW_US, NOW_US, 8_000_000, 50, NOW_US], 2) == [2, 0, 0]


@pytest.mark.parametrize(
    "answer", [[], [None], [5], [5, None, None], ["x", 1, 2], [5, 1], [5, 1, 2, 3, 4, 5, 6, 7]]
)
@pytest.mark.parametrize("rates", ["5/second", "5/second; 10/minute"])
def test_what_no_script_of_ours_says_is_an_error_of_the_store(
    answer: list[Any], rates: str
) -> None:
    """A list of the wrong shape: StoreUnavailable, and nothing else gets out."""
    answers = Answers(parse_limits(rates), "")
    for read in (answers.check, answers.peek):
        with pytest.raises(StoreUnavailable):
            read(answer, 1)


# States of two limits, as of some time before now; None where there is none yet.
_ALGORITHMS_PLAIN = [name for name in ALGORITHM_NAMES if name != "sliding_window_log"]
_AGES_US = st.integers(0, 20_000_000)


@st.composite
def plain_answers(draw: st.DrawFn) -> tuple[Answers, list[int]]:
    """One or two limits without a log, and the script's answer to a check that was allowed."""
    names = draw(st.lists(st.sampled_from(_ALGORITHMS_PLAIN), min_size=1, max_size=2))
    limits = tuple(
        Limit(draw(st.integers(5, 40)), per=10, algorithm=cast("Any", name), name=f"n{index}")
        for index, name in enumerate(names)
    )
    answer = [NOW_US]
    for limit in limits:
        wide = limit.algorithm == "sliding_window_counter"
        if draw(st.booleans()):
            answer += [-1, 0, 0][: 3 if wide else 2]
            continue
        used = draw(st.integers(0, limit.limit))
        answer.append(NOW_US - draw(_AGES_US))
        if wide:
            answer.append(draw(st.integers(0, limit.limit - used)))
        answer.append(used * (1 if limit.algorithm == "fixed_window" or wide else 1_000_000))
    return Answers(limits, "rule"), answer


def denied(answer: list[int]) -> list[int]:
    """The same states, and a denial."""
    return [~answer[0], *answer[1:]]


@given(plain_answers(), st.integers(1, 3))
def test_as_many_fit_as_pass_one_after_another(found: tuple[Answers, list[int]], cost: int) -> None:
    """Those that went as one get the decisions of singles, and one more would be denied as told."""
    answers, answer = found
    count = answers.fits(denied(answer), cost)
    if not count:
        return
    decisions = answers.checks(answer, cost, count)
    assert decisions[0] == answers.check(answer, cost)
    # Remaining falls by the cost each time, and the last leaves less than one more would take.
    remaining = [decision.remaining for decision in decisions]
    assert remaining == sorted(remaining, reverse=True)
    assert remaining[-1] < cost
    follows = answers.after(answer, count * cost, cost)
    assert follows is not None
    told = answers.check(follows, cost)
    assert not told.allowed
    assert told.remaining == remaining[-1]
    assert told.retry_after_ns > 0
    with pytest.raises(StoreUnavailable, match="this is a defect"):
        answers.checks(answer, cost, count + 1)


def test_checks_that_drew_on_a_grant_are_told_one_by_one() -> None:
    """Own units first, and what remains counts both."""
    answers = Answers((MINUTE,), "")
    answer = [NOW_US, NOW_US, 8_000_000, 5, NOW_US + 1_000_000]
    assert answers.fits(denied(answer), 2) == 3
    assert [each.remaining for each in answers.checks(answer, 2, 3)] == [5, 3, 1]
    assert answers.after(answer, 6, 2) is None


@pytest.mark.parametrize(
    ("alive", "cost", "count", "fits", "tells"),
    [(3, 1, 1, 0, True), (3, 1, 2, 0, False), (1, 1, 5, 2, True), (0, 2, 3, 1, True)],
)
def test_a_log_tells_how_many_fit_and_of_a_denial_only_what_was_asked(
    alive: int, cost: int, count: int, fits: int, tells: bool
) -> None:
    """The time that must leave first is that of what was asked for."""
    answers = Answers((limit_of("sliding_window_log", 3),), "")
    answer = [~NOW_US, NOW_US - 5, alive, NOW_US - 9]
    assert answers.fits(answer, cost) == fits
    assert answers.tells(answer, cost, count) is tells


def test_what_follows_the_last_of_a_log_is_known_only_if_it_was_empty() -> None:
    """Then all of its times are now; else the oldest is one that nobody told."""
    answers = Answers((limit_of("sliding_window_log", 3),), "")
    assert answers.after([NOW_US, -1, 0, 0], 3, 1) == [~NOW_US, NOW_US, 3, NOW_US]
    assert answers.after([NOW_US, NOW_US - 5, 1, 0], 2, 1) is None
    assert answers.after([NOW_US, NOW_US - 5, 1, 0], 1, 1) == [~NOW_US, NOW_US, 2, 0]


@pytest.mark.parametrize(("alive", "cost", "lasts"), [(3, 1, True), (2, 2, True), (2, 3, False)])
def test_a_logs_denial_lasts_where_one_unit_is_missing(alive: int, cost: int, lasts: bool) -> None:
    """With more missing, some come back before the last, and it does not tell when."""
    answers = Answers((limit_of("sliding_window_log", 3),), "")
    assert answers.lasts([~NOW_US, NOW_US - 5, alive, NOW_US - 9], cost) is lasts
