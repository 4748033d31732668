"""The harness: a real PostgreSQL that starts, is killed, starts again, and leaves nothing over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres_server import Postgres, program, running_postgres
from tests.redis_servers import ServerFailed, until


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """One for the tests that end it."""
    with Postgres() as started:
        yield started


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_databases_are_new_and_empty() -> None:
    """Two calls, two databases, no tables."""
    server = running_postgres()
    names = [server.new_database().rpartition("/")[2] for _ in range(2)]
    assert len(set(names)) == 2
    for name in names:
        assert server.run("SELECT count(*) FROM pg_stat_user_tables", name) == "0"


def test_a_process_has_one() -> None:
    """Whoever asks gets the same, running."""
    assert running_postgres() is running_postgres()
    assert running_postgres().pid


def test_it_does_not_run_as_root(server: Postgres) -> None:
    """Whoever runs the tests."""
    assert Path(f"/proc/{server.pid}").stat().st_uid != 0


def test_sql_that_fails_is_an_error() -> None:
    """With what the server says."""
    with pytest.raises(ServerFailed, match="division by zero"):
        running_postgres().run("SELECT 1/0")


@pytest.mark.parametrize("end", ["kill", "shut_down"])
def test_what_was_committed_is_there_after_a_restart(server: Postgres, end: str) -> None:
    """On the same port, in a new process."""
    name = server.new_database().rpartition("/")[2]
    server.run("CREATE TABLE kept AS SELECT 7 AS number", name)
    port, pid = server.port, server.pid
    getattr(server, end)()
    assert server.pid is None
    with pytest.raises(ServerFailed, match="could not run this"):
        server.run("SELECT 1")
    server.start()
    assert (server.port, server.pid != pid) == (port, True)
    assert server.run("SELECT number FROM kept", name) == "7"


def test_one_that_runs_is_not_started_again(server: Postgres) -> None:
    """It says so, instead of two servers on one folder."""
    with pytest.raises(ServerFailed, match="runs already; kill it first"):
        server.start()


def test_a_paused_server_goes_on(server: Postgres) -> None:
    """Its processes stand still, then work again."""
    server.pause()
    try:
        assert "\nState:\tT" in Path(f"/proc/{server.pid}/status").read_text()
    finally:
        server.resume()
    assert server.run("SELECT 1") == "1"


def test_nothing_is_left_after_stop() -> None:
    """Neither processes nor files."""
    server = Postgres()
    with server:
        pid = server.pid
        assert pid is not None
        assert server.folder.exists()
    assert not exists(pid)
    assert not server.folder.exists()


def test_nothing_is_left_of_a_killed_process() -> None:
    """The guard ends the server and removes its folder when nobody else can."""
    script = (
        "from tests.postgres_server import running_postgres as r; import sys;"
        "print(r().pid, r().folder, r().shared_memory, flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        pid, folder, shared_memory = child.stdout.readline().split()
        child.send_signal(signal.SIGKILL)
    until(lambda: not exists(int(pid)), "the server is gone", 20)
    until(lambda: not Path(folder).exists(), "its folder is gone", 20)
    # 56 bytes that the next start on this folder would have removed; there will be none.
    subprocess.run(["ipcrm", "-m", shared_memory], check=True)


def test_a_program_that_is_missing_says_what_to_install() -> None:
    """The package's name is in the error."""
    with pytest.raises(ServerFailed, match="apt-get install postgresql"):
        program("pg_no_such_program")
