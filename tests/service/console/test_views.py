"""What every page does: who may see it, which forms are accepted, and its headers."""

from __future__ import annotations

from http.cookies import SimpleCookie

import pytest

from ratekeeper.service.console.views import COOKIE, NAVIGATION
from tests.service.console.client import NODE, ConsoleClient

PAGES = [path for _, path in NAVIGATION]


@pytest.mark.parametrize("path", PAGES)
async def test_every_page_is_shown_to_operators_only(console: ConsoleClient, path: str) -> None:
    """Anybody else is asked to log in, and comes back to the page."""
    assert '<a href="' + path + '" aria-current="page"' in await console.get(path[8:])
    console.http.cookies.clear()
    answer = await console.http.get(path, params={"q": "a&b"})
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/console/login?next=%2Fconsole")
    partial = await console.http.get(path, headers={"HX-Request": "true"})
    assert (partial.status_code, "hx-redirect" in partial.headers) == (401, True)


@pytest.mark.parametrize("path", [*PAGES, "/console/login", "/console/nothing"])
async def test_headers_of_every_page(console: ConsoleClient, path: str) -> None:
    """No page is stored, framed, or runs anything but the service's own files."""
    headers = (await console.http.get(path)).headers
    if path != "/console/login":
        policy = headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self';" in policy
        assert "unsafe" not in policy
    assert headers["cache-control"] == "no-store"
    assert headers["x-frame-options"] == "DENY"


async def test_the_cookie(console: ConsoleClient) -> None:
    """Scripts cannot read it, other sites do not send it, and it ends."""
    answer = await console.http.post("/console/login", data={"token": console.secrets["read"]})
    cookie = SimpleCookie(answer.headers["set-cookie"])[COOKIE]
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "strict", "/console")
    assert int(cookie["max-age"]) == 12 * 3600
    assert not cookie["secure"]
    secure = await console.http.post(
        "https://localhost/console/login", data={"token": console.secrets["read"]}
    )
    assert SimpleCookie(secure.headers["set-cookie"])[COOKIE]["secure"]


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({}, {}),
        ({}, {"csrf": "x" * 43}),
        ({"Origin": "http://evil.example"}, {"csrf": "right"}),
        ({"Origin": "null"}, {"csrf": "right"}),
        ({"Sec-Fetch-Site": "cross-site"}, {"csrf": "right"}),
        ({"Sec-Fetch-Site": "same-site"}, {"csrf": "right"}),
        ({"X-CSRF-Token": "é"}, {}),
    ],
)
async def test_a_form_of_another_site_is_rejected(
    console: ConsoleClient, headers: dict[str, str], fields: dict[str, str]
) -> None:
    """It needs the secret of the session, and the origin of the console."""
    right = {name: console.csrf if value == "right" else value for name, value in fields.items()}
    raw = {name: value.encode() for name, value in headers.items()}
    answer = await console.http.post("/console/logout", data={**right, "a": "b"}, headers=raw)
    assert answer.status_code == 403
    await console.get("/audit")


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{}", "application/json", 415),
        (b"a=%FF", "application/x-www-form-urlencoded", 400),
        (b"\xff=1", "application/x-www-form-urlencoded", 400),
        (b"a=1&" * 300, "application/x-www-form-urlencoded", 400),
        (b"a" * (17 * 2**20), "application/x-www-form-urlencoded", 413),
    ],
)
async def test_bodies_that_are_no_forms(
    console: ConsoleClient, content: bytes, kind: str, status: int
) -> None:
    """Each gets an error page with the request ID."""
    answer = await console.http.post(
        "/console/logout", content=content, headers={"Content-Type": kind, "Origin": NODE}
    )
    assert answer.status_code == status
    assert f"<code>{answer.headers['x-request-id']}</code>" in answer.text


async def test_a_form_after_the_session_has_ended(console: ConsoleClient) -> None:
    """Nothing is changed, and the page says how to keep what was typed."""
    console.http.cookies.clear()
    answer = await console.post("/logout", 401)
    assert "nothing was changed" in answer.text
