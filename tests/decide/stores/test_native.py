"""Stores on the kernel: their clock, closing, and files by URI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratekeeper import ConfigError, Decision, Limit, Limiter, StoreUnavailable
from ratekeeper.core.clock import SystemClock
from ratekeeper.decide import kernel
from ratekeeper.decide.leasing import Lease
from ratekeeper.decide.store import Store
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.memory import PythonMemoryStore
from ratekeeper.decide.stores.native import KernelStore
from ratekeeper.testing import ManualClock, use_clock


def test_memory_uses_the_kernel_if_it_is_built() -> None:
    """Otherwise it uses Python, with the same capacity."""
    assert isinstance(open_store("memory://?capacity=50", ManualClock()), KernelStore)


def test_without_the_kernel_memory_is_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler has memory://, with the default capacity or its own."""
    monkeypatch.setattr(kernel, "BUILT", False)
    store = open_store("memory://?capacity=50", ManualClock())
    assert isinstance(store, PythonMemoryStore)
    assert store.stats().states_max == 50
    assert open_store("memory://", ManualClock()).stats().states_max == 1_000_000


def test_without_the_kernel_shared_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There is no slow way to share. The error explains how to build the kernel."""
    monkeypatch.setattr(kernel, "BUILT", False)
    with pytest.raises(StoreUnavailable, match=r"needs the C kernel.*install a C compiler"):
        open_store(f"shared://{tmp_path}/limits", ManualClock())


def test_the_kernel_reads_the_system_clock() -> None:
    """On the system clock the kernel reads the time, unless a test replaces it."""
    counters = [
        KernelStore(clock, 10).counter([Limit(1, per=1)], "r")
        for clock in (SystemClock(), ManualClock(start=7))
    ]
    before_ns = SystemClock().now_ns()
    times_ns = [counters[0].check("k", 0).decided_ns, counters[0].peek("k", 0).decided_ns]
    assert before_ns <= times_ns[0] <= times_ns[1] <= SystemClock().now_ns()
    with use_clock(ManualClock(start=5)):
        assert [counter.check("k", 0).decided_ns for counter in counters] == [5 * 10**9, 7 * 10**9]


@pytest.mark.parametrize("start", [10**10, -(10**10), 10**30])
def test_a_clock_out_of_range_is_rejected(start: int) -> None:
    """Times are 64 bits with room to add a century. Other times are an error and do not wrap."""
    limiter = Limiter("5/m", clock=ManualClock(start))
    with pytest.raises(ConfigError, match="is not between 1938 and 2096"):
        limiter.check("k")


def test_a_closed_store_is_unavailable() -> None:
    """Verbs raise StoreUnavailable; the failure policy answers checks."""
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
def test_stores_on_one_file_share_their_counts(tmp_path: Path, query: str) -> None:
    """Units that one store spends are spent in the other."""
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
        (
            "shared:///a?size=5",
            "no option size; the options are capacity, log_bytes, allowances, mode",
        ),
        ("shared:///a?mode=644", "mode='644' is not one of 600, 660, 666"),
        ("memory://?mode=600", "no option mode; the options are capacity, log_bytes"),
        ("shared:///a?log_bytes=-5", "log_bytes='-5' is not a whole number"),
    ],
)
def test_an_invalid_uri_is_rejected(uri: str, problem: str) -> None:
    """Each raises a ConfigError that describes the mistake, before a file is created."""
    with pytest.raises(ConfigError) as caught:
        open_store(uri, ManualClock())
    assert problem in str(caught.value)


@pytest.mark.parametrize("name", ["", "missing/limits", "x" * 300])
def test_a_path_that_cannot_be_opened_is_unavailable(tmp_path: Path, name: str) -> None:
    """A folder, a missing folder and a name that is too long raise StoreUnavailable, not
    OSError."""
    with pytest.raises(StoreUnavailable):
        open_store(f"shared://{tmp_path}/{name}", ManualClock())


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * 100_000, b"not ours\n" * 10_000])
def test_a_file_of_another_program_is_rejected_unchanged(tmp_path: Path, content: bytes) -> None:
    """Any other file is rejected and not changed. An empty file becomes a store."""
    path = tmp_path / "file"
    path.write_bytes(content)
    try:
        open_store(f"shared://{path}", ManualClock()).close()
    except StoreUnavailable:
        assert path.read_bytes() == content
    else:
        assert not content


def test_the_capacity_is_at_least_the_requested_one() -> None:
    """A store of 50 holds 50 keys, even if its layout rounds up."""
    limiter = Limiter(Limit(1, per=3_600), store="memory://?capacity=50", on_failure="raise")
    assert all(limiter.check(f"k{n}") for n in range(50))
    assert limiter.stats().states == 50


@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_a_rule_that_fills_the_logs_does_not_lift_another_rules_limit(
    tmp_path: Path, kind: str
) -> None:
    """Logins stay limited to five, although a rule with large logs has used up its room."""
    uri = {"memory": "memory://", "shared": f"shared://{tmp_path}/limits"}[kind]
    store = open_store(f"{uri}?capacity=20000&log_bytes={1 << 20}")
    search = Limiter(
        Limit(1_000, per=3_600, algorithm="sliding_window_log"),
        store=store,
        name="search",
        on_failure="open",
    )
    login = Limiter(
        Limit(5, per=3_600, algorithm="sliding_window_log"),
        store=store,
        name="login",
        on_failure="open",
    )
    searches = [search.check(f"key-{number}", 500) for number in range(1_000)]
    assert searches[-1].degraded
    assert store.stats().log_fullness == pytest.approx(0.8, abs=0.01)
    assert store.stats().fullness < 0.05
    for number in range(100):
        logins = [login.check(f"10.0.0.{number}") for _ in range(10)]
        assert [each.allowed for each in logins] == [True] * 5 + [False] * 5
        assert not any(each.degraded for each in logins)
    store.close()


def test_the_allowances_of_a_file_are_beside_it_and_made_on_first_use(tmp_path: Path) -> None:
    """A store that leases nothing needs no space for them, and its own file is unchanged."""
    path, beside = tmp_path / "a.limits", tmp_path / "a.limits.allowances"
    store = open_store(f"shared://{path}?capacity=100&allowances=1000")
    size = path.stat().st_size
    assert isinstance(store, Store)
    assert store.allowances is not None
    assert not beside.exists()
    assert store.allowances.stats()[:2] == (0, 1842)
    assert path.stat().st_size == size
    assert beside.stat().st_mode & 0o777 == 0o600
    store.close()


def test_two_stores_on_one_file_share_their_allowances(tmp_path: Path) -> None:
    """What one process put there, the other spends; the number of allowances is the file's."""
    uri = f"shared://{tmp_path / 'a.limits'}?capacity=100"
    limit = Limit(100, per=60)
    answer = Decision(True, limit, 90, decided_ns=5, charged_ns=5)
    gates = []
    for options in ("&allowances=50", ""):
        store = open_store(uri + options)
        assert store.allowances is not None
        assert store.allowances.stats().held_max == 50
        gates.append(store.allowances.gate((limit,), "api", "leased", 10**9))
    gates[0].put("ada", Lease(1, 10**10, 10**12), answer, 1)
    assert gates[1].spend("ada", 1)
    assert gates[0].spend("ada", 1) is None
    other = open_store(uri + "&allowances=60").allowances
    assert other is not None
    with pytest.raises(ConfigError, match="created with allowances=50, not 60; omit allowances"):
        other.stats()


