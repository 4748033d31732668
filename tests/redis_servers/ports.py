"""Free ports on loopback, with the port of the cluster bus beside each.

Below 32768, where Linux takes the ports of outgoing connections from. A client that keeps trying
a dead server's port in that range may, on loopback, be given the same port for its own end and so
connect to itself; and anyone's outgoing connection may sit on a killed server's port when it is to
start again. The bus is always 10,000 higher, so the highest port is 22,767.
"""

from __future__ import annotations

import socket
from random import SystemRandom

HOST = "127.0.0.1"
BUS_OFFSET = 10_000

_PORT_MIN = 10_000
_PORT_MAX = 32_767 - BUS_OFFSET
_ATTEMPTS_MAX = 200

# Not the shared generator: tests seed that one, and then two runs would want the same ports.
_random = SystemRandom()


def free_port() -> int:
    """A port that nobody listens on now, nor on its bus port. Somebody may be quicker to take it:
    whoever starts a server on it tries another one then."""
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
        # As redis-server does: a connection's end that lingers in TIME_WAIT is not in the way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
