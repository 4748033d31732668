"""Who asks servers whose breakers are open whether they are back: a thread, while there are any.

A probe is what a call is, end to end, and nobody's: a new connection with its handshake, which
loads the script again, a PING, and the script run on a key of its own, where it only looks. It has
the deadline that a call has: a server that answers too late is not back.

Where another server may have taken over, that is looked up too, more often than the dead one is
probed. Calls go to the new primary as soon as it is known, by its own breaker, which is closed. One
that has no slots any more is not probed further, and its breaker is closed: if ever it is a primary
again, it starts anew.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from contextlib import suppress
from typing import Final

from tollkeeper.core.clock import NS_PER_SECOND
from tollkeeper.core.errors import StoreError
from tollkeeper.core.model import Limit
from tollkeeper.decide.stores.redis.breakers import Breakers, NodeBreaker
from tollkeeper.decide.stores.redis.calls import Call, pack
from tollkeeper.decide.stores.redis.config import Address, RedisConfig
from tollkeeper.decide.stores.redis.encode import encode_gate
from tollkeeper.decide.stores.redis.scripts import CHECK
from tollkeeper.decide.stores.redis.wire import Connection

# While a breaker is open, the Sentinels or the cluster are asked so often who the primary is.
LOOK_NS: Final = NS_PER_SECOND // 2
_GATE: Final = encode_gate((Limit(1, per=1),), "probe")


def probe(address: Address, config: RedisConfig, tls: ssl.SSLContext | None) -> None:
    """Go a call's way there and back. Raises StoreError if it does not get back in time."""
    key = b"%b:{probe}" % config.prefix.encode()
    call = Call(CHECK, key, (_GATE, 1, b"", b"look"))
    connection = Connection(address, config, tls)
    try:
        # Whatever it answers, it answers: in a cluster, most likely that the key is elsewhere.
        connection.exchange(pack("PING") + call.by_sha(), 2, config.deadline_ns, warning="")
    finally:
        connection.close()


class Prober:
    """Probes a store's servers, in the background, from when a breaker opens until all are closed.

    `run` takes a probe to where it may block. `find` looks up anew where the servers are, and
    `in_use` has those that calls go to; both are None where there is one server and no other.
    """

    def __init__(
        self,
        breakers: Breakers,
        probe: Callable[[Address], None],
        run: Executor,
        find: Callable[[], object] | None,
        in_use: Callable[[], Collection[Address]] | None,
    ) -> None:
        self._breakers = breakers
        self._probe = probe
        self._run = run
        self._find = find
        self._in_use = in_use
        self._closed = False
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._under_way: set[Address] = set()
        breakers.opened = self.wake

    def wake(self) -> None:
        """A breaker has opened."""
        with self._wake:
            if self._thread is None and not self._closed:
                # A daemon: a process that ends does not wait for servers that are gone.
                thread = threading.Thread(
                    target=self._watch, name="tollkeeper-redis-probe", daemon=True
                )
                # The process ends; or it has as many as it may, and whoever is refused wakes us.
                with suppress(RuntimeError):
                    thread.start()
                    self._thread = thread
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()

    def _watch(self) -> None:
        look_ns = 0
        while True:
            now_ns = time.monotonic_ns()
            if self._find is not None and now_ns >= look_ns:
                look_ns = now_ns + LOOK_NS
                self._look()
            opened = [each for each in self._breakers.all() if each.open]
            for breaker in opened:
                self._begin(breaker, now_ns)
            with self._wake:
                if self._closed or not any(each.open for each in self._breakers.all()):
                    self._thread = None
                    return
                self._wake.wait(self._pause_s(opened, look_ns))

    def _pause_s(self, opened: list[NodeBreaker], look_ns: int) -> float:
        """Until the next thing to do. A probe that ends wakes it."""
        dues = [
            due_ns
            for breaker in opened
            if breaker.address not in self._under_way and (due_ns := breaker.due_ns()) is not None
        ]
        next_ns = min([*dues, look_ns] if self._find is not None else dues, default=None)
        if next_ns is None:
            return LOOK_NS / NS_PER_SECOND
        return max(next_ns - time.monotonic_ns(), 0) / NS_PER_SECOND

    def _look(self) -> None:
        with suppress(StoreError):
            if self._find is not None:
                self._find()
        if self._in_use is not None and (used := self._in_use()):
            for breaker in self._breakers.all():
                if breaker.address not in used:
                    breaker.forget()

    def _begin(self, breaker: NodeBreaker, now_ns: int) -> None:
        due_ns = breaker.due_ns()
        if due_ns is None or now_ns < due_ns or breaker.address in self._under_way:
            return
        self._under_way.add(breaker.address)
        try:
            self._run.submit(self._carry_out, breaker)
        except RuntimeError as error:  # no more threads for now; or the process ends
            self._under_way.discard(breaker.address)
            breaker.probe_failed(error)

    def _carry_out(self, breaker: NodeBreaker) -> None:
        try:
            self._probe(breaker.address)
        except Exception as error:  # whatever it was, it was no answer
            breaker.probe_failed(error)
        else:
            breaker.probe_succeeded()
        with self._wake:
            self._under_way.discard(breaker.address)
            self._wake.notify()
