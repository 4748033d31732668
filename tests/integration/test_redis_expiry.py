"""Every key in Redis has a time to live at all times: long enough, and not much longer.

The tests measure by the server's clock, because Redis drops keys by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from random import Random
from time import time_ns

import pytest

from ratekeeper import Limit
from ratekeeper.core.model import UNIT_ALGORITHMS, AlgorithmName
from ratekeeper.decide.store import LocalCounter, LocalStore
from ratekeeper.decide.stores import open_store
from tests.answering import AnsweringStore
from tests.conformance.stores import PATIENCE
from tests.integration.redis_wires import key_of, log_key_of
from tests.parity.server_times import timed
from tests.redis_servers import Single, until

every_algorithm = pytest.mark.parametrize("algorithm", UNIT_ALGORITHMS)

YEAR = 366 * 86_400
MS_PER_S = 1_000
NS_PER_MS = 1_000_000
US_PER_MS = 1_000
# The script sets an expiry this much later than necessary, so that it need not move a busy key's
# expiry at each check.
SPARE = 1 / 8
SHORTEST_MS = 1_000
# The states of a bucket end with a second. Milliseconds are rounded up.
ROUNDING_MS = 1_000 + 2
GONE_SECONDS_MAX = 20.0

_numbers = count()


@pytest.fixture(scope="module")
def server() -> Iterator[Single]:
    """Start a server whose keys all belong to these tests."""
    with Single() as started:
        yield started


@pytest.fixture
def store(server: Single) -> Iterator[LocalStore]:
    """Open a store without keys that decides by the server's clock."""
    server.flush()
    opened = AnsweringStore(open_store(server.uri, **PATIENCE))
    yield opened
    opened.close()


def expiries_ms(server: Single) -> dict[str, int]:
    """Return when each key expires, in milliseconds since the epoch; -1 if never."""
    keys = list(server.admin.scan_iter())
    pipeline = server.admin.pipeline(transaction=False)
    for key in keys:
        pipeline.execute_command("PEXPIRETIME", key)
    expiries = zip(keys, pipeline.execute(), strict=True)
    return {key: at_ms for key, at_ms in expiries if at_ms != -2}  # -2: gone since the scan


def lives_ms(server: Single, counter: LocalCounter, cost: int) -> tuple[float, float]:
    """Check a fresh key; return the time until its quota is whole and its time to live."""
    times = timed(counter)

    def measured() -> tuple[float, float] | None:
        subject = f"fresh {next(_numbers)}"
        reset_ms = counter.check(subject, cost).reset_after_ns / NS_PER_MS
        at_ms = expiry_ms(server, subject)
        return (reset_ms, at_ms - times.now_ns / NS_PER_MS) if at_ms else None

    # A busy machine may delay this process until a short-lived key is gone: try again then.
    return until(measured, "a key that lives until it is measured", GONE_SECONDS_MAX)


def expiry_ms(server: Single, subject: str) -> int:
    """Return when the subject's key expires, or 0 if it is gone."""
    own = key_of(subject)
    return max(
        (at_ms for key, at_ms in expiries_ms(server).items() if key.startswith(own)), default=0
    )


@every_algorithm
@pytest.mark.parametrize("per", [0.001, 0.05, 0.7, 1, 3, 60, 86_400, YEAR])
@pytest.mark.parametrize("cost", [1, 7, 10])
def test_a_key_lives_until_its_quota_is_whole_and_an_eighth_longer(
    algorithm: AlgorithmName, per: float, cost: int, server: Single, store: LocalStore
) -> None:
    """The time to live is never shorter and, beyond a second, at most an eighth longer."""
    counter = store.counter([Limit(10, per, algorithm=algorithm)], "")
    reset_ms, lives = lives_ms(server, counter, cost)
    assert lives >= reset_ms
    assert lives <= max((reset_ms + ROUNDING_MS) * (1 + SPARE), SHORTEST_MS) + ROUNDING_MS