def test_a_process_claims_only_units_that_it_can_report(tmp_path: Path) -> None:
    """Units of rules that it does not know wait for a process that knows them."""
    limit = Limit(100, per=60)
    tables = []
    for _ in range(2):
        table = open_store(f"shared://{tmp_path / 'a.limits'}?capacity=100").allowances
        assert table is not None
        tables.append(table)
    gate = tables[0].gate((limit,), "api", "eventual", 10**9)
    gate.put("ada", Lease(5, 0, 10**12), Decision(True, limit, 90, decided_ns=5), 1)
    gate.spend("ada", 2)
    assert tables[1].claim(10, 0) == []
    tables[1].gate((limit,), "api", "eventual", 10**9)
    assert [claim.units for claim in tables[1].claim(10, 0)] == [2]
    assert tables[0].claim(10, 0) == []


def test_quotas_and_allowances_do_not_open_the_files_of_each_other(tmp_path: Path) -> None:
    """The error says what the file is, and the file is unchanged."""
    path = tmp_path / "a.limits"
    store = open_store(f"shared://{path}?capacity=100&allowances=50")
    assert store.allowances is not None
    store.allowances.stats()
    with pytest.raises(StoreUnavailable, match="is a Ratekeeper file of allowances and was not"):
        open_store(f"shared://{path}.allowances")
    path.rename(tmp_path / "b.limits.allowances")
    other = open_store(f"shared://{tmp_path}/b.limits?capacity=100").allowances
    assert other is not None
    with pytest.raises(StoreUnavailable, match="is a Ratekeeper file of quotas and was not"):
        other.stats()


