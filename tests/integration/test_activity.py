"""The history of a real service under load agrees with its metrics, though a worker is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.redis_servers.waiting import until
from tests.service.admin.client import secrets_of
from tests.service_process import RULES, ServiceProcess, ask_on

SECONDS_MAX = 60


class Service(ServiceProcess):
    """A service with tokens, which a client needs to read its history."""

    def __init__(self, folder: Path) -> None:
        secrets = secrets_of(folder)
        self.headers = {role: {"Authorization": f"Bearer {secrets[role]}"} for role in secrets}
        super().__init__(RULES, "--tokens", str(folder / "tokens.json"), workers=3)

    def activity(self, since: float | None = None) -> dict[str, Any]:
        """Return the reply of the admin API."""
        query = "" if since is None else f"?since={since}"
        answer = self.ask("GET", f"/v1/admin/activity{query}", None, self.headers["read"])
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.data
        return found

    def has_steps(self, count: int) -> bool:
        """Return True if there are so many steps; False if a killed worker had the connection."""
        with suppress(OSError, HTTPException):
            return len(self.activity()["at"]) >= count
        return False

    def holder(self) -> int:
        """Return the process ID of the worker that holds the lock of the history."""
        lock = next(self.data.glob("run-*/activity.lock")).stat().st_ino
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].endswith(f":{lock}"):
                return int(fields[4])
        raise AssertionError("no worker holds the lock")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """Yield a service with three workers."""
    with Service(tmp_path) as found:
        yield found


def scraped(service: Service) -> Counter[str]:
    """Return the counters of the metrics that the history has, too."""
    found: Counter[str] = Counter()
    text = service.ask("GET", "/metrics").body.decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            if sample.name == "ratekeeper_checks_total":
                found[f"check {labels['outcome']}"] += int(sample.value)
            elif sample.name == "ratekeeper_rule_decisions_total":
                found[f"{labels['rule']} {labels['outcome']}"] += int(sample.value)
    return +found


def summed(found: dict[str, Any]) -> Counter[str]:
    """Return the sums over the steps."""
    sums: Counter[str] = Counter()
    for outcome, counts in found["checks"].items():
        sums[f"check {outcome}"] += sum(counts)
    for rule in found["rules"]:
        for outcome in ("allowed", "denied", "shadow_denied"):
            sums[f"{rule['rule']} {outcome}"] += sum(rule[outcome])
    return +sums


def load(service: Service, user: int, stop: threading.Event) -> None:
    """Send checks on new connections, so that they reach all workers, until `stop` is set."""
    number = 0
    while not stop.is_set():
        # A worker that is killed breaks the connection.
        with suppress(OSError, HTTPException), closing(service.connect()) as connection:
            for _ in range(20):
                number += 1
                body = {"user": str(user + number % 3), "api_key": "k", "endpoint": "/v1/orders"}
                ask_on(connection, "POST", "/v1/check", body, service.headers["check"])


def ended(service: Service) -> int:
    """Return how many workers have ended; 0 if the one that ends now took this request."""
    with suppress(OSError, HTTPException):
        return int(service.activity()["now"]["ended_workers"])
    return 0


def test_the_history_agrees_with_the_metrics(service: Service) -> None:
    """All counts of a load on three workers, though the worker that counts is killed meanwhile."""
    stop = threading.Event()
    threads = [threading.Thread(target=load, args=(service, n * 10, stop)) for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: service.has_steps(2), "two steps", SECONDS_MAX)
        killed = service.holder()
        count = len(service.activity()["at"])
        os.kill(killed, signal.SIGKILL)
        until(lambda: ended(service) == 1, "the worker that ended is counted", SECONDS_MAX)
        until(lambda: service.has_steps(count + 2), "two more steps", SECONDS_MAX)
        assert service.holder() != killed
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    until(lambda: len(service.worker_pids()) == 3, "three workers", SECONDS_MAX)
    until(
        lambda: scraped(service) == summed(service.activity()),
        "the sums agree",
        SECONDS_MAX,
        lambda: (scraped(service), summed(service.activity())),
    )
    assert scraped(service)["check denied"] > 100
    found = service.activity()
    assert found["now"]["workers"] == 3
    assert found["now"]["store"]["name"].startswith("shared://")
    assert found["at"] == sorted(set(found["at"]))
    assert all(
        (p50 is None) == (p99 is None) and (p50 is None or 0 < p50 <= p99)
        for p50, p99 in zip(found["p50_ms"], found["p99_ms"], strict=True)
    )
    newer = service.activity(found["at"][-3])
    assert not newer["complete"]
    assert newer["at"][:2] == found["at"][-2:]
