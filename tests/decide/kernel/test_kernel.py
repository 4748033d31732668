"""The kernel's decisions equal those of Python, and it follows the switches for tests."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest

from ratekeeper import CapacityError, ConfigError, Decision, Limit, Limiter, StoreUnavailable
from ratekeeper.core.model import DECISION_FIELDS, decision_fields, decision_with
from ratekeeper.decide import kernel
from ratekeeper.decide.kernel import _kernel
from ratekeeper.testing import ManualClock, limiting_off, use_clock

LIMIT = Limit(1, per=1, capacity=3, algorithm="leaky_bucket", name="n")


@pytest.fixture
def gate() -> _kernel.Counter:
    return _kernel.Counter(_kernel.Table(None, capacity=100), (LIMIT,), "orders")


@pytest.fixture
def decisions(gate: _kernel.Counter) -> list[Decision]:
    """Two allowed decisions, the second with a delay, and a denied one."""
    return [gate.check("k", cost, 0) for cost in (1, 2, 1)]


def test_the_kernel_is_built() -> None:
    """The tests need the kernel; without it most of them would test the Python store."""
    assert kernel.BUILT


SUB_INTERPRETER = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
from ratekeeper import Limiter
assert [bool(Limiter("1/minute").check("a"))] == [True]
# Interpreters that share the GIL, as those of mod_wsgi do.
if sys.version_info >= (3, 13):
    other = interpreters.create("legacy")
elif sys.version_info >= (3, 12):
    other = interpreters.create(isolated=False)
else:
    other = interpreters.create()
interpreters.run_string(other, '''
from ratekeeper import CapacityError, Limiter, StoreUnavailable
limiter = Limiter("2/minute")
print([bool(limiter.check("a")) for _ in range(3)])
for store, cost in (("memory://", 5), ("shared:///nowhere/api.limits", 1)):
    try:
        Limiter("2/minute", store=store).check("a", cost)
    except (CapacityError, StoreUnavailable) as error:
        print(type(error).__name__, error)
''')
interpreters.destroy(other)
"""


