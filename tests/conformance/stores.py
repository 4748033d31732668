"""The stores that the conformance suite and the promises run on. To add one, add it to STORES.

A test sees a store only through the protocol in `tollkeeper.decide.store`, or through a Limiter
that was given it. Nothing here or in the tests knows how a store keeps what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from pathlib import Path

import pytest

from tests.redis_servers import running
from tollkeeper.clock import Clock
from tollkeeper.decide.store import Store
from tollkeeper.decide.stores import open_store as open_store_by_uri
from tollkeeper.decide.stores.memory import PythonMemoryStore
from tollkeeper.decide.stores.native import KernelStore
from tollkeeper.model import ALGORITHM_NAMES

# Room for every key of a test that is not about room.
STATES_MAX = 1_000
# Room for the logs of all tests but one, which asks for more states and gets more of this too. A
# file is made for each example of each property, and 32 MB of it would take 3 ms.
LOG_BYTES_MIN = 2**18

_file_numbers = count()


@dataclass(frozen=True, slots=True)
class StoreFactory:
    """How to open a store that holds nothing.

    `open`          (clock, states_max, tmp_path) → the store, closed at the end of the block.
                    The path is shared by many calls: a store that needs a file makes a new one.
    `expiry_slack`  how much longer than `reset_after` the store may physically keep a state, as
                    a fraction of the time from its last write to then. What it answers is as of
                    a fresh key from `reset_after` on.
    """

    name: str
    open: Callable[[Clock, int, Path], AbstractContextManager[Store]]
    expiry_slack: Fraction = Fraction(0)


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
    path = tmp_path / f"{next(_file_numbers)}.limits"
    store = KernelStore(clock, states_max, path=path, log_bytes=_log_bytes(states_max))
    yield store
    store.close()
    path.unlink()


_redis_open: dict[str, int] = {}


def _redis(kind: str) -> Callable[[Clock, int, Path], AbstractContextManager[Store]]:
    """Redis of a kind. Each store has a prefix of its own, so that two can be open at once."""

    @contextmanager
    def opened(clock: Clock, states_max: int, tmp_path: Path) -> Iterator[Store]:
        servers = running(kind)
        prefix = f"t{next(_file_numbers)}"
        # A machine that tests may pause for longer than a production's deadline.
        store = open_store_by_uri(servers.uri, clock, prefix=prefix, deadline_ms=10_000)
        _redis_open[kind] = _redis_open.get(kind, 0) + 1
        try:
            yield store
        finally:
            store.close()
            _redis_open[kind] -= 1
            if not _redis_open[kind]:
                servers.flush()

    return opened


# The kernel keeps the time to live in 8 bits of precision, rounded up.
_KERNEL_SLACK = Fraction(1, 256)

STORES = (
    StoreFactory("python", _python),
    StoreFactory("kernel", _kernel, _KERNEL_SLACK),
    StoreFactory("shared", _shared, _KERNEL_SLACK),
    StoreFactory("redis", _redis("single")),
)

OpenStore = Callable[..., AbstractContextManager[Store]]


# Fixtures of session scope, so that Hypothesis may open a store for each example.
@pytest.fixture(params=STORES, ids=lambda factory: factory.name, scope="session")
def factory(request: pytest.FixtureRequest) -> StoreFactory:
    """Each store in turn."""
    chosen: StoreFactory = request.param
    return chosen


@pytest.fixture(scope="session")
def open_store(factory: StoreFactory, tmp_path_factory: pytest.TempPathFactory) -> OpenStore:
    """Opens a fresh store of the kind under test: `with open_store(clock) as store`."""
    scratch = tmp_path_factory.mktemp(factory.name)

    def opened(clock: Clock, states_max: int = STATES_MAX) -> AbstractContextManager[Store]:
        return factory.open(clock, states_max, scratch)

    return opened


every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)
