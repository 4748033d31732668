"""Let customers have two API keys while they rotate them, with one quota for both.

Count the customer, and not the key: the lookup that authenticates the request also names the
customer. A key that is unknown or revoked has no customer, so its requests count by address, and
guessing keys is limited too.

The trap is to count by key: each key that a customer creates brings a quota of its own, and an
invented key a new one for every request.
"""

from __future__ import annotations

from hashlib import sha256

from flask import Flask, request

from ratekeeper.flask import RateLimit, WebRequest
from ratekeeper.testing import ManualClock


def digest_of(key: str) -> str:
    return sha256(key.encode()).hexdigest()


# The database has digests of the keys and no keys: a copy of it gives no access.
CUSTOMERS = {digest_of("sk_acme_old"): "acme", digest_of("sk_acme_new"): "acme"}


def customer_of(key: str | None) -> str | None:
    return CUSTOMERS.get(digest_of(key or ""))


def by_customer(request: WebRequest) -> tuple[str, str] | None:
    customer = customer_of(request.header("X-API-Key"))
    return ("customer", customer) if customer else None  # None: by address


def orders() -> tuple[str, int]:
    known = customer_of(request.headers.get("X-API-Key"))
    return ("orders", 200) if known else ("unknown API key", 401)


app = Flask("api")
RateLimit(app, "10/minute", key=by_customer, clock=ManualClock())  # store="redis://…"
app.add_url_rule("/orders", view_func=orders)

naive = Flask("naive")
RateLimit(naive, "10/minute", key="header:X-API-Key", clock=ManualClock())
naive.add_url_rule("/orders", view_func=orders)


def codes(app: Flask, keys: list[str]) -> list[int]:
    client = app.test_client()
    return [client.get("/orders", headers={"X-API-Key": key}).status_code for key in keys]


def main() -> None:
    both = ["sk_acme_old", "sk_acme_new"] * 10
    results = codes(app, both)
    print(f"one customer with two keys: {results.count(200)} of 20 pass")
    assert results.count(200) == 10
    results = codes(naive, both)
    print(f"counted by key: {results.count(200)} of 20")
    assert results.count(200) == 20

    guesses = [f"sk_acme_{number}" for number in range(100)]
    results, unlimited = codes(app, guesses), codes(naive, guesses)
    print(f"100 guessed keys: {results.count(401)} are looked up, {results.count(429)} rejected")
    assert (results.count(401), results.count(429)) == (10, 90)
    assert unlimited.count(401) == 100

    # The old key is revoked. The count of the customer goes on.
    del CUSTOMERS[digest_of("sk_acme_old")]
    assert codes(app, ["sk_acme_new", "sk_acme_old"]) == [429, 429]


if __name__ == "__main__":
    main()
