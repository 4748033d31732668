"""The last good rules on this machine's disk, for a start while the control plane is unavailable.

    tollkeeper rules snapshot 1
    sha256 9f86d081… bytes 482
    {"version": "12", "source": "…", "taken_at": "…", "document": {…}}

A snapshot is used only if it is complete. It is written to a temporary file, synced to disk, and
then renamed; a process that is killed in between leaves the previous snapshot. Later damage is
detected by its size and checksum.
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
# Larger than any valid document; a larger file is not read into memory.
BYTES_MAX: Final = 1 << 28
_TITLE: Final = "tollkeeper rules snapshot"
_HEAD: Final = re.compile(rb"tollkeeper rules snapshot ([0-9]{1,9})\n")
_SUM: Final = re.compile(rb"sha256 ([0-9a-f]{64}) bytes ([0-9]{1,12})\n")
_HEAD_BYTES_MAX: Final = 256
# A temporary file of this age belongs to a writer that was killed.
_ABANDONED_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class RulesSnapshot:
    """A version of the rules, as a source returned it."""

    version: str
    document: Document
    source: str
    taken_at: datetime


def check_place(path: Path) -> None:
    """Raise ConfigError if no snapshot could be written to this path."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(
            f"snapshot={show(str(path))} is not a file in a folder that exists; create the folder "
            f'and name a file in it, for example snapshot="/var/lib/app/rules.snapshot"'
        )


def save(path: Path, version: str, document: Document, source: str) -> None:
    """Replace the snapshot atomically and durably; only this user may read it.

    Raises StoreUnavailable; the previous snapshot is then unchanged.
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
        _remove_abandoned(path)
        _replace(path, head.encode() + text)
    except OSError as error:
        raise StoreUnavailable(
            f"the snapshot {show(str(path))} cannot be written: {error.strerror or error}"
        ) from error


def load(path: Path) -> RulesSnapshot | None:
    """Return the snapshot, or None if there is none. Raises ConfigError if it is damaged."""
    try:
        with path.open("rb") as file:
            found = file.read(BYTES_MAX + _HEAD_BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, f"it cannot be read: {error.strerror or error}") from error
    head = _HEAD.match(found)
    if head is None:
        raise _unusable(path, f"it does not begin with {_TITLE!r}")
    if int(head[1]) != FORMAT:
        raise _unusable(path, f"its format is {int(head[1])}, and this release reads {FORMAT}")
    return _decoded(path, found, head.end())


def _decoded(path: Path, found: bytes, start: int) -> RulesSnapshot:
    summed = _SUM.match(found, start)
    if summed is None:
        raise _unusable(path, "its second line is not a checksum and a size")
    text = found[summed.end() :]
    if len(text) != int(summed[2]):
        raise _unusable(path, f"it declares {int(summed[2]):,} bytes and has {len(text):,}")
    if sha256(text).hexdigest().encode() != summed[1]:
        raise _unusable(path, "its checksum does not match its text")
    try:
        body: dict[str, Any] = json.loads(text)
        return RulesSnapshot(
            version=body["version"],
            document=from_data(body["document"], str(path)),
            source=body["source"],
            taken_at=datetime.fromisoformat(body["taken_at"]),
        )
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _unusable(path, f"its text cannot be read: {error}") from error


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"the snapshot {show(str(path))} is not used: {reason}; "
        f"the next version of the rules that arrives replaces it"
    )


def _replace(path: Path, data: bytes) -> None:
    # A name of its own, because the workers of a machine may share a snapshot.
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
        # The rename itself: without it, a power cut may bring back the previous snapshot.
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary files of writers that were killed."""
    oldest = time.time() - _ABANDONED_S
    for other in path.parent.iterdir():
        if other.name.startswith(f".{path.name}.") and other.suffix == ".new":
            with suppress(OSError):
                if other.stat().st_mtime < oldest:
                    other.unlink()
