"""Denials and usage in Chromium: what the page shows is what the service answered, under load."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.console.operators import PHONE, TIMEOUT_MS, ConsoleService, Operator
from tests.redis_servers.waiting import until

expect.set_options(timeout=TIMEOUT_MS)

HOSTILE = "<img src=x onerror=alert(1)>\"'{{7*7}}"


# Few requests are enough to be denied, and an hour is long enough for these tests.
RULES = {
    "version": 1,
    "rules": [
        {"id": "orders", "match": {"endpoint": "/orders"}, "by": ["user"], "limits": ["2/hour"]},
        {"id": "tenants", "match": {"tenant": "*"}, "by": ["tenant"], "limits": ["1000/hour"]},
    ],
}


@pytest.fixture(scope="module")
def service() -> Iterator[ConsoleService]:
    """Run a service whose limits are low."""
    with ConsoleService(RULES) as running:
        yield running


@dataclass
class Sent:
    """What the service answered to the requests of these tests."""

    denied: Counter[tuple[str, str]] = field(default_factory=Counter)
    allowed: Counter[str] = field(default_factory=Counter)
    """By user."""

    def by(self, name: str) -> int:
        """Return the denials of a user, tenant, endpoint or rule."""
        return sum(count for key, count in self.denied.items() if name in key)

    @property
    def total(self) -> int:
        """All denials."""
        return sum(count for (name, _), count in self.denied.items() if name == "user")


@contextmanager
def load(service: ConsoleService) -> Iterator[None]:
    """Send requests that are allowed, all the time."""
    stop = Event()

    def send() -> None:
        while not stop.wait(0.01):
            service.check(user="busy", endpoint="/other")

    thread = Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture(scope="module")
def sent(service: ConsoleService) -> Iterator[Sent]:
    """Send requests of several clients, and count the answers; load the service meanwhile."""
    found = Sent()
    # Enough users for two pages, and a name that a caller chose to do harm.
    users = [*(f"u{number:02}" for number in range(21)), HOSTILE]
    with load(service):
        for number, user in enumerate(users):
            tenant, endpoint = ("acme", "globex")[number % 2], "/orders"
            for _ in range(3 + number % 3):
                answer = service.check(user=user, tenant=tenant, endpoint=endpoint, method="POST")
                if answer.data["allowed"]:
                    found.allowed[user] += 1
                    continue
                for name, value in (("user", user), ("tenant", tenant), ("endpoint", endpoint)):
                    found.denied[name, value] += 1
        until(lambda: _recorded(service) >= found.total, "all denials are recorded", 60)
        until(lambda: _is_used(service, found), "the usage of all users is recorded", 60)
        yield found


def _recorded(service: ConsoleService) -> int:
    return int(service.admin("GET", "/denials").data["total"])


def _used(service: ConsoleService, subject: str) -> int:
    path = f"/usage?step=period&subject={quote(subject)}&rule=orders"
    return sum(each["allowed"] for each in service.admin("GET", path).data["items"])


def _is_used(service: ConsoleService, sent: Sent) -> bool:
    """Return True if the usage of each user is recorded; it is written every few seconds."""
    return all(_used(service, f"user:{user}") == count for user, count in sent.allowed.items())


def rows_of(part: Locator) -> dict[str, int]:
    """Return the first column of a table and the numbers beside it."""
    found = {}
    for row in part.locator("tbody tr").all():
        name = row.locator("th a, th em").first.inner_text()
        found[name] = int(row.locator("td.number").first.inner_text().replace(",", ""))
    return found


def fields_of(page: Page) -> dict[str, str]:
    """Return the query of the page's URL."""
    return {name: value[0] for name, value in parse_qs(urlsplit(page.url).query).items()}


def test_the_numbers_are_those_of_the_answers(operator: Operator, sent: Sent) -> None:
    """By rule, tenant, endpoint and subject, page by page; the chart has all of them."""
    operator.log_in("read")
    page = operator.open("/denials")
    groups = page.locator("#groups")
    expect(groups.locator("caption")).to_contain_text(f"{sent.total} requests, 1 rule.")
    expect(page.locator("#over-time")).to_contain_text(f"{sent.total} denied requests; at most")
    chart = json.loads(page.locator("#chart-data").inner_text())
    assert sum(chart["counts"]) == sent.total
    expect(page.locator("#chart canvas")).to_be_visible()
    operator.check_accessibility()

    for by, names in (("tenant", ["acme", "globex"]), ("endpoint", ["/orders"])):
        groups.get_by_role("link", name=f"By {by}").click()
        expect(groups.locator("thead th").first).to_have_text(by.capitalize())
        assert rows_of(groups) == {name: sent.by(name) for name in names}
        assert fields_of(page)["by"] == by
    operator.check_accessibility()

    groups.get_by_role("link", name="By subject").click()
    expect(groups.locator("caption")).to_contain_text("22 subjects")
    shown = rows_of(groups)
    groups.get_by_role("link", name="Next page").click()
    expect(groups.get_by_role("link", name="First page")).to_be_visible()
    assert len(shown) == 20
    shown |= rows_of(groups)
    assert shown == {f"user:{user}": sent.by(user) for user in sent.allowed}

    page.go_back()
    expect(groups.get_by_role("link", name="Next page")).to_be_visible()
    groups.get_by_role("link", name="user:u02", exact=True).click()
    expect(groups.locator("caption")).to_contain_text(f"{sent.by('u02')} requests, 1 subject.")
    expect(page.get_by_label("Subject", exact=True)).to_have_value("user:u02")
    usage = page.locator("#usage tbody tr").filter(has_text="orders")
    expect(usage.locator("td.number").nth(0)).to_have_text(str(sent.allowed["u02"]))
    expect(usage.locator("td.number").nth(1)).to_have_text(str(sent.by("u02")))


