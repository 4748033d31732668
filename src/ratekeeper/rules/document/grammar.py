"""The grammar of a rule document: which fields it has and which values they take.

The functions follow the document's structure from the top down, limits first because every level
uses them. Each function adds its problems to the place where they are and goes on, so that one run
reports all of them. `model.py` explains the values. `rules.schema.json` states the same grammar for
editors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, TypeVar, get_args

from ratekeeper.core.errors import ConfigError, RateSyntaxError, quoted
from ratekeeper.core.model import (
    ALGORITHM_NAMES,
    CONSISTENCIES,
    NAME_LENGTH_MAX,
    REQUEST_FIELDS,
    UNITS_MAX,
    Consistency,
    Limit,
    Limits,
    request_field_like,
)
from ratekeeper.core.rates import LIMITS_MAX, TEXT_LENGTH_MAX, parse_limit, parse_limits
from ratekeeper.regions.settings import ACROSS_REGIONS, SCOPES
from ratekeeper.rules.document.model import (
    BY_MAX,
    COOLDOWNS_MAX,
    COST_MAX,
    ENVOY_QUOTAS,
    FACTOR_MAX,
    LOAD_MAX,
    MODES,
    ON_FAILURES,
    OWNERS,
    PATTERNS_MAX,
    PENALTY_COUNT_MAX,
    PENALTY_S_MAX,
    PUSHED_SOURCES_MAX,
    RESERVED_NAMES,
    RULES_MAX,
    SCALES_MAX,
    SHARE_SOURCES,
    SPLIT_MAX,
    Document,
    EnvoyQuota,
    Match,
    Override,
    OverrideOwner,
    PenaltySettings,
    Rule,
    Scale,
)
from ratekeeper.rules.document.tree import DocumentPlace, suggestion
from ratekeeper.rules.matching.lists import IRREGULAR_GLOBS_MAX, Lists, check_entry
from ratekeeper.rules.matching.patterns import (
    compile_endpoint,
    compile_glob,
    compile_method,
    compile_network,
)

EXAMPLE_LIMITS: Final = '["10/second", "1000/hour burst 200"]'

_LIMIT: Final = ("limit", "per", "algorithm", "burst", "capacity", "name", "refill_every")
_DURATION: Final = re.compile(r"[0-9._]*\s*[A-Za-z]+")


def limits_at(place: DocumentPlace) -> Limits:
    """Return one or several limits, each a rate or a mapping; no two of them share a counter."""
    problems_before = place.problem_count
    found: dict[str, Limit] = {}
    for item in place.items(EXAMPLE_LIMITS):
        for limit in _limits_of(item):
            if other := found.get(limit.identity):
                item.fail(
                    f"{other} and {limit} would share one count; remove one, or name them, for "
                    f"example {{limit: {limit.limit}, per: {limit.per}, name: second}}"
                )
            found[limit.identity] = limit
    if place.problem_count == problems_before and not 1 <= len(found) <= LIMITS_MAX:
        place.fail(
            f"expected 1 to {LIMITS_MAX} limits, found {len(found)}; for example {EXAMPLE_LIMITS}"
        )
    return tuple(found.values())


def _limits_of(place: DocumentPlace) -> Limits:
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


# Rules share their rates: a document of 20,000 rules has a few dozen different ones.
_parsed: Final = lru_cache(maxsize=1_024)(parse_limits)


def _in_full(place: DocumentPlace) -> Limits:
    problems_before = place.problem_count
    found = place.fields(_LIMIT, "{limit: 10, per: 1m}")
    if not place.require(found, ("limit", "10"), ("per", "1m")):
        return ()
    limit = found["limit"].whole(1, UNITS_MAX, "10")
    per = seconds_at(found["per"])
    algorithm = found["algorithm"].choice(ALGORITHM_NAMES) if "algorithm" in found else None
    burst = found["burst"].whole(0, UNITS_MAX, "20") if "burst" in found else 0
    capacity = found["capacity"].whole(1, UNITS_MAX, "30") if "capacity" in found else 0
    name = found["name"].line("logins", NAME_LENGTH_MAX) if "name" in found else ""
    every = seconds_at(found["refill_every"]) if "refill_every" in found else 0
    if place.problem_count > problems_before:
        return ()
    try:
        return (Limit(limit, per, algorithm or "token_bucket", burst, capacity, name, every),)
    except ConfigError as error:
        # The message starts with the name of the wrong field, if only one is wrong.
        found.get(str(error).partition("=")[0], place).fail(str(error))
    return ()


def seconds_at(place: DocumentPlace) -> float:
    """Return a duration in seconds: from a number of seconds, or text such as `90s` or `1.5h`."""
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


VERSION: Final = 1
PATTERN_LENGTH_MAX: Final = 1_100  # `patterns.py` has a lower maximum for each kind of pattern
VALUE_LENGTH_MAX: Final = 512  # of a user, API key or tenant: the maximum length of a key
REASON_LENGTH_MAX: Final = 1_000
MULTIPLY_MIN: Final = 0.001
MULTIPLY_MAX: Final = 1_000.0
SMOOTHING_S_MAX: Final = 86_400.0
# The shortest window of a counter that Envoys get grants of.
GRANT_S: Final = 10
WINDOW_COUNTERS: Final = frozenset({"fixed_window", "sliding_window_counter"})
STALE_S_MIN: Final = 1.0
STALE_S_MAX: Final = 86_400.0

# Editors read `$schema` in JSON documents.
_TOP: Final = ("version", "tiers", "rules", "assign", "allow", "deny", "overrides", "$schema")
_RULE: Final = (
    *("id", "match", "by", "limits", "tiers", "keys", "cost"),
    *("consistency", "scope", "across_regions", "on_failure", "mode", "replaces", "rollout"),
    *("scale", "split", "penalty", "envoy_quota"),
)
_SCALE: Final = (*("source", "low", "high", "least", "smoothing", "most", "idle", "stale_after"),)
_PENALTY: Final = (
    *("after", "within", "cooldown", "cooldown_max", "block_after", "block", "decay"),
)
_LIMITS_IN_FULL: Final = ("limits", "consistency")
_OVERRIDE: Final = ("id", "for", "rule", "limits", "multiply", "until", "reason", "author")
_OVERRIDE_OWNERS: Final[tuple[OverrideOwner, ...]] = get_args(OverrideOwner)
# No colon: in a URL, `user:42` names a subject and not an id.
OVERRIDE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

_ATTRIBUTE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOAD_SOURCE: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_EXAMPLE_SCALE: Final = "{source: cpu, low: 0.7, high: 0.95, least: 0.2}"
_WILDCARD_INSIDE: Final = re.compile(r"[?\[]|\*.")
_EXAMPLE_RULE: Final = "{id: orders, by: [api_key], limits: [10/second]}"

_Word = TypeVar("_Word", bound=str)
_Usual = TypeVar("_Usual")
_Any = TypeVar("_Any")


def document_at(place: DocumentPlace) -> Document:
    """Return the document whose root this is; add its problems."""
    found = place.fields(_TOP, "version: 1")
    if place.require(found, ("version", "1")):
        _check_version(found["version"])
    if "$schema" in found:
        found["$schema"].text("rules.schema.json", PATTERN_LENGTH_MAX)
    tiers, tier_consistency = _limits_by_name(
        found.get("tiers"), "{free: [100/minute]}", _check_tier_name
    )
    rules = _rules(found.get("rules"), tiers, tier_consistency)
    return Document(
        rules=rules,
        tiers=tiers,
        tier_consistency=tier_consistency,
        assign=_assign(found.get("assign"), tiers),
        allow=_entries(found.get("allow")),
        deny=_entries(found.get("deny")),
        overrides=_overrides(found.get("overrides"), {rule.id: rule for rule in rules if rule.id}),
    )


def _check_version(place: DocumentPlace) -> None:
    node = place.node
    if node.kind != "number" or not isinstance(node.value, int) or node.value != VERSION:
        place.fail(f"unsupported version {place.shown}; write version: {VERSION}")


def _check_tier_name(place: DocumentPlace, name: str) -> None:
    if len(name) > NAME_LENGTH_MAX or not name.isprintable():
        place.fail_name(
            f"{quoted(name)} is not a valid tier name: use at most {NAME_LENGTH_MAX} printable "
            f"characters; for example pro"
        )


def _limits_by_name(
    place: DocumentPlace | None, example: str, check_name: Callable[[DocumentPlace, str], object]
) -> tuple[dict[str, Limits], dict[str, Consistency]]:
    """Return the limits of each tier or key, and the consistency of those that have their own.

    An entry is the limits alone, or a mapping: `{limits: 100/minute, consistency: strict}`.
    """
    limits: dict[str, Limits] = {}
    consistency: dict[str, Consistency] = {}
    for name, at in (place.entries(example) if place is not None else {}).items():
        check_name(at, name)
        fields = {"limits": at}
        if at.node.kind == "mapping" and any(
            key.text in _LIMITS_IN_FULL for key, _ in at.node.value
        ):
            fields = at.fields(_LIMITS_IN_FULL, "{limits: 100/minute, consistency: strict}")
            at.require(fields, ("limits", "100/minute"))
        limits[name] = limits_at(fields["limits"]) if "limits" in fields else ()
        if "consistency" in fields:
            consistency[name] = fields["consistency"].choice(CONSISTENCIES)
    return limits, consistency


def _assign(place: DocumentPlace | None, tiers: Collection[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    if place is None:
        return found
    for owner, at_tier in place.entries('{"user:42": pro}').items():
        _compiles(at_tier.fail_name, check_owner, owner)
        found[owner] = _known(at_tier, "tier", tiers)
    return found


def check_owner(text: str) -> None:
    """Raise ConfigError unless the text names a user, API key or tenant."""
    prefix, _, value = text.partition(":")
    if prefix not in OWNERS or not 1 <= len(value) <= VALUE_LENGTH_MAX:
        raise ConfigError(
            f"{quoted(text)} does not name a user, API key or tenant; "
            f'write "user:42", "api_key:sk_1" or "tenant:acme"'
        )


def _known(place: DocumentPlace, what: str, known: Collection[str]) -> str:
    """Return a name that the document must define elsewhere."""
    name = place.text(next(iter(known), "orders"), NAME_LENGTH_MAX)
    if name and name not in known:
        place.fail(f"there is no {what} {quoted(name)} in this document; {suggestion(name, known)}")
    return name


def _entries(place: DocumentPlace | None) -> tuple[str, ...]:
    """Return the entries of an allow or deny list."""
    if place is None:
        return ()
    problems_before = place.problem_count
    found = [
        text
        for item, text in place.each_text('["api_key:sk_internal_*"]', PATTERN_LENGTH_MAX)
        if _compiles(item.fail, check_entry, text)
    ]
    globs = [text for text in found if _WILDCARD_INSIDE.search(text)]
    if len(globs) > IRREGULAR_GLOBS_MAX and place.problem_count == problems_before:
        _compiles(place.fail, Lists.compile, globs)
    return tuple(found)


# ----------------------------------------------------------------------------------------- rules


def _rules(
    place: DocumentPlace | None,
    tiers: Mapping[str, Limits],
    tier_consistency: Mapping[str, Consistency],
) -> tuple[Rule, ...]:
    if place is None:
        return ()
    items = place.items(f"[{_EXAMPLE_RULE}]", single=False)
    if len(items) > RULES_MAX:
        place.fail(f"expected at most {RULES_MAX:,} rules, found {len(items):,}; remove some")
        return ()
    rules: dict[str, Rule] = {}
    for item in items:
        rule = _rule(item, tiers, tier_consistency, rules)
        rules[rule.id] = rule
    pushed = {scale.source for rule in rules.values() for scale in rule.scale} - {*SHARE_SOURCES}
    if len(pushed) > PUSHED_SOURCES_MAX:
        place.fail(
            f"expected at most {PUSHED_SOURCES_MAX} pushed sources of load, found {len(pushed)}; "
            f"let several rules follow the same source"
        )
    found = tuple(rules.values())
    if any(rule.replaces is not None for rule in found) and len(found) == len(items):
        _check_places(items, found)
    return found


def _check_places(items: Sequence[DocumentPlace], rules: Sequence[Rule]) -> None:
    """Check that a rule stands before the rule that it replaces, and counts by the same."""
    ids = {rule.id for rule in rules}
    for item, rule, after in zip(items, rules, [*rules[1:], None], strict=True):
        name = rule.replaces
        if name is None:
            continue
        if name not in ids:
            item.fail(f"replaces: there is no rule {quoted(name)}; {suggestion(name, ids)}")
        elif after is None or after.id != name:
            item.fail(
                f"replaces: {quoted(rule.id)} takes the place of {quoted(name)}, so it must stand "
                f"directly before it; move it there"
            )
        elif after.by != rule.by:
            item.fail(
                f"replaces: {quoted(rule.id)} counts by [{', '.join(rule.by)}] and {quoted(name)} "
                f"by [{', '.join(after.by)}]; rules that count by different attributes both apply, "
                f"so write the same by, or remove replaces"
            )


def _rule(
    place: DocumentPlace,
    tiers: Mapping[str, Limits],
    tier_consistency_of: Mapping[str, Consistency],
    taken: Collection[str],
) -> Rule:
    found = place.fields(_RULE, _EXAMPLE_RULE)
    place.require(found, ("id", "orders"), ("by", "[api_key]"))
    if place.node.kind == "mapping" and "limits" not in found and not tiers:
        place.fail(
            f"the rule has no limits and the document defines no tiers; "
            f"for example limits: {EXAMPLE_LIMITS}"
        )
    cost, costs = _cost(found.get("cost"))
    rule_tiers, tier_consistency = _limits_by_name(
        found.get("tiers"),
        "{pro: [1000/minute]}",
        lambda place, name: _check_known_tier(place, name, tiers),
    )
    keys, key_consistency = _keys(found)
    rule = Rule(
        id=_id(found["id"], taken) if "id" in found else "",
        match=_match(found["match"]) if "match" in found else Match(),
        by=_by(found["by"]) if "by" in found else (),
        limits=limits_at(found["limits"]) if "limits" in found else (),
        tiers=rule_tiers,
        keys=keys,
        tier_consistency=tier_consistency,
        key_consistency=key_consistency,
        cost=cost,
        costs=costs,
        consistency=_choice(found, "consistency", CONSISTENCIES, "strict"),
        scope=_choice(found, "scope", SCOPES, "region"),
        across_regions=_choice(found, "across_regions", ACROSS_REGIONS, None),
        on_failure=_choice(found, "on_failure", ON_FAILURES, None),
        mode=_choice(found, "mode", MODES, "enforce"),
        replaces=found["replaces"].line("api", NAME_LENGTH_MAX) if "replaces" in found else None,
        rollout=found["rollout"].whole(0, 100, "50") if "rollout" in found else 100,
        scale=_scales(found["scale"]) if "scale" in found else (),
        split=found["split"].whole(1, SPLIT_MAX, "8") if "split" in found else 1,
        penalty=_penalty(found["penalty"]) if "penalty" in found else None,
        envoy_quota=_choice(found, "envoy_quota", ENVOY_QUOTAS, None),
    )
    _check_scope(place, found, rule, tier_consistency_of)
    if rule.envoy_quota is not None:
        _check_envoy_quota(found, rule, tiers, tier_consistency_of)
    return rule


def _check_scope(
    place: DocumentPlace,
    found: dict[str, DocumentPlace],
    rule: Rule,
    tier_consistency: Mapping[str, Consistency],
) -> None:
    """Check that the scope of a rule makes sense with its other fields."""
    if rule.scope != "global":
        if "across_regions" in found:
            found["across_regions"].fail(
                "across_regions has no effect on a rule of one region; write scope: global too, "
                "or remove it"
            )
        return
    remedy = "the region's Redis decides every check of a global rule; write consistency: strict"
    if rule.consistency != "strict":
        found["consistency"].fail(
            f"{rule.consistency} does not work with scope: global: {remedy}, or scope: region"
        )
    tiers = {} if rule.limits else tier_consistency
    for what, name, each in (
        *(("tier", *item) for item in rule.tier_consistency.items()),
        *(("key", *item) for item in rule.key_consistency.items()),
        *(("tier", *item) for item in tiers.items() if item[0] not in rule.tiers),
    ):
        if each != "strict":
            place.fail(
                f"{what} {quoted(name)} is {each}, which does not work with scope: global: {remedy}"
            )


def _check_envoy_quota(
    found: dict[str, DocumentPlace],
    rule: Rule,
    tiers: Mapping[str, Limits],
    tier_consistency: Mapping[str, Consistency],
) -> None:
    """Check that Envoys can decide by parts of the rule's limits."""
    place = found["envoy_quota"]
    for name, conflicts, why in (
        ("scope", rule.scope == "global", "regions share no parts; write scope: region"),
        ("mode", rule.mode == "shadow", "an Envoy denies by its part; write mode: enforce"),
        ("split", rule.split > 1, "the service charges whole parts, not requests; remove split"),
        ("penalty", rule.penalty is not None, "the service sees no denied request; remove penalty"),
        ("scale", bool(rule.scale), "parts do not follow the load; remove scale"),
        ("cost", rule.cost != 1 or bool(rule.costs), "an Envoy counts requests; write cost: 1"),
    ):
        if conflicts:
            place.fail(f"envoy_quota does not work with {name}: {why}, or remove envoy_quota")
    used = {} if rule.limits else {k: v for k, v in tiers.items() if k not in rule.tiers}
    sets: list[tuple[str, Limits, Consistency]] = [
        *([("the rule", rule.limits, rule.consistency)] if rule.limits else []),
        *(
            (f"{what} {quoted(name)}", limits, consistency.get(name, rule.consistency))
            for what, by_name, consistency in (
                ("tier", used, tier_consistency),
                ("tier", rule.tiers, rule.tier_consistency),
                ("key", rule.keys, rule.key_consistency),
            )
            for name, limits in by_name.items()
        ),
    ]
    for what, limits, consistency in sets:
        if consistency != "leased" and rule.scope != "global":
            place.fail(f"{what} is {consistency}: a part is a lease; write consistency: leased")
        elif problem := why_not_assigned(rule.envoy_quota or "rate", limits):
            place.fail(f"{what}: {problem}")


