"""Messages without a server. With servers: tests/integration/test_redis_pubsub.py."""

from __future__ import annotations

from typing import Any

import pytest

from ratekeeper.decide.stores.redis import pubsub
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.pubsub import register
from ratekeeper.decide.stores.redis.topology import Topology

CONFIG = parse("redis://:s3cret@127.0.0.1:1")


def served(monkeypatch: pytest.MonkeyPatch, held: dict[bytes, bytes]) -> list[tuple[Any, ...]]:
    """Answer the commands of `register` from a hash; return a list that fills with them."""
    sent: list[tuple[Any, ...]] = []

    def reply(_: Any, commands: list[tuple[Any, ...]]) -> list[Any]:
        sent.extend(commands)
        fixed = {"TIME": (b"1", b"0"), "HKEYS": list(held), "PTTL": 5}
        return [held[each[2]] if each[0] == "HGET" else fixed.get(each[0], 1) for each in commands]

    def at_key(_: Any, __: Any, ___: str, call: Any) -> Any:
        return call(None)

    monkeypatch.setattr(pubsub, "pipelined", reply)
    monkeypatch.setattr(pubsub, "_at_key", at_key)
    return sent


def test_rubbish_in_the_list_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digit that int() does not take, too many digits, no time at all."""
    rubbish = {b"1": "² x".encode(), b"2": b"9" * 5_000 + b" x", b"3": b"", b"4": b"\xff x"}
    sent = served(monkeypatch, {**rubbish, b"good": b"2000 y"})
    assert register(Topology(CONFIG), CONFIG, "k", "me", "mine", 10**9) == ["mine", "y"]
    assert sent[-1] == ("HDEL", "k", *rubbish)


def test_many_names_are_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet of N nodes does not send N reads for each; the parts differ."""
    names = {f"{each}".encode(): f"2000 {each}".encode() for each in range(500)}
    sent = served(monkeypatch, names)
    parts = [register(Topology(CONFIG), CONFIG, "k", "7", "mine", 10**9, 20) for _ in range(2)]
    assert [len(set(part)) for part in parts] == [20, 20]
    assert parts[0] != parts[1]
    assert all(part[0] == "mine" and "7" not in part for part in parts)
    assert sum(command[0] == "HGET" for command in sent) == 2 * 19
    assert len(register(Topology(CONFIG), CONFIG, "k", "7", "mine", 10**9)) == 500
