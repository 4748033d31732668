"""Show users their own quota: in the headers of each response, and at an endpoint of its own.

The headers come by themselves: `RateLimit`, `RateLimit-Policy` and `X-RateLimit-…`. The endpoint
looks up the limits of the user that the request has authenticated (`spend=False`), so a client can
ask before a large job, and pays nothing. A limit of its own protects it.

Two traps: an endpoint that takes the user from the query shows each client the usage of others. And
if the limit counts this endpoint too, a client that asks for its quota spends it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI, Header

from ratekeeper import AsyncLimiter
from ratekeeper.fastapi import RateLimit, WebRequest
from ratekeeper.testing import ManualClock

TOKENS = {"t-ann": "ann", "t-bob": "bob"}
limiter = AsyncLimiter("100/day fixed_window; 10/minute", name="api", clock=ManualClock())


def key_of(token: str | None) -> tuple[str, str]:
    return ("user", TOKENS.get(token or "", "anonymous"))


def by_user(request: WebRequest) -> tuple[str, str]:
    return key_of(request.header("X-Token"))


app = FastAPI()
limit = RateLimit(app, limiter=limiter, key=by_user, skip=lambda request: request.path == "/quota")


@app.get("/orders")
async def orders() -> str:
    return "orders"


# A route inherits `skip` from the application; its own limit must count.
@app.get("/quota", dependencies=[limit("60/minute", skip=lambda _: False)])
async def quota(x_token: str | None = Header(None)) -> dict[str, Any]:
    decision = (await limiter.evaluate(key_of(x_token), spend=False)).decision
    return {
        "limits": [str(limit) for limit in limiter.limits],
        # Of the limit that has the least room, as in the headers.
        "remaining": decision.remaining,
        "limit": decision.limit,
        "full_in_seconds": round(decision.reset_after, 1),
    }


async def main() -> None:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
        client.headers["X-Token"] = "t-ann"
        answers = [await client.get("/orders") for _ in range(3)]
        print("RateLimit:", answers[2].headers["RateLimit"])
        print("RateLimit-Policy:", answers[2].headers["RateLimit-Policy"])
        assert answers[2].headers["X-RateLimit-Remaining"] == "7"

        shown = [(await client.get("/quota")).json() for _ in range(50)]
        print("GET /quota:", shown[0])
        assert {each["remaining"] for each in shown} == {7}, "to ask costs nothing"

        mine = await client.get("/quota", params={"user": "bob"}, headers={"X-Token": "t-bob"})
        assert mine.json()["remaining"] == 10
        # A client that asks too often is rejected, and its orders are not affected.
        floods = [await client.get("/quota") for _ in range(20)]
        assert floods[-1].status_code == 429
        assert (await client.get("/orders")).status_code == 200


if __name__ == "__main__":
    asyncio.run(main())
