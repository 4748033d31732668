"""The decider: charges in several groups are all made, or none, whatever fails and when."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratekeeper import CapacityError, Decision, Limit, StoreFull, StoreTimeout, StoreUnavailable
from ratekeeper.core.steps import Ask, Call, Steps, Undo, run, run_async
from ratekeeper.decide.decider import Group, alone, deciding, lost, passes
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.decide.stores.native import KernelStore
from ratekeeper.testing import ManualClock

# ── Places: tables and servers ─────────────────────────────────────────────────────────────────

DOWN: Final = "down"  # the server gets nothing
SILENT: Final = "silent"  # the server gets nothing, and the caller cannot know it
LOST: Final = "lost"  # the server makes the call, and its reply does not arrive
SLOW: Final = "slow"  # the call takes longer than the others, and succeeds
TAKEN: Final = "taken"  # after the call, another caller spends the units that are left
SHRUNK: Final = "shrunk"  # the limit is lower than the cost now
BROKEN: Final = "broken"  # a defect in our own code
STOPPED: Final = "stopped"  # the user stops the program


class Place:
    """A table of this machine, or a server: its own store, with faults for the next calls."""

    def __init__(
        self,
        capacities: Sequence[int],
        *,
        kernel: bool = False,
        server: bool = False,
        each_alone: bool = False,
        states_max: int = 1_000,
        **faults: Sequence[str],
    ) -> None:
        """`faults` are those of the next calls of each verb: charge, peek and refund."""
        made: Any = KernelStore if kernel else PythonMemoryStore
        clock = ManualClock(start=1_800_000_000)
        self.store: Any = made(clock, states_max, allowances_max=1)
        self.counters = [
            self.store.counter([Limit(capacity, per=86_400)], f"rule-{number}")
            for number, capacity in enumerate(capacities)
        ]
        self.is_server = server
        self.each_alone = each_alone
        self._faults = {verb: list(planned) for verb, planned in faults.items()}

    def call(self, verb: str, action: Callable[[], Any], failed: Callable[[str], None]) -> Any:
        """Return the result of an action in the table, or the Ask of one on the server."""
        if not self.is_server:
            return action()
        planned = self._faults.get(verb)
        fault = planned.pop(0) if planned else ""
        return Ask(self._wait, self._send, fault, action, failed)

    def _wait(self, fault: str, action: Callable[[], Any], failed: Callable[[str], None]) -> Any:
        if fault in (DOWN, SILENT):
            failed(fault)
            raise (StoreTimeout if fault == SILENT else StoreUnavailable)(fault)
        if fault == SHRUNK:
            raise CapacityError(2, Limit(1, per=1))
        if fault in (BROKEN, STOPPED):
            failed(fault)
            raise (ZeroDivisionError if fault == BROKEN else KeyboardInterrupt)(fault)
        result = action()
        if fault == LOST:
            failed(fault)
            raise StoreTimeout(fault)
        if fault == TAKEN:
            self.take_all()
        return result

    async def _send(self, fault: str, *rest: Any) -> Any:
        for _ in range(4 if fault == SLOW else 1):
            await asyncio.sleep(0)
        try:
            return self._wait(fault, *rest)
        finally:
            await asyncio.sleep(0)

    def take_all(self) -> None:
        """Spend all units of the subject "a" that are left."""
        for counter in self.counters:
            counter.check("a", counter.peek("a", 0).remaining)

    def spent(self, counter: int, subject: str) -> int:
        """Return the units that are charged now."""
        found = self.counters[counter]
        left: int = found.peek(subject, 0).remaining
        return int(found.limits[0].capacity) - left


@dataclass(frozen=True)
class Want:
    """One charge of a request."""

    place: int
    units: int
    counter: int = 0
    subject: str = "a"


@dataclass
class Caller:
    """A request, and what really happened to its charges, as the places saw it."""

    places: Sequence[Place]
    wants: Sequence[Want]
    optional: Container[int] = ()
    order: Sequence[int] = ()
    """The order of the places."""
    charged: list[int] = field(default_factory=list)
    """How often each charge was made, minus how often it was returned."""
    unknown: set[int] = field(default_factory=set)
    """The charges whose answer did not arrive."""
    unreturned: set[int] = field(default_factory=set)
    """The charges whose return failed."""
    result: Any = None
    """The answers, the exception, or None if there is neither."""

    def __post_init__(self) -> None:
        self.charged = [0] * len(self.wants)

    def steps(self) -> Steps[list[Any]]:
        """Return the steps of the decider."""
        charges: list[Any] = [
            (_Traced(self, at), want.subject, want.units) for at, want in enumerate(self.wants)
        ]
        return deciding(list(self._groups()), charges, self.optional)

    def _groups(self) -> Iterator[Group]:
        for number in self.order or sorted({want.place for want in self.wants}):
            own = [at for at, want in enumerate(self.wants) if want.place == number]
            if self.places[number].each_alone:
                yield from [Group(alone, [at]) for at in own]
            elif own:
                yield Group(partial(self._decide, self.places[number]), own)

    def _decide(self, place: Place, charges: Sequence[Any], optional: Container[int]) -> Any:
        positions = [traced.at for traced, _, _ in charges]
        real = [(traced.real, subject, units) for traced, subject, units in charges]

        def charge() -> list[Any]:
            answers: list[Any] = place.store.check_together(real, optional)
            self.note(positions, answers, optional)
            return answers

        return place.call("charge", charge, lambda fault: self.failed(positions, fault))

    def note(self, positions: Sequence[int], answers: Sequence[Any], optional: Any = ()) -> None:
        """Note which charges were made."""
        if passes(dict(enumerate(answers)), optional):
            for at, answer in zip(positions, answers, strict=True):
                self.charged[at] += isinstance(answer, Decision) and answer.charged_ns is not None

    def failed(self, positions: Sequence[int], fault: str) -> None:
        """Note the charges whose outcome the caller does not know."""
        if fault != DOWN:
            self.unknown.update(positions)

    @property
    def admitted(self) -> bool:
        """True if the caller got answers that let the request pass."""
        return isinstance(self.result, list) and passes(dict(enumerate(self.result)), self.optional)

    def decide(self, link: str) -> None:
        """Decide in this thread, or in an event loop of its own."""
        if link == "asyncio":
            asyncio.run(self.run_async())
            return
        try:
            self.result = run(self.steps())
        except (CapacityError, ZeroDivisionError) as error:
            self.result = error

    async def run_async(self) -> None:
        """Decide on asyncio."""
        try:
            self.result = await run_async(self.steps())
        except (CapacityError, ZeroDivisionError) as error:
            self.result = error

    def run_in_parts(self) -> Iterator[None]:
        """Decide as a thread does, and pause before each call."""
        steps = self.steps()
        try:
            step = next(steps)
            while True:
                results: list[Any] = []
                timed_out = False
                for call in [step] if isinstance(step, Call) else step.calls:
                    yield
                    if timed_out and type(call) is not Undo:
                        results.append(StoreUnavailable("not asked"))
                        continue
                    try:
                        found = call.function(*call.args)
                        results.append(found.wait(*found.args) if type(found) is Ask else found)
                    except Exception as error:
                        timed_out |= isinstance(error, StoreTimeout)
                        results.append(error)
                step = steps.send(results)
        except StopIteration as done:
            self.result = done.value
        except (CapacityError, ZeroDivisionError) as error:
            self.result = error


class _Traced:
    """A counter that notes for its caller what is charged and returned."""

    def __init__(self, caller: Caller, at: int) -> None:
        want = caller.wants[at]
        self._caller = caller
        self._place = caller.places[want.place]
        self._key = want.place, want.counter
        self.real = self._place.counters[want.counter]
        self.at = at

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Traced) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def check(self, subject: str, units: int) -> Any:
        def charge() -> Decision:
            answer: Decision = self.real.check(subject, units)
            self._caller.note([self.at], [answer])
            return answer

        failed = self._caller.failed
        return self._place.call("charge", charge, lambda fault: failed([self.at], fault))

    def peek(self, subject: str, units: int) -> Any:
        return self._place.call("peek", lambda: self.real.peek(subject, units), lambda _: None)

    def refund(self, subject: str, units: int, charged_ns: int | None) -> Any:
        assert charged_ns is not None

        def give_back() -> None:
            self.real.refund(subject, units, charged_ns)
            self._caller.charged[self.at] -= 1

        unreturned = self._caller.unreturned
        return self._place.call("refund", give_back, lambda _: unreturned.add(self.at))


class _Count:
    """What `lost` counted since this was made."""

    def __init__(self) -> None:
        self._before = lost.unknown, lost.returns

    def __call__(self) -> tuple[int, int]:
        return lost.unknown - self._before[0], lost.returns - self._before[1]


# ── A table of plain cases ─────────────────────────────────────────────────────────────────────


def table(room: int) -> Place:
    return Place([room])


def server(room: int, **faults: Sequence[str]) -> Place:
    return Place([room], server=True, **faults)


def full(room: int) -> Place:
    found = Place([room], server=True)
    found.take_all()
    return found


YES: Final = "allowed"
NO: Final = "denied"
GONE: Final = StoreUnavailable
LATE: Final = StoreTimeout
TOO_BIG: Final = CapacityError
DEFECT: Final = ZeroDivisionError


class Case(NamedTuple):
    """A request with one charge in each of its groups."""

    groups: Sequence[tuple[Place, int]]
    """In order, each with the units to charge."""
    answers: Any
    """One for each group, or the error."""
    spent: Sequence[int]
    """What is charged in each group afterwards."""
    unknown: int = 0
    """Unknown outcomes that are counted."""
    returns: int = 0
    """Failed returns that are counted."""
    optional: Container[int] = ()


# Each makes a fresh case, because a place remembers what was charged.
CASES: Final[dict[str, Callable[[], Case]]] = {
    # One group.
    "one group with room": lambda: Case([(table(5), 2)], [YES], [2]),
    "one group without room": lambda: Case([(full(5), 1)], [NO], [5]),
    "one group, too big": lambda: Case([(table(5), 6)], TOO_BIG, [0]),
    "one group down": lambda: Case([(server(5, charge=[DOWN]), 2)], [GONE], [0]),
    "one group, reply lost": lambda: Case([(server(5, charge=[LOST]), 2)], [LATE], [2], unknown=1),
    # All have room: each is charged its own units.
    "all have room": lambda: Case(
        [(table(5), 2), (server(5), 3), (server(9), 4)], [YES, YES, YES], [2, 3, 4]
    ),
    "a cost of 0": lambda: Case([(table(5), 0), (server(5), 3)], [YES, YES], [0, 3]),
    # A denial: nothing is charged.
    "first denies": lambda: Case([(full(5), 1), (server(5), 3)], [NO, YES], [5, 0]),
    "look denies": lambda: Case([(table(5), 2), (full(5), 1)], [YES, NO], [0, 5]),
    "another caller spends between the look and the charge": lambda: Case(
        [(table(5), 2), (server(5, peek=[TAKEN]), 1), (server(5), 1)], [YES, NO, YES], [0, 5, 0]
    ),
    # A return fails: the units stay charged, or only the answer is missing.
    "return is not made": lambda: Case(
        [(server(5, refund=[DOWN]), 2), (full(5), 1)], [YES, NO], [2, 5], returns=1
    ),
    "reply to the return is lost": lambda: Case(
        [(server(5, refund=[LOST]), 2), (full(5), 1)], [YES, NO], [0, 5], returns=1
    ),
    "after a return that timed out, the others are made": lambda: Case(
        [(server(5, refund=[SILENT]), 2), (server(5), 2), (server(5, peek=[TAKEN]), 1)],
        [YES, YES, NO],
        [2, 0, 5],
        returns=1,
    ),
    # A group fails that is not optional.
    "first is down": lambda: Case(
        [(server(5, charge=[DOWN]), 1), (table(5), 2)], [GONE, YES], [0, 0]
    ),
    "look is down": lambda: Case([(table(5), 2), (server(5, peek=[DOWN]), 1)], [YES, GONE], [0, 0]),
    "look is late": lambda: Case([(table(5), 2), (server(5, peek=[LOST]), 1)], [YES, LATE], [0, 0]),
    "charge is down": lambda: Case(
        [(table(5), 2), (server(5, charge=[DOWN]), 1)], [YES, GONE], [0, 0]
    ),
    "reply to the charge is lost": lambda: Case(
        [(table(5), 2), (server(5, charge=[LOST]), 1)], [YES, LATE], [0, 1], unknown=1
    ),
    "charge was never made, which the caller cannot know": lambda: Case(
        [(table(5), 2), (server(5, charge=[SILENT]), 1)], [YES, LATE], [0, 0], unknown=1
    ),
    # An optional group fails: the others decide.
    "optional first is down": lambda: Case(
        [(server(5, charge=[DOWN]), 1), (table(5), 2)], [GONE, YES], [0, 2], optional=[0]
    ),
    "optional look is down, and not repeated": lambda: Case(
        [(table(5), 2), (server(5, peek=[DOWN]), 1)], [YES, GONE], [2, 0], optional=[1]
    ),
    "optional charge is down": lambda: Case(
        [(table(5), 2), (server(5, charge=[DOWN]), 1)], [YES, GONE], [2, 0], optional=[1]
    ),
    "reply to the optional charge is lost, and the request passes": lambda: Case(
        [(table(5), 2), (server(5, charge=[LOST]), 1)], [YES, LATE], [2, 1], optional=[1]
    ),
    "reply to the optional charge is lost, and another group denies": lambda: Case(
        [(table(5), 2), (server(5, peek=[TAKEN]), 1), (server(5, charge=[LOST]), 1)],
        [YES, NO, LATE],
        [0, 5, 1],
        unknown=1,
        optional=[2],
    ),
    "optional denies": lambda: Case(
        [(table(5), 2), (full(5), 1)], [YES, NO], [0, 5], optional=[0, 1]
    ),
    # A cost that can never fit.
    "first, too big": lambda: Case([(table(5), 6), (server(5), 1)], TOO_BIG, [0, 0]),
    "look, too big": lambda: Case([(table(5), 2), (server(5), 6)], TOO_BIG, [0, 0]),
    "optional look, too big": lambda: Case(
        [(table(5), 2), (server(5), 6)], TOO_BIG, [0, 0], optional=[1]
    ),
    "charge, too big since the look": lambda: Case(
        [(table(5), 2), (server(5, charge=[SHRUNK]), 2), (server(5), 1)], TOO_BIG, [0, 0, 0]
    ),
    # A defect of our own is raised, after the other charges were returned.
    "charge raises": lambda: Case(
        [(table(5), 2), (server(5, charge=[BROKEN]), 2), (server(5), 1)],
        DEFECT,
        [0, 0, 0],
        unknown=1,
    ),
    "look raises": lambda: Case([(table(5), 2), (server(5, peek=[BROKEN]), 2)], DEFECT, [0, 0]),
    "return raises": lambda: Case(
        [(server(5, refund=[BROKEN]), 2), (full(5), 2)], DEFECT, [2, 5], returns=1
    ),
}


def shown(result: Any) -> Any:
    """Return answers or an error as a case has them."""
    if isinstance(result, list):
        return [shown(each) for each in result]
    return (YES if result.allowed else NO) if isinstance(result, Decision) else type(result)


@pytest.mark.parametrize("link", ["threads", "asyncio"])
@pytest.mark.parametrize("name", CASES)
def test_plain_cases(name: str, link: str) -> None:
    """The answers, the units that are charged afterwards, and what is counted as lost."""
    case = CASES[name]()
    places = [place for place, _ in case.groups]
    wants = [Want(at, units) for at, (_, units) in enumerate(case.groups)]
    caller = Caller(places, wants, case.optional)
    count = _Count()
    caller.decide(link)
    assert shown(caller.result) == case.answers
    assert [place.spent(0, "a") for place in places] == case.spent
    assert count() == (case.unknown, case.returns)


def test_the_answer_of_a_returned_charge_says_what_remains_now() -> None:
    """Also where a request charges a subject twice; the decision has no charge to refund."""
    places = [table(9), server(5, peek=[TAKEN])]
    caller = Caller(places, [Want(0, 2), Want(0, 3), Want(0, 0), Want(1, 1)])
    caller.decide("threads")
    answers: list[Decision] = caller.result
    assert [each.remaining for each in answers] == [9, 9, 9, 0]
    assert [each.charged_ns for each in answers] == [None] * 4


def test_a_group_that_fails_in_part_decides_the_others() -> None:
    """The store has no room for the second subject, which is optional; both groups are charged."""
    places = [Place([5], states_max=1), server(5)]
    wants = [Want(0, 2), Want(0, 1, subject="b"), Want(1, 3)]
    caller = Caller(places, wants, optional=[1])
    caller.decide("threads")
    assert shown(caller.result) == [YES, StoreFull, YES]
    assert [place.spent(0, "a") for place in places] == [2, 3]


def test_a_program_that_is_stopped_returns_the_charges_it_knows() -> None:
    """The charge that was interrupted is counted."""
    places = [table(5), server(5, charge=[STOPPED])]
    count = _Count()
    with pytest.raises(KeyboardInterrupt):
        run(Caller(places, [Want(0, 2), Want(1, 2)]).steps())
    assert [place.spent(0, "a") for place in places] == [0, 0]
    assert count() == (1, 0)


@pytest.mark.parametrize(
    ("batches", "expected"), [(0, (0, 0)), (1, (1, 0)), (2, (1, 1)), (3, (0, 1))]
)
def test_steps_that_are_dropped_are_counted(batches: int, expected: tuple[int, int]) -> None:
    """Where an event loop ends, nothing can be returned any more."""
    steps = Caller([table(5), server(5, peek=[TAKEN])], [Want(0, 2), Want(1, 2)]).steps()
    count = _Count()
    results = None
    for _ in range(batches):
        step = steps.send(results)
        results = [
            each.wait(*each.args) if type(each) is Ask else each
            for each in [call.function(*call.args) for call in step.calls]
        ]
    steps.close()
    assert count() == expected


# ── Properties ─────────────────────────────────────────────────────────────────────────────────

FAULTS: Final = ("", DOWN, SILENT, LOST, SLOW)
# A fault matters in few of the random worlds.
OFTEN: Final = settings(max_examples=3 * settings().max_examples)


class World(NamedTuple):
    """Places and requests, as plain values: each test makes them anew."""

    places: Sequence[Mapping[str, Any]]
    requests: Sequence[tuple[Sequence[Want], frozenset[int], Sequence[int]]]

    def callers(self) -> list[Caller]:
        """Return the requests, on fresh places."""
        places = [Place(**each) for each in self.places]
        return [Caller(places, *each) for each in self.requests]


def place_kinds(*, faulty: bool) -> st.SearchStrategy[dict[str, Any]]:
    capacities = st.lists(st.integers(1, 6), min_size=1, max_size=2)
    local: dict[str, Any] = {"capacities": capacities, "kernel": st.booleans()}
    remote: dict[str, Any] = {
        "capacities": capacities,
        "server": st.just(True),
        "each_alone": st.booleans(),
    }
    if faulty:
        local["kernel"] = st.just(False)
        local["states_max"] = st.sampled_from([1, 1_000])
        for verb in ("charge", "peek", "refund"):
            remote[verb] = st.lists(st.sampled_from(FAULTS), max_size=5)
    return st.fixed_dictionaries(local) | st.fixed_dictionaries(remote)


@st.composite
def worlds(draw: st.DrawFn, requests_max: int, *, faulty: bool = True) -> World:
    kinds = place_kinds(faulty=faulty)
    places = draw(st.lists(kinds, min_size=1, max_size=3))

    @st.composite
    def wants(draw: st.DrawFn) -> Want:
        place = draw(st.integers(0, len(places) - 1))
        counter = draw(st.integers(0, len(places[place]["capacities"]) - 1))
        return Want(place, draw(st.integers(0, 4)), counter, draw(st.sampled_from("ab")))

    request = st.tuples(
        st.lists(wants(), min_size=1, max_size=4),
        st.frozensets(st.integers(0, 3), max_size=2),
        st.permutations(range(len(places))),
    )
    return World(places, draw(st.lists(request, min_size=1, max_size=requests_max)))


def check_bounds(callers: Sequence[Caller]) -> None:
    """No group is ever over its limit, and each has at least the units of admitted requests."""
    charged: Counter[tuple[int, int, str]] = Counter()
    admitted: Counter[tuple[int, int, str]] = Counter()
    for caller in callers:
        for at, want in enumerate(caller.wants):
            key = want.place, want.counter, want.subject
            charged[key] += want.units * caller.charged[at]
            if caller.admitted and isinstance(caller.result[at], Decision):
                admitted[key] += want.units
    for (number, counter, subject), units in charged.items():
        place = callers[0].places[number]
        assert place.spent(counter, subject) == units
        assert admitted[number, counter, subject] <= units
        assert units <= place.counters[counter].limits[0].capacity


def check_outcomes(callers: Sequence[Caller], counted: tuple[int, int]) -> None:
    """Admitted: charged once. Else: nothing, but for unknown outcomes and returns that failed."""
    check_bounds(callers)
    for caller in callers:
        for at, want in enumerate(caller.wants):
            if caller.admitted and isinstance(caller.result[at], Decision):
                assert caller.charged[at] == bool(want.units)
                assert at not in caller.unknown
            elif at in caller.unknown or at in caller.unreturned:
                assert caller.charged[at] in (0, 1)
            else:
                assert caller.charged[at] == 0
        assert not (caller.admitted and caller.unreturned)
    lost_by = [caller for caller in callers if not caller.admitted]
    unknown = sum(len(caller.unknown) for caller in lost_by)
    assert counted == (unknown, sum(len(caller.unreturned) for caller in lost_by))


@given(worlds(8, faulty=False), st.sampled_from(["threads", "asyncio"]))
def test_one_caller_gets_the_decisions_of_a_perfect_model(world: World, link: str) -> None:
    """The model has all counts in one dictionary. The answers say what remains, too."""
    used: Counter[tuple[int, int, str]] = Counter()
    callers = world.callers()
    count = _Count()
    for caller in callers:
        caller.decide(link)
        keys = [(want.place, want.counter, want.subject) for want in caller.wants]
        capacities = [world.places[place]["capacities"][counter] for place, counter, _ in keys]
        units = [want.units for want in caller.wants]
        if any(cost > capacity for cost, capacity in zip(units, capacities, strict=True)):
            assert isinstance(caller.result, CapacityError)
            continue
        wanted: Counter[tuple[int, int, str]] = Counter()
        remaining = []
        for key, cost, capacity in zip(keys, units, capacities, strict=True):
            wanted[key] += cost
            remaining.append(capacity - used[key] - wanted[key])
        # A cost of 0 has room wherever no other charge of the request has too little.
        allowed = all(left >= 0 for left in remaining)
        assert caller.admitted == allowed
        if allowed:
            used += wanted
            assert [answer.remaining for answer in caller.result] == remaining
        else:
            for answer, key, capacity in zip(caller.result, keys, capacities, strict=True):
                # Two groups that charge one subject look at each other's units.
                shared = keys.count(key) > 1 and callers[0].places[key[0]].each_alone
                assert not answer.allowed or shared or answer.remaining == capacity - used[key]
    check_outcomes(callers, count())


@OFTEN
@given(worlds(3))
def test_one_caller_after_the_other_in_a_thread(world: World) -> None:
    """Whatever fails, and in however many charges of a group."""
    callers = world.callers()
    count = _Count()
    for caller in callers:
        caller.decide("threads")
        check_bounds(callers)
    check_outcomes(callers, count())


@OFTEN
@given(worlds(5), st.integers(0, 2**32))
def test_callers_whose_calls_interleave(world: World, seed: int) -> None:
    """Between any two calls of a request, others make theirs, and some of them fail."""
    random = Random(seed)
    callers = world.callers()
    count = _Count()
    running = [caller.run_in_parts() for caller in callers]
    while running:
        chosen = random.choice(running)
        if next(chosen, _ENDED) is _ENDED:
            running.remove(chosen)
        check_bounds(callers)
    check_outcomes(callers, count())


_ENDED: Final = object()


@OFTEN
@given(worlds(4), st.lists(st.none() | st.integers(0, 14), min_size=4, max_size=4))
def test_callers_on_asyncio_of_which_some_are_cancelled(
    world: World, cancels: Sequence[int | None]
) -> None:
    """A cancelled caller has spent nothing, and harms no other."""
    callers = world.callers()
    count = _Count()

    async def main() -> None:
        tasks = [asyncio.create_task(caller.run_async()) for caller in callers]
        for step in range(20):
            for task, at in zip(tasks, cancels, strict=False):
                if at == step:
                    task.cancel()
            await asyncio.sleep(0)
            check_bounds(callers)
        await finished()

    asyncio.run(main())
    check_outcomes(callers, count())


async def finished() -> None:
    """Wait for all other tasks of the event loop, those in the background too."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


