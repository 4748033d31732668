"""Parts of a document that do not work together are problems at one of them."""

from __future__ import annotations

import time

import pytest

from ratekeeper.rules.document.reading import DocumentError, from_data, read

LEASED = "limits: 5/s, consistency: leased"
TWO = "- {{id: a, by: user, limits: 5/s, {}}}\n- {{id: b, by: {}, limits: 5/s}}\n"


def problems(text: str) -> list[str]:
    with pytest.raises(DocumentError) as caught:
        read(text, "t")
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("limits: 5/s", "the rule is strict: a part is a lease; write consistency: leased"),
        ("limits: 5/s, consistency: eventual", "the rule is eventual: a part is a lease"),
        (f"{LEASED}, mode: shadow", "with mode: an Envoy denies by its part; write mode: enforce"),
        (f"{LEASED}, split: 2", "with split: the service charges whole parts, not requests"),
        (f"{LEASED}, penalty: {{after: 3}}", "with penalty: the service sees no denied request"),
        (f"{LEASED}, scale: {{source: cpu}}", "with scale: parts do not follow the load"),
        (f"{LEASED}, cost: 2", "with cost: an Envoy counts requests; write cost: 1, or remove"),
        (f"{LEASED}, cost: {{/a: 2}}", "with cost: an Envoy counts requests; write cost: 1"),
        (f"{LEASED}, unit: tokens", "with unit: an Envoy counts requests; write unit: requests"),
        ("limits: 5/s, scope: global", "with scope: regions share no parts; write scope: region"),
        (
            f"{LEASED}, keys: {{a: {{limits: 7/s, consistency: strict}}}}",
            'key "a" is strict: a part is a lease; write consistency: leased',
        ),
        (
            f"{LEASED}, tiers: {{pro: {{limits: 7/s, consistency: strict}}}}",
            'tier "pro" is strict: a part is a lease',
        ),
        (
            "limits: {limit: 5, per: 1s, algorithm: leaky_bucket}, consistency: leased",
            "the rule: Envoy delays no request, so a leaky_bucket cannot be assigned",
        ),
        (
            "limits: [5/s, 9/m], consistency: leased",
            "the rule: Envoy has one token bucket for a rate, and these are 2 limits; write one l",
        ),
        (
            "consistency: leased",
            'tier "two": Envoy has one token bucket for a rate, and these are 2 limits',
        ),
    ],
)
def test_combinations_that_make_no_sense_with_quotas_of_envoys(fields: str, problem: str) -> None:
    """Each is one problem at the field, which says why and what to write."""
    tiers = "{pro: 9/s}" if "limits" in fields else "{pro: 9/s, two: [9/s, 99/m]}"
    rule_text = f"{{id: r, by: tenant, envoy_quota: rate, {fields}}}"
    (found,) = problems(f"{{version: 1, tiers: {tiers}, rules: [{rule_text}]}}")
    assert problem in found
    assert "rules[0].envoy_quota" in found


def test_grants_take_several_limits_and_a_rule_that_is_off_may_have_a_quota() -> None:
    """The service charges a grant to all limits of the rule together."""
    for fields in ("limits: [5/s, 9/m], consistency: leased", f"{LEASED}, mode: 'off'"):
        text = f"{{id: r, by: tenant, envoy_quota: grants, {fields}}}"
        assert read(f"{{version: 1, rules: [{text}]}}").rules[0].envoy_quota == "grants"


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window_counter"])
def test_grants_need_a_window_that_is_longer_than_they_last(algorithm: str) -> None:
    """Otherwise a unit could be spent in the next window. Shares of a rate have no windows."""

    def text(seconds: int, quota: str) -> str:
        limits = f"{{limit: 5, per: {seconds}s, algorithm: {algorithm}}}"
        fields = f"id: r, by: tenant, limits: {limits}, consistency: leased, envoy_quota: {quota}"
        return f"{{version: 1, rules: [{{{fields}}}]}}"

    (found,) = problems(text(9, "grants"))
    assert "a grant lasts some seconds and ends before the window of a counter" in found
    assert "at least 10 s; use token_bucket" in found
    assert read(text(10, "grants")).rules[0].envoy_quota == "grants"
    assert read(text(1, "rate")).rules[0].envoy_quota == "rate"


