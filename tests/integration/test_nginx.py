"""A real nginx in front of a small application, asking the service before it passes anything on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.nginx_process import EXAMPLE, Nginx, example
from tests.redis_servers.ports import HOST, free_port
from tests.service_process import ServiceProcess

TRAEFIK = EXAMPLE.with_name("traefik.yaml")

RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {"id": "keys", "match": {"endpoint": "/keys/*", "api_key": "*"}, "by": ["api_key"],
         "limits": ["2/hour"]},
        {"id": "posts", "match": {"endpoint": "/posts", "method": "POST"}, "by": ["ip"],
         "limits": ["2/hour"]},
        {"id": "many", "match": {"endpoint": "/many"}, "by": ["ip"], "limits": ["20/hour"]},
        {"id": "spoofed", "match": {"endpoint": "/spoofed"}, "by": ["ip"], "limits": ["3/hour"]},
        {"id": "traefik", "match": {"endpoint": "/traefik"}, "by": ["ip"], "limits": ["2/hour"]},
    ],
    "deny": ["api_key:sk_revoked"],
}  # fmt: skip


class Application(ThreadingHTTPServer):
    """Counts what reaches it, and can be told to answer 403."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Handler)
        self.served: list[tuple[str, str, bytes]] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Application

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.served.append((self.command, self.path, body))
        self.send_response(403 if self.path == "/forbidden" else 200)
        self.send_header("content-length", "3")
        self.end_headers()
        self.wfile.write(b"app")

    do_POST = do_GET  # noqa: N815 - the base class's name

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's
        """Nothing is logged."""


class Edge:
    """nginx, the application behind it, and the service that it asks."""

    def __init__(self, url: str, application: Application) -> None:
        self.url = url
        self.application = application

    def get(self, path: str, method: str = "GET", **options: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, timeout=20, **options)

    def statuses(self, count: int, path: str, **options: Any) -> list[int]:
        return [self.get(path, **options).status_code for _ in range(count)]


@contextmanager
def edge(tollkeeper_port: int, change: Mapping[str, str] | None = None) -> Iterator[Edge]:
    """The example's nginx, asking on `tollkeeper_port`, with some text replaced."""
    with Application() as application:
        thread = threading.Thread(target=application.serve_forever, daemon=True)
        thread.start()
        try:
            text = example(application.server_address[1], tollkeeper_port)
            for old, new in (change or {}).items():
                assert old in text
                text = text.replace(old, new)
            with Nginx(text) as nginx:
                yield Edge(nginx.url, application)
        finally:
            application.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    """The real service, told to believe the gateway's headers."""
    options = ("--trusted-proxy", HOST, "--identify", "api_key=header:X-API-Key")
    with ServiceProcess(RULES, *options, workers=2) as found:
        yield found


@pytest.fixture(scope="module")
def there(service: ServiceProcess) -> Iterator[Edge]:
    """nginx with the example's configuration, in front of it."""
    with edge(_port(service)) as found:
        yield found


def _port(service: ServiceProcess) -> int:
    return urlsplit(service.url).port or 0


def test_limits_hold_exactly_and_headers_reach_the_client(there: Edge) -> None:
    """Of 60 requests, 16 at a time, exactly the limit passes; each answer tells how it stands."""
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda n: there.get(f"/many?n={n}"), range(60)))
    passed = [each for each in answers if each.status_code == 200]
    assert (len(passed), {each.status_code for each in answers}) == (20, {200, 429})
    assert sorted(int(each.headers["x-ratelimit-remaining"]) for each in passed) == [*range(20)]
    assert all(each.headers["ratelimit-policy"] == '"many";q=20;w=3600' for each in answers)
    assert {each.headers["x-ratelimit-limit"] for each in answers} == {"20"}
    assert sum(path.startswith("/many") for _, path, _ in there.application.served) == 20
    assert all(each.text == "app" for each in passed)


def test_a_refusal_is_a_429_with_a_body_and_a_time(there: Edge) -> None:
    """nginx knows only 403; `error_page` makes it what it is, with Retry-After."""
    assert there.statuses(2, "/keys/1", headers={"X-API-Key": "a"}) == [200, 200]
    refused = there.get("/keys/1", headers={"X-API-Key": "a"})
    assert refused.status_code == 429
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.headers["cache-control"] == "no-store"
    wait_s = int(refused.headers["retry-after"])
    assert 0 < wait_s <= 1800
    assert refused.headers["x-ratelimit-remaining"] == "0"
    body = refused.json()
    assert (body["status"], body["detail"]) == (429, f"Try again in {wait_s} seconds.")
    assert there.statuses(2, "/keys/1", headers={"X-API-Key": "b"}) == [200, 200]


