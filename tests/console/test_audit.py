"""The audit log in Chromium: every change of a running service, and who made it."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from ratekeeper.service.console.audit import ROWS
from tests.console.operators import PHONE, RULES, TIMEOUT_MS, ConsoleService, Operator

expect.set_options(timeout=TIMEOUT_MS)

HOSTILE = "<img src=x onerror=alert(1)>\"'{{7*7}}"


@pytest.fixture(scope="module")
def changed(service: ConsoleService) -> int:
    """Make changes of several kinds, more than a page has; return their number."""
    assignments = ROWS - 2
    changes = [
        *(
            ("PUT", f"/assignments/user:{number}", {"tier": "pro", "reason": "launch"})
            for number in range(assignments)
        ),
        ("PATCH", "/rules/orders", {"limits": ["12/minute"]}),
        ("POST", "/quota/grant", {"user": "7", "endpoint": "/orders", "units": 5}),
        ("POST", "/quota/reset", {"user": HOSTILE, "endpoint": "/orders", "reason": HOSTILE}),
    ]
    for method, path, body in changes:
        # The service answers other requests meanwhile.
        service.check(user="busy", endpoint="/other")
        answer = service.admin(method, path, body)
        assert answer.status < 300, answer.body
    return len(changes) + 1  # the seed


def test_every_change_is_listed(operator: Operator, changed: int) -> None:
    """The newest first, in pages, with its person, reason and diff, and links to other pages."""
    operator.page.on("dialog", lambda dialog: operator.problems.append(dialog.message))
    operator.log_in("read")
    page = operator.open("/audit")
    lines = page.locator(".audit details")
    expect(lines).to_have_count(ROWS)
    expect(lines.nth(0).locator("summary")).to_contain_text("counts reset")
    expect(lines.nth(0).locator("summary")).to_contain_text(HOSTILE)
    expect(page.locator("main img")).to_have_count(0)

    lines.nth(2).locator("summary").click()
    expect(lines.nth(2).locator(".author")).to_have_text("admin-token")
    expect(lines.nth(2).locator(".added")).to_contain_text("12/minute")
    link = lines.nth(2).get_by_role("link", name="Show the whole diff")
    assert link.get_attribute("href") == "/console/rules/versions/2"
    lines.nth(3).locator("summary").click()
    subject = lines.nth(3).get_by_role("link", name=f"Show user:{ROWS - 3}")
    assert subject.get_attribute("href") == f"/console/subjects?subject=user%3A{ROWS - 3}"
    operator.check_accessibility()

    page.get_by_role("link", name="Older").click()
    page.wait_for_url("**before=**")
    expect(lines).to_have_count(changed - ROWS)
    expect(lines.last.locator("summary")).to_contain_text("version 1")


def test_filters_are_in_the_url(operator: Operator, changed: int) -> None:
    """By person, subject, kind and time; a list without entries says how to get some."""
    operator.log_in("read")
    page = operator.open("/audit")
    lines = page.locator(".audit details")
    page.get_by_label("Subject, entry or rule").fill("user:3")
    page.get_by_label("Kind").fill("assign")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**/audit?key=user%3A3&kind=assign")
    expect(lines).to_have_count(1)
    page.get_by_role("link", name="Last 1 hour").click()
    page.wait_for_url("**/audit?last=1h&kind=assign&key=user%3A3")
    expect(lines).to_have_count(1)
    page.get_by_label("Person").fill("mallory")
    page.get_by_role("button", name="Show").click()
    expect(page.locator(".empty")).to_contain_text("No change has these properties")
    expect(page.get_by_label("Kind")).to_have_value("assign")
    operator.check_accessibility()
    page.get_by_role("link", name="Show all changes").click()
    expect(lines).to_have_count(min(ROWS, changed))


def test_a_wrong_time_keeps_the_filters(operator: Operator) -> None:
    """The page shows what was wrong, with the request ID."""
    operator.expect_status(400)
    operator.log_in("read")
    page = operator.open("/audit?to=tomorrow&author=ann")
    expect(page.get_by_role("alert")).to_contain_text("neither a date")
    expect(page.get_by_role("alert")).to_contain_text("Request ID")
    expect(page.get_by_label("To (UTC)")).to_have_value("tomorrow")
    expect(page.get_by_label("Person")).to_have_value("ann")
    operator.check_accessibility()


def test_a_phone_shows_everything(browser: Browser, service: ConsoleService, changed: int) -> None:
    """Without scrolling sideways, in dark colours."""
    phone = Operator(browser, service, viewport=PHONE, color_scheme="dark")
    phone.log_in("read")
    page = phone.open("/audit")
    for number in range(4):
        page.locator(".audit summary").nth(number).click()
    assert changed
    phone.check_width()
    phone.check_accessibility()
    phone.close()


class FileService(ConsoleService):
    """A service with its rules in a file, and without records."""

    def __init__(self) -> None:
        super().__init__()
        self.use(RULES)
        self._options = ("--rules", str(self.rules_path), "--record", "off")


def test_a_service_with_neither_a_database_nor_records(browser: Browser) -> None:
    """The pages say what is missing, and what to do."""
    with FileService() as running:
        operator = Operator(browser, running)
        operator.log_in("read")
        page = operator.open("/audit")
        expect(page.locator(".empty")).to_contain_text("come from a file")
        operator.check_accessibility()
        page = operator.open("/denials?rule=orders")
        expect(page.locator(".empty")).to_contain_text("--record off")
        expect(page.get_by_label("Rule", exact=True)).to_have_value("orders")
        operator.check_accessibility()
        operator.close()
