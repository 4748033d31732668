"""The part of the style that a machine can check, so that no reviewer has to."""

from __future__ import annotations

import ast
import gc
import io
import re
import shutil
import subprocess
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FUNCTION_LINES_MAX = 70
IMPORT_LAYERS_MAX = 12
PUBLIC_MODULES = {
    "__init__.py",
    "__main__.py",
    "asgi.py",
    "django.py",
    "fastapi.py",
    "flask.py",
    "httpx.py",
    "limits.py",
    "wsgi.py",
}

# Each pattern is written so that it does not find itself here.
UNFINISHED = re.compile(r"\b(?:TOD[O]|FIXM[E]|XX[X])\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:root|home|Users|work|workspace|builds)/")
REGISTRY = re.compile(
    r"index-ur[l]|pythonhoste[d]|artifactor[y]|jfro[g]\.|registry\.npmj[s]|"
    r"\b(?:ghcr|quay|gcr)\.i[o]"
)
OLD_NAME = re.compile("tol[l]keeper", re.IGNORECASE)
INSTALLED_BY_NAME = re.compile(r"\b(?:pipx?|uv) (?:install|add)\b[^`\n#]*[ '\"]ratekeepe[r]\b")
SEAMS = re.compile(r"store|gate|limiter", re.IGNORECASE)
UNNAMED_ACTORS = re.compile(r"\b(?:whoever|nobody|somebody|those who)\b", re.IGNORECASE)
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers", "base"}

IGNORE = re.compile("noqa|type: ignore")
LINT_IGNORE = re.compile(r"# noqa: [A-Z]+[0-9]+(?:, ?[A-Z]+[0-9]+)* - \S")
TYPE_IGNORE = re.compile(r"# type: ignore\[[a-z-]+(?:, ?[a-z-]+)*\]  # \S")


@pytest.fixture(autouse=True, scope="module")
def _no_garbage_collection() -> Iterator[None]:
    """The trees of all files are a million objects, which each collection would visit."""
    gc.disable()
    yield
    _tree.cache_clear()
    _statements.cache_clear()
    gc.enable()


