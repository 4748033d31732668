"""The gRPC server of one worker: the rate limit service, health, and reflection.

Every worker of a machine listens on the same port (SO_REUSEPORT), and the kernel distributes the
connections. Envoy keeps one connection for each of its threads, so some workers have more to do
than others. The limits hold all the same, because the workers share a store.

Calls in flight, the size of a message and the time for a shutdown are all bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.decide.failure import FailurePolicy
from tollkeeper.service.envoy.protocol.messages import POOL, SERVICE, RateLimitResponse
from tollkeeper.service.envoy.service import RateLimitService
from tollkeeper.service.http.context import ServiceContext

try:
    import grpc
    from grpc_health.v1 import (  # type: ignore[import-untyped]  # it ships no types
        health,
        health_pb2,
        health_pb2_grpc,
    )
    from grpc_reflection.v1alpha import (  # type: ignore[import-untyped]  # nor does it
        reflection,
        reflection_pb2,
    )
except ImportError as error:
    raise ConfigError(
        f"Envoy uses gRPC, which needs grpcio, grpcio-health-checking and "
        f"grpcio-reflection: pip install 'tollkeeper[server]' ({error})"
    ) from error

MESSAGE_BYTES_MAX: Final = 1024 * 1024
METADATA_BYTES_MAX: Final = 16 * 1024
# More could not be answered in time: Envoy's timeout is 20 ms. Others get RESOURCE_EXHAUSTED.
CALLS_MAX: Final = 4_096
STOP_SECONDS: Final = 5.0
PORT_MAX: Final = 65_535

METHOD: Final = "ShouldRateLimit"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a server's certificate and key; with `authority`, clients need one too."""

    certificate: Path
    key: Path
    authority: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for gRPC. Raises ConfigError for a file that cannot be read."""
        authority = None if self.authority is None else _contents(self.authority)
        return grpc.ssl_server_credentials(
            [(_contents(self.key), _contents(self.certificate))],
            root_certificates=authority,
            require_client_auth=authority is not None,
        )


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


class GrpcServer:
    """A running server. `port` is its real port, also if it was started on port 0."""

    def __init__(self, server: Any, health_service: Any, port: int) -> None:
        """Use `start`."""
        self._server = server
        self._health = health_service
        self.port = port

    async def drain(self) -> None:
        """Report NOT_SERVING to health checks; calls still get replies."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float = STOP_SECONDS) -> None:
        """Accept no more calls, and stop when the calls in flight have ended.

        Calls that take longer than `grace_s` seconds are cancelled.
        """
        await self.drain()
        await self._server.stop(grace_s)


async def start(
    context: ServiceContext,
    address: str,
    tls: TlsFiles | None = None,
    *,
    on_failure: FailurePolicy = "open",
) -> GrpcServer:
    """Start a server on `address` ("127.0.0.1:8081", "unix:/run/tollkeeper.sock").

    `on_failure` is the failure policy of descriptor limits; rules have their own. Raises
    ConfigError if it cannot listen.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ],
        maximum_concurrent_rpcs=CALLS_MAX,
    )
    service = RateLimitService(
        context.limiter,
        tokens=context.tokens,
        style=replace(context.settings.style, node=context.node_id),
        on_failure=on_failure,
        counters=context.counters,
        recorder=context.recorder,
    )
    health_service = health.aio.HealthServicer()
    _register(server, service, health_service)
    port = _listen(server, address, tls)
    await server.start()
    await health_service.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    return GrpcServer(server, health_service, port)


def _register(server: Any, service: RateLimitService, health_service: Any) -> None:
    handler: Any = grpc.unary_unary_rpc_method_handler(
        # Raw bytes: the service replies to an invalid message with a status of its own.
        service.should_rate_limit,
        response_serializer=RateLimitResponse.SerializeToString,
    )
    generic = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
    server.add_generic_rpc_handlers((generic,))
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    # Reflection needs all three services in one pool.
    for known in (health_pb2, reflection_pb2):
        POOL.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server, POOL)


def _listen(server: Any, address: str, tls: TlsFiles | None) -> int:
    """Return the port. gRPC returns 0 if it cannot listen."""
    reason = "it is not HOST:PORT with a port up to 65535"
    port = 0
    if address.startswith("unix:") or _has_port(address):
        reason = "gRPC gives no reason"
        try:
            if tls is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, tls.credentials())
        except RuntimeError as error:
            reason = str(error)
    if not port:
        raise ConfigError(
            f"gRPC cannot listen on {show(address)}: {reason}; "
            f"choose an address of this machine and a free port, for example 127.0.0.1:8081"
        )
    return port


def _has_port(address: str) -> bool:
    # gRPC takes a larger number modulo 65536.
    host, _, port = address.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and int(port[:6]) <= PORT_MAX