def why_not_assigned(quota: EnvoyQuota, limits: Limits) -> str:
    """Return why Envoys cannot get parts of these limits, in words; empty if they can."""
    if any(limit.algorithm == "leaky_bucket" for limit in limits):
        return "Envoy delays no request, so a leaky_bucket cannot be assigned; use token_bucket"
    if quota == "rate" and len(limits) > 1:
        return (
            f"Envoy has one token bucket for a rate, and these are {len(limits)} limits; "
            f"write one limit, or envoy_quota: grants"
        )
    windows = [each for each in limits if each.algorithm in WINDOW_COUNTERS]
    if quota == "grants" and min((each.window for each in windows), default=GRANT_S) < GRANT_S:
        return (
            f"a grant lasts some seconds and ends before the window of a counter, which needs at "
            f"least {GRANT_S} s; use token_bucket, or a longer window"
        )
    return ""


def _id(place: DocumentPlace, taken: Collection[str]) -> str:
    name = place.line("orders", NAME_LENGTH_MAX)
    if name and name in taken:
        place.fail(f"{quoted(name)} is already the id of an earlier rule; choose another id")
    if name.startswith(RESERVED_NAMES):
        place.fail(
            f"{quoted(name)} begins like the name of a list, such as (deny), or of limits that "
            f"come with a call, such as limit:emails; choose another id"
        )
    return name


