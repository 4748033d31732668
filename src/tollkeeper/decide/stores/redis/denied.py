"""Denials of Redis, kept here and told again as of later.

What is kept is not a decision but the script's answer: the states. So the decision is worked out
anew each time, by the same code as the first, and has every field as the script would answer it
then, if nobody else touched the key. How late it is by the server's clock nobody here knows
exactly; the two bounds are used where each is the safe one. The denial is repeated only until what
it says is over even if the server decided the moment it was asked; and what is told counts from
when the answer came, so that whoever waits as told is not too early.

A log's answer has its oldest time that matters and not the others. It is kept only where that one
is enough: where one unit is missing, which is always so for a cost of 1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tollkeeper.core.model import Decision
from tollkeeper.decide.denials import Denial, Denials, Place
from tollkeeper.decide.stores.redis.encode import NS_PER_US

if TYPE_CHECKING:
    from tollkeeper.decide.stores.redis.gates import Commands

# The time to decide at: microseconds that a test's clock gave, or b"" for the server's.
Now = bytes | int
Asked = tuple["Commands", str, int]


class Sent(NamedTuple):
    """When a check was asked for: by which clock, and after which drops."""

    now: Now
    early_ns: int
    """How far into its microsecond a test's clock was."""
    sent_ns: int
    mark: int

    @classmethod
    def of(cls, now: Now, early_ns: int, started_ns: int, mark: int) -> Sent:
        """By the clock that decides: a test's, or for the server's our own, read before."""
        by_us = started_ns if type(now) is bytes else _moment_ns(now, early_ns)
        return cls(now, early_ns, by_us, mark)


class Denied:
    """The denials of one store, for all of its gates."""

    __slots__ = ("_longest_ns", "by_rule", "denials", "kept")

    def __init__(self, longest_ns: int) -> None:
        self._longest_ns = longest_ns
        self.denials: Denials[list[list[int]]] = Denials()
        # Checks that were answered from here; there are no more rules than gates were made for.
        self.by_rule: dict[str, int] = {}
        # A subject that is not in it has none: one look that every check can afford.
        self.kept = self.denials.kept

    @property
    def hits(self) -> int:
        """Checks that were answered from here."""
        return self.denials.hits

    def find(
        self, commands: Commands, subject: str, cost: int, now: Now, early_ns: int
    ) -> Decision | None:
        """The decision on a check as of now, if a denial of it is kept."""
        now_ns = _moment_ns(now, early_ns)
        denial = self.denials.find(((commands.gate, subject, cost),), now_ns)
        if denial is None:
            return None
        later = _later(denial.answer[0], denial.told_ns, now, now_ns)
        decision = commands.answers.check(later, cost, early_ns)
        self._count(decision.rule)
        return decision

    def keep(
        self, asked: Asked, answer: list[int], decision: Decision, sent: Sent, times: int = 1
    ) -> None:
        """Keep what a check has told about those to come: that they are denied, until then.

        Called for a denial; and for one that spent, so that less remains than it cost. `times` is
        how many checks that spent were one call; the decision is that of the last.
        """
        commands, subject, cost = asked
        answers = commands.answers
        question = _question([asked])
        place = (commands.field, subject)
        if not decision.allowed:
            if self._longest_ns and answers.lasts(answer, cost):
                denial = self._denial([answer], decision.retry_after_ns, sent, (place,))
                self.denials.keep(question, denial, sent.mark)
            return
        told = None
        if self._longest_ns and decision.remaining < cost:
            told = answers.after(answer, times * cost, cost)
        if told is None or not answers.lasts(told, cost):
            if subject in self.kept:
                self.denials.spent([place])
            return
        follows = answers.check(told, cost, sent.early_ns)
        denial = self._denial([told], follows.retry_after_ns, sent, (place,))
        self.denials.spent([place], question, denial, sent.mark)

    def find_together(
        self, asked: Sequence[Asked], now: Now, early_ns: int
    ) -> list[Decision] | None:
        """The decisions on several subjects at once, if a denial of just these is kept."""
        if not self.kept:
            return None
        now_ns = _moment_ns(now, early_ns)
        denial = self.denials.find(_question(asked), now_ns)
        if denial is None:
            return None
        found = [
            commands.answers.check(_later(answer, denial.told_ns, now, now_ns), cost, early_ns)
            for (commands, _, cost), answer in zip(asked, denial.answer, strict=True)
        ]
        for decision in found:
            if not decision.allowed:
                self._count(decision.rule)
        return found

    def _count(self, rule: str) -> None:
        self.by_rule[rule] = self.by_rule.get(rule, 0) + 1

    def keep_together(
        self,
        asked: Sequence[Asked],
        answers: Sequence[list[int]],
        decisions: Sequence[Decision],
        sent: Sent,
    ) -> None:
        """Keep that these were denied together, until the first that denied would not.

        Called when those that were charged have been paid back: whoever asked in between may have
        been denied for it. Not kept where units were granted: one that passes now may not when
        those are over.
        """
        charged = _places(asked, answers, passed=True)
        for (commands, _, cost), answer in zip(asked, answers, strict=True):
            told = commands.answers
            if not self._longest_ns or told.granted(answer) or not told.lasts(answer, cost):
                self.denials.paid_back(charged, sent.sent_ns)
                return
        waits = [decision.retry_after_ns for decision in decisions if not decision.allowed]
        places = _places(asked, answers, passed=False)
        denial = self._denial(list(answers), min(waits), sent, places)
        self.denials.paid_back(charged, sent.sent_ns, _question(asked), denial, sent.mark)

    def spend_all(self, asked: Sequence[Asked]) -> None:
        """All of them were charged; or nobody knows which."""
        self.denials.spent([(commands.field, subject) for commands, subject, _ in asked])

    def drop(self, subject: str) -> None:
        """The subject was given something back, or more, or all."""
        self.denials.given(subject)

    def forget(self) -> None:
        """All of it, in a child process too."""
        self.denials.reset()
        self.kept = self.denials.kept

    def _denial(
        self, answers: list[list[int]], wait_ns: int, sent: Sent, places: tuple[Place, ...]
    ) -> Denial[list[list[int]]]:
        # By a test's clock the time that was sent along is the one that was decided at.
        told_ns = time.monotonic_ns() if type(sent.now) is bytes else sent.sent_ns
        until_ns = sent.sent_ns + min(wait_ns, self._longest_ns)
        return Denial(sent.sent_ns, until_ns, told_ns, answers, places)


def _question(asked: Sequence[Asked]) -> tuple[tuple[bytes, str, int], ...]:
    return tuple((commands.gate, subject, cost) for commands, subject, cost in asked)


def _places(
    asked: Sequence[Asked], answers: Sequence[list[int]], *, passed: bool
) -> tuple[Place, ...]:
    """Where the script let pass, or where it denied."""
    return tuple(
        (commands.field, subject)
        for (commands, subject, _), answer in zip(asked, answers, strict=True)
        if (answer[0] >= 0) is passed
    )


def _moment_ns(now: Now, early_ns: int) -> int:
    """Now, by the clock that decides: a test's, or ours for how long the server's has run on."""
    return now * NS_PER_US + early_ns if type(now) is int else time.monotonic_ns()


def _later(answer: list[int], told_ns: int, now: Now, now_ns: int) -> list[int]:
    """The script's answer as of now, if nothing but time has passed."""
    denied = answer[0] < 0
    at_us = ~answer[0] if denied else answer[0]
    # Down: what is told to wait is rounded up by it.
    at_us = now if type(now) is int else at_us + max(now_ns - told_ns, 0) // NS_PER_US
    return [~at_us if denied else at_us, *answer[1:]]
