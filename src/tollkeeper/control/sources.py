"""Where rules come from, and what hints that they have changed.

A *source* is asked what is current; that answer alone counts. A *hint* says that asking may be
worth it: a file that looks different, a NOTIFY of PostgreSQL, a message through Redis. Hints may be
lost, doubled or late; whoever follows a source asks it now and then without one.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from tollkeeper.core.errors import ConfigError, StoreError
from tollkeeper.decide.store import Channel, Store, Subscription
from tollkeeper.rules.document.model import Document
from tollkeeper.rules.document.reading import is_document_text, read, read_file

if TYPE_CHECKING:
    from tollkeeper.control.repository import Repository

FILE_POLL_S: Final = 0.25
# A file that is being written is left alone until it has looked the same for so long.
FILE_SETTLED_S: Final = 0.2
# Nodes do not all ask at once: each period is up to a fifth shorter or longer.
JITTER: Final = 0.2
TOPIC: Final = "rules"
# How soon the thread that waits for Redis notices that nobody wants to know any more.
_REDIS_WAIT_S: Final = 0.25
_FORK_WAIT_S_MAX: Final = 1.0
_VERSION_CHARACTERS: Final = 12
# Inode, time of the last change and size: one of them differs when a file was written.
_Look = tuple[int, int, int]


class Found(NamedTuple):
    """A version of the rules."""

    version: str
    document: Document


class Source(Protocol):
    """Where rules come from. All its methods are called in one event loop."""

    name: str
    """What to call it in messages; no secrets."""

    async def current(self, known: str) -> Found | None:
        """The current version; None if that is still `known`. Raises TollkeeperError."""

    def hints(self) -> AsyncGenerator[None, None]:
        """An item whenever `current` may have changed. Ends at once where nobody would say."""

    async def close(self) -> None:
        """Let go of connections; the next call makes new ones."""


def jittered(period_s: float) -> float:
    """The period, a random part shorter or longer."""
    return period_s * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - no secret hangs on it


class FileSource:
    """A document on disk. Its version is the beginning of its text's SHA-256.

    A file may be replaced (by a rename, as most editors and every careful program do) or written
    in place. One that is written in place, and whose writer pauses for long at the end of a line,
    may look finished when it is not: replace it by a rename where that matters.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._taken: tuple[_Look | None, str] = None, ""

    async def current(self, known: str) -> Found | None:
        """Reads the file if it looks different; it is parsed if its text is another one."""
        settled = not known  # at the start nobody wants to wait
        while True:
            look = self._look()
            if look is not None and (look, known) == self._taken:
                return None
            version = self._version()
            if version and version == known:
                self._taken = look, known
                return None
            if not settled:
                await asyncio.sleep(FILE_SETTLED_S)
            settled = False
            if (look, version) != (self._look(), self._version()):
                continue
            document = read_file(self._path)
            if (look, version) == (self._look(), self._version()):
                self._taken = look, version
                return Found(version, document)

    async def hints(self) -> AsyncGenerator[None, None]:
        """Looks at the file four times a second."""
        seen = self._look()
        while True:
            await asyncio.sleep(jittered(FILE_POLL_S))
            look = self._look()
            if look != seen:
                seen = look
                yield

    async def close(self) -> None:
        """Nothing is kept open."""

    def _look(self) -> _Look | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _version(self) -> str:
        try:
            text = self._path.read_bytes()
        except OSError:
            return ""  # read_file says what is wrong, and what would be right
        return sha256(text).hexdigest()[:_VERSION_CHARACTERS]


