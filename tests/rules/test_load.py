"""The load of the machine, and the factor that scales limits by it."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper import (
    AsyncLimiter,
    CapacityError,
    ConfigError,
    Decision,
    Limiter,
    Request,
    StoreUnavailable,
)
from ratekeeper.decide.stores import memory
from ratekeeper.decide.stores.memory import MemoryCounter
from ratekeeper.rules.compiled import FACTOR_STEPS, factor_step
from ratekeeper.rules.document.model import FACTOR_MAX, LOAD_MAX, Scale
from ratekeeper.rules.load import (
    SAMPLE_NS,
    CpuProbe,
    Factor,
    LoadReading,
    Loads,
    MemoryProbe,
    SourceFactor,
    factor_at,
)
from ratekeeper.testing import ManualClock

SECOND = 1_000_000_000


class Load:
    """A source that returns a fixed load, read now, and counts its calls."""

    def __init__(self, load: float | None = 0.0, clock: ManualClock | None = None) -> None:
        self.load = load
        self.reads = 0
        self._clock = clock or ManualClock()

    def probe(self) -> float | None:
        self.reads += 1
        return self.load

    def __call__(self, source: str) -> LoadReading | None:
        load = self.probe()
        return None if load is None else LoadReading(load, self._clock.now_ns())


# ------------------------------------------------------------------------------------- the factor


@pytest.mark.parametrize(
    ("load", "factor"),
    [
        *((-1.0, 1.5), (0.0, 1.5), (0.1, 1.5), (0.2, 1.375), (0.3, 1.25), (0.5, 1.0)),
        *((0.6, 0.84), (0.75, 0.6), (0.9, 0.36), (1.0, 0.2), (7.0, 0.2)),
    ],
)
def test_from_load_to_factor(load: float, factor: float) -> None:
    """The factor is `most` up to `idle`, 1 at `low`, `least` from `high`, linear in between."""
    scale = Scale(low=0.5, high=1.0, least=0.2, smoothing_s=0, most=1.5, idle=0.1)
    assert factor_at(scale, load) == pytest.approx(factor)
    assert Factor((scale,), Load(load), lambda: 0)() == pytest.approx(factor)
    # Without `most`, limits never rise.
    assert factor_at(replace(scale, most=1.0), load) == pytest.approx(min(factor, 1.0))


def test_the_idle_load_is_half_of_low_by_default() -> None:
    """A system at half of `low` has its highest limits."""
    scale = Scale("queue_depth", low=100, high=5000, most=1.5)
    assert [factor_at(scale, load) for load in (0, 50, 75, 100)] == [1.5, 1.5, 1.25, 1.0]


def test_the_first_reading_takes_effect_at_once() -> None:
    """A process that starts on a busy machine starts with reduced limits."""
    assert Factor((Scale(least=0.2),), Load(1.0), ManualClock().now_ns)() == 0.2


def test_an_unknown_load_changes_nothing() -> None:
    """Before the first reading, and after a source fails, the factor stays."""
    clock = ManualClock()
    load = Load(None, clock)
    factor = Factor((Scale(least=0.2, smoothing_s=0),), load, clock.now_ns)
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
        clock = ManualClock()
        load = Load(0.0, clock)
        factor = Factor((Scale(least=0.2, smoothing_s=10),), load, clock.now_ns)
        assert factor() == 1.0
        load.load = 1.0
        for _ in range(round(10 / step_s)):
            clock.advance(step_s)
            factor()
        assert factor() == pytest.approx(0.2 + 0.8 / math.e)


def test_the_source_is_read_at_most_every_sample_interval() -> None:
    """Any number of checks in any number of threads share one reading."""
    clock = ManualClock()
    load = Load(0.9, clock)
    factor = Factor((Scale(),), load, clock.now_ns)
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

    def slow(_: str) -> LoadReading:
        load = next(loads)
        if load == 1.0:
            reading.set()
            assert go_on.wait(10)
        return LoadReading(load, clock.now_ns())

    factor = Factor((Scale(least=0.2, smoothing_s=0),), slow, clock.now_ns)
    assert factor() == 1.0
    clock.advance(1)
    thread = threading.Thread(target=factor)
    thread.start()
    assert reading.wait(10)
    assert factor() == 1.0
    go_on.set()
    thread.join(10)
    assert factor() == 0.2


# Scales as the grammar accepts them, and loads that are far outside of their range too.
scales = st.builds(
    lambda idle, low, high, least, most, smoothing_s: Scale(
        "q", idle + low, idle + low + high, least, smoothing_s, most, idle
    ),
    *(st.floats(0, 500), st.floats(0.1, 500), st.floats(0.1, 5_000)),
    *(st.floats(0.01, 1), st.floats(1, FACTOR_MAX), st.floats(0, 60)),
)
loads = st.floats(-1e3, 1e4) | st.floats(0, LOAD_MAX)


@given(scales, loads, loads)
def test_the_factor_falls_as_the_load_rises(scale: Scale, load: float, other: float) -> None:
    """It never rises with the load, and is from `least` to `most`."""
    low, high = sorted((load, other))
    assert factor_at(scale, low) >= factor_at(scale, high) - 1e-9
    assert scale.least * 0.999_999 <= factor_at(scale, load) <= scale.most * 1.000_001


@given(st.lists(scales, min_size=1, max_size=3), st.lists(st.tuples(loads, st.floats(0, 100))))
def test_the_factor_stays_within_its_bounds(
    followed: list[Scale], readings: list[tuple[float, float]]
) -> None:
    """For any readings, for several loads, and for a clock that steps back."""
    clock = ManualClock()
    load = Load(0.0, clock)
    factor = Factor(tuple(followed), load, clock.now_ns)
    least = min(scale.least for scale in followed)
    most = min(scale.most for scale in followed)
    for reading, seconds in readings:
        load.load = reading
        clock.advance(seconds - 10)
        assert least * 0.999_999 <= factor() <= most * 1.000_001
        assert 1 <= factor_step(factor()) <= 100 * FACTOR_MAX


@given(scales, st.floats(0, 1e4), st.floats(0, 100), st.none() | st.floats(1, 100))
def test_a_stale_load_returns_the_base_limits(
    scale: Scale, load: float, age_s: float, valid_s: float | None
) -> None:
    """At the first sample without smoothing, and otherwise after five times the smoothing time."""
    clock = ManualClock()
    reading = LoadReading(load, clock.now_ns(), valid_s)
    factor = Factor((scale,), lambda _: reading, clock.now_ns)
    assert factor() == pytest.approx(factor_at(scale, load))
    clock.advance(age_s)
    last_s = scale.stale_after_s if valid_s is None else valid_s
    if age_s < last_s:
        assert factor() == pytest.approx(factor_at(scale, load))
        clock.advance(last_s - age_s)
    clock.advance_ns(SAMPLE_NS)
    factor()
    clock.advance(5 * scale.smoothing_s + 0.25)
    assert factor_step(factor()) == FACTOR_STEPS


def test_the_load_that_reduces_most_decides() -> None:
    """Limits rise only if every load that the rule follows permits it."""
    clock = ManualClock()
    sources = Loads(clock.now_ns, {"cpu": Load(0.8).probe})
    sources.follow(["cpu", "jobs"])
    scales = (
        Scale("cpu", 0.5, 1.0, 0.2, smoothing_s=0, most=1.2),
        Scale("jobs", 100, 200, 0.5, smoothing_s=0, most=1.5),
    )
    factor = Factor(scales, sources.reading, clock.now_ns)
    assert factor() == pytest.approx(0.52)  # no job is known yet
    found = []
    for jobs, cpu in ((200, 0.8), (200, 0.0), (0, 0.0), (0, 0.8)):
        sources.push(jobs, "jobs")
        sources._probes["cpu"] = Load(cpu).probe
        clock.advance(1)
        found.append(round(factor(), 3))
    assert found == [0.5, 0.5, 1.2, 0.52]
    clock.advance(31)
    assert factor.by_source() == [
        SourceFactor("cpu", pytest.approx(0.52), False),
        SourceFactor("jobs", 1.0, True),
    ]


# ------------------------------------------------------------------------------------ the sources


def test_rules_with_one_source_share_a_reading() -> None:
    """The CPU load is an average since the last reading; two readers would halve the interval."""
    clock, cpu = ManualClock(), Load(0.8)
    sources = Loads(clock.now_ns, {"cpu": cpu.probe})
    read = [sources.reading("cpu") for _ in range(5)]
    assert read == [LoadReading(0.8, clock.now_ns())] * 5
    assert cpu.reads == 1
    clock.advance_ns(SAMPLE_NS)
    sources.reading("cpu")
    assert cpu.reads == 2


def test_a_reading_stays_until_the_next_one() -> None:
    """While a probe returns None, the previous reading applies, and it becomes older."""
    clock, cpu = ManualClock(), Load(None)
    sources = Loads(clock.now_ns, {"cpu": cpu.probe})
    found = []
    for load in (None, 0.8, None, 0.3):
        cpu.load = load
        reading = sources.reading("cpu")
        found.append(reading and (reading.load, clock.now_ns() - reading.at_ns))
        clock.advance_ns(SAMPLE_NS)
    assert found == [None, (0.8, 0), (0.8, SAMPLE_NS), (0.3, 0)]


def test_the_pushed_number_is_the_load() -> None:
    """The load is unknown before the first push; then it is the last pushed number."""
    clock = ManualClock()
    sources = Loads(clock.now_ns, {})
    sources.follow(["pushed", "jobs"])
    assert sources.reading("pushed") is None
    assert sources.all() == {"pushed": (None, None), "jobs": (None, None)}
    sources.push(0.8)
    sources.push(1)
    sources.push(340, "jobs", valid_for=120, age_s=1.5)
    pushed, jobs = sources.reading("pushed"), sources.reading("jobs")
    assert pushed == LoadReading(1.0, clock.now_ns())
    assert jobs == LoadReading(340.0, clock.now_ns() - 3 * SECOND // 2, 120.0)
    clock.advance(1)
    assert sources.all() == {"pushed": (pushed, 1.0), "jobs": (jobs, 2.5)}


def test_loads_that_no_rule_follows_are_dropped() -> None:
    """The number of loads is bounded by the document."""
    sources = Loads(ManualClock().now_ns, {})
    sources.follow(["jobs", "disk"])
    sources.push(1, "jobs")
    sources.push(1, "disk")
    sources.push(1)
    sources.follow(["disk"])
    assert sorted(sources._readings) == ["disk", "pushed"]


@pytest.mark.parametrize(
    "load", [-0.1, 1.1, 1e308, math.nan, math.inf, 10**400, "0.5", None, True], ids=repr
)
def test_an_invalid_load_is_rejected(load: Any) -> None:
    """The error names the range of the source. The previous load stays."""
    sources = Loads(ManualClock().now_ns, {})
    sources.follow(["jobs"])
    sources.push(0.5)
    with pytest.raises(ConfigError, match=r"of pushed is not a number from 0 to 1; "):
        sources.push(load)
    reading = sources.reading("pushed")
    assert reading is not None
    assert reading.load == 0.5
    if load != 1.1:
        with pytest.raises(
            ConfigError, match=r"of jobs is not a number from 0 to 1e\+15; for exam"
        ):
            sources.push(load, "jobs")


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, 86_401, "30", True], ids=repr)
def test_an_invalid_validity_is_rejected(seconds: Any) -> None:
    """A push is valid for a second to a day."""
    sources = Loads(ManualClock().now_ns, {})
    with pytest.raises(ConfigError, match="is not a number of seconds from 1 to 86400; for exa"):
        sources.push(0.5, valid_for=seconds)


@pytest.mark.parametrize("name", ["job", "", "x" * 10_000, None, ["jobs"], 7], ids=str)
def test_an_unknown_source_is_rejected(name: Any) -> None:
    """The error names the sources that can be pushed."""
    sources = Loads(ManualClock().now_ns)
    sources.follow(["cpu", "jobs"])
    with pytest.raises(ConfigError, match=r"no rule follows the load .*; the rules fo") as e:
        sources.push(0.5, name)
    assert len(str(e.value)) < 400
    with pytest.raises(ConfigError, match="cpu is measured by each process and cannot be pushed"):
        sources.push(0.5, "cpu")


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
    monkeypatch.setattr("ratekeeper.rules.load.time.monotonic_ns", lambda: now_ns[0])
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
    scale: {source: pushed, low: 0.5, high: 1.0, least: 0.2, smoothing: 10s, stale_after: 1d}
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


QUEUED = """
version: 1
rules:
  - id: api
    by: user
    limits: 10/minute
    scale: {source: queue_depth, low: 100, high: 500, least: 0.2, most: 1.5, smoothing: 0}
