"""Keep a limiter's rules up to date: a change is in force on every node in under two seconds.

**Sources and hints.** A *source* (a file, a database) returns the current version of the rules, and
only its answer counts. A *hint* says that the source may have changed: a file that looks different,
a NOTIFY of PostgreSQL, a message through Redis. Hints may be lost, repeated or late, so the
follower also polls its source.

**The follower** is one thread beside the application. It queries its source after every hint, and
every `poll` seconds in any case. A new version comes into force in one step and is saved to the
snapshot, if the limiter has one. If the source is unavailable or its document is invalid, the last
good rules stay in force, `status` reports the error, and the follower retries at growing intervals.

**Entries** beside the document (assignments, overrides, lists) have their own numbers. The follower
reads the changes since the last number that it knows and applies them to the limiter's table, in
place. A follower that has missed too much reads all of them into a new table.

The follower never raises into the application, and no check waits for it.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

from ratekeeper.control import snapshot as snapshots
from ratekeeper.core import forks
from ratekeeper.core.chance import RANDOM
from ratekeeper.core.errors import ConfigError, RatekeeperError, StoreError, StoreTimeout, show
from ratekeeper.decide.store import Channel, Store, Subscription, shared_store
from ratekeeper.rules.document.model import Document, Rules
from ratekeeper.rules.document.reading import (
    document_of,
    is_document_text,
    read,
    read_file,
)
from ratekeeper.rules.entry_table import EntryTable

if TYPE_CHECKING:
    from ratekeeper.control.entries import FeedPage
    from ratekeeper.control.repository import Repository

# Not the shared generator: an application that seeds it gets the same numbers, whatever our
# background threads draw meanwhile.

POLL_S_MIN: Final = 0.05
POLL_S_MAX: Final = 3600.0
# One query of a source, with connecting and a document of 10,000 rules.
QUERY_S_MAX: Final = 30.0
# Reading all entries.
ENTRIES_S_MAX: Final = 120.0
# Expired overrides are removed from memory this often; until then, checks skip them.
SWEEP_S: Final = 600.0
# The pause after a failure doubles from the first to the longest.
PAUSE_S_FIRST: Final = 0.1
PAUSE_S_LONGEST: Final = 5.0
# Nodes that get a hint at the same moment query the source at different moments.
HINT_SPREAD_S: Final = 0.1
# A forked worker starts to follow after a random time between these.
FORKED_S_MIN: Final = 0.05
FORKED_S_MAX: Final = 0.5
# Closing a limiter waits this long for the thread; it is a daemon thread and may end later.
STOP_S_MAX: Final = 2.0
FILE_POLL_S: Final = 0.25
# A file is read after it has looked the same for this long: a writer may not be finished.
FILE_SETTLED_S: Final = 0.2
# Nodes poll at different times: each period is up to a fifth shorter or longer.
JITTER: Final = 0.2
TOPIC: Final = "rules"
# The thread that waits for Redis notices after this time that the follower has stopped.
_REDIS_WAIT_S: Final = 0.25
_VERSION_CHARACTERS: Final = 12

# Inode, time of the last change and size: at least one differs after a file was written.
_FileState = tuple[int, int, int]

log = logging.getLogger("ratekeeper.rules")


# ── Sources ────────────────────────────────────────────────────────────────────────────────────


class VersionedDocument(NamedTuple):
    """A rule document and the version that its source gives it."""

    version: str
    document: Document


class RulesSource(Protocol):
    """A place that rules are read from. All its methods are called in one event loop."""

    name: str
    """The name for messages, without secrets."""

    async def current(self, known: str) -> VersionedDocument | None:
        """Return the current version, or None if that is `known`. Raises RatekeeperError."""

    def changes_since(self, seq: int) -> AsyncGenerator[FeedPage, None]:
        """Yield the entries that have changed since; all of them if `seq` is 0 or too old."""

    def hints(self) -> AsyncGenerator[None, None]:
        """Yield whenever something may have changed. It ends at once if the source cannot push."""

    async def close(self) -> None:
        """Close all connections; the next call opens new ones."""


class FileSource:
    """A document on disk. Its version is the beginning of its text's SHA-256.

    A program may replace the file by a rename, as most editors do, or write it in place. A file
    that is written in place may look finished while its writer pauses at the end of a line: use a
    rename if that matters.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._taken: tuple[_FileState | None, str] = None, ""

    async def current(self, known: str) -> VersionedDocument | None:
        """Read the file if it looks different; parse it if its text has changed."""
        settled = not known  # the first read does not wait
        while True:
            state = self._state()
            if state is not None and (state, known) == self._taken:
                return None
            version = self._version()
            if version and version == known:
                self._taken = state, known
                return None
            if not settled:
                await asyncio.sleep(FILE_SETTLED_S)
            settled = False
            if (state, version) != (self._state(), self._version()):
                continue
            document = read_file(self._path)
            if (state, version) == (self._state(), self._version()):
                self._taken = state, version
                return VersionedDocument(version, document)

    async def changes_since(self, seq: int) -> AsyncGenerator[FeedPage, None]:  # noqa: ARG002 - none
        """Yield nothing: the document in a file contains its entries."""
        nothing: tuple[FeedPage, ...] = ()
        for page in nothing:
            yield page

    async def hints(self) -> AsyncGenerator[None, None]:
        """Look at the file four times a second, and yield when it looks different."""
        seen = self._state()
        while True:
            await asyncio.sleep(_jittered(FILE_POLL_S))
            state = self._state()
            if state != seen:
                seen = state
                yield

    async def close(self) -> None:
        """Do nothing: no file stays open."""

    def _state(self) -> _FileState | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _version(self) -> str:
        try:
            text = self._path.read_bytes()
        except OSError:
            return ""  # read_file raises an error that names the cause and the remedy
        return sha256(text).hexdigest()[:_VERSION_CHARACTERS]


