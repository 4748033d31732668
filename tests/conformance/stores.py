"""The stores that the conformance suite and the promises run on. To add one, add it to STORES.

A test sees a store only through the protocol in `tollkeeper.decide.store`, or through a Limiter
that was given it. Nothing here or in the tests knows how a store keeps what it keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from pathlib import Path

import pytest

from tests.clocks import SteppedClock
from tests.conformance.awaited import AwaitedStore
from tests.redis_servers import running
from tollkeeper.core.clock import Clock
from tollkeeper.core.model import ALGORITHM_NAMES
from tollkeeper.decide.store import Store
from tollkeeper.decide.stores import open_store as open_store_by_uri
from tollkeeper.decide.stores.memory import PythonMemoryStore
from tollkeeper.decide.stores.native import KernelStore

# Room for every key of a test that is not about room.
STATES_MAX = 1_000
# Room for the logs of all tests but one, which asks for more states and gets more of this too. A
# file is made for each example of each property, and 32 MB of it would take 3 ms.
LOG_BYTES_MIN = 2**18

# A machine that tests may pause for longer than a production's deadlines.
PATIENCE = {"deadline_ms": 10_000, "connect_ms": 10_000}

_numbers = count()


@dataclass(frozen=True, slots=True)
class StoreFactory:
    """How to open a store that holds nothing.

    `open`          (clock, states_max, tmp_path) → the store, closed at the end of the block.
                    The path is shared by many calls: a store that needs a file makes a new one.
    `expiry_slack`  how much longer than `reset_after` the store may physically keep a state, as
                    a fraction of the time from its last write to then. What it answers is as of
                    a fresh key from `reset_after` on.
    `time_step_ns`  the store tells times only in whole steps of this; so does the clock it is given
    `bounded`       it has room for so many states and no more
    `sweeps`        `sweep` drops what has expired by the clock that the store was given
    `examples`      the part of a property's examples that are tried on it
    """

    name: str
    open: Callable[[Clock, int, Path], AbstractContextManager[Store]]
    expiry_slack: Fraction = Fraction(0)
    time_step_ns: int = 1
    bounded: bool = True
    sweeps: bool = True
    examples: Fraction = Fraction(1)


@contextmanager
def _python(clock: Clock, states_max: int, tmp_path: Path) -> Iterator[Store]:
    store = PythonMemoryStore(clock, states_max)
    yield store
    store.close()


def _log_bytes(states_max: int) -> int:
    return max(LOG_BYTES_MIN, 64 * states_max)


@contextmanager
def _kernel(clock: Clock, states_max: int, tmp_path: Path) -> Iterator[Store]:
    store = KernelStore(clock, states_max, log_bytes=_log_bytes(states_max))
    yield store
    store.close()


@contextmanager
def _shared(clock: Clock, states_max: int, tmp_path: Path) -> Iterator[Store]:
    path = tmp_path / f"{next(_numbers)}.limits"
    store = KernelStore(clock, states_max, path=path, log_bytes=_log_bytes(states_max))
    yield store
    store.close()
    path.unlink()


_redis_open: Counter[str] = Counter()


def _redis(
    kind: str, *, awaited: bool = False
) -> Callable[[Clock, int, Path], AbstractContextManager[Store]]:
    """Redis of a kind. Each store has a prefix of its own, so that two can be open at once.

    `awaited`: through the verbs for asyncio.
    """

    @contextmanager
    def opened(clock: Clock, states_max: int, tmp_path: Path) -> Iterator[Store]:
        servers = running(kind)
        prefix = f"t{next(_numbers)}"
        store = open_store_by_uri(servers.uri, clock, prefix=prefix, **PATIENCE)
        if awaited:
            store = AwaitedStore(store)
        _redis_open[kind] += 1
        try:
            yield store
        finally:
            store.close()
            _redis_open[kind] -= 1
            if not _redis_open[kind]:
                servers.flush()

    return opened


def _redis_factory(
    name: str, kind: str, examples: Fraction, *, awaited: bool = False
) -> StoreFactory:
    # Redis tells the time in microseconds, has no bound of its own, and drops keys by its own clock
    # (`tests/integration/test_redis_expiry.py`).
    return StoreFactory(
        name,
        _redis(kind, awaited=awaited),
        time_step_ns=1_000,
        bounded=False,
        sweeps=False,
        examples=examples,
    )


# The kernel keeps the time to live in 8 bits of precision, rounded up.
_KERNEL_SLACK = Fraction(1, 256)

# The properties are the scripts' affair, which are the same on every kind of Redis; what differs is
# the way there. So all the examples are tried on one server, and some on the others.
STORES = (
    StoreFactory("python", _python),
    StoreFactory("kernel", _kernel, _KERNEL_SLACK),
    StoreFactory("shared", _shared, _KERNEL_SLACK),
    _redis_factory("redis", "single", Fraction(1, 2)),
    _redis_factory("redis-async", "single", Fraction(1, 8), awaited=True),
    _redis_factory("redis-password", "password", Fraction(1, 20)),
    _redis_factory("redis-tls", "tls", Fraction(1, 20)),
    _redis_factory("sentinel", "sentinel", Fraction(1, 20)),
    _redis_factory("cluster", "cluster", Fraction(1, 4)),
    _redis_factory("cluster-async", "cluster", Fraction(1, 20), awaited=True),
)


# Fixtures of session scope, so that Hypothesis may open a store for each example.
@pytest.fixture(params=STORES, ids=lambda factory: factory.name, scope="session")
def factory(request: pytest.FixtureRequest) -> StoreFactory:
    """Each store in turn."""
    chosen: StoreFactory = request.param
    return chosen


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Opens a fresh store of the kind under test: `with open_store(clock) as store`.

    The clock is set to tell time in the store's steps, so that both see the same time.
    """

    factory: StoreFactory
    scratch: Path

    def __call__(
        self, clock: SteppedClock, states_max: int = STATES_MAX
    ) -> AbstractContextManager[Store]:
        clock.step_ns = self.factory.time_step_ns
        return self.factory.open(clock, states_max, self.scratch)


@pytest.fixture(scope="session")
def open_store(factory: StoreFactory, tmp_path_factory: pytest.TempPathFactory) -> OpenStore:
    return OpenStore(factory, tmp_path_factory.mktemp(factory.name))


def past_expiry(factory: StoreFactory, clock: SteppedClock, reset_after_ns: int) -> None:
    """Move to when the store must have let go of a state that it wrote in the last ten seconds."""
    written_ns = reset_after_ns + 10 * 10**9
    clock.advance_ns(reset_after_ns + int(written_ns * factory.expiry_slack))


def _stores_that(have: Callable[[StoreFactory], bool]) -> pytest.MarkDecorator:
    """Marks tests that are run on some of the stores."""
    return pytest.mark.parametrize(
        "factory",
        [each for each in STORES if have(each)],
        ids=lambda each: each.name,
        indirect=True,
    )


bounded_stores = _stores_that(lambda each: each.bounded)
sweeping_stores = _stores_that(lambda each: each.sweeps)
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
