"""Findings of documents that most likely are mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from ratekeeper.core.errors import SafetyFinding
from ratekeeper.core.model import Limit
from ratekeeper.rules.document.model import Document, LimitsOfOne, Match, Rule
from ratekeeper.rules.document.reading import from_data, read, read_file
from ratekeeper.rules.document.safety import FINDINGS_MAX, findings, new_findings
from tests.rules.documents import Data, documents

EXAMPLE = Path(__file__).parents[3] / "examples/limits.yaml"
LIMITS = (Limit(5, per=1),)


def found(text: str, before: Document | None = None) -> list[tuple[str, str]]:
    """Return code and path of the findings that reject a document with these fields."""
    document = read(f"{{version: 1, {text}}}")
    return [(it.code, it.where) for it in findings(document, before) if not it.is_advice]


def rule(text: str) -> list[tuple[str, str]]:
    """Return the findings of a rule with these fields and a limit of 5 per second."""
    return found(f"rules: [{{id: r, by: user, limits: 5/s, {text}}}]")


def test_the_example_is_safe() -> None:
    """The example has no findings, also as a change of itself."""
    document = read_file(EXAMPLE)
    assert findings(document) == ()
    assert findings(document, document) == ()


# ----------------------------------------------------------------------------------------- lists


@pytest.mark.parametrize(
    ("entries", "places"),
    [
        ("['user:*']", ["[0]"]),
        ("['user:a', 'user:**']", ["[1]"]),
        ("['user:?*']", ["[0]"]),
        ("['user:*', 'api_key:*', 'region:*']", ["[0]", "[1]", "[2]"]),
        ("[0.0.0.0/0]", ["[0]"]),
        ("['ip:::/0']", ["[0]"]),
        ("['::ffff:0:0/96']", ["[0]"]),
        (
            "['user:sk_*', 'user:*sk', 'api_key:a:*', 'user:??', 10.0.0.0/8, 'user:::/0']",
            [],
        ),
    ],
)
def test_entries_that_match_everyone(entries: str, places: list[str]) -> None:
    """Entries on either list are found."""
    assert found(f"deny: {entries}") == [("denies-all", f"deny{place}") for place in places]
    assert found(f"allow: {entries}") == [("allows-all", f"allow{place}") for place in places]


# ----------------------------------------------------------------------------------------- costs


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("cost: 5", []),
        ("cost: 6", ["rules[0].limits"]),
        ("cost: 6, rollout: 1", ["rules[0].limits"]),
        ("cost: 6, rollout: 0", []),
        ("cost: 6, mode: shadow", []),
        ("cost: 6, mode: 'off'", []),
        ("cost: {/a: 6}", ["rules[0].limits"]),
        ("cost: {/a: 6, '*': 7}", ["rules[0].limits", "rules[0].limits"]),
        ("cost: 2, keys: {k: 1/s, l: 2/s}", ["rules[0].keys.k"]),
        ("cost: 2, scale: {least: 0.2}", ["rules[0].limits"]),
        ("cost: 2, scale: {least: 0.21}", []),
        ("cost: 1, scale: {least: 0.01}", []),
        ("cost: 0", []),
    ],
)
def test_costs_that_never_fit(text: str, places: list[str]) -> None:
    """A cost above the capacity of the tightest limit is found, also after scaling down."""
    assert rule(text) == [("never-fits", place) for place in places]


def test_a_cost_must_fit_the_smallest_capacity() -> None:
    """A bucket's capacity includes its burst."""
    assert found("rules: [{id: r, by: [], limits: 5/s burst 5, cost: 10}]") == []
    assert found("rules: [{id: r, by: [], limits: 5/s capacity 3, cost: 4}]") == [
        ("never-fits", "rules[0].limits")
    ]
    assert found("rules: [{id: r, by: [], limits: [100/s, 5/m], cost: 6}]") == [
        ("never-fits", "rules[0].limits")
    ]


def test_tiers_that_apply_are_checked() -> None:
    """The rule's tiers are checked, and the document's for a rule without limits."""
    tiers = "tiers: {a: 1/s, default: 9/s}"
    assert found(f"{tiers}, rules: [{{id: r, by: [], cost: 2}}]") == [("never-fits", "tiers.a")]
    assert found(f"{tiers}, rules: [{{id: r, by: [], cost: 2, tiers: {{a: 2/s}}}}]") == []
    rule = "id: r, by: [], cost: 2, limits: 5/s, match: {tier: '*'}"
    assert found(f"{tiers}, rules: [{{{rule}}}]") == []
    assert found(f"{tiers}, rules: [{{{rule}, tiers: {{a: 1/s}}}}]") == [
        ("never-fits", "rules[0].tiers.a")
    ]


