"""Real Envoys with quotas: they decide by assignments, and never exceed the limits together.

Envoy reports every 5 s, so a scenario takes many seconds and little processor time. Scenarios that
disturb each other have Envoys of their own; all others share them, with a tenant for each.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import yaml

from ratekeeper import Request
from ratekeeper.service.envoy import quotas
from ratekeeper.service.grpc.server import Implementation
from ratekeeper.service.http.envoys import EnvoyStatus
from tests.conformance.stores import PATIENT
from tests.envoy_load import Load, most_over
from tests.envoy_process import (
    QUOTAS_EXAMPLE,
    Config,
    Envoy,
    answer_directly,
    cluster_of,
    example,
    filter_of,
    quota_bucket_of,
)
from tests.integration.tcp_proxy import Proxy
from tests.redis_servers.ports import HOST, free_port
from tests.redis_servers.single import Single
from tests.service.admin.client import secrets_of
from tests.service.envoy.client import Serving, serving
from tests.service_process import ServiceProcess

RATE, BURST = 40, 40
GRANTED = 600
BUCKETS = 5
WAIT_S = 60.0
UNUSED_PORT = 9


def rule(name: str, tenant: str, limits: Any, quota: str = "rate", **more: Any) -> dict[str, Any]:
    """Return a rule for some tenants, which Envoys get parts of."""
    return {
        "id": name,
        "match": {"tenant": tenant},
        "by": ["tenant"],
        "limits": limits,
        "consistency": "leased",
        "envoy_quota": quota,
        **more,
    }


def document(*rules: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a rule document."""
    return {"version": 1, "rules": list(rules), **more}


def config_of(port: int, name: str) -> Config:
    """Return the example with the service on `port`; Envoy answers itself, exact from the start."""
    config = example(UNUSED_PORT, port, QUOTAS_EXAMPLE)
    answer_directly(config)
    filter_of(config)["rlqs_server"]["initial_metadata"][0]["value"] = name
    fallback = quota_bucket_of(config)["no_assignment_behavior"]["fallback_rate_limit"]
    fallback["blanket_rule"] = "DENY_ALL"
    return config


def patient(config: Config) -> Config:
    """Return a configuration with which Envoy keeps its stream, however busy the machine is."""
    options = cluster_of(config, "ratekeeper")["typed_extension_protocol_options"]
    (http,) = options.values()
    http["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"] = {
        "interval": "2s",
        "timeout": "60s",
    }
    return config


@asynccontextmanager
async def envoys(*configs: Config) -> AsyncIterator[list[Envoy]]:
    """Run some Envoys."""
    found = [Envoy(config) for config in configs]
    try:
        await asyncio.gather(*[asyncio.to_thread(each.start) for each in found])
        yield found
    finally:
        await asyncio.gather(*[asyncio.to_thread(each.stop) for each in found])


@asynccontextmanager
async def loads(urls: Sequence[str], tenant: str) -> AsyncIterator[list[Load]]:
    """Open a connection of one tenant to each Envoy."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Load(url, tenant)) for url in urls]


async def until(condition: Any, what: str, within_s: float = WAIT_S) -> None:
    """Wait until a condition holds."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < within_s, what
        await asyncio.sleep(0.05)


