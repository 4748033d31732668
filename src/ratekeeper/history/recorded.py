"""Requests made from recorded decisions, and the rules that the records cannot replay.

A recorded decision has the time, the endpoint, the method, the cost and the identity of a request:
user, tenant, API key and address. It has no attributes. An API key is always a digest. With
`--record-subjects hashed` the other fields of the identity are digests too, and with `none` they
are missing.

A digest still counts one client at a time. Rules, assignments, overrides and lists that name one
value apply to it, because the digest of that value is the same. A pattern such as `sk_live_*` or a
network cannot be compared with a digest. A rule that needs anything that the records lack is left
out of a replay (`unreadable`), because it would count many clients as one, or no client at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from ratekeeper.core.model import REQUEST_FIELDS, Request
from ratekeeper.history.events import EXCESS, PART, SubjectMode, recorded_value
from ratekeeper.history.reading import RecordedRequest
from ratekeeper.rules.document.model import Document, LimitsOfOne, Rule
from ratekeeper.rules.entry_table import EntryTable
from ratekeeper.rules.matching.patterns import compile_glob

# The fields of a request that identify its client.
IDENTITY: Final = ("user", "tenant", "api_key", "ip")
# Entries beside the document whose digests are made; a digest takes about a microsecond.
ENTRIES_DIGESTED_MAX: Final = 100_000
# Entries that are looked at in one step of a replay.
_PORTION: Final = 1_000
# A pattern that matches every value, also a digest.
_ANY: Final = "*"


def hidden_fields(mode: SubjectMode) -> frozenset[str]:
    """Return the fields that are recorded as digests.

    >>> sorted(hidden_fields("plain")), sorted(hidden_fields("hashed"))
    (['api_key'], ['api_key', 'ip', 'tenant', 'user'])
    """
    if mode == "none":
        return frozenset()
    return frozenset(IDENTITY) if mode == "hashed" else frozenset({"api_key"})


def unreadable(rule: Rule, mode: SubjectMode, hidden: frozenset[str]) -> str:
    """Return why the records cannot be replayed under a rule; "" if they can.

    `hidden`  the fields of which the records have digests of unknown values.
    """
    attributes = [name for name in (*rule.by, *rule.match.attributes) if name not in REQUEST_FIELDS]
    if attributes:
        return f"it reads {', '.join(dict.fromkeys(attributes))}; attributes are not recorded"
    for name in IDENTITY:
        patterns: Sequence[str] = getattr(rule.match, name)
        if mode == "none" and (patterns or name in rule.by):
            return f"it reads {name}, which is not recorded (--record-subjects none)"
        if name not in hidden:
            continue
        keys = rule.keys if rule.by == (name,) else ()
        found = [each for each in (*patterns, *keys) if each != _ANY and _value_of(each) is None]
        if name == "ip" and patterns:
            found = list(patterns)
        if found:
            return f"it matches {name} by {found[0]}; {name} is recorded as a digest"
    return ""


def _value_of(pattern: str) -> str | None:
    """Return the only value that a pattern matches, or None."""
    return compile_glob(pattern).exact


def named_values(document: Document, fields: Iterable[str]) -> Iterator[str]:
    """Yield the values of these fields that a document names one by one."""
    wanted = frozenset(fields)
    for rule in document.rules:
        for name in wanted - {"ip"}:
            for pattern in (*getattr(rule.match, name), *(rule.keys if name in rule.by else ())):
                value = _value_of(pattern)
                if value is not None:
                    yield value
    for owner in document.assign:
        yield owner.partition(":")[2]
    for override in document.overrides:
        yield override.value
    for entry in (*document.allow, *document.deny):
        yield entry.partition(":")[2]


def entry_values(entries: EntryTable, fields: frozenset[str]) -> Iterator[list[str]]:
    """Yield the values of these fields that entries beside the document name, in portions.

    There may be millions of entries: at most ENTRIES_DIGESTED_MAX values are yielded.
    """
    prefixes = tuple(f"{name}:" for name in fields)
    left = ENTRIES_DIGESTED_MAX
    owners = entries.owners()
    while left > 0 and (portion := list(islice(owners, _PORTION))):
        found = [each for each in portion if each.startswith(prefixes)][:left]
        left -= len(found)
        yield [each.partition(":")[2] for each in found]


class RecordedRequests:
    """Makes requests from recorded decisions."""

    def __init__(self, mode: SubjectMode) -> None:
        self._mode: SubjectMode = mode
        self._hidden = hidden_fields(mode)
        self._known: dict[str, str] = {}
        """Values of digests that subjects in the records reveal."""
        self._named: dict[str, str] = {}
        """Values of digests that rules or entries name."""
        self._unknown: set[str] = set()
        """Digests of API keys that no subject reveals."""

    def learn_value(self, value: str) -> None:
        """Remember a value that a rule or an entry names, to recognise its digest."""
        self._named[recorded_value(value, "hashed")] = value

    def learn_row(self, row: RecordedRequest) -> None:
        """Remember the API key of a row whose subject has it."""
        digest = row.api_key
        if digest and digest not in self._known:
            for part in row.subject.split(PART):
                name, _, value = part.partition(":")
                if name == "api_key" and recorded_value(value, "hashed") == digest:
                    self._known[digest] = value
                    return
            self._unknown.add(digest)

    def hidden(self) -> frozenset[str]:
        """Return the fields of which the records have digests of unknown values."""
        if self._mode == "plain":
            unknown = self._unknown - self._known.keys() - self._named.keys()
            return self._hidden if unknown else frozenset()
        return self._hidden

    def request_of(self, row: RecordedRequest) -> Request:
        """Return the request of a decision, as far as it is recorded."""
        api_key = self._known.get(row.api_key, row.api_key)
        named = self._named
        digests: dict[str, str] | None = None
        if named:
            found = (row.user_id, row.tenant, api_key, row.ip)
            digests = {each: named[each] for each in found if each in named}
        return Request(
            user=row.user_id or None,
            api_key=api_key or None,
            ip=row.ip or None,
            tenant=row.tenant or None,
            endpoint=row.endpoint or None,
            method=row.method or None,
            digests=digests or None,
        )


def is_replayable(row: RecordedRequest, applied: Collection[str], rules: frozenset[str]) -> bool:
    """Return True for a decision by rules; `applied` are the ids of those that took part.

    An excess is no decision. A request without any field was checked by limits that came with the
    call (`POST /v1/limit`), unless it was checked by one of the `rules`.
    """
    if row.outcome == EXCESS:
        return False
    has_fields = row.user_id or row.tenant or row.api_key or row.ip or row.endpoint or row.method
    return bool(has_fields) or not applied or not rules.isdisjoint(applied)


def replayed_document(document: Document, left_out: Iterable[str]) -> Document:
    """Return a document for a replay in one process, with some rules switched off.

    One store decides exactly. Loads are not recorded, so limits that follow them are replayed
    without a factor.
    """
    off = frozenset(left_out)
    rules = tuple(
        replace(
            rule,
            mode="off" if rule.id in off else rule.mode,
            consistency="strict",
            tiers=_without_consistency(rule.tiers),
            keys=_without_consistency(rule.keys),
            scope="region",
            across_regions=None,
            scale=(),
            split=1,
        )
        for rule in document.rules
    )
    return replace(document, rules=rules, tiers=_without_consistency(document.tiers))


def _without_consistency(by_name: Mapping[str, LimitsOfOne]) -> dict[str, LimitsOfOne]:
    return {name: LimitsOfOne(one.limits) for name, one in by_name.items()}
