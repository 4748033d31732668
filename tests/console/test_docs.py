"""The page /docs in Chromium: it shows every operation, and can try them."""

from __future__ import annotations

from playwright.sync_api import Browser, Locator, Page, expect

from ratekeeper.service.http import openapi
from tests.console.operators import ConsoleService, Operator
from tests.service_process import ServiceProcess


def operation(page: Page, name: str) -> Locator:
    """Return the operation with this ID, opened."""
    found = page.locator(f".opblock[id$='-{name}']")
    found.locator(".opblock-summary-control").click()
    return found


def tried(found: Locator, body: str = "") -> Locator:
    """Send the request of an operation, and return the response."""
    if body:
        found.locator("textarea.body-param__text").fill(body)
    found.get_by_role("button", name="Execute").click()
    return found.locator(".live-responses-table .response").first


def test_a_reader_authorises_and_tries_requests(operator: Operator) -> None:
    """Without a token, a check is rejected; with one, it and the admin API answer."""
    page = operator.page
    page.goto("/docs")
    described = list(openapi.operations(operator.service.ask("GET", "/openapi.json").data))
    expect(page.locator(".opblock")).to_have_count(len(described))
    check = operation(page, "check")
    expect(check).to_contain_text("x-role")
    operator.expect_status(401)
    expect(tried(check)).to_contain_text("401")
    assert isinstance(operator.service, ConsoleService)
    page.locator(".auth-wrapper").first.get_by_role("button", name="Authorize").click()
    dialog = page.locator(".dialog-ux")
    dialog.get_by_role("textbox").fill(operator.service.tokens["admin"])
    dialog.get_by_role("button", name="Apply credentials").click()
    dialog.get_by_role("button", name="Close").last.click()
    answer = tried(check, '{"user": "docs", "endpoint": "/orders"}')
    expect(answer).to_contain_text("200")
    expect(answer).to_contain_text('"remaining": 9')
    rules = tried(operation(page, "get_rules"))
    expect(rules).to_contain_text("200")
    expect(rules).to_contain_text("orders")


def test_a_service_without_tokens_accepts_the_requests_of_its_own_page(browser: Browser) -> None:
    """The browser sends an Origin with them; a page of another origin spends nothing."""
    with ServiceProcess() as service:
        own = Operator(browser, service, color_scheme="dark")
        own.page.goto("/docs")
        answer = tried(operation(own.page, "check"), '{"user": "docs"}')
        expect(answer).to_contain_text('"remaining": 99')
        expect(own.page.locator("html.dark-mode")).to_have_count(1)
        # The same server under another name is another origin.
        stranger = Operator(browser, service).page
        stranger.goto(f"{service.url.replace('127.0.0.1', 'localhost')}/healthz")
        send = """url => fetch(url, {method: "POST", mode: "no-cors", body: '{"user": "docs"}'})
            .then(answer => answer.type)"""
        assert stranger.evaluate(send, f"{service.url}/v1/check") == "opaque"
        stranger.context.close()
        answer = tried(own.page.locator(".opblock[id$='-check']"))
        expect(answer).to_contain_text('"remaining": 98')
        own.close()
