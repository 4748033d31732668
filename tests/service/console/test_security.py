"""Attacks on the console, over every route that it has: a new route is attacked without a new test.

`tests/console/test_security.py` attacks the pages in a browser.
"""

from __future__ import annotations

import asyncio
import html
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.routing import Route

from ratekeeper.service.admin.api import admin_app
from ratekeeper.service.admin.control import HEAVY_LENGTH, HEAVY_OF_TOKEN_MAX
from ratekeeper.service.console import views
from ratekeeper.service.console.app import console_app
from ratekeeper.service.console.sessions import Sessions
from ratekeeper.service.console.views import COOKIE, FORM_FIELDS_MAX, NAVIGATION
from ratekeeper.service.http.incoming import body_bytes_max
from ratekeeper.service.http.tokens import Token
from tests.service.console.client import NODE, ConsoleClient, console_of

# What a reader may send: questions, and what concerns the own sessions.
READERS_MAY = {
    "/console/logout",
    "/console/sessions/end",
    "/console/rules/check",
    "/console/rules/preview",
    "/console/subjects",
    "/console/try",
}
OPEN = {"/console/login", "/console/link/{code}"}
FORM = "application/x-www-form-urlencoded"
FOLDER = Path(views.__file__).parent


def routes_of(console: ConsoleClient, method: str) -> Iterator[str]:
    """Yield the paths of all routes with a method, as they are declared."""
    context = console.context
    for route in console_app(context, admin_app(context)).routes:  # type: ignore[arg-type]  # our own scope type
        assert isinstance(route, Route), "the tests of security know routes only"
        if method in (route.methods or ()):
            yield route.path


def filled(path: str) -> str:
    """Return a declared path with values for its parameters."""
    path = re.sub(r"\{\w+:int\}", "1", path)
    return re.sub(r"\{\w+(:\w+)?\}", "user:42", path)


async def audit(console: ConsoleClient) -> int:
    """Return the number of entries of the audit log."""
    given = {"Authorization": f"Bearer {console.secrets['admin']}"}
    return len((await console.http.get("/v1/admin/audit", headers=given)).json()["items"])


async def test_no_page_without_a_session(console: ConsoleClient) -> None:
    """Every page leads to the login, and shows nothing before it."""
    console.http.cookies.clear()
    found = [path for path in routes_of(console, "GET") if path not in OPEN]
    assert {path for _, path in NAVIGATION} <= set(found)
    for path in found:
        for more in ({}, {"HX-Request": "true"}, {"Sec-Fetch-Site": "cross-site"}):
            answer = await console.http.get(filled(path), headers=more)
            wanted = {"HX-Request": 401, "Sec-Fetch-Site": 200}.get(next(iter(more), ""), 303)
            assert answer.status_code == wanted, path
            assert "node-1" not in answer.text
            assert "csrf" not in answer.text.replace("htmx", "")
            assert (answer.text == "") == (wanted != 200)
            if wanted == 303:
                assert answer.headers["location"].startswith("/console/login?next=%2Fconsole")


async def test_no_change_without_a_form_of_the_session(console: ConsoleClient) -> None:
    """CSRF: every POST needs the secret of the session, and comes from the console itself."""
    before = await audit(console)
    attacks: list[tuple[dict[str, str], dict[str, str]]] = [
        ({"x": "1"}, {}),
        ({"csrf": ""}, {}),
        ({"csrf": "é" * 43}, {}),
        ({"csrf": console.csrf[:-1]}, {}),
        ({"csrf": console.csrf}, {"Origin": "https://evil.example"}),
        ({"csrf": console.csrf}, {"Origin": "null"}),
        ({"csrf": console.csrf}, {"Origin": f"{NODE}.evil.example"}),
        ({"csrf": console.csrf}, {"Sec-Fetch-Site": "cross-site"}),
        ({"csrf": console.csrf}, {"Sec-Fetch-Site": "same-site"}),
        ({"x": "1"}, {"X-CSRF-Token": "wrong"}),
    ]
    found = [path for path in routes_of(console, "POST") if path not in OPEN]
    assert "/console/logout" in found
    for path in found:
        for form, headers in attacks:
            answer = await console.http.post(filled(path), data=form, headers=headers)
            assert answer.status_code == 403, (path, form, headers)
        for kind in ("text/plain", "application/json", "multipart/form-data; boundary=x"):
            body = f"csrf={console.csrf}"
            answer = await console.http.post(
                filled(path), content=body, headers={"Content-Type": kind}
            )
            assert answer.status_code == 415, (path, kind)
        console.http.cookies.clear()
        answer = await console.http.post(filled(path), data={"csrf": console.csrf})
        assert answer.status_code == 401, path
        await console.log_in()
    assert await audit(console) == before


