"""Loads that the protected system pushes, shared by all workers of a service.

A push reaches one worker and concerns all of them. The worker writes the load into a file in the
folder of this run, and every worker looks at that file every POLL_SECONDS. If the store carries
messages (Redis), the worker also publishes the load, and the workers of all nodes take it from
there. They subscribe while a rule follows a pushed load.

A message may be lost, and a worker of another node that starts later has none. So the protected
system repeats its pushes, as it must anyway: a load that is not repeated becomes stale, and the
base limits return (`rules/load.py`).

The file holds the time of each push on the clock that counts from boot, which all processes of a
machine share. A load from the channel has the age 0 when it arrives: the clocks of nodes differ.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ratekeeper.control.follow import RetryPause, StoreHints
from ratekeeper.core.clock import NS_PER_SECOND, boot_ns
from ratekeeper.core.errors import ConfigError, StoreError
from ratekeeper.decide.store import shared_store

if TYPE_CHECKING:
    from ratekeeper.limiter import AsyncLimiter

TOPIC: Final = "load"
POLL_SECONDS: Final = 0.25
# How often a worker checks whether a rule follows a pushed load.
IDLE_SECONDS: Final = 1.0
# At most 33 loads of about 120 bytes.
FILE_BYTES_MAX: Final = 16_384
_FILE: Final = "loads.shared"
_LOCK: Final = "loads.lock"

log = logging.getLogger("ratekeeper.service")


class SharedLoad(msgspec.Struct, forbid_unknown_fields=True):
    """One pushed load, in the file or in a message."""

    load: float
    valid_for: float | None = None
    at_s: float = 0.0
    """When it was pushed, on the clock that counts from boot; 0 in a message."""
    name: str = ""
    """Only in a message."""


_read_file: Final = msgspec.json.Decoder(dict[str, SharedLoad]).decode
_read_message: Final = msgspec.json.Decoder(SharedLoad).decode
_encode: Final = msgspec.json.Encoder().encode


class SharedLoads:
    """The pushed loads of one worker, and the way to those of the other workers."""

    def __init__(self, limiter: AsyncLimiter, folder: Path | None) -> None:
        """`folder` is that of the run; None: there is one worker."""
        self._limiter = limiter
        self._folder = folder
        self._seen: tuple[int, tuple[str, ...]] = (0, ())

    def push(self, name: str, load: float, valid_for: float | None = None) -> bool:
        """Push a load to all workers; return True if the nodes on the store were reached too.

        Blocks for a round trip. Raises ConfigError for an invalid name or number.
        """
        self._limiter.push_load(load, name, valid_for=valid_for)
        self._write(name, SharedLoad(float(load), valid_for, _boot_s()))
        shared = shared_store(self._limiter.store)
        channel = None if shared is None else shared.channel
        if channel is None:
            return False
        message = SharedLoad(float(load), valid_for, name=name)
        try:
            channel.publish(TOPIC, _encode(message).decode())
        except StoreError as error:
            log.warning("load %s reached only this node: %s", name, error)
            return False
        return True

    def _write(self, name: str, pushed: SharedLoad) -> None:
        """Add a load to the file. A full disk is only logged: the load is in force here."""
        if self._folder is None:
            return
        path = self._folder / _FILE
        try:
            with (self._folder / _LOCK).open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                known = self._read(path) | {name: pushed}
                followed = {*self._limiter.loads.sources, name}
                kept = {each: load for each, load in known.items() if each in followed}
                temporary = path.with_suffix(".leaving")
                temporary.write_bytes(_encode(kept))
                temporary.replace(path)
        except OSError as error:
            log.warning("load %s reached only one worker: %s", name, error.strerror)

    def _read(self, path: Path) -> dict[str, SharedLoad]:
        with suppress(OSError, msgspec.DecodeError):
            if path.stat().st_size <= FILE_BYTES_MAX:
                return _read_file(path.read_bytes())
        return {}

    def refresh(self) -> None:
        """Take the loads of the file if it or the rules have changed."""
        if self._folder is None:
            return
        path = self._folder / _FILE
        try:
            seen = path.stat().st_mtime_ns, self._limiter.loads.sources
        except OSError:
            return
        if seen == self._seen:
            return
        self._seen = seen
        now_s = _boot_s()
        for name, pushed in self._read(path).items():
            self._take(name, pushed, max(now_s - pushed.at_s, 0.0))

    def _take(self, name: str, pushed: SharedLoad, age_s: float) -> None:
        # The rules of this worker may not follow it yet, or no longer.
        with suppress(ConfigError):
            self._limiter.loads.push(pushed.load, name, pushed.valid_for, age_s)

    async def keep_following(self) -> None:
        """Take the loads that other workers and nodes share, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_channel())
            while True:
                self.refresh()
                await asyncio.sleep(POLL_SECONDS)

    async def _follow_channel(self) -> None:
        shared = shared_store(self._limiter.store)
        channel = None if shared is None else shared.channel
        pause = RetryPause()
        is_failing = False
        while channel is not None:
            if not self._limiter.loads.pushed_sources:
                await asyncio.sleep(IDLE_SECONDS)
                continue
            try:
                async with aclosing(StoreHints(channel, TOPIC).hints()) as messages:
                    async for text in messages:
                        pause.reset()
                        is_failing = False
                        self._take_message(text)
            except StoreError as error:
                if not is_failing:  # logged once, and not at every attempt
                    log.warning("loads of other nodes are not followed now: %s", error)
                is_failing = True
                await asyncio.sleep(pause.next_s())

    def _take_message(self, text: str) -> None:
        with suppress(msgspec.DecodeError):
            message = _read_message(text)
            self._take(message.name, message, 0.0)


def _boot_s() -> float:
    return boot_ns() / NS_PER_SECOND
