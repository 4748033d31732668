"""The service as an ASGI application, asked in this process, with a clock that stands still."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tollkeeper import AsyncLimiter
from tollkeeper.service.http.app import Service, service
from tollkeeper.service.http.node import Node, Settings
from tollkeeper.service.http.tokens import Tokens
from tollkeeper.testing import ManualClock
from tollkeeper.web.answers import Style
from tollkeeper.web.identity import Identity

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


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        """The JSON."""
        return json.loads(self.body)


class Asking:
    """Asks one service."""

    def __init__(self, node: Node, clock: ManualClock) -> None:
        self.node = node
        self.clock = clock
        self.service: Service = service(node)

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
        """One request. `body` is bytes or what becomes JSON; `chunks` are what arrives of it."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        path, _, query = url.partition("?")
        sent = {name.lower(): value for name, value in (headers or {}).items()}
        if declare:
            sent.setdefault("content-length", str(len(raw)))
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(n.encode("latin-1"), v.encode("latin-1")) for n, v in sent.items()],
            "client": ("127.0.0.1", 4711),
        }
        arriving = list(chunks) if chunks is not None else [raw]
        said: list[Any] = []

        async def receive() -> dict[str, Any]:
            if not arriving:
                return {"type": "http.disconnect"}
            piece = arriving.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(arriving)}

        async def send(message: Any) -> None:
            said.append(message)

        await self.service(scope, receive, send)
        if not said:
            return Answer(0, {}, b"")
        found = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in said[0]["headers"]]
        assert len({name for name, _ in found}) == len(found), "a header is there twice"
        return Answer(said[0]["status"], dict(found), b"".join(m["body"] for m in said[1:]))

    async def check(self, **fields: Any) -> Answer:
        """POST /v1/check."""
        return await self("POST", "/v1/check", fields)


@asynccontextmanager
async def asking(
    tokens: Path | None = None,
    rules: Mapping[str, Any] = RULES,
    *,
    counters: Path | None = None,
    identity: Identity | None = None,
    **limiter: Any,
) -> Any:
    """A service with these rules and tokens."""
    clock = ManualClock()
    async with AsyncLimiter.from_rules(dict(rules), clock=clock, **limiter) as made:
        node = Node(
            limiter=made,
            tokens=Tokens.load(tokens),
            node_id="test-1",
            identity=identity or Identity({"api_key": "header:X-API-Key"}),
            settings=Settings(Style(), counters=counters, worker=1),
            started_ns=clock.now_ns(),
            now_ns=clock.now_ns,
        )
        yield Asking(node, clock)
