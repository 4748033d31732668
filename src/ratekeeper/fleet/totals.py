"""Acknowledged totals: members share a limit without an authority, and never exceed it.

Members are nodes whose authority is away, or regions. Each has a share w of the limit, Σ w = 1. A
member decides at once, from its own state, and sends messages: for each subject *its total* (the
units that it has admitted so far), and which totals of others it *accepts*. Messages may be lost,
repeated, delayed and reordered. Applying a message twice changes nothing.

A member keeps two levels for each limit and subject, here of a bucket with capacity C and rate R:

    known   the units that others have reported, and its own units that all others have accepted
    own     its own units that at least one other member has not accepted yet

Time drains `known` at R. Only when `known` is empty does it drain `own`, at w × R. So the *load*
w × known + own drains at w × R. The member admits a request if

    w × known + own + cost <= w × C

and it **accepts a total only while w × known + own <= w × C holds**, with that total in `known`.

**Why this is never over.** Take any interval (s, t] and let C' = C + R × (t − s). Member i admits
a_i units in it, of which all others accept α_i before t. S_ij are the units of j that i has learnt.
At the last time when its condition held, w_i C' >= a_i − α_i + w_i (α_i + Σ_j S_ij): time has
drained at most w_i × R × (t − s) from the load. When i accepted α_j, its condition held, so
S_ij >= α_j at that last time. The sum over all members is Σ a_i <= C'.

A member that accepted every total it learns would break the last step: it may have spent its share
already, so it has no room to give up. Then three members can exceed the limit although they keep
all rules of the original design (the case is in `tests/fleet/test_totals.py` and in ADR 14).

A window counter follows the same rule on the counts of the current window, and a log on the entries
of the last window. Both count the units of others from the time at which the member learns of them,
which is never too early. A log groups its entries into 64 parts of the window. The entries of a
part expire together, at its end.

**When shares change** (`use`): a member whose share falls lowers it at once. A share rises only
after every other member has announced the same shares. A rise gives no units at once: the member
adds C × (1 − before / after) to `known`, as if the share that it takes over had just been spent.
A member that died may have spent it, and a new member cannot know how much others have spent. The
addition is left out if no member holds any units. Members accept totals only from members with the
same shares.

So the limit holds as long as the shares in use add up to at most 1, that is, as long as no member
that others believe dead still admits units. One case is not covered: a member that starts to admit
units and dies before it sends its first message. Its units, at most its share, remain unknown.

A cost above w × C is denied, although it fits the limit: see `Totals.decide`. All numbers are
integers. Rounding is towards fewer admissions.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from fractions import Fraction
from hashlib import blake2b
from heapq import nlargest
from typing import Any, Final, NamedTuple

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ConfigError
from ratekeeper.core.model import (
    ALGORITHM_NAMES,
    MICROS_PER_UNIT,
    WINDOW_NS_STEP,
    Decision,
    Limit,
    Limits,
)
from ratekeeper.decide.combine import combine
from ratekeeper.decide.failure import RETRY_AFTER_NS, LocalCheck
from ratekeeper.decide.ledgers import exact_room, ledger_of, load, outcome
from ratekeeper.fleet.datagrams import MEMBERS_MAX, PAYLOAD_BYTES_MAX

STATES_MAX: Final = 10_000
# Totals of others that are kept, over all subjects.
SEEN_MAX: Final = 500_000
GATES_MAX: Final = 4_096
# This member, and as many others as gossip remembers.
_SHARES_MAX: Final = MEMBERS_MAX + 1
# Totals that were not accepted are sent again after this time.
REPEAT_NS: Final = NS_PER_SECOND
# A new member without a share denies for this time; dead members are detected sooner.
JOIN_NS: Final = 20 * NS_PER_SECOND
# Payloads that can still be acknowledged: the last ones sent, and the last ones received from each
# member.
SENT_MAX: Final = 64
RECEIVED_MAX: Final = 4
_RISES_MAX: Final = 8
_SWEEP_MAX: Final = 256

_VERSION: Final = 1
_HEADER: Final = struct.Struct(">BQIBBB")  # version, epoch, sequence, flags, acks, gates
_IDLE: Final = 1
_SETTLED: Final = 2
_ACK: Final = struct.Struct(">QIB")  # member, sequence, refused entries
_GATE: Final = struct.Struct(">QBB")  # number, limits, entries
_LIMIT: Final = struct.Struct(">BIIQQ")  # algorithm, limit, capacity, window and step in µs
_ENTRY: Final = struct.Struct(">QIQ")  # subject, generation, total


# The numbers of a rule's limits and of a subject, which identify a state.
_Key = tuple[int, int]


class _Gate:
    """One rule's limits, the same on all members."""

    __slots__ = ("kept_ns", "limits", "number")

    def __init__(self, number: int, limits: Limits) -> None:
        self.number = number
        self.limits = limits
        # Twice the time in which a used-up limit becomes unused, and a window more: then a state
        # that is empty here has expired at the other members, too.
        self.kept_ns = max(
            each.capacity * each.window_ns // each.limit * 2 + each.window_ns for each in limits
        )


