"""Every key in Redis expires: it has a time to live at all times, long enough and not much longer.

By the server's own clock, which is what Redis drops keys by.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from random import Random

import pytest

from tests.conformance.stores import PATIENCE
from tests.parity.server_times import timed
from tests.redis_servers import Single, until
from tollkeeper import Limit
from tollkeeper.core.model import ALGORITHM_NAMES, AlgorithmName
from tollkeeper.decide.store import Gate, Store
from tollkeeper.decide.stores import open_store

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHM_NAMES)

YEAR = 366 * 86_400
MS_PER_S = 1_000
NS_PER_MS = 1_000_000
US_PER_MS = 1_000
# A busy key's expiry is moved now and then, not each time: it is set so much later than it must be.
SPARE = 1 / 8
SHORTEST_MS = 1_000
# The script adds one, since the server's time within a script is in whole milliseconds too.
ROUNDING_MS = 2
GONE_SECONDS_MAX = 20.0

_numbers = count()


@pytest.fixture(scope="module")
def server() -> Iterator[Single]:
    """One of its own, where every key is a test's."""
    with Single() as started:
        yield started


@pytest.fixture
def store(server: Single) -> Iterator[Store]:
    """Empty, and decided by the server's clock."""
    server.flush()
    opened = open_store(server.uri, **PATIENCE)
    yield opened
    opened.close()


def expiries_ms(server: Single) -> dict[str, int]:
    """When each key expires, in milliseconds since the epoch; -1: never."""
    keys = list(server.admin.scan_iter())
    asking = server.admin.pipeline(transaction=False)
    for key in keys:
        asking.execute_command("PEXPIRETIME", key)
    found = zip(keys, asking.execute(), strict=True)
    return {key: at_ms for key, at_ms in found if at_ms != -2}  # -2: gone since the scan


def lives_ms(server: Single, gate: Gate, cost: int) -> tuple[float, float]:
    """Check a fresh key: for how long its quota is spent, and for how long the server keeps it."""
    times = timed(gate)

    def measured() -> tuple[float, float] | None:
        subject = f"fresh {next(_numbers)}"
        reset_ms = gate.check(subject, cost).reset_after_ns / NS_PER_MS
        at_ms = expiry_ms(server, subject)
        return (reset_ms, at_ms - times.now_ns / NS_PER_MS) if at_ms else None

    # Once more, should this process be held up until a short-lived key is gone.
    return until(measured, "a key that lives to be looked at", GONE_SECONDS_MAX)


def expiry_ms(server: Single, subject: str) -> int:
    """When the subject's key expires; 0: it is gone."""
    found = [at_ms for key, at_ms in expiries_ms(server).items() if f"{{{subject}}}" in key]
    return found[0] if found else 0


@every_algorithm
@pytest.mark.parametrize("per", [0.001, 0.05, 0.7, 1, 3, 60, 86_400, YEAR])
@pytest.mark.parametrize("cost", [1, 7, 10])
def test_a_key_lives_until_its_quota_is_whole_and_an_eighth_longer(
    algorithm: AlgorithmName, per: float, cost: int, server: Single, store: Store
) -> None:
    """Never less, and, beyond a second, at most an eighth more."""
    gate = store.gate([Limit(10, per, algorithm=algorithm)], "")
    reset_ms, lives = lives_ms(server, gate, cost)
    assert lives >= reset_ms
    assert lives <= max((reset_ms + ROUNDING_MS) * (1 + SPARE), SHORTEST_MS) + ROUNDING_MS


def test_a_bucket_that_takes_a_century_lives_as_long(server: Single, store: Store) -> None:
    """The longest refill that a limit may have."""
    gate = store.gate([Limit(1, YEAR, capacity=100)], "")
    reset_ms, lives = lives_ms(server, gate, 100)
    assert reset_ms == pytest.approx(100 * YEAR * MS_PER_S)
    assert reset_ms <= lives <= reset_ms * (1 + SPARE) + ROUNDING_MS


@every_algorithm
def test_the_longest_of_several_limits_decides(
    algorithm: AlgorithmName, server: Single, store: Store
) -> None:
    """The hash lives as long as the one that is whole last."""
    short, long = Limit(10, 5, algorithm=algorithm), Limit(100, 500, algorithm=algorithm)
    slowest = store.gate([long], "both")
    times = timed(slowest)
    for subject, limits in (("k", [short, long]), ("l", [long, short])):
        store.gate(limits, "both").check(subject, 10)
        reset_ns = slowest.peek(subject, 0).reset_after_ns
        assert expiry_ms(server, subject) * NS_PER_MS >= times.now_ns + reset_ns


