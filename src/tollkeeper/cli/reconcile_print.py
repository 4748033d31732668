"""What `tollkeeper reconcile` prints: a report as lines or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tollkeeper.cli.rules_print import say
from tollkeeper.core.version import __version__

if TYPE_CHECKING:
    from tollkeeper.cli.reconcile import Finding, Report

_COLOURS: Final = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_LEVEL_WIDTH: Final = 9
_CHECK_WIDTH: Final = 13


def report_data(report: Report) -> dict[str, Any]:
    """The report for JSON."""
    return {
        "tollkeeper": __version__,
        "at": report.at.isoformat(timespec="seconds"),
        "seconds": report.seconds,
        "store": report.store,
        "exit_code": report.exit_code,
        "counted": dict(report.counted),
        "findings": [asdict(finding) for finding in report.findings],
        "repairs": [asdict(repair) for repair in report.repairs],
    }


def say_line(data: dict[str, Any]) -> None:
    """One JSON document on one line, for a log."""
    say(json.dumps(data, separators=(",", ":")))


def say_report(report: Report) -> None:
    """Each finding, what was mended, and a sum."""
    console = Console(highlight=False)
    if console.is_terminal:
        _print_table(console, report)
    else:
        # Whoever reads a file or a pipe wants a line to be a line, however long.
        for finding in report.findings:
            say(f"{finding.level:{_LEVEL_WIDTH}}{finding.check:{_CHECK_WIDTH}}{finding.what}")
            for line in _below(finding):
                say(f"{'':{_LEVEL_WIDTH + _CHECK_WIDTH}}{line}")
    for repair in report.repairs:
        done = "mended" if repair.done else "left"
        say(f"{done:{_LEVEL_WIDTH}}{repair.key} on {repair.node}: {repair.what}")
    levels = Counter(finding.level for finding in report.findings)
    counted = ", ".join(f"{name} {value:,}" for name, value in report.counted.items())
    say(
        f"{report.store}: problems {levels['problem']}, warnings {levels['warning']}; {counted}; "
        f"{report.seconds:g} s"
    )


def _print_table(console: Console, report: Report) -> None:
    table = Table.grid(padding=(0, 2))
    for finding in report.findings:
        # As Text: what is in brackets is no markup.
        level = Text(finding.level, style=_COLOURS[finding.level])
        table.add_row(level, finding.check, Text(finding.what))
        for line in _below(finding):
            table.add_row("", "", Text(line, style="bold" if line.startswith("->") else ""))
    console.print(table)


def _below(finding: Finding) -> Iterator[str]:
    """Where it was found, and what to do."""
    yield from (f"   {each}" for each in finding.where)
    if finding.remedy:
        yield f"-> {finding.remedy}"
