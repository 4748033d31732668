"""One real server process: started, found ready, killed, paused, started again.

A server is ready when the process that answers on its port is the one that was started; if it
could not have the port, because somebody was quicker, another one is tried. Its folder holds its
configuration, its data and its log; the end of the log is in the error when it does not start.
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

# On a busy machine; a start takes 20 ms.
READY_SECONDS_MAX = 20.0
_PORTS_TRIED_MAX = 5
_LOG_LINES_SHOWN = 20
_PORT_TAKEN = ("Address already in use", "port is already in use")


class ServerFailed(AssertionError):
    """A server could not be started; the message ends with the end of its log."""


class Startable:
    """Whatever runs for the length of a `with` block, and leaves nothing when it cannot start."""

    def start(self) -> None:
        """Start it and wait until it is ready."""
        raise NotImplementedError

    def stop(self) -> None:
        """End all its processes and remove its files. It cannot be started again."""
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

    `program`  the command, which is also the name of the Debian package that has it
    `lines`    of its configuration; `{port}` stands for the port that the harness chose
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
        # Once it has been ready, it keeps its port, and its configuration is its own: Sentinels
        # and Cluster nodes write down there what they know.
        self._was_ready = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; they stay the same when it is started again."""
        return HOST, self.port

    @property
    def pid(self) -> int | None:
        """The process number; None if it does not run, for whatever reason."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    @property
    def admin(self) -> redis.Redis:
        """One client that stays connected and decodes replies, for asking and for flushing."""
        if self._admin is None:
            # Once more, because Sentinels close all connections of a server that they promote.
            once_more = Retry(NoBackoff(), 1)
            self._admin = self.client(decode_responses=True, protocol=2, retry=once_more)
        return self._admin

    def client(self, **options: Any) -> redis.Redis:
        """A new client, logged in as the administrator; it never retries. The caller closes it."""
        chosen: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), **self._login, **options}
        return redis.Redis(HOST, self.port, **chosen)

    def start(self) -> None:
        """Start it and wait until it answers. Again after `kill`: on the same port and data."""
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        """Start it without waiting, so that several can be starting at a time."""
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
        """Wait until it answers; on another port, if somebody was quicker to take this one."""
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
        """SIGKILL, and wait until it is gone: what it has not written down is lost."""
        if self._admin is not None:
            self._admin.close()
            self._admin = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.is_paused = False
        scratch().forget(self)

    def pause(self) -> None:
        """SIGSTOP: the port stays open and the kernel takes connections, but nobody answers."""
        self._signal(signal.SIGSTOP)
        await_stopped(cast("int", self.pid))
        self.is_paused = True

    def resume(self) -> None:
        """SIGCONT: it goes on from where it was paused."""
        self._signal(signal.SIGCONT)
        self.is_paused = False

    def stop(self) -> None:
        """Kill it and remove its files. It cannot be started again."""
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
        # Somebody else's server may have the port, for as long as ours takes to find that out.
        return bool(facts["process_id"] == self.pid and not facts.get("loading"))

    def _log_end(self) -> str:
        text = (self.folder / "log").read_text(encoding="utf-8", errors="replace")
        return "The end of its log:\n" + "\n".join(text.splitlines()[-_LOG_LINES_SHOWN:])


def program_path(program: str, package: str | None = None) -> str:
    """Where a program is. Never a reason to skip a test: what is missing is to be installed."""
    path = shutil.which(program)
    if path is None:
        raise ServerFailed(
            f"there is no {program} on this machine, and tests against real servers need it; as "
            f"root on Debian or Ubuntu: apt-get install {package or program}"
        )
    return path
