"""A request as Django has it: what identity is read from, and what it was charged.

Django serves a request partly in the event loop and partly in threads, so a charge may be made in
one of them and settled in the other. `DjangoBill` settles each by the guard that made it, and never
blocks the loop: what is synchronous goes to a thread, and a thread hands what is async to the loop.

A session may be in a database, and Django refuses to read one in the event loop. Whoever asks for
it there finds a stand-in, which has the session read in a thread and the question asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from functools import lru_cache
from typing import Any, Final, NoReturn

from tollkeeper.core.errors import ConfigError
from tollkeeper.web.bill import Bill
from tollkeeper.web.calls import WsgiCall, quoted_path
from tollkeeper.web.charges import Charge
from tollkeeper.web.guard import AsyncGuard, Guard, Refused

try:
    from asgiref.sync import async_to_sync, sync_to_async
    from django.contrib.admindocs.utils import (  # type: ignore[import-untyped]  # has none
        replace_metacharacters,
        replace_named_groups,
        replace_unnamed_groups,
    )
    from django.urls import Resolver404, resolve  # type: ignore[import-untyped]  # has none
except ImportError as error:
    raise ConfigError(
        f"limits for Django need Django ({error}); "
        f"install it with: pip install 'tollkeeper[django]'"
    ) from error

# Routes whose text is kept; a site has about as many as it has views.
ROUTES_MAX: Final = 4_096


class _SessionWanted(Exception):
    """Somebody asked for the session in the event loop, where it cannot be read: it is I/O."""


class _UnreadSession(Mapping[str, Any]):
    """Stands for a session until it is wanted."""

    def __getitem__(self, name: str) -> NoReturn:
        raise _SessionWanted

    def __iter__(self) -> NoReturn:
        raise _SessionWanted

    def __len__(self) -> NoReturn:
        raise _SessionWanted


_UNREAD: Final = _UnreadSession()


class DjangoCall(WsgiCall):
    """A request as Django has it, under WSGI or ASGI."""

    __slots__ = ("_is_resolved", "_route")

    def __init__(self, request: Any) -> None:
        path = quoted_path(request.path.encode("utf-8", "surrogatepass"))
        super().__init__(request.META, request, getattr(request, "session", None), path=path)
        self._is_resolved = False

    def read_session(self) -> None:
        """Have the session read, if it has not been."""
        self.session = self.native.session
        self.native.session.keys()

    @property
    def route(self) -> str | None:
        """The route, whether or not Django has resolved it yet; None for a path that has none."""
        if not self._is_resolved:
            self._route = _route_of(self.native)
            self._is_resolved = True
        return self._route

    @route.setter
    def route(self, route: str | None) -> None:
        self._route = route


def _route_of(request: Any) -> str | None:
    match = request.resolver_match
    if match is None:
        try:
            match = resolve(request.path_info, getattr(request, "urlconf", None))
        except Resolver404:
            return None
    return template_of(match.route)


@lru_cache(ROUTES_MAX)
def template_of(route: str) -> str:
    """A route as rules write it.

    >>> template_of("users/<int:id>/"), template_of("api/^users/(?P<id>[0-9]+)/$")
    ('/users/<int:id>/', '/api/users/<id>/')
    """
    if any(sign in route for sign in "^$(\\"):
        route = replace_unnamed_groups(replace_named_groups(route))
        route = replace_metacharacters(route)
    return f"/{route.lstrip('/')}"


class DjangoBill(Bill):
    """The charges of one request, some made in threads and some in the event loop."""

    __slots__ = ()

    def settle(self) -> None:
        """Apply what the request has cost up to now, from code that is not async."""
        for guard, charge in self.unsettled():
            if isinstance(guard, AsyncGuard):
                run(guard.leave(charge, self.status))
            else:
                guard.leave(charge, self.status)

    async def settle_async(self) -> None:
        """The same from async code."""
        for guard, charge in self.unsettled():
            if isinstance(guard, AsyncGuard):
                await guard.leave(charge, self.status)
            else:
                await sync_to_async(guard.leave)(charge, self.status)

    async def settle_surely(self) -> None:
        """As `settle_async`, though the task is cancelled, as when a client hangs up meanwhile."""
        if any(isinstance(guard, AsyncGuard) for guard, _ in self.unsettled()):
            await asyncio.shield(self.settle_async())
        else:
            # Threads are not cancelled. And under WSGI, where all are for threads, this has to be
            # in the view's own task: by that, asgiref before 3.8 knows the thread that waits for
            # it, and from another it would wait for itself.
            await self.settle_async()

    async def refusal_async(self, guard: Guard | AsyncGuard, call: DjangoCall) -> Any:
        """As `refusal`, from async code: with an AsyncGuard here, with a Guard in a thread."""
        if isinstance(guard, Guard):
            return await sync_to_async(self.refusal)(guard, call)
        if call.session is not None:
            call.session = _UNREAD
        try:
            charge = await self._entered(guard, call)
        except Refused as refused:
            self.refund()
            await self.settle_async()
            return refused.answer
        if self.add(guard, charge):
            return None
        await self.settle_async()
        ruling = self.ruling
        response = await guard.response(call, ruling)
        return guard.refusal(ruling) if response is None else response

    async def _entered(self, guard: AsyncGuard, call: DjangoCall) -> Charge:
        try:
            return await guard.enter(call)
        except _SessionWanted:  # before anything was charged
            await sync_to_async(call.read_session)()
            return await guard.enter(call)


settling: Final[set[asyncio.Future[None]]] = set()  # until each is done: the loop keeps none


def run(leaving: Awaitable[None]) -> None:
    """Await something from code that is not async, wherever that runs."""

    async def left() -> None:
        await leaving

    if not in_event_loop():
        # A thread of Django's: this runs in the loop that waits for it.
        async_to_sync(left)()
        return
    task = asyncio.ensure_future(left())
    settling.add(task)
    task.add_done_callback(settling.discard)


def in_event_loop() -> bool:
    """Whether this thread is running one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
