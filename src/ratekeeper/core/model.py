"""The frozen values of every check: Limit, Request, Decision, CheckResult.

A *limit* is numbers: 100 per 60 s, an algorithm, a burst. A *decision* is the answer to a check.
Internal durations are whole nanoseconds (names end in `_ns`); properties without a suffix are
seconds.
"""

from __future__ import annotations

import operator
from abc import ABCMeta
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import gcd
from typing import Any, Final, Literal, NamedTuple, get_args

from ratekeeper.core.clock import NS_PER_SECOND, duration_ns, seconds_from_ns
from ratekeeper.core.errors import ConfigError, InvalidCost, show

AlgorithmName = Literal[
    "token_bucket",
    "leaky_bucket",
    "sliding_window_log",
    "sliding_window_counter",
    "fixed_window",
    "in_flight",
]
"""The algorithm of a limit; docs/choosing.md compares them."""
ALGORITHM_NAMES: Final[tuple[AlgorithmName, ...]] = get_args(AlgorithmName)

# The penalties of a client that does not wait after a denial; see rules/penalties.py.
PenaltyKind = Literal["cooldown", "block"]

BUCKETS: Final = frozenset({"token_bucket", "leaky_bucket"})
IN_FLIGHT: Final = "in_flight"
# Those that count units, which is all but IN_FLIGHT.
UNIT_ALGORITHMS: Final[tuple[AlgorithmName, ...]] = tuple(
    name for name in ALGORITHM_NAMES if name != IN_FLIGHT
)
# A count of one window means nothing in a window of another length, so for these two algorithms
# the length is part of the limit's identity. A bucket's level and a log's times are valid with any.
WINDOW_COUNTS: Final = frozenset({"sliding_window_counter", "fixed_window"})

# Buckets count in millionths of a unit. Every admission rounds the refill down by less than one,
# so the delivered rate is within 1e-6 of the configured one.
MICROS_PER_UNIT: Final = 1_000_000

# 1e9 units are 1e15 micros, below 2**53, so an engine that computes with doubles is exact.
UNITS_MAX: Final = 1_000_000_000
# The log keeps 8 bytes for every admission in the window: 8 MB per key at this limit.
LOG_UNITS_MAX: Final = 1_000_000
# Stores keep 16 bytes for each request in flight, and a check may read them all.
IN_FLIGHT_MAX: Final = 10_000
WINDOW_NS_MIN: Final = 1_000_000
WINDOW_NS_MAX: Final = 366 * 86_400 * NS_PER_SECOND
# Redis has a clock in microseconds. A window of whole microseconds has the same length everywhere.
WINDOW_NS_STEP: Final = 1_000
WINDOW_NS_OFF_MAX: Final = 5
# An empty bucket must be full again within a century, so that every time fits 64 bits. With a debt
# that is paid back within 50 years more, every time still does.
REFILL_NS_MAX: Final = 100 * WINDOW_NS_MAX
_DEBT_NS_MAX: Final = 50 * WINDOW_NS_MAX
# By default, a limit owes no more than it pays back in this time.
_DEBT_NS: Final = 600 * NS_PER_SECOND
NAME_LENGTH_MAX: Final = 128


def units_max_of(algorithm: AlgorithmName) -> int:
    """Return the highest limit that an algorithm counts."""
    if algorithm == IN_FLIGHT:
        return IN_FLIGHT_MAX
    return LOG_UNITS_MAX if algorithm == "sliding_window_log" else UNITS_MAX


