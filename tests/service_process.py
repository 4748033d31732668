"""A real `tollkeeper serve` on a free port of loopback, for tests and benchmarks.

    with ServiceProcess(RULES, workers=4) as service:
        status, headers, answer = service.ask("POST", "/v1/check", {"user": "42"})

As `redis_servers` does: its files are in a temporary folder, it is ready when all its workers are,
and it is gone when this process ends, however that ends. It can be stopped and started again on the
same folder: counts, rules and tokens are then still there.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.redis_servers.scratch import scratch
from tests.redis_servers.server import ServerFailed, Startable
from tests.redis_servers.waiting import until

# On a busy machine; a start takes two seconds.
READY_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 40.0
ASK_SECONDS_MAX = 20.0
_LOG_LINES_SHOWN = 20

# One rule for each field that most tests want to limit by.
RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {"id": "users", "match": {"user": "*"}, "by": ["user"], "limits": ["100/hour"]},
        {
            "id": "keys",
            "match": {"endpoint": "/v1/orders", "api_key": "*"},
            "by": ["api_key"],
            "limits": ["10/hour"],
        },
    ],
}


class Answered(NamedTuple):
    """What came back. `data` is the JSON, or None where there is none."""

    status: int
    headers: dict[str, str]
    """By their names in small letters."""
    data: Any
    body: bytes


class ServiceProcess(Startable):
    """One service, started and stopped by a `with` block.

    `rules`    a document, or what `--rules` takes; None: the options say it
    `options`  further options of the command
    `env`      further environment variables
    """

    def __init__(
        self,
        rules: Mapping[str, Any] | str | None = RULES,
        *options: str,
        workers: int = 1,
        grpc: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = scratch().new_folder("service")
        self.data = self.folder / "data"
        self.workers = workers
        self.url = ""
        self.grpc = ""
        """HOST:PORT, if gRPC is asked for."""
        self._options = options
        self._grpc = grpc
        self._env = dict(env or {})
        self._rules = self._written(rules)
        self._process: subprocess.Popen[bytes] | None = None
        self._log = self.folder / "log"

    def _written(self, rules: Mapping[str, Any] | str | None) -> list[str]:
        if rules is None:
            return []
        if isinstance(rules, str):
            return ["--rules", rules]
        self.use(rules)
        return ["--rules", str(self.rules_path)]

    @property
    def rules_path(self) -> Path:
        """The file that holds the document, where the rules are one."""
        return self.folder / "rules.yaml"

    def use(self, rules: Mapping[str, Any]) -> None:
        """Put another document in the file's place, in one step."""
        written = self.folder / "rules.new"
        written.write_text(json.dumps(rules), encoding="utf-8")
        written.replace(self.rules_path)

    def command(self) -> list[str]:
        """What is run."""
        ports = ["--port", "0", *(["--grpc", "127.0.0.1:0"] if self._grpc else ["--no-grpc"])]
        chosen = ["--data", str(self.data), "--workers", str(self.workers), *ports]
        return [sys.executable, "-m", "tollkeeper", "serve", *chosen, *self._rules, *self._options]

    @property
    def pid(self) -> int | None:
        """Of the main process; None if it does not run."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    def worker_pids(self) -> list[int]:
        """Of the workers that are alive."""
        files = self.data.glob(f"run-{self.pid}/*.json")
        return sorted(int(each.stem) for each in files if _is_alive(each.stem))

    def start(self) -> None:
        """Start it, and wait until every worker answers. Again after `end`: on the same data."""
        self.launch()
        until(
            lambda: self.pid is None or self._is_ready(),
            "the service is ready",
            READY_SECONDS_MAX,
            self.log_end,
        )
        if self.pid is None:
            raise ServerFailed(f"the service did not start. {self.log_end()}")

    def launch(self) -> None:
        """Start it without waiting."""
        if self._process is not None:
            self._process.wait()
        clean = {k: v for k, v in os.environ.items() if not k.startswith("TOLLKEEPER_")}
        self._logged = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                cwd=self.folder,
                env={**clean, "PYTHONWARNINGS": "default", **self._env},
                process_group=scratch().process_group,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        scratch().stop_at_exit(self, self.kill)

    def _is_ready(self) -> bool:
        started = [each for each in self.events() if each.get("event") == "started"]
        if not started:
            return False
        self.url, self.grpc = started[-1]["url"], started[-1]["grpc"]
        return len(self.worker_pids()) == self.workers and self.is_listening()

    def is_listening(self) -> bool:
        """Does every worker listen? Each has a socket of its own on the port."""
        port = urlsplit(self.url).port or 0
        lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
        found = [each.split() for each in lines]
        listening = [each for each in found if each[3] == "0A" and each[1].endswith(f":{port:04X}")]
        return len(listening) >= self.workers

    def events(self) -> list[dict[str, Any]]:
        """What it has logged since it was last started; lines that are not JSON are left out."""
        found = []
        for line in self._log.read_bytes()[self._logged :].splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                found.append(event)
        return found

    def log_text(self) -> str:
        """All that it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def log_end(self) -> str:
        """The last lines."""
        return "\n".join(["Its log ends:", *self.log_text().splitlines()[-_LOG_LINES_SHOWN:]])

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answered:
        """One request on a connection of its own. `body` is bytes, or anything for JSON."""
        connection = self.connect()
        try:
            return ask_on(connection, method, path, body, headers)
        finally:
            connection.close()

    def connect(self) -> http.client.HTTPConnection:
        """A connection; the caller closes it. Whose certificate it is, nobody looks at."""
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port or 0
        if parts.scheme == "https":
            trusting = ssl.create_default_context()
            trusting.check_hostname = False
            trusting.verify_mode = ssl.CERT_NONE
            return http.client.HTTPSConnection(
                host, port, timeout=ASK_SECONDS_MAX, context=trusting
            )
        return http.client.HTTPConnection(host, port, timeout=ASK_SECONDS_MAX)

    def end(self, how: signal.Signals = signal.SIGINT) -> int:
        """Tell it to end, and wait; its exit code. It can be started again."""
        assert self._process is not None
        self._process.send_signal(how)
        code = self._process.wait(STOP_SECONDS_MAX)
        until(lambda: not self.worker_pids(), "all workers have ended", STOP_SECONDS_MAX)
        scratch().forget(self)
        return code

    def kill(self) -> None:
        """SIGKILL, the main process first, and its workers."""
        if self._process is None:
            return
        workers = self.worker_pids()
        self._process.kill()
        self._process.wait()
        for each in workers:
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                continue
        scratch().forget(self)

    def stop(self) -> None:
        """End it and remove its files."""
        try:
            if self.pid is not None:
                self.end()
        finally:
            self.kill()
            shutil.rmtree(self.folder, ignore_errors=True)


def ask_on(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Answered:
    """One request on a connection that is kept."""
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, raw, dict(headers or {}))
    response = connection.getresponse()
    text = response.read()
    found = {name.lower(): value for name, value in response.getheaders()}
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    return Answered(response.status, found, data, text)


def run_to_end(arguments: Sequence[str], **env: str) -> subprocess.CompletedProcess[str]:
    """`tollkeeper …` that ends by itself: what it printed, and its exit code."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TOLLKEEPER_")}
    return subprocess.run(
        [sys.executable, "-m", "tollkeeper", *arguments],
        capture_output=True,
        check=False,
        text=True,
        env={**clean, **env},
        timeout=READY_SECONDS_MAX,
    )


def _is_alive(number: str) -> bool:
    if not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    # One that has ended and was not waited for yet is none.
    try:
        stat = Path(f"/proc/{number}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
