"""The admin API with PostgreSQL, with Redis, and in a real service with several workers."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ratekeeper import Request
from ratekeeper.rules.document.reading import from_data
from ratekeeper.rules.document.writing import to_yaml
from ratekeeper.service.http import openapi
from tests.cli.stub_service import run
from tests.conformance.stores import PATIENT
from tests.postgres_server import running_postgres
from tests.redis_servers import running, until
from tests.service.admin.client import Admin, admin_of, filled, secrets_of
from tests.service_process import RULES, Answered, ServiceProcess, ask_on

# No node polls while a test runs, so every change arrives by push.
NEVER_S = 600.0
SECONDS_MAX = 30.0


def version_of(admin: Admin) -> str:
    """Return the version of the rules in force in the node's limiter."""
    return admin.context.limiter.rules_status().version


def has(admin: Admin, version: str) -> bool:
    """Return True if this version is in force there."""
    return version_of(admin) == version


# ── Control planes ───────────────────────────────────────────────────────────────────────────────


async def test_on_postgresql(tmp_path: Path) -> None:
    """Changes of every kind, conflicts and a rollback work, and reach the limiter by push."""
    url = running_postgres().new_database()
    await filled(url)
    async with admin_of(tmp_path, url, url, poll=NEVER_S) as admin:
        changes: list[tuple[str, str, Any]] = [
            ("PUT", "/rules/search", {"by": ["tenant"], "limits": ["5/second"]}),
            ("PUT", "/tiers/max", {"limits": ["500/second"], "reason": "größer 🦊\nzweite Zeile"}),
            ("DELETE", "/tiers/max", None),
            ("DELETE", "/rules/search", None),
            ("POST", "/versions/4/rollback", None),
        ]
        for number, (method, path, body) in enumerate(changes, start=2):
            headers = {"If-Match": f'"v{number - 1}"'}
            made = await admin.call(method, path, json=body, headers=headers)
            assert made.headers["etag"] == f'"v{number}"'
            await admin.rejected(method, path, 412, json=body, headers=headers)
        last = str(len(changes) + 1)
        until(partial(has, admin, last), "the last version is in force", SECONDS_MAX)
        entries: list[tuple[str, str, Any]] = [
            ("PUT", "/assignments/user:1", {"tier": "pro"}),
            ("POST", "/overrides", {"for": {"ip": "192.0.2.9"}, "multiply": 2, "until": "2h"}),
            ("POST", "/lists/deny", {"entry": "user:evil"}),
            ("DELETE", "/overrides/ip:192.0.2.9", None),
            ("DELETE", "/assignments/user:1", None),
        ]
        for number, (method, path, body) in enumerate(entries, start=1):
            made = await admin.call(method, path, json=body, headers={"X-Reason": "why"})
            assert made.headers["etag"] == f'"v{last}-{number}"'
        evil, limiter = Request(user="evil"), admin.context.limiter
        until(
            lambda: limiter.compiled_rules.plan(evil, 1).verdict == "deny", "the entry", SECONDS_MAX
        )
        history = (await admin.call("GET", "/versions")).json()["items"]
        assert [each["kind"] for each in history] == [
            *("rollback", "remove-rule", "remove-tier", "set-tier", "put-rule", "apply"),
        ]
        assert history[-3]["reason"] == "größer 🦊\nzweite Zeile"
        assert (await admin.call("GET", "/node")).json()["rules"]["version"] == last


async def test_nodes_with_one_redis_are_notified_of_a_change(tmp_path: Path) -> None:
    """SQLite cannot push, so the store that the nodes share notifies them."""
    url = f"sqlite:///{tmp_path / 'rules.db'}"
    await filled(url)
    uri = f"{running('single').uri}?{PATIENT}"
    async with admin_of(tmp_path, url, url, poll=NEVER_S, store=uri) as admin:
        # The first change may come before the limiter listens; it reads the rules at that point.
        for number in ("2", "3"):
            await admin.call("PUT", "/tiers/max", json={"limits": f"{number}/second"})
            until(partial(has, admin, number), f"version {number} is in force", SECONDS_MAX)


# ── A real service ───────────────────────────────────────────────────────────────────────────────


