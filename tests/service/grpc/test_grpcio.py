"""What only the server on grpcio does. What all servers do is in test_server.py."""

from __future__ import annotations

import subprocess
import sys

WITHOUT = """
import sys
sys.modules["grpc"] = None
try:
    import ratekeeper.service.grpc.grpcio
except ValueError as error:
    print(type(error).__name__, error)
"""


def test_without_grpcio_the_error_names_the_extra() -> None:
    """A base installation has no gRPC; the error says what to install."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("ConfigError")
    assert "pip install 'ratekeeper[server]'" in done.stdout
