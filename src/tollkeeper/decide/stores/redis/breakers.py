"""A breaker for each server, which threads and event loops share.

The wires tell it what happened: calls that timed out, connections that broke or could not be made.
A refusal that the server itself answered (MOVED, LOADING, out of memory) is an answer, and no
failure. Nor is it one that a call did not wait for a connection that is being made, as long as none
was ever made: a start is slow, and the server well.

What probes is in `probes.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.errors import StoreUnavailable
from tollkeeper.decide.breaker import Breaker, BreakerSettings, BreakerState
from tollkeeper.decide.stores.redis.config import Address, RedisConfig

Listener = Callable[[BreakerState], object]

LISTENERS_MAX: Final = 16
REASON_CHARACTERS_MAX: Final = 300
# A window in which calls cannot fail at several moments, one after another, would never open.
_WINDOW_DEADLINES_MIN: Final = 4
# A probe that is so late had nobody to send it: there may have been no thread left for it.
OVERDUE_NS: Final = 5 * NS_PER_SECOND


def settings_of(config: RedisConfig) -> BreakerSettings:
    """The breaker that a URI asks for."""
    return BreakerSettings(
        window_ns=max(config.breaker_window_ns, _WINDOW_DEADLINES_MIN * config.deadline_ns),
        failures=config.breaker_failures,
        share=config.breaker_share,
        open_ns=config.breaker_open_ns,
        open_max_ns=config.breaker_open_max_ns,
        probes=config.breaker_probes,
    )


class NodeBreaker:
    """One server's. `open` and `stirred` are read without a lock, by every call."""

    __slots__ = (
        "_breaker",
        "_changed",
        "_lock",
        "_on",
        "_overdue",
        "_overdue_ns",
        "_reason",
        "_refusal",
        "address",
        "failed_calls",
        "open",
        "proven",
        "stirred",
    )

    def __init__(
        self,
        address: Address,
        config: RedisConfig,
        changed: Callable[[NodeBreaker], None],
        overdue: Callable[[], None],
    ) -> None:
        """`overdue` is called when a probe has not come."""
        self.address = address
        self._overdue = overdue
        self._overdue_ns = 0
        self._on = config.breaker
        self._breaker = Breaker(settings_of(config), time.monotonic_ns())
        self._changed = changed
        self._lock = threading.Lock()
        self._reason = ""
        self._refusal = ""
        self.failed_calls = 0
        self.open = False
        # Is there anything to count? Else a success need not be told.
        self.stirred = False
        # Was a connection made, ever? Then one that is not there in time is a failure.
        self.proven = False

    def refusal(self) -> StoreUnavailable:
        """What a call gets while it is open. A new one each time: each has its own traceback."""
        now_ns = time.monotonic_ns()
        if now_ns > self._overdue_ns:
            self._overdue_ns = now_ns + OVERDUE_NS
            self._overdue()
        return StoreUnavailable(self._refusal)

    def failed(self, reason: object, began_ns: int, count: int = 1) -> None:
        """So many calls failed, the last of which began then."""
        self.failed_calls += count
        if not self._on:
            return
        with self._lock:
            self._reason = str(reason)[:REASON_CHARACTERS_MAX]
            opened = self._breaker.failed(began_ns, time.monotonic_ns(), count)
            self._show()
        if opened:
            self._changed(self)

    def succeeded(self, count: int = 1) -> None:
        """So many calls were answered; to be told while it is `stirred`."""
        with self._lock:
            self._breaker.succeeded(time.monotonic_ns(), count)
            self._show()

    def probe_failed(self, reason: object) -> None:
        self._step(self._breaker.probe_failed, str(reason)[:REASON_CHARACTERS_MAX])

    def probe_succeeded(self) -> None:
        self._step(self._breaker.probe_succeeded)

    def forget(self) -> None:
        """Nobody asks this server any more."""
        self._step(self._breaker.forget)

    def due_ns(self) -> int | None:
        """When to probe it; None while it is closed."""
        return self._breaker.probe_ns if self.open else None

    def state(self) -> BreakerState:
        with self._lock:
            breaker, now_ns = self._breaker, time.monotonic_ns()
            due_s = max(breaker.probe_ns - now_ns, 0) / NS_PER_SECOND
            return BreakerState(
                str(self.address),
                breaker.state,
                (now_ns - breaker.since_ns) / NS_PER_SECOND,
                breaker.failures,
                breaker.opened_times,
                due_s if self.open else None,
                self._reason,
                self.failed_calls,
            )

    def _step(self, step: Callable[[int], None], reason: str | None = None) -> None:
        with self._lock:
            if reason is not None:
                self._reason = reason
            before = self._breaker.state
            step(time.monotonic_ns())
            self._show()
            after = self._breaker.state
        if after != before:
            self._changed(self)

    def _show(self) -> None:
        self.open = self._breaker.state != "closed"
        self.stirred = self._breaker.stirred
        if self.open:
            self._overdue_ns = self._breaker.probe_ns + OVERDUE_NS
            self._refusal = (
                f"{self.address} failed {self._breaker.failures} times and is left alone until "
                f"it answers a probe (its breaker is open): {self._reason}"
            )


class Breakers:
    """The breakers of a store's servers, made as they are first asked."""

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._listeners: tuple[Listener, ...] = ()
        self.opened: Callable[[], None] = lambda: None
        # Is any open? One test for every call; most of the time there is no more to it.
        self.any_open = False
        self.forked()

    def forked(self) -> None:
        """In a child process: all closed. What the parent found out, it finds out for itself."""
        self._lock = threading.Lock()
        self._by_address: dict[Address, NodeBreaker] = {}
        self.any_open = False

    def require_closed(self, address: Address | None) -> None:
        """Raise what a call to a server gets whose breaker is open."""
        breaker = self._by_address.get(address) if address is not None else None
        if breaker is not None and breaker.open:
            raise breaker.refusal()

    def of(self, address: Address) -> NodeBreaker:
        """The one breaker of a server."""
        with self._lock:
            breaker = self._by_address.get(address)
            if breaker is None:
                breaker = NodeBreaker(address, self._config, self._changed, self.opened)
                self._by_address[address] = breaker
            return breaker

    def all(self) -> list[NodeBreaker]:
        with self._lock:
            return list(self._by_address.values())

    def listen(self, listener: Listener) -> None:
        """Call it with the state after each change, in whichever thread the change was seen."""
        with self._lock:
            # The oldest goes: who registers anew for each request must not fill the memory.
            self._listeners = (*self._listeners, listener)[-LISTENERS_MAX:]

    def _changed(self, breaker: NodeBreaker) -> None:
        state = breaker.state()
        with self._lock:
            self.any_open = any(each.open for each in self._by_address.values())
        if breaker.open:
            self.opened()
        for listener in self._listeners:
            # A check must not fail because of who watches.
            with suppress(Exception):
                listener(state)
