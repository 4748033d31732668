"""Reading the bodies of requests, within the bounds of a worker.

A client needs no token to send a body, so every body is bounded by what its route needs, and none
is read before the bound is known: `BODY_BYTES_MAX` has a row for each route that takes one.

**Too large.** A body that is declared too large is rejected (413) before any of it is read. The
bytes of a chunked body are counted as they arrive. Many clients read no reply before they have
written the whole body. So the rest of a rejected body is read and dropped after the reply, if it
ends soon (`drop_rest`).

**Too many.** Bodies that arrive in parts share a number of bytes for all connections: a request
whose next part does not fit answers 503. Large bodies, which need a token, have a number of their
own, so that they cannot displace the checks of other clients. A body that arrives in one part is
never affected.

**Too small parts.** Each part costs the worker some 6 µs, however short it is. A body whose parts
are shorter than PART_BYTES on average, beyond an allowance, is rejected (400).

**Too slow.** A client that sends half a body must not occupy the worker for ever. A timer for each
check would cost a tenth of it, and almost no check needs one. Instead each request that waits for
its body is an entry in a dict, which a task examines once a second. A request that has waited too
long is cancelled and answers 408. When many requests wait for bodies, the timeout is much shorter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from ratekeeper.service.http.bodies import (
    incomplete,
    too_large,
    too_many_parts,
    too_slow,
    too_small_parts,
)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

# A check has a few hundred bytes, as has a form with a token.
CALL_BYTES: Final = 64 * 1024
LOGIN_BYTES: Final = 8 * 1024
# A batch of a hundred checks has about ten thousand.
BATCH_BYTES: Final = 2**20
DOCUMENT_BYTES: Final = 5 * 2**20
# A form encodes many characters of a document in three.
DOCUMENT_FORM_BYTES: Final = 16 * 2**20
# Written to a temporary file while it arrives.
FILE_BYTES: Final = 256 * 2**20

BODY_BYTES_MAX: Final[Mapping[tuple[str, str], int]] = {
    ("POST", "/v1/check"): CALL_BYTES,
    ("POST", "/v1/check/batch"): BATCH_BYTES,
    ("POST", "/v1/settle"): CALL_BYTES,
    ("POST", "/v1/release"): CALL_BYTES,
    ("POST", "/v1/limit"): CALL_BYTES,
    ("POST", "/v1/quota/grant"): CALL_BYTES,
    ("PUT", "/v1/admin/rules"): DOCUMENT_BYTES,
    ("POST", "/v1/admin/rules/validate"): DOCUMENT_BYTES,
    ("POST", "/v1/admin/rules/preview"): DOCUMENT_BYTES,
    ("PUT", "/v1/admin/rules/{id:path}"): DOCUMENT_BYTES,
    ("PATCH", "/v1/admin/rules/{id:path}"): DOCUMENT_BYTES,
    ("POST", "/v1/admin/rules/{id:path}/promote"): CALL_BYTES,
    ("POST", "/v1/admin/rules/{id:path}/demote"): CALL_BYTES,
    ("POST", "/v1/admin/versions/{number}/rollback"): CALL_BYTES,
    ("PUT", "/v1/admin/tiers/{name:path}"): CALL_BYTES,
    ("PUT", "/v1/admin/assignments/{subject:path}"): CALL_BYTES,
    ("POST", "/v1/admin/overrides"): CALL_BYTES,
    ("POST", "/v1/admin/lists/{list_name}"): CALL_BYTES,
    ("POST", "/v1/admin/entries/import"): FILE_BYTES,
    ("POST", "/v1/admin/quota/reset"): CALL_BYTES,
    ("POST", "/v1/admin/quota/grant"): CALL_BYTES,
    ("POST", "/v1/admin/explain"): CALL_BYTES,
    ("POST", "/v1/admin/load"): CALL_BYTES,
    ("PUT", "/v1/admin/regions"): CALL_BYTES,
    ("PUT", "/v1/admin/regions/{name}"): CALL_BYTES,
    ("POST", "/console/login"): LOGIN_BYTES,
    ("POST", "/console/logout"): LOGIN_BYTES,
    ("POST", "/console/sessions/end"): LOGIN_BYTES,
    ("POST", "/console/rules"): DOCUMENT_FORM_BYTES,
    ("POST", "/console/rules/check"): DOCUMENT_FORM_BYTES,
    ("POST", "/console/rules/preview"): DOCUMENT_FORM_BYTES,
    ("POST", "/console/rules/rule"): CALL_BYTES,
    ("POST", "/console/rules/versions/{number:int}/rollback"): CALL_BYTES,
    ("POST", "/console/try"): CALL_BYTES,
    ("POST", "/console/subjects"): CALL_BYTES,
    ("POST", "/console/subjects/change"): CALL_BYTES,
}
# Requests of other methods have a row if they take a body.
_TAKE_A_BODY: Final = frozenset({"POST", "PUT", "PATCH"})

# The bytes of all bodies of a worker that have arrived in part, and those of larger ones.
PARTIAL_BYTES_MAX: Final = 64 * 2**20
LARGE_PARTIAL_BYTES_MAX: Final = 48 * 2**20
PARTS_FREE: Final = 64
PART_BYTES: Final = 64

SECONDS_MAX: Final = 10.0
# A document of megabytes may come over a slow connection.
LARGE_SECONDS_MAX: Final = 30.0
CHECK_SECONDS: Final = 1.0
# When more requests wait than this, they get less time.
CROWD: Final = 256
CROWDED_SECONDS_MAX: Final = 1.0

DROPPED_BYTES_MAX: Final = 8 * 2**20
DROPPING_SECONDS_MAX: Final = 5.0
# How many requests may wait for the rest of a rejected body at a time.
DROPPING_MAX: Final = 64

_Task = asyncio.Task[Any]


def body_bytes_max(method: str, path: str) -> int:
    """Return the most bytes that the body of a route may have; 0: the route has no body.

    A route that could take a body needs a row in the table. Raises KeyError otherwise.
    """
    return BODY_BYTES_MAX[method, path] if method in _TAKE_A_BODY else 0


def declared_bytes(headers: Mapping[bytes, bytes]) -> int:
    """Return the length that a request declares; -1 if it declares none.

    >>> declared_bytes({b"content-length": b"12"}), declared_bytes({})
    (12, -1)
    """
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() and len(length) < 19 else -1


def check_declared(headers: Mapping[bytes, bytes], bytes_max: int) -> None:
    """Raise BodyRejected (413) if a body is declared too large."""
    if declared_bytes(headers) > bytes_max:
        raise too_large(bytes_max)


class IncomingBodies:
    """The bodies that a worker is reading. For one event loop."""

    def __init__(self, seconds_max: float = SECONDS_MAX) -> None:
        self.waiting: dict[_Task | None, float] = {}
        """The tasks that wait for a body, and since when, on the clock `now_s`."""
        self.now_s = 0.0
        """Seconds since `keep_checking` started; it advances in steps."""
        self.partial_bytes = 0
        """The bytes of bodies that have arrived in part."""
        self.large_partial_bytes = 0
        """The same, of bodies that may be larger than those of checks."""
        self._seconds_max = seconds_max
        self._cancelled: set[_Task] = set()
        self._dropping = 0

    # ── Time ───────────────────────────────────────────────────────────────────────────────────

    async def keep_checking(self, pause_s: float = CHECK_SECONDS) -> None:
        """Cancel requests that have waited too long, until this task is cancelled."""
        while True:
            await asyncio.sleep(pause_s)
            self.advance(pause_s)

    def advance(self, passed_s: float) -> None:
        """Advance the clock, and cancel every request that has now waited too long."""
        self.now_s += passed_s
        seconds_max = self._seconds_max
        if len(self.waiting) > CROWD:
            seconds_max = min(seconds_max, CROWDED_SECONDS_MAX)
        for task, since_s in list(self.waiting.items()):
            if task is not None and self.now_s - since_s > seconds_max:
                del self.waiting[task]
                self._cancelled.add(task)
                task.cancel()

    def expired(self) -> bool:
        """Return True, once, if the current task was cancelled by this object."""
        task = asyncio.current_task()
        if task is None or task not in self._cancelled:
            return False
        self._cancelled.discard(task)
        task.uncancel()
        return True

    # ── Reading ────────────────────────────────────────────────────────────────────────────────

    async def read(
        self,
        receive: Receive,
        headers: Mapping[bytes, bytes],
        bytes_max: int,
        message: Message | None = None,
    ) -> bytes:
        """Return the whole body, as `parts_of` yields it. The caller limits the time."""
        chunks: list[bytes] = []
        kept = 0
        is_large = bytes_max > BATCH_BYTES
        try:
            async for chunk in parts_of(receive, headers, bytes_max, message):
                if chunks and not self._has_room(len(chunk), is_large=is_large):
                    raise too_many_parts()
                chunks.append(chunk)
                kept += len(chunk)
                self._note(len(chunk), is_large=is_large)
            return b"".join(chunks)
        finally:
            self._note(-kept, is_large=is_large)

    async def read_in_time(
        self, receive: Receive, headers: Mapping[bytes, bytes], bytes_max: int
    ) -> bytes:
        """Return the whole body of a page or of the admin API. Raises BodyRejected."""
        try:
            async with asyncio.timeout(LARGE_SECONDS_MAX):
                return await self.read(receive, headers, bytes_max)
        except TimeoutError:
            raise too_slow() from None

    def _has_room(self, added: int, *, is_large: bool) -> bool:
        if is_large:
            return self.large_partial_bytes + added <= LARGE_PARTIAL_BYTES_MAX
        return self.partial_bytes + added <= PARTIAL_BYTES_MAX

    def _note(self, added: int, *, is_large: bool) -> None:
        if is_large:
            self.large_partial_bytes += added
        else:
            self.partial_bytes += added

    # ── Dropping ───────────────────────────────────────────────────────────────────────────────

    async def drop_rest(self, receive: Receive, headers: Mapping[bytes, bytes]) -> None:
        """Read and drop a body after its reply, if it is short enough and already on its way.

        A client that asked whether to send it (`Expect: 100-continue`) does not send it. This also
        applies to callers without a token, so it has a bound: when many bodies do not end, the
        connections of further ones are closed at once.
        """
        is_chunked = b"transfer-encoding" in headers
        is_short = 0 < declared_bytes(headers) <= DROPPED_BYTES_MAX
        if b"expect" in headers or not (is_short or is_chunked) or self._dropping >= DROPPING_MAX:
            return
        self._dropping += 1
        size = parts = 0
        try:
            async with asyncio.timeout(DROPPING_SECONDS_MAX):
                while size <= DROPPED_BYTES_MAX and parts <= _parts_max(size):
                    message = await receive()
                    parts += 1
                    size += len(message.get("body", b""))
                    if not message.get("more_body"):
                        return
        except TimeoutError:
            return
        finally:
            self._dropping -= 1


def _parts_max(size: int) -> int:
    return PARTS_FREE + size // PART_BYTES


async def parts_of(
    receive: Receive,
    headers: Mapping[bytes, bytes],
    bytes_max: int,
    message: Message | None = None,
) -> AsyncIterator[bytes]:
    """Yield the parts of a body. Raises BodyRejected.

    `message` is the first message, if the caller has received it.
    """
    check_declared(headers, bytes_max)
    size = parts = 0
    more = True
    while more:
        if message is None:
            message = await receive()
        if message["type"] == "http.disconnect":
            raise incomplete()
        chunk = message.get("body", b"")
        size += len(chunk)
        parts += 1
        if size > bytes_max:
            raise too_large(bytes_max)
        if parts > _parts_max(size):
            raise too_small_parts()
        yield chunk
        more = message.get("more_body", False)
        message = None
