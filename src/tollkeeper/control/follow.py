"""Keeping a limiter's rules up to date: a change is in force on every node in under two seconds.

A follower is one thread beside the application. It asks its source what is current: as soon as
something hints at a change, and every `poll` seconds in any case. What is new goes into force in
one step and, if the limiter has a snapshot, to disk. A source that is away or has a wrong document
changes nothing: the last good rules stay, `status` tells what is wrong, and the source is asked
again and again, at growing intervals, until it answers.

Nothing here raises into the application, and no check ever waits for it.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from tollkeeper.control import snapshot as snapshots
from tollkeeper.control.sources import Found, Source, StoreHints, jittered, source_of
from tollkeeper.core.errors import ConfigError, StoreTimeout, TollkeeperError, show
from tollkeeper.decide.store import Store
from tollkeeper.rules.document.model import Document
from tollkeeper.rules.document.reading import Rules, document_of

POLL_S_MIN: Final = 0.05
POLL_S_MAX: Final = 3600.0
# One look at a source, with connecting and a document of 10,000 rules.
LOOK_S_MAX: Final = 30.0
# After a failure: twice as long each time.
PAUSE_S_FIRST: Final = 0.1
PAUSE_S_LONGEST: Final = 5.0
# A fleet that is told at once does not ask at once.
HINT_SPREAD_S: Final = 0.1
# When a forked worker begins to follow.
FORKED_S_MIN: Final = 0.05
FORKED_S_MAX: Final = 0.5
# How long closing waits for the thread to end; it is a daemon, and may end later.
STOP_S_MAX: Final = 2.0

log = logging.getLogger("tollkeeper.rules")


@dataclass(frozen=True, slots=True)
class RulesStatus:
    """Which rules are in force, and how fresh they are."""

    version: str
    """A repository's number, or the beginning of a file's SHA-256; empty for one without."""
    source: str
    """Where they are followed: a path or a database's URL, without secrets. Empty: nowhere."""
    origin: Literal["source", "snapshot", "given"] = "given"
    """Whether this version came from the source, its snapshot, or from the application."""
    since: datetime | None = None
    """When it came into force here."""
    age: float | None = None
    """Seconds since the source last said what is current; None: it never did."""
    error: str = ""
    """What is wrong since then; empty if nothing is."""
    push_error: str = ""
    """Why changes are not pushed but found by asking; empty if they are, or nobody pushes."""
    failures: int = 0
    """How often the source could not be read, or had a wrong document, since the start."""


