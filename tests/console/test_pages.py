"""Every page, for everybody: accessible, on a phone, in light and dark, without errors."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.console.operators import Operator
from tollkeeper.service.console.views import NAVIGATION, ROOT

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
    """A second click, while the service answers the first, grants nothing twice."""
    page = operator.log_in()
    operator.open("/subjects?subject=user:impatient")
    # The events alone: a browser under test waits for the page that follows a form.
    sent = page.evaluate(
        """() => {
          const form = document.querySelector('form[action$="/subjects/change"]');
          const event = () => new SubmitEvent("submit", { bubbles: true, cancelable: true });
          return [form.dispatchEvent(event()), form.dispatchEvent(event())];
        }"""
    )
    assert sent == [True, False]


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
