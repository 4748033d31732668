"""How a worker comes to its end: clients are told first, and have time to go elsewhere.

SIGUSR1, from the parent: the whole service is about to end. SIGTERM: so is this worker. It does
when it has told its clients for `--drain-seconds`, from the first of these signals on. For SIGTERM
does not always come from the parent at the end of that time: systemd sends it to all processes at
once, and a worker that SIGHUP has another one take the place of gets it alone. SIGINT is the
server's, and is the end.

Who comes to the last moment must not be lost either. The server closes connections that it has not
read a request from yet, whether one was sent on them or not. So some time before, no new one is
taken: a filter on the listening sockets has the kernel drop what would open a connection. Whoever
wants one tries again a second later, as TCP does, and then meets another worker or is refused.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tollkeeper.service.http.node import Node

# Those who were let in last have so long to be read, and again as long as somebody was.
LAST_SECONDS: Final = 0.3
LAST_TIMES_MAX: Final = 10
_SO_ATTACH_FILTER: Final = 26  # of Linux
# A packet that opens a connection (SYN, and no ACK) is dropped, and what completes one that is
# being opened is not: code, where to go if so and if not, value.
_NO_SYN: Final = (
    (0x30, 0, 0, 13),  # the flags, in byte 13 of the head of TCP
    (0x54, 0, 0, 0x12),  # of them, SYN and ACK
    (0x15, 0, 1, 0x02),  # is it SYN alone?
    (0x06, 0, 0, 0),  # then keep nothing
    (0x06, 0, 0, 0xFFFFFFFF),  # else all of it
)

# Tells those who ask to go elsewhere.
Drain = Callable[[], Coroutine[Any, Any, None]]


class Ending:
    """The end of one worker."""

    def __init__(self, node: Node, drains: Sequence[Drain], drain_s: float) -> None:
        """`drains` are told of the service's end."""
        self._node = node
        self._drains = drains
        self._drain_s = drain_s
        self._loop = asyncio.get_running_loop()
        self._end_at_s = 0.0
        self._draining: list[asyncio.Task[None]] = []  # a task that nobody holds may be collected

    def heed_signals(self) -> None:
        """From now on."""
        with suppress(NotImplementedError, ValueError):
            self._loop.add_signal_handler(signal.SIGUSR1, self.near)
            self._loop.add_signal_handler(signal.SIGTERM, self.come)

    def near(self) -> None:
        """The service is about to end."""
        self._tell_clients()
        if not self._node.stopping:
            self._node.stopping = True
            self._draining.extend(asyncio.create_task(drain()) for drain in self._drains)

    def come(self) -> None:
        """This worker ends, when its clients have been told for long enough."""
        self._tell_clients()
        self._loop.call_at(self._end_at_s, self._leave)

    def _tell_clients(self) -> None:
        if not self._node.closing:
            self._node.closing = True
            self._end_at_s = self._loop.time() + self._drain_s

    def _leave(self) -> None:
        let_nobody_in()
        self._wait_for_last(-1, LAST_TIMES_MAX)

    def _wait_for_last(self, answered_before: int, times: int) -> None:
        counters = self._node.counters
        answered = sum(counters.requests.values()) + sum(counters.grpc_requests.values())
        if answered == answered_before or not times:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            self._loop.call_later(LAST_SECONDS, self._wait_for_last, answered, times - 1)


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("jt", ctypes.c_ubyte),
        ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def let_nobody_in() -> None:
    """Have the kernel drop what would open connections to this process."""
    instructions = (_Instruction * len(_NO_SYN))(*(_Instruction(*each) for each in _NO_SYN))
    program = bytes(_Program(len(_NO_SYN), instructions))
    for number in _open_files():
        with suppress(OSError):  # it is no socket
            # The server has it, and tells nobody which one it is.
            found = socket.socket(fileno=number)
            try:
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            finally:
                found.detach()


def _open_files() -> list[int]:
    try:
        return [int(each.name) for each in Path("/proc/self/fd").iterdir()]
    except OSError:
        return []  # not on Linux
