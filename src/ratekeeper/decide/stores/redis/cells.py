"""Cells in Redis: small values that several nodes change by compare-and-set.

    <prefix>:cells:{<hash of the name>}:<name>    the value, a string that expires

A call is one script on one key, so a cluster spreads the cells over its servers, and a replica that
takes over has them as it has all other keys.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from ratekeeper.core import switches
from ratekeeper.core.clock import Clock, SystemClock
from ratekeeper.core.errors import StoreUnavailable, show
from ratekeeper.core.steps import run_async
from ratekeeper.decide.store import require_cell_name, require_cell_value
from ratekeeper.decide.stores.redis.codec import NS_PER_US
from ratekeeper.decide.stores.redis.config import RedisConfig
from ratekeeper.decide.stores.redis.driver import Links
from ratekeeper.decide.stores.redis.scripts import CELL, SERVER_TIME, ScriptCall, ScriptTime

_NS_PER_MS = 1_000_000


class RedisCells:
    """The cells of one Redis. See Cells for its methods. Each is one round trip."""

    def __init__(self, config: RedisConfig, clock: Clock, links: Links) -> None:
        self._head = config.prefix.encode() + b":cells:{"
        self._clock = clock
        self._by_server_clock = type(clock) is SystemClock
        self._links = links

    async def read(self, name: str) -> tuple[bytes | None, int]:
        """See Cells."""
        now_ns, value = await self._run(name)
        if value is not None and not isinstance(value, bytes):
            raise _invalid(value)
        return value, now_ns

    async def write(self, name: str, expected: bytes | None, value: bytes, lasts_ns: int) -> bool:
        """See Cells. The time is rounded up to a whole millisecond."""
        require_cell_value(name, value, lasts_ns)
        given = (value, -(-lasts_ns // _NS_PER_MS))
        _, written = await self._run(name, *(given if expected is None else (*given, expected)))
        if written not in (0, 1):
            raise _invalid(written)
        return bool(written)

    async def _run(self, name: str, *arguments: bytes | int) -> tuple[int, Any]:
        """Run the script; return the server's time and the second part of the reply."""
        call = ScriptCall(CELL, self._key(name), (self._now(), *arguments))
        reply = await run_async(self._links.of_loop().running(call))
        if len(reply) != 2 or type(reply[0]) is not int:
            raise _invalid(reply)
        return reply[0] * NS_PER_US, reply[1]

    def _key(self, name: str) -> bytes:
        require_cell_name(name)
        text = name.encode()
        # A name may contain braces, which would choose another slot or none.
        return b"%b%b}:%b" % (
            self._head,
            blake2b(text, digest_size=4).hexdigest().encode(),
            text,
        )

    def _now(self) -> ScriptTime:
        """Return the time argument of the script: that of a test's clock."""
        if self._by_server_clock and switches.clock is None:
            return SERVER_TIME
        return max(self._clock.now_ns(), 0) // NS_PER_US


def _invalid(reply: object) -> StoreUnavailable:
    return StoreUnavailable(f"the server's reply is not one of the script: {show(reply)}")
