"""Messages to every process that uses the same servers, and a list of those processes.

A message reaches the processes that are subscribed at that moment, once or not at all: it is a hint
that something has changed, never the change itself. In a cluster any node will do, because nodes
forward messages.

The list is a hash with a text for each name, such as an address. Each text begins with the time at
which it expires, by the server's clock. A process renews its text long before that. It ignores the
texts of processes that did not, and drops them after another lifetime. It takes no command and no
permission that checks do not need.

A list that is only counted is a sorted set of names, each with the time at which it expires: each
process adds its own name, and no process reads those of the others.

Blocking, for threads. The connections are redis-py's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from ratekeeper.core.chance import RANDOM
from ratekeeper.core.errors import StoreTimeout, StoreUnavailable
from ratekeeper.decide.store import REGISTERED_MAX
from ratekeeper.decide.stores.redis.config import Address, RedisConfig
from ratekeeper.decide.stores.redis.topology import (
    Topology,
    pipelined,
    slot_of,
    store_errors,
)

T = TypeVar("T")

# A subscription that was silent for this long sends a PING.
IDLE_S_MAX: Final = 5.0
# A list of names is kept for this time at least: PEXPIRE with 0 would delete it.
_KEPT_MS_MIN: Final = 1_000
# Of a time in milliseconds. Other processes can write to the list, and int() refuses many digits.
_DIGITS_MAX: Final = 18


def publish(topology: Topology, config: RedisConfig, channel: str, text: str) -> None:
    """Send a message to all current subscribers. Raises StoreUnavailable or StoreTimeout."""
    try:
        _publish(topology, config, channel, text)
    except (StoreUnavailable, StoreTimeout):
        # The servers may have changed; other servers know the current ones.
        topology.refresh()
        _publish(topology, config, channel, text)


def _publish(topology: Topology, config: RedisConfig, channel: str, text: str) -> None:
    *others, last = _addresses(topology, config)
    for address in others:
        with suppress(StoreUnavailable, StoreTimeout), store_errors(f"{config.shown()}: {address}"):
            topology.client(address).publish(channel, text)
            return
    with store_errors(f"{config.shown()}: {last}"):
        topology.client(last).publish(channel, text)


def registry_key(prefix: str, topic: str) -> str:
    """Return the key of a list. In a cluster, the text in braces decides on the server."""
    return f"{prefix}:{topic}:{{names}}"


def register(
    topology: Topology,
    config: RedisConfig,
    key: str,
    name: str,
    text: str,
    lasts_ns: int,
    at_most: int = REGISTERED_MAX,
) -> list[str]:
    """Keep a text for a time; return those of all names, or of some. Raises StoreError."""
    lasts_ms = max(lasts_ns // 1_000_000, 1)

    def registered(client: Any) -> list[str]:
        clock, names, left_ms = _replies(client, [("TIME",), ("HKEYS", key), ("PTTL", key)])
        now_ms = int(clock[0]) * 1_000 + int(clock[1]) // 1_000
        others = [each for each in names if each != name.encode()]
        if len(others) >= at_most:
            others = RANDOM.sample(others, at_most - 1)
        # The list lives as long as its longest text.
        expiry = "PEXPIRE", key, max(lasts_ms, left_ms)
        writing = [("HSET", key, name, f"{now_ms + lasts_ms} {text}"), expiry]
        reading = [("HGET", key, each) for each in others]
        kept = [text]
        expired = []
        for other, held in zip(others, _replies(client, [*writing, *reading])[2:], strict=True):
            until_ms, _, found = _text(held or b"").partition(" ")
            is_time = until_ms.isascii() and until_ms.isdigit() and len(until_ms) <= _DIGITS_MAX
            if is_time and int(until_ms) > now_ms:
                kept.append(found)
            # A process that was away for a short time may be renewing its text at this moment.
            elif not is_time or int(until_ms) + lasts_ms <= now_ms:
                expired.append(other)
        if expired:
            _replies(client, [("HDEL", key, *expired)])
        return kept

    return _at_key(topology, config, key, registered)


def count_names(topology: Topology, config: RedisConfig, key: str, name: str, lasts_ns: int) -> int:
    """Keep a name for a time, or forget it; return how many names there are. Raises StoreError."""
    lasts_ms = lasts_ns // 1_000_000

    def counted(client: Any) -> int:
        clock, left_ms = _replies(client, [("TIME",), ("PTTL", key)])
        now_ms = int(clock[0]) * 1_000 + int(clock[1]) // 1_000
        commands: list[tuple[Any, ...]] = [
            ("ZADD", key, now_ms + lasts_ms, name),
            ("ZREMRANGEBYSCORE", key, "-inf", now_ms),
            ("ZCARD", key),
            ("PEXPIRE", key, max(lasts_ms, left_ms, _KEPT_MS_MIN)),
        ]
        return int(_replies(client, commands)[2])

    return _at_key(topology, config, key, counted)


def unregister(topology: Topology, config: RedisConfig, key: str, name: str) -> None:
    """Forget the text of a name. Raises StoreError."""
    _at_key(topology, config, key, lambda client: _replies(client, [("HDEL", key, name)]))


def _at_key(topology: Topology, config: RedisConfig, key: str, call: Callable[[Any], T]) -> T:
    """Call the server that has a key; if that fails, look for it once more."""
    try:
        return _at_key_once(topology, config, key, call)
    except (StoreUnavailable, StoreTimeout):
        topology.refresh()
        return _at_key_once(topology, config, key, call)


def _at_key_once(topology: Topology, config: RedisConfig, key: str, call: Callable[[Any], T]) -> T:
    topology.primaries()  # they are looked up if none is known
    address = topology.slots[slot_of(key.encode())]
    if address is None:
        raise StoreUnavailable(f"{config.shown()}: no server has the slot of {key}")
    with store_errors(
        f"{config.shown()}: {address}",
        "; the user needs +time +hkeys +hget +hset +hdel +pttl +pexpire, "
        "and +zadd +zremrangebyscore +zcard",
    ):
        return call(topology.client(address))


def _replies(client: Any, commands: list[tuple[Any, ...]]) -> list[Any]:
    """Return the replies to several commands; raise if one is an error."""
    replies = pipelined(client, commands)
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


class RedisSubscription:
    """The messages of one channel, from one server. For one thread. Raises if it is cut off."""

    def __init__(self, topology: Topology, config: RedisConfig, channel: str) -> None:
        """Subscribe, and wait for the server's confirmation. Raises StoreError."""
        self._config = config
        self._pubsub: Any = None
        topology.refresh()
        self._address = _addresses(topology, config)[0]
        try:
            with store_errors(f"{config.shown()}: {self._address}"):
                client: Any = topology.client(self._address)
                self._pubsub = client.pubsub()
                self._pubsub.subscribe(channel)
                confirmed = self._pubsub.get_message(timeout=config.connect_ns / 1e9)
        except BaseException:
            self.close()
            raise
        if confirmed is None:
            self.close()
            raise self._silent()
        self._heard_s = time.monotonic()
        self._pinged = False

    def wait(self, seconds: float) -> str | None:
        """Wait for a message; return its text, or None. After a StoreError, subscribe again."""
        with store_errors(f"{self._config.shown()}: {self._address}"):
            message = self._pubsub.get_message(timeout=seconds)
            now_s = time.monotonic()
            if message is not None:
                self._heard_s = now_s
                self._pinged = False
                return _text(message["data"]) if message["type"] == "message" else None
            silent_s = now_s - self._heard_s
            if silent_s > IDLE_S_MAX and not self._pinged:
                self._pubsub.ping()
                self._pinged = True
        if silent_s > IDLE_S_MAX + self._config.connect_ns / 1e9 + seconds:
            raise self._silent()
        return None

    def close(self) -> None:
        """Close the connection."""
        if self._pubsub is not None:
            self._pubsub.close()

    def _silent(self) -> StoreTimeout:
        return StoreTimeout(f"{self._config.shown()}: {self._address} does not answer")


def _text(data: bytes | str) -> str:
    return data if isinstance(data, str) else data.decode("utf-8", "replace")


def _addresses(topology: Topology, config: RedisConfig) -> list[Address]:
    """Return all primaries in random order, which spreads the load of a fleet."""
    addresses = topology.primaries()
    RANDOM.shuffle(addresses)
    if not addresses:
        raise StoreUnavailable(f"{config.shown()}: no primary is known")
    return addresses
