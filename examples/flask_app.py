"""A Flask application with limits: for all of it, for some views, and for failed logins.

    python examples/flask_app.py                                    runs a demonstration
    STORE=shared:///tmp/flask.limits gunicorn --chdir examples --workers 4 flask_app:app

With `shared://` the limits hold exactly over all workers of a machine, with `redis://` over many.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

from flask import Flask, Response, jsonify, request, send_file

from ratekeeper.flask import RateLimit, charge

app = Flask(__name__)
USERS = {"ada": "correct horse"}
limit = RateLimit(app, "1000/minute", store=os.environ.get("STORE", "memory://"))


@app.get("/hello")
@limit.exempt
def hello() -> Response:
    return jsonify(message="hello", worker=os.getpid())


# All orders share the limit of the route. It counts by API key, or by address without a key.
@app.get("/orders/<int:number>")
@limit("40/day", key=["header:X-API-Key", "address"])
def order(number: int) -> Response:
    return jsonify(order=number, worker=os.getpid())


@app.get("/search")
@limit("2/second")
async def search() -> Response:
    return jsonify(found=["an order"])


def failed(status: int) -> bool:
    return status == 401


# Only failed logins count, by address and by account. A user with the right password may log in any
# number of times. While the store is unavailable, every login gets a 503: clients cannot guess
# passwords without a limit.
@app.post("/login")
@limit("20 in any hour", key="address", count=failed, on_failure="closed")
@limit(
    "3 in any hour",
    key=lambda request: request.native.form["user"],
    count=failed,
    on_failure="closed",
)
def login() -> tuple[Response, int]:
    right = USERS.get(request.form["user"]) == request.form["password"]
    return jsonify(welcome=right), 200 if right else 401


# The request is first charged its maximum cost, and then settled to its actual cost.
@app.get("/complete")
@limit("500/day", cost=100)
def complete() -> Response:
    words = f"You asked for {request.args['prompt']}".split()
    charge.settle(len(words))
    return jsonify(words=words)


@app.get("/stream")
def stream() -> Response:
    def pieces() -> Iterator[str]:
        for _ in range(3):
            yield f"{time.monotonic_ns()}\n"
            time.sleep(0.2)

    return Response(pieces(), mimetype="text/plain")


@app.get("/source")
def source() -> Response:
    return send_file(__file__, mimetype="text/plain")


def main() -> int | str:
    client = app.test_client()
    orders = [client.get(f"/orders/{number}").status_code for number in range(50)]
    refused = client.get("/orders/1")
    passwords = ["correct horse"] * 5 + ["guess"] * 3 + ["correct horse"]
    logins = [
        client.post("/login", data={"user": "ada", "password": password}).status_code
        for password in passwords
    ]
    client.get("/complete?prompt=tea")
    left = client.get("/complete?prompt=tea").headers["X-RateLimit-Remaining"]
    print(f"50 orders: {orders.count(200)} answered, {orders.count(429)} refused")
    print(f"refused: {refused.status}, Retry-After {refused.headers['Retry-After']} s")
    print(f"logins: {logins}")
    print(f"remaining for completions, after one of 4 words and during another: {left}")
    right = orders == [200] * 40 + [429] * 10 and logins == [200] * 5 + [401] * 3 + [429]
    return 0 if right and left == "396" else "the results do not match the limits"


if __name__ == "__main__":
    sys.exit(main())
