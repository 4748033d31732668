"""A simple model of each algorithm, to compare stores with.

It uses lists and fractions, ignores speed and memory, and imports nothing from the algorithms. A
quota returns the number of free units, and has three operations: spend, give back and forget.
Credits and several limits are built on these, once for all algorithms.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor
from typing import Literal, Protocol

from ratekeeper import Limit

MICRO = Fraction(1, 1_000_000)


class Quota(Protocol):
    """The quota of one key under one limit. `now_ns` may go back; each quota handles that."""

    def free(self, now_ns: int) -> int: ...

    def spend(self, now_ns: int, units: int) -> None: ...

    def give_back(self, now_ns: int, units: int, charged_ns: int | None) -> None: ...


class Bucket:
    """A level that rises at limit / window, in steps that count from the first request of a full
    bucket. The refill is rounded down to a millionth of a unit whenever units are spent or given
    back."""

    def __init__(self, limit: Limit) -> None:
        self.capacity = limit.capacity
        self.rate = Fraction(limit.limit, limit.window_ns)
        self.step_ns = limit.refill_step_ns
        self.level = Fraction(limit.capacity)
        self.at_ns: int | None = None

    def level_at(self, now_ns: int) -> Fraction:
        if self.at_ns is None:
            return self.level
        refilled = self.steps_ns(now_ns) * self.rate
        return min(self.level + floor(refilled / MICRO) * MICRO, Fraction(self.capacity))

    def steps_ns(self, now_ns: int) -> int:
        """Return the time of the steps since the last one that counts."""
        assert self.at_ns is not None
        return max(now_ns - self.at_ns, 0) // self.step_ns * self.step_ns

    def free(self, now_ns: int) -> int:
        return floor(self.level_at(now_ns))

    def spend(self, now_ns: int, units: int) -> None:
        level = self.level_at(now_ns)
        if self.at_ns is None or (level == self.capacity and now_ns > self.at_ns):
            self.at_ns = now_ns
        else:
            self.at_ns += self.steps_ns(now_ns)
        self.level = level - units

    def give_back(self, now_ns: int, units: int, charged_ns: int | None) -> None:
        if self.at_ns is None:
            return
        back = Fraction(min(units, self.capacity))
        if charged_ns is not None:
            since_ns = max(self.at_ns - charged_ns, 0)
            refilled = ceil(Fraction(since_ns, self.step_ns)) * self.step_ns * self.rate
            back -= floor(refilled / MICRO) * MICRO
        if back > 0:  # as of the last change of the level: nothing was spent since
            self.level = min(self.level + back, Fraction(self.capacity))


class Log:
    """The time of every unit, which counts for one window."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.times: list[int] = []

    def free(self, now_ns: int) -> int:
        at_ns = max([now_ns, *self.times])
        return self.limit.limit - sum(time > at_ns - self.limit.window_ns for time in self.times)

    def spend(self, now_ns: int, units: int) -> None:
        self.times += [max([now_ns, *self.times])] * units

    def give_back(self, now_ns: int, units: int, charged_ns: int | None) -> None:
        at_ns = max([now_ns, *self.times])
        live = [time for time in self.times if time > at_ns - self.limit.window_ns]
        if charged_ns is None:
            self.times = live[units:]
            return
        older = [time for time in live if time <= charged_ns]
        newer = [time for time in live if time > charged_ns]
        self.times = older[: max(len(older) - units, 0)] + newer


class FixedWindow:
    """A count for each window since the epoch."""

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

    def give_back(self, now_ns: int, units: int, charged_ns: int | None) -> None:
        charged_ns = now_ns if charged_ns is None else charged_ns
        window = self.window(now_ns)
        if charged_ns // self.limit.window_ns == window:
            self.counts[window] = max(self.counts.get(window, 0) - units, 0)


class SlidingCounter:
    """A count for each window. The previous window counts by the share that is still in range."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.counts: dict[int, int] = {}
        self.at_ns = 0

    def free(self, now_ns: int) -> int:
        window, elapsed_ns = divmod(max(now_ns, self.at_ns), self.limit.window_ns)
        share = 1 - Fraction(elapsed_ns, self.limit.window_ns)
        previous, current = self.counts.get(window - 1, 0), self.counts.get(window, 0)
        return floor(self.limit.limit - current - previous * share)

    def spend(self, now_ns: int, units: int) -> None:
        self.at_ns = max(now_ns, self.at_ns)
        window = self.at_ns // self.limit.window_ns
        self.counts[window] = self.counts.get(window, 0) + units

    def give_back(self, now_ns: int, units: int, charged_ns: int | None) -> None:
        at_ns = max(now_ns, self.at_ns)
        window = (at_ns if charged_ns is None else charged_ns) // self.limit.window_ns
        self.counts[window] = max(self.counts.get(window, 0) - units, 0)


QUOTAS: dict[str, type[Bucket | Log | FixedWindow | SlidingCounter]] = {
    "token_bucket": Bucket,
    "leaky_bucket": Bucket,
    "sliding_window_log": Log,
    "fixed_window": FixedWindow,
    "sliding_window_counter": SlidingCounter,
}


class Account:
    """The quota and the credit of one key under one limit. The quota is spent first."""

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
    """Keys under one or several limits: the answers that a counter must give."""

    def __init__(self, limits: Sequence[Limit]) -> None:
        self.limits = limits
        self.accounts: dict[str, list[Account]] = {}

    def of(self, key: str) -> list[Account]:
        return self.accounts.setdefault(key, [Account(limit) for limit in self.limits])

    def peek(self, key: str, now_ns: int, cost: int) -> Answer:
        """Return whether the cost would pass, and the units that are free now."""
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
        """Return whether the cost passed, and the units that are free afterwards."""
        answer = self.peek(key, now_ns, cost)
        if isinstance(answer, tuple) and answer[0]:
            for account in self.of(key):
                account.spend(now_ns, cost)
            return True, answer[1] - cost
        return answer

    def refund(self, key: str, now_ns: int, units: int, charged_ns: int | None) -> None:
        if units:  # a refund of 0 must not round
            for account in self.of(key):
                account.quota.give_back(now_ns, units, charged_ns)

    def grant(self, key: str, now_ns: int, units: int, ttl_ns: int) -> None:
        for account in self.of(key):
            account.grant(now_ns, units, ttl_ns)

    def reset(self, key: str) -> None:
        for account in self.of(key):
            account.forget()
