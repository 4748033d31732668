"""An operator in front of Chromium, and the service whose console is open.

    def test_the_audit_log(operator: Operator) -> None:
        operator.log_in("read")
        page = operator.open("/audit")
        expect(page.get_by_role("heading", level=1)).to_have_text("Audit")
        operator.check_accessibility()

A test fails if the page logs an error, violates its Content-Security-Policy, or calls another host.
Playwright's synchronous interface has an event loop of its own, so these tests are plain functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import yaml
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from ratekeeper.service.http.tokens import Role, create_token
from tests.service_process import Answered, ServiceProcess

CHROMIUM: Final = "/usr/bin/chromium"
# Long enough for a busy machine.
TIMEOUT_MS: Final = 60_000
expect.set_options(timeout=TIMEOUT_MS)
AXE: Final = Path(__file__).with_name("vendor") / "axe.js"
# What Chromium and htmx log about a connection that is refused or breaks.
_LOST: Final = ("net::ERR_", "htmx:sendError", "Response Status Error Code 0")
PHONE: Final = {"width": 360, "height": 740}

# Rules of every kind that the pages show: tiers, shadow mode, a rollout, lists, penalties.
RULES: Final[dict[str, Any]] = {
    "version": 1,
    "tiers": {"free": ["5/minute"], "pro": ["100/minute"]},
    "rules": [
        {
            "id": "orders",
            "match": {"endpoint": "/orders"},
            "by": ["user"],
            "limits": ["10/minute"],
            "tiers": {"pro": ["50/minute"]},
        },
        {"id": "tenants", "match": {"tenant": "*"}, "by": ["tenant"], "limits": ["1000/hour"]},
        {
            "id": "trial",
            "match": {"endpoint": "/search"},
            "by": ["user"],
            "limits": ["2/minute"],
            "mode": "shadow",
        },
        {
            "id": "login",
            "match": {"endpoint": "/login"},
            "by": ["ip"],
            "limits": ["3/minute"],
            "penalty": {"after": 2, "within": "1m", "cooldown": "10m"},
        },
    ],
    "assign": {"user:42": "pro"},
    "deny": ["api_key:sk_revoked_*"],
}


class ConsoleService(ServiceProcess):
    """A service with rules in a database, complete records, and a token of each role."""

    def __init__(self, rules: Mapping[str, Any] = RULES, *options: str, workers: int = 1) -> None:
        super().__init__(None, *options, workers=workers, records=True)
        seed = self.folder / "seed.yaml"
        seed.write_text(yaml.safe_dump(dict(rules), sort_keys=False), encoding="utf-8")
        self._options = ("--seed", str(seed), "--sample", "1", *options)
        roles: tuple[Role, ...] = ("admin", "read", "check")
        self.tokens = {
            role: create_token(self.data / "tokens.json", f"{role}-token", role) for role in roles
        }

    def check(self, **fields: Any) -> Answered:
        """Check a request."""
        return self.ask("POST", "/v1/check", fields, self.bearer("check"))

    def admin(self, method: str, path: str, body: Any = None, **headers: str) -> Answered:
        """Call the admin API as an admin."""
        return self.ask(method, f"/v1/admin{path}", body, {**self.bearer("admin"), **headers})

    def bearer(self, role: str) -> dict[str, str]:
        """Return the header of a role."""
        return {"Authorization": f"Bearer {self.tokens[role]}"}


class Operator:
    """A browser window with cookies of its own."""

    def __init__(self, browser: Browser, service: ServiceProcess, **options: Any) -> None:
        self.service = service
        self.context = browser.new_context(base_url=service.url, **options)
        self.context.set_default_timeout(TIMEOUT_MS)
        self.page: Page = self.context.new_page()
        self.problems: list[str] = []
        self._expected: set[int] = set()
        self._may_lose = False
        self._host = urlsplit(service.url).netloc
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type != "error" and "Content Security Policy" not in message.text:
            return
        logged = (f"status of {status} " for status in self._expected)
        by_htmx = (f"Status Error Code {status} from" for status in self._expected)
        if any(text in message.text for text in (*logged, *by_htmx)):
            return
        if self._may_lose and any(text in message.text for text in _LOST):
            return
        self.problems.append(message.text)

    def _on_request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in {"data", "blob", "about"} and parts.netloc != self._host:
            self.problems.append(f"a request to {request.url}")

    def expect_status(self, *statuses: int) -> None:
        """Accept that Chromium logs answers with these statuses: the test causes them."""
        self._expected |= set(statuses)

    def expect_lost_connection(self) -> None:
        """Accept that Chromium logs connections that are refused or break: the test causes them."""
        self._may_lose = True

    def log_in(self, role: str = "admin") -> Page:
        """Begin a session with the token of a role. No page is loaded: that takes a second."""
        assert isinstance(self.service, ConsoleService)
        form = {"token": self.service.tokens[role]}
        answer = self.context.request.post("/console/login", form=form, max_redirects=0)
        assert answer.status == 303, answer.text()
        return self.page

    def open(self, path: str = "") -> Page:
        """Open a page of the console."""
        self.page.goto(f"/console{path}")
        return self.page

    def confirm(self) -> None:
        """Confirm the question that the page asks."""
        self.page.locator("#confirm").get_by_role("button", name="Confirm").click()

    def check_accessibility(self) -> None:
        """Fail if axe-core finds a violation in the page."""
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = self.page.evaluate("() => axe.run()")
        shown = [
            {"id": each["id"], "help": each["help"], "at": [n["html"] for n in each["nodes"][:3]]}
            for each in found["violations"]
        ]
        assert not shown, json.dumps(shown, indent=1)

    def check_width(self) -> None:
        """Fail if the page has to be scrolled sideways."""
        wide = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert self.page.evaluate(wide) <= 0

    def close(self) -> None:
        """Close the window. Fail if something went wrong in it."""
        self.context.close()
        assert not self.problems, "\n".join(self.problems)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Debian's Chromium without a window."""
    with sync_playwright() as playwright:
        # Root, as in a container, has to do without the sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
