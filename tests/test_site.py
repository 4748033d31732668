"""The documentation site has every page, all its links work, and it needs no other host."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from playwright.sync_api import expect
from tools.site_docstrings import DIRECTIVE, REFERENCE, as_markdown
from tools.site_pages import DOCS, ROOT, as_page, expanded, program_page, rewritten, site_path

import ratekeeper
from tests.console.operators import chromium

# Everyday questions, and the page that is to be among the first three results.
QUESTIONS = {
    "behind a proxy": "identity",
    "429 body": "answers",
    "Redis is down": "redis",
    "per user": "identity",
    "several workers": "choosing",
    "tests": "library",
    "reset a user": "command-line",
    "shadow mode": "rules",
    "Retry-After": "answers",
    "celery": "recipes/celery_tasks",
    "store shared://": "library",
}

# What a page loads from another host by itself: scripts, styles, pictures.
LOADED = re.compile(r'<(?:script|link|img|iframe|source)\b[^>]*(?:src|href|srcset)="(?:https?:)?//')

# The words that the search finds in the index of these, if it is the first one of the page. Without
# the repair in tools/site_pages.py, eight of them differ.
NUMBERS = sorted({str(7_919 * n * n % 1_000_003) for n in range(10_000)})
FOUND = "words => { lunr.TokenSet._nextId = 1; return lunr.TokenSet.fromArray(words).toArray(); }"


def pages_of(nav: list[Any]) -> list[str]:
    """Return the pages that a navigation names, in their order."""
    found: list[str] = []
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            found += pages_of(value) if isinstance(value, list) else [value]
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    """Each page of docs/ and each recipe can be reached, in the order of the site."""
    settings = re.sub(r"!!\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = pages_of(expanded(yaml.safe_load(settings)["nav"]))
    files = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    recipes = {site_path(path) for path in (ROOT / "examples/recipes").glob("*.py")}
    assert len(pages) == len(set(pages))
    assert set(pages) == files | recipes | {"changes.md", "contributing.md", "security.md"}


def test_links_out_of_docs_lead_to_pages_of_the_site() -> None:
    """A link works in the repository and on the site; code and dead links stay as they are."""
    text = (
        "[a](../LICENSE) [b](web.md#x) [c](https://a.example/b.md)\n[d](../examples/limits.yaml)\n"
        "```sh\n[e](../LICENSE)\n```\n[f](../gone.md)\n"
    )
    page = rewritten(text, DOCS / "rules.md", "rules.md")
    assert page.splitlines() == [
        "[a](files/LICENSE.md) [b](web.md#x) [c](https://a.example/b.md)",
        "[d](files/examples/limits-yaml.md)",
        "```sh",
        "[e](../LICENSE)",
        "```",
        "[f](../gone.md)",
    ]


def test_a_program_is_a_page_with_its_docstring_as_text() -> None:
    """The page has the words and the code of the file, and neither of them twice."""
    page = program_page("examples/a.py", '"""Count calls.\n\nWith `x`.\n"""\n\nprint("```")\n')
    assert page == (
        '# Count calls\n\nWith `x`.\n\n````python title="examples/a.py"\nprint("```")\n````\n'
    )
    assert as_page(ROOT / "examples/limits.yaml").startswith(
        "# `examples/limits.yaml`\n\n```yaml\n"
    )


@pytest.mark.parametrize(
    "page",
    [page for page in sorted(DOCS.rglob("*.md")) if not re.match(r"\d{4}-", page.name)],
    ids=lambda page: page.relative_to(DOCS).as_posix(),
)
def test_a_page_begins_with_a_sentence(page: Path) -> None:
    """A reader who comes from a search sees at once what the page is for."""
    text = re.sub(r"\A---\n.*?\n---\n\n", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    title, blank, first = text.splitlines()[:3]
    assert title.startswith("# ")
    assert not blank
    assert re.match(r"[A-Z`]", first), first


def test_every_decision_is_in_the_index() -> None:
    """The index of decision records has each record with its title."""
    index = (DOCS / "adr/index.md").read_text(encoding="utf-8")
    for record in sorted((DOCS / "adr").glob("0*.md")):
        number, _, title = record.read_text(encoding="utf-8").splitlines()[0][2:].partition(". ")
        assert f"| {number} | [{title}]({record.name}) |" in index


def public_modules() -> list[str]:
    """Return the modules that users import from: those at the top of the package with `__all__`."""
    found = ["ratekeeper"]
    for module in pkgutil.iter_modules(ratekeeper.__path__, "ratekeeper."):
        source = ROOT / "src" / Path(*module.name.split("."))
        file = source / "__init__.py" if module.ispkg else source.with_suffix(".py")
        text = file.read_text(encoding="utf-8")
        # A module without `__all__` is listed, too: the tests below report it.
        if "__all__" in text or not (module.ispkg or module.name == "ratekeeper.__main__"):
            found.append(module.name)
    return found


def described() -> dict[str, Any]:
    """Return what the pages of the reference describe, by its path."""
    pages = [page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md")]
    return {path: value_of(path) for page in pages for path in DIRECTIVE.findall(page)}


def value_of(path: str) -> Any:
    """Return the value of `package.module.name`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def docstring_of(path: str) -> str:
    """Return the docstring of a class or function, or the text below a constant."""
    module, _, name = path.rpartition(".")
    value = value_of(path)
    if inspect.isclass(value) or inspect.isroutine(value):
        return vars(value).get("__doc__") or "" if inspect.isclass(value) else value.__doc__ or ""
    return text_below(name, importlib.import_module(module))


