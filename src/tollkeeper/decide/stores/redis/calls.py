"""One call of a script: how it is written to a server, and what to do when it is refused.

A call must never be charged twice. So it is sent again only after an answer that says that it did
not run: a redirection, a script not known, a server that is loading. After a timeout or a broken
connection nobody knows, and the caller is told so; it may have been charged once.

What to do after each refusal is worked out here, in one generator without any I/O, which the
threaded and the asyncio wire both carry out.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from random import random
from typing import Any, Final, cast

from hiredis import ReplyError, pack_command

from tollkeeper.core.errors import StoreError, StoreFull, StoreUnavailable, show
from tollkeeper.decide.stores.redis.config import Address, RedisConfig
from tollkeeper.decide.stores.redis.scripts import Script

# A refused call goes out again at most so often. A slot on the move takes two or three.
ATTEMPTS_MAX: Final = 16
# The first pause before a call goes out again; each doubles, up to the longest.
PAUSE_S_MIN: Final = 0.001
PAUSE_S_MAX: Final = 0.032

# Refusals that pass by themselves: a cluster electing, keys of a slot on the move, a server that
# reads its file, another client's script that takes long.
_PASSING: Final = frozenset({"TRYAGAIN", "CLUSTERDOWN", "LOADING", "BUSY", "MASTERDOWN"})


def pack(*parts: str | bytes | int) -> bytes:
    """One command as it goes over the wire."""
    return cast("bytes", pack_command(parts))  # type: ignore[arg-type]  # its stub takes no tuples


ASKING: Final = pack("ASKING")


@dataclass(frozen=True, slots=True)
class Call:
    """A script to run on one subject's hash."""

    script: Script
    key: bytes
    arguments: tuple[bytes | int, ...]

    def by_sha(self) -> bytes:
        """The command that names the script."""
        return pack("EVALSHA", self.script.sha, 1, self.key, *self.arguments)

    def by_text(self) -> bytes:
        """The command that carries the script, for a server that does not know it yet."""
        return pack("EVAL", self.script.text, 1, self.key, *self.arguments)


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to the node at `address`; None: the one that has the key's slot."""

    payload: bytes
    address: Address | None = None
    asking: bool = False


@dataclass(frozen=True, slots=True)
class Refresh:
    """Find out anew where the servers are."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The key's slot is at another node from now on."""

    address: Address


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait."""

    seconds: float


Step = Send | Refresh | Moved | Pause


class NotSent(StoreUnavailable):
    """No connection: the call has not left this process, so it may be sent elsewhere."""


def recover(
    call: Call, refusal: ReplyError | NotSent, config: RedisConfig
) -> Generator[Step, Any, Any]:
    """The steps after a refusal; returns the answer in the end, or raises StoreError.

    Each Send is answered with the server's reply, which may be another refusal, or with a NotSent.
    """
    pause_s = PAUSE_S_MIN
    by_text = False
    refreshed = False
    for _ in range(ATTEMPTS_MAX):
        address, asking = None, False
        if isinstance(refusal, NotSent):
            # Once: the node may have gone and another taken its place, or it may just be down.
            if refreshed or config.mode == "standalone":
                raise refusal
            refreshed = True
            yield Refresh()
        else:
            word, _, rest = str(refusal).partition(" ")
            if word == "NOSCRIPT":
                by_text = True
            elif word in {"MOVED", "ASK"}:
                address = _address_in(rest, config, refusal)
                asking = word == "ASK"
                if not asking:
                    yield Moved(address)
            elif word in _PASSING or (word == "READONLY" and config.mode != "standalone"):
                # A little at random, so that all who were refused together do not return so.
                yield Pause(pause_s * (0.5 + random()))  # noqa: S311 - no secret hangs on it
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
                if word != "TRYAGAIN":
                    yield Refresh()
            else:
                raise refusal_error(refusal, config)
        payload = call.by_text() if by_text else call.by_sha()
        answer = yield Send(payload, address, asking)
        if not isinstance(answer, ReplyError | NotSent):
            return answer
        refusal = answer
    raise refusal if isinstance(refusal, NotSent) else refusal_error(refusal, config)


def _address_in(rest: str, config: RedisConfig, refusal: ReplyError) -> Address:
    """The node that a redirection such as `MOVED 3999 10.0.0.7:6381` points at.

    A node that does not know its own name leaves the host out: then it is the one that was asked.
    """
    if config.mode != "cluster":
        raise StoreUnavailable(
            f"{config.shown()} is a node of a cluster; use redis+cluster://"
        ) from refusal
    host, colon, port = rest.rpartition(" ")[2].rpartition(":")
    if not colon or not port.isdecimal() or not 1 <= int(port) <= 65_535:
        raise StoreUnavailable(
            f"{config.shown()} redirects to nowhere: {show(str(refusal))}"
        ) from refusal
    return Address(host.strip("[]"), int(port))


def refusal_error(refusal: ReplyError, config: RedisConfig) -> StoreError:
    """A server's refusal as our error, with what would mend it."""
    said, repeated, _ = str(refusal).partition(_REPEATED)
    word = "NOPERM" if any(each in said for each in _NOPERM_IN_SCRIPT) else said.partition(" ")[0]
    error: StoreError
    if word == "OOM":
        error = StoreFull(
            f"{config.shown()} is out of memory (maxmemory) and refuses new states; "
            f"raise maxmemory, or add nodes"
        )
    else:
        hint = _HINTS.get(word, "")
        error = StoreUnavailable(f"{config.shown()} refuses: {said[:200]}{hint}")
    # Its traceback would show what the message leaves out.
    error.__cause__ = None if repeated else refusal
    return error


# A server that does not know AUTH repeats what follows it, which is the password.
_REPEATED: Final = ", with args beginning with"
# A right that is missing inside of a script: Redis 7.0, and later ones.
_NOPERM_IN_SCRIPT: Final = ("The user executing the script can't", "ACL failure in script")

_HINTS: Final = {
    "NOAUTH": "; give username and password in the URI or as arguments",
    "WRONGPASS": "; check username and password",
    "NOPERM": "; the user needs ~<prefix>:* +eval +evalsha +script|load "
    "+hget +hset +hdel +pttl +pexpire +time",
    "READONLY": "; this is a replica: name the primary, or use redis+sentinel://",
    "MISCONF": "; Redis cannot write its snapshots: mend the disk, or see its log",
    "WRONGTYPE": "; another application has a key of that name: set prefix= to one of your own",
    "NOREPLICAS": "; fewer replicas than min-replicas-to-write are connected",
}
