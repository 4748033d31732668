"""The last good rules on disk: complete, or rejected."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ratekeeper import Limit
from ratekeeper.control import snapshot
from ratekeeper.control.snapshot import EntrySnapshot, check_place, load, save
from ratekeeper.core.errors import ConfigError, StoreUnavailable
from ratekeeper.rules.document.model import Document, LimitsOfOne, Match, Override, Rule
from ratekeeper.rules.document.reading import read_file
from ratekeeper.rules.entries import EntryRow

EXAMPLE = Path(__file__).parents[2] / "examples/limits.yaml"

DOCUMENT = Document(
    rules=(
        Rule("orders", ("api_key",), (Limit(10, per=1),), Match(endpoint=("/v1/*",))),
        Rule("login", ("ip",), (Limit(5, per=60, algorithm="sliding_window_log"),)),
    ),
    tiers={"b": LimitsOfOne((Limit(1, per=1),)), "a": LimitsOfOne((Limit(2, per=1),))},
    deny=("api_key:sk_revoked_*", "user:naïve"),
    overrides=(
        Override("user", "42", multiply=2.0, until=datetime(2030, 1, 1, tzinfo=UTC), author="op"),
    ),
)

WRITER = """
import sys
from pathlib import Path
from ratekeeper import Limit
from ratekeeper.control.snapshot import save
from ratekeeper.rules.document.model import Document, Rule

path = Path(sys.argv[1])
number = int(sys.argv[2])
while True:
    number += 1
    rule = Rule(f"version-{number}", ("user",), (Limit(number, per=60),))
    filling = tuple(f"user:sk_{number}_{each}" for each in range(2_000))
    save(path, str(number), Document(rules=(rule,), deny=filling), "a source")
    print(number, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rules.snapshot"


def test_load_returns_the_saved_version(path: Path) -> None:
    """Its document, its version and its source are kept."""
    save(path, "12", DOCUMENT, "sqlite:///rules.db")
    found = load(path)
    assert found is not None
    assert found.document == DOCUMENT
    assert list(found.document.tiers) == ["b", "a"]
    assert (found.version, found.source) == ("12", "sqlite:///rules.db")
    assert datetime.now(UTC) - found.taken_at < timedelta(minutes=1)


def test_every_part_of_a_document_survives(path: Path) -> None:
    """The example document, which has every key, is loaded unchanged."""
    document = read_file(EXAMPLE)
    save(path, "1", document, "")
    found = load(path)
    assert found is not None
    assert found.document == document


def test_a_missing_snapshot_is_none(path: Path) -> None:
    """A first start is not an error."""
    assert load(path) is None


def test_save_replaces_the_previous_snapshot(path: Path) -> None:
    """It leaves no other file in the folder."""
    for version in ("1", "2"):
        save(path, version, DOCUMENT, "")
    found = load(path)
    assert found is not None
    assert found.version == "2"
    assert list(path.parent.iterdir()) == [path]


def test_only_the_owner_may_read_the_snapshot(path: Path) -> None:
    """It contains keys: its mode is 0600, whatever the umask."""
    before = os.umask(0)
    try:
        save(path, "1", DOCUMENT, "")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("cut", [0, 1, 10, 27, 28, 60, 130, -1])
def test_a_truncated_snapshot_is_rejected(path: Path, cut: int) -> None:
    """No part of a truncated snapshot is used."""
    save(path, "1", DOCUMENT, "")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ConfigError, match=r"rules\.snapshot' is not used: "):
        load(path)


def test_one_changed_byte_is_detected(path: Path) -> None:
    """A changed byte at any position makes the snapshot invalid."""
    save(path, "1", DOCUMENT, "")
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(ConfigError, match="is not used"):
            load(path)


def test_appended_bytes_are_detected(path: Path) -> None:
    """A file that is longer than its declared size is rejected."""
    save(path, "1", DOCUMENT, "")
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ConfigError, match=r"it declares 4\d\d bytes and has 4\d\d"):
        load(path)


def test_an_unknown_format_is_rejected(path: Path) -> None:
    """The error names the format of a file of a later release."""
    path.write_bytes(b"ratekeeper rules snapshot 2\nwhatever")
    with pytest.raises(ConfigError, match="its format is 2, and this release reads 1"):
        load(path)


