"""The agent of a node: one process gossips for all, and another takes over."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import (
    ConfigError,
    Decision,
    Fleet,
    Limit,
    Limiter,
    StoreUnavailable,
    open_store,
)
from ratekeeper.decide.allowances import AllowanceStats
from ratekeeper.decide.fleet_monitor import NodeAnswers
from ratekeeper.decide.leasing import Lease
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.fleet import agent as agent_module
from ratekeeper.fleet.agent import (
    NODES_ASSUMED,
    NodeAgent,
    NodeProcesses,
    NodeRegister,
    counts_of,
    settings_of,
    table_path,
)
from ratekeeper.fleet.gossip import GossipSettings, Hint, MemberChange, ReceivedPayload
from ratekeeper.fleet.node import Node
from ratekeeper.fleet.store import FleetStore
from ratekeeper.fleet.transport import GossipTransport
from ratekeeper.testing import ManualClock
from tests.answering import AnsweringStore
from tests.fleet.stub_gossip import GossipOpener, agents, node_of
from tests.redis_servers import running, until
from tests.redis_servers.ports import HOST, free_port
from tests.shared_memory import SharedMemory

WAIT_S = 20.0
SECOND = 1_000_000_000


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "TURN_S", 0.02)
    monkeypatch.setattr(agent_module, "RETRY_S", 0.02)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Return a folder with a short path, whatever the user's name: sockets are in it."""
    with TemporaryDirectory(prefix="agent-") as name:
        yield Path(name)


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Return the URI of a node's table; only its path and mode matter here."""
    path = tmp_path / "t"
    path.touch(mode=0o600)
    return f"shared://{path}"


def know(node: Node, kind: Any) -> Any:
    """Add a rule of this kind to a node; return its gate in the table."""
    limits = (Limit(10, per=60),)
    authority = PythonMemoryStore(ManualClock()).counter(limits, kind)
    return node.known(limits, kind, kind, SECOND, authority).allowance


def is_denied(gate: Any, subject: str) -> bool:
    """Return True if the node denies the subject itself."""
    decision = gate.spend(subject, 1)
    return decision is not None and not decision.allowed


# ── One process ────────────────────────────────────────────────────────────────────────────────


def test_without_gossip_the_node_is_alone() -> None:
    """Nothing is opened, hints go nowhere, and the number of nodes is the configured one."""
    opened = GossipOpener()
    agent = NodeAgent(node_of(Fleet(nodes=20)), open_gossip=opened)
    agent.start()
    agent.warm(1, "user:1")
    agent.denied(1, "user:1", 1, SECOND)
    assert (agent.live_nodes(), agent.sharing_nodes()) == (20, 20)
    assert agent.gossip() is None
    assert agent.ask(b"?") is None
    (own,) = agent.nodes()
    assert (own.name, own.address, own.is_self) == (socket.gethostname(), "", True)
    agent.close()
    assert not opened.opened


@pytest.mark.server
def test_nodes_without_gossip_count_each_other() -> None:
    """Each registers at the authority; one that leaves, or is silent for long, is not counted."""
    uri = running("single").uri
    fleet = Fleet(dead_seconds=1)
    stores = [open_store(uri, prefix="counted", connect_ms=2_000) for _ in range(3)]
    counting = [NodeAgent(node_of(fleet), registry=store.channel) for store in stores]
    try:
        assert [agent.sharing_nodes() for agent in counting] == [NODES_ASSUMED] * 3
        for agent in counting:
            agent.start()
        until(lambda: all(agent.sharing_nodes() == 3 for agent in counting), "all count", WAIT_S)
        assert not any(agent.hears_hints() for agent in counting)
        counting[0].close()
        others = counting[1:]
        until(lambda: all(agent.sharing_nodes() == 2 for agent in others), "it left", WAIT_S)
        stores[1].close()  # it cannot register any more, and keeps the number that it knows
        until(lambda: counting[2].sharing_nodes() == 1, "it is silent", WAIT_S)
        assert counting[1].sharing_nodes() == 2
    finally:
        for agent, store in zip(counting, stores, strict=True):
            agent.close()
            store.close()


