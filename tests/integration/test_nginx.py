"""A real nginx in front of a small application; it calls the service for each request."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.http_thread import serving
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
        {"id": "spaced", "match": {"endpoint": "/spaced"}, "by": ["ip"], "limits": [
            {"limit": 2, "per": "1s", "algorithm": "leaky_bucket", "capacity": 30}]},
        {"id": "search", "match": {"endpoint": "/search/*"}, "by": ["ip"], "limits": ["1/hour"]},
        {"id": "traefik", "match": {"endpoint": "/traefik"}, "by": ["ip"], "limits": ["2/hour"]},
    ],
    "deny": ["api_key:sk_revoked"],
}  # fmt: skip


class Application(ThreadingHTTPServer):
    """An HTTP server that records its requests and answers 403 to /forbidden."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Handler)
        self.served: list[tuple[str, str, bytes]] = []
        self.times: list[float] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Application

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.times.append(time.monotonic())
        self.server.served.append((self.command, self.path, body))
        self.send_response(403 if self.path == "/forbidden" else 200)
        self.send_header("content-length", "3")
        self.end_headers()
        self.wfile.write(b"app")

    do_POST = do_GET  # noqa: N815 - the base class's name

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's
        """Log nothing."""


class Edge:
    """nginx and the application behind it."""

    def __init__(self, nginx: Nginx, application: Application) -> None:
        self.url = nginx.url
        self.folder = nginx.folder
        self.application = application

    def get(self, path: str, method: str = "GET", **options: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, timeout=20, **options)

    def statuses(self, count: int, path: str, **options: Any) -> list[int]:
        return [self.get(path, **options).status_code for _ in range(count)]


@contextmanager
def edge(ratekeeper_port: int, change: Mapping[str, str] | None = None) -> Iterator[Edge]:
    """Run the example's nginx with the service on this port, with some text replaced."""
    with serving(Application()) as application:
        text = example(application.server_address[1], ratekeeper_port)
        for old, new in (change or {}).items():
            assert old in text
            text = text.replace(old, new)
        with Nginx(text) as nginx:
            yield Edge(nginx, application)


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    """Yield a real service that trusts the gateway's headers."""
    options = ("--trusted-proxy", HOST, "--identify", "api_key=header:X-API-Key")
    with ServiceProcess(RULES, *options, workers=2) as found:
        yield found


@pytest.fixture(scope="module")
def there(service: ServiceProcess) -> Iterator[Edge]:
    """Yield nginx with the example's configuration, which calls the service."""
    with edge(_port(service)) as found:
        yield found


def _port(service: ServiceProcess) -> int:
    return urlsplit(service.url).port or 0


def test_limits_hold_exactly_and_headers_reach_the_client(there: Edge) -> None:
    """Of 60 requests, 16 at a time, exactly the limit passes, and each has the headers."""
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda n: there.get(f"/many?n={n}"), range(60)))
    passed = [each for each in answers if each.status_code == 200]
    assert (len(passed), {each.status_code for each in answers}) == (20, {200, 429})
    assert sorted(int(each.headers["x-ratelimit-remaining"]) for each in passed) == [*range(20)]
    assert all(each.headers["ratelimit-policy"] == '"many";q=20;w=3600' for each in answers)
    assert {each.headers["x-ratelimit-limit"] for each in answers} == {"20"}
    assert sum(path.startswith("/many") for _, path, _ in there.application.served) == 20
    assert all(each.text == "app" for each in passed)


def test_a_denial_is_a_429_with_a_body_and_retry_after(there: Edge) -> None:
    """nginx gets 403, and `error_page` turns it into 429 with Retry-After."""
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


def test_a_blocked_client_gets_a_403(there: Edge) -> None:
    """There is no Retry-After. A 403 of the application reaches the client unchanged."""
    blocked = there.get("/keys/1", headers={"X-API-Key": "sk_revoked"})
    assert (blocked.status_code, blocked.json()["status"]) == (403, 403)
    assert "retry-after" not in blocked.headers
    assert blocked.headers["content-type"] == "application/problem+json"
    own = there.get("/forbidden")
    assert (own.status_code, own.text) == (403, "app")


