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

from tollkeeper.edge.answers import Answer, RawHeader, raw_headers_of
from tollkeeper.edge.calls import AsgiCall
from tollkeeper.edge.charges import Charge, joined
from tollkeeper.edge.guard import AsyncGuard, Refused
from tollkeeper.errors import ConfigError, TollkeeperError, show
from tollkeeper.ruling import Ruling

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


class Passage:
    """The way of one request, from the middleware that made it to the end of its response."""

    __slots__ = ("_answer", "_charge", "_counts", "_further", "_send", "_turned", "guard", "status")

    def __init__(self, guard: AsyncGuard, send: Send) -> None:
        # Not the scope, which has this: a circle would be left for the garbage collector.
        self.guard = guard
        self._send = send
        self._charge: Charge | None = None  # the guard's own
        self._further: list[tuple[AsyncGuard, Charge]] | None = None
        self._counts = False  # whether an outcome has a say in what the request costs
        self._turned: tuple[AsyncGuard, AsgiCall] | None = None
        self._answer: Answer | None = None
        self.status: int | None = None

    async def charge(self, guard: AsyncGuard, call: AsgiCall) -> Charge:
        """Charge the request by another guard's limits. Raises TurnedAway where they refuse."""
        try:
            charge = await guard.enter(call)
        except Refused as refused:
            self._answer = refused.answer
            self._turn_away(guard, call)
        return self._charged(guard, call, charge)

    def charge_now(self, call: AsgiCall) -> None:
        """Charge the request first by the guard itself, which is quick: without a coroutine."""
        try:
            charge = self.guard.enter_now(call)
        except Refused as refused:
            self._answer = refused.answer
            self._turn_away(self.guard, call)
        self._charged(self.guard, call, charge)

    def _charged(self, guard: AsyncGuard, call: AsgiCall, charge: Charge) -> Charge:
        if self._charge is None:
            self._charge = charge
        elif self._further is None:
            self._further = [(guard, charge)]
        else:
            self._further.append((guard, charge))
        if not charge.ruling.decision.allowed:
            self._turn_away(guard, call)
        if guard.counts_some:
            self._counts = True
        call.scope[CHARGE] = charge
        return charge

    def _charges(self) -> list[tuple[AsyncGuard, Charge]]:
        """All of them, in the order they were made."""
        first = [] if self._charge is None else [(self.guard, self._charge)]
        return first + (self._further or [])

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

    def _turn_away(self, guard: AsyncGuard, call: AsgiCall) -> NoReturn:
        self._turned = guard, call
        for _, charge in self._charges():
            charge.refund()  # what one limit denies costs nothing in the others
        raise TurnedAway("the request was refused")

    # ── The response ───────────────────────────────────────────────────────────────────────────

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message, with our headers where a response starts. Not async: one frame less."""
        kind = message["type"]
        if self._turned is not None:
            return _nothing()
        if kind in _STARTS:
            self.status = message.get("status", 101)
            return self._send(self._with_headers(message))
        if kind in _ENDS and not message.get("more_body") and self._unsettled():
            return self._settle_and_send(message)
        if kind == "websocket.close" and self.status is None:
            self.status = 403  # what a server answers to a handshake that is not accepted
        return self._send(message)

    def _with_headers(self, message: Message) -> Message:
        """The message with our headers. The application's is left as it is: it may use it again."""
        guard = self.guard
        ours = raw_headers_of(self.ruling, guard.now_ns(), guard.style)
        if not ours:
            return message
        theirs = list(message.get("headers") or ())
        for name, _ in theirs:
            if name in _KNOWN:
                ours = _besides(theirs, ours)
                break
        changed = dict(message)
        changed["headers"] = theirs + ours
        return changed

    @property
    def ruling(self) -> Ruling:
        """What was decided on the request in all."""
        if self._further is None and self._charge is not None:
            return self._charge.ruling
        return joined([charge.ruling for _, charge in self._charges()])

    # ── Afterwards ─────────────────────────────────────────────────────────────────────────────

    def _unsettled(self) -> bool:
        if self._counts or (self._charge is not None and self._charge.changed):
            return True
        return self._further is not None and any(charge.changed for _, charge in self._further)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do when the application has returned."""
        return self._turned is None and not self._unsettled()

    async def _settle_and_send(self, message: Message) -> None:
        await self._settle(self.status)
        await self._send(message)

    async def _settle(self, status: int | None) -> None:
        for guard, charge in self._charges():
            await guard.leave(charge, status)

    async def finish(self, receive: Receive) -> None:
        """Apply what was said after the response had gone out, or refuse the request."""
        if self._turned is not None:
            await self._refuse(*self._turned, receive)
        else:
            await self._settle(self.status)

    async def fail(self, error: BaseException) -> None:
        """Settle a request whose handler raised, or whose task is being cancelled."""
        # Cancelled before there was an outcome: it counts, or guessers would just hang up.
        status = 500 if isinstance(error, Exception) else self.status
        if not self._unsettled():
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
        self._turned = None  # from here on it is us who send
        scope = call.scope
        if self.status is not None and scope["type"] == "http":
            raise TurnedAway("a request was limited when its response had started; limit it before")
        answer = self._answer
        if answer is None:
            ruling = self.ruling
            response = await guard.response(call, ruling)
            answer = guard.refusal(ruling) if response is None else _answer_of(response)
            if answer is None:
                await self._respond(response, scope, receive)
                return
        await self._send_answer(answer, scope)

    async def _respond(self, response: Any, scope: Scope, receive: Receive) -> None:
        """Send the application's own response, if it can still be sent."""
        if scope["type"] == "http" or self._may_answer_websocket(scope):
            await response(scope, receive, self.send)
        else:
            await self._close_websocket()

    async def _send_answer(self, answer: Answer, scope: Scope) -> None:
        if scope["type"] == "http":
            prefix = "http.response"
        elif self._may_answer_websocket(scope):
            prefix = _DENIAL
        else:
            await self._close_websocket()
            return
        headers = [(name.lower().encode(), value.encode()) for name, value in answer.headers]
        headers.append((b"content-length", b"%d" % len(answer.body)))
        body = b"" if scope.get("method") == "HEAD" else answer.body
        await self._send({"type": f"{prefix}.start", "status": answer.status, "headers": headers})
        await self._send({"type": f"{prefix}.body", "body": body})

    def _may_answer_websocket(self, scope: Scope) -> bool:
        return self.status is None and _DENIAL in (scope.get("extensions") or ())

    async def _close_websocket(self) -> None:
        await self._send(
            {"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": "limit exceeded"}
        )


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
