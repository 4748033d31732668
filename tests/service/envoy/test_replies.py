"""The replies to Envoy."""

from __future__ import annotations

import json

import pytest

from ratekeeper import Decision, Limit
from ratekeeper.core.errors import CapacityError, InvalidKey
from ratekeeper.core.model import UNLIMITED, AppliedRule, CheckResult, ResultKind
from ratekeeper.service.envoy.protocol.messages import RateLimitResponse
from ratekeeper.service.envoy.replies import Outcome, limit_of, merged, reply_of
from ratekeeper.web.answers import Style
from tests.service.envoy.client import codes, headers

NOW_NS = 1_767_225_600 * 10**9
SECOND = 10**9

MINUTE = Limit(100, per=60)
HOUR = Limit(1000, per=3600)
ORDERS = AppliedRule("orders", [MINUTE])
USERS = AppliedRule("users", [HOUR])

OK = CheckResult(Decision(True, MINUTE, 73, reset_after_ns=36 * SECOND, rule="orders"), (ORDERS,))
TIGHT = CheckResult(Decision(True, HOUR, 5, reset_after_ns=3500 * SECOND, rule="users"), (USERS,))
DENIED = CheckResult(
    Decision(False, MINUTE, 0, 1_500_000_000, 60 * SECOND, rule="orders"), (ORDERS,)
)  # fmt: skip
DENIED_LONGER = CheckResult(
    Decision(False, HOUR, 0, 9 * SECOND, 99 * SECOND, rule="users"), (USERS,)
)
FREE = CheckResult(Decision(True, UNLIMITED, UNLIMITED.capacity), kind="unlimited")
EXEMPT = CheckResult(Decision(True, UNLIMITED, UNLIMITED.capacity, rule="allow"), kind="exempt")
BLOCKED = CheckResult(Decision(False, UNLIMITED, 0, 10**18, 10**18, rule="deny"), kind="blocked")
AWAY = CheckResult(
    Decision(False, MINUTE, 0, SECOND, SECOND, rule="orders", degraded=True),
    (ORDERS,),
    "unavailable",
)
OPEN = CheckResult(
    Decision(True, MINUTE, 0, 0, SECOND, rule="orders", degraded=True), (ORDERS,), "limited"
)


def answered(*outcomes: Outcome) -> RateLimitResponse:
    """Return the reply as Envoy reads it."""
    return RateLimitResponse.FromString(reply_of(outcomes, NOW_NS, Style()))


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([OK], ["OK", "OK"]),
        ([DENIED], ["OVER_LIMIT", "OVER_LIMIT"]),
        ([OK, DENIED], ["OVER_LIMIT", "OK", "OVER_LIMIT"]),
        ([DENIED, OK], ["OVER_LIMIT", "OVER_LIMIT", "OK"]),
        ([OK, TIGHT, FREE, EXEMPT], ["OK", "OK", "OK", "OK", "OK"]),
        ([FREE], ["OK", "OK"]),
        ([EXEMPT], ["OK", "OK"]),
        ([BLOCKED], ["OVER_LIMIT", "OVER_LIMIT"]),
        ([OK, BLOCKED], ["OVER_LIMIT", "OK", "OVER_LIMIT"]),
        ([AWAY], ["OVER_LIMIT", "OVER_LIMIT"]),
        ([OPEN], ["OK", "OK"]),
        ([CapacityError(101, MINUTE), OK], ["OVER_LIMIT", "OVER_LIMIT", "OK"]),
        ([OK, InvalidKey("too long")], ["OVER_LIMIT", "OK", "OVER_LIMIT"]),
    ],
)
def test_one_descriptor_over_the_limit_denies_the_request(
    outcomes: list[Outcome], expected: list[str]
) -> None:
    """A code for the request, then one for each descriptor, in order."""
    assert codes(answered(*outcomes)) == expected


def test_a_status_has_the_limit_and_its_state() -> None:
    """The tightest limit of the descriptor, what remains, and the time to reset."""
    status = answered(OK).statuses[0]
    assert (status.current_limit.requests_per_unit, status.current_limit.unit) == (100, 2)
    assert status.current_limit.name == "orders"
    assert status.limit_remaining == 73
    assert status.duration_until_reset.seconds == 36
    denied = answered(DENIED).statuses[0]
    assert (denied.limit_remaining, denied.duration_until_reset.seconds) == (0, 60)


