"""The tables of options, and the documentation that lists them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from ratekeeper.core.errors import ConfigError
from ratekeeper.decide.stores import SHARED_OPTIONS
from ratekeeper.decide.stores.options import Option, query_options
from ratekeeper.decide.stores.redis.config import OPTIONS

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(("page", "table"), [("redis", OPTIONS), ("library", SHARED_OPTIONS)])
def test_the_documentation_lists_each_option(page: str, table: Mapping[str, Option]) -> None:
    """The page has the rows of the table: each name with its default and its meaning."""
    text = (DOCS / f"{page}.md").read_text()
    rows = re.findall(r"(?m)^\| option \| default \| \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", text)
    assert rows == [
        "".join(f"| `{each.name}` | {each.default} | {each.meaning} |\n" for each in table.values())
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_misspelt_name_gets_a_suggestion(name: str) -> None:
    """Unless the text could be part of a password, which the error does not repeat."""
    with pytest.raises(ConfigError, match=f"no option {name}x; did you mean {name}"):
        query_options(OPTIONS, f"{name}x=1")
    with pytest.raises(ConfigError, match="no option of that name; the options are db"):
        query_options(OPTIONS, f"{name}X=1")
