"""Logic that is written once and driven twice: by threads and by asyncio.

Code that decides does no I/O. Where it needs the answer of a store, a clock or an application's
hook, it yields a Call and goes on with the result, or with the error, as if it had made the call
itself:

    def allowed(gate: Gate | AsyncGate, subject: str) -> Steps[bool]:
        try:
            decision = yield Call(gate.check, subject, 1)
        except StoreError:
            return False
        return decision.allowed

`run` carries the calls out in the calling thread. `run_async` awaits each of them. Both take the
same generator, so no logic is kept in two versions. Steps call other steps with `yield from`.

`Together` is several calls that may go out at the same time: threads make them one after another,
asyncio all at once. An `Undo` is a call that must not be lost once the caller is cancelled: it
returns what was spent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from inspect import isawaitable
from typing import Any, TypeVar

T = TypeVar("T")


class Call:
    """Call `function` with these arguments; the step goes on with its result."""

    __slots__ = ("args", "function")

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function = function
        self.args = args


class Undo(Call):
    """A call that is completed even if the caller is cancelled meanwhile."""

    __slots__ = ()


class Together:
    """Several calls; the step goes on with a list of their results.

    A call that fails has its exception in the list, where others have their result.
    """

    __slots__ = ("calls",)

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls


Step = Call | Together
Steps = Generator[Step, Any, T]


def run(steps: Steps[T]) -> T:
    """Carry the steps out in this thread; return what they return."""
    try:
        step = next(steps)
        while True:
            try:
                if isinstance(step, Call):
                    result = step.function(*step.args)
                else:
                    result = [_result(call) for call in step.calls]
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as done:
        value: T = done.value
        return value


def _result(call: Call) -> Any:
    try:
        return call.function(*call.args)
    except Exception as error:
        return error


async def run_async(steps: Steps[T]) -> T:
    """Carry the steps out in this event loop; return what they return."""
    try:
        step = next(steps)
        while True:
            try:
                if isinstance(step, Call):
                    result = step.function(*step.args)
                    if isawaitable(result):
                        result = await (asyncio.shield(result) if type(step) is Undo else result)
                else:
                    result = await asyncio.gather(
                        *(_awaited(call) for call in step.calls), return_exceptions=True
                    )
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as done:
        value: T = done.value
        return value


async def _awaited(call: Call) -> Any:
    result = call.function(*call.args)
    return await result if isawaitable(result) else result
