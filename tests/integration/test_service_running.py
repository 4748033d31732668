"""A real `tollkeeper serve`: exact over its workers, through restarts, kills and its end."""

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

from tests.redis_servers.waiting import until
from tests.service_process import ServiceProcess, ask_on
from tollkeeper.service.envoy.protocol.messages import SERVICE as RATE_LIMIT_SERVICE


def limited(limit: Any, **more: Any) -> dict[str, Any]:
    """Rules with one limit by user."""
    return {"version": 1, "rules": [{"id": "users", "by": ["user"], "limits": [limit]}], **more}


def hammer(
    service: ServiceProcess, body: dict[str, Any], connections: int, each: int
) -> Counter[int]:
    """How many answers there were of each status, over so many connections at once."""

    def one(_: int) -> Counter[int]:
        connection = service.connect()
        try:
            asked = (ask_on(connection, "POST", "/v1/check", body).status for _ in range(each))
            return Counter(asked)
        finally:
            connection.close()

    with ThreadPoolExecutor(connections) as pool:
        return sum(pool.map(one, range(connections)), Counter())


def counted(service: ServiceProcess, outcome: str) -> float:
    """How many checks the metrics tell of, over all workers."""
    families = text_string_to_metric_families(service.ask("GET", "/metrics").body.decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "tollkeeper_checks_total" and sample.labels["outcome"] == outcome
    )


def test_a_limit_is_exact_over_four_workers_and_a_restart() -> None:
    """304 requests over 4 workers: 100 pass. After a restart none does: counts are on disk.

    The metrics, asked of any worker, tell of all of them.
    """
    with ServiceProcess(limited("100/day"), workers=4) as service:
        found = hammer(service, {"user": "42"}, connections=16, each=19)
        assert found == {200: 100, 429: 16 * 19 - 100}
        asked = {service.ask("GET", "/readyz").data["worker"] for _ in range(40)}
        assert len(asked) > 1, "all connections went to one worker"
        until(lambda: counted(service, "denied") == 204, "all are counted", 10)
        assert service.end() == 0
        service.start()
        assert service.ask("POST", "/v1/check", {"user": "42"}).status == 429
        assert service.ask("POST", "/v1/check", {"user": "43"}).status == 200


def test_a_worker_that_is_killed_is_replaced_and_its_counts_stay() -> None:
    """SIGKILL, while requests come: the limit holds, and soon there is another worker."""
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
        until(lambda: counted(service, "denied") == 50, "all are counted", 10)


def test_workers_do_not_outlive_the_main_process() -> None:
    """It is killed: nobody is left to hold the port."""
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
    """Asks without a pause on one connection, until it is told that the connection closes."""

    def __init__(self, service: ServiceProcess) -> None:
        super().__init__(daemon=True)
        self._connect: Callable[[], http.client.HTTPConnection] = service.connect
        self.answers: Counter[int] = Counter()
        self.lost: list[str] = []

    def run(self) -> None:
        """Each request that is sent on an open connection has an answer."""
        connection = self._connect()
        try:
            while True:
                answer = ask_on(connection, "POST", "/v1/check", {"user": "42"})
                self.answers[answer.status] += 1
                if answer.headers.get("connection") == "close":
                    return
        except (OSError, http.client.HTTPException) as error:
            self.lost.append(repr(error))
        finally:
            connection.close()


@pytest.mark.parametrize("everybody", [False, True])
def test_the_end_under_load_loses_no_answer(everybody: bool) -> None:
    """SIGTERM while 8 clients ask: each is told to go elsewhere, and no answer is missing.

    Also where it comes to all processes at once, as systemd has it, or twice to one, as `timeout`.
    """
    with ServiceProcess(limited("1000000/day"), "--drain-seconds", "2", workers=2) as service:
        clients = clients_of(service, 8)
        assert service.pid is not None
        for each in (*service.worker_pids(), service.pid) if everybody else ():
            os.kill(each, signal.SIGTERM)
        assert service.end(signal.SIGTERM) == 0
        assert_none_lost(clients)
        assert "Unexpected exit" not in service.log_text()


async def test_who_comes_until_the_end_is_answered_or_refused() -> None:
    """SIGTERM while 32 clients ask, each time anew: none is let in and then left alone."""
    with ServiceProcess(limited("1000000/day"), workers=2) as service:
        port = urlsplit(service.url).port or 0
        answered = Counter[int]()
        asking = [
            asyncio.create_task(ask_until_refused(port, each, answered)) for each in range(32)
        ]
        async with asyncio.timeout(30):
            while len(answered) < 32:  # noqa: ASYNC110 - what they do sets no event
                await asyncio.sleep(0.05)
        assert service.pid is not None
        os.kill(service.pid, signal.SIGTERM)
        lost = await asyncio.gather(*asking)
        assert [each for each in lost if each] == []


async def ask_until_refused(port: int, number: int, answered: Counter[int]) -> str:
    """What came where no answer did; each time on a connection of its own."""
    request = b"GET /v1/quota?user=42 HTTP/1.1\r\nHost: x\r\n\r\n"
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return ""
        try:
            writer.write(request)
            line = await reader.readline()
        except OSError as error:
            return repr(error)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        if not line.startswith(b"HTTP/1.1 200"):
            return repr(line)
        answered[number] += 1


def clients_of(service: ServiceProcess, number: int) -> list[Client]:
    """Clients that have begun to ask."""
    clients = [Client(service) for _ in range(number)]
    for client in clients:
        client.start()
    until(lambda: all(client.answers for client in clients), "all clients ask", 20)
    return clients


