"""A TCP relay on loopback that can misbehave as networks and middle boxes do."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

from tests.redis_servers.ports import HOST

Mode = Literal[
    "pass",  # relay
    "hold",  # take everything, pass nothing on, close nothing: a host that is gone without a word
    "swallow",  # calls arrive, and their replies do not
    "cut",  # half of a reply, and the connection is closed
    "drip",  # replies byte by byte, with `drip_seconds` before each
    "answer",  # requests do not arrive, and `answer` is the reply to each
    "once",  # `answer` to one request, and then "pass"
]

_CHUNK_BYTES = 65_536
_REFUSAL = re.compile(r"^-([A-Z]+) ", re.MULTILINE)


@dataclass(slots=True)
class _Link:
    """One connection: its two ends, and the directions that lose all bytes."""

    client: socket.socket
    server: socket.socket
    lost_up: bool = False
    lost_down: bool = False


class Proxy:
    """Relays connections to one server. `mode` may be changed at any time and applies at once.

    A connection that lost bytes in "hold" or "swallow" stays broken; new ones follow the current
    mode. Nothing is relayed in the first `accept_seconds` of a connection. Each piece of a request
    is delayed by `up_seconds()`.
    """

    def __init__(self, server_port: int, mode: Mode = "pass") -> None:
        self.mode: Mode = mode
        self.drip_seconds = 0.001
        self.answer = b""
        self.accept_seconds = 0.0
        self.up_seconds: Callable[[], float] = lambda: 0.0
        self.accepted = 0
        # The first word of every error that the server returned.
        self.refusals: list[str] = []
        self._server_port = server_port
        self._listener = socket.create_server((HOST, 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._listener.getsockname()[1])

    @property
    def uri(self) -> str:
        """The store's URI through this relay."""
        return f"redis://{HOST}:{self.port}/0"

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_all()
        for thread in self._threads:
            thread.join()

    def break_all(self) -> None:
        """Close every connection."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            _close(each)

    def _spawn(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                continue
            try:
                server = socket.create_connection((HOST, self._server_port))
            except OSError:  # it is down
                client.close()
                continue
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets += [client, server]
            self.accepted += 1
            link = _Link(client, server)
            self._spawn(self._pump, client, server, link, self._up)
            self._spawn(self._pump, server, client, link, self._down)
            if self._closed.is_set():
                self.break_all()

    def _pump(
        self,
        source: socket.socket,
        target: socket.socket,
        link: _Link,
        pieces: Callable[[bytes, _Link], Iterator[bytes]],
    ) -> None:
        self._closed.wait(self.accept_seconds)
        with suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                for piece in pieces(data, link):
                    target.sendall(piece)
        _close(source)
        _close(target)

    def _up(self, data: bytes, link: _Link) -> Iterator[bytes]:
        """Return the part of a request that goes on to the server."""
        self._closed.wait(self.up_seconds())
        mode = self.mode
        link.lost_up = link.lost_up or mode == "hold"
        link.lost_down = link.lost_down or (mode == "swallow" and b"EVAL" in data)
        if link.lost_up:
            return
        if mode in {"answer", "once"}:
            if mode == "once":
                self.mode = "pass"
            link.client.sendall(self.answer)
        else:
            yield data

    def _down(self, data: bytes, link: _Link) -> Iterator[bytes]:
        """Return the pieces of a reply that go on to the client."""
        mode = self.mode
        self.refusals += _REFUSAL.findall(data.decode("latin-1"))
        link.lost_down = link.lost_down or mode == "hold"
        if link.lost_down:
            return
        if mode == "cut":
            yield data[: len(data) // 2]
            raise ConnectionAbortedError
        if mode == "drip":
            for byte in data:
                self._closed.wait(self.drip_seconds)
                yield bytes((byte,))
        else:
            yield data


def _close(each: socket.socket) -> None:
    # Shut down first: another thread may wait in `recv`, which `close` would not end.
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
