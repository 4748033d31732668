"""Periods of time in the URL of a page: one of the last ones, or from a time to a time.

The URL holds times in UTC. A script (`period.js`) shows the fields in the viewer's zone, and sends
UTC. Without it, the fields are in UTC.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from ratekeeper.service.console.views import Page

# The key in the URL, the text, and the length.
LASTS: Final = (
    ("15m", "15 minutes", timedelta(minutes=15)),
    ("1h", "1 hour", timedelta(hours=1)),
    ("24h", "24 hours", timedelta(days=1)),
    ("7d", "7 days", timedelta(days=7)),
)
# Usage is counted by the minute, and by the hour after a day.
_MINUTE: Final = timedelta(minutes=1)
_HOUR: Final = timedelta(hours=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Period(NamedTuple):
    """A period as it is in the URL. Times are texts, which the admin API checks."""

    last: str
    """A key of LASTS; empty if the period has times, or is not limited."""
    from_: str
    to: str

    def times(self, now: datetime) -> dict[str, str]:
        """Return `from_` and `to` for the admin API. A last period begins at a full minute or hour.

        >>> Period("1h", "", "").times(datetime(2026, 11, 15, 12, 0, 30, tzinfo=UTC))
        {'from_': '2026-11-15T11:00:00Z', 'to': '2026-11-15T12:00:30Z'}
        """
        until = self.to or _text(now + timedelta(microseconds=999_999))
        for key, _, length in LASTS:
            if key == self.last:
                since = now - length
                unit = _HOUR if length > _HOUR else _MINUTE
                return {"from_": _text(since - (since - _EPOCH) % unit), "to": until}
        return {"from_": self.from_, "to": until}


def period_of(page: Page, default: str = "") -> Period:
    """Return the period in the URL of a page. Raises ValueError. `default` is a key of LASTS."""
    last, from_, to = page.query("last"), page.query("from"), page.query("to")
    if from_ or to:
        return Period("", from_, to)
    if last not in {"", *(key for key, _, _ in LASTS)}:
        known = ", ".join(key for key, _, _ in LASTS)
        raise ValueError(f"last={last[:40]!r} is no period; choose one of {known}.")
    return Period(last or default, "", "")


def _text(time: datetime) -> str:
    return time.astimezone(UTC).replace(microsecond=0, tzinfo=None).isoformat() + "Z"