class _State:
    """One rule's counts of one subject."""

    __slots__ = (
        "accepted",
        "due",
        "gate",
        "generation",
        "ledgers",
        "missing",
        "published",
        "published_ns",
        "seen",
        "total",
        "touched_ns",
    )

    def __init__(self, gate: _Gate, generation: int, now_ns: int) -> None:
        self.gate = gate
        self.generation = generation
        self.ledgers = [ledger_of(limit) for limit in gate.limits]
        self.total = 0
        self.published = self.published_ns = 0
        # All others have accepted `accepted`. `missing` has a bit for each member that has not
        # accepted `due` yet.
        self.accepted = self.due = self.missing = 0
        self.seen: dict[int, tuple[int, int]] = {}  # by member: generation and total
        self.touched_ns = now_ns

    def fits(self, now_ns: int, share: Fraction, cost: int = 0) -> bool:
        """Return True if w × known + own + cost <= w × C for each limit."""
        return all(exact_room(ledger, now_ns, share) >= cost for ledger in self.ledgers)

    def learn(self, now_ns: int, share: Fraction, units: int) -> None:
        """Add units of another member."""
        for ledger in self.ledgers:
            ledger.add(now_ns, share, units * MICROS_PER_UNIT, 0)
        self.touched_ns = now_ns


class _Entry(NamedTuple):
    gate: _Gate
    subject: int
    generation: int
    total: int


class _Ack(NamedTuple):
    member: int
    sequence: int
    refused: bytes
    """The positions of entries that are not accepted yet."""


class _Message(NamedTuple):
    epoch: int
    sequence: int
    flags: int
    acks: list[_Ack]
    entries: list[_Entry]


class _Received(NamedTuple):
    """A payload of another member, to be acknowledged."""

    sequence: int
    epoch: int
    keys: list[_Key | None]
    """The states of its entries; None for an entry that found no room and is not accepted."""
    said: set[int]
    """The positions that this member has announced as accepted."""


class _Peer:
    """The last announcement of another member, and its payloads to be acknowledged."""

    __slots__ = ("bit", "epoch", "idle", "received", "sequence")

    def __init__(self) -> None:
        self.bit = 0
        self.epoch = self.sequence = 0
        self.idle = True
        self.received: deque[_Received] = deque(maxlen=RECEIVED_MAX)


