"""GET /healthz, /readyz and /metrics: liveness, readiness and metrics.

**Ready.** A worker whose store or rule source is unavailable stays ready: it answers by
`on_failure` and with the last good rules, while a worker that is taken out of rotation answers
nothing. The body names the errors. Only a worker that shuts down replies 503.

The store is healthy if it decides: if it makes the decision that this question asks for, and has
made nearly all that clients of this node asked for lately. A server that refuses to write, or one
shard of several that is down, leaves all other calls answered.

These endpoints need no token, because load balancers and monitors have none. But errors name hosts
and files. If the service requires tokens, a caller without one learns only that there is an error.

**Metrics of all workers.** A scrape reaches one worker and must report all of them. So each worker
writes its counters to a file once a second, and the worker that is scraped adds up the files. It
writes its own file before it replies: a counter that was reported once is on disk, even if the
worker is killed a moment later. When a worker starts, it adds the counters of dead workers to one
file, under a lock that readers hold too. So no counter ever goes down.

The size of the store and the status of its servers are read in a thread, at most every
STATS_SECONDS: with Redis that takes many round trips. A scrape waits a moment for it, and a check
never does.

`metrics/counters.py` lists every metric, with its labels and their bounds.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ratekeeper.core.errors import StoreError
from ratekeeper.core.version import __version__
from ratekeeper.decide.store import ServerStatus, StoreStats, probe, shared_store
from ratekeeper.metrics.counters import (
    FAMILIES,
    LimiterMetrics,
    MetricsSnapshot,
    lost_snapshot,
    put_store,
)
from ratekeeper.metrics.prometheus import metric_of
from ratekeeper.service.http.activity import ActivityHistory, replace_file
from ratekeeper.service.http.context import (
    NO_STORE,
    Handler,
    Routes,
    ServiceContext,
    ServiceReply,
    ServiceRequest,
    ServiceRoute,
    encode,
    json_reply,
)
from ratekeeper.service.http.tokens import TokenRejection

if TYPE_CHECKING:
    from ratekeeper.limiter import AsyncLimiter

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
WRITE_SECONDS: Final = 1.0
# The share of a worker's time that writing its counters may take.
WRITE_SHARE_MAX: Final = 0.01
STATS_SECONDS: Final = 15.0
# How often they are read for the console, by one worker.
WATCH_SECONDS: Final = 60.0
# How long a scrape waits for the size of the store; then it reports the last known one.
STATS_WAIT_SECONDS: Final = 1.0
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
_DEAD: Final = "gone.json"
_LOCK: Final = "lock"
# The store is not healthy if this share of the checks of the last seconds were not decided by it.
LATELY_SECONDS: Final = 10.0
DEGRADED_SHARE_MAX: Final = 0.1
_DECIDED: Final = ("allowed", "denied", "unavailable", "failed")
_HIDDEN: Final = "send a token to see the error, or read the log"

log = logging.getLogger("ratekeeper.service")


# ── Health ─────────────────────────────────────────────────────────────────────────────────────


class HealthReply(msgspec.Struct):
    """The process answers."""

    status: Literal["ok"]
    node: str


class ReadyRules(msgspec.Struct):
    """The rules in force and their age."""

    version: str
    origin: str
    since: str | None
    age_seconds: Annotated[
        float | None, Meta(description="Seconds since the source last confirmed them.")
    ]
    error: str


class ReadyStore(msgspec.Struct):
    """Whether the store decides checks."""

    healthy: bool
    error: str


class ReadyReply(msgspec.Struct):
    """Whether this worker accepts requests, and the errors of its rules and store."""

    status: Literal["ready", "stopping"]
    node: str
    worker: int
    workers: Annotated[int, Meta(description="Workers that are alive.")]
    rules: ReadyRules
    store: ReadyStore


def routes(context: ServiceContext, metrics: WorkerMetrics) -> Routes:
    """Return the routes of health and metrics."""
    found = {
        "/healthz": ServiceRoute(_alive(context)),
        "/readyz": ServiceRoute(_ready(context, metrics)),
        "/metrics": ServiceRoute(_scrape(metrics)),
    }
    return {path: {"GET": each, "HEAD": each} for path, each in found.items()}


def _alive(context: ServiceContext) -> Handler:
    async def alive(_: ServiceRequest) -> ServiceReply:
        return json_reply(HealthReply("ok", context.node_header))

    return alive


def _ready(context: ServiceContext, metrics: WorkerMetrics) -> Handler:
    async def ready(http_request: ServiceRequest) -> ServiceReply:
        rules, store = _rules(context), await store_health(context.limiter, context.activity)
        if not _has_token(context, http_request):
            rules.error = rules.error and _HIDDEN
            store.error = store.error and _HIDDEN
        found = ReadyReply(
            status="stopping" if context.stopping else "ready",
            node=context.node_header,
            worker=context.settings.worker,
            workers=metrics.workers(),
            rules=rules,
            store=store,
        )
        return json_reply(found, 503 if context.stopping else 200)

    return ready


def _has_token(context: ServiceContext, http_request: ServiceRequest) -> bool:
    """Return True if the caller has a token of any role, or none is required."""
    given = http_request.headers.get(b"authorization")
    authorization = None if given is None else given.decode("latin-1")
    return not isinstance(context.tokens.permitted(authorization, "quota"), TokenRejection)


def _rules(context: ServiceContext) -> ReadyRules:
    status = context.limiter.rules_status()
    return ReadyRules(
        version=status.version,
        origin=status.origin,
        since=status.since.isoformat(timespec="seconds") if status.since else None,
        age_seconds=None if status.age is None else round(status.age, 3),
        error=status.error,
    )


async def store_health(limiter: AsyncLimiter, activity: ActivityHistory) -> ReadyStore:
    """Return whether the store decides checks. It costs a decision."""
    try:
        await probe(limiter.store)
    except StoreError as error:
        return ReadyStore(False, str(error))
    since_s = activity.unix_s() - LATELY_SECONDS
    recent = [step for step in activity.steps() if step.at_s > since_s]
    checks = sum(step.checks.get(outcome, 0) for step in recent for outcome in _DECIDED)
    degraded = sum(step.degraded for step in recent)
    if degraded > DEGRADED_SHARE_MAX * checks:
        return ReadyStore(
            False,
            f"the store did not decide {degraded:,} of {checks:,} checks in the last "
            f"{LATELY_SECONDS:.0f} s; see the log and ratekeeper_store_errors_total",
        )
    return ReadyStore(True, "")


def _scrape(metrics: WorkerMetrics) -> Handler:
    async def scrape(_: ServiceRequest) -> ServiceReply:
        text = await metrics.scraped()
        return ServiceReply(200, [(b"content-type", CONTENT_TYPE), NO_STORE], text)

    return scrape


# ── Metrics ────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class WorkerCounts:
    """The contents of a counter file: of one worker, or of all dead workers."""

    counted: MetricsSnapshot = field(default_factory=MetricsSnapshot)
    subjects: dict[str, float] = field(default_factory=dict)
    """Checks per second of the worker's busiest subjects, by digest: they may use other workers."""
    folded: list[int] = field(default_factory=list)
    """Only for dead workers: those whose files are included and still have to be removed."""