def test_rules_match_the_method_and_only_the_application_gets_the_body(there: Edge) -> None:
    """Rules match the client's method; nginx does not send its body to the service."""
    body = b"x" * 100_000
    assert there.statuses(3, "/posts", method="POST", content=body) == [200, 200, 429]
    assert there.statuses(2, "/posts") == [200, 200]
    served = [sent for method, path, sent in there.application.served if method == "POST"]
    assert served == [body, body]


def test_forged_headers_change_nothing(there: Edge) -> None:
    """A client cannot change its address, URI, method or token with headers."""
    forged = [
        {"X-Forwarded-For": "198.51.100.1"},
        {"X-Forwarded-For": "198.51.100.2", "Forwarded": "for=198.51.100.2"},
        {"Forwarded": "for=198.51.100.3"},
        {"X-Real-IP": "198.51.100.4"},
        {"X-Original-URI": "/free", "X-Forwarded-Uri": "/free"},
        {"X-Original-Method": "POST", "X-Ratekeeper-Token": "rk_x"},
    ]
    found = [there.get("/spoofed", headers=each).status_code for each in forged]
    assert found == [200, 200, 200, 429, 429, 429]


def test_a_leaky_bucket_spaces_requests_behind_nginx(there: Edge) -> None:
    """The delays are longer than a second. A delay of more than `hold` is denied, never served."""
    before = len(there.application.times)
    started = time.monotonic()
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda _: there.get("/spaced"), range(12)))
    served = sorted(there.application.times[before:])
    statuses = [each.status_code for each in answers]
    assert (statuses.count(200), statuses.count(429)) == (len(served), 12 - len(served))
    assert 4 <= len(served) < 12
    # The n-th request may be served half a second after the one before it; a timer may be 50 ms
    # early.
    assert all(at >= started + n * 0.5 - 0.05 for n, at in enumerate(served))


def test_the_example_waits_longer_for_an_answer_than_the_service_holds_it() -> None:
    """Otherwise nginx lets a request pass while a leaky bucket delays it."""
    text = EXAMPLE.read_text(encoding="utf-8")
    holds_s = re.findall(r"/v1/authorize\?denied=403&hold=(\d+);", text)
    [timeout_s] = re.findall(r"proxy_read_timeout (\d+)s;", text)
    assert len(holds_s) == 2
    assert int(timeout_s) > max(map(int, holds_s))


@pytest.mark.parametrize(
    "target",
    [
        "/search/foo/../../x",
        "/search/foo/%2e%2e/%2E./x",
        "/search/..%2f..%2fx",
        "/search\\..\\x",
        "/search/foo/./x",
        "/x/..",
        "/x/..?a=b",
        "/x#/../search/y",
        "/x%5Cy",
    ],
)
def test_an_ambiguous_path_reaches_neither_the_service_nor_the_application(
    there: Edge, target: str
) -> None:
    """The example rejects it, because the application may serve another path than was limited."""
    before = len(there.application.served)
    address = urlsplit(there.url)
    connection = HTTPConnection(HOST, address.port, timeout=20)
    connection.putrequest("GET", target, skip_host=False)
    connection.endheaders()
    assert connection.getresponse().status == 400
    connection.close()
    assert len(there.application.served) == before


def test_paths_that_only_look_like_dot_segments_pass(there: Edge) -> None:
    """So does anything in the query."""
    for path in ("/.well-known/x", "/a..b", "/...", "/a?next=/../x%2F#", "/v1.0/x"):
        assert there.get(path).status_code == 200