class Totals:
    """One member's part of the protocol. Not thread-safe. `now_ns` is the member's own clock."""

    def __init__(self, member: int, states_max: int = STATES_MAX) -> None:
        """`member` identifies this member. A member that restarts needs another number."""
        self.member = member
        self._states_max = states_max
        self._states: dict[_Key, _State] = {}
        self._gates: dict[int, _Gate] = {}
        self._numbers: dict[tuple[Limits, str], int] = {}
        self._peers: dict[int, _Peer] = {}
        self._shares: dict[int, Fraction] = {}
        self._epoch = 0
        self._announced = (0, 0)  # epoch and flags
        self._announced_ns = 0
        self._share = self._target = Fraction(0)
        self._waits_ns = 0  # when it was first assigned a share
        self._owes = False  # a former member held units
        self._rises: list[tuple[int, Fraction]] = []
        self._sequence = self._generation = self._seen = self._ack_turn = 0
        self._open: dict[_Key, _State] = {}  # totals that are not accepted
        self._sent: dict[int, list[tuple[_Key, int, int]]] = {}
        self.dropped = 0
        """Payloads that could not be read."""
        self.refused = 0
        """How often a new subject found no room."""

    # ── Shares ─────────────────────────────────────────────────────────────────────────────────

    @property
    def share(self) -> Fraction:
        """The share that this member uses now."""
        return self._share

    @property
    def settled(self) -> bool:
        """True if all members have announced the same shares, and this one uses its own."""
        return self._share == self._target and all(
            peer.epoch == self._epoch for peer in self._peers.values()
        )

    def use(
        self, shares: Mapping[int, Fraction], now_ns: int, at_most: Fraction | None = None
    ) -> None:
        """Set the shares of all members, including this one. They add up to at most 1.

        `at_most` lowers only the share of this member; the others need not know it.
        """
        if len(shares) > _SHARES_MAX or self.member not in shares or sum(shares.values()) > 1:
            raise ConfigError(
                f"the shares of {len(shares)} members cannot be used: at most {_SHARES_MAX:,} "
                f"members, this one ({self.member}) among them, and shares of at most 1 together"
            )
        target = min(shares[self.member], at_most or shares[self.member])
        if shares == self._shares and target == self._target:
            return
        self._owes |= any(not p.idle for m, p in self._peers.items() if m not in shares)
        self._shares = dict(shares)
        text = ",".join(f"{member}:{shares[member]}" for member in sorted(shares))
        self._epoch = int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) | 1
        others = sorted(member for member in shares if member != self.member)
        self._peers = {member: self._peers.get(member) or _Peer() for member in others}
        for place, peer in enumerate(self._peers.values()):
            peer.bit = 1 << place
        for state in self._open.values():
            state.due, state.missing, state.published_ns = state.accepted, 0, 0
        self._target = target
        self._waits_ns = self._waits_ns or now_ns
        if target < self._share:
            self._set_share(target, now_ns)
        self._raise_share(now_ns)

    def _raise_share(self, now_ns: int) -> None:
        """Raise the share, once all members have announced the same shares."""
        target = self._target
        if any(peer.epoch != self._epoch for peer in self._peers.values()):
            return
        if self._share < target:
            before = self._share
            spent = self._owes or bool(self._states)
            spent = spent or not all(peer.idle for peer in self._peers.values())
            self._set_share(target, now_ns)
            if spent:
                self._rise(1 - before / target, now_ns)
        self._owes = False

    def _rise(self, part: Fraction, now_ns: int) -> None:
        """Count the part by which the share has grown as spent, for each limit."""
        for state in self._states.values():
            self._count_rise(state, part, now_ns)
        self._rises.append((now_ns, part))
        if len(self._rises) > _RISES_MAX:
            (_, first), (second_ns, second), *others = self._rises
            self._rises = [(second_ns, min(first + second, Fraction(1))), *others]

    def _count_rise(self, state: _State, part: Fraction, now_ns: int) -> None:
        for ledger in state.ledgers:
            micros = -(-ledger.limit.capacity * MICROS_PER_UNIT * part // 1)  # rounds up
            ledger.add(now_ns, self._share, micros, 0)

    def _set_share(self, share: Fraction, now_ns: int) -> None:
        for state in self._states.values():
            for ledger in state.ledgers:
                ledger.add(now_ns, self._share, 0, 0)  # drains at the share in use until now
        self._share = share

    # ── Decisions ──────────────────────────────────────────────────────────────────────────────

    def decide(
        self, checks: Sequence[LocalCheck], now_ns: int, *, spend: bool
    ) -> list[Decision] | None:
        """Return the decision on each rule of a request; all pass, or none is charged.

        Returns None if this member cannot answer: its share of a limit is less than one unit, there
        is no room for a new subject, or it still has no share after JOIN_NS because the others have
        not announced the same shares. A cost above the share, which may fit the whole limit, is
        denied for RETRY_AFTER_NS: only the authority could admit it.
        """
        if not self._share and now_ns >= self._waits_ns + JOIN_NS:
            return None
        parts, whole = self._share.as_integer_ratio()
        found: list[tuple[_Key, _State]] = []
        costs: dict[_Key, int] = {}
        new: dict[_Key, _State] = {}  # stored once they are charged
        for check in checks:
            key = (self._number(check), subject_number(check.subject))
            state = self._states.get(key) or new.get(key)
            if state is None:
                gate = self._gate(key[0], check.limits)
                if gate is None or (state := self._new_state(gate, now_ns)) is None:
                    return None
                new[key] = state
            if any(0 < parts * limit.capacity < whole for limit in check.limits):
                return None
            found.append((key, state))
            costs[key] = costs.get(key, 0) + check.units
        # A cost of 0 only reads: it is allowed at any load.
        charged = spend and all(
            not costs[key] or state.fits(now_ns, self._share, costs[key]) for key, state in found
        )
        if charged:
            for check, (key, state) in zip(checks, found, strict=True):
                self._charge(key, state, check.units, now_ns)
        return [
            self._decision(check, state, now_ns, charged=charged)
            for check, (_, state) in zip(checks, found, strict=True)
        ]

    def _charge(self, key: _Key, state: _State, units: int, now_ns: int) -> None:
        if not units:
            return
        for ledger in state.ledgers:
            ledger.add(now_ns, self._share, 0, units * MICROS_PER_UNIT)
        state.total += units
        state.touched_ns = now_ns
        self._states[key] = self._open[key] = state

    def _decision(
        self, check: LocalCheck, state: _State, now_ns: int, *, charged: bool
    ) -> Decision:
        share = self._share
        parts, whole = share.as_integer_ratio()
        if not parts or any(check.units * whole > parts * each.capacity for each in check.limits):
            retry_ns = RETRY_AFTER_NS if check.units else 0
            return Decision(
                not check.units, check.limits[0], 0, retry_ns, retry_ns, 0, check.rule, True
            )
        outcomes = [
            outcome(
                ledger,
                now_ns,
                share,
                load(ledger, now_ns, share),
                check.units,
                exact_room(ledger, now_ns, share),
                charged=charged,
            )._replace(charged_ns=None)
            for ledger in state.ledgers
        ]
        return combine(check.limits, outcomes, check.rule, now_ns)

    def _number(self, check: LocalCheck) -> int:
        number = self._numbers.get((check.limits, check.rule))
        if number is None:
            if len(self._numbers) >= GATES_MAX:
                self._numbers.clear()
            number = self._numbers[check.limits, check.rule] = gate_number(check.limits, check.rule)
        return number

    def _gate(self, number: int, limits: Limits) -> _Gate | None:
        gate = self._gates.get(number)
        if gate is not None:
            return gate
        if len(self._gates) >= GATES_MAX:  # of old versions of the rules
            used = {key[0] for key in self._states}
            self._gates = {each: gate for each, gate in self._gates.items() if each in used}
        if len(self._gates) < GATES_MAX:
            gate = self._gates[number] = _Gate(number, limits)
        return gate

    def _new_state(self, gate: _Gate, now_ns: int) -> _State | None:
        if len(self._states) >= self._states_max:
            self.refused += 1
            return None
        self._generation += 1
        state = _State(gate, self._generation, now_ns)
        for rise_ns, part in self._rises:
            self._count_rise(state, part, rise_ns)
        return state

    # ── Messages ───────────────────────────────────────────────────────────────────────────────

    def receive(self, member: int, payload: bytes, now_ns: int) -> None:
        """Handle a payload of another member. An invalid one is dropped and counted."""
        peer = self._peers.get(member)
        try:
            message = _decoded(payload)
        except (struct.error, IndexError, OverflowError, ConfigError):
            self.dropped += 1
            return
        if peer is None:
            return
        if message.sequence > peer.sequence:
            if message.epoch != peer.epoch or not message.flags & _SETTLED:
                self._announced = (0, 0)  # it may have missed this member's announcement
            peer.sequence, peer.epoch = message.sequence, message.epoch
            peer.idle = bool(message.flags & _IDLE)
            self._raise_share(now_ns)
        keys = [self._learn(member, entry, now_ns) for entry in message.entries]
        repeated = any(each.sequence == message.sequence for each in peer.received)
        if keys and not repeated:
            peer.received.append(_Received(message.sequence, message.epoch, keys, set()))
        if self.settled and message.epoch == self._epoch:
            for ack in message.acks:
                if ack.member == self.member:
                    self._accepted(peer, ack, now_ns)

    def _learn(self, member: int, entry: _Entry, now_ns: int) -> _Key | None:
        """Count the units of a total that were not known yet; return the key of its state."""
        gate = self._gate(entry.gate.number, entry.gate.limits)
        key = (entry.gate.number, entry.subject)
        state = self._states.get(key)
        if state is None:
            if gate is None or (state := self._new_state(gate, now_ns)) is None:
                return None
            self._states[key] = state
        if member not in state.seen:
            if self._seen >= SEEN_MAX:
                return None
            self._seen += 1
        generation, total = state.seen.get(member, (0, 0))
        if entry.generation > generation:
            generation, total = entry.generation, 0
        if entry.generation == generation and entry.total > total:
            state.learn(now_ns, self._share, entry.total - total)
            total = entry.total
        state.seen[member] = (generation, total)
        return key

    def _accepted(self, peer: _Peer, ack: _Ack, now_ns: int) -> None:
        """Note that another member has accepted totals of a payload."""
        for place, (key, generation, total) in enumerate(self._sent.get(ack.sequence, ())):
            state = self._states.get(key)
            if place in ack.refused or state is None or state.generation != generation:
                continue
            if state.due > state.accepted and total >= state.due:
                state.missing &= ~peer.bit
                if not state.missing:
                    self._move(key, state, now_ns)

    def _move(self, key: _Key, state: _State, now_ns: int) -> None:
        state.accepted = state.due
        for ledger in state.ledgers:
            ledger.move(now_ns, self._share, (state.total - state.accepted) * MICROS_PER_UNIT)
        if state.accepted == state.total:
            self._open.pop(key, None)

    def compose(self, now_ns: int) -> bytes | None:
        """Return the next payload for all other members; None if there is nothing to send.

        The payload has the totals that changed most, and the totals that this member accepts. Call
        this about every 100 ms.
        """
        self._sweep(now_ns)
        if not self._peers:
            for key, state in list(self._open.items()):
                state.due = state.total
                self._move(key, state, now_ns)
            return None
        settled = self.settled
        flags = (0 if self._states else _IDLE) | (_SETTLED if settled else 0)
        acks = list(self._acks(now_ns)) if settled else []
        entries = self._due_entries(now_ns)
        said = self._announced == (self._epoch, flags)
        if not settled and now_ns >= self._announced_ns + REPEAT_NS:
            said = False
        if said and not acks and not entries:
            return None
        self._announced, self._announced_ns = (self._epoch, flags), now_ns
        self._sequence += 1
        payload, sent = _encoded(self._epoch, self._sequence, flags, acks, entries)
        self._sent[self._sequence] = [(key, state.generation, state.total) for key, state in sent]
        self._sent.pop(self._sequence - SENT_MAX, None)
        everyone = (1 << len(self._peers)) - 1
        for _, state in sent:
            state.published, state.published_ns = state.total, now_ns
            if state.due == state.accepted:
                state.due, state.missing = state.total, everyone
        return payload

    def _acks(self, now_ns: int) -> Iterator[_Ack]:
        """Yield acceptances that this member has not announced yet; it takes members in turn."""
        room = PAYLOAD_BYTES_MAX // 2
        members = list(self._peers)
        first = self._ack_turn % len(members)
        for member in members[first:] + members[:first]:
            for each in self._peers[member].received:
                if each.epoch != self._epoch or len(each.said) == len(each.keys):
                    continue
                accepted = {at for at, key in enumerate(each.keys) if self._accepts(key, now_ns)}
                if accepted <= each.said:
                    continue
                ack = _Ack(member, each.sequence, bytes(set(range(len(each.keys))) - accepted))
                room -= _ACK.size + len(ack.refused)
                if room < 0:
                    return
                each.said.update(accepted)
                yield ack
            self._ack_turn += 1

    def _accepts(self, key: _Key | None, now_ns: int) -> bool:
        state = None if key is None else self._states.get(key)
        return state is not None and state.fits(now_ns, self._share)

    def _due_entries(self, now_ns: int) -> list[tuple[_Key, _State]]:
        due = [
            (key, state)
            for key, state in self._open.items()
            if state.total > state.published or now_ns >= state.published_ns + REPEAT_NS
        ]
        room = PAYLOAD_BYTES_MAX // _ENTRY.size
        return nlargest(room, due, key=lambda item: item[1].total - item[1].accepted)

    def _sweep(self, now_ns: int) -> None:
        """Forget states that are empty and were not used for long."""
        for _ in range(min(_SWEEP_MAX, len(self._states))):
            key = next(iter(self._states))
            state = self._states.pop(key)
            if now_ns < state.touched_ns + state.gate.kept_ns or any(
                load(ledger, now_ns, self._share) for ledger in state.ledgers
            ):
                self._states[key] = state
            else:
                self._seen -= len(state.seen)
                self._open.pop(key, None)

    def __len__(self) -> int:
        return len(self._states)


def equal_shares(members: Sequence[int]) -> dict[int, Fraction]:
    """Return equal shares for all members.

    >>> equal_shares([7, 8, 9])[7]
    Fraction(1, 3)
    """
    return dict.fromkeys(members, Fraction(1, len(members)))


def subject_number(subject: str) -> int:
    """Return the number that identifies a subject in payloads."""
    return int.from_bytes(blake2b(subject.encode(), digest_size=8).digest())


def gate_number(limits: Limits, rule: str) -> int:
    """Return the number that identifies the limits of a rule in payloads."""
    text = "\x1f".join([rule, *(f"{limit.name}\x1e{limit}" for limit in limits)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


# ── Payloads ───────────────────────────────────────────────────────────────────────────────────


def _encoded(
    epoch: int,
    sequence: int,
    flags: int,
    acks: list[_Ack],
    entries: list[tuple[_Key, _State]],
) -> tuple[bytes, list[tuple[_Key, _State]]]:
    """Return a payload, and the entries that had room in it, in its order."""
    room = PAYLOAD_BYTES_MAX - _HEADER.size
    ack_parts: list[bytes] = []
    for ack in acks[:255]:
        part = _ACK.pack(ack.member, ack.sequence, len(ack.refused)) + ack.refused
        if len(part) > room:
            break
        room -= len(part)
        ack_parts.append(part)
    by_gate: dict[int, list[tuple[_Key, _State]]] = {}
    for key, state in entries:
        size = _ENTRY.size
        if key[0] not in by_gate:
            size += _GATE.size + _LIMIT.size * len(state.gate.limits)
        if size > room or (len(by_gate) == 255 and key[0] not in by_gate):
            break
        room -= size
        by_gate.setdefault(key[0], []).append((key, state))
    parts = [_HEADER.pack(_VERSION, epoch, sequence, flags, len(ack_parts), len(by_gate))]
    parts += ack_parts
    for number, group in by_gate.items():
        limits = group[0][1].gate.limits
        parts.append(_GATE.pack(number, len(limits), len(group)))
        parts += [_LIMIT.pack(*limit_numbers(limit)) for limit in limits]
        parts += [_ENTRY.pack(key[1], each.generation, each.total) for key, each in group]
    return b"".join(parts), [item for group in by_gate.values() for item in group]


def limit_numbers(limit: Limit) -> tuple[int, int, int, int, int]:
    """Return the numbers of a limit: algorithm, limit, capacity, window and step in µs."""
    step_us = limit.refill_step_ns // WINDOW_NS_STEP if limit.refill_step_ns > 1 else 0
    return (
        ALGORITHM_NAMES.index(limit.algorithm),
        limit.limit,
        limit.capacity,
        limit.window_ns // WINDOW_NS_STEP,
        step_us,
    )


def limit_of(numbers: Sequence[Any], name: str = "") -> Limit:
    """Return the limit with these numbers. Raises ConfigError, IndexError, OverflowError."""
    algorithm, limit, capacity, window_us, step_us = numbers
    kind = ALGORITHM_NAMES[algorithm]
    is_bucket = kind in {"token_bucket", "leaky_bucket"}
    return Limit(
        limit,
        timedelta(microseconds=window_us),
        algorithm=kind,
        capacity=capacity if is_bucket else 0,
        name=name,
        refill_every=timedelta(microseconds=step_us),
    )


def _decoded(payload: bytes) -> _Message:
    """Return the content of a payload. Raises struct.error, IndexError, ConfigError."""
    version, epoch, sequence, flags, ack_count, gate_count = _HEADER.unpack_from(payload)
    if version != _VERSION:
        raise ConfigError(f"version {version} of a payload is unknown")
    at = _HEADER.size
    acks: list[_Ack] = []
    for _ in range(ack_count):
        member, of, refused = _ACK.unpack_from(payload, at)
        at += _ACK.size + refused
        if at > len(payload):
            raise IndexError
        acks.append(_Ack(member, of, payload[at - refused : at]))
    entries: list[_Entry] = []
    for _ in range(gate_count):
        number, limit_count, entry_count = _GATE.unpack_from(payload, at)
        at += _GATE.size
        limits = []
        for _ in range(limit_count):
            limits.append(limit_of(_LIMIT.unpack_from(payload, at)))
            at += _LIMIT.size
        if not limits:
            raise ConfigError("a payload has a rule without limits")
        gate = _Gate(number, tuple(limits))
        for _ in range(entry_count):
            entries.append(_Entry(gate, *_ENTRY.unpack_from(payload, at)))
            at += _ENTRY.size
    return _Message(epoch, sequence, flags, acks, entries)
