"""Gossip over real UDP sockets on this machine."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ConfigError, StoreUnavailable
from ratekeeper.fleet import transport
from ratekeeper.fleet.datagrams import DatagramCodec, Message, NodeStatus
from ratekeeper.fleet.gossip import Hint, MemberChange, ReceivedPayload
from ratekeeper.fleet.transport import GossipTransport
from tests.redis_servers.waiting import until

SECONDS_MAX = 30.0
GATE = 2**63 + 1


class Node:
    """A transport, and what it handed out."""

    def __init__(self, bind: str = "127.0.0.1:0", **options: Any) -> None:
        self.hints: list[Hint] = []
        self.payloads: list[ReceivedPayload] = []
        self.changes: list[MemberChange] = []
        self.transport = GossipTransport(
            bind,
            on_hints=self.hints.extend,
            on_payloads=self.payloads.extend,
            on_changes=self.changes.extend,
            **options,
        )
        self.transport.start()

    @property
    def bound(self) -> str:
        host, port = self.transport.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def dropped(self, reason: str) -> int:
        return self.transport.counters().get(f"dropped_{reason}", 0)


Start = Callable[..., Node]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a node; all are stopped at the end of the test."""
    nodes: list[Node] = []

    def start_one(*args: Any, **options: Any) -> Node:
        nodes.append(Node(*args, **options))
        return nodes[-1]

    yield start_one
    for node in nodes:
        node.transport.stop()
    assert not [each for each in threading.enumerate() if each.name.startswith("ratekeeper-go")]


def know_each_other(nodes: Sequence[Node]) -> None:
    """Wait until all nodes know all."""
    until(
        lambda: all(node.transport.live_nodes() == len(nodes) for node in nodes),
        "all nodes know each other",
        SECONDS_MAX,
    )


def key_file(folder: Path, *keys: str, name: str = "keys") -> Path:
    """Write a key file; replace it as a whole if it exists."""
    new = folder / f"{name}.new"
    new.write_text("\n".join(keys))
    new.chmod(0o600)
    return new.replace(folder / name)


def await_keys(node: Node, expected: tuple[bytes, ...]) -> None:
    """Wait until a node has read its key file again."""
    keys = node.transport._keys
    until(lambda: keys and keys.keys == expected, "the keys are read", SECONDS_MAX)


def test_fleets_of_different_names_do_not_hear_each_other(start: Start) -> None:
    """With one key, and one registry: each fleet registers under its own name."""
    registry = NamedRegistry()
    ours = [start(registry=registry, fleet="ours") for _ in range(2)]
    theirs = start(registry=registry, peers=[ours[0].bound])
    know_each_other(ours)
    until(lambda: ours[0].dropped("fleet"), "a datagram of the other fleet arrives", SECONDS_MAX)
    assert theirs.transport.live_nodes() == 1
    until(lambda: len(registry.topics) == 2, "all have registered", SECONDS_MAX)
    assert {topic: len(names) for topic, names in registry.topics.items()} == {
        "gossip": 1,
        "gossip.ours": 2,
    }


