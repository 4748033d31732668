"""Limits as the scripts read them, and the scripts' replies as decisions.

`BucketPlaces` returns the keys of a subject's states, and a rule's limits as the bytes that go
along with every call. `ReplyDecoder` turns a reply into a decision. The scripts decide and charge.
The other fields of a decision (remaining units, time to retry) are computed here, by the reference
algorithms, from the states before the check, which the reply contains. So there is one
implementation of them, and the scripts stay short.

Redis measures time in microseconds. Waits are rounded up to whole microseconds, because a request
that came a part of one too early would be denied again.

This module does no I/O and needs no Redis library.
"""

from __future__ import annotations

import re
from array import array
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple, cast

from ratekeeper.core.errors import CapacityError, ConfigError, StoreUnavailable, show
from ratekeeper.core.model import (
    IN_FLIGHT,
    MICROS_PER_UNIT,
    AlgorithmName,
    Decision,
    Limit,
    decision_with,
)
from ratekeeper.decide import credit as credits_
from ratekeeper.decide.algorithms import ALGORITHMS, Algorithm, Outcome, State
from ratekeeper.decide.algorithms.in_flight import NO_STAMP, Slots, outcome_of_slots
from ratekeeper.decide.combine import combine
from ratekeeper.decide.credit import Credit
from ratekeeper.decide.leasing import Lease

NS_PER_US: Final = 1_000
TIME_BYTES: Final = 7

# As in state.lua. A leaky bucket admits the same requests as a token bucket.
BUCKET, FIXED, COUNTER, LOG, FLIGHT = 1, 2, 3, 4, 5
KINDS: Final[dict[AlgorithmName, int]] = {
    "token_bucket": BUCKET,
    "leaky_bucket": BUCKET,
    "fixed_window": FIXED,
    "sliding_window_counter": COUNTER,
    "sliding_window_log": LOG,
    "in_flight": FLIGHT,
}
NUMBERS_OF_KIND: Final = {BUCKET: 2, FIXED: 2, COUNTER: 3, LOG: 3, FLIGHT: 5}

# All limits but logs keep their states in buckets, which many subjects share. With ten million
# subjects, a bucket has 38 of them: few enough for Redis to store it in one packed piece.
BUCKETS: Final = 2**18
_BUCKET_NAME: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_BUCKET_KEY: Final = re.compile(rb"[^{]*:\{%[A-Za-z0-9_-]{3}\}")
# A log has a key of its own, with the hash tag of the subject's bucket.
_LOG: Final = b"log:"
_LOG_KEY: Final = re.compile(rb"[^{]*:\{%[A-Za-z0-9_-]{3}\}log:[A-Za-z0-9_-]{16}")
# So have requests in flight.
_SLOTS: Final = b"slots:"
_SLOTS_KEY: Final = re.compile(rb"[^{]*:\{%[A-Za-z0-9_-]{3}\}slots:[A-Za-z0-9_-]{16}")
# Global limits have keys of their own: see regional.py.
_REGIONAL_KEY: Final = re.compile(rb"[^{]*:\{%r[0-9]{0,2}\}:(.+)", re.DOTALL)
_REGIONAL_STATE: Final = re.compile(rb"[0-9a-f]{16}:")
_REGIONAL_TYPES: Final = {
    b"due": b"zset",
    b"shares": b"string",
    b"leader": b"string",
    b"notes": b"hash",
}
FIELD_BYTES: Final = 8  # of a field in a bucket; the name of a piece is longer
_FIELD_BITS: Final = 8 * FIELD_BYTES
_FIELD_MARK: Final = bytes((0xA0 | FIELD_BYTES,))  # msgpack of a text of so many bytes
_ID_BYTES: Final = 4
_CACHED_SUBJECTS: Final = 4_096  # of each store, about 1.5 MB


# ── Limits as bytes ────────────────────────────────────────────────────────────────────────────


def id_of(limit: Limit) -> int:
    """Return the number that identifies a limit in its rule, below 2**32.

    It is odd if the state has a second amount, and 3 more than a multiple of 4 for a limit that
    has a key of its own. The algorithm is part of a limit's identity, so this never changes for a
    number.
    """
    digest = blake2b(limit.identity.encode(), digest_size=4).digest()
    number = int.from_bytes(digest) % (2**30 - 1) + 1
    return 4 * number + {COUNTER: 1, LOG: 3, FLIGHT: 3}.get(KINDS[limit.algorithm], 0)