class RepositorySource:
    """The rules in a database. Their version is its number."""

    def __init__(self, url: str) -> None:
        self.name = without_secrets(url)
        self._url = url
        self._repository: Repository | None = None
        self._opening = asyncio.Lock()

    async def current(self, known: str) -> VersionedDocument | None:
        """Query the number, and the text only if the number has changed."""
        try:
            repository = await self._opened()
            number = await repository.number()
            if number and str(number) == known:
                return None
            version = await repository.current()
        except StoreError:
            # The connections may be broken.
            await self.close()
            raise
        if version is None:
            raise ConfigError(
                f"{self.name} holds no rules yet; put a document there first: "
                f"ratekeeper rules apply limits.yaml"
            )
        document = read(version.text, f"version {version.number}")
        return VersionedDocument(str(version.number), document)

    async def changes_since(self, seq: int) -> AsyncGenerator[FeedPage, None]:
        """Yield the entries that have changed. Without a change, it reads one row."""
        try:
            repository = await self._opened()
            async with aclosing(repository.entries.changes_since(seq)) as pages:
                async for page in pages:
                    yield page
        except StoreError:
            await self.close()
            raise

    async def hints(self) -> AsyncGenerator[None, None]:
        """Yield when PostgreSQL reports a change; SQLite cannot push."""
        if self._url.startswith("sqlite"):
            return
        repository = await self._opened()
        async for _ in repository.listen():
            yield

    async def close(self) -> None:
        """Close the database."""
        repository, self._repository = self._repository, None
        if repository is not None:
            with suppress(Exception):  # it is abandoned, whatever its state
                await repository.close()

    async def _opened(self) -> Repository:
        async with self._opening:
            if self._repository is None:
                try:
                    from ratekeeper.control.repository import (  # noqa: PLC0415 - an extra
                        Repository,
                    )
                except ImportError as error:
                    raise ConfigError(
                        f"rules in a database need the libraries of the control extra ({error}); "
                        f"install them with: pip install 'ratekeeper[control,postgres]'"
                    ) from error
                self._repository = await Repository.open(self._url)
            return self._repository


