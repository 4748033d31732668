"""The node's table of allowances: the reference that the kernel agrees with."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import Decision, Limit, StoreUnavailable
from ratekeeper.decide.algorithms.holds import LEASE_NS_MAX
from ratekeeper.decide.allowances import (
    ALLOWANCE_UNITS_MAX,
    BUDGET_NS_MAX,
    CLAIM_NS,
    DENIED_NS_MAX,
    FORGET_NS,
    IDLE_NS,
    SUBJECT_BYTES_MAX,
    AllowanceGate,
    AllowanceKind,
    Allowances,
    PythonAllowances,
    Replaced,
    UnitClaim,
)
from ratekeeper.decide.kernel import BUILT
from ratekeeper.decide.leasing import NO_LEASE, Lease
from ratekeeper.testing import ManualClock

LIMIT = Limit(1_000, per=60)
MS = 1_000_000
LIFETIME_NS = 1_000 * MS
FLUSH_NS = 200 * MS
# The authority's clock is far ahead of the node's.
STORE_OFFSET_NS = 7_000_000 * MS


Engine = Callable[[ManualClock, int], Allowances]


def _in_kernel(path: Path | None) -> Engine:
    if not BUILT:
        pytest.skip("the kernel was not built")
    from ratekeeper.decide.stores.native import KernelAllowances  # noqa: PLC0415 - see above

    numbers = itertools.count()

    def make(clock: ManualClock, held_max: int) -> Allowances:
        own = path and path.with_suffix(f".{next(numbers) % 2}")  # a test has two nodes at most
        if own is not None:
            Path(f"{own}.allowances").unlink(missing_ok=True)
        return KernelAllowances(clock, own, held_max, 0o600)

    return make


@pytest.fixture(params=["python", "memory", "shared"], scope="module", autouse=True)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run every test on the reference, on the kernel in memory, and on the kernel in a file."""
    Node.engine = {
        "python": lambda: PythonAllowances,
        "memory": lambda: _in_kernel(None),
        "shared": lambda: _in_kernel(tmp_path_factory.mktemp("node") / "node"),
    }[request.param]()


@dataclass
class Node:
    """A node with one rule, on a clock that the test moves."""

    engine: ClassVar[Engine]
    kind: AllowanceKind = "leased"
    held_max: int = 100
    limit: Limit = LIMIT
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.table = type(self).engine(self.clock, self.held_max)
        self.gate: AllowanceGate = self.table.gate((self.limit,), "api", self.kind, LIFETIME_NS)

    @property
    def store_ns(self) -> int:
        return self.clock.now_ns() + STORE_OFFSET_NS

    def answer(self, *, remaining: int = 500, retry_after_ns: int = 0) -> Decision:
        allowed = not retry_after_ns
        return Decision(
            allowed,
            LIMIT,
            remaining,
            retry_after_ns,
            30_000 * MS,
            rule="api",
            charged_ns=self.store_ns if allowed else None,
            decided_ns=self.store_ns,
        )

    def put(self, units: int, *, subject: str = "ada", denied_ns: int = 0) -> Replaced | None:
        """Put the answer to a check that was allowed, with units that last one lifetime."""
        ends_ns = self.store_ns + LIFETIME_NS if self.kind == "leased" else 0
        lease = Lease(units, ends_ns, LIFETIME_NS, denied_ns)
        return self.gate.put(subject, lease, self.answer(), 1)

    def put_denial(self, cost: int, retry_after_ns: int, *, remaining: int = 0) -> None:
        answer = self.answer(remaining=remaining, retry_after_ns=retry_after_ns)
        self.gate.put("ada", NO_LEASE, answer, cost)

    def allows(self, cost: int = 1, subject: str = "ada") -> bool | None:
        """Return the decision of the node; None if the authority has to decide."""
        decision = self.gate.spend(subject, cost)
        return None if decision is None else decision.allowed

    def claim(self, *, ending: bool = False) -> list[UnitClaim]:
        return self.table.claim(100, FLUSH_NS, ending=ending)


def test_a_subject_without_an_allowance_is_decided_by_the_authority() -> None:
    """The node has no decision for a subject it has not asked about."""
    assert Node().gate.spend("ada", 1) is None


def test_a_lease_is_spent_and_not_a_unit_more() -> None:
    """Three units allow three checks; the authority decides the fourth."""
    node = Node()
    node.put(3)
    assert [node.allows() for _ in range(4)] == [True, True, True, None]