def _choice(
    found: dict[str, DocumentPlace], name: str, words: Sequence[_Word], usual: _Usual
) -> _Word | _Usual:
    return found[name].choice(words) if name in found else usual


def _check_known_tier(place: DocumentPlace, name: str, tiers: Collection[str]) -> None:
    if name not in tiers:
        hint = suggestion(name, tiers)
        place.fail_name(f"there is no tier {quoted(name)} in this document; {hint}")


def _by(place: DocumentPlace) -> tuple[str, ...]:
    names: list[str] = []
    for item, name in place.each_text("[api_key]", NAME_LENGTH_MAX):
        _check_attribute(item.fail, name)
        if name in names:
            item.fail(f"{quoted(name)} occurs twice; remove one")
        names.append(name)
    if len(names) > BY_MAX:
        place.fail(f"expected at most {BY_MAX} attributes, found {len(names)}; remove some")
    return tuple(names)


def _check_attribute(fail: Callable[[str], None], name: str) -> None:
    if not _ATTRIBUTE.fullmatch(name):
        fail(
            f"{quoted(name)} is not a valid attribute name: use the letters a to z, digits and _; "
            f"for example region"
        )
    elif (meant := request_field_like(name) or name) != name:
        # As an attribute that no request has, it would count all clients together.
        fail(f"{quoted(name)} must be spelled {meant}")


