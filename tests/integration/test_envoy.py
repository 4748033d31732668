"""A real Envoy in front of a small application; it calls the service over gRPC."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from ratekeeper import AsyncLimiter, Request
from ratekeeper.service.envoy.descriptors import SETTLE
from ratekeeper.service.http.tokens import Tokens, create_token
from tests.envoy_process import Config, Envoy, cluster_of, example, filter_of, rate_limits_of
from tests.redis_servers.ports import HOST, free_port
from tests.service.envoy.client import serving
from tests.service_process import ServiceProcess

BY_ADDRESS = {"version": 1, "rules": [
    {"id": "api", "match": {"attributes": {"domain": "shop"}}, "by": ["ip"], "limits": ["5/hour"]},
]}  # fmt: skip
BY_KEY = {"version": 1, "rules": [
    {"id": "keys", "match": {"api_key": "*"}, "by": ["api_key"], "limits": ["2/hour"]},
    {"id": "addresses", "match": {"ip": "127.0.0.0/8"}, "by": ["ip"], "limits": ["9/hour"]},
]}  # fmt: skip


class Application:
    """An HTTP server that counts its requests and returns a request's x-cost as its cost."""

    def __init__(self) -> None:
        self.served = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.served += 1
                cost = re.search(rb"(?i)^x-cost: (\d+)", head, re.MULTILINE)
                used = b"x-tokens-used: %b\r\n" % cost[1] if cost else b""
                writer.write(b"HTTP/1.1 200 OK\r\n%bcontent-length: 2\r\n\r\nok" % used)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


class Edge:
    """Envoy, the application behind it, and a client in front."""

    def __init__(self, envoy: Envoy, application: Application, client: httpx.AsyncClient) -> None:
        self.envoy = envoy
        self.application = application
        self.client = client

    async def get(self, path: str = "/", **headers: str) -> httpx.Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.get(self.envoy.url + path, headers=sent)

    async def statuses(self, count: int, path: str = "/", **headers: str) -> list[int]:
        """Send requests one after another; return their statuses."""
        return [(await self.get(path, **headers)).status_code for _ in range(count)]


@asynccontextmanager
async def edge(port: int, change: Any = None) -> AsyncIterator[Edge]:
    """Run the example's Envoy with the service on `port`; `change` edits its configuration."""
    application = Application()
    server = await asyncio.start_server(application.serve, HOST, 0)
    config: Config = example(server.sockets[0].getsockname()[1], port)
    # On a busy machine a reply may take longer than a sensible timeout.
    filter_of(config)["timeout"] = "20s"
    if change is not None:
        change(config)
    envoy = Envoy(config)
    try:
        await asyncio.to_thread(envoy.start)
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=100)) as client:
            yield Edge(envoy, application, client)
    finally:
        await asyncio.to_thread(envoy.stop)
        server.close()
        await server.wait_closed()


@pytest.fixture
async def shared_edge() -> AsyncIterator[Edge]:
    """Yield the example's Envoy with a rule for each address."""
    async with serving(BY_ADDRESS) as service, edge(service.handle.port) as found:
        yield found


def without_health_checks(config: Config) -> None:
    """Remove the health checks, so that the filter decides, not the cluster's health."""
    del cluster_of(config, "ratekeeper")["health_checks"]


async def test_limits_hold_exactly_and_headers_reach_the_client() -> None:
    """Of 60 concurrent requests exactly the limit passes, and each has the headers."""
    rules = {"version": 1, "rules": [{"id": "api", "by": ["ip"], "limits": ["20/hour"]}]}
    async with serving(rules) as service, edge(service.handle.port) as there:
        answers = await asyncio.gather(*[there.get(f"/item/{n}?q=1") for n in range(60)])
        passed = [each for each in answers if each.status_code == 200]
        denied = [each for each in answers if each.status_code == 429]
        assert (len(passed), len(denied)) == (20, 40)
        assert there.application.served == 20
        remaining = sorted(int(each.headers["x-ratelimit-remaining"]) for each in passed)
        assert remaining == list(range(20))
        for each in answers:
            assert each.headers["x-ratelimit-limit"] == "20"
            assert each.headers["ratelimit-policy"] == '"api";q=20;w=3600'
            assert each.headers["ratelimit"].startswith('"api";r=')
            assert each.headers.get_list("x-ratelimit-reset")


