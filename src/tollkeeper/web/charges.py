"""What a request was charged, and what it turns out to cost.

A request is charged on its way in, so that no number of them at once is ever over a limit. What it
really cost may be known only afterwards: the tokens that a model wrote, or that a login succeeded
and was no guess. The application says so on the request's *charge*, with a plain call from sync or
async code. The last word counts. The middleware applies the difference through `Limiter.settle`, at
the latest once the response has gone out.

A charge keeps what is charged now beside what is wanted, so applying it twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tollkeeper.core.model import UNLIMITED, CheckResult, Decision, Request, units_of
from tollkeeper.core.subjects import Key
from tollkeeper.decide.combine import combine_decisions

# Of a request that no limit was asked about: `skip` said so, or there is none.
PASSED: Final = CheckResult(Decision(True, UNLIMITED, UNLIMITED.capacity), kind="unlimited")


class Charge:
    """What one request was charged, and on what grounds.

    >>> charge = Charge(PASSED)
    >>> charge.decision.allowed
    True
    >>> charge.settle(37)
    """

    __slots__ = ("_charged", "_ruling", "_wanted", "changed", "decision", "key")

    def __init__(self, ruling: CheckResult, key: Key | Request = "", units: int = 0) -> None:
        """`ruling` has spent `units` of `key`'s quota, if it allowed the request."""
        self._ruling: CheckResult | None = ruling
        self.decision = ruling.decision
        """What was decided on the request."""
        self.key = key
        self._charged = self._wanted = units
        self.changed = False
        """Whether the application has said something that is not applied yet."""

    @property
    def ruling(self) -> CheckResult:
        """What was decided on the request, and on what grounds."""
        return PASSED if self._ruling is None else self._ruling

    def settle(self, units: int) -> None:
        """Make the request cost so many units in all. The last call counts.

        What is more than was charged is spent as far as there is room: the request was served.
        Raises InvalidCost.
        """
        self._wanted = units_of(units, "units")
        self.changed = True

    def refund(self) -> None:
        """Make the request cost nothing."""
        self._wanted = 0
        self.changed = True

    @property
    def units(self) -> int:
        """What is charged now."""
        return self._charged

    def take(self, counts: bool = True) -> tuple[int, int] | None:
        """What is charged and what is to be, if that differs; from then on the latter is.

        `counts` is False for a request whose outcome costs nothing.
        """
        self.changed = False
        wanted = self._wanted if counts else 0
        decision = self.decision
        # A degraded answer spent nothing, nor did a denied one: there is nothing to settle.
        charged = decision.allowed and not decision.degraded and self.ruling.kind == "limited"
        if not charged or wanted == self._charged:
            return None
        due = self._charged, wanted
        self._charged = wanted
        return due

    def __repr__(self) -> str:
        return f"<Charge of {self._wanted} units: {self.decision!r}>"


def joined(rulings: Sequence[CheckResult]) -> CheckResult:
    """One ruling of those on one request, in the order they were made; only the last can deny."""
    last = rulings[-1]
    if len(rulings) == 1 or last.kind == "blocked":
        return last
    limited = [each for each in rulings if each.kind == "limited"]
    shadow_denied = tuple(name for each in rulings for name in each.shadow_denied)
    if last.decision.allowed and not limited:
        exempt = [each for each in rulings if each.kind == "exempt"]
        return (exempt or rulings)[0]._replace(shadow_denied=shadow_denied)
    denied = not last.decision.allowed
    return CheckResult(
        last.decision if denied else combine_decisions([each.decision for each in limited]),
        tuple(rule for each in rulings for rule in each.applied),
        last.kind if denied else "limited",
        shadow_denied,
        _counted(rulings),
    )


def _counted(rulings: Sequence[CheckResult]) -> tuple[tuple[str, int], ...]:
    """Who is counted by each rule of all the rulings, if each of them knows."""
    if any(len(each.counted) != len(each.applied) for each in rulings):
        return ()
    return tuple(who for each in rulings for who in each.counted)