def _match(place: DocumentPlace) -> Match:
    found = place.fields((*REQUEST_FIELDS, "attributes"), "{endpoint: /login}")
    conditions = {name: _patterns(at, name) for name, at in found.items() if name != "attributes"}
    attributes: dict[str, tuple[str, ...]] = {}
    if "attributes" in found:
        for name, at in found["attributes"].entries("{region: eu-*}").items():
            _check_attribute(at.fail_name, name)
            if name in REQUEST_FIELDS:
                at.fail_name(f"{name} is not a custom attribute; write match: {{{name}: …}}")
            attributes[name] = _patterns(at, "")
    return Match(**conditions, attributes=attributes)


def _patterns(place: DocumentPlace, name: str) -> tuple[str, ...]:
    """Return the patterns of one condition, without those that do not compile."""
    if place.node.kind == "list" and not 1 <= len(place.node.value) <= PATTERNS_MAX:
        place.fail(
            f"expected 1 to {PATTERNS_MAX:,} patterns, found {len(place.node.value):,}; "
            f"to match everything, remove the condition"
        )
        return ()
    example, compiled = _CONDITIONS.get(name, ('"eu-*"', compile_glob))
    return tuple(
        text.upper() if name == "method" else text
        for item, text in place.each_text(example, PATTERN_LENGTH_MAX)
        if _compiles(item.fail, compiled, text)
    )


