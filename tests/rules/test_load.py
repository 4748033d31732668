"""The load of the machine, and the factor that scales limits by it."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollkeeper import (
    AsyncLimiter,
    CapacityError,
    ConfigError,
    Decision,
    Limiter,
    Request,
    StoreUnavailable,
)
from tollkeeper.decide.stores import memory
from tollkeeper.decide.stores.memory import MemoryGate
from tollkeeper.rules.document.model import Scale
from tollkeeper.rules.load import SAMPLE_NS, CpuProbe, Factor, Loads, MemoryProbe, aimed_at
from tollkeeper.testing import ManualClock

SECOND = 1_000_000_000


class Load:
    """A source that returns a fixed load and counts its calls."""

    def __init__(self, load: float | None = 0.0) -> None:
        self.load = load
        self.reads = 0

    def __call__(self) -> float | None:
        self.reads += 1
        return self.load


# ------------------------------------------------------------------------------------- the factor


@pytest.mark.parametrize(
    ("load", "factor"),
    [(0.0, 1.0), (0.5, 1.0), (0.6, 0.84), (0.75, 0.6), (0.9, 0.36), (1.0, 0.2), (7.0, 0.2)],
)
def test_from_load_to_factor(load: float, factor: float) -> None:
    """The factor is 1.0 up to `low`, `least` from `high`, and linear in between."""
    scale = Scale(low=0.5, high=1.0, least=0.2, smoothing_s=0)
    assert aimed_at(scale, load) == pytest.approx(factor)
    assert Factor(scale, lambda: load, lambda: 0)() == pytest.approx(factor)


def test_the_first_reading_takes_effect_at_once() -> None:
    """A process that starts on a busy machine starts with reduced limits."""
    factor = Factor(Scale(least=0.2), lambda: 1.0, ManualClock().now_ns)
    assert factor() == 0.2


def test_an_unknown_load_changes_nothing() -> None:
    """Before the first reading, and after a source fails, the factor stays."""
    clock, load = ManualClock(), Load(None)
    factor = Factor(Scale(least=0.2, smoothing_s=0), load, clock.now_ns)
    assert factor() == 1.0
    load.load = 1.0
    clock.advance(1)
    assert factor() == 0.2
    load.load = None
    clock.advance(1)
    assert factor() == 0.2


def test_a_change_takes_effect_by_two_thirds_in_the_smoothing_time() -> None:
    """The factor moves 1 - 1/e of the way in `smoothing_s`, for any readings in between."""
    for step_s in (0.25, 1.0, 10.0):
        clock, load = ManualClock(), Load(0.0)
        factor = Factor(Scale(least=0.2, smoothing_s=10), load, clock.now_ns)
        assert factor() == 1.0
        load.load = 1.0
        for _ in range(round(10 / step_s)):
            clock.advance(step_s)
            factor()
        assert factor() == pytest.approx(0.2 + 0.8 / math.e)


def test_the_source_is_read_at_most_every_sample_interval() -> None:
    """Any number of checks in any number of threads share one reading."""
    clock, load = ManualClock(), Load(0.9)
    factor = Factor(Scale(), load, clock.now_ns)
    for _ in range(1_000):
        factor()
    assert load.reads == 1
    clock.advance_ns(SAMPLE_NS - 1)
    factor()
    assert load.reads == 1
    clock.advance_ns(1)
    factor()
    assert load.reads == 2


def test_no_thread_waits_for_a_reading() -> None:
    """While one thread reads, the others use the previous factor."""
    clock = ManualClock()
    reading, go_on = threading.Event(), threading.Event()
    loads = iter([0.0, 1.0])

    def slow() -> float:
        load = next(loads)
        if load == 1.0:
            reading.set()
            assert go_on.wait(10)
        return load

    factor = Factor(Scale(least=0.2, smoothing_s=0), slow, clock.now_ns)
    assert factor() == 1.0
    clock.advance(1)
    thread = threading.Thread(target=factor)
    thread.start()
    assert reading.wait(10)
    assert factor() == 1.0
    go_on.set()
    thread.join(10)
    assert factor() == 0.2


@given(
    st.lists(st.tuples(st.floats(-1, 2), st.floats(0, 100)), max_size=20),
    st.floats(0, 0.6),
    st.floats(0.61, 1),
    st.floats(0.01, 1),
    st.floats(0, 60),
)
def test_the_factor_stays_within_its_bounds(
    readings: list[tuple[float, float]], low: float, high: float, least: float, smoothing_s: float
) -> None:
    """For any reading, and for a clock that steps back."""
    clock, load = ManualClock(), Load()
    factor = Factor(Scale("cpu", low, high, least, smoothing_s), load, clock.now_ns)
    for reading, seconds in readings:
        load.load = reading
        clock.advance(seconds - 10)
        assert least * 0.999_999 <= factor() <= 1.0


# ------------------------------------------------------------------------------------ the sources


def test_rules_with_one_source_share_a_reading() -> None:
    """The CPU load is an average since the last reading; two readers would halve the interval."""
    clock, cpu = ManualClock(), Load(0.8)
    loads = Loads(clock.now_ns, {"cpu": cpu})
    assert [loads.reading("cpu") for _ in range(5)] == [0.8] * 5
    assert cpu.reads == 1
    clock.advance_ns(SAMPLE_NS)
    loads.reading("cpu")
    assert cpu.reads == 2


def test_a_reading_stays_until_the_next_one() -> None:
    """While a probe returns None, the previous reading applies."""
    clock, cpu = ManualClock(), Load(None)
    loads = Loads(clock.now_ns, {"cpu": cpu})
    found = []
    for load in (None, 0.8, None, 0.3):
        cpu.load = load
        found.append(loads.reading("cpu"))
        clock.advance_ns(SAMPLE_NS)
    assert found == [None, 0.8, 0.8, 0.3]


def test_the_pushed_number_is_the_load() -> None:
    """The load is unknown before the first push; then it is the last pushed number."""
    loads = Loads(ManualClock().now_ns, {})
    assert loads.reading("pushed") is None
    loads.push(0.8)
    loads.push(1)
    assert loads.reading("pushed") == 1.0


@pytest.mark.parametrize("load", [-0.1, 1.1, math.nan, math.inf, "0.5", None, True], ids=repr)
def test_an_invalid_load_is_rejected(load: Any) -> None:
    """Only numbers from 0 to 1 are accepted. The previous load stays."""
    loads = Loads(ManualClock().now_ns, {})
    loads.push(0.5)
    with pytest.raises(ConfigError, match=r"is not a number from 0\.0 \(idle\) to 1\.0"):
        loads.push(load)
    assert loads.reading("pushed") == 0.5


def test_the_probes_of_this_machine_return_valid_loads() -> None:
    """CPU and memory are from 0 to 1, or None without /proc."""
    cpu, memory = CpuProbe(), MemoryProbe()
    cpu.load()
    load = None
    for _ in range(10_000):
        load = cpu.load()
        if load is not None:
            break
    assert load is None or 0.0 <= load <= 1.0
    known = memory.load()
    assert (known is not None and 0.0 < known < 1.0) is Path("/proc/meminfo").exists()


def _files(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_cpu_of_a_machine(tmp_path: Path) -> None:
    """The load is the share of ticks since the last reading that were neither idle nor disk
    wait."""
    _files(tmp_path, {"stat": "cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3 4\n"})
    probe = CpuProbe(tmp_path, tmp_path)
    assert probe.load() is None
    _files(tmp_path, {"stat": "cpu  160 5 60 815 55 5 0 0 9 9\ncpu0 1 2 3 4\n"})
    assert probe.load() == pytest.approx(80 / 100)
    assert probe.load() is None  # no time passed


def test_cpu_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest cgroup with a quota sets the maximum: here half a CPU."""
    now_ns = [0]
    monkeypatch.setattr("tollkeeper.rules.load.time.monotonic_ns", lambda: now_ns[0])
    _files(
        tmp_path,
        {
            "proc/self/cgroup": "1:cpu:/old\n0::/pods/one\n",
            "cgroup/pods/cpu.max": "50000 100000\n",
            "cgroup/pods/cpu.stat": "usage_usec 1000000\nuser_usec 7\n",
            "cgroup/pods/one/cpu.max": "max 100000\n",
        },
    )
    probe = CpuProbe(tmp_path / "proc", tmp_path / "cgroup")
    assert probe.load() is None
    now_ns[0] = 2 * SECOND
    _files(tmp_path, {"cgroup/pods/cpu.stat": "usage_usec 1600000\n"})
    assert probe.load() == pytest.approx(0.6 / (2 * 0.5))


