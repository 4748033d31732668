"""Rate limits for any WSGI application, as a middleware.

    app = RateLimit(app, limits="100/minute")

A request is charged before the application runs, and one that is denied is answered here, with a
429 and problem JSON. All others pass, and their responses get headers where `start_response` is
called. Bodies go through as they are: what the application returns is handed on itself (a list, a
file for the server's `wsgi.file_wrapper`), or iterated without looking at it, for its end.

A request's *bill* is in the environ. Whoever limits the request further in, another of these or a
framework's decorator, puts a charge on it, so that a response has the headers of all limits in one
piece, and a request that one of them denies costs nothing in the others.

**Settling.** What a request cost is applied when the application has returned its response, and
what is said while a body is produced once more at its end. The first is before the client has seen
anything of the response: whichever worker it asks next, the outcome of a login is settled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from hashlib import blake2b
from http.client import responses
from typing import Any, Final, TypedDict, Unpack

from tollkeeper.arguments import Limits
from tollkeeper.edge.answers import Answer, headers_of
from tollkeeper.edge.calls import Call, WsgiCall
from tollkeeper.edge.charges import PASSED, Charge, joined
from tollkeeper.edge.guard import AsyncGuard, Guard, KeySource, Options, Refused, Terms
from tollkeeper.errors import ConfigError, show
from tollkeeper.model import NAME_LENGTH_MAX
from tollkeeper.ruling import Ruling

Environ = MutableMapping[str, Any]
StartResponse = Callable[..., Callable[[bytes], object]]
WsgiApp = Callable[[Any, Any], Iterable[bytes]]
Header = tuple[str, str]

# Where the environ has the two: the charge is for applications, the bill for what limits further.
CHARGE: Final = "tollkeeper.charge"
BILL: Final = "tollkeeper.bill"

# Who sends one of these speaks of limits of its own.
_OURS: Final = ("ratelimit", "x-ratelimit-")
_RETRY_AFTER: Final = "retry-after"
# Room for the "#2" of a route's second limit.
_NAME_LENGTH_MAX: Final = NAME_LENGTH_MAX - 8


class RouteOptions(TypedDict, total=False):
    """What a route may say of its own; `Terms` says what each is."""

    key: KeySource | None
    cost: int | Callable[[Call], Any]
    skip: Callable[[Call], Any] | None
    on_limit: Callable[[Call, Ruling], Any] | None
    count: Callable[[int], bool] | None


class Bill:
    """The charges of one request, by all who limit it."""

    __slots__ = ("_charges", "_guard", "_names", "status")

    def __init__(self, guard: Guard | AsyncGuard) -> None:
        """`guard` is the outermost: its clock and its style are the response's."""
        self._guard = guard
        self._charges: list[tuple[Any, Charge]] = []
        self._names: dict[str, int] = {}
        self.status: int | None = None

    def add(self, guard: Guard | AsyncGuard, charge: Charge) -> bool:
        """Put a charge on the bill. False for one that is denied: then the others are refunded."""
        self._charges.append((guard, charge))
        if not charge.decision.allowed:
            self.refund()
        return charge.decision.allowed

    def refund(self) -> None:
        """Make the request cost nothing: what one limit denies costs nothing in the others."""
        for _, charge in self._charges:
            charge.refund()

    def name_of(self, name: str) -> str:
        """A name for limits of one request, the first as it is: no two of them share a count."""
        number = self._names[name] = self._names.get(name, 0) + 1
        if len(name) > _NAME_LENGTH_MAX or not name.isprintable():
            digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16)
            name = f"#{digest.hexdigest()}"
        return name if number == 1 else f"{name}#{number}"

    @property
    def charge(self) -> Charge:
        """The last charge that was made."""
        return self._charges[-1][1] if self._charges else Charge(PASSED)

    @property
    def ruling(self) -> Ruling:
        """What was decided on the request in all."""
        rulings = [charge.ruling for _, charge in self._charges]
        return joined(rulings) if rulings else PASSED

    def headers_beside(self, names: Iterable[str]) -> list[Header]:
        """The headers to add to a response that has these. What the application says stays."""
        known = {name.lower() for name in names}
        if any(name.startswith(_OURS) for name in known):
            return []
        ours = headers_of(self.ruling, self._guard.clock.now_ns(), self._guard.style)
        if _RETRY_AFTER in known:
            ours = [each for each in ours if each[0].lower() != _RETRY_AFTER]
        return ours

    def fail(self, error: BaseException) -> None:
        """A handler that raises counts as a 500; one that is ended from outside has no outcome."""
        if isinstance(error, Exception):
            self.status = 500

    def unsettled(self) -> list[tuple[Any, Charge]]:
        """The charges that may have to be changed, with the guard of each."""
        return [
            (guard, charge)
            for guard, charge in self._charges
            if charge.changed or guard.terms.count is not None
        ]

    def settle(self) -> None:
        """Apply what the request has cost up to now; by `status`, where the outcome counts."""
        for guard, charge in self.unsettled():
            guard.leave(charge, self.status)

    def refusal(self, guard: Guard, call: Call) -> Any:
        """Charge the request. None if it may pass; else its Answer, or what `on_limit` returned."""
        try:
            charge = guard.enter(call)
        except Refused as refused:
            self.refund()
            self.settle()
            return refused.answer
        if self.add(guard, charge):
            return None
        self.settle()
        ruling = self.ruling
        response = guard.response(call, ruling)
        return guard.refusal(ruling) if response is None else response


class RateLimit:
    """A WSGI application whose requests are limited.

    `app`, its limits (or `rules`, or a `limiter`), and what `Terms` says, by name. The request's
    Charge is at `environ["tollkeeper.charge"]`. `on_limit` returns a WSGI application. Headers
    about limits that the application sends by itself win over these.
    """

    def __init__(
        self, app: WsgiApp, limits: Limits | None = None, **options: Unpack[Options]
    ) -> None:
        self.app = app
        self.guard = Guard(Terms(limits=limits, **options).demand("RateLimit"))

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
    if BILL in environ:
        return app(environ, start_response)  # another of these is around this one
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

    __slots__ = ("_bill", "_body", "_iterator")

    def __init__(self, body: Iterable[bytes], bill: Bill) -> None:
        self._body = body
        self._bill = bill
        self._iterator: Iterator[bytes] | None = None

    def __iter__(self) -> Iterator[bytes]:
        self._iterator = iter(self._body)
        return self

    def __next__(self) -> bytes:
        if self._iterator is None:
            self._iterator = iter(self._body)
        try:
            return next(self._iterator)
        except StopIteration:
            self._bill.settle()  # before the server tells the client that this was all
            raise
        except BaseException as error:
            self._bill.fail(error)
            raise

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