@pytest.mark.parametrize(
    ("override", "is_found"),
    [
        ("limits: 2/s", True),
        ("limits: 3/s", False),
        ("multiply: 0.5", False),  # of limits that may depend on the client's tier
        ("rule: r, limits: 2/s", True),
        ("rule: cheap, limits: 2/s", False),
        ("rule: idle, limits: 2/s", False),
    ],
)
def test_overrides_under_which_nothing_fits(override: str, is_found: bool) -> None:
    """For the rule that the override names, or for any rule."""
    rules = (
        "{id: r, by: user, limits: 5/s, cost: 3}, {id: cheap, by: ip, limits: 5/s},"
        "{id: idle, by: tier, limits: 5/s, cost: 5, mode: shadow}"
    )
    expected = [("never-fits", "overrides[0]")] if is_found else []
    assert found(f"rules: [{rules}], overrides: [{{for: {{user: a}}, {override}}}]") == expected


@pytest.mark.parametrize(
    ("override", "is_found"),
    [
        ("{for: {user: a}, multiply: 2}", False),
        ("{for: {ip: 10.0.0.0/8}, limits: 5/s}", False),
        ("{for: {tenant: a}, multiply: 2}", True),
        ("{for: {tenant: a}, rule: r, multiply: 2}", False),
    ],
)
def test_an_override_that_changes_no_rule(override: str, is_found: bool) -> None:
    """No rule counts by its subject, and it names none."""
    rules = "[{id: r, by: [user, endpoint], limits: 5/s}, {id: s, by: ip, limits: 5/s}]"
    expected = [("changes-no-rule", "overrides[0]")] if is_found else []
    assert found(f"rules: {rules}, overrides: [{override}]") == expected


# ------------------------------------------------------------------------------- modes and tiers

ENFORCED = read("{version: 1, rules: [{id: r, by: [], limits: 5/s}]}")
SHADOWED = read("{version: 1, rules: [{id: r, by: [], limits: 5/s, mode: shadow}]}")


@pytest.mark.parametrize(
    ("text", "before", "is_found"),
    [
        ("rules: [{id: r, by: [], limits: 5/s, mode: shadow}]", ENFORCED, True),
        ("rules: [{id: r, by: [], limits: 5/s, mode: 'off'}]", ENFORCED, True),
        ("rules: [{id: r, by: [], limits: 5/s, rollout: 0}]", ENFORCED, True),
        ("rules: []", ENFORCED, True),
        ("deny: ['user:a']", ENFORCED, True),
        ("rules: [{id: r, by: [], limits: 5/s, rollout: 1}]", ENFORCED, False),
        ("rules: [{id: s, by: [], limits: 5/s, mode: shadow}]", SHADOWED, False),
        ("rules: [{id: s, by: [], limits: 5/s, mode: shadow}]", None, False),
        ("rules: []", None, False),
    ],
)
def test_nothing_enforced_any_more(text: str, before: Document | None, is_found: bool) -> None:
    """Found only if the document before enforced a rule."""
    assert found(text, before) == ([("nothing-enforced", "rules")] if is_found else [])


def test_a_tier_that_is_removed_and_still_matched() -> None:
    """A rule for a tier that the document before had is found; one for an unknown tier is not."""
    before = read("{version: 1, tiers: {pro: 5/s}, rules: [{id: r, by: [], limits: 5/s}]}")
    text = "rules: [{id: r, by: [], limits: 5/s, match: {tier: [pro, gold, 'p*']}}]"
    assert found(text, before) == [("orphaned-tier", "rules[0].match.tier")]
    assert found(text) == []
    assert found(f"tiers: {{pro: 5/s}}, {text}", before) == []


def test_tiers_that_a_program_omitted() -> None:
    """The reader rejects them; documents that a program built are checked here."""
    document = Document(
        rules=(Rule(id="r", by=(), limits=LIMITS, tiers={"pro": LimitsOfOne(LIMITS)}),),
        assign={"user:1": "pro", "user:2": "gold", "user:3": "gold"},
    )
    first, second = findings(document)
    assert (first.code, first.where) == ("orphaned-tier", 'assign["user:1"]')
    assert first.why == "it is used here and at 1 more places"
    assert second.what == 'there is no tier "gold"'


