"""The PostgreSQL harness: a real server that starts, is killed, restarts, and is removed."""

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
    """Run a separate server, for tests that stop it."""
    with Postgres() as started:
        yield started


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_databases_are_new_and_empty() -> None:
    """Two calls return two databases without tables."""
    server = running_postgres()
    names = [server.new_database().rpartition("/")[2] for _ in range(2)]
    assert len(set(names)) == 2
    for name in names:
        assert server.run("SELECT count(*) FROM pg_stat_user_tables", name) == "0"


def test_a_process_has_one_shared_server() -> None:
    """Every caller gets the same server, running."""
    assert running_postgres() is running_postgres()
    assert running_postgres().pid


def test_it_does_not_run_as_root(server: Postgres) -> None:
    """This holds even if root runs the tests."""
    assert Path(f"/proc/{server.pid}").stat().st_uid != 0


def test_sql_that_fails_is_an_error() -> None:
    """The error contains the server's message."""
    with pytest.raises(ServerFailed, match="division by zero"):
        running_postgres().run("SELECT 1/0")


@pytest.mark.parametrize("end", ["kill", "shut_down"])
def test_committed_data_survives_a_restart(server: Postgres, end: str) -> None:
    """The restarted server has the same port and a new process."""
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


def test_a_running_server_cannot_be_started_again(server: Postgres) -> None:
    """Starting it again is an error, so that two servers never use one folder."""
    with pytest.raises(ServerFailed, match="runs already; kill it first"):
        server.start()


def test_a_paused_server_can_be_resumed(server: Postgres) -> None:
    """Its processes stop, and then continue."""
    server.pause()
    try:
        assert "\nState:\tT" in Path(f"/proc/{server.pid}/status").read_text()
    finally:
        server.resume()
    assert server.run("SELECT 1") == "1"


def test_nothing_is_left_after_stop() -> None:
    """Neither processes nor files remain."""
    server = Postgres()
    with server:
        pid = server.pid
        assert pid is not None
        assert server.folder.exists()
    assert not exists(pid)
    assert not server.folder.exists()


def test_nothing_is_left_of_a_killed_process() -> None:
    """The watchdog process stops the server and removes its folder."""
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
    # 56 bytes that only another start in this folder would remove.
    subprocess.run(["ipcrm", "-m", shared_memory], check=True)


def test_a_missing_program_names_its_package() -> None:
    """The error has the command that installs it."""
    with pytest.raises(ServerFailed, match="apt-get install postgresql"):
        program("pg_no_such_program")
