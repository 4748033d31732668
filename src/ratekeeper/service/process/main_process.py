"""The main process of a service: it runs granian, restarts workers and shuts them down.

Each worker is a process with its own event loop, and the kernel distributes connections over them
(SO_REUSEPORT). The main process answers no requests. It starts a new worker when one dies.

SIGTERM drains the service and then stops it. `/readyz` answers 503 and every answer carries
`Connection: close`, so that load balancers and clients move to another node. After
`--drain-seconds` the workers close their listening sockets. Requests that they have read by then
are answered, within `--shutdown-seconds`. SIGINT (Ctrl-C) skips the drain; so does a second
SIGTERM. `worker.py` describes the same from the worker's side.

SIGHUP replaces the workers, one after another. An old worker keeps serving until its replacement
listens, and stays if the replacement cannot start.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import shlex
import signal
import ssl
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from multiprocessing import resource_tracker
from pathlib import Path
from time import monotonic
from typing import Any, Final

from granian import Granian
from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP1Settings
from granian.log import LogLevels

from ratekeeper.control.follow import without_secrets
from ratekeeper.core.errors import ConfigError
from ratekeeper.core.version import __version__
from ratekeeper.service.console.sessions import (
    CONSOLE,
    LINK_SECONDS,
    Sessions,
    link_url,
    login_name,
)
from ratekeeper.service.http.tokens import Tokens
from ratekeeper.service.process import logs
from ratekeeper.service.process.settings import ServiceSettings

# The most connections that a worker has open; further ones wait in the backlog. One client may open
# thousands and send nothing: an idle connection takes 2 kB, and is closed after HEAD_READ_MS.
CONNECTIONS_MAX: Final = 8_192
# Open files that are not connections: the store, the databases, the logs.
_OTHER_FILES: Final = 256
_CONNECTIONS_MIN: Final = 64
# The buffer for the head of a request. hyper doubles it once more, so heads of up to 64 KiB may
# pass and longer ones do not (431).
HEAD_BYTES_MAX: Final = 32 * 1024
HEAD_READ_MS: Final = 10_000
# With fewer connections than this, an idle one is closed sooner, so that the next one is accepted.
FEW_CONNECTIONS: Final = 512
FEW_HEAD_READ_MS: Final = 1_000
READY_SECONDS_MAX: Final = 60.0
_READY_PAUSE_SECONDS: Final = 0.05
# A worker writes its counters file just before it listens; after this time it surely listens.
_LISTENS_SECONDS: Final = 0.5
# `timeout` sends SIGTERM to its child and then to its process group: two signals, one request.
_SAME_SIGNAL_SECONDS: Final = 0.5
# A worker that ends this many times in a row, each time this soon after its start, will not
# recover. A few kills (an operator, the out-of-memory killer) do not end the whole service.
QUICK_ENDS_MAX: Final = 5
QUICK_END_SECONDS: Final = 5.5
# A service that listens on every address is called on loopback.
_CALLABLE_HOST: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not to listen on
# A request that most rules of the examples match.
_TRIED: Final = '{"api_key": "sk_1", "endpoint": "/v1/search"}'

log = logging.getLogger("ratekeeper.service")


def load_worker(settings: ServiceSettings, counters: Path, parent: int) -> Any:
    """Return the application of a worker. granian calls this in the worker process."""
    # The main process blocked SIGINT before it started this one: Ctrl-C during startup would
    # print a traceback. The main process receives Ctrl-C too and shuts the worker down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    from ratekeeper.service.process.worker import (  # noqa: PLC0415 - only workers need it
        SignalsOnce,
        Worker,
    )

    SignalsOnce.use()
    return Worker(settings, counters, parent)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT inside the block; processes that are started there inherit that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve_until_signal(settings: ServiceSettings, counters: Path, version: str, rules: int) -> None:
    """Start the workers, log where they listen, and return when all of them have ended.

    `version` and `rules` are the version and the number of the rules in force.
    """
    # Not fork: a forked process would inherit locks that threads hold, without the threads.
    multiprocessing.set_start_method("spawn", force=True)
    # Starting the tracker unblocks SIGINT. If the first worker started it, no worker would inherit
    # the block of `_sigint_blocked`.
    resource_tracker.ensure_running()
    # Workers inherit this, so SIGUSR1 does not kill one that has not installed its handler yet.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if connections_max() < FEW_CONNECTIONS:
        log.warning(
            "each worker accepts only %d connections, because it may open only %d files; raise the "
            "limit (ulimit -n 65536, LimitNOFILE= of systemd) before you serve strangers",
            connections_max(),
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            extra=logs.event("few_files", connections=connections_max()),
        )
    server = _server(settings)
    server.counters = counters
    threading.Thread(target=_announce, args=(settings, version, rules), daemon=True).start()
    server.serve(
        target_loader=partial(load_worker, settings, counters, os.getpid()), wrap_loader=False
    )


def _server(settings: ServiceSettings) -> DrainingServer:
    server = DrainingServer(
        "ratekeeper",
        address=settings.host,
        port=settings.port,
        interface=Interfaces.ASGI,
        workers=settings.workers,
        backpressure=connections_max(),
        websockets=False,
        # With HTTP/2 enabled, granian waits without a timeout for the first bytes, which show the
        # protocol: idle clients could occupy all connections.
        http=HTTPModes.http1,
        http1_settings=HTTP1Settings(
            header_read_timeout=head_read_ms(), max_buffer_size=HEAD_BYTES_MAX
        ),
        log_level=LogLevels.warning,
        log_dictconfig=logs.configuration(settings.log_format, settings.node_name),
        log_access=settings.access_log,
        log_access_format=logs.ACCESS_FORMAT,
        ssl_cert=Path(settings.tls_cert) if settings.tls_cert else None,
        ssl_key=Path(settings.tls_key) if settings.tls_key else None,
        ssl_protocol_min=SSLProtocols.tls12,
        respawn_failed_workers=True,
        workers_kill_timeout=int(settings.shutdown_seconds),
    )
    if settings.tls_cert:
        # granian resolves symbolic links once, at startup. Tools that renew certificates point
        # the link to a new file and may delete the old one, so workers get the link itself.
        files = (str(Path(each).absolute()) for each in (settings.tls_cert, settings.tls_key))
        server.ssl_ctx = (server.ssl_ctx[0], *files, *server.ssl_ctx[3:])
    server.drain_s = settings.drain_seconds
    server.respawned_wrks = WorkerRestarts()
    return server


def connections_max() -> int:
    """Return how many connections a worker may have: fewer if it may open only few files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return max(min(CONNECTIONS_MAX, files - _OTHER_FILES), _CONNECTIONS_MIN)


