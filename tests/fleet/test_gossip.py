"""The gossip protocol on a virtual network with loss, duplication, reordering and cuts."""

from __future__ import annotations

from collections import Counter
from random import Random
from statistics import quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.fleet.datagrams import (
    DIGEST_PARTS,
    MEMBERS_MAX,
    Address,
    DatagramCodec,
    HintEntry,
    MemberEntry,
    Message,
    NodeStatus,
    PayloadEntry,
    message_size,
)
from ratekeeper.fleet.gossip import (
    HINT_SENDS,
    HINTS_MAX,
    OUTBOX_MAX,
    Gossip,
    GossipSettings,
    Hint,
    MemberChange,
)
from tests.fleet.network import MS, Network, address_of, messages

GATE = 2**63 + 12_345


def network(count: int, seed: int = 1, settings: GossipSettings | None = None) -> Network:
    """Return a network of nodes that know each other."""
    net = Network(seed, settings=settings)
    for number in range(count):
        net.add(number)
    assert net.run(10, until=lambda: complete(net, count)) is not None
    return net


def complete(net: Network, count: int) -> bool:
    """Return True if every node knows all; looks at one first, which is cheap."""
    return net.nodes[address_of(0)].live_nodes() == count and net.converged()


def states(net: Network, number: int) -> dict[Address, str]:
    """Return what a node thinks of the others."""
    address = address_of(number)
    members = net.nodes[address].members(net.clock(address))
    return {member.address: member.state for member in members}


def settle(net: Network, seconds: float = 1.0) -> None:
    """Run on, so that rounds end what is under way."""
    net.run(seconds)


# ── Membership ─────────────────────────────────────────────────────────────────────────────────


def test_nodes_join_through_any_peer() -> None:
    """Each node knows only its predecessor at first, and all know all soon."""
    net = Network(2)
    for number in range(20):
        net.add(number, seeds=[max(number - 1, 0)])
    net.codec = DatagramCodec("test")
    assert (net.run(10, until=lambda: complete(net, 20)) or 99) < 2


@pytest.mark.long
def test_a_fleet_grows_from_20_to_200_nodes_in_under_two_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """180 nodes that join at once through one peer converge, within every node's byte budget."""
    net = network(20)
    net.run(5)
    before = dict(net.sent_bytes)
    for number in range(20, 200):
        net.add(number)
    taken_s = net.run(10, until=lambda: complete(net, 200))
    sent = [count - before.get(address, 0) for address, count in net.sent_bytes.items()]
    with capsys.disabled():
        print(f"\n20 → 200 nodes: converged in {taken_s:.2f} s, at most {max(sent):,} B a node")
    assert taken_s is not None
    assert taken_s < 2
    assert max(sent) <= 44_000 * taken_s + 80_000


@pytest.mark.parametrize("seed", range(3))
def test_a_dead_node_is_suspected_and_then_dead_after_15_seconds(seed: int) -> None:
    """Every node notices it, between 10 and 16 s after the crash: a heartbeat takes up to 5 s."""
    net = network(10, seed)
    net.run(20)
    net.kill(9)
    net.run(9)
    assert net.nodes[address_of(0)].live_nodes() == 10
    assert states(net, 0)[address_of(9)] == "suspected"
    taken_s = net.run(10, until=net.converged)
    assert taken_s is not None
    assert 1 <= taken_s <= 7
    assert states(net, 0)[address_of(9)] == "dead"


def test_no_node_is_suspected_while_a_tenth_of_all_messages_is_lost() -> None:
    """A suspected node is asked directly: none is thought dead, however unlucky its heartbeats."""
    net = network(30)
    net.loss = 0.1
    for _ in range(60):
        net.run(1)
        assert net.converged()


def test_a_node_that_leaves_is_gone_at_once() -> None:
    """Its last message says so. No old entry brings it back."""
    net = network(10)
    net.loss = 0.3
    net.leave(3)
    assert net.run(2, until=net.converged) is not None
    assert states(net, 0)[address_of(3)] == "left"
    for _ in range(40):
        net.run(0.5)
        assert net.converged()


def test_a_restarted_node_is_a_new_one_and_replaces_the_old_one_at_once() -> None:
    """Two processes cannot have one address, so the nodes do not wait 15 s for the old one."""
    net = network(10)
    net.run(1)
    old = net.nodes[address_of(4)].node
    net.kill(4)
    new = net.add(4)
    assert new.node != old
    assert net.run(2, until=lambda: all(_knows(net, 0, new.node, old))) is not None
    assert net.run(2, until=net.converged) is not None


