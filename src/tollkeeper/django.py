"""Rate limits for Django: a middleware for all requests, a decorator for views. WSGI and ASGI.

    MIDDLEWARE = [..., "tollkeeper.django.RateLimitMiddleware", ...]
    TOLLKEEPER = {"limits": "100/minute", "store": "shared:///run/site.limits"}

    @rate_limit("5/minute", key="session:user_id")
    def export(request): ...

The middleware charges a request before the rest of the site sees it. It may stand anywhere: put it
after what it needs (the session's, for a key from there), before what is expensive. The decorator
works with it or by itself: whoever is outermost adds the headers and settles (see `bill.py`).

**Nothing blocks an event loop.** Under ASGI, what runs in the loop asks an AsyncLimiter; a
synchronous view, which Django runs in a thread, asks a Limiter. Both are on one store. Under WSGI,
Django gives each async view a loop for itself; there, a Limiter is asked in the thread beside it.

**Streaming.** A response is not looked at. Its `close`, which Django calls however it ended,
settles once more what was said while it was produced.

An endpoint is known by its route, `/users/<int:id>/`, also to the middleware: it asks Django's
resolver, if limits depend on it. A `re_path` is known without its expressions: `/users/<id>/`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import isawaitable
from typing import Any, Final, Unpack

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.model import check_name
from tollkeeper.core.rates import LimitsArgument
from tollkeeper.limiter.arguments import name_of
from tollkeeper.web.answers import Answer
from tollkeeper.web.charges import Charge
from tollkeeper.web.django_request import DjangoBill, DjangoCall, in_event_loop, template_of
from tollkeeper.web.django_site import desk, for_threads
from tollkeeper.web.guard import AsyncGuard, Guard, Terms
from tollkeeper.web.terms import RouteOptions

try:
    from asgiref.sync import iscoroutinefunction, markcoroutinefunction
    from django.core import exceptions  # type: ignore[import-untyped]  # has none
    from django.core.handlers.asgi import ASGIRequest  # type: ignore[import-untyped]  # has none
    from django.http import Http404, HttpResponse  # type: ignore[import-untyped]  # has none
    from django.http.response import HttpResponseBase  # type: ignore[import-untyped]  # has none
    from django.views import View  # type: ignore[import-untyped]  # has none
except ImportError as error:
    raise ConfigError(
        f"limits for Django need Django ({error}); "
        f"install it with: pip install 'tollkeeper[django]'"
    ) from error

__all__ = ["Charge", "RateLimitMiddleware", "rate_limit"]

_BILL: Final = "_tollkeeper_bill"
# What Django answers to these, where a view raises them.
_STATUSES: Final = (
    (Http404, 404),
    (exceptions.PermissionDenied, 403),
    (exceptions.SuspiciousOperation, 400),
    (exceptions.BadRequest, 400),
)

_FOR_CLASSES: Final = 'for a class write @method_decorator(rate_limit(…), name="dispatch")'

Chosen = Callable[[DjangoBill], Any]
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
        respond = partial(self._get_response, request)
        if self._is_async:
            guard = desk().async_guard
            return _serve_async(request, guard, lambda _: guard, respond)
        thread_guard = desk().guard
        return _serve(request, thread_guard, lambda _: thread_guard, respond)


def rate_limit(
    limits: LimitsArgument, *, name: str = "", **options: Unpack[RouteOptions]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a view, or a method with Django's `method_decorator`: further limits for it.

    `key`, `skip` and `on_limit` are those of settings.TOLLKEEPER unless said here, and so is the
    store. Each route counts by itself, and so does each method of a class that is decorated; with a
    `name`, all that have the same share one count.
    """
    check_name("name", name)
    terms = Terms(limits=limits, **options)
    thread_terms = for_threads(terms)

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(view, type) or not callable(view):
            raise ConfigError(f"{show(view)} is not a function; {_FOR_CLASSES}")

        def guards(request: Any) -> tuple[Any, Chosen]:
            if isinstance(request, View):
                raise ConfigError(f"{name_of(view)} is a method, with self first; {_FOR_CLASSES}")
            # In the loop of an ASGI server; a loop that Django made for one view is no home for
            # connections, which outlive it.
            in_loop = in_event_loop() and isinstance(request, ASGIRequest)
            outer: Any = desk().async_guard if in_loop else desk().guard
            own = terms if in_loop else thread_terms

            def chosen(bill: DjangoBill) -> Any:
                return outer.beside(own, name or bill.name_of(_name_of(request, view)))

            return outer, chosen

        if _is_async(view):

            @wraps(view)
            async def limited_async(request: Any, *args: Any, **kwargs: Any) -> Any:
                respond = partial(view, request, *args, **kwargs)
                return await _serve_async(request, *guards(request), respond)

            return limited_async

        @wraps(view)
        def limited(request: Any, *args: Any, **kwargs: Any) -> Any:
            respond = partial(view, request, *args, **kwargs)
            return _serve(request, *guards(request), respond)

        return limited

    return decorate


