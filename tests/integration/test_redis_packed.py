"""States of many subjects in one hash: their memory, their expiry, and their independence."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import count
from typing import Any

import pytest

from ratekeeper import AsyncLimiter, Limit, Limiter, StoreFull, StoreUnavailable
from ratekeeper.core.clock import SystemClock
from ratekeeper.core.model import UNIT_ALGORITHMS
from ratekeeper.decide.store import LocalStore
from ratekeeper.decide.stores import open_store
from ratekeeper.decide.stores.redis.codec import BUCKETS, bucket_name
from ratekeeper.decide.stores.redis.config import parse
from ratekeeper.decide.stores.redis.scripts import COUNTS, RuleScripts
from ratekeeper.decide.stores.redis.topology import slot_of
from tests.answering import AnsweringStore
from tests.conformance.stores import PATIENCE, PATIENT
from tests.integration.redis_wires import YEAR, key_of, log_key_of
from tests.redis_servers import Single, until

SECONDS_MAX = 20.0
PACKED: tuple[Any, ...] = tuple(name for name in UNIT_ALGORITHMS if name != "sliding_window_log")
every_packed_algorithm = pytest.mark.parametrize("algorithm", PACKED)


@pytest.fixture(scope="module")
def server() -> Iterator[Single]:
    """Start a server whose keys all belong to these tests."""
    with Single() as started:
        yield started


@pytest.fixture
def store(server: Single) -> Iterator[LocalStore]:
    """Open an empty store that decides by the server's clock."""
    server.flush()
    opened = AnsweringStore(open_store(server.uri, denied_cache_ms=0, **PATIENCE))
    yield opened
    opened.close()


def neighbours(wanted: int) -> list[str]:
    """Return subjects of one bucket."""
    return list(_neighbours()[:wanted])


@cache
def _neighbours() -> tuple[str, ...]:
    """Return five subjects of one bucket, which are found after a second."""
    by_bucket: dict[str, list[str]] = {}
    for number in count():
        found = by_bucket.setdefault(key_of(f"user:{number}"), [])
        found.append(f"user:{number}")
        if len(found) == 5:
            return tuple(found)
    raise AssertionError


def load(server: Single, limit: Limit, subjects: int, buckets: int) -> None:
    """Check subjects once, in that many buckets, as dense as they are with all buckets in use."""
    scripts = RuleScripts((limit,), "api", parse(server.uri), SystemClock())
    server.admin.script_load(COUNTS.text)
    for start in range(0, subjects, 5_000):
        pipeline = server.admin.pipeline(transaction=False)
        for number in range(start, min(start + 5_000, subjects)):
            gate = scripts.place(f"user:{1_000_000 + number}")[1]
            key = b"rk:{%%%b}" % bucket_name(number % buckets)
            cost = 1 + number % 4_000
            pipeline.execute_command("EVALSHA", COUNTS.sha, 1, key, gate, cost)
        pipeline.execute()


@every_packed_algorithm
def test_a_state_of_one_limit_takes_less_than_50_bytes(algorithm: Any, server: Single) -> None:
    """50,000 subjects, as dense as ten million are: by `used_memory`, and by MEMORY USAGE."""
    server.flush()
    subjects = 50_000 if algorithm == "token_bucket" else 5_000
    buckets = BUCKETS * subjects // 10_000_000
    limit = Limit(10_000, per=30 * 86_400, algorithm=algorithm)
    load(server, limit, 1_000, buckets)  # loads the script, and allocates the buffers
    server.flush()
    before = server.admin.info("memory")["used_memory"]
    load(server, limit, subjects, buckets)
    grown = server.admin.info("memory")["used_memory"] - before
    keys = list(server.admin.scan_iter(count=1_000))
    assert len(keys) == buckets
    weighed = sum(server.admin.memory_usage(key) for key in keys[:100]) / len(keys[:100])
    assert weighed * buckets / subjects < 50
    if algorithm == "token_bucket":
        assert grown / subjects < 50
    assert server.admin.object("ENCODING", keys[0]) in {"listpack", "ziplist"}


