"""A limiter follows its rules: new versions come into force, and nothing else changes."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ratekeeper import AsyncLimiter, Limit, Limiter, Request, open_store
from ratekeeper.control import follow, snapshot
from ratekeeper.control.entries import FeedPage
from ratekeeper.control.follow import (
    JITTER,
    PAUSE_S_LONGEST,
    FileSource,
    RepositorySource,
    RetryPause,
    VersionedDocument,
    announce,
    source_of,
    without_secrets,
)
from ratekeeper.core.errors import ConfigError, StoreUnavailable
from ratekeeper.rules.document.model import Document, Rule
from ratekeeper.rules.document.reading import DocumentError
from ratekeeper.rules.entries import EntryRow
from tests.redis_servers.waiting import until

SECONDS_MAX = 20.0
NEVER_S = 3_600.0
REQUEST = Request(user="42")

FORKING = """
import os, sys, warnings
from pathlib import Path
from tests.redis_servers.waiting import until
from ratekeeper import Limiter, Request

# Python 3.12 and later warn every application that forks while a thread runs, as this one does
# on purpose. Anything else on stderr fails the test.
warnings.filterwarnings("ignore", r".*multi-threaded, use of fork\\(\\)", DeprecationWarning)
path = Path(sys.argv[1])
limiter = Limiter.from_rules(path, poll=0.1)
child = os.fork()
if child == 0:
    try:
        # The child follows, although it has started nothing itself.
        until(lambda: limiter.check(Request(user="42")).limit == 7, "the new limit", 15)
        assert limiter.rules_status().error == ""
        limiter.close()
    except BaseException as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)
path.write_text("version: 1\\nrules: [{id: all, by: user, limits: 7/minute}]")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def document(limit: int) -> Document:
    return Document(rules=(Rule("all", ("user",), (Limit(limit, per=60),)),))


def versioned(limit: int) -> VersionedDocument:
    """Return a version that is recognised by its limit."""
    return VersionedDocument(f"v{limit}", document(limit))


class ScriptedSource:
    """A source that returns the version that a test sets."""

    name = "scripted"

    def __init__(self, returns: VersionedDocument | Exception) -> None:
        self.returns = returns
        self.queries = 0
        self.hints_left = 0
        self.hints_fail = False
        self.closed = 0
        self.pages: list[FeedPage] = []

    async def current(self, known: str) -> VersionedDocument | None:
        self.queries += 1
        if isinstance(self.returns, Exception):
            raise self.returns
        return None if self.returns.version == known else self.returns

    async def changes_since(self, seq: int) -> AsyncGenerator[FeedPage, None]:
        newest = max((page.seq for page in self.pages), default=0)
        for page in self.pages:
            if page.seq > seq or (page.whole and seq > newest):
                yield page

    async def hints(self) -> AsyncGenerator[None, None]:
        while True:
            await asyncio.sleep(0.005)
            if self.hints_fail:
                raise StoreUnavailable("no subscription")
            if self.hints_left:
                self.hints_left -= 1
                yield

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> ScriptedSource:
    scripted = ScriptedSource(versioned(5))
    monkeypatch.setattr(follow, "source_of", lambda rules: scripted)
    # A failing source is retried at once: pauses are short here and long in production.
    monkeypatch.setattr(follow, "PAUSE_S_LONGEST", 0.02)
    return scripted


class Limiters:
    """Limiters that a test has created, closed at its end."""

    def __init__(self) -> None:
        self._limiters: list[Limiter] = []

    def __call__(self, rules: Any = "scripted", **options: Any) -> Limiter:
        limiter = Limiter.from_rules(rules, **{"poll": 0.05, **options})
        self._limiters.append(limiter)
        return limiter

    def close(self) -> None:
        for limiter in self._limiters:
            limiter.close()


@pytest.fixture
def opened() -> Iterator[Limiters]:
    limiters = Limiters()
    yield limiters
    limiters.close()


def in_force(limiter: Limiter) -> int:
    """Return the limit that a request meets, whatever the status reports."""
    return limiter.check(REQUEST).limit


