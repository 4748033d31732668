"""The live stream of `console/live.py`."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest

from ratekeeper.service.console import live
from ratekeeper.service.console.live import LiveFeed
from ratekeeper.service.console.views import COOKIE
from ratekeeper.service.http.activity import Step
from ratekeeper.service.http.tokens import Token
from tests.service.console.client import ConsoleClient

WAIT_S = 30.0


class Stream:
    """A browser that reads a stream. httpx would wait for the end of the answer."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.left = asyncio.Event()
        self._unzip: Any = None
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue()
        self._text = ""
        self.has_ended = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        """Return the empty body, then wait until the browser leaves."""
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Take a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            if self.headers.get("content-encoding") == "gzip":
                self._unzip = zlib.decompressobj(31)
            return
        body = message.get("body", b"")
        self._chunks.put_nowait(self._unzip.decompress(body) if self._unzip else body)
        if not message.get("more_body"):
            self.has_ended.set()

    async def event(self, name: str) -> str:
        """Return the data of the next event of this name; skip others."""
        async with asyncio.timeout(WAIT_S):
            while True:
                while "\n\n" not in self._text:
                    self._text += (await self._chunks.get()).decode()
                block, _, self._text = self._text.partition("\n\n")
                lines = block.split("\n")
                if f"event: {name}" in lines:
                    return "\n".join(each[6:] for each in lines if each.startswith("data: "))

    async def end(self) -> None:
        """Wait until the service ends the stream."""
        async with asyncio.timeout(WAIT_S):
            await self.has_ended.wait()


@asynccontextmanager
async def opened(console: ConsoleClient, query: str = "", **headers: str) -> AsyncIterator[Stream]:
    """Open a stream with the cookie of a client."""
    sent = {"host": "localhost", "cookie": f"{COOKIE}={console.cookie}", **headers}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "GET",
        "scheme": "http",
        "path": "/console/live",
        "raw_path": b"/console/live",
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in sent.items()],
        "client": ("127.0.0.1", 5000),
        "server": ("localhost", 80),
    }
    found = Stream()
    task = asyncio.create_task(console.service(scope, found.receive, found.send))
    try:
        yield found
    finally:
        found.left.set()
        async with asyncio.timeout(WAIT_S):
            await task


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.01)