def test_a_fleet_can_have_a_name_and_an_address_for_other_nodes() -> None:
    """Gossip gets both."""
    found: dict[str, Any] = {}

    def opened(bind: str, **options: Any) -> GossipTransport:
        found.update(options)
        return GossipTransport(bind, **options)

    address = f"{HOST}:{free_port()}"
    fleet = Fleet(gossip=address, advertise="127.0.0.9:7947", name="api-eu")
    agent = NodeAgent(node_of(fleet), open_gossip=opened)
    agent.start()
    try:
        assert (found["advertise"], found["fleet"]) == ("127.0.0.9:7947", "api-eu")
        assert agent.nodes()[0].address == "127.0.0.9:7947"
    finally:
        agent.close()


@pytest.mark.server
def test_two_fleets_on_one_redis_are_counted_apart() -> None:
    """A node of the other fleet is not one that this fleet's gossip has lost."""
    uri = running("single").uri
    names = ("one", "one", "other")
    stores = [open_store(uri, prefix="apart", connect_ms=2_000) for _ in names]
    counting = [
        NodeAgent(node_of(Fleet(name=name, dead_seconds=1)), registry=store.channel)
        for name, store in zip(names, stores, strict=True)
    ]
    try:
        for agent in counting:
            agent.start()
        until(
            lambda: [agent.registered_nodes() for agent in counting] == [2, 2, 1],
            "each fleet counts its own nodes",
            WAIT_S,
            lambda: [agent.registered_nodes() for agent in counting],
        )
    finally:
        for agent, store in zip(counting, stores, strict=True):
            agent.close()
            store.close()


class FakeRegistry:
    """The list of nodes at the authority. A test sets how many others there are."""

    def __init__(self) -> None:
        self.others = 0
        self.error: StoreUnavailable | None = None

    def count_names(self, topic: str, name: str, lasts_ns: int) -> int:
        """See Channel."""
        if self.error is not None:
            raise self.error
        return self.others + 1


class Counted:
    """A register of nodes with a clock of its own: registrations last 15 seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registry: Any = FakeRegistry()
        self.now_s = 1_000.0
        monkeypatch.setattr(agent_module, "monotonic", lambda: self.now_s)
        self.register = NodeRegister(self.registry, 15 * SECOND)

    def after(self, seconds: float, others: int) -> int:
        """Return the count after a time with this many other nodes."""
        self.registry.others = others
        self.now_s += seconds
        try:
            return self.register.count()
        except StoreUnavailable:
            return -1


def test_nodes_that_start_together_do_not_undercount(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first count of a node is not used, and while the number changes it counts each second."""
    found = Counted(monkeypatch)
    assert found.after(0, 0) == 0
    assert found.after(0.9, 7) == 0
    assert found.after(0.1, 7) == 8
    assert found.after(1, 19) == 20
    assert found.after(1, 19) == 20
    assert found.after(4.9, 20) == 20  # not counted before five seconds have passed
    assert found.after(0.1, 20) == 21


def test_the_count_does_not_fall_for_a_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    """The authority may have lost the list; nodes that are gone are not counted after that."""
    found = Counted(monkeypatch)
    assert [found.after(1, 19) for _ in range(3)] == [0, 20, 20]
    assert [found.after(5, 0) for _ in range(2)] == [20, 20]
    assert found.after(5, 5) == 6


def test_the_count_does_not_fall_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """All registrations have expired meanwhile. The nodes return one after the other."""
    found = Counted(monkeypatch)
    assert [found.after(1, 19) for _ in range(3)] == [0, 20, 20]
    found.registry.error = StoreUnavailable("away")
    assert {found.after(1, 19) for _ in range(3)} == {20}
    assert {found.after(1, 19) for _ in range(100)} == {-1}
    found.registry.error = None
    assert [found.after(1, others) for others in (0, 1, 5, 18)] == [20] * 4
    assert [found.after(5, 2) for _ in range(3)][-1] == 3


