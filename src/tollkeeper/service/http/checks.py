"""POST /v1/check, its batch, and /v1/settle.

A check is on the path of somebody's request, so everything that can be looked up is looked up when
the handlers are made, and nothing is waited for but a store that is a trip away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, Final

import msgspec

from tollkeeper.core import switches
from tollkeeper.core.errors import CapacityError, ConfigError, StoreError
from tollkeeper.core.model import CheckResult, Request
from tollkeeper.rules.ruled import Repeated, RuledGate
from tollkeeper.service.http.asked import Asked, Endpoint, in_scope
from tollkeeper.service.http.giving_back import give_back
from tollkeeper.service.http.node import Node
from tollkeeper.service.http.replies import Reply, data_reply, ruling_reply
from tollkeeper.service.http.wire import (
    BatchBody,
    CheckBody,
    SettleBody,
    reader_of,
    request_of,
    verdict_of,
)
from tollkeeper.web.answers import status_of
from tollkeeper.web.problems import problem

# Of bodies that were read before: at most 4 MB in all, with what they have to pass.
KNOWN_MAX: Final = 2_048
KNOWN_BYTES_MAX: Final = 512


def endpoints(node: Node) -> dict[str, dict[str, Endpoint]]:
    """The handlers by path and method."""
    settings = node.settings
    one, many = settings.body_bytes_max, settings.batch_bytes_max
    return {
        "/v1/check": {"POST": Endpoint(_check(node), "check", one)},
        "/v1/check/batch": {"POST": Endpoint(_batch(node), "check", many)},
        "/v1/settle": {"POST": Endpoint(_settle(node), "check", one)},
    }


def _check(node: Node) -> Callable[[Asked], Awaitable[Reply]]:
    asked_before = _AskedBefore()
    known = asked_before.known
    evaluate = node.limiter.evaluate
    gate = _gate_at_once(node)
    now_ns = node.now_ns
    style = node.settings.style
    took = node.counters.decision_seconds.note
    recorder = node.recorder

    async def check(asked: Asked) -> Reply:
        body = asked[2]
        repeated = known.get(body)
        known_now = repeated or asked_before.read(body)
        request, cost = known_now.request, known_now.cost
        scope = asked[3].scope
        if scope:
            request = in_scope(asked.token, request)
        began_ns = perf_counter_ns()
        if gate is None or switches.limiting_off:
            ruling = await evaluate(request, cost)
        elif repeated is None or scope:
            # What is kept for a request that never comes again costs more than it saves.
            ruling = gate.evaluate(request, cost, spend=True)
        else:
            ruling = gate.evaluate_again(repeated)
        took(perf_counter_ns() - began_ns)
        told_ns = now_ns()
        if recorder is not None:
            recorder.note(request, ruling, cost, told_ns)
        return ruling_reply(ruling, told_ns, style)

    return check


class _AskedBefore:
    """Bodies that were read before: whoever asks often asks the same, byte for byte.

    Reading one takes a microsecond, a tenth of what a check takes here; to look it up, a tenth of
    that. A request never changes, so all who ask the same can have the same one, and what it has to
    pass is looked for once, when it comes again.
    """

    def __init__(self) -> None:
        self.known: dict[bytes, Repeated] = {}
        self._read = reader_of(CheckBody)

    def read(self, body: bytes) -> Repeated:
        """The request and its cost. Raises ConfigError."""
        fields = self._read(body)
        found = Repeated(request_of(fields), fields.cost)
        if len(body) <= KNOWN_BYTES_MAX:
            if len(self.known) >= KNOWN_MAX:
                self.known.clear()
            self.known[body] = found
        return found


def _gate_at_once(node: Node) -> RuledGate | None:
    """What `limiter.evaluate` asks where the store does no I/O: then there is nothing to await."""
    if "evaluate" in vars(node.limiter):
        return None  # somebody has put his own there, such as one that traces
    gate = node.limiter._ruled_gate()  # noqa: SLF001 - on the path of every check
    return gate if isinstance(gate, RuledGate) else None


def _batch(node: Node) -> Callable[[Asked], Awaitable[Reply]]:
    limiter = node.limiter
    read = reader_of(BatchBody)
    # Over a network, all are asked at once; in memory, a task for each would only cost.
    waits = limiter.store.as_async is not None
    took = node.counters.decision_seconds.note

    async def batch(asked: Asked) -> Reply:
        body = read(asked.body)
        wanted = [(in_scope(asked.token, each.request()), each.cost) for each in body.checks]
        if body.atomic:
            began_ns = perf_counter_ns()
            rulings = await limiter.evaluate_all(wanted)
            took(perf_counter_ns() - began_ns)
            if node.recorder is not None:
                node.recorder.note_all(wanted, rulings, node.now_ns())
            results = [_result(ruling) for ruling in rulings]
        elif waits:
            results = await asyncio.gather(*(one(*each) for each in wanted))
        else:
            results = [await one(*each) for each in wanted]
        return data_reply({"results": results})

    async def one(request: Request, cost: int) -> dict[str, Any]:
        began_ns = perf_counter_ns()
        try:
            ruling = await limiter.evaluate(request, cost)
            took(perf_counter_ns() - began_ns)
            if node.recorder is not None:
                node.recorder.note(request, ruling, cost, node.now_ns())
            return _result(ruling)
        except CapacityError as error:
            return _failed(422, "COST_EXCEEDS_CAPACITY", error)
        except ConfigError as error:
            return _failed(400, "INVALID_REQUEST", error)
        except StoreError as error:
            return _failed(503, "STORE_UNAVAILABLE", error)

    return batch


def _result(ruling: CheckResult) -> dict[str, Any]:
    """One of a batch: what would have been answered to it alone."""
    return {"status": status_of(ruling), **msgspec.structs.asdict(verdict_of(ruling))}


def _failed(status: int, code: str, error: Exception) -> dict[str, Any]:
    """One of a batch that cannot be decided; the others are none the worse for it."""
    return {"status": status, "allowed": False, "error": problem(status, code, str(error))["error"]}


def _settle(node: Node) -> Callable[[Asked], Awaitable[Reply]]:
    read = reader_of(SettleBody)

    async def settle(asked: Asked) -> Reply:
        body = read(asked.body)
        request = in_scope(asked.token, body.request())
        if body.actual < body.reserved:
            units = body.reserved - body.actual
            await give_back(node.limiter, asked.token.scope, request, units)
            if not asked.token.scope:  # or a customer could take back what he is billed for
                await _record_settled(node, request, -units)
            return data_reply({"unsettled": 0})
        unsettled = await node.limiter.settle(request, body.reserved, body.actual)
        await _record_settled(node, request, body.actual - body.reserved - unsettled)
        return data_reply({"unsettled": unsettled})

    return settle


async def _record_settled(node: Node, request: Request, units: int) -> None:
    """Usage is what was spent in the end; who is counted is asked for one unit, and not spent."""
    if node.recorder is None or not units:
        return
    with suppress(CapacityError, StoreError):
        ruling = await node.limiter.evaluate(request, 1, spend=False)
        if not ruling.decision.degraded:
            node.recorder.settle(ruling, units, node.now_ns())
