"""Limit failed logins by address and by name, without locking the owner of an account out.

- By address: one attacker cannot try many names. The limit is loose, because an office or a mobile
  network shares an address.
- By name: a botnet cannot try one name from many addresses. The limit is tight.
- The trade: with a limit by name alone, an attacker who knows a name can lock its owner out. So a
  browser that has logged in before gets a signed cookie, and has a count of its own for its name.
  An attack then locks out strangers only. An owner at a new device waits or uses the e-mail link.

Only failures count (`count`), but each attempt is charged before the password is checked, so
concurrent guesses are no way around. Names that do not exist are counted like others, or the answer
would tell which ones do. Neither limit catches a botnet that tries each name once: ask for a
second factor or a CAPTCHA while there are unusually many failures in all.
"""

from __future__ import annotations

import uuid

from flask import Flask, Response, request
from itsdangerous import BadSignature, URLSafeSerializer
from werkzeug.test import TestResponse

from ratekeeper.flask import RateLimit, WebRequest
from ratekeeper.testing import ManualClock

PASSWORDS = {"ann": "correct horse", "eve": "battery staple"}
devices = URLSafeSerializer("a secret from the configuration", salt="device")
app = Flask("shop")
# In production: store="redis://…", trusted_proxies=[…], and no clock.
limit = RateLimit(app, on_failure="closed", clock=ManualClock())


def name_of(form_name: str) -> str:
    """Names are equal however they are written, as for the login itself."""
    return form_name.strip().casefold()


def by_name(request: WebRequest) -> tuple[str, ...]:
    name = name_of(request.native.form.get("name", ""))
    try:
        owner, device = devices.loads(request.cookie("device") or "")
    except (BadSignature, ValueError):
        return ("stranger", name)
    # Otherwise an attacker who logs in to an account of his own would have a count for each cookie.
    return ("device", name, device) if owner == name else ("stranger", name)


def failed(status: int) -> bool:
    return status == 401


@app.post("/login")
@limit("50 in any hour", key="address", count=failed, name="address")
@limit("10 in any hour", key=by_name, count=failed, name="name")
def login() -> Response:
    name = name_of(request.form.get("name", ""))
    # Without "" a name and a password that are both missing would be equal: None.
    if PASSWORDS.get(name) != request.form.get("password", ""):  # compare hashes in production
        return Response("wrong name or password", 401)
    answer = Response("welcome")
    cookie = devices.dumps([name, uuid.uuid4().hex])
    answer.set_cookie("device", cookie, max_age=90 * 86400, secure=True, httponly=True)
    return answer


def guess(address: str, name: str, password: str = "guess", cookie: str = "") -> TestResponse:
    client = app.test_client(use_cookies=False)
    form, headers = {"name": name, "password": password}, {"Cookie": cookie}
    environ = {"REMOTE_ADDR": address}
    return client.post("/login", data=form, headers=headers, environ_base=environ)


def main() -> None:
    assert app.test_client().post("/login", data={"name": "nobody"}).status_code == 401
    answer = guess("198.51.100.1", "Ann", "correct horse")
    cookie = answer.headers["Set-Cookie"].partition(";")[0]

    botnet = [guess(f"203.0.113.{n}", ("ann", " ANN")[n % 2]).status_code for n in range(100)]
    print(f"100 addresses guess at ann: {botnet.count(401)} reach the password check")
    assert botnet.count(401) == 10

    # Ann is not locked out at home. At a new device she is, until the hour is over.
    assert guess("198.51.100.1", "ann", "correct horse", cookie).status_code == 200
    assert guess("198.51.100.2", "ann", "correct horse").status_code == 429
    assert guess("198.51.100.2", "ann", "correct horse", "device=invented").status_code == 429
    eve = guess("198.51.100.2", "eve", "battery staple").headers["Set-Cookie"].partition(";")[0]
    assert guess("198.51.100.2", "ann", "guess", eve).status_code == 429
    # A stolen cookie allows ten more guesses an hour, and at ann only.
    stolen = [guess("198.51.100.3", "ann", "guess", cookie).status_code for _ in range(20)]
    assert stolen.count(401) == 10
    assert guess("198.51.100.3", "ann", "correct horse", cookie).status_code == 429

    one = [guess("192.0.2.1", f"user{n}").status_code for n in range(200)]
    print(f"one address guesses at 200 names: {one.count(401)} reach the password check")
    assert one.count(401) == 50


if __name__ == "__main__":
    main()
