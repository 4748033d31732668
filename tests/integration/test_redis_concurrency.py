"""Processes, threads and tasks on one Redis are admitted exactly the limit, with any clocks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from ratekeeper import Limit
from ratekeeper.core.model import BUCKETS, UNIT_ALGORITHMS, AlgorithmName
from ratekeeper.decide.stores import open_store
from tests.answering import AnsweringStore
from tests.conformance.stores import PATIENCE
from tests.integration.redis_hammer import Crew, Job, admitted
from tests.redis_servers import Running, Single, running

every_algorithm = pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)

# The window is so long that no quota returns while a test runs.
YEAR = 366 * 86_400
LIMIT = 2_000
# Two processes with threads and two with event loops run at once, so both wires use every key.
WORKERS: tuple[dict[str, Any], ...] = (
    {"wire": "threads", "at_once": 4},
    {"wire": "asyncio", "at_once": 64},
    {"wire": "threads", "at_once": 2},
    {"wire": "asyncio", "at_once": 200},
)
# The longest time between the starts of two processes on a busy machine.
LATE_SECONDS_MAX = 20.0
# These keys are on different nodes of a cluster.
KEYS = ("one", "two", "three", "four")


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Start four processes for the jobs of all tests."""
    crew = Crew(len(WORKERS))
    yield crew
    crew.close()


@pytest.fixture(params=["single", "cluster"])
def servers(request: pytest.FixtureRequest) -> Running:
    """Return the shared servers of each kind, without keys."""
    servers = running(request.param)
    servers.flush()
    return servers


def remaining(servers: Running, limit: dict[str, Any], key: str, *roomy: dict[str, Any]) -> int:
    """Return the remaining units of a limit, beside others of its rule that have more room."""
    store = AnsweringStore(open_store(servers.uri, **PATIENCE))
    left = store.counter([Limit(**each) for each in (limit, *roomy)], "").peek(key, 0).remaining
    store.close()
    return left


@every_algorithm
def test_all_processes_on_one_key_are_admitted_exactly_the_limit(
    algorithm: AlgorithmName, servers: Running, crew: Crew
) -> None:
    """Four processes with 270 checks in flight are admitted exactly the limit."""
    limits = [{"limit": LIMIT, "per": YEAR, "algorithm": algorithm}]
    results = crew.hammer([Job(servers.uri, limits, **each) for each in WORKERS])
    assert admitted(results) == {"k": LIMIT}
    assert remaining(servers, limits[0], "k") == 0


@every_algorithm
def test_a_cost_on_several_keys_is_admitted_as_often_as_it_fits(
    algorithm: AlgorithmName, servers: Running, crew: Crew
) -> None:
    """A cost of 7 does not divide the limit: it is admitted while it fits, and the rest remains."""
    limits = [{"limit": LIMIT, "per": YEAR, "algorithm": algorithm}]
    results = crew.hammer([Job(servers.uri, limits, KEYS, 7, **each) for each in WORKERS])
    assert admitted(results) == dict.fromkeys(KEYS, LIMIT // 7)
    for key in KEYS:
        assert remaining(servers, limits[0], key) == LIMIT % 7


def test_several_limits_are_charged_only_for_admitted_requests(
    servers: Running, crew: Crew
) -> None:
    """Of six limits the tightest one decides, and the other five are charged only for it."""
    wide = [{"limit": LIMIT, "per": YEAR, "algorithm": name} for name in UNIT_ALGORITHMS]
    tight = {"limit": 700, "per": YEAR, "name": "tight"}
    limits = [*wide[:3], tight, *wide[3:]]
    results = crew.hammer([Job(servers.uri, limits, **each) for each in WORKERS])
    assert admitted(results) == {"k": 700}
    for limit in wide:
        # Beside a log, a limit's count is in the same place only if the log is asked for, too.
        roomy = [each | {"limit": 10 * LIMIT} for each in wide if each is not limit]
        assert remaining(servers, limit, "k", *roomy) == LIMIT - 700


WIRES = ("threads", "asyncio")
CLOCKS_OFF_SECONDS = (-60, 0, 60)


def revealing_window(servers: Single) -> int:
    """Return a window in seconds that reveals a clock which is a minute ahead.

    For that clock the window has ended; for the others it ends after the test. It is longer than
    two minutes, so that a clock which is a minute off reports other waits.
    """
    seconds, _ = servers.admin.time()
    return next(per for per in range(150, 1_000) if 35 <= per - seconds % per <= 55)


def revealing_limit(servers: Single, algorithm: AlgorithmName) -> dict[str, Any]:
    """Return a limit of 400 units at once and at least one more within a minute."""
    if algorithm in BUCKETS:
        return {"limit": 1, "per": 40, "algorithm": algorithm, "capacity": 400}
    if algorithm == "sliding_window_log":
        return {"limit": 400, "per": 40, "algorithm": algorithm}
    return {"limit": 400, "per": revealing_window(servers), "algorithm": algorithm}


@pytest.fixture(scope="module")
def crews() -> Iterator[dict[int, Crew]]:
    """Start two processes for each error of the clock."""
    crews = {seconds: Crew(len(WIRES), seconds) for seconds in CLOCKS_OFF_SECONDS}
    yield crews
    for crew in crews.values():
        crew.close()


@pytest.fixture
def single() -> Single:
    """Return the shared single server, without keys."""
    server = running("single")
    server.flush()
    return server


@every_algorithm
def test_processes_whose_clocks_differ_are_admitted_exactly_the_limit(
    algorithm: AlgorithmName, single: Single, crews: dict[int, Crew]
) -> None:
    """Processes a minute behind, on time and a minute ahead are admitted the limit together.

    By its own clock, the last process would find that some quota has returned.
    """
    limits = [revealing_limit(single, algorithm)]
    started = time.monotonic()
    results = []
    for crew in crews.values():
        results += crew.hammer([Job(single.uri, limits, wire=wire) for wire in WIRES])
    # On a very busy machine, some quota really returns before the last process is done.
    returned = int(time.monotonic() - started) // 35 * (1 if algorithm in BUCKETS else 400)
    assert 400 <= admitted(results)["k"] <= 400 + returned


@every_algorithm
def test_a_clock_set_wrong_changes_no_decision(
    algorithm: AlgorithmName, single: Single, crews: dict[int, Crew]
) -> None:
    """Processes whose clocks are a minute off get the same decisions as one with the right clock.

    Other processes have spent from the keys before. The waits agree too; an error of a minute
    would show there.
    """
    limits = [{"limit": 5, "per": revealing_window(single), "algorithm": algorithm}]
    keys = [f"key of {seconds}" for seconds in crews]
    crews[0].hammer([Job(single.uri, limits, keys, record=3)])
    results = [
        crew.hammer([Job(single.uri, limits, [key], record=5)])[0]
        for key, crew in zip(keys, crews.values(), strict=True)
    ]
    behind, right, ahead = (next(iter(result["decisions"].values())) for result in results)
    assert [allowed for allowed, *_ in right] == [True] * 2 + [False] * 3
    for decisions in (behind, ahead):
        assert [each[:3] for each in decisions] == [each[:3] for each in right]
        for decision, expected in zip(decisions, right, strict=True):
            assert decision[3:] == pytest.approx(expected[3:], abs=LATE_SECONDS_MAX)
    # The clocks were really off.
    for result, seconds in zip(results, CLOCKS_OFF_SECONDS, strict=True):
        off_seconds = (result["now_ns"] - results[1]["now_ns"]) / 10**9
        assert off_seconds == pytest.approx(seconds, abs=LATE_SECONDS_MAX)
