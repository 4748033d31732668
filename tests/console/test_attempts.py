"""The page Try a request in a browser, on a service with real counts."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.console.operators import ConsoleService, Operator


def test_the_story_of_a_request(operator: Operator, service: ConsoleService) -> None:
    """Which rules match and why, which limit decides, and what remains; nothing is spent."""
    for _ in range(4):
        service.check(user="9", endpoint="/orders")
    page = operator.log_in("read")
    operator.open("/try")
    operator.check_accessibility()
    page.get_by_label("User").fill("9")
    page.get_by_label("Endpoint").fill("/orders")
    page.get_by_label("Attributes").fill("region=eu")
    page.get_by_role("button", name="Explain").click()
    expect(page.get_by_role("heading", name="It would be allowed")).to_be_visible()
    rule = page.get_by_role("region", name="Rule orders", exact=True)
    expect(rule).to_contain_text("decides")
    expect(rule).to_contain_text("of 10 units used")
    expect(page.get_by_role("row", name="tenants")).to_contain_text("the request has no tenant")
    assert "user=9" in page.url
    operator.check_accessibility()

    page.get_by_label("Cost in units").fill("11")
    page.get_by_role("button", name="Explain").click()
    expect(page.get_by_role("heading", name="It would be denied")).to_be_visible()
    expect(page.get_by_label("Attributes")).to_have_value("region=eu")
    operator.check_accessibility()

    operator.expect_status(422)
    page.get_by_label("Attributes").fill("region")
    page.get_by_role("button", name="Explain").click()
    expect(page.get_by_role("alert")).to_contain_text("write name=value")
    expect(page.get_by_label("User")).to_have_value("9")
    operator.check_accessibility()


def test_a_key_on_a_phone(phone: Operator) -> None:
    """A listed key is denied before all rules, and is not part of the address."""
    page = phone.log_in("read")
    phone.open("/try")
    page.get_by_label("API key").fill("sk_revoked_1")
    page.get_by_role("button", name="Explain").click()
    expect(page.get_by_role("heading", name="It would be denied")).to_be_visible()
    expect(page.locator("main")).to_contain_text("api_key:sk_revoked_* is on the deny list")
    expect(page.get_by_label("API key")).to_have_value("sk_revoked_1")
    assert "sk_revoked_1" not in page.url
    phone.check_width()
    phone.check_accessibility()
