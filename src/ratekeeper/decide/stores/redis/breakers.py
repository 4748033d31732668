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
over, the prober looks that up too, twice a second. Calls go to the new primary as soon as it is
known; its own breaker is closed. A server that has no slots any more is not probed further, and its
breaker is closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from ratekeeper.core.chance import RANDOM
from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import StoreError, StoreUnavailable
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.histogram import Histogram
from ratekeeper.decide.store import BreakerPosition, BreakerState
from ratekeeper.decide.stores.redis.config import Address, RedisConfig

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
LOOK_S: Final = 0.5

BreakerListener = Callable[[BreakerState], object]


@dataclass(slots=True)
class _Window:
    """The calls in one window of time. The next window begins with the next failure."""

    began_ns: int
    failures: int = 0
    successes: int = 0
    moments: int = 0


class ServerBreaker:
    """The breaker of one server. Every call reads `open` and `counting` without a lock."""

    def __init__(
        self,
        address: Address,
        config: RedisConfig,
        changed: Callable[[ServerBreaker], None] = lambda _: None,
        overdue: Callable[[], None] = lambda: None,
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
        random: Callable[[], float] = RANDOM.random,
    ) -> None:
        """`changed` is called after each change, `overdue` when a probe is late."""
        self.address = address
        self._config = config
        self._window_ns = max(config.breaker_window_ns, _WINDOW_DEADLINES_MIN * config.deadline_ns)
        self._changed = changed
        self._overdue = overdue
        self._overdue_ns = 0
        self._now_ns = now_ns
        self._random = random
        self._lock = fork_safe(threading.Lock())
        self._reason = ""
        self._refusal = ""
        self._opened_times = self._failures = 0
        self._open_ns = config.breaker_open_ns
        self._probe_ns = 0
        self.failed_calls = 0
        # How long calls to the server took, of all threads and event loops.
        self.seconds = Histogram()
        # True from a failure on until the server answers: calls do not wait for a connection then.
        self.failing = False
        self._close()

    def _close(self) -> None:
        self._position: BreakerPosition = "closed"
        self._since_ns = self._now_ns()
        self._probed = 0
        self._moment_ns = -1
        # When the first call failed that no success has followed.
        self._failing_since_ns: int | None = None
        # All calls since a failure; and those since the last success, which are all failures.
        self._window: _Window | None = None
        self._run: _Window | None = None
        self.failing = self.open = False
        # True if `succeeded` must be called. False while nothing has failed.
        self.counting = False

    def refusal(self) -> StoreUnavailable:
        """Return the error of a call while the breaker is open.

        A new one each time, because each caller adds its own traceback.
        """
        now_ns = self._now_ns()
        if now_ns > self._overdue_ns:
            self._overdue_ns = now_ns + OVERDUE_NS
            self._overdue()
        return StoreUnavailable(self._refusal)

    def failed(self, reason: object, began_ns: int, count: int = 1) -> None:
        """Count `count` failed calls, the last of which began at `began_ns`."""
        with self._lock:
            self.failed_calls += count
            self.failing = self.counting = True
            self._reason = str(reason)[:REASON_CHARACTERS_MAX]
            if self.open or not self._config.breaker:
                return
            now_ns = self._now_ns()
            if self._failing_since_ns is None:
                self._failing_since_ns = now_ns
            is_moment = began_ns > self._moment_ns
            if is_moment:
                self._moment_ns = now_ns
            self._window = self._current(self._window, now_ns)
            self._run = self._current(self._run, now_ns)
            for each in (self._window, self._run):
                each.failures += count
                each.moments += is_moment
            if not (self._is_enough(self._window) or self._is_enough(self._run)):
                return
            # A server that answers probes, but not the calls after them, rests longer each time.
            if now_ns - self._since_ns >= self._window_ns or not self._opened_times:
                self._open_ns = self._config.breaker_open_ns
            else:
                self._open_ns = min(2 * self._open_ns, self._config.breaker_open_max_ns)
            self._opened_times += 1
            self._failures = self._window.failures
            self._move("open")
            self._probe_after(self._open_ns)
        self._changed(self)

    def succeeded(self, count: int = 1) -> None:
        """Count successful calls. Need not be called unless it is `counting`."""
        with self._lock:
            if self.open:
                return
            self.failing = False
            self._failing_since_ns = self._run = None
            window = self._window
            if window is None or self._now_ns() - window.began_ns >= self._window_ns:
                self._window = None
                self.counting = False
            else:
                window.successes += count

    def probe_failed(self, reason: object) -> None:
        """Stay open for twice as long."""
        with self._lock:
            if not self.open:
                return
            self._reason = str(reason)[:REASON_CHARACTERS_MAX]
            self._probed = 0
            self._open_ns = min(2 * self._open_ns, self._config.breaker_open_max_ns)
            self._probe_after(self._open_ns)
            if self._position == "open":
                return
            self._move("open")
        self._changed(self)

    def probe_succeeded(self) -> None:
        """Close after enough successful probes in a row."""
        with self._lock:
            if not self.open:
                return
            self._probed += 1
            if self._probed >= self._config.breaker_probes:
                self._close()
            else:
                self._probe_after(self._config.breaker_open_ns // GAP_PARTS)
                if self._position == "half_open":
                    return
                self._move("half_open")
        self._changed(self)

    def forget(self) -> None:
        """Close, and forget all failures: the server is no longer in use."""
        with self._lock:
            was_open = self.open
            if was_open or self.counting:
                self._close()
        if was_open:
            self._changed(self)

    def due_ns(self) -> int | None:
        """Return when the next probe is due; None while the breaker is closed."""
        return self._probe_ns if self.open else None

    def state(self) -> BreakerState:
        """Return the current state."""
        with self._lock:
            now_ns, since_ns = self._now_ns(), self._failing_since_ns
            return BreakerState(
                str(self.address),
                self._position,
                (now_ns - self._since_ns) / NS_PER_SECOND,
                0 if self._window is None else self._window.failures,
                self._opened_times,
                max(self._probe_ns - now_ns, 0) / NS_PER_SECOND if self.open else None,
                self._reason,
                self.failed_calls,
                0.0 if since_ns is None else (now_ns - since_ns) / NS_PER_SECOND,
            )

    def _move(self, position: BreakerPosition) -> None:
        self._position = position
        self._since_ns = self._now_ns()
        self.open = True

    def _current(self, window: _Window | None, now_ns: int) -> _Window:
        if window is None or now_ns - window.began_ns >= self._window_ns:
            return _Window(now_ns)
        return window

    def _is_enough(self, window: _Window) -> bool:
        """Return True if the calls in the window open the breaker."""
        failures, config = window.failures, self._config
        return (
            failures >= config.breaker_failures
            and window.moments >= min(MOMENTS_MIN, config.breaker_failures)
            and failures >= config.breaker_share * (failures + window.successes)
        )

    def _probe_after(self, pause_ns: int) -> None:
        share = 1 - JITTER + 2 * JITTER * self._random()
        self._probe_ns = self._now_ns() + int(pause_ns * share)
        self._overdue_ns = self._probe_ns + OVERDUE_NS
        self._refusal = (
            f"{self.address} failed {self._failures} times; its circuit breaker is open until it "
            f"answers a probe: {self._reason}"
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
    """Probes servers in the background, each in a thread of its own while its breaker is open.

    `probe` probes one server and raises if it fails. `find` looks up where the servers are, and
    `in_use` returns those that have slots; both are None for a store with a single server.
    """

    def __init__(
        self,
        breakers: ServerBreakers,
        probe: Callable[[Address], None],
        find: Callable[[], object] | None,
        in_use: Callable[[], Collection[Address]] | None,
    ) -> None:
        self._breakers = breakers
        self._probe = probe
        self._find = find
        self._in_use = in_use
        self._closed = threading.Event()
        self._lock = threading.Lock()
        # The servers with a probing thread; None is the thread that looks up the servers.
        self._running: set[Address | None] = set()
        breakers.on_open = self.wake

    def wake(self) -> None:
        """Start the threads that are missing: a breaker has opened."""
        opened = [each for each in self._breakers.all() if each.open]
        for breaker in opened:
            self._start(breaker.address, partial(self._probe_if_due, breaker))
        if opened and self._find is not None:
            self._start(None, self._look)

    def close(self) -> None:
        """Stop probing."""
        self._closed.set()

    def _start(self, key: Address | None, step: Callable[[], float | None]) -> None:
        with self._lock:
            if key in self._running or self._closed.is_set():
                return
            # A daemon: a process that exits does not wait for dead servers.
            name = "ratekeeper-redis-probe"
            thread = threading.Thread(target=self._run, args=(key, step), name=name, daemon=True)
            # Starting fails if the process exits or has too many threads. In the second case the
            # next refused call wakes the prober again.
            with suppress(RuntimeError):
                thread.start()
                self._running.add(key)

    def _run(self, key: Address | None, step: Callable[[], float | None]) -> None:
        """Repeat a step, with the pauses that it returns, until it returns None."""
        while (pause_s := step()) is not None and not self._closed.wait(pause_s):
            pass
        with self._lock:
            self._running.discard(key)
        # The breaker may have opened again after the last step.
        self.wake()

    def _look(self) -> float | None:
        if not self._breakers.any_open:
            return None
        with suppress(StoreError):
            if self._find is not None:
                self._find()
        if self._in_use is not None and (used := self._in_use()):
            for breaker in self._breakers.all():
                if breaker.address not in used:
                    breaker.forget()
        return LOOK_S

    def _probe_if_due(self, breaker: ServerBreaker) -> float | None:
        due_ns = breaker.due_ns()
        if due_ns is None:
            return None
        left_ns = due_ns - time.monotonic_ns()
        if left_ns > 0:
            return left_ns / NS_PER_SECOND
        try:
            self._probe(breaker.address)
        except Exception as error:  # any error means that there was no valid answer
            breaker.probe_failed(error)
        else:
            breaker.probe_succeeded()
        return 0
