"""Reading documents from text, files and data; any input is a document or a DocumentError."""

from __future__ import annotations

import copy
import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ratekeeper.core.errors import ConfigError
from ratekeeper.core.model import Limit
from ratekeeper.rules.document import reading as module
from ratekeeper.rules.document.model import Document, LimitsOfOne
from ratekeeper.rules.document.reading import (
    DocumentError,
    DocumentPositions,
    from_data,
    read,
    read_file,
)
from ratekeeper.rules.document.tree import PROBLEMS_MAX, DocumentProblem
from tests.rules.documents import Data, documents

EXAMPLE = Path(__file__).parents[3] / "examples/limits.yaml"
SMALL = "version: 1\nrules:\n  - id: all\n    by: [user]\n    limits: [10/second]\n"

DESIGN = """\
version: 1
tiers: {free: ["100/minute"], pro: ["1000/minute burst 200"], enterprise: ["10000/minute"]}
rules:
  - id: orders
    match: {endpoint: "/v1/orders/*", method: [POST]}
    by: [api_key]                     # what is counted separately
    limits: ["10/second", "100/minute burst 50"]
    tiers: {pro: ["50/second", "1000/minute"]}
    keys: {sk_prod_vip_001: ["1000/minute"]}
    cost: 1
    consistency: strict               # strict
    on_failure: local                 # open | closed | local
    mode: enforce                     # enforce | shadow | off
    rollout: 100                      # per cent of keys
  - id: login
    match: {endpoint: /login}
    by: [ip]
    limits: [{limit: 5, per: 1m, algorithm: sliding_window_log}]
    on_failure: closed
allow: ["api_key:sk_internal_*"]
deny: ["api_key:sk_revoked_*"]
"""


def test_the_document_of_the_design() -> None:
    """Every value is read into its field."""
    document = read(DESIGN)
    orders, login = document.rules
    assert (orders.id, orders.by, orders.on_failure) == ("orders", ("api_key",), "local")
    assert orders.match.endpoint == ("/v1/orders/*",)
    assert orders.limits == (Limit(10, per=1), Limit(100, per=60, burst=50))
    assert orders.tiers == {"pro": LimitsOfOne((Limit(50, per=1), Limit(1000, per=60)))}
    assert orders.keys == {"sk_prod_vip_001": LimitsOfOne((Limit(1000, per=60),))}
    assert login.limits == (Limit(5, per=60, algorithm="sliding_window_log"),)
    assert list(document.tiers) == ["free", "pro", "enterprise"]
    assert (document.allow, document.deny) == (
        ("api_key:sk_internal_*",),
        ("api_key:sk_revoked_*",),
    )


def test_the_example_is_valid() -> None:
    """The example in the repository can be read."""
    document = read_file(EXAMPLE)
    assert [rule.id for rule in document.rules][:3] == ["login", "orders", "api"]
    assert len(document.overrides) == 2


def test_an_error_names_file_line_and_a_correct_value() -> None:
    """The first line of the message is enough to correct the mistake."""
    with pytest.raises(DocumentError) as caught:
        read(SMALL.replace("10/second", "10/fortnight"), "limits.yaml")
    assert str(caught.value) == (
        'limits.yaml:5:14: rules[0].limits[0]: "10/fortnight" is not a rate: expected a unit: ms, '
        "second, minute, hour, day, week, month or year at character 4; "
        'for example "10/second"'
    )
    (problem,) = caught.value.problems
    assert (problem.source, problem.line, problem.column) == ("limits.yaml", 5, 14)
    assert problem.where == "rules[0].limits[0]"
    assert isinstance(caught.value, ConfigError)


def test_a_message_shows_the_first_twenty() -> None:
    """`problems` has all; the message says how many more there are."""
    with pytest.raises(DocumentError) as caught:
        read("version: 1\ndeny:\n" + "- 5\n" * 50)
    lines = str(caught.value).splitlines()
    assert len(caught.value.problems) == 50
    assert len(lines) == 21
    assert lines[-1] == "… and 30 more"


def test_the_number_of_problems_is_bounded() -> None:
    """Reading stops after PROBLEMS_MAX mistakes."""
    with pytest.raises(DocumentError) as caught:
        from_data({"version": 1, "deny": [5] * 100_000})
    assert len(caught.value.problems) == PROBLEMS_MAX


def test_an_error_survives_pickling_and_copying() -> None:
    """A worker process can send it to its parent."""
    error = DocumentError((DocumentProblem("a.yaml", 1, 2, "rules", "wrong"),))
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), str(again)) == (DocumentError, "a.yaml:1:2: rules: wrong")
        assert again.problems == error.problems


def test_json_is_read_like_yaml() -> None:
    """JSON gives the same document, and mistakes have their lines."""
    data = {"version": 1, "rules": [{"id": "all", "by": ["user"], "limits": ["10/second"]}]}
    assert read(json.dumps(data)) == read(SMALL) == from_data(data)
    data["rules"][0]["mode"] = "of"  # type: ignore[index]  # it is a list
    with pytest.raises(
        DocumentError, match=r'^a\.json:12:15: rules\[0\]\.mode: unknown value "of"'
    ):
        read(json.dumps(data, indent=2), "a.json")


def test_data_has_no_lines() -> None:
    """The problems of plain data have a path, but no line."""
    with pytest.raises(DocumentError, match=r"^<data>: rules\[0\]\.rollout: 101 is not a whole"):
        from_data({"version": 1, "rules": [{"id": "a", "by": [], "limits": "5/s", "rollout": 101}]})


