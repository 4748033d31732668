"""Which rules can never match: all that are called so cannot, and the plain cases are seen."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper.core.model import Limit
from tollkeeper.rules.document import covering
from tollkeeper.rules.document.covering import covered_rules, covers
from tollkeeper.rules.document.model import Match, Rule
from tollkeeper.rules.matching.networks import compile_network
from tollkeeper.rules.matching.patterns import compile_endpoint, compile_glob

LIMITS = (Limit(5, per=1),)


def rule(match: Match | None = None, by: tuple[str, ...] = ("user",), **fields: Any) -> Rule:
    return Rule(id="r", by=by, limits=LIMITS, match=match or Match(), **fields)


def endpoint(*texts: str, **fields: Any) -> Rule:
    return rule(Match(endpoint=texts), **fields)


# -------------------------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("wide", "narrow", "does"),
    [
        ("/a", "/a", True),
        ("/a", "/a/", True),
        ("/a", "/b", False),
        ("/*", "/a", True),
        ("/*", "/a/*", True),
        ("/**", "/a/{id}/b", True),
        ("/v1/*", "/v1", True),
        ("/v1/*", "/v1/orders/{id}", True),
        ("/v1/*", "/v2/orders", False),
        ("/v1/*", "/*", False),
        ("/v1/{id}", "/v1/{name}", True),
        ("/v1/{id}", "/v1/me", True),
        ("/v1/me", "/v1/{id}", False),
        ("/v1/{id}", "/v1/{id}/x", False),
        ("/v1/{id}", "/v1", False),
        ("/v1/{id}/x", "/v1/*/x", True),
        ("/v1/rep-*", "/v1/rep-a", True),
        ("/v1/rep-*", "/v1/rep-a*", True),
        ("/v1/rep-a*", "/v1/rep-*", False),
        ("/v1/rep-*/x", "/v1/{id}/x", False),
        ("/a/**/b", "/a/x/b", True),
        ("/a/**/b", "/a/**/b", True),
        ("/a/**/b", "/a/{id}/b", False),  # it does; that it is not seen is harmless
        ("/a/{id}/b", "/a/**/b", False),
        ("re:/v[0-9]+/.*", "/v1/orders", True),
        ("re:/v[0-9]+/.*", "re:/v[0-9]+/.*", True),
        ("re:/v[0-9]+/.*", "re:/v1/.*", False),
        ("re:/.*", "/v1/*", False),
        ("/*", "re:/.*", False),
    ],
)
def test_endpoints(wide: str, narrow: str, does: bool) -> None:
    """What certainly matches all that the other does."""
    assert covers(compile_endpoint(wide), compile_endpoint(narrow)) is does


@pytest.mark.parametrize(
    ("wide", "narrow", "does"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("*", "a", True),
        ("*", "a?", True),
        ("sk_*", "sk_live_*", True),
        ("sk_*", "sk_?", True),
        ("sk_live_*", "sk_*", False),
        ("s?_*", "sk_1", True),
        ("s?_*", "sk_*", False),
        ("[ab]", "a", True),
    ],
)
def test_globs(wide: str, narrow: str, does: bool) -> None:
    """The same for values."""
    assert covers(compile_glob(wide), compile_glob(narrow)) is does


@pytest.mark.parametrize(
    ("wide", "narrow", "does"),
    [
        ("10.0.0.0/8", "10.1.0.0/16", True),
        ("10.0.0.0/8", "10.0.0.0/8", True),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/16", "10.0.0.0/8", False),
        ("10.0.0.0/8", "11.0.0.0/16", False),
        ("::/0", "10.0.0.0/8", False),
        ("2001:db8::/32", "2001:db8:1::/48", True),
    ],
)
def test_networks(wide: str, narrow: str, does: bool) -> None:
    """A block and its parts."""
    assert covers(compile_network(wide), compile_network(narrow)) is does


segments = st.sampled_from(["a", "b", "ab", "{x}", "*", "**", "a*", "?", "*b"])
endpoints = st.lists(segments, max_size=4).map(lambda parts: "/" + "/".join(parts))
paths = st.lists(st.sampled_from(["a", "b", "ab", "aab", "x"]), max_size=5).map(
    lambda parts: "/" + "/".join(parts)
)


@given(endpoints, endpoints, paths)
def test_covered_endpoints_are(wide: str, narrow: str, path: str) -> None:
    """No path passes the covered one and not the other."""
    one, other = compile_endpoint(wide), compile_endpoint(narrow)
    if covers(one, other) and other.matches(path):
        assert one.matches(path)


globs = st.text("ab*?", min_size=1, max_size=4)


@given(globs, globs, st.text("ab", max_size=5))
def test_covered_globs_are(wide: str, narrow: str, value: str) -> None:
    """No value passes the covered one and not the other."""
    one, other = compile_glob(wide), compile_glob(narrow)
    if covers(one, other) and other.matches(value):
        assert one.matches(value)


# ----------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("rules", "pairs"),
    [
        ([rule(), endpoint("/a")], [(1, 0)]),
        ([endpoint("/a"), rule()], []),
        ([endpoint("/a/*"), endpoint("/a/b")], [(1, 0)]),
        ([endpoint("/a/*"), endpoint("/a/b", "/c")], []),
        ([endpoint("/a/*", "/c"), endpoint("/a/b", "/c")], [(1, 0)]),
        ([endpoint("/a"), endpoint("/a")], [(1, 0)]),
        ([endpoint("/a"), endpoint("/b"), endpoint("/a"), endpoint("/a")], [(2, 0), (3, 0)]),
        # Another thing is counted, or in another mode; or the first lets some keys pass.
        ([rule(), rule(by=("ip",))], []),
        ([rule(), rule(mode="shadow")], []),
        ([rule(mode="shadow"), rule()], []),
        ([rule(mode="shadow"), rule(mode="shadow")], [(1, 0)]),
        ([rule(mode="off"), rule()], []),
        ([rule(), rule(mode="off")], []),
        ([rule(rollout=99), rule()], []),
        ([rule(), rule(rollout=5)], [(1, 0)]),
        # A condition more on the first is a way past it.
        ([rule(Match(endpoint=("/a",), method=("GET",))), endpoint("/a")], []),
        ([endpoint("/a"), rule(Match(endpoint=("/a",), method=("GET",)))], [(1, 0)]),
        ([rule(Match(user=("*",))), endpoint("/a")], []),
        ([rule(Match(method=("GET", "PUT"))), rule(Match(method=("PUT",)))], [(1, 0)]),
        ([rule(Match(ip=("10.0.0.0/8",))), rule(Match(ip=("10.1.2.3",)))], [(1, 0)]),
        ([rule(Match(tier=("p*",))), rule(Match(tier=("pro", "plus")))], [(1, 0)]),
        (
            [rule(Match(attributes={"a": ("x*",)})), rule(Match(attributes={"a": ("xy",)}))],
            [(1, 0)],
        ),
        (
            [rule(Match(attributes={"a": ("x*",)})), rule(Match(attributes={"b": ("xy",)}))],
            [],
        ),
        # A rule that is never reached covers nobody itself; the first that takes all is named.
        ([endpoint("/a/*"), endpoint("/a/b/*"), endpoint("/a/b/c")], [(1, 0), (2, 0)]),
    ],
)
def test_rules_that_never_match(rules: list[Rule], pairs: list[tuple[int, int]]) -> None:
    """Each with the earlier rule that takes all its requests."""
    assert list(covered_rules(rules)) == pairs


matches = st.builds(
    Match,
    endpoint=st.lists(st.sampled_from(["/a", "/a/*", "/{x}", "/a/b", "/**"]), max_size=2).map(
        tuple
    ),
    method=st.lists(st.sampled_from(["GET", "PUT"]), max_size=2).map(tuple),
    tenant=st.lists(st.sampled_from(["t1", "t*", "*"]), max_size=2).map(tuple),
    ip=st.lists(st.sampled_from(["10.0.0.0/8", "10.1.0.0/16", "::1"]), max_size=2).map(tuple),
)


@given(st.lists(matches, min_size=2, max_size=8))
def test_the_file_finds_all_that_comparing_each_would(found: list[Match]) -> None:
    """Filing leaves nobody out: the same rules are covered as by looking at every earlier one."""
    rules = [rule(match) for match in found]
    conditions = [covering._conditions(match) for match in found]
    expected = {
        place
        for place in range(len(rules))
        if any(covering._covers(conditions[e], conditions[place]) for e in range(place))
    }
    pairs = list(covered_rules(rules))
    assert {place for place, _ in pairs} == expected
    assert all(covering._covers(conditions[earlier], conditions[place]) for place, earlier in pairs)


def test_comparing_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the bound it stops and says what it has found."""
    rules = [endpoint("/a/*"), endpoint("/a/b"), *(endpoint(f"re:/{n}") for n in range(50))]
    rules += [endpoint("/a/c")]
    assert list(covered_rules(rules)) == [(1, 0), (52, 0)]
    monkeypatch.setattr(covering, "COMPARISONS_MAX", 10)
    assert list(covered_rules(rules)) == [(1, 0)]


def test_many_rules_are_compared_with_few() -> None:
    """10,000 rules under one path are not 50 million comparisons: the bound is not reached."""
    rules = [endpoint(f"/v1/things/{n}/*") for n in range(10_000)]
    rules += [endpoint("/v1/things/77/parts/{id}")]
    assert list(covered_rules(rules)) == [(10_000, 77)]