def text_below(name: str, module: ModuleType) -> str:
    """Return the text below the assignment of a name, also if the module imports the name."""
    body = ast.parse(inspect.getsource(module)).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ImportFrom) and name in {each.name for each in node.names}:
            return text_below(name, importlib.import_module(node.module or ""))
        assigned = node.targets[0] if isinstance(node, ast.Assign) else None
        target = node.target if isinstance(node, ast.AnnAssign) else assigned
        if isinstance(target, ast.Name) and target.id == name:
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            return str(following.value.value) if is_text else ""  # type: ignore[union-attr]  # is_text
    return ""


@pytest.mark.parametrize("module", public_modules())
def test_the_reference_describes_every_public_name(module: str) -> None:
    """A user finds each name of `__all__` on a page of the reference."""
    found = described()
    classes = [value for value in found.values() if inspect.isclass(value)]
    missing = [
        name
        for name in importlib.import_module(module).__all__
        if f"{module}.{name}" not in found and value_of(f"{module}.{name}") not in classes
    ]
    assert not missing, f"add `::: {module}.{missing[0]}` to a page of docs/reference/"


@pytest.mark.parametrize("path", sorted(described()))
def test_the_first_line_of_a_description_is_a_sentence(path: str) -> None:
    """The line stands alone in the reference: it says what the thing is or does."""
    first, _, _ = docstring_of(path).partition("\n")
    assert first.endswith((".", ":")), first
    assert len(first.split()) >= 3
    assert not re.match(r"(?i)the same|see |also ", first), first


def test_docstrings_become_markdown() -> None:
    """Examples become code, aligned entries a list, and classes links to their descriptions."""
    docstring = (
        "Count a `Limit`, `Time`, Limiter.check.\n\n"
        ">>> 1 + 1\n2\n\n"
        "It takes:\n"
        "`a`       one\n          and more.\n"
        "`b`, `c`  two.\n\n"
        "    code = `Limit`\n\nMore."
    )
    assert as_markdown(docstring, {"Limit": "ratekeeper.Limit"}).splitlines() == [
        "Count a [`Limit`][ratekeeper.Limit], `Time`, [`Limiter.check`][ratekeeper.Limiter.check].",
        "",
        "```pycon",
        ">>> 1 + 1",
        "2",
        "```",
        "",
        "It takes:",
        "",
        "- `a`: one",
        "  and more.",
        "- `b`, `c`: two.",
        "",
        "```python",
        "code = `Limit`",
        "```",
        "",
        "More.",
    ]


@pytest.mark.long
def test_the_site_builds_strictly_and_searches_without_any_other_host(tmp_path: Path) -> None:
    """`make docs` ends without a warning. Opened from the disk, the site finds a word by itself."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, tmp_path], cwd=ROOT, env=quiet, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    loading = [page for page in tmp_path.rglob("*.html") if LOADED.search(page.read_text("utf-8"))]
    assert not loading

    asked, said = [], []
    with chromium() as browser, browser.new_context() as context:
        context.on("request", lambda request: asked.append(request.url))
        context.on("console", lambda message: said.append(message.text))
        page = context.new_page()
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((tmp_path / "index.html").as_uri())
        search = page.locator(".md-search__input")
        search.click()
        for question, found in QUESTIONS.items():
            search.fill("")
            search.press_sequentially(question)
            first = page.locator(".md-search-result__item:nth-child(-n+3)")
            expect(first.locator(f'a[href*="/{found}.html"]').first).to_be_visible()
        frame = next(each for each in page.frames if each.evaluate("() => 'lunr' in self"))
        assert sorted(frame.evaluate(FOUND, NUMBERS)) == NUMBERS
        search.fill("")
        search.press_sequentially("cooldown")
        result = page.locator(".md-search-result__link").first
        expect(result).to_be_visible()
        result.click()
        expect(page.get_by_text("cooldown").first).to_be_visible()
        assert page.url.startswith(tmp_path.as_uri())
        assert "index.html" not in page.url
    assert not [url for url in asked if not url.startswith(("file:", "data:"))]
    assert not said
