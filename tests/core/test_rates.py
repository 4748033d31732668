"""Rate strings: their meaning, and the errors of invalid ones."""

from __future__ import annotations

import decimal
from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import ConfigError, Limit, RateSyntaxError, parse_limit, parse_limits
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName
from ratekeeper.core.rates import EXAMPLE, LIMITS_MAX, TEXT_LENGTH_MAX, UNIT_NS

MINUTE, HOUR, DAY, WEEK = 60, 3_600, 86_400, 7 * 86_400

# The meaning of each spelling in ns, written out here instead of imported from the source.
SPELLINGS = {
    1_000_000: ["ms", "millisecond", "milliseconds"],
    1_000_000_000: ["s", "sec", "secs", "second", "seconds"],
    60_000_000_000: ["m", "min", "mins", "minute", "minutes"],
    3_600_000_000_000: ["h", "hr", "hrs", "hour", "hours"],
    86_400_000_000_000: ["d", "day", "days"],
    604_800_000_000_000: ["w", "week", "weeks"],
    2_592_000_000_000_000: ["mo", "month", "months"],
    31_536_000_000_000_000: ["y", "yr", "year", "years"],
}


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("100/minute", Limit(100, per=MINUTE)),
        ("100 / minute", Limit(100, per=MINUTE)),
        ("  100/minute  ", Limit(100, per=MINUTE)),
        ("100\t/\nminute", Limit(100, per=MINUTE)),
        ("100 per minute", Limit(100, per=MINUTE)),
        ("100 PER Minute", Limit(100, per=MINUTE)),
        ("100per minute", Limit(100, per=MINUTE)),
        ("5 per 30s", Limit(5, per=30)),
        ("5/30 s", Limit(5, per=30)),
        ("5/30seconds", Limit(5, per=30)),
        ("1/1ms", Limit(1, per=0.001)),
        ("3/1.5s", Limit(3, per=1.5)),
        ("3/0.5 minutes", Limit(3, per=30)),
        ("1_000/1_0s", Limit(1_000, per=10)),
        ("007/s", Limit(7, per=1)),
        ("1000000000/year", Limit(1_000_000_000, per=365 * DAY)),
        ("1/366d", Limit(1, per=366 * DAY)),
        ("1/52w", Limit(1, per=52 * WEEK)),
        ("10/month", Limit(10, per=30 * DAY)),
        ("10/mo", Limit(10, per=30 * DAY)),
        ("10/m", Limit(10, per=MINUTE)),
        ("10/M", Limit(10, per=MINUTE)),
        ("1000/hour burst 200", Limit(1_000, per=HOUR, burst=200)),
        ("1000/hour BURST 200", Limit(1_000, per=HOUR, burst=200)),
        ("10/s burst5", Limit(10, per=1, burst=5)),
        ("10/s burst 0", Limit(10, per=1)),
        ("100/minute refill 1s", Limit(100, per=60, refill_every=1)),
        ("100/minute burst 50 REFILL 1.5 seconds", Limit(100, 60, burst=50, refill_every=1.5)),
        ("100/minute refill second", Limit(100, per=60, refill_every=1)),
        ("10/s capacity 50", Limit(10, per=1, capacity=50)),
        ("10/s burst 5 capacity 15", Limit(10, per=1, burst=5)),
        ("100/minute refill 1s burst 50", Limit(100, 60, burst=50, refill_every=1)),
        ("5/minute sliding_window_log", Limit(5, 60, algorithm="sliding_window_log")),
        ("5 per minute FIXED_WINDOW", Limit(5, 60, algorithm="fixed_window")),
        ("5/m leaky_bucket burst 2", Limit(5, 60, algorithm="leaky_bucket", burst=2)),
        ("5/m burst 2 leaky_bucket", Limit(5, 60, algorithm="leaky_bucket", burst=2)),
        ("5 in any minute", Limit(5, 60, algorithm="sliding_window_log")),
        ("5 in any 10 minutes", Limit(5, 600, algorithm="sliding_window_log")),
        (" 1_000 IN  Any hour ", Limit(1_000, HOUR, algorithm="sliding_window_log")),
        ("5in any30s", Limit(5, 30, algorithm="sliding_window_log")),
    ],
)
def test_valid_strings(text: str, limit: Limit) -> None:
    """Each string is parsed as this limit."""
    assert parse_limit(text) == limit
    assert parse_limits(text) == (limit,)


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("10/s; 100/m", (Limit(10, per=1), Limit(100, per=MINUTE))),
        ("100/m;10/s", (Limit(100, per=MINUTE), Limit(10, per=1))),
        (
            "10/second; 1000/hour burst 200",
            (Limit(10, per=1), Limit(1_000, per=HOUR, burst=200)),
        ),
        ("10/s, 100/m", (Limit(10, per=1), Limit(100, per=MINUTE))),
        ("10/s|100/m", (Limit(10, per=1), Limit(100, per=MINUTE))),
        ("1/s , 1/m;1/h | 1/d", tuple(Limit(1, per=n) for n in (1, MINUTE, HOUR, DAY))),
        (
            "5/minute sliding_window_log, 100/day",
            (Limit(5, MINUTE, algorithm="sliding_window_log"), Limit(100, per=DAY)),
        ),
        (
            "5 in any minute; 20 in any day | 1/s",
            (
                Limit(5, MINUTE, algorithm="sliding_window_log"),
                Limit(20, DAY, algorithm="sliding_window_log"),
                Limit(1, per=1),
            ),
        ),
        ("1/s ; 1/m ; 1/h", (Limit(1, per=1), Limit(1, per=MINUTE), Limit(1, per=HOUR))),
    ],
)
def test_several_keep_their_order(text: str, limits: tuple[Limit, ...]) -> None:
    """Limits are in the order of the string."""
    assert parse_limits(text) == limits


