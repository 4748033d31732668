"""The reference as a counter: the pure algorithms and a dict."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ratekeeper.core.errors import CapacityError
from ratekeeper.core.model import AlgorithmName, Decision, Limit, decision_fields, decision_with
from ratekeeper.decide import credit as credits_
from ratekeeper.decide.algorithms import ALGORITHMS, Outcome
from ratekeeper.decide.combine import combine
from ratekeeper.decide.credit import Credit

CHARGES_KEPT = 40

States = dict[tuple[str, str, str], tuple[Any, Credit | None]]


def answer(verb: Callable[..., Decision], *arguments: Any, **options: Any) -> tuple[Any, ...]:
    """Return the answer of a verb for comparison: every field, or the cost that never fits."""
    try:
        return decision_fields(verb(*arguments, **options))
    except CapacityError as error:
        return "can never fit", error.cost, error.limit


class ReferenceCounter:
    """The answers that every counter must give. States are never dropped.

    `charges` are the times of the latest charges of any subject, for refunds.
    """

    def __init__(
        self,
        states: States,
        limits: tuple[Limit, ...],
        rule: str,
        algorithms: Mapping[AlgorithmName, Any] = ALGORITHMS,
    ) -> None:
        self.limits = limits
        self._states = states
        self._rule = rule
        self.charges: deque[int] = deque(maxlen=CHARGES_KEPT)
        self._parts = [(limit, limit.identity, algorithms[limit.algorithm]) for limit in limits]

    def check(self, subject: str, cost: int, now_ns: int, *, spend: bool) -> Decision:
        outcomes, after = self._decide(subject, cost, now_ns)
        if all(outcome.allowed for outcome in outcomes):
            if spend and cost:
                self._states.update(after)
            elif not spend:
                outcomes, after = self._decide(subject, 0, now_ns)
        granted = [credit[0] if credit else 0 for _, credit in after.values()]
        decision = combine(self.limits, outcomes, self._rule, now_ns, granted)
        if decision.charged_ns is not None:
            self.charges.append(decision.charged_ns)
        if decision.allowed:
            return decision
        held = [
            (algorithm, *self._states.get((self._rule, identity, subject), (None, None)), limit)
            for limit, identity, algorithm in self._parts
        ]
        wait_ns = credits_.wait_together(held, now_ns, cost, decision.retry_after_ns)
        return decision_with(decision, retry_after_ns=wait_ns)

    def charged_ns(self, charge: int) -> int | None:
        """Return the time of one of the latest charges; None if there is none, or for 0."""
        return self.charges[-charge] if 0 < charge <= len(self.charges) else None

    def refund(self, subject: str, units: int, charged_ns: int | None, now_ns: int) -> None:
        for limit, identity, algorithm in self._parts:
            key = (self._rule, identity, subject)
            state, credit = self._states.get(key, (None, None))
            self._states[key] = (
                algorithm.refund(state, limit, now_ns, units, charged_ns),
                credit,
            )

    def owe(self, subject: str, units: int, now_ns: int) -> int:
        forgiven = 0
        for limit, identity, algorithm in self._parts if units else ():
            key = (self._rule, identity, subject)
            state, credit = self._states.get(key, (None, None))
            after, left, beyond = credits_.owe(algorithm, state, credit, limit, now_ns, units)
            forgiven = max(forgiven, beyond)
            self._states[key] = (after, left)
        return forgiven

    def owed(self, subject: str, now_ns: int) -> int:
        found = 0
        for limit, identity, algorithm in self._parts:
            state, _ = self._states.get((self._rule, identity, subject), (None, None))
            found = max(found, algorithm.debt_of(state, limit, now_ns))
        return found

    def grant(self, subject: str, units: int, ttl_ns: int | None, now_ns: int) -> None:
        if units == 0:
            return
        for limit, identity, _ in self._parts:
            key = (self._rule, identity, subject)
            state, credit = self._states.get(key, (None, None))
            until_ns = now_ns + (limit.window_ns if ttl_ns is None else ttl_ns)
            self._states[key] = (state, credits_.granted(credit, units, now_ns, until_ns))

    def reset(self, subject: str) -> None:
        for _, identity, _ in self._parts:
            self._states.pop((self._rule, identity, subject), None)

    def _decide(self, subject: str, cost: int, now_ns: int) -> tuple[list[Outcome], States]:
        outcomes = []
        after: States = {}
        for limit, identity, algorithm in self._parts:
            key = (self._rule, identity, subject)
            state, credit = self._states.get(key, (None, None))
            if credit is None:
                state, outcome = algorithm.decide(state, limit, now_ns, cost)
            else:
                state, credit, outcome = credits_.decide(
                    algorithm, state, credit, limit, now_ns, cost
                )
            outcomes.append(outcome)
            after[key] = (state, credit)
        return outcomes, after
