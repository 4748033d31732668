"""The documentation is correct: its code runs, its results are right, its links work.

The Python blocks of a page run from top to bottom in one namespace, as a reader would type them.
A comment `# -> text` at the end of a statement claims that its value prints as that text, and the
test checks it. A block that defines tests runs in pytest. The commands on the pages are run by
`tests/integration/test_documented_commands.py`.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratekeeper.rules.document.reading import read
from tests.redis_servers import running

ROOT = Path(__file__).parents[1]
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*TOP, *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CLAIM = re.compile(r"# -> (.+)$")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
FENCE = re.compile(r"^ *(?:```|~~~)(.+)$", re.MULTILINE)
DATA = re.compile(r"^```(yaml|json)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MAKE = re.compile(r"\bmake ([a-z]+)\b")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """Yield each Python block of a page, with the number of its first line."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        yield text.count("\n", 0, match.start(1)), match[1]


def on_our_redis(source: str) -> str:
    """Return the code with the tests' own Redis instead of redis://localhost."""
    if '"redis://localhost' not in source:
        return source
    server = running("single")
    server.flush()
    # A busy machine must not lead a check past its deadline.
    patient = source.replace("deadline_ms=20", "deadline_ms=10_000, connect_ms=10_000")
    slow = f'"{server.uri}?deadline_ms=10000&connect_ms=10000"'
    patient = patient.replace('"redis://localhost"', slow)
    return patient.replace("redis://localhost", server.uri.removesuffix("/0"))


def run_block(page: Path, first_line: int, source: str, namespace: dict[str, Any]) -> int:
    """Run a block statement by statement and check its claims; return their number."""
    lines = source.splitlines()
    claims = 0
    for node in ast.parse(source).body:
        claim = CLAIM.search(lines[(node.end_lineno or node.lineno) - 1])
        line = first_line + node.lineno
        ast.increment_lineno(node, first_line)
        if claim is None:
            exec(compile(ast.Module([node], []), page_id(page), "exec"), namespace)
            continue
        if isinstance(node, ast.Assign):
            exec(compile(ast.Module([node], []), page_id(page), "exec"), namespace)
            value = eval(ast.unparse(node.targets[0]), namespace)
        else:
            assert isinstance(node, ast.Expr), f"{page_id(page)}:{line}: a claim without a value"
            value = eval(compile(ast.Expression(node.value), page_id(page), "eval"), namespace)
        assert repr(value) == claim[1], f"{page_id(page)}:{line}"
        claims += 1
    return claims


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_code_on_a_page_runs_and_its_claims_hold(page: Path, tmp_path: Path) -> None:
    """Every Python block runs; blocks with tests in them run in pytest."""
    namespace: dict[str, Any] = {"__name__": "page"}
    for first_line, written in blocks(page):
        source = on_our_redis(written)
        if "def test_" not in source:
            run_block(page, first_line, source, namespace)
            continue
        file = tmp_path / "test_page.py"
        file.write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_false_claim_is_found() -> None:
    """The checker itself can fail."""
    with pytest.raises(AssertionError, match=r"README\.md:8"):
        run_block(PAGES[0], 6, "x = 1\n1 + 1  # -> 3\n", {})


@pytest.mark.parametrize("name", ["library", "rules", "web"])
def test_the_pages_make_claims(name: str) -> None:
    """The pages with most code still use the marker that is checked."""
    assert (ROOT / f"docs/{name}.md").read_text(encoding="utf-8").count("# -> ") >= 20


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=page_id)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """Every relative link names an existing file or folder."""
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_has_every_target_that_a_page_names(page: Path) -> None:
    """`make something` in code or a code block is a target of the Makefile."""
    text = page.read_text(encoding="utf-8")
    code = " ".join(re.findall(r"`([^`\n]+)`", text) + re.findall(r"(?ms)^```sh\n(.*?)^```", text))
    targets = set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))
    assert set(MAKE.findall(code)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_blocks_have_the_form_that_is_run(page: Path) -> None:
    """A block in another form, such as an indented one or ```py, would be run by no test."""
    fences = FENCE.findall(page.read_text(encoding="utf-8"))
    python = [fence for fence in fences if fence.strip().startswith(("py", "{"))]
    titled = [fence for fence in python if fence.startswith("python title=")]
    assert len(python) - len(titled) == len(list(blocks(page)))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_data_on_a_page_can_be_read(page: Path) -> None:
    """YAML and JSON (unless `…` shortens it) are correct, and a rule document is valid."""
    for language, text in DATA.findall(page.read_text(encoding="utf-8")):
        if language == "json":
            assert "…" in text or json.loads(text)
        elif re.match(r"(?:#.*\n)*version: 1\n", text):
            read(text)
        else:
            list(yaml.safe_load_all(text))


def test_the_pictures_of_the_console_are_small() -> None:
    """`tools/screenshot.py` makes them; a page with all of them loads quickly."""
    shown = set(re.findall(r'(?:src|srcset)="([^"]+)"', PAGES[0].read_text(encoding="utf-8")))
    assert {"docs/console.png", "docs/console-dark.png"} <= shown
    for name in shown:
        assert (ROOT / name).stat().st_size < 200_000, name
