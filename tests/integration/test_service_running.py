"""A real `ratekeeper serve`: exact limits over its workers, restarts, kills and shutdown."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from ratekeeper.service.envoy.protocol.messages import SERVICE as RATE_LIMIT_SERVICE
from tests.redis_servers.waiting import until
from tests.service_process import ServiceProcess, ask_on

DRAIN_SECONDS = 2


def limited(limit: Any, **more: Any) -> dict[str, Any]:
    """Return a rule document with one limit per user."""
    return {"version": 1, "rules": [{"id": "users", "by": ["user"], "limits": [limit]}], **more}


def hammer(
    service: ServiceProcess, body: dict[str, Any], connections: int, each: int
) -> Counter[int]:
    """Send checks over several connections at once; count the answers by status."""

    def one(_: int) -> Counter[int]:
        connection = service.connect()
        try:
            statuses = (ask_on(connection, "POST", "/v1/check", body).status for _ in range(each))
            return Counter(statuses)
        finally:
            connection.close()

    with ThreadPoolExecutor(connections) as pool:
        return sum(pool.map(one, range(connections)), Counter())


def counted(service: ServiceProcess, outcome: str) -> float:
    """Return the number of checks of all workers, from the metrics."""
    families = text_string_to_metric_families(service.ask("GET", "/metrics").body.decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "ratekeeper_checks_total" and sample.labels["outcome"] == outcome
    )


def test_limit_is_exact_over_four_workers_and_a_restart() -> None:
    """304 requests over 4 workers: 100 pass. After a restart none does: counts are on disk.

    The metrics of any worker contain the counts of all.
    """
    with ServiceProcess(limited("100/day"), workers=4) as service:
        found = hammer(service, {"user": "42"}, connections=16, each=19)
        assert found == {200: 100, 429: 16 * 19 - 100}
        workers = {service.ask("GET", "/readyz").data["worker"] for _ in range(40)}
        assert len(workers) > 1, "all connections went to one worker"
        until(lambda: counted(service, "denied") == 204, "all are counted", 60)
        assert service.end() == 0
        service.start()
        assert service.ask("POST", "/v1/check", {"user": "42"}).status == 429
        assert service.ask("POST", "/v1/check", {"user": "43"}).status == 200


def test_killed_worker_is_replaced_and_its_counts_stay() -> None:
    """The limit still holds after SIGKILL, and a new worker starts."""
    with ServiceProcess(limited("50/day"), workers=2) as service:
        assert hammer(service, {"user": "42"}, connections=4, each=5) == {200: 20}
        before = service.worker_pids()
        os.kill(before[0], signal.SIGKILL)
        until(
            lambda: len(set(service.worker_pids()) - set(before)) == 1 and service.is_listening(),
            "another worker has started",
            30,
            service.log_end,
        )
        found = hammer(service, {"user": "42"}, connections=8, each=10)
        assert found == {200: 30, 429: 50}
        until(lambda: counted(service, "denied") == 50, "all are counted", 60)


def test_workers_do_not_outlive_the_main_process() -> None:
    """After SIGKILL of the main process, no worker keeps the port."""
    with ServiceProcess(limited("50/day"), workers=2) as service:
        workers = service.worker_pids()
        assert service.pid is not None
        os.kill(service.pid, signal.SIGKILL)
        until(lambda: not any(map(_runs, workers)), "the workers have ended", 20)
        service.start()
        assert service.ask("GET", "/healthz").status == 200


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Client(threading.Thread):
    """Sends checks on one connection, until an answer says that it closes.

    Eight of them send a thousand checks a second: without a pause, they would use all cores.
    """

    def __init__(self, service: ServiceProcess) -> None:
        super().__init__(daemon=True)
        self._connect: Callable[[], http.client.HTTPConnection] = service.connect
        self.answers: Counter[int] = Counter()
        self.lost: list[str] = []
        self._pause = threading.Event()

    def run(self) -> None:
        """Send requests; every one on an open connection must be answered."""
        connection = self._connect()
        try:
            while True:
                answer = ask_on(connection, "POST", "/v1/check", {"user": "42"})
                self.answers[answer.status] += 1
                if answer.headers.get("connection") == "close":
                    return
                self._pause.wait(0.008)
        except (OSError, http.client.HTTPException) as error:
            self.lost.append(repr(error))
        finally:
            connection.close()


@pytest.mark.parametrize("all_processes", [False, True])
def test_shutdown_under_load_loses_no_answer(all_processes: bool) -> None:
    """SIGTERM while 8 clients send checks: each gets `Connection: close` and every answer.

    Also if all processes get the signal at once (systemd), or the main process twice (`timeout`).
    """
    with ServiceProcess(limited("1000000/day"), "--drain-seconds", "2", workers=2) as service:
        clients = clients_of(service, 8)
        assert service.pid is not None
        for each in (*service.worker_pids(), service.pid) if all_processes else ():
            os.kill(each, signal.SIGTERM)
        assert service.end(signal.SIGTERM) == 0
        assert_none_lost(clients)
        assert "Unexpected exit" not in service.log_text()


async def test_new_connections_during_shutdown() -> None:
    """SIGTERM while 32 clients open a connection per request: no answer is cut off.

    Each connection is answered completely, refused, or (if it was waiting in the backlog when the
    listening socket closed) closed without a single byte. During the drain all are answered.
    """
    drain = ("--drain-seconds", str(DRAIN_SECONDS))
    with ServiceProcess(limited("1000000/day"), *drain, workers=2) as service:
        port = urlsplit(service.url).port or 0
        answered = Counter[int]()
        clients = [
            asyncio.create_task(connect_until_refused(port, each, answered)) for each in range(32)
        ]
        async with asyncio.timeout(30):
            while len(answered) < 32:  # noqa: ASYNC110 - a Counter sets no event
                await asyncio.sleep(0.05)
        assert service.pid is not None
        signalled_s = time.monotonic()
        os.kill(service.pid, signal.SIGTERM)
        ends = await asyncio.gather(*clients)
        assert {received for received, _ in ends} == {b""}
        assert min(ended_s for _, ended_s in ends) - signalled_s > DRAIN_SECONDS - 0.1


async def connect_until_refused(
    port: int, number: int, answered: Counter[int]
) -> tuple[bytes, float]:
    """Send requests, each on a new connection, until one is not answered.

    Returns what the last connection received, and when it ended.
    """
    request = b"GET /v1/quota?user=42 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    while True:
        received = b""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return received, time.monotonic()
        try:
            writer.write(request)
            while piece := await reader.read(65_536):
                received += piece
        except OSError:
            return received, time.monotonic()
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        if not received.startswith(b"HTTP/1.1 200") or not received.endswith(b"}"):
            return received, time.monotonic()
        answered[number] += 1
        await asyncio.sleep(0.02)


def clients_of(service: ServiceProcess, number: int) -> list[Client]:
    """Start clients; return when each has had an answer."""
    clients = [Client(service) for _ in range(number)]
    for client in clients:
        client.start()
    until(lambda: all(client.answers for client in clients), "all clients have an answer", 20)
    return clients


def assert_none_lost(clients: list[Client]) -> None:
    """Every client got all its answers and was asked to close its connection."""
    for client in clients:
        client.join(60)
    assert [client.lost for client in clients if client.lost] == []
    assert not any(client.is_alive() for client in clients)
    assert sum((client.answers for client in clients), Counter()).keys() == {200}


def test_replacing_workers_under_load_loses_no_answer() -> None:
    """SIGHUP while 8 clients send checks: new workers listen before the old ones stop."""
    with ServiceProcess(limited("1000000/day"), workers=2) as service:
        before = set(service.worker_pids())
        clients = clients_of(service, 8)
        assert service.pid is not None
        os.kill(service.pid, signal.SIGHUP)
        ready = Counter[int]()

        def are_replaced() -> bool:
            # A new connection may be waiting in the backlog that an old worker closes.
            with suppress(ConnectionResetError):
                ready[service.ask("GET", "/readyz").status] += 1
            return len(service.worker_pids()) == 2 and not before & set(service.worker_pids())

        until(are_replaced, "both workers are replaced", 120, service.log_end)
        assert ready.keys() == {200}, "load balancers would have removed the node"
        assert_none_lost(clients)


def test_workers_stay_if_their_replacements_cannot_start() -> None:
    """New workers cannot read the token file; the old ones, which started without, keep serving."""
    with ServiceProcess(limited("5/day"), workers=2) as service:
        before = service.worker_pids()
        (service.data / "tokens.json").write_text("this is not a token file")
        assert service.pid is not None
        os.kill(service.pid, signal.SIGHUP)
        until(
            lambda: any(each["event"] == "not_replaced" for each in service.events()),
            "the replacement worker fails",
            60,
            service.log_end,
        )
        assert service.worker_pids() == before
        assert service.ask("POST", "/v1/check", {"user": "42"}).data["degraded"] is False
        assert service.end(signal.SIGTERM) == 0


def test_restarted_worker_uses_the_last_good_rules() -> None:
    """The rule file is invalid when a worker dies: the new one uses the rules of the others."""
    with ServiceProcess(limited("5/day"), workers=1) as service:
        good = service.ask("GET", "/readyz").data["rules"]["version"]
        service.use({"version": 1, "rules": [{"id": "x", "by": ["user"], "limits": ["1/eon"]}]})
        [before] = service.worker_pids()
        os.kill(before, signal.SIGKILL)
        until(
            lambda: service.worker_pids() not in ([], [before]) and service.is_listening(),
            "another worker has started",
            60,
            service.log_end,
        )
        rules = service.ask("GET", "/readyz").data["rules"]
        assert (rules["version"], rules["origin"]) == (good, "snapshot")
        assert "1/eon" in rules["error"]
        service.use(limited("7/day"))
        until(
            lambda: service.ask("POST", "/v1/check", {"user": "42"}).data["limit"] == 7,
            "the corrected file is in force",
            30,
        )


def test_interrupted_startup_prints_no_traceback() -> None:
    """Ctrl-C also reaches workers that have no signal handler yet."""
    with ServiceProcess(limited("5/day"), workers=2) as service:
        assert service.end() == 0
        service.launch()
        assert service.pid is not None
        children = f"/proc/{service.pid}/task/{service.pid}/children"
        # One more than the workers: the resource tracker of multiprocessing is a child, too.
        until(lambda: len(_numbers(children)) == 3, "workers are started", 60)
        interrupted = 0

        def were_interrupted() -> bool:
            nonlocal interrupted
            for child in _numbers(children):
                os.kill(child, signal.SIGINT)
            interrupted += 1
            return interrupted == 20

        # While they import their modules, which takes about a second.
        until(were_interrupted, "the workers were interrupted 20 times", 60)
        assert service.end(signal.SIGINT) == 0
        assert "Traceback" not in service.log_text()


def _numbers(path: str) -> list[int]:
    return [int(each) for each in Path(path).read_text(encoding="ascii").split()]


def test_grpc_health_reports_the_drain() -> None:
    """During the drain, the gRPC health service reports NOT_SERVING."""
    status = health_pb2.HealthCheckResponse
    with ServiceProcess(limited("5/day"), "--drain-seconds", "20", grpc=True) as service:
        with grpc.insecure_channel(service.grpc) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=RATE_LIMIT_SERVICE)
            assert stub.Check(request, timeout=10).status == status.SERVING
            assert service.pid is not None
            os.kill(service.pid, signal.SIGTERM)
            signalled_s = time.monotonic()
            until(
                lambda: stub.Check(request, timeout=10).status == status.NOT_SERVING,
                "health is NOT_SERVING",
                10,
            )
        # A second SIGTERM ends the drain, unless it follows at once (`timeout` sends two).
        until(lambda: time.monotonic() - signalled_s > 1, "a second has passed", 10)
        began_s = time.monotonic()
        assert service.end(signal.SIGTERM) == 0
        assert time.monotonic() - began_s < 15


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_requests_in_progress_are_answered(how: signal.Signals) -> None:
    """A request that waits in a leaky bucket is answered after the signal; /readyz is 503."""
    bucket = {"limit": 1, "per": "1s", "algorithm": "leaky_bucket", "capacity": 10}
    rules = {"version": 1, "rules": [{"id": "slow", "by": ["ip"], "limits": [bucket]}]}
    held = {"X-Original-URI": "/slow"}
    # The requests take up to three seconds, and a busy machine needs time to see the 503.
    with ServiceProcess(rules, "--drain-seconds", "3") as service:
        assert service.ask("GET", "/readyz").status == 200
        assert service.ask("GET", "/v1/authorize", headers=held).status == 200
        with ThreadPoolExecutor(3) as pool:
            waiting = [
                pool.submit(service.ask, "GET", "/v1/authorize", headers=held) for _ in range(3)
            ]
            until(lambda: counted(service, "allowed") == 4, "three requests wait", 20)
            assert service.pid is not None
            os.kill(service.pid, how)
            if how == signal.SIGTERM:
                until(lambda: _ready(service) == 503, "/readyz says 503", 20)
            assert [each.result(30).status for each in waiting] == [200, 200, 200]
        until(lambda: service.pid is None, "the service has ended", 20)
        assert {each["event"] for each in service.events()} >= {"ending", "ended"}


def _ready(service: ServiceProcess) -> int:
    try:
        return service.ask("GET", "/readyz").status
    except OSError:
        return 0
