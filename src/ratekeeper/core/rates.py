"""Rate strings: `100/minute`, `5 in any minute`, `20 at once for 60s`, `100/day; 10/second`.

    rates  = rate *( ( ";" | "," | "|" ) rate )
    rate   = count ( "/" | "per" ) time *option | count "in any" time [ "debt" count ]
           | count "at once for" time
    option = "burst" count | "capacity" count | "refill" time | "debt" count | algorithm
    time   = [ number ] unit
    count  = digits, with "_" between them if you like
    number = count, or a decimal such as 1.5

`5 in any minute` is a `sliding_window_log`: no minute has more than 5, wherever it starts. Its only
option is `debt`: a burst would be more than 5 in some minute.

`20 at once for 60s` counts requests in flight (`in_flight`): at most 20 at the same time, and each
for at most 60 s unless its slot is renewed. It has no options either.

The options of a rate are in any order, each at most once. `algorithm` is the name of one, as in
`5/minute fixed_window`. A rate that names an algorithm, or has `in any` or `at once`, has that one;
the `algorithm` that the caller passes applies to the others. `str` of a Limit is its rate string.

Units go from milliseconds to years. Each has a few spellings, and a prefix of a spelling is not a
spelling: `m` is a minute and `month` is a month, never the other way round. A month has 30 days and
a year 365, because a limiter measures time and knows no calendar.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import timedelta
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, Final, NoReturn

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ConfigError, RateSyntaxError, show
from ratekeeper.core.model import (
    BUCKETS,
    IN_FLIGHT,
    REFILL_NS_MAX,
    UNIT_ALGORITHMS,
    UNITS_MAX,
    WINDOW_NS_MAX,
    WINDOW_NS_MIN,
    WINDOW_NS_STEP,
    AlgorithmName,
    Limit,
    units_max_of,
)

LimitsArgument = str | Limit | Sequence[str | Limit]
"""Limits as callers pass them: a rate string ("100/minute"), a Limit, or several of either."""

TEXT_LENGTH_MAX: Final = 1_000
LIMITS_MAX: Final = 16
EXAMPLE: Final = "100/minute, 5 in any minute, 20 at once for 60s, or 10/second; 1000/day burst 9"

_SECOND: Final = NS_PER_SECOND
_UNIT_SPELLINGS: Final[dict[int, str]] = {
    _SECOND // 1_000: "ms millisecond milliseconds",
    _SECOND: "s sec secs second seconds",
    60 * _SECOND: "m min mins minute minutes",
    3_600 * _SECOND: "h hr hrs hour hours",
    86_400 * _SECOND: "d day days",
    7 * 86_400 * _SECOND: "w week weeks",
    30 * 86_400 * _SECOND: "mo month months",
    365 * 86_400 * _SECOND: "y yr year years",
}
UNIT_NS: Final[dict[str, int]] = {
    spelling: ns for ns, spellings in _UNIT_SPELLINGS.items() for spelling in spellings.split()
}

_TOKEN: Final = re.compile(
    r"(?P<number>[0-9](?:_?[0-9])*(?:\.[0-9]+)?)|(?P<word>[A-Za-z]+(?:_[A-Za-z]+)*)"
)
_SEPARATOR: Final = re.compile(r"[;,|]")
_SPACE: Final = re.compile(r"\s*")
# The words that may follow a rate, and the arguments of Limit that they give.
_OPTIONS: Final = {
    "burst": "burst",
    "capacity": "capacity",
    "refill": "refill_every",
    "debt": "debt",
}
_DEBT: Final = "the debt, a whole number"
_DASHED: Final = re.compile(r"[A-Za-z_-]{1,40}")
# Longer numbers are rejected before they are converted: int() of a million digits takes seconds.
_DIGITS_MAX: Final = 18


def parse_limits(text: str, *, algorithm: AlgorithmName = "token_bucket") -> tuple[Limit, ...]:
    """Return the limits in a rate string, in its order.

    >>> parse_limits("10/second; 1000/hour burst 200")
    (Limit(10, per=1), Limit(1000, per=3600, capacity=1200))
    >>> parse_limits("5 in any minute, 100/day")
    (Limit(5, per=60, algorithm='sliding_window_log'), Limit(100, per=86400))

    `algorithm` is that of the rates that name none and are not `in any` time or `at once`. Raises
    RateSyntaxError, which points at the first wrong character.
    """
    return _Parser(text, algorithm).limits()


def parse_limit(text: str, *, algorithm: AlgorithmName = "token_bucket") -> Limit:
    """Return the only limit in a rate string.

    >>> parse_limit("5/30s", algorithm="fixed_window")
    Limit(5, per=30, algorithm='fixed_window')
    """
    limits = parse_limits(text, algorithm=algorithm)
    if len(limits) != 1:
        position = len(_SEPARATOR.split(text, maxsplit=1)[0])
        raise RateSyntaxError(
            text, position, "expected only one limit, but another follows", "100/minute"
        )
    return limits[0]


class _Parser:
    """A cursor over the text. Each method reads one part of the grammar, or raises an error."""

    def __init__(self, text: str, algorithm: AlgorithmName) -> None:
        if not isinstance(text, str):
            raise ConfigError(f"a rate is text such as {EXAMPLE}; got {show(text)}")
        if len(text) > TEXT_LENGTH_MAX:
            raise ConfigError(f"a rate string has at most {TEXT_LENGTH_MAX} characters")
        self._text = text
        self._algorithm = algorithm
        self._position = 0
        self._skip_space()

    def limits(self) -> tuple[Limit, ...]:
        limits = [self._limit()]
        while not self._at_end():
            separator = _SEPARATOR.match(self._text, self._position)
            if separator is None:
                self._fail(
                    f"{self._meant_algorithm()}expected 'burst', 'capacity', 'refill', "
                    f"'debt', an algorithm ({', '.join(UNIT_ALGORITHMS)}), ';' before another "
                    f"limit, or the end"
                )
            self._advance(separator.end())
            if len(limits) == LIMITS_MAX:
                self._fail(f"expected at most {LIMITS_MAX} limits, but another follows")
            limits.append(self._limit())
        return tuple(limits)

    def _limit(self) -> Limit:
        start = self._position
        count = self._count("how many units, a whole number")
        if self._take_word("in"):
            window_ns, options = self._in_any(count)
        elif self._take_word("at"):
            window_ns, options = self._at_once(count)
        elif self._take_mark("/") or self._take_word("per"):
            window_ns, options = self._window_ns(), self._options()
        else:
            self._fail("expected '/', 'per', 'in any' or 'at once for' after the number of units")
        try:
            return Limit(
                count,
                timedelta(microseconds=window_ns // WINDOW_NS_STEP),
                **{"algorithm": self._algorithm, **options},
            )
        except ConfigError as error:
            raise RateSyntaxError(self._text, start, str(error), EXAMPLE) from None

    def _in_any(self, count: int) -> tuple[int, dict[str, Any]]:
        """Read the time after `in`, and return it with the arguments of Limit."""
        if not self._take_word("any"):
            self._fail(f"expected 'any' after 'in', as in '{count} in any minute',")
        window_ns = self._window_ns()
        options = {"debt": self._count(_DEBT)} if self._take_word("debt") else {}
        if not (self._at_end() or _SEPARATOR.match(self._text, self._position)):
            self._fail(
                "'in any' is exact in every window, so it has no burst, capacity, refill or other "
                "algorithm; expected 'debt', ';' before another limit, or the end"
            )
        return window_ns, {"algorithm": "sliding_window_log", **options}

    def _at_once(self, count: int) -> tuple[int, dict[str, Any]]:
        """Read the words after `at`, and return the longest time with the arguments of Limit."""
        if not (self._take_word("once") and self._take_word("for")):
            self._fail(f"expected the longest time of a request, as in '{count} at once for 60s',")
        window_ns = self._window_ns()
        if not (self._at_end() or _SEPARATOR.match(self._text, self._position)):
            self._fail(
                "'at once' counts requests in flight, so it has no burst, capacity, refill or "
                "other algorithm; expected ';' before another limit, or the end"
            )
        return window_ns, {"algorithm": "in_flight"}

    def _meant_algorithm(self) -> str:
        """Return a question for a word that is written like an algorithm."""
        word = _DASHED.match(self._text, self._position)
        name = "" if word is None else word[0].lower().replace("-", "_")
        close = get_close_matches(name, UNIT_ALGORITHMS, n=1)
        return f"did you mean {close[0]}? " if close else ""

    def _options(self) -> dict[str, Any]:
        """Read the words after the time, and return the arguments of Limit that they give."""
        found: dict[str, Any] = {}
        while (match := _TOKEN.match(self._text, self._position)) and match["word"]:
            word = match["word"].lower()
            name = "algorithm" if word in UNIT_ALGORITHMS else _OPTIONS.get(word, "")
            if not name:
                break
            if name in found:
                what = "one algorithm" if name == "algorithm" else f"'{word}' only once"
                self._fail(f"expected {what},")
            self._advance(match.end())
            if name == "algorithm":
                found[name] = word
            elif name == "refill_every":
                found[name] = timedelta(microseconds=self._window_ns() // WINDOW_NS_STEP)
            else:
                found[name] = self._count(f"the {word}, a whole number")
        return found

    def _window_ns(self) -> int:
        start = self._position
        match = _TOKEN.match(self._text, start)
        number = Fraction(1)
        if match and match["number"]:
            number = Fraction(self._bounded_digits(match["number"]).replace("_", ""))
            self._advance(match.end())
        unit_ns = self._unit_ns()
        window_ns = number * unit_ns
        if not WINDOW_NS_MIN <= window_ns <= WINDOW_NS_MAX or window_ns % WINDOW_NS_STEP:
            self._position = start
            self._fail("expected a time of 1 ms to 366 days in whole microseconds,")
        return int(window_ns)

    def _unit_ns(self) -> int:
        match = _TOKEN.match(self._text, self._position)
        unit_ns = UNIT_NS.get(match["word"].lower()) if match and match["word"] else None
        if match is None or unit_ns is None:
            self._fail("expected a unit: ms, second, minute, hour, day, week, month or year")
        self._advance(match.end())
        return unit_ns

    def _count(self, what: str) -> int:
        match = _TOKEN.match(self._text, self._position)
        if match is None or not match["number"] or "." in match["number"]:
            self._fail(f"expected {what},")
        count = int(self._bounded_digits(match["number"]))
        if count > UNITS_MAX:
            self._fail(f"expected at most {UNITS_MAX:,} units,")
        self._advance(match.end())
        return count

    def _bounded_digits(self, digits: str) -> str:
        if len(digits) > _DIGITS_MAX:
            self._fail(f"expected a number of at most {_DIGITS_MAX} characters,")
        return digits

    def _take_mark(self, mark: str) -> bool:
        if not self._text.startswith(mark, self._position):
            return False
        self._advance(self._position + len(mark))
        return True

    def _take_word(self, word: str) -> bool:
        match = _TOKEN.match(self._text, self._position)
        if match is None or not match["word"] or match["word"].lower() != word:
            return False
        self._advance(match.end())
        return True

    def _advance(self, position: int) -> None:
        self._position = position
        self._skip_space()

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._position)
        self._position = match.end() if match else self._position

    def _at_end(self) -> bool:
        return self._position >= len(self._text)

    def _fail(self, problem: str) -> NoReturn:
        raise RateSyntaxError(self._text, self._position, problem, EXAMPLE)


def check_cost_fits(cost: int, limits: LimitsArgument) -> None:
    """Raise ConfigError for a cost of every request that one of the limits can never admit."""
    # Of requests in flight, each takes one slot, whatever its cost.
    counted = [limit for limit in limits_of(limits) if limit.algorithm != IN_FLIGHT]
    least = min(counted, key=lambda limit: limit.capacity, default=None)
    if least is not None and cost > least.capacity:
        raise ConfigError(
            f"cost={cost} never fits into {least!r}, so no request could pass; "
            f"use a cost of at most {least.capacity}, or a larger burst"
        )


def limits_of(limits: LimitsArgument) -> tuple[Limit, ...]:
    """Return the limits in a rate string, a Limit, or a list of either."""
    given = [limits] if isinstance(limits, str | Limit) else limits
    if not isinstance(given, list | tuple):
        raise ConfigError(
            f"limits={show(limits)} is not a rate, a Limit, or a list of them; "
            f'for example Limiter("10/second; 1000/hour")'
        )
    found: list[Limit] = []
    for item in given:
        found.extend((item,) if isinstance(item, Limit) else parse_limits(item))
    if not 1 <= len(found) <= LIMITS_MAX:
        raise ConfigError(
            f"a limiter has 1 to {LIMITS_MAX} limits, not {len(found)}; "
            f'for example Limiter("10/second; 1000/hour")'
        )
    by_identity: dict[str, Limit] = {}
    for limit in found:
        other = by_identity.get(limit.identity)
        by_identity[limit.identity] = limit
        if other is not None:
            raise ConfigError(
                f"{other!r} and {limit!r} would share one count; give each its own name, "
                f"for example {Limit(limit.limit, limit.per, name='second')!r}, or remove one"
            )
    return tuple(found)


def scaled(limits: Sequence[Limit], factor: float | Fraction) -> tuple[Limit, ...]:
    """Multiply the numbers of limits by a factor. Rounds down, which is safer, but not below 1.

    >>> scaled((Limit(100, per=60),), 1.15)
    (Limit(115, per=60),)
    """
    # Computed from the decimal digits: the float nearest to 1.15 is below 1.15.
    exact = factor if isinstance(factor, Fraction) else Fraction(str(factor))
    return tuple(_scaled(limit, exact) for limit in limits)


def _scaled(limit: Limit, factor: Fraction) -> Limit:
    most = units_max_of(limit.algorithm)
    units = max(1, min(math.floor(limit.limit * factor), most))
    capacity = 0
    if limit.algorithm in BUCKETS:
        # After rounding the rate down, the bucket may refill too slowly for its capacity.
        refillable = REFILL_NS_MAX * units // limit.window_ns
        capacity = max(1, min(math.floor(limit.capacity * factor), most, refillable))
    return with_numbers(limit, units, capacity)


def with_numbers(limit: Limit, units: int, capacity: int) -> Limit:
    """Return a limit with other numbers; the units of a refill step have room in the capacity.

    A debt that was chosen changes with the units, rounded down.

    >>> with_numbers(Limit(10, per=1, refill_every=0.5), units=5, capacity=1)
    Limit(5, per=1, capacity=1, refill_every=0.2)
    """
    step_ns = 0
    if limit.refill_every:
        longest_ns = capacity * limit.window_ns // units
        step_ns = min(limit.refill_step_ns, longest_ns - longest_ns % WINDOW_NS_STEP)
    return Limit(
        units,
        limit.per,
        algorithm=limit.algorithm,
        capacity=capacity,
        name=limit.name,
        debt=None if limit.debt is None else min(limit.debt * units // limit.limit, UNITS_MAX),
        # Refilled continuously, if even the shortest step would add too many units.
        refill_every=timedelta(microseconds=step_ns // 1_000) if step_ns >= WINDOW_NS_MIN else 0,
    )
