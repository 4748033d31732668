"""The memory of a key: the growth of the resident set of a fresh process.

The process is spawned, imports and opens the engine, and then checks every key twice. The growth
includes memory of Python and of C extensions, and the overhead of the allocator. The strings of the
keys are created before and not counted.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from bench.engines import Engine
from bench.measure import Scene, fill, keys_of, rate_of
from ratekeeper.core.model import AlgorithmName

_STATM: Final = Path("/proc/self/statm")


def bytes_per_key(engine: Engine, scene: Scene, algorithm: AlgorithmName) -> float | None:
    """Return the bytes per key of the scene, or None if the system does not report them."""
    if not _STATM.exists():
        return None
    # Spawned, not forked: the heap of a fork has free blocks that would hide the growth.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_growth, args=(sender, engine, scene, algorithm))
    child.start()
    sender.close()
    grown_bytes: int = receiver.recv()
    child.join()
    return grown_bytes / scene.keys


def _send_growth(
    sender: Connection, engine: Engine, scene: Scene, algorithm: AlgorithmName
) -> None:
    keys = keys_of(scene)
    session = engine.open(rate_of(scene, algorithm))
    session.check("user:warm-up")
    session.rest()
    before = _resident_bytes()
    fill(session, keys)
    sender.send(_resident_bytes() - before)
    session.close()


def _resident_bytes() -> int:
    gc.collect()
    resident_pages = int(_STATM.read_text().split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE")
