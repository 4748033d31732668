"""The scripts' answers as decisions.

The scripts decide and charge; what a decision says besides (what remains, when to come back) is
worked out here, by the reference algorithms, from the states as they were before. So there is one
truth to keep, and the scripts stay short. Redis tells the time in microseconds: waits are rounded
up to whole ones, because a request that came a part of one early would be denied again.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple, cast

from tollkeeper.core.errors import CapacityError, StoreUnavailable, show
from tollkeeper.core.model import (
    Decision,
    Limit,
    decision_with,
)
from tollkeeper.decide import credit as credits_
from tollkeeper.decide.algorithms import ALGORITHMS, Algorithm, Outcome, State
from tollkeeper.decide.combine import combine
from tollkeeper.decide.credit import Credit
from tollkeeper.decide.stores.redis.encode import (
    BUCKET,
    COUNTER,
    FIXED,
    KINDS,
    LOG,
    NS_PER_US,
    NUMBERS_OF_KIND,
    TIME_BYTES,
    encode_gate,
    encode_numbers,
)

__all__ = ["NS_PER_US", "Answers", "encode_gate", "encode_numbers"]


class _InMicroseconds:
    """An algorithm whose waits are whole microseconds, rounded up."""

    __slots__ = ("_decide", "refund")

    def __init__(self, algorithm: Algorithm) -> None:
        self._decide = algorithm.decide
        self.refund = algorithm.refund

    def decide(self, state: State, limit: Limit, now_ns: int, cost: int) -> tuple[State, Outcome]:
        after, (allowed, remaining, retry_ns, reset_ns, delay_ns) = self._decide(
            state, limit, now_ns, cost
        )
        return after, Outcome(
            allowed,
            remaining,
            -(-retry_ns // 1_000) * 1_000,
            -(-reset_ns // 1_000) * 1_000,
            delay_ns,
        )


_ALGORITHMS: Final = {name: _InMicroseconds(each) for name, each in ALGORITHMS.items()}


# A limit's state for the reference to decide on. A log without its times is a _LogSummary.
_Held = tuple[Limit, Algorithm, State, Credit | None]


class _LogSummary(NamedTuple):
    """What check.lua tells of a log: enough for the request it was asked about."""

    last_us: int
    alive: int
    blocking_us: int
    now_us: int


class Answers:
    """Turns what check.lua answered into decisions on one rule's limits."""

    __slots__ = ("_numbers", "_only", "_parts", "_plain", "_rule", "limits")

    def __init__(self, limits: tuple[Limit, ...], rule: str) -> None:
        self.limits = limits
        self._rule = rule
        self._parts = tuple(
            (limit, _ALGORITHMS[limit.algorithm], KINDS[limit.algorithm]) for limit in limits
        )
        self._numbers = 1 + sum(NUMBERS_OF_KIND[kind] for _, _, kind in self._parts)
        self._plain = tuple(
            (limit, ALGORITHMS[limit.algorithm].decide, kind) for limit, _, kind in self._parts
        )
        # The usual case, decided without a loop.
        self._only = (
            ALGORITHMS[limits[0].algorithm].decide
            if len(limits) == 1 and self._parts[0][2] in {BUCKET, FIXED}
            else None
        )

    def check(self, answer: list[int], cost: int, early_ns: int = 0) -> Decision:
        """The decision on a request. `early_ns`: how far into its microsecond the caller is."""
        try:
            return self._checked(answer, cost, early_ns)
        except (IndexError, TypeError, StopIteration) as error:
            raise _no_answer(answer) from error

    def _checked(self, answer: list[int], cost: int, early_ns: int) -> Decision:
        now_us = answer[0]
        passed = now_us >= 0
        if self._only is not None and len(answer) == 3:
            limit = self.limits[0]
            last_us = answer[1]
            _, (allowed, remaining, retry_ns, reset_ns, delay_ns) = self._only(
                None if last_us < 0 else (last_us * NS_PER_US, answer[2]),
                limit,
                (now_us if passed else ~now_us) * NS_PER_US,
                cost,
            )
            decision = Decision(
                allowed,
                limit,
                remaining,
                -(-retry_ns // NS_PER_US) * NS_PER_US,
                -(-reset_ns // NS_PER_US) * NS_PER_US,
                delay_ns,
                self._rule,
            )
        elif len(answer) == self._numbers:
            decision = self._decide_plain(answer, cost)
        else:
            decision = self._decide(answer, cost, cost)
        if decision.allowed is not passed:
            raise _disagreement(answer, cost)
        return _earlier(decision, early_ns) if early_ns else decision

    def peek(self, answer: list[int], cost: int, early_ns: int = 0) -> Decision:
        """What `check` would answer; where it would allow, with what remains now."""
        try:
            decision = self._decide(answer, cost, 0 if answer[0] >= 0 else cost)
        except (IndexError, TypeError, StopIteration) as error:
            raise _no_answer(answer) from error
        return _earlier(decision, early_ns) if early_ns else decision

    def _decide_plain(self, answer: list[int], cost: int) -> Decision:  # noqa: PLR0912 - see below
        """`_decide` where nothing is granted, in a third of the time: no call for each limit."""
        passed = answer[0] >= 0
        now_us = answer[0] if passed else ~answer[0]
        now_ns = now_us * NS_PER_US
        place = 1
        every = True
        longest_ns = delays_ns = 0
        speaker: tuple[int, int, int] | None = None
        policy = self.limits[0]
        for limit, decide, kind in self._plain:
            last_us = answer[place]
            if kind == LOG:
                log = _LogSummary(last_us, answer[place + 1], answer[place + 2], now_us)
                outcome = _log_outcome(log, limit, cost)
                place += 3
            else:
                state: State = None
                if kind == COUNTER:
                    if last_us >= 0:
                        state = (last_us * NS_PER_US, answer[place + 1], answer[place + 2])
                    place += 3
                else:
                    if last_us >= 0:
                        state = (last_us * NS_PER_US, answer[place + 1])
                    place += 2
                outcome = decide(state, limit, now_ns, cost)[1]
            allowed, remaining, retry_ns, reset_ns, delay_ns = outcome
            every = every and allowed
            if retry_ns:
                retry_ns = -(-retry_ns // NS_PER_US) * NS_PER_US
                if retry_ns > longest_ns:
                    longest_ns = retry_ns
            if delay_ns > delays_ns:
                delays_ns = delay_ns
            if allowed is passed:
                # As in combine: the least remaining, then the longest to pass, then to be whole.
                tightness = (remaining, -retry_ns, reset_ns // -NS_PER_US)
                if speaker is None or tightness < speaker:
                    speaker, policy = tightness, limit
        if speaker is None:  # the script denied what no limit denies; `check` will say so
            speaker = (0, 0, 0)
        return Decision(
            every,
            policy,
            speaker[0],
            longest_ns,
            -speaker[2] * NS_PER_US,
            delays_ns if every else 0,
            self._rule,
        )

    def checks(self, answer: list[int], cost: int, count: int, early_ns: int = 0) -> list[Decision]:
        """The decisions on so many checks one after another at that instant, which passed as one.

        `answer` is that of the one, of so many times the cost.
        """
        try:
            held = self._held(answer, answer[0])
        except (IndexError, TypeError, StopIteration) as error:
            raise _no_answer(answer) from error
        decide = self._checks_granted if self.granted(answer) else self._checks_plain
        decisions = decide(held, answer[0] * NS_PER_US, cost, count)
        if not all(decision.allowed for decision in decisions):
            raise _disagreement(answer, cost)
        return [_earlier(each, early_ns) for each in decisions] if early_ns else decisions

    def _checks_granted(
        self, held: list[_Held], now_ns: int, cost: int, count: int
    ) -> list[Decision]:
        decisions: list[Decision] = []
        for _ in range(count):
            outcomes: list[Outcome] = []
            for index, (limit, algorithm, before, credit) in enumerate(held):
                if credit is None:
                    state, outcome = algorithm.decide(before, limit, now_ns, cost)
                    held[index] = (limit, algorithm, state, None)
                else:
                    state, left, outcome = credits_.decide(
                        algorithm, before, credit, limit, now_ns, cost
                    )
                    held[index] = (limit, algorithm, state, left)
                outcomes.append(outcome)
            decisions.append(combine(self.limits, outcomes, self._rule))
        return decisions

    def _checks_plain(
        self, held: list[_Held], now_ns: int, cost: int, count: int
    ) -> list[Decision]:
        """Where nothing is granted, in half the time; as `_decide_plain`, of what is allowed."""
        states = [state for _, _, state, _ in held]
        rule = self._rule
        decisions: list[Decision] = []
        for _ in range(count):
            every, delays_ns, policy = True, 0, self.limits[0]
            speaker: tuple[int, int] | None = None
            for index, (limit, decide, kind) in enumerate(self._plain):
                if kind == LOG:
                    log = states[index]
                    allowed, remaining, _, reset_ns, delay_ns = _log_outcome(log, limit, cost)
                    last_us = max(log.last_us, log.now_us)
                    states[index] = _LogSummary(last_us, log.alive + cost, 0, log.now_us)
                else:
                    states[index], (allowed, remaining, _, reset_ns, delay_ns) = decide(
                        states[index], limit, now_ns, cost
                    )
                every = every and allowed
                delays_ns = max(delays_ns, delay_ns)
                tightness = (remaining, reset_ns // -NS_PER_US)
                if speaker is None or tightness < speaker:
                    speaker, policy = tightness, limit
            left, reset_us = speaker or (0, 0)
            decisions.append(
                Decision(every, policy, left, 0, -reset_us * NS_PER_US, delays_ns, rule)
            )
        return decisions

    def fits(self, answer: list[int], cost: int) -> int:
        """How many checks of a cost would have passed, one after another, by a denial's states."""
        now_us = ~answer[0]
        rooms: list[int] = []
        for limit, algorithm, state, credit in self._held(answer, now_us):
            if isinstance(state, _LogSummary):
                room = limit.limit - state.alive
            else:
                room = algorithm.decide(state, limit, now_us * NS_PER_US, 0)[1].remaining
            if credit is not None and credit[1] > now_us * NS_PER_US:
                room += credit[0]
            rooms.append(room)
        return max(min(rooms), 0) // cost

    def tells(self, answer: list[int], cost: int, count: int) -> bool:
        """Does a denial of so many times a cost tell how that cost itself is denied?

        Of a log that denies it, only where it was asked for: it tells when what was asked for fits.
        """
        if count == 1 or self.granted(answer):
            return True
        place = 1
        for limit, _, kind in self._parts:
            if kind == LOG and cost > limit.limit - answer[place + 1]:
                return False
            place += NUMBERS_OF_KIND[kind]
        return True

    def granted(self, answer: list[int]) -> bool:
        """Does the answer tell of units that were granted?"""
        return len(answer) != self._numbers

    def lasts(self, answer: list[int], cost: int) -> bool:
        """Can a decision at a later time be worked out from this answer, all else being equal?

        Not from a log's summary where several units are missing: it tells when all of them are
        there, and not how many there are in between.
        """
        if cost == 1 or self.granted(answer):
            return True
        place = 1
        for limit, _, kind in self._parts:
            if kind == LOG and answer[0] < 0:
                missing = cost - max(limit.limit - answer[place + 1], 0)
                if missing > 1:
                    return False
            place += NUMBERS_OF_KIND[kind]
        return True

    def after(self, answer: list[int], spent: int, cost: int) -> list[int] | None:
        """How the script would deny `cost` right after it let `spent` pass; None: who knows.

        Only for what it would deny. Of a log it takes the time that must leave first, which an
        answer that allows does not tell; unless the log was empty before.
        """
        if self.granted(answer):
            return None
        now_us = answer[0]
        found = [~now_us]
        place = 1
        for limit, decide, kind in self._plain:
            last_us = answer[place]
            at_us = max(last_us, now_us)
            if kind == LOG:
                alive = answer[place + 1] + spent
                denies = cost > limit.limit - alive
                if denies and alive != spent:
                    return None
                found += [at_us, alive, at_us if denies else 0]
            else:
                numbers = answer[place + 1 : place + NUMBERS_OF_KIND[kind]]
                state = (last_us * NS_PER_US, *numbers) if last_us >= 0 else None
                last_ns, *numbers = decide(state, limit, now_us * NS_PER_US, spent)[0]
                found += [last_ns // NS_PER_US, *numbers]
            place += NUMBERS_OF_KIND[kind]
        return found

    def spent(self, answer: list[int], cost: int) -> list[int]:
        """What an allowed check spent: for each limit its own units, drawn ones, their end."""
        now_us = answer[0]
        spent: list[int] = []
        for limit, algorithm, state, credit in self._held(answer, now_us):
            own, ends_us = cost, 0
            if credit is not None and credit[1] > now_us * NS_PER_US:
                _, look = algorithm.decide(state, limit, now_us * NS_PER_US, 0)
                own = min(cost, look.remaining)
                ends_us = credit[1] // NS_PER_US
            spent += [own, cost - own, ends_us]
        return spent

    def _decide(self, answer: list[int], asked: int, cost: int) -> Decision:
        now_us = answer[0] if answer[0] >= 0 else ~answer[0]
        now_ns = now_us * NS_PER_US
        held = self._held(answer, now_us)
        outcomes = []
        for limit, algorithm, state, credit in held:
            if asked > limit.capacity and credit is None:
                raise CapacityError(asked, limit)
            if isinstance(state, _LogSummary):
                outcomes.append(_log_outcome(state, limit, cost))
            elif credit is None:
                outcomes.append(algorithm.decide(state, limit, now_ns, cost)[1])
            else:
                outcomes.append(credits_.decide(algorithm, state, credit, limit, now_ns, cost)[2])
        decision = combine(self.limits, outcomes, self._rule)
        if decision.allowed or len(held) == 1 or len(answer) == self._numbers:
            return decision
        wait_ns = credits_.wait_together(
            [(algorithm, state, credit, limit) for limit, algorithm, state, credit in held],
            now_ns,
            cost,
            decision.retry_after_ns,
        )
        return decision_with(decision, retry_after_ns=wait_ns)

    def _held(self, answer: list[int], now_us: int) -> list[_Held]:
        """The states that the numbers of an answer stand for."""
        granted = len(answer) > self._numbers
        if granted and len(answer) != self._numbers + 2 * len(self._parts):
            raise IndexError(len(answer))
        numbers = iter(answer)
        next(numbers)
        held: list[_Held] = []
        for limit, algorithm, kind in self._parts:
            last_us = next(numbers)
            state: State = None
            if kind in {BUCKET, FIXED}:
                amount = next(numbers)
                if last_us >= 0:
                    state = (last_us * NS_PER_US, amount)
            elif kind == COUNTER:
                previous, current = next(numbers), next(numbers)
                if last_us >= 0:
                    state = (last_us * NS_PER_US, previous, current)
            elif granted:
                alive, times = next(numbers), next(numbers)
                if alive:
                    state = (_times_ns(cast("bytes", cast("object", times))), 0, alive)
            else:
                state = _LogSummary(last_us, next(numbers), next(numbers), now_us)
            credit = None
            if granted:
                units, ends_us = next(numbers), next(numbers)
                if units:
                    credit = (units, ends_us * NS_PER_US)
            held.append((limit, algorithm, state, credit))
        return held


def _no_answer(answer: object) -> StoreUnavailable:
    return StoreUnavailable(
        f"not an answer of the script: {show(answer)}; the call may have been counted once"
    )


def _disagreement(answer: list[int], cost: int) -> StoreUnavailable:
    return StoreUnavailable(
        f"the server and this library disagree about {answer!r} at a cost of {cost}; "
        f"this is a defect of Tollkeeper, please report it"
    )


def _times_ns(packed: bytes) -> array[int]:
    return array(
        "q",
        (
            int.from_bytes(packed[start : start + TIME_BYTES]) * NS_PER_US
            for start in range(0, len(packed), TIME_BYTES)
        ),
    )


def _log_outcome(log: _LogSummary, limit: Limit, cost: int) -> Outcome:
    """As `sliding_window_log.decide`, from the numbers that it would have looked up."""
    if cost > limit.limit:
        raise CapacityError(cost, limit)
    window_us = limit.window_ns // NS_PER_US
    remaining = limit.limit - log.alive
    reset_us = log.last_us + window_us - log.now_us if log.alive else 0
    if cost > remaining and cost > 0:
        retry_us = log.blocking_us + window_us - log.now_us
        return Outcome(False, max(remaining, 0), retry_us * NS_PER_US, reset_us * NS_PER_US, 0)
    if cost:
        at_us = max(log.last_us, log.now_us)
        reset_us = at_us + window_us - log.now_us
    return Outcome(True, max(remaining - cost, 0), 0, reset_us * NS_PER_US, 0)


def _earlier(decision: Decision, early_ns: int) -> Decision:
    """For a caller whose clock is finer than the server's: waits as from its own instant."""
    return decision_with(
        decision,
        retry_after_ns=max(decision.retry_after_ns - early_ns, 0),
        reset_after_ns=max(decision.reset_after_ns - early_ns, 0),
        delay_ns=max(decision.delay_ns - early_ns, 0),
    )