def test_a_node_that_hears_no_gossip_knows_how_many_have_registered() -> None:
    """All nodes believe that they are alone, and none takes more than its part."""
    opened, registry = GossipOpener(), FakeRegistry()
    registry.others, opened.live = 19, 1
    fleet = Fleet(gossip="127.0.0.1:7946", peers=("127.0.0.1:7947",), dead_seconds=1)
    agent = NodeAgent(node_of(fleet), registry=registry, open_gossip=opened)  # type: ignore[arg-type]  # no messages
    assert agent.sharing_nodes() == NODES_ASSUMED
    agent.start()
    try:
        assert opened.opened[0].given["registry"] is None  # nodes find each other by their peers
        until(lambda: agent.sharing_nodes() == 20, "the nodes are counted", WAIT_S)
        until(lambda: agent.live_nodes() == 1, "gossip finds no other node", WAIT_S)
        assert not agent.hears_hints()
        registry.error = StoreUnavailable("away")
        opened.opened[0].live = 30
        until(lambda: agent.sharing_nodes() == 30, "gossip knows more of them", WAIT_S)
    finally:
        agent.close()


def test_a_forked_process_hears_no_hints_until_its_own_gossip_runs() -> None:
    """The hints go to its parent. It presumes no subject to be cool."""
    with agents("memory://") as [(agent, _)]:
        until(agent.hears_hints, "other nodes are known", WAIT_S)
        agent.close()
        agent.forked()
        assert not agent.hears_hints()


def test_a_process_with_a_private_table_is_its_own_agent() -> None:
    """Its hints go out at once, and it has no lock and no socket."""
    with agents("memory://") as [(agent, opened)]:
        agent.warm(1, "user:1")
        agent.denied(2, "user:2", 3, SECOND)
        (gossip,) = opened.opened
        assert gossip.told == [("warm", 1, "user:1"), ("denied", 2, "user:2", 3, SECOND)]
        assert (gossip.bind, gossip.given["peers"]) == ("127.0.0.1:7946", ())
        counts = agent.gossip()
        assert counts is not None
        assert (counts.sent, counts.received, counts.dropped) == (5, 7, {"forged": 2})
        agent.close()
        assert not gossip.is_running


def test_hints_of_other_nodes_reach_the_table() -> None:
    """A denied subject is denied, and the budget of a warm one ends; unknown limits do nothing."""
    with agents("memory://") as [(agent, opened)]:
        leased, eventual = (know(agent._node, kind) for kind in ("leased", "eventual"))
        decision = Decision(True, Limit(10, per=60), 5, 0, 0, decided_ns=1, charged_ns=1)
        for gate in (leased, eventual):
            gate.put("user:2", Lease(5, 1, SECOND), decision, 1)
        opened.opened[0].given["on_hints"](
            [
                Hint("denied", leased.number, "user:1", 1, SECOND),
                Hint("warm", eventual.number, "user:2", 0, 0),
                Hint("warm", leased.number, "user:2", 0, 0),
                Hint("denied", 99, "user:1", 1, SECOND),
                Hint("denied", eventual.number, "user:3", 0, SECOND),
            ]
        )
        assert is_denied(leased, "user:1")
        assert eventual.spend("user:2", 1) is None
        assert leased.spend("user:2", 1)  # its units are charged already
        assert not is_denied(eventual, "user:3")


def test_the_status_and_the_members() -> None:
    """The node's own status is told in each turn; nodes that left are not listed."""
    with agents("memory://", nodes=5) as [(agent, opened)]:
        agent.use_rules("v12")
        until(lambda: opened.opened[0].status.rules_version == "v12", "the rules are told", WAIT_S)
        own, suspected, dead = agent.nodes()
        assert (own.name, own.address, own.rules_version) == ("here", "10.0.0.1:7946", "v12")
        assert own.is_self
        assert own.lag_s is None
        assert (suspected.state, suspected.lag_s, suspected.region) == ("suspected", 6.5, "eu")
        assert (suspected.leased_units, suspected.pending_units) == (3, 4)
        assert (dead.state, dead.name) == ("dead", "[::1]:7946")
        until(lambda: agent.live_nodes() == 3, "the number of live nodes is known", WAIT_S)
        assert agent.sharing_nodes() == 5  # never fewer than configured
        opened.opened[0].live = 9
        changed: list[MemberChange] = []
        agent.on_changes = changed.extend
        opened.opened[0].given["on_changes"]([MemberChange(7, True)])
        assert (agent.live_nodes(), agent.sharing_nodes()) == (9, 9)
        assert changed == [MemberChange(7, True)]