_decode: Final = msgspec.json.Decoder(WorkerCounts).decode


class WorkerMetrics:
    """The counters of this worker, and the sum of all workers."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._reading = LimiterMetrics(context.limiter)
        self._folder = context.settings.counters
        self._written = b""
        self._last: WorkerCounts | None = None
        self._failing = False
        self._stats: StoreStats | None = None
        self._servers: Sequence[ServerStatus] = ()
        self._stats_at_s = -WATCH_SECONDS
        self._reading_stats: asyncio.Task[None] | None = None

    def snapshot(self) -> MetricsSnapshot:
        """Return the present counters of this worker."""
        context = self._context
        found = context.counters.snapshot()
        found.add(self._reading.snapshot())
        found.add(lost_snapshot())
        found.put("worker_starts", 1)
        found.put("start_time_seconds", context.started_ns / 1e9)
        found.put("build_info", 1, __version__)
        found.put("records_dropped", 0 if context.recorder is None else context.recorder.dropped())
        return found

    async def keep_writing(self) -> None:
        """Write the counters for the other workers once a second, until cancelled.

        With ten thousand busy rules a write takes about 20 ms, and happens less often.
        """
        while self._folder is not None:
            # Processor time: a busy machine, where a write waits for a processor, must not make
            # the pause a hundred times as long.
            before_s = time.thread_time()
            self.write()
            taken_s = time.thread_time() - before_s
            await asyncio.sleep(max(WRITE_SECONDS, taken_s / WRITE_SHARE_MAX))

    def write(self) -> WorkerCounts:
        """Write the counters for the other workers if they changed, and return them.

        A full disk is only logged.
        """
        counts = self._last = WorkerCounts(self.snapshot(), self._reading.subject_rates())
        if self._folder is None:
            return counts
        text = encode(counts)
        path = self._folder / f"{os.getpid()}.json"
        try:
            if text != self._written or not path.exists():
                replace_file(path, text)
                self._written = text
        except OSError as error:
            if not self._failing:  # logged once, and not every second
                log.warning(
                    "metrics: the counters of this worker cannot be written: %s", error.strerror
                )
            self._failing = True
        else:
            self._failing = False
        return counts

    def total(self) -> MetricsSnapshot:
        """Return the sum of the counters of all workers, those of this one as they are now."""
        return self._total(fresh=True)

    def recent_total(self) -> MetricsSnapshot:
        """Return the sum of the counters of all workers, as each worker last wrote them.

        It has the last known size of the store, which is read again in the background.
        """
        self._refresh_stats(WATCH_SECONDS)
        total = self._total(fresh=self._folder is None)
        put_store(total, self._stats, self._servers)
        return total

    def _total(self, *, fresh: bool) -> MetricsSnapshot:
        own = os.getpid()
        with _locked(self._folder, fcntl.LOCK_SH):
            counts = self.write() if fresh or self._last is None else self._last
            total = MetricsSnapshot()
            total.add(counts.counted)
            dead = WorkerCounts()
            if self._folder is not None:
                dead = _read(self._folder / _DEAD) or dead
            total.add(dead.counted)
            subjects = Counter(counts.subjects)
            for path in _files(self._folder):
                number = int(path.stem)
                if number != own and number not in dead.folded and (found := _read(path)):
                    total.add(found.counted if _is_alive(path) else found.counted.lasting())
                    subjects.update(found.subjects if _is_alive(path) else {})
        total.put("busiest_subject_rate", round(max(subjects.values(), default=0.0), 1))
        total.put("workers", self.workers())
        return total

    def workers(self) -> int:
        """Return how many workers are alive."""
        return max(sum(_is_alive(path) for path in _files(self._folder)), 1)

    async def scraped(self) -> bytes:
        """Return the metrics of all workers and of the store, in Prometheus' text format."""
        self._refresh_stats(STATS_SECONDS)
        if self._reading_stats is not None:
            await asyncio.wait({self._reading_stats}, timeout=STATS_WAIT_SECONDS)
        return self.text()

    def _refresh_stats(self, seconds: float) -> None:
        """Start to read the size of the store, if it was last read so many seconds ago."""
        if self._reading_stats is None and time.monotonic() - self._stats_at_s >= seconds:
            self._reading_stats = asyncio.create_task(self._read_stats())

    async def close(self) -> None:
        """Write the last counters. Waits a moment for a reading of the store that has begun."""
        if self._reading_stats is not None:
            await asyncio.wait({self._reading_stats}, timeout=STATS_WAIT_SECONDS)
        self.write()

    async def _read_stats(self) -> None:
        self._stats_at_s = time.monotonic()
        limiter = self._context.limiter
        shared = shared_store(limiter.store)
        stats: StoreStats | None = None
        servers: Sequence[ServerStatus] = ()
        try:
            if shared is not None:
                servers = await asyncio.to_thread(shared.monitor.server_status)
            stats = await asyncio.to_thread(limiter.stats)
        except StoreError as error:
            # The values are unknown now, and the last known ones are no longer true.
            log.debug("metrics: the store cannot be read: %s", error)
        except Exception:
            log.exception("metrics: the store cannot be read")
        finally:
            self._stats, self._servers = stats, servers
            self._reading_stats = None

    def text(self) -> bytes:
        """Return the metrics of all workers, with the last known size of the store."""
        total = self.total()
        put_store(total, self._stats, self._servers)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_MetricList(metric_of(family, total) for family in FAMILIES))
        text: bytes = generate_latest(registry)
        return text


