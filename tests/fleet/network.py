"""A network of gossiping nodes in one process: one seed, a virtual clock, and every fault.

Messages pass through the real codec only if `codec` is given, because it takes most of the time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from random import Random

from hypothesis import strategies as st

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.fleet.datagrams import (
    DIGEST_PARTS,
    AckEntry,
    Address,
    DatagramCodec,
    HintEntry,
    MemberEntry,
    Message,
    NodeStatus,
    PayloadEntry,
    message_size,
)
from ratekeeper.fleet.gossip import Gossip, GossipSettings, Hint, Outgoing

MS = NS_PER_SECOND // 1_000


def address_of(number: int) -> Address:
    """Return the address of a node."""
    return f"10.0.{number // 250}.{number % 250 + 1}", 7946


class Network:
    """Nodes, and the messages between them."""

    def __init__(self, seed: int, *, settings: GossipSettings | None = None) -> None:
        self.random = Random(seed)
        self.settings = settings
        self.now_ns = self.random.randrange(10**18)
        self.nodes: dict[Address, Gossip] = {}
        # Each node has a clock of its own, which differs from the network's by this.
        self.offsets: dict[Address, int] = {}
        self.loss = self.duplication = 0.0
        self.latency_ms = (0.2, 2.0)
        self.cut: Callable[[Address, Address], bool] = lambda source, target: False
        self.codec: DatagramCodec | None = None
        self.hints: dict[Address, list[tuple[int, Hint]]] = {}
        self.sent_bytes: dict[Address, int] = {}
        self.messages = 0
        self._order = count()
        self._events: list[tuple[int, int, Address, Message | None, Address | None]] = []
        self._ticks: dict[Address, int] = {}

    def add(self, number: int, seeds: Iterable[int] = (0,)) -> Gossip:
        """Start a node; a node that had the number before is gone."""
        address = address_of(number)
        self.offsets[address] = self.random.randrange(10**15)
        status = NodeStatus("0.1.0", "17", 1_000, 20)
        node = Gossip(address, self.random, self.clock(address), self.settings, status)
        node.join([address_of(each) for each in seeds])
        self.nodes[address] = node
        self.hints[address] = []
        self._ticks.pop(address, None)
        self._schedule(address)
        return node

    def clock(self, address: Address) -> int:
        """Return the time on a node."""
        return self.now_ns + self.offsets[address]

    def kill(self, number: int) -> None:
        """Stop a node without a word."""
        del self.nodes[address_of(number)]

    def leave(self, number: int) -> None:
        """Stop a node that says so."""
        address = address_of(number)
        node = self.nodes.pop(address)
        self._post(address, node.leave(self.clock(address)))

    def touch(self, number: int) -> Gossip:
        """Return a node for a call that may make something due earlier."""
        address = address_of(number)
        self._events.append((self.now_ns, next(self._order), address, None, address))
        heapq.heapify(self._events)
        return self.nodes[address]

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> float | None:
        """Run for a time; with `until`, return the seconds until it was true, None if never."""
        start_ns = self.now_ns
        end_ns = start_ns + round(seconds * NS_PER_SECOND)
        while self._events and self._events[0][0] <= end_ns:
            at_ns, _, address, message, source = heapq.heappop(self._events)
            self.now_ns = max(self.now_ns, at_ns)
            node = self.nodes.get(address)
            if node is None:
                continue
            if message is None:
                if source is None and self._ticks.get(address) != at_ns:
                    continue
                if node.due_ns <= self.clock(address):
                    self._post(address, node.tick(self.clock(address)))
            elif source is not None:
                self._post(address, node.receive(message, source, self.clock(address)))
            self._collect(address, node)
            self._schedule(address)
            if until is not None and until():
                return (self.now_ns - start_ns) / NS_PER_SECOND
        self.now_ns = end_ns
        return None

    def converged(self) -> bool:
        """Return True if every node knows all others, and no more."""
        return all(node.live_nodes() == len(self.nodes) for node in self.nodes.values())

    def inject(self, message: Message, source: Address, target: Address) -> None:
        """Deliver a message that was recorded before."""
        event = self.now_ns, next(self._order), target, message, source
        heapq.heappush(self._events, event)

    def _collect(self, address: Address, node: Gossip) -> None:
        for hint in node.take_hints():
            self.hints[address].append((self.now_ns, hint))

    def _schedule(self, address: Address) -> None:
        due_ns = max(self.nodes[address].due_ns - self.offsets[address], self.now_ns)
        if self._ticks.get(address) != due_ns:
            self._ticks[address] = due_ns
            heapq.heappush(self._events, (due_ns, next(self._order), address, None, None))

    def _post(self, source: Address, outgoing: list[Outgoing]) -> None:
        for target, sent in outgoing:
            size = message_size(sent)
            assert size <= 1_200
            self.messages += 1
            self.sent_bytes[source] = self.sent_bytes.get(source, 0) + size + 28
            message = sent
            if self.codec is not None:
                opened = self.codec.open(self.codec.seal(sent))
                assert opened == sent
            if self.cut(source, target):
                continue
            copies = 1 + (self.random.random() < self.duplication)
            for _ in range(copies):
                if self.random.random() < self.loss:
                    continue
                delay_ns = round(self.random.uniform(*self.latency_ms) * MS)
                event = self.now_ns + delay_ns, next(self._order), target, message, source
                heapq.heappush(self._events, event)


# ── Any message that can be encoded ────────────────────────────────────────────────────────────

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
u16 = st.integers(0, 2**16 - 1)
some_nodes = st.integers(1, 5) | st.integers(1, 2**64 - 1)
addresses = st.integers(0, 5).map(address_of)
text = st.text(max_size=8)
statuses = st.builds(NodeStatus, text, text, u32, u32, text)
hints = st.builds(
    HintEntry,
    some_nodes,
    u32,
    st.just("warm"),
    st.booleans(),
    u64,
    text,
    st.just(0),
    u32,
    st.just(0),
) | st.builds(
    HintEntry, some_nodes, u32, st.just("denied"), st.booleans(), u64, text, u32, u32, u32
)
messages = st.builds(
    Message,
    sender=some_nodes,
    sequence=u64,
    nonce=u64,
    echo=u64,
    digest=st.just(()) | st.tuples(*[u16] * DIGEST_PARTS),
    wants_reply=st.booleans(),
    members=st.lists(
        st.builds(MemberEntry, some_nodes, addresses, u64, u16, st.booleans(), statuses), max_size=4
    ).map(tuple),
    hints=st.lists(hints, max_size=4).map(tuple),
    payloads=st.lists(
        st.builds(PayloadEntry, st.just(0) | some_nodes, u32, u32, st.binary(max_size=20)),
        max_size=3,
    ).map(tuple),
    acks=st.lists(st.builds(AckEntry, st.just(0) | some_nodes, u32, u64), max_size=3).map(tuple),
)
