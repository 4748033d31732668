"""A real `ratekeeper serve`: rules that change while it runs, stores and settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.redis_servers import running
from tests.redis_servers.waiting import until
from tests.service_process import ServiceProcess, run_to_end


def limited(limit: int) -> dict[str, Any]:
    """Return rules with one limit by user."""
    return {
        "version": 1,
        "rules": [{"id": "users", "by": ["user"], "limits": [f"{limit}/day"]}],
    }


def limit_of(service: ServiceProcess) -> int:
    """Return the limit in force, read on a new connection to any worker."""
    data = service.ask("GET", "/v1/quota?user=42").data
    found: int = data["rules"][0]["limits"][0]["limit"]
    return found


def test_every_worker_applies_a_changed_file() -> None:
    """Spent units stay spent. An invalid document changes nothing except /readyz."""
    with ServiceProcess(limited(5), workers=2) as service:
        for _ in range(5):
            assert service.ask("POST", "/v1/check", {"user": "42"}).status == 200
        assert service.ask("POST", "/v1/check", {"user": "42"}).status == 429
        service.use(limited(8))
        until(lambda: all(limit_of(service) == 8 for _ in range(20)), "8 is in force", 60)
        answer = service.ask("POST", "/v1/check", {"user": "42"})
        assert (answer.status, answer.data["remaining"]) == (200, 2)
        service.use({"version": 1, "rules": "nonsense"})
        until(
            lambda: service.ask("GET", "/readyz").data["rules"]["error"],
            "the error is reported",
            60,
        )
        assert service.ask("GET", "/readyz").status == 200
        assert limit_of(service) == 8


def test_a_database_is_seeded_followed_and_kept(tmp_path: Path) -> None:
    """By default, rules are in a database in the data folder; another program changes them."""
    seed = tmp_path / "seed.yaml"
    seed.write_text(json.dumps(limited(5)))
    with ServiceProcess(None, "--seed", str(seed)) as service:
        assert limit_of(service) == 5
        assert service.ask("GET", "/readyz").data["rules"]["version"] == "1"
        changed = tmp_path / "changed.yaml"
        changed.write_text(json.dumps(limited(9)))
        database = f"sqlite:///{service.data}/rules.db"
        applied = ["rules", "apply", str(changed), "--database", database, "--author", "ann"]
        assert run_to_end(applied).returncode == 0
        until(lambda: limit_of(service) == 9, "version 2 is in force", 60)
        service.end()
        service.start()
        assert limit_of(service) == 9
        assert service.ask("GET", "/readyz").data["rules"]["version"] == "2"


def test_redis_by_one_option() -> None:
    """Two services with one Redis share a limit."""
    server = running("single")
    server.flush()
    uri = f"{server.uri}?deadline_ms=10000"
    with (
        ServiceProcess(limited(10), "--store", uri) as one,
        ServiceProcess(limited(10), env={"RATEKEEPER_STORE": uri}) as other,
    ):
        found = [
            service.ask("POST", "/v1/check", {"user": "42"}).status
            for _ in range(8)
            for service in (one, other)
        ]
        assert found == [200] * 10 + [429] * 6
        batch = {"checks": [{"user": "1"}, {"user": "2", "cost": 10}, {"user": "2"}]}
        results = other.ask("POST", "/v1/check/batch", batch).data["results"]
        assert [each["status"] for each in results[:2]] == [200, 200]
        assert one.ask("GET", "/readyz").data["store"]["healthy"] is True
        quota = one.ask("GET", "/v1/quota?user=42").data
        assert quota["rules"][0]["limits"][0]["remaining"] == 0


def test_settings_from_a_file_and_the_environment(tmp_path: Path) -> None:
    """An environment variable overrides the file; settings only in the file apply, too."""
    config = tmp_path / "config.yaml"
    config.write_text("node-id: of-the-file\ndraft: 7\nlegacy-headers: false\n")
    env = {"RATEKEEPER_NODE_ID": "of-the-variable", "RATEKEEPER_CONFIG": str(config)}
    with ServiceProcess(limited(5), env=env) as service:
        answer = service.ask("POST", "/v1/check", {"user": "42"})
        assert answer.headers["x-ratekeeper-node"] == "of-the-variable"
        assert answer.headers["ratelimit"].startswith("limit=5, remaining=4")
        assert "x-ratelimit-limit" not in answer.headers


def test_two_services_do_not_share_a_port() -> None:
    """The second service reports that the port is in use, and exits."""
    with ServiceProcess(limited(5)) as service:
        port = service.url.rpartition(":")[2]
        arguments = ["serve", "--port", port, "--no-grpc", "--rules", str(service.rules_path)]
        done = run_to_end([*arguments, "--data", str(service.folder / "other")])
        assert done.returncode == 2
        assert "in use" in done.stderr
