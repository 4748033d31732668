"""One request on its way through an ASGI application: its charges, and what its response is told.

The middleware makes a passage and puts it in the scope. Whoever limits the request further in,
another middleware or a route's dependency, adds a charge to it, so that a response has the headers
of all limits in one piece and a request that one of them denies costs nothing in the others.

**A refusal further in** is marked on the passage and raised as TurnedAway. What the frameworks in
between make of that exception is not sent: the middleware answers, once it is back in control.

**Settling.** What a request cost is applied before the last piece of its response is sent, so that
a client that has seen the end of a response finds it settled, whichever worker it asks next. What
is said later (a background task, a failure) is applied when the application has returned.

Bodies are not looked at: a message passes as it came, and `send` has no task or buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, NoReturn

from tollkeeper.core import switches
from tollkeeper.core.errors import ConfigError, TollkeeperError, show
from tollkeeper.core.model import CheckResult, Decision, Request
from tollkeeper.core.subjects import Key
from tollkeeper.web.answers import Answer, RawHeader, raw_headers_of
from tollkeeper.web.calls import AsgiCall
from tollkeeper.web.charges import PASSED, Charge, joined
from tollkeeper.web.guard import AsyncGuard, Refused
from tollkeeper.web.prepared import Prepared

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# Where the scope has the two: the charge is for applications, the passage for what limits further.
CHARGE: Final = "tollkeeper.charge"
PASSAGE: Final = "tollkeeper.passage"

_STARTS: Final = frozenset(
    {"http.response.start", "websocket.http.response.start", "websocket.accept"}
)
_ENDS: Final = frozenset({"http.response.body", "http.response.pathsend"})
_DENIAL: Final = "websocket.http.response"
_POLICY_VIOLATION: Final = 1008  # RFC 6455, 7.4.1


def _spellings(*names: str) -> frozenset[bytes]:
    """Names of headers in small letters, as ASGI wants them, and as people write them."""
    return frozenset(each.encode() for name in names for each in (name.lower(), name.title(), name))


_RETRY_AFTER: Final = _spellings("Retry-After")
# Who sends one of these speaks of limits of its own.
_LIMITS: Final = _spellings(
    "RateLimit",
    "RateLimit-Limit",
    "RateLimit-Policy",
    "RateLimit-Remaining",
    "RateLimit-Reset",
    "X-RateLimit-Limit",
    "X-RateLimit-Policy",
    "X-RateLimit-Remaining",
    "X-RateLimit-Reset",
)
_KNOWN: Final = _LIMITS | _RETRY_AFTER


def _besides(theirs: list[RawHeader], ours: list[RawHeader]) -> list[RawHeader]:
    """What we still say beside an application that says some of it itself."""
    names = {name for name, _ in theirs}
    if names & _LIMITS:
        return []
    return [header for header in ours if header[0] not in _RETRY_AFTER]


class TurnedAway(TollkeeperError):
    """Unwinds an application whose request was refused further in; the middleware answers."""


def is_turned_away(error: BaseException) -> bool:
    """Whether an error is our own, or task groups have wrapped it, and no other is among them."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(TurnedAway)[1] is None
    return isinstance(error, TurnedAway)


