"""The decider: several charges become one answer; all of them are made, or none.

Charges of one *group* are decided in one step: the local table, one server, one global rule. If a
request has charges in several groups, no step covers all of them:

1. The first group is charged. The others are looked at, at the same time.
2. If all charges have room, the other groups are charged.
3. If a charge is denied or fails, all charges made so far are returned.

The caller orders the groups: a group that is charged for a request that another one denies gives
its units back a moment later, so the group that is most likely to deny comes first.

The bound: never over, because a group admits nothing that it has no room for. A denied request
costs nothing once its charges are returned. Two outcomes are left, and both only ever admit fewer:

- A charge whose outcome is not known (the reply did not arrive in time) is not returned: if it was
  never made, its return would give away the units of other requests.
- A return that fails leaves the units charged.

`lost` counts both.

A caller on asyncio that is cancelled has spent nothing: its charges go on in the background, and
are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from ratekeeper.core.errors import StoreError, StoreTimeout
from ratekeeper.core.steps import Call, CallerGone, Steps, Together, asking
from ratekeeper.decide.combine import uncharged
from ratekeeper.decide.store import Answer, Charge, Counter


class Lost:
    """Units of denied requests that stay charged in this process."""

    def __init__(self) -> None:
        self.unknown = 0
        """Charges whose outcome is not known."""
        self.returns = 0
        """Returns that failed."""


lost = Lost()


class Group(NamedTuple):
    """Charges that are decided in one step, by their positions in the request."""

    decide: Callable[[Sequence[Charge], Container[int]], Any]
    """Charges all of them or none, as `Store.check_together`."""
    places: Sequence[int]


def deciding(
    groups: Sequence[Group], charges: Sequence[Charge], optional: Container[int] = ()
) -> Steps[list[Answer]]:
    """Decide charges in several groups: all have room, or none is charged.

    A charge that cannot be decided has a StoreError as its answer. It denies the others, unless its
    position is `optional`. Raises CapacityError; nothing is charged then.
    """
    decision = _Decision(charges, optional)
    first, *others = groups
    try:
        yield from decision.ask([first], [at for group in others for at in group.places])
        if others and decision.passes:
            # A look that failed is not repeated: its charge is optional, and answered by a policy.
            rest = [Group(each.decide, decision.without_errors(each.places)) for each in others]
            yield from decision.ask([each for each in rest if each.places])
    except BaseException:
        yield from decision.undo()
        raise
    if not decision.passes:
        yield from decision.undo()
    if decision.cancelled:
        raise CallerGone
    return [decision.answers[at] for at in range(len(charges))]


def alone(charges: Sequence[Charge], _: Container[int]) -> Any:
    """Decide a group of one charge, whose counter is decided in no step with others."""
    return asking(_alone, *charges[0])


def _alone(counter: Counter, subject: str, units: int) -> Steps[list[Answer]]:
    return [(yield Call(counter.check, subject, units))]


def passes(answers: Mapping[int, Answer], optional: Container[int]) -> bool:
    """Return True if no charge is denied, and only optional ones failed."""
    return all(
        at in optional if isinstance(answer, StoreError) else answer.allowed
        for at, answer in answers.items()
    )


def returning(charges: Sequence[Charge], answers: Sequence[Answer]) -> Steps[list[Answer]]:
    """Return the units of these charges; return their answers as if none had been made."""
    calls = []
    left: list[Answer] = []
    for (counter, subject, units), answer in zip(charges, answers, strict=True):
        if isinstance(answer, StoreError):
            left.append(answer)
            continue
        if answer.charged_ns is not None:
            calls.append(Call(counter.refund, subject, units, answer.charged_ns))
        left.append(uncharged(answer, units))
    if calls:
        results = yield Together(calls, completes=True)
        for result in results:
            if isinstance(result, StoreError):
                lost.returns += 1
            elif isinstance(result, BaseException):
                raise result
    return left


class _Decision:
    """The answers so far, and the charges that were made."""

    def __init__(self, charges: Sequence[Charge], optional: Container[int]) -> None:
        self.answers: dict[int, Answer] = {}
        self._charges = charges
        self._optional = optional
        self._charged: list[int] = []
        self._unknown = 0
        self.cancelled = False
        """True if the caller does not wait any more."""

    @property
    def passes(self) -> bool:
        """True if every charge has room and the caller waits."""
        return not self.cancelled and passes(self.answers, self._optional)

    def without_errors(self, places: Sequence[int]) -> list[int]:
        """Return the positions that have no error."""
        return [at for at in places if not isinstance(self.answers[at], StoreError)]

    def ask(self, groups: Sequence[Group], looks: Sequence[int] = ()) -> Steps[None]:
        """Charge the groups and look at the charges at these positions, all at the same time."""
        calls = [self._charge(group) for group in groups]
        calls += [Call(self._charges[at][0].peek, *self._charges[at][1:]) for at in looks]
        batch = Together(calls, completes=True)
        results = yield batch
        self.cancelled |= batch.cancelled
        defect: BaseException | None = None
        for group, result in zip(groups, results, strict=False):
            if isinstance(result, StoreError):
                self._unknown += isinstance(result, StoreTimeout)
                self.answers.update(dict.fromkeys(group.places, result))
            elif isinstance(result, BaseException):
                defect = defect or result
            else:
                self.answers.update(zip(group.places, result, strict=True))
                self._charged += group.places
        for at, result in zip(looks, results[len(groups) :], strict=True):
            if isinstance(result, BaseException) and not isinstance(result, StoreError):
                defect = defect or result
            else:
                self.answers[at] = result
        if defect is not None:
            raise defect

    def _charge(self, group: Group) -> Call:
        optional = [place for place, at in enumerate(group.places) if at in self._optional]
        return Call(group.decide, [self._charges[at] for at in group.places], optional)

    def undo(self) -> Steps[None]:
        """Return the units of all charges that were made."""
        lost.unknown += self._unknown
        places, self._charged = self._charged, []
        charges = [self._charges[at] for at in places]
        left = yield from returning(charges, [self.answers[at] for at in places])
        self.answers.update(zip(places, left, strict=True))
