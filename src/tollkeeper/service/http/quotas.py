"""GET, DELETE /v1/quota and POST /v1/quota/grant: what is left, forgetting it, and giving more.

Looking asks each limit of each rule by itself, where a check asks them together: a check tells only
of the tightest, and here all are wanted. It spends nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, Final

from tollkeeper.core.errors import ConfigError
from tollkeeper.core.model import Decision, Limit, Request
from tollkeeper.core.subjects import SEPARATOR
from tollkeeper.rules.compiled import RuleCheck
from tollkeeper.service.http.asked import Asked, Endpoint, in_scope
from tollkeeper.service.http.node import Node
from tollkeeper.service.http.replies import Reply, data_reply
from tollkeeper.service.http.wire import GrantBody, limit_data, reader_of, request_of_query

# Gates of single limits that are kept; all are dropped when there are more.
_GATES_MAX: Final = 1_024
_KINDS: Final = {None: "unlimited", "allow": "exempt", "deny": "blocked"}

Handler = Callable[[Asked], Awaitable[Reply]]

log = logging.getLogger("tollkeeper.service")


def endpoints(node: Node) -> dict[str, dict[str, Endpoint]]:
    """The handlers by path and method."""
    look = Endpoint(_look(node), "quota")
    reset = Endpoint(_reset(node), "admin")
    grant = Endpoint(_grant(node), "admin", node.settings.body_bytes_max)
    return {
        "/v1/quota": {"GET": look, "HEAD": look, "DELETE": reset},
        "/v1/quota/grant": {"POST": grant},
    }


def _look(node: Node) -> Handler:
    single = _SingleLimits(node)

    async def look(asked: Asked) -> Reply:
        request = in_scope(asked.token, request_of_query(asked.scope["query_string"]))
        # Not `explain`, which asks all rules, and with 10,000 of them takes 100 ms.
        policy = node.limiter.compiled_rules
        plan = policy.plan(request, 1)
        checks = [*plan.enforced, *plan.shadowed]
        kind = "limited" if plan.enforced else _KINDS[plan.verdict]
        return data_reply({"kind": kind, "rules": [await _rule(single, check) for check in checks]})

    return look


async def _rule(single: _SingleLimits, check: RuleCheck) -> dict[str, Any]:
    rule = check.rule
    limits = []
    for place, limit in enumerate(check.prepared.limits):
        # Several where the rule keeps its limits in parts; together they are the whole.
        looks = [
            await single.peek(rule.id, gate.limits[place], subject) for gate, subject in check.parts
        ]
        numbers = {
            "remaining": sum(look.remaining for look in looks),
            "reset_after": max(look.reset_after for look in looks),
        }
        limits.append({**limit_data(limit), **numbers})
    return {
        "rule": rule.id,
        "mode": rule.mode,
        "subject": check.subject.replace(SEPARATOR, " "),
        "source": f"{check.choice.source} {check.choice.detail}".strip(),
        "cost": check.units,
        "limits": limits,
    }


class _SingleLimits:
    """Each limit of a rule by itself, on the counts that it has together with the others."""

    def __init__(self, node: Node) -> None:
        store: Any = node.limiter.store
        self._make: Callable[[tuple[Limit, ...], str], Any] = (
            store.gate if store.as_async is None else store.as_async.async_gate
        )
        self._gates: dict[tuple[str, Limit], Any] = {}

    async def peek(self, rule: str, limit: Limit, subject: str) -> Decision:
        """How it stands. Raises StoreError."""
        gate = self._gates.get((rule, limit))
        if gate is None:
            if len(self._gates) >= _GATES_MAX:
                self._gates.clear()
            gate = self._gates[rule, limit] = self._make((limit,), rule)
        found = gate.peek(subject, 0)
        decision: Decision = await found if isawaitable(found) else found
        return decision


def _reset(node: Node) -> Handler:
    async def reset(asked: Asked) -> Reply:
        # Whoever says it in a body would be told that it is done, and it would be somebody else's.
        length = asked.headers.get(b"content-length", b"0")
        if length.strip(b"0") or b"transfer-encoding" in asked.headers:
            raise ConfigError(
                "DELETE /v1/quota has no body; say in the query whose quota it is, like ?user=42"
            )
        request = request_of_query(asked.scope["query_string"])
        await node.limiter.reset(request)
        _note(node, asked, "reset", request)
        return Reply(204, [])

    return reset


def _grant(node: Node) -> Handler:
    read = reader_of(GrantBody)

    async def grant(asked: Asked) -> Reply:
        body = read(asked.body)
        request = body.request()
        await node.limiter.grant(request, body.units, body.ttl_seconds)
        _note(node, asked, "grant", request)
        return Reply(204, [])

    return grant


def _note(node: Node, asked: Asked, what: str, request: Request) -> None:
    """Into the log, without the key, as the admin API does: who did it, and to which rules."""
    plan = node.limiter.compiled_rules.plan(request, 0)
    rules = ", ".join(check.rule.id for check in (*plan.enforced, *plan.shadowed)) or "none"
    log.info("quota %s by %s; rules: %s", what, asked.token.name, rules)