def test_a_decision_of_the_node_counts_and_dates_like_the_authority() -> None:
    """It has the tightest limit, the units of authority and lease, and times of the authority."""
    node = Node()
    node.put(10)
    charged_ns = node.store_ns - 1
    node.clock.advance(0.5)
    decision = node.gate.spend("ada", 4)
    assert decision == Decision(
        True,
        LIMIT,
        496,
        0,
        29_500 * MS,
        rule="api",
        charged_ns=charged_ns,
        decided_ns=node.store_ns,
    )


@pytest.mark.parametrize("kind", ["leased", "eventual"])
def test_nothing_is_spent_after_the_end(kind: AllowanceKind) -> None:
    """The last nanosecond of an allowance is spent; at its end the authority decides."""
    node = Node(kind)
    node.put(3)
    node.clock.advance_ns(LIFETIME_NS - 1)
    assert node.allows() is True
    node.clock.advance_ns(1)
    assert node.allows() is None


@pytest.mark.parametrize("kind", ["leased", "eventual"])
def test_units_that_would_last_too_long_are_not_spent(kind: AllowanceKind) -> None:
    """A file from before a restart may have times that the clock has not reached yet."""
    node = Node(kind, clock=ManualClock(start=1_000))
    node.put(5)
    assert node.allows()
    node.clock.advance(-60)
    assert node.allows() is None
    assert node.gate.held("ada") == (0 if kind == "leased" else -1)


@pytest.mark.parametrize(
    ("kind", "longest_ns"), [("leased", LEASE_NS_MAX), ("eventual", BUDGET_NS_MAX)]
)
def test_units_last_no_longer_than_they_can(kind: AllowanceKind, longest_ns: int) -> None:
    """So every time that is longer is an error."""
    node = Node(kind)
    node.gate.put("ada", Lease(5, node.store_ns, 3_600_000 * MS), node.answer(), 1)
    assert node.allows()
    node.clock.advance_ns(longest_ns - 1)
    assert node.allows()
    node.clock.advance_ns(1)
    assert node.allows() is None


def test_a_budget_without_units_lasts_as_long_as_the_subject_is_warm() -> None:
    """It costs nothing to know that the authority has to decide."""
    node = Node("eventual")
    node.gate.put("ada", Lease(0, 0, 3_600_000 * MS), node.answer(), 0)
    node.clock.advance(3_599)
    assert node.allows(0)
    node.clock.advance(1)
    assert node.allows(0) is None


def test_an_ended_lease_is_claimed_once() -> None:
    """Its units go back once: the authority must never get them twice."""
    node = Node()
    node.put(5)
    ends_ns = node.store_ns + LIFETIME_NS
    node.allows(2)
    node.clock.advance_ns(LIFETIME_NS)
    assert node.claim() == [UnitClaim(node.gate.number, "leased", "ada", 3, ends_ns, 0, 0)]
    node.clock.advance_ns(CLAIM_NS)
    assert node.claim() == []


def test_a_node_that_stops_claims_everything() -> None:
    """With `ending`, a lease is claimed before its end, and nothing is left to spend."""
    node = Node()
    node.put(5)
    assert node.claim() == []
    assert [claim.units for claim in node.claim(ending=True)] == [5]
    assert node.allows() is None


def test_a_new_lease_returns_what_is_left_of_the_old() -> None:
    """The caller gives these units back at once."""
    node = Node()
    node.put(5)
    old_ends_ns = node.store_ns + LIFETIME_NS
    node.clock.advance(0.1)
    assert node.put(8) == Replaced(5, old_ends_ns)
    assert [node.allows(8), node.allows()] == [True, None]


def test_an_answer_without_a_lease_keeps_the_old_one() -> None:
    """A check that the authority decided alone does not take units away."""
    node = Node()
    node.put(5)
    assert node.put(0) is None
    assert node.allows(5) is True


def test_spent_units_of_a_budget_are_pending_until_they_are_confirmed() -> None:
    """They are claimed after the flush interval, with the middle of their ages."""
    node = Node("eventual")
    node.put(10)
    node.allows(2)
    node.clock.advance(0.1)
    node.allows(3)
    assert node.claim() == []
    node.clock.advance(0.1)
    (claim,) = node.claim()
    assert (claim.units, claim.age_ns, claim.ends_store_ns) == (5, 150 * MS, 0)
    assert node.table.stats().pending_units == 5
    node.table.confirm([claim])
    assert node.table.stats().pending_units == 0
    assert node.claim(ending=True) == []