def head_read_ms() -> int:
    """Return how long a connection may be idle, and a head may take to arrive."""
    return FEW_HEAD_READ_MS if connections_max() < FEW_CONNECTIONS else HEAD_READ_MS


class DrainingServer(Granian):  # type: ignore[misc, valid-type]  # a variable: one of two servers
    """granian's server, with a drain before the shutdown and a safer replacement of workers."""

    drain_s: float = 0.0
    counters: Path = Path()
    _ending = False
    _ending_since_s = 0.0

    def signal_handler_interrupt(self, signum: int = 0, *_: Any) -> None:
        """Handle SIGTERM and SIGINT."""
        first = not self._ending
        repeated = not first and monotonic() - self._ending_since_s < _SAME_SIGNAL_SECONDS
        if repeated and signum == signal.SIGTERM:
            return
        self._ending = True
        if first:
            self._ending_since_s = monotonic()
            name = signal.Signals(signum).name
            log.info("shutting down: %s", name, extra=logs.event("ending", signal=name))
            self._signal_workers(signal.SIGUSR1)
        if first and signum == signal.SIGTERM and self.drain_s:
            stop: Callable[[], None] = super().signal_handler_interrupt
            timer = threading.Timer(self.drain_s, stop)
            timer.daemon = True
            timer.start()
        else:
            self._signal_workers(signal.SIGINT)
            super().signal_handler_interrupt()

    def _signal_workers(self, signum: signal.Signals) -> None:
        for worker in list(self.wrks):
            # From now on a worker that ends is not restarted: it was asked to end.
            worker.interrupt_by_parent = True
            with suppress(OSError, TypeError):
                os.kill(worker.inner.pid, signum)

    def _spawn_workers(self, *how: Any) -> None:
        with _sigint_blocked():
            super()._spawn_workers(*how)

    def _respawn_workers(
        self, workers: list[int], spawn_target: Any, target_loader: Any, delay: float = 0.0
    ) -> None:
        """Start new workers in place of dead ones or, with a `delay` (SIGHUP), of running ones.

        granian would stop the old worker after the delay, even if the new one cannot start.
        """
        for number in workers:
            old = self.wrks[number]
            if self._ending or (old.is_alive() and not delay):
                continue
            with _sigint_blocked():
                new = self._spawn_worker(
                    idx=number, target=spawn_target, callback_loader=target_loader
                )
                new.start()
            self.respawned_wrks[number] = monotonic()
            if not delay or self._is_up(new):
                self.wrks[number] = new
                self._stop_worker(old)
                continue
            self._stop_worker(new)
            if not self._ending:
                log.error(
                    "a replacement worker cannot start; the old workers keep serving",
                    extra=logs.event("not_replaced"),
                )
                return

    def _is_up(self, worker: Any) -> bool:
        """Wait until a worker listens. False if it ends first, or if the service shuts down."""
        pause = threading.Event()
        for _ in range(int(READY_SECONDS_MAX / _READY_PAUSE_SECONDS)):
            if self._ending or not worker.is_alive():
                return False
            if (self.counters / f"{worker.inner.pid}.json").exists():
                pause.wait(_LISTENS_SECONDS)
                return True
            pause.wait(_READY_PAUSE_SECONDS)
        return False

    def _stop_worker(self, worker: Any) -> None:
        worker.terminate()
        worker.join(self.drain_s + self.workers_kill_timeout)
        if worker.is_alive():
            worker.kill()
            worker.join()


