"""Real Redis servers on loopback, for tests and benchmarks.

    with Single() as server:            # its own, to be killed and paused
        Limiter("5/minute", store=server.uri)

    running("single").uri               # one for the whole process, started when first asked for

Everything is started with the programs of Debian's packages on free ports, keeps its files in a
temporary folder, and is gone when the process ends, however it ends. What is missing on the machine
fails the test and is never skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Protocol

from tests.redis_servers.cluster import Cluster
from tests.redis_servers.promotion import Promotion
from tests.redis_servers.scratch import check_allowed
from tests.redis_servers.sentinels import Sentinels
from tests.redis_servers.server import Server, ServerFailed
from tests.redis_servers.single import Single, User
from tests.redis_servers.tls import Tls
from tests.redis_servers.waiting import NotInTime, until

__all__ = [
    "KINDS",
    "Cluster",
    "NotInTime",
    "Promotion",
    "Running",
    "Sentinels",
    "Server",
    "ServerFailed",
    "Single",
    "Tls",
    "User",
    "running",
    "until",
]


class Running(Protocol):
    """What every kind has, so that a test need not know which it got."""

    @property
    def uri(self) -> str:
        """The store's URI."""

    def start(self) -> None:
        """Start it and wait until it is ready."""

    def flush(self) -> None:
        """Remove every key."""

    def stop(self) -> None:
        """End all its processes and remove its files."""


_MAKERS: dict[str, Callable[[], Running]] = {
    "single": Single,
    # What a URI must escape is in the password.
    "password": lambda: Single(password="root:me@/", users=[User("tollkeeper", "s3:cr/e@t?#%1")]),
    "tls": lambda: Tls(client_certificates=True),
    # A busy machine must not look like a dead server to those who kill nobody.
    "sentinel": lambda: Sentinels(down_after_ms=5_000),
    "cluster": lambda: Cluster(node_timeout_ms=5_000),
}

KINDS = tuple(_MAKERS)

_lock = Lock()
_running: dict[str, Running] = {}


def running(kind: str) -> Running:
    """The one of this kind that this process has; started now, if nobody asked before.

    Everyone shares it: flush before use, revive what you kill, or start one of your own. It is
    stopped when the process ends.
    """
    if kind not in _MAKERS:
        raise ValueError(f"kind={kind!r} is unknown; there are {', '.join(KINDS)}")
    check_allowed()
    with _lock:
        if kind not in _running:
            made = _MAKERS[kind]()
            made.start()
            _running[kind] = made
        return _running[kind]
