"""gRPC as the services of this package see it: a call comes in, messages go out.

A *method* is a coroutine function that takes a call and raises CallError to end it with a status.
It does not know which server runs it: the server on libnghttp2 (`http2.py`) and the server on
grpcio (`grpcio.py`) run the same methods.

- A *unary* method takes one message and returns one.
- A *streaming* method receives and sends messages until it returns, or the client goes away. Then
  the server cancels it.

Messages are bytes: a service that is called ten thousand times a second decides itself how it reads
them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final, Protocol

from ratekeeper.core.errors import ConfigError
from ratekeeper.core.seldom_log import SeldomLog

log = logging.getLogger("ratekeeper.grpc")


class Status(IntEnum):
    """The status codes of gRPC that the server and its methods use."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class CallError(Exception):
    """Ends a call with a status and a message for the client."""

    def __init__(self, status: Status, message: str) -> None:
        """`message` explains the error to the client; it contains no secrets."""
        super().__init__(message)
        self.status = status
        self.message = message


def count(counted: dict[str, int], status: Status, calls: int = 1) -> None:
    """Add calls to the counts by the name of the status."""
    counted[status.name] = counted.get(status.name, 0) + calls


def call_error_of(error: Exception, counted: dict[str, int]) -> CallError:
    """Return the CallError for the client; log and count an error that no method expects."""
    if isinstance(error, CallError):
        return error
    count(counted, Status.INTERNAL)
    _failures.note("a gRPC method failed", error=error)
    return CallError(Status.INTERNAL, "the server failed; its log says why")


_failures = SeldomLog(log, logging.ERROR)


class GrpcCall(Protocol):
    """One call, as its method sees it."""

    def metadata(self, name: str) -> str | None:
        """Return the first value of a name in lower case, or None. Binary values are not text."""
        ...

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None if it has none."""
        ...


class StreamingCall(GrpcCall, Protocol):
    """A call in which both sides send messages."""

    async def receive(self) -> bytes | None:
        """Return the client's next message; None if it sends no more."""
        ...

    async def send(self, message: bytes) -> None:
        """Send a message. Waits while the client does not read."""
        ...


UnaryMethod = Callable[[bytes, GrpcCall], Awaitable[bytes]]
StreamingMethod = Callable[[StreamingCall], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Methods:
    """The methods of a server, by their paths, for example `/grpc.health.v1.Health/Check`."""

    unary: Mapping[str, UnaryMethod] = field(default_factory=dict)
    streaming: Mapping[str, StreamingMethod] = field(default_factory=dict)
    at_once: frozenset[str] = frozenset()
    """Unary methods that seldom wait, and need no task before they wait: coroutine functions."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a server's certificate and key; with `authority`, clients need one too."""

    certificate: Path
    key: Path
    authority: Path | None = None

    def contents(self) -> tuple[bytes, bytes, bytes | None]:
        """Return certificate, key and authority. Raises ConfigError for an unreadable file."""
        authority = None if self.authority is None else _contents(self.authority)
        return _contents(self.certificate), _contents(self.key), authority


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that clients may use of one worker."""

    message_bytes: int = 1024 * 1024
    """A message of a unary method. A larger one gets RESOURCE_EXHAUSTED."""
    streamed_bytes: int = 16 * 1024 * 1024
    """A message of a streaming method. Envoy lists all its buckets, and repeats a refused list."""
    metadata_bytes: int = 16 * 1024
    """The metadata of a call."""
    calls: int = 4_096
    """Calls in flight. More could not be answered in time: Envoy's timeout is 20 ms."""


STOP_SECONDS: Final = 5.0


class GrpcServer(Protocol):
    """A running server."""

    @property
    def port(self) -> int:
        """The port that it listens on, also if it was started on port 0."""
        ...

    async def stop(self, grace_s: float = STOP_SECONDS) -> None:
        """Accept no more calls, and stop when the calls in flight have ended.

        Calls that take longer than `grace_s` seconds are cancelled.
        """
        ...
