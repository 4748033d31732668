"""Steps: one generator gives the same result from a thread and from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from ratekeeper.core.errors import StoreTimeout, StoreUnavailable
from ratekeeper.core.steps import (
    Ask,
    Call,
    CallerGone,
    Steps,
    Together,
    Undo,
    asked,
    asking,
    run,
    run_async,
)

Link = Callable[[Steps[Any]], Any]


@pytest.fixture(params=["threads", "asyncio"])
def carry(request: pytest.FixtureRequest) -> Link:
    """Run steps with each link."""
    if request.param == "threads":
        return run
    return lambda steps: asyncio.run(run_async(steps))


def double(number: int) -> int:
    return 2 * number


async def double_later(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def double_asked(number: int) -> Ask:
    return Ask(double, double_later, number)


def fail(error: BaseException) -> None:
    raise error


async def fail_later(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


def fail_asked(error: BaseException) -> Ask:
    return Ask(fail, fail_later, error)


def doubled(function: Callable[[int], Any]) -> Steps[int]:
    first = yield Call(function, 1)
    second = yield from asked(function, first)
    return int(first + second)


def together(*calls: Call, completes: bool = False) -> Steps[list[Any]]:
    results: list[Any] = yield Together(calls, completes=completes)
    return results


@pytest.mark.parametrize("function", [double, double_asked])
def test_each_call_returns_its_answer_to_the_step(
    carry: Link, function: Callable[[int], Any]
) -> None:
    """A result is the answer, and an Ask is waited for; the link returns the return value."""
    assert carry(doubled(function)) == 6


def test_awaitable_results_are_awaited() -> None:
    """On asyncio, a step may call a coroutine function."""
    assert asyncio.run(run_async(doubled(double_later))) == 6


def test_an_ask_may_be_answered_by_steps(carry: Link) -> None:
    """`asking` makes the Ask: steps that another step, or a caller without steps, waits for."""

    def outer() -> Steps[int]:
        inner = yield Call(asking, doubled, double_asked)
        return int(inner + 1)

    assert carry(outer()) == 7


@pytest.mark.parametrize("function", [fail, fail_asked])
def test_an_error_is_raised_where_the_call_was_made(
    carry: Link, function: Callable[..., Any]
) -> None:
    """Steps handle an error with try and except, and go on with further calls."""

    def careful() -> Steps[int]:
        try:
            yield Call(function, ValueError("no"))
        except ValueError:
            return (yield from doubled(double))
        return 0

    assert carry(careful()) == 6
    with pytest.raises(KeyError, match="gone"):
        carry(asked(function, KeyError("gone")))


@pytest.mark.parametrize("completes", [False, True])
def test_calls_together_give_a_list_with_errors_in_place(carry: Link, completes: bool) -> None:
    """One result for each call, in order; a failed call does not keep the others' results."""
    errors = ValueError("no"), StoreUnavailable("no")
    calls = [
        Call(double, 1),
        Call(fail, errors[0]),
        Call(double_asked, 2),
        Call(fail_asked, errors[1]),
        Call(double_asked, 3),
    ]
    assert carry(together(*calls, completes=completes)) == [2, errors[0], 4, errors[1], 6]


def test_a_thread_waits_for_one_timeout_only() -> None:
    """Of the other calls together, only an Undo is made; an error says so for the others."""
    late, later = StoreTimeout("50 ms"), StoreTimeout("100 ms")
    made: list[str] = []

    def note(name: str) -> Ask:
        return Ask(made.append, made.append, name)

    results = run(
        together(
            Call(note, "before"),
            Call(fail_asked, late),
            Call(note, "after"),
            Undo(fail_asked, later),
            Undo(note, "undo"),
        )
    )
    assert made == ["before", "undo"]
    assert results[:2] == [None, late]
    assert type(results[2]) is StoreUnavailable
    assert "50 ms" in str(results[2])
    assert results[3:] == [later, None]


def test_on_asyncio_a_timeout_delays_no_other_call() -> None:
    """All of them are made at the same time."""
    late = StoreTimeout("50 ms")
    steps = together(Call(fail_asked, late), Call(double_asked, 1))
    assert asyncio.run(run_async(steps)) == [late, 2]


@pytest.mark.parametrize("completes", [False, True])
async def test_calls_together_run_at_the_same_time(completes: bool) -> None:
    """Each waits for the other: one after another, they would never end."""
    first, second = asyncio.Event(), asyncio.Event()

    async def meet(mine: asyncio.Event, other: asyncio.Event) -> bool:
        mine.set()
        return await other.wait()

    calls = Call(meet, first, second), Call(meet, second, first)
    assert await run_async(together(*calls, completes=completes)) == [True, True]


# ── Cancellation ───────────────────────────────────────────────────────────────────────────────


class Held:
    """A call that waits until the test releases it."""

    def __init__(self) -> None:
        self.started, self.released, self.ended = (asyncio.Event() for _ in range(3))

    async def wait(self) -> str:
        try:
            self.started.set()
            await self.released.wait()
            return "released"
        finally:
            self.ended.set()


async def cancelled(steps: Steps[Any], held: Held) -> None:
    """Run steps in a task, and cancel it while they wait for `held`."""
    task = asyncio.create_task(run_async(steps))
    await held.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancellation_reaches_the_steps() -> None:
    """A step that is waiting sees CancelledError, can clean up, and the task ends cancelled."""
    seen: list[str] = []
    held = Held()

    def careful() -> Steps[None]:
        try:
            yield Call(held.wait)
        except asyncio.CancelledError:
            yield Call(seen.append, "left")
            raise

    await cancelled(careful(), held)
    assert seen == ["left"]
    assert held.ended.is_set()


async def test_calls_together_are_cancelled_with_the_caller() -> None:
    """A look, for example, is of no use then."""
    held = Held()
    await cancelled(together(Call(held.wait), Call(double, 1)), held)
    assert held.ended.is_set()


async def test_an_undo_is_completed_after_the_caller_was_cancelled() -> None:
    """Spent units are returned even if the task is cancelled meanwhile."""
    held = Held()

    def undo() -> Steps[None]:
        yield Undo(held.wait)

    await cancelled(undo(), held)
    assert not held.ended.is_set()
    held.released.set()
    await held.ended.wait()


async def test_steps_that_complete_go_on_without_their_caller() -> None:
    """They get the results, learn that the caller has gone, and make further calls."""
    held, undone = Held(), Held()
    seen: list[Any] = []
    undone.released.set()

    def charging() -> Steps[None]:
        batch = Together([Call(held.wait), Call(double, 1)], completes=True)
        seen.append((yield batch))
        seen.append(batch.cancelled)
        further = Together([Call(undone.wait)], completes=True)
        seen.append((yield further))
        seen.append(further.cancelled)
        raise CallerGone

    await cancelled(charging(), held)
    assert seen == []
    held.released.set()
    await undone.ended.wait()
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
    assert seen == [["released", 2], True, ["released"], False]
