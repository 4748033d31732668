"""Broken networks, full disks and wrong clocks, each for the length of one test."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address
from pathlib import Path
from typing import Self

import pytest
import redis

from tests.integration.tcp_proxy import Proxy
from tests.redis_servers.scratch import scratch
from tests.redis_servers.server import Startable, program_path
from tests.redis_servers.waiting import until

READY_S_MAX = 20.0
# Each process takes four addresses of the networks that are reserved for tests.
_NETWORK, _PARTS = IPv4Address("198.18.0.0"), 16_384
_PREFIX = 30
_PORT = 6379
# The numbers of Linux' capabilities for networks, and for mounts and namespaces.
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_libc = ctypes.CDLL(None, use_errno=True)


def has_root() -> bool:
    """Return True if this process has root's capabilities; in some containers root has not."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    held = int(status.partition("CapEff:")[2].split()[0], 16)
    return all(held >> number & 1 for number in (_CAP_NET_ADMIN, _CAP_SYS_ADMIN))


def needs_root(what: str) -> None:
    """Skip a test that needs root; in CI, fail it."""
    if has_root():
        return
    reason = f"{what} takes root with CAP_NET_ADMIN and CAP_SYS_ADMIN; run the tests as root"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def reset_all(proxy: Proxy) -> None:
    """Reset every connection of a proxy, like a firewall that has lost its table."""
    unspecified = (ctypes.c_uint16 * 8)(socket.AF_UNSPEC)
    for each in list(proxy._sockets):
        # On Linux, connect() to AF_UNSPEC drops a connection, even while a thread reads from it.
        if each.fileno() >= 0:
            _libc.connect(each.fileno(), unspecified, ctypes.sizeof(unspecified))
    proxy.break_all()


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, check=False, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def _ip(*words: str) -> None:
    _run(program_path("ip", "iproute2"), *words)


class FarRedis(Startable):
    """A redis-server in a separate network, at the end of a cable that a test can pull.

    The network belongs to the server's process, and ends together with it.
    """

    def __init__(self) -> None:
        self.folder = scratch().new_folder("far")
        number = os.getpid()
        self._near, self._far = f"rkn{number}", f"rkf{number}"
        part = _NETWORK + 4 * (number % _PARTS)
        self._here, self._there = str(part + 1), str(part + 2)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        """Return the store's URI."""
        return f"redis://{self._there}:{_PORT}/0"

    def start(self) -> None:
        """Lay the cable, start the server, and wait until it answers."""
        process = self._launch()
        own = Path("/proc/self/ns/net").readlink()
        theirs = Path(f"/proc/{process.pid}/ns/net")
        until(lambda: theirs.readlink() != own, "a separate network", READY_S_MAX, self._log)
        peer = ("peer", "name", self._far, "netns", str(process.pid))
        _ip("link", "add", self._near, "type", "veth", *peer)
        _ip("address", "add", f"{self._here}/{_PREFIX}", "dev", self._near)
        _ip("link", "set", self._near, "up")
        self._there_ip("address", "add", f"{self._there}/{_PREFIX}", "dev", self._far)
        self.join()
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        until(self._answers, "the far Redis answers", READY_S_MAX, self._log)

    def _launch(self) -> subprocess.Popen[bytes]:
        """Start a shell in a new network, which becomes the server after it reads a line."""
        server = (
            *(program_path("redis-server"), "--port", str(_PORT), "--bind", self._there),
            *("--save", "", "--appendonly", "no", "--protected-mode", "no"),
        )
        waiting = ("sh", "-c", 'read -r _; exec "$@"', "sh", *server)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [program_path("unshare", "util-linux"), "--net", *waiting],
                cwd=self.folder,
                process_group=scratch().process_group,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        scratch().stop_at_exit(self, self.stop)
        return self._process

    def _there_ip(self, *words: str) -> None:
        assert self._process is not None
        inside = (program_path("nsenter", "util-linux"), "--net", "--target")
        _run(*inside, str(self._process.pid), program_path("ip", "iproute2"), *words)

    def _answers(self) -> bool:
        client = redis.Redis(self._there, _PORT, socket_timeout=0.5, socket_connect_timeout=0.5)
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()

    def _log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def part(self) -> None:
        """Pull the cable: both directions are silent, and neither side gets an error."""
        self._there_ip("link", "set", self._far, "down")

    def join(self) -> None:
        """Plug the cable in again."""
        self._there_ip("link", "set", self._far, "up")

    def stop(self) -> None:
        """End the server and its network."""
        if self._process is not None:
            with self._process as process:  # closes its pipe and waits for it
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        scratch().forget(self)

    def __enter__(self) -> Self:
        needs_root("a network namespace")
        return super().__enter__()


_Address = tuple[str, int]


@contextmanager
def lost_datagrams(ways: Sequence[tuple[_Address, _Address]]) -> Iterator[None]:
    """Lose every datagram from one address to another. Neither side gets an error."""
    needs_root("a packet filter")
    nft = program_path("nft", "nftables")
    table = f"ratekeeper_{os.getpid()}"
    rules = "\n".join(
        f"ip saddr {source[0]} udp sport {source[1]} ip daddr {to[0]} udp dport {to[1]} drop"
        for source, to in ways
    )
    # On the way in: a datagram that is dropped on its way out is an error for its sender.
    chain = f"chain lost {{\ntype filter hook input priority 0;\n{rules}\n}}"
    _run(nft, f"table inet {table} {{\n{chain}\n}}\n")
    try:
        yield
    finally:
        _run(nft, f"delete table inet {table}")


@contextmanager
def small_disk(kilobytes: int) -> Iterator[Path]:
    """Mount a small disk that is soon full; yield its folder."""
    needs_root("mounting a disk")
    folder = scratch().new_folder("disk")
    mount = program_path("mount")
    subprocess.run([mount, "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run([program_path("umount"), "--lazy", folder], check=False)
        with suppress(OSError):
            folder.rmdir()


def fill(disk: Path) -> Path:
    """Fill the rest of a disk with one file; return its path."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:  # until the disk is full
            file.write(bytes(4_096))
    return path


def wrong_clock(seconds: int) -> dict[str, str]:
    """Return environment variables that shift a process's wall clock by some seconds."""
    program_path("faketime")  # a missing program fails with an install command
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    assert found, "faketime is there without its library; apt-get install libfaketime"
    return {
        "LD_PRELOAD": str(found[0]),
        "FAKETIME": f"{seconds:+d}s",
        # A wrong wall clock leaves the monotonic clock correct.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
