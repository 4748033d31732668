"""The entries of a node: assignments, overrides and list entries beside its compiled rules.

There may be millions, so `EntryTable` holds them in dicts of texts: about 100 bytes for an
assignment or a list entry, and 175 and its reason for an override. An override is packed into bytes
and parsed when a request of its owner arrives; its author stays in the database.

One thread changes the table while others look up. A look-up sees each entry as it was before a
change, or after it. The garbage collector does not traverse these dicts (`matching/lists.py`).
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Final, Generic, TypeVar, cast

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.core.model import Limits, Request
from ratekeeper.rules.document.model import OWNERS, Override, OverrideOwner
from ratekeeper.rules.matching.lists import Lists
from ratekeeper.rules.matching.patterns import (
    Network,
    NetworkTable,
    address_of,
    compile_network,
)

if TYPE_CHECKING:
    from ratekeeper.rules.entries import RowFields

_Item = TypeVar("_Item")
_PORTION: Final = 1_000
_END: Final = struct.Struct(">q")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
# Neither an id nor JSON contains it, and the name of a rule is printable.
_MARK: Final = "\x1f"
_SEPARATOR: Final = _MARK.encode()
# The JSON of an override whose texts have no escapes. A match takes a third of a parser's time.
_TEXT: Final = r'"([^"\\]*)"'
_PLAIN: Final = re.compile(
    rf'\{{"for":\{{"(\w+)":{_TEXT}\}}(?:,"rule":{_TEXT})?'
    rf',(?:"limits":(\[(?:"[^"\\]*",?)+\])|"multiply":([0-9.]+)),"until":{_TEXT},"reason":{_TEXT}[,}}]'
)


class OwnerTable(Generic[_Item]):
    """Items by the user, API key, tenant or network that they belong to; the newest item first."""

    __slots__ = ("_by_owner", "_kinds", "_networks")

    def __init__(self) -> None:
        # One item as it is, several as a list: nearly every owner has one.
        self._by_owner: dict[str, _Item | list[_Item]] = {}
        self._networks: NetworkTable[_Item | list[_Item]] = NetworkTable()
        # The kinds of owners that occur, except addresses.
        self._kinds: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._by_owner or self._networks)

    def add(self, attribute: OverrideOwner, value: str, item: _Item) -> None:
        """Put an item before the other items of its owner."""
        self.replace(attribute, value, [item, *self.of(attribute, value)])

    def replace(self, attribute: OverrideOwner, value: str, items: list[_Item]) -> None:
        """Give an owner these items; none removes it."""
        owner = compile_network(value) if attribute == "ip" else f"{attribute}:{value}"
        if attribute != "ip" and attribute not in self._kinds:
            self._kinds = tuple(each for each in OWNERS if each in {*self._kinds, attribute})
        self._put(owner, items)

    def _put(self, owner: str | Network, items: list[_Item]) -> None:
        held = items[0] if len(items) == 1 else items
        if isinstance(owner, str):
            if items:
                self._by_owner[owner] = held
            else:
                self._by_owner.pop(owner, None)
        elif items:
            self._networks.add(owner, held)
        else:
            self._networks.remove(owner)

    def of(self, attribute: OverrideOwner, value: str) -> list[_Item]:
        """Return the items of one owner."""
        if attribute == "ip":
            found = self._networks.get(compile_network(value))
        else:
            found = self._by_owner.get(f"{attribute}:{value}")
        return [] if found is None else _several(found)

    def find(self, request: Request) -> Iterator[tuple[str, _Item]]:
        """Yield the owners of a request and their items: user, API key, tenant, then address."""
        by_owner = self._by_owner
        for attribute in self._kinds:
            value = getattr(request, attribute)
            if isinstance(value, str):
                found = by_owner.get(f"{attribute}:{value}")
                if found is not None:
                    for item in _several(found):
                        yield f"{attribute}:{value}", item
        if self._networks and isinstance(request.ip, str):
            address = address_of(request.ip)
            around = () if address is None else tuple(self._networks.find(address))
            for network, found in reversed(around):  # the narrowest first
                for item in _several(found):
                    yield f"ip:{network}", item

    def owners(self) -> Iterator[str]:
        """Yield the owners except networks: `user:42`. Another thread may change the table."""
        return keys_of(self._by_owner)

    def drop(self, is_over: Callable[[_Item], bool]) -> int:
        """Remove the items that are over; return how many."""
        count = 0
        each: list[tuple[str | Network, _Item | list[_Item]]] = list(self._by_owner.items())
        each += self._networks.items()
        for owner, found in each:
            items = _several(found)
            left = [item for item in items if not is_over(item)]
            if len(left) < len(items):
                count += len(items) - len(left)
                self._put(owner, left)
        return count


def keys_of(table: Mapping[str, object]) -> Iterator[str]:
    """Yield the keys of a dict that another thread may change; it may miss keys that move then.

    A list of a million keys would make all other threads wait for 50 ms.
    """
    count = 0
    keys = iter(table)
    while True:
        try:
            portion = list(islice(keys, _PORTION))
        except RuntimeError:  # the size has changed
            keys = islice(table, count, None)
            continue
        if not portion:
            return
        count += len(portion)
        yield from portion


def _several(found: _Item | list[_Item]) -> list[_Item]:
    return found if isinstance(found, list) else [found]


class EntryTable:
    """All entries of a node, by the owner that a request names."""

    __slots__ = ("assigned", "lists", "overrides", "seq")

    def __init__(self) -> None:
        self.seq = 0
        """The number of the last change that the table contains."""
        self.assigned: dict[str, str] = {}
        """The tier of `user:42`. All assignments of a tier share its name."""
        self.overrides: OwnerTable[bytes] = OwnerTable()
        self.lists = Lists.compile()

    def apply(self, rows: Iterable[RowFields], seq: int) -> list[str]:
        """Apply changes up to a number; return the errors of entries that cannot be used.

        A change that was applied before may be applied again.
        """
        errors: list[str] = []
        assigned, intern = self.assigned, sys.intern
        for row in rows:
            kind, key, data, _, removed = row
            if kind == "assignment" and not removed:  # here, because there may be millions
                assigned[key] = intern(data)
                continue
            try:
                self._apply(row)
            except (ConfigError, ValueError, LookupError) as error:
                errors.append(f"the {kind} {show(key)} is ignored: {error}")
        self.seq = seq
        return errors

    def _apply(self, row: RowFields) -> None:
        kind, key, data, _, removed = row
        if kind == "assignment":
            self.assigned.pop(key, None)
        elif kind == "override":
            self._apply_override(key, data, removed)
        elif removed:
            self.lists.remove(kind, key)
        else:
            self.lists.add(kind, key)

    def _apply_override(self, name: str, text: str, removed: bool) -> None:
        attribute, value, packed = _packed(name, text)
        items = self.overrides.of(attribute, value)
        if items:
            marked = name.encode() + _SEPARATOR
            items = [item for item in items if not item.startswith(marked, _END.size)]
        self.overrides.replace(attribute, value, items if removed else [packed, *items])

    def owners(self) -> Iterator[str]:
        """Yield every subject that an entry names: `user:42`.

        It may yield one several times. Another thread may change the table meanwhile.
        """
        yield from keys_of(self.assigned)
        yield from self.overrides.owners()
        yield from self.lists.exact_values()

    def drop_expired(self, now_ns: int) -> int:
        """Remove expired overrides from memory; return how many."""
        now_us = now_ns // 1_000
        return self.overrides.drop(lambda item: _END.unpack_from(item)[0] <= now_us)


def _packed(name: str, text: str) -> tuple[OverrideOwner, str, bytes]:
    """Return the owner of an override, and the override in the form of the table."""
    found = _PLAIN.match(text)
    if found is not None:
        attribute, value, rule, limits, multiply, until, reason = found.groups("")
        terms = limits or multiply
    else:
        data = json.loads(text)
        [(attribute, value)] = data["for"].items()
        rule, until, reason = data.get("rule", ""), data["until"], data.get("reason", "")
        terms = json.dumps(data["limits"] if "limits" in data else data["multiply"])
    packed = _end(until) + f"{name}{_MARK}{rule}{_MARK}{terms}{_MARK}{reason}".encode()
    return cast("OverrideOwner", attribute), value, packed


@lru_cache(4_096)  # many overrides end at the same time
def _end(until: str) -> bytes:
    return _END.pack((datetime.fromisoformat(until) - _EPOCH) // _MICROSECOND)


def unpacked(owner: str, item: bytes) -> Override:
    """Return a packed override of an owner, without its author."""
    name, rule, terms, reason = item[_END.size :].decode().split(_MARK, 3)
    attribute, _, value = owner.partition(":")
    until = _EPOCH + timedelta(microseconds=_END.unpack_from(item)[0])
    limits, multiply = _terms(terms)
    kind = cast("OverrideOwner", attribute)
    return Override(kind, value, rule or None, limits, multiply, until, reason, id=name)


@lru_cache(4_096)  # many overrides have the same terms
def _terms(text: str) -> tuple[Limits, float | None]:
    """Return the limits or the factor of an override."""
    # Imported here: rules without such overrides do not need the document reader.
    from ratekeeper.rules.entries import parse_override  # noqa: PLC0415 - see above

    terms = json.loads(text)
    field = "limits" if isinstance(terms, list) else "multiply"
    found = parse_override({"for": {"user": "any"}, field: terms})
    return found.limits, found.multiply
