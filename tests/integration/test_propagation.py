"""A change reaches every node: by push, by polling, after an outage, and under load.

The limit in a decision identifies the version. Each test leaves nodes a single way to learn about
a change, so a change that is in force came that way. The times are printed.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ratekeeper import Limit, Limiter, Request, open_store
from ratekeeper.control.follow import announce
from ratekeeper.control.repository import Repository
from ratekeeper.rules.document.model import Document, Rule
from tests.postgres_server import Postgres, running_postgres
from tests.redis_servers import running, until
from tests.redis_servers.ports import HOST, free_port

NODES = 2
CHANGES = 3
# Never reached: a denial under load would be a defect.
LIMIT = 900_000_000
# No node polls while a test runs, so every change arrives by push.
NEVER_S = 600.0
# The time for a start, or to catch up after an outage, on a busy machine.
SECONDS_MAX = 60.0

# Makes the notifications of a writer disappear.
LOSE_NOTIFICATIONS = """
CREATE FUNCTION public.pg_notify(text, text) RETURNS void LANGUAGE sql AS 'SELECT';
"""


def document(number: int) -> Document:
    """Return a version whose limit and rule id contain its number."""
    limit = LIMIT + number
    return Document(rules=(Rule(f"limit-{limit}", ("user",), (Limit(limit, per=1),)),))


class FollowingNode:
    """A process that follows the rules, and the lines that it has printed."""

    def __init__(self, **options: Any) -> None:
        self.lines: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.rules_node", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(json.loads(line))

    def await_line(self, what: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a line for which the condition holds, and return it."""
        return until(
            lambda: next((each for each in list(self.lines) if condition(each)), None),
            f"a node prints {what}",
            SECONDS_MAX,
            lambda: self.lines[-3:],
        )

    def await_number(self, number: int) -> int:
        """Return when a version came into force on this node, in nanoseconds."""
        line = self.await_line(
            f"version {number} in force", lambda it: it.get("limit") == LIMIT + number
        )
        return int(line["at_ns"])

    def last_line(self) -> dict[str, Any]:
        """Return the last line."""
        return self.lines[-1]

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()  # a worker that it has forked ends with its input
        self._end()

    def finish(self) -> dict[str, Any]:
        """End the process, and return its last line."""
        assert self._process.stdin is not None
        if self._process.poll() is None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        self._end()
        assert self._process.returncode == 0
        return self.lines[-1]

    def _end(self) -> None:
        self._process.wait(SECONDS_MAX)
        self._reader.join(SECONDS_MAX)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def fleet(nodes: int = NODES, **options: Any) -> Iterator[list[FollowingNode]]:
    """Run nodes that all follow version 1; they must end without an error."""
    started = [FollowingNode(**options) for _ in range(nodes)]
    try:
        for node in started:
            node.await_number(1)
        yield started
    except BaseException:
        for node in started:
            node.kill()
        raise
    for node in started:
        node.finish()


@asynccontextmanager
async def editing(url: str) -> AsyncIterator[Editor]:
    """Open the rules in a database, with a first version."""
    async with await Repository.open(url) as repository:
        editor = Editor(repository)
        if await repository.number() == 0:
            await editor.change()
        yield editor


