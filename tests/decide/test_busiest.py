"""The sketch of who is checked most."""

from __future__ import annotations

import pytest

from tollkeeper.decide.busiest import BUSIEST_MAX, HALVE_EVERY, SAMPLE_EVERY, Busiest


def _note(sketch: Busiest, subject: str, samples: int) -> None:
    for _ in range(samples * SAMPLE_EVERY):
        sketch.note(subject)


def test_nobody_at_first() -> None:
    """An unused sketch knows no one, and neither does one with too few checks for a sample."""
    sketch = Busiest()
    assert sketch.top(10) == []
    for _ in range(SAMPLE_EVERY - 1):
        sketch.note("k")
    assert sketch.top(10) == []


def test_most_first_with_about_how_many() -> None:
    """Samples count for as many checks as they stand for."""
    sketch = Busiest()
    _note(sketch, "quiet", 1)
    _note(sketch, "loud", 5)
    _note(sketch, "middling", 3)
    assert sketch.top(10) == [("loud", 320), ("middling", 192), ("quiet", 64)]


@pytest.mark.parametrize(("count", "names"), [(2, ["b", "a"]), (1, ["b"]), (0, []), (-1, [])])
def test_as_many_as_asked(count: int, names: list[str]) -> None:
    """No more than `count`, and none for none."""
    sketch = Busiest()
    _note(sketch, "a", 1)
    _note(sketch, "b", 2)
    assert [name for name, _ in sketch.top(count)] == names


def test_memory_is_bounded_and_the_loud_stay() -> None:
    """Ten thousand names pass through; 128 are kept, and who made most checks is among them."""
    sketch = Busiest()
    for turn in range(10_000):
        _note(sketch, f"passing:{turn}", 1)
        if turn % 10 == 0:
            _note(sketch, "loud", 1)
    assert len(sketch.top(10**6)) == BUSIEST_MAX == 128
    assert "loud" in {name for name, _ in sketch.top(BUSIEST_MAX)}


def test_it_tells_of_lately_and_not_of_ever() -> None:
    """Counts are halved every million checks, so yesterday's client gives way to today's."""
    sketch = Busiest()
    _note(sketch, "yesterday", HALVE_EVERY - 1)
    assert sketch.top(1) == [("yesterday", (HALVE_EVERY - 1) * SAMPLE_EVERY)]
    _note(sketch, "today", 1)
    assert sketch.top(2) == [("yesterday", (HALVE_EVERY - 1) // 2 * SAMPLE_EVERY)]
