"""A shop on FastAPI with fastapi-limiter, before the migration.

Run it: uvicorn --app-dir examples/migrate/fastapi_limiter before:app
"""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response, WebSocket
from fastapi_limiter.decorators import skip_limiter
from fastapi_limiter.depends import RateLimiter, WebSocketRateLimiter
from pyrate_limiter import BucketFactory, Duration, InMemoryBucket, Limiter, Rate, RateItem


class Buckets(BucketFactory):
    """A bucket for each client: Limiter(Rate(…)) has one bucket for all of them."""

    def __init__(self, *rates: Rate) -> None:
        self.rates = list(rates)
        self.buckets: dict[str, InMemoryBucket] = {}

    def wrap_item(self, name: str, weight: int = 1) -> RateItem:
        return RateItem(name, InMemoryBucket(self.rates).now(), weight=weight)

    def get(self, item: RateItem) -> InMemoryBucket:
        if item.name not in self.buckets:
            self.buckets[item.name] = InMemoryBucket(self.rates)
        return self.buckets[item.name]


async def by_address(request: Request | WebSocket) -> str:
    return request.client.host


async def by_key(request: Request) -> str:
    return request.headers.get("X-API-Key", "none")


async def slow_down(request: Request, response: Response) -> None:
    raise HTTPException(429, "slow down")


def per_client(*rates: Rate, **options: Any) -> Any:
    return Depends(RateLimiter(limiter=Limiter(Buckets(*rates)), **options))


app = FastAPI()


@app.get("/")
async def home() -> str:
    return "home"


@app.get("/search", dependencies=[per_client(Rate(4, Duration.DAY), identifier=by_address)])
async def search() -> str:
    return "found"


@app.get(
    "/orders/{number}", dependencies=[per_client(Rate(2, Duration.DAY), identifier=by_address)]
)
def order(number: int) -> str:
    return f"order {number}"


@app.get("/everyone", dependencies=[Depends(RateLimiter(limiter=Limiter(Rate(3, Duration.DAY))))])
async def everyone() -> str:
    return "shared by all clients"


@app.get("/report", dependencies=[per_client(Rate(1, Duration.DAY), identifier=by_key)])
async def report() -> str:
    return "report"


@app.get(
    "/both",
    dependencies=[
        per_client(Rate(2, Duration.HOUR), identifier=by_address),
        per_client(Rate(3, Duration.DAY), identifier=by_address),
    ],
)
async def both() -> str:
    return "both"


@app.post(
    "/mail",
    dependencies=[per_client(Rate(1, Duration.DAY), identifier=by_address, callback=slow_down)],
)
async def mail() -> str:
    return "sent"


@app.get("/health", dependencies=[per_client(Rate(1, Duration.DAY), identifier=by_address)])
@skip_limiter
async def health() -> str:
    return "ok"


messages = WebSocketRateLimiter(
    limiter=Limiter(Buckets(Rate(2, Duration.DAY))), identifier=by_address
)


@app.websocket("/chat")
async def chat(websocket: WebSocket) -> None:
    await websocket.accept()
    async for text in websocket.iter_text():
        try:
            await messages(websocket)
        except HTTPException:
            await websocket.send_text("slow down")
        else:
            await websocket.send_text(text.upper())
