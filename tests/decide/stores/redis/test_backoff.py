"""How often a server that is down is tried again, at explicit times."""

from __future__ import annotations

import pytest

from tollkeeper.decide.stores.redis import backoff as module
from tollkeeper.decide.stores.redis.backoff import FIRST_NS, LONGEST_NS, Backoff

MS = 1_000_000


@pytest.fixture(autouse=True)
def longest_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random part at its end: a pause is what it is called."""
    monkeypatch.setattr(module, "random", lambda: 1.0)


def test_a_server_that_never_failed_may_be_tried_at_any_time() -> None:
    """Every caller is let through, however many there are."""
    backoff = Backoff()
    assert all(backoff.may_try(now_ns) for now_ns in (0, 0, 5, 5, 10**18))


def test_after_a_failure_one_caller_tries_and_the_others_do_not() -> None:
    """Nobody within the pause; then one, and after another pause one more."""
    backoff = Backoff()
    backoff.failed(100 * MS, 100 * MS, "refused")
    assert backoff.reason == "refused"
    asked_ms = (100, 109, 110, 110, 119, 120, 120)
    allowed = [backoff.may_try(ms * MS) for ms in asked_ms]
    assert allowed == [False, False, True, False, False, True, False]


def test_pauses_double_up_to_the_longest() -> None:
    """10 ms, 20 ms and so on to a second, and no further."""
    backoff = Backoff()
    now_ns, pauses_ms = 0, []
    for _ in range(10):
        backoff.failed(now_ns + 1, now_ns + 1, "down")
        tried_ns = now_ns + 1
        while not backoff.may_try(tried_ns):
            tried_ns += MS
        pauses_ms.append((tried_ns - now_ns) // MS)
        now_ns = tried_ns
    assert pauses_ms == [10, 20, 40, 80, 160, 320, 640, 1000, 1000, 1000]
    assert (pauses_ms[0] * MS, pauses_ms[-1] * MS) == (FIRST_NS, LONGEST_NS)


def test_those_who_fail_together_are_one_failure() -> None:
    """A hundred threads that meet a dead server do not make the pause a hundred steps longer."""
    backoff = Backoff()
    for number in range(100):
        backoff.failed(5 * MS, 10 * MS + number, f"down {number}")
    assert backoff.reason == "down 0"
    assert not backoff.may_try(19 * MS)
    assert backoff.may_try(20 * MS)


def test_whoever_was_let_try_before_a_failure_learns_of_it() -> None:
    """So that one that has not begun to connect need not; and one let try after it may."""
    backoff = Backoff()
    assert not backoff.failed_since(0)
    backoff.failed(5 * MS, 10 * MS, "down")
    assert backoff.failed_since(5 * MS)
    assert backoff.failed_since(10 * MS)
    assert not backoff.failed_since(10 * MS + 1)
    backoff.succeeded()
    assert not backoff.failed_since(5 * MS)


def test_a_success_forgets_all_failures() -> None:
    """Anyone may try at once, and the next failure has the first pause again."""
    backoff = Backoff()
    for number in range(1, 8):
        backoff.failed(number * MS, number * MS, "down")
    backoff.succeeded()
    assert all(backoff.may_try(8 * MS) for _ in range(3))
    backoff.failed(9 * MS, 9 * MS, "down")
    assert not backoff.may_try(9 * MS + FIRST_NS - 1)
    assert backoff.may_try(9 * MS + FIRST_NS)


def test_a_fleet_does_not_knock_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses differ at random, by up to half."""
    monkeypatch.setattr(module, "random", lambda: 0.0)
    backoff = Backoff()
    backoff.failed(0, 0, "down")
    assert not backoff.may_try(FIRST_NS // 2 - 1)
    assert backoff.may_try(FIRST_NS // 2)
