"""The breaker's states at explicit times: what opens it, how long for, and what closes it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper.decide.breaker import JITTER, Breaker, BreakerSettings

MS = 1_000_000
SETTINGS = BreakerSettings(
    window_ns=10_000 * MS,
    failures=5,
    share=0.5,
    open_ns=1_000 * MS,
    open_max_ns=15_000 * MS,
    probes=2,
)


def made(settings: BreakerSettings = SETTINGS, random: float = 0.5) -> Breaker:
    """With jitter in the middle, where it is none."""
    return Breaker(settings, 0, lambda: random)


def fail(breaker: Breaker, *moments_ms: int, count: int = 1) -> list[bool]:
    """Calls that begin and fail at these times: did each open it?"""
    return [breaker.failed(ms * MS, ms * MS, count) for ms in moments_ms]


def opened_at_ms(ms: int = 5) -> Breaker:
    """One that opened then."""
    breaker = made()
    fail(breaker, *range(ms - 4, ms + 1))
    assert breaker.state == "open"
    return breaker


def test_it_is_closed_at_first_and_has_nothing_to_count() -> None:
    """A success of a healthy server need not be told."""
    breaker = made()
    assert (breaker.state, breaker.stirred, breaker.failures) == ("closed", False, 0)
    breaker.succeeded(5 * MS, 1_000)
    assert not breaker.stirred


@pytest.mark.parametrize(
    ("successes", "failures_ms", "opens"),
    [
        (0, (1, 2, 3, 4), False),
        (0, (1, 2, 3, 4, 5), True),
        (5, (1, 2, 3, 4, 5), True),
        (6, (1, 2, 3, 4, 5), False),
        (6, (1, 2, 3, 4, 5, 6), True),
        (0, (1, 2, 3, 4, 9_999), True),
        (0, (1, 2, 3, 4, 10_001), False),
        (0, (1, 6_000, 11_000, 16_000, 21_000, 26_000), False),
    ],
)
def test_enough_failures_in_the_window_open_it(
    successes: int, failures_ms: Sequence[int], opens: bool
) -> None:
    """Five, and half of the calls since the first of them."""
    breaker = made()
    fail(breaker, failures_ms[0])
    breaker.succeeded(failures_ms[0] * MS, successes)
    found = fail(breaker, *failures_ms[1:])
    assert found == [False] * (len(found) - 1) + [opens]
    assert breaker.state == ("open" if opens else "closed")
    assert breaker.opened_times == int(opens)


def test_calls_that_fail_together_are_one_moment() -> None:
    """A thousand that began before the first failure was seen: a pause, a slow start, no more."""
    breaker = made()
    assert not breaker.failed(0 * MS, 50 * MS, 1_000)
    assert not any(breaker.failed(began * MS, (began + 50) * MS, 10) for began in range(1, 50))
    # Begun after 50 ms: the second moment; after 101 ms: the third.
    assert not breaker.failed(51 * MS, 101 * MS)
    assert not breaker.failed(52 * MS, 102 * MS)
    assert breaker.failed(102 * MS, 152 * MS)


def test_one_failure_opens_it_if_one_is_asked_for() -> None:
    """Moments are not asked for beyond the failures."""
    breaker = made(BreakerSettings(failures=1))
    assert breaker.failed(0, 1)


def test_it_is_calm_again_once_the_failures_have_left_the_window() -> None:
    """Then a success costs nothing to count again."""
    breaker = made()
    fail(breaker, 1, 2)
    breaker.succeeded(5_000 * MS)
    assert breaker.stirred
    breaker.succeeded(10_100 * MS)
    assert (breaker.stirred, breaker.failures) == (False, 0)


def test_it_opens_for_twice_as_long_each_time() -> None:
    """1 s, 2 s, 4 s and so on to 15 s."""
    breaker = opened_at_ms(5)
    now_ms, pauses_ms = 5, []
    for _ in range(7):
        pauses_ms.append(breaker.probe_ns // MS - now_ms)
        now_ms = breaker.probe_ns // MS
        breaker.probe_failed(now_ms * MS)
    assert pauses_ms == [1_000, 2_000, 4_000, 8_000, 15_000, 15_000, 15_000]
    assert breaker.opened_times == 1


@pytest.mark.parametrize(("random", "share"), [(0.0, 1 - JITTER), (0.5, 1.0), (1.0, 1 + JITTER)])
def test_how_long_is_a_little_at_random(random: float, share: float) -> None:
    """A fleet does not probe in step."""
    breaker = made(random=random)
    fail(breaker, 1, 2, 3, 4, 5)
    assert breaker.probe_ns == 5 * MS + int(1_000 * MS * share)


def test_probes_close_it() -> None:
    """The first makes it half open, the second follows soon and closes it."""
    breaker = opened_at_ms(5)
    breaker.probe_succeeded(1_010 * MS)
    assert (breaker.state, breaker.since_ns) == ("half_open", 1_010 * MS)
    assert breaker.probe_ns == 1_110 * MS
    breaker.probe_succeeded(1_111 * MS)
    assert (breaker.state, breaker.since_ns) == ("closed", 1_111 * MS)
    assert (breaker.stirred, breaker.failures, breaker.opened_times) == (False, 0, 1)


def test_a_probe_that_fails_half_open_opens_it_again() -> None:
    """For longer; and successes before it do not count."""
    breaker = opened_at_ms(5)
    breaker.probe_succeeded(1_000 * MS)
    breaker.probe_failed(1_100 * MS)
    assert (breaker.state, breaker.probe_ns) == ("open", 3_100 * MS)
    breaker.probe_succeeded(3_100 * MS)
    assert breaker.state == "half_open"


def test_after_it_closed_it_takes_as_much_as_the_first_time() -> None:
    """Old failures do not count, and the open time is the first again."""
    breaker = opened_at_ms(5)
    breaker.probe_failed(1_005 * MS)
    for _ in range(2):
        breaker.probe_succeeded(3_005 * MS)
    assert fail(breaker, 3_010, 3_011, 3_012, 3_013, 3_014) == [False] * 4 + [True]
    assert breaker.probe_ns == 4_014 * MS
    assert breaker.opened_times == 2


def test_calls_that_end_late_change_nothing_while_it_is_open() -> None:
    """They began before it opened."""
    breaker = opened_at_ms(5)
    before = breaker.probe_ns
    assert fail(breaker, 6, 7, 8, 9, 10, 11) == [False] * 6
    breaker.succeeded(12 * MS, 100)
    assert (breaker.state, breaker.probe_ns) == ("open", before)


def test_a_server_that_is_not_asked_any_more_is_forgotten() -> None:
    """Closed, as if nothing had happened; how often it opened is still told."""
    breaker = opened_at_ms(5)
    breaker.forget(50 * MS)
    assert (breaker.state, breaker.stirred, breaker.opened_times) == ("closed", False, 1)
    for step in (breaker.probe_failed, breaker.probe_succeeded, breaker.forget):
        step(60 * MS)
    assert (breaker.state, breaker.since_ns) == ("closed", 50 * MS)


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["failed", "succeeded", "probe_failed", "probe_succeeded", "forget"]),
        st.integers(0, 3_000),
        st.integers(1, 20),
        st.integers(0, 200),
    ),
    max_size=80,
)


@given(_EVENTS, st.floats(0, 1))
def test_what_holds_whatever_happens(
    events: Sequence[tuple[str, int, int, int]], random: float
) -> None:
    """It opens only by a failure that is one of enough; while open a probe is due, in bounds."""
    breaker = made(random=random)
    now_ns, recent = 0, list[tuple[int, int]]()
    for name, pause_ms, count, age_ms in events:
        now_ns += pause_ms * MS
        before, opened_times = breaker.state, breaker.opened_times
        match name:
            case "failed":
                recent.append((now_ns, count))
                breaker.failed(now_ns - age_ms * MS, now_ns, count)
            case "succeeded":
                breaker.succeeded(now_ns, count)
            case _:
                getattr(breaker, name)(now_ns)
        if breaker.opened_times > opened_times:
            assert (before, name, breaker.state) == ("closed", "failed", "open")
            within = [each for at_ns, each in recent if now_ns - at_ns < SETTINGS.window_ns]
            assert sum(within) >= SETTINGS.failures
            assert len(within) >= 3
        if breaker.state == "closed":
            if before != "closed":
                assert name in {"probe_succeeded", "forget"}
                recent.clear()
        else:
            assert breaker.stirred
            if breaker.state != before:
                assert now_ns < breaker.probe_ns <= now_ns + SETTINGS.open_max_ns * (1 + JITTER)
