"""Messages to every process that uses the same servers, through Redis pub/sub.

A message reaches the processes that are subscribed at that moment, once or not at all: it is a hint
that something has changed, never the change itself. In a cluster any node will do, because nodes
forward messages.

Blocking, for threads. The connections are redis-py's.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import Any, Final

from tollkeeper.core.errors import StoreTimeout, StoreUnavailable
from tollkeeper.decide.stores.redis.config import Address, RedisConfig
from tollkeeper.decide.stores.redis.topology import Topology, store_errors

# A subscription that was silent for this long sends a PING.
IDLE_S_MAX: Final = 5.0


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
    random.shuffle(addresses)
    if not addresses:
        raise StoreUnavailable(f"{config.shown()}: no primary is known")
    return addresses
