"""GET /healthz, /readyz and /metrics: is it alive, should it be sent requests, what has it counted.

A node whose store or rules are away is still ready: it answers as `on_failure` says and with the
last good rules, while nodes that are taken out answer nobody. The body tells what is wrong. Only a
node that is ending says 503.

None of them wants a token, for balancers and monitors have none. But errors name hosts and files,
and where tokens are asked for, strangers may be near: they are told that there is an error, and
those with a token which.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, Final

from tollkeeper.core.errors import StoreError
from tollkeeper.core.model import Limit
from tollkeeper.service.http.asked import Asked, Endpoint
from tollkeeper.service.http.metrics import CONTENT_TYPE, Metrics
from tollkeeper.service.http.node import Node
from tollkeeper.service.http.replies import NOT_KEPT, Reply, data_reply
from tollkeeper.service.http.tokens import Refused

# What the store is asked, to see whether it answers; nothing is spent.
_PROBE: Final = (Limit(1, per=1),)
_PROBE_RULE: Final = "tollkeeper.ready"
_UNTOLD: Final = "there is one; it is told to those who bring a token, and in the log"

Handler = Callable[[Asked], Awaitable[Reply]]


def endpoints(node: Node, metrics: Metrics) -> dict[str, dict[str, Endpoint]]:
    """The handlers by path and method."""
    found = {
        "/healthz": Endpoint(_alive(node)),
        "/readyz": Endpoint(_ready(node, metrics)),
        "/metrics": Endpoint(_metrics(metrics)),
    }
    return {path: {"GET": each, "HEAD": each} for path, each in found.items()}


def _alive(node: Node) -> Handler:
    async def alive(_: Asked) -> Reply:
        return data_reply({"status": "ok", "node": node.node_id})

    return alive


def _ready(node: Node, metrics: Metrics) -> Handler:
    async def ready(asked: Asked) -> Reply:
        rules, store = _rules(node), await _store(node)
        if not _is_known(node, asked):
            for part in (rules, store):
                part["error"] = part["error"] and _UNTOLD
        found = {
            "status": "stopping" if node.stopping else "ready",
            "node": node.node_id,
            "worker": node.settings.worker,
            "workers": metrics.workers(),
            "rules": rules,
            "store": store,
        }
        return data_reply(found, 503 if node.stopping else 200)

    return ready


def _is_known(node: Node, asked: Asked) -> bool:
    """Has whoever asks a token, of any role, or is none asked for?"""
    given = asked.headers.get(b"authorization")
    authorization = None if given is None else given.decode("latin-1")
    return not isinstance(node.tokens.permitted(authorization, "quota"), Refused)


def _rules(node: Node) -> dict[str, Any]:
    status = node.limiter.rules_status()
    return {
        "version": status.version,
        "origin": status.origin,
        "since": status.since.isoformat(timespec="seconds") if status.since else None,
        "age_seconds": None if status.age is None else round(status.age, 3),
        "error": status.error,
    }


async def _store(node: Node) -> dict[str, Any]:
    store: Any = node.limiter.store
    try:
        make: Any = store.gate if store.as_async is None else store.as_async.async_gate
        found = make(_PROBE, _PROBE_RULE).peek("ready", 0)
        if isawaitable(found):
            await found
    except StoreError as error:
        return {"healthy": False, "error": str(error)}
    return {"healthy": True, "error": ""}


def _metrics(metrics: Metrics) -> Handler:
    async def scrape(_: Asked) -> Reply:
        return Reply(200, [(b"content-type", CONTENT_TYPE), NOT_KEPT], await metrics.scraped())

    return scrape
