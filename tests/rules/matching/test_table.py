"""Which rules apply to a request: tables that read as the specification of matching."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratekeeper import InvalidKey, Limit, Request
from ratekeeper.rules.document.model import Match, Mode, Rule
from ratekeeper.rules.matching import table as table_module
from ratekeeper.rules.matching.patterns import compile_endpoint, compile_glob, spellings
from ratekeeper.rules.matching.table import CompiledRule, Matching, RuleTable
from tests.rules import requests as drawn

LIMITS = (Limit(10, per=1),)
GET = Request(user="42", endpoint="/v1/orders", method="GET")


def rule(
    name: str,
    by: str = "user",
    mode: Mode = "enforce",
    rollout: int = 100,
    costs: Mapping[str, int] | None = None,
    **match: Any,
) -> Rule:
    """Return a rule that counts by these attributes; conditions are texts or tuples of texts."""
    conditions = {name: (each,) if isinstance(each, str) else each for name, each in match.items()}
    return Rule(
        name,
        tuple(by.split()),
        LIMITS,
        Match(**conditions),
        mode=mode,
        rollout=rollout,
        costs=costs or {},
    )


def match(table: RuleTable, request: Request, tier: str | None) -> Matching:
    return table.match(table.values_of(request, tier))


def applying(rules: list[Rule], request: Request, tier: str | None = None) -> list[str]:
    """Return the ids of the rules that apply to a subject that every roll-out includes."""
    matched = match(RuleTable(rules), request, tier if tier is not None else request.tier)
    return [candidates[0].rule.id for candidates in matched]


# ---------------------------------------------------------------------------- which of those there


def test_the_first_match_applies() -> None:
    """Of rules that count by the same attributes, only the first that matches applies."""
    rules = [
        rule("writes", method="POST"),
        rule("orders", endpoint="/v1/orders"),
        rule("everything"),
    ]
    assert applying(rules, GET) == ["orders"]
    assert applying(rules, Request(method="POST", endpoint="/v1/orders")) == ["writes"]
    assert applying(rules, Request(endpoint="/else")) == ["everything"]


def test_the_order_of_the_document_decides_and_not_the_index() -> None:
    """An earlier rule for everything takes precedence over a later one for this path."""
    assert applying([rule("everything"), rule("orders", endpoint="/v1/orders")], GET) == [
        "everything"
    ]


def test_rules_by_different_attributes_all_apply() -> None:
    """One rule for each distinct `by` applies."""
    rules = [rule("a", "user"), rule("b", "tenant"), rule("c", "user tenant"), rule("d", "")]
    assert applying(rules, GET) == ["a", "b", "c", "d"]


def test_the_order_of_attributes_makes_another_by() -> None:
    """By tenant and user, and by user and tenant, are two counts, so both rules apply."""
    assert applying([rule("a", "user tenant"), rule("b", "tenant user")], GET) == ["a", "b"]


def test_a_shadow_rule_replaces_no_other() -> None:
    """It applies beside the enforced rule; of several, the first that matches."""
    rules = [
        rule("tried", mode="shadow"),
        rule("in force"),
        rule("tried too", mode="shadow"),
    ]
    assert applying(rules, GET) == ["tried", "in force"]


def test_a_rule_that_is_off_is_ignored() -> None:
    """The next rule applies instead."""
    assert applying([rule("a", mode="off"), rule("b")], GET) == ["b"]


def test_the_next_rule_applies_outside_a_roll_out() -> None:
    """All candidates are returned, up to the first that applies to all subjects."""
    rules = [rule("new", rollout=10), rule("newer", rollout=50), rule("old"), rule("older")]
    [candidates] = match(RuleTable(rules), GET, None)
    assert [each.rule.id for each in candidates] == ["new", "newer", "old"]


def test_no_rule_matches() -> None:
    """A document without rules, or without one for this request, returns nothing."""
    assert match(RuleTable([]), GET, None) == ()
    assert match(RuleTable([rule("a", method="PUT")]), GET, None) == ()


# --------------------------------------------------------------------------------- the conditions


@pytest.mark.parametrize(
    ("match", "request_", "holds"),
    [
        # Every condition that is given must hold; of the patterns of one, any.
        ({}, Request(), True),
        ({"method": "GET", "tenant": "acme"}, Request(method="GET"), False),
        ({"method": "GET", "tenant": "acme"}, Request(method="GET", tenant="acme"), True),
        ({"method": ("GET", "HEAD")}, Request(method="HEAD"), True),
        ({"endpoint": ("/a", "/b")}, Request(endpoint="/b"), True),
        # A missing field matches no pattern, not even a star.
        ({"tenant": "*"}, Request(), False),
        ({"endpoint": "/**"}, Request(), False),
        ({"tenant": "*"}, Request(tenant=""), True),
        # Methods in any case.
        ({"method": "POST"}, Request(method="post"), True),
        ({"method": "post"}, Request(method="POST"), True),
        # Globs of the client's fields.
        ({"user": "4*"}, Request(user="42"), True),
        ({"user": "4*"}, Request(user="24"), False),
        ({"user": "4?"}, Request(user="42"), True),
        ({"api_key": ("sk_a_*", "sk_b_*")}, Request(api_key="sk_b_1"), True),
        ({"api_key": ("sk_a_*", "*_b")}, Request(api_key="sk_b"), True),
        ({"tier": "pro"}, Request(tier="pro"), True),
        ({"tier": "pro"}, Request(tier="Pro"), False),
        # Networks, of both families.
        ({"ip": "10.0.0.0/8"}, Request(ip="10.1.2.3"), True),
        ({"ip": "10.0.0.0/8"}, Request(ip="::ffff:10.1.2.3"), True),
        ({"ip": "10.0.0.0/8"}, Request(ip="11.1.2.3"), False),
        ({"ip": ("10.0.0.0/8", "2001:db8::/32")}, Request(ip="2001:db8::7"), True),
        ({"ip": "10.0.0.0/8"}, Request(ip="nonsense"), False),
        # Attributes of one's own.
        ({"attributes": {"region": ("eu-*",)}}, Request(attributes={"region": "eu-1"}), True),
        ({"attributes": {"region": ("eu-*",)}}, Request(attributes={"region": "us"}), False),
        ({"attributes": {"region": ("eu-*",)}}, Request(), False),
        ({"attributes": {"a": ("1",), "b": ("2",)}}, Request(attributes={"a": "1"}), False),
    ],
    ids=repr,
)
def test_conditions(match: dict[str, Any], request_: Request, holds: bool) -> None:
    """Each condition alone and together with others."""
    assert applying([rule("a", **match)], request_) == (["a"] if holds else [])


@pytest.mark.parametrize(
    ("pattern", "path", "holds"),
    [
        ("/v1/orders", "/v1/orders", True),
        ("/v1/orders", "/v1/orders/7", False),
        ("/users/{id}", "/users/42", True),
        ("/users/{id}", "/users", False),
        ("/users/{id}", "/users/42/orders", False),
        ("/users/{id}/orders", "/users/42/orders", True),
        ("/v1/*/items", "/v1/7/items", True),
        ("/v1/*/items", "/v1/7/8/items", False),
        ("/v1/orders/*", "/v1/orders/7/lines/2", True),
        ("/v1/orders/*", "/v1/orders", True),
        ("/v1/**/items", "/v1/items", True),
        ("/v1/**/items", "/v1/a/b/items", True),
        ("/v1/**/items", "/v1/a/b", False),
        ("/v1/report-*", "/v1/report-7/pages", True),
        ("/{rest...}", "/", True),
        ("/", "/", True),
        ("/", "/a", False),
        ("re:/v[0-9]+/.*", "/v12/x", True),
        ("re:/v[0-9]+/.*", "/vx/x", False),
        # A client's other spelling of the path is the same path.
        ("/v1/orders", "/v1//orders/", True),
        ("/v1/orders", "/v1/orders?page=2", True),
        ("/v1/orders", "/v1/./x/../orders", True),
        ("/v1/orders", "/v1/%6Frders", True),
        ("re:/v1/orders", "//v1/orders#top", True),
        ("/v1/orders", "/V1/orders", False),
        ("/files/{name}", "/files/a%2Fb", True),
    ],
)
def test_endpoints(pattern: str, path: str, holds: bool) -> None:
    """Templates, globs and regular expressions, on paths as clients spell them."""
    assert applying([rule("a", endpoint=pattern)], Request(endpoint=path)) == ["a"] * holds


def test_an_assigned_tier_counts() -> None:
    """An assigned tier counts as if the request had named it."""
    rules = [rule("a", tier="pro"), rule("b", tier="free")]
    assert applying(rules, Request(), tier="free") == ["b"]
    assert applying(rules, Request(), tier="pro") == ["a"]
    assert applying(rules, Request()) == []


def test_costs_by_endpoint() -> None:
    """The first pattern that matches gives the cost; otherwise the rule does."""
    [candidates] = match(RuleTable([rule("a", costs={"/search": 5, "/s*": 2})]), GET, None)
    paths: list[list[str]] = [["/search"], ["/sort"], ["/v1"], [], ["/v1", "/sort", "/x"]]
    assert [candidates[0].cost(each) for each in paths] == [5, 2, 1, 1, 2]


def test_get_includes_head() -> None:
    """A HEAD request cannot evade the limit of GET; a rule for HEAD alone does not limit GET."""
    rules = [rule("head", by="ip", method="HEAD"), rule("get", method="get"), rule("all", by="")]
    assert applying(rules, Request(method="head")) == ["head", "get", "all"]
    assert applying(rules, Request(method="GET")) == ["get", "all"]
    assert applying(rules, Request(method="POST")) == ["all"]


# ------------------------------------------------------------------------------------ dot segments

PUBLIC_AND_LOGIN = [rule("public", endpoint="/public/*"), rule("login", endpoint="/login")]


@pytest.mark.parametrize(
    "path",
    [
        "/public/../login",
        "/public/x/../../login",
        "/public/%2e%2e/login",
        "/public/.%2E/login?x=1",
        "/public//../../login",
        "/public/..%2flogin",
        "/public\\..\\login",
    ],
)
def test_dot_segments_evade_no_rule(path: str) -> None:
    """The rule of the literal path and the rule of the resolved path both apply."""
    for rules in (PUBLIC_AND_LOGIN, PUBLIC_AND_LOGIN[::-1]):
        assert sorted(applying(rules, Request(endpoint=path))) == ["login", "public"]


@pytest.mark.parametrize("path", ["/admin/%2e%2e/../keys", "/admin//../keys", "/admin/x/../keys"])
def test_servers_that_resolve_in_another_order_evade_no_rule(path: str) -> None:
    """Some servers resolve before they decode, or before they merge slashes."""
    assert applying([rule("keys", endpoint="/admin/keys")], Request(endpoint=path)) == ["keys"]


def test_a_path_without_dot_segments_has_one_spelling() -> None:
    """An escaped slash alone does not separate segments."""
    for path in ("/public%2F..x", "/public%2Flogin", "/public/...", "/.well-known/x"):
        assert len(spellings(path)) == 1
    assert applying(PUBLIC_AND_LOGIN, Request(endpoint="/public/a%2F..b")) == ["public"]


def test_a_long_path_with_dot_segments_is_rejected() -> None:
    """Reading a path in several ways takes time, so the path is bounded. Others are not."""
    table = RuleTable(PUBLIC_AND_LOGIN)
    with pytest.raises(InvalidKey, match=r"at most 1,024 characters, but this one has 1,2"):
        match(table, Request(endpoint="/.." * 400 + "/login"), None)
    assert match(table, Request(endpoint="/public/" + "x" * 5_000), None)


@pytest.mark.parametrize("value", [42, b"42", ["42"], True], ids=repr)
@pytest.mark.parametrize("name", ["user", "endpoint", "method", "tier", "region"])
def test_values_that_are_not_text_are_rejected(name: str, value: Any) -> None:
    """A number would match no pattern and evade a limit, so it is an error."""
    conditions: dict[str, Any] = {"endpoint": "/**", "user": "*", "tier": "*"}
    table = RuleTable([rule("a", **conditions, attributes={"region": ("*",)})])
    known: dict[str, Any] = {name: value} if name != "region" else {"attributes": {name: value}}
    with pytest.raises(InvalidKey, match=rf"{name}=.*convert it to text"):
        match(table, Request(**known), value if name == "tier" else None)


# ----------------------------------------------------------------------------------- the index


def test_rules_are_indexed_by_what_distinguishes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules for one endpoint and many tenants, or one tenant and many keys, are not all tested."""
    sizes: list[int] = []
    candidates = table_module._RuleIndex.candidates

    def counted(*arguments: Any) -> Any:
        found = candidates(*arguments)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(table_module._RuleIndex, "candidates", counted)
    crowds = [
        [rule(str(n), endpoint="/v1/*", tenant=f"t{n}") for n in range(200)],
        [rule(str(n), endpoint=f"/v1/{n}", tenant="acme") for n in range(200)],
        [rule(str(n), tenant="acme", api_key=f"sk_{n:03}_*") for n in range(200)],
        [rule(str(n), method="GET", endpoint=f"/{{a}}/{n}") for n in range(200)],
    ]
    request = Request(endpoint="/v1/7", tenant="acme", api_key="sk_007_x", method="GET", user="1")
    other = Request(endpoint="/v1/x", tenant="t7")
    assert applying(crowds[0], other) == ["7"]
    assert [applying(rules, request) for rules in crowds[1:]] == [["7"]] * 3
    assert max(sizes) == 1


