"""Edits: a new document, the old one untouched, and an error where there is nothing to edit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tollkeeper.control import edits
from tollkeeper.errors import ConfigError
from tollkeeper.match.rules import Document, Override, Rule
from tollkeeper.model import Limit

FREE, PRO = (Limit(10, per=60),), (Limit(100, per=60),)
DOUBLE = Override("user", "42", multiply=2.0)
DOUBLE_ORDERS = replace(DOUBLE, rule="orders")
DOCUMENT = Document(
    rules=(Rule("orders", ("user",), FREE),),
    tiers={"free": FREE, "pro": PRO},
    assign={"user:42": "free", "tenant:acme": "pro"},
    overrides=(DOUBLE, DOUBLE_ORDERS),
)


def test_assign_adds_or_replaces_one() -> None:
    """Nobody else is touched, and whoever had a tier keeps his place."""
    assert edits.assign(DOCUMENT, "user:7", "pro").assign == {**DOCUMENT.assign, "user:7": "pro"}
    moved = edits.assign(DOCUMENT, "user:42", "pro")
    assert list(moved.assign.items()) == [("user:42", "pro"), ("tenant:acme", "pro")]


def test_unassign_takes_out_one() -> None:
    """The others stay."""
    assert edits.unassign(DOCUMENT, "user:42").assign == {"tenant:acme": "pro"}


def test_unassign_of_nobody_is_an_error() -> None:
    """It says who is not assigned, and how subjects are written."""
    with pytest.raises(ConfigError, match=r"'42' is assigned to no tier; .* like user:42"):
        edits.unassign(DOCUMENT, "42")


def test_a_new_override_goes_first() -> None:
    """The first that fits counts: one for a rule would do nothing behind one for every rule."""
    new = Override("user", "42", rule="login", multiply=3.0)
    assert edits.add_override(DOCUMENT, new).overrides == (new, DOUBLE, DOUBLE_ORDERS)


@pytest.mark.parametrize(
    ("old", "rest"), [(DOUBLE, DOUBLE_ORDERS), (DOUBLE_ORDERS, DOUBLE)], ids=["every", "orders"]
)
def test_an_override_takes_the_place_of_its_like(old: Override, rest: Override) -> None:
    """For the same subject and rule there is one; for another rule it is another one."""
    new = replace(old, multiply=None, limits=PRO)
    assert edits.add_override(DOCUMENT, new).overrides == (new, rest)


def test_removing_an_override() -> None:
    """By subject and rule; None is the one for every rule, not all of them."""
    assert edits.remove_override(DOCUMENT, "user", "42").overrides == (DOUBLE_ORDERS,)
    assert edits.remove_override(DOCUMENT, "user", "42", "orders").overrides == (DOUBLE,)


@pytest.mark.parametrize(
    ("whose", "words"),
    [
        (("user", "7", None), "for 'user' '7' and every rule; it has none for any rule"),
        (("user", "42", "login"), "'42' and rule 'login'; it has some for every rule, 'orders'"),
        (("tenant", "42", None), "it has none for any rule"),
    ],
)
def test_removing_an_override_that_is_not_there(
    whose: tuple[str, str, str | None], words: str
) -> None:
    """The error says for whom, and which ones there are."""
    with pytest.raises(ConfigError) as error:
        edits.remove_override(DOCUMENT, *whose)
    assert words in str(error.value)


def test_tiers_are_changed_in_place_and_added_at_the_end() -> None:
    """So that the text of the others stays where it is."""
    changed = edits.set_tier(DOCUMENT, "free", PRO).tiers
    assert list(changed.items()) == [("free", PRO), ("pro", PRO)]
    assert list(edits.set_tier(DOCUMENT, "max", PRO).tiers) == ["free", "pro", "max"]


def test_the_old_document_stays_as_it_was() -> None:
    """All edits at once, and the document that they began with is equal to a copy of it."""
    copy = replace(DOCUMENT, assign=dict(DOCUMENT.assign), tiers=dict(DOCUMENT.tiers))
    document = edits.assign(DOCUMENT, "user:7", "pro")
    document = edits.unassign(document, "user:42")
    document = edits.add_override(document, replace(DOUBLE, value="7"))
    document = edits.remove_override(document, "user", "42")
    document = edits.set_tier(document, "max", PRO)
    assert document != DOCUMENT
    assert copy == DOCUMENT
