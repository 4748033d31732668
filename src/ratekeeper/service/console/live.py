"""The live stream of the console, `GET /console/live`: server-sent events every two seconds.

    id: 1767225602.25
    event: activity
    data: {"complete": false, "at": [1767225602.25], …}    the new steps, for the charts

    event: status
    data: <section id="…">…                                  the state, as the page shows it

**Cost.** A worker computes the events once for all its streams, and only while it has streams. The
number of streams is bounded: of a worker, of a token, and of all readers. A browser that reads too
slowly is disconnected.

**No gap.** A browser sends the time of the last step that it has (`since`), so a stream begins with
the steps that it missed. The stream subscribes to events before it computes its first answer; the
browser skips a step that it already has.

**The end.** A stream ends when its session ends, when the service drains, and when the browser
leaves. The browser connects again, also after STALE_SECONDS without an event: see console.js.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute

from ratekeeper.service.console.client import AdminClient, ApiProblem
from ratekeeper.service.console.findings import findings
from ratekeeper.service.console.views import Console, Page, json_of, session_of, view
from ratekeeper.service.http.tokens import Token

TICK_SECONDS: Final = 2.0
# How often a worker checks whether it is about to end; a shutdown waits for its streams.
LOOK_SECONDS: Final = 0.2
STREAMS_MAX: Final = 64
# The streams of one token, and those of tokens with the role read: the rest is for admins.
STREAMS_OF_TOKEN_MAX: Final = 16
STREAMS_OF_READERS_MAX: Final = 48
# Events that a browser has not read yet.
_WAITING_MAX: Final = 8
_RETRY_SECONDS: Final = 10
# A comment keeps the connection open if there are no events.
_KEEP_ALIVE: Final = b": no news\n\n"
# A window of 4 kB: a compressor has some 20 kB of memory, and steps repeat names and zeros.
_WINDOW_BITS: Final = 12
_GZIP: Final = 16

log = logging.getLogger("ratekeeper.console")

_Queue = asyncio.Queue[bytes | None]


def routes() -> list[BaseRoute]:
    """Return the route of the stream."""
    return [view("/live", stream)]


class TooManyStreams(Exception):
    """This worker has as many streams as it may have."""


class LiveFeed:
    """Computes the events of one worker, for all its streams."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # All operators may read the events, so they are computed once for all of them.
        self._api = AdminClient(console.admin, Token("console", "read"))
        self._queues: dict[_Queue, Token] = {}
        """The streams, and the tokens that opened them."""
        self._since: float | None = None
        """The last step that all streams have."""
        self._has_sent = False
        self._task: asyncio.Task[None] | None = None

    @property
    def is_ending(self) -> bool:
        """True if this worker takes no new streams and ends those that it has."""
        context = self._console.context
        return context.stopping or context.closing

    @contextmanager
    def subscribed(self, token: Token) -> Iterator[_Queue]:
        """Return a queue that gets all events from now on; None is the end.

        Raises TooManyStreams.
        """
        if self.is_ending or not self._has_room(token):
            raise TooManyStreams
        queue: _Queue = asyncio.Queue(_WAITING_MAX)
        self._queues[queue] = token
        try:
            yield queue
        finally:
            del self._queues[queue]
            if not self._queues and self._task is not None:
                self._task.cancel()
                self._task = self._since = None
                self._has_sent = False

    def _has_room(self, token: Token) -> bool:
        open_now = list(self._queues.values())
        of_token = sum((each.name, each.sha256) == (token.name, token.sha256) for each in open_now)
        of_readers = sum(each.role != "admin" for each in open_now)
        return (
            len(open_now) < STREAMS_MAX
            and of_token < STREAMS_OF_TOKEN_MAX
            and (token.role == "admin" or of_readers < STREAMS_OF_READERS_MAX)
        )

    async def first(self, since: float | None) -> bytes:
        """Return the events with which a stream begins. Raises ApiProblem."""
        found, last = await self._events(since)
        if not self._has_sent and last is not None:
            # The first tick has all steps that one of the streams does not have.
            self._since = last if self._since is None else min(self._since, last)
        if self._task is None:
            self._task = asyncio.create_task(self._keep_sending())
        return found

    async def _events(self, since: float | None) -> tuple[bytes, float | None]:
        """Return the state and all steps after a time, and the time of the last step."""
        activity = await self._api.get("/activity", since=since)
        status = event("status", status_of(self._console, activity["now"]))
        steps = {name: value for name, value in activity.items() if name != "now"}
        if not activity["at"]:
            return (
                event("activity", json_of(steps)) if activity["complete"] else b""
            ) + status, since
        last = activity["at"][-1]
        return event("activity", json_of(steps), str(last)) + status, last

    async def _keep_sending(self) -> None:
        """Send the events of each tick to all streams, until this worker is about to end."""
        loop = asyncio.get_running_loop()
        tick_s = loop.time() + TICK_SECONDS
        while not self.is_ending:
            if loop.time() < tick_s:
                await asyncio.sleep(LOOK_SECONDS)
                continue
            tick_s = loop.time() + TICK_SECONDS
            self._send(await self._tick())
        self._send(None)

    async def _tick(self) -> bytes:
        try:
            found, self._since = await self._events(self._since)
        except ApiProblem as problem:
            log.warning("the live stream of the console: %s", problem.detail)
            return _KEEP_ALIVE
        except Exception:
            log.exception("a defect in the live stream of the console")
            return _KEEP_ALIVE
        self._has_sent = True
        return found

    def _send(self, found: bytes | None) -> None:
        for queue in self._queues:
            if queue.full():
                # The browser does not read. It gets the missed steps when it connects again.
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(found)


