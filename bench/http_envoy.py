"""A real Envoy in front of a small upstream: without a limit, asking the service, and with quotas.

The configurations are those of the examples, with one thread. The first row has no filter. Envoy,
the upstream, the service and wrk share the machine, so the ratio is better with more than two
processors.
"""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any, Final

from tests.envoy_process import QUOTAS_EXAMPLE, envoy_path, example, filter_of
from tests.redis_servers import Single
from tests.redis_servers.ports import HOST, free_port

from bench.grpc_servers import RULES, grpc_serve
from bench.http_load import LoadFailed
from bench.http_measure import Contender, HttpEffort, HttpWork, Progress, measure
from bench.http_servers import Serving, answer_of, get, granian, post, ratekeeper_serve
from bench.redis_placement import Placement

QUOTA_RULES: Final = """
version: 1
rules:
  - id: {quota}
    match: {{attributes: {{domain: shop}}, tenant: "*"}}
    by: [tenant]
    limits: [1000000/second]
    consistency: leased
    envoy_quota: {quota}
"""
_REQUEST: Final = (
    b"GET /v1/orders HTTP/1.1\r\nhost: localhost\r\nx-api-key: sk_1\r\nx-tenant: acme\r\n\r\n"
)


def measure_envoy(
    name: str, folder: Path, placement: Placement, effort: HttpEffort, progress: Progress
) -> HttpWork:
    """Start the upstream and the services, then an Envoy for each row, and measure these."""
    with ExitStack() as stack:
        progress(f"{name}: starting the upstream and the services …")
        upstream = Serving("upstream", granian("bench.http_apps:bare"), get("/"))
        stack.enter_context(upstream)
        redis = stack.enter_context(Single())
        bare = _without_filter(example(upstream.port, free_port()))
        contenders = [Contender("Envoy", _command(bare), [_REQUEST], timed=True)]
        contenders += [_asking(on, upstream, folder, stack) for on in ("grpcio", "libnghttp2")]
        quotas = [_with_quotas(how, upstream, redis, folder, stack) for how in ("rate", "grants")]
        contenders += [contender for contender, _ in quotas]
        began_s = monotonic()
        work = measure(name, contenders, placement, effort, progress)
        for contender, service in quotas:
            found = _messages(service) / (monotonic() - began_s)
            work.notes.append(f"{contender.name}: {found:.2f} messages/s between Envoy and service")
        return work


def _asking(on: str, upstream: Serving, folder: Path, stack: ExitStack) -> Contender:
    """Return an Envoy that asks the service for each request."""
    rules = folder / "envoy.yaml"
    rules.write_text(RULES)
    port = free_port()
    service = Serving(f"service on {on}", grpc_serve(rules, port, on), post("/v1/check", b"{}"))
    stack.enter_context(service)
    return Contender(
        f"Envoy, asking ratekeeper on {on}",
        _command(example(upstream.port, port)),
        [_REQUEST],
        ours=on == "libnghttp2",
        timed=True,
        beside=(service,),
    )


def _with_quotas(
    quota: str, upstream: Serving, redis: Single, folder: Path, stack: ExitStack
) -> tuple[Contender, Serving]:
    """Return an Envoy that decides by assigned quotas, and the service that assigns them."""
    rules = folder / f"{quota}.yaml"
    rules.write_text(QUOTA_RULES.format(quota=quota))
    port = free_port()
    command = ratekeeper_serve(rules, "--store", redis.uri, "--grpc", f"{HOST}:{port}")
    service = Serving(f"service for {quota}", command, post("/v1/check", b"{}"))
    stack.enter_context(service)
    contender = Contender(
        f"Envoy, with quotas ({quota})",
        _command(example(upstream.port, port, QUOTAS_EXAMPLE)),
        [_REQUEST],
        ours=True,
        timed=True,
        # An Envoy that is paused sends no reports, and its assignments expire.
        runs_on=True,
        beside=(service,),
    )
    return contender, service


def _messages(service: Serving) -> float:
    """Return how many reports the service has received, and as many answers."""
    text = answer_of(service.port, get("/metrics")).decode()
    found = re.search(
        r"^ratekeeper_envoy_quota_reports_total(?:{[^}]*})? (\S+)", text, re.MULTILINE
    )
    if found is None:
        raise LoadFailed(f"the service counts no reports: {text[:500]}")
    return 2 * float(found[1])


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
