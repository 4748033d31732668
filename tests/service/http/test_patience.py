"""A client that sends half of a body does not keep its place for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.service.http.asking import Asking, asking
from tollkeeper.service.http import patience

SECONDS_MAX = 10.0


async def half(ask: Asking, said: list[Any]) -> None:
    """Half of a body, and then nothing."""
    pieces = [b'{"user":']

    async def receive() -> dict[str, Any]:
        if not pieces:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": pieces.pop(), "more_body": True}

    async def send(message: Any) -> None:
        said.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/check",
        "query_string": b"",
        "headers": [(b"content-length", b"100")],
    }
    await ask.service(scope, receive, send)


async def settled() -> None:
    """Everybody has had a turn."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_who_waits_too_long_is_answered_408() -> None:
    """Not before the time is over; the connection is closed, and the list is empty again."""
    async with asking() as ask:
        said: list[Any] = []
        waiting = asyncio.create_task(half(ask, said))
        await settled()
        looking = ask.service._patience
        looking.look(SECONDS_MAX)
        await settled()
        assert not said
        looking.look(1.0)
        await asyncio.wait_for(waiting, 5)
        assert said[0]["status"] == 408
        assert (b"connection", b"close") in said[0]["headers"]
        assert not looking.waiting
        assert not looking._interrupted


async def test_a_crowd_that_waits_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are few: who takes them all with bodies that never come has them for a moment."""
    monkeypatch.setattr(patience, "CROWD", 2)
    async with asking() as ask:
        said: list[Any] = []
        waiting = [asyncio.create_task(half(ask, said)) for _ in range(2)]
        await settled()
        looking = ask.service._patience
        looking.look(2.0)
        await settled()
        assert not said, "two are no crowd"
        waiting.append(asyncio.create_task(half(ask, said)))
        await settled()
        looking.look(0.5)
        await asyncio.wait(waiting[:2], timeout=5)
        assert [each["status"] for each in said if "status" in each] == [408, 408]
        assert not waiting[2].done(), "it has just come"
        waiting[2].cancel()


async def test_whoever_is_cancelled_by_others_is_cancelled() -> None:
    """The server's own word is not taken for impatience."""
    async with asking() as ask:
        said: list[Any] = []
        waiting = asyncio.create_task(half(ask, said))
        await settled()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not said
        assert not ask.service._patience.waiting


async def test_an_ordinary_request_leaves_no_trace() -> None:
    """Nobody waits once the body is there; a check that takes long is not interrupted."""
    async with asking() as ask:
        assert (await ask.check(user="1")).status == 200
        assert not ask.service._patience.waiting


async def test_the_list_is_looked_at_while_the_service_runs() -> None:
    """Time passes by itself."""
    async with asking() as ask:
        patience = ask.service._patience
        looking = asyncio.create_task(patience.keep_looking(0.001))
        while patience.now_s < 0.003:  # noqa: ASYNC110 - time, and no event, is waited for
            await asyncio.sleep(0)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking
