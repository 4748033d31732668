"""Give free, pro and enterprise customers different limits, and move a customer to another tier.

The tiers are in the rule document, and `assign` says which customer has which. The tier `default`
is for all others. Counts belong to the customer, so an upgrade keeps what was spent.

The trap is a tier that the client can choose: `identify={"tier": "header:X-Tier"}` makes every
client an enterprise. Take it from `assign`, a verified token, or a gateway's trusted header.

A rule with `limits` does not look at the tiers of the document, only at its own `tiers`.
"""

from __future__ import annotations

from flask import Flask

from ratekeeper import Limiter
from ratekeeper.flask import RateLimit, WebRequest
from ratekeeper.testing import ManualClock
from ratekeeper.web.identity import Identity

RULES = """
version: 1
tiers:
  default: 3/minute
  pro: 10/minute
  enterprise: 20/minute burst 20
assign:
  "tenant:acme": enterprise
  "tenant:initech": pro
rules:
  - {id: api, match: {endpoint: "/api/*"}, by: tenant}
  # All tiers but enterprise have two exports.
  - id: exports
    match: {endpoint: /api/export}
    by: [tenant, endpoint]
    limits: 2/hour
    tiers: {enterprise: 100/hour}
"""
TENANTS = {"sk_a": "acme", "sk_i": "initech", "sk_h": "hooli"}


def tenant_of(request: WebRequest) -> str | None:
    return TENANTS.get(request.header("X-API-Key") or "")


limiter = Limiter.from_rules(RULES, clock=ManualClock())  # store="redis://…" in production
app = Flask("api")
RateLimit(app, limiter=limiter, identify={"tenant": tenant_of})
app.add_url_rule("/api/orders", view_func=lambda: "orders", endpoint="orders")
app.add_url_rule("/api/export", view_func=lambda: "export", endpoint="export")


def passed(app: Flask, path: str, key: str, times: int = 50, tier: str = "") -> int:
    """Return how many of these requests pass."""
    client, headers = app.test_client(), {"X-API-Key": key, "X-Tier": tier}
    return [client.get(path, headers=headers).status_code for _ in range(times)].count(200)


def main() -> None:
    orders = {key: passed(app, "/api/orders", key) for key in TENANTS}
    print("requests in a minute:", orders)
    assert orders == {"sk_a": 40, "sk_i": 10, "sk_h": 3}
    assert passed(app, "/api/orders", "sk_h", tier="enterprise") == 0, "the header says nothing"

    # Hooli pays. What it has spent as a free customer stays spent: it gets 10 - 3.
    upgraded = RULES.replace("assign:", 'assign:\n  "tenant:hooli": pro')
    limiter.use(upgraded)  # in a database: PUT /v1/admin/assignments/tenant:hooli
    left = passed(app, "/api/orders", "sk_h")
    print(f"after its upgrade, hooli has {left} more")
    assert left == 7

    naive = Flask("naive")
    by_header = Identity({"tenant": tenant_of, "tier": "header:X-Tier"})
    RateLimit(naive, rules=RULES, identify=by_header, clock=ManualClock())
    naive.add_url_rule("/api/orders", view_func=lambda: "orders")
    chosen = passed(naive, "/api/orders", "sk_h", tier="enterprise")
    print(f"if the client names its tier, a free customer gets {chosen}")
    assert chosen == 40


if __name__ == "__main__":
    main()
