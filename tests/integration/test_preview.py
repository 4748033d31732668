"""A preview of a draft by a real service under load, on both databases."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tests.integration.rule_databases import url
from tests.integration.test_records_service import SECONDS_MAX, RecordedService
from tests.redis_servers.waiting import until
from tests.service.admin.client import secrets_of
from tests.service_process import Answered, ServiceProcess, ask_on

__all__ = ["url"]  # a fixture, found by name

USERS = 30
REQUESTS = 25
ORDERS = {"id": "orders", "by": ["user"], "limits": ["20/hour"], "tiers": {"pro": "22/hour"}}
RULES: dict[str, Any] = {
    "version": 1,
    "tiers": {"pro": "30/hour"},
    "rules": [ORDERS],
    "assign": {"user:0": "pro"},
}
# Half of the limit; nothing else changes.
DRAFT = {**RULES, "rules": [{**ORDERS, "limits": ["10/hour"]}]}


def test_a_preview_under_load(url: str, tmp_path: Path) -> None:
    """It finds exactly what the draft would have denied, while two workers answer checks."""
    secrets = secrets_of(tmp_path)
    options = ("--tokens", str(tmp_path / "tokens.json"), "--record", url, "--sample", "1")
    with ServiceProcess(RULES, *options, workers=2, records=True) as service:
        recorded = RecordedService(service, secrets["admin"])
        users = [{"user": str(at % USERS)} for at in range(USERS * REQUESTS)]
        assert recorded.check(users) == 20 * USERS + 2
        ended, failed = threading.Event(), list[Answered]()

        def load() -> None:
            connection = service.connect()
            headers = {"Authorization": f"Bearer {secrets['check']}"}
            while not ended.wait(0.005):
                answer = ask_on(connection, "POST", "/v1/check", {"user": "busy"}, headers)
                if answer.status not in {200, 429}:
                    failed.append(answer)
            connection.close()

        def preview() -> Answered:
            return service.ask(
                "POST",
                "/v1/admin/rules/preview",
                DRAFT,
                {
                    "Authorization": f"Bearer {secrets['read']}",
                    "Content-Type": "application/json",
                },
            )

        loading = threading.Thread(target=load)
        loading.start()
        try:
            found = until(lambda: complete(preview()), "all is recorded and replayed", SECONDS_MAX)
        finally:
            ended.set()
            loading.join()
        assert not failed
    assert (found["sample"], found["estimate"], found["complete"]) == (1.0, False, True)
    # Two workers note their decisions a moment after they made them, in any order: at worst, each
    # of a user's five denials of 25 requests takes the place of an admission.
    assert found["agreement"] > 0.5
    changes = {each["subject"][0]: each for each in found["subjects"]}
    for user in range(1, USERS):
        change = changes[f"user:{user}"]
        assert (change["denied_before"], change["denied_after"]) == (5, 15)
        assert (change["newly_denied"], change["newly_allowed"]) == (10, 0)
    assert (changes["user:0"]["denied_before"], changes["user:0"]["denied_after"]) == (3, 3)
    [rule] = found["rules"]
    assert rule["rule"] == "orders"
    # The user that goes on may have fewer recorded requests than the draft allows.
    of_busy = changes["user:busy"]["newly_denied"] if "user:busy" in changes else 0
    assert found["total"]["newly_denied"] == 10 * (USERS - 1) + of_busy


def complete(answer: Answered) -> Any:
    """Return a preview that has the decisions of all users; None if it came too early."""
    assert answer.status == 200, answer
    numbered = [each for each in answer.data["subjects"] if each["subject"] != ["user:busy"]]
    denied = sum(each["denied_after"] for each in numbered)
    return answer.data if denied == 15 * (USERS - 1) + 3 else None
