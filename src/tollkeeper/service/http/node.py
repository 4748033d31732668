"""What every part of the service shares: one limiter, and who may ask it.

A node is one worker process. HTTP, gRPC and the admin API of a worker have the same one, so a limit
is one limit, whichever way a request comes in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tollkeeper.metrics.counters import Counters
from tollkeeper.service.http.patience import BODY_SECONDS_MAX

if TYPE_CHECKING:
    from tollkeeper.history.recorder import Recorder
    from tollkeeper.limiter import AsyncLimiter
    from tollkeeper.service.http.tokens import Tokens
    from tollkeeper.web.answers import Style
    from tollkeeper.web.identity import Identity

# A check is a few hundred bytes; a batch of a hundred, some ten thousand.
BODY_BYTES_MAX: Final = 64 * 1024
BATCH_BYTES_MAX: Final = 1024 * 1024
BATCH_CHECKS_MAX: Final = 100
# A leaky bucket's turn that comes later than this is not waited for with an open connection.
HOLD_SECONDS_MAX: Final = 30.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How a node answers: what of the command's settings reaches the path of a request."""

    style: Style
    """Which headers tell of limits."""
    body_bytes_max: int = BODY_BYTES_MAX
    batch_bytes_max: int = BATCH_BYTES_MAX
    body_seconds_max: float = BODY_SECONDS_MAX
    """How long a body may take to arrive."""
    counters: Path | None = None
    """The folder where workers leave their counters for each other; None: alone."""
    worker: int = 0
    """The process's number among its siblings, or its id; in logs and metrics."""


@dataclass(slots=True)
class Node:
    """One worker: its limiter, its tokens, its name."""

    limiter: AsyncLimiter
    tokens: Tokens
    node_id: str
    identity: Identity
    settings: Settings
    started_ns: int
    """When it started, by the system's clock."""
    database: str | None = None
    """The URL of the control plane's database; None where rules come from a file."""
    now_ns: Callable[[], int] = time.time_ns
    """The Unix time, for what headers say."""
    counters: Counters = field(default_factory=Counters)
    """What is counted on the path of requests."""
    recorder: Recorder | None = None
    """What keeps decisions and usage; None: nothing is kept."""
    stopping: bool = False
    """Set when the service was told to end: what is asked is still answered, but come no more."""
    closing: bool = False
    """Set when this worker is about to end, though others may go on: use another connection."""
