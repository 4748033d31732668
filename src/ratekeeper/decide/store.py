"""The seam between the limiter and the stores that keep counts.

A store is opened once. A *counter* is one rule's limits prepared on one store, so that a check has
nothing left to look up: it is one call, with a subject and a cost. A verb returns its answer if
this machine knows it, and otherwise an `Ask` (`core/steps.py`), which a thread or asyncio carries.
Every store passes the same conformance suite (`tests/conformance/`).

There are two kinds of stores. A `LocalStore` is in the memory of this machine and has every answer.
A `SharedStore` is on another machine: several nodes share it, lease units from it, and send
messages through it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    Protocol,
    TypeVar,
    cast,
    runtime_checkable,
)

from ratekeeper.core.errors import ConfigError, StoreError
from ratekeeper.core.model import Consistency, Decision, Limit, Request
from ratekeeper.core.steps import Ask, asked, run_async
from ratekeeper.decide.algorithms.in_flight import NO_STAMP

if TYPE_CHECKING:
    from ratekeeper.decide.allowances import Allowances
    from ratekeeper.decide.leasing import Authority
    from ratekeeper.decide.regional import AcrossRegions, RegionalCounts

BreakerPosition = Literal["closed", "open", "half_open"]

# One rule gets at most four fifths of the memory for logs. This warns before that.
LOG_FULLNESS_HIGH: Final = 0.7
# Of one topic; see Channel.register.
REGISTERED_MAX: Final = 1_000
# Names of settlements that a store remembers for one subject; see Store.mark.
MARKS_MAX: Final = 1_023
# Of a cell; see Cells. A rule's name and a subject fit into a name.
CELL_NAME_BYTES_MAX: Final = 4_096
CELL_BYTES_MAX: Final = 65_536


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The statistics of a store. A *state* is one limit's count of one subject."""

    states: int
    """States held now. Some may have expired and wait to be reused. A large Redis estimates."""
    states_max: int
    """How many states fit; 0 if the store has no bound of its own."""
    bytes: int
    """Memory in use for the states; an estimate where the store cannot know."""
    expired: int
    """States reclaimed so far, because they no longer differed from an untouched quota."""
    refused: int
    """Times a new state, or the log of one, found no room. Each of them raised StoreFull."""
    crowded: int = 0
    """Times a key had too many limits of one name, and raised StoreFull whatever the capacity."""
    log_bytes: int = 0
    """Memory that sliding window logs hold; part of `bytes`."""
    log_bytes_max: int = 0
    """Memory for the logs of all rules; 0 if the store has no separate memory for logs."""
    lost_s: float | None = None
    """The Unix time when this process found the file of `shared://` lost; 0.0 if it never did."""

    @property
    def fullness(self) -> float:
        """From 0.0 to 1.0; always 0.0 where the store has no bound."""
        return self.states / self.states_max if self.states_max else 0.0

    @property
    def log_fullness(self) -> float:
        """The part of the memory for logs that is in use, from 0.0 to 1.0.

        From 0.8 on, the rule that uses most of it may be rejected: see LOG_FULLNESS_HIGH.
        """
        return self.log_bytes / self.log_bytes_max if self.log_bytes_max else 0.0