def await_limit(limiter: Limiter, limit: int) -> None:
    until(
        lambda: in_force(limiter) == limit,
        f"a limit of {limit} is in force",
        SECONDS_MAX,
        limiter.rules_status,
    )


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("ratekeeper-rules")]


def test_a_new_version_comes_into_force(source: ScriptedSource, opened: Limiters) -> None:
    """Polling finds it without a hint, and the status reports it."""
    limiter = opened()
    first = limiter.rules_status()
    assert (first.version, first.source, first.origin) == ("v5", "scripted", "source")
    assert in_force(limiter) == 5
    source.returns = versioned(6)
    await_limit(limiter, 6)
    now = until(
        lambda: status if (status := limiter.rules_status()).since != first.since else None,
        "the status is updated",
        SECONDS_MAX,
    )
    assert (now.version, now.origin, now.error) == ("v6", "source", "")
    assert first.since is not None
    assert now.since is not None
    assert now.since > first.since
    assert now.age is not None
    assert 0 <= now.age < SECONDS_MAX


def test_a_hint_does_not_wait_for_the_next_poll(source: ScriptedSource, opened: Limiters) -> None:
    """With an hour between polls, a pushed change is in force at once."""
    limiter = opened(poll=NEVER_S)
    until(lambda: source.queries >= 2, "the follower runs", SECONDS_MAX)
    source.returns = versioned(6)
    source.hints_left = 1
    await_limit(limiter, 6)


def test_a_hundred_hints_cause_few_queries(source: ScriptedSource, opened: Limiters) -> None:
    """Hints that arrive during a query or a pause are combined."""
    opened(poll=NEVER_S)
    until(lambda: source.queries >= 2, "the follower runs", SECONDS_MAX)
    source.hints_left = 100
    until(lambda: source.hints_left == 0, "all hints were yielded", SECONDS_MAX)
    assert source.queries < 80


