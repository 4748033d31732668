"""POST /v1/check on the real service, compared with minimal applications on the same server.

The first row reads the body in one message, as the service does if the content length allows it.
The second row reads until the server reports the end of the body, which takes longer. The third row
sends the headers and the body of the service's answer, but always the same ones.

A thousand users send requests in turn. Repeated requests are equal byte for byte, and the service
caches how it has parsed them. Twenty thousand users exceed this cache, so each request is parsed.

With one rule, a check has one limit of one subject. With several rules, it resembles a public API:
four rules apply, by key, user, tenant and address, with six limits in all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.http_measure import Contender
from bench.http_servers import granian, post, ratekeeper_serve

USERS: Final = 1_000
STRANGERS: Final = 20_000

ONE_RULE: Final = """
version: 1
rules:
  - {id: users, by: [user], limits: [1000000/second]}
"""
SEVERAL_RULES: Final = """
version: 1
tiers: {free: [1000000/second, 1000000000/day], pro: [2000000/second, 1000000000/day]}
rules:
  - {id: login, match: {endpoint: /login, method: POST}, by: [ip], limits: [5/minute]}
  - {id: orders, match: {endpoint: "/v1/orders/*"}, by: [api_key]}
  - {id: users, by: [user], limits: [1000000/second, 1000000000/day]}
  - {id: tenants, match: {endpoint: "/v1/**"}, by: [tenant], limits: [10000000/second]}
  - {id: addresses, by: [ip], limits: [10000000/second]}
deny: ["api_key:sk_revoked_*"]
"""


def check_contenders(folder: Path) -> Sequence[Contender]:
    """Return the minimal applications, then the service with one rule and with several."""
    one, several = folder / "one.yaml", folder / "several.yaml"
    one.write_text(ONE_RULE)
    several.write_text(SEVERAL_RULES)
    few = few_users()
    many = [_check(_whole_request(number)) for number in range(USERS)]
    new = [_check({"user": f"u{number}"}) for number in range(STRANGERS)]
    all_new = [_check(_whole_request(number)) for number in range(STRANGERS)]
    memory = ("--store", "memory://", "--no-grpc")

    def ours(name: str, rules: Path, requests: Sequence[bytes], *more: str) -> Contender:
        command = ratekeeper_serve(rules, *more)
        return Contender(name, command, requests, ours=True, timed=True)

    return (
        Contender("bare ASGI: 200 ok", granian("bench.http_apps:bare"), few, timed=True),
        Contender("the same, reading to the end", granian("bench.http_apps:bare_to_the_end"), few),
        Contender(
            "bare ASGI: a fixed answer to a check", granian("bench.http_apps:bare_check"), few
        ),
        ours("ratekeeper, 1 limit, memory", one, few, *memory),
        ours("ratekeeper, 1 limit, shared", one, few, "--no-grpc"),
        ours("ratekeeper, 1 limit, memory, 20,000 users", one, new, *memory),
        ours("ratekeeper, 4 rules, 6 limits, memory", several, many, *memory),
        ours("ratekeeper, 4 rules, 6 limits, 20,000 users", several, all_new, *memory),
    )


def few_users() -> Sequence[bytes]:
    """Return the checks of a thousand users."""
    return [_check({"user": f"u{number}"}) for number in range(USERS)]


def _whole_request(number: int) -> dict[str, object]:
    return {
        "user": f"u{number}",
        "api_key": f"sk_{number}",
        "ip": f"192.0.2.{number % 250}",
        "tenant": f"t{number % 10}",
        "tier": "pro" if number % 2 else "free",
        "endpoint": "/v1/orders/7",
        "method": "POST",
    }


def _check(fields: dict[str, object]) -> bytes:
    return post("/v1/check", json.dumps(fields, separators=(",", ":")).encode())
