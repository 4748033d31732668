"""Small changes of a rule document, and the difference between two texts of one.

An edit returns a new document and leaves the old one unchanged. It raises only if it cannot be
made. Whether the new document is valid (its tiers exist, its subjects can be counted) is checked
when the repository applies it.

`unified_diff` is quick for documents of 100,000 lines, where difflib alone takes seconds: two
versions mostly differ in one place, so the lines that both texts begin and end with are set aside
before difflib compares the rest.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Final, Literal, NamedTuple, TypeVar

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.model import Consistency, Limits
from ratekeeper.rules.document.model import Document, LimitsOfOne, Mode, Override, Rule
from ratekeeper.rules.matching.lists import canonical_entry

ListName = Literal["allow", "deny"]

_Value = TypeVar("_Value")
CONTEXT_LINES: Final = 3
_SHOWN_MAX: Final = 10
_LINE_NUMBER: Final = re.compile(r"(?<=[-+])[0-9]+")


class NotFound(ConfigError):
    """The version, rule, tier or entry does not exist."""


def unassign(document: Document, subject: str) -> Document:
    """Take a subject out of its tier. Raises NotFound if it is assigned to none."""
    if subject not in document.assign:
        raise NotFound(f"{show(subject)} is assigned to no tier; subjects are written like user:42")
    rest = {other: tier for other, tier in document.assign.items() if other != subject}
    return replace(document, assign=rest)


def remove_override(
    document: Document, attribute: str, value: str, rule: str | None = None
) -> Document:
    """Remove the override of a subject for a rule, or with None the one that names no rule.

    Raises NotFound if there is none.
    """
    key = (attribute, value, rule)
    others = tuple(each for each in document.overrides if _key(each) != key)
    if len(others) == len(document.overrides):
        raise NotFound(
            f"there is no override for {show(attribute)} {show(value)} and "
            f"{f'every rule by {attribute}' if rule is None else f'rule {show(rule)}'}; "
            f"{_overridden(document.overrides, attribute, value)}"
        )
    return replace(document, overrides=others)


def remove_override_id(document: Document, name: str) -> Document:
    """Remove the override that has this id. Raises NotFound if there is none."""
    others = tuple(each for each in document.overrides if not name or each.id != name)
    if len(others) == len(document.overrides):
        raise NotFound(f"there is no override {show(name)}; it has perhaps expired")
    return replace(document, overrides=others)


def set_tier(
    document: Document, name: str, limits: Limits, consistency: Consistency | None = None
) -> Document:
    """Give a tier these limits and this consistency; a new name adds a tier after the others."""
    tier = LimitsOfOne(tuple(limits), consistency)
    return replace(document, tiers={**document.tiers, name: tier})


def remove_tier(document: Document, name: str) -> Document:
    """Remove a tier. Raises NotFound if it does not exist.

    Applying the document fails if a rule or an assignment still names the tier.
    """
    if name not in document.tiers:
        raise NotFound(f"there is no tier {show(name)}; {_there_are(document.tiers)}")
    return replace(document, tiers=_without(document.tiers, name))


def _without(mapping: Mapping[str, _Value], name: str) -> dict[str, _Value]:
    return {each: value for each, value in mapping.items() if each != name}


def put_rule(document: Document, rule: Rule, before: str | None = None) -> Document:
    """Replace the rule that has the same id, or add a new rule at the end.

    With `before`, the rule goes before the rule of that id: the first rule that matches applies,
    so the position matters. A new rule that replaces another goes before that one. Raises NotFound
    if there is no such rule.
    """
    if before is None and rule.replaces and all(each.id != rule.id for each in document.rules):
        before = rule.replaces
    if before is None or before == rule.id:
        if any(each.id == rule.id for each in document.rules):
            found = (rule if each.id == rule.id else each for each in document.rules)
            return replace(document, rules=tuple(found))
        return replace(document, rules=(*document.rules, rule))
    others = [each for each in document.rules if each.id != rule.id]
    others.insert(_position(others, before), rule)
    return replace(document, rules=tuple(others))


def remove_rule(document: Document, rule_id: str) -> Document:
    """Remove a rule, and the `replaces` that names it. Raises NotFound if no rule has this id."""
    rules = list(document.rules)
    del rules[_position(rules, rule_id)]
    return replace(
        document,
        rules=tuple(
            replace(each, replaces=None) if each.replaces == rule_id else each for each in rules
        ),
    )


def promote(document: Document, rule_id: str) -> Document:
    """Enforce a rule that is in shadow mode. An enforced rule stays as it is.

    Raises NotFound if no rule has this id, and ConfigError for a rule that is off.
    """
    position = _position(list(document.rules), rule_id)
    rule = document.rules[position]
    if rule.mode == "off":
        raise ConfigError(
            f"rule {show(rule_id)} is off, so it has counted nothing; write mode: shadow first, "
            f"and promote it later"
        )
    return _with_mode(document, position, "enforce")


def demote(document: Document, rule_id: str) -> Document:
    """Put a rule that replaces another back into shadow mode, so that the other applies again.

    Raises NotFound if no rule has this id, and ConfigError if it replaces no other: then no rule
    would limit its requests.
    """
    position = _position(list(document.rules), rule_id)
    replaced = document.rules[position].replaces
    if replaced is None:
        raise ConfigError(
            f"rule {show(rule_id)} replaces no other rule, so its requests would have no limit; to "
            f"stop enforcing it anyway, put it with mode: shadow"
        )
    return _with_mode(document, position, "shadow")


def _with_mode(document: Document, position: int, mode: Mode) -> Document:
    rules = list(document.rules)
    rules[position] = replace(rules[position], mode=mode)
    return replace(document, rules=tuple(rules))


def remove_entry(document: Document, name: ListName, entry: str) -> Document:
    """Remove an entry from a list. Raises NotFound if it is not on it."""
    entries = _entries(document, name)
    # `10.0.0.0/8` and `ip:10.0.0.0/8` are the same entry.
    wanted = canonical_entry(entry)
    rest = tuple(each for each in entries if canonical_entry(each) != wanted)
    if len(rest) == len(entries):
        raise NotFound(
            f"{show(entry)} is not on the {name} list; name the entry as it is written there"
        )
    return _with_list(document, name, rest)


def _entries(document: Document, name: ListName) -> tuple[str, ...]:
    return document.allow if name == "allow" else document.deny


def _with_list(document: Document, name: ListName, entries: tuple[str, ...]) -> Document:
    if name == "allow":
        return replace(document, allow=entries)
    return replace(document, deny=entries)


def _position(rules: list[Rule], rule_id: str) -> int:
    for position, rule in enumerate(rules):
        if rule.id == rule_id:
            return position
    raise NotFound(f"there is no rule {show(rule_id)}; {_there_are(rule.id for rule in rules)}")


def _there_are(names: Iterable[str]) -> str:
    found = list(names)
    shown = ", ".join(map(show, found[:_SHOWN_MAX]))
    if len(found) > _SHOWN_MAX:
        return f"there are {shown} and {len(found) - _SHOWN_MAX:,} more"
    return f"there are {shown}" if found else "there is none yet"


def _key(override: Override) -> tuple[str, str, str | None]:
    return override.attribute, override.value, override.rule


def _overridden(overrides: Iterable[Override], attribute: str, value: str) -> str:
    rules = [
        f"every rule by {attribute}" if each.rule is None else show(each.rule)
        for each in overrides
        if (each.attribute, each.value) == (attribute, value)
    ]
    return f"it has overrides for {', '.join(rules)}" if rules else "it has no override"


def undone(applied: Document, current: Document, new: Document) -> list[str]:
    """Return the parts of `current` that differ from `applied` and that `new` would change again.

    `applied` is the document that was applied last, and `current` has the changes made since.
    """
    found = []
    for what, parts in _PARTS.items():
        was, now, then = parts(applied), parts(current), parts(new)
        for name in {**was, **now}:
            is_changed = was.get(name, _MISSING) != now.get(name, _MISSING)
            if is_changed and then.get(name, _MISSING) != now.get(name, _MISSING):
                found.append(f"{what} {name}")
    return found


_MISSING: Final = object()
_PARTS: Final[dict[str, Callable[[Document], dict[str, object]]]] = {
    "rule": lambda document: {rule.id: rule for rule in document.rules},
    "tier": lambda document: dict(document.tiers),
    "assignment of": lambda document: dict(document.assign),
    "override for": lambda document: {
        f"{each.attribute}:{each.value} ({each.rule or 'every rule'})": each
        for each in document.overrides
    },
    "entry of allow:": lambda document: dict.fromkeys(document.allow),
    "entry of deny:": lambda document: dict.fromkeys(document.deny),
}


class DocumentText(NamedTuple):
    """The text of a document, as it is stored and as Ratekeeper writes it."""

    kept: str
    """As its author wrote it, with comments; or the canonical form."""
    canonical: str


def kept_text(text: str | None) -> str | None:
    """Return a text in YAML as it is stored; None for JSON, which is stored in canonical form.

    >>> kept_text("version: 1  # launch\\r\\nrules: []"), kept_text('{"version": 1}')
    ('version: 1  # launch\\nrules: []\\n', None)
    """
    if text is None or text.lstrip().startswith("{"):
        return None
    # A form of a browser sends lines that end with CR and LF.
    text = text.replace("\r\n", "\n")
    return text if text.endswith("\n") else f"{text}\n"


def has_other_comments(before: str, after: str) -> bool:
    """Return True if two texts of equal documents may differ in comments, not in style alone."""
    return before != after and ("#" in before or "#" in after)


def document_diff(
    before: DocumentText, after: DocumentText, before_name: str, after_name: str
) -> str:
    """Return the difference of two documents; if they are equal, that of their comments."""
    diff = unified_diff(before.canonical, after.canonical, before_name, after_name)
    if not diff and has_other_comments(before.kept, after.kept):
        diff = unified_diff(before.kept, after.kept, before_name, after_name)
    return diff


def unified_diff(before: str, after: str, before_name: str, after_name: str) -> str:
    """Return the difference of two texts as a unified diff; empty if they are equal.

    >>> print(unified_diff("a\\nb\\n", "a\\nc\\n", "version 1", "version 2"))
    --- version 1
    +++ version 2
    @@ -1,2 +1,2 @@
     a
    -b
    +c
    """
    if before == after:
        return ""
    old, new = before.splitlines(), after.splitlines()
    head = _common_lines(old, new)
    tail = _common_lines(old[head:][::-1], new[head:][::-1])
    # The diff shows some of the common lines around a change.
    head = max(0, head - CONTEXT_LINES)
    tail = max(0, tail - CONTEXT_LINES)
    middle = old[head : len(old) - tail], new[head : len(new) - tail]
    lines = difflib.unified_diff(*middle, before_name, after_name, n=CONTEXT_LINES, lineterm="")
    return "\n".join(_shifted(line, head) if line.startswith("@@") else line for line in lines)


def _common_lines(old: Sequence[str], new: Sequence[str]) -> int:
    """Return the number of lines that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))


def _shifted(header: str, lines: int) -> str:
    """Return the header of a hunk with line numbers that count the lines set aside.

    >>> _shifted("@@ -1,2 +1,2 @@", 40)
    '@@ -41,2 +41,2 @@'
    """
    return _LINE_NUMBER.sub(lambda number: str(int(number[0]) + lines), header)