def test_nodes_find_each_other_and_exchange_everything(start: Start, tmp_path: Path) -> None:
    """Hints, payloads and status reach all nodes; a node that stops has left at once."""
    keys = key_file(tmp_path, secrets.token_hex(32))
    first = start(key_file=keys)
    status = NodeStatus("0.1.0", "7", 1, 2, "eu")
    others = [start(key_file=keys, peers=[first.bound], status=status) for _ in range(4)]
    know_each_other([first, *others])
    first.transport.denied(GATE, "user:é", 3, NS_PER_SECOND)
    others[0].transport.warm(GATE, "user:2")
    assert others[1].transport.publish(b"\0payload") == 1
    # Each of the two senders hears of the other's hint only.
    until(
        lambda: [len(each.hints) for each in [first, *others]] == [1, 1, 2, 2, 2],
        "hints arrive",
        SECONDS_MAX,
    )
    (hint,) = first.hints
    assert hint == Hint("warm", GATE, "user:2", 0, 0)
    (denied,) = [each for each in others[3].hints if each.kind == "denied"]
    assert (denied.subject, denied.cost) == ("user:é", 3)
    assert 0 < denied.lasts_ns <= NS_PER_SECOND
    until(
        lambda: others[1].transport._machine.acknowledged() == 1,
        "all have the payload",
        SECONDS_MAX,
    )
    # A node acknowledges a payload before it hands the payload out.
    until(lambda: first.payloads, "the payload is handed out", SECONDS_MAX)
    assert first.payloads == [ReceivedPayload(others[1].transport.node, 1, b"\0payload")]
    assert {each.status for each in first.transport.members()[1:]} == {status}
    assert sum(others[3].transport.lag()[:-1]) == len(others[3].hints)
    gone = others.pop()
    gone.transport.stop()
    know_each_other([first, *others])
    until(
        lambda: MemberChange(gone.transport.node, False, True) in first.changes,
        "it is told",
        SECONDS_MAX,
    )


def test_ipv6(start: Start) -> None:
    """Nodes meet on ::1 as well."""
    try:
        first = start("[::1]:0")
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    know_each_other([first, start("[::1]:0", peers=[first.bound])])


