"""Limits as a document writes them: `10/second`, or in full, with problems noted in their place."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from tollkeeper.core.errors import ConfigError, RateSyntaxError, quoted
from tollkeeper.core.model import ALGORITHM_NAMES, NAME_LENGTH_MAX, UNITS_MAX, Limit
from tollkeeper.core.rates import LIMITS_MAX, TEXT_LENGTH_MAX, parse_limit, parse_limits
from tollkeeper.rules.document.model import Limits
from tollkeeper.rules.document.places import Place

EXAMPLE_LIMITS: Final = '["10/second", "1000/hour burst 200"]'

_FIELDS: Final = ("limit", "per", "algorithm", "burst", "capacity", "name")
_DURATION: Final = re.compile(r"[0-9._]*\s*[A-Za-z]+")


def limits_at(place: Place) -> Limits:
    """One limit or several, each as text or in full; no two of them share a count."""
    problems_before = place.problem_count
    found: dict[str, Limit] = {}
    for item in place.items(EXAMPLE_LIMITS):
        for limit in _limits_of(item):
            if other := found.get(limit.identity):
                item.fail(
                    f"{other} and {limit} would share one count; drop one, or name them, for "
                    f"example {{limit: {limit.limit}, per: {limit.per}, name: second}}"
                )
            found[limit.identity] = limit
    if place.problem_count == problems_before and not 1 <= len(found) <= LIMITS_MAX:
        place.fail(
            f"1 to {LIMITS_MAX} limits are wanted here, not {len(found)}; "
            f"for example {EXAMPLE_LIMITS}"
        )
    return tuple(found.values())


def _limits_of(place: Place) -> Limits:
    if place.node.kind == "mapping":
        return _in_full(place)
    if place.node.kind != "text":
        place.fail(f'{place.shown} is not a rate; for example "10/second"')
        return ()
    text = place.text('"10/second"', TEXT_LENGTH_MAX)
    try:
        return _parsed(text) if text else ()
    except RateSyntaxError as error:
        at = f"at character {error.position + 1}"
        place.fail(f'{quoted(text)} is not a rate: {error.problem} {at}; for example "10/second"')
    return ()


# Rules resemble one another: a document of 20,000 has a few dozen different rates.
_parsed: Final = lru_cache(maxsize=1_024)(parse_limits)


def _in_full(place: Place) -> Limits:
    problems_before = place.problem_count
    found = place.fields(_FIELDS, "{limit: 10, per: 1m}")
    if not place.require(found, ("limit", "10"), ("per", "1m")):
        return ()
    limit = found["limit"].whole(1, UNITS_MAX, "10")
    per = seconds_at(found["per"])
    algorithm = found["algorithm"].choice(ALGORITHM_NAMES) if "algorithm" in found else None
    burst = found["burst"].whole(0, UNITS_MAX, "20") if "burst" in found else 0
    capacity = found["capacity"].whole(1, UNITS_MAX, "30") if "capacity" in found else 0
    name = found["name"].line("logins", NAME_LENGTH_MAX) if "name" in found else ""
    if place.problem_count > problems_before:
        return ()
    try:
        return (Limit(limit, per, algorithm or "token_bucket", burst, capacity, name),)
    except ConfigError as error:
        # Its message starts with the name of what is wrong, if that is one thing.
        found.get(str(error).partition("=")[0], place).fail(str(error))
    return ()


def seconds_at(place: Place) -> float:
    """A length of time: a number of seconds, or text such as `90s`, `1m` or `1.5h`."""
    node = place.node
    if node.kind == "number" and isinstance(node.value, int | float) and node.value >= 0:
        return node.value
    if node.kind == "text" and _DURATION.fullmatch(node.value):
        try:
            return parse_limit(f"1/{node.value}").window
        except RateSyntaxError:
            pass
    example = '60 (seconds), "90s", "1m" or "1h"'
    place.fail(f"{place.shown} is not a length of time; for example {example}")
    return 0.0
