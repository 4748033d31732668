"""Edits return a new document and leave the old one unchanged; diffs are those of difflib."""

from __future__ import annotations

import difflib
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.control import edits
from ratekeeper.control.edits import unified_diff
from ratekeeper.core.errors import ConfigError
from ratekeeper.core.model import Limit
from ratekeeper.rules.document.model import Document, LimitsOfOne, Override, Rule

FREE, PRO = (Limit(10, per=60),), (Limit(100, per=60),)
DOUBLE = Override("user", "42", multiply=2.0)
DOUBLE_ORDERS = replace(DOUBLE, rule="orders")
DOCUMENT = Document(
    rules=(Rule("orders", ("user",), FREE),),
    tiers={"free": LimitsOfOne(FREE), "pro": LimitsOfOne(PRO)},
    assign={"user:42": "free", "tenant:acme": "pro"},
    allow=("api_key:sk_internal_*",),
    overrides=(DOUBLE, DOUBLE_ORDERS),
)


def test_unassign_removes_one_subject() -> None:
    """The other subjects stay."""
    assert edits.unassign(DOCUMENT, "user:42").assign == {"tenant:acme": "pro"}


def test_unassigning_an_unassigned_subject_raises() -> None:
    """The error names the subject and shows how subjects are written."""
    with pytest.raises(edits.NotFound, match=r"'42' is assigned to no tier; .* like user:42"):
        edits.unassign(DOCUMENT, "42")


def test_removing_an_override() -> None:
    """None means the override that names no rule, not all overrides."""
    assert edits.remove_override(DOCUMENT, "user", "42").overrides == (DOUBLE_ORDERS,)
    assert edits.remove_override(DOCUMENT, "user", "42", "orders").overrides == (DOUBLE,)


@pytest.mark.parametrize(
    ("whose", "words"),
    [
        (("user", "7", None), "for 'user' '7' and every rule by user; it has no override"),
        (
            ("user", "42", "login"),
            "rule 'login'; it has overrides for every rule by user, 'orders'",
        ),
        (("tenant", "42", None), "it has no override"),
    ],
)
def test_removing_a_missing_override_raises(whose: tuple[str, str, str | None], words: str) -> None:
    """The error names the subject and its overrides."""
    with pytest.raises(edits.NotFound) as error:
        edits.remove_override(DOCUMENT, *whose)
    assert words in str(error.value)


def test_tiers_are_changed_in_place_and_added_at_the_end() -> None:
    """The text of the other tiers does not move."""
    changed = edits.set_tier(DOCUMENT, "free", PRO).tiers
    assert list(changed.items()) == [("free", LimitsOfOne(PRO)), ("pro", LimitsOfOne(PRO))]
    assert list(edits.set_tier(DOCUMENT, "max", PRO).tiers) == ["free", "pro", "max"]


def test_remove_tier() -> None:
    """The others stay; a missing tier is an error that names the existing ones."""
    assert edits.remove_tier(DOCUMENT, "free").tiers == {"pro": LimitsOfOne(PRO)}
    with pytest.raises(edits.NotFound, match=r"no tier 'max'; there are 'free', 'pro'"):
        edits.remove_tier(DOCUMENT, "max")
    with pytest.raises(edits.NotFound, match=r"there is none yet"):
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
def test_put_rule_replaces_appends_or_moves(rule: str, before: str | None, order: str) -> None:
    """A known id is replaced, a new rule goes last, and `before` moves both."""
    new = Rule(rule, ("user",), PRO)
    rules = edits.put_rule(THREE, new, before).rules
    assert "".join(each.id for each in rules) == order
    assert [each for each in rules if each.limits == PRO] == [new]


def test_a_missing_rule_raises() -> None:
    """The error names the existing rules; of many, the first ten."""
    with pytest.raises(edits.NotFound, match=r"no rule 'x'; there are 'a', 'b', 'c'$"):
        edits.put_rule(THREE, Rule("d", ("user",), PRO), "x")
    many = Document(rules=tuple(Rule(f"r{n}", ("user",), FREE) for n in range(1_000)))
    with pytest.raises(edits.NotFound, match=r"'r9' and 990 more$"):
        edits.remove_rule(many, "x")


def test_remove_rule() -> None:
    """The rule is found by its id."""
    assert [rule.id for rule in edits.remove_rule(THREE, "b").rules] == ["a", "c"]


def test_list_entries_are_removed() -> None:
    """Each list is separate; removing a missing entry raises."""
    document = replace(DOCUMENT, allow=("api_key:sk_internal_*", "user:7"))
    assert edits.remove_entry(document, "allow", "api_key:sk_internal_*").allow == ("user:7",)
    with pytest.raises(edits.NotFound, match=r"'user:7' is not on the deny list"):
        edits.remove_entry(document, "deny", "user:7")
    written = replace(DOCUMENT, allow=("10.0.0.0/8",))
    assert edits.remove_entry(written, "allow", "ip:10.0.0.0/8").allow == ()


def test_edits_leave_the_old_document_unchanged() -> None:
    """After several edits, the original document is equal to its copy."""
    copy = replace(DOCUMENT, assign=dict(DOCUMENT.assign), tiers=dict(DOCUMENT.tiers))
    document = edits.unassign(DOCUMENT, "user:42")
    document = edits.remove_override(document, "user", "42")
    document = edits.set_tier(document, "max", PRO)
    assert document != DOCUMENT
    assert copy == DOCUMENT


