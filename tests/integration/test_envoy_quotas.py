"""Real Envoys with quotas: they decide by assignments, and never exceed the limits together.

Envoy reports every 5 s, so a scenario takes many seconds and little processor time. Scenarios that
disturb each other have Envoys of their own; all others share them, with a tenant for each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

import pytest

from tests.envoy_load import Load, most_over
from tests.envoy_process import (
    QUOTAS_EXAMPLE,
    Config,
    Envoy,
    answer_directly,
    example,
    filter_of,
    quota_bucket_of,
)
from tests.integration.tcp_proxy import Proxy
from tests.redis_servers.ports import HOST, free_port
from tests.redis_servers.single import Single
from tests.service.envoy.client import serving

RATE, BURST = 40, 40
WAIT_S = 60.0
UNUSED_PORT = 9


def rule(name: str, tenant: str, limits: Any, quota: str = "rate", **more: Any) -> dict[str, Any]:
    """Return a rule for some tenants, which Envoys get parts of."""
    return {
        "id": name,
        "match": {"tenant": tenant},
        "by": ["tenant"],
        "limits": limits,
        "consistency": "leased",
        "envoy_quota": quota,
        **more,
    }


def document(*rules: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a rule document."""
    return {"version": 1, "rules": list(rules), **more}


def config_of(port: int, name: str) -> Config:
    """Return the example with the service on `port`; Envoy answers itself, exact from the start."""
    config = example(UNUSED_PORT, port, QUOTAS_EXAMPLE)
    answer_directly(config)
    filter_of(config)["rlqs_server"]["initial_metadata"][0]["value"] = name
    fallback = quota_bucket_of(config)["no_assignment_behavior"]["fallback_rate_limit"]
    fallback["blanket_rule"] = "DENY_ALL"
    return config


@asynccontextmanager
async def envoys(*configs: Config) -> AsyncIterator[list[Envoy]]:
    """Run some Envoys."""
    found = [Envoy(config) for config in configs]
    try:
        await asyncio.gather(*[asyncio.to_thread(each.start) for each in found])
        yield found
    finally:
        await asyncio.gather(*[asyncio.to_thread(each.stop) for each in found])


@asynccontextmanager
async def loads(urls: Sequence[str], tenant: str) -> AsyncIterator[list[Load]]:
    """Open a connection of one tenant to each Envoy."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Load(url, tenant)) for url in urls]


async def until(condition: Any, what: str, within_s: float = WAIT_S) -> None:
    """Wait until a condition holds."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < within_s, what
        await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def redis() -> Any:
    """Yield a real Redis."""
    with Single() as found:
        yield found


class Restarting:
    """A service that can be stopped and started again on its port, while Envoys are connected."""

    def __init__(self, port: int, rules: Any, store: str) -> None:
        self._options = (port, rules, store)
        self._stack = AsyncExitStack()

    async def start(self) -> Self:
        """Start the service."""
        port, rules, store = self._options
        running = serving(rules, store=store, address=f"{HOST}:{port}")
        await self._stack.enter_async_context(running)
        return self

    async def stop(self, *_: object) -> None:
        """Stop the service."""
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


async def moving(urls: Sequence[str], tenant: str) -> list[Load]:
    """Load three Envoys; the demand moves from the first to the last."""
    async with loads(urls, tenant) as found:
        for demands in ((60, 6, 0), (6, 6, 60)):
            runs = [
                load.run(demand, 16) for load, demand in zip(found, demands, strict=True) if demand
            ]
            await asyncio.gather(*runs)
        return found


async def test_three_envoys_whose_demand_moves_stay_within_the_rate(redis: Single) -> None:
    """Rate shares: in no interval more than rate × T + burst, and the rate is used."""
    rules = document(rule("tenants", "moves", f"{RATE}/second"))
    async with serving(rules, store=redis.uri) as service:
        port = service.handle.port
        async with envoys(*[config_of(port, name) for name in "abc"]) as found:
            moved = await moving([each.url for each in found], "moves")
    assert most_over(moved, RATE, BURST) <= 0
    total = sum(load.passed() for load in moved)
    assert total > 0.5 * RATE * 32
    # The share of the first one has moved to the last.
    assert moved[2].passed() > 0.2 * RATE * 16


async def test_a_restart_and_a_lost_stream_never_give_more_than_the_rate(redis: Single) -> None:
    """Shares are in the store; that of a lost stream is reserved until it has expired."""
    rules = document(rule("tenants", "*", f"{RATE}/second"))
    port = free_port()
    async with AsyncExitStack() as stack:
        proxy = stack.enter_context(Proxy(port))
        service = await stack.enter_async_context(Restarting(port, rules, redis.uri))
        a, b = await stack.enter_async_context(
            envoys(config_of(port, "a"), config_of(proxy.port, "b"))
        )
        found = await stack.enter_async_context(loads([a.url, b.url], "restarts"))
        running = asyncio.gather(*[load.run(RATE, 46) for load in found])
        await until(lambda: all(load.passed() for load in found), "both have shares")
        await asyncio.sleep(2)
        await service.stop()
        await service.start()
        restarted_s = time.monotonic()
        await until(lambda: found[1].passed(restarted_s + 8) > 0, "it has a share again")
        # Now the connection of b is silent. It decides by its share until that expires.
        proxy.mode = "hold"
        lost_s = time.monotonic()
        await running
    assert found[1].passed(lost_s, lost_s + 4) > 0
    assert found[1].passed(lost_s + 11) == 0
    assert found[0].passed(lost_s + 11) > 0
    assert most_over(found, RATE, BURST) <= 0
