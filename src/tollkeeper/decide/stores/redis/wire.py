"""The wire for threads: plain sockets, a handful a server, each lent to one call at a time.

A call is one `send` and, as a rule, one `recv`. Python keeps the deadline, with a `poll` before
each, which costs less than can be measured. The kernel could keep it (SO_RCVTIMEO), but a signal
ends its wait, and Python begins it anew: for ever, under a profiler. A connection that timed
out still owes an answer, so it is closed: the next call must not get it.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final

import hiredis

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.errors import StoreError, StoreTimeout, StoreUnavailable
from tollkeeper.decide.stores.redis import handshake
from tollkeeper.decide.stores.redis.backoff import Backoff
from tollkeeper.decide.stores.redis.breakers import NodeBreaker
from tollkeeper.decide.stores.redis.calls import NotSent
from tollkeeper.decide.stores.redis.config import Address, RedisConfig

# Idle connections kept for each server; more threads at once open and close theirs.
IDLE_MAX: Final = 64
# Connections to one server that are made at the same time.
DIALS_MAX: Final = 16
# Enough for an answer. Python takes memory for all of it at each read, and gives the rest back.
_READ_BYTES: Final = 4_096
# A connection that has idled longer is looked at before it is used: the server may have closed it.
_FRESH_NS: Final = 5_000_000
# What a call has left at least when it had to wait for its connection.
_LEFT_NS_MIN: Final = 1_000_000
_MAYBE: Final = "; the call may have been counted once"


class Connection:
    """One socket, through the handshake."""

    __slots__ = (
        "_deadline_ns",
        "_poll",
        "_reader",
        "_recv",
        "_send",
        "_socket",
        "began_ns",
        "used_ns",
    )

    def __init__(self, address: Address, config: RedisConfig, tls: ssl.SSLContext | None) -> None:
        self._reader = hiredis.Reader()
        self._deadline_ns = 0
        self._socket = _connected(address, config, tls)
        self._recv = self._socket.recv
        self._send = self._socket.sendall
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.began_ns = self.used_ns = 0
        try:
            commands = handshake.greeting(config)
            greeting = handshake.payload(commands)
            replies = self.exchange(greeting, len(commands), config.connect_ns, warning="")
            handshake.check_replies(commands, replies, address, config)
        except BaseException:
            self.close()
            raise

    def exchange(
        self, payload: bytes, replies: int, deadline_ns: int, warning: str = _MAYBE
    ) -> list[Any]:
        """Send commands and read so many replies. After any error the connection is of no use.

        `warning` ends the message of an error after which nobody knows what the server did.
        """
        started_ns = self.began_ns = time.monotonic_ns()
        if deadline_ns != self._deadline_ns:
            self._set_deadline(deadline_ns)
        try:
            self._send(payload)
            self._reader.feed(self._recv(_READ_BYTES) or _gone())
            found: list[Any] = []
            while True:
                reply = self._reader.gets()
                if reply is not False:
                    found.append(reply)
                    if len(found) == replies:
                        break
                    continue
                # Whoever sends a byte at a time does not get a whole deadline for each.
                left_ns = started_ns + deadline_ns - time.monotonic_ns()
                if left_ns <= 0:
                    raise _timeout(deadline_ns, warning)
                self._set_deadline(left_ns)
                self._reader.feed(self._recv(_READ_BYTES) or _gone())
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise _timeout(deadline_ns, warning) from None
        except hiredis.ProtocolError as error:
            raise StoreUnavailable(f"not an answer of Redis: {error}{warning}") from error
        except OSError as error:
            raise StoreUnavailable(f"the connection broke: {error}{warning}") from error
        if self._reader.has_data():
            # The next call would take it for its own.
            raise StoreUnavailable(f"not an answer of Redis, but more than was asked for{warning}")
        self.used_ns = time.monotonic_ns()
        return found

    def _set_deadline(self, deadline_ns: int) -> None:
        self._socket.settimeout(deadline_ns / NS_PER_SECOND)
        self._deadline_ns = deadline_ns

    def stale(self) -> bool:
        """Has the server closed it, or said something unasked, while it idled?"""
        return time.monotonic_ns() - self.used_ns > _FRESH_NS and bool(self._poll.poll(0))

    def close(self) -> None:
        self._socket.close()


def _timeout(deadline_ns: int, warning: str) -> StoreTimeout:
    return StoreTimeout(f"no answer in {deadline_ns / 1e6:g} ms{warning}")


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


class Node:
    """One server's connections."""

    def __init__(
        self,
        address: Address,
        config: RedisConfig,
        tls: ssl.SSLContext | None,
        breaker: NodeBreaker,
    ) -> None:
        self.address = address
        self._breaker = breaker
        self._config = config
        self._tls = tls
        # Its own, without a thread before one is needed: a silent server keeps no other's busy.
        self._dialer = ThreadPoolExecutor(DIALS_MAX, "tollkeeper-redis")
        self._idle: deque[Connection] = deque()
        self._backoff = Backoff()
        self._lock = threading.Lock()
        self._closed = False

    def exchange(self, payload: bytes, replies: int, deadline_ns: int) -> list[Any]:
        """Send commands to this server. Raises NotSent when they have not left this process."""
        breaker = self._breaker
        if breaker.open:
            raise breaker.refusal()
        connection = self._take()
        if connection is None:
            started_ns = time.monotonic_ns()
            connection = self._dial(deadline_ns)
            # At least a millisecond: connecting was the hard part.
            deadline_ns = max(deadline_ns - time.monotonic_ns() + started_ns, _LEFT_NS_MIN)
        try:
            found = connection.exchange(payload, replies, deadline_ns)
        except BaseException as error:
            connection.close()
            if isinstance(error, StoreError):
                # Those who are refused for it are told why, and nothing of theirs was counted.
                why = str(error).removesuffix(_MAYBE)
                breaker.failed(f"{self.address}: {why}", connection.began_ns)
            raise
        self._give(connection)
        if breaker.stirred:
            breaker.succeeded()
        return found

    def _take(self) -> Connection | None:
        while True:
            try:
                # The one used last: it is warm, and those not needed grow old and go.
                connection = self._idle.pop()
            except IndexError:
                return None
            if not connection.stale():
                return connection
            connection.close()

    def _give(self, connection: Connection) -> None:
        self._idle.append(connection)
        if len(self._idle) > IDLE_MAX or self._closed:
            self._drop_idle(0 if self._closed else IDLE_MAX)

    def _dial(self, deadline_ns: int) -> Connection:
        """A new connection. Made in another thread, because it may take longer than a call may."""
        began_ns = time.monotonic_ns()
        with self._lock:
            if not self._backoff.may_try(began_ns):
                raise NotSent(f"{self.address} is down: {self._backoff.reason}")
        try:
            dialing = self._dialer.submit(self._connected, began_ns)
            return dialing.result(deadline_ns / NS_PER_SECOND)
        except FutureTimeout:
            # Whoever calls next may have it; one that nobody has begun with nobody waits for.
            if not dialing.cancel():
                dialing.add_done_callback(self._keep)
            why = f"no connection to {self.address} in {deadline_ns / 1e6:g} ms"
            if self._breaker.proven:
                self._breaker.failed(why, began_ns)
            raise NotSent(why) from None
        except (CancelledError, RuntimeError) as error:
            if not self._closed:
                raise NotSent(f"no connection to {self.address}: {error}") from error
            raise StoreUnavailable("the store is closed; open another one") from error

    def _connected(self, began_ns: int) -> Connection:
        with self._lock:
            if self._backoff.failed_since(began_ns):
                raise NotSent(f"{self.address} is down: {self._backoff.reason}")
        try:
            connection = Connection(self.address, self._config, self._tls)
        except StoreError as error:
            with self._lock:
                self._backoff.failed(began_ns, time.monotonic_ns(), str(error))
            why = f"cannot connect to {self.address}: {error}"
            self._breaker.failed(why, began_ns)
            raise NotSent(why) from error
        self._breaker.proven = True
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

    def let_go(self) -> None:
        """Close what idles, and what is in use when it is given back."""
        self._closed = True
        self._drop_idle(0)

    def close(self) -> None:
        """`let_go`; and who waits for a connection gets none."""
        self.let_go()
        self._dialer.shutdown(wait=False, cancel_futures=True)
