"""Notice `memory://` in one of several worker processes of a web server, and log a warning.

Each process has its own `memory://`: with four workers, a client can get four times its limit.
Nothing fails, so that the mistake is usually found in production.

**How it is noticed.** There is no standard way to ask a server for its number of workers. Command
lines and environment variables do not suffice: gunicorn reads configuration files, uvicorn is
started by other programs, and with `--reload` it ignores `--workers`. But a server loads the
application in the worker process, so its own functions are on the call stack when the application
opens its store, and one of them holds the number:

    gunicorn    the arbiter, which forks the workers         self.num_workers
    uvicorn     the function that a worker process starts    config.workers, unless config.reload
    granian     the same; it has the number of this worker   worker_id: 2 or more means several
                the server, if it forks its workers          self.workers

A store that exists before the server forks its workers is noticed at the fork.

**What is not noticed**: other servers, a store that is opened in a thread, and processes that the
application starts itself. **False alarms** are excluded: a number that cannot be read counts as
one worker, and the stack has no server in a shell, in a test or in a single process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Final

from ratekeeper.core.forks import after_fork

LOG: Final = logging.getLogger("ratekeeper.workers")

_has_warned = False


def warn_of_several_workers() -> None:
    """Log a warning if this process is one of several workers, or becomes one by a fork.

    Logs once in a process, and not again in the processes that it forks.
    """
    _warn()
    after_fork(_warn)


def _warn() -> None:
    global _has_warned  # noqa: PLW0603 - one warning for the process
    if _has_warned:
        return
    server, workers = workers_on(sys._getframe())  # noqa: SLF001 - documented for this use
    if workers > 1:
        _has_warned = True
        LOG.warning(
            "memory:// counts in each worker process separately, and %s runs at least %d, so a "
            "client can get %d times its limit. To count the workers of this machine together, "
            'use store="shared:///run/app.limits"; for several machines, use Redis',
            server,
            workers,
            workers,
        )


def workers_on(frame: FrameType | None) -> tuple[str, int]:
    """Return the server on a call stack and its number of workers; ("", 1) if there is none."""
    found = "", 1
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        count = _COUNTS.get(module)
        if count is not None:
            workers = _number(count, frame.f_locals)
            if workers > found[1]:
                found = module.partition(".")[0], workers
        frame = frame.f_back
    return found


def _number(count: Callable[[Mapping[str, Any]], Any], variables: Mapping[str, Any]) -> int:
    try:
        workers = count(variables)
    except (KeyError, AttributeError):  # another function of the module, or another version
        return 1
    return workers if isinstance(workers, int) else 1


def _of_granian(variables: Mapping[str, Any]) -> Any:
    server = variables["self"]
    # Workers that are threads share the memory of the process.
    has_processes = any(kind.__module__ == "granian.server.mp" for kind in type(server).__mro__)
    return server.workers if has_processes else 1


# The number of workers, from the local variables of the functions of a module.
_COUNTS: Final[dict[str, Callable[[Mapping[str, Any]], Any]]] = {
    "gunicorn.arbiter": lambda variables: variables["self"].num_workers,
    "uvicorn._subprocess": lambda variables: (
        1 if variables["config"].reload else variables["config"].workers
    ),
    "granian.server.mp": lambda variables: variables["worker_id"],
    "granian.server.common": _of_granian,
}
