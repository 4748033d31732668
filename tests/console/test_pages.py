"""Every page, for everybody: accessible, on a phone, in light and dark, without errors."""

from __future__ import annotations

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