def _knows(net: Network, number: int, new: int, old: int) -> tuple[bool, bool]:
    address = address_of(number)
    found = {each.node: each.state for each in net.nodes[address].members(net.clock(address))}
    return found.get(new) == "alive", found.get(old) == "left"


def test_a_one_way_cut_is_bridged_by_the_others() -> None:
    """Node 1 cannot send to node 2. Both stay alive for each other, because others pass it on."""
    net = network(10)
    net.cut = lambda source, target: (source, target) == (address_of(1), address_of(2))
    for _ in range(40):
        net.run(1)
        assert net.converged()


def test_halves_of_a_fleet_part_and_meet_again() -> None:
    """After a partition of a minute, each half knows only itself, and then all know all again."""
    net = network(20)
    half = {address_of(number) for number in range(10)}
    net.cut = lambda source, target: (source in half) != (target in half)
    net.run(60)
    assert [node.live_nodes() for node in net.nodes.values()] == [10] * 20
    net.cut = lambda source, target: False
    taken_s = net.run(10, until=net.converged)
    assert taken_s is not None
    assert taken_s < 4


def test_a_status_spreads_with_its_age() -> None:
    """The next heartbeat carries it to all nodes."""
    net = network(5)
    status = NodeStatus("1.2.3", "v" * 40, 7, 2**40, "eu")
    net.nodes[address_of(4)].set_status(status)
    net.run(6)
    address = address_of(0)
    members = net.nodes[address].members(net.clock(address))
    seen = next(each for each in members if each.address == address_of(4))
    assert seen.status == NodeStatus("1.2.3", "v" * 32, 7, 2**32 - 1, "eu")
    assert 0 < seen.age_ns < 6 * NS_PER_SECOND
    assert 5 * NS_PER_SECOND < seen.uptime_ns < 20 * NS_PER_SECOND
    assert members[0].state == "alive"


def test_an_old_heartbeat_that_arrives_late_changes_nothing() -> None:
    """A relay may hold back the entry of another node; the status stays that of the newest one."""
    net = network(3)
    node, relay = net.nodes[address_of(0)], net.nodes[address_of(1)].node
    third, now_ns = net.nodes[address_of(2)].node, net.clock(address_of(0))
    newest = MemberEntry(third, address_of(2), 10**8, 0, False, NodeStatus("new"))
    old = newest._replace(beat=10**8 - 1, status=NodeStatus("old"))
    for sequence, entry in enumerate((newest, old), start=10**8):
        node.receive(Message(relay, sequence, members=(entry,)), address_of(1), now_ns)
    assert [each.status.version for each in node.members(now_ns) if each.node == third] == ["new"]


def test_changes_are_reported_once() -> None:
    """A caller learns which peers came and went."""
    net = network(2)
    node, other = net.nodes[address_of(0)], net.nodes[address_of(1)].node
    assert node.take_changes() == [MemberChange(other, True)]
    net.kill(1)
    net.run(20)
    assert node.take_changes() == [MemberChange(other, False)]
    assert node.take_changes() == []


def test_a_node_that_is_alone_waits_for_others() -> None:
    """Without peers and with peers that do not exist, it stays alone and sends little."""
    net = Network(1)
    net.add(0, seeds=[0, 7])
    net.run(60)
    assert net.nodes[address_of(0)].live_nodes() == 1
    assert net.sent_bytes[address_of(0)] < 30_000


# ── Hints ──────────────────────────────────────────────────────────────────────────────────────


def hint_times(net: Network, born_ns: int) -> list[int]:
    """Return when each node got its hint, after its birth."""
    return sorted(at_ns - born_ns for found in net.hints.values() for at_ns, _ in found)


def test_an_urgent_hint_reaches_all_of_100_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """With 1 % loss and 0.2 to 2 ms of latency: one hop for 99 %, and rounds repair the rest."""
    net = network(100)
    net.run(3)
    net.loss = 0.01
    times: list[int] = []
    for number in range(10):
        for found in net.hints.values():
            found.clear()
        born_ns = net.now_ns
        now_ns = net.clock(address_of(number))
        net.touch(number).denied(GATE, f"key:{number}", 1, NS_PER_SECOND, now_ns)
        net.run(0.5)
        times += hint_times(net, born_ns)
    cuts = quantiles(times, n=100)
    with capsys.disabled():
        p99, last = cuts[98] / MS, max(times) / MS
        print(f"\nhint at 100 nodes: 50 % {cuts[49] / MS:.1f}, 99 % {p99:.1f}, all {last:.1f} ms")
    assert len(times) == 990
    assert cuts[98] < 100 * MS
    assert max(times) < 400 * MS


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_each_hint_arrives_once(seed: int) -> None:
    """Duplication and reordering change when a hint arrives, and not how often.

    A fifth of all messages is lost, and nearly all hints arrive.
    """
    net = network(12, seed)
    settle(net)
    net.loss, net.duplication, net.latency_ms = 0.2, 0.3, (0.1, 80)
    for number in range(10):
        address = address_of(number)
        net.touch(number).warm(GATE, f"key:{number}", net.clock(address))
        net.run(net.random.uniform(0, 0.1))
    settle(net, 4)
    total = 0
    for found in net.hints.values():
        subjects = [hint.subject for _, hint in found]
        assert len(subjects) == len(set(subjects))
        total += len(subjects)
    assert total > 0.97 * 110


