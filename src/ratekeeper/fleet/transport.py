"""Gossip over UDP: one thread and one socket around the state machine.

The thread waits for datagrams and for the machine's next tick. It never blocks elsewhere: a second
thread resolves names and asks the authority. It is started only if it is needed.

**Discovery.** Peers come from a list of addresses, from names that resolve to one or many addresses
(a headless service of Kubernetes), or from the authority: with `registry`, each node writes its
address there, with an expiry, and reads the addresses of some others. Names and the registry are
read again every few seconds, so that nodes find each other even after a partition in which all of
them were replaced.

**Security.** Without keys, the socket is bound to a loopback address, and every other address is
rejected. See `fleet/datagrams.py` and `fleet/gossip.py` for the rest.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from random import SystemRandom
from typing import Final, TypeVar

from ratekeeper.core.clock import NS_PER_SECOND, boot_ns
from ratekeeper.core.errors import ConfigError, StoreError, show
from ratekeeper.decide.store import Channel
from ratekeeper.fleet.datagrams import (
    DATAGRAM_BYTES_MAX,
    Address,
    DatagramCodec,
    KeyFile,
    Message,
    NodeStatus,
)
from ratekeeper.fleet.gossip import (
    Gossip,
    GossipSettings,
    Hint,
    Member,
    MemberChange,
    Outgoing,
    ReceivedPayload,
)
from ratekeeper.fleet.settings import FLEET_NAME, joined_address, split_address, topic_of

T = TypeVar("T")

# The topic of the registry.
TOPIC: Final = "gossip"
REGISTERED_NS: Final = 30 * NS_PER_SECOND
# Of many registered names, a random part is read each time: gossip finds the rest.
REGISTERED_READ_MAX: Final = 20
DISCOVERY_S: Final = 10.0
# The interval while no other node is known.
EAGER_DISCOVERY_S: Final = 1.0
KEYS_NS: Final = NS_PER_SECOND
STOP_S_MAX: Final = 3.0
# Unexpected errors, also of callbacks, are all counted and logged once in this time.
ERROR_LOG_NS: Final = 60 * NS_PER_SECOND
# Datagrams that are read before the machine ticks again.
BATCH_MAX: Final = 200
RECEIVE_BUFFER_BYTES: Final = 1 << 20
_FOREVER_NS: Final = 2**63

log = logging.getLogger("ratekeeper.fleet")


class GossipTransport:
    """Runs gossip in a thread. All methods may be called from any thread, and none blocks.

    `bind` is "host:port"; the host must be a loopback address unless there is a `key_file`.
    `advertise` is the address that other nodes send to, if it differs from `bind`. `peers` are
    addresses "host:port"; a name that resolves to several addresses stands for all of them.
    `registry` is the channel of the authority's store. Only nodes with the same `fleet` hear each
    other. The callbacks run in the gossip thread and must not block.
    """

    def __init__(
        self,
        bind: str,
        *,
        key_file: Path | None = None,
        peers: Sequence[str] = (),
        registry: Channel | None = None,
        advertise: str | None = None,
        fleet: str = FLEET_NAME,
        settings: GossipSettings | None = None,
        status: NodeStatus | None = None,
        on_hints: Callable[[list[Hint]], None] | None = None,
        on_payloads: Callable[[list[ReceivedPayload]], None] | None = None,
        on_changes: Callable[[list[MemberChange]], None] | None = None,
    ) -> None:
        """Bind the socket. Raises ConfigError if it cannot, or if the settings are wrong."""
        self._keys = None if key_file is None else KeyFile(key_file)
        self._keys_ns = 0
        self._codec = DatagramCodec(fleet, self._keys.keys if self._keys else ())
        self._callbacks = on_hints, on_payloads, on_changes
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._drops: Counter[str] = Counter()
        self._error_log_ns = 0
        self._registry = registry
        self._topic = topic_of(TOPIC, fleet)
        self._discovery_error = ""
        self._peers = [split_address("peers", peer) for peer in peers]
        self._socket = _bound(bind, keyed=self._keys is not None)
        try:
            self.address: Address = self._advertised(advertise)
            self._wake_reader, self._wake_writer = socket.socketpair()
        except BaseException:
            self._socket.close()
            raise
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._machine = Gossip(self.address, SystemRandom(), boot_ns(), settings, status)
        self._waits_until_ns = 0
        # Numeric peers need no name server, so the first message leaves at once.
        self._machine.join(each for each in self._peers if _is_numeric(each[0]))

    @property
    def node(self) -> int:
        """This node's id, chosen at random."""
        return self._machine.node

    def start(self) -> None:
        """Start the thread."""
        self._run_in_thread("gossip", self._run)
        if self._registry is not None or not all(_is_numeric(host) for host, _ in self._peers):
            self._run_in_thread("discovery", self._discover)

    def stop(self) -> None:
        """Announce to the other nodes that this one leaves, and end the thread."""
        self._stopping.set()
        self._wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(STOP_S_MAX)
        if not self._threads:
            self._close()

    def abandon(self) -> None:
        """In a forked child: close the copies of the sockets. The parent goes on as before.

        Otherwise the child would hold the port when the parent has ended.
        """
        self._close()

    # ── Calls of the machine ───────────────────────────────────────────────────────────────────

    def set_status(self, status: NodeStatus) -> None:
        """See `Gossip.set_status`."""
        with self._lock:
            self._machine.set_status(status)

    def warm(self, gate: int, subject: str) -> None:
        """See `Gossip.warm`."""
        with self._lock:
            self._machine.warm(gate, subject, boot_ns())
        self._wake_if_due()

    def denied(self, gate: int, subject: str, cost: int, lasts_ns: int) -> None:
        """See `Gossip.denied`."""
        with self._lock:
            self._machine.denied(gate, subject, cost, lasts_ns, boot_ns())
        self._wake_if_due()

    def publish(self, payload: bytes) -> int | None:
        """See `Gossip.publish`."""
        with self._lock:
            sequence = self._machine.publish(payload, boot_ns())
        self._wake_if_due()
        return sequence

    def live_nodes(self) -> int:
        """See `Gossip.live_nodes`."""
        return self._machine.live_nodes()

    def members(self) -> list[Member]:
        """See `Gossip.members`."""
        with self._lock:
            return self._machine.members(boot_ns())

    def counters(self) -> dict[str, int]:
        """See `Gossip.counters`. Includes datagrams that could not be read or sent, by reason."""
        with self._lock:
            return {**self._machine.counters(), **self._drops}

    def lag(self) -> list[int]:
        """See `Gossip.lag`."""
        return self._machine.lag()

    def discovery_error(self) -> str:
        """Return why names or the registry cannot be read now; empty if they can."""
        return self._discovery_error

    # ── The thread ─────────────────────────────────────────────────────────────────────────────

    def _run_in_thread(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"ratekeeper-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # full: the thread will wake; closed: it has ended
            self._wake_writer.send(b"\0")

    def _wake_if_due(self) -> None:
        """Wake the thread if it would sleep for too long."""
        if self._machine.due_ns < self._waits_until_ns:
            self._wake()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while not self._stopping.is_set():
                try:
                    self._step(selector)
                except Exception:  # a defect: gossip goes on
                    self._failed()
                    self._stopping.wait(0.1)
        with self._lock:
            outgoing = self._machine.leave(boot_ns())
        self._send(outgoing)
        self._close()

    def _step(self, selector: selectors.BaseSelector) -> None:
        """Wait for datagrams or the next tick, and handle them."""
        # First "forever": a call that comes before the next line is done must wake the thread.
        self._waits_until_ns = _FOREVER_NS
        self._waits_until_ns = due_ns = self._machine.due_ns
        ready = selector.select(max(due_ns - boot_ns(), 0) / NS_PER_SECOND)
        self._waits_until_ns = 0
        for key, _ in ready:
            if key.fileobj is self._wake_reader:
                with suppress(BlockingIOError):
                    self._wake_reader.recv(4_096)
            else:
                self._receive()
        now_ns = boot_ns()
        if now_ns >= self._machine.due_ns:
            with self._lock:
                outgoing = self._machine.tick(now_ns)
            self._send(outgoing)
        if self._keys is not None and now_ns >= self._keys_ns:
            self._keys_ns = now_ns + KEYS_NS
            if self._keys.changed():
                self._codec.use_keys(self._keys.keys)
        self._hand_out()

    def _receive(self) -> None:
        for _ in range(BATCH_MAX):
            try:
                datagram, source = self._socket.recvfrom(DATAGRAM_BYTES_MAX + 1)
            except BlockingIOError:
                return
            except OSError:  # an earlier datagram of ours could not be delivered
                continue
            message = self._codec.open(datagram)
            if isinstance(message, str):
                self._drops[f"dropped_{message}"] += 1
                continue
            with self._lock:
                outgoing = self._machine.receive(message, source[:2], boot_ns())
            self._send(outgoing)

    def _send(self, outgoing: Iterable[Outgoing]) -> None:
        sealed: Message | None = None
        datagram = b""
        for address, message in outgoing:
            # The same message often goes to several nodes.
            if message is not sealed:
                sealed, datagram = message, self._codec.seal(message)
            try:
                self._socket.sendto(datagram, address)
            except OSError:  # the buffer is full, or there is no route: rounds repair it
                self._drops["dropped_unsent"] += 1

    def _hand_out(self) -> None:
        on_hints, on_payloads, on_changes = self._callbacks
        with self._lock:
            hints = self._machine.take_hints()
            payloads = self._machine.take_payloads()
            changes = self._machine.take_changes()
        # Changes first: a payload may come from a node that is new.
        self._call(on_changes, changes)
        self._call(on_hints, hints)
        self._call(on_payloads, payloads)

    def _call(self, callback: Callable[[list[T]], None] | None, found: list[T]) -> None:
        """Call a callback. If it fails, the other callbacks are still called."""
        if found and callback is not None:
            try:
                callback(found)
            except Exception:
                self._failed()

    def _failed(self) -> None:
        """Count the current exception, and log it unless one was logged lately."""
        self._drops["dropped_error"] += 1
        now_ns = boot_ns()
        if now_ns >= self._error_log_ns:
            self._error_log_ns = now_ns + ERROR_LOG_NS
            log.exception("gossip: an error in the gossip thread; further ones are only counted")

    def _close(self) -> None:
        for each in (self._socket, self._wake_reader, self._wake_writer):
            each.close()

    # ── Discovery ──────────────────────────────────────────────────────────────────────────────

    def _discover(self) -> None:
        while True:
            try:
                error = self._discover_once()
            except Exception as failure:  # a defect, or invalid data in the registry: go on
                error = f"{type(failure).__name__}: {failure}"
            if error != self._discovery_error:
                self._discovery_error = error
                if error:
                    log.warning("gossip: cannot look for other nodes: %s", error)
                else:
                    log.info("gossip: looking for other nodes works again")
            alone = self.live_nodes() == 1
            if self._stopping.wait(EAGER_DISCOVERY_S if alone else DISCOVERY_S):
                break
        if self._registry is not None:
            with suppress(StoreError):
                self._registry.unregister(self._topic, f"{self.node:016x}")

    def _discover_once(self) -> str:
        """Look for other nodes; return the error, or an empty text."""
        found: list[Address] = []
        errors = []
        for host, port in self._peers:
            try:
                found += _resolved(host, port)
            except OSError as error:
                errors.append(f"{host}: {error.strerror or error}")
        if self._registry is not None:
            try:
                found += self._registered(self._registry)
            except StoreError as error:
                errors.append(str(error))
        with self._lock:
            # Known addresses stay known if a name or the authority fails.
            self._machine.join(found if not errors else [*found, *self._machine.seeds])
        return "; ".join(errors)

    def _registered(self, registry: Channel) -> list[Address]:
        own = joined_address(*self.address)
        name = f"{self.node:016x}"
        texts = registry.register(self._topic, name, own, REGISTERED_NS, REGISTERED_READ_MAX)
        found = []
        for text in texts:
            # Other programs can write to the authority: skip values that are not addresses.
            with suppress(ConfigError):
                host, port = split_address("registry", text)
                if _is_numeric(host):
                    found.append((host, port))
        return found

    def _advertised(self, advertise: str | None) -> Address:
        host, port = self._socket.getsockname()[:2]
        if advertise is not None:
            host, port = own_address(advertise, "advertise")
        elif ip_address(host).is_unspecified:
            host = _outgoing_host(self._socket.family)
        if self._keys is None and not ip_address(host).is_loopback:
            raise ConfigError(
                f"gossip cannot advertise {host} without a key file, as any machine could send "
                f"forged hints; {_KEY_ADVICE}"
            )
        return host, port


_KEY_ADVICE: Final = (
    "give a key file (`(umask 077; openssl rand -hex 32 > gossip.key)`), "
    'or use a loopback address such as "127.0.0.1:7946"'
)


def _is_numeric(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def own_address(text: str, what: str) -> Address:
    """Return an address of this machine, without asking a name server. Raises ConfigError."""
    host, port = split_address(what, text)
    if host == "localhost":
        return "127.0.0.1", port
    if not _is_numeric(host):
        raise ConfigError(
            f"{what}: {show(text)} has a name, which a name server may take long to resolve; give "
            f'an address of this machine in numbers, for example "10.0.0.7:{port}"'
        )
    return host, port


def _resolved(host: str, port: int) -> list[Address]:
    """Return all addresses of a name. Blocks. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except UnicodeError as error:
        raise OSError(f"{show(host)} is not a host name") from error
    return list(dict.fromkeys((str(each[4][0]), int(each[4][1])) for each in found))


def _bound(bind: str, *, keyed: bool) -> socket.socket:
    """Return a socket at the address. Raises ConfigError."""
    host, port = own_address(bind, "gossip")
    if not keyed and not ip_address(host).is_loopback:
        raise ConfigError(
            f"gossip on {show(bind)} without a key file is open to every machine that can reach "
            f"it, which could send forged hints; {_KEY_ADVICE}"
        )
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        made.setblocking(False)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        with suppress(OSError):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise ConfigError(
            f"gossip cannot bind {show(bind)}: {error.strerror or error}; "
            f"give an address of this machine with a free UDP port"
        ) from error
    return made


def _outgoing_host(family: int) -> str:
    """Return the address from which this machine reaches others. No packet is sent."""
    # Addresses for documentation: the default route leads there.
    target = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probing:
        try:
            probing.connect((target, 9))
        except OSError as error:
            raise ConfigError(
                f"this machine has no route to others ({error.strerror}), so gossip does not know "
                f"the address to tell them; bind to one address instead of all"
            ) from error
        return str(probing.getsockname()[0])