@every_packed_algorithm
def test_a_full_refund_leaves_no_state(algorithm: Any, server: Single, store: LocalStore) -> None:
    """The quota is untouched again, so the server stores nothing of it."""
    counter = store.counter([Limit(10, per=YEAR, algorithm=algorithm)], "r")
    decision = counter.check("k", 3)
    assert server.admin.keys()
    counter.refund("k", 3, decision.charged_ns)
    assert not server.admin.keys()


def test_several_limits_and_grants_stay_in_the_packed_form(
    server: Single, store: LocalStore
) -> None:
    """A value of more than 64 bytes is cut into pieces, and a refund drops pieces again."""
    limits = [Limit(10**6, per=60 + number, algorithm=PACKED[number % 4]) for number in range(16)]
    counter = store.counter(limits, "many")
    for number in range(8):
        assert counter.check("k", 10_000 + number)
    counter.grant("k", 10**9, None)
    assert counter.peek("k", 0).remaining == 10**6 - 80_028 + 10**9
    assert server.admin.object("ENCODING", key_of("k")) in {"listpack", "ziplist"}
    assert store.stats().states == 16
    counter.reset("k")
    assert server.admin.dbsize() == 0


@every_packed_algorithm
def test_subjects_of_one_bucket_count_apart(
    algorithm: Any, server: Single, store: LocalStore
) -> None:
    """Spending, granting, refunding and resetting one of them changes no other."""
    limit = Limit(10, per=YEAR, algorithm=algorithm)
    counter, other = store.counter([limit], "one"), store.counter([limit], "other")
    spent, granted, reset, untouched = neighbours(4)
    for subject in (spent, granted, reset):
        assert counter.check(subject, 10)
    counter.grant(granted, 3, None)
    counter.reset(reset)
    assert other.check(spent, 1).remaining == 9
    assert len(server.admin.keys()) == 1
    found = {each: counter.peek(each, 0).remaining for each in (spent, granted, reset, untouched)}
    assert found == {spent: 0, granted: 3, reset: 10, untouched: 10}
    counter.refund(spent, 4, None)
    assert counter.peek(spent, 0).remaining == 4
    assert counter.peek(granted, 0).remaining == 3


def test_a_log_has_a_key_of_its_own_in_the_slot_of_the_bucket(
    server: Single, store: LocalStore
) -> None:
    """The other limits of the rule stay in the bucket; one script call decides all of them."""
    log = Limit(10, per=60, algorithm="sliding_window_log")
    store.counter([log, Limit(5, per=60)], "both").check("k", 1)
    bucket, logs = key_of("k"), log_key_of("k", log, "both")
    assert set(server.admin.keys()) == {bucket, logs}
    assert slot_of(bucket.encode()) == slot_of(logs.encode())


@every_packed_algorithm
def test_states_that_have_ended_are_deleted_while_the_bucket_is_in_use(
    algorithm: Any, server: Single, store: LocalStore
) -> None:
    """One busy subject keeps its bucket for a year. The other states disappear, and only those."""
    short = store.counter([Limit(5, per=0.05, algorithm=algorithm)], "short")
    long = store.counter([Limit(10**6, per=YEAR, algorithm=algorithm)], "long")
    busy, idle, *ended = neighbours(5)
    for subject in ended:
        short.check(subject, 5)
    long.check(idle, 7)
    long.check(busy, 1)
    key = key_of(busy)

    def swept() -> bool:
        for _ in range(20):
            long.check(busy, 1)
        return bool(server.admin.hlen(key) == 2)

    until(swept, "the ended states are deleted", SECONDS_MAX, lambda: server.admin.hlen(key))
    assert long.peek(idle, 0).remaining == 10**6 - 7
    assert server.admin.pttl(key) > 0


def test_checks_of_several_rules_delete_states_that_have_ended(
    server: Single, store: LocalStore
) -> None:
    """A request of several rules is one call. It deletes no state that it has just written."""
    short = store.counter([Limit(5, per=0.05)], "short")
    rules = [store.counter([Limit(10**6, per=YEAR)], name) for name in ("one", "two")]
    busy, *ended = neighbours(4)
    for subject in ended:
        short.check(subject, 5)
    key, calls = key_of(busy), 0

    def swept() -> bool:
        nonlocal calls
        for _ in range(20):
            store.check_together([(counter, busy, 1) for counter in (*rules, short)])
            calls += rules[0].peek(busy, 0).remaining == 10**6 - calls - 1
        return bool(server.admin.hlen(key) <= 3)

    until(swept, "the ended states are deleted", SECONDS_MAX, lambda: server.admin.hlen(key))
    assert [counter.peek(busy, 0).remaining for counter in rules] == [10**6 - calls] * 2