def test_a_denial_arrives_with_the_time_that_is_left() -> None:
    """A node that gets it late gets less, never more than its origin said, but for the network."""
    net = network(3)
    settle(net)
    cut = address_of(2)
    net.cut = lambda source, target: target == cut
    net.touch(0).denied(GATE, "key:1", 5, 900 * MS, net.clock(address_of(0)))
    net.run(0.01)
    ((_, hint),) = net.hints[address_of(1)]
    assert (hint.kind, hint.gate, hint.subject, hint.cost) == ("denied", GATE, "key:1", 5)
    assert 890 * MS <= hint.lasts_ns <= 900 * MS
    net.cut = lambda source, target: False
    net.run(0.5)
    ((at_ns, late),) = net.hints[cut]
    assert late.lasts_ns < 898 * MS
    assert at_ns + late.lasts_ns <= net.now_ns + 900 * MS


def test_hints_share_a_datagram() -> None:
    """A hundred hints of one moment take a few messages to each peer, not a hundred."""
    net = network(5)
    settle(net)
    before = net.messages
    node = net.touch(0)
    for number in range(100):
        node.warm(GATE, f"key:{number}", net.clock(address_of(0)))
    net.run(0.02)
    assert len(net.hints[address_of(3)]) == 100
    assert net.messages - before < 40


def test_a_hint_is_not_repeated_while_the_nodes_know_it() -> None:
    """Every check of a warm or denied subject may tell; the network hears it once."""
    net = network(3)
    settle(net)
    for number in (0, 0, 1, 2):
        node, now_ns = net.touch(number), net.clock(address_of(number))
        node.warm(GATE, "key:1", now_ns)
        node.denied(GATE, "key:1", 1, NS_PER_SECOND, now_ns)
        node.denied(GATE, "key:1", 2, NS_PER_SECOND, now_ns)
        net.run(0.01)
    total = sum(node.counters().get("hints_sent", 0) for node in net.nodes.values())
    assert total == 2
    node = net.touch(2)
    node.denied(GATE, "key:1", 1, 2 * NS_PER_SECOND, net.clock(address_of(2)))
    assert node.counters()["hints_sent"] == 1  # it lasts longer


# With this, a node sends every hint through relays.
RELAYED = GossipSettings(direct_peers_max=0)


def hint_messages(
    recorded: list[tuple[Address, Address, Message]], subject: str
) -> Counter[Address]:
    """Return how many messages with a hint about the subject each node has sent."""
    return Counter(
        source
        for source, _, message in recorded
        if any(hint.subject == subject for hint in message.hints)
    )


@pytest.mark.parametrize("kind", ["warm", "denied"])
def test_relays_share_the_bytes_of_a_hint(kind: str) -> None:
    """The origin sends one or two copies to each part of the fleet, and a relay one to its part."""
    net = network(100, settings=RELAYED)
    settle(net, 2)
    recorded = record(net)
    born_ns, now_ns = net.now_ns, net.clock(address_of(0))
    if kind == "warm":
        net.touch(0).warm(GATE, "key:1", now_ns)
    else:
        net.touch(0).denied(GATE, "key:1", 1, 150 * MS, now_ns)
    net.run(0.01)
    parts = Counter(node.node % DIGEST_PARTS for node in net.nodes.values())
    if kind == "denied":
        sent = hint_messages(recorded, "key:1")
        assert sent.pop(address_of(0)) <= DIGEST_PARTS
        for address, count in sent.items():
            assert count < parts[net.nodes[address].node % DIGEST_PARTS]
        assert sum(sent.values()) < 100
    times = hint_times(net, born_ns)
    assert len(times) == 99
    assert times[-1] < 6 * MS  # two hops


