"""What a token gives back: its own, and nobody else's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.service.http.asking import Asking, asking
from tollkeeper.rules.document.model import Match, Rule
from tollkeeper.service.http import token_file
from tollkeeper.service.http.giving_back import counts_only
from tollkeeper.testing import limiting_off

RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {"id": "tenants", "by": ["tenant"], "limits": ["10/hour"]},
        {"id": "acme", "match": {"tenant": "acme"}, "by": ["user"], "limits": ["10/hour"]},
        {"id": "service", "by": [], "limits": ["10/hour"]},
    ],
}
ACME = {"tenant": "acme", "user": "1"}


async def left(ask: Asking, headers: dict[str, str]) -> dict[str, int]:
    """What remains for acme, by rule."""
    answer = await ask("GET", "/v1/quota?tenant=acme&user=1", b"", headers)
    return {rule["rule"]: rule["limits"][0]["remaining"] for rule in answer.data["rules"]}


SCOPES: list[tuple[dict[str, str], dict[str, int]]] = [
    ({}, {"tenants": 8, "acme": 8, "service": 8}),
    ({"tenant": "acme"}, {"tenants": 8, "acme": 8, "service": 5}),
    ({"user": "1"}, {"tenants": 5, "acme": 8, "service": 5}),
    ({"region": "eu"}, {"tenants": 5, "acme": 5, "service": 5}),
]


@pytest.mark.parametrize(("scope", "expected"), SCOPES)
async def test_a_confined_token_gives_back_its_own_alone(
    scope: dict[str, str], expected: dict[str, int], tmp_path: Path
) -> None:
    """Under a limit that others share, what was reserved stays spent."""
    path = tmp_path / "tokens.json"
    headers = {"Authorization": f"Bearer {token_file.create(path, 't', 'check', scope)}"}
    async with asking(path, rules=RULES) as ask:
        await ask("POST", "/v1/check", {**ACME, "cost": 5}, headers)
        body = {**ACME, "reserved": 5, "actual": 2}
        answer = await ask("POST", "/v1/settle", body, headers)
        assert (answer.status, answer.data) == (200, {"unsettled": 0})
        assert await left(ask, headers) == expected


async def test_nothing_is_given_back_where_nothing_is_counted(tmp_path: Path) -> None:
    """In somebody's tests, with limiting switched off."""
    path = tmp_path / "tokens.json"
    secret = token_file.create(path, "t", "check", {"tenant": "acme"})
    headers = {"Authorization": f"Bearer {secret}"}
    async with asking(path, rules=RULES) as ask:
        await ask("POST", "/v1/check", {**ACME, "cost": 5}, headers)
        with limiting_off():
            await ask("POST", "/v1/settle", {**ACME, "reserved": 5, "actual": 2}, headers)
        assert (await left(ask, headers))["tenants"] == 5


TABLE: list[tuple[dict[str, str], Rule, bool]] = [
    ({"tenant": "acme"}, Rule("a", by=("tenant",)), True),
    ({"tenant": "acme"}, Rule("a", by=("user",)), False),
    ({"tenant": "acme"}, Rule("a", by=("user",), match=Match(tenant=("acme",))), True),
    ({"tenant": "acme"}, Rule("a", by=("user",), match=Match(tenant=("acme", "b"))), False),
    ({"tenant": "ac*"}, Rule("a", by=("user",), match=Match(tenant=("ac*",))), False),
    ({"tenant": "acme"}, Rule("a", by=("user",), match=Match(user=("acme",))), False),
    ({"region": "eu"}, Rule("a", by=(), match=Match(attributes={"region": ("eu",)})), True),
    ({"region": "eu"}, Rule("a", by=("region", "user")), True),
]


@pytest.mark.parametrize(("scope", "rule", "expected"), TABLE)
def test_which_rules_count_a_scope_apart(scope: dict[str, str], rule: Rule, expected: bool) -> None:
    """By the scope's field, or for its value alone; a pattern may be for others too."""
    assert counts_only(scope, rule) is expected