async def test_an_escaped_slash_does_not_slip_past_a_limit_on_a_path() -> None:
    """The example's Envoy rejects it before it calls the service or the application."""
    rule = {"id": "keys", "match": {"endpoint": "/admin/keys"}, "by": ["ip"], "limits": ["1/hour"]}
    rules = {"version": 1, "rules": [rule]}
    async with serving(rules) as service, edge(service.handle.port) as there:
        assert await there.statuses(2, "/admin/keys") == [200, 429]
        assert await there.statuses(2, "/admin%2Fkeys") == [400, 400]
        assert there.application.served == 1


@pytest.mark.parametrize(
    "target",
    [
        "/search/foo/../../x",
        "/search/foo/%2e%2e/%2E./x",
        "/search/..%2f..%2fx",
        "/search\\..\\x",
        "/search/foo/./x",
        "/x/..?a=b",
        "/search//../x",
    ],
)
async def test_an_ambiguous_path_reaches_neither_the_service_nor_the_application(
    shared_edge: Edge, target: str
) -> None:
    """The example's Envoy rejects it: the application may serve another path than was limited."""
    served = shared_edge.application.served
    url = urlsplit(shared_edge.envoy.url)
    reader, writer = await asyncio.open_connection(HOST, url.port)
    writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % target.encode())
    assert (await reader.readline()).split()[1] == b"400"
    writer.close()
    assert shared_edge.application.served == served


async def test_the_node_reaches_the_client(shared_edge: Edge) -> None:
    """Also through Envoy, on allowed requests and on denials. Unusual paths pass."""
    paths = ("/.well-known/x", "/a..b?next=/../x", "/...", "/v1/%6Frders", "/x", "/x")
    answers = [await shared_edge.get(path) for path in paths]
    assert [each.status_code for each in answers] == [200] * 5 + [429]
    assert {each.headers["x-ratekeeper-node"] for each in answers} == {"test-1"}


async def test_a_denial_has_a_body_and_retry_after() -> None:
    """A denial is 429 with problem JSON and Retry-After; the application is not called."""
    async with serving(BY_ADDRESS) as service, edge(service.handle.port) as there:
        assert await there.statuses(5) == [200] * 5
        refused = await there.get()
        assert refused.status_code == 429
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.headers["cache-control"] == "no-store"
        body = refused.json()
        assert body["status"] == 429
        assert body["error"]["code"] == "RATE_LIMIT_EXCEEDED"
        assert body["violated-policies"] == ["api"]
        wait_s = int(refused.headers["retry-after"])
        assert wait_s == body["error"]["details"]["retry_after_seconds"]
        request = Request(ip="127.0.0.1", attributes={"domain": "shop"})
        peeked = await service.limiter.evaluate(request, spend=False)
        assert abs(wait_s - math.ceil(peeked.decision.retry_after)) <= 1
        assert there.application.served == 5


@pytest.mark.parametrize(("deny", "status"), [(False, 200), (True, 500)])
async def test_without_the_service_envoy_decides(deny: bool, status: int) -> None:
    """`failure_mode_deny` decides while the service is unavailable."""

    def change(config: Config) -> None:
        without_health_checks(config)
        filter_of(config)["failure_mode_deny"] = deny

    async with serving(BY_ADDRESS) as service, edge(service.handle.port, change) as there:
        assert await there.statuses(6) == [200] * 5 + [429]
        await service.handle.stop(0)
        assert await there.statuses(3) == [status] * 3


async def test_envoys_health_check_reaches_the_service() -> None:
    """Envoy's health check calls the health service and marks the cluster healthy."""
    async with serving(BY_ADDRESS) as service, edge(service.handle.port) as there:
        assert await there.statuses(6) == [200] * 5 + [429]
        assert "health_flags::healthy" in there.envoy.admin("clusters")
        stats = there.envoy.admin("stats?filter=cluster.ratekeeper.health_check.success")
        assert not stats.strip().endswith(": 0")


