"""The error tree: its classes, their messages, and pickling."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import traceback

import pytest

from ratekeeper import (
    CapacityError,
    ConfigError,
    Decision,
    InvalidCost,
    InvalidKey,
    InvalidOption,
    Limit,
    LimitExceeded,
    RatekeeperError,
    RateSyntaxError,
    SlotLost,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from ratekeeper.core import errors
from ratekeeper.core.errors import (
    ChangeRefused,
    SafetyFinding,
    UnsafeChange,
    VersionConflict,
)

LIMIT = Limit(5, per=60)
DENIED = Decision(False, LIMIT, 0, retry_after_ns=1_234_567_890)
FINDING = SafetyFinding(
    "denies-all", "deny[0]", '"*"', "everyone is denied", "use a narrower entry"
)

ONE_OF_EACH: list[RatekeeperError] = [
    RatekeeperError("text"),
    ConfigError("text"),
    RateSyntaxError("5/x", 2, "expected a unit", "5/s"),
    InvalidOption("text"),
    InvalidKey("text"),
    InvalidCost("text"),
    CapacityError(6, LIMIT),
    ChangeRefused("text"),
    VersionConflict(3, 4),
    UnsafeChange((FINDING,)),
    StoreError("text"),
    StoreFull("text"),
    StoreTimeout("text"),
    StoreUnavailable("text"),
    SlotLost("text"),
    LimitExceeded(DENIED),
]


def _classes() -> dict[str, type[RatekeeperError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, RatekeeperError)
    }


def _drawn_tree(docstring: str) -> dict[str, str]:
    """Return child → parent, read from the lines and indentation of the drawing."""
    parents: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in docstring.splitlines():
        drawn = re.fullmatch(r" {4}((?:│   |    )*)(├── |└── |)([A-Z]\w+)(?:  +.*)?", line)
        if not drawn:
            continue
        depth = len(drawn[1]) // 4 + bool(drawn[2])
        path = [(level, name) for level, name in path if level < depth]
        if path:
            parents[drawn[3]] = path[-1][1]
        path.append((depth, drawn[3]))
    return parents


def test_the_drawing_is_the_tree() -> None:
    """The tree in the module's docstring equals the tree of classes."""
    real = {
        name: parent.__name__
        for name, kind in _classes().items()
        for parent in kind.__bases__
        if issubclass(parent, RatekeeperError)
    }
    assert errors.__doc__ is not None
    assert _drawn_tree(errors.__doc__) == real


def test_one_of_each_is_tested_here() -> None:
    """The list above has every class of the tree."""
    assert {type(error) for error in ONE_OF_EACH} == set(_classes().values())


def test_only_config_errors_are_value_errors() -> None:
    """`except ValueError` around a constructor catches only errors that the caller must fix."""
    for kind in _classes().values():
        assert issubclass(kind, ValueError) == issubclass(kind, ConfigError)


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling_and_copying(error: RatekeeperError) -> None:
    """A worker process can send each to its parent: type, message and fields are kept."""
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_rate_syntax_error_points() -> None:
    """The message has four lines: the problem, the string, a pointer and an example."""
    error = RateSyntaxError("100/minut", 4, "expected a unit", "100/minute")
    assert str(error) == (
        "expected a unit at character 5\n    100/minut\n        ^\nwrite it like this: 100/minute"
    )
    assert (error.text, error.position, error.problem, error.example) == (
        "100/minut",
        4,
        "expected a unit",
        "100/minute",
    )


def test_capacity_error_says_what_to_do() -> None:
    """The message has the cost, the limit, its capacity, and two remedies."""
    error = CapacityError(6, Limit(5, per=60, name="logins"))
    assert str(error) == (
        "a cost of 6 can never fit 5/minute, which holds 5 at most; "
        "split the request, or raise the limit's capacity to at least that cost"
    )
    assert (error.cost, error.limit.name) == (6, "logins")


def test_capacity_error_of_a_number_too_long_to_print() -> None:
    """Python does not print an int of 5,001 digits; the error says so and can be printed."""
    error = CapacityError(10**5_000, LIMIT)
    assert str(error).startswith("a cost of <a int that cannot be shown> can never fit 5/minute")


class Unprintable:
    """A caller's object whose repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (5, "5"),
        ("a\nb", "'a\\nb'"),
        ("x" * 98, "'" + "x" * 98 + "'"),
        ("x" * 99, "'" + "x" * 48 + "…" + "x" * 48 + "'"),
        ([7] * 99, "[" + "7, " * 16 + "…" + ", 7" * 16 + "]"),
        (10**5_000, "<a int that cannot be shown>"),
        (Unprintable(), "<a Unprintable that cannot be shown>"),
    ],
    ids=range(7),
)
def test_values_are_shown(value: object, shown: str) -> None:
    """Up to 100 characters are shown whole, longer values by both ends; no value raises."""
    assert errors.show(value) == shown
    assert len(shown) <= 100


def test_a_conflict_names_both_versions() -> None:
    """It names the caller's version, the current version and the remedy, also without a version."""
    assert str(VersionConflict(3, 4)) == (
        "the change is based on version 3, but now version 4 is in force; "
        "look at the changes, then repeat the change on that version"
    )
    assert "the change is based on no version, but now version 1 is in force;" in str(
        VersionConflict(0, 1)
    )


def test_an_unsafe_change_lists_what_was_found() -> None:
    """Up to 20 have a line each; the last line counts the rest."""
    assert str(UnsafeChange((FINDING,))) == (
        'deny[0]: "*": everyone is denied; use a narrower entry, or force it'
    )
    lines = str(UnsafeChange((FINDING,) * 23)).splitlines()
    assert (len(lines), lines[-1]) == (21, "… and 3 more")


def test_limit_exceeded_carries_the_decision() -> None:
    """The error has the decision, and its message the time to retry."""
    error = LimitExceeded(DENIED)
    assert error.decision is DENIED
    assert str(error) == "limit exceeded; retry after 1.235 s"


def test_errors_print_in_a_traceback() -> None:
    """A traceback of each can be formatted and written as UTF-8."""
    for error in ONE_OF_EACH:
        "".join(traceback.format_exception(error)).encode()
