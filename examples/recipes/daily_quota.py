"""Give each customer a quota for the day, and prevent its use in a single burst.

Two limits decide together: the quota, and a guard against bursts. A request that one of them denies
costs nothing in the other.

Choose what "a day" means. `fixed_window` is the calendar day in UTC, as it stands in a contract:
every quota is whole at midnight. `in any day` is any 24 hours, exactly. The default
`token_bucket` refills all day long, and that is the trap: a customer who starts with a full bucket
gets nearly twice the quota on its first day.
"""

from __future__ import annotations

from datetime import UTC, datetime

from ratekeeper import Limiter
from ratekeeper.testing import ManualClock

clock = ManualClock(datetime(2026, 3, 2, tzinfo=UTC).timestamp())  # leave it out in real code
limiter = Limiter("1000/day fixed_window; 10/second", clock=clock)


def admitted_in_a_day(limiter: Limiter) -> int:
    """Return how many requests pass if a customer sends 20 every minute."""
    count = 0
    for _ in range(24 * 60):
        count += sum(bool(limiter.check("acme")) for _ in range(20))
        clock.advance(60)
    return count


def main() -> None:
    burst = [limiter.check("acme") for _ in range(500)]
    print(f"500 requests at once: {sum(map(bool, burst))} pass")
    assert sum(map(bool, burst)) == 10
    assert burst[-1].retry_after == 0.1, "the guard says to wait a moment, and not until tomorrow"

    rest = admitted_in_a_day(limiter)
    print(f"the first day: {10 + rest}")
    assert 10 + rest == 1000
    assert limiter.peek("acme").reset_after == 0, "at midnight the quota is whole again"

    # A customer whose quota is used up waits until midnight.
    clock.advance(12 * 3600)
    while limiter.wait("acme", timeout=1):
        pass
    denied = limiter.check("acme")
    print(f"at noon: wait {denied.retry_after / 3600:.1f} h")
    assert 11 * 3600 < denied.retry_after < 12 * 3600

    bucket = Limiter("1000/day; 10/second", clock=clock)
    first = admitted_in_a_day(bucket)
    print(f"with a token bucket: {first} on the first day")
    assert first > 1900

    unguarded = Limiter("1000/day fixed_window", clock=clock)
    assert sum(bool(unguarded.check("acme")) for _ in range(2000)) == 1000
    print("without the guard: 1000 in the first second")


if __name__ == "__main__":
    main()