class Passage(Charge):
    """The way of one request, from the middleware that made it to the end of its response.

    It is itself the charge by the middleware's own limits, because nearly every request has just
    that one.
    """

    __slots__ = (
        "_answer",
        "_further",
        "_prepared",
        "_send",
        "guard",
        "is_plain",
        "status",
        "turned",
    )

    def __init__(
        self,
        guard: AsyncGuard,
        send: Send,
        decision: Decision = PASSED.decision,
        key: Key | Request = "",
        units: int = 0,
    ) -> None:
        # Not the scope, which has this: a circle would be left for the garbage collector.
        self.guard = guard
        self._send = send
        self.decision = decision
        self.key = key
        self._charged = self._wanted = units
        self.changed = False
        self._ruling: CheckResult | None = None  # made when it is asked for
        self._prepared: Prepared | None = None
        self._further: list[tuple[AsyncGuard, Charge]] | None = None
        # Whether there is nothing to it but headers: nobody has refused it, charged it further or
        # said what it costs, nor will its outcome.
        self.is_plain = not guard.counts_some
        # By whom the request was refused.
        self.turned: tuple[AsyncGuard, AsgiCall] | None = None
        self._answer: Answer | None = None
        self.status: int | None = None

    @property
    def ruling(self) -> CheckResult:
        """What the middleware's own limits decided."""
        if self._ruling is None:
            passed = self.decision is PASSED.decision
            self._ruling = PASSED if passed else self.guard.ruling_of(self.decision)
        return self._ruling

    async def enter(self, call: AsgiCall) -> None:
        """Charge the request by the guard's own limits. Raises TurnedAway where they refuse."""
        guard = self.guard
        try:
            charge = guard.enter_now(call) if guard.is_quick else await guard.enter(call)
        except Refused as refused:
            self._answer = refused.answer
            self.turn_away(guard, call)
        self._ruling = charge.ruling
        self.decision = charge.decision
        self.key = charge.key
        self._charged = self._wanted = charge.units
        call.scope[CHARGE] = self
        if not self.decision.allowed:
            self.turn_away(guard, call)
        if guard.is_quick and charge.ruling.kind == "limited" and not self.decision.degraded:
            self._prepared = guard.prepared

    async def charge(self, guard: AsyncGuard, call: AsgiCall) -> Charge:
        """Charge the request by another guard's limits. Raises TurnedAway where they refuse."""
        self._prepared = None  # it is several limits that are to be told of
        try:
            charge = guard.enter_now(call) if guard.is_quick else await guard.enter(call)
        except Refused as refused:
            self._answer = refused.answer
            self.turn_away(guard, call)
        self.is_plain = False
        if self._further is None:
            self._further = []
        self._further.append((guard, charge))
        if not charge.decision.allowed:
            self.turn_away(guard, call)
        call.scope[CHARGE] = charge
        return charge

    def _charges(self) -> list[tuple[AsyncGuard, Charge]]:
        """All of them, in the order they were made."""
        return [(self.guard, self), *(self._further or ())]

    def settle(self, units: int) -> None:
        super().settle(units)
        self.is_plain = False

    def refund(self) -> None:
        super().refund()
        self.is_plain = False

    def name_for(self, route: str) -> str:
        """What a route's further limits are kept under: each that a request meets by itself.

        A route may have several: of the application, of its router, its own. They come in the
        same order each time.
        """
        taken = {guard.terms.name for guard, _ in self._charges()}
        name, number = route, 1
        while name in taken:
            number += 1
            name = f"{route} #{number}"
        return name

    def turn_away(self, guard: AsyncGuard, call: AsgiCall) -> NoReturn:
        """Refuse the request, for `guard`: unwinds what runs, and the middleware answers."""
        self.turned = guard, call
        self.is_plain = False
        for _, charge in self._charges():
            charge.refund()  # what one limit denies costs nothing in the others
        raise TurnedAway("the request was refused")

    # ── The response ───────────────────────────────────────────────────────────────────────────

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message, with our headers where a response starts. Not async: one frame less."""
        kind = message["type"]
        if kind == "http.response.body" and self.is_plain:
            return self._send(message)
        if self.turned is not None:
            return _nothing()
        if kind in _STARTS:
            self.status = message.get("status", 101)
            return self._send(self._with_headers(message))
        if kind in _ENDS:
            if not self.is_settled and not message.get("more_body"):
                return self._settle_and_send(message)
        elif kind == "websocket.close" and self.status is None:
            self.status = 403  # what a server answers to a handshake that is not accepted
        return self._send(message)

    def _with_headers(self, message: Message) -> Message:
        """The message with our headers. The application's is left as it is: it may use it again."""
        guard = self.guard
        if self._prepared is not None:
            ours = self._prepared.headers(self.decision, guard.now_ns())
        else:
            ours = raw_headers_of(self._joint_ruling(), guard.now_ns(), guard.style)
        if not ours:
            return message
        theirs = message.get("headers")
        if type(theirs) is not list:
            theirs = list(theirs or ())
        for name, _ in theirs:
            if name in _KNOWN:
                ours = _besides(theirs, ours)
                break
        changed = dict(message)
        changed["headers"] = theirs + ours
        return changed

    def _joint_ruling(self) -> CheckResult:
        """What was decided on the request in all."""
        if self._further is None:
            return self.ruling
        if len(self._further) == 1 and self.decision is PASSED.decision:
            return self._further[0][1].ruling
        return joined([charge.ruling for _, charge in self._charges()])

    # ── Afterwards ─────────────────────────────────────────────────────────────────────────────

    @property
    def is_settled(self) -> bool:
        """Whether nothing was said of the cost that is not applied yet, nor the end may say it."""
        if self.is_plain:
            return True
        if self.changed or self.guard.counts_some:
            return False
        for guard, charge in self._further or ():
            if charge.changed or guard.counts_some:
                return False
        return True

    @property
    def has_answered(self) -> bool:
        """Whether a response has started, so that nothing further in can limit the request."""
        return self.status is not None

    async def _settle_and_send(self, message: Message) -> None:
        await self._settle(self.status)
        await self._send(message)

    async def _settle(self, status: int | None) -> None:
        for guard, charge in self._charges():
            await guard.leave(charge, status)

    async def finish(self, receive: Receive) -> None:
        """Apply what was said after the response had gone out, or refuse the request."""
        if self.turned is not None:
            await self._refuse(*self.turned, receive)
        else:
            await self._settle(self.status)

    async def fail(self, error: BaseException) -> None:
        """Settle a request whose handler raised, or whose task is being cancelled."""
        # What was sent is the outcome: where the client has hung up, `send` may raise, and a guess
        # is not let off with a 500. Who is cancelled without one counts: guessers would hang up.
        status = self.status
        if status is None and isinstance(error, Exception):
            status = 500
        if self.is_settled:
            return
        settling = self._settle(status)
        if any(guard.awaits for guard, _ in self._charges()):
            # Shielded: a task that is cancelled may be so again at its next step.
            await asyncio.shield(settling)
        else:
            await settling

    # ── A refusal ──────────────────────────────────────────────────────────────────────────────

    async def _refuse(self, guard: AsyncGuard, call: AsgiCall, receive: Receive) -> None:
        """Give back what was charged, and answer a request that was turned away."""
        await self._settle(None)
        self.turned = None  # from here on it is us who send
        scope = call.scope
        if self.status is not None and scope["type"] == "http":
            raise TurnedAway("a request was limited when its response had started; limit it before")
        answer, send = self._answer, self._send
        if answer is None:
            ruling = self._joint_ruling()
            response = await guard.response(call, ruling)
            if response is None:
                answer = guard.refusal(ruling)
            else:
                answer, send = _answer_of(response), self.send  # with our headers
            if answer is None:
                await self._respond(response, scope, receive)
                return
        await self._send_answer(answer, scope, send)

    async def _respond(self, response: Any, scope: Scope, receive: Receive) -> None:
        """Send the application's own response, if it can still be sent."""
        if scope["type"] == "http" or self._may_answer_websocket(scope):
            await response(scope, receive, self.send)
        else:
            await self._close_websocket()

    async def _send_answer(self, answer: Answer, scope: Scope, send: Send) -> None:
        if scope["type"] == "http":
            prefix = "http.response"
        elif self._may_answer_websocket(scope):
            prefix = _DENIAL
        else:
            await self._close_websocket()
            return
        self.status = answer.status
        headers = [(name.lower().encode(), value.encode()) for name, value in answer.headers]
        headers.append((b"content-length", b"%d" % len(answer.body)))
        body = b"" if scope.get("method") == "HEAD" else answer.body
        await send({"type": f"{prefix}.start", "status": answer.status, "headers": headers})
        await send({"type": f"{prefix}.body", "body": body})

    def _may_answer_websocket(self, scope: Scope) -> bool:
        return self.status is None and _DENIAL in (scope.get("extensions") or ())

    async def _close_websocket(self) -> None:
        await self._send(
            {"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": "limit exceeded"}
        )


