"""The page of benchmarks has the numbers that `python -m bench` printed."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from bench.page import page

PRINTED = """\
python CPython 3.11.2, cpus 2
3 rounds, engines take turns

token_bucket
work         engine                p50 ns  ratio
-----------  -----------------  ---------  -----
one hot key  ratekeeper kernel        105   1.00
one hot key  a|peer                 3,178  30.27  behind
3,178 ns each would take a long time

processes
algorithm     checks/s  ratio
------------  --------  -----
fixed_window       9.1  48.1 × limits

summary: a peer's p50 / ours; minimum to maximum
  throttled-py / ratekeeper kernel  31.23 to  40.32
"""


def test_printed_tables_become_tables_of_the_page() -> None:
    """Each printed number, note and text is on the page once, and numbers are aligned."""
    made = page(PRINTED, {"cpus": 2}, datetime(2026, 1, 2, tzinfo=UTC), ["--markdown", "a b.md"])
    assert "python -m bench --markdown 'a b.md'" in made
    assert "A quick run" not in made
    assert made.partition("## The machine and the versions\n\n")[2].splitlines() == [
        "| fact | value |",
        "|---|---|",
        "| date | 2026-01-02 |",
        "| cpus | 2 |",
        "",
        "- 3 rounds, engines take turns.",
        "",
        "## `token_bucket`",
        "",
        "| work | engine | p50 ns | ratio |  |",
        "|---|---|--:|--:|---|",
        "| one hot key | ratekeeper kernel | 105 | 1.00 |  |",
        r"| one hot key | a\|peer | 3,178 | 30.27 | behind |",
        "",
        "- 3,178 ns each would take a long time.",
        "",
        "## Processes",
        "",
        "| algorithm | checks/s | ratio |",
        "|---|--:|---|",
        "| fixed_window | 9.1 | 48.1 × limits |",
        "",
        "## Summary: a peer's p50 / ours",
        "",
        "Minimum to maximum.",
        "",
        "```text",
        "throttled-py / ratekeeper kernel  31.23 to  40.32",
        "```",
    ]


def test_a_partial_run_says_so() -> None:
    """A reader does not take the numbers of a quick look for results."""
    for option in ("--quick", "--only"):
        assert "A quick run" in page(PRINTED, {}, datetime.now(UTC), [option])


def test_the_page_was_made_by_a_run() -> None:
    """docs/benchmarks.md names its command, its date and the versions of the peers."""
    text = (Path(__file__).parents[1] / "docs/benchmarks.md").read_text(encoding="utf-8")
    for part in ("python -m bench", "| date | 20", "| limits | ", "| throttled-py | ", "| cpus | "):
        assert part in text, part
