"""The Envoys that are connected for quotas (experimental), as an operator sees them.

Each worker knows its own streams. It registers their status in the store's channel and renews it,
so any worker of any node can list all. A status that is not renewed is forgotten after LASTS_S.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import StoreError
from ratekeeper.decide.store import REGISTERED_MAX, shared_store

if TYPE_CHECKING:
    from ratekeeper.limiter import AsyncLimiter

TOPIC: Final = "envoys"
LASTS_S: Final = 15
RENEW_S: Final = 5.0
# Of all Envoys of a worker together: its text stays below a megabyte.
PARTS_MAX: Final = 1_000
TEXT_LENGTH_MAX: Final = 200


class EnvoyPart(msgspec.Struct, omit_defaults=True):
    """The assignment of one bucket of an Envoy."""

    bucket: str
    """Its id: `tenant=acme`."""
    rule: str
    """Empty if no rule applies."""
    quota: str
    """`rate`, `grants`, `allow_all` or `deny_all`."""
    has: str = ""
    """The assignment in words; for a blanket answer the reason."""
    demand: float | None = None
    """Requests per second; None until it was measured."""


class EnvoyStatus(msgspec.Struct):
    """One stream of an Envoy."""

    envoy: str
    """The name that it sent as `x-envoy-node`; empty without one."""
    stream: str
    node: str
    worker: int
    domain: str
    since_s: float
    """Unix time."""
    reported_s: float
    """The Unix time of its last report."""
    buckets: int
    parts: list[EnvoyPart]
    """The busiest buckets."""


_decode: Final = msgspec.json.Decoder(list[EnvoyStatus]).decode
_encode: Final = msgspec.json.Encoder().encode


class EnvoyDirectory:
    """Lists the Envoys of all workers."""

    def __init__(self, limiter: AsyncLimiter) -> None:
        """Use the channel of the limiter's store; without one, only this worker's are known."""
        self._limiter = limiter
        self._name = os.urandom(8).hex()
        self.own: Callable[[], list[EnvoyStatus]] = list
        """Returns the streams of this worker; the gRPC service sets it."""

    async def everyone(self) -> list[EnvoyStatus]:
        """Return the Envoys of all workers, by name; registers those of this worker.

        Returns those of this worker alone if the store cannot be reached.
        """
        found = {each.stream: each for each in self.own()}
        for text in await self._registered(REGISTERED_MAX):
            with suppress(msgspec.MsgspecError):  # of another version
                found = {**{each.stream: each for each in _decode(text)}, **found}
        return sorted(found.values(), key=lambda each: (each.envoy, each.node, each.stream))

    async def renew(self) -> None:
        """Renew the registration of this worker's Envoys until the task is cancelled."""
        registered = False
        while True:
            found = bool(self.own())
            if registered or found:
                await self._registered(1)
            registered = found
            await asyncio.sleep(RENEW_S)

    async def _registered(self, at_most: int) -> Sequence[str]:
        """Register the Envoys of this worker; return the texts of so many workers."""
        shared = shared_store(self._limiter.store)
        channel = None if shared is None else shared.channel
        if channel is None:
            return []
        text = _encode(self.own()).decode()
        try:
            return await asyncio.to_thread(
                channel.register, TOPIC, self._name, text, LASTS_S * NS_PER_SECOND, at_most
            )
        except StoreError:
            return []
