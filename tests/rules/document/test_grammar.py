"""The grammar as two tables: the valid fields, and the message for each mistake."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from ratekeeper.core.model import Limit
from ratekeeper.rules.document.grammar import LIMITS as LIMITS_SHAPE
from ratekeeper.rules.document.model import (
    BY_MAX,
    PATTERNS_MAX,
    RULES_MAX,
    LimitsOfOne,
    Match,
    Override,
    PenaltySettings,
    Rule,
    Scale,
)
from ratekeeper.rules.document.reading import DocumentError, from_data, read
from ratekeeper.rules.document.shapes import seconds
from ratekeeper.rules.document.tree import DocumentPlace, ProblemList, tree_of_yaml

LIMITS = (Limit(5, per=1),)
SEVEN = LimitsOfOne((Limit(7, per=1),))


def rule(text: str) -> Rule:
    """Return the rule with these fields beside an id, `by` and limits, in a document with tiers."""
    usual = {"id": "id: r", "by": "by: user", "limits": "limits: 5/s"}
    lines = [line for name, line in usual.items() if not text.startswith(f"{name}:")]
    body = "\n    ".join([*lines, text])
    return read(f"version: 1\ntiers: {{pro: 9/s}}\nrules:\n  - {body}\n").rules[0]


def problems(text: str) -> list[str]:
    with pytest.raises(DocumentError) as caught:
        read(text, "t")
    return [str(problem) for problem in caught.value.problems]


# ----------------------------------------------------------------------------------- valid fields


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("id: 'a b/ü'", {"id": "a b/ü"}),
        ("by: []", {"by": ()}),
        ("by: ip", {"by": ("ip",)}),
        ("by: [tenant, region]", {"by": ("tenant", "region")}),
        ("match: {}", {"match": Match()}),
        ("match: {endpoint: /a}", {"match": Match(endpoint=("/a",))}),
        ("match: {endpoint: [/a, 're:/b+']}", {"match": Match(endpoint=("/a", "re:/b+"))}),
        ("match: {method: [get, POST]}", {"match": Match(method=("GET", "POST"))}),
        ("match: {ip: 10.0.0.0/8}", {"match": Match(ip=("10.0.0.0/8",))}),
        ("match: {tier: gold}", {"match": Match(tier=("gold",))}),
        (
            "match: {user: '42', api_key: sk_*, tenant: [a, b]}",
            {"match": Match(user=("42",), api_key=("sk_*",), tenant=("a", "b"))},
        ),
        (
            "match: {attributes: {region: eu-*}}",
            {"match": Match(attributes={"region": ("eu-*",)})},
        ),
        ("tiers: {pro: 7/s}", {"tiers": {"pro": SEVEN}}),
        ("keys: {'a*': 7/s}", {"keys": {"a*": SEVEN}}),
        ("cost: 5", {"cost": 5}),
        ("cost: 0", {"cost": 0}),
        ("cost: {/a: 5, '/b/{id}': 0}", {"cost": 1, "costs": {"/a": 5, "/b/{id}": 0}}),
        ("cost: {/a: 5, '*': 2}", {"cost": 2, "costs": {"/a": 5}}),
        ("consistency: strict", {"consistency": "strict"}),
        ("consistency: leased", {"consistency": "leased"}),
        ("scope: region", {"scope": "region"}),
        ("scope: global", {"scope": "global", "across_regions": None}),
        ("scope: global\n    consistency: strict", {"scope": "global", "consistency": "strict"}),
        (
            "scope: global\n    across_regions: exact",
            {"scope": "global", "across_regions": "exact"},
        ),
        (
            "consistency: leased\n    envoy_quota: rate",
            {"consistency": "leased", "envoy_quota": "rate"},
        ),
        (
            "tiers: {pro: {limits: 7/s, consistency: eventual}}",
            {"tiers": {"pro": LimitsOfOne(SEVEN.limits, "eventual")}},
        ),
        ("tiers: {pro: {limits: [7/s]}}", {"tiers": {"pro": SEVEN}}),
        (
            "keys: {'a*': {limits: 7/s, consistency: strict}, b: 8/s}",
            {
                "keys": {
                    "a*": LimitsOfOne(SEVEN.limits, "strict"),
                    "b": LimitsOfOne((Limit(8, per=1),)),
                }
            },
        ),
        ("on_failure: closed", {"on_failure": "closed"}),
        ("mode: shadow", {"mode": "shadow"}),
        ("mode: off", {"mode": "off"}),
        ("mode: 'off'", {"mode": "off"}),
        ("rollout: 0", {"rollout": 0}),
        ("scale: {}", {"scale": (Scale(),)}),
        (
            "scale: {source: pushed, low: 0, high: 1, least: 0.5, smoothing: 1m}",
            {"scale": (Scale("pushed", 0.0, 1.0, 0.5, 60.0),)},
        ),
        (
            "scale: {source: jobs, low: 100, high: 5000, most: 1.5, idle: 10, stale_after: 1m}",
            {"scale": (Scale("jobs", 100, 5000, 0.2, 10, 1.5, 10, 60),)},
        ),
        (
            "scale: [{source: memory}, {source: jobs, low: 0, high: 1e15}]",
            {"scale": (Scale("memory"), Scale("jobs", 0, 1e15))},
        ),
        ("split: 8", {"split": 8}),
        ("penalty: {}", {"penalty": PenaltySettings()}),
        (
            "penalty: {after: 3, cooldown: 2, cooldown_max: 4, block_after: 5, decay: 9}",
            {"penalty": PenaltySettings(3, 60.0, 2.0, 4.0, 5, 3600.0, 9.0)},
        ),
        (
            "penalty: {cooldown: 20m}",
            {"penalty": PenaltySettings(cooldown_s=1200.0, cooldown_max_s=1200.0)},
        ),
    ],
)
def test_fields_of_a_rule(text: str, expected: dict[str, Any]) -> None:
    """Each field is read; all others have their defaults."""
    usual: dict[str, Any] = {"id": "r", "by": ("user",), "limits": LIMITS}
    assert rule(text) == Rule(**(usual | expected))


def test_a_rule_without_limits_needs_tiers() -> None:
    """A rule may omit its limits if the document has tiers."""
    document = read("{version: 1, tiers: {pro: 5/s}, rules: [{id: a, by: user}]}")
    assert document.rules[0].limits == ()
    assert document.tiers == {"pro": LimitsOfOne(LIMITS)}


@pytest.mark.parametrize(
    ("text", "override"),
    [
        ("{for: {user: '42'}, multiply: 2}", Override("user", "42", multiply=2.0)),
        ("{for: {tenant: a}, limits: 5/s}", Override("tenant", "a", limits=LIMITS)),
        (
            "{for: {api_key: k}, rule: r, limits: [5/s], reason: ' a b ', author: me}",
            Override("api_key", "k", "r", LIMITS, reason="a b", author="me"),
        ),
        (
            "{for: {user: a}, multiply: 0.5, until: 2026-01-02T03:04:05+01:00}",
            Override("user", "a", multiply=0.5, until=datetime(2026, 1, 2, 2, 4, 5, tzinfo=UTC)),
        ),
        (
            "{for: {user: a}, multiply: 1, until: '2026-01-02 03:04Z'}",
            Override("user", "a", multiply=1.0, until=datetime(2026, 1, 2, 3, 4, tzinfo=UTC)),
        ),
    ],
)
def test_fields_of_an_override(text: str, override: Override) -> None:
    """An override is for one user, key or tenant, has limits or a factor, and may expire."""
    document = read(f"{{version: 1, rules: [{{id: r, by: [], limits: 5/s}}], overrides: [{text}]}}")
    assert document.overrides == (override,)


def test_lists_and_assignments() -> None:
    """List entries keep their spelling; assignments refer to tiers of the document."""
    document = read(
        "version: 1\ntiers: {pro: 5/s}\nallow: api_key:sk_*\ndeny: ['user:1', 10.0.0.0/8]\n"
        "assign: {'user:1': pro, 'tenant:a:b': pro, api_key:k: pro}"
    )
    assert (document.allow, document.deny) == (("api_key:sk_*",), ("user:1", "10.0.0.0/8"))
    assert document.assign == dict.fromkeys(("user:1", "tenant:a:b", "api_key:k"), "pro")


def test_anchors_are_shared_limits() -> None:
    """An alias repeats its anchor's value, and `<<` copies a rule's fields."""
    document = read(
        "version: 1\nrules:\n"
        "  - &first {id: a, by: user, limits: &few [5/s], mode: shadow}\n"
        "  - {<<: *first, id: b, tiers: {}}\n"
        "  - {id: c, by: ip, limits: *few}\n"
    )
    assert [(it.id, it.by, it.mode) for it in document.rules] == [
        ("a", ("user",), "shadow"),
        ("b", ("user",), "shadow"),
        ("c", ("ip",), "enforce"),
    ]
    assert {it.limits for it in document.rules} == {LIMITS}


# --------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("id: 42", 'id: expected text, but 42 is a number; quote it: "42"'),
        ('id: "a\\tb"', 'id: "a\\tb" contains unprintable characters; remove them'),
        ("limit: 5/s", 'unknown field "limit"; did you mean "limits"?'),
        ("by: [user, user]", 'by[1]: "user" occurs twice; change or remove one'),
        (
            "by: [user name]",
            'by[0]: "user name" is not a valid attribute name: use the letters a to',
        ),
        ("by: [apikey]", 'by[0]: "apikey" must be spelled api_key'),
        ("by: [api-key]", 'by[0]: "api-key" is not a valid attribute name: use the letters a to z'),
        (f"by: [{', '.join('abcdefghi')}]", f"by: expected at most {BY_MAX} attributes, found 9"),
        ("match: /a", 'match: "/a" is not a mapping; for example {endpoint: /login}'),
        (
            "match: {endpoint: []}",
            "match.endpoint: expected 1 to 1,000 patterns, found 0; for ex",
        ),
        ("match: {endpoint: 're:('}", "match.endpoint: "),
        ("match: {method: 'GET, POST'}", "match.method: 'GET, POST' is not an HTTP method"),
        ("match: {ip: 10.0.0}", "match.ip: network '10.0.0': '10.0.0' is not an address; write it"),
        (
            "match: {ip: 10.0.0.1/8}",
            "match.ip: network '10.0.0.1/8' has bits set after its first 8",
        ),
        (
            "match: {attributes: {a-b: x}}",
            'match.attributes: "a-b" is not a valid attribute name',
        ),
        (
            "match: {attributes: {user: x}}",
            "match.attributes: user is not a custom attribute; write match: {",
        ),
        ("limits: 5/fortnight", 'limits: "5/fortnight" is not a rate: expected a unit: ms, second'),
        (
            "tiers: {pra: 5/s}",
            'tiers: there is no tier "pra" in this document; did you mean "pro"?',
        ),
        (
            "tiers: [pro]",
            "tiers: expected a mapping, found a list; for example {free: [",
        ),
        ("tiers: {pro: []}", "tiers.pro: expected 1 to 16 limits, found 0; for example ["),
        ("keys: {'[': 5/s}", "keys: "),
        ("cost: -1", "cost: -1 is not a whole number from 0 to 1,000,000; for example 5, or {/sea"),
        ("cost: {'*': 2, /a: 1}", 'cost: "/a" can never match after "*"; put "*" last'),
        ("cost: {'/a/{': 2}", "cost: "),
        (
            "consistency: strong",
            'consistency: unknown value "strong"; known: "strict", "leased", "eventual"',
        ),
        (
            "across_regions: exact",
            "across_regions: across_regions has no effect on a rule of one region; write scope",
        ),
        (
            "scope: region\n    across_regions: eventual",
            "across_regions: across_regions has no effect",
        ),
        (
            "scope: global\n    consistency: leased",
            "consistency: leased does not work with scope: global: the region's Redis decides ",
        ),
        (
            "scope: global\n    keys: {a: {limits: 7/s, consistency: eventual}}",
            'key "a" is eventual, which does not work with scope: global: the region\'s Redis',
        ),
        (
            "scope: global\n    tiers: {pro: {limits: 7/s, consistency: leased}}",
            'tier "pro" is leased, which does not work with scope: global',
        ),
        (
            "keys: {a: {consistency: strict}}",
            'keys.a: "limits" is missing; for example limits: ["10/second"',
        ),
        ("on_failure: on", "on_failure: on is not one of open, closed, local; for example open"),
        (
            "scale: {source: disk, high: 9}",
            "scale: disk needs low and high; for example low: 100, high",
        ),
        ("scale: {source: Disk}", 'scale.source: "Disk" is not the name of a load: use cpu, mem'),
        ("scale: {source: pushed, high: 5}", "scale.high: 5 is not a number from 0 to 1"),
        ("scale: {source: q, low: 1, high: 1e308}", "scale.high: 1e308 is not a number from 0 to"),
        ("scale: {source: q, low: 1, high: .nan}", "scale.high: .nan is not a number from 0 to"),
        ("scale: {source: q, low: 1, high: .inf}", "scale.high: .inf is not a number from 0 to"),
        ("scale: {idle: 0.1}", "scale: idle has no effect without most; for example most: 1.5"),
        ("scale: {most: 1.5, idle: 0.7}", "scale: idle (0.7) must be less than low (0.7)"),
        ("scale: {most: 1.5, low: 0}", "scale: idle (0) must be less than low (0)"),
        ("scale: {stale_after: 0}", "scale.stale_after: 0 is not a length of time from 1s to 1d"),
        ("scale: []", "scale: expected 1 to 8 loads, found 0; for example [{source: cpu, low"),
        ("scale: [{}, {}]", 'scale[1]: "cpu" occurs twice; change or remove one'),
        ("scale: {low: 0.99}", "scale: low (0.99) must be less than high (0.95)"),
        (
            "penalty: {block: 31d}",
            'penalty.block: "31d" is not a length of time from 1s to 30d; for',
        ),
        (
            "penalty: {cooldown: 1h, cooldown_max: 1m}",
            "penalty: cooldown (3600 s) must not exceed cooldown_max (60 s)",
        ),
        (
            "scale: {smoothing: 2d}",
            'scale.smoothing: "2d" is not a length of time of at most 1d; for',
        ),
    ],
)
def test_mistakes_in_a_rule(text: str, problem: str) -> None:
    """Each mistake gives one problem that starts with the path, the value found and the
    expected one."""
    with pytest.raises(DocumentError) as caught:
        rule(text)
    (first,) = caught.value.problems
    message = (
        f"{first.where}: {first.message}".removeprefix("rules[0]").lstrip(".").removeprefix(": ")
    )
    assert message.startswith(problem)
    assert first.line in range(4, 9)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("version: 2", "t:1:10: version: unsupported version 2; write version: 1"),
        ("version: 1.0", "t:1:10: version: unsupported version 1.0; write version: 1"),
        ("version: '1'", 't:1:10: version: unsupported version "1"; write version: 1'),
        (
            "version: [1]",
            "t:1:10: version: unsupported version a list; write version: 1",
        ),
        ("version:", "t:1:9: version: unsupported version nothing; write version: 1"),
        ("version: 1\nversion: 1", 't:2:1: "version" occurs twice; remove one'),
        (
            "version: 1\nrules: {id: a}",
            "t:2:8: rules: expected a list, found a mapping; for exa",
        ),
        (
            "version: 1\nrules: [{id: a, by: user}]",
            "t:2:9: rules[0]: the rule has no limits and the document defines no tiers; for exampl",
        ),
        (
            'version: 1\ntiers: {"a\\n": 5/s}',
            't:2:9: tiers: "a\\n" is not a valid tier name: use at',
        ),
        ("version: 1\ndeny: ['ip:10.0.0']", "t:2:8: deny[0]: entry 'ip:10.0.0': network '10.0.0'"),
        (
            "version: 1\ndeny: ['endpoint:/a']",
            "t:2:8: deny[0]: entry 'endpoint:/a': lists name clie",
        ),
        (
            "{version: 1, tiers: {a: 5/s}, assign: {'42': a}}",
            't:1:40: assign: "42" does not name a user, API',
        ),
        (
            "{version: 1, tiers: {a: 5/s}, assign: {'user:': a}}",
            't:1:40: assign: "user:" does not name a user, API',
        ),
        (
            "version: 1\nassign: {'user:1': pro}",
            't:2:20: assign["user:1"]: there is no tier "pro" in this document; none are defined',
        ),
    ],
)
def test_mistakes_at_the_top(text: str, problem: str) -> None:
    """Each mistake gives one problem with its line and column."""
    assert [found[: len(problem)] for found in problems(text)] == [problem]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "{for: {}, multiply: 2}",
            ".for: expected exactly one of user, api_key, tenant or ip; for",
        ),
        ("{for: {user: a, tenant: b}, multiply: 2}", ".for: expected exactly one of user, api_key"),
        ("{for: {ip: a}, multiply: 2}", ".for.ip: network 'a': 'a' is not an address; "),
        ("{id: 'a:b', for: {user: a}, multiply: 2}", '.id: "a:b" is not an id: at most 64 '),
        (
            "{for: {user: a}}",
            ": expected exactly one of limits or multiply; for example {for: ",
        ),
        (
            "{for: {user: a}, limits: 5/s, multiply: 2}",
            ": expected exactly one of limits or multi",
        ),
        (
            "{for: {user: a}, multiply: 2, rule: s}",
            '.rule: there is no rule "s" in this document; ',
        ),
        (
            "{for: {user: a}, multiply: 2, until: 2026-01-01}",
            ".until: 2026-01-01 is not a time with",
        ),
        (
            "{for: {user: a}, multiply: 2, until: soon}",
            '.until: "soon" is not a time with a time zone',
        ),
        (
            "{for: {user: a}, multiply: 2, until: 5}",
            ".until: 5 is not a time with a time zone; for ex",
        ),
        (
            "{for: {user: a}, multiply: 2, until: '2026-01-01T00:00:00'}",
            '.until: "2026-01-01T00:00:00" is not a time with a time zone; for example',
        ),
        (
            "{for: {user: a}, multiply: 2, until: '0001-01-01T00:00:00+14:00'}",
            '.until: "0001-01-01T00:00:00+14:00" is not a time with a time zone; for example',
        ),
    ],
)
def test_mistakes_in_an_override(text: str, problem: str) -> None:
    """Each mistake gives one problem with its path and the expected value."""
    found = problems(f"version: 1\nrules: [{{id: r, by: [], limits: 5/s}}]\noverrides:\n- {text}\n")
    message = found[0].partition(" overrides[0]")[2]
    assert found[0].startswith("t:4:")
    assert message.startswith(problem)


def test_ids_are_unique() -> None:
    """The second rule with an id is reported."""
    text = "version: 1\nrules:\n- {id: a, by: user, limits: 5/s}\n- {by: ip, limits: 5/s, id: a}\n"
    assert problems(text) == ['t:4:29: rules[1].id: "a" occurs twice; change or remove one']


@pytest.mark.parametrize("name", ["(deny)", "limit:emails", "envoy.descriptor"])
def test_ids_of_lists_and_of_limits_of_calls_are_reserved(name: str) -> None:
    """Otherwise their records would be mixed."""
    [problem] = problems(f"version: 1\nrules:\n- {{id: '{name}', by: user, limits: 5/s}}\n")
    assert "begins like the name of a list, such as (deny), or of limits that come" in problem


@pytest.mark.parametrize("by", ["[]", "[user, ip]"])
def test_keys_need_a_rule_that_counts_by_one_attribute(by: str) -> None:
    """With two attributes, or none, a key would be ambiguous."""
    with pytest.raises(DocumentError, match="keys needs a rule that counts by one attribute"):
        read(f"version: 1\nrules: [{{id: a, by: {by}, limits: 5/s, keys: {{a: 5/s}}}}]")


def test_all_mistakes_are_reported_at_once() -> None:
    """They are in the order of the text, whichever was found first."""
    text = (
        "version: 2\nrules:\n- {id: 1, by: [a b], limits: 5/x, mode: of}\n"
        "overrides:\n- {for: {user: 1}}\ntiers: {a: 5/z}\n"
    )
    found = problems(text)
    assert [problem.split(" ")[0:2] for problem in found] == [
        ["t:1:10:", "version:"],
        ["t:3:8:", "rules[0].id:"],
        ["t:3:16:", "rules[0].by[0]:"],
        ["t:3:30:", "rules[0].limits:"],
        ["t:3:41:", "rules[0].mode:"],
        ["t:5:3:", "overrides[0]:"],
        ["t:5:16:", "overrides[0].for.user:"],
        ["t:6:12:", "tiers.a:"],
    ]


def test_rules_and_patterns_are_bounded() -> None:
    """The maximum is accepted, and one more is rejected."""
    one = {"id": "a", "by": "user", "limits": "5/s"}

    def conditions(count: int) -> dict[str, Any]:
        return {"version": 1, "rules": [one | {"match": {"user": ["x"] * count}}]}

    assert from_data(conditions(PATTERNS_MAX))
    with pytest.raises(DocumentError, match="expected 1 to 1,000 patterns, found 1,001"):
        from_data(conditions(PATTERNS_MAX + 1))
    rules = [one | {"id": str(n)} for n in range(RULES_MAX + 1)]
    assert len(from_data({"version": 1, "rules": rules[1:]}).rules) == RULES_MAX
    with pytest.raises(DocumentError, match="expected at most 20,000 rules, found 20,001"):
        from_data({"version": 1, "rules": rules})


def test_irregular_globs_are_bounded() -> None:
    """A list may have a bounded number of irregular globs, and any number of prefixes."""
    from_data(
        {"version": 1, "deny": [f"user:a{n}*" for n in range(2_000)] + ["user:*a", "user:b?"] * 500}
    )
    with pytest.raises(DocumentError, match=r"^<data>: deny: .*1,000"):
        from_data({"version": 1, "deny": [f"user:*a{n}" for n in range(1_001)]})


def at(text: str) -> tuple[DocumentPlace, ProblemList]:
    problems = ProblemList("t")
    node = tree_of_yaml(text, problems)
    assert node is not None
    return DocumentPlace(node, problems), problems


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("10/second", [Limit(10, per=1)]),
        ("10/second; 1000/hour burst 200", [Limit(10, per=1), Limit(1000, per=3600, burst=200)]),
        ("[10/second, 1000/hour]", [Limit(10, per=1), Limit(1000, per=3600)]),
        ("[10/second; 100/minute, 1000/hour]", [Limit(10, 1), Limit(100, 60), Limit(1000, 3600)]),
        ("{limit: 5, per: 60}", [Limit(5, per=60)]),
        ("{limit: 5, per: 0.5}", [Limit(5, per=0.5)]),
        ("{limit: 5, per: 1m}", [Limit(5, per=60)]),
        ("{limit: 5, per: 90 s}", [Limit(5, per=90)]),
        ("{limit: 5, per: 1.5h}", [Limit(5, per=5400)]),
        ("{limit: 5, per: minute}", [Limit(5, per=60)]),
        ("{limit: 5, per: 1m, burst: 3}", [Limit(5, per=60, burst=3)]),
        ("{limit: 5, per: 1m, capacity: 3}", [Limit(5, per=60, capacity=3)]),
        ("100/minute refill 1s", [Limit(100, per=60, refill_every=1)]),
        ("{limit: 100, per: 1m, refill_every: 1s}", [Limit(100, per=60, refill_every=1)]),
        ("{limit: 100, per: 1m, refill_every: 0.5}", [Limit(100, per=60, refill_every=0.5)]),
        ("{limit: 100, per: 1m, refill_every: 0}", [Limit(100, per=60)]),
        ("{limit: 5, per: 1m, name: logins}", [Limit(5, per=60, name="logins")]),
        (
            "[{limit: 5, per: 1m, algorithm: sliding_window_log}, 9/minute]",
            [Limit(5, per=60, algorithm="sliding_window_log"), Limit(9, per=60)],
        ),
        (
            "[5/minute, {limit: 9, per: 1m, name: b}]",
            [Limit(5, per=60), Limit(9, per=60, name="b")],
        ),
    ],
)
def test_limits(text: str, limits: list[Limit]) -> None:
    """Limits are a rate, several rates, a mapping, or a list of these."""
    place, problems = at(text)
    assert LIMITS_SHAPE.read(place) == tuple(limits)
    assert not problems.found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "10/fortnight",
            (
                't:1:1: "10/fortnight" is not a rate: expected a unit: ms, second, minute, hour, '
                'day, week, month or year at character 4; for example "10/second"'
            ),
        ),
        ("100", 't:1:1: 100 is not a rate; for example "10/second"'),
        ("[[1/s]]", 't:1:2: [0]: a list is not a rate; for example "10/second"'),
        ("[~]", 't:1:2: [0]: ~ is not a rate; for example "10/second"'),
        ("[]", "t:1:1: expected 1 to 16 limits, found 0; for example ["),
        (
            "[" + ", ".join(f"1/{n}s" for n in range(1, 18)) + "]",
            "t:1:1: expected 1 to 16 limits, ",
        ),
        (
            "[5/s, 10/s]",
            (
                "t:1:7: [1]: 5/second and 10/second would share "
                "one count; remove one, or name them, for example {limit: 10, per: 1, name: second}"
            ),
        ),
        ("5/s; 10/s", "t:1:1: 5/second and 10/second would share"),
        (
            "{limit: 5, per: 1x}",
            't:1:17: per: "1x" is not a length of time; for example 60 (seconds)',
        ),
        ("{limit: 5, per: 0}", "t:1:17: per: per=0 is not between 1 ms and 366 days; for example"),
        (
            "{limit: 5, per: 1m, refill_every: 2m}",
            "t:1:35: refill_every: refill_every=120 adds more units at once than the capacity",
        ),
        (
            "{limit: 5, per: 1m, algorithm: fixed_window, refill_every: 1s}",
            "t:1:60: refill_every: refill_every=1 is for token_bucket only",
        ),
        (
            "{limit: 5, per: 1m, capacity: 3, burst: 9}",
            "t:1:1: give burst=9 or capacity=3, not both",
        ),
        (
            "{limit: 5, per: 1m, algorithm: fixed_window, burst: 9}",
            "t:1:1: fixed_window has no burst or capacity: it counts in a window; raise limit",
        ),
        (
            "{limit: 1, per: 366d, capacity: 1000}",
            "t:1:33: capacity: capacity=1000 would take more than a century to refill",
        ),
    ],
)
def test_mistakes_in_limits(text: str, problem: str) -> None:
    """Each mistake gives one problem with its place and the expected value."""
    place, problems = at(text)
    LIMITS_SHAPE.read(place)
    assert [str(found)[: len(problem)] for found in problems.found] == [problem]


def test_every_mistake_in_a_limit_is_reported() -> None:
    """A limit with two mistakes gives two problems."""
    place, problems = at("{limit: 0, per: x1, algorithm: a, burst: b, capacity: 0, name: 1}")
    assert LIMITS_SHAPE.read(place) == ()
    assert [found.where for found in problems.found] == [
        "limit",
        "per",
        "algorithm",
        "burst",
        "capacity",
        "name",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("60", 60),
        ("0", 0),
        ("1.5", 1.5),
        ("1m", 60),
        ("500ms", 0.5),
        ('"1_000 s"', 1000),
        ("2 H", 7200),
    ],
)
def test_lengths_of_time(text: str, expected: float) -> None:
    """A number is in seconds; text names its unit."""
    place, problems = at(text)
    assert seconds("1m").read(place) == expected
    assert not problems.found
