"""What is said on a new connection before any call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hiredis import ReplyError

from tollkeeper.decide.stores.redis.calls import NotSent, pack, refusal_error
from tollkeeper.decide.stores.redis.config import Address, RedisConfig
from tollkeeper.decide.stores.redis.scripts import CHECK

Command = tuple[str | int | bytes, ...]


def greeting(config: RedisConfig) -> list[Command]:
    """The commands to send, all at once: each has one reply."""
    commands: list[Command] = []
    if config.password is not None:
        user = () if config.username is None else (config.username,)
        commands.append(("AUTH", *user, config.password))
    if config.db:
        commands.append(("SELECT", config.db))
    if config.mode == "sentinel":
        commands.append(("ROLE",))
    # Loaded ahead, so that no call needs a second trip; one that does still gets it.
    commands.append(("SCRIPT", "LOAD", CHECK.text))
    return commands


def payload(commands: Sequence[Command]) -> bytes:
    """Those commands as bytes."""
    return b"".join(pack(*command) for command in commands)


def check_replies(
    commands: Sequence[Command], replies: Sequence[object], address: Address, config: RedisConfig
) -> None:
    """Raise NotSent if the server will not serve us."""
    for command, reply in zip(commands, replies, strict=True):
        if isinstance(reply, ReplyError):
            # A script that could not be loaded ahead goes along with the call that needs it.
            if command[0] != "SCRIPT" or str(reply).startswith(_FINAL):
                error = refusal_error(reply, config)
                raise NotSent(str(error)) from error.__cause__
        elif command[0] == "ROLE" and isinstance(reply, list) and reply[0] != b"master":
            raise NotSent(f"{address} is not the primary any more")


# What a server says to whatever comes first, and hangs up or goes on saying so.
_FINAL: Final = ("LOADING", "NOAUTH", "DENIED", "ERR max number of clients")
