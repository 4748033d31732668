"""The grammar of a rule document: which names stand where, and what may stand under them.

The functions follow the document's shape from the top down. What is wrong is noted where it stands
and reading goes on, so that one reading tells everything. `rules.py` says what each value means;
`rules.schema.json` says the same as this module to editors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Final, Literal, TypeVar, get_args

from tollkeeper.core.errors import ConfigError, quoted
from tollkeeper.core.model import NAME_LENGTH_MAX, REQUEST_FIELDS
from tollkeeper.rules.document.limits import EXAMPLE_LIMITS, limits_at, seconds_at
from tollkeeper.rules.document.model import (
    BY_MAX,
    CONSISTENCIES,
    COOLDOWNS_MAX,
    COST_MAX,
    LOAD_SOURCES,
    MODES,
    ON_FAILURES,
    PATTERNS_MAX,
    PENALTY_COUNT_MAX,
    PENALTY_S_MAX,
    RULES_MAX,
    SPLIT_MAX,
    Document,
    Limits,
    Match,
    Override,
    PenaltySettings,
    Rule,
    Scale,
)
from tollkeeper.rules.document.places import Place, suggestion
from tollkeeper.rules.matching.lists import IRREGULAR_GLOBS_MAX, Lists, check_entry
from tollkeeper.rules.matching.networks import compile_network
from tollkeeper.rules.matching.paths import compile_method
from tollkeeper.rules.matching.patterns import compile_endpoint, compile_glob

Owner = Literal["user", "api_key", "tenant"]

VERSION: Final = 1
PATTERN_LENGTH_MAX: Final = 1_100  # `patterns.py` has bounds of its own, for each kind
VALUE_LENGTH_MAX: Final = 512  # of a user, key or tenant; no longer one can be counted
REASON_LENGTH_MAX: Final = 1_000
MULTIPLY_MIN: Final = 0.001
MULTIPLY_MAX: Final = 1_000.0
SMOOTHING_S_MAX: Final = 86_400.0

# `$schema` is for editors, which look there in JSON.
_TOP: Final = ("version", "tiers", "rules", "assign", "allow", "deny", "overrides", "$schema")
_RULE: Final = (
    *("id", "match", "by", "limits", "tiers", "keys", "cost"),
    *("consistency", "on_failure", "mode", "rollout", "scale", "split", "penalty"),
)
_SCALE: Final = ("source", "low", "high", "least", "smoothing")
_PENALTY: Final = (
    *("after", "within", "cooldown", "cooldown_max", "block_after", "block", "decay"),
)
_OVERRIDE: Final = ("for", "rule", "limits", "multiply", "until", "reason", "author")
_OWNERS: Final[tuple[Owner, ...]] = get_args(Owner)

_ATTRIBUTE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WILDCARD_INSIDE: Final = re.compile(r"[?\[]|\*.")
_EXAMPLE_RULE: Final = "{id: orders, by: [api_key], limits: [10/second]}"

_Word = TypeVar("_Word", bound=str)
_Usual = TypeVar("_Usual")
_Any = TypeVar("_Any")


def document_at(place: Place) -> Document:
    """The document at its root; what is wrong with it is noted there."""
    found = place.fields(_TOP, "version: 1")
    if place.require(found, ("version", "1")):
        _check_version(found["version"])
    if "$schema" in found:
        found["$schema"].text("rules.schema.json", PATTERN_LENGTH_MAX)
    tiers = _limits_by_name(found.get("tiers"), "{free: [100/minute]}", _check_tier_name)
    rules = _rules(found.get("rules"), tiers)
    return Document(
        rules=rules,
        tiers=tiers,
        assign=_assign(found.get("assign"), tiers),
        allow=_entries(found.get("allow")),
        deny=_entries(found.get("deny")),
        overrides=_overrides(found.get("overrides"), {rule.id: rule for rule in rules if rule.id}),
    )


def _check_version(place: Place) -> None:
    node = place.node
    if node.kind != "number" or not isinstance(node.value, int) or node.value != VERSION:
        place.fail(f"{place.shown} is not a version that is known; write version: {VERSION}")


def _check_tier_name(place: Place, name: str) -> None:
    if len(name) > NAME_LENGTH_MAX or not name.isprintable():
        place.fail_name(
            f"{quoted(name)} is not the name of a tier, which is printable text of at most "
            f"{NAME_LENGTH_MAX} characters; for example pro"
        )


def _limits_by_name(
    place: Place | None, example: str, check_name: Callable[[Place, str], object]
) -> dict[str, Limits]:
    """Tiers or keys: for each name or pattern, its limits."""
    found: dict[str, Limits] = {}
    if place is not None:
        for name, at_limits in place.entries(example).items():
            check_name(at_limits, name)
            found[name] = limits_at(at_limits)
    return found


def _assign(place: Place | None, tiers: Collection[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    if place is None:
        return found
    for owner, at_tier in place.entries('{"user:42": pro}').items():
        prefix, _, value = owner.partition(":")
        if prefix not in _OWNERS or not 1 <= len(value) <= VALUE_LENGTH_MAX:
            at_tier.fail_name(
                f"{quoted(owner)} does not say who is meant; "
                f'write "user:42", "api_key:sk_1" or "tenant:acme"'
            )
        found[owner] = _known(at_tier, "tier", tiers)
    return found


def _known(place: Place, what: str, known: Collection[str]) -> str:
    """A name that must be one of those that the document defines."""
    name = place.text(next(iter(known), "orders"), NAME_LENGTH_MAX)
    if name and name not in known:
        place.fail(f"there is no {what} {quoted(name)} in this document; {suggestion(name, known)}")
    return name


def _entries(place: Place | None) -> tuple[str, ...]:
    """An allow or deny list."""
    if place is None:
        return ()
    problems_before = place.problem_count
    found = [
        text
        for item, text in place.each_text('["sk_internal_*"]', PATTERN_LENGTH_MAX)
        if _compiles(item.fail, check_entry, text)
    ]
    globs = [text for text in found if _WILDCARD_INSIDE.search(text)]
    if len(globs) > IRREGULAR_GLOBS_MAX and place.problem_count == problems_before:
        _compiles(place.fail, Lists.compile, globs)
    return tuple(found)


# ----------------------------------------------------------------------------------------- rules


def _rules(place: Place | None, tiers: Collection[str]) -> tuple[Rule, ...]:
    if place is None:
        return ()
    items = place.items(f"[{_EXAMPLE_RULE}]", single=False)
    if len(items) > RULES_MAX:
        place.fail(f"a document has at most {RULES_MAX:,} rules, and this has {len(items):,}")
        return ()
    rules: dict[str, Rule] = {}
    for item in items:
        rule = _rule(item, tiers, rules)
        rules[rule.id] = rule
    return tuple(rules.values())


def _rule(place: Place, tiers: Collection[str], taken: Collection[str]) -> Rule:
    found = place.fields(_RULE, _EXAMPLE_RULE)
    place.require(found, ("id", "orders"), ("by", "[api_key]"))
    if place.node.kind == "mapping" and "limits" not in found and not tiers:
        place.fail(
            f"the rule has no limits, and the document no tiers to take them from; "
            f"for example limits: {EXAMPLE_LIMITS}"
        )
    cost, costs = _cost(found.get("cost"))
    return Rule(
        id=_id(found["id"], taken) if "id" in found else "",
        match=_match(found["match"]) if "match" in found else Match(),
        by=_by(found["by"]) if "by" in found else (),
        limits=limits_at(found["limits"]) if "limits" in found else (),
        tiers=_limits_by_name(
            found.get("tiers"),
            "{pro: [1000/minute]}",
            lambda place, name: _check_known_tier(place, name, tiers),
        ),
        keys=_keys(found),
        cost=cost,
        costs=costs,
        consistency=_choice(found, "consistency", CONSISTENCIES, "strict"),
        on_failure=_choice(found, "on_failure", ON_FAILURES, None),
        mode=_choice(found, "mode", MODES, "enforce"),
        rollout=found["rollout"].whole(0, 100, "50") if "rollout" in found else 100,
        scale=_scale(found["scale"]) if "scale" in found else None,
        split=found["split"].whole(1, SPLIT_MAX, "8") if "split" in found else 1,
        penalty=_penalty(found["penalty"]) if "penalty" in found else None,
    )


def _id(place: Place, taken: Collection[str]) -> str:
    name = place.line("orders", NAME_LENGTH_MAX)
    if name and name in taken:
        place.fail(f"{quoted(name)} is the id of an earlier rule; each has its own")
    return name


def _choice(
    found: dict[str, Place], name: str, words: Sequence[_Word], usual: _Usual
) -> _Word | _Usual:
    return found[name].choice(words) if name in found else usual


def _check_known_tier(place: Place, name: str, tiers: Collection[str]) -> None:
    if name not in tiers:
        hint = suggestion(name, tiers)
        place.fail_name(f"there is no tier {quoted(name)} in this document; {hint}")


def _by(place: Place) -> tuple[str, ...]:
    names: list[str] = []
    for item, name in place.each_text("[api_key]", NAME_LENGTH_MAX):
        _check_attribute(item.fail, name)
        if name in names:
            item.fail(f"{quoted(name)} is given twice; remove one")
        names.append(name)
    if len(names) > BY_MAX:
        place.fail(f"a rule counts by at most {BY_MAX} things, and this has {len(names)}")
    return tuple(names)


def _check_attribute(fail: Callable[[str], None], name: str) -> None:
    if not _ATTRIBUTE.fullmatch(name):
        fail(
            f"{quoted(name)} is not the name of an attribute: letters from a to z, digits and _; "
            f"for example region"
        )
    elif (meant := _FIELD_BY_LETTERS.get(_letters(name), name)) != name:
        # Taken for an attribute that no request has, it would count everyone as one.
        fail(f"{quoted(name)} is written {meant}")


def _letters(name: str) -> str:
    return name.lower().replace("_", "")


_FIELD_BY_LETTERS: Final = {_letters(name): name for name in REQUEST_FIELDS}


def _match(place: Place) -> Match:
    found = place.fields((*REQUEST_FIELDS, "attributes"), "{endpoint: /login}")
    conditions = {name: _patterns(at, name) for name, at in found.items() if name != "attributes"}
    attributes: dict[str, tuple[str, ...]] = {}
    if "attributes" in found:
        for name, at in found["attributes"].entries("{region: eu-*}").items():
            _check_attribute(at.fail_name, name)
            if name in REQUEST_FIELDS:
                at.fail_name(f"{name} is no attribute; write match: {{{name}: …}}")
            attributes[name] = _patterns(at, "")
    return Match(**conditions, attributes=attributes)


def _patterns(place: Place, name: str) -> tuple[str, ...]:
    """The patterns of one condition, each of which compiles."""
    if place.node.kind == "list" and not 1 <= len(place.node.value) <= PATTERNS_MAX:
        place.fail(
            f"a condition has 1 to {PATTERNS_MAX:,} patterns, and this has "
            f"{len(place.node.value):,}; leave it out to match everything"
        )
        return ()
    example, compiled = _CONDITIONS.get(name, ('"eu-*"', compile_glob))
    return tuple(
        text.upper() if name == "method" else text
        for item, text in place.each_text(example, PATTERN_LENGTH_MAX)
        if _compiles(item.fail, compiled, text)
    )


def _compiles(fail: Callable[[str], None], compiled: Callable[[_Any], object], it: _Any) -> bool:
    """Does this compile? If not, that is a problem."""
    try:
        compiled(it)
    except ConfigError as error:
        fail(str(error))
        return False
    return True


_CONDITIONS: Final[dict[str, tuple[str, Callable[[str], object]]]] = {
    "endpoint": ('"/v1/orders/*"', compile_endpoint),
    "method": ("[GET, POST]", compile_method),
    "ip": ('"10.0.0.0/8"', compile_network),
}


def _keys(found: dict[str, Place]) -> dict[str, Limits]:
    place = found.get("keys")
    if place is None:
        return {}
    counted = found["by"].node if "by" in found else None
    if counted and counted.kind == "list" and len(counted.value) != 1:
        place.fail("keys is for a rule that counts by one thing, for example by: [api_key]")
    return _limits_by_name(
        place,
        "{sk_vip_*: [1000/minute]}",
        lambda place, key: _compiles(place.fail_name, compile_glob, key),
    )


def _cost(place: Place | None) -> tuple[int, dict[str, int]]:
    """What a request costs, and what it costs at some endpoints. `*` is for all others."""
    if place is None:
        return 1, {}
    if place.node.kind != "mapping":
        return place.whole(0, COST_MAX, "5, or {/search: 5}"), {}
    costs: dict[str, int] = {}
    for pattern, at_cost in place.entries("{/search: 5}").items():
        if "*" in costs:
            at_cost.fail_name(f'{quoted(pattern)} can never match after "*"; put "*" last')
        _compiles(at_cost.fail_name, compile_endpoint, pattern)
        costs[pattern] = at_cost.whole(0, COST_MAX, "5")
    return costs.pop("*", 1), costs


def _scale(place: Place) -> Scale:
    problems_before = place.problem_count
    found = place.fields(_SCALE, "{source: cpu, low: 0.7, high: 0.95, least: 0.2}")
    usual = Scale()
    shares = {
        name: found[name].number(low, 1, str(getattr(usual, name)))
        if name in found
        else getattr(usual, name)
        for name, low in (("low", 0.0), ("high", 0.0), ("least", 0.01))
    }
    if shares["low"] >= shares["high"] and place.problem_count == problems_before:
        place.fail(f"low ({shares['low']:g}) must be less than high ({shares['high']:g})")
    smoothing_s = usual.smoothing_s
    if "smoothing" in found:
        smoothing_s = seconds_at(found["smoothing"])
        if not 0 <= smoothing_s <= SMOOTHING_S_MAX:
            found["smoothing"].fail("smoothing is from 0 s to a day; for example smoothing: 10s")
    source = _choice(found, "source", LOAD_SOURCES, usual.source)
    return Scale(source=source, smoothing_s=smoothing_s, **shares)


def _penalty(place: Place) -> PenaltySettings:
    problems_before = place.problem_count
    found = place.fields(_PENALTY, "{after: 10, cooldown: 10s, block: 1h}")
    usual = PenaltySettings()

    def count(name: str, usual: int, most: int) -> int:
        return found[name].whole(1, most, str(usual)) if name in found else usual

    def seconds(name: str, usual_s: float) -> float:
        return _penalty_s(found[name], name) if name in found else usual_s

    cooldown_s = seconds("cooldown", usual.cooldown_s)
    longest_s = seconds("cooldown_max", max(usual.cooldown_max_s, cooldown_s))
    if cooldown_s > longest_s and place.problem_count == problems_before:
        place.fail(f"cooldown ({cooldown_s:g} s) is more than cooldown_max ({longest_s:g} s)")
    return PenaltySettings(
        after=count("after", usual.after, PENALTY_COUNT_MAX),
        within_s=seconds("within", usual.within_s),
        cooldown_s=cooldown_s,
        cooldown_max_s=longest_s,
        block_after=count("block_after", usual.block_after, COOLDOWNS_MAX),
        block_s=seconds("block", usual.block_s),
        decay_s=seconds("decay", usual.decay_s),
    )


def _penalty_s(place: Place, name: str) -> float:
    seconds = seconds_at(place)
    if not 1 <= seconds <= PENALTY_S_MAX:
        place.fail(f"{name} is from 1 s to 30 days; for example {name}: 1m")
    return seconds


# ------------------------------------------------------------------------------------- overrides


def _overrides(place: Place | None, rules: Collection[str]) -> tuple[Override, ...]:
    if place is None:
        return ()
    example = "[{for: {user: alice}, multiply: 2}]"
    return tuple(_override(item, rules) for item in place.items(example, single=False))


def _override(place: Place, rules: Collection[str]) -> Override:
    found = place.fields(_OVERRIDE, "{for: {user: alice}, multiply: 2}")
    place.require(found, ("for", "{user: alice}"))
    if place.node.kind == "mapping" and ("limits" in found) == ("multiply" in found):
        place.fail("an override has either limits or multiply; for example multiply: 2")
    attribute, value = _owner(found["for"]) if "for" in found else ("user", "")
    return Override(
        attribute=attribute,
        value=value,
        rule=_known(found["rule"], "rule", rules) if "rule" in found else None,
        limits=limits_at(found["limits"]) if "limits" in found else (),
        multiply=_multiply(found.get("multiply")),
        until=_time(found["until"]) if "until" in found else None,
        reason=_remark(found.get("reason")),
        author=_remark(found.get("author")),
    )


def _multiply(place: Place | None) -> float | None:
    return None if place is None else place.number(MULTIPLY_MIN, MULTIPLY_MAX, "2")


def _owner(place: Place) -> tuple[Owner, str]:
    found = place.fields(_OWNERS, "{user: alice}")
    if place.node.kind == "mapping" and len(place.node.value) != 1:
        place.fail("an override is for one user, api_key or tenant; for example {user: alice}")
    for attribute in _OWNERS:
        if attribute in found:
            return attribute, found[attribute].text("alice", VALUE_LENGTH_MAX)
    return "user", ""


def _remark(place: Place | None) -> str:
    return "" if place is None else place.text("launch day", REASON_LENGTH_MAX).strip()


def _time(place: Place) -> datetime | None:
    node = place.node
    example = "2026-12-31T23:59:59Z"
    try:
        time = node.value if isinstance(node.value, datetime) else datetime.fromisoformat(node.text)
        if node.kind in {"text", "time"} and time.tzinfo is not None:
            return time.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    place.fail(f"{place.shown} is not a time with its zone; for example {example}")
    return None
