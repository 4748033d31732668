"""A shop on FastAPI with Ratekeeper, after the migration from slowapi.

Run it: uvicorn --app-dir examples/migrate/slowapi after:app
"""

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from ratekeeper.fastapi import RateLimit, RateLimitExceeded, WebRequest

app = FastAPI()
# Routes with a limit of their own that replaces the default.
OWN = {"/search", "/mail", "/sms", "/tools", "/export"}


def has_own_limit(request: WebRequest) -> bool:
    return (
        request.route in OWN
        or (request.route == "/notes" and request.method == "POST")
        or request.route == "/health"
    )


limit = RateLimit(app, "4/day fixed_window", per_route=True, skip=has_own_limit)


@app.exception_handler(RateLimitExceeded)
def too_many(request: Request, error: RateLimitExceeded) -> Response:
    return JSONResponse({"error": "slow down"}, status_code=429)


def plan(request: WebRequest) -> str:
    return "3/day" if (request.header("X-API-Key") or "").startswith("pro") else "1/day"


def is_internal(request: WebRequest) -> bool:
    return request.header("X-Internal") == "yes"


@app.get("/")
async def home() -> str:
    return "home"


@app.get("/orders/{number}")
async def order(number: int) -> str:
    return f"order {number}"


@app.get("/search", dependencies=[limit("6/day fixed_window")])
async def search() -> str:
    return "found"


@app.get("/suggest", dependencies=[limit("6/day")])
def suggest() -> str:
    return "suggested"


@app.api_route(
    "/notes",
    methods=["GET", "POST"],
    dependencies=[limit("2/day", methods=["POST"])],
)
async def notes() -> str:
    return "notes"


# The default applies too: slowapi keeps it for limits from a function.
@app.get("/report", dependencies=[limit(plan, key="header:X-API-Key")])
async def report() -> str:
    return "report"


@app.post("/mail", dependencies=[limit("3/day", name="messages")])
async def mail() -> str:
    return "sent"


@app.post("/sms", dependencies=[limit("3/day", name="messages")])
async def sms() -> str:
    return "sent"


@app.get("/tools", dependencies=[limit("1/day", skip=is_internal)])
async def tools() -> str:
    return "tools"


@app.get("/export", dependencies=[limit("10/day", cost=4)])
async def export() -> str:
    return "rows"


@app.get("/health")
async def health() -> str:
    return "ok"