def test_the_compiled_check_calls_the_fallback_for_everything_that_it_cannot_decide() -> None:
    """The node decides a plain key with units or a denial; each miss counts as demand once."""
    store = open_store("memory://")
    assert store.allowances is not None
    limit = Limit(100, per=60)
    answer = Decision(True, limit, 90, decided_ns=5, charged_ns=5, rule="api")
    gate = store.allowances.gate((limit,), "api", "leased", 10**12)
    asked: list[Any] = []

    def fallback(*args: Any, **kwargs: Any) -> Decision:
        asked.append((args, kwargs))
        return answer

    fast = gate.fast_check(fallback)
    assert fast is not None
    gate.put("ada", Lease(6, 10**10, 10**12), answer, 1)
    assert type(fast.check("ada")) is type(Limiter("9/minute").check("a"))
    assert [fast.check("ada", 2).remaining, fast.check("ada", cost=3).remaining] == [87, 84]
    assert asked == []
    assert fast.check("ada") is answer
    gate.deny("eve", 1, 10**9)
    assert not fast.check("eve")
    assert fast.counted() == (3, 1)
    for call in (("bob",), (("a", "b"),), ("ada", True), ("x" * 200,), ("ada", 10**12)):
        assert fast.check(*call) is answer
    with use_clock(ManualClock()):
        assert fast.check("eve") is answer
    store.close()
    assert fast.check("ada") is answer
    assert len(asked) == 8


def test_a_miss_of_the_compiled_check_is_counted_as_demand_by_the_fallback() -> None:
    """Otherwise a lease would be twice as large as the demand."""
    store = open_store("memory://")
    assert store.allowances is not None
    limit = Limit(100, per=60)
    gate = store.allowances.gate((limit,), "api", "leased", 10**12)
    answer = Decision(True, limit, 90, decided_ns=5, charged_ns=5)
    gate.put("ada", Lease(0, 0, 0), answer, 1)
    fast = gate.fast_check(lambda key: gate.spend(key, 1) or answer)
    assert fast is not None
    for _ in range(3):
        fast.check("ada")
    assert gate.demand("ada") == 3


def test_a_grant_gives_back_the_memory_of_the_log_whose_place_it_takes() -> None:
    """Expired logs make room for grants. Their memory is for other logs again."""
    clock = ManualClock(start=1_000_000)
    store = open_store("memory://?capacity=64&log_bytes=262144", clock)
    counter = store.counter([Limit(1_000, per=1, algorithm="sliding_window_log")], "r")
    for number in range(100):
        for each in range(20):
            decision: Any = counter.check(f"a{number}-{each}", 1_000)
            assert decision.allowed
        clock.advance(10)
        for each in range(20):
            counter.grant(f"b{number}-{each}", 5, None)
        clock.advance(10)
