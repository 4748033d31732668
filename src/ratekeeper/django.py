"""Rate limits for Django: a middleware for the whole site, a decorator for views. WSGI and ASGI.

    MIDDLEWARE = [..., "ratekeeper.django.RateLimitMiddleware", ...]
    RATEKEEPER = {"limits": "100/minute", "store": "shared:///run/site.limits"}

    @rate_limit("5/minute", key="session:user_id")
    def export(request): ...

The middleware charges a request before the rest of the site sees it. Put it after the middleware it
needs (sessions, for a key from the session) and before expensive work. The decorator works with or
without the middleware: the outermost of them adds the headers and settles (`web/charges.py`).

**Nothing blocks an event loop.** Under ASGI, code in the loop uses an AsyncLimiter; a sync view,
which Django runs in a thread, uses a Limiter. Both use one store. Under WSGI, Django runs each
async view in its own loop, which ends before the connections to a store do; there, a Limiter runs
in a thread beside the loop.

**Streaming.** The body of a response passes unchanged. Django calls `close` however the response
ended, and that settles the cost that was reported while the body was produced.

An endpoint is known by its route, `/users/<int:id>/`, also in the middleware, which asks Django's
resolver if the limits depend on it. A `re_path` is known without its expressions: `/users/<id>/`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final, Unpack

from ratekeeper.core.errors import ConfigError, RatekeeperError, show
from ratekeeper.core.model import check_name
from ratekeeper.core.steps import Call, Steps, Undo, asking, run, run_async
from ratekeeper.limiter import AsyncLimiter, Limiter
from ratekeeper.limiter.arguments import explains, name_of
from ratekeeper.web.answers import Denial, HttpAnswer
from ratekeeper.web.django_site import (
    DjangoCharges,
    DjangoWebRequest,
    for_threads_and_loops,
    site_enforcer,
    template_of,
)
from ratekeeper.web.enforcer import Charge, Enforcer
from ratekeeper.web.options import LimitsSource, RouteArguments, route_options_of
from ratekeeper.web.requests import WebRequest

try:
    from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
    from django.core import exceptions  # type: ignore[import-untyped]  # has none
    from django.core.handlers.asgi import ASGIRequest  # type: ignore[import-untyped]  # has none
    from django.http import Http404, HttpResponse  # type: ignore[import-untyped]  # has none
    from django.http.response import HttpResponseBase  # type: ignore[import-untyped]  # has none
    from django.views import View  # type: ignore[import-untyped]  # has none
except ImportError as error:
    raise ConfigError(
        f"limits for Django need Django ({error}); "
        f"install it with: pip install 'ratekeeper[django]'"
    ) from error

__all__ = [
    "Charge",
    "Denial",
    "LimiterUnavailable",
    "RateLimitExceeded",
    "RateLimitMiddleware",
    "WebRequest",
    "rate_limit",
]

_CHARGES: Final = "_ratekeeper_charges"
# Set on a request by the middleware, which answers the exceptions of denied views. Django asks it
# about the view of the route only, and not about `handler404` or a view that a middleware calls.
_HANDLES: Final = "_ratekeeper_handles"
# Exceptions of views, and the status that Django answers.
_STATUSES: Final = (
    (Http404, 404),
    (exceptions.PermissionDenied, 403),
    (exceptions.SuspiciousOperation, 400),
    (exceptions.BadRequest, 400),
)

_FOR_CLASSES: Final = 'for a class write @method_decorator(rate_limit(…), name="dispatch")'


class _DeniedView(RatekeeperError):
    def __init__(self, denial: Denial) -> None:
        super().__init__(denial.message)
        self.denial = denial
        """The denied request, as `on_limit` and `on_unavailable` get it."""


class RateLimitExceeded(_DeniedView):
    """A view was denied by a limit. Raised if the middleware, which answers it, is installed."""

    status_code = 429


class LimiterUnavailable(_DeniedView):
    """A view failed closed. Raised if the middleware, which answers it, is installed."""

    status_code = 503


_EXCEPTIONS: Final[dict[int, type[_DeniedView]]] = {
    429: RateLimitExceeded,
    503: LimiterUnavailable,
}


class RateLimitMiddleware:
    """Limits all requests of a site as `settings.RATEKEEPER` defines, and adds the headers.

    The setting is a dict of the options of `EnforcerOptions`, by their names.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self._get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)
        # Opened now, so that a wrong setting stops the start.
        site_enforcer().prepare(AsyncLimiter if self._is_async else Limiter)

    def __call__(self, request: Any) -> Any:
        """Serve a request, as Django defines it."""
        enforcer = site_enforcer()
        setattr(request, _HANDLES, True)
        respond = partial(self._get_response, request)
        steps = _serving(request, lambda _: enforcer, respond, self._is_async, is_view=False)
        return run_async(steps) if self._is_async else run(steps)

    def process_exception(self, request: Any, error: Exception) -> Any:
        """Answer a view that was denied, unless another middleware or a framework has done so."""
        if isinstance(error, _DeniedView):
            return _response_of(error.denial.answer)
        if hasattr(request, _HANDLES):
            delattr(request, _HANDLES)  # the view is over; a handler such as `handler404` follows
        return None