@pytest.mark.parametrize(
    ("document", "places"),
    [
        (Document(tiers={"free": LimitsOfOne()}), ["tiers.free"]),
        (
            Document(
                tiers={"free": LimitsOfOne()},
                rules=(Rule(id="r", by=(), limits=LIMITS, tiers={"free": LimitsOfOne(LIMITS)}),),
            ),
            [],
        ),
        (Document(rules=(Rule(id="r", by=()),)), ["rules[0]"]),
        (Document(rules=(Rule(id="r", by=(), mode="off"),)), []),
        (
            Document(
                tiers={"free": LimitsOfOne(LIMITS)},
                rules=(Rule(id="r", by=(), match=Match(tier=("free", "gold", "x*"))),),
            ),
            ["rules[0].match.tier"],
        ),
        (
            Document(
                tiers={"free": LimitsOfOne(LIMITS)},
                rules=(Rule(id="r", by=(), limits=LIMITS, match=Match(tier=("gold",))),),
            ),
            [],
        ),
    ],
)
def test_tiers_and_rules_without_limits(document: Document, places: list[str]) -> None:
    """A tier or rule without any limit would limit no client."""
    assert [it.where for it in findings(document) if it.code == "no-limits"] == places


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("tiers: {pro: 5/s}, rules: [{id: r, by: user}]", True),
        ("tiers: {pro: 5/s}, rules: [{id: r, by: user, mode: shadow}]", True),
        ("tiers: {pro: 5/s}, rules: [{id: r, by: user, tiers: {pro: 5/s}}]", True),
        ("tiers: {pro: 5/s}, rules: [{id: r, by: user, keys: {a*: 5/s}}]", True),
        ("tiers: {pro: 5/s}, rules: [{id: r, by: user, keys: {a*: 5/s, '*': 6/s}}]", False),
        ("tiers: {pro: 5/s}, rules: [{id: r, by: user, mode: 'off'}]", False),
        ("tiers: {pro: 5/s}, rules: [{id: r, by: user, limits: 5/s, tiers: {pro: 5/s}}]", False),
        ("tiers: {pro: 5/s}, rules: [{id: r, by: user, match: {tier: pro}}]", False),
        ("tiers: {pro: 5/s, default: 5/s}, rules: [{id: r, by: user}]", False),
    ],
)
def test_requests_without_a_tier_need_limits(text: str, is_found: bool) -> None:
    """A rule with the limits of tiers does not limit requests without a tier, except by default."""
    assert found(text) == ([("no-default-tier", "rules[0]")] if is_found else [])


@pytest.mark.parametrize(
    ("pattern", "count", "is_found"),
    [
        ("endpoint: /**/*a*b*", 101, True),
        ("endpoint: /**/*a*b*", 100, False),
        ("user: '?-*'", 101, True),
        ("{user: '?-*', tenant: acme}", 101, False),
        ("endpoint: /**/*ab*", 101, False),
        ("endpoint: 're:/[a-z]+'", 101, False),
        ("method: GET", 101, False),
    ],
)
def test_many_patterns_that_cannot_be_looked_up(pattern: str, count: int, is_found: bool) -> None:
    """Up to 100 patterns may lack a text that they could be looked up by."""
    match = pattern if pattern.startswith("{") else f"{{{pattern}}}"
    rules = [f"{{id: r{n}, by: user, limits: 5/s, match: {match}}}" for n in range(count)]
    assert found(f"rules: [{', '.join(rules)}]") == [("slow-patterns", "rules")] * is_found


def test_many_keys_that_cannot_be_looked_up() -> None:
    """The keys of a rule are patterns, too."""
    keys = ", ".join(f"'?{chr(0x4E00 + n)}*': 9/s" for n in range(101))
    text = f"rules: [{{id: a, by: user, limits: 5/s, keys: {{{keys}}}}}]"
    assert found(text) == [("slow-patterns", "rules")]


# --------------------------------------------------------------------------------------- reaching


@pytest.mark.parametrize(
    ("first", "second", "is_found"),
    [
        ("", "", True),
        ("", "match: {endpoint: /a}", True),
        ("", "match: {endpoint: /a}, rollout: 5", True),
        ("mode: shadow", "match: {endpoint: /a}, mode: shadow", True),
        ("match: {endpoint: /a}", "", False),
        ("match: {method: GET}", "match: {endpoint: /a}", False),
        ("match: {attributes: {region: eu}}", "", False),
        ("rollout: 99", "match: {endpoint: /a}", False),
        ("mode: 'off'", "match: {endpoint: /a}", False),
        ("", "match: {endpoint: /a}, mode: 'off'", False),
        ("mode: shadow", "match: {endpoint: /a}", False),
        ("", "match: {endpoint: /a}, mode: shadow", False),
        ("by: ip", "match: {endpoint: /a}", False),
        ("replaces: second", "", False),
    ],
)
def test_a_rule_behind_a_rule_for_all_requests(first: str, second: str, is_found: bool) -> None:
    """If both count by the same attributes and have the same mode, the second never matches."""
    rules = [
        f"{{id: {name}, limits: 5/s, {fields if 'by:' in fields else f'by: user, {fields}'}}}"
        for name, fields in (("first", first), ("second", second))
    ]
    document = read(f"{{version: 1, rules: [{', '.join(rules)}]}}")
    codes = [(each.code, each.where) for each in new_findings(document, None)]
    assert codes == ([("unreachable", "rules[1]")] if is_found else [])


