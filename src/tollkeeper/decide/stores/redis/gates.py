"""One rule's limits on Redis: the verbs of a gate as script calls, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from tollkeeper.decide.stores.redis.calls import Call, NotSent
from tollkeeper.decide.stores.redis.codec import NS_PER_US, Answers, encode_gate, encode_numbers
from tollkeeper.decide.stores.redis.drive import Tasks, Threads
from tollkeeper.decide.stores.redis.scripts import CHECK, GRANT, REFUND, RESET, Script
from tollkeeper.errors import CapacityError, StoreError
from tollkeeper.model import UNITS_MAX, Decision, Limit

_SERVER_TIME: Final = b""
_LOOK: Final = b"look"
# Costs above this are not written out ahead.
_USUAL_COSTS: Final = 16


class Commands:
    """How a rule's calls are spelled."""

    __slots__ = ("_gate", "_head", "_key_head", "_tails", "answers", "now_ns")

    def __init__(
        self,
        limits: tuple[Limit, ...],
        rule: str,
        prefix: str,
        now_ns: Callable[[], int | None],
    ) -> None:
        self.answers = Answers(limits, rule)
        self.now_ns = now_ns
        self._key_head = prefix.encode() + b":{"
        self._gate = encode_gate(limits, rule)
        # EVALSHA <sha> 1 <key> <gate> <cost>, all but the key and the cost written out ahead.
        self._head = b"*6\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n1\r\n$" % CHECK.sha
        self._tails = [self._tail(cost) for cost in range(_USUAL_COSTS)]

    def _tail(self, cost: int) -> bytes:
        digits = b"%d" % cost
        return b"\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
            len(self._gate),
            self._gate,
            len(digits),
            digits,
        )

    def key(self, subject: str) -> bytes:
        """The subject's hash. Its tag is the subject, so that a slot is a subject's alone.

        A tag that began with a brace would be empty, which Redis takes for none.
        """
        if subject[:1] in {"}", "%"}:
            subject = "%" + subject
        return b"%b%b}" % (self._key_head, subject.encode())

    def check(self, key: bytes, cost: int) -> bytes:
        """The bytes of a check by the server's clock."""
        tail = self._tails[cost] if cost < _USUAL_COSTS else self._tail(cost)
        return b"%b%d\r\n%b%b" % (self._head, len(key), key, tail)

    def call(self, script: Script, key: bytes, *arguments: bytes | int) -> Call:
        return Call(script, key, (self._gate, *arguments))

    def now(self) -> tuple[bytes | int, int]:
        """The time to decide at, and by how much the caller is past that microsecond."""
        now_ns = self.now_ns()
        if now_ns is None:
            return _SERVER_TIME, 0
        now_ns = max(now_ns, 0)
        return now_ns // NS_PER_US, now_ns % NS_PER_US

    def look(self, key: bytes, cost: int, now: bytes | int) -> Call:
        return self.call(CHECK, key, cost, now, _LOOK)

    def refund(self, subject: str, units: int) -> Call:
        return self.call(REFUND, self.key(subject), units, self.now()[0])

    def undo(self, subject: str, answer: list[int], cost: int) -> Call:
        """What puts back exactly what a check took, as its answer tells."""
        spent = encode_numbers(self.answers.spent(answer, cost))
        return self.call(REFUND, self.key(subject), 0, self.now()[0], spent)

    def grant(self, subject: str, units: int, ttl_ns: int | None) -> Call:
        # Up: a grant is never shorter than it was promised.
        ttl: bytes | int = b"" if ttl_ns is None else -(-ttl_ns // NS_PER_US)
        return self.call(GRANT, self.key(subject), units, self.now()[0], ttl, UNITS_MAX)

    def reset(self, subject: str) -> Call:
        return self.call(RESET, self.key(subject))


class Together:
    """One request of several subjects: the calls that check them, and those that take it back."""

    __slots__ = ("_asked", "_early_ns", "calls")

    def __init__(self, asked: Sequence[tuple[RedisGate | AsyncRedisGate, str, int]]) -> None:
        self._asked = asked
        self._early_ns = 0
        self.calls: list[Call] = []
        for gate, subject, cost in asked:
            now, self._early_ns = gate.commands.now()
            key = gate.commands.key(subject)
            self.calls.append(gate.commands.call(CHECK, key, cost, now))

    def decisions(self, answers: Sequence[Any]) -> tuple[list[Decision], Exception | None]:
        """What was decided; and the first thing that went wrong."""
        decided: list[Decision] = []
        wrong: Exception | None = None
        for (gate, _, cost), answer in zip(self._asked, answers, strict=True):
            if isinstance(answer, StoreError):
                wrong = wrong or answer
                continue
            try:
                decided.append(gate.commands.answers.check(answer, cost, self._early_ns))
            except (CapacityError, StoreError) as error:
                wrong = wrong or error
        return decided, wrong

    def undo(self, answers: Sequence[Any]) -> list[Call]:
        """The calls that put back what was taken."""
        return [
            gate.commands.undo(subject, answer, cost)
            for (gate, subject, cost), answer in zip(self._asked, answers, strict=True)
            if cost and type(answer) is list and answer[0] >= 0
        ]


class RedisGate:
    """One rule's limits, for threads."""

    __slots__ = ("_note", "_threads", "commands", "limits")

    def __init__(self, commands: Commands, threads: Threads, note: Callable[[str], None]) -> None:
        self.limits = commands.answers.limits
        self.commands = commands
        self._threads = threads
        self._note = note

    def check(self, subject: str, cost: int) -> Decision:
        commands = self.commands
        key = commands.key(subject)
        self._note(subject)
        now, early_ns = commands.now()
        if now != _SERVER_TIME:
            call = commands.call(CHECK, key, cost, now)
            answer = self._threads.run(call, call.by_sha())
            return commands.answers.check(answer, cost, early_ns)
        started_ns = time.monotonic_ns()
        try:
            answer = self._threads.start(key, commands.check(key, cost))
        except NotSent as error:
            answer = error
        if type(answer) is not list:
            answer = self._threads.settled(commands.call(CHECK, key, cost), started_ns, answer)
        return commands.answers.check(answer, cost)

    def peek(self, subject: str, cost: int) -> Decision:
        now, early_ns = self.commands.now()
        call = self.commands.look(self.commands.key(subject), cost, now)
        answer = self._threads.run(call, call.by_sha())
        return self.commands.answers.peek(answer, cost, early_ns)

    def refund(self, subject: str, units: int) -> None:
        self._run(self.commands.refund(subject, units))

    def grant(self, subject: str, units: int, ttl_ns: int | None) -> None:
        if units:
            self._run(self.commands.grant(subject, units, ttl_ns))

    def reset(self, subject: str) -> None:
        self._run(self.commands.reset(subject))

    def _run(self, call: Call) -> None:
        self._threads.run(call, call.by_sha())


class AsyncRedisGate:
    """One rule's limits, for asyncio: the verbs of RedisGate, awaited."""

    __slots__ = ("_note", "_tasks", "_tasks_of", "commands", "limits")

    def __init__(
        self, commands: Commands, tasks_of: Callable[[], Tasks], note: Callable[[str], None]
    ) -> None:
        self.limits = commands.answers.limits
        self.commands = commands
        self._tasks_of = tasks_of
        self._tasks: Tasks | None = None
        self._note = note

    def tasks(self) -> Tasks:
        """The connections of the running event loop."""
        tasks = self._tasks
        if tasks is None or tasks.loop is not asyncio.get_running_loop():
            tasks = self._tasks = self._tasks_of()
        return tasks

    async def check(self, subject: str, cost: int) -> Decision:
        commands = self.commands
        tasks = self.tasks()
        key = commands.key(subject)
        self._note(subject)
        now, early_ns = commands.now()
        if now != _SERVER_TIME:
            call = commands.call(CHECK, key, cost, now)
            answer = await tasks.run(call, call.by_sha())
            return commands.answers.check(answer, cost, early_ns)
        started_ns = time.monotonic_ns()
        try:
            answer = await tasks.start(key, commands.check(key, cost))
        except NotSent as error:
            answer = error
        if type(answer) is not list:
            answer = await tasks.settled(commands.call(CHECK, key, cost), started_ns, answer)
        return commands.answers.check(answer, cost)

    async def peek(self, subject: str, cost: int) -> Decision:
        now, early_ns = self.commands.now()
        call = self.commands.look(self.commands.key(subject), cost, now)
        answer = await self.tasks().run(call, call.by_sha())
        return self.commands.answers.peek(answer, cost, early_ns)

    async def refund(self, subject: str, units: int) -> None:
        await self._run(self.commands.refund(subject, units))

    async def grant(self, subject: str, units: int, ttl_ns: int | None) -> None:
        if units:
            await self._run(self.commands.grant(subject, units, ttl_ns))

    async def reset(self, subject: str) -> None:
        await self._run(self.commands.reset(subject))

    async def _run(self, call: Call) -> None:
        await self.tasks().run(call, call.by_sha())
