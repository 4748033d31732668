"""Two kinds of load on an HTTP server: the maximum that it can answer (wrk), and a fixed rate.

wrk keeps a number of connections busy: each sends a request as soon as the previous one is
answered. This measures the requests per second of a server, but not its latency: if the server is
slow, wrk sends less. Therefore, latency is measured with an open load, `paced`: requests are due at
random times with a given average rate, as from many clients. The latency of a request is the time
from when it was due until its answer arrived. Requests are sent on any free connection, without
asyncio: one loop over epoll that never sleeps, on its own processor. The cost of this loop per
request, some system calls and lines of Python, is included in the latency of every server.
"""

from __future__ import annotations

import json
import random
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Final

from tests.redis_servers.ports import HOST

from bench.measure import SEED, collector_off

CONNECTIONS: Final = 64
# Below this share of the required rate, the server did not keep up, and latencies mean nothing.
PACE_KEPT_MIN: Final = 0.95
_ANSWER_BYTES_MAX: Final = 65_536
_OVERTIME_SECONDS_MAX: Final = 2.0
# On a busy machine, a server may get no processor time in a whole run. Such a run is repeated.
_RUNS_MAX: Final = 5

# All requests are built before the first is sent; `done` prints the counts of wrk.
_SCRIPT: Final = """
local pool, size, turn = {}, 0, 0
function init(arguments)
  for line in io.lines(arguments[1]) do
    pool[size] = line:gsub("\\\\r", "\\r"):gsub("\\\\n", "\\n")
    size = size + 1
  end
end
function request()
  turn = turn + 1
  if turn >= size then turn = 0 end
  return pool[turn]
end
function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '\\nfound {"requests": %d, "duration_us": %d, "status": %d, "socket": %d}\\n',
    summary.requests, summary.duration, errors.status,
    errors.connect + errors.read + errors.write + errors.timeout))
end
"""


@dataclass(frozen=True, slots=True)
class Paced:
    """The result of a load with a fixed rate."""

    asked_per_second: float
    answered_per_second: float
    p50_us: float
    p99_us: float

    @property
    def kept_up(self) -> bool:
        """Return True if the server answered every request."""
        return self.answered_per_second >= PACE_KEPT_MIN * self.asked_per_second


class LoadFailed(RuntimeError):
    """The server answered with another status than 200, or not at all."""


def wrk_path() -> str:
    """Return the path of wrk; exit with instructions if it is not installed."""
    return tool_path("wrk", "wrk")


def tool_path(name: str, package: str) -> str:
    """Return the path of a program that loads servers; exit with instructions without it."""
    found = shutil.which(name)
    if found is None:
        sys.exit(
            f"{name}, which loads the servers of the http works, is not installed; try: "
            f"apt-get install {package}"
        )
    return found


def wrk(port: int, requests: Sequence[bytes], seconds: int) -> float:
    """Return the requests per second with 64 connections in a closed loop."""
    with tempfile.TemporaryDirectory(prefix="ratekeeper-bench-") as folder:
        script, pool = Path(folder, "wrk.lua"), Path(folder, "requests")
        script.write_text(_SCRIPT)
        lines = (each.replace(b"\r", rb"\r").replace(b"\n", rb"\n") for each in requests)
        pool.write_bytes(b"".join(line + b"\n" for line in lines))
        command = [
            *(wrk_path(), "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", str(script)),
            *(f"http://{HOST}:{port}/", "--", str(pool)),
        ]
        for _ in range(_RUNS_MAX):
            found = _run_wrk(command, seconds + 30)
            if found["status"] or found["socket"]:
                raise LoadFailed(f"not every request was answered with 200: {found}")
            if found["requests"]:
                return float(found["requests"] * 1e6 / found["duration_us"])
    raise LoadFailed(f"no answer in {_RUNS_MAX} runs of {seconds} s: {found}")


def _run_wrk(command: Sequence[str], timeout_seconds: float) -> dict[str, int]:
    """Run wrk once; return the counts that the script prints."""
    done = subprocess.run(
        command, capture_output=True, check=False, text=True, timeout=timeout_seconds
    )
    line = next((each for each in done.stdout.splitlines() if each.startswith("found ")), None)
    if line is None:
        raise LoadFailed(f"wrk printed no result: {done.stdout} {done.stderr}")
    found: dict[str, int] = json.loads(line.removeprefix("found "))
    return found