class StoreHints:
    """Messages through the store that also holds the counts; by default those of `announce`."""

    def __init__(self, channel: Channel, topic: str = TOPIC) -> None:
        self._channel = channel
        self._topic = topic

    async def hints(self) -> AsyncGenerator[str, None]:
        """Yield the text of each message, and "" first. Raises StoreError if it is cut off."""
        loop = asyncio.get_running_loop()
        # One thread that waits in short steps, so that it ends soon after the follower.
        thread = ThreadPoolExecutor(1, "ratekeeper-rules-redis")
        try:
            subscription = await loop.run_in_executor(thread, self._subscribe)
            try:
                # A message may have been published before the subscription.
                yield ""
                while True:
                    text = await loop.run_in_executor(thread, subscription.wait, _REDIS_WAIT_S)
                    if text is not None:
                        yield text
            finally:
                with suppress(RuntimeError):  # the interpreter is shutting down
                    thread.submit(subscription.close)
        finally:
            thread.shutdown(wait=False)

    def _subscribe(self) -> Subscription:
        # redis-py imports modules when it connects.
        with forks.gate:
            return self._channel.subscribe(self._topic)


def announce(store: Store, number: int) -> bool:
    """Announce a new version to all nodes that use this store; False if it has no channel.

    Blocks for one round trip. Raises StoreError; the nodes then find the version by polling.
    """
    shared = shared_store(store)
    if shared is None:
        return False
    shared.channel.publish(TOPIC, str(number))
    return True


def source_of(rules: object) -> RulesSource | None:
    """Return the source that a path or a database URL names; None for a document or its text."""
    if isinstance(rules, str):
        if is_document_text(rules):
            return None
        if "://" in rules:
            return RepositorySource(rules)
    elif not isinstance(rules, os.PathLike):
        return None
    return FileSource(Path(rules))


def without_secrets(url: str) -> str:
    """Return a database URL for messages, without user, password and options.

    >>> without_secrets("postgresql://app:s3cr@t@db.internal/rules?sslmode=require")
    'postgresql://db.internal/rules'
    """
    scheme, _, rest = url.partition("://")
    place = rest.rpartition("@")[2].partition("?")[0]
    return f"{scheme}://{place}"


def _jittered(period_s: float) -> float:
    return period_s * RANDOM.uniform(1 - JITTER, 1 + JITTER)


# ── The first version ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RulesStatus:
    """Which rules are in force, and how fresh they are."""

    version: str
    """A repository's number, or the beginning of a file's SHA-256; empty for a given document."""
    source: str
    """The path or database URL that is followed, without secrets; empty if there is none."""
    origin: Literal["source", "snapshot", "given"] = "given"
    """Where this version came from: the source, its snapshot, or the application."""
    since: datetime | None = None
    """When it came into force in this process."""
    age: float | None = None
    """Seconds since the source last answered; None if it never did."""
    error: str = ""
    """The present error of the source or the snapshot; empty if there is none."""
    push_error: str = ""
    """Why changes are found by polling only; empty if push works, or the source has none."""
    failures: int = 0
    """How often reading the source failed since the start."""


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """How a limiter follows its rules."""

    poll_s: float = 1.0
    """Seconds between two queries without a hint."""
    snapshot: Path | None = None
    """The file for the last good rules."""


@dataclass(frozen=True, slots=True)
class LoadedRules:
    """The rules that a limiter starts with, and their status."""

    document: Document
    status: RulesStatus
    entries: EntryTable = field(default_factory=EntryTable)


def load(rules: Rules, snapshot: Path | None = None) -> LoadedRules:
    """Load the rules from their source or, if it is unavailable, from the snapshot.

    Blocks until the source has answered. Raises ConfigError or StoreError if neither has rules. A
    database without rules is an error, not an empty document that would let everything pass.
    """
    source = source_of(rules)
    if source is None:
        return LoadedRules(document_of(rules), RulesStatus("", "", since=_now()))
    if snapshot is not None:
        snapshots.check_place(snapshot)
    try:
        found, entries = _query_in_thread(source)
    except RatekeeperError as error:
        return _from_snapshot(snapshot, source.name, error)
    status = RulesStatus(found.version, source.name, "source", _now(), 0.0)
    return LoadedRules(found.document, status, entries)


def _query_in_thread(source: RulesSource) -> tuple[VersionedDocument, EntryTable]:
    """Query a source in a new thread, because the caller may run in an event loop."""
    result: list[tuple[VersionedDocument, EntryTable] | BaseException] = []

    async def query() -> tuple[VersionedDocument, EntryTable]:
        try:
            found = await _query(source, "")
            entries = await _updated_entries(source, EntryTable())
        finally:
            await source.close()
        assert found is not None, "no version is known yet"  # noqa: S101 - a source's contract
        return found, entries

    def run() -> None:
        try:
            result.append(asyncio.run(query()))
        except BaseException as error:  # raised again in the caller's thread
            result.append(error)

    thread = threading.Thread(target=run, name="ratekeeper-rules-first", daemon=True)
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


