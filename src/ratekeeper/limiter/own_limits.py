"""The limits of a limiter without a document: one rule, which every key matches."""

from __future__ import annotations

from typing import Final

from ratekeeper.core.costs import REQUESTS, Cost, units_in
from ratekeeper.core.errors import ConfigError
from ratekeeper.core.model import DEFAULT_NAME, AppliedRule, Consistency, Limits, Request
from ratekeeper.core.subjects import Key, subject_of, subject_of_request
from ratekeeper.decide.algorithms.in_flight import new_stamp
from ratekeeper.decide.regional import AcrossRegions
from ratekeeper.decide.store import Store
from ratekeeper.rules.compiled import (
    FACTOR_STEPS,
    CheckPlan,
    LimitChoice,
    PreparedLimits,
    RuleCheck,
    check_units,
    stamped_plan,
)
from ratekeeper.rules.document.model import Rule

_new: Final = tuple.__new__


class OwnLimits:
    """A limiter's own limits, prepared on its store."""

    def __init__(
        self,
        store: Store,
        limits: Limits,
        name: str,
        by: tuple[str, ...] | None,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
    ) -> None:
        self.limits = limits
        self._by = by
        self.rule = Rule(
            id=name,
            by=(),
            limits=limits,
            consistency=consistency,
            scope="region" if across is None else "global",
            across_regions=across,
        )
        self._choice = LimitChoice(limits, consistency, "default")
        self._prepared = PreparedLimits(
            limits, name, 1, store.counter, consistency, across, name or DEFAULT_NAME
        )
        (self.counter,) = self._prepared.counters

    @property
    def applied(self) -> tuple[AppliedRule, ...]:
        """The rule, as results have it."""
        return self._prepared.alone

    def plan(self, key: Key | Request, cost: Cost) -> CheckPlan:
        """Return the one charge of a check. Raises InvalidCost for a unit other than requests."""
        subject = self.subject_of(key)
        units = cost
        if not isinstance(units, int):
            check_units(units, (REQUESTS,))
            units = units_in(units, REQUESTS, 1)
        # A third of the time of the constructors, which are written in Python.
        check = _new(
            RuleCheck,
            (
                *(self.counter, subject, units, self.rule, self._choice, FACTOR_STEPS),
                *(self._prepared, subject, 1),
            ),
        )
        plan = _new(CheckPlan, ((check,), (), None, ()))
        return stamped_plan(plan, new_stamp()) if self._prepared.has_slots else plan

    def subject_of(self, key: Key | Request) -> str:
        """Return the subject that a key or a request is counted under."""
        if not isinstance(key, Request):
            return subject_of(key)
        if self._by is None:
            raise ConfigError(
                "to check a Request, pass the fields that it is counted by: "
                'Limiter("100/minute", by=["tenant", "user"])'
            )
        return subject_of_request(key, self._by)
