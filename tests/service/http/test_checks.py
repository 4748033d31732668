"""POST /v1/check, its batch and /v1/settle: replies, and the units that they spend."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from contextlib import suppress
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import Request
from ratekeeper.core.clock import SystemClock
from ratekeeper.core.errors import ConfigError, StoreUnavailable
from ratekeeper.core.model import UNITS_MAX
from ratekeeper.decide.store import Store
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.rules.document.model import Match, Rule
from ratekeeper.service.http.bodies import BodyRejected, body_reader
from ratekeeper.service.http.checks import CheckBody, counts_only, request_of
from ratekeeper.service.http.tokens import create_token
from ratekeeper.testing import limiting_off
from ratekeeper.web.identity import Identity
from tests.service.http.client import PENALISED, HttpClient, http_service
from tests.service.http.generated import FIELDS

MEMBERS = {
    "allowed",
    "kind",
    "rule",
    "limit",
    "remaining",
    "retry_after",
    "reset_after",
    "delay",
    "degraded",
    "shadow_denied",
}


class UnavailableStore(PythonMemoryStore):
    """A store whose counters always fail."""

    def __init__(self) -> None:
        super().__init__(SystemClock())

    def counter(
        self, limits: Any, rule: str, consistency: Any = "strict", across: Any = None
    ) -> Any:
        """Return a counter that fails."""
        found = _Failing()
        found.limits = limits
        return found


class _Failing:
    limits: Any = ()

    def _fail(self, *_: Any) -> Any:
        raise StoreUnavailable("the store is unavailable")

    check = peek = decide = refund = grant = reset = _fail

    def fast_check(self, fallback: Any) -> None:
        """Return None, as most counters do."""


async def test_a_reply_has_numbers_and_headers() -> None:
    """Allowed is 200 with the decision; denied is a 429 problem with the same members."""
    async with http_service() as http:
        answer = await http.check(user="42")
        assert answer.status == 200
        assert set(answer.data) == MEMBERS
        assert answer.data["allowed"] is True
        assert (answer.data["limit"], answer.data["remaining"]) == (3, 2)
        assert answer.headers["x-ratelimit-remaining"] == "2"
        assert answer.headers["ratelimit"] == '"users";r=2;t=20'
        assert answer.headers["content-type"] == "application/json"
        assert "retry-after" not in answer.headers
        await http.check(user="42", cost=2)
        answer = await http.check(user="42")
        assert answer.status == 429
        assert set(answer.data) > MEMBERS
        assert (answer.data["allowed"], answer.data["retry_after"]) == (False, 20.0)
        assert answer.data["error"]["code"] == "RATE_LIMIT_EXCEEDED"
        assert answer.headers["retry-after"] == "20"
        assert answer.headers["content-type"] == "application/problem+json"
        http.clock.advance(20)
        assert (await http.check(user="42")).status == 200


KINDS: list[tuple[dict[str, Any], int, str]] = [
    ({}, 200, "unlimited"),
    ({"api_key": "sk_internal_1", "user": "42"}, 200, "exempt"),
    ({"api_key": "sk_revoked_1", "user": "42"}, 403, "blocked"),
]


@pytest.mark.parametrize(("fields", "status", "kind"), KINDS)
async def test_without_limits_there_are_no_numbers(
    fields: dict[str, Any], status: int, kind: str
) -> None:
    """The members are null, not meaningless numbers."""
    async with http_service() as http:
        answer = await http.check(**fields)
        assert (answer.status, answer.data["kind"]) == (status, kind)
        assert answer.data["limit"] is None
        assert answer.data["remaining"] is None
        assert answer.data["rule"] == ""
        assert (answer.data["retry_after"] is None) == (kind == "blocked")


async def test_a_remembered_body_is_checked_by_the_current_rules() -> None:
    """The same bytes are counted each time, and by a new document once it is in force."""
    async with http_service() as http:
        found = [(await http.check(user="42")).data["remaining"] for _ in range(3)]
        assert found == [2, 1, 0]
        assert (await http.check(user="42")).status == 429
        http.context.limiter.use("""
            version: 1
            rules: [{id: others, by: user, limits: 9/minute}]
        """)
        answer = await http.check(user="42")
        assert (answer.data["rule"], answer.data["remaining"]) == ("others", 8)


async def test_a_shadow_rule_is_named_and_denies_nothing() -> None:
    """The reply shows what the rule would have done."""
    async with http_service() as http:
        assert (await http.check(tenant="t", endpoint="/trial")).data["shadow_denied"] == []
        answer = await http.check(tenant="t", endpoint="/trial")
        assert answer.status == 200
        assert answer.data["shadow_denied"] == ["trial"]


async def test_a_denial_by_a_penalty_says_so() -> None:
    """The body, the result of a batch and the decision log name the cool-down and its end."""
    async with http_service(rules=PENALISED) as http:
        allowed, *_, denied, last = [await http.check(user="1") for _ in range(5)]
        assert "penalty" not in allowed.data
        assert "penalty" not in denied.data
        assert (last.status, last.data["penalty"]) == (429, "cooldown")
        assert last.data["type"].endswith("#abnormal-usage-detected")
        assert last.data["error"]["code"] == "RATE_LIMIT_EXCEEDED"
        assert last.data["error"]["details"]["penalty"] == "cooldown"
        assert last.headers["retry-after"] == "10"
        batch = await http("POST", "/v1/check/batch", {"checks": [{"user": "1"}, {"user": "2"}]})
        one, other = batch.data["results"]
        assert (one["status"], one["penalty"]) == (429, "cooldown")
        assert "penalty" not in other


@pytest.mark.parametrize(("policy", "status"), [("open", 200), ("closed", 503)])
async def test_the_failure_policy_decides_while_the_store_fails(policy: str, status: int) -> None:
    """The reply is marked degraded; 503 has Retry-After."""
    store: Store = UnavailableStore()  # type: ignore[assignment]  # only as much as the test needs
    async with http_service(store=store, on_failure=policy) as http:
        answer = await http.check(user="42")
        assert answer.status == status
        assert answer.data["degraded"] is True
        assert answer.data["remaining"] is None
        assert answer.headers["x-ratelimit-policy"] == "degraded"
        assert ("retry-after" in answer.headers) == (status == 503)
        ready = await http("GET", "/readyz")
        assert ready.status == 200
        assert ready.data["store"] == {"healthy": False, "error": "the store is unavailable"}


async def test_a_cost_that_can_never_fit_is_422() -> None:
    """It has no Retry-After: waiting does not help. It shows what is left, and spends nothing."""
    async with http_service() as http:
        assert (await http.check(user="42")).headers["x-ratelimit-remaining"] == "2"
        for _ in range(2):
            answer = await http.check(user="42", cost=4)
            assert answer.status == 422
            assert answer.data["error"]["code"] == "COST_EXCEEDS_CAPACITY"
            assert "retry-after" not in answer.headers
            assert answer.headers["x-ratelimit-limit"] == "3"
            assert answer.headers["x-ratelimit-remaining"] == "2"
            assert "ratelimit" in answer.headers


WRONG: list[tuple[bytes, str]] = [
    (b"", "line 1, column 1"),
    (b"null", "expected an object, found"),
    (b"[]", "expected an object, found"),
    (b'{"usr":"42"}', 'the body: unknown field "usr"; did you mean "user"?'),
    (b'{"user":42}', "the body: user: expected "),
    (b'{"user":"42","cost":"1"}', "the body: cost: expected "),
    (b'{"user":"42","cost":-1}', "the body: cost: expected "),
    (b'{"user":"42","cost":true}', "the body: cost: expected "),
    (b'{"user":"42","cost":1.5}', "the body: cost: expected "),
    (b'{"user":"42","cost":1000000001}', "the body: cost: expected "),
    (b'{"user":"42","cost":1' + b"0" * 1000 + b"}", "the body"),
    (b'{"user":"\\u0000"}', "the body: user: the text has a NUL character"),
    (b'{"attributes":{"a\\u0000":"b"}}', "NUL"),
    (b'{"user":"a\0b"}', "column 11"),
    (b'{"user":"a\xff"}', "not UTF-8 at byte 11"),
    (b'{"user":"\\ud800"}', "the body"),
    (b'{"attributes":{"a":1}}', "the body: attributes.a: expected text, found a whole number"),
    (b'{"attributes":' + b"[" * 30_000 + b"}", "the body"),
    (b"[" * 60_000, "the body"),
    (b'{"user":"' + b"x" * 600 + b'"}', "512"),
    (b'{"user":"a\\u001fb"}', "U+001F"),
    (b'{"user":"1"} x', "column 14"),
]


@pytest.mark.parametrize(("body", "said"), WRONG)
async def test_an_invalid_body_is_400_with_the_place(body: bytes, said: str) -> None:
    """The problem names the field or the byte; nothing is spent."""
    async with http_service() as http:
        answer = await http("POST", "/v1/check", body)
        assert answer.status == 400, answer.body
        assert answer.headers["content-type"] == "application/problem+json"
        assert said in answer.data["detail"], answer.data["detail"]
        assert len(answer.body) < 4_000


async def test_an_escaped_backslash_is_not_a_nul() -> None:
    """The text `\\u0000` is a valid name."""
    async with http_service() as http:
        assert (await http("POST", "/v1/check", rb'{"user":"\\u0000"}')).status == 200


async def test_a_request_has_at_most_64_attributes() -> None:
    """One more is 400."""
    async with http_service() as http:
        fine = {f"a{n}": "x" for n in range(64)}
        assert (await http.check(attributes=fine)).status == 200
        assert (await http.check(attributes={**fine, "b": "x"})).status == 400


# ── Batches ────────────────────────────────────────────────────────────────────────────────────


async def batch(http: Any, checks: list[Any], **more: Any) -> Any:
    """Call POST /v1/check/batch."""
    return await http("POST", "/v1/check/batch", {"checks": checks, **more})


async def test_each_check_of_a_batch_has_its_own_result() -> None:
    """Each result is as if the check came alone; an invalid check does not affect others."""
    async with http_service() as http:
        checks = [
            {"user": "1"},
            {"user": "1", "cost": 3},
            {"user": "1", "cost": 9},
            {"user": "x" * 600},
            {"api_key": "sk_revoked_1"},
        ]
        answer = await batch(http, checks)
        assert answer.status == 200
        found = answer.data["results"]
        assert [each["status"] for each in found] == [200, 429, 422, 400, 403]
        assert set(found[0]) == {"status", *MEMBERS}
        assert found[2]["error"]["code"] == "COST_EXCEEDS_CAPACITY"
        assert found[3]["allowed"] is False
        assert (await http.check(user="1")).data["remaining"] == 1


async def test_an_atomic_batch_spends_all_or_nothing() -> None:
    """If one check is denied, none is charged."""
    async with http_service() as http:
        checks = [{"user": "1"}, {"user": "2", "cost": 3}, {"user": "2"}]
        answer = await batch(http, checks, atomic=True)
        assert answer.status == 200
        assert not all(each["allowed"] for each in answer.data["results"])
        assert (await http.check(user="1")).data["remaining"] == 2
        answer = await batch(http, [{"user": "3"}, {"user": "4"}], atomic=True)
        assert [each["remaining"] for each in answer.data["results"]] == [2, 2]


@pytest.mark.parametrize("count", [0, 101])
async def test_a_batch_has_1_to_100_checks(count: int) -> None:
    """Any other number is 400, and nothing is spent."""
    async with http_service() as http:
        answer = await batch(http, [{"user": "1"}] * count)
        assert answer.status == 400
        assert "checks" in answer.data["detail"]
        assert (await http.check(user="1")).data["remaining"] == 2


async def test_an_invalid_batch_is_400_with_the_place() -> None:
    """The detail names the field of the third check."""
    async with http_service() as http:
        answer = await batch(http, [{}, {}, {"usr": "1"}])
        assert answer.status == 400
        assert (
            'the body: checks[2]: unknown field "usr"; did you mean "user"?'
            in answer.data["detail"]
        )


# ── Settling ───────────────────────────────────────────────────────────────────────────────────


def settled(charged: Any, *, repeated: bool = False, reason: str = "") -> dict[str, Any]:
    """Return the reply to a settlement that charges so many units in all."""
    if repeated:
        reason = "this reservation was settled already"
    return {
        "charged": charged,
        "forgiven": 0,
        "uncounted": 0,
        "repeated": repeated,
        "reason": reason,
    }


async def test_a_cost_is_settled_afterwards() -> None:
    """Unused units are returned; units that do not fit are owed, up to a bound."""
    async with http_service() as http:
        await http.check(user="1", cost=3)
        answer = await http("POST", "/v1/settle", {"user": "1", "reserved": 3, "actual": 1})
        assert (answer.status, answer.data) == (200, settled(1))
        answer = await http("POST", "/v1/settle", {"user": "1", "reserved": 0, "actual": 5})
        assert answer.data == settled(5)
        assert (await http.check(user="1")).data["remaining"] == 0
        answer = await http("POST", "/v1/settle", {"user": "1", "reserved": 0, "actual": 5_000})
        assert answer.data["charged"] + answer.data["forgiven"] == 5_000
        assert answer.data["forgiven"] > 4_000
        answer = await http("POST", "/v1/settle", {"user": "1", "reserved": 3})
        assert answer.status == 400
        assert "actual" in answer.data["detail"]


async def test_a_reservation_is_settled_once() -> None:
    """A client that repeats a settlement, because the answer was lost, changes nothing."""
    async with http_service() as http:
        await http.check(user="1", cost=3)
        body = {"user": "1", "reserved": 3, "actual": 2, "reservation": "request-1"}
        for repeated in (False, True, True):
            answer = await http("POST", "/v1/settle", body)
            wanted = settled(0 if repeated else 2, repeated=repeated)
            assert (answer.status, answer.data) == (200, wanted)
        assert (await http.check(user="1", cost=0)).data["remaining"] == 1
        answer = await http("POST", "/v1/settle", {**body, "reservation": "x" * 129})
        assert answer.status == 400
        assert "reservation" in answer.data["detail"]


async def test_a_reservation_belongs_to_the_scope_of_its_token(tmp_path: Path) -> None:
    """One customer cannot settle, or take, the name of another."""
    path = tmp_path / "tokens.json"
    tenants = ("acme", "other")
    secrets = [create_token(path, name, "check", {"tenant": name}) for name in tenants]
    async with http_service(path, rules=SHARED_RULES) as http:
        body = {"user": "1", "reserved": 0, "actual": 1, "reservation": "request-1"}
        for _ in range(2):
            for secret in secrets:
                headers = {"Authorization": f"Bearer {secret}"}
                assert (await http("POST", "/v1/settle", body, headers)).status == 200
        headers = {"Authorization": f"Bearer {secrets[0]}"}
        assert (await left(http, headers))["service"] == 8


LATE_RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {
            "id": "users",
            "by": ["user"],
            "limits": [{"limit": 5, "per": "10s", "algorithm": "fixed_window"}],
        },
        {"id": "split", "by": ["tenant"], "limits": ["20/hour"], "split": 2},
    ],
}


@pytest.mark.parametrize("atomic", [None, False, True])
async def test_a_late_settlement_returns_no_quota_twice(atomic: bool | None) -> None:
    """The reply says what was charged and when; the window after it keeps its units."""
    async with http_service(rules=LATE_RULES) as http:
        checked = {"user": "1", "tenant": "acme", "cost": 5, "settle": True}
        if atomic is None:
            reply = (await http.check(**checked)).data
        else:
            batch = {"checks": [checked], "atomic": atomic}
            reply = (await http("POST", "/v1/check/batch", batch)).data["results"][0]
        http.clock.advance(10)
        assert (await http.check(user="1", cost=5)).status == 200
        body = {"user": "1", "tenant": "acme", "reserved": 5, "actual": 0}
        answer = await http("POST", "/v1/settle", {**body, "charged": reply["charged"]})
        reason = "too late: time has returned the units of users"
        assert (answer.status, answer.data) == (200, settled(0, reason=reason))
        assert (await http.check(user="1")).status == 429
        # Without the time of the charge, it is a correction of the current window.
        assert (await http("POST", "/v1/settle", body)).status == 200
        assert (await http.check(user="1", cost=5)).status == 200


async def test_a_settlement_in_time_returns_all_units() -> None:
    """To each rule, and of a split rule to the part that was charged."""
    async with http_service(rules=LATE_RULES) as http:
        fields = {"user": "1", "tenant": "acme"}
        for _ in range(20):
            reply = (await http.check(**fields, cost=5, settle=True)).data
            body = {**fields, "reserved": 5, "actual": 0, "charged": reply["charged"]}
            assert (await http("POST", "/v1/settle", body)).status == 200
        quota = (await http("GET", "/v1/quota?user=1&tenant=acme")).data["rules"]
        assert [rule["limits"][0]["remaining"] for rule in quota] == [5, 20]


async def test_a_reply_tells_the_charges_only_if_it_is_asked_to() -> None:
    """A denied request, and one that does not say `settle`, have no `charged`."""
    async with http_service() as http:
        assert "charged" not in (await http.check(user="1", cost=3)).data
        assert "charged" not in (await http.check(user="1", settle=True)).data
        assert (await http.check(user="2", settle=True)).data["charged"]


@pytest.mark.parametrize("charged", ["é", "AAAA", "kA", "!", "k5OldXNlcnMA//8="])
async def test_invalid_charges_are_rejected(charged: str) -> None:
    """400, with the way to a valid text; nothing is returned."""
    async with http_service() as http:
        await http.check(user="1", cost=3)
        body = {"user": "1", "reserved": 3, "actual": 0, "charged": charged}
        answer = await http("POST", "/v1/settle", body)
        assert answer.status == 400, answer.data
        assert "charged" in answer.data["detail"]
        assert (await http.check(user="1", cost=0)).data["remaining"] == 0


def _charged(user: str, units: int, *rules: str, part: int = 0, at_ns: int = 0) -> str:
    """Return a forged `charged`."""
    digest = blake2b(f"user:{user}".encode(), digest_size=8).digest()
    charges = [(rule, part, at_ns, units, digest) for rule in rules]
    return urlsafe_b64encode(msgspec.msgpack.encode((b"12345678", charges))).decode()


@pytest.mark.parametrize(
    ("forged", "left"),
    [
        (_charged("1", 1, "users", "users", "orders"), 1),
        (_charged("1", UNITS_MAX, "users"), 3),
        (_charged("1", 3, "users", part=9), 0),
        (_charged("1", 3, "orders"), 0),
        (_charged("1", 3, "users", at_ns=4 * 10**18), 3),
    ],
)
async def test_forged_charges_return_no_more_than_was_spent(forged: str, left: int) -> None:
    """A rule that is named twice, or that does not apply, is ignored."""
    async with http_service() as http:
        await http.check(user="1", cost=3)
        body = {"user": "1", "actual": 0, "charged": forged}
        assert (await http("POST", "/v1/settle", body)).status == 200
        assert (await http.check(user="1", cost=0)).data["remaining"] == left


async def test_a_settlement_needs_what_was_charged() -> None:
    """Without it, for another client, or with another number, it is rejected and says why."""
    async with http_service() as http:
        charged = (await http.check(user="1", cost=2, settle=True)).data["charged"]
        for body, reason in [
            ({"user": "1", "actual": 1}, "say what was charged: copy `charged`"),
            ({"user": "2", "actual": 1, "charged": charged}, "belongs to another client"),
            ({"user": "1", "actual": 1, "charged": charged, "reserved": 3}, "`charged` says 2"),
            ({"user": "1", "actual": -1, "charged": charged}, "actual"),
            ({"user": "1", "actual": 10**12 + 1, "charged": charged}, "actual"),
            ({"user": "1", "actual": {"tokens": -1}, "charged": charged}, "actual"),
            ({"user": "1", "actual": {"token": 1}, "charged": charged}, 'no limit counts "token"'),
            ({"user": "1", "actual": 1, "charged": charged, "reserved": -1}, "reserved"),
            ({"user": "1", "actual": 3, "reserved": {"requests": 1}}, "which unit"),
        ]:
            answer = await http("POST", "/v1/settle", body)
            assert answer.status == 400, body
            assert reason in answer.data["detail"]
        assert (await http.check(user="1", cost=0)).data["remaining"] == 1


async def test_charged_is_settled_once() -> None:
    """Two checks at the same instant have different names, so both can be settled."""
    async with http_service() as http:
        texts = [(await http.check(user="1", settle=True)).data["charged"] for _ in range(2)]
        for charged in texts:
            body = {"user": "1", "actual": 0, "charged": charged}
            replies = [(await http("POST", "/v1/settle", body)).data for _ in range(3)]
            assert replies == [settled(0), *[settled(0, repeated=True)] * 2]
        assert (await http.check(user="1", cost=0)).data["remaining"] == 3


UNIT_RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {"id": "requests", "by": ["user"], "limits": ["10/hour"]},
        {"id": "tokens", "by": ["user"], "unit": "tokens", "limits": ["1000/hour"]},
        {"id": "money", "by": ["tenant"], "unit": "micro_dollars", "limits": ["9000/hour"]},
    ],
}


async def _quotas(http: HttpClient) -> list[int]:
    rules = (await http("GET", "/v1/quota?user=1&tenant=acme")).data["rules"]
    return [rule["limits"][0]["remaining"] for rule in rules]


@pytest.mark.parametrize("atomic", [None, False, True])
async def test_costs_by_unit(atomic: bool | None) -> None:
    """A check with costs charges each rule its unit, and a settlement corrects those it names."""
    fields = {"user": "1", "tenant": "acme"}
    costs = {"requests": 1, "tokens": 400, "micro_dollars": 2_000}
    checked = {**fields, "costs": costs, "settle": True}
    async with http_service(rules=UNIT_RULES) as http:
        if atomic is None:
            reply = (await http("POST", "/v1/check", checked)).data
        else:
            batch = {"checks": [checked], "atomic": atomic}
            reply = (await http("POST", "/v1/check/batch", batch)).data["results"][0]
        assert await _quotas(http) == [9, 600, 7_000]
        body = {**fields, "charged": reply["charged"], "actual": {"tokens": 37}}
        assert (await http("POST", "/v1/settle", body)).data == settled({"tokens": 37})
        assert await _quotas(http) == [9, 963, 7_000]
        actual = {"tokens": 100, "micro_dollars": 500}
        body = {**fields, "reserved": costs, "actual": actual, "reservation": "again"}
        reply = (await http("POST", "/v1/settle", body)).data
        assert reply == settled({"requests": 1, **actual})
        assert await _quotas(http) == [9, 1_000, 8_500]
        assert (await http("POST", "/v1/settle", body)).data == settled(0, repeated=True)


async def test_wrong_costs_are_rejected() -> None:
    """A unit that no rule counts, two costs, and numbers that are no units."""
    async with http_service(rules=UNIT_RULES) as http:
        for body, reason in [
            ({"costs": {"token": 4}}, 'costs: no limit counts "token"; did you mean "tokens"?'),
            ({"cost": 2, "costs": {"tokens": 4}}, "cost and costs are both given"),
            ({"costs": {"tokens": -4}}, "at least 0"),
            ({"costs": {"tokens": 1.5}}, "expected a whole number"),
            ({"costs": 4}, "expected an object, found a whole number"),
        ]:
            answer = await http("POST", "/v1/check", {"user": "1", **body})
            assert answer.status == 400, answer.data
            assert reason in answer.data["detail"]
        assert (await http("POST", "/v1/check", {"user": "1", "costs": {}})).status == 200
        assert (await _quotas(http))[:2] == [9, 999]


# ── Scopes ─────────────────────────────────────────────────────────────────────────────────────

SPENDING: list[tuple[str, str, Any]] = [
    ("POST", "/v1/check", {"user": "2"}),
    ("POST", "/v1/check/batch", {"checks": [{"user": "1"}, {"user": "2"}]}),
    ("POST", "/v1/check/batch", {"checks": [{"user": "1"}, {"user": "2"}], "atomic": True}),
    ("POST", "/v1/settle", {"user": "2", "reserved": 3, "actual": 0}),
    ("GET", "/v1/quota?user=2", b""),
    ("DELETE", "/v1/quota?user=1", b""),
    ("POST", "/v1/quota/grant", {"user": "1", "units": 5}),
]


@pytest.mark.parametrize(("method", "url", "body"), SPENDING)
async def test_a_token_cannot_touch_another_users_quota(
    method: str, url: str, body: Any, tmp_path: Path
) -> None:
    """403, and nothing is spent or shown, not even for the first check of a batch."""
    path = tmp_path / "tokens.json"
    admin = {"Authorization": f"Bearer {create_token(path, 'a', 'admin')}"}
    secret = create_token(path, "one", "check", {"user": "1"})
    async with http_service(path) as http:
        await http("POST", "/v1/check", {"user": "2"}, admin)
        before = [(await http("GET", f"/v1/quota?user={n}", b"", admin)).data for n in (1, 2)]
        answer = await http(method, url, body, {"Authorization": f"Bearer {secret}"})
        assert answer.status == 403
        assert "remaining" not in answer.data
        after = [(await http("GET", f"/v1/quota?user={n}", b"", admin)).data for n in (1, 2)]
        assert before == after


async def test_a_scope_fills_in_missing_fields(tmp_path: Path) -> None:
    """A caller need not send the fields of its own scope."""
    path = tmp_path / "tokens.json"
    own = {"Authorization": f"Bearer {create_token(path, 'c', 'check', {'user': '1'})}"}
    async with http_service(path) as http:
        assert (await http("POST", "/v1/check", {}, own)).data["remaining"] == 2
        assert (await http("POST", "/v1/check", {"user": "1"}, own)).data["remaining"] == 1
        quota = (await http("GET", "/v1/quota", b"", own)).data
        assert quota["rules"][0]["subject"] == "user:1"


async def test_every_endpoint_counts_an_ipv6_client_by_its_network() -> None:
    """Addresses of one /64 share a counter in checks, batches, queries and gateway requests."""
    rules: dict[str, Any] = {
        "version": 1,
        "rules": [{"id": "ips", "by": ["ip"], "limits": ["10/hour"]}],
    }
    identity = Identity(trusted_proxies=["127.0.0.1"])
    async with http_service(rules=rules, identity=identity) as http:
        assert (await http.check(ip="2001:db8::1")).data["remaining"] == 9
        batch = {"checks": [{"ip": "2001:db8::2"}], "atomic": True}
        answer = await http("POST", "/v1/check/batch", batch)
        assert answer.data["results"][0]["remaining"] == 8
        forwarded = {"X-Original-URI": "/", "X-Forwarded-For": "2001:db8::3"}
        answer = await http("GET", "/v1/authorize", b"", forwarded)
        assert answer.headers["x-ratelimit-remaining"] == "7"
        answer = await http("GET", "/v1/quota?ip=2001:db8::4")
        assert answer.data["rules"][0]["limits"][0]["remaining"] == 7
        await http("POST", "/v1/settle", {"ip": "2001:db8::5", "reserved": 2, "actual": 0})
        assert (await http.check(ip="2001:db8::6")).data["remaining"] == 8


# ── Bodies as requests ─────────────────────────────────────────────────────────────────────────

read = body_reader(CheckBody)


@given(FIELDS)
def test_a_body_becomes_the_same_request_as_the_constructor(given_fields: dict[str, Any]) -> None:
    """It equals a Request made by its constructor, and it can be copied."""
    found = request_of(read(json.dumps(given_fields).encode()))
    assert found == Request(**given_fields)
    assert replace(found, user="x").user == "x"
    assert asdict(found) == asdict(Request(**given_fields))


@given(st.binary(max_size=200))
def test_any_body_is_a_request_or_rejected(body: bytes) -> None:
    """No other error is raised."""
    with suppress(BodyRejected, ConfigError):
        read(body)


def test_requests_without_attributes_share_an_empty_mapping() -> None:
    """The shared mapping stays empty."""
    one = request_of(read(b"{}"))
    other = request_of(read(b'{"attributes": {"a": "b"}}'))
    assert one.attributes == {}
    assert other.attributes == {"a": "b"}


# ── Returned units ─────────────────────────────────────────────────────────────────────────────

SHARED_RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {"id": "tenants", "by": ["tenant"], "limits": ["10/hour"]},
        {"id": "acme", "match": {"tenant": "acme"}, "by": ["user"], "limits": ["10/hour"]},
        {"id": "service", "by": [], "limits": ["10/hour"]},
    ],
}
ACME = {"tenant": "acme", "user": "1"}


async def left(http: HttpClient, headers: dict[str, str]) -> dict[str, int]:
    """Return what remains for acme, by rule."""
    answer = await http("GET", "/v1/quota?tenant=acme&user=1", b"", headers)
    return {rule["rule"]: rule["limits"][0]["remaining"] for rule in answer.data["rules"]}


RETURNED: list[tuple[dict[str, str], dict[str, int]]] = [
    ({}, {"tenants": 8, "acme": 8, "service": 8}),
    ({"tenant": "acme"}, {"tenants": 8, "acme": 8, "service": 5}),
    ({"user": "1"}, {"tenants": 5, "acme": 8, "service": 5}),
    ({"region": "eu"}, {"tenants": 5, "acme": 5, "service": 5}),
]


@pytest.mark.parametrize(("scope", "expected"), RETURNED)
async def test_a_confined_token_returns_only_its_own_units(
    scope: dict[str, str], expected: dict[str, int], tmp_path: Path
) -> None:
    """Under a limit that others share, the reserved units stay spent."""
    path = tmp_path / "tokens.json"
    headers = {"Authorization": f"Bearer {create_token(path, 't', 'check', scope)}"}
    async with http_service(path, rules=SHARED_RULES) as http:
        await http("POST", "/v1/check", {**ACME, "cost": 5}, headers)
        body = {**ACME, "reserved": 5, "actual": 2}
        answer = await http("POST", "/v1/settle", body, headers)
        assert (answer.status, answer.data) == (200, settled(2))
        assert await left(http, headers) == expected


async def test_nothing_is_returned_while_limiting_is_off(tmp_path: Path) -> None:
    """As in the tests of an application."""
    path = tmp_path / "tokens.json"
    secret = create_token(path, "t", "check", {"tenant": "acme"})
    headers = {"Authorization": f"Bearer {secret}"}
    async with http_service(path, rules=SHARED_RULES) as http:
        await http("POST", "/v1/check", {**ACME, "cost": 5}, headers)
        with limiting_off():
            await http("POST", "/v1/settle", {**ACME, "reserved": 5, "actual": 2}, headers)
        assert (await left(http, headers))["tenants"] == 5


COUNTED_APART: list[tuple[dict[str, str], Rule, bool]] = [
    ({"tenant": "acme"}, Rule("a", by=("tenant",)), True),
    ({"tenant": "acme"}, Rule("a", by=("user",)), False),
    ({"tenant": "acme"}, Rule("a", by=("user",), match=Match(tenant=("acme",))), True),
    ({"tenant": "acme"}, Rule("a", by=("user",), match=Match(tenant=("acme", "b"))), False),
    ({"tenant": "ac*"}, Rule("a", by=("user",), match=Match(tenant=("ac*",))), False),
    ({"tenant": "acme"}, Rule("a", by=("user",), match=Match(user=("acme",))), False),
    ({"region": "eu"}, Rule("a", by=(), match=Match(attributes={"region": ("eu",)})), True),
    ({"region": "eu"}, Rule("a", by=("region", "user")), True),
]


@pytest.mark.parametrize(("scope", "rule", "expected"), COUNTED_APART)
def test_which_rules_count_a_scope_separately(
    scope: dict[str, str], rule: Rule, expected: bool
) -> None:
    """By the scope's field, or for its value alone; a pattern may match others too."""
    assert counts_only(scope, rule) is expected


