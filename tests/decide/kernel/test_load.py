"""The table when it is nearly full, and when it is full."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from ratekeeper import Limit, StoreFull
from ratekeeper.decide.kernel import _kernel

CAPACITY = 20_000
LIMIT = Limit(10, per=60)


def fill(gate: _kernel.Counter, now_ns: int) -> int:
    """Spend on new keys until the table is full; return the number of keys."""
    number = 0
    try:
        while True:
            gate.check(f"key-{number}", 1 + number % 9, now_ns)
            number += 1
    except StoreFull:
        return number


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_table_holds_its_capacity(kind: str, tmp_path: Path) -> None:
    """At least the capacity fits, and in the full table every key has its own count, although many
    keys had to move."""
    path = None if kind == "memory" else tmp_path / "full.limits"
    table = _kernel.Table(path, capacity=CAPACITY)
    gate = _kernel.Counter(table, (LIMIT,), "")
    filled = fill(gate, 0)
    assert CAPACITY <= filled <= table.stats()["states_max"]
    for number in range(filled):
        assert gate.peek(f"key-{number}", 0, 0).remaining == 9 - number % 9


def test_expired_states_are_reused_without_a_sweep() -> None:
    """A full table accepts as many new keys again once the old ones have expired."""
    table = _kernel.Table(None, capacity=CAPACITY)
    gate = _kernel.Counter(table, (LIMIT,), "")
    fill(gate, 0)
    later_ns = 100 * 10**9
    for number in range(CAPACITY):
        gate.check(f"new-{number}", 1, later_ns)
    assert table.stats()["expired"] > CAPACITY // 2


LOG = Limit(1_000, per=1, algorithm="sliding_window_log")
SECOND_NS = 10**9


@pytest.fixture
def logs() -> _kernel.Counter:
    """Memory for 128 logs of 63 entries, in a table for many more keys. One rule may use 4/5."""
    return _kernel.Counter(_kernel.Table(None, capacity=10_000, log_bytes=1 << 16), (LOG,), "")


def fill_logs(gate: _kernel.Counter, name: str, entries: int, now_ns: int) -> int:
    """Create logs of this many entries until the slab is full; return their number."""
    number = 0
    try:
        while True:
            gate.check(f"{name}-{number}", entries, now_ns)
            number += 1
    except StoreFull:
        return number


def test_expired_logs_free_their_memory(logs: _kernel.Counter) -> None:
    """When the slab is full, expired logs are found and reused without a sweep."""
    for generation in range(5):
        assert fill_logs(logs, str(generation), 63, generation * 2 * SECOND_NS) >= 100


def test_small_logs_do_not_prevent_large_ones(logs: _kernel.Counter) -> None:
    """A slab that was full of the smallest logs can hold the largest ones after they expired.

    Each check reclaims a few, so some are rejected before there is a large block.
    """
    assert fill_logs(logs, "small", 1, 0) >= 800
    made = [fill_logs(logs, f"large-{turn}", 1_000, 2 * SECOND_NS) for turn in range(5)]
    assert sum(made) >= 5


def test_one_rule_cannot_use_up_the_room_of_another() -> None:
    """A rule whose logs have filled their part is rejected. Other rules still find room, each at
    least four fifths of what the ones before have left."""
    table = _kernel.Table(None, capacity=10_000, log_bytes=1 << 19)
    units = (1 << 19) // 64
    expected = []
    for name in ("first", "second", "third"):
        gate = _kernel.Counter(table, (LOG,), name)
        expected.append(units * 4 // 5)
        assert fill_logs(gate, name, 1, 0) == pytest.approx(expected[-1], abs=2)
        units -= expected[-1]
    assert table.stats()["log_bytes_used"] == pytest.approx(64 * sum(expected), abs=512)


def test_a_rule_that_arrives_first_does_not_keep_its_room() -> None:
    """The room of expired logs goes back to all rules."""
    table = _kernel.Table(None, capacity=10_000, log_bytes=1 << 16)
    hog, login = (_kernel.Counter(table, (LOG,), name) for name in ("hog", "login"))
    assert fill_logs(hog, "hog", 63, 0) == 102
    table.sweep(2 * SECOND_NS)
    assert table.stats()["log_bytes_used"] == 0
    assert fill_logs(login, "login", 63, 2 * SECOND_NS) == 102


def test_charges_that_find_no_room_take_none() -> None:
    """A new log of one rule is given up if another charge of the call finds no room for its own."""
    table = _kernel.Table(None, capacity=10_000, log_bytes=1 << 16)
    hog, login = (_kernel.Counter(table, (LOG,), name) for name in ("hog", "login"))
    fill_logs(hog, "hog", 63, 0)
    before = table.stats()
    for _ in range(50):
        for checks in ([(login, "k", 5), (hog, "new", 63)], [(hog, "new", 63), (login, "k", 5)]):
            answers = table.check_all(checks, (), 0)
            assert sorted(type(each).__name__ for each in answers) == ["Decision", "StoreFull"]
    after = table.stats()
    assert after["refused"] - before["refused"] == 100
    assert {**after, "refused": 0} == {**before, "refused": 0}
    optional = table.check_all([(hog, "new", 63), (login, "k", 5)], {0}, 0)
    assert [isinstance(each, StoreFull) for each in optional] == [True, False]
    assert login.peek("k", 0, 0).remaining == LOG.limit - 5


def test_limits_of_one_rule_share_its_room() -> None:
    """A rule with several logs gets no more than a rule with one."""
    table = _kernel.Table(None, capacity=10_000, log_bytes=1 << 16)
    limits = tuple(Limit(1_000, per=n, algorithm="sliding_window_log") for n in (1, 2, 3))
    assert fill_logs(_kernel.Counter(table, limits, "rule"), "k", 1, 0) == 819 // 3
    fill_logs(_kernel.Counter(table, limits[:1], "rule"), "k", 1, 0)
    assert table.stats()["log_bytes_used"] <= 820 * 64


@pytest.mark.parametrize("rules", [2, 50, 2_000])
def test_many_rules_find_room(rules: int) -> None:
    """More rules than there are accounts share some of them; every first log finds room."""
    table = _kernel.Table(None, capacity=10_000, log_bytes=1 << 20)
    hog = _kernel.Counter(table, (LOG,), "hog")
    fill_logs(hog, "hog", 15, 0)
    for number in range(rules):
        gate = _kernel.Counter(table, (LOG,), f"rule-{number}")
        assert gate.check(f"key-{number}", 1, 0).allowed


def test_logs_of_all_sizes_leave_no_memory_behind() -> None:
    """After thousands of logs of random sizes, the free blocks are joined again."""
    table = _kernel.Table(None, capacity=1_000, log_bytes=1 << 18)
    gate = _kernel.Counter(table, (LOG,), "")
    random = Random(1)
    for turn in range(5_000):
        key = f"key-{random.randrange(200)}"
        if random.random() < 0.5:
            gate.reset(key)
        else:
            with suppress(StoreFull):
                gate.check(key, random.randrange(1, 500), turn)
    for number in range(200):
        gate.reset(f"key-{number}")
    assert table.stats()["log_bytes_used"] == 0
    assert fill_logs(gate, "large", 1_000, 0) == (1 << 18) * 4 // 5 // 8_192


def test_a_live_log_is_never_dropped(logs: _kernel.Counter) -> None:
    """If the slab is full of live logs, a new key is rejected, and they keep their counts."""
    filled = fill_logs(logs, "kept", 63, 0)
    for number in range(filled):
        assert logs.peek(f"kept-{number}", 0, 0).remaining == 1_000 - 63


def test_a_grant_is_never_lost_among_expired_ones() -> None:
    """Keys come and go, their credits expire and their slots are reused: a new grant counts."""
    gate = _kernel.Counter(_kernel.Table(None, capacity=40), (Limit(4, per=1),), "")
    for turn in range(5_000):
        now_ns = turn * SECOND_NS // 3
        subject = f"key-{turn * 7 % 31}"
        before = gate.peek(subject, 0, now_ns).remaining
        try:
            gate.grant(subject, 7, 1, now_ns)
        except StoreFull:
            continue
        assert gate.peek(subject, 0, now_ns).remaining == before + 7
        gate.check(f"other-{turn}", 1, now_ns)


def test_a_state_takes_at_most_32_bytes() -> None:
    """In a table of a million states that is 80 % full, with all overhead."""
    table = _kernel.Table(None, capacity=1_000_000)
    assert table.stats()["bytes"] / 1_000_000 <= 32
    assert _kernel.Table(None, capacity=10_000_000).stats()["bytes"] < 500_000_000