def _compiles(fail: Callable[[str], None], compiled: Callable[[_Any], object], it: _Any) -> bool:
    """Return whether it compiles; if not, report the error with `fail`."""
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


def _keys(
    found: dict[str, DocumentPlace],
) -> tuple[dict[str, Limits], dict[str, Consistency]]:
    place = found.get("keys")
    counted = found["by"].node if "by" in found else None
    if place is not None and counted and counted.kind == "list" and len(counted.value) != 1:
        place.fail("keys needs a rule that counts by one attribute, for example by: [api_key]")
    return _limits_by_name(
        place,
        "{sk_vip_*: [1000/minute]}",
        lambda place, key: _compiles(place.fail_name, compile_glob, key),
    )


def _cost(place: DocumentPlace | None) -> tuple[int, dict[str, int]]:
    """Return the cost of a request (`*`, or a plain number), and the costs at some endpoints."""
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


def _scales(place: DocumentPlace) -> tuple[Scale, ...]:
    """Return the loads that a rule follows, each source once."""
    found: dict[str, Scale] = {}
    items = place.items(_EXAMPLE_SCALE)
    if place.node.kind == "list" and not 1 <= len(items) <= SCALES_MAX:
        place.fail(
            f"expected 1 to {SCALES_MAX} loads, found {len(items)}; for example [{_EXAMPLE_SCALE}]"
        )
    for item in items:
        scale = _scale(item)
        if scale.source in found:
            item.fail(f"the rule follows {scale.source} already; remove one of them")
        found[scale.source] = scale
    return tuple(found.values())