def test_each_rule_behind_it_is_named() -> None:
    """The finding names both rules, the place and the ways out."""
    document = read(
        "{version: 1, rules: [{id: all, by: user, limits: 5/s},"
        " {id: some, by: user, limits: 5/s, match: {endpoint: /a}},"
        " {id: more, by: user, limits: 5/s}, {id: other, by: ip, limits: 5/s}]}"
    )
    first, second = new_findings(document, None)
    assert [each.rule for each in (first, second)] == ["some", "more"]
    assert str(first) == (
        'rules[1] (rule "some"): it can never match: the earlier rule "all" counts by the same and '
        'applies to all requests; move it before "all", or remove one of them; if "all" is meant '
        'to take its place, write replaces: "some" in rule "all" and put that directly before it, '
        "or force it"
    )


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ("{id: a, by: user}, {id: b, by: ip}", ["user"]),
        (
            "{id: a, by: [tenant, api_key]}, {id: b, by: ip, match: {endpoint: /x}}",
            [
                "api_key",
                "tenant",
            ],
        ),
        ("{id: a, by: user, match: {user: '*'}}, {id: b, by: ip}", []),
        ("{id: a, by: user, match: {endpoint: /x}}, {id: b, by: ip}", []),
        ("{id: a, by: [user, ip]}, {id: b, by: ip}", []),
        ("{id: a, by: user, mode: shadow}, {id: b, by: ip}", []),
        ("{id: a, by: user}, {id: b, by: ip, mode: shadow}", []),
        ("{id: a, by: user}, {id: b, by: []}", []),
        ("{id: a, by: user}", []),
        ("{id: a, by: [endpoint, region]}, {id: b, by: ip}", []),
    ],
)
def test_requests_that_lack_what_a_rule_counts_by(rules: str, names: list[str]) -> None:
    """It is advice, and only given if the document also limits clients without a name."""
    document = read(f"{{version: 1, rules: [{rules.replace('by:', 'limits: 5/s, by:')}]}}")
    advice = findings(document)
    assert [each.what for each in advice] == [f"it counts by {name}" for name in names]
    for name, each in zip(names, advice, strict=True):
        assert (each.code, each.where, each.rule) == ("absent-attribute", "rules[0].by", "a")
        assert each.is_advice
        assert f'match: {{{name}: "*"}}' in each.remedy


# ------------------------------------------------------------------------------------- in general


def test_a_finding_says_what_why_and_what_to_do() -> None:
    """A finding prints as one line."""
    (finding,) = findings(read("{version: 1, rules: [{id: r, by: user, limits: 5/s, cost: 6}]}"))
    assert str(finding) == (
        'rules[0].limits (rule "r"): every request costs 6: 5/second holds at '
        "most 5, so every such request is denied; raise the limit or its burst so that 6 "
        "fit, or lower the cost, or force it"
    )
    (finding,) = findings(read("{version: 1, deny: ['user:*']}"))
    assert str(finding) == (
        'deny[0]: "user:*": every request with user is denied; use a narrower entry, '
        'for example deny: ["api_key:sk_internal_*"], or force it'
    )


def test_findings_are_bounded() -> None:
    """At most FINDINGS_MAX are returned."""
    rules = [{"id": str(n), "by": [], "limits": "5/s", "cost": 6} for n in range(FINDINGS_MAX + 5)]
    assert len(findings(from_data({"version": 1, "rules": rules}))) == FINDINGS_MAX


@given(documents(), documents())
def test_any_document_can_be_checked(data: Data, earlier: Data) -> None:
    """Also as a change of any other; each finding has a path and prints as text."""
    for before in (None, from_data(earlier)):
        for finding in findings(from_data(data), before):
            assert isinstance(finding, SafetyFinding)
            assert finding.where.split("[")[0].split(".")[0] in {*data, "rules"}
            assert str(finding)


def test_a_document_has_the_same_findings_as_a_change_of_itself() -> None:
    """A finding that was forced is found again by `findings`."""
    document: Any = read("{version: 1, allow: ['user:*']}")
    assert findings(document, document) == findings(document)
