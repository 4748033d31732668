"""The base of the gateways in the tests: one process with a folder and a log."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

from tests.redis_servers.scratch import scratch
from tests.redis_servers.server import Startable

_STOP_SECONDS_MAX = 10.0
_LOG_LINES_SHOWN = 20


class Gateway(Startable):
    """A gateway process. Stopping it also removes its files."""

    def __init__(self, name: str) -> None:
        self.folder: Path = scratch().new_folder(name)
        self._process: subprocess.Popen[bytes] | None = None

    def _launch(self, command: list[str | Path]) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                process_group=scratch().process_group,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        scratch().stop_at_exit(self, self.kill)

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        """Terminate the process, and kill it if it does not exit in time.

        SIGTERM comes first, so that the gateway can stop its workers.
        """
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        scratch().forget(self)

    def stop(self) -> None:
        """Stop the process and remove its files."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _log_end(self) -> str:
        text = (self.folder / "log").read_text(encoding="utf-8", errors="replace")
        return "The end of its log:\n" + "\n".join(text.splitlines()[-_LOG_LINES_SHOWN:])
