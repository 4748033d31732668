"""All charges of one web request, by every limit that applies to it.

The outermost integration (a middleware, a WSGI layer, a Django view) makes a RequestCharges for the
request and finishes it. Every limit further in (another middleware, a route's dependency, a
blueprint, a decorated view) adds its charge. So a response has one set of headers for all limits,
and a request that one limit denies costs nothing in the others.

`charging` charges and `settling` settles, as steps for threads and for event loops. `AsgiCharges`
also sends the messages of a response.

**Denials in ASGI.** A limit further in marks the request as denied and raises RequestDenied. The
middleware discards whatever the frameworks in between send because of that exception, and answers
once it is back in control.

**Settling in ASGI.** The final cost is applied before the last part of the response is sent: a
client that has seen the end of a response finds the request settled, on every worker. A cost that
is reported later, by a background task or by a failure, is applied when the application returns.

Bodies are passed on as they come, without a task or a buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any, Final, NoReturn

from ratekeeper.core import switches
from ratekeeper.core.errors import ConfigError, RatekeeperError, show
from ratekeeper.core.model import NAME_LENGTH_MAX, CheckResult
from ratekeeper.core.steps import Ask, Call, Steps, run, run_async
from ratekeeper.decide.combine import combine_decisions
from ratekeeper.limiter.renewal import renewed_in_thread, renewed_on_loop
from ratekeeper.web.answers import (
    SPELLINGS,
    Denial,
    Header,
    HttpAnswer,
    allowed_headers,
    as_text,
    headers_beside,
    raw_headers_of,
)
from ratekeeper.web.enforcer import PASSED, Charge, Enforcer, UncheckableRequest
from ratekeeper.web.handlers import handled
from ratekeeper.web.options import EnforcerOptions
from ratekeeper.web.requests import (
    AsgiRequest,
    RoutedAsgiRequest,
    WebRequest,
    context_of,
    digest_of,
)

# The keys of an ASGI scope or a WSGI environ: the last charge is for applications, all charges are
# for limits further in.
CHARGE: Final = "ratekeeper.charge"
"""The key of an ASGI scope or a WSGI environ that has the request's `Charge`."""
CHARGES: Final = "ratekeeper.charges"
# Leaves room for the "#2" of a route's second limit.
_NAME_LENGTH_MAX: Final = NAME_LENGTH_MAX - 8
# A client may choose the path of a mount, so the enforcers of longer paths are not remembered.
_PLACE_LENGTH_MAX: Final = 256


