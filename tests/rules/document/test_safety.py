"""What must be forced to go live, as a table; and what must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from tests.rules.documents import Data, documents
from tollkeeper.core.errors import SafetyFinding
from tollkeeper.core.model import Limit
from tollkeeper.rules.document.documents import from_data, read, read_file
from tollkeeper.rules.document.model import Document, Match, Rule
from tollkeeper.rules.document.safety import FINDINGS_MAX, findings

EXAMPLE = Path(__file__).parents[3] / "examples/limits.yaml"
LIMITS = (Limit(5, per=1),)


def found(text: str, before: Document | None = None) -> list[tuple[str, str]]:
    """Code and path of what is found in a document with these names beside the version."""
    return [(it.code, it.where) for it in findings(read(f"{{version: 1, {text}}}"), before)]


def rule(text: str) -> list[tuple[str, str]]:
    """What is found in a rule with these fields, limited to 5 a second."""
    return found(f"rules: [{{id: r, by: user, limits: 5/s, {text}}}]")


def test_the_example_is_safe() -> None:
    """Also as a change of itself."""
    document = read_file(EXAMPLE)
    assert findings(document) == ()
    assert findings(document, document) == ()


# ----------------------------------------------------------------------------------------- lists


@pytest.mark.parametrize(
    ("entries", "places"),
    [
        ("['*']", ["[0]"]),
        ("[a, '**']", ["[1]"]),
        ("['?*']", ["[0]"]),
        ("['user:*', 'api_key:*', 'region:*']", ["[0]", "[1]", "[2]"]),
        ("[0.0.0.0/0]", ["[0]"]),
        ("['ip:::/0']", ["[0]"]),
        ("['::ffff:0:0/96']", ["[0]"]),
        ("[0.0.0.0/1, 128.0.0.0/1]", [""]),
        ("[0.0.0.0/1, 128.0.0.0/2, 192.0.0.0/2]", [""]),
        ("[0.0.0.0/1, 128.0.0.0/2]", []),
        ("['::/1', '8000::/1']", [""]),
        (
            "[sk_*, '*sk', 'api_key:a:*', 'region:a*', '??', 10.0.0.0/8, 'user:::/0', 'user:a/b']",
            [],
        ),
    ],
)
def test_entries_that_mean_everyone(entries: str, places: list[str]) -> None:
    """On either list; networks also together."""
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
    """More than the tightest limit holds, also after it is scaled down; if anyone is denied."""
    assert rule(text) == [("never-fits", place) for place in places]


def test_a_burst_is_room_and_the_tightest_limit_counts() -> None:
    """What a bucket can hold is what one request may cost."""
    assert found("rules: [{id: r, by: [], limits: 5/s burst 5, cost: 10}]") == []
    assert found("rules: [{id: r, by: [], limits: 5/s capacity 3, cost: 4}]") == [
        ("never-fits", "rules[0].limits")
    ]
    assert found("rules: [{id: r, by: [], limits: [100/s, 5/m], cost: 6}]") == [
        ("never-fits", "rules[0].limits")
    ]


def test_tiers_that_apply_are_looked_at() -> None:
    """The rule's own, and the document's where the rule has none of its own."""
    tiers = "tiers: {a: 1/s, b: 9/s}"
    assert found(f"{tiers}, rules: [{{id: r, by: [], cost: 2}}]") == [("never-fits", "tiers.a")]
    assert found(f"{tiers}, rules: [{{id: r, by: [], cost: 2, tiers: {{a: 2/s}}}}]") == []
    assert found(f"{tiers}, rules: [{{id: r, by: [], cost: 2, limits: 5/s}}]") == []
    assert found(
        f"{tiers}, rules: [{{id: r, by: [], cost: 2, limits: 5/s, tiers: {{b: 1/s}}}}]"
    ) == [("never-fits", "rules[0].tiers.b")]


@pytest.mark.parametrize(
    ("override", "is_found"),
    [
        ("limits: 2/s", True),
        ("limits: 3/s", False),
        ("multiply: 0.5", True),  # 2 of 5 are left
        ("multiply: 0.6", False),
        ("rule: r, limits: 2/s", True),
        ("rule: cheap, limits: 2/s", False),
        ("rule: cheap, multiply: 0.01", False),  # never below one
        ("rule: idle, limits: 2/s", False),
    ],
)
def test_overrides_under_which_nothing_fits(override: str, is_found: bool) -> None:
    """For the rule that is named, or for any of all."""
    rules = (
        "{id: r, by: user, limits: 5/s, cost: 3}, {id: cheap, by: ip, limits: 5/s},"
        "{id: idle, by: tier, limits: 5/s, cost: 5, mode: shadow}"
    )
    expected = [("never-fits", "overrides[0]")] if is_found else []
    assert found(f"rules: [{rules}], overrides: [{{for: {{user: a}}, {override}}}]") == expected


def test_an_override_is_given_the_benefit_of_the_doubt() -> None:
    """Whose tier is not known, so that the widest limits count; and without any, nothing does."""
    tiers = "tiers: {free: 10/s, pro: 1000/s}"
    override = "overrides: [{for: {user: a}, multiply: 0.1}]"
    assert found(f"{tiers}, rules: [{{id: r, by: [], cost: 5}}], {override}") == []
    document = Document(
        rules=(Rule(id="r", by=(), cost=5, keys={"a": ()}),),
        overrides=from_data(
            {"version": 1, "overrides": [{"for": {"user": "a"}, "multiply": 2}]}
        ).overrides,
    )
    assert "never-fits" not in {it.code for it in findings(document)}


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
        ("deny: [a]", ENFORCED, True),
        ("rules: [{id: r, by: [], limits: 5/s, rollout: 1}]", ENFORCED, False),
        ("rules: [{id: s, by: [], limits: 5/s, mode: shadow}]", SHADOWED, False),
        ("rules: [{id: s, by: [], limits: 5/s, mode: shadow}]", None, False),
        ("rules: []", None, False),
    ],
)
def test_nothing_enforced_any_more(text: str, before: Document | None, is_found: bool) -> None:
    """If something was before."""
    assert found(text, before) == ([("nothing-enforced", "rules")] if is_found else [])


def test_a_tier_that_is_removed_and_still_matched() -> None:
    """A rule for a tier that the document had; one for a tier that it never knew is left alone."""
    before = read("{version: 1, tiers: {pro: 5/s}, rules: [{id: r, by: [], limits: 5/s}]}")
    text = "rules: [{id: r, by: [], limits: 5/s, match: {tier: [pro, gold, 'p*']}}]"
    assert found(text, before) == [("orphaned-tier", "rules[0].match.tier")]
    assert found(text) == []
    assert found(f"tiers: {{pro: 5/s}}, {text}", before) == []


def test_tiers_that_a_program_left_out() -> None:
    """Reading refuses them; a document that was put together otherwise is looked at here."""
    document = Document(
        rules=(Rule(id="r", by=(), limits=LIMITS, tiers={"pro": LIMITS}),),
        assign={"user:1": "pro", "user:2": "gold", "user:3": "gold"},
    )
    first, second = findings(document)
    assert (first.code, first.where) == ("orphaned-tier", 'assign["user:1"]')
    assert first.why == "it is named here and at 1 more places"
    assert second.what == 'there is no tier "gold"'


@pytest.mark.parametrize(
    ("document", "places"),
    [
        (Document(tiers={"free": ()}), ["tiers.free"]),
        (
            Document(
                tiers={"free": ()},
                rules=(Rule(id="r", by=(), limits=LIMITS, tiers={"free": LIMITS}),),
            ),
            [],
        ),
        (Document(rules=(Rule(id="r", by=()),)), ["rules[0]"]),
        (Document(rules=(Rule(id="r", by=(), mode="off"),)), []),
        (
            Document(
                tiers={"free": LIMITS},
                rules=(Rule(id="r", by=(), match=Match(tier=("free", "gold", "x*"))),),
            ),
            ["rules[0].match.tier"],
        ),
        (
            Document(
                tiers={"free": LIMITS},
                rules=(Rule(id="r", by=(), limits=LIMITS, match=Match(tier=("gold",))),),
            ),
            [],
        ),
    ],
)
def test_tiers_and_rules_without_limits(document: Document, places: list[str]) -> None:
    """Nobody would be limited, though a tier or a rule says that somebody is."""
    assert [it.where for it in findings(document) if it.code == "no-limits"] == places


# --------------------------------------------------------------------------------------- reaching


def test_rules_that_are_never_reached() -> None:
    """Named with the rule that takes their requests."""
    document = read(
        "{version: 1, rules: [{id: all, by: user, limits: 5/s},"
        " {id: some, by: user, limits: 5/s, match: {endpoint: /a}},"
        " {id: other, by: ip, limits: 5/s}]}"
    )
    (finding,) = findings(document)
    assert (finding.code, finding.where, finding.rule) == ("unreachable", "rules[1]", "some")
    assert str(finding) == (
        'rules[1] (rule "some"): it can never match: rule "all" before it counts by the same and '
        'takes all its requests; put it before "all", or remove it, or force it'
    )


# ------------------------------------------------------------------------------------- in general


def test_a_finding_says_what_why_and_what_to_do() -> None:
    """In one line."""
    (finding,) = findings(read("{version: 1, rules: [{id: r, by: user, limits: 5/s, cost: 6}]}"))
    assert str(finding) == (
        'rules[0].limits (rule "r"): every request costs 6: 5 per 1 s (token_bucket) holds 5 at '
        "most, so that each is denied; raise the limit or its burst so that 6 fit, or lower the "
        "cost, or force it"
    )
    (finding,) = findings(read("{version: 1, deny: ['*']}"))
    assert str(finding) == (
        'deny[0]: "*": everyone with an api_key or a user is denied; name those who are meant, '
        "for example deny: [sk_internal_*], or force it"
    )


def test_findings_are_bounded() -> None:
    """A document of mistakes is told of as many as anyone reads."""
    rules = [{"id": str(n), "by": [], "limits": "5/s", "cost": 6} for n in range(FINDINGS_MAX + 5)]
    assert len(findings(from_data({"version": 1, "rules": rules}))) == FINDINGS_MAX


@given(documents(), documents())
def test_any_document_can_be_judged(data: Data, earlier: Data) -> None:
    """And as a change of any other; each finding names a place and can be printed."""
    for before in (None, from_data(earlier)):
        for finding in findings(from_data(data), before):
            assert isinstance(finding, SafetyFinding)
            assert finding.where.split("[")[0].split(".")[0] in {*data, "rules"}
            assert str(finding)


def test_a_change_to_the_same_finds_what_the_document_has() -> None:
    """What was forced once is found again: the next change has to be forced, too."""
    document: Any = read("{version: 1, allow: ['*']}")
    assert findings(document, document) == findings(document)
