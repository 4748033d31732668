"""Periods in the URL of a page."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.service.console.periods import LASTS, Period
from tests.service.console.client import ConsoleClient

NOON = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("period", "times"),
    [
        (Period("15m", "", ""), ("2026-11-15T11:45:00Z", "2026-11-15T12:00:00Z")),
        (Period("24h", "", ""), ("2026-11-14T12:00:00Z", "2026-11-15T12:00:00Z")),
        (Period("", "2026-11-01", ""), ("2026-11-01", "2026-11-15T12:00:00Z")),
        (Period("", "", "2026-11-02"), ("", "2026-11-02")),
        (Period("", "yesterday", "now"), ("yesterday", "now")),
    ],
)
def test_the_times_of_a_period(period: Period, times: tuple[str, str]) -> None:
    """A period without an end ends now. The admin API checks what was typed."""
    assert tuple(period.times(NOON).values()) == times


@given(st.integers(10**15, 4 * 10**15), st.sampled_from(LASTS))
def test_a_last_period_has_whole_minutes_of_usage(
    now_us: int, last: tuple[str, str, timedelta]
) -> None:
    """It begins at a full minute, or hour, at most one earlier, and has all requests until now."""
    now = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=now_us)
    times = Period(last[0], "", "").times(now)
    since, until = (datetime.fromisoformat(times[each]) for each in ("from_", "to"))
    unit = timedelta(hours=1) if last[2] > timedelta(hours=1) else timedelta(minutes=1)
    assert last[2] <= now - since < last[2] + unit
    assert since.timestamp() % unit.total_seconds() == 0
    assert timedelta() <= until - now < timedelta(seconds=1)


async def test_an_unknown_period_is_a_problem(console: ConsoleClient) -> None:
    """The page says which ones there are, and keeps the filters."""
    for path in ("/denials?last=2w&rule=orders", "/audit?last=2w&author=ann"):
        text = await console.get(path, 400)
        assert "choose one of 15m, 1h, 24h, 7d" in text
        assert 'value="orders"' in text or 'value="ann"' in text
