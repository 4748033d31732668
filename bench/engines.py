"""The measured engines: each has a name and a function that opens it.

An engine opened with a rate is a *session*: a function that checks a key, and one that reads its
result. The first engine is the default of `Limiter`, and ratios refer to it. Peers are in
`peers.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ratekeeper import Limit, Limiter
from ratekeeper.core.clock import SystemClock
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName
from ratekeeper.decide import kernel
from ratekeeper.decide.stores.memory import PythonMemoryStore

# Room for logs: 1,000,000 keys of a block each, or a hot key with 200,000 entries.
LOG_BYTES: Final = 128_000_000
# A folder in memory, where a shared store would be in production.
_TMPFS: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Rate:
    """A limit in a form for all engines."""

    algorithm: AlgorithmName
    limit: int
    per_seconds: int
    keys_max: int
    """The number of keys, for engines with a fixed capacity."""

    @property
    def limit_value(self) -> Limit:
        """Return the limit as ratekeeper has it."""
        return Limit(self.limit, per=self.per_seconds, algorithm=self.algorithm)


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Session:
    """An engine that is ready for checks."""

    check: Callable[[str], Any]
    """One check of one key; this call is timed."""
    allowed: Callable[[Any], bool]
    """Return True if the check was allowed. Not timed; it verifies the work."""
    rest: Callable[[], None] = _nothing
    """Wait until nothing of this engine runs in the background, so that others are not slowed."""
    close: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True)
class Engine:
    """One row of the table."""

    name: str
    open: Callable[[Rate], Session]
    algorithms: tuple[AlgorithmName, ...] = UNIT_ALGORITHMS
    ours: bool = False
    full_answer: bool = True
    """False if the result is only yes or no; the remaining units would need another call."""
    keys_most: int = 100_000
    """The engine is not measured with more keys than this, which would take minutes."""


def _open_python(rate: Rate) -> Session:
    store = PythonMemoryStore(SystemClock(), states_max=rate.keys_max)
    limiter = Limiter(rate.limit_value, store=store, on_failure="raise")
    return Session(limiter.check, allowed=bool, close=store.close)


def _open_kernel(rate: Rate) -> Session:
    uri = f"memory://?capacity={rate.keys_max}{_log_option(rate)}"
    limiter = Limiter(rate.limit_value, store=uri, on_failure="raise")
    return Session(limiter.check, allowed=bool, close=limiter.close)


def _open_shared(rate: Rate) -> Session:
    folder = shared_folder()
    limiter = Limiter(rate.limit_value, store=shared_uri(folder.name, rate), on_failure="raise")

    def close() -> None:
        limiter.close()
        folder.cleanup()

    return Session(limiter.check, allowed=bool, close=close)


def shared_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a folder for the file of a shared store, in memory if the system has /dev/shm."""
    parent = _TMPFS if _TMPFS.is_dir() else None
    return tempfile.TemporaryDirectory(prefix="ratekeeper-bench-", dir=parent)


def shared_uri(folder: str, rate: Rate) -> str:
    """Return the URI of a shared store in the folder."""
    return f"shared://{folder}/limits?capacity={rate.keys_max}{_log_option(rate)}"


def _log_option(rate: Rate) -> str:
    return f"&log_bytes={LOG_BYTES}" if rate.algorithm == "sliding_window_log" else ""


_KERNEL: Final = (
    Engine("ratekeeper kernel", _open_kernel, ours=True, keys_most=1_000_000),
    Engine("ratekeeper shared", _open_shared, ours=True, keys_most=1_000_000),
)
OURS: Final = (
    *(_KERNEL if kernel.BUILT else ()),
    Engine("ratekeeper python", _open_python, ours=True),
)
