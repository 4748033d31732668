"""POST /v1/check, the batch and settle: what is answered to whom, and what it spends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.service.http.asking import asking
from tollkeeper.core.clock import SystemClock
from tollkeeper.core.errors import StoreUnavailable
from tollkeeper.decide.store import Store
from tollkeeper.decide.stores.memory import PythonMemoryStore
from tollkeeper.service.http import token_file

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


class Away(PythonMemoryStore):
    """A store that cannot be reached."""

    def __init__(self) -> None:
        super().__init__(SystemClock())

    def gate(self, limits: Any, rule: str) -> Any:
        """One that fails."""
        found = _Failing()
        found.limits = limits
        return found


class _Failing:
    limits: Any = ()

    def _fail(self, *_: Any) -> Any:
        raise StoreUnavailable("the store is away")

    check = peek = refund = grant = reset = _fail

    def fast_check(self, fallback: Any) -> None:
        """None, as most gates."""


async def test_a_check_is_answered_with_numbers_and_headers() -> None:
    """Allowed is 200 with the verdict; denied is 429, a problem with the same members."""
    async with asking() as ask:
        answer = await ask.check(user="42")
        assert answer.status == 200
        assert set(answer.data) == MEMBERS
        assert answer.data["allowed"] is True
        assert (answer.data["limit"], answer.data["remaining"]) == (3, 2)
        assert answer.headers["x-ratelimit-remaining"] == "2"
        assert answer.headers["ratelimit"] == '"users";r=2;t=20'
        assert answer.headers["content-type"] == "application/json"
        assert "retry-after" not in answer.headers
        await ask.check(user="42", cost=2)
        answer = await ask.check(user="42")
        assert answer.status == 429
        assert set(answer.data) > MEMBERS
        assert (answer.data["allowed"], answer.data["retry_after"]) == (False, 20.0)
        assert answer.data["error"]["code"] == "RATE_LIMIT_EXCEEDED"
        assert answer.headers["retry-after"] == "20"
        assert answer.headers["content-type"] == "application/problem+json"
        ask.clock.advance(20)
        assert (await ask.check(user="42")).status == 200


KINDS: list[tuple[dict[str, Any], int, str]] = [
    ({}, 200, "unlimited"),
    ({"api_key": "sk_internal_1", "user": "42"}, 200, "exempt"),
    ({"api_key": "sk_revoked_1", "user": "42"}, 403, "blocked"),
]


@pytest.mark.parametrize(("fields", "status", "kind"), KINDS)
async def test_without_limits_there_are_no_numbers(
    fields: dict[str, Any], status: int, kind: str
) -> None:
    """Null, not a number that means nothing."""
    async with asking() as ask:
        answer = await ask.check(**fields)
        assert (answer.status, answer.data["kind"]) == (status, kind)
        assert answer.data["limit"] is None
        assert answer.data["remaining"] is None
        assert answer.data["rule"] == ""
        assert (answer.data["retry_after"] is None) == (kind == "blocked")


async def test_a_body_that_is_known_is_judged_by_the_rules_that_are_in_force() -> None:
    """Whoever asks the same again is counted again, and by another document once it is there."""
    async with asking() as ask:
        found = [(await ask.check(user="42")).data["remaining"] for _ in range(3)]
        assert found == [2, 1, 0]
        assert (await ask.check(user="42")).status == 429
        ask.service.node.limiter.use("""
            version: 1
            rules: [{id: others, by: user, limits: 9/minute}]
        """)
        answer = await ask.check(user="42")
        assert (answer.data["rule"], answer.data["remaining"]) == ("others", 8)


async def test_a_shadow_rule_is_named_and_denies_nothing() -> None:
    """Whoever tries a rule sees what it would do."""
    async with asking() as ask:
        assert (await ask.check(tenant="t", endpoint="/trial")).data["shadow_denied"] == []
        answer = await ask.check(tenant="t", endpoint="/trial")
        assert answer.status == 200
        assert answer.data["shadow_denied"] == ["trial"]


@pytest.mark.parametrize(("policy", "status"), [("open", 200), ("closed", 503)])
async def test_a_store_that_is_away_is_the_failure_policys(policy: str, status: int) -> None:
    """Marked degraded; 503 with Retry-After where nobody may pass."""
    store: Store = Away()  # type: ignore[assignment]  # as much of one as is asked
    async with asking(store=store, on_failure=policy) as ask:
        answer = await ask.check(user="42")
        assert answer.status == status
        assert answer.data["degraded"] is True
        assert answer.data["remaining"] is None
        assert answer.headers["x-ratelimit-policy"] == "degraded"
        assert ("retry-after" in answer.headers) == (status == 503)
        ready = await ask("GET", "/readyz")
        assert ready.status == 200
        assert ready.data["store"] == {"healthy": False, "error": "the store is away"}


async def test_what_can_never_fit_is_422_without_retry_after() -> None:
    """No wait would help."""
    async with asking() as ask:
        answer = await ask.check(user="42", cost=4)
        assert answer.status == 422
        assert answer.data["error"]["code"] == "COST_EXCEEDS_CAPACITY"
        assert "retry-after" not in answer.headers


WRONG: list[tuple[bytes, str]] = [
    (b"", "truncated"),
    (b"null", "Expected `object`"),
    (b"[]", "Expected `object`"),
    (b'{"usr":"42"}', "unknown field `usr`"),
    (b'{"user":42}', "`$.user`"),
    (b'{"user":"42","cost":"1"}', "`$.cost`"),
    (b'{"user":"42","cost":-1}', "`$.cost`"),
    (b'{"user":"42","cost":true}', "`$.cost`"),
    (b'{"user":"42","cost":1.5}', "`$.cost`"),
    (b'{"user":"42","cost":1000000001}', "`$.cost`"),
    (b'{"user":"42","cost":1' + b"0" * 1000 + b"}", "the body"),
    (b'{"user":"\\u0000"}', "NUL character in it - at `$.user`"),
    (b'{"attributes":{"a\\u0000":"b"}}', "NUL"),
    (b'{"user":"a\0b"}', "byte 10"),
    (b'{"user":"a\xff"}', "not UTF-8 (byte 10)"),
    (b'{"user":"\\ud800"}', "the body"),
    (b'{"attributes":{"a":1}}', "`$.attributes[...]`"),
    (b'{"attributes":' + b"[" * 30_000 + b"}", "the body"),
    (b"[" * 60_000, "the body"),
    (b'{"user":"' + b"x" * 600 + b'"}', "512"),
    (b'{"user":"a\\u001fb"}', "U+001F"),
    (b'{"user":"1"} x', "trailing"),
]


@pytest.mark.parametrize(("body", "said"), WRONG)
async def test_what_is_wrong_is_400_and_says_where(body: bytes, said: str) -> None:
    """With the field or the byte, as a problem; nothing is spent."""
    async with asking() as ask:
        answer = await ask("POST", "/v1/check", body)
        assert answer.status == 400, answer.body
        assert answer.headers["content-type"] == "application/problem+json"
        assert said in answer.data["detail"], answer.data["detail"]
        assert len(answer.body) < 4_000


async def test_an_escaped_backslash_is_no_nul() -> None:
    """The text `\\u0000` may be somebody's name, if not a good one."""
    async with asking() as ask:
        assert (await ask("POST", "/v1/check", rb'{"user":"\\u0000"}')).status == 200


