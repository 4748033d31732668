"""A worker of the service, put together: settings in, a node that listens out.

Only here is it said which parts there are. A worker opens everything when its server starts and
closes it, in the other order, when the server has answered its last request.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from tollkeeper.control.database import Database
from tollkeeper.history.live import Live, Standing
from tollkeeper.history.reading import Records
from tollkeeper.history.recorder import Recorder
from tollkeeper.history.sink import Sink
from tollkeeper.history.trimming import Keep
from tollkeeper.limiter import AsyncLimiter
from tollkeeper.service.http import node as nodes
from tollkeeper.service.http.app import Service, service
from tollkeeper.service.http.asked import Receive, Scope, Send
from tollkeeper.service.http.metrics import fold_dead
from tollkeeper.service.http.node import Node
from tollkeeper.service.http.tokens import Tokens
from tollkeeper.service.process.ending import Drain, Ending
from tollkeeper.service.process.logs import event
from tollkeeper.service.process.settings import Settings
from tollkeeper.web.answers import Style
from tollkeeper.web.identity import Identity

# How often a worker looks whether its parent is still there.
_PARENT_SECONDS: Final = 1.0
# How long gRPC may take to answer what has begun.
_GRPC_GRACE_SECONDS: Final = 5.0

Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("tollkeeper.service")


def open_limiter(
    settings: Settings, counters: Path | None = None, *, follow: bool = True
) -> AsyncLimiter:
    """The limiter of a worker. Blocks until the rules are there; raises as `from_rules` does.

    The last good rules are kept: those of a database for whenever it is away; those of a file for
    this run, in its folder. Where a file is wrong, a service that is started says so and ends, but
    a worker that takes the place of a dead one goes on as the others do.
    """
    kept = Path(settings.data) if settings.database else counters
    return AsyncLimiter.from_rules(
        settings.rules,
        store=settings.store,
        on_failure=settings.on_failure,
        local_fallback=settings.local_fallback,
        follow=follow,
        snapshot=None if kept is None else kept / "rules.snapshot",
    )


def identity_of(settings: Settings) -> Identity:
    """Who sends the requests that gateways ask about. Raises ConfigError."""
    return Identity(settings.sources, trusted_proxies=settings.trusted_proxy)


def style_of(settings: Settings) -> Style:
    """Which headers are sent."""
    drafts: dict[str, Any] = {"10": 10, "7": 7, "6": 6, "none": None}
    return Style(draft=drafts[settings.draft], legacy=settings.legacy_headers)


def check_record(settings: Settings) -> None:
    """Raises ConfigError where no records can be kept, whatever comes."""
    if settings.record != "off":
        Database(settings.record)


def recorder_of(
    settings: Settings, limiter: AsyncLimiter, counters: Path | None
) -> Recorder | None:
    """What records the decisions of a worker; it has yet to be started."""
    if settings.record == "off":
        return None
    database = Database(settings.record)
    keep = Keep(settings.keep_decisions, settings.keep_usage)

    def penalties() -> list[Standing]:
        return [
            Standing(each.rule, each.subject, each.level, each.seconds, each.blocked, each.until_ns)
            for each in limiter.penalties()
        ]

    return Recorder(
        # A connection belongs to the event loop that it was made in.
        lambda row_of: Sink(database.again(), keep, row_of=row_of),
        Records(database, settings.record_subjects),
        node=settings.node_id,
        share=settings.sample,
        subjects=settings.record_subjects,
        live=None if counters is None else Live(counters),
        penalties=penalties,
    )


def open_node(settings: Settings, counters: Path | None) -> Node:
    """A node with everything open. Whoever has it closes its limiter, and stops its recorder."""
    answering = nodes.Settings(style_of(settings), counters=counters, worker=os.getpid())
    limiter = open_limiter(settings, counters)
    return Node(
        limiter=limiter,
        tokens=Tokens.load(settings.tokens_path, demanded=bool(settings.tokens)),
        node_id=settings.node_id,
        identity=identity_of(settings),
        settings=answering,
        started_ns=time.time_ns(),
        database=settings.database,
        recorder=recorder_of(settings, limiter, counters),
    )


def traced(node: Node) -> Callable[[Service], Asgi]:
    """Tell OpenTelemetry, where somebody has configured it in this process.

    Nobody has who has not imported it; then it is not imported here either. Gives what to put
    around the service, so that its spans are in the trace of those who ask.
    """
    if "opentelemetry" in sys.modules:
        from tollkeeper.metrics import otel  # noqa: PLC0415 - see above

        if otel.configured():
            otel.instrument(node.limiter)
            return otel.in_callers_trace
    return lambda answering: answering


class Worker:
    """The application that each worker process runs: a Service, once the server has started."""

    def __init__(self, settings: Settings, counters: Path, parent: int) -> None:
        """`counters` is the folder of this run, and `parent` the process that started it."""
        self._settings = settings
        self._counters = counters
        self._parent = parent
        self._service: Asgi | None = None

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Not a coroutine itself: one less on the path of every request."""
        if self._service is not None and scope["type"] != "lifespan":
            return self._service(scope, receive, send)
        return self._live(receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with AsyncExitStack() as stack:
            try:
                await self._start(stack)
            except Exception as error:
                log.exception("a worker cannot start", extra=event("failed"))
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            await send({"type": "lifespan.startup.complete"})
            await receive()
        log.info("a worker has ended", extra=event("worker_ended"))
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self, stack: AsyncExitStack) -> None:
        fold_dead(self._counters)
        node = open_node(self._settings, self._counters)
        stack.push_async_callback(node.limiter.close)
        if node.recorder is not None:
            await node.recorder.start()
            stack.push_async_callback(node.recorder.stop)
        around = traced(node)
        answering = service(node)
        await answering.start()
        stack.push_async_callback(answering.stop)
        drains = [await self._start_grpc(node, stack)] if self._settings.grpc else []
        Ending(node, drains, self._settings.drain_seconds).heed_signals()
        watching = asyncio.create_task(self._watch_parent())
        stack.callback(watching.cancel)
        self._service = around(answering)
        # What is there now stays. To look through all of it for garbage, every now and then, would
        # hold up whoever asks at that moment: 50 ms with 10,000 rules.
        gc.collect()
        gc.freeze()

    async def _start_grpc(self, node: Node, stack: AsyncExitStack) -> Drain:
        # Imported here: a service without gRPC needs none of its libraries.
        from tollkeeper.service.envoy.server import Tls, start  # noqa: PLC0415 - see above

        settings = self._settings
        tls = None
        if settings.tls_cert:
            tls = Tls(Path(settings.tls_cert), Path(settings.tls_key))
        handle = await start(node, settings.grpc, tls, on_failure=settings.on_failure)
        stack.push_async_callback(handle.stop, _GRPC_GRACE_SECONDS)
        return handle.drain

    async def _watch_parent(self) -> None:
        """A worker whose parent was killed would hold the port for ever."""
        while os.getppid() == self._parent:  # noqa: ASYNC110 - who is killed sets no event
            await asyncio.sleep(_PARENT_SECONDS)
        log.error("the service's main process is gone", extra=event("orphaned"))
        os.kill(os.getpid(), signal.SIGTERM)
