"""The public names: all are documented, and none is public by accident."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import inspect
import types
from typing import Any

import pytest

import tollkeeper
import tollkeeper.testing
from tollkeeper import AsyncLimiter, Limiter

# Fixed by the design: others build on these.
PROMISED = {
    tollkeeper: {"Limiter", "AsyncLimiter", "Limit", "Request", "Decision"},
    tollkeeper.testing: {"ManualClock"},
}
VERBS = {"check", "peek", "reset", "refund", "grant", "wait", "limit", "hold", "close"}

both = pytest.mark.parametrize("module", [tollkeeper, tollkeeper.testing], ids=lambda m: m.__name__)


@both
def test_all_is_sorted_and_has_no_repeats(module: types.ModuleType) -> None:
    """A sorted list merges well when two branches add to it."""
    assert module.__all__ == sorted(set(module.__all__))


@both
def test_the_promised_names_are_exported(module: types.ModuleType) -> None:
    """The names of the design exist."""
    assert set(module.__all__) >= PROMISED[module]


def test_all_is_what_is_exported() -> None:
    """`__all__` has every public name of the package that is not a submodule."""
    public = {
        name
        for name, value in vars(tollkeeper).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public | {"__version__"} == set(tollkeeper.__all__)


def test_star_import_gives_all() -> None:
    """`from tollkeeper import *` imports the names in `__all__`."""
    names: dict[str, Any] = {}
    exec("from tollkeeper import *", names)
    assert set(names) - {"__builtins__"} == set(tollkeeper.__all__)


@both
def test_every_public_name_has_a_docstring(module: types.ModuleType) -> None:
    """Its own docstring, not an inherited one."""
    for name in set(module.__all__) - {"__version__"}:
        value = getattr(module, name)
        own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        assert own, f"{module.__name__}.{name} has no docstring"


@pytest.mark.parametrize(
    "kind",
    [
        value
        for value in vars(tollkeeper).values()
        if inspect.isclass(value) and not issubclass(value, Exception)
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_public_method_has_a_docstring(kind: type) -> None:
    """Methods and properties, including those inherited from our classes."""
    for name, member in inspect.getmembers(kind):
        if name.startswith("_") or not (inspect.isroutine(member) or isinstance(member, property)):
            continue
        assert member.__doc__, f"{kind.__name__}.{name} has no docstring"


def test_both_limiters_have_the_same_methods() -> None:
    """With the same parameters and the same defaults."""
    for verb in VERBS:
        parameters = [
            [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]
            for method in (getattr(Limiter, verb), getattr(AsyncLimiter, verb))
        ]
        assert parameters[0] == parameters[1], verb
    assert inspect.signature(Limiter) == inspect.signature(AsyncLimiter)


def test_the_package_is_typed() -> None:
    """`py.typed` is installed, so that type checkers use our annotations."""
    package = importlib.resources.files(tollkeeper)
    assert package.joinpath("py.typed").is_file()
