"""A real PostgreSQL on loopback, for tests.

    running_postgres().new_database()   # the URL of an empty database on the shared server

    with Postgres() as server:          # a server of its own, to be shut down and killed
        Repository.open(server.new_database())

Like `redis_servers`, it uses the programs of Debian's package, a free port and a temporary folder,
and is removed when the process ends, however it ends. PostgreSQL refuses to run as root, so for
root it runs as another user, who owns the folder.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote

from tests.redis_servers.ports import HOST, free_port
from tests.redis_servers.scratch import scratch
from tests.redis_servers.server import ServerFailed, Startable
from tests.redis_servers.waiting import NotInTime, await_stopped, until

# For a busy machine; initdb takes 1 s, a start 100 ms.
INIT_SECONDS_MAX = 120.0
READY_SECONDS_MAX = 60.0
SHUT_DOWN_SECONDS_MAX = 20.0
PSQL_SECONDS_MAX = 60.0
_STARTS_TRIED_MAX = 20
_LOG_LINES_SHOWN = 20

# Where the packages of Debian and Ubuntu put them; only some are also on the PATH.
_DEBIAN_FOLDERS = Path("/usr/lib/postgresql")
# The user that runs the server if we are root: that of the package, or one without permissions.
_USERS = ("postgres", "nobody")

USER = "postgres"
PASSWORD = "s3:cr/e@t?#%1"  # with characters that a URL must escape
# Power loss is not tested, so nothing waits for the disk.
_SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "timezone": "Europe/Berlin",  # not UTC, so that tests find wrong time zones
}

_PORT_TAKEN = "could not bind"
_empty_lock = Lock()

# A server that was killed leaves backends behind, which find that out and end.
_STILL_ENDING = ("is still in use", "lock file")


class Postgres(Startable):
    """One server, empty at first. A `with` block starts and stops it."""

    def __init__(self) -> None:
        self.port = 0
        self.folder = scratch().new_folder("postgres")
        self._data = self.folder / "data"
        self._identity = _identity()
        self._process: subprocess.Popen[bytes] | None = None
        self._was_ready = False
        self._databases = count(1)

    @property
    def pid(self) -> int | None:
        """The process id; None if the server does not run."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    @property
    def shared_memory(self) -> int:
        """The number of the segment by which it sees whether another server uses its folder."""
        line = (self._data / "postmaster.pid").read_text(encoding="utf-8").splitlines()[6]
        return int(line.split()[1])

    def url(self, database: str = "postgres") -> str:
        """Return the URL of a database, with user and password."""
        return f"postgresql://{USER}:{quote(PASSWORD, safe='')}@{HOST}:{self.port}/{database}"

    def new_database(self) -> str:
        """Create an empty database, and return its URL."""
        name = f"rules_{next(self._databases)}"
        self.run(f"CREATE DATABASE {name}")
        return self.url(name)

    def run(self, sql: str, database: str = "postgres") -> str:
        """Return what psql prints for this SQL, unaligned and without headings. Raises
        ServerFailed.
        """
        arguments = ["--no-psqlrc", "--quiet", "--tuples-only", "--no-align"]
        where = ["--host", HOST, "--port", str(self.port), "--username", USER]
        done = subprocess.run(
            [program("psql"), *arguments, *where, "--set=ON_ERROR_STOP=1", "-c", sql, database],
            env={**os.environ, "PGPASSWORD": PASSWORD},
            capture_output=True,
            check=False,
            text=True,
            timeout=PSQL_SECONDS_MAX,
        )
        if done.returncode:
            raise ServerFailed(f"psql could not run this: {sql}\n{done.stderr}")
        return done.stdout.strip()

    def start(self) -> None:
        """Start the server and wait until it is ready. After `kill`, it keeps its port and data."""
        if self.pid:
            raise ServerFailed(f"PostgreSQL on port {self.port} runs already; kill it first")
        if not self._data.exists():
            self._make_cluster()
        for _ in range(_STARTS_TRIED_MAX):
            logged = self._log_length()
            self._launch()
            until(
                lambda: self.pid is None or self._is_ready(),
                f"PostgreSQL is ready on port {self.port}",
                READY_SECONDS_MAX,
                self._log_end,
            )
            if self.pid:
                self._was_ready = True
                return
            logged_text = self._log()[logged:]
            taken = _PORT_TAKEN in logged_text and not self._was_ready
            if not taken and not any(words in logged_text for words in _STILL_ENDING):
                break
        raise ServerFailed(f"PostgreSQL on port {self.port} did not start. {self._log_end()}")

    def shut_down(self) -> None:
        """Stop the server cleanly; it can be started again."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL the server; uncommitted data is lost. It can be started again."""
        # All its processes: one that outlives the main process for a moment could still commit.
        if self.pid is not None:
            self._signal_all(signal.SIGSTOP)
            self._signal_all(signal.SIGKILL)
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP all its processes: connections stay open without an answer."""
        for pid in self._signal_all(signal.SIGSTOP):
            await_stopped(pid)

    def resume(self) -> None:
        """SIGCONT: continue after `pause`."""
        self._signal_all(signal.SIGCONT)

    def stop(self) -> None:
        """Stop the server at once and remove its files. It cannot be started again."""
        self._end(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make_cluster(self) -> None:
        """Copy the files of an empty server, which initdb makes once in this process."""
        # The user that runs the server must reach its folder, and may see nothing else on the way.
        scratch().folder.chmod(0o711)
        if self._identity:
            os.chown(self.folder, self._identity["user"], self._identity["group"])
        with _empty_lock:
            empty = scratch().folder / "postgres-empty"
            if not empty.exists():
                self._initialise()
                subprocess.run(["cp", "-a", self._data, empty], check=True)
                return
        subprocess.run(["cp", "-a", empty, self._data], check=True)

    def _initialise(self) -> None:
        password = self.folder / "password"
        password.write_text(f"{PASSWORD}\n", encoding="utf-8")
        done = subprocess.run(
            [
                *(program("initdb"), "-D", self._data, "-U", USER, "--pwfile", password),
                *("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"),
            ],
            cwd=self.folder,
            capture_output=True,
            check=False,
            text=True,
            timeout=INIT_SECONDS_MAX,
            **self._identity,
        )
        if done.returncode:
            raise ServerFailed(f"initdb failed: {done.stderr}")

    def _launch(self) -> None:
        if not self._was_ready:
            self.port = free_port()
        settings = {**_SETTINGS, "port": str(self.port)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [program("postgres"), "-D", self._data, *options],
                cwd=self.folder,
                process_group=scratch().process_group,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                **self._identity,
            )
        scratch().stop_at_exit(self, self.stop)

    def _is_ready(self) -> bool:
        """Return True if the server has written that it is ready, with its own process id."""
        try:
            lines = (self._data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _end(self, number: int) -> None:
        if self._process is not None and self.pid:
            self._process.send_signal(number)
            try:
                until(lambda: self.pid is None, "PostgreSQL ends", SHUT_DOWN_SECONDS_MAX)
            except NotInTime:
                self._process.kill()
                self._process.wait()
        scratch().forget(self)

    def _signal_all(self, number: int) -> list[int]:
        if self.pid is None:
            raise ServerFailed(f"PostgreSQL on port {self.port} does not run; start it first")
        pids = [self.pid, *_children(self.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):  # a worker of the server's that has just ended
                os.kill(pid, number)
        return pids

    def _log(self) -> str:
        path = self.folder / "log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _log_length(self) -> int:
        return len(self._log())

    def _log_end(self) -> str:
        lines = self._log().splitlines()[-_LOG_LINES_SHOWN:]
        return "The end of its log:\n" + "\n".join(lines)


def program(name: str) -> str:
    """Return the path of a program of PostgreSQL; of several versions, the newest."""
    found = shutil.which(name)
    if found:
        return found
    installed = sorted(_DEBIAN_FOLDERS.glob(f"*/bin/{name}"), key=_major_version)
    if not installed:
        raise ServerFailed(
            f"there is no {name} on this machine, and tests against a real PostgreSQL need it; as "
            f"root on Debian or Ubuntu: apt-get install postgresql"
        )
    return str(installed[-1])


def _major_version(path: Path) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", path.parts[-3])]


def _identity() -> dict[str, Any]:
    """Return subprocess arguments for another user than root; empty if we are not root."""
    if os.geteuid() != 0:
        return {}
    for name in _USERS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise ServerFailed(f"PostgreSQL does not run as root, and there is no user {_USERS}")


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    return [int(child) for child in listed.split()]


_lock = Lock()
_running: Postgres | None = None


def running_postgres() -> Postgres:
    """Return the shared server of this process; the first call starts it.

    Everyone shares it: use a new database each time, and to kill one, start one of your own.
    """
    global _running  # noqa: PLW0603 - one for each process is the point
    with _lock:
        if _running is None:
            made = Postgres()
            made.start()
            _running = made
        return _running
