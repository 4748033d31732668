"""The HTTP service in this process, with a manual clock, and a client that calls it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ratekeeper import AsyncLimiter
from ratekeeper.service.http.app import HttpService
from ratekeeper.service.http.context import ServiceContext, WorkerSettings
from ratekeeper.service.http.tokens import Tokens
from ratekeeper.testing import ManualClock
from ratekeeper.web.answers import Style
from ratekeeper.web.identity import Identity

RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {"id": "users", "match": {"user": "*"}, "by": ["user"], "limits": ["3/minute"]},
        {
            "id": "orders",
            "match": {"endpoint": "/orders"},
            "by": ["api_key"],
            "limits": ["2/second", "10/minute"],
        },
        {
            "id": "slow",
            "match": {"endpoint": "/slow"},
            "by": ["ip"],
            "limits": [{"limit": 1, "per": "1s", "algorithm": "leaky_bucket", "capacity": 5}],
        },
        {
            "id": "trial",
            "match": {"endpoint": "/trial"},
            "by": ["tenant"],
            "limits": ["1/minute"],
            "mode": "shadow",
        },
    ],
    "allow": ["api_key:sk_internal_*"],
    "deny": ["api_key:sk_revoked_*"],
}


PENALISED: dict[str, Any] = {
    "version": 1,
    "rules": [
        {
            "id": "users",
            "by": ["user"],
            "limits": ["1/second"],
            "penalty": {"after": 2, "within": "1m", "cooldown": "10s", "block_after": 1},
        }
    ],
}


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        """The decoded JSON body."""
        return json.loads(self.body)


class HttpClient:
    """Calls one service."""

    def __init__(self, context: ServiceContext, clock: ManualClock) -> None:
        self.context = context
        self.clock = clock
        self.app = HttpService(context)

    async def __call__(
        self,
        method: str,
        url: str,
        body: Any = b"",
        headers: Mapping[str, str] | None = None,
        *,
        chunks: Sequence[bytes] | None = None,
        declare: bool = True,
    ) -> Answer:
        """Send a request. `body` is bytes or data for JSON; `chunks` are the parts that arrive."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        path, _, query = url.partition("?")
        sent = {"host": "localhost"}
        sent |= {name.lower(): value for name, value in (headers or {}).items()}
        if declare:
            sent.setdefault("content-length", str(len(raw)))
        scope = {
            "type": "http",
            "http_version": "1.1",
            "scheme": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(n.encode("latin-1"), v.encode("latin-1")) for n, v in sent.items()],
            "client": ("127.0.0.1", 4711),
        }
        arriving = list(chunks) if chunks is not None else [raw]
        sent_back: list[Any] = []

        async def receive() -> dict[str, Any]:
            if not arriving:
                return {"type": "http.disconnect"}
            piece = arriving.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(arriving)}

        async def send(message: Any) -> None:
            sent_back.append(message)

        await self.app(scope, receive, send)
        if not sent_back:
            return Answer(0, {}, b"")
        found = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in sent_back[0]["headers"]]
        assert len({name for name, _ in found}) == len(found), "a header occurs twice"
        return Answer(
            sent_back[0]["status"], dict(found), b"".join(m["body"] for m in sent_back[1:])
        )

    async def check(self, **fields: Any) -> Answer:
        """Call POST /v1/check."""
        return await self("POST", "/v1/check", fields)


@asynccontextmanager
async def http_service(
    tokens: Path | None = None,
    rules: Mapping[str, Any] = RULES,
    *,
    counters: Path | None = None,
    identity: Identity | None = None,
    **limiter: Any,
) -> Any:
    """Run a service with these rules and tokens, and yield a client."""
    clock = ManualClock()
    async with AsyncLimiter.from_rules(dict(rules), clock=clock, **limiter) as made:
        context = ServiceContext(
            limiter=made,
            tokens=Tokens.load(tokens),
            node_id="host-1",
            node_header="test-1",
            identity=identity or Identity({"api_key": "header:X-API-Key"}),
            settings=WorkerSettings(Style(), counters=counters, worker=1),
            started_ns=clock.now_ns(),
            now_ns=clock.now_ns,
        )
        yield HttpClient(context, clock)
