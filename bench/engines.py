"""What is measured: engines, each a name and a way to open it.

An engine opened at a rate is a *session*: a callable of a key, and how to read its answer. To
measure another engine (the C kernel, shared memory), add it to OURS; the first one listed there
that is present is what every ratio is against. Peers are in `peers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tollkeeper import Limit, Limiter
from tollkeeper.clock import SystemClock
from tollkeeper.decide.stores.memory import PythonMemoryStore
from tollkeeper.model import ALGORITHM_NAMES, AlgorithmName


@dataclass(frozen=True, slots=True)
class Rate:
    """What every engine is set to, in words that each of them understands."""

    algorithm: AlgorithmName
    limit: int
    per_seconds: int
    keys_max: int
    """Room for so many keys, for engines that have to be told."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Session:
    """An engine that is ready to be asked."""

    check: Callable[[str], Any]
    """One check of one key: what is timed."""
    allowed: Callable[[Any], bool]
    """Was the answer yes? Never timed; shows that the work was the work we think it was."""
    rest: Callable[[], None] = _nothing
    """Wait until nothing of this engine runs in the background, so that others are not slowed."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One row of the table."""

    name: str
    open: Callable[[Rate], Session]
    algorithms: tuple[AlgorithmName, ...] = ALGORITHM_NAMES
    ours: bool = False
    full_answer: bool = True
    """False: it says yes or no, and remaining and reset would be another call."""


def _open_python(rate: Rate) -> Session:
    limit = Limit(rate.limit, per=rate.per_seconds, algorithm=rate.algorithm)
    store = PythonMemoryStore(SystemClock(), states_max=rate.keys_max)
    return Session(check=Limiter(limit, store=store).check, allowed=bool)


OURS: Final = (Engine("tollkeeper python", _open_python, ours=True),)
