"""The first minute with a real `ratekeeper serve`: its lines, the login link, the command."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from tests.redis_servers.waiting import until
from tests.service_process import STOP_SECONDS_MAX, ServiceProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "limits.yaml"


def test_the_lines_on_a_terminal(tmp_path: Path) -> None:
    """They are short; the link logs in once, and the command works as it is printed."""
    terminal, end = pty.openpty()
    os.set_blocking(terminal, False)
    data = str(tmp_path / "data")
    options = ("--seed", str(EXAMPLE), "--sample", "1", "--console-link", "--port", "0")
    command = [sys.executable, "-m", "ratekeeper", "serve", "--data", data, "--workers", "1"]
    process = subprocess.Popen(
        [*command, "--no-grpc", *options],
        stdin=end,
        stdout=end,
        stderr=end,
        env={k: v for k, v in os.environ.items() if not k.startswith("RATEKEEPER_")},
    )
    os.close(end)
    shown = ""

    def has_started() -> bool:
        nonlocal shown
        try:
            shown += os.read(terminal, 65_536).decode()
        except (BlockingIOError, OSError):
            assert process.poll() is None, shown
        return "once, within" in shown

    try:
        until(has_started, "the lines are printed", 120, lambda: shown)
        lines = shown.splitlines()
        assert all(len(line) < 160 or "log in" in line or "once," in line for line in lines), shown
        assert "{" not in lines[0]
        assert "version 1, 9 rules" in shown
        assert "100 % of allowed decisions" in shown
        (link,) = re.findall(r"log in +(http\S+)", shown)
        with httpx.Client(trust_env=False) as browser:
            answer = browser.get(link)
            assert (answer.status_code, answer.headers["location"]) == (303, "/console")
            assert browser.get(link.partition("/link/")[0]).status_code == 200
            assert browser.get(link).status_code == 403
        (tried,) = re.findall(r"try +(curl .*)", shown)
        _, url, _, body = shlex.split(tried)
        assert httpx.post(url, content=body, trust_env=False).json()["allowed"]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_SECONDS_MAX)
        os.close(terminal)


def test_a_log_has_no_login_link() -> None:
    """It has one event with the address of the console, and says how to make a link."""
    with ServiceProcess(None, "--seed", str(EXAMPLE), "--console-link") as service:
        until(lambda: "no_console_link" in service.log_text(), "the link is mentioned", 60)
        events = {each["event"]: each for each in service.events()}
        assert events["started"]["console"] == f"{service.url}/console"
        assert events["started"]["message"].count("\n") == 0
        assert "ratekeeper console link --data" in events["no_console_link"]["message"]
        assert "/console/link/" not in service.log_text()
        assert not list(service.data.glob("sessions/link-*"))
