"""Real Redis servers on loopback, for tests and benchmarks.

    with Single() as server:            # a private server, which a test may kill and pause
        Limiter("5/minute", store=server.uri)

    running("single").uri               # one server for the whole process, started at first use

The harness starts the programs of Debian's packages on free ports, with their files in a temporary
folder. Servers and files are gone when the process ends, however it ends. A program that is not
installed fails the test; no test is skipped.
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
    """The methods of every kind of server, for tests that run against all of them."""

    @property
    def uri(self) -> str:
        """Return the store's URI."""

    def start(self) -> None:
        """Start the servers and wait until they are ready."""

    def flush(self) -> None:
        """Remove every key."""

    def stop(self) -> None:
        """End all processes and remove their files."""


_MAKERS: dict[str, Callable[[], Running]] = {
    "single": Single,
    # The password has the characters that a URI must escape.
    "password": lambda: Single(password="root:me@/", users=[User("ratekeeper", "s3:cr/e@t?#%1")]),
    "tls": lambda: Tls(client_certificates=True),
    # Long timeouts, so that a busy machine does not look like a dead server.
    "sentinel": lambda: Sentinels(down_after_ms=5_000),
    "cluster": lambda: Cluster(node_timeout_ms=5_000),
}

KINDS = tuple(_MAKERS)

_lock = Lock()
_running: dict[str, Running] = {}


def running(kind: str) -> Running:
    """Return this process's shared server of a kind; the first call starts it.

    All tests share it: flush before use, and revive what you kill, or start a private one. It
    stops when the process ends.
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