async def test_attributes_have_a_bound() -> None:
    """64 of them."""
    async with asking() as ask:
        fine = {f"a{n}": "x" for n in range(64)}
        assert (await ask.check(attributes=fine)).status == 200
        assert (await ask.check(attributes={**fine, "b": "x"})).status == 400


# ── Batches ────────────────────────────────────────────────────────────────────────────────────


async def batch(ask: Any, checks: list[Any], **more: Any) -> Any:
    """POST /v1/check/batch."""
    return await ask("POST", "/v1/check/batch", {"checks": checks, **more})


async def test_a_batch_is_answered_one_by_one() -> None:
    """Each as if it had come alone; one that cannot be is no harm to the others."""
    async with asking() as ask:
        checks = [
            {"user": "1"},
            {"user": "1", "cost": 3},
            {"user": "1", "cost": 9},
            {"user": "x" * 600},
            {"api_key": "sk_revoked_1"},
        ]
        answer = await batch(ask, checks)
        assert answer.status == 200
        found = answer.data["results"]
        assert [each["status"] for each in found] == [200, 429, 422, 400, 403]
        assert set(found[0]) == {"status", *MEMBERS}
        assert found[2]["error"]["code"] == "COST_EXCEEDS_CAPACITY"
        assert found[3]["allowed"] is False
        assert (await ask.check(user="1")).data["remaining"] == 1