@dataclass(frozen=True, slots=True)
class BreakerState:
    """The state of one server's circuit breaker."""

    address: str
    state: BreakerPosition
    since_s: float
    """Seconds since the last change."""
    failures: int
    """Failed calls in the window; while it is open, those that opened it."""
    opened_times: int
    next_probe_s: float | None
    """Seconds until the next probe; None while it is closed."""
    reason: str
    """The last failure; empty if there was none."""
    failed_calls: int = 0
    """All failed calls so far, without probes."""
    failing_s: float = 0.0
    """Seconds since the first of the failed calls that no success has followed; 0.0 if none."""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The status that one server of a remote store reports; None where it reports nothing."""

    address: str
    clock_offset_ns: int | None
    """The server's clock minus this machine's, exact to half a round trip."""
    evicted_keys: int | None
    """Keys of any application that the server dropped to free memory, since it started."""
    kept_since_s: float | None
    """The Unix time since when it has kept its keys: it has lost none of them as a whole since."""


Decided_co = TypeVar("Decided_co", covariant=True)
Owed_co = TypeVar("Owed_co", covariant=True)
Done_co = TypeVar("Done_co", covariant=True)


class CounterOf(Protocol[Decided_co, Owed_co, Done_co]):
    """One rule's limits on one store. All limits pass together or none is charged."""

    @property
    def limits(self) -> Sequence[Limit]:
        """The limits that a check must pass."""
        ...

    def check(self, subject: str, cost: int, /) -> Decided_co:
        """Spend `cost` units if every limit has room. Raises CapacityError, StoreError."""
        ...

    def peek(self, subject: str, cost: int, /) -> Decided_co:
        """Return the answer of `check`, with the remaining quota as it is now. Spends nothing."""
        ...

    def refund(self, subject: str, units: int, charged_ns: int | None, /) -> Done_co:
        """Return units to every limit, as far as time has not returned them already.

        `charged_ns` is that of the decision that charged them. None: the time is not known, and
        the caller answers for the correction. Never returns more than an untouched quota.
        """
        ...

    def owe(self, subject: str, units: int, /) -> Owed_co:
        """Charge units in full, whether or not there is room for them. Raises StoreError.

        A live grant pays what does not fit, and the limit owes the rest up to `Limit.debt_max`.
        Returns the most units that a limit of the rule has forgiven.
        """
        ...

    def owed(self, subject: str, /) -> Owed_co:
        """Return the units that a limit of the rule owes now: the most of them. Spends nothing."""
        ...

    def grant(self, subject: str, units: int, ttl_ns: int | None, /) -> Done_co:
        """Add extra units on top of every limit for `ttl_ns` (None: one window)."""
        ...

    def reset(self, subject: str, /) -> Done_co:
        """Forget the spent and granted units of the subject."""
        ...

    def fast_check(self, fallback: Callable[..., Decision], /) -> FastCheck | None:
        """Return a compiled check, or None if the store has none.

        It calls `fallback` with the same arguments for anything but a plain key and cost.
        """
        ...


# Of any store, and of one in the memory of this machine, which has every answer.
Counter = CounterOf[Decision | Ask, int | Ask, Ask | None]
LocalCounter = CounterOf[Decision, int, None]


class SlotCounter(Protocol):
    """A counter with a limit of requests in flight; all stores have them."""

    @property
    def stamp(self) -> int:
        """The stamp of the request that it serves; 0 if it serves all."""
        ...

    def stamped(self, stamp: int, /) -> Any:
        """Return the counter of one request, which has this stamp.

        Its check takes a slot of each limit of requests in flight, or renews it. Its refund frees
        that slot, whatever the units and the time are; with 0 units, it does nothing else. Any
        other counter only finds out whether a slot is free. See `algorithms/in_flight.py`.
        """
        ...


def stamped(counter: Counter, stamp: int) -> Counter:
    """Return the counter of one request; see SlotCounter."""
    return cast("Counter", cast("SlotCounter", counter).stamped(stamp))


def stamp_of(counter: Counter) -> int:
    """Return the stamp of the request that a counter serves; 0 if it serves all."""
    found: int = getattr(counter, "stamp", NO_STAMP)  # nodes and regions have no slots
    return found


NEEDS_AUTHORITY: Final = (
    "leased and eventual limits are shared by several machines, which take units from one store "
    'that all of them reach, for example store="redis://localhost"; with memory:// and shared:// '
    "every check is decided here already, so write strict"
)


# A limit that never denies a probe.
_PROBE: Final = (Limit(1_000_000, per=1),)
_PROBE_RULE: Final = "ratekeeper.probe"


