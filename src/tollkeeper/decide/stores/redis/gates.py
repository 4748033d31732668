"""One rule's limits on Redis: the verbs of a gate as script calls, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from tollkeeper.core.errors import CapacityError, StoreError, StoreUnavailable
from tollkeeper.core.model import UNITS_MAX, Decision, Limit
from tollkeeper.decide.coalesce import together_max
from tollkeeper.decide.stores.redis.calls import Call, NotSent
from tollkeeper.decide.stores.redis.codec import Answers
from tollkeeper.decide.stores.redis.denied import Denied, Sent
from tollkeeper.decide.stores.redis.drive import Servers, Tasks, Threads
from tollkeeper.decide.stores.redis.encode import NS_PER_US, encode_gate, encode_numbers, field_of
from tollkeeper.decide.stores.redis.scripts import CHECK, GRANT, REFUND, RESET, Script

SERVER_TIME: Final = b""
_LOOK: Final = b"look"
# What an error says after which nobody knows what the server did.
_MAYBE: Final = "may have been counted"
# Costs above this are not written out ahead.
_USUAL_COSTS: Final = 16


class Commands:
    """How a rule's calls are spelled."""

    __slots__ = ("_head", "_key_head", "_tails", "answers", "field", "gate", "now_ns")

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
        # What is kept under it is shared by all limits that the rule has, or has had.
        self.field = field_of(rule)
        self.gate = encode_gate(limits, rule)
        # EVALSHA <sha> 1 <key> <gate> <cost>, all but the key and the cost written out ahead.
        self._head = b"*6\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n1\r\n$" % CHECK.sha
        self._tails = [self._tail(cost) for cost in range(_USUAL_COSTS)]

    def _tail(self, cost: int) -> bytes:
        digits = b"%d" % cost
        return b"\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
            len(self.gate),
            self.gate,
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

    def check_at(self, key: bytes, cost: int, now: bytes | int) -> bytes:
        """The bytes of a check at a time that was given, or by the server's clock."""
        if now == SERVER_TIME:
            return self.check(key, cost)
        return self.call(CHECK, key, cost, now).by_sha()

    def call(self, script: Script, key: bytes, *arguments: bytes | int) -> Call:
        return Call(script, key, (self.gate, *arguments))

    def now(self) -> tuple[bytes | int, int]:
        """The time to decide at, and by how much the caller is past that microsecond."""
        now_ns = self.now_ns()
        if now_ns is None:
            return SERVER_TIME, 0
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

    __slots__ = ("_asked", "_denied", "_sent", "unwanted")

    def __init__(
        self, asked: Sequence[tuple[RedisGate | AsyncRedisGate, str, int]], denied: Denied
    ) -> None:
        # Its caller has left: whatever was taken is to be put back.
        self.unwanted = False
        self._asked = [(gate.commands, subject, cost) for gate, subject, cost in asked]
        self._denied = denied
        now, early_ns = self._asked[0][0].now()
        self._sent = Sent.of(now, early_ns, time.monotonic_ns(), denied.denials.mark)

    def known(self) -> list[Decision] | None:
        """The decisions, where it is known that these are denied together."""
        return self._denied.find_together(self._asked, self._sent.now, self._sent.early_ns)

    def calls(self) -> list[Call]:
        return [
            commands.call(CHECK, commands.key(subject), cost, self._sent.now)
            for commands, subject, cost in self._asked
        ]

    def decisions(self, answers: Sequence[Any]) -> tuple[list[Decision], Exception | None]:
        """What was decided; and what went wrong: what may have been counted, before the rest."""
        decided: list[Decision] = []
        errors: list[Exception] = []
        for (commands, _, cost), answer in zip(self._asked, answers, strict=True):
            if isinstance(answer, StoreError):
                errors.append(answer)
                continue
            try:
                decided.append(commands.answers.check(answer, cost, self._sent.early_ns))
            except (CapacityError, StoreError) as error:
                errors.append(error)
        return decided, min(errors, key=lambda error: _MAYBE not in str(error), default=None)

    def told(self, wrong: Exception | None, undone: Sequence[Any]) -> Exception | None:
        """What went wrong, with what came of undoing the rest."""
        failed = any(isinstance(each, StoreError) for each in undone)
        if not failed or not isinstance(wrong, StoreError) or _MAYBE in str(wrong):
            return wrong
        told = StoreUnavailable(f"{wrong}; another part of the request {_MAYBE} once")
        told.__cause__ = wrong
        return told

    def keep(
        self, answers: Sequence[Any], decided: Sequence[Decision], wrong: Exception | None
    ) -> None:
        """When all is done, and undone: note what it tells of requests to come."""
        if wrong is None and not all(decided):
            self._denied.keep_together(self._asked, answers, decided, self._sent)
        else:
            self._denied.spend_all(self._asked)

    def undo(self, answers: Sequence[Any]) -> list[Call]:
        """The calls that put back what was taken."""
        calls: list[Call] = []
        for (commands, subject, cost), answer in zip(self._asked, answers, strict=True):
            if not cost or type(answer) is not list:
                continue
            # What no script says tells of nothing that was taken; `decisions` has said so.
            with suppress(IndexError, TypeError, StopIteration):
                if answer[0] >= 0:
                    calls.append(commands.undo(subject, answer, cost))
        return calls