async def _query(source: RulesSource, known: str) -> VersionedDocument | None:
    try:
        async with asyncio.timeout(QUERY_S_MAX):
            return await source.current(known)
    except TimeoutError:
        raise StoreTimeout(f"{source.name} did not answer within {QUERY_S_MAX:g} s") from None


async def _updated_entries(source: RulesSource, known: EntryTable) -> EntryTable:
    """Apply the changes since `known` to it; return it, or a new table if it was too old."""
    table = known
    try:
        async with (
            asyncio.timeout(ENTRIES_S_MAX),
            aclosing(source.changes_since(known.seq)) as pages,
        ):
            async for page in pages:
                if page.whole and table is known:
                    table = EntryTable()
                for error in table.apply(page.rows, page.seq):
                    log.error("rules: %s", error)
    except TimeoutError:
        raise StoreTimeout(f"{source.name} did not answer within {ENTRIES_S_MAX:g} s") from None
    return table


def _from_snapshot(path: Path | None, name: str, error: RatekeeperError) -> LoadedRules:
    if path is None:
        raise error
    try:
        found = snapshots.load(path)
        entries = EntryTable()
        for rows, seq in snapshots.EntrySnapshot(path).read():
            entries.apply(rows, seq)
    except ConfigError as unusable:
        error.add_note(str(unusable))
        raise error from unusable
    if found is None:
        raise error
    log.warning("rules: version %s from the snapshot %s: %s", found.version, path, error)
    status = RulesStatus(found.version, name, "snapshot", _now(), None, str(error))
    # The follower reads all entries again when the source is back.
    entries.seq = 0
    return LoadedRules(found.document, status, entries)


# ── The follower ───────────────────────────────────────────────────────────────────────────────


class RulesUser(Protocol):
    """A limiter, as far as the follower needs it."""

    def use(self, rules: Document, version: str = "") -> None:
        """Put a document into force."""

    def use_entries(self, entries: EntryTable) -> None:
        """Put the entries beside the document into force, or apply a change of them."""


