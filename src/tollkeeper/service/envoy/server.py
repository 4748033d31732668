"""The gRPC server of one worker: the rate limit service, health, and reflection.

Every worker of a machine listens on the same port (SO_REUSEPORT), and the kernel spreads the
connections over them. Envoy keeps one connection for each of its threads, so with several workers
some have more to do than others: limits hold all the same, since they share a store.

Everything has a bound: calls at a time, bytes in a message, and how long a stop waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.decide.failure import FailurePolicy
from tollkeeper.limiter import AsyncLimiter
from tollkeeper.service.envoy.protocol.messages import POOL, SERVICE, RateLimitResponse
from tollkeeper.service.envoy.service import RateLimitService
from tollkeeper.service.http.tokens import Tokens
from tollkeeper.web.answers import Style

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
        f"Envoy asks over gRPC, which needs grpcio, grpcio-health-checking and "
        f"grpcio-reflection: pip install 'tollkeeper[server]' ({error})"
    ) from error

MESSAGE_BYTES_MAX: Final = 1024 * 1024
METADATA_BYTES_MAX: Final = 16 * 1024
# More wait for nothing: Envoy's own patience is 20 ms. Those beyond fail as RESOURCE_EXHAUSTED.
CALLS_MAX: Final = 4_096
STOP_SECONDS: Final = 5.0
PORT_MAX: Final = 65_535

METHOD: Final = "ShouldRateLimit"


class Settings(Protocol):
    """What the server needs of a worker's settings."""

    @property
    def style(self) -> Style: ...


class Node(Protocol):
    """What the server needs of a worker of the service."""

    @property
    def limiter(self) -> AsyncLimiter: ...

    @property
    def tokens(self) -> Tokens | None: ...

    @property
    def settings(self) -> Settings: ...


@dataclass(frozen=True, slots=True)
class Tls:
    """The files of a server's certificate and key; with `authority`, clients need one as well."""

    certificate: Path
    key: Path
    authority: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """What gRPC makes of them. Raises ConfigError for a file that cannot be read."""
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


class Handle:
    """A server that runs. `port` is where, also if it was started on port 0."""

    def __init__(self, server: Any, health_service: Any, port: int) -> None:
        """Use `start`."""
        self._server = server
        self._health = health_service
        self.port = port

    async def drain(self) -> None:
        """Tell whoever asks for our health to go elsewhere; calls are answered as before."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float = STOP_SECONDS) -> None:
        """Take no more calls, and end when those that are under way are answered.

        What is not answered within `grace_s` seconds is cut off.
        """
        await self.drain()
        await self._server.stop(grace_s)


async def start(
    node: Node,
    address: str,
    tls: Tls | None = None,
    *,
    on_failure: FailurePolicy = "open",
) -> Handle:
    """Answer Envoy on `address` ("127.0.0.1:8081", "unix:/run/tollkeeper.sock").

    `on_failure` is for the limits that descriptors bring along; rules have their own. Raises
    ConfigError where it cannot listen.
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
        node.limiter,
        tokens=node.tokens,
        style=node.settings.style,
        on_failure=on_failure,
        counters=getattr(node, "counters", None),
        recorder=getattr(node, "recorder", None),
    )
    health_service = health.aio.HealthServicer()
    _register(server, service, health_service)
    port = _listen(server, address, tls)
    await server.start()
    await health_service.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    return Handle(server, health_service, port)


def _register(server: Any, service: RateLimitService, health_service: Any) -> None:
    handler: Any = grpc.unary_unary_rpc_method_handler(
        # The bytes as they are: what cannot be read is answered with a status that says so.
        service.should_rate_limit,
        response_serializer=RateLimitResponse.SerializeToString,
    )
    generic = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
    server.add_generic_rpc_handlers((generic,))
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    # Reflection tells of all three from one pool, which is ours.
    for known in (health_pb2, reflection_pb2):
        POOL.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server, POOL)


def _listen(server: Any, address: str, tls: Tls | None) -> int:
    """The port it listens on; 0 is for gRPC a way to say that it cannot."""
    said = "it is not HOST:PORT with a port up to 65535"
    port = 0
    if address.startswith("unix:") or _has_port(address):
        said = "gRPC does not say why"
        try:
            if tls is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, tls.credentials())
        except RuntimeError as error:
            said = str(error)
    if not port:
        raise ConfigError(
            f"gRPC cannot listen on {show(address)}: {said}; "
            f"choose an address of this machine and a free port, for example 127.0.0.1:8081"
        )
    return port


def _has_port(address: str) -> bool:
    # gRPC takes a larger number for the rest that 65536 leaves of it.
    host, _, port = address.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and int(port[:6]) <= PORT_MAX