def test_the_node_that_decided_is_named(there: Edge, service: ServiceProcess) -> None:
    """On allowed requests and on denials."""
    node = service.ask("GET", "/healthz").headers["x-ratekeeper-node"]
    answers = [there.get("/keys/1", headers={"X-API-Key": "node"}) for _ in range(3)]
    assert [each.status_code for each in answers] == [200, 200, 429]
    assert {each.headers["x-ratekeeper-node"] for each in answers} == {node}


def test_nginx_writes_into_its_own_folder(there: Edge) -> None:
    """Defect: the example had no `pid`, so nginx needed the rights of root."""
    temporary = {f"{each}_temp" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")}
    written = {path.name for path in there.folder.iterdir()}
    assert written >= {"nginx.pid", "access.log", "error.log", *temporary}


def test_clients_cannot_reach_the_internal_location(there: Edge) -> None:
    """The locations that call the service are internal."""
    for path in ("/_ratekeeper/", "/_ratekeeper/open", "/_ratekeeper/closed"):
        assert there.get(path).status_code == 404


@pytest.mark.parametrize(("lines", "status"), [(True, 200), (False, 500)])
def test_without_the_service_nginx_decides(lines: bool, status: int) -> None:
    """With the example's two lines requests pass; without them nginx answers 500."""
    change = {} if lines else {"error_page 500 502 504 = @unlimited;": ""}
    with edge(free_port(), change) as there:
        assert there.statuses(3, "/many") == [status] * 3


def test_a_login_is_rejected_while_the_service_is_away() -> None:
    """Its limit applies while the service runs. Then it is a 503, however its path is written, and
    all other requests pass."""
    rules = {"version": 1, "rules": [
        {"id": "login", "match": {"endpoint": "/login"}, "by": ["ip"], "limits": "2 in any hour",
         "on_failure": "closed"},
    ]}  # fmt: skip
    with ServiceProcess(rules, "--trusted-proxy", HOST) as service, edge(_port(service)) as there:
        assert there.statuses(3, "/login", method="POST") == [200, 200, 429]
        served = len(there.application.served)
        service.stop()
        for path in ("/login", "/login?user=ann", "//login", "/%6cogin", "/login/"):
            refused = there.get(path, method="POST", content=b"guess")
            assert (refused.status_code, refused.json()["status"]) == (503, 503), path
            assert refused.headers["content-type"] == "application/problem+json"
            assert refused.headers["retry-after"] == "1"
        assert len(there.application.served) == served
        assert there.get("/many").status_code == 200


def test_an_unavailable_store_and_a_closed_rule_are_503() -> None:
    """nginx gets 403, and the client gets 503: it is not the client's fault."""
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


def test_a_request_of_traefik_is_answered(service: ServiceProcess) -> None:
    """The address in Traefik's example answers 200, and then 429 with a body."""
    written = yaml.safe_load(TRAEFIK.read_text(encoding="utf-8"))["http"]
    asks = written["middlewares"]["ratekeeper"]["forwardAuth"]
    assert written["routers"]["shop"]["middlewares"] == ["ratekeeper"]
    address = urlsplit(asks["address"])
    path = f"{address.path}?{address.query}"
    # Traefik sends the client's headers, and describes the request in its own headers.
    sent = {"X-Forwarded-Method": "GET", "X-Forwarded-Proto": "http", "X-Forwarded-Host": "shop",
            "X-Forwarded-Uri": "/traefik?a=b", "X-Forwarded-For": "192.0.2.7"}  # fmt: skip
    found = [service.ask("GET", path, headers=sent) for _ in range(3)]
    assert [each.status for each in found] == [200, 200, 429]
    assert {name.lower() for name in asks["authResponseHeaders"]} <= found[0].headers.keys()
    assert found[2].headers["content-type"] == "application/problem+json"
    assert json.loads(found[2].body)["violated-policies"] == ["traefik"]
    other = service.ask("GET", path, headers={**sent, "X-Forwarded-For": "192.0.2.8"})
    assert other.status == 200
