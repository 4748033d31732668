"""Rate limits for any WSGI application, as a middleware.

    app = RateLimit(app, limits="100/minute")

A request is charged before the application runs. A denied request is answered here with a 429 and
problem JSON. All others pass, and their responses get headers when the application calls
`start_response`. Bodies pass unchanged: a list, or a file for the server's `wsgi.file_wrapper`, is
returned as it is; anything else is iterated on demand, to notice its end.

The environ holds the request's charges (`web/charges.py`). Another RateLimit, or a framework's
decorator, adds its charges there.

**Settling.** The final cost is applied when the application has returned its response, and once
more at the end of the body, for a cost that is reported while the body is produced. The first time
is before the client sees any of the response: on every worker, the outcome of a login is settled
before the client's next request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from http.client import responses
from typing import Any, Unpack

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.steps import run
from ratekeeper.limiter import Limiter
from ratekeeper.limiter.arguments import explains
from ratekeeper.web.answers import Denial, Header, HttpAnswer
from ratekeeper.web.charges import CHARGE, CHARGES, RequestCharges
from ratekeeper.web.enforcer import Charge, Enforcer
from ratekeeper.web.options import (
    LimitsSource,
    OptionArguments,
    checked_application,
    options_of,
)
from ratekeeper.web.requests import WebRequest, WsgiRequest

__all__ = ["Charge", "Denial", "RateLimit", "WebRequest"]

Environ = MutableMapping[str, Any]
StartResponse = Callable[..., Callable[[bytes], object]]
WsgiApp = Callable[[Any, Any], Iterable[bytes]]


class RateLimit:
    """A WSGI application whose requests are limited.

    Takes `app`, its limits (or `rules`, or a `limiter`), and the options of `EnforcerOptions` by
    name. The request's Charge is at `environ["ratekeeper.charge"]`. `on_limit` and `on_unavailable`
    return a WSGI application. If the application sends headers about limits itself, those win.
    """

    @explains("RateLimit(…)", 'RateLimit(app, "100/minute", store="redis://localhost")')
    def __init__(
        self, app: WsgiApp, limits: LimitsSource | None = None, **options: Unpack[OptionArguments]
    ) -> None:
        self.app: WsgiApp = checked_application(app)
        given = options_of("RateLimit(…)", {"limits": limits, **options})
        self.enforcer = Enforcer(given.require_limits("RateLimit"), Limiter)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request, as WSGI defines it."""
        return serve_charged(environ, start_response, self.enforcer, self._limited)

    def _limited(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        charges: RequestCharges = environ[CHARGES]
        denial = run(charges.charging(self.enforcer, WsgiRequest(environ)))
        environ[CHARGE] = charges.last
        app = self.app if denial is None else _app_of(denial)
        return app(environ, start_response)

    def close(self) -> None:
        """Close the store and the limiter that this opened."""
        self.enforcer.close()


def serve_charged(
    environ: Environ, start_response: StartResponse, enforcer: Enforcer, app: WsgiApp
) -> Iterable[bytes]:
    """Run an application with RequestCharges: add the headers and settle the cost."""
    if CHARGES in environ and environ[CHARGES].status is None:
        return app(environ, start_response)  # another RateLimit wraps this one
    # If the charges already have a status, the environ is being reused for another application.
    charges = environ[CHARGES] = RequestCharges(enforcer)

    def start(
        status: str, headers: list[Header], exc_info: Any = None
    ) -> Callable[[bytes], object]:
        charges.status = _number(status)
        headers = [*headers, *charges.headers_beside(name for name, _ in headers)]
        if exc_info is None:
            return start_response(status, headers)
        return start_response(status, headers, exc_info)

    try:
        body = app(environ, start)
    except BaseException as error:
        charges.fail(error)
        charges.settle()
        raise
    if charges.status is None:  # a generator that has not started yet
        return _ChargedBody(body, charges)
    is_complete = _is_complete(body, environ)
    charges.settle(ended=is_complete)
    return body if is_complete else _ChargedBody(body, charges)


def _number(status: str) -> int | None:
    try:
        return int(status[:3])
    except ValueError:
        return None  # not a status; the server reports it


def _is_complete(body: Iterable[bytes], environ: Environ) -> bool:
    """Return True if no code of the application runs while the body is sent."""
    if isinstance(body, list | tuple):
        return True
    wrapper = environ.get("wsgi.file_wrapper")
    return isinstance(wrapper, type) and isinstance(body, wrapper)


class _ChargedBody:
    """The body of an application's response; settles the charges at its end."""

    __slots__ = ("_body", "_charges", "_has_sent", "_has_started", "_iterator")

    def __init__(self, body: Iterable[bytes], charges: RequestCharges) -> None:
        self._body = body
        self._charges = charges
        self._iterator: Iterator[bytes] | None = None
        self._has_started = charges.status is not None
        self._has_sent = False

    def __iter__(self) -> Iterator[bytes]:
        self._iterator = iter(self._body)
        return self

    def __next__(self) -> bytes:
        if self._iterator is None:
            self._iterator = iter(self._body)
        try:
            piece = next(self._iterator)
        except StopIteration:
            self._charges.settle()  # before the server ends the response
            raise
        except BaseException as error:
            if not self._has_sent:  # a status that was sent is the outcome, even if the body fails
                self._charges.fail(error)
            raise
        self._has_sent = True
        if not self._has_started and self._charges.status is not None:
            self._has_started = True
            self._charges.settle(ended=False)  # before the client sees any of the response
        return piece

    def close(self) -> None:
        """Settle the charges. The server calls this however the response ended."""
        try:
            closing = getattr(self._body, "close", None)
            if closing is not None:
                closing()
        finally:
            self._charges.settle()


def _app_of(response: Any) -> WsgiApp:
    if isinstance(response, Denial):
        return _answering(response.answer)
    if isinstance(response, HttpAnswer):
        return _answering(response)
    if callable(response):
        found: WsgiApp = response
        return found
    raise ConfigError(
        f"on_limit or on_unavailable returned {show(response)}; return a WSGI application or None"
    )


def _answering(answer: HttpAnswer) -> WsgiApp:
    """Return a WSGI application that sends one answer."""

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        headers = [*answer.headers, ("Content-Length", str(len(answer.body)))]
        start_response(f"{answer.status} {responses.get(answer.status, 'Denied')}", headers)
        return [] if environ.get("REQUEST_METHOD") == "HEAD" else [answer.body]

    return app
