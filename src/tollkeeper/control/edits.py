"""Small changes of a document. Each gives a new document and leaves the old one as it is.

Whether the new document is right (a tier that there is, a subject that can be counted) is for its
grammar to say, when it is applied. An edit refuses only what it cannot do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tollkeeper.errors import ConfigError, show
from tollkeeper.match.rules import Document, Limits, Override


def assign(document: Document, subject: str, tier: str) -> Document:
    """Put `user:42`, `api_key:sk_1` or `tenant:acme` in a tier, in place of the one it had."""
    return replace(document, assign={**document.assign, subject: tier})


def unassign(document: Document, subject: str) -> Document:
    """Take somebody out of the tier that he was put in. Raises ConfigError if he was in none."""
    if subject not in document.assign:
        raise ConfigError(
            f"{show(subject)} is assigned to no tier; subjects are written like user:42"
        )
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

    Raises ConfigError if there is none.
    """
    whose = (attribute, value, rule)
    others = tuple(each for each in document.overrides if _whose(each) != whose)
    if len(others) == len(document.overrides):
        raise ConfigError(
            f"there is no override for {show(attribute)} {show(value)} and "
            f"{'every rule' if rule is None else f'rule {show(rule)}'}; "
            f"{_known(document.overrides, attribute, value)}"
        )
    return replace(document, overrides=others)


def set_tier(document: Document, name: str, limits: Limits) -> Document:
    """Give a tier these limits; a name that is new makes a new tier, after the others."""
    return replace(document, tiers={**document.tiers, name: tuple(limits)})


def _whose(override: Override) -> tuple[str, str, str | None]:
    return override.attribute, override.value, override.rule


def _known(overrides: Iterable[Override], attribute: str, value: str) -> str:
    rules = [
        "every rule" if each.rule is None else show(each.rule)
        for each in overrides
        if (each.attribute, each.value) == (attribute, value)
    ]
    return f"it has some for {', '.join(rules)}" if rules else "it has none for any rule"
