"""The limits of a node while the authority is away, and the charges that it reports afterwards.

One process of a node, the agent, runs gossip. It has the node's totals (`totals.py`) and sends them
as payloads of gossip. The other processes ask it, with a short deadline: `question_of` and
`NodeTotals.answer` are the two sides. After a question without an answer, a process does not ask
again for a second; after a slow answer, for twenty times as long as the answer took. So a dead or
busy agent does not delay every request: a process spends at most a twentieth of its time waiting
for slow answers.

Each process notes the units that it has admitted itself (`OutageCharges`). When the authority
answers again, the process reports these units as late charges, with their age. A charge whose
answer was lost is reported again, so the authority may count it twice, but never too little. If a
process is killed before it reports, its units are never charged.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Final, NamedTuple, Protocol

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ConfigError
from ratekeeper.core.forks import fork_safe
from ratekeeper.core.model import Decision, Limit, Limits
from ratekeeper.decide.failure import LocalCheck
from ratekeeper.decide.store import LocalStore
from ratekeeper.fleet.gossip import MemberChange, ReceivedPayload
from ratekeeper.fleet.totals import Totals, equal_shares, limit_numbers, limit_of

# The time between two payloads, and the bytes of payloads that a node sends in a second, at most.
PUBLISH_NS: Final = NS_PER_SECOND // 10
PUBLISH_BYTES_PER_S: Final = 25_000
_DATAGRAM_BYTES: Final = 100
# A node without counts announces its shares when membership has not changed for this time.
# Otherwise, each of 200 nodes that start together would announce new shares to all others whenever
# it learns of another node.
CALM_NS: Final = NS_PER_SECOND
# After a question without an answer, a process does not ask for this time.
SILENCE_NS: Final = NS_PER_SECOND
# After an answer that took longer than SLOW_NS, it does not ask for SLOW_PAUSE times as long.
SLOW_NS: Final = NS_PER_SECOND // 1_000
SLOW_PAUSE: Final = 20
# A new agent that has not heard of any other node yet has no share for this time.
ALONE_NS: Final = 5 * NS_PER_SECOND
# Nodes that died count in the majority for this time.
DEAD_COUNT_NS: Final = 600 * NS_PER_SECOND
# Questions of more rules, and longer ones, are not answered.
CHECKS_MAX: Final = 256
QUESTION_BYTES_MAX: Final = 100_000
# Subjects whose charges are noted, and the groups of each by age.
SUBJECTS_MAX: Final = 100_000
GROUPS_MAX: Final = 4
GROUP_NS: Final = NS_PER_SECOND


class Messenger(Protocol):
    """The node's agent, as this process sees it. No method blocks but `ask`."""

    def publish(self, payload: bytes, /) -> int | None:
        """Send a payload to all nodes. See `Gossip.publish`."""
        ...

    def ask(self, question: bytes, /) -> bytes | None:
        """Return the agent's answer; None if it does not answer within some milliseconds."""
        ...

    def sharing_nodes(self) -> int:
        """Return how many nodes share the limits: the live ones, never fewer than configured."""
        ...

    def heard_nodes(self) -> int:
        """Return how many nodes are alive by gossip, this one included; 0 if not known yet."""
        ...


