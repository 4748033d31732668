"""Reservations: units charged before a block runs, topped up while it runs, settled at its end.

The cost of some requests is known only when they end: the tokens that a model writes, the rows of
an export. Checking first and charging afterwards would admit any number of concurrent requests,
because each of them sees the same room. So a reservation charges an estimate, and the block reports
what it uses.

**Top-ups.** When the reservation is used up, another one as large is charged, with a check like any
other: it takes only units that the limits have room for. A denied top-up is not repeated before its
`retry_after`, so a stream of small chunks makes few calls. What is used beyond all charges is owed,
and charged at the end. `use` returns False while units are owed that the limits had no room for: a
server that streams can stop there.

**The end.** Top-ups follow one another, so all surplus is in the newest charge of each unit. It is
settled with that charge's own decision, because a refund returns only units that time has not.

| the block | the reservation |
|---|---|
| has called `use` | costs what was used; a unit that was never reported stays as reserved |
| has not, and ends | stays charged as reserved |
| raises, with nothing used | is refunded |
| ends with its process | stays charged as reserved |

The end goes on in the background if its task is cancelled. An error of the store at the end is
logged, because the request has been served: its charge stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.costs import REQUESTS, Cost, Costs, used_costs
from ratekeeper.core.errors import CapacityError, ConfigError, RatekeeperError, StoreError
from ratekeeper.core.model import Decision, Request, Settlement
from ratekeeper.core.steps import Call, Steps, Undo, asking, run, run_async
from ratekeeper.core.subjects import Key
from ratekeeper.limiter.renewal import Renew, Renewal, renewed_in_thread, renewed_on_loop

LOG: Final = logging.getLogger("ratekeeper.reservations")

# After a top-up that the store did not answer, the next one waits for this time.
RETRY_NS: Final = NS_PER_SECOND


class ReservationVerbs(NamedTuple):
    """What a reservation needs of its limiter."""

    charge: Callable[[Key | Request, Cost], Steps[Decision]]
    """Charges a top-up, on this machine's counts if the store fails and the policy is `open`."""
    start: Callable[[Steps[None]], asyncio.Task[None] | None]
    """Runs the steps of a top-up, at once or as a task."""
    settle: Callable[[Key | Request, Cost, Cost, Decision], Steps[Settlement]]
    take_back: Callable[[Key | Request, Cost, Decision], Steps[None]]
    now_ns: Callable[[], int]


