"""Cells on real servers: compare-and-set, expiry, the server's time, and failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

import pytest

from ratekeeper import Fleet, Regions
from ratekeeper.core.clock import NS_PER_SECOND, SystemClock
from ratekeeper.core.errors import StoreError
from ratekeeper.decide.store import CELL_BYTES_MAX, CELL_NAME_BYTES_MAX, Cells, Store
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.store import RedisStore
from ratekeeper.fleet.store import FleetStore
from ratekeeper.regions.store import RegionStore
from tests.conformance.stores import PATIENCE
from tests.redis_servers import Single, User, running

pytestmark = pytest.mark.server
T = TypeVar("T")
HOUR_NS = 3_600 * NS_PER_SECOND


def opened(uri: str) -> RedisStore:
    """Return a store that waits for a busy machine."""
    options = "&".join(f"{name}={value}" for name, value in PATIENCE.items())
    return RedisStore(parse(f"{uri}{'&' if '?' in uri else '?'}{options}&prefix=cells"))


def on(store: RedisStore, call: Coroutine[Any, Any, T]) -> T:
    """Run calls of a store, and close it."""

    async def run() -> T:
        try:
            return await call
        finally:
            await store.aclose()

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["single", "sentinel", "cluster"])
def test_compare_and_set(kind: str, key: str) -> None:
    """A write needs the value that the cell has; the first one, that it has none."""
    store = opened(running(kind).uri)

    async def calls(cells: Cells) -> None:
        assert (await cells.read(key))[0] is None
        assert not await cells.write(key, b"", b"one", HOUR_NS)
        assert await cells.write(key, None, b"one", HOUR_NS)
        assert not await cells.write(key, None, b"two", HOUR_NS)
        assert not await cells.write(key, b"on", b"two", HOUR_NS)
        assert (await cells.read(key))[0] == b"one"
        assert await cells.write(key, b"one", b"\x00\xff\r\n", HOUR_NS)
        assert (await cells.read(key))[0] == b"\x00\xff\r\n"
        assert await cells.write(key, b"\x00\xff\r\n", b"", HOUR_NS)
        assert (await cells.read(key))[0] == b""
        assert (await cells.read(key + "}"))[0] is None

    on(store, calls(store.cells))


@pytest.mark.parametrize("kind", ["single", "cluster"])
def test_the_longest_name_and_value(kind: str, key: str) -> None:
    """Both are kept, also on a server that has not seen the script."""
    store = opened(running(kind).uri)
    name, value = key.ljust(CELL_NAME_BYTES_MAX, "}"), b"\xff" * CELL_BYTES_MAX

    async def calls(cells: Cells) -> None:
        assert await cells.write(name, None, value, HOUR_NS)
        assert await cells.write(name, value, value, HOUR_NS)
        assert (await cells.read(name))[0] == value

    on(store, calls(store.cells))


def test_of_concurrent_writers_one_wins(key: str) -> None:
    """Twenty tasks count to 100 in one cell, and no step is lost."""
    store = opened(running("single").uri)

    async def count(cells: Cells, times: int) -> None:
        while times:
            value, _ = await cells.read(key)
            after = b"%d" % (int(value or b"0") + 1)
            times -= await cells.write(key, value, after, HOUR_NS)

    async def calls(cells: Cells) -> bytes | None:
        await asyncio.gather(*(count(cells, 5) for _ in range(20)))
        return (await cells.read(key))[0]

    assert on(store, calls(store.cells)) == b"100"


def test_a_value_expires(key: str) -> None:
    """Each write sets the time anew."""
    store = opened(running("single").uri)

    async def calls(cells: Cells) -> None:
        assert await cells.write(key, None, b"v", HOUR_NS)
        assert await cells.write(key, b"v", b"w", NS_PER_SECOND // 100)
        until_s = time.monotonic() + 30
        while (await cells.read(key))[0] is not None:
            assert time.monotonic() < until_s
            await asyncio.sleep(0.01)
        assert await cells.write(key, None, b"again", HOUR_NS)

    on(store, calls(store.cells))


def test_the_time_is_the_servers(key: str) -> None:
    """It is that of TIME, and it goes on."""
    server = cast("Single", running("single"))
    store = opened(server.uri)
    with server.client() as raw:
        before = raw.time()
        _, now_ns = on(store, store.cells.read(key))
        after = raw.time()
    assert before <= (now_ns // NS_PER_SECOND, now_ns % NS_PER_SECOND // 1_000) <= after


def test_failures_are_store_errors(key: str) -> None:
    """A server that is away, a key of another program, a missing permission, a closed store."""
    with pytest.raises(StoreError):
        on(store := opened("redis://localhost:1"), store.cells.read(key))
    with pytest.raises(StoreError, match="closed"):
        asyncio.run(store.cells.read(key))
    server = cast("Single", running("single"))
    with server.client() as raw:
        raw.rpush(store.cells._key(key), "x")
    with pytest.raises(StoreError, match="another application has a key"):
        on(store := opened(server.uri), store.cells.read(key))
    user = User("limited", "secret", "~* +@connection +@scripting +time")
    with (
        Single(users=[user]) as server,
        pytest.raises(StoreError, match=r"for global limits and cells \+get .*\+set "),
    ):
        on(store := opened(server.uri), store.cells.read(key))


def test_stores_that_wrap_another_pass_the_cells_on() -> None:
    """A node and a region have the cells of their Redis; memory has none."""
    uri = running("single").uri
    redis = opened(uri)
    regions = Regions("eu", {"eu": uri}, sync=False)
    region = RegionStore(redis, regions, SystemClock())
    node: Store = FleetStore(region, Fleet(), SystemClock())
    assert node.cells is region.cells is redis.cells
    node.close()
