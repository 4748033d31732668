"""The types that all endpoints of the service use: the context of a worker, requests and replies.

A worker process has one context. Its HTTP service, its gRPC service and its admin API all use it,
so a limit is one limit, whichever way a request comes in.

A handler takes a ServiceRequest and returns a ServiceReply. Every error is problem JSON (RFC 9457).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from ratekeeper.core.errors import show
from ratekeeper.core.model import Request
from ratekeeper.metrics.counters import Counters, MetricsSnapshot
from ratekeeper.service.http.activity import ActivityHistory
from ratekeeper.service.http.bodies import BodyRejected
from ratekeeper.service.http.envoys import EnvoyDirectory
from ratekeeper.service.http.incoming import IncomingBodies, Message
from ratekeeper.service.http.loads import SharedLoads
from ratekeeper.service.http.tokens import Permission, Token, TokenRejection, confined
from ratekeeper.web.answers import (
    PROBLEM_CONTENT_TYPE,
    HttpAnswer,
    error_answer,
    problem,
    unavailable_answer,
)

if TYPE_CHECKING:
    from ratekeeper.decide.failure import FailurePolicy, LocalFallback
    from ratekeeper.history.recorder import Recorder
    from ratekeeper.limiter import AsyncLimiter
    from ratekeeper.service.admin.control import ControlPlane
    from ratekeeper.service.http.tokens import Tokens
    from ratekeeper.web.answers import Style
    from ratekeeper.web.identity import Identity

Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
RawHeader = tuple[bytes, bytes]

# A leaky bucket may delay a request. A longer delay is rejected: it would hold a connection open.
HOLD_SECONDS_MAX: Final = 30.0

# The member of an ASGI scope with the request ID, for applications that show it.
REQUEST_ID: Final = "ratekeeper.request_id"
JSON: Final = (b"content-type", b"application/json")
PROBLEM: Final = (b"content-type", PROBLEM_CONTENT_TYPE.encode("ascii"))
CLOSE: Final = (b"connection", b"close")
NO_STORE: Final = (b"cache-control", b"no-store")

encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings that concern the path of a request."""

    style: Style
    """Which rate limit headers are sent."""
    counters: Path | None = None
    """The folder where workers write their counters for each other; None: a single worker."""
    loopback: bool = True
    """Only this machine can reach the service; without tokens, `Host` must be of this machine."""
    on_failure: FailurePolicy = "open"
    """The failure policy of limits that are given with a call; rules have their own."""
    local_fallback: LocalFallback | None = None
    """How such limits are enforced while the store is unavailable, with `on_failure="local"`."""
    worker: int = 0
    """The number or process ID of this worker; for logs and metrics."""
    sessions: Path | None = None
    """The folder for the sessions of the console, which all workers use; None: no console."""


@dataclass(slots=True)
class ServiceContext:
    """One worker: its limiter, its tokens, its name."""

    limiter: AsyncLimiter
    tokens: Tokens
    node_id: str
    """The name of this node for operators; it may be the host name."""
    node_header: str
    """The name of this node in replies to clients: the value of `X-Ratekeeper-Node`."""
    identity: Identity
    settings: WorkerSettings
    started_ns: int
    """When the worker started, in Unix time."""
    database: str | None = None
    """The URL of the control plane's database; None if the rules come from a file."""
    now_ns: Callable[[], int] = time.time_ns
    """The Unix time, for headers and records."""
    counters: Counters = field(default_factory=Counters)
    """The counters of requests and decision times."""
    bodies: IncomingBodies = field(default_factory=IncomingBodies)
    """The bodies that are being read."""
    recorder: Recorder | None = None
    """Records decisions and usage; None: nothing is recorded."""
    control: ControlPlane | None = None
    """The control plane; None until a request needs it."""
    stopping: bool = False
    """True once the service shuts down: it still answers, and asks clients to go elsewhere."""
    closing: bool = False
    """True once this worker is about to end, though others may stay: clients reconnect."""
    totals: Callable[[], MetricsSnapshot] = field(default=MetricsSnapshot)
    """The counts of all workers of the node; HttpService sets it."""
    store_name: str = ""
    """The URI of the store, without secrets."""
    loads: SharedLoads = field(init=False)
    """The loads that are pushed to any worker."""
    envoys: EnvoyDirectory = field(init=False)
    """The Envoys that are connected for quotas to any worker."""
    activity: ActivityHistory = field(init=False)
    """The decisions of all workers in the last 15 minutes."""

    def __post_init__(self) -> None:
        self.loads = SharedLoads(self.limiter, self.settings.counters)
        self.envoys = EnvoyDirectory(self.limiter)
        self.activity = ActivityHistory(self.settings.counters, now_ns=self.now_ns)


