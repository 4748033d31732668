"""/healthz and /readyz: what a probe learns."""

from __future__ import annotations

from pathlib import Path

from tests.redis_servers.ports import free_port
from tests.service.http.asking import asking
from tollkeeper.service.http import token_file
from tollkeeper.service.http.token_file import ROLES


async def test_readiness_tells_of_rules_and_store() -> None:
    """Which version is in force, and whether the store answers."""
    async with asking() as ask:
        ask.node.limiter.use({"version": 1, "rules": []}, "7")
        found = (await ask("GET", "/readyz")).data
        assert found["status"] == "ready"
        assert found["node"] == "test-1"
        assert found["rules"]["version"] == "7"
        assert found["rules"]["error"] == ""
        assert found["store"] == {"healthy": True, "error": ""}
        assert found["workers"] == 1


async def test_a_probe_spends_nothing_and_is_kept_by_nobody() -> None:
    """No state in the store, no copy in a cache."""
    async with asking() as ask:
        before = ask.node.limiter.stats().states
        for _ in range(3):
            answer = await ask("GET", "/readyz")
        assert answer.headers["cache-control"] == "no-store"
        assert ask.node.limiter.stats().states == before


async def test_errors_are_told_to_those_with_a_token(tmp_path: Path) -> None:
    """They name hosts; strangers learn only that there is one."""
    path = tmp_path / "tokens.json"
    store = f"redis://127.0.0.1:{free_port()}"
    for roles in ((), ROLES):
        secrets = [token_file.create(path, role, role) for role in roles]
        async with asking(path, store=store) as ask:
            for secret in secrets or [""]:
                headers = {"Authorization": f"Bearer {secret}"}
                found = (await ask("GET", "/readyz", b"", headers)).data["store"]
                assert not found["healthy"]
                assert "127.0.0.1" in found["error"]
            if secrets:
                answer = await ask("GET", "/readyz")
                assert answer.status == 200
                assert not answer.data["store"]["healthy"]
                assert answer.data["store"]["error"]
                assert b"127.0.0.1" not in answer.body
                assert answer.data["rules"]["error"] == ""
