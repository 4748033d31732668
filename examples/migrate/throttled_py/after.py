"""Functions and a Flask application with Ratekeeper, after the migration from throttled-py.

Run it: flask --app examples/migrate/throttled_py/after run
"""

from __future__ import annotations

from flask import Flask, Response, jsonify

from ratekeeper import AsyncLimiter, Limiter, LimitExceeded
from ratekeeper.flask import RateLimit

sign_ups = Limiter("3/day fixed_window", name="sign-ups")
exports = Limiter("10/day", name="exports")
newsletters = Limiter("2/day", name="newsletters")
cards = Limiter("1/day", name="cards")
crawler = AsyncLimiter("5/day capacity 2", name="crawler")


def sign_up(address: str) -> bool:
    return bool(sign_ups.check(address))


def export(user: str, rows: int) -> tuple[bool, int]:
    decision = exports.check(user, cost=rows)
    return decision.allowed, decision.remaining


def rows_left(user: str) -> int:
    return exports.peek(user).remaining


@newsletters.limit(key="newsletter")
def newsletter() -> str:
    return "sent"


def send_newsletter() -> str:
    try:
        return newsletter()
    except LimitExceeded:
        return "later"


def charge_card(user: str) -> str:
    try:
        with cards.reserve(user):
            return "charged"
    except LimitExceeded:
        return "declined"


async def fetch(host: str) -> bool:
    return bool(await crawler.check(host))


app = Flask(__name__)
limit = RateLimit(app, key="header:X-API-Key")


@app.get("/search")
@limit("4/day fixed_window")
def search() -> str:
    return "found"


@app.get("/orders/<int:number>")
@limit("2/day fixed_window")
def order(number: int) -> str:
    return f"order {number}"


@app.get("/health")
def health() -> str:
    return "ok"


@app.errorhandler(429)
def too_many(error: Exception) -> tuple[Response, int]:
    return jsonify(error="slow down"), 429
