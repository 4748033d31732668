"""Where rules come from: files that people edit, databases, and hints that are only hints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from hashlib import sha256
from pathlib import Path

import pytest

from tollkeeper import open_store
from tollkeeper.control.sources import (
    JITTER,
    FileSource,
    RepositorySource,
    announce,
    jittered,
    source_of,
    without_secrets,
)
from tollkeeper.core.errors import ConfigError
from tollkeeper.rules.document.model import Document
from tollkeeper.rules.document.reading import DocumentError

HINT_SECONDS_MAX = 20.0


def text(*ids: str) -> str:
    """A document with a rule for each id, one to a line: every beginning of it is a document."""
    lines = [f"  - {{id: {name}, by: user, limits: 5/minute}}\n" for name in ids]
    return "".join(["version: 1\nrules:\n", *lines])


class Disk:
    """A document on disk, and what people do to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("one")

    def write(self, *ids: str) -> None:
        self.path.write_text(text(*ids))

    def rename_over(self, *ids: str) -> None:
        other = self.path.with_suffix(".new")
        other.write_text(text(*ids))
        other.rename(self.path)

    def remove(self) -> None:
        self.path.unlink()

    def version(self) -> str:
        return sha256(self.path.read_bytes()).hexdigest()[:12]


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "limits.yaml")


async def next_of(hints: AsyncGenerator[None, None]) -> None:
    async with asyncio.timeout(HINT_SECONDS_MAX):
        await anext(hints)


async def test_the_version_of_a_file_is_that_of_its_text(disk: Disk) -> None:
    """The same text has the same version on every machine."""
    found = await FileSource(disk.path).current("")
    assert found is not None
    assert [rule.id for rule in found.document.rules] == ["one"]
    assert found.version == disk.version()


async def test_a_file_with_the_same_text_is_no_new_version(disk: Disk) -> None:
    """Whatever its time and inode are: saving it again changes nothing."""
    source = FileSource(disk.path)
    found = await source.current("")
    assert found is not None
    assert await source.current(found.version) is None
    disk.remove()
    disk.write("one")
    assert await source.current(found.version) is None
    assert await source.current(found.version) is None


async def test_another_text_is_a_new_version(disk: Disk) -> None:
    """Written in place, or put in place by a rename, as editors do."""
    source = FileSource(disk.path)
    first = await source.current("")
    assert first is not None
    disk.write("two")
    second = await source.current(first.version)
    assert second is not None
    assert second.document.rules[0].id == "two"
    disk.rename_over("three")
    third = await source.current(second.version)
    assert third is not None
    assert third.document.rules[0].id == "three"


async def test_a_file_that_is_being_written_is_left_alone(disk: Disk) -> None:
    """Every piece of it would be a document; only the whole is taken."""
    source = FileSource(disk.path)
    first = await source.current("")
    assert first is not None
    ids = [f"rule-{number}" for number in range(10)]

    async def write() -> None:
        with disk.path.open("w") as file:
            file.write(text())
            for line in text(*ids).splitlines(keepends=True)[2:]:
                file.write(line)
                file.flush()
                await asyncio.sleep(0.03)

    writing = asyncio.create_task(write())
    await asyncio.sleep(0.01)
    found = await source.current(first.version)
    await writing
    assert found is not None
    assert [rule.id for rule in found.document.rules] == ids


async def test_a_wrong_file_is_refused_with_its_line(disk: Disk) -> None:
    """As it is for anyone who reads it."""
    source = FileSource(disk.path)
    found = await source.current("")
    assert found is not None
    disk.write("one", "one")
    with pytest.raises(DocumentError, match=r"limits\.yaml:4:"):
        await source.current(found.version)


async def test_a_file_that_is_gone_is_told(disk: Disk) -> None:
    """At the start and later."""
    disk.remove()
    for known in ("", "0123456789ab"):
        with pytest.raises(DocumentError, match="cannot be read: No such file"):
            await FileSource(disk.path).current(known)


async def test_a_change_of_a_file_is_a_hint(disk: Disk) -> None:
    """In place, by a rename, and when the file goes and comes back."""
    source = FileSource(disk.path)
    hints = source.hints()
    asking = asyncio.create_task(next_of(hints))
    await asyncio.sleep(0)  # it has looked at the file for the first time
    disk.write("two")
    await asking
    disk.rename_over("two")
    await next_of(hints)
    disk.remove()
    await next_of(hints)
    await hints.aclose()
    await source.close()


async def test_sqlite_gives_no_hints(tmp_path: Path) -> None:
    """Nobody would say: the hints end at once, and asking is left."""
    source = RepositorySource(f"sqlite:///{tmp_path}/rules.db")
    assert [hint async for hint in source.hints()] == []


async def test_a_database_without_rules_is_no_empty_document(tmp_path: Path) -> None:
    """Everything would be allowed, because of a wrong name in a URL."""
    source = RepositorySource(f"sqlite:///{tmp_path}/rules.db")
    with pytest.raises(ConfigError, match=r"rules\.db holds no rules yet; put a document there"):
        await source.current("")
    await source.close()


@pytest.mark.parametrize(
    ("rules", "kind"),
    [
        ("limits.yaml", FileSource),
        (Path("limits.yaml"), FileSource),
        ("sqlite:///rules.db", RepositorySource),
        ("postgresql://db/rules", RepositorySource),
        ("version: 1\nrules: []", type(None)),
        ({"version": 1}, type(None)),
        (Document(), type(None)),
        (7, type(None)),
    ],
)
def test_what_has_a_source(rules: object, kind: type) -> None:
    """Paths and databases have one; a text, data or a Document is at hand."""
    assert type(source_of(rules)) is kind


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:///rules.db", "sqlite:///rules.db"),
        ("postgresql://db:5432/rules", "postgresql://db:5432/rules"),
        ("postgresql://app:secret@db/rules", "postgresql://db/rules"),
        ("postgresql://app:se/cr@et?x@db/rules?password=secret", "postgresql://db/rules"),
    ],
)
def test_no_secret_is_shown(url: str, shown: str) -> None:
    """Neither a well-written one nor one that should have been escaped."""
    assert without_secrets(url) == shown
    assert RepositorySource(url).name == shown


def test_a_store_of_one_machine_announces_nothing() -> None:
    """It says so; the others find out by asking."""
    assert announce(open_store("memory://"), 7) is False


def test_periods_differ_by_a_fifth() -> None:
    """A fleet does not ask all at once, and nobody waits much longer than was said."""
    periods = {jittered(10) for _ in range(100)}
    assert len(periods) > 50
    assert 10 * (1 - JITTER) <= min(periods) < max(periods) <= 10 * (1 + JITTER)
