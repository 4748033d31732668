"""Functions and a Flask application with throttled-py, before the migration.

Run it: flask --app examples/migrate/throttled_py/before run
"""

from __future__ import annotations

from flask import Flask, Response, jsonify, request
from throttled import MemoryStore, RateLimiterType, Throttled, per_day
from throttled.asyncio import Throttled as AsyncThrottled
from throttled.contrib.flask import Limiter, RateLimitExceededError
from throttled.exceptions import LimitedError

store = MemoryStore()
sign_ups = Throttled(using="fixed_window", quota=per_day(3), store=store)
exports = Throttled(quota=per_day(10), store=store)
crawler = AsyncThrottled(quota=per_day(5, burst=2))


def sign_up(address: str) -> bool:
    return not sign_ups.limit(address).limited


def export(user: str, rows: int) -> tuple[bool, int]:
    result = exports.limit(user, cost=rows)
    return not result.limited, result.state.remaining


def rows_left(user: str) -> int:
    return exports.peek(user).remaining


@Throttled(key="newsletter", quota="2/day", store=store)
def newsletter() -> str:
    return "sent"


def send_newsletter() -> str:
    try:
        return newsletter()
    except LimitedError:
        return "later"


def charge_card(user: str) -> str:
    try:
        with Throttled(key=f"card:{user}", quota="1/day", store=store):
            return "charged"
    except LimitedError:
        return "declined"


async def fetch(host: str) -> bool:
    return not (await crawler.limit(host)).limited


app = Flask(__name__)


def api_key() -> str:
    return request.headers.get("X-API-Key", "none")


limiter = Limiter("4/day", app=app, using=RateLimiterType.FIXED_WINDOW.value, key_func=api_key)


@app.get("/search")
@limiter.limit()
def search() -> str:
    return "found"


@app.get("/orders/<int:number>")
@limiter.limit("2/day")
def order(number: int) -> str:
    return f"order {number}"


@app.get("/health")
def health() -> str:
    return "ok"


@app.errorhandler(RateLimitExceededError)
def too_many(error: RateLimitExceededError) -> tuple[Response, int]:
    return jsonify(error="slow down"), 429
