"""A store in memory that several nodes of a test share, as if it were on another machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ratekeeper.core.clock import Clock
from ratekeeper.decide.regional import MemoryRegional, RegionalCounts
from ratekeeper.decide.store import BreakerState, Cells, Channel, ServerStatus, StoreMonitor
from ratekeeper.decide.stores.memory import STATES_MAX_DEFAULT, MemoryAuthority


class NoServers:
    """The monitor of a store without servers."""

    def counters(self) -> Mapping[str, int]:
        """See StoreMonitor."""
        return {}

    def denied_by_rule(self) -> Mapping[str, int]:
        """See StoreMonitor."""
        return {}

    def breakers(self) -> Sequence[BreakerState]:
        """See StoreMonitor."""
        return []

    def latencies(self) -> Mapping[str, list[int]]:
        """See StoreMonitor."""
        return {}

    def server_status(self) -> Sequence[ServerStatus]:
        """See StoreMonitor."""
        return []

    def on_breaker(self, listener: Callable[[BreakerState], None]) -> None:
        """See StoreMonitor. No breaker ever changes."""


class NoMessages:
    """A subscription to which no message comes."""

    def wait(self, seconds: float) -> None:
        """See Subscription. It does not wait."""

    def close(self) -> None:
        """See Subscription."""


class NoListeners:
    """A channel on which no other process listens or registers."""

    def publish(self, topic: str, text: str) -> None:
        """See Channel."""

    def subscribe(self, topic: str) -> NoMessages:
        """See Channel."""
        return NoMessages()

    def register(
        self, topic: str, name: str, text: str, lasts_ns: int, at_most: int = 1
    ) -> Sequence[str]:
        """See Channel."""
        return [text]

    def count_names(self, topic: str, name: str, lasts_ns: int) -> int:
        """See Channel."""
        return 1

    def unregister(self, topic: str, name: str) -> None:
        """See Channel."""


class MemoryCells:
    """Cells in memory. They never expire."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._values: dict[str, bytes] = {}

    async def read(self, name: str) -> tuple[bytes | None, int]:
        """See Cells."""
        return self._values.get(name), self._clock.now_ns()

    async def write(self, name: str, expected: bytes | None, value: bytes, lasts_ns: int) -> bool:
        """See Cells."""
        if self._values.get(name) != expected:
            return False
        self._values[name] = value
        return True


class SharedMemory(MemoryAuthority):
    """A SharedStore in memory. It has every answer, so it never returns an Ask."""

    def __init__(self, clock: Clock, states_max: int = STATES_MAX_DEFAULT) -> None:
        super().__init__(clock, states_max)
        self.monitor: StoreMonitor = NoServers()
        self.channel: Channel = NoListeners()
        self.cells: Cells = MemoryCells(clock)
        self.regional: RegionalCounts = MemoryRegional(clock)