def test_payloads_pass_through() -> None:
    """What other nodes publish reaches the callback, and what this one publishes gossip."""
    with agents("memory://") as [(agent, opened)]:
        opened.opened[0].given["on_payloads"]([ReceivedPayload(2, 1, b"lost")])
        got: list[ReceivedPayload] = []
        agent.on_payloads = got.extend
        opened.opened[0].given["on_payloads"]([ReceivedPayload(2, 1, b"p")])
        assert got == [ReceivedPayload(2, 1, b"p")]
        assert agent.publish(b"x") == 1
        agent.on_question = bytes.upper
        assert agent.ask(b"yes") == b"YES"


def test_the_process_is_told_when_it_leads_and_in_each_turn() -> None:
    """With the node's id before gossip starts; with None at the end and in a forked child."""
    with agents("memory://") as [(agent, opened)]:
        told: list[int | None] = []
        turns: list[None] = []
        agent.on_lead, agent.on_turn = told.append, lambda: turns.append(None)
        until(lambda: bool(turns), "the agent has had a turn", WAIT_S)
        agent.close()
        assert told == [None]
        agent.start()
        assert told == [None, opened.opened[1].node]
        agent.close()
        agent.forked()
        assert told[2:] == [None, None]


def test_gossip_that_cannot_start_is_an_error_at_the_start(table: str, tmp_path: Path) -> None:
    """The process would have been the agent, and it leaves no socket behind."""
    opened = GossipOpener()
    opened.fails = True
    agent = NodeAgent(node_of(Fleet(store=table, gossip="127.0.0.1:7946")), open_gossip=opened)
    with pytest.raises(ConfigError, match="the port is in use"):
        agent.start()
    assert {path.name for path in tmp_path.iterdir()} <= {"t", "t.gossip.lock"}
    opened.fails = False
    agent.start()
    assert agent.gossip() is not None
    agent.close()


def test_the_table_is_read_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a large table takes milliseconds; it is read less often the longer that takes."""
    now_s, reads = 100.0, 0
    agent = NodeAgent(node_of(Fleet()))
    stats = agent._node.table.stats

    def slow() -> AllowanceStats:
        nonlocal now_s, reads
        now_s, reads = now_s + 0.05, reads + 1
        return stats()

    monkeypatch.setattr(agent_module, "monotonic", lambda: now_s)
    monkeypatch.setattr(agent._node.table, "stats", slow)
    for after_s, count in ((0, 1), (0.5, 1), (4.0, 1), (5.0, 2)):
        now_s = 100.0 + after_s
        agent.nodes()
        agent.table()
        assert reads == count


# ── Several processes ──────────────────────────────────────────────────────────────────────────


def test_one_process_gossips_for_all(table: str) -> None:
    """The others know what it knows, and their hints reach other nodes through it."""
    with agents(table, table) as [(first, opened), (second, none_opened)]:
        until(lambda: second.live_nodes() == 3, "the agent's knowledge arrives", WAIT_S)
        assert not none_opened.opened
        assert second.gossip() is None
        assert second.publish(b"x") is None
        names = [(each.name, each.is_self) for each in first.nodes()]
        assert [(each.name, each.is_self) for each in second.nodes()] == names
        lag_s = second.nodes()[1].lag_s
        assert lag_s is not None
        assert lag_s >= 6.5
        second.denied(5, "user:ä", 2, SECOND)
        second.warm(6, "user:2")
        told = [("denied", 5, "user:ä", 2, SECOND), ("warm", 6, "user:2")]
        until(lambda: opened.opened[0].told == told, "the hints are told", WAIT_S)


def test_a_hint_for_limits_that_only_another_process_has(table: str) -> None:
    """The agent passes it on, because the table is reached through the limits' gate."""
    with agents(table, table) as [(first, opened), (second, _)]:
        gate = know(second._node, "leased")
        hint = Hint("denied", gate.number, "user:1", 1, SECOND)

        def arrives() -> bool:
            opened.opened[0].given["on_hints"]([hint] * 150)
            return is_denied(gate, "user:1")

        until(arrives, "the other process has the denial", WAIT_S)
        assert gate.number not in first._node.gates