# ── Requests in flight ─────────────────────────────────────────────────────────────────────────

IN_FLIGHT_RULES = {
    "version": 1,
    "rules": [{"id": "users", "by": ["user"], "limits": ["9/minute", "2 at once for 60s"]}],
}


async def test_a_request_in_flight_is_released() -> None:
    """The reply has the number of its slot; releasing it twice frees no other request's."""
    async with http_service(rules=IN_FLIGHT_RULES) as http:
        slots = [(await http.check(user="1")).data["slot"] for _ in range(2)]
        assert (await http.check(user="1")).status == 429
        for _ in range(3):
            answer = await http("POST", "/v1/release", {"user": "1", "slot": slots[0]})
            assert (answer.status, answer.data) == (200, {"in_flight": False})
        assert (await http.check(user="1")).status == 200
        assert (await http.check(user="1")).status == 429
        answer = await http("POST", "/v1/release", {"user": "2", "slot": slots[1]})
        assert answer.status == 200
        assert (await http.check(user="1")).status == 429  # the slot is not of user 2


async def test_a_check_is_repeated_with_its_number() -> None:
    """A client that chose the number may repeat the check, and release what it may have taken."""
    async with http_service(rules=IN_FLIGHT_RULES) as http:
        for _ in range(3):
            assert (await http.check(user="1", slot=7)).data["slot"] == 7
        batch = {"checks": [{"user": "1", "slot": 8}, {"user": "1", "slot": 7}]}
        for atomic in (True, False):
            reply = (await http("POST", "/v1/check/batch", {**batch, "atomic": atomic})).data
            assert [each["slot"] for each in reply["results"]] == [8, 7]
        assert (await http.check(user="1", slot=9)).status == 429
        for slot in (7, 9, 2**53 - 1):
            await http("POST", "/v1/release", {"user": "1", "slot": slot})
        assert (await http.check(user="1")).status == 200
        assert (await http.check(user="1", slot=2**53)).status == 400