def test_a_bucket_that_takes_a_century_lives_as_long(server: Single, store: LocalStore) -> None:
    """A key lives through the longest refill that a limit may have."""
    counter = store.counter([Limit(1, YEAR, capacity=100)], "")
    reset_ms, lives = lives_ms(server, counter, 100)
    assert reset_ms == pytest.approx(100 * YEAR * MS_PER_S)
    assert reset_ms <= lives <= reset_ms * (1 + SPARE) + ROUNDING_MS


@every_algorithm
def test_the_longest_of_several_limits_decides(
    algorithm: AlgorithmName, server: Single, store: LocalStore
) -> None:
    """The hash lives until the slowest of its limits is whole."""
    short, long = Limit(10, 5, algorithm=algorithm), Limit(100, 500, algorithm=algorithm)
    slowest = store.counter([long], "both")
    times = timed(slowest)
    for subject, limits in (("k", [short, long]), ("l", [long, short])):
        store.counter(limits, "both").check(subject, 10)
        reset_ns = slowest.peek(subject, 0).reset_after_ns
        assert expiry_ms(server, subject) * NS_PER_MS >= times.now_ns + reset_ns


@every_algorithm
def test_a_grant_lives_until_its_end(
    algorithm: AlgorithmName, server: Single, store: LocalStore
) -> None:
    """A grant's key lives for its ttl or for one window, even if no unit was spent."""
    counter = store.counter([Limit(10, 60, algorithm=algorithm)], "")
    for ttl_ms, expected_ms in ((30_000, 30_000), (None, 60_000), (600_000, 600_000)):
        subject = f"granted {ttl_ms}"
        before_ms = server_ms(server)
        counter.grant(subject, 5, ttl_ms * NS_PER_MS if ttl_ms else None)
        after_ms = server_ms(server)
        at_ms = expiry_ms(server, subject)
        assert at_ms >= before_ms + expected_ms
        assert at_ms <= after_ms + (expected_ms + ROUNDING_MS) * (1 + SPARE) + ROUNDING_MS


def server_ms(server: Single) -> float:
    """Return the server's time in milliseconds."""
    seconds, micros = server.admin.time()
    return float(seconds * MS_PER_S + micros / US_PER_MS)


WINDOWS = (0.002, 0.05, 0.5, 2, 3_600, YEAR)


def random_counter(random: Random, store: LocalStore, algorithm: AlgorithmName) -> LocalCounter:
    """Return a counter of one or two limits with random numbers, under one of two rules."""
    limits = [
        Limit(random.choice((3, 20)), random.choice(WINDOWS), algorithm=algorithm, name=name)
        for name in ("n", "m")[: random.choice((1, 2))]
    ]
    return store.counter(limits, random.choice(("one", "other")))


@every_algorithm
@pytest.mark.parametrize("seed", range(3))
def test_a_key_has_an_expiry_at_all_times(
    algorithm: AlgorithmName, seed: int, server: Single, store: LocalStore
) -> None:
    """After every verb, under changing limits, each key has an expiry.

    The expiry covers the last answer's reset time and never moves to an earlier time.
    """
    random = Random(seed)
    before: dict[str, int] = {}
    for _ in range(400):
        counter = random_counter(random, store, algorithm)
        times = timed(counter)
        subject = random.choice(("a", "b", "c"))
        cost = random.randint(1, 3)
        verbs = ("check", "peek", "refund", "owe", "grant", "reset")
        verb = random.choices(verbs, (6, 1, 3, 1, 1, 1))[0]
        needed_ns = 0
        if verb == "check":
            decision = counter.check(subject, cost)
            needed_ns = times.now_ns + decision.reset_after_ns if decision else 0
        elif verb == "owe":
            counter.owe(subject, 20 * cost)
            needed_ns = times.now_ns + counter.peek(subject, 0).reset_after_ns
        elif verb == "grant":
            counter.grant(subject, cost, random.choice((None, 10**6, 10**9)))
        elif verb == "reset":
            counter.reset(subject)
        elif verb == "refund":
            counter.refund(subject, cost, random.choice((None, times.now_ns)))
        else:
            counter.peek(subject, cost)
        expiries = expiries_ms(server)
        assert -1 not in expiries.values(), (verb, counter.limits)
        for key, at_ms in expiries.items():
            # Only a refund or a reset deletes a key; its next expiry may then be earlier.
            if verb not in ("refund", "reset"):
                assert at_ms >= before.get(key, 0), (verb, counter.limits)
        own = [at_ms for key, at_ms in expiries.items() if key.startswith(key_of(subject))]
        assert max(own, default=needed_ns) * NS_PER_MS >= needed_ns, (verb, counter.limits)
        before = expiries


