"""Attacks on the console in a browser: script injection, frames, other hosts, TLS, sessions.

`tests/service/console/test_security.py` attacks every route without a browser.
"""

from __future__ import annotations

import http.server
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import Browser, expect

from ratekeeper.service.console.views import COOKIE, NAVIGATION
from ratekeeper.service.http.tokens import create_token, remove_token
from tests.console.operators import ConsoleService, Operator
from tests.http_thread import serving
from tests.redis_servers.certificates import make_certificates
from tests.redis_servers.waiting import until
from tests.service_process import ServiceProcess, run_to_end

# It ends attributes, elements, comments, scripts and templates, and would run a script.
EVIL = (
    "\"'`--></title></textarea></script><x-evil onclick=evil()><img src=x onerror=evil()>"
    "<script>evil()</script>{{7*7}}${evil()}"
)
# A rule may have such an ID, and a token such a name.
EVIL_NAME = "<x-evil><img src=x onerror=evil()>'\"{{7*7}}"
RULES: dict[str, Any] = {
    "version": 1,
    "tiers": {EVIL_NAME: ["1/hour"]},
    "rules": [
        {"id": EVIL_NAME, "match": {"user": "*"}, "by": ["user"], "limits": ["1/hour"]},
        {"id": "keys", "match": {"api_key": "*"}, "by": ["api_key"], "limits": ["1/hour"]},
        {
            "id": "tenants",
            "match": {"tenant": "*"},
            "by": ["tenant"],
            "limits": ["1/hour"],
            "mode": "shadow",
        },
        {
            "id": "penal",
            "match": {"attributes": {"agent": "*"}},
            "by": ["agent"],
            "limits": ["1/hour"],
            "penalty": {"after": 1, "within": "1m", "cooldown": "10m"},
        },
    ],
    "assign": {f"user:{EVIL}": EVIL_NAME},
    "deny": [f"api_key:{EVIL}"],
    "overrides": [
        {"for": {"user": EVIL}, "multiply": 2, "reason": EVIL, "author": EVIL_NAME},
    ],
}
# Elements that no template has, handlers in attributes, and inline scripts and styles.
INJECTED = """() => [...document.querySelectorAll('*')].filter(e =>
    e.matches('x-evil, img, iframe, object, embed')
    || e.matches('script:not([src]):not([type="application/json"])')
    || e.getAttributeNames().some(
        name => name.startsWith('on') || /^\\s*javascript:/i.test(e.getAttribute(name)))
).map(e => e.outerHTML.slice(0, 200))"""
PAGES_MAX = 40
EXAMPLE = Path(__file__).parents[2] / "examples" / "limits.yaml"


@pytest.fixture(scope="module")
def service() -> Iterator[ConsoleService]:
    """Run a service whose callers and operators send hostile values in every field."""
    hostile = ConsoleService(RULES)
    hostile.tokens["evil"] = create_token(hostile.data / "tokens.json", EVIL_NAME, "admin")
    with hostile as running:
        attack(running)
        yield running


def attack(service: ConsoleService) -> None:
    """Send hostile values in every field that a caller or an operator controls."""
    until(lambda: service.admin("GET", "/rules").status == 200, "the admin API answers", 60)
    for number in range(3):
        for fields in (
            {"user": EVIL, "endpoint": EVIL, "method": EVIL_NAME[:20]},
            {"api_key": EVIL, "tenant": EVIL, "endpoint": f"/{EVIL}"},
            {"tenant": EVIL, "endpoint": EVIL},
            {"user": f"{EVIL}{number}", "attributes": {"agent": EVIL, "x": EVIL}},
        ):
            headers = {"X-Request-Id": EVIL.encode("ascii").hex()[:60]}
            answer = service.ask(
                "POST", "/v1/check", fields, {**service.bearer("check"), **headers}
            )
            assert answer.status in {200, 403, 429}, answer
    reasons = {"Authorization": f"Bearer {service.tokens['evil']}", "X-Reason": EVIL}
    changes: list[tuple[str, str, Any]] = [
        ("POST", "/quota/grant", {"user": EVIL, "units": 5, "ttl_seconds": 600, "reason": EVIL}),
        ("POST", "/quota/reset", {"tenant": EVIL, "endpoint": EVIL, "reason": EVIL}),
        (
            "POST",
            "/overrides",
            {"for": {"tenant": EVIL}, "multiply": 3, "until": "2h", "reason": EVIL},
        ),
        ("POST", "/lists/deny", {"entry": f"user:{EVIL}blocked"}),
        ("PUT", f"/assignments/{quote('tenant:' + EVIL, safe='')}", {"tier": EVIL_NAME}),
        ("PATCH", f"/rules/{quote(EVIL_NAME, safe='')}", {"mode": "shadow"}),
        ("PATCH", f"/rules/{quote(EVIL_NAME, safe='')}", {"mode": "enforce"}),
    ]
    for method, path, body in changes:
        answer = service.ask(method, f"/v1/admin{path}", body, reasons)
        assert answer.status < 300, (path, answer)
    until(
        lambda: EVIL in service.admin("GET", "/decisions").body.decode("unicode_escape"),
        "the decisions are recorded",
        60,
    )