# ── Differences ────────────────────────────────────────────────────────────────────────────────

texts = st.lists(st.sampled_from("abcde"), max_size=20).map(
    lambda lines: "".join(map("{}\n".format, lines))
)


def patched(old: list[str], diff: list[str]) -> list[str]:
    """Apply a diff as `patch` does: an independent reading of the format."""
    new: list[str] = []
    place = 0
    for line in diff[2:]:
        if line.startswith("@@"):
            start, _, length = line.split()[1][1:].partition(",")
            # The position of an empty range is the line before it.
            begin = int(start) - (length != "0")
            new += old[place:begin]
            place = begin
            continue
        if line[0] in " -":
            assert old[place] == line[1:]
            place += 1
        if line[0] in " +":
            new.append(line[1:])
    return new + old[place:]


@given(texts, texts)
def test_a_diff_turns_the_old_text_into_the_new_one(old: str, new: str) -> None:
    """Applied to the old lines, it gives the new ones."""
    diff = unified_diff(old, new, "a", "b")
    assert patched(old.splitlines(), diff.splitlines()) == new.splitlines()


@given(texts)
def test_the_diff_of_equal_texts_is_empty(text: str) -> None:
    """It has no header either."""
    assert unified_diff(text, text, "a", "b") == ""


def test_a_diff_equals_that_of_difflib() -> None:
    """Headers, line numbers and context, for changes at both ends and in the middle."""
    old = [f"line {number}" for number in range(40)]
    several: list[dict[int, list[str]]] = [
        *({0: []}, {39: []}, {20: ["new"]}, {3: ["x", "y"], 18: [], 36: ["z"]})
    ]
    for changed in several:
        new = [each for n, line in enumerate(old) for each in changed.get(n, [line])]
        expected = difflib.unified_diff(old, new, "a", "b", lineterm="")
        assert unified_diff("\n".join(old), "\n".join(new), "a", "b") == "\n".join(expected)


def test_the_diff_of_long_texts_is_quick() -> None:
    """100,000 lines, most of them 1,000 times: under a second, because few are compared."""
    old = [f"line {number % 100}" for number in range(100_000)]
    new = [*old[:50_000], "new", *old[50_001:]]
    before = time.process_time()
    diff = unified_diff("\n".join(old), "\n".join(new), "a", "b")
    assert time.process_time() - before < 1
    assert diff.splitlines()[2] == "@@ -49998,7 +49998,7 @@"


TRIED = replace(
    DOCUMENT,
    rules=(Rule("new", ("user",), PRO, mode="shadow", replaces="orders"), *DOCUMENT.rules),
)


def test_promote_and_demote_are_each_other_s_reverse() -> None:
    """A promotion changes the mode alone; a second one changes nothing."""
    promoted = edits.promote(TRIED, "new")
    assert promoted.rules == (replace(TRIED.rules[0], mode="enforce"), TRIED.rules[1])
    assert edits.promote(promoted, "new") == promoted
    assert edits.demote(promoted, "new") == TRIED


def test_rules_that_cannot_be_promoted_or_demoted() -> None:
    """The error says why, and what to do instead."""
    off = replace(TRIED, rules=(replace(TRIED.rules[0], mode="off"), TRIED.rules[1]))
    with pytest.raises(ConfigError, match=r"rule 'new' is off, so .* write mode: shadow first"):
        edits.promote(off, "new")
    with pytest.raises(ConfigError, match="'orders' replaces no other rule, so its requests"):
        edits.demote(TRIED, "orders")
    for edit in (edits.promote, edits.demote):
        with pytest.raises(edits.NotFound, match="no rule 'gone'; there are 'new', 'orders'"):
            edit(TRIED, "gone")


def test_a_new_rule_goes_before_the_one_that_it_replaces() -> None:
    """`before` is not necessary. Removing the old rule makes the new one independent."""
    last = Rule("last", ("ip",), FREE)
    document = replace(DOCUMENT, rules=(*DOCUMENT.rules, last))
    added = edits.put_rule(document, TRIED.rules[0])
    assert [rule.id for rule in added.rules] == ["new", "orders", "last"]
    alone = edits.remove_rule(added, "orders")
    assert alone.rules == (replace(TRIED.rules[0], replaces=None), last)


def test_what_a_document_would_undo() -> None:
    """Parts that changed since the last apply, unless the new document has the same change."""
    current = replace(
        edits.set_tier(DOCUMENT, "free", PRO),
        assign={**DOCUMENT.assign, "user:42": "pro"},
        rules=(Rule("orders", ("user",), PRO),),
        deny=("user:x",),
    )
    changed = ["rule orders", "tier free", "assignment of user:42", "entry of deny: user:x"]
    assert edits.undone(DOCUMENT, current, DOCUMENT) == changed
    assert edits.undone(DOCUMENT, current, replace(DOCUMENT, rules=())) == changed
    assert (
        edits.undone(DOCUMENT, current, replace(DOCUMENT, deny=("user:x", "user:y")))
        == changed[:-1]
    )
    assert edits.undone(DOCUMENT, current, current) == []
    assert edits.undone(DOCUMENT, DOCUMENT, Document()) == []
