"""Keep the limits of all endpoints and methods in one rule document, and out of the code.

For each distinct `by`, the first rule that matches applies. So special rules stand above general
ones, and a rule that must hold in addition counts by something else, as `everything` does here.

An attacker tries other spellings of a path, which reach the same view: `/reports/7` and
`/reports/8`, `//reports/7`, `/orders/?x`, HEAD in place of GET. Rules match the template of the
route, or else the path in one normalised spelling, and GET includes HEAD. The trap is a key
function with `request.path`: each number is then a quota of its own.
"""

from __future__ import annotations

from flask import Flask

from ratekeeper.flask import RateLimit
from ratekeeper.testing import ManualClock

# In production a file, rules="limits.yaml": the application follows its changes.
RULES = """
version: 1
rules:
  - {id: reports, match: {endpoint: "/reports/*"}, by: [user, endpoint], limits: 2/minute}
  - id: order-writes
    match: {endpoint: "/orders/*", method: [POST, PUT, DELETE]}
    by: [user, endpoint]
    limits: 5/minute
  - {id: order-reads, match: {endpoint: "/orders/*"}, by: [user, endpoint], limits: 20/minute}
  - id: everything
    by: user
    limits: 100/minute
    cost: {/search: 10, "*": 1}
"""
app = Flask("shop")
identify = {"user": "header:X-User"}  # from a gateway: trusted_header:X-User
RateLimit(app, rules=RULES, identify=identify, clock=ManualClock())
app.add_url_rule("/orders", endpoint="orders", view_func=lambda: "ok", methods=["GET", "POST"])
app.add_url_rule(
    "/reports/<int:number>", endpoint="report", view_func=lambda number: f"report {number}"
)
app.add_url_rule("/search", endpoint="search", view_func=lambda: "found")


def passed(user: str, *requests: str, times: int = 1, app: Flask = app) -> int:
    """Return how many requests, each a method and a path, reach their view."""
    client, codes = app.test_client(), []
    for method, path in (request.split() for request in requests * times):
        codes.append(client.open(path, method=method, headers={"X-User": user}).status_code)
    return codes.count(200)


def main() -> None:
    assert passed("ann", "POST /orders", times=50) == 5
    reads = passed("ann", "GET /orders", "HEAD /orders", times=25)
    print(f"orders: 5 of 50 written, {reads} of 50 read")
    assert reads == 20

    spellings = [f"GET /reports/{number}" for number in range(10)]
    spellings += ["HEAD /reports/7", "GET //reports/7", "GET /reports/./7", "GET /reports/7?x=1"]
    assert passed("bob", *spellings[:3]) == 2
    reached = passed("bob", *spellings)
    print(f"reports: after two of them, {reached} of {len(spellings)} other spellings pass")
    assert reached == 0

    naive = Flask("naive")
    RateLimit(naive, "2/minute", key=lambda request: ("bob", request.path), clock=ManualClock())
    naive.add_url_rule("/reports/<int:number>", view_func=lambda number: f"report {number}")
    reached = passed("bob", *spellings, app=naive)
    print(f"counted by path: {reached} of {len(spellings)}")
    assert reached > 10

    # A search costs ten. All endpoints together have 100 a minute.
    assert passed("eve", "GET /search", times=20) == 10
    assert passed("eve", "GET /orders") == 0


if __name__ == "__main__":
    main()
