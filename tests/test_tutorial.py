"""The tutorial works as written: every file, every command and every output on the page.

A block with `title="app.py"` is a file, `title="terminal 1"` a server that runs until the next one
starts, and any other block of commands runs to its end. A block that a terminal "prints" is what
the commands above it printed; `…` stands for any text. The page uses the ports 8000 and 8080, the
test uses free ones. `tests/test_readme.py` runs the Python blocks without a title.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.redis_servers.ports import free_port
from tests.redis_servers.waiting import until
from tests.test_readme import PAGES, ROOT, page_id

TUTORIAL = ROOT / "docs/tutorial.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
COMMAND_SECONDS_MAX = 120


def matches(printed: str, expected: str) -> bool:
    """Return True if a text was printed, where `…` stands for any text."""
    pattern = re.escape(expected.strip()).replace("…", ".*?")
    return re.fullmatch(pattern, printed.replace("\r", "").strip(), re.DOTALL) is not None


def with_installed(commands: str) -> str:
    """Return the commands with the installed package in place of the checkout.

    pip would build the checkout again, and replace the package that other tests use.
    """
    return commands.replace("'../ratekeeper[", "'ratekeeper[")


class Terminals:
    """The folder and the two terminals of a reader."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server: subprocess.Popen[bytes] | None = None
        self._ports = {"8000": str(free_port()), "8080": str(free_port())}
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("RATEKEEPER_", "PYTEST"))}
        self._environment = clean | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            # The packages of `pip install` are installed here; pip must not download any.
            "PIP_NO_INDEX": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_STATE_HOME": str(folder / "state"),
            "RATEKEEPER_PORT": self._ports["8080"],
            "RATEKEEPER_URL": f"http://127.0.0.1:{self._ports['8080']}",
            "RATEKEEPER_NO_GRPC": "1",
        }

    def _with_ports(self, commands: str) -> str:
        return re.sub(r"\b(8000|8080)\b", lambda match: self._ports[match[1]], commands)

    def run(self, commands: str) -> str:
        """Run commands to their end, and return what they printed."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._with_ports(with_installed(commands))],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS_MAX,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def serve(self, command: str) -> None:
        """Start a server in place of the one that runs, and wait until it answers."""
        self.stop()
        name = "8080" if command.startswith("ratekeeper serve") else "8000"
        with (self.folder / "log").open("wb") as log:
            self._server = subprocess.Popen(
                ["bash", "-c", f"exec env {self._with_ports(command)}"],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until(
            lambda: self._server.poll() is not None or self._answers(int(self._ports[name])),  # type: ignore[union-attr]  # started above
            f"{command!r} answers",
            COMMAND_SECONDS_MAX,
            lambda: (self.folder / "log").read_text(encoding="utf-8"),
        )
        assert self._server.poll() is None, (self.folder / "log").read_text(encoding="utf-8")

    @staticmethod
    def _answers(port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def stop(self) -> None:
        """End the server that runs, and its workers."""
        if self._server is not None and self._server.poll() is None:
            os.killpg(self._server.pid, signal.SIGTERM)
            self._server.wait(COMMAND_SECONDS_MAX)


@contextmanager
def terminals(folder: Path) -> Iterator[Terminals]:
    """Run a block with terminals in a folder; end the server after it."""
    opened = Terminals(folder)
    try:
        yield opened
    finally:
        opened.stop()


@pytest.mark.long
def test_the_tutorial_works_as_written(tmp_path: Path) -> None:
    """A reader who types every block gets what the page shows."""
    printed, kinds = "", []
    with terminals(tmp_path) as reader:
        for language, title, text in BLOCK.findall(TUTORIAL.read_text(encoding="utf-8")):
            kinds.append(language)
            if title == "terminal 1":
                reader.serve(text.strip())
            elif language == "sh":
                printed = reader.run(text)
            elif title.endswith("prints"):
                assert matches(printed, text), f"printed:\n{printed}\ninstead of:\n{text}"
            elif title:
                (tmp_path / title).write_text(text, encoding="utf-8")
            else:
                assert language == "python", f"nothing runs this block:\n{text}"
    assert {"python", "sh", "text", "yaml"} <= set(kinds)


def test_the_tutorial_stops_a_server_before_it_starts_the_next() -> None:
    """Otherwise the port is in use. The test above stops servers by itself."""
    texts = TUTORIAL.read_text(encoding="utf-8").split('```sh title="terminal 1"\n')
    assert len(texts) > 2
    assert all("Ctrl-C" in text for text in texts[1:-1])


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("a\r\nb\n", "a\nb\n", True),
        ("a: 1\nx\ny\nb", "a: …\n…\nb", True),
        ("    100 200\n    99 429", "    100 200\n    100 429", False),
    ],
)
def test_outputs_are_compared(printed: str, expected: str, same: bool) -> None:
    """The comparison can fail, and an ellipsis stands for any text."""
    assert matches(printed, expected) is same


def test_only_the_tutorial_has_blocks_that_this_file_runs() -> None:
    """A Python block with a title on another page would be run by no test."""
    titled = re.compile(r"^```python .*title=", re.MULTILINE)
    pages = [page for page in PAGES if titled.search(page.read_text(encoding="utf-8"))]
    assert [page_id(page) for page in pages] == ["docs/tutorial.md"]
