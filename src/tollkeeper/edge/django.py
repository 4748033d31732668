"""Rate limits for Django: a middleware for all requests, a decorator for views. WSGI and ASGI.

    MIDDLEWARE = [..., "tollkeeper.edge.django.RateLimitMiddleware", ...]
    TOLLKEEPER = {"limits": "100/minute", "store": "shared:///run/site.limits"}

    @rate_limit("5/minute", key="session:user_id")
    def export(request): ...

The middleware charges a request before the rest of the site sees it. It may stand anywhere: put it
after what it needs (the session's, for a key from there), before what is expensive. The decorator
works with it or by itself: whoever is outermost adds the headers and settles (see `wsgi.Bill`).

**Nothing blocks an event loop.** Under ASGI, what runs in the loop asks an AsyncLimiter; a
synchronous view, which Django runs in a thread, asks a Limiter. Both are on one store. Under WSGI,
Django gives each async view a loop for itself; there, a Limiter is asked in the thread beside it.

**Streaming.** A response is not looked at. Its `close`, which Django calls however it ended,
settles once more what was said while it was produced.

An endpoint is known by its route, `/users/<int:id>/`, also to the middleware: it asks Django's
resolver, if limits depend on it. A `re_path` is known without its expressions: `/users/<id>/`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields, replace
from functools import lru_cache, wraps
from inspect import isawaitable
from typing import Any, Final, NoReturn, Unpack

from tollkeeper.arguments import Limits, clock_of, name_of
from tollkeeper.decide.store import Store
from tollkeeper.decide.stores import open_store
from tollkeeper.edge.answers import Answer
from tollkeeper.edge.calls import WsgiCall, quoted_path
from tollkeeper.edge.charges import Charge
from tollkeeper.edge.guard import AsyncGuard, Guard, Refused, Terms
from tollkeeper.edge.wsgi import Bill, RouteOptions
from tollkeeper.errors import ConfigError, show
from tollkeeper.model import check_name

try:
    from asgiref.sync import (
        async_to_sync,
        iscoroutinefunction,
        markcoroutinefunction,
        sync_to_async,
    )
    from django import conf  # type: ignore[import-untyped]  # has none
    from django.contrib.admindocs.utils import (  # type: ignore[import-untyped]  # has none
        replace_metacharacters,
        replace_named_groups,
        replace_unnamed_groups,
    )
    from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation  # type: ignore[import-untyped]  # has none
    from django.core.handlers.asgi import ASGIRequest  # type: ignore[import-untyped]  # has none
    from django.core.signals import setting_changed  # type: ignore[import-untyped]  # has none
    from django.http import Http404, HttpResponse  # type: ignore[import-untyped]  # has none
    from django.urls import Resolver404, resolve  # type: ignore[import-untyped]  # has none
    from django.utils.module_loading import import_string  # type: ignore[import-untyped]  # has none
    from django.views import View  # type: ignore[import-untyped]  # has none
except ImportError as error:
    raise ConfigError(
        f"tollkeeper.edge.django needs Django ({error}); "
        f"install it with: pip install 'tollkeeper[django]'"
    ) from error

__all__ = ["Charge", "RateLimitMiddleware", "rate_limit"]

SETTING: Final = "TOLLKEEPER"
# A site has limits or rules; a limiter could be for threads or for asyncio, but not for both.
NAMES: Final = tuple(field.name for field in fields(Terms) if field.name != "limiter")
# Functions may be named by where they are, as Django's own settings do.
HOOKS: Final = ("key", "cost", "skip", "on_limit", "count")
# Routes whose text is kept; a site has about as many as it has views.
ROUTES_MAX: Final = 4_096

_BILL: Final = "_tollkeeper_bill"
# What Django answers to these, where a view raises them.
_STATUSES: Final = (
    (Http404, 404),
    (PermissionDenied, 403),
    (SuspiciousOperation, 400),
    (BadRequest, 400),
)


# ── What the settings say ──────────────────────────────────────────────────────────────────────


class _Desk:
    """The site's limits, opened when they are first asked: one store, a guard for either kind."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._guard: Guard | None = None
        self._async_guard: AsyncGuard | None = None

    @property
    def guard(self) -> Guard:
        """For threads."""
        if self._guard is None:
            with self._lock:
                self._guard = self._guard or Guard(self._on_store())
        return self._guard

    @property
    def async_guard(self) -> AsyncGuard:
        """For the event loop."""
        if self._async_guard is None:
            with self._lock:
                self._async_guard = self._async_guard or AsyncGuard(self._on_store())
        return self._async_guard

    def _on_store(self) -> Terms:
        if not isinstance(self.terms.store, str):
            return self.terms
        if self._store is None:
            self._store = open_store(self.terms.store, clock_of(self.terms.clock))
        return replace(self.terms, store=self._store)

    def close(self) -> None:
        with self._lock:
            if self._guard is not None:
                self._guard.close()
            if self._async_guard is not None:
                _run(self._async_guard.close())
            if self._store is not None:
                self._store.close()
            self._store = self._guard = self._async_guard = None


