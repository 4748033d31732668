"""Gossip on the wire: messages between nodes, and their form as datagrams.

A datagram is at most 1,200 bytes, so that it fits one packet on every path:

    version 1 | fleet 4 | sender 8 | sequence 8 | the message | tag 16

`fleet` is a hash of the fleet's name. The tag is a keyed BLAKE2b of all that precedes it. A reader
checks the length, the version, the fleet and the tag, in this order, and only then looks at the
message. Numbers are big-endian. A datagram that is not exactly as its sender wrote it is dropped
with a reason, and is never answered. A peer of another version is dropped, too: while a fleet is
upgraded to another version of the protocol, old and new nodes form two fleets.

**Keys.** The key file has one key on each line, in hexadecimal. The first signs, and all verify. To
replace a key: append the new one on every node, then move it to the front on every node, then
remove the old one. Nodes read the file again when it has changed. Without a key file, the tag only
detects damage, and the transport only accepts loopback addresses.

**Replays.** The tag of a datagram is also valid on a copy that an attacker recorded. The sequence
detects the copy: it is the sender's uptime in microseconds, made strictly increasing. `Gossip`
keeps a window of sequences for each sender, and describes how it treats unknown senders.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import stat
import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import Final, Literal, NamedTuple

from ratekeeper.core.errors import ConfigError, show
from ratekeeper.decide.allowances import SUBJECT_BYTES_MAX

# A numeric host and a port, as sockets use them: ("10.0.0.7", 7946) or ("2001:db8::7", 7946).
Address = tuple[str, int]

HintKind = Literal["warm", "denied"]
# Why a datagram was dropped before its message was looked at.
DatagramFault = Literal["truncated", "oversized", "version", "fleet", "forged", "malformed"]

VERSION: Final = 2
DATAGRAM_BYTES_MAX: Final = 1_200
# The headers of IPv4 and UDP, which each datagram has in addition.
PACKET_BYTES: Final = 28
TEXT_BYTES_MAX: Final = 32
DIGEST_PARTS: Final = 16
ENTRIES_MAX: Final = 255
# The longest payload of `Gossip.publish`.
PAYLOAD_BYTES_MAX: Final = 1_000
# The most peers that a node remembers.
MEMBERS_MAX: Final = 1_000
KEYS_MAX: Final = 16
KEY_FILE_BYTES_MAX: Final = 16_384
U16_MAX: Final = 2**16 - 1
U32_MAX: Final = 2**32 - 1
U64_MAX: Final = 2**64 - 1
TAG_BYTES: Final = 16

_HEADER: Final = struct.Struct("!B4sQQ")
# Flags, then the number of members, hints, payloads and acknowledgements.
_CONTENTS: Final = struct.Struct("!BBBBB")
_PROOF: Final = struct.Struct("!QQ")
_DIGEST: Final = struct.Struct(f"!{DIGEST_PARTS}H")
_MEMBER: Final = struct.Struct("!QQHBIIB")
_HINT: Final = struct.Struct("!IBQIB")
_ORIGIN: Final = struct.Struct("!Q")
_DENIAL: Final = struct.Struct("!II")
_PAYLOAD: Final = struct.Struct("!QIIH")
_ACK: Final = struct.Struct("!QIQ")

_HAS_DIGEST, _WANTS_REPLY, _HAS_PROOF = 1, 2, 4
_HAS_LEFT: Final = 1
_IS_DENIED, _IS_FORWARDED, _HAS_ORIGIN = 1, 2, 4

log = logging.getLogger("ratekeeper.fleet")


class NodeStatus(NamedTuple):
    """A node's status, which its heartbeats carry."""

    version: str = ""
    """The version of Ratekeeper. Texts are cut after TEXT_BYTES_MAX bytes."""
    rules_version: str = ""
    leases: int = 0
    """Units of leases that the node has not spent."""
    pending: int = 0
    """Units that the node has admitted and not reported."""
    region: str = ""


class MemberEntry(NamedTuple):
    """A node's last heartbeat."""

    node: int
    address: Address
    beat: int
    """The node's sequence at that heartbeat: its uptime in microseconds."""
    age_ms: int
    left: bool
    status: NodeStatus

    @property
    def size(self) -> int:
        """The bytes that it takes in a datagram."""
        return _member_size(self.address[0], self.status)


@lru_cache(maxsize=4_096)
def _member_size(host: str, status: NodeStatus) -> int:
    texts = status.version, status.rules_version, status.region
    address = 18 if ":" in host else 6
    return _MEMBER.size + address + sum(1 + len(text.encode()) for text in texts)


