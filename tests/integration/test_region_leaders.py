"""The leader of a region on real Redis: stopped, cut off and killed."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from time import monotonic
from uuid import uuid4

from ratekeeper.core.model import Limit
from ratekeeper.decide.regional import RegionalCounts
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.redis.store import RedisStore
from ratekeeper.regions.exchange import RegionSync
from ratekeeper.regions.table import share_table
from tests.answering import awaited
from tests.integration.tcp_proxy import Proxy
from tests.redis_servers import Single

LIMITS = (Limit(1_000, per=86_400),)
# A busy machine may need longer than 5 s; `tests/regions/test_exchange.py` has the exact time.
TAKEOVER_S = 15.0
START_S = 30.0


@dataclass(frozen=True)
class Candidate:
    """A process of the region, and its way to the region's Redis."""

    process: subprocess.Popen[bytes]
    proxy: Proxy


async def until(condition: Callable[[], Awaitable[bool]], seconds: float) -> None:
    """Wait for a condition."""
    ends_s = monotonic() + seconds
    while not await condition():
        assert monotonic() < ends_s, "the condition is not true in time"
        await asyncio.sleep(0.05)


class TwoRegions:
    """Two regions on one Redis: eu with three processes, and us in this one."""

    def __init__(self, server: Single) -> None:
        self._server = server
        self._prefix = uuid4().hex[:8]
        self.uris = {region: self._uri(server.uri, region) for region in ("eu", "us")}
        self.stores = {region: open_store(uri) for region, uri in self.uris.items()}
        counts = {region: store.regional for region, store in self.stores.items()}
        known = {region: each for region, each in counts.items() if each is not None}
        self.eu, self.us = known["eu"], known["us"]
        half = Fraction(1, 2)
        self.sync = RegionSync("us", share_table(1, {"eu": half, "us": half}), known, "us-1")
        self.counter = self.eu.global_counter(LIMITS, "api", "exact")

    def _uri(self, uri: str, region: str) -> str:
        return f"{uri}?prefix={self._prefix}-{region}&deadline_ms=1000"

    @contextmanager
    def candidate(self, name: str) -> Iterator[Candidate]:
        """Start a process of the region eu."""
        with Proxy(self._server.port) as proxy:
            uris = {**self.uris, "eu": self._uri(proxy.uri, "eu")}
            command = [sys.executable, "-m", "tests.integration.region_node"]
            with subprocess.Popen(
                [*command, name, "eu", json.dumps(uris)], stdin=subprocess.PIPE
            ) as process:
                try:
                    yield Candidate(process, proxy)
                finally:
                    process.kill()

    async def leader(self) -> str:
        """Return the leader of eu; empty if it has noted nothing lately."""
        _, eu = await self.sync.status()
        is_up = [link.state for link in eu.links] == ["up"]
        return eu.leader if is_up and eu.age_s is not None and eu.age_s < 2 else ""

    async def has_leader(self, *without: str) -> str:
        """Wait until another process leads."""
        await until(lambda: self._is_led(without), TAKEOVER_S)
        return await self.leader()

    async def _is_led(self, without: tuple[str, ...]) -> bool:
        return await self.leader() not in {"", *without}

    async def us_has_a_share(self) -> bool:
        """Return True when us can learn: it may be a step behind eu, whose link to it works."""
        return await self.us.shares() is not None

    async def charge(self, units: int, total: int) -> None:
        """Spend units in eu, and wait until us knows all of them and has accepted them."""
        assert await awaited(self.counter.check("ann", units))

        async def is_known() -> bool:
            return (await _usage(self.us))[0] == total and (await _usage(self.eu))[1] == 0

        await until(is_known, TAKEOVER_S)

    async def aclose(self) -> None:
        """Close the stores."""
        self.sync.close()
        for store in self.stores.values():
            assert isinstance(store, RedisStore)
            await store.aclose()


async def _usage(counts: RegionalCounts) -> tuple[int, int]:
    usage = await counts.usage(LIMITS, "api", "ann")
    return usage.used[0], usage.unaccepted[0]


async def _replaced(regions: TwoRegions, candidates: dict[str, Candidate]) -> None:
    await until(lambda: regions._is_led(()), START_S)
    await until(regions.us_has_a_share, START_S)
    await regions.charge(10, 10)

    stopped = await regions.leader()
    candidates[stopped].process.send_signal(signal.SIGSTOP)
    await regions.charge(10, 20)
    cut = await regions.has_leader(stopped)
    candidates[stopped].process.send_signal(signal.SIGCONT)
    await regions.charge(10, 30)

    candidates[cut].proxy.mode = "hold"
    await regions.charge(10, 40)
    killed = await regions.has_leader(cut)
    candidates[cut].proxy.mode = "pass"
    candidates[cut].proxy.break_all()
    await regions.charge(10, 50)

    candidates[killed].process.kill()
    await regions.charge(10, 60)
    await regions.has_leader(killed)
    assert await _usage(regions.eu) == (60, 0)


def test_a_leader_that_stops_is_cut_off_or_dies_is_replaced() -> None:
    """Another process goes on. An old leader that comes back does no harm: nothing counts twice."""

    async def main() -> None:
        with ExitStack() as stack:
            regions = TwoRegions(stack.enter_context(Single()))
            candidates = {
                name: stack.enter_context(regions.candidate(name))
                for name in ("eu-1", "eu-2", "eu-3")
            }
            regions.sync.start()
            try:
                await _replaced(regions, candidates)
            finally:
                await regions.aclose()

    asyncio.run(main())
