"""The history of the last 15 minutes: its sums, its bounds, and what it survives."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratekeeper.core.histogram import Histogram, quantile
from ratekeeper.metrics.counters import OTHERS, MetricsSnapshot
from ratekeeper.service.http import activity
from ratekeeper.service.http.activity import RULES_MAX, ActivityHistory, Step
from ratekeeper.testing import ManualClock
from tests.redis_servers.ports import free_port
from tests.service.http.client import http_service

# What one rule decided: outcome and source, in the order of a row; the last two are degraded.
KINDS = (
    ("allowed", "store"),
    ("denied", "store"),
    ("shadow_denied", "store"),
    ("allowed", "policy"),
    ("denied", "local"),
)


class Counting:
    """The counters of all workers, two clocks, and workers that keep a history of them."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.wall, self.boot = ManualClock(1_000_000), ManualClock(500)
        self.rules: Counter[tuple[str, str, str]] = Counter()
        self.taken = Histogram()
        self.breaker = 0
        self.starts, self.dropped, self.clock_offset, self.states = 2, 0, 0.1, 0

    def totals(self) -> MetricsSnapshot:
        """Return the present sums."""
        found = MetricsSnapshot()
        for (rule, outcome, source), count in self.rules.items():
            found.put("rule_decisions", count, rule, "token_bucket", "*", outcome, source)
        for outcome in ("allowed", "denied"):
            counts = (n for (_, of, _), n in self.rules.items() if of == outcome)
            found.put("checks", sum(counts), outcome)
        degraded = (n for (_, _, source), n in self.rules.items() if source != "store")
        found.put("degraded_checks", sum(degraded))
        found.put("workers", 2)
        found.put("worker_starts", self.starts)
        found.put("records_dropped", self.dropped)
        found.put("breaker_state", self.breaker, "10.0.0.7:6379")
        found.put("clock_offset_seconds", self.clock_offset, "10.0.0.7:6379")
        found.put("store_states", self.states)
        found.put("store_states_max", 1_000)
        found.put("store_log_bytes_max", 0)
        found.histograms["decision_seconds"] = {"": self.taken.data()}
        return found

    def worker(self) -> ActivityHistory:
        """Return the history of one more worker."""
        found = ActivityHistory(
            self.folder, now_ns=self.wall.now_ns, since_boot_ns=self.boot.now_ns
        )
        found.totals = self.totals
        _WORKERS.append(found)
        return found

    def pass_time(self, seconds: float = 2.0) -> None:
        """Advance both clocks."""
        self.wall.advance(seconds)
        self.boot.advance(seconds)

    def decide(self, rule: str, count: int = 1, outcome: str = "allowed") -> None:
        """Count decisions of a rule that the store made in 60 µs."""
        self.rules[rule, outcome, "store"] += count
        self.taken.note(60_000, count)


def started(folder: Path | None) -> tuple[Counting, ActivityHistory]:
    """Return counters and a worker that has taken the lock."""
    counting = Counting(folder)
    worker = counting.worker()
    worker.advance()
    return counting, worker


def rows(steps: list[Step]) -> dict[str, list[int]]:
    """Return the sums over the steps, by rule."""
    found: dict[str, list[int]] = {}
    for step in steps:
        for rule, row in step.rules.items():
            found[rule] = [a + b for a, b in zip(found.get(rule, [0] * 4), row, strict=True)]
    return found


_WORKERS: list[ActivityHistory] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for worker in _WORKERS:
        worker.close()
    _WORKERS.clear()


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_step_has_the_differences(tmp_path: Path, in_memory: bool) -> None:
    """Of each rule and outcome, of all checks, of the durations; and the state of the breakers."""
    counting, worker = started(None if in_memory else tmp_path)
    counting.decide("users", 7)
    counting.pass_time()
    worker.advance()
    counting.decide("users", 2, "denied")
    counting.decide("trial", 3, "shadow_denied")
    counting.rules["users", "allowed", "policy"] += 4
    counting.rules["users", "failed", "policy"] += 1
    counting.breaker = 2
    counting.pass_time(2.5)
    worker.advance()
    first, second = worker.steps()
    assert (first.at_s, first.seconds, first.checks) == (1_000_002, 2, {"allowed": 7})
    assert first.rules == {"users": (7, 0, 0, 0)}
    assert (first.degraded, first.breakers, first.workers) == (0, {}, 2)
    assert quantile(first.taken, 0.5) == pytest.approx(75e-6)
    assert (second.at_s, second.seconds) == (1_000_004.5, 2.5)
    assert second.checks == {"allowed": 4, "denied": 2}
    assert second.rules == {"users": (4, 2, 0, 5), "trial": (0, 0, 3, 0)}
    assert (second.degraded, second.breakers) == (5, {"10.0.0.7:6379": 2})
    assert sum(second.taken[:-1]) == 5


