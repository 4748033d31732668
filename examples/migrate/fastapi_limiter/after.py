"""A shop on FastAPI with Ratekeeper, after the migration from fastapi-limiter.

Run it: uvicorn --app-dir examples/migrate/fastapi_limiter after:app
"""

from __future__ import annotations

from fastapi import FastAPI, Response, WebSocket
from fastapi.responses import JSONResponse

from ratekeeper import AsyncLimiter
from ratekeeper.fastapi import Denial, RateLimit, WebRequest

app = FastAPI()
limit = RateLimit(app)


def slow_down(request: WebRequest, denial: Denial) -> Response:
    return JSONResponse({"detail": "slow down"}, status_code=denial.status)


@app.get("/")
async def home() -> str:
    return "home"


@app.get("/search", dependencies=[limit("4 in any day")])
async def search() -> str:
    return "found"


@app.get("/orders/{number}", dependencies=[limit("2/day")])
def order(number: int) -> str:
    return f"order {number}"


@app.get("/everyone", dependencies=[limit("3/day", key=lambda request: "everyone")])
async def everyone() -> str:
    return "shared by all clients"


@app.get("/report", dependencies=[limit("1/day", key="header:X-API-Key")])
async def report() -> str:
    return "report"


@app.get("/both", dependencies=[limit("2/hour; 3/day")])
async def both() -> str:
    return "both"


@app.post("/mail", dependencies=[limit("1/day", on_limit=slow_down)])
async def mail() -> str:
    return "sent"


@app.get("/health")
async def health() -> str:
    return "ok"


messages = AsyncLimiter("2/day", name="messages")


@app.websocket("/chat")
async def chat(websocket: WebSocket) -> None:
    await websocket.accept()
    async for text in websocket.iter_text():
        if await messages.check(websocket.client.host):
            await websocket.send_text(text.upper())
        else:
            await websocket.send_text("slow down")