def test_cpu_without_readable_files(tmp_path: Path) -> None:
    """Other systems use the load average. Invalid files raise no error."""
    for texts in ({}, {"stat": ""}, {"stat": "cpu x y"}):
        _files(tmp_path, texts)
        load = CpuProbe(tmp_path, tmp_path).load()
        assert load is not None
        assert 0.0 <= load <= 1.0


def test_memory_of_a_machine_and_of_a_container(tmp_path: Path) -> None:
    """The load is the share that is not available; with a limited container, the larger share."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    _files(tmp_path, {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 700 kB\n"})
    assert MemoryProbe(proc, cgroup).load() == pytest.approx(0.3)
    _files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "cgroup/memory.max": "1000\n",
            "cgroup/memory.current": "900\n",
            "cgroup/memory.stat": "anon 5\ninactive_file 200\n",
        },
    )
    assert MemoryProbe(proc, cgroup).load() == pytest.approx(0.7)
    _files(tmp_path, {"cgroup/memory.max": "max\n"})
    assert MemoryProbe(proc, cgroup).load() == pytest.approx(0.3)


@pytest.mark.parametrize("meminfo", ["", "MemTotal: x\n", "MemTotal: 5 kB\n"])
def test_memory_without_readable_files(tmp_path: Path, meminfo: str) -> None:
    """The load is unknown, which leaves limits unchanged."""
    assert MemoryProbe(tmp_path, tmp_path).load() is None
    _files(tmp_path, {"meminfo": meminfo})
    assert MemoryProbe(tmp_path, tmp_path).load() is None


# ------------------------------------------------------------------------------- limits that follow

SCALED = """
version: 1
rules:
  - id: api
    by: user
    limits: 10/minute
    scale: {source: pushed, low: 0.5, high: 1.0, least: 0.2, smoothing: 10s}
  - id: plain
    by: tenant
    limits: 100/minute
