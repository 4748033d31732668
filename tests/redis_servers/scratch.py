"""Where servers keep their files, and the promise that nothing is left over.

All servers of a process live in one temporary folder and one process group. When the process ends
as it should, `atexit` stops the servers and removes the folder. When it is killed, no code of ours
runs any more; so a shell, the guard, leads the group and waits at the end of a pipe that this
process holds open. The kernel closes the pipe however we end, and the guard does the rest; a forked
worker has the pipe as well, so servers last as long as the last of those. The parent-death signal
of Linux would be shorter, but it fires when the *thread* that started the server ends, and it would
leave the folder.
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

# Told "done", it has nothing to do. At the end of the pipe it kills its whole group, itself too,
# and so leaves that and the folder to a shell outside of the group.
_GUARD = """
trap '' HUP INT TERM
read -r _ && exit 0
setsid sh -c 'kill -s KILL -- "-$0"; rm -rf -- "$1"' "$$" "$1"
"""


# The test that runs now, if it may not start a server; tests/conftest.py sets it.
forbidden = ""


def check_allowed() -> None:
    """Fail a test that uses a server without the mark that keeps it out of `make check`."""
    assert not forbidden, (
        f"{forbidden} uses a server, and tests/conftest.py could not see that: add "
        "`pytest.mark.server` to the test, its module, or the parameter of its fixture"
    )


class Scratch:
    """One process's folder, guard, and list of what is to be stopped at its end."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tollkeeper-redis-"))
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "guard", self.folder],
            stdin=subprocess.PIPE,
            process_group=0,
        )
        self._owner = os.getpid()
        self._names = count()
        self._stops: dict[object, Callable[[], None]] = {}
        atexit.register(self.close)

    @property
    def process_group(self) -> int:
        """The process group that a server must be started in, so that the guard finds it."""
        check_allowed()
        return self._guard.pid

    def new_folder(self, name: str) -> Path:
        """An empty folder of its own for one server."""
        folder = self.folder / f"{name}-{next(self._names)}"
        folder.mkdir()
        return folder

    def stop_at_exit(self, owner: object, stop: Callable[[], None]) -> None:
        """Call `stop` when the process ends, if `forget(owner)` was not called before."""
        self._stops[owner] = stop

    def forget(self, owner: object) -> None:
        """`owner` has been stopped."""
        self._stops.pop(owner, None)

    def close(self) -> None:
        """Stop what still runs and remove the folder. In a forked child: do nothing."""
        if os.getpid() != self._owner:
            return
        for stop in list(self._stops.values()):
            stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._guard.communicate(b"done\n")


_lock = Lock()
_scratch: Scratch | None = None


def scratch() -> Scratch:
    """This process's, made when it is first asked for."""
    global _scratch  # noqa: PLW0603 - one for each process is the point
    with _lock:
        if _scratch is None:
            _scratch = Scratch()
        return _scratch
