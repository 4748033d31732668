"""The transports for httpx against a real server that limits, over real connections."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from ratekeeper import Limiter
from ratekeeper.httpx import AsyncRetryTransport, RetryTransport
from tests.http_thread import serving

MANY = "100/second"


class Server(ThreadingHTTPServer):
    """Allows one request a second and records the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.limiter = Limiter("1/second")
        self.connections = 0
        self.statuses: list[int] = []
        self.bodies: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        decision = self.server.limiter.check("all")
        status = 200 if decision else 429
        self.server.statuses.append(status)
        body = b"welcome" if decision else b"not now"
        self.send_response(status)
        if not decision:
            self.send_header("Retry-After", str(math.ceil(decision.retry_after)))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    """Run a server on loopback for one test."""
    with serving(Server()) as server:
        yield server


def test_retry_after_once_waited_succeeds(server: Server) -> None:
    """The second request is denied once, waits, and passes on the same connection."""
    with httpx.Client(transport=RetryTransport(pace=False, budget=MANY)) as client:
        answers = [client.post(server.url, content=b"order") for _ in range(2)]
    assert [(each.status_code, each.content) for each in answers] == [(200, b"welcome")] * 2
    assert server.statuses == [200, 429, 200]
    assert server.bodies == [b"order"] * 3
    assert server.connections == 1


def test_threads_on_one_client_all_pass(server: Server) -> None:
    """Four threads share a limit of one: each request waits, and none fails."""
    with (
        httpx.Client(transport=RetryTransport(attempts_max=20, budget=MANY)) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        found = [pool.submit(client.post, server.url, content=b"x") for _ in range(4)]
        assert [each.result().status_code for each in found] == [200] * 4


async def test_the_event_loop_is_free_while_a_request_waits(server: Server) -> None:
    """Another task runs between the denial and the next attempt."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    transport = AsyncRetryTransport(pace=False, budget=MANY)
    async with httpx.AsyncClient(transport=transport) as client:
        await client.post(server.url, content=b"x")
        counting = asyncio.create_task(count())
        answer = await client.post(server.url, content=b"x")
        counting.cancel()
    assert answer.status_code == 200
    assert server.statuses == [200, 429, 200]
    assert turns >= 2
