"""Cells in Redis: what is rejected before anything is sent. Servers: test_redis_cells.py."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ratekeeper.core.clock import SystemClock
from ratekeeper.core.errors import StoreUnavailable
from ratekeeper.core.steps import Steps
from ratekeeper.decide.store import CELL_BYTES_MAX, CELL_NAME_BYTES_MAX
from ratekeeper.decide.stores.redis.cells import RedisCells
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.scripts import ScriptCall
from ratekeeper.testing import ManualClock

CONFIG = parse("redis://localhost:1")


class Driver:
    """Answers every call with one reply, and keeps the calls."""

    def __init__(self, reply: Any) -> None:
        self.reply = reply
        self.calls: list[ScriptCall] = []

    def running(self, call: ScriptCall) -> Steps[Any]:
        self.calls.append(call)
        return self.reply
        yield  # it is a generator


def cells_with(driver: Driver, clock: SystemClock | ManualClock | None = None) -> RedisCells:
    links: Any = SimpleNamespace(of_loop=lambda: driver)
    return RedisCells(CONFIG, clock or SystemClock(), links)


@pytest.mark.parametrize("name", ["", "n" * (CELL_NAME_BYTES_MAX + 1), "é" * CELL_NAME_BYTES_MAX])
def test_names_are_bounded(name: str) -> None:
    """In bytes; the error says how many there may be."""
    driver = Driver([1, None])
    with pytest.raises(ValueError, match=r"1 to 4096 bytes, and this \d+"):
        asyncio.run(cells_with(driver).read(name))
    with pytest.raises(ValueError, match="1 to 4096 bytes"):
        asyncio.run(cells_with(driver).write(name, None, b"v", 1))
    assert driver.calls == []


def test_values_are_bounded() -> None:
    """A value that is too long, or expires at once, is not sent."""
    driver = Driver([1, 1])
    cells = cells_with(driver)
    with pytest.raises(ValueError, match="at most 65536 bytes, and the new value of 'n' 65537"):
        asyncio.run(cells.write("n", None, b"v" * (CELL_BYTES_MAX + 1), 1))
    with pytest.raises(ValueError, match="would last 0 ns"):
        asyncio.run(cells.write("n", None, b"v", 0))
    assert driver.calls == []


@pytest.mark.parametrize("name", ["plain", "}", "{}", "a{b}c", "ü"])
def test_braces_in_a_name_do_not_choose_the_slot(name: str) -> None:
    """The hash tag is never empty, and never a part of the name."""
    driver = Driver([1, None])
    asyncio.run(cells_with(driver).read(name))
    head, _, rest = driver.calls[0].key.partition(b"{")
    tag, _, kept = rest.partition(b"}:")
    assert (head, len(tag), kept) == (b"rk:cells:", 8, name.encode())


@pytest.mark.parametrize("reply", [[], [1], [b"1", None], [1, 2, 3], [1, [2]]])
def test_a_reply_of_another_form_is_an_error(reply: Any) -> None:
    """It is not taken for a value."""
    with pytest.raises(StoreUnavailable, match="not one of the script"):
        asyncio.run(cells_with(Driver(reply)).read("n"))


def test_a_write_is_answered_by_yes_or_no() -> None:
    """Any other answer is an error; the time to live is rounded up to milliseconds."""
    driver = Driver([1, 0])
    assert asyncio.run(cells_with(driver).write("n", b"old", b"new", 1_000_001)) is False
    assert driver.calls[0].arguments == (b"", b"new", 2, b"old")
    with pytest.raises(StoreUnavailable, match="not one of the script"):
        asyncio.run(cells_with(Driver([1, b"x"])).write("n", None, b"v", 1))


def test_the_clock_of_a_test_is_sent_along() -> None:
    """Otherwise the server's clock counts."""
    driver = Driver([7_000_000, None])
    assert asyncio.run(cells_with(driver, ManualClock(7)).read("n")) == (None, 7 * 10**9)
    assert driver.calls[0].arguments == (7_000_000,)
