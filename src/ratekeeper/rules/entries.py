"""Entries: assignments, overrides and list entries that are kept beside the rule document.

    kind         key                       data
    assignment   user:42                   the tier: pro
    override     the id: ov_5f2c91d07b3a   the override as JSON, in the form of the rule document
    allow, deny  ip:10.0.0.0/8             the entry as its author wrote it: 10.0.0.0/8

A key is unique among the entries of its kind. The functions below make entries and check their
form. The repository checks that the tier and the rule exist.
`entry_table.py` holds the entries of a node.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple, get_args

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.model import NAME_LENGTH_MAX
from ratekeeper.core.rates import UNIT_NS
from ratekeeper.rules.document.grammar import check_override_id, check_owner, to_data
from ratekeeper.rules.document.model import Document, Override
from ratekeeper.rules.document.reading import from_data
from ratekeeper.rules.matching.lists import canonical_entry
from ratekeeper.rules.matching.patterns import compile_network

EntryKind = Literal["assignment", "override", "allow", "deny"]
ENTRY_KINDS: Final[tuple[EntryKind, ...]] = get_args(EntryKind)
ListName = Literal["allow", "deny"]

# A database index holds no longer key.
KEY_BYTES_MAX: Final = 2_000
# An override that is meant to stay longer belongs in the document.
END_DAYS_MAX: Final = 3_660

_DURATION: Final = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(?P<unit>[A-Za-z]+)")


class Entry(NamedTuple):
    """One assignment, override or list entry."""

    kind: EntryKind
    key: str
    data: str


class EntryRow(NamedTuple):
    """One entry as the database has it: changed by change `seq`, and perhaps removed by it."""

    kind: EntryKind
    key: str
    data: str
    seq: int
    removed: bool


# An EntryRow as a plain tuple. The garbage collector ceases to traverse a plain tuple of texts and
# numbers, but not a named one: with a million rows, that is half of the time of a start.
RowFields = tuple[EntryKind, str, str, int, bool]


def assignment(subject: str, tier: str) -> Entry:
    """Return the entry that puts a subject in a tier. Raises ConfigError.

    >>> assignment("user:42", "pro")
    Entry(kind='assignment', key='user:42', data='pro')
    """
    check_owner(_text("subject", subject))
    if not 1 <= len(_text("tier", tier)) <= NAME_LENGTH_MAX or not tier.isprintable():
        raise ConfigError(f"tier={show(tier)} is not the name of a tier; for example pro")
    return Entry("assignment", subject, tier)


def list_entry(name: ListName, text: str) -> Entry:
    """Return an entry of the allow or the deny list. Raises ConfigError.

    >>> list_entry("deny", "10.0.0.0/8")
    Entry(kind='deny', key='ip:10.0.0.0/8', data='10.0.0.0/8')
    """
    return Entry(name, _text("entry", canonical_entry(text)), text)


def override_entry(override: Override, now: datetime) -> Entry:
    """Return the entry of an override; one without an id gets a random id. Raises ConfigError.

    It needs a reason and an end in the future.
    """
    name = override.id or f"ov_{secrets.token_hex(6)}"
    check_override_id(name)
    if not override.reason:
        raise ConfigError('the override has no reason; say why, for example reason: "launch day"')
    if override.until is None:
        raise ConfigError("the override has no end; write until: 2h, or a time with its zone")
    _check_end(override.until, now)
    value = _text("for", override.value)
    if override.attribute == "ip":
        value = str(compile_network(value))
    data: dict[str, Any] = to_data(Document(overrides=(replace(override, id="", value=value),)))
    text = json.dumps(data["overrides"][0], ensure_ascii=False, separators=(",", ":"))
    return Entry("override", name, text)


def override_of(entry: Entry | EntryRow) -> Override:
    """Return the override of an entry."""
    return parse_override({"id": entry.key, **json.loads(entry.data)})


def owner_prefix(attribute: str, value: str) -> str:
    """Return the beginning of the data of all overrides of one subject."""
    owner = json.dumps({attribute: value}, ensure_ascii=False, separators=(",", ":"))
    return f'{{"for":{owner},'


def parse_override(
    data: Mapping[str, Any], rules: Collection[str] | None = None, now: datetime | None = None
) -> Override:
    """Return the override in plain data. Raises DocumentError at `overrides[0]`.

    `rules`  the ids of the rules that exist; None: any rule may be named.
    `now`    if given, `until` may be a duration from now, such as `2h`.
    """
    until = data.get("until")
    if now is not None and isinstance(until, str) and _DURATION.fullmatch(until):
        data = {**data, "until": end_of(until, now).isoformat()}
    rule = data.get("rule")
    known = [rule] if isinstance(rule, str) and (rules is None or rule in rules) else rules or ()
    document = {
        "version": 1,
        # The rule must exist; its content does not matter.
        "rules": [{"id": each, "by": [], "limits": "1/s"} for each in known],
        "overrides": [data],
    }
    return from_data(document, "<override>").overrides[0]


def end_of(text: str, now: datetime) -> datetime:
    """Return the end that a text gives: a duration from now, or a time with its zone.

    Raises ConfigError if it is neither, in the past, or more than ten years ahead.

    >>> end_of("2h", datetime(2030, 1, 1, tzinfo=UTC)).isoformat()
    '2030-01-01T02:00:00+00:00'
    """
    end: datetime | None = None
    try:
        if found := _DURATION.fullmatch(text):
            microseconds = float(found["number"]) * UNIT_NS[found["unit"].lower()] / 1_000
            end = now + timedelta(microseconds=microseconds)
        else:
            end = datetime.fromisoformat(text)
    except (KeyError, ValueError, OverflowError):
        pass
    if end is None or end.tzinfo is None:
        raise ConfigError(
            f"{show(text)} is not an end; write a duration such as 2h or 30d, "
            f"or a time with its zone such as 2026-12-31T23:59:59Z"
        )
    _check_end(end, now)
    return end.astimezone(UTC)


def _check_end(end: datetime, now: datetime) -> None:
    if end <= now:
        raise ConfigError(
            f"the end {end.isoformat()} is in the past; it is {now.isoformat(timespec='seconds')}"
        )
    if end - now > timedelta(days=END_DAYS_MAX):
        raise ConfigError(
            f"the end {end.isoformat()} is more than {END_DAYS_MAX:,} days ahead; "
            f"limits that stay belong in the rule document"
        )


def _text(name: str, value: str) -> str:
    """Return the value if a database can hold it as a key. Raises ConfigError."""
    if not isinstance(value, str):
        raise ConfigError(f"{name}={show(value)} is {type(value).__name__}, not text")
    try:
        fits = len(value.encode()) <= KEY_BYTES_MAX and "\0" not in value
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise ConfigError(
            f"{name}={show(value)} is not text of at most {KEY_BYTES_MAX:,} bytes in UTF-8 "
            f"without null characters"
        )
    return value
