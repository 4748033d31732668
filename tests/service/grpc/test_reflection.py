"""Reflection, without a server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2

from ratekeeper.service.grpc.calls import CallError, Status
from ratekeeper.service.grpc.reflection import FILE, SERVICE, Reflection

Asked = reflection_pb2.ServerReflectionRequest


class Stream:
    """A streaming call whose client has sent some messages."""

    def __init__(self, messages: Iterable[bytes]) -> None:
        self._messages = list(messages)
        self.sent: list[Any] = []

    def metadata(self, _: str) -> str | None:
        return None

    def time_remaining(self) -> float | None:
        return None

    async def receive(self) -> bytes | None:
        return self._messages.pop(0) if self._messages else None

    async def send(self, message: bytes) -> None:
        self.sent.append(reflection_pb2.ServerReflectionResponse.FromString(message))


async def answers(*requests: Any) -> list[Any]:
    """Return the answers of a server with two files, of which one imports the other."""
    pool = DescriptorPool()
    base = descriptor_pb2.FileDescriptorProto(name="base.proto", package="shop")
    base.message_type.add(name="Item")
    main = descriptor_pb2.FileDescriptorProto(name="main.proto", package="shop")
    main.dependency.append("base.proto")
    main.service.add(name="Orders").method.add(
        name="Get", input_type=".shop.Item", output_type=".shop.Item"
    )
    for each in (base.SerializeToString(), main.SerializeToString(), FILE):
        pool.AddSerializedFile(each)
    stream = Stream(each.SerializeToString() for each in requests)
    await Reflection(["shop.Orders"], pool).info(stream)
    return stream.sent


async def test_services_are_listed() -> None:
    """Reflection itself, too."""
    [found] = await answers(Asked(list_services=""))
    names = [each.name for each in found.list_services_response.service]
    assert names == [SERVICE, "shop.Orders"]


@pytest.mark.parametrize(
    "request_", [{"file_containing_symbol": "shop.Orders"}, {"file_by_filename": "main.proto"}]
)
async def test_a_file_comes_with_all_that_it_imports(request_: dict[str, str]) -> None:
    """A client can use them without asking again."""
    [found] = await answers(Asked(**request_))
    files = found.file_descriptor_response.file_descriptor_proto
    names = [descriptor_pb2.FileDescriptorProto.FromString(each).name for each in files]
    assert names == ["main.proto", "base.proto"]


@pytest.mark.parametrize(
    "request_",
    [
        {"file_containing_symbol": "shop.Absent"},
        {"file_by_filename": "absent.proto"},
        {"all_extension_numbers_of_type": "shop.Item"},
        {},
    ],
)
async def test_what_is_not_there_is_not_found(request_: dict[str, str]) -> None:
    """The call goes on."""
    found = await answers(Asked(**request_), Asked(list_services=""))
    assert found[0].error_response.error_code == Status.NOT_FOUND
    assert found[1].list_services_response.service


async def test_an_invalid_message_ends_the_call() -> None:
    """With a status."""
    with pytest.raises(CallError) as error:
        await Reflection([], DescriptorPool()).info(Stream([b"\xff"]))
    assert error.value.status == Status.INVALID_ARGUMENT
