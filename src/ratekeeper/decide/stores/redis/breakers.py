"""Circuit breakers: calls to a server that keeps failing fail at once, and probes test it.

Waiting for a server that does not answer costs every request its deadline. When the server comes
back, all of them would hit it at once. So after enough failures the breaker opens: calls fail
immediately and cost nothing. Probes close it again; no request waits for them.

    closed      calls go through. From the first failure on, failures and successes are counted over
                a window. Enough failures, and a large enough share of the calls: open. The
                share is that of all calls since the first failure, or since the last success:
                successes after an earlier failure do not delay it if the server is silent now
    open        calls fail at once. After a while a probe. If it fails: open for twice as long, but
                never for more than a few seconds: however long the server was away, calls are
                decided again within five seconds of its return
    half open   a probe succeeded. Calls still fail at once. Enough probes in a row: closed

Calls that fail together are one moment: a pause of the server, a slow start or one lost connection
fails a thousand calls at once and proves no more than a single failure. The breaker opens only
after failures at several moments. The next moment is when a call fails that began after the first
failure of this moment.

A success before the first failure is not counted, so a healthy server costs one test of `counting`
and nothing else. So a server that dies opens the breaker just as soon after a million successes as
after none.

A failure is a call that timed out, or a connection that broke or could not be made. An error that
the server itself returns (MOVED, LOADING, out of memory) is an answer, not a failure.

A probe does what a call does, from end to end: a new connection with its handshake, which loads the
script again, a PING, and the script on a key of its own, where it spends nothing. It has the
deadline of a call: a server that answers too late is not back. If another server may have taken
over, the prober looks that up too, more often than it probes the dead server. Calls go to the new
primary as soon as it is known; its own breaker is closed. A server that has no slots any more is
not probed further, and its breaker is closed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from random import random
from typing import Final

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import StoreError, StoreUnavailable
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.histogram import Histogram
from ratekeeper.decide.store import BreakerPosition, BreakerState
from ratekeeper.decide.stores.redis.config import Address, RedisConfig

# The window is counted in this many parts, and moves on by one of them.
PARTS: Final = 10
# Failures at fewer moments never open the breaker, however many calls failed.
MOMENTS_MIN: Final = 3
# The open time varies by this share, so that the nodes of a fleet do not probe in step.
JITTER: Final = 0.2
# After a successful probe the next one follows in this part of the first open time.
GAP_PARTS: Final = 10

LISTENERS_MAX: Final = 16
REASON_CHARACTERS_MAX: Final = 300
# Calls cannot fail at several moments in a window that is shorter than this many deadlines.
_WINDOW_DEADLINES_MIN: Final = 4
# If a probe is this late, its thread may be missing: the process may have had none left.
OVERDUE_NS: Final = 5 * NS_PER_SECOND
# While a breaker is open, the prober looks this often for another primary.
LOOK_NS: Final = NS_PER_SECOND // 2

BreakerListener = Callable[[BreakerState], object]


# ── The state machine of one breaker ───────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a breaker opens, for how long, and when it closes."""

    window_ns: int = 10_000_000_000
    failures: int = 5
    share: float = 0.5
    """The share of the calls in the window that must have failed."""
    open_ns: int = 1_000_000_000
    open_max_ns: int = 3_000_000_000
    probes: int = 2
    """Number of probes that must succeed in a row to close it."""


@dataclass(slots=True)
class _WindowPart:
    """The calls in one part of the window, or since the last success."""

    number: int
    """Of the part; for the calls since the last success, the time of the first, in nanoseconds."""
    failures: int = 0
    successes: int = 0
    moments: int = 0


