"""One pass of each verb over each way to reach Redis: asyncio, a password, TLS, Sentinel.

The scripts are the same ones that the rest of the suite tests on a plain server and on a Cluster;
these tests show that the connection delivers every verb to them.
"""

from __future__ import annotations

import pytest

from ratekeeper import CapacityError, Limit, Limiter
from ratekeeper.core.model import AlgorithmName
from ratekeeper.decide.store import LocalStore
from tests.clocks import SteppedClock
from tests.conformance.stores import OpenStore, connections, every_algorithm

pytestmark = connections


@every_algorithm
def test_each_verb(algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock) -> None:
    """Check, peek, refund, grant and reset give the decisions of the plain server."""
    limiter = Limiter(Limit(5, per=10, algorithm=algorithm), store=store, clock=clock, name="r")
    assert [limiter.check("k").remaining for _ in range(5)] == [4, 3, 2, 1, 0]
    denied = limiter.check("k")
    assert (denied.allowed, denied.rule, denied.degraded) == (False, "r", False)
    assert denied == limiter.peek("k")
    limiter.refund("k", 2)
    assert limiter.peek("k").remaining == 2
    limiter.grant("k", 3)
    assert limiter.check("k", 4).remaining == 1
    with pytest.raises(CapacityError):
        limiter.check("k", 9)
    assert limiter.stats().states == 1
    limiter.reset("k")
    assert limiter.peek("k") == limiter.peek("never seen")
    assert limiter.stats().states == 0


@every_algorithm
def test_retry_after_is_exact(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """The time of the client's clock arrives: denied just before Retry-After, allowed at it."""
    limiter = Limiter(Limit(5, per=10, algorithm=algorithm), store=store, clock=clock)
    limiter.check("k", 5)
    clock.advance_ns(limiter.check("k").retry_after_ns - 1)
    assert not limiter.check("k")
    clock.advance_ns(1)
    assert limiter.check("k")


def test_several_limits_pass_together_or_not_at_all(store: LocalStore, clock: SteppedClock) -> None:
    """One call carries all limits of a key: the one that denies keeps the other from charging."""
    tight, wide = Limit(2, per=10, name="tight"), Limit(5, per=60, name="wide")
    both = Limiter([tight, wide], store=store, clock=clock)
    assert both.check("k", 2).policy == tight
    assert not both.check("k")
    assert Limiter(wide, store=store, clock=clock).peek("k").remaining == 3


def test_two_clients_share_one_count(open_store: OpenStore, clock: SteppedClock) -> None:
    """Limiters of one name on one store see each other's checks; other names do not."""
    with open_store(clock) as store:
        one, two = (Limiter("5/minute", store=store, clock=clock, name="a") for _ in range(2))
        other = Limiter("5/minute", store=store, clock=clock, name="b")
        one.check("k", 3)
        assert two.check("k").remaining == 1
        assert other.check("k").remaining == 4