def test_a_hint_of_a_node_that_is_short_of_bytes_is_relayed_at_once() -> None:
    """A node with many hints of one moment does not have the bytes to send all of them directly."""
    net = network(100)
    settle(net, 2)
    times = []
    for number in range(15):
        born_ns = net.now_ns
        net.touch(0).denied(GATE, f"key:{number}", 1, 60 * MS, net.clock(address_of(0)))
        net.run(0.03)
        times += [
            at_ns - born_ns
            for found in net.hints.values()
            for at_ns, hint in found
            if hint.subject == f"key:{number}"
        ]
    assert len(times) > 0.99 * 15 * 99
    assert quantiles(times, n=100)[98] < 8 * MS
    assert "dropped_budget" not in net.nodes[address_of(0)].counters()


@pytest.mark.long
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), lost=st.sets(st.integers(1, 39)), dead=st.integers(0, 8))
def test_rounds_repair_hints_whose_relays_are_lost(seed: int, lost: set[int], dead: int) -> None:
    """Whichever relays get no message, or are dead and still believed alive: all others hear it."""
    net = network(40, seed, RELAYED)
    settle(net, 2)
    for number in range(1, 1 + dead):
        net.kill(number)
    unheard = {address_of(number) for number in lost}
    for number in range(10):
        net.cut = lambda source, target: target in unheard
        net.touch(0).warm(GATE, f"key:{number}", net.clock(address_of(0)))
        net.run(0.01)
        net.cut = lambda source, target: False
        net.run(0.3)
    net.run(1)
    heard = sum(len(net.hints[address]) for address in net.nodes)
    assert heard > 0.97 * 10 * (39 - dead)


def test_invented_members_and_relays_take_no_more_than_the_budget() -> None:
    """A node relays each hint once, to members that it knows, whatever a peer sends."""
    net = network(3)
    settle(net, 2)
    address, recorded = address_of(0), record(net)
    node, peer = net.nodes[address], net.nodes[address_of(1)].node
    invented = tuple(
        MemberEntry(node.node + each * DIGEST_PARTS, address_of(500 + each), 1, 0, False, OLD)
        for each in range(1, 300)
    )
    before, start_ns, sequence = net.sent_bytes[address], net.now_ns, 10**9
    for batch in range(0, len(invented), 20):
        message = Message(peer, sequence := sequence + 1, members=invented[batch : batch + 20])
        net.inject(message, address_of(1), address)
    for number in range(400):
        entry = HintEntry(99, number % 200, "warm", True, GATE, f"key:{number % 200}", 0, 0, 0)
        net.inject(Message(peer, sequence := sequence + 1, hints=(entry,)), address_of(1), address)
        net.run(0.005)
    seconds = (net.now_ns - start_ns) / NS_PER_SECOND
    assert node.live_nodes() > 290
    assert net.sent_bytes[address] - before <= 41_000 * seconds + 50_000 + 3 * 1_228
    relayed = Counter(
        (target, hint.subject)
        for source, target, message in recorded
        for hint in message.hints
        if source == address and len(message.hints) == 1 and not message.digest
    )
    assert max(relayed.values()) <= 1 + HINT_SENDS
    assert not any(hint.forwarded for _, _, message in recorded for hint in message.hints)


def test_a_denial_that_is_over_before_the_next_round_is_not_repeated() -> None:
    """Rounds repeat only what they can repair: each copy of a short denial is sent once."""
    net = network(10)
    settle(net, 2)
    recorded = record(net)
    for subject, lasts_ns in (("key:short", 60 * MS), ("key:long", 900 * MS)):
        net.touch(0).denied(GATE, subject, 1, lasts_ns, net.clock(address_of(0)))
    net.run(0.5)
    assert sum(hint_messages(recorded, "key:short").values()) == 9
    assert sum(hint_messages(recorded, "key:long").values()) > 18


def test_a_denial_is_told_at_once_and_to_the_microsecond() -> None:
    """A subject that is denied for 60 ms at a time asks the authority at the end of each."""
    net = network(2)
    settle(net, 2)
    node, now_ns = net.nodes[address_of(0)], net.clock(address_of(0))
    node.denied(GATE, "key:1", 1, 60_654_321, now_ns)
    assert node.due_ns <= now_ns
    ((_, message),) = node.tick(now_ns)
    net.nodes[address_of(1)].receive(message, address_of(0), net.clock(address_of(1)))
    (hint,) = net.nodes[address_of(1)].take_hints()
    assert hint.lasts_ns == 60_654_000


