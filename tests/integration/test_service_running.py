"""A real `tollkeeper serve`: exact over its workers, and through its end."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.service_process import ServiceProcess, ask_on

ORDER = {"api_key": "sk_1", "endpoint": "/v1/orders"}


def limited(limit: str) -> dict[str, Any]:
    """Rules with one limit by user."""
    return {"version": 1, "rules": [{"id": "users", "by": ["user"], "limits": [limit]}]}


def hammer(service: ServiceProcess, body: dict[str, Any], connections: int, each: int) -> Counter:
    """How many answers there were of each status, over so many connections at once."""

    def one(_: int) -> Counter:
        connection = service.connect()
        try:
            asked = (ask_on(connection, "POST", "/v1/check", body).status for _ in range(each))
            return Counter(asked)
        finally:
            connection.close()

    with ThreadPoolExecutor(connections) as pool:
        return sum(pool.map(one, range(connections)), Counter())


def test_a_limit_is_exact_over_four_workers_and_a_restart() -> None:
    """300 requests over 4 workers: 100 pass. After a restart, none does: counts are on disk."""
    with ServiceProcess(limited("100/day"), workers=4) as service:
        found = hammer(service, {"user": "42"}, connections=16, each=19)
        assert found == {200: 100, 429: 16 * 19 - 100}
        nodes = {json.loads(service.ask("GET", "/readyz").body)["worker"] for _ in range(60)}
        assert len(nodes) > 1, "all connections went to one worker"
        assert service.end() == 0
        service.start()
        assert service.ask("POST", "/v1/check", {"user": "42"}).status == 429
        assert service.ask("POST", "/v1/check", {"user": "43"}).status == 200
