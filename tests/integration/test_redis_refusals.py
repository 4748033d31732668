"""Refusals of a Redis server: each is a clear error, and nothing is charged or half written.

On real servers, from threads and asyncio.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from ratekeeper import Limit
from ratekeeper.core.errors import StoreError, StoreFull, StoreUnavailable
from tests.integration.redis_wires import (
    COUNTED,
    SECONDS_MAX,
    YEAR,
    Client,
    both_wires,
    client,
    configured,
    counted,
    key_of,
    outcome,
)
from tests.redis_servers import Single, User, until
from tests.redis_servers.ports import HOST
from tests.service.http.client import http_service


@pytest.fixture(scope="module")
def server() -> Iterator[Single]:
    """Return the server that the tests of this file share."""
    # By default a primary waits five seconds for more replicas before it copies.
    with Single(lines=["repl-diskless-sync-delay 0"]) as started:
        yield started


def refusal(api: Client, key: str, cost: int = 1) -> StoreError:
    """Return the error that a check raises."""
    found = outcome(api.start(key, cost))
    assert isinstance(found, StoreError)
    return found


@both_wires
def test_a_replica_named_by_the_uri_is_an_error(server: Single, key: str, wire: str) -> None:
    """`redis://` names one server: if it is a replica, no other is looked up. It can read."""
    with Single(lines=[f"replicaof {HOST} {server.port}"]) as replica:
        until(
            lambda: replica.admin.info("replication")["master_link_status"] == "up",
            "the replica is in sync",
            SECONDS_MAX,
        )
        with client(wire, server.uri) as primary_api:
            primary_api.check(key, 10)
        with client(wire, replica.uri) as api:
            error = refusal(api, key)
            assert isinstance(error, StoreUnavailable)
            assert "READONLY" in str(error)
            assert "name the primary, or use redis+sentinel://" in str(error)
            offset = server.admin.info("replication")["master_repl_offset"]
            until(
                lambda: replica.admin.info("replication")["master_repl_offset"] >= offset,
                "the replica has it all",
                SECONDS_MAX,
            )
            assert api.peek(key).remaining == COUNTED.limit - 10
        # A replica that has lost its primary and does not serve stale data.
        replica.admin.config_set("replica-serve-stale-data", "no")
        replica.admin.execute_command("REPLICAOF", HOST, 1)
        with client(wire, replica.uri, deadline_ms=1_500) as api:
            assert "MASTERDOWN" in str(refusal(api, key))


async def _readiness(uri: str) -> dict[str, Any]:
    async with http_service(store=f"{uri}?deadline_ms=5000", on_failure="open") as http:
        assert (await http.check(user="1")).data["degraded"]
        found: dict[str, Any] = (await http("GET", "/readyz")).data["store"]
        return found


async def test_the_service_is_not_healthy_while_the_server_refuses_to_write(server: Single) -> None:
    """/readyz has the error that the checks have: no memory, a replica, too few replicas."""
    with configured(server, maxmemory=1):
        found = await _readiness(server.uri)
        assert not found["healthy"]
        assert "is out of memory (maxmemory)" in found["error"]
    with configured(server, min_replicas_to_write=1):
        found = await _readiness(server.uri)
        assert not found["healthy"]
        assert "min-replicas-to-write" in found["error"]
    with Single() as replica:
        replica.admin.execute_command("REPLICAOF", HOST, server.port)
        found = await _readiness(replica.uri)
        assert not found["healthy"]
        assert "this is a replica" in found["error"]
    async with http_service(store=f"{server.uri}?deadline_ms=5000") as http:
        found = (await http("GET", "/readyz")).data["store"]
        assert found == {"healthy": True, "error": ""}


@both_wires
def test_too_few_replicas_are_an_error(server: Single, key: str, wire: str) -> None:
    """NOREPLICAS: the error names the setting; checks work when it is lifted."""
    with client(wire, server.uri) as api:
        with configured(server, min_replicas_to_write=1):
            error = refusal(api, key)
            assert isinstance(error, StoreUnavailable)
            assert "min-replicas-to-write" in str(error)
            assert api.peek(key).remaining == COUNTED.limit
        assert api.check(key).remaining == COUNTED.limit - 1


@both_wires
def test_a_server_that_cannot_save_is_an_error(key: str, wire: str) -> None:
    """MISCONF: the error names the remedy; checks work after the repair."""
    with (
        Single(lines=["save 3600 1", "enable-protected-configs yes"]) as server,
        client(wire, server.uri) as api,
    ):
        assert api.check(key).allowed
        gone = server.folder / "gone"
        gone.mkdir()
        server.admin.config_set("dir", str(gone))
        shutil.rmtree(gone)
        server.admin.execute_command("BGSAVE")
        until(
            lambda: server.admin.info("persistence")["rdb_last_bgsave_status"] == "err",
            "the server has failed to save",
            SECONDS_MAX,
        )
        error = refusal(api, key)
        assert isinstance(error, StoreUnavailable)
        assert "MISCONF" in str(error)
        assert "repair the disk" in str(error)
        server.admin.config_set("stop-writes-on-bgsave-error", "no")
        assert api.check(key).remaining == COUNTED.limit - 2


@both_wires
def test_a_server_without_memory_raises_store_full(server: Single, key: str, wire: str) -> None:
    """OOM: nothing is half written. Calls that need no memory still work."""
    limits = [
        Limit(3, per=YEAR, algorithm="sliding_window_log"),
        Limit(20, per=YEAR, algorithm="sliding_window_counter"),
        Limit(20, per=YEAR),
    ]
    with client(wire, server.uri, limits) as api:
        assert [api.check(key).allowed for _ in range(4)] == [True, True, True, False]
        api.check(f"{key} half")
        hash_before = _hash(server, f"{key} half")
        with configured(server, maxmemory=1, maxmemory_policy="noeviction"):
            error = refusal(api, f"{key} new")
            assert isinstance(error, StoreFull)
            assert "raise maxmemory" in str(error)
            # A denial and a peek write nothing.
            assert not api.check(key).allowed
            assert api.peek(key).remaining == 0
            assert isinstance(refusal(api, f"{key} half"), StoreFull)
            assert _hash(server, f"{key} half") == hash_before
            assert not _hash(server, f"{key} new")
        assert api.check(f"{key} half").remaining == 1
        assert api.check(f"{key} new").remaining == 2
        assert api.store.stats().refused == 2


def _hash(server: Single, key: str) -> dict[bytes, bytes]:
    with server.client() as raw:
        found: dict[bytes, bytes] = raw.hgetall(key_of(key))
        return found


@both_wires
def test_a_key_of_another_application_is_not_changed(server: Single, key: str, wire: str) -> None:
    """WRONGTYPE: the error says how to avoid the conflict."""
    server.admin.set(key_of(key), "mine")
    with client(wire, server.uri) as api:
        assert "set another prefix=" in str(refusal(api, key))
    assert server.admin.get(key_of(key)) == "mine"


@both_wires
def test_a_rejected_login_names_what_to_check(key: str, wire: str) -> None:
    """No password, a wrong one, a wrong user: a quick error without the secret."""
    who = User("app", "r1ght")
    with Single(password="r00t", users=[who]) as server:
        bare = f"redis://{HOST}:{server.port}/0"
        for options, words in (
            ({}, "NOAUTH"),
            ({"password": "wr0ng"}, "WRONGPASS"),
            ({"username": "app", "password": "wr0ng"}, "WRONGPASS"),
            ({"username": "nobody", "password": "wr0ng"}, "WRONGPASS"),
        ):
            with client(wire, bare, **options) as api:
                for _ in range(3):  # the first meets the server, the others its memory
                    error = refusal(api, key)
                    assert isinstance(error, StoreUnavailable)
                    assert words in str(error)
                    assert "username and password" in str(error)
                    assert not [text for text in _texts(error) if "wr0ng" in text]
        with client(wire, server.uri) as api:
            assert api.check(key).allowed
            # The password is changed meanwhile: connections stay, new ones are rejected.
            server.admin.execute_command("ACL", "SETUSER", "app", "resetpass", ">other")
            server.admin.client_kill_filter(_type="normal", skipme=True)
            until(lambda: "WRONGPASS" in str(outcome(api.start(key))), "is refused", SECONDS_MAX)
            server.admin.execute_command("ACL", "SETUSER", "app", ">r1ght")
            until(api.works, "is let in again", SECONDS_MAX)


def _texts(error: BaseException | None) -> Iterator[str]:
    """Return every message that a traceback would show."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@both_wires
