"""Starts the gRPC server of a worker.

Every worker of a machine listens on the same port (SO_REUSEPORT), and the kernel distributes the
connections. Envoy keeps one connection for each of its threads, so some workers have more to do
than others. The limits hold all the same, because the workers share a store.
"""

from __future__ import annotations

from typing import Final, Literal

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.service.grpc.calls import Bounds, GrpcServer, Methods, TlsFiles

try:
    from ratekeeper.service.grpc import http2
except ImportError:  # it was not built, or libnghttp2 is not installed
    BUILT = False
else:
    BUILT = True

Implementation = Literal["libnghttp2", "grpcio"]

IMPLEMENTATION: Final[Implementation] = "libnghttp2" if BUILT else "grpcio"
PORT_MAX: Final = 65_535


def chosen(wanted: Literal["auto"] | Implementation) -> Implementation:
    """Return the implementation of a setting. Raises ConfigError if it was not built."""
    if wanted == "libnghttp2" and not BUILT:
        raise ConfigError(
            "the gRPC server on libnghttp2 was not built: install a compiler and libnghttp2-dev, "
            "then install ratekeeper again; or choose --grpc-server grpcio"
        )
    return IMPLEMENTATION if wanted == "auto" else wanted


async def start(
    methods: Methods,
    address: str,
    tls: TlsFiles | None = None,
    *,
    bounds: Bounds | None = None,
    counted: dict[str, int] | None = None,
    resets: dict[str, int] | None = None,
    on: Implementation = IMPLEMENTATION,
) -> GrpcServer:
    """Start a server on `address` ("127.0.0.1:8081", "unix:/run/ratekeeper.sock").

    Raises ConfigError if it cannot listen. `counted` gets the number of calls for which the server
    and not a method chose the status, by its name. `resets` gets the number of streams and
    connections that ended without a status, by reason; grpcio does not know it. `on` selects an
    implementation.
    """
    counted = {} if counted is None else counted
    try:
        _check(address)
        if chosen(on) == "libnghttp2":
            return await http2.start(methods, address, tls, bounds or Bounds(), counted, resets)
        from ratekeeper.service.grpc import grpcio  # noqa: PLC0415 - slow to import

        return await grpcio.start(methods, address, tls, bounds or Bounds(), counted)
    except OSError as error:
        raise ConfigError(
            f"gRPC cannot listen on {show(address)}: {error.strerror or error}; "
            f"choose an address of this machine and a free port, for example 127.0.0.1:8081"
        ) from None


def _check(address: str) -> None:
    """Raise OSError unless it is an address. grpcio takes a larger port modulo 65536."""
    if address.startswith("unix:"):
        return
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and int(port[:6]) <= PORT_MAX):
        raise OSError("it is not HOST:PORT with a port up to 65535")
