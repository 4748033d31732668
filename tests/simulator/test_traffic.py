"""The requests that a traffic makes."""

from __future__ import annotations

from ratekeeper.core.clock import NS_PER_SECOND
from tests.simulator.network import START_NS, EventLoop, seeded
from tests.simulator.traffic import USUAL_MIX, Recording, Traffic, TrafficGroup


def _requests(traffic: Traffic, seconds: int, seed: int = 1) -> list[tuple[float, str, int]]:
    loop = EventLoop()
    random = seeded(seed)
    found: list[tuple[float, str, int]] = []

    def arrived(subject: str, cost: int) -> None:
        found.append(((loop.now - START_NS) / NS_PER_SECOND, subject, cost))

    for group in traffic:
        group.start(loop, random, arrived)
    loop.run_until(START_NS + seconds * NS_PER_SECOND)
    return found


def test_a_group_makes_its_requests() -> None:
    """The users of a group make their number of requests, and the same seed makes the same."""
    found = _requests(USUAL_MIX, 10)
    by_group = {name: sum(name in each[1] for each in found) for name in ("light", "heavy", "abus")}
    assert 1_900 < by_group["light"] < 2_270
    assert 5_700 < by_group["heavy"] < 6_300
    assert 8_000 < by_group["abus"] < 8_700
    assert found == _requests(USUAL_MIX, 10) != _requests(USUAL_MIX, 10, seed=2)


def test_a_group_has_its_cost_and_its_bursts() -> None:
    """All requests of a burst arrive at one instant."""
    found = _requests((TrafficGroup("nightly", 2, 600, cost=10, burst=5),), 60)
    assert {each[1:] for each in found} == {("nightly:0", 10), ("nightly:1", 10)}
    assert len(found) == 5 * len({each[0] for each in found})


def test_a_recording_is_played() -> None:
    """Each request arrives at its time."""
    recording = Recording(
        ((NS_PER_SECOND // 4, "user:1", 1), (3 * NS_PER_SECOND // 2, "user:2", 3))
    )
    assert _requests((recording,), 60) == [(0.25, "user:1", 1), (1.5, "user:2", 3)]