async def until_async(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until a condition that is awaited holds."""
    started_s = time.monotonic()
    while not await condition():
        assert time.monotonic() - started_s < WAIT_S, what
        await asyncio.sleep(0.2)


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    """Yield the URI of a real Redis, with time for answers on a busy machine."""
    with Single() as found:
        yield f"{found.uri}?{PATIENT}"


async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each request on a connection."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    writer.close()


class Restarting:
    """A service that can be stopped and started again on its port, while Envoys are connected."""

    def __init__(self, port: int, rules: Any, store: str) -> None:
        self._options = (port, rules, store)
        self._stack = AsyncExitStack()

    async def start(self) -> Self:
        """Start the service."""
        port, rules, store = self._options
        running = serving(rules, store=store, address=f"{HOST}:{port}")
        await self._stack.enter_async_context(running)
        return self

    async def stop(self, *_: object) -> None:
        """Stop the service."""
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


async def moving(urls: Sequence[str], tenant: str) -> list[Load]:
    """Load three Envoys; the demand moves from the first to the last."""
    async with loads(urls, tenant) as found:
        for seconds, demands in ((16, (60, 6, 0)), (20, (6, 6, 60))):
            pairs = zip(found, demands, strict=True)
            await asyncio.gather(*[load.run(demand, seconds) for load, demand in pairs if demand])
        return found


async def test_three_envoys_whose_demand_moves_never_exceed_the_limits(store: str) -> None:
    """Rate shares: in no interval more than rate × T + burst. Grants: never more than the limit.

    The assignments are renewed in this time, and a bucket whose size changes keeps its fill ratio.
    The last Envoy is connected to another node, and the demand moves there.
    """
    rules = document(
        rule("rates", "rated", f"{RATE}/second"),
        rule("grants", "granted", f"{GRANTED}/365d", "grants"),
    )
    async with (
        serving(rules, store=store) as service,
        serving(rules, store=store) as other,
    ):
        nodes = zip("abc", (service, service, other), strict=True)
        async with envoys(*[config_of(node.handle.port, name) for name, node in nodes]) as found:
            urls = [each.url for each in found]
            # Other clients of the service share the limit of the grants.
            asked = await service.limiter.check(Request(tenant="granted"), 50)
            rated, granted = await asyncio.gather(moving(urls, "rated"), moving(urls, "granted"))
            listed = await service.context.envoys.everyone()
    # Each node lists the Envoys of all.
    assert [(each.envoy, len(each.parts)) for each in listed] == [("a", 2), ("b", 2), ("c", 2)]
    assert asked.allowed
    assert most_over(rated, RATE, BURST) <= 0
    assert sum(load.passed() for load in rated) > 0.4 * RATE * 32
    # The share of the first one has moved to the last, after two or three reports.
    assert rated[2].passed() > 0.1 * RATE * 20
    assert 0.9 * GRANTED <= 50 + sum(load.passed() for load in granted) <= GRANTED


async def test_a_restart_and_a_lost_stream_never_give_more_than_the_limits(store: str) -> None:
    """Shares are in the store; that of a lost stream is reserved until it has expired."""
    rules = document(
        rule("rates", "restarts", f"{RATE}/second"),
        rule("grants", "granted-2", f"{GRANTED}/365d", "grants"),
    )
    port = free_port()
    async with AsyncExitStack() as stack:
        proxy = stack.enter_context(Proxy(port))
        service = await stack.enter_async_context(Restarting(port, rules, store))
        a, b = await stack.enter_async_context(
            envoys(config_of(port, "a"), config_of(proxy.port, "b"))
        )
        found = await stack.enter_async_context(loads([a.url, b.url], "restarts"))
        granted = await stack.enter_async_context(loads([a.url, b.url], "granted-2"))
        running = asyncio.gather(
            *[load.run(RATE, 5 * WAIT_S) for load in found],
            *[load.run(20, 5 * WAIT_S) for load in granted],
        )
        await until(lambda: all(load.passed() for load in found), "both have shares")
        await asyncio.sleep(2)
        await service.stop()
        await service.start()
        restarted_s = time.monotonic()
        await until(lambda: found[1].passed(restarted_s + 8) > 0, "it has a share again")
        # Now the connection of b is silent. It decides by its share until that expires.
        proxy.mode = "hold"
        lost_s = time.monotonic()
        await asyncio.sleep(15)
        await until(lambda: found[0].passed(lost_s + 14) > 0, "the other one goes on")
        running.cancel()
    # Each Envoy took its own share over when it returned: there was no gap.
    for start_s in (restarted_s + 2 * each for each in range(5)):
        assert found[0].passed(start_s, start_s + 2) > 0
    assert found[1].passed(lost_s, lost_s + 4) > 0
    assert found[1].passed(lost_s + 11) == 0
    assert granted[1].passed(lost_s + 13) == 0
    assert most_over(found, RATE, BURST) <= 0
    assert 0.3 * GRANTED <= sum(load.passed() for load in granted) <= GRANTED


MISCELLANEOUS = document(
    rule("many", "many-*", "1000/second", on_failure="closed"),
    rule("idle", "idle", "1000/second"),
    rule("changed", "changed", "100/second"),
    deny=["tenant:mallory"],
)


class Shared:
    """One Envoy and one service, for scenarios that do not disturb each other."""

    def __init__(self, service: Serving, url: str) -> None:
        self.service = service
        self.url = url

    @property
    def stream(self) -> EnvoyStatus:
        """The status of the Envoy's only stream."""
        (found,) = self.service.context.envoys.own()
        return found

    async def passes(self, tenant: str, *, at_last: bool = True) -> None:
        """Send requests until one passes, or is denied."""
        async with Load(self.url, tenant) as load:
            started_s = time.monotonic()
            while bool(await load.send()) != at_last:
                assert time.monotonic() - started_s < WAIT_S, f"{tenant}: {not at_last} for long"
                await asyncio.sleep(0.1)

    async def abandons_an_idle_bucket(self) -> None:
        """Envoy forgets it, and reports it anew with its next request."""

        def is_known() -> bool:
            return "tenant=idle" in {part.bucket for part in self.stream.parts}

        await self.passes("idle")
        assert is_known()
        await until(lambda: not is_known(), "it is abandoned")
        assert self.service.context.counters.quota_assignments["abandon"] > 0
        # Until Envoy has read that, requests pass by the old assignment and are not reported.
        async with asyncio.timeout(60):
            while not is_known():
                await self.passes("idle")
                await asyncio.sleep(0.05)

    async def bounds_the_buckets_of_a_rule(self) -> None:
        """Above the bound, the failure policy of the rule answers."""
        for at in range(BUCKETS):
            await self.passes(f"many-{at}")
        for at in range(3):
            await self.passes(f"many-more-{at}", at_last=False)
        blankets = self.service.context.counters.quota_blankets
        await until(lambda: blankets.get("too_many_buckets", 0) >= 3, "they are counted")

    async def reads_reports_of_more_than_four_megabytes(self) -> None:
        """gRPC's usual bound would end the stream, again and again."""
        stream, before = self.stream.stream, self.service.context.counters.quota_reports

        async def send(at: int) -> None:
            async with Load(self.url, f"{at:03}-{'x' * 50_000}") as load:
                await load.send()

        # An idle bucket is abandoned, so requests are sent until the reports have all of them.
        async with asyncio.timeout(WAIT_S):
            while (
                self.stream.buckets < 90
                or self.service.context.counters.quota_reports <= before + 2
            ):
                await asyncio.gather(*map(send, range(90)))
        assert self.stream.stream == stream
        await self.passes(f"{0:03}-{'x' * 50_000}")

    async def uses_other_limits_with_another_fill_interval(self) -> None:
        """Envoy ignores a change of the interval alone; the service makes it start a new bucket."""
        await self.passes("changed")
        rules = [*MISCELLANEOUS["rules"][:-1], rule("changed", "changed", "100/minute")]
        self.service.limiter.use({**MISCELLANEOUS, "rules": rules})
        # The old share is reserved until it has expired.
        async with Load(self.url, "changed") as load:
            await until_async(lambda: self.has_from(load, "changed", "1.6"), "the new share")
            assert await load.send(200) < 150
            assert await load.run(50, 2) < 20

    async def has_from(self, load: Load, tenant: str, start: str) -> bool:
        """Send a request; return True if the tenant's bucket has what starts like this."""
        await load.send()
        found = {part.bucket: part.has for part in self.stream.parts}
        return found.get(f"tenant={tenant}", "").startswith(start)

    async def denies_a_blocked_tenant(self) -> None:
        """A list answers for all requests of the bucket."""
        await self.passes("mallory", at_last=False)
        await until(
            lambda: self.service.context.counters.quota_blankets.get("blocked"), "it is blocked"
        )


async def test_the_filters_traps(
    store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Idle buckets, too many buckets, long reports, other intervals and lists, with one Envoy."""
    monkeypatch.setattr(quotas, "BUCKETS_MAX", BUCKETS)
    async with (
        serving(MISCELLANEOUS, store=store) as service,
        envoys(patient(config_of(service.handle.port, "a"))) as (envoy,),
    ):
        shared = Shared(service, envoy.url)
        with caplog.at_level(logging.WARNING):
            await asyncio.gather(
                shared.abandons_an_idle_bucket(),
                shared.bounds_the_buckets_of_a_rule(),
                shared.uses_other_limits_with_another_fill_interval(),
                shared.denies_a_blocked_tenant(),
            )
        await shared.reads_reports_of_more_than_four_megabytes()
    assert "the rule has too many buckets; count by a tenant, plan or service" in caplog.text


def rule_in_the_example() -> Any:
    """Return the rules in the comment of the example."""
    lines = QUOTAS_EXAMPLE.read_text(encoding="utf-8").splitlines()
    start = lines.index("#   rules:")
    end = lines.index("#", start)
    return {"version": 1, **yaml.safe_load("\n".join(line[1:] for line in lines[start:end]))}


@pytest.mark.parametrize("on", ["libnghttp2", "grpcio"])
async def test_the_example_works_as_it_is(store: str, on: Implementation) -> None:
    """With the rule in its comment and an application, on both gRPC servers."""
    rules = rule_in_the_example()
    rules["rules"][0]["limits"] = "2/365d"
    application = await asyncio.start_server(hello, HOST, 0)
    async with application, serving(rules, store=store, on=on) as service:
        config = example(
            application.sockets[0].getsockname()[1], service.handle.port, QUOTAS_EXAMPLE
        )
        async with envoys(config) as (envoy,), httpx.AsyncClient() as client:
            headers = {"x-tenant": f"example-{on}"}
            answer = await client.get(envoy.url, headers=headers)
            assert (answer.status_code, answer.text) == (200, "ok")
            # Before the first assignment, the example lets requests pass.
            while (answer := await client.get(envoy.url, headers=headers)).status_code == 200:
                pass
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            # A request without the header is in no bucket.
            assert (await client.get(envoy.url)).status_code == 200


async def both(listed: Awaitable[dict[str, int]]) -> bool:
    """Return True if both Envoys are listed."""
    return set(await listed) == {"a", "b"}


async def test_a_service_lists_its_envoys_and_a_killed_worker_gives_no_more_than_the_rate(
    store: str, tmp_path: Path
) -> None:
    """The Envoys connect to the worker that takes its place, and take their shares over."""
    secrets = secrets_of(tmp_path)
    rules = document(rule("rates", "served", f"{RATE}/second"))
    options = ("--store", store, "--tokens", str(tmp_path / "tokens.json"))
    with ServiceProcess(rules, *options, workers=1, grpc=True) as service:
        configs = [config_of(int(service.grpc.rpartition(":")[2]), name) for name in ("a", "b")]
        for config in configs:
            token = {"key": "authorization", "value": f"Bearer {secrets['check']}"}
            filter_of(config)["rlqs_server"]["initial_metadata"].append(token)

        async def listed() -> dict[str, int]:
            """Return the worker of each Envoy that has a part of the rate."""
            headers = {"Authorization": f"Bearer {secrets['read']}"}
            answer = await asyncio.to_thread(service.ask, "GET", "/v1/admin/envoys", None, headers)
            assert answer.status == 200, answer.body
            return {
                each["envoy"]: each["worker"]
                for each in answer.data["envoys"]
                if [part["quota"] for part in each["parts"]] == ["rate"]
                and f"/s of {RATE}/s" in each["parts"][0]["has"]
            }

        async with envoys(*configs) as found, loads([each.url for each in found], "served") as sent:
            running = asyncio.gather(*[load.run(RATE, 3 * WAIT_S) for load in sent])
            await until(lambda: all(load.passed() for load in sent), "both have shares")
            await until_async(lambda: both(listed()), "both are listed")
            workers = await listed()
            os.kill(workers["a"], signal.SIGKILL)
            killed_s = time.monotonic()
            await until(
                lambda: all(load.passed(killed_s + 6) for load in sent), "both have shares again"
            )
            running.cancel()
    assert most_over(sent, RATE, BURST) <= 0
