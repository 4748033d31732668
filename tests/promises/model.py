"""What each algorithm means, written as plainly as possible to be held against a store.

Lists, fractions, and no thought for speed or memory; nothing is imported from the algorithms. A
quota here answers one question, how many units are free, and does three things: spend, give
back, forget. Credits and several limits are built on these, once for all algorithms.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor
from typing import Literal, Protocol

from tollkeeper import Limit

MICRO = Fraction(1, 1_000_000)


class Quota(Protocol):
    """One limit's quota of one key. Time comes in as it is; each quota knows what is past."""

    def free(self, now_ns: int) -> int: ...

    def spend(self, now_ns: int, units: int) -> None: ...

    def give_back(self, now_ns: int, units: int) -> None: ...


class Bucket:
    """So much is in it. It fills at limit / window, and what came in is rounded down to a
    millionth of a unit whenever something is taken out or put back."""

    def __init__(self, limit: Limit) -> None:
        self.capacity = limit.capacity
        self.rate = Fraction(limit.limit, limit.window_ns)
        self.level = Fraction(limit.capacity)
        self.at_ns: int | None = None

    def level_at(self, now_ns: int) -> Fraction:
        if self.at_ns is None:
            return self.level
        come_in = max(now_ns - self.at_ns, 0) * self.rate
        return min(self.level + floor(come_in / MICRO) * MICRO, Fraction(self.capacity))

    def free(self, now_ns: int) -> int:
        return floor(self.level_at(now_ns))

    def spend(self, now_ns: int, units: int) -> None:
        self.level = self.level_at(now_ns) - units
        self.at_ns = now_ns if self.at_ns is None else max(self.at_ns, now_ns)

    def give_back(self, now_ns: int, units: int) -> None:
        self.spend(now_ns, 0)
        self.level = min(self.level + units, Fraction(self.capacity))


class Log:
    """Every unit's time. It counts until a window later."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.times: list[int] = []

    def free(self, now_ns: int) -> int:
        at_ns = max([now_ns, *self.times])
        return self.limit.limit - sum(time > at_ns - self.limit.window_ns for time in self.times)

    def spend(self, now_ns: int, units: int) -> None:
        self.times += [max([now_ns, *self.times])] * units

    def give_back(self, now_ns: int, units: int) -> None:
        self.times = self.times[: max(len(self.times) - units, 0)]


class FixedWindow:
    """A count for every window since the epoch."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.counts: dict[int, int] = {}

    def window(self, now_ns: int) -> int:
        return max([now_ns // self.limit.window_ns, *self.counts])

    def free(self, now_ns: int) -> int:
        return self.limit.limit - self.counts.get(self.window(now_ns), 0)

    def spend(self, now_ns: int, units: int) -> None:
        window = self.window(now_ns)
        self.counts[window] = self.counts.get(window, 0) + units

    def give_back(self, now_ns: int, units: int) -> None:
        window = self.window(now_ns)
        self.counts[window] = max(self.counts.get(window, 0) - units, 0)


class SlidingCounter:
    """The same, and the window before counts for the part of it that is still in sight."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.counts: dict[int, int] = {}
        self.at_ns = 0

    def free(self, now_ns: int) -> int:
        window, elapsed_ns = divmod(max(now_ns, self.at_ns), self.limit.window_ns)
        in_sight = 1 - Fraction(elapsed_ns, self.limit.window_ns)
        previous, current = self.counts.get(window - 1, 0), self.counts.get(window, 0)
        return floor(self.limit.limit - current - previous * in_sight)

    def spend(self, now_ns: int, units: int) -> None:
        self.at_ns = max(now_ns, self.at_ns)
        window = self.at_ns // self.limit.window_ns
        self.counts[window] = self.counts.get(window, 0) + units

    def give_back(self, now_ns: int, units: int) -> None:
        window = max(now_ns, self.at_ns) // self.limit.window_ns
        for number in (window, window - 1):
            back = min(units, self.counts.get(number, 0))
            self.counts[number] = self.counts.get(number, 0) - back
            units -= back


QUOTAS: dict[str, type[Bucket | Log | FixedWindow | SlidingCounter]] = {
    "token_bucket": Bucket,
    "leaky_bucket": Bucket,
    "sliding_window_log": Log,
    "fixed_window": FixedWindow,
    "sliding_window_counter": SlidingCounter,
}


class Account:
    """One limit's quota and credit of one key. The quota is spent first, then the credit."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.forget()

    def forget(self) -> None:
        self.quota: Quota = QUOTAS[self.limit.algorithm](self.limit)
        self.credit = 0
        self.credit_ends_ns = 0

    def credit_at(self, now_ns: int) -> int:
        return self.credit if now_ns < self.credit_ends_ns else 0

    def free(self, now_ns: int) -> int:
        return self.quota.free(now_ns) + self.credit_at(now_ns)

    def spend(self, now_ns: int, units: int) -> None:
        own = min(units, self.quota.free(now_ns))
        if own:
            self.quota.spend(now_ns, own)
        self.credit = self.credit_at(now_ns) - (units - own)

    def grant(self, now_ns: int, units: int, ttl_ns: int) -> None:
        if self.credit_at(now_ns) == 0:
            self.credit_ends_ns = 0
        self.credit = self.credit_at(now_ns) + units
        self.credit_ends_ns = max(self.credit_ends_ns, now_ns + ttl_ns)


Answer = tuple[bool, int] | Literal["never", "never or denied"]


class Model:
    """Keys under one or several limits: what a gate must answer."""

    def __init__(self, limits: Sequence[Limit]) -> None:
        self.limits = limits
        self.accounts: dict[str, list[Account]] = {}

    def of(self, key: str) -> list[Account]:
        return self.accounts.setdefault(key, [Account(limit) for limit in self.limits])

    def peek(self, key: str, now_ns: int, cost: int) -> Answer:
        """Would it pass, and how much is free now?"""
        accounts = self.of(key)
        free = min(account.free(now_ns) for account in accounts)
        if cost <= free or cost == 0:
            return True, free
        for account in accounts:
            if cost > account.limit.capacity + account.credit_at(now_ns):
                return "never"
        if cost > min(account.limit.capacity for account in accounts):
            return "never or denied"  # it depends on whether the credit lasts until it fits
        return False, free

    def check(self, key: str, now_ns: int, cost: int) -> Answer:
        """Did it pass, and how much is free after it?"""
        answer = self.peek(key, now_ns, cost)
        if isinstance(answer, tuple) and answer[0]:
            for account in self.of(key):
                account.spend(now_ns, cost)
            return True, answer[1] - cost
        return answer

    def refund(self, key: str, now_ns: int, units: int) -> None:
        if units:  # giving nothing back is not an occasion to round
            for account in self.of(key):
                account.quota.give_back(now_ns, units)

    def grant(self, key: str, now_ns: int, units: int, ttl_ns: int) -> None:
        for account in self.of(key):
            account.grant(now_ns, units, ttl_ns)

    def reset(self, key: str) -> None:
        for account in self.of(key):
            account.forget()