def paced(port: int, requests: Sequence[bytes], per_second: float, seconds: float) -> Paced:
    """Send requests at a fixed average rate, however fast the server answers."""
    chance = random.Random(SEED)
    due_ns: list[int] = []
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(per_second)) < seconds:
        due_ns.append(int(at_s * 1e9))
    with collector_off():
        taken_ns, elapsed_ns = _Pace(port, requests, due_ns).run()
    if not taken_ns:
        raise LoadFailed(f"no answer to {len(due_ns)} requests in {seconds:g} s")
    taken_ns.sort()
    return Paced(
        asked_per_second=len(due_ns) / seconds,
        answered_per_second=len(taken_ns) * 1e9 / max(elapsed_ns, int(seconds * 1e9)),
        p50_us=taken_ns[len(taken_ns) // 2] / 1e3,
        p99_us=taken_ns[len(taken_ns) * 99 // 100] / 1e3,
    )


class _Pace:
    """Send requests when they are due and read answers, until all arrived or time is up."""

    def __init__(self, port: int, requests: Sequence[bytes], due_ns: Sequence[int]) -> None:
        self._requests = requests
        self._due_ns = due_ns
        self._connections = [socket.create_connection((HOST, port)) for _ in range(CONNECTIONS)]
        self._taken_ns: list[int] = []
        # The due time of the request in flight on each connection.
        self._asked_ns: dict[int, int] = {}

    def run(self) -> tuple[list[int], int]:
        """Return the duration of each request, and of the whole run."""
        by_number = {each.fileno(): each for each in self._connections}
        with select.epoll() as poll:
            for connection in self._connections:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                poll.register(connection.fileno(), select.EPOLLIN)
            try:
                return self._loop(poll, by_number)
            finally:
                for connection in self._connections:
                    connection.close()

    def _loop(
        self, poll: select.epoll, by_number: dict[int, socket.socket]
    ) -> tuple[list[int], int]:
        # In turn, so that every connection stays in use.
        free = deque(by_number)
        due_ns, requests, asked_ns = self._due_ns, self._requests, self._asked_ns
        sent, total, pool = 0, len(due_ns), len(requests)
        start_ns = perf_counter_ns()
        stop_ns = start_ns + due_ns[-1] + int(_OVERTIME_SECONDS_MAX * 1e9)
        while len(self._taken_ns) < total:
            now_ns = perf_counter_ns()
            if now_ns > stop_ns:
                break
            while sent < total and free and start_ns + due_ns[sent] <= now_ns:
                number = free.popleft()
                by_number[number].send(requests[sent % pool])
                asked_ns[number] = start_ns + due_ns[sent]
                sent += 1
            for number, _ in poll.poll(0):
                self._take(by_number[number], number)
                free.append(number)
        return self._taken_ns, perf_counter_ns() - start_ns

    def _take(self, connection: socket.socket, number: int) -> None:
        answer = connection.recv(_ANSWER_BYTES_MAX)
        if not _is_whole(answer):
            # Rare: the head and the body arrive separately.
            connection.setblocking(True)
            while not _is_whole(answer):
                more = connection.recv(_ANSWER_BYTES_MAX)
                if not more:
                    raise LoadFailed(f"an incomplete answer: {answer[:200]!r}")
                answer += more
            connection.setblocking(False)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise LoadFailed(f"not every request was answered with 200: {answer[:200]!r}")
        self._taken_ns.append(perf_counter_ns() - self._asked_ns.pop(number))


def _is_whole(answer: bytes) -> bool:
    head = answer.find(b"\r\n\r\n")
    if head < 0:
        return False
    place = answer.find(b"content-length: ", 0, head)
    if place < 0:
        raise LoadFailed(f"an answer without content-length: {answer[:200]!r}")
    end = answer.find(b"\r", place)
    return len(answer) >= head + 4 + int(answer[place + 16 : end])
