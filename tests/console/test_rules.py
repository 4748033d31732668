"""The page Rules in a browser: the story of a rule change, conflicts, drafts, and files."""

from __future__ import annotations

import re

from playwright.sync_api import Browser, Page, expect

from tests.console.operators import PHONE, RULES, ConsoleService, Operator
from tests.redis_servers.waiting import until

NEW = """\
- id: checkout
  match: {endpoint: /checkout}
  by: [user]
  limits: [5/hour]
  mode: shadow
"""


def number_in_force(page: Page) -> int:
    """Return the number of the version that the page names at the top."""
    return int(page.locator(".head a").inner_text().removeprefix("Version "))


def content(page: Page) -> str:
    """Return the text that the form would send."""
    return page.locator("#document").input_value()


def write(page: Page, text: str) -> None:
    """Replace the document in the editor, as a paste does."""
    editor = page.get_by_role("textbox", name="Rule document")
    editor.click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(text)


def verdict(page: Page, text: str) -> None:
    """Wait for what the validator says."""
    expect(page.locator("#check .verdict")).to_contain_text(text)


def apply(operator: Operator, reason: str, button: str = "Apply") -> None:
    """Apply the draft, and confirm it."""
    operator.page.get_by_label("Reason").fill(reason)
    operator.page.get_by_role("button", name=button, exact=True).click()
    operator.confirm()


def test_the_story_of_a_rule_change(operator: Operator, service: ConsoleService) -> None:
    """Edit, an error at its line, fix, preview, apply in shadow, promote, and roll back."""
    for number in range(16):
        service.check(user=f"<b>{number % 2}", endpoint="/checkout", tenant="acme")
    asked = "/decisions?endpoint=/checkout"
    until(lambda: len(service.admin("GET", asked).data["items"]) == 16, "records", 60)
    operator.log_in()
    page = operator.open("/rules")
    before = content(page)
    first = number_in_force(page)
    # An error is marked at its line, and the list below leads there.
    write(page, before.replace("assign:", NEW.replace("limits", "limit") + "assign:"))
    verdict(page, "Not valid: 1 problem")
    expect(page.locator(".cm-lint-marker-error").first).to_be_visible()
    expect(page.locator(".cm-lintRange-error").first).to_contain_text("limit: [5/hour]")
    page.keyboard.press("Control+Home")
    page.get_by_role("link", name="Line 29").click()
    expect(page.locator(".cm-activeLine")).to_have_text("  limit: [5/hour]")
    operator.check_accessibility()
    # The fix, and the difference to the rules in force. It enforces the rule, for the preview.
    draft = before.replace("assign:", NEW + "assign:")
    write(page, draft.replace("mode: shadow\nassign", "mode: enforce\nassign"))
    verdict(page, "Valid")
    expect(page.locator(".cm-lint-marker-error")).to_have_count(0)
    expect(page.locator("#diff .added code").first).to_have_text("- id: checkout")
    page.get_by_label("to requests of").select_option("the last 24 hours")
    page.get_by_role("button", name="What would it have done?").click()
    preview = page.locator("#preview")
    expect(preview).to_contain_text("6 more requests denied of 16: 0 under the rules in force")
    expect(preview.get_by_role("row", name=re.compile("user:<b>0"))).to_contain_text("3")
    for details in preview.locator("details").all():
        details.locator("summary").click()
    expect(preview).to_contain_text("denied by checkout")
    operator.check_accessibility()
    # In shadow mode it denies nothing.
    write(page, draft)
    expect(page.locator("#diff .added code").nth(4)).to_have_text("  mode: shadow")
    apply(operator, "<i>watch</i> it first")
    expect(page.get_by_role("status")).to_contain_text(["The rules are applied."])
    assert "id: checkout" in content(page)
    expect(page.locator("#draft-notice")).to_be_hidden()
    page.get_by_role("link", name="List").click()
    page.get_by_role("link", name="checkout").click()
    operator.check_accessibility()
    page.get_by_label("Reason").first.fill("it denied the right ones")
    page.get_by_role("button", name="Enforce it").click()
    operator.confirm()
    expect(page.get_by_role("status")).to_contain_text(["The rule is enforced now."])
    page.get_by_label("Percent of its subjects").fill("50")
    page.get_by_label("Reason").nth(1).fill("half of them")
    page.get_by_role("button", name="Change the roll-out").click()
    operator.confirm()
    expect(page.get_by_text("for 50 % of its subjects")).to_be_visible()
    # Every step is a version. One click leads back.
    page.get_by_role("link", name="Versions", exact=True).click()
    expect(page.get_by_role("row", name=re.compile(f"Version {first + 1} "))).to_contain_text(
        "<i>watch</i>"
    )
    operator.check_accessibility()
    page.get_by_role("link", name=f"Version {first}", exact=True).click()
    page.get_by_role("link", name=re.compile(f"Compare with version {first + 3}")).click()
    expect(page.locator(".removed").first).to_contain_text("- id: checkout")
    operator.check_accessibility()
    page.get_by_label("Reason").fill("it denied too many")
    page.get_by_role("button", name=f"Roll back to version {first}").click()
    operator.confirm()
    expect(page.get_by_role("status")).to_contain_text(["The rules are rolled back."])
    assert content(page) == before