def test_who_is_blocked_gets_a_403(there: Edge) -> None:
    """Not a 429: no time would help. And a 403 of the application's own is passed on as it is."""
    blocked = there.get("/keys/1", headers={"X-API-Key": "sk_revoked"})
    assert (blocked.status_code, blocked.json()["status"]) == (403, 403)
    assert "retry-after" not in blocked.headers
    assert blocked.headers["content-type"] == "application/problem+json"
    own = there.get("/forbidden")
    assert (own.status_code, own.text) == (403, "app")


def test_the_method_counts_and_bodies_go_to_the_application_alone(there: Edge) -> None:
    """Rules see the client's method; its body is not sent along with the question."""
    body = b"x" * 100_000
    assert there.statuses(3, "/posts", method="POST", content=body) == [200, 200, 429]
    assert there.statuses(2, "/posts") == [200, 200]
    served = [sent for method, path, sent in there.application.served if method == "POST"]
    assert served == [body, body]


def test_forged_headers_change_nothing(there: Edge) -> None:
    """Whatever the client writes of addresses, URIs and tokens, it is counted as itself."""
    forged = [
        {"X-Forwarded-For": "198.51.100.1"},
        {"X-Forwarded-For": "198.51.100.2", "Forwarded": "for=198.51.100.2"},
        {"Forwarded": "for=198.51.100.3"},
        {"X-Real-IP": "198.51.100.4"},
        {"X-Original-URI": "/free", "X-Forwarded-Uri": "/free"},
        {"X-Original-Method": "POST", "X-Tollkeeper-Token": "tk_x"},
    ]
    found = [there.get("/spoofed", headers=each).status_code for each in forged]
    assert found == [200, 200, 200, 429, 429, 429]


def test_nobody_reaches_the_question_itself(there: Edge) -> None:
    """The location that asks is nginx's own."""
    assert there.get("/_tollkeeper").status_code == 404


@pytest.mark.parametrize(("lines", "status"), [(True, 200), (False, 500)])
def test_without_the_service_nginx_decides(lines: bool, status: int) -> None:
    """With the example's two lines requests pass; without them they are answered 500."""
    change = {} if lines else {"error_page 500 502 504 = @unlimited;": ""}
    with edge(free_port(), change) as away:
        assert away.statuses(3, "/many") == [status] * 3


def test_a_store_that_is_away_and_a_rule_that_is_closed() -> None:
    """503, though nginx was told 403: the client learns that it is not its fault."""
    rules = {"version": 1, "rules": [
        {"id": "api", "by": ["ip"], "limits": ["5/hour"], "on_failure": "closed"},
    ]}  # fmt: skip
    store = ("--store", f"redis://{HOST}:{free_port()}")
    with (
        ServiceProcess(rules, *store, "--trusted-proxy", HOST) as service,
        edge(_port(service)) as there,
    ):
        refused = there.get("/")
        assert refused.status_code == 503
        assert refused.headers["x-ratelimit-policy"] == "degraded"
        assert int(refused.headers["retry-after"]) >= 1


def test_what_traefik_asks_is_answered(service: ServiceProcess) -> None:
    """Its example names our endpoint; what Traefik asks there is a 200, then a 429 in full."""
    written = yaml.safe_load(TRAEFIK.read_text(encoding="utf-8"))["http"]
    asks = written["middlewares"]["tollkeeper"]["forwardAuth"]
    assert written["routers"]["shop"]["middlewares"] == ["tollkeeper"]
    path = urlsplit(asks["address"]).path
    # As Traefik does: the client's headers, and what it says of the request in its own.
    sent = {"X-Forwarded-Method": "GET", "X-Forwarded-Proto": "http", "X-Forwarded-Host": "shop",
            "X-Forwarded-Uri": "/traefik?a=b", "X-Forwarded-For": "192.0.2.7"}  # fmt: skip
    found = [service.ask("GET", path, headers=sent) for _ in range(3)]
    assert [each.status for each in found] == [200, 200, 429]
    assert {name.lower() for name in asks["authResponseHeaders"]} <= found[0].headers.keys()
    assert found[2].headers["content-type"] == "application/problem+json"
    assert json.loads(found[2].body)["violated-policies"] == ["traefik"]
    other = service.ask("GET", path, headers={**sent, "X-Forwarded-For": "192.0.2.8"})
    assert other.status == 200