@pytest.mark.parametrize(
    "pattern", ["**/a-{}", "/v1/**/a-{}/*", "/v1/*-{}", "/*/*-{}-*", "/v1/a{}-*", "/v1/**/*-{}-*"]
)
@pytest.mark.parametrize("attribute", ["endpoint", "user"])
def test_a_wildcard_at_the_start_does_not_slow_a_look_up(
    pattern: str, attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5,000 rules whose patterns begin with a wildcard, a new value tests a few."""
    candidates = table_module._RuleIndex.candidates
    sizes: list[int] = []

    def counted(*arguments: Any) -> Any:
        sizes.append(len(candidates(*arguments)))
        return candidates(*arguments)

    monkeypatch.setattr(table_module._RuleIndex, "candidates", counted)
    table = RuleTable([rule(str(n), **{attribute: pattern.format(n)}) for n in range(5_000)])
    for number in (7, 77, 4_321):
        value = pattern.format(number).replace("**", "v1/x").replace("*", "b")
        [[found]] = match(table, Request(**{attribute: value}), None)
        assert found.rule.id == str(number)
    assert not match(table, Request(**{attribute: "/v1/a-b/c-9999999-x"}), None)
    assert max(sizes) <= 5


@pytest.mark.parametrize("pattern", ["2001:db8:{:x}::/48", "10.{0}.0.0/17", "192.0.{0}.7"])
def test_networks_are_looked_up(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 250 rules for networks, an address tests those whose network it is in."""
    candidates = table_module._RuleIndex.candidates
    sizes: list[int] = []

    def counted(*arguments: Any) -> Any:
        sizes.append(len(candidates(*arguments)))
        return candidates(*arguments)

    monkeypatch.setattr(table_module._RuleIndex, "candidates", counted)
    found = [rule(str(n), ip=pattern.format(n)) for n in range(250)]
    found.append(rule("all", ip="0.0.0.0/0", by="tenant"))
    for number in (7, 249):
        address = pattern.format(number).replace("::/48", "::1").replace("0.0/17", "127.255")
        ids = applying(found, Request(ip=address))
        assert ids == ([str(number)] if ":" in address else [str(number), "all"])
    assert applying(found, Request(ip="10.7.128.1"))[-1:] == ["all"]
    assert not applying(found, Request(ip="not an address"))
    assert max(sizes) <= 2


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("re:/s{}/[0-9]+", "/s{}/42"),
        ("re:/v[0-9]+/.*/i{}", "/v1/a/b/i{}"),
        (r"re:/v[^/]+/a\.b-{}(/x)?", "/v1/a.b-{}/x"),
        ("re:/a{{2}}b?/x-{}-.*", "/aab/x-{}-y"),
        ("/v1/**/i{}/**/end", "/v1/i{}/a/end"),
        ("/*-x{}-7-*", "/a-x{}-7-b"),
        ("/{{id}}.v{}", "/42.v{}"),
        ("/*{:03}*", "/a{:03}b"),
    ],
)
def test_every_pattern_is_found_by_its_literal_text(pattern: str, path: str) -> None:
    """Of 100 rules, the one that matches; none for a path that only ends like it."""
    rules = [rule(str(n), endpoint=pattern.format(n)) for n in range(100)]
    for number in (1, 10, 99):
        assert applying(rules, Request(endpoint=path.format(number))) == [str(number)]
    assert not applying(rules, Request(endpoint=path.format(100)))
    assert not applying(rules, Request(endpoint="/zz" + path.format(1)))


