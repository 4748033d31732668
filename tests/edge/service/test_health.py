"""/healthz and /readyz: what a probe learns."""

from __future__ import annotations

from tests.edge.service.asking import asking


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
