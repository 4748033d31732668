"""What breaks a network, a disk or a clock, made for one test and gone after it."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest
import redis

from tests.integration.tcp_proxy import Proxy
from tests.redis_servers.scratch import scratch
from tests.redis_servers.server import Startable, program_path
from tests.redis_servers.waiting import until

READY_S_MAX = 20.0
# A network for documentation that is routed nowhere, and of it a part that others hardly use.
_HERE, _THERE, _PREFIX = "198.18.241.1", "198.18.241.2", 30
_PORT = 6379
_libc = ctypes.CDLL(None, use_errno=True)


def needs_root(what: str) -> None:
    """Skip what only root can do; where everything must be shown, fail."""
    if os.geteuid() == 0:
        return
    reason = f"{what} takes root; run the tests as root to see it"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def reset_all(proxy: Proxy) -> None:
    """End every connection of a proxy with a reset, as a firewall that has lost its table does."""
    unspecified = (ctypes.c_uint16 * 8)(socket.AF_UNSPEC)
    for each in list(proxy._sockets):
        # Connecting to nowhere is how Linux drops a connection that others are reading from.
        if each.fileno() >= 0:
            _libc.connect(each.fileno(), unspecified, ctypes.sizeof(unspecified))
    proxy.break_all()


def _ip(*words: str, check: bool = True) -> None:
    done = subprocess.run(
        [program_path("ip", "iproute2"), *words], capture_output=True, check=False, text=True
    )
    assert not check or done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


class FarRedis(Startable):
    """A redis-server in a network of its own, at the far end of a cable that can be pulled."""

    def __init__(self) -> None:
        self.folder = scratch().new_folder("far")
        self._space = f"tk{os.getpid()}"
        self._near, self._far = f"tkn{os.getpid()}", f"tkf{os.getpid()}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        """The store's URI."""
        return f"redis://{_THERE}:{_PORT}/0"

    def start(self) -> None:
        """Lay the cable, start the server, and wait until it answers."""
        _ip("netns", "add", self._space)
        _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far)
        _ip("link", "set", self._far, "netns", self._space)
        _ip("address", "add", f"{_HERE}/{_PREFIX}", "dev", self._near)
        _ip("link", "set", self._near, "up")
        _ip("-n", self._space, "address", "add", f"{_THERE}/{_PREFIX}", "dev", self._far)
        self.join()
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(program_path("ip", "iproute2"), "netns", "exec", self._space),
                    *(program_path("redis-server"), "--port", str(_PORT), "--save", ""),
                    *("--bind", _THERE, "--protected-mode", "no", "--appendonly", "no"),
                ],
                cwd=self.folder,
                process_group=scratch().process_group,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        scratch().stop_at_exit(self, self.stop)
        until(self._answers, "the far Redis answers", READY_S_MAX, self._log)

    def _answers(self) -> bool:
        client = redis.Redis(_THERE, _PORT, socket_timeout=0.5, socket_connect_timeout=0.5)
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()

    def _log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def part(self) -> None:
        """Pull the cable: nothing arrives in either direction, and nobody is told."""
        _ip("-n", self._space, "link", "set", self._far, "down")

    def join(self) -> None:
        """Put it in again."""
        _ip("-n", self._space, "link", "set", self._far, "up")

    def stop(self) -> None:
        """End the server, and remove the network with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        _ip("link", "delete", self._near, check=False)
        _ip("netns", "delete", self._space, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
        scratch().forget(self)

    def __enter__(self) -> Self:
        needs_root("a network namespace")
        return super().__enter__()


@contextmanager
def small_disk(kilobytes: int) -> Iterator[Path]:
    """A folder on a disk of its own that is soon full."""
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


def wrong_clock(seconds: int) -> dict[str, str]:
    """Environment variables that make a process's wall clock wrong by so much."""
    program_path("faketime")  # says what to install where it is missing
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    assert found, "faketime is there without its library; apt-get install libfaketime"
    return {
        "LD_PRELOAD": str(found[0]),
        "FAKETIME": f"{seconds:+d}s",
        # A clock that counts from boot is right on such a machine too.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