@pytest.mark.parametrize(
    ("on_failure", "deny", "status"), [("open", True, 200), ("closed", False, 429)]
)
async def test_on_failure_has_priority_over_failure_mode_deny(
    on_failure: str, deny: bool, status: int
) -> None:
    """While the store is unavailable, the rule's `on_failure` decides, not Envoy."""
    rules = {"version": 1, "rules": [
        {"id": "api", "by": ["ip"], "limits": ["5/hour"], "on_failure": on_failure},
    ]}  # fmt: skip

    def change(config: Config) -> None:
        filter_of(config)["failure_mode_deny"] = deny

    away = f"redis://{HOST}:{free_port()}"
    async with serving(rules, store=away) as service, edge(service.handle.port, change) as there:
        for _ in range(3):
            answer = await there.get()
            assert answer.status_code == status
            assert answer.headers["x-ratelimit-remaining"] == "-1"
            assert answer.headers["x-ratelimit-policy"] == "degraded"


async def test_two_descriptors_with_different_results() -> None:
    """If one descriptor is denied, the request is denied and the other is not charged."""

    def change(config: Config) -> None:
        rate_limits_of(config)[:] = [
            {"actions": [{"remote_address": {}}]},
            {"actions": [{"request_headers": {"header_name": "x-api-key",
                                              "descriptor_key": "api_key"}}]},
        ]  # fmt: skip

    async with serving(BY_KEY) as service, edge(service.handle.port, change) as there:
        assert await there.statuses(5, x_api_key="a") == [200, 200, 429, 429, 429]
        refused = await there.get(x_api_key="a")
        assert refused.json()["violated-policies"] == ["keys"]
        assert refused.headers["ratelimit-policy"] == '"addresses";q=9;w=3600, "keys";q=2;w=3600'
        # Two of nine are spent by address: denials by `keys` were not charged there.
        assert await there.statuses(5) == [200] * 5
        assert await there.statuses(3, x_api_key="b") == [200, 200, 429]
        last = await there.get()
        assert last.status_code == 429
        assert last.json()["violated-policies"] == ["addresses"]


async def test_one_descriptor_with_all_facts_of_a_request() -> None:
    """In the example's descriptor, rules find the address, key, path and method."""
    rules = {"version": 1, "rules": [
        {"id": "writes", "match": {"endpoint": "/v1/orders/*", "method": "GET", "api_key": "*"},
         "by": ["api_key"], "limits": ["2/hour"]},
        {"id": "addresses", "by": ["ip"], "limits": ["6/hour"]},
    ]}  # fmt: skip
    async with serving(rules) as service, edge(service.handle.port) as there:
        assert await there.statuses(3, "/v1/orders/7?a=b", x_api_key="a") == [200, 200, 429]
        assert await there.statuses(1, "/v1//orders/%37", x_api_key="a") == [429]
        assert await there.statuses(1, "/v1/orders/7", x_api_key="b") == [200]
        # A client without a key is still counted by address.
        assert await there.statuses(4, "/v1/orders/7") == [200, 200, 200, 429]


async def test_hits_addend_is_the_cost_of_a_request() -> None:
    """A descriptor's `hits_addend` is spent; 0 spends nothing, and passes while 1 would fit."""

    def change(config: Config) -> None:
        # Envoy applies it to the descriptors of the filter, not to a route's rate_limits.
        limits = rate_limits_of(config)
        limits[0]["hits_addend"] = {"format": "%REQ(x-cost)%"}
        filter_of(config)["rate_limits"] = [*limits]
        limits.clear()

    async with serving(BY_ADDRESS) as service, edge(service.handle.port, change) as there:
        assert await there.statuses(3, x_cost="0") == [200] * 3
        first = await there.get(x_cost="3")
        assert (first.status_code, first.headers["x-ratelimit-remaining"]) == (200, "2")
        assert await there.statuses(1, x_cost="3") == [429]
        assert await there.statuses(1, x_cost="2") == [200]
        assert await there.statuses(2, x_cost="0") == [429] * 2
        never = await there.get(x_cost="6")
        assert never.status_code == 429
        assert never.json()["error"]["code"] == "COST_EXCEEDS_CAPACITY"


