"""The same load through a real service: threads that ask over HTTP, and note what they were told.

A connection that is cut, by a worker that was killed, is made anew. Whether its request was counted
nobody knows; it was not answered, so it is not an admission.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from threading import Event, Thread

from tests.faults.load import GAP_S, Key, Record, now_ns, watch_lag
from tests.service_process import ServiceProcess, ask_on

# A refused connection is tried again after this long.
_AGAIN_S = 0.02
_STATUSES = {200, 429, 503}


class ServiceAskers:
    """Threads that ask in turn for the same keys, each on a connection of its own."""

    def __init__(
        self, service: ServiceProcess, record: Record, keys: Sequence[Key], threads: int = 4
    ) -> None:
        self._service = service
        self._record = record
        self._keys = keys
        self._stopped = Event()
        self.failures: list[BaseException] = []
        self._threads = [Thread(target=self._ask) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        try:
            while not self._stopped.is_set():
                connection = self._service.connect()
                try:
                    self._ask_on(connection)
                except (OSError, http.client.HTTPException):
                    self._record.lost += 1
                    self._stopped.wait(_AGAIN_S)
                finally:
                    connection.close()
        except BaseException as error:
            self.failures.append(error)

    def _ask_on(self, connection: http.client.HTTPConnection) -> None:
        while not self._stopped.is_set():
            for key in self._keys:
                asked = {"user": key.user, "endpoint": key.request.endpoint}
                sent_ns = now_ns()
                answer = ask_on(connection, "POST", "/v1/check", asked)
                assert answer.status in _STATUSES, (answer, self._service.log_end())
                degraded = answer.headers.get("x-ratelimit-policy") == "degraded"
                self._record.put(key, sent_ns, answer.status == 200, degraded, "service")
                self._stopped.wait(GAP_S / len(self._keys))

    def stop(self) -> None:
        """End them; what went wrong in one of them is raised."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        if self.failures:
            raise self.failures[0]


@asynccontextmanager
async def service_load(
    service: ServiceProcess, record: Record, keys: Sequence[Key], threads: int = 4
) -> AsyncIterator[None]:
    """Threads that ask for as long as the block lasts."""
    lag = asyncio.create_task(watch_lag(record))
    askers = ServiceAskers(service, record, keys, threads)
    try:
        yield
    finally:
        lag.cancel()
        await asyncio.to_thread(askers.stop)
