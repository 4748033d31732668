"""Count users by the header that my gateway sets, and other clients by address.

The gateway authenticates its clients and names them in `X-User`. A client that reaches the
application directly can send the same header: `header:X-User` would give it a fresh quota for each
name that it invents, or let it spend the quota of another user. `trusted_header:X-User` reads the
header from `trusted_proxies` only. The gateway must replace the value that its client sends.
"""

from __future__ import annotations

from flask import Flask

from ratekeeper.flask import RateLimit

GATEWAY, CLIENT = "10.0.0.2", "203.0.113.9"


def shop(source: str) -> Flask:
    app = Flask("shop")
    RateLimit(app, "3/minute", key=[source, "address"], trusted_proxies=[GATEWAY])
    app.add_url_rule("/", view_func=lambda: "hello")
    return app


def statuses(app: Flask, peer: str, users: list[str]) -> list[int]:
    """Send one request for each user from this peer, as the server sees it."""
    client = app.test_client()
    peers = {"REMOTE_ADDR": peer}
    return [
        client.get("/", headers={"X-User": user}, environ_base=peers).status_code for user in users
    ]


def main() -> None:
    app = shop("trusted_header:X-User")
    assert statuses(app, GATEWAY, ["ann"] * 4) == [200, 200, 200, 429]
    assert statuses(app, GATEWAY, ["bob"]) == [200], "each user has a quota"

    invented = ["eve1", "eve2", "eve3", "eve4"]
    answers = statuses(app, CLIENT, invented)
    print(f"four invented names, sent to the application directly: {answers}")
    assert answers == [200, 200, 200, 429], "counted by address, the header is ignored"

    naive = statuses(shop("header:X-User"), CLIENT, invented)
    print(f"the same with header:X-User, which believes every client: {naive}")
    assert naive == [200] * 4


if __name__ == "__main__":
    main()