def test_questions_to_the_agent(table: str) -> None:
    """A process gets the agent's answer; without one, None after a bounded time."""
    with agents(table, table) as [(first, _), (second, _)]:
        until(lambda: second.live_nodes() == 3, "the agent is known", WAIT_S)
        assert second.ask(b"why") is None
        first.on_question = bytes.upper
        until(lambda: second.ask(b"yes") == b"YES", "the answer arrives", WAIT_S)
        first.close()
        assert second.ask(b"yes") is None or second.gossip() is not None


def test_a_slow_agent_does_not_block_an_event_loop(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question waits LOOP_ANSWER_S there; in a thread without a loop, ANSWER_S."""
    monkeypatch.setattr(agent_module, "ANSWER_S", 3 * WAIT_S)
    answering = threading.Event()

    def slow(question: bytes) -> bytes:
        assert answering.wait(3 * WAIT_S)
        return question.upper()

    async def ask_in_loop() -> bytes | None:
        return second.ask(b"yes")

    with agents(table, table) as [(first, _), (second, _)]:
        first.on_question = slow
        until(lambda: second.live_nodes() == 3, "the agent is known", WAIT_S)
        began_s = time.monotonic()
        assert asyncio.run(ask_in_loop()) is None
        assert time.monotonic() - began_s < WAIT_S
        answering.set()
        assert second.ask(b"yes") == b"YES"


def test_an_agent_that_ends_is_replaced(table: str) -> None:
    """Another process opens gossip when the first has left, and goes on."""
    with agents(table, table) as [(first, opened), (second, other)]:
        first.close()
        assert not opened.opened[0].is_running
        until(lambda: second.gossip() is not None, "the second process leads", WAIT_S)
        second.warm(1, "user:1")
        assert other.opened[0].told == [("warm", 1, "user:1")]


def test_a_process_that_takes_over_does_not_forget_the_other_nodes(table: str) -> None:
    """Its gossip has not heard of them yet, and the whole limit is not its own."""
    with agents(table, table) as [(first, _), (second, other)]:
        until(lambda: second.live_nodes() == 3, "the agent is known", WAIT_S)
        led: list[int] = []
        second.on_lead = lambda node: led.append(second.heard_nodes() if node else 0)
        other.live = 1
        first.close()
        until(lambda: second.gossip() is not None, "the second process leads", WAIT_S)
        assert led == [3]
        other.opened[0].given["on_changes"]([])
        assert second.heard_nodes() == 3
        second._heard_all_at_s = 0.0
        other.opened[0].given["on_changes"]([])
        assert second.heard_nodes() == 1


def test_a_take_over_that_fails_is_repeated(table: str, caplog: pytest.LogCaptureFixture) -> None:
    """The port may still be in use for a moment; it is logged once."""
    with agents(table, table) as [(first, _), (second, other)]:
        other.fails = True
        first.close()
        until(lambda: "the port is in use" in caplog.text, "it is logged", WAIT_S)
        other.fails = False
        until(lambda: second.gossip() is not None, "the second process leads", WAIT_S)
    assert caplog.text.count("the port is in use") == 1


def sockets(folder: Path) -> list[Path]:
    """Return the sockets of a node's processes."""
    return [path for path in folder.glob("t.gossip.*") if path.is_socket()]


@contextmanager
def processes(folder: Path, count: int) -> Iterator[list[NodeProcesses]]:
    """Yield the processes of a node."""
    table = folder / "t"
    table.touch(mode=0o600)
    found = [NodeProcesses(table) for _ in range(count)]
    try:
        yield found
    finally:
        for each in found:
            each.close()


def test_no_datagram_makes_a_process_remove_a_file(tmp_path: Path) -> None:
    """A sender is a socket beside the table, whatever it says, and no other file is removed."""
    precious = tmp_path / "precious.conf"
    precious.touch()
    named = tmp_path / "t.gossip.0123456789abcdef"
    named.touch()
    with processes(tmp_path, 1) as [process]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as attacker:
            attacker.bind(str(tmp_path / "attacker"))
            for said in (b"", b"../precious.conf", b"0123456789abcdef", b"0123456789ABCDEF"):
                attacker.sendto(said + b"k", str(process._path))
        senders = {sender for _, sender in process.receive(WAIT_S)}
        assert senders == {str(named)}
        assert not process.send(str(named), b"x")
        assert not process.send(str(precious), b"x")
    assert precious.exists()
    assert named.exists()


def test_a_process_that_reads_nothing_does_not_cut_off_the_others(tmp_path: Path) -> None:
    """Its unread datagrams would fill the buffer of the agent's socket."""
    with processes(tmp_path, 3) as [agent, reader, _stopped]:
        for _ in range(30):
            agent.send_all(b"k" + b"x" * 46_000)
            assert len(reader.receive(WAIT_S)) == 1
            assert agent.send(str(reader._path), b"a")
            assert [data for data, _ in reader.receive(WAIT_S)] == [b"a"]


def test_processes_with_the_same_id_have_sockets_of_their_own(tmp_path: Path) -> None:
    """Each container has a process 1."""
    with processes(tmp_path, 2) as [first, second]:
        assert list(first.others()) == [second._path]
        first.send_all(b"x")
        assert second.receive(WAIT_S) == [(b"x", str(first._path))]


def test_a_lock_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """He could keep the lock, and this node would never gossip. A shared table trusts him."""
    with processes(tmp_path, 1) as [process]:
        (tmp_path / "t.gossip.lock").touch()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(ConfigError, match=r"t\.gossip\.lock belongs to another user"):
            process.lock()
        process._mode = 0o660
        assert process.lock()


def test_an_error_of_the_system_at_the_start_leaves_no_lock(table: str, tmp_path: Path) -> None:
    """Another process could not become the agent."""

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "too many open files")

    agent = NodeAgent(node_of(Fleet(store=table, gossip="127.0.0.1:7946")), open_gossip=fails)
    with pytest.raises(ConfigError, match="too many open files"):
        agent.start()
    assert not sockets(tmp_path)
    with processes(tmp_path, 1) as [process]:
        assert process.lock()