async def test_a_reader_changes_nothing(console: ConsoleClient) -> None:
    """Not even by a request that no page of the reader contains."""
    before = await audit(console)
    found = [path for path in routes_of(console, "POST") if path not in OPEN]
    for path in found:
        await console.log_in("read")
        answer = await console.http.post(
            filled(path), data={"csrf": console.csrf}, headers={"Origin": NODE}
        )
        if path in READERS_MAY:
            assert answer.status_code not in {401, 403, 500}, path
        else:
            assert answer.status_code == 403, path
            assert "Your role is read" in answer.text
    assert await audit(console) == before


async def test_pages_of_a_reader_have_no_forms_of_change(console: ConsoleClient) -> None:
    """A reader sees no button that would be rejected."""
    await console.log_in("read")
    may = READERS_MAY | {"/console/logout"}
    for path in (path for _, path in NAVIGATION):
        text = (await console.http.get(path)).text
        for form in re.findall(r"<form[^>]*method=\"post\"[^>]*>", text):
            action = re.search(r'action="([^"]*)"', form)
            assert action, (path, form)
            assert action[1] in may, (path, form)


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "X"])
async def test_other_methods_are_rejected(console: ConsoleClient, method: str) -> None:
    """And no answer permits pages of other origins to ask."""
    for path in {*routes_of(console, "GET"), *routes_of(console, "POST")}:
        answer = await console.http.request(method, filled(path), headers={"Origin": NODE})
        assert answer.status_code == 405, path
        assert not any(name.startswith("access-control") for name in answer.headers)


async def test_a_preview_of_a_link_does_not_use_it(console: ConsoleClient) -> None:
    """Mail and chat programs send HEAD for the links that they show."""
    code = console_sessions(console).make_link("ann", "read")
    assert (await console.http.head(f"/console/link/{code}")).status_code == 405
    assert (await console.http.get(f"/console/link/{code}")).status_code == 303


def console_sessions(console: ConsoleClient) -> Sessions:
    """Return the sessions of the service."""
    folder = console.context.settings.sessions
    assert folder is not None
    return Sessions(folder)


async def test_every_answer_has_the_headers_of_a_page(console: ConsoleClient) -> None:
    """Also errors: no cache, no frame, no script but our own."""
    for path, status in (
        ("/console/audit", 200),
        ("/console/nothing", 404),
        ("/console/link/x", 403),
        ("/console/sessions", 200),
    ):
        answer = await console.http.get(path)
        assert answer.status_code == status
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


# ── Sessions ───────────────────────────────────────────────────────────────────────────────────


def use_cookie(console: ConsoleClient, value: str) -> None:
    """Send this cookie from now on."""
    console.http.cookies.clear()
    console.http.cookies.set(COOKIE, value, domain="localhost.local", path="/console")


async def test_a_login_ignores_the_cookie_of_an_attacker(console: ConsoleClient) -> None:
    """Session fixation: the cookie is always a new one."""
    planted = console.cookie
    assert planted
    answer = await console.http.post("/console/login", data={"token": console.secrets["read"]})
    assert answer.status_code == 303
    cookie = answer.headers["set-cookie"]
    assert planted not in cookie
    assert {"HttpOnly", "Path=/console", "SameSite=strict"} <= set(cookie.split("; "))
    made_up = "a" * 43
    use_cookie(console, made_up)
    await console.http.post("/console/login", data={"token": console.secrets["read"]})
    use_cookie(console, made_up)
    await console.get("/audit", 303)


async def test_the_cookie_of_another_node(console: ConsoleClient, tmp_path: Path) -> None:
    """Each node knows its own sessions only."""
    token = console.context.tokens.permitted(f"Bearer {console.secrets['admin']}", "read")
    other = Sessions(tmp_path / "other").begin(token)  # type: ignore[arg-type]  # it is known
    use_cookie(console, other)
    await console.get("/audit", 303)


