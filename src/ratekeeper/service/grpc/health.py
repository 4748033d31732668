"""gRPC's health checking: load balancers ask whether a server accepts calls.

Protocol: https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]  # it ships no types

from ratekeeper.service.grpc.calls import CallError, GrpcCall, Methods, Status, StreamingCall

SERVICE: Final = "grpc.health.v1.Health"
FILE: Final[bytes] = health_pb2.DESCRIPTOR.serialized_pb

_Request = health_pb2.HealthCheckRequest
_Response = health_pb2.HealthCheckResponse


class Health:
    """The health of a server and its services: all serve, until all drain."""

    def __init__(self, services: Iterable[str]) -> None:
        """`services` are the names that clients may ask for; "" is the server."""
        self._known = {"", *services}
        self._draining = asyncio.Event()

    @property
    def methods(self) -> Methods:
        """The methods `Check` and `Watch`."""
        return Methods({f"/{SERVICE}/Check": self.check}, {f"/{SERVICE}/Watch": self.watch})

    def drain(self) -> None:
        """Report NOT_SERVING from now on."""
        self._draining.set()

    async def check(self, body: bytes, _: GrpcCall) -> bytes:
        """Return the state of a service."""
        service = _service_of(body)
        if service not in self._known:
            raise CallError(Status.NOT_FOUND, "the server does not have this service")
        return self._reply(service)

    async def watch(self, call: StreamingCall) -> None:
        """Send the state of a service, and each change."""
        body = await call.receive()
        if body is None:
            raise CallError(Status.INVALID_ARGUMENT, "the call has no HealthCheckRequest")
        service = _service_of(body)
        if not self._draining.is_set():
            await call.send(self._reply(service))
            await self._draining.wait()
        await call.send(self._reply(service))
        # Until the client ends the call, or the server stops. A client whose watch ends starts
        # another one at once.
        await asyncio.Event().wait()

    def _reply(self, service: str) -> bytes:
        status = _Response.NOT_SERVING if self._draining.is_set() else _Response.SERVING
        if service not in self._known:
            status = _Response.SERVICE_UNKNOWN
        reply: bytes = _Response(status=status).SerializeToString()
        return reply


def _service_of(body: bytes) -> str:
    try:
        service: str = _Request.FromString(body).service
    except DecodeError:
        raise CallError(Status.INVALID_ARGUMENT, "this is not a HealthCheckRequest") from None
    return service