class RepositorySource:
    """The rules in a database. Their version is its number."""

    def __init__(self, url: str) -> None:
        self.name = without_secrets(url)
        self._url = url
        self._repository: Repository | None = None
        self._opening = asyncio.Lock()

    async def current(self, known: str) -> Found | None:
        """Asks for the number alone, unless that is another one."""
        try:
            repository = await self._opened()
            number = await repository.number()
            if number and str(number) == known:
                return None
            version = await repository.current()
        except StoreError:
            # What the connections are worth now, nobody knows.
            await self.close()
            raise
        if version is None:
            raise ConfigError(
                f"{self.name} holds no rules yet; put a document there first: "
                f"tollkeeper rules apply limits.yaml"
            )
        return Found(str(version.number), read(version.text, f"version {version.number}"))

    async def hints(self) -> AsyncGenerator[None, None]:
        """PostgreSQL says when a version is made; SQLite cannot."""
        if self._url.startswith("sqlite"):
            return
        repository = await self._opened()
        async for _ in repository.listen():
            yield

    async def close(self) -> None:
        """Close the database."""
        repository, self._repository = self._repository, None
        if repository is not None:
            with suppress(Exception):  # it is being given up, whatever state it is in
                await repository.close()

    async def _opened(self) -> Repository:
        async with self._opening:
            if self._repository is None:
                try:
                    # Databases need libraries that files do without.
                    from tollkeeper.control.repository import Repository  # noqa: PLC0415 - so here
                except ImportError as error:
                    raise ConfigError(
                        f"rules in a database need the libraries of the control extra ({error}); "
                        f"install them with: pip install 'tollkeeper[control,postgres]'"
                    ) from error
                self._repository = await Repository.open(self._url)
            return self._repository


class StoreHints:
    """Messages of `announce`, through the store that quotas are kept in."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def hints(self) -> AsyncGenerator[None, None]:
        """An item for each message. Raises StoreError when the server is gone."""
        loop = asyncio.get_running_loop()
        # One thread, which waits in short steps: it ends soon after it is not wanted any more.
        thread = ThreadPoolExecutor(1, "tollkeeper-rules-redis")
        try:
            subscription = await loop.run_in_executor(thread, self._subscribe)
            try:
                # What was announced while nobody listened.
                yield
                while True:
                    if await loop.run_in_executor(thread, subscription.wait, _REDIS_WAIT_S):
                        yield
            finally:
                with suppress(RuntimeError):  # the process ends, and all connections with it
                    thread.submit(subscription.close)
        finally:
            thread.shutdown(wait=False)

    def _subscribe(self) -> Subscription:
        with _forks.connecting:
            return self._channel.subscribe(TOPIC)


class _Forks:
    """No fork while our thread connects to Redis: redis-py imports modules when it does.

    A module that a thread imports while the process forks is locked in the child for ever, and
    whoever needs it there waits for a thread that does not exist.
    """

    def __init__(self) -> None:
        self.connecting = threading.Lock()
        self._held = False

    def before(self) -> None:
        """Wait for it, but no fork waits for long."""
        self._held = self.connecting.acquire(timeout=_FORK_WAIT_S_MAX)

    def in_parent(self) -> None:
        """Go on."""
        if self._held:
            self.connecting.release()

    def in_child(self) -> None:
        """Begin anew: whoever held it is not here."""
        self.connecting = threading.Lock()


_forks = _Forks()
os.register_at_fork(
    before=_forks.before, after_in_parent=_forks.in_parent, after_in_child=_forks.in_child
)


def announce(store: Store, number: int) -> bool:
    """Announce a new version to all nodes that use this store; False if it has no channel.

    Blocks for a round trip. Raises StoreError; the nodes then find out by themselves, later.
    """
    if store.channel is None:
        return False
    store.channel.publish(TOPIC, str(number))
    return True


def source_of(rules: object) -> Source | None:
    """The source that a path or a database's URL names; None for a document that is at hand."""
    if isinstance(rules, str):
        if is_document_text(rules):
            return None
        if "://" in rules:
            return RepositorySource(rules)
    elif not isinstance(rules, os.PathLike):
        return None
    return FileSource(Path(rules))


def without_secrets(url: str) -> str:
    """A database's URL for messages: no user, no password, no options.

    >>> without_secrets("postgresql://app:s3cr@t@db.internal/rules?sslmode=require")
    'postgresql://db.internal/rules'
    """
    scheme, _, rest = url.partition("://")
    place = rest.rpartition("@")[2].partition("?")[0]
    return f"{scheme}://{place}"
