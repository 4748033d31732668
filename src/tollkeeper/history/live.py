"""What the workers of a machine know of each other, in files: who asks most, and penalties.

As with the metrics, a question reaches one worker and is about all. So each leaves what it knows in
a file in the folder of this run, and whoever is asked adds up those of the living. A file is
replaced by a rename: whoever reads it sees all of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

# Two sketches and the penalties, 3,000 in all, each a subject of 512 characters and a rule's id.
FILE_BYTES_MAX: Final = 8 * 1024 * 1024
PENALTIES_MAX: Final = 1_000
SUFFIX: Final = ".live"


class Counted(msgspec.Struct):
    """A sketch: who has how much, what may be missed, and the sum."""

    counts: list[tuple[tuple[str, str], float]]
    missed: float
    total: float


class Standing(msgspec.Struct, frozen=True):
    """A cool-down or a block that is not over."""

    rule: str
    subject: str
    level: int
    seconds: int
    blocked: bool
    until_ns: int


class Known(msgspec.Struct):
    """What one worker leaves."""

    at_s: float
    """By the clock that counts from boot, which is the same for all of them."""
    checks: Counted
    denied: Counted
    penalties: list[Standing] = []


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Known).decode


class Live:
    """The files of a folder; `number` is that of this process."""

    def __init__(self, folder: Path, number: int | None = None) -> None:
        self._folder = folder
        self._number = os.getpid() if number is None else number

    def leave(self, known: Known) -> None:
        """Leave what this worker knows. Raises OSError."""
        path = self._folder / f"{self._number}{SUFFIX}"
        temporary = path.with_suffix(".leaving")
        temporary.write_bytes(_encode(known))
        temporary.replace(path)

    def others(self) -> Iterator[Known]:
        """What the other workers know that are alive; files of the dead are removed."""
        for path in self._folder.glob(f"*{SUFFIX}"):
            if not path.stem.isdigit() or int(path.stem) == self._number:
                continue
            with suppress(OSError, msgspec.DecodeError):
                if not _is_alive(int(path.stem)):
                    path.unlink()
                elif path.stat().st_size <= FILE_BYTES_MAX:
                    yield _decode(path.read_bytes())


def _is_alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
