"""All charges of one web request, by every limit that applies to it.

The outermost integration (a middleware, a WSGI layer, a Django view) makes a RequestCharges for the
request and finishes it. Every limit further in (another middleware, a route's dependency, a
blueprint, a decorated view) adds its charge. So a response has one set of headers for all limits,
and a request that one limit denies costs nothing in the others.

`DeferringCharges` serves WSGI, Flask and Django. `AsgiCharges` is for ASGI: it sends the messages
of the response.

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
from ratekeeper.core.steps import Call, Steps, run, run_async
from ratekeeper.decide.combine import combine_decisions
from ratekeeper.web.answers import (
    SPELLINGS,
    Denial,
    Header,
    HttpAnswer,
    PreparedHeaders,
    headers_beside,
    headers_of,
    raw_headers_beside,
    raw_headers_of,
)
from ratekeeper.web.enforcer import (
    PASSED,
    AsyncEnforcer,
    Charge,
    Enforcer,
    EnforcerCore,
    UncheckableRequest,
)
from ratekeeper.web.handlers import handled
from ratekeeper.web.requests import AsgiRequest, RoutedAsgiRequest, WebRequest, digest_of

# The keys of an ASGI scope or a WSGI environ: the last charge is for applications, all charges are
# for limits further in.
CHARGE: Final = "ratekeeper.charge"
"""The key of an ASGI scope or a WSGI environ that has the request's `Charge`."""
CHARGES: Final = "ratekeeper.charges"
# The defaults of an ASGI request that a route's limits may replace (`web/overrides.py`).
DEFERRED: Final = "ratekeeper.deferred"

# The charge of a request that no limit applies to: settling it changes nothing.
UNCHARGED: Final = Charge()

# Leaves room for the "#2" of a route's second limit.
_NAME_LENGTH_MAX: Final = NAME_LENGTH_MAX - 8


class RequestCharges:
    """The charges of one request, in the order in which they were made."""

    __slots__ = ("enforcer", "made", "status")

    def __init__(self, enforcer: EnforcerCore) -> None:
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
        taken.add(self.enforcer.options.name)  # also if its limits are deferred
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
        return headers_beside(names, headers_of(self.result, enforcer.now_ns(), enforcer.style))

    def fail(self, error: BaseException) -> None:
        """Note that the handler raised. That is a 500; a cancelled request has no status."""
        if isinstance(error, Exception):
            self.status = 500
            for charge in self.made:  # another outcome than the one that may be applied
                if charge.enforcer.counts_outcomes:
                    charge.is_settled = False

    def is_settled(self) -> bool:
        """Return True if every reported cost and every outcome is applied."""
        for charge in self.made:  # noqa: SIM110 - `all` and its generator take twice as long
            if not charge.is_settled:
                return False
        return True

    def unsettled(self) -> list[tuple[Any, Charge]]:
        """Return the charges that are not settled, each with its enforcer."""
        return [(charge.enforcer, charge) for charge in self.made if not charge.is_settled]

    def settle(self) -> None:
        """Apply the cost of the request so far; `status` decides where outcomes count."""
        for enforcer, charge in self.unsettled():
            enforcer.leave(charge, self.status)

    async def settle_async(self) -> None:
        """Do the same in an event loop."""
        for enforcer, charge in self.unsettled():
            await enforcer.leave(charge, self.status)

    def denial(self, enforcer: Enforcer, request: WebRequest) -> Any:
        """Charge the request. Return None if it is allowed, otherwise the response to send.

        The response is the Denial, whatever a hook returned, or the HttpAnswer to a request that
        could not be checked.
        """
        return run(self.denial_steps(enforcer, request))

    def denial_steps(self, enforcer: EnforcerCore, request: WebRequest) -> Steps[Any]:
        """Do what `denial` does, as steps."""
        settle = self.settle_async if isinstance(enforcer, AsyncEnforcer) else self.settle
        try:
            charge = yield from self._enter_steps(enforcer, request)
        except UncheckableRequest as rejected:
            self.reject(rejected)
            yield Call(settle)
            return rejected.answer
        if self.add(charge):
            return None
        charge.enforcer.log_denial(charge)
        yield Call(settle)
        return (yield from enforcer.response_steps(request, self.result))

    def _enter_steps(self, enforcer: EnforcerCore, request: WebRequest) -> Steps[Charge]:
        return enforcer.enter_steps(request)