# ----------------------------------------------------------------------------------------- files


def test_a_file_is_read(tmp_path: Path) -> None:
    """By a path or its text, with or without a byte order mark; errors name the file."""
    path = tmp_path / "limits.yaml"
    path.write_text(SMALL, "utf-8-sig")
    assert read_file(path) == read_file(str(path)) == read(SMALL)
    path.write_text("version: 3", "utf-8")
    with pytest.raises(DocumentError, match=r"limits\.yaml:1:10: version: unsupported version 3"):
        read_file(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.yaml", None, "none.yaml: cannot be read: No such file or directory"),
        (".", None, ": cannot be read: Is a directory"),
        ("latin.yaml", b"version: 1 # \xe9", "latin.yaml: byte 14 is not UTF-8; save the file as"),
        ("wide.yaml", "version: 1".encode("utf-16"), "wide.yaml: byte 1 is not UTF-8; save the"),
        ("a\0b", None, "cannot be read: embedded null byte"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    """The error is a DocumentError that names the file."""
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DocumentError) as caught:
        read_file(path)
    assert message in str(caught.value)


def test_a_file_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is too large is not read to its end."""
    path = tmp_path / "long.yaml"
    path.write_text("é" * 20)
    monkeypatch.setattr(module, "BYTES_MAX", 9)
    with pytest.raises(DocumentError, match="larger than 16 MiB; is this a rule document"):
        read_file(path)


def test_read_rejects_a_path() -> None:
    """The error of `read` suggests `read_file`."""
    path: Any = EXAMPLE
    with pytest.raises(DocumentError, match=r"to read a file, use read_file\(\)"):
        read(path)


# --------------------------------------------------------------------------------------- any input

WORDS = [
    *[
        "version",
        "1",
        "rules",
        "tiers",
        "assign",
        "allow",
        "deny",
        "overrides",
        "id",
        "by",
        "match",
    ],
    *["limits", "keys", "cost", "mode", "off", "rollout", "scale", "low", "for", "user", "until"],
    *[
        "multiply",
        "per",
        "limit",
        "endpoint",
        "5/s",
        "{",
        "}",
        "[",
        "]",
        ":",
        ": ",
        ",",
        "- ",
        "\n",
    ],
    *["\n  ", "&a ", "*a", "<<", "? ", "|\n", ">\n", "'", '"', "#", "!!", "%", "---\n", "~", "\t"],
    *["re:(", "10.0.0.0/8", "*", "{id}", "2026-01-01T00:00:00Z", "1e9", "-1", ".nan", "0x1F"],
]


@given(st.text() | st.lists(st.sampled_from(WORDS), max_size=30).map("".join))
@example("{version: 1, rules: [{id: a, by: user, limits: [{limit: 5, per: 1e400}]}]}")
@example("version: 1\noverrides: [{for: {user: a}, until: 9999-12-31T23:59:59-23:59}]")
def test_any_text_is_a_document_or_rejected(text: str) -> None:
    """No text raises another error."""
    with suppress(DocumentError):
        assert isinstance(read(text), Document)


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=10),
    st.sampled_from(WORDS),
    st.binary(max_size=3),
    st.datetimes(),
    st.dates(),
    st.decimals(allow_nan=False),
    st.builds(object),
    st.builds(pow, st.just(10), st.just(5_000)),  # more digits than Python prints
)
ANYTHING = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(WORDS) | _SCALARS, inner, max_size=4),
    ),
    max_leaves=10,
)


@given(ANYTHING)
def test_any_data_is_a_document_or_rejected(data: Any) -> None:
    """No data raises another error, even if its version is valid."""
    for candidate in (data, {"version": 1, "rules": [data], "tiers": data}):
        with suppress(DocumentError):
            assert isinstance(from_data(candidate), Document)


@given(documents(), st.data())
def test_one_value_replaced_by_anything(data: Data, draw: st.DataObject) -> None:
    """A valid document with any one part replaced is a document or rejected."""
    changed: Any = copy.deepcopy(data)
    inner = changed
    while True:
        places = list(inner) if isinstance(inner, dict) else range(len(inner))
        if not places:
            return
        place = draw.draw(st.sampled_from(places))
        if isinstance(inner[place], dict | list) and draw.draw(st.booleans()):
            inner = inner[place]
            continue
        inner[place] = draw.draw(ANYTHING)
        break
    with suppress(DocumentError):
        assert isinstance(from_data(changed), Document)


def test_the_positions_of_paths() -> None:
    """A path that the text does not have gets the position of the closest path above it."""
    text = (
        "version: 1\n"
        "tiers:\n"
        "  'a.b': 1/s\n"
        "rules:\n"
        "- id: a\n"
        "  by: user\n"
        "  limits:\n"
        "  - 1/s\n"
        "- {id: b, by: user}\n"
    )
    wanted = {
        'tiers["a.b"]': 3,
        "rules[0].limits[0]": 8,
        "rules[0].match.tier": 5,
        "rules[1].id": 9,
    }
    wanted |= {"rules[7]": 5, "rules": 5, "deny[0]": 1}
    positions = DocumentPositions(text)
    assert {path: positions.of(path).line for path in wanted} == wanted
    assert positions.of("rules[1].id") == (9, 8)
    assert DocumentPositions('version: 1\ndeny: "*"\n').of("deny[0]") == (2, 7)
    assert DocumentPositions("a: [").of("a") == (1, 1)