async def probe(store: Store) -> None:
    """Make a decision in a store, of a subject of its own. Raises StoreError.

    A store on another machine is connected, and charged as by any check: a server may answer and
    refuse to write. A store that answers at once only looks.
    """
    counter = store.counter(_PROBE, _PROBE_RULE)
    await run_async(asked(counter.peek if store.is_local else counter.check, "probe", 1))


def require_strict(consistency: Consistency) -> None:
    """Raise ConfigError unless a store that decides every check itself can do what is asked."""
    if consistency != "strict":
        raise ConfigError(f"consistency={consistency!r} does not work here: {NEEDS_AUTHORITY}")


NEEDS_REGIONS: Final = (
    "a global limit is shared by several regions, each with its own Redis; "
    'for example regions=Regions("eu", {"eu": "redis://eu.internal", "us": "redis://us.internal"})'
    ", or for a service --region and --regions"
)


def require_strict_across(consistency: Consistency, across: AcrossRegions | None) -> None:
    """Raise ConfigError for a global limit that a node shall decide itself."""
    if across is not None and consistency != "strict":
        raise ConfigError(
            f'consistency={consistency!r} does not work with scope="global": the Redis of the '
            f'region decides every check of a global limit; write consistency="strict", or '
            f'scope="region"'
        )


def require_regional(across: AcrossRegions | None) -> None:
    """Raise ConfigError if a limit is global: the store knows no regions."""
    if across is not None:
        raise ConfigError(f'scope="global" does not work without regions: {NEEDS_REGIONS}')


class FastCheck(Protocol):
    """A gate's check, compiled."""

    def check(self, key: Any, cost: int = 1) -> Decision:
        """Check a key, or call the fallback."""
        ...

    def counted(self) -> tuple[int, int]:
        """Return how many checks it has allowed and denied itself, without the fallback."""
        ...


class CompiledCounts(Protocol):
    """How many checks a compiled check has allowed and denied."""

    @property
    def allowed(self) -> int:
        """Allowed checks."""
        ...

    @property
    def denied(self) -> int:
        """Denied checks."""
        ...


class RequestCheck(Protocol):
    """The compiled check of requests that the same rules count by the same fields."""

    @property
    def owner(self) -> Any:
        """What it was made for. It is the first item of `Decision.source`."""
        ...

    def check(self, request: Request, /) -> Decision | None:
        """Charge a request by all of its rules, or by none.

        None: nothing was charged, and the Python path has to decide.
        """
        ...


# One rule of a compiled check: counter, field of the request, units, and the id of the rule.
CheckedRule = tuple[Counter, str, int, str]

# One check of `check_together`: counter, subject and cost.
Charge = tuple[Counter, str, int]
# The answer to one of them: the error says why it could not be decided.
Answer = Decision | StoreError