def test_every_spelling_of_every_unit() -> None:
    """Only these are accepted, also in upper case."""
    assert {
        spelling: ns for ns, spellings in SPELLINGS.items() for spelling in spellings
    } == UNIT_NS
    for ns, spellings in SPELLINGS.items():
        for spelling in spellings:
            assert parse_limit(f"1/{spelling}").window_ns == ns
            assert parse_limit(f"1/{spelling.upper()}").window_ns == ns


@pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
def test_the_algorithm_is_passed_on(algorithm: AlgorithmName) -> None:
    """The argument is the algorithm of the rates that name none; the rate string wins."""
    assert parse_limit("5/s", algorithm=algorithm).algorithm == algorithm
    assert parse_limit("5 in any s", algorithm=algorithm).algorithm == "sliding_window_log"
    named, other = parse_limits("5/s fixed_window; 5/m", algorithm=algorithm)
    assert (named.algorithm, other.algorithm) == ("fixed_window", algorithm)
    assert parse_limit(f"5/s {algorithm}").algorithm == algorithm


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("sliding-window-log", "sliding_window_log"),
        ("Token_Buckt", "token_bucket"),
    ],
)
def test_a_misspelled_algorithm_is_recognised(word: str, meant: str) -> None:
    """Whatever the case, and with hyphens."""
    with pytest.raises(RateSyntaxError, match=rf"did you mean {meant}\?"):
        parse_limit(f"5/minute {word}")


WANTS_COUNT = "expected how many units, a whole number,"
WANTS_PER = "expected '/', 'per', 'in any' or 'at once for' after the number of units"
WANTS_LONGEST = "expected the longest time of a request, as in '5 at once for 60s',"
COUNTS_REQUESTS = (
    "'at once' counts requests in flight, so it has no burst, capacity, refill or other "
    "algorithm; expected ';' before another limit, or the end"
)
WANTS_ANY = "expected 'any' after 'in', as in '5 in any minute',"
NO_OPTION = (
    "'in any' is exact in every window, so it has no burst, capacity, refill or other algorithm; "
    "expected 'debt', ';' before another limit, or the end"
)
WANTS_UNIT = "expected a unit: ms, second, minute, hour, day, week, month or year"
WANTS_END = (
    "expected 'burst', 'capacity', 'refill', 'debt', an algorithm (token_bucket, leaky_bucket, "
    "sliding_window_log, sliding_window_counter, fixed_window), ';' before another limit, "
    "or the end"
)
MEANT_LOG = f"did you mean sliding_window_log? {WANTS_END}"
WANTS_WINDOW = "expected a time of 1 ms to 366 days in whole microseconds,"
TOO_MANY = "expected at most 1,000,000,000 units,"
TOO_LONG = "expected a number of at most 18 characters,"