"""


def test_limits_rise_while_the_system_is_idle() -> None:
    """Up to `most`, and back to the base limit when the push is stale. Spent units stay spent."""
    clock = ManualClock()
    limiter = Limiter.from_rules(QUEUED, clock=clock)
    limiter.push_load(0, "queue_depth")
    assert [bool(limiter.check(ME)) for _ in range(16)] == [True] * 15 + [False]
    assert limiter.check(ME).limit == 15
    clock.advance(30)
    assert limiter.factors() == {"api": 1.5}
    clock.advance(0.25)
    assert limiter.factors() == {"api": 1.0}
    limiter.push_load(500, "queue_depth", valid_for=3_600)
    clock.advance(3_600)
    assert limiter.factors() == {"api": 0.2}
    clock.advance(0.25)
    assert limiter.factors() == {"api": 1.0}


def test_a_cost_that_fits_only_while_the_system_is_idle_is_denied() -> None:
    """CapacityError means that the cost does not fit the highest limits either."""
    clock = ManualClock()
    limiter = Limiter.from_rules(QUEUED, clock=clock)
    decision = limiter.check(ME, cost=12)
    assert (decision.allowed, decision.limit, decision.retry_after) == (False, 10, 1.0)
    with pytest.raises(CapacityError):
        limiter.check(ME, cost=16)
    limiter.push_load(50, "queue_depth")
    clock.advance(0.25)
    assert limiter.check(ME, cost=12)


class FailingCounter(MemoryCounter):
    """A counter whose store becomes unavailable after a check."""

    def peek(self, subject: str, cost: int) -> Decision:
        raise StoreUnavailable("the store is unavailable")


def test_the_failure_policy_of_the_rule_answers_if_the_store_fails_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failure policy of the rule takes precedence over that of the limiter. No error is
    raised."""
    monkeypatch.setattr(memory, "MemoryCounter", FailingCounter)
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
    queued = AsyncLimiter.from_rules(QUEUED, clock=ManualClock())
    queued.push_load(50, "queue_depth", valid_for=60)
    assert (await queued.check(ME)).limit == 15
    with pytest.raises(ConfigError, match="no rule follows the load 'jobs'"):
        queued.push_load(50, "jobs")


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