@runtime_checkable
class Store(Protocol):
    """Where counts are kept."""

    @property
    def is_private(self) -> bool:
        """True if no other process sees the counts."""
        ...

    @property
    def is_local(self) -> bool:
        """True if it answers at once, from the memory of this machine; it never returns an Ask."""
        ...

    def counter(
        self,
        limits: Sequence[Limit],
        rule: str,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
    ) -> Counter:
        """Prepare a rule's limits.

        A limit has the same count in every counter of its rule, whatever the other limits are.
        `across` says how regions share a global limit; None is a limit of this region. Raises
        ConfigError for a consistency that the store does not have, and for a global limit if the
        store knows no regions.
        """
        ...

    def check_together(
        self, checks: Sequence[Charge], optional: Container[int] = (), /
    ) -> list[Answer] | Ask:
        """Check several subjects: one answer for each, in order; all pass or none is charged.

        A check that cannot be decided has a StoreError as its answer. Then nothing is charged,
        unless its position is `optional`: the checks without an error are charged if all of them
        pass. If nothing is charged, the answers of the checks that would pass say what remains now.
        Checks of one subject and limit see each other's units. Raises CapacityError; nothing is
        charged then. The kernel takes 10,000 checks at most, and raises ConfigError for more.
        """
        ...

    def mark(self, subject: str, name: int, lasts_ns: int) -> bool | Ask:
        """Remember the name of a settlement of a subject; return True if it was not known.

        The last MARKS_MAX names of a subject are remembered, until `lasts_ns` after the last one.
        With 0, this name is forgotten. Names are digests, from 1 to 2**61. They never take the room
        of states: raises StoreFull if there is none left.
        """
        ...

    def sweep(self) -> int:
        """Drop every state that no longer differs from an untouched quota; return how many."""
        ...

    def stats(self) -> StoreStats:
        """Return the statistics of the store."""
        ...

    def forget_all(self) -> int:
        """Forget the counts of all limiters in this store; return how many states there were.

        On Redis, those under the store's prefix. Checks that run at the same time count before or
        after it. On Redis it may take seconds, and other processes answer from their denial caches
        for up to `denied_cache_ms` more.
        """
        ...

    def close(self) -> None:
        """Close the store. Every later call raises StoreUnavailable."""
        ...

    async def aclose(self) -> None:
        """Close the store, and wait until the connections of this event loop are closed."""
        ...


class LocalStore(Store, Protocol):
    """A store in the memory of this machine."""

    @property
    def allowances(self) -> Allowances:
        """The node's table of allowances, made on first use."""
        ...

    def counter(
        self,
        limits: Sequence[Limit],
        rule: str,
        consistency: Consistency = "strict",
        across: AcrossRegions | None = None,
    ) -> LocalCounter:
        """See Store.counter."""
        ...

    def check_together(
        self, checks: Sequence[Charge], optional: Container[int] = (), /
    ) -> list[Answer]:
        """See Store.check_together."""
        ...

    def request_check(
        self,
        rules: Sequence[CheckedRule],
        counts: dict[str, CompiledCounts],
        owner: object,
        sample: Callable[[tuple[str, ...]], object],
    ) -> RequestCheck | None:
        """Compile the check of a request by these rules; None where no compiler was.

        It counts rules by id in `counts`, and requests under the empty text. `sample` is called
        with the subjects of one check in 61.
        """
        ...


class SharedStore(Store, Protocol):
    """A store that several machines share."""

    @property
    def monitor(self) -> StoreMonitor:
        """Its counters and circuit breakers in this process."""
        ...

    @property
    def channel(self) -> Channel:
        """The messages between the processes that use this store."""
        ...

    @property
    def authority(self) -> Authority:
        """Leases and late charges."""
        ...

    @property
    def cells(self) -> Cells:
        """Values that nodes change by compare-and-set."""
        ...

    @property
    def regional(self) -> RegionalCounts:
        """The counts of one region, of limits that regions share."""
        ...


def shared_store(store: Store) -> SharedStore | None:
    """Return the store if several machines share it; None if it is local."""
    return None if store.is_local else cast("SharedStore", store)


