"""`use_clock` and `limiting_off` apply to existing limiters, and restore the previous state."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratekeeper import AsyncLimiter, InvalidCost, InvalidKey, Limiter
from ratekeeper.core import switches
from ratekeeper.testing import ManualClock, forget_counts, limiting_off, use_clock

# Created at import, as in an application, so tests cannot pass a clock to it.
LIMITER = Limiter("2/minute", name="import-time")


def test_use_clock_applies_to_an_existing_limiter() -> None:
    """Inside the block, the limiter reads the manual clock and waits return at once."""
    with use_clock(ManualClock(start=2_000_000_000)) as clock:
        assert [bool(LIMITER.check("clock")) for _ in range(3)] == [True, True, False]
        clock.advance(30)
        assert LIMITER.check("clock")
        assert LIMITER.wait("clock")
        assert clock.now_ns() == 2_000_000_060 * 10**9


def test_use_clock_does_not_affect_a_limiter_with_its_own_clock() -> None:
    """`clock=` is an explicit choice."""
    own = ManualClock()
    limiter = Limiter("1/minute", clock=own)
    with use_clock(ManualClock()) as other:
        limiter.check("k")
        other.advance(60)
        assert not limiter.check("k")
        own.advance(60)
        assert limiter.check("k")


def test_use_clock_nests() -> None:
    """The clock of the inner block applies, and after it that of the outer block."""
    with use_clock(ManualClock()) as outer:
        with use_clock(ManualClock()) as inner:
            assert switches.clock is inner
        assert switches.clock is outer
    assert switches.clock is None


def test_use_clock_is_undone_when_the_block_raises() -> None:
    """A failed test does not leave its clock behind."""
    with pytest.raises(RuntimeError), use_clock(ManualClock()):
        raise RuntimeError
    assert switches.clock is None


async def test_limiting_off_allows_all_and_counts_nothing() -> None:
    """Checks, waits and holds pass with the whole quota remaining, and nothing is spent."""
    later = AsyncLimiter("2/minute")
    with limiting_off():
        for _ in range(10):
            decision = LIMITER.check("off")
            assert (decision.allowed, decision.remaining, decision.degraded) == (True, 2, False)
            assert decision.rule == "import-time"
            assert LIMITER.peek("off").remaining == 2
            assert LIMITER.wait("off").allowed
            assert await later.check("off")
            with LIMITER.reserve("off"):
                pass
        assert LIMITER.check("off", cost=1_000_000).allowed
    assert LIMITER.peek("off").remaining == 2
    assert (await later.peek("off")).remaining == 2


def test_limiting_off_still_rejects_invalid_arguments() -> None:
    """A test with limiting off still finds an invalid key or cost."""
    with limiting_off():
        with pytest.raises(InvalidKey):
            LIMITER.check("")
        with pytest.raises(InvalidCost):
            LIMITER.check("k", -1)


def test_limiting_off_nests_and_is_undone() -> None:
    """Limiting is off until the outermost block ends, also if it raises."""
    with limiting_off():
        with pytest.raises(RuntimeError), limiting_off():
            raise RuntimeError
        assert switches.limiting_off
    assert not switches.limiting_off


def test_counts_that_other_processes_use_are_not_forgotten(tmp_path: Path) -> None:
    """`forget_counts` empties `memory://` stores only, and ignores closed ones."""
    Limiter("1/minute").close()
    with Limiter("1/minute", store=f"shared://{tmp_path}/app.limits?capacity=100") as shared:
        assert shared.check("k")
        assert LIMITER.check("forget", cost=2)
        forget_counts()
        assert LIMITER.peek("forget").remaining == 2
        assert not shared.check("k")
