"""The list of Envoys of all workers: what each registers, and what one of them reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from ratekeeper import AsyncLimiter, StoreUnavailable
from ratekeeper.service.http import envoys
from ratekeeper.service.http.envoys import EnvoyDirectory, EnvoyPart, EnvoyStatus


class FakeChannel:
    """Keeps the texts in memory. `fails` makes every call fail."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.calls: list[int] = []
        self.fails = False

    def register(
        self, topic: str, name: str, text: str, lasts_ns: int, at_most: int
    ) -> Sequence[str]:
        assert topic == envoys.TOPIC
        assert lasts_ns > 2 * envoys.RENEW_S * 1e9
        if self.fails:
            raise StoreUnavailable("down")
        self.calls.append(at_most)
        self.texts[name] = text
        return list(self.texts.values())


class FakeLimiter:
    """As much of a limiter as the directory needs."""

    def __init__(self, channel: FakeChannel | None) -> None:
        self.store = self
        self.channel = channel
        self.is_local = channel is None


def directory(channel: FakeChannel | None, *names: str) -> EnvoyDirectory:
    limiter: Any = FakeLimiter(channel)
    found = EnvoyDirectory(limiter)
    part = EnvoyPart("tenant=acme", "tenants", "rate")
    streams = [EnvoyStatus(each, each, "n", 1, "shop", 1.5, 2.5, 1, [part]) for each in names]
    found.own = lambda: streams
    return found


async def test_a_worker_lists_the_envoys_of_all_workers() -> None:
    """It is sorted by name, and each stream is listed once."""
    channel = FakeChannel()
    await directory(channel, "c", "a").everyone()
    channel.texts["later version"] = '[{"envoy": 5}]'
    channel.texts["broken"] = "{"
    found = await directory(channel, "b").everyone()
    assert [each.envoy for each in found] == ["a", "b", "c"]
    assert found[0].parts == [EnvoyPart("tenant=acme", "tenants", "rate")]


async def test_without_a_channel_or_a_store_a_worker_lists_its_own() -> None:
    """An operator sees something in an outage."""
    channel = FakeChannel()
    await directory(channel, "a").everyone()
    channel.fails = True
    for each in (channel, None):
        assert [found.envoy for found in await directory(each, "b").everyone()] == ["b"]


async def test_the_registration_is_renewed_while_there_are_envoys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker without Envoys makes no call, except one after the last has gone."""
    pauses = 0

    async def pause(_: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 3:
            found.own = list
        if pauses == 6:
            raise asyncio.CancelledError

    channel = FakeChannel()
    found = directory(channel, "a")
    monkeypatch.setattr(envoys.asyncio, "sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        await found.renew()
    assert channel.calls == [1, 1, 1, 1]
    assert list(channel.texts.values()) == ["[]"]


async def test_a_limiter_in_memory_has_no_channel() -> None:
    """The directory of a real limiter works without one."""
    async with AsyncLimiter("1/second") as limiter:
        assert await EnvoyDirectory(limiter).everyone() == []