class Following(Protocol):
    """What `begin` needs to know of a limiter."""

    def use(self, rules: Document, version: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class How:
    """How rules are followed."""

    poll_s: float = 1.0
    """How often to ask without a hint."""
    snapshot: Path | None = None
    """Where to keep the last good rules."""


@dataclass(frozen=True, slots=True)
class Start:
    """The rules to start with, and how things stood when they were found."""

    document: Document
    status: RulesStatus


def load(rules: Rules, snapshot: Path | None = None) -> Start:
    """The rules to start with: from their source or, if that is away, from the snapshot.

    Blocks until the source has answered. Raises ConfigError or StoreError if there are no rules to
    be had. A database without any rules is no source of an empty document: everything would pass.
    """
    source = source_of(rules)
    if source is None:
        return Start(document_of(rules), RulesStatus("", "", since=_now()))
    if snapshot is not None:
        snapshots.check_place(snapshot)
    try:
        found = _in_thread(source)
    except TollkeeperError as error:
        return _from_snapshot(snapshot, source.name, error)
    status = RulesStatus(found.version, source.name, "source", _now(), 0.0)
    return Start(found.document, status)


def _in_thread(source: Source) -> Found:
    """The first look. In a thread, for the caller may be in an event loop of its own."""
    result: list[Found | BaseException] = []

    async def look() -> Found:
        try:
            return await _look(source, "") or _nothing()
        finally:
            await source.close()

    def run() -> None:
        try:
            result.append(asyncio.run(look()))
        except BaseException as error:  # raised again by the caller's thread
            result.append(error)

    thread = threading.Thread(target=run, name="tollkeeper-rules-first", daemon=True)
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def _nothing() -> Found:
    raise AssertionError("a source that is asked for the first time has a version, or raises")


async def _look(source: Source, known: str) -> Found | None:
    try:
        async with asyncio.timeout(LOOK_S_MAX):
            return await source.current(known)
    except TimeoutError:
        raise StoreTimeout(f"{source.name} did not answer within {LOOK_S_MAX:g} s") from None


def _from_snapshot(path: Path | None, name: str, error: TollkeeperError) -> Start:
    if path is None:
        raise error
    try:
        found = snapshots.load(path)
    except ConfigError as refusal:
        error.add_note(str(refusal))
        raise error from refusal
    if found is None:
        raise error
    log.warning("rules: version %s from the snapshot %s: %s", found.version, path, error)
    status = RulesStatus(found.version, name, "snapshot", _now(), None, str(error))
    return Start(found.document, status)


class Follower:
    """Keeps one limiter's rules up to date, until `stop`, or until the limiter is gone."""

    def __init__(
        self,
        limiter: Following,
        rules: Rules,
        start: Start,
        how: How,
        store: Store | None = None,
    ) -> None:
        """Prepare to follow. `start` is in force already; `store` may carry hints."""
        self._limiter = weakref.ref(limiter, lambda _: self._signal())
        self._rules = rules
        self._poll_s = how.poll_s
        self._snapshot = how.snapshot
        self._channel = None if store is None else store.channel
        # Replaced, never changed, and by one thread: who reads it needs no lock.
        self._status = start.status
        self._looked_s = time.monotonic() if start.status.origin == "source" else None
        self._known = start.status.version if start.status.origin == "source" else ""
        self._push_errors: dict[str, str] = {}
        self._failures = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._unsaved: Found | None = None
        if start.status.origin == "source":
            self._unsaved = Found(start.status.version, start.document)
        if unsaved := self._save():
            self._note(unsaved)

    def start(self) -> None:
        """Follow from now on. Rules that are at hand have nothing to follow."""
        if source_of(self._rules) is not None:
            _followers.add(self)
            self._start(first_pause_s=0.0)

    def status(self) -> RulesStatus:
        """How things stand now."""
        looked_s = self._looked_s
        age = None if looked_s is None else time.monotonic() - looked_s
        return replace(self._status, age=age, failures=self._failures)

    def stop(self) -> None:
        """End the thread, and wait for that a little."""
        self._signal()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_S_MAX)

    def _signal(self) -> None:
        self._stopped.set()
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(task.cancel)

    def forked(self) -> None:
        """In a child process: the thread is not here, and its connections are the parent's."""
        if self._thread is None or self._stopped.is_set():
            return
        self._stopped = threading.Event()
        self._loop = self._task = None
        # Not at once: the store, too, has to notice that it was forked, and a server that forks
        # fifty workers would have fifty connections asked for in one moment.
        self._start(first_pause_s=random.uniform(FORKED_S_MIN, FORKED_S_MAX))  # noqa: S311 - same

    def _start(self, first_pause_s: float) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(first_pause_s,), name="tollkeeper-rules", daemon=True
        )
        self._thread.start()

    def _run(self, first_pause_s: float) -> None:
        if self._stopped.wait(first_pause_s):
            return
        try:
            with suppress(asyncio.CancelledError):
                asyncio.run(self._follow())
        except Exception:
            # A defect of ours: the application goes on with the rules that it has.
            log.exception("rules: no longer followed")
            self._note("no longer followed, because of a defect; see the log")

    async def _follow(self) -> None:
        self._wake = asyncio.Event()
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        source = source_of(self._rules)
        assert source is not None, "only what has a source is followed"  # noqa: S101 - our own
        pushing = [asyncio.create_task(self._heed("source", source.hints))]
        if self._channel is not None:
            hints = StoreHints(self._channel).hints
            pushing.append(asyncio.create_task(self._heed("store", hints)))
        pause = Pause()
        try:
            while not self._stopped.is_set():
                self._wake.clear()
                if await self._look(source):
                    pause.reset()
                    await self._rest()
                else:
                    await asyncio.sleep(pause.next_s())
        finally:
            for task in pushing:
                task.cancel()
            with suppress(TimeoutError):
                # A server that hangs: nobody waits for us any more, but there is an end to it.
                async with asyncio.timeout(LOOK_S_MAX):
                    await asyncio.gather(*pushing, return_exceptions=True)
                    await source.close()

    async def _rest(self) -> None:
        """Until something hints at a change, or it is time to ask without."""
        with suppress(TimeoutError):
            async with asyncio.timeout(jittered(self._poll_s)):
                await self._wake.wait()
                await asyncio.sleep(random.uniform(0, HINT_SPREAD_S))  # noqa: S311 - no secret

    async def _look(self, source: Source) -> bool:
        """Ask the source, and put what is new into force. Was all well?"""
        try:
            found = await _look(source, self._known)
            if found is not None:
                self._take(found)
        except Exception as error:  # whatever it is, the last good rules stay
            self._failures += 1
            self._note(_words(error))
            return False
        self._looked_s = time.monotonic()
        self._known = found.version if found is not None else self._known
        self._note(self._save())
        return True

    def _take(self, found: Found) -> None:
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
        """Write the snapshot, if that is still to be done; what is wrong, or nothing."""
        if self._snapshot is None or self._unsaved is None:
            return ""
        found = self._unsaved
        try:
            snapshots.save(self._snapshot, found.version, found.document, self._status.source)
        except TollkeeperError as error:
            return str(error)
        self._unsaved = None
        return ""

    async def _heed(self, name: str, hints: Callable[[], AsyncGenerator[None, None]]) -> None:
        """Wake the loop at each hint; where hints have ended, try to get more."""
        pause = Pause()
        while True:
            try:
                async with aclosing(hints()) as heard:
                    async for _ in heard:
                        pause.reset()
                        self._note_push(name, "")
                        self._wake.set()
            except Exception as error:  # whatever it is, polling goes on
                self._note_push(name, _words(error))
                await asyncio.sleep(pause.next_s())
            else:
                return

    def _note(self, error: str) -> None:
        if error == self._status.error:
            return
        if error:
            log.warning("rules: version %s stays in force: %s", self._status.version, error)
        else:
            log.info("rules: %s is well again", self._status.source)
        self._status = replace(self._status, error=error)

    def _note_push(self, name: str, error: str) -> None:
        if error != self._push_errors.get(name, ""):
            self._push_errors[name] = error
            said = "; ".join(filter(None, self._push_errors.values()))
            self._status = replace(self._status, push_error=said)


