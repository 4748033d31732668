"""The main process of a service: granian's, and how it ends.

Workers are processes of their own with an event loop of their own, and the kernel spreads the
connections over them. The main process answers nobody: it starts a worker again that has died, and
ends them all in order.

SIGTERM: `/readyz` says 503 and every answer says `Connection: close`, so that load balancers and
clients go elsewhere; after `--drain-seconds` no new connection is taken, and what has begun is
finished, within `--shutdown-seconds`. SIGINT, from a terminal, does not wait for anybody to go
elsewhere; nor does a second SIGTERM.

SIGHUP: workers are replaced, one after another. Each stays until the one that takes its place is
up, and stays for good if that one cannot start.
"""

from __future__ import annotations

import http.client
import logging
import multiprocessing
import os
import signal
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final

from granian import Granian
from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP1Settings
from granian.log import LogLevels

from tollkeeper.control.sources import without_secrets
from tollkeeper.core.version import __version__
from tollkeeper.service.http.tokens import Tokens
from tollkeeper.service.process import logs
from tollkeeper.service.process.settings import Settings

# Connections that a worker has at a time; others wait until one of them ends.
BACKPRESSURE: Final = 1_024
# What the head of a request may take; hyper doubles its buffer, so in memory twice as much.
HEAD_BYTES_MAX: Final = 64 * 1024
HEAD_READ_MS: Final = 10_000
READY_SECONDS_MAX: Final = 60.0
_READY_PAUSE_SECONDS: Final = 0.05
# From a worker's first count, which it leaves before it listens, until it surely does.
_LISTENS_SECONDS: Final = 0.5
# `timeout` sends SIGTERM to its child and then to all of its group: so soon, that is the same one.
_SAME_SECONDS: Final = 0.5
# A worker that ends so often in a row, each time this soon after it was started again, never will
# be well; one that was killed a few times, by an operator or for its memory, is no reason to end
# those that are.
QUICK_ENDS_MAX: Final = 5
QUICK_END_SECONDS: Final = 5.5
_ANY_HOST: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - to ask, not to listen

log = logging.getLogger("tollkeeper.service")


def load_worker(settings: Settings, counters: Path, parent: int) -> Any:
    """What a worker process runs. Called in that process."""
    # Held back since before this process was made: who is interrupted while it starts would say so
    # with a traceback. The parent, who was interrupted as well, ends it in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    from tollkeeper.service.process.wiring import Worker  # noqa: PLC0415 - the parent needs none of it

    return Worker(settings, counters, parent)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """SIGINT waits until the end of the block; processes that are made inside never hear of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve_until_told(settings: Settings, counters: Path, version: str) -> None:
    """Start the workers, say where they are, and return when all have ended."""
    # A forked process would have the threads' locks without the threads.
    multiprocessing.set_start_method("spawn", force=True)
    # Kept over `exec`: a worker that hears of the end before it listens does not die of it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    server = _server(settings)
    server.counters = counters
    threading.Thread(target=_announce, args=(settings, version), daemon=True).start()
    server.serve(
        target_loader=partial(load_worker, settings, counters, os.getpid()), wrap_loader=False
    )


def _server(settings: Settings) -> Draining:
    logging_config = logs.configuration(settings.log_format, settings.node_id)
    server = Draining(
        "tollkeeper",
        address=settings.host,
        port=settings.port,
        interface=Interfaces.ASGI,
        workers=settings.workers,
        backpressure=BACKPRESSURE,
        websockets=False,
        # Where HTTP/2 is spoken too, granian waits for ever for the bytes that tell which it is:
        # whoever opens as many connections as there may be, and says nothing, has them all.
        http=HTTPModes.http1,
        http1_settings=HTTP1Settings(
            header_read_timeout=HEAD_READ_MS, max_buffer_size=HEAD_BYTES_MAX
        ),
        log_level=LogLevels.warning,
        log_dictconfig=logging_config,
        log_access=settings.access_log,
        log_access_format=logs.ACCESS_FORMAT,
        ssl_cert=Path(settings.tls_cert) if settings.tls_cert else None,
        ssl_key=Path(settings.tls_key) if settings.tls_key else None,
        ssl_protocol_min=SSLProtocols.tls12,
        respawn_failed_workers=True,
        workers_kill_timeout=int(settings.shutdown_seconds),
    )
    if settings.tls_cert:
        # granian follows links, and here: who renews certificates makes other ones, and may remove
        # what they led to.
        files = (str(Path(each).absolute()) for each in (settings.tls_cert, settings.tls_key))
        server.ssl_ctx = (server.ssl_ctx[0], *files, *server.ssl_ctx[3:])
    server.drain_s = settings.drain_seconds
    server.respawned_wrks = Restarts()
    return server


class Draining(Granian):  # type: ignore[misc, valid-type]  # a variable: one of two servers
    """The server, which tells its workers of the end some time before it comes."""

    drain_s: float = 0.0
    counters: Path = Path()
    _told = False
    _told_s = 0.0

    def signal_handler_interrupt(self, signum: int = 0, *_: Any) -> None:
        """Of SIGTERM and SIGINT."""
        first = not self._told
        if not first and signum == signal.SIGTERM and monotonic() - self._told_s < _SAME_SECONDS:
            return
        self._told = True
        if first:
            self._told_s = monotonic()
            name = signal.Signals(signum).name
            log.info("ending: %s", name, extra=logs.event("ending", signal=name))
            self._signal_workers(signal.SIGUSR1)
        if first and signum == signal.SIGTERM and self.drain_s:
            end: Callable[[], None] = super().signal_handler_interrupt
            timer = threading.Timer(self.drain_s, end)
            timer.daemon = True
            timer.start()
        else:
            self._signal_workers(signal.SIGINT)
            super().signal_handler_interrupt()

    def _signal_workers(self, signum: signal.Signals) -> None:
        for worker in list(self.wrks):
            # Whoever ends from now on does so because it was told to, by us or beside us.
            worker.interrupt_by_parent = True
            with suppress(OSError, TypeError):
                os.kill(worker.inner.pid, signum)

    def _spawn_workers(self, *how: Any) -> None:
        with _uninterrupted():
            super()._spawn_workers(*how)

    def _respawn_workers(
        self, workers: list[int], spawn_target: Any, target_loader: Any, delay: float = 0.0
    ) -> None:
        """Of those that have died, or (with a `delay`, at SIGHUP) of those that are to be replaced.

        granian ends the old one when the delay is over, whatever has become of the new one.
        """
        for number in workers:
            old = self.wrks[number]
            if self._told or (old.is_alive() and not delay):
                continue
            with _uninterrupted():
                new = self._spawn_worker(
                    idx=number, target=spawn_target, callback_loader=target_loader
                )
                new.start()
            self.respawned_wrks[number] = monotonic()
            if not delay or self._is_up(new):
                self.wrks[number] = new
                self._end(old)
                continue
            self._end(new)
            if not self._told:
                log.error(
                    "a worker that was to replace another one does not start; the old ones stay",
                    extra=logs.event("not_replaced"),
                )
                return

    def _is_up(self, worker: Any) -> bool:
        """Waits until a worker listens; False if it ends before, or all are told to end."""
        pause = threading.Event()
        for _ in range(int(READY_SECONDS_MAX / _READY_PAUSE_SECONDS)):
            if self._told or not worker.is_alive():
                return False
            if (self.counters / f"{worker.inner.pid}.json").exists():
                pause.wait(_LISTENS_SECONDS)
                return True
            pause.wait(_READY_PAUSE_SECONDS)
        return False

    def _end(self, worker: Any) -> None:
        worker.terminate()
        worker.join(self.drain_s + self.workers_kill_timeout)
        if worker.is_alive():
            worker.kill()
            worker.join()


class Restarts(dict[int, float]):
    """When each worker was last started again, by its number.

    granian ends all workers when it finds here that one of them ended within QUICK_END_SECONDS of
    being started again, the first time already. So it is told only when it has happened often.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._quick_ends: Counter[int] = Counter()

    def get(self, number: int, default: float = 0.0) -> float:  # type: ignore[override]  # narrower
        """Asked when that worker has ended. `default` is as good as long ago."""
        started = super().get(number, default)
        if self._clock() - started > QUICK_END_SECONDS:
            del self._quick_ends[number]
            return default
        self._quick_ends[number] += 1
        return started if self._quick_ends[number] > QUICK_ENDS_MAX else default

    def clear(self) -> None:
        """Not what others have done before: every worker has a history of its own."""


