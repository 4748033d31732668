"""The same load through a real service: threads send checks over HTTP and record the answers.

If a killed worker cuts a connection, the thread connects again. The service may have counted the
cut request or not; without an answer it is not an admission.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from threading import Event, Thread

from tests.faults.load import GAP_S, Key, Record, now_ns, watch_lag
from tests.service_process import ServiceProcess, ask_on

# The pause before a thread connects again.
_AGAIN_S = 0.02
_STATUSES = {200, 429, 503}


class ServiceAskers:
    """Threads that check the same keys in turn, each on a separate connection."""

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
                body = {"user": key.user, "endpoint": key.request.endpoint}
                sent_ns = now_ns()
                answer = ask_on(connection, "POST", "/v1/check", body)
                assert answer.status in _STATUSES, (answer, self._service.log_end())
                degraded = answer.headers.get("x-ratelimit-policy") == "degraded"
                self._record.put(key, sent_ns, answer.status == 200, degraded, "service")
                self._stopped.wait(GAP_S / len(self._keys))

    def stop(self) -> None:
        """End the threads; raise the first error of any thread."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        if self.failures:
            raise self.failures[0]


@asynccontextmanager
async def service_load(
    service: ServiceProcess, record: Record, keys: Sequence[Key], threads: int = 4
) -> AsyncIterator[None]:
    """Send checks from threads for the length of the block."""
    lag = asyncio.create_task(watch_lag(record))
    askers = ServiceAskers(service, record, keys, threads)
    try:
        yield
    finally:
        lag.cancel()
        await asyncio.to_thread(askers.stop)
