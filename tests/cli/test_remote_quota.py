"""`tollkeeper quota`, and `check --peek`, which works an answer out from it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.cli.answering import Asked, answering, run


def limit(remaining: int, capacity: int = 10, reset_after: float = 1.0) -> dict[str, Any]:
    policy = f"{capacity} per 1 s (token_bucket)"
    return {
        "policy": policy,
        "limit": capacity,
        "remaining": remaining,
        "reset_after": reset_after,
    }


def rule(name: str, *limits: dict[str, Any], mode: str = "enforce", cost: int = 1) -> Any:
    return {
        "rule": name,
        "mode": mode,
        "subject": "user:42",
        "source": "tier pro",
        "cost": cost,
        "limits": list(limits),
    }


QUOTA = {
    "kind": "limited",
    "rules": [
        rule("all", limit(7), limit(100, 100, 0.0)),
        rule("new", limit(1, 5), mode="shadow"),
        rule("dear", limit(12, 20), cost=3),
    ],
}


def test_quota_is_a_line_for_each_limit() -> None:
    """Of every rule that applies; one in shadow mode says so."""
    with answering(200, QUOTA) as service:
        result = run("quota", "--user", "42", url=service.url)
        told = run("quota", "--user", "42", "--json", url=service.url)
    assert result.exit_code == 0
    assert [line.split("  ") for line in re.sub(" {2,}", "  ", result.output).splitlines()] == [
        ["RULE", "COUNTS", "LIMIT", "FROM", "LEFT", "WHOLE AGAIN"],
        ["all", "user:42", "10 per 1 s (token_bucket)", "tier pro", "7 of 10", "in 1 s"],
        ["all", "user:42", "100 per 1 s (token_bucket)", "tier pro", "100 of 100", "now"],
        ["new (shadow)", "user:42", "5 per 1 s (token_bucket)", "tier pro", "1 of 5", "in 1 s"],
        ["dear", "user:42", "20 per 1 s (token_bucket)", "tier pro", "12 of 20", "in 1 s"],
    ]
    assert json.loads(told.output) == {"exit_code": 0, **QUOTA}
    assert service.asked[0] == Asked("GET", "/v1/quota?user=42", None, None)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("unlimited", "no rule applies\n"),
        ("exempt", "on the allow list\n"),
        ("blocked", "on the deny list\n"),
    ],
)
def test_a_quota_without_limits_says_why(kind: str, line: str) -> None:
    """Rather than print a table of nothing."""
    with answering(200, {"kind": kind, "rules": []}) as service:
        assert run("quota", "--user", "42", url=service.url).output == line
        code = 1 if kind == "blocked" else 0
        assert run("check", "--peek", "--user", "42", url=service.url).exit_code == code


SHADOW = ", would be denied by the shadow rules: new"


@pytest.mark.parametrize(
    ("cost", "line", "code"),
    [
        ("0", "would be allowed: 7 of 10 left of rule all\n", 0),
        ("1", "would be allowed: 7 of 10 left of rule all\n", 0),
        ("2", f"would be allowed: 7 of 10 left of rule all{SHADOW}\n", 0),
        # The last rule takes three units for each.
        (
            "5",
            "would be denied: 7 of 10 left of rule all, would be denied by the shadow rules: new\n",
            1,
        ),
        ("7", "tollkeeper: --cost 7 takes 21 units of rule dear, which can never fit", 2),
        ("-1", "tollkeeper: --peek asks once, for a --cost from 0 up", 2),
    ],
)
def test_peek_is_worked_out_from_the_quota(cost: str, line: str, code: int) -> None:
    """Nothing is spent: the service is only looked at."""
    with answering(200, QUOTA) as service:
        result = run("check", "--user", "42", "--peek", "--cost", cost, url=service.url)
    assert result.exit_code == code
    assert result.output.startswith(line)
    assert {each.method for each in service.asked} <= {"GET"}


@pytest.mark.parametrize("strange", [{}, {"remaining": "many", "limit": None}])
def test_a_quota_that_is_not_understood_is_exit_code_2(strange: dict[str, object]) -> None:
    """It comes from another program; the table shows what there is."""
    with answering(200, {"rules": [{"rule": "all", "limits": [strange]}]}) as service:
        result = run("check", "--peek", url=service.url)
        assert result.exit_code == 2
        assert "not as this version of the command understands it" in result.stderr
        result = run("quota", url=service.url)
        assert result.exit_code == 0
        assert result.output.splitlines()[1] == "all   all     ?      ?     ? of ?  in ?"