def status_of(console: Console, now: Mapping[str, Any]) -> str:
    """Return the findings and the cards of the state as HTML."""
    return "".join(
        console.templates.get_template(name).render(now=now, findings=findings(now))
        for name in ("overview_findings.html", "overview_status.html")
    )


def event(name: str, data: str, number: str = "") -> bytes:
    """Return a server-sent event.

    >>> event("status", "<p>\\n</p>")
    b'event: status\\ndata: <p>\\ndata: </p>\\n\\n'
    """
    lines = [f"id: {number}"] if number else []
    lines += [f"event: {name}", *(f"data: {line}" for line in data.splitlines())]
    return ("\n".join(lines) + "\n\n").encode("utf-8", "replace")


async def stream(page: Page) -> Response:
    """Answer with the stream."""
    feed: LiveFeed = page.request.app.state.live
    since = _since(page.query("since") or page.request.headers.get("last-event-id", ""))
    zipped = "gzip" in page.request.headers.get("accept-encoding", "")
    events = _events(page, feed, since)
    try:
        first = await anext(events)
    except TooManyStreams:
        detail = "this worker has no room for another live stream; the page asks again"
        return Response(detail, 503, {"Retry-After": str(_RETRY_SECONDS)}, media_type="text/plain")
    headers = {"X-Accel-Buffering": "no"}
    if zipped:
        headers["Content-Encoding"] = "gzip"
    return StreamingResponse(
        _bytes(first, events, zipped=zipped), headers=headers, media_type="text/event-stream"
    )


def _since(given: str) -> float | None:
    try:
        found = float(given)
    except ValueError:
        return None
    return found if 0 <= found < float("inf") else None


async def _events(page: Page, feed: LiveFeed, since: float | None) -> AsyncIterator[bytes]:
    """Yield the events of one stream until its end."""
    with feed.subscribed(page.session.token) as queue:
        yield await feed.first(since)
        while (found := await queue.get()) is not None:
            if await session_of(page.request) is None:
                yield event("end", "session")
                return
            yield found


async def _bytes(
    first: bytes, events: AsyncIterator[bytes], *, zipped: bool
) -> AsyncIterator[bytes]:
    zipper = zlib.compressobj(wbits=_WINDOW_BITS + _GZIP) if zipped else None

    def sent(found: bytes) -> bytes:
        if zipper is None:
            return found
        return zipper.compress(found) + zipper.flush(zlib.Z_SYNC_FLUSH)

    yield sent(first)
    async for found in events:
        yield sent(found)
