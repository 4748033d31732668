"""See in Prometheus how often each limit of my application denies.

`register()` reports all limiters of the process: those of the application, of its routes, and your
own. A check adds to two integers, so it costs nothing that you would notice. `outcome="denied"` by
`rule` is the graph to start with. With several workers, set PROMETHEUS_MULTIPROC_DIR.

The trap is a counter of your own with the client as a label: an attacker who invents keys creates a
time series with each of them, until Prometheus has no memory left. These metrics have rules and
routes as labels, and never a key.
"""

from __future__ import annotations

import asyncio

import httpx
from fastapi import FastAPI, Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    generate_latest,
)

from ratekeeper.fastapi import RateLimit
from ratekeeper.metrics.prometheus import register
from ratekeeper.testing import ManualClock

app = FastAPI()
limit = RateLimit(
    app,
    "100/minute",
    name="app",
    skip=lambda request: request.path == "/metrics",
    clock=ManualClock(),  # so that the numbers below are exact; leave it out in real code
)
register()


@app.get("/orders/{number}", dependencies=[limit("10/minute", key="header:X-API-Key")])
async def order(number: int) -> int:
    return number


@app.get("/metrics")
async def metrics() -> Response:  # let only Prometheus reach it
    return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)


async def main() -> None:
    own = CollectorRegistry()
    naive = Counter("requests", "By client, which is the trap.", ["key"], registry=own)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
        for key in ["sk_1"] * 15 + [f"sk_invented_{number}" for number in range(200)]:
            await client.get("/orders/7", headers={"X-API-Key": key})
            naive.labels(key).inc()
        scraped = (await client.get("/metrics")).text

    lines = [line for line in scraped.splitlines() if line.startswith("ratekeeper_rule_decisions")]
    print(*lines, sep="\n")
    shown = {line.rpartition(" ")[2] for line in lines if 'outcome="denied"' in line}
    assert shown == {"5.0", "110.0"}, "five of sk_1, and then the application's limit"
    assert "sk_" not in scraped

    series = generate_latest(own).decode().count("requests_total{")
    print(f"a counter by client has {series} time series, and these have {len(lines)}")
    assert series == 201


if __name__ == "__main__":
    asyncio.run(main())