@pytest.mark.parametrize(
    ("bind", "options", "problem"),
    [
        ("0.0.0.0:0", {}, "without a key file"),
        ("192.0.2.1:7946", {}, "without a key file"),
        ("127.0.0.1:0", {"advertise": "10.0.0.7:7946"}, "cannot advertise 10.0.0.7"),
        ("127.0.0.1", {}, "is not HOST:PORT"),
        ("::1:7946", {}, "is not HOST:PORT"),
        ("127.0.0.1:99999", {}, "is not HOST:PORT"),
        ("127.0.0.1:٣", {}, "is not HOST:PORT"),
        ("127.0.0.1:0", {"peers": ["10.0.0.7"]}, "peers: '10.0.0.7' is not"),
        ("node-7.internal:7946", {}, "has a name.*in numbers"),
        ("x" * 200 + ":1", {}, "has a name"),
        ("x" * 300 + ":1", {}, "is not HOST:PORT"),
        ("127.0.0.1:0", {"advertise": "node-7.internal:7946"}, "advertise: .* has a name"),
        ("127.0.0.1:0", {"key_file": Path("missing")}, "missing"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(
    bind: str, options: dict[str, Any], problem: str
) -> None:
    """The reason is named before the node starts."""
    with pytest.raises(ConfigError, match=problem):
        GossipTransport(bind, **options)


def test_an_own_address_is_never_looked_up(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A limiter may be made on an event loop, which must not wait for a name server."""

    def lookup(*_: object, **__: object) -> None:
        raise AssertionError("a name server was asked")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    keys = key_file(tmp_path, "00" * 32)
    node = start("localhost:0", key_file=keys, advertise="localhost:7946")
    assert node.transport.address == ("127.0.0.1", 7946)


def test_an_address_in_use_is_refused(start: Start) -> None:
    """And named."""
    taken = start().bound
    with pytest.raises(ConfigError, match=f"cannot bind '{taken}'"):
        GossipTransport(taken)


def test_with_a_key_every_address_is_allowed(start: Start, tmp_path: Path) -> None:
    """A node on all addresses advertises the one from which it reaches others, or the given one."""
    keys = key_file(tmp_path, "00" * 32)
    node = start("0.0.0.0:0", key_file=keys, advertise="127.0.0.1:7946")
    assert node.transport.address == ("127.0.0.1", 7946)


@pytest.mark.parametrize("theirs", [None, "11" * 32])
def test_a_node_with_another_key_stays_a_stranger(
    start: Start, tmp_path: Path, theirs: str | None
) -> None:
    """Its datagrams are counted as forged and never answered."""
    first = start(key_file=key_file(tmp_path, "00" * 32))
    other_keys = key_file(tmp_path, theirs, name="theirs") if theirs else None
    other = start(key_file=other_keys, peers=[first.bound])
    until(lambda: first.dropped("forged") > 3, "forged datagrams are counted", SECONDS_MAX)
    assert first.transport.live_nodes() == other.transport.live_nodes() == 1
    assert other.transport.counters().get("received", 0) == 0
    assert first.transport.counters().get("sent", 0) == 0


def test_keys_are_replaced_while_the_nodes_run(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old, both, both the other way, new: the nodes stay together, and the old key is worthless."""
    monkeypatch.setattr(transport, "KEYS_NS", NS_PER_SECOND // 100)
    old, new = "00" * 32, "11" * 32
    keys = key_file(tmp_path, old)
    first = start(key_file=keys)
    second = start(key_file=keys, peers=[first.bound])
    know_each_other([first, second])
    for count, lines in enumerate(([old, new], [new, old], [new]), 1):
        key_file(tmp_path, *lines)
        for node in (first, second):
            await_keys(node, tuple(map(bytes.fromhex, lines)))
        second.transport.warm(GATE, f"user:{count}")
        until(lambda count=count: len(first.hints) == count, "a hint arrives", SECONDS_MAX)
    stranger = start(key_file=key_file(tmp_path, old, name="old"), peers=[first.bound])
    until(lambda: first.dropped("forged") > 0, "the old key is refused", SECONDS_MAX)
    assert stranger.transport.live_nodes() == 1


def test_rubbish_is_counted_and_never_answered(start: Start) -> None:
    """Truncated, oversized, forged, of another version or fleet: dropped by reason."""
    node = start()
    good = DatagramCodec("ratekeeper").seal(Message(5, 5))
    other_fleet = DatagramCodec("other").seal(Message(5, 5))
    sent = {
        "truncated": b"x",
        "oversized": b"\x01" * 3_000,
        "version": b"\x09" + good[1:],
        "fleet": other_fleet,
        "forged": good[:-1] + b"x",
        "malformed": DatagramCodec("ratekeeper").seal(Message(0, 5)),
        "stranger": good,
    }
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as attacker:
        attacker.bind(("127.0.0.1", 0))
        attacker.sendto(b"", node.transport.address)
        for datagram in sent.values():
            attacker.sendto(datagram, node.transport.address)
        for reason in sent:
            until(lambda reason=reason: node.dropped(reason), f"{reason} is counted", SECONDS_MAX)
        attacker.setblocking(False)
        with pytest.raises(BlockingIOError):
            attacker.recv(1)
    assert node.dropped("error") == 0


def test_a_failing_callback_does_not_end_gossip(start: Start) -> None:
    """The error is logged, and the next hint arrives."""
    first, second = start(), start()
    third = start(peers=[first.bound, second.bound])
    know_each_other([first, second, third])
    first.hints = None  # type: ignore[assignment]  # the callback below fails
    first.transport._callbacks = (lambda hints: hints.missing(), None, None)  # type: ignore[attr-defined]  # it fails
    third.transport.warm(GATE, "user:1")
    until(lambda: first.dropped("error"), "the callback fails", SECONDS_MAX)
    found: list[Hint] = []
    first.transport._callbacks = found.extend, None, None
    third.transport.warm(GATE, "user:2")
    until(lambda: found, "the next hint arrives", SECONDS_MAX)


def test_a_failing_callback_takes_nothing_from_the_others(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Changes that cannot be taken do not lose hints; the first of many errors is logged."""
    first, second = start(), start()
    found: list[Hint] = []

    def fail(_: object) -> None:
        raise ConfigError("too many members")

    first.transport._callbacks = found.extend, fail, fail
    third = start(peers=[first.bound, second.bound])
    until(
        lambda: [each.transport.live_nodes() for each in (first, third)] == [3, 3],
        "the nodes know each other",
        SECONDS_MAX,
    )
    third.transport.publish(b"x")
    until(lambda: first.dropped("error") > 1, "both callbacks fail", SECONDS_MAX)
    third.transport.warm(GATE, "user:1")
    until(lambda: found, "the hint arrives", SECONDS_MAX)
    assert [each.getMessage() for each in caplog.records].count(ERROR) == 1


ERROR = "gossip: an error in the gossip thread; further ones are only counted"


def test_a_name_is_resolved_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that fails first and then has several addresses leads to all of them."""
    monkeypatch.setattr(transport, "EAGER_DISCOVERY_S", 0.02)
    first, second = start(), start()
    answers: list[list[tuple[str, int]]] = []

    def resolved(host: str, port: int) -> list[tuple[str, int]]:
        if host != "fleet.internal":
            return [(host, port)]
        if not answers:
            raise OSError(2, "unknown name")
        return answers[-1]

    monkeypatch.setattr(transport, "_resolved", resolved)
    third = start(peers=["fleet.internal:7946"])
    until(
        lambda: "fleet.internal: unknown name" in third.transport.discovery_error(),
        "the error is shown",
        SECONDS_MAX,
    )
    answers.append([first.transport.address, second.transport.address, third.transport.address])
    know_each_other([first, second, third])
    until(lambda: not third.transport.discovery_error(), "the error is gone", SECONDS_MAX)


class NamedRegistry:
    """A registry in memory, with several topics."""

    def __init__(self) -> None:
        self.topics: dict[str, dict[str, str]] = {}

    def register(
        self, topic: str, name: str, text: str, lasts_ns: int, at_most: int = 1_000
    ) -> list[str]:
        names = self.topics.setdefault(topic, {})
        names[name] = text
        return list(names.values())

    def unregister(self, topic: str, name: str) -> None:
        self.topics[topic].pop(name, None)


class FakeRegistry:
    """The registry of a store, in memory."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {"rubbish": "not an address", "name": "some.host:1"}
        self.error: Exception | None = None

    def register(
        self, topic: str, name: str, text: str, lasts_ns: int, at_most: int = 1_000
    ) -> list[str]:
        assert topic == "gossip"
        assert at_most == 20
        assert lasts_ns == 30 * NS_PER_SECOND
        if self.error is not None:
            raise self.error
        self.texts[name] = text
        return list(self.texts.values())

    def unregister(self, topic: str, name: str) -> None:
        del self.texts[name]


def test_nodes_find_each_other_through_the_authority(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writes its address there; a node that stops removes it; an outage is only reported."""
    monkeypatch.setattr(transport, "EAGER_DISCOVERY_S", 0.02)
    monkeypatch.setattr(transport, "DISCOVERY_S", 0.02)
    registry = FakeRegistry()
    nodes = [start(registry=registry) for _ in range(3)]
    know_each_other(nodes)
    assert {node.bound for node in nodes} < set(registry.texts.values())
    registry.error = StoreUnavailable("the authority is away")
    until(
        lambda: nodes[0].transport.discovery_error() == "the authority is away",
        "the outage is shown",
        SECONDS_MAX,
    )
    registry.error = ValueError("rubbish")
    until(
        lambda: nodes[0].transport.discovery_error() == "ValueError: rubbish",
        "an error of any kind is shown, and does not end the thread",
        SECONDS_MAX,
    )
    assert nodes[0].transport.live_nodes() == 3
    nodes.pop().transport.stop()
    assert len(registry.texts) == 4


def test_a_transport_that_was_never_started_can_be_stopped() -> None:
    """Its socket is closed."""
    made = GossipTransport("127.0.0.1:0")
    made.stop()
    GossipTransport("{}:{}".format(*made.address)).stop()