class DeferringCharges(RequestCharges):
    """The charges of one request of WSGI, Flask or Django, and the defaults that are deferred."""

    __slots__ = ("deferred",)  # not in AsgiCharges, which keep them in the scope

    def __init__(self, enforcer: EnforcerCore) -> None:
        super().__init__(enforcer)
        self.deferred: dict[object, int] = {}
        """The owners of defaults that a route's limits may replace (`web/overrides.py`), and the
        number of these limits that are not charged yet."""

    def is_default_due(self, owner: object, denial: object = None) -> bool:
        """Return True, once, if a route's limits have not replaced deferred defaults.

        Call it after charging each of them: they have not if all let the request pass uncounted.
        A `denial` of theirs answers the request, and then nothing else is charged.
        """
        left = self.deferred.pop(owner, 0) - 1
        if left < 0 or denial is not None or self.last.is_counted:
            return False
        if left:
            self.deferred[owner] = left
        return not left

    def is_default_left(self, owner: object) -> bool:
        """Return True, once, if no route's limits that replace deferred defaults were charged.

        That is so if the request was answered before them. Other limits may have counted it.
        """
        left = self.deferred.pop(owner, 0)
        return left > 0 and self.last.decision.allowed  # a denied request costs nothing


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
# The messages that answer a request.
_ANSWERS: Final = _STARTS | {"websocket.close"}
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
    __slots__ = ("_prepared", "_send", "denied")

    enforcer: AsyncEnforcer

    def __init__(self, enforcer: AsyncEnforcer, send: Send) -> None:
        self.enforcer = enforcer
        self.made = []
        self.status = None
        self._send = send
        self._prepared: PreparedHeaders | None = None
        self.denied: tuple[AsyncEnforcer, AsgiRequest, HttpAnswer | None] | None = None
        """The enforcer that denied the request, the request as it saw it, and, if the request
        could not be checked, the answer."""

    def charge_by_peer(self, scope: Scope, app: Any) -> bool:
        """Charge a request whose peer alone decides, and return True. This is the fast path.

        Return False if the request needs `charge`. Raises RequestDenied.
        """
        enforcer = self.enforcer
        keys = enforcer.keys_by_peer
        if keys is not None:
            client = scope.get("client")
            key = keys.get(client[0]) if client and not switches.limiting_off else None
            if key is None:
                return False
            units = enforcer.units
            decision = enforcer.check(key, units)
            charge = Charge(decision, key, units, enforcer, None, not enforcer.counts_outcomes)
            scope[CHARGE] = charge
            self.made.append(charge)
            if not decision:
                self.deny(enforcer, RoutedAsgiRequest(scope, app))
            if not decision.degraded:
                self._prepared = enforcer.prepared
            return True
        if enforcer.has_limits:
            return False
        scope[CHARGE] = UNCHARGED  # only routes have limits
        return True

    def defer(
        self, enforcer: AsyncEnforcer, request: AsgiRequest, send: Send, count: int
    ) -> DeferredDefault:
        """Leave the limits of an application to a route that has `count` limits instead."""
        deferred = DeferredDefault(self, enforcer, request, send, count)
        request.scope[DEFERRED] = [*request.scope.get(DEFERRED, ()), deferred]
        return deferred

    async def replace_default(self, enforcer: AsyncEnforcer, charge: Charge, scope: Scope) -> None:
        """Drop the deferred limits of an enforcer if a route's limits have counted the request.

        Charge them if all of the route's limits have let it pass uncounted. Raises RequestDenied.
        """
        for deferred in self._deferred_in(scope):
            if deferred.enforcer is enforcer:
                deferred.left -= 1
                deferred.is_due = deferred.left > 0 and not charge.is_counted
                if deferred.left <= 0 and not charge.is_counted:
                    await self.charge(enforcer, deferred.request)

    async def charge_deferred(self, scope: Scope) -> None:
        """Charge all limits that are still deferred. Raises RequestDenied."""
        for deferred in self._deferred_in(scope):
            deferred.is_due = False
            await self.charge(deferred.enforcer, deferred.request)

    def _deferred_in(self, scope: Scope) -> list[DeferredDefault]:
        # If the scope is being reused for another application, it has those of other charges too.
        return [each for each in scope.get(DEFERRED, ()) if each.is_due and each.charges is self]

    async def charge(self, enforcer: AsyncEnforcer, request: AsgiRequest) -> Charge:
        """Charge the request by an enforcer's limits. Raises RequestDenied."""
        try:
            if not enforcer.is_quick:
                charge = await enforcer.enter(request)
            else:
                charge = enforcer.enter_now(request)
                if charge.decision.delay_ns:
                    await run_async(enforcer.delay_steps(charge))
        except UncheckableRequest as rejected:
            self.reject(rejected)
            self.deny(enforcer, request, rejected.answer)
        charges = self.made
        charges.append(charge)
        request.scope[CHARGE] = charge
        decision = charge.decision
        if not decision.allowed:
            self.deny(enforcer, request)
        is_alone = len(charges) == 1 and enforcer.style is self.enforcer.style
        prepares = is_alone and enforcer.prepares
        self._prepared = enforcer.prepared_for(charge) if prepares else None
        return charge

    def deny(
        self, enforcer: AsyncEnforcer, request: AsgiRequest, answer: HttpAnswer | None = None
    ) -> NoReturn:
        """Mark the request as denied by `enforcer`, and unwind the application."""
        self.denied = enforcer, request, answer
        self._prepared = None  # those of an earlier limit, which allowed the request
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
        enforcer = self.enforcer
        if self._prepared is not None:
            decision = self.made[0].decision
            ours = self._prepared.headers(decision, enforcer.now_ns)
        else:
            result = self.result
            if result is PASSED:
                return message
            ours = raw_headers_of(result, enforcer.now_ns(), enforcer.style)
            if not ours:
                return message
        theirs = message.get("headers")
        if type(theirs) is not list:
            theirs = list(theirs or ())
        for name, _ in theirs:
            if name in SPELLINGS:
                ours = raw_headers_beside(theirs, ours)
                break
        changed = dict(message)
        changed["headers"] = theirs + ours
        return changed

    async def _settle_and_send(self, message: Message) -> None:
        await self.settle_async()
        await self._send(message)

    async def finish(self, receive: Receive) -> None:
        """Send the answer to a denied request, or settle a cost that was reported late."""
        if self.denied is not None:
            await self._send_denial(*self.denied, receive)
        else:
            await self.settle_async()

    async def settle_failure(self, error: BaseException) -> None:
        """Settle a request whose handler raised, or whose task is being cancelled."""
        # A status that was sent is the outcome: `send` may raise because the client has closed the
        # connection, and a wrong password must not pass as a 500. A request that is cancelled
        # without a status counts, or a client could guess and close the connection.
        if self.status is None:
            self.fail(error)
        if self.is_settled():
            return
        if any(enforcer.awaits for enforcer, _ in self.unsettled()):
            # Shielded: a cancelled task may be cancelled again while it awaits.
            await asyncio.shield(self.settle_async())
        else:
            await self.settle_async()

    # ── Denials ────────────────────────────────────────────────────────────────────────────────

    async def _send_denial(
        self,
        enforcer: AsyncEnforcer,
        request: AsgiRequest,
        answer: HttpAnswer | None,
        receive: Receive,
    ) -> None:
        """Refund the charges, and answer a denied request."""
        if answer is None:
            self.last.enforcer.log_denial(self.last)
        scope, answered, self.status = request.scope, self.status, None
        await self.settle_async()
        self.status = answered
        self.denied = None  # from here on, `send` sends
        if self.status is not None and scope["type"] == "http":
            raise RequestDenied(
                "a request was limited after its response had started; check the limit earlier"
            )
        if answer is not None:
            await self._send_answer(answer, scope)
            return
        response = await enforcer.response(request, self.result)
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