@pytest.mark.parametrize("secret", ["hunter2", "h" * 300])
def test_a_password_that_the_server_repeats_is_in_no_message(
    key: str, wire: str, secret: str
) -> None:
    """A server without AUTH repeats its arguments: they are in no message and no traceback."""
    with (
        Single(lines=['rename-command AUTH ""']) as server,
        client(wire, server.uri, password=secret) as api,
    ):
        for _ in range(2):
            error = refusal(api, key)
            assert "unknown command 'AUTH'" in str(error)
            assert not [text for text in _texts(error) if secret[:7] in text]


@both_wires
def test_a_missing_permission_names_the_permissions_to_add(key: str, wire: str) -> None:
    """NOPERM names the permissions; with exactly those, every call works."""
    with Single(password="r00t", users=[User("app", "pw", "~rk:* +ping")]) as server:
        with client(wire, server.uri, prefix="rk") as api:
            error = refusal(api, key)
            assert isinstance(error, StoreUnavailable)
            assert "NOPERM" in str(error)
        rights = str(error).partition("the user needs ")[2].replace("<prefix>", "rk").split()
        rights = [right.rstrip(",") for right in rights if right[0] in "~+"]
        server.admin.execute_command("ACL", "SETUSER", "app", "reset", "on", ">pw", *rights)
        limits = [Limit(100, per=YEAR, algorithm="sliding_window_log"), Limit(100, per=YEAR)]
        with client(wire, server.uri, limits) as api:
            assert api.check(key, 3).remaining == 97
            assert api.peek(key).remaining == 97
            api.start(key, 1, verb="refund").result()
            api.start(key, 1, verb="grant").result()
            assert api.check(key, 3).remaining in (95, 96)
            api.start(key, verb="reset").result()
        with client(wire, server.uri, prefix="other") as api:
            assert "NOPERM" in str(refusal(api, key))


