"""Records of a real service: exact over its workers, and out of the way of its checks."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.postgres_server import Postgres
from tests.redis_servers.waiting import until
from tests.service.admin.nodes import secrets_of
from tests.service_process import RULES, Answered, ServiceProcess, ask_on

SECONDS_MAX = 40.0
THREADS = 8
BATCH = 100
# More denials than wait for the database in two workers, in whichever it is that they land.
STORM = 45_000


class Recorded:
    """A service, and what it tells an administrator of its records."""

    def __init__(self, service: ServiceProcess, secret: str) -> None:
        self.service = service
        self._headers = {"Authorization": f"Bearer {secret}"}

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answered:
        """Ask as the administrator."""
        return self.service.ask(method, path, body, {**self._headers, **headers})

    def usage(self) -> dict[tuple[str, str], tuple[int, int, int]]:
        """Of the last day, by subject and rule."""
        answer = self.ask("GET", "/v1/admin/usage?step=day&limit=10000")
        assert answer.status == 200, answer
        return {
            (", ".join(each["subject"]), each["rule"]): (
                *(each["allowed"], each["denied"], each["units"]),
            )
            for each in answer.data["items"]
        }

    def check(self, bodies: list[dict[str, Any]]) -> int:
        """Check all of these from several threads; how many passed."""

        def one_part(part: list[dict[str, Any]]) -> int:
            connection = self.service.connect()
            try:
                answers = [
                    ask_on(connection, "POST", "/v1/check", body, self._headers) for body in part
                ]
            finally:
                connection.close()
            assert {each.status for each in answers} <= {200, 429}
            return sum(each.status == 200 for each in answers)

        parts = [bodies[start::THREADS] for start in range(THREADS)]
        with ThreadPoolExecutor(THREADS) as pool:
            return sum(pool.map(one_part, parts))

    def deny(self, count: int) -> None:
        """So many denials, in batches."""
        one = {"api_key": "greedy", "endpoint": "/v1/orders"}
        connection = self.service.connect()
        for _ in range(count // BATCH):
            body = {"checks": [one] * BATCH}
            answer = ask_on(connection, "POST", "/v1/check/batch", body, self._headers)
            assert answer.status == 200, answer
        connection.close()

    def dropped(self) -> int:
        """As the metrics of all workers tell."""
        text = self.ask("GET", "/metrics").body.decode()
        return sum(
            int(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "tollkeeper_records_dropped_total"
        )


@contextmanager
def recorded(folder: Path, *options: str, workers: int) -> Iterator[Recorded]:
    """A service with tokens."""
    secrets = secrets_of(folder)
    tokens = ("--tokens", str(folder / "tokens.json"))
    with ServiceProcess(RULES, *tokens, *options, workers=workers) as service:
        yield Recorded(service, secrets["admin"])


def test_usage_of_four_workers_adds_up(tmp_path: Path) -> None:
    """Every check is in it once: those of single ones, of batches, and of the last second."""
    with recorded(tmp_path, workers=4) as found:
        bodies = [{"user": str(number % 10), "cost": 1 + number % 2} for number in range(2_000)]
        passed = found.check(bodies)
        assert passed < 2_000
        found.deny(200)
        atomic = {"checks": [{"user": "batch"}, {"user": "batch", "cost": 2}], "atomic": True}
        assert found.ask("POST", "/v1/check/batch", atomic).status == 200

        def all_there() -> bool:
            return sum(allowed + denied for allowed, denied, _ in found.usage().values()) == 2_202

        until(all_there, "all usage is written", SECONDS_MAX, found.usage)
        usage = found.usage()
        users = [each for who, each in usage.items() if who[1] == "users"]
        assert sum(allowed for allowed, _, _ in users) == passed + 2
        assert usage["user:batch", "users"] == (2, 0, 3)
        assert usage["api_key:greedy", "keys"] == (10, 190, 10)
        # 100 an hour for each of ten users: all are spent, to the last unit.
        assert [usage[f"user:{number}", "users"][2] for number in range(10)] == [100] * 10
        denials = found.ask("GET", "/v1/admin/decisions?outcome=denied&limit=1000&rule=keys").data
        assert len(denials["items"]) == 190
        assert found.dropped() == 0
        # What is only in memory is written when it ends.
        found.check([{"tenant": "late", "user": "late"}] * 20)
        assert found.service.end(signal.SIGTERM) == 0
        with sqlite3.connect(found.service.data / "records.db") as database:
            late = "SELECT sum(allowed) FROM tollkeeper_usage WHERE subject = 'user:late'"
            assert database.execute(late).fetchall() == [(20,)]
        database.close()


def test_who_asks_most_is_known_to_whichever_worker_is_asked(tmp_path: Path) -> None:
    """Of all of them, in seconds."""
    with recorded(tmp_path, workers=2) as found:
        found.check([{"user": "hot"}] * 300 + [{"user": f"{number}"} for number in range(60)])

        def told() -> bool:
            seen = [found.ask("GET", "/v1/admin/top?limit=1").data["items"] for _ in range(6)]
            return all(each and each[0]["count"] > 200 for each in seen)

        until(told, "every worker tells of all", SECONDS_MAX)
        top = found.ask("GET", "/v1/admin/top?by=denied&limit=5").data
        assert [(each["subject"], each["rule"]) for each in top["items"]] == [
            (["user:hot"], "users")
        ]


def test_a_locked_file_is_nothing_to_checks(tmp_path: Path) -> None:
    """What does not fit is dropped and counted, answers go on, and then it is written again."""
    with recorded(tmp_path, "--sample", "1", workers=2) as found:
        path = found.service.data / "records.db"
        until(path.exists, "the file is there", SECONDS_MAX)
        found.deny(BATCH)
        until(found.usage, "it is written to", SECONDS_MAX)
        with sqlite3.connect(path, isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")
            found.deny(STORM)
            until(lambda: found.dropped() > 0, "some do not fit", SECONDS_MAX)
            passed = found.check([{"user": "meanwhile"}] * 150)
            assert passed == 100
            other.execute("ROLLBACK")
        other.close()

        def all_there() -> bool:
            usage = found.usage()
            return sum(usage.get(("api_key:greedy", "keys"), (0, 0, 0))[:2]) == BATCH + STORM

        until(all_there, "all usage is written, to the last", SECONDS_MAX, found.usage)
        assert found.usage()["user:meanwhile", "users"] == (100, 50, 100)
        lost = found.dropped()
        kept = BATCH + STORM + 150 - lost

        def decisions() -> int:
            with sqlite3.connect(path) as database:
                [(count,)] = database.execute("SELECT count(*) FROM tollkeeper_decisions")
            database.close()
            return int(count)

        until(lambda: decisions() == kept, "what was kept is written", SECONDS_MAX, decisions)
        assert found.dropped() == lost


def test_a_server_that_stands_still_is_nothing_to_checks(tmp_path: Path) -> None:
    """PostgreSQL is stopped under load, and goes on; checks and the end of the service do too."""
    with Postgres() as server:
        url = server.new_database()
        with recorded(tmp_path, "--record", url, "--sample", "1", workers=2) as found:
            found.deny(BATCH)
            until(found.usage, "it is written to", SECONDS_MAX)
            server.pause()
            try:
                found.deny(STORM)
                until(lambda: found.dropped() > 0, "some do not fit", SECONDS_MAX)
                assert found.check([{"user": "meanwhile"}] * 150) == 100
            finally:
                server.resume()

            def all_there() -> bool:
                usage = found.usage()
                return sum(usage.get(("api_key:greedy", "keys"), (0, 0, 0))[:2]) == BATCH + STORM

            until(all_there, "all usage is written, to the last", 2 * SECONDS_MAX, found.usage)
            server.pause()
            try:
                found.check([{"user": "last"}] * 10)
                assert found.service.end() == 0
            finally:
                server.resume()


def test_without_records_there_are_none(tmp_path: Path) -> None:
    """No file, no thread's log, and a plain answer to whoever asks for them."""
    with recorded(tmp_path, "--record", "off", workers=1) as found:
        found.check([{"user": "1"}] * 5)
        for path in ("usage", "decisions", "top"):
            answer = found.ask("GET", f"/v1/admin/{path}")
            assert (answer.status, answer.data["error"]["code"]) == (404, "NOT_RECORDED")
        assert not list(found.service.data.glob("records.db*"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--record", "mysql://host/name"), "mysql"),
        (("--sample", "2"), "--sample 2 is not between 0 and 1"),
        (("--record-subjects", "some"), "plain, hashed, none"),
        (("--keep-usage", "0"), "--keep-usage 0 is not between 1"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(options: tuple[str, str], words: str) -> None:
    """With what would be right."""
    service = ServiceProcess(RULES, *options)
    service.launch()
    until(lambda: service.pid is None, "it has ended", SECONDS_MAX)
    assert words in service.log_text()


def test_a_database_that_is_away_is_no_reason_not_to_start(tmp_path: Path) -> None:
    """Limits come first; it is said in the log, and to whoever asks for records."""
    gone = f"sqlite:///{tmp_path / 'nowhere' / 'records.db'}"
    with recorded(tmp_path, "--record", gone, workers=1) as found:
        assert found.check([{"user": "1"}] * 5) == 5
        assert found.ask("GET", "/v1/admin/usage").status == 503

        def said() -> bool:
            return "records are not written" in json.dumps(found.service.events())

        until(said, "the log says so", SECONDS_MAX)
