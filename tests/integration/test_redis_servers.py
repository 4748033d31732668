"""Tests of the harness itself: it starts real servers, and leaves no process or file behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.redis_servers import (
    KINDS,
    Server,
    ServerFailed,
    Single,
    Tls,
    User,
    ports,
    running,
    until,
)
from tests.redis_servers import server as server_module

GONE_SECONDS_MAX = 10


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # The process that adopted an orphan may not have reaped it yet.
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")


def wait_gone(pid: int, folder: Path) -> None:
    until(
        lambda: not is_alive(pid) and not folder.exists(),
        f"process {pid} and {folder} are gone",
        GONE_SECONDS_MAX,
    )


def set_and_get(client: redis.Redis) -> None:
    with client:
        client.set("key", "value")
        assert client.get("key") == b"value"


def test_a_server_answers_and_leaves_nothing() -> None:
    """A server stores and returns a value; after the block its process and files are gone."""
    with Single() as server:
        pid, folder, port = server.pid, server.folder, server.port
        assert pid
        set_and_get(redis.Redis.from_url(server.uri))
        assert server.uri == f"redis://127.0.0.1:{port}/0"
        assert folder.is_dir()
    assert not is_alive(pid)
    assert not folder.exists()
    with pytest.raises(redis.ConnectionError):
        server.client().ping()


def test_flush_removes_every_key_of_every_database() -> None:
    """After `flush`, no database has a key."""
    server = running("single")
    assert isinstance(server, Single)
    for database in (0, 1):
        with server.client(db=database) as client:
            client.set("key", "value")
    server.flush()
    assert server.admin.info("keyspace") == {}


def test_a_killed_server_comes_back_empty_on_the_same_port() -> None:
    """Without persistence, a killed server loses its keys and keeps its port."""
    with Single() as server:
        port = server.port
        server.admin.set("key", "value")
        server.kill()
        assert server.pid is None
        with pytest.raises(redis.ConnectionError):
            server.client().ping()
        server.start()
        assert server.port == port
        assert server.admin.get("key") is None


def test_a_killed_server_with_aof_keeps_its_keys() -> None:
    """With AOF, every acknowledged write is on disk."""
    with Single(aof=True) as server:
        server.admin.set("key", "value")
        server.kill()
        server.start()
        assert server.admin.get("key") == "value"


def test_a_paused_server_takes_connections_and_is_silent() -> None:
    """A paused server accepts connections without an answer, and answers once it is resumed."""
    with Single() as server:
        with server.client(socket_timeout=0.05) as client:
            client.ping()
            server.pause()
            with pytest.raises(redis.TimeoutError):
                client.ping()
            server.resume()
        with server.client() as client:
            assert client.ping()


def test_a_paused_server_can_be_stopped() -> None:
    """`stop` ends a paused server without waiting for an answer."""
    with Single() as server:
        pid = server.pid
        server.pause()
    assert pid
    assert not is_alive(pid)


def test_starting_twice_and_pausing_a_stopped_server_fail() -> None:
    """Both are mistakes in a test, and the error names the mistake."""
    with Single() as server, pytest.raises(ServerFailed, match="runs already; kill it first"):
        server.start()
    with pytest.raises(ServerFailed, match="does not run; start it first"):
        server.pause()


def test_a_server_requires_its_password() -> None:
    """The server rejects wrong and missing passwords; the right one may have any characters."""
    password = 'p:a/s@s"?#% \\1'
    with Single(password=password) as server:
        assert server.uri.startswith("redis://:p%3Aa%2Fs%40s%22%3F%23%25%20%5C1@127.0.0.1:")
        set_and_get(redis.Redis.from_url(server.uri))
        for wrong in (None, "wrong"):
            with pytest.raises(redis.AuthenticationError):
                server.client(password=wrong).ping()


def test_a_user_is_held_to_its_rules() -> None:
    """The URI names the first user, and the server applies that user's ACL rules."""
    limited = User("app:1", "s3cr/et", "~rk:* +@all -@dangerous")
    with Single(password="root", users=[limited]) as server:
        assert server.uri.startswith("redis://app%3A1:s3cr%2Fet@")
        with redis.Redis.from_url(server.uri) as client:
            client.set("rk:key", "value")
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.set("key", "value")
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.flushall()
        server.flush()
        assert server.admin.dbsize() == 0


def over_tls(server: Tls, host: str = "127.0.0.1", **options: object) -> redis.Redis:
    """Return a client without the harness' settings; it tries once, not for seconds."""
    once = Retry(NoBackoff(), 0)
    return redis.Redis(host, server.port, **{"ssl": True, "retry": once, **options})


