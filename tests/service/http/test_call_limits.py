"""POST /v1/limit: limits that are given with the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import Limit, Limiter
from ratekeeper.core.errors import ConfigError
from ratekeeper.decide.stores import open_store
from ratekeeper.service.http import call_limits
from ratekeeper.service.http.call_limits import limits_of_data
from ratekeeper.service.http.tokens import ROLES, create_token
from ratekeeper.testing import ManualClock
from tests.service.http.client import Answer, HttpClient, http_service
from tests.service.http.test_checks import UnavailableStore

EMPTY = {"version": 1}


async def limit(http: HttpClient, token: str = "", **body: Any) -> Answer:
    """Call POST /v1/limit."""
    sent = {"Authorization": f"Bearer {token}"} if token else {}
    given_body = {"name": "emails", "key": "user:42", "limits": "3/minute", **body}
    return await http("POST", "/v1/limit", given_body, sent)


async def test_a_single_request_is_enough() -> None:
    """Without a rule, a caller names a key and a rate, and gets a decision with its headers."""
    async with http_service(rules=EMPTY) as http:
        answer = await limit(http, cost=2)
        assert answer.status == 200
        assert answer.data["allowed"]
        assert (answer.data["rule"], answer.data["limit"], answer.data["remaining"]) == (
            "limit:emails",
            3,
            1,
        )
        assert answer.headers["ratelimit-policy"] == '"limit:emails";q=3;w=60'
        denied = await limit(http, cost=2)
        assert denied.status == 429
        assert denied.headers["retry-after"] == "20"
        assert denied.data["error"]["code"] == "RATE_LIMIT_EXCEEDED"
        http.clock.advance(20)
        assert (await limit(http, cost=2)).status == 200
        assert (await limit(http, cost=4)).status == 422


LIMITS = st.lists(
    st.builds(
        lambda units, per, algorithm: {"limit": units, "per": f"{per}s", "algorithm": algorithm},
        st.integers(1, 9),
        st.integers(1, 60),
        st.sampled_from(("token_bucket", "fixed_window", "sliding_window_log")),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda each: (each["per"], each["algorithm"]),
)


@given(LIMITS, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=12))
async def test_decisions_are_those_of_a_limiter(
    limits: list[Any], calls: list[tuple[int, int]]
) -> None:
    """Any limits, costs and times: the service agrees with `Limiter` in every number."""
    clock = ManualClock()
    reference = Limiter(list(limits_of_data(limits)), name="limit:emails", clock=clock)
    async with http_service(rules=EMPTY) as http:
        clock.advance((http.clock.now_ns() - clock.now_ns()) / 1e9)
        least = min(each["limit"] for each in limits)
        for wait, cost in calls:
            clock.advance(wait)
            http.clock.advance(wait)
            expected = reference.check("x", min(cost, least))
            answer = await limit(http, limits=limits, cost=min(cost, least))
            assert answer.data["allowed"] == expected.allowed
            assert answer.data["remaining"] == expected.remaining
            assert answer.data["retry_after"] == expected.retry_after


async def test_counts_belong_to_the_name_and_the_key() -> None:
    """Other numbers keep what was spent; another name or key, or other parts, count apart."""
    async with http_service(rules=EMPTY) as http:
        assert (await limit(http, cost=3)).data["remaining"] == 0
        assert (await limit(http, limits="5/minute")).data["remaining"] == 1
        assert (await limit(http, name="texts")).data["remaining"] == 2
        assert (await limit(http, key="user:43")).data["remaining"] == 2
        assert (await limit(http, key=["user:4", "2"])).data["remaining"] == 2
        assert (await limit(http, key=["user:", "42"])).data["remaining"] == 2
        assert (await limit(http, key=["user:42"])).status == 429


async def test_no_rule_applies_and_no_rule_is_spent() -> None:
    """Not even by the ID of a rule, with the same limit and the subject that the rule counts."""
    rules = {"version": 1, "rules": [{"id": "emails", "by": "user", "limits": "3/minute"}]}
    async with http_service(rules=rules) as http:
        assert (await limit(http, key="user:42", cost=3)).data["remaining"] == 0
        assert (await http.check(user="42")).data["remaining"] == 2


async def test_a_token_needs_a_role_that_allows_it(tmp_path: Path) -> None:
    """`limit` and `admin`: a caller that chooses its limits could choose very high ones."""
    path = tmp_path / "tokens.json"
    secrets = {role: create_token(path, role, role) for role in ROLES}
    async with http_service(path, EMPTY) as http:
        found = {role: (await limit(http, secret)).status for role, secret in secrets.items()}
        assert found == {"check": 403, "limit": 200, "read": 403, "admin": 200}
        assert (await limit(http)).status == 401
        refused = await limit(http, secrets["check"])
        assert "--role limit" in refused.data["detail"]
        sent = {"Authorization": f"Bearer {secrets['limit']}"}
        assert (await http("POST", "/v1/check", {"user": "1"}, sent)).status == 200
        assert (await http("GET", "/v1/admin/top", b"", sent)).status in {403, 404}
        assert (await http("DELETE", "/v1/quota?user=1", b"", sent)).status == 403
        await http.app._admin.state.control.close()


async def test_a_scope_counts_apart(tmp_path: Path) -> None:
    """A customer cannot spend the units of another customer, or of the operator."""
    path = tmp_path / "tokens.json"
    acme = create_token(path, "acme", "limit", {"tenant": "acme"})
    other = create_token(path, "other", "limit", {"tenant": "other"})
    free = create_token(path, "free", "limit")
    ann = create_token(path, "ann", "limit", {"tenant": "acme", "user": "ann"})
    async with http_service(path, EMPTY) as http:
        assert (await limit(http, acme, cost=3)).status == 200
        assert (await limit(http, acme)).status == 429
        assert (await limit(http, other)).data["remaining"] == 2
        assert (await limit(http, free)).data["remaining"] == 2
        forged = ["tenant:acme", "user:42"]
        for secret, key in ((other, forged), (free, forged), (acme, ["user:ann", "user:42"])):
            assert (await limit(http, secret, key=key)).data["remaining"] == 2
        assert (await limit(http, ann)).data["remaining"] == 2


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"limits": "ten"}, "the body: limits"),
        ({"limits": "5 in a minute"}, "as in '5 in any minute'"),
        ({"limits": []}, "expected 1 to"),
        ({"limits": ["1/s", {"limit": 5}]}, "the body: limits[1]"),
        ({"limits": ["1/s", {"limit": 5, "per": "1m", "algorithm": "magic"}]}, "algorithm"),
        ({"limits": 5}, "the body: limits"),
        ({"limits": ["1/s", "2/s"]}, "share one count"),
        ({"key": ""}, "the body: key"),
        ({"key": []}, "the body: key"),
        ({"key": 42}, "the body: key"),
        ({"key": "x" * 510}, "512 characters"),
        ({"name": ""}, "the body: name"),
        ({"name": "a\nb"}, "printable"),
        ({"cost": -1}, "the body: cost"),
        ({"user": "42"}, 'unknown field "user"; known: "name"'),
    ],
)
async def test_an_invalid_call_is_400_with_the_place(body: dict[str, Any], said: str) -> None:
    """The message names the member and a valid value."""
    async with http_service(rules=EMPTY) as http:
        answer = await limit(http, **body)
        assert answer.status == 400, answer.body
        assert said in answer.data["detail"]


async def test_the_limiters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller may send any number of names; counts are not lost with a limiter."""
    monkeypatch.setattr(call_limits, "LIMITERS_MAX", 3)
    async with http_service(rules=EMPTY) as http:
        for _ in range(2):
            for number in range(10):
                await limit(http, name=f"n{number}")
        assert (await limit(http, name="n0")).data["remaining"] == 0