@pytest.mark.parametrize("result", [FREE, EXEMPT, BLOCKED, AWAY, OPEN])
def test_a_status_without_numbers_has_no_limit(result: CheckResult) -> None:
    """If there is no limit, or its state is unknown, no number is invented."""
    assert not answered(result).statuses[0].HasField("current_limit")


@pytest.mark.parametrize(
    ("per", "unit", "times"),
    [
        (1, "SECOND", 1), (60, "MINUTE", 1), (3600, "HOUR", 1), (86_400, "DAY", 1),
        (7 * 86_400, "WEEK", 1), (30 * 86_400, "MONTH", 1), (365 * 86_400, "YEAR", 1),
        (30, "SECOND", 30), (300, "MINUTE", 5), (14 * 86_400, "WEEK", 2), (90, "SECOND", 90),
        (0.5, "UNKNOWN", 1), (1.5, "UNKNOWN", 1),
    ],
)  # fmt: skip
def test_a_window_in_envoys_units(per: float, unit: str, times: int) -> None:
    """The largest unit that divides it; none if it has fractions of a second."""
    found = RateLimitResponse.RateLimit.FromString(limit_of(Limit(7, per=per), "rule"))
    assert found.requests_per_unit == 7
    assert getattr(RateLimitResponse.RateLimit, unit) == found.unit
    assert (found.unit_multiplier.value if found.HasField("unit_multiplier") else 1) == times


def test_headers_have_the_tightest_limit_and_all_rules() -> None:
    """Of two descriptors, the one with less left; both rules are listed once."""
    found = headers(answered(OK, TIGHT, OK))
    assert found == {
        "x-ratelimit-limit": "1000",
        "x-ratelimit-remaining": "5",
        "x-ratelimit-reset": str(1_767_225_600 + 3500),
        "ratelimit": '"users";r=5;t=3500',
        "ratelimit-policy": '"orders";q=100;w=60, "users";q=1000;w=3600',
    }


def test_a_denial_is_a_problem_with_the_longest_wait() -> None:
    """If both descriptors deny, the client learns when both will pass."""
    response = answered(DENIED, DENIED_LONGER)
    found = headers(response)
    assert found["retry-after"] == "9"
    assert found["content-type"] == "application/problem+json"
    body = json.loads(response.raw_body)
    assert (body["status"], body["error"]["code"]) == (429, "RATE_LIMIT_EXCEEDED")


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (BLOCKED, "BLOCKED"),
        (AWAY, "LIMITER_UNAVAILABLE"),
        (CapacityError(101, MINUTE), "COST_EXCEEDS_CAPACITY"),
        (InvalidKey("too long"), "INVALID_REQUEST"),
    ],
)
def test_the_body_of_a_denial_has_status_429(outcome: Outcome, code: str) -> None:
    """RFC 9457: it is the status of the response, which Envoy makes a 429."""
    body = json.loads(answered(OK, outcome).raw_body)
    assert (body["status"], body["error"]["code"]) == (429, code)


def test_an_allowed_request_has_no_body() -> None:
    """If no limit is known, it has no headers either."""
    assert answered(OK).raw_body == b""
    assert headers(answered(FREE)) == {}
    assert headers(answered(EXEMPT)) == {"x-ratelimit-policy": "exempt"}
    assert headers(answered(OPEN))["x-ratelimit-policy"] == "degraded"


@pytest.mark.parametrize(
    ("results", "kind"),
    [
        ([FREE, OK], "limited"),
        ([EXEMPT, OK], "limited"),
        ([FREE, EXEMPT], "exempt"),
        ([DENIED, AWAY], "unavailable"),
        ([AWAY, BLOCKED, OK], "blocked"),
    ],
)
def test_the_kind_of_several_results(results: list[CheckResult], kind: ResultKind) -> None:
    """ "blocked" first; "exempt" and "unlimited" only if no limit applied."""
    assert merged(results).kind == kind
    assert merged(results[::-1]).kind == kind


def test_merging_keeps_denials_of_shadow_rules() -> None:
    """Each rule once."""
    one = OK._replace(shadow_denied=("a", "b"))
    assert merged([one, TIGHT._replace(shadow_denied=("b", "c"))]).shadow_denied == ("a", "b", "c")