async def test_the_cost_of_a_response_is_settled_at_its_end() -> None:
    """Tokens are known at the end: as many as fit are spent, and the next request is denied."""

    def change(config: Config) -> None:
        actions = rate_limits_of(config)[0]["actions"]
        settle = {"generic_key": {"descriptor_key": SETTLE, "descriptor_value": "1"}}
        filter_of(config)["rate_limits"] = [
            {"actions": actions, "hits_addend": {"number": 0}},
            {"actions": [*actions, settle], "hits_addend": {"format": "%RESP(x-tokens-used)%"},
             "apply_on_stream_done": True},
        ]  # fmt: skip
        rate_limits_of(config).clear()

    async def remaining(limiter: AsyncLimiter) -> int:
        return (await limiter.peek(request)).remaining

    request = Request(ip="127.0.0.1", attributes={"domain": "shop"})
    async with serving(BY_ADDRESS) as service, edge(service.handle.port, change) as there:
        for cost, left in (("2", 3), ("100", 0)):
            assert (await there.get(x_cost=cost)).status_code == 200
            async with asyncio.timeout(10):
                while await remaining(service.limiter) != left:  # noqa: ASYNC110 - Envoy sets no event
                    await asyncio.sleep(0.01)
        assert await there.statuses(2, x_cost="1") == [429, 429]


async def test_a_limit_from_envoys_metadata_replaces_the_rules() -> None:
    """A filter of Envoy can set a client's limit."""
    metadata = {
        "name": "envoy.filters.http.set_metadata",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
            "metadata": [
                {"metadata_namespace": "plan",
                 "value": {"limit": {"requests_per_unit": 3, "unit": "HOUR"}}},
            ],
        },
    }  # fmt: skip

    def change(config: Config) -> None:
        rate_limits_of(config)[0]["limit"] = {
            "dynamic_metadata": {"metadata_key": {"key": "plan", "path": [{"key": "limit"}]}}
        }
        listener = config["static_resources"]["listeners"][0]
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_filters"].insert(0, metadata)

    async with serving(BY_ADDRESS) as service, edge(service.handle.port, change) as there:
        assert await there.statuses(5, "/a") == [200, 200, 200, 429, 429]
        refused = await there.get("/a")
        assert refused.headers["ratelimit-policy"] == '"envoy.descriptor";q=3;w=3600'
        # Counted by all entries, so another path has another count.
        assert await there.statuses(4, "/b") == [200, 200, 200, 429]


async def test_a_forged_address_changes_nothing() -> None:
    """A client that sends X-Forwarded-For is counted by the address of its connection."""
    async with serving(BY_ADDRESS) as service, edge(service.handle.port) as there:
        found = [await there.get(x_forwarded_for=f"198.51.100.{n}") for n in range(7)]
        assert [each.status_code for each in found] == [200] * 5 + [429] * 2


async def test_a_key_that_is_not_text_is_limited_too() -> None:
    """A key that is long or not UTF-8 is counted as one key."""
    async with serving(BY_KEY) as service, edge(service.handle.port) as there:
        for key in (b"\xff\xfe", b"x" * 1000, "größe".encode(), b"#" + b"0" * 32):
            found = []
            for _ in range(3):
                answer = await there.client.get(there.envoy.url, headers={b"x-api-key": key})
                found.append(answer.status_code)
            assert found in ([200, 200, 429], [429, 429, 429]), key
        assert there.application.served == 8


