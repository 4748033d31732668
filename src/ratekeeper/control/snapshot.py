"""The last good rules on this machine's disk, for a start while the control plane is unavailable.

    ratekeeper rules snapshot 1
    sha256 9f86d081… bytes 482
    {"version": "12", "source": "…", "taken_at": "…", "document": {…}}

A snapshot is used only if it is complete. It is written to a temporary file, synced to disk, and
then renamed; a process that is killed in between leaves the previous snapshot. Later damage is
detected by its size and checksum.

**Entries** are in a second file beside it, `….entries`, because there may be a million of them and
one changes at a time:

    ratekeeper entries snapshot 1
    rows 10000 seq 10000 bytes 482133 crc32 8f41b2c0
    [["assignment","user:42","pro",1,false], …]
    rows 1 seq 10001 bytes 43 crc32 19ac01d3
    …

It holds all entries as they were once, and after them the changes since, in blocks. A block that
was not written to its end (the process was killed) is ignored, and overwritten by the next one. The
file is written anew when the changes take more space than the entries. One process of a machine
writes it: the one that holds the lock of `….entries.lock`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from ratekeeper.core.errors import ConfigError, StoreUnavailable, show
from ratekeeper.rules.document.grammar import to_data
from ratekeeper.rules.document.model import Document
from ratekeeper.rules.document.reading import from_data
from ratekeeper.rules.entries import EntryRow, RowFields

FORMAT: Final = 1
# Larger than any valid document; a larger file is not read into memory.
BYTES_MAX: Final = 1 << 28
_TITLE: Final = "ratekeeper rules snapshot"
_HEAD: Final = re.compile(rb"ratekeeper rules snapshot ([0-9]{1,9})\n")
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


# ── Entries ────────────────────────────────────────────────────────────────────────────────────

_ENTRIES_HEAD: Final = b"ratekeeper entries snapshot 1\n"
_BLOCK: Final = re.compile(
    rb"rows ([0-9]{1,9}) seq ([0-9]{1,19}) bytes ([0-9]{1,12}) crc32 ([0-9a-f]{8})\n"
)
_BLOCK_HEAD_MAX: Final = 100
# Changes may take this much space beyond that of the entries before the file is written anew.
JOURNAL_BYTES_MIN: Final = 1 << 20


class _Block(NamedTuple):
    """A block of rows in the file: where its rows begin and end."""

    start: int
    end: int
    seq: int
    checksum: int


class EntrySnapshot:
    """The entries on this machine's disk: all of them, and the changes since."""

    def __init__(self, rules_path: Path) -> None:
        """Use the file beside the snapshot of the rules. Nothing is opened yet."""
        self._path = rules_path.with_name(f"{rules_path.name}.entries")
        self._lock: int | None = None
        self._new: tuple[IO[bytes], Path] | None = None
        self._base_bytes = self._bytes = 0
        self.seq = -1
        """The number of the last change in the file; -1 if the file has to be written whole."""

    def read(self) -> Iterator[tuple[list[EntryRow], int]]:
        """Yield the rows of each block with the number of its last change.

        Raises ConfigError if the file is damaged. A block at its end that is not whole is ignored.
        """
        try:
            with self._path.open("rb") as file:
                for block in _blocks(file, self._path):
                    file.seek(block.start)
                    text = file.read(block.end - block.start)
                    if _checksum(text, block.seq) != block.checksum:
                        raise _unusable(self._path, "the checksum of a block does not match it")
                    yield [EntryRow(*row) for row in json.loads(text)], block.seq
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unusable(self._path, f"it cannot be read: {error.strerror or error}") from error

    def take(self) -> bool:
        """Return True if this process writes the file; False if another one does."""
        if self._lock is None:
            lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                return False
            self._lock = lock
            self._find_end()
        return True

    def _find_end(self) -> None:
        """Find the last change in the file, and cut off a block that is not whole."""
        self.seq, self._base_bytes, self._bytes = -1, 0, 0
        with suppress(OSError, ConfigError), self._path.open("r+b") as file:
            for block in _blocks(file, self._path):
                self.seq, self._bytes = block.seq, block.end + 1
            self._base_bytes = self._bytes
            file.truncate(self._bytes)

    def write(self, rows: Sequence[RowFields], seq: int, *, whole: bool) -> None:
        """Add a block. The first of `whole` blocks begins a new file; `finish` puts it in place."""
        text = json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()
        head = f"rows {len(rows)} seq {seq} bytes {len(text)} crc32 {_checksum(text, seq):08x}\n"
        block = head.encode() + text + b"\n"
        if whole and self._new is None:
            self._new = self._begin()
        if self._new is not None:
            self._new[0].write(block)
        else:
            with self._path.open("r+b") as file:
                file.seek(self._bytes)
                file.write(block)
            self._bytes += len(block)
            if self._bytes > 2 * self._base_bytes + JOURNAL_BYTES_MIN:
                self.seq = -1
                return
        self.seq = seq

    def _begin(self) -> tuple[IO[bytes], Path]:
        _remove_abandoned(self._path)
        path = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.new")
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        file.write(_ENTRIES_HEAD)
        return file, path

    def finish(self) -> None:
        """Put a new file in place, after all its blocks."""
        if self._new is None:
            return
        (file, path), self._new = self._new, None
        with file:
            file.flush()
            os.fsync(file.fileno())
            self._base_bytes = self._bytes = file.tell()
        path.replace(self._path)

    def abandon(self) -> None:
        """Remove a new file that is not finished; the next write begins with all entries."""
        if self._new is None:
            return
        (file, path), self._new = self._new, None
        self.seq = -1
        with suppress(OSError):  # the disk may be full
            path.unlink()
            file.close()

    def close(self) -> None:
        """Stop writing: another process may begin. A new file that is not finished is removed."""
        self.abandon()
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None
        self.seq = -1


def _checksum(text: bytes, seq: int) -> int:
    return zlib.crc32(text, zlib.crc32(str(seq).encode()))


def _blocks(file: IO[bytes], path: Path) -> Iterable[_Block]:
    """Yield the blocks of a file, without reading their rows."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    if file.read(len(_ENTRIES_HEAD)) != _ENTRIES_HEAD:
        raise _unusable(path, "its first line is not that of a snapshot of entries")
    at = len(_ENTRIES_HEAD)
    while at < size:
        file.seek(at)
        line = file.readline(_BLOCK_HEAD_MAX)
        found = _BLOCK.fullmatch(line)
        if found is None:
            if line.endswith(b"\n"):
                raise _unusable(path, f"there is no block at byte {at:,}")
            return
        start = at + len(line)
        end = start + int(found[3])
        if end >= size:
            return
        yield _Block(start, end, int(found[2]), int(found[4], 16))
        at = end + 1
