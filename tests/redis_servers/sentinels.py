"""A primary with one replica, and three Sentinels that watch them and vote on a promotion.

By default, Sentinels poll every one to ten seconds, and a start or a revival takes as long.
SENTINEL DEBUG shortens the periods and changes nothing else. But the periods depend on each other:
with wrong values the Sentinels replace a live server, or fail to replace a dead one.

- After a promotion, a Sentinel sends its first ping one PING-PERIOD later, but counts the silence
  from the promotion. So `down_after_ms` must be well above PING-PERIOD.
- A Sentinel promotes a replica only if its last INFO is at most five PING-PERIODs old. While the
  primary is down, INFO arrives once a second, for any INFO-PERIOD. So PING-PERIOD must be well
  above 200 ms.
- A Sentinel that has not yet learned of a promotion turns the new primary back into a replica after
  four PUBLISH-PERIODs, if the old primary is back. The leader itself learns of the promotion from
  INFO. So PUBLISH-PERIOD is short only while no promotion can run: at the start, and in `revive`,
  which first waits for the end of a promotion.
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
    # A Sentinel that did not run for two seconds distrusts its clock, and then does nothing for
    # thirty seconds. That happens on a busy machine.
    *("TILT-PERIOD", 1_000),
)


class Sentinels(Startable):
    """Two redis-servers under the name `service`, and three Sentinels.

    `down_after_ms`  how long the primary is silent before it is replaced: from 1,000, for a test
                     that kills it; longer if a busy machine must not look like a dead server
    `lines`          further lines of the redis-servers' configuration
    """

    service = "main"

    def __init__(self, *, down_after_ms: int = 1_000, lines: Sequence[str] = ()) -> None:
        self._data_lines = (
            *COMMON_LINES,
            "port {port}",
            # By default a primary waits five seconds for more replicas that need the same copy.
            "repl-diskless-sync-delay 0",
            *lines,
        )
        self._down_after_ms = down_after_ms
        # `start` makes all of them, because their configuration holds the first one's port.
        self.servers: list[Server] = []
        self.sentinels: list[Server] = []

    @property
    def uri(self) -> str:
        """Return the store's URI, which names the Sentinels and the service."""
        addresses = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{addresses}/{self.service}/0"

    @property
    def primary(self) -> tuple[str, int]:
        """Return the primary's address from the first Sentinel that answers."""
        for sentinel in _answering(self.sentinels):
            host, port = _sentinel(sentinel, "GET-MASTER-ADDR-BY-NAME", self.service)
            return host, int(port)
        raise ServerFailed("no Sentinel runs; revive() starts them again")

    def start(self) -> None:
        """Start all five, and wait until all know each other and the replica is in sync."""
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
            # After a failed promotion, the Sentinels try again after twice this time.
            f"sentinel failover-timeout {self.service} 3000",
        )
        self.sentinels += [Server("redis-sentinel", sentinel_lines) for _ in range(SENTINELS)]
        self._launch_and_settle()

    def stop(self) -> None:
        """Kill all five and remove their files. The set cannot be started again."""
        # The Sentinels stop first, so that none of them reacts to a death.
        for server in (*self.sentinels, *self.servers):
            server.stop()

    def flush(self) -> None:
        """Remove every key, in some tenths of a millisecond."""
        for server in _answering(self.servers):
            try:
                server.admin.flushall()
            except redis.exceptions.ReadOnlyError:
                continue  # the replica, which the primary flushes

    def kill_primary(self) -> tuple[str, int]:
        """Send SIGKILL to the primary; return its address."""
        address = self.primary
        for server in self.servers:
            if server.address == address:
                server.kill()
                return address
        raise ServerFailed(f"the Sentinels name {address}, which is not one of this set")

    def wait_promoted(self, timeout_seconds: float = 15.0) -> Promotion:
        """Wait until the replica of a killed or paused primary is promoted.

        From then on it accepts writes; the Sentinels name it to clients up to a second later. A
        promotion takes one to two seconds, and about six more if the Sentinels first disagree.
        """
        server = until(
            lambda: next((one for one in _answering(self.servers) if _is_primary(one)), None),
            "the replica is promoted",
            timeout_seconds,
            self._views,
        )
        return Promotion(server.address, time.monotonic())

    def revive(self) -> None:
        """Start killed servers, resume paused ones, and wait until all are in sync.

        A replaced primary returns as a primary, and the Sentinels make it a replica. Call
        `wait_promoted` before: a primary that returns before its replacement may stay primary.
        """
        until(
            self._no_promotion_runs,
            "every Sentinel knows of the promotion",
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

    def _no_promotion_runs(self) -> bool:
        """Return True if no live primary exists, or all live Sentinels have finished with it."""
        primary = next((one for one in _answering(self.servers) if _is_primary(one)), None)
        return primary is None or all(
            self._seen(sentinel) == (str(primary.port), "master")
            for sentinel in _answering(self.sentinels)
        )

    def _seen(self, sentinel: Server) -> tuple[str, str]:
        """Return the primary's port and flags, as a Sentinel sees them.

        A flag other than `master` means down, disconnected, or in a promotion.
        """
        facts = _facts(_sentinel(sentinel, "MASTER", self.service))
        return facts["port"], facts["flags"]

    def _is_settled(self) -> bool:
        """Return True if all see one primary and one replica, which is in sync."""
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
        views = [
            f"server {one.port} says: {one.admin.execute_command('ROLE')}"
            for one in _answering(self.servers)
        ]
        for one in _answering(self.sentinels):
            port, flags = self._seen(one)
            views.append(f"Sentinel {one.port} says: {port} is {flags}")
        return "\n".join(views)


def _answering(servers: Sequence[Server]) -> list[Server]:
    return [server for server in servers if server.pid and not server.is_paused]


def _sentinel(sentinel: Server, *words: str | int) -> Any:
    # Separate words keep redis-py from parsing the answer.
    return sentinel.admin.execute_command("SENTINEL", *words)


def _facts(answer: Sequence[str]) -> dict[str, str]:
    return dict(zip(answer[::2], answer[1::2], strict=True))


def _is_primary(server: Server) -> bool:
    return bool(server.admin.info("replication")["role"] == "master")


def _is_in_sync(server: Server) -> bool:
    return bool(server.admin.info("replication").get("master_link_status") == "up")
