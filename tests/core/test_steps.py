"""Steps: one generator gives the same result from a thread and from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from ratekeeper.core.steps import Call, Steps, Together, Undo, run, run_async

Driver = Callable[[Steps[Any]], Any]


@pytest.fixture(params=["threads", "asyncio"])
def drive(request: pytest.FixtureRequest) -> Driver:
    """Run steps with each driver."""
    if request.param == "threads":
        return run
    return lambda steps: asyncio.run(run_async(steps))


def double(number: int) -> int:
    return 2 * number


async def double_later(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def fail(error: BaseException) -> None:
    raise error


def doubled(function: Callable[[int], Any]) -> Steps[int]:
    first = yield Call(function, 1)
    second = yield Call(function, first)
    return first + second


def test_each_call_returns_its_result_to_the_step(drive: Driver) -> None:
    """Each yield continues with the result of its call; the driver returns the return value."""
    assert drive(doubled(double)) == 6


def test_awaitable_results_are_awaited() -> None:
    """The asyncio driver awaits the coroutine of a coroutine function."""
    assert asyncio.run(run_async(doubled(double_later))) == 6


def test_steps_call_steps(drive: Driver) -> None:
    """`yield from` passes calls and results through."""

    def outer() -> Steps[int]:
        inner = yield from doubled(double)
        return inner + 1

    assert drive(outer()) == 7


def test_an_error_is_raised_where_the_call_was_made(drive: Driver) -> None:
    """Steps handle an error with try and except, and go on with further calls."""

    def careful() -> Steps[int]:
        try:
            yield Call(fail, ValueError("no"))
        except ValueError:
            result: int = yield Call(double, 21)
            return result
        return 0

    assert drive(careful()) == 42


def test_an_error_that_no_step_handles_reaches_the_caller(drive: Driver) -> None:
    """The driver raises it unchanged."""

    def careless() -> Steps[None]:
        yield Call(fail, KeyError("gone"))

    with pytest.raises(KeyError, match="gone"):
        drive(careless())


def test_calls_together_give_a_list_with_errors_in_place(drive: Driver) -> None:
    """One result for each call, in order; a failed call does not keep the others' results."""
    error = ValueError("no")

    def several() -> Steps[list[Any]]:
        results: list[Any] = yield Together([Call(double, 1), Call(fail, error), Call(double, 2)])
        return results

    assert drive(several()) == [2, error, 4]


async def test_calls_together_run_at_the_same_time() -> None:
    """Each waits for the other: one after another, they would never end."""
    first, second = asyncio.Event(), asyncio.Event()

    async def meet(mine: asyncio.Event, other: asyncio.Event) -> bool:
        mine.set()
        return await other.wait()

    def both() -> Steps[list[Any]]:
        results: list[Any] = yield Together([Call(meet, first, second), Call(meet, second, first)])
        return results

    assert await run_async(both()) == [True, True]


async def test_an_undo_is_completed_after_the_caller_was_cancelled() -> None:
    """Spent units are returned even if the task is cancelled meanwhile."""
    started, released, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def refund() -> None:
        started.set()
        await released.wait()
        done.set()

    def undo() -> Steps[None]:
        yield Undo(refund)

    task = asyncio.create_task(run_async(undo()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    released.set()
    await done.wait()


async def test_cancellation_reaches_the_steps() -> None:
    """A step that is waiting sees CancelledError, can clean up, and the task ends cancelled."""
    seen: list[str] = []
    waiting = asyncio.Event()

    async def wait_for_ever() -> None:
        waiting.set()
        await asyncio.Event().wait()

    def held() -> Steps[None]:
        try:
            yield Call(wait_for_ever)
        except asyncio.CancelledError:
            yield Call(seen.append, "left")
            raise

    task = asyncio.create_task(run_async(held()))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["left"]
