"""Rate limits for any WSGI application, as a middleware.

    app = RateLimit(app, limits="100/minute")

A request is charged before the application runs, and one that is denied is answered here, with a
429 and problem JSON. All others pass, and their responses get headers where `start_response` is
called. Bodies go through as they are: what the application returns is handed on itself (a list, a
file for the server's `wsgi.file_wrapper`), or iterated without looking at it, for its end.

A request's bill (`bill.py`) is in the environ: another of these, or a framework's decorator, puts
its charges on that.

**Settling.** What a request cost is applied when the application has returned its response, and
what is said while a body is produced once more at its end. The first is before the client has seen
anything of the response: whichever worker it asks next, the outcome of a login is settled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from http.client import responses
from typing import Any, Final, Unpack

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.rates import LimitsArgument
from tollkeeper.web.answers import Answer
from tollkeeper.web.bill import Bill, Header
from tollkeeper.web.calls import WsgiCall
from tollkeeper.web.guard import Guard, Options, Terms
from tollkeeper.web.terms import application, plain

Environ = MutableMapping[str, Any]
StartResponse = Callable[..., Callable[[bytes], object]]
WsgiApp = Callable[[Any, Any], Iterable[bytes]]

# Where the environ has the two: the charge is for applications, the bill for what limits further.
CHARGE: Final = "tollkeeper.charge"
BILL: Final = "tollkeeper.bill"


class RateLimit:
    """A WSGI application whose requests are limited.

    `app`, its limits (or `rules`, or a `limiter`), and what `Terms` says, by name. The request's
    Charge is at `environ["tollkeeper.charge"]`. `on_limit` returns a WSGI application. Headers
    about limits that the application sends by itself win over these.
    """

    def __init__(
        self, app: WsgiApp, limits: LimitsArgument | None = None, **options: Unpack[Options]
    ) -> None:
        self.app: WsgiApp = application(app)
        self.guard = Guard(plain(Terms(limits=limits, **options)).demand("RateLimit"))

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request, as WSGI says."""
        return billed(environ, start_response, self.guard, self._limited)

    def _limited(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        bill: Bill = environ[BILL]
        refusal = bill.refusal(self.guard, WsgiCall(environ))
        environ[CHARGE] = bill.charge
        app = self.app if refusal is None else _app_of(refusal)
        return app(environ, start_response)

    def close(self) -> None:
        """Close what was opened here."""
        self.guard.close()


def billed(
    environ: Environ, start_response: StartResponse, guard: Guard, app: WsgiApp
) -> Iterable[bytes]:
    """Run an application with a bill: add its headers, and settle it when that is due."""
    if BILL in environ and environ[BILL].status is None:
        return app(environ, start_response)  # another of these is around this one
    # One that has answered is not: whoever asks several applications may use an environ again.
    bill = environ[BILL] = Bill(guard)

    def start(
        status: str, headers: list[Header], exc_info: Any = None
    ) -> Callable[[bytes], object]:
        bill.status = _number(status)
        headers = [*headers, *bill.headers_beside(name for name, _ in headers)]
        if exc_info is None:
            return start_response(status, headers)
        return start_response(status, headers, exc_info)

    try:
        body = app(environ, start)
    except BaseException as error:
        bill.fail(error)
        bill.settle()
        raise
    if bill.status is None:  # a generator, which has yet to begin
        return _Body(body, bill)
    bill.settle()
    return body if _is_whole(body, environ) else _Body(body, bill)


def _number(status: str) -> int | None:
    try:
        return int(status[:3])
    except ValueError:
        return None  # not a status; the server will say so


def _is_whole(body: Iterable[bytes], environ: Environ) -> bool:
    """Whether nothing of the application runs after this: then there is no end to wait for."""
    if isinstance(body, list | tuple):
        return True
    wrapper = environ.get("wsgi.file_wrapper")
    return isinstance(wrapper, type) and isinstance(body, wrapper)


class _Body:
    """What an application returned, with an eye on its end."""

    __slots__ = ("_bill", "_body", "_has_begun", "_has_given", "_iterator")

    def __init__(self, body: Iterable[bytes], bill: Bill) -> None:
        self._body = body
        self._bill = bill
        self._iterator: Iterator[bytes] | None = None
        self._has_begun = bill.status is not None
        self._has_given = False

    def __iter__(self) -> Iterator[bytes]:
        self._iterator = iter(self._body)
        return self

    def __next__(self) -> bytes:
        if self._iterator is None:
            self._iterator = iter(self._body)
        try:
            piece = next(self._iterator)
        except StopIteration:
            self._bill.settle()  # before the server tells the client that this was all
            raise
        except BaseException as error:
            if not self._has_given:  # what went out is the outcome, even if the rest does not come
                self._bill.fail(error)
            raise
        self._has_given = True
        if not self._has_begun and self._bill.status is not None:
            self._has_begun = True
            self._bill.settle()  # before the client sees anything of it
        return piece

    def close(self) -> None:
        """Called by the server however the response ended."""
        try:
            closing = getattr(self._body, "close", None)
            if closing is not None:
                closing()
        finally:
            self._bill.settle()


def _app_of(response: Any) -> WsgiApp:
    if isinstance(response, Answer):
        return answering(response)
    if callable(response):
        found: WsgiApp = response
        return found
    raise ConfigError(
        f"on_limit returned {show(response)}; return a WSGI application, an Answer, or None"
    )


def answering(answer: Answer) -> WsgiApp:
    """A WSGI application that gives one answer."""

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        headers = [*answer.headers, ("Content-Length", str(len(answer.body)))]
        start_response(f"{answer.status} {responses.get(answer.status, 'Refused')}", headers)
        return [] if environ.get("REQUEST_METHOD") == "HEAD" else [answer.body]

    return app
