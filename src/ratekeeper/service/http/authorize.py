"""/v1/authorize: a gateway asks whether it may forward a request of a client.

nginx (`auth_request`) and Traefik (`forwardAuth`) send the client's headers and name the client's
request in further headers. `Identity` finds the client as in a middleware. It believes forwarded
addresses only if the gateway is a trusted proxy. nginx writes X-Original-URI and Traefik
X-Forwarded-Uri, and each forwards the other's header unchanged from the client. A request with both
is rejected: otherwise a client could choose the endpoint that it is limited for.

The `Authorization` header belongs to the client. If the gateway needs a token, it sends the token
as `X-Ratekeeper-Token`.

nginx treats 401 and 403 as a denial, and any other status but 2xx as a failure. `?denied=403` makes
every denial a 403. A leaky bucket's delay is spent here: a gateway forwards the request at once
when it gets the reply. `?hold=4` is the longest delay in seconds that the gateway waits for. It
must be shorter than the gateway's timeout, after which the gateway may let the request pass. A
longer delay is a denial.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, Final
from urllib.parse import parse_qs

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ConfigError, RatekeeperError, StoreError, quoted, show
from ratekeeper.core.model import CheckResult, Request, decision_with
from ratekeeper.service.http.bodies import problem_at, unknown_field
from ratekeeper.service.http.checks import check_reply
from ratekeeper.service.http.context import (
    HOLD_SECONDS_MAX,
    Handler,
    Routes,
    ServiceContext,
    ServiceReply,
    ServiceRequest,
    ServiceRoute,
    error_reply,
    in_scope,
    token_reply,
)
from ratekeeper.service.http.tokens import TokenRejection
from ratekeeper.web.requests import AsgiRequest, query_field

URI_LENGTH_MAX: Final = 16_384
TOKEN_HEADER: Final = b"x-ratekeeper-token"
_METHOD_LENGTH_MAX: Final = 32
_QUERY_FIELDS_MAX: Final = 100
_HOLD_NS_MAX: Final = int(HOLD_SECONDS_MAX * NS_PER_SECOND)
_OPTIONS: Final = ("denied", "hold")
_SECONDS: Final = re.compile(r"[0-9]{1,2}(?:\.[0-9]{1,3})?")


class ForwardedRequest(AsgiRequest):
    """The request of a gateway's client: the headers that arrived, and the URI they name."""

    __slots__ = ("_query", "method", "path")

    method: str
    path: str
    # Those of the gateway's own request say nothing about the client's.
    route: str | None = None
    session: Mapping[str, Any] | None = None

    def __init__(self, scope: Any, method: str, uri: str) -> None:
        super().__init__(scope)
        self.method = method
        path, _, self._query = uri.partition("?")
        # A request has no fragment: a server that gets a # serves it as a part of the path.
        self.path = path.replace("#", "%23")

    def query(self, name: str) -> str | None:
        """Return a field of the client's query."""
        return query_field(self._query, name) if self._query else None


def routes(context: ServiceContext) -> Routes:
    """Return the route, which takes every method: a gateway uses the client's."""
    # It has no permission here: the handler takes the token from another header.
    return {"/v1/authorize": {"*": ServiceRoute(_authorize(context))}}


def _authorize(context: ServiceContext) -> Handler:
    async def authorize(http_request: ServiceRequest) -> ServiceReply:
        try:
            denied_status, hold_ns_max = _options_of(http_request.scope["query_string"])
        except ConfigError as error:
            return _error_reply(error)
        authorization = http_request.headers.get(b"authorization")
        if own := http_request.headers.get(TOKEN_HEADER):
            authorization = b"Bearer " + own
        token = context.tokens.permitted(
            None if authorization is None else authorization.decode("latin-1"), "check"
        )
        if isinstance(token, TokenRejection):
            return token_reply(token)
        try:
            request = in_scope(token, context.identity.request_of(_forwarded(http_request)))
            started_ns = perf_counter_ns()
            result = await context.limiter.evaluate(request)
            context.counters.decision_seconds.note(perf_counter_ns() - started_ns)
            result = await _hold(context, request, result, hold_ns_max)
            if context.recorder is not None:
                context.recorder.note(request, result, 1, context.now_ns(), http_request.request_id)
            reply = check_reply(result, context.now_ns(), context.settings.style)
        except RatekeeperError as error:
            reply = _error_reply(error)
        if reply.status == 200:
            # Without body and Content-Type: the response to the client has its own.
            return ServiceReply(200, reply.headers[:-1])
        return reply if denied_status is None else reply._replace(status=denied_status)

    return authorize


