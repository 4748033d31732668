"""Stores on the kernel: which time they keep, what closing does, and files by URI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tollkeeper import ConfigError, Limit, Limiter, StoreUnavailable
from tollkeeper.core.clock import SystemClock
from tollkeeper.decide import kernel
from tollkeeper.decide.stores import open_store
from tollkeeper.decide.stores.memory import PythonMemoryStore
from tollkeeper.decide.stores.native import KernelStore
from tollkeeper.testing import ManualClock, use_clock


def test_memory_is_on_the_kernel_where_it_was_built() -> None:
    """And on Python where it was not, with the same room."""
    assert isinstance(open_store("memory://?capacity=50", ManualClock()), KernelStore)


def test_without_the_kernel_memory_is_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler has memory:// all the same, with the default room or its own."""
    monkeypatch.setattr(kernel, "BUILT", False)
    store = open_store("memory://?capacity=50", ManualClock())
    assert isinstance(store, PythonMemoryStore)
    assert store.stats().states_max == 50
    assert open_store("memory://", ManualClock()).stats().states_max == 1_000_000


def test_without_the_kernel_shared_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There is no slow way to share; the error says how to get the fast one."""
    monkeypatch.setattr(kernel, "BUILT", False)
    with pytest.raises(StoreUnavailable, match=r"needs the C kernel.*install a C compiler"):
        open_store(f"shared://{tmp_path}/limits", ManualClock())


def test_a_store_keeps_real_time_by_itself() -> None:
    """On the system clock the kernel reads time; on any other it is told."""
    real = KernelStore(SystemClock(), 10)
    assert real.keeps_time
    assert real.now_ns() is None
    with use_clock(ManualClock(start=5)):
        assert real.now_ns() == 5 * 10**9
    told = KernelStore(ManualClock(start=7), 10)
    assert told.now_ns() == 7 * 10**9


@pytest.mark.parametrize("start", [10**10, -(10**10), 10**30])
def test_a_clock_outside_the_kernels_century_is_refused(start: int) -> None:
    """Times are 64 bits with room to add a century; another clock is an error, not a wrap."""
    limiter = Limiter("5/m", clock=ManualClock(start))
    with pytest.raises(ConfigError, match="is not between 1938 and 2096"):
        limiter.check("k")


def test_a_closed_store_says_so() -> None:
    """Verbs raise StoreUnavailable; a check is answered for by the failure policy."""
    limiter = Limiter("5/m", on_failure="closed")
    limiter.check("k")
    limiter.close()
    limiter.close()
    decision = limiter.check("k")
    assert (decision.allowed, decision.degraded) == (False, True)
    for call in (limiter.stats, lambda: limiter.refund("k"), lambda: limiter.reset("k")):
        with pytest.raises(StoreUnavailable, match="the store is closed"):
            call()


@pytest.mark.parametrize("query", ["", "?capacity=500", "?capacity=500&log_bytes=65_536"])
def test_a_file_is_shared_by_all_who_open_it(tmp_path: Path, query: str) -> None:
    """Two stores on one path are one: what the first spent, the second sees."""
    clock = ManualClock(start=1_700_000_000)
    uri = f"shared://{tmp_path}/a%20b.limits{query}"
    with Limiter("2/m", store=uri, clock=clock) as first:
        first.check("k", 2)
        with Limiter("2/m", store=uri, clock=clock) as second:
            assert not second.check("k")
    assert (tmp_path / "a b.limits").is_file()
    with Limiter("2/m", store=uri, clock=clock) as again:
        assert not again.check("k")


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("shared://", "has no absolute path; with three slashes"),
        ("shared:///", "has no absolute path"),
        ("shared://run/api.limits", "has no absolute path"),
        ("shared:///a%00b", "has no absolute path"),
        ("shared:///a?size=5", "has no option 'size'; there are capacity, log_bytes"),
        ("shared:///a?log_bytes=-5", "log_bytes='-5' is not a whole number"),
    ],
)
def test_a_wrong_uri_says_what_is_wrong(uri: str, problem: str) -> None:
    """Each is a ConfigError, before any file is made."""
    with pytest.raises(ConfigError) as caught:
        open_store(uri, ManualClock())
    assert problem in str(caught.value)


@pytest.mark.parametrize("name", ["", "missing/limits", "x" * 300])
def test_a_path_that_cannot_be_opened_is_unavailable(tmp_path: Path, name: str) -> None:
    """A folder, a missing one, a name too long: StoreUnavailable, not an OSError."""
    with pytest.raises(StoreUnavailable):
        open_store(f"shared://{tmp_path}/{name}", ManualClock())


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * 100_000, b"not ours\n" * 10_000])
def test_another_programs_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    """A file that is not ours is refused and not changed; an empty one may become ours."""
    path = tmp_path / "file"
    path.write_bytes(content)
    try:
        open_store(f"shared://{path}", ManualClock()).close()
    except StoreUnavailable:
        assert path.read_bytes() == content
    else:
        assert not content


def test_room_is_at_least_what_was_asked() -> None:
    """A store of 50 takes 50 keys, whatever its layout rounds up to."""
    limiter = Limiter(Limit(1, per=3_600), store="memory://?capacity=50", on_failure="raise")
    assert all(limiter.check(f"k{n}") for n in range(50))
    assert limiter.stats().states == 50


@pytest.mark.parametrize("count", [0, 1, 128, -1, 10**6])
def test_busiest_takes_any_count(count: int) -> None:
    """As many as there are, at most what was asked."""
    limiter = Limiter("9/m", store="memory://?capacity=50")
    for n in range(1_000):
        limiter.check(f"k{n % 3}")
    busiest: list[tuple[str, Any]] = limiter.store.busiest(count)
    assert len(busiest) <= max(0, min(count, 3))
    assert {subject for subject, _ in busiest} <= {"k0", "k1", "k2"}