@every_algorithm
def test_a_grant_lives_until_its_end(
    algorithm: AlgorithmName, server: Single, store: Store
) -> None:
    """By its own ttl or, without one, for a window of the limit; also where nothing was spent."""
    gate = store.gate([Limit(10, 60, algorithm=algorithm)], "")
    for ttl_ms, wanted_ms in ((30_000, 30_000), (None, 60_000), (600_000, 600_000)):
        subject = f"granted {ttl_ms}"
        before_ms = server_ms(server)
        gate.grant(subject, 5, ttl_ms * NS_PER_MS if ttl_ms else None)
        after_ms = server_ms(server)
        at_ms = expiry_ms(server, subject)
        assert at_ms >= before_ms + wanted_ms
        assert at_ms <= after_ms + (wanted_ms + ROUNDING_MS) * (1 + SPARE) + ROUNDING_MS


def server_ms(server: Single) -> float:
    """The server's time."""
    seconds, micros = server.admin.time()
    return float(seconds * MS_PER_S + micros / US_PER_MS)


WINDOWS = (0.002, 0.05, 0.5, 2, 3_600, YEAR)


def random_gate(random: Random, store: Store, algorithm: AlgorithmName) -> Gate:
    """One or two limits under one of two rules, the same ones with other numbers each time."""
    limits = [
        Limit(random.choice((3, 20)), random.choice(WINDOWS), algorithm=algorithm, name=name)
        for name in ("n", "m")[: random.choice((1, 2))]
    ]
    return store.gate(limits, random.choice(("one", "other")))


@every_algorithm
@pytest.mark.parametrize("seed", range(3))
def test_a_key_has_an_expiry_at_all_times(
    algorithm: AlgorithmName, seed: int, server: Single, store: Store
) -> None:
    """After every verb, under limits that change all the time: each key has an expiry, which covers
    what the last answer said and is never earlier than it was."""
    random = Random(seed)
    before: dict[str, int] = {}
    for _ in range(400):
        gate = random_gate(random, store, algorithm)
        times = timed(gate)
        subject = random.choice(("a", "b", "c"))
        cost = random.randint(1, 3)
        verb = random.choices(("check", "peek", "refund", "grant", "reset"), (6, 1, 3, 1, 1))[0]
        needed_ns = 0
        if verb == "check":
            decision = gate.check(subject, cost)
            needed_ns = times.now_ns + decision.reset_after_ns if decision else 0
        elif verb == "grant":
            gate.grant(subject, cost, random.choice((None, 10**6, 10**9)))
        elif verb == "reset":
            gate.reset(subject)
        else:
            getattr(gate, verb)(subject, cost)
        found = expiries_ms(server)
        assert -1 not in found.values(), (verb, gate.limits)
        for key, at_ms in found.items():
            # A key that was emptied and written anew starts anew; else it is never shortened.
            if verb not in ("refund", "reset"):
                assert at_ms >= before.get(key, 0), (verb, gate.limits)
            if f"{{{subject}}}" in key:
                assert at_ms * NS_PER_MS >= needed_ns, (verb, gate.limits)
        before = found


def test_a_busy_key_is_extended_in_time(server: Single, store: Store) -> None:
    """Spent as fast as it goes for two seconds and a half, with a window of one: the expiry, which
    is moved now and then, is never before the quota would be whole."""
    gates = {
        algorithm: store.gate([Limit(100, 1, algorithm=algorithm)], "")
        for algorithm in ALGORITHM_NAMES
    }
    times = {algorithm: timed(gate) for algorithm, gate in gates.items()}
    ends_ms = server_ms(server) + 2_500

    def spent_for_long() -> bool:
        needed_ns = {}
        for algorithm, gate in gates.items():
            reset_ns = gate.check(algorithm, 1).reset_after_ns
            needed_ns[algorithm] = times[algorithm].now_ns + reset_ns
        for key, at_ms in expiries_ms(server).items():
            assert at_ms * NS_PER_MS >= needed_ns[key.partition("{")[2].rstrip("}")], key
        return server_ms(server) > ends_ms

    until(spent_for_long, "time has passed", GONE_SECONDS_MAX)


