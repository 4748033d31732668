"""The FastAPI example in four worker processes of real servers, over real connections."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.integration import web_workers
from tests.integration.asgi_servers import ROOT, serving
from tests.integration.web_workers import CLIENTS, client

STREAM_ATTEMPTS = 5


class Served(NamedTuple):
    """The URL of the example, and the server that runs it."""

    url: str
    server: str


@pytest.fixture(scope="module", params=["uvicorn", "granian"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Run the example with its limits in one file that all workers share."""
    store = f"shared://{tmp_path_factory.mktemp(request.param)}/limits"
    with serving(request.param, "fastapi_app:app", ROOT / "examples", STORE=store) as url:
        yield Served(url, request.param)


@pytest.fixture
def url(served: Served) -> str:
    """Return the URL of the example."""
    return served.url


def test_the_limit_is_exact_over_all_workers(url: str) -> None:
    """100 requests from 8 clients to 4 processes that share a file: 40 are allowed."""
    web_workers.holds_exactly(url, "/orders", "exact")


def test_headers_on_200_and_429(url: str) -> None:
    """They name both limits, the numbers of the tightest, and the time to retry."""
    web_workers.sends_both_limits(url, "/orders/7", "GET /orders/{number}", "headers")


def test_errors_have_the_headers(url: str) -> None:
    """A 404 and a 405 have those of the application, and a body that FastAPI rejects those of the
    route, too."""
    names = "default", "POST /login", "POST /login#2"
    for method, path, status, count in (
        ("GET", "/missing", 404, 1),
        ("DELETE", "/search", 405, 1),
        ("POST", "/login", 422, 3),
    ):
        answer = client().request(method, f"{url}{path}", json={})
        policies = re.findall(r'"([^"]+)";q=', answer.headers["RateLimit-Policy"])
        assert (answer.status_code, *policies) == (status, *names[:count])
        assert int(answer.headers["X-RateLimit-Remaining"]) >= 0


def test_retry_after_once_waited_succeeds(url: str) -> None:
    """A client that waits exactly as long as Retry-After says is allowed."""
    web_workers.allows_after_retry_after(url, "/search")


def test_costs_are_settled(url: str) -> None:
    """They are settled before the response ends, so the next request of any worker sees it."""
    web_workers.settles_costs(url)


def test_a_stream_arrives_in_parts(url: str) -> None:
    """The first part arrives before the last is created: the middleware buffers nothing."""
    for _ in range(STREAM_ATTEMPTS):  # a machine may pause; buffering would fail each time
        made, arrived = [], []
        with client().stream("GET", f"{url}/stream") as answer:
            for line in answer.iter_lines():
                arrived.append(time.monotonic_ns())
                made.append(int(line))
        assert answer.headers["X-RateLimit-Limit"] == "1000"
        assert len(made) == 3
        if arrived[0] < made[-1]:
            return
    pytest.fail("the first part never arrived before the last was created")


def test_a_websocket_over_the_limit_is_denied(served: Served) -> None:
    """Messages are echoed, the handshake has the headers, and the sixth of five is denied."""
    address = served.url.replace("http", "ws") + "/echo"
    for remaining in range(4, -1, -1):
        with connect(address) as websocket:
            for text in ("one", "two"):
                websocket.send(text)
                assert websocket.recv(timeout=30) == text
            # granian does not send the application's headers with the handshake.
            if served.server == "uvicorn":
                assert websocket.response is not None
                assert websocket.response.headers["X-RateLimit-Remaining"] == str(remaining)
    with pytest.raises(InvalidStatus) as refused, connect(address):
        pass
    assert refused.value.response.status_code == 429
    assert int(refused.value.response.headers["Retry-After"]) > 0


def test_only_failed_logins_count(url: str) -> None:
    """20 correct passwords in sequence pass; of 20 concurrent wrong ones, exactly 3 are tried."""

    def log_in(password: str) -> int:
        body = {"user": "ada", "password": password}
        return client().post(f"{url}/login", json=body).status_code

    assert [log_in("correct horse") for _ in range(20)] == [200] * 20
    with ThreadPoolExecutor(CLIENTS) as guessers:
        assert Counter(guessers.map(log_in, ["guess"] * 20)) == {401: 3, 429: 17}
    assert log_in("correct horse") == 429