class RequestCharges:
    """The charges of one request, in the order in which they were made."""

    __slots__ = ("enforcer", "made", "status")

    def __init__(self, enforcer: Enforcer) -> None:
        """`enforcer` is the outermost: the headers use its clock and its style."""
        self.enforcer = enforcer
        self.made: list[Charge] = []
        """The charges."""
        self.status: int | None = None
        """The status of the response, once it is known."""

    def add(self, charge: Charge) -> bool:
        """Add a charge. If it is denied, refund all charges and return False."""
        self.made.append(charge)
        if not charge.decision.allowed:
            self.refund()
        elif charge.decision.source is not None:
            charge.keep_slots(renewed_in_thread)
        return charge.decision.allowed

    def reject(self, rejected: UncheckableRequest) -> None:
        """Refund all charges. The headers of the answer show the limits that could not check."""
        self.refund()
        if rejected.look is not None:
            self.made.append(rejected.look)

    def refund(self) -> None:
        """Make the request cost nothing."""
        for charge in self.made:
            charge.refund()

    def name_for(self, name: str) -> str:
        """Return a name for a route's limits: the given one, or "name#2" if that is taken.

        A route may have several limits: of the application, of its router and its own. They come
        in the same order on every request, so each keeps its name.
        """
        if len(name) > _NAME_LENGTH_MAX or not name.isprintable():
            name = digest_of(name)
        taken = {each.enforcer.options.name for each in self.made if each.enforcer is not None}
        taken.add(self.enforcer.options.name)  # also if it does not count this request
        found, number = name, 1
        while found in taken:
            number += 1
            found = f"{name}#{number}"
        return found

    @property
    def last(self) -> Charge:
        """The charge that was made last."""
        return self.made[-1] if self.made else Charge()

    @property
    def result(self) -> CheckResult:
        """The combined result of all charges."""
        if len(self.made) == 1:
            return self.made[0].result
        return joint_result([charge.result for charge in self.made])

    def headers_beside(self, names: Iterable[str]) -> list[Header]:
        """Return the headers to add to a response that has headers of these names."""
        enforcer = self.enforcer
        ours = raw_headers_of(self.result, enforcer.now_ns(), enforcer.style)
        theirs = [name.encode("latin-1", "replace") for name in names]
        return as_text(headers_beside(theirs, ours))

    def fail(self, error: BaseException) -> None:
        """Note that the handler raised. That is a 500; a cancelled request has no status."""
        if isinstance(error, Exception):
            self.status = 500
            for charge in self.made:  # another outcome than the one that may be applied
                if charge.enforcer is not None and charge.enforcer.counts_outcomes:
                    charge.is_settled = False

    def is_settled(self) -> bool:
        """Return True if every reported cost and every outcome is applied."""
        for charge in self.made:  # noqa: SIM110 - `all` and its generator take twice as long
            if not charge.is_settled:
                return False
        return True

    def settling(self, *, ended: bool = True) -> Steps[None]:
        """Apply the cost of the request so far; `status` decides where outcomes count.

        Without `ended`, more of the response follows.
        """
        for charge in self.made:
            if not charge.is_settled and charge.enforcer is not None:
                yield from charge.enforcer.leaving(charge, self.status, ended=ended)

    def charging(self, enforcer: Enforcer, request: WebRequest) -> Steps[Any]:
        """Charge the request. Return None if it is allowed, otherwise the response to send.

        The response is the Denial, whatever a hook returned, or the HttpAnswer to a request that
        could not be checked.
        """
        try:
            charge = yield from self._making(enforcer, request)
        except UncheckableRequest as rejected:
            self.reject(rejected)
            yield from self.settling()
            return rejected.answer
        if self.add(charge):
            return None
        enforcer.log_denial(charge)
        yield from self.settling()
        return (yield from enforcer.answering(request, self.result))

    def _making(self, enforcer: Enforcer, request: WebRequest) -> Steps[Charge]:
        charge: Charge = yield Call(enforcer.charge, request)
        return charge

    def settle(self, *, ended: bool = True) -> None:
        """Settle the request in this thread."""
        run(self.settling(ended=ended))


def joint_result(results: Sequence[CheckResult]) -> CheckResult:
    """Combine the results of one request, in the order they were made; only the last can deny."""
    if not results:
        return PASSED
    last = results[-1]
    if len(results) == 1 or last.kind == "blocked":
        return last
    limited = [each for each in results if each.kind == "limited"]
    shadow_denied = tuple(name for each in results for name in each.shadow_denied)
    if last.decision.allowed and not limited:
        exempt = [each for each in results if each.kind == "exempt"]
        return (exempt or results)[0]._replace(shadow_denied=shadow_denied)
    denied = not last.decision.allowed
    # The counted subjects belong to the applied rules one by one, so they are complete or absent.
    is_counted = all(len(each.counted) == len(each.applied) for each in results)
    return CheckResult(
        last.decision if denied else combine_decisions([each.decision for each in limited]),
        tuple(rule for each in results for rule in each.applied),
        last.kind if denied else "limited",
        shadow_denied,
        tuple(subject for each in results for subject in each.counted) if is_counted else (),
    )


# ── ASGI ───────────────────────────────────────────────────────────────────────────────────────

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_STARTS: Final = frozenset(
    {"http.response.start", "websocket.http.response.start", "websocket.accept"}
)
_BODY: Final = "http.response.body"
_FILE: Final = "http.response.pathsend"
_DENIAL: Final = "websocket.http.response"
_POLICY_VIOLATION: Final = 1008  # RFC 6455, 7.4.1


class RequestDenied(RatekeeperError):
    """Unwinds an application whose request was denied; the middleware sends the answer."""


