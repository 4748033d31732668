"""The JSON of checks, and queries: read strictly, and into the same Request as by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper import Request
from tollkeeper.core.errors import ConfigError, TollkeeperError
from tollkeeper.core.model import REQUEST_FIELDS
from tollkeeper.service.http.wire import CheckBody, reader_of, request_of_query

read = reader_of(CheckBody)

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
fields = st.fixed_dictionaries(
    {},
    optional={**dict.fromkeys(REQUEST_FIELDS, texts), "attributes": st.dictionaries(texts, texts)},
)


@given(fields)
def test_a_body_is_the_request_that_it_says(given_fields: dict[str, Any]) -> None:
    """Equal to one made by its constructor, whatever is left out; and it can be copied."""
    found = read(json.dumps(given_fields).encode()).request()
    assert found == Request(**given_fields)
    assert replace(found, user="x").user == "x"
    assert asdict(found) == asdict(Request(**given_fields))


@given(fields)
def test_a_query_says_the_same(given_fields: dict[str, Any]) -> None:
    """Fields by name, attributes with a prefix."""
    attributes = {n: v for n, v in given_fields.pop("attributes", {}).items() if n}
    query = {**given_fields, **{f"attributes.{n}": v for n, v in attributes.items()}}
    found = request_of_query(urlencode(query).encode())
    assert found == Request(**given_fields, attributes=attributes)


@given(st.binary(max_size=200))
def test_no_body_ends_in_another_error(body: bytes) -> None:
    """A ConfigError, or a request."""
    try:
        read(body)
    except TollkeeperError:
        return


@given(st.binary(max_size=200))
def test_no_query_ends_in_another_error(query: bytes) -> None:
    """A ConfigError, or a request."""
    try:
        request_of_query(query)
    except TollkeeperError:
        return


QUERIES = [
    (b"usr=1", "'usr'"),
    (b"attributes.=1", "'attributes.'"),
    (b"user=1&user=2", "twice"),
    (b"user=%ff", "UTF-8"),
    (b"user=\xff", "UTF-8"),
    (b"user=a%00b", "NUL"),
    (b"x" * 20_000, "16,384 bytes"),
    (b"&".join(b"attributes.a%d=x" % n for n in range(100)), "71 fields"),
]


@pytest.mark.parametrize(("query", "said"), QUERIES)
def test_a_query_that_is_wrong_says_where(query: bytes, said: str) -> None:
    """The field, or the bound."""
    with pytest.raises(ConfigError, match=said):
        request_of_query(query)


def test_requests_without_attributes_share_nothing_that_changes() -> None:
    """One mapping for all of them, which stays empty."""
    one = read(b"{}").request()
    other = read(b'{"attributes": {"a": "b"}}').request()
    assert one.attributes == {}
    assert other.attributes == {"a": "b"}
