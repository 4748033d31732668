"""The last good rules, on this machine's disk: for a start while the control plane is away.

    tollkeeper rules snapshot 1
    sha256 9f86d081… bytes 482
    {"version": "12", "source": "…", "taken_at": "…", "document": {…}}

A snapshot is whole or it is not used. It is written beside its place and moved there in one step,
when it is safe on disk; a process that is killed meanwhile leaves the one before. What was damaged
later is found by its size and checksum.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from tollkeeper.core.errors import ConfigError, StoreUnavailable, show
from tollkeeper.rules.document.model import Document
from tollkeeper.rules.document.reading import from_data
from tollkeeper.rules.document.writing import to_data

FORMAT: Final = 1
# Beyond what the largest document takes; what is longer is not read into memory.
BYTES_MAX: Final = 1 << 28
_TITLE: Final = "tollkeeper rules snapshot"
_HEAD: Final = re.compile(rb"tollkeeper rules snapshot ([0-9]{1,9})\n")
_SUM: Final = re.compile(rb"sha256 ([0-9a-f]{64}) bytes ([0-9]{1,12})\n")
_HEAD_BYTES_MAX: Final = 256
# A writer that was killed leaves its unfinished file; no writer takes this long.
_LEFT_OVER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A version of the rules, as some source had it."""

    version: str
    document: Document
    source: str
    taken_at: datetime


def check_place(path: Path) -> None:
    """Could there be a snapshot? Raises ConfigError where no one could ever be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(
            f"snapshot={show(str(path))} is not a file in a folder that exists; make the folder, "
            f'and name a file in it, for example snapshot="/var/lib/app/rules.snapshot"'
        )


def save(path: Path, version: str, document: Document, source: str) -> None:
    """Put a version in the snapshot's place, in one step, safe on disk; only we may read it.

    Raises StoreUnavailable; then the one before is still there.
    """
    body = {
        "version": version,
        "source": source,
        "taken_at": datetime.now(UTC).isoformat(),
        "document": to_data(document),
    }
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    head = f"{_TITLE} {FORMAT}\nsha256 {sha256(text).hexdigest()} bytes {len(text)}\n"
    try:
        _remove_left_over(path)
        _replace(path, head.encode() + text)
    except OSError as error:
        raise StoreUnavailable(
            f"the snapshot {show(str(path))} cannot be written: {error.strerror or error}"
        ) from error


def load(path: Path) -> Snapshot | None:
    """The snapshot, or None if there is none. Raises ConfigError if it is not whole."""
    try:
        with path.open("rb") as file:
            found = file.read(BYTES_MAX + _HEAD_BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refusal(path, f"it cannot be read: {error.strerror or error}") from error
    head = _HEAD.match(found)
    if head is None:
        raise _refusal(path, f"it does not begin with {_TITLE!r}")
    if int(head[1]) != FORMAT:
        raise _refusal(path, f"its format is {int(head[1])}, and this release reads {FORMAT}")
    return _opened(path, found, head.end())


def _opened(path: Path, found: bytes, start: int) -> Snapshot:
    summed = _SUM.match(found, start)
    if summed is None:
        raise _refusal(path, "its second line is not a checksum and a size")
    text = found[summed.end() :]
    if len(text) != int(summed[2]):
        raise _refusal(path, f"it says {int(summed[2]):,} bytes, and has {len(text):,}")
    if sha256(text).hexdigest().encode() != summed[1]:
        raise _refusal(path, "its checksum is not that of its text")
    try:
        body: dict[str, Any] = json.loads(text)
        return Snapshot(
            version=body["version"],
            document=from_data(body["document"], str(path)),
            source=body["source"],
            taken_at=datetime.fromisoformat(body["taken_at"]),
        )
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _refusal(path, f"its text is not what was written: {error}") from error


def _refusal(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"the snapshot {show(str(path))} is not used: {reason}; "
        f"the next version of the rules that arrives replaces it"
    )


def _replace(path: Path, data: bytes) -> None:
    # Of its own name, for the workers of one machine may share a snapshot.
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # The move itself: without it, a power cut may bring the old one back.
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove_left_over(path: Path) -> None:
    """Unfinished files of writers that were killed, so that they do not add up."""
    oldest = time.time() - _LEFT_OVER_S
    for other in path.parent.iterdir():
        if other.name.startswith(f".{path.name}.") and other.suffix == ".new":
            with suppress(OSError):
                if other.stat().st_mtime < oldest:
                    other.unlink()