def test_a_global_rule_does_not_use_tiers_that_a_node_decides() -> None:
    """A tier of the document has a consistency of its own, and the rule takes its limits."""
    text = "{version: 1, tiers: {pro: {limits: 9/s, consistency: leased}}, rules: [%s]}"
    says = 'rules[0]: tier "pro" is leased, which does not work with scope: global'
    assert says in problems(text % "{id: r, by: user, scope: global}")[0]
    for fields in ("limits: 5/s", "tiers: {pro: 7/s}"):
        read(text % f"{{id: r, by: user, scope: global, {fields}}}")


def test_a_rule_replaces_the_next_one() -> None:
    """The rule that is replaced stands directly after it and counts by the same."""
    found = read("version: 1\nrules:\n" + TWO.format("replaces: b", "user"))
    assert [rule.replaces for rule in found.rules] == ["b", None]


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (TWO.format("replaces: c", "user"), 'there is no rule "c"; '),
        (TWO.format("replaces: a", "user"), '"a" takes the place of "a", so it must stand'),
        (
            TWO.format("replaces: c", "user") + "- {id: c, by: user, limits: 5/s}\n",
            '"a" takes the place of "c", so it must stand directly before it; move it there',
        ),
        (
            TWO.format("replaces: b", "[ip, user]"),
            '"a" counts by [user] and "b" by [ip, user]; rules that count by different attributes',
        ),
    ],
)
def test_a_rule_that_cannot_replace_another(rules: str, problem: str) -> None:
    """The problem says which rule, and where it must stand."""
    (found,) = problems(f"version: 1\nrules:\n{rules}")
    assert found.startswith(f"t:3:3: rules[0]: replaces: {problem}")


def test_the_other_parts_are_checked_once_a_wrong_part_is_corrected() -> None:
    """A rule that could not be read is missing, so no name of a rule is called unknown."""
    text = (
        "{version: 1, rules: [{id: a, limits: 5/s, by: []}, {limits: 5/s, by: [], id: %s}],"
        " overrides: [{for: {user: a}, rule: b, multiply: 2}]}"
    )
    assert [each.split(" ")[1] for each in problems(text % "7")] == ["rules[1].id:"]
    assert [each.split(" ")[1] for each in problems(text % "c")] == ["overrides[0].rule:"]
    read(text % "b")


def test_the_time_of_the_checks_is_linear() -> None:
    """A client of the admin API could otherwise stop a worker with a long table of assignments."""

    def seconds(count: int) -> float:
        owners = {f"user:{number}": "pro" for number in range(count)}
        started = time.process_time()
        from_data({"version": 1, "tiers": {"pro": "5/s"}, "assign": owners})
        return time.process_time() - started

    seconds(1_000)
    assert seconds(40_000) < 40 * max(seconds(4_000), 0.01)


def test_a_rule_replaces_one_of_the_same_unit() -> None:
    """Rules that count different units both apply."""
    rule = "{{id: {}, by: user, limits: 5/s, {}}}"
    rules = [rule.format("a", "unit: tokens, replaces: b"), rule.format("b", "mode: shadow")]
    (found,) = problems(f"{{version: 1, rules: [{', '.join(rules)}]}}")
    assert 'replaces: "a" counts tokens and "b" requests' in found
    assert "write the same unit" in found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rules: [{id: r, by: user, limits: 5/s, unit: Tokens}]", '"Tokens" is not the name of'),
        ("rules: [], prices: {large: {input: 1.5}}", "is not a whole number from 0"),
        ("rules: [], prices: {large: {input: -1}}", "is not a whole number from 0"),
        ("rules: [], prices: {large: 5}", "prices.large"),
    ],
)
def test_wrong_units_and_prices(text: str, problem: str) -> None:
    """One problem, at its place."""
    (found,) = problems(f"{{version: 1, {text}}}")
    assert problem in found
