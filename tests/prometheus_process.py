"""A real Prometheus on a free port of loopback, and its tool.

Its files are in a temporary folder; it is gone when this process ends, however that ends. What is
missing on the machine fails the test and is never skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import urllib.request
from typing import Any
from urllib.parse import quote

from tests.redis_servers.ports import HOST, free_port
from tests.redis_servers.scratch import scratch
from tests.redis_servers.server import ServerFailed, Startable
from tests.redis_servers.waiting import until

READY_SECONDS_MAX = 60.0
ASK_SECONDS_MAX = 10.0
TOOL_SECONDS_MAX = 60.0


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ServerFailed(f"{name} is missing; on Debian: apt-get install prometheus")
    return found


def promtool(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool; `given` is its standard input."""
    return subprocess.run(
        [_program("promtool"), *arguments],
        check=False,
        capture_output=True,
        text=True,
        input=given,
        timeout=TOOL_SECONDS_MAX,
    )


class PrometheusProcess(Startable):
    """One Prometheus that scrapes `target` (HOST:PORT) and evaluates `rules`, every second."""

    def __init__(self, target: str, rules: str) -> None:
        self.folder = scratch().new_folder("prometheus")
        self._log = self.folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        (self.folder / "rules.yaml").write_text(rules, encoding="utf-8")
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {"job_name": "ratekeeper", "static_configs": [{"targets": [target]}]}
            ],
        }
        # JSON is YAML.
        (self.folder / "prometheus.yaml").write_text(json.dumps(config), encoding="utf-8")

    def start(self) -> None:
        """Start Prometheus, and wait until it is ready."""
        self.port = free_port()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    _program("prometheus"),
                    f"--config.file={self.folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={self.folder / 'data'}",
                    f"--web.listen-address={HOST}:{self.port}",
                ],
                process_group=scratch().process_group,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        scratch().stop_at_exit(self, self.kill)
        until(self._is_ready, "Prometheus is ready", READY_SECONDS_MAX, self.log_end)

    def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise ServerFailed(f"Prometheus did not start. {self.log_end()}")
        try:
            return bool(self._get("/-/ready"))
        except OSError:
            return False

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(
            f"http://{HOST}:{self.port}{path}", timeout=ASK_SECONDS_MAX
        ) as answer:
            text: bytes = answer.read()
            return text

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the present series of an expression."""
        found = json.loads(self._get(f"/api/v1/query?query={quote(expression)}"))
        series: list[dict[str, Any]] = found["data"]["result"]
        return series

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        found = json.loads(self._get("/api/v1/alerts"))["data"]["alerts"]
        return {each["labels"]["alertname"] for each in found if each["state"] == "firing"}

    def log_end(self) -> str:
        """Return the last lines of its log."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-2_000:]

    def kill(self) -> None:
        """Stop Prometheus at once."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        scratch().forget(self)

    def stop(self) -> None:
        """Stop Prometheus and remove its files."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
