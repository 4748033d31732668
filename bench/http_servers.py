"""Servers for the HTTP benchmarks: on loopback, with one worker each, pinned to a processor.

A process inherits the processors of its parent, and so do its threads and workers. So
`on_processors` moves this process while it starts another one.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from tests.redis_servers.ports import HOST, free_port
from tests.redis_servers.waiting import until

READY_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 10.0
ROOT: Final = Path(__file__).parents[1]
_LOG_LINES_SHOWN: Final = 20
_ASK_SECONDS_MAX: Final = 2.0


class NotStarted(RuntimeError):
    """A server did not answer; the message ends with the last lines of its log."""


@contextmanager
def on_processors(processors: frozenset[int]) -> Iterator[None]:
    """Run this process and its children on these processors; empty: on any."""
    if not processors:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Serving:
    """A server that runs during a `with` block.

    `{port}` in the command is replaced by a free port, `{folder}` by a temporary folder. The server
    is ready when it answers `request` with 200.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        request: bytes,
        processors: frozenset[int] = frozenset(),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.port = free_port()
        self.request = request
        self.runs_on = False
        self._processors = processors
        self._folder = Path(tempfile.mkdtemp(prefix="ratekeeper-bench-"))
        self._log = self._folder / "log"
        places = {"{port}": str(self.port), "{folder}": str(self._folder)}
        self._command = [_filled(word, places) for word in command]
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def session(self) -> int:
        """The session of its processes."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        try:
            with on_processors(self._processors), self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env=self._environment,
                    start_new_session=True,
                )
            until(self._ready, f"{self.name} answers", READY_SECONDS_MAX, self._tail)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if (process := self._process) is not None:
            # With its workers, which share its session; pending writes do not matter.
            self._signal(signal.SIGKILL)
            process.wait(STOP_SECONDS_MAX)
        shutil.rmtree(self._folder, ignore_errors=True)

    def pause(self) -> None:
        """Pause the server until its turn, so that its background work does not disturb others."""
        if not self.runs_on:
            self._signal(signal.SIGSTOP)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Resume the server in this block; errors get its name and the last lines of its log.

        The block begins when the server answers again: on a busy machine that takes a while.
        """
        self._signal(signal.SIGCONT)
        try:
            until(self._ready, f"{self.name} answers again", READY_SECONDS_MAX)
            yield
        except Exception as error:
            error.add_note(f"{self.name}: {self._tail()}")
            raise
        finally:
            self.pause()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.session, number)

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise NotStarted(f"{self.name} ended by itself: {self._tail()}")
        try:
            return answer_of(self.port, self.request).startswith(b"HTTP/1.1 200")
        except OSError:
            return False

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES_SHOWN:])


def _filled(word: str, places: Mapping[str, str]) -> str:
    for place, value in places.items():
        word = word.replace(place, value)
    return word


def answer_of(port: int, request: bytes) -> bytes:
    """Return the beginning of the answer to one request on a new connection."""
    with socket.create_connection((HOST, port), timeout=_ASK_SECONDS_MAX) as connection:
        connection.sendall(request)
        return connection.recv(65_536)


def get(path: str) -> bytes:
    """Return a request without a body."""
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


def post(path: str, body: bytes) -> bytes:
    """Return a request with a JSON body."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def granian(target: str, *, factory: bool = False) -> list[str]:
    """Return the command that serves an ASGI application as `ratekeeper serve --workers 1` does."""
    return [
        *(sys.executable, "-m", "granian", "--interface", "asgi", "--loop", "uvloop"),
        *("--host", HOST, "--port", "{port}", "--workers", "1", "--no-ws", "--http", "1"),
        *("--backpressure", "1024", "--http1-buffer-size", "65536"),
        *("--http1-header-read-timeout", "10000"),
        *("--log-level", "warning", *(["--factory"] if factory else []), target),
    ]


def ratekeeper_serve(rules: Path, *more: str) -> list[str]:
    """Return the command that starts the service with one worker."""
    return [
        *(sys.executable, "-m", "ratekeeper", "serve", "--workers", "1", "--rules", str(rules)),
        *("--host", HOST, "--port", "{port}", "--data", "{folder}", "--drain-seconds", "0"),
        *more,
    ]
