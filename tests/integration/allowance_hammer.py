"""Processes of one node that spend from one table. A program, so that it can fork safely.

    python -m tests.integration.allowance_hammer exact FILE PROCESSES UNITS
    python -m tests.integration.allowance_hammer killed FILE PROCESSES KILLS SEED

Each prints one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from random import Random

from ratekeeper import Decision, Limit, open_store
from ratekeeper.decide.allowances import AllowanceGate, Allowances
from ratekeeper.decide.leasing import Lease
from tests.integration.hammer import Counts, start, wait_for

LIMIT = Limit(1_000_000, per=3_600)
KEYS = tuple(f"key-{number}" for number in range(5))
MS = 1_000_000
HOUR_NS = 3_600_000 * MS
KILLS_MAX = 1_000


def open_table(path: str) -> Allowances:
    table = open_store(f"shared://{path}?capacity=100&log_bytes=65536&allowances=100").allowances
    assert table is not None
    return table


def gates_of(table: Allowances) -> tuple[AllowanceGate, AllowanceGate]:
    return (
        table.gate((LIMIT,), "api", "leased", HOUR_NS),
        table.gate((LIMIT,), "api", "eventual", HOUR_NS),
    )


def put(gate: AllowanceGate, key: str, units: int, lasts_ns: int) -> int:
    """Put units there; return how many of an older lease the caller gives back."""
    answer = Decision(True, LIMIT, units, charged_ns=time.time_ns(), decided_ns=time.time_ns())
    replaced = gate.put(key, Lease(units, time.time_ns(), lasts_ns), answer, 1)
    return replaced.units if replaced else 0


def exact(path: str, processes: int, units: int) -> dict[str, object]:
    """Let all workers spend each lease and budget until none is left, by compiled checks."""
    inherited = open_table(path)
    for gate in gates_of(inherited):
        for key in KEYS:
            put(gate, key, units, HOUR_NS)
    spent = Counts(processes)
    none = Decision(False, LIMIT, 0)

    def work(worker: int) -> None:
        table = inherited if worker % 2 else open_table(path)
        for gate in gates_of(table):
            fast = gate.fast_check(lambda key: none)
            assert fast is not None
            for key in KEYS:
                while fast.check(key):
                    spent.add(worker)

    statuses = wait_for([start(lambda worker=w: work(worker)) for w in range(processes)])
    stats = inherited.stats()
    return {
        "spent": spent.total(),
        "left": stats.leased_units,
        "pending": stats.pending_units,
        "statuses": statuses,
    }


class Tally:
    """What workers have done, in memory that survives them: two numbers for each worker."""

    def __init__(self) -> None:
        self.leased = Counts(KILLS_MAX)  # spent from leases; or, by a reporter, given back
        self.budgets = Counts(KILLS_MAX)  # spent from budgets; or, by a reporter, reported

    def has_both(self) -> bool:
        return self.leased.total() > 0 and self.budgets.total() > 0


def spend_for_ever(path: str, inherited: Allowances, worker: int, tally: Tally) -> None:
    leased, eventual = gates_of(open_table(path) if worker % 4 else inherited)
    parent = os.getppid()
    while os.getppid() == parent:
        for key in KEYS:
            if leased.spend(key, 1):
                tally.leased.add(worker)
            if eventual.spend(key, 1):
                tally.budgets.add(worker)


def report_for_ever(path: str, worker: int, tally: Tally) -> None:
    table = open_table(path)
    gates_of(table)
    parent = os.getppid()
    while os.getppid() == parent:
        claims = table.claim(100, 0)
        for claim in claims:
            for _ in range(claim.units):
                (tally.leased if claim.kind == "leased" else tally.budgets).add(worker)
        table.confirm(claims)


def run_killing(children: list[int], random: Random) -> None:
    """Kill one worker."""
    victim = children.pop(random.randrange(len(children)))
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)


def killed(path: str, processes: int, kills: int, seed: int) -> dict[str, object]:
    """Put short leases and budgets, while workers spend and report, and are killed and replaced."""
    random = Random(seed)
    table = open_table(path)
    gates = gates_of(table)
    spends, reports = Tally(), Tally()
    leases = given_back = starts = 0
    children: list[int] = []
    while starts < processes + kills or not (spends.leased.total() and reports.has_both()):
        assert starts < KILLS_MAX - processes, "no worker spends and reports"
        while len(children) < processes:
            worker = starts
            starts += 1
            children.append(
                start(lambda worker=worker: report_for_ever(path, worker, reports))
                if worker % 3 == 0
                else start(lambda worker=worker: spend_for_ever(path, table, worker, spends))
            )
        key = random.choice(KEYS)
        leases += 200
        given_back += put(gates[0], key, 200, 20 * MS)
        put(gates[1], key, 200, 20 * MS)
        time.sleep(random.uniform(0.001, 0.01))  # the interval between kills
        run_killing(children, random)
    for child in children:
        os.kill(child, signal.SIGKILL)
    wait_for(children)
    stats = table.stats()
    return {
        "leases": leases,
        "spent": spends.leased.total(),
        "given back": given_back + reports.leased.total(),
        "left": stats.leased_units,
        "spent of budgets": spends.budgets.total(),
        "reported": reports.budgets.total(),
        "pending": stats.pending_units,
    }


def main(arguments: Sequence[str]) -> None:
    verb, path, *numbers = arguments
    if verb == "exact":
        result = exact(path, *map(int, numbers))
    else:
        result = killed(path, *map(int, numbers))
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
