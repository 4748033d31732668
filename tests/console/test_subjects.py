"""The page Subjects in a browser: from the search to every change, on a service under load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from threading import Event, Thread

import pytest
from playwright.sync_api import Page, expect

from tests.console.operators import ConsoleService, Operator
from tests.redis_servers import until

# Nothing of it may become markup, and every link with it must work.
HOSTILE = "<img src=x onerror=alert(1)>\"'/%2F?&#{{7*7}} ž🦊"


@pytest.fixture(scope="module")
def service() -> Iterator[ConsoleService]:
    """Run a service with the traffic of several clients."""
    with ConsoleService() as running:
        for _ in range(12):
            running.check(user="7", endpoint="/orders", method="POST")
            running.check(ip="192.0.2.7", endpoint="/login", method="POST")
        for user in ("70", "71", HOSTILE):
            running.check(user=user, endpoint="/orders")
        running.check(api_key="sk_live_1", tenant="acme", endpoint="/orders")
        # Usage is written every few seconds, that of the last request with the rest or after it.
        until(lambda: _recorded(running, "tenant:acme"), "all usage is recorded", 60)
        until(lambda: _denied(running, "7"), "the denials are recorded", 60)
        stop = Event()
        load = Thread(target=_load, args=(running, stop))
        load.start()
        yield running
        stop.set()
        load.join()


def _load(service: ConsoleService, stop: Event) -> None:
    """Send requests of many clients, twenty a second, while operators work."""
    number = 0
    while not stop.wait(0.05):
        number += 1
        service.check(user=f"load-{number % 200}", tenant="acme", endpoint="/orders")


def _recorded(service: ConsoleService, subject: str) -> bool:
    answer = service.admin("GET", f"/usage?subject={subject}&step=minute")
    return answer.status == 200 and bool(answer.data["items"])


def _denied(service: ConsoleService, user: str) -> bool:
    return bool(service.admin("GET", f"/decisions?outcome=denied&user={user}").data["items"])


def _change(operator: Operator, summary: str, button: str, **fields: str) -> Page:
    """Open a form of change, fill it in, send and confirm it."""
    page = operator.page
    part = page.locator("details", has=page.get_by_text(summary, exact=True))
    if part.get_attribute("open") is None:
        part.get_by_text(summary, exact=True).first.click()
    for label, value in fields.items():
        field = part.get_by_label(label, exact=False).first
        if field.evaluate("each => each.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    part.get_by_role("button", name=button, exact=True).click()
    operator.confirm()
    return page


def test_the_story_of_a_client(operator: Operator, service: ConsoleService) -> None:
    """Search, see the bar, block, see the denial, unblock, grant, override, reset."""
    page = operator.log_in()
    operator.open("/subjects")
    expect(page.get_by_role("row", name="user:7 orders")).to_be_visible()
    operator.check_accessibility()
    page.get_by_label("User, API key, tenant or address").fill("7")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#results")).to_contain_text("user:71")
    operator.check_accessibility()
    page.get_by_role("link", name="user:7", exact=True).click()
    quota = page.locator("#quota")
    expect(quota.get_by_role("listitem").first).to_contain_text("orders")
    expect(page.locator("#usage canvas")).to_be_visible()
    expect(page.get_by_role("region", name="Table of the last denials")).to_contain_text(
        "POST /orders"
    )
    operator.check_accessibility()

    _change(operator, "Block", "Block", Reason="abuse")
    expect(page.get_by_role("status").first).to_contain_text("The subject is blocked.")
    until(
        lambda: service.check(user="7", endpoint="/orders").data["kind"] == "blocked",
        "the block is in force",
        60,
    )
    expect(quota).to_contain_text("user:7 on the deny list decides before all rules")
    operator.check_accessibility()
    _change(operator, "Unblock", "Unblock", Reason="a mistake")
    expect(page.locator("main")).to_contain_text("The subject is no longer blocked.")
    expect(quota).not_to_contain_text("deny list")

    _change(operator, "Grant units", "Grant", Units="25", Minutes="30", Reason="support case")
    expect(page.locator("main")).to_contain_text("The units are granted.")
    expect(quota).to_contain_text("of 35 units used")
    _change(operator, "Override limits", "Override", Factor="3", End="2h", Reason="launch")
    expect(page.locator(".override")).to_contain_text(
        "3 times the limits for every rule by user until"
    )
    expect(quota).to_contain_text("override user:7")
    page.get_by_label("Reason").first.fill("over")
    page.get_by_role("button", name="Remove").click()
    operator.confirm()
    expect(page.locator("main")).to_contain_text("The override is removed.")
    _change(operator, "Tier", "Assign", Tier="pro", Reason="paid")
    expect(page.locator(".pairs")).to_contain_text("pro, assigned to user:7")
    _change(operator, "Reset counts", "Reset", Rule="orders", Reason="support case")
    expect(page.locator("main")).to_contain_text("The counts are reset.")
    expect(quota).to_contain_text("0 of")
    kinds = [
        each["kind"] for each in service.admin("GET", "/audit?key=user:7&limit=20").data["items"]
    ]
    assert kinds[:4] == ["reset", "assign", "remove-override", "override"]
    page.get_by_role("link", name="All changes").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Audit")


def test_a_rejected_change_and_a_cancelled_one(operator: Operator) -> None:
    """The form keeps what was typed; without a confirmation nothing is sent."""
    page = operator.log_in()
    operator.open("/subjects?subject=user:70")
    operator.expect_status(422)
    _change(operator, "Override limits", "Override", Limits="often", End="2h", Reason="why not")
    expect(page.get_by_role("alert")).to_contain_text("often")
    expect(page.get_by_label("Limits")).to_have_value("often")
    expect(page.get_by_label("Reason").nth(2)).to_have_value("why not")
    operator.check_accessibility()
    page.get_by_text("Block", exact=True).first.click()
    page.locator("#reason-block").fill("by mistake")
    page.get_by_role("button", name="Block", exact=True).click()
    page.locator("#confirm").get_by_role("button", name="Cancel").click()
    expect(page.locator("#confirm")).not_to_be_visible()
    expect(page.locator("#reason-block")).to_have_value("by mistake")


def test_a_pardon_on_a_phone(phone: Operator, service: ConsoleService) -> None:
    """A penalty is listed where the page begins, and ended on the page of the address."""
    page = phone.log_in()
    phone.open("/subjects")
    phone.check_width()
    penalties = page.get_by_role("region", name="Table of penalties")
    penalties.get_by_role("link", name="ip:192.0.2.7").click()
    expect(page.locator("#quota")).to_contain_text("cool-down")
    phone.check_width()
    phone.check_accessibility()
    page.get_by_label("Reason").first.fill("a broken client")
    page.get_by_role("button", name="Pardon").click()
    phone.confirm()
    expect(page.locator("main")).to_contain_text("The penalty is ended.")
    expect(page.locator("#quota")).to_contain_text("has room")
    assert service.check(ip="192.0.2.7", endpoint="/login").data["allowed"]


def test_hostile_names_and_keys(operator: Operator) -> None:
    """Markup stays text, links work, and no address has a key."""
    page = operator.log_in("read")
    operator.open("/subjects?q=%3Cimg")
    page.get_by_role("link", name=f"user:{HOSTILE}").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"user:{HOSTILE}")
    expect(page.locator("#quota")).to_contain_text("of 10 units used")
    expect(page.get_by_text("Grant units")).to_have_count(0)
    operator.check_accessibility()
    page.get_by_role("link", name="Try a request of it").click()
    expect(page.get_by_label("User")).to_have_value(HOSTILE)
    operator.open("/subjects")
    page.get_by_label("User, API key, tenant or address").fill("api_key:sk_live_1")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("api_key:sk_live_1")
    assert "sk_live_1" not in page.url
    page.get_by_role("link", name="7 days").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("api_key:sk_live_1")
    operator.check_accessibility()
    made = {"subject": json.dumps(["user:70"]), "do": "block", "reason": "by hand"}
    csrf = page.locator('meta[name="csrf"]').get_attribute("content") or ""
    answer = page.request.post("/console/subjects/change", form={**made, "csrf": csrf})
    assert answer.status == 403