@both_wires
def test_a_user_without_eval_works_until_the_scripts_are_flushed(key: str, wire: str) -> None:
    """Then NOPERM, and no charge."""
    rights = "~rk:* +evalsha +script|load +hget +hset +hdel +pttl +pexpire +time"
    with (
        Single(password="r00t", users=[User("app", "pw", rights)]) as server,
        client(wire, server.uri) as api,
    ):
        assert api.check(key).allowed
        server.admin.script_flush()
        error = refusal(api, key)
        assert "NOPERM" in str(error)
        assert "+eval " in str(error)
        server.admin.execute_command("ACL", "SETUSER", "app", "+eval")
        assert api.check(key).remaining == COUNTED.limit - 2


@both_wires
def test_a_server_with_too_many_clients_is_an_error(key: str, wire: str) -> None:
    """It sends an error and closes the connection. The error says why; a free place is used."""
    with Single(lines=["maxclients 4"]) as server:
        uri = server.uri
        server.admin.ping()
        others = [server.client() for _ in range(3)]
        for other in others:
            other.ping()
        with client(wire, uri) as api:
            for _ in range(3):
                assert "max number of clients reached" in str(refusal(api, key))
            others.pop().close()
            until(api.works, "it is let in", SECONDS_MAX)
        for other in others:
            other.close()
        until(lambda: counted(uri, key) == 0, "it was not charged", SECONDS_MAX)
