"""The levels of a limit that several members share without an authority: nodes, or regions.

A member with the share w of a limit, w <= 1, keeps two levels for each subject:

    known   the units that others have reported, and its own units that all others have accepted
    own     its own units that at least one other member has not accepted yet

Time drains `known` at the rate R of the limit. Only when `known` is empty does it drain `own`, at
w × R. So the *load* w × known + own drains at w × R. `fleet/totals.py` says how members use it, and
why the limit holds.

A ledger has both levels of one limit, in micro-units. All numbers are integers. Rounding is towards
fewer admissions. A window counter has the counts of the current window, and a log the entries of
the last window. A log takes the units of others at the time at which they are learnt, which is
never too early. It groups its entries in 64 parts of the window, each leaving at its end. A window
counter takes them into the window in which they were reported: see `learn`.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final, Protocol

from tollkeeper.core.model import MICROS_PER_UNIT, WINDOW_NS_STEP, Limit
from tollkeeper.decide.algorithms.outcome import Outcome

_LOG_PARTS: Final = 64


class Ledger(Protocol):
    """`known` and `own` of one limit, in micro-units. The share is the fraction w."""

    limit: Limit

    def levels(self, now_ns: int, share: Fraction) -> tuple[int, int]:
        """Return `known` and `own`."""
        ...

    def add(self, now_ns: int, share: Fraction, known: int, own: int) -> None:
        """Add units that are learnt or admitted now."""
        ...

    def learn(self, now_ns: int, share: Fraction, known: int, at_ns: int) -> None:
        """Add units of another member, which it reported at `at_ns` by its own clock.

        A window counter adds them to the window of that time, if that still counts.
        """
        ...

    def behind(self, now_ns: int, at_ns: int) -> int:
        """Return by how many windows `at_ns` is before the current one; negative if after.

        0 for limits without windows that begin at fixed times.
        """
        ...

    def move(self, now_ns: int, share: Fraction, last: int) -> None:
        """Move own units to `known`, all but the last so many that were added."""
        ...

    def wait_ns(self, now_ns: int, share: Fraction, most: int) -> int:
        """Return the time until the load is at most `most`, if nothing is added."""
        ...

    def give_back(
        self, now_ns: int, share: Fraction, known: int, own: int, charged_ns: int | None = None
    ) -> None:
        """Take units off the levels, as far as they are there.

        A log takes units off that are not newer than `charged_ns`, the newest of them first;
        without a time, the oldest first. So the log admits no more later on.
        """
        ...

    @property
    def numbers(self) -> list[int]:
        """All numbers that a ledger keeps. A ledger with the same numbers is the same."""
        ...

    @numbers.setter
    def numbers(self, numbers: list[int]) -> None: ...


def load(ledger: Ledger, now_ns: int, share: Fraction) -> int:
    """Return w × known + own, times the denominator of w."""
    known, own = ledger.levels(now_ns, share)
    return share.numerator * known + share.denominator * own


class BucketLedger:
    """The levels of a token bucket or a leaky bucket."""

    __slots__ = ("_known", "_last_ns", "_own", "limit")

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._last_ns = self._known = self._own = 0

    def _at(self, now_ns: int, share: Fraction) -> tuple[int, int, int]:
        """Return the levels, and the time up to which they are drained."""
        if now_ns == self._last_ns:  # the usual case right after a change
            return self._known, self._own, now_ns
        limit = self.limit
        elapsed_ns = max(now_ns - self._last_ns, 0)
        elapsed_ns -= elapsed_ns % limit.refill_step_ns
        # Rounds down: neither a part of a step nor a part of a micro-unit can be spent.
        drained = elapsed_ns * limit.micros_numerator // limit.ns_denominator
        known, own = self._known - drained, self._own
        if known < 0:
            # `known` became empty on the way: the rest of the time drains `own`, at the share.
            own = max(own - -known * share.numerator // share.denominator, 0)
            known = 0
        return known, own, self._last_ns + elapsed_ns if known or own else now_ns

    def levels(self, now_ns: int, share: Fraction) -> tuple[int, int]:
        return self._at(now_ns, share)[:2]

    def add(self, now_ns: int, share: Fraction, known: int, own: int) -> None:
        if not known and not own:  # each change rounds the drain down to a micro-unit
            return
        was_known, was_own, self._last_ns = self._at(now_ns, share)
        self._known, self._own = was_known + known, was_own + own

    def move(self, now_ns: int, share: Fraction, last: int) -> None:
        self._known, self._own, self._last_ns = self._at(now_ns, share)
        moved = max(self._own - last, 0)
        self._known += moved
        self._own -= moved

    def wait_ns(self, now_ns: int, share: Fraction, most: int) -> int:
        if load(self, now_ns, share) <= most:
            return 0
        limit = self.limit
        # Both levels drain the load at share × rate; one micro-unit of each may be rounded away.
        over = share.numerator * (self._known + 1) + share.denominator * (self._own + 1) - most
        rate = share.numerator * limit.micros_numerator * limit.refill_step_ns
        steps = -(-over * limit.ns_denominator // rate)
        return max(self._last_ns + steps * limit.refill_step_ns - now_ns, 0)

    def learn(self, now_ns: int, share: Fraction, known: int, at_ns: int) -> None:  # noqa: ARG002 - as every ledger
        self.add(now_ns, share, known, 0)

    def behind(self, now_ns: int, at_ns: int) -> int:  # noqa: ARG002 - as every ledger
        return 0

    def give_back(
        self,
        now_ns: int,
        share: Fraction,
        known: int,
        own: int,
        charged_ns: int | None = None,  # noqa: ARG002 - as every ledger
    ) -> None:
        if not known and not own:  # see add
            return
        was_known, was_own, self._last_ns = self._at(now_ns, share)
        self._known, self._own = max(was_known - known, 0), max(was_own - own, 0)

    @property
    def numbers(self) -> list[int]:
        return [self._last_ns, self._known, self._own]

    @numbers.setter
    def numbers(self, numbers: list[int]) -> None:
        self._last_ns, self._known, self._own = numbers


class WindowLedger:
    """The counts of a fixed window or of a sliding window counter."""

    __slots__ = ("_counts", "_number", "limit")

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._number = 0
        # known and own in this window, known and own in the window before
        self._counts = (0, 0, 0, 0)

    def _at(self, now_ns: int) -> tuple[int, tuple[int, int, int, int]]:
        """Return the number of the window and its counts."""
        number = max(now_ns // self.limit.window_ns, self._number)
        known, own, _, _ = self._counts
        if number == self._number:
            return number, self._counts
        if number == self._number + 1 and self.limit.algorithm == "sliding_window_counter":
            return number, (0, 0, known, own)
        return number, (0, 0, 0, 0)

    def levels(self, now_ns: int, share: Fraction) -> tuple[int, int]:  # noqa: ARG002 - as every ledger
        number, (known, own, known_before, own_before) = self._at(now_ns)
        window_ns = self.limit.window_ns
        left_ns = min((number + 1) * window_ns - now_ns, window_ns)
        known += -(-known_before * left_ns // window_ns)  # rounds up
        own += -(-own_before * left_ns // window_ns)
        return known, own

    def add(self, now_ns: int, share: Fraction, known: int, own: int) -> None:  # noqa: ARG002 - as every ledger
        self._number, (was_known, was_own, *before) = self._at(now_ns)
        self._counts = (was_known + known, was_own + own, before[0], before[1])

    def move(self, now_ns: int, share: Fraction, last: int) -> None:  # noqa: ARG002 - as every ledger
        self._number, (known, own, *before) = self._at(now_ns)
        moved = max(own - last, 0)
        self._counts = (known + moved, own - moved, before[0], before[1])

    def wait_ns(self, now_ns: int, share: Fraction, most: int) -> int:
        if load(self, now_ns, share) <= most:
            return 0
        number, (known, own, known_before, own_before) = self._at(now_ns)
        window_ns = self.limit.window_ns
        end_ns = (number + 1) * window_ns
        current = share.numerator * known + share.denominator * own
        before = share.numerator * known_before + share.denominator * own_before
        # Each level may be rounded up by one micro-unit.
        rounded = share.numerator * bool(known_before) + share.denominator * bool(own_before)
        if current <= most:
            left = max(most - current - rounded, 0)
            fits_ns = end_ns - (left * window_ns // before if before else 0)
        elif self.limit.algorithm == "fixed_window":
            fits_ns = end_ns
        else:  # in the next window, in which the current counts fade
            rounded = share.numerator * bool(known) + share.denominator * bool(own)
            fits_ns = end_ns + window_ns - max(most - rounded, 0) * window_ns // current
        return max(fits_ns - now_ns, 0)

    def learn(self, now_ns: int, share: Fraction, known: int, at_ns: int) -> None:  # noqa: ARG002 - as every ledger
        behind = self.behind(now_ns, at_ns)
        self._number, (was_known, own, known_before, own_before) = self._at(now_ns)
        if behind <= 0:
            was_known += known
        elif behind == 1 and self.limit.algorithm == "sliding_window_counter":
            known_before += known
        self._counts = (was_known, own, known_before, own_before)

    def behind(self, now_ns: int, at_ns: int) -> int:
        window_ns = self.limit.window_ns
        return max(now_ns // window_ns, self._number) - at_ns // window_ns

    def give_back(
        self,
        now_ns: int,
        share: Fraction,  # noqa: ARG002 - as every ledger
        known: int,
        own: int,
        charged_ns: int | None = None,  # noqa: ARG002 - as every ledger
    ) -> None:
        if not known and not own:
            return
        self._number, counts = self._at(now_ns)
        was_known, was_own, known_before, own_before = counts
        self._counts = (
            max(was_known - known, 0),
            max(was_own - own, 0),
            max(known_before - max(known - was_known, 0), 0),
            max(own_before - max(own - was_own, 0), 0),
        )

    @property
    def numbers(self) -> list[int]:
        return [self._number, *self._counts]

    @numbers.setter
    def numbers(self, numbers: list[int]) -> None:
        self._number, known, own, known_before, own_before = numbers
        self._counts = (known, own, known_before, own_before)


class LogLedger:
    """The entries of a sliding window log, in groups that leave the window together."""

    __slots__ = ("_groups", "_part_ns", "limit")

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        # In whole microseconds, as every engine counts them.
        self._part_ns = -(-limit.window_ns // (_LOG_PARTS * WINDOW_NS_STEP)) * WINDOW_NS_STEP
        self._groups: list[tuple[int, int, int]] = []  # when it leaves, known, own

    def _leaves_ns(self, at_ns: int) -> int:
        """Return when an entry of this time leaves the window."""
        return -(-(at_ns + self.limit.window_ns) // self._part_ns) * self._part_ns

    def levels(self, now_ns: int, share: Fraction) -> tuple[int, int]:  # noqa: ARG002 - as every ledger
        live = [group for group in self._groups if group[0] > now_ns]
        return sum(known for _, known, _ in live), sum(own for _, _, own in live)

    def add(self, now_ns: int, share: Fraction, known: int, own: int) -> None:  # noqa: ARG002 - as every ledger
        if not known and not own:
            return
        leaves_ns = self._leaves_ns(now_ns)
        groups = self._groups = [group for group in self._groups if group[0] > now_ns]
        if groups and groups[-1][0] >= leaves_ns:
            leaves_ns, was_known, was_own = groups.pop()
            known, own = was_known + known, was_own + own
        groups.append((leaves_ns, known, own))

    def move(self, now_ns: int, share: Fraction, last: int) -> None:  # noqa: ARG002 - as every ledger
        moved: list[tuple[int, int, int]] = []
        for leaves_ns, known, own in reversed(self._groups):
            kept = min(own, last)
            last -= kept
            moved.append((leaves_ns, known + own - kept, kept))
        self._groups = [group for group in reversed(moved) if group[0] > now_ns]

    def wait_ns(self, now_ns: int, share: Fraction, most: int) -> int:
        left = load(self, now_ns, share)
        at_ns = now_ns
        for leaves_ns, known, own in self._groups:
            if left <= most:
                break
            if leaves_ns > now_ns:
                at_ns = leaves_ns
                left -= share.numerator * known + share.denominator * own
        return at_ns - now_ns

    def learn(self, now_ns: int, share: Fraction, known: int, at_ns: int) -> None:  # noqa: ARG002 - as every ledger
        self.add(now_ns, share, known, 0)

    def behind(self, now_ns: int, at_ns: int) -> int:  # noqa: ARG002 - as every ledger
        return 0

    def give_back(
        self,
        now_ns: int,
        share: Fraction,  # noqa: ARG002 - as every ledger
        known: int,
        own: int,
        charged_ns: int | None = None,
    ) -> None:
        groups = self._groups = [group for group in self._groups if group[0] > now_ns]
        places = range(len(groups))
        if charged_ns is not None:
            leaves_ns = self._leaves_ns(charged_ns)
            places = range(sum(group[0] <= leaves_ns for group in groups) - 1, -1, -1)
        for place in places:
            leaves_ns, was_known, was_own = groups[place]
            groups[place] = (leaves_ns, max(was_known - known, 0), max(was_own - own, 0))
            known, own = max(known - was_known, 0), max(own - was_own, 0)
        self._groups = [group for group in groups if group[1] or group[2]]

    @property
    def numbers(self) -> list[int]:
        return [number for group in self._groups for number in group]

    @numbers.setter
    def numbers(self, numbers: list[int]) -> None:
        groups = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        self._groups = list(groups)


def ledger_of(limit: Limit) -> Ledger:
    """Return an empty ledger."""
    if limit.algorithm == "sliding_window_log":
        return LogLedger(limit)
    if limit.algorithm in {"fixed_window", "sliding_window_counter"}:
        return WindowLedger(limit)
    return BucketLedger(limit)


def outcome(
    ledger: Ledger, now_ns: int, share: Fraction, cost: int, room: int, *, charged: bool
) -> Outcome:
    """Return the outcome for one limit, which has `room` for so many units.

    `charged` says that the cost was added already.
    """
    limit = ledger.limit
    unit = share.denominator * MICROS_PER_UNIT
    whole_ns = ledger.wait_ns(now_ns, share, 0)
    if charged:
        delay_ns = 0
        if limit.algorithm == "leaky_bucket":
            delay_ns = ledger.wait_ns(now_ns, share, cost * unit)
        return Outcome(True, max(room, 0), 0, whole_ns, delay_ns, now_ns)
    if cost <= room or cost == 0:
        return Outcome(True, max(room, 0), 0, whole_ns, 0)
    most = share.numerator * limit.capacity * MICROS_PER_UNIT - cost * unit
    wait_ns = max(ledger.wait_ns(now_ns, share, max(most, 0)), 1)
    return Outcome(False, max(room, 0), wait_ns, max(whole_ns, wait_ns), 0)


def exact_room(ledger: Ledger, now_ns: int, share: Fraction) -> int:
    """Return the units that fit w × known + own <= w × C; negative if it does not hold now."""
    known, own = ledger.levels(now_ns, share)
    left = share.numerator * (ledger.limit.capacity * MICROS_PER_UNIT - known)
    return (left // share.denominator - own) // MICROS_PER_UNIT
