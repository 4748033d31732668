"""The wire for threads: plain sockets, a handful a server, each lent to one call at a time.

A call is one `send` and, as a rule, one `recv`. The kernel keeps the deadline (SO_RCVTIMEO), which
saves the `poll` that a Python timeout would put before each of them. A connection that timed out
still owes an answer, so it is closed: the next call must not get it.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final

import hiredis

from tollkeeper.clock import NS_PER_SECOND
from tollkeeper.decide.stores.redis import handshake
from tollkeeper.decide.stores.redis.backoff import Backoff
from tollkeeper.decide.stores.redis.calls import NotSent
from tollkeeper.decide.stores.redis.config import Address, RedisConfig
from tollkeeper.errors import StoreError, StoreTimeout, StoreUnavailable

# Idle connections kept for each server; more threads at once open and close theirs.
IDLE_MAX: Final = 64
_READ_BYTES: Final = 65_536
# A connection that has idled longer is looked at before it is used: the server may have closed it.
_FRESH_NS: Final = 5_000_000


class Connection:
    """One socket, through the handshake."""

    __slots__ = ("_deadline_ns", "_poll", "_reader", "_recv", "_send", "_socket", "used_ns")

    def __init__(self, address: Address, config: RedisConfig, tls: ssl.SSLContext | None) -> None:
        self._reader = hiredis.Reader()
        self._deadline_ns = 0
        self._socket = _connected(address, config, tls)
        self._recv = self._socket.recv
        self._send = self._socket.sendall
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.used_ns = 0
        try:
            commands = handshake.greeting(config)
            replies = self.exchange(handshake.payload(commands), len(commands), config.connect_ns)
            handshake.check_replies(commands, replies, address, config)
        except BaseException:
            self.close()
            raise

    def exchange(self, payload: bytes, replies: int, deadline_ns: int) -> list[Any]:
        """Send commands and read so many replies. After any error the connection is of no use."""
        if deadline_ns != self._deadline_ns:
            _set_deadline(self._socket, deadline_ns)
            self._deadline_ns = deadline_ns
        try:
            self._send(payload)
            self._reader.feed(self._recv(_READ_BYTES) or _gone())
            found: list[Any] = []
            due_ns = 0
            while True:
                reply = self._reader.gets()
                if reply is not False:
                    found.append(reply)
                    if len(found) == replies:
                        self.used_ns = time.monotonic_ns()
                        return found
                    continue
                # Whoever sends a byte at a time does not get a whole deadline for each.
                due_ns = due_ns or time.monotonic_ns() + deadline_ns
                if time.monotonic_ns() > due_ns:
                    raise _timeout(deadline_ns)
                self._reader.feed(self._recv(_READ_BYTES) or _gone())
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise _timeout(deadline_ns) from None
        except (OSError, hiredis.ProtocolError) as error:
            raise StoreUnavailable(
                f"the connection broke: {error}; the call may have been counted once"
            ) from error

    def stale(self) -> bool:
        """Has the server closed it, or said something unasked, while it idled?"""
        return time.monotonic_ns() - self.used_ns > _FRESH_NS and bool(self._poll.poll(0))

    def close(self) -> None:
        self._socket.close()


def _timeout(deadline_ns: int) -> StoreTimeout:
    return StoreTimeout(
        f"no answer in {deadline_ns / 1e6:g} ms; the call may have been counted once"
    )


def _gone() -> bytes:
    raise ConnectionResetError("the server closed it")


def _connected(address: Address, config: RedisConfig, tls: ssl.SSLContext | None) -> socket.socket:
    timeout_s = config.connect_ns / NS_PER_SECOND
    try:
        if address.port == 0:
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            plain.settimeout(timeout_s)
            plain.connect(address.host)
        else:
            plain = socket.create_connection(address, timeout_s)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is None or config.tls is None:
            return plain
        try:
            return tls.wrap_socket(plain, server_hostname=config.tls.server_name or address.host)
        except BaseException:
            plain.close()
            raise
    except OSError as error:  # a timeout and a TLS error are OSErrors too
        raise NotSent(str(error)) from error


def _set_deadline(sock: socket.socket, deadline_ns: int) -> None:
    if type(sock) is not socket.socket or sock.__class__.__module__ != "socket":
        sock.settimeout(deadline_ns / NS_PER_SECOND)  # TLS, or a library's socket of green threads
        return
    sock.settimeout(None)
    seconds, rest_ns = divmod(deadline_ns, NS_PER_SECOND)
    interval = struct.pack("ll", seconds, max(rest_ns // 1_000, 1))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)


class Node:
    """One server's connections."""

    def __init__(
        self,
        address: Address,
        config: RedisConfig,
        tls: ssl.SSLContext | None,
        dialer: Executor,
    ) -> None:
        self.address = address
        self._config = config
        self._tls = tls
        self._dialer = dialer
        self._idle: deque[Connection] = deque()
        self._backoff = Backoff()
        self._lock = threading.Lock()
        self._closed = False

    def exchange(self, payload: bytes, replies: int, deadline_ns: int) -> list[Any]:
        """Send commands to this server. Raises NotSent when they have not left this process."""
        connection = self._take(deadline_ns)
        try:
            found = connection.exchange(payload, replies, deadline_ns)
        except BaseException:
            connection.close()
            raise
        self._give(connection)
        return found

    def _take(self, deadline_ns: int) -> Connection:
        while True:
            try:
                # The one used last: it is warm, and those not needed grow old and go.
                connection = self._idle.pop()
            except IndexError:
                return self._dial(deadline_ns)
            if not connection.stale():
                return connection
            connection.close()

    def _give(self, connection: Connection) -> None:
        self._idle.append(connection)
        if len(self._idle) > IDLE_MAX or self._closed:
            self._drop_idle(0 if self._closed else IDLE_MAX)

    def _dial(self, deadline_ns: int) -> Connection:
        """A new connection. Made in another thread, because it may take longer than a call may."""
        if self._closed:
            raise StoreUnavailable("the store is closed; open another one")
        with self._lock:
            if not self._backoff.may_try(time.monotonic_ns()):
                raise NotSent(f"{self.address} is down: {self._backoff.reason}")
        dialing = self._dialer.submit(self._connected)
        try:
            return dialing.result(deadline_ns / NS_PER_SECOND)
        except FutureTimeout:
            # Whoever calls next may have it.
            dialing.add_done_callback(self._keep)
            raise NotSent(f"no connection to {self.address} in {deadline_ns / 1e6:g} ms") from None

    def _connected(self) -> Connection:
        try:
            connection = Connection(self.address, self._config, self._tls)
        except StoreError as error:
            with self._lock:
                self._backoff.failed(time.monotonic_ns(), str(error))
            raise NotSent(f"cannot connect to {self.address}: {error}") from error
        with self._lock:
            self._backoff.succeeded()
        return connection

    def _keep(self, dialing: Future[Connection]) -> None:
        if not dialing.cancelled() and dialing.exception() is None:
            self._give(dialing.result())

    def _drop_idle(self, keep: int) -> None:
        while len(self._idle) > keep:
            try:
                self._idle.popleft().close()
            except IndexError:
                return

    def close(self) -> None:
        self._closed = True
        self._drop_idle(0)
