"""Rate limits for any ASGI application, as a middleware.

    app.add_middleware(RateLimit, limits="100/minute")        # Starlette, FastAPI
    app = RateLimit(app, limits="100/minute")                 # everything else

A request is charged before the application runs. A denied request is answered here with a 429 and
problem JSON. A denied WebSocket gets the same answer if the server can send it, otherwise it is
closed with code 1008 before it is accepted. All other requests pass, and their responses get
headers when they start. Bodies, streams, trailers and files pass unchanged.

`limited` decorates single endpoints of Starlette.

`web/charges.py` has the logic of one request. There is no thread, and no task for a request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Final, ParamSpec, Protocol, TypeVar, Unpack, overload

from ratekeeper.core.errors import ConfigError, StoreError, show
from ratekeeper.core.model import check_name
from ratekeeper.decide.store import probe
from ratekeeper.limiter import AsyncLimiter
from ratekeeper.limiter.arguments import explains, kind_of, name_of
from ratekeeper.web.answers import Denial
from ratekeeper.web.charges import (
    CHARGE,
    CHARGES,
    AsgiCharges,
    Message,
    Receive,
    Scope,
    Send,
    charges_of,
    enforcer_of_route,
    is_request_denied,
)
from ratekeeper.web.enforcer import Charge, Enforcer
from ratekeeper.web.handlers import LimiterUnavailable, RateLimitExceeded
from ratekeeper.web.options import (
    LimitsSource,
    OptionArguments,
    RouteArguments,
    checked_application,
    options_of,
    route_options_of,
)
from ratekeeper.web.requests import AsgiRequest, RoutedAsgiRequest, WebRequest

__all__ = [
    "CHARGE",
    "Charge",
    "Denial",
    "LimiterUnavailable",
    "RateLimit",
    "RateLimitExceeded",
    "WebRequest",
    "limited",
]

P = ParamSpec("P")
R = TypeVar("R")

_STARTED: Final = "lifespan.startup.complete"
_SHUTDOWN: Final = frozenset({"lifespan.shutdown.complete", "lifespan.shutdown.failed"})


class RateLimit:
    """An ASGI application whose requests are limited.

    Takes `app`, then the options of `EnforcerOptions` by name: `limits`, `rules` or `limiter`, and
    others. The request's Charge is at `scope["ratekeeper.charge"]`. If the application sends
    headers about limits itself, those win.

    With ASGI's lifespan, the store is connected when the application starts, and the store and the
    limiter are closed when it has shut down.
    """

    @explains("RateLimit(…)", 'RateLimit(app, "100/minute", store="redis://localhost")')
    def __init__(
        self,
        app: Any,
        limits: LimitsSource | None = None,
        *,
        enforcer: Enforcer | None = None,
        **options: Unpack[OptionArguments],
    ) -> None:
        """Use `enforcer`, if one already exists, instead of limits and options."""
        self.app = checked_application(app)
        given = options_of("RateLimit(…)", {"limits": limits, **options})
        self.enforcer = enforcer or Enforcer(given.require_limits("RateLimit"), AsyncLimiter)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI defines it."""
        kind = scope["type"]
        if kind not in {"http", "websocket"}:
            await self.app(
                scope, receive, self._opening_and_closing(send) if kind == "lifespan" else send
            )
            return
        if CHARGES in scope and scope[CHARGES].status is None:
            # Another RateLimit wraps this one, and sends the headers and answers. If its response
            # has already started, the scope is being reused for another application.
            await scope[CHARGES].charge(self.enforcer, RoutedAsgiRequest(scope, self.app))
            await self.app(scope, receive, send)
            return
        charges = scope[CHARGES] = AsgiCharges(self.enforcer, send)
        try:
            if not charges.charge_peer(scope, self.app):
                await charges.charge(self.enforcer, RoutedAsgiRequest(scope, self.app))
            await self.app(scope, receive, charges.send)
        except GeneratorExit:
            raise  # the event loop is gone, and nothing can be awaited
        except BaseException as error:
            if charges.denied is None or not isinstance(error, Exception):
                await charges.settle_failure(error)
                raise
            if not is_request_denied(error):
                # The application raised another error because of the denial, for example in a
                # dependency that yields. The client gets its 429, the application its error.
                await charges.finish(receive)
                raise
        if charges.denied is not None:
            await charges.finish(receive)
            return
        for charge in charges.made:  # `is_settled`, without the call
            if not charge.is_settled:
                await charges.finish(receive)
                return

    def _opening_and_closing(self, send: Send) -> Send:
        async def prepare_and_send(message: Message) -> None:
            if message["type"] == _STARTED:
                # The first request would wait for the connection. Without a store, the application
                # starts all the same.
                with suppress(StoreError):
                    await probe(self.enforcer.store)
            # Close first: the server may end the process as soon as it gets the message.
            if message["type"] in _SHUTDOWN:
                await self.enforcer.aclose()
            await send(message)

        return prepare_and_send


class _Decorator(Protocol):
    """Limits an endpoint. An endpoint that is not async runs in a thread and becomes async."""

    @overload
    def __call__(
        self, function: Callable[P, Awaitable[R]], /
    ) -> Callable[P, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Callable[P, Coroutine[Any, Any, R]]: ...


@explains("limited(…)", 'limited("5 in any minute", key="address")')
def limited(
    limits: LimitsSource, *, name: str = "", **options: Unpack[RouteArguments]
) -> _Decorator:
    """Limit one endpoint of Starlette: a function or method that takes a request or a WebSocket.

        @limited("5/second")
        async def search(request): ...

    The endpoint has its own count, on the store of the RateLimit that wraps the application, which
    also answers. `name` is the name of the count, by default that of the function; endpoints with
    the same name share one count. `RouteArguments` lists the options, and `EnforcerOptions`
    describes them; by default they are those of the RateLimit.
    """
    check_name("name", name)
    route_options = route_options_of("limited(…)", "RateLimit(app, {}=…)", limits, options)

    def decorate(function: Callable[..., Any], /) -> Callable[..., Coroutine[Any, Any, Any]]:
        if isinstance(function, type) or not callable(function):
            raise ConfigError(f"{show(function)} is not an endpoint; decorate a class's methods")
        function_name = name_of(function)
        is_async = kind_of(function) != "plain"

        @wraps(function)
        async def charged(*args: Any, **kwargs: Any) -> Any:
            connection = _connection_of(args, kwargs)
            charges = charges_of(connection.scope)
            # If an endpoint has several limits, each has its own count.
            count_name = name or charges.name_for(function_name)
            request = AsgiRequest(connection.scope, connection)
            key = route_options, count_name
            enforcer = enforcer_of_route(charges.enforcer, key, request, lambda: count_name)
            await charges.charge(enforcer, request)
            if is_async:
                return await function(*args, **kwargs)
            return await _in_thread(partial(function, *args, **kwargs))

        return charged

    return decorate


async def _in_thread(function: Callable[[], R]) -> R:
    """Run a function that is not async in a thread of Starlette's pool, as Starlette does."""
    from starlette.concurrency import run_in_threadpool  # noqa: PLC0415 - only endpoints need it

    return await run_in_threadpool(function)


def _connection_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the request or WebSocket among the arguments of an endpoint."""
    # From the right: the `self` of Starlette's endpoint classes, on the left, has a scope too.
    for value in reversed((*args, *kwargs.values())):
        if isinstance(getattr(value, "scope", None), MutableMapping):
            return value
    raise ConfigError(
        "a limited endpoint must take the request or the WebSocket as an argument; "
        "FastAPI's endpoints need neither with dependencies=[limit(…)] of ratekeeper.fastapi"
    )
