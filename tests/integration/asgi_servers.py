"""ASGI servers as programs: an application under several worker processes, on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.integration.web_workers import WORKERS, client
from tests.redis_servers.waiting import until

ROOT = Path(__file__).parents[2]
START_SECONDS_MAX = 60
STOP_SECONDS_MAX = 20

COMMANDS = {
    "uvicorn": ["uvicorn", "--no-access-log", "--log-level", "warning"],
    "granian": ["granian", "--interface", "asgi", "--log-level", "warning"],
}


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def serving(name: str, application: str, folder: Path, **environment: str) -> Iterator[str]:
    """Run `application` (`module:name` in `folder`) under a server; yield its URL."""
    port = free_port()
    place = ["--host", "127.0.0.1", "--port", str(port), "--workers", str(WORKERS)]
    process = subprocess.Popen(
        [sys.executable, "-m", *COMMANDS[name], *place, application],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until(
            lambda: len(_workers(url, process)) == WORKERS,
            f"{WORKERS} workers of {name} answer",
            START_SECONDS_MAX,
        )
        yield url
    finally:
        _stop(process)


_answered: dict[str, set[int]] = {}


def _workers(url: str, process: subprocess.Popen[bytes]) -> set[int]:
    """Return the workers that have answered; each request has a new connection."""
    assert process.poll() is None, f"the server ended with {process.returncode}"
    known = _answered.setdefault(url, set())
    with suppress(httpx.TransportError):
        known.add(client().get(f"{url}/hello").json()["worker"])
    return known


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers: SIGTERM first, then SIGKILL."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS_MAX)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
