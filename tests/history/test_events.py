"""What a row of the decision log says, and of whom."""

from __future__ import annotations

import json

import pytest

from tollkeeper import Limiter, Request
from tollkeeper.core.subjects import SEPARATOR
from tollkeeper.history.events import (
    ENDPOINT_LENGTH_MAX,
    NUMBER_MAX,
    PART,
    Event,
    Subjects,
    cleaned,
    event_of,
    known_as,
    subject_of,
    told,
)
from tollkeeper.rules.document.reading import read
from tollkeeper.testing import ManualClock

RULES = read(
    """
version: 1
rules:
  - {id: users, match: {user: "*"}, by: user, limits: 2/minute, cost: 2}
  - {id: tenants, match: {tenant: "*"}, by: [tenant, method], limits: 1/hour}
  - {id: trial, match: {user: "*"}, by: ip, limits: 1/hour, mode: shadow}
allow: ["user:root"]
deny: ["user:mallory"]
"""
)
NOW_NS = 1_800_000_000 * 10**9


def event(
    request: Request, *, times: int = 1, cost: int = 1, subjects: Subjects = "plain"
) -> Event:
    """Of the last of so many decisions."""
    limiter = Limiter.from_rules(RULES, clock=ManualClock(start=1_800_000_000))
    for _ in range(times):
        ruling = limiter.evaluate(request, cost)
    known = "" if ruling.counted else known_as(request)
    noted = (NOW_NS, ruling, cost, known, request.endpoint, request.method)
    return event_of(noted, "eu-1", subjects)


def test_a_denial_says_who_what_and_until_when() -> None:
    """In the rule's own words for whom it counts; the wait is rounded up."""
    found = event(Request(user="42", endpoint="/orders", method="POST"), times=2)
    assert found == Event(
        *(NOW_NS // 1_000, "eu-1", "users", "user:42", "/orders", "POST"),
        *("denied", "limited", 1, 60_000, 0, '["trial"]'),
    )


@pytest.mark.parametrize(
    ("request_", "rule", "subject", "outcome", "kind"),
    [
        (Request(user="42"), "users", "user:42", "allowed", "limited"),
        (Request(user="root"), "(allow)", "user:root", "allowed", "exempt"),
        (Request(user="mallory", api_key="k"), "(deny)", "api_key:k", "denied", "blocked"),
        (Request(ip="192.0.2.1"), "(none)", "ip:192.0.2.1", "allowed", "unlimited"),
        (Request(), "(none)", "", "allowed", "unlimited"),
    ],
)
def test_kinds(request_: Request, rule: str, subject: str, outcome: str, kind: str) -> None:
    """Where no rule counts, it is told by the first of the request's fields."""
    found = event(request_)
    assert (found.rule, found.subject, found.outcome, found.kind) == (rule, subject, outcome, kind)
    assert found.retry_after_ms == 0


def test_a_cost_is_a_number_to_every_database() -> None:
    """Whoever is on the allow list may ask for anything."""
    assert event(Request(user="root"), cost=10**30).cost == NUMBER_MAX


def test_of_several_rules_the_one_that_spoke_is_told() -> None:
    """With the subject that it counts by."""
    request = Request(user="42", tenant="acme", method="get")
    found = event(request, times=2)
    assert (found.rule, found.subject) == ("tenants", f"tenant:acme{PART}method:GET")


def test_units_and_subjects_of_each_rule_are_in_the_ruling() -> None:
    """What `usage` is made of."""
    limiter = Limiter.from_rules(RULES)
    ruling = limiter.evaluate(Request(user="42", tenant="acme", method="get"))
    assert ruling.counted == (("user:42", 2), (f"tenant:acme{PART}method:GET", 1))
    assert subject_of(ruling) in {"user:42", f"tenant:acme{PART}method:GET"}


def test_subjects_by_digest_keep_their_parts() -> None:
    """The same value has the same digest; the names stay, the values do not."""
    subject = f"tenant:acme{PART}user:42{PART}everyone"
    found = told(subject, "hashed").split(PART)
    assert found == [told("tenant:acme", "hashed"), told("user:42", "hashed"), "everyone"]
    assert "acme" not in found[0]
    assert found[0].startswith("tenant:#")
    assert event(Request(user="42"), subjects="hashed").subject == told("user:42", "hashed")
    assert event(Request(user="42"), subjects="none").subject == ""


def test_texts_are_such_as_every_database_takes() -> None:
    """Bounded, without NUL and without halves of pairs."""
    assert cleaned("é\ud800\0", 10) == "é?\ufffd"
    long = event(Request(user="42", endpoint="/" + "a" * 5_000, method="M" * 99))
    assert len(long.endpoint) == ENDPOINT_LENGTH_MAX
    assert len(long.method) == 32


def test_a_list_of_shadows_that_is_too_long_is_cut() -> None:
    """It stays a list."""
    limiter = Limiter.from_rules(RULES)
    ruling = limiter.evaluate(Request(user="42"))
    many = ruling._replace(shadow_denied=tuple(f"rule-{number}" for number in range(1_000)))
    found = event_of((NOW_NS, many, 1, "", None, None), "n", "plain")
    assert len(found.shadow_denied) < 1_100
    assert json.loads(found.shadow_denied)[:2] == ["rule-0", "rule-1"]


def test_the_separator_is_the_one_that_subjects_have() -> None:
    """It is written down twice, because a stage imports no other."""
    assert PART == SEPARATOR
