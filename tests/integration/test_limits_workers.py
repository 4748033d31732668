"""Flask-Limiter in the workers of a real gunicorn that opens the storage before it forks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.web_workers import WORKERS, ask, serving
from tests.redis_servers import running, until

LIMIT = 20


@pytest.mark.parametrize("storage", ["shared", "redis", "memory of limits"])
def test_workers_share_a_limit_exactly(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers together admit 20 requests; each in its own memory, 20 each.

    Requests are sent until every worker has denied one, so that none has room left.
    """
    uri = {"shared": f"ratekeeper+shared://{tmp_path}/app.limits", "memory of limits": "memory://"}
    if storage == "redis":
        running("single").flush()
        uri[storage] = f"ratekeeper+{running('single').uri}?deadline_ms=10000"
    monkeypatch.setenv("STORAGE_URI", uri[storage])
    admitted: list[int] = []
    denied: set[int] = set()

    def every_worker_denies() -> bool:
        for answer in ask(url, ["/"] * 40):
            worker = answer.json()["worker"]
            if answer.status_code == 200:
                admitted.append(worker)
            else:
                assert answer.status_code == 429
                denied.add(worker)
        return len(denied) == WORKERS

    with serving(_command(), tmp_path) as url:
        until(every_worker_denies, "every worker denies a request", 60)
    if storage == "memory of limits":
        assert len(admitted) == LIMIT * WORKERS
    else:
        assert len(admitted) == LIMIT


def _command() -> list[str]:
    return [
        *(sys.executable, "-m", "gunicorn", "limits_app:app", "--preload"),
        *("--chdir", str(Path(__file__).parent)),
        *("--workers", str(WORKERS), "--bind", "127.0.0.1:0"),
    ]