class Reservation:
    """Units that were charged for a block of code, which reports what it uses of them.

    >>> from ratekeeper import Limiter
    >>> limiter = Limiter("1000/minute")
    >>> with limiter.reserve("user:42", 100) as reservation:
    ...     reservation.use(30), reservation.use(7)
    (True, True)
    >>> limiter.peek("user:42").remaining
    963
    """

    __slots__ = (
        *("_covered", "_has_ended", "_in_flight", "_is_plain", "_key", "_newest", "_reserved"),
        *("_retry_ns", "_used", "_verbs", "decision"),
    )

    def __init__(
        self, verbs: ReservationVerbs, key: Key | Request, cost: Cost, decision: Decision
    ) -> None:
        self.decision = decision
        """The decision that charged the reservation."""
        self._verbs = verbs
        self._key = key
        self._is_plain = isinstance(cost, int)
        self._reserved: Costs = {REQUESTS: cost} if isinstance(cost, int) else dict(cost)
        self._covered = dict(self._reserved)
        """By unit, what all charges cover."""
        self._used: dict[str, int] = {}
        """By unit, what was reported."""
        self._newest = dict.fromkeys(self._reserved, (self._reserved, decision))
        """By unit, the newest charge and its decision."""
        self._retry_ns: int | None = None
        """The time of the next attempt to top up, after a denial."""
        self._in_flight: asyncio.Task[None] | None = None
        self._has_ended = False

    @property
    def used(self) -> int | dict[str, int]:
        """What was used so far: a number, or by unit if costs by unit were reserved."""
        return self._used.get(REQUESTS, 0) if self._is_plain else dict(self._used)

    def use(self, units: int = 0, *, costs: Costs | None = None) -> bool:
        """Add to what was used. Return False if the limits have no room for what is owed.

        `units` are of the unit that was reserved besides requests; `costs` names several. It never
        raises because of a limit or of the store: a request that is being served may go on, and
        owes what it uses. With a store on another machine, an AsyncLimiter tops up in the
        background, and the answer is that of the last top-up. Call it from one thread at a time.

        Raises InvalidCost for numbers below 0 and for units that were not reserved.
        """
        if self._has_ended:
            raise ConfigError("the reservation has ended; call use() inside the `with` block")
        example = "reservation.use(costs={…})"
        for unit, more in used_costs(self._cost(self._reserved), units, costs, example).items():
            self._used[unit] = self._used.get(unit, 0) + more
        if self._in_flight is None and self._owed() and self._may_ask():
            self._in_flight = self._verbs.start(self._topping_up())
        return self._retry_ns is None or not self._owed()

    def _owed(self) -> dict[str, int]:
        """Return what is used beyond all charges."""
        return {
            unit: more
            for unit, used in self._used.items()
            if (more := used - self._covered[unit]) > 0
        }

    def _may_ask(self) -> bool:
        return self._retry_ns is None or self._verbs.now_ns() >= self._retry_ns

    def _topping_up(self) -> Steps[None]:
        """Charge what is owed, in steps as large as the reservation if they have room."""
        try:
            while owed := self._owed():
                steps = {unit: max(more, self._reserved[unit]) for unit, more in owed.items()}
                if not (yield from self._charged(steps)) and (
                    steps == owed or not (yield from self._charged(owed))
                ):
                    return
                self._retry_ns = None
        finally:
            self._in_flight = None

    def _charged(self, units: dict[str, int]) -> Steps[bool]:
        """Charge units in one check; return False if there is no room, or no answer."""
        costs = {REQUESTS: 0, **units}
        try:
            decision = yield from self._verbs.charge(self._key, self._cost(costs))
        except (CapacityError, StoreError):
            self._retry_ns = self._verbs.now_ns() + RETRY_NS
            return False
        if not decision.allowed:
            self._retry_ns = self._verbs.now_ns() + decision.retry_after_ns
            return False
        for unit, more in units.items():
            self._covered[unit] += more
            self._newest[unit] = costs, decision
        return True

    def _cost(self, costs: Costs) -> Cost:
        """Return costs in the form in which the reservation was made."""
        return costs[REQUESTS] if self._is_plain else costs

    def ending(self, raised: bool) -> Steps[None]:
        """Settle at the end of the block, also if the caller is cancelled meanwhile."""
        yield Undo(asking, self.settling, raised)

    def settling(self, raised: bool) -> Steps[None]:
        """Settle at the end of the block."""
        self._has_ended = True
        if self._in_flight is not None:
            yield Call(lambda: self._in_flight)
        try:
            if raised and not any(self._used.values()):
                yield from self._verbs.take_back(
                    self._key, self._cost(self._reserved), self.decision
                )
                return
            for costs, actual, decision in self._corrections():
                yield from self._verbs.settle(
                    self._key, self._cost(costs), self._cost(actual), decision
                )
        except RatekeeperError as error:
            LOG.warning("a reservation could not be settled at what was used: %s", error)

    def _corrections(self) -> list[tuple[Costs, Costs, Decision]]:
        """Return the newest charges, each with what it has cost in the end."""
        found: dict[int, tuple[Costs, dict[str, int], Decision]] = {}
        for unit, used in self._used.items():
            costs, decision = self._newest[unit]
            _, actual, _ = found.setdefault(id(costs), (costs, {}, decision))
            actual[unit] = costs[unit] + used - self._covered[unit]
        return [each for each in found.values() if each[1] != {u: each[0][u] for u in each[1]}]


class _Reserving:
    """One call of `reserve`: it makes a reservation, renews its slots, and frees them."""

    __slots__ = ("_making", "_release", "_renew", "_renewal", "_reservation")

    def __init__(self, making: Steps[Reservation], renew: Renew, release: Renew) -> None:
        self._making = making
        self._renew = renew
        self._release = release
        self._reservation: Reservation | None = None
        self._renewal: Renewal | None = None

    def _entered(self) -> Steps[Reservation]:
        if self._reservation is not None:
            raise ConfigError(
                "one call of reserve() makes one reservation; call it again for another"
            )
        return self._making

    def _made(self) -> Reservation:
        assert self._reservation is not None, "it was entered"  # noqa: S101 - ours
        return self._reservation


class Reserving(_Reserving):
    """The context manager of `Limiter.reserve`."""

    __slots__ = ()

    def __enter__(self) -> Reservation:
        self._reservation = made = run(self._entered())
        self._renewal = renewed_in_thread(self._renew, made.decision)
        return made

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        made, renewal = self._made(), self._renewal
        try:
            run(made.settling(kind is not None))
        finally:
            if renewal is not None:
                renewal.stop()
                run(self._release(made.decision))


class AsyncReserving(_Reserving):
    """The context manager of `AsyncLimiter.reserve`."""

    __slots__ = ()

    async def __aenter__(self) -> Reservation:
        self._reservation = made = await run_async(self._entered())
        self._renewal = renewed_on_loop(self._renew, made.decision)
        return made

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        made, renewal = self._made(), self._renewal
        try:
            await run_async(made.ending(kind is not None))
        finally:
            if renewal is not None:
                renewal.stop()
                await run_async(self._release(made.decision))
