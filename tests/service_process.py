"""A real `ratekeeper serve` on a free port of loopback, for tests and benchmarks.

    with ServiceProcess(RULES, workers=4) as service:
        status, headers, answer = service.ask("POST", "/v1/check", {"user": "42"})

As with `redis_servers`, its files are in a temporary folder, it is ready when all its workers are
ready, and it exits with this process, even if this process is killed. It can be stopped and started
again in the same folder, with the same counts, rules and tokens.
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

# Long enough for a busy machine; a start usually takes two seconds.
READY_SECONDS_MAX = 120.0
STOP_SECONDS_MAX = 40.0
ASK_SECONDS_MAX = 60.0
_LOG_LINES_SHOWN = 20

# One rule for each field by which most tests count.
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
    """A response. `data` is the parsed JSON, or None if the body is not JSON."""

    status: int
    headers: dict[str, str]
    """The names are in lower case."""
    data: Any
    body: bytes


class ServiceProcess(Startable):
    """One service, started and stopped by a `with` block.

    `rules`    a document, or a value of `--rules`; None: the options have it
    `options`  further options of the command
    `records`  False: without a database of records, which makes the start quicker
    `env`      further environment variables
    """

    def __init__(
        self,
        rules: Mapping[str, Any] | str | None = RULES,
        *options: str,
        workers: int = 1,
        grpc: bool = False,
        records: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = scratch().new_folder("service")
        self.data = self.folder / "data"
        self.workers = workers
        self.url = ""
        self.grpc = ""
        """HOST:PORT, if gRPC is enabled."""
        self._options = options if records else ("--record", "off", *options)
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
        """The file of the rule document, if the rules come from a document."""
        return self.folder / "rules.yaml"

    def use(self, rules: Mapping[str, Any]) -> None:
        """Replace the rule file with another document, atomically."""
        written = self.folder / "rules.new"
        written.write_text(json.dumps(rules), encoding="utf-8")
        written.replace(self.rules_path)

    def command(self) -> list[str]:
        """Return the command line of the service."""
        ports = ["--port", "0", *(["--grpc", "127.0.0.1:0"] if self._grpc else ["--no-grpc"])]
        chosen = ["--data", str(self.data), "--workers", str(self.workers), *ports]
        return [sys.executable, "-m", "ratekeeper", "serve", *chosen, *self._rules, *self._options]

    @property
    def pid(self) -> int | None:
        """The ID of the main process; None if it is not running."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    def worker_pids(self) -> list[int]:
        """Return the process IDs of the live workers."""
        files = self.data.glob(f"run-{self.pid}/*.json")
        return sorted(int(each.stem) for each in files if _is_alive(each.stem))

    def start(self) -> None:
        """Start the service and wait until every worker listens.

        After `end`, start it again with the same data.
        """
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
        """Start the service without waiting until it is ready."""
        if self._process is not None:
            self._process.wait()
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RATEKEEPER_")}
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
        """Return True if every worker listens. Each worker has its own socket on the port."""
        port = urlsplit(self.url).port or 0
        lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
        found = [each.split() for each in lines]
        listening = [each for each in found if each[3] == "0A" and each[1].endswith(f":{port:04X}")]
        return len(listening) >= self.workers

    def events(self) -> list[dict[str, Any]]:
        """Return the events logged since the last start, without lines that are not JSON."""
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
        """Return everything that the service printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def log_end(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(["Its log ends:", *self.log_text().splitlines()[-_LOG_LINES_SHOWN:]])

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answered:
        """Send one request on a new connection. A `body` that is not bytes is sent as JSON."""
        connection = self.connect()
        try:
            return ask_on(connection, method, path, body, headers)
        finally:
            connection.close()

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection, which the caller closes. It does not verify the certificate."""
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
        """Stop the service by a signal and return its exit code. It can be started again."""
        assert self._process is not None
        self._process.send_signal(how)
        code = self._process.wait(STOP_SECONDS_MAX)
        until(lambda: not self.worker_pids(), "all workers have exited", STOP_SECONDS_MAX)
        scratch().forget(self)
        return code

    def kill(self) -> None:
        """Kill the main process, and then its workers."""
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
        """Stop the service and remove its files."""
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
    """Send one request on an open connection, and keep the connection."""
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
    """Run a `ratekeeper` command to its end; return its output and exit code.

    It waits for an answer of a service as long as `ServiceProcess.ask` does.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RATEKEEPER_")}
    clean["RATEKEEPER_TIMEOUT"] = f"{ASK_SECONDS_MAX:g}"
    return subprocess.run(
        [sys.executable, "-m", "ratekeeper", *arguments],
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
    # A process that has exited but was not waited for (a zombie) is not alive.
    try:
        stat = Path(f"/proc/{number}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
