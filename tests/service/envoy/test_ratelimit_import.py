"""Rules made from configuration of envoyproxy/ratelimit: the document, the report, the decisions.

`Original` is a small model of envoyproxy/ratelimit, written from its documentation and independent
of the converter. The property test sends the same calls to the model and to the converted rules.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ratekeeper import Limiter
from ratekeeper.cli.main import app
from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.model import UNITS_MAX, CheckResult
from ratekeeper.rules.document.grammar import to_data
from ratekeeper.rules.document.reading import DocumentError, read
from ratekeeper.service.envoy import ratelimit_import
from ratekeeper.service.envoy.descriptors import SETTLE, request_of
from ratekeeper.service.envoy.ratelimit_config import UNITS_S, read_config
from ratekeeper.service.envoy.ratelimit_import import (
    ImportAlgorithm,
    ImportedRules,
    import_rules,
    names_of,
    overlap,
)
from ratekeeper.service.process import startup
from ratekeeper.testing import ManualClock
from tests.service.envoy.client import codes, entries, grpc_client, serving

EXAMPLE = Path(__file__).parents[3] / "examples/migrate/envoy-ratelimit"
Entries = list[tuple[str, str]]


def imported(*texts: str, algorithm: ImportAlgorithm = "fixed_window") -> ImportedRules:
    """Convert texts, as the files a.yaml, b.yaml and so on."""
    named = zip(texts, "abcdefgh", strict=False)
    return import_rules([read_config(text, f"{name}.yaml") for text, name in named], algorithm)


def shop(*descriptors: str) -> str:
    """Return a configuration of the domain shop; each descriptor is one line, from line 3 on."""
    return "domain: shop\ndescriptors:\n" + "".join(f"- {{{each}}}\n" for each in descriptors)


def limit(requests: int, unit: str = "minute", more: str = "") -> str:
    """Return the rate_limit of a descriptor."""
    return f"rate_limit: {{unit: {unit}, requests_per_unit: {requests}{more}}}"


def rules_of(*descriptors: str) -> list[dict[str, Any]]:
    """Return the converted rules of the domain shop as data."""
    found: list[dict[str, Any]] = to_data(imported(shop(*descriptors)).document)["rules"]
    return found


def report(*descriptors: str) -> list[str]:
    """Return the report of the domain shop."""
    return [str(each) for each in imported(shop(*descriptors)).findings]


def matching(keys: str, **attributes: str) -> dict[str, Any]:
    """Return the condition of a rule on descriptors with these keys."""
    return {"attributes": {"domain": "shop", "descriptor_keys": keys, **attributes}}


WINDOW = "5/minute fixed_window"
EXEMPT = {"limits": [f"{UNITS_MAX}/second"], "cost": 0}


# ── Config → document ──────────────────────────────────────────────────────────────────────────


def test_a_key_alone_counts_each_value() -> None:
    """The id is the name that the descriptor has in the statistics of envoyproxy/ratelimit."""
    assert rules_of(f"key: generic_key, {limit(5)}") == [
        {"id": "shop.generic_key", "match": matching("generic_key"), "by": ["generic_key"],
         "limits": [WINDOW]}
    ]  # fmt: skip


def test_a_key_with_a_value_is_one_count() -> None:
    """The value is a condition, and characters of globs are literal in it."""
    assert rules_of(f"key: generic_key, value: 'a?[b]', {limit(5)}") == [
        {"id": "shop.generic_key_a?[b]", "match": matching("generic_key", generic_key="a[?][[]b]"),
         "by": [], "limits": [WINDOW]}
    ]  # fmt: skip


def test_the_order_is_value_wildcard_key() -> None:
    """Wildcards keep their order; all rules count by the same, so that one of them applies."""
    found = rules_of(
        f"key: k, {limit(5)}", f"key: k, value: b*, {limit(5)}", f"key: k, value: a, {limit(5)}",
        f"key: k, value: '*c', {limit(5)}",
    )  # fmt: skip
    assert [each["id"] for each in found] == ["shop.k_a", "shop.k_b*", "shop.k_*c", "shop.k"]
    assert {tuple(each["by"]) for each in found} == {("k",)}
    assert [each["match"]["attributes"].get("k") for each in found] == ["a", "b*", "*c", None]


def test_nested_descriptors_match_all_keys_in_order() -> None:
    """A value that every rule of these keys has is not counted by; a key alone is."""
    found = rules_of(f"key: type, value: mail, descriptors: [{{key: to, {limit(5)}}}]",
                     f"key: to, {limit(5)}")  # fmt: skip
    assert found == [
        {"id": "shop.type_mail.to", "match": matching("type,to", type="mail"), "by": ["to"],
         "limits": [WINDOW]},
        {"id": "shop.to", "match": matching("to"), "by": ["to"], "limits": [WINDOW]},
    ]  # fmt: skip


def test_an_unlimited_value_comes_before_the_key() -> None:
    """Its rule costs 0, so it never denies."""
    first, second = rules_of(
        f"key: k, {limit(5)}", "key: k, value: vip, rate_limit: {unlimited: true}"
    )
    assert first == {"id": "shop.k_vip", "match": matching("k", k="vip"), "by": ["k"], **EXEMPT}
    assert second["id"] == "shop.k"


def test_a_value_without_a_limit_is_exempt_only_where_a_later_rule_matches() -> None:
    """Nothing below a=x has the key c; no rule is needed for a=y, which a=x does not match."""
    found = rules_of(
        "key: a, value: x", "key: a, value: z, descriptors: [{key: b}]",
        f"key: a, descriptors: [{{key: b, {limit(5)}}}]",
    )  # fmt: skip
    assert [(each["id"], "cost" in each) for each in found] == [
        ("shop.a_x", True), ("shop.a_z.b", True), ("shop.a.b", False),
    ]  # fmt: skip
    assert len(rules_of("key: a, value: x", f"key: a, value: y, {limit(5)}")) == 1


def test_a_shadow_rule_hides_later_rules() -> None:
    """In a rule document, a rule in shadow mode does not replace an enforced one."""
    found = rules_of(f"key: k, value: new, shadow_mode: true, {limit(5)}", f"key: k, {limit(5)}")
    assert [(each["id"], each.get("mode"), each.get("cost")) for each in found] == [
        ("shop.k_new", "shadow", None), ("shop.k_new:exempt", None, 0), ("shop.k", None, None),
    ]  # fmt: skip


def test_a_rule_hides_a_later_shadow_rule() -> None:
    """Otherwise the requests of the first would count as denials of the second."""
    found = rules_of(f"key: k, value: vip, {limit(5)}", f"key: k, shadow_mode: true, {limit(5)}")
    assert [(each["id"], each.get("mode"), each.get("cost")) for each in found] == [
        ("shop.k_vip", None, None), ("shop.k_vip:exempt-shadow", "shadow", 0),
        ("shop.k", "shadow", None),
    ]  # fmt: skip


def test_share_threshold_counts_all_values_together() -> None:
    """The rule counts by nothing, so the rule that counts by the key needs an exemption."""
    found = rules_of(
        f"key: f, value: files/*, share_threshold: true, {limit(5)}", f"key: f, {limit(5)}"
    )
    assert [(each["id"], each["by"]) for each in found] == [
        ("shop.f_files/*", []), ("shop.f_files/*:exempt", ["f"]), ("shop.f", ["f"]),
    ]  # fmt: skip


@pytest.mark.parametrize("unit", UNITS_S)
@pytest.mark.parametrize("algorithm", ["fixed_window", "token_bucket"])
def test_units_are_windows(unit: str, algorithm: ImportAlgorithm) -> None:
    """A month has 30 days and a year 365, as in envoyproxy/ratelimit."""
    (rule,) = imported(shop(f"key: k, {limit(5, unit)}"), algorithm=algorithm).document.rules
    (found,) = rule.limits
    assert (found.limit, found.window_ns) == (5, UNITS_S[unit] * NS_PER_SECOND)
    assert found.algorithm == algorithm


@pytest.mark.parametrize(
    ("key", "value", "condition"),
    [
        ("remote_address", "192.0.2.7", {"ip": "192.0.2.7"}),
        ("remote_address", "2001:db8::7", {"ip": "2001:db8::7"}),
        ("remote_address", "10.*", {"ip": "10.0.0.0/8"}),
        ("remote_address", "10.1.2.*", {"ip": "10.1.2.0/24"}),
        ("remote_address", "*", {}),
        ("path", "/a", {"endpoint": "/a"}),
        ("path", "/a{b}", {"endpoint": "/a%7Bb%7D"}),
        (":path", "/a/*", {"endpoint": "/a/*"}),
        ("path", "/a/*/b.c", {"endpoint": r"re:/a/.*/b\.c"}),
        ("method", "post", {"method": "POST"}),
        ("user", "a*", {"user": "a*"}),
        ("api-key", "sk_1", {"api_key": "sk_1"}),
    ],
)
def test_keys_that_name_a_field_become_its_condition(
    key: str, value: str, condition: dict[str, str]
) -> None:
    """As the service does with the entries of a call."""
    (rule,) = rules_of(f"key: '{key}', value: '{value}', {limit(5)}")
    assert rule["match"] == {**condition, **matching(key)}


def test_names_come_from_the_service() -> None:
    """A repeated key has a number, as in a request."""
    keys = ["remote_address", "ip", "x-region", "x.region", "domain", "descriptor_keys"]
    assert names_of("shop", keys) == (
        "ip", "ip_2", "x_region", "x_region_2", "domain_2", "descriptor_keys_2",
    )  # fmt: skip


def test_several_files_are_one_document() -> None:
    """Each domain has its rules; a domain in two files is joined, and the report says so."""
    other = f"domain: api\ndescriptors: [{{key: k, {limit(5)}}}]\n"
    found = imported(shop(f"key: k, {limit(5)}"), other, shop(f"key: l, {limit(5)}"))
    assert [each.id for each in found.document.rules] == ["shop.k", "shop.l", "api.k"]
    (note,) = map(str, found.findings)
    assert note.startswith('c.yaml:1: note: the domain "shop" is in a.yaml:1 too; both are conver')
    assert found.is_complete
    assert "# Converted from envoyproxy/ratelimit by `ratekeeper rules import`: " in found.text
    assert "# l (c.yaml:3)\n- id: shop.l\n" in found.text


def test_a_descriptor_in_two_files_is_rejected() -> None:
    """envoyproxy/ratelimit rejects it, too."""
    text = shop(f"key: k, {limit(5)}")
    with pytest.raises(DocumentError) as error:
        imported(text, text)
    assert str(error.value) == (
        'b.yaml:3:1: the descriptor "k" of the domain "shop" is in a.yaml:3 too; remove one'
    )


def test_ids_are_valid_and_unique() -> None:
    """Long and unprintable names are shortened and replaced."""
    long = "x" * 200
    found = rules_of(
        f"key: k, value: {long}, {limit(5)}", f"key: k, value: {long}y, {limit(5)}",
        f'key: k, value: "a\\a", {limit(5)}', f'key: k, value: "a\\b", {limit(5)}',
    )  # fmt: skip
    names = [each["id"] for each in found]
    assert len(set(names)) == 4
    assert names[2:] == ["shop.k_a?", "shop.k_a?-2"]
    assert max(map(len, names)) <= 128


def test_ids_that_are_alike_are_numbered_in_one_pass() -> None:
    """Each name remembers its last number; trying all of them again would take minutes."""
    names: dict[str, str] = {}
    numbers: dict[str, int] = {}
    for _ in range(20_000):
        names[ratelimit_import._free("shop.k", names, numbers)] = ""
    assert numbers == {"shop.k": 20_000}
    assert list(names)[-1] == "shop.k-20000"


def test_the_text_is_the_canonical_document_with_comments() -> None:
    """Without its comments, it is what `rules show` prints."""
    found = imported(shop(f"key: k, {limit(5)}", f"key: l, {limit(5, 'year')}"))
    assert read(found.text) == found.document
    lines = [line for line in found.text.splitlines() if not line.startswith("#")]
    assert "\n".join(lines) + "\n" == ratelimit_import.to_yaml(found.document)


# ── Config → report ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("descriptor", "expected"),
    [
        (f"key: k, {limit(5, more=', name: a, replaces: [{name: b}]')}",
         'not converted: k replaces "b" in calls that have both descriptors'),
        (f"key: k, quota_mode: true, {limit(5)}", "changed: k has quota_mode"),
        (f"key: k, value: a, {limit(0)}", "changed: requests_per_unit is 0"),
        (f"key: k, {limit(2**32 - 1)}", "changed: requests_per_unit is 4,294,967,295"),
        (f"key: user, value: mallory, {limit(0)}",
         "changed: user=mallory has requests_per_unit: 0 and is on the deny list"),
        (f"key: remote_address, value: 2001:*, {limit(5)}", "not converted: remote_address=2001:*"),
        (f"key: masked_remote_address, value: 10.0.0.0/8, {limit(5)}", "not converted: masked_"),
        (f"key: remote_address, value: unknown, {limit(5)}", "not converted: remote_address=unkn"),
        (f"key: path, value: '/a?b=1', {limit(5)}", "not converted: path=/a?b=1: the path"),
        (f"key: method, value: 'G*', {limit(5)}", "not converted: method=G*"),
        (f"key: k, value: {'x' * 600}, {limit(5)}", "not converted: k=xxx"),
        (f"key: 'a,b', {limit(5)}", 'not converted: the key "a,b" has a comma'),
        (f"key: 'a*', {limit(5)}", 'not converted: the key "a*" has a wildcard'),
        (f"key: {SETTLE}, {limit(5)}", "not converted: the key ratekeeper.settle"),
        (f"key: {'k' * 129}, {limit(5)}", "has more than 128 characters"),
        (f"key: path, {limit(5)}", "note: the key path is the path of a request"),
        (f"key: method, {limit(5)}", "note: the key method is the method of a request"),
        (f"key: ip, {limit(5)}", "note: the key ip is the address of a request"),
    ],
)  # fmt: skip
def test_what_is_lost_or_changed_is_reported(descriptor: str, expected: str) -> None:
    """With the file, the line, the reason and what to do."""
    found = report(descriptor, f"key: other, {limit(5)}")
    assert any(each.startswith("a.yaml:3: ") and expected in each for each in found), found


@pytest.mark.parametrize(
    "limited", [f"shadow_mode: true, {limit(5)}", "rate_limit: {unlimited: true}"]
)
def test_quota_mode_is_not_reported_for_a_limit_that_never_denies(limited: str) -> None:
    """In shadow mode or without a limit, both services let the call pass."""
    assert report(f"key: k, quota_mode: true, {limited}", f"key: other, {limit(5)}") == []


def test_a_value_that_cannot_be_converted_leaves_the_others() -> None:
    """The line says that the next rule applies to its requests."""
    found = imported(shop(f"key: ip, value: 'a*', {limit(5)}", f"key: ip, {limit(7)}"))
    assert [each.id for each in found.document.rules] == ["shop.ip"]
    assert not found.is_complete
    assert "Its requests get the next rule that matches" in str(found.findings[0])


def test_nine_counted_keys_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule counts by at most eight attributes; the reader stops at seven levels before that."""
    monkeypatch.setattr(ratelimit_import, "BY_MAX", 1)
    found = report(f"key: a, descriptors: [{{key: b, {limit(5)}}}]", f"key: c, {limit(5)}")
    assert found == [
        "a.yaml:3: not converted: it counts by 2 keys, and a rule by at most 1; use fewer"
    ]


