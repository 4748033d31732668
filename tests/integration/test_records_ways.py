"""Whichever way a request comes in, its decision is recorded once, and only if it was one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.service.envoy.client import FakeContext, entries, grpc_client
from tests.service.http.client import HttpClient, http_service
from tollkeeper import AsyncLimiter
from tollkeeper.control.database import Database
from tollkeeper.history.reading import Records
from tollkeeper.history.recorder import Recorder
from tollkeeper.history.sink import Sink
from tollkeeper.service.envoy.server import start
from tollkeeper.service.http.tokens import create_token

ENVOY_RULES = """
version: 1
rules:
  - {id: users, match: {user: "*"}, by: user, limits: 3/hour}
  - {id: tenants, match: {tenant: "*"}, by: tenant, limits: 1/hour}
"""


def recorder_at(folder: Path) -> Recorder:
    """One that is not started: what it has noted stays with it."""
    url = f"sqlite:///{folder / 'records.db'}"
    return Recorder(
        lambda row_of: Sink(Database(url), row_of=row_of), Records(Database(url)), share=0.0
    )


def used(recorder: Recorder) -> dict[tuple[str, str], list[int]]:
    """Allowed, denied and units, by subject and rule."""
    return {(who, rule): counts for (who, rule, _), counts in recorder._usage.buckets.items()}


@pytest.fixture
async def ask(tmp_path: Path) -> AsyncIterator[HttpClient]:
    """A service in this process, whose node records."""
    async with http_service() as made:
        made.context.recorder = recorder_at(tmp_path)
        yield HttpClient(
            made.context, made.clock
        )  # handlers look the recorder up when they are made


async def test_a_check(ask: HttpClient) -> None:
    """Three pass and one is denied; peeking and giving back is no use of it."""
    for _ in range(4):
        await ask.check(user="1", endpoint="/x", method="GET")
    await ask("GET", "/v1/quota?user=1")
    await ask.check(user="2", cost=2)
    await ask.check(user="2", cost=100)  # more than ever fits: no decision
    await ask("POST", "/v1/check", b"{")
    assert used(ask.context.recorder) == {
        ("user:1", "users"): [3, 1, 3],
        ("user:2", "users"): [1, 0, 2],
    }
    [(_, ruling, cost, known, endpoint, method)] = ask.context.recorder._noted
    assert (ruling.decision.allowed, cost, known, endpoint, method) == (False, 1, "", "/x", "GET")


async def test_batches(ask: HttpClient) -> None:
    """Each of its checks; of one that is atomic and denied, only the one that denied."""
    one, two = {"user": "1", "cost": 2}, {"user": "2"}
    await ask("POST", "/v1/check/batch", {"checks": [one, two, two]})
    await ask("POST", "/v1/check/batch", {"checks": [one, two], "atomic": True})
    assert used(ask.context.recorder) == {
        ("user:1", "users"): [1, 1, 2],
        ("user:2", "users"): [2, 0, 2],
    }
    await ask("POST", "/v1/check/batch", {"checks": [two], "atomic": True})
    assert used(ask.context.recorder)["user:2", "users"] == [3, 0, 3]


async def test_what_is_settled_is_what_was_used(ask: HttpClient) -> None:
    """Units that are given back or spent afterwards, as far as they fitted; no request more."""
    for user, reserved, actual in (("1", 2, 1), ("2", 1, 3), ("3", 1, 9), ("4", 1, 1)):
        await ask.check(user=user, cost=reserved)
        body = {"user": user, "reserved": reserved, "actual": actual}
        assert (await ask("POST", "/v1/settle", body)).status == 200
    found = used(ask.context.recorder)
    assert [found[f"user:{user}", "users"] for user in "1234"] == [
        *([1, 0, 1], [1, 0, 3], [1, 0, 3], [1, 0, 1])
    ]


async def test_a_token_with_a_scope_takes_nothing_off_its_usage(tmp_path: Path) -> None:
    """Whoever is billed for it could take it all back."""
    tokens = tmp_path / "tokens.json"
    secret = create_token(tokens, "ann", "check", {"user": "ann"})
    headers = {"Authorization": f"Bearer {secret}"}
    async with http_service(tokens) as made:
        made.context.recorder = recorder_at(tmp_path)
        ask = HttpClient(made.context, made.clock)
        await ask("POST", "/v1/check", {"cost": 2}, headers)
        for actual in (0, 3):
            body = {"reserved": 2, "actual": actual}
            assert (await ask("POST", "/v1/settle", body, headers)).status == 200
        assert used(ask.context.recorder) == {("user:ann", "users"): [1, 0, 3]}


async def test_a_gateway(ask: HttpClient) -> None:
    """As the client's key; one who is blocked is on the list's account."""
    headers = {"X-Original-URI": "/orders", "X-Original-Method": "POST", "X-API-Key": "k"}
    for _ in range(3):
        await ask("GET", "/v1/authorize", b"", headers)
    await ask("GET", "/v1/authorize", b"", {**headers, "X-API-Key": "sk_revoked_1"})
    assert used(ask.context.recorder) == {
        ("api_key:k", "orders"): [2, 1, 2],
        ("api_key:sk_revoked_1", "(deny)"): [0, 1, 0],
    }


async def test_envoy(tmp_path: Path) -> None:
    """Descriptors that spend, all or none; not those that only look."""
    async with AsyncLimiter.from_rules(ENVOY_RULES) as limiter:
        node = FakeContext(limiter)
        recorder = recorder_at(tmp_path)
        node.recorder = recorder  # type: ignore[attr-defined]  # as a worker's node has one
        handle = await start(node, "127.0.0.1:0")
        try:
            async with grpc_client(f"127.0.0.1:{handle.port}") as ask:
                ann, acme = entries(("user", "ann")), entries(("tenant", "acme"))
                await ask(ann)
                await ask(ann, acme)
                await ask(ann, acme)  # the tenant has no more
                await ask(entries(("user", "ann"), hits_addend={"value": 0}))
        finally:
            await handle.stop(0)
    assert used(recorder) == {
        ("user:ann", "users"): [2, 0, 2],
        ("tenant:acme", "tenants"): [1, 1, 1],
    }
