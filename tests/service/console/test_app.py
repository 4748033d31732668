"""Logging in and out of the console, with tokens and with one-time links."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratekeeper.service.console.sessions import Sessions
from ratekeeper.service.console.subjects import KEY_COOKIE, PATH
from ratekeeper.service.http.tokens import Token
from tests.service.console.client import ConsoleClient, console_of
from tests.service.http.client import http_service


async def test_logging_in_and_out(console: ConsoleClient) -> None:
    """After the log-out the cookie is useless, also for somebody who kept it."""
    kept = console.cookie
    assert kept
    console.http.cookies.set(KEY_COOKIE, "c2tfMQ==", domain="localhost.local", path=PATH)
    answer = await console.post("/logout")
    assert answer.headers["location"] == "/console/login"
    assert console.http.cookies.get(KEY_COOKIE) is None
    assert console.cookie is None
    console.http.cookies.set("ratekeeper_console", kept, domain="localhost.local", path="/console")
    await console.get("/audit", 303)


@pytest.mark.parametrize(
    ("role", "status", "text"),
    [("wrong", 401, "unknown"), ("", 401, "unknown"), ("check", 403, "the role read or admin")],
)
async def test_a_rejected_token(console: ConsoleClient, role: str, status: int, text: str) -> None:
    """The form is shown again; the token is never repeated in the page."""
    console.http.cookies.clear()
    token = console.secrets.get(role, role)
    answer = await console.http.post("/console/login", data={"token": token, "next": "/console"})
    assert answer.status_code == status
    assert text in answer.text
    assert not token or token not in answer.text
    assert console.cookie is None


@pytest.mark.parametrize(
    ("asked", "reached"),
    [
        ("/console/audit?author=ann", "/console/audit?author=ann"),
        ("", "/console"),
        ("https://evil.example/console", "/console"),
        ("//evil.example/console/", "/console"),
        ("/console/../v1/admin/rules", "/console"),
        ("/consolex", "/console"),
        ("/console/login", "/console"),
    ],
)
async def test_a_login_leads_back_to_the_console_only(
    console: ConsoleClient, asked: str, reached: str
) -> None:
    """A link of a stranger cannot use the login to lead somewhere else."""
    console.http.cookies.clear()
    data = {"token": console.secrets["read"], "next": asked}
    answer = await console.http.post("/console/login", data=data)
    assert answer.headers["location"] == reached


async def test_a_login_form_of_another_site_is_rejected(console: ConsoleClient) -> None:
    """Nobody is logged in as somebody else without noticing."""
    console.http.cookies.clear()
    answer = await console.http.post(
        "/console/login",
        data={"token": console.secrets["read"]},
        headers={"Sec-Fetch-Site": "cross-site"},
    )
    assert answer.status_code == 403
    assert console.cookie is None


async def test_a_link_logs_in_once_even_without_tokens(tmp_path: Path) -> None:
    """The owner of the data folder can open the console of a service that has no token file."""
    async with console_of(tmp_path, None, tokens=False) as console:
        code = Sessions(tmp_path / "sessions").make_link("ann", "admin")
        answer = await console.http.get(f"/console/link/{code}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/console")
        assert "ann" in await console.get("/fleet")
        console.http.cookies.clear()
        again = await console.http.get(f"/console/link/{code}")
        assert again.status_code == 403
        assert "ratekeeper console link" in again.text


async def test_errors_are_pages(console: ConsoleClient) -> None:
    """A wrong path or method gets a page with the request ID."""
    assert "There is no such page" in await console.get("/nothing", 404)
    assert "Request ID" in await console.get("/logout", 405)


async def test_a_service_without_a_data_folder_has_no_console() -> None:
    """It says so."""
    async with http_service() as call:
        answer = await call("GET", "/console", headers={"Host": "localhost"})
        assert answer.status == 404
        assert b"no console" in answer.body


async def test_logging_out_everywhere_else(console: ConsoleClient) -> None:
    """The other sessions of the same token end; those of other tokens and this one stay."""
    sessions, tokens = Sessions(console.context.settings.sessions or Path()), console.context.tokens
    kept = console.cookie
    found = sessions.find(kept, tokens)
    assert found is not None
    other = sessions.begin(found.token)
    stranger = sessions.begin(Token("bob", "admin"))
    text = await console.get("/sessions")
    assert text.count("another browser") == 1
    answer = await console.post("/sessions/end")
    assert (
        "The other sessions are ended" in (await console.http.get(answer.headers["location"])).text
    )
    alive = [sessions.find(each, tokens) is not None for each in (kept, other, stranger)]
    assert alive == [True, False, True]
