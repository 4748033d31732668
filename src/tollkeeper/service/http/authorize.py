"""/v1/authorize: a gateway asks whether a request may pass, before it passes it on.

nginx (`auth_request`) and Traefik (`forwardAuth`) send the client's headers along and say in others
what was asked for. Who the client is, `Identity` finds as in a middleware; addresses that headers
claim are believed only where the gateway itself is a trusted proxy. nginx writes X-Original-URI and
Traefik X-Forwarded-Uri, and each passes on what its clients write in the other's: a request that
has both is refused, or clients could say what they are limited for.

A client's `Authorization` is the client's. The gateway's own token, where one is asked for, comes
as `X-Tollkeeper-Token`.

nginx takes 401 and 403 for a denial and everything else but 2xx for a failure: `?denied=403` has
all refusals answered with that. A leaky bucket's delay is held here: to a gateway, an answer is:
now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, Final
from urllib.parse import parse_qs

from tollkeeper.core.errors import ConfigError, StoreError, TollkeeperError, show
from tollkeeper.core.model import CheckResult, Request, decision_with
from tollkeeper.service.http.asked import Asked, Endpoint, in_scope
from tollkeeper.service.http.node import HOLD_SECONDS_MAX, Node
from tollkeeper.service.http.replies import Reply, error_reply, refused_reply, ruling_reply
from tollkeeper.service.http.tokens import Refused
from tollkeeper.web.calls import AsgiCall, query_field

URI_LENGTH_MAX: Final = 16_384
TOKEN_HEADER: Final = b"x-tollkeeper-token"
_METHOD_LENGTH_MAX: Final = 32
_QUERY_FIELDS_MAX: Final = 100
_HOLD_NS_MAX: Final = int(HOLD_SECONDS_MAX * 1e9)


class ForwardedCall:
    """The request that a gateway asks about: the headers that came, and the URI that it names."""

    __slots__ = ("_call", "_query", "method", "native", "path", "peer", "route", "session")

    def __init__(self, scope: Any, method: str, uri: str) -> None:
        self._call = AsgiCall(scope)
        self.method = method
        self.path, _, self._query = uri.partition("?")
        self.native = scope
        self.peer = self._call.peer
        self.route: str | None = None
        self.session: Mapping[str, Any] | None = None

    def header(self, name: str) -> str | None:
        """A header of the client's."""
        return self._call.header(name)

    def lines(self, name: str) -> list[str]:
        """The lines of a header of the client's."""
        return self._call.lines(name)

    def query(self, name: str) -> str | None:
        """A field of the query that the client asked with."""
        return query_field(self._query, name) if self._query else None

    def cookie(self, name: str) -> str | None:
        """A cookie of the client's."""
        return self._call.cookie(name)


def endpoints(node: Node) -> dict[str, dict[str, Endpoint]]:
    """The handler, whatever the method: gateways ask with the client's."""
    # It looks for the token itself, for it is in another header.
    return {"/v1/authorize": {"*": Endpoint(_authorize(node))}}


def _authorize(node: Node) -> Callable[[Asked], Awaitable[Reply]]:
    async def authorize(asked: Asked) -> Reply:
        try:
            denied = _denied_status(asked.scope["query_string"])
        except ConfigError as error:
            return _reply_of(error)
        authorization = asked.headers.get(b"authorization")
        if own := asked.headers.get(TOKEN_HEADER):
            authorization = b"Bearer " + own
        token = node.tokens.permitted(
            None if authorization is None else authorization.decode("latin-1"), "check"
        )
        if isinstance(token, Refused):
            return refused_reply(token)
        try:
            request = in_scope(token, node.identity.request_of(_call(asked)))
            began_ns = perf_counter_ns()
            ruling = await node.limiter.evaluate(request)
            node.counters.decision_seconds.note(perf_counter_ns() - began_ns)
            ruling = await _held(node, request, ruling)
            if node.recorder is not None:
                node.recorder.note(request, ruling, 1, node.now_ns())
            reply = ruling_reply(ruling, node.now_ns(), node.settings.style)
        except TollkeeperError as error:
            reply = _reply_of(error)
        if reply.status == 200:
            # The client's own response has a body and a type of its own.
            return Reply(200, reply.headers[:-1])
        return reply if denied is None else reply._replace(status=denied)

    return authorize


def _reply_of(error: TollkeeperError) -> Reply:
    reply = error_reply(error)
    if reply is None:
        raise error
    return reply


def _denied_status(query: bytes) -> int | None:
    try:
        given = parse_qs(query.decode("latin-1"), max_num_fields=_QUERY_FIELDS_MAX).get("denied")
    except ValueError:
        raise ConfigError(
            f"the query has more than {_QUERY_FIELDS_MAX} fields, and only `denied` is known here"
        ) from None
    if not given:
        return None
    text = given[-1]
    if len(text) == 3 and text.isascii() and text.isdecimal() and 400 <= int(text) < 500:
        return int(text)
    raise ConfigError(
        f"denied={show(text)} is not a status from 400 to 499; nginx wants denied=403"
    )


def _call(asked: Asked) -> ForwardedCall:
    uri, method = _named(asked.headers)
    if not uri or len(uri) > URI_LENGTH_MAX:
        raise ConfigError(
            f"the header X-Original-URI (nginx) or X-Forwarded-Uri (Traefik) says which request is "
            f"asked about, in at most {URI_LENGTH_MAX:,} bytes; send one of them"
        )
    if len(method) > _METHOD_LENGTH_MAX:
        raise ConfigError(f"a method has at most {_METHOD_LENGTH_MAX} characters")
    named = method.decode("latin-1") or asked.scope["method"]
    return ForwardedCall(asked.scope, named, uri.decode("latin-1"))


def _named(headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    """The URI and the method that the gateway names, both in its own words. Raises ConfigError."""
    original = headers.get(b"x-original-uri")
    forwarded = headers.get(b"x-forwarded-uri")
    if original and forwarded:
        raise ConfigError(
            "X-Original-URI (nginx) and X-Forwarded-Uri (Traefik) are both there, and one of them "
            "may be the client's; have the gateway remove the one that it does not write"
        )
    if original:
        return original, headers.get(b"x-original-method", b"")
    return forwarded or b"", headers.get(b"x-forwarded-method", b"")


async def _held(node: Node, request: Request, ruling: CheckResult) -> CheckResult:
    """The ruling, when it is the request's turn; a turn that comes too late is given back."""
    decision = ruling.decision
    if not decision.allowed or not decision.delay_ns:
        return ruling
    if decision.delay_ns > _HOLD_NS_MAX:
        await _give_back(node, request, ruling)
        late_ns = decision.delay_ns - _HOLD_NS_MAX
        late = decision_with(decision, allowed=False, retry_after_ns=late_ns, delay_ns=0)
        return ruling._replace(decision=late)
    try:
        await asyncio.sleep(decision.delay)
    except BaseException:
        await asyncio.shield(_give_back(node, request, ruling))
        raise
    return ruling


async def _give_back(node: Node, request: Request, ruling: CheckResult) -> None:
    if not ruling.decision.degraded:
        with suppress(StoreError):
            await node.limiter.refund(request)
