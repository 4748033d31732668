"""A primary with one replica, and three Sentinels that watch them and vote on a promotion.

Left alone, Sentinels look around every one to ten seconds, and starting or reviving takes as long.
SENTINEL DEBUG lets them look more often; what they do then is the real thing. But their periods
depend on one another, and where that is not kept they replace a live server or fail to replace a
dead one:

- After a promotion a Sentinel sends its first ping one PING-PERIOD later, yet counts the silence
  from the start. So `down_after_ms` must be well above PING-PERIOD.
- News of a replica may be five PING-PERIODs old for its promotion. While the primary is down such
  news comes once a second, whatever INFO-PERIOD says. So PING-PERIOD must be well above 200 ms.
- A replica that says it is primary is turned back after four PUBLISH-PERIODs, if the old primary is
  back and a Sentinel has not heard of the promotion, which its leader sees by those same news. So
  PUBLISH-PERIOD is short only while no promotion can be under way: when starting, and in `revive`,
  which first lets them finish.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import redis

from tests.redis_servers.ports import HOST
from tests.redis_servers.promotion import Promotion
from tests.redis_servers.server import Server, ServerFailed, Startable
from tests.redis_servers.single import COMMON_LINES
from tests.redis_servers.waiting import until

SENTINELS = 3
QUORUM = 2
_SETTLED_SECONDS_MAX = 30.0
_SETTLING_PACE = ("PUBLISH-PERIOD", 100)
_PACE: tuple[str | int, ...] = (
    *("INFO-PERIOD", 100, "ASK-PERIOD", 100, "PING-PERIOD", 400, "PUBLISH-PERIOD", 500),
    # A Sentinel that was not run for two seconds mistrusts its clock, and then does nothing for
    # thirty. On a busy machine that happens.
    *("TILT-PERIOD", 1_000),
)


class Sentinels(Startable):
    """Two redis-servers under the name `service`, and three Sentinels.

    `down_after_ms`  how long the primary is silent before it is replaced: from 1,000, for a test
                     that kills it; longer where a busy machine must not look like a dead server
    `lines`          further lines of the redis-servers' configuration
    """

    service = "main"

    def __init__(self, *, down_after_ms: int = 1_000, lines: Sequence[str] = ()) -> None:
        self._data_lines = (
            *COMMON_LINES,
            "port {port}",
            # By default a primary waits five seconds, for more replicas that want the same copy.
            "repl-diskless-sync-delay 0",
            *lines,
        )
        self._down_after_ms = down_after_ms
        # All are made by `start`: what they are told has the first one's port in it.
        self.servers: list[Server] = []
        self.sentinels: list[Server] = []

    @property
    def uri(self) -> str:
        """The store's URI, which names the Sentinels and the service."""
        asked = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{asked}/{self.service}/0"

    @property
    def primary(self) -> tuple[str, int]:
        """The primary's address, as the first Sentinel that answers knows it."""
        for sentinel in _answering(self.sentinels):
            host, port = _sentinel(sentinel, "GET-MASTER-ADDR-BY-NAME", self.service)
            return host, int(port)
        raise ServerFailed("no Sentinel runs; revive() starts them again")

    def start(self) -> None:
        """Start all five, and wait until everyone has found everyone and the replica is in sync."""
        first = Server("redis-server", self._data_lines)
        self.servers.append(first)
        first.start()
        replica_lines = (*self._data_lines, f"replicaof {HOST} {first.port}")
        self.servers.append(Server("redis-server", replica_lines))
        sentinel_lines = (
            f"bind {HOST}",
            "protected-mode no",
            "daemonize no",
            "port {port}",
            f"sentinel monitor {self.service} {HOST} {first.port} {QUORUM}",
            f"sentinel down-after-milliseconds {self.service} {self._down_after_ms}",
            # Twice this passes before they try again, when a promotion comes to nothing.
            f"sentinel failover-timeout {self.service} 3000",
        )
        self.sentinels += [Server("redis-sentinel", sentinel_lines) for _ in range(SENTINELS)]
        self._launch_and_settle()

    def stop(self) -> None:
        """Kill all five and remove their files. It cannot be started again."""
        # Sentinels first, so that none of them sees a death to act upon.
        for server in (*self.sentinels, *self.servers):
            server.stop()

    def flush(self) -> None:
        """Remove every key, in some tenths of a millisecond."""
        for server in _answering(self.servers):
            try:
                server.admin.flushall()
            except redis.exceptions.ReadOnlyError:
                continue  # the replica, which gets it from the primary

    def kill_primary(self) -> tuple[str, int]:
        """SIGKILL to the primary; its address."""
        address = self.primary
        for server in self.servers:
            if server.address == address:
                server.kill()
                return address
        raise ServerFailed(f"the Sentinels name {address}, which is not one of this set")

    def wait_promoted(self, timeout_seconds: float = 15.0) -> Promotion:
        """Wait until the other one is primary, the old one being killed or paused.

        That is when it takes writes; the Sentinels tell their clients up to a second later. It
        takes one to two seconds; should the Sentinels not agree at once, some six more.
        """
        server = until(
            lambda: next((one for one in _answering(self.servers) if _is_primary(one)), None),
            "the replica is promoted",
            timeout_seconds,
            self._views,
        )
        return Promotion(server.address, time.monotonic())

    def revive(self) -> None:
        """Start again what was killed, resume what was paused, and wait until all is in sync.

        A primary that was replaced comes back as it was, and the Sentinels make it a replica. Call
        `wait_promoted` before: a primary that is back sooner than it is replaced may stay primary.
        """
        until(
            self._no_promotion_is_under_way,
            "every Sentinel has heard of the promotion",
            _SETTLED_SECONDS_MAX,
            self._views,
        )
        self._launch_and_settle()

    def _launch_and_settle(self) -> None:
        everyone = (*self.servers, *self.sentinels)
        for server in everyone:
            if server.is_paused:
                server.resume()
            elif not server.pid:
                server.launch()
        for server in everyone:
            server.await_ready()
        self._set_pace(*_PACE, *_SETTLING_PACE)
        until(self._is_settled, "all are in sync", _SETTLED_SECONDS_MAX, self._views)
        self._set_pace(*_PACE)

    def _set_pace(self, *periods: str | int) -> None:
        for sentinel in self.sentinels:
            _sentinel(sentinel, "DEBUG", *periods)

    def _no_promotion_is_under_way(self) -> bool:
        """Nobody has been promoted, or all Sentinels that answer know and are done with it."""
        primary = next((one for one in _answering(self.servers) if _is_primary(one)), None)
        return primary is None or all(
            self._seen(sentinel) == (str(primary.port), "master")
            for sentinel in _answering(self.sentinels)
        )

    def _seen(self, sentinel: Server) -> tuple[str, str]:
        """The primary's port, and its flags. Any but `master` means down, disconnected, or in the
        middle of a promotion."""
        facts = _facts(_sentinel(sentinel, "MASTER", self.service))
        return facts["port"], facts["flags"]

    def _is_settled(self) -> bool:
        """One primary, one replica in sync, and everyone of the same mind about it."""
        primaries = [server for server in self.servers if _is_primary(server)]
        if len(primaries) != 1:
            return False
        (replica,) = (server for server in self.servers if server is not primaries[0])
        return _is_in_sync(replica) and all(
            self._sees(sentinel, primaries[0], replica) for sentinel in self.sentinels
        )

    def _sees(self, sentinel: Server, primary: Server, replica: Server) -> bool:
        replicas = [_facts(one) for one in _sentinel(sentinel, "REPLICAS", self.service)]
        others = _sentinel(sentinel, "SENTINELS", self.service)
        return (
            self._seen(sentinel) == (str(primary.port), "master")
            and [(one["port"], one["flags"]) for one in replicas] == [(str(replica.port), "slave")]
            and replicas[0]["master-link-status"] == "ok"
            and [_facts(one)["flags"] for one in others] == ["sentinel"] * (SENTINELS - 1)
        )

    def _views(self) -> str:
        said = [
            f"server {one.port} says: {one.admin.execute_command('ROLE')}"
            for one in _answering(self.servers)
        ]
        for one in _answering(self.sentinels):
            port, flags = self._seen(one)
            said.append(f"Sentinel {one.port} says: {port} is {flags}")
        return "\n".join(said)


def _answering(servers: Sequence[Server]) -> list[Server]:
    return [server for server in servers if server.pid and not server.is_paused]


def _sentinel(sentinel: Server, *words: str | int) -> Any:
    # As words of their own, so that redis-py does not parse the answer its way.
    return sentinel.admin.execute_command("SENTINEL", *words)


def _facts(answer: Sequence[str]) -> dict[str, str]:
    return dict(zip(answer[::2], answer[1::2], strict=True))


def _is_primary(server: Server) -> bool:
    return bool(server.admin.info("replication")["role"] == "master")


def _is_in_sync(server: Server) -> bool:
    return bool(server.admin.info("replication").get("master_link_status") == "up")
