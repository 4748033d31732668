"""ShouldRateLimit on both servers of `ratekeeper serve`: on grpcio, and on libnghttp2."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from tests.redis_servers.ports import HOST, free_port

from bench.grpc_load import call_rate, paced_calls, try_call
from bench.http_measure import Contender
from bench.http_servers import post, ratekeeper_serve

RULES: Final = """
version: 1
rules:
  - id: shop
    match: {attributes: {domain: shop}}
    by: [api_key]
    limits: [1000000/second]
"""


def grpc_contenders(folder: Path) -> Sequence[Contender]:
    """Return both servers, each with one worker."""
    rules = folder / "grpc.yaml"
    rules.write_text(RULES)
    return [
        Contender(
            f"ratekeeper on {on}",
            grpc_serve(rules, port, on),
            [post("/v1/check", b"{}")],
            ours=on == "libnghttp2",
            timed=True,
            rate=partial(_checked_rate, port),
            pace=partial(paced_calls, port),
        )
        for on in ("grpcio", "libnghttp2")
        for port in [free_port()]
    ]


def grpc_serve(rules: Path, port: int, on: str) -> list[str]:
    """Return the command that starts the service with one worker and gRPC on `port`."""
    return ratekeeper_serve(
        rules, "--store", "memory://", "--grpc", f"{HOST}:{port}", "--grpc-server", on
    )


def _checked_rate(port: int, seconds: int) -> float:
    try_call(port)
    return call_rate(port, seconds)