def _scale(place: DocumentPlace) -> Scale:
    problems_before = place.problem_count
    found = place.fields(_SCALE, _EXAMPLE_SCALE)
    usual = Scale()
    source = _load_source(found["source"]) if "source" in found else usual.source
    load_max = 1.0
    if source not in SHARE_SOURCES:
        load_max = LOAD_MAX
        place.require(found, ("low", "100"), ("high", "5000"))

    def number(name: str, usual: float, low: float, high: float, example: str) -> float:
        return found[name].number(low, high, example) if name in found else usual

    low = number("low", usual.low, 0.0, load_max, "0.7" if load_max == 1 else "100")
    high = number("high", usual.high, 0.0, load_max, "0.95" if load_max == 1 else "5000")
    idle = number("idle", low / 2, 0.0, load_max, "0.3" if load_max == 1 else "10")
    most = number("most", usual.most, 1.0, FACTOR_MAX, str(FACTOR_MAX))
    if place.problem_count == problems_before:
        if low >= high:
            place.fail(f"low ({low:g}) must be less than high ({high:g})")
        elif "idle" in found and most == 1:
            place.fail(f"idle has no effect without most; for example most: {FACTOR_MAX}")
        elif most > 1 and idle >= low:
            place.fail(f"idle ({idle:g}) must be less than low ({low:g})")
    return Scale(
        source=source,
        low=low,
        high=high,
        least=number("least", usual.least, 0.01, 1.0, str(usual.least)),
        smoothing_s=_scale_s(found, "smoothing", usual.smoothing_s, 0.0, SMOOTHING_S_MAX),
        most=most,
        idle=idle if "idle" in found else None,
        stale_after_s=_scale_s(found, "stale_after", usual.stale_after_s, STALE_S_MIN, STALE_S_MAX),
    )