def hostile_pages() -> list[str]:
    """Return pages whose URLs have hostile values, as an operator may open them from a message."""
    given = quote(EVIL, safe="")
    fields = ("q", "subject", "search", "user", "rule", "author", "key", "cursor", "done", "by")
    query = "&".join(f"{name}={given}" for name in (*fields, "endpoint", "tenant", "attributes"))
    return [
        *(path for _, path in NAVIGATION),
        "/console/sessions",
        *(f"{path}?{query}" for _, path in NAVIGATION),
        *(f"/console/subjects?subject={name}:{given}" for name in ("user", "tenant", "api_key")),
        f"/console/{given}",
        f"/console/login?next={given}",
    ]


def test_no_value_becomes_markup(operator: Operator) -> None:
    """Every page, everything on it opened, and every page that it links to."""
    operator.expect_status(400, 401, 403, 404, 405, 409, 413, 422)
    page = operator.log_in("evil")
    waiting, seen, shown = hostile_pages(), set[str](), list[str]()
    while waiting and len(seen) < PAGES_MAX:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        answer = page.goto(path)
        assert answer is not None
        assert answer.status < 500, (path, operator.service.log_end())
        page.evaluate("() => document.querySelectorAll('details').forEach(e => { e.open = true; })")
        for button in page.locator("button[hx-get]:visible, summary[hx-get]:visible").all()[:5]:
            button.click()
        # htmx has put in everything that it asked for.
        expect(page.locator(".htmx-request")).to_have_count(0)
        assert not page.evaluate(INJECTED), path
        assert page.evaluate("() => typeof window.evil") == "undefined"
        assert "49" not in page.locator("h1").inner_text()
        if "<x-evil" in page.locator("main").inner_text():
            shown.append(path)
        links = page.eval_on_selector_all(
            "main a[href^='/console/'], main a[href^='?']", "all => all.map(e => e.href)"
        )
        for link in links:
            parts = urlsplit(link)
            found = f"{parts.path}?{parts.query}" if parts.query else parts.path
            # Downloads are not pages.
            if not any(text in found for text in ("csv", "download", "export")):
                waiting.append(found)
    assert len(seen) >= len(hostile_pages())
    # The values were there: the pages have shown them as text.
    expect(page.locator("header")).to_contain_text(EVIL_NAME)
    shown = [path for path in shown if path != "/console/sessions"]
    assert shown, "no page has shown the values"


