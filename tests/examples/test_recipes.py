"""The recipes are complete programs; these tests run each of them as a reader would.

A recipe is one file of `examples/recipes`. Its docstring begins with what a reader wants to do, and
`docs/recipes.md` has one row for it with the same words. A recipe that needs Redis has the line
`REDIS_LINE`; here it gets the tests' own server, and once an address where no server listens.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.stores import PATIENT
from tests.examples import warnings_in
from tests.redis_servers import running

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
INDEX = ROOT / "docs" / "recipes.md"
NAMES = sorted(path.name for path in RECIPES.glob("*.py"))
# | what the reader wants | [name.py](../examples/recipes/name.py) | what it uses |
ROW = re.compile(
    r"^\| (?P<want>[^|]+) \| \[(?P<name>\w+\.py)\]\(\.\./examples/recipes/(?P<link>\w+\.py)\)"
    r" \| (?P<uses>[^|]+) \|$",
    re.MULTILINE,
)
ROWS = list(ROW.finditer(INDEX.read_text(encoding="utf-8")))
REDIS_LINE = 'REDIS_URL = os.environ.get("REDIS_URL", "redis://localhost:6379")'
NO_REDIS = "redis://127.0.0.1:1"
TIMEOUT_SECONDS = 60
LINES_MAX = 100


def source(name: str) -> str:
    return (RECIPES / name).read_text(encoding="utf-8")


ON_REDIS = [name for name in NAMES if "REDIS_URL" in source(name)]


def run(name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a recipe from the folder of the checkout, as its docstring and the index say."""
    return subprocess.run(
        [sys.executable, f"examples/recipes/{name}"],
        cwd=ROOT,
        # grpcio may log a line when a server ends before the connections to it.
        env={**os.environ, "GRPC_VERBOSITY": "ERROR", **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_runs_and_finds_itself_right(name: str) -> None:
    """It exits with status 0 and prints what happened, without a warning or a traceback."""
    environment = {}
    if name in ON_REDIS:
        server = running("single")
        server.flush()
        environment["REDIS_URL"] = f"{server.uri}?{PATIENT}"
    done = run(name, **environment)
    assert (done.returncode, warnings_in(done.stderr)) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("name", ON_REDIS)
def test_a_recipe_without_its_service_says_what_to_do(name: str) -> None:
    """It exits with status 1; the message names the address and the next step."""
    assert source(name).count(REDIS_LINE) == 1
    done = run(name, REDIS_URL=NO_REDIS)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert NO_REDIS in done.stderr
    assert "REDIS_URL" in done.stderr


@pytest.mark.parametrize("name", ON_REDIS)
def test_a_recipe_with_an_invalid_address_says_so(name: str) -> None:
    """It exits with status 1; the message names the variable and its value."""
    url = "redis://localhost:6379/abc"
    done = run(name, REDIS_URL=url)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(f"REDIS_URL={url} is not valid: ")


def test_the_index_has_each_recipe_once() -> None:
    """Every program is in one row, every row is a program, and a link shows where it leads."""
    assert sorted(row["name"] for row in ROWS) == NAMES
    assert [row["link"] for row in ROWS] == [row["name"] for row in ROWS]


def test_the_index_has_the_words_of_the_programs() -> None:
    """'I want to …' is the first line of the docstring, which is one sentence."""
    for row in ROWS:
        first = (ast.get_docstring(ast.parse(source(row["name"]))) or "").partition("\n")[0]
        assert re.fullmatch(r"[A-Z].+\.", first), row["name"]
        assert row["want"] == first[0].lower() + first[1:].removesuffix("."), row["name"]


def test_no_recipe_hides_a_module() -> None:
    """Python looks for modules beside a program first: celery.py would import itself."""
    assert [name for name in NAMES if importlib.util.find_spec(name.removesuffix(".py"))] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_short_and_uses_public_names(name: str) -> None:
    """Readers copy it, so it has no attribute of an object that begins with an underscore."""
    tree = ast.parse(source(name))
    attributes = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert [each for each in attributes if re.match(r"_[^_]", each)] == []
    assert len(source(name).splitlines()) <= LINES_MAX
