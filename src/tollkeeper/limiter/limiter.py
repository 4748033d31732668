"""The path for threads: a check, and all that can be made of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import ParamSpec, Self, TypeVar, cast

from tollkeeper.core import switches
from tollkeeper.core.clock import seconds_from_ns
from tollkeeper.core.errors import CapacityError, ConfigError, LimitExceeded, StoreError
from tollkeeper.core.model import CheckResult, Decision, Request, decision_with, units_of
from tollkeeper.core.subjects import Key
from tollkeeper.limiter.arguments import (
    CostSource,
    KeySource,
    cost_of,
    key_of,
    kind_of,
    name_of,
    request_of,
)
from tollkeeper.limiter.path import SETTLE_ATTEMPTS_MAX, Duration, Path, less, pause_ns, to_settle
from tollkeeper.rules.explain import Explanation
from tollkeeper.rules.ruled import RuledGate

P = ParamSpec("P")
R = TypeVar("R")


class Limiter(Path):
    """Limits by key, for threads.

    >>> limiter = Limiter("2/minute")
    >>> [bool(limiter.check("user:42")) for _ in range(3)]
    [True, True, False]

    Safe to share between threads. With `memory://` and `shared://` a check does no I/O.
    """

    def _bind(self) -> None:
        # On the instance, so that `limiter.check` is the store's own callable and no Python runs
        # in between; a subclass that has its own `check` keeps it.
        if type(self).check is _CHECK:
            self.check = self._check  # type: ignore[method-assign]  # see above

    def check(self, key: Key | Request, cost: int = 1) -> Decision:
        """Spend `cost` units of the key's quota, if all limits have room; else spend nothing.

        Raises InvalidKey and InvalidCost for what is not a key or a cost, and CapacityError for
        a cost that no wait could make fit.
        """
        return self._check(key, cost)

    def peek(self, key: Key | Request, cost: int = 1) -> Decision:
        """What `check` would answer now. Spends nothing."""
        return self._decide(self._gate.peek, key, cost)

    def evaluate(self, key: Key | Request, cost: int = 1, *, spend: bool = True) -> CheckResult:
        """`check` (or, without `spend`, `peek`) with its grounds, for an answer to a client."""
        if self._rules is None or switches.limiting_off:
            return self._ruling((self.check if spend else self.peek)(key, cost))
        rules = cast("RuledGate", self._rules)
        return rules.evaluate(request_of(key), units_of(cost, "cost"), spend=spend)

    def evaluate_all(self, asked: Sequence[tuple[Key | Request, int]]) -> list[CheckResult]:
        """A ruling for each (key, cost), in order; if any is denied, nothing is spent by any.

        Raises what `check` raises, and spends nothing then.
        """
        if switches.limiting_off:
            return [self.evaluate(key, cost) for key, cost in asked]
        if self._rules is not None:
            rules = cast("RuledGate", self._rules)
            return rules.evaluate_all(
                [(request_of(key), units_of(cost, "cost")) for key, cost in asked]
            )
        found = [(self._gate, *self._asked(key, cost)) for key, cost in asked]
        try:
            return [self._ruling(each) for each in self._store.check_together(found)]
        except StoreError as error:
            return [
                self._ruling(self._degraded(error, key, subject, cost, spend=True))
                for (key, _), (_, subject, cost) in zip(asked, found, strict=True)
            ]

    def settle(self, key: Key | Request, reserved: int, actual: int) -> int:
        """Make a request that was charged `reserved` units cost `actual`; how many did not fit.

        What was too much is given back. What is missing is spent as far as there is room: the
        request was served, so nobody is denied, and what did not fit is told. Raises StoreError.
        """
        units = to_settle(reserved, actual)
        if units < 0:
            self.refund(key, -units)
        left = attempt = max(units, 0)
        for _ in range(SETTLE_ATTEMPTS_MAX):
            attempt = min(attempt, left)
            if not attempt:
                break
            try:
                look = self.peek(key, attempt)
            except CapacityError:
                look = decision_with(self.peek(key, 0), allowed=False)
            if look.degraded:
                break
            if not look.allowed:
                attempt = less(look, attempt)
                continue
            spent = self.check(key, attempt)
            if spent.degraded:
                break
            if spent.allowed:
                left -= attempt
            else:  # of a rule in parts, a look sees all and a check meets one
                attempt //= 2
        return left

    def explain(self, request: Request, cost: int = 1) -> Explanation:
        """Which rules match and why, which do not, and what each would answer. Spends nothing."""
        rules = cast("RuledGate", self._ruled_gate())
        return rules.explain(request_of(request), units_of(cost, "cost"))

    def refund(self, key: Key | Request, cost: int = 1) -> None:
        """Give units back, never beyond an untouched quota. Raises StoreError.

        What was drawn from a grant is spent: only the limits themselves get units back.
        """
        subject, cost = self._asked(key, cost)
        if not switches.limiting_off:
            self._gate.refund(subject, cost)

    def grant(self, key: Key | Request, units: int, ttl: Duration | None = None) -> None:
        """Give extra units on top of every limit, for `ttl` seconds (by default one window).

        They are drawn on only when the limit itself has no room. Raises StoreError.
        """
        ttl_ns = self._ttl_ns(ttl)
        self._gate.grant(self._identify(key), units_of(units, "units"), ttl_ns)

    def reset(self, key: Key | Request) -> None:
        """Forget what the key spent and was granted. Raises StoreError."""
        self._gate.reset(self._identify(key))

    def wait(self, key: Key | Request, cost: int = 1, timeout: Duration | None = None) -> Decision:
        """Spend `cost` units, sleeping until they fit; at most `timeout` seconds in all.

        Answers at once, denied, when the wait would be longer than the timeout. A leaky bucket's
        delay is slept too, so an allowed decision means: now.
        """
        deadline_ns = self._deadline_ns(timeout)
        while True:
            decision = self.check(key, cost)
            if late_ns := self._late_ns(decision, deadline_ns):
                return self._too_late(key, cost, decision, late_ns)
            self._sleep(key, cost, decision)
            if decision.allowed:
                return decision_with(decision, delay_ns=0)

    @contextmanager
    def hold(
        self,
        key: Key | Request,
        cost: int = 1,
        *,
        wait: Duration = 0,
        refund_on_error: bool = False,
    ) -> Iterator[Decision]:
        """Spend on the way in; raise LimitExceeded instead of running the block when denied.

        `wait` is how many seconds to wait for room. With `refund_on_error` a block that raises
        costs nothing.
        """
        decision = self._pass(key, cost, wait)
        try:
            yield decision
        except BaseException:
            if refund_on_error:
                self._take_back(key, cost, decision)
            raise

    def limit(
        self, key: KeySource = None, cost: CostSource = 1, *, wait: Duration = 0
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate a function: each call spends, and raises LimitExceeded when denied.

        `key` is a key, or a function of the call's arguments that returns one; by default the
        decorated function itself is the key. `cost` likewise. `wait` as in `hold`.
        """

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            if kind_of(function) != "plain":
                raise ConfigError(f"{name_of(function)} is async; decorate it with AsyncLimiter")

            @wraps(function)
            def limited(*args: P.args, **kwargs: P.kwargs) -> R:
                subject = key_of(key, function, args, kwargs)
                self._pass(subject, cost_of(cost, args, kwargs), wait)
                return function(*args, **kwargs)

            return limited

        return decorate

    def _pass(self, key: Key | Request, cost: int, wait: Duration) -> Decision:
        decision = self.wait(key, cost, wait) if wait else self.check(key, cost)
        if not decision.allowed:
            raise LimitExceeded(decision)
        self._sleep(key, cost, decision)
        return decision

    def _sleep(self, key: Key | Request, cost: int, decision: Decision) -> None:
        """Sleep as a decision asks; whoever is interrupted in the queue leaves it."""
        if not (pause := pause_ns(decision)):
            return
        try:
            self._clock.sleep(seconds_from_ns(pause))
        except BaseException:
            self._take_back(key, cost, decision)
            raise

    def _take_back(self, key: Key | Request, cost: int, decision: Decision) -> None:
        """Undo an admission, if it was charged: a degraded one was not.

        A store that fails here has the units; the caller's own error is the one to tell.
        """
        if decision.allowed and not decision.degraded:
            with suppress(StoreError):
                self.refund(key, cost)

    def _too_late(
        self, key: Key | Request, cost: int, decision: Decision, late_ns: int
    ) -> Decision:
        """An admission whose turn comes after the deadline is given back, and denied."""
        if not decision.allowed:
            return decision
        self._take_back(key, cost, decision)
        look = self.peek(key, cost)
        return decision_with(look, allowed=False, retry_after_ns=late_ns, delay_ns=0)

    def close(self) -> None:
        """Close the store, if this limiter opened it."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


# As it was defined here: a test may have put something else in its place.
_CHECK = Limiter.check
