"""A real `tollkeeper serve`: exact over its workers, through restarts, kills and its end."""

from __future__ import annotations

import http.client
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.redis_servers.waiting import until
from tests.service_process import ServiceProcess, ask_on
from tollkeeper.edge.envoy.protocol.messages import SERVICE as RATE_LIMIT_SERVICE


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


def test_the_end_under_load_loses_no_answer() -> None:
    """SIGTERM while 8 clients ask: each is told to go elsewhere, and no answer is missing."""
    with ServiceProcess(limited("1000000/day"), "--drain-seconds", "2", workers=2) as service:
        clients = [Client(service) for _ in range(8)]
        for client in clients:
            client.start()
        until(lambda: all(client.answers for client in clients), "all clients ask", 20)
        assert service.end(signal.SIGTERM) == 0
        for client in clients:
            client.join(20)
        assert [client.lost for client in clients if client.lost] == []
        assert sum((client.answers for client in clients), Counter()).keys() == {200}


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
            until(
                lambda: stub.Check(asked, timeout=10).status == status.NOT_SERVING,
                "gateways are sent elsewhere",
                10,
            )
        # The second one does not drain.
        assert service.end(signal.SIGTERM) == 0


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