def started_now(guard: AsyncGuard, scope: Scope, send: Send) -> Passage | None:
    """The passage of a request that a guard can decide by its peer alone; else None.

    The short way of nearly all requests: no call, no charge beside the passage, no ruling before
    somebody asks for it.
    """
    peers = guard.peers
    if peers is not None:
        client = scope.get("client")
        key = peers.get(client[0]) if client and not switches.limiting_off else None
        if key is None:
            return None
        units = guard.units
        decision = guard.check(key, units)
        passage = Passage(guard, send, decision, key, units)
        if not decision.allowed:
            passage.is_plain = False
        elif not decision.degraded:
            passage._prepared = guard.prepared  # noqa: SLF001 - it is ours
    elif guard.terms.says_limits:
        return None
    else:
        passage = Passage(guard, send)  # only routes have limits
    scope[PASSAGE] = scope[CHARGE] = passage
    return passage


def passage_of(scope: Scope) -> Passage:
    """The passage that a request is on. Raises ConfigError where no middleware made one."""
    passage = scope.get(PASSAGE)
    if isinstance(passage, Passage):
        return passage
    raise ConfigError(
        "a route's limit was asked for in an application where no RateLimit is installed; "
        "add it to the application that serves the request: app.add_middleware(RateLimit, …), or "
        "in FastAPI RateLimit(app)"
    )


def _answer_of(response: Any) -> Answer | None:
    """A response that we send ourselves; None for one that sends itself."""
    if isinstance(response, Answer):
        return response
    if callable(response):
        return None
    raise ConfigError(
        f"on_limit returned {show(response)}; return a response of the framework's, "
        f"such as JSONResponse(…, status_code=429), an Answer, or None"
    )


async def _nothing() -> None:
    """A message of a request that was turned away: the middleware answers it."""