@pytest.fixture
def steps(console: ConsoleClient, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Return the steps of the node, which a test may extend."""
    found = [Step(1_000.0 + 2 * i, 2.0, {"allowed": i}) for i in range(3)]
    monkeypatch.setattr(console.context.activity, "steps", lambda: list(found))
    return found


def feed_of(console: ConsoleClient) -> LiveFeed:
    """Return the feed of the service, which answers its first request for the console before."""
    found: LiveFeed = console.service._console.state.live
    return found


async def times(stream: Stream) -> list[float]:
    """Return the times of the steps of the next event."""
    found: list[float] = json.loads(await stream.event("activity"))["at"]
    return found


async def test_a_stream_begins_with_all_steps_and_the_state(
    console: ConsoleClient, steps: list[Step]
) -> None:
    """The first event has everything; each new step follows once."""
    async with opened(console) as stream:
        first = json.loads(await stream.event("activity"))
        assert (first["complete"], first["at"]) == (True, [1_000.0, 1_002.0, 1_004.0])
        assert first["checks"]["allowed"] == [0, 1, 2]
        assert "now" not in first
        assert 'id="status-store"' in await stream.event("status")
        steps.append(Step(1_006.0, 2.0))
        assert await times(stream) == [1_006.0]
        steps.append(Step(1_008.0, 2.0))
        assert await times(stream) == [1_008.0]
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers["cache-control"] == "no-store"


async def test_a_stream_continues_after_the_last_step_of_the_browser(
    console: ConsoleClient, steps: list[Step]
) -> None:
    """By the query, or by the header that an EventSource sends; a strange value begins anew."""
    async with opened(console, "since=1002.0") as stream:
        assert await times(stream) == [1_004.0]
    async with opened(console, last_event_id="1002.0") as stream:
        assert await times(stream) == [1_004.0]
    for odd in ("x", "-1", "nan", "inf", "1e999", "5"):
        async with opened(console, f"since={odd}") as stream:
            assert await times(stream) == [each.at_s for each in steps]


async def test_a_new_stream_takes_no_step_from_the_others(
    console: ConsoleClient, steps: list[Step]
) -> None:
    """A step that a new stream has at first reaches the older ones with the next tick."""
    async with opened(console) as old:
        await times(old)
        steps.append(Step(1_006.0, 2.0))
        async with opened(console) as new:
            assert (await times(new))[-1] == 1_006.0
            assert await times(old) == [1_006.0]


async def test_one_computation_serves_all_streams(
    console: ConsoleClient, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten streams cost ten first answers, and then one call for each tick."""
    await console.get("/audit")
    feed = feed_of(console)
    asked: list[Any] = []
    ticks: list[bytes] = []
    called, tick = feed._api.get, feed._tick

    async def counted(path: str, **query: Any) -> Any:
        asked.append((path, query.get("since")))
        return await called(path, **query)

    async def ticked() -> bytes:
        ticks.append(await tick())
        return ticks[-1]

    monkeypatch.setattr(feed._api, "get", counted)
    monkeypatch.setattr(feed, "_tick", ticked)
    streams = [opened(console) for _ in range(10)]
    found = [await each.__aenter__() for each in streams]
    for stream in found:
        await times(stream)
    steps.append(Step(1_006.0, 2.0))
    for stream in found:
        assert await times(stream) == [1_006.0]
    later = [since for path, since in asked if path == "/activity" and since is not None]
    assert asked.count(("/activity", None)) == 10
    assert len(ticks) <= len(later) <= len(ticks) + 1
    for each in streams:
        await each.__aexit__(None, None, None)
    assert feed._task is None


async def test_the_number_of_streams_is_bounded(
    console: ConsoleClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more is asked to come later; after one has left there is room again."""
    monkeypatch.setattr(live, "STREAMS_MAX", 1)
    async with opened(console) as first:
        await first.event("status")
        async with opened(console) as second:
            await second.end()
        assert (second.status, second.headers["retry-after"]) == (503, "10")
    async with opened(console) as third:
        await third.event("status")


async def test_the_streams_of_a_reader_leave_room(
    console: ConsoleClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token has a part of the streams, and readers together leave some to admins."""
    monkeypatch.setattr(live, "STREAMS_OF_TOKEN_MAX", 2)
    monkeypatch.setattr(live, "STREAMS_OF_READERS_MAX", 3)
    await console.get("/audit")
    feed = feed_of(console)
    with ExitStack() as stack:
        for name in ("bob", "bob", "eve"):
            stack.enter_context(feed.subscribed(Token(name, "read")))
        for token in (Token("bob", "read"), Token("dan", "read")):
            with pytest.raises(live.TooManyStreams), feed.subscribed(token):
                pass
        for _ in range(2):
            stack.enter_context(feed.subscribed(Token("ann", "admin")))
        with pytest.raises(live.TooManyStreams), feed.subscribed(Token("ann", "admin")):
            pass


async def test_a_stream_ends_with_its_session(console: ConsoleClient) -> None:
    """An operator who logs out, or whose token is removed, gets nothing more."""
    async with opened(console) as stream:
        await stream.event("status")
        await console.post("/logout")
        assert await stream.event("end") == "session"
        await stream.end()
    async with opened(console, hx_request="true") as stream:
        await stream.end()
    assert stream.status == 401


@pytest.mark.parametrize("flag", ["stopping", "closing"])
async def test_a_stream_ends_when_the_service_drains(console: ConsoleClient, flag: str) -> None:
    """And the worker takes no new one."""
    async with opened(console) as stream:
        await stream.event("status")
        setattr(console.context, flag, True)
        await stream.end()
        async with opened(console) as late:
            await late.end()
        assert late.status == 503


async def test_a_browser_that_leaves_costs_nothing(console: ConsoleClient) -> None:
    """The worker stops computing with its last stream."""
    async with opened(console) as stream:
        await stream.event("status")
        assert feed_of(console)._task is not None
    assert feed_of(console)._task is None
    assert not feed_of(console)._queues


async def test_a_browser_that_does_not_read_is_disconnected(console: ConsoleClient) -> None:
    """What waits for it is bounded; it gets what it missed when it connects again."""
    await console.get("/audit")
    feed = feed_of(console)
    with feed.subscribed(Token("ann", "admin")) as queue:
        for _ in range(20):
            feed._send(b"event")
        assert queue.qsize() <= 8
        assert await queue.get() is None


async def test_the_stream_is_compressed(console: ConsoleClient) -> None:
    """Each event can be read when it arrives."""
    async with opened(console, accept_encoding="gzip, br") as stream:
        await stream.event("status")
        await stream.event("status")
    assert stream.headers["content-encoding"] == "gzip"


async def test_a_problem_of_a_tick_is_not_the_end(
    console: ConsoleClient, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream goes on when the admin API answers again."""
    async with opened(console) as stream:
        await times(stream)
        failing = time.monotonic() + 0.1

        def sometimes() -> list[Step]:
            if time.monotonic() < failing:
                raise RuntimeError("a defect")
            return list(steps)

        monkeypatch.setattr(console.context.activity, "steps", sometimes)
        steps.append(Step(1_006.0, 2.0))
        assert await times(stream) == [1_006.0]
