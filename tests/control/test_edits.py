"""Edits: a new document, the old one untouched, and an error where there is nothing to edit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tollkeeper.control import edits
from tollkeeper.core.model import Limit
from tollkeeper.rules.document.model import Document, Override, Rule

FREE, PRO = (Limit(10, per=60),), (Limit(100, per=60),)
DOUBLE = Override("user", "42", multiply=2.0)
DOUBLE_ORDERS = replace(DOUBLE, rule="orders")
DOCUMENT = Document(
    rules=(Rule("orders", ("user",), FREE),),
    tiers={"free": FREE, "pro": PRO},
    assign={"user:42": "free", "tenant:acme": "pro"},
    allow=("sk_internal_*",),
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
    with pytest.raises(edits.Missing, match=r"'42' is assigned to no tier; .* like user:42"):
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
    with pytest.raises(edits.Missing) as error:
        edits.remove_override(DOCUMENT, *whose)
    assert words in str(error.value)


def test_tiers_are_changed_in_place_and_added_at_the_end() -> None:
    """So that the text of the others stays where it is."""
    changed = edits.set_tier(DOCUMENT, "free", PRO).tiers
    assert list(changed.items()) == [("free", PRO), ("pro", PRO)]
    assert list(edits.set_tier(DOCUMENT, "max", PRO).tiers) == ["free", "pro", "max"]


def test_a_tier_is_taken_out() -> None:
    """The others stay; one that is not there is an error that names those that are."""
    assert edits.remove_tier(DOCUMENT, "free").tiers == {"pro": PRO}
    with pytest.raises(edits.Missing, match=r"no tier 'max'; there are 'free', 'pro'"):
        edits.remove_tier(DOCUMENT, "max")
    with pytest.raises(edits.Missing, match=r"there is none yet"):
        edits.remove_tier(Document(), "max")


THREE = Document(rules=tuple(Rule(name, ("user",), FREE) for name in "abc"))


@pytest.mark.parametrize(
    ("rule", "before", "order"),
    [
        ("b", None, "abc"),
        ("d", None, "abcd"),
        ("d", "a", "dabc"),
        ("d", "c", "abdc"),
        ("c", "a", "cab"),
        ("a", "c", "bac"),
        ("b", "b", "abc"),
    ],
)
def test_a_rule_keeps_its_place_or_goes_where_it_is_put(
    rule: str, before: str | None, order: str
) -> None:
    """One with a known id takes that one's place; a new one goes last; `before` moves both."""
    new = Rule(rule, ("user",), PRO)
    rules = edits.put_rule(THREE, new, before).rules
    assert "".join(each.id for each in rules) == order
    assert [each for each in rules if each.limits == PRO] == [new]


def test_a_rule_cannot_go_before_one_that_is_not_there() -> None:
    """The error names those that are; of many, the first ten."""
    with pytest.raises(edits.Missing, match=r"no rule 'x'; there are 'a', 'b', 'c'$"):
        edits.put_rule(THREE, Rule("d", ("user",), PRO), "x")
    many = Document(rules=tuple(Rule(f"r{n}", ("user",), FREE) for n in range(1_000)))
    with pytest.raises(edits.Missing, match=r"'r9' and 990 more$"):
        edits.remove_rule(many, "x")


def test_a_rule_is_taken_out() -> None:
    """By its id."""
    assert [rule.id for rule in edits.remove_rule(THREE, "b").rules] == ["a", "c"]


def test_entries_of_a_list_are_added_once_and_taken_out() -> None:
    """At the end; each list has its own; what is not on it cannot be taken off."""
    more = edits.add_entry(DOCUMENT, "allow", "user:7")
    assert more.allow == ("sk_internal_*", "user:7")
    assert edits.add_entry(more, "allow", "sk_internal_*") is more
    assert edits.add_entry(more, "deny", "user:7").deny == ("user:7",)
    assert edits.remove_entry(more, "allow", "sk_internal_*").allow == ("user:7",)
    with pytest.raises(edits.Missing, match=r"'user:7' is not on the deny list"):
        edits.remove_entry(more, "deny", "user:7")


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
