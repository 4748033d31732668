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

from collections.abc import Sequence
from typing import Final, Protocol

from ratekeeper.core.model import MICROS_PER_UNIT, WINDOW_NS_STEP, Limit
from ratekeeper.decide.algorithms.outcome import Outcome, outcome_of

_LOG_PARTS: Final = 64


class Ratio(Protocol):
    """The fraction w: a Fraction, or a plainer pair of numbers. A Fraction is slow to read."""

    @property
    def numerator(self) -> int: ...

    @property
    def denominator(self) -> int: ...


class Ledger(Protocol):
    """`known` and `own` of one limit, in micro-units. The share is the fraction w."""

    limit: Limit

    def levels(self, now_ns: int, share: Ratio) -> tuple[int, int]:
        """Return `known` and `own`."""
        ...

    def add(self, now_ns: int, share: Ratio, known: int, own: int) -> None:
        """Add units that are learnt or admitted now."""
        ...

    def learn(self, now_ns: int, share: Ratio, known: int, at_ns: int) -> None:
        """Add units of another member, which it reported at `at_ns` by its own clock.

        A window counter adds them to the window of that time, if that still counts.
        """
        ...

    def behind(self, now_ns: int, at_ns: int) -> int:
        """Return by how many windows `at_ns` is before the current one; negative if after.

        0 for limits without windows that begin at fixed times.
        """
        ...

    def move(self, now_ns: int, share: Ratio, last: int) -> None:
        """Move own units to `known`, all but the last so many that were added."""
        ...

    def wait_ns(self, now_ns: int, share: Ratio, most: int, load: int) -> int:
        """Return the time until the load is at most `most`, if nothing is added.

        `load` is that of now.
        """
        ...

    def give_back(
        self, now_ns: int, share: Ratio, known: int, own: int, charged_ns: int | None = None
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


def load(ledger: Ledger, now_ns: int, share: Ratio) -> int:
    """Return w × known + own, times the denominator of w."""
    known, own = ledger.levels(now_ns, share)
    return share.numerator * known + share.denominator * own


class BucketLedger:
    """The levels of a token bucket or a leaky bucket."""

    __slots__ = ("_known", "_last_ns", "_own", "limit")

    def __init__(self, limit: Limit, last_ns: int = 0, known: int = 0, own: int = 0) -> None:
        self.limit = limit
        self._last_ns = last_ns
        self._known = known
        self._own = own

    def _at(self, now_ns: int, share: Ratio) -> tuple[int, int, int]:
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

    def levels(self, now_ns: int, share: Ratio) -> tuple[int, int]:
        if now_ns == self._last_ns:
            return self._known, self._own
        known, own, _ = self._at(now_ns, share)
        return known, own

    def add(self, now_ns: int, share: Ratio, known: int, own: int) -> None:
        if not known and not own:  # each change rounds the drain down to a micro-unit
            return
        was_known, was_own, self._last_ns = self._at(now_ns, share)
        self._known, self._own = was_known + known, was_own + own

    def move(self, now_ns: int, share: Ratio, last: int) -> None:
        self._known, self._own, self._last_ns = self._at(now_ns, share)
        moved = max(self._own - last, 0)
        self._known += moved
        self._own -= moved

    def wait_ns(self, now_ns: int, share: Ratio, most: int, load: int) -> int:
        if load <= most:
            return 0
        limit, parts, step_ns = self.limit, share.numerator, self.limit.refill_step_ns
        # Both levels drain the load at share × rate; one micro-unit of each may be rounded away.
        over = parts * (self._known + 1) + share.denominator * (self._own + 1) - most
        steps = -(-over * limit.ns_denominator // (parts * limit.micros_numerator * step_ns))
        return max(self._last_ns + steps * step_ns - now_ns, 0)

    def learn(self, now_ns: int, share: Ratio, known: int, at_ns: int) -> None:  # noqa: ARG002 - as every ledger
        self.add(now_ns, share, known, 0)

    def behind(self, now_ns: int, at_ns: int) -> int:  # noqa: ARG002 - as every ledger
        return 0

    def give_back(
        self,
        now_ns: int,
        share: Ratio,
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

    def __init__(
        self, limit: Limit, number: int = 0, counts: tuple[int, int, int, int] = (0, 0, 0, 0)
    ) -> None:
        self.limit = limit
        self._number = number
        # known and own in this window, known and own in the window before
        self._counts = counts

    def _at(self, now_ns: int) -> tuple[int, tuple[int, int, int, int]]:
        """Return the number of the window and its counts."""
        number = max(now_ns // self.limit.window_ns, self._number)
        known, own, _, _ = self._counts
        if number == self._number:
            return number, self._counts
        if number == self._number + 1 and self.limit.algorithm == "sliding_window_counter":
            return number, (0, 0, known, own)
        return number, (0, 0, 0, 0)

    def levels(self, now_ns: int, share: Ratio) -> tuple[int, int]:  # noqa: ARG002 - as every ledger
        number, (known, own, known_before, own_before) = self._at(now_ns)
        if not known_before and not own_before:
            return known, own
        window_ns = self.limit.window_ns
        left_ns = min((number + 1) * window_ns - now_ns, window_ns)
        known += -(-known_before * left_ns // window_ns)  # rounds up
        own += -(-own_before * left_ns // window_ns)
        return known, own

    def add(self, now_ns: int, share: Ratio, known: int, own: int) -> None:  # noqa: ARG002 - as every ledger
        self._number, (was_known, was_own, *before) = self._at(now_ns)
        self._counts = (was_known + known, was_own + own, before[0], before[1])

    def move(self, now_ns: int, share: Ratio, last: int) -> None:  # noqa: ARG002 - as every ledger
        self._number, (known, own, *before) = self._at(now_ns)
        moved = max(own - last, 0)
        self._counts = (known + moved, own - moved, before[0], before[1])

    def wait_ns(self, now_ns: int, share: Ratio, most: int, load: int) -> int:
        if load <= most:
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

    def learn(self, now_ns: int, share: Ratio, known: int, at_ns: int) -> None:  # noqa: ARG002 - as every ledger
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
        share: Ratio,  # noqa: ARG002 - as every ledger
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

    __slots__ = ("_groups", "limit")

    def __init__(self, limit: Limit, groups: Sequence[tuple[int, int, int]] = ()) -> None:
        self.limit = limit
        self._groups = list(groups)  # when it leaves, known, own

    def _leaves_ns(self, at_ns: int) -> int:
        """Return when an entry of this time leaves the window."""
        window_ns = self.limit.window_ns
        # In whole microseconds, as every engine counts them.
        part_ns = -(-window_ns // (_LOG_PARTS * WINDOW_NS_STEP)) * WINDOW_NS_STEP
        return -(-(at_ns + window_ns) // part_ns) * part_ns

    def levels(self, now_ns: int, share: Ratio) -> tuple[int, int]:  # noqa: ARG002 - as every ledger
        known = own = 0
        for leaves_ns, each_known, each_own in self._groups:
            if leaves_ns > now_ns:
                known += each_known
                own += each_own
        return known, own

    def add(self, now_ns: int, share: Ratio, known: int, own: int) -> None:  # noqa: ARG002 - as every ledger
        if not known and not own:
            return
        leaves_ns = self._leaves_ns(now_ns)
        groups = self._groups = [group for group in self._groups if group[0] > now_ns]
        if groups and groups[-1][0] >= leaves_ns:
            leaves_ns, was_known, was_own = groups.pop()
            known, own = was_known + known, was_own + own
        groups.append((leaves_ns, known, own))

    def move(self, now_ns: int, share: Ratio, last: int) -> None:  # noqa: ARG002 - as every ledger
        moved: list[tuple[int, int, int]] = []
        for leaves_ns, known, own in reversed(self._groups):
            kept = min(own, last)
            last -= kept
            moved.append((leaves_ns, known + own - kept, kept))
        self._groups = [group for group in reversed(moved) if group[0] > now_ns]

    def wait_ns(self, now_ns: int, share: Ratio, most: int, load: int) -> int:
        at_ns = now_ns
        for leaves_ns, known, own in self._groups:
            if load <= most:
                break
            if leaves_ns > now_ns:
                at_ns = leaves_ns
                load -= share.numerator * known + share.denominator * own
        return at_ns - now_ns

    def learn(self, now_ns: int, share: Ratio, known: int, at_ns: int) -> None:  # noqa: ARG002 - as every ledger
        self.add(now_ns, share, known, 0)

    def behind(self, now_ns: int, at_ns: int) -> int:  # noqa: ARG002 - as every ledger
        return 0

    def give_back(
        self,
        now_ns: int,
        share: Ratio,  # noqa: ARG002 - as every ledger
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
    ledger: Ledger, now_ns: int, share: Ratio, load: int, cost: int, room: int, *, charged: bool
) -> Outcome:
    """Return the outcome for one limit, which has `room` for so many units, and this load.

    `charged` says that the cost was added already.
    """
    limit = ledger.limit
    unit = share.denominator * MICROS_PER_UNIT
    left = room if room > 0 else 0
    whole_ns = ledger.wait_ns(now_ns, share, 0, load)
    if charged:
        delay_ns = 0
        if limit.algorithm == "leaky_bucket":
            delay_ns = ledger.wait_ns(now_ns, share, cost * unit, load)
        return outcome_of((True, left, 0, whole_ns, delay_ns, now_ns))
    if cost <= room or cost == 0:
        return outcome_of((True, left, 0, whole_ns, 0, None))
    most = share.numerator * limit.capacity * MICROS_PER_UNIT - cost * unit
    wait_ns = max(ledger.wait_ns(now_ns, share, max(most, 0), load), 1)
    return outcome_of((False, left, wait_ns, max(whole_ns, wait_ns), 0, None))


def exact_room(ledger: Ledger, now_ns: int, share: Ratio) -> int:
    """Return the units that fit w × known + own <= w × C; negative if it does not hold now."""
    return room_at(ledger.limit, share, *ledger.levels(now_ns, share))


def room_at(limit: Limit, share: Ratio, known: int, own: int) -> int:
    """Return the room of `exact_room` at these levels."""
    left = share.numerator * (limit.capacity * MICROS_PER_UNIT - known)
    return (left // share.denominator - own) // MICROS_PER_UNIT
