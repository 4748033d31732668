"""A real Prometheus scrapes a real service; sums never go down, even if workers die."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ratekeeper import AsyncLimiter, Limiter, Request
from ratekeeper.metrics import operations
from ratekeeper.metrics.counters import FAMILIES, JOIN, LimiterMetrics
from tests.prometheus_process import PrometheusProcess, promtool
from tests.redis_servers import Single, running, until
from tests.service.envoy.client import caller_on, entries
from tests.service_process import ServiceProcess

WAIT_SECONDS = 60.0

RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {
            "id": "users",
            "match": {"user": "*"},
            "by": ["user"],
            "limits": ["3/hour"],
            "on_failure": "local",
            "penalty": {"after": 2, "within": "1m", "cooldown": "10s", "block_after": 1},
        },
        {"id": "tenants", "match": {"tenant": "*"}, "by": ["tenant"], "limits": ["1000/hour"]},
        {
            "id": "trial",
            "match": {"tenant": "*"},
            "by": [],
            "limits": ["1/hour"],
            "mode": "shadow",
            "scale": {"source": "cpu"},
        },
    ],
    "deny": ["api_key:bad"],
}


# For a machine whose processors are all busy.
SLOW = "deadline_ms=10000"
ONE_RULE = {"version": 1, "rules": [{"id": "users", "by": ["user"], "limits": ["30/hour"]}]}


def scrape(service: ServiceProcess) -> str:
    """Return the metrics that Prometheus reads; retry if a killed worker closed the connection."""
    for _ in range(10):
        with suppress(OSError, http.client.HTTPException):
            answer = service.ask("GET", "/metrics")
            assert answer.status == 200
            return answer.body.decode()
    raise AssertionError("ten scrapes in a row met a dead worker")


def _is(found: Callable[[], float], wanted: float) -> bool:
    return found() == wanted


def _are_back(service: ServiceProcess, killed: set[int]) -> bool:
    """Return True if four other workers run and listen; a killed one may live on for a moment."""
    pids = set(service.worker_pids())
    return len(pids) == 4 and not pids & killed and service.is_listening()


def counters(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return the values that must never go down, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.values()))): sample.value
        for family in text_string_to_metric_families(text)
        if family.type in {"counter", "histogram"}
        for sample in family.samples
    }


def with_samples(text: str) -> set[str]:
    """Return the names of the families that have a value."""
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text)
        if family.samples
    }


def checked(service: ServiceProcess, times: int, **fields: Any) -> list[int]:
    """Send this many checks, each on its own connection, so that all workers get some."""
    with ThreadPoolExecutor(8) as pool:
        statuses = pool.map(lambda _: service.ask("POST", "/v1/check", fields).status, range(times))
        return list(statuses)


def test_sums_never_go_down_when_workers_die() -> None:
    """Two of four workers are killed, and every worker reports all checks.

    A worker writes its counts every second and at each scrape. A killed worker loses the counts
    since its last write, so the count is exact after a scrape.
    """
    rules = {"version": 1, "rules": [{"id": "users", "by": ["user"], "limits": ["100000/hour"]}]}
    with ServiceProcess(rules, workers=4) as service:
        before: dict[tuple[str, tuple[str, ...]], float] = {}

        def scraped() -> dict[tuple[str, tuple[str, ...]], float]:
            now = counters(scrape(service))
            lower = {
                name: (was, now.get(name))
                for name, was in before.items()
                if was > now.get(name, -1)
            }
            assert not lower
            before.update(now)
            return now

        def allowed() -> float:
            name = ("ratekeeper_checks_total", ("allowed",))
            return scraped().get(name, 0)

        total = 0
        for victims in (0, 1, 1, 0):
            total += len(checked(service, 60, user="1"))
            wanted = partial(_is, allowed, total)
            until(wanted, f"{total} checks are reported", WAIT_SECONDS, allowed)
            killed = set(service.worker_pids()[:victims])
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            for _ in range(10):
                scraped()
            back = partial(_are_back, service, killed)
            until(back, "other workers have replaced them", WAIT_SECONDS, service.worker_pids)
        found = {name: value for (name, _), value in scraped().items()}
        assert allowed() == total
        assert found["ratekeeper_worker_starts_total"] == 6
        assert found["ratekeeper_decision_seconds_count"] == total


@pytest.fixture(scope="module")
def redis() -> Iterator[Single]:
    """Run a separate Redis, because the test kills it."""
    with Single() as server:
        yield server


async def test_the_counts_of_a_redis_store_are_read() -> None:
    """Of 64 concurrent checks of one key, 30 pass; each is counted once, by its source."""
    server = running("single")
    server.flush()
    async with AsyncLimiter.from_rules(
        ONE_RULE, store=f"{server.uri}?deadline_ms=10000"
    ) as limiter:
        await limiter.peek(Request(user="1"))  # connects: then checks share calls
        await asyncio.gather(*(limiter.check(Request(user="1")) for _ in range(64)))
        for _ in range(10):
            await limiter.check(Request(user="1"))
        found = LimiterMetrics(limiter).snapshot()
        checks = found.values["checks"]
        assert (checks["allowed"], checks["denied"]) == (30, 44)
        named = found.values["rule_decisions"].items()
        by_source = {tuple(key.split(JOIN)[-2:]): count for key, count in named}
        assert by_source["allowed", "store"] == 30
        assert by_source["denied", "store"] + by_source["denied", "denied_cache"] == 44
        assert by_source["denied", "denied_cache"] >= 10
        assert found.values["coalesced_checks"][""] > 0
        assert found.values["denied_cache_hits"][""] >= 10
        (server,) = found.values["breaker_state"]
        assert server.startswith("127.0.0.1:")
        assert found.values["server_failures"] == {server: 0}
        # Coalesced checks are one call, and denials from the cache are none.
        assert 1 <= sum(found.histograms["store_seconds"][server][:-1]) <= 64


async def test_calls_to_each_server_are_timed() -> None:
    """Each call counts once, from threads and from asyncio; its handshake does not count."""
    with Limiter.from_rules(
        ONE_RULE, store=f"{running('single').uri}?deadline_ms=10000"
    ) as limiter:
        for number in range(7):
            limiter.check(Request(user=str(number)))
        ((server, data),) = limiter.store.monitor.latencies().items()
        assert server.startswith("127.0.0.1:")
        assert sum(data[:-1]) == 7
        assert data[-1] > 0
    uri = f"{running('cluster').uri}?{SLOW}"
    async with AsyncLimiter.from_rules(ONE_RULE, store=uri) as clustered:
        await asyncio.gather(*(clustered.check(Request(user=str(n))) for n in range(100)))
        found = clustered.store.monitor.latencies()
        assert len(found) > 1
        assert sum(sum(data[:-1]) for data in found.values()) == 100


def names_used() -> set[str]:
    """Return every metric that the alerts and the dashboard use."""
    alerts = yaml.safe_load(operations.alerts())
    dashboard = json.loads(operations.read(operations.DASHBOARD))
    texts = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    texts += [each["expr"] for panel in dashboard["panels"] for each in panel.get("targets", ())]
    texts += [
        each["definition"] for each in dashboard["templating"]["list"] if "definition" in each
    ]
    found = {name for text in texts for name in re.findall(r"ratekeeper_\w+", text)}
    return {re.sub(r"(_seconds)_(bucket|count|sum)$", r"\1", name) for name in found}


def test_the_dashboard_shows_every_metric() -> None:
    """It uses no other metric."""
    assert names_used() == {family.full_name for family in FAMILIES}


def shown(prometheus: PrometheusProcess, queries: list[str]) -> bool:
    """Return True if a panel has data. Raises for a query that Prometheus rejects."""
    found = [prometheus.query(each) for each in queries]
    return any(found)


async def ask_grpc(target: str) -> None:
    """Send one call, as Envoy does."""
    async with grpc.aio.insecure_channel(target) as channel:
        await caller_on(channel)(entries(("tenant", "t")))


def queries() -> dict[str, list[str]]:
    """Return the queries of the dashboard by panel, with its variables filled in."""
    filled = {"$__rate_interval": "5s", "$job": ".*", "$instance": ".*"}
    found: dict[str, list[str]] = {}
    for panel in json.loads(operations.read(operations.DASHBOARD))["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for variable, value in filled.items():
                text = text.replace(variable, value)
            assert "$" not in text
            found.setdefault(panel["title"], []).append(text)
    return found


def quickened() -> str:
    """Return the shipped alerts with shorter times."""
    alerts = yaml.safe_load(operations.alerts())
    for rule in alerts["groups"][0]["rules"]:
        rule["expr"] = re.sub(r"\[\d+[smh]\]", "[5s]", rule["expr"])
        rule["for"] = "1s"
    return yaml.safe_dump(alerts)


OTHER_METRICS = (
    *("ratekeeper_fleet_", "ratekeeper_gossip_", "ratekeeper_region_"),
    *("ratekeeper_envoy_quota_", "ratekeeper_grpc_resets_", "ratekeeper_settled_"),
    *("ratekeeper_forgiven_", "ratekeeper_waiting_", "ratekeeper_in_flight"),
    "ratekeeper_renewals_failed",
)
# No rule of this service is leased, it does not gossip, it is in no region, no Envoy has quotas
# from it, no client of gRPC misbehaves, nothing is settled, and no request waits or has a slot.
OTHER_PANELS = {
    title
    for title, texts in queries().items()
    if all(any(name in text for name in OTHER_METRICS) for text in texts)
}


async def test_a_real_prometheus_scrapes_and_alerts_when_redis_dies(redis: Single) -> None:
    """No alert fires before. In the end every metric of alerts and dashboard has a value."""
    with (
        ServiceProcess(RULES, "--store", f"{redis.uri}?{SLOW}", workers=2, grpc=True) as service,
        PrometheusProcess(urlsplit(service.url).netloc, quickened()) as prometheus,
    ):
        assert 429 in checked(service, 20, user="1")
        checked(service, 20, tenant="t")
        checked(service, 2, api_key="bad")
        await ask_grpc(service.grpc)
        until(
            lambda: prometheus.query("ratekeeper_checks_total{outcome='blocked'} == 2"),
            "Prometheus has the checks",
            WAIT_SECONDS,
            lambda: prometheus.query("ratekeeper_checks_total"),
        )
        # Another worker may have counted this, and another scrape may bring it.
        until(
            lambda: prometheus.query("ratekeeper_grpc_requests_total{code='OK'} == 1"),
            "Prometheus has the gRPC call",
            WAIT_SECONDS,
        )
        assert not prometheus.firing() & {"RatekeeperDegraded", "RatekeeperBreakerOpen"}
        holding = {"States", "Memory of the store", "Clock offset", "Keys lost"}
        panels = queries()
        until(
            lambda: all(shown(prometheus, panels[name]) for name in holding),
            "the panels show the contents of the store",
            WAIT_SECONDS,
        )
        redis.kill()

        def fires() -> bool:
            checked(service, 8, tenant="t")
            return {"RatekeeperDegraded", "RatekeeperBreakerOpen"} <= prometheus.firing()

        until(fires, "the alerts fire", WAIT_SECONDS, prometheus.firing)

        def empty() -> set[str]:
            return {name for name, queries in panels.items() if not shown(prometheus, queries)}

        # Rates need two scrapes; the contents of the store are unknown while Redis is unavailable.
        known = holding | OTHER_PANELS
        until(lambda: empty() <= known, "every other panel shows something", WAIT_SECONDS, empty)
        checked(service, 2, user="2")
        assert promtool("check", "metrics", given=scrape(service)).returncode == 0
        unknown = {f"ratekeeper_store_{each}" for each in ("states", "states_max", "bytes")}
        unknown |= {
            "ratekeeper_clock_offset_seconds",
            "ratekeeper_store_keys_evicted_total",
            "ratekeeper_store_kept_since_seconds",
        }

        def missing() -> set[str]:
            found = names_used() - with_samples(scrape(service))
            return {name for name in found if not name.startswith(OTHER_METRICS)}

        until(lambda: missing() <= unknown, "every metric has a value", WAIT_SECONDS, missing)
        # A worker reports the checks of the other one after a second.
        until(lambda: "local" in scrape(service), "local checks are reported", WAIT_SECONDS)