async def test_envoy_sends_a_token(tmp_path: Path) -> None:
    """`initial_metadata` has the token that the service requires; without it no request passes."""
    path = tmp_path / "tokens.json"
    secret = create_token(path, "envoy", "check")

    def change(config: Config) -> None:
        filter_of(config)["failure_mode_deny"] = True

    def change_with_token(config: Config) -> None:
        change(config)
        grpc_service = filter_of(config)["rate_limit_service"]["grpc_service"]
        grpc_service["initial_metadata"] = [{"key": "authorization", "value": f"Bearer {secret}"}]

    async with serving(BY_ADDRESS, tokens=Tokens.load(path)) as service:
        async with edge(service.handle.port, change_with_token) as there:
            assert await there.statuses(6) == [200] * 5 + [429]
        async with edge(service.handle.port, change) as there:
            assert await there.statuses(2) == [500] * 2


async def test_an_unknown_domain_is_not_limited() -> None:
    """No rule matches it, so no request is denied and no header is sent."""

    def change(config: Config) -> None:
        filter_of(config)["domain"] = "elsewhere"

    async with serving(BY_ADDRESS) as service, edge(service.handle.port, change) as there:
        answers = [await there.get() for _ in range(8)]
        assert {each.status_code for each in answers} == {200}
        assert not [name for name in answers[0].headers if "ratelimit" in name]


async def test_the_real_service_with_four_workers() -> None:
    """Every worker of `ratekeeper serve` answers Envoy, and all workers share the limit."""
    rules = {"version": 1, "rules": [{"id": "api", "by": ["ip"], "limits": ["40/hour"]}]}
    service = ServiceProcess(rules, workers=4, grpc=True)
    try:
        await asyncio.to_thread(service.start)
        port = int(service.grpc.rpartition(":")[2])

        async def some() -> list[int]:
            # One Envoy has one connection to one worker; several Envoys reach several workers.
            async with edge(port, without_health_checks) as there:
                found = await asyncio.gather(*[there.get() for _ in range(20)])
                return [each.status_code for each in found]

        statuses = [each for found in await asyncio.gather(*[some() for _ in range(4)])
                    for each in found]  # fmt: skip
        assert (statuses.count(200), statuses.count(429)) == (40, 40)
    finally:
        await asyncio.to_thread(service.stop)


async def test_a_killed_worker_loses_no_request() -> None:
    """Envoy repeats the calls in flight to another worker; no client gets an error."""
    rules = {"version": 1, "rules": [{"id": "api", "by": ["ip"], "limits": ["1000000/hour"]}]}
    service = ServiceProcess(rules, workers=2, grpc=True)
    try:
        await asyncio.to_thread(service.start)
        port = int(service.grpc.rpartition(":")[2])

        def strict(config: Config) -> None:
            without_health_checks(config)
            filter_of(config)["failure_mode_deny"] = True

        async with edge(port, strict) as there:
            first, second = service.worker_pids()
            statuses = await load_until_killed(there, first, service)
            # Envoy had a connection to one of the two workers. Now it has one to the other.
            statuses += await load_until_killed(there, second, service)
            assert set(statuses) == {200}
            assert there.application.served == len(statuses)
    finally:
        await asyncio.to_thread(service.stop)


async def load_until_killed(there: Edge, worker: int, service: ServiceProcess) -> list[int]:
    """Send requests without a pause, kill a worker in the middle; return all statuses."""
    statuses: list[int] = []
    ended = asyncio.Event()

    async def client() -> None:
        while not ended.is_set():
            statuses.append((await there.get()).status_code)

    async with asyncio.timeout(60), asyncio.TaskGroup() as clients:
        for _ in range(16):
            clients.create_task(client())
        while len(statuses) < 50:  # noqa: ASYNC110 - the clients set no event
            await asyncio.sleep(0.005)
        os.kill(worker, signal.SIGKILL)
        before = len(statuses)
        while len(statuses) < before + 200:  # noqa: ASYNC110 - same
            await asyncio.sleep(0.005)
        # Until another worker has taken its place.
        while worker in service.worker_pids() or not service.is_listening():  # noqa: ASYNC110 - same
            await asyncio.sleep(0.05)
        ended.set()
    return statuses
