"""The grammar of a rule document: a row for each field, with its shape and its meaning.

The reader, the writer and the JSON Schema follow from the rows (`shapes.py`). The default values
are those of the classes in `model.py`. The rows are in the order in which a document is written,
and inner mappings come first. `checks.py` checks the parts with each other.

A shape adds its problems to the place where they are and goes on, so that one run reports all of
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, cast, get_args

from ratekeeper.core.errors import ConfigError, RateSyntaxError, quoted
from ratekeeper.core.model import (
    ALGORITHM_NAMES,
    CONSISTENCIES,
    NAME_LENGTH_MAX,
    REQUEST_FIELDS,
    UNITS_MAX,
    Limit,
    Limits,
    duration_text,
    request_field_like,
)
from ratekeeper.core.rates import LIMITS_MAX, TEXT_LENGTH_MAX, parse_limits
from ratekeeper.regions.settings import ACROSS_REGIONS, SCOPES
from ratekeeper.rules.document.checks import check_document
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
    PRICE_MAX,
    PRICED_MODELS_MAX,
    RESERVED_NAMES,
    RULES_MAX,
    SCALES_MAX,
    SHARE_SOURCES,
    SPLIT_MAX,
    Document,
    LimitsOfOne,
    Match,
    Override,
    OverrideOwner,
    PenaltySettings,
    Rule,
    Scale,
)
from ratekeeper.rules.document.shapes import (
    DEFINITIONS,
    Field,
    Json,
    ValueShape,
    choice,
    list_of,
    mapping_of,
    named,
    number,
    passes,
    record,
    seconds,
    shown,
    text,
    whole,
)
from ratekeeper.rules.document.tree import DocumentPlace
from ratekeeper.rules.matching.lists import IRREGULAR_GLOBS_MAX, Lists, check_entry
from ratekeeper.rules.matching.patterns import (
    compile_endpoint,
    compile_glob,
    compile_method,
    compile_network,
)

VERSION: Final = 1
PATTERN_LENGTH_MAX: Final = 1_100  # `patterns.py` has a lower maximum for each kind of pattern
VALUE_LENGTH_MAX: Final = 512  # of a user, API key or tenant: the maximum length of a key
REASON_LENGTH_MAX: Final = 1_000
DAY_S: Final = 86_400.0

_PRINTABLE_FORM: Final = r"^[^\x00-\x1f\x7f]*$"
_ATTRIBUTE_FORM: Final = "^[A-Za-z_][A-Za-z0-9_]*$"
_UNIT_FORM: Final = "^[a-z][a-z0-9_]{0,63}$"
_SOURCE_FORM: Final = "^[a-z][a-z0-9_]{0,63}$"
# No colon: in a URL, `user:42` names a subject and not an id.
_OVERRIDE_ID: Final = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
_WILDCARD_INSIDE: Final = re.compile(r"[?\[]|\*.")


# ----------------------------------------------------------------------------------------- names


def _check_printable(name: str) -> None:
    if not name.isprintable():
        raise ConfigError(f"{quoted(name)} contains unprintable characters; remove them")


def _check_tier_name(name: str) -> None:
    if len(name) > NAME_LENGTH_MAX or not name.isprintable():
        raise ConfigError(
            f"{quoted(name)} is not a valid tier name: use at most {NAME_LENGTH_MAX} printable "
            f"characters; for example pro"
        )


def _check_rule_id(name: str) -> None:
    _check_printable(name)
    if name.startswith(RESERVED_NAMES):
        raise ConfigError(
            f"{quoted(name)} begins like the name of a list, such as (deny), or of limits that "
            f"come with a call, such as limit:emails; choose another id"
        )


def _check_attribute(name: str) -> None:
    if not re.fullmatch(_ATTRIBUTE_FORM, name):
        raise ConfigError(
            f"{quoted(name)} is not a valid attribute name: use the letters a to z, digits and _; "
            f"for example region"
        )
    if (meant := request_field_like(name) or name) != name:
        # As an attribute that no request has, it would count all clients together.
        raise ConfigError(f"{quoted(name)} must be spelled {meant}")


def _check_custom(name: str) -> None:
    _check_attribute(name)
    if name in REQUEST_FIELDS:
        raise ConfigError(f"{name} is not a custom attribute; write match: {{{name}: …}}")


def _check_source(name: str) -> None:
    if not re.fullmatch(_SOURCE_FORM, name):
        raise ConfigError(
            f"{quoted(name)} is not the name of a load: use cpu, memory, pushed, or a name of "
            f"lower-case letters, digits and _ with at most 64 characters; for example queue_depth"
        )


def _check_unit(name: str) -> None:
    if not re.fullmatch(_UNIT_FORM, name):
        raise ConfigError(
            f"{quoted(name)} is not the name of a unit: use lower-case letters, digits and _, at "
            f"most 64; for example tokens"
        )


def check_override_id(name: str) -> None:
    """Raise ConfigError unless the text can be the id of an override."""
    if not re.fullmatch(_OVERRIDE_ID, name):
        raise ConfigError(
            f"{quoted(name)} is not an id: at most 64 letters, digits, dots, - and _, of which "
            f"the first is a letter or a digit; for example black-friday"
        )


def check_owner(subject: str) -> None:
    """Raise ConfigError unless the text names a user, API key or tenant."""
    prefix, _, value = subject.partition(":")
    if prefix not in OWNERS or not 1 <= len(value) <= VALUE_LENGTH_MAX:
        raise ConfigError(
            f"{quoted(subject)} does not name a user, API key or tenant; "
            f'write "user:42", "api_key:sk_1" or "tenant:acme"'
        )


def _name(example: str) -> ValueShape:
    return text(example, NAME_LENGTH_MAX, check=_check_printable, pattern=_PRINTABLE_FORM)


# ---------------------------------------------------------------------------------------- limits

# Rules share their rates: a document of 20,000 rules has a few dozen different ones.
_parsed: Final = lru_cache(maxsize=1_024)(parse_limits)

# fmt: off
_IN_FULL: Final = record(
    Limit, {"limit": 10, "per": "1m"},
    Field("limit", whole(1, UNITS_MAX, 10), "The number of units.", required=True),
    Field("per", seconds("1m"), "The window, from 1 ms to 366 days.", required=True),
    Field("algorithm", choice(ALGORITHM_NAMES),
          "token_bucket: a steady rate with bursts. leaky_bucket: requests are delayed and evenly "
          "spaced. sliding_window_log: exact in every window. sliding_window_counter: nearly "
          "exact, in little memory. fixed_window: aligned windows."),
    Field("burst", whole(0, UNITS_MAX, 20), "Units above the limit that a bucket can hold."),
    Field("capacity", whole(1, UNITS_MAX, 30), "All units that a bucket holds, instead of burst."),
    Field("refill_every", seconds("1s"),
          "Of a token_bucket: the units of this time are added at once, at its end."),
    Field("debt", whole(0, UNITS_MAX, 5_000),
          "The units that it owes at most after a cost was settled late; 0: none. By default its "
          "capacity, or what ten minutes pay back if that is more."),
    Field("name", _name("logins"),
          "Distinguishes limits with the same algorithm and window; counts are stored under it."),
)
# fmt: on
_RATE_FORM: Final = (
    r"^\s*[0-9][0-9_]*\s*(/|[Pp][Ee][Rr]|[Ii][Nn]\s+[Aa][Nn][Yy])\s*[0-9_.]*\s*[A-Za-z]+"
)


def limit_data(limit: Limit) -> str | Json:
    """Return a limit as a rate or, if a rate cannot express it, as a mapping.

    >>> limit_data(Limit(1000, per=60, burst=200))
    '1000/minute burst 200'
    >>> limit_data(Limit(5, per=60, algorithm="sliding_window_log"))
    '5 in any minute'
    >>> limit_data(Limit(5, per=90, name="logins"))
    {'limit': 5, 'per': '90s', 'algorithm': 'token_bucket', 'name': 'logins'}
    """
    if not limit.name:
        return str(limit)
    # A burst cannot express a capacity below the limit.
    room = {"burst": limit.burst} if limit.burst else {"capacity": limit.capacity}
    return {
        "limit": limit.limit,
        "per": duration_text(limit.window_ns),
        "algorithm": limit.algorithm,
        **(room if limit.capacity != limit.limit else {}),
        "name": limit.name,
        **({"refill_every": duration_text(limit.refill_step_ns)} if limit.refill_every else {}),
        **({} if limit.debt is None else {"debt": limit.debt}),
    }


def _limits_of(place: DocumentPlace) -> Limits:
    """Return the limits of a rate, which may be several, or of a mapping."""
    if place.node.kind == "mapping":
        limit = _IN_FULL.read(place)
        return (limit,) if limit is not None else ()
    if place.node.kind != "text":
        place.fail(f'{place.shown} is not a rate; for example "10/second"')
        return ()
    rate = place.text('"10/second"', TEXT_LENGTH_MAX)
    try:
        return _parsed(rate) if rate else ()
    except RateSyntaxError as error:
        at = f"at character {error.position + 1}"
        place.fail(f'{quoted(rate)} is not a rate: {error.problem} {at}; for example "10/second"')
    return ()


def _read_limits(place: DocumentPlace) -> Limits:
    problems_before = place.problem_count
    found: dict[str, Limit] = {}
    for item in place.items(_LIMITS_HINT):
        for limit in _limits_of(item):
            if other := found.get(limit.identity):
                item.fail(
                    f"{other} and {limit} would share one count; remove one, or name them, for "
                    f"example {{limit: {limit.limit}, per: {limit.per}, name: second}}"
                )
            found[limit.identity] = limit
    if place.problem_count == problems_before and not 1 <= len(found) <= LIMITS_MAX:
        place.fail(
            f"expected 1 to {LIMITS_MAX} limits, found {len(found)}; for example {_LIMITS_HINT}"
        )
    return tuple(found.values())


_LIMIT: Final = named("limit", "A limit as a mapping.", _IN_FULL)
_RATE: Final = named(
    "rate",
    "Rates: units per time, with an optional burst, capacity, refill step, debt or algorithm; or "
    "units `in any` time, which no window of that length exceeds; separate several by `;`, `,` or "
    "`|`. "
    "Units of time: ms, second (s), minute (m), hour (h), day (d), week (w), month, year.",
    text("10/second; 1000/day burst 200", TEXT_LENGTH_MAX, pattern=_RATE_FORM),
)
_ONE_LIMIT: Final[Json] = {"anyOf": [_RATE.schema, _LIMIT.schema]}
_LIMITS_EXAMPLE: Final = ["10/second", "1000/hour burst 200"]
_LIMITS_HINT: Final = shown(_LIMITS_EXAMPLE)
LIMITS: Final = named(
    "limits",
    "Limits, all of which must allow a request: rates or mappings.",
    ValueShape(
        _read_limits,
        {
            "anyOf": [
                *_ONE_LIMIT["anyOf"],
                {"type": "array", "minItems": 1, "maxItems": LIMITS_MAX, "items": _ONE_LIMIT},
            ]
        },
        _LIMITS_EXAMPLE,
        lambda limits: [limit_data(limit) for limit in limits],
    ),
)


# fmt: off
_CONSISTENCY: Final = Field(
    "consistency", choice(CONSISTENCIES),
    "Who decides a check if several nodes share a Redis. strict: Redis, on every check. leased: "
    "the node, from units that it takes in advance; never over the limit. eventual: the node while "
    "the subject is far from its limit; it reports afterwards.",
)
_WITH_CONSISTENCY: Final = record(
    LimitsOfOne, {"limits": "100/minute", "consistency": "strict"},
    Field("limits", LIMITS, "The limits.", required=True),
    _CONSISTENCY,
)
# fmt: on


def _read_limits_of_one(place: DocumentPlace) -> LimitsOfOne:
    if place.has("limits") or place.has("consistency"):
        return _WITH_CONSISTENCY.read(place) or LimitsOfOne()
    return LimitsOfOne(LIMITS.read(place))


_LIMITS_OF_ONE: Final = named(
    "limitsOfOne",
    "The limits of a tier or key, alone or with its consistency.",
    ValueShape(
        _read_limits_of_one,
        {"anyOf": [LIMITS.schema, _WITH_CONSISTENCY.schema]},
        _WITH_CONSISTENCY.example,
        lambda one: (_WITH_CONSISTENCY if one.consistency else LIMITS).write(
            one if one.consistency else one.limits
        ),
    ),
)


_BY_TIER: Final = mapping_of(
    _LIMITS_OF_ONE, {"free": ["100/minute"]}, _check_tier_name, _name("free").schema
)


# -------------------------------------------------------------------------------------- requests


def _patterns(
    example: str, compiled: Callable[[str], object], spelled: Callable[[str], str] = str
) -> ValueShape:
    """Return the shape of the patterns of one condition."""
    pattern = text(example, PATTERN_LENGTH_MAX, check=compiled)
    shape = replace(pattern, read=lambda place: spelled(pattern.read(place)))
    return list_of(shape, "patterns", least=1, most=PATTERNS_MAX, unwrap=True)


_GLOBS: Final = "exact or with * ? [abc]"
# fmt: off
_MATCH: Final = named(
    "match", "The requests that meet all of these conditions; without conditions, all requests.",
    record(
        Match, {"endpoint": "/login"},
        Field("user", _patterns("bot-*", compile_glob), f"Users, {_GLOBS}."),
        Field("api_key", _patterns("sk_test_*", compile_glob), f"API keys, {_GLOBS}."),
        Field("ip", _patterns("10.0.0.0/8", compile_network), "Addresses and networks."),
        Field("tenant", _patterns("acme", compile_glob), f"Tenants, {_GLOBS}."),
        Field("tier", _patterns("free", compile_glob), f"Tiers, {_GLOBS}."),
        Field("endpoint", _patterns("/v1/orders/*", compile_endpoint),
              "Paths: exact, route templates, globs, or re: followed by an RE2 pattern."),
        Field("method", _patterns("POST", compile_method, str.upper), "HTTP methods, in any case."),
        Field("attributes",
              mapping_of(_patterns("eu-*", compile_glob), {"region": "eu-*"}, _check_custom,
                         {"pattern": _ATTRIBUTE_FORM, "not": {"enum": list(REQUEST_FIELDS)}}),
              f"Other attributes of a request, {_GLOBS}."),
    ),
)
# fmt: on
_BY: Final = list_of(
    text("api_key", NAME_LENGTH_MAX, check=_check_attribute, pattern=_ATTRIBUTE_FORM),
    "attributes",
    most=BY_MAX,
    unique="",
)
_UNITS: Final = whole(0, COST_MAX, 5)
_COST_BY_ENDPOINT: Final = mapping_of(_UNITS, {"/search": 5, "*": 1}, compile_endpoint)


def _read_cost(place: DocumentPlace) -> tuple[int, dict[str, int]]:
    """Return the cost of a request (`*`, or a plain number), and the costs at some endpoints."""
    if place.node.kind != "mapping":
        return place.whole(0, COST_MAX, f"5, or {shown(_COST_BY_ENDPOINT.example)}"), {}
    costs: dict[str, int] = _COST_BY_ENDPOINT.read(place)
    if "*" in costs and (last := list(costs)[-1]) != "*":
        place.at(last).fail_name(f'{quoted(last)} can never match after "*"; put "*" last')
    return costs.pop("*", 1), costs


def _write_cost(held: tuple[int, Mapping[str, int]]) -> int | dict[str, int]:
    cost, costs = held
    return {**costs, **({} if cost == 1 else {"*": cost})} if costs else cost


_COST: Final = ValueShape(
    _read_cost,
    {"anyOf": [_UNITS.schema, _COST_BY_ENDPOINT.schema]},
    _COST_BY_ENDPOINT.example,
    _write_cost,
)


# ------------------------------------------------------------------------- scales and penalties


def _check_scale(place: DocumentPlace, scale: Scale) -> None:
    problems_before = place.problem_count
    if scale.source in SHARE_SOURCES:
        for name, example in (("low", 0.7), ("high", 0.95), ("idle", 0.3)):
            if place.has(name):
                number(0, 1, example).read(place.at(name))
    elif not (place.has("low") and place.has("high")):
        place.fail(f"{scale.source} needs low and high; for example low: 100, high: 5000")
    if place.problem_count > problems_before:
        return
    if scale.low >= scale.high:
        place.fail(f"low ({scale.low:g}) must be less than high ({scale.high:g})")
    elif scale.idle is not None and scale.most == 1:
        place.fail(f"idle has no effect without most; for example most: {FACTOR_MAX}")
    elif scale.most > 1 and scale.idle_load >= scale.low:
        place.fail(f"idle ({scale.idle_load:g}) must be less than low ({scale.low:g})")


# fmt: off
_SCALE: Final = named(
    "scale",
    "Limits that follow one load: multiplied by `most` up to `idle`, by 1 at `low`, and by `least` "
    "from `high` on.",
    record(
        Scale, {"source": "cpu", "low": 0.7, "high": 0.95, "least": 0.2},
        Field("source", text("cpu", NAME_LENGTH_MAX, check=_check_source, pattern=_SOURCE_FORM),
              "`cpu` or `memory`, or the name of a number that the protected system pushes; "
              "`pushed` is from 0 to 1."),
        Field("low", number(0, LOAD_MAX, 0.7), "The load at which the base limits apply."),
        Field("high", number(0, LOAD_MAX, 0.95),
              "The load from which on the share `least` applies; more than `low`."),
        Field("least", number(0.01, 1, 0.2), "The share of the limits that always remains."),
        Field("smoothing", seconds("10s", 0, DAY_S),
              "The time in which two thirds of a change take effect.", ("smoothing_s",)),
        Field("most", number(1, FACTOR_MAX, FACTOR_MAX), "The factor at the load `idle` or less."),
        Field("idle", number(0, LOAD_MAX, 0.3),
              "The load up to which `most` applies, less than `low`; by default half of it."),
        Field("stale_after", seconds("30s", 1, DAY_S),
              "The age from which on a load counts as unknown, and the base limits apply.",
              ("stale_after_s",)),
        check=_check_scale,
    ),
)
# fmt: on


def _penalty_time(example: str) -> ValueShape:
    return seconds(example, 1, PENALTY_S_MAX)


def _penalty_settings(**found: Any) -> PenaltySettings:
    """Return the settings, in which the first cool-down may raise the default maximum."""
    settings = PenaltySettings(**found)
    longest_s = max(settings.cooldown_max_s, settings.cooldown_s)
    return settings if "cooldown_max_s" in found else replace(settings, cooldown_max_s=longest_s)


def _check_penalty(place: DocumentPlace, settings: PenaltySettings) -> None:
    first_s, longest_s = settings.cooldown_s, settings.cooldown_max_s
    if first_s > longest_s:
        place.fail(f"cooldown ({first_s:g} s) must not exceed cooldown_max ({longest_s:g} s)")


# fmt: off
_PENALTY: Final = named(
    "penalty",
    "Cool-downs for clients that keep sending after a denial. Each is twice as long as the one "
    "before, and after some of them the client is blocked.",
    record(
        PenaltySettings, {"after": 10, "cooldown": "10s", "block": "1h"},
        Field("after", whole(1, PENALTY_COUNT_MAX, 10),
              "The number of requests that did not wait which starts a cool-down."),
        Field("within", _penalty_time("1m"),
              "The time in which these requests are counted.", ("within_s",)),
        Field("cooldown", _penalty_time("10s"),
              "The length of the first cool-down.", ("cooldown_s",)),
        Field("cooldown_max", _penalty_time("10m"),
              "The maximum length of a cool-down.", ("cooldown_max_s",)),
        Field("block_after", whole(1, COOLDOWNS_MAX, 5),
              "The number of cool-downs after which the client is blocked."),
        Field("block", _penalty_time("1h"), "The length of a block.", ("block_s",)),
        Field("decay", _penalty_time("1h"),
              "The time after which one cool-down is forgotten.", ("decay_s",)),
        build=_penalty_settings, check=_check_penalty,
    ),
)
# fmt: on


# ----------------------------------------------------------------------------------------- rules


def _check_rule(place: DocumentPlace, rule: Rule) -> None:
    if rule.keys and len(rule.by) != 1:
        place.at("keys").fail(
            "keys needs a rule that counts by one attribute, for example by: [api_key]"
        )
    if rule.scope != "global" and place.has("across_regions"):
        place.at("across_regions").fail(
            "across_regions has no effect on a rule of one region; write scope: global too, "
            "or remove it"
        )


# fmt: off
_RULE: Final = named(
    "rule", "Which requests get which limits.",
    record(
        Rule, {"id": "orders", "by": ["api_key"], "limits": ["10/second"]},
        Field("id", text("orders", NAME_LENGTH_MAX, check=_check_rule_id, pattern=_PRINTABLE_FORM),
              "The rule's name, which must be unique.", required=True),
        Field("match", _MATCH, "The requests that the rule applies to; by default all."),
        Field("by", _BY, "The attributes that are counted separately; []: all requests together.",
              required=True),
        Field("limits", LIMITS, "The limits. Without them, the document's tiers apply."),
        Field("tiers", _BY_TIER, "Limits of some tiers of this document, instead of `limits`."),
        Field("keys", mapping_of(_LIMITS_OF_ONE, {"sk_vip_*": ["1000/minute"]}, compile_glob),
              f"Limits of some keys ({_GLOBS}), instead of `limits` and `tiers`; for a rule that "
              f"counts by one attribute."),
        Field("unit", text("tokens", NAME_LENGTH_MAX, check=_check_unit, pattern=_UNIT_FORM),
              "What the rule counts: requests, tokens, micro_dollars, or a name of your own, of "
              "which a check says how many it costs; by default requests."),
        Field("cost", _COST,
              "Units for each unit of the request's cost; or by endpoint, where the first that "
              "matches applies and * is for all others.", ("cost", "costs")),
        _CONSISTENCY,
        Field("scope", choice(SCOPES),
              "region: the limits count in each region by itself. global: in all regions together; "
              "such a rule is strict."),
        Field("across_regions", choice(ACROSS_REGIONS),
              "Of a global rule. exact: never over the limits. eventual: a region that is cut off "
              "goes on alone. By default eventual."),
        Field("on_failure", choice(ON_FAILURES),
              "If the store cannot decide: open: requests are allowed. closed: requests are "
              "rejected. local: this machine's own counts decide. By default the limiter's."),
        Field("mode", choice(MODES),
              "enforce: the rule applies. shadow: decided and recorded, but never denies. off: "
              "ignored."),
        Field("replaces", _name("api"),
              "The id of the next rule, whose place this rule takes when it is enforced."),
        Field("rollout", whole(0, 100, 50),
              "The percentage of subjects that the rule applies to."),
        Field("split", whole(1, SPLIT_MAX, 8),
              "The number of parts that each subject's limits are stored in, for subjects that are "
              "too busy for one key of the store."),
        Field("envoy_quota", choice(ENVOY_QUOTAS),
              "Experimental: Envoys get parts of the limits in advance. rate: shares of the rate. "
              "grants: finite units, never over the limits."),
        Field("scale",
              list_of(_SCALE, "loads", least=1, most=SCALES_MAX, unique="source", unwrap=True),
              "The loads that the limits follow; the smallest factor applies."),
        Field("penalty", _PENALTY, "Cool-downs for clients that keep sending after a denial."),
        check=_check_rule,
    ),
)
# fmt: on


# ------------------------------------------------------------------------------------- overrides

_OWNER_NAMES: Final[tuple[OverrideOwner, ...]] = get_args(OverrideOwner)


@dataclass(frozen=True, slots=True)
class _Owner:
    """The fields of `for`, of which one is given."""

    user: str = ""
    api_key: str = ""
    tenant: str = ""
    ip: str = ""


def _value(example: str, check: Callable[[str], object] = str) -> ValueShape:
    return text(example, VALUE_LENGTH_MAX, check=check)


_OWNER_RECORD: Final = record(
    _Owner,
    {"user": "alice"},
    Field("user", _value("alice"), "A user."),
    Field("api_key", _value("sk_1"), "An API key."),
    Field("tenant", _value("acme"), "A tenant."),
    Field("ip", _value("192.0.2.7", compile_network), "An address or a network."),
    build=lambda **found: next(iter(found.items()), None),
    exactly_one=_OWNER_NAMES,
)
_OWNER: Final = replace(_OWNER_RECORD, write=lambda held: {held[0]: held[1]})


def _read_time(place: DocumentPlace) -> datetime | None:
    node = place.node
    try:
        time = node.value if isinstance(node.value, datetime) else datetime.fromisoformat(node.text)
        if node.kind in {"text", "time"} and time.tzinfo is not None:
            return time.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    place.fail(f"{place.shown} is not a time with a time zone; for example 2026-12-31T23:59:59Z")
    return None


_TIME: Final = ValueShape(
    _read_time,
    {"type": "string", "format": "date-time"},
    "2026-12-31T23:59:59Z",
    lambda until: until.isoformat().replace("+00:00", "Z"),
)


def _remark(example: str) -> ValueShape:
    remark = text(example, REASON_LENGTH_MAX)
    return replace(remark, read=lambda place: remark.read(place).strip())


# fmt: off
_OVERRIDE: Final = named(
    "override",
    "Other limits for one user, API key, tenant or address: `limits`, or a factor for the rule's.",
    record(
        Override, {"for": {"user": "alice"}, "multiply": 2},
        Field("id", text("black-friday", NAME_LENGTH_MAX, check=check_override_id,
                         pattern=_OVERRIDE_ID),
              "The name by which the override is removed; unique in the document."),
        Field("for", _OWNER, "The user, API key, tenant or address.", ("attribute", "value"),
              required=True),
        Field("rule", text("orders", NAME_LENGTH_MAX),
              "The id of the rule that it changes; without it, every rule that counts by the kind "
              "of the subject."),
        Field("limits", LIMITS, "The limits instead of the rule's."),
        Field("multiply", number(0.001, 1_000, 2), "The factor for the rule's limits."),
        Field("until", _TIME, "The time, with a zone, at which it expires; without it, never."),
        Field("reason", _remark("launch day"), "The reason, for later readers."),
        Field("author", _remark("ann"), "The author of the override."),
        exactly_one=("limits", "multiply"),
    ),
)
# fmt: on


# ---------------------------------------------------------------------------------- the document


def _read_version(place: DocumentPlace) -> tuple[()]:
    node = place.node
    if node.kind != "number" or not isinstance(node.value, int) or node.value != VERSION:
        place.fail(f"unsupported version {place.shown}; write version: {VERSION}")
    return ()


_VERSION: Final = ValueShape(
    _read_version, {"type": "integer", "const": VERSION}, VERSION, lambda _: VERSION
)


def _entries(example: list[str]) -> ValueShape:
    """Return the shape of an allow or deny list, of which the irregular globs are bounded."""
    shape = list_of(text(example[0], PATTERN_LENGTH_MAX, check=check_entry), "", example=example)

    def read(place: DocumentPlace) -> tuple[str, ...]:
        problems_before = place.problem_count
        found: tuple[str, ...] = shape.read(place)
        globs = [each for each in found if _WILDCARD_INSIDE.search(each)]
        if len(globs) > IRREGULAR_GLOBS_MAX and place.problem_count == problems_before:
            passes(place.fail, Lists.compile, globs)
        return found

    return replace(shape, read=read)


_PRICES_EXAMPLE: Final = {"large": {"input": 2_500_000, "output": 10_000_000}}
_ANY_PRICES: Final = mapping_of(
    mapping_of(whole(0, PRICE_MAX, 2_500_000), {"input": 2_500_000}, _check_unit),
    _PRICES_EXAMPLE,
    _check_printable,
)


def _read_prices(place: DocumentPlace) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = _ANY_PRICES.read(place)
    if len(found) > PRICED_MODELS_MAX:
        place.fail(f"expected at most {PRICED_MODELS_MAX:,} models, found {len(found):,}")
    return found


_PRICES: Final = replace(_ANY_PRICES, read=_read_prices)

# fmt: off
_DOCUMENT: Final = record(
    Document, {"version": 1},
    Field("$schema", text("rules.schema.json", PATTERN_LENGTH_MAX), "For editors.", ()),
    Field("version", _VERSION, "The version of the document's format.", (), required=True),
    Field("tiers", _BY_TIER, "Limits by tier, for rules without limits."),
    Field("rules", list_of(_RULE, "rules", most=RULES_MAX, single=False, unique="id"),
          "For each distinct `by` and `unit`, the first rule that matches a request applies. Rules "
          "that differ in one of them all apply, and all must allow the request."),
    Field("assign", mapping_of(text("pro", NAME_LENGTH_MAX), {"user:42": "pro"}, check_owner,
                               {"pattern": f"^({'|'.join(OWNERS)}):"}),
          "The tiers of users, API keys and tenants, for requests that name no tier."),
    Field("allow", _entries(["api_key:sk_internal_*", "10.0.0.0/8"]),
          f"Never limited: keys or users ({_GLOBS}), addresses, networks. `deny` goes before it."),
    Field("deny", _entries(["api_key:sk_revoked_*", "user:42"]),
          f"Always denied: keys or users ({_GLOBS}), addresses, networks."),
    Field("overrides", list_of(_OVERRIDE, "overrides", single=False, unique="id"),
          "Other limits for one user, API key, tenant or address, optionally until a time."),
    Field("prices", _PRICES,
          "By model and kind of token: micro-dollars for a million tokens."),
)
# fmt: on


def document_at(place: DocumentPlace) -> Document:
    """Return the document whose root this is; add its problems."""
    document: Document = _DOCUMENT.read(place) or Document()
    check_document(place, document)
    return document


def to_data(document: Document) -> Json:
    """Return the document as plain data (dict, list, str, numbers), for `from_data`.

    >>> to_data(Document(deny=("user:42",)))
    {'version': 1, 'deny': ['user:42']}
    """
    return cast("Json", _DOCUMENT.write(document))


def document_schema() -> Json:
    """Return the JSON Schema (draft 2020-12) of a rule document."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:ratekeeper:rules:{VERSION}",
        "title": "Ratekeeper rule document",
        "description": "All rules of a service, with its tiers, lists and overrides.",
        **_DOCUMENT.schema,
        "$defs": DEFINITIONS,
    }