# ── Requests and replies ───────────────────────────────────────────────────────────────────────


class ServiceRequest(NamedTuple):
    """An HTTP request. If a header occurs more than once, the last one counts."""

    scope: Scope
    headers: Mapping[bytes, bytes]
    body: bytes
    token: Token
    request_id: bytes = b""
    """The X-Request-Id of the reply."""


class ServiceReply(NamedTuple):
    """A response, without the headers that every response has."""

    status: int
    headers: list[RawHeader]
    body: bytes = b""


Handler = Callable[[ServiceRequest], Awaitable[ServiceReply]]


class ServiceRoute(NamedTuple):
    """The handler of a path and method, the permission it requires, and its longest body."""

    handle: Handler
    permission: Permission | None = None
    """The permission that the caller's token must have; None: the route needs no token."""
    body_bytes_max: int = 0
    """0: the route has no body, and none is read. HttpService sets it from the table of bounds."""


Routes = dict[str, dict[str, ServiceRoute]]


class EarlyReply(Exception):
    """Ends a request with a reply."""

    def __init__(self, reply: ServiceReply) -> None:
        self.reply = reply
        super().__init__(reply.status)


def in_scope(token: Token, request: Request) -> Request:
    """Return the request, confined to the token's scope. Raises EarlyReply."""
    found = confined(token, request)
    if isinstance(found, TokenRejection):
        raise EarlyReply(token_reply(found))
    return found


def json_reply(data: Any, status: int = 200) -> ServiceReply:
    """Return a reply with a JSON body."""
    return ServiceReply(status, [JSON, NO_STORE], encode(data))


def problem_reply(
    status: int, code: str, detail: str, headers: Sequence[RawHeader] = ()
) -> ServiceReply:
    """Return an error reply with a problem JSON body."""
    return ServiceReply(
        status, [*headers, PROBLEM, NO_STORE], encode(problem(status, code, detail))
    )


def no_path_detail(path: str) -> str:
    """Return the text of a 404 for a path that no endpoint has."""
    return f"there is no {show(path)}; /docs lists every endpoint"


def no_method_detail(method: str, allowed: str) -> str:
    """Return the text of a 405. `allowed` is the value of Allow."""
    return f"the method {show(method)} is not allowed here; use {allowed}"


def token_reply(rejection: TokenRejection) -> ServiceReply:
    """Return the reply to a caller whose token was rejected."""
    challenge = [(b"www-authenticate", rejection.challenge.encode("ascii"))]
    headers = challenge if rejection.status == 401 else []
    return problem_reply(rejection.status, rejection.code, rejection.detail, headers)


def body_reply(rejected: BodyRejected) -> ServiceReply:
    """Return the reply to a request with an invalid body."""
    if rejected.status == 503:
        reply = _reply_of(unavailable_answer(rejected.code, rejected.detail))
    else:
        reply = problem_reply(rejected.status, rejected.code, rejected.detail)
    if rejected.close:
        reply.headers.append(CLOSE)
    return reply


def error_reply(error: Exception) -> ServiceReply | None:
    """Return the reply to a request that raised an error; None if the error is a defect."""
    if isinstance(error, EarlyReply):
        return error.reply
    if isinstance(error, BodyRejected):
        return body_reply(error)
    answer = error_answer(error)
    return None if answer is None else _reply_of(answer)


def _reply_of(answer: HttpAnswer) -> ServiceReply:
    return ServiceReply(answer.status, answer.raw_headers(), answer.body)
