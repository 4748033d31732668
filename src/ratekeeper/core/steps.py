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

`Together` is several calls that may run at the same time. asyncio makes them concurrently. Threads
make them one after another, except Asks that can be waited for `together`. An `Undo`, and steps
that wait for a Together that `completes`, go on in the background if the caller is cancelled,
because they spend or return units.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from ratekeeper.core.errors import StoreTimeout, StoreUnavailable

T = TypeVar("T")


class Ask:
    """An answer that has to be waited for: `wait` blocks a thread, `send` returns an awaitable.

    Both are called with `args`, and return the same answer or raise the same errors.
    """

    __slots__ = ("args", "send", "together", "wait")

    together: Callable[[Sequence[Any]], list[Any]]
    """Wait for several Asks with the same `together` at once. It takes their `args`, and returns
    their answers and errors. Most Asks have none."""

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
    """A call that is made even after a StoreTimeout, and completes if the caller is cancelled."""

    __slots__ = ()


class CallerGone(BaseException):
    """Steps that went on without their caller have undone what they did, and end."""


class Together:
    """Several calls; the generator continues with the list of their results.

    If a call fails, the list has its exception instead of a result. The calls share a deadline:
    after a StoreTimeout, a thread makes no other of them but each Undo. Those that are not made
    have a StoreUnavailable.
    """

    __slots__ = ("calls", "cancelled", "completes")

    def __init__(self, calls: Sequence[Call], *, completes: bool = False) -> None:
        """With `completes`, the steps go on in the background if the caller is cancelled."""
        self.calls = calls
        self.completes = completes
        self.cancelled = False
        """Set if the caller was cancelled before the results were there."""


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
                    result = _results(step.calls)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as done:
        value: T = done.value
        return value


def _results(calls: Sequence[Call]) -> list[Any]:
    results: list[Any] = []
    joint: dict[Callable[[Sequence[Any]], list[Any]], list[int]] = {}
    late: StoreTimeout | None = None
    for at, call in enumerate(calls):
        if late is not None and type(call) is not Undo:
            results.append(StoreUnavailable(f"not asked after another call's timeout: {late}"))
            continue
        try:
            result = call.function(*call.args)
            if type(result) is Ask:
                if len(calls) > 1 and hasattr(result, "together"):
                    joint.setdefault(result.together, []).append(at)
                else:
                    result = result.wait(*result.args)
            results.append(result)
        except StoreTimeout as error:
            late = error
            results.append(error)
        except Exception as error:
            results.append(error)
    for together, asked in joint.items():
        answers = together([results[at].args for at in asked])
        for at, answer in zip(asked, answers, strict=True):
            results[at] = answer
    return results


def asking(steps: Callable[..., Steps[Any]], *args: Any) -> Ask:
    """Return the Ask of steps that take these arguments."""
    return Ask(_steps_in_thread, _steps_awaited, steps, *args)


def answered(answer: Ask) -> Call:
    """Return the call that waits for an answer. An answer from memory needs none: it is there."""
    return Call(lambda: answer)


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
    return await _driven(steps)


async def _driven(steps: Steps[T], parts: Sequence[Any] | None = None) -> T:
    """Run steps. If they go on without their caller, they first get the results in `parts`."""
    alone = parts is not None
    try:
        step = next(steps) if parts is None else steps.send(await _completed(parts))
        while True:
            try:
                if isinstance(step, Call):
                    result = _started(step)
                    if is_awaitable(result):
                        result = await (_shielded(result) if type(step) is Undo else result)
                else:
                    result = [_started_or_error(call) for call in step.calls]
                    if any(map(is_awaitable, result)):
                        result = await _together(steps, step, result, alone=alone)
            except BaseException as error:
                if isinstance(step, Together) and step.cancelled:
                    raise  # the steps go on without the caller
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as done:
        value: T = done.value
        return value


def _started(call: Call) -> Any:
    """Return the result of a call, or the awaitable of its answer."""
    result = call.function(*call.args)
    return result.send(*result.args) if type(result) is Ask else result


def _started_or_error(call: Call) -> Any:
    try:
        return _started(call)
    except Exception as error:
        return error


async def _together(
    steps: Steps[Any], step: Together, results: Sequence[Any], *, alone: bool
) -> list[Any]:
    """Await the results that are awaitable, all at the same time."""
    if not step.completes:
        return await asyncio.gather(*map(_settled, results), return_exceptions=True)
    parts = [asyncio.ensure_future(each) if is_awaitable(each) else each for each in results]
    if alone:
        return await _completed(parts)
    try:
        await _all_done(_futures(parts))
    except asyncio.CancelledError:
        step.cancelled = True
        _keep(asyncio.ensure_future(_driven(steps, parts)))
        raise
    return [_outcome(each) for each in parts]


async def _completed(parts: Sequence[Any]) -> list[Any]:
    """Return the results of the futures among the parts, in place.

    Only an event loop that ends cancels the task that waits here. It also cancels the futures, and
    still waits for both: units can be returned.
    """
    while not all(each.done() for each in _futures(parts)):
        with suppress(asyncio.CancelledError):
            await _all_done(_futures(parts))
    return [_outcome(each) for each in parts]


def _all_done(futures: Sequence[asyncio.Future[Any]]) -> asyncio.Future[None]:
    """Return a future that is done when all of these are. `asyncio.wait` takes twice as long."""
    waiter = futures[0].get_loop().create_future()
    left = len(futures)

    def arrived(_: asyncio.Future[Any]) -> None:
        nonlocal left
        left -= 1
        if not left and not waiter.done():
            waiter.set_result(None)

    for each in futures:
        each.add_done_callback(arrived)
    return waiter


def _futures(parts: Sequence[Any]) -> list[asyncio.Future[Any]]:
    return [each for each in parts if isinstance(each, asyncio.Future)]


def _outcome(part: Any) -> Any:
    """Return the result of a future or its exception; a part that is no future is a result."""
    if not isinstance(part, asyncio.Future):
        return part
    if part.cancelled():
        return asyncio.CancelledError()
    error = part.exception()
    return part.result() if error is None else error


async def _settled(result: Any) -> Any:
    return await result if is_awaitable(result) else result


# Tasks that go on after their callers were cancelled. The event loop keeps only weak references.
_undoing: Final[set[asyncio.Future[Any]]] = set()


def _shielded(result: Any) -> asyncio.Future[Any]:
    task = asyncio.ensure_future(result)
    _keep(task)
    return asyncio.shield(task)


def _keep(task: asyncio.Future[Any]) -> None:
    _undoing.add(task)
    task.add_done_callback(_forgotten)


def _forgotten(task: asyncio.Future[Any]) -> None:
    _undoing.discard(task)
    if not task.cancelled():
        task.exception()  # read, so that asyncio does not log it: the caller is gone
