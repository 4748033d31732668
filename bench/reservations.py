"""Reservations: reserve, use and settle, against a plain check on the same store.

Each round times a batch of plain checks and a batch of reservations of the same keys, one after the
other. The ratio is the median of the ratios of the rounds. A reservation of 100 units uses 37, so
its end returns the rest: on Redis it is two calls where a check is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import Any, Final

from tests.redis_servers import Single

from bench.engines import Rate, shared_folder, shared_uri
from bench.measure import Effort, collector_off
from ratekeeper import Limiter, Request

WORKS: Final = ("reserve memory", "reserve rules", "reserve shared", "reserve redis")
GOAL: Final = 2.5
_RATE: Final = Rate("token_bucket", 1_000_000_000, 86_400, 10_000)
_RULES: Final = """
version: 1
rules:
  - {id: requests, by: user, limits: 1_000_000_000/day}
  - {id: tokens, by: user, unit: tokens, limits: 1_000_000_000/day}
"""
_KEYS: Final = 100
_REDIS_CALLS: Final = 200

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Compared:
    """The time of a plain check and of a reservation, in nanoseconds, and their ratio."""

    work: str
    check_ns: float
    reserve_ns: float
    ratio: float


def run_reservations(
    wanted: Callable[[str], bool], effort: Effort, progress: Progress
) -> list[dict[str, Any]]:
    """Run the selected benchmarks, print results as they arrive, and return all numbers."""
    found: list[Compared] = []
    for work in WORKS:
        if not wanted(work):
            continue
        if not found:
            print(_heading(), flush=True)
        progress(f"measuring {work} …")
        with _limiter(work) as limiter:
            compared = _compared(work, limiter, effort)
        progress("")
        print(_line(compared), flush=True)
        found.append(compared)
    return [
        {"work": each.work, "check_ns": each.check_ns, "reserve_ns": each.reserve_ns}
        for each in found
    ]


def _heading() -> str:
    return (
        f"\nreserve and settle against a plain check: goal {GOAL} times\n"
        f"{'work':20}  {'check ns':>10}  {'reserve ns':>10}  {'ratio':>6}\n"
        f"{'-' * 20}  {'-' * 10}  {'-' * 10}  {'-' * 6}"
    )


def _line(found: Compared) -> str:
    verdict = "goal" if found.ratio <= GOAL else "behind"
    numbers = f"{found.check_ns:10,.0f}  {found.reserve_ns:10,.0f}  {found.ratio:6.1f}"
    return f"{found.work:20}  {numbers}  {verdict}"


@contextmanager
def _limiter(work: str) -> Iterator[Limiter]:
    if work == "reserve rules":
        with Limiter.from_rules(_RULES) as limiter:
            yield limiter
    elif work == "reserve memory":
        with Limiter(_RATE.limit_value) as limiter:
            yield limiter
    elif work == "reserve shared":
        with (
            shared_folder() as folder,
            Limiter(_RATE.limit_value, store=shared_uri(folder, _RATE)) as limiter,
        ):
            yield limiter
    else:
        with (
            Single() as server,
            Limiter(_RATE.limit_value, store=f"{server.uri}?deadline_ms=10000") as limiter,
        ):
            yield limiter


def _compared(work: str, limiter: Limiter, effort: Effort) -> Compared:
    keys: list[Any] = [f"user:{number}" for number in range(_KEYS)]
    costs = None
    if limiter.has_rules:
        keys, costs = [Request(user=key) for key in keys], {"requests": 1, "tokens": 100}
    batch = _REDIS_CALLS if work == "reserve redis" else effort.batch_calls

    def reserve(key: Any) -> None:
        with limiter.reserve(key, 100, costs=costs) as reservation:
            reservation.use(37)

    rounds: list[tuple[float, float]] = []
    for at in range(effort.rounds * effort.batches + 1):
        check_ns = _batch_ns(limiter.check, keys, batch)
        reserve_ns = _batch_ns(reserve, keys, batch)
        if at:  # the first one prepares connections and shapes
            rounds.append((check_ns, reserve_ns))
    checks, reservations = zip(*rounds, strict=True)
    ratio = median(one / other for other, one in rounds)
    return Compared(work, median(checks), median(reservations), ratio)


def _batch_ns(call: Callable[[Any], object], keys: list[Any], calls: int) -> float:
    with collector_off():
        start_ns = perf_counter_ns()
        for at in range(calls):
            call(keys[at % _KEYS])
        return (perf_counter_ns() - start_ns) / calls