class CircuitBreaker:
    """The state machine of one server's breaker.

    Pure: every method gets the time, of any monotonic clock, and nothing blocks. Not thread-safe.
    """

    __slots__ = (
        "_moment_ns",
        "_open_ns",
        "_parts",
        "_probed",
        "_random",
        "_run",
        "_settings",
        "counting",
        "failing_since_ns",
        "failures",
        "opened_times",
        "position",
        "probe_ns",
        "since_ns",
    )

    def __init__(
        self, settings: BreakerSettings, now_ns: int = 0, random: Callable[[], float] = random
    ) -> None:
        self._settings = settings
        self._random = random
        self.opened_times = 0
        self.probe_ns = 0
        """When the next probe is due, while the breaker is not closed."""
        self._close(now_ns)

    def _close(self, now_ns: int) -> None:
        self.position: BreakerPosition = "closed"
        self.since_ns = now_ns
        self.failures = 0
        # True if successes must be counted. False while it is closed and nothing has failed.
        self.counting = False
        self.failing_since_ns: int | None = None
        """When the first call failed that no success has followed; None if there is none."""
        self._parts: deque[_WindowPart] = deque(maxlen=PARTS + 1)
        # The failures that no success has followed, in one window from the first of them.
        self._run: _WindowPart | None = None
        self._moment_ns = -1
        self._open_ns = self._settings.open_ns
        self._probed = 0

    def failed(self, began_ns: int, now_ns: int, count: int = 1) -> bool:
        """Count `count` failed calls, the last of which began at `began_ns`.

        Return True if that opened the breaker.
        """
        if self.position != "closed" or count <= 0:
            return False
        self.counting = True
        if self.failing_since_ns is None:
            self.failing_since_ns = now_ns
        part, run = self._part(now_ns), self._run
        if run is None or now_ns - run.number >= self._settings.window_ns:
            run = self._run = _WindowPart(now_ns)
        is_moment = began_ns > self._moment_ns
        if is_moment:
            self._moment_ns = now_ns
        for each in (part, run):
            each.failures += count
            each.moments += is_moment
        self.failures = sum(each.failures for each in self._parts)
        if not (self._is_enough([run]) or self._is_enough(self._parts)):
            return False
        self.position = "open"
        self.since_ns = now_ns
        self.opened_times += 1
        self._probe_after(self._open_ns, now_ns)
        return True

    def _is_enough(self, parts: Collection[_WindowPart]) -> bool:
        """Return True if the calls in these parts open the breaker."""
        settings = self._settings
        failures = sum(each.failures for each in parts)
        moments = sum(each.moments for each in parts)
        calls = failures + sum(each.successes for each in parts)
        return (
            failures >= settings.failures
            and moments >= min(MOMENTS_MIN, settings.failures)
            and failures >= settings.share * calls
        )

    def succeeded(self, now_ns: int, count: int = 1) -> None:
        """Count successful calls. Need not be called unless it is `counting`."""
        if self.position != "closed" or not self.counting:
            return
        self.failing_since_ns = self._run = None
        self._part(now_ns).successes += count
        self.failures = sum(each.failures for each in self._parts)
        if not self.failures:
            self.counting = False
            self._parts.clear()

    def probe_failed(self, now_ns: int) -> None:
        """Stay open for twice as long."""
        if self.position == "closed":
            return
        if self.position == "half_open":
            self.position = "open"
            self.since_ns = now_ns
        self._probed = 0
        self._open_ns = min(2 * self._open_ns, self._settings.open_max_ns)
        self._probe_after(self._open_ns, now_ns)

    def probe_succeeded(self, now_ns: int) -> None:
        """Close after enough successful probes in a row."""
        if self.position == "closed":
            return
        self._probed += 1
        if self._probed >= self._settings.probes:
            self._close(now_ns)
            return
        if self.position == "open":
            self.position = "half_open"
            self.since_ns = now_ns
        self._probe_after(self._settings.open_ns // GAP_PARTS, now_ns)

    def forget(self, now_ns: int) -> None:
        """Close, and forget all failures: the server is no longer in use."""
        if self.position != "closed" or self.counting:
            self._close(now_ns)

    def _probe_after(self, pause_ns: int, now_ns: int) -> None:
        share = 1 - JITTER + 2 * JITTER * self._random()
        self.probe_ns = now_ns + int(pause_ns * share)

    def _part(self, now_ns: int) -> _WindowPart:
        """Return the current part of the window; drop the parts that have left it."""
        parts = self._parts
        number = now_ns * PARTS // self._settings.window_ns
        while parts and parts[0].number <= number - PARTS:
            parts.popleft()
        if not parts or parts[-1].number < number:
            parts.append(_WindowPart(number))
        return parts[-1]


# ── The breakers of a store's servers, shared by threads and event loops ───────────────────────


def settings_of(config: RedisConfig) -> BreakerSettings:
    """Return the settings that a URI gives."""
    return BreakerSettings(
        window_ns=max(config.breaker_window_ns, _WINDOW_DEADLINES_MIN * config.deadline_ns),
        failures=config.breaker_failures,
        share=config.breaker_share,
        open_ns=config.breaker_open_ns,
        open_max_ns=config.breaker_open_max_ns,
        probes=config.breaker_probes,
    )


class ServerBreaker:
    """The breaker of one server. Every call reads `open` and `counting` without a lock."""

    __slots__ = (
        "_breaker",
        "_changed",
        "_enabled",
        "_lock",
        "_overdue",
        "_overdue_ns",
        "_reason",
        "_refusal",
        "address",
        "counting",
        "failed_calls",
        "failing",
        "open",
        "seconds",
    )

    def __init__(
        self,
        address: Address,
        config: RedisConfig,
        changed: Callable[[ServerBreaker], None],
        overdue: Callable[[], None],
    ) -> None:
        """`changed` is called after each change, `overdue` when a probe is late."""
        self.address = address
        self._overdue = overdue
        self._overdue_ns = 0
        self._enabled = config.breaker
        self._breaker = CircuitBreaker(settings_of(config), time.monotonic_ns())
        self._changed = changed
        self._lock = fork_safe(threading.Lock())
        self._reason = ""
        self._refusal = ""
        self.failed_calls = 0
        # How long calls to the server took, of all threads and event loops.
        self.seconds = Histogram()
        self.open = False
        # True if `succeeded` must be called.
        self.counting = False
        # True from a failure on until the server answers: calls do not wait for a connection then.
        self.failing = False

    def refusal(self) -> StoreUnavailable:
        """Return the error of a call while the breaker is open.

        A new one each time, because each caller adds its own traceback.
        """
        now_ns = time.monotonic_ns()
        if now_ns > self._overdue_ns:
            self._overdue_ns = now_ns + OVERDUE_NS
            self._overdue()
        return StoreUnavailable(self._refusal)

    def failed(self, reason: object, began_ns: int, count: int = 1) -> None:
        """Count `count` failed calls, the last of which began at `began_ns`."""
        self.failed_calls += count
        self.failing = self.counting = True
        if not self._enabled:
            return
        with self._lock:
            self._reason = str(reason)[:REASON_CHARACTERS_MAX]
            opened = self._breaker.failed(began_ns, time.monotonic_ns(), count)
            self._publish()
        if opened:
            self._changed(self)

    def succeeded(self, count: int = 1) -> None:
        """Count successful calls. To be called while it is `counting`."""
        self.failing = False
        with self._lock:
            self._breaker.succeeded(time.monotonic_ns(), count)
            self._publish()

    def probe_failed(self, reason: object) -> None:
        """Stay open for twice as long."""
        self._step(self._breaker.probe_failed, str(reason)[:REASON_CHARACTERS_MAX])

    def probe_succeeded(self) -> None:
        """Close after enough successful probes in a row."""
        self._step(self._breaker.probe_succeeded)

    def forget(self) -> None:
        """Close, and forget all failures: the server is no longer in use."""
        self._step(self._breaker.forget)

    def due_ns(self) -> int | None:
        """Return when the next probe is due; None while the breaker is closed."""
        return self._breaker.probe_ns if self.open else None

    def state(self) -> BreakerState:
        """Return the current state."""
        with self._lock:
            breaker, now_ns = self._breaker, time.monotonic_ns()
            due_s = max(breaker.probe_ns - now_ns, 0) / NS_PER_SECOND
            since_ns = breaker.failing_since_ns
            return BreakerState(
                str(self.address),
                breaker.position,
                (now_ns - breaker.since_ns) / NS_PER_SECOND,
                breaker.failures,
                breaker.opened_times,
                due_s if self.open else None,
                self._reason,
                self.failed_calls,
                0.0 if since_ns is None else (now_ns - since_ns) / NS_PER_SECOND,
            )

    def _step(self, step: Callable[[int], None], reason: str | None = None) -> None:
        with self._lock:
            if reason is not None:
                self._reason = reason
            before = self._breaker.position
            step(time.monotonic_ns())
            self._publish()
            after = self._breaker.position
            self.failing = self.open
        if after != before:
            self._changed(self)

    def _publish(self) -> None:
        """Set the attributes that calls read without the lock."""
        self.open = self._breaker.position != "closed"
        self.counting = self._breaker.counting
        if self.open:
            self._overdue_ns = self._breaker.probe_ns + OVERDUE_NS
            self._refusal = (
                f"{self.address} failed {self._breaker.failures} times; its circuit breaker is "
                f"open until it answers a probe: {self._reason}"
            )


class ServerBreakers:
    """The breakers of a store's servers. Each is made at the first call to its server."""

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._listeners: tuple[BreakerListener, ...] = ()
        self.on_open: Callable[[], None] = lambda: None
        # True if any is open. Usually this single test is all that a call costs.
        self.any_open = False
        self._by_address: dict[Address, ServerBreaker] = {}
        self._lock = fork_safe(threading.Lock())

    def forked(self) -> None:
        """In a forked child: start with no breakers. The child learns about failures itself."""
        self._by_address = {}
        self.any_open = False

    def require_closed(self, address: Address | None) -> None:
        """Raise StoreUnavailable if the breaker of a server is open."""
        breaker = self._by_address.get(address) if address is not None else None
        if breaker is not None and breaker.open:
            raise breaker.refusal()

    def of(self, address: Address) -> ServerBreaker:
        """Return the breaker of a server."""
        with self._lock:
            breaker = self._by_address.get(address)
            if breaker is None:
                breaker = ServerBreaker(address, self._config, self._changed, self.on_open)
                self._by_address[address] = breaker
            return breaker

    def all(self) -> list[ServerBreaker]:
        """Return the breakers of all servers that were called so far."""
        with self._lock:
            return list(self._by_address.values())

    def listen(self, listener: BreakerListener) -> None:
        """Call `listener` with the state after each change, in the thread that saw the change."""
        with self._lock:
            # The oldest is dropped: a caller that registers one per request must not fill memory.
            self._listeners = (*self._listeners, listener)[-LISTENERS_MAX:]

    def _changed(self, breaker: ServerBreaker) -> None:
        state = breaker.state()
        with self._lock:
            self.any_open = any(each.open for each in self._by_address.values())
        if breaker.open:
            self.on_open()
        for listener in self._listeners:
            # A check must not fail because of a listener.
            with suppress(Exception):
                listener(state)


class BreakerProber:
    """Probes servers in the background, from when a breaker opens until all are closed.

    `probe` probes one server and raises if it fails. `executor` runs probes, which may block.
    `find` looks up where the servers are, and `in_use` returns those that have slots; both are
    None for a store with a single server.
    """

    def __init__(
        self,
        breakers: ServerBreakers,
        probe: Callable[[Address], None],
        executor: Executor,
        find: Callable[[], object] | None,
        in_use: Callable[[], Collection[Address]] | None,
    ) -> None:
        self._breakers = breakers
        self._probe = probe
        self._executor = executor
        self._find = find
        self._in_use = in_use
        self._closed = False
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._in_flight: set[Address] = set()
        breakers.on_open = self.wake

    def wake(self) -> None:
        """Start probing, or look again at once: a breaker has opened."""
        with self._wake:
            if self._thread is None and not self._closed:
                # A daemon: a process that exits does not wait for dead servers.
                thread = threading.Thread(
                    target=self._watch, name="ratekeeper-redis-probe", daemon=True
                )
                # Starting fails if the process exits or has too many threads. In the second case
                # the next refused call wakes the prober again.
                with suppress(RuntimeError):
                    thread.start()
                    self._thread = thread
            self._wake.notify()

    def close(self) -> None:
        """Stop probing."""
        with self._wake:
            self._closed = True
            self._wake.notify()

    def _watch(self) -> None:
        look_ns = 0
        while True:
            now_ns = time.monotonic_ns()
            if self._find is not None and now_ns >= look_ns:
                look_ns = now_ns + LOOK_NS
                self._look()
            opened = [each for each in self._breakers.all() if each.open]
            for breaker in opened:
                self._start_probe(breaker, now_ns)
            with self._wake:
                if self._closed or not any(each.open for each in self._breakers.all()):
                    self._thread = None
                    return
                self._wake.wait(self._pause_s(opened, look_ns))

    def _pause_s(self, opened: list[ServerBreaker], look_ns: int) -> float:
        """Return the time until the next probe or look. A probe that ends wakes the thread."""
        dues = [
            due_ns
            for breaker in opened
            if breaker.address not in self._in_flight and (due_ns := breaker.due_ns()) is not None
        ]
        next_ns = min([*dues, look_ns] if self._find is not None else dues, default=None)
        if next_ns is None:
            return LOOK_NS / NS_PER_SECOND
        return max(next_ns - time.monotonic_ns(), 0) / NS_PER_SECOND

    def _look(self) -> None:
        with suppress(StoreError):
            if self._find is not None:
                self._find()
        if self._in_use is not None and (used := self._in_use()):
            for breaker in self._breakers.all():
                if breaker.address not in used:
                    breaker.forget()

    def _start_probe(self, breaker: ServerBreaker, now_ns: int) -> None:
        due_ns = breaker.due_ns()
        if due_ns is None or now_ns < due_ns or breaker.address in self._in_flight:
            return
        self._in_flight.add(breaker.address)
        try:
            self._executor.submit(self._run_probe, breaker)
        except RuntimeError as error:  # no thread available, or the process exits
            self._in_flight.discard(breaker.address)
            breaker.probe_failed(error)

    def _run_probe(self, breaker: ServerBreaker) -> None:
        try:
            self._probe(breaker.address)
        except Exception as error:  # any error means that there was no valid answer
            breaker.probe_failed(error)
        else:
            breaker.probe_succeeded()
        with self._wake:
            self._in_flight.discard(breaker.address)
            self._wake.notify()