def test_a_claim_that_is_not_confirmed_is_claimed_again() -> None:
    """Its process may have been killed. Units that were spent since then wait for its end."""
    node = Node("eventual")
    node.put(10)
    node.allows(2)
    node.clock.advance_ns(FLUSH_NS)
    (first,) = node.claim()
    node.allows(3)
    node.clock.advance_ns(CLAIM_NS - 1)
    assert node.claim() == []
    node.clock.advance_ns(1)
    (again,) = node.claim()
    assert (again.units, again.age_ns) == (2, FLUSH_NS + CLAIM_NS)
    node.table.confirm([first])  # too late: the second report counts
    assert node.table.stats().pending_units == 5
    node.table.confirm([again, again])
    (rest,) = node.claim()
    assert rest.units == 3


def test_a_claim_of_other_units_has_another_token() -> None:
    """A confirmation that arrives twice does not confirm the next claim of the same moment."""
    node = Node("eventual")
    node.put(10)
    node.allows()
    (first,) = node.claim(ending=True)
    node.table.confirm([first])
    node.allows()
    node.claim(ending=True)
    node.table.confirm([first])
    assert node.table.stats().pending_units == 1


def test_pending_units_make_a_budget_smaller() -> None:
    """The authority did not know of them when it answered."""
    node = Node("eventual")
    node.put(10)
    node.allows(4)
    (claim,) = node.claim(ending=True)
    node.allows(3)
    node.put(10)
    assert [node.allows(3), node.allows()] == [True, None]
    node.table.confirm([claim])
    node.put(10)
    decision = node.gate.spend("ada", 4)
    assert decision is not None
    assert decision.remaining == 490


def test_an_answer_without_a_budget_ends_the_budget() -> None:
    """A subject that has become warm is decided by the authority."""
    node = Node("eventual")
    node.put(10)
    node.put(0)
    assert node.allows() is None


@pytest.mark.parametrize(
    ("retry_after_ns", "lasts_ns"), [(40 * MS, 40 * MS), (60_000 * MS, DENIED_NS_MAX)]
)
def test_a_denial_lasts_no_longer_than_it_should(retry_after_ns: int, lasts_ns: int) -> None:
    """The node repeats it until it ends, and for a second at most."""
    node = Node()
    node.put_denial(1, retry_after_ns)
    denied = node.gate.spend("ada", 1)
    assert denied == Decision(
        False, LIMIT, 0, lasts_ns, 30_000 * MS, rule="api", decided_ns=node.store_ns
    )
    node.clock.advance_ns(lasts_ns - 1)
    assert node.allows() is False
    node.clock.advance_ns(1)
    assert node.allows() is None


def test_a_denial_covers_its_cost_and_more() -> None:
    """A smaller cost may fit: the authority decides it. If it fits, larger ones stay denied."""
    node = Node()
    node.put_denial(5, 500 * MS, remaining=4)
    assert [node.allows(4), node.allows(5), node.allows(6)] == [None, False, False]
    node.put(0)
    assert node.allows(5) is False


def test_a_cost_above_the_capacity_is_not_denied_here() -> None:
    """It never fits: the authority raises an error that says so, or knows of a grant."""
    node = Node()
    node.put_denial(1, 500 * MS)
    assert [node.allows(LIMIT.capacity), node.allows(LIMIT.capacity + 1)] == [False, None]


def test_an_answer_that_allows_the_cost_ends_a_denial() -> None:
    """A grant or a reset has made room before the denial was over."""
    node = Node()
    node.put_denial(1, 500 * MS)
    node.put(0)
    assert node.allows() is None


def test_the_check_that_took_the_last_unit_starts_a_denial() -> None:
    """`Lease.denied_ns` says how long the next one is denied."""
    node = Node()
    node.put(0, denied_ns=300 * MS)
    assert node.allows() is False
    node.clock.advance(0.3)
    assert node.allows() is None


def test_a_lease_is_spent_although_the_authority_denies() -> None:
    """Its units were charged before. A budget was not charged, and ends."""
    leased, eventual = Node("leased"), Node("eventual")
    for node in (leased, eventual):
        node.put(2)
        node.gate.deny("ada", 2, 500 * MS)
    assert [leased.allows(2), leased.allows(2)] == [True, False]
    assert [eventual.allows(2), eventual.allows(1)] == [False, None]


