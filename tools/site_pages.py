"""A hook of mkdocs: pages of the documentation site that are files outside docs/.

Pages in docs/ link to programs, configuration and other files of the repository with relative
links, which work where the repository is browsed. For the site, every file that such a link names
becomes a page, made from the file itself: a program is its docstring as text and then its code.
Nothing is copied by hand, so a page cannot differ from the file that the tests run.

`mkdocs.yml` names this module. `tests/test_site.py` tests it and the site.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"

# The files of the top folder that are pages under their own names.
PAGES: Final = {
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
RECIPES: Final = "examples/recipes/"

# How much a page counts in the search. People who search want a guide or a recipe first, then the
# reference, then how it is built.
BOOSTS: Final = {
    "reference/": 0.6,
    "recipes/": 0.8,
    "architecture.md": 0.3,
    "contributing.md": 0.3,
    "benchmarks.md": 0.3,
    "changes.md": 0.2,
    "adr/": 0.2,
    "files/": 0.2,
}

LINK: Final = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)(?=(?:#[^)]*)?\))")
FENCED: Final = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
LANGUAGES: Final = {
    ".conf": "nginx",
    ".json": "json",
    ".md": "markdown",
    ".proto": "proto",
    ".py": "python",
    ".service": "ini",
    ".sh": "sh",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
}

# lunr, the search of the theme, merges nodes of its tree of words whose edges have the same text.
# That text has no separator: the edges 0 to node 5 and 7 to node 5 equal the edge 0 to node 575. So
# words with digits were lost, and words appeared that no page has. Queries that reached one failed.
SEARCH_WORKERS: Final = "assets/javascripts/workers/search.*.js"
DISTINCT_NODES: Final = """
self.lunr.TokenSet.prototype.toString = function () {
  const edges = Object.keys(this.edges).sort().map((label) => `${label}${this.edges[label].id};`);
  return this._str || (this.final ? "1" : "0") + edges.join("");
};
"""

# Words that people search for and that the pages name otherwise, or name on many pages.
KEYWORDS: Final = {
    "admin-api.md": ["reset a user", "unblock a customer"],
    "answers.md": ["429 body", "Retry-After header", "error message"],
    "choosing.md": ["several workers", "gunicorn", "which algorithm", "burst"],
    "client.md": ["Retry-After", "retry", "backoff"],
    "command-line.md": ["reset a user", "shadow mode", "explain a denial"],
    "deploy.md": ["Docker", "Kubernetes", "systemd"],
    "identity.md": ["per user", "behind a proxy", "X-Forwarded-For", "API key", "JWT"],
    "limits-storage.md": ["Flask-Limiter", "slowapi"],
    "library.md": ["tests", "pytest", "asyncio", "Redis is down"],
    "operate.md": ["several workers", "production", "shared memory"],
    "outgoing.md": ["calling an API", "client side"],
    "recipes.md": ["LLM", "OpenAI", "language model tokens"],
    "redis.md": ["Redis is down", "Redis outage", "Valkey"],
    "rules.md": ["per user", "shadow mode", "dry run", "tiers", "allow list", "block an address"],
    "web.md": ["per user", "exempt a route", "login", "custom 429"],
}

# The file behind each page that this hook made, by the page's name: links start from there.
_origins: dict[str, Path] = {}


def site_path(path: Path) -> str:
    """Return the name of the page or picture on the site that shows a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    if name == "README.md":
        return "index.md"
    if name.startswith(RECIPES) and path.suffix == ".py":
        return f"recipes/{path.stem}.md"
    return f"files/{name.replace('.', '-')}.md"


def linked_files(text: str, folder: Path) -> set[Path]:
    """Return the files outside docs/ that the links of a page in `folder` name."""
    targets = {(folder / match[1]).resolve() for match in LINK.finditer(FENCED.sub("", text))}
    return {
        target
        for target in targets
        if target.exists() and target.is_relative_to(ROOT) and not target.is_relative_to(DOCS)
    }


