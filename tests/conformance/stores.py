"""The stores that the conformance suite and the promises run on.

Both suites run in full on each store of STORES: the engines, a Redis server and a Redis Cluster.
CONNECTIONS are further ways to reach the same Redis scripts: asyncio, a password, TLS, Sentinel.
They run the tests that concern the connection: one pass of each verb, many threads, closing, and
the comparison with the model.

A test sees a store only through the protocol in `ratekeeper.decide.store`, or through a Limiter
that uses it. Nothing here or in the tests knows how a store represents its state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from ratekeeper.core.clock import Clock
from ratekeeper.core.model import UNIT_ALGORITHMS
from ratekeeper.decide.store import LocalStore
from ratekeeper.decide.stores import open_store as open_store_by_uri
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.decide.stores.native import KernelStore
from tests.answering import AnsweringStore, Link, in_thread, on_loop
from tests.clocks import SteppedClock
from tests.redis_servers import running

# Room for every key of a test that is not about room.
STATES_MAX = 1_000
# Room for the logs of every test but one, which opens a larger store. Each example of a property
# creates a file, and creating the default 32 MB takes 3 ms.
LOG_BYTES_MIN = 2**18

# A busy machine may stall a test for longer than the deadlines of production.
PATIENCE = {"deadline_ms": 10_000, "connect_ms": 10_000}
PATIENT = "deadline_ms=10000&connect_ms=10000"  # the same in a URI

_numbers = count()


@dataclass(frozen=True, slots=True)
class StoreFactory:
    """How to open an empty store.

    `open`          (clock, states_max, tmp_path) → the store, closed at the end of the block.
                    Many calls share the path: a store that needs a file creates a new one.
    `server`        the kind of server that the store needs, or ""
    `expiry_slack`  how much longer than `reset_after` the store may keep a state in memory, as a
                    fraction of the time between its last write and `reset_after`. Its decisions
                    are those of a fresh key from `reset_after` on.
    `time_step_ns`  the resolution of the store's clock; the test's clock gets the same
    `bounded`       True if the store has a maximum number of states
    `sweeps`        True if `sweep` removes states that expired by the store's clock
    `examples`      the share of a property's examples that this store runs
    """

    name: str
    open: Callable[[Clock, int, Path], AbstractContextManager[LocalStore]]
    server: str = ""
    expiry_slack: Fraction = Fraction(0)
    time_step_ns: int = 1
    bounded: bool = True
    sweeps: bool = True
    examples: Fraction = Fraction(1)


@contextmanager
def _python(clock: Clock, states_max: int, tmp_path: Path) -> Iterator[LocalStore]:
    store = PythonMemoryStore(clock, states_max)
    yield store
    store.close()


def _log_bytes(states_max: int) -> int:
    return max(LOG_BYTES_MIN, 64 * states_max)


@contextmanager
def _kernel(clock: Clock, states_max: int, tmp_path: Path) -> Iterator[LocalStore]:
    store = KernelStore(clock, states_max, log_bytes=_log_bytes(states_max))
    yield store
    store.close()


@contextmanager
def _shared(clock: Clock, states_max: int, tmp_path: Path) -> Iterator[LocalStore]:
    path = tmp_path / f"{next(_numbers)}.limits"
    store = KernelStore(clock, states_max, path=path, log_bytes=_log_bytes(states_max))
    yield store
    store.close()
    path.unlink()


_redis_open: Counter[str] = Counter()


def _redis(
    kind: str, link: Link
) -> Callable[[Clock, int, Path], AbstractContextManager[LocalStore]]:
    """Open a store on a kind of Redis, whose Asks this link carries.

    Each store has its own key prefix, so that two can be open at once.
    """

    @contextmanager
    def opened(clock: Clock, states_max: int, tmp_path: Path) -> Iterator[LocalStore]:
        servers = running(kind)
        prefix = f"t{next(_numbers)}"
        store = AnsweringStore(
            open_store_by_uri(servers.uri, clock, prefix=prefix, **PATIENCE), link
        )
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
    name: str, kind: str, examples: Fraction, link: Link = in_thread
) -> StoreFactory:
    # The clock of Redis counts microseconds. Redis has no maximum of its own and expires keys by
    # its own clock (`tests/integration/test_redis_expiry.py`).
    return StoreFactory(
        name,
        _redis(kind, link),
        server=kind,
        time_step_ns=1_000,
        bounded=False,
        sweeps=False,
        examples=examples,
    )


# The kernel stores the time to live with 8 bits of precision, rounded up.
_KERNEL_SLACK = Fraction(1, 256)

# The examples of a property are the same on every run, so more of them in each run find nothing
# new; `RATEKEEPER_EXPLORE` tries others. Two stores run the same C code, and every Redis runs the
# same scripts: the first of each runs more examples, and for the others a few show that the way to
# the code changes nothing. The parity tests compare the Python store with the kernel.
STORES = (
    StoreFactory("python", _python, examples=Fraction(1, 4)),
    StoreFactory("kernel", _kernel, expiry_slack=_KERNEL_SLACK, examples=Fraction(1, 2)),
    StoreFactory("shared", _shared, expiry_slack=_KERNEL_SLACK, examples=Fraction(1, 8)),
    _redis_factory("redis", "single", Fraction(1, 4)),
    _redis_factory("cluster", "cluster", Fraction(1, 10)),
)
CONNECTIONS = (
    _redis_factory("redis-async", "single", Fraction(1, 8), on_loop),
    _redis_factory("cluster-async", "cluster", Fraction(1, 20), on_loop),
    _redis_factory("redis-password", "password", Fraction(1, 20)),
    _redis_factory("redis-tls", "tls", Fraction(1, 20)),
    _redis_factory("sentinel", "sentinel", Fraction(1, 20)),
)


def _parameters(factories: Iterable[StoreFactory]) -> list[ParameterSet]:
    """Return the stores as parameters of a test; a store on a server carries the `server` mark."""
    return [
        pytest.param(each, id=each.name, marks=[pytest.mark.server] if each.server else [])
        for each in factories
    ]


# Hypothesis opens a store for each example, so these fixtures have the scope of the session.
@pytest.fixture(params=_parameters(STORES), scope="session")
def factory(request: pytest.FixtureRequest) -> StoreFactory:
    """Return each store of STORES in turn."""
    chosen: StoreFactory = request.param
    return chosen


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Opens an empty store of the kind under test: `with open_store(clock) as store`.

    It gives the clock the resolution of the store, so that both show the same time.
    """

    factory: StoreFactory
    scratch: Path

    def __call__(
        self, clock: SteppedClock, states_max: int = STATES_MAX
    ) -> AbstractContextManager[LocalStore]:
        clock.step_ns = self.factory.time_step_ns
        return self.factory.open(clock, states_max, self.scratch)


@pytest.fixture(scope="session")
def open_store(factory: StoreFactory, tmp_path_factory: pytest.TempPathFactory) -> OpenStore:
    return OpenStore(factory, tmp_path_factory.mktemp(factory.name))


def past_expiry(factory: StoreFactory, clock: SteppedClock, reset_after_ns: int) -> None:
    """Advance until the store must have dropped a state that it wrote in the last ten seconds."""
    written_ns = reset_after_ns + 10 * 10**9
    clock.advance_ns(reset_after_ns + int(written_ns * factory.expiry_slack))


def _run_on(factories: Iterable[StoreFactory]) -> pytest.MarkDecorator:
    """Return a mark that runs a test on these stores."""
    return pytest.mark.parametrize("factory", _parameters(factories), indirect=True)


bounded_stores = _run_on(each for each in STORES if each.bounded)
sweeping_stores = _run_on(each for each in STORES if each.sweeps)
every_connection = _run_on(STORES + CONNECTIONS)
connections = _run_on(CONNECTIONS)
every_algorithm = pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)
