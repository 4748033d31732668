"""Entries: their form, and the errors for wrong ones."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ratekeeper.core.errors import ConfigError
from ratekeeper.rules.document.model import Override
from ratekeeper.rules.entries import (
    Entry,
    assignment,
    end_of,
    list_entry,
    override_entry,
    override_of,
    parse_override,
)

NOW = datetime(2030, 1, 1, tzinfo=UTC)
DOUBLE = Override(
    "tenant", "acme", multiply=2.0, until=NOW + timedelta(hours=2), reason="launch", id="launch-1"
)


def test_an_override_survives_its_entry() -> None:
    """The entry holds everything: owner, factor, end, reason and id."""
    assert override_of(override_entry(DOUBLE, NOW)) == DOUBLE


def test_an_override_without_an_id_gets_one() -> None:
    """Two of them have different ids."""
    first, second = (override_entry(replace(DOUBLE, id=""), NOW).key for _ in range(2))
    assert first != second
    assert first.startswith("ov_")


def test_an_address_has_one_spelling() -> None:
    """The entry of an address or network is found whichever way a caller writes it."""
    entry = override_entry(replace(DOUBLE, attribute="ip", value="2001:DB8:0::/32"), NOW)
    assert override_of(entry).value == "2001:db8::/32"
    assert list_entry("deny", "ip:10.0.0.0/8").key == list_entry("deny", "10.0.0.0/8").key


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"reason": ""}, "no reason; say why"),
        ({"until": None}, "no end; write until: 2h"),
        ({"until": NOW}, "is in the past; it is 2030-01-01"),
        ({"until": NOW + timedelta(days=3_661)}, "more than 3,660 days ahead"),
        ({"id": "user:42"}, '"user:42" is not an id'),
        ({"id": "x" * 65}, "is not an id: at most 64"),
        ({"attribute": "ip", "value": "10.0.0"}, "'10.0.0' is not an address"),
    ],
)
def test_wrong_overrides_are_rejected(changed: dict[str, Any], words: str) -> None:
    """The error says what is wrong and what would be right."""
    with pytest.raises(ConfigError) as error:
        override_entry(replace(DOUBLE, **changed), NOW)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("2h", NOW + timedelta(hours=2)),
        ("1.5 days", NOW + timedelta(hours=36)),
        ("2030-01-02T00:00:00Z", NOW + timedelta(days=1)),
        ("2030-01-01T02:00:00+01:00", NOW + timedelta(hours=1)),
    ],
)
def test_an_end_is_a_duration_or_a_time(text: str, end: datetime) -> None:
    """Both are returned as a time in UTC."""
    assert end_of(text, NOW) == end
    data = {"for": {"user": "42"}, "multiply": 2, "until": text}
    assert parse_override(data, now=NOW).until == end


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("soon", "'soon' is not an end; write a duration such as 2h"),
        ("2 parsecs", "is not an end"),
        ("2030-01-02T00:00:00", "a time with its zone"),
        ("0s", "is in the past"),
        ("2029-12-31T00:00:00Z", "is in the past"),
        ("999999999 years", "is not an end"),
        ("", "is not an end"),
    ],
)
def test_wrong_ends_are_rejected(text: str, words: str) -> None:
    """An end is never guessed."""
    with pytest.raises(ConfigError) as error:
        end_of(text, NOW)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("subject", "tier", "words"),
    [
        ("42", "pro", 'write "user:42"'),
        ("ip:10.0.0.1", "pro", 'write "user:42"'),
        ("user:", "pro", 'write "user:42"'),
        ("user:\ud800", "pro", "bytes in UTF-8"),
        ("user:a\0b", "pro", "without null characters"),
        ("user:42", "", "is not the name of a tier"),
        (7, "pro", "subject=7 is int"),
    ],
)
def test_wrong_assignments_are_rejected(subject: Any, tier: str, words: str) -> None:
    """A subject is a user, an API key or a tenant that a database can hold."""
    with pytest.raises(ConfigError) as error:
        assignment(subject, tier)
    assert words in str(error.value)


def test_an_assignment_is_its_subject_and_tier() -> None:
    """Nothing else is stored."""
    assert assignment("user:42", "pro") == Entry("assignment", "user:42", "pro")
