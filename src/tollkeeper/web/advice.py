"""What an answer asks of its client: how long to wait, and whether the quota is used up.

Servers say it in four ways. `Retry-After` is the standard one, in seconds or as a date. The IETF
draft's `RateLimit` says what remains and when there is more; its revisions differ (10 has
`"orders";r=0;t=5`, 7 has `limit=100, remaining=0, reset=5`, 6 has a header for each). The oldest,
`X-RateLimit-Reset`, is a Unix time on some servers and seconds from now on others.

Whatever a server sends is read without an error, and what is read is never less than what was
asked: fractions round up, and a number too long to read is longer than anyone waits. Pure: no
clock, no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple, Protocol

from tollkeeper.core.clock import NS_PER_SECOND

# What an answer that asks for more than this is taken to ask for: some thirty thousand years.
WAIT_NS_MAX: Final = 10**12 * NS_PER_SECOND
# No header says anything useful beyond this; longer ones are cut.
HEADER_LENGTH_MAX: Final = 4_096
DATE_LENGTH_MAX: Final = 64
# A reset at least this large is a moment, not a length of time: 2001 in Unix seconds.
UNIX_TIME_S_MIN: Final = 10**9

_SECONDS_DIGITS_MAX = 12
_SECONDS = re.compile(r"[ \t]*(\d+)(?:\.(\d*))?[ \t]*", re.ASCII)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
# Draft 10: the parameters of each policy. Draft 7: one dictionary.
_PARAMETER = re.compile(r";[ \t]*([rt])[ \t]*=[ \t]*([\d.]+)", re.ASCII)
_MEMBER = re.compile(r"(?:^|,)[ \t]*(remaining|reset)[ \t]*=[ \t]*([\d.]+)", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Headers(Protocol):
    """Headers by name, whatever their case; several lines of one name joined by commas."""

    def get(self, key: str, /) -> str | None:
        """The header's text, or None."""
        ...


class Advice(NamedTuple):
    """What one answer says to whoever sent the request."""

    wait_ns: int | None
    """How long to wait before the same request is sent again; None where nothing is said."""
    spent_ns: int | None
    """How long until there is more of a quota that is used up; 0 where some is left, and None
    where nothing is said."""


class _Quota(NamedTuple):
    """What is left of one quota, and when there is more, if the answer says so."""

    spent: bool | None
    reset_ns: int | None


def advice_of(headers: Headers, now_ns: int) -> Advice:
    """What an answer that came at `now_ns` (Unix time) asks for."""
    quotas = list(_quotas(headers, now_ns))
    spent = [quota.reset_ns for quota in quotas if quota.spent and quota.reset_ns is not None]
    wait_ns = _retry_after_ns(headers, now_ns)
    if wait_ns is None:
        # Where nothing is used up, a request that costs more than one unit was denied.
        known = spent or [quota.reset_ns for quota in quotas if quota.reset_ns is not None]
        wait_ns = max(known, default=None)
    return Advice(wait_ns, max(spent, default=None if _nobody_knows(quotas) else 0))


def _nobody_knows(quotas: list[_Quota]) -> bool:
    """Whether a quota is used up for nobody knows how long, or there is none."""
    return not quotas or any(quota.spent is not False for quota in quotas)


def _retry_after_ns(headers: Headers, now_ns: int) -> int | None:
    text = _header(headers, "retry-after")
    if text is None:
        return None
    seconds = [_seconds_ns(part) for part in text.split(",")]
    numbers = [each for each in seconds if each is not None]
    if len(numbers) == len(seconds):
        return max(numbers)
    moment_ns = _date_ns(text)
    if moment_ns is None:
        return None
    # Counted from the server's own date: a client whose clock is ahead would come too soon.
    answered_ns = _date_ns(_header(headers, "date") or "")
    return max(moment_ns - (now_ns if answered_ns is None else answered_ns), 0)


def _quotas(headers: Headers, now_ns: int) -> Iterator[_Quota]:
    """The quotas that an answer tells of, by the newest of the ways in which it does."""
    text = _header(headers, "ratelimit")
    if text is not None and (found := _structured(_QUOTED.sub('""', text))):
        yield from found
        return
    for prefix in ("ratelimit", "x-ratelimit"):
        remaining = _header(headers, f"{prefix}-remaining")
        reset = _header(headers, f"{prefix}-reset")
        if remaining is not None or reset is not None:
            yield _Quota(_is_zero(remaining), _reset_ns(reset or "", now_ns))
            return


def _structured(text: str) -> list[_Quota]:
    """The quotas in a `RateLimit` header whose quoted names were emptied."""
    single = dict(_MEMBER.findall(text))
    if single:
        return [_Quota(_is_zero(single.get("remaining")), _seconds_ns(single.get("reset", "")))]
    found = []
    for member in text.split(","):
        parameters = dict(_PARAMETER.findall(member))
        if parameters:
            reset_ns = _seconds_ns(parameters.get("t", ""))
            found.append(_Quota(_is_zero(parameters.get("r")), reset_ns))
    return found


def _header(headers: Headers, name: str) -> str | None:
    text = headers.get(name)
    return None if text is None else text[:HEADER_LENGTH_MAX]


def _is_zero(text: str | None) -> bool | None:
    number = None if text is None else _seconds_ns(text)
    return None if number is None else number == 0


def _reset_ns(text: str, now_ns: int) -> int | None:
    """A reset as a length of time, whether it was a moment or a length of time."""
    reset_ns = _seconds_ns(text)
    if reset_ns is None or reset_ns < UNIX_TIME_S_MIN * NS_PER_SECOND:
        return reset_ns
    return max(reset_ns - now_ns, 0)


def _seconds_ns(text: str) -> int | None:
    """A number of seconds in nanoseconds, rounded up; None for what is not one."""
    match = _SECONDS.fullmatch(text)
    if match is None:
        return None
    whole = match[1].lstrip("0")
    if len(whole) > _SECONDS_DIGITS_MAX:
        return WAIT_NS_MAX
    fraction = match[2] or ""
    rest = 1 if fraction[9:].strip("0") else 0
    return int(whole or "0") * NS_PER_SECOND + int(fraction[:9].ljust(9, "0")) + rest


def _date_ns(text: str) -> int | None:
    """An HTTP date as Unix time in nanoseconds; None for what is not one."""
    if not 0 < len(text) <= DATE_LENGTH_MAX:
        return None
    try:
        moment = parsedate_to_datetime(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)  # HTTP dates are in UTC, and this did not say
        return (moment - _EPOCH) // timedelta(seconds=1) * NS_PER_SECOND
    except (ValueError, TypeError, IndexError, OverflowError):
        return None  # the parser raises any of these for what is not a date