@every_algorithm
def test_a_short_limit_does_not_shorten_a_long_one(
    algorithm: AlgorithmName, server: Single, store: Store
) -> None:
    """A rule of seconds, used on a subject after a rule of hours, leaves the hour's expiry."""
    hours = store.gate([Limit(10, 36_000, algorithm=algorithm)], "hours")
    hours.check("k", 10)
    before = expiries_ms(server)
    seconds = store.gate([Limit(10, 1, algorithm=algorithm)], "seconds")
    for verb in (seconds.check, seconds.refund, seconds.check):
        verb("k", 5)
    assert expiries_ms(server) == before
    seconds.grant("k", 5, None)
    seconds.reset("k")
    assert expiries_ms(server) == before
    assert not hours.check("k", 1)


@every_algorithm
@pytest.mark.parametrize(("first", "then"), [(60, 3_600), (3_600, 60)])
def test_a_changed_window_extends_and_never_shortens(
    algorithm: AlgorithmName, first: float, then: float, server: Single, store: Store
) -> None:
    """The same limit by name with a longer window lives longer from its next check on; with a
    shorter one as long as before."""
    store.gate([Limit(10, first, algorithm=algorithm, name="n")], "").check("k", 2)
    before = expiries_ms(server)
    gate = store.gate([Limit(10, then, algorithm=algorithm, name="n")], "")
    times = timed(gate)
    decision = gate.check("k", 2)
    (at_ms,) = expiries_ms(server).values()
    assert at_ms >= max(before.values())
    assert at_ms * NS_PER_MS >= times.now_ns + decision.reset_after_ns


@every_algorithm
@pytest.mark.parametrize(("changed", "remaining"), [(2_000, 1_600), (500, 100), (300, 0)])
def test_a_changed_limit_keeps_what_was_spent(
    algorithm: AlgorithmName, changed: int, remaining: int, store: Store
) -> None:
    """Four hundred spent of a thousand: raised there is more, lowered less, at once; and back at a
    thousand it is as it was."""
    limits = [
        Limit(units, timedelta(days=366), algorithm=algorithm, name="n")
        for units in (1_000, changed)
    ]
    before, after = (store.gate([limit], "") for limit in limits)
    assert before.check("k", 400).remaining == 600
    assert after.peek("k", 0).remaining == remaining
    assert after.check("k", 1).allowed is (remaining > 0)
    assert before.peek("k", 0).remaining == 600 - (remaining > 0)


@every_algorithm
def test_keys_are_gone_soon_after_their_quotas_are_whole(
    algorithm: AlgorithmName, server: Single, store: Store
) -> None:
    """Spent, refunded or granted for a moment: the server is empty a second or so later, and each
    key is as one never seen."""
    gate = store.gate([Limit(10, 0.05, algorithm=algorithm)], "")
    expired = server.admin.info("stats")["expired_keys"]
    for number in range(50):
        gate.check(f"spent {number}", 10)
        gate.check(f"refunded {number}", 10)
        gate.refund(f"refunded {number}", 4)
        gate.grant(f"granted {number}", 5, 50 * NS_PER_MS)
    until(
        lambda: server.admin.dbsize() == 0,
        "the server is empty",
        GONE_SECONDS_MAX,
        lambda: f"{server.admin.dbsize()} keys",
    )
    for subject in ("spent 0", "refunded 0", "granted 0"):
        assert gate.peek(subject, 10).remaining == 10
    # A refund that comes after the window deletes the key instead; the other 100 expire.
    assert server.admin.info("stats")["expired_keys"] >= expired + 100


@every_algorithm
def test_a_limited_key_is_not_dropped_before_its_quota_comes_back(
    algorithm: AlgorithmName, store: Store
) -> None:
    """Spent for two seconds and asked all the time: denied until just the time that was named."""
    gate = store.gate([Limit(4, 2, algorithm=algorithm)], "")
    times = timed(gate)
    while (denied := gate.check("k", 4)).allowed:  # once, or twice around the end of a window
        pass
    due_ns = times.now_ns + denied.retry_after_ns

    def passes() -> bool:
        allowed = gate.check("k", 4).allowed
        assert allowed is (times.now_ns >= due_ns)
        return allowed

    until(passes, "the quota has come back", GONE_SECONDS_MAX)