# ── The one line at the start ──────────────────────────────────────────────────────────────────


def _announce(settings: Settings, version: str) -> None:
    """Say where it listens, once it does."""
    pause = threading.Event()
    for _ in range(int(READY_SECONDS_MAX / _READY_PAUSE_SECONDS)):
        if _answers(settings):
            log.info(started_line(settings, version), extra=_started(settings, version))
            return
        pause.wait(_READY_PAUSE_SECONDS)
    log.warning("nobody answers after %g s", READY_SECONDS_MAX, extra=logs.event("not_ready"))


def _answers(settings: Settings) -> bool:
    host = _ANY_HOST.get(settings.host, settings.host)
    connection: http.client.HTTPConnection
    if settings.tls_cert:
        # It asks itself, over loopback, whether it is there; who it is, it knows.
        trusting = ssl._create_unverified_context()  # noqa: S323, SLF001 - see above
        connection = http.client.HTTPSConnection(host, settings.port, timeout=2, context=trusting)
    else:
        connection = http.client.HTTPConnection(host, settings.port, timeout=2)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _started(settings: Settings, version: str) -> dict[str, Any]:
    return logs.event(
        "started",
        version=__version__,
        url=url_of(settings),
        grpc=settings.grpc,
        workers=settings.workers,
        rules=_shown(settings.rules),
        rules_version=version,
        store=_shown(settings.store),
        pid=os.getpid(),
    )


def url_of(settings: Settings) -> str:
    """Where it is asked."""
    scheme = "https" if settings.tls_cert else "http"
    host = _ANY_HOST.get(settings.host, settings.host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"


def started_line(settings: Settings, version: str) -> str:
    """One line: where, with which rules, on which store, and how to try it."""
    url = url_of(settings)
    options = "-k " if settings.tls_cert else ""
    if Tokens.load(settings.tokens_path).demanded:
        options += '-H "Authorization: Bearer $TOLLKEEPER_TOKEN" '
    grpc = f", gRPC {settings.grpc}" if settings.grpc else ""
    return (
        f"tollkeeper {__version__} on {url}{grpc}; workers: {settings.workers}; "
        f"rules {_shown(settings.rules)}, version {version}; store {_shown(settings.store)}; "
        f'try: curl {options}{url}/v1/check -d \'{{"user": "42"}}\''
    )


def _shown(uri: str) -> str:
    return without_secrets(uri) if "://" in uri else uri
