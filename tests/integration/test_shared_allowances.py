"""Processes of one node share their allowances in a file, and survive the death of each other."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ratekeeper import Limiter, StoreUnavailable
from ratekeeper.decide.allowances import AllowanceGate
from tests.integration.allowance_hammer import KEYS, LIMIT, gates_of, open_table, put

HOUR_NS = 3_600_000_000_000


def hammer(*arguments: object) -> Any:
    command = [sys.executable, "-m", "tests.integration.allowance_hammer", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4_000:]
    return json.loads(done.stdout)


def spend_for(gate: AllowanceGate, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        gate.spend("ada", 0)


def test_processes_spend_exactly_what_was_put_there(tmp_path: Path) -> None:
    """Four workers, two of them forked from one that has the table open, spend every unit once."""
    units = 2_000
    result = hammer("exact", tmp_path / "node", 4, units)
    assert result["statuses"] == [0, 0, 0, 0]
    # Leases end after two seconds, which a busy machine may exceed. Their rest is not spent.
    assert result["spent"] + result["left"] == 2 * units * len(KEYS)
    assert result["pending"] == units * len(KEYS)


def test_killed_processes_lose_no_pending_unit_and_spend_none_twice(tmp_path: Path) -> None:
    """Workers that spend and report are killed at random moments, and replaced.

    A worker may be killed before it has counted what it did. So the counts prove: no more units of
    leases were spent and given back than were put there, and every unit of a budget that was spent
    is reported or pending.
    """
    result = hammer("killed", tmp_path / "node", 6, 40, 1)
    assert result["spent"] + result["given back"] + result["left"] <= result["leases"]
    assert result["spent of budgets"] <= result["reported"] + result["pending"]


def test_a_removed_file_is_made_again(tmp_path: Path) -> None:
    """The call that notices it raises StoreUnavailable; leases in the lost file are forgotten."""
    table = open_table(str(tmp_path / "node"))
    gate = gates_of(table)[0]
    put(gate, "ada", 5, HOUR_NS)
    (tmp_path / "node.allowances").unlink()
    with pytest.raises(StoreUnavailable, match=r"node\.allowances was removed"):
        spend_for(gate, seconds=10)
    assert gate.spend("ada", 1) is None
    put(gate, "ada", 5, HOUR_NS)
    assert gate.spend("ada", 1)
    assert (tmp_path / "node.allowances").exists()


def test_leases_and_budgets_of_an_earlier_boot_are_not_spent(tmp_path: Path) -> None:
    """The wall clock may be earlier than before the restart. Pending units are still reported."""
    before = open_table(str(tmp_path / "node"))
    for gate in gates_of(before):
        put(gate, "ada", 5, HOUR_NS)
        assert gate.spend("ada", 2)
    before.close()
    path = tmp_path / "node.allowances"
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    path.write_bytes(path.read_bytes().replace(boot_id, b"0" * len(boot_id)))
    after = open_table(str(tmp_path / "node"))
    assert [gate.spend("ada", 1) for gate in gates_of(after)] == [None, None]
    claims = {claim.kind: claim.units for claim in after.claim(10, 0)}
    assert claims == {"leased": 3, "eventual": 2}


def test_the_compiled_check_asks_when_the_file_is_lost(tmp_path: Path) -> None:
    """The Python path finds out, and applies the failure policy."""
    table = open_table(str(tmp_path / "node"))
    gate = gates_of(table)[1]
    put(gate, "ada", 1_000_000, HOUR_NS)
    asked = Limiter("9/minute").check("x")
    fast = gate.fast_check(lambda key: asked)
    assert fast is not None
    assert fast.check("ada").policy == LIMIT
    (tmp_path / "node.allowances").unlink()
    deadline = time.monotonic() + 10
    while fast.check("ada") is not asked and time.monotonic() < deadline:
        pass
    assert fast.check("ada") is asked
