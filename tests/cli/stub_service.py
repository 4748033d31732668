"""A stub of a service that answers every request alike, and a way to run commands against it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from typer.testing import CliRunner, Result

from ratekeeper.cli.main import app
from tests.http_thread import serving

ALLOWED = {
    "allowed": True,
    "kind": "limited",
    "rule": "orders",
    "limit": 100,
    "remaining": 73,
    "retry_after": 0.0,
    "reset_after": 16.2,
    "delay": 0.0,
    "degraded": False,
    "shadow_denied": [],
}
DENIED = {**ALLOWED, "allowed": False, "remaining": 0, "retry_after": 0.25}


class ReceivedRequest(NamedTuple):
    """A request that the stub received."""

    method: str
    target: str
    authorization: str | None
    body: Any
    reason: str | None = None


class StubService(NamedTuple):
    """The URL of the stub, and the requests that it received."""

    url: str
    received: list[ReceivedRequest]


@contextmanager
def stub_service(status: int, body: object = None, *, location: str = "") -> Iterator[StubService]:
    """Run a server that answers every request alike. Bytes are sent as they are."""
    received: list[ReceivedRequest] = []
    text = body if isinstance(body, bytes) else json.dumps(body).encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers.get("content-length", 0))
            sent = json.loads(self.rfile.read(size) or b"null")
            headers = self.headers["authorization"], self.headers["x-reason"]
            received.append(ReceivedRequest(self.command, self.path, headers[0], sent, headers[1]))
            self.send_response(status)
            if location:
                self.send_header("location", location)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            self.do_POST()

        def do_DELETE(self) -> None:
            self.do_POST()

        def do_PUT(self) -> None:
            self.do_POST()

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *arguments: object) -> None:
            """Ignore clients that close the connection before the answer is complete."""

    with serving(Server(("127.0.0.1", 0), Handler)) as server:
        yield StubService(f"http://127.0.0.1:{server.server_port}", received)


def run(*arguments: str, url: str | None = None, **environment: str) -> Result:
    """Run a command; URL, TOKEN, CA and TIMEOUT become environment variables."""
    names = ("URL", "TOKEN", "CA")
    given = {f"RATEKEEPER_{name}": environment.get(name) for name in names}
    if "TIMEOUT" in environment:
        given["RATEKEEPER_TIMEOUT"] = environment["TIMEOUT"]
    if url:
        given["RATEKEEPER_URL"] = url
    return CliRunner().invoke(app, arguments, env=given, prog_name="ratekeeper")