@pytest.mark.parametrize(
    ("age_ms", "lasts_ms", "taken"),
    [(0, 1_000, 1), (999, 1_000, 1), (1_000, 1_000, 0), (4_999, 9_000, 1), (5_000, 9_000, 0)],
)
def test_an_old_hint_is_dropped(age_ms: int, lasts_ms: int, taken: int) -> None:
    """A hint older than 5 s is of no use, nor is one whose time has passed."""
    net = network(2)
    sender, node = net.nodes[address_of(1)], net.nodes[address_of(0)]
    entry = HintEntry(99, 1, "denied", False, GATE, "key:1", 1, age_ms * 1_000, lasts_ms * 1_000)
    message = Message(sender.node, 10**9, hints=(entry,))
    node.receive(message, address_of(1), net.clock(address_of(0)))
    assert len(node.take_hints()) == taken
    assert node.counters().get("dropped_hint_late", 0) == 1 - taken


def test_hints_that_cannot_be_sent_or_save_nothing_are_dropped() -> None:
    """A subject or a cost that does not fit, and a denial that ends at once."""
    net = network(2)
    node, now_ns = net.nodes[address_of(0)], net.clock(address_of(0))
    node.warm(GATE, "x" * 129, now_ns)
    node.denied(GATE, "key:1", 2**32, NS_PER_SECOND, now_ns)
    node.denied(GATE, "key:1", 1, 5 * MS, now_ns)
    counters = node.counters()
    assert counters["dropped_hint_unsendable"] == 2
    assert counters["dropped_hint_short"] == 1
    assert "hints_sent" not in counters


def test_the_byte_budget_holds_in_a_storm_of_hints() -> None:
    """Ten nodes with 2,000 hints a second each send less than 50 KB/s: 41, and what was saved."""
    net = network(10)
    settle(net, 2)
    before, start_ns = dict(net.sent_bytes), net.now_ns
    for step in range(200):
        for number in range(10):
            node, now_ns = net.touch(number), net.clock(address_of(number))
            for each in range(20):
                subject = f"key:{number}:{step}:{each}"
                node.denied(GATE, subject, 1, NS_PER_SECOND, now_ns)
        net.run(0.01)
    seconds = (net.now_ns - start_ns) / NS_PER_SECOND
    for address, count in net.sent_bytes.items():
        # One message to three peers may overdraw the budget.
        assert count - before[address] <= 41_000 * seconds + 50_000 + 3 * 1_228
    assert net.converged()
    for node in net.nodes.values():
        assert len(node._hints) <= HINTS_MAX
        assert node.counters()["dropped_budget"] > 0


def test_warm_hints_arrive_while_denials_use_up_the_budget() -> None:
    """Denials leave a part of the budget for hints that protect a limit."""
    net = network(20)
    settle(net, 2)
    for step in range(100):
        for number in range(20):
            node, now_ns = net.touch(number), net.clock(address_of(number))
            for each in range(5):
                node.denied(GATE, f"key:{number}:{step}:{each}", 1, 60 * MS, now_ns)
        net.run(0.01)
    for found in net.hints.values():
        found.clear()
    born_ns = net.now_ns
    net.touch(3).warm(GATE, "key:warm", net.clock(address_of(3)))
    net.run(0.05)
    times = [
        at_ns - born_ns
        for found in net.hints.values()
        for at_ns, hint in found
        if hint.kind == "warm"
    ]
    assert len(times) == 19
    assert max(times) < 30 * MS


def test_many_denied_subjects_leave_room_for_warm_hints() -> None:
    """Neither a client of this node nor one of another fills the tables with denials."""
    node, peer = Gossip(address_of(0), Random(1), 0), 77
    node._merge(MemberEntry(peer, address_of(1), 1, 0, False, NodeStatus()), 0)
    for step in range(90):
        now_ns = step * 100 * MS
        for each in range(3_000):
            node.denied(GATE, f"key:{each}", 1, NS_PER_SECOND, now_ns)
        node.tick(now_ns)
    assert "dropped_hints_full" not in node.counters()
    for each in range(HINTS_MAX):
        entry = HintEntry(peer, each, "denied", False, GATE, f"other:{each}", 1, 0, 60_000_000)
        node._take_hint(entry, now_ns)
        node.take_hints()
        node.denied(GATE, f"own:{each}", 1, NS_PER_SECOND, now_ns)
    assert len(node._hints) == len(node._urgent) == len(node._known) == HINTS_MAX // 2
    sent = node.counters()["hints_sent"]
    node.warm(GATE, "key:hot", now_ns)
    node.warm(GATE, "key:hot", now_ns)
    assert node.counters()["hints_sent"] == sent + 1
    node._take_hint(HintEntry(peer, HINTS_MAX, "warm", False, GATE, "key:1", 0, 0, 0), now_ns)
    assert node.take_hints() == [Hint("warm", GATE, "key:1", 0, 0)]


