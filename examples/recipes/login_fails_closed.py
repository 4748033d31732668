"""Reject logins while the store is away, and keep the rest of the site up.

By default a request passes while Redis is unavailable: a search page is worth more than its limit.
An attacker would use the outage to guess passwords. So the login has `on_failure="closed"`: it
answers 503 with Retry-After. `on_unavailable` makes the page, because one that says "too many
attempts" would accuse a user who did nothing wrong.
"""

from __future__ import annotations

import logging

from flask import Flask, Response

from ratekeeper.flask import Denial, RateLimit, WebRequest

logging.getLogger("ratekeeper").setLevel(logging.CRITICAL)  # the outage here is intended

app = Flask("shop")
limit = RateLimit(app, "100/minute", store="redis://127.0.0.1:1")  # no Redis listens here


def sorry(_request: WebRequest, denial: Denial) -> Response:
    return Response(f"Please log in again in {denial.retry_after} s.", denial.status)


@app.post("/login")
@limit("5 in any minute", key="address", on_failure="closed", on_unavailable=sorry)
def login() -> str:
    return "welcome"


@app.post("/naive-login")
@limit("5 in any minute", key="address")
def naive_login() -> str:
    return "welcome"


@app.get("/search")
def search() -> str:
    return "found"


def main() -> None:
    client = app.test_client()
    found = client.get("/search")
    assert (found.status_code, found.headers["X-RateLimit-Policy"]) == (200, "degraded")

    answer = client.post("/login")
    print(f"login: {answer.status_code} {answer.text}")
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) >= 1

    guesses = [client.post("/naive-login").status_code for _ in range(50)]
    print(f"without on_failure, {guesses.count(200)} of 50 guesses reach the password check")
    assert guesses == [200] * 50


if __name__ == "__main__":
    main()