@explains("rate_limit(…)", 'rate_limit("5 in any minute", key="address")')
def rate_limit(
    limits: LimitsSource, *, name: str = "", **options: Unpack[RouteArguments]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Limit a view further, or a method with Django's `method_decorator`.

    `key`, `on_limit`, `on_unavailable` and `on_failure` default to those of
    settings.RATEKEEPER, which also names the store. Each route has its own count, and so has each
    decorated method of a class. Limits with the same `name` share one count.
    """
    check_name("name", name)
    route_options = for_threads_and_loops(
        route_options_of("rate_limit(…)", 'settings.RATEKEEPER = {{"{}": …}}', limits, options)
    )

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(view, type) or not callable(view):
            raise ConfigError(f"{show(view)} is not a function; {_FOR_CLASSES}")

        def steps(is_async: bool, request: Any, *args: Any, **kwargs: Any) -> Steps[Any]:
            if isinstance(request, View):
                raise ConfigError(f"{name_of(view)} is a method, with self first; {_FOR_CLASSES}")

            def enforcer_after(charges: DjangoCharges) -> Enforcer:
                count_name = name or charges.name_for(_name_of(request, view))
                match = request.resolver_match
                route = None if match is None else template_of(match.route)
                return site_enforcer().route_enforcer(route_options, count_name, route)

            respond = partial(view, request, *args, **kwargs)
            return _serving(request, enforcer_after, respond, is_async, is_view=True)

        if _is_async(view):

            @wraps(view)
            async def limited_async(*args: Any, **kwargs: Any) -> Any:
                return await run_async(steps(True, *args, **kwargs))

            return limited_async

        @wraps(view)
        def limited(*args: Any, **kwargs: Any) -> Any:
            return run(steps(False, *args, **kwargs))

        return limited

    return decorate


def _is_async(view: Callable[..., Any]) -> bool:
    """Return True if calling the view returns an awaitable."""
    if iscoroutinefunction(view):
        return True
    # The `dispatch` of a class with async methods is not async, but returns an awaitable.
    owner = _owner_of(view)
    return owner is not None and bool(owner.view_is_async)


def _owner_of(view: Callable[..., Any]) -> Any:
    """Return the View whose method this is; None for a function.

    `method_decorator` passes a partial around a method of the View to the decorator.
    """
    inner: Any = view
    while inner is not None:
        owner = getattr(getattr(inner, "func", None), "__self__", None)
        if isinstance(owner, View):
            return owner
        inner = getattr(inner, "__wrapped__", None)
    return None


def _name_of(request: Any, view: Callable[..., Any]) -> str:
    """Return the name of a view's count: its route, and the method of a class.

    In a test without routes it is the view's name.
    """
    match = request.resolver_match
    if match is None:
        return name_of(view)
    route, method = template_of(match.route), getattr(view, "__name__", "")
    if _owner_of(view) is None or method == "dispatch":
        return route
    return f"{method.upper()} {route}"


def _serving(
    request: Any,
    enforcer_after: Callable[[DjangoCharges], Enforcer],
    respond: Callable[[], Any],
    is_async: bool,
    *,
    is_view: bool,
) -> Steps[Any]:
    """Charge a request and respond to it; the outermost limit adds the headers and settles.

    `enforcer_after` returns the enforcer; its name may depend on the charges so far.
    """
    charges = getattr(request, _CHARGES, None)
    is_outermost = charges is None
    if charges is None:
        charges = DjangoCharges(site_enforcer())
        setattr(request, _CHARGES, charges)
    web_request = DjangoWebRequest(request)
    # Without ASGI, the loop is one that Django has made for this view.
    beside = is_async and not isinstance(request, ASGIRequest)
    if is_async and not beside:
        web_request.leave_session_unread()
    try:
        charging = charges.charging(enforcer_after(charges), web_request)
        denial = yield from _placed(charging, beside)
        request.charge = charges.last
        if is_view and isinstance(denial, Denial) and _is_handled(request):
            _raise(denial)
        response = (yield Call(respond)) if denial is None else _response_of(denial)
    except BaseException as error:
        if is_outermost:
            _fail(request, charges, error)
            yield from _placed(_settling(charges), beside)
        raise
    if is_outermost:
        _finish(request, charges, response)
        ended = not getattr(response, "streaming", False)
        yield from _placed(_settling(charges, ended=ended), beside)
    return response


def _placed(steps: Steps[Any], beside: bool) -> Steps[Any]:
    """Run steps here, or `beside` the loop, in the thread that waits for it."""
    return (yield Call(sync_to_async(run), steps)) if beside else (yield from steps)


def _settling(charges: DjangoCharges, *, ended: bool = True) -> Steps[None]:
    # An Undo is not lost if the task is cancelled, as when the client disconnects.
    yield Undo(asking, partial(charges.settling, ended=ended))


def _fail(request: Any, charges: DjangoCharges, error: BaseException) -> None:
    delattr(request, _CHARGES)
    charges.fail(error)
    # Django REST framework answers its own exceptions further out, with their status. A wrong
    # password that raises one must not pass as a 500.
    status = getattr(error, "status_code", None)
    if isinstance(error, Exception) and isinstance(status, int):
        charges.status = status
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            charges.status = status


def _finish(request: Any, charges: DjangoCharges, response: Any) -> None:
    """Add the headers, and settle again when a streaming response is closed."""
    delattr(request, _CHARGES)  # tests may serve the same request again
    if not isinstance(response, HttpResponseBase):
        return  # Django reports that
    charges.status = response.status_code
    for header, value in charges.headers_beside(response.headers):
        response.headers[header] = value
    if not response.streaming:
        return
    close = response.close

    def close_and_settle() -> None:
        try:
            close()
        finally:
            charges.settle()

    response.close = close_and_settle


def _is_handled(request: Any) -> bool:
    """Return True if Django passes an exception that is raised now to `process_exception`."""
    return hasattr(request, _HANDLES) and request.resolver_match is not None


def _raise(denial: Denial) -> None:
    """Raise the exception of a denial. A 403 of the deny list has none."""
    if denial.status in _EXCEPTIONS:
        raise _EXCEPTIONS[denial.status](denial)


def _response_of(denial: Any) -> Any:
    if isinstance(denial, Denial):
        denial = denial.answer
    if not isinstance(denial, HttpAnswer):
        return denial
    return HttpResponse(denial.body, status=denial.status, headers=dict(denial.headers))
