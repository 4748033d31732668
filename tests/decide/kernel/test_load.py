"""The table when it is nearly full, and when it is more than that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tollkeeper import Limit, StoreFull
from tollkeeper.decide.kernel import _kernel

CAPACITY = 20_000
LIMIT = Limit(10, per=60)


def fill(gate: _kernel.Gate, now_ns: int) -> int:
    """Spend on new keys until there is no room; how many there was room for."""
    number = 0
    try:
        while True:
            gate.decide(f"key-{number}", 1 + number % 9, now_ns, True)
            number += 1
    except StoreFull:
        return number


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_table_holds_what_was_asked_for_and_keeps_it(kind: str, tmp_path: Path) -> None:
    """At least the capacity fits; and when it is full every key still has its own count, though
    many had to move to make room for others."""
    path = None if kind == "memory" else tmp_path / "full.limits"
    table = _kernel.Table(path, capacity=CAPACITY)
    gate = _kernel.Gate(table, (LIMIT,), "")
    filled = fill(gate, 0)
    assert CAPACITY <= filled <= table.stats()["states_max"]
    for number in range(filled):
        assert gate.decide(f"key-{number}", 0, 0, False).remaining == 9 - number % 9


def test_expired_states_are_reused_where_they_are() -> None:
    """A full table takes as many new keys again once the old ones have expired, unswept."""
    table = _kernel.Table(None, capacity=CAPACITY)
    gate = _kernel.Gate(table, (LIMIT,), "")
    fill(gate, 0)
    later_ns = 100 * 10**9
    for number in range(CAPACITY):
        gate.decide(f"new-{number}", 1, later_ns, True)
    assert table.stats()["expired"] > CAPACITY // 2


def test_logs_that_expired_give_their_room_back() -> None:
    """The slab serves one generation of logs after another."""
    limit = Limit(50, per=1, algorithm="sliding_window_log")
    table = _kernel.Table(None, capacity=1_000, log_bytes=1_000 * 1_024)
    gate = _kernel.Gate(table, (limit,), "")
    for generation in range(20):
        for number in range(900):
            for _ in range(9):
                gate.decide(f"{generation}-{number}", 5, generation * 2 * 10**9, True)
    assert table.stats()["log_bytes_used"] <= table.stats()["log_bytes_max"]


def test_a_state_takes_at_most_32_bytes() -> None:
    """In a table of a million states at 80 % fullness, all that is around them included."""
    table = _kernel.Table(None, capacity=1_000_000)
    assert table.stats()["bytes"] / 1_000_000 <= 32
    assert _kernel.Table(None, capacity=10_000_000).stats()["bytes"] < 500_000_000
