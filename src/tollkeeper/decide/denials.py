"""Denials that are kept, so that whoever asks again too soon costs the store nothing.

A denial says itself how long it holds: until its retry-after, because nothing but time gives quota
back. Until then the same question has the same answer, and a store that is a trip away need not be
asked. A client that is denied and asks again without waiting, the retry storm, is then answered
from here.

Three things end a denial sooner: a refund, a grant or a reset. Those of this process drop what is
kept of the subject, and whatever was asked before they were done is not kept any more. Those of
other processes are not heard of. So a denial is kept for a second at most, as a rule: that is how
late a unit given back elsewhere may be seen here. A changed limit is another question.

One thing makes a denial last longer: that a smaller cost was allowed meanwhile, under the same
limits. It drops what is kept too, here; where another process spent, a denial of a cost above 1 may
for that second tell of more than remains. A cost of 1 is denied only where nothing remains.

And one thing makes a denial wrong: that it was decided while a request of several subjects was
charged, which was then denied by another of them and paid back. So what was answered in between is
dropped, whenever it was asked for, and what was known before stays.

A question may be about several subjects, and is denied because of some of them: those are its
*places*. What happens to the others changes nothing: a tenant whose users are all denied, each by a
limit of their own, spends and is paid back all the time.

Whoever spends the last unit knows the denial that follows, and need not ask for it either.

What is kept only ever denies, so no fault of it admits anything; one that was dropped or evicted
costs a trip and nothing else. Times are of any clock, as long as it is the same one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable
from typing import Final, Generic, NamedTuple, TypeVar

ENTRIES_MAX: Final = 16_384
# Places and subjects whose last drop is known; for others, the last that was forgotten counts.
DROPS_MAX: Final = 4_096

Answer = TypeVar("Answer")
# A rule, whichever of its limits are asked for, and the subject that they count.
Place = tuple[Hashable, str]


class Denial(NamedTuple, Generic[Answer]):
    """What was answered, and from when until when it is as good as a new answer."""

    sent_ns: int
    """When it was asked for. The store decided then or later."""
    until_ns: int
    """The question is to be asked again from here on."""
    told_ns: int
    """When it was answered. The store decided then or earlier."""
    answer: Answer
    places: tuple[Place, ...]
    """Where it was denied."""


class Denials(Generic[Answer]):
    """Bounded; the oldest goes first. For any number of threads.

    A *question* is whatever tells two checks apart: limits, subjects and costs.
    """

    __slots__ = ("_drops", "_entries", "_forgotten", "_lock", "entries_max", "hits", "kept", "mark")

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self.entries_max = entries_max
        self.reset()

    def reset(self) -> None:
        """Forget everything: also for a child process, whose parent may have been half way."""
        self._lock = threading.Lock()
        self._entries: dict[Hashable, Denial[Answer]] = {}
        # The questions that a subject is denied in. Read without the lock.
        self.kept: dict[str, set[Hashable]] = {}
        # Questions that were answered from here; counted without a lock: about right.
        self.hits = 0
        # Grows with each drop. Noted before a question is sent, it tells whether one came since.
        self.mark = 0
        self._drops: dict[Hashable, int] = {}
        self._forgotten = 0

    @property
    def count(self) -> int:
        """How many are kept."""
        return len(self._entries)

    def find(self, question: Hashable, now_ns: int) -> Denial[Answer] | None:
        """The denial that is good now."""
        found = self._entries.get(question)
        # A clock that was set back is before it was asked: nobody knows what was true then.
        if found is None or not found.sent_ns <= now_ns < found.until_ns:
            return None
        self.hits += 1
        return found

    def keep(self, question: Hashable, denial: Denial[Answer], mark: int) -> None:
        """Keep a denial, unless something happened at its places since `mark` was read."""
        with self._lock:
            if self._undisturbed(denial, mark):
                self._put(question, denial)

    def given(self, subject: str) -> None:
        """A subject was given something: keep no denial of it that was asked for before now."""
        with self._lock:
            self._note(subject)
            for question in list(self.kept.get(subject, ())):
                self._remove(question)

    def spent(
        self,
        places: Collection[Place],
        question: Hashable = None,
        follows: Denial[Answer] | None = None,
        mark: int = 0,
    ) -> None:
        """Something was spent: drop what was denied there, and keep the denial that follows."""
        with self._lock:
            undisturbed = follows is not None and self._undisturbed(follows, mark)
            for place in places:
                self._drop(place, since_ns=None)
            if follows is not None and undisturbed:
                self._put(question, follows)

    def paid_back(
        self,
        places: Collection[Place],
        since_ns: int,
        question: Hashable = None,
        denial: Denial[Answer] | None = None,
        mark: int = 0,
    ) -> None:
        """Something was spent at `since_ns` and is given back: drop what was denied meanwhile.

        And keep the denial that it was given back for.
        """
        with self._lock:
            undisturbed = denial is not None and self._undisturbed(denial, mark)
            for place in places:
                self._drop(place, since_ns)
            if denial is not None and undisturbed:
                self._put(question, denial)

    def _undisturbed(self, denial: Denial[Answer], mark: int) -> bool:
        last, forgotten = self._drops, self._forgotten
        return all(
            last.get(place, forgotten) <= mark and last.get(place[1], forgotten) <= mark
            for place in denial.places
        )

    def _put(self, question: Hashable, denial: Denial[Answer]) -> None:
        self._remove(question)  # to the end: the oldest are first
        if len(self._entries) >= self.entries_max:
            self._remove(next(iter(self._entries)))
        self._entries[question] = denial
        for _, subject in denial.places:
            self.kept.setdefault(subject, set()).add(question)

    def _remove(self, question: Hashable) -> None:
        denial = self._entries.pop(question, None)
        if denial is None:
            return
        for _, subject in denial.places:
            questions = self.kept.get(subject)
            if questions is not None:
                questions.discard(question)
                if not questions:
                    del self.kept[subject]

    def _drop(self, place: Place, since_ns: int | None) -> None:
        """What is denied at a place; only what was answered since then, if that is told."""
        self._note(place)
        for question in list(self.kept.get(place[1], ())):
            denial = self._entries[question]
            if place in denial.places and (since_ns is None or denial.told_ns >= since_ns):
                self._remove(question)

    def _note(self, what: Hashable) -> None:
        self.mark += 1
        self._drops.pop(what, None)
        self._drops[what] = self.mark
        if len(self._drops) > DROPS_MAX:
            self._forgotten = self._drops.pop(next(iter(self._drops)))
