"""Random rules and requests that often match: few values, and overlapping patterns."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ratekeeper import Limit, Request
from ratekeeper.rules.document.model import MODES, Match, Rule

LIMITS = (Limit(10, per=1),)

paths = st.sampled_from(
    [
        None,
        "/",
        "/a",
        "/b",
        "/a/b",
        "/a/b/",
        "/a//b?x=1",
        "/a/c",
        "/a/b/c",
        "/b/a/c",
        "/a/x/b",
        "/v1/a",
        "/v12/b",
        "/%61/b",
        "/a/b%2Fc",
        "/a/../b",
        "/a/x/%2e%2E/b",
        "/a/b/%2e%2e/../c",
        "/b//../a",
        "/v1/..%2fa",
        "a",
        "*",
        "/a/é",
        "/report-7/x",
    ]
)
endpoints = st.sampled_from(
    [
        "/",
        "/a",
        "/b",
        "/a/b",
        "/a/{id}",
        "/{x}/b",
        "/{x}/{y}",
        "/a/*",
        "/a/*/b",
        "/**",
        "/**/c",
        "/a/**/b",
        "/**/b/**",
        "/?",
        "/v*",
        "/report-*",
        "*b",
        "/*-7/*",
        "/**/*ort*",
        "/a/**/?",
        "/**/{x}/**/b",
        "/v1*/a",
        "re:/v[0-9]+/.*",
        "re:/a/?.*",
        "re:/.*",
        "re:/(a|b)/[^/]+",
    ]
)
values = st.sampled_from(["", "a", "b", "ab", "abc", "sk_a_1", "sk_b_2", "é", "*"])
globs = st.sampled_from(
    [
        "*",
        "a",
        "b",
        "ab",
        "a*",
        "ab*",
        "?b",
        "*c",
        "sk_a_*",
        "sk_*_1",
        "*b*",
        "*_b_*",
        "a*c",
        "?",
        "[ab]",
        "[!a]*",
        "[*]",
    ]
)
methods = st.sampled_from(["GET", "HEAD", "POST", "PUT"])
addresses = st.sampled_from(
    [None, "10.0.0.1", "10.1.0.1", "192.0.2.7", "::1", "::ffff:10.0.0.1", "2001:db8::1", "x", ""]
)
networks = st.sampled_from(
    ["10.0.0.0/8", "10.0.0.0/16", "192.0.2.7", "0.0.0.0/0", "::/0", "2001:db8::/32"]
)
tiers = st.sampled_from([None, "a", "ab", "free"])


def some(patterns: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(patterns, max_size=3).map(tuple)


matches = st.builds(
    Match,
    endpoint=some(endpoints),
    method=some(methods),
    user=st.just(()) | some(globs),
    api_key=st.just(()) | some(globs),
    ip=st.just(()) | some(networks),
    tenant=st.just(()) | some(globs),
    tier=st.just(()) | some(globs),
    attributes=st.dictionaries(
        st.sampled_from(["region", "plan"]),
        st.lists(globs, min_size=1, max_size=2).map(tuple),
        max_size=1,
    ),
)


@st.composite
def rules(draw: st.DrawFn) -> list[Rule]:
    """Up to twelve rules that count by few attributes, so that several count by the same."""
    made = st.builds(
        Rule,
        id=st.just(""),
        by=st.sampled_from([("user",), ("tenant",), ("user", "tenant"), ()]),
        limits=st.just(LIMITS),
        match=matches | st.builds(Match, endpoint=some(endpoints)) | st.just(Match()),
        mode=st.sampled_from(MODES),
        rollout=st.sampled_from([100, 100, 100, 50, 0]),
    )
    found = draw(st.lists(made, max_size=12))
    return [_named(str(number), rule) for number, rule in enumerate(found)]


def _named(name: str, rule: Rule) -> Rule:
    fields: dict[str, Any] = {each: getattr(rule, each) for each in rule.__slots__}
    return Rule(**{**fields, "id": name})


def requests() -> st.SearchStrategy[Request]:
    """Requests with some of the fields that rules match."""
    return st.builds(
        Request,
        user=st.none() | values,
        api_key=st.none() | values,
        ip=addresses,
        tenant=st.none() | values,
        tier=tiers,
        endpoint=paths,
        method=st.none() | methods | st.just("get"),
        attributes=st.dictionaries(st.sampled_from(["region", "plan", "other"]), values),
    )