@pytest.mark.parametrize("kind", ["leased", "eventual"])
def test_a_hint_denies_a_subject_that_is_not_known_here(kind: AllowanceKind) -> None:
    """Another node has learned of the denial. A second hint does not make it weaker."""
    node = Node(kind)
    node.gate.deny("ada", 1, 500 * MS)
    node.gate.deny("ada", 9, 400 * MS)
    node.gate.deny("ada", 1, 0)
    denied = node.gate.spend("ada", 1)
    assert denied is not None
    assert (denied.allowed, denied.remaining, denied.retry_after_ns) == (False, 0, 500 * MS)


def test_stop_ends_a_lease_and_a_denial() -> None:
    """The caller gives the units back. Units that are refunded later go to the authority."""
    node = Node()
    node.put(5)
    charged_ns = node.store_ns - 1
    node.allows(2)
    node.gate.deny("ada", 1, 500 * MS)
    assert node.gate.stop("ada") == Replaced(3, node.store_ns + LIFETIME_NS)
    assert node.gate.stop("ada") is None
    assert node.allows() is None
    assert node.gate.unspend("ada", 2, charged_ns) is False
    assert node.gate.stop("nobody") is None


def test_stop_keeps_pending_units() -> None:
    """They are still reported."""
    node = Node("eventual")
    node.put(5)
    node.allows(2)
    assert node.gate.stop("ada") is None
    assert node.allows() is None
    assert [claim.units for claim in node.claim(ending=True)] == [2]


def test_unspent_units_of_a_lease_are_spent_again() -> None:
    """Only of the lease that is here now, and never more than it had."""
    node = Node()
    node.put(5)
    charged_ns = node.store_ns - 1
    node.allows(5)
    assert node.gate.unspend("ada", 2, charged_ns - 1) is False
    assert node.gate.unspend("ada", 6, charged_ns) is False
    assert node.gate.unspend("ada", 2, charged_ns) is True
    assert [node.allows(2), node.allows()] == [True, None]
    node.clock.advance_ns(LIFETIME_NS)
    assert node.gate.unspend("ada", 2, charged_ns) is False
    assert node.gate.unspend("nobody", 2, charged_ns) is False


@pytest.mark.parametrize(("kind", "held"), [("leased", 3), ("eventual", -2)])
def test_units_held_are_those_that_the_authority_does_not_see(
    kind: AllowanceKind, held: int
) -> None:
    """What is left of a lease; or the pending units, which it still counts as remaining."""
    node = Node(kind)
    assert node.gate.held("ada") == 0
    node.put(5)
    node.allows(2)
    assert node.gate.held("ada") == held
    node.clock.advance_ns(LIFETIME_NS)
    node.claim()
    assert node.gate.held("ada") == min(held, 0)


def test_unspent_units_of_a_budget_are_not_reported() -> None:
    """Units that were claimed since are refunded at the authority."""
    node = Node("eventual")
    node.put(5)
    spent = node.gate.spend("ada", 2)
    assert spent is not None
    assert spent.charged_ns is not None
    assert node.gate.unspend("ada", 2, spent.charged_ns) is True
    assert node.claim(ending=True) == []
    node.allows(2)
    node.claim(ending=True)
    node.clock.advance(0.1)
    node.allows(2)
    assert node.gate.unspend("ada", 2, spent.charged_ns) is False


def test_demand_is_what_the_node_asked_for_lately() -> None:
    """Without the last check, which asks itself; the larger of this interval and the one before."""
    node = Node()
    assert node.gate.demand("ada") == 0
    node.put(0)
    assert node.gate.demand("ada") == 0
    node.allows(3)
    node.allows(2)
    assert node.gate.demand("ada") == 4
    node.clock.advance_ns(LIFETIME_NS)
    node.allows()
    assert node.gate.demand("ada") == 6
    node.clock.advance_ns(2 * LIFETIME_NS)
    node.allows()
    assert node.gate.demand("ada") == 0


def test_demand_and_units_are_bounded() -> None:
    """A client with huge costs cannot overflow a number of the table."""
    node = Node("eventual", limit=Limit(1_000_000_000, per=60))
    node.put(10 * ALLOWANCE_UNITS_MAX)
    assert [node.allows(ALLOWANCE_UNITS_MAX), node.allows()] == [True, None]
    for _ in range(3):
        node.allows(10 * ALLOWANCE_UNITS_MAX)
    assert node.gate.demand("ada") == ALLOWANCE_UNITS_MAX