def test_a_sub_interpreter_decides_in_python() -> None:
    """Its exceptions are its own. `shared://` and the log name the setting of mod_wsgi."""
    done = subprocess.run(
        [sys.executable, "-c", SUB_INTERPRETER],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, capacity, shared = done.stdout.splitlines()
    assert first == "[True, True, False]"
    assert capacity.startswith("CapacityError a cost of 5")
    assert shared.startswith("StoreUnavailable")
    for text in (shared, done.stderr):
        assert "does not run in a sub-interpreter" in text
        assert "WSGIApplicationGroup %{GLOBAL}" in text


def test_a_kernels_decision_has_every_field(decisions: list[Decision]) -> None:
    """Each field, and each property in seconds, equals the reference."""
    assert [decision_fields(decision) for decision in decisions] == [
        (True, LIMIT, 2, 0, 10**9, 0, "orders", False, 0, 0, 0, None),
        (True, LIMIT, 0, 0, 3 * 10**9, 10**9, "orders", False, 0, 0, 0, None),
        (False, LIMIT, 0, 10**9, 3 * 10**9, 0, "orders", False, None, 0, 0, None),
    ]
    assert [decision.delay for decision in decisions] == [0.0, 1.0, 0.0]
    assert [decision.retry_after for decision in decisions] == [0.0, 0.0, 1.0]
    assert [decision.reset_after for decision in decisions] == [1.0, 3.0, 3.0]
    assert [decision.limit for decision in decisions] == [3, 3, 3]
    assert [bool(decision) for decision in decisions] == [True, True, False]


def test_decisions_of_both_engines_are_equal(decisions: list[Decision]) -> None:
    """A Python decision with the same fields is equal, with the same hash and repr."""
    for decision in decisions:
        assert isinstance(decision, Decision)
        python = Decision(*decision_fields(decision))
        assert decision == python
        assert python == decision
        assert hash(decision) == hash(python)
        assert repr(decision) == repr(python)
        other = decision_with(decision, remaining=99)
        assert decision != other
        assert other != decision
        assert decision != "a decision"


def test_a_kernels_decision_can_be_copied_and_sent(decisions: list[Decision]) -> None:
    """Pickled in a worker, it is an equal decision in its parent."""
    for decision in decisions:
        assert pickle.loads(pickle.dumps(decision)) == decision
        assert copy.deepcopy(decision) == decision


@pytest.mark.parametrize("field", [*DECISION_FIELDS, "limit", "retry_after", "new"])
def test_a_kernels_decision_is_read_only(decisions: list[Decision], field: str) -> None:
    """No field can be set or added."""
    with pytest.raises(AttributeError):
        setattr(decisions[0], field, 1)


def _in_a_loop(limiter: Limiter) -> None:
    for _ in range(20):
        limiter.check("k")


def _after_a_refund(limiter: Limiter) -> None:
    limiter.check("k")
    limiter.refund("k")


@pytest.mark.parametrize("before", [_in_a_loop, _after_a_refund])
def test_the_fast_path_follows_limiting_off(before: Callable[[Limiter], None]) -> None:
    """A limiter on real time runs in C alone, except while a test turns limiting off."""
    limiter = Limiter("3/minute")
    before(limiter)
    left = limiter.peek("k").remaining
    with limiting_off():
        assert all(limiter.check("k") for _ in range(10))
    assert limiter.peek("k").remaining == left


def test_the_fast_path_follows_a_replaced_clock() -> None:
    """Inside `use_clock` the manual clock counts, although the kernel reads time itself."""
    limiter = Limiter("1/minute")
    with use_clock(ManualClock(start=2_000_000_000)) as clock:
        assert [limiter.check("k").allowed for _ in range(2)] == [True, False]
        clock.advance(60)
        assert limiter.check("k")


def test_the_fast_path_takes_the_arguments_of_check() -> None:
    """Positions, names and defaults are those of Limiter.check."""
    limiter = Limiter("9/minute")
    limiter.check("k")
    limiter.check("k", 2)
    limiter.check("k", cost=1)
    limiter.check(key="k", cost=1)
    assert limiter.peek("k").remaining == 4
    for arguments in ((), ("k", 1, 1)):
        with pytest.raises(TypeError):
            limiter.check(*arguments)
    with pytest.raises(TypeError):
        limiter.check("k", price=1)  # type: ignore[call-arg]  # that it fails is the test


def test_a_subclass_keeps_its_own_check() -> None:
    """A subclass may override `check`; the fast path does not bypass it."""

    class Free(Limiter):
        def check(self, key: object, cost: int = 1) -> Decision:
            return super().check("everyone", 0)

    limiter = Free("1/minute")
    assert all(limiter.check("k") for _ in range(5))


class Closes:
    """A number that closes the table when it is read."""

    def __init__(self, table: _kernel.Table) -> None:
        self._table = table

    def __index__(self) -> int:
        self._table.close()
        return 1


def test_a_number_that_closes_the_table_is_an_error_and_not_a_crash() -> None:
    """Reading an argument may run any code, so the table is checked afterwards."""
    for verb in ("check", "peek", "refund", "grant"):
        table = _kernel.Table(None, capacity=100)
        gate = _kernel.Counter(table, (LIMIT,), "")
        arguments = (None, 0) if verb in ("refund", "grant") else (0,)
        with pytest.raises(StoreUnavailable, match="closed"):
            getattr(gate, verb)("k", Closes(table), *arguments)


def test_a_cost_above_64_bits_never_fits() -> None:
    """Not even with the largest capacity and the largest grant."""
    largest = Limit(10**9, per=1)
    gate = _kernel.Counter(_kernel.Table(None, capacity=100), (largest,), "")
    gate.grant("k", 10**9, None, 0)
    for cost in (2 * 10**9 + 1, 10**30):
        with pytest.raises(CapacityError):
            gate.check("k", cost, 0)
    assert gate.check("k", 2 * 10**9, 0).allowed


def test_a_patched_check_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Limiters that are created after `Limiter.check` was patched use the patch."""
    monkeypatch.setattr(Limiter, "check", lambda self, key, cost=1: "patched")
    assert Limiter("5/m").check("k") == "patched"


def test_up_to_ten_thousand_charges_are_one_call() -> None:
    """More are an error that says so; anything but gates of the table is one, too."""
    table = _kernel.Table(None, capacity=100_000)
    gate = _kernel.Counter(table, (Limit(10, per=1),), "r")
    checks = [(gate, f"key-{number % 5_000}", 3) for number in range(10_000)]
    assert {answer.remaining for answer in table.check_all(checks, (), 0)} == {7, 4}
    denied = table.check_all(checks, (), 0)
    assert [bool(answer) for answer in denied] == [True] * 5_000 + [False] * 5_000
    assert {answer.remaining for answer in denied} == {4, 1}
    with pytest.raises(ConfigError, match="10001 checks in one call are more than 10000"):
        table.check_all([*checks, checks[0]], (), 0)
    other = _kernel.Counter(_kernel.Table(None, capacity=100), (LIMIT,), "r")
    for wrong in ((other, "k", 1), (None, "k", 1), (gate, 1, 1), (gate, "k"), [gate, "k", 1]):
        with pytest.raises(TypeError, match="a counter of this table, a subject and a cost"):
            table.check_all([wrong], (), 0)  # type: ignore[list-item]  # the point


def test_the_positions_of_a_call_are_read_only_after_a_failure() -> None:
    """What they do meanwhile is no matter: they may close the table."""

    class Closing:
        def __contains__(self, at: object) -> bool:
            table.close()
            return True

    log = Limit(10, per=1, algorithm="sliding_window_log")
    table = _kernel.Table(None, capacity=100, log_bytes=256)
    gate = _kernel.Counter(table, (log,), "r")
    assert all(table.check_all([(gate, "a", 1), (gate, "b", 1)], Closing(), 0))
    full = [(gate, f"key-{number}", 1) for number in range(9)]
    assert [type(answer) for answer in table.check_all(full, Closing(), 0)] == [
        StoreUnavailable
    ] * 9


def test_a_clock_that_refers_to_its_limiter_is_collected() -> None:
    """The table refers to the clock, so it takes part in garbage collection."""

    class Clock(ManualClock):
        limiter: Limiter

    clock = Clock()
    clock.limiter = Limiter("1/minute", clock=clock)
    assert clock.limiter.check("k")
    gone = weakref.ref(clock)
    del clock
    gc.collect()
    assert gone() is None
