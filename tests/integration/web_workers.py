"""A web application in several worker processes of a real server, and the checks for each.

The assertions are the same for each framework, so this module has them, and each framework's test
file passes its application, server and path.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path

import httpx

from tests.redis_servers.waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"
WORKERS = 4
CLIENTS = 8
STARTS_WITHIN_SECONDS = 60
STOPS_WITHIN_SECONDS = 10
ANSWERS_WITHIN_SECONDS = 30
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")
# The log lines of gunicorn and of uvicorn.
_STARTED = re.compile(r"Booting worker with pid: (\d+)|Started server process \[(\d+)\]")


def gunicorn(application: str) -> list[str]:
    """Return the command for sync workers, each of which serves one request at a time."""
    return [
        *(sys.executable, "-m", "gunicorn", application, "--chdir", str(EXAMPLES)),
        *("--workers", str(WORKERS), "--bind", "127.0.0.1:0"),
    ]


def uvicorn(application: str) -> list[str]:
    """Return the command for ASGI workers of an application without a lifespan."""
    return [
        *(sys.executable, "-m", "uvicorn", application, "--app-dir", str(EXAMPLES)),
        *("--workers", str(WORKERS), "--host", "127.0.0.1", "--port", "0", "--lifespan", "off"),
    ]


@contextmanager
def serving(command: Sequence[str], folder: Path) -> Iterator[str]:
    """Run an application with limits in one shared file; yield its URL when all workers serve."""
    log = folder / "server.log"
    environment = {**os.environ, "STORE": f"shared://{folder}/limits", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )

    def address() -> str | None:
        assert process.poll() is None, log.read_text()
        text = log.read_text()
        found = _ADDRESS.search(text)
        all_started = len(set(_STARTED.findall(text))) >= WORKERS
        return f"http://127.0.0.1:{found[1]}" if found and all_started else None

    try:
        url = until(address, "the workers start", STARTS_WITHIN_SECONDS, log.read_text)
        until(lambda: _answers(url), "the server answers", STARTS_WITHIN_SECONDS, log.read_text)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOPS_WITHIN_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(url: str) -> bool:
    # A port may be taken before the first worker listens on it.
    with suppress(httpx.ConnectError):
        return client().get(f"{url}/hello").status_code == 200
    return False


@cache
def client() -> httpx.Client:
    """Return a client for all threads; any worker may serve a request, on a new connection."""
    one_each = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(timeout=ANSWERS_WITHIN_SECONDS, limits=one_each)


def ask(url: str, paths: Sequence[str], **headers: str) -> list[httpx.Response]:
    """Return the responses to concurrent requests of several clients."""

    def get(path: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return client().get(url + path, headers=named)

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(get, paths))


@contextmanager
def clients_of_several_workers(url: str) -> Iterator[list[httpx.Client]]:
    """Yield clients with a connection each, kept alive if possible, to more than one worker."""
    clients: list[httpx.Client] = []
    workers: set[int] = set()

    def are_several() -> bool:
        # One more each time: an awake worker may accept all waiting connections.
        clients.append(httpx.Client(base_url=url, timeout=ANSWERS_WITHIN_SECONDS, verify=False))
        workers.update(each.get("/hello").json()["worker"] for each in clients[-1:])
        return len(workers) > 1 and len(clients) >= CLIENTS

    try:
        until(are_several, "more than one worker answers", ANSWERS_WITHIN_SECONDS)
        yield clients
    finally:
        for each in clients:
            each.close()


def holds_exactly(url: str, prefix: str, key: str) -> None:
    """Exactly 40 requests a day are allowed over all paths of the route and all workers.

    Where connections are not kept alive, one worker may serve all requests. Then other keys follow.
    """
    rounds = count()
    until(
        lambda: len(_workers_of_a_key(url, prefix, f"{key}-{next(rounds)}")) > 1,
        "more than one worker allows requests of a key",
        ANSWERS_WITHIN_SECONDS,
    )


def _workers_of_a_key(url: str, prefix: str, key: str) -> set[int]:
    """Return the workers that allowed the 40 of 100 requests of a key."""
    with clients_of_several_workers(url) as clients, ThreadPoolExecutor(CLIENTS) as pool:
        chosen = [*clients[: CLIENTS - 1], clients[-1]]  # the last has another worker

        def get(number: int) -> httpx.Response:
            one = chosen[number % CLIENTS]
            return one.get(f"{prefix}/{number}", headers={"X-API-Key": key})

        # First one request of each client, so that every client has an allowed request.
        answers = list(pool.map(get, range(CLIENTS)))
        answers += pool.map(get, range(CLIENTS, 100))
    assert Counter(each.status_code for each in answers) == {200: 40, 429: 60}
    passed = [each for each in answers if each.status_code == 200]
    left = sorted(int(each.headers["X-RateLimit-Remaining"]) for each in passed)
    assert left == list(range(40))
    return {each.json()["worker"] for each in passed}


def sends_both_limits(url: str, path: str, name: str, key: str) -> None:
    """A response has the policies of the application and of the route; a denial has Retry-After."""
    answers = [*ask(url, [path], x_api_key=key), *ask(url, [path] * 40, x_api_key=key)]
    allowed = answers[0].headers
    assert allowed["RateLimit-Policy"] == f'"default";q=1000;w=60, "{name}";q=40;w=86400'
    # The quota is full again when one unit has been refilled: after a 40th of a day.
    assert allowed["RateLimit"] == f'"{name}";r=39;t=2160'
    assert (allowed["X-RateLimit-Limit"], allowed["X-RateLimit-Remaining"]) == ("40", "39")
    assert abs(int(allowed["X-RateLimit-Reset"]) - 2_160 - time.time()) < 60
    refused = next(each for each in answers if each.status_code == 429)
    assert refused.headers["Content-Type"] == "application/problem+json"
    assert 0 < int(refused.headers["Retry-After"]) <= 2_160
    assert refused.headers["RateLimit"].startswith(f'"{name}";r=0;t=')
    assert refused.json()["violated-policies"] == [name]
    assert refused.json()["error"]["code"] == "RATE_LIMIT_EXCEEDED"


def allows_after_retry_after(url: str, path: str) -> None:
    """A denied client is allowed after Retry-After seconds."""

    def refused() -> httpx.Response | None:
        answer = ask(url, [path])[0]
        return answer if answer.status_code == 429 else None

    answer = until(refused, "a request is denied", ANSWERS_WITHIN_SECONDS)
    time.sleep(int(answer.headers["Retry-After"]))
    assert ask(url, [path])[0].status_code == 200


def streams_untouched(url: str, path: str) -> None:
    """The first part arrives before the last is created, and no byte is added or lost."""
    with client().stream("GET", url + path) as response:
        assert response.headers["X-RateLimit-Limit"] == "1000"
        assert "Content-Length" not in response.headers
        arrived_ns = []
        lines = []
        for line in response.iter_lines():
            arrived_ns.append(time.monotonic_ns())
            lines.append(int(line))
    assert len(lines) == 3
    assert lines == sorted(lines)
    # The clock that counts from boot is the same in every process of a machine.
    assert arrived_ns[0] < lines[-1]


def sends_its_source(url: str, name: str) -> None:
    """A file is sent complete and with headers, in any way the server supports."""
    response = ask(url, ["/source"])[0]
    assert response.content == (EXAMPLES / name).read_bytes()
    assert response.headers["X-RateLimit-Limit"] == "1000"


def counts_failed_logins_only(url: str) -> None:
    """20 correct passwords in sequence pass; of 20 concurrent wrong ones, exactly 3 are tried."""

    def log_in(word: str) -> int:
        data = {"user": "ada", "password": word}
        return client().post(f"{url}/login", data=data).status_code

    def log_in_each(*words: str) -> Counter[int]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            return Counter(pool.map(log_in, words))

    assert [log_in("correct horse") for _ in range(20)] == [200] * 20
    assert log_in_each(*["guess"] * 20) == {401: 3, 429: 17}
    assert log_in("correct horse") == 429


def settles_costs(url: str) -> None:
    """500 units a day, 100 charged first and 4 in the end: 100 requests in sequence fit."""
    answers = [client().get(f"{url}/complete?prompt=tea") for _ in range(100)]
    left = [int(each.headers["X-RateLimit-Remaining"]) for each in answers]
    assert left == [400 - 4 * number for number in range(100)]
