"""Requests at a steady rate to Envoys that answer directly, with little processor time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import NamedTuple, Self
from urllib.parse import urlsplit

_DEADLINE_S = 30.0
_BATCH_S = 0.05


class Answer(NamedTuple):
    """One request: when it was sent, when the answer arrived, and whether it passed."""

    sent_s: float
    answered_s: float
    passed: bool


class Load:
    """One connection to an Envoy, with the answers to all requests so far."""

    def __init__(self, url: str, tenant: str) -> None:
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self._request = f"GET / HTTP/1.1\r\nhost: a\r\nx-tenant: {tenant}\r\n\r\n".encode()
        self.answers: list[Answer] = []

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def send(self, count: int = 1) -> int:
        """Send requests one after another; return how many passed.

        Not pipelined: Envoy closes a connection after some answers of its own.
        """
        passed = 0
        async with asyncio.timeout(_DEADLINE_S):
            for _ in range(count):
                sent_s = time.monotonic()
                self._writer.write(self._request)
                head = await self._reader.readuntil(b"\r\n\r\n")
                assert b"content-length: 0\r\n" in head, head
                status = head[9:12]
                assert status in {b"200", b"429"}, head
                self.answers.append(Answer(sent_s, time.monotonic(), status == b"200"))
                passed += status == b"200"
        return passed

    async def run(self, per_second: float, seconds: float) -> int:
        """Send requests at a rate; return how many passed."""
        started_s, sent, passed = time.monotonic(), 0, 0
        while (gone_s := time.monotonic() - started_s) < seconds:
            due = int(per_second * gone_s) - sent
            sent += due
            passed += await self.send(due)
            await asyncio.sleep(_BATCH_S)
        return passed

    def passed(self, after_s: float = 0.0, before_s: float = float("inf")) -> int:
        """Return how many requests passed that were sent after one time and before another."""
        return sum(each.passed and after_s <= each.sent_s < before_s for each in self.answers)


def most_over(loads: Iterable[Load], rate: float, burst: float) -> float:
    """Return by how much all loads together exceed rate × T + burst, over all intervals.

    A request was admitted between the times that it was sent and answered. So it is counted in an
    interval only if both are in it: the result is never too high, however busy the machine is.
    """
    answers = sorted(each for load in loads for each in load.answers if each.passed)
    over = float("-inf")
    for at in range(0, len(answers), 5):
        start_s = answers[at].sent_s
        ends = sorted(each.answered_s for each in answers[at:])
        for count, end_s in enumerate(ends, 1):
            over = max(over, count - rate * (end_s - start_s) - burst)
    return over
