"""A shop on FastAPI with slowapi, before the migration.

Run it: uvicorn --app-dir examples/migrate/slowapi before:app
"""

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from slowapi import Limiter
from slowapi.errors import RateLimitExceeded
from slowapi.middleware import SlowAPIMiddleware
from slowapi.util import get_remote_address

limiter = Limiter(key_func=get_remote_address, default_limits=["4/day"], key_style="endpoint")
app = FastAPI()
app.state.limiter = limiter
app.add_middleware(SlowAPIMiddleware)


@app.exception_handler(RateLimitExceeded)
def too_many(request: Request, error: RateLimitExceeded) -> Response:
    return JSONResponse({"error": "slow down"}, status_code=429)


def api_key(request: Request) -> str:
    return request.headers.get("X-API-Key", "none")


def plan(key: str) -> str:
    return "3/day" if key.startswith("pro") else "1/day"


def is_internal(request: Request) -> bool:
    return request.headers.get("X-Internal") == "yes"


@app.get("/")
async def home() -> str:
    return "home"


@app.get("/orders/{number}")
async def order(number: int) -> str:
    return f"order {number}"


@app.get("/search")
@limiter.limit("6/day")
async def search(request: Request) -> str:
    return "found"


@app.get("/suggest")
@limiter.limit("6/day", override_defaults=False)
def suggest(request: Request) -> str:
    return "suggested"


@app.api_route("/notes", methods=["GET", "POST"])
@limiter.limit("2/day", methods=["POST"])
async def notes(request: Request) -> str:
    return "notes"


@app.get("/report")
@limiter.limit(plan, key_func=api_key)
async def report(request: Request) -> str:
    return "report"


@app.post("/mail")
@limiter.shared_limit("3/day", scope="messages")
async def mail(request: Request) -> str:
    return "sent"


@app.post("/sms")
@limiter.shared_limit("3/day", scope="messages")
async def sms(request: Request) -> str:
    return "sent"


@app.get("/tools")
@limiter.limit("1/day", exempt_when=is_internal)
async def tools(request: Request) -> str:
    return "tools"


@app.get("/export")
@limiter.limit("10/day", cost=4)
async def export(request: Request) -> str:
    return "rows"


@app.get("/health")
@limiter.exempt
async def health() -> str:
    return "ok"