def test_a_full_table_refuses_new_subjects() -> None:
    """The authority decides them; a lease that finds no room goes back. Idle ones make room."""
    node = Node(held_max=2)
    node.put(5, subject="ada")
    node.put(0, subject="bob")
    ends_ns = node.store_ns + LIFETIME_NS
    assert node.put(7, subject="eve") == Replaced(7, ends_ns)
    node.gate.deny("eve", 1, 500 * MS)
    assert node.allows(subject="eve") is None
    assert node.table.stats() == (2, 2, 5, 0, 2)
    node.clock.advance_ns(IDLE_NS)
    assert node.put(7, subject="eve") is None  # in the place of bob
    assert node.put(7, subject="dan") is not None  # ada's units were not claimed
    node.clock.advance_ns(FORGET_NS)
    assert node.put(7, subject="dan") is None


def test_a_long_subject_is_refused() -> None:
    """The authority decides it. The length is that of its bytes."""
    node = Node()
    longest = "é" * (SUBJECT_BYTES_MAX // 2)
    assert node.put(5, subject=longest) is None
    assert node.allows(subject=longest) is True
    assert node.put(5, subject=longest + "a") is not None
    assert node.table.stats().refused == 1


def test_gates_of_other_rules_limits_and_kinds_are_apart() -> None:
    """Each has its own number, which is the same in every process."""
    table = Node().table
    gates = [
        table.gate((LIMIT,), "api", "leased", LIFETIME_NS),
        table.gate((LIMIT,), "api", "eventual", LIFETIME_NS),
        table.gate((LIMIT,), "web", "leased", LIFETIME_NS),
        table.gate((Limit(999, per=60),), "api", "leased", LIFETIME_NS),
        table.gate((LIMIT, Limit(1, per=1)), "api", "leased", LIFETIME_NS),
    ]
    assert len({gate.number for gate in gates}) == len(gates)
    again = Node().table.gate((LIMIT,), "api", "leased", 0)
    assert again.number == gates[0].number == 5_189_248_378_221_575_719


def test_many_claims_come_in_batches() -> None:
    """Every subject is claimed once, whatever the size of a batch; the rest waits for the next."""
    node = Node("eventual", held_max=3_000)
    for number in range(2_000):
        node.put(2, subject=f"s{number}")
        node.allows(1 + number % 2, f"s{number}")
    node.clock.advance_ns(FLUSH_NS)
    batches = [node.table.claim(300, FLUSH_NS) for _ in range(8)]
    assert [len(batch) for batch in batches] == [300] * 6 + [200, 0]
    claims = [claim for batch in batches for claim in batch]
    assert len({claim.subject for claim in claims}) == 2_000
    assert sum(claim.units for claim in claims) == node.table.stats().pending_units == 3_000
    for batch in batches:
        node.table.confirm(batch)
    assert node.table.stats().pending_units == 0


def test_answers_are_counted() -> None:
    """Decisions of the node, and not those of the authority."""
    node = Node()
    node.put(2)
    node.gate.deny("ada", 1, 500 * MS)
    for _ in range(3):
        node.allows()
    node.clock.advance(0.5)
    node.allows()
    assert node.gate.counted() == (2, 1)
    assert node.gate.fast_check(node.answer) is None


def test_a_closed_table_raises() -> None:
    """Every call says that the store is closed."""
    node = Node()
    node.table.close()
    for call in (node.claim, node.allows, node.table.stats, lambda: node.put(1)):
        with pytest.raises(StoreUnavailable, match="closed"):
            call()


# ---- properties ----

SUBJECTS = ("ada", "bob")
calls = st.lists(
    st.tuples(
        st.sampled_from(("put", "spend", "spend", "spend", "unspend", "claim", "stop", "deny")),
        st.sampled_from(SUBJECTS),
        st.integers(0, 6),
        st.sampled_from((0, 1, 50 * MS, LIFETIME_NS, CLAIM_NS)),
    ),
    max_size=40,
)


@given(calls)
def test_the_units_of_leases_are_conserved(steps: list[tuple[str, str, int, int]]) -> None:
    """Put = spent + left + given back, whatever happens in between."""
    node = Node()
    units: Counter[str] = Counter()
    for verb, subject, count, wait_ns in steps:
        node.clock.advance_ns(wait_ns)
        if verb == "put":
            units["put"] += count
            replaced = node.put(count, subject=subject)
            units["given back"] += replaced.units if replaced else 0
        elif verb == "spend":
            decision = node.gate.spend(subject, count)
            if decision is not None and decision.allowed:
                units["spent"] += count
                last = (subject, count, decision.charged_ns)
                if count == 5 and decision.charged_ns and node.gate.unspend(*last):
                    units["spent"] -= count
        elif verb == "stop":
            replaced = node.gate.stop(subject)
            units["given back"] += replaced.units if replaced else 0
        elif verb == "deny":
            node.gate.deny(subject, count, wait_ns)
        else:
            units["given back"] += sum(claim.units for claim in node.claim())
    left = node.table.stats().leased_units
    assert units["put"] == units["spent"] + left + units["given back"]
    assert left == sum(claim.units for claim in node.claim(ending=True))


@given(calls, st.integers(0, 3))
def test_every_spent_unit_of_a_budget_is_reported(
    steps: list[tuple[str, str, int, int]], confirm_every: int
) -> None:
    """Spent = reported and confirmed + pending; claims that are never confirmed come again."""
    node = Node("eventual")
    spent = confirmed = claims = 0
    for verb, subject, count, wait_ns in steps:
        node.clock.advance_ns(wait_ns)
        if verb == "put":
            before = node.table.stats().pending_units
            node.put(count, subject=subject)
            assert node.table.stats().pending_units == before
        elif verb == "spend":
            decision = node.gate.spend(subject, count)
            spent += count if decision is not None and decision.allowed else 0
        elif verb == "claim":
            for claim in node.claim():
                claims += 1
                if confirm_every and claims % confirm_every == 0:
                    confirmed += claim.units
                    node.table.confirm([claim])
        assert spent == confirmed + node.table.stats().pending_units
    for _ in range(2):  # claims that were never confirmed, and units spent after them
        node.clock.advance_ns(CLAIM_NS)
        last = node.claim(ending=True)
        confirmed += sum(claim.units for claim in last)
        node.table.confirm(last)
    assert spent == confirmed


@given(calls)
def test_a_budget_bounds_what_is_pending(steps: list[tuple[str, str, int, int]]) -> None:
    """A node never has more units pending than the largest budget that it was given."""
    node = Node("eventual")
    largest = Counter(dict.fromkeys(SUBJECTS, 0))
    for verb, subject, count, wait_ns in steps:
        node.clock.advance_ns(wait_ns)
        if verb == "put":
            node.put(count, subject=subject)
            largest[subject] = max(largest[subject], count)
        elif verb == "claim":
            node.claim()
        else:
            node.gate.spend(subject, count)
        assert node.table.stats().pending_units <= largest.total()


def test_the_pending_units_of_one_subject_are_claimed_before_they_are_due() -> None:
    """Not those of others, not twice, and nothing of a lease."""
    node = Node("eventual")
    node.put(10)
    node.put(10, subject="bob")
    assert node.gate.claim("ada") is None
    for cost, subject in ((2, "ada"), (3, "ada"), (4, "bob")):
        assert node.allows(cost, subject)
    claim = node.gate.claim("ada")
    assert claim is not None
    assert (claim.kind, claim.subject, claim.units) == ("eventual", "ada", 5)
    assert node.gate.claim("ada") is None
    assert node.gate.claim("carol") is None
    assert node.gate.held("ada") == -5
    node.table.confirm([claim])
    assert node.gate.held("ada") == 0
    node.clock.advance_ns(FLUSH_NS)
    assert [each.subject for each in node.claim()] == ["bob"]

    leased = Node("leased")
    leased.put(10)
    assert leased.allows()
    assert leased.gate.claim("ada") is None


def test_a_claim_of_one_subject_that_was_not_confirmed_is_claimed_again() -> None:
    """Its process may have been killed before it reported."""
    node = Node("eventual")
    node.put(10)
    assert node.allows(2)
    assert node.gate.claim("ada") is not None
    assert node.claim() == []
    node.clock.advance_ns(CLAIM_NS + 1)
    assert [each.units for each in node.claim()] == [2]
    assert node.claim() == []
    assert [each.units for each in node.claim(ending=True)] == [2]