def test_a_silent_agent_is_logged_once(alone: NodeAgent, caplog: pytest.LogCaptureFixture) -> None:
    """The number of nodes that it said last stays in use."""
    alone._live, alone._known = 7, alone.nodes()
    alone._known_at_s = time.monotonic() + 600
    alone._miss_agent()
    assert not caplog.text
    alone._known_at_s = time.monotonic() - 600
    alone._miss_agent()
    alone._miss_agent()
    assert caplog.text.count("has been silent for 600 s") == 1
    assert alone.sharing_nodes() == 7
    alone._live, alone._known = 0, []


def test_the_files_beside_the_table(table: str, tmp_path: Path) -> None:
    """Sockets have the mode of the table. Those of dead processes go, and ours at the end."""
    dead = tmp_path / "t.gossip.0123456789abcdef"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gone:
        gone.bind(str(dead))
    (tmp_path / "t.gossip.7777777777777777").touch()  # not a socket
    (tmp_path / "t.gossip.name").touch()
    with agents(table, table):
        until(lambda: not dead.exists(), "the socket of a dead process is removed", WAIT_S)
        own = sockets(tmp_path)
        assert len(own) == 2
        for path in (*own, tmp_path / "t.gossip.lock"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"t", "t.gossip.lock", "t.gossip.7777777777777777", "t.gossip.name"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"k",
        b"k[1]",
        b"k[0, 0, []]",
        b"k[9, -1, []]",
        b"k[true, 9, []]",
        b'k[9, 9, [{"no": 1}]]',
        b"h{}",
        b'h[[["warm"], 1, "a", 0, 0]]',
        b"h[[]]",
        b'h[["warm", 1, 2, 0, 0], ["cold", 1, "a", 0, 0], ["warm", -1, "a", 0, 0], [1], 7]',
        b'h[["warm", 18446744073709551616, "a", 0, 0], ["warm", 1, "\\ud800", 0, 0]]',
        b'h[[["warm"], 1, "a", 0, 0], [{}, 1, "a", 0, 0]]',
        b"h\xff",
        b"q",
        b"q12345678why",
        b"a12345678because",
        b"k" + b"[" * 100_000,
        b"h" + b"[" * 100_000,
    ],
)
def test_a_datagram_that_makes_no_sense_is_dropped(table: str, tmp_path: Path, data: bytes) -> None:
    """Neither the agent nor another process changes, and both go on."""
    with agents(table, table) as [(first, opened), (second, _)]:
        until(lambda: second.live_nodes() == 3, "the agent is known", WAIT_S)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as attacker:
            for path in sockets(tmp_path):
                attacker.sendto(data, str(path))
                attacker.sendto(b"0123456789abcdef" + data, str(path))
        second.warm(1, "user:1")
        until(lambda: opened.opened[0].told, "the hint after it arrives", WAIT_S)
        assert opened.opened[0].told == [("warm", 1, "user:1")]
        assert (first.live_nodes(), second.live_nodes()) == (3, 3)