def test_the_lag_is_measured() -> None:
    """The histogram has the age of each hint on its arrival, by the sender's account."""
    net = network(2)
    settle(net)
    node, peer = net.nodes[address_of(0)], net.nodes[address_of(1)].node
    entry = HintEntry(99, 1, "warm", False, GATE, "key:1", 0, 2_500, 0)
    node.receive(Message(peer, 10**9, hints=(entry,)), address_of(1), net.clock(address_of(0)))
    *counts, total_ns = node.lag()
    assert sum(counts) == 1
    assert total_ns == 2_500_000


# ── Payloads ───────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_payloads_reach_all_live_peers_once_and_are_acknowledged(seed: int) -> None:
    """`acknowledged` never says more than what all have, and says everything in the end."""
    net = network(6, seed)
    net.loss, net.duplication, net.latency_ms = 0.3, 0.2, (0.1, 200)
    sent: dict[int, list[bytes]] = {node.node: [] for node in net.nodes.values()}
    got: dict[int, dict[int, list[int]]] = {node.node: {} for node in net.nodes.values()}

    def collect() -> None:
        for node in net.nodes.values():
            for publisher, sequence, payload in node.take_payloads():
                assert payload == sent[publisher][sequence - 1]
                got[node.node].setdefault(publisher, []).append(sequence)
        for node in net.nodes.values():
            for other in net.nodes.values():
                if other is not node:
                    had = set(got[other.node].get(node.node, ()))
                    assert set(range(1, node.acknowledged() + 1)) <= had

    for _ in range(60):
        number = net.random.randrange(6)
        node = net.touch(number)
        payload = net.random.randbytes(net.random.randrange(1_000))
        sent[node.node].append(payload)
        assert node.publish(payload, net.clock(address_of(number))) == len(sent[node.node])
        net.run(net.random.uniform(0, 0.05))
        collect()
    net.loss = 0
    net.run(12)
    collect()
    for node in net.nodes.values():
        expected = list(range(1, len(sent[node.node]) + 1))
        assert node.acknowledged() == len(expected)
        for other in net.nodes.values():
            if other is not node:
                assert sorted(got[other.node].get(node.node, [])) == expected


def test_a_dead_peer_does_not_hold_up_acknowledgements() -> None:
    """It holds them up until it is dead, and not after that."""
    net = network(4)
    net.run(10)
    net.kill(3)
    node = net.touch(0)
    assert node.publish(b"x", net.clock(address_of(0))) == 1
    net.run(5)
    assert node.acknowledged() == 0
    net.run(15)
    assert node.acknowledged() == 1


def test_a_new_peer_gets_only_what_is_published_after_it_joined() -> None:
    """Its caller learns of the peer by `take_changes`, and publishes again what it needs."""
    net = network(2)
    for each in (b"1", b"2"):
        net.touch(0).publish(each, net.clock(address_of(0)))
        net.run(1)
    net.add(2)
    assert net.run(5, until=net.converged) is not None
    net.touch(0).publish(b"3", net.clock(address_of(0)))
    net.run(2)
    assert net.nodes[address_of(0)].acknowledged() == 3
    assert [each.payload for each in net.nodes[address_of(1)].take_payloads()] == [b"1", b"2", b"3"]
    assert [each.payload for each in net.nodes[address_of(2)].take_payloads()] == [b"3"]


def test_unacknowledged_payloads_are_bounded() -> None:
    """A peer that does not answer cannot fill memory: `publish` returns None."""
    net = network(2)
    net.cut = lambda source, target: True
    node, now_ns = net.nodes[address_of(0)], net.clock(address_of(0))
    published = [node.publish(b"x", now_ns) for _ in range(OUTBOX_MAX + 5)]
    assert published == [*range(1, OUTBOX_MAX + 1), None, None, None, None, None]
    assert node.counters()["dropped_outbox_full"] == 5


# ── Replays and other attacks ──────────────────────────────────────────────────────────────────


def record(net: Network) -> list[tuple[Address, Address, Message]]:
    """Return a list that fills with every message from now on."""
    recorded: list[tuple[Address, Address, Message]] = []
    original = net._post

    def posting(source: Address, outgoing: list[tuple[Address, Message]]) -> None:
        recorded.extend((source, target, message) for target, message in outgoing)
        original(source, outgoing)

    net._post = posting  # type: ignore[method-assign]  # the test looks at the wire
    return recorded