@pytest.mark.parametrize("text", ["domain: d\n", shop("key: k"), shop("key: k, descriptors: []")])
def test_a_configuration_without_limits_is_rejected(text: str) -> None:
    """An empty document would look like a success."""
    with pytest.raises(DocumentError, match=r"a\.yaml: there are no limits"):
        imported(text)


def test_a_configuration_of_which_nothing_is_converted_is_rejected_with_its_report() -> None:
    """The reasons come first."""
    with pytest.raises(DocumentError) as error:
        imported(shop(f"key: 'a,b', {limit(5)}"))
    assert [each.line for each in error.value.problems] == [3, 0]


def test_many_shapes_take_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that cannot hide a rule are not tried for each of 100 lists of keys."""
    monkeypatch.setattr(ratelimit_import, "STEPS_MAX", 2_000)
    texts = [f"key: k, value: v{n}, descriptors: [{{key: c{n}, {limit(5)}}}]" for n in range(100)]
    assert len(rules_of(*texts)) == 100


def test_too_many_rules_and_steps_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the domain."""
    text = shop(f"key: k, value: a, {limit(5)}", f"key: k, {limit(5)}")
    monkeypatch.setattr(ratelimit_import, "RULES_MAX", 1)
    with pytest.raises(DocumentError, match="more than 1 rules"):
        imported(text)
    monkeypatch.setattr(ratelimit_import, "STEPS_MAX", 2)
    with pytest.raises(DocumentError, match='domain "shop" has too many descriptors that overlap'):
        imported(text)


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ("a", "a", True), ("a", "b", False), ("", "b", True), ("a*", "ab", True),
        ("a*", "b", False), ("a*", "ab*", True), ("a*", "b*", False), ("*a", "*b", False),
        ("*a", "b*", True), ("a*c", "ab*", True), ("[*", "[a", True),
        ("ab*ba", "aba", False), ("ab*ba", "abba", True), ("a*b*c", "axbyc", True),
        ("a*b*c", "acb", False), ("a*b*c", "abc", True), ("*b*b*", "ab", False),
    ],
)  # fmt: skip
def test_values_that_overlap(one: str, two: str, expected: bool) -> None:
    """False only if no value matches both."""
    assert overlap(one, two) is overlap(two, one) is expected


