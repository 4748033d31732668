"""The decider: several charges become one answer; all of them are made, or none.

Charges of one *group* are decided in one step: the local table, one server, one global rule. A
request with charges in several groups takes more steps:

1. The first group is charged. At the same time, the others are looked at.
2. If all charges have room, the other groups are charged, all at the same time.
3. If a charge is denied or fails, all charges made so far are returned.

The look keeps step 3 rare: without it, each denial by a later group would charge the first one, and
return its units. Another caller may still spend the last units between the look and the charge.
Until the units are back, a third caller may be denied that had room. So the caller puts the group
that is most likely to deny first.

The bounds:

- Never over: a group charges nothing that it has no room for.
- A denied request costs nothing once its charges are returned. A charge is returned at most once,
  and only if its answer said that it was made.
- A caller on asyncio that is cancelled has spent nothing. Its calls go on in the background, and
  their charges are returned.

Two failures leave units of a denied request charged. Both only ever admit fewer, and `lost` counts
both:

- *unknown*: the answer to a charge did not arrive. It is not returned: if it was never made, its
  return would give away the units of other requests.
- *return*: a return failed. It is not repeated: if it was made and only its answer was lost, the
  second one would give away units, too.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ratekeeper.core.errors import (
    CapacityError,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from ratekeeper.core.model import decision_with
from ratekeeper.core.steps import Call, CallerGone, Steps, Together, Undo, asking
from ratekeeper.decide.store import Answer, Charge, Counter


class Lost:
    """Charges of denied requests that may stay charged, counted in this process."""

    def __init__(self) -> None:
        self.unknown = 0
        """Charges whose outcome is not known."""
        self.returns = 0
        """Returns that failed."""


lost: Final = Lost()
# After these, the charge was not made, unless they say that it may have been.
NOT_CHARGED: Final = (CapacityError, StoreFull, StoreUnavailable)
_MAY_BE_COUNTED: Final = "may have been counted"
_NO_ANSWER: Final = StoreTimeout("the call was interrupted")


class Group(NamedTuple):
    """Charges that are decided in one step, by their positions in the request."""

    decide: Callable[[Sequence[Charge], Container[int]], Any]
    """Charges all of them or none, as `Store.check_together`."""
    places: Sequence[int]
    undo: Callable[[], Any] | None = None
    """Return what the last `decide` charged, in one call; by default each charge is refunded."""


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
            rest = [each._replace(places=decision.without_errors(each.places)) for each in others]
            yield from decision.ask([each for each in rest if each.places])
    except GeneratorExit:  # the event loop has ended: what would be returned is only counted
        undo = decision.undo()
        next(undo, None)
        undo.close()
        raise
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
    """Return the units of these charges; return their answers as if none had been made.

    `lost` counts the charges whose error leaves open whether they were made.
    """
    left, _ = yield from _returning(charges, answers, {})
    return left


def _returning(
    charges: Sequence[Charge],
    answers: Sequence[Answer],
    undone: Mapping[int, Callable[[], Any]],
) -> Steps[tuple[list[Answer], bool]]:
    """See `returning`. `undone` has the calls that return the charges of a whole group.

    The second result is False if a return failed.
    """
    calls: list[Call] = []
    own: dict[Callable[[], Any], None] = {}
    left: list[Answer] = []
    totals: dict[tuple[Counter, str], int] = {}
    for at, ((counter, subject, units), answer) in enumerate(zip(charges, answers, strict=True)):
        if isinstance(answer, BaseException):
            lost.unknown += may_be_charged(answer)
            left.append(answer)
            continue
        # An answer also counts the units of the charges before it, which are returned, too.
        total = totals.get((counter, subject), 0)
        if answer.charged_ns is not None:
            if at in undone:
                own[undone[at]] = None
            else:
                calls.append(Undo(counter.refund, subject, units, answer.charged_ns))
            total = totals[counter, subject] = total + units
        if total:
            left.append(decision_with(answer, charged_ns=None, remaining=answer.remaining + total))
        else:
            left.append(answer)
    calls += map(Undo, own)
    failed: Sequence[object] = calls
    try:
        if calls:
            results = yield Together(calls, completes=True)
            failed = [each for each in results if isinstance(each, BaseException)]
    finally:
        lost.returns += len(failed)
    _raise_defects(failed)
    return left, not failed


def may_be_charged(error: BaseException) -> bool:
    """Return True if a charge that has failed may have been made."""
    return not isinstance(error, NOT_CHARGED) or _MAY_BE_COUNTED in str(error)


def _with_failed_return(answer: Answer) -> Answer:
    """Return the error of a charge; it also says that another one may stay charged."""
    if not isinstance(answer, StoreError) or _MAY_BE_COUNTED in str(answer):
        return answer
    both = StoreUnavailable(f"{answer}; another part of the request may have been counted once")
    both.__cause__ = answer
    return both


def _raise_defects(results: Sequence[object]) -> None:
    """Raise the first exception that is no answer."""
    for each in results:
        if isinstance(each, BaseException) and not isinstance(each, StoreError):
            raise each


class _Decision:
    """The answers so far, and the charges that were made."""

    def __init__(self, charges: Sequence[Charge], optional: Container[int]) -> None:
        self.answers: dict[int, Any] = {}
        self.made: list[Group] = []
        """The groups that were sent; the answers say which charges were made."""
        self._charges = charges
        self._optional = optional
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
        for group in groups:  # until the answers are there, any of them may have been charged
            self.made.append(group)
            for at in group.places:
                self.answers[at] = _NO_ANSWER
        batch = Together(calls, completes=True)
        results = yield batch
        self.cancelled |= batch.cancelled
        for group, result in zip(groups, results, strict=False):
            if isinstance(result, BaseException):
                self.answers |= dict.fromkeys(group.places, result)
            else:
                self.answers |= zip(group.places, result, strict=True)
        self.answers |= zip(looks, results[len(groups) :], strict=True)
        _raise_defects(results)

    def _charge(self, group: Group) -> Call:
        optional = [place for place, at in enumerate(group.places) if at in self._optional]
        return Call(group.decide, [self._charges[at] for at in group.places], optional)

    def undo(self) -> Steps[None]:
        """Return the units of all charges that were made."""
        groups, self.made = self.made, []
        places = [at for group in groups for at in group.places]
        own = [group.undo for group in groups for _ in group.places]
        undone = {at: undo for at, undo in enumerate(own) if undo is not None}
        charges = [self._charges[at] for at in places]
        answers = [self.answers[at] for at in places]
        left, returned = yield from _returning(charges, answers, undone)
        self.answers |= zip(places, left, strict=True)
        if not returned:
            self.answers = {at: _with_failed_return(each) for at, each in self.answers.items()}
