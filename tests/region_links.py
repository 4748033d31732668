"""Real Redis servers of several regions, joined by links that are slow and can be cut.

    with RegionServers(("eu", "us", "ap"), cluster="ap") as regions:
        regions.delay("eu", "us", 0.05)            # seconds, in each direction
        Limiter(…, regions=regions.settings("eu"))
        regions.cut("eu", "us")                    # nothing gets from eu to us
        regions.heal()

Each region reaches its own servers directly, and those of another region through a relay: one
for each pair of regions, direction and server. So each link has its own delay and its own cuts.

A cut loses nothing for good, like TCP: bytes wait, and arrive when the link is whole again, even
if their connection was closed since. So stores get old calls, much later.

A node of a Cluster names the ports of the other nodes. The relay replaces them with its own ones.
All have five digits, so the length of an answer does not change.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import Any, TypeVar

from ratekeeper import Regions
from tests.redis_servers.cluster import Cluster
from tests.redis_servers.ports import HOST
from tests.redis_servers.server import Startable
from tests.redis_servers.single import Single

T = TypeVar("T")

NAMES = ("eu", "us", "ap", "sa", "af")
# Not the subject of these tests: on a busy machine a call may take as long.
DEADLINE_MS = 2_000
_CHUNK_BYTES = 65_536
_CALL_S_MAX = 30.0
# What a Cluster's node says of another node: in CLUSTER SLOTS, and in a redirection.
_PORT = re.compile(rb"(\$9\r\n127\.0\.0\.1\r\n:|(?:MOVED|ASK) \d+ 127\.0\.0\.1:)(\d{5})(?=\r\n)")


class Direction:
    """The bytes of a link in one direction."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.sent_bytes = 0
        """Bytes that have arrived."""
        self._whole = asyncio.Event()
        self._whole.set()

    @property
    def is_cut(self) -> bool:
        return not self._whole.is_set()

    def cut(self) -> None:
        """Let nothing arrive."""
        self._whole.clear()

    def heal(self) -> None:
        """Let everything arrive."""
        self._whole.set()

    async def carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        replace: Callable[[bytes], bytes],
    ) -> None:
        """Carry bytes until one end is closed, and then close the other end."""
        loop = asyncio.get_running_loop()
        arriving: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=1_000)

        async def read() -> None:
            data = b"?"
            while data:
                try:
                    data = await reader.read(_CHUNK_BYTES)
                except OSError:
                    data = b""
                await arriving.put((loop.time() + self.delay_s, data))

        reading = loop.create_task(read())
        try:
            while True:
                at_s, data = await arriving.get()
                await asyncio.sleep(max(at_s - loop.time(), 0.0))
                await self._whole.wait()
                if not data:
                    break
                self.sent_bytes += len(data)
                writer.write(replace(data))
                await writer.drain()
        except OSError:
            pass
        finally:
            reading.cancel()
            writer.close()


class Link:
    """The way of one region's nodes to the servers of another region."""

    def __init__(self) -> None:
        self.calls = Direction()
        self.answers = Direction()
        self._ports: dict[bytes, bytes] = {}
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, ports: Sequence[int]) -> None:
        """Listen on a port of our own for each port of the other region."""
        for port in ports:

            def connected(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port
            ) -> None:
                # A task of our own: asyncio's would print an error when it is cancelled.
                task = asyncio.get_running_loop().create_task(self._relay(reader, writer, port))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

            server = await asyncio.start_server(connected, HOST, 0)
            self._servers.append(server)
            self._ports[b"%d" % port] = b"%d" % server.sockets[0].getsockname()[1]

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        try:
            there, back = await asyncio.open_connection(HOST, port)
        except OSError:  # it is down
            writer.close()
            return
        await asyncio.gather(
            self.calls.carry(reader, back, lambda data: data),
            self.answers.carry(there, writer, self._with_own_ports),
        )

    def _with_own_ports(self, answer: bytes) -> bytes:
        return _PORT.sub(
            lambda found: found[1] + self._ports.get(found[2], found[2]),
            answer,
        )

    def port(self, port: int) -> int:
        """Return the port of this link for a port of the other region."""
        return int(self._ports[b"%d" % port])

    def close(self) -> None:
        """Close everything."""
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()