def is_log_id(number: int) -> bool:
    """Return True if this is the number of a limit with a key of its own."""
    return number % 4 == 3


def encode_limits(limits: Sequence[Limit]) -> bytes:
    """Return nine numbers for each limit, as msgpack: a gate without its field."""
    return encode_sequence(_numbers_of(limits))


def _numbers_of(limits: Sequence[Limit]) -> list[int]:
    """Return nine numbers for each limit. Raises ConfigError if two limits have the same id."""
    by_id: dict[int, Limit] = {}
    values: list[int] = []
    for limit in limits:
        number = id_of(limit)
        other = by_id.setdefault(number, limit)
        if other is not limit:  # about once in 100 million rules of four limits
            raise ConfigError(f"{other!r} and {limit!r} cannot be distinguished; name one of them")
        values += [
            KINDS[limit.algorithm],
            number,
            limit.capacity,
            *refill_per_us(limit),
            limit.window_ns // NS_PER_US,
            _fill_us(limit),
            max(limit.refill_step_ns // NS_PER_US, 1),
            limit.debt_max,
        ]
    return values


def bucket_name(number: int) -> bytes:
    """Return the name of a bucket: three characters, as in base64."""
    names = _BUCKET_NAME
    return b"%c%c%c" % (names[number >> 12], names[number >> 6 & 63], names[number & 63])


def regional_type(key: bytes) -> bytes | None:
    """Return the type of a key of global limits; empty if it is another program's.

    None for any other key. A state has the number of a rule and a subject.
    """
    found = _REGIONAL_KEY.fullmatch(key)
    if found is None:
        return None
    name = found[1]
    return _REGIONAL_TYPES.get(name, b"string" if _REGIONAL_STATE.match(name) else b"")


def is_regional_state(key: bytes) -> bool:
    """Return True for the state of a subject of a global rule."""
    found = _REGIONAL_KEY.fullmatch(key)
    return found is not None and _REGIONAL_STATE.match(found[1]) is not None


def is_bucket(key: bytes) -> bool:
    """Return True for the key of a bucket."""
    return _BUCKET_KEY.fullmatch(key) is not None


def is_log(key: bytes) -> bool:
    """Return True for the key of a log."""
    return _LOG_KEY.fullmatch(key) is not None


def is_slots(key: bytes) -> bool:
    """Return True for the key of requests in flight."""
    return _SLOTS_KEY.fullmatch(key) is not None


Place = tuple[tuple[bytes, ...], bytes]
"""The keys of a subject's states, and the gate, which is an argument of a script. The first key is
the bucket, if the rule has other limits than logs; then the key of each log."""


class BucketPlaces:
    """The places of a rule's states: in a bucket, and those of logs in strings beside the bucket.

    The place of a limit depends on the subject, the rule and the limit, not on the other limits of
    the rule. So a limit keeps its count when the rule gets or loses another limit, and a gate of
    some limits of a rule has the same counts as the gate of all of them.

    One keyed hash of the subject chooses the bucket and, together with the rule, the field. So all
    rules of a subject have their states in one bucket, and thus in one slot of a cluster. Two
    subjects share a count if 82 bits of their hashes are equal: among ten million subjects, with a
    probability of one in 10**11. A client that wants to share the count of another one must find
    a subject with the same 82 bits, which takes 2**81 attempts on average.

    The name of a log is the field and the number of the limit.
    """

    __slots__ = ("_end", "_find", "_in_bucket", "_logs", "_mask", "of")

    of: Callable[[str], Place]
    """Return the place of a subject."""

    def __init__(self, limits: Sequence[Limit], rule: str, prefix: str, hash_key: str) -> None:
        self._logs = tuple(
            (_SLOTS if each.algorithm == IN_FLIGHT else _LOG, number.to_bytes(_ID_BYTES))
            for each, number in ((each, id_of(each)) for each in limits)
            if is_log_id(number)
        )
        self._in_bucket = len(self._logs) < len(limits)
        self._end = encode_limits(limits)
        name = blake2b(rule.encode(), digest_size=FIELD_BYTES)
        self._mask = int.from_bytes(name.digest())
        self._find = _bucket_finder(prefix, hash_key)
        self.of = self._with_logs if self._logs else self._counts

    def _counts(self, subject: str) -> Place:
        key, bits = self._find(subject)
        return (key,), _FIELD_MARK + (bits ^ self._mask).to_bytes(FIELD_BYTES) + self._end

    def _with_logs(self, subject: str) -> Place:
        (key,), gate = self._counts(subject)
        field = gate[1 : 1 + FIELD_BYTES]
        logs = (
            b"%b%b%b" % (key, name, urlsafe_b64encode(field + number))
            for name, number in self._logs
        )
        return ((key, *logs) if self._in_bucket else tuple(logs)), gate


@lru_cache(maxsize=16)
def _bucket_finder(prefix: str, hash_key: str) -> Callable[[str], tuple[bytes, int]]:
    """Return a function from a subject to the key of its bucket and the bits of its field.

    All rules of a store share it. It caches what it returns: for a subject that is in the cache, a
    check takes 0.7 us less.
    """
    head = prefix.encode() + b":{%"
    keyed = blake2b(key=hash_key.encode(), digest_size=FIELD_BYTES + 3)

    @lru_cache(maxsize=_CACHED_SUBJECTS)
    def find(subject: str) -> tuple[bytes, int]:
        state = keyed.copy()
        state.update(subject.encode())
        number = int.from_bytes(state.digest())
        key = b"%b%b}" % (head, bucket_name((number >> _FIELD_BITS) % BUCKETS))
        return key, number & (1 << _FIELD_BITS) - 1

    return find


def encode_numbers(values: Sequence[int], texts: Sequence[str] = ()) -> bytes:
    """Return several numbers, and short texts after them, as one argument."""
    head = _array_head(len(values) + len(texts))
    return b"".join((head, *map(_number, values), *(_text(each.encode()) for each in texts)))


def encode_sequence(values: Sequence[int]) -> bytes:
    """Return several numbers as msgpack, one after the other: fast to unpack, without a table."""
    return b"".join(map(_number, values))


def refill_per_us(limit: Limit) -> tuple[int, int]:
    """Return the refill in lowest terms, as millionths of a unit over microseconds."""
    numerator, denominator = limit.micros_numerator, limit.ns_denominator
    for factor in (5, 5, 5, 2, 2, 2):
        if denominator % factor == 0:
            denominator //= factor
        else:
            numerator *= factor
    return numerator, denominator


def _fill_us(limit: Limit) -> int:
    """Return the microseconds in which a bucket fills from empty, rounded up; 0 for a log."""
    if KINDS[limit.algorithm] >= LOG:
        return 0
    numerator, denominator = refill_per_us(limit)
    return -(-limit.capacity * MICROS_PER_UNIT * denominator // numerator)


def _array_head(length: int) -> bytes:
    return b"\xdc" + length.to_bytes(2)


def _text(value: bytes) -> bytes:
    """Return the msgpack form of up to 255 bytes."""
    head = (0xA0 | len(value),) if len(value) < 32 else (0xD9, len(value))
    return bytes(head) + value


def _number(value: int) -> bytes:
    """Return the shortest msgpack form of a number from 0 to 2**64 - 1."""
    if value < 0x80:
        return bytes((value,))
    for mark, size in ((b"\xcc", 1), (b"\xcd", 2), (b"\xce", 4)):
        if value < 1 << 8 * size:
            return mark + value.to_bytes(size)
    return b"\xcf" + value.to_bytes(8)


# ── Replies as decisions ───────────────────────────────────────────────────────────────────────


class _InMicroseconds:
    """An algorithm whose waits are whole microseconds, rounded up."""

    __slots__ = ("_decide", "refund")

    def __init__(self, algorithm: Algorithm) -> None:
        self._decide = algorithm.decide
        self.refund = algorithm.refund

    def decide(self, state: State, limit: Limit, now_ns: int, cost: int) -> tuple[State, Outcome]:
        after, (allowed, remaining, retry_ns, reset_ns, delay_ns, charged_ns) = self._decide(
            state, limit, now_ns, cost
        )
        return after, Outcome(
            allowed,
            remaining,
            -(-retry_ns // 1_000) * 1_000,
            -(-reset_ns // 1_000) * 1_000,
            delay_ns,
            charged_ns,
        )


class _SlotsInReply:
    """Decides on the numbers that a reply has of requests in flight, instead of their slots."""

    def decide(self, state: State, limit: Limit, now_ns: int, cost: int) -> tuple[State, Outcome]:
        slots, stamp = state
        return state, outcome_of_slots(slots, limit, now_ns, cost, stamp)

    refund = ALGORITHMS["in_flight"].refund


_ALGORITHMS: Final = {
    name: _InMicroseconds(_SlotsInReply() if name == IN_FLIGHT else each)
    for name, each in ALGORITHMS.items()
}


def _slots_of(numbers: Iterator[int], now_us: int) -> State:
    """Return the state of requests in flight, for `_SlotsInReply`."""
    taken_us, used, first_us, last_us, own_us = (next(numbers) for _ in range(5))
    taken_ns = (taken_us if taken_us >= 0 else now_us) * NS_PER_US
    own_ns = max(own_us, 0) * NS_PER_US
    found = Slots(taken_ns, used, first_us * NS_PER_US, last_us * NS_PER_US, own_ns)
    return found, NO_STAMP if own_us < 0 else 1


# One limit with the state and the grant that the reference algorithm decides on. A log without its
# times has a _LogSummary as its state.
_LimitState = tuple[Limit, Algorithm, State, Credit | None]


class _LogSummary(NamedTuple):
    """The numbers that check.lua returns for a log: enough to decide the request it was for."""

    last_us: int
    alive: int
    blocking_us: int
    now_us: int
    held_us: int = -1
    """The last end of units that are held; they are among the live ones."""
    owed: int = 0


class ReplyDecoder:
    """Turns replies of check.lua into decisions on one rule's limits.

    A reply is a list: the server's time in microseconds, complemented (`~`) if the script denied,
    and then each limit's state before the check. If units are granted, each limit has two more
    numbers; if units are leased, four more; if units are owed, one more.
    """

    __slots__ = ("_numbers", "_only", "_parts", "_plain", "_rule", "lease_numbers", "limits")

    def __init__(self, limits: tuple[Limit, ...], rule: str) -> None:
        self.limits = limits
        self._rule = rule
        self._parts = tuple(
            (limit, _ALGORITHMS[limit.algorithm], KINDS[limit.algorithm]) for limit in limits
        )
        self._plain = tuple(
            (limit, _ALGORITHMS[limit.algorithm].decide, kind)
            if kind == FLIGHT
            else (limit, ALGORITHMS[limit.algorithm].decide, kind)
            for limit, _, kind in self._parts
        )
        self._numbers = 1 + sum(NUMBERS_OF_KIND[kind] for _, _, kind in self._parts)
        # Those at the end of a reply with a lease: its units, its end, and one for each log.
        self.lease_numbers = 2 + sum(kind == LOG for _, _, kind in self._parts)
        # The usual case, a single bucket or fixed window, is decided without a loop.
        self._only = (
            ALGORITHMS[limits[0].algorithm].decide
            if len(limits) == 1 and self._parts[0][2] in {BUCKET, FIXED}
            else None
        )

    def check(self, reply: list[int], cost: int, early_ns: int = 0) -> Decision:
        """Return the decision on a request.

        `early_ns` is the caller's time past the microsecond that the script decided at.
        """
        try:
            now_us = reply[0]
            passed = now_us >= 0
            if self._only is not None and len(reply) == 3:
                limit = self.limits[0]
                last_us = reply[1]
                now_ns = (now_us if passed else ~now_us) * NS_PER_US
                _, (allowed, remaining, retry_ns, reset_ns, delay_ns, charged_ns) = self._only(
                    None if last_us < 0 else (last_us * NS_PER_US, reply[2]),
                    limit,
                    now_ns,
                    cost,
                )
                decision = Decision(
                    allowed,
                    limit,
                    remaining,
                    retry_ns and -(-retry_ns // NS_PER_US) * NS_PER_US,
                    -(-reset_ns // NS_PER_US) * NS_PER_US,
                    delay_ns,
                    self._rule,
                    False,
                    charged_ns,
                    now_ns,
                )
            elif len(reply) == self._numbers:
                decision = self._decide_plain(reply, cost)
            else:
                decision = self._decide(reply, cost, cost)
        except (IndexError, TypeError, StopIteration) as error:
            raise _invalid_reply(reply) from error
        if decision.allowed is not passed:
            raise _disagreement(reply, cost)
        return _earlier(decision, early_ns) if early_ns else decision

    def peek(self, reply: list[int], cost: int, early_ns: int = 0) -> Decision:
        """Return the answer of `check`; if it allows, with the units that remain now."""
        try:
            decision = self._decide(reply, cost, 0 if reply[0] >= 0 else cost)
        except (IndexError, TypeError, StopIteration) as error:
            raise _invalid_reply(reply) from error
        return _earlier(decision, early_ns) if early_ns else decision

    def _decide_plain(self, reply: list[int], cost: int) -> Decision:
        """Decide a reply without grants. Faster than `_decide`, which handles them."""
        now_us = reply[0] if reply[0] >= 0 else ~reply[0]
        now_ns = now_us * NS_PER_US
        place = 1
        outcomes: list[Outcome] = []
        for limit, decide, kind in self._plain:
            last_us = reply[place]
            state: State = None
            if kind <= FIXED:
                if last_us >= 0:
                    state = (last_us * NS_PER_US, reply[place + 1])
                place += 2
            elif kind == COUNTER:
                if last_us >= 0:
                    state = (last_us * NS_PER_US, reply[place + 1], reply[place + 2])
                place += 3
            elif kind == FLIGHT:
                state = _slots_of(iter(reply[place : place + 5]), now_us)
                place += 5
            else:
                log = _LogSummary(last_us, reply[place + 1], reply[place + 2], now_us)
                outcomes.append(_log_outcome(log, limit, cost))
                place += 3
                continue
            outcomes.append(decide(state, limit, now_ns, cost)[1])
        return combine(self.limits, outcomes, self._rule, now_ns, tick_ns=NS_PER_US)

    def checks_in_turn(
        self, reply: list[int], cost: int, count: int, early_ns: int = 0
    ) -> list[Decision]:
        """Return the decisions on `count` equal requests in a row, from the reply to all of them.

        Raises CapacityError, StoreError.
        """
        try:
            *states, admitted = reply
            now_us = states[0] if states[0] >= 0 else ~states[0]
            found = self._states(states, now_us)
            decisions = [
                self._decide_next(found, now_us * NS_PER_US, cost, cost)
                for _ in range(min(admitted + 1, count))
            ]
        except (IndexError, TypeError, StopIteration, ValueError) as error:
            raise _invalid_reply(reply) from error
        if sum(each.allowed for each in decisions) != admitted or (admitted > 0) != (reply[0] >= 0):
            raise _disagreement(reply, cost)
        decisions += decisions[-1:] * (count - len(decisions))
        return [_earlier(each, early_ns) for each in decisions] if early_ns else decisions

    def _decide_next(
        self, states: list[_LimitState], now_ns: int, requested: int, cost: int
    ) -> Decision:
        """Return the decision on a request, and replace the states by those after it."""
        outcomes: list[Outcome] = []
        before = list(states)
        for index, (limit, algorithm, state, credit) in enumerate(before):
            left = credit
            if requested > limit.capacity and credit is None and limit.algorithm != IN_FLIGHT:
                raise CapacityError(requested, limit)
            if isinstance(state, _LogSummary):
                outcome = _log_outcome(state, limit, cost)
                last_us = max(state.last_us, state.now_us)
                after: State = state._replace(last_us=last_us, alive=state.alive + cost)
            elif credit is None:
                after, outcome = algorithm.decide(state, limit, now_ns, cost)
            else:
                after, left, outcome = credits_.decide(
                    algorithm, state, credit, limit, now_ns, cost
                )
            states[index] = (limit, algorithm, after, left)
            outcomes.append(outcome)
        granted = [credit[0] if credit else 0 for _, _, _, credit in states]
        decision = combine(self.limits, outcomes, self._rule, now_ns, granted)
        if decision.allowed or len(states) == 1 or not any(credit for *_, credit in before):
            return decision
        wait_ns = credits_.wait_together(
            [
                (algorithm, state, credit, limit)
                for limit, algorithm, state, credit in before
                if limit.algorithm != IN_FLIGHT
            ],
            now_ns,
            cost,
            decision.retry_after_ns,
        )
        return decision_with(decision, retry_after_ns=wait_ns)

    def renews(self, reply: list[int]) -> bool:
        """Return True if a check renewed a slot that the request had already."""
        return any(
            state[0].own_ns > 0
            for limit, _, state, _ in self._states(reply, reply[0])
            if limit.algorithm == IN_FLIGHT
        )

    def owed(self, reply: list[int]) -> int:
        """Return the units that a limit owes, from the reply to a peek: the most of them."""
        now_us = reply[0] if reply[0] >= 0 else ~reply[0]
        return max(
            state.owed
            if isinstance(state, _LogSummary)
            else ALGORITHMS[limit.algorithm].debt_of(state, limit, now_us * NS_PER_US)
            for limit, _, state, _ in self._states(reply, now_us)
        )

    def spent(self, reply: list[int], cost: int) -> list[int]:
        """Return an allowed check's charges, four numbers for each limit.

        They are its units, the time they were charged at, the granted units, and their end.
        """
        now_us = reply[0]
        spent: list[int] = []
        for limit, algorithm, state, credit in self._states(reply, now_us):
            own, ends_us = cost, 0
            at_us = max(now_us, -1 if limit.algorithm == IN_FLIGHT else _last_us(state))
            if credit is not None and credit[1] > now_us * NS_PER_US:
                _, look = algorithm.decide(state, limit, now_us * NS_PER_US, 0)
                own = min(cost, look.remaining)
                ends_us = credit[1] // NS_PER_US
            spent += [own, at_us, cost - own, ends_us]
        return spent

    def _decide(self, reply: list[int], requested: int, cost: int) -> Decision:
        now_us = reply[0] if reply[0] >= 0 else ~reply[0]
        now_ns = now_us * NS_PER_US
        return self._decide_next(self._states(reply, now_us), now_ns, requested, cost)

    def _states(self, reply: list[int], now_us: int) -> list[_LimitState]:
        """Return each limit's state and grant from the numbers of a reply."""
        more, odd = divmod(len(reply) - self._numbers, len(self._parts))
        if odd or not 0 <= more < 8:
            raise IndexError(len(reply))
        granted, held, owing = more & 2, more & 4, more & 1
        numbers = iter(reply)
        next(numbers)
        states: list[_LimitState] = []
        for limit, algorithm, kind in self._parts:
            state = _state_of(kind, numbers, now_us, granted=bool(granted))
            credit = None
            if granted:
                units, ends_us = next(numbers), next(numbers)
                if units:
                    credit = (units, ends_us * NS_PER_US)
            if held:
                state = _with_holds(state, [next(numbers) for _ in range(4)], kind)
            state = _with_debt(state, next(numbers) if owing else 0, kind)
            states.append((limit, algorithm, state, credit))
        return states

    def lease(self, reply: list[int], decision: Decision, cost: int) -> Lease:
        """Return the lease in the reply to a check with a lease; the check was charged."""
        units, ends_us = reply[-self.lease_numbers :][:2]
        now_ns = reply[0] * NS_PER_US
        denied_ns = 0
        if units < cost and decision.remaining - units < cost:
            denied_ns = self._denied_ns(reply, cost, units, ends_us * NS_PER_US)
        if not units:
            return Lease(0, 0, 0, denied_ns)
        return Lease(units, ends_us * NS_PER_US, ends_us * NS_PER_US - now_ns, denied_ns)

    def _denied_ns(self, reply: list[int], cost: int, leased: int, ends_ns: int) -> int:
        """Return how long another check of this cost is denied after this one."""
        now_ns = reply[0] * NS_PER_US
        after: list[tuple[Algorithm, State, Credit | None, Limit]] = []
        longest_ns = 0
        blocking = iter(reply[len(reply) - self.lease_numbers + 2 :])
        for limit, algorithm, state, credit in self._states(reply[: -self.lease_numbers], reply[0]):
            if isinstance(state, _LogSummary):
                blocking_ns = next(blocking) * NS_PER_US
                if blocking_ns:
                    longest_ns = max(longest_ns, blocking_ns + limit.window_ns - now_ns)
                continue
            left = credit
            if credit is None:
                state, _ = algorithm.decide(state, limit, now_ns, cost)  # noqa: PLW2901 - the state after the check
            else:
                state, left, _ = credits_.decide(algorithm, state, credit, limit, now_ns, cost)  # noqa: PLW2901 - likewise
            if leased:
                state = ALGORITHMS[limit.algorithm].lease(state, limit, now_ns, leased, ends_ns)  # noqa: PLW2901 - likewise
            after.append((algorithm, state, left, limit))
        try:
            return max(longest_ns, credits_.wait_together(after, now_ns, cost, 0))
        except CapacityError:  # it used granted units; no wait would help
            return 0


def _state_of(kind: int, numbers: Iterator[int], now_us: int, *, granted: bool) -> State:
    """Return one limit's state from the next numbers of a reply."""
    if kind == FLIGHT:
        return _slots_of(numbers, now_us)
    last_us = next(numbers)
    if kind in {BUCKET, FIXED}:
        amount = next(numbers)
        return None if last_us < 0 else (last_us * NS_PER_US, amount)
    if kind == COUNTER:
        previous, current = next(numbers), next(numbers)
        return None if last_us < 0 else (last_us * NS_PER_US, previous, current)
    if not granted:
        return _LogSummary(last_us, next(numbers), next(numbers), now_us)
    alive, times = next(numbers), next(numbers)
    return (_times_ns(cast("bytes", cast("object", times))), 0, alive) if alive else None


def _with_holds(state: State, numbers: Sequence[int], kind: int) -> State:
    """Return a state with the holds of a reply: units and end of each group."""
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    holds = tuple((units, ends_us * NS_PER_US) for units, ends_us in pairs if units)
    if not holds:
        return state
    if isinstance(state, _LogSummary):
        return state._replace(held_us=holds[-1][1] // NS_PER_US)
    if kind == LOG:
        return (*(state or (array("q"), 0, 0)), holds)
    return None if state is None else (*state, holds)


def _with_debt(state: State, debt: int, kind: int) -> State:
    """Return a state with its debt. The other numbers of a log without its times contain it."""
    if not debt or state is None:
        return state
    if isinstance(state, _LogSummary):
        return state._replace(owed=max(debt, 0))
    plain = NUMBERS_OF_KIND[kind]
    return (*state, debt) if len(state) > plain else (*state, (), debt)


def _invalid_reply(reply: object) -> StoreUnavailable:
    return StoreUnavailable(
        f"the server's reply is not one of the script: {show(reply)}; "
        f"the call may have been counted once"
    )


def _disagreement(reply: list[int], cost: int) -> StoreUnavailable:
    return StoreUnavailable(
        f"the server and this library disagree about {reply!r} at a cost of {cost}; "
        f"this is a defect of Ratekeeper, please report it"
    )


def _times_ns(packed: bytes) -> array[int]:
    return array(
        "q",
        (
            int.from_bytes(packed[start : start + TIME_BYTES]) * NS_PER_US
            for start in range(0, len(packed), TIME_BYTES)
        ),
    )


def _last_us(state: State) -> int:
    """Return the time of a state's last change, or -1 if there is no state."""
    if state is None:
        return -1
    last: int | array[int] = state[0]
    if isinstance(state, _LogSummary):
        return state.last_us
    # The times of a log, or the one time that the other states begin with.
    if isinstance(last, int):
        return last // NS_PER_US
    return last[state[2] - 1] // NS_PER_US if state[2] else -1


def _log_outcome(log: _LogSummary, limit: Limit, cost: int) -> Outcome:
    """Return the outcome of `sliding_window_log.decide`, from a summary instead of the times."""
    if cost > limit.limit:
        raise CapacityError(cost, limit)
    window_us = limit.window_ns // NS_PER_US
    remaining = limit.limit - log.alive
    reset_us = max(log.last_us, log.held_us) + window_us - log.now_us if log.alive else 0
    if cost > remaining and cost > 0:
        retry_us = log.blocking_us + window_us - log.now_us
        return Outcome(False, max(remaining, 0), retry_us * NS_PER_US, reset_us * NS_PER_US, 0)
    charged_ns = None
    if cost:
        at_us = max(log.last_us, log.now_us)
        reset_us = max(at_us, log.held_us) + window_us - log.now_us
        charged_ns = at_us * NS_PER_US
    return Outcome(True, max(remaining - cost, 0), 0, reset_us * NS_PER_US, 0, charged_ns)


def _earlier(decision: Decision, early_ns: int) -> Decision:
    """Return the decision with waits from the caller's instant, if its clock is finer."""
    return decision_with(
        decision,
        retry_after_ns=max(decision.retry_after_ns - early_ns, 0),
        reset_after_ns=max(decision.reset_after_ns - early_ns, 0),
        delay_ns=max(decision.delay_ns - early_ns, 0),
        decided_ns=decision.decided_ns + early_ns,
    )