def _load_source(place: DocumentPlace) -> str:
    name = place.text("queue_depth", NAME_LENGTH_MAX)
    if name and not _LOAD_SOURCE.fullmatch(name):
        place.fail(
            f"{quoted(name)} is not the name of a load: use cpu, memory, pushed, or a name of "
            f"lower-case letters, digits and _ with at most 64 characters; for example queue_depth"
        )
        return Scale().source
    return name or Scale().source


def _scale_s(
    found: dict[str, DocumentPlace], name: str, usual_s: float, least_s: float, most_s: float
) -> float:
    if name not in found:
        return usual_s
    seconds = seconds_at(found[name])
    if not least_s <= seconds <= most_s:
        found[name].fail(f"{name} must be from {least_s:g} s to 1 day; for example {usual_s:g}s")
    return seconds


def _penalty(place: DocumentPlace) -> PenaltySettings:
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
        place.fail(f"cooldown ({cooldown_s:g} s) must not exceed cooldown_max ({longest_s:g} s)")
    return PenaltySettings(
        after=count("after", usual.after, PENALTY_COUNT_MAX),
        within_s=seconds("within", usual.within_s),
        cooldown_s=cooldown_s,
        cooldown_max_s=longest_s,
        block_after=count("block_after", usual.block_after, COOLDOWNS_MAX),
        block_s=seconds("block", usual.block_s),
        decay_s=seconds("decay", usual.decay_s),
    )


def _penalty_s(place: DocumentPlace, name: str) -> float:
    seconds = seconds_at(place)
    if not 1 <= seconds <= PENALTY_S_MAX:
        place.fail(f"{name} must be from 1 s to 30 days; for example {name}: 1m")
    return seconds


# ------------------------------------------------------------------------------------- overrides


def _overrides(place: DocumentPlace | None, rules: Collection[str]) -> tuple[Override, ...]:
    if place is None:
        return ()
    example = "[{for: {user: alice}, multiply: 2}]"
    taken: set[str] = set()
    return tuple(_override(item, rules, taken) for item in place.items(example, single=False))


def _override(place: DocumentPlace, rules: Collection[str], taken: set[str]) -> Override:
    found = place.fields(_OVERRIDE, "{for: {user: alice}, multiply: 2}")
    place.require(found, ("for", "{user: alice}"))
    if place.node.kind == "mapping" and ("limits" in found) == ("multiply" in found):
        place.fail("an override needs either limits or multiply, not both; for example multiply: 2")
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
        id=_override_id(found["id"], taken) if "id" in found else "",
    )


def _override_id(place: DocumentPlace, taken: set[str]) -> str:
    name = place.text("black-friday", NAME_LENGTH_MAX)
    if name and not OVERRIDE_ID.fullmatch(name):
        place.fail(
            f"{quoted(name)} is not an id: at most 64 letters, digits, dots, - and _, of which "
            f"the first is a letter or a digit; for example black-friday"
        )
    if name in taken:
        place.fail(f"{quoted(name)} is already the id of an earlier override; choose another id")
    taken.add(name)
    return name


def _multiply(place: DocumentPlace | None) -> float | None:
    return None if place is None else place.number(MULTIPLY_MIN, MULTIPLY_MAX, "2")


def _owner(place: DocumentPlace) -> tuple[OverrideOwner, str]:
    found = place.fields(_OVERRIDE_OWNERS, "{user: alice}")
    if place.node.kind == "mapping" and len(place.node.value) != 1:
        place.fail("an override names one user, api_key, tenant or ip; for example {user: alice}")
    for attribute in _OVERRIDE_OWNERS:
        if attribute in found:
            value = found[attribute].text("alice", VALUE_LENGTH_MAX)
            if attribute == "ip" and value:
                _compiles(found[attribute].fail, compile_network, value)
            return attribute, value
    return "user", ""


def _remark(place: DocumentPlace | None) -> str:
    return "" if place is None else place.text("launch day", REASON_LENGTH_MAX).strip()


def _time(place: DocumentPlace) -> datetime | None:
    node = place.node
    example = "2026-12-31T23:59:59Z"
    try:
        time = node.value if isinstance(node.value, datetime) else datetime.fromisoformat(node.text)
        if node.kind in {"text", "time"} and time.tzinfo is not None:
            return time.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    place.fail(f"{place.shown} is not a time with a time zone; for example {example}")
    return None