class HintEntry(NamedTuple):
    """A hint of one node, numbered by it."""

    origin: int
    number: int
    kind: HintKind
    forwarded: bool
    """True if a node that receives this hint for the first time relays it at once: see `Gossip`."""
    gate: int
    subject: str
    cost: int
    age_us: int
    lasts_us: int

    def size(self, sender: int) -> int:
        """Return the bytes that it takes in a datagram of this sender."""
        origin = 0 if self.origin == sender else _ORIGIN.size
        denial = _DENIAL.size if self.kind == "denied" else 0
        return _HINT.size + origin + denial + len(self.subject.encode())


class PayloadEntry(NamedTuple):
    """A payload for one recipient."""

    recipient: int
    sequence: int
    first: int
    """The sequence of the first payload that this recipient needs."""
    payload: bytes

    @property
    def size(self) -> int:
        """The bytes that it takes in a datagram."""
        return _PAYLOAD.size + len(self.payload)


class AckEntry(NamedTuple):
    """The payloads of one publisher that the sender has received."""

    publisher: int
    upto: int
    """All payloads up to this sequence."""
    beyond: int
    """And the payloads whose bit is set: the lowest bit is `upto` + 1."""


class Message(NamedTuple):
    """A message from one node to another. All parts are optional."""

    sender: int
    sequence: int
    nonce: int = 0
    """The sender's nonce: a node that the sender does not know yet has to echo it."""
    echo: int = 0
    """The recipient's nonce: it proves that the message is newer than the nonce."""
    digest: tuple[int, ...] = ()
    """A hash of the live nodes in each of DIGEST_PARTS parts; empty for none."""
    wants_reply: bool = False
    members: tuple[MemberEntry, ...] = ()
    hints: tuple[HintEntry, ...] = ()
    payloads: tuple[PayloadEntry, ...] = ()
    acks: tuple[AckEntry, ...] = ()


# A message without any part.
MESSAGE_BYTES_MIN: Final = _HEADER.size + _CONTENTS.size + TAG_BYTES
PROOF_BYTES: Final = _PROOF.size
DIGEST_BYTES: Final = _DIGEST.size
ACK_BYTES: Final = _ACK.size


def message_size(message: Message) -> int:
    """Return the length of the message's datagram."""
    return (
        MESSAGE_BYTES_MIN
        + (PROOF_BYTES if message.nonce or message.echo else 0)
        + (DIGEST_BYTES if message.digest else 0)
        + sum(each.size for each in message.members)
        + sum(each.size(message.sender) for each in message.hints)
        + sum(each.size for each in message.payloads)
        + ACK_BYTES * len(message.acks)
    )


def cut_text(text: str) -> str:
    """Return a text of at most TEXT_BYTES_MAX bytes.

    >>> len(cut_text("é" * 20).encode())
    32
    """
    return text.encode("utf-8", "replace")[:TEXT_BYTES_MAX].decode("utf-8", "ignore")


@lru_cache(maxsize=4_096)
def _packed_address(address: Address) -> bytes:
    host, port = address
    return inet_pton(AF_INET6 if ":" in host else AF_INET, host) + port.to_bytes(2)


@lru_cache(maxsize=4_096)
def _unpacked_address(packed: bytes) -> Address:
    host = packed[:-2]
    port = int.from_bytes(packed[-2:])
    if not port:
        raise ValueError("port")
    return inet_ntop(AF_INET6 if len(host) == 16 else AF_INET, host), port


def encode_message(message: Message) -> bytes:
    """Return a message without the fleet and the tag."""
    flags = (
        (_HAS_DIGEST if message.digest else 0)
        | (_WANTS_REPLY if message.wants_reply else 0)
        | (_HAS_PROOF if message.nonce or message.echo else 0)
    )
    parts = message.members, message.hints, message.payloads, message.acks
    written = [_CONTENTS.pack(flags, *map(len, parts))]
    if flags & _HAS_PROOF:
        written.append(_PROOF.pack(message.nonce, message.echo))
    if message.digest:
        written.append(_DIGEST.pack(*message.digest))
    for member in message.members:
        _write_member(written, member)
    for hint in message.hints:
        _write_hint(written, hint, message.sender)
    for entry in message.payloads:
        length = len(entry.payload)
        written.append(_PAYLOAD.pack(entry.recipient, entry.sequence, entry.first, length))
        written.append(entry.payload)
    written += [_ACK.pack(*ack) for ack in message.acks]
    return b"".join(written)


