"""A real Envoy in front of a small upstream, with and without calls of the service over gRPC.

The configuration is that of the example, with one thread. The first row has no rate limit filter.
Envoy, the upstream, the service and wrk share the machine, so the ratio is better with more than
two processors.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from tests.envoy_process import envoy_path, example, filter_of
from tests.redis_servers.ports import free_port

from bench.grpc_servers import RULES, grpc_serve
from bench.http_measure import Contender, HttpEffort, HttpWork, Progress, measure
from bench.http_servers import Serving, get, granian, post
from bench.redis_placement import Placement

_REQUEST: Final = b"GET /v1/orders HTTP/1.1\r\nhost: localhost\r\nx-api-key: sk_1\r\n\r\n"


def measure_envoy(
    name: str, folder: Path, placement: Placement, effort: HttpEffort, progress: Progress
) -> HttpWork:
    """Start the upstream and the services, then an Envoy for each row, and measure these."""
    rules = folder / "envoy.yaml"
    rules.write_text(RULES)
    with ExitStack() as stack:
        progress(f"{name}: starting the upstream and the services …")
        upstream = Serving("upstream", granian("bench.http_apps:bare"), get("/"))
        stack.enter_context(upstream)
        bare = _without_filter(example(upstream.port, free_port()))
        contenders = [Contender("Envoy", _command(bare), [_REQUEST], timed=True)]
        for on in ("grpcio", "libnghttp2"):
            port = free_port()
            service = Serving(
                f"service on {on}", grpc_serve(rules, port, on), post("/v1/check", b"{}")
            )
            stack.enter_context(service)
            contenders.append(
                Contender(
                    f"Envoy, asking tollkeeper on {on}",
                    _command(example(upstream.port, port)),
                    [_REQUEST],
                    ours=on == "libnghttp2",
                    timed=True,
                    beside=(service,),
                )
            )
        return measure(name, contenders, placement, effort, progress)


def _command(config: dict[str, Any]) -> list[str]:
    config = json.loads(json.dumps(config))
    del config["admin"]
    listener = config["static_resources"]["listeners"][0]
    listener["address"]["socket_address"]["port_value"] = "PORT"
    text = json.dumps(config).replace('"PORT"', "{port}")
    return [
        *(str(envoy_path()), "--config-yaml", text, "--concurrency", "1"),
        *("--disable-hot-restart", "--log-level", "warning"),
    ]


def _without_filter(config: dict[str, Any]) -> dict[str, Any]:
    bare: dict[str, Any] = json.loads(json.dumps(config))
    assert "rate_limit_service" in filter_of(bare)
    chain = bare["static_resources"]["listeners"][0]["filter_chains"][0]
    del chain["filters"][0]["typed_config"]["http_filters"][0]
    return bare