def test_a_decision_has_all_its_fields(operator: Operator, sent: Sent) -> None:
    """And links to the subject and to the page that tries the request; the list has pages."""
    operator.log_in("read")
    page = operator.open("/denials?user=u02")
    lines = page.locator("#decisions .lines details")
    expect(lines).to_have_count(sent.by("u02"))
    lines.first.locator("summary").focus()
    page.keyboard.press("Enter")
    facts = lines.first.locator(".facts")
    expect(facts).to_contain_text("a limit decided")
    expect(facts).to_contain_text("2 units in 1 h")
    expect(facts).to_contain_text("acme")
    operator.check_accessibility()
    hrefs = [each.get_attribute("href") for each in lines.first.locator(".links a").all()]
    assert hrefs[:2] == [
        "/console/subjects?subject=user%3Au02",
        "/console/try?user=u02&tenant=acme&endpoint=%2Forders&method=POST",
    ]
    page = operator.open("/denials")
    older = page.locator("#decisions").get_by_role("link", name="Older")
    seen = 0
    while True:
        seen += lines.count()
        if not older.count():
            break
        first = lines.first.locator("time").get_attribute("datetime")
        href = older.get_attribute("href")
        older.click()
        expect(page.locator(f'#decisions a[href="{href}"]')).to_have_count(0)
        assert first is not None
    assert seen == sent.total


def test_files_are_downloaded(operator: Operator, sent: Sent) -> None:
    """With everything that the filters select."""
    operator.log_in("read")
    page = operator.open("/denials?by=subject&tenant=acme")
    tables: dict[str, list[dict[str, Any]]] = {}
    for name in ("groups", "decisions", "usage"):
        with page.expect_download() as download:
            page.locator(f"#{name}").get_by_role("link", name="CSV").click()
        path = Path(download.value.path())
        with path.open(encoding="utf-8", newline="") as file:
            tables[download.value.suggested_filename] = list(csv.DictReader(file))
    assert len(tables["decisions.csv"]) == sent.by("acme")
    assert {row["tenant"] for row in tables["decisions.csv"]} == {"acme"}
    assert sum(int(row["requests"]) for row in tables["denials.csv"]) == sent.by("acme")
    allowed = {row["subject"]: row["allowed"] for row in tables["usage.csv"]}
    assert allowed["user:u02"] == str(sent.allowed["u02"])


def test_times_are_local_on_the_page_and_utc_in_the_url(
    browser: Browser, service: ConsoleService, sent: Sent
) -> None:
    """Also those that the operator types, and those that the mouse marks in the chart."""
    operator = Operator(browser, service, timezone_id="America/New_York", locale="en-US")
    operator.log_in("read")
    page = operator.open("/denials")
    page.get_by_label("From (your time)").fill("2026-01-15T08:30")
    page.get_by_label("To (your time)").fill("2026-01-15T09:30")
    page.get_by_label("Rule", exact=True).fill("orders")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**from=**")
    assert fields_of(page) == {
        "from": "2026-01-15T13:30:00Z",
        "to": "2026-01-15T14:30:00Z",
        "rule": "orders",
    }
    expect(page.get_by_label("From (your time)")).to_have_value("2026-01-15T08:30")
    expect(page.locator("#groups")).to_contain_text("Choose a longer period or fewer filters")
    operator.check_accessibility()

    page.get_by_role("link", name="Last 15 minutes").click()
    expect(page.locator("#groups caption")).to_contain_text(f"{sent.total} requests")
    over = page.locator("#chart .u-over")
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 5, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 30, steps=3)
    page.mouse.up()
    page.wait_for_url("**from=**")
    marked = fields_of(page)
    assert marked["rule"] == "orders"
    assert marked["from"].endswith("Z")
    assert "last" not in marked
    operator.close()


def test_a_wrong_time_keeps_the_filters(operator: Operator) -> None:
    """The page shows what was wrong, with the request ID."""
    operator.expect_status(400)
    operator.log_in("read")
    page = operator.open("/denials?from=yesterday&endpoint=%2Forders")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("neither a date")
    expect(alert).to_contain_text("Request ID")
    expect(page.get_by_label("From (UTC)")).to_have_value("yesterday")
    expect(page.get_by_label("Endpoint")).to_have_value("/orders")
    operator.check_accessibility()


def test_names_of_callers_run_no_script(operator: Operator, sent: Sent) -> None:
    """They are texts in every part of the page."""
    operator.page.on("dialog", lambda dialog: operator.problems.append(dialog.message))
    operator.log_in("read")
    page = operator.open(f"/denials?by=subject&user={quote(HOSTILE)}")
    expect(page.locator("#groups tbody th")).to_contain_text(f"user:{HOSTILE}")
    page.locator("#groups tbody th a").first.click()
    expect(page.locator("#groups caption")).to_contain_text(f"{sent.by(HOSTILE)} request")
    page.locator("#decisions summary").first.click()
    expect(page.locator("#decisions .facts").first).to_contain_text(HOSTILE)
    expect(page.locator("main img")).to_have_count(0)


def test_a_phone_shows_everything(browser: Browser, service: ConsoleService, sent: Sent) -> None:
    """Without scrolling sideways, in dark colours."""
    phone = Operator(browser, service, viewport=PHONE, color_scheme="dark")
    phone.log_in("read")
    page = phone.open("/denials?by=subject")
    page.locator("#decisions summary").first.click()
    page.get_by_text("The same as a table").click()
    phone.check_width()
    phone.check_accessibility()
    assert re.search(r"\d+ denied requests", page.locator("#over-time").inner_text())
    assert sent.total
    phone.close()
