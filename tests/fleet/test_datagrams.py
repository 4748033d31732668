"""Datagrams: the codec, the tag, the keys, and everything that is not a datagram."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratekeeper.core.errors import ConfigError
from ratekeeper.fleet.datagrams import (
    DATAGRAM_BYTES_MAX,
    MESSAGE_BYTES_MIN,
    DatagramCodec,
    HintEntry,
    KeyFile,
    MemberEntry,
    Message,
    NodeStatus,
    decode_message,
    message_size,
)
from tests.fleet.network import messages

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))


def a_message() -> Message:
    """Return a message with a member and a hint."""
    status = NodeStatus("0.1.0", "17", 3, 4, "eu")
    member = MemberEntry(5, ("2001:db8::7", 7946), 1_000, 7, False, status)
    hint = HintEntry(5, 1, "denied", True, 2**63, "api_key:é", 2, 3, 900)
    return Message(5, 1_001, members=(member,), hints=(hint,))


@settings(max_examples=settings().max_examples * 2)
@given(message=messages)
def test_a_message_is_what_it_was(message: Message) -> None:
    """Sealing and opening changes nothing, and the length is what the machine counts with."""
    codec = DatagramCodec("test", [KEY])
    datagram = codec.seal(message)
    assert len(datagram) == message_size(message)
    if len(datagram) <= DATAGRAM_BYTES_MAX:
        assert codec.open(datagram) == message


@settings(max_examples=settings().max_examples * 4)
@given(data=st.binary(max_size=1_300))
def test_random_bytes_are_dropped(data: bytes) -> None:
    """Whatever arrives, there is a reason and no error; also behind a valid header."""
    codec = DatagramCodec("test", [KEY])
    assert isinstance(codec.open(data), str)
    head = codec.seal(Message(1, 1))[:21]
    assert codec.open(head + data) in {"truncated", "oversized", "forged"}
    found = decode_message(1, 1, data)
    assert found is None or message_size(found) == len(data) + 37


@settings(max_examples=settings().max_examples * 4)
@given(message=messages, at=st.floats(0, 1), flip=st.integers(1, 255), cut=st.integers(0, 40))
def test_a_changed_datagram_is_dropped(message: Message, at: float, flip: int, cut: int) -> None:
    """One flipped bit anywhere, or a byte less, and it is not authentic."""
    codec = DatagramCodec("test", [KEY])
    datagram = bytearray(codec.seal(message))
    if len(datagram) > DATAGRAM_BYTES_MAX:
        return
    assert isinstance(codec.open(bytes(datagram[: len(datagram) - 1 - cut])), str)
    datagram[int(at * (len(datagram) - 1))] ^= flip
    assert codec.open(bytes(datagram)) in {"version", "fleet", "forged"}


@settings(max_examples=settings().max_examples * 6)
@given(message=messages, at=st.floats(0, 1), flip=st.integers(1, 255))
def test_an_authentic_datagram_that_makes_no_sense_is_dropped(
    message: Message, at: float, flip: int
) -> None:
    """The parser meets every mutation of a valid message: it returns a message or None."""
    codec = DatagramCodec("test")
    body = bytearray(codec.seal(message)[21:-16])
    body[int(at * (len(body) - 1))] ^= flip
    found = decode_message(1, 1, bytes(body))
    assert found is None or message_size(found) == len(body) + 37


@pytest.mark.parametrize(
    ("datagram", "reason"),
    [
        (b"", "truncated"),
        (b"\x01" * (MESSAGE_BYTES_MIN - 1), "truncated"),
        (b"\x01" * 1_201, "oversized"),
        (b"\x01" + DatagramCodec("test", [KEY]).seal(a_message())[1:], "version"),
        (DatagramCodec("other", [KEY]).seal(a_message()), "fleet"),
        (DatagramCodec("test", [OTHER]).seal(a_message()), "forged"),
        (DatagramCodec("test").seal(a_message()), "forged"),
        (DatagramCodec("test", [KEY]).seal(Message(0, 1)), "malformed"),
    ],
)
def test_each_fault_has_its_reason(datagram: bytes, reason: str) -> None:
    """An operator sees from the counters what is wrong."""
    assert DatagramCodec("test", [KEY]).open(datagram) == reason


def test_a_port_of_zero_is_malformed() -> None:
    """A node cannot make others send to a port that does not exist."""
    message = a_message()
    member = message.members[0]._replace(address=("10.0.0.1", 0))
    codec = DatagramCodec("test")
    assert codec.open(codec.seal(message._replace(members=(member,)))) == "malformed"


def test_the_first_key_signs_and_all_verify() -> None:
    """A key is replaced in three steps, and at each of them all nodes understand each other."""
    message = a_message()
    old, both, moved, new = [
        DatagramCodec("test", keys) for keys in ([KEY], [KEY, OTHER], [OTHER, KEY], [OTHER])
    ]
    for one, other in [(old, both), (both, moved), (moved, new)]:
        assert one.open(other.seal(message)) == message
        assert other.open(one.seal(message)) == message
    assert old.open(new.seal(message)) == "forged"


# ── The key file ───────────────────────────────────────────────────────────────────────────────


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    """Write a key file."""
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_keys_are_read_in_order(tmp_path: Path) -> None:
    """Comments and empty lines are not keys."""
    path = key_file(tmp_path, f"# old and new\n{KEY.hex()}\n\n  {OTHER.hex().upper()} \n")
    assert KeyFile(path).keys == (KEY, OTHER)


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        ("", 0o600, "has no key"),
        ("# nothing\n", 0o600, "has no key"),
        ("00" * 15, 0o600, "line 1: 30 characters are not a key"),
        ("00" * 65, 0o600, "line 1: 130 characters are not a key"),
        (f"{'00' * 16}\n{'0' * 33}", 0o600, "line 2: 33 characters are not a key"),
        ("secret" * 6, 0o600, "32 to 128 hexadecimal digits"),
        ("é" * 40, 0o600, "not a key"),
        ("00" * 16, 0o644, "mode 0644"),
        ("00" * 16, 0o660, "mode 0660"),
        ("00" * 20_000, 0o600, "longer than 16384 bytes"),
        (f"{'00' * 16}\n" * 17, 0o600, "has 17 keys"),
    ],
)
def test_a_wrong_key_file_is_refused(tmp_path: Path, text: str, mode: int, problem: str) -> None:
    """The message says what is wrong, and never shows a key."""
    path = key_file(tmp_path, text, mode)
    with pytest.raises(ConfigError, match=problem) as raised:
        KeyFile(path)
    assert "secret" not in str(raised.value)
    assert "0000" not in str(raised.value)


def test_a_key_file_must_be_a_file(tmp_path: Path) -> None:
    """A folder and a missing file are named."""
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=str(path)):
            KeyFile(path)


def test_a_changed_key_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rename replaces the keys. A file that is wrong or gone leaves them, with one warning."""
    file = KeyFile(key_file(tmp_path, KEY.hex()))
    assert not file.changed()
    new = tmp_path / "new"
    new.write_text(f"{OTHER.hex()}\n{KEY.hex()}\n")
    new.chmod(0o600)
    new.replace(tmp_path / "keys")
    assert file.changed()
    assert file.keys == (OTHER, KEY)
    with caplog.at_level(logging.WARNING, "ratekeeper.fleet"):
        (tmp_path / "keys").chmod(0o644)
        assert not file.changed()
        assert not file.changed()
        (tmp_path / "keys").unlink()
        assert not file.changed()
    assert file.keys == (OTHER, KEY)
    assert len(caplog.records) == 2