class NodeTotals:
    """The counts of the fleet, for one process of a node. Implements `SharedCounts`."""

    def __init__(
        self,
        messenger: Messenger,
        now_ns: Callable[[], int],
        nodes: int,
        note_admitted: Callable[[Sequence[LocalCheck]], None],
        store: LocalStore | None = None,
    ) -> None:
        """`nodes` is the configured number of nodes: a share is never larger than 1 / nodes.

        All processes of the node count in `store`.
        """
        self.note_admitted = note_admitted
        self.store = store
        self._messenger = messenger
        self._now_ns = now_ns
        self._at_most = Fraction(1, nodes)
        self._lock = fork_safe(threading.Lock())
        self._totals: Totals | None = None  # only in the agent
        self._live: set[int] = set()
        self._majority = LiveMajority()
        self._sharing = 1
        self._alone_until_ns = 0
        self._publish_ns = 0
        self._use_ns = 0  # when the shares are updated next
        self._silent_until_ns = 0

    # ── The agent's side ───────────────────────────────────────────────────────────────────────

    def lead(self, node: int | None) -> None:
        """Begin as the agent, with this id in gossip; with None, stop being the agent."""
        with self._lock:
            self._totals = None if node is None else Totals(node)
            self._live = set()
            self._sharing = 1
            self._majority = LiveMajority(self._messenger.heard_nodes())
            self._alone_until_ns = self._now_ns() + ALONE_NS
            self._use()

    def on_changes(self, changes: Sequence[MemberChange]) -> None:
        """Take note of nodes that have become live or stopped being live."""
        with self._lock:
            self._alone_until_ns = 0
            for change in changes:
                (self._live.add if change.live else self._live.discard)(change.node)
                if change.left:
                    self._majority.left()
            self._use()
            if not self._totals:  # no counts yet: the shares can wait for the membership
                self._publish_ns = max(self._publish_ns, self._now_ns() + CALM_NS)
        self.publish()

    def _use(self) -> None:
        """Share the limits among the live nodes; if most nodes are lost, among all, as before.

        A lost node is a member that never answers. While it is a member, no share rises, and it
        accepts no total, so each node stays within its current share.
        """
        totals = self._totals
        if totals is None:
            return
        now_ns = self._now_ns()
        self._use_ns = now_ns + NS_PER_SECOND
        members = sorted({totals.member, *self._live})
        lost = self._majority.lost(len(members), now_ns)
        if len(members) == 1 and now_ns < self._alone_until_ns:
            lost = max(lost, 1)
        self._sharing = len(members) + lost
        # The lost nodes get placeholder numbers: only their count matters.
        shares = equal_shares([*range(-lost, 0), *members])
        totals.use(shares, now_ns, self._at_most)

    def on_payloads(self, payloads: Sequence[ReceivedPayload]) -> None:
        """Handle payloads of other nodes, and answer them."""
        now_ns = self._now_ns()
        with self._lock:
            for each in payloads:
                if self._totals is not None:
                    self._totals.receive(each.node, each.payload, now_ns)
        self.publish()

    def publish(self) -> None:
        """Send a payload if one is due. To be called at least twice a second."""
        now_ns = self._now_ns()
        with self._lock:
            if now_ns >= self._use_ns:
                self._use()
            if self._totals is None or now_ns < self._publish_ns:
                return
            payload = self._totals.compose(now_ns)
            if payload is None or not self._live:
                return
            # The bytes of all nodes together stay below the budget of gossip.
            size = (len(payload) + _DATAGRAM_BYTES) * len(self._live)
            pause_ns = size * NS_PER_SECOND // PUBLISH_BYTES_PER_S
            self._publish_ns = now_ns + max(pause_ns, PUBLISH_NS)
        self._messenger.publish(payload)

    def answer(self, question: bytes) -> bytes | None:
        """Return the answer to a question of another process; None if the question is invalid."""
        found = checks_in(question)
        if found is None:
            return None
        checks, spend = found
        return answer_of(checks, self._decide(checks, spend=spend))

    def _decide(self, checks: Sequence[LocalCheck], *, spend: bool) -> list[Decision] | None:
        with self._lock:
            if self._totals is None:
                return None
            decisions = self._totals.decide(checks, self._now_ns(), spend=spend)
        if spend and decisions and all(decisions):
            self.publish()
        return decisions

    # ── SharedCounts ───────────────────────────────────────────────────────────────────────────

    def nodes(self) -> int:
        """Return how many nodes share the limits."""
        return max(self._messenger.sharing_nodes(), self._sharing)

    def decide(self, checks: Sequence[LocalCheck], *, spend: bool) -> list[Decision] | None:
        """Return a decision for each check; None if the agent cannot answer."""
        if self._totals is not None:
            return self._decide(checks, spend=spend)
        now_ns = self._now_ns()
        if now_ns < self._silent_until_ns:
            return None
        answer = self._messenger.ask(question_of(checks, spend=spend))
        answered_ns = self._now_ns()
        taken_ns = answered_ns - now_ns
        if answer is None:
            self._silent_until_ns = answered_ns + SILENCE_NS
            return None
        if taken_ns > SLOW_NS:
            self._silent_until_ns = answered_ns + SLOW_PAUSE * taken_ns
        return decisions_in(answer, checks, answered_ns)


class LiveMajority:
    """Distinguishes a node that has lost the others from a fleet that has lost some nodes.

    At most one part of a fleet that is cut in two has more than half of its nodes.
    """

    def __init__(self, most: int = 0) -> None:
        """`most` is the number of nodes that were alive before, if it is known."""
        self._most = most
        self._fewer_ns: int | None = None  # since when fewer are alive

    def left(self) -> None:
        """Take note of a node that announced that it leaves."""
        self._most -= 1

    def lost(self, live: int, now_ns: int) -> int:
        """Return how many nodes are lost if at most half of the nodes are live; else 0."""
        if live >= self._most:
            self._most, self._fewer_ns = live, None
        elif self._fewer_ns is None:
            self._fewer_ns = now_ns
        if 2 * live <= self._most:
            return self._most - live
        if self._fewer_ns is not None and now_ns >= self._fewer_ns + DEAD_COUNT_NS:
            self._most, self._fewer_ns = live, None
        return 0


# ── Questions to the agent ─────────────────────────────────────────────────────────────────────


def question_of(checks: Sequence[LocalCheck], *, spend: bool) -> bytes:
    """Return the bytes of a question."""
    found = [
        [each.rule, each.subject, each.units, [[x.name, *limit_numbers(x)] for x in each.limits]]
        for each in checks
    ]
    return json.dumps([spend, found]).encode()


