"""Do replicas hold what their primaries hold? A sample of keys, compared field by field.

A replica is behind its primary by what is on the way, so a difference is at first no more than a
suspicion. Whoever is suspected is looked at once more, in an order that leaves no doubt: the key on
the primary; the primary's place in its stream of changes; then, when the replica says that it has
come to that place, the key there; and the key on the primary again. If the primary said the same
both times and the replica something else, they have drifted apart: nothing on the way explains it.
A key that changed meanwhile says nothing, and is counted as unsettled.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tollkeeper.decide.stores.redis.config import Address
from tollkeeper.decide.stores.redis.reconcile import VENDOR_ERRORS, asked, error_of, telling_errors
from tollkeeper.decide.stores.redis.topology import Topology

KEYS_PER_TRIP: Final = 100
# Keys that the replica names itself: what is there and not on the primary is drift too.
OWN_KEYS_MAX: Final = 50
CATCH_UP_SECONDS_MAX: Final = 2.0
_CATCH_UP_PAUSE_SECONDS: Final = 0.02
REPLICAS_MAX: Final = 32
# Replicas are told the time that a key expires at: theirs differs by what their clock does.
EXPIRY_MS_APART_MAX: Final = 5_000

_REPLICA: Final = re.compile(r"slave\d+")


@dataclass(slots=True)
class Compared:
    """One replica, beside its primary."""

    primary: str
    replica: str
    compared: int = 0
    drifted: list[tuple[bytes, str]] = field(default_factory=list)
    """Keys, and how they differ."""
    unsettled: int = 0
    """Keys that differed at first, and that changed while they were looked at again."""
    behind: bool = False
    """Did it not come to where its primary was, in CATCH_UP_SECONDS_MAX?"""
    error: str = ""
    """Why it could not be asked."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A key as one server has it."""

    fields: Any
    ttl_ms: int

    def differs(self, other: _Copy) -> str:
        """How, in words; empty: it does not."""
        if (self.ttl_ms == -2) != (other.ttl_ms == -2):
            return (
                "it is not there" if other.ttl_ms == -2 else "it is there, and not on the primary"
            )
        if self.fields != other.fields:
            return "its fields differ"
        if (self.ttl_ms == -1) != (other.ttl_ms == -1):
            return "only one of the two expires"
        apart_ms = abs(self.ttl_ms - other.ttl_ms)
        if apart_ms > EXPIRY_MS_APART_MAX:
            return f"it expires {apart_ms / 1_000:,.0f} s apart"
        return ""


def compare(
    topology: Topology,
    primary: Address,
    keys: Sequence[bytes],
    prefix: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Compared]:
    """A primary's sample of keys, on each of its replicas. Raises StoreError for the primary."""
    with telling_errors(primary):
        found = _replicas(topology.client(primary))
    return [_Pair(topology, primary, each, prefix, sleep).compared(keys) for each in found]


def _replicas(client: Any) -> list[Address]:
    info = client.execute_command("INFO", "replication")
    told = [info[name] for name in info if _REPLICA.fullmatch(name)]
    found = [Address(str(each["ip"]), int(each["port"])) for each in told if each.get("port")]
    return found[:REPLICAS_MAX]


class _Pair:
    """A primary and one of its replicas."""

    def __init__(
        self,
        topology: Topology,
        primary: Address,
        replica: Address,
        prefix: str,
        sleep: Callable[[float], None],
    ) -> None:
        self._address = replica
        self._primary: Any = topology.client(primary)
        self._replica: Any = topology.client(replica)
        self._pattern = prefix.encode() + b":{*"
        self._sleep = sleep
        self._found = Compared(str(primary), str(replica))

    def compared(self, keys: Sequence[bytes]) -> Compared:
        try:
            wanted = list(dict.fromkeys((*keys, *self._own_keys())))
            before = self._copies(self._primary, wanted)
            there = self._copies(self._replica, wanted, of_replica=True)
            self._found.compared = len(wanted)
            suspected = [key for key in wanted if before[key].differs(there[key])]
            if suspected:
                self._settle(suspected)
        except VENDOR_ERRORS as error:
            self._found.error = str(error_of(self._address, error))
        return self._found

    def _own_keys(self) -> list[bytes]:
        how = ("MATCH", self._pattern, "COUNT", OWN_KEYS_MAX)
        _, found = self._replica.execute_command("SCAN", 0, *how)
        return list(found)[:OWN_KEYS_MAX]

    def _settle(self, keys: Sequence[bytes]) -> None:
        before = self._copies(self._primary, keys)
        self._found.behind = not self._caught_up()
        there = self._copies(self._replica, keys, of_replica=True)
        after = self._copies(self._primary, keys)
        for key in keys:
            how = before[key].differs(there[key])
            if before[key].differs(after[key]):
                self._found.unsettled += 1
            elif how:
                self._found.drifted.append((key, how))

    def _caught_up(self) -> bool:
        """Wait until the replica has come to where the primary is now."""
        wanted = self._primary.execute_command("INFO", "replication").get("master_repl_offset", 0)
        until_s = time.monotonic() + CATCH_UP_SECONDS_MAX
        while True:
            info = self._replica.execute_command("INFO", "replication")
            if info.get("slave_repl_offset", -1) >= wanted:
                return True
            if time.monotonic() >= until_s:
                return False
            self._sleep(_CATCH_UP_PAUSE_SECONDS)

    def _copies(
        self, client: Any, keys: Sequence[bytes], *, of_replica: bool = False
    ) -> Mapping[bytes, _Copy]:
        found: dict[bytes, _Copy] = {}
        for start in range(0, len(keys), KEYS_PER_TRIP):
            some = keys[start : start + KEYS_PER_TRIP]
            # A cluster's replica sends readers to its primary, unless they say that they know.
            # Where there is no cluster it is an error, and no matter.
            first = [("READONLY",)] if of_replica else []
            replies = asked(
                client, [*first, *((word, key) for key in some for word in ("HGETALL", "PTTL"))]
            )[len(first) :]
            for place, key in enumerate(some):
                fields, ttl_ms = replies[2 * place : 2 * place + 2]
                # What is no hash is an error on both: compared as its text.
                same = fields if isinstance(fields, dict) else str(fields)
                found[key] = _Copy(same, ttl_ms if isinstance(ttl_ms, int) else -2)
        return found