@pytest.mark.parametrize("seed", range(3))
def test_a_log_and_the_other_limits_of_its_rule_expire_apart(
    seed: int, server: Single, store: LocalStore
) -> None:
    """After every verb, by one of them or both, each hash lives as long as its own limit needs."""
    random = Random(seed)
    log_s, other_s = random.sample((3_600, 86_400), 2)
    log = Limit(20, log_s, algorithm="sliding_window_log")
    other = Limit(20, other_s, algorithm="sliding_window_counter")
    log_key = log_key_of("k", log)
    alone = {log_key: store.counter([log], ""), key_of("k"): store.counter([other], "")}
    both = [store.counter(limits, "") for limits in ([log, other], [other, log])]
    times = {key: timed(counter) for key, counter in alone.items()}
    assert both[0].check("k", 1)
    lives_ms = {key: at_ms - server_ms(server) for key, at_ms in expiries_ms(server).items()}
    assert lives_ms[log_key] <= log_s * MS_PER_S * (1 + SPARE) + ROUNDING_MS
    assert lives_ms[key_of("k")] <= 2 * other_s * MS_PER_S * (1 + SPARE) + MS_PER_S + ROUNDING_MS
    for _ in range(200):
        counter = random.choice([*both, *alone.values()])
        verb = random.choices(("check", "refund", "owe", "grant", "reset"), (6, 3, 1, 1, 1))[0]
        if verb == "check":
            counter.check("k", random.randint(1, 3))
        elif verb == "owe":
            counter.owe("k", random.randint(1, 50))
        elif verb == "refund":
            counter.refund("k", random.randint(1, 3), random.choice((None, time_ns())))
        elif verb == "grant":
            counter.grant("k", 1, random.choice((None, 10**9, 10**14)))
        else:
            counter.reset("k")
        expiries = expiries_ms(server)
        for key, each in alone.items():
            assert expiries.get(key) != -1, verb
            if reset_ns := each.peek("k", 0).reset_after_ns:
                assert expiries[key] * NS_PER_MS >= times[key].now_ns + reset_ns, verb


def test_a_busy_key_is_extended_in_time(server: Single, store: LocalStore) -> None:
    """A key checked without pause for two and a half windows never expires before it is whole."""
    counters = {
        algorithm: store.counter([Limit(100, 1, algorithm=algorithm)], "")
        for algorithm in UNIT_ALGORITHMS
    }
    times = {algorithm: timed(counter) for algorithm, counter in counters.items()}
    names = {key_of(algorithm): algorithm for algorithm in counters}
    logged = "sliding_window_log"
    names[log_key_of(logged, *counters[logged].limits)] = logged
    ends_ms = server_ms(server) + 2_500

    def spent_for_long() -> bool:
        needed_ns = {}
        for algorithm, counter in counters.items():
            reset_ns = counter.check(algorithm, 1).reset_after_ns
            needed_ns[algorithm] = times[algorithm].now_ns + reset_ns
        for key, at_ms in expiries_ms(server).items():
            assert at_ms * NS_PER_MS >= needed_ns[names[key]], key
        return server_ms(server) > ends_ms

    until(spent_for_long, "time has passed", GONE_SECONDS_MAX)