def assert_none_lost(clients: list[Client]) -> None:
    """All were told to go elsewhere, and have."""
    for client in clients:
        client.join(60)
    assert [client.lost for client in clients if client.lost] == []
    assert not any(client.is_alive() for client in clients)
    assert sum((client.answers for client in clients), Counter()).keys() == {200}


def test_workers_are_replaced_under_load_and_no_answer_is_lost() -> None:
    """SIGHUP while 8 clients ask: the new workers are there before the old ones go."""
    with ServiceProcess(limited("1000000/day"), workers=2) as service:
        before = set(service.worker_pids())
        clients = clients_of(service, 8)
        assert service.pid is not None
        os.kill(service.pid, signal.SIGHUP)
        ready = Counter[int]()

        def are_replaced() -> bool:
            ready[service.ask("GET", "/readyz").status] += 1
            return len(service.worker_pids()) == 2 and not before & set(service.worker_pids())

        until(are_replaced, "both workers are replaced", 120, service.log_end)
        assert ready.keys() == {200}, "balancers were told to go elsewhere"
        assert_none_lost(clients)


def test_workers_stay_where_those_that_replace_them_do_not_start() -> None:
    """The store's file is no store any more: at SIGHUP the old workers, which have it, go on."""
    with ServiceProcess(limited("5/day"), workers=2) as service:
        before = service.worker_pids()
        (service.data / "limits").rename(service.data / "moved")
        (service.data / "limits").write_text("this is not a store")
        assert service.pid is not None
        os.kill(service.pid, signal.SIGHUP)
        until(
            lambda: any(each["event"] == "not_replaced" for each in service.events()),
            "the new worker has not started",
            60,
            service.log_end,
        )
        assert service.worker_pids() == before
        assert service.ask("POST", "/v1/check", {"user": "42"}).data["degraded"] is False
        assert service.end(signal.SIGTERM) == 0


def test_a_worker_starts_with_the_last_good_rules() -> None:
    """The file has become wrong, and a worker dies: its successor does what the others do."""
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
            "the file that was mended is in force",
            30,
        )


def test_who_interrupts_a_start_gets_no_traceback() -> None:
    """Ctrl-C reaches the workers too, before they can heed it."""
    with ServiceProcess(limited("5/day"), workers=2) as service:
        assert service.end() == 0
        service.launch()
        assert service.pid is not None
        children = f"/proc/{service.pid}/task/{service.pid}/children"
        until(lambda: _numbers(children), "workers are made", 60)
        interrupted = 0

        def have_been_interrupted() -> bool:
            nonlocal interrupted
            for child in _numbers(children):
                os.kill(child, signal.SIGINT)
            interrupted += 1
            return interrupted == 20

        # While they import what they need, which takes about a second.
        until(have_been_interrupted, "they were interrupted often", 60)
        assert service.end(signal.SIGINT) == 0
        assert "Traceback" not in service.log_text()


def _numbers(path: str) -> list[int]:
    return [int(each) for each in Path(path).read_text(encoding="ascii").split()]


def test_gateways_are_told_of_the_end_before_it_comes() -> None:
    """Over gRPC too: while it drains, the health service says NOT_SERVING."""
    status = health_pb2.HealthCheckResponse
    with ServiceProcess(limited("5/day"), "--drain-seconds", "20", grpc=True) as service:
        with grpc.insecure_channel(service.grpc) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest(service=RATE_LIMIT_SERVICE)
            assert stub.Check(asked, timeout=10).status == status.SERVING
            assert service.pid is not None
            os.kill(service.pid, signal.SIGTERM)
            told_s = time.monotonic()
            until(
                lambda: stub.Check(asked, timeout=10).status == status.NOT_SERVING,
                "gateways are sent elsewhere",
                10,
            )
        # The second one does not drain. What comes at once is the same one.
        until(lambda: time.monotonic() - told_s > 1, "it is another one", 10)
        began_s = time.monotonic()
        assert service.end(signal.SIGTERM) == 0
        assert time.monotonic() - began_s < 15


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_what_has_begun_is_finished(how: signal.Signals) -> None:
    """A request that is held when the end is told is answered in its turn; /readyz says 503."""
    bucket = {"limit": 1, "per": "1s", "algorithm": "leaky_bucket", "capacity": 10}
    rules = {"version": 1, "rules": [{"id": "slow", "by": ["ip"], "limits": [bucket]}]}
    held = {"X-Original-URI": "/slow"}
    with ServiceProcess(rules, "--drain-seconds", "1") as service:
        early = service.connect()
        assert ask_on(early, "GET", "/readyz").status == 200
        assert service.ask("GET", "/v1/authorize", headers=held).status == 200
        with ThreadPoolExecutor(3) as pool:
            waiting = [
                pool.submit(service.ask, "GET", "/v1/authorize", headers=held) for _ in range(3)
            ]
            until(lambda: _queued(early) == 3, "three requests are held", 10)
            ended = pool.submit(lambda: None)
            ended.result()
            assert service.pid is not None
            os.kill(service.pid, how)
            if how == signal.SIGTERM:
                until(lambda: _ready(service) == 503, "/readyz says 503", 5)
            assert [each.result(30).status for each in waiting] == [200, 200, 200]
        early.close()
        until(lambda: service.pid is None, "it has ended", 20)
        assert {each["event"] for each in service.events()} >= {"ending", "ended"}


def _queued(connection: http.client.HTTPConnection) -> int:
    """How many wait in the leaky bucket, roughly: what is not left of it."""
    data = ask_on(connection, "GET", "/v1/quota?ip=127.0.0.1&endpoint=/slow").data
    limit = data["rules"][0]["limits"][0]
    taken: int = limit["limit"] - limit["remaining"]
    return min(taken, 3)


def _ready(service: ServiceProcess) -> int:
    try:
        return service.ask("GET", "/readyz").status
    except OSError:
        return 0
