"""Steps: logic that is written once and driven by threads or by asyncio.

Code that decides does no I/O. A function that cannot answer from this machine's memory returns an
`Ask`: how a thread waits for the answer, and how asyncio does. Logic yields a `Call` of such a
function. It continues with the answer, or with its error, as if it had waited itself:

    def allowed(counter: Counter, subject: str) -> Steps[bool]:
        try:
            decision = yield Call(counter.check, subject, 1)
        except StoreError:
            return False
        return decision.allowed

Two links carry Asks: `run` waits in the calling thread, `run_async` awaits. Both take the same
generator, so there is only one version of the logic. Steps call other steps with `yield from`.

`Together` is several calls that may run at the same time: threads make them one after another,
asyncio makes them concurrently. An `Undo` is a call that must complete even if the caller is
cancelled, because it returns units that were spent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final, TypeVar

T = TypeVar("T")


class Ask:
    """An answer that has to be waited for: `wait` blocks a thread, `send` returns an awaitable.

    Both are called with `args`, and return the same answer or raise the same errors.
    """

    __slots__ = ("args", "send", "wait")

    def __init__(
        self, wait: Callable[..., Any], send: Callable[..., Awaitable[Any]], *args: Any
    ) -> None:
        self.wait = wait
        self.send = send
        self.args = args


class Call:
    """Call `function` with these arguments; the generator continues with its result.

    If the function returns an Ask or an awaitable, the generator continues with the answer.
    """

    __slots__ = ("args", "function")

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function = function
        self.args = args


class Undo(Call):
    """A call that completes even if the caller is cancelled meanwhile."""

    __slots__ = ()


class Together:
    """Several calls; the generator continues with the list of their results.

    If a call fails, the list has its exception instead of a result.
    """

    __slots__ = ("calls",)

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls


Step = Call | Together
Steps = Generator[Step, Any, T]


def run(steps: Steps[T]) -> T:
    """Run the steps in this thread and return their result."""
    try:
        step = next(steps)
        while True:
            try:
                if isinstance(step, Call):
                    result = step.function(*step.args)
                    if type(result) is Ask:
                        result = result.wait(*result.args)
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
        result = call.function(*call.args)
        return result.wait(*result.args) if type(result) is Ask else result
    except Exception as error:
        return error


def asking(steps: Callable[..., Steps[Any]], *args: Any) -> Ask:
    """Return the Ask of steps that take these arguments."""
    return Ask(_steps_in_thread, _steps_awaited, steps, *args)


def asked(function: Callable[..., Any], *args: Any) -> Steps[Any]:
    """Return the answer of one call."""
    return (yield Call(function, *args))


def _steps_in_thread(steps: Callable[..., Steps[T]], *args: Any) -> T:
    return run(steps(*args))


def _steps_awaited(steps: Callable[..., Steps[T]], *args: Any) -> Awaitable[T]:
    return run_async(steps(*args))


# Whether the objects of a type can be awaited; emptied when it is full.
_awaitable_types: Final[dict[type, bool]] = {}
TYPES_MAX: Final = 1_000


def is_awaitable(value: object) -> bool:
    """Return True for a coroutine, a future or a task. Faster than `inspect.isawaitable`."""
    kind = type(value)
    known = _awaitable_types.get(kind)
    if known is None:
        if len(_awaitable_types) >= TYPES_MAX:
            _awaitable_types.clear()
        known = _awaitable_types[kind] = hasattr(kind, "__await__")
    return known


async def run_async(steps: Steps[T]) -> T:
    """Run the steps in this event loop and return their result."""
    try:
        step = next(steps)
        while True:
            try:
                if isinstance(step, Call):
                    result = step.function(*step.args)
                    if type(result) is Ask:
                        result = result.send(*result.args)
                    if is_awaitable(result):
                        result = await (_shielded(result) if type(step) is Undo else result)
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


# Tasks that go on after their callers were cancelled. The event loop keeps only weak references.
_undoing: Final[set[asyncio.Future[Any]]] = set()


def _shielded(result: Any) -> asyncio.Future[Any]:
    task = asyncio.ensure_future(result)
    _undoing.add(task)
    task.add_done_callback(_undoing.discard)
    return asyncio.shield(task)


async def _awaited(call: Call) -> Any:
    result = call.function(*call.args)
    if type(result) is Ask:
        result = result.send(*result.args)
    return await result if is_awaitable(result) else result