class RedisGate:
    """One rule's limits, for threads."""

    __slots__ = ("_breakers", "_denied", "_note", "_servers", "_threads", "commands", "limits")

    def __init__(
        self, commands: Commands, threads: Threads, denied: Denied, note: Callable[[str], None]
    ) -> None:
        self.limits = commands.answers.limits
        self.commands = commands
        self._threads = threads
        self._servers = threads.servers
        self._breakers = threads.servers.breakers
        self._denied = denied
        self._note = note

    def fast_check(self, fallback: Callable[..., Decision]) -> None:
        """Return None: the server decides."""

    def check(self, subject: str, cost: int) -> Decision:
        commands, denied = self.commands, self._denied
        self._note(subject)
        now, early_ns = commands.now()
        if subject in denied.kept:
            known = denied.find(commands, subject, cost, now, early_ns)
            if known is not None:
                return known
        if self._breakers.any_open:
            self._servers.require_closed(commands, subject)
        mark = denied.denials.mark
        key = commands.key(subject)
        started_ns = time.monotonic_ns()
        try:
            answer = self._threads.start(key, commands.check_at(key, cost, now))
        except NotSent as error:
            answer = error
        if type(answer) is not list:
            call = commands.call(CHECK, key, cost, now)
            answer = self._threads.settled(call, started_ns, answer)
        decision = commands.answers.check(answer, cost, early_ns)
        if decision.remaining < cost or subject in denied.kept:
            sent = Sent.of(now, early_ns, started_ns, mark)
            denied.keep((commands, subject, cost), answer, decision, sent)
        return decision

    def peek(self, subject: str, cost: int) -> Decision:
        now, early_ns = self.commands.now()
        call = self.commands.look(self.commands.key(subject), cost, now)
        answer = self._threads.run(call, call.by_sha())
        return self.commands.answers.peek(answer, cost, early_ns)

    def refund(self, subject: str, units: int) -> None:
        self._give(subject, self.commands.refund(subject, units))

    def grant(self, subject: str, units: int, ttl_ns: int | None) -> None:
        if units:
            self._give(subject, self.commands.grant(subject, units, ttl_ns))

    def reset(self, subject: str) -> None:
        self._give(subject, self.commands.reset(subject))

    def _give(self, subject: str, call: Call) -> None:
        try:
            self._threads.run(call, call.by_sha())
        finally:  # one that failed may have been carried out
            self._denied.drop(subject)


class AsyncRedisGate:
    """One rule's limits, for asyncio: the verbs of RedisGate, awaited."""

    __slots__ = (
        "_breakers",
        "_capacity",
        "_denied",
        "_note",
        "_servers",
        "_tasks",
        "_tasks_of",
        "commands",
        "limits",
    )

    def __init__(
        self,
        commands: Commands,
        servers: Servers,
        tasks_of: Callable[[], Tasks],
        denied: Denied,
        note: Callable[[str], None],
    ) -> None:
        self.limits = commands.answers.limits
        self.commands = commands
        self._servers = servers
        self._breakers = servers.breakers
        # What may go as one; 0: nothing is to.
        coalesced = servers.config.coalesce
        self._capacity = min(limit.capacity for limit in self.limits) if coalesced else 0
        self._tasks_of = tasks_of
        self._tasks: Tasks | None = None
        self._denied = denied
        self._note = note

    def tasks(self) -> Tasks:
        """The connections of the running event loop."""
        tasks = self._tasks
        if tasks is None or tasks.loop is not asyncio.get_running_loop():
            tasks = self._tasks = self._tasks_of()
        return tasks

    async def check(self, subject: str, cost: int) -> Decision:
        commands, denied = self.commands, self._denied
        self._note(subject)
        now, early_ns = commands.now()
        if subject in denied.kept:
            known = denied.find(commands, subject, cost, now, early_ns)
            if known is not None:
                return known
        if self._breakers.any_open:
            self._servers.require_closed(commands, subject)
        tasks = self.tasks()
        flights = tasks.flights
        key = commands.key(subject)
        question = (commands, subject, cost)
        if question not in flights.under_way:
            flights.under_way[question] = 1
        elif (most := together_max(self._capacity, cost)) and flights.must_wait(question):
            return await flights.join(question, most)
        else:
            flights.begin(question)
        mark = denied.denials.mark
        started_ns = time.monotonic_ns()
        try:
            try:
                answer = await tasks.start(key, commands.check_at(key, cost, now))
            except NotSent as error:
                answer = error
            if type(answer) is not list:
                call = commands.call(CHECK, key, cost, now)
                answer = await tasks.settled(call, started_ns, answer)
        finally:
            if flights.waiting or flights.under_way[question] > 1:
                flights.land(question)
            else:  # the same, without a call: it was the only one, as most are
                del flights.under_way[question]
        decision = commands.answers.check(answer, cost, early_ns)
        if decision.remaining < cost or subject in denied.kept:
            sent = Sent.of(now, early_ns, started_ns, mark)
            denied.keep(question, answer, decision, sent)
        return decision

    async def peek(self, subject: str, cost: int) -> Decision:
        now, early_ns = self.commands.now()
        call = self.commands.look(self.commands.key(subject), cost, now)
        answer = await self.tasks().run(call, call.by_sha())
        return self.commands.answers.peek(answer, cost, early_ns)

    async def refund(self, subject: str, units: int) -> None:
        await self._give(subject, self.commands.refund(subject, units))

    async def grant(self, subject: str, units: int, ttl_ns: int | None) -> None:
        if units:
            await self._give(subject, self.commands.grant(subject, units, ttl_ns))

    async def reset(self, subject: str) -> None:
        await self._give(subject, self.commands.reset(subject))

    async def _give(self, subject: str, call: Call) -> None:
        try:
            await self.tasks().run(call, call.by_sha())
        finally:  # one that failed, or was cancelled, may have been carried out
            self._denied.drop(subject)
