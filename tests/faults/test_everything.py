"""All faults at once, from a printed seed: FAULTS_SEED=… repeats a run.

Redis is killed, stopped and filled; the network before it drops, delays, cuts and resets;
PostgreSQL is killed and its rules change; workers of a service are killed; the disk of its records
is full; and one node's clock is a minute ahead. Each fault runs independently of the others. The
seed decides each fault's actions and their planned times; the machine decides how long a server
takes to start. A network that holds all data back stands for a partition.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from random import Random, SystemRandom
from typing import cast

import pytest

from ratekeeper import AsyncLimiter, Limiter
from ratekeeper.control.repository import Repository
from ratekeeper.core.errors import RatekeeperError
from ratekeeper.decide.failure import LocalFallback
from ratekeeper.rules.document.reading import read
from tests.faults.conditions import fill, has_root, reset_all, small_disk, wrong_clock
from tests.faults.load import KEYS, LIMIT, Record, document, now_ns, running_load, until_calm
from tests.faults.nodes import NodeProcess
from tests.faults.reporting import verify
from tests.faults.service_load import service_load
from tests.integration.tcp_proxy import Mode, Proxy
from tests.postgres_server import Postgres
from tests.redis_servers import Single
from tests.service_process import ServiceProcess

SECONDS = 4.0
# Tasks, threads, the service, and the node with the wrong clock.
NODES = 4
DISK_KILOBYTES = 8_192
QUICK = "?breaker_open_ms=200&breaker_open_max_ms=500"
MODES = ("hold", "swallow", "cut", "drip", "reset")


class Chaos:
    """All faults, each with a separate random generator, for a fixed time."""

    def __init__(
        self, seed: int, server: Single, proxy: Proxy, database: Postgres, url: str, disk: Path
    ) -> None:
        self._seed = seed
        self._server, self._proxy, self._database, self._url = server, proxy, database, url
        self._disk = disk
        self._ends_ns = now_ns() + int(SECONDS * 1e9)
        self.done: dict[str, int] = {}
        self.healed_ns = 0
        """When the last fault between the nodes and Redis ended."""

    async def run(self, service: ServiceProcess) -> None:
        """Run all faults; at the end everything works again."""
        await asyncio.gather(
            self._repeat("redis", self._break_redis, 0.8),
            self._repeat("network", self._break_network, 0.6),
            self._repeat("postgresql", self._break_database, 1.5),
            self._repeat("worker", lambda random: self._kill_worker(service, random), 1.5),
            self._repeat("rules", self._change_rules, 0.7),
            self._repeat("disk", self._fill_disk, 1.0),
        )

    async def _repeat(
        self, name: str, work: Callable[[Random], Awaitable[str]], pause_s: float
    ) -> None:
        random = Random(f"{self._seed} {name}")
        while now_ns() < self._ends_ns:
            await asyncio.sleep(random.uniform(0.2, 2 * pause_s))
            what = await work(random)
            self.done[what] = self.done.get(what, 0) + 1

    async def _break_redis(self, random: Random) -> str:
        server, what = self._server, random.choice(("killed", "stopped", "full"))
        seconds = random.uniform(0.1, 0.8)
        if what == "killed":
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(seconds)
            await asyncio.to_thread(server.start)
        elif what == "stopped":
            server.pause()
            await asyncio.sleep(seconds)
            server.resume()
        else:
            await asyncio.to_thread(server.admin.config_set, "maxmemory", 1)
            await asyncio.sleep(seconds)
            await asyncio.to_thread(server.admin.config_set, "maxmemory", 0)
        self.healed_ns = now_ns()
        return f"Redis {what}"

    async def _break_network(self, random: Random) -> str:
        mode = random.choice(MODES)
        if mode != "reset":
            self._proxy.mode = cast("Mode", mode)
            await asyncio.sleep(random.uniform(0.1, 0.5))
            self._proxy.mode = "pass"
        await asyncio.to_thread(reset_all, self._proxy)
        self.healed_ns = now_ns()
        return f"network {mode}"

    async def _break_database(self, random: Random) -> str:
        await asyncio.to_thread(self._database.kill)
        await asyncio.sleep(random.uniform(0.1, 0.6))
        await asyncio.to_thread(self._database.start)
        return "PostgreSQL killed"

    async def _kill_worker(self, service: ServiceProcess, random: Random) -> str:
        alive = service.worker_pids()
        assert service.pid is not None, service.log_end()
        if len(alive) < 2:
            return "worker spared"
        os.kill(random.choice(alive), signal.SIGKILL)
        return "worker killed"

    async def _fill_disk(self, random: Random) -> str:
        if not has_root():
            return "disk spared"  # without root it is the machine's own disk
        filler = await asyncio.to_thread(fill, self._disk)
        await asyncio.sleep(random.uniform(0.3, 1.5))
        filler.unlink()
        return "disk full"

    async def _change_rules(self, random: Random) -> str:
        try:
            await asyncio.to_thread(change_rules, self._url, random.choice((LIMIT // 2, LIMIT)))
        except (RatekeeperError, OSError):
            return "rules not changed"  # their database is unavailable
        return "rules changed"


def change_rules(url: str, limit: int) -> None:
    """Apply a version with this limit, outside the event loop of the load."""

    async def change() -> None:
        async with await Repository.open(url) as repository:
            number = await repository.number()
            changed = read(json.dumps(document(limit, holds=LIMIT), indent=1))
            await repository.apply(changed, author="ann", expected=number)

    asyncio.run(change())


@asynccontextmanager
async def all_nodes(
    url: str, uri: str, record: Record, disk: Path
) -> AsyncIterator[ServiceProcess]:
    """Run the load on all nodes: tasks, threads, a service, and a node with a wrong clock."""
    local_fallback = LocalFallback(nodes=NODES)
    recording = ("--record", f"sqlite:///{disk / 'records.db'}", "--sample", "1")
    shared = ("--store", uri, "--nodes", str(NODES))
    with (
        NodeProcess("ahead", uri, KEYS, rules=url, nodes=NODES, env=wrong_clock(60)) as ahead,
        ServiceProcess(url, *shared, *recording, workers=2) as service,
    ):
        assert await asyncio.to_thread(ahead.ready) == pytest.approx(60, abs=1)
        async with AsyncLimiter.from_rules(
            url, store=uri, local_fallback=local_fallback
        ) as awaited:
            with Limiter.from_rules(url, store=uri, local_fallback=local_fallback) as threaded:
                async with (
                    running_load(record, awaited, threaded),
                    service_load(service, record, KEYS, threads=1),
                ):
                    yield service
        await asyncio.to_thread(ahead.finish, record)


async def test_everything_at_once(tmp_path: Path) -> None:
    """Under all faults at once, Redis' admissions keep the limits and every policy holds.

    No answer is late, and after the faults all decisions become exact again without help.
    """
    seed = int(os.environ.get("FAULTS_SEED") or SystemRandom().randrange(10**6))
    print(f"FAULTS_SEED={seed}")
    record = Record()
    with (
        Single(aof=True) as server,
        Proxy(server.port) as proxy,
        Postgres() as database,
        small_disk(DISK_KILOBYTES) if has_root() else nullcontext(tmp_path) as disk,
    ):
        url = database.new_database()
        await asyncio.to_thread(change_rules, url, LIMIT)
        async with all_nodes(url, f"{proxy.uri}{QUICK}", record, disk) as service:
            chaos = Chaos(seed, server, proxy, database, url, disk)
            await chaos.run(service)
            await asyncio.to_thread(change_rules, url, LIMIT)
            await until_calm(record)
    done = ", ".join(f"{times}× {what}" for what, times in sorted(chaos.done.items()))
    print(f"{done}; {record.lost} requests cut")
    found = verify(record, f"everything at once, seed {seed}", chaos.healed_ns)
    assert found["closed"].over == 0
    assert all(each.degraded for each in found.values())
