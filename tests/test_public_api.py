"""The public names: all are documented, and none is public by accident."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.resources
import inspect
import types
from pathlib import Path
from typing import Any

import pytest

import ratekeeper
import ratekeeper.limits
import ratekeeper.testing
from ratekeeper import AsyncLimiter, Limiter

# Fixed by the design: others build on these.
PROMISED = {
    ratekeeper: {"Limiter", "AsyncLimiter", "Limit", "Request", "Decision"},
    ratekeeper.testing: {"ManualClock"},
    ratekeeper.limits: {"AsyncRatekeeperStorage", "RatekeeperStorage", "open_storage"},
}
VERBS = {"check", "peek", "reset", "refund", "grant", "wait", "limit", "reserve", "close"}

each_module = pytest.mark.parametrize("module", PROMISED, ids=lambda m: m.__name__)


@each_module
def test_all_is_sorted_and_has_no_repeats(module: types.ModuleType) -> None:
    """A sorted list merges well when two branches add to it."""
    assert module.__all__ == sorted(set(module.__all__))


@each_module
def test_the_promised_names_are_exported(module: types.ModuleType) -> None:
    """The names of the design exist."""
    assert set(module.__all__) >= PROMISED[module]


def test_all_is_what_is_exported() -> None:
    """`__all__` has every public name of the package that is not a submodule."""
    public = {
        name
        for name, value in vars(ratekeeper).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public | {"__version__"} == set(ratekeeper.__all__)


def test_star_import_gives_all() -> None:
    """`from ratekeeper import *` imports the names in `__all__`."""
    names: dict[str, Any] = {}
    exec("from ratekeeper import *", names)
    assert set(names) - {"__builtins__"} == set(ratekeeper.__all__)


@each_module
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
        for value in vars(ratekeeper).values()
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
    package = importlib.resources.files(ratekeeper)
    assert package.joinpath("py.typed").is_file()


def _public_names(module: types.ModuleType) -> set[str]:
    """Return `__all__`, or without one the public classes and functions that a module defines."""
    listed: list[str] | None = getattr(module, "__all__", None)
    if listed is not None:
        return set(listed)
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    }


def test_every_public_name_has_a_typed_use() -> None:
    """`typing_public_api.py`, which type checkers check, uses all names of all public modules."""
    uses = ast.parse(Path(__file__).with_name("typing_public_api.py").read_text(encoding="utf-8"))
    used = {ast.unparse(node) for node in ast.walk(uses) if isinstance(node, ast.Attribute)}
    for node in ast.walk(uses):
        if isinstance(node, ast.ImportFrom):
            used |= {f"{node.module}.{each.name}" for each in node.names}
    package = Path(ratekeeper.__file__).parent
    names = {f"ratekeeper.{path.stem}" for path in package.glob("[!_]*.py")}
    assert names >= {"ratekeeper.asgi", "ratekeeper.fastapi", "ratekeeper.httpx"}
    for name in {"ratekeeper", "ratekeeper.testing"} | names:
        public = _public_names(importlib.import_module(name))
        missing = public - {each.rpartition(".")[2] for each in used if each.startswith(f"{name}.")}
        assert not missing, (
            f"add a use of {sorted(missing)} of {name} to tests/typing_public_api.py"
        )
