"""Files of entries: what is written is read again, and every bad line is named."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.control.entry_files import (
    FORMS,
    PROBLEMS_MAX,
    EntryFile,
    FileForm,
    file_head,
    file_tail,
    read_entries,
    write_entries,
)
from ratekeeper.core.model import Limit
from ratekeeper.rules.document.model import Override
from ratekeeper.rules.document.reading import DocumentError
from ratekeeper.rules.entries import Entry, assignment, list_entry, override_entry

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def read(text: str | bytes, form: FileForm = "csv", entries_max: int = 1_000) -> EntryFile:
    content = text if isinstance(text, bytes) else text.encode()
    return read_entries(io.BytesIO(content), form, NOW, name="f", entries_max=entries_max)


def mistakes(text: str | bytes, form: FileForm = "csv") -> list[str]:
    with pytest.raises(DocumentError) as caught:
        read(text, form).check(())
    return [str(problem) for problem in caught.value.problems]


names = st.text(st.characters(exclude_categories=["Cc", "Cs", "Co", "Cn"]), min_size=1, max_size=9)
reasons = st.text(st.characters(exclude_categories=["Cc", "Cs", "Co", "Cn"]), min_size=1).filter(
    lambda text: text.strip() == text
)
limits = st.sampled_from(
    [(Limit(5, per=1),), (Limit(5, per=1), Limit(9, 60, "fixed_window", name="a"))]
)
overrides = st.builds(
    lambda attribute, value, limits, reason, hours: override_entry(
        Override(
            attribute,
            value,
            limits=limits,
            multiply=None if limits else 2.5,
            until=NOW + timedelta(hours=hours),
            reason=reason,
        ),
        NOW,
    ),
    st.sampled_from(["user", "api_key", "tenant"]),
    names,
    limits | st.just(()),
    reasons,
    st.integers(1, 1_000),
)
entries = st.one_of(
    st.builds(assignment, names.map("user:{}".format), st.sampled_from(["pro", "a, b", '"', "é"])),
    st.builds(list_entry, st.sampled_from(["allow", "deny"]), st.sampled_from(["10.0.0.0/8"])),
    overrides,
)


@pytest.mark.parametrize("form", FORMS)
@given(batches=st.lists(st.lists(entries, min_size=1, max_size=4), max_size=3))
def test_what_is_written_is_read_again(form: FileForm, batches: list[list[Entry]]) -> None:
    """In every format, with any text in it, written in one batch or in several."""
    parts = [write_entries(batch, form, first=at == 0) for at, batch in enumerate(batches)]
    text = file_head(form) + "".join(parts) + file_tail(form)
    found = read(text, form)
    assert found.entries == [entry for batch in batches for entry in batch]
    assert [problem.message for problem in found.problems] == (
        [] if batches else ["the file has no entries"]
    )


def test_columns_may_be_left_out() -> None:
    """Without `kind`, every row is an assignment; a byte order mark and empty lines are ignored."""
    found = read("\ufefftier,subject\r\npro,user:1\r\n\r\npro,tenant:a\r\n")
    assert found.entries == [assignment("user:1", "pro"), assignment("tenant:a", "pro")]
    assert list(found.lines) == [2, 4]


def test_an_override_may_end_after_a_duration() -> None:
    """As on the command line."""
    row = {"kind": "override", "subject": "ip:10.0.0.1", "multiply": 2, "until": "2h"}
    [entry] = read(json.dumps({**row, "reason": "test"}), "jsonl").entries
    assert json.loads(entry.data)["until"] == "2030-01-01T02:00:00Z"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("user:1,pro,x", "it has 3 fields, and the first line has 2"),
        (",pro", "subject is missing; for example user:42"),
        ("user:1,", "tier='' is not the name of a tier"),
        ("nobody,pro", '"nobody" does not name a user, API key or tenant'),
        ('"user:1', "it is not CSV: unexpected end of data"),
    ],
)
def test_bad_rows(row: str, problem: str) -> None:
    """The problem has the number of the line."""
    (found,) = mistakes(f"subject,tier\nuser:9,pro\n{row}")
    assert found.startswith(f"f:3:1: {problem}")


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ("name,tier", "unknown column 'name'; known: kind, subject, tier"),
        ("tier", "the first line has no column subject"),
        ("subject,subject", "a column is named twice"),
        ("", "the first line has no column subject"),
    ],
)
def test_bad_columns(head: str, problem: str) -> None:
    """The first line must name known columns."""
    (found,) = mistakes(f"{head}\n")
    assert found.startswith(f"f:1:1: {problem}")


OVERRIDE = {"kind": "override", "subject": "user:1", "multiply": 2, "until": "2h", "reason": "r"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "it is not JSON: "),
        ("[1]", "it is not an object such as "),
        ('{"subject": "user:1", "subject": "user:2"}', "it is not JSON: a name is given twice"),
        ({**OVERRIDE, "multiply": float("nan")}, "it is not JSON: NaN is not a number"),
        ({"kind": "tier", "subject": "a"}, "kind='tier' is none of assignment, override, allow"),
        ({"subject": "user:1", "tier": 7}, "tier=7 is int, not text"),
        ({"subject": "user:1", "tier": "pro", "colour": 1}, "assignment has no field 'colour'"),
        (
            {"kind": "deny", "subject": "user:a", "tier": "b"},
            "deny has no field 'tier'; it has kind,",
        ),
        ({**OVERRIDE, "until": "2029-12-31T00:00:00Z"}, "the end 2029-12-31T00:00:00+00:00 is in"),
        ({**OVERRIDE, "until": None}, "until: "),
        ({**OVERRIDE, "reason": ""}, "reason: "),
        ({**OVERRIDE, "subject": "acme"}, 'for: unknown field "acme"'),
        ({**OVERRIDE, "multiply": 0}, "multiply: 0 is not a number from 0.001 to 1000"),
    ],
)
def test_bad_objects(row: object, problem: str) -> None:
    """The problem says what is wrong and, of an override, in which field."""
    text = row if isinstance(row, str) else json.dumps(row)
    (found,) = mistakes(f'{{"subject": "user:9", "tier": "pro"}}\n{text}\n', "jsonl")
    assert found.startswith(f"f:2:1: {problem}")


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("{}", 1, "it is not a JSON list; for example ["),
        ('[\n{"subject": "user:9", "tier": "pro"},\n{]', 3, "it is not a JSON list of entries: "),
        ('[{"subject": "user:9", "tier": "pro"}\n', 2, "it is not a JSON list of entries: the "),
        ('[{"subject": "user:9", "tier": "pro"}]\nx', 2, "there is more text after the end"),
        ("[7]", 1, "it is not an object: "),
    ],
)
def test_bad_lists(text: str, line: int, problem: str) -> None:
    """The line is that of the object, or of the end of the text."""
    (found,) = mistakes(text, "json")
    assert found.startswith(f"f:{line}:1: {problem}")


def test_a_long_list_is_read_in_parts() -> None:
    """Objects that are cut by the end of a part are read whole."""
    rows = [{"subject": f"user:{n}", "tier": "pro"} for n in range(20_000)]
    found = read(json.dumps(rows), "json", 100_000)
    assert [entry.key for entry in found.entries] == [row["subject"] for row in rows]


def test_bytes_that_are_not_text_have_a_line() -> None:
    """They cannot be in a key or a tier."""
    (found,) = mistakes(b"subject,tier\nuser:1,pro\nuser:\xff,pro\n")
    assert found.startswith("f:3:1: ")


def test_problems_are_bounded_and_in_order() -> None:
    """Mistakes that only the database knows of stand between the others."""
    found = read("subject,tier\nuser:1,pro\nx,pro\nuser:2,gone\ny,pro\n")
    with pytest.raises(DocumentError) as caught:
        found.check([(1, "there is no tier")])
    assert [problem.line for problem in caught.value.problems] == [3, 4, 5]
    many = mistakes("subject,tier\n" + "x,pro\n" * (PROBLEMS_MAX + 50))
    assert len(many) == PROBLEMS_MAX


def test_the_number_of_entries_is_bounded() -> None:
    """The first line beyond the maximum is a problem."""
    found = read("subject,tier\nuser:1,pro\nuser:2,pro\nuser:3,pro\n", entries_max=2)
    assert [str(problem) for problem in found.problems] == [
        "f:4:1: there are more than 2 entries; split the file"
    ]