def test_a_text_beside_a_wildcard_may_be_part_of_a_word() -> None:
    """The index looks up whole words only if both of their ends are in the pattern."""
    rules = [rule("7", endpoint="/*-x7*/z"), rule("8", endpoint="/*-x8*/z")]
    assert applying(rules, Request(endpoint="/a-x7b/z")) == ["7"]
    rules = [rule("7", endpoint="/**/*y7-7*"), rule("8", endpoint="/**/*y8-8*")]
    assert applying(rules, Request(endpoint="/a/ay7-7b")) == ["7"]


def test_patterns_that_cannot_be_looked_up_are_tried_until_one_matches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of patterns of single characters: a value tries those before its first match."""
    tried: list[int] = []
    candidates = table_module._RuleIndex.candidates

    def counted(*arguments: Any) -> Iterator[Any]:
        for each in candidates(*arguments):
            tried.append(each[0])
            yield each

    monkeypatch.setattr(table_module._RuleIndex, "candidates", counted)
    letters = "abcdefghijklmnop"
    globs = [f"*{a}*{b}*{c}*" for a in letters for b in letters for c in letters]
    for attribute, form in (("endpoint", "/**/{}"), ("user", "{}")):
        rules = [rule(str(n), **{attribute: form.format(glob)}) for n, glob in enumerate(globs)]
        table = RuleTable(rules)
        tried.clear()
        [[found]] = match(table, Request(**{attribute: "/x-cba-bcd"}), None)
        assert globs[found.order] == "*a*b*c*"
        assert max(tried) == found.order
        assert not match(table, Request(**{attribute: "/x-y-z"}), None)


# ----------------------------------------------------------------------- against a naive matcher


compiled = cache(compile_endpoint)


def naive(rules: list[Rule], request: Request, tier: str | None) -> list[list[str]]:
    """Match as the documentation says: for each spelling of the path, test every rule, in order."""
    paths = [None] if request.endpoint is None else spellings(request.endpoint)
    found = [_naive(rules, replace(request, endpoint=path), tier) for path in paths]
    places = dict.fromkeys((each.by, each.mode == "shadow") for each in rules if each.mode != "off")
    of_places = [dict.fromkeys(each[place] for each in found if place in each) for place in places]
    return [list(candidates) for several in of_places for candidates in several]


def _naive(
    rules: list[Rule], request: Request, tier: str | None
) -> dict[tuple[tuple[str, ...], bool], tuple[str, ...]]:
    found: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    complete = set()
    for each in rules:
        place = (each.by, each.mode == "shadow")
        if each.mode == "off" or not _holds(each.match, request, tier):
            continue
        matched = found.setdefault(place, [])
        if place not in complete:
            matched.append(each.id)
        if each.rollout == 100:
            complete.add(place)
    return {place: tuple(candidates) for place, candidates in found.items()}


def _holds(match: Match, request: Request, tier: str | None) -> bool:
    values = {
        "user": request.user,
        "api_key": request.api_key,
        "tenant": request.tenant,
        "tier": tier,
        **{name: request.attributes.get(name) for name in match.attributes},
    }
    for name, patterns in _globs(match):
        value = values[name]
        if value is None or not any(compile_glob(text).matches(value) for text in patterns):
            return False
    method = (request.method or "").upper()
    covering = {method, "GET"} if method == "HEAD" else {method}
    if match.method and covering.isdisjoint(match.method):
        return False
    if match.ip and not _in_networks(request.ip, match.ip):
        return False
    path = request.endpoint
    return not match.endpoint or (
        path is not None and any(compiled(it).accepts(path) for it in match.endpoint)
    )


def _globs(match: Match) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name in ("user", "api_key", "tenant", "tier"):
        patterns: tuple[str, ...] = getattr(match, name)
        if patterns:
            yield name, patterns
    yield from match.attributes.items()


def _in_networks(text: str | None, networks: tuple[str, ...]) -> bool:
    try:
        address = ip_address(text or "")
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in ip_network(each) for each in networks)


def ids(matched: tuple[tuple[CompiledRule, ...], ...]) -> list[list[str]]:
    return [[each.rule.id for each in candidates] for candidates in matched]


@settings(max_examples=settings().max_examples * 8)
@given(drawn.rules(), st.lists(drawn.requests(), min_size=1, max_size=12))
def test_the_table_agrees_with_a_naive_matcher(rules: list[Rule], requests: list[Request]) -> None:
    """On random rules and requests."""
    table = RuleTable(rules)
    for request in requests:
        assert ids(match(table, request, request.tier)) == naive(rules, request, request.tier)


@settings(max_examples=settings().max_examples * 2)
@given(drawn.rules(), drawn.requests(), drawn.tiers)
def test_why_a_rule_does_not_match_agrees_with_the_table(
    rules: list[Rule], request: Request, tier: str | None
) -> None:
    """`failing` returns a reason for exactly the rules that the table leaves out."""
    table = RuleTable(rules)
    values = {
        **{name: getattr(request, name) for name in ("user", "api_key", "ip", "tenant")},
        **request.attributes,
        "tier": tier,
        "method": request.method and request.method.upper(),
    }
    paths = () if request.endpoint is None else spellings(request.endpoint)
    for each in table.rules:
        fails = each.failing(paths, values.get)
        holds = any(
            _holds(each.rule.match, replace(request, endpoint=path), tier)
            for path in paths or (None,)
        )
        assert bool(fails) is not holds, fails
