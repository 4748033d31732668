"""Give signed-in users more than visitors, who are counted by address.

Two rules: one for requests with a user, counted by user, and one for visitors, counted by address.
Users in an office share an address, and do not share a count. An attacker who drops the session
cookie becomes a visitor of the same address, and gains nothing; the session is signed, so a user
cannot be invented.

The trap is to count visitors by their cookie: a client that sends none gets a new one, and a new
quota, with every request.
"""

from __future__ import annotations

from flask import Flask

from ratekeeper.flask import RateLimit, WebRequest
from ratekeeper.testing import ManualClock
from ratekeeper.web.identity import Identity

# Rules that count by different attributes all apply, so `visitors` says that it is not for users.
RULES = """
version: 1
rules:
  - {id: users, match: {user: "*"}, by: user, limits: 20/minute}
  - {id: visitors, match: {attributes: {client: visitor}}, by: ip, limits: 5/minute}
"""


def kind_of(request: WebRequest) -> str:
    return "user" if (request.session or {}).get("user_id") else "visitor"


def site() -> Flask:
    app = Flask("shop")
    app.secret_key = "a secret from the configuration"
    app.add_url_rule("/", view_func=lambda: "hello")
    return app


app = site()
identity = Identity({"user": "session:user_id", "client": kind_of})
# In production: store="shared://…", trusted_proxies=[…] in the identity, and no clock.
RateLimit(app, rules=RULES, identify=identity, clock=ManualClock())


def passed(app: Flask, address: str, user: str = "") -> int:
    """Return how many of 50 requests pass."""
    client = app.test_client()
    if user:
        with client.session_transaction() as signed:
            signed["user_id"] = user
    peer = {"REMOTE_ADDR": address}
    return [client.get("/", environ_base=peer).status_code for _ in range(50)].count(200)


def main() -> None:
    office = "192.0.2.1"
    results = [passed(app, office), passed(app, office, "ann"), passed(app, office, "bob")]
    print(f"from one office: visitors {results[0]}, ann {results[1]}, bob {results[2]}")
    assert results == [5, 20, 20]
    assert passed(app, office) == 0, "a new browser at the same address"
    assert passed(app, "192.0.2.2", "ann") == 0, "ann at another address"

    naive = site()
    RateLimit(naive, "5/minute", key=["cookie:session", "address"], clock=ManualClock())
    peer = {"REMOTE_ADDR": office}
    codes = []
    for number in range(50):
        client = naive.test_client()
        client.set_cookie("session", f"invented-{number}")
        codes.append(client.get("/", environ_base=peer).status_code)
    print(f"by cookie: {codes.count(200)} of 50 requests of one visitor pass")
    assert codes.count(200) == 50


if __name__ == "__main__":
    main()
