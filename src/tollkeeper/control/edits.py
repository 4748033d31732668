"""Small changes of a document. Each gives a new document and leaves the old one as it is.

Whether the new document is right (a tier that there is, a subject that can be counted) is for its
grammar to say, when it is applied. An edit refuses only what it cannot do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final, Literal

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.model import Limits
from tollkeeper.rules.document.model import Document, Override, Rule

ListName = Literal["allow", "deny"]

_SHOWN_MAX: Final = 10


class Missing(ConfigError):
    """What was to be looked at, changed or taken out is not there."""


def assign(document: Document, subject: str, tier: str) -> Document:
    """Put `user:42`, `api_key:sk_1` or `tenant:acme` in a tier, in place of the one it had."""
    return replace(document, assign={**document.assign, subject: tier})


def unassign(document: Document, subject: str) -> Document:
    """Take somebody out of the tier that he was put in. Raises Missing if he was in none."""
    if subject not in document.assign:
        raise Missing(f"{show(subject)} is assigned to no tier; subjects are written like user:42")
    rest = {who: tier for who, tier in document.assign.items() if who != subject}
    return replace(document, assign=rest)


def add_override(document: Document, override: Override) -> Document:
    """Put an override before all others, in place of the one for the same subject and rule.

    The first that fits a request counts, so the newest wins over one that is less particular.
    """
    others = (each for each in document.overrides if _whose(each) != _whose(override))
    return replace(document, overrides=(override, *others))


def remove_override(
    document: Document, attribute: str, value: str, rule: str | None = None
) -> Document:
    """Take out the override of a subject for a rule, or with None the one for every rule.

    Raises Missing if there is none.
    """
    whose = (attribute, value, rule)
    others = tuple(each for each in document.overrides if _whose(each) != whose)
    if len(others) == len(document.overrides):
        raise Missing(
            f"there is no override for {show(attribute)} {show(value)} and "
            f"{'every rule' if rule is None else f'rule {show(rule)}'}; "
            f"{_known(document.overrides, attribute, value)}"
        )
    return replace(document, overrides=others)


def set_tier(document: Document, name: str, limits: Limits) -> Document:
    """Give a tier these limits; a name that is new makes a new tier, after the others."""
    return replace(document, tiers={**document.tiers, name: tuple(limits)})


def remove_tier(document: Document, name: str) -> Document:
    """Take out a tier. Raises Missing if there is none of this name.

    Who still names it (a rule, an assignment) is found when the document is applied.
    """
    if name not in document.tiers:
        raise Missing(f"there is no tier {show(name)}; {_there_are(document.tiers)}")
    rest = {tier: limits for tier, limits in document.tiers.items() if tier != name}
    return replace(document, tiers=rest)


def put_rule(document: Document, rule: Rule, before: str | None = None) -> Document:
    """Put a rule in the place of the one with its id; a new one after all others.

    With `before`, it goes before the rule of that id: the first that matches applies, so where a
    rule stands is part of what it says. Raises Missing if there is no such rule.
    """
    if before is None or before == rule.id:
        if any(each.id == rule.id for each in document.rules):
            found = (rule if each.id == rule.id else each for each in document.rules)
            return replace(document, rules=tuple(found))
        return replace(document, rules=(*document.rules, rule))
    others = [each for each in document.rules if each.id != rule.id]
    others.insert(_place_of(others, before), rule)
    return replace(document, rules=tuple(others))


def remove_rule(document: Document, rule_id: str) -> Document:
    """Take out a rule. Raises Missing if there is none with this id."""
    rules = list(document.rules)
    del rules[_place_of(rules, rule_id)]
    return replace(document, rules=tuple(rules))


def add_entry(document: Document, name: ListName, entry: str) -> Document:
    """Put an entry at the end of a list; one that is on it stays where it is."""
    entries: tuple[str, ...] = getattr(document, name)
    return document if entry in entries else _with_list(document, name, (*entries, entry))


def remove_entry(document: Document, name: ListName, entry: str) -> Document:
    """Take an entry off a list. Raises Missing if it is not on it."""
    entries: tuple[str, ...] = getattr(document, name)
    rest = tuple(each for each in entries if each != entry)
    if len(rest) == len(entries):
        raise Missing(
            f"{show(entry)} is not on the {name} list; an entry is named as it is written there"
        )
    return _with_list(document, name, rest)


def _with_list(document: Document, name: ListName, entries: tuple[str, ...]) -> Document:
    if name == "allow":
        return replace(document, allow=entries)
    return replace(document, deny=entries)


def _place_of(rules: list[Rule], rule_id: str) -> int:
    for place, rule in enumerate(rules):
        if rule.id == rule_id:
            return place
    raise Missing(f"there is no rule {show(rule_id)}; {_there_are(rule.id for rule in rules)}")


def _there_are(names: Iterable[str]) -> str:
    found = list(names)
    shown = ", ".join(map(show, found[:_SHOWN_MAX]))
    if len(found) > _SHOWN_MAX:
        return f"there are {shown} and {len(found) - _SHOWN_MAX:,} more"
    return f"there are {shown}" if found else "there is none yet"


def _whose(override: Override) -> tuple[str, str, str | None]:
    return override.attribute, override.value, override.rule


def _known(overrides: Iterable[Override], attribute: str, value: str) -> str:
    rules = [
        "every rule" if each.rule is None else show(each.rule)
        for each in overrides
        if (each.attribute, each.value) == (attribute, value)
    ]
    return f"it has some for {', '.join(rules)}" if rules else "it has none for any rule"
