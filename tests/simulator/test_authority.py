"""The simulated authority: what it charges is noted, and a failover forgets it."""

from __future__ import annotations

from ratekeeper.core.errors import StoreError, StoreUnavailable
from ratekeeper.core.model import Limit
from ratekeeper.core.steps import Call
from ratekeeper.decide.leasing import LeaseCheck, LeaseTerms
from tests.simulator.authority import SimulatedAuthority
from tests.simulator.checkers import NeverOver
from tests.simulator.network import NS_PER_MS, EventLoop

LIMITS = (Limit(10, per=60, algorithm="fixed_window"),)


def _authority() -> tuple[EventLoop, SimulatedAuthority, NeverOver]:
    loop, never_over = EventLoop(), NeverOver(LIMITS)
    return loop, SimulatedAuthority(loop, LIMITS, never_over), never_over


def test_admissions_are_counted_when_the_authority_charges_them() -> None:
    """Checks and leases are noted with the request's cost; a denial and an error are not."""
    _, authority, never_over = _authority()
    counter = authority.counter
    assert authority.carry_out(Call(counter.check, "a", 4), 0).allowed
    check = LeaseCheck(counter, "a", 1, LeaseTerms(2, 1, 10**9))
    [(decision, lease)] = authority.carry_out(Call(authority.store.lease, [check]), 1)
    assert (decision.allowed, lease.units) == (True, 2)
    assert not authority.carry_out(Call(counter.check, "a", 9), 0).allowed
    never_over.admitted("a", 5, EventLoop().now, "a test")
    assert not never_over.violations
    never_over.admitted("a", 1, EventLoop().now, "a test")
    assert never_over.over == {"a": 1}


def test_an_error_of_the_store_is_the_answer() -> None:
    """A node gets the error instead of a result."""
    _, authority, _ = _authority()

    def fail() -> None:
        raise StoreUnavailable("closed")

    assert isinstance(authority.carry_out(Call(fail), 0), StoreError)


def test_a_failover_forgets_the_last_writes_and_no_others() -> None:
    """Units that were charged before the lag stay; those after it are gone, and are noted."""
    loop, authority, never_over = _authority()
    counter = authority.counter
    authority.carry_out(Call(counter.check, "a", 4), 0)
    authority.fail_over_after(NS_PER_MS)
    authority.carry_out(Call(counter.check, "a", 3), 0)
    assert counter.peek("a", 0).remaining == 3
    loop.run_until(loop.now + NS_PER_MS)
    assert counter.peek("a", 0).remaining == 6
    authority.carry_out(Call(counter.check, "a", 6), 0)
    assert not never_over.violations
