"""`ratekeeper top` of a real service with a real Redis: in a terminal, in a pipe, as JSON.

The terminal is a pty of the kernel. The test checks the bytes that are written to it: the alternate
screen is entered and left, frames arrive, and a new size is used.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import pytest

from ratekeeper.service.http.tokens import create_token
from tests.redis_servers import Single, until
from tests.service_process import ServiceProcess, ask_on, run_to_end

RULES = {
    "version": 1,
    "rules": [
        {"id": "users", "match": {"user": "*"}, "by": ["user"], "limits": ["5/hour"]},
        {"id": "keys", "match": {"api_key": "*"}, "by": ["api_key"], "limits": ["9000/second"]},
    ],
}
SECONDS_MAX = 90.0
ENTERED, LEFT, HOME = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[H"
_SEQUENCE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def redis() -> Iterator[Single]:
    """Start a server that a test may stop."""
    with Single() as server:
        yield server


class TokenService(ServiceProcess):
    """A service with one token for checks and one for reading."""

    def __init__(self, *options: str) -> None:
        super().__init__(RULES, *options, records=True, workers=2)
        tokens = self.data / "tokens.json"
        self.check = create_token(tokens, "check", "check")
        self.read = create_token(tokens, "read", "read")


@pytest.fixture(scope="module")
def service(redis: Single) -> Iterator[TokenService]:
    """Start a service with two workers: frames show the sums of both."""
    with TokenService("--store", redis.uri) as process:
        yield process


@contextmanager
def load(service: TokenService) -> Iterator[None]:
    """Send checks all the time."""
    done = Event()
    token = {"authorization": f"Bearer {service.check}"}

    def ask() -> None:
        connection = service.connect()
        while not done.wait(0.01):
            ask_on(connection, "POST", "/v1/check", {"user": "ann", "api_key": "sk_1"}, token)
        connection.close()

    thread = Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Terminal:
    """A command in its own terminal."""

    def __init__(
        self, *arguments: str, columns: int = 100, lines: int = 24, token: str = ""
    ) -> None:
        self._ours, theirs = pty.openpty()
        self.written = b""
        self.resize(columns, lines)
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "", "LINES": ""}
        environment["RATEKEEPER_TOKEN"] = token
        self.process = subprocess.Popen(
            # The controlling terminal, so that the kernel signals a new size.
            ["setsid", "--ctty", sys.executable, "-m", "ratekeeper", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={name: value for name, value in environment.items() if value},
        )
        os.close(theirs)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self) -> bytes:
        """Return everything that was written so far."""
        while select.select([self._ours], [], [], 0.01)[0]:
            try:
                found = os.read(self._ours, 65_536)
            except OSError:  # the other end is closed
                break
            if not found:
                break
            self.written += found
        return self.written

    def frames(self) -> list[str]:
        """Return the complete frames so far, as text."""
        pieces = self.read().split(HOME)[1:]
        return [_SEQUENCE.sub(b"", piece).decode(errors="replace") for piece in pieces]

    def await_frame(self, *words: str) -> str:
        """Wait until the last frame has these words, and return it."""

        def found() -> str | None:
            last = (self.frames() or [""])[-1]
            return last if all(word in last for word in words) else None

        return until(found, f"a frame with {words}", SECONDS_MAX, lambda: self.frames()[-1:])

    def close(self) -> int:
        """Wait for the command, and return its exit code. It has restored the terminal."""
        try:
            until(lambda: self.read() and self.process.poll() is not None, "the end", SECONDS_MAX)
            self.read()
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self._ours)
        assert self.written.index(ENTERED) < self.written.index(LEFT)
        assert b"\x1b[?25h" in self.written[self.written.index(LEFT) - 20 :]  # the cursor is back
        assert b"Traceback" not in self.written
        assert b"Abort" not in self.written
        return self.process.returncode


def test_frames_on_a_terminal(service: TokenService) -> None:
    """Rates of all workers; SIGTERM ends it quietly, as Ctrl-C ends it in the tests below."""
    with load(service):
        terminal = Terminal("top", "--interval", "1", "--url", service.url)
        try:
            frame = terminal.await_frame("users", "keys", "DENIED/S", " denied (")
            assert "2 workers" in frame
            assert "closed" in frame
            terminal.await_frame("calls took p50")
            terminal.process.send_signal(signal.SIGTERM)
        finally:
            assert terminal.close() == 0


def test_busiest_keys_need_a_token_for_reading(service: TokenService) -> None:
    """Without one, everything else is shown."""
    with load(service):
        url = service.url
        terminal = Terminal("top", "--interval", "1", "--url", url, token=service.read)
        try:
            terminal.await_frame("CHECKED MOST", "DENIED MOST", "user:ann", "api_key:sk_1")
            terminal.process.send_signal(signal.SIGINT)
        finally:
            assert terminal.close() == 0
    for token, named in ((service.read, True), (service.check, False), ("", False)):
        as_json = run_to_end(
            ["top", "--json", "--interval", "1", "--url", url], RATEKEEPER_TOKEN=token
        )
        found = json.loads(as_json.stdout)
        assert (found["denied_most"] is not None) is named
        assert found["rules"]
    assert service.read.encode() not in terminal.written


def test_resize_redraws_at_once(service: TokenService) -> None:
    """It does not wait for the next interval, which is in an hour."""
    terminal = Terminal("top", "--interval", "3600", "--url", service.url)
    try:
        wide = terminal.await_frame("service", "RULE")
        assert len(wide.splitlines()) == 24
        terminal.resize(60, 12)
        until(
            lambda: len((terminal.frames() or [""])[-1].splitlines()) == 12,
            "a frame of twelve lines",
            SECONDS_MAX,
            lambda: terminal.frames()[-1:],
        )
        assert max(len(line) for line in terminal.frames()[-1].splitlines()) <= 60
        terminal.process.send_signal(signal.SIGINT)
    finally:
        assert terminal.close() == 0


def test_last_frame_stays_when_the_service_stops() -> None:
    """A line in the last frame gives the reason."""
    with ServiceProcess(RULES) as service:
        port = service.url.rpartition(":")[2]
        terminal = Terminal("top", "--interval", "1", "--url", service.url)
        try:
            terminal.await_frame("service", "ready")
            service.end()
            frame = terminal.await_frame("as it was", "cannot be reached")
            assert f":{port}" in frame
            assert "RULE" in frame
            terminal.process.send_signal(signal.SIGINT)
        finally:
            assert terminal.close() == 0


def test_once_and_json_print_one_frame(service: TokenService) -> None:
    """In a pipe: plain lines with the rates of the load."""
    with load(service):
        done = run_to_end(["top", "--once", "--interval", "1", "--url", service.url])
        as_json = run_to_end(["top", "--json", "--interval", "2", "--url", service.url])
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"service   {service.url}")
    assert sorted([line.split()[0] for line in lines[-3:]]) == ["RULE", "keys", "users"]
    found = json.loads(as_json.stdout)
    assert found["workers"] == 2
    rules = {rule["rule"]: rule for rule in found["rules"]}
    assert rules["keys"]["allowed"] > 0
    assert rules["keys"]["denied"] == 0
    assert rules["users"]["denied"] > 0
    assert 0 < found["store"]["p50_s"] <= found["store"]["p99_s"]
    assert [each["state"] for each in found["breakers"]] == ["closed"]


def test_pipe_gets_frames_until_it_is_closed(service: TokenService) -> None:
    """The command ends when the reader closes the pipe, as in `ratekeeper top | head`."""
    command = [sys.executable, "-m", "ratekeeper", "top", "--interval", "1", "--url", service.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            read = b""
            while read.count(b"service ") < 2:
                piece = process.stdout.readline()
                assert piece, process.stderr.read()
                read += piece
            process.stdout.close()
            assert process.wait(SECONDS_MAX) == 141
            assert process.stderr.read() == b""
        finally:
            process.kill()
    assert b"\x1b" not in read


def test_unavailable_store_is_shown(service: TokenService, redis: Single) -> None:
    """The frame shows the open breaker, and the error of the store if the caller has a token."""
    options = ("top", "--interval", "1", "--url", service.url)
    errors = {
        service.check: f"127.0.0.1:{redis.port} failed",
        "": "send a token to see the error",
    }
    with load(service):
        redis.pause()
        try:
            for token, error in errors.items():
                terminal = Terminal(*options, columns=160, token=token)
                try:
                    terminal.await_frame(f"not healthy: {error}", " open (")
                    terminal.process.send_signal(signal.SIGINT)
                finally:
                    assert terminal.close() == 0
        finally:
            redis.resume()