class RegionServers(Startable):
    """The stores of several regions, and the links between them.

    `names`    the regions
    `cluster`  which of them has a Redis Cluster: three primaries and three replicas
    """

    def __init__(self, names: Sequence[str] = NAMES[:3], cluster: str | None = None) -> None:
        self.names = tuple(names)
        self.servers: dict[str, Single | Cluster] = {
            name: Cluster(node_timeout_ms=5_000) if name == cluster else Single()
            for name in self.names
        }
        self.links = {pair: Link() for pair in permutations(self.names, 2)}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="region-links")

    def start(self) -> None:
        """Start all servers, and the links."""
        self._thread.start()
        for server in self.servers.values():
            server.start()
        for (_, target), link in self.links.items():
            self._call(partial(link.open, self._ports(target)))

    def stop(self) -> None:
        """Stop all."""
        if self._thread.is_alive():
            self._call(self._close)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        for server in self.servers.values():
            server.stop()

    async def _close(self) -> None:
        for link in self.links.values():
            link.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        async def called() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(_CALL_S_MAX)

    def flush(self) -> None:
        """Remove every key in all regions."""
        for server in self.servers.values():
            server.flush()

    # ── Addresses ──────────────────────────────────────────────────────────────────────────────

    def _ports(self, region: str) -> list[int]:
        server = self.servers[region]
        nodes = server.nodes if isinstance(server, Cluster) else (server,)
        return [node.port for node in nodes]

    def uri(self, region: str, seen_from: str | None = None) -> str:
        """Return the URI of a region's store, for nodes of that region or of another one."""
        is_own = seen_from in (None, region)
        ports = self._ports(region)
        if not is_own:
            assert seen_from is not None
            ports = [self.links[seen_from, region].port(port) for port in ports]
        is_cluster = isinstance(self.servers[region], Cluster)
        addresses = ",".join(f"{HOST}:{port}" for port in ports)
        scheme = "redis+cluster" if is_cluster else "redis"
        return f"{scheme}://{addresses}?deadline_ms={DEADLINE_MS}"

    def settings(self, region: str, shares: Mapping[str, Any] | None = None) -> Regions:
        """Return the settings of a node in a region."""
        return Regions(region, {name: self.uri(name, region) for name in self.names}, shares)

    # ── Faults ─────────────────────────────────────────────────────────────────────────────────

    def delay(self, one: str, other: str, seconds: float) -> None:
        """Let bytes between two regions take some seconds in each direction."""
        for link in (self.links[one, other], self.links[other, one]):
            link.calls.delay_s = link.answers.delay_s = seconds

    def cut(self, source: str, target: str) -> None:
        """Let nothing get from one region to the other: neither calls nor answers."""
        self._loop.call_soon_threadsafe(self.links[source, target].calls.cut)
        self._loop.call_soon_threadsafe(self.links[target, source].answers.cut)

    def part(self, *groups: Sequence[str]) -> None:
        """Cut all links between groups of regions, in both directions."""
        group_of = {name: number for number, group in enumerate(groups) for name in group}
        for source, target in self.links:
            if group_of[source] != group_of[target]:
                self.cut(source, target)

    def heal(self) -> None:
        """Mend all links."""
        for link in self.links.values():
            for direction in (link.calls, link.answers):
                self._loop.call_soon_threadsafe(direction.heal)

    def sent_bytes(self) -> int:
        """Return the bytes that have arrived between all regions, in both directions."""
        return sum(each.calls.sent_bytes + each.answers.sent_bytes for each in self.links.values())
