"""Records of a real service: exact across its workers, without an effect on its checks.

Each worker writes its own records at its own pace, and usage and decisions may be written in
different transactions. So each test waits for the very value that it asserts: a value that another
worker writes, or that is written in another transaction, may appear seconds later.
"""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.cli.stub_service import run
from tests.postgres_server import Postgres
from tests.redis_servers.waiting import until
from tests.service.admin.client import secrets_of
from tests.service_process import RULES, Answered, ServiceProcess, ask_on

# A writer that failed retries after 30 s at the latest.
SECONDS_MAX = 75.0
THREADS = 8
BATCH = 100
# More denials than two workers can keep in memory, whichever worker receives them.
STORM = 45_000

# Allowed requests, denied requests and units, by subject and rule.
UsageCounts = dict[tuple[str, str], tuple[int, int, int]]


class RecordedService:
    """A service, and the records that its admin API returns."""

    def __init__(self, service: ServiceProcess, secret: str) -> None:
        self.service = service
        self.secret = secret
        self._headers = {"Authorization": f"Bearer {secret}"}

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Answered:
        """Send a request as the administrator."""
        return self.service.ask(method, path, body, {**self._headers, **headers})

    def usage(self) -> UsageCounts:
        """Return the usage of the last day."""
        answer = self.send("GET", "/v1/admin/usage?step=day&limit=10000")
        assert answer.status == 200, answer
        return {
            (", ".join(each["subject"]), each["rule"]): (
                *(each["allowed"], each["denied"], each["units"]),
            )
            for each in answer.data["items"]
        }

    def await_usage(self, expected: UsageCounts) -> None:
        """Wait until the usage of these subjects is exactly this."""
        until(
            lambda: expected.items() <= self.usage().items(),
            f"the usage is {expected}",
            SECONDS_MAX,
            self.usage,
        )

    def check(self, bodies: list[dict[str, Any]]) -> int:
        """Check all of these from several threads; return how many were allowed."""

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
        """Send this many checks of one key in batches; the first ten ever are allowed."""
        one = {"api_key": "greedy", "endpoint": "/v1/orders"}
        connection = self.service.connect()
        for _ in range(count // BATCH):
            body = {"checks": [one] * BATCH}
            answer = ask_on(connection, "POST", "/v1/check/batch", body, self._headers)
            assert answer.status == 200, answer
        connection.close()

    def dropped(self) -> int:
        """Return the number of dropped records, as the metrics of all workers report it."""
        text = self.send("GET", "/metrics").body.decode()
        return sum(
            int(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "ratekeeper_records_dropped_total"
        )


@contextmanager
def recorded(
    folder: Path, *options: str, workers: int, rules: Mapping[str, Any] = RULES
) -> Iterator[RecordedService]:
    """Run a service with tokens."""
    secrets = secrets_of(folder)
    tokens = ("--tokens", str(folder / "tokens.json"))
    with ServiceProcess(rules, *tokens, *options, records=True, workers=workers) as service:
        yield RecordedService(service, secrets["admin"])


def test_usage_of_four_workers_adds_up(tmp_path: Path) -> None:
    """Every check is counted once: single checks, batches, and those just before shutdown."""
    users, keys = RULES["rules"]
    # With 100 an hour, a busy machine would see a unit refilled.
    rules = {**RULES, "rules": [{**users, "limits": ["100/day"]}, {**keys, "limits": ["10/day"]}]}
    with recorded(tmp_path, workers=4, rules=rules) as found:
        bodies = [{"user": str(number % 10), "cost": 1 + number % 2} for number in range(1_100)]
        passed = found.check(bodies)
        assert passed < 1_100
        found.deny(200)
        atomic = {"checks": [{"user": "batch"}, {"user": "batch", "cost": 2}], "atomic": True}
        assert found.send("POST", "/v1/check/batch", atomic).status == 200

        def all_written() -> bool:
            return sum(allowed + denied for allowed, denied, _ in found.usage().values()) == 1_302

        until(all_written, "all usage is written", SECONDS_MAX, found.usage)
        usage = found.usage()
        users = [each for who, each in usage.items() if who[1] == "users"]
        assert sum(allowed for allowed, _, _ in users) == passed + 2
        assert usage["user:batch", "users"] == (2, 0, 3)
        assert usage["api_key:greedy", "keys"] == (10, 190, 10)
        # 100 a day for each of ten users: each has spent every unit.
        assert [usage[f"user:{number}", "users"][2] for number in range(10)] == [100] * 10

        def denials() -> int:
            path = "/v1/admin/decisions?outcome=denied&limit=1000&rule=keys"
            return len(found.send("GET", path).data["items"])

        until(lambda: denials() == 190, "all denials are written", SECONDS_MAX, denials)
        assert found.dropped() == 0
        # A shutdown writes the records that are still in memory.
        found.check([{"tenant": "late", "user": "late"}] * 20)
        assert found.service.end(signal.SIGTERM) == 0
        with sqlite3.connect(found.service.data / "records.db") as database:
            late = "SELECT sum(allowed) FROM ratekeeper_usage WHERE subject = 'user:late'"
            assert database.execute(late).fetchall() == [(20,)]
        database.close()


def test_limits_of_calls_are_recorded_apart_from_rules_and_lists(tmp_path: Path) -> None:
    """A caller may name its limits like a rule or a list; the records of both stay the same."""
    rules = {**RULES, "deny": ["user:eve"]}
    names = ("users", "(deny)", "limit:users")
    with recorded(tmp_path, workers=1, rules=rules) as found:
        for name in names:
            body = {"name": name, "key": "user:1", "limits": "1/day"}
            answers = [found.send("POST", "/v1/limit", body) for _ in range(2)]
            assert [each.status for each in answers] == [200, 429]
            assert answers[0].data["rule"] == f"limit:{name}"
        found.await_usage({("(limit), user:1", f"limit:{name}"): (1, 1, 1) for name in names})
        assert {rule for _, rule in found.usage()} == {f"limit:{name}" for name in names}
        denials = "/v1/admin/decisions?outcome=denied&rule="
        assert found.send("GET", f"{denials}users").data["items"] == []
        until(
            lambda: len(found.send("GET", f"{denials}limit:users").data["items"]) == 1,
            "the denial is recorded",
            SECONDS_MAX,
        )


def test_every_worker_knows_the_busiest_subjects_of_all(tmp_path: Path) -> None:
    """Each worker's answer includes the others' counts within seconds."""
    with recorded(tmp_path, workers=2) as found:
        found.check([{"user": "hot"}] * 300 + [{"user": f"{number}"} for number in range(60)])

        def tops(query: str) -> list[Any]:
            return [found.send("GET", f"/v1/admin/top?{query}").data["items"] for _ in range(6)]

        def most_checks() -> bool:
            return all(each and each[0]["count"] > 200 for each in tops("limit=1"))

        def most_denied() -> bool:
            seen = tops("by=denied&limit=5")
            hot = [(["user:hot"], "users")]
            return all([(each["subject"], each["rule"]) for each in some] == hot for some in seen)

        until(most_checks, "every worker counts the checks of both", SECONDS_MAX)
        until(most_denied, "every worker names the denied user", SECONDS_MAX)


def test_a_locked_file_does_not_affect_checks(tmp_path: Path) -> None:
    """Records that do not fit are dropped and counted; all usage is written after the lock ends.

    The storm reaches one worker and the other checks reach both. Each worker retries at its own
    time, so the test waits for both subjects, and for decisions and drops to add up.
    """
    with recorded(tmp_path, "--sample", "1", workers=2) as found:
        path = found.service.data / "records.db"
        until(path.exists, "the file exists", SECONDS_MAX)
        found.deny(BATCH)
        until(found.usage, "usage is written", SECONDS_MAX)
        with sqlite3.connect(path, isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")
            found.deny(STORM)
            until(lambda: found.dropped() > 0, "some records do not fit", SECONDS_MAX)
            assert found.check([{"user": "meanwhile"}] * 150) == 100
            other.execute("ROLLBACK")
        other.close()
        total = BATCH + STORM
        found.await_usage(
            {
                ("api_key:greedy", "keys"): (10, total - 10, 10),
                ("user:meanwhile", "users"): (100, 50, 100),
            }
        )

        def accounted() -> tuple[int, int]:
            with sqlite3.connect(path) as database:
                [(count,)] = database.execute("SELECT count(*) FROM ratekeeper_decisions")
            database.close()
            return int(count), found.dropped()

        until(
            lambda: sum(accounted()) == total + 150,
            "every decision is written or counted as dropped",
            SECONDS_MAX,
            accounted,
        )


def test_a_paused_server_does_not_affect_checks(tmp_path: Path) -> None:
    """PostgreSQL is paused under load and resumed; the service answers, and shuts down in time."""
    with Postgres() as server:
        url = server.new_database()
        with recorded(tmp_path, "--record", url, "--sample", "1", workers=2) as found:
            found.deny(BATCH)
            until(found.usage, "usage is written", SECONDS_MAX)
            server.pause()
            try:
                assert found.check([{"user": "meanwhile"}] * 150) == 100
            finally:
                server.resume()
            found.await_usage(
                {
                    ("api_key:greedy", "keys"): (10, BATCH - 10, 10),
                    ("user:meanwhile", "users"): (100, 50, 100),
                }
            )
            server.pause()
            try:
                found.check([{"user": "last"}] * 10)
                assert found.service.end() == 0
            finally:
                server.resume()


# One rule counts everybody together, one each tenant, and one is tried out in shadow mode.
SHARED_RULES = {
    "version": 1,
    "rules": [
        {"id": "everybody", "by": [], "limits": "3/hour"},
        {"id": "tenants", "match": {"tenant": "*"}, "by": "tenant", "limits": "100/hour"},
        {"id": "trial", "by": "user", "limits": "1/hour", "mode": "shadow"},
    ],
}


def test_an_operator_finds_the_denial_of_a_customer(tmp_path: Path) -> None:
    """Tenant initech is denied by a rule that counts everybody together.

    The operator finds the denial by the tenant, and by the request ID that the customer was given,
    with the rule, its limit and its count; and the rule in shadow mode that would deny it too.
    """
    with recorded(tmp_path, workers=1, rules=SHARED_RULES) as found:
        for user in ("ann", "bob", "eve"):
            assert found.send("POST", "/v1/check", {"tenant": "acme", "user": user}).status == 200
        customer = {"tenant": "initech", "user": "milton", "api_key": "sk_secret"}
        denied = found.send("POST", "/v1/check", customer)
        assert denied.status == 429
        named = found.send("POST", "/v1/check", customer, **{"X-Request-Id": "stapler-1"})
        assert named.headers["x-request-id"] == "stapler-1"

        def items(path: str) -> list[dict[str, Any]]:
            answer = found.send("GET", f"/v1/admin/{path}")
            assert answer.status == 200, answer
            rows: list[dict[str, Any]] = answer.data["items"]
            return rows

        until(
            lambda: len(items("decisions?tenant=initech")) == 2,
            "both denials are written",
            SECONDS_MAX,
            lambda: items("decisions"),
        )
        [one] = items(f"decisions?request_id={denied.headers['x-request-id']}")
        assert (one["outcome"], one["rule"], one["subject"]) == ("denied", "everybody", ["*"])
        assert (one["limit"], one["window"], one["count"]) == (3, 3600.0, 3)
        assert one["identity"]["tenant"] == "initech"
        assert one["identity"]["user"] == "milton"
        assert one["identity"]["api_key"].startswith("#")
        assert one["rules"] == {"everybody": "denied", "tenants": "allowed"}
        [other] = items("decisions?request_id=stapler-1")
        assert other["rules"] == {**one["rules"], "trial": "shadow_denied"}
        assert items("decisions?outcome=shadow_denied&rule=trial") == [other]
        assert items("decisions?outcome=shadow_denied&rule=tenants") == []

        def indirectly() -> int:
            rows = items("usage?subject=tenant:initech&outcome=denied&rule=everybody")
            return sum(each["denied_indirectly"] for each in rows)

        until(lambda: indirectly() == 2, "the usage is written", SECONDS_MAX, indirectly)
        assert {each["denied"] for each in items("usage?subject=*&rule=everybody")} == {2}
        environment = {"url": found.service.url, "TOKEN": found.secret}
        shown = run("records", "decisions", "--tenant", "initech", "--json", **environment)
        assert [each["request_id"] for each in json.loads(shown.stdout)["items"]] == [
            *("stapler-1", denied.headers["x-request-id"])
        ]
        most = run("records", "top", "--by", "shadow_denied", "--rule", "trial", **environment)
        assert "user:milton" in most.stdout, most.output
        watched = run("top", "--once", "--interval", "1", **environment)
        assert "SHADOW DENIED MOST" in watched.stdout, watched.output


def test_recording_can_be_switched_off(tmp_path: Path) -> None:
    """There is no file, and the admin API answers NOT_RECORDED."""
    with recorded(tmp_path, "--record", "off", workers=1) as found:
        found.check([{"user": "1"}] * 5)
        for path in ("usage", "decisions", "top"):
            answer = found.send("GET", f"/v1/admin/{path}")
            assert (answer.status, answer.data["error"]["code"]) == (404, "NOT_RECORDED")
        assert not list(found.service.data.glob("records.db*"))


def test_the_service_starts_without_its_records_database(tmp_path: Path) -> None:
    """It checks requests, logs a warning, and answers 503 to requests for records."""
    gone = f"sqlite:///{tmp_path / 'nowhere' / 'records.db'}"
    with recorded(tmp_path, "--record", gone, workers=1) as found:
        assert found.check([{"user": "1"}] * 5) == 5
        assert found.send("GET", "/v1/admin/usage").status == 503

        def logged() -> bool:
            return "records are not written" in json.dumps(found.service.events())

        until(logged, "the log has a warning", SECONDS_MAX)