def checks_in(question: bytes) -> tuple[list[LocalCheck], bool] | None:
    """Return the checks of a question and whether they spend; None if the question is invalid."""
    if len(question) > QUESTION_BYTES_MAX:
        return None
    try:
        spend, found = json.loads(question)
        checks = [
            LocalCheck(_limits_in(limits), str(rule), str(subject), _whole(units))
            for rule, subject, units, limits in found
        ]
    except (ValueError, TypeError, IndexError, OverflowError, ConfigError, RecursionError):
        return None
    return (checks, spend is True) if len(checks) <= CHECKS_MAX else None


def _limits_in(found: Any) -> Limits:
    limits: list[Limit] = [limit_of(numbers, name) for name, *numbers in found]
    if not limits:
        raise ValueError(found)
    return tuple(limits)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def answer_of(checks: Sequence[LocalCheck], decisions: Sequence[Decision] | None) -> bytes:
    """Return the bytes of an answer; `decisions` is None if the totals cannot answer."""
    if decisions is None:
        return b"null"
    found = [
        [
            each.allowed,
            check.limits.index(each.policy),
            each.remaining,
            each.retry_after_ns,
            each.reset_after_ns,
            each.delay_ns,
        ]
        for check, each in zip(checks, decisions, strict=True)
    ]
    return json.dumps(found).encode()


def decisions_in(answer: bytes, checks: Sequence[LocalCheck], now_ns: int) -> list[Decision] | None:
    """Return the decisions of an answer; None if it has none or is invalid."""
    try:
        found = json.loads(answer)
        return [
            Decision(
                allowed is True,
                check.limits[_whole(place)],
                _whole(remaining),
                _whole(retry_ns),
                _whole(reset_ns),
                _whole(delay_ns),
                check.rule,
                decided_ns=now_ns,
            )
            for check, (allowed, place, remaining, retry_ns, reset_ns, delay_ns) in zip(
                checks, found, strict=True
            )
        ]
    except (ValueError, TypeError, IndexError, RecursionError):
        return None


# ── Charges ────────────────────────────────────────────────────────────────────────────────────


class OutageCharge(NamedTuple):
    """Units of a subject that were admitted about the same time."""

    limits: Limits
    rule: str
    subject: str
    units: int
    at_ns: int
    """The middle of the first and the last admission, by the node's clock."""


class OutageCharges:
    """The units that this process has admitted while the authority was away. Thread-safe."""

    def __init__(self, subjects_max: int = SUBJECTS_MAX) -> None:
        self._subjects_max = subjects_max
        self._lock = fork_safe(threading.Lock())
        # By rule and subject: groups of first time, last time and units; the newest is last.
        self._groups: dict[tuple[Limits, str, str], list[tuple[int, int, int]]] = {}
        self.lost_units = 0
        """Units of subjects that found no room. They are never charged."""

    def note(self, checks: Sequence[LocalCheck], now_ns: int) -> int:
        """Note units that were admitted now; return how many of them found no room."""
        lost = self.lost_units
        with self._lock:
            for check in checks:
                if check.units:
                    limits, subject = check.part or (check.limits, check.subject)
                    self._add((limits, check.rule, subject), (now_ns, now_ns, check.units))
            return self.lost_units - lost

    def _add(self, key: tuple[Limits, str, str], group: tuple[int, int, int]) -> None:
        groups = self._groups.get(key)
        if groups is None:
            if len(self._groups) >= self._subjects_max:
                self.lost_units += group[2]
                return
            groups = self._groups[key] = []
        groups.append(group)
        groups.sort()
        merged = groups[:1]
        for each in groups[1:]:
            if each[0] < merged[-1][0] + GROUP_NS:
                each = _together(merged.pop(), each)  # noqa: PLW2901 - it takes its place
            merged.append(each)
        if len(merged) > GROUPS_MAX:  # the oldest charges count least
            merged[:2] = [_together(merged[0], merged[1])]
        self._groups[key] = merged

    def take(self, count: int) -> list[OutageCharge]:
        """Remove and return up to about `count` charges, to be reported now."""
        found: list[OutageCharge] = []
        with self._lock:
            while self._groups and len(found) < count:
                (limits, rule, subject), groups = self._groups.popitem()
                found += [
                    OutageCharge(limits, rule, subject, units, (first_ns + last_ns) // 2)
                    for first_ns, last_ns, units in groups
                ]
        return found

    def put_back(self, charges: Sequence[OutageCharge]) -> None:
        """Keep charges that could not be reported."""
        with self._lock:
            for limits, rule, subject, units, at_ns in charges:
                self._add((limits, rule, subject), (at_ns, at_ns, units))

    def clear(self) -> None:
        """Forget all charges: another process reports them."""
        with self._lock:
            self._groups = {}

    def __len__(self) -> int:
        return len(self._groups)


def _together(older: tuple[int, int, int], newer: tuple[int, int, int]) -> tuple[int, int, int]:
    return older[0], max(older[1], newer[1]), older[2] + newer[2]