def test_new_subjects_delete_states_that_have_ended(server: Single, store: LocalStore) -> None:
    """Clients that come once, with random keys, do not make a bucket grow without end."""
    scripts = RuleScripts((Limit(5, per=0.05),), "", parse(server.uri), SystemClock())
    server.admin.script_load(COUNTS.text)
    key = key_of("k")
    store.counter([Limit(5, per=YEAR)], "").check("k", 5)  # keeps the bucket

    def add(first: int, subjects: int) -> None:
        pipeline = server.admin.pipeline(transaction=False)
        for number in range(first, first + subjects):
            gate = scripts.place(f"user:{number}")[1]
            pipeline.execute_command("EVALSHA", COUNTS.sha, 1, key, gate, 1)
        pipeline.execute()

    add(0, 300)
    before = server.admin.hlen(key)
    assert before > 200
    ended_s = server.admin.time()[0] + 3
    until(lambda: server.admin.time()[0] >= ended_s, "the states have ended", SECONDS_MAX)
    firsts = count(1_000, 50)

    def shrinks() -> bool:
        # One check of eight deletes, by the microsecond of the server's clock. Checks that follow
        # each other at a steady pace may miss it for a while.
        add(next(firsts), 50)
        return bool(server.admin.hlen(key) < before)

    until(shrinks, "more states are deleted than added", SECONDS_MAX)


def test_a_bucket_expires_after_the_last_of_its_states(server: Single, store: LocalStore) -> None:
    """Its expiry is extended by a longer state, and never shortened by a shorter one."""
    subjects = neighbours(3)
    lives = []
    for subject, per in zip(subjects, (60, 3_600, 1), strict=True):
        store.counter([Limit(10, per=per)], "r").check(subject, 10)
        lives.append(server.admin.pttl(key_of(subject)))
    assert 60_000 <= lives[0] <= 70_000
    assert 3_600_000 <= lives[2] <= lives[1] <= 4_052_000
    short = store.counter([Limit(10, per=0.05)], "short")
    server.flush()
    short.check(subjects[0], 10)
    until(lambda: server.admin.dbsize() == 0, "the bucket has expired", SECONDS_MAX)


def test_joint_checks_of_one_bucket_are_all_or_none(store: LocalStore) -> None:
    """Two subjects of one bucket, and one subject twice."""
    counter = store.counter([Limit(2, per=YEAR, algorithm="fixed_window")], "r")
    one, two = neighbours(2)
    assert all(store.check_together([(counter, one, 1), (counter, two, 2), (counter, one, 1)]))
    denied = store.check_together([(counter, one, 1), (counter, f"{one} new", 1)])
    assert not all(denied)
    assert counter.peek(f"{one} new", 0).remaining == 2


def test_the_hash_key_chooses_the_place(server: Single) -> None:
    """Nodes with the same key count together, others apart. The key is not shown."""
    server.flush()
    uris = [f"{server.uri}?hash_key={key}&{PATIENT}" for key in ("s3cret", "s3cret", "other")]
    limiters = [Limiter("5/hour", store=uri) for uri in uris]
    assert [each.check("k").remaining for each in limiters] == [4, 3, 4]
    assert "s3cret" not in repr(parse(uris[0]))
    for each in limiters:
        each.close()


def test_a_log_changes_no_count_of_another_limit(server: Single) -> None:
    """Ten units settled for each request, then a log that is added: a limit of 100 stays used."""
    server.flush()
    uri = f"{server.uri}?{PATIENT}"
    units = Limit(100, per=YEAR, algorithm="fixed_window")
    log = Limit(1_000, per=3_600, algorithm="sliding_window_log")
    with Limiter([units, log], store=uri) as both, Limiter(units, store=uri) as alone:
        served = 0
        while served < 200 and both.check("k"):
            assert both.settle("k", 1, 10).charged == 10
            served += 10
        assert served == 100
        assert alone.peek("k").remaining == 0
        assert alone.check("other", 100)
        assert not both.check("other")


