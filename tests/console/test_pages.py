"""Every page, for everybody: accessible, on a phone, in light and dark, without errors."""

from __future__ import annotations

from playwright.sync_api import Route, expect

from ratekeeper.service.console.views import NAVIGATION, ROOT
from tests.console.operators import ConsoleService, Operator
from tests.redis_servers.waiting import until

PAGES = [path.removeprefix(ROOT) for _, path in NAVIGATION]


def test_every_page_is_accessible(operator: Operator) -> None:
    """axe-core finds nothing to complain about, also on the form of the login."""
    operator.open("/login")
    operator.check_accessibility()
    operator.log_in()
    for path in PAGES:
        operator.open(path)
        operator.check_accessibility()


def test_every_page_fits_on_a_phone(phone: Operator) -> None:
    """No page has to be scrolled sideways, and dark colours have enough contrast."""
    phone.log_in("read")
    for path in PAGES:
        phone.open(path)
        phone.check_width()
        phone.check_accessibility()


def test_a_form_is_sent_once(operator: Operator) -> None:
    """A second confirmation, while the service is slow to answer, grants nothing twice."""
    page = operator.log_in()
    operator.open("/subjects?subject=user:impatient")
    page.get_by_text("Grant units", exact=True).click()
    page.get_by_label("Units").fill("7")
    page.locator("#reason-grant").fill("a slow connection")
    held: list[Route] = []
    hold = lambda route: held.append(route)  # noqa: E731, PLW0108 - Playwright needs a function
    page.route("**/console/sessions", hold)
    for _ in range(2):
        page.get_by_role("button", name="Grant", exact=True).click()
        operator.confirm()
        expect(page.get_by_role("dialog")).to_be_hidden()

    def is_held() -> bool:
        # Playwright handles events of the page only while it is called.
        page.wait_for_timeout(10)
        return bool(held)

    until(is_held, "the page asks whether the session lasts", 60)
    assert len(held) == 1
    held[0].continue_()
    expect(page.get_by_text("The units are granted.")).to_be_visible()
    expect(page.get_by_text("a slow connection")).to_have_count(1)


def test_the_end_of_a_session_loses_nothing_that_was_typed(
    operator: Operator, service: ConsoleService
) -> None:
    """The page says it and stays. After a log-in in another tab its forms can be sent."""
    operator.expect_status(401)
    page = operator.log_in()
    operator.open("/rules/rule?id=orders")
    page.locator("#rollout").fill("55")
    page.locator("#rollout-reason").fill("typed before the end")
    other = operator.context.new_page()
    other.goto("/console/audit")
    other.get_by_role("button", name="Log out").click()
    other.wait_for_url("**/login")
    page.get_by_role("button", name="Change the roll-out").click()
    operator.confirm()
    expect(page.locator("#connection")).to_contain_text("Your session has ended.")
    other.get_by_label("Token").fill(service.tokens["admin"])
    other.get_by_role("button", name="Log in").click()
    other.wait_for_url("**/console")
    page.get_by_role("button", name="Change the roll-out").click()
    operator.confirm()
    expect(page.get_by_text("The rules are applied.")).to_be_visible()
    expect(page.get_by_text("enforced for 55 % of its subjects")).to_be_visible()


def test_a_confirmation_needs_no_mouse(operator: Operator) -> None:
    """Escape and Cancel change nothing, and the focus is again where it was."""
    page = operator.log_in()
    operator.open("/rules/rule?id=orders")
    page.locator("#mode-reason").fill("by the keyboard")
    button = page.get_by_role("button", name="Shadow mode")
    for leave in ("Escape", "Enter"):
        button.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog", name="Put the rule orders into shadow")).to_be_visible()
        expect(page.get_by_role("button", name="Cancel")).to_be_focused()
        page.keyboard.press(leave)
        expect(page.get_by_role("dialog")).to_be_hidden()
        expect(button).to_be_focused()
    expect(page.locator("#mode-reason")).to_have_value("by the keyboard")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").get_by_text("The rules are applied.")).to_be_visible()
