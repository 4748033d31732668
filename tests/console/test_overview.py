"""The page Overview, on a real service with two workers under load."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from prometheus_client.parser import text_string_to_metric_families

from tests.conformance.stores import PATIENT
from tests.console.operators import PHONE, RULES, ConsoleService, Operator
from tests.redis_servers.ports import free_port
from tests.redis_servers.single import Single
from tests.redis_servers.waiting import until
from tests.service_process import ask_on

WAIT_S = 60.0
TRANSFER_BYTES_MAX = 150_000
LOST = "The live connection is lost."


class Node(ConsoleService):
    """A service that keeps its port when it starts again."""

    def __init__(self, redis: Single) -> None:
        self.redis = redis
        options = ("--store", f"{redis.uri}?{PATIENT}")
        # A stream that did not end by itself would delay the end of the service by a minute.
        port = ("--port", str(free_port()), "--shutdown-seconds", "60")
        super().__init__(RULES, *options, *port, workers=2)

    def load(self, checks: int) -> None:
        """Send checks of all outcomes over several connections, so that all workers get some."""
        for part in range(8):
            with closing(self.connect()) as connection:
                for number in range(checks // 8):
                    fields = {
                        "user": f"u{number % 3}",
                        "endpoint": ("/orders", "/search", "/login", "/free")[number % 4],
                        "ip": f"10.0.0.{part}",
                        "api_key": "sk_revoked_1" if number % 16 == 15 else "sk_2",
                    }
                    ask_on(connection, "POST", "/v1/check", fields, self.bearer("check"))

    def metrics(self) -> tuple[Counter[str], Counter[tuple[str, str]]]:
        """Return the checks by outcome, and the decisions by rule and outcome."""
        text = self.ask("GET", "/metrics", None, self.bearer("admin")).body.decode()
        checks: Counter[str] = Counter()
        decisions: Counter[tuple[str, str]] = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "ratekeeper_checks_total":
                    checks[sample.labels["outcome"]] += round(sample.value)
                if sample.name == "ratekeeper_rule_decisions_total":
                    key = sample.labels["rule"], sample.labels["outcome"]
                    decisions[key] += round(sample.value)
        return checks, decisions


@pytest.fixture(scope="module")
def service() -> Iterator[Node]:
    """Run one service. Of the tests that run in this process, the first one finds it unused."""
    with Single() as redis, Node(redis) as running:
        yield running


def log_in(operator: Operator, role: str = "read") -> Page:
    """Open the overview, and wait until the stream has brought its first steps."""
    operator.log_in(role)
    page = operator.open()
    expect(page.locator("#checks-summary")).to_contain_text("The last ")
    return page


def rows(page: Page, table: str) -> dict[str, list[str]]:
    """Return the cells of a table of the page, by the first one of each row."""
    cells = "(all) => all.map((row) => [...row.cells].map((cell) => cell.textContent.trim()))"
    found: list[list[str]] = page.locator(f"#{table} tbody tr").evaluate_all(cells)
    return {each[0]: each[1:] for each in found}


def shown(page: Page) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """Return what the page shows in its tables, in the form of Node.metrics, without zeros."""
    checks = {name: _number(each[0]) for name, each in rows(page, "outcomes").items()}
    decisions = {
        (rule, outcome): _number(cell)
        for rule, cells in rows(page, "totals").items()
        for outcome, cell in zip(("allowed", "denied", "shadow_denied"), cells, strict=False)
    }
    return _nonzero(checks), _nonzero(decisions)


def _number(text: str) -> int:
    return int(text.replace(",", "")) if text else 0


def _nonzero(counts: Any) -> dict[Any, int]:
    return {key: value for key, value in counts.items() if value}


def test_the_charts_agree_with_the_metrics(operator: Operator, service: Node) -> None:
    """An unused service explains the first check; then each number is that of /metrics."""
    operator.log_in("read")
    page = operator.open()
    expect(page.locator("#quiet")).to_contain_text(f"curl {service.url}/v1/check")
    operator.check_accessibility()
    page.get_by_text("The checks in numbers").click()
    service.load(160)
    expect(page.locator("#quiet")).to_be_hidden()
    service.load(160)

    def agree() -> bool:
        checks, decisions = service.metrics()
        # Playwright handles events of the page only while it is called.
        page.wait_for_timeout(100)
        return shown(page) == (_nonzero(checks), _nonzero(decisions))

    until(agree, "the page shows the numbers of /metrics", WAIT_S, partial(shown, page))
    checks, decisions = shown(page)
    assert sum(checks.values()) == 320
    assert {"allowed", "denied", "unlimited", "blocked"} <= checks.keys()
    assert {("login", "denied"), ("trial", "shadow_denied")} <= decisions.keys()
    expect(page.locator("#checks-summary")).to_contain_text("320 checks")
    expect(page.locator("#figure-checks")).to_contain_text("320 in ")
    expect(page.locator("#checks-chart canvas")).to_be_visible()
    operator.check_accessibility()


def test_a_rule_is_chosen_by_keyboard(operator: Operator, service: Node) -> None:
    """The choice is in the URL; a line of a chart is switched off with the keyboard."""
    service.load(80)
    page = log_in(operator)
    page.get_by_label("Rule", exact=True).select_option("login")
    expect(page.locator("#checks-title")).to_have_text("Decisions of login a second")
    page.get_by_label("Would be denied", exact=True).check()
    page.reload()
    assert page.url.endswith("?rule=login&show=shadow_denied")
    expect(page.get_by_label("Rule", exact=True)).to_have_value("login")
    expect(page.locator("#rules-legend")).to_contain_text("trial")
    denied = page.locator("#checks-legend").get_by_role("button", name=re.compile("^ ?Denied"))
    denied.focus()
    page.keyboard.press("Enter")
    expect(denied).to_have_attribute("aria-pressed", "false")
    expect(denied).to_be_focused()
    page.keyboard.press("Space")
    expect(denied).to_have_attribute("aria-pressed", "true")
    page.locator("#checks-chart .u-over").hover()
    expect(page.locator("#checks-legend li").last).to_have_text(re.compile(r"^at \d\d:\d\d:\d\d"))


def test_a_finding_appears_and_goes(operator: Operator, service: Node) -> None:
    """Without a reload; a screen reader is told, and the title has the number."""
    page = log_in(operator)
    wait = WAIT_S * 1_000
    expect(page.locator("#status-findings")).to_contain_text("No findings", timeout=wait)
    service.redis.kill()
    expect(page.locator("#status-findings")).to_contain_text("does not decide", timeout=wait)
    expect(page.locator("#news")).to_contain_text("Findings: store")
    expect(page).to_have_title(re.compile(r"^\(\d\) Overview · Ratekeeper$"))
    operator.check_accessibility()
    service.redis.start()
    expect(page.locator("#status-findings")).to_contain_text("No findings", timeout=wait)
    expect(page.locator("#news")).to_have_text("There are no findings any more.")
    operator.check_accessibility()


def test_a_phone_with_dark_colours(browser: Browser, service: Node) -> None:
    """The page fits, also with long tables and while paused."""
    phone = Operator(browser, service, viewport=PHONE, color_scheme="dark")
    page = log_in(phone, "admin")
    page.get_by_text("The checks in numbers").click()
    utc = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:00 UTC$")
    expect(page.locator("#minutes time").first).to_have_attribute("title", utc)
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#connection")).to_contain_text("The page is paused")
    phone.check_width()
    phone.check_accessibility()
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#connection")).to_be_hidden()
    phone.close()


def test_the_first_page_is_small(browser: Browser, service: Node) -> None:
    """With everything that it loads, and the first events of the stream."""
    operator = Operator(browser, service)
    page = operator.log_in("read")
    sizes: Counter[str] = Counter()
    session = operator.context.new_cdp_session(page)
    session.send("Network.enable")

    def finished(sent: dict[str, Any]) -> None:
        sizes[sent["requestId"]] = sent["encodedDataLength"]

    def received(sent: dict[str, Any]) -> None:
        # The stream never finishes. This is its size before compression.
        sizes[sent["requestId"]] += sent["dataLength"]

    session.on("Network.loadingFinished", finished)
    session.on("Network.dataReceived", received)
    operator.open()
    expect(page.locator("#checks-summary")).to_contain_text("The last ")
    assert len(sizes) > 6
    assert sum(sizes.values()) < TRANSFER_BYTES_MAX, sizes
    operator.close()


def test_a_full_worker_says_so(operator: Operator, service: Node) -> None:
    """The page then says when it asks again."""
    operator.expect_status(503)
    page = log_in(operator)
    full = {"status": 503, "headers": {"Retry-After": "2"}, "body": "no room"}
    page.route("**/console/live*", lambda route: route.fulfill(**full))
    page.reload()
    expect(page.locator("#connection")).to_contain_text("asks again in 2 seconds")
    page.unroute("**/console/live*")
    expect(page.locator("#connection")).to_be_hidden()


def test_an_ended_session_ends_the_stream(operator: Operator, service: Node) -> None:
    """The page leads back to itself through the login."""
    operator.expect_status(401)
    page = log_in(operator)
    other = operator.context.new_page()
    other.goto("/console/fleet")
    other.get_by_role("button", name="Log out").click()
    other.wait_for_url("**/login")
    expect(page.locator("#connection")).to_contain_text("Your session has ended.")
    with page.expect_popup() as opened:
        page.get_by_role("link", name="Log in again").click()
    expect(opened.value.get_by_label("Token")).to_be_visible()


def test_the_page_outlives_a_restart_of_the_service(operator: Operator, service: Node) -> None:
    """It says that the connection is lost, keeps the old steps, and goes on when it is back."""
    operator.expect_lost_connection()
    # A service that has just started knows no check of the tests before.
    service.end()
    service.start()
    service.load(80)
    page = log_in(operator)
    expect(page.locator("#checks-summary")).to_contain_text(" 80 checks")
    fleet = operator.context.new_page()
    fleet.goto("/console/fleet")
    service.kill()
    expect(page.locator("#connection")).to_contain_text(LOST)
    expect(fleet.locator("#connection")).to_contain_text(LOST)
    service.start()
    expect(page.locator("#connection")).to_be_hidden()
    expect(fleet.locator("#connection")).to_be_hidden()
    service.load(80)
    expect(page.locator("#checks-summary")).to_contain_text(" 160 checks")


def test_an_open_page_does_not_delay_the_end_of_the_service(
    operator: Operator, service: Node
) -> None:
    """SIGTERM drains it, SIGINT does not; both end the streams at once."""
    operator.expect_lost_connection()
    operator.expect_status(503)
    page = log_in(operator)
    # `end` fails if it takes longer than 40 s, and a stream that stays open takes 60 s.
    assert service.end(signal.SIGTERM) == 0
    expect(page.locator("#connection")).to_contain_text(LOST)
    service.start()
    expect(page.locator("#connection")).to_be_hidden()
    assert service.end(signal.SIGINT) == 0