def _is_async(view: Callable[..., Any]) -> bool:
    """Whether calling a view gives something to await."""
    if iscoroutinefunction(view):
        return True
    # The `dispatch` of a class with async methods is not async itself, but returns what is.
    owner = _owner_of(view)
    return owner is not None and bool(owner.view_is_async)


def _owner_of(view: Callable[..., Any]) -> Any:
    """The view as a class whose method this is; None for a function.

    What `method_decorator` hands to a decorator is a partial, around a method of the view.
    """
    inner: Any = view
    while inner is not None:
        owner = getattr(getattr(inner, "func", None), "__self__", None)
        if isinstance(owner, View):
            return owner
        inner = getattr(inner, "__wrapped__", None)
    return None


def _name_of(request: Any, view: Callable[..., Any]) -> str:
    """What a view's count is kept under: its route, and which of a class's methods it is.

    In a test without routes it is the view's name.
    """
    match = request.resolver_match
    if match is None:
        return name_of(view)
    route, method = template_of(match.route), getattr(view, "__name__", "")
    if _owner_of(view) is None or method == "dispatch":
        return route
    return f"{method.upper()} {route}"


def _serve(request: Any, outer: Guard, chosen: Chosen, respond: Callable[[], Any]) -> Any:
    """Charge a request, have it answered, and, where nobody outside does, finish it."""
    bill, is_outermost = _bill_of(request, outer)
    try:
        refusal = bill.refusal(chosen(bill), DjangoCall(request))
        request.charge = bill.charge
        response = respond() if refusal is None else _response_of(refusal)
    except BaseException as error:
        if is_outermost:
            _fail(request, bill, error)
            bill.settle()
        raise
    if is_outermost:
        _finish(request, bill, response)
        bill.settle()
    return response


async def _serve_async(
    request: Any, outer: Guard | AsyncGuard, chosen: Chosen, respond: Callable[[], Any]
) -> Any:
    """The same in the event loop."""
    bill, is_outermost = _bill_of(request, outer)
    try:
        refusal = await bill.refusal_async(chosen(bill), DjangoCall(request))
        request.charge = bill.charge
        response = respond() if refusal is None else _response_of(refusal)
        if isawaitable(response):
            response = await response
    except BaseException as error:
        if is_outermost:
            _fail(request, bill, error)
            await bill.settle_surely()
        raise
    if is_outermost:
        _finish(request, bill, response)
        await bill.settle_surely()
    return response


def _bill_of(request: Any, outer: Guard | AsyncGuard) -> tuple[DjangoBill, bool]:
    """The request's bill, and whether it was made just now."""
    bill = getattr(request, _BILL, None)
    if bill is not None:
        return bill, False
    bill = DjangoBill(outer)
    setattr(request, _BILL, bill)
    return bill, True


def _fail(request: Any, bill: DjangoBill, error: BaseException) -> None:
    delattr(request, _BILL)
    bill.fail(error)
    # A REST framework answers its own exceptions further out, with the status that they have. A
    # guess that is refused by one is not let off with a 500.
    status = getattr(error, "status_code", None)
    if isinstance(error, Exception) and isinstance(status, int):
        bill.status = status
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            bill.status = status


def _finish(request: Any, bill: DjangoBill, response: Any) -> None:
    """Add the headers, and see to it that what a stream says of its cost is heard."""
    delattr(request, _BILL)  # who serves the same request again, as tests do, begins a new one
    if not isinstance(response, HttpResponseBase):
        return  # Django explains that better
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