def _write_hint(written: list[bytes], hint: HintEntry, sender: int) -> None:
    subject = hint.subject.encode()
    flags = _IS_FORWARDED if hint.forwarded else 0
    optional = []
    if hint.origin != sender:
        flags |= _HAS_ORIGIN
        optional.append(_ORIGIN.pack(hint.origin))
    if hint.kind == "denied":
        flags |= _IS_DENIED
        optional.append(_DENIAL.pack(hint.lasts_us, hint.cost))
    written.append(_HINT.pack(hint.number, flags, hint.gate, hint.age_us, len(subject)))
    written += *optional, subject


def _write_member(written: list[bytes], member: MemberEntry) -> None:
    status = member.status
    address = _packed_address(member.address)
    flags = _HAS_LEFT if member.left else 0
    numbers = member.age_ms, flags, min(status.leases, U32_MAX), min(status.pending, U32_MAX)
    written += _MEMBER.pack(member.node, member.beat, *numbers, len(address)), address
    for text in (status.version, status.rules_version, status.region):
        encoded = text.encode()
        written += bytes((len(encoded),)), encoded


class _Reader:
    """Reads the parts of a message in order. Raises ValueError or struct.error."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        found = form.unpack_from(self._data, self._at)
        self._at += form.size
        return found

    def take(self, length: int) -> bytes:
        end = self._at + length
        if end > len(self._data):
            raise ValueError("length")
        found = self._data[self._at : end]
        self._at = end
        return found

    def text(self, bytes_max: int, length: int | None = None) -> str:
        if length is None:
            length = self.take(1)[0]
        if length > bytes_max:
            raise ValueError("text")
        return self.take(length).decode()

    def member(self) -> MemberEntry:
        node, beat, age_ms, flags, leases, pending, length = self.unpack(_MEMBER)
        if length not in {6, 18} or flags > _HAS_LEFT or not node:
            raise ValueError("member")
        address = _unpacked_address(self.take(length))
        version, rules_version, region = [self.text(TEXT_BYTES_MAX) for _ in range(3)]
        status = NodeStatus(version, rules_version, leases, pending, region)
        return MemberEntry(node, address, beat, age_ms, bool(flags), status)

    def hint(self, sender: int) -> HintEntry:
        number, flags, gate, age_us, length = self.unpack(_HINT)
        if flags > _IS_DENIED | _IS_FORWARDED | _HAS_ORIGIN:
            raise ValueError("hint")
        (origin,) = self.unpack(_ORIGIN) if flags & _HAS_ORIGIN else (sender,)
        lasts_us, cost = self.unpack(_DENIAL) if flags & _IS_DENIED else (0, 0)
        # There is one way to write a hint.
        if not origin or (flags & _HAS_ORIGIN and origin == sender):
            raise ValueError("origin")
        kind: HintKind = "denied" if flags & _IS_DENIED else "warm"
        subject = self.text(SUBJECT_BYTES_MAX, length)
        forwarded = bool(flags & _IS_FORWARDED)
        return HintEntry(origin, number, kind, forwarded, gate, subject, cost, age_us, lasts_us)

    def payload(self) -> PayloadEntry:
        recipient, sequence, first, length = self.unpack(_PAYLOAD)
        return PayloadEntry(recipient, sequence, first, self.take(length))

    def ack(self) -> AckEntry:
        return AckEntry(*self.unpack(_ACK))

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("trailing bytes")


def decode_message(sender: int, sequence: int, data: bytes) -> Message | None:
    """Return the message; None if the data is invalid."""
    reader = _Reader(data)
    try:
        flags, *lengths = reader.unpack(_CONTENTS)
        if flags > _HAS_DIGEST | _WANTS_REPLY | _HAS_PROOF or not sender:
            return None
        members, hints, payloads, acks = lengths
        nonce, echo = reader.unpack(_PROOF) if flags & _HAS_PROOF else (0, 0)
        message = Message(
            sender,
            sequence,
            nonce,
            echo,
            digest=reader.unpack(_DIGEST) if flags & _HAS_DIGEST else (),
            wants_reply=bool(flags & _WANTS_REPLY),
            members=tuple([reader.member() for _ in range(members)]),
            hints=tuple([reader.hint(sender) for _ in range(hints)]),
            payloads=tuple([reader.payload() for _ in range(payloads)]),
            acks=tuple([reader.ack() for _ in range(acks)]),
        )
        reader.end()
    except (ValueError, struct.error):
        return None
    return message


class DatagramCodec:
    """Encodes and signs the messages of one fleet, and verifies and decodes datagrams."""

    def __init__(self, fleet: str, keys: Sequence[bytes] = ()) -> None:
        """Without keys, the tag proves nothing about the sender."""
        self._fleet = blake2b(fleet.encode(), digest_size=4).digest()
        self.use_keys(keys)

    def use_keys(self, keys: Sequence[bytes]) -> None:
        """Sign with the first of these keys from now on, and accept all of them."""
        self._hashes = [
            blake2b(digest_size=TAG_BYTES, key=key, person=b"ratekeeper") for key in keys or (b"",)
        ]

    def seal(self, message: Message) -> bytes:
        """Return the datagram of a message."""
        head = _HEADER.pack(VERSION, self._fleet, message.sender, message.sequence)
        signed = head + encode_message(message)
        tag = self._hashes[0].copy()
        tag.update(signed)
        return signed + tag.digest()

    def open(self, datagram: bytes) -> Message | DatagramFault:
        """Return the message of a datagram, or why it is dropped."""
        if len(datagram) > DATAGRAM_BYTES_MAX:
            return "oversized"
        if len(datagram) < MESSAGE_BYTES_MIN:
            return "truncated"
        version, fleet, sender, sequence = _HEADER.unpack_from(datagram)
        if version != VERSION:
            return "version"
        if fleet != self._fleet:
            return "fleet"
        signed, tag = datagram[:-TAG_BYTES], datagram[-TAG_BYTES:]
        if not self._is_signed(signed, tag):
            return "forged"
        message = decode_message(sender, sequence, signed[_HEADER.size :])
        return "malformed" if message is None else message

    def _is_signed(self, signed: bytes, tag: bytes) -> bool:
        for each in self._hashes:
            own = each.copy()
            own.update(signed)
            if hmac.compare_digest(own.digest(), tag):
                return True
        return False


# ── Keys ───────────────────────────────────────────────────────────────────────────────────────

# 128 to 512 bits: BLAKE2b takes no longer key.
_KEY: Final = re.compile(r"(?:[0-9a-fA-F]{2}){16,64}")
_HOW: Final = (
    "a key file has one key on each line, of 32 to 128 hexadecimal digits; "
    "`openssl rand -hex 32` makes one"
)


class KeyFile:
    """The keys of a fleet, in a file.

    Other users must not have access, as with the private key of a TLS server: mode 0600, or 0640 if
    the file belongs to root.
    """

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError."""
        self._path = path
        self._seen: tuple[int, ...] = ()
        self._error = ""
        self.keys = self._read()

    def changed(self) -> bool:
        """Read the file again if it has changed; return True if `keys` has changed.

        If the file is missing or invalid, this logs a warning and the last keys stay in use.
        """
        before = self.keys
        try:
            if self._stat() != self._seen:
                self.keys = self._read()
            self._error = ""
        except (OSError, ConfigError) as error:
            if str(error) != self._error:
                log.warning("gossip: the last keys stay in use: %s", error)
            self._error = str(error)
        return self.keys != before

    def _stat(self) -> tuple[int, ...]:
        return _identity(self._path.stat())

    def _read(self) -> tuple[bytes, ...]:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                self._check_mode(found)
                data = file.read(KEY_FILE_BYTES_MAX + 1)
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror or error}; {_HOW}") from error
        if len(data) > KEY_FILE_BYTES_MAX:
            raise ConfigError(f"{self._path} is longer than {KEY_FILE_BYTES_MAX} bytes; {_HOW}")
        keys = self._parse(data.decode("ascii", "replace"))
        self._seen = _identity(found)
        return keys

    def _check_mode(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{self._path} is not a regular file; {_HOW}")
        if found.st_uid not in {0, os.geteuid()}:
            raise ConfigError(
                f"{self._path} belongs to user {found.st_uid}, who could replace the keys; "
                f"it must belong to root or to the user of this process"
            )
        forbidden = 0o077 if found.st_uid else 0o027
        if found.st_mode & forbidden:
            mode = stat.S_IMODE(found.st_mode)
            raise ConfigError(
                f"{self._path} has mode {mode:04o}, so that other users have access to the keys; "
                f"run chmod 600 on it"
            )

    def _parse(self, text: str) -> tuple[bytes, ...]:
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
        keys = []
        for number, line in lines:
            if not line or line.startswith("#"):
                continue
            if not _KEY.fullmatch(line):
                # The line is not shown: it may be a key with one digit missing.
                raise ConfigError(
                    f"{self._path}, line {number}: {len(line)} characters are not a key; {_HOW}"
                )
            keys.append(bytes.fromhex(line))
        if not keys:
            raise ConfigError(f"{self._path} has no key; {_HOW}")
        if len(keys) > KEYS_MAX:
            raise ConfigError(
                f"{self._path} has {len(keys)} keys; at most {KEYS_MAX} are allowed, "
                f"and two are enough to replace one: remove {show(len(keys) - KEYS_MAX)}"
            )
        return tuple(keys)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
