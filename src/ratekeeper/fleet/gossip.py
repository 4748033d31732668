"""Gossip between the nodes of a fleet, as a state machine without sockets, clocks and threads.

Nodes announce which nodes are alive, which subjects are warm or denied, and, while the authority is
away, the units that they have admitted. Gossip is an optimisation and a fallback. As long as the
authority answers, no strict or leased limit depends on it.

**Membership.** A node is a number, chosen at random when its process starts. Every 5 s it makes a
*heartbeat*: an entry with its address, its status and its uptime, which is also the version of the
entry. Nodes pass entries on, each with its age. An entry that is newer than the known one replaces
it. A node whose last heartbeat is older than 15 s is dead. Ages are differences of one clock: every
node adds the time for which it has held the entry. The time on the network is not counted, so an
entry can only seem younger than it is, by some milliseconds. A node that stops announces it. A node
that restarts is a new node, which replaces the earlier one at the same address.

**Rounds.** About every 100 ms, a node sends its news to 3 random peers: each new entry six times,
each hint three to six times. A message also has a *digest*, a hash of the live nodes in 16 parts. A
peer whose digest differs answers with the entries of the parts that differ. So nodes that join,
also 180 at once, and halves of a fleet that meet again after a partition agree within a few rounds.
About once a second, a node contacts an address at which it knows no live node. A node whose last
sign of life is older than 7.5 s is suspected, and the suspecting nodes contact it directly.

**Hints** are urgent. Their origin sends them to all live peers at once: one hop. If the peers are
too many, or if the byte budget does not allow it, the origin sends them through *relays*: one
random peer of each of the 16 parts of the digest, two for a `warm` hint. A relay sends the hint on
to all peers of its own part that it knows. So the origin sends 16 copies, and each relay a
sixteenth of the rest. A relay chooses the receivers from its own list, and a node does not forward
a hint that came from a relay. So a node forwards each hint at most once, whatever other nodes
believe or claim about the members. If relays are lost, or the lists of nodes differ, rounds repair
it: they repeat `warm` hints and long denials. A denial that is over before the next rounds is not
repeated. The origin numbers its hints, so that every node applies each once.

A limit of 1,000 a minute that is used up gains a unit every 60 ms. The first node that asks gets
it, and all others have to learn of the denial that follows. So a hint leaves at once while the byte
budget allows it, and its times are in microseconds.

**Payloads** are sent to each live peer until it acknowledges them or is dead.

**Bytes.** A node has a budget of 50 KB a second, the mean of 10 s. When it runs low, hints are no
longer repeated, then they wait and share datagrams, then they are dropped. At last rounds shrink to
one small message, which keeps the membership alive.

**Replays.** Datagrams are authenticated (`fleet/datagrams.py`), and an attacker may record and
repeat them. Every message has a sequence, the sender's uptime in microseconds. A node drops a
message whose sequence it has seen, or whose sequence is 5 s behind the newest that it knows of that
sender, from a message or from an entry that a peer passed on. But it knows no sequence of an
unknown sender, which may be long dead. So it accepts messages of such a sender only if a live peer
has passed on a fresh entry of it, or if the message repeats a random number, the *nonce*, which
this node made within the last 30 s. A node that contacts a stranger sends its own nonce, and gets
the stranger's. That answer is not longer than the question, and questions that are not authentic
are not answered at all. An attacker can replay a recorded question of a dead node, so answers to
strangers have a small budget of their own: replays take no bytes from hints and payloads. These
attacks remain possible. An attacker who can hold back datagrams can deliver them up to 10 s late (5
s of the window, 5 s between heartbeats). Messages name no recipient, except payloads and
acknowledgements, so an attacker can deliver a copy to another node, which takes it as sent to
itself; a node answers a peer only at the peer's own address. An attacker who repeats questions
without end can delay nodes that join through the attacked node. An attacker who controls all of a
node's traffic can cut it off. Every node that has the key is trusted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal, NamedTuple, TypeVar

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.histogram import Histogram
from ratekeeper.decide.allowances import SUBJECT_BYTES_MAX
from ratekeeper.fleet.datagrams import (
    ACK_BYTES,
    DATAGRAM_BYTES_MAX,
    DIGEST_BYTES,
    DIGEST_PARTS,
    ENTRIES_MAX,
    MEMBERS_MAX,
    MESSAGE_BYTES_MIN,
    PACKET_BYTES,
    PAYLOAD_BYTES_MAX,
    PROOF_BYTES,
    U16_MAX,
    U32_MAX,
    U64_MAX,
    AckEntry,
    Address,
    HintEntry,
    HintKind,
    MemberEntry,
    Message,
    NodeStatus,
    PayloadEntry,
    cut_text,
    message_size,
)

T = TypeVar("T")

MemberState = Literal["alive", "suspected", "dead", "left"]
Outgoing = tuple[Address, Message]

SEEDS_MAX: Final = 1_000
HINTS_MAX: Final = 16_384
# Payloads that some peer has not acknowledged, and how many more a peer may be ahead of them.
OUTBOX_MAX: Final = 256
PAYLOAD_WINDOW: Final = 64
# Received hints and payloads that the caller has not taken yet.
INBOX_MAX: Final = 10_000
SEQUENCES_MAX: Final = 128
SEQUENCE_WINDOW: Final = 5_000_000  # in microseconds of the sender
# How often a node sends a new entry and a hint in rounds.
MEMBER_SENDS: Final = 6
HINT_SENDS: Final = 6
# If the budget is not nearly full, a hint is sent only this often.
HINT_SENDS_FEW: Final = 3
NONCE_NS: Final = 15 * NS_PER_SECOND
# A node introduces itself to a peer that it has not heard from directly for this long.
MET_NS: Final = 30 * NS_PER_SECOND
PROBE_NS: Final = NS_PER_SECOND
# A node without peers contacts its seeds in every round for this long, and then once a second.
EAGER_NS: Final = 5 * NS_PER_SECOND
SWEEP_NS: Final = NS_PER_SECOND // 2
LEFT_NS: Final = 60 * NS_PER_SECOND
FORGET_NS: Final = 600 * NS_PER_SECOND
# A denial that lasts as long as this saves many calls. A shorter one is sent if there is room, and
# is not repeated in rounds: it would arrive when it is over.
LONG_US: Final = 200_000
# Relays in each part of the fleet. A lost `warm` hint costs units over a limit, a denial one call.
RELAYS: Final[Mapping[HintKind, int]] = {"warm": 2, "denied": 1}
# The part of the budget that a hint to all peers must leave, for some hints through relays.
DIRECT_RESERVE: Final = 0.15
# A hint waits this long for bytes.
URGENT_NS_MAX: Final = NS_PER_SECOND // 20
DENIED_NS_MIN: Final = NS_PER_SECOND // 100
HINT_MEMORY_NS: Final = 5 * NS_PER_SECOND
WARM_REPEAT_NS: Final = NS_PER_SECOND // 10
ACK_NS: Final = NS_PER_SECOND // 100
RESEND_NS_MIN: Final = 3 * NS_PER_SECOND // 10
RESEND_NS_MAX: Final = 3 * NS_PER_SECOND
# When the budget is low: the bytes of the one message of a round.
FRUGAL_BYTES: Final = 250
_MS: Final = 1_000_000
_US: Final = 1_000


@dataclass(frozen=True, slots=True)
class GossipSettings:
    """Timing and bounds. The defaults suit fleets of up to some 300 nodes."""

    round_ns: int = NS_PER_SECOND // 10
    """The mean time between two rounds; each takes ± 30 %."""
    fanout: int = 3
    heartbeat_ns: int = 5 * NS_PER_SECOND
    suspected_ns: int = 15 * NS_PER_SECOND // 2
    dead_ns: int = 15 * NS_PER_SECOND
    hint_ns_max: int = 5 * NS_PER_SECOND
    """Older hints are dropped."""
    urgent_ns: int = NS_PER_SECOND // 1_000
    """If half of the budget is used, hints that arise within this time share a datagram."""
    direct_peers_max: int = 250
    """With more peers, a hint is sent through relays."""
    bytes_per_second: int = 50_000
    """A node sends less than this in the mean of every 10 s, IP and UDP headers included."""


class Member(NamedTuple):
    """A node as another node sees it."""

    node: int
    """Chosen at random when the process started: a node that restarts is a new one."""
    address: Address
    state: MemberState
    status: NodeStatus
    age_ns: int
    """Time since the last sign of life: the node's last heartbeat, or its last message to this
    node."""
    uptime_ns: int


class Hint(NamedTuple):
    """Another node's hint about a subject."""

    kind: HintKind
    """`warm`: stop spending the subject's budget. `denied`: deny the subject."""
    gate: int
    """`AllowanceGate.number`."""
    subject: str
    cost: int
    """Checks of at least this cost are denied; 0 for `warm`."""
    lasts_ns: int
    """For how long from now; 0 for `warm`."""