async def test_a_name_has_few_limits() -> None:
    """One that differs in its numbers is not another one, and other names are not affected."""
    async with http_service(rules=EMPTY) as http:
        for number in range(call_limits.LIMITS_OF_NAME_MAX):
            assert (await limit(http, limits=f"3/{number + 1}s")).status == 200
            assert (await limit(http, limits=f"{number + 9}/1s")).status == 200
        refused = await limit(http, limits="3/day")
        assert refused.status == 400
        assert "name='emails' has 32 limits" in refused.data["detail"]
        assert "another name" in refused.data["detail"]
        assert (await limit(http, limits="3/day", name="texts")).status == 200
        assert (await limit(http, limits="99/1s")).status == 200


async def test_a_token_does_not_use_up_the_limits_of_another_one(tmp_path: Path) -> None:
    """The second customer may use a name although the first has used 32 different limits of it."""
    path = tmp_path / "tokens.json"
    first, second = (
        create_token(path, f"t{number}", "limit", {"tenant": str(number)}) for number in range(2)
    )
    async with http_service(path, rules=EMPTY) as http:
        answers = [
            await limit(http, first, limits=f"3/{number + 1}s")
            for number in range(call_limits.LIMITS_OF_NAME_MAX + 1)
        ]
        assert [each.status for each in answers[-2:]] == [200, 400]
        assert (await limit(http, second, limits="3/day")).status == 200


async def test_a_full_store_is_counted_as_such(caplog: pytest.LogCaptureFixture) -> None:
    """The metrics have each failed check, and the log one line for all names together."""
    async with http_service(rules=EMPTY, store=open_store("memory://?capacity=8")) as http:
        for number in range(100):
            await limit(http, name=f"n{number}", key=f"user:{number}")
        lines = (await http("GET", "/metrics")).body.decode().splitlines()
    counted = [line for line in lines if line.startswith("ratekeeper_store_errors_total{")]
    assert 'ratekeeper_store_errors_total{kind="full"} 92.0' in counted
    assert sum("has been unable to decide" in each.message for each in caplog.records) <= 1


async def test_the_failure_policy_answers_for_the_store() -> None:
    """As `--on-failure` says; by default such a call passes, marked as degraded."""
    async with http_service(rules=EMPTY, store=UnavailableStore()) as http:
        answer = await limit(http)
        assert (answer.status, answer.data["degraded"]) == (200, True)


def test_limits_are_written_as_in_a_rule_document() -> None:
    """A rate, several, or a mapping."""
    assert limits_of_data("10/second") == (Limit(10, per=1),)
    exact = {"limit": 5, "per": "1m", "algorithm": "sliding_window_log"}
    assert limits_of_data("5 in any minute") == limits_of_data(exact)
    with pytest.raises(ConfigError, match=r"the body: limits"):
        limits_of_data({"limit": "many", "per": "1s"})
