"""Every entry point records a decision exactly once: HTTP, batches, a gateway and Envoy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ratekeeper import AsyncLimiter
from ratekeeper.control.database import Database
from ratekeeper.history.reading import Records
from ratekeeper.history.recorder import Recorder
from ratekeeper.history.sink import Sink
from ratekeeper.service.envoy.server import start
from ratekeeper.service.http.tokens import create_token
from tests.service.envoy.client import FakeContext, entries, grpc_client
from tests.service.http.client import HttpClient, http_service

ENVOY_RULES = """
version: 1
rules:
  - {id: users, match: {user: "*"}, by: user, limits: 3/hour}
  - {id: tenants, match: {tenant: "*"}, by: tenant, limits: 1/hour}
"""


def recorder_at(folder: Path) -> Recorder:
    """Return a recorder that is not started, so that its records stay in memory."""
    url = f"sqlite:///{folder / 'records.db'}"
    return Recorder(
        lambda row_of: Sink(Database(url), row_of=row_of), Records(Database(url)), share=0.0
    )


def used(recorder: Recorder) -> dict[tuple[str, str], list[int]]:
    """Return the recorded [allowed, denied, units] by subject and rule."""
    return {(who, rule): counts[:3] for (who, rule, _), counts in recorder._usage.buckets.items()}


@pytest.fixture
async def ask(tmp_path: Path) -> AsyncIterator[HttpClient]:
    """Run a service in this process whose node records decisions."""
    async with http_service() as made:
        made.context.recorder = recorder_at(tmp_path)
        yield HttpClient(
            made.context, made.clock
        )  # handlers look up the recorder when they are created


async def test_a_single_check_is_recorded(ask: HttpClient) -> None:
    """Three checks are allowed and one is denied; peeks and refunds are not recorded as checks."""
    for _ in range(4):
        await ask.check(user="1", endpoint="/x", method="GET")
    await ask("GET", "/v1/quota?user=1")
    await ask.check(user="2", cost=2)
    await ask.check(user="2", cost=100)  # above the capacity: an error, not a decision
    await ask("POST", "/v1/check", b"{")
    assert used(ask.context.recorder) == {
        ("user:1", "users"): [3, 1, 3],
        ("user:2", "users"): [1, 0, 2],
    }
    [(_, ruling, cost, known, endpoint, method, _, _)] = ask.context.recorder._noted
    assert (ruling.decision.allowed, cost, known, endpoint, method) == (False, 1, "", "/x", "GET")


async def test_every_check_of_a_batch_is_recorded(ask: HttpClient) -> None:
    """Of an atomic batch that is denied, only the check that denied it is recorded."""
    one, two = {"user": "1", "cost": 2}, {"user": "2"}
    await ask("POST", "/v1/check/batch", {"checks": [one, two, two]})
    await ask("POST", "/v1/check/batch", {"checks": [one, two], "atomic": True})
    assert used(ask.context.recorder) == {
        ("user:1", "users"): [1, 1, 2],
        ("user:2", "users"): [2, 0, 2],
    }
    await ask("POST", "/v1/check/batch", {"checks": [two], "atomic": True})
    assert used(ask.context.recorder)["user:2", "users"] == [3, 0, 3]


async def test_settled_units_are_recorded(ask: HttpClient) -> None:
    """Settling changes the recorded units, also by those that are owed, and adds no request."""
    for user, reserved, actual in (("1", 2, 1), ("2", 1, 3), ("3", 1, 9), ("4", 1, 1)):
        await ask.check(user=user, cost=reserved)
        body = {"user": user, "reserved": reserved, "actual": actual}
        assert (await ask("POST", "/v1/settle", body)).status == 200
    found = used(ask.context.recorder)
    assert [found[f"user:{user}", "users"] for user in "1234"] == [
        *([1, 0, 1], [1, 0, 3], [1, 0, 9], [1, 0, 1])
    ]


async def test_a_token_with_a_scope_takes_nothing_off_its_usage(tmp_path: Path) -> None:
    """Otherwise a tenant could use its own token to remove the usage that it is billed for."""
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


async def test_a_check_by_a_gateway_is_recorded(ask: HttpClient) -> None:
    """It is recorded for the client's key, and for the list if the list blocked the client."""
    headers = {"X-Original-URI": "/orders", "X-Original-Method": "POST", "X-API-Key": "k"}
    for _ in range(3):
        await ask("GET", "/v1/authorize", b"", headers)
    await ask("GET", "/v1/authorize", b"", {**headers, "X-API-Key": "sk_revoked_1"})
    assert used(ask.context.recorder) == {
        ("api_key:k", "orders"): [2, 1, 2],
        ("api_key:sk_revoked_1", "(deny)"): [0, 1, 0],
    }


async def test_a_check_by_envoy_is_recorded(tmp_path: Path) -> None:
    """Descriptors that charge are recorded, all or none; descriptors that only peek are not."""
    async with AsyncLimiter.from_rules(ENVOY_RULES) as limiter:
        node = FakeContext(limiter)
        recorder = recorder_at(tmp_path)
        node.recorder = recorder  # type: ignore[attr-defined]  # a worker sets it in the same way
        handle = await start(node, "127.0.0.1:0")
        try:
            async with grpc_client(f"127.0.0.1:{handle.port}") as ask:
                ann, acme = entries(("user", "ann")), entries(("tenant", "acme"))
                await ask(ann)
                await ask(ann, acme)
                await ask(ann, acme)  # the tenant's limit is spent
                await ask(entries(("user", "ann"), hits_addend={"value": 0}))
        finally:
            await handle.stop(0)
    assert used(recorder) == {
        ("user:ann", "users"): [2, 0, 2],
        ("tenant:acme", "tenants"): [1, 1, 1],
    }
