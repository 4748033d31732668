"""The main process of a service. `tests/integration/test_service_running.py` runs a real one."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from ratekeeper.service.http.tokens import create_token
from ratekeeper.service.process.main_process import (
    QUICK_END_SECONDS,
    QUICK_ENDS_MAX,
    WorkerRestarts,
    connections_max,
    started_lines,
    url_of,
)
from ratekeeper.service.process.settings import ServiceSettings


def test_started_lines(tmp_path: Path) -> None:
    """They are short; they have addresses, rules and store without passwords, and a command."""
    settings = ServiceSettings.gather(
        {
            "data": str(tmp_path / "data"),
            "rules": "postgresql://app:pa55@db/rules",
            "store": "redis://app:pa55@cache/0",
            "host": "0.0.0.0",
            "tls_cert": "c",
            "tls_key": "k",
        }
    )
    lines = started_lines(settings, "12", 3)
    text = "\n".join(lines)
    assert "pa55" not in text
    assert "version 12, 3 rules" in text
    assert "https://127.0.0.1:8080/console\n" in text
    assert "  records  sqlite:" in text
    assert "gossip" not in text
    assert max(map(len, lines)) < 160
    assert url_of(settings) == "https://127.0.0.1:8080"
    assert "curl -k https://127.0.0.1:8080/v1/check -d" in lines[-1]
    create_token(settings.tokens_path, "a", "check")
    assert "$RATEKEEPER_TOKEN" in started_lines(settings, "12", 3)[-1]


def test_only_repeated_quick_ends_count_as_a_crash_loop() -> None:
    """A worker that is killed a few times is restarted; one that always ends at once is not."""
    now = 1_000.0
    restarts = WorkerRestarts(lambda: now)
    for _ in range(QUICK_ENDS_MAX):
        restarts[0] = now
        restarts.clear()
        assert restarts.get(0) == 0
    # A worker that ran long enough in between starts counting again.
    restarts[0], now = now, now + QUICK_END_SECONDS + 1
    assert restarts.get(0) == 0
    for _ in range(QUICK_ENDS_MAX):
        restarts[0] = restarts[1] = now
        assert restarts.get(0) == 0
    assert restarts.get(1) == 0
    restarts[0] = now
    assert restarts.get(0) == now


@pytest.mark.parametrize(
    ("files", "connections"),
    [(65_536, 8_192), (resource.RLIM_INFINITY, 8_192), (1_024, 768), (100, 64)],
)
def test_connections_leave_files_for_the_rest(
    monkeypatch: pytest.MonkeyPatch, files: int, connections: int
) -> None:
    """A worker without a free file could open neither its store nor a database."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert connections_max() == connections
