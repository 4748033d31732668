"""A check of a global rule beside one of a regional rule, on the same Redis.

    python -m bench.region_checks                          # a minute, on a Redis of its own
    python -m bench.region_checks --only token_bucket --rounds 200

The rules take turns in blocks of 100 checks, in one process and on one connection, so whatever else
the machine does affects all of them alike. A ratio is the median over the rounds of the ratios of
two blocks that were measured moments apart.

p50, p99  a check, from call to decision, of one block
server    the time of the script on the server, by the server's own count
client    the processor time of this process, with the system calls of the connection

`busy` is an eventual rule whose subjects four other regions have just asked for. A denied check
is sent to the server each time: this process caches no denials here, as it does by default for
regional rules. A global rule never does, because an accepted total may give room at any moment.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Sequence
from contextlib import closing
from fractions import Fraction
from statistics import median
from typing import Any, Final, NamedTuple

from tests.answering import answer
from tests.redis_servers import Single

from ratekeeper import Limit
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName
from ratekeeper.decide.regional import (
    AcrossRegions,
    RegionalCounts,
    Report,
    Shares,
    SubjectKey,
    rule_number,
)
from ratekeeper.decide.store import Counter, Store
from ratekeeper.decide.stores import open_store

BLOCK: Final = 100
ROUNDS: Final = 40
OTHERS: Final = ("us", "ap", "sa", "af")
MODES: Final[dict[str, AcrossRegions]] = {
    "exact": "exact",
    "eventual": "eventual",
    "busy": "eventual",
}
SUBJECTS: Final = tuple(f"user-{number:03}" for number in range(BLOCK))
PATIENCE_MS: Final = 5_000


class Cost(NamedTuple):
    """What a check has cost in one block, in microseconds."""

    p50: float
    p99: float
    server: float
    client: float


Costs = dict[str, dict[str, float]]
"""By kind of rule: each field of Cost, and its ratio to a regional rule's."""


class CheckBench:
    """The rules on one Redis. Its region must have a share."""

    def __init__(self, store: Store, admin: Any) -> None:
        """`admin` is a client of the same server, for its statistics."""
        counts = store.regional
        assert counts is not None
        self._store, self._counts, self._admin = store, counts, admin

    def measure(self, algorithm: AlgorithmName, *, allowed: bool, rounds: int) -> Costs:
        """Return what checks by one algorithm cost that are all allowed, or all denied."""
        limits = (Limit(1_000_000 if allowed else 5, per=3_600, algorithm=algorithm),)
        name = f"{algorithm}-{'allowed' if allowed else 'denied'}"
        counters: dict[str, Counter] = {"region": self._store.counter(limits, name)}
        for kind, across in MODES.items():
            counters[kind] = self._counts.global_counter(limits, f"{name}-{kind}", across)
        for counter in counters.values():
            for _ in range(1 if allowed else limits[0].capacity + 1):
                found = [answer(counter.check(subject, 1)).allowed for subject in SUBJECTS]
            assert set(found) == {allowed}
        blocks: dict[str, list[Cost]] = {kind: [] for kind in counters}
        for _ in range(rounds):
            self._ask_elsewhere(limits, f"{name}-busy")
            for kind, counter in counters.items():
                blocks[kind].append(self._block(counter))
        base = blocks["region"]
        return {kind: _summary(found, base) for kind, found in blocks.items()}

    def _ask_elsewhere(self, limits: tuple[Limit, ...], rule: str) -> None:
        """Report a demand of all other regions."""
        number, now_ns = rule_number(limits, rule), time.time_ns()
        reports = [
            Report(SubjectKey(number, subject), limits, "eventual", 1, 0, (0,), (0,), 1, 0, now_ns)
            for subject in SUBJECTS
        ]

        async def learn() -> None:
            for region in OTHERS:
                await self._counts.learn(region, 1, reports)

        asyncio.run(learn())

    def _server_us(self) -> tuple[int, int]:
        found = self._admin.info("commandstats")["cmdstat_evalsha"]
        return found["usec"], found["calls"]

    def _block(self, counter: Counter) -> Cost:
        took: list[int] = []
        used_us, calls = self._server_us()
        gc.disable()
        began_s = time.process_time()
        for subject in SUBJECTS:
            began_ns = time.perf_counter_ns()
            answer(counter.check(subject, 1))
            took.append(time.perf_counter_ns() - began_ns)
        client_s = time.process_time() - began_s
        gc.enable()
        then_us, then_calls = self._server_us()
        took.sort()
        return Cost(
            took[BLOCK // 2] / 1e3,
            took[BLOCK * 99 // 100 - 1] / 1e3,
            (then_us - used_us) / (then_calls - calls),
            1e6 * client_s / BLOCK,
        )


def _summary(blocks: Sequence[Cost], base: Sequence[Cost]) -> dict[str, float]:
    found = {}
    for place, field in enumerate(Cost._fields):
        found[field] = median(block[place] for block in blocks)
        found[f"{field}_ratio"] = median(
            block[place] / beside[place] for block, beside in zip(blocks, base, strict=True)
        )
    return found


def columns() -> str:
    """Return the heading of the lines."""
    found = "".join(f"{field:>14}" for field in Cost._fields)
    return f"{'us (ratio to a regional rule)':<36}{found}"


def lines(name: str, costs: Costs) -> list[str]:
    """Return the figures of one case as lines."""
    found = []
    for kind, each in costs.items():
        columns = [f"{each[field]:7.1f} ({each[f'{field}_ratio']:.2f})" for field in Cost._fields]
        found.append(f"{name:<32} {kind:<9}" + "".join(columns))
    return found


async def set_up(counts: RegionalCounts) -> None:
    """Give the region a fifth of the limits."""
    _, token = await counts.lead("bench", 10**14)
    fifth = Fraction(1, 1 + len(OTHERS))
    await counts.set_shares(Shares(1, fifth, fifth, 0, OTHERS), token)


def main() -> None:
    """Measure checks on a Redis of their own and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.region_checks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=UNIT_ALGORITHMS, default=UNIT_ALGORITHMS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    with (
        Single() as server,
        closing(open_store(server.uri, denied_cache_ms=0, deadline_ms=PATIENCE_MS)) as store,
    ):
        assert store.regional is not None
        asyncio.run(set_up(store.regional))
        bench = CheckBench(store, server.admin)
        print(columns())
        for algorithm in options.only:
            for allowed in (True, False):
                name = f"{algorithm} {'allowed' if allowed else 'denied'}"
                costs = bench.measure(algorithm, allowed=allowed, rounds=options.rounds)
                print("\n".join(lines(name, costs)), flush=True)


if __name__ == "__main__":
    main()