def test_a_tls_server_accepts_only_tls() -> None:
    """Only its own authority verifies it, by name and by address; plain connections fail."""
    with Tls() as server:
        assert server.uri == f"rediss://127.0.0.1:{server.port}/0?tls_ca={server.ca_path}"
        for host in ("127.0.0.1", "localhost"):
            set_and_get(over_tls(server, host, ssl_ca_certs=str(server.ca_path)))
        with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            over_tls(server).ping()
        with pytest.raises(redis.ConnectionError):
            over_tls(server, ssl=False).ping()
        server.flush()
        assert server.admin.dbsize() == 0
    assert not server.ca_path.exists()


def test_a_server_requires_a_client_certificate() -> None:
    """A client without a certificate, or with another authority's, cannot connect."""
    with Tls(client_certificates=True) as server, Tls() as other:
        assert server.uri == (
            f"rediss://127.0.0.1:{server.port}/0"
            f"?tls_ca={server.ca_path}&tls_cert={server.cert_path}&tls_key={server.key_path}"
        )
        trusted = {"ssl_ca_certs": str(server.ca_path)}
        own = {"ssl_certfile": str(server.cert_path), "ssl_keyfile": str(server.key_path)}
        set_and_get(over_tls(server, **trusted, **own))
        others = {"ssl_certfile": str(other.cert_path), "ssl_keyfile": str(other.key_path)}
        for wrong in ({}, others):
            with pytest.raises(redis.ConnectionError):
                over_tls(server, **trusted, **wrong).ping()


def test_tls_with_a_password_and_a_restart() -> None:
    """A TLS server may have a password, and keeps its certificates after a kill."""
    with Tls(password="secret") as server:
        assert server.uri.startswith("rediss://:secret@127.0.0.1:")
        server.kill()
        server.start()
        set_and_get(server.client())


def test_further_configuration_lines_apply() -> None:
    """A test may use any setting of the server."""
    with Single(lines=["maxmemory 5mb", "maxmemory-policy noeviction"]) as server:
        assert server.admin.config_get("maxmemory*")["maxmemory"] == str(5 << 20)


def test_a_server_that_does_not_start_shows_its_log() -> None:
    """The error holds the end of the log, because the harness removes the folder."""
    broken = Single(lines=["no-such-setting 1"])
    with pytest.raises(ServerFailed, match=r"(?s)did not start.*'no-such-setting 1'"), broken:
        pass
    assert not broken.folder.exists()


def test_another_port_is_tried_when_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process takes the port first, the harness takes another port."""
    with Single() as first:
        chosen = iter([first.port, first.port, ports.free_port()])
        monkeypatch.setattr(server_module, "free_port", lambda: next(chosen))
        with Single() as second:
            assert second.port != first.port
            second.admin.set("key", "value")
            assert first.admin.dbsize() == 0


def test_a_missing_program_fails_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A missing program fails the test with an install command, and never skips it."""
    server = Server("redis-server", ["port {port}"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerFailed, match="apt-get install redis-server"), server:
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_started_once(kind: str) -> None:
    """`running` returns one shared server for each kind, because a start takes time."""
    server = running(kind)
    assert running(kind) is server
    assert [other for other in KINDS if running(other) is server] == [kind]
    server.flush()


def test_an_unknown_kind_is_rejected() -> None:
    """The error lists the known kinds."""
    with pytest.raises(ValueError, match="kind='double' is unknown; there are single, "):
        running("double")


ENDINGS = {
    "as it should": "",
    "by an error": "raise SystemExit(3)",
    "interrupted": "os.kill(os.getpid(), signal.SIGINT)",
    "terminated": "os.kill(os.getpid(), signal.SIGTERM)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left_when_the_process_ends(ending: str) -> None:
    """However a process ends, its servers and its folder are gone, even a paused server."""
    program = f"""
import os, signal
from tests.redis_servers import running, Single
paused = Single()
paused.start()
paused.pause()
server = running("single")
print(server.pid, paused.pid, server.folder.parent, flush=True)
{ENDINGS[ending]}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, stdout=subprocess.PIPE, text=True, timeout=60
    )
    pid, paused_pid, folder = done.stdout.split()
    wait_gone(int(pid), Path(folder))
    wait_gone(int(paused_pid), Path(folder))


def test_a_forked_child_stops_nothing() -> None:
    """The end of a forked child does not stop its parent's servers."""
    program = """
import os, sys
from tests.redis_servers import running
server = running("single")
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert server.admin.ping() and server.folder.is_dir()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_server_outlives_the_thread_that_started_it() -> None:
    """A server runs on after the end of its thread, because fixtures may run in any thread."""
    program = """
from threading import Thread
from tests.redis_servers import running
starter = Thread(target=running, args=("single",))
starter.start()
starter.join()
assert running("single").admin.ping()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
