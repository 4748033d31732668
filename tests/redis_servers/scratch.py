"""The servers' temporary folder, and its cleanup when the process ends.

All servers of a process share one temporary folder and one process group. At a normal exit,
`atexit` stops the servers and removes the folder. If the process is killed, its own code no longer
runs. So a shell, the cleaner, leads the group and reads from a pipe that this process holds open.
The kernel closes the pipe however the process ends, and the cleaner then kills the group and
removes the folder. A forked worker holds the pipe too, so the servers live until the last worker
ends. The parent-death signal of Linux would be shorter, but it fires at the end of the *thread*
that started the server, and it would leave the folder.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from threading import Lock

# After the line "done" it exits. At the end of the pipe it kills its whole group, itself too; so a
# shell outside of the group does that and removes the folder.
_CLEANER = """
trap '' HUP INT TERM
read -r _ && exit 0
setsid sh -c 'kill -s KILL -- "-$0"; rm -rf -- "$1"' "$$" "$1"
"""


# The current test, if it may not start a server; tests/conftest.py sets it.
forbidden = ""


def check_allowed() -> None:
    """Fail a test that uses a server without the mark that keeps it out of `make check`."""
    assert not forbidden, (
        f"{forbidden} uses a server, and tests/conftest.py could not see that: add "
        "`pytest.mark.server` to the test, its module, or the parameter of its fixture"
    )


class Scratch:
    """One process's folder, its cleaner, and the servers to stop at its end."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ratekeeper-redis-"))
        self._cleaner = subprocess.Popen(
            ["sh", "-c", _CLEANER, "cleaner", self.folder],
            stdin=subprocess.PIPE,
            process_group=0,
        )
        self._owner = os.getpid()
        self._names = count()
        self._stops: dict[object, Callable[[], None]] = {}
        atexit.register(self.close)

    @property
    def process_group(self) -> int:
        """Return the process group for new servers; the cleaner kills this group."""
        check_allowed()
        return self._cleaner.pid

    def new_folder(self, name: str) -> Path:
        """Make an empty folder for one server."""
        folder = self.folder / f"{name}-{next(self._names)}"
        folder.mkdir()
        return folder

    def stop_at_exit(self, owner: object, stop: Callable[[], None]) -> None:
        """Call `stop` when the process ends, if `forget(owner)` was not called before."""
        self._stops[owner] = stop

    def forget(self, owner: object) -> None:
        """Drop the stop function of an `owner` that has been stopped."""
        self._stops.pop(owner, None)

    def close(self) -> None:
        """Stop the servers that still run and remove the folder. A forked child does nothing."""
        if os.getpid() != self._owner:
            return
        for stop in list(self._stops.values()):
            stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._cleaner.communicate(b"done\n")


_lock = Lock()
_scratch: Scratch | None = None


def scratch() -> Scratch:
    """Return this process's Scratch; the first call makes it."""
    global _scratch  # noqa: PLW0603 - one for each process is the purpose
    with _lock:
        if _scratch is None:
            _scratch = Scratch()
        return _scratch