async def test_an_atomic_batch_spends_all_or_nothing() -> None:
    """One denial, and nobody is charged."""
    async with asking() as ask:
        checks = [{"user": "1"}, {"user": "2", "cost": 3}, {"user": "2"}]
        answer = await batch(ask, checks, atomic=True)
        assert answer.status == 200
        assert not all(each["allowed"] for each in answer.data["results"])
        assert (await ask.check(user="1")).data["remaining"] == 2
        answer = await batch(ask, [{"user": "3"}, {"user": "4"}], atomic=True)
        assert [each["remaining"] for each in answer.data["results"]] == [2, 2]


@pytest.mark.parametrize("count", [0, 101])
async def test_a_batch_has_1_to_100_checks(count: int) -> None:
    """More is 400, and none is spent."""
    async with asking() as ask:
        answer = await batch(ask, [{"user": "1"}] * count)
        assert answer.status == 400
        assert "checks" in answer.data["detail"]
        assert (await ask.check(user="1")).data["remaining"] == 2


async def test_a_batch_names_what_is_wrong_by_its_place() -> None:
    """The third check's field."""
    async with asking() as ask:
        answer = await batch(ask, [{}, {}, {"usr": "1"}])
        assert answer.status == 400
        assert "unknown field `usr` - at `$.checks[2]`" in answer.data["detail"]


# ── Settling ───────────────────────────────────────────────────────────────────────────────────


async def test_a_cost_is_settled_afterwards() -> None:
    """What was too much is given back; what does not fit any more is told."""
    async with asking() as ask:
        await ask.check(user="1", cost=3)
        answer = await ask("POST", "/v1/settle", {"user": "1", "reserved": 3, "actual": 1})
        assert (answer.status, answer.data) == (200, {"unsettled": 0})
        answer = await ask("POST", "/v1/settle", {"user": "1", "reserved": 0, "actual": 5})
        assert answer.data == {"unsettled": 3}
        answer = await ask("POST", "/v1/settle", {"user": "1", "reserved": 3})
        assert answer.status == 400
        assert "actual" in answer.data["detail"]


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
    """403, and neither is anything spent nor told. Not even of a batch's first."""
    path = tmp_path / "tokens.json"
    admin = {"Authorization": f"Bearer {token_file.create(path, 'a', 'admin')}"}
    secret = token_file.create(path, "one", "check", {"user": "1"})
    async with asking(path) as ask:
        await ask("POST", "/v1/check", {"user": "2"}, admin)
        before = [(await ask("GET", f"/v1/quota?user={n}", b"", admin)).data for n in (1, 2)]
        answer = await ask(method, url, body, {"Authorization": f"Bearer {secret}"})
        assert answer.status == 403
        assert "remaining" not in answer.data
        after = [(await ask("GET", f"/v1/quota?user={n}", b"", admin)).data for n in (1, 2)]
        assert before == after


async def test_a_scope_fills_in_what_is_absent(tmp_path: Path) -> None:
    """A caller need not say who he is."""
    path = tmp_path / "tokens.json"
    own = {"Authorization": f"Bearer {token_file.create(path, 'c', 'check', {'user': '1'})}"}
    async with asking(path) as ask:
        assert (await ask("POST", "/v1/check", {}, own)).data["remaining"] == 2
        assert (await ask("POST", "/v1/check", {"user": "1"}, own)).data["remaining"] == 1
        quota = (await ask("GET", "/v1/quota", b"", own)).data
        assert quota["rules"][0]["subject"] == "user:1"
