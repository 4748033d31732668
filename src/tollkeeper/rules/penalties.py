"""Those who do not wait: growing cool-downs, then a block, for a rule that asks for it.

A denied client is told when to come back. One that sends on regardless, `after` times `within` a
while, gets a cool-down: nothing passes until it is over. Requests during a cool-down are further
ones that did not wait, so whoever does not stop gets the next cool-down, twice as long, on top; and
after `block_after` of them a block. Every `decay` one of them is forgotten.

Who did not wait is counted in each process, because a denial may be known here without asking the
store, and a storm of them must not become a storm there. What comes of it is kept in the store, so
that it holds on every node, in two buckets of each subject:

- *cool-down*: it refills by one unit a second, so what is missing are the seconds that are left. A
  cool-down of ten seconds spends ten. While it is not full, nothing passes.
- *level*: it refills by one unit in each `decay`, so what is missing are the cool-downs so far.

Whoever was not told of a cool-down has not gone on in it. So requests that were on their way while
one was given, and those that another node denied before it had heard of it, bring no further one.

The first has room for all cool-downs and a block on top of them. Whoever goes on in a block gets
the next one when there is room for it; until then nothing is counted, told or asked.

A process looks at the first of them at most once in LOOK_NS for each subject: a cool-down that
another node has given, or a pardon, is known after that time at the latest.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.model import Decision, Limit
from tollkeeper.rules.document.model import PenaltySettings

LOOK_NS: Final = NS_PER_SECOND
FOREVER_NS: Final = 2**63 - 1
# How many subjects are watched at once. One that is forgotten is counted anew.
WATCHED_MAX: Final = 16_384

# Rules' ids have no control characters, so these are nobody's.
COOLDOWN: Final = "\x1fcooldown"
LEVEL: Final = "\x1flevel"

Who = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Penalty:
    """A cool-down or a block that was given, for whoever wants to know."""

    rule: str
    subject: str
    level: int
    """Which it is: 1 for the first cool-down."""
    seconds: int
    blocked: bool
    until_ns: int


class Terms(NamedTuple):
    """A rule's penalty, with the gates that it is kept in."""

    penalty: PenaltySettings
    cooldown: Any
    cooldown_units: int
    level: Any
    level_units: int


def terms_of(penalty: PenaltySettings, rule: str, make_gate: Callable[..., Any]) -> Terms:
    """Prepare a rule's penalty on a store."""
    seconds = room_s(penalty)
    levels = penalty.block_after + 1
    return Terms(
        penalty,
        make_gate((Limit(1, per=1, capacity=seconds),), rule + COOLDOWN),
        seconds,
        make_gate((Limit(1, per=penalty.decay_s, capacity=levels),), rule + LEVEL),
        levels,
    )


def sentence_s(penalty: PenaltySettings, level: int) -> int:
    """How long the cool-down or the block of a level is. Up, to whole seconds.

    >>> [sentence_s(PenaltySettings(cooldown_s=10, block_after=3), level) for level in (1, 2, 3, 4)]
    [10, 20, 40, 3600]
    """
    if level > penalty.block_after:
        return math.ceil(penalty.block_s)
    return math.ceil(min(penalty.cooldown_s * 2.0 ** (level - 1), penalty.cooldown_max_s))


def room_s(penalty: PenaltySettings) -> int:
    """How long all cool-downs and a block are together, for one who never stops.

    >>> room_s(PenaltySettings(cooldown_s=10, block_after=3))
    3670
    """
    return sum(sentence_s(penalty, level) for level in range(1, penalty.block_after + 2))


def level_of(decision: Decision, terms: Terms) -> int:
    """Which cool-down this is, as the bucket of them tells when one more was spent."""
    return terms.level_units - decision.remaining if decision.allowed else terms.level_units


@dataclass(slots=True)
class _Watched:
    denied_until_ns: int = 0
    strikes: int = 0
    since_ns: int = 0
    looked_ns: int = -LOOK_NS
    barred_until_ns: int = 0
    spared_above_ns: int = FOREVER_NS
    """While a cool-down has longer than this to go, the next has no room on top of it."""
    being_sentenced: bool = False
    sentence: Penalty | None = None