def test_an_intact_text_that_is_not_a_document_is_rejected(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A correct checksum does not make the document valid."""
    monkeypatch.setattr(snapshot, "to_data", lambda document: {"version": 1, "rules": 7})
    save(path, "1", DOCUMENT, "")
    with pytest.raises(ConfigError, match="its text cannot be read"):
        load(path)


def test_a_snapshot_that_cannot_be_read_is_rejected(path: Path) -> None:
    """Only a missing file is not an error."""
    path.mkdir()
    with pytest.raises(ConfigError, match="it cannot be read: Is a directory"):
        load(path)


def test_a_failed_save_leaves_no_file(path: Path) -> None:
    """The error contains the message of the operating system."""
    path.mkdir()
    with pytest.raises(StoreUnavailable, match="cannot be written: Is a directory"):
        save(path, "1", DOCUMENT, "")
    assert list(path.parent.iterdir()) == [path]


def test_a_path_where_no_snapshot_can_be_written_is_rejected(tmp_path: Path) -> None:
    """The error is raised at the start, not when the snapshot is needed."""
    check_place(tmp_path / "rules.snapshot")
    for wrong in (tmp_path, tmp_path / "no" / "rules.snapshot"):
        with pytest.raises(ConfigError, match="is not a file in a folder that exists"):
            check_place(wrong)


def test_abandoned_temporary_files_are_removed(path: Path) -> None:
    """Files of killed writers do not accumulate; the file of a running writer stays."""
    old, new, other = (
        path.with_name(n) for n in (f".{path.name}.1.new", f".{path.name}.2.new", ".x")
    )
    for each in (old, new, other):
        each.write_text("half")
    for each in (old, other):
        os.utime(each, (0, 0))
    save(path, "1", DOCUMENT, "")
    assert sorted(path.parent.iterdir()) == sorted([path, new, other])


@pytest.mark.long
def test_a_killed_writer_leaves_a_complete_snapshot(path: Path) -> None:
    """After SIGKILL at any moment, the file holds the last saved version or the next."""
    chance = random.Random(5)
    last = 0
    for _ in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(last)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        with writer, suppress(subprocess.TimeoutExpired):
            saved = writer.stdout.readline()
            try:
                writer.wait(chance.uniform(0, 0.03))
            finally:
                writer.send_signal(signal.SIGKILL)
                saved = writer.stdout.read().rpartition("\n")[0].rpartition("\n")[2] or saved
        found = load(path)
        assert found is not None
        assert int(saved) <= int(found.version) <= int(saved) + 1
        assert found.document.rules[0].id == f"version-{found.version}"
        assert len(found.document.deny) == 2_000
        last = int(found.version)


# ── Entries ────────────────────────────────────────────────────────────────────────────────────

ROW = EntryRow("assignment", "user:42", "pro", 1, False)


def rows_of(path: Path) -> list[EntryRow]:
    return [row for rows, _ in EntrySnapshot(path).read() for row in rows]


def written(path: Path, blocks: int = 3) -> EntrySnapshot:
    """Return the snapshot of a first block and some changes."""
    made = EntrySnapshot(path)
    assert made.take()
    made.write([ROW], 1, whole=True)
    made.finish()
    for seq in range(2, blocks + 1):
        made.write([ROW._replace(seq=seq)], seq, whole=False)
    return made


def test_entries_and_their_changes_are_read_in_order(path: Path) -> None:
    """Another process goes on where the last one stopped, and only one writes at a time."""
    first = written(path)
    assert [row.seq for row in rows_of(path)] == [1, 2, 3]
    second = EntrySnapshot(path)
    assert not second.take()
    first.close()
    assert second.take()
    assert second.seq == 3
    second.write([ROW._replace(seq=4)], 4, whole=False)
    second.close()
    assert [row.seq for row in rows_of(path)] == [1, 2, 3, 4]


def test_no_snapshot_of_entries_is_no_entries(path: Path) -> None:
    """A snapshot of an older release has none."""
    assert rows_of(path) == []


def test_a_block_that_is_cut_off_is_ignored_and_overwritten(path: Path) -> None:
    """Wherever a writer was killed in it."""
    written(path).close()
    file = path.with_name(f"{path.name}.entries")
    whole = file.read_bytes()
    last = whole.rindex(b"rows ")
    for cut in range(last, len(whole)):
        file.write_bytes(whole[:cut])
        assert [row.seq for row in rows_of(path)] == [1, 2]
    again = EntrySnapshot(path)
    assert again.take()
    assert again.seq == 2
    again.write([ROW._replace(seq=3)], 3, whole=False)
    again.close()
    assert file.read_bytes() == whole


def test_a_new_file_that_is_abandoned_leaves_the_old_one(path: Path) -> None:
    """The next write begins with all entries, and not after the part that was written."""
    made = written(path)
    made.write([ROW._replace(seq=7)], 7, whole=True)
    made.abandon()
    assert made.seq == -1
    assert [row.seq for row in rows_of(path)] == [1, 2, 3]
    assert sorted(each.name for each in path.parent.glob(".*")) == []
    made.close()


def test_a_changed_byte_of_the_entries_is_detected(path: Path) -> None:
    """In every place: the snapshot is used as it was written, or not at all."""
    written(path).close()
    file = path.with_name(f"{path.name}.entries")
    whole = file.read_bytes()
    rows = rows_of(path)
    last = whole.rindex(b"rows ")
    for at in range(last):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            found = rows_of(path)
        except ConfigError:
            continue
        # A header may say that a block is longer than the file, or count other numbers.
        assert found == rows[: len(found)]


def test_a_long_journal_is_written_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the changes take more space than the entries."""
    monkeypatch.setattr(snapshot, "JOURNAL_BYTES_MIN", 0)
    made = written(path)
    assert made.seq == -1
    made.write([ROW._replace(seq=9)], 9, whole=True)
    assert [row.seq for row in rows_of(path)] == [1, 2, 3]
    made.finish()
    assert [row.seq for row in rows_of(path)] == [9]
    made.close()
    assert [each.name for each in path.parent.iterdir() if each.suffix == ".new"] == []