@pytest.mark.parametrize(
    ("text", "pointer", "problem"),
    [
        ("", "^", WANTS_COUNT),
        ("   ", "   ^", WANTS_COUNT),
        ("minute", "^", WANTS_COUNT),
        ("/minute", "^", WANTS_COUNT),
        ("-5/minute", "^", WANTS_COUNT),
        ("1.5/minute", "^", WANTS_COUNT),
        ("ten/minute", "^", WANTS_COUNT),
        ("\uff15/minute", "^", WANTS_COUNT),  # a full-width 5
        ("\u0665/minute", "^", WANTS_COUNT),  # an Arabic-Indic 5
        ("_5/minute", "^", WANTS_COUNT),
        ("100", "   ^", WANTS_PER),
        ("100 minute", "    ^", WANTS_PER),
        ("100_/minute", "   ^", WANTS_PER),
        ("1__0/minute", " ^", WANTS_PER),
        ("1,000/minute", " ^", WANTS_PER),
        ("100 pro minute", "    ^", WANTS_PER),
        ("100 perminute", "    ^", WANTS_PER),
        ("1e3/minute", " ^", WANTS_PER),
        ("100/", "    ^", WANTS_UNIT),
        ("100/5", "     ^", WANTS_UNIT),
        ("100/fortnight", "    ^", WANTS_UNIT),
        ("100/minut", "    ^", WANTS_UNIT),
        ("100/mon", "    ^", WANTS_UNIT),
        ("100/5 furlongs", "      ^", WANTS_UNIT),
        ("100/-5s", "    ^", WANTS_UNIT),
        ("100/1.s", "     ^", WANTS_UNIT),
        ("100/.5s", "    ^", WANTS_UNIT),
        ("100//s", "    ^", WANTS_UNIT),
        ("100/0s", "    ^", WANTS_WINDOW),
        ("100/0.5ms", "    ^", WANTS_WINDOW),
        ("100/367d", "    ^", WANTS_WINDOW),
        ("100/2 years", "    ^", WANTS_WINDOW),
        ("100/1.0000001s", "    ^", WANTS_WINDOW),
        ("100/9999999999999999 years", "    ^", WANTS_WINDOW),
        ("100/minute!", "          ^", WANTS_END),
        ("100/minute & 5/s", "           ^", WANTS_END),
        ("100/minute, 5", "             ^", WANTS_PER),
        ("100/minute | ; 5/s", "             ^", WANTS_COUNT),
        ("5/minute sliding-window-log", "         ^", MEANT_LOG),
        ("5/sliding_window_log", "  ^", WANTS_UNIT),
        ("5 sliding_window_log/minute", "  ^", WANTS_PER),
        ("5/m fixed_window token_bucket", "                 ^", "expected one algorithm,"),
        ("5/m fixed_window fixed_window", "                 ^", "expected one algorithm,"),
        ("100/minute 5/s", "           ^", WANTS_END),
        ("100/minute burts 5", "           ^", WANTS_END),
        ("100/minute burst 5 burst 6", "                   ^", "expected 'burst' only once,"),
        ("1/m refill 1s REFILL 2s", "              ^", "expected 'refill' only once,"),
        ("100/minute refill", "                 ^", WANTS_UNIT),
        ("100/minute refill 1", "                   ^", WANTS_UNIT),
        ("100/minute refill 0s", "                  ^", WANTS_WINDOW),
        ("100/minute burst", "                ^", "expected the burst, a whole number,"),
        ("100/minute burst x", "                 ^", "expected the burst, a whole number,"),
        ("100/minute burst 1.5", "                 ^", "expected the burst, a whole number,"),
        ("100/minute capacity", "                   ^", "expected the capacity, a whole number,"),
        ("5 in a minute", "     ^", WANTS_ANY),
        ("5 in 30s", "     ^", WANTS_ANY),
        ("5 in anyminute", "     ^", WANTS_ANY),
        ("5 in", "    ^", WANTS_ANY),
        ("5 any minute", "  ^", WANTS_PER),
        ("5 at once", "         ^", WANTS_LONGEST),
        ("5 at 60s", "     ^", WANTS_LONGEST),
        ("5 at once for 60s burst 2", "                  ^", COUNTS_REQUESTS),
        ("5 in any", "        ^", WANTS_UNIT),
        ("5 in any 0s", "         ^", WANTS_WINDOW),
        ("5 in any minute burst 2", "                ^", NO_OPTION),
        ("5 in any minute fixed_window", "                ^", NO_OPTION),
        ("5 in any minute 6/s", "                ^", NO_OPTION),
        ("100/minute;", "           ^", WANTS_COUNT),
        ("100/minute;;5/s", "           ^", WANTS_COUNT),
        (";100/minute", "^", WANTS_COUNT),
        ("10/s; 100/minte", "          ^", WANTS_UNIT),
        ("1000000001/s", "^", TOO_MANY),
        ("5/s burst 1000000001", "          ^", TOO_MANY),
        ("5/s capacity 1000000001", "             ^", TOO_MANY),
        ("1234567890123456789/s", "^", TOO_LONG),
        ("1/1234567890123456789s", "  ^", TOO_LONG),
        ("1/1.00000000000000000s", "  ^", TOO_LONG),
    ],
)
def test_an_error_points_at_the_first_wrong_character(
    text: str, pointer: str, problem: str
) -> None:
    """The error shows the string, a pointer and correct examples."""
    with pytest.raises(RateSyntaxError) as caught:
        parse_limits(text)
    error = caught.value
    assert (error.text, error.position, error.problem) == (text, len(pointer) - 1, problem)
    assert str(error).split("\n") == [
        f"{problem} at character {len(pointer)}",
        f"    {text}",
        f"    {pointer}",
        f"write it like this: {EXAMPLE}",
    ]