def is_request_denied(error: BaseException) -> bool:
    """Return True for RequestDenied, also in exception groups that hold nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(RequestDenied)[1] is None
    return isinstance(error, RequestDenied)


class AsgiCharges(RequestCharges):
    """The charges of one ASGI request, and the sender of its response."""

    # Not the scope, which refers to this object: the cycle would be left to the garbage collector.
    __slots__ = ("_send", "denied")

    def __init__(self, enforcer: Enforcer, send: Send) -> None:
        self.enforcer = enforcer
        self.made = []
        self.status = None
        self._send = send
        self.denied: tuple[Enforcer, AsgiRequest, HttpAnswer | None] | None = None
        """The enforcer that denied the request, the request as it saw it, and, if the request
        could not be checked, the answer."""

    def charge_peer(self, scope: Scope, app: Any) -> bool:
        """Charge a request whose peer alone decides, and return True; else return False.

        This is `charge` without an AsgiRequest. Raises RequestDenied.
        """
        enforcer, client = self.enforcer, scope.get("client")
        key = enforcer.by_peer.get(client[0]) if client else None
        if key is None or enforcer.charge_key is None:
            return False
        charge = enforcer.charge_key(key)
        self.made.append(charge)
        scope[CHARGE] = charge
        if not charge.decision.allowed:
            self._deny(enforcer, RoutedAsgiRequest(scope, app))
        if charge.decision.source is not None:
            charge.keep_slots(renewed_on_loop)
        return True

    async def charge(self, enforcer: Enforcer, request: AsgiRequest) -> Charge:
        """Charge the request by an enforcer's limits. Raises RequestDenied."""
        try:
            found = enforcer.charge(request)
            charge: Charge = await found.send(*found.args) if type(found) is Ask else found
        except UncheckableRequest as rejected:
            self.reject(rejected)
            self._deny(enforcer, request, rejected.answer)
        self.made.append(charge)
        request.scope[CHARGE] = charge
        if not charge.decision.allowed:
            self._deny(enforcer, request)
        if charge.decision.source is not None:
            charge.keep_slots(renewed_on_loop)
        return charge

    def _deny(
        self, enforcer: Enforcer, request: AsgiRequest, answer: HttpAnswer | None = None
    ) -> NoReturn:
        """Mark the request as denied by `enforcer`, and unwind the application."""
        self.denied = enforcer, request, answer
        self.refund()
        raise RequestDenied("the request was denied")

    # ── The response ───────────────────────────────────────────────────────────────────────────

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message, with our headers if it starts a response. Not async: one frame less."""
        kind = message["type"]
        if self.denied is not None:
            return _nothing()
        if kind == _BODY or kind == _FILE:  # noqa: PLR1714, SIM109 - faster than `in`
            for charge in self.made:  # `is_settled`, without the call
                if not charge.is_settled and not message.get("more_body"):
                    return self._settle_and_send(message)
            return self._send(message)
        if kind in _STARTS:
            self.status = message.get("status", 101)
            return self._send(self._with_headers(message))
        if kind == "websocket.close" and self.status is None:
            self.status = 403  # the server's answer to a handshake that is not accepted
        return self._send(message)

    def _with_headers(self, message: Message) -> Message:
        """Return a copy of the message with our headers: the application may reuse its own."""
        if not self.made:
            return message
        enforcer, charge = self.enforcer, self.made[0]
        at_ns = charge.decision.decided_ns or enforcer.now_ns()
        ours, limiters = None, charge.limiters
        is_alone = len(self.made) == 1 and not switches.limiting_off
        if is_alone and limiters is not None and limiters.applied:  # no result is needed
            ours = allowed_headers(charge.decision, limiters.applied, at_ns, enforcer.style)
        if ours is None:
            ours = raw_headers_of(self.result, at_ns, enforcer.style)
        if not ours:
            return message
        theirs = message.get("headers")
        if type(theirs) is not list:
            theirs = list(theirs or ())
        for name, _ in theirs:
            if name in SPELLINGS:
                ours = headers_beside([name for name, _ in theirs], ours)
                break
        changed = dict(message)
        changed["headers"] = theirs + ours
        return changed

    async def _settle_and_send(self, message: Message) -> None:
        await run_async(self.settling())
        await self._send(message)

    async def finish(self, receive: Receive) -> None:
        """Send the answer to a denied request, or settle a cost that was reported late."""
        if self.denied is not None:
            await self._send_denial(*self.denied, receive)
        else:
            await run_async(self.settling())

    async def settle_failure(self, error: BaseException) -> None:
        """Settle a request whose handler raised, or whose task is being cancelled."""
        # A status that was sent is the outcome: `send` may raise because the client has closed the
        # connection, and a wrong password must not pass as a 500. A request that is cancelled
        # without a status counts, or a client could guess and close the connection.
        if self.status is None:
            self.fail(error)
        if not self.is_settled():
            # Shielded: a cancelled task may be cancelled again while it awaits.
            await asyncio.shield(run_async(self.settling()))

    # ── Denials ────────────────────────────────────────────────────────────────────────────────

    async def _send_denial(
        self,
        enforcer: Enforcer,
        request: AsgiRequest,
        answer: HttpAnswer | None,
        receive: Receive,
    ) -> None:
        """Refund the charges, and answer a denied request."""
        if answer is None:
            enforcer.log_denial(self.last)
        scope, answered, self.status = request.scope, self.status, None
        await run_async(self.settling())
        self.status = answered
        self.denied = None  # from here on, `send` sends
        if self.status is not None and scope["type"] == "http":
            raise RequestDenied(
                "a request was limited after its response had started; check the limit earlier"
            )
        if answer is not None:
            await self._send_answer(answer, scope)
            return
        response = await run_async(enforcer.answering(request, self.result))
        if isinstance(response, Denial):
            app = request.app if isinstance(request, RoutedAsgiRequest) else None
            response = await handled(response, request, app, receive) or response.answer
        if isinstance(response, HttpAnswer):
            await self._send_answer(response, scope)
        elif not callable(response):
            raise ConfigError(
                f"on_limit, on_unavailable or an exception handler returned {show(response)}; "
                f"return a response of the framework, such as "
                f"JSONResponse(…, status_code=denial.status), or None"
            )
        elif scope["type"] == "http" or self._may_answer_websocket(scope):
            await response(scope, receive, self.send)
        else:
            await self._close_websocket()

    async def _send_answer(self, answer: HttpAnswer, scope: Scope) -> None:
        if scope["type"] == "http":
            prefix = "http.response"
        elif self._may_answer_websocket(scope):
            prefix = _DENIAL
        else:
            await self._close_websocket()
            return
        self.status = answer.status
        headers = [*answer.raw_headers(), (b"content-length", b"%d" % len(answer.body))]
        body = b"" if scope.get("method") == "HEAD" else answer.body
        await self.send({"type": f"{prefix}.start", "status": answer.status, "headers": headers})
        await self.send({"type": f"{prefix}.body", "body": body})

    def _may_answer_websocket(self, scope: Scope) -> bool:
        return self.status is None and _DENIAL in (scope.get("extensions") or ())

    async def _close_websocket(self) -> None:
        await self._send(
            {"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": "limit exceeded"}
        )


def charges_of(scope: Scope) -> AsgiCharges:
    """Return the charges of a request. Raises ConfigError if no middleware made them."""
    charges = scope.get(CHARGES)
    if isinstance(charges, AsgiCharges):
        return charges
    raise ConfigError(
        "a route has a limit, but no RateLimit is installed in the application that serves the "
        "request; install it: app.add_middleware(RateLimit, …), or in FastAPI RateLimit(app)"
    )


def enforcer_of_route(
    outer: Enforcer,
    key: tuple[EnforcerOptions, str],
    request: AsgiRequest,
    name_of: Callable[[], str],
) -> Enforcer:
    """Return the enforcer of a route's own limits, which inherits from `outer`.

    `key` has the options, and a text that differs between their counts on one route. `name_of`
    returns the name of the count. It and the template are found once for each place of a route.
    """
    scope = request.scope
    route, context = scope.get("route"), context_of(scope)
    # By id, since routes are not hashable. They are kept alive, so that no id is reused.
    root_path = scope.get("root_path") or ""
    place = (*key, id(route), id(context), root_path)
    enforcer = outer.known_route(place)
    if enforcer is None:
        enforcer = outer.route_enforcer(key[0], name_of(), request.route)
        if len(root_path) <= _PLACE_LENGTH_MAX:
            outer.remember_route(place, enforcer, alive=(route, context))
    return enforcer


async def _nothing() -> None:
    """Discard a message of a denied request: the middleware sends the answer."""
