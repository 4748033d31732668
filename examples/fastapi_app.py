"""A FastAPI application with limits: for all of it, for some routes, and for failed logins.

    python examples/fastapi_app.py                                    runs a demonstration
    STORE=shared:///tmp/fastapi.limits uvicorn --app-dir examples --workers 4 fastapi_app:app

With `shared://` the limits hold exactly over all workers of a machine, with `redis://` over many.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Annotated

import httpx
from fastapi import FastAPI, HTTPException, WebSocket
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from ratekeeper.fastapi import Charge, RateLimit, WebRequest

app = FastAPI()
limit = RateLimit(
    app,
    "1000/minute",
    store=os.environ.get("STORE", "memory://"),
    skip=lambda request: request.path == "/hello",
)
USERS = {"ada": "correct horse"}


class Login(BaseModel):
    user: str
    password: str


@app.get("/hello")
async def hello() -> dict[str, object]:
    return {"message": "hello", "worker": os.getpid()}


# All orders share the limit of the route. It counts by API key, or by address without a key.
@app.get("/orders/{number}", dependencies=[limit("40/day", key=["header:X-API-Key", "address"])])
def order(number: int) -> dict[str, int]:
    return {"order": number, "worker": os.getpid()}


@app.get("/search", dependencies=[limit("2/second")])
async def search() -> dict[str, list[str]]:
    return {"found": ["an order"]}


def failed(status: int) -> bool:
    return status == 401


async def account(request: WebRequest) -> str:
    body = await request.native.json()
    return str(body.get("user")) if isinstance(body, dict) else ""


# Only failed logins count, by address and by account. A user with the right password may log in any
# number of times. While the store is unavailable, every login gets a 503: clients cannot guess
# passwords without a limit.
@app.post(
    "/login",
    dependencies=[
        limit("20 in any hour", key="address", count=failed, on_failure="closed"),
        limit("3 in any hour", key=account, count=failed, on_failure="closed"),
    ],
)
async def login(login: Login) -> dict[str, str]:
    if USERS.get(login.user) != login.password:
        raise HTTPException(401)
    return {"welcome": login.user}


# The request is first charged its maximum cost, and then settled to its actual cost.
@app.get("/complete")
async def complete(prompt: str, charge: Annotated[Charge, limit("500/day", cost=100)]) -> list[str]:
    words = f"You asked for {prompt}".split()
    charge.settle(len(words))
    return words


@app.get("/stream")
async def stream() -> StreamingResponse:
    async def pieces() -> AsyncIterator[str]:
        for _ in range(3):
            yield f"{time.monotonic_ns()}\n"
            await asyncio.sleep(0.2)

    return StreamingResponse(pieces(), media_type="text/plain")


@app.websocket("/echo", dependencies=[limit("5/day")])
async def echo(websocket: WebSocket) -> None:
    await websocket.accept()
    async for text in websocket.iter_text():
        await websocket.send_text(text)


async def main() -> int | str:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://example") as client:
        orders = [(await client.get(f"/orders/{number}")).status_code for number in range(50)]
        refused = await client.get("/orders/1")
        passwords = ["correct horse"] * 5 + ["guess"] * 3 + ["correct horse"]
        logins = [
            (await client.post("/login", json={"user": "ada", "password": each})).status_code
            for each in passwords
        ]
        await client.get("/complete?prompt=tea")
        left = (await client.get("/complete?prompt=tea")).headers["X-RateLimit-Remaining"]
    await limit.enforcer.aclose()
    print(f"50 orders: {orders.count(200)} answered, {orders.count(429)} refused")
    print(f"refused: {refused.status_code}, Retry-After {refused.headers['Retry-After']} s")
    print(f"logins: {logins}")
    print(f"remaining for completions, after one of 4 words and during another: {left}")
    right = orders == [200] * 40 + [429] * 10 and logins == [200] * 5 + [401] * 3 + [429]
    return 0 if right and left == "396" else "the results do not match the limits"


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
