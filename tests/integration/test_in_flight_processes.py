"""Requests in flight across processes: never more than the limit, and no slot outlives its time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.slot_hammer import KILLED_S, SLOTS
from tests.redis_servers import running

# Longer than any run takes. A run that reaches it hangs.
HANGS_AFTER_SECONDS = 120
PROCESSES = 4
ROUNDS = 60
KILLS, KILLED_AT_ONCE = 200, 20


@pytest.fixture(params=["shared", pytest.param("single", marks=pytest.mark.server)])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that several processes share."""
    if request.param == "shared":
        return f"shared://{tmp_path}/one.limits?capacity=1000"
    return f"{running(request.param).uri}?prefix={tmp_path.name}&deadline_ms=10000"


def hammer(*arguments: object) -> dict[str, Any]:
    """Run the hammer in another process and return its result."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.slot_hammer", *map(str, arguments)],
        capture_output=True,
        check=False,
        text=True,
        timeout=HANGS_AFTER_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_no_more_requests_than_the_limit_are_in_flight(uri: str) -> None:
    """Four processes compete for three slots; each frees its slot twice, and nobody else's."""
    result = hammer("held", uri, PROCESSES, ROUNDS)
    assert result == {"most": SLOTS, "left": SLOTS, "statuses": [0] * PROCESSES}


def test_two_hundred_killed_processes_leave_no_slot_after_its_time(uri: str) -> None:
    """Each is killed at any instruction; the slots that it had end by themselves."""
    seed = int.from_bytes(os.urandom(4))
    result = hammer("killed", uri, KILLED_AT_ONCE, KILLS, seed)
    assert result["longest"] <= KILLED_S, f"seed {seed}: {result}"
    assert result["taken"] > 0, f"seed {seed}: {result}: nothing was tested"
