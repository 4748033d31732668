"""Rate limits for any ASGI application, as a middleware.

    app.add_middleware(RateLimit, limits="100/minute")        # Starlette, FastAPI
    app = RateLimit(app, limits="100/minute")                 # everything else

A request is charged before the application runs. One that is denied is answered here with a 429
and problem JSON; a WebSocket gets the same where the server can send it, and else is closed with
code 1008 before it is accepted. All others pass, and their responses get headers as they start.
Nothing else is touched: bodies, streams, trailers and files go through as they are.

For a route of its own there is `limited`, a decorator of Starlette's endpoints.

`passage.py` is what happens to one request; this is the frame around it. There is no thread, and
no task for a request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from functools import partial, wraps
from typing import Any, Final, ParamSpec, Protocol, TypeVar, Unpack, overload

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.model import NAME_LENGTH_MAX, check_name
from tollkeeper.core.rates import LimitsArgument
from tollkeeper.limiter.arguments import kind_of, name_of
from tollkeeper.web.calls import AsgiCall
from tollkeeper.web.guard import AsyncGuard
from tollkeeper.web.passage import (
    CHARGE,
    PASSAGE,
    Message,
    Passage,
    Receive,
    Scope,
    Send,
    is_turned_away,
    passage_of,
    started_now,
)
from tollkeeper.web.templates import RoutedCall
from tollkeeper.web.terms import Options, RouteOptions, Terms, application

__all__ = ["CHARGE", "RateLimit", "limited"]

P = ParamSpec("P")
R = TypeVar("R")

# Room for the "#2" of an endpoint's second limit.
_FOUND_LENGTH_MAX: Final = NAME_LENGTH_MAX - 8
_OVER: Final = frozenset({"lifespan.shutdown.complete", "lifespan.shutdown.failed"})


class RateLimit:
    """An ASGI application whose requests are limited.

    `app`, then what `Terms` says, by name: `limits`, `rules` or `limiter`, and how. The request's
    Charge is at `scope["tollkeeper.charge"]`. Headers about limits that the application sends by
    itself win over these.

    What was opened here is closed when the application has shut down (ASGI's lifespan).
    """

    def __init__(
        self,
        app: Any,
        limits: LimitsArgument | None = None,
        *,
        guard: AsyncGuard | None = None,
        **options: Unpack[Options],
    ) -> None:
        """`guard` is one that is already made, instead of limits and options."""
        self.app = application(app)
        self.guard = guard or AsyncGuard(Terms(limits=limits, **options).demand("RateLimit"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI says."""
        kind = scope["type"]
        if kind not in {"http", "websocket"}:
            await self.app(scope, receive, self._closing(send) if kind == "lifespan" else send)
            return
        if PASSAGE in scope and not scope[PASSAGE].has_answered:
            # Another of these is around this one: it has the headers and the answers. One that has
            # answered is not: whoever tries one application after another uses a scope again.
            await scope[PASSAGE].charge(self.guard, RoutedCall(scope, self.app))
            await self.app(scope, receive, send)
            return
        started = started_now(self.guard, scope, send)
        passage = started or Passage(self.guard, send)
        try:
            if started is None:
                scope[PASSAGE] = passage
                await passage.enter(RoutedCall(scope, self.app))
            elif not passage.is_plain and not passage.decision.allowed:
                passage.turn_away(self.guard, RoutedCall(scope, self.app))
            await self.app(scope, receive, passage.send)
        except GeneratorExit:
            raise  # the event loop is gone, and nothing can be awaited any more
        except BaseException as error:
            if not is_turned_away(error):
                if passage.turned is not None and isinstance(error, Exception):
                    # What was made of our own further in, such as by a dependency that yields: the
                    # client is told of its limit, and the application of its error.
                    await passage.finish(receive)
                else:
                    await passage.fail(error)
                raise
        if not passage.is_plain and (passage.turned is not None or not passage.is_settled):
            await passage.finish(receive)

    def _closing(self, send: Send) -> Send:
        async def close_and_send(message: Message) -> None:
            # Before it is told: a server may end the process at once.
            if message["type"] in _OVER:
                await self.guard.close()
            await send(message)

        return close_and_send


class _Decorator(Protocol):
    """What limits an endpoint. One that is not async runs in a thread, and becomes async."""

    @overload
    def __call__(
        self, function: Callable[P, Awaitable[R]], /
    ) -> Callable[P, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Callable[P, Coroutine[Any, Any, R]]: ...


def limited(
    limits: LimitsArgument, *, name: str = "", **options: Unpack[RouteOptions]
) -> _Decorator:
    """Limit one endpoint of Starlette's: a function or method of a request or WebSocket.

        @limited("5/second")
        async def search(request): ...

    It counts by itself, on the store of the RateLimit that is around the application, which also
    answers. `name` is what it is kept under, by default the function; with the same name several
    endpoints share one count. The rest is as of `Terms`, and by default as the RateLimit has it.
    """
    check_name("name", name)
    terms = Terms(limits=limits, **options)

    def decorate(function: Callable[..., Any], /) -> Callable[..., Coroutine[Any, Any, Any]]:
        if isinstance(function, type) or not callable(function):
            raise ConfigError(f"{show(function)} is not an endpoint; decorate a class's methods")
        found = name_of(function)[-_FOUND_LENGTH_MAX:]
        is_async = kind_of(function) != "plain"

        @wraps(function)
        async def charged(*args: Any, **kwargs: Any) -> Any:
            connection = _connection_of(args, kwargs)
            passage = passage_of(connection.scope)
            # Of several on one endpoint, each counts by itself.
            guard = passage.guard.beside(terms, name or passage.name_for(found))
            await passage.charge(guard, AsgiCall(connection.scope, connection))
            if is_async:
                return await function(*args, **kwargs)
            return await _in_thread(partial(function, *args, **kwargs))

        return charged

    return decorate


async def _in_thread(function: Callable[[], R]) -> R:
    """Run what is not async as Starlette would have: in one of its own threads."""
    from starlette.concurrency import run_in_threadpool  # noqa: PLC0415 - only endpoints need it

    return await run_in_threadpool(function)


def _connection_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The request or WebSocket among the arguments of an endpoint."""
    # From the right: the `self` of Starlette's classes, on the left, has a scope too.
    for value in reversed((*args, *kwargs.values())):
        if isinstance(getattr(value, "scope", None), MutableMapping):
            return value
    raise ConfigError(
        "a limited endpoint takes the request or the WebSocket as an argument; "
        "FastAPI's endpoints need none with dependencies=[limit(…)] of tollkeeper.fastapi"
    )