class PenaltyTracker:
    """What this process knows of those who were denied."""

    def __init__(self) -> None:
        self._watched: dict[Who, _Watched] = {}
        self._lock = threading.Lock()

    def barred_ns(self, who: Who, now_ns: int) -> int | None:
        """How long the subject's cool-down goes on; None where the store has to be asked."""
        watched = self._watched.get(who)
        if watched is None or not 0 <= now_ns - watched.looked_ns < LOOK_NS:
            return None
        return max(watched.barred_until_ns - now_ns, 0)

    def looked(self, who: Who, now_ns: int, barred_ns: int) -> None:
        """Remember what the store told."""
        with self._lock:
            watched = self._of(who)
            watched.looked_ns = now_ns
            watched.barred_until_ns = now_ns + barred_ns
            if not barred_ns:
                watched.sentence = None
                watched.spared_above_ns = FOREVER_NS

    def denied(self, who: Who, penalty: PenaltySettings, now_ns: int, retry_after_ns: int) -> bool:
        """Note a denial. True when the subject has not waited once too often."""
        with self._lock:
            watched = self._of(who)
            waited = now_ns >= watched.denied_until_ns
            watched.denied_until_ns = now_ns + retry_after_ns
            no_room = watched.barred_until_ns - now_ns > watched.spared_above_ns
            if waited or no_room or watched.being_sentenced:
                return False
            if now_ns - watched.since_ns > penalty.within_s * NS_PER_SECOND:
                watched.since_ns = now_ns
                watched.strikes = 0
            watched.strikes += 1
            if watched.strikes < penalty.after:
                return False
            watched.strikes = 0
            watched.being_sentenced = True
            return True

    def learns(self, who: Who, now_ns: int, barred_ns: int) -> bool:
        """Note a cool-down as the store knows it; is it one that nobody was told of here?"""
        with self._lock:
            watched = self._of(who)
            is_news = barred_ns > 0 and watched.barred_until_ns <= now_ns
            watched.looked_ns = now_ns
            watched.barred_until_ns = now_ns + barred_ns
            return is_news

    def settled(self, who: Who) -> None:
        """Count again, after `denied` was true: a cool-down was given by now, or was not."""
        with self._lock:
            if who in self._watched:
                self._watched[who].being_sentenced = False

    def sentenced(
        self, who: Who, terms: Terms, level: int, spent: Decision, now_ns: int
    ) -> Penalty | None:
        """Remember a cool-down as the store has `spent` it; None where it had no room for it."""
        seconds = sentence_s(terms.penalty, level)
        with self._lock:
            watched = self._of(who)
            if not spent.allowed:
                watched.spared_above_ns = (terms.cooldown_units - seconds) * NS_PER_SECOND
                return None
            watched.looked_ns = now_ns
            # When the bucket is full again; other nodes may have given some of it.
            watched.barred_until_ns = now_ns + spent.reset_after_ns
            blocked = level > terms.penalty.block_after
            until_ns = watched.barred_until_ns
            watched.sentence = Penalty(*who, level, seconds, blocked, until_ns)
            return watched.sentence

    def pardoned(self, who: Who) -> None:
        """Forget the subject."""
        with self._lock:
            self._watched.pop(who, None)

    def standing(self, now_ns: int) -> list[Penalty]:
        """What this process has given and is not over, the longest first."""
        with self._lock:
            found = [
                watched.sentence
                for watched in self._watched.values()
                if watched.sentence is not None and watched.barred_until_ns > now_ns
            ]
        return sorted(found, key=lambda sentence: -sentence.until_ns)

    def _of(self, who: Who) -> _Watched:
        watched = self._watched.get(who)
        if watched is None:
            if len(self._watched) >= WATCHED_MAX:
                del self._watched[next(iter(self._watched))]  # the oldest
            watched = self._watched[who] = _Watched()
        return watched
