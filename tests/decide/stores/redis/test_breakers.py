"""The circuit breaker at explicit times: what opens it, for how long, and what closes it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.decide.stores.redis.breakers import (
    JITTER,
    BreakerSettings,
    CircuitBreaker,
    settings_of,
)
from ratekeeper.decide.stores.redis.config import parse

MS = 1_000_000
SETTINGS = BreakerSettings(
    window_ns=10_000 * MS,
    failures=5,
    share=0.5,
    open_ns=1_000 * MS,
    open_max_ns=15_000 * MS,
    probes=2,
)


def made(settings: BreakerSettings = SETTINGS, random: float = 0.5) -> CircuitBreaker:
    """Return a closed breaker; by default its random part is zero."""
    return CircuitBreaker(settings, 0, lambda: random)


def fail(breaker: CircuitBreaker, *moments_ms: int, count: int = 1) -> list[bool]:
    """Fail calls that begin at these times; return whether each opened the breaker."""
    return [breaker.failed(ms * MS, ms * MS, count) for ms in moments_ms]


def opened_at_ms(ms: int = 5) -> CircuitBreaker:
    """Return a breaker that opened at this time."""
    breaker = made()
    fail(breaker, *range(ms - 4, ms + 1))
    assert breaker.position == "open"
    return breaker


def test_a_new_breaker_is_closed_and_counts_nothing() -> None:
    """Successes before the first failure are not counted."""
    breaker = made()
    assert (breaker.position, breaker.counting, breaker.failures) == ("closed", False, 0)
    breaker.succeeded(5 * MS, 1_000)
    assert not breaker.counting


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
def test_enough_failures_in_the_window_open_the_breaker(
    successes: int, failures_ms: Sequence[int], opens: bool
) -> None:
    """Five failures, and half of the calls since the first of them."""
    breaker = made()
    fail(breaker, failures_ms[0])
    breaker.succeeded(failures_ms[0] * MS, successes)
    found = fail(breaker, *failures_ms[1:])
    assert found == [False] * (len(found) - 1) + [opens]
    assert breaker.position == ("open" if opens else "closed")
    assert breaker.opened_times == int(opens)


def test_calls_that_fail_together_are_one_moment() -> None:
    """A thousand calls that began before the first failure count as one moment."""
    breaker = made()
    assert not breaker.failed(0 * MS, 50 * MS, 1_000)
    assert not any(breaker.failed(began * MS, (began + 50) * MS, 10) for began in range(1, 50))
    # A call that began after 50 ms is the second moment, one after 101 ms the third.
    assert not breaker.failed(51 * MS, 101 * MS)
    assert not breaker.failed(52 * MS, 102 * MS)
    assert breaker.failed(102 * MS, 152 * MS)


@pytest.mark.parametrize("successes_between", [1, 1_000_000])
@pytest.mark.parametrize("pause_ms", [1, 500, 4_000, 9_900])
def test_a_server_that_hangs_after_a_blip_opens_the_breaker_as_fast_as_any(
    successes_between: int, pause_ms: int
) -> None:
    """The fifth failure in a row opens it at the latest, whatever the server did before."""
    breaker = made()
    assert not breaker.failed(0, 50 * MS, 40)
    breaker.succeeded(90 * MS, successes_between)
    breaker.succeeded((90 + pause_ms) * MS, successes_between)
    hangs_ms = 100 + pause_ms
    fail(breaker, *range(hangs_ms, hangs_ms + 250, 50))
    assert breaker.position == "open"


def test_one_failure_opens_the_breaker_if_the_settings_say_so() -> None:
    """It needs no more moments than failures."""
    breaker = made(BreakerSettings(failures=1))
    assert breaker.failed(0, 1)


def test_counting_stops_when_the_failures_have_left_the_window() -> None:
    """Without failures in the window, the breaker counts no successes."""
    breaker = made()
    fail(breaker, 1, 2)
    breaker.succeeded(5_000 * MS)
    assert breaker.counting
    breaker.succeeded(10_100 * MS)
    assert (breaker.counting, breaker.failures) == (False, 0)


@pytest.mark.parametrize("away_s", [0, 3, 60, 86_400])
@pytest.mark.parametrize("random", [0.0, 0.5, 1.0])
def test_a_server_is_in_use_within_five_seconds_of_its_return(away_s: int, random: float) -> None:
    """By default, however long it was away, and if each probe takes until its timeout."""
    config = parse("redis://localhost")
    breaker = CircuitBreaker(settings_of(config), 0, lambda: random)
    now_ns = 0
    while breaker.position == "closed":
        now_ns += config.deadline_ns
        breaker.failed(now_ns - 1, now_ns)
    back_ns = now_ns + away_s * NS_PER_SECOND
    while breaker.position != "closed":
        began_ns = breaker.probe_ns
        assert began_ns - now_ns <= 5 * NS_PER_SECOND
        if began_ns < back_ns:
            now_ns = began_ns + config.connect_ns
            breaker.probe_failed(now_ns)
        else:
            now_ns = began_ns + config.deadline_ns
            breaker.probe_succeeded(now_ns)
    assert now_ns - back_ns <= 5 * NS_PER_SECOND


def test_a_server_fails_from_the_first_failure_to_the_next_success() -> None:
    """However few calls there are: nothing is known of the time between them."""
    breaker = made()
    assert breaker.failing_since_ns is None
    breaker.failed(1, 2)
    breaker.failed(3_600 * NS_PER_SECOND, 3_601 * NS_PER_SECOND)
    assert (breaker.position, breaker.failing_since_ns) == ("closed", 2)
    breaker.succeeded(3_602 * NS_PER_SECOND)
    assert breaker.failing_since_ns is None
    now_ns = 3_700 * NS_PER_SECOND
    while breaker.position == "closed":
        now_ns += 1
        breaker.failed(now_ns - 1, now_ns)
    assert breaker.failing_since_ns == 3_700 * NS_PER_SECOND + 1
    for _ in range(2):
        assert breaker.failing_since_ns is not None
        breaker.probe_succeeded(now_ns)
    assert breaker.failing_since_ns is None


def test_each_failed_probe_doubles_the_open_time() -> None:
    """The open time is 1 s, 2 s, 4 s and so on, up to 15 s."""
    breaker = opened_at_ms(5)
    now_ms, pauses_ms = 5, []
    for _ in range(7):
        pauses_ms.append(breaker.probe_ns // MS - now_ms)
        now_ms = breaker.probe_ns // MS
        breaker.probe_failed(now_ms * MS)
    assert pauses_ms == [1_000, 2_000, 4_000, 8_000, 15_000, 15_000, 15_000]
    assert breaker.opened_times == 1


@pytest.mark.parametrize(("random", "share"), [(0.0, 1 - JITTER), (0.5, 1.0), (1.0, 1 + JITTER)])
def test_the_open_time_is_partly_random(random: float, share: float) -> None:
    """A random part keeps the nodes of a fleet from probing in step."""
    breaker = made(random=random)
    fail(breaker, 1, 2, 3, 4, 5)
    assert breaker.probe_ns == 5 * MS + int(1_000 * MS * share)


def test_successful_probes_close_the_breaker() -> None:
    """The first probe makes it half open; the second follows soon and closes it."""
    breaker = opened_at_ms(5)
    breaker.probe_succeeded(1_010 * MS)
    assert (breaker.position, breaker.since_ns) == ("half_open", 1_010 * MS)
    assert breaker.probe_ns == 1_110 * MS
    breaker.probe_succeeded(1_111 * MS)
    assert (breaker.position, breaker.since_ns) == ("closed", 1_111 * MS)
    assert (breaker.counting, breaker.failures, breaker.opened_times) == (False, 0, 1)


def test_a_failed_probe_reopens_a_half_open_breaker() -> None:
    """The breaker opens for twice as long; earlier successful probes do not count."""
    breaker = opened_at_ms(5)
    breaker.probe_succeeded(1_000 * MS)
    breaker.probe_failed(1_100 * MS)
    assert (breaker.position, breaker.probe_ns) == ("open", 3_100 * MS)
    breaker.probe_succeeded(3_100 * MS)
    assert breaker.position == "half_open"


def test_a_breaker_that_closed_starts_again() -> None:
    """Old failures do not count, and the open time is the first one again."""
    breaker = opened_at_ms(5)
    breaker.probe_failed(1_005 * MS)
    for _ in range(2):
        breaker.probe_succeeded(3_005 * MS)
    assert fail(breaker, 3_010, 3_011, 3_012, 3_013, 3_014) == [False] * 4 + [True]
    assert breaker.probe_ns == 4_014 * MS
    assert breaker.opened_times == 2


def test_calls_that_end_while_the_breaker_is_open_change_nothing() -> None:
    """The breaker ignores calls that began before it opened."""
    breaker = opened_at_ms(5)
    before = breaker.probe_ns
    assert fail(breaker, 6, 7, 8, 9, 10, 11) == [False] * 6
    breaker.succeeded(12 * MS, 100)
    assert (breaker.position, breaker.probe_ns) == ("open", before)


def test_forget_closes_the_breaker() -> None:
    """It forgets all failures, but not how often it opened."""
    breaker = opened_at_ms(5)
    breaker.forget(50 * MS)
    assert (breaker.position, breaker.counting, breaker.opened_times) == ("closed", False, 1)
    for step in (breaker.probe_failed, breaker.probe_succeeded, breaker.forget):
        step(60 * MS)
    assert (breaker.position, breaker.since_ns) == ("closed", 50 * MS)


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
def test_the_invariants_hold_for_any_events(
    events: Sequence[tuple[str, int, int, int]], random: float
) -> None:
    """Only enough failures open it; while it is open, a probe is due within the bounds."""
    breaker = made(random=random)
    now_ns, recent = 0, list[tuple[int, int]]()
    for name, pause_ms, count, age_ms in events:
        now_ns += pause_ms * MS
        before, opened_times = breaker.position, breaker.opened_times
        match name:
            case "failed":
                recent.append((now_ns, count))
                breaker.failed(now_ns - age_ms * MS, now_ns, count)
            case "succeeded":
                breaker.succeeded(now_ns, count)
            case _:
                getattr(breaker, name)(now_ns)
        if breaker.opened_times > opened_times:
            assert (before, name, breaker.position) == ("closed", "failed", "open")
            within = [each for at_ns, each in recent if now_ns - at_ns < SETTINGS.window_ns]
            assert sum(within) >= SETTINGS.failures
            assert len(within) >= 3
        if breaker.position == "closed":
            if before != "closed":
                assert name in {"probe_succeeded", "forget"}
                recent.clear()
        else:
            assert breaker.counting
            if breaker.position != before:
                assert now_ns < breaker.probe_ns <= now_ns + SETTINGS.open_max_ns * (1 + JITTER)
