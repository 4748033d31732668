"""What rules say about what is kept: how long it can be needed, which rules nobody meets.

Pure: the document, and what a service or a table of usage has counted, are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Final

from tollkeeper.cli.scrape import Scrape
from tollkeeper.core.errors import SafetyFinding
from tollkeeper.core.model import BUCKETS, Limit, Limits
from tollkeeper.decide.stores.redis.codec import field_of, id_of
from tollkeeper.metrics.counters import OTHERS
from tollkeeper.rules.document.model import Document, Rule
from tollkeeper.rules.document.safety import findings
from tollkeeper.rules.penalties import COOLDOWN, LEVEL, room_s

_NS_PER_MS: Final = 1_000_000
_MS_PER_SECOND: Final = 1_000
# Scripts move an expiry an eighth further than it must be, and a second at least.
_MOVED_FURTHER: Final = 8


def needed_ms(document: Document) -> int:
    """How long a state of any of these rules can be needed; 0 without limits."""
    longest = max(map(_limit_ms, chain.from_iterable(_all_limits(document))), default=0)
    penalties = [rule.penalty for rule in document.rules if rule.penalty is not None]
    for penalty in penalties:
        levels_s = (penalty.block_after + 1) * penalty.decay_s
        longest = max(longest, round(max(room_s(penalty), levels_s) * _MS_PER_SECOND))
    return longest + longest // _MOVED_FURTHER + _MS_PER_SECOND if longest else 0


def _all_limits(document: Document) -> Iterator[Limits]:
    yield from document.tiers.values()
    for rule in document.rules:
        yield rule.limits
        yield from rule.tiers.values()
        yield from rule.keys.values()
    for override in document.overrides:
        yield override.limits


def _limit_ms(limit: Limit) -> int:
    """Until a state of the limit is as good as none. Up."""
    if limit.algorithm in BUCKETS:
        return -(-limit.capacity * limit.window_ns // limit.limit // _NS_PER_MS)
    windows = 2 if limit.algorithm == "sliding_window_counter" else 1
    return -(-windows * limit.window_ns // _NS_PER_MS)


def logs_of(document: Document) -> frozenset[int]:
    """The numbers under which Redis keeps the limits that are logs."""
    limits = chain.from_iterable(_all_limits(document))
    return frozenset(id_of(limit) for limit in limits if limit.algorithm == "sliding_window_log")


def covered(document: Document) -> list[SafetyFinding]:
    """Rules that can never match, because an earlier one takes their requests."""
    return [each for each in findings(document) if each.code == "unreachable"]


def in_force(document: Document) -> list[Rule]:
    """Those that are asked at all."""
    return [rule for rule in document.rules if rule.mode != "off" and rule.rollout > 0]


def without_checks(document: Document, metrics: Scrape) -> list[str] | None:
    """Rules that a service has never decided by; None where it does not name all of them."""
    counted = metrics.by("tollkeeper_checks_total", "rule")
    if OTHERS in counted:
        return None
    return [rule.id for rule in in_force(document) if not counted.get(rule.id)]


def states_by_rule(document: Document, fields: Mapping[bytes, int]) -> dict[str, int]:
    """States that the store holds, by rule; those of a penalty are the rule's."""
    return {
        rule.id: sum(
            fields.get(field_of(name), 0) for name in (rule.id, rule.id + COOLDOWN, rule.id + LEVEL)
        )
        for rule in document.rules
    }


def of_no_rule(document: Document, fields: Mapping[bytes, int]) -> Counter[str]:
    """States of rules that are not in the document, by field; one that is a digest is in hex."""
    known = {
        field_of(name)
        for rule in document.rules
        for name in (rule.id, rule.id + COOLDOWN, rule.id + LEVEL)
    }
    return Counter({shown(name): count for name, count in fields.items() if name not in known})


def shown(name: bytes) -> str:
    """A field, for people."""
    text = name.decode(errors="replace")
    return text if text.isprintable() else name.hex()