@cache
def _tracked() -> tuple[Path, ...]:
    """What git tracks, or, in an unpacked release, what lies in our folders."""
    if (ROOT / ".git").exists() and (git := shutil.which("git")):
        listed = subprocess.run(
            [git, "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        folders = ("src", "tests", "bench", "docs", "examples", "tools")
        found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
        found = [path for path in found if "__pycache__" not in path.parts]
    # Vendored files are the work of others: tools/vendor.py builds them.
    return tuple(sorted(path for path in found if path.is_file() and "/vendor/" not in _name(path)))


def _python(under: str = "") -> list[Path]:
    return [path for path in _tracked() if path.suffix == ".py" and _name(path).startswith(under)]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _bytes(path: Path) -> bytes:
    return path.read_bytes()


@cache
def _text(path: Path) -> str:
    return _bytes(path).decode()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_text(path))


def _lines_with(pattern: re.Pattern[str], paths: Iterable[Path] | None = None) -> list[str]:
    """Return each line of the tracked text files that the pattern finds, with where it stands."""
    return [
        f"{_name(path)}:{number}: {line}"
        for path in (_tracked() if paths is None else paths)
        if b"\0" not in _bytes(path) and pattern.search(_text(path))
        for number, line in enumerate(_text(path).splitlines(), start=1)
        if pattern.search(line)
    ]


@cache
def _statements(path: Path) -> list[ast.AST]:
    """Return the statements of a file, also those inside others, and no expressions."""
    found: list[ast.AST] = [_tree(path)]
    for node in found:
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            found.extend(getattr(node, name, ()))
    return found


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        node
        for node in _statements(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(_text(path)).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _documentation(path: Path) -> Iterator[str]:
    """Return the docstrings and the comments of a file."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in _statements(path):
        if isinstance(node, documented):
            yield ast.get_docstring(node) or ""
    for _, comment in _comments(path):
        yield comment


def test_there_is_something_to_check() -> None:
    """The list of files is the project's: a test over an empty list could not fail."""
    names = {_name(path) for path in _tracked()}
    assert {"src/ratekeeper/limiter/limiter.py", "tests/test_tidy.py"} <= names


def test_functions_stop_at_70_lines() -> None:
    """A longer function does two things."""
    assert not [
        f"{_name(path)}:{function.lineno}: {function.name} has {lines} lines"
        for path in _python()
        for function in _functions(path)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > FUNCTION_LINES_MAX
    ]


def test_every_module_says_what_it_is() -> None:
    """Each module of src/ and tests/ opens with a docstring."""
    assert not [
        _name(path)
        for path in _python()
        if path.suffix == ".py" and not ast.get_docstring(_tree(path)) and _text(path).strip()
    ]


def test_every_public_class_and_function_says_what_it_promises() -> None:
    """Each public definition at the top of a module of src/ has a docstring."""
    definitions = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    assert not [
        f"{_name(path)}:{node.lineno}: {node.name}"
        for path in _python("src/")
        for node in _tree(path).body
        if isinstance(node, definitions)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]


def test_every_test_states_its_claim() -> None:
    """The docstring of a test says what would be wrong if it failed."""
    assert not [
        f"{_name(path)}:{function.lineno}: {function.name}"
        for path in _python("tests/")
        if path.name.startswith("test_")
        for function in _functions(path)
        if function.name.startswith("test_") and not ast.get_docstring(function)
    ]


def test_nothing_is_left_unfinished() -> None:
    """What is to be done is done, or written down where it is tracked."""
    assert not _lines_with(UNFINISHED)


def test_no_vague_names() -> None:
    """A module is named for what it is about, not for being handy."""
    assert not [_name(path) for path in _tracked() if path.stem.strip("_") in VAGUE_NAMES]


def test_every_ignore_has_a_code_and_a_reason() -> None:
    """Switching a check off takes its code and why, in the same comment."""
    wrong = []
    for path in _python():
        if not IGNORE.search(_text(path)):
            continue
        for number, comment in _comments(path):
            if ("noqa" in comment and not LINT_IGNORE.search(comment)) or (
                "type: ignore" in comment and not TYPE_IGNORE.search(comment)
            ):
                wrong.append(f"{_name(path)}:{number}: {comment}")
    assert not wrong


def test_no_test_sleeps() -> None:
    """Time is a parameter: only tests against real servers may wait for it to pass."""
    wrong = []
    for path in _python("tests/"):
        if _name(path).startswith("tests/integration/") or "sleep" not in _text(path):
            continue
        for node in ast.walk(_tree(path)):
            called = isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep"
            imported = isinstance(node, ast.ImportFrom) and node.module == "time"
            if called or (imported and "sleep" in ast.unparse(node)):
                wrong.append(f"{_name(path)}: {ast.unparse(node)}")
    assert not wrong


def test_no_paths_of_a_machine() -> None:
    """Nothing in the tree depends on where it was written."""
    assert not _lines_with(MACHINE_PATH)


def test_no_hosts_of_a_registry() -> None:
    """Where packages come from is the installer's setting, not ours."""
    assert not _lines_with(REGISTRY)


def test_the_old_name_is_history() -> None:
    """The project had the name of another package. Only one line of CHANGELOG.md mentions it."""
    found = _lines_with(OLD_NAME)
    assert not [line for line in found if not line.startswith("CHANGELOG.md:")]
    assert len(found) <= 1
    assert not [_name(path) for path in _tracked() if OLD_NAME.search(_name(path))]


def test_no_page_installs_the_package_by_name() -> None:
    """Nothing is published: pip would fail, or install a package of another author.

    An error message of the installed package may name an extra, which pip adds to that package
    (`test_packages.py::test_the_package_installs_by_name`).
    """
    pages = [path for path in _tracked() if not _name(path).startswith(("src/", "tests/"))]
    assert not _lines_with(INSTALLED_BY_NAME, pages)
    assert not [
        f"{_name(path)}: {text}"
        for path in _python("src/")
        if INSTALLED_BY_NAME.search(_text(path))
        for text in _documentation(path)
        if INSTALLED_BY_NAME.search(text)
    ]


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md"])
def test_the_first_pages_are_there(name: str) -> None:
    """What a visitor looks for first is there, and not empty."""
    assert _text(ROOT / name).strip()


def _test_file(module: Path) -> Path:
    """Return where a module's tests are: `a/b.py` → `a/test_b.py`, package `a` → `a/test_a.py`."""
    name = module.parent.name if module.name == "__init__.py" else module.stem
    return module.with_name(f"test_{name}.py")


def _needs_tests(path: Path) -> bool:
    """Return True for a module with code of its own: not generated, not private, not a migration.

    A package that only imports and exports names has no code of its own.
    """
    if (path.name.startswith("_") and path.name != "__init__.py") or "migrations" in path.parts:
        return False
    if (ast.get_docstring(_tree(path)) or "").startswith("Generated"):
        return False
    without_code = ast.Import | ast.ImportFrom | ast.Expr
    return any(
        not isinstance(node, without_code)
        for node in _tree(path).body
        if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
    )


def test_tests_mirror_the_source() -> None:
    """The tests of a module are found by its path."""
    source = ROOT / "src/ratekeeper"
    missing = []
    for path in _python("src/ratekeeper/"):
        module = path.relative_to(source)
        tests = ROOT / "tests" / _test_file(module)
        if _needs_tests(path) and not tests.is_file():
            missing.append(f"{module} → {_name(tests)}")
    assert not missing


def test_the_top_level_holds_the_public_modules() -> None:
    """A user who lists the package sees what there is to import, and the folders behind it."""
    modules = {path.name for path in (ROOT / "src/ratekeeper").glob("*.py")}
    assert modules == PUBLIC_MODULES


def test_there_are_few_import_layers() -> None:
    """Imports go down through at most twelve layers, imports for types included."""
    settings = tomllib.loads(_text(ROOT / "pyproject.toml"))["tool"]["importlinter"]
    assert "exclude_type_checking_imports" not in settings
    for contract in settings["contracts"]:
        assert len(contract.get("layers", ())) <= IMPORT_LAYERS_MAX
        assert not contract.get("ignore_imports")


def test_no_seam_is_probed() -> None:
    """Stores, gates and limiters declare what they can do; no code asks with getattr or hasattr."""
    assert not [
        f"{_name(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in _python("src/")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr")
        and SEAMS.search(ast.unparse(node.args[0]))
    ]


def test_no_two_classes_share_a_name() -> None:
    """A class is found by its name alone. Some are public, once for each framework."""
    public = {"RateLimit", "RateLimitExceeded", "LimiterUnavailable"}
    places: dict[str, list[str]] = {}
    for path in _python("src/"):
        for node in _statements(path):
            if isinstance(node, ast.ClassDef) and node.name not in public:
                places.setdefault(node.name, []).append(f"{_name(path)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_the_source_names_its_actors() -> None:
    """The client, the caller, the worker, Redis: not "whoever" or "nobody"."""
    assert not _lines_with(UNNAMED_ACTORS, _python("src/"))