class ReceivedPayload(NamedTuple):
    """A payload that another node has published."""

    node: int
    sequence: int
    payload: bytes


class MemberChange(NamedTuple):
    """A node that has become live, or has stopped being live."""

    node: int
    live: bool
    left: bool = False
    """True if the node announced that it leaves, or another node has taken its address."""


class _GossipPeer:
    """Another node."""

    __slots__ = (
        "acked",
        "acked_beyond",
        "address",
        "beat",
        "beat_ns",
        "first_beat",
        "floor",
        "got",
        "got_beyond",
        "heard_ns",
        "left",
        "live",
        "met_ns",
        "newest",
        "node",
        "resend_ns",
        "resends",
        "sent",
        "sequences",
        "status",
    )

    def __init__(self, entry: MemberEntry, heard_ns: int) -> None:
        self.node = entry.node
        self.address = entry.address
        self.beat = self.first_beat = entry.beat
        self.beat_ns = heard_ns  # the time of its last heartbeat
        self.heard_ns = heard_ns  # the time of its last sign of life
        self.left = entry.left
        self.live = False
        self.met_ns: int | None = None  # its last message that shows that it knows us
        self.status = entry.status
        # The sequences of its messages: one up to the floor is dropped.
        self.floor = self.newest = entry.beat
        self.sequences: set[int] = set()
        # Our payloads: the acknowledged ones, the sent ones, and when to send again.
        self.acked = self.sent = 0
        self.acked_beyond = 0
        self.resend_ns = 0
        self.resends = 0
        # Its payloads.
        self.got = 0
        self.got_beyond: set[int] = set()

    def take_sequence(self, sequence: int) -> bool:
        """Return True if a message with this sequence has not been taken yet."""
        if sequence <= self.floor or sequence in self.sequences:
            return False
        self.sequences.add(sequence)
        self.raise_newest(sequence)
        if len(self.sequences) > SEQUENCES_MAX:
            ordered = sorted(self.sequences)
            self.floor = max(self.floor, ordered[len(ordered) // 2])
            self.sequences = {each for each in ordered if each > self.floor}
        return True

    def raise_newest(self, sequence: int) -> None:
        self.newest = max(self.newest, sequence)
        self.floor = max(self.floor, self.newest - SEQUENCE_WINDOW)

    def knows_us(self, now_ns: int) -> bool:
        """Return True if the peer has accepted our messages lately, as far as we can know."""
        return self.met_ns is not None and now_ns - self.met_ns < MET_NS

    def uptime_us(self, now_ns: int) -> int:
        return self.beat + (now_ns - self.beat_ns) // 1_000


class _Hint:
    """A hint that this node knows."""

    __slots__ = ("born_ns", "entry", "sends", "size")

    def __init__(self, entry: HintEntry, born_ns: int, node: int) -> None:
        self.entry = entry
        self.born_ns = born_ns
        self.sends = HINT_SENDS
        self.size = entry.size(node)

    def at(self, now_ns: int, *, forwarded: bool = False) -> HintEntry:
        """Return the entry to send now."""
        origin, number, kind, _, gate, subject, cost, _, lasts_us = self.entry
        age_us = min(_age(self.born_ns, now_ns, _US), U32_MAX)
        return HintEntry(origin, number, kind, forwarded, gate, subject, cost, age_us, lasts_us)

    def ends_ns(self, hint_ns_max: int) -> int:
        """Return when the hint stops being of use."""
        lasts_ns = self.entry.lasts_us * _US if self.entry.kind == "denied" else hint_ns_max
        return self.born_ns + min(lasts_ns, hint_ns_max)


class _Known(NamedTuple):
    """A hint about a subject that all nodes know, or soon will know."""

    cost: int
    ends_ns: int


class _Budget:
    """Bytes that a node may send: a token bucket that may be overdrawn."""

    def __init__(self, rate: float, capacity: float, now_ns: int) -> None:
        self.capacity = self._left = capacity
        self._rate = rate
        self._at_ns = now_ns
        self.spent = 0

    def share(self, now_ns: int) -> float:
        """Return the remaining part of the capacity; below 0 if overdrawn."""
        gained = (now_ns - self._at_ns) * self._rate / NS_PER_SECOND
        if gained > 0:
            self._left = min(self._left + gained, self.capacity)
            self._at_ns = now_ns
        return self._left / self.capacity

    def spend(self, count: int) -> None:
        self._left -= count
        self.spent += count


def _age(since_ns: int, now_ns: int, unit_ns: int) -> int:
    """Return an age, rounded up, so that no hint lasts longer than it should."""
    return max(-((since_ns - now_ns) // unit_ns), 0)


def _age_ms(since_ns: int, now_ns: int) -> int:
    return min(_age(since_ns, now_ns, _MS), U16_MAX)


class Gossip:
    """One node's part of the protocol.

    A caller passes received messages to `receive`, calls `tick` at `due_ns`, and sends the messages
    that both return. Times are the caller's clock, which must not step. Not thread-safe. All tables
    and queues are bounded.
    """

    def __init__(
        self,
        address: Address,
        random: Random,
        now_ns: int,
        settings: GossipSettings | None = None,
        status: NodeStatus | None = None,
    ) -> None:
        """`address` is the address that other nodes send to."""
        self.settings = settings or GossipSettings()
        self.node = random.randrange(1, U64_MAX)
        self._random = random
        self._address = address
        self._started_ns = now_ns
        self._sequence = 0
        self._leaving = False
        # Together below the rate, averaged over every 10 s: 82 % + 100 % / 10 + 2 % + 50 % / 10. A
        # round is always sent, and is small if the budget is empty. Half a second of bytes for
        # strangers is enough for 180 nodes that join at once.
        rate = float(self.settings.bytes_per_second)
        self._budget = _Budget(rate * 0.82, rate, now_ns)
        self._strangers = _Budget(rate * 0.02, rate * 0.5, now_ns)
        self._counters: Counter[str] = Counter()
        self._lag = Histogram()
        # Membership.
        self.seeds: list[Address] = []
        self._peers: dict[int, _GossipPeer] = {}
        self._live: list[_GossipPeer] = []
        self._suspects: list[_GossipPeer] = []
        self._live_at: dict[Address, _GossipPeer] = {}
        self._digest = [0] * DIGEST_PARTS
        self._hot: dict[int, int] = {}  # nodes whose entries are new: how often to send them
        self._changes: deque[MemberChange] = deque(maxlen=INBOX_MAX)
        self._nonces = (self._new_nonce(), 0)
        self._nonce_ns = now_ns
        self._toggle_digest(self.node)
        # Hints.
        self._hint_number = 0
        self._hints: dict[tuple[int, int], _Hint] = {}  # of other nodes
        self._known: dict[tuple[HintKind, int, str], _Known] = {}
        self._urgent: list[_Hint] = []
        self._relaying: list[_Hint] = []
        self._repairing: deque[_Hint] = deque(maxlen=HINTS_MAX)
        self._hint_inbox: deque[Hint] = deque()
        # Payloads.
        self._published = 0
        self._outbox: dict[int, bytes] = {}
        self._owed_acks: dict[int, None] = {}
        self._payload_inbox: deque[ReceivedPayload] = deque()
        # When the next actions are due.
        never = now_ns + 10**18
        self._never_ns = never
        self._urgent_ns = self._ack_ns = self._payload_ns = never
        self._round_ns = now_ns + random.randrange(self.settings.round_ns)
        self._probe_ns = now_ns
        self._sweep_ns = now_ns + SWEEP_NS
        self.set_status(status or NodeStatus())
        self._beat(now_ns)

    # ── The caller's side: time ────────────────────────────────────────────────────────────────

    @property
    def due_ns(self) -> int:
        """When `tick` has to be called next. Every other call may make it earlier."""
        return min(self._round_ns, self._urgent_ns, self._ack_ns, self._payload_ns)

    def tick(self, now_ns: int) -> list[Outgoing]:
        """Return the messages that are due, with the addresses to send them to."""
        out: list[Outgoing] = []
        if self._leaving:
            self._round_ns = self._never_ns
            return out
        if now_ns >= self._urgent_ns:
            self._send_urgent(now_ns, out)
        if now_ns >= self._payload_ns:
            self._send_payloads(now_ns, out)
        if now_ns >= self._ack_ns:
            self._send_acks(now_ns, out)
        if now_ns >= self._round_ns:
            self._round(now_ns, out)
        return out

    def receive(self, message: Message, source: Address, now_ns: int) -> list[Outgoing]:
        """Handle a message of another node; return messages to send at once."""
        out: list[Outgoing] = []
        self._counters["received"] += 1
        self._counters["received_bytes"] += message_size(message) + PACKET_BYTES
        if self._leaving or message.sender == self.node:
            self._drop("own")
            return out
        peer = self._accepted(message, source, now_ns, out)
        if peer is None:
            return out
        if message.sequence == peer.newest:
            peer.heard_ns = now_ns
        if not message.nonce:
            peer.met_ns = now_ns
        for entry in message.members:
            self._merge(entry, now_ns)
        for hint in message.hints:
            self._take_hint(hint, now_ns)
        for payload in message.payloads:
            self._take_payload(peer, payload, now_ns)
        for ack in message.acks:
            self._take_ack(peer, ack, now_ns)
        if message.nonce or message.digest:
            self._answer(message, peer.address, now_ns, out)
        return out

    def leave(self, now_ns: int) -> list[Outgoing]:
        """Return the messages that announce that this node stops."""
        out: list[Outgoing] = []
        self._beat(now_ns)
        gone = self._own_entry(now_ns)._replace(left=True)
        message = self._message(now_ns, members=(gone,))
        targets = self._live
        if len(targets) > self.settings.direct_peers_max:
            targets = self._sample(self.settings.direct_peers_max)
        for peer in targets:
            self._send(out, peer.address, message)
        self._leaving = True
        return out

    # ── The caller's side: members ─────────────────────────────────────────────────────────────

    def join(self, addresses: Iterable[Address]) -> None:
        """Set the addresses of nodes to contact. They may include this node's own.

        An address without a known live node is contacted again later, so that a fleet heals after a
        long partition.
        """
        seeds = [each for each in dict.fromkeys(addresses) if each != self._address]
        self.seeds = seeds[:SEEDS_MAX]

    def set_status(self, status: NodeStatus) -> None:
        """Set the status, which the next heartbeat carries."""
        self._status = NodeStatus(
            cut_text(status.version),
            cut_text(status.rules_version),
            min(max(status.leases, 0), U32_MAX),
            min(max(status.pending, 0), U32_MAX),
            cut_text(status.region),
        )

    def live_nodes(self) -> int:
        """Return the number of live nodes, this one included; suspected nodes are live."""
        return len(self._live) + 1

    def members(self, now_ns: int) -> list[Member]:
        """Return all known nodes, this one first; also nodes that died or left lately."""
        uptime_ns = now_ns - self._started_ns
        age_ns = now_ns - self._beat_ns
        found = [Member(self.node, self._address, "alive", self._status, age_ns, uptime_ns)]
        for peer in self._peers.values():
            age_ns = now_ns - peer.heard_ns
            state: MemberState = "dead"
            if peer.left:
                state = "left"
            elif peer.live:
                state = "suspected" if age_ns >= self.settings.suspected_ns else "alive"
            uptime_ns = peer.uptime_us(now_ns) * 1_000
            found.append(Member(peer.node, peer.address, state, peer.status, age_ns, uptime_ns))
        return found

    def take_changes(self) -> list[MemberChange]:
        """Return the peers that have become live, or stopped being live, since the last call.

        Payloads that were published before a peer became live have to be published again for it.
        """
        return _taken(self._changes)

    # ── The caller's side: hints, payloads ─────────────────────────────────────────────────────

    def warm(self, gate: int, subject: str, now_ns: int) -> None:
        """Announce to all nodes at once that a subject is warm.

        A repetition within 100 ms is ignored. So is a hint that this node has just received.
        """
        known = self._known.get(("warm", gate, subject))
        if known is None or now_ns >= known.ends_ns:
            self._hint("warm", gate, subject, 0, 0, now_ns)

    def denied(self, gate: int, subject: str, cost: int, lasts_ns: int, now_ns: int) -> None:
        """Announce to all nodes at once that a subject is denied for a time.

        Ignored if the nodes already know of a denial for at least nine tenths of that time. A
        denial that ends within 10 ms is ignored, too: it saves no calls.
        """
        if lasts_ns < DENIED_NS_MIN:
            self._drop("hint_short")
            return
        known = self._known.get(("denied", gate, subject))
        enough_ns = now_ns + lasts_ns - lasts_ns // 10
        if known is None or known.cost > cost or known.ends_ns < enough_ns:
            self._hint("denied", gate, subject, cost, lasts_ns, now_ns)

    def take_hints(self) -> list[Hint]:
        """Return the hints of other nodes that have arrived since the last call, each once."""
        return _taken(self._hint_inbox)

    def publish(self, payload: bytes, now_ns: int) -> int | None:
        """Send a payload to all live peers, repeatedly until each has acknowledged it or is dead.

        Return its sequence, from 1 up; None if too many are not acknowledged yet. A peer that
        becomes live later does not get it: see `take_changes`.
        """
        assert len(payload) <= PAYLOAD_BYTES_MAX, "our own"  # noqa: S101 - our own
        self._trim_outbox()
        if len(self._outbox) >= OUTBOX_MAX or self._published >= U32_MAX:
            self._drop("outbox_full")
            return None
        self._published += 1
        if self._live:
            self._outbox[self._published] = payload
            self._payload_ns = min(self._payload_ns, now_ns + self.settings.urgent_ns)
        return self._published

    def acknowledged(self) -> int:
        """Return the highest sequence up to which all live peers have every payload."""
        return min((peer.acked for peer in self._live), default=self._published)

    def take_payloads(self) -> list[ReceivedPayload]:
        """Return the payloads that have arrived since the last call, each once, as they arrived."""
        return _taken(self._payload_inbox)

    # ── The caller's side: statistics ──────────────────────────────────────────────────────────

    def counters(self) -> Mapping[str, int]:
        """Return counters since the start.

        `sent`, `sent_bytes`, `received`, `received_bytes`: messages; with IP and UDP headers.
        `hints_sent`, `hints_received`: each hint once.
        `dropped_…`: messages, hints and payloads that were not taken, by reason.
        """
        return {**self._counters, "sent_bytes": self._budget.spent + self._strangers.spent}

    def lag(self) -> list[int]:
        """Return the data of a histogram (`core.histogram`): the age of hints as they arrived."""
        return self._lag.data()

    # ── Messages ───────────────────────────────────────────────────────────────────────────────

    def _next_sequence(self, now_ns: int) -> int:
        self._sequence = max(self._sequence + 1, (now_ns - self._started_ns) // 1_000)
        return self._sequence

    def _message(
        self,
        now_ns: int,
        *,
        members: Sequence[MemberEntry] = (),
        hints: Sequence[HintEntry] = (),
    ) -> Message:
        sequence = self._next_sequence(now_ns)
        return Message(self.node, sequence, members=tuple(members), hints=tuple(hints))

    def _send(
        self, out: list[Outgoing], address: Address, message: Message, by: _Budget | None = None
    ) -> None:
        (by or self._budget).spend(message_size(message) + PACKET_BYTES)
        self._counters["sent"] += 1
        out.append((address, message))

    def _drop(self, reason: str, count: int = 1) -> None:
        if count:
            self._counters[f"dropped_{reason}"] += count

    def _sample(self, count: int) -> list[_GossipPeer]:
        return self._random.sample(self._live, min(count, len(self._live)))

    def _new_nonce(self) -> int:
        return self._random.randrange(1, U64_MAX)

    def _proof(self, now_ns: int) -> int:
        """Return the nonce that unknown senders have to repeat. It changes every NONCE_NS."""
        periods = (now_ns - self._nonce_ns) // NONCE_NS
        if periods > 0:
            self._nonces = self._new_nonce(), self._nonces[0] if periods == 1 else 0
            # Advance by whole periods: otherwise the last nonce would be valid for up to three.
            self._nonce_ns += periods * NONCE_NS
        return self._nonces[0]

    def _accepted(
        self, message: Message, source: Address, now_ns: int, out: list[Outgoing]
    ) -> _GossipPeer | None:
        """Return the sender of a fresh message; None if the message must be dropped."""
        peer = self._peers.get(message.sender)
        if peer is not None and peer.live:
            if peer.take_sequence(message.sequence):
                return peer
            self._drop("replayed")
            return None
        self._proof(now_ns)
        own = next((each for each in message.members if each.node == message.sender), None)
        is_newer = peer is None or message.sequence > peer.newest
        if message.echo and message.echo in self._nonces and own is not None and is_newer:
            self._merge(own, now_ns)
            peer = self._peers.get(message.sender)
            if peer is not None and peer.live:
                peer.take_sequence(message.sequence)
                return peer
        elif message.nonce and message.digest and own and self._strangers.share(now_ns) > 0:
            # The question of an unknown sender: it has to repeat our nonce. The answer is not
            # longer than the question.
            challenge = self._message(now_ns, members=[self._own_entry(now_ns)])
            challenge = challenge._replace(nonce=self._nonces[0], echo=message.nonce)
            self._send(out, source, challenge, self._strangers)
        self._drop("stranger")
        return None

    def _answer(self, message: Message, address: Address, now_ns: int, out: list[Outgoing]) -> None:
        """Answer a nonce, or a digest that differs from ours."""
        parts = {
            part
            for part, (mine, theirs) in enumerate(zip(self._digest, message.digest, strict=False))
            if mine != theirs
        }
        wants_reply = bool(message.nonce) or (message.wants_reply and bool(parts))
        if not wants_reply and not parts:
            return
        share = self._budget.share(now_ns)
        if share <= -0.5:
            self._drop("budget")
            return
        # Many nodes may join at once through this one. Each gets some entries of other nodes, which
        # it can ask for the rest: the rest does not depend on this node's budget.
        space = (DATAGRAM_BYTES_MAX if share > 0.4 else FRUGAL_BYTES) - MESSAGE_BYTES_MIN
        members = []
        if message.nonce:
            members.append(self._own_entry(now_ns))
            space -= members[0].size + PROOF_BYTES
        if wants_reply:
            space -= DIGEST_BYTES
        members += self._entries_in(parts, now_ns, space)
        answer = self._message(now_ns, members=members)._replace(echo=message.nonce)
        if wants_reply:
            # The peer answers once more if it knows nodes that we do not.
            answer = answer._replace(digest=tuple(self._digest), wants_reply=bool(message.nonce))
        self._send(out, address, answer)

    # ── Membership ─────────────────────────────────────────────────────────────────────────────

    def _beat(self, now_ns: int) -> None:
        self._beat_ns = now_ns
        self._beat_sequence = self._next_sequence(now_ns)
        self._hot[self.node] = MEMBER_SENDS

    def _own_entry(self, now_ns: int) -> MemberEntry:
        age_ms = _age_ms(self._beat_ns, now_ns)
        return MemberEntry(
            self.node, self._address, self._beat_sequence, age_ms, False, self._status
        )

    def _entry(self, node: int, now_ns: int) -> MemberEntry | None:
        """Return a node's entry to send now; None if it is not worth sending."""
        if node == self.node:
            return self._own_entry(now_ns)
        peer = self._peers.get(node)
        if peer is None or not (peer.live or peer.left):
            return None
        age_ms = _age_ms(peer.beat_ns, now_ns)
        return MemberEntry(node, peer.address, peer.beat, age_ms, peer.left, peer.status)

    def _entries_in(self, parts: set[int], now_ns: int, space: int) -> list[MemberEntry]:
        """Return entries of some parts of the digest, in random order, as many as fit."""
        nodes = [node for node in (self.node, *self._peers) if _part(node) in parts]
        if len(nodes) > 1:
            nodes = self._random.sample(nodes, min(len(nodes), DATAGRAM_BYTES_MAX // 32))
        return self._fitting(nodes, now_ns, space)[0]

    def _fitting(
        self, nodes: Iterable[int], now_ns: int, space: int
    ) -> tuple[list[MemberEntry], int]:
        """Return the entries of the first nodes that fit, and the remaining space."""
        found: list[MemberEntry] = []
        for node in nodes:
            entry = self._entry(node, now_ns)
            if entry is None:
                continue
            size = entry.size
            if size > space or len(found) >= ENTRIES_MAX:
                break
            space -= size
            found.append(entry)
        return found, space

    def _merge(self, entry: MemberEntry, now_ns: int) -> None:
        """Store an entry if it is newer than the known one."""
        if entry.node == self.node:
            return
        heard_ns = now_ns - entry.age_ms * _MS
        is_stale = now_ns - heard_ns >= self.settings.dead_ns
        peer = self._peers.get(entry.node)
        if peer is None:
            if is_stale or not self._make_room():
                return
            peer = self._peers[entry.node] = _GossipPeer(entry, heard_ns)
        elif entry.beat <= peer.beat:
            if entry.beat == peer.beat == peer.first_beat and entry.node in self._hot:
                # Other nodes spread this entry, too. If a node misses it, the digest shows it.
                _sent(self._hot, entry.node)
            return
        else:
            peer.beat, peer.beat_ns = entry.beat, heard_ns
            peer.heard_ns = max(heard_ns, peer.heard_ns)
            peer.left, peer.status = peer.left or entry.left, entry.status
            if not peer.live:
                peer.address = entry.address
            peer.raise_newest(entry.beat)
        self._hot[entry.node] = MEMBER_SENDS
        if peer.left or is_stale:
            self._set_live(peer, now_ns, live=False)
        elif not peer.live and self._takes_address(peer, now_ns):
            self._set_live(peer, now_ns, live=True)

    def _takes_address(self, peer: _GossipPeer, now_ns: int) -> bool:
        """Return True unless a node that started later has the address."""
        other = self._live_at.get(peer.address)
        if other is None:
            return peer.address != self._address
        if peer.uptime_us(now_ns) >= other.uptime_us(now_ns):
            self._drop("replaced")
            return False
        other.left = True
        self._set_live(other, now_ns, live=False)
        return True

    def _set_live(self, peer: _GossipPeer, now_ns: int, *, live: bool) -> None:
        if peer.live == live:
            return
        peer.live = live
        self._toggle_digest(peer.node)
        self._changes.append(MemberChange(peer.node, live, peer.left))
        if live:
            self._live.append(peer)
            self._live_at[peer.address] = peer
            peer.acked = peer.sent = self._published
            peer.acked_beyond = 0
        else:
            self._live.remove(peer)
            del self._live_at[peer.address]
            self._payload_ns = min(self._payload_ns, now_ns)

    def _toggle_digest(self, node: int) -> None:
        self._digest[_part(node)] ^= (node // DIGEST_PARTS) & U16_MAX

    def _make_room(self) -> bool:
        """Return True if there is room for another node; forget a dead one if necessary."""
        if len(self._peers) < MEMBERS_MAX:
            return True
        dead = [peer for peer in self._peers.values() if not peer.live]
        if not dead:
            self._drop("members_full")
            return False
        del self._peers[min(dead, key=lambda peer: peer.heard_ns).node]
        return True

    def _sweep(self, now_ns: int) -> None:
        """Detect dead nodes, and forget expired entries and hints."""
        self._sweep_ns = now_ns + SWEEP_NS
        for peer in list(self._peers.values()):
            age_ns = now_ns - peer.heard_ns
            if peer.live:
                if age_ns >= self.settings.dead_ns:
                    self._set_live(peer, now_ns, live=False)
            elif age_ns >= (LEFT_NS if peer.left else FORGET_NS):
                del self._peers[peer.node]
        self._hot = {node: sends for node, sends in self._hot.items() if self._entry(node, now_ns)}
        oldest_ns = now_ns - self.settings.suspected_ns
        self._suspects = [peer for peer in self._live if peer.heard_ns <= oldest_ns]
        # A hint is remembered for longer than it is valid: otherwise a late copy would be applied
        # again, because its age does not include the time on the network.
        ended_ns = now_ns - HINT_MEMORY_NS
        hint_ns_max = self.settings.hint_ns_max
        self._hints = {
            key: hint for key, hint in self._hints.items() if hint.ends_ns(hint_ns_max) > ended_ns
        }
        self._known = {key: known for key, known in self._known.items() if known.ends_ns > now_ns}

    # ── Rounds ─────────────────────────────────────────────────────────────────────────────────

    def _round(self, now_ns: int, out: list[Outgoing]) -> None:
        settings = self.settings
        self._round_ns = now_ns + round(settings.round_ns * self._random.uniform(0.7, 1.3))
        if now_ns >= self._sweep_ns:
            self._sweep(now_ns)
        if now_ns >= self._beat_ns + settings.heartbeat_ns:
            self._beat(now_ns)
        if now_ns >= self._probe_ns:
            self._probe(now_ns, out)
        share = self._budget.share(now_ns)
        with_hints = share > 0.75
        has_news = bool(self._hot or (with_hints and self._repairing))
        is_frugal = share <= 0.25
        targets = self._sample(settings.fanout if has_news and not is_frugal else 1)
        if self._suspects and (suspect := self._random.choice(self._suspects)) not in targets:
            suspect.met_ns = None  # ask it
            targets.append(suspect)
        for number, peer in enumerate(targets):
            space = FRUGAL_BYTES if is_frugal else DATAGRAM_BYTES_MAX
            met = peer.knows_us(now_ns)
            message = self._news(
                now_ns, space, with_digest=not (number and met), with_hints=with_hints, met=met
            )
            self._send(out, peer.address, message)

    def _news(
        self, now_ns: int, space: int, *, with_digest: bool, with_hints: bool, met: bool
    ) -> Message:
        """Return the message of a round.

        A peer that this node has not `met` may not know this node, so the message also carries a
        nonce.
        """
        space -= MESSAGE_BYTES_MIN + (DIGEST_BYTES if with_digest else 0)
        introduction = [] if met else [self._own_entry(now_ns)]
        space -= 0 if met else introduction[0].size + PROOF_BYTES
        # Members take at most half, so that hints are also repeated while a fleet starts.
        reserved = space // 2 if with_hints and self._repairing else 0
        members, space = self._fitting(list(self._hot), now_ns, space - reserved)
        for node in [each.node for each in members]:
            _sent(self._hot, node)
        space += reserved
        hints = self._repaired(now_ns, space) if with_hints else []
        space -= sum(hint.size(self.node) for hint in hints)
        digest = tuple(self._digest) if with_digest else ()
        nonce = 0 if met else self._proof(now_ns)
        return self._message(now_ns, members=[*introduction, *members], hints=hints)._replace(
            nonce=nonce, digest=digest, wants_reply=with_digest
        )

    def _probe(self, now_ns: int, out: list[Outgoing]) -> None:
        """Contact an address without a known live node."""
        is_eager = not self._live and now_ns < self._started_ns + EAGER_NS
        self._probe_ns = now_ns if is_eager else now_ns + PROBE_NS
        dead = (peer.address for peer in self._peers.values() if not (peer.live or peer.left))
        addresses = [
            each
            for each in dict.fromkeys((*self.seeds, *dead))
            if each not in self._live_at and each != self._address
        ]
        count = 1 if self._live else self.settings.fanout
        if not addresses:
            return
        message = self._message(now_ns, members=[self._own_entry(now_ns)])
        nonce = self._proof(now_ns)
        message = message._replace(nonce=nonce, digest=tuple(self._digest), wants_reply=True)
        for address in self._random.sample(addresses, min(count, len(addresses))):
            self._send(out, address, message)

    # ── Hints ──────────────────────────────────────────────────────────────────────────────────

    def _hint(
        self, kind: HintKind, gate: int, subject: str, cost: int, lasts_ns: int, now_ns: int
    ) -> None:
        """Send a hint of this node."""
        lasts_us = min(lasts_ns // _US, U32_MAX)
        is_short = len(subject.encode("utf-8", "replace")) <= SUBJECT_BYTES_MAX
        if not is_short or cost > U32_MAX:
            self._drop("hint_unsendable")
            return
        if len(self._urgent) >= _places(kind):
            self._drop("hints_full")
            return
        self._hint_number = (self._hint_number + 1) & U32_MAX
        entry = HintEntry(
            self.node, self._hint_number, kind, False, gate, subject, cost, 0, lasts_us
        )
        hint = _Hint(entry, now_ns, self.node)
        self._counters["hints_sent"] += 1
        self._remember(hint, now_ns)
        if self._live:
            self._urgent.append(hint)
            self._hurry(now_ns)

    def _remember(self, hint: _Hint, now_ns: int) -> None:
        entry = hint.entry
        if entry.kind == "warm" or entry.lasts_us >= LONG_US:
            self._repairing.append(hint)
        ends_ns = now_ns + WARM_REPEAT_NS
        if entry.kind == "denied":
            ends_ns = hint.born_ns + entry.lasts_us * _US
        if len(self._known) < _places(entry.kind):
            self._known[entry.kind, entry.gate, entry.subject] = _Known(entry.cost, ends_ns)

    def _take_hint(self, entry: HintEntry, now_ns: int) -> None:
        if entry.origin == self.node or (entry.origin, entry.number) in self._hints:
            return
        hint = _Hint(entry, now_ns - entry.age_us * _US, self.node)
        ends_ns = hint.ends_ns(self.settings.hint_ns_max)
        if ends_ns <= now_ns:
            self._drop("hint_late")
            return
        if len(self._hints) >= _places(entry.kind) or len(self._hint_inbox) >= INBOX_MAX:
            self._drop("hints_full")
            return
        self._counters["hints_received"] += 1
        self._lag.note(now_ns - hint.born_ns)
        self._hints[entry.origin, entry.number] = hint
        self._remember(hint, now_ns)
        lasts_ns = entry.lasts_us * _US - (now_ns - hint.born_ns) if entry.kind == "denied" else 0
        self._hint_inbox.append(Hint(entry.kind, entry.gate, entry.subject, entry.cost, lasts_ns))
        if entry.forwarded:
            self._relaying.append(hint)
            self._hurry(now_ns)

    def _hurry(self, now_ns: int) -> None:
        """Schedule the hints. When the budget is low, wait for more hints to share the datagram."""
        share = self._budget.share(now_ns)
        waits = 0 if share > 0.5 else 1 if share > 0.25 else 10
        self._urgent_ns = min(self._urgent_ns, now_ns + waits * self.settings.urgent_ns)

    def _send_urgent(self, now_ns: int, out: list[Outgoing]) -> None:
        """Send new hints to all peers or to relays, and relayed hints to the peers of this part.

        A hint that the budget does not allow waits for up to URGENT_NS_MAX.
        """
        own, self._urgent = self._urgent, []
        relaying, self._relaying = self._relaying, []
        self._urgent_ns = self._never_ns
        is_crowd = len(self._live) > self.settings.direct_peers_max
        indirect: list[_Hint] = []
        for hints in _batches(own):
            if is_crowd or not self._sent_hints(
                hints, self._live, now_ns, out, reserve=DIRECT_RESERVE
            ):
                indirect += hints
        self._send_to_relays(indirect, now_ns, out)
        part = [peer for peer in self._live if _part(peer.node) == _part(self.node)]
        for hints in _batches(relaying):
            if not self._sent_hints(hints, part, now_ns, out):
                self._drop("budget", len(hints))

    def _send_to_relays(self, hints: list[_Hint], now_ns: int, out: list[Outgoing]) -> None:
        # Short messages: if few bytes are left, the most useful hints are sent.
        batches = deque(_batches(hints, FRUGAL_BYTES))
        while batches:
            relays = self._relays(RELAYS[batches[0][0].entry.kind])
            if not self._sent_hints(batches[0], relays, now_ns, out, forwarded=True):
                break
            batches.popleft()
        unsent = [hint for batch in batches for hint in batch]
        self._urgent += [hint for hint in unsent if now_ns < hint.born_ns + URGENT_NS_MAX]
        self._drop("budget", len(unsent) - len(self._urgent))
        if self._urgent:
            self._urgent_ns = now_ns + 10 * self.settings.urgent_ns

    def _relays(self, count: int) -> list[_GossipPeer]:
        """Return up to `count` random peers of each part of the fleet."""
        found: Counter[int] = Counter()
        relays = []
        for peer in self._sample(len(self._live)):
            part = _part(peer.node)
            if found[part] < count:
                found[part] += 1
                relays.append(peer)
        return relays

    def _sent_hints(
        self,
        hints: list[_Hint],
        peers: Sequence[_GossipPeer],
        now_ns: int,
        out: list[Outgoing],
        *,
        forwarded: bool = False,
        reserve: float = 0.0,
    ) -> bool:
        """Send hints to these peers if the budget allows it; return True if they were sent.

        `reserve` is the part of the budget that must remain for other ways to send them.
        """
        size = MESSAGE_BYTES_MIN + PACKET_BYTES + sum(hint.size for hint in hints)
        left = self._budget.share(now_ns) - size * len(peers) / self._budget.capacity
        if left < _reserve(hints[0].entry) + reserve:
            return False
        entries = [hint.at(now_ns, forwarded=forwarded) for hint in hints]
        message = self._message(now_ns, hints=entries)
        for peer in peers:
            self._send(out, peer.address, message)
        return True

    def _repaired(self, now_ns: int, space: int) -> list[HintEntry]:
        """Return hints to repeat: the least repeated ones, as many as fit."""
        found: list[HintEntry] = []
        is_quiet = self._budget.share(now_ns) > 0.9
        for _ in range(len(self._repairing)):
            hint = self._repairing[0]
            if hint.size > space or len(found) >= ENTRIES_MAX:
                break
            self._repairing.popleft()
            if now_ns >= hint.ends_ns(self.settings.hint_ns_max):
                continue
            space -= hint.size
            found.append(hint.at(now_ns))
            hint.sends -= 1
            if hint.sends > (0 if is_quiet else HINT_SENDS - HINT_SENDS_FEW):
                self._repairing.append(hint)
        return found

    # ── Payloads ───────────────────────────────────────────────────────────────────────────────

    def _trim_outbox(self) -> None:
        acknowledged = self.acknowledged()
        while self._outbox and next(iter(self._outbox)) <= acknowledged:
            del self._outbox[next(iter(self._outbox))]

    def _send_payloads(self, now_ns: int, out: list[Outgoing]) -> None:
        """Send each peer the payloads that it lacks, in a random order of the peers."""
        self._trim_outbox()
        self._payload_ns = self._never_ns
        if not self._outbox:
            return
        for peer in self._sample(len(self._live)):
            if peer.acked >= self._published:
                continue
            if peer.sent > peer.acked and now_ns >= peer.resend_ns:
                peer.sent = peer.acked
                peer.resends += 1
            if peer.sent < min(self._published, peer.acked + PAYLOAD_WINDOW):
                if self._budget.share(now_ns) <= 0.1:
                    self._payload_ns = now_ns + self.settings.round_ns
                    return
                self._send_payloads_to(peer, now_ns, out)
                wait_ns = min(RESEND_NS_MIN << min(peer.resends, 4), RESEND_NS_MAX)
                peer.resend_ns = now_ns + wait_ns
            self._payload_ns = min(self._payload_ns, max(peer.resend_ns, now_ns + 1))

    def _send_payloads_to(self, peer: _GossipPeer, now_ns: int, out: list[Outgoing]) -> None:
        entries: list[PayloadEntry] = []
        acks = self._taken_ack(peer)
        space = DATAGRAM_BYTES_MAX - MESSAGE_BYTES_MIN - ACK_BYTES
        last = min(self._published, peer.acked + PAYLOAD_WINDOW)
        while peer.sent < last:
            sequence = peer.sent + 1
            entry = PayloadEntry(peer.node, sequence, peer.acked + 1, self._outbox[sequence])
            if not peer.acked_beyond >> (sequence - peer.acked - 1) & 1:
                if entry.size > space:
                    self._send(
                        out,
                        peer.address,
                        self._message(now_ns)._replace(payloads=tuple(entries), acks=acks),
                    )
                    entries, acks = [], ()
                    space = DATAGRAM_BYTES_MAX - MESSAGE_BYTES_MIN
                entries.append(entry)
                space -= entry.size
            peer.sent = sequence
        if entries or acks:
            message = self._message(now_ns)._replace(payloads=tuple(entries), acks=acks)
            self._send(out, peer.address, message)

    def _take_payload(self, peer: _GossipPeer, entry: PayloadEntry, now_ns: int) -> None:
        if entry.recipient != self.node:
            return
        if entry.first - 1 > peer.got:
            # Earlier payloads were published before we were live, or we have acknowledged them.
            peer.got = entry.first - 1
            peer.got_beyond = {each for each in peer.got_beyond if each > peer.got}
        sequence = entry.sequence
        is_known = sequence <= peer.got or sequence in peer.got_beyond
        if not is_known:
            is_full = len(self._payload_inbox) >= INBOX_MAX
            if sequence > peer.got + PAYLOAD_WINDOW or is_full:
                self._drop("payloads_full")
                return
            peer.got_beyond.add(sequence)
            self._payload_inbox.append(ReceivedPayload(peer.node, sequence, entry.payload))
        while peer.got + 1 in peer.got_beyond:
            peer.got += 1
            peer.got_beyond.remove(peer.got)
        self._owed_acks[peer.node] = None
        self._ack_ns = min(self._ack_ns, now_ns + ACK_NS)

    def _taken_ack(self, peer: _GossipPeer) -> tuple[AckEntry, ...]:
        """Return the acknowledgement that a peer waits for, if any."""
        if peer.node not in self._owed_acks:
            return ()
        del self._owed_acks[peer.node]
        beyond = sum(1 << (each - peer.got - 1) for each in peer.got_beyond)
        return (AckEntry(peer.node, peer.got, beyond),)

    def _send_acks(self, now_ns: int, out: list[Outgoing]) -> None:
        self._ack_ns = self._never_ns
        for node in list(self._owed_acks):
            peer = self._peers.get(node)
            if peer is None or not peer.live:
                del self._owed_acks[node]
                continue
            message = self._message(now_ns)._replace(acks=self._taken_ack(peer))
            self._send(out, peer.address, message)

    def _take_ack(self, peer: _GossipPeer, ack: AckEntry, now_ns: int) -> None:
        if ack.publisher != self.node or not peer.acked <= ack.upto <= self._published:
            return
        if ack.upto > peer.acked:
            peer.resends = 0
        peer.acked, peer.acked_beyond = ack.upto, ack.beyond
        peer.sent = max(peer.sent, peer.acked)
        if peer.sent < self._published:
            self._payload_ns = min(self._payload_ns, now_ns)


def _part(node: int) -> int:
    """Return the part of the fleet to which a node belongs, in digests and for relays."""
    return node % DIGEST_PARTS


def _reserve(entry: HintEntry) -> float:
    """Return the part of the budget that a hint must leave for more useful ones."""
    if entry.kind == "warm":
        return 0.05
    return 0.3 if entry.lasts_us >= LONG_US else 0.4


def _places(kind: HintKind) -> int:
    """Return how full a table may be for a hint of this kind. Denials leave half to `warm`."""
    return HINTS_MAX if kind == "warm" else HINTS_MAX // 2


def _usefulness(hint: _Hint) -> tuple[float, int]:
    """Return a sort key: `warm` protects a limit, and a denial saves calls while it lasts."""
    return _reserve(hint.entry), -hint.entry.lasts_us


def _taken(queue: deque[T]) -> list[T]:
    found = list(queue)
    queue.clear()
    return found


def _sent(hot: dict[T, int], key: T) -> None:
    """Count down the sends of an entry, and move it to the end of the queue."""
    left = hot.pop(key) - 1
    if left:
        hot[key] = left


def _batches(hints: Iterable[_Hint], size: int = DATAGRAM_BYTES_MAX) -> list[list[_Hint]]:
    """Divide hints into messages, the most useful first; a message has similar hints."""
    batches: list[list[_Hint]] = []
    space = 0
    reserve = 0.0
    for hint in sorted(hints, key=_usefulness):
        is_other = _reserve(hint.entry) != reserve
        if not batches or is_other or hint.size > space or len(batches[-1]) >= ENTRIES_MAX:
            batches.append([])
            space = size - MESSAGE_BYTES_MIN
            reserve = _reserve(hint.entry)
        batches[-1].append(hint)
        space -= hint.size
    return batches
