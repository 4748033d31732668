"""Denials that are kept, so that whoever asks again too soon costs the store nothing.

A denial says itself how long it holds: until its retry-after, because nothing but time gives quota
back. Until then the same question has the same answer, and a store that is a trip away need not be
asked. A client that is denied and asks again without waiting, the retry storm, is then answered
from here.

Three things end a denial sooner: a refund, a grant or a reset. Those of this process drop what is
kept of the subject, and whatever was asked before they were done is not kept any more. Those of
other processes are not heard of. So a denial is kept for a second at most, as a rule: that is how
late a unit given back elsewhere may be seen here. A changed limit is another question.

One thing makes a denial last longer: that a smaller cost was allowed meanwhile. It drops what is
kept too, here; where another process spent, a denial of a cost above 1 may for that second tell of
more than remains. A cost of 1 is denied only where nothing remains.

Whoever spends the last unit knows the denial that follows, and need not ask for it either.

What is kept only ever denies, so no fault of it admits anything; one that was dropped or evicted
costs a trip and nothing else. Times are of any clock, as long as it is the same one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable
from typing import Any, Final, Generic, NamedTuple, TypeVar

ENTRIES_MAX: Final = 16_384
# Subjects whose last drop is known; for the others, the last that was forgotten counts.
DROPS_MAX: Final = 1_024

Answer = TypeVar("Answer")


class Denial(NamedTuple, Generic[Answer]):
    """What was answered, and from when until when it is as good as a new answer."""

    sent_ns: int
    """When it was asked for. The store decided then or later."""
    until_ns: int
    """The question is to be asked again from here on."""
    told_ns: int
    """When it was answered. The store decided then or earlier."""
    answer: Answer


class Denials(Generic[Answer]):
    """Bounded; the subject whose denial is oldest goes first. For any number of threads.

    A *question* is whatever tells two checks of a subject apart: the limits and the cost.
    """

    __slots__ = ("_drops", "_forgotten", "_lock", "count", "entries_max", "hits", "kept", "mark")

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self.entries_max = entries_max
        self.reset()

    def reset(self) -> None:
        """Forget everything: also for a child process, whose parent may have been half way."""
        self._lock = threading.Lock()
        # By subject, so that a subject's denials go together. Read without the lock.
        self.kept: dict[str, dict[Hashable, Denial[Answer]]] = {}
        self.count = 0
        # Questions that were answered from here; counted without a lock: about right.
        self.hits = 0
        # Grows with each drop. Noted before a question is sent, it tells whether one came since.
        self.mark = 0
        self._drops: dict[str, int] = {}
        self._forgotten = 0

    def find(
        self, subjects: Collection[str], question: Hashable, now_ns: int
    ) -> Denial[Answer] | None:
        """The denial that is good now, if it is kept for each of the subjects."""
        found: Denial[Answer] | None = None
        for subject in subjects:
            found = self.kept.get(subject, _NOTHING).get(question)
            if found is None:
                return None
        # A clock that was set back is before it was asked: nobody knows what was true then.
        if found is None or not found.sent_ns <= now_ns < found.until_ns:
            return None
        self.hits += 1
        return found

    def keep(
        self, subjects: Collection[str], question: Hashable, denial: Denial[Answer], mark: int
    ) -> None:
        """Keep a denial, unless a subject of it was dropped since `mark` was read."""
        with self._lock:
            if self._undisturbed(subjects, mark):
                for subject in subjects:
                    self._put(subject, question, denial)

    def drop(self, subject: str) -> None:
        """A subject was given something, or spent: keep no denial that was asked for before now."""
        with self._lock:
            self._drop(subject)

    def drop_for(
        self,
        dropped: Collection[str],
        subjects: Collection[str],
        question: Hashable,
        denial: Denial[Answer],
        mark: int,
    ) -> None:
        """`drop` some, because of what was asked; and `keep` the denial that it came to.

        Whoever spends the last unit drops what is kept, and knows what follows. Subjects that are
        denied together have been charged and paid back, and are still denied together.
        """
        with self._lock:
            undisturbed = self._undisturbed(subjects, mark)
            for subject in dropped:
                self._drop(subject)
            if undisturbed:
                for subject in subjects:
                    self._put(subject, question, denial)

    def _undisturbed(self, subjects: Collection[str], mark: int) -> bool:
        return all(self._drops.get(subject, self._forgotten) <= mark for subject in subjects)

    def _put(self, subject: str, question: Hashable, denial: Denial[Answer]) -> None:
        # To the end: the oldest are first.
        denials = self.kept.pop(subject, {})
        self.count -= len(denials)
        while self.count + len(denials) >= self.entries_max and (self.kept or denials):
            if self.kept:
                self.count -= len(self.kept.pop(next(iter(self.kept))))
            else:
                denials = {}
        denials[question] = denial
        self.count += len(denials)
        self.kept[subject] = denials

    def _drop(self, subject: str) -> None:
        self.mark += 1
        self._drops.pop(subject, None)
        self._drops[subject] = self.mark
        if len(self._drops) > DROPS_MAX:
            self._forgotten = self._drops.pop(next(iter(self._drops)))
        self.count -= len(self.kept.pop(subject, _NOTHING))


_NOTHING: Final[dict[Hashable, Any]] = {}
