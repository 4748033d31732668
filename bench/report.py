"""The report: the machine, a table per algorithm and a summary, as text and as JSON."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from bench.measure import SCENES, Effort, Row, Scene
from bench.processes import Throughput
from ratekeeper.core.model import AlgorithmName

# With a higher load average than this, other processes disturb the measurement.
BUSY_LOAD: Final = 0.8
_WIDTHS: Final = (16, 34, 9, 9, 8, 10)
_HEADINGS: Final = ("work", "engine", "p50 ns", "p99 ns", "ratio", "bytes/key")


@dataclass(frozen=True, slots=True)
class Result:
    """One benchmark: an algorithm in a scene, with one row per engine. The first row is ours."""

    algorithm: AlgorithmName
    scene: Scene
    rows: Sequence[Row]

    @property
    def reference(self) -> Row:
        """Return the row that ratios refer to."""
        return self.rows[0]


def machine() -> dict[str, Any]:
    """Return facts about the machine, and the versions of the libraries."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "cpu": _cpu_model(),
        "system": f"{platform.system()} {platform.machine()}",
        "ratekeeper": version("ratekeeper"),
        "limits": version("limits"),
        "throttled-py": version("throttled-py"),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown"


def header(effort: Effort, found: dict[str, Any]) -> str:
    """Return a few lines about the machine and the method."""
    facts = ", ".join(f"{name} {value}" for name, value in found.items())
    busy = "other processes use this machine: times will be too long, ratios uncertain\n"
    return (
        f"{facts}\n{busy if found['load'] > BUSY_LOAD else ''}"
        f"{effort.rounds} rounds, engines take turns; p50: median of {effort.batches} batches of "
        f"{effort.batch_calls:,} calls; p99: of {effort.sampled_calls:,} calls timed one by one\n"
        f"ratio: this row's p50 / the first row's, so above 1 the first is faster; "
        f"bytes/key: growth of the resident set of a fresh process"
    )


def heading(algorithm: str) -> str:
    """Return the lines above the table of an algorithm."""
    return f"\n{algorithm}\n{_line(_HEADINGS)}\n{_line('-' * width for width in _WIDTHS)}"


def table(result: Result) -> str:
    """Return the lines of one benchmark."""
    lines = []
    for row in result.rows:
        size = row.bytes_per_key
        lines.append(
            _line(
                (
                    result.scene.name,
                    row.engine.name,
                    f"{row.p50:,.0f}",
                    f"{row.p99:,.0f}",
                    f"{row.ratio_to(result.reference):.2f}",
                    "" if size is None else f"{size:,.0f}",
                )
            )
        )
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    aligned = [
        cell.ljust(width) if number < 2 else cell.rjust(width)
        for number, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    ]
    return "  ".join(aligned).rstrip()


def summary(results: Sequence[Result]) -> str:
    """Return the ratios of the peers to ratekeeper, and the benchmarks that a peer wins."""
    lines = ["\nsummary: a peer's p50 / ours, minimum to maximum of all benchmarks"]
    for ours in _names(results, ours=True):
        for peer in _names(results, ours=False):
            ratios = _ratios(results, peer, ours)
            if ratios:
                least, greatest = min(ratios.values()), max(ratios.values())
                pair = f"{peer} / {ours}"
                lines.append(f"  {pair:56}  {least:6.2f} to {greatest:6.2f}")
            lines += [
                f"    slower than it: {work} {ratio:.2f}"
                for work, ratio in ratios.items()
                if ratio < 1
            ]
    return "\n".join(lines)


def _names(results: Sequence[Result], *, ours: bool) -> list[str]:
    rows = [row for result in results for row in result.rows]
    return list(dict.fromkeys(row.engine.name for row in rows if row.engine.ours is ours))


def _ratios(results: Sequence[Result], peer: str, ours: str) -> dict[str, float]:
    """Return the ratio of two engines in each benchmark that both have."""
    ratios = {}
    for result in results:
        rows = {row.engine.name: row for row in result.rows}
        if peer in rows and ours in rows:
            work = f"{result.algorithm}, {result.scene.name}"
            ratios[work] = rows[peer].ratio_to(rows[ours])
    return ratios


def throughput_table(found: Sequence[Throughput], results: Sequence[Result]) -> str:
    """Return the table of several processes on one key, compared with a peer in one process."""
    lines = [
        "\none hot key in shared memory, against a peer's full answer in one process",
        f"{'algorithm':24}  processes  checks/s in all  {'minimum to maximum':>24}  ratio",
        f"{'-' * 24}  ---------  ---------------  {'-' * 24}  -----",
    ]
    for each in found:
        ratios = [
            f"{row.p50 * each.checks_per_second / 1e9:.1f} × {row.engine.name}"
            for result in results
            if result.algorithm == each.algorithm and result.scene is SCENES[0]
            for row in result.rows
            if not row.engine.ours and row.engine.full_answer
        ]
        span = f"{min(each.rounds):,.0f} to {max(each.rounds):,.0f}"
        lines.append(
            f"{each.algorithm:24}  {each.processes:9}  {each.checks_per_second:15,.0f}  "
            f"{span:>24}  {', '.join(ratios)}".rstrip()
        )
    return "\n".join(lines)


def as_json(
    results: Sequence[Result],
    throughputs: Sequence[Throughput],
    effort: Effort,
    found: dict[str, Any],
) -> dict[str, Any]:
    """Return all numbers, with those of each round, and the facts about the machine."""
    return {
        "machine": found,
        "command": sys.argv[1:],
        "effort": {name: getattr(effort, name) for name in effort.__slots__},
        "processes": [
            {**asdict(each), "checks_per_second": each.checks_per_second} for each in throughputs
        ],
        "rows": [
            {
                "algorithm": result.algorithm,
                "work": result.scene.name,
                "engine": row.engine.name,
                "ours": row.engine.ours,
                "full_answer": row.engine.full_answer,
                "p50_ns": row.p50,
                "p99_ns": row.p99,
                "ratio": row.ratio_to(result.reference),
                "bytes_per_key": row.bytes_per_key,
                "rounds_p50_ns": row.p50s,
                "rounds_p99_ns": row.p99s,
            }
            for result in results
            for row in result.rows
        ],
    }
