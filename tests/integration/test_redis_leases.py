"""Leases, give-backs and late charges over real connections: round trips, faults and expiry.

That they agree with the reference is tested in tests/parity/test_redis_leases.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Self, cast

import pytest

from ratekeeper import Decision, Limit, StoreError
from ratekeeper.decide.leasing import (
    NO_LEASE,
    GiveBack,
    LateCharge,
    Lease,
    LeaseCheck,
    LeasedAnswer,
    LeaseTerms,
    Report,
)
from ratekeeper.decide.store import Answer, Counter
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.redis.counters import REPORTS_MAX
from ratekeeper.decide.stores.redis.scripts import CHANGE, LEASES
from ratekeeper.decide.stores.redis.store import RedisStore
from tests.answering import AnsweringCounter, answer, awaited
from tests.conformance.stores import PATIENCE
from tests.integration.redis_wires import YEAR
from tests.redis_servers import Cluster, Single, running

HOUR = Limit(1_000, per=3_600)
SECOND_NS = 10**9
TERMS = LeaseTerms(100, 1, SECOND_NS)
both_wires = pytest.mark.parametrize("wire", ["threads", "asyncio"])


class Node:
    """One node's calls to the authority, from a thread or from an event loop."""

    def __init__(self, uri: str, wire: str, **options: Any) -> None:
        options = {**PATIENCE, "denied_cache_ms": 0, **options}
        self.store = cast("RedisStore", open_store(uri, **options))
        self._runner = asyncio.Runner() if wire == "asyncio" else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._runner is not None:
            self._runner.run(self.store.aclose())
            self._runner.close()
        self.store.close()

    def counter(self, limit: Limit = HOUR, rule: str = "r") -> Counter:
        return self.store.counter([limit], rule)

    def lease(self, *checks: tuple[Counter, str, int]) -> list[LeasedAnswer]:
        asked = [LeaseCheck(*check, TERMS) for check in checks]
        return cast("list[LeasedAnswer]", self._answer(self.store.lease(asked)))

    def report(self, reports: Sequence[Report]) -> list[Answer]:
        return cast("list[Answer]", self._answer(self.store.report(reports)))

    def _answer(self, value: Any) -> Any:
        return answer(value) if self._runner is None else self._runner.run(awaited(value))


def leased(answer: LeasedAnswer) -> Lease:
    """Return the lease of an allowed check."""
    assert isinstance(answer, tuple)
    assert answer[0].allowed
    return answer[1]


def remaining(answers: Sequence[Answer]) -> list[int]:
    """Return what remains according to each answer."""
    return [each.remaining for each in answers if isinstance(each, Decision)]


def calls_of(server: Any) -> int:
    """Return how many scripts the server has run."""
    stats = server.admin.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))


@pytest.fixture(scope="module")
def server() -> Iterator[Single]:
    """Start a server that only these tests use."""
    with Single() as started:
        yield started


@both_wires
def test_one_call_checks_and_leases(server: Single, wire: str) -> None:
    """And one call gives back."""
    server.flush()
    with Node(server.uri, wire) as node:
        counter = node.counter()
        leased(node.lease((counter, "warm", 1))[0])
        before = calls_of(server)
        lease = leased(node.lease((counter, "a", 1))[0])
        assert lease.units == 100
        assert 0 < lease.lasts_ns <= SECOND_NS
        assert calls_of(server) == before + 1
        node.report([GiveBack(counter, "warm", 1, lease.ends_ns)])
        before = calls_of(server)
        assert remaining(node.report([GiveBack(counter, "a", 60, lease.ends_ns)])) == [959]
        assert calls_of(server) == before + 1


@both_wires
def test_rules_of_one_request_lease_together_or_not_at_all(server: Single, wire: str) -> None:
    """A request that one rule denies leases nothing of the others."""
    server.flush()
    with Node(server.uri, wire) as node:
        wide, tight = node.counter(), node.counter(Limit(1, per=3_600), "tight")
        node.lease((wide, "warm", 1), (tight, "warm", 1))
        before = calls_of(server)
        answers = node.lease((wide, "a", 1), (tight, "a", 1))
        assert [leased(each).units for each in answers] == [100, 0]
        assert leased(answers[1]).denied_ns == 3_600 * SECOND_NS
        assert calls_of(server) == before + 1
        answers = node.lease((wide, "a", 1), (tight, "a", 1))
        assert [each[1] for each in answers if isinstance(each, tuple)] == [NO_LEASE] * 2
        assert remaining(node.report([LateCharge(wide, "a", 0, 0)])) == [899]


@both_wires
def test_the_same_counter_twice_in_a_request_does_not_lease(server: Single, wire: str) -> None:
    """The lease of the first check could deny the second."""
    server.flush()
    with Node(server.uri, wire) as node:
        counter = node.counter(Limit(10, per=3_600))
        answers = node.lease((counter, "a", 5), (counter, "a", 5))
        assert [leased(each).units for each in answers] == [0, 0]


@both_wires
def test_many_reports_go_in_few_calls(server: Single, wire: str) -> None:
    """A server takes up to REPORTS_MAX of them in one call; the answers are in order."""
    server.flush()
    with Node(server.uri, wire) as node:
        counter = node.counter()
        reports: list[Report] = [
            LateCharge(counter, f"s{number}", number, 0) for number in range(2 * REPORTS_MAX + 1)
        ]
        node.report(reports[:1])
        before = calls_of(server)
        answers = node.report(reports)
        assert calls_of(server) == before + 3
        assert remaining(answers) == [1_000 - number for number in range(len(reports))]


