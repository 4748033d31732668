"""The limiter for threads: the verbs of the path, carried out in the calling thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, Self, TypeVar

from ratekeeper.core.costs import Cost, Costs
from ratekeeper.core.errors import ConfigError
from ratekeeper.core.model import CheckResult, Decision, Request, Settlement, units_of
from ratekeeper.core.steps import run
from ratekeeper.core.subjects import Key
from ratekeeper.limiter.arguments import (
    CostSource,
    CostsSource,
    KeySource,
    cost_of,
    key_of,
    kind_of,
    name_of,
    request_of,
)
from ratekeeper.limiter.renewal import renewed_in_thread
from ratekeeper.limiter.reservations import ReservationVerbs, Reserving
from ratekeeper.limiter.setup import LimiterSetup
from ratekeeper.limiter.verbs import Duration
from ratekeeper.limiter.waiting import Priority
from ratekeeper.rules.explain import Explanation

P = ParamSpec("P")
R = TypeVar("R")


class Limiter(LimiterSetup):
    """Checks keys and requests against limits, for threads.

    >>> limiter = Limiter("2/minute")
    >>> [bool(limiter.check("user:42")) for _ in range(3)]
    [True, True, False]

    Threads can share it. With `memory://` and `shared://` a check does no I/O.
    """

    def _bind(self) -> None:
        self._sleep = self._clock.sleep
        # On the instance: `limiter.check` is the store's own compiled callable, and no Python code
        # runs in between. A subclass that overrides `check` keeps its own.
        if type(self).check is _CHECK:
            self.check = self._quick_check()  # type: ignore[method-assign]  # see above

    def check(self, key: Key | Request, cost: int = 1, *, costs: Costs | None = None) -> Decision:
        """Spend `cost` units of the key's quota if all limits have room; else spend nothing.

        `costs` are costs by unit instead, for rules with a `unit`:
        `{"requests": 1, "tokens": 1_200}`. A rule whose unit is not among them counts the requests,
        each at the rule's own `cost`.

        Raises InvalidKey and InvalidCost for an invalid key or cost, and for a unit that no rule
        counts; CapacityError for a cost that never fits.
        """
        return self._check(key, cost, costs=costs)

    def peek(self, key: Key | Request, cost: int = 1, *, costs: Costs | None = None) -> Decision:
        """Return the decision that `check` would make now. Spends nothing."""
        return run(self._peek(key, cost if costs is None else costs))

    def evaluate(
        self,
        key: Key | Request,
        cost: int = 1,
        *,
        costs: Costs | None = None,
        spend: bool = True,
    ) -> CheckResult:
        """Check (or, without `spend`, peek) and return a result, for an answer to a client."""
        wanted = cost if costs is None else costs
        return self._evaluate(key, wanted) if spend else run(self._peek_result(key, wanted))

    def evaluate_all(self, checks: Sequence[tuple[Key | Request, Cost]]) -> list[CheckResult]:
        """Return a result for each (key, cost), in order; if any is denied, nothing is spent.

        A cost is a number or costs by unit. Raises the errors of `check`, and spends nothing then.
        """
        return run(self._evaluate_all(checks))

    def settle(
        self,
        key: Key | Request,
        reserved: Cost,
        actual: Cost,
        decision: Decision | None = None,
        reservation: str = "",
    ) -> Settlement:
        """Make a request that was charged `reserved` units cost `actual`.

        Both may be costs by unit. A unit that `actual` does not name stays as it was reserved, and
        `actual=0` returns all units.

        Surplus units are refunded, as far as time has not returned them: `decision` is that of the
        reservation, as in `refund`. Missing units are charged in full, because the request was
        served. A limit without room for them *owes* them: nothing is admitted until time has paid
        them back. It owes at most `Limit.debt`; the result says what was forgiven, and what is
        charged in all.

        `reservation` is a text that names this reservation, such as the id of the request. A second
        settlement of this key with the same name changes nothing: the store remembers the last
        1,023 names of a key, until an hour after the last one. A store without room for a name
        applies the settlement all the same. Raises StoreError if units could not be refunded; then
        the settlement can be repeated. A charge that fails is not repeated: see Settlement.
        """
        return run(self._settle(key, reserved, actual, decision, reservation))

    def explain(self, request: Request, cost: int = 1) -> Explanation:
        """Explain which rules apply and why, and the decision of each. Spends nothing."""
        rules = self._rules()
        found = rules.explained(request_of(request), units_of(cost, "cost"))
        return run(self._answers_of(*found))

    def refund(
        self,
        key: Key | Request,
        cost: int = 1,
        decision: Decision | None = None,
        *,
        costs: Costs | None = None,
    ) -> None:
        """Undo a decision that spent `cost` units, or a part of them. Raises StoreError.

        It returns what a check of this `cost`, or of these `costs`, charges to each rule.

        `decision` is the one that `check` returned for this key. It has the time of the charge, and
        the refund returns only units that time has not returned meanwhile. So other requests stay
        within the limits, however late the refund comes. A decision that spent nothing, such as a
        denial or one of the failure policy, returns nothing. Refund a decision once: a second
        refund returns units of other requests.

        Without a decision it is an operator's correction: nothing is known about the charge, so
        requests may exceed the limits by the refunded units. It returns units of the current
        window, the oldest entries of a log, or units in use of a bucket; never more than an
        untouched quota. Units that were drawn from a grant stay spent.
        """
        run(self._refund(key, cost if costs is None else costs, decision))

    def release(self, decision: Decision) -> None:
        """Free the slots that a decision took of limits of requests in flight.

        Call it when the request has ended. It may be called again, and for any decision: it frees
        no slot of another request. A `refund` of the decision frees its slots, too; so do `reserve`
        and the decorator at the end of the block or the call. A slot that is not freed ends after
        the limit's longest time. Raises StoreError.
        """
        run(self._release(decision))

    def renew(self, decision: Decision) -> None:
        """Let the slots of a decision last for the limit's longest time from now.

        For a request that takes longer: call it at a third of that time, as `reserve`, the
        decorator and the middleware do. Raises SlotLost if the time was over and other requests
        have all slots; StoreError.
        """
        run(self._renew(decision))

    def grant(self, key: Key | Request, units: int, ttl: Duration | None = None) -> None:
        """Add extra units on top of every limit for `ttl` seconds (by default one window).

        A check draws on them only if the limit itself has no room. Raises StoreError.
        """
        run(self._grant(key, units, ttl))

    def reset(self, key: Key | Request) -> None:
        """Forget the spent and granted units of the key. Raises StoreError."""
        run(self._reset(key))

    def wait(
        self,
        key: Key | Request,
        cost: int = 1,
        timeout: Duration | None = None,
        priority: Priority = "interactive",
        *,
        costs: Costs | None = None,
    ) -> Decision:
        """Spend `cost` units, sleeping until they fit; at most `timeout` seconds in all.

        Requests of this process that wait for the same subject are served first come, first served.
        Returns a denial at once if the wait would be longer than the timeout, and if 1,000 requests
        wait for the subject already. `priority="batch"` leaves a fifth of each limit to others, and
        lets all others that wait go first. It also sleeps a leaky bucket's delay, so the caller can
        proceed at once after an allowed decision. While the
        store is unavailable and `on_failure` is "open", it limits by the counts of this machine,
        as `reserve` and the decorator do: an outage does not lift the limit.
        """
        return run(self._wait(key, cost if costs is None else costs, timeout, priority))

    def reserve(
        self,
        key: Key | Request,
        cost: int = 1,
        *,
        costs: Costs | None = None,
        wait: Duration = 0,
        priority: Priority = "interactive",
    ) -> Reserving:
        """Charge an estimate before the block runs, and settle what it has used at its end.

        Raises LimitExceeded instead of running the block if the reservation is denied. `wait` is
        how many seconds to wait for room, and `priority` is as in `wait`. The block reports what it
        uses: `reservation.use(37)`.

        A block that never does stays charged as reserved. One that raises and has used nothing is
        refunded. If the process dies, the reservation stays charged.
        """
        making = self._reserving(key, cost if costs is None else costs, wait, priority)
        return Reserving(making, self._renew, self._release_quietly)

    def _reservation_verbs(self) -> ReservationVerbs:
        return ReservationVerbs(
            self._counted_check, run, self._settle, self._take_back, self._clock.now_ns
        )

    def limit(
        self,
        key: KeySource = None,
        cost: CostSource = 1,
        *,
        costs: CostsSource | None = None,
        wait: Duration = 0,
        priority: Priority = "interactive",
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate a function: each call spends, and raises LimitExceeded when denied.

        `key` is a key, or a function of the call's arguments that returns one; by default the
        decorated function itself is the key. `cost` and `costs` likewise. `wait` and `priority` as
        in `reserve`.
        """

        spent = cost if costs is None else costs

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            if kind_of(function) != "plain":
                raise ConfigError(f"{name_of(function)} is async; decorate it with AsyncLimiter")

            @wraps(function)
            def limited(*args: P.args, **kwargs: P.kwargs) -> R:
                subject = key_of(key, function, args, kwargs)
                decision = run(self._pass(subject, cost_of(spent, args, kwargs), wait, priority))
                renewal = renewed_in_thread(self._renew, decision)
                if renewal is None:
                    return function(*args, **kwargs)
                try:
                    return function(*args, **kwargs)
                finally:
                    renewal.stop()
                    run(self._release_quietly(decision))

            return limited

        return decorate

    def close(self) -> None:
        """Close the store, if this limiter opened it."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


# The method as defined here: a test may replace it on the class.
_CHECK = Limiter.check