def test_two_operators_in_conflict(browser: Browser, service: ConsoleService) -> None:
    """The second one sees the change of the first, and still has the own draft, also later."""
    ann, ben = Operator(browser, service), Operator(browser, service, viewport=PHONE)
    ben.expect_status(412)
    ann.log_in()
    ben.log_in()
    theirs, mine = ann.open("/rules"), ben.open("/rules")
    draft = content(mine).replace("1000/hour", "2000/hour")
    write(mine, draft)
    verdict(mine, "Valid")
    write(theirs, content(theirs).replace("2/minute", "3/minute"))
    verdict(theirs, "Valid")
    apply(ann, "Ann was first")
    expect(theirs.get_by_role("status")).to_contain_text(["The rules are applied."])
    apply(ben, "Ben was second")
    conflict = mine.get_by_role("alert")
    expect(conflict).to_contain_text("The rules were changed while you were editing")
    expect(conflict).to_contain_text("Ann was first")
    expect(conflict.locator(".added")).to_contain_text("limits: [3/minute]")
    assert content(mine) == draft
    # What applying it would undo.
    expect(mine.locator("#diff .removed").first).to_contain_text("[1000/hour]")
    expect(mine.locator("#diff .removed").nth(1)).to_contain_text("[3/minute]")
    expect(mine.locator(".cm-content")).to_contain_text("2000/hour")
    expect(mine.get_by_label("Reason")).to_have_value("Ben was second")
    ben.check_accessibility()
    ben.check_width()
    # Ben leaves, and comes back: the draft is there, and so is the conflict.
    ben.open("/audit")
    ben.open("/rules")
    expect(mine.locator("#draft-notice")).to_contain_text("The rules were changed since")
    assert content(mine) == draft
    apply(ben, "Ben was second")
    expect(conflict).to_be_visible()
    write(mine, draft.replace("2/minute", "3/minute"))
    verdict(mine, "Valid")
    apply(ben, "both", button=f"Apply mine over version {number_in_force(mine)}")
    expect(mine.get_by_role("status")).to_contain_text(["The rules are applied."])
    assert {"2000/hour", "3/minute"} <= set(re.findall(r"[0-9]+/[a-z]+", content(mine)))
    ann.close()
    ben.close()


def test_a_draft_survives_a_reload_until_it_is_discarded(operator: Operator) -> None:
    """Also the last keystrokes. A rejected draft is kept, too."""
    operator.expect_status(409)
    operator.log_in()
    page = operator.open("/rules")
    before = content(page)
    write(page, before + "# my draft")
    page.reload()
    expect(page.locator("#draft-notice")).to_contain_text("Your draft is restored")
    assert content(page).endswith("# my draft")
    expect(page.locator("#diff .added")).to_contain_text("# my draft")
    operator.check_accessibility()
    # An unsafe change is rejected, and can then be forced; another edit takes that back.
    write(page, before.replace("api_key:sk_revoked_*", "api_key:*"))
    verdict(page, "Valid, but unsafe")
    expect(page.locator(".cm-lint-marker-warning")).to_be_visible()
    expect(page.get_by_label("although it is unsafe")).to_have_count(0)
    apply(operator, "stop everything")
    expect(page.get_by_role("alert")).to_contain_text("Request ID")
    expect(page.get_by_label("Reason")).to_have_value("stop everything")
    force = page.get_by_label("although it is unsafe")
    force.check()
    operator.check_accessibility()
    page.get_by_role("textbox", name="Rule document").click()
    page.keyboard.press("Control+Home")
    page.keyboard.type("# ")
    expect(force).not_to_be_checked()
    # The session ends, and the operator logs in again.
    operator.expect_status(401)
    operator.context.clear_cookies()
    page.keyboard.type("late ")
    expect(page.locator("#connection")).to_contain_text("Your session has ended.")
    operator.log_in()
    operator.open("/rules")
    assert content(page).startswith("# late ")
    page.get_by_role("button", name="Discard the draft").click()
    expect(page.locator("#draft-notice")).to_be_hidden()
    assert content(page) == before
    page.reload()
    assert content(page) == before


