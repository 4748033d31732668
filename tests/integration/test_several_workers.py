"""`memory://` under real servers: several workers log a warning, a single one does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from tests.redis_servers.waiting import until

SECONDS_MAX = 60
WARNING = "memory:// counts in each worker process separately, and {} runs at least 2"

# Each process that has loaded the application writes its number, after a warning of the store.
APPLICATION = """
import os
from ratekeeper import asgi, wsgi

async def hello(scope, receive, send): ...
def plain(environ, start_response): ...

store = os.environ.get("STORE", "memory://?capacity=10")
app = asgi.RateLimit(hello, "9/minute", store=store)
wsgi_app = wsgi.RateLimit(plain, "9/minute", store=store)

def loaded():
    with open("loaded", "a") as file:
        file.write(f"{os.getpid()}\\n")

if __name__ != "__main__":
    loaded()
"""

# A program that makes the application first, and then the workers from itself.
PROGRAM = """
from app import wsgi_app
from gunicorn.app.base import BaseApplication
import app

class Program(BaseApplication):
    def load_config(self):
        self.cfg.set("workers", 2)
        self.cfg.set("bind", "127.0.0.1:0")
        self.cfg.set("post_fork", lambda server, worker: app.loaded())
    def load(self):
        return wsgi_app

Program().run()
"""

# Python 3.14 and macOS start processes this way.
SPAWNING = """
import multiprocessing
from granian.cli import entrypoint

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    entrypoint()
"""

LOOPBACK = ["--host", "127.0.0.1", "--port", "0"]
GUNICORN = ["-m", "gunicorn", "app:wsgi_app", "--bind", "127.0.0.1:0", "--workers"]
UVICORN = ["-m", "uvicorn", "app:app", "--lifespan", "off", *LOOPBACK]
GRANIAN = ["app:app", "--interface", "asginl", *LOOPBACK, "--workers"]


def run(command: list[str], folder: Path, loads: int, environment: Mapping[str, str]) -> list[str]:
    """Run a server until `loads` processes have loaded the application; return its warnings."""
    for name, text in (("app", APPLICATION), ("program", PROGRAM), ("spawning", SPAWNING)):
        (folder / f"{name}.py").write_text(text)
    log, loaded = folder / "log", folder / "loaded"
    loaded.touch()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": str(folder), **environment},
            start_new_session=True,
        )
    try:
        until(
            lambda: len(set(loaded.read_text().split())) >= loads,
            f"{loads} processes load the application",
            SECONDS_MAX,
            log.read_text,
        )
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return [line for line in log.read_text().splitlines() if "memory:// counts" in line]


@pytest.mark.parametrize(
    ("command", "server", "loads", "warnings"),
    [
        ([*GUNICORN, "2"], "gunicorn", 2, 2),
        # The application is loaded once, before the workers are forked.
        ([*GUNICORN, "2", "--preload"], "gunicorn", 1, 1),
        (["program.py"], "gunicorn", 3, 2),
        ([*UVICORN, "--workers", "2"], "uvicorn", 2, 2),
        (["-m", "granian", *GRANIAN, "2"], "granian", 2, 2),
        # Only the second worker can see that there are several.
        (["spawning.py", *GRANIAN, "2"], "granian", 2, 1),
    ],
    ids=["gunicorn", "preload", "program", "uvicorn", "granian", "granian-spawn"],
)
def test_several_workers_log_one_warning_each(
    command: list[str], server: str, loads: int, warnings: int, tmp_path: Path
) -> None:
    """The warning names the server, and the store that all workers share."""
    logged = run(command, tmp_path, loads, {})
    assert len(logged) == warnings
    assert all(WARNING.format(server) in line for line in logged)
    assert all('store="shared:///run/app.limits"' in line for line in logged)


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        ([*GUNICORN, "1"], {}),
        ([*UVICORN, "--workers", "1"], {}),
        # It ignores the number of workers while it reloads.
        ([*UVICORN, "--reload"], {"WEB_CONCURRENCY": "2"}),
        (["-m", "granian", *GRANIAN, "1"], {}),
        ([*GUNICORN, "2"], {"STORE": "shared:///FOLDER/limits?capacity=10"}),
    ],
    ids=["gunicorn", "uvicorn", "uvicorn-reload", "granian", "shared"],
)
def test_there_is_no_false_alarm(
    command: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    """One worker, a development server, and a store that workers share are right."""
    given = {name: value.replace("/FOLDER", str(tmp_path)) for name, value in environment.items()}
    assert run(command, tmp_path, 1, given) == []