@pytest.mark.parametrize(
    ("text", "algorithm", "pointer", "problem"),
    [
        ("5/s; 5/m burst 1 fixed_window", "token_bucket", "     ^", "fixed_window has no burst"),
        ("5/s; 0/s", "token_bucket", "     ^", "limit=0 is not a whole number"),
        ("5/s burst 1 capacity 9", "token_bucket", "^", "give burst=1 or capacity=9, not both"),
        ("5/s; 5/m burst 1", "fixed_window", "     ^", "fixed_window has no burst or capacity"),
        ("1000001/s", "sliding_window_log", "^", "limit=1000001 is not a whole number"),
        ("5/s; 1000001 in any s", "fixed_window", "     ^", "from 1 to 1,000,000;"),
        ("5/s refill 2s", "token_bucket", "^", "adds more units at once than the capacity of 5"),
        ("5/s refill 1s", "leaky_bucket", "^", "refill_every=1 is for token_bucket only"),
        ("1/366d capacity 101", "token_bucket", "^", "more than a century to refill"),
        ("999999999/s burst 2", "token_bucket", "^", "capacity (limit + burst)=1000000001"),
        ("5/s", "leaky", "^", "algorithm='leaky' is not known"),
    ],
)
def test_an_error_points_at_an_impossible_limit(
    text: str, algorithm: Any, pointer: str, problem: str
) -> None:
    """Valid syntax with impossible numbers is reported at the start of that limit."""
    with pytest.raises(RateSyntaxError) as caught:
        parse_limits(text, algorithm=algorithm)
    assert caught.value.position == len(pointer) - 1
    assert problem in caught.value.problem


@pytest.mark.parametrize("separator", [";", ",", "|"])
def test_parse_limit_rejects_several_limits(separator: str) -> None:
    """The error points at the separator."""
    with pytest.raises(RateSyntaxError, match="expected only one limit") as caught:
        parse_limit(f"5/s{separator} 6/m")
    assert caught.value.position == 3


def test_sixteen_limits_fit_one_string() -> None:
    """Sixteen are read, and the error points at the seventeenth."""
    rates = "; ".join(f"1/{n}s" for n in range(1, LIMITS_MAX + 2))
    assert len(parse_limits(rates[: rates.rindex(";")])) == LIMITS_MAX == 16
    with pytest.raises(RateSyntaxError, match="at most 16 limits") as caught:
        parse_limits(rates)
    assert rates[caught.value.position :] == "1/17s"


@pytest.mark.parametrize("text", [None, 5, 1.5, b"5/s", ["5/s"], Limit(5, per=1), object()])
def test_values_that_are_not_text_are_rejected(text: Any) -> None:
    """The error shows a correct rate string."""
    with pytest.raises(ConfigError, match="a rate is text such as 100/minute"):
        parse_limits(text)


def test_a_very_long_string_is_rejected_unread() -> None:
    """A thousand characters are read, one more is not, and the error does not repeat them."""
    padding = " " * (TEXT_LENGTH_MAX - 3)
    assert parse_limit(f"5/s{padding}") == Limit(5, per=1)
    with pytest.raises(ConfigError, match="at most 1000 characters") as caught:
        parse_limits(f"5/s {padding}")
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize("precision", [1, 3, 6])
def test_the_callers_decimal_context_does_not_matter(precision: int) -> None:
    """A program that calculates with 3 digits still gets the exact window."""
    with decimal.localcontext() as context:
        context.prec = precision
        assert parse_limit("1/86401.5s").window_ns == 86_401_500_000_000


@pytest.mark.parametrize("seconds", ["8500000.000003", "16777217.000001", "16777218.000001"])
def test_long_windows_with_microseconds(seconds: str) -> None:
    """A window of months may have any number of microseconds."""
    assert parse_limit(f"1/{seconds}s").window_ns == int(Fraction(seconds) * 10**9)


# ------------------------------------------------------------------------------------ fuzz


