"""Find free ports on loopback, each with a free port for the cluster bus.

Ports are below 32768, where Linux begins to take the ports of outgoing connections. In that range,
a client that retries a dead server's port may get the same port for its own end, and so connect to
itself. Any outgoing connection may also hold a killed server's port when the server starts again.
The bus port is always 10,000 higher, so the highest port is 22,767.
"""

from __future__ import annotations

import socket
from random import SystemRandom

HOST = "127.0.0.1"
BUS_OFFSET = 10_000

_PORT_MIN = 10_000
_PORT_MAX = 32_767 - BUS_OFFSET
_ATTEMPTS_MAX = 200

# Not the shared generator: tests seed that one, and then two runs would choose the same ports.
_random = SystemRandom()


def free_port() -> int:
    """Return a port that is free now together with its bus port.

    Another process may take it first; the caller then tries another port.
    """
    for _ in range(_ATTEMPTS_MAX):
        port = _random.randint(_PORT_MIN, _PORT_MAX)
        if _is_free(port) and _is_free(port + BUS_OFFSET):
            return port
    raise AssertionError(
        f"tried {_ATTEMPTS_MAX} ports from {_PORT_MIN} to {_PORT_MAX} on {HOST} and none was free "
        f"together with the one {BUS_OFFSET} above it; stop servers that are left over"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # redis-server sets it too, so that a connection in TIME_WAIT does not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