@contextmanager
def other_site(body: str) -> Iterator[str]:
    """Serve a page of a stranger, under another name of this machine."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that http.server calls
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://localhost:{server.server_port}/"


def test_a_page_of_a_stranger(operator: Operator, service: ConsoleService) -> None:
    """It cannot show the console in a frame, nor send a form; its link opens the console."""
    operator.log_in()
    body = f"""
        <iframe src="{service.url}/console/audit"></iframe>
        <form method="post" action="{service.url}/console/logout"><button>Send</button></form>
        <a href="{service.url}/console/audit?author=setup">Open</a>"""
    with other_site(body) as site:
        page = operator.context.new_page()
        page.goto(site)
        frame = page.frames[1]
        expect(page.locator("iframe")).to_be_visible()
        assert frame.url.startswith("chrome-error:") or "Audit" not in frame.content()
        page.get_by_role("link", name="Open").click()
        # SameSite=Strict: the page is loaded again, with the cookie.
        expect(page.get_by_role("heading", level=1)).to_have_text("Audit")
        assert page.url.endswith("/console/audit?author=setup")
        page.goto(site)
        with page.expect_response("**/console/logout") as answer:
            page.get_by_role("button", name="Send").click()
        assert answer.value.status in {401, 403}
        page.close()
    expect(operator.open("/audit").get_by_role("heading", level=1)).to_have_text("Audit")


def test_sessions_end(browser: Browser, service: ConsoleService) -> None:
    """Removed tokens and log-outs elsewhere end a session; a script cannot read its cookie."""
    tokens = service.data / "tokens.json"
    service.tokens["brief"] = create_token(tokens, "brief", "read")
    operators = [Operator(browser, service) for _ in range(3)]
    for each in operators:
        # The service reads the token file at most once a second.
        until(
            lambda: (
                service.ask("GET", "/v1/admin/node", headers=service.bearer("brief")).status == 200
            ),
            "the token is known",
            60,
        )
        each.log_in("brief")
        assert each.open("/audit").evaluate("() => document.cookie") == ""
        (cookie,) = each.context.cookies()
        assert (cookie["name"], cookie["httpOnly"], cookie["sameSite"], cookie["secure"]) == (
            COOKIE,
            True,
            "Strict",
            False,
        )
    first, second, third = operators
    page = first.open("/sessions")
    expect(page.get_by_role("row")).to_have_count(4)
    page.get_by_role("button", name="Log out everywhere else").click()
    first.confirm()
    expect(page.get_by_role("status")).to_contain_text("The other sessions are ended")
    for each in (second, third):
        expect(each.open("/audit").get_by_role("heading", level=1)).to_have_text("Log in")
    remove_token(tokens, "brief")
    until(
        lambda: first.open("/audit").get_by_role("heading", level=1).inner_text() == "Log in",
        "the session of the removed token has ended",
        60,
    )
    for each in operators:
        each.close()


def test_the_first_minutes_without_tokens(browser: Browser, tmp_path: Path) -> None:
    """A link from the command line logs in, here under TLS; the owner may change rules at once.

    The cookie is Secure. The link works once. The command line lists the session and ends it.
    """
    made = make_certificates(tmp_path)
    tls = ("--tls-cert", str(made.server_cert_path), "--tls-key", str(made.server_key_path))
    with ServiceProcess(None, "--seed", str(EXAMPLE), *tls, records=True) as service:
        data = ("--data", str(service.data))
        link = run_to_end(["console", "link", "--name", "ann", "--url", service.url, *data])
        assert link.stdout.startswith(f"{service.url}/console/link/"), link.stderr
        operator = Operator(browser, service, ignore_https_errors=True)
        page = operator.page
        page.goto(link.stdout.strip())
        page.wait_for_url("**/console")
        expect(page.locator("header")).to_contain_text("ann")
        (cookie,) = operator.context.cookies()
        assert cookie["secure"]
        operator.open("/rules/rule?id=crawlers")
        page.get_by_label("Reason").first.fill("they are too many")
        page.get_by_role("button", name="Enforce it").click()
        operator.confirm()
        expect(page.get_by_role("status").first).to_contain_text("enforced")
        expect(operator.open("/audit").locator("main")).to_contain_text("they are too many")
        assert "ann" in run_to_end(["console", "sessions", *data]).stdout
        assert "ended: 1 sessions" in run_to_end(["console", "end", "--all", *data]).stdout
        expect(operator.open("/audit").get_by_role("heading", level=1)).to_have_text("Log in")
        operator.expect_status(403)
        page.goto(link.stdout.strip())
        expect(page.get_by_role("alert")).to_contain_text("used before")
        operator.close()
        assert "/console/link/" not in service.log_text()
