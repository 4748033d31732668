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
async view in its own loop; there, a Limiter runs in a thread beside the loop.

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
from ratekeeper.core.steps import Call, Steps, run, run_async
from ratekeeper.limiter.arguments import explains, name_of
from ratekeeper.web.answers import Denial, HttpAnswer
from ratekeeper.web.django_site import (
    SITE,
    DjangoCharges,
    DjangoWebRequest,
    for_threads,
    in_event_loop,
    note_override,
    override_count_of,
    site_limits,
    template_of,
)
from ratekeeper.web.enforcer import AsyncEnforcer, Charge, Enforcer
from ratekeeper.web.options import LimitsSource, RouteArguments, route_options_of
from ratekeeper.web.requests import WebRequest

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

Choose = Callable[[DjangoCharges], Any]
"""Returns the enforcer of a request. Its name may depend on the charges so far."""


class RateLimitExceeded(RatekeeperError):
    """A view was denied by a limit. Raised if the middleware, which answers it, is installed."""

    status_code = 429

    def __init__(self, denial: Denial) -> None:
        super().__init__(denial.message)
        self.denial = denial
        """The denied request, as `on_limit` gets it."""


class LimiterUnavailable(RatekeeperError):
    """A view failed closed. Raised if the middleware, which answers it, is installed."""

    status_code = 503

    def __init__(self, denial: Denial) -> None:
        super().__init__(denial.message)
        self.denial = denial
        """The denied request, as `on_unavailable` gets it."""


_EXCEPTIONS: Final[dict[int, type[RateLimitExceeded | LimiterUnavailable]]] = {
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
        _ = site_limits().async_enforcer if self._is_async else site_limits().enforcer

    def __call__(self, request: Any) -> Any:
        """Serve a request, as Django defines it."""
        limits, respond = site_limits(), partial(self._get_response, request)
        enforcer = limits.async_enforcer if self._is_async else limits.enforcer
        steps = _serve_steps(
            request, enforcer, lambda _: enforcer, respond, in_loop=self._is_async, is_view=False
        )
        return run_async(steps) if self._is_async else run(steps)

    def process_exception(self, request: Any, error: Exception) -> Any:
        """Answer a view that was denied, unless another middleware or a framework has done so."""
        if isinstance(error, RateLimitExceeded | LimiterUnavailable):
            return _response_of(error.denial.answer)
        if hasattr(request, _HANDLES):
            delattr(request, _HANDLES)  # the view is over; a handler such as `handler404` follows
        return None


@explains("rate_limit(…)", 'rate_limit("5 in any minute", key="address")')
def rate_limit(
    limits: LimitsSource, *, name: str = "", **options: Unpack[RouteArguments]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Limit a view further, or a method with Django's `method_decorator`.

    `key`, `skip`, `on_limit`, `on_unavailable` and `on_failure` default to those of
    settings.RATEKEEPER, which also names the store. Each route has its own count, and so has each
    decorated method of a class. Limits with the same `name` share one count.
    """
    check_name("name", name)
    route_options = route_options_of(
        "rate_limit(…)", 'settings.RATEKEEPER = {{"{}": …}}', limits, options
    )
    thread_options = for_threads(route_options)

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(view, type) or not callable(view):
            raise ConfigError(f"{show(view)} is not a function; {_FOR_CLASSES}")

        overrides = route_options.override_defaults

        def enforcers(request: Any) -> tuple[Any, Choose]:
            if isinstance(request, View):
                raise ConfigError(f"{name_of(view)} is a method, with self first; {_FOR_CLASSES}")
            # The async enforcer needs the loop of an ASGI server. A loop that Django makes for one
            # view ends before the connections to a store do.
            in_loop = in_event_loop() and isinstance(request, ASGIRequest)
            limits = site_limits()
            outer: Any = limits.async_enforcer if in_loop else limits.enforcer
            options = route_options if in_loop else thread_options

            def choose(charges: DjangoCharges) -> Any:
                count_name = name or charges.name_for(_name_of(request, view))
                match = request.resolver_match
                route = None if match is None else template_of(match.route)
                return outer.route_enforcer(options, count_name, route)

            return outer, choose

        if _is_async(view):

            @wraps(view)
            async def limited_async(request: Any, *args: Any, **kwargs: Any) -> Any:
                respond = partial(view, request, *args, **kwargs)
                steps = _serve_steps(
                    request, *enforcers(request), respond, in_loop=True, overrides=overrides
                )
                return await run_async(steps)

            if overrides:
                note_override(limited_async)
            return limited_async

        @wraps(view)
        def limited(request: Any, *args: Any, **kwargs: Any) -> Any:
            respond = partial(view, request, *args, **kwargs)
            steps = _serve_steps(
                request, *enforcers(request), respond, in_loop=False, overrides=overrides
            )
            return run(steps)

        if overrides:
            note_override(limited)
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


def _serve_steps(
    request: Any,
    outer: Enforcer | AsyncEnforcer,
    choose: Choose,
    respond: Callable[[], Any],
    *,
    in_loop: bool,
    is_view: bool = True,
    overrides: bool = False,
) -> Steps[Any]:
    """Charge a request and respond to it; the outermost limit adds the headers and settles.

    `in_loop` is True for a view or middleware that runs in an event loop. The middleware defers
    its limits to a view that `overrides` them (`web/overrides.py`).
    """
    can_defer = not is_view and outer.options.limits is not None
    defers = override_count_of(request) if can_defer else 0
    if not is_view:
        setattr(request, _HANDLES, True)
    charges, is_outermost = _charges_of(request, outer)
    deny = charges.denial_async if in_loop else charges.denial
    settle = charges.settle_shielded if in_loop else charges.settle
    try:
        denial = None
        if defers:
            charges.deferred[SITE] = defers
        else:
            denial = yield Call(deny, choose(charges), DjangoWebRequest(request))
        if overrides and charges.is_default_due(SITE, denial):
            denial = yield Call(deny, outer, DjangoWebRequest(request))
        request.charge = charges.last
        if is_view and isinstance(denial, Denial) and _is_handled(request):
            _raise(denial)
        response = (yield Call(respond)) if denial is None else _response_of(denial)
        if defers and charges.is_default_left(SITE):
            denial = yield Call(deny, outer, DjangoWebRequest(request))
            response = response if denial is None else _response_of(denial)
    except BaseException as error:
        if defers and charges.is_default_left(SITE):
            # Cancelled: a client must not avoid these limits by closing the connection.
            yield Call(deny, outer, DjangoWebRequest(request))
        if is_outermost:
            _fail(request, charges, error)
            yield Call(settle)
        raise
    if is_outermost:
        _finish(request, charges, response)
        yield Call(settle)
    return response


def _charges_of(request: Any, outer: Enforcer | AsyncEnforcer) -> tuple[DjangoCharges, bool]:
    """Return the request's charges, and True if they were made just now."""
    charges = getattr(request, _CHARGES, None)
    if charges is not None:
        return charges, False
    charges = DjangoCharges(outer)
    setattr(request, _CHARGES, charges)
    return charges, True


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