async def test_asyncio_counts_in_the_same_places(server: Single) -> None:
    """Coalesced checks of one subject too."""
    server.flush()
    limiter = AsyncLimiter("100/hour", store=f"{server.uri}?{PATIENT}")
    await asyncio.gather(*(limiter.check("k") for _ in range(60)))
    with Limiter("100/hour", store=f"{server.uri}?{PATIENT}") as threads:
        assert threads.peek("k").remaining == 40
    await limiter.close()


def test_a_key_has_a_bounded_number_of_limits_of_one_name(
    server: Single, store: LocalStore
) -> None:
    """More are rejected. The limits that it has, its other names and its neighbours are decided."""

    def counter(seconds: int, name: str = "one") -> Any:
        return store.counter([Limit(9, per=3_600 + seconds)], name)

    crowded, neighbour = neighbours(2)
    known = 0
    with suppress(StoreFull):
        while known < 1_000:
            assert counter(known).check(crowded, 1)
            known += 1
    with pytest.raises(StoreFull, match="limits of one name"):
        counter(known).check(crowded, 1)
    assert 100 < known < 330
    together = store.check_together([(counter(known), crowded, 1), (counter(0), neighbour, 1)])
    assert isinstance(together[0], StoreFull)
    assert counter(0).peek(neighbour, 1).remaining == 9
    for number in (0, known - 1):
        decisions = [counter(number).check(crowded, 1).allowed for _ in range(9)]
        assert decisions == [True] * 8 + [False]
    assert counter(known, "two").check(crowded, 1)
    assert counter(known).check(neighbour, 1).remaining == 8
    counter(0).reset(crowded)
    assert counter(known).check(crowded, 1)


@pytest.mark.parametrize(
    "algorithms",
    [("token_bucket",), ("sliding_window_log",), ("token_bucket", "sliding_window_log")],
    ids=["bucket", "log", "both"],
)
def test_states_of_another_version_are_refused_and_not_changed(
    server: Single, store: LocalStore, algorithms: tuple[Any, ...]
) -> None:
    """The version is above the time of a state, and in the first byte of a log."""
    limits = [Limit(9, per=3_600, algorithm=name) for name in algorithms]
    prepared = store.counter(limits, "orders")
    prepared.check("k", 1)
    raw = server.client()
    bucket, field = key_of("k"), b""
    if limits[-1].algorithm == "sliding_window_log":
        log = log_key_of("k", limits[-1], "orders")
        raw.setrange(log, 0, b"\x10")
    else:
        [field] = raw.hkeys(bucket)
        value = raw.hget(bucket, field)
        raw.hset(bucket, field, bytes([value[0] | 0x10]) + value[1:])
    before = [raw.dump(key) for key in sorted(raw.keys())]
    for verb in (
        prepared.check,
        prepared.peek,
        lambda subject, units: prepared.refund(subject, units, None),
    ):
        with pytest.raises(StoreUnavailable, match="another version of Ratekeeper"):
            verb("k", 1)
    assert [raw.dump(key) for key in sorted(raw.keys())] == before
    raw.close()


def memory_of(server: Single, limit: Limit, subject: str) -> int:
    return int(server.admin.memory_usage(log_key_of(subject, limit)))


def test_the_memory_of_a_log_follows_its_live_entries(server: Single, store: LocalStore) -> None:
    """A large limit with few units takes few bytes; a burst does not leave its memory behind."""
    limit = Limit(1_000_000, per=0.3, algorithm="sliding_window_log")
    counter = store.counter([limit], "")
    counter.check("k", 1)
    assert memory_of(server, limit, "k") < 300
    counter.check("k", 100_000)
    assert 700_000 < memory_of(server, limit, "k") < 1_000_000

    def small() -> bool:
        counter.check("k", 1)
        return memory_of(server, limit, "k") < 1_000

    until(small, "the burst has left the log", SECONDS_MAX)
