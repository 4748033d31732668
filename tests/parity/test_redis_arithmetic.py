"""The arithmetic of the scripts is exact in doubles, for the largest and smallest limits."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from importlib.resources import files
from itertools import count
from math import ceil

import pytest
from hypothesis import strategies as st

from ratekeeper.core.model import MICROS_PER_UNIT, REFILL_NS_MAX, UNITS_MAX, WINDOW_NS_MAX, Limit
from ratekeeper.decide.store import LocalStore
from ratekeeper.testing import ManualClock
from tests.conformance.stores import STORES
from tests.parity.in_microseconds import NOW_NS_MAX, NS_PER_US, Pair
from tests.parity.traces import Step
from tests.promises.strategies import limit_of, promise
from tests.redis_servers import running

pytestmark = pytest.mark.server

YEAR_US = WINDOW_NS_MAX // NS_PER_US
CENTURY_US = REFILL_NS_MAX // NS_PER_US

# The code that every script begins with: its most difficult function.
MULTIPLY_DIVIDE = (
    files("ratekeeper.decide.stores.redis")
    .joinpath("lua/arithmetic.lua")
    .read_text(encoding="utf-8")
    + """
    local answers = {}
    for i = 1, #ARGV, 3 do
        local whole, rest =
            multiply_divide(tonumber(ARGV[i]), tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]))
        answers[#answers + 1] = string.format('%.0f %.0f', whole, rest)
    end
    return answers
    """
)

# Numbers of every magnitude, and just beside the powers of two and ten.
units = st.integers(1, 10) | st.integers(1, UNITS_MAX) | st.sampled_from([999_999_937, UNITS_MAX])
windows_us = (
    st.sampled_from([1_000, 1_001, 10**6, 86_400 * 10**6, YEAR_US - 1, YEAR_US])
    | st.integers(1_000, YEAR_US)
    | st.integers(10, 44).flatmap(lambda bits: st.integers(2**bits - 2, 2**bits + 2))
)
# A fraction from 0 to 1.
parts = st.sampled_from([Fraction(0), Fraction(1)]) | st.fractions(0, 1, max_denominator=10**15)


@st.composite
def refills(draw: st.DrawFn) -> tuple[int, int, int]:
    """A time in microseconds, at most until the bucket is full, and the reduced rate."""
    rate = Fraction(draw(units) * MICROS_PER_UNIT, draw(windows_us))
    full_us = min(ceil(draw(units) * MICROS_PER_UNIT / rate), CENTURY_US)
    elapsed_us = max(round(full_us * draw(parts)) - draw(st.integers(0, 2)), 0)
    return elapsed_us, rate.numerator, rate.denominator


@st.composite
def fadings(draw: st.DrawFn) -> tuple[int, int, int]:
    """The rest of a window, the count of the previous one, and the window."""
    window_us = draw(windows_us)
    left_us = max(round(window_us * draw(parts)) - draw(st.integers(0, 2)), 0)
    return left_us, draw(units), window_us


@st.composite
def borders(draw: st.DrawFn) -> tuple[int, int, int]:
    """Numbers just beside the range of a double, and the largest ones: n and x × n / d below 2**50,
    d below 2**45, x a century."""
    n = draw(st.integers(2**49, 2**50 - 1) | st.integers(1, 2**50 - 1))
    d = draw(st.integers(2**44, 2**45 - 1) | st.integers(1, 2**45 - 1))
    x = draw(st.sampled_from([2**53 // n, 2**54 // n, d, 2**49 * d // n]))
    return min(max(x + draw(st.integers(-3, 3)), 0), 2**50 * d // n, CENTURY_US), n, d


@promise(300, triples=st.lists(refills() | fadings() | borders(), min_size=1, max_size=100))
def test_products_are_divided_exactly(triples: list[tuple[int, int, int]]) -> None:
    """Quotient and remainder of x × n / d are exact, although the product exceeds a double."""
    numbers = [number for triple in triples for number in triple]
    answers = running("single").admin.eval(MULTIPLY_DIVIDE, 0, *numbers)
    expected = [divmod(x * n, d) for x, n, d in triples]
    assert answers == [f"{whole} {rest}" for whole, rest in expected]


EXTREMES = [
    limit_of("token_bucket", 1, YEAR_US),
    limit_of("token_bucket", 1, YEAR_US, 100),
    limit_of("token_bucket", UNITS_MAX, 1_000),
    limit_of("token_bucket", 1, 1_000, UNITS_MAX),
    limit_of("token_bucket", UNITS_MAX, YEAR_US),
    limit_of("token_bucket", 999_999_937, YEAR_US - 1, UNITS_MAX),
    limit_of("token_bucket", 10_000_019, YEAR_US - 1, UNITS_MAX),
    limit_of("leaky_bucket", 999_999_937, 1_001, UNITS_MAX),
    limit_of("leaky_bucket", 3, YEAR_US - 1, 299),
    limit_of("sliding_window_counter", UNITS_MAX, 1_000),
    limit_of("sliding_window_counter", UNITS_MAX, YEAR_US),
    limit_of("sliding_window_counter", 999_999_937, YEAR_US - 1),
    limit_of("fixed_window", UNITS_MAX, YEAR_US - 1),
]

_numbers = count()


@pytest.fixture(scope="module")
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(scope="module")
def store(clock: ManualClock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStore]:
    """One store for all examples, which have separate subjects."""
    (factory,) = (each for each in STORES if each.name == "redis")
    with factory.open(clock, 0, tmp_path_factory.mktemp("redis")) as opened:
        yield opened


@pytest.mark.server
@pytest.mark.parametrize("limit", EXTREMES, ids=str)
@promise(60, data=st.data())
def test_the_largest_numbers_agree(
    limit: Limit, store: LocalStore, clock: ManualClock, data: st.DataObject
) -> None:
    """After a microsecond, part of a unit, part of a refill or a century, Redis equals the
    reference."""
    pair = Pair(store, clock, (limit,))
    subject = str(next(_numbers))
    unit_us = limit.window_ns // NS_PER_US // limit.limit + 1
    refill_us = limit.capacity * limit.window_ns // NS_PER_US // limit.limit + 1
    spans_us = st.sampled_from([1, 2, unit_us, refill_us, limit.window_ns // NS_PER_US, CENTURY_US])
    verbs = st.sampled_from(["check", "check", "check", "peek", "refund"])
    costs = st.sampled_from([1, limit.capacity]) | st.integers(1, limit.capacity)
    now_ns = 0
    for _ in range(data.draw(st.integers(2, 12))):
        now_ns += round(data.draw(spans_us) * data.draw(parts)) * NS_PER_US
        if now_ns >= NOW_NS_MAX:
            break
        step = Step(data.draw(verbs), subject, data.draw(costs), now_ns)
        got, wanted = pair.apply(step)
        assert got == wanted, step