def test_a_reader_and_a_phone(phone: Operator) -> None:
    """A reader checks drafts and sees the versions; no page has a control of change."""
    phone.log_in("read")
    for path in ("/rules", "/rules/list", "/rules/rule?id=trial", "/rules/versions/1"):
        page = phone.open(path)
        expect(page.get_by_label("Reason")).to_have_count(0)
        phone.check_width()
        phone.check_accessibility()
    page = phone.open("/rules")
    write(page, "version: 2")
    verdict(page, "Not valid")
    page.get_by_role("button", name="What would it have done?").click()
    expect(page.locator("#preview")).to_contain_text("The draft is not valid")
    phone.check_width()
    phone.check_accessibility()


def test_without_scripts_the_forms_work(browser: Browser, service: ConsoleService) -> None:
    """The text area takes the place of the editor, and buttons that of typing."""
    operator = Operator(browser, service, java_script_enabled=False)
    operator.expect_status(422)
    operator.log_in()
    page = operator.open("/rules")
    area = page.get_by_label("Rule document")
    before = area.input_value()
    area.fill(before.replace("limits: [10/minute]", "limits: [10/minite]"))
    page.get_by_role("button", name="Check").click()
    verdict(page, "Not valid")
    page.get_by_label("Reason").fill("a typo")
    page.get_by_role("button", name="Apply", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("The draft is not valid")
    area.fill(before + "# by hand")
    page.get_by_role("button", name="What would it have done?").click()
    expect(page.locator("#preview")).not_to_be_empty()
    page.get_by_role("button", name="Apply", exact=True).click()
    expect(page.get_by_role("status")).to_contain_text(["The rules are applied."])
    expect(area).to_have_value(re.compile("# by hand"))
    operator.close()


class FileService(ConsoleService):
    """A service with 2,000 rules from a file."""

    def __init__(self) -> None:
        super().__init__()
        many = [
            {"id": f"r{n}", "match": {"endpoint": f"/v{n}"}, "by": ["user"], "limits": ["9/second"]}
            for n in range(2_000)
        ]
        self._options = ("--sample", "1")
        self._rules = self._written({**RULES, "rules": [*RULES["rules"], *many]})


def test_many_rules_from_a_file(browser: Browser) -> None:
    """The page says where to change them. A draft is still checked, and highlighted to its end."""
    with FileService() as service:
        operator = Operator(browser, service)
        operator.log_in()
        page = operator.open("/rules/versions")
        expect(page.get_by_role("heading", name="These rules come from a file")).to_be_visible()
        operator.check_accessibility()
        page = operator.open("/rules")
        expect(page.get_by_text(str(service.rules_path))).to_be_visible()
        expect(page.get_by_label("Reason")).to_have_count(0)
        # The browser lays out the text area at no time: with megabytes it would take seconds.
        page.evaluate("() => { document.getElementById('document').hidden = false; }")
        expect(page.locator("#document")).to_be_hidden()
        page.get_by_role("textbox", name="Rule document").click()
        page.keyboard.press("Control+End")
        page.keyboard.type("- user:*")
        verdict(page, "Valid, but unsafe")
        expect(page.locator("#diff .added")).to_contain_text("- user:*")
        expect(page.locator(".cm-line span", has_text="deny")).to_be_visible()
        expect(page.locator(".cm-lint-marker-warning")).to_be_visible()
        operator.open("/rules/list?q=r19")
        expect(page.get_by_text("111 of 2,004 rules")).to_be_visible()
        operator.close()