def test_repeated_messages_change_nothing() -> None:
    """Every message of a second, sent again to every node within the window, is dropped."""
    net = network(4)
    settle(net)
    recorded = record(net)
    net.touch(0).warm(GATE, "key:1", net.clock(address_of(0)))
    net.run(1)
    replayed = list(recorded)
    before = {address: len(found) for address, found in net.hints.items()}
    for source, target, message in replayed:
        dropped = net.nodes[target].counters().get("dropped_replayed", 0)
        net.nodes[target].receive(message, source, net.clock(target))
        assert net.nodes[target].counters()["dropped_replayed"] == dropped + 1
    assert {address: len(found) for address, found in net.hints.items()} == before


def test_the_recorded_messages_of_a_dead_node_do_not_revive_it() -> None:
    """Neither on nodes that knew it, nor on a node that started after its death."""
    net = Network(4)
    recorded = record(net)
    for number in range(4):
        net.add(number)
    assert net.run(5, until=lambda: complete(net, 4)) is not None
    net.run(10)
    ghost = net.nodes[address_of(3)].node
    net.kill(3)
    net.run(20)
    net.add(5)
    assert net.run(5, until=net.converged) is not None
    replayed = [each for each in recorded if each[2].sender == ghost]
    assert len(replayed) > 50
    for source, _, message in replayed:
        for target in list(net.nodes):
            net.inject(message, source, target)
    net.run(2)
    assert net.converged()
    newcomer = net.nodes[address_of(5)]
    assert newcomer.counters()["dropped_stranger"] > 50


def test_a_recorded_proof_expires() -> None:
    """A stranger's answer to a nonce is worth nothing 30 s later."""
    node = Gossip(address_of(0), Random(1), 0)
    stranger = Gossip(address_of(1), Random(2), 0)
    stranger.join([address_of(0)])
    ((_, question),) = stranger.tick(stranger.due_ns)
    ((_, challenge),) = node.receive(question, address_of(1), 10**9)
    ((_, answer),) = stranger.receive(challenge, address_of(0), 10**9)
    assert answer.echo == challenge.nonce
    node.receive(answer, address_of(1), 31 * 10**9)
    assert node.live_nodes() == 1
    node.tick(31 * 10**9)
    (_, question), *_ = stranger.tick(31 * 10**9)
    ((_, challenge),) = node.receive(question, address_of(1), 31 * 10**9)
    ((_, answer),) = stranger.receive(challenge, address_of(0), 31 * 10**9)
    node.receive(answer, address_of(1), 31 * 10**9)
    assert node.live_nodes() == 2


def test_a_proof_expires_also_if_the_nonce_is_replaced_late() -> None:
    """A nonce that was made at 0 s is worth nothing at 31 s, though 29 s has made the next one."""
    node = Gossip(address_of(0), Random(1), 0)
    stranger = Gossip(address_of(1), Random(2), 0)
    stranger.join([address_of(0)])
    ((_, question),) = stranger.tick(stranger.due_ns)
    ((_, challenge),) = node.receive(question, address_of(1), 10**9)
    ((_, answer),) = stranger.receive(challenge, address_of(0), 10**9)
    node.receive(question, address_of(1), 29 * 10**9)
    node.receive(answer, address_of(1), 31 * 10**9)
    assert node.live_nodes() == 1


def test_a_held_back_message_is_dropped() -> None:
    """A message that is 5 s behind the newest of its sender is too old, even if it is unknown."""
    net = network(2)
    node, sender = net.nodes[address_of(0)], net.nodes[address_of(1)].node
    now_ns = net.clock(address_of(0))
    newest = 100 * 10**6
    entry = HintEntry(sender, 1, "warm", False, GATE, "key:1", 0, 0, 0)
    node.receive(Message(sender, newest), address_of(1), now_ns)
    node.receive(Message(sender, newest - 5_000_000, hints=(entry,)), address_of(1), now_ns)
    assert node.take_hints() == []
    node.receive(Message(sender, newest - 4_999_999, hints=(entry,)), address_of(1), now_ns)
    assert node.take_hints() == [Hint("warm", GATE, "key:1", 0, 0)]


def test_a_stranger_gets_one_short_answer_and_only_to_a_question() -> None:
    """An answer is not longer than its question: a node cannot be used to flood another."""
    net = network(3)
    node, now_ns = net.nodes[address_of(0)], net.clock(address_of(0))
    stranger = Gossip(address_of(9), Random(5), 0, status=NodeStatus("0.1.0", "17", 1, 1))
    stranger.join([address_of(0)])
    ((_, question),) = stranger.tick(stranger.due_ns)
    ((_, answer),) = node.receive(question, address_of(9), now_ns)
    assert message_size(answer) <= message_size(question)
    assert node.receive(question._replace(nonce=0), address_of(9), now_ns) == []
    assert node.receive(question._replace(digest=()), address_of(9), now_ns) == []
    assert node.live_nodes() == 3


