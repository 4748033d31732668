"""The agent of a node: gossip for all of its processes.

A node is one machine, and one address of the fleet. Its processes share a table of allowances, and
one of them, the *agent*, runs gossip. A file lock beside the table decides which one. The system
releases the lock when the process dies, and another process takes over within TURN_S.

Every process has a Unix datagram socket beside the table, `TABLE.gossip.NAME`, with the table's
mode and a random name. The agent sends the other processes the list of live nodes, and the hints
for limits that only they have. A process sends its own hints to the agent from which it last heard.
No request waits for a datagram. A lost datagram costs a call to the authority, or over-admission by
some units of an `eventual` limit until the next flush.

With `memory://`, a process is a node of its own and its own agent, without a lock and a socket.

The agent also counts the nodes through the authority, where each registers with an expiry. If
gossip is cut off, every node believes that it is alone, and this count corrects it. Without gossip,
the agent only counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import re
import select
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ConfigError, StoreError
from ratekeeper.core.forks import after_fork
from ratekeeper.core.histogram import LENGTH
from ratekeeper.core.version import __version__
from ratekeeper.decide.allowances import AllowanceKind, AllowanceStats
from ratekeeper.decide.fleet_monitor import FleetNode, GossipCounts, NodeAnswers, ReportCounts
from ratekeeper.decide.store import Channel
from ratekeeper.fleet.datagrams import U64_MAX, NodeStatus
from ratekeeper.fleet.gossip import (
    GossipSettings,
    Hint,
    Member,
    MemberChange,
    ReceivedPayload,
)
from ratekeeper.fleet.node import Node
from ratekeeper.fleet.settings import (
    FLEET_NAME,
    SOCKET_NAME_BYTES,
    Fleet,
    check_socket_path,
    joined_address,
    topic_of,
)
from ratekeeper.fleet.transport import GossipTransport

# How often the agent sends the list of live nodes, and how often another process tries to take
# over.
TURN_S: Final = 0.5
# An agent that has sent nothing for this many turns is suspended, or hangs.
SILENT_TURNS: Final = 10
# After a failure to start gossip, the next attempt is made after this time.
RETRY_S: Final = 5.0
# After this time, a new agent has heard of all live nodes.
HEARD_ALL_S: Final = 5.0
# The topic under which nodes register, and the assumed number of nodes until they are counted.
TOPIC: Final = "live"
NODES_ASSUMED: Final = 100
# How often the statistics of the table are read.
STATS_S: Final = 1.0
STATS_SHARE_MAX: Final = 0.01
# A question to the agent is answered within this time, or not at all.
ANSWER_S: Final = 0.05
# The same for a question from an event loop: all other requests of the process wait meanwhile.
LOOP_ANSWER_S: Final = 0.005
# A Unix datagram holds about 200 kB. This is enough for about 1,000 nodes.
DATAGRAM_BYTES_MAX: Final = 160_000
NODES_SENT_MAX: Final = 800
PROCESSES_MAX: Final = 1_024
# Datagrams that are read at a time.
RECEIVED_MAX: Final = 100
# Hints in a datagram to another process; a subject has at most 128 bytes.
_HINTS_SENT_MAX: Final = 100
_QUESTIONS_MAX: Final = 1_000
# The first byte of a datagram: its kind.
_KNOWN, _HINTS, _QUESTION, _ANSWER = b"k", b"h", b"q", b"a"
_ID_BYTES: Final = 8
# A random name: processes in several containers, which share the table, may have the same id.
_NAME: Final = re.compile(r"[0-9a-f]{16}")

log = logging.getLogger("ratekeeper.fleet")

OpenGossip = Callable[..., GossipTransport]


class NodeAgent:
    """One process's part in the gossip of its node. Implements `Hints` and `FleetMonitor`.

    Without `Fleet.gossip` and without a registry it does nothing, and the number of nodes is the
    configured one.
    """

    def __init__(
        self,
        node: Node,
        *,
        name: str = "",
        region: str = "",
        registry: Channel | None = None,
        open_gossip: OpenGossip = GossipTransport,
    ) -> None:
        """`registry` counts the nodes. With gossip and without peers, they find each other there.

        `name` and `region` of this node are shown to operators. The default name is the host name.
        """
        self._region = region
        self.name = name or socket.gethostname()
        self.on_payloads: Callable[[list[ReceivedPayload]], None] | None = None
        self.on_changes: Callable[[list[MemberChange]], None] | None = None
        self.on_question: Callable[[bytes], bytes | None] | None = None
        """Answers the questions of the node's other processes, in the agent's thread."""
        self.on_lead: Callable[[int | None], None] | None = None
        """Called with the node's id in gossip before this process becomes the agent, and with None
        when it stops being the agent, also in a forked child."""
        self.on_turn: Callable[[], None] | None = None
        """Called in each turn of the agent."""
        self._node = node
        self._registry = registry
        self._counting: NodeRegister | None = None
        if registry is not None:
            lasts_ns = round(node.fleet.dead_seconds * NS_PER_SECOND)
            self._counting = NodeRegister(registry, lasts_ns, node.fleet.name)
        self._open_gossip = open_gossip
        self._table = table_path(node.fleet.store)
        self._gossip: GossipTransport | None = None
        self._processes: NodeProcesses | None = None
        self._thread: threading.Thread | None = None
        self._count_thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._rules_version = ""
        # The last state that the agent sent, in a process that is not the agent.
        self._live = 0  # by gossip; 0 without it
        self._registered = 0
        self._known: list[FleetNode] = []
        self._known_at_s = 0.0
        self._is_missing = False  # the agent is silent
        self._retry_at_s = 0.0
        self._heard_all_at_s = 0.0
        self._stats: AllowanceStats | None = None
        self._stats_due_s = 0.0
        self._questions: dict[bytes, _Question] = {}
        after_fork(self.forked)

    # ── Life ───────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Join gossip, if it is configured, or the count of the nodes.

        Raises ConfigError if this process becomes the agent and gossip cannot start.
        """
        has_gossip = self._node.fleet.gossip is not None
        if self._thread is not None or not (has_gossip or self._counting is not None):
            return
        if self._table is not None:
            self._processes = NodeProcesses(self._table)
        try:
            if has_gossip:
                self._lead()
        except ConfigError:
            self._end()
            raise
        except OSError as error:
            self._end()
            raise ConfigError(f"gossip: {error}") from error
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="ratekeeper-agent", daemon=True)
        self._thread.start()
        if has_gossip and self._counting is not None:
            # A call to the authority may block. Gossip, and the processes that ask the agent, must
            # not wait.
            self._count_thread = threading.Thread(
                target=self._run_count,
                args=(self._counting,),
                name="ratekeeper-count",
                daemon=True,
            )
            self._count_thread.start()

    def close(self) -> None:
        """Leave the fleet, or let another process of the node become the agent."""
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            if self._processes is not None:
                self._processes.wake()
            thread.join(timeout=2 * TURN_S + 1)
        thread, self._count_thread = self._count_thread, None
        if thread is not None:
            thread.join(timeout=1)
        self._end()

    def _end(self) -> None:
        gossip, self._gossip = self._gossip, None
        if gossip is not None:
            gossip.stop()
        if self._counting is not None:
            with contextlib.suppress(StoreError):
                self._counting.leave()
        if self.on_lead is not None:
            self.on_lead(None)
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()

    def forked(self) -> None:
        """In a forked child: begin anew. The parent keeps its lock, its sockets and its gossip."""
        was_started = self._thread is not None
        gossip, self._gossip, self._thread = self._gossip, None, None
        self._count_thread = None
        # This process receives no `warm` hints yet, and it has not counted the nodes.
        self._live = self._registered = 0
        if gossip is not None:
            gossip.abandon()
        if self._counting is not None:
            self._counting.forked()
        self._questions = {}
        self._stopping = threading.Event()
        if self.on_lead is not None:
            self.on_lead(None)
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.abandon()
        if not was_started:
            return
        try:
            self.start()
        except (ConfigError, OSError) as error:
            log.warning("gossip: this forked process cannot join: %s", error)

    def _lead(self) -> None:
        """Become the agent if no other process is. Raises ConfigError."""
        if self._gossip is not None:
            return
        if self._processes is not None and not self._processes.lock():
            return
        fleet = self._node.fleet
        gossip = self._open_gossip(
            fleet.gossip,
            key_file=None if fleet.key_file is None else Path(fleet.key_file),
            peers=fleet.peers,
            registry=None if fleet.peers else self._registry,
            advertise=fleet.advertise,
            fleet=fleet.name,
            settings=settings_of(fleet),
            status=self._status(),
            on_hints=self._on_hints,
            on_payloads=self._pass_payloads,
            on_changes=self._pass_changes,
        )
        if self.on_lead is not None:
            self.on_lead(gossip.node)
        gossip.start()
        self._heard_all_at_s = monotonic() + HEARD_ALL_S
        self._gossip = gossip

    def _run(self) -> None:
        """Run turns and read datagrams of other processes until `close`."""
        failing = False
        while not self._stopping.is_set():
            try:
                self._turn()
                failing = False
                self._wait()
            except (ConfigError, StoreError, OSError) as error:
                if not failing:  # logged once, and not twice a second
                    log.warning("fleet: %s", error)
                failing = True
                self._stopping.wait(TURN_S)
            except Exception:
                log.exception("gossip: a defect; the agent goes on")
                self._stopping.wait(TURN_S)

    def _turn(self) -> None:
        """Try to become the agent; the agent announces its status and the live nodes."""
        if self._node.fleet.gossip is None:
            if self._counting is not None:
                self._count(self._counting)
            return
        if self._gossip is None and monotonic() >= self._retry_at_s:
            try:
                self._lead()
            except (ConfigError, OSError):
                self._retry_at_s = monotonic() + RETRY_S
                if self._processes is not None:
                    self._processes.unlock()
                raise
        gossip = self._gossip
        if gossip is None:
            self._miss_agent()
            return
        gossip.set_status(self._status())
        self._hear(gossip)
        if self.on_turn is not None:
            self.on_turn()
        if self._processes is not None:
            self._processes.send_all(_KNOWN + self._encoded_nodes())

    def _miss_agent(self) -> None:
        """Log once that the agent is silent. Its last list of nodes stays in use."""
        silent_s = monotonic() - self._known_at_s
        if self._known and not self._is_missing and silent_s > SILENT_TURNS * TURN_S:
            self._is_missing = True
            log.warning(
                "fleet: the agent of this node has been silent for %.0f s; this process goes on "
                "with the last number of nodes that the agent sent, %d",
                *(silent_s, self._live),
            )

    def _count(self, counting: NodeRegister) -> None:
        """Count the nodes, unless another process of this node counts them."""
        if self._processes is None:
            self._registered = counting.count()
        elif self._processes.lock():
            self._registered = counting.count()
            self._processes.send_all(_KNOWN + self._encoded_nodes())

    def _run_count(self, counting: NodeRegister) -> None:
        """Count the nodes until `close`, while this process gossips."""
        stopping, failing = self._stopping, False
        while not stopping.is_set():
            if self._gossip is not None:
                try:
                    self._registered = counting.count()
                    failing = False
                except StoreError as error:
                    if not failing:  # logged once, and not each second
                        log.warning("fleet: the nodes cannot be counted: %s", error)
                    failing = True
            stopping.wait(TURN_S)

    def _wait(self) -> None:
        """Wait for the next turn; meanwhile read datagrams of other processes."""
        processes = self._processes
        if processes is None:
            self._stopping.wait(TURN_S)
            return
        until_s = monotonic() + TURN_S
        while not self._stopping.is_set() and (left_s := until_s - monotonic()) > 0:
            for data, sender in processes.receive(left_s):
                self._received(data, sender)

    # ── Hints of this node ─────────────────────────────────────────────────────────────────────

    def warm(self, gate: int, subject: str) -> None:
        """Announce to other nodes that a subject is nearly at its limit. Does not block."""
        gossip = self._gossip
        if gossip is not None:
            gossip.warm(gate, subject)
        else:
            self._tell(["warm", gate, subject, 0, 0])

    def denied(self, gate: int, subject: str, cost: int, lasts_ns: int) -> None:
        """Announce to other nodes that checks of at least this cost are denied. Does not block."""
        gossip = self._gossip
        if gossip is not None:
            gossip.denied(gate, subject, cost, lasts_ns)
        else:
            self._tell(["denied", gate, subject, cost, lasts_ns])

    def _tell(self, hint: list[Any]) -> None:
        processes = self._processes
        if processes is not None:
            processes.send_agent(_HINTS + json.dumps([hint]).encode())

    # ── The fleet as this process knows it ─────────────────────────────────────────────────────

    def live_nodes(self) -> int:
        """Return how many nodes are alive, this one included; the configured number if unknown."""
        return self._live or self._registered or self._node.fleet.nodes

    def registered_nodes(self) -> int:
        """Return how many nodes have registered at the authority; 0 until they are counted."""
        return self._registered

    def heard_nodes(self) -> int:
        """Return how many nodes are alive by gossip, this one included; 0 if not known yet."""
        return self._live

    def hears_hints(self) -> bool:
        """Return True if other nodes are alive: they send this one hints about warm subjects."""
        return self._live > 1

    def sharing_nodes(self) -> int:
        """Return how many nodes share a limit: never fewer than configured.

        A node that has just started, or whose gossip is cut off, hears from too few of the others.
        So the nodes that have registered at the authority count, too: the authority granted the
        units that are shared. A node that has not counted them yet assumes many, and takes little.
        """
        registered = self._registered
        if not registered and self._counting is not None:
            registered = NODES_ASSUMED
        return max(self._live, registered, self._node.fleet.nodes)

    def answers(self) -> dict[tuple[str, AllowanceKind], NodeAnswers]:
        """Return how checks were answered, by rule and kind."""
        return self._node.answers()

    def reports(self) -> ReportCounts:
        """Return the counts of this process's reports."""
        return self._node.counters

    def table(self) -> AllowanceStats:
        """Return the statistics of the node's table, at most a second old.

        Reading them takes 0.14 µs for each allowance; it may take STATS_SHARE_MAX of the time.
        """
        now_s = monotonic()
        if self._stats is None or now_s >= self._stats_due_s:
            self._stats = self._node.table.stats()
            taken_s = monotonic() - now_s
            self._stats_due_s = now_s + max(STATS_S, taken_s / STATS_SHARE_MAX)
        return self._stats

    def use_rules(self, version: str) -> None:
        """Set the version of the rules in force; the next turn announces it to other nodes."""
        self._rules_version = version

    def gossip(self) -> GossipCounts | None:
        """Return the counts of gossip; None if this process is not the agent."""
        gossip = self._gossip
        return None if gossip is None else counts_of(gossip.counters(), gossip.lag())

    def nodes(self) -> list[FleetNode]:
        """Return the nodes that this node knows, itself first. Nodes that left are not listed."""
        gossip = self._gossip
        if gossip is not None:
            return self._named(gossip.members())
        if self._known:
            passed_s = monotonic() - self._known_at_s
            return [_aged(each, passed_s) for each in self._known]
        return [self._alone()]

    def _named(self, members: Sequence[Member]) -> list[FleetNode]:
        nodes = [_fleet_node(each) for each in members if each.state != "left"]
        own, others = nodes[:1], nodes[1:]
        return [self._alone(own[0].address if own else ""), *others]

    def _alone(self, address: str = "") -> FleetNode:
        status = self._status()
        return FleetNode(
            *(self.name, address, "alive", status.version, status.rules_version, status.region),
            *(status.leases, status.pending),
            is_self=True,
        )

    def _status(self) -> NodeStatus:
        table = self.table()
        return NodeStatus(
            version=__version__,
            rules_version=self._rules_version[:32],
            leases=table.leased_units,
            pending=table.pending_units,
            region=self._region,
        )

    def _encoded_nodes(self) -> bytes:
        """Return the known nodes for the other processes; fewer if they do not fit a datagram."""
        nodes = self.nodes()[:NODES_SENT_MAX]
        while True:
            listed = [asdict(each) for each in nodes]
            text = json.dumps([self._live, self._registered, listed]).encode()
            if len(text) <= DATAGRAM_BYTES_MAX:
                return text
            nodes = nodes[: len(nodes) // 2]

    # ── Hints of other nodes ───────────────────────────────────────────────────────────────────

    def _on_hints(self, hints: list[Hint]) -> None:
        """Put hints into the table; send hints for limits that this process lacks to the others."""
        others: list[Hint] = []
        for hint in hints:
            if hint.gate in self._node.gates:
                self._node.heard(hint)
            else:
                others.append(hint)
        processes = self._processes
        if others and processes is not None:
            for start in range(0, len(others), _HINTS_SENT_MAX):
                part = others[start : start + _HINTS_SENT_MAX]
                processes.send_all(_HINTS + json.dumps(part).encode())

    def _pass_payloads(self, payloads: list[ReceivedPayload]) -> None:
        if self.on_payloads is not None:
            self.on_payloads(payloads)

    def _pass_changes(self, changes: list[MemberChange]) -> None:
        gossip = self._gossip
        if gossip is not None:
            self._hear(gossip)
        if self.on_changes is not None:
            self.on_changes(changes)

    def _hear(self, gossip: GossipTransport) -> None:
        """Count the live nodes. A new agent does not know all of them at once."""
        live = gossip.live_nodes()
        if monotonic() < self._heard_all_at_s:
            live = max(live, self._live)
        self._live = live

    def publish(self, payload: bytes) -> int | None:
        """See `Gossip.publish`; None if this process is not the agent."""
        gossip = self._gossip
        return None if gossip is None else gossip.publish(payload)

    # ── Questions to the agent ─────────────────────────────────────────────────────────────────

    def ask(self, question: bytes) -> bytes | None:
        """Return the agent's answer; None if there is no agent, or if it does not answer in time.

        Blocks for up to ANSWER_S, or LOOP_ANSWER_S in a thread that runs an event loop, unless this
        process is the agent.
        """
        if self._gossip is not None:
            return None if self.on_question is None else self.on_question(question)
        processes = self._processes
        if processes is None or len(self._questions) >= _QUESTIONS_MAX:
            return None
        number = os.urandom(_ID_BYTES)
        waiting = self._questions[number] = _Question()
        try:
            if not processes.send_agent(_QUESTION + number + question):
                return None
            waiting.answered.wait(LOOP_ANSWER_S if _in_event_loop() else ANSWER_S)
            return waiting.answer
        finally:
            del self._questions[number]

    def _received(self, data: bytes, sender: str) -> None:
        """Handle a datagram of another process. Drop an invalid one."""
        kind, body = data[:1], data[1:]
        if kind == _KNOWN and self._gossip is None:
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                self._know(json.loads(body), sender)
        elif kind == _HINTS:
            for hint in _hints_of(body):
                self._take_hint(hint)
        elif kind == _QUESTION and self._gossip is not None and self.on_question is not None:
            answer = self.on_question(body[_ID_BYTES:])
            if answer is not None and self._processes is not None:
                self._processes.send(sender, _ANSWER + body[:_ID_BYTES] + answer)
        elif kind == _ANSWER:
            waiting = self._questions.get(body[:_ID_BYTES])
            if waiting is not None:
                waiting.answer = body[_ID_BYTES:]
                waiting.answered.set()

    def _know(self, found: Any, sender: str) -> None:
        live, registered, nodes = found
        known = [FleetNode(**each) for each in nodes]
        counted = all(type(each) is int and each >= 0 for each in (live, registered))
        if counted and live + registered and self._processes is not None:
            self._live, self._registered = live, registered
            self._known, self._known_at_s = known, monotonic()
            self._processes.agent = sender
            self._is_missing = False

    def _take_hint(self, hint: Hint) -> None:
        """Pass on a hint: from another process to all nodes, from the agent to the table."""
        gossip = self._gossip
        if gossip is None:
            if hint.gate in self._node.gates:
                self._node.heard(hint)
        elif hint.kind == "warm":
            gossip.warm(hint.gate, hint.subject)
        else:
            gossip.denied(hint.gate, hint.subject, hint.cost, hint.lasts_ns)


class NodeRegister:
    """Counts the nodes of a fleet through the authority, where each registers.

    The authority may lose the list, and after an outage all nodes register again. So the number is
    the largest of the counts within one lifetime of a registration, and of the count before an
    error.
    """

    def __init__(self, registry: Channel, lasts_ns: int, fleet: str = FLEET_NAME) -> None:
        """`fleet` is the name of the fleet: nodes of another one are not counted."""
        self._registry = registry
        self._topic = topic_of(TOPIC, fleet)
        self._lasts_ns = lasts_ns
        self._lasts_s = lasts_ns / NS_PER_SECOND
        self.forked()

    def forked(self) -> None:
        """In a forked child: this is another node now."""
        self._name = os.urandom(8).hex()
        self._found = self._count = 0
        self._due_s = self._kept_until_s = 0.0

    def count(self) -> int:
        """Return the number of nodes; 0 until the second count.

        Renews the registration three times in its lifetime, and each second while the number
        changes. A renewal blocks. Raises StoreError, at most once a second.
        """
        now_s = monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + min(self._lasts_s / 3, 1)
            try:
                found = self._registry.count_names(self._topic, self._name, self._lasts_ns)
            except StoreError:
                self._kept_until_s = now_s + self._lasts_s
                raise
            before, self._found = self._found, found
            if found == before:
                self._due_s = now_s + self._lasts_s / 3
            # Nodes that start together do not see each other in their first count.
            if before and (found >= self._count or now_s >= self._kept_until_s):
                self._count = found
                self._kept_until_s = now_s + self._lasts_s
        return self._count

    def leave(self) -> None:
        """End the registration. Blocks. Raises StoreError."""
        if self._found:
            self._registry.count_names(self._topic, self._name, 0)
            self._found = self._count = 0


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Question:
    """A question that waits for its answer."""

    __slots__ = ("answer", "answered")

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.answer: bytes | None = None


class NodeProcesses:
    """The processes of a node: the lock that one of them holds, and datagrams between them."""

    def __init__(self, table: Path) -> None:
        """Bind the socket of this process. Raises ConfigError."""
        self._folder = table.parent
        self._prefix = f"{table.name}.gossip."
        self._name = os.urandom(SOCKET_NAME_BYTES // 2).hex()
        self._path = self._path_of(self._name)
        self._lock_path = self._folder / f"{self._prefix}lock"
        self._lock_file: int | None = None
        self.agent = ""
        """The path of the agent's socket, once it is known."""
        check_socket_path(table, "the table")
        try:
            self._mode = stat.S_IMODE(table.stat().st_mode) & 0o666
            self._socket = self._bound()
        except OSError as error:
            raise ConfigError(f"gossip: {self._path}: {error.strerror}") from error

    def _path_of(self, name: str) -> Path:
        return self._folder / f"{self._prefix}{name}"

    def _bound(self) -> socket.socket:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            found.setblocking(False)
            os.fchmod(found.fileno(), self._mode)  # bind creates the file with this mode
            found.bind(str(self._path))
            self._path.chmod(self._mode)
        except BaseException:
            found.close()
            raise
        return found

    def lock(self) -> bool:
        """Return True if this process has the lock, which makes it the agent."""
        if self._lock_file is not None:
            return True
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            file = os.open(self._lock_path, flags, self._mode)
        except OSError as error:
            raise ConfigError(f"gossip: {self._lock_path}: {error.strerror}") from error
        if not self._is_trusted(os.fstat(file)):
            os.close(file)
            raise ConfigError(
                f"gossip: {self._lock_path} belongs to another user, who could keep this node from "
                f"gossip; remove it, or share the table with that user by its mode"
            )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return False
        self._lock_file = file
        return True

    def unlock(self) -> None:
        """Let another process become the agent."""
        file, self._lock_file = self._lock_file, None
        if file is not None:
            os.close(file)

    def others(self) -> Iterator[Path]:
        """Return the sockets of the node's other processes; sockets of other users are left out."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            found = (each for each in entries if self._is_other(each))
            yield from (Path(each.path) for each in islice(found, PROCESSES_MAX))

    def _is_other(self, entry: os.DirEntry[str]) -> bool:
        prefix, name = entry.name[: len(self._prefix)], entry.name[len(self._prefix) :]
        if prefix != self._prefix or not _NAME.fullmatch(name) or entry.name == self._path.name:
            return False
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISSOCK(found.st_mode) and self._is_trusted(found)

    def _is_trusted(self, found: os.stat_result) -> bool:
        return found.st_uid == os.geteuid() or bool(self._mode & 0o066)

    def send_all(self, data: bytes) -> None:
        """Send to all other processes; remove the sockets of processes that are gone."""
        for path in self.others():
            self.send(str(path), data)

    def send_agent(self, data: bytes) -> bool:
        """Send to the agent. Returns False if its socket is unknown or its queue is full."""
        return bool(self.agent) and self.send(self.agent, data)

    def send(self, path: str, data: bytes) -> bool:
        """Send a datagram without waiting. Returns False if it was not sent.

        Each datagram is sent from a new socket, and carries this process's name. Datagrams that a
        suspended process does not read fill the buffer of the sending socket: one shared socket
        could then not send to the other processes.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(self._name.encode() + data, path)
        except ConnectionRefusedError:  # the process is gone, or the file is not a socket
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    Path(path).unlink()
            return False
        except OSError:  # the queue is full, or the process has just ended
            return False
        return True

    def receive(self, seconds: float) -> list[tuple[bytes, str]]:
        """Wait for a datagram; return all that have arrived, at most RECEIVED_MAX.

        Each is returned with the path of its sender, which is always a socket beside the table.
        """
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        if not ready.poll(max(round(seconds * 1_000), 1)):
            return []
        found: list[tuple[bytes, str]] = []
        with contextlib.suppress(BlockingIOError):
            for _ in range(RECEIVED_MAX):
                data = self._socket.recv(DATAGRAM_BYTES_MAX + 64)
                name = data[:SOCKET_NAME_BYTES].decode("latin-1")
                if _NAME.fullmatch(name):
                    found.append((data[SOCKET_NAME_BYTES:], str(self._path_of(name))))
        return found

    def wake(self) -> None:
        """Wake `receive`."""
        self.send(str(self._path), b"")

    def close(self) -> None:
        """Remove the socket, and let another process become the agent."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._socket.close()
        self.unlock()

    def abandon(self) -> None:
        """In a forked child: close the copies. The parent keeps the lock and the socket."""
        self._socket.close()
        self.unlock()


def settings_of(fleet: Fleet) -> GossipSettings:
    """Return the timing of gossip: a node that misses three heartbeats is dead."""
    dead_ns = round(fleet.dead_seconds * NS_PER_SECOND)
    return GossipSettings(heartbeat_ns=dead_ns // 3, suspected_ns=dead_ns // 2, dead_ns=dead_ns)


def table_path(store: str) -> Path | None:
    """Return the file of a node's table; None for `memory://`.

    >>> table_path("shared:///run/api.fleet?capacity=50000"), table_path("memory://")
    (PosixPath('/run/api.fleet'), None)
    """
    if not store.startswith("shared://"):
        return None
    return Path(unquote(urlsplit(store).path))


def counts_of(counters: Mapping[str, int], lag: Sequence[int]) -> GossipCounts:
    """Return the counters of gossip in the form of metrics."""
    dropped = {
        name.removeprefix("dropped_"): count
        for name, count in counters.items()
        if name.startswith("dropped_")
    }
    return GossipCounts(
        sent=counters.get("sent", 0),
        received=counters.get("received", 0),
        sent_bytes=counters.get("sent_bytes", 0),
        received_bytes=counters.get("received_bytes", 0),
        dropped=dropped,
        hint_seconds=list(lag) if len(lag) == LENGTH else [0] * LENGTH,
    )


def _fleet_node(member: Member) -> FleetNode:
    status = member.status
    address = joined_address(*member.address)
    return FleetNode(
        name=address,
        address=address,
        state="dead" if member.state == "left" else member.state,
        version=status.version,
        rules_version=status.rules_version,
        region=status.region,
        leased_units=status.leases,
        pending_units=status.pending,
        lag_s=member.age_ns / 1e9,
    )


def _aged(node: FleetNode, passed_s: float) -> FleetNode:
    if node.lag_s is None:
        return node
    return FleetNode(**{**asdict(node), "lag_s": node.lag_s + passed_s})


# A lone surrogate: JSON can contain one, UTF-8 cannot.
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def _hints_of(body: bytes) -> Iterator[Hint]:
    """Return the hints of a datagram without the invalid ones."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return
    for each in found if isinstance(found, list) else ():
        if isinstance(each, list) and len(each) == len(Hint._fields):
            kind, gate, subject, *numbers = each
            if (
                isinstance(kind, str)
                and kind in {"warm", "denied"}
                and isinstance(subject, str)
                and not _SURROGATE.search(subject)
                and all(type(number) is int and number >= 0 for number in (gate, *numbers))
                and gate <= U64_MAX
            ):
                yield Hint(*each)