@given(worlds(1))
def test_a_caller_that_is_cancelled_at_any_await(world: World) -> None:
    """It has spent nothing: its calls go on in the background, and its charges are returned."""
    for step in range(STEPS_MAX):
        [caller] = world.callers()
        count = _Count()
        completed = asyncio.run(cancelled(caller, step, ends=False))
        assert completed or not caller.admitted
        check_outcomes([caller], count())
        if completed:
            return
    pytest.fail("the caller never ended")


@given(worlds(1))
def test_an_event_loop_that_ends_after_a_caller_was_cancelled(world: World) -> None:
    """It cancels the calls in the background, too. What is not returned is counted."""
    for step in range(STEPS_MAX):
        [caller] = world.callers()
        count = _Count()
        completed = asyncio.run(cancelled(caller, step, ends=True))
        check_bounds([caller])
        assert set(caller.charged) <= {0, 1}
        if completed:
            return
        assert sum(caller.charged) <= sum(count())
        places = [caller.places[want.place] for want in caller.wants]
        for place, units in zip(places, caller.charged, strict=True):
            assert place.is_server or not units  # a table of this machine needs no event loop


STEPS_MAX: Final = 100


async def cancelled(caller: Caller, step: int, *, ends: bool) -> bool:
    """Cancel the caller at a step of the event loop; return True if it had ended before."""
    task = asyncio.create_task(caller.run_async())
    for _ in range(step):
        await asyncio.sleep(0)
    completed = not task.cancel()
    await asyncio.sleep(0)  # the caller has seen it
    if not ends:
        await finished()
        assert completed or task.cancelled()
    return completed