class Follower:
    """Keeps one limiter's rules up to date, until `stop` or until the limiter is garbage."""

    def __init__(
        self,
        limiter: RulesUser,
        rules: Rules,
        loaded: LoadedRules,
        options: FollowOptions,
        store: Store | None = None,
    ) -> None:
        """Prepare to follow. `loaded` is in force already; `store` may carry hints."""
        self._limiter = weakref.ref(limiter, lambda _: self._signal())
        self._rules = rules
        self._poll_s = options.poll_s
        self._snapshot = options.snapshot
        shared = None if store is None else shared_store(store)
        self._channel = None if shared is None else shared.channel
        # One thread replaces it and never changes it, so reading it needs no lock.
        self._status = loaded.status
        is_fresh = loaded.status.origin == "source"
        self._answered_s = time.monotonic() if is_fresh else None
        self._known = loaded.status.version if is_fresh else ""
        self._unsaved = VersionedDocument(self._known, loaded.document) if is_fresh else None
        self._entries = loaded.entries
        self._entry_snapshot = _entry_snapshot(options.snapshot)
        self._entries_in_force = loaded.entries.seq
        self._saving_entries: asyncio.Task[None] | None = None
        self._entries_error = ""
        self._swept_s = time.monotonic()
        self._push_errors: dict[str, str] = {}
        self._failures = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        if error := self._save():
            self._set_error(error)

    def start(self) -> None:
        """Start the thread. Rules without a source have nothing to follow."""
        if source_of(self._rules) is not None:
            _followers.add(self)
            # A server may load the application once and then fork its workers. Without this, they
            # would keep the rules of that moment.
            forks.after_fork(self.forked)
            self._start(first_pause_s=0.0)

    def status(self) -> RulesStatus:
        """Return the present status."""
        answered_s = self._answered_s
        age = None if answered_s is None else time.monotonic() - answered_s
        return replace(self._status, age=age, failures=self._failures)

    def stop(self) -> None:
        """End the thread, and wait STOP_S_MAX for that at most."""
        self._signal()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_S_MAX)

    def _signal(self) -> None:
        self._stopped.set()
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        """Cancel the task once: a second time would interrupt it while it closes its connections.

        Both `stop` and the end of the limiter cancel it.
        """
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def forked(self) -> None:
        """Start a new thread in a child process, which has no thread and no connections yet."""
        if self._thread is None or self._stopped.is_set():
            return
        self._stopped = threading.Event()
        self._loop = self._task = None
        # The parent holds the lock of the other object.
        self._entry_snapshot = _entry_snapshot(self._snapshot)
        # Not at once: the store must notice the fork first, and a server that forks fifty workers
        # would open fifty connections in one moment.
        self._start(first_pause_s=RANDOM.uniform(FORKED_S_MIN, FORKED_S_MAX))

    def _start(self, first_pause_s: float) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(first_pause_s,), name="ratekeeper-rules", daemon=True
        )
        self._thread.start()

    def _run(self, first_pause_s: float) -> None:
        if self._stopped.wait(first_pause_s):
            return
        try:
            with suppress(asyncio.CancelledError):
                asyncio.run(self._follow())
        except Exception:
            # Our own bug: the application continues with the rules that it has.
            log.exception("rules: no longer followed")
            self._set_error("no longer followed, because of a bug; see the log")

    async def _follow(self) -> None:
        self._wake = asyncio.Event()
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        source = source_of(self._rules)
        assert source is not None, "start() has checked it"  # noqa: S101 - our own
        pushing = [asyncio.create_task(self._wake_on("source", source.hints))]
        if self._channel is not None:
            hints = StoreHints(self._channel).hints
            pushing.append(asyncio.create_task(self._wake_on("store", hints)))
        pause = RetryPause()
        try:
            while not self._stopped.is_set():
                self._wake.clear()
                if await self._update(source):
                    pause.reset()
                    await self._wait()
                else:
                    await asyncio.sleep(pause.next_s())
        finally:
            self._task = None  # closing is not cancelled, also if the loop saw _stopped first
            for task in pushing:
                task.cancel()
            if self._saving_entries is not None:
                self._saving_entries.cancel()
                pushing.append(self._saving_entries)
            with suppress(TimeoutError):
                # Nothing waits for this thread any more, but a hanging server must not keep it.
                async with asyncio.timeout(QUERY_S_MAX):
                    await asyncio.gather(*pushing, return_exceptions=True)
                    await source.close()
            if self._entry_snapshot is not None:
                self._entry_snapshot.close()

    async def _wait(self) -> None:
        """Wait for a hint, or until it is time to poll."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_jittered(self._poll_s)):
                await self._wake.wait()
                await asyncio.sleep(RANDOM.uniform(0, HINT_SPREAD_S))

    async def _update(self, source: RulesSource) -> bool:
        """Query the source and put a new version into force; return True if that worked."""
        try:
            try:
                found = await _query(source, self._known)
                if found is not None:
                    self._put_into_force(found)
                    self._known = found.version
            except StoreError:
                raise
            except Exception:  # a document that this node cannot read does not stop the entries
                await self._update_entries(source)
                raise
            await self._update_entries(source)
        except Exception as error:  # whatever it is, the last good rules stay
            self._failures += 1
            self._set_error(_message(error))
            return False
        self._answered_s = time.monotonic()
        saving = self._saving_entries
        if self._entry_snapshot is not None and (saving is None or saving.done()):
            # A task, because changes that come meanwhile must not wait for a million rows.
            self._saving_entries = asyncio.create_task(self._save_entries(source))
        self._set_error(self._save() or self._entries_error)
        return True

    async def _update_entries(self, source: RulesSource) -> None:
        """Apply the changes of entries, and put them into force."""
        entries = await _updated_entries(source, self._entries)
        dropped = 0
        if time.monotonic() > self._swept_s + SWEEP_S:
            self._swept_s = time.monotonic()
            dropped = entries.drop_expired(time.time_ns())
        limiter = self._limiter()
        is_new = entries is not self._entries or entries.seq != self._entries_in_force
        if limiter is not None and (is_new or dropped):
            limiter.use_entries(entries)
        self._entries, self._entries_in_force = entries, entries.seq

    async def _save_entries(self, source: RulesSource) -> None:
        """Bring the snapshot of the entries up to date, if this process writes it."""
        file = self._entry_snapshot
        self._entries_error = ""
        try:
            if file is None or self._entries.seq in {0, file.seq} or not file.take():
                return
            async with (
                asyncio.timeout(ENTRIES_S_MAX),
                aclosing(source.changes_since(max(file.seq, 0))) as pages,
            ):
                async for page in pages:
                    file.write(page.rows, page.seq, whole=page.whole)
            file.finish()
        except Exception as error:  # whatever it is, the snapshot is out of date
            self._entries_error = f"the entries' snapshot is out of date: {_message(error)}"
            if file is not None:
                file.abandon()

    def _put_into_force(self, found: VersionedDocument) -> None:
        limiter = self._limiter()
        if limiter is None:
            self._stopped.set()
            return
        limiter.use(found.document, found.version)
        self._unsaved = found
        self._status = replace(
            self._status, version=found.version, origin="source", since=_now(), error=""
        )
        log.info("rules: version %s of %s is in force", found.version, self._status.source)

    def _save(self) -> str:
        """Write the snapshot if it is out of date; return the error, or an empty text."""
        if self._snapshot is None or self._unsaved is None:
            return ""
        version, document = self._unsaved
        try:
            snapshots.save(self._snapshot, version, document, self._status.source)
        except RatekeeperError as error:
            return str(error)
        self._unsaved = None
        return ""

    async def _wake_on(self, name: str, hints: Callable[[], AsyncGenerator[object, None]]) -> None:
        """Wake the loop at each hint; subscribe again after an error."""
        pause = RetryPause()
        while True:
            try:
                async with aclosing(hints()) as received:
                    async for _ in received:
                        pause.reset()
                        self._set_push_error(name, "")
                        self._wake.set()
            except Exception as error:  # whatever it is, polling continues
                self._set_push_error(name, _message(error))
                await asyncio.sleep(pause.next_s())
            else:
                return

    def _set_error(self, error: str) -> None:
        if error == self._status.error:
            return
        if error:
            log.warning("rules: version %s stays in force: %s", self._status.version, error)
        else:
            log.info("rules: %s works again", self._status.source)
        self._status = replace(self._status, error=error)

    def _set_push_error(self, name: str, error: str) -> None:
        if error != self._push_errors.get(name, ""):
            self._push_errors[name] = error
            errors = "; ".join(filter(None, self._push_errors.values()))
            self._status = replace(self._status, push_error=errors)


def _entry_snapshot(path: Path | None) -> snapshots.EntrySnapshot | None:
    return None if path is None else snapshots.EntrySnapshot(path)


class RetryPause:
    """The pause after each failure in a row: it doubles up to PAUSE_S_LONGEST."""

    def __init__(self) -> None:
        self._pause_s = 0.0

    def next_s(self) -> float:
        """Return the next pause, with a random part so that a fleet does not retry together."""
        self._pause_s = min(max(2 * self._pause_s, PAUSE_S_FIRST), PAUSE_S_LONGEST)
        return self._pause_s * RANDOM.uniform(0.5, 1)

    def reset(self) -> None:
        """Begin with the first pause again, after a success."""
        self._pause_s = 0.0


def poll_s_of(poll: Any) -> float:
    """Return the validated poll interval in seconds. Raises ConfigError."""
    number = isinstance(poll, int | float) and not isinstance(poll, bool)
    if not number or not POLL_S_MIN <= poll <= POLL_S_MAX:
        raise ConfigError(
            f"poll={show(poll)} is not a number of seconds from {POLL_S_MIN:g} to "
            f"{POLL_S_MAX:g}; for example poll=1.0"
        )
    return float(poll)


def _message(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _now() -> datetime:
    return datetime.now(UTC)


_followers: weakref.WeakSet[Follower] = weakref.WeakSet()


def _stop_all() -> None:
    for follower in list(_followers):
        follower.stop()


# No thread is cut off in the middle of a query.
atexit.register(_stop_all)