def _error_reply(error: RatekeeperError) -> ServiceReply:
    reply = error_reply(error)
    if reply is None:
        raise error
    return reply


def _options_of(query: bytes) -> tuple[int | None, int]:
    """Return the status of denials, and the longest delay in nanoseconds. Raises ConfigError."""
    try:
        given = parse_qs(
            query.decode("latin-1"), keep_blank_values=True, max_num_fields=_QUERY_FIELDS_MAX
        )
    except ValueError:
        raise ConfigError(
            f"the query has more than {_QUERY_FIELDS_MAX} fields; give only `denied` and `hold`"
        ) from None
    if not given:
        return None, _HOLD_NS_MAX
    for name, values in given.items():
        if name not in _OPTIONS:
            raise ConfigError(problem_at("the query", "", unknown_field(name, _OPTIONS)))
        if len(values) > 1:
            raise ConfigError(f"the query: {quoted(name)} is given twice; give it once")
    return _denied_status(given.get("denied")), _hold_ns_max(given.get("hold"))


def _denied_status(given: list[str] | None) -> int | None:
    if given is None:
        return None
    text = given[-1]
    if len(text) == 3 and text.isascii() and text.isdecimal() and 400 <= int(text) < 500:
        return int(text)
    raise ConfigError(
        f"denied={show(text)} is not a status from 400 to 499; nginx needs denied=403"
    )


def _hold_ns_max(given: list[str] | None) -> int:
    if given is None:
        return _HOLD_NS_MAX
    text = given[-1]
    if _SECONDS.fullmatch(text) and float(text) <= HOLD_SECONDS_MAX:
        return int(float(text) * NS_PER_SECOND)
    raise ConfigError(
        f"hold={show(text)} is not a number of seconds from 0 to {HOLD_SECONDS_MAX:g}; "
        f"for example hold=4"
    )


def _forwarded(http_request: ServiceRequest) -> ForwardedRequest:
    uri, method = _uri_and_method(http_request.headers)
    if not uri or len(uri) > URI_LENGTH_MAX:
        raise ConfigError(
            f"the header X-Original-URI (nginx) or X-Forwarded-Uri (Traefik) must name the request "
            f"to check, in at most {URI_LENGTH_MAX:,} bytes; send one of them"
        )
    if len(method) > _METHOD_LENGTH_MAX:
        raise ConfigError(f"a method may have at most {_METHOD_LENGTH_MAX} characters")
    named = method.decode("latin-1") or http_request.scope["method"]
    return ForwardedRequest(http_request.scope, named, uri.decode("latin-1"))


def _uri_and_method(headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    """Return the URI and method from the headers of one gateway. Raises ConfigError."""
    original = headers.get(b"x-original-uri")
    forwarded = headers.get(b"x-forwarded-uri")
    if original and forwarded:
        raise ConfigError(
            "the request has both X-Original-URI (nginx) and X-Forwarded-Uri (Traefik), and one of "
            "them may come from the client; configure the gateway to remove the one it does not set"
        )
    if original:
        return original, headers.get(b"x-original-method", b"")
    return forwarded or b"", headers.get(b"x-forwarded-method", b"")


async def _hold(
    context: ServiceContext, request: Request, result: CheckResult, hold_ns_max: int
) -> CheckResult:
    """Wait for the request's delay and return the result; deny a delay that is too long."""
    decision = result.decision
    if not decision.allowed or not decision.delay_ns:
        return result
    if decision.delay_ns > hold_ns_max:
        await _refund(context, request, result)
        retry_after_ns = decision.delay_ns - hold_ns_max
        denied = decision_with(decision, allowed=False, retry_after_ns=retry_after_ns, delay_ns=0)
        return result._replace(decision=denied)
    try:
        await asyncio.sleep(decision.delay)
    except BaseException:
        await asyncio.shield(_refund(context, request, result))
        raise
    return result


async def _refund(context: ServiceContext, request: Request, result: CheckResult) -> None:
    with suppress(StoreError):
        await context.limiter.refund(request, 1, result.decision)