class StoreWrapper:
    """The parts of a wrapping store that are those of the wrapped one."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store

    is_private: Any = property(attrgetter("_store.is_private"))
    is_local: Any = property(attrgetter("_store.is_local"))
    monitor: Any = property(attrgetter("_store.monitor"))
    channel: Any = property(attrgetter("_store.channel"))
    authority: Any = property(attrgetter("_store.authority"))
    cells: Any = property(attrgetter("_store.cells"))
    regional: Any = property(attrgetter("_store.regional"))
    mark: Any = property(attrgetter("_store.mark"))
    sweep: Any = property(attrgetter("_store.sweep"))
    forget_all: Any = property(attrgetter("_store.forget_all"))
    stats: Any = property(attrgetter("_store.stats"))


class StoreMonitor(Protocol):
    """The counters of a remote store. Reading them costs no round trip, but for server_status."""

    def counters(self) -> Mapping[str, int]:
        """Return counters of this process: `denied_cache_hits` and `coalesced_checks`."""
        ...

    def denied_by_rule(self) -> Mapping[str, int]:
        """Return the denials that the denial cache answered, by rule."""
        ...

    def breakers(self) -> Sequence[BreakerState]:
        """Return the state of each server's circuit breaker."""
        ...

    def latencies(self) -> Mapping[str, list[int]]:
        """Return the data of a histogram for each server: how long calls took (`Histogram`)."""
        ...

    def server_status(self) -> Sequence[ServerStatus]:
        """Query each server that answers. Unlike the other methods, it takes round trips."""
        ...

    def on_breaker(self, listener: Callable[[BreakerState], None]) -> None:
        """Call `listener` with the new state after each change. It must not block."""
        ...


class Subscription(Protocol):
    """One thread's subscription to a topic."""

    def wait(self, seconds: float) -> str | None:
        """Wait up to `seconds` for a message; return its text, or None if none came."""
        ...

    def close(self) -> None:
        """End the subscription."""
        ...


class Channel(Protocol):
    """Messages between all processes that use a store, and a list of those that are there."""

    def publish(self, topic: str, text: str) -> None:
        """Send `text` to every current subscriber. Blocks for a round trip. Raises StoreError."""
        ...

    def subscribe(self, topic: str) -> Subscription:
        """Subscribe to a topic. Blocks for a round trip. Raises StoreError."""
        ...

    def register(
        self, topic: str, name: str, text: str, lasts_ns: int, at_most: int = REGISTERED_MAX
    ) -> Sequence[str]:
        """Keep the text of `name` for a time, and return the texts of all names of the topic.

        If they are more than `at_most`, returns those of as many, this one and others chosen at
        random. Blocks for some round trips. Raises StoreError.
        """
        ...

    def count_names(self, topic: str, name: str, lasts_ns: int) -> int:
        """Keep `name` for a time, and return how many names the topic has, this one included.

        With a time of 0, forget the name. No other name is read, however many there are. Blocks for
        two round trips. Raises StoreError.
        """
        ...

    def unregister(self, topic: str, name: str) -> None:
        """Forget the text of `name`. Blocks for a round trip. Raises StoreError."""
        ...


class Cells(Protocol):
    """Small values that several nodes change: read one, compute the next, write it if no other did.

    They are for a state that is too rich for a script, and changes a few times a second.
    """

    async def read(self, name: str) -> tuple[bytes | None, int]:
        """Return the value of a cell, None if it has none, and the store's time in nanoseconds.

        Raises StoreError; ValueError for a name that is empty or too long.
        """
        ...

    async def write(self, name: str, expected: bytes | None, value: bytes, lasts_ns: int) -> bool:
        """Replace the value if it still is `expected`; return False if it is another one.

        The value expires after `lasts_ns`. Raises ValueError for a value or a name that is too
        long. Raises StoreError: after a StoreTimeout, the value may have been written.
        """
        ...


def require_cell_name(name: str) -> None:
    """Raise ValueError for a name that no cell can have."""
    size = len(name.encode())
    if not 0 < size <= CELL_NAME_BYTES_MAX:
        raise ValueError(f"a cell's name has 1 to {CELL_NAME_BYTES_MAX} bytes, and this {size}")


def require_cell_value(name: str, value: bytes, lasts_ns: int) -> None:
    """Raise ValueError for a value that is too long, or that would expire at once."""
    if len(value) > CELL_BYTES_MAX:
        raise ValueError(
            f"a cell has at most {CELL_BYTES_MAX} bytes, and the new value of {name!r} {len(value)}"
        )
    if lasts_ns <= 0:
        raise ValueError(f"the value of the cell {name!r} would last {lasts_ns} ns; at least 1")
