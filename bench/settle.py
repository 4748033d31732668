"""A check that reserves units, and the settlement of its real cost: the work "settle".

The first row of each store is a plain check, which is compiled in memory and `shared://`. The next
one names its costs by unit, so it takes the path in Python, as settlements do. One row is a request
in flight, which takes a slot and frees it. The others reserve ten units, and settle eight or twelve
of them: eight are a refund, twelve a charge that the limit may owe. With a name, the store also
remembers that the reservation was settled. The last row is the context manager, whose block uses
eight units.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from statistics import median
from time import perf_counter_ns
from typing import Any, Final

from tests.redis_servers import Single

from bench.engines import shared_folder
from bench.measure import Effort
from bench.report import heading
from ratekeeper import Limiter

WORKS: Final = ("settle",)
_RATE: Final = "1000000000/second"
_SLOTS: Final = "20 at once for 60s"
_KEYS: Final = [f"user:{number}" for number in range(1_000)]
_CALLS: Final = {"memory": 20_000, "shared": 20_000, "redis": 1_500}


def run_settle(
    wanted: Callable[[str], bool], effort: Effort, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure and print it if it is selected."""
    found: list[dict[str, Any]] = []
    if not wanted(WORKS[0]):
        return found
    print(heading("reserve and settle"), flush=True)
    for store in _CALLS:
        progress(f"measuring settlements, {store} …")
        with _limiter(store) as limiter:
            took = _measured(limiter, _CALLS[store], effort.rounds)
        progress("")
        plain = took["a check"]
        for name, ns in took.items():
            print(f"  {store:8}{name:34}{ns / 1_000:9.2f} µs {ns / plain:7.2f}×", flush=True)
            found.append({"store": store, "work": name, "ns": ns, "ratio": ns / plain})
    return found


@contextmanager
def _limiter(store: str) -> Iterator[Limiter]:
    if store == "redis":
        with Single() as server, Limiter(_RATE, store=server.uri) as limiter:
            yield limiter
        return
    with shared_folder() as folder:
        uri = "memory://" if store == "memory" else f"shared://{folder}/settle"
        with Limiter(_RATE, store=uri) as limiter:
            yield limiter


def _measured(limiter: Limiter, calls: int, rounds: int) -> dict[str, float]:
    """Return the median nanoseconds of each kind of request. The rounds take turns."""
    names = count()

    def settled(key: str, actual: int, name: str = "") -> None:
        limiter.settle(key, 10, actual, limiter.check(key, 10), name)

    def reserved(key: str) -> None:
        with limiter.reserve(key, 10) as reservation:
            reservation.use(8)

    slots = Limiter(_SLOTS, store=limiter.store, name="slots")

    def released(key: str) -> None:
        slots.release(slots.check(key))

    works: dict[str, Callable[[str], object]] = {
        "a check": limiter.check,
        "a check with costs by unit": lambda key: limiter.check(key, costs={"requests": 10}),
        "take a slot, and release it": released,
        "a check, and a refund of a part": lambda key: settled(key, 8),
        "a check, and a later charge": lambda key: settled(key, 12),
        "a check, and a named settlement": lambda key: settled(key, 12, str(next(names))),
        "reserve, use, and settle": reserved,
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            gc.collect()
            began_ns = perf_counter_ns()
            for number in range(calls):
                work(_KEYS[number % len(_KEYS)])
            times[name].append((perf_counter_ns() - began_ns) / calls)
    return {name: median(found[1:]) for name, found in times.items()}