def test_a_step_has_the_state(tmp_path: Path) -> None:
    """Workers that ended, dropped records, wrong clocks, and how full the store is."""
    counting, worker = started(tmp_path)
    counting.dropped = 4
    counting.pass_time()
    worker.advance()
    counting.starts, counting.dropped, counting.clock_offset, counting.states = 5, 11, -0.7, 850
    counting.pass_time()
    worker.advance()
    first, second = counting.worker().steps()
    assert (first.dropped, first.ended, first.clocks, first.states_share) == (4, 0, {}, 0)
    assert (second.dropped, second.ended) == (7, 3)
    assert second.clocks == {"10.0.0.7:6379": -0.7}
    assert (second.states_share, second.logs_share) == (0.85, 0)


def test_a_step_without_checks_is_short(tmp_path: Path) -> None:
    """An idle service writes some fifty bytes every two seconds."""
    counting, worker = started(tmp_path)
    counting.pass_time()
    worker.advance()
    (step,) = worker.steps()
    assert (step.checks, step.rules, step.taken) == ({}, {}, [])
    assert len((tmp_path / "activity.steps").read_bytes()) < 80


# Counts by rule and kind, the seconds until the next step, and what happens meanwhile.
Tick = tuple[dict[tuple[str, tuple[str, str]], int], float, str]
Ticks = st.lists(
    st.tuples(
        st.dictionaries(
            st.tuples(st.integers(0, 60).map("r{}".format), st.sampled_from(KINDS)),
            st.integers(1, 1_000),
            max_size=40,
        ),
        st.sampled_from([0.5, 2.0, 2.0, 31.0]),
        st.sampled_from(["go on", "go on", "die", "clock", "lines"]),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(Ticks)
def test_the_sums_over_the_steps_are_those_of_the_counters(
    tmp_path_factory: pytest.TempPathFactory, ticks: list[Tick]
) -> None:
    """Whatever is counted, whichever worker ends, and whenever the wall clock is set."""
    folder = tmp_path_factory.mktemp("run")
    counting, worker = started(folder)
    reader = counting.worker()
    expected: Counter[int] = Counter()
    for counts, seconds, event in ticks:
        for (rule, (outcome, source)), count in counts.items():
            counting.rules[rule, outcome, source] += count
            expected[("allowed", "denied", "shadow_denied").index(outcome)] += count
            expected[3] += count * (source != "store")
        counting.pass_time(seconds)
        if event == "die":
            worker.close()
            worker = counting.worker()
        elif event == "clock":
            counting.wall.advance(-3_600)
        worker.advance()
        if event == "lines":
            with (folder / "activity.steps").open("ab") as file:
                file.write(b'\xff{"at_s": 1}\nnull\n{"at_s": 1e99, "seconds": -1}')
        steps = list(reader.steps())
        summed = rows(steps)
        assert [sum(row[place] for row in summed.values()) for place in range(4)] == [
            expected[place] for place in range(4)
        ]
        assert sum(step.degraded for step in steps) == expected[3]
        times = [step.at_s for step in steps]
        assert times == sorted(set(times))
        assert all(len(step.rules) <= RULES_MAX + 1 for step in steps)
    worker.close()


def test_one_worker_counts_and_another_takes_over(tmp_path: Path) -> None:
    """Only the holder of the lock adds steps; the next one continues without a gap."""
    counting, first = started(tmp_path)
    second = counting.worker()
    for _ in range(3):
        counting.decide("users", 5)
        counting.pass_time()
        first.advance()
        second.advance()
    assert [step.rules["users"][0] for step in second.steps()] == [5, 5, 5]
    first.close()
    counting.decide("users", 9)
    counting.pass_time(4)
    second.advance()
    last = second.steps()[-1]
    assert (last.rules, last.seconds) == ({"users": (9, 0, 0, 0)}, 4)


def test_a_worker_that_is_killed_between_sums_and_step_loses_one_step(tmp_path: Path) -> None:
    """And none is counted twice: the sums are written first."""
    counting, worker = started(tmp_path)
    for _ in range(3):
        counting.decide("users", 5)
        counting.pass_time()
        worker.advance()
    lines = (tmp_path / "activity.steps").read_bytes().rstrip(b"\n").rpartition(b"\n")
    (tmp_path / "activity.steps").write_bytes(lines[0] + b"\n" + lines[2][:20])
    worker.close()
    counting.decide("users", 7)
    counting.pass_time()
    counting.worker().advance()
    assert [step.rules["users"][0] for step in counting.worker().steps()] == [5, 5, 7]


def test_sums_that_go_down_count_as_no_change(tmp_path: Path) -> None:
    """A file of counters that cannot be read must not make negative counts."""
    counting, worker = started(tmp_path)
    counting.decide("users", 50)
    counting.pass_time()
    worker.advance()
    counting.rules["users", "allowed", "store"] = 10
    counting.taken = Histogram()
    counting.pass_time()
    worker.advance()
    counting.decide("users", 2)
    counting.pass_time()
    worker.advance()
    assert [step.checks.get("allowed", 0) for step in worker.steps()] == [50, 0, 2]
    assert rows(list(worker.steps()))["users"] == [52, 0, 0, 0]


def test_the_clock_is_set(tmp_path: Path) -> None:
    """Back or forward by an hour: the steps keep their distances and end now."""
    for seconds in (-3_600, 3_600):
        folder = tmp_path / str(seconds)
        folder.mkdir()
        counting, worker = started(folder)
        reader = counting.worker()
        for _ in range(5):
            counting.decide("users")
            counting.pass_time()
            worker.advance()
        before = reader.steps()[-1].at_s
        counting.wall.advance(seconds)
        counting.pass_time()
        worker.advance()
        times = [step.at_s for step in reader.steps()]
        assert times[-1] == before + seconds + 2 == counting.wall.now_ns() / 1e9
        assert [b - a for a, b in pairwise(times)] == [2] * 5


def test_the_file_and_the_history_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rules for a long time: 21 rows a step, so many seconds, twice as many lines."""
    monkeypatch.setattr(activity, "HISTORY_SECONDS", 100.0)
    counting, worker = started(tmp_path)
    reader = counting.worker()
    longest = 0
    for number in range(160):
        for rule in range(30):
            counting.decide(f"rule-{(number * 7 + rule) % 100}")
        counting.decide("busy", 5)
        counting.pass_time()
        worker.advance()
        longest = max(longest, (tmp_path / "activity.steps").read_bytes().count(b"\n{"))
        if number % 10 == 0:
            assert len(reader.steps()) == min(number + 1, 51)
    assert longest <= 103
    steps = reader.steps()
    assert steps[-1].at_s - steps[0].at_s == 100
    assert all(len(step.rules) <= RULES_MAX + 1 for step in steps)
    assert all(step.rules["busy"] == (5, 0, 0, 0) for step in steps)
    assert all(sum(row[0] for row in step.rules.values()) == 35 for step in steps)


def test_a_rule_that_becomes_busy_gets_a_name() -> None:
    """Within seconds, though twenty others were busy before it."""
    counting, worker = started(None)
    for _ in range(50):
        for rule in range(RULES_MAX):
            counting.decide(f"old-{rule}", 10)
        counting.pass_time()
        worker.advance()
    for _ in range(10):
        counting.decide("new", 500)
        counting.pass_time()
        worker.advance()
    assert worker.steps()[-1].rules == {"new": (500, 0, 0, 0)}


def test_rules_that_the_metrics_do_not_name_are_others() -> None:
    """The metrics have a name for a thousand rules; the rest is one row there and here."""
    counting, worker = started(None)
    counting.decide(OTHERS, 100)
    counting.decide("users", 1)
    counting.pass_time()
    worker.advance()
    assert worker.steps()[-1].rules == {"users": (1, 0, 0, 0), OTHERS: (100, 0, 0, 0)}


def test_a_file_of_another_program_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker reads at most the last FILE_BYTES_MAX bytes, and the next step removes the rest."""
    monkeypatch.setattr(activity, "FILE_BYTES_MAX", 2_000)
    counting, worker = started(tmp_path)
    (tmp_path / "activity.steps").write_bytes(b"x" * 50_000 + b"\n")
    counting.decide("users", 3)
    counting.pass_time()
    worker.advance()
    assert [step.checks for step in counting.worker().steps()] == [{"allowed": 3}]
    assert len((tmp_path / "activity.steps").read_bytes()) < 2_000


def test_a_damaged_time_hides_no_later_step(tmp_path: Path) -> None:
    """A line whose time is far in the future is removed by the next step."""
    counting, worker = started(tmp_path)
    for number in range(4):
        counting.decide("users")
        counting.pass_time()
        worker.advance()
        if number == 1:
            with (tmp_path / "activity.steps").open("ab") as file:
                file.write(b'{"at_s": 9e15, "seconds": 2.0}\n')
    reader = counting.worker()
    assert reader.steps() == worker.steps()
    assert [step.checks["allowed"] for step in reader.steps()] == [1] * 4
    assert reader.steps()[-1].at_s == counting.wall.now_ns() / 1e9


def test_a_full_disk_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The worker goes on and tries again at the next step."""
    folder = tmp_path / "gone"
    counting = Counting(folder)
    worker = counting.worker()
    for _ in range(3):
        counting.pass_time()
        worker.advance()
    assert [record.message for record in caplog.records] == [
        "activity: the history cannot be written: No such file or directory"
    ]
    folder.mkdir()
    for _ in range(2):
        counting.pass_time()
        worker.advance()
    assert len(worker.steps()) == 1


def test_a_defect_costs_a_step_and_not_the_history(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once, and the next step follows."""
    counting, worker = started(None)
    for totals in (None, None, counting.totals, counting.totals):
        worker.totals = totals  # type: ignore[assignment]  # None cannot be called
        counting.pass_time()
        worker.advance()
    assert [record.message for record in caplog.records] == [
        "activity: a defect; this step is lost"
    ]
    assert [step.seconds for step in worker.steps()] == [6, 2]


async def test_the_counters_of_a_worker_lead_to_the_state(tmp_path: Path) -> None:
    """The counters of a real limiter, whose store is gone: a breaker opens, checks are degraded."""
    store = f"redis://127.0.0.1:{free_port()}"
    async with http_service(counters=tmp_path, store=store) as http:
        counting = Counting(tmp_path)
        history = counting.worker()
        history.totals = http.app.metrics.recent_total
        history.advance()
        # A breaker opens after failures at several moments of the real time, however many checks
        # that takes. One step of the history counts all of them.
        checks = 0
        async with asyncio.timeout(60):
            while not any(history.totals().values.get("breaker_state", {}).values()):
                checks += 1
                await http.check(user="1")
                http.app.metrics.write()
        counting.pass_time()
        history.advance()
        await http.app.metrics.close()
    (step,) = history.steps()
    assert step.breakers
    assert step.degraded == checks


async def test_a_service_keeps_a_history_from_its_start(tmp_path: Path) -> None:
    """HttpService runs the task, and its first step begins with the first request."""
    async with http_service(counters=tmp_path) as http:
        history = http.context.activity
        await http.app.start()
        await asyncio.sleep(0)
        for _ in range(4):
            await http.check(user="1")
        http.app.metrics.write()
        http.clock.advance(2)
        history.advance()
        (step,) = history.steps()
        assert step.checks == {"allowed": 3, "denied": 1}
        assert step.rules == {"users": (3, 1, 0, 0)}
        await http.app.stop()
    assert json.loads((tmp_path / "activity.sums").read_bytes())["checks"]["allowed"] == 3
