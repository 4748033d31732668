"""Every error is a problem with a reason, a place and a correction."""

from __future__ import annotations

from typing import Any

import pytest

from ratekeeper.control.edits import NotFound
from ratekeeper.core import errors
from ratekeeper.core.model import Limit
from ratekeeper.rules.document.reading import DocumentError, read
from ratekeeper.rules.document.safety import findings
from ratekeeper.rules.document.tree import DocumentProblem
from ratekeeper.service.admin.control import NoDatabase, UnusableRules
from ratekeeper.service.admin.problems import LISTED_MAX, error_response
from tests.service.admin.client import Admin, admin, template

__all__ = ["admin", "template"]  # fixtures, found by name

UNSAFE = findings(read("{version: 1, deny: ['user:*']}"))
WRONG = DocumentError((DocumentProblem("<body>", 3, 4, "rules[0]", "no"),))

KNOWN: list[tuple[errors.RatekeeperError, int, str]] = [
    (errors.ConfigError("x"), 400, "INVALID_REQUEST"),
    (errors.InvalidKey("x"), 400, "INVALID_REQUEST"),
    (errors.InvalidCost("x"), 400, "INVALID_REQUEST"),
    (errors.RateSyntaxError("5/x", 2, "expected a unit", "5/s"), 400, "INVALID_REQUEST"),
    (errors.InvalidOption("x"), 400, "INVALID_REQUEST"),
    (WRONG, 422, "INVALID_DOCUMENT"),
    (NotFound("x"), 404, "NOT_FOUND"),
    (errors.CapacityError(9, Limit(5, per=1)), 422, "COST_EXCEEDS_CAPACITY"),
    (errors.VersionConflict(1, 2), 409, "VERSION_CONFLICT"),
    (errors.UnsafeChange(UNSAFE), 409, "UNSAFE_CHANGE"),
    (NoDatabase("limits.yaml"), 409, "RULES_FROM_FILE"),
    (UnusableRules(errors.ConfigError("x")), 409, "UNUSABLE_RULES"),
    (errors.StoreError("x"), 503, "STORE_UNAVAILABLE"),
    (errors.StoreFull("x"), 503, "STORE_UNAVAILABLE"),
    (errors.StoreUnavailable("x"), 503, "STORE_UNAVAILABLE"),
    (errors.StoreTimeout("x"), 503, "STORE_TIMEOUT"),
]


@pytest.mark.parametrize(("error", "status", "code"), KNOWN)
def test_every_error_has_a_status_and_a_code(
    error: errors.RatekeeperError, status: int, code: str
) -> None:
    """The detail is the text of the error."""
    answer = error_response(error, conditional=False)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert f'"code":"{code}"' in bytes(answer.body).decode()


def test_the_table_has_every_error() -> None:
    """The other errors are raised by methods that are not used here."""
    tested = {type(error) for error, _, _ in KNOWN}
    never = {errors.RatekeeperError, errors.LimitExceeded, errors.ChangeRefused, errors.SlotLost}
    in_tree = {
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.RatekeeperError)
    }
    assert in_tree - never <= tested


def test_a_conflict_is_412_only_with_a_condition() -> None:
    """412 with If-Match, and 409 after too many concurrent changes."""
    conflict = errors.VersionConflict(1, 2)
    assert error_response(conflict, conditional=True).status_code == 412
    assert error_response(conflict, conditional=False).status_code == 409


def test_long_lists_are_cut() -> None:
    """Of a thousand problems, a hundred are listed."""
    many = DocumentError(tuple(DocumentProblem("<body>", n, 1, "", "no") for n in range(1_000)))
    assert bytes(error_response(many, conditional=False).body).count(b'"line"') == LISTED_MAX


async def test_unknown_paths_and_methods(admin: Admin) -> None:
    """404 for a path, 405 for a method with all allowed methods."""
    await admin.rejected("GET", "/nope", 404)
    await admin.rejected("GET", "/rules/", 404)
    for method, path, allowed in (
        ("PATCH", "/rules", "GET, PUT"),
        ("POST", "/rules/x", "DELETE, GET, PATCH, PUT"),
        ("PUT", "/lists/deny", "DELETE, GET, POST"),
        ("DELETE", "/versions/1/rollback", "POST"),
        ("POST", "/node", "GET"),
    ):
        answer = await admin.call(method, path, 405)
        assert answer.headers["allow"] == allowed
        assert answer.json()["error"]["code"] == "METHOD_NOT_ALLOWED"


async def test_a_defect_is_a_500_problem(
    admin: Admin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It shows no details; the server logs the error."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(admin.app.state.control, "current", broken)
    admin.client._transport.raise_app_exceptions = False  # type: ignore[attr-defined]  # httpx's
    found = await admin.rejected("GET", "/rules", 500)
    assert "secret" not in str(found)
    assert "a defect at GET '/v1/admin/rules'" in caplog.text