class _MetricList(Collector):
    """Metrics in the form that a registry takes."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


# ── Counter files ──────────────────────────────────────────────────────────────────────────────


def fold_dead(folder: Path) -> None:
    """Add the counters of dead workers to one file, and remove their files."""
    try:
        with _locked(folder, fcntl.LOCK_EX):
            total = _read(folder / _DEAD) or WorkerCounts()
            # A worker that was killed in the middle of this function left them.
            for number in total.folded:
                (folder / f"{number}.json").unlink(missing_ok=True)
            dead = [path for path in _files(folder) if not _is_alive(path)]
            # A number that stayed in `folded` would hide a new worker that gets the number.
            if not dead and not total.folded:
                return
            for path in dead:
                if found := _read(path):
                    total.counted.add(found.counted.lasting())
            total.folded = [int(path.stem) for path in dead]
            replace_file(folder / _DEAD, encode(total))
            for path in dead:
                path.unlink(missing_ok=True)
            total.folded = []
            replace_file(folder / _DEAD, encode(total))
    except OSError as error:
        log.warning("metrics: the counters of dead workers cannot be added up: %s", error.strerror)


@contextmanager
def _locked(folder: Path | None, mode: int) -> Iterator[None]:
    """Hold the lock of the folder; without a folder, there is nothing to lock."""
    with ExitStack() as stack:
        if folder is not None:
            with suppress(OSError):  # without a folder, or room in it, no worker can fold either
                fcntl.flock(stack.enter_context((folder / _LOCK).open("w")), mode)
        yield


def _files(folder: Path | None) -> list[Path]:
    return [] if folder is None else [each for each in folder.glob("*.json") if each.stem.isdigit()]


def _is_alive(path: Path) -> bool:
    try:
        os.kill(int(path.stem), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read(path: Path) -> WorkerCounts | None:
    """Return the contents of a counter file; None if it is gone or cannot be read."""
    with suppress(OSError, msgspec.DecodeError):
        if path.stat().st_size <= FILE_BYTES_MAX:
            return _decode(path.read_bytes())
    return None
