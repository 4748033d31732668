"""The load over HTTP: pushes, and the loads and factors of a worker."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.admin.client import Admin, admin, following, from_file, template

__all__ = ["admin", "following", "from_file", "template"]  # fixtures, found by name

RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {
            "id": "api",
            "by": "user",
            "limits": "10/minute",
            "scale": [
                {"source": "jobs", "low": 100, "high": 500, "smoothing": 0, "most": 1.5},
                {"source": "pushed", "low": 0.5, "high": 1, "smoothing": 0},
            ],
        }
    ],
}


async def test_a_push_is_in_force_and_shown(admin: Admin) -> None:
    """With its age, and the factor of each rule by each load."""
    admin.context.limiter.use(RULES)
    before = (await admin.call("GET", "/load")).json()
    unknown = {"load": None, "age_seconds": None, "valid_for_seconds": None}
    assert before["sources"] == [{"source": name, **unknown} for name in ("jobs", "pushed")]
    assert before["rules"][0]["factor"] == 1.0
    admin.context.limiter.clock.advance(1)  # type: ignore[attr-defined]  # a ManualClock
    body = {"source": "jobs", "load": 300, "valid_for_seconds": 60}
    pushed = (await admin.call("POST", "/load", json=body)).json()
    assert pushed.pop("nodes") is False
    assert pushed == (await admin.call("GET", "/load")).json()
    assert pushed["sources"][0] == {
        "source": "jobs",
        "load": 300.0,
        "age_seconds": 0.0,
        "valid_for_seconds": 60.0,
    }
    by = [
        {"source": "jobs", "factor": 0.6, "stale": False},
        {"source": "pushed", "factor": 1.0, "stale": True},
    ]
    assert pushed["rules"] == [{"id": "api", "factor": 0.6, "by": by}]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"source": "job", "load": 1}', "no rule follows the load 'job'; the rules follow jobs"),
        (b'{"source": "cpu", "load": 1}', "cpu is measured by each process and cannot be pushed"),
        (b'{"source": "jobs", "load": -1}', "load"),
        (b'{"source": "jobs", "load": 1e308}', "load"),
        (b'{"source": "jobs", "load": 1e999}', ""),
        (b'{"source": "jobs", "load": NaN}', ""),
        (b'{"source": "jobs", "load": "1"}', "load"),
        (b'{"source": "jobs", "load": true}', "load"),
        (b'{"load": 2}', "of pushed is not a number from 0 to 1"),
        (b'{"source": "jobs"}', "load"),
        (b'{"source": "jobs", "load": 1, "for": 3}', "for"),
        (b'{"source": "jobs", "load": 1, "valid_for_seconds": 0}', "valid_for_seconds"),
    ],
)
async def test_a_hostile_push_is_rejected(admin: Admin, body: bytes, words: str) -> None:
    """The problem says what is wrong, and no load changes."""
    admin.context.limiter.use(RULES)
    headers = {"content-type": "application/json"}
    answer = await admin.client.post("/v1/admin/load", content=body, headers=headers)
    assert answer.status_code in {400, 422}, answer.text
    assert words in answer.text
    assert all(reading is None for reading, _ in admin.context.limiter.loads.all().values())


async def test_a_push_needs_an_admin_token(admin: Admin) -> None:
    """A token that may read can see the loads only."""
    admin.context.limiter.use(RULES)
    headers = {"Authorization": f"Bearer {admin.secrets['read']}"}
    await admin.call("GET", "/load", headers=headers)
    await admin.rejected("POST", "/load", 403, json={"load": 0.5}, headers=headers)
