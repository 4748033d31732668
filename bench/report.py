"""What is printed: the machine, a table for each algorithm, a summary; and the same as JSON."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from bench.measure import Effort, Row, Scene
from tollkeeper.model import AlgorithmName

# The load average, in processors at work, from which on others get in the way.
BUSY_LOAD: Final = 0.8
_WIDTHS: Final = (24, 34, 9, 9, 8, 10)
_HEADINGS: Final = ("work", "engine", "p50 ns", "p99 ns", "ratio", "bytes/key")


@dataclass(frozen=True, slots=True)
class Result:
    """One work: an algorithm in a scene, and every engine's row. The first row is ours."""

    algorithm: AlgorithmName
    scene: Scene
    rows: Sequence[Row]

    @property
    def reference(self) -> Row:
        """The row that ratios are against."""
        return self.rows[0]


def machine() -> dict[str, Any]:
    """Where the numbers come from, and of what versions."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "cpu": _cpu_model(),
        "system": f"{platform.system()} {platform.machine()}",
        "tollkeeper": version("tollkeeper"),
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
    """The machine and the method, in a few lines."""
    facts = ", ".join(f"{name} {value}" for name, value in found.items())
    busy = "others are at work on this machine: times will be too long, ratios uncertain\n"
    return (
        f"{facts}\n{busy if found['load'] > BUSY_LOAD else ''}"
        f"{effort.rounds} rounds, engines taking turns; p50: median of {effort.batches} batches of "
        f"{effort.batch_calls:,} calls; p99: of {effort.sampled_calls:,} calls timed singly\n"
        f"ratio: this row's p50 / tollkeeper's, so above 1 tollkeeper is faster; "
        f"bytes/key: growth of the resident set of a fresh process"
    )


def heading(algorithm: str) -> str:
    """What stands above an algorithm's table."""
    return f"\n{algorithm}\n{_line(_HEADINGS)}\n{_line('-' * width for width in _WIDTHS)}"


def table(result: Result) -> str:
    """The lines of one work."""
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
    """The least and the greatest ratio against each peer, and where tollkeeper is behind."""
    spans: dict[str, list[float]] = {}
    behind = []
    for result in results:
        for row in result.rows:
            if row.engine.ours:
                continue
            ratio = row.ratio_to(result.reference)
            spans.setdefault(row.engine.name, []).append(ratio)
            if ratio < 1:
                behind.append(
                    f"  {result.algorithm}, {result.scene.name}: {row.engine.name} {ratio:.2f}"
                )
    lines = ["\nsummary: p50 against tollkeeper's, least to greatest over all works"]
    lines += [
        f"  {name:{_WIDTHS[1]}}  {min(ratios):6.2f} to {max(ratios):6.2f}"
        for name, ratios in spans.items()
    ]
    lines += ["behind a peer:", *behind] if behind else ["behind a peer: nowhere"]
    return "\n".join(lines)


def as_json(results: Sequence[Result], effort: Effort, found: dict[str, Any]) -> dict[str, Any]:
    """Everything measured, with each round's numbers, on the machine as it was found."""
    return {
        "machine": found,
        "command": sys.argv[1:],
        "effort": {name: getattr(effort, name) for name in effort.__slots__},
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