@every_algorithm
def test_a_short_limit_does_not_shorten_a_long_one(
    algorithm: AlgorithmName, server: Single, store: LocalStore
) -> None:
    """A rule of seconds does not change the expiry that a rule of hours set for the subject."""
    hours = store.counter([Limit(10, 36_000, algorithm=algorithm)], "hours")
    hours.check("k", 10)
    before = expiries_ms(server)
    seconds = store.counter([Limit(10, 1, algorithm=algorithm)], "seconds")
    seconds.refund("k", 5, seconds.check("k", 5).charged_ns)
    seconds.check("k", 5)
    assert {key: expiries_ms(server).get(key) for key in before} == before
    seconds.grant("k", 5, None)
    seconds.reset("k")
    assert expiries_ms(server) == before
    assert not hours.check("k", 1)


@every_algorithm
@pytest.mark.parametrize(("first", "then"), [(60, 3_600), (3_600, 60)])
def test_a_changed_window_extends_and_never_shortens(
    algorithm: AlgorithmName, first: float, then: float, server: Single, store: LocalStore
) -> None:
    """A limit's longer window extends the expiry at the next check; a shorter one keeps it."""
    store.counter([Limit(10, first, algorithm=algorithm, name="n")], "").check("k", 2)
    before = expiries_ms(server)
    counter = store.counter([Limit(10, then, algorithm=algorithm, name="n")], "")
    times = timed(counter)
    decision = counter.check("k", 2)
    (at_ms,) = expiries_ms(server).values()
    assert at_ms >= max(before.values())
    assert at_ms * NS_PER_MS >= times.now_ns + decision.reset_after_ns


@every_algorithm
@pytest.mark.parametrize(("changed", "remaining"), [(2_000, 1_600), (500, 100), (300, 0)])
def test_a_changed_limit_keeps_the_spent_units(
    algorithm: AlgorithmName, changed: int, remaining: int, store: LocalStore
) -> None:
    """A changed limit changes the remaining units at once, and changing it back restores them."""
    limits = [
        Limit(units, timedelta(days=366), algorithm=algorithm, name="n")
        for units in (1_000, changed)
    ]
    before, after = (store.counter([limit], "") for limit in limits)
    assert before.check("k", 400).remaining == 600
    assert after.peek("k", 0).remaining == remaining
    assert after.check("k", 1).allowed is (remaining > 0)
    assert before.peek("k", 0).remaining == 600 - (remaining > 0)


@every_algorithm
def test_keys_are_gone_soon_after_their_quotas_are_whole(
    algorithm: AlgorithmName, server: Single, store: LocalStore
) -> None:
    """The server is empty about a second after short checks, refunds and grants.

    Each subject then has its full quota.
    """
    counter = store.counter([Limit(10, 0.05, algorithm=algorithm)], "")
    expired = server.admin.info("stats")["expired_keys"]
    for number in range(50):
        counter.check(f"spent {number}", 10)
        counter.check(f"refunded {number}", 10)
        counter.refund(f"refunded {number}", 4, None)
        counter.grant(f"granted {number}", 5, 50 * NS_PER_MS)
    until(
        lambda: server.admin.dbsize() == 0,
        "the server is empty",
        GONE_SECONDS_MAX,
        lambda: f"{server.admin.dbsize()} keys",
    )
    for subject in ("spent 0", "refunded 0", "granted 0"):
        assert counter.peek(subject, 10).remaining == 10
    # A refund after the window deletes its key instead; the other 100 keys expire.
    assert server.admin.info("stats")["expired_keys"] >= expired + 100


@every_algorithm
def test_a_limited_key_is_not_dropped_before_its_quota_comes_back(
    algorithm: AlgorithmName, store: LocalStore
) -> None:
    """Checks of a spent key are denied exactly until the promised time."""
    counter = store.counter([Limit(4, 2, algorithm=algorithm)], "")
    times = timed(counter)
    while (denied := counter.check("k", 4)).allowed:  # once, or twice at the end of a window
        pass
    due_ns = times.now_ns + denied.retry_after_ns

    def passes() -> bool:
        allowed = counter.check("k", 4).allowed
        assert allowed is (times.now_ns >= due_ns)
        return allowed

    until(passes, "the quota has come back", GONE_SECONDS_MAX)
