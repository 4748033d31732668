"""The circuit breaker at explicit times: what opens it, for how long, and what closes it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.decide.store import BreakerPosition
from ratekeeper.decide.stores.redis.breakers import JITTER, ServerBreaker
from ratekeeper.decide.stores.redis.config import Address, parse

MS = 1_000_000
OPTIONS = {"breaker_open_ms": 1_000, "breaker_open_max_ms": 15_000}
WINDOW_NS, FAILURES = 10_000 * MS, 5


class Breaker(ServerBreaker):
    """A breaker whose time is set; by default its random part is zero."""

    def __init__(self, random: float = 0.5, **options: object) -> None:
        self.now = 0
        self.changes: list[BreakerPosition] = []
        config = parse("redis://h", **{**OPTIONS, **options})
        super().__init__(
            Address("h", 1),
            config,
            lambda each: self.changes.append(each.state().state),
            now_ns=lambda: self.now,
            random=lambda: random,
        )

    @property
    def position(self) -> BreakerPosition:
        return self.state().state

    @property
    def since_ms(self) -> int:
        return self._since_ns // MS

    @property
    def due_ms(self) -> int:
        due_ns = self.due_ns()
        assert due_ns is not None
        return due_ns // MS

    def at(self, ms: int) -> Breaker:
        """Set the time."""
        self.now = ms * MS
        return self

    def fail(self, began_ns: int, now_ns: int, count: int = 1) -> bool:
        """Fail calls; return whether that opened the breaker."""
        self.now, before = now_ns, self.open
        self.failed("dead", began_ns, count)
        return self.open and not before


def fail(breaker: Breaker, *moments_ms: int) -> list[bool]:
    """Fail calls that begin at these times; return whether each opened the breaker."""
    return [breaker.fail(ms * MS, ms * MS) for ms in moments_ms]


def opened_at_ms(ms: int = 5) -> Breaker:
    """Return a breaker that opened at this time."""
    breaker = Breaker()
    fail(breaker, *range(ms - 4, ms + 1))
    assert breaker.position == "open"
    return breaker


def test_a_new_breaker_is_closed_and_counts_nothing() -> None:
    """Successes before the first failure are not counted."""
    breaker = Breaker()
    breaker.succeeded(1_000)
    assert (breaker.position, breaker.counting, breaker.state().failures) == ("closed", False, 0)


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
    breaker = Breaker()
    fail(breaker, failures_ms[0])
    breaker.succeeded(successes)
    found = fail(breaker, *failures_ms[1:])
    assert found == [False] * (len(found) - 1) + [opens]
    assert breaker.position == ("open" if opens else "closed")
    assert breaker.state().opened_times == int(opens)


def test_calls_that_fail_together_are_one_moment() -> None:
    """A thousand calls that began before the first failure count as one moment."""
    breaker = Breaker()
    assert not breaker.fail(0 * MS, 50 * MS, 1_000)
    assert not any(breaker.fail(began * MS, (began + 50) * MS, 10) for began in range(1, 50))
    # A call that began after 50 ms is the second moment, one after 101 ms the third.
    assert not breaker.fail(51 * MS, 101 * MS)
    assert not breaker.fail(52 * MS, 102 * MS)
    assert breaker.fail(102 * MS, 152 * MS)


@pytest.mark.parametrize("successes_between", [1, 1_000_000])
@pytest.mark.parametrize("pause_ms", [1, 500, 4_000, 9_900])
def test_a_server_that_hangs_after_a_blip_opens_the_breaker_as_fast_as_any(
    successes_between: int, pause_ms: int
) -> None:
    """The fifth failure in a row opens it at the latest, whatever the server did before."""
    breaker = Breaker()
    assert not breaker.fail(0, 50 * MS, 40)
    breaker.at(90).succeeded(successes_between)
    breaker.at(90 + pause_ms).succeeded(successes_between)
    hangs_ms = 100 + pause_ms
    fail(breaker, *range(hangs_ms, hangs_ms + 250, 50))
    assert breaker.position == "open"


def test_one_failure_opens_the_breaker_if_the_settings_say_so() -> None:
    """It needs no more moments than failures."""
    assert Breaker(breaker_failures=1).fail(0, 1)


def test_a_breaker_that_is_turned_off_never_opens() -> None:
    """It counts failures all the same."""
    breaker = Breaker(breaker=False)
    assert not any(fail(breaker, *range(1, 100)))
    assert (breaker.failing, breaker.state().failed_calls) == (True, 99)


def test_counting_stops_when_the_window_has_ended() -> None:
    """Without failures in the window, the breaker counts no successes."""
    breaker = Breaker()
    fail(breaker, 1, 2)
    breaker.at(5_000).succeeded()
    assert breaker.counting
    breaker.at(10_100).succeeded()
    assert (breaker.counting, breaker.state().failures) == (False, 0)


@pytest.mark.parametrize("away_s", [0, 3, 60, 86_400])
@pytest.mark.parametrize("random", [0.0, 0.5, 1.0])
def test_a_server_is_in_use_within_five_seconds_of_its_return(away_s: int, random: float) -> None:
    """By default, however long it was away, and if each probe takes until its timeout."""
    config = parse("redis://localhost")
    now_ns = 0
    breaker = ServerBreaker(Address("h", 1), config, now_ns=lambda: now_ns, random=lambda: random)
    while not breaker.open:
        now_ns += config.deadline_ns
        breaker.failed("dead", now_ns - 1)
    back_ns = now_ns + away_s * NS_PER_SECOND
    while (began_ns := breaker.due_ns()) is not None:
        assert began_ns - now_ns <= 5 * NS_PER_SECOND
        if began_ns < back_ns:
            now_ns = began_ns + config.connect_ns
            breaker.probe_failed("dead")
        else:
            now_ns = began_ns + config.deadline_ns
            breaker.probe_succeeded()
    assert now_ns - back_ns <= 5 * NS_PER_SECOND


def test_a_server_fails_from_the_first_failure_to_the_next_success() -> None:
    """However few calls there are: nothing is known of the time between them."""
    breaker = Breaker()
    fail(breaker, 1_000, 3_601_000)
    assert (breaker.position, breaker.state().failing_s) == ("closed", 3_600.0)
    breaker.succeeded()
    assert breaker.state().failing_s == 0.0
    fail(breaker, *range(3_700_000, 3_700_005))
    assert breaker.at(3_701_000).state().failing_s == 1.0
    for _ in range(2):
        assert breaker.state().failing_s
        breaker.probe_succeeded()
    assert breaker.state().failing_s == 0.0


def test_each_failed_probe_doubles_the_open_time() -> None:
    """The open time is 1 s, 2 s, 4 s and so on, up to 15 s."""
    breaker = opened_at_ms(5)
    now_ms, pauses_ms = 5, []
    for _ in range(7):
        pauses_ms.append(breaker.due_ms - now_ms)
        now_ms = breaker.due_ms
        breaker.at(now_ms).probe_failed("dead")
    assert pauses_ms == [1_000, 2_000, 4_000, 8_000, 15_000, 15_000, 15_000]
    assert breaker.changes == ["open"]


@pytest.mark.parametrize(("random", "share"), [(0.0, 1 - JITTER), (0.5, 1.0), (1.0, 1 + JITTER)])
def test_the_open_time_is_partly_random(random: float, share: float) -> None:
    """A random part keeps the nodes of a fleet from probing in step."""
    breaker = Breaker(random)
    fail(breaker, 1, 2, 3, 4, 5)
    assert breaker.due_ns() == 5 * MS + int(1_000 * MS * share)


def test_successful_probes_close_the_breaker() -> None:
    """The first probe makes it half open; the second follows soon and closes it."""
    breaker = opened_at_ms(5)
    breaker.at(1_010).probe_succeeded()
    assert (breaker.position, breaker.since_ms, breaker.due_ms) == ("half_open", 1_010, 1_110)
    breaker.at(1_111).probe_succeeded()
    assert (breaker.position, breaker.since_ms, breaker.counting) == ("closed", 1_111, False)
    assert breaker.changes == ["open", "half_open", "closed"]
    # Old failures do not count.
    assert fail(breaker, 3_010, 3_011, 3_012, 3_013, 3_014) == [False] * 4 + [True]
    assert breaker.state().opened_times == 2


def test_a_server_that_fails_soon_after_its_probes_rests_longer() -> None:
    """An overloaded server answers probes. After a quiet window, the open time is the first one."""
    breaker, now_ms, pauses_ms = opened_at_ms(5), 5, []
    for quiet_ms in (0, 0, 9_000, 10_000):
        pauses_ms.append(breaker.due_ms - now_ms)
        for _ in range(2):
            breaker.at(breaker.due_ms).probe_succeeded()
        now_ms = breaker.now // MS + quiet_ms + 5
        fail(breaker, *range(now_ms - 4, now_ms + 1))
    assert [*pauses_ms, breaker.due_ms - now_ms] == [1_000, 2_000, 4_000, 8_000, 1_000]


def test_a_failed_probe_reopens_a_half_open_breaker() -> None:
    """The breaker opens for twice as long; earlier successful probes do not count."""
    breaker = opened_at_ms(5)
    breaker.at(1_000).probe_succeeded()
    breaker.at(1_100).probe_failed("dead")
    assert (breaker.position, breaker.due_ms) == ("open", 3_100)
    breaker.at(3_100).probe_succeeded()
    assert breaker.position == "half_open"


def test_calls_that_end_while_the_breaker_is_open_change_nothing() -> None:
    """The breaker ignores calls that began before it opened."""
    breaker = opened_at_ms(5)
    before = breaker.due_ns()
    assert fail(breaker, 6, 7, 8, 9, 10, 11) == [False] * 6
    breaker.succeeded(100)
    assert (breaker.position, breaker.due_ns()) == ("open", before)


def test_forget_closes_the_breaker() -> None:
    """It forgets all failures, but not how often it opened."""
    breaker = opened_at_ms(5)
    breaker.at(50).forget()
    assert (breaker.position, breaker.counting) == ("closed", False)
    breaker.at(60).probe_failed("dead")
    breaker.probe_succeeded()
    assert (breaker.position, breaker.since_ms, breaker.changes) == (
        "closed",
        50,
        ["open", "closed"],
    )


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
    breaker = Breaker(random)
    recent = list[tuple[int, int]]()
    for name, pause_ms, count, age_ms in events:
        breaker.now += pause_ms * MS
        now_ns, before = breaker.now, breaker.position
        match name:
            case "failed":
                recent.append((now_ns, count))
                if breaker.fail(now_ns - age_ms * MS, now_ns, count):
                    within = [each for at_ns, each in recent if now_ns - at_ns < WINDOW_NS]
                    assert sum(within) >= FAILURES
                    assert len(within) >= 3
            case "succeeded":
                breaker.succeeded(count)
            case "probe_failed":
                breaker.probe_failed("dead")
            case _:
                getattr(breaker, name)()
        if (due_ns := breaker.due_ns()) is None:
            if before != "closed":
                assert name in {"probe_succeeded", "forget"}
                recent.clear()
        else:
            assert before != "closed" or name == "failed"
            if breaker.position != before:
                assert now_ns < due_ns <= now_ns + 15_000 * MS * (1 + JITTER)
