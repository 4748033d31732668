"""Processes, threads and tasks on one Redis: exactly the limit, whatever their clocks say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.stores import PATIENCE
from tests.integration.redis_hammer import Job, admitted, hammer
from tests.redis_servers import Running, Single, running
from tollkeeper import Limit
from tollkeeper.core.model import ALGORITHM_NAMES, BUCKETS, AlgorithmName
from tollkeeper.decide.stores import open_store

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)

# So long a window that nothing comes back while a test runs.
YEAR = 366 * 86_400
LIMIT = 2_000
# Two processes of threads and two event loops, all at once: both wires meet on every key.
CREW: tuple[dict[str, Any], ...] = (
    {"wire": "threads", "at_once": 4},
    {"wire": "asyncio", "at_once": 64},
    {"wire": "threads", "at_once": 2},
    {"wire": "asyncio", "at_once": 200},
)
# How long after another a process may begin, on a busy machine.
LATE_SECONDS_MAX = 20.0
# On different nodes of a cluster.
KEYS = ("one", "two", "three", "four")


@pytest.fixture(params=["single", "cluster"])
def servers(request: pytest.FixtureRequest) -> Running:
    """Empty, and of a kind."""
    found = running(request.param)
    found.flush()
    return found


def remaining(servers: Running, limit: dict[str, Any], key: str) -> int:
    """What is left of a limit when everyone is done."""
    store = open_store(servers.uri, **PATIENCE)
    left = store.gate([Limit(**limit)], "").peek(key, 0).remaining
    store.close()
    return left


@every_algorithm
def test_everyone_on_one_key_is_admitted_exactly_the_limit(
    algorithm: AlgorithmName, servers: Running
) -> None:
    """Four processes with 270 checks under way: the limit passes, to the unit."""
    limits = [{"limit": LIMIT, "per": YEAR, "algorithm": algorithm}]
    results = hammer([Job(servers.uri, limits, **each) for each in CREW])
    assert admitted(results) == {"k": LIMIT}
    assert remaining(servers, limits[0], "k") == 0


@every_algorithm
def test_everyone_on_several_keys_with_a_cost_is_admitted_what_fits(
    algorithm: AlgorithmName, servers: Running
) -> None:
    """A cost of 7, which does not divide the limit: as often as it fits, and the rest is left."""
    limits = [{"limit": LIMIT, "per": YEAR, "algorithm": algorithm}]
    results = hammer([Job(servers.uri, limits, KEYS, 7, **each) for each in CREW])
    assert admitted(results) == dict.fromkeys(KEYS, LIMIT // 7)
    for key in KEYS:
        assert remaining(servers, limits[0], key) == LIMIT % 7


def test_several_limits_are_charged_for_what_passes_all_of_them(servers: Running) -> None:
    """Five limits of five kinds and a tighter one: just the tightest is admitted, and each of the
    others was charged for that and no more."""
    wide = [{"limit": LIMIT, "per": YEAR, "algorithm": name} for name in ALGORITHM_NAMES]
    tight = {"limit": 700, "per": YEAR, "name": "tight"}
    limits = [*wide[:3], tight, *wide[3:]]
    results = hammer([Job(servers.uri, limits, **each) for each in CREW])
    assert admitted(results) == {"k": 700}
    assert [remaining(servers, limit, "k") for limit in wide] == [LIMIT - 700] * len(wide)


WIRES = ("threads", "asyncio")
CLOCKS_OFF_SECONDS = (-60, 0, 60)


def telling_window(servers: Single) -> int:
    """A window in seconds whose end a clock that is a minute ahead has seen, and the others will
    not see before the test is over. Longer than two minutes: one a minute off tells others' waits.
    """
    seconds, _ = servers.admin.time()
    return next(per for per in range(150, 1_000) if 35 <= per - seconds % per <= 55)


def telling_limit(servers: Single, algorithm: AlgorithmName) -> dict[str, Any]:
    """Four hundred at once, and in a minute at least one more."""
    if algorithm in BUCKETS:
        return {"limit": 1, "per": 40, "algorithm": algorithm, "capacity": 400}
    if algorithm == "sliding_window_log":
        return {"limit": 400, "per": 40, "algorithm": algorithm}
    return {"limit": 400, "per": telling_window(servers), "algorithm": algorithm}


@pytest.fixture
def single() -> Single:
    """One server, empty."""
    found = running("single")
    found.flush()
    return found


@every_algorithm
def test_processes_whose_clocks_differ_are_admitted_exactly_the_limit(
    algorithm: AlgorithmName, single: Single
) -> None:
    """One a minute behind, then one right, then one a minute ahead, on both wires: what they are
    admitted together is the limit. By its own clock, the last would find some of it come back."""
    limits = [telling_limit(single, algorithm)]
    results = []
    for seconds in CLOCKS_OFF_SECONDS:
        jobs = [Job(single.uri, limits, wire=wire, clock_off_seconds=seconds) for wire in WIRES]
        results += hammer(jobs)
    assert admitted(results) == {"k": 400}


@every_algorithm
def test_a_clock_set_wrong_changes_no_decision(algorithm: AlgorithmName, single: Single) -> None:
    """Of keys that others have spent from, processes whose clocks are a minute off are told what
    the one is told whose clock is right; waits too, in which the minute would show."""
    limits = [{"limit": 5, "per": telling_window(single), "algorithm": algorithm}]
    keys = [f"key of {seconds}" for seconds in CLOCKS_OFF_SECONDS]
    hammer([Job(single.uri, limits, keys, tell=3)])
    results = hammer(
        [
            Job(single.uri, limits, [key], tell=5, clock_off_seconds=seconds)
            for key, seconds in zip(keys, CLOCKS_OFF_SECONDS, strict=True)
        ]
    )
    behind, right, ahead = (next(iter(result["told"].values())) for result in results)
    assert [allowed for allowed, *_ in right] == [True] * 2 + [False] * 3
    for told in (behind, ahead):
        assert [said[:3] for said in told] == [said[:3] for said in right]
        for said, wanted in zip(told, right, strict=True):
            assert said[3:] == pytest.approx(wanted[3:], abs=LATE_SECONDS_MAX)
    # The clocks were really off.
    for result, seconds in zip(results, CLOCKS_OFF_SECONDS, strict=True):
        off_seconds = (result["now_ns"] - results[1]["now_ns"]) / 10**9
        assert off_seconds == pytest.approx(seconds, abs=LATE_SECONDS_MAX)