class Served:
    """A service with its rules in a database, and the token of an administrator."""

    def __init__(self, service: ServiceProcess, secret: str) -> None:
        self.service = service
        self.headers = {"Authorization": f"Bearer {secret}"}

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answered:
        """Send a request as the administrator."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            named.setdefault("Content-Type", "application/json")
        return self.service.ask(method, path, body, {**self.headers, **named})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a service with two workers."""
    folder = tmp_path_factory.mktemp("served")
    secrets = secrets_of(folder)
    seed = folder / "seed.yaml"
    seed.write_text(json.dumps(RULES), encoding="utf-8")
    options = ("--seed", str(seed), "--tokens", str(folder / "tokens.json"))
    with ServiceProcess(
        f"sqlite:///{folder / 'rules.db'}", *options, records=True, workers=2
    ) as service:
        yield Served(service, secrets["admin"])


def test_clients_learn_a_digest_of_the_host_name(served: Served) -> None:
    """Defect: each reply had the host name. All workers send one digest, and operators see both."""
    asked = [("GET", "/healthz"), ("GET", "/readyz"), ("POST", "/v1/check"), ("GET", "/nowhere")]
    replies = [served.service.ask(method, path) for method, path in asked * 5]
    (node,) = {each.headers["x-ratekeeper-node"] for each in replies}
    host = socket.gethostname()
    # A client could try likely names.
    assert node not in (host, blake2b(host.encode(), digest_size=len(node) // 2).hexdigest())
    assert {each.data["node"] for each in replies if "node" in each.data} == {node}
    found = served.ask("GET", "/v1/admin/fleet").data
    shown = re.sub(r"[^A-Za-z0-9._:-]", "-", host)[:64]
    assert (found["node_id"], found["node_header"]) == (shown, node)


def test_every_worker_reads_and_applies_a_change(served: Served) -> None:
    """Every worker returns a change at once, and soon enforces it."""
    tenants = {"id": "tenants", "match": {"tenant": "*"}, "by": ["tenant"], "limits": ["7/hour"]}
    more = {**RULES, "rules": [*RULES["rules"], tenants]}
    made = served.ask("PUT", "/v1/admin/rules", more, If_Match='"v1"', X_Reason="real")
    assert (made.status, made.headers["etag"]) == (200, '"v2"')
    assert made.headers["x-ratekeeper-node"]
    for _ in range(10):
        assert served.ask("GET", "/v1/admin/rules").headers["etag"] == '"v2"'
    in_force: dict[int, str] = {}

    def all_follow() -> bool:
        node = served.ask("GET", "/v1/admin/node").data
        in_force[node["process"]] = node["rules"]["version"]
        return sorted(in_force.values()) == ["2", "2"]

    until(all_follow, "both workers have version 2", SECONDS_MAX, lambda: in_force)
    check = served.ask("POST", "/v1/check", {"tenant": "acme"})
    assert (check.data["rule"], check.data["limit"]) == ("tenants", 7)
    again = served.ask("PUT", "/v1/admin/rules", more, If_Match='"v1"')
    assert again.status == 200, "the document is already in force"
    assert served.ask("PUT", "/v1/admin/rules", RULES, If_Match='"v1"').status == 412


def test_all_workers_share_a_quota(served: Served) -> None:
    """Any worker can spend, report and reset the same quota."""
    for _ in range(50):
        assert served.ask("POST", "/v1/check", {"user": "quota"}).status == 200

    def remaining() -> int:
        rules = served.ask("GET", "/v1/admin/quota?user=quota").data["rules"]
        return int(rules[0]["decision"]["remaining"])

    assert max(remaining() for _ in range(10)) < 60, "100 per hour: 10 units take minutes to refill"
    served.ask("POST", "/v1/admin/quota/reset", {"user": "quota"})
    assert {remaining() for _ in range(10)} == {100}


def test_a_pushed_load_reaches_every_worker(served: Served) -> None:
    """The command pushes to one worker. Every worker has the factor, and so have the metrics."""
    scale = {"source": "queue_depth", "low": 100, "high": 500, "smoothing": 0, "most": 1.5}
    rule = {"by": ["tenant"], "limits": ["100/hour"], "scale": scale}
    made = served.ask("PUT", "/v1/admin/rules/queued", rule)
    assert made.status == 200, made.body
    factors: dict[int, Any] = {}

    def all_have(wanted: float) -> bool:
        found = served.ask("GET", "/v1/admin/load").data
        factors[found["process"]] = {each["id"]: each["factor"] for each in found["rules"]}
        return len(factors) == 2 and all(each == {"queued": wanted} for each in factors.values())

    until(partial(all_have, 1.0), "both workers have the rule", SECONDS_MAX, lambda: factors)
    token = served.headers["Authorization"].removeprefix("Bearer ")
    for load, factor in (("20", 1.5), ("500", 0.2)):
        arguments = ("load", "push", "queue_depth", load, "--for", "1h")
        pushed = run(*arguments, url=served.service.url, TOKEN=token)
        assert pushed.exit_code == 0, pushed.output
        until(partial(all_have, factor), "both workers have the load", SECONDS_MAX, lambda: factors)

    def in_metrics() -> bool:
        text = served.ask("GET", "/metrics").body.decode()
        assert 'ratekeeper_load_age_seconds{source="queue_depth"}' in text
        return 'ratekeeper_load_factor{rule="queued"} 0.2' in text

    until(in_metrics, "the metrics have the lowest factor", SECONDS_MAX)
    assert served.ask("DELETE", "/v1/admin/rules/queued").status == 200


async def test_a_pushed_load_reaches_every_node_on_redis(tmp_path: Path) -> None:
    """Two nodes that share nothing but the store."""
    scale = {"source": "queue_depth", "low": 100, "high": 500, "smoothing": 0}
    rule = {"id": "queued", "by": [], "limits": ["100/hour"], "scale": scale}
    rules = to_yaml(from_data({"version": 1, "rules": [rule]}))
    uri = f"{running('single').uri}?{PATIENT}"
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    push = {"source": "queue_depth", "load": 300}
    async with (
        admin_of(folders[0], rules, None, store=uri) as one,
        admin_of(folders[1], rules, None, store=uri) as other,
    ):
        following = asyncio.create_task(other.context.loads.keep_following())
        reading = None
        async with asyncio.timeout(SECONDS_MAX):
            while reading is None:  # the first push may come before the subscription
                pushed = await one.call("POST", "/load", json=push)
                assert pushed.json()["nodes"] is True
                await asyncio.sleep(0.05)
                reading = other.context.limiter.loads.reading("queue_depth")
        assert reading.load == 300
        assert other.context.limiter.factors() == {"queued": 0.6}
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


DEEP = b"[" * 200_000
LONG = b"x" * 1_000_000


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/v1/admin/rules", DEEP),
        ("PUT", "/v1/admin/rules", LONG),
        ("PUT", "/v1/admin/rules", b"\0"),
        ("PUT", "/v1/admin/rules", b"\xff\xfe\xfd"),
        ("PUT", "/v1/admin/rules", b'{"version": 1, "rules": "\\u0000"}'),
        ("PUT", "/v1/admin/rules/x", DEEP),
        ("PUT", "/v1/admin/rules/x", b'{"by": "\\ud800", "limits": "5/s"}'),
        ("PUT", "/v1/admin/rules/x", b'{"by": "user", "limits": "' + LONG + b'"}'),
        ("PUT", "/v1/admin/tiers/a", b'{"limits": {"a": ' * 500 + b"1" + b"}}" * 500),
        ("PUT", "/v1/admin/assignments/user:1", b'{"tier": "' + LONG + b'"}'),
        ("POST", "/v1/admin/overrides", b'{"for": {"user": "\\u0000"}}'),
        ("POST", "/v1/admin/lists/deny", b'{"entry": "ip:\\u0000"}'),
        ("POST", "/v1/admin/explain", b'{"user": "' + LONG + b'"}'),
        ("POST", "/v1/admin/explain", b'{"user": "\xff"}'),
        ("POST", "/v1/admin/explain", b'{"user": "a\\u001fb"}'),
        ("POST", "/v1/admin/quota/grant", b'{"units": 1e400}'),
        ("POST", "/v1/admin/quota/grant", b'{"units": ' + b"9" * 10_000 + b"}"),
        ("GET", "/v1/admin/quota?user=%ff", None),
        ("GET", "/v1/admin/quota?" + "user=1&" * 5_000, None),
        ("GET", "/v1/admin/rules/%00", None),
        ("GET", "/v1/admin/rules/" + "x" * 8_000, None),
        ("GET", "/v1/admin/versions/99999999999999999999", None),
        ("DELETE", "/v1/admin/lists/deny?entry=" + "%00" * 2_000, None),
    ],
)
def test_a_hostile_request_gets_a_clear_error(
    served: Served, method: str, path: str, body: bytes | None
) -> None:
    """The service answers 4xx with a problem that has a detail, and keeps running."""
    answer = served.ask(method, path, body)
    assert 400 <= answer.status < 500, answer.body[:500]
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.data["detail"]
    assert len(answer.body) < 20_000


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("PUT", "/v1/admin/rules", {}, 413),
        ("POST", "/v1/admin/explain", {}, 413),
        ("PUT", "/v1/admin/rules", {"Authorization": "Bearer wrong"}, 401),
        ("POST", "/v1/admin/explain", {"Content-Type": "text/plain"}, 415),
        ("POST", "/v1/admin/node", {}, 405),
        ("PUT", "/v1/admin/nope", {}, 404),
    ],
)
def test_a_client_that_sends_too_much_gets_an_error(
    served: Served, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    """A client that writes the whole body before it reads still gets the error."""
    named = {name.replace("-", "_"): value for name, value in headers.items()}
    answer = served.ask(method, path, b"x" * 6_000_000, **named)
    assert answer.status == status
    assert answer.data["detail"]


@pytest.mark.parametrize("length", [b"9000000", b"999999999999999999"])
def test_a_content_length_that_is_too_large_is_rejected_at_once(
    served: Served, length: bytes
) -> None:
    """The service answers before the body arrives."""
    parts = urlsplit(served.service.url)
    with socket.create_connection((parts.hostname, parts.port), SECONDS_MAX) as connection:
        token = served.headers["Authorization"].encode()
        connection.sendall(
            b"PUT /v1/admin/rules HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/yaml\r\n"
            b"Authorization: " + token + b"\r\nContent-Length: " + length + b"\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_one_connection_serves_many_changes(served: Served) -> None:
    """A rejected change leaves the connection usable."""
    connection = served.service.connect()
    headers = {**served.headers, "Content-Type": "application/json"}
    try:
        for number in range(5):
            path = f"/v1/admin/assignments/user:{number}"
            refused = ask_on(connection, "PUT", path, {"tier": "gold"}, headers)
            assert refused.status == 422
            made = ask_on(connection, "PUT", "/v1/admin/tiers/t", {"limits": "5/s"}, headers)
            assert made.status == 200
    finally:
        connection.close()


def test_the_log_has_no_traceback_and_no_secret(served: Served) -> None:
    """The tests above leave no traceback, warning or secret in the log."""
    log = served.service.log_text()
    assert "Traceback" not in log
    assert "Warning" not in log
    assert served.headers["Authorization"].removeprefix("Bearer ") not in log


# ── The examples of the documentation ────────────────────────────────────────────────────────────

PAGE = Path(__file__).parents[2] / "docs" / "admin-api.md"
EXAMPLE = re.compile(
    r"^```http\n(?P<method>\w+) (?P<path>\S+)\n(?P<head>(?:\S+: [^\n]*\n)*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def examples() -> list[tuple[str, str, dict[str, str], Any]]:
    """Return the requests on the page: method, path, headers and body."""
    found = []
    for each in EXAMPLE.finditer(PAGE.read_text(encoding="utf-8")):
        pairs = (line.partition(": ") for line in each["head"].splitlines() if line)
        headers = {name: value for name, _, value in pairs}
        found.append((each["method"], each["path"], headers, json.loads(each["body"])))
    return found


def test_every_example_of_the_documentation_works(tmp_path: Path) -> None:
    """In the order of the page, on a real service; every operation with a body has an example."""
    secrets = secrets_of(tmp_path)
    seed = tmp_path / "seed.yaml"
    seed.write_text(json.dumps(RULES), encoding="utf-8")
    options = ("--seed", str(seed), "--tokens", str(tmp_path / "tokens.json"))
    called: set[tuple[str, str]] = set()
    with ServiceProcess(f"sqlite:///{tmp_path / 'rules.db'}", *options, records=True) as service:
        served = Served(service, secrets["admin"])
        document = service.ask("GET", "/openapi.json").data

        def is_in_force() -> bool:
            newest = served.ask("GET", "/v1/admin/rules").headers["etag"]
            node = served.ask("GET", "/v1/admin/node").data["rules"]["version"]
            return bool(newest == f'"v{node}"')

        for method, path, headers, body in examples():
            if path == "/v1/admin/load":  # the node must know the rule that follows the load
                until(is_in_force, "the newest version is in force", SECONDS_MAX)
            answer = served.ask(method, path, body, **headers)
            # This service has no regions, as the page says.
            good = {409} if path.startswith("/v1/admin/regions") else {200, 201, 202, 204}
            assert answer.status in good, f"{method} {path}: {answer}"
            called.add((method, path.partition("?")[0]))
        kinds = {each["kind"] for each in served.ask("GET", "/v1/admin/audit").data["items"]}
        assert {"patch-rule", "rollback", "grant", "reset"} <= kinds
    for method, path, operation in openapi.operations(document):
        if path.startswith("/v1/admin/") and "requestBody" in operation:
            pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))
            same = any(method == name and re.fullmatch(pattern, each) for name, each in called)
            assert same, f"docs/admin-api.md has no example of {method} {path}"
