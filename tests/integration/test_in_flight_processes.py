"""Requests in flight across processes: never more than the limit, and no slot outlives its time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.program import printed
from tests.integration.slot_hammer import KILLED_S, SLOTS
from tests.redis_servers import running

PROCESSES = 4
ROUNDS = 60
KILLS, KILLED_AT_ONCE = 200, 20


@pytest.fixture(params=["shared", pytest.param("single", marks=pytest.mark.server)])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that several processes share."""
    if request.param == "shared":
        return f"shared://{tmp_path}/one.limits?capacity=1000"
    return f"{running(request.param).uri}?prefix={tmp_path.name}&deadline_ms=10000"


def test_no_more_requests_than_the_limit_are_in_flight(uri: str) -> None:
    """Four processes compete for three slots; each frees its slot twice, and nobody else's."""
    result = printed("slot_hammer", "held", uri, PROCESSES, ROUNDS)
    assert result == {"most": SLOTS, "left": SLOTS, "statuses": [0] * PROCESSES}


def test_two_hundred_killed_processes_leave_no_slot_after_its_time(uri: str) -> None:
    """Each is killed at any instruction; the slots that it had end by themselves."""
    seed = int.from_bytes(os.urandom(4))
    result = printed("slot_hammer", "killed", uri, KILLED_AT_ONCE, KILLS, seed)
    assert result["longest"] <= KILLED_S, f"seed {seed}: {result}"
    assert result["taken"] > 0, f"seed {seed}: {result}: nothing was tested"
