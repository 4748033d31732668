"""gRPC's reflection: a client without stubs, such as grpcurl, asks for the services and types.

Protocol: https://github.com/grpc/grpc/blob/master/doc/server-reflection.md
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import (  # type: ignore[import-untyped]  # it ships no types
    reflection_pb2,
)

from ratekeeper.service.grpc.calls import CallError, Methods, Status, StreamingCall

SERVICE: Final = "grpc.reflection.v1alpha.ServerReflection"
FILE: Final[bytes] = reflection_pb2.DESCRIPTOR.serialized_pb

_Request = reflection_pb2.ServerReflectionRequest
_Response = reflection_pb2.ServerReflectionResponse


class Reflection:
    """Answers from a pool of descriptors."""

    def __init__(self, services: Iterable[str], pool: DescriptorPool) -> None:
        """`services` are the names that are listed; `pool` contains the files of all of them."""
        self._services = sorted({*services, SERVICE})
        self._pool = pool

    @property
    def methods(self) -> Methods:
        """The method `ServerReflectionInfo`."""
        return Methods(streaming={f"/{SERVICE}/ServerReflectionInfo": self.info})

    async def info(self, call: StreamingCall) -> None:
        """Answer each request of the client, in order."""
        while (body := await call.receive()) is not None:
            try:
                request = _Request.FromString(body)
            except DecodeError:
                raise CallError(
                    Status.INVALID_ARGUMENT, "this is not a ServerReflectionRequest"
                ) from None
            response = _Response(valid_host=request.host, original_request=request)
            self._fill(response, request)
            await call.send(response.SerializeToString())

    def _fill(self, response: Any, request: Any) -> None:
        kind = request.WhichOneof("message_request")
        if kind == "list_services":
            for name in self._services:
                response.list_services_response.service.add(name=name)
            return
        try:
            self._add_files(response, self._file_of(kind, request))
        except KeyError:
            response.error_response.error_code = Status.NOT_FOUND
            response.error_response.error_message = "the server does not know this"

    def _file_of(self, kind: str, request: Any) -> Any:
        """Return the file that is asked for. Raises KeyError."""
        if kind == "file_by_filename":
            return self._pool.FindFileByName(request.file_by_filename)
        if kind == "file_containing_symbol":
            return self._pool.FindFileContainingSymbol(request.file_containing_symbol)
        raise KeyError(kind)  # the messages have no extensions

    def _add_files(self, response: Any, file: Any) -> None:
        """Add a file and all files that it imports, each once."""
        files = {file.name: file}
        waiting = [file]
        while waiting:
            for each in waiting.pop().dependencies:
                if each.name not in files:
                    files[each.name] = each
                    waiting.append(each)
        for each in files.values():
            copied = FileDescriptorProto()
            each.CopyToProto(copied)
            response.file_descriptor_response.file_descriptor_proto.append(
                copied.SerializeToString()
            )
