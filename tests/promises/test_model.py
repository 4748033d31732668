"""A store and the simple model of it never disagree."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from ratekeeper import CapacityError, Limit
from ratekeeper.core.model import AlgorithmName
from ratekeeper.decide.store import LocalCounter, LocalStore
from tests.clocks import SteppedClock
from tests.conformance.stores import OpenStore, every_algorithm, every_connection
from tests.promises.model import Answer, Model
from tests.promises.strategies import (
    KEY,
    STEP_BYTES,
    STEPS_MAX,
    chunks,
    clock_at,
    limits,
    move,
    promise,
    several_limits,
    starts_ns,
    step_of,
)

# (nanoseconds to move the clock by, verb, key, units, ttl_ns)
Operation = tuple[int, str, str, int, int]


def operations(
    limits: Sequence[Limit], verbs: str, keys: str, *, rewinds: bool = False
) -> st.SearchStrategy[list[Operation]]:
    """Random operations on a store, with their times."""
    names = verbs.split()

    def operation(drawn: bytes) -> Operation:
        gap_ns, units = step_of(drawn, limits, rewinds=rewinds)
        verb, key, length = drawn[STEP_BYTES:]
        ttl_ns = limits[0].window_ns * (length + 1) // 128
        return gap_ns, names[verb % len(names)], keys[key % len(keys)], units, ttl_ns

    return chunks(STEP_BYTES + 3, STEPS_MAX).map(lambda drawn: list(map(operation, drawn)))


def assert_same(verb: str, counter: LocalCounter, key: str, cost: int, expected: Answer) -> None:
    """Compare a decision of the counter with the model: allowed, and remaining units."""
    try:
        decision = (counter.check if verb == "check" else counter.peek)(key, cost)
    except CapacityError:
        assert expected in ("never", "never or denied")
        return
    if expected == "never or denied":
        assert not decision.allowed
    else:
        assert (decision.allowed, decision.remaining) == expected


def assert_agree(
    store: LocalStore, clock: SteppedClock, limits: Sequence[Limit], trace: Sequence[Operation]
) -> None:
    """Apply the same operations to a counter and to a model, and compare every answer."""
    counter, model = store.counter(limits, ""), Model(limits)
    charges: list[int] = []  # of either key: a refund must be safe with any time
    for gap_ns, verb, key, units, ttl_ns in trace:
        move(clock, gap_ns)
        now_ns = clock.now_ns()
        if verb == "check":
            assert_same(verb, counter, key, units, model.check(key, now_ns, units))
            charges.append(now_ns)
        elif verb == "peek":
            assert_same(verb, counter, key, units, model.peek(key, now_ns, units))
        elif verb == "refund":
            charged_ns = charges[-1 - ttl_ns % len(charges)] if charges and ttl_ns % 3 else None
            counter.refund(key, units, charged_ns)
            model.refund(key, now_ns, units, charged_ns)
        elif verb == "grant":
            lasting_ns = clock.steps_up_ns(ttl_ns)
            counter.grant(key, units + 1, lasting_ns)
            model.grant(key, now_ns, units + 1, lasting_ns)
        elif verb == "reset":
            counter.reset(key)
            model.reset(key)
        else:
            store.sweep()
        assert_same("peek", counter, key, 0, model.peek(key, now_ns, 0))


@every_connection
@every_algorithm
@promise(250, data=st.data())
def test_a_store_agrees_with_the_model(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject
) -> None:
    """Two keys, every verb, and sweeps in between give the same answers."""
    limit = data.draw(limits(algorithm, units_max=200))
    verbs = "check check check peek refund grant reset sweep"
    trace = data.draw(operations([limit], verbs, "ab"))
    clock = clock_at(data.draw(starts_ns()))
    with open_store(clock) as store:
        assert_agree(store, clock, [limit], trace)


@every_algorithm
@promise(120, data=st.data())
def test_a_store_agrees_with_the_model_when_time_goes_back(
    algorithm: AlgorithmName, open_store: OpenStore, data: st.DataObject
) -> None:
    """The clock of one key jumps in both directions; the time of its last admission counts."""
    limit = data.draw(limits(algorithm, units_max=200))
    trace = data.draw(operations([limit], "check check check peek reset", KEY, rewinds=True))
    clock = clock_at(data.draw(starts_ns()))
    with open_store(clock) as store:
        assert_agree(store, clock, [limit], trace)


@promise(200, limits=several_limits(units_max=200), start_ns=starts_ns(), data=st.data())
def test_a_store_agrees_with_the_model_under_several_limits(
    limits: list[Limit], start_ns: int, data: st.DataObject, open_store: OpenStore
) -> None:
    """Limits of different algorithms apply together, with every verb."""
    verbs = "check check check peek refund grant reset sweep"
    trace = data.draw(operations(limits, verbs, "ab"))
    clock = clock_at(start_ns)
    with open_store(clock) as store:
        assert_agree(store, clock, limits, trace)
