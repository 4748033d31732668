"""The warning about `memory://` in several workers: when it is logged, and when it is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ratekeeper import Limit, LocalFallback, StoreUnavailable, open_store
from ratekeeper.core.clock import SystemClock
from ratekeeper.decide.failure import LocalCheck, LocalLimits
from ratekeeper.decide.stores import workers


def called_from(module: str, body: str, **variables: Any) -> Callable[[Callable[[], Any]], Any]:
    """Return a function of `module` with these local variables that calls its argument."""
    namespace: dict[str, Any] = {"__name__": module, "variables": variables}
    exec(f"def run(call):\n    {body}\n    return call()", namespace)
    run: Callable[[Callable[[], Any]], Any] = namespace["run"]
    return run


def gunicorn(number: object) -> Callable[[Callable[[], Any]], Any]:
    arbiter = SimpleNamespace(num_workers=number)
    return called_from("gunicorn.arbiter", "self = variables['arbiter']", arbiter=arbiter)


def uvicorn(number: int, reload: bool) -> Callable[[Callable[[], Any]], Any]:
    config = SimpleNamespace(workers=number, reload=reload)
    return called_from("uvicorn._subprocess", "config = variables['config']", config=config)


def granian_worker(number: int) -> Callable[[Callable[[], Any]], Any]:
    return called_from("granian.server.mp", "worker_id = variables['number']", number=number)


def granian_server(module: str) -> Callable[[Callable[[], Any]], Any]:
    server = type("Server", (), {"__module__": module, "workers": 4})()
    return called_from("granian.server.common", "self = variables['server']", server=server)


@pytest.fixture(autouse=True)
def _not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test be a process that has not warned."""
    monkeypatch.setattr(workers, "_has_warned", False)


@pytest.mark.parametrize(
    ("run", "server", "number"),
    [
        (gunicorn(4), "gunicorn", 4),
        (gunicorn(1), "", 1),
        (gunicorn(None), "", 1),
        (called_from("gunicorn.arbiter", "other = 1"), "", 1),
        (called_from("gunicorn.arbiter", "self = 1"), "", 1),
        (uvicorn(4, reload=False), "uvicorn", 4),
        (uvicorn(4, reload=True), "", 1),
        (granian_worker(2), "granian", 2),
        (granian_worker(1), "", 1),
        (granian_server("granian.server.mp"), "granian", 4),
        (granian_server("granian.server.mt"), "", 1),
        (called_from("shop", "self = config = worker_id = 4"), "", 1),
    ],
)
def test_the_number_of_workers_is_on_the_stack(
    run: Callable[..., Any], server: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A number that cannot be read counts as one worker, so there is no false alarm."""
    with caplog.at_level(logging.WARNING, "ratekeeper.workers"):
        for _ in range(2):
            run(lambda: open_store("memory://?capacity=10")).close()
    logged = [record.getMessage() for record in caplog.records]
    if number == 1:
        assert logged == []
    else:
        assert len(logged) == 1, "once in a process"
        assert f"{server} runs at least {number}, so a client can get {number} times" in logged[0]
        assert 'store="shared:///run/app.limits"' in logged[0]


def test_a_local_fallback_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """It may count in each process; that it does is documented."""
    local = LocalLimits(LocalFallback(), SystemClock())
    local.note_failure(StoreUnavailable("away"))
    checks = [LocalCheck((Limit(5, per=60),), "login", "ann", 1)]
    assert gunicorn(4)(lambda: local.decide(checks, None, spend=True))
    assert "memory://" not in caplog.text
    local.close()