# ── The same decisions ─────────────────────────────────────────────────────────────────────────


class Original:
    """envoyproxy/ratelimit: which limit applies to a descriptor, and how it counts."""

    def __init__(self, text: str) -> None:
        self.config = yaml.safe_load(text)
        self.counts: dict[tuple[object, ...], int] = {}

    def limit_of(self, asked: Entries) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """Return the descriptor whose limit applies, and the values that are counted."""
        below = self.config["descriptors"]
        found: dict[str, Any] | None = None
        counted = []
        for key, value in asked:
            same = [each for each in below if each["key"] == key]
            exact = [each for each in same if each.get("value", "") == value != ""]
            wild = [
                each
                for each in same
                if "*" in each.get("value", "")
                and re.fullmatch(".*".join(map(re.escape, each["value"].split("*"))), value)
            ]
            plain = [each for each in same if not each.get("value")]
            found = next(iter([*exact, *wild, *plain]), None)
            if found is None:
                return None, ()
            shares = found.get("share_threshold") and not exact
            counted.append(f"{key}={found['value'] if shares else value}")
            below = found.get("descriptors", [])
        return found, tuple(counted)  # fmt: skip

    def over_limit(self, asked: Entries, now_s: int) -> tuple[bool, dict[str, Any] | None, int]:
        """Count a call; return whether it is over the limit, the descriptor and what is left."""
        found, counted = self.limit_of(asked)
        limit = (found or {}).get("rate_limit")
        if limit is None or limit.get("unlimited"):
            return False, None, 0
        seconds = {"second": 1, "minute": 60, "hour": 3_600}[limit["unit"]]
        key = (counted, now_s // seconds)
        self.counts[key] = self.counts.get(key, 0) + 1
        left = limit["requests_per_unit"] - self.counts[key]
        return left < 0, found, max(left, 0)


VALUES_OF = {
    "plan": ["a", "[x]?b", "ab"],
    "x-region": ["a", "ab", "b"],
    "user": ["a", "ab", "b"],
    "remote_address": ["10.1.2.3", "10.9.0.1", "192.0.2.1"],
    "path": ["/b", "/bc/d", "/a"],
    "method": ["POST", "PUT"],
}
WILDCARDS_OF = {
    "plan": ["a*", "*b", "*"],
    "x-region": ["a*", "*"],
    "user": ["a*", "*b"],
    "remote_address": ["10.*", "10.1.*"],
    "path": ["/b*", "/b*d"],
    "method": ["*"],
}
KEYS = st.sampled_from(sorted(VALUES_OF))


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    """Return a rate_limit."""
    if draw(st.integers(0, 5)) == 5:
        return {"unlimited": True}
    unit = draw(st.sampled_from(["hour", "minute", "second"]))
    return {"unit": unit, "requests_per_unit": draw(st.integers(1, 2))}


@st.composite
def descriptors(draw: st.DrawFn, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return descriptors of the first of these keys or the second, and below it of the next."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for _ in range(draw(st.integers(2, 4))):
        key = draw(st.sampled_from([keys[0], keys[0], *keys[1:2]]))
        value = draw(st.sampled_from(["", VALUES_OF[key][0], *WILDCARDS_OF[key]]))
        each: dict[str, Any] = {"key": key} | ({"value": value} if value else {})
        if len(keys) == 1 or draw(st.booleans()):
            each["rate_limit"] = draw(limits())
            each["shadow_mode"] = draw(st.integers(0, 3)) == 3
        if "*" in value and draw(st.booleans()):
            each["share_threshold"] = True
        if len(keys) > 1 and draw(st.integers(0, 2)):
            each["descriptors"] = draw(descriptors(keys[1:]))
        found[key, value] = each
    return list(found.values())


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Return a configuration with at least one limit, and its keys."""
    keys = draw(st.lists(KEYS, min_size=1, max_size=3, unique=True))
    below = draw(descriptors(tuple(keys)))
    below.append({"key": "always", "rate_limit": {"unit": "hour", "requests_per_unit": 1}})
    return yaml.safe_dump({"domain": "shop", "descriptors": below}, sort_keys=False), keys


@st.composite
def calls(draw: st.DrawFn, keys: list[str]) -> list[tuple[int, Entries]]:
    """Return calls, each with the seconds since the one before."""
    shapes = [each for each in (keys[:1], keys[:2], keys[:3], keys[1:2], keys[1::-1]) if each]
    found = []
    for _ in range(draw(st.integers(20, 40))):
        keys_of_call = draw(st.sampled_from(shapes))
        asked = [(key, draw(st.sampled_from(VALUES_OF[key][:3]))) for key in keys_of_call]
        found.append((draw(st.sampled_from([0] * 9 + [1, 61])), asked))
    return found


def asked_of(limiter: Limiter, asked: Entries) -> CheckResult:
    """Ask for a descriptor, through the mapping of the service."""
    return limiter.evaluate(request_of("shop", asked), 1)


@given(configs().flatmap(lambda made: st.tuples(st.just(made[0]), calls(made[1]))))
def test_converted_rules_decide_as_the_original(
    made: tuple[str, list[tuple[int, Entries]]],
) -> None:
    """Call for call: allowed or denied, what is left, and what shadow mode would have denied."""
    text, asked_in_turn = made
    original = Original(text)
    clock = ManualClock()
    with Limiter.from_rules(imported(text).text, clock=clock) as limiter:
        for wait_s, asked in asked_in_turn:
            clock.advance(wait_s)
            found = asked_of(limiter, asked)
            over, descriptor, left = original.over_limit(asked, clock.now_ns() // NS_PER_SECOND)
            is_shadow = bool(descriptor and descriptor.get("shadow_mode"))
            assert found.decision.allowed is (is_shadow or not over), asked
            assert bool(found.shadow_denied) is (is_shadow and over), asked
            if descriptor is not None and not is_shadow:
                assert found.decision.remaining == left, asked


def test_the_model_knows_the_documented_cases() -> None:
    """The model is not wrong in the same way as the converter: cases of the documentation."""
    model = Original(shop(
        f"key: a, value: x, descriptors: [{{key: b, value: y, {limit(1)}}}]",
        f"key: a, descriptors: [{{key: b, {limit(2)}}}]",
    ))  # fmt: skip
    assert model.limit_of([("a", "x"), ("b", "y")])[1] == ("a=x", "b=y")
    assert model.limit_of([("a", "x"), ("b", "z")]) == (None, ())  # it does not go back
    assert model.limit_of([("a", "w"), ("b", "z")])[1] == ("a=w", "b=z")
    assert model.limit_of([("b", "y")]) == (None, ())


def test_a_deeper_descriptor_is_another_limit() -> None:
    """[to] is not charged by calls of [type, to], although both have the key `to`."""
    text = shop(f"key: type, descriptors: [{{key: to, {limit(9)}}}]", f"key: to, {limit(1)}")
    with Limiter.from_rules(imported(text).text, clock=ManualClock()) as limiter:
        for _ in range(3):
            assert asked_of(limiter, [("type", "mail"), ("to", "1")]).decision.allowed
        assert asked_of(limiter, [("to", "1")]).decision.allowed
        assert not asked_of(limiter, [("to", "1")]).decision.allowed
        assert asked_of(limiter, [("to", "1"), ("unknown", "x")]).kind == "unlimited"


def test_a_limit_of_0_denies_a_listed_value_and_nearly_all_others() -> None:
    """The deny list has the address; another key admits 1 request in 366 days."""
    text = shop(f"key: remote_address, value: 192.0.2.7, {limit(0)}",
                f"key: k, value: banned, {limit(0)}")  # fmt: skip
    with Limiter.from_rules(imported(text).text, clock=ManualClock()) as limiter:
        assert asked_of(limiter, [("remote_address", "192.0.2.7")]).kind == "blocked"
        answers = [asked_of(limiter, [("k", "banned")]).decision.allowed for _ in range(3)]
        assert answers == [True, False, False]


def test_two_descriptors_in_one_call_are_charged_together_or_not_at_all() -> None:
    """The guide's numbers: of 10 calls, 5 pass; envoyproxy/ratelimit would have spent 10 of `b`."""
    text = shop(f"key: a, {limit(5)}", f"key: b, {limit(8)}")
    with Limiter.from_rules(imported(text).text, clock=ManualClock()) as limiter:
        pair = [(request_of("shop", [(key, "1")]), 1) for key in "ab"]
        passed = [
            all(each.decision.allowed for each in limiter.evaluate_all(pair)) for _ in range(10)
        ]
        assert passed == [True] * 5 + [False] * 5
        assert asked_of(limiter, [("b", "1")]).decision.remaining == 2


def test_a_denied_call_costs_nothing() -> None:
    """The guide's numbers: 8 of 10 are spent, 5 more do not fit, and 2 still do."""
    text = shop(f"key: a, {limit(10)}")
    with Limiter.from_rules(imported(text).text, clock=ManualClock()) as limiter:
        request = request_of("shop", [("a", "1")])
        answers = [limiter.evaluate(request, units).decision.allowed for units in (8, 5, 2)]
        assert answers == [True, False, True]


@pytest.mark.parametrize(
    ("algorithm", "passed"), [("fixed_window", 20), ("token_bucket", 11)]
)  # fmt: skip
def test_a_token_bucket_has_no_edge(algorithm: ImportAlgorithm, passed: int) -> None:
    """The guide's numbers: 10/minute, 20 requests from 3 s before to 3 s after the full minute."""
    clock = ManualClock(57)
    found = imported(shop(f"key: a, {limit(10)}"), algorithm=algorithm)
    with Limiter.from_rules(found.text, clock=clock) as limiter:
        answers = [asked_of(limiter, [("a", "1")]).decision.allowed for _ in range(10)]
        clock.advance(6)
        answers += [asked_of(limiter, [("a", "1")]).decision.allowed for _ in range(10)]
        assert sum(answers) == passed


async def test_calls_over_grpc_get_the_same_decisions() -> None:
    """The service with the imported example replies to ShouldRateLimit as the original would."""
    found = import_rules([read_config((EXAMPLE / "before.yaml").read_text(), "before.yaml")])
    original = Original((EXAMPLE / "before.yaml").read_text())
    asked_in_turn: list[Entries] = [
        *[[("remote_address", "192.0.2.7")]] * 12,
        *[[("plan", "gold"), ("path", "/v1/orders")]] * 3,
        *[[("plan", "free"), ("path", "/v1/orders")]] * 7,
        *[[("plan", "free"), ("path", "/v1/search")]] * 4,
        *[[("remote_address", "10.1.2.3")]] * 12,
        [("remote_address", "203.0.113.9")],
        *[[("generic_key", "unknown")]] * 2,
    ]
    async with (
        serving(found.text, clock=ManualClock()) as server,
        grpc_client(server.target) as ask,
    ):
        for asked in asked_in_turn:
            over, descriptor, _ = original.over_limit(asked, 0)
            denied = over and not (descriptor and descriptor.get("shadow_mode"))
            reply = await ask(entries(*asked), domain=original.config["domain"])
            assert codes(reply)[0] == ("OVER_LIMIT" if denied else "OK"), asked


def test_the_example_is_converted_as_the_guide_shows() -> None:
    """`ratekeeper rules import before.yaml` prints after.yaml."""
    found = import_rules([read_config((EXAMPLE / "before.yaml").read_text(), "before.yaml")])
    assert found.text == (EXAMPLE / "after.yaml").read_text()


def test_the_guide_shows_the_files_and_the_report_as_they_are() -> None:
    """The example before, every line of the report, and the beginning of the example after."""
    guide = (EXAMPLE.parents[2] / "docs/migrate/envoy-ratelimit.md").read_text()
    before, after = [(EXAMPLE / f"{name}.yaml").read_text() for name in ("before", "after")]
    assert f"```yaml\n{before.partition(chr(10))[2]}```" in guide
    found = import_rules([read_config(before, "before.yaml")])
    assert "\n".join(map(str, found.findings)) in guide
    assert f"after.yaml: written, rules: {len(found.document.rules)}\n" in guide
    start = guide.index("```yaml\n# Converted") + len("```yaml\n")
    assert after.startswith(guide[start : guide.index("```", start)])


def test_the_guide_opens_the_port_with_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command is accepted after the step before, and rejected without it: Envoy would go on."""
    guide = (EXAMPLE.parents[2] / "docs/migrate/envoy-ratelimit.md").read_text()
    create, serve = re.findall(r"`ratekeeper ((?:token create|serve) [^`]+)`", guide)
    arguments = serve.replace("limits.yaml", str(EXAMPLE / "after.yaml"))
    arguments = arguments.replace("redis://…", "redis://127.0.0.1:1").split()
    started: list[object] = []
    monkeypatch.setattr(startup, "run", lambda settings: started.append(check(settings)))
    check, env = startup.check_access, {"RATEKEEPER_DATA": str(tmp_path)}
    assert "there is no token" in CliRunner().invoke(app, arguments, env=env).stderr
    assert CliRunner().invoke(app, create.split(), env=env).exit_code == 0
    assert CliRunner().invoke(app, arguments, env=env).exit_code == 0
    assert len(started) == 1
