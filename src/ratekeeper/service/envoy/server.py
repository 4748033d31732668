"""The gRPC services of one worker: rate limits, quotas (experimental), health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Final

from ratekeeper.core.errors import ConfigError
from ratekeeper.decide.failure import FailurePolicy
from ratekeeper.service.envoy.protocol.messages import POOL, QUOTA_SERVICE, SERVICE
from ratekeeper.service.envoy.quotas import QuotaService
from ratekeeper.service.envoy.service import RateLimitService
from ratekeeper.service.grpc import server
from ratekeeper.service.grpc.calls import STOP_SECONDS, Bounds, GrpcServer, Methods, TlsFiles
from ratekeeper.service.http.context import ServiceContext

try:
    from ratekeeper.service.grpc import health, reflection
except ImportError as error:
    raise ConfigError(
        f"Envoy uses gRPC, which needs grpcio-health-checking and grpcio-reflection: "
        f"pip install 'ratekeeper[server]' ({error})"
    ) from error

METHOD: Final = "ShouldRateLimit"
QUOTA_METHOD: Final = "StreamRateLimitQuotas"

# Reflection needs all services in one pool.
for _file in (health.FILE, reflection.FILE):
    POOL.AddSerializedFile(_file)


class EnvoyServer:
    """A running server. `port` is its real port, also if it was started on port 0."""

    def __init__(
        self,
        running: GrpcServer,
        checked: health.Health,
        quotas: QuotaService,
        renewing: Coroutine[None, None, None],
    ) -> None:
        """Use `start`."""
        self._running = running
        self._health = checked
        self._quotas = quotas
        self._renewing = asyncio.create_task(renewing)
        self.port = running.port

    async def drain(self) -> None:
        """Report NOT_SERVING to health checks; calls still get replies."""
        self._health.drain()

    async def stop(self, grace_s: float = STOP_SECONDS) -> None:
        """Drain, and stop as GrpcServer.stop does."""
        self._health.drain()
        self._renewing.cancel()
        self._quotas.stop()
        await self._running.stop(grace_s)
        await self._quotas.ended()


async def start(
    context: ServiceContext,
    address: str,
    tls: TlsFiles | None = None,
    *,
    on_failure: FailurePolicy = "open",
    bounds: Bounds | None = None,
    on: server.Implementation = server.IMPLEMENTATION,
) -> EnvoyServer:
    """Start a server on `address`. Raises ConfigError if it cannot listen.

    `on_failure` is the failure policy of descriptor limits; rules have their own. `bounds` and `on`
    are those of `grpc.server.start`.
    """
    service = RateLimitService(
        context.limiter,
        tokens=context.tokens,
        style=replace(context.settings.style, node=context.node_header),
        on_failure=on_failure,
        counters=context.counters,
        recorder=context.recorder,
    )
    quotas = QuotaService(
        context.limiter, tokens=context.tokens, on_failure=on_failure, counters=context.counters
    )
    services = (SERVICE, QUOTA_SERVICE, health.SERVICE)
    checked = health.Health(services)
    listed = reflection.Reflection(services, POOL)
    path = f"/{SERVICE}/{METHOD}"
    methods = Methods(
        {path: service.should_rate_limit, **checked.methods.unary},
        {
            f"/{QUOTA_SERVICE}/{QUOTA_METHOD}": quotas.stream,
            **checked.methods.streaming,
            **listed.methods.streaming,
        },
        # A call to a remote store waits, with timeouts that need a task.
        at_once=frozenset({path}) if context.limiter.store.is_local else frozenset(),
    )
    running = await server.start(
        *(methods, address, tls),
        bounds=bounds,
        counted=context.counters.grpc_requests,
        resets=context.counters.grpc_resets,
        on=on,
    )
    context.envoys.own = partial(quotas.statuses, context.node_id, context.settings.worker)
    return EnvoyServer(running, checked, quotas, context.envoys.renew())