def test_a_repeated_question_of_a_gone_node_takes_nothing_from_hints_and_payloads() -> None:
    """A thousand replays a second are answered ten times a second, from a budget of its own."""
    net = network(3)
    settle(net, 2)
    node, address = net.nodes[address_of(0)], address_of(0)
    gone = Gossip(address_of(9), Random(5), 0, status=NodeStatus("0.1.0", "17", 1, 1))
    gone.join([address])
    ((_, question),) = gone.tick(gone.due_ns)
    answers = [0] * 30
    for second in range(30):
        for _ in range(1_000):
            answers[second] += len(node.receive(question, ("192.0.2.6", 53), net.clock(address)))
            net.run(0.001)
    assert sum(answers) < 600
    assert 0 < max(answers[-5:]) <= 12
    net.touch(0).warm(GATE, "key:warm", net.clock(address))
    assert node.publish(b"x", net.clock(address)) == 1
    net.run(0.1)
    assert [len(net.hints[address_of(each)]) for each in (1, 2)] == [1, 1]
    assert node.acknowledged() == 1


def test_a_peer_is_answered_at_its_own_address() -> None:
    """A copy with a forged source that comes first sends no traffic to a third machine."""
    net = network(2)
    node, peer = net.nodes[address_of(0)], net.nodes[address_of(1)]
    now_ns = net.clock(address_of(0))
    question = Message(peer.node, 10**9, nonce=7, digest=(1,) * 16, wants_reply=True)
    ((target, _),) = node.receive(question, ("192.0.2.6", 53), now_ns)
    assert target == address_of(1)


def test_a_payload_for_another_node_is_ignored() -> None:
    """A copy of a message that another node got cannot move this node's window."""
    net = network(2)
    node, sender = net.nodes[address_of(0)], net.nodes[address_of(1)].node
    entry = PayloadEntry(12_345, 7, 7, b"x")
    message = Message(sender, 10**9, payloads=(entry,))
    assert node.receive(message, address_of(1), net.clock(address_of(0))) == []
    assert node.take_payloads() == []


def test_the_members_are_bounded() -> None:
    """A peer that makes up nodes can name a thousand, and the rest is counted."""
    net = network(2)
    node, sender = net.nodes[address_of(0)], net.nodes[address_of(1)].node
    for batch in range(100):
        members = tuple(
            MemberEntry(
                10**6 + batch * 20 + each, address_of(each + batch * 20 + 9), 1, 0, False, OLD
            )
            for each in range(20)
        )
        message = Message(sender, 10**9 + batch, members=members)
        node.receive(message, address_of(1), net.clock(address_of(0)))
    assert len(node._peers) == MEMBERS_MAX
    assert node.live_nodes() <= MEMBERS_MAX + 1
    assert node.counters()["dropped_members_full"] > 0


OLD = NodeStatus("0.0.9")


@settings(max_examples=settings().max_examples * 6 // 5)
@given(received=st.lists(st.tuples(messages, st.integers(0, 10**9)), max_size=12))
def test_no_message_breaks_the_machine(received: list[tuple[Message, int]]) -> None:
    """Whatever an authentic peer sends: no error, messages that can be encoded, and bounds."""
    net = network(3)
    address = address_of(0)
    node, peer = net.nodes[address], net.nodes[address_of(1)].node
    own = node.node
    codec = DatagramCodec("test")
    now_ns = net.clock(address)
    node.publish(b"payload", now_ns)
    for drawn, later_ns in received:
        now_ns += later_ns
        # Mostly from a peer, and about this node.
        message = drawn._replace(
            sender=peer if drawn.sender <= 4 else drawn.sender,
            payloads=tuple(each._replace(recipient=each[0] or own) for each in drawn.payloads),
            acks=tuple(each._replace(publisher=each.publisher or own) for each in drawn.acks),
        )
        outgoing = node.receive(message, address_of(1), now_ns)
        outgoing += node.tick(max(now_ns, node.due_ns))
        for _, answer in outgoing:
            assert codec.open(codec.seal(answer)) == answer
    assert node.live_nodes() >= 1
    assert node.acknowledged() <= 1
    node.members(now_ns)
    node.take_hints(), node.take_payloads(), node.take_changes()