class DeferredDefault:
    """The limits of an application that a route is expected to replace, for one request."""

    __slots__ = ("_send", "charges", "enforcer", "is_due", "left", "request")

    def __init__(
        self,
        charges: AsgiCharges,
        enforcer: AsyncEnforcer,
        request: AsgiRequest,
        send: Send,
        left: int,
    ) -> None:
        self.charges = charges
        self.enforcer = enforcer
        self.request = request
        self.is_due = True
        """False once they are charged, or replaced by a route's limits."""
        self.left = left
        """The number of the route's limits that are not charged yet."""
        self._send = send

    async def send(self, message: Message) -> None:
        """Send a message. Before a response starts, charge the limits if they are still due."""
        if self.is_due and self.charges.denied is None and message["type"] in _ANSWERS:
            self.is_due = False
            await self.charges.charge(self.enforcer, self.request)
        await self._send(message)


def charges_of(scope: Scope) -> AsgiCharges:
    """Return the charges of a request. Raises ConfigError if no middleware made them."""
    charges = scope.get(CHARGES)
    if isinstance(charges, AsgiCharges):
        return charges
    raise ConfigError(
        "a route has a limit, but no RateLimit is installed in the application that serves the "
        "request; install it: app.add_middleware(RateLimit, …), or in FastAPI RateLimit(app)"
    )


async def _nothing() -> None:
    """Discard a message of a denied request: the middleware sends the answer."""
