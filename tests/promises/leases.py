"""Random traces of nodes that lease units, spend them at the worst moment, give them back or crash.

A trace runs on any store that has an authority. It returns every answer, to compare two stores, and
every admission, to compare with the bound of the algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from hypothesis import strategies as st

from ratekeeper import CapacityError, Decision, Limit
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName
from ratekeeper.decide.allowances import CLAIM_NS
from ratekeeper.decide.leasing import GiveBack, LateCharge, LeaseCheck, LeaseTerms
from ratekeeper.decide.store import LocalCounter
from ratekeeper.decide.stores.memory import MemoryAuthority
from tests.answering import AnsweringStore
from tests.clocks import SteppedClock
from tests.promises.oracles import Admission, assert_never_over
from tests.promises.strategies import KEY, chunks, limits

STEP_BYTES = 5
_SECOND_NS = 10**9
_LIFETIMES_NS = (_SECOND_NS, _SECOND_NS // 5, _SECOND_NS // 50, 5 * _SECOND_NS)
_NODE_VERBS = (
    *("lease",) * 5,
    *("spend",) * 6,
    *("fill",) * 4,
    *("give back",) * 4,
    "check",
    "crash",
)
# Verbs that keep the bound: they only take units, or return units that were admitted.
_BOUNDED = (*_NODE_VERBS, "repeat", "refund", "late")
_RETURNING = ("give back", "repeat", "refund")
# Verbs that change a quota from outside, for comparisons.
_ALL = (*_BOUNDED, "peek", "grant", "reset", "correct", "owe", "owe")
CLOCK_STEPS = ("clock forward", "clock back")
_GAPS = ("same",) * 6 + ("tick", "unit", "second", "window", "edge", "end of a lease")


@st.composite
def leased_limits(draw: st.DrawFn, algorithm: AlgorithmName, name: str = "") -> Limit:
    """A limit of few units whose leases last long enough to be given."""
    window_us = draw(st.sampled_from([300_000, 10**6, 10**7, 6 * 10**7, 3_600 * 10**6]))
    return draw(limits(algorithm, 60, name, window_us))


@st.composite
def several_leased_limits(draw: st.DrawFn) -> list[Limit]:
    """One to three limits of any algorithm."""
    algorithms = draw(st.lists(st.sampled_from(UNIT_ALGORITHMS), min_size=1, max_size=3))
    return [draw(leased_limits(each, f"n{at}")) for at, each in enumerate(algorithms)]


def lease_traces(steps_max: int = 40) -> st.SearchStrategy[list[bytes]]:
    """Steps of a trace; see `LeasePlay.play`.

    Most come from a seed. Bytes that Hypothesis draws repeat themselves, and find less.
    """

    def seeded(seed: int) -> list[bytes]:
        random = Random(seed)
        return [random.randbytes(STEP_BYTES) for _ in range(random.randint(1, steps_max))]

    seeds = st.integers(0, 2**32).map(seeded)
    return seeds | seeds | chunks(STEP_BYTES, steps_max)


@dataclass(slots=True)
class _NodeLease:
    """What a node knows of its lease."""

    counter: LocalCounter
    left: int
    ends_ns: int
    until_real_ns: int


@dataclass(slots=True)
class LeasePlay:
    """One trace on one store. `clock` is the authority's; the nodes measure true time.

    `earlier` are the limits that the rule had before: each applies for a part of the trace. Leases
    that were taken under them are given back under them, and late charges may come under any.
    """

    store: MemoryAuthority | AnsweringStore
    clock: SteppedClock
    limits: Sequence[Limit]
    clock_steps: tuple[str, ...] = ()
    all_verbs: bool = False
    resets: bool = False
    earlier: Sequence[Sequence[Limit]] = ()
    answers: list[object] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    before_resets: list[tuple[int, list[Admission]]] = field(default_factory=list)
    leased: int = 0
    _real_ns: int = 0
    _latest_ns: int = 0
    _leases: list[_NodeLease] = field(default_factory=list)
    _returned: list[tuple[GiveBack, int]] = field(default_factory=list)
    _charged: list[tuple[Admission, int]] = field(default_factory=list)
    _counters: list[LocalCounter] = field(default_factory=list)

    def play(self, steps: Sequence[bytes]) -> None:
        """Move the clock and carry out a verb for each step."""
        rules = [*self.earlier, self.limits]
        verbs = _ALL if self.all_verbs else _BOUNDED
        if self.resets:
            verbs += ("reset",) * 2
        if "clock back" in self.clock_steps:  # units that return to nothing forget the time too
            verbs = tuple(verb for verb in verbs if verb not in _RETURNING)
        gaps = _GAPS + self.clock_steps
        for number, step in enumerate(steps):
            if number * len(rules) >= len(self._counters) * len(steps):
                self._counters.append(self.store.counter(rules[len(self._counters)], "r"))
            self._move(gaps[step[0] % len(gaps)], step[1])
            verb, size, which = verbs[step[2] % len(verbs)], step[3], step[4]
            try:
                answer = self._carry_out(self._counters[-1], verb, size, which)
            except CapacityError:
                answer = "never"
            self.answers.append((verb, answer))

    def _move(self, kind: str, part: int) -> None:
        limit = self.limits[part % len(self.limits)]
        now_ns, gap_ns = self.clock.now_ns(), 0
        if kind == "tick":
            gap_ns = 1_000
        elif kind == "unit":
            gap_ns = limit.window_ns // limit.limit * part // 100
        elif kind in ("second", "clock forward", "clock back"):
            gap_ns = _SECOND_NS * part // 50
        elif kind == "window":
            gap_ns = limit.window_ns * part // 128
        elif kind == "edge":
            gap_ns = -(now_ns + 1_000) % limit.window_ns
        elif kind == "end of a lease" and self._leases:
            gap_ns = max(self._leases[part % len(self._leases)].ends_ns - 1_000 - now_ns, 0)
        gap_ns = gap_ns // 1_000 * 1_000
        if kind == "clock back":
            self.clock.advance_ns(-min(gap_ns, now_ns))
            return
        self.clock.advance_ns(gap_ns)
        if kind != "clock forward":
            self._real_ns += gap_ns

    def _carry_out(self, counter, verb: str, size: int, which: int) -> object:  # type: ignore[no-untyped-def]  # a counter of the store
        capacity = min(limit.capacity for limit in self.limits)
        authority = self.store.authority
        if verb == "lease":
            cost = (0, 1, 1, 1 + size % capacity)[which % 4]
            lifetime_ns = _LIFETIMES_NS[which // 16 % 4]
            terms = LeaseTerms(size % (2 * capacity), 1 + which // 4 % 4, lifetime_ns)
            [answer] = authority.lease([LeaseCheck(counter, KEY, cost, terms)])
            assert isinstance(answer, tuple)
            decision, lease = answer
            self._admit(decision, cost)
            if lease.units:
                self.leased += 1
                self._latest_ns = max(self._latest_ns, lease.ends_ns - lease.lasts_ns)
                until_ns = self._real_ns + lease.lasts_ns
                self._leases.append(_NodeLease(counter, lease.units, lease.ends_ns, until_ns))
            return answer
        if verb in ("check", "fill"):
            cost = 1 + size % capacity
            if verb == "fill":  # take all that is left
                cost = counter.peek(KEY, 0).remaining
            decision = counter.check(KEY, cost)
            self._admit(decision, cost)
            return decision
        if verb in ("spend", "give back", "crash"):
            return self._use_lease(verb, size, which)
        if verb == "repeat":  # a claim that was not confirmed is reported again
            due = [each for each, at_ns in self._returned if self._real_ns >= at_ns + CLAIM_NS]
            return authority.report(due[-2:])
        if verb == "late":
            late = LateCharge(
                self._counters[which % len(self._counters)],
                KEY,
                size % (capacity + 3),
                which * _SECOND_NS // 100,
            )
            return authority.report([late])
        if verb == "refund" and self._charged:
            (at_ns, cost), charged_ns = self._charged.pop(which % len(self._charged))
            self.admitted.remove((at_ns, cost))
            return counter.refund(KEY, cost, charged_ns)
        if verb == "peek":
            return counter.peek(KEY, size % capacity)
        if verb == "grant":
            return counter.grant(KEY, 1 + size % 5, _SECOND_NS * (1 + which % 3))
        if verb == "owe":
            return counter.owe(KEY, 1 + size % (2 * capacity)), counter.owed(KEY)
        if verb == "correct":
            return counter.refund(KEY, 1 + size % 5, None)
        return self._reset(counter) if verb == "reset" else None

    def _reset(self, counter) -> object:  # type: ignore[no-untyped-def]  # a counter of the store
        """Reset: what was admitted before does not count any more. The leases are outstanding."""
        answer = counter.reset(KEY)
        self.before_resets.append((self.clock.now_ns(), self.admitted))
        self.admitted, self._charged = [], []
        return answer

    def assert_never_over(self, limit: Limit) -> None:
        """Check the bound of a limit: from each reset to the next one."""
        for admitted in [*(each for _, each in self.before_resets), self.admitted]:
            assert_never_over(limit, sorted(admitted))

    def _use_lease(self, verb: str, size: int, which: int) -> object:
        if not self._leases:
            return None
        place = which % len(self._leases)
        lease = self._leases[place]
        if verb == "spend":
            units = lease.left if size % 2 else min(lease.left, 1 + size // 2)
            if units and self._real_ns < lease.until_real_ns:
                lease.left -= units
                # The authority's clock may have been set forward since.
                at_ns = min(max(self.clock.now_ns(), self._latest_ns), lease.ends_ns - 1)
                ends = (each for reset_ns, each in self.before_resets if at_ns < reset_ns)
                next(ends, self.admitted).append((at_ns, units))
            return None
        del self._leases[place]
        if verb == "crash" or not lease.left:
            return None
        report = GiveBack(lease.counter, KEY, lease.left, lease.ends_ns)
        self._returned.append((report, self._real_ns))
        authority = self.store.authority
        return authority.report([report])

    def _admit(self, decision: Decision, cost: int) -> None:
        if decision.charged_ns is not None:
            self._latest_ns = max(self._latest_ns, decision.charged_ns)
            self.admitted.append((decision.charged_ns, cost))
            self._charged.append((self.admitted[-1], decision.charged_ns))
