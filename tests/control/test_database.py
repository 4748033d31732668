"""URLs of databases: which there are, what is wrong with the others, and never a password."""

from __future__ import annotations

import traceback

import pytest

from tollkeeper.control.database import Database
from tollkeeper.errors import ConfigError

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("sqlite:///rules.db", "sqlite:///rules.db"),
        ("sqlite:////var/lib/rules.db", "sqlite:////var/lib/rules.db"),
        (f"postgresql://ann:{SECRET}@db/rules", "postgresql://db/rules"),
        (f"postgres://ann:{SECRET}@db:5433/rules", "postgresql://db:5433/rules"),
        (f"postgresql:///rules?host=/run/pg&password={SECRET}", "postgresql:///rules"),
    ],
)
def test_urls_that_name_a_database(url: str, name: str) -> None:
    """Its name for messages has the place, and neither user nor password."""
    database = Database(url)
    assert database.name == name
    assert database.is_postgresql == (not url.startswith("sqlite"))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (None, "None is not a URL"),
        ("", "cannot be read"),
        ("rules.db", "cannot be read"),
        (f"postgresql://ann:{SECRET}@db:port/rules", "cannot be read"),
        (f"mysql://ann:{SECRET}@db/rules", "no rules in 'mysql'"),
        (f"postgresql+psycopg://ann:{SECRET}@db/rules", "no rules in 'postgresql+psycopg'"),
        (f"postgresql://ann:{SECRET}@db", "names no database on 'db'"),
        ("sqlite://", "in memory is gone with its connection"),
        ("sqlite:///:memory:", "in memory is gone with its connection"),
        ("sqlite://rules.db", "in memory"),
        ("sqlite://folder/rules.db", "three slashes"),
        (f"sqlite:///rules.db?key={SECRET}", "three slashes and no options"),
    ],
)
def test_urls_that_name_none(url: str, words: str) -> None:
    """What is wrong and a right one; the password is not in the message, nor in the traceback."""
    with pytest.raises(ConfigError) as error:
        Database(url)
    assert words in str(error.value)
    assert "sqlite:///rules.db" in str(error.value)
    assert SECRET not in "".join(traceback.format_exception(error.value, limit=0))
