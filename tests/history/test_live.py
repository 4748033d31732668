"""Files that workers leave for each other: of the living, whole, and bounded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tollkeeper.history.live import PENALTIES_MAX, Counted, Known, Live, Standing
from tollkeeper.history.sketch import COUNTERS_MAX


def known(subject: str) -> Known:
    """What a worker knows that has seen one."""
    counted = Counted([((subject, "orders"), 2.0)], 0.5, 3.0)
    standing = Standing("orders", subject, 1, 10, False, 99)
    return Known(1.5, counted, Counted([], 0.0, 0.0), [standing])


def test_what_one_leaves_the_others_read(tmp_path: Path) -> None:
    """All of it; and not one's own."""
    one, two = Live(tmp_path, number=1), Live(tmp_path)
    one.leave(known("user:1"))
    two.leave(known("user:2"))
    assert list(two.others()) == [known("user:1")]
    assert list(one.others()) == [known("user:2")]


def test_the_longest_that_there_can_be_is_read(tmp_path: Path) -> None:
    """Whoever makes up long names in strange letters blinds nobody."""
    names = [f"user:{number:06}".ljust(512, "🦊") for number in range(COUNTERS_MAX)]
    rule = "r" * 128
    counted = Counted([((name, rule), 1.0) for name in names], 0.0, 1.0)
    standing = [Standing(rule, name, 1, 10, False, 99) for name in names[:PENALTIES_MAX]]
    Live(tmp_path, number=1).leave(Known(1.0, counted, counted, standing))
    (found,) = Live(tmp_path).others()
    assert len(found.penalties) == PENALTIES_MAX


def test_of_the_dead_nothing_is_told(tmp_path: Path) -> None:
    """And their files are removed."""
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        check=True,
        capture_output=True,
        text=True,
    )
    Live(tmp_path, number=int(done.stdout)).leave(known("user:1"))
    assert list(Live(tmp_path).others()) == []
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    """Half a file, a strange one, one with another name."""
    (tmp_path / "1.live").write_bytes(b"\x83half")
    (tmp_path / "notes.live").write_bytes(b"")
    Live(tmp_path, number=os.getppid()).leave(known("user:3"))
    assert list(Live(tmp_path).others()) == [known("user:3")]