@pytest.fixture(scope="module")
def alone() -> NodeAgent:
    """Return an agent that was not started."""
    return NodeAgent(node_of(Fleet(gossip="127.0.0.1:7946", nodes=4)))


@given(
    st.sampled_from([b"k", b"h", b"q", b"a", b""]),
    st.one_of(
        st.binary(max_size=100),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda each: st.lists(each, max_size=6) | st.dictionaries(st.text(), each, max_size=3),
            max_leaves=10,
        ).map(lambda value: json.dumps(value).encode()),
    ),
)
def test_no_datagram_stops_the_agent(alone: NodeAgent, kind: bytes, body: bytes) -> None:
    """Whatever another process sends, the agent goes on with what it knows."""
    alone._received(kind + body, "")
    assert alone.live_nodes() == 4


def test_a_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    """The error says so, and what to do."""
    path = tmp_path / ("t" * 120)
    path.touch()
    with pytest.raises(ConfigError, match="longer than 107 bytes; use a shorter path"):
        NodeProcesses(path)
    with pytest.raises(ConfigError, match="No such file"):
        NodeProcesses(tmp_path / "missing")


def test_a_large_fleet_fits_a_datagram(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the agent sends is bounded: fewer nodes are sent rather than none."""
    monkeypatch.setattr(agent_module, "DATAGRAM_BYTES_MAX", 2_000)
    with agents("memory://") as [(agent, _)]:
        (own, other, _) = agent.nodes()
        monkeypatch.setattr(agent, "nodes", lambda: [own, *[replace(other)] * 5_000])
        assert len(agent._encoded_nodes()) <= 2_000


def test_a_killed_agent_is_replaced_by_a_forked_process(tmp_path: Path) -> None:
    """A fork keeps neither the lock nor the port of its parent, and all know the live nodes."""
    (tmp_path / "t").touch(mode=0o600)
    log = tmp_path / "log"
    address = f"{HOST}:{free_port()}"
    process = ("-m", "tests.fleet.agent_process", str(tmp_path / "t"), "3", address)
    command = [sys.executable, *process]
    root = Path(__file__).parents[2]
    with log.open("ab") as stdout:
        first = subprocess.Popen(command, stdout=stdout, cwd=root, start_new_session=True)

    def pids(role: str) -> set[int]:
        lines = [line.split() for line in log.read_text().splitlines(keepends=True)]
        return {int(line[0]) for line in lines if line[1:] == [role, "1"]}

    try:
        until(lambda: len(pids("process")) == 2, "both children know it", WAIT_S, log.read_text)
        until(lambda: pids("agent"), "the agent has told its role", WAIT_S, log.read_text)
        assert pids("agent") == {first.pid}
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        until(lambda: len(pids("agent")) == 2, "a child takes over", WAIT_S, log.read_text)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()


# ── The store of a node ────────────────────────────────────────────────────────────────────────


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> GossipOpener:
    """Let each FleetStore open a stub of gossip."""
    found = GossipOpener()
    agent_with_stub = partial(NodeAgent, open_gossip=found, name="here")
    monkeypatch.setattr("ratekeeper.fleet.store.NodeAgent", agent_with_stub)
    return found


def test_a_denial_of_one_node_is_known_to_another(opened: GossipOpener) -> None:
    """It is a hint of gossip, and the other node answers without the authority."""
    clock = ManualClock()
    authority = SharedMemory(clock)
    stores = [
        AnsweringStore(
            FleetStore(authority, Fleet(gossip="127.0.0.1:7946"), clock, owns_store=False)
        )
        for _ in range(2)
    ]
    here, there = (store.counter([Limit(2, per=3600)], "api", "leased") for store in stores)
    here.check("user:1", 2)
    assert not here.check("user:1", 1)
    first, second = opened.opened
    hints = [Hint(*each) for each in first.told]
    assert [(each.kind, each.subject, each.cost) for each in hints] == [("denied", "user:1", 1)]
    second.given["on_hints"](hints)
    assert not there.check("user:1", 1)
    fleet = stores[1].fleet
    assert fleet is not None
    assert fleet.answers()["api", "leased"] == NodeAnswers(denied=1)
    assert fleet.table().held_max > 1
    assert fleet.reports().reports == 0
    for store in stores:
        store.close()
    assert not first.is_running


def test_the_live_nodes_decide_the_size_of_leases(opened: GossipOpener) -> None:
    """A lease is at most room / (2 × nodes)."""
    clock = ManualClock()
    store = FleetStore(SharedMemory(clock), Fleet(gossip="127.0.0.1:7946"), clock)
    opened.opened[0].live = 7
    opened.opened[0].given["on_changes"]([MemberChange(2, True)])
    assert store.open_node().live_nodes() == 7
    store.close()


def test_other_nodes_see_the_version_of_the_rules(opened: GossipOpener) -> None:
    """It changes when other rules are put in force."""
    clock = ManualClock()
    store = FleetStore(SharedMemory(clock), Fleet(gossip="127.0.0.1:7946"), clock)
    rules = {"version": 1, "rules": [{"id": "a", "by": "user", "limits": "2/minute"}]}
    with Limiter.from_rules(rules, store=store, clock=clock) as limiter:
        assert limiter.fleet is not None
        limiter.use(rules, "v12")
        assert limiter.fleet.nodes()[0].rules_version == "v12"
    store.close()


def test_gossip_that_cannot_start_stops_the_limiter(opened: GossipOpener) -> None:
    """The error is that of gossip."""
    opened.fails = True
    clock = ManualClock()
    with pytest.raises(ConfigError, match="the port is in use"):
        FleetStore(SharedMemory(clock), Fleet(gossip="127.0.0.1:7946"), clock)


# ── Values ─────────────────────────────────────────────────────────────────────────────────────


def test_the_counts_of_gossip() -> None:
    """A later release may have other counters; a histogram with other ranges is left out."""
    counts = counts_of({"sent": 1, "dropped_replayed": 2, "more": 3}, [1, 2])
    assert (counts.sent, counts.received, dict(counts.dropped)) == (1, 0, {"replayed": 2})
    assert not any(counts.hint_seconds)


def test_the_timing_of_gossip() -> None:
    """The default is that of gossip itself; all times follow when a node is dead."""
    assert settings_of(Fleet()) == GossipSettings()
    short = settings_of(Fleet(dead_seconds=3))
    assert (short.heartbeat_ns, short.suspected_ns, short.dead_ns) == (
        SECOND,
        3 * SECOND // 2,
        3 * SECOND,
    )


def test_the_path_of_a_table() -> None:
    """It is unquoted, without the options."""
    assert table_path("shared:///a%20b?mode=660") == Path("/a b")
    assert table_path("memory://") is None