"""
ME = Request(user="42")


def test_limits_follow_the_pushed_load() -> None:
    """Limits shrink to `least` and grow again. Spent units stay spent."""
    clock = ManualClock()
    limiter = Limiter.from_rules(SCALED, clock=clock)
    assert limiter.check(ME).limit == 10
    assert limiter.factors() == {"api": 1.0}
    limiter.push_load(1.0)
    clock.advance(1_000)
    assert limiter.factors() == {"api": 0.2}
    assert [bool(limiter.check(ME)) for _ in range(3)] == [True, True, False]
    assert limiter.check(ME).limit == 2
    limiter.push_load(0.0)
    clock.advance(0.25)
    assert 0.2 < limiter.factors()["api"] < 0.3
    clock.advance(1_000)
    assert limiter.peek(ME).remaining == 10


def test_the_factor_is_visible_in_explain() -> None:
    """The explanation has the limits in force. Rules that do not scale have a factor of 1.0."""
    limiter = Limiter.from_rules(SCALED, clock=ManualClock())
    limiter.push_load(0.75)
    api, plain = limiter.explain(ME).rules
    assert (api.factor, [limit.limit for limit in api.limits]) == (0.6, [6])
    assert plain.factor == 1.0


def test_factors_survive_a_new_document_with_the_same_scale() -> None:
    """A new document keeps the factor; another scale starts with a new one."""
    clock = ManualClock()
    limiter = Limiter.from_rules(SCALED, clock=clock)
    limiter.push_load(0.0)
    limiter.check(ME)
    limiter.push_load(1.0)
    clock.advance(1)
    before = limiter.factors()
    assert 0.9 < before["api"] < 1.0
    limiter.use(SCALED.replace("100/minute", "99/minute"))
    assert limiter.factors() == before
    limiter.use(SCALED.replace("0.2", "0.3"))
    assert limiter.factors() == {"api": 0.3}
    limiter.use("version: 1\nrules: []")
    assert limiter.factors() == {}


def test_a_cost_that_fits_only_at_a_lower_load_is_denied() -> None:
    """CapacityError means never, and a high load ends."""
    clock = ManualClock()
    limiter = Limiter.from_rules(SCALED, clock=clock)
    limiter.push_load(1.0)
    for decision in (limiter.check(ME, cost=5), limiter.peek(ME, cost=5)):
        assert (decision.allowed, decision.remaining, decision.retry_after) == (False, 2, 1.0)
    assert limiter.counts()["api"].denied == 1
    with pytest.raises(CapacityError):
        limiter.check(ME, cost=11)
    limiter.push_load(0.0)
    clock.advance(1_000)
    assert limiter.check(ME, cost=5)


class FailingGate(MemoryGate):
    """A gate whose store becomes unavailable after a check."""

    def peek(self, subject: str, cost: int) -> Decision:
        raise StoreUnavailable("the store is unavailable")


def test_the_failure_policy_of_the_rule_answers_if_the_store_fails_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failure policy of the rule takes precedence over that of the limiter. No error is
    raised."""
    monkeypatch.setattr(memory, "MemoryGate", FailingGate)
    clock = ManualClock()
    rules = SCALED.partition("  - id: plain")[0].replace("user", "user\n    on_failure: closed")
    limiter = Limiter.from_rules(rules, store=memory.PythonMemoryStore(clock), clock=clock)
    limiter.push_load(1.0)
    for decision in (limiter.check(ME, cost=5), limiter.evaluate(ME, cost=5).decision):
        assert (decision.allowed, decision.degraded) == (False, True)


async def test_loads_and_factors_on_asyncio() -> None:
    """AsyncLimiter accepts loads and reports factors."""
    limiter = AsyncLimiter.from_rules(SCALED, clock=ManualClock())
    limiter.push_load(1.0)
    assert (await limiter.check(ME)).limit == 2
    assert limiter.factors() == {"api": 0.2}
    assert not await limiter.check(ME, cost=5)


def test_a_limiter_without_rules_accepts_no_load() -> None:
    """The error names the constructor to use."""
    with pytest.raises(ConfigError, match="this limiter has limits, not rules"):
        Limiter("5/minute").push_load(0.5)


def test_a_rule_may_scale_by_cpu_or_memory() -> None:
    """Its factor comes from the probe of this machine and is within bounds."""
    for source in ("cpu", "memory"):
        document = SCALED.replace("pushed", source)
        limiter = Limiter.from_rules(document)
        assert limiter.check(ME)
        assert 0.2 <= limiter.factors()["api"] <= 1.0