@dataclass(frozen=True, slots=True)
class Limit:
    """A number of units per time, with an algorithm.

    >>> Limit(100, per=60)
    Limit(100, per=60)
    >>> Limit(10, per=1, burst=5).capacity
    15
    >>> Limit(5, per=60, algorithm="sliding_window_log").window
    60.0

    `limit`      units, 1 to 1,000,000,000 (sliding_window_log: to 1,000,000).
                 Of in_flight: requests at once, 1 to 10,000.
    `per`        the window: seconds or a timedelta, 1 ms to a year in whole microseconds.
                 Of in_flight: the longest time that one request may take.
    `algorithm`  one of six; docs/choosing.md compares them.
    `burst`      units above the steady rate that a bucket can hold.
    `capacity`   all units that a bucket can hold; by default limit + burst.
    `name`       the limit's name. Counts are stored under the name or, without a name, under
                 algorithm and window. So no count restarts when the numbers change.
    `refill_every`  of a token bucket: seconds or a timedelta after which the units of that time
                 are added at once. By default 0: they are added continuously.
    `debt`       units that the limit owes at most when a cost is settled late; 0: it never owes.
                 By default its capacity, or what ten minutes pay back if that is more.

    To change the numbers, create a new Limit: `dataclasses.replace` would keep the old capacity.
    """

    limit: int
    per: float | timedelta
    algorithm: AlgorithmName = "token_bucket"
    burst: int = 0
    capacity: int = 0
    name: str = ""
    refill_every: float | timedelta = 0
    debt: int | None = None
    window_ns: int = field(init=False, compare=False)
    # The time between two refills. A bucket that is refilled continuously is refilled every
    # nanosecond, the smallest step of time that there is.
    refill_step_ns: int = field(init=False, compare=False)
    # The refill in lowest terms: micros_numerator / ns_denominator micro-units per nanosecond.
    # With these small numbers, an engine can divide in 64 bits.
    micros_numerator: int = field(init=False, compare=False)
    ns_denominator: int = field(init=False, compare=False)
    # The units that the limit owes at most, which are exact in micro-units beside a full bucket.
    debt_max: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if not isinstance(self.algorithm, str) or self.algorithm not in ALGORITHM_NAMES:
            raise ConfigError(
                f"algorithm={show(self.algorithm)} is not known; "
                f"choose one of {', '.join(ALGORITHM_NAMES)}"
            )
        units_max = units_max_of(self.algorithm)
        _check_units("limit", self.limit, 1, units_max)
        _check_units("burst", self.burst, 0, UNITS_MAX)
        _check_units("capacity", self.capacity, 0, UNITS_MAX)
        check_name("name", self.name)
        put("window_ns", _window_ns("per", self.per, _PER_EXAMPLE))
        put("per", _plain_seconds(self.window_ns))
        self._check_bucket_fields()
        put("capacity", self.capacity or self.limit + self.burst)
        put("burst", max(self.capacity - self.limit, 0))
        _check_units("capacity (limit + burst)", self.capacity, 1, UNITS_MAX)
        put("refill_step_ns", self._refill_step_ns())
        stepped = self.refill_step_ns > 1
        put("refill_every", _plain_seconds(self.refill_step_ns) if stepped else 0)
        common = gcd(self.limit * MICROS_PER_UNIT, self.window_ns)
        put("micros_numerator", self.limit * MICROS_PER_UNIT // common)
        put("ns_denominator", self.window_ns // common)
        if self.capacity * self.window_ns > REFILL_NS_MAX * self.limit:
            raise ConfigError(
                f"capacity={self.capacity} would take more than a century to refill at "
                f"{self.limit} per {self.per} s; lower the capacity or raise the rate"
            )
        put("debt_max", self._debt_max())

    def _debt_max(self) -> int:
        payable = min(self.limit * _DEBT_NS_MAX // self.window_ns, UNITS_MAX)
        if self.debt is None:
            soon = self.limit * _DEBT_NS // self.window_ns
            return min(max(self.capacity, soon), payable)
        _check_units("debt", self.debt, 0, UNITS_MAX)
        if self.debt > payable:
            raise ConfigError(
                f"debt={self.debt} would take more than 50 years to pay back at "
                f"{self.limit} per {self.per} s; it is at most {payable}"
            )
        return self.debt

    def _check_bucket_fields(self) -> None:
        if self.algorithm == IN_FLIGHT and self.debt is not None:
            raise ConfigError(
                "in_flight has no debt: a request takes one slot, whatever its cost; leave it out"
            )
        if self.algorithm not in BUCKETS and (self.burst or self.capacity):
            raise ConfigError(
                f"{self.algorithm} has no burst or capacity: it counts "
                f"{'requests' if self.algorithm == IN_FLIGHT else 'in a window'}; "
                f"raise limit instead, or choose token_bucket or leaky_bucket"
            )
        if self.burst and self.capacity and self.capacity != self.limit + self.burst:
            raise ConfigError(
                f"give burst={self.burst} or capacity={self.capacity}, not both: "
                f"burst means capacity = limit + burst = {self.limit + self.burst}"
            )

    def _refill_step_ns(self) -> int:
        value = self.refill_every
        if isinstance(value, int | float | timedelta) and not value and value is not False:
            return 1
        step_ns = _window_ns("refill_every", value, "refill_every=1 (seconds)")
        given = f"refill_every={_plain_seconds(step_ns)}"
        if self.algorithm != "token_bucket":
            raise ConfigError(
                f"{given} is for token_bucket only; leave it out, or choose "
                f'algorithm="token_bucket" instead of {self.algorithm}'
            )
        if step_ns * self.limit > self.capacity * self.window_ns:
            longest = _plain_seconds(self.capacity * self.window_ns // self.limit)
            raise ConfigError(
                f"{given} adds more units at once than the capacity of "
                f"{self.capacity}; at {self.limit} per {self.per} s it is at most {longest}"
            )
        return step_ns

    @property
    def window(self) -> float:
        """The window in seconds."""
        return self.window_ns / NS_PER_SECOND

    @property
    def identity(self) -> str:
        """The name under which counts are stored. It does not contain numbers that may change."""
        if self.algorithm == IN_FLIGHT or (self.name and self.algorithm not in WINDOW_COUNTS):
            return f"{self.algorithm}={self.name}"
        window_us = self.window_ns // WINDOW_NS_STEP
        return f"{self.algorithm}/{window_us}={self.name}"

    def __repr__(self) -> str:
        parts = [str(self.limit), f"per={self.per}"]
        if self.algorithm != "token_bucket":
            parts.append(f"algorithm={self.algorithm!r}")
        if self.capacity != self.limit:
            parts.append(f"capacity={self.capacity}")
        if self.name:
            parts.append(f"name={self.name!r}")
        if self.refill_every:
            parts.append(f"refill_every={self.refill_every}")
        if self.debt is not None:
            parts.append(f"debt={self.debt}")
        return f"Limit({', '.join(parts)})"

    def __str__(self) -> str:
        """Return the rate string that `parse_limit` reads as this limit, but for the name."""
        per = duration_text(self.window_ns, one="")
        debt = "" if self.debt is None else f" debt {self.debt}"
        if self.algorithm == "sliding_window_log":
            return f"{self.limit} in any {per}{debt}"
        if self.algorithm == IN_FLIGHT:
            return f"{self.limit} at once for {duration_text(self.window_ns)}"
        room = f" burst {self.burst}" if self.burst else f" capacity {self.capacity}"
        words = [
            room if self.capacity != self.limit else "",
            f" refill {duration_text(self.refill_step_ns)}" if self.refill_every else "",
            f" {self.algorithm}" if self.algorithm != "token_bucket" else "",
            debt,
        ]
        return f"{self.limit}/{per}{''.join(words)}"


# The limits of one rule, tier, key or limiter.
Limits = tuple[Limit, ...]

Consistency = Literal["strict", "leased", "eventual"]
"""Who decides the checks of a limit that several nodes share.

`strict`    the store, on every check.
`leased`    the node, from units that it takes in advance.
`eventual`  the node, which reports afterwards.
"""
CONSISTENCIES: Final[tuple[Consistency, ...]] = get_args(Consistency)


def check_consistency(consistency: object) -> None:
    """Raise ConfigError for an unknown consistency."""
    if not isinstance(consistency, str) or consistency not in CONSISTENCIES:
        raise ConfigError(
            f"consistency={show(consistency)} is not known; choose one of "
            f"{', '.join(CONSISTENCIES)}"
        )


def _check_units(what: str, value: object, low: int, high: int) -> None:
    # A bool is an int in Python, but a mistake here.
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(
            f"{what}={show(value)} is not a whole number from {low:,} to {high:,}; "
            f"for example {what}=5"
        )


def check_name(what: str, value: object) -> None:
    """Raise ConfigError for a name that is too long or not printable."""
    if not isinstance(value, str) or len(value) > NAME_LENGTH_MAX or not value.isprintable():
        raise ConfigError(
            f"{what}={show(value)} is not printable text of at most {NAME_LENGTH_MAX} characters; "
            f'for example {what}="login"'
        )


_PER_EXAMPLE: Final = "per=60 (seconds) or per=timedelta(hours=1)"


def _window_ns(what: str, value: object, example: str) -> int:
    """Return a window or a step in nanoseconds; raise ConfigError if it is not a valid one."""
    window_ns = duration_ns(what, value, WINDOW_NS_MAX + 1, example)
    if not WINDOW_NS_MIN <= window_ns <= WINDOW_NS_MAX:
        raise ConfigError(
            f"{what}={show(value)} is not between 1 ms and 366 days; for example {example}"
        )
    # A float of many seconds is a few nanoseconds off the microseconds that the caller meant.
    off_ns = (window_ns + WINDOW_NS_STEP // 2) % WINDOW_NS_STEP - WINDOW_NS_STEP // 2
    if abs(off_ns) > WINDOW_NS_OFF_MAX:
        raise ConfigError(
            f"{what}={show(value)} is not a whole number of microseconds; for example {example}"
        )
    return window_ns - off_ns


# The longest unit first, with the word for one of it.
_UNITS_US: Final = (
    (86_400_000_000, "d", "day"),
    (3_600_000_000, "h", "hour"),
    (60_000_000, "m", "minute"),
    (1_000_000, "s", "second"),
)


def duration_text(length_ns: int, one: str = "1") -> str:
    """Return a time such as `90s`; one minute is `1m`, or `minute` if `one` is empty."""
    window_us = length_ns // 1_000
    for unit_us, letter, word in _UNITS_US:
        count, rest = divmod(window_us, unit_us)
        if not rest:
            return f"{count}{letter}" if count > 1 or one else word
    whole, rest = divmod(window_us, 1_000)
    return f"{whole}.{rest:03}".rstrip("0").rstrip(".") + "ms"


def _plain_seconds(nanoseconds: int) -> float:
    """Return whole seconds as an int (60, not 60.0), which is easier to read."""
    whole, rest = divmod(nanoseconds, NS_PER_SECOND)
    return nanoseconds / NS_PER_SECOND if rest else whole


# The fields of a Request beside `attributes`. `by` and rules name fields and attributes alike.
REQUEST_FIELDS: Final = ("user", "api_key", "ip", "tenant", "tier", "endpoint", "method")
_FIELD_BY_LETTERS: Final = {name.replace("_", ""): name for name in REQUEST_FIELDS}


def request_field_like(name: str) -> str | None:
    """Return the field of a request that differs from `name` only in case and underscores.

    >>> request_field_like("apiKey"), request_field_like("region")
    ('api_key', None)
    """
    return _FIELD_BY_LETTERS.get(name.lower().replace("_", ""))


@dataclass(frozen=True, slots=True)
class Request:
    """The client and the target of a request. All fields are optional.

    >>> Request(user="42", endpoint="/v1/orders", method="POST").user
    '42'

    `digests`  the values of digests that this request has instead of secrets. Rules and lists match
               the values (`matched_as`). Stores, records and logs see only the digests.
    """

    user: str | None = None
    api_key: str | None = None
    ip: str | None = None
    tenant: str | None = None
    tier: str | None = None
    endpoint: str | None = None
    method: str | None = None
    attributes: Mapping[str, str] = field(default_factory=dict, hash=False)
    digests: Mapping[str, str] | None = field(default=None, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.attributes, Mapping):
            raise ConfigError(
                f"attributes={show(self.attributes)} is not a mapping; "
                f'for example attributes={{"region": "eu"}}'
            )

    @property
    def matched_as(self) -> Request:
        """The request as rules and lists match it: with values instead of their digests."""
        digests = self.digests
        if digests is None:
            return self
        values: dict[str, Any] = {name: getattr(self, name) for name in REQUEST_FIELDS}
        fields = {name: digests.get(value, value) for name, value in values.items()}
        attributes = {name: digests.get(value, value) for name, value in self.attributes.items()}
        return replace(self, **fields, attributes=attributes, digests=None)


def _read_only(name: str) -> Any:
    # A property without a Python function: several fields are read on every check.
    return property(operator.attrgetter(name))


class Decision(metaclass=ABCMeta):  # noqa: B024 - abstract only so that engines can register
    """The answer to one check. True if the request is allowed.

    With `Limiter("10/second")`, the 4th of 4 requests at one instant gets `allowed` True, `limit`
    10, `remaining` 6, `retry_after` 0.0, `reset_after` 0.4. The 11th gets `allowed` False,
    `remaining` 0, `retry_after` 0.1, `reset_after` 1.0.

    With several limits, the fields describe the *tightest*: the limit with the least remaining.
    Among equals it is the one with the longest `retry_after`, then the longest `reset_after`.
    `retry_after` is the time until all of them would allow this same cost.

    The fields are read-only properties, because every check creates a Decision and a frozen
    dataclass takes four times as long to create. The C kernel's decisions are another type with
    the same fields; `isinstance` and `==` treat both alike.

    `source` is not a field of the decision. The rule engine keeps the rules that were charged and
    the times of the charges there, for a refund. In a denial by several rules, it is a tuple of
    their ids. It is None in other decisions, and in a copy from a pickle.

    `uncounted` is not a field of the decision. It has the checks that the failure policy `open` let
    pass without counting, for `wait` and `reserve`, which count them on this machine.
    """

    __slots__ = (
        "_allowed",
        "_charged_ns",
        "_decided_ns",
        "_degraded",
        "_delay_ns",
        "_granted",
        "_penalty",
        "_policy",
        "_remaining",
        "_reset_after_ns",
        "_retry_after_ns",
        "_rule",
        "source",
        "uncounted",
    )

    allowed: Final[bool] = _read_only("_allowed")
    """Whether the request may proceed."""
    policy: Final[Limit] = _read_only("_policy")
    """The tightest limit, with its window, algorithm and name."""
    remaining: Final[int] = _read_only("_remaining")
    """The number of requests of cost 1 that would be allowed at this instant."""
    retry_after_ns: Final[int] = _read_only("_retry_after_ns")
    """Nanoseconds until this same cost would be allowed; 0 if it is allowed."""
    reset_after_ns: Final[int] = _read_only("_reset_after_ns")
    """Nanoseconds until the whole quota is available again, if no units are spent."""
    delay_ns: Final[int] = _read_only("_delay_ns")
    """Leaky bucket: nanoseconds to hold the request before serving it."""
    rule: Final[str] = _read_only("_rule")
    """The name of the limiter, or the id of the rule, that decided."""
    degraded: Final[bool] = _read_only("_degraded")
    """True if the store could not decide and the failure policy decided instead."""
    charged_ns: Final[int | None] = _read_only("_charged_ns")
    """The store's time at which units were charged, in nanoseconds since the epoch.

    None if nothing was charged: a denial, a cost of 0, a peek, no limit, a degraded decision,
    or units that came from a grant alone. A refund of the decision needs it, because time may
    already have returned some of the units. With several limits or rules, it is the time of
    one of them.
    """
    decided_ns: Final[int] = _read_only("_decided_ns")
    """The store's time of the decision, in nanoseconds since the epoch; 0 if none decided.

    All waits count from it. A reset time for a client is `decided_ns + reset_after_ns`: with a
    clock that is read later, the end of a fixed window would appear to be later too.
    """
    granted: Final[int] = _read_only("_granted")
    """Granted units that are left, on top of the tightest limit's capacity."""
    penalty: Final[PenaltyKind | None] = _read_only("_penalty")
    """`cooldown` or `block` if a penalty denied the request, which lasts `retry_after`."""

    def __init__(
        self,
        allowed: bool,
        policy: Limit,
        remaining: int,
        retry_after_ns: int = 0,
        reset_after_ns: int = 0,
        delay_ns: int = 0,
        rule: str = "",
        degraded: bool = False,
        charged_ns: int | None = None,
        decided_ns: int = 0,
        granted: int = 0,
        penalty: PenaltyKind | None = None,
    ) -> None:
        self._allowed = allowed
        self._policy = policy
        self._remaining = remaining
        self._retry_after_ns = retry_after_ns
        self._reset_after_ns = reset_after_ns
        self._delay_ns = delay_ns
        self._rule = rule
        self._degraded = degraded
        self._charged_ns = charged_ns
        self._decided_ns = decided_ns
        self._granted = granted
        self._penalty = penalty
        self.source: Any = None
        self.uncounted: tuple[Any, ...] = ()

    @property
    def limit(self) -> int:
        """The highest possible `remaining`: the tightest limit's capacity plus granted units."""
        return self.policy.capacity + self.granted

    @property
    def retry_after(self) -> float:
        """Seconds until this same cost would be allowed; 0.0 if it is. Never rounded down."""
        return seconds_from_ns(self.retry_after_ns)

    @property
    def reset_after(self) -> float:
        """Seconds until the whole quota is available again, if no units are spent."""
        return seconds_from_ns(self.reset_after_ns)

    @property
    def delay(self) -> float:
        """Leaky bucket: seconds to hold the request before serving it."""
        return seconds_from_ns(self.delay_ns)

    def __bool__(self) -> bool:
        return self.allowed

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Decision):
            return NotImplemented
        return decision_fields(self) == decision_fields(other)

    def __hash__(self) -> int:
        return hash(decision_fields(self))

    def __repr__(self) -> str:
        return decision_repr(self)

    def __reduce__(self) -> tuple[type[Decision], tuple[Any, ...]]:
        return Decision, decision_fields(self)


DECISION_FIELDS: Final = (
    "allowed",
    "policy",
    "remaining",
    "retry_after_ns",
    "reset_after_ns",
    "delay_ns",
    "rule",
    "degraded",
    "charged_ns",
    "decided_ns",
    "granted",
    "penalty",
)


def decision_fields(decision: Decision) -> tuple[Any, ...]:
    """Return the fields in order: the definition of equality for all engines' decisions."""
    return tuple(getattr(decision, name) for name in DECISION_FIELDS)


def decision_with(decision: Decision, **changes: Any) -> Decision:
    """Return a copy of any engine's decision with some fields changed."""
    fields = dict(zip(DECISION_FIELDS, decision_fields(decision), strict=True))
    copy = Decision(**{**fields, **changes})
    copy.source = decision.source
    return copy


def decision_repr(decision: Decision) -> str:
    """Return a readable line; for a denial with the time to retry."""
    parts = [
        "allowed" if decision.allowed else "denied",
        f"remaining={decision.remaining}/{decision.limit}",
    ]
    if not decision.allowed:
        parts.append(f"retry_after={decision.retry_after:g}")
    parts.append(f"reset_after={decision.reset_after:g}")
    if decision.delay_ns:
        parts.append(f"delay={decision.delay:g}")
    if decision.rule:
        parts.append(f"rule={decision.rule!r}")
    if decision.degraded:
        parts.append("degraded")
    if decision.penalty:
        parts.append(f"penalty={decision.penalty}")
    return f"<Decision {' '.join(parts)}>"


# The limit that a decision reports if no limit applied to the request.
UNLIMITED: Final = Limit(UNITS_MAX, per=1, name="unlimited")
# The retry time of a request on the deny list. It stands for "never".
DENIED_NS: Final = WINDOW_NS_MAX

ResultKind = Literal["limited", "unlimited", "exempt", "blocked", "unavailable"]
"""Why a request was allowed or denied; `CheckResult.kind` describes each."""

# The rule name in results of a limiter that has limits of its own and no name.
DEFAULT_NAME: Final = "default"


class AppliedRule:
    """A rule and the limits it had for a request.

    All requests with the same limits share one object, and it is equal only to itself. Code that
    derives something from it, such as a header, can cache that by the object.
    """

    __slots__ = ("limits", "rule")

    def __init__(self, rule: str, limits: Sequence[Limit]) -> None:
        self.rule: str = rule
        """The id of the rule, or the name of the limiter."""
        self.limits: tuple[Limit, ...] = tuple(limits)
        """The limits that the request had to pass, all of them."""

    def __repr__(self) -> str:
        return f"AppliedRule({self.rule!r}, {list(self.limits)!r})"


class CheckResult(NamedTuple):
    """A decision with the rules that applied, for an answer to a client.

    A Decision describes the tightest limit only, which is all that a caller needs to act. An answer
    over HTTP or gRPC lists every limit that applied. It also distinguishes why no limit applied
    and why the store could not decide.
    """

    decision: Decision
    """The decision, as `check` returns it: that of the tightest limit."""
    applied: tuple[AppliedRule, ...] = ()
    """Every rule that had to pass, in the order of the document."""
    kind: ResultKind = "limited"
    """`limited`      limits decided, or the failure policy did and may admit the request.
    `unlimited`    no rule matches the request.
    `exempt`       the request is on the allow list.
    `blocked`      the request is on the deny list.
    `unavailable`  the store could not decide, and the failure policy is `closed`.
    """
    shadow_denied: tuple[str, ...] = ()
    """The ids of the rules in shadow mode that would have denied the request."""
    counted: tuple[tuple[str, int], ...] = ()
    """The subject and the units of each rule in `applied`; empty if they are not known."""
    shadow_subjects: tuple[str, ...] = ()
    """The subject of each rule in `shadow_denied`; empty if they are not known."""


class Settlement(NamedTuple):
    """What a settled request is charged. See Limiter.settle.

    `charged`    units in all: the most that a later refund of the request can return. By unit, if
                 the actual cost is.
    `forgiven`   units of the cost that a limit of the request did not charge, because it owes as
                 much as it may already. If several did so, the most of them.
    `uncounted`  units of the cost whose charge a store has not confirmed. They are not charged
                 again, because they may have been charged.
    `repeated`   True if the reservation was settled before: then nothing was changed, and the
                 other numbers are 0.
    """

    charged: int | Mapping[str, int]
    forgiven: int = 0
    uncounted: int = 0
    repeated: bool = False


def units_of(units: int, what: str) -> int:
    """Return a cost or number of units as an int; raise InvalidCost unless it is whole and >= 0."""
    if type(units) is int and units >= 0:
        return units
    try:
        whole = operator.index(units)
    except TypeError:
        whole = -1
    if isinstance(units, bool) or whole < 0:
        raise InvalidCost(
            f"{what}={show(units)} is not a whole number from 0 up; for example {what}=1"
        )
    return whole
