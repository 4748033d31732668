"""Load on a gRPC server with h2load: the maximum that it can answer, and a fixed rate.

The calls are ShouldRateLimit with the descriptor that the example's Envoy sends. h2load knows
HTTP/2 and not gRPC: every status of HTTP is 200. So one call is checked with a gRPC client first.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc
from tests.redis_servers.ports import HOST

from bench.http_load import LoadFailed, Paced, tool_path
from ratekeeper.service.envoy.protocol.messages import (
    SERVICE,
    RateLimitRequest,
    RateLimitResponse,
)

CONNECTIONS: Final = 8
STREAMS: Final = 32
PATH: Final = f"/{SERVICE}/ShouldRateLimit"
_DESCRIPTOR: Final = (
    *(("remote_address", "127.0.0.1"), ("path", "/v1/orders"), ("method", "GET")),
    ("api_key", "sk_1"),
)


def message() -> bytes:
    """Return the request of all calls."""
    entries = [{"key": key, "value": value} for key, value in _DESCRIPTOR]
    asked = RateLimitRequest(domain="shop", descriptors=[{"entries": entries}])
    found: bytes = asked.SerializeToString()
    return found


def try_call(port: int) -> None:
    """Call the server once. Raises LoadFailed unless it answers OK."""
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        reply = channel.unary_unary(PATH)(message(), timeout=10)
    if RateLimitResponse.FromString(reply).overall_code != RateLimitResponse.OK:
        raise LoadFailed(f"the server on port {port} did not answer OK")


def call_rate(port: int, seconds: int) -> float:
    """Return the calls per second with 8 connections, each with 32 calls in flight."""
    streams = ("-c", str(CONNECTIONS), "-m", str(STREAMS))
    return _run(port, seconds, streams)


def paced_calls(port: int, per_second: float, seconds: float) -> Paced:
    """Call at a fixed rate, and return how long the calls took."""
    with tempfile.TemporaryDirectory(prefix="ratekeeper-bench-") as folder:
        times = Path(folder, "times")
        each = max(round(per_second / CONNECTIONS), 1)
        streams = ("-c", str(CONNECTIONS), "-m", str(STREAMS), "--rps", str(each))
        whole = max(round(seconds), 1)
        answered = _run(port, whole, (*streams, "--log-file", str(times)))
        # A line has the start, the status and the duration, the times in microseconds.
        taken = sorted(int(line.split("\t")[2]) for line in times.read_text().splitlines())
    if not taken:
        raise LoadFailed(f"no call was answered in {whole} s")
    return Paced(
        asked_per_second=each * CONNECTIONS,
        answered_per_second=answered,
        p50_us=taken[len(taken) // 2],
        p99_us=taken[len(taken) * 99 // 100],
    )


def _run(port: int, seconds: int, options: Sequence[str]) -> float:
    with tempfile.NamedTemporaryFile(prefix="ratekeeper-bench-") as body:
        asked = message()
        # gRPC's prefix: not compressed, and the length.
        body.write(b"\0" + len(asked).to_bytes(4, "big") + asked)
        body.flush()
        done = subprocess.run(
            [
                *(
                    tool_path("h2load", "nghttp2-client"),
                    "-t",
                    "1",
                    "-D",
                    str(seconds),
                    *options,
                    "-d",
                    body.name,
                ),
                *("-H", "content-type: application/grpc", "-H", "te: trailers"),
                f"http://{HOST}:{port}{PATH}",
            ],
            capture_output=True,
            check=False,
            text=True,
            timeout=seconds + 30,
        )
    counts = re.search(r"requests: .* (\d+) succeeded, (\d+) failed, (\d+) errored", done.stdout)
    if counts is None or int(counts[2]) or int(counts[3]) or not int(counts[1]):
        raise LoadFailed(f"not every call was answered: {done.stdout} {done.stderr}")
    return int(counts[1]) / seconds