class Pause:
    """How long to wait after each failure in a row: longer each time, up to a bound."""

    def __init__(self) -> None:
        self._pause_s = 0.0

    def next_s(self) -> float:
        """The next pause. A random part keeps a fleet from knocking all at once."""
        self._pause_s = min(max(2 * self._pause_s, PAUSE_S_FIRST), PAUSE_S_LONGEST)
        return self._pause_s * random.uniform(0.5, 1)  # noqa: S311 - no secret hangs on it

    def reset(self) -> None:
        """It worked."""
        self._pause_s = 0.0


def poll_s_of(poll: Any) -> float:
    """How often to ask, in seconds. Raises ConfigError."""
    number = isinstance(poll, int | float) and not isinstance(poll, bool)
    if not number or not POLL_S_MIN <= poll <= POLL_S_MAX:
        raise ConfigError(
            f"poll={show(poll)} is not a number of seconds from {POLL_S_MIN:g} to "
            f"{POLL_S_MAX:g}; for example poll=1.0"
        )
    return float(poll)


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _now() -> datetime:
    return datetime.now(UTC)


_followers: weakref.WeakSet[Follower] = weakref.WeakSet()


def _forked() -> None:
    for follower in list(_followers):
        follower.forked()


def _stop_all() -> None:
    for follower in list(_followers):
        follower.stop()


# A server that loads the application once and then forks its workers would have them all stay with
# the rules of that moment.
os.register_at_fork(after_in_child=_forked)
# So that no thread is cut off while it talks to a database.
atexit.register(_stop_all)