_desks: Final[list[_Desk]] = []  # one, or none until it is asked for
_desks_lock: Final = threading.Lock()


def desk() -> _Desk:
    """The site's limits as settings.TOLLKEEPER says. Raises ConfigError."""
    with _desks_lock:
        if not _desks:
            _desks.append(_Desk(terms_of(getattr(conf.settings, SETTING, {}))))
        return _desks[0]


def terms_of(setting: object) -> Terms:
    """The terms that a setting stands for."""
    example = f'{SETTING} = {{"limits": "100/minute", "store": "shared:///run/site.limits"}}'
    if not isinstance(setting, Mapping):
        raise ConfigError(
            f"settings.{SETTING}={show(setting)} is not a dict; for example {example}"
        )
    wrong = sorted(str(name) for name in setting if name not in NAMES)
    if wrong:
        raise ConfigError(
            f"settings.{SETTING} has {', '.join(wrong)}; it can have {', '.join(NAMES)}"
        )
    try:
        return Terms(**{name: _loaded(name, value) for name, value in setting.items()})
    except ConfigError as error:
        raise ConfigError(f"settings.{SETTING}: {error}") from error


def _loaded(name: str, value: Any) -> Any:
    """A function that the setting names by its path; everything else is as it stands."""
    if name not in HOOKS or not isinstance(value, str) or ":" in value or "." not in value:
        return value
    try:
        return import_string(value)
    except ImportError as error:
        raise ConfigError(f"{name}={show(value)} cannot be imported: {error}") from error


def _forget(*, setting: str, **_: object) -> None:
    """After `override_settings` in a test, the next request reads the setting again."""
    if setting == SETTING:
        with _desks_lock:
            closing = [_desks.pop() for _ in range(len(_desks))]
        for each in closing:
            each.close()


setting_changed.connect(_forget, dispatch_uid="tollkeeper")


# ── A request ──────────────────────────────────────────────────────────────────────────────────


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
    return _template(match.route)


@lru_cache(ROUTES_MAX)
def _template(route: str) -> str:
    """A route as rules write it.

    >>> _template("users/<int:id>/"), _template("api/^users/(?P<id>[0-9]+)/$")
    ('/users/<int:id>/', '/api/users/<id>/')
    """
    if any(sign in route for sign in "^$(\\"):
        route = replace_unnamed_groups(replace_named_groups(route))
        route = replace_metacharacters(route)
    return f"/{route.lstrip('/')}"


class _Bill(Bill):
    """The charges of one request, some made in threads and some in the event loop."""

    __slots__ = ()

    def settle(self) -> None:
        for guard, charge in self.unsettled():
            if isinstance(guard, AsyncGuard):
                _run(guard.leave(charge, self.status))
            else:
                guard.leave(charge, self.status)

    async def settle_async(self) -> None:
        for guard, charge in self.unsettled():
            if isinstance(guard, AsyncGuard):
                await guard.leave(charge, self.status)
            else:
                await sync_to_async(guard.leave)(charge, self.status)

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


_settling: Final[set[asyncio.Future[None]]] = set()  # until each is done: the loop keeps none


def _run(leaving: Awaitable[None]) -> None:
    """Await something from code that is not async, wherever that runs."""

    async def left() -> None:
        await leaving

    if not _in_event_loop():
        # A thread of Django's: this runs in the loop that waits for it.
        async_to_sync(left)()
        return
    task = asyncio.ensure_future(left())
    _settling.add(task)
    task.add_done_callback(_settling.discard)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# ── The middleware and the decorator ───────────────────────────────────────────────────────────

Chosen = Callable[[_Bill], Any]
"""The guard that a request is charged by, whose name may depend on what is on the bill."""