class Editor:
    """Applies one version after the other."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    async def change(self) -> int:
        """Apply the next version, and return its number."""
        number = await self._repository.number()
        made = await self._repository.apply(document(number + 1), author="ann", expected=number)
        assert made.number == number + 1
        return made.number


async def await_changes(
    name: str, change: Callable[[], Awaitable[int]], nodes: list[FollowingNode]
) -> None:
    """Make changes one by one; each comes into force on all nodes. Print how long the last took."""
    for _ in range(CHANGES):
        began_ns = time.time_ns()
        number = await change()
        at_ns = [await asyncio.to_thread(node.await_number, number) for node in nodes]
    print(f"\n{name}: {len(nodes)} nodes, {(max(at_ns) - began_ns) / 1e6:.0f} ms")


async def test_push_on_postgresql() -> None:
    """LISTEN/NOTIFY alone puts a change into force on all nodes."""
    url = running_postgres().new_database()
    async with editing(url) as editor:
        with fleet(rules=url, poll=NEVER_S) as nodes:
            await await_changes("push, PostgreSQL", editor.change, nodes)


@pytest.mark.parametrize("kind", ["single", "cluster"])
async def test_push_through_redis(kind: str, tmp_path: Path) -> None:
    """A message through the store does the same for a database that cannot push."""
    url = f"sqlite:///{tmp_path}/rules.db"
    uri = running(kind).uri
    store = open_store(uri, deadline_ms=10_000)
    async with editing(url) as editor:

        async def change() -> int:
            number = await editor.change()
            assert await asyncio.to_thread(announce, store, number)
            return number

        with fleet(rules=url, store=uri, poll=NEVER_S) as nodes:
            await await_changes(f"push, Redis ({kind})", change, nodes)
    store.close()


@pytest.mark.parametrize("pushing", ["PostgreSQL", "Redis"])
async def test_push_reaches_forked_workers(pushing: str, tmp_path: Path) -> None:
    """Each worker of a server that forks after loading has its own connections."""
    uri = running("single").uri
    store = open_store(uri, deadline_ms=10_000)
    sqlite = f"sqlite:///{tmp_path}/rules.db"
    url = running_postgres().new_database() if pushing == "PostgreSQL" else sqlite
    async with editing(url) as editor:

        async def change() -> int:
            number = await editor.change()
            if pushing == "Redis":
                await asyncio.to_thread(announce, store, number)
            return number

        with fleet(rules=url, store=uri, poll=NEVER_S, fork=True) as nodes:
            # A worker reads the rules once when it starts, so this version needs no push.
            number = await change()
            for node in nodes:
                await asyncio.to_thread(node.await_number, number)
            await await_changes(f"push, {pushing}, forked", change, nodes)
    store.close()


async def test_polling_without_push(tmp_path: Path) -> None:
    """SQLite cannot push."""
    url = f"sqlite:///{tmp_path}/rules.db"
    async with editing(url) as editor:
        with fleet(nodes=1, rules=url, poll=0.2) as nodes:
            await await_changes("polling every 0.2 s, SQLite", editor.change, nodes)


async def test_polling_when_notifications_are_lost() -> None:
    """On PostgreSQL, a node then finds a change when it polls."""
    server = running_postgres()
    url = server.new_database()
    name = url.rpartition("/")[2]
    server.run(LOSE_NOTIFICATIONS, name)
    server.run(f"ALTER DATABASE {name} SET search_path = public, pg_catalog")
    async with editing(url) as editor:
        with fleet(nodes=1, rules=url, poll=0.2) as nodes:
            await await_changes("polling every 0.2 s, PostgreSQL", editor.change, nodes)


async def test_a_replaced_file(tmp_path: Path) -> None:
    """A document on disk is replaced by a rename."""
    path = tmp_path / "limits.yaml"
    numbers = iter(range(1, 1_000))

    async def change() -> int:
        number = next(numbers)
        limit = LIMIT + number
        new = tmp_path / "new"
        new.write_text(
            f"version: 1\nrules: [{{id: limit-{limit}, by: user, limits: {limit}/second}}]\n"
        )
        new.rename(path)
        return number

    await change()
    with fleet(nodes=1, rules=str(path)) as nodes:
        await await_changes("a file", change, nodes)


async def test_a_database_outage(tmp_path: Path) -> None:
    """Nodes keep the last rules, start from a snapshot, and catch up afterwards."""
    with Postgres() as server:
        url = server.new_database()
        place = str(tmp_path / "rules.snapshot")
        async with editing(url) as editor:
            pass
        with fleet(rules=url, snapshot=place) as nodes:
            server.shut_down()
            for node in nodes:
                node.await_line(
                    "that the database is unavailable", lambda it: bool(it.get("error"))
                )
                assert node.last_line()["limit"] == LIMIT + 1
            with fleet(nodes=1, rules=url, snapshot=place) as (late,):
                assert late.lines[0]["origin"] == "snapshot"
                assert late.lines[0]["version"] == "1"
                server.start()
                async with editing(url) as editor:
                    began_s = time.monotonic()
                    number = await editor.change()
                    for node in (*nodes, late):
                        node.await_number(number)
                        node.await_line(
                            "no error",
                            lambda it: it.get("version") == "2" and not it["error"],
                        )
                took_s = time.monotonic() - began_s
                print(f"\nafter an outage: all nodes caught up {took_s:.1f} s after the change")
                assert late.last_line()["origin"] == "source"


async def test_a_start_without_database_and_snapshot_fails(tmp_path: Path) -> None:
    """The process exits at once instead of allowing every request."""
    with Postgres() as server:
        url = server.new_database()
    ran = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tests.integration.rules_node", json.dumps({"rules": url})],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS_MAX,
    )
    assert ran.returncode == 1
    assert "StoreUnavailable: postgresql://127.0.0.1" in ran.stderr


async def test_changes_under_load() -> None:
    """Two threads check without a pause: no check fails, and each uses exactly one version."""
    url = running_postgres().new_database()
    async with editing(url) as editor:
        node = FollowingNode(rules=url, poll=NEVER_S, threads=2)
        try:
            await asyncio.to_thread(node.await_number, 1)
            for _ in range(6):
                number = await editor.change()
                await asyncio.to_thread(node.await_number, number)
        except BaseException:
            node.kill()
            raise
        report = node.finish()
    assert report["failures"] == []
    assert set(report["limits"]) <= {LIMIT + each for each in range(1, number + 1)}
    print(f"\nunder load: {report['checks']:,} checks, {len(report['limits'])} versions seen")
    assert report["checks"] > 1_000
    assert len(report["limits"]) > number // 2


async def test_closing_does_not_wait_for_a_database_that_hangs() -> None:
    """The server is paused, and `close` returns."""
    with Postgres() as server:
        url = server.new_database()
        async with editing(url):
            pass
        limiter = await asyncio.to_thread(Limiter.from_rules, url, poll=0.05)
        await asyncio.sleep(0.2)
        server.pause()
        try:
            await asyncio.wait_for(asyncio.to_thread(limiter.close), SECONDS_MAX)
        finally:
            server.resume()
        # After the server resumes, no thread is left.
        await asyncio.to_thread(
            until,
            lambda: not any(each.name == "ratekeeper-rules" for each in threading.enumerate()),
            "the thread that followed the rules ends",
            SECONDS_MAX,
        )


async def test_a_killed_node_leaves_a_complete_snapshot(tmp_path: Path) -> None:
    """SIGKILL during changes: the snapshot is one complete version."""
    url = f"sqlite:///{tmp_path}/rules.db"
    place = str(tmp_path / "rules.snapshot")
    away = f"postgresql://{HOST}:{free_port()}/rules"
    chance = random.Random(7)
    async with editing(url) as editor:
        for _ in range(2):
            node = FollowingNode(rules=url, snapshot=place, poll=0.05)
            try:
                await asyncio.to_thread(node.await_line, "anything", bool)
                seen = node.last_line()["limit"]
                for _ in range(chance.randrange(2, 8)):
                    number = await editor.change()
                await asyncio.sleep(chance.uniform(0, 0.1))
            finally:
                node.kill()
            limiter = Limiter.from_rules(away, snapshot=place, follow=False)
            status = limiter.rules_status()
            limit = limiter.check(Request(user="42")).limit
            assert status.origin == "snapshot"
            assert limit == LIMIT + int(status.version)
            assert seen <= limit <= LIMIT + number
            limiter.close()
