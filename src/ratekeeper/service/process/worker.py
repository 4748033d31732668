"""A worker process of the service: startup, requests and shutdown.

This module is the only place that puts the parts of a worker together: limiter, tokens, recorder,
HTTP application and gRPC server. A worker opens them when granian starts it and closes them in
reverse order after granian has answered the last request.

**Shutdown.** A worker ends in two steps, so that its clients can move to another worker or node.

1. *Drain.* SIGUSR1 (from the main process: the whole service shuts down) or SIGTERM (this worker
   shuts down) starts the drain, which takes `--drain-seconds`. Every answer now carries
   `Connection: close`. After SIGUSR1, `/readyz` also answers 503 and the gRPC health service
   reports NOT_SERVING. After SIGTERM alone they do not: the other workers keep serving.
2. *Stop.* The worker sends itself SIGINT. granian then closes the listening socket, answers the
   requests that it has read, and ends. More signals may follow: a terminal sends SIGINT to all
   processes, the main process passes it on, and granian sends SIGTERM. Only the first one reaches
   granian, because a second stop can deadlock it: one thread holds Python's lock and waits for
   granian's, and another the other way round (`SignalsOnce`).

SIGTERM does not always arrive at the end of the drain: systemd sends it to all processes of a
service at once, and SIGHUP makes the main process send it to one worker. So the worker waits out
the rest of the drain itself.

**Bound.** Every request that the worker has read is answered. A connection that the kernel accepted
but the worker has not read from when its listening socket closes is reset, as with any TCP server.
This can happen only in the instant in which step 2 begins; the client has to retry.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from granian import _signals as granian_signals

from ratekeeper.control.follow import without_secrets
from ratekeeper.core.errors import ConfigError
from ratekeeper.decide.failure import LocalFallback
from ratekeeper.history.live import ActivePenalty, ReportFolder
from ratekeeper.limiter import AsyncLimiter
from ratekeeper.regions.settings import Regions
from ratekeeper.service.console.sessions import FOLDER as SESSIONS
from ratekeeper.service.http.app import HttpService
from ratekeeper.service.http.context import Scope, Send, ServiceContext, WorkerSettings
from ratekeeper.service.http.health import fold_dead
from ratekeeper.service.http.incoming import Receive
from ratekeeper.service.http.tokens import Tokens
from ratekeeper.service.process.identify import identity_of
from ratekeeper.service.process.logs import event
from ratekeeper.service.process.settings import NO_RULES, ServiceSettings, is_loopback
from ratekeeper.web.answers import Style

if TYPE_CHECKING:
    from ratekeeper.history.recorder import Recorder

# How often a worker checks that its main process is still running.
_PARENT_SECONDS: Final = 1.0
# How long gRPC calls that are in progress may take at shutdown.
_GRPC_GRACE_SECONDS: Final = 5.0

Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
# Asks clients of a server to use another node.
Drain = Callable[[], Coroutine[Any, Any, None]]

log = logging.getLogger("ratekeeper.service")


def open_limiter(
    settings: ServiceSettings, counters: Path | None = None, *, follow: bool = True
) -> AsyncLimiter:
    """Open the limiter of a worker. Blocks until the rules are loaded; raises as `from_rules` does.

    A limiter that does not follow the rules is opened to try them. It takes no part in gossip and
    in the sync between regions.

    The last good rules are saved in a snapshot. For a database, the snapshot is in the data folder
    and serves whenever the database is unavailable. For a file, it is in the folder of this run: a
    service that starts with an invalid file reports that and ends, but a worker that replaces a
    dead one uses the same rules as the other workers.
    """
    folder = Path(settings.data) if settings.database else counters
    return AsyncLimiter.from_rules(
        {"version": 1} if settings.rules == NO_RULES else settings.rules,
        store=settings.store,
        on_failure=settings.on_failure,
        local_fallback=settings.local_fallback,
        fleet=settings.fleet if follow else settings.without_gossip().fleet,
        regions=_regions_of(settings, sync=follow),
        follow=follow,
        snapshot=None if folder is None else folder / "rules.snapshot",
    )


def _regions_of(settings: ServiceSettings, *, sync: bool) -> Regions | None:
    table = settings.region_table
    return None if table is None else replace(table, sync=sync)


def style_of(settings: ServiceSettings) -> Style:
    """Return which rate-limit headers the service sends."""
    drafts: dict[str, Any] = {"10": 10, "7": 7, "6": 6, "none": None}
    return Style(draft=drafts[settings.draft], legacy=settings.legacy_headers)


def check_record(settings: ServiceSettings) -> None:
    """Raise ConfigError if the URL of the records is invalid. Does not connect.

    Records and rules may share a database server, but not a SQLite file: records would fill it and
    block the writes of rules.
    """
    if settings.record == "off":
        return
    from ratekeeper.control.database import Database  # noqa: PLC0415 - see recorder_of

    records = Database(settings.record)
    rules = Database(settings.database) if settings.database else None
    if rules is not None and records.path is not None and records.path == rules.path:
        raise ConfigError(
            f"--record and --rules name the same SQLite file, {records.path}; records need a file "
            f"of their own, for example --record sqlite:///records.db"
        )


def recorder_of(
    settings: ServiceSettings, limiter: AsyncLimiter, counters: Path | None
) -> Recorder | None:
    """Return the recorder of a worker, not started yet; None if recording is off.

    A worker that records imports SQLAlchemy here, which takes 0.2 s and 20 MB. A service with its
    rules in a file and without records does not need it.
    """
    if settings.record == "off":
        return None
    from ratekeeper.control.database import Database  # noqa: PLC0415 - see above
    from ratekeeper.history.reading import Records  # noqa: PLC0415 - see above
    from ratekeeper.history.recorder import Recorder  # noqa: PLC0415 - see above
    from ratekeeper.history.sink import Sink  # noqa: PLC0415 - see above
    from ratekeeper.history.tables import Retention  # noqa: PLC0415 - see above

    database = Database(settings.record)
    keep = Retention(
        settings.keep_decisions,
        settings.keep_usage,
        settings.keep_rows,
        settings.keep_megabytes * 1_000_000,
    )

    def penalties() -> list[ActivePenalty]:
        return [
            ActivePenalty(
                each.rule, each.subject, each.level, each.seconds, each.blocked, each.until_ns
            )
            for each in limiter.penalties()
        ]

    regions = limiter.regions
    region = "" if regions is None else regions.region
    recorder = Recorder(
        # A connection belongs to the event loop that opened it.
        lambda row_of: Sink(database.again(), keep, row_of=row_of, region=region),
        Records(database, settings.record_subjects),
        node=settings.node_name,
        region=region,
        share=settings.sample,
        subjects=settings.record_subjects,
        live=None if counters is None else ReportFolder(counters),
        penalties=penalties,
    )
    if regions is not None:
        regions.on_excess(recorder.note_excess)
    return recorder


def open_context(settings: ServiceSettings, counters: Path | None) -> ServiceContext:
    """Open the context of a worker. The caller closes its limiter and stops its recorder."""
    answering = WorkerSettings(
        style_of(settings),
        counters=counters,
        loopback=is_loopback(settings.host),
        on_failure=settings.on_failure,
        # Each worker has its share: the limiters of calls are too many for a file of their own.
        local_fallback=LocalFallback(nodes=settings.nodes * settings.workers),
        worker=os.getpid(),
        sessions=Path(settings.data) / SESSIONS,
    )
    limiter = open_limiter(settings, counters)
    return ServiceContext(
        limiter=limiter,
        tokens=Tokens.load(settings.tokens_path, required=bool(settings.tokens)),
        node_id=settings.node_name,
        node_header=settings.node_header,
        identity=identity_of(settings),
        settings=answering,
        started_ns=time.time_ns(),
        database=settings.database,
        recorder=recorder_of(settings, limiter, counters),
        store_name=without_secrets(settings.store),
    )


def traced(context: ServiceContext) -> Callable[[HttpService], Asgi]:
    """Instrument the limiter if OpenTelemetry is configured in this process.

    Returns a wrapper for the HTTP application, which puts its spans into the trace of the caller.
    A process that has not imported OpenTelemetry has not configured it, so this function does not
    import it either.
    """
    if "opentelemetry" in sys.modules:
        from ratekeeper.metrics import otel  # noqa: PLC0415 - see above

        if otel.configured():
            otel.instrument(context.limiter)
            return otel.in_callers_trace
    return lambda answering: answering


class Worker:
    """The ASGI application that granian runs in each worker process."""

    def __init__(self, settings: ServiceSettings, counters: Path, parent: int) -> None:
        """`counters` is the folder of this run, `parent` the process id of the main process."""
        self._settings = settings
        self._counters = counters
        self._parent = parent
        self._service: Asgi | None = None

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass a request on. Not a coroutine: that saves one on the path of every request."""
        if self._service is not None and scope["type"] != "lifespan":
            return self._service(scope, receive, send)
        return self._lifespan(receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
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
        context = open_context(self._settings, self._counters)
        stack.push_async_callback(context.limiter.close)
        if context.recorder is not None:
            await context.recorder.start()
            stack.push_async_callback(context.recorder.stop)
        around = traced(context)
        answering = HttpService(context)
        await answering.start()
        if self._settings.console_link:  # an operator is about to open it
            await answering.open_admin()
        stack.push_async_callback(answering.stop)
        drains = [await self._start_grpc(context, stack)] if self._settings.grpc else []
        WorkerShutdown(context, drains, self._settings.drain_seconds).handle_signals()
        watching = asyncio.create_task(self._watch_parent())
        stack.callback(watching.cancel)
        self._service = around(answering)
        # These objects live as long as the worker. Without the freeze, every full garbage
        # collection would scan them and stop requests meanwhile: 50 ms with 10,000 rules.
        gc.collect()
        gc.freeze()

    async def _start_grpc(self, context: ServiceContext, stack: AsyncExitStack) -> Drain:
        # Imported here: a service without gRPC does not need its libraries.
        from ratekeeper.service.envoy.server import start  # noqa: PLC0415 - see above
        from ratekeeper.service.grpc.calls import TlsFiles  # noqa: PLC0415 - see above
        from ratekeeper.service.grpc.server import chosen  # noqa: PLC0415 - see above

        settings = self._settings
        tls = None
        if settings.tls_cert:
            authority = Path(settings.grpc_client_ca) if settings.grpc_client_ca else None
            tls = TlsFiles(Path(settings.tls_cert), Path(settings.tls_key), authority)
        handle = await start(
            context,
            settings.grpc,
            tls,
            on_failure=settings.on_failure,
            on=chosen(settings.grpc_server),
        )
        stack.push_async_callback(handle.stop, _GRPC_GRACE_SECONDS)
        return handle.drain

    async def _watch_parent(self) -> None:
        """Shut down if the main process was killed. Otherwise the worker would keep the port."""
        while os.getppid() == self._parent:  # noqa: ASYNC110 - a killed process sets no event
            await asyncio.sleep(_PARENT_SECONDS)
        log.error("the service's main process is gone", extra=event("orphaned"))
        os.kill(os.getpid(), signal.SIGTERM)


class SignalsOnce:
    """The event loop to which granian adds signal handlers. Only the first signal is handled."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_stopping = False

    def add_signal_handler(self, number: int, stop: Callable[..., None], *arguments: Any) -> None:
        """Call `stop` for a signal, unless a signal came before."""

        def stop_once() -> None:
            if not self._is_stopping:
                self._is_stopping = True
                stop(*arguments)

        self._loop.add_signal_handler(number, stop_once)

    @classmethod
    def use(cls) -> None:
        """Have granian add its handlers through this class. Call it before granian starts."""
        original: Callable[[Any], Any] = granian_signals.set_loop_signals
        granian_signals.set_loop_signals = lambda loop: original(cls(loop))


class WorkerShutdown:
    """Drains one worker and then stops it, as the module describes."""

    def __init__(self, context: ServiceContext, drains: Sequence[Drain], drain_s: float) -> None:
        """`drains` are called once when the whole service shuts down."""
        self._context = context
        self._drains = drains
        self._drain_s = drain_s
        self._loop = asyncio.get_running_loop()
        self._stop_at_s = 0.0
        # Referenced here, because the event loop alone would let a task be collected.
        self._draining: list[asyncio.Task[None]] = []

    def handle_signals(self) -> None:
        """Handle SIGUSR1 and SIGTERM from now on."""
        with suppress(NotImplementedError, ValueError):
            self._loop.add_signal_handler(signal.SIGUSR1, self.drain_service)
            self._loop.add_signal_handler(signal.SIGTERM, self.stop_worker)

    def drain_service(self) -> None:
        """Tell clients and load balancers that the whole service shuts down."""
        self._close_connections()
        if not self._context.stopping:
            self._context.stopping = True
            self._draining.extend(asyncio.create_task(drain()) for drain in self._drains)

    def stop_worker(self) -> None:
        """Stop this worker when its drain is over."""
        self._close_connections()
        self._loop.call_at(self._stop_at_s, os.kill, os.getpid(), signal.SIGINT)

    def _close_connections(self) -> None:
        """Answer with `Connection: close` from now on; the drain starts the first time."""
        if not self._context.closing:
            self._context.closing = True
            self._stop_at_s = self._loop.time() + self._drain_s