@pytest.mark.parametrize(
    ("trusted", "sent", "secure"),
    [
        (("127.0.0.1",), "https", True),
        (("127.0.0.1",), "HTTPS, http", True),
        (("127.0.0.1",), "http", False),
        (("127.0.0.1",), "", False),
        (("10.0.0.1",), "https", False),
        ((), "https", False),
    ],
)
async def test_the_cookie_behind_a_proxy_that_ends_tls(
    tmp_path: Path, trusted: tuple[str, ...], sent: str, secure: bool
) -> None:
    """It is Secure if a trusted proxy says that the browser uses https."""
    async with console_of(tmp_path, None, trusted_proxies=trusted) as console:
        answer = await console.http.post(
            "/console/login",
            data={"token": console.secrets["read"]},
            headers={"X-Forwarded-Proto": sent},
        )
        assert ("Secure" in answer.headers["set-cookie"]) == secure


async def test_a_page_of_another_name_without_tokens(tmp_path: Path) -> None:
    """DNS rebinding: a page of evil.example reaches no page, not even with a cookie."""
    async with console_of(tmp_path, None, tokens=False) as console:
        code = console_sessions(console).make_link("ann", "admin")
        answer = await console.http.get(f"/console/link/{code}")
        cookie = answer.cookies[COOKIE]
        sent = {"Host": "evil.example", "Cookie": f"{COOKIE}={cookie}"}
        for path in {*routes_of(console, "GET"), *routes_of(console, "POST")}:
            for method in ("GET", "POST"):
                answer = await console.http.request(method, filled(path), headers=sent)
                assert answer.status_code == 403, path
                assert "Host" in answer.json()["detail"]
        await console.get("/audit")


# ── Input ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "asked",
    [
        "/console/%2e%2e/v1/admin/rules",
        "/console/%2E./v1",
        "\\\\evil.example",
        "/\\evil.example/console",
        "javascript:alert(1)",
        " //evil.example",
        "/console\n.evil.example",
        "http:/console",
        "/consolé",
        "/console@evil.example/console/",
    ],
)
async def test_a_login_leads_nowhere_else(console: ConsoleClient, asked: str) -> None:
    """Open redirects: only paths of the console are accepted."""
    data = {"token": console.secrets["read"], "next": asked}
    answer = await console.http.post("/console/login", data=data)
    assert answer.headers["location"] == "/console"
    answer = await console.http.get("/console/login", params={"next": asked})
    assert (answer.status_code, answer.headers["location"]) == (303, "/console")


async def test_a_login_leads_to_a_clean_header(console: ConsoleClient) -> None:
    """Line breaks in the path end no header."""
    data = {"token": console.secrets["read"], "next": "/console/a\r\nSet-Cookie: x=1"}
    answer = await console.http.post("/console/login", data=data)
    assert "x=1" not in answer.headers.get_list("set-cookie")
    assert "\n" not in answer.headers["location"]


async def test_huge_input_is_rejected(console: ConsoleClient) -> None:
    """Forms, numbers of fields, cookies, URLs and query fields have bounds, and no defect."""
    for path in routes_of(console, "POST"):
        form = f"csrf={console.csrf}&x=" + "a" * body_bytes_max("POST", path)
        answer = await console.http.post(filled(path), content=form, headers={"Content-Type": FORM})
        assert answer.status_code == 413, path
        many = "&".join([f"csrf={console.csrf}", *["a=1"] * FORM_FIELDS_MAX])
        answer = await console.http.post(filled(path), content=many, headers={"Content-Type": FORM})
        assert answer.status_code == 400, path
    for _, path in NAVIGATION:
        answer = await console.http.get(path, params={"q": "x" * 30_000, "cursor": "'\x00é" * 99})
        assert answer.status_code < 500, path
    for cookie in ("x" * 60_000, '"', "a=b; " * 500, "../../tokens.json", "%00"):
        console.http.cookies.clear()
        answer = await console.http.get("/console/audit", headers={"Cookie": f"{COOKIE}={cookie}"})
        assert answer.status_code == 303


