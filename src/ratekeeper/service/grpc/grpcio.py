"""The server on grpcio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from ratekeeper.core.errors import ConfigError
from ratekeeper.service.grpc.calls import (
    STOP_SECONDS,
    Bounds,
    CallError,
    Methods,
    Status,
    StreamingMethod,
    TlsFiles,
    UnaryMethod,
    call_error_of,
    count,
)

try:
    import grpc
except ImportError as error:
    raise ConfigError(f"gRPC needs grpcio: pip install 'ratekeeper[server]' ({error})") from error


class GrpcioServer:
    """A running server."""

    def __init__(self, server: Any, port: int) -> None:
        """Use `start`."""
        self._server = server
        self._port = port

    @property
    def port(self) -> int:
        """See GrpcServer.port."""
        return self._port

    async def stop(self, grace_s: float = STOP_SECONDS) -> None:
        """See GrpcServer.stop."""
        await self._server.stop(grace_s)


async def start(
    methods: Methods,
    address: str,
    tls: TlsFiles | None,
    bounds: Bounds,
    counted: dict[str, int],
) -> GrpcioServer:
    """Start a server. Raises OSError if it cannot listen, ConfigError for an unreadable file."""
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 1),
            # For both kinds of methods. `_Handlers` rejects a larger message of a unary call.
            ("grpc.max_receive_message_length", max(bounds.message_bytes, bounds.streamed_bytes)),
            ("grpc.max_send_message_length", max(bounds.message_bytes, bounds.streamed_bytes)),
            ("grpc.max_metadata_size", bounds.metadata_bytes),
        ],
        maximum_concurrent_rpcs=bounds.calls,
    )
    server.add_generic_rpc_handlers((_Handlers(methods, bounds, counted),))
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, _credentials(tls))
    except RuntimeError as error:
        raise OSError(str(error)) from None
    if not port:
        raise OSError("grpcio gives no reason")
    await server.start()
    return GrpcioServer(server, port)


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    certificate, key, authority = tls.contents()
    return grpc.ssl_server_credentials(
        [(key, certificate)],
        root_certificates=authority,
        require_client_auth=authority is not None,
    )


class _Handlers(grpc.GenericRpcHandler):
    """Finds the method of a path. grpcio answers UNIMPLEMENTED for a path without one."""

    def __init__(self, methods: Methods, bounds: Bounds, counted: dict[str, int]) -> None:
        self._counted = counted
        self._handlers: dict[str, Any] = {
            **{
                path: grpc.unary_unary_rpc_method_handler(_unary(method, bounds, counted))
                for path, method in methods.unary.items()
            },
            **{
                path: grpc.stream_stream_rpc_method_handler(_streaming(method, counted))
                for path, method in methods.streaming.items()
            },
        }

    def service(self, handler_call_details: Any) -> Any:
        found = self._handlers.get(handler_call_details.method)
        if found is None:
            count(self._counted, Status.UNIMPLEMENTED)
        return found


def _unary(
    method: UnaryMethod, bounds: Bounds, counted: dict[str, int]
) -> Callable[[bytes, Any], Awaitable[bytes]]:
    async def run(message: bytes, context: Any) -> bytes:
        if len(message) > bounds.message_bytes:
            count(counted, Status.RESOURCE_EXHAUSTED)
            detail = f"a message has at most {bounds.message_bytes} bytes"
            await _abort(context, CallError(Status.RESOURCE_EXHAUSTED, detail))
        try:
            return await method(message, _GrpcioCall(context))
        except Exception as error:
            await _abort(context, call_error_of(error, counted))

    return run


def _streaming(
    method: StreamingMethod, counted: dict[str, int]
) -> Callable[[Any, Any], Awaitable[None]]:
    async def run(_: Any, context: Any) -> None:
        try:
            await method(_GrpcioCall(context))
        except Exception as error:
            await _abort(context, call_error_of(error, counted))

    return run


async def _abort(context: Any, error: CallError) -> NoReturn:
    await context.abort(grpc.StatusCode[error.status.name], error.message)
    raise AssertionError("abort raises")


class _GrpcioCall:
    """A call on grpcio."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def metadata(self, name: str) -> str | None:
        for key, value in self._context.invocation_metadata() or ():
            if key == name and isinstance(value, str):
                return value
        return None

    def time_remaining(self) -> float | None:
        left_s: float | None = self._context.time_remaining()
        return left_s

    async def receive(self) -> bytes | None:
        message: Any = await self._context.read()
        return None if message is grpc.aio.EOF else message

    async def send(self, message: bytes) -> None:
        await self._context.write(message)
