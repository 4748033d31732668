"""Forgetting drops every state of a store."""

from __future__ import annotations

from ratekeeper import Limit, Limiter
from ratekeeper.core.model import AlgorithmName
from ratekeeper.decide.store import LocalStore
from tests.clocks import SteppedClock
from tests.conformance.stores import every_algorithm


@every_algorithm
def test_all_states_are_forgotten(
    algorithm: AlgorithmName, store: LocalStore, clock: SteppedClock
) -> None:
    """Those of every limiter and key, also a cached denial; the number of states is returned."""
    minute = Limiter(Limit(1, per=60, algorithm=algorithm), store=store, clock=clock, name="a")
    year = Limiter(Limit(1, per=366 * 86_400), store=store, clock=clock, name="b")
    for key in ("x", "y"):
        assert [bool(minute.check(key)), bool(minute.check(key))] == [True, False]
    assert year.check("x")
    assert store.forget_all() == 3
    assert store.stats().states == 0
    assert [bool(minute.check("x")), bool(minute.check("y")), bool(year.check("x"))] == [True] * 3
    assert store.forget_all() == 3
    assert store.forget_all() == 0