@pytest.mark.parametrize(
    "error", [StoreUnavailable("no connection"), RuntimeError("a bug"), OSError(5, "I/O error")]
)
def test_an_unavailable_source_changes_nothing(
    source: ScriptedSource, opened: Limiters, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it raises, the last good rules stay, and one warning is logged."""
    limiter = opened()
    with caplog.at_level(logging.WARNING, "ratekeeper.rules"):
        source.returns = error
        until(lambda: limiter.rules_status().error, "the error is reported", SECONDS_MAX)
        queries = source.queries
        until(
            lambda: source.queries > queries + 5,
            "the source is queried again",
            SECONDS_MAX,
        )
    assert limiter.rules_status().error == str(error)
    assert limiter.rules_status().failures >= 5
    assert in_force(limiter) == 5
    assert [record.message for record in caplog.records] == [
        f"rules: version v5 stays in force: {error}"
    ]
    source.returns = versioned(6)
    await_limit(limiter, 6)
    until(lambda: not limiter.rules_status().error, "the error is cleared", SECONDS_MAX)


def test_a_source_that_recovers_without_a_change_clears_the_error(
    source: ScriptedSource, opened: Limiters
) -> None:
    """The error is cleared, although there is no new version."""
    limiter = opened()
    source.returns = StoreUnavailable("no connection")
    until(lambda: limiter.rules_status().error, "the error is reported", SECONDS_MAX)
    source.returns = versioned(5)
    until(lambda: not limiter.rules_status().error, "the error is cleared", SECONDS_MAX)


def test_the_age_grows_while_the_source_is_unavailable(
    source: ScriptedSource, opened: Limiters
) -> None:
    """It counts from the last successful query, so an alert can use it."""
    limiter = opened()
    source.returns = StoreUnavailable("no connection")
    until(lambda: limiter.rules_status().error, "the error is reported", SECONDS_MAX)
    before = limiter.rules_status().age
    queries = source.queries
    until(lambda: source.queries > queries, "the source was queried once more", SECONDS_MAX)
    after = limiter.rules_status().age
    assert before is not None
    assert after is not None
    assert after > before


def test_rules_that_the_limiter_rejects_are_not_used(
    source: ScriptedSource, opened: Limiters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old document stays in force."""
    limiter = opened()

    def refuse(rules: object, version: str = "") -> None:
        raise ConfigError("not on this store")

    monkeypatch.setattr(limiter, "use", refuse)
    source.returns = versioned(6)
    until(lambda: limiter.rules_status().error, "the error is reported", SECONDS_MAX)
    assert limiter.rules_status().error == "not on this store"
    assert limiter.rules_status().version == "v5"
    assert in_force(limiter) == 5


def test_polling_continues_when_hints_fail(source: ScriptedSource, opened: Limiters) -> None:
    """The status reports a failed push apart from a failed source, and clears both."""
    source.hints_fail = True
    limiter = opened()
    until(lambda: limiter.rules_status().push_error, "the error is reported", SECONDS_MAX)
    assert limiter.rules_status().push_error == "no subscription"
    source.returns = versioned(6)
    await_limit(limiter, 6)
    assert limiter.rules_status().error == ""
    source.hints_fail = False
    source.hints_left = 1
    until(lambda: not limiter.rules_status().push_error, "push works again", SECONDS_MAX)


def test_closing_ends_the_thread(source: ScriptedSource) -> None:
    """The source is closed, too, and is not queried any more."""
    before = len(threads())
    limiter = Limiter.from_rules("scripted", poll=0.05)
    until(lambda: source.queries >= 2, "the follower runs", SECONDS_MAX)
    assert len(threads()) == before + 1
    closed = source.closed
    limiter.close()
    assert len(threads()) == before
    assert source.closed == closed + 1
    limiter.close()


def test_a_garbage_collected_limiter_ends_its_thread(source: ScriptedSource) -> None:
    """Closing a limiter is optional: the thread holds only a weak reference."""
    before = len(threads())
    limiter = Limiter.from_rules("scripted", poll=0.05)
    until(lambda: source.queries >= 2, "the follower runs", SECONDS_MAX)
    alive = weakref.ref(limiter)
    del limiter
    until(lambda: gc.collect() or alive() is None, "the limiter is gone", SECONDS_MAX)
    until(lambda: len(threads()) == before, "its thread is gone", SECONDS_MAX)


@pytest.mark.parametrize("sees_the_end_first", [False, True])
def test_a_source_is_closed_whatever_else_ends_its_limiter(
    source: ScriptedSource, monkeypatch: pytest.MonkeyPatch, sees_the_end_first: bool
) -> None:
    """A cancellation that comes late or twice does not interrupt it: connections would stay open.

    The follower is cancelled while it waits, or notices the end before it is cancelled.
    """

    async def wait_for_the_end(follower: follow.Follower) -> None:
        follower._stopped.wait(SECONDS_MAX)  # it blocks the loop, so no cancellation comes in

    if sees_the_end_first:
        monkeypatch.setattr(follow.Follower, "_wait", wait_for_the_end)
    limiter = Limiter.from_rules("scripted", poll=0.05)
    until(lambda: source.queries >= 2, "the follower runs", SECONDS_MAX)
    assert source.closed == 1  # after the first query, in another thread
    closing, release = threading.Event(), threading.Event()
    ended: list[bool] = []

    async def close_slowly() -> None:
        closing.set()
        ended.append(await asyncio.to_thread(release.wait, SECONDS_MAX))

    monkeypatch.setattr(source, "close", close_slowly)
    monkeypatch.setattr(follow, "STOP_S_MAX", 0.0)  # a busy machine
    limiter.close()
    assert closing.wait(SECONDS_MAX)
    limiter.close()
    alive = weakref.ref(limiter)
    del limiter
    until(lambda: gc.collect() or alive() is None, "the limiter is gone", SECONDS_MAX)
    release.set()
    until(lambda: ended, "the source is closed", SECONDS_MAX)


async def test_an_async_limiter_follows_its_rules(source: ScriptedSource) -> None:
    """The follower uses its own thread, not the event loop of the application."""
    async with AsyncLimiter.from_rules("scripted", poll=0.05) as limiter:
        source.returns = versioned(6)
        await asyncio.to_thread(
            until, lambda: limiter.rules_status().version == "v6", "v6 is in force", SECONDS_MAX
        )
        assert (await limiter.check(REQUEST)).limit == 6
    queries = source.queries
    await asyncio.sleep(0.1)
    assert source.queries == queries


def test_without_following_the_source_is_read_once(
    source: ScriptedSource, opened: Limiters
) -> None:
    """`follow=False` starts no thread."""
    before = threads()
    limiter = opened(follow=False)
    assert threads() == before
    assert source.queries == 1
    assert limiter.rules_status().origin == "source"


def test_a_given_document_is_not_followed(opened: Limiters) -> None:
    """A Document has no source, and its status reports that."""
    before = threads()
    limiter = opened(document(5))
    assert threads() == before
    status = limiter.rules_status()
    assert (status.version, status.source, status.origin, status.age) == ("", "", "given", None)
    limiter.use(document(6), "mine")
    assert limiter.rules_status().version == "mine"


def test_a_limiter_without_rules_has_no_status() -> None:
    """The error explains how to create a limiter with rules."""
    with pytest.raises(ConfigError, match="has limits, not rules"):
        Limiter("5/minute").rules_status()


@pytest.mark.parametrize("poll", [0, 0.01, 1e9, float("nan"), "1", None, True])
def test_an_invalid_poll_interval_is_rejected(poll: Any) -> None:
    """The error is raised before any rules are read."""
    with pytest.raises(ConfigError, match=r"is not a number of seconds from 0\.05 to 3600"):
        Limiter.from_rules("no such file", poll=poll)


def test_a_snapshot_is_kept_up_to_date(
    source: ScriptedSource, opened: Limiters, tmp_path: Path
) -> None:
    """It is saved at the start, and with every version that comes into force."""
    path = tmp_path / "rules.snapshot"
    opened(snapshot=path)
    kept = snapshot.load(path)
    assert kept is not None
    assert (kept.version, kept.source) == ("v5", "scripted")
    source.returns = versioned(6)
    until(lambda: "v6" in path.read_text(), "the snapshot is saved", SECONDS_MAX)
    kept = snapshot.load(path)
    assert kept is not None
    assert kept.document == document(6)


def test_a_start_while_the_source_is_unavailable(
    source: ScriptedSource, opened: Limiters, tmp_path: Path
) -> None:
    """The limiter uses the snapshot, reports that, and catches up with the source later."""
    path = tmp_path / "rules.snapshot"
    snapshot.save(path, "v5", document(5), "scripted")
    source.returns = StoreUnavailable("no connection")
    limiter = opened(snapshot=path)
    status = limiter.rules_status()
    assert (status.version, status.origin, status.age) == ("v5", "snapshot", None)
    assert status.error == "no connection"
    assert in_force(limiter) == 5
    source.returns = versioned(6)
    await_limit(limiter, 6)
    until(
        lambda: limiter.rules_status().origin == "source",
        "the status reports the source",
        SECONDS_MAX,
    )
    assert limiter.rules_status().error == ""


def test_the_source_overrules_a_snapshot_of_the_same_version(
    source: ScriptedSource, opened: Limiters, tmp_path: Path
) -> None:
    """The number is not enough: the document_text of the source counts."""
    path = tmp_path / "rules.snapshot"
    snapshot.save(path, "v6", document(5), "scripted")
    source.returns = StoreUnavailable("no connection")
    limiter = opened(snapshot=path)
    source.returns = versioned(6)
    await_limit(limiter, 6)


def test_a_start_without_source_and_snapshot_raises(source: ScriptedSource, tmp_path: Path) -> None:
    """The source's error is raised; there is no limiter that lets everything pass."""
    source.returns = StoreUnavailable("no connection")
    for path in (None, tmp_path / "rules.snapshot"):
        with pytest.raises(StoreUnavailable, match="no connection"):
            Limiter.from_rules("scripted", snapshot=path)


def test_a_damaged_snapshot_is_not_used(source: ScriptedSource, tmp_path: Path) -> None:
    """The source's error is raised, with a note that says why the snapshot cannot be used."""
    path = tmp_path / "rules.snapshot"
    snapshot.save(path, "v5", document(5), "scripted")
    path.write_bytes(path.read_bytes()[:-5])
    source.returns = StoreUnavailable("no connection")
    with pytest.raises(StoreUnavailable, match="no connection") as caught:
        Limiter.from_rules("scripted", snapshot=path)
    assert "is not used: it declares" in caught.value.__notes__[0]


def test_a_damaged_snapshot_is_replaced(
    source: ScriptedSource, opened: Limiters, tmp_path: Path
) -> None:
    """The next version from the source overwrites it."""
    path = tmp_path / "rules.snapshot"
    path.write_text("damaged")
    opened(snapshot=path)
    assert snapshot.load(path) is not None


def test_the_status_reports_a_snapshot_that_cannot_be_written(
    source: ScriptedSource, opened: Limiters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, the rules still come into force, and saving is retried."""
    path = tmp_path / "rules.snapshot"
    limiter = opened(snapshot=path)
    save = snapshot.save

    def fail(*args: Any) -> None:
        raise StoreUnavailable("the snapshot cannot be written: No space left")

    monkeypatch.setattr(snapshot, "save", fail)
    source.returns = versioned(6)
    await_limit(limiter, 6)
    until(lambda: "No space" in limiter.rules_status().error, "the error is reported", SECONDS_MAX)
    monkeypatch.setattr(snapshot, "save", save)
    until(lambda: "v6" in path.read_text(), "the snapshot is saved", SECONDS_MAX)
    until(lambda: not limiter.rules_status().error, "the error is cleared", SECONDS_MAX)


def test_the_path_of_the_snapshot_is_checked_first(source: ScriptedSource, tmp_path: Path) -> None:
    """A missing folder is an error at the start, not on the day the snapshot is needed."""
    with pytest.raises(ConfigError, match="folder that exists"):
        Limiter.from_rules("scripted", snapshot=tmp_path / "no" / "rules.snapshot")
    assert source.queries == 0


def test_pauses_grow_to_a_bound() -> None:
    """Each node retries every few seconds, at a different time."""
    pause = RetryPause()
    pauses = [pause.next_s() for _ in range(20)]
    assert pauses[0] <= 0.1
    assert all(PAUSE_S_LONGEST / 2 <= each <= PAUSE_S_LONGEST for each in pauses[-10:])
    assert len(set(pauses[-10:])) > 5
    pause.reset()
    assert pause.next_s() <= 0.1


def test_a_forked_worker_follows_too(tmp_path: Path) -> None:
    """The workers of a server that loads the application and then forks see changes."""
    path = tmp_path / "limits.yaml"
    path.write_text("version: 1\nrules: [{id: all, by: user, limits: 5/minute}]")
    ran = subprocess.run(
        [sys.executable, "-c", FORKING, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


# ── Sources ────────────────────────────────────────────────────────────────────────────────────

HINT_SECONDS_MAX = 20.0


def document_text(*ids: str) -> str:
    """Return a document with one rule per line; every beginning of it is a valid document."""
    lines = [f"  - {{id: {name}, by: user, limits: 5/minute}}\n" for name in ids]
    return "".join(["version: 1\nrules:\n", *lines])


class DocumentFile:
    """A document on disk, and the ways in which programs write it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("one")

    def write(self, *ids: str) -> None:
        self.path.write_text(document_text(*ids))

    def rename_over(self, *ids: str) -> None:
        other = self.path.with_suffix(".new")
        other.write_text(document_text(*ids))
        other.rename(self.path)

    def remove(self) -> None:
        self.path.unlink()

    def version(self) -> str:
        return sha256(self.path.read_bytes()).hexdigest()[:12]


@pytest.fixture
def disk(tmp_path: Path) -> DocumentFile:
    return DocumentFile(tmp_path / "limits.yaml")


async def next_of(hints: AsyncGenerator[None, None]) -> None:
    async with asyncio.timeout(HINT_SECONDS_MAX):
        await anext(hints)


async def test_the_version_of_a_file_is_its_digest(disk: DocumentFile) -> None:
    """The same text has the same version on every machine."""
    versioned = await FileSource(disk.path).current("")
    assert versioned is not None
    assert [rule.id for rule in versioned.document.rules] == ["one"]
    assert versioned.version == disk.version()


async def test_saving_the_same_text_is_no_new_version(disk: DocumentFile) -> None:
    """Its time and inode do not matter."""
    source = FileSource(disk.path)
    versioned = await source.current("")
    assert versioned is not None
    assert await source.current(versioned.version) is None
    disk.remove()
    disk.write("one")
    assert await source.current(versioned.version) is None
    assert await source.current(versioned.version) is None


async def test_a_different_text_is_a_new_version(disk: DocumentFile) -> None:
    """Whether a program writes the file in place or renames another file over it."""
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


async def test_a_file_is_read_after_its_writer_has_finished(disk: DocumentFile) -> None:
    """Each part of it would be a valid document; only the whole is used."""
    source = FileSource(disk.path)
    first = await source.current("")
    assert first is not None
    ids = [f"rule-{number}" for number in range(10)]

    async def write() -> None:
        with disk.path.open("w") as file:
            file.write(document_text())
            for line in document_text(*ids).splitlines(keepends=True)[2:]:
                file.write(line)
                file.flush()
                await asyncio.sleep(0.03)

    writing = asyncio.create_task(write())
    await asyncio.sleep(0.01)
    versioned = await source.current(first.version)
    await writing
    assert versioned is not None
    assert [rule.id for rule in versioned.document.rules] == ids


async def test_an_invalid_file_is_rejected_with_its_line(disk: DocumentFile) -> None:
    """The error names the file and the line."""
    source = FileSource(disk.path)
    versioned = await source.current("")
    assert versioned is not None
    disk.write("one", "one")
    with pytest.raises(DocumentError, match=r"limits\.yaml:4:"):
        await source.current(versioned.version)


async def test_a_missing_file_raises(disk: DocumentFile) -> None:
    """This holds at the start and later."""
    disk.remove()
    for known in ("", "0123456789ab"):
        with pytest.raises(DocumentError, match="cannot be read: No such file"):
            await FileSource(disk.path).current(known)


async def test_a_changed_file_is_a_hint(disk: DocumentFile) -> None:
    """A hint follows a write in place, a rename, and a removal."""
    source = FileSource(disk.path)
    hints = source.hints()
    waiting = asyncio.create_task(next_of(hints))
    await asyncio.sleep(0)  # until it has looked at the file for the first time
    disk.write("two")
    await waiting
    disk.rename_over("two")
    await next_of(hints)
    disk.remove()
    await next_of(hints)
    await hints.aclose()
    await source.close()


async def test_sqlite_gives_no_hints(tmp_path: Path) -> None:
    """The hints end at once; the follower polls."""
    source = RepositorySource(f"sqlite:///{tmp_path}/rules.db")
    assert [hint async for hint in source.hints()] == []


async def test_a_database_without_rules_is_an_error(tmp_path: Path) -> None:
    """An empty document would allow everything, because of a wrong name in a URL."""
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
def test_paths_and_database_urls_have_a_source(rules: object, kind: type) -> None:
    """A text, data and a Document have no source."""
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
def test_names_of_sources_contain_no_secret(url: str, shown: str) -> None:
    """It has neither an escaped password nor one that should have been escaped."""
    assert without_secrets(url) == shown
    assert RepositorySource(url).name == shown


def test_a_store_without_a_channel_announces_nothing() -> None:
    """`announce` returns False; the nodes find the version by polling."""
    assert announce(open_store("memory://"), 7) is False


def test_poll_intervals_differ_by_a_fifth() -> None:
    """The nodes of a fleet therefore do not poll at the same time."""
    periods = {follow._jittered(10) for _ in range(100)}
    assert len(periods) > 50
    assert 10 * (1 - JITTER) <= min(periods) < max(periods) <= 10 * (1 + JITTER)


# ── Entries ────────────────────────────────────────────────────────────────────────────────────

DENY_42 = EntryRow("deny", "user:42", "user:42", 1, False)


def denied(limiter: Limiter) -> bool:
    return limiter.evaluate(REQUEST).kind == "blocked"


def test_changes_of_entries_come_into_force(source: ScriptedSource, opened: Limiters) -> None:
    """Those at the start, those since, and a removal; the rules are not compiled again."""
    source.pages = [FeedPage([DENY_42], 1, True)]
    limiter = opened()
    assert denied(limiter)
    table = limiter.compiled_rules.table
    source.pages.append(FeedPage([DENY_42._replace(seq=2, removed=True)], 2, False))
    until(lambda: not denied(limiter), "the removal", SECONDS_MAX)
    assert limiter.compiled_rules.table is table


def test_a_reader_that_missed_too_much_reads_all_again(
    source: ScriptedSource, opened: Limiters
) -> None:
    """Entries that are no longer there are forgotten, although no change says so."""
    source.pages = [FeedPage([DENY_42], 1, True)]
    limiter = opened()
    source.pages = [FeedPage([DENY_42._replace(key="user:7")], 9, True)]
    until(lambda: not denied(limiter), "the reload", SECONDS_MAX)
    assert limiter.evaluate(Request(user="7")).kind == "blocked"
    # A database that was restored from a backup has not reached the number that is known.
    source.pages = [FeedPage([DENY_42], 3, True)]
    until(lambda: denied(limiter), "the restored entries", SECONDS_MAX)


def test_an_entry_that_cannot_be_used_does_not_stop_the_others(
    source: ScriptedSource, opened: Limiters, caplog: pytest.LogCaptureFixture
) -> None:
    """A newer Ratekeeper may have written it."""
    bad = EntryRow("override", "x", "{}", 1, False)
    source.pages = [FeedPage([bad, DENY_42._replace(seq=2)], 2, True)]
    with caplog.at_level(logging.ERROR, "ratekeeper.rules"):
        assert denied(opened())
    assert "the override 'x' is ignored" in caplog.text


def test_entries_survive_in_the_snapshot(
    source: ScriptedSource, opened: Limiters, tmp_path: Path
) -> None:
    """A node that starts while the source is unavailable has them, and the changes since."""
    path = tmp_path / "rules.snapshot"
    source.pages = [FeedPage([DENY_42], 1, True)]
    limiter = opened(snapshot=path)
    source.pages.append(FeedPage([DENY_42._replace(key="user:7", seq=2)], 2, False))
    file = path.with_name("rules.snapshot.entries")
    until(lambda: file.exists() and b"user:7" in file.read_bytes(), "the change", SECONDS_MAX)
    limiter.close()
    source.returns = StoreUnavailable("away")
    limiter = opened(snapshot=path)
    assert limiter.rules_status().origin == "snapshot"
    assert denied(limiter)
    assert limiter.evaluate(Request(user="7")).kind == "blocked"
    # The source is back without the first entry.
    source.returns = versioned(5)
    source.pages = [FeedPage([DENY_42._replace(key="user:7", seq=4)], 4, True)]
    until(lambda: not denied(limiter), "the source", SECONDS_MAX)


def test_expired_overrides_leave_the_memory(
    source: ScriptedSource, opened: Limiters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some time after their end."""
    data = '{"for":{"user":"42"},"multiply":2,"until":"2020-01-01T00:00:00Z","reason":"r"}'
    source.pages = [FeedPage([EntryRow("override", "old", data, 1, False)], 1, True)]
    monkeypatch.setattr(follow, "SWEEP_S", 0.0)
    limiter = opened()
    until(lambda: not limiter.compiled_rules.entries.overrides, "the sweep", SECONDS_MAX)
