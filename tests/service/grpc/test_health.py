"""Health checking, without a server."""

from __future__ import annotations

import asyncio

import pytest
from grpc_health.v1 import health_pb2

from ratekeeper.service.grpc.calls import CallError, Status
from ratekeeper.service.grpc.health import Health

UNKNOWN, SERVING, NOT_SERVING, SERVICE_UNKNOWN = range(4)


class StreamOfOne:
    """A streaming call whose client has sent one message."""

    def __init__(self, message: bytes | None) -> None:
        self._messages = [message, None]
        self.sent: asyncio.Queue[int] = asyncio.Queue()

    def metadata(self, _: str) -> str | None:
        return None

    def time_remaining(self) -> float | None:
        return None

    async def receive(self) -> bytes | None:
        return self._messages.pop(0)

    async def send(self, message: bytes) -> None:
        await self.sent.put(health_pb2.HealthCheckResponse.FromString(message).status)


def asked(service: str) -> bytes:
    """Return a request."""
    body: bytes = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    return body


async def state(health: Health, service: str) -> int:
    """Return the answer of Check."""
    reply = await health.check(asked(service), StreamOfOne(None))
    found: int = health_pb2.HealthCheckResponse.FromString(reply).status
    return found


async def test_all_services_serve_until_they_drain() -> None:
    """The server itself has the empty name."""
    health = Health(["a"])
    assert [await state(health, name) for name in ("", "a")] == [SERVING] * 2
    health.drain()
    assert [await state(health, name) for name in ("", "a")] == [NOT_SERVING] * 2


async def test_an_unknown_service_is_not_found() -> None:
    """As the protocol says."""
    with pytest.raises(CallError) as error:
        await state(Health(["a"]), "b")
    assert error.value.status == Status.NOT_FOUND


@pytest.mark.parametrize(
    ("service", "states"), [("a", [SERVING, NOT_SERVING]), ("b", [SERVICE_UNKNOWN] * 2)]
)
async def test_a_watch_has_the_state_and_each_change(service: str, states: list[int]) -> None:
    """A watch of an unknown service is answered too: it could be added later."""
    health = Health(["a"])
    call = StreamOfOne(asked(service))
    watching = asyncio.create_task(health.watch(call))
    assert await call.sent.get() == states[0]
    health.drain()
    assert await call.sent.get() == states[1]
    assert not watching.done()
    watching.cancel()


@pytest.mark.parametrize("message", [None, b"\xff"])
async def test_an_invalid_watch(message: bytes | None) -> None:
    """It ends with a status."""
    with pytest.raises(CallError) as error:
        await Health([]).watch(StreamOfOne(message))
    assert error.value.status == Status.INVALID_ARGUMENT
