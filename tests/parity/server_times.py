"""The server's time of each decision, read back."""

from __future__ import annotations

from tests.conformance.awaited import AwaitedGate
from tollkeeper.core.model import Decision
from tollkeeper.decide.store import Gate
from tollkeeper.decide.stores.redis.codec import NS_PER_US, Answers
from tollkeeper.decide.stores.redis.gates import AsyncRedisGate, RedisGate


class TimedAnswers:
    """Notes the server's time of each answer on its way to becoming a decision."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.limits = answers.limits
        self.now_ns = 0

    def check(self, answer: list[int], cost: int, early_ns: int = 0) -> Decision:
        self._note(answer)
        return self._answers.check(answer, cost, early_ns)

    def peek(self, answer: list[int], cost: int, early_ns: int = 0) -> Decision:
        self._note(answer)
        return self._answers.peek(answer, cost, early_ns)

    def __getattr__(self, name: str) -> object:
        return getattr(self._answers, name)

    def _note(self, answer: list[int]) -> None:
        self.now_ns = (answer[0] if answer[0] >= 0 else ~answer[0]) * NS_PER_US


def timed(gate: Gate) -> TimedAnswers:
    """The times of a gate's answers from now on."""
    inner: RedisGate | AsyncRedisGate = gate._gate if isinstance(gate, AwaitedGate) else gate
    times = TimedAnswers(inner.commands.answers)
    inner.commands.answers = times
    return times
