"""One real server process, which a test can start, kill, pause and start again.

A server is ready when the process that answers on its port is the one that the harness started. If
another process took the port first, the harness tries another port. The server's folder holds its
configuration, its data and its log. If it does not start, the error holds the end of the log.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.redis_servers.ports import HOST, free_port
from tests.redis_servers.scratch import scratch
from tests.redis_servers.waiting import await_stopped, until

# Room for a busy machine; a start takes 20 ms on an idle one.
READY_SECONDS_MAX = 20.0
_PORTS_TRIED_MAX = 5
_LOG_LINES_SHOWN = 20
_PORT_TAKEN = ("Address already in use", "port is already in use")


class ServerFailed(AssertionError):
    """A server could not start; the message ends with the end of its log."""


class Startable:
    """Servers that run for the length of a `with` block, and leave nothing if the start fails."""

    def start(self) -> None:
        """Start the servers and wait until they are ready."""
        raise NotImplementedError

    def stop(self) -> None:
        """End all processes and remove their files. They cannot be started again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class Server(Startable):
    """A redis-server or redis-sentinel on loopback.

    `program`  the command, which is also the name of its Debian package
    `lines`    the lines of its configuration; `{port}` stands for the port that the harness chose
    `login`    further arguments of redis-py for connecting: a password, certificates
    """

    def __init__(
        self, program: str, lines: Sequence[str], login: Mapping[str, object] | None = None
    ) -> None:
        self.port = 0
        self.folder = scratch().new_folder(program)
        self._program = program
        self._lines = tuple(lines)
        self._login = dict(login or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._admin: redis.Redis | None = None
        self.is_paused = False
        # Once the server has been ready, its port and its configuration file stay: Sentinels and
        # Cluster nodes save their state in that file.
        self._was_ready = False

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port, which stay the same after a restart."""
        return HOST, self.port

    @property
    def pid(self) -> int | None:
        """Return the process ID; None if the server does not run."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    @property
    def admin(self) -> redis.Redis:
        """Return the administrator's client, which stays connected and decodes replies."""
        if self._admin is None:
            # Retry once, because Sentinels close all connections of a server that they promote.
            retry_once = Retry(NoBackoff(), 1)
            self._admin = self.client(decode_responses=True, protocol=2, retry=retry_once)
        return self._admin

    def client(self, **options: Any) -> redis.Redis:
        """Return a new client of the administrator, which never retries. The caller closes it."""
        chosen: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), **self._login, **options}
        return redis.Redis(HOST, self.port, **chosen)

    def start(self) -> None:
        """Start the server and wait until it answers. After `kill`, port and data stay the same."""
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        """Start the server without waiting, so that several can start at the same time."""
        if self.pid:
            raise ServerFailed(f"{self._program} on port {self.port} runs already; kill it first")
        if not self._was_ready:
            self.port = free_port()
            text = "\n".join(self._lines).replace("{port}", str(self.port))
            (self.folder / "server.conf").write_text(f"{text}\n", encoding="utf-8")
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [program_path(self._program), "server.conf"],
                cwd=self.folder,
                process_group=scratch().process_group,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        scratch().stop_at_exit(self, self.kill)

    def await_ready(self) -> None:
        """Wait until the server answers; if its port is taken, start it on another one."""
        for _ in range(_PORTS_TRIED_MAX):
            until(
                lambda: self.pid is None or self._answers(),
                f"{self._program} answers on port {self.port}",
                READY_SECONDS_MAX,
                self._log_end,
            )
            if self.pid:
                self._was_ready = True
                return
            if self._was_ready or not any(words in self._log_end() for words in _PORT_TAKEN):
                break
            self.kill()
            self.launch()
        raise ServerFailed(f"{self._program} on port {self.port} did not start. {self._log_end()}")

    def kill(self) -> None:
        """Send SIGKILL and wait for the end. The server loses data that is not on disk."""
        if self._admin is not None:
            self._admin.close()
            self._admin = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.is_paused = False
        scratch().forget(self)

    def pause(self) -> None:
        """Send SIGSTOP: the kernel still accepts connections, but the server does not answer."""
        self._signal(signal.SIGSTOP)
        await_stopped(cast("int", self.pid))
        self.is_paused = True

    def resume(self) -> None:
        """Send SIGCONT: the server runs on."""
        self._signal(signal.SIGCONT)
        self.is_paused = False

    def stop(self) -> None:
        """Kill the server and remove its files. It cannot be started again."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal(self, number: int) -> None:
        if self._process is None or self.pid is None:
            raise ServerFailed(f"{self._program} on port {self.port} does not run; start it first")
        self._process.send_signal(number)

    def _answers(self) -> bool:
        try:
            facts = self.admin.info()
        except redis.RedisError:
            return False
        # Another server may have the port, until ours fails because of it.
        return bool(facts["process_id"] == self.pid and not facts.get("loading"))

    def _log_end(self) -> str:
        text = (self.folder / "log").read_text(encoding="utf-8", errors="replace")
        return "The end of its log:\n" + "\n".join(text.splitlines()[-_LOG_LINES_SHOWN:])


def program_path(program: str, package: str | None = None) -> str:
    """Return the path of a program. A missing program fails the test and never skips it."""
    path = shutil.which(program)
    if path is None:
        raise ServerFailed(
            f"there is no {program} on this machine, and tests against real servers need it; as "
            f"root on Debian or Ubuntu: apt-get install {package or program}"
        )
    return path
