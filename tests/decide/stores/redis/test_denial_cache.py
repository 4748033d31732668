"""Remembered denials: found while they are valid, never longer, and not after a drop."""

from __future__ import annotations

import pytest

from ratekeeper import Decision, Limit
from ratekeeper.core.clock import SystemClock
from ratekeeper.decide.stores.redis import denial_cache
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.denial_cache import DENIALS_MAX, DenialCache
from ratekeeper.decide.stores.redis.scripts import SERVER_NOW, RuleScripts, ScriptCharge
from ratekeeper.testing import ManualClock

MS = 1_000_000
LIMIT = Limit(1, per=60)
CONFIG = parse("redis://localhost")


class Checks:
    """Checks of one rule, by a clock that the test sets, and the denials of its store."""

    def __init__(self, longest_ns: int = 1_000 * MS) -> None:
        self.clock = ManualClock(1_700_000_000)
        self.cache = DenialCache(longest_ns)
        self.scripts = self.of(LIMIT)

    def of(self, limit: Limit, rule: str = "rule") -> RuleScripts:
        return RuleScripts((limit,), rule, CONFIG, self.clock)

    def deny(self, subject: str = "a", wait_ms: int = 500, asked_ns: int | None = None) -> None:
        """Keep a denial of a check that was sent now."""
        now = self.scripts.now()
        denial = Decision(
            False, LIMIT, 0, wait_ms * MS, 900 * MS, rule="rule", decided_ns=self.clock.now_ns()
        )
        asked_ns = denial_cache.time.monotonic_ns() if asked_ns is None else asked_ns
        self.cache.keep(ScriptCharge(self.scripts, subject, 1), denial, now, asked_ns)

    def find(self, subject: str = "a", cost: int = 1) -> Decision | None:
        return self.cache.find(self.scripts, subject, cost)


@pytest.mark.parametrize(
    ("after_ms", "found"), [(-1, False), (0, True), (499, True), (500, False), (9_999, False)]
)
def test_a_denial_is_valid_until_its_retry_after(after_ms: int, found: bool) -> None:
    """Not before it was sent, and not at its end, when a check is allowed."""
    checks = Checks()
    checks.deny()
    checks.clock.advance_ns(after_ms * MS)
    assert (checks.find() is not None) is found
    assert checks.cache.hits == int(found)
    assert checks.cache.by_rule == ({"rule": 1} if found else {})


def test_waits_shrink_with_time() -> None:
    """They end at the same instant each time; nothing remains."""
    checks = Checks()
    checks.deny()
    checks.clock.advance_ns(123 * MS)
    found = checks.find()
    assert found is not None
    assert (found.allowed, found.remaining) == (False, 0)
    assert found.retry_after_ns == (500 - 123) * MS
    assert found.reset_after_ns == (900 - 123) * MS
    assert found.decided_ns == checks.clock.now_ns()


def test_a_denial_is_kept_for_a_second_at_most() -> None:
    """Another process may have given units back. With 0, nothing is kept."""
    checks = Checks()
    checks.deny(wait_ms=60_000)
    checks.clock.advance_ns(999 * MS)
    assert checks.find() is not None
    checks.clock.advance_ns(1 * MS)
    assert checks.find() is None
    off = Checks(longest_ns=0)
    off.deny()
    assert off.find() is None


def test_a_denial_that_has_ended_is_forgotten() -> None:
    """A check after its end may have changed the state, even if a test sets its clock back."""
    checks = Checks()
    checks.deny()
    checks.clock.advance_ns(500 * MS)
    assert checks.find(cost=3) is None
    checks.clock.advance_ns(-100 * MS)
    assert checks.find() is None


def test_another_subject_limit_or_cost_is_not_denied() -> None:
    """A denial is about the limits of one rule, one subject and one unit."""
    checks = Checks()
    checks.deny()
    assert checks.find("b") is None
    assert checks.find(cost=2) is None
    for other in (checks.of(Limit(2, per=60)), checks.of(LIMIT, "other rule")):
        assert checks.cache.find(other, "a", 1) is None
    assert checks.cache.find(checks.of(LIMIT), "a", 1) is not None


def test_a_drop_also_ends_denials_that_are_on_their_way() -> None:
    """The check was sent before the subject got units, and its reply comes afterwards."""
    checks = Checks()
    before_ns = denial_cache.time.monotonic_ns()
    checks.deny()
    checks.cache.drop("a")
    assert checks.find() is None
    checks.deny(asked_ns=before_ns)
    assert checks.find() is None
    checks.deny()
    assert checks.find() is not None
    checks.cache.clear()
    assert checks.find() is None


def test_the_oldest_denial_is_evicted() -> None:
    """The number of denials is bounded; one that is denied again is the newest."""
    checks = Checks()
    for number in range(DENIALS_MAX):
        checks.deny(f"user {number}")
    checks.deny("user 0")
    checks.deny("one more")
    assert len(checks.cache.denials) == DENIALS_MAX
    assert checks.find("user 0") is not None
    assert checks.find("user 1") is None
    assert checks.find("one more") is not None


def test_by_the_servers_clock_waits_count_from_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """The denial ends as if the server had decided at once; its waits as if it had just now."""
    monotonic_ns = 1_000 * MS
    monkeypatch.setattr(denial_cache.time, "monotonic_ns", lambda: monotonic_ns)
    cache = DenialCache(1_000 * MS)
    scripts = RuleScripts((LIMIT,), "rule", CONFIG, SystemClock())
    monotonic_ns += 30 * MS  # the reply took so long
    denial = Decision(False, LIMIT, 0, 500 * MS, 900 * MS, rule="rule")
    cache.keep(ScriptCharge(scripts, "a", 1), denial, SERVER_NOW, 1_000 * MS)
    monotonic_ns += 100 * MS + 1
    found = cache.find(scripts, "a", 1)
    assert found is not None
    assert found.retry_after_ns == 400 * MS  # rounded up to a microsecond
    monotonic_ns = 1_500 * MS
    assert cache.find(scripts, "a", 1) is None