async def test_a_form_is_decoded_in_little_memory(console: ConsoleClient) -> None:
    """A reader's form of 16 MB of escapes took a gigabyte and stopped the worker for a second."""
    form = f"csrf={console.csrf}&name=" + "%41" * 500_000
    # Loads the templates and the code of the page.
    await console.http.post("/console/try", data={"csrf": console.csrf}, headers={"Origin": NODE})
    tracemalloc.start()
    try:
        answer = await console.http.post(
            "/console/rules/check", content=form, headers={"Content-Type": FORM}
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.status_code == 200
    assert peak < 10 * len(form), f"{peak:,} bytes for a form of {len(form):,}"


@pytest.mark.parametrize("slice_bytes", [3, 4, 5, 7, 64])
async def test_a_form_is_decoded_in_slices(
    console: ConsoleClient, monkeypatch: pytest.MonkeyPatch, slice_bytes: int
) -> None:
    """Wherever a slice ends, the text is that of the operator: no escape is cut."""
    monkeypatch.setattr(views, "SLICE_BYTES", slice_bytes)
    text = "a: é%41 +%\nb: €&=%%%2\n"
    answer = await console.post("/rules/check", 200, document=text)
    assert f"\n{html.escape(text)}</textarea>" in answer.text


async def test_a_long_form_waits_for_its_turn(console: ConsoleClient) -> None:
    """It is work that takes long: with as much of one token as may wait, one more is 429."""
    heavy = console.service._console.state.console.heavy
    token = console.context.tokens.permitted(f"Bearer {console.secrets['admin']}", "read")
    assert isinstance(token, Token)
    long = "x" * HEAVY_LENGTH
    async with heavy.turn(token):
        posts = [console.post("/rules/check", 200, document=long) for _ in range(2)]
        waiting = [asyncio.create_task(each) for each in posts]
        while heavy.asked_by(token.name) < HEAVY_OF_TOKEN_MAX:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0)
        await console.post("/rules/check", 200, document="a: 1")
        answer = await console.post("/rules/check", 429, document=long)
        assert "This worker is busy" in answer.text
    await asyncio.gather(*waiting)


HOSTILE = "\"'><x-evil onclick=evil()></textarea></script><script>evil()</script>\x00\x1b\u2028é"
# The fields of all forms, and of all queries.
NAMES = re.compile(r"""(?:name="|form\.get\(["']|form\[["']|query\(["'])([a-z_]+)""")


def field_names() -> set[str]:
    """Return the names of all fields that a page of the console reads."""
    files = [*FOLDER.glob("*.py"), *(FOLDER / "templates").glob("*.html")]
    found = {name for each in files for name in NAMES.findall(each.read_text(encoding="utf-8"))}
    assert {"csrf", "reason", "subject"} <= found
    return found - {"csrf", "viewport"}


@pytest.mark.parametrize("value", [HOSTILE, "", "0", "-1", "1e999", "user:42", "9" * 400, "orders"])
async def test_no_value_is_a_defect_or_markup(console: ConsoleClient, value: str) -> None:
    """The same value in every field of every form and query: an error, or a page with the text."""
    fields = {name: value for name in sorted(field_names()) if name != "done"}
    for path in routes_of(console, "GET"):
        if path not in {*OPEN, "/console/live"}:
            answer = await console.http.get(filled(path), params=fields)
            assert answer.status_code < 500, (path, answer.text)
            assert "<x-evil" not in answer.text, path
    for path in routes_of(console, "POST"):
        if path not in {*OPEN, "/console/logout"}:
            answer = await console.http.post(
                filled(path), data={**fields, "csrf": console.csrf}, headers={"Origin": NODE}
            )
            assert answer.status_code < 500, (path, answer.text)
            assert "<x-evil" not in answer.text, path


# ── Templates ──────────────────────────────────────────────────────────────────────────────────

FORBIDDEN = re.compile(
    r"\|\s*safe\b|\bautoescape\b|\son[a-z]+=|\sstyle=|javascript:|<script(?![^>]*\b(?:src=|"
    r"type=\"application/json\"))|\bhx-on\b|\bhx-vals=.js:|<base\b|https?://",
    re.IGNORECASE,
)
UNSAFE_SCRIPTS = re.compile(
    r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|new Function)\b"
)


def test_templates_and_scripts_insert_no_markup() -> None:
    """Values reach a page as text only, and nothing comes from another host."""
    templates = sorted((FOLDER / "templates").rglob("*.html"))
    scripts = sorted((FOLDER / "static").glob("*.js"))
    assert templates
    assert scripts
    for files, forbidden in ((templates, FORBIDDEN), (scripts, UNSAFE_SCRIPTS)):
        for file in files:
            for line in file.read_text(encoding="utf-8").splitlines():
                assert not forbidden.search(line), f"{file.name}: {line}"
    # `Markup` says that a text is HTML already; only the time does.
    users = [file.name for file in FOLDER.glob("*.py") if "Markup" in file.read_text()]
    assert users == ["views.py"]