class RateLimitMiddleware:
    """Limits all requests of a site as settings.TOLLKEEPER says, and adds the headers."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self._get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)
        # Opened now, so that a mistake stops the start and not a request.
        _ = desk().async_guard if self._is_async else desk().guard

    def __call__(self, request: Any) -> Any:
        """Serve a request, as Django says."""
        if self._is_async:
            guard = desk().async_guard
            return _serve_async(request, guard, lambda _: guard, self._get_response)
        sync_guard = desk().guard
        return _serve(request, sync_guard, lambda _: sync_guard, self._get_response)


def rate_limit(
    limits: Limits, *, name: str = "", **options: Unpack[RouteOptions]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a view, or a method with Django's `method_decorator`: further limits for it.

    `key`, `skip` and `on_limit` are those of settings.TOLLKEEPER unless said here, and so is the
    store. Each route counts by itself; with a `name`, all that have the same share one count.
    """
    check_name("name", name)
    terms = Terms(limits=limits, **options)

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        def guards(request: Any) -> tuple[Any, Chosen]:
            # In the loop of an ASGI server; a loop that Django made for one view is no home for
            # connections, which outlive it.
            in_loop = _in_event_loop() and isinstance(request, ASGIRequest)
            outer = desk().async_guard if in_loop else desk().guard

            def chosen(bill: _Bill) -> Any:
                return outer.beside(terms, name or bill.name_of(_name_of(request, view)))

            return outer, chosen

        if _is_async(view):

            @wraps(view)
            async def limited_async(request: Any, *args: Any, **kwargs: Any) -> Any:
                called = lambda request: view(request, *args, **kwargs)  # noqa: E731 - one line
                return await _serve_async(request, *guards(request), called)

            return limited_async

        @wraps(view)
        def limited(request: Any, *args: Any, **kwargs: Any) -> Any:
            called = lambda request: view(request, *args, **kwargs)  # noqa: E731 - one line
            return _serve(request, *guards(request), called)

        return limited

    return decorate


def _is_async(view: Callable[..., Any]) -> bool:
    """Whether calling a view gives something to await."""
    if iscoroutinefunction(view):
        return True
    # The `dispatch` of a class with async methods is not async itself, but returns what is. What
    # `method_decorator` hands to a decorator is a partial, around a method of the view.
    inner: Any = view
    while inner is not None:
        owner = getattr(getattr(inner, "func", None), "__self__", None)
        if isinstance(owner, View):
            return bool(owner.view_is_async)
        inner = getattr(inner, "__wrapped__", None)
    return False


def _name_of(request: Any, view: Callable[..., Any]) -> str:
    """What a view's count is kept under: its route, or in a test without routes its name."""
    match = request.resolver_match
    return name_of(view) if match is None else _template(match.route)


def _serve(request: Any, outer: Guard, chosen: Chosen, respond: Callable[[Any], Any]) -> Any:
    """Charge a request, have it answered, and, where nobody outside does, finish it."""
    bill, is_outermost = _bill_of(request, outer)
    try:
        refusal = bill.refusal(chosen(bill), DjangoCall(request))
        request.charge = bill.charge
        response = respond(request) if refusal is None else _response_of(refusal)
    except BaseException as error:
        if is_outermost:
            _fail(bill, error)
            bill.settle()
        raise
    if is_outermost:
        _finish(bill, response)
        bill.settle()
    return response


async def _serve_async(
    request: Any, outer: Guard | AsyncGuard, chosen: Chosen, respond: Callable[[Any], Any]
) -> Any:
    """The same in the event loop."""
    bill, is_outermost = _bill_of(request, outer)
    try:
        refusal = await bill.refusal_async(chosen(bill), DjangoCall(request))
        request.charge = bill.charge
        response = respond(request) if refusal is None else _response_of(refusal)
        if isawaitable(response):
            response = await response
    except BaseException as error:
        if is_outermost:
            _fail(bill, error)
            # Shielded: a task that is cancelled may be so again at its next step.
            await asyncio.shield(bill.settle_async())
        raise
    if is_outermost:
        _finish(bill, response)
        await bill.settle_async()
    return response


def _bill_of(request: Any, outer: Guard | AsyncGuard) -> tuple[_Bill, bool]:
    """The request's bill, and whether it was made just now."""
    bill = getattr(request, _BILL, None)
    if bill is not None:
        return bill, False
    bill = _Bill(outer)
    setattr(request, _BILL, bill)
    return bill, True


def _fail(bill: _Bill, error: BaseException) -> None:
    bill.fail(error)
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            bill.status = status


def _finish(bill: _Bill, response: Any) -> None:
    """Add the headers, and see to it that what a stream says of its cost is heard."""
    bill.status = response.status_code
    for header, value in bill.headers_beside(response.headers):
        response.headers[header] = value
    if not response.streaming:
        return
    close = response.close

    def close_and_settle() -> None:
        try:
            close()
        finally:
            bill.settle()

    response.close = close_and_settle


def _response_of(refusal: Any) -> Any:
    if not isinstance(refusal, Answer):
        return refusal
    return HttpResponse(refusal.body, status=refusal.status, headers=dict(refusal.headers))
