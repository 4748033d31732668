"""Reservations: charged before a block, topped up in it, and settled at its end."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import (
    AsyncLimiter,
    CapacityError,
    ConfigError,
    InvalidCost,
    Limiter,
    LimitExceeded,
    Request,
)
from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import StoreUnavailable
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.testing import ManualClock, limiting_off

ANN = Request(user="ann", tenant="acme")
BUDGETS = """
version: 1
prices:
  large: {input: 2_500_000, output: 10_000_000}
rules:
  - {id: requests, by: user, limits: 10/minute}
  - {id: tokens, by: user, unit: tokens, limits: 1000/minute}
  - {id: money, by: tenant, unit: micro_dollars, limits: 9000/minute, cost: 20}
"""
COSTS = {"requests": 1, "tokens": 100, "micro_dollars": 500}


class Interruption(BaseException):
    """A BaseException, like KeyboardInterrupt and CancelledError."""


@pytest.fixture
def limiter(clock: ManualClock) -> Limiter:
    """A bucket that refills one unit every 6 seconds."""
    return Limiter("10/minute", clock=clock)


def left_of(limiter: Any) -> dict[str, int]:
    """Return what remains of the budgets of ANN."""
    units = {"requests": "requests", "tokens": "tokens", "money": "micro_dollars"}
    # A cost that only this rule can deny has the rule as its tightest limit.
    found = {}
    for rule, unit in units.items():
        costs = {**dict.fromkeys(units.values(), 0), unit: 9_000 if rule == "money" else 10}
        low, high = 0, {"requests": 10, "tokens": 1_000, "money": 9_000}[rule]
        while low < high:
            middle = (low + high + 1) // 2
            if limiter.peek(ANN, costs={**costs, unit: middle}):
                low = middle
            else:
                high = middle - 1
        found[rule] = low
    return found


# ── The end of a block ─────────────────────────────────────────────────────────────────────────


def test_a_reservation_costs_what_was_used(make_limiter: Any) -> None:
    """On threads and asyncio, on every store: the surplus is returned at the end."""
    limiter = make_limiter("10/minute")
    with limiter.reserve("k", 8) as reservation:
        assert limiter.peek("k").remaining == 2
        assert reservation.use(2)
        assert reservation.use(1)
    assert limiter.peek("k").remaining == 7


def test_a_block_that_never_says_what_it_used_stays_charged(make_limiter: Any) -> None:
    """An application that does not measure pays its estimate."""
    limiter = make_limiter("10/minute")
    with limiter.reserve("k", 8) as reservation:
        assert reservation.decision.remaining == 2
    assert limiter.peek("k").remaining == 2
    with limiter.reserve("k", 2) as reservation:
        reservation.use(0)
    assert limiter.peek("k").remaining == 2


@pytest.mark.parametrize("kind", [RuntimeError, Interruption])
@pytest.mark.parametrize(("used", "left"), [(None, 10), (0, 10), (3, 7), (9, 1)])
def test_a_block_that_raises_costs_what_it_used(
    make_limiter: Any, kind: type[BaseException], used: int | None, left: int
) -> None:
    """It is refunded if it has used nothing. The error is raised in either case."""
    limiter = make_limiter("10/minute")

    def serve() -> None:
        with limiter.reserve("k", 4) as reservation:
            if used is not None:
                reservation.use(used)
            raise kind

    with pytest.raises(kind):
        serve()
    assert limiter.peek("k").remaining == left


def test_a_denied_reservation_does_not_run(limiter: Limiter) -> None:
    """It raises LimitExceeded with the decision, and there is nothing to refund."""
    limiter.check("k", 10)
    with pytest.raises(LimitExceeded) as caught, limiter.reserve("k"):
        pytest.fail("the block ran")
    assert caught.value.decision.retry_after == 6.0
    assert limiter.peek("k").remaining == 0


def test_one_call_makes_one_reservation(limiter: Limiter) -> None:
    """A second `with` of the same object raises, and charges nothing."""
    once = limiter.reserve("k", 3)
    with once:
        pass
    with pytest.raises(ConfigError, match="call it again for another"), once:
        pytest.fail("the block ran")
    assert limiter.peek("k").remaining == 7


async def test_one_call_makes_one_reservation_on_asyncio(clock: ManualClock) -> None:
    """As with threads."""
    limiter = AsyncLimiter("10/minute", clock=clock)
    once = limiter.reserve("k", 3)
    async with once:
        pass
    with pytest.raises(ConfigError, match="call it again for another"):
        await once.__aenter__()
    assert (await limiter.peek("k")).remaining == 7


def test_a_reservation_waits_if_requested(limiter: Limiter, clock: ManualClock) -> None:
    """It waits up to `wait` seconds for room."""
    limiter.check("k", 10)
    with pytest.raises(LimitExceeded), limiter.reserve("k", 2, wait=9):
        pytest.fail("the block ran")
    start_ns = clock.now_ns()
    with limiter.reserve("k", 2, wait=12):
        assert clock.now_ns() - start_ns == 12 * NS_PER_SECOND


async def test_a_reservation_waits_on_asyncio(clock: ManualClock) -> None:
    """It also sleeps the delay of a leaky bucket."""
    queue = AsyncLimiter("60/minute leaky_bucket", clock=clock)
    start_ns = clock.now_ns()
    for turn in range(3):
        async with queue.reserve("k", wait=turn):
            assert clock.now_ns() - start_ns == turn * NS_PER_SECOND


def test_a_block_that_fails_late_returns_no_quota_twice(clock: ManualClock) -> None:
    """Five blocks stay open for a window and then fail: five requests pass then, not ten."""
    limiter = Limiter("5/10s", clock=clock)
    with suppress(RuntimeError), ExitStack() as blocks:
        for _ in range(5):
            blocks.enter_context(limiter.reserve("k"))
        clock.advance(10)
        assert sum(limiter.check("k").allowed for _ in range(20)) == 5
        raise RuntimeError
    assert limiter.peek("k").remaining == 0


def test_granted_units_are_not_refunded(limiter: Limiter) -> None:
    """A reservation refunds as `refund` does: 10 units of the limit, and not the 3 of a grant."""
    limiter.grant("k", 3)
    with pytest.raises(RuntimeError), limiter.reserve("k", 13):
        raise RuntimeError
    assert limiter.peek("k").remaining == 10


def test_nothing_is_settled_with_limiting_off(limiter: Limiter) -> None:
    """With limiting off nothing is counted."""
    limiter.check("k", 2)
    with limiting_off(), limiter.reserve("k", 5) as reservation:
        assert reservation.use(50)
    with limiting_off(), pytest.raises(RuntimeError), limiter.reserve("k"):
        raise RuntimeError
    assert limiter.peek("k").remaining == 8


def test_a_degraded_admission_returns_nothing(clock: ManualClock) -> None:
    """The store had no room and `open` allowed the block: units of others stay spent."""
    one = Limiter("2/m", store=PythonMemoryStore(clock, 1), clock=clock)
    both = Limiter("2/m; 9/h", store=one.store, clock=clock)
    one.check("k")
    for used in (None, 0):
        with suppress(RuntimeError), both.reserve("k") as reservation:
            assert reservation.decision.degraded
            if used is None:
                raise RuntimeError
            reservation.use(used)
    assert one.peek("k").remaining == 1


# ── Top-ups ────────────────────────────────────────────────────────────────────────────────────


def test_a_reservation_is_topped_up_in_steps(limiter: Limiter) -> None:
    """Each top-up is as large as the reservation, and its surplus is returned at the end."""
    with limiter.reserve("k", 3) as reservation:
        seen = [(reservation.use(1), limiter.peek("k").remaining) for _ in range(7)]
    assert seen == [*[(True, 7)] * 3, *[(True, 4)] * 3, (True, 1)]
    assert limiter.peek("k").remaining == 3


def test_the_surplus_of_a_late_top_up_is_returned(clock: ManualClock) -> None:
    """It was charged a moment ago, so time has returned nothing of it."""
    limiter = Limiter("10/10s", clock=clock)
    with limiter.reserve("k", 4) as reservation:
        reservation.use(4)
        clock.advance(10)
        reservation.use(1)
        assert limiter.peek("k").remaining == 6
    assert limiter.peek("k").remaining == 9


def test_use_says_that_there_is_no_room(limiter: Limiter, clock: ManualClock) -> None:
    """The last units are taken as they are owed; then it is asked again after `retry_after`."""
    with limiter.reserve("k", 4) as reservation:
        limiter.check("k", 3)
        assert reservation.use(5)  # a step of 4 has no room, but 1 has
        assert limiter.peek("k").remaining == 2
        assert not reservation.use(3)
        denied = limiter.counts()["default"].denied
        assert {reservation.use(0) for _ in range(50)} == {False}
        assert limiter.counts()["default"].denied == denied
        clock.advance(6)
        assert reservation.use(0)
        assert limiter.peek("k").remaining == 0


def test_a_step_that_can_never_fit_is_no_error(clock: ManualClock) -> None:
    """`use` raises no CapacityError: the request is being served."""
    limiter = Limiter("10/minute", clock=clock)
    with limiter.reserve("k", 10) as reservation:
        assert not reservation.use(25)
    with pytest.raises(CapacityError), limiter.reserve("k", 11):
        pytest.fail("the block ran")


def test_a_store_that_fails_is_no_error_in_the_block(
    limiter: Limiter, caplog: pytest.LogCaptureFixture
) -> None:
    """`use` returns False, and a settlement that fails is logged: the request has been served."""
    strict = Limiter("10/minute", store=limiter.store, on_failure="raise")

    def fail(*_: object) -> None:
        raise StoreUnavailable("down")

    with caplog.at_level(logging.WARNING), strict.reserve("k", 5) as reservation:
        reservation._verbs = reservation._verbs._replace(charge=fail, settle=fail)
        assert not reservation.use(6)
    assert "could not be settled at what was used: down" in caplog.text
    assert strict.peek("k").remaining == 5


@given(
    reserved=st.integers(0, 60),
    chunks=st.lists(st.integers(0, 40), max_size=12),
    others=st.lists(st.integers(0, 30), max_size=12),
)
def test_what_is_settled_is_what_was_used(
    reserved: int, chunks: list[int], others: list[int]
) -> None:
    """Whatever other requests spend: what remains is what nobody has used.

    `use` is true exactly as long as all that was used has been charged.
    """
    limiter = Limiter("1000/hour", clock=ManualClock())
    spent = 0
    with limiter.reserve("k", reserved) as reservation:
        for at, chunk in enumerate(chunks):
            assert reservation.use(chunk)
            if at < len(others):
                spent += others[at] * limiter.check("k", others[at]).allowed
            assert limiter.peek("k").remaining <= 1_000 - spent - sum(chunks[: at + 1])
    used = sum(chunks) if chunks else reserved
    assert limiter.peek("k").remaining == 1_000 - spent - used


# ── Several units ──────────────────────────────────────────────────────────────────────────────


def test_all_units_are_reserved_and_settled(make_limiter: Any) -> None:
    """User and tenant, requests, tokens and money in one step, on every store."""
    limiter = make_limiter(rules=BUDGETS)
    with limiter.reserve(ANN, costs=COSTS) as reservation:
        assert left_of(limiter) == {"requests": 9, "tokens": 900, "money": 8_500}
        assert reservation.use(costs={"tokens": 30})
        assert reservation.use(costs={"tokens": 7, "micro_dollars": 900})
    assert left_of(limiter) == {"requests": 9, "tokens": 963, "money": 8_100}


def test_a_unit_that_is_never_used_stays_reserved(make_limiter: Any) -> None:
    """Money that nobody reports is paid as it was estimated."""
    limiter = make_limiter(rules=BUDGETS)
    with limiter.reserve(ANN, costs=COSTS) as reservation:
        reservation.use(costs={"tokens": 0})
    assert left_of(limiter) == {"requests": 9, "tokens": 1_000, "money": 8_500}
    with pytest.raises(RuntimeError), limiter.reserve(ANN, costs=COSTS):
        raise RuntimeError
    assert left_of(limiter) == {"requests": 9, "tokens": 1_000, "money": 8_500}


def test_a_unit_of_which_nothing_was_reserved_is_settled(make_limiter: Any) -> None:
    """Its rule was charged nothing, so the decision does not name it."""
    limiter = make_limiter(rules=BUDGETS)
    reserved = {"tokens": 0, "micro_dollars": 100}
    decision = limiter.check(ANN, costs=reserved)
    settled = limiter.settle(ANN, reserved, {"tokens": 300}, decision)
    assert settled.charged == {"tokens": 300, "micro_dollars": 100}
    assert left_of(limiter) == {"requests": 9, "tokens": 700, "money": 8_900}


def test_a_reservation_that_one_unit_denies_costs_nothing(make_limiter: Any) -> None:
    """Requests, tokens and money pass together or not at all."""
    limiter = make_limiter(rules=BUDGETS)
    limiter.check(ANN, costs={"requests": 0, "tokens": 0, "micro_dollars": 8_600})
    with pytest.raises(LimitExceeded) as caught, limiter.reserve(ANN, costs=COSTS):
        pytest.fail("the block ran")
    assert caught.value.decision.rule == "money"
    assert left_of(limiter) == {"requests": 10, "tokens": 1_000, "money": 400}


def test_a_plain_number_is_of_the_one_unit_that_is_not_requests(clock: ManualClock) -> None:
    """With several units, or none that was reserved, the error names those that were."""
    limiter = Limiter.from_rules(BUDGETS, clock=clock)
    with limiter.reserve(ANN, costs={"requests": 1, "tokens": 100}) as reservation:
        reservation.use(30)
        with pytest.raises(InvalidCost, match="no 'micro_dollars' were reserved"):
            reservation.use(costs={"micro_dollars": 1})
        with pytest.raises(InvalidCost, match="from 0 up"):
            reservation.use(-1)
        assert reservation.used == {"tokens": 30}
    with (
        pytest.raises(InvalidCost, match="30 of which unit"),
        limiter.reserve(ANN, costs=COSTS) as reservation,
    ):
        reservation.use(30)
    with pytest.raises(ConfigError, match="has ended"):
        reservation.use(costs={"tokens": 1})
    left = left_of(limiter)
    assert (left["requests"], left["tokens"]) == (9, 970)


@given(
    reserved=st.fixed_dictionaries({"tokens": st.integers(0, 90), "micro_dollars": st.just(50)}),
    chunks=st.lists(
        st.dictionaries(st.sampled_from(["tokens", "micro_dollars"]), st.integers(0, 60)),
        max_size=8,
    ),
)
def test_each_unit_is_settled_at_what_was_used(
    reserved: dict[str, int], chunks: list[dict[str, int]]
) -> None:
    """Also if the units are topped up at different times."""
    limiter = Limiter.from_rules(BUDGETS, clock=ManualClock())
    with limiter.reserve(ANN, costs=reserved) as reservation:
        for chunk in chunks:
            assert reservation.use(costs=chunk)
    used = dict(reserved)
    for unit in reserved:
        if any(unit in chunk for chunk in chunks):
            used[unit] = sum(chunk.get(unit, 0) for chunk in chunks)
    assert left_of(limiter) == {
        "requests": 9,
        "tokens": 1_000 - used["tokens"],
        "money": 9_000 - used["micro_dollars"],
    }


# ── Asyncio ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("used", [0, 3, 8])
async def test_a_cancelled_task_is_settled(clock: ManualClock, used: int) -> None:
    """The end is settled also if the task is cancelled in the block."""
    limiter = AsyncLimiter("10/minute", clock=clock)
    began = asyncio.Event()

    async def serve() -> None:
        async with limiter.reserve("k", 5) as reservation:
            reservation.use(used)
            began.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await limiter.peek("k")).remaining == 10 - used
