"""What is left of a body is taken in before an answer is sent, within bounds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tollkeeper.service.admin import draining
from tollkeeper.service.admin.draining import DROPPED_BYTES_MAX, Draining

MIB = b"x" * 2**20


class Exchange:
    """A client that sends these chunks, and what it saw in which order."""

    def __init__(self, chunks: int, headers: dict[str, str]) -> None:
        self.left = chunks
        self.seen: list[str] = []
        self.scope = {
            "type": "http",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }

    async def receive(self) -> dict[str, Any]:
        """The next chunk; after the last one, nothing ever comes."""
        if not self.left:
            await asyncio.Event().wait()
        self.left -= 1
        self.seen.append("chunk")
        return {"type": "http.request", "body": MIB, "more_body": self.left > 0}

    async def send(self, message: dict[str, Any]) -> None:
        """Note it."""
        self.seen.append(message["type"].rpartition(".")[2])

    async def run(self, reads: int) -> list[str]:
        """An application that reads so many chunks and answers."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            for _ in range(reads):
                await receive()
            await send({"type": "http.response.start", "status": 413})
            await send({"type": "http.response.body"})

        await Draining(app)(self.scope, self.receive, self.send)  # type: ignore[arg-type]  # loose
        return self.seen


@pytest.mark.parametrize("reads", [0, 1, 3])
async def test_what_is_left_is_read_first(reads: int) -> None:
    """Whether the application has read nothing, some or all of it."""
    seen = await Exchange(3, {"content-length": str(3 * len(MIB))}).run(reads)
    assert seen == ["chunk", "chunk", "chunk", "start", "body"]


async def test_a_body_without_a_length_is_read_as_far_as_one_with() -> None:
    """To its end, or to the bound."""
    seen = await Exchange(4, {"transfer-encoding": "chunked"}).run(0)
    assert seen == [*["chunk"] * 4, "start", "body"]
    seen = await Exchange(1_000, {"transfer-encoding": "chunked"}).run(0)
    assert seen.count("chunk") == DROPPED_BYTES_MAX // len(MIB) + 1


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-length": "0"},
        {"content-length": str(DROPPED_BYTES_MAX + 1)},
        {"content-length": "9" * 30},
        {"content-length": "x"},
        {"content-length": "100", "expect": "100-continue"},
    ],
)
async def test_nothing_is_waited_for_in_vain(headers: dict[str, str]) -> None:
    """No body, one that is too long, and one that is sent only if it is wanted."""
    assert await Exchange(1, headers).run(0) == ["start", "body"]


async def test_a_client_that_stops_in_the_middle_gets_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a while."""
    monkeypatch.setattr(draining, "DROPPING_SECONDS_MAX", 0.01)
    exchange = Exchange(1, {"transfer-encoding": "chunked"})
    exchange.left = 0
    assert await exchange.run(0) == ["start", "body"]


async def test_few_are_waited_for_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers who never end their bodies do not get all places."""
    monkeypatch.setattr(draining, "DROPPING_MAX", 2)

    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401})

    around = Draining(app)
    endless = [Exchange(0, {"content-length": "10"}) for _ in range(3)]

    def asked(each: Exchange) -> asyncio.Task[None]:
        scope: Any = each.scope
        receive: Any = each.receive
        send: Any = each.send
        return asyncio.create_task(around(scope, receive, send))

    waiting = [asked(each) for each in endless]
    await asyncio.wait(waiting[2:], timeout=5)
    assert [each.seen for each in endless] == [[], [], ["start"]]
    for task in waiting[:2]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert around._dropping == 0, "a place is free again"