async def test_a_long_request_renews_its_slot() -> None:
    """Until others have all slots: then the reply says that it is lost."""
    async with http_service(rules=IN_FLIGHT_RULES) as http:
        slot = (await http.check(user="1")).data["slot"]
        renewal = {"user": "1", "slot": slot, "renew": True}
        for _ in range(3):
            http.clock.advance(50)
            answer = await http("POST", "/v1/release", renewal)
            assert (answer.status, answer.data) == (200, {"in_flight": True})
        http.clock.advance(60)
        assert [(await http.check(user="1")).status for _ in range(2)] == [200, 200]
        answer = await http("POST", "/v1/release", renewal)
        assert (answer.status, answer.data["error"]["code"]) == (409, "SLOT_LOST")


async def test_limits_of_a_call_count_no_requests_in_flight() -> None:
    """The service would not learn when the call has ended."""
    async with http_service() as http:
        body = {"name": "emails", "key": "1", "limits": ["2 at once for 60s"]}
        answer = await http("POST", "/v1/limit", body)
        assert (answer.status, "/v1/release" in answer.data["detail"]) == (400, True)


async def test_the_quota_shows_requests_in_flight() -> None:
    """Of the limits that count them."""
    async with http_service(rules=IN_FLIGHT_RULES) as http:
        await http.check(user="1")
        [rule] = (await http("GET", "/v1/quota?user=1")).data["rules"]
        assert [each["in_flight"] for each in rule["limits"]] == [None, 1]
        assert [each["remaining"] for each in rule["limits"]] == [8, 1]
        assert http.context.limiter.tally().slots.by_rule() == {"users": 1}
