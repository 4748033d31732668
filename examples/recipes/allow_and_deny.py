"""Exempt my own monitoring, and block an abusive network.

A request on `deny` gets 403 and no Retry-After, and one on `allow` is not limited. No rule counts
either. A deny goes before an allow. A change needs no restart.

The trap is an exemption that a client can claim: a User-Agent, a header, or an address that it
writes into X-Forwarded-For. Exempt addresses that you control and keys that you have verified, and
list your proxies in `trusted_proxies`, so that no other peer can name an address.
"""

from __future__ import annotations

from flask import Flask

from ratekeeper import Limiter
from ratekeeper.flask import RateLimit
from ratekeeper.testing import ManualClock
from ratekeeper.web.identity import Identity

RULES = """
version: 1
rules:
  - {id: api, by: ip, limits: 5/minute}
allow: ["ip:10.1.0.0/16"]
deny: ["ip:203.0.113.0/24"]
"""
PROXY = "10.0.0.2"
limiter = Limiter.from_rules(RULES, clock=ManualClock())
app = Flask("api")
RateLimit(app, limiter=limiter, identify=Identity({}, trusted_proxies=[PROXY]))
app.add_url_rule("/", view_func=lambda: "hello")

naive = Flask("naive")
RateLimit(
    naive,
    "5/minute",
    skip=lambda request: (request.header("User-Agent") or "").startswith("UptimeBot"),
    clock=ManualClock(),
)
naive.add_url_rule("/", view_func=lambda: "hello")


def codes(app: Flask, peer: str, **headers: str) -> list[int]:
    client, sent = app.test_client(), {name.replace("_", "-"): headers[name] for name in headers}
    environ = {"REMOTE_ADDR": peer}
    return [client.get("/", headers=sent, environ_base=environ).status_code for _ in range(20)]


def main() -> None:
    assert codes(app, PROXY, X_Forwarded_For="10.1.2.3") == [200] * 20
    assert codes(app, PROXY, X_Forwarded_For="203.0.113.9") == [403] * 20
    assert codes(app, PROXY, X_Forwarded_For="198.51.100.7").count(200) == 5

    # A client claims to be the monitoring: to the proxy, which appends the true address, and to the
    # application directly, which does not believe it.
    claims = codes(app, PROXY, X_Forwarded_For="10.1.2.3, 198.51.100.8")
    direct = codes(app, "198.51.100.9", X_Forwarded_For="10.1.2.3")
    print(f"a forged X-Forwarded-For: {claims.count(200)} and {direct.count(200)} of 20 pass")
    assert claims.count(200) == direct.count(200) == 5

    believed = codes(naive, "198.51.100.9", User_Agent="UptimeBot/2.0")
    print(f"an exemption by User-Agent: {believed.count(200)} of 20 pass")
    assert believed.count(200) == 20

    # One more network. In a database, the command line and the console do this by an entry beside
    # the document, with a reason and an author.
    limiter.use(RULES.replace("deny: [", 'deny: ["ip:198.51.100.0/24", '))
    assert codes(app, PROXY, X_Forwarded_For="198.51.100.7") == [403] * 20


if __name__ == "__main__":
    main()