class WorkerRestarts(dict[int, float]):
    """When each worker was last restarted, by its number.

    granian looks here when a worker has ended, and shuts the service down if that worker was
    restarted less than QUICK_END_SECONDS ago, the first time already. This dictionary reports a
    recent restart only after QUICK_ENDS_MAX quick ends in a row.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._quick_ends: Counter[int] = Counter()

    def get(self, number: int, default: float = 0.0) -> float:  # type: ignore[override]  # narrower
        """Return when a worker that has ended was restarted; `default` stands for long ago."""
        started = super().get(number, default)
        if self._clock() - started > QUICK_END_SECONDS:
            del self._quick_ends[number]
            return default
        self._quick_ends[number] += 1
        return started if self._quick_ends[number] > QUICK_ENDS_MAX else default

    def clear(self) -> None:
        """Do nothing. granian clears the times of all workers when one of them ends."""


# ── The lines at startup ───────────────────────────────────────────────────────────────────────


def _announce(settings: ServiceSettings, version: str, rules: int) -> None:
    """Log where the service listens as soon as it answers."""
    pause = threading.Event()
    for _ in range(int(READY_SECONDS_MAX / _READY_PAUSE_SECONDS)):
        if _answers(settings):
            lines = started_lines(settings, version, rules)
            # For people one fact on each line; for programs one short message beside the fields.
            message = "\n".join(lines) if settings.log_format == "text" else lines[0]
            log.info("%s", message, extra=_started(settings, version, rules))
            if settings.console_link:
                _print_link(settings)
            return
        pause.wait(_READY_PAUSE_SECONDS)
    log.warning(
        "the service does not answer after %g s", READY_SECONDS_MAX, extra=logs.event("not_ready")
    )


def _print_link(settings: ServiceSettings) -> None:
    """Print a one-time login link below the lines for people; never into a log of JSON.

    The link is a secret, so it is not logged: it is written to standard error, for the operator who
    started the service with `--console-link`.
    """
    data, url = shlex.quote(settings.data), url_of(settings)
    command = f"ratekeeper console link --data {data} --url {url}"
    if settings.log_format != "text" or sys.stderr is None:
        log.info(
            "no login link is printed into a log of JSON; make one with: %s",
            command,
            extra=logs.event("no_console_link"),
        )
        return
    try:
        code = Sessions.of(settings.data).make_link(login_name(), "admin")
    except ConfigError as error:
        log.warning("no login link: %s", error, extra=logs.event("no_console_link"))
        return
    sys.stderr.write(
        f"  log in   {link_url(url, code)}\n"
        f"           once, within {LINK_SECONDS // 60} minutes; then: {command}\n"
    )
    sys.stderr.flush()


def _answers(settings: ServiceSettings) -> bool:
    """Return True if `/healthz` answers 200."""
    # Not httpx: its import would take a tenth of the time until the service is ready.
    connection = HTTPConnection(_callable_host(settings), settings.port, timeout=2)
    if settings.tls_cert:
        # The service calls itself, so its certificate does not have to be verified.
        context = ssl._create_unverified_context()  # noqa: S323, SLF001 - see above
        connection = HTTPSConnection(connection.host, settings.port, timeout=2, context=context)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _started(settings: ServiceSettings, version: str, rules: int) -> dict[str, Any]:
    return logs.event(
        "started",
        version=__version__,
        node_header=settings.node_header,
        url=url_of(settings),
        console=f"{url_of(settings)}{CONSOLE}",
        grpc=settings.grpc,
        grpc_server=_grpc_server(settings) if settings.grpc else "",
        gossip=settings.gossip,
        region=settings.region,
        workers=settings.workers,
        rules=_shown(settings.rules),
        rules_version=version,
        rules_count=rules,
        store=_shown(settings.store),
        pid=os.getpid(),
    )


def _grpc_server(settings: ServiceSettings) -> str:
    from ratekeeper.service.grpc.server import chosen  # noqa: PLC0415 - not without gRPC

    return chosen(settings.grpc_server)


def url_of(settings: ServiceSettings) -> str:
    """Return the URL of the service."""
    scheme = "https" if settings.tls_cert else "http"
    host = _callable_host(settings)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _callable_host(settings: ServiceSettings) -> str:
    return _CALLABLE_HOST.get(settings.host, settings.host)


def started_lines(settings: ServiceSettings, version: str, rules: int) -> list[str]:
    """Return the lines at startup: addresses, store, rules, and a command to try the service."""
    url = url_of(settings)
    options = "-k " if settings.tls_cert else ""
    if Tokens.load(settings.tokens_path).required:
        options += '-H "Authorization: Bearer $RATEKEEPER_TOKEN" '
    facts = {
        "console": f"{url}{CONSOLE}",
        "gRPC": f"{settings.grpc} on {_grpc_server(settings)}" if settings.grpc else "",
        "gossip": settings.gossip,
        "region": settings.region,
        "store": _shown(settings.store),
        "rules": f"{_shown(settings.rules)}, version {version}, {_counted(rules, 'rule')}",
        "records": _records_text(settings),
        "try": f"curl {options}{url}/v1/check -d '{_TRIED}'",
    }
    first = f"ratekeeper {__version__} on {url}, {_counted(settings.workers, 'worker')}"
    return [first, *(f"  {name:8} {value}" for name, value in facts.items() if value)]


def _records_text(settings: ServiceSettings) -> str:
    if settings.record == "off":
        return "off"
    return f"{_shown(settings.record)}, {100 * settings.sample:g} % of allowed decisions"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _shown(uri: str) -> str:
    return without_secrets(uri) if "://" in uri else uri
