"""POST /v1/check, its batch, and /v1/settle.

A check is on the path of somebody's request, so everything that can be looked up is looked up when
the handlers are made, and nothing but the store is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter_ns
from typing import Any

import msgspec

from tollkeeper.edge.answers import status_of
from tollkeeper.edge.problems import problem
from tollkeeper.edge.service.asked import Asked, Endpoint, in_scope
from tollkeeper.edge.service.node import Node
from tollkeeper.edge.service.replies import Reply, data_reply, ruling_reply
from tollkeeper.edge.service.wire import (
    BatchBody,
    CheckBody,
    SettleBody,
    reader_of,
    request_of,
    verdict_of,
)
from tollkeeper.errors import CapacityError, ConfigError, StoreError
from tollkeeper.model import Request
from tollkeeper.ruling import Ruling


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
    judge = node.limiter.judge
    read = reader_of(CheckBody)
    now_ns = node.now_ns
    style = node.settings.style
    took = node.counters.decision_seconds.note

    async def check(asked: Asked) -> Reply:
        body = read(asked.body)
        request = request_of(body)
        if asked.token.scope:
            request = in_scope(asked.token, request)
        began_ns = perf_counter_ns()
        ruling = await judge(request, body.cost)
        took(perf_counter_ns() - began_ns)
        return ruling_reply(ruling, now_ns(), style)

    return check


def _batch(node: Node) -> Callable[[Asked], Awaitable[Reply]]:
    limiter = node.limiter
    read = reader_of(BatchBody)
    # Over a network, all are asked at once; in memory, a task for each would only cost.
    waits = hasattr(limiter.store, "async_gate")
    took = node.counters.decision_seconds.note

    async def batch(asked: Asked) -> Reply:
        body = read(asked.body)
        wanted = [(in_scope(asked.token, each.request()), each.cost) for each in body.checks]
        if body.atomic:
            began_ns = perf_counter_ns()
            results = [_result(ruling) for ruling in await limiter.judge_all(wanted)]
            took(perf_counter_ns() - began_ns)
        elif waits:
            results = await asyncio.gather(*(one(*each) for each in wanted))
        else:
            results = [await one(*each) for each in wanted]
        return data_reply({"results": results})

    async def one(request: Request, cost: int) -> dict[str, Any]:
        began_ns = perf_counter_ns()
        try:
            ruling = await limiter.judge(request, cost)
            took(perf_counter_ns() - began_ns)
            return _result(ruling)
        except CapacityError as error:
            return _failed(422, "COST_EXCEEDS_CAPACITY", error)
        except ConfigError as error:
            return _failed(400, "INVALID_REQUEST", error)
        except StoreError as error:
            return _failed(503, "STORE_UNAVAILABLE", error)

    return batch


def _result(ruling: Ruling) -> dict[str, Any]:
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
        return data_reply(
            {"unsettled": await node.limiter.settle(request, body.reserved, body.actual)}
        )

    return settle
