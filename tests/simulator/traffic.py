"""Traffic of a simulated fleet: groups of users, or a recording.

The load balancer is random: each request reaches any live node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from ratekeeper.core.clock import NS_PER_SECOND
from tests.simulator.network import START_NS, EventLoop

_SECONDS_PER_MINUTE: Final = 60

# Called with the subject and the cost of a request that arrives now.
Arrived = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class TrafficGroup:
    """Users that behave alike. The subjects are `light:0`, `light:1` and so on."""

    name: str
    users: int
    per_minute: float
    """Requests of each user, at random times."""
    cost: int = 1
    burst: int = 1
    """Requests that arrive together, each on another node."""

    def start(self, loop: EventLoop, random: Random, arrived: Arrived) -> None:
        """Schedule the requests of all users at random times."""
        mean_ns = _SECONDS_PER_MINUTE * NS_PER_SECOND * self.burst / self.per_minute

        def request(subject: str) -> None:
            for _ in range(self.burst):
                arrived(subject, self.cost)
            loop.after(int(random.expovariate(1.0) * mean_ns), request, subject)

        for number in range(self.users):
            first_ns = int(random.expovariate(1.0) * mean_ns)
            loop.after(first_ns, request, f"{self.name}:{number}")


@dataclass(frozen=True, slots=True)
class Recording:
    """Requests at given times: nanoseconds from the beginning, subject and cost."""

    requests: tuple[tuple[int, str, int], ...]

    def start(self, loop: EventLoop, random: Random, arrived: Arrived) -> None:
        """Schedule the requests at their recorded times."""
        requests = iter(self.requests)

        def request(subject: str, cost: int) -> None:
            arrived(subject, cost)
            schedule()

        def schedule() -> None:
            found = next(requests, None)
            if found is not None:
                loop.at(START_NS + found[0], request, *found[1:])

        schedule()


Traffic = Sequence[TrafficGroup | Recording]

# The mix for which the design was measured: most users are light, a few abuse the service.
USUAL_MIX: Final[Traffic] = (
    TrafficGroup("light", 250, 50),
    TrafficGroup("heavy", 40, 900),
    TrafficGroup("abusers", 10, 5_000),
)
