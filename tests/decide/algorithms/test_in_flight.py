"""Requests in flight, on the pure functions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import Limit
from ratekeeper.decide.algorithms.in_flight import RETRY_MIN_NS, InFlight, State

SECOND = 10**9
TWO = Limit(2, per=60, algorithm="in_flight")


def taken(*stamps: int, at_ns: int = 0, limit: Limit = TWO) -> State:
    """Return the state after requests with these stamps have taken slots."""
    state: State = None
    for stamp in stamps:
        state, outcome = InFlight(stamp).decide(state, limit, at_ns, 1)
        assert outcome.allowed
    return state


def test_a_slot_is_taken_until_it_is_freed() -> None:
    """The third request is denied; when another one has ended, it passes."""
    state = taken(1, 2)
    after, outcome = InFlight(3).decide(state, TWO, 1, 1)
    assert (after, outcome.allowed, outcome.remaining) == (state, False, 0)
    state = InFlight(1).refund(state, TWO, 2, 1, None)
    assert InFlight(3).decide(state, TWO, 3, 1)[1] == (True, 0, 0, 60 * SECOND, 0, 3)


def test_a_slot_ends_by_itself_after_the_longest_time() -> None:
    """The slot of a client that died is free again, at its end and not before."""
    state = taken(1, 2)
    assert not InFlight(3).decide(state, TWO, 60 * SECOND - 1, 1)[1].allowed
    assert InFlight(3).decide(state, TWO, 60 * SECOND, 1)[1].allowed


def test_the_same_stamp_takes_one_slot() -> None:
    """A check that is repeated, because its reply was lost, renews the slot that it has."""
    state = taken(1, 2, 2, 2)
    state, outcome = InFlight(2).decide(state, TWO, 30 * SECOND, 1)
    assert (outcome.allowed, outcome.remaining) == (True, 0)
    assert InFlight().decide(state, TWO, 60 * SECOND, 0)[1].remaining == 1
    assert InFlight().decide(state, TWO, 90 * SECOND, 0)[1].remaining == 2


def test_freeing_again_frees_no_other_slot() -> None:
    """Neither does a stamp that has no slot."""
    state = taken(1, 2)
    for stamp in (1, 1, 1, 7):
        state = InFlight(stamp).refund(state, TWO, 1, 1, None)
    assert InFlight().decide(state, TWO, 2, 0)[1].remaining == 1
    assert InFlight(2).refund(state, TWO, 3, 1, None) is None


def test_a_request_takes_one_slot_whatever_its_cost() -> None:
    """A cost of 0, or a check without a stamp, takes none."""
    state, outcome = InFlight(1).decide(None, TWO, 0, 1_000)
    assert (outcome.allowed, outcome.remaining) == (True, 1)
    for stamp, cost in ((2, 0), (0, 1)):
        after, outcome = InFlight(stamp).decide(state, TWO, 0, cost)
        assert (after, outcome.allowed, outcome.charged_ns) == (state, True, None)


def test_a_waiting_client_asks_a_few_times() -> None:
    """Each guess is about as long as the wait so far, up to the first slot's own end."""
    state, now_ns, asked = taken(1, 2), 0, 0
    while True:
        _, outcome = InFlight(3).decide(state, TWO, now_ns, 1)
        if outcome.allowed:
            break
        assert (
            RETRY_MIN_NS <= outcome.retry_after_ns <= 60 * SECOND - now_ns or now_ns > 59 * SECOND
        )
        now_ns, asked = now_ns + outcome.retry_after_ns, asked + 1
    assert now_ns == 60 * SECOND
    assert asked < 20


def test_time_never_rewinds() -> None:
    """An earlier time counts as the time at which the last slot was taken."""
    state = taken(1, at_ns=50 * SECOND)
    _, outcome = InFlight(2).decide(state, TWO, 0, 1)
    assert (outcome.charged_ns, outcome.reset_after_ns) == (50 * SECOND, 110 * SECOND)


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from(("take", "free")), st.integers(0, 30)),
        max_size=60,
    ),
    limit=st.integers(1, 4),
)
def test_never_over(steps: list[tuple[int, str, int]], limit: int) -> None:
    """At no instant are more requests in flight than the limit, and `remaining` says how many may
    still come."""
    at_once = Limit(limit, per=60, algorithm="in_flight")
    state: State = None
    now_ns, ends = 0, dict[int, int]()
    for stamp, verb, seconds in steps:
        now_ns += seconds * SECOND
        ends = {each: end for each, end in ends.items() if end > now_ns}
        before = InFlight().decide(state, at_once, now_ns, 0)[1].remaining
        assert before == limit - len(ends)
        if verb == "free":
            state = InFlight(stamp).refund(state, at_once, now_ns, 0, None)
            ends.pop(stamp, None)
            continue
        state, outcome = InFlight(stamp).decide(state, at_once, now_ns, 1)
        assert outcome.allowed is (before > 0 or stamp in ends)
        if outcome.allowed:
            ends[stamp] = now_ns + 60 * SECOND
        assert len(ends) <= limit