def _parses_or_is_a_config_error(text: str) -> None:
    try:
        found: tuple[Limit, ...] | ConfigError = parse_limits(text)
    except ConfigError as error:
        found = error
    if isinstance(found, RateSyntaxError):
        assert 0 <= found.position <= len(text)
        assert found.text == text
    elif isinstance(found, tuple):
        assert 1 <= len(found) <= LIMITS_MAX
        assert all(isinstance(limit, Limit) for limit in found)


_GRAMMAR = [
    "/",
    ";",
    ",",
    "|",
    " ",
    "fixed_window",
    "per",
    "in",
    "any",
    "burst",
    "capacity",
    "refill",
    "s",
    "m",
    "month",
    "ms",
]
_NUMBERS = ["0", "5", "10", "1.5", "1_0", "_", ".", "-", "9" * 18, "9" * 19]
_STRANGE = ["\u0663", "\u00b2", "\u2167", "\u212a", "\u017f", "\n", "\x00", "\ud800"]
_PIECES = st.sampled_from([*_GRAMMAR, *_NUMBERS, *_STRANGE])


@given(st.text(max_size=60) | st.lists(_PIECES, max_size=12).map("".join))
def test_any_text_is_limits_or_a_config_error(text: str) -> None:
    """No text raises another error."""
    _parses_or_is_a_config_error(text)


@pytest.mark.parametrize(
    "text",
    [
        "9" * TEXT_LENGTH_MAX,
        "9" * 10_000_000,
        "9" * 500 + "/s",
        "1/" + "9" * 500 + "s",
        "1/1." + "0" * 900 + "1s",
        "1" + "_1" * 400 + "/s",
        "1/" + "s" * 900,
        "1/s" + " " * 900 + "x",
        "1/s;" * 250,
        " " * 1_000,
        "1/s burst " * 100,
        "\u0663" * 1_000,
        "\ud800" * 1_000,
    ],
    ids=range(13),
)
def test_long_text_is_rejected_at_once(text: str) -> None:
    """Parsing is not quadratic: a thousand of any character are rejected quickly."""
    _parses_or_is_a_config_error(text)


@st.composite
def _spec(draw: st.DrawFn) -> tuple[str, tuple[int, int, int]]:
    """A rate string with its count, window in ns and capacity."""
    unit_ns, unit = draw(
        st.sampled_from([(ns, unit) for ns, units in SPELLINGS.items() for unit in units])
    )
    number = draw(st.integers(1, 366 * 86_400 * 10**9 // unit_ns))
    count = draw(st.integers(1, 10**9 // 4))
    burst = draw(st.integers(0, 3 * count))
    space = st.sampled_from(["", " ", "  ", "\t"])
    per = draw(st.sampled_from(["/", " per "]))
    window = unit if number == 1 and draw(st.booleans()) else f"{number}{draw(space)}{unit}"
    written = f"{count:_}" if draw(st.booleans()) else f"{count}"
    tail = f" burst{draw(space)}{burst}" if burst else ""
    text = f"{draw(space)}{written}{per}{draw(space)}{window}{tail}{draw(space)}"
    return text, (count, number * unit_ns, count + burst)


@given(st.lists(_spec(), min_size=1, max_size=4), st.sampled_from(";,|"))
def test_a_generated_string_reads_as_its_numbers(
    specs: list[tuple[str, tuple[int, int, int]]], separator: str
) -> None:
    """With any spacing and spelling, the numbers are read as written."""
    limits = parse_limits(separator.join(text for text, _ in specs))
    read = [(limit.limit, limit.window_ns, limit.capacity) for limit in limits]
    assert read == [numbers for _, numbers in specs]


@given(
    algorithm=st.sampled_from(UNIT_ALGORITHMS),
    units=st.integers(1, 10**6),
    window_us=st.integers(1_000, 366 * 86_400 * 10**6) | st.sampled_from([1_000_000, 60_000_000]),
    capacity=st.integers(0, 3 * 10**6),
    refill_us=st.just(0) | st.integers(1_000, 10**9),
)
def test_the_text_of_a_limit_reads_as_that_limit(
    algorithm: AlgorithmName, units: int, window_us: int, capacity: int, refill_us: int
) -> None:
    """`str` of any limit without a name is its rate string."""
    per, refill = timedelta(microseconds=window_us), timedelta(microseconds=refill_us)
    is_bucket = algorithm in {"token_bucket", "leaky_bucket"}
    try:
        limit = Limit(
            units,
            per,
            algorithm,
            capacity=capacity if is_bucket else 0,
            refill_every=refill if algorithm == "token_bucket" else 0,
        )
    except ConfigError:
        return  # a century to refill, or a step larger than the capacity
    assert parse_limit(str(limit)) == limit