def rewritten(text: str, origin: Path, page: str) -> str:
    """Return Markdown whose links to files of the repository lead to pages of the site.

    `origin` is the file that the text comes from, and `page` the name of its page on the site.
    Links in code blocks stay as they are, and so do links that lead nowhere: mkdocs reports them.
    """

    def target(match: re.Match[str]) -> str:
        path = (origin.parent / match[1]).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            return match[1]
        return os.path.relpath(site_path(path), Path(page).parent)

    parts, at = [], 0
    for block in FENCED.finditer(text):
        parts += [LINK.sub(target, text[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, LINK.sub(target, text[at:])])


def as_page(path: Path) -> str:
    """Return the Markdown of the page that shows a file, or lists a folder."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        files = sorted(each.name for each in path.iterdir() if not each.name.startswith(("_", ".")))
        return f"# `{name}/`\n\n" + "".join(f"- [{each}]({path.name}/{each})\n" for each in files)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    if path.suffix == ".py":
        return program_page(name, text)
    return f"# `{name}`\n\n{code_block(text, LANGUAGES.get(path.suffix, 'text'))}"


def program_page(name: str, source: str) -> str:
    """Return the page of a program: its docstring as text, then the code below it."""
    tree = ast.parse(source)
    docstring = ast.get_docstring(tree)
    if docstring is None:
        return f"# `{name}`\n\n{code_block(source, 'python')}"
    title, _, text = docstring.partition("\n")
    code = "".join(source.splitlines(keepends=True)[tree.body[0].end_lineno :]).strip()
    return f"# {title.rstrip('.')}\n\n{text.strip()}\n\n{code_block(code, 'python', name)}"


def code_block(code: str, language: str, title: str = "") -> str:
    """Return a fenced block, with a fence that is longer than any in the code."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`{3,}", code)), 3)
    titled = f' title="{title}"' if title else ""
    return f"{fence}{language}{titled}\n{code.rstrip()}\n{fence}\n"


def expanded(nav: list[Any]) -> list[Any]:
    """Return the navigation with the pages of a folder in place of its name, such as `adr/`."""
    entries: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, value),) = entry.items()
            entries.append({title: expanded(value) if isinstance(value, list) else value})
        elif entry.endswith("/"):
            entries += folder_pages(entry)
        else:
            entries.append(entry)
    return entries


def folder_pages(folder: str) -> list[str]:
    """Return the pages of a folder of the site: its index, then the others by their names."""
    if folder == "recipes/":
        return [site_path(path) for path in sorted((ROOT / RECIPES).glob("*.py"))]
    pages = sorted((DOCS / folder).glob("*.md"), key=lambda page: (page.stem != "index", page.name))
    return [site_path(page) for page in pages]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation with the pages of whole folders."""
    config.nav = expanded(config.nav or [])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file that a page links to, and for each that those link to."""
    _origins.clear()
    waiting: dict[Path, None] = dict.fromkeys(
        [*(ROOT / name for name in PAGES), *sorted((ROOT / RECIPES).glob("*.py"))]
    )
    for file in files.documentation_pages():
        path = Path(file.abs_src_path or "")
        waiting |= dict.fromkeys(sorted(linked_files(file.content_string, path.parent)))
    done: set[Path] = {ROOT / "README.md"}
    while waiting:
        path = next(iter(waiting))
        del waiting[path]
        if path in done:
            continue
        done.add(path)
        page, text = site_path(path), as_page(path)
        _origins[page] = path
        files.append(File.generated(config, page, content=text))
        if path.suffix == ".md" or path.is_dir():
            waiting |= dict.fromkeys(sorted(linked_files(text, path.parent)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Lead the links of a page to pages of the site, and set how much it counts in the search."""
    for name, boost in BOOSTS.items():
        if page.file.src_uri.startswith(name):
            page.meta.setdefault("search", {"boost": boost})
    # The theme shows tags only with another plugin; its search finds them.
    page.meta.setdefault("tags", KEYWORDS.get(page.file.src_uri, []))
    if page.file.src_uri.startswith(("recipes/", "files/")):
        # No headings. Without the column of the contents, lines of 100 characters fit.
        page.meta.setdefault("hide", ["toc"])
    origin = _origins.get(page.file.src_uri, DOCS / page.file.src_uri)
    return rewritten(markdown, origin, page.file.src_uri)


def on_post_build(config: MkDocsConfig) -> None:
    """Repair the search of the theme."""
    (worker,) = Path(config.site_dir).glob(SEARCH_WORKERS)
    worker.write_text(worker.read_text("utf-8") + DISTINCT_NODES, "utf-8")