@both_wires
def test_a_server_that_forgot_its_scripts_gets_them_again(server: Single, wire: str) -> None:
    """Each call is counted once."""
    server.flush()
    with Node(server.uri, wire) as node:
        counter = node.counter()
        other = node.counter(rule="other")
        server.admin.script_flush()
        lease = leased(node.lease((counter, "a", 1))[0])
        server.admin.script_flush()
        assert [leased(each).units for each in node.lease((counter, "b", 1), (other, "b", 1))] == [
            100,
            100,
        ]
        server.admin.script_flush()
        reports = [GiveBack(counter, "a", 100, lease.ends_ns), LateCharge(counter, "c", 7, 0)]
        assert remaining(node.report(reports)) == [999, 993]
        assert server.admin.script_exists(CHANGE.sha.decode(), LEASES.sha.decode()) == [
            True,
            False,
        ]


@both_wires
def test_a_cluster_leases_and_takes_reports_of_every_slot(wire: str) -> None:
    """Subjects on several primaries are leased together; reports find their slots."""
    cluster = cast("Cluster", running("cluster"))
    cluster.flush()
    with Node(cluster.uri, wire) as node:
        counter, other = node.counter(), node.counter(rule="other")
        answers = node.lease(*((counter, f"s{number}", 1) for number in range(6)))
        leases = [leased(each) for each in answers]
        assert [lease.units for lease in leases] == [100] * 6
        reports: list[Report] = [
            GiveBack(counter, f"s{number}", 40, lease.ends_ns)
            for number, lease in enumerate(leases)
        ]
        assert remaining(node.report([*reports, LateCharge(other, "s0", 3, 0)])) == [939] * 6 + [
            997
        ]


@both_wires
def test_a_cluster_gives_back_what_a_denied_request_leased(wire: str) -> None:
    """The subject with the lowest limit is charged first, with a lease; another one then denies."""
    cluster = cast("Cluster", running("cluster"))
    cluster.flush()
    low, high = Limit(900, per=3_600), HOUR
    with Node(cluster.uri, wire) as node:
        first, second = node.counter(low, "low"), node.counter(high, "high")
        node.report([LateCharge(second, "b", 1_000, 0)])
        answers = node.lease((first, "a", 1), (second, "b", 1))
        assert [each[0].allowed for each in answers if isinstance(each, tuple)] == [True, False]
        assert [each[1] for each in answers if isinstance(each, tuple)] == [NO_LEASE] * 2
        assert remaining(node.report([LateCharge(first, "a", 0, 0)])) == [900]


def test_a_cancelled_caller_leases_nothing(server: Single) -> None:
    """The call was sent, so its units are given back in the background."""
    server.flush()

    def calls() -> int:
        stats = server.admin.info("commandstats")
        return sum(
            stats.get(f"cmdstat_{each}", {"calls": 0})["calls"] for each in ("evalsha", "eval")
        )

    async def cancelled() -> int:
        store = cast("RedisStore", open_store(server.uri, **PATIENCE))
        counter = store.counter([Limit(1_000, per=YEAR)], "r")
        assert (await awaited(store.lease([LeaseCheck(counter, "warm", 1, TERMS)])))[0]
        assert (await awaited(counter.peek("a", 1))).remaining == 1_000
        before = calls()
        lease = store.lease([LeaseCheck(counter, "a", 1, TERMS)])
        asking = asyncio.ensure_future(awaited(lease))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not asking.done()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(20):
            # Each look is behind the lease on the connection, and a call of its own.
            looks = 1
            while (await awaited(counter.peek("a", 1))).remaining != 1_000:
                looks += 1
        others = calls() - before - looks
        await store.aclose()
        return others

    # At least the lease and its return; a script that the server does not know is sent twice.
    assert asyncio.run(cancelled()) >= 2


@both_wires
def test_a_server_that_is_away_is_an_error_of_each_call(wire: str) -> None:
    """A check raises nothing and leases nothing: its answer is the error. So is a report's."""
    with Single() as gone, Node(gone.uri, wire, deadline_ms=200) as node:
        counter = node.counter()
        lease = leased(node.lease((counter, "a", 1))[0])
        gone.stop()
        [answer] = node.lease((counter, "a", 1))
        assert isinstance(answer, StoreError)
        [answer] = node.report([GiveBack(counter, "a", 1, lease.ends_ns)])
        assert isinstance(answer, StoreError)


@pytest.mark.parametrize("algorithm", ["token_bucket", "sliding_window_log"])
def test_a_state_lives_as_long_as_its_holds(server: Single, algorithm: Any) -> None:
    """The key outlives the hold, and the time in which the held units are whole again."""
    server.flush()
    with Node(server.uri, "threads") as node:
        # 100 units a second: the one unit that is charged is whole again after 10 ms.
        counter = node.counter(Limit(1_000, per=10, algorithm=algorithm))
        lease = leased(node.lease((counter, "a", 1))[0])
        [key] = server.admin.scan_iter()
        ends_ms = server.admin.execute_command("PEXPIRETIME", key)
        whole_ns = lease.units * SECOND_NS // 100 if algorithm == "token_bucket" else 10 * SECOND_NS
        assert ends_ms * 1_000_000 >= lease.ends_ns + whole_ns


def test_leased_units_belong_to_the_state_of_their_limit(server: Single) -> None:
    """`stats` counts one state. A reset keeps its holds until they are given back."""
    server.flush()
    with Node(server.uri, "threads") as node:
        counter = AnsweringCounter(node.counter())
        lease = leased(node.lease((counter.counter, "a", 1))[0])
        assert node.store.stats().states == 1
        counter.reset("a")
        assert counter.peek("a", 1).remaining == 1_000 - lease.units
        node.report([GiveBack(counter.counter, "a", lease.units, lease.ends_ns)])
        assert counter.peek("a", 1).remaining == 1_000
        assert node.store.stats().states == 0
